"""The weight of a loss whose denominator cannot be read: one over the share that each of the losses in its sum has in it.

A loss ``(l_1 + ... + l_k) / n`` has the gradient ``1 / n`` by each ``l_i``, however it was computed. So the backward runs from the
loss through what is linear, and no further, and what arrives there is ``1 / n``, or 0 for what a mask leaves out. Whether that is a
weight is found out by the check, without which nothing is measured; see :mod:`lightning_accum.weighing.check`. On a device it costs
one copy to the host in each micro-batch, which weights that are read do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from lightning_accum.errors import UnreadableLossError
from lightning_accum.exact import rounding
from lightning_accum.weighing.denominator import CRITERIA, criterion_of
from lightning_accum.weighing.nodes import CONTRACTIONS, SELECTIONS, SUMS, THROUGH, Node, is_choice, is_of_parameters_only, kind_of
from lightning_accum.weighing.reductions import Rows, hides_a_reduction

# What is linear in each of its operands, or only moves and selects.
_LINEAR = {
    *THROUGH, *SUMS, *SELECTIONS, *CONTRACTIONS, "Add", "Addbmm", "Addcdiv", "Addcmul", "Addmm", "Addmv", "Baddbmm", "Cat",
    "Cumsum", "Div", "IndexAdd", "IndexCopy", "Lerp", "Mean", "Mul", "Rsub", "ScatterAdd", "Sort", "Stack", "Sub", "Topk", "Trace",
    "_DDPSink",
}  # fmt: skip
_PRODUCTS = {"Div", "Dot", "Mul", *CONTRACTIONS}
_PRODUCTS_ADDED = {"Addbmm", "Addcdiv", "Addcmul", "Addmm", "Addmv", "Baddbmm"}
_NOT_LINEAR_IN = {"Addcdiv": 2, "Div": 1, "Lerp": 2}
"""The place of an operand: a divisor, the weight of an interpolation."""


class Shares(NamedTuple):
    """What the gradients of a loss by what it adds up are, up to their signs.

    Attributes:
        of_sum: of the sum itself, or of what a mean was taken over; nan where there are several.
        of_losses: of the losses in it, below factors, masks and selections, without those that are left out; nan where there are
            several, and 0 where all are left out.
    """

    of_sum: float
    of_losses: float
    factors: float
    """A number that is another one where the largest or the smallest of the losses' gradients is."""


@dataclass
class ShareWeight:
    """Measures the weight of each micro-batch, by what the check found that adds up. What does so in two ways must agree.

    Attributes:
        is_sum: the loss is a sum, whose shares are the same whatever it adds up.
        by_sum: the weight is one over the share of the sum.
        by_losses: it is one over the share of the losses in it, and 0 where all are left out.
        is_tried: by the check.
        has_seen_empty: the check has seen a part in which all were left out.
        ratio: of the share of the losses to that of the sum in what the check has seen, 1 but for losses that are means
            themselves; nan where there were several.
    """

    is_sum: bool = False
    by_sum: bool = False
    by_losses: bool = False
    is_tried: bool = False
    has_seen_empty: bool = False
    ratio: float | None = None

    def __call__(self, loss: Tensor, rows: Rows) -> tuple[float | None, float]:
        """Measure the weight of a loss. Takes what :func:`shares_of` does.

        Returns:
            The weight, None for a sum; and a number for the factor of a sum, as in ``Contribution.factors``.

        Raises:
            UnreadableLossError: it cannot be measured.
        """
        shares = shares_of(loss, rows)
        if self.is_sum:
            return (None, 1.0 + shares.factors % 1.0) if shares.of_losses != 0 else (0.0, 0.0)
        is_empty = shares.of_losses == 0
        self.has_seen_empty |= is_empty and self.is_tried
        if self.is_tried and not is_empty:
            self._note_ratio(shares, _tolerance(loss))
        if is_empty and not self.has_seen_empty:
            raise UnreadableLossError("a sum in which nothing is counted, as in no part of the rows that were checked")
        if not self.by_losses:
            return 1 / _known(shares.of_sum), 0.0
        if is_empty:
            return 0.0, 0.0
        weight = 1 / _known(shares.of_losses)
        ratio = 1.0 if self.ratio is None else self.ratio
        if self.by_sum and not math.isclose(shares.of_losses, ratio * _known(shares.of_sum), rel_tol=_tolerance(loss)):
            raise UnreadableLossError("a sum of losses with factors, of which the rows that were checked had none")
        return weight, 0.0

    def _note_ratio(self, shares: Shares, tolerance: float) -> None:
        now = shares.of_losses / shares.of_sum if shares.of_sum else math.nan
        is_same = self.ratio is None or math.isclose(now, self.ratio, rel_tol=tolerance)
        self.ratio = now if is_same else math.nan

    @property
    def in_words(self) -> str:
        """How losses are weighed."""
        if self.is_sum:
            return "a sum: added up, divided by nothing"
        return "measured, one over the share that a loss has in the loss of its micro-batch"


