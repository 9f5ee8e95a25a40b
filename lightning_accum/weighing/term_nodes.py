"""Where in the graph of a loss its terms can be scaled, each by itself."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from lightning_accum.errors import UnreadableLossError
from lightning_accum.weighing.denominator import Denominator, Term
from lightning_accum.weighing.nodes import Node, is_of_parameters_only

if TYPE_CHECKING:
    from lightning_accum.weighing.graph import Reading

MOST_OTHERS = 6
"""The terms beside the main one that ranks tell each other of."""


class TermNode(NamedTuple):
    """What is scaled in backward: a node, or what an addition gives to one of its summands.

    Attributes:
        node: of the term.
        place: among the factors.
        edge: the addition, and the place of the summand in it. A parameter that multiplies the term is below it.
    """

    node: Node
    place: int
    edge: tuple[Node, int] | None = None


def scale_terms(terms: Sequence[TermNode], factors: Sequence[Denominator]) -> None:
    """Multiply the gradient of each term by its factor, in the backward to come.

    Args:
        terms: where they are.
        factors: by place; numbers, or tensors of one number.

    Example:
        >>> import torch
        >>> x = torch.tensor([1.0, 2.0], requires_grad=True)
        >>> square, total = x.square().mean(), x.sum()
        >>> scale_terms([TermNode(square.grad_fn, 0), TermNode(total.grad_fn, 1)], [10.0, 3.0])
        >>> (square + total).backward()
        >>> x.grad
        tensor([13., 23.])
    """
    for node, place, edge in terms:
        if edge is None:
            node.register_prehook(_times(factors[place], None))
        else:
            edge[0].register_hook(_times(factors[place], edge[1]))


def _times(factor: Denominator, only: int | None) -> Callable[..., tuple[Tensor | None, ...]]:
    def times(gradients: tuple[Tensor | None, ...], *_: Any) -> tuple[Tensor | None, ...]:
        return tuple(g if g is None or only not in (None, place) else product(g) for place, g in enumerate(gradients))

    def product(gradient: Tensor) -> Tensor | None:
        if isinstance(factor, Tensor):
            return gradient * factor.to(gradient.dtype)
        return gradient * factor if factor else None  # the mean of nothing is NaN, and 0 times that too

    return times


def _identity(term: Term) -> object:
    return term.edge or term.node


class TermReader:
    """Terms that are weighed by what they were divided by, as their nodes say."""

    def read(self, terms: Sequence[Term], reading: Reading, factors: Denominator) -> tuple[list[TermNode], int]:
        """Where to scale the terms of a loss.

        Args:
            terms: all of them.
            reading: which have a denominator of their own.
            factors: a number for their constant factors.

        Returns:
            The nodes, at place 0 those with the main weight, then each other denominator; none where a parameter multiplies a
            sum of them. And a number from 1 to 2**16 for which terms these are, and their factors as far as the host knows them,
            so that ranks find out whether they have the same.
        """
        weighed = [term for term in reading.others if term.denominator is not None]
        if any(term.is_shared for term in terms) or len(weighed) > MOST_OTHERS:
            return [], 1
        places = {_identity(term): place for place, term in enumerate(weighed, start=1)}
        names = "+".join([reading.criterion, *(term.criterion for term in weighed)])
        names += "" if isinstance(factors, Tensor) else f"{factors:.9g}"
        nodes = [TermNode(term.node, places.get(_identity(term), 0), term.edge) for term in terms]
        return nodes, 2 + zlib.crc32(names.encode()) % (2**16 - 1)


class Proportion:
    """Compares what an explicit weight counts with what the loss was divided by, in a few micro-batches.

    Args:
        name: of the weight.
        warn: takes a warning that should be seen once.
        looks: at so many micro-batches; none is left once one is not in proportion.
    """

    def __init__(self, name: str, warn: Callable[[str], None], looks: float = 4) -> None:
        self.looks_left = looks
        self._name, self._warn = name, warn
        self._seen: list[tuple[float, float]] = []

    def look(self, count: Denominator, divisor: Denominator, criterion: str) -> bool:
        """It may be a multiple of it, but the same one in all micro-batches. Returns whether it is."""
        self.looks_left -= 1
        now, over = float(count), float(divisor)
        for before, over_before in self._seen:
            if abs(now * over_before - before * over) > 1e-6 * abs(now * over_before) + 1e-12:
                self.looks_left = 0
                self._warn(
                    f"{self._name} counts {before:g} and {now:g} in two micro-batches where the term of the loss that it weighs"
                    f" ({criterion}) was divided by {over_before:g} and {over:g}. A window equals its full batch only where the two"
                    ' are proportional. weight="auto" reads the latter from the loss.'
                )
                return False
        self._seen.append((now, over))
        return True


class TermLister:
    """Terms that are weighed by explicit weights, one for each that depends on the batch.

    Args:
        weights: in the order of the terms.
        warn: takes a warning that should be seen once.
    """

    def __init__(self, weights: Sequence[Callable[[Any], Any]], warn: Callable[[str], None]) -> None:
        self.weights = weights
        self.description = ""
        """What is weighed how, in words; empty before the first loss."""
        self._names = [getattr(weight, "__name__", str(weight)) for weight in weights]
        self._argument = f"weight=[{', '.join(self._names)}]"
        self._proportions = [Proportion(name, warn) for name in self._names]

    def read(self, terms: Sequence[Term], counts: Sequence[Denominator]) -> list[TermNode]:
        """Where to scale the terms of a loss.

        Args:
            terms: all of them.
            counts: what the weights are for this micro-batch.

        Returns:
            The nodes, each at the place of its weight; those of parameters only at place 0.

        Raises:
            UnreadableLossError: the graph has other terms than there are weights, or they cannot be told apart.
        """
        varying = [term for term in terms if not is_of_parameters_only(term.node)]
        found = ", ".join(term.criterion for term in varying) or "its graph shows none"
        if len(varying) != len(self.weights):
            raise UnreadableLossError(
                f"{self._argument} has {len(self.weights)} weights, one for each term of the loss, but the loss of this micro-batch"
                f" has {len(varying)} terms that depend on the batch ({found}). List one for each, in the order in which they are"
                " added up."
            )
        if sums := [term.criterion for term in varying if term.is_readable and term.denominator is None]:
            raise UnreadableLossError(
                f"{self._argument} says what each term of the loss is divided by, but one of them ({sums[0]}) is divided by"
                " nothing. Return a sum of means from training_step."
            )
        if any(term.is_shared for term in terms):
            raise UnreadableLossError(
                f"{self._argument} weighs each term of the loss by itself, but a parameter multiplies a sum of them ({found})."
                ' Multiply each by it, or use one weight for all, or "auto".'
            )
        if not self.description:
            words = (f"{term.criterion} by {name}" for term, name in zip(varying, self._names, strict=True))
            self.description = f"each term of the loss by its own, {', '.join(words)}"
        for proportion, term, count in zip(self._proportions, varying, counts, strict=False):
            divisor = term.denominator
            if proportion.looks_left and divisor is not None and not proportion.look(count, divisor, term.criterion):
                self._proportions = []  # it is said once, of the first
                break
        places = {_identity(term): place for place, term in enumerate(varying)}
        return [TermNode(term.node, places.get(_identity(term), 0), term.edge) for term in terms]
