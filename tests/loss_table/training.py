"""What becomes of a loss in a window, and where its batch is split: against its batch, by hand."""

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from support import loader, trainer
from torch import Tensor

from lightning_accum import AccumulationError, AccumulationWarning, GradientAccumulation
from loss_table.rows import Batch, Kind, Loss, Trained, data, part

WINDOW = (2, 5, 1, 4)
MICRO_BATCH = 5
WAYS = ("windows", "split")


class Outcome(NamedTuple):
    word: str  # "exact", "refused" (before the first step), "warned", "wrong" (without a word) or "crashed" (another error)
    deviation: float  # of the gradients from those of the whole batch; nan where there was no step
    said: str  # the error or the warning
    is_exact: bool = False  # the deviation is one of rounding


def by_hand(loss: Loss, batches: Sequence[Batch]) -> Trained:  # train on whole batches, without the package
    module = Trained(loss)
    steps = module.configure_optimizers()
    for batch in batches:
        steps.zero_grad()
        loss = module.loss(batch)
        (loss["loss"] if isinstance(loss, dict) else loss).backward()
        module.on_before_optimizer_step(steps)
        steps.step()
    return module


def micro_batches(batches: Iterable[Batch], way: str) -> list[Batch]:  # as the loader of a way yields the rows of whole batches
    if way == "split":
        return list(batches)
    ends = [sum(WINDOW[: index + 1]) for index in range(len(WINDOW))]
    return [part(batch, end - size, end) for batch in batches for size, end in zip(WINDOW, ends, strict=True)]


def examine(loss: Loss, way: str) -> Outcome:  # train with a Trainer, and compare with the whole batch
    batch, module = data(loss), Trained(loss)
    policy = {"micro_batch": MICRO_BATCH} if way == "split" else {"window": len(WINDOW)}
    run = trainer(callbacks=[GradientAccumulation(**policy, weight=loss.weight)])
    return outcome(module, by_hand(loss, [batch]), lambda: run.fit(module, loader(micro_batches([batch], way))))


def outcome(module: Trained, expected: Trained, fit: Any) -> Outcome:
    """Run ``fit``, and say what it did."""
    before_first: list[str] = []

    def note() -> None:
        if not module.gradients:
            before_first.extend(str(each.message) for each in caught if issubclass(each.category, AccumulationWarning))

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module.before_step = note
        try:
            fit()
        except Exception as error:
            is_ours = not module.gradients and isinstance(error, AccumulationError)
            return Outcome("refused" if is_ours else "crashed", math.nan, f"{type(error).__name__}: {error}")
    if not module.gradients:  # a window that was left out has no step
        note()
    found = deviation(module.gradients, expected.gradients)
    is_exact = found <= module.row.limit
    word = "warned" if before_first else "exact" if is_exact else "wrong"
    return Outcome(word, found, " / ".join(before_first), is_exact)


def deviation(found: Sequence[Sequence[Tensor]], expected: Sequence[Sequence[Tensor]]) -> float:
    """The largest over steps and parameters; a parameter's small gradient is compared with a hundredth of all of it."""
    if len(found) != len(expected):
        return math.inf
    worst = 0.0
    for ours, theirs in zip(found, expected, strict=True):
        overall = math.sqrt(sum(float(gradient.square().sum()) for gradient in theirs))
        for gradient, reference in zip(ours, theirs, strict=True):
            size = max(float(reference.norm()), 1e-2 * overall)
            difference = float((gradient - reference).norm())
            if not difference <= worst * size:
                worst = difference / size if size else math.inf
            if math.isnan(difference):
                return math.nan
    return worst


def faults(loss: Loss, outcomes: Mapping[Any, Outcome]) -> set[str]:
    """What is not as it should be, of the outcomes of its trainings.

    ``"silent"`` (wrong without a word), ``"refused"`` (an error, though the loss adds up and no reason for it is known),
    ``"false alarm"`` (a warning, though the training was exact), ``"crashed"``, ``"not exact"`` (told of, though the loss adds
    up), ``"adds up"`` (exact, though the table says that no weight helps), ``"not refused"`` (though a reason is known).
    """
    found, adds_up = set(), loss.kind is Kind.ADDS_UP
    for word, _, _, is_exact in outcomes.values():
        seen = {
            "silent": word == "wrong",
            "crashed": word == "crashed",
            "refused": word == "refused" and adds_up and not loss.refused,
            "false alarm": word == "warned" and is_exact,
            "not exact": word == "warned" and adds_up and not is_exact,
            "adds up": word == "exact" and loss.kind is Kind.BATCH,
        }
        found |= {fault for fault, holds in seen.items() if holds}
    if loss.refused and all(outcome.word != "refused" for outcome in outcomes.values()):
        found.add("not refused")
    return found
