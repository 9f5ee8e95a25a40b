"""Where in the graph of a loss its terms can be scaled, each by itself."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from torch import Tensor

from lightning_accum.weighing.denominator import Denominator, Term, UnreadableLossError
from lightning_accum.weighing.nodes import Node, is_of_parameters_only, nodes_below

if TYPE_CHECKING:
    from lightning_accum.weighing.graph import Reading

MOST_OTHERS = 6
"""The terms beside the main one that ranks tell each other of."""


class TermNode(NamedTuple):
    """A node that is scaled in backward, and its place among the factors."""

    node: Node
    place: int


def scale_terms(terms: Sequence[TermNode], factors: Sequence[Denominator]) -> None:
    """Multiply the gradient of each term by its factor, in the backward to come.

    Args:
        terms: the nodes, none below another.
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
    for node, place in terms:
        node.register_prehook(_times(factors[place]))


def _times(factor: Denominator) -> Callable[[tuple[Tensor | None, ...]], tuple[Tensor | None, ...]]:
    def times(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(g if g is None else g * (factor.to(g.dtype) if isinstance(factor, Tensor) else factor) for g in gradients)

    return times


def are_apart(terms: Sequence[Term]) -> bool:
    """Whether no term is another or computed from another, so that each can be scaled by itself. Walks the whole graph."""
    nodes = {term.node for term in terms}
    if len(nodes) < len(terms):
        return False
    return not any(below in nodes for node in nodes for below in nodes_below(node) if below is not node)


class TermReader:
    """Terms that are weighed by what they were divided by, as their nodes say."""

    def __init__(self) -> None:
        self._are_apart: bool | None = None  # looked at once: a training has losses of one kind

    def read(self, terms: Sequence[Term], reading: Reading) -> tuple[list[TermNode], int]:
        """Where to scale the terms of a loss.

        Args:
            terms: all of them.
            reading: which have a denominator of their own.

        Returns:
            The nodes, at place 0 those with the main weight, then each other denominator; none where they cannot be told apart.
            And a number from 1 to 2**16 for which terms these are, so that ranks find out whether they have the same.
        """
        if self._are_apart is None:
            self._are_apart = are_apart(terms)
        weighed = [term for term in reading.others if term.denominator is not None]
        if not self._are_apart or len(weighed) > MOST_OTHERS:
            return [], 1
        places = {term.node: place for place, term in enumerate(weighed, start=1)}
        names = "+".join([reading.criterion, *(term.criterion for term in weighed)])
        nodes = [TermNode(term.node, places.get(term.node, 0)) for term in terms]
        return nodes, 2 + zlib.crc32(names.encode()) % (2**16 - 1)


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
        self._warn = warn
        self._looks_left = 4
        self._seen: list[list[tuple[float, float]]] = [[] for _ in weights]

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
        if not self.description:
            if not are_apart(terms):
                raise UnreadableLossError(
                    f"{self._argument} weighs each term of the loss by itself, but one of them ({found}) is computed from another."
                    ' Use one weight for all, or "auto".'
                )
            words = (f"{term.criterion} by {name}" for term, name in zip(varying, self._names, strict=True))
            self.description = f"each term of the loss by its own, {', '.join(words)}"
        if self._looks_left:
            self._looks_left -= 1
            self._compare(varying, counts)
        places = {term.node: place for place, term in enumerate(varying)}
        return [TermNode(term.node, places.get(term.node, 0)) for term in terms]

    def _compare(self, terms: Sequence[Term], counts: Sequence[Denominator]) -> None:
        """What is counted for a term may be a multiple of what it was divided by, but the same one in all micro-batches."""
        for name, term, count, seen in zip(self._names, terms, counts, self._seen, strict=True):
            if term.denominator is None:
                continue
            now, divisor = float(count), float(term.denominator)
            for before, divisor_before in seen:
                if abs(now * divisor_before - before * divisor) > 1e-6 * abs(now * divisor_before) + 1e-12:
                    self._looks_left = 0
                    self._warn(
                        f"{name} counts {before:g} and {now:g} in two micro-batches where the term of the loss that it weighs"
                        f" ({term.criterion}) was divided by {divisor_before:g} and {divisor:g}. A window equals its full batch"
                        " only where the two are proportional."
                    )
                    return
            seen.append((now, divisor))
