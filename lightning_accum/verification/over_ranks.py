"""Whether a window over ranks takes the step that it takes in one process; and where not, which rank is off and by what factor."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_accum.user_warnings import listed
from lightning_accum.verification.data import Comparison
from lightning_accum.verification.examination import Diagnosis
from lightning_accum.verification.measure import (
    Difference,
    common_factor,
    difference,
    factors_that_fit,
    flat,
    is_rounding,
    is_same_step,
    weights_that_fit,
)
from lightning_accum.verification.ranks import is_of_this_package, steps_over_ranks
from lightning_accum.verification.report import Break
from lightning_accum.verification.step import StepRunner
from lightning_accum.verification.watch import Step

_Found = tuple[str, str, str]
"""The name of a break, what was seen, and what mends it."""


@dataclass
class OverRanks:
    """Runs a window over ranks, and compares it with the full batch.

    Args:
        comparison: the full batch, and the loader batches of all ranks in the order in which ranks take turns.
        alone: what was found in one process, where the steps are equal.
    """

    runner: StepRunner
    comparison: Comparison
    alone: Diagnosis
    ranks: int
    strategy: str | Strategy

    def __post_init__(self) -> None:
        change, batches = self.alone.change, self.comparison.batches
        shares = [list(batches[rank :: self.ranks]) for rank in range(self.ranks)]
        self.tolerance, self.full = self.alone.tolerance, self.alone.full
        self.steps = steps_over_ranks(self.runner, shares, self.strategy, change)
        self.parts = [self.runner.accumulated(share, change) for share in shares]
        by_rank = [Difference.between(step.gradients, self.full.gradients) for step in self.steps]
        worst = max(range(self.ranks), key=lambda rank: by_rank[rank].largest)
        self.worst, self.gradient = self.steps[worst], by_rank[worst]
        self.update = Difference.between(self.worst.way, self.full.way)
        is_equal = self.gradient.largest <= self.tolerance
        stages = [self._of_step] if is_equal else [self._before_step, self._of_losses, self._after_reduction, self._of_reduction]
        found = next(filter(None, (list(stage()) for stage in stages)), [])  # what comes later follows from the first
        self.breaks = [Break(name, text, self.gradient.largest, None, mend) for name, text, mend in found]

    @property
    def is_equal(self) -> bool:
        """Whether every rank took the full batch's step."""
        return not self.breaks

    @property
    def loss(self) -> float:
        """Of the window over all ranks; NaN where the strategy does not know it."""
        return self.worst.loss if is_of_this_package(self.strategy) else math.nan

    @property
    def strategy_in_words(self) -> str:
        """Its name, or its class."""
        return self.strategy if isinstance(self.strategy, str) else type(self.strategy).__name__

    # --- one stage of a step after the other ------------------------------------------------------------------------------

    def _before_step(self) -> Iterator[_Found]:
        if off := self._differing(lambda step: step.before):
            yield (
                "parameters before the step",
                f"{off} not those of one process.",
                "Make them from the same random numbers on every rank (seed_everything with one seed), or load one checkpoint.",
            )

    def _of_losses(self) -> Iterator[_Found]:
        """The losses of the same rows are others than in one process."""
        off: dict[int, Tensor] = {}
        for rank, (step, part) in enumerate(zip(self.steps, self.parts, strict=True)):
            own, alone = (torch.tensor(losses, dtype=torch.float64) for losses in (step.losses, part.losses))
            if len(own) != len(alone):
                yield (
                    "micro-batches of a rank",
                    f"Rank {rank} has {len(own)} micro-batches with a loss, and one process has {len(alone)} on the same rows.",
                    "Have training_step return a loss, or None, by what is in the batch, and not by the rank.",
                )
            elif not torch.allclose(own, alone, rtol=16 * self.tolerance, atol=0.0, equal_nan=True):
                off[rank] = torch.stack((own, alone), 1)
        if not off:
            return
        first, pairs = next(iter(off.items()))
        own_loss, loss = next((a, b) for a, b in pairs.tolist() if not math.isclose(a, b, rel_tol=16 * self.tolerance))
        losses = f"{own_loss:.9g} on rank {first}, {loss:.9g} in one process"
        factors = {rank: _round_factor(*pairs.unbind(1)) for rank, pairs in off.items()}
        seeds = [step.seed for step in self.steps]
        if buffers := self._differing(lambda step: step.buffers_before):
            yield (
                "buffers of a rank",
                f"{buffers} not those of one process, and so are the losses of the same rows ({losses}).",
                "Set buffers from the same numbers on every rank, or have the strategy broadcast them (broadcast_buffers=True).",
            )
        elif None not in factors.values():
            listing = ", ".join(f"rank {rank}: {factor:.6g} times" for rank, factor in factors.items())
            same = len(off) == self.ranks and len(set(factors.values())) == 1
            yield (
                "loss of all ranks" if same else "loss of a rank",
                f"The losses of the same rows are multiples of those in one process ({listing})"
                f"{self._group(factors[first] or 0.0) if same else ''}.",
                "Return the loss as one process would: the strategy sums over ranks, and divides once.",
            )
        elif len(set(seeds)) > 1:
            yield (
                "seeds of the ranks",
                f"Random numbers were seeded otherwise on each rank ({', '.join(map(str, seeds))}), and the losses of the same rows"
                f" are others than in one process ({losses}).",
                "Draw what all rows share from a generator with the same seed on every rank.",
            )
        else:
            yield (
                "loss of a rank",
                f"From the same rows {_ranks(list(off))} {'have' if len(off) > 1 else 'has'} another loss ({losses}).",
                "Look for what goes by the rank in training_step, such as random numbers or attributes that were set by it.",
            )

    def _after_reduction(self) -> Iterator[_Found]:
        if all(Difference.between(step.of_backward, self.full.of_backward).largest <= self.tolerance for step in self.steps):
            factor = common_factor(flat(self.worst.gradients), flat(self.full.gradients))
            yield (
                "after the reduction",
                "The gradients are the full batch's when they have been reduced, and others when the optimizer gets them"
                + ("." if factor is None else f": {factor:.6g} times as large."),
                "Look for hooks around the step that go by the rank or the number of ranks.",
            )

    def _of_reduction(self) -> Iterator[_Found]:
        """The losses are right, so what becomes of their gradients is not."""
        full = self.full.of_backward
        views = [Difference.between(step.of_backward, full).by_name for step in self.steps]
        bad = [name for name in full if any(not view[name] <= self.tolerance for view in views)]
        found, parts = ([flat({name: step.of_backward[name] for name in bad}) for step in of] for of in (self.steps, self.parts))
        weights = self._weights()
        shares = None if weights is None else torch.stack(parts, 1) * weights
        factors = [] if shares is None else [factors_that_fit(shares, one, self.tolerance) for one in found]
        # of each rank, how often the rows of each count
        known = [factor.where(factor.abs() > 1e-9, 0.0) for factor in factors if factor is not None]
        where = "" if len(bad) == len(full) else f"In the gradients of {listed(bad)}, unlike in the others: "
        if len(known) < self.ranks:
            yield self._unknown(bad, found, shares)
        elif all(len(one) == self.ranks and one[rank] and one.count_nonzero() == 1 for rank, one in enumerate(known)):
            what = f"{listed(bad)} {'are' if len(bad) > 1 else 'is'} not" if where else "no parameter is"
            yield (
                "reduction of a parameter",
                f"Each rank has the gradients of its own rows alone: {what} reduced over the ranks.",
                "Look for parameters that DistributedDataParallel was told to ignore, that were added after it was set up, or that"
                " no group reduces.",
            )
        elif all(len(one) == len(known[0]) and torch.allclose(one, known[0], 1e-6, 1e-9) for one in known):
            name, text, mend = self._of_factors(known[0].tolist())
            yield "reduction of a parameter" if where else name, where + text, mend
        else:
            text = "; ".join(f"on rank {rank} they count {_in_a_list(one.tolist())}" for rank, one in enumerate(known))
            yield (
                "reduction of a parameter" if where else "ranks that differ",
                f"{where}The ranks' rows count otherwise on each rank: {text}.",
                "Reduce the same gradients over the same process group on every rank.",
            )

    def _of_step(self) -> Iterator[_Found]:
        """Given the gradients of the ranks, does the full batch's step end where theirs did?"""
        replay = self.runner.full(self.comparison.full, self.alone.change, gradients=self.worst.gradients)
        for rank, step in enumerate(self.steps):
            is_near = Difference.between(step.way, self.full.way).largest <= self.tolerance
            if not is_near and not is_same_step(step.after, replay.after, replay.before):
                off = [n for n, after in step.after.items() if difference(after, replay.after[n]) > self.tolerance]
                yield (
                    f"optimizer step of rank {rank}",
                    f"Rank {rank} has the gradient of the full batch, and its step moves {listed(off)} elsewhere.",
                    "Compare what configure_optimizers and the hooks around the step do on each rank.",
                )

    # --- what becomes of the gradients of the ranks -----------------------------------------------------------------------

    def _weights(self) -> Tensor | None:
        """With which the gradients of what each rank has add up to the full batch's; None where no weights do."""
        pieces, full = torch.stack([flat(part.of_backward) for part in self.parts], 1), flat(self.full.of_backward)
        fit = weights_that_fit(pieces, full)
        if not fit.left <= 10 * self.tolerance:
            return None
        weights = fit.weights if len(fit.weights) else torch.tensor([part.total_weight or 0.0 for part in self.parts]).double()
        factor = common_factor(full, pieces @ weights)
        return None if factor is None else weights * factor

    def _of_factors(self, factors: Sequence[float]) -> _Found:
        """Of one factor for each rank; of a single one, where they cannot be distinguished."""
        if _are_alike(factors):
            return (
                "scale over the ranks",
                f"The gradient is {factors[0]:.6g} times the full batch's{self._group(factors[0])}: "
                + ("the rows of all ranks count alike." if len(factors) > 1 else "on this data ranks cannot be told apart."),
                "Divide once, by the weights of all ranks: average in the reduction, and scale the loss nowhere.",
            )
        sizes = [part.total_weight or 1.0 for part in self.parts]
        if _are_alike([factor * size for factor, size in zip(factors, sizes, strict=True)]):
            return (
                "mean over ranks of means",
                f"Each rank counts as much as any other, whatever its rows weigh ({_in_a_list(sizes)}): their rows count"
                f" {_in_a_list(factors)} times as much as they should.",
                'strategy="accum_ddp" weighs them; or have every rank hold the same weight.',
            )
        usual = min(factors, key=lambda factor: abs(factor - 1))
        off = [rank for rank, factor in enumerate(factors) if not math.isclose(factor, usual, rel_tol=1e-6)]
        gone = [rank for rank in off if factors[rank] == 0]
        each = ", ".join(f"rank {rank} {factor:.6g} times" for rank, factor in enumerate(factors))
        return (
            f"rank {off[0]}" if len(off) == 1 else "ranks that count otherwise",
            f"The rows of the ranks do not count alike: {each}." + (f" Those of {_ranks(gone)} are left out." if gone else ""),
            "Look for what multiplies gradients or losses by the rank, and for samples that more than one rank has.",
        )

    def _unknown(self, bad: Sequence[str], found: Sequence[Tensor], shares: Tensor | None) -> _Found:
        worst = max(Difference.between(step.of_backward, self.full.of_backward).overall for step in self.steps)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            eps = torch.finfo(dtype).eps
            if shares is not None and eps / 16 < worst <= eps and all(is_rounding(one, shares, eps) for one in found):
                return (
                    "precision of the reduction",
                    f"Gradients are off by {worst:.1e} of their size, as if they were rounded to {str(dtype)[6:]} on the way:"
                    " losses are right.",
                    "Reduce in the type of the gradients: leave out the hook that compresses them, or reduce_dtype.",
                )
        mend = "Look for hooks on gradients, and communication hooks, that go by the rank."
        if not is_of_this_package(self.strategy):
            mend = (
                f"{self.strategy_in_words} may take the mean of the means of micro-batches, whatever their sizes, as Lightning's"
                f' strategies do: strategy="accum_ddp" takes the step of the full batch. Otherwise: {mend[0].lower()}{mend[1:]}'
            )
        return (
            "gradients of the ranks",
            f"The losses are right on every rank, and no multiples of the ranks' gradients add up to those of {listed(bad)}.",
            mend,
        )

    # --- in words -------------------------------------------------------------------------------------------------------

    def _differing(self, tensors_of: Callable[[Step], Mapping[str, Tensor]]) -> str:
        """Which tensors are others than in one process, and on which ranks; empty where none is."""
        off = [
            (rank, name)
            for rank, (step, part) in enumerate(zip(self.steps, self.parts, strict=True))
            for name, tensor in tensors_of(step).items()
            if difference(tensor, tensors_of(part).get(name)) > self.tolerance
        ]
        ranks, names = list(dict.fromkeys(rank for rank, _ in off)), list(dict.fromkeys(name for _, name in off))
        where = "all ranks" if len(ranks) == self.ranks else _ranks(ranks)
        return f"On {where} {listed(names)} {'are' if len(names) > 1 else 'is'}" if off else ""

    def _group(self, factor: float) -> str:
        """Which size of a process group, or number of micro-batches, a factor may be."""
        window = len(self.comparison.batches) // self.ranks
        for name, size in (("the number of ranks", self.ranks), ("the loader batches in a window", window)):
            if size > 1 and math.isclose(factor, size, rel_tol=1e-6):
                return f" ({name} is multiplied by once too often, or not divided by)"
            if size > 1 and math.isclose(factor * size, 1, rel_tol=1e-6):
                return f" ({name} is divided by once too often)"
        return ""


def _round_factor(found: Tensor, expected: Tensor) -> float | None:
    """A whole number, or one over it, that all numbers are multiplied by; None where there is none."""
    factors = found / expected
    factor = float(factors[0])
    is_one = bool(torch.allclose(factors, factors[:1], 1e-9, 0.0))
    is_round = is_one and any(math.isclose(f, round(f), rel_tol=1e-9) for f in (factor, 1 / factor if factor else 0.0))
    return float(f"{factor:.9g}") if is_round else None


def _are_alike(numbers: Sequence[float]) -> bool:
    return max(numbers) - min(numbers) <= 1e-6 * max(map(abs, numbers))


def _ranks(ranks: Sequence[int]) -> str:
    return f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"


def _in_a_list(factors: Sequence[float]) -> str:
    return ", ".join(f"{factor:.6g}" for factor in factors)
