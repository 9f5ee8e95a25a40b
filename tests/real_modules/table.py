"""What a row of the table is, how it is measured, and the data that rows are made of."""

import math
import pkgutil
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any, Literal, TypeVar

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import default_collate

from lightning_accum import AccumulationError, AccumulationWarning, GradientAccumulation
from lightning_accum.testing import EXACT, adamw, compare_window_with_batch, sgd

How = Literal["windows", "split"]
Module = TypeVar("Module", bound=type[LightningModule])


@dataclass(frozen=True)
class Exact:  # parameters and shown losses are those of the full batch, for SGD and AdamW, with no argument or with these
    argument: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Refused:
    """An error of this type before the first optimizer step, and exact with the arguments of ``mend``."""

    error: type[Exception] = AccumulationError
    mend: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Warned:  # an AccumulationWarning that names this, before or at the first optimizer step
    of: str = ""
    deviation: float = 0.0


@dataclass(frozen=True)
class Crashed:  # another exception, or one of this package's after the first optimizer step
    error: str = ""


@dataclass(frozen=True)
class Silent:  # not exact, without a warning
    deviation: float = math.inf


Expected = Exact | Refused | Warned
Outcome = Expected | Crashed | Silent


@dataclass(frozen=True, eq=False)
class Row:  # a module, its data, and what should happen
    name: str  # is unique
    like: str  # the kind of public repository that it is shaped after
    make: Callable[[], LightningModule]  # with the same parameters at each call
    batches: Callable[[], list[list[Any]]]  # rows of loader batches, unequally many; two are a window, or one that is split
    collate: Callable[[Any], Any] = default_collate
    windows: Expected = Exact()  # what should happen in windows of two loader batches
    split: Expected = Exact()  # and with ``micro_batch``
    optimizers: Sequence[Any] = (sgd, adamw)  # made of parameters; None is the module's own
    micro_batch: Any = 2  # of split batches
    trainer: Mapping[str, Any] = field(default_factory=dict)  # further arguments

    def expected(self, how: How) -> Expected:
        return self.windows if how == "windows" else self.split


_TABLE: list[Row] = []


def real_module(like: str, batches: Callable[[], list[list[Any]]], **fields: Any) -> Callable[[Module], Module]:
    """Add the decorated module to the table, under the words of its class's name. ``fields`` are those of a Row."""

    def add(module: Module) -> Module:
        def make() -> LightningModule:
            torch.manual_seed(0)
            return module()

        name = "".join(f" {letter.lower()}" if letter.isupper() else letter for letter in module.__name__).strip()
        _TABLE.append(Row(**{"name": name, "like": like, "make": make, "batches": batches, **fields}))
        return module

    return add


class RealModule(LightningModule):
    """Its networks are made by ``build``."""

    def __init__(self) -> None:
        super().__init__()
        self.build()

    def build(self) -> None: ...


@cache
def rows() -> list[Row]:  # all rows of the modules in this folder
    for found in pkgutil.iter_modules([str(Path(__file__).parent)]):
        if not found.name.startswith("__"):
            import_module(f"real_modules.{found.name}")
    return list(_TABLE)


# --- what happens ------------------------------------------------------------------------------------------------------
class _Steps(Callback):
    """Counts the steps that begin: before the first of them an error must come, and at the first of them a warning."""

    def __init__(self) -> None:
        self.begun = 0

    def on_before_optimizer_step(self, *_: Any) -> None:
        self.begun += 1


def measure(row: Row, how: How, arguments: Mapping[str, Any] | None = None) -> Outcome:
    """What happens in windows, or in split batches, with no argument or with those of GradientAccumulation.

    With ``window=1`` the two loader batches of a window are one.
    """
    batches, given = row.batches(), dict(arguments or {})
    if how == "split" or given.get("window") == 1:
        batches = [[row for one in batches[start : start + 2] for row in one] for start in range(0, len(batches), 2)]
    policy = GradientAccumulation(**({"window": 2, **given} if how == "windows" else {"micro_batch": row.micro_batch, **given}))
    found = happens(row.make, batches, policy, row.optimizers, collate=row.collate, trainer=row.trainer)
    return Exact(given) if isinstance(found, Exact) else found


