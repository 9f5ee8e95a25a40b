"""State that a step leaves in a module, or a ``batch_idx``, on which the loss of the next micro-batch of a window depends."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_accum.counting import copied
from lightning_accum.errors import UsageError
from lightning_accum.exact import is_dense
from lightning_accum.looks import Checked
from lightning_accum.prove import ALL, Measured
from lightning_accum.splitting.few_rows import FewRows, SplitRows
from lightning_accum.trial import Step, Trial, difference
from lightning_accum.undo import Snapshot, version_of
from lightning_accum.user_warnings import listed
from lightning_accum.verdict import MOST_ROWS, CannotCheckError
from lightning_accum.weighing import advice
from lightning_accum.whole.row_proof import perturbed


def warn_of_state(checked: Checked, trial: Trial, found: FewRows | SplitRows) -> None:
    """Warn of buffers, attributes and a ``batch_idx`` that the loss depends on. Called on all ranks."""
    number = min(found.number, MOST_ROWS)
    half = max(1, number // 2)  # what a step notes of a row, as its last output, changes no other row
    rows = found.whole if isinstance(found, SplitRows) else partial(found.take, range(half))
    others = found.parts[0] if isinstance(found, SplitRows) else partial(found.take, range(number - half, number))
    is_moved = not checked.sync.is_waited_for_in_forward  # a converged buffer (spectral norm) changes with its parameters
    # on another rank the next step may have no loss
    is_told = checked.is_window_long and is_moved and not checked.on_any(trial.mode.has_waited)
    with suppress(CannotCheckError), perturbed(checked.module) if is_moved else nullcontext(), trial.held():
        for what, size in _left_behind(trial, rows, others, checked.next_step if is_told else None).items():
            checked.accumulation.warn_once(advice.of_state(what, size) if what else advice.OF_BATCH_IDX, what)


def warn_of_hooks(checked: Checked, left: Snapshot | None, batches: Sequence[Any]) -> None:
    """Warn of state that hooks have changed since a snapshot, if the loss of the next loader batch of a window depends on it.

    Called on all ranks.
    """
    is_waited_for = checked.sync.is_waited_for_in_forward
    if is_waited_for or checked.on_any(left is None or not batches):
        return
    assert left is not None
    if not checked.on_any(bool(names := left.changed_attributes())):
        return
    trial, batch = checked.trial(), partial(copied, batches[0])
    with suppress(CannotCheckError, UsageError), trial.held():
        trial.restore()
        now = trial.result(batch)
        trial.restore()
        left.restore()
        trial.leave()
        if (size := trial.largest(difference(now, trial.result(batch)))) > trial.tolerance:
            checked.accumulation.changes.stop()
            checked.accumulation.warn_once(advice.of_state(_named("attribute", names), size, "A hook"))


def leaves_nothing(checked: Checked, trial: Trial, whole: Measured) -> bool:
    """Whether a step changes nothing in the module, and a later one has the same loss for the whole. On all ranks."""
    if checked.sync.is_waited_for_in_forward or checked.on_any(whole.function is not None or trial.mode.has_waited):
        return False
    held = [(buffer, version_of(buffer)) for buffer in checked.module.buffers()]  # an equal value may have converged
    trial.leave(whole.rows if whole.total else None, whole.total)
    with suppress(CannotCheckError):  # the step may run only once
        now = trial.result(whole.batch, checked.next_step if checked.is_window_long else None)
        are_others = [a is not b or version_of(a) != then for a, (b, then) in zip(checked.module.buffers(), held, strict=False)]
        is_written = any(are_others) or bool(trial.changed_attributes())  # ``.data`` changes no version
        return trial.largest(math.inf if is_written else difference(now, (whole.loss, {**whole.gradient(ALL)}))) <= trial.tolerance
    return False


def _left_behind(trial: Trial, rows: Callable[[], Any], others: Callable[[], Any], next_step: Step | None) -> dict[str, float]:
    """The state that the loss of ``rows`` depends on after a step on others, in words, and the relative change of the loss.

    The ``batch_idx`` has empty words, and is tried only with ``next_step``, which has another one. Ranks take each step together.
    """
    named = trial.module.named_buffers
    at_first = {name: buffer.detach().clone() for name, buffer in named() if is_dense(buffer)}
    before = trial.result(rows)

    def write(values: Mapping[str, Tensor]) -> None:
        for name, buffer in named():
            if name in values and values[name].shape == buffer.shape:
                buffer.data.copy_(values[name])

    def change(step: Step | None = None) -> float:
        return trial.largest(difference(trial.result(rows, step), before))

    trial.restore()
    trial.result(others)
    after = {name: buffer.detach().clone() for name, buffer in named()}
    buffers = [name for name, old in at_first.items() if name in after and not after[name].equal(old)]
    attributes = [name for name in trial.changed_attributes() if name not in after]
    trial.leave(has_parameters=True)  # a step may write to parameters only once a window, as an attribute notes
    of_all = change(next_step)
    trial.restore()
    write({name: _far(at_first[name], after[name]) for name in buffers})
    of_far = change() if trial.largest(len(buffers)) else 0.0
    if max(of_all, of_far) <= trial.tolerance:
        return {}
    trial.restore()
    if change() > trial.tolerance:
        raise CannotCheckError("training_step returns a different loss for the same rows each time")
    trial.restore()
    write(after)
    found = {_named("buffer", buffers): max(change(), of_far)}
    trial.restore()
    trial.result(others)
    trial.leave()
    write(at_first)
    found[_named("attribute", attributes)] = change()
    trial.restore()
    found[""] = change(next_step)
    return {what: size for what, size in found.items() if size > trial.tolerance}


def _far(before: Tensor, after: Tensor) -> Tensor:
    """The buffer extrapolated by many steps: a loss may compare it with a threshold that it crosses late."""
    return torch.lerp(before, after, 16.0) if after.is_floating_point() and after.shape == before.shape else after


def _named(what: str, names: list[str]) -> str:
    if not names:  # another rank has it, or an object that is not searched
        return "what it keeps in " + ("a buffer" if what == "buffer" else "an attribute")
    return f"the {what}{'s' * (len(names) > 1)} {listed([*map(repr, names)])}"
