"""One proof: whether the parts of some rows add up to their whole, in the gradient of the user's own step."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from lightning_accum.errors import UnreadableLossError
from lightning_accum.exact import as_real, rounding_of_gradients
from lightning_accum.weighing.functions import FunctionOfMean
from lightning_accum.weighing.terms import MODES, ONCE, SUM, Mode, Term, alike

_OF_A_PARAMETER = 1e-2
"""A parameter's gradient is compared with at least this share of the whole gradient, to which rounding is relative."""
ALL = -1
"""The key of a whole loss, if all its terms have one weight."""


@dataclass
class Measured:
    """The result of one step on some rows, before weighting."""

    loss: float  # its value
    terms: dict[int, Term]  # by key; their shares are Python numbers
    gradients: dict[int, dict[int, Tensor]]  # of each term, by parameter: some of their elements, in double precision
    function: FunctionOfMean | None  # set if the loss is a function of a mean; the gradients are then gradients of the mean
    batch: Callable[[], Any]  # returns a copy of the rows, for counting
    rows: Sequence[int]  # their indices in the whole batch of ``total`` rows; ``total`` is 0 if random numbers belong to no row
    total: int = 0
    # returns the gradient of a multiple of a term, reduced over the ranks. Called on all ranks
    rerun: Callable[[int, float], dict[int, Tensor]] | None = None
    _runs: dict[int, dict[int, Tensor]] = field(default_factory=dict)
    _counts: dict[Any, float] = field(default_factory=dict)

    names: list[set[int]] = field(default_factory=list)
    """If terms run again: for each term that was read, its later keys."""

    def join(self, looped: Collection[int]) -> None:
        """Combine the terms of each of these kinds."""
        gradients: dict[int, dict[int, Tensor]] = {}
        for own in self.names:
            own |= {key >> 8 << 8 for key in own if key >> 8 in looped}
        for key, gradient in self.gradients.items():
            joined = gradients.setdefault(key >> 8 << 8 if key >> 8 in looped else key, {})
            for index, of_one in gradient.items():
                joined[index] = joined[index] + of_one if index in joined else of_one
        self.gradients = gradients
        self.terms = {term.key: term for term in alike([*self.terms.values()], looped)}

    def rename(self, names: Mapping[int, int]) -> None:
        """Give terms their names."""
        self.terms = {names.get(key, key): term for key, term in self.terms.items()}
        for own in self.names:
            own |= {names[key] for key in own if key in names}
        self.gradients = {names.get(key, key): gradient for key, gradient in self.gradients.items()}

    def weight(self, key: int, mode: Mode) -> float | None:
        """The weight of a term; 0 if it is absent."""
        if callable(mode):
            if mode not in self._counts:
                self._counts[mode] = self._count(mode)
            return self._counts[mode]
        if key not in self.terms:
            return 0.0
        weight = self.terms[key].weight(mode)
        return None if weight is None else float(weight)

    def _count(self, mode: Callable[[Any], Any]) -> float:
        try:
            return float(mode(self.batch()))
        except (LookupError, TypeError, ValueError, AttributeError, UnreadableLossError):  # it may not fit this batch
            return math.nan

    def gradient(self, key: int, factor: float | None = None) -> Mapping[int, Tensor]:
        """The gradient of a term, of all terms, or a multiple of it, for which all ranks call it, each with its own factor."""
        if self.rerun is not None:
            if factor is not None:
                return self.rerun(key, factor)
            if key not in self._runs:
                self._runs[key] = self.rerun(key, 1.0)
            return self._runs[key]
        factor = 1.0 if factor is None else factor
        if key == ALL and ALL not in self.gradients:
            total: dict[int, Tensor] = {}
            for of_term in [*self.gradients.values()]:
                for index, gradient in of_term.items():
                    total[index] = total[index] + gradient if index in total else gradient
            self.gradients[ALL] = total
        found = self.gradients.get(key, {}) if factor else {}
        return found if factor == 1.0 else {index: factor * gradient for index, gradient in found.items()}


class Look(NamedTuple):
    """Some rows, together and in parts."""

    whole: Measured
    parts: Sequence[Measured]
    may_be_raised: bool = False
    """Counts below 1 may be raised to 1, so parts that count 1 may weigh less."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of rows of each part."""
        return tuple(len(part.rows) for part in self.parts)


