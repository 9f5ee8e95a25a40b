"""What the package raises about a user's program has one base, and a name to be caught by; so have its warnings."""

from __future__ import annotations

import pickle
import re
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from support import Scalar, trainer, x
from torch import Tensor, nn

import lightning_accum
from lightning_accum import (
    AccumulationError,
    BalancedBatchSampler,
    DoesNotAddUpError,
    GradientAccumulation,
    RowWiseError,
    Tokens,
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
}
"""What is raised, and no error about a user's program."""
ROOT = Path(lightning_accum.__file__).parent
FILES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
RAISED = re.compile(r"\b(?:raise|raise \w+ or) (?:\w+\.)*(_?[A-Z]\w*)|-> (?:\w+\.)*(\w+Error)\b")
"""A class that is raised, or what a function makes that is."""


def kinds_of(error: type[AccumulationError]) -> Iterator[type[AccumulationError]]:
    yield error
    for derived in error.__subclasses__():
        yield from kinds_of(derived)


@pytest.fixture(scope="module")
def kinds() -> set[type[AccumulationError]]:
    """Those of all files but two: one needs an extra, the other is for programs that import Lightning's other package."""
    for file in FILES.keys() - {"ray.py", "pytorch_lightning.py"}:
        import_module(".".join(["lightning_accum", *Path(file).with_suffix("").parts]).removesuffix(".__init__"))
    return set(kinds_of(AccumulationError))


def test_every_error_about_a_program_is_of_the_base(kinds: set[type[AccumulationError]]) -> None:
    seen = [(file, "".join(names)) for file, text in FILES.items() for names in RAISED.findall(text)]
    assert len(seen) > 200
    others = [(file, name) for file, name in seen if name not in {kind.__name__ for kind in kinds}]
    assert {name for _, name in others} == set(OTHERS)  # none too many
    of_trials = {file for file, name in others if name == "RuntimeError"}
    assert of_trials == {"splitting/trimming.py", "verification/processes.py"}


def test_every_error_goes_from_process_to_process_with_its_message(kinds: set[type[AccumulationError]]) -> None:
    assert len(kinds) > 15
    for kind in kinds:
        error = kind("seen")
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))
        assert "seen" in str(again)


# --- by their public names ----------------------------------------------------------------------------------------------


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
    "a number of tokens": (lambda: Tokens(0), AccumulationError, ValueError),
    "lengths": (lambda: BalancedBatchSampler(["a"], 2), AccumulationError, TypeError),
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
