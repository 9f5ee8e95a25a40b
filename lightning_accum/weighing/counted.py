"""Terms of a loss with different weights, which are counted over a window before it runs.

A loss is often a sum of means over different counts: a cross entropy over tokens and an error over samples. In the full batch, term
``t`` has the gradient ``sum_i d_ti g_ti / sum_i d_ti``, where ``d_ti`` is its denominator in micro-batch ``i``. So the gradient of
each term is multiplied by ``d_ti / sum_i d_ti`` in the backward of its micro-batch, and the sums are known before the first
backward: each micro-batch has run forward once without a backward, or explicit weights have counted its batch. If a window is one
micro-batch on each rank, the ranks only exchange their weights.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import chain
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.overrides import TorchFunctionMode

from lightning_accum.ranks import Ranks
from lightning_accum.weighing.terms import Denominator, Term, quotient
from lightning_accum.weighing.weight import Contribution


class Counted:
    """The weight of each term of a window, over all micro-batches and ranks.

    Args:
        keys: the keys of the terms, the same on all ranks. New terms are added when they appear.
        ranks: the ranks of the window.
        is_listed: whether listed weights count batches, which may have no loss in training.
    """

    def __init__(self, keys: Sequence[int], ranks: Ranks, is_listed: bool) -> None:
        self.keys, self.is_listed, self._ranks = [*keys], is_listed, ranks
        self._noted = TermValues()
        self.constants: dict[int, float] = {}
        """The constant in the weights of each term, such as the 1e-8 of ``sum / (count + 1e-8)``."""
        self.discard()

    def discard(self) -> None:
        """The window has ended."""
        self._own: dict[int, Denominator] = {}
        self._totals: dict[int, Denominator] | None = None
        self.loader_batches_left = 0.0
        """How many loader batches a window of tokens still has."""
        self.values: deque[dict[int, Denominator] | None] = deque()
        """The values of the terms of each counted micro-batch; None if unknown."""

    @property
    def is_agreed(self) -> bool:
        """Whether the window is counted, over all ranks."""
        return self._totals is not None

    @property
    def totals(self) -> list[float] | None:
        """The counts over window and ranks, in the order of :attr:`keys`; None before the first micro-batch."""
        return None if self._totals is None else [float(self._totals[key]) for key in self.keys]

    def restore(self, totals: Sequence[float]) -> None:
        """Resume inside a window with these :attr:`totals`."""
        self._totals = dict(zip(self.keys, totals, strict=True))

    def add(self, weights: OfTerms) -> None:
        """Count a micro-batch before it runs. The weight of a sum is None."""
        self._add(self._own, weights)

    def _add(self, so_far: dict[int, Denominator], weights: OfTerms) -> None:
        for key, weight in weights.items():
            constant, own = self.constants.get(key, 0.0), 0.0 if weight is None else weight
            if constant:
                own = torch.where(own == 0, own, own - constant) if isinstance(own, Tensor) else own - constant if own else own
            so_far[key] = so_far.get(key, 0.0) + own

    def first(self) -> float:
        """The weight of the first term on this rank so far."""
        return float(self._own.get(next(iter(self.keys or sorted(self._own)), 0), 0.0))

    def agree(self) -> None:
        """Sum over the ranks, once in a window. Called on all of them, before the first backward."""
        if self._totals is not None:
            return
        of_ranks: list[Any] = [self._own]
        if self._ranks.size > 1:
            of_ranks *= self._ranks.size
            own = {key: float(weight) for key, weight in self._own.items()}
            dist.all_gather_object(of_ranks, own, group=self._ranks.group)
        self.keys = [*dict.fromkeys(chain(self.keys, *map(sorted, of_ranks)))]  # terms that are new on some rank
        self._totals = {key: sum(own.get(key, 0.0) for own in of_ranks) for key in self.keys}

    def noting_values(self) -> AbstractContextManager[Any]:
        """The context of a forward. If it is the whole window, its terms are counted inside."""
        self._noted = TermValues()
        return nullcontext() if self.is_agreed else self._noted

    def weigh(self, loss: Tensor, weights: OfTerms, terms: Sequence[Term]) -> tuple[list[Denominator], Tensor]:
        """The gradient factors of the terms of a micro-batch, and its summand in the loss of the window."""
        if not self.is_agreed:  # the window is this micro-batch, on each rank
            self.add(weights)
            self.values.append(self._noted.of(loss, terms))
        self.agree()
        factors = self._factors(weights)
        return [factors[term.key] for term in terms], self._shown(loss, factors)

    def _factors(self, weights: OfTerms) -> dict[int, Denominator]:
        assert self._totals is not None
        of_all = {key: self._totals.get(key, 0.0) + self.constants.get(key, 0.0) for key in weights}
        return {key: 1.0 if weight is None else quotient(weight, of_all[key]) for key, weight in weights.items()}

    def _shown(self, loss: Tensor, factors: Mapping[int, Denominator]) -> Tensor:
        """If the values of terms are unknown, the loss is weighted by the first term."""
        values = self.values.popleft() if self.values and factors else None  # a loss without terms was not counted
        total = torch.zeros_like(loss)
        for key, value in (values or {next(iter(factors), 0): loss.detach()}).items():
            factor = factors.get(key, 0.0)
            if isinstance(factor, Tensor) or factor:
                total = total + factor * value
        return total.detach()

    def compared(self, contributions: Sequence[Contribution]) -> list[Denominator]:
        """Compare the terms that ran on this rank with the counted ones.

        Returns:
            The relative difference, 0 if unknown. For each term, in the order of :attr:`keys`: its number of micro-batches, and the
                sums of their constant factors and of the squares; a factor of 0 is unknown.
        """
        run: dict[int, Denominator] = {}
        factors: dict[int, list[Denominator]] = {}
        numbers: dict[int, set[int]] = {}
        for contribution in contributions:
            weights = contribution.of_terms or {}
            self._add(run, weights)
            for key, factor in (contribution.of_factors or {}).items():
                if isinstance(factor, Tensor) or isinstance(weights.get(key), Tensor) or (factor and weights.get(key) != 0):
                    factors.setdefault(key, []).append(factor)
            kinds = [key >> 8 for key in weights]
            for kind in kinds:
                numbers.setdefault(kind, set()).add(kinds.count(kind))
        missed: Denominator = float(any(len(seen) > 1 for seen in numbers.values()))  # which of two similar terms is present?
        for key in {*self._own, *run} if self._own else ():
            own: Any = self._own.get(key, 0.0)
            ran: Any = run.get(key, 0.0)
            missed = missed + abs(own - ran) / (abs(own) + abs(ran) + 1e-300)
        found = [factors.get(key, []) for key in self.keys]
        return [missed, *(number for own in found for number in (len(own), sum(own), sum(factor * factor for factor in own)))]


OfTerms: TypeAlias = "Mapping[int, Denominator | None]"
"""The weight of each term, by its key; None for a sum."""


class TermValues(TorchFunctionMode):  # type: ignore[misc, unused-ignore]
    """Inside, records small results by their node, since autograd does not save the values of summands."""

    def __init__(self) -> None:
        super().__init__()
        self._values: dict[tuple[Any, int], Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.compiler.is_compiling():
            return func(*args, **(kwargs or {}))
        if func.__name__ in _ADDITIONS:  # results of custom functions are seen nowhere else
            for operand in args[0] if args and isinstance(args[0], (list, tuple)) else args:
                self._note(operand)
        result = func(*args, **kwargs) if kwargs else func(*args)
        self._note(result)
        return result

    def _note(self, value: Any) -> None:
        if isinstance(value, Tensor) and value.numel() <= _MOST_ADDED and (node := value.grad_fn) is not None:
            self._values[node, value.output_nr] = value.detach().clone()

    @torch.no_grad()
    def of(self, loss: Tensor, terms: Sequence[Term]) -> dict[int, Denominator] | None:
        """The summand of each term in the loss, by key; None if unknown."""
        found: dict[int, Denominator] = {}
        inside = set[Any]()
        for term in terms:
            for (node, place, element), above in term.edges.items():
                below = (node, loss.output_nr) if place is None else node.next_functions[place]
                value = loss if place is None else self._values.get(below, getattr(below[0], "variable", None))
                if value is None:  # it is summed inside a criterion: the first term gets the sum
                    value = self._values.get((node, 0)) if node not in inside else torch.zeros_like(loss)
                    inside.add(node)
                if value is None:
                    return None
                value = value if element is None or value.numel() == 1 else value.reshape(-1)[element]
                found[term.key] = found.get(term.key, 0.0) + (above * value).sum()
        constant = (loss.detach() - sum(found.values())).nan_to_num(0.0, 0.0, 0.0)  # a term may be a mean over no elements
        return {key: value + constant if at == 0 else value for at, (key, value) in enumerate(found.items())}


_MOST_ADDED = 64
_ADDITIONS = {
    "add", "add_", "__add__", "__radd__", "__iadd__", "sub", "sub_", "__sub__", "__rsub__", "__isub__", "rsub", "subtract", "stack",
    "cat", "concat", "concatenate",
}  # fmt: skip
