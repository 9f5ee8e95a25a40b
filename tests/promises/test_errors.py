"""What the package raises about a user's program has one base, and a name to be caught by; so have its warnings."""

from __future__ import annotations

import ast
import builtins
import pickle
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any, get_type_hints

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from support import Scalar, trainer, x
from torch import Tensor, nn

import lightning_accum
from lightning_accum import (
    AccumulationError,
    AccumulationWarning,
    BalancedBatchSampler,
    DoesNotAddUpError,
    GradientAccumulation,
    RowWiseError,
    SeamError,
    Tokens,
    UnreadableLossError,
    UnsplittableBatchError,
    verify,
)

PUBLIC = (
    AccumulationError,
    AccumulationWarning,
    DoesNotAddUpError,
    RowWiseError,
    SeamError,
    UnreadableLossError,
    UnsplittableBatchError,
)

# --- every raise of the package -----------------------------------------------------------------------------------------

OTHERS = {
    "ArgumentTypeError": "argparse's, of which it makes its own message",
    "AttributeError": "a module has no such name",
    "CannotCheckError": "caught: why the check has no answer, which is printed",
    "GathersError": "caught, as CannotCheckError is",
    "ImportError": "an extra is not installed",
    "ModuleNotFoundError": "an extra is not installed",
    "NotImplementedError": "of a method that derived classes have",
    "RuntimeError": "caught two lines on, or by what runs a trial: it is reported in words",
    "SIGTERMException": "Lightning's, for a signal",
    "StepTakenError": "caught: ends a fit of verify after its step",
    "UnsuitableRowsError": "caught, as CannotCheckError is",
    "_EmptyWindowError": "caught: ends the step of an optimizer",
}
"""What is raised, and no error about a user's program."""
NOT_IMPORTED = ("ray.py", "pytorch_lightning.py")
"""One needs an extra, the other is for programs that import Lightning's other package."""
ROOT = Path(lightning_accum.__file__).parent
FILES = [path.relative_to(ROOT).as_posix() for path in sorted(ROOT.rglob("*.py"))]


def names_of(file: str) -> dict[str, Any]:
    if file in NOT_IMPORTED:
        return vars(builtins)
    module = ".".join(["lightning_accum", *Path(file).with_suffix("").parts]).removesuffix(".__init__")
    return {**vars(builtins), **vars(import_module(module))}


def found(node: ast.expr, names: dict[str, Any]) -> Any:
    """What an expression such as ``seams.broken`` is; None for a local variable."""
    if isinstance(node, ast.Attribute):
        return getattr(found(node.value, names), node.attr, None)
    return names.get(node.id) if isinstance(node, ast.Name) else None


def raised(file: str) -> Iterator[tuple[int, type]]:
    """The line and the class of each error. Errors in variables, which were raised before, are left out."""
    names = names_of(file)
    for statement in ast.walk(ast.parse((ROOT / file).read_text(encoding="utf-8"))):
        if not isinstance(statement, ast.Raise) or statement.exc is None:
            continue
        for node in statement.exc.values if isinstance(statement.exc, ast.BoolOp) else [statement.exc]:
            made = found(node.func if isinstance(node, ast.Call) else node, names)
            if made is None:
                assert not isinstance(node, ast.Call), f"{file}, line {statement.lineno}: {ast.unparse(node)}"
            elif isinstance(made, type):
                yield statement.lineno, made
            elif "return" in (hints := get_type_hints(made)):  # a function that makes the error
                yield statement.lineno, hints["return"]


def test_every_error_about_a_program_is_of_the_base() -> None:
    seen = {f"{file}, line {line}": error for file in FILES for line, error in raised(file)}
    assert len(seen) > 250
    others = {place: error.__name__ for place, error in seen.items() if not issubclass(error, AccumulationError)}
    assert {place: name for place, name in others.items() if name not in OTHERS} == {}
    assert set(OTHERS) == set(others.values())  # none too many
    assert {place.split(",")[0] for place, name in others.items() if name == "RuntimeError"} == {
        "splitting/trimming.py",
        "verification/processes.py",
    }


def kinds_of(error: type[AccumulationError]) -> Iterator[type[AccumulationError]]:
    yield error
    for derived in error.__subclasses__():
        yield from kinds_of(derived)


