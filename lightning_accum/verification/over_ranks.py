"""Whether a window over ranks takes the step that it takes in one process; and where not, which rank is off and by what factor."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from lightning_accum.engine import Engine
from lightning_accum.user_warnings import listed
from lightning_accum.verification.data import Comparison
from lightning_accum.verification.examination import Diagnosis
from lightning_accum.verification.measure import (
    Difference,
    Tensors,
    are_close,
    common_factor,
    factor_of_numbers,
    factors_that_fit,
    flat,
    in_a_list,
    is_close,
    is_near,
    is_rounding,
    is_same_number,
    is_same_step,
    minus,
    only,
    orderable,
    sum_of,
    times,
    weights_that_fit,
)
from lightning_accum.verification.ranks import steps_over_ranks
from lightning_accum.verification.report import Break
from lightning_accum.verification.step import StepRunner
from lightning_accum.verification.watch import Step


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
    breaks: list[Break] = field(default_factory=list)

    def __post_init__(self) -> None:
        change, batches = self.alone.change, self.comparison.batches
        shares = [list(batches[rank :: self.ranks]) for rank in range(self.ranks)]
        self.tolerance = self.alone.tolerance
        self.steps = steps_over_ranks(self.runner, shares, self.strategy, change)
        self.parts = [self.runner.share(share, change) for share in shares]
        full = self.alone.full
        by_rank = [Difference.between(step.gradients, full.gradients) for step in self.steps]
        worst = max(range(self.ranks), key=lambda rank: orderable(by_rank[rank].largest))
        self.worst, self.gradient = self.steps[worst], by_rank[worst]
        self.update = Difference.between(_way(self.worst), _way(full))
        if not all(difference.largest <= self.tolerance for difference in by_rank):
            self._find_breaks(full, by_rank)
        else:
            self._check_step(full)

    @property
    def is_equal(self) -> bool:
        """Whether every rank took the full batch's step."""
        return not self.breaks

    @property
    def loss(self) -> float:
        """Of the window over all ranks; NaN where the strategy does not know it."""
        return self.worst.loss if self._is_of_this_package else math.nan

    @property
    def _is_of_this_package(self) -> bool:
        return isinstance(self.strategy, Engine) or str(self.strategy).startswith("accum")

    @property
    def strategy_in_words(self) -> str:
        """Its name, or its class."""
        return self.strategy if isinstance(self.strategy, str) else type(self.strategy).__name__

    # --- gradients ------------------------------------------------------------------------------------------------------

    def _find_breaks(self, full: Step, by_rank: Sequence[Difference]) -> None:
        if (found := self._break_before_step(full)) is not None:
            self._note(found)
            return
        if of_losses := list(self._breaks_of_losses()):
            for one in of_losses:
                self._note(one)
            return
        if all(is_near(step.of_backward, full.of_backward, self.tolerance) for step in self.steps):
            factor = common_factor(self.worst.gradients, full.gradients)
            text = "The gradients are the full batch's when they have been reduced, and others when the optimizer gets them" + (
                f": {times(factor)} as large." if factor is not None else "."
            )
            self._note(("after the reduction", text, "Look for hooks around the step that go by the rank or the number of ranks."))
            return
        self._note(self._break_of_reduction(full, by_rank))

    def _break_before_step(self, full: Step) -> tuple[str, str, str] | None:
        """What differs before anything was computed."""
        off = {
            rank: [name for name, before in step.before.items() if not is_close(before, full.before.get(name), self.tolerance)]
            for rank, step in enumerate(self.steps)
        }
        if any(off.values()):
            return (
                "parameters before the step",
                f"{self._on(off)} not those of one process.",
                "Make them from the same random numbers on every rank (seed_everything with one seed), or load one checkpoint.",
            )
        return None

    def _breaks_of_losses(self) -> Iterator[tuple[str, str, str]]:
        """A rank whose micro-batches have other losses than in one process."""
        off = []
        for rank, (step, part) in enumerate(zip(self.steps, self.parts, strict=True)):
            if len(step.losses) != len(part.losses):
                yield (
                    "micro-batches of a rank",
                    f"Rank {rank} has {len(step.losses)} micro-batches with a loss, and one process has {len(part.losses)} on the"
                    " same rows.",
                    "Have training_step return a loss, or None, by what is in the batch, and not by the rank.",
                )
            elif not all(is_same_number(a, b, self.tolerance) for a, b in zip(step.losses, part.losses, strict=True)):
                off.append(rank)
        if not off:
            return
        buffers = {
            rank: [n for n, b in self.steps[rank].buffers_before.items() if not is_close(b, self.parts[rank].buffers_before.get(n))]
            for rank in off
        }
        seeds = [step.seed for step in self.steps]
        first = off[0]
        pairs = zip(self.steps[first].losses, self.parts[first].losses, strict=True)
        own, alone = next(pair for pair in pairs if not is_same_number(*pair, self.tolerance))
        losses = f"{own:.9g} on rank {first}, {alone:.9g} in one process"
        factors = [factor_of_numbers(self.steps[rank].losses, self.parts[rank].losses) for rank in off]
        if any(buffers.values()):
            yield (
                "buffers of a rank",
                f"{self._on(buffers)} not those of one process, and so are the losses of the same rows ({losses}).",
                "Set buffers from the same numbers on every rank, or have the strategy broadcast them (broadcast_buffers=True).",
            )
        elif all(factor is not None for factor in factors):
            listing = ", ".join(f"rank {rank}: {times(factor)}" for rank, factor in zip(off, factors, strict=True) if factor)
            same = len(off) == self.ranks and len({round(factor or 0, 9) for factor in factors}) == 1
            yield (
                "loss of all ranks" if same else "loss of a rank",
                f"The losses of the same rows are multiples of those in one process ({listing})"
                f"{self._group(factors[0]) if same else ''}.",
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
                f"From the same rows rank{'s' * (len(off) > 1)} {', '.join(map(str, off))} {'have' if len(off) > 1 else 'has'}"
                f" another loss ({losses}).",
                "Look for what goes by the rank in training_step, such as random numbers or attributes that were set by it.",
            )

    def _break_of_reduction(self, full: Step, by_rank: Sequence[Difference]) -> tuple[str, str, str]:
        """The losses are right, so what becomes of their gradients is not."""
        shares = self._shares(full)
        views = [Difference.between(step.of_backward, full.of_backward).by_name for step in self.steps]
        bad = [name for name in full.of_backward if any(not view[name] <= self.tolerance for view in views)]
        if shares is None:
            return self._unknown(bad, [])
        factors = [
            factors_that_fit([only(share, bad) for share in shares], only(step.of_backward, bad), self.tolerance)
            for step in self.steps
        ]
        if None not in factors and self._is_own_only([factor for factor in factors if factor is not None]):
            what = (
                "no parameter is" if len(bad) == len(full.of_backward) else f"{listed(bad)} {'are' if len(bad) > 1 else 'is'} not"
            )
            return (
                "reduction of a parameter",
                f"Each rank has the gradients of its own rows alone: {what} reduced over the ranks.",
                "Look for parameters that DistributedDataParallel was told to ignore, that were added after it was set up, or that"
                " no group reduces.",
            )
        if len(bad) < len(full.of_backward):
            name = "reduction of a parameter"
            where = f"In the gradients of {listed(bad)}, unlike in the others, "
        else:
            name, where = "", ""
        if factors[0] is not None and all(f is not None and are_close(f, factors[0]) for f in factors):
            name_of_factors, text, mend = self._in_words(factors[0])
            return name or name_of_factors, where + text if not where else where + text[0].lower() + text[1:], mend
        if None not in factors:
            text = "; ".join(f"on rank {rank} they count {in_a_list(factor)}" for rank, factor in enumerate(factors) if factor)
            return (
                name or "ranks that differ",
                f"{where}The ranks' rows count otherwise on each rank: {text}.",
                "Reduce the same gradients over the same process group on every rank.",
            )
        return self._unknown(bad, shares)

    def _unknown(self, bad: Sequence[str], shares: Sequence[Tensors]) -> tuple[str, str, str]:
        worst = max(orderable(Difference.between(step.of_backward, self.alone.full.of_backward).overall) for step in self.steps)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            eps = torch.finfo(dtype).eps
            if eps / 16 < worst <= eps and all(is_rounding(step.of_backward, shares, eps) for step in self.steps):
                return (
                    "precision of the reduction",
                    f"Gradients are off by {worst:.1e} of their size, as if they were rounded to {str(dtype)[6:]} on the way:"
                    " losses are right.",
                    "Reduce in the type of the gradients: leave out the hook that compresses them, or reduce_dtype.",
                )
        mend = "Look for hooks on gradients, and communication hooks, that go by the rank."
        if not self._is_of_this_package:
            mend = (
                f"{self.strategy_in_words} may take the mean of the means of micro-batches, whatever their sizes, as Lightning's"
                f' strategies do: strategy="accum_ddp" takes the step of the full batch. Otherwise: {mend[0].lower()}{mend[1:]}'
            )
        return (
            "gradients of the ranks",
            f"The losses are right on every rank, and no multiples of the ranks' gradients add up to those of {listed(bad)}.",
            mend,
        )

    def _shares(self, full: Step) -> list[dict[str, Tensor]] | None:
        """What each rank adds to the gradient of the full batch; None where that is no multiple of what it has by itself."""
        parts = [part.of_backward for part in self.parts]
        weights = [part.total_weight or 0.0 for part in self.parts]
        guesses = [[1.0] * self.ranks]
        if sum(weights) > 0:
            guesses.insert(0, [weight / sum(weights) for weight in weights])
        fit = weights_that_fit(torch.stack([flat(part) for part in parts], 1), flat(full.of_backward))
        if fit.left <= 10 * self.tolerance and len(fit.weights):
            guesses.append(fit.weights.tolist())
        for guess in guesses:
            shares = [
                {name: w * gradient.double() for name, gradient in part.items()} for w, part in zip(guess, parts, strict=True)
            ]
            if is_near(sum_of(shares), full.of_backward, 10 * self.tolerance):
                return shares
        return None

    def _is_own_only(self, factors: Sequence[Sequence[float]]) -> bool:
        own = [factor[rank] for rank, factor in enumerate(factors) if len(factor) == self.ranks]
        others = [f for rank, factor in enumerate(factors) for other, f in enumerate(factor) if other != rank]
        return len(own) == self.ranks and all(abs(f) < 1e-6 for f in others) and all(abs(f) > 1e-6 for f in own)

    def _in_words(self, factors: Sequence[float]) -> tuple[str, str, str]:
        """Of one factor for each rank; of a single one, where they cannot be distinguished."""
        same = max(factors) - min(factors) <= 1e-6 * max(map(abs, factors))
        if same:
            return (
                "scale over the ranks",
                f"The gradient is {times(factors[0])} the full batch's{self._group(factors[0])}: "
                + ("the rows of all ranks count alike." if len(factors) > 1 else "on this data ranks cannot be told apart."),
                "Divide once, by the weights of all ranks: average in the reduction, and scale the loss nowhere.",
            )
        sizes = [part.total_weight or 1.0 for part in self.parts]
        means = [factor * size for factor, size in zip(factors, sizes, strict=True)]
        if max(means) - min(means) <= 1e-6 * max(map(abs, means)):
            return (
                "mean over ranks of means",
                f"Each rank counts as much as any other, whatever its rows weigh ({in_a_list(sizes)}): their rows count"
                f" {in_a_list(factors)} times as much as they should.",
                'strategy="accum_ddp" weighs them; or have every rank hold the same weight.',
            )
        normal = sorted(factors)[len(factors) // 2] if self.ranks > 2 else min(factors, key=lambda f: abs(f - 1))
        base = 1.0 if any(abs(f - 1) < 1e-6 for f in factors) else normal
        off = [rank for rank, factor in enumerate(factors) if abs(factor / base - 1) > 1e-6]
        each = ", ".join(f"rank {rank} {times(factors[rank])}" for rank in range(self.ranks))
        gone = [rank for rank in off if abs(factors[rank]) < 1e-9]
        return (
            f"rank {off[0]}" if len(off) == 1 else "ranks that count otherwise",
            f"The rows of the ranks do not count alike: {each}." + (f" Those of rank {gone[0]} are left out." if gone else ""),
            "Look for what multiplies gradients or losses by the rank, and for samples that more than one rank has.",
        )

    def _group(self, factor: float | None) -> str:
        """Which size of a process group, or number of micro-batches, a factor may be."""
        sizes = {
            "the number of ranks": float(self.ranks),
            "the loader batches in a window": float(len(self.comparison.batches) // self.ranks),
        }
        for name, size in sizes.items():
            for power, what in (
                (1, f"{name} is multiplied by once too often, or not divided by"),
                (-1, f"{name} is divided by once too often"),
            ):
                if factor is not None and size > 1 and math.isclose(factor, size**power, rel_tol=1e-6):
                    return f" ({what})"
        return ""

    # --- what comes after -----------------------------------------------------------------------------------------------

    def _check_step(self, full: Step) -> None:
        """Given the gradients of the ranks, does the full batch's step end where theirs did?"""
        replay = self.runner.full(self.comparison.full, self.alone.change, gradients=self.worst.gradients)
        for rank, step in enumerate(self.steps):
            is_near = Difference.between(*map(_way, (step, full))).largest <= self.tolerance
            if not is_near and not is_same_step(step.after, replay.after, replay.before):
                off = [n for n, after in step.after.items() if not is_close(after, replay.after[n], self.tolerance)]
                self._note(
                    (
                        f"optimizer step of rank {rank}",
                        f"Rank {rank} has the gradient of the full batch, and its step moves {listed(off)} elsewhere.",
                        "Compare what configure_optimizers and the hooks around the step do on each rank.",
                    )
                )

    def _note(self, found: tuple[str, str, str]) -> None:
        name, text, mend = found
        self.breaks.append(Break(name, text, self.gradient.largest, None, mend))

    def _on(self, names: Mapping[int, Sequence[str]]) -> str:
        ranks = [rank for rank, held in names.items() if held]
        held = list(dict.fromkeys(name for rank in ranks for name in names[rank]))
        where = "all ranks" if len(ranks) == self.ranks else f"rank{'s' * (len(ranks) > 1)} {', '.join(map(str, ranks))}"
        return f"On {where} {listed(held)} {'are' if len(held) > 1 else 'is'}"


def _way(step: Step) -> dict[str, Tensor]:
    return minus(step.after, step.before)