def candidates() -> list[ShareWeight]:
    """What the check tries."""
    kinds: list[dict[str, bool]] = [{"by_losses": True}, {"by_sum": True}, {"is_sum": True}]
    return [ShareWeight(**kind, is_tried=True) for kind in kinds]


def together(found: Sequence[ShareWeight], has_seen_empty: bool) -> ShareWeight:
    """What all of these say, which the check has found to add up."""
    is_sum, by_sum, by_losses = (any(kinds) for kinds in zip(*((f.is_sum, f.by_sum, f.by_losses) for f in found), strict=True))
    ratio = next((f.ratio for f in found if f.by_losses), None)
    return ShareWeight(is_sum, by_sum, by_losses, has_seen_empty=has_seen_empty, ratio=ratio)


def _known(share: float) -> float:
    if not (0 < share < math.inf):
        raise UnreadableLossError("a sum of losses with several factors")
    return share


def _tolerance(tensor: Tensor) -> float:
    return rounding(torch.finfo(tensor.dtype).eps)


@torch.no_grad()
def shares_of(loss: Tensor, rows: Rows = lambda: None) -> Shares:
    """Run the backward of ``loss`` down to what it adds up. No hook is called, and the graph stays as it is.

    Args:
        loss: with its graph.
        rows: counts the samples of the micro-batch.

    Raises:
        UnreadableLossError: the loss is no sum, or not linear in one; or what it adds up is made of several samples.

    Example:
        >>> x, mask = torch.arange(4.0, requires_grad=True), torch.tensor([True, False, True, False])
        >>> shares_of((x.square() * mask).sum() * (1 / mask.sum()))[:2]
        (0.5, 0.5)
        >>> shares_of(x.square().sum() * (1 / len(x)))[:2]
        (0.25, 0.25)
    """
    assert loss.grad_fn is not None
    if loss.dim() > 0:
        raise UnreadableLossError(f"a loss of shape {tuple(loss.shape)}")
    given: dict[Node, dict[int, Tensor]] = {loss.grad_fn: {loss.output_nr: torch.ones_like(loss)}}
    of_sums: list[Tensor] = []
    of_losses: list[Tensor] = []
    inside: set[Node] = set()
    """What is below a sum, or what was added up."""
    try:
        for node, operands in _in_order(loss.grad_fn):
            arrived = given.pop(node, {})
            gradients = arrived
            if operands is None:
                for gradient in arrived.values():
                    of_losses.append(_of_each(node, gradient, rows))
                    of_sums.extend([gradient] if node not in inside else [])
                continue
            if kind_of(node) in (*SUMS, "Trace") and node not in inside:
                of_sums.extend(arrived.values())
                inside.add(node)
            if arrived and kind_of(node) != "_DDPSink":  # every tensor goes in and out of that at the same place
                result = node(*(arrived.get(place) for place in range(len(node._input_metadata))))
                gradients = dict(enumerate(result if isinstance(result, tuple) else (result,)))
            for place, (child, index) in operands.items():
                if gradients.get(place) is None:
                    continue
                gradient = gradients[place].sum_to_size(child._input_metadata[index].shape)
                if node not in inside and gradient.dim() > 0:
                    of_sums.append(gradient)
                if node in inside or gradient.dim() > 0:
                    inside.add(child)
                places = given.setdefault(child, {})
                places[index] = places[index] + gradient if index in places else gradient
    except (RuntimeError, AttributeError) as error:  # a node that was freed, or does not take what it is given
        raise UnreadableLossError(f"a node that cannot be run ({error})") from error
    tolerance = _tolerance(loss)
    ends = _ends_of(of_losses)
    factors = math.log(ends[0]) + math.log(ends[1]) / math.pi if ends[0] > 0 else 0.0
    return Shares(_one_of(_ends_of(of_sums), tolerance), _one_of(ends, tolerance), factors)