def test_every_error_goes_from_process_to_process_with_its_message() -> None:
    for file in FILES:
        names_of(file)  # which imports it
    kinds = set(kinds_of(AccumulationError))
    assert len(kinds) > 15
    for kind in kinds:
        error = kind("seen")
        again = pickle.loads(pickle.dumps(error))
        assert type(again) is kind
        assert str(again) == str(error)
        assert "seen" in str(again)
        assert vars(again) == vars(error)


# --- by their public names ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", PUBLIC, ids=lambda kind: kind.__name__)
def test_it_has_a_public_name(kind: type) -> None:
    assert getattr(lightning_accum, kind.__name__) is kind
    assert kind.__name__ in dir(lightning_accum)
    assert issubclass(kind, UserWarning if kind is AccumulationWarning else AccumulationError)


class Compares(Scalar):
    """Each sample with all others of its batch."""

    def loss(self, x: Tensor) -> Tensor:
        return -((self.w + 1) * x[:, None] * x).log_softmax(1).diagonal().mean()


class Normalises(Scalar):
    """By the statistics of its batch, in a submodule."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.net = nn.Sequential(nn.BatchNorm1d(1), nn.Linear(1, 1)).double()

    def loss(self, x: Tensor) -> Tensor:
        return (self.w * self.net(x[:, None])).square().mean()


class Hidden(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, losses: Tensor) -> Tensor:
        ctx.size = losses.numel()
        return losses.mean() + losses.max() - losses.max().detach() + torch.rand(())

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.expand(ctx.size) / ctx.size


class Hides(Scalar):
    """What its loss was divided by."""

    def loss(self, x: Tensor) -> Tensor:
        return Hidden.apply(self.w * x)


ROWS = [x(1, 2, 3, 4), x(2, 3, 5, 7)]


def train(module: pl.LightningModule, *args: Any, strategy: str = "accum", **kwargs: Any) -> None:
    trainer(strategy, callbacks=[GradientAccumulation(*args, **kwargs)]).fit(module)


CASES: dict[str, tuple[Callable[[], Any], type[AccumulationError], type[Exception]]] = {
    "an argument": (lambda: GradientAccumulation(2, tail="keep"), AccumulationError, MisconfigurationException),
    "arguments that exclude each other": (
        lambda: GradientAccumulation(2, split=lambda batch, size: [batch]), AccumulationError, MisconfigurationException,
    ),
    "a Trainer": (lambda: train(Scalar(ROWS), 2, strategy="auto"), AccumulationError, MisconfigurationException),
    "a number of tokens": (lambda: Tokens(0), AccumulationError, ValueError),
    "lengths": (lambda: BalancedBatchSampler(["a"], 2), AccumulationError, TypeError),
    "nothing to verify": (lambda: verify(Scalar(ROWS)), AccumulationError, MisconfigurationException),
    "a name of a submodule": (lambda: train(Scalar(ROWS), 2, row_wise="encoder"), AccumulationError, MisconfigurationException),
    "no submodule": (lambda: train(Scalar(ROWS), row_wise="auto", micro_batch=2), AccumulationError, MisconfigurationException),
    "a submodule": (lambda: train(Normalises(ROWS), micro_batch=2, row_wise="net"), RowWiseError, RuntimeError),
    "a contrastive loss": (lambda: train(Compares(ROWS), 2), DoesNotAddUpError, ValueError),
    "a loss that hides its mean": (lambda: train(Hides(ROWS), 2, check=False), UnreadableLossError, ValueError),
    "a batch": (lambda: train(Scalar([{"text": "words"}]), micro_batch=2), UnsplittableBatchError, ValueError),
    "what a step returns": (lambda: train(Scalar(ROWS), 2, weight=lambda batch: -1), AccumulationError, ValueError),
    "a loss of inf": (lambda: train(Scalar([x(1, float("inf"))]), on_nonfinite="raise"), AccumulationError, FloatingPointError),
}  # fmt: skip
"""What is wrong, the error's public name, and what it was caught by before it had one."""


@pytest.mark.filterwarnings("ignore::lightning_accum.AccumulationWarning")
@pytest.mark.parametrize("case", CASES)
def test_what_is_wrong_is_caught_by_its_name_or_by_the_type_it_is(case: str) -> None:
    use, name, kind = CASES[case]
    with pytest.raises(name) as caught:
        use()
    assert isinstance(caught.value, kind)
    again = pickle.loads(pickle.dumps(caught.value))
    assert (type(again), str(again)) == (type(caught.value), str(caught.value))
