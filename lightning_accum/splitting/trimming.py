"""Whether what a module learns depends on padding: tried out on the module itself, before any is trimmed."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_accum.dispatch import in_eager_mode
from lightning_accum.errors import UnreadableLossError
from lightning_accum.exact import exact, rounding_of_gradients
from lightning_accum.splitting.memory import free, is_out_of_memory
from lightning_accum.splitting.proofs import Inconclusive, Verdict
from lightning_accum.trial_mode import TrialMode
from lightning_accum.undo import Undo
from lightning_accum.weighing.terms import Denominator
from lightning_accum.weighing.weight import weight_alone
from lightning_accum.wider import is_narrow, widened, widened_batch

TrainingStep = Callable[[Any], Any]


class _Found(NamedTuple):
    """What a few rows contribute to a window: a mean loss, its weight, and the gradient of their product."""

    loss: float
    weight: float
    gradient: list[Tensor | None]
    eps: float

    @property
    def is_finite(self) -> bool:
        """Whether all of it is."""
        numbers = math.isfinite(self.loss) and math.isfinite(self.weight)
        return numbers and all(bool(g.to_dense().isfinite().all()) for g in self.gradient if g is not None)


def difference_by_padding(
    padded: Any,
    *trimmed: Any,
    module: nn.Module,
    snapshotter: Undo,
    training_step: TrainingStep,
    weigh: Callable[[Any], Any] | None,
) -> Verdict:
    """Compare the loss, its weight and its gradient for the same rows with and without padding.

    The modules below ``module`` run in evaluation mode, where dropout draws no numbers that would differ by shape, and in single
    precision where their own is lower, so that rounding is no difference. Nothing of it lasts, and nothing in it waits for other
    ranks, which may have nothing to try.

    Returns:
        None where all is the same but for rounding, else what was seen.
    """
    trial = _Trial(module, snapshotter, training_step, weigh)
    if trial.is_narrow:
        with suppress(Exception), widened(module, torch.float32):  # memory may run out
            verdict = trial.compare(*(widened_batch(batch, torch.float32) for batch in (padded, *trimmed)))
            if not isinstance(verdict, Inconclusive):
                return verdict
    return trial.compare(padded, *trimmed)  # some modules run in their own precision only


class _Trial:
    """Runs batches as if they had never been there."""

    def __init__(
        self, module: nn.Module, snapshotter: Undo, training_step: TrainingStep, weigh: Callable[[Any], Any] | None
    ) -> None:
        self._module, self._snapshotter, self._training_step, self._weigh = module, snapshotter, training_step, weigh
        self._alone = _Alone(module.parameters())
        self.is_narrow = any(is_narrow(parameter) for parameter in module.parameters())

    def compare(self, padded: Any, *trimmed: Any) -> Verdict:
        """What the rows give with their padding and without it, as one batch or as several."""
        found: list[_Found] = []
        inconclusive = self._run((padded, *trimmed), found)
        if inconclusive is not None:
            if inconclusive.reason is _OUT_OF_MEMORY:
                free(self._snapshotter.device)  # here the error that held on to what was allocated is gone
            if len(found) in (0, len(trimmed) + 1) or inconclusive.reason is _OUT_OF_MEMORY:
                return inconclusive
            return f"without it, {inconclusive.reason}"
        with_padding, without = found[0], _added_up(found[1:])
        if not (with_padding.is_finite or without.is_finite):
            return Inconclusive("its loss or gradient is not finite")
        # sums of other lengths round otherwise, by more than one unit in the last place; gradients by more than losses
        eps = [torch.finfo(p.dtype).eps for p in self._module.parameters() if p.is_floating_point()]
        most = max([with_padding.eps, *eps])
        seen = _difference(with_padding, without, most)
        if seen is None or not (most >= torch.finfo(torch.float16).eps or self._alone.has_narrow):
            return seen
        return Inconclusive(f"{seen}, which may be rounding in lower precision")

    def _run(self, batches: Sequence[Any], found: list[_Found]) -> Inconclusive | None:
        if held := self._snapshotter.iterators():
            return Inconclusive(f"the module holds an iterator, {held[0]}, and what is drawn from it cannot be put back")
        snapshot = self._snapshotter.take(watches_parameters=False)
        try:
            for batch in batches:
                snapshot.restore()
                self._alone.restore()
                for child in self._module.children():
                    child.eval()
                with self._alone, in_eager_mode():
                    found.append(_contribution(self._training_step(batch), batch, self._module, self._weigh))
        except Exception as error:
            if is_out_of_memory(error):
                return Inconclusive(_OUT_OF_MEMORY)
            reason = f"training_step raises {type(error).__name__}: {error}"
            return Inconclusive(reason if found else f"with it, {reason}", needs_trimming=not found)
        finally:
            self._alone.restore()
            snapshot.restore()
        return None


_OUT_OF_MEMORY = "memory ran out"


def _added_up(parts: Sequence[_Found]) -> _Found:
    """What several batches contribute together."""
    if len(parts) == 1:
        return parts[0]
    weight = sum(part.weight for part in parts)
    loss = sum(part.loss * part.weight for part in parts) / (weight or 1.0)
    gradients = [[g for g in of_one if g is not None] for of_one in zip(*(part.gradient for part in parts), strict=True)]
    total = [torch.stack([g.to_dense() for g in given]).sum(0) if given else None for given in gradients]
    return _Found(loss, weight, total, max(part.eps for part in parts))


def _contribution(output: Any, batch: Any, module: nn.Module, weigh: Callable[[Any], Any] | None) -> _Found:
    loss = output["loss"] if isinstance(output, Mapping) else output
    if not isinstance(loss, Tensor):
        return _Found(0.0, 0.0, [], 0.0)
    weight: Any = 1.0
    value: Denominator = loss.detach()
    with suppress(UnreadableLossError):  # said later, with what to do about it
        read, found = weight_alone(loss)
        weight = 1.0 if read is None else read
        if found is not None:
            value = found.of_mean(loss).mean
            found.leave_out(loss)
    if weigh is not None:
        weight = weigh(batch)
    trained = [parameter for parameter in module.parameters() if parameter.requires_grad]
    gradient = torch.autograd.grad(loss * float(weight), trained, allow_unused=True) if loss.requires_grad else []
    return _Found(float(value), float(weight), list(gradient), torch.finfo(loss.dtype).eps)


def _difference(padded: _Found, trimmed: _Found, eps: float) -> str | None:
    for name, with_padding, without in [("loss", padded.loss, trimmed.loss), ("weight", padded.weight, trimmed.weight)]:
        if not abs(with_padding - without) <= eps**0.7 * max(abs(with_padding), abs(without)):
            return f"its {name} is {with_padding:.9g} with it, {without:.9g} without"
    pairs = [(a, b) for a, b in zip(padded.gradient, trimmed.gradient, strict=True) if a is not None or b is not None]
    size = sum(float(exact(g).square().sum()) for pair in pairs for g in pair if g is not None) ** 0.5
    difference = sum(float(exact(_minus(a, b)).square().sum()) for a, b in pairs) ** 0.5
    if not difference <= rounding_of_gradients(eps) * size:
        return f"its gradient differs by {difference / size:.2g} of its size"
    return None


def _minus(a: Tensor | None, b: Tensor | None) -> Tensor:
    if a is None or b is None:
        given = b if a is None else a
        assert given is not None
        return given
    return a.to_dense() - b.to_dense()


class _Alone(TrialMode):  # type: ignore[no-untyped-call]  # of its __init_subclass__
    """Stops what would wait for other ranks, and notes whether anything is computed in less than single precision."""

    has_narrow = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError("it waits for other ranks, which may have no padding to try")
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.has_narrow |= isinstance(result, Tensor) and is_narrow(result)
        return result