class Deviation(NamedTuple):
    """The difference between the sum of the parts and the whole."""

    size: float  # relative error; inf if they cannot be compared
    has_evidence: bool  # at least one compared value is not 0
    seen: str = "the gradient"  # the quantity with this error
    rows: tuple[int, ...] = ()  # the sizes of the parts


class Fit(NamedTuple):
    """How a term is weighted."""

    mode: Mode | None  # the mode that adds up; None if none does
    deviation: Deviation  # of this mode, or the smallest of all modes
    constant: float = 0.0  # the constant in each weight that does not add up
    is_open: bool = False  # nothing could be compared, or the rows cannot tell a mean from a sum
    modes: tuple[Mode, ...] = ()  # all modes that add up


def fit_of(looks: Sequence[Look], key: int, mode: Mode, eps: float) -> Fit:
    """The fit of a term in one mode; the mode of the result is None if it does not add up."""
    constant = 0.0 if mode in (SUM, ONCE) else _constant(looks, key, mode, eps)
    found = [_deviation(look, key, mode, constant, eps) for look in looks]
    worst = max(found, key=lambda deviation: deviation.size)
    adds_up = worst.size <= rounding_of_gradients(eps)
    # a row that is repeated proves nothing alone
    are_rows = [len(look.parts) < 2 or look.parts[0] is not look.parts[1] for look in looks]
    seen = [one.has_evidence and is_so for one, is_so in zip(found, are_rows, strict=True)]
    return Fit(mode if adds_up else None, worst._replace(has_evidence=any(seen)), constant)


def _deviation(look: Look, key: int, mode: Mode, constant: float, eps: float) -> Deviation:
    whole, parts, rows = look.whole, look.parts, look.sizes
    if len({one.function for one in (whole, *parts)}) > 1 and whole.rerun is None:
        return Deviation(math.inf, True, "the loss is not the same function of a mean in all parts", rows)
    weights = [part.weight(key, mode) for part in parts]
    own = whole.weight(key, mode)
    if mode == ONCE:
        return max((_apart(whole, [part], [1.0], key, rows) for part in parts), key=lambda one: one.size)
    if mode == SUM:
        found = _apart(whole, parts, [1.0] * len(parts), key, rows)
        if whole.rerun is None and sum(any(one.any() for one in part.gradient(key).values()) for part in parts) < 2:
            return found._replace(has_evidence=False)  # with one part, mean and sum are equal
        return found
    numbers = [math.nan if weight is None else weight for weight in weights]
    is_read = all(map(math.isfinite, (*numbers, math.nan if own is None else own)))
    total = sum(numbers) - max(0, sum(number != 0 for number in numbers) - 1) * constant if is_read else 0.0
    raised = [n for part, n in zip(parts, numbers, strict=True) if look.may_be_raised and raised_in([part], {key: mode})]
    if raised and own is not None:  # each of these parts may count less
        total = min(max(own, total - sum(raised)), total)
    found = _apart(whole, parts, [number / total if total else 0.0 for number in numbers], key, rows)  # by all ranks
    if not is_read:
        return Deviation(math.inf, True, "the weight", rows)
    assert own is not None
    # with several terms, a mean of nothing makes the gradients of all terms NaN
    lost = [part for part, n in zip(look.parts, numbers, strict=True) if n and math.isnan(part.loss) and len(part.terms) == 1]
    expected = {} if whole.rerun is not None else whole.gradient(key)
    pairs = [(own, expected[index]) for part in lost if expected for index, own in part.gradient(key).items() if index in expected]
    if any(bool((of_whole.isfinite() & ~own.isfinite()).any()) for own, of_whole in pairs):
        return Deviation(math.inf, True, "the gradient is not finite in a part", rows)
    if not found.has_evidence and max(abs(number - own) for number in numbers) <= 1e3 * eps * own:
        return found  # as `sum / (count + 1e-16)` with counts of 0
    of_weights = abs(total - own) / max(abs(total), abs(own), 1e-300)
    if of_weights > 1e3 * eps:
        return Deviation(max(of_weights, 2 * rounding_of_gradients(eps)), True, "the weight", rows)
    return found._replace(has_evidence=found.has_evidence and not raised) if total else Deviation(0.0, False, rows=rows)