def happens(
    make: Any, batches: Any, policy: Any, optimizers: Sequence[Any], limit: float = EXACT, compares_losses: bool = True,
    trainer: Any = None, **arguments: Any,
) -> Outcome:  # fmt: skip
    """What windows of a module come to, against their full batches: with arguments of ``compare_window_with_batch``."""
    messages: list[str] = []
    deviation = 0.0
    for optimizer in optimizers:
        steps = _Steps()

        def note(message: Any, category: type, *_: Any, steps: _Steps = steps, **__: Any) -> None:
            if issubclass(category, AccumulationWarning) and steps.begun <= 1:
                messages.append(str(message))

        both = {**(trainer or {}), "callbacks": [steps, *(trainer or {}).get("callbacks", [])]}
        with warnings.catch_warnings():
            warnings.simplefilter("always")
            warnings.showwarning = note
            torch.manual_seed(1)
            try:
                found = compare_window_with_batch(make, batches, policy, optimizer=optimizer, trainer=both, **arguments)
            except AccumulationError as error:
                return Crashed(f"late {type(error).__name__}: {error}") if steps.begun else Refused(type(error), _named_by(error))
            except Exception as error:
                return Crashed(f"{type(error).__name__}: {error}")
        losses, steps_differ = found.losses if compares_losses else 0.0, found.steps[0] != found.steps[1]
        deviation = max(deviation, found.parameters, losses, math.inf if steps_differ else 0.0)
    if messages:
        return Warned("\n".join(messages), deviation)
    return Exact() if deviation <= limit else Silent(deviation)


def _named_by(error: AccumulationError) -> dict[str, Any]:  # the mend of an error that was tried out before it was named
    found = re.search(r"GradientAccumulation\(1, (.*?)\), which was tried", str(error))
    return eval(f"dict(window=1, {found[1]})") if found else {}


def holds(row: Row, how: How, measured: Outcome) -> bool:
    """Whether what was measured is what should happen, or better than refused. A mend that a refusal names is tried, or ours."""
    expected = row.expected(how)
    if isinstance(expected, Refused) and not isinstance(measured, Exact):
        is_refused = isinstance(measured, Refused) and issubclass(measured.error, expected.error)
        return is_refused and isinstance(measure(row, how, measured.mend or expected.mend), Exact)
    if isinstance(expected, Warned):
        return isinstance(measured, Warned) and expected.of.lower() in measured.of.lower()
    return isinstance(measured, Exact)


# --- data --------------------------------------------------------------------------------------------------------------
def dealt(row: Callable[[torch.Generator], Any], *sizes: int, seed: int = 0) -> Callable[[], list[list[Any]]]:
    """Loader batches of unequal sizes. ``row`` makes one of random numbers: those of noise are part of it."""

    def batches() -> list[list[Any]]:
        generator = torch.Generator().manual_seed(seed)
        return [[row(generator) for _ in range(size)] for size in sizes or (3, 2, 4, 2, 3)]

    return batches


def randint(low: int, high: int, generator: torch.Generator) -> int:
    """From ``low`` to ``high``, both included."""
    return int(torch.randint(low, high + 1, (), generator=generator))


def padded(fill: Mapping[str, float] | None = None) -> Callable[[Sequence[Mapping[str, Tensor]]], dict[str, Tensor]]:
    """A collate function of dicts, which pads each entry to its longest in the first dimension, with 0 or what is given."""

    def collate(rows: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        batch = {}
        for name in rows[0]:
            values = [torch.as_tensor(row[name]) for row in rows]
            batch[name] = pad_sequence(values, True, (fill or {}).get(name, 0)) if values[0].ndim else torch.stack(values)
        return batch

    return collate
