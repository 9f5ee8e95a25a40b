"""Whether a module's loss depends on padding: tried out on the module itself, before any is trimmed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accum.denominator import UnreadableLossError
from lightning_accum.graph import read_loss
from lightning_accum.snapshot import Keeper

TrainingStep = Callable[[Any], Any]


def difference_by_padding(
    padded: Any, trimmed: Any, module: nn.Module, keeper: Keeper, training_step: TrainingStep, weigh: Callable[[Any], Any] | None
) -> str | None:
    """Compare the loss of the same rows with and without padding.

    The module runs in evaluation mode, where dropout draws no numbers that would differ by shape, and nothing of it lasts. What is
    compared is the loss as it counts in a window: times its weight.

    Args:
        padded: a few rows as they came.
        trimmed: the same rows with fewer columns.
        module: what runs them.
        keeper: takes back what running them changes.
        training_step: runs the module on one of both.
        weigh: tells the weight of a batch; None to read it from the loss.

    Returns:
        None where the losses are the same but for rounding, else what was seen.
    """
    snapshot = keeper.take()
    found: list[tuple[float, float]] = []
    try:
        for batch in (padded, trimmed):
            snapshot.restore()
            module.eval()
            found.append(_loss_in_window(training_step(batch), batch, weigh))
    except Exception as error:
        return f"{'without' if found else 'with'} it, training_step raises {type(error).__name__}: {error}"
    finally:
        snapshot.restore()
    (with_padding, eps), (without, _) = found
    # sums of other lengths round otherwise, by more than one unit in the last place
    rounding = max([eps, *(torch.finfo(p.dtype).eps for p in module.parameters() if p.is_floating_point())]) ** 0.7
    if abs(with_padding - without) <= rounding * max(abs(with_padding), abs(without)):
        return None
    return f"{with_padding:.9g} with it, {without:.9g} without"


def _loss_in_window(output: Any, batch: Any, weigh: Callable[[Any], Any] | None) -> tuple[float, float]:
    """The loss times its weight, and the relative size of its last place."""
    loss = output["loss"] if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        return 0.0, 0.0
    weight: Any = 1.0
    if weigh is not None:
        weight = weigh(batch)
    else:
        with suppress(UnreadableLossError):  # said later, with what to do about it
            reading = read_loss(loss)
            weight = 1.0 if reading.weight is None else reading.weight
    return loss.item() * float(weight), torch.finfo(loss.dtype).eps