def _apart(whole: Measured, parts: Sequence[Measured], factors: Sequence[float], key: int, rows: tuple[int, ...]) -> Deviation:
    expected = whole.gradient(key)
    given = [part.gradient(key, factor) for part, factor in zip(parts, factors, strict=True)]
    of_all = whole.gradient(ALL).values()
    of_all_terms = math.sqrt(sum(float(gradient[gradient.isfinite()].square().sum()) for gradient in of_all))
    size = apart(expected, given, of_all_terms, not any(math.isnan(part.loss) for part in parts))
    return Deviation(size or 0.0, size is not None, rows=rows)


def apart(
    expected: Mapping[int, Tensor], given: Sequence[Mapping[int, Tensor]], of_all: float = 0.0, is_finite: bool = True
) -> float | None:
    """The largest relative error of a sum of gradients, by parameter; None if all are 0 compared with ``of_all``.

    If the losses are not finite, as means of nothing, neither are the gradients of their learned factors.
    """
    differences: list[tuple[float, float]] = []
    for index in sorted({index for one in (expected, *given) for index in one}):
        shares = [one[index] for one in given if index in one]
        own = expected.get(index)
        difference = sum(shares) - (0 if own is None else own)
        assert isinstance(difference, Tensor)
        seen = difference.isfinite()  # the gradient of a distance of 0 is NaN, and cannot be compared
        if own is not None and is_finite and bool((own.isfinite() & ~seen).any()):
            return math.inf  # but a sum of NaN and others is NaN
        size = max(0.0 if own is None else float(own[seen].norm()), sum(float(one[seen].norm()) for one in shares))
        differences.append((float(difference[seen].norm()), size))
    overall = math.sqrt(sum(size**2 for _, size in differences))
    if overall <= 1e-13 * of_all or overall == 0:
        return None
    least = max(_OF_A_PARAMETER * overall, 1e-9 * of_all)
    return max((d / max(size, least) for d, size in differences if d), default=0.0)


def _constant(looks: Sequence[Look], key: int, mode: Mode, eps: float) -> float:
    """The constant in each weight, as in ``sum / (count + 1e-8)``, if it is small and the same in all looks; else 0."""
    found = list[tuple[float, float]]()  # for each look: rounding, constant
    numbers, share = set[int](), 0.0
    for look in looks:
        weights = [weight for part in look.parts if (weight := part.weight(key, mode))]
        own = look.whole.weight(key, mode)
        if len(weights) < 2 or not own or not all(map(math.isfinite, (*weights, own))):
            continue
        excess = (sum(weights) - own) / (len(weights) - 1)
        numbers.add(len(weights))
        found.append((_ROUNDINGS * eps * sum(weights) / (len(weights) - 1), excess))
        share = max(share, abs(excess) / sum(weights))
        is_in_all = min(weights) > 0.99 * abs(excess) and max(weights) > 1.01 * abs(excess)  # not the weight of one part
        if not is_in_all or abs(excess) > 1:
            return 0.0
    rounding, constant = min(found, default=(0.0, 0.0))  # of the most precise look
    is_same = all(abs(excess - constant) <= rounding + of_look for of_look, excess in found)
    return constant if is_same and abs(constant) > rounding and (len(numbers) > 1 or share <= _SMALL) else 0.0


_ROUNDINGS = 8  # rounding errors in a weight that is read from a share
_SMALL = 1e-3  # two parts suffice for a constant this small relative to the weights; a larger one needs different numbers of parts


def measured_of(looks: Sequence[Look]) -> list[Measured]:
    """All measured steps."""
    return [one for look in looks for one in (look.whole, *look.parts)]


def raised_in(measured: Sequence[Measured], modes: Mapping[int, Mode]) -> frozenset[int]:
    """The terms whose counts may have been raised to 1 in some of these."""
    counted = [(key, one.terms[key], one.weight(key, mode)) for one in measured for key, mode in modes.items() if key in one.terms]
    return frozenset(key for key, term, weight in counted if term.counts_one(weight))