def _in_order(root: Node) -> list[tuple[Node, dict[int, tuple[Node, int]] | None]]:
    """The nodes from ``root`` down through what is linear, each before those below it; and the operands to go on with."""
    order: list[tuple[Node, dict[int, tuple[Node, int]] | None]] = []
    stack: list[tuple[Node, bool]] = [(root, False)]
    operands: dict[Node, dict[int, tuple[Node, int]] | None] = {}
    while stack:
        node, is_done = stack.pop()
        if is_done:
            order.append((node, operands[node]))
        elif node not in operands:
            operands[node] = below = _linear_operands(node)
            stack.append((node, True))
            stack.extend((child, False) for child, _ in (below or {}).values())
    return order[::-1]


def _linear_operands(node: Node) -> dict[int, tuple[Node, int]] | None:
    """The operands in which ``node`` is linear, by their places, without penalties and factors of parameters; None for others."""
    kind = kind_of(node)
    if kind not in _LINEAR or is_choice(node):
        return None
    below = {place: pair for place, pair in enumerate(node.next_functions) if pair[0] is not None}
    below = {place: pair for place, pair in below.items() if not is_of_parameters_only(pair[0])} or below
    factors = (1, 2) if kind in _PRODUCTS_ADDED else (0, 1) if kind in _PRODUCTS else ()
    is_linear = sum(place in below for place in factors) < 2 and _NOT_LINEAR_IN.get(kind) not in below
    return below if is_linear else None


def _of_each(node: Node, gradient: Tensor, rows: Rows) -> Tensor:
    """What arrives at the losses that ``node`` has reduced; ``gradient``, where it is those losses."""
    kind = kind_of(node)
    if kind in CRITERIA and gradient.dim() == 0:
        term = criterion_of(node, kind, ())
        if term.is_readable:
            return gradient if term.denominator is None else gradient / term.denominator
    is_sum_of_magnitudes = (
        kind in ("Norm", "LinalgVectorNorm") and getattr(node, "_saved_p", getattr(node, "_saved_ord", None)) == 1
    )
    if gradient.dim() == 0 and not is_sum_of_magnitudes:
        raise UnreadableLossError(f"{node.name()}, which is no sum")
    if gradient.dim() > 0 and hides_a_reduction(node, rows):
        raise UnreadableLossError(f"a sum of what is combined with a reduction over the batch by {node.name()}")
    return gradient


def _ends_of(gradients: Sequence[Tensor]) -> tuple[float, float]:
    """The largest and the smallest of all, but for their signs and those that are 0; nan where there are none."""
    if not gradients:
        return math.nan, math.nan
    sizes = torch.cat([gradient.reshape(-1).abs().to(gradients[0].dtype) for gradient in gradients])
    most = sizes.max() if len(sizes) else sizes.new_zeros(())
    least = torch.where(sizes == 0, most, sizes).min() if len(sizes) else most
    high, low = torch.stack((most, least)).tolist()
    return high, low


def _one_of(ends: tuple[float, float], tolerance: float) -> float:
    """The one number that both are; nan where they differ."""
    high, low = ends
    return high if high - low <= tolerance * high else math.nan