def first_of(losses: Iterable[Mapping[int, Term]]) -> dict[int, Term]:
    """The terms of all losses, in order of their first appearance."""
    found: dict[int, Term] = {}
    for terms in losses:
        found |= {key: term for key, term in terms.items() if key not in found}
    return found


def ratios(looks: Sequence[Look], first: tuple[int, Mode], other: tuple[int, Mode]) -> tuple[float, float]:
    """The smallest and the largest ratio of the second weight to the first; 0 or inf if only one of them is 0."""
    least, most = math.inf, 0.0
    for measured in measured_of(looks):
        one, two = measured.weight(*first) or 0.0, measured.weight(*other) or 0.0
        if one or two:
            ratio = two / one if one else math.inf
            least, most = min(least, ratio), max(most, ratio)
    return least, most


def has_factors(looks: Sequence[Look], key: int) -> bool:
    """Whether a sum has several constant factors, as if each of its losses is divided by its own count."""
    known = [own for one in measured_of(looks) if key in one.terms and (own := float(one.terms[key].factor(SUM)))]
    return bool(known) and max(known) - min(known) > 1e-6 * abs(max(known))


def goes_by_rows(looks: Sequence[Look], key: int, mode: Mode) -> bool:
    """Whether the weight of a term is the number of rows, in each part."""
    return all(part.weight(key, mode) in (0.0, size) for look in looks for part, size in zip(look.parts, look.sizes, strict=True))


def modes_to_try(term: Term) -> tuple[Mode, ...]:
    """The modes of a term, the likeliest first."""
    return (ONCE,) if term.is_penalty else (term.default_mode, *(mode for mode in MODES if mode != term.default_mode))


def looped(measured: Sequence[Measured]) -> frozenset[int]:
    """The kinds of terms that vary in number between losses, see :func:`alike`."""
    kinds = [Counter(key >> 8 for key, term in one.terms.items() if not term.is_penalty) for one in _complete(measured)]
    return frozenset(kind for kind in set[int]().union(*kinds) if len({own[kind] for own in kinds if kind in own}) > 1)


def merged(known: Mapping[int, int], of_ranks: Sequence[Mapping[int, int]]) -> dict[int, int]:
    """The :func:`aliases` of all ranks together with the known ones; one key for all if each loss has one term."""
    found, before = dict(known), {*known.values()}
    names = {name for of_rank in of_ranks for name in of_rank.values()}
    is_one = bool(of_ranks) and all(len(set(of_rank.values())) == 1 for of_rank in of_ranks)
    first = min(names & before or (before if len(before) == 1 else names)) if is_one else None
    for of_rank in of_ranks:
        for key, name in of_rank.items():
            found[key] = found.get(name, name) if first is None else first
    return found


def aliases(measured: Sequence[Measured]) -> dict[int, int]:
    """Common names for keys, if all losses have the same terms in words and order: the keys of a single row may differ."""
    runs = [[*one.terms.items()] for one in _complete(measured)]
    numbers = {len(run) for run in runs}
    if len(numbers) > 1 or not runs or (numbers != {1} and len({tuple(term.words for _, term in run) for run in runs}) > 1):
        return {}
    return {key: first for run in runs for (key, _), (first, _) in zip(run, runs[0], strict=True)}


def order_of(measured: Sequence[Measured]) -> tuple[int, ...]:
    """The keys of all terms in their order in the sum; empty if it differs between losses."""
    orders = {(*one.terms,) for one in _complete(measured)}
    return orders.pop() if len(orders) == 1 else ()


def _complete(measured: Sequence[Measured]) -> Sequence[Measured]:
    """The losses in which no term is multiplied by 0, as if it is absent; all losses if there are none."""
    return [one for one in measured if not any(term.is_off for term in one.terms.values())] or measured


def sample(gradient: Tensor, most: int) -> Tensor:
    """Some elements of a gradient, in double precision."""
    if isinstance(gradient, DTensor):
        gradient = gradient.to_local()  # each rank compares its part
    if gradient.layout != torch.strided:
        gradient = gradient.to_dense()
    flat = as_real(gradient).reshape(-1)
    return flat[:: flat.numel() // most | 1].cpu().double()  # an odd stride visits several columns of a matrix
