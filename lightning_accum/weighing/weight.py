"""The weight of a micro-batch: the denominator of its mean loss.

``"auto"`` reads it from the loss itself (see :mod:`lightning_accum.weighing.graph`), or measures it (see
:mod:`lightning_accum.weighing.shares`); explicit weights count it from the batch (see :mod:`lightning_accum.weighing.counts`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import suppress
from functools import cache
from numbers import Number
from typing import Any, Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_accum.exact import exact
from lightning_accum.weighing.counts import SampleCount, Weight, count_samples
from lightning_accum.weighing.denominator import CRITERIA, Denominator, PlainMean, Term, UnreadableLossError, is_of_zeros, on_host
from lightning_accum.weighing.functions import FoundFunction, FunctionOfMean, OfMean, function_of_mean, is_of_whole_losses
from lightning_accum.weighing.graph import Reading, read_terms, terms_of
from lightning_accum.weighing.nodes import kind_of, path_of, sizes_of
from lightning_accum.weighing.reductions import Rows
from lightning_accum.weighing.safeguards import guard_against_zero
from lightning_accum.weighing.shares import ShareWeight
from lightning_accum.weighing.term_nodes import Proportion, TermLister, TermNode, TermReader
from lightning_accum.weighing.terms import HOW_TO_SEE_ALL


class Kind(NamedTuple):
    """What a weight counts.

    Attributes:
        criterion: that was divided by it, in words.
        dims: of what the criterion was taken of.
        is_of_samples: it was the number of samples in the first micro-batch, and may be something else that came to as much.
    """

    criterion: str
    dims: int
    is_of_samples: bool

    def __str__(self) -> str:
        return "its samples" if self.is_of_samples else f"what its {self.criterion} counts"


def are_mixed(kinds: Collection[Kind]) -> bool:
    """Whether weights of these kinds count different things."""
    return len(kinds) > 1 and len(set(map(str, kinds))) > 1 and len({kind[:2] for kind in kinds}) > 1


Way: TypeAlias = "tuple[str, ...]"
"""The first operations of a term, or that its count is at most 1."""
COUNTS_NOTHING: Way = ("a count of at most 1",)
"""It may have been raised to that where there was nothing to count."""


class Contribution(NamedTuple):
    """What one micro-batch brings into its window.

    Attributes:
        weight: what its mean loss was divided by; None if the loss is a sum, so that it is added as it is.
        others: the denominators of other terms of the loss. No terms: their nodes would keep the graph alive.
        signature: a number that tells which terms these are; 0 without any.
        factors: a number that is another one where a constant factor of the loss, or its kind, is; 0 where that is not known.
        kind: what the weight counts; None where it is explicit, and for a sum.
        of_mean: what makes the loss of the mean, or of the sum, that was weighed; None where it is that.
        ways: how each term was read. One that stands for a loss, where a batch has nothing, is read in another way.
        zeroed: those of terms that weigh nothing as they were multiplied by 0, and not what they are a mean of.
        is_one_sum: all terms are sums that were divided by as much.
    """

    weight: Denominator | None
    others: tuple[Denominator, ...] = ()
    signature: int = 0
    factors: Denominator = 0.0
    kind: Kind | None = None
    of_mean: OfMean | None = None
    ways: frozenset[Way] = frozenset()
    zeroed: frozenset[Way] = frozenset()
    is_one_sum: bool = False


class Weigher:
    """Finds the weight of each micro-batch, by the rule that the user chose.

    Args:
        weight: ``"auto"``, ``"equal"``, a callable of the batch, or one for each term of the loss.
        warn: takes a warning that should be seen once.
        hands_out_terms: with ``"auto"``, whether :meth:`take_terms` will be called after each micro-batch.
        is_proven: whether micro-batches were found to add up to their batch, so that nothing needs to be warned of.
    """

    def __init__(
        self,
        weight: Literal["auto", "equal"] | Weight | tuple[Weight, ...],
        warn: Callable[[str], None],
        hands_out_terms: bool = False,
        is_proven: Callable[[], bool] = lambda: False,
    ) -> None:
        self._is_proven = is_proven
        self._weight = weight
        self._warn = warn
        self._reader = TermReader() if hands_out_terms else None
        self._lister = TermLister(weight, warn) if isinstance(weight, tuple) else None
        self._terms: list[TermNode] = []
        self._found: FoundFunction | None = None
        self.proportion = Proportion(getattr(weight, "__name__", str(weight)), warn)
        self._kinds: dict[tuple[str, int], Kind] = {}
        self._plain: tuple[PlainMean, Contribution] | None = None
        """Reads a loss that is a mean criterion itself; and what one like it brought in, of which the weight is not constant."""
        self.criterion: str | None = None
        """What the weight was found to be, in words; None before the first micro-batch."""
        self.takes_functions = True
        """A loss that is a function of a mean is one over the window, whatever explicit weight it has."""
        self.takes_numbers = True
        """A sum divided by a number may be a mean: False where no part of a batch was found to be one."""
        self.shares: ShareWeight | None = None
        """Measures the weight, where it cannot be read and the check has found that so it adds up."""
        self.fixed_counts: tuple[float, ...] = ()
        """What other terms are divided by that the check has found to be the same for all rows, as penalties on parameters are."""
        self.unweighed_terms: tuple[str, ...] = ()
        """Terms of the loss that take the main term's weight although they are no mean over the same count."""
        self.unweighed_beside: str | None = None
        """The term whose weight they take, until the window ends in which that was seen."""

    def __call__(self, loss: Tensor, batch: Any, rows: int | None = None) -> Contribution:
        """Weigh one micro-batch.

        Args:
            loss: the scalar loss of the micro-batch, with its graph.
            batch: the micro-batch, as ``training_step`` got it.
            rows: its samples, where it is a part of a batch that was read as rows.

        Raises:
            UnreadableLossError: with ``"auto"``, where the graph shows no denominator.
            TypeError, ValueError: an explicit weight returned what cannot be a weight.
        """
        node = loss.grad_fn
        if node is None:  # `torch.zeros((), requires_grad=True)`: nothing to train on. Without: backward will say so
            return Contribution(0.0 if loss.requires_grad else 1.0)
        if self._plain is not None and self.shares is None:
            plain, last = self._plain
            if (count := plain.read(node)) is not None:
                if isinstance(count, Tensor) or count != last.weight:
                    last = Contribution(count, factors=last.factors, kind=last.kind, ways=last.ways)
                    self._plain = (plain, last)
                return last
        count_rows = cache(lambda: count_samples(batch) if rows is None else rows)
        if self.shares is not None:
            self.criterion = self.shares.in_words
            try:
                measured, factor = self.shares(loss, count_rows)
            except UnreadableLossError as unreadable:
                raise UnreadableLossError(_how_to_mend(unreadable.found)) from None
            return Contribution(measured, factors=factor, ways=frozenset((path_of(node, loss.output_nr),)))
        is_first = self.criterion is None
        takes_functions = self._weight != "equal" and self.takes_functions
        self._found = found = function_of_mean(node, loss.output_nr) if takes_functions else None
        below = None if found is None else found.mean
        if self._weight == "auto":
            terms: list[Term] = []
            try:
                terms = _raised_together(terms_of(loss, count_rows, below))
                reading = read_terms(terms)
                if not self.takes_numbers and any(term.number is not None for term in terms):
                    raise UnreadableLossError("a sum divided by a number, which in parts of the first batch was no count of theirs")
            except UnreadableLossError as unreadable:
                _refuse_functions(terms)
                raise UnreadableLossError(_how_to_mend(unreadable.found)) from None
            kind = self._kind(reading, terms, count_rows)
            if found is not None:
                _refuse_counts_apart(terms, found.function)
                reading = Reading(found.function.in_words(reading.criterion), reading.weight, penalties=reading.penalties)
            if is_first:
                self._describe(reading)
            guard_against_zero(terms)
            ways, zeroed = _ways(terms, loss)
            divisor = None if reading.weight is None else on_host(reading.weight)
            is_one_sum = all(term.is_divided_sum and _are_same(term.denominator, reading.weight) for term in reading.others)
            if not reading.others or (is_one_sum and self._reader is None):  # chunks of a sum over one count
                factors = _number_for(terms, reading.penalties)
                of_mean = None if found is None else found.of_mean(loss)
                weight = _zero_where_empty(divisor, loss if of_mean is None else of_mean.mean, terms[0])
                contribution = Contribution(weight, (), 0, factors, kind, of_mean, ways, zeroed)
                if terms[0].node is node and kind_of(node) in CRITERIA:
                    self._plain = (PlainMean(node), contribution)
                return contribution
            others = tuple(term.denominator for term in reading.others if term.denominator is not None)
            if is_one_sum:  # another rank may have it in fewer chunks, or in terms that are no chunks
                divisor = _zero_where_empty(divisor, loss, terms[0])
                others = tuple(0.0 if divisor is None else divisor for _ in others)
            penalties = reading.penalties
            if self.fixed_counts and not any(isinstance(other, Tensor) for other in others) and others == self.fixed_counts:
                others, penalties = (), (*penalties, *map(str, others))
            factors = _number_for(terms, penalties)
            signature = 0
            if self._reader is not None and others and reading.weight is not None:
                self._terms, signature = self._reader.read(terms, reading, factors)
            return Contribution(divisor, others, signature, factors, kind, None, ways, zeroed, is_one_sum)
        terms = []
        with suppress(UnreadableLossError):
            terms = terms_of(loss, count_rows, below)
        if takes_functions:
            _refuse_functions(terms)
        if found is not None:
            if self._lister is not None:
                raise UnreadableLossError(_no_weight_helps(found.function.in_words("a sum of terms, each with its own weight")))
            _refuse_counts_apart(terms, found.function)
        if self._lister is not None:
            counts = [_checked(_count(weight, batch, rows), weight) for weight in self._lister.weights]
            self._terms = self._lister.read(terms, counts)
            guard_against_zero(terms)
            self.criterion = self._lister.description
            return Contribution(counts[0], tuple(counts[1:]))
        if self._weight == "equal":
            self.criterion = "equal: a mean of the micro-batches' means"
            return Contribution(1.0)
        assert not isinstance(self._weight, (str, tuple))
        if isinstance(batch, Iterator):
            raise TypeError(
                f"weight={self._weight} counts in the batch, but training_step draws its batches by itself (`dataloader_iter`)."
                ' Use weight="auto".'
            )
        weight = _checked(_count(self._weight, batch, rows), self._weight)
        if is_first:
            self.criterion = f"{getattr(self._weight, '__name__', self._weight)}"
        if self.proportion.looks_left and terms:
            self._compare_with_graph(terms, weight)
        guard_against_zero(terms)
        return Contribution(weight, of_mean=None if found is None else found.of_mean(loss))

    def take_terms(self) -> list[TermNode]:
        """Where the terms of the last loss are to be scaled; none where they share one weight. They are not kept."""
        terms, self._terms = self._terms, []
        return terms

    def leave_out_function(self, loss: Tensor) -> None:
        """Have the backward of the last loss give the gradients of the mean that it is a function of. That is not kept."""
        assert self._found is not None
        self._found.leave_out(loss)
        self._found = None

    def forget(self) -> None:
        """Keep nothing of the graph of the last loss."""
        self._terms, self._found = [], None

    def _describe(self, reading: Reading) -> None:
        if reading.weight is None:
            self.criterion = f"{reading.criterion}: added up, divided by nothing"
        else:
            self.criterion = f"{reading.criterion}, each micro-batch weighed by what its loss was divided by"
        self.unweighed_terms = tuple(dict.fromkeys(term.criterion for term in reading.others if term.denominator is None))
        self.unweighed_beside = reading.criterion if self.unweighed_terms else None

    def warn_of_terms(self) -> None:
        """Warn of :attr:`unweighed_terms`, once, as the window in which they were seen ends; not where they add up."""
        criterion, self.unweighed_beside = self.unweighed_beside, None
        if criterion is not None and not self._is_proven():
            self._warn(
                f"The loss has terms that are no plain mean over the same count as its {criterion}:"
                f" {', '.join(self.unweighed_terms)}. They take the weight of the {criterion}; for them a window may"
                f" differ from its full batch. {HOW_TO_SEE_ALL}"
            )

    @property
    def may_count_rows(self) -> bool:
        """A weight was, or may have been, the number of samples, and not of what is in them."""
        return self.shares is not None or any(kind.is_of_samples for kind in self._kinds.values())

    def _kind(self, reading: Reading, terms: Sequence[Term], rows: Rows) -> Kind | None:
        """What the weight of a loss counts. A mean that was over its samples once is taken for one over its samples."""
        if reading.weight is None:
            return None
        main = next((term for term in terms if term.denominator is reading.weight), terms[0])
        sizes = sizes_of(main.node)
        key = (reading.criterion, len(sizes))
        if key not in self._kinds:
            positions = sizes[0] if kind_of(main.node) == "NllLoss" and sizes else main.denominator
            is_of_samples = not isinstance(positions, Tensor) and positions == rows()
            self._kinds[key] = Kind(*key, is_of_samples)
        return self._kinds[key]

    def _compare_with_graph(self, terms: Sequence[Term], weight: Denominator) -> None:
        """A naive count is off by the model's own shift or mask: say so where the graph knows better."""
        try:
            reading = read_terms(terms)
        except UnreadableLossError:
            return
        if reading.weight is None:
            self.proportion.looks_left = 0
            if self._is_proven():
                return
            self._warn(
                f"The loss is a sum ({reading.criterion}), but weight={self._weight} treats it as a mean over {float(weight):g}."
                ' With weight="auto" sums are added as they are.'
            )
        else:
            self.proportion.look(weight, reading.weight, reading.criterion)


def _are_same(one: Denominator | None, other: Denominator | None) -> bool:
    """Whether two denominators are known on the host to be the same, but for the order in which they were added up."""
    if one is None or other is None or any(isinstance(d, Tensor) and d.device.type != "cpu" for d in (one, other)):
        return one is other
    types = [d.dtype for d in (one, other) if isinstance(d, Tensor) and d.is_floating_point()]
    rounding = 16 * max((torch.finfo(dtype).eps for dtype in types), default=0.0)
    first, second = float(one), float(other)
    return math.isclose(first, second, rel_tol=0.0 if first.is_integer() and second.is_integer() else rounding)


def _number_for(terms: Sequence[Term], penalties: Sequence[str]) -> Denominator:
    """A number from 1 to 2 that is another one where a factor of a term is, or a penalty; in double precision."""
    number: Denominator = sum(zlib.crc32(penalty.encode()) for penalty in penalties) / 2**32
    for place, term in enumerate(terms, start=1):
        if term.factor not in (0.0, 1.0):
            number = number + (math.log(abs(term.factor)) + (term.factor < 0)) * (0.4 + place / math.pi)
        for constant in term.constants:
            if constant.device.type == "cpu":
                value = abs(constant.item()) or 1e-300
                number = number + (math.log(value) + (constant.item() < 0)) * (0.4 + place / math.pi)
            else:
                constant = exact(constant).reshape(())
                number = number + ((constant.abs() + 1e-300).log() + (constant < 0)) * (0.4 + place / math.pi)
    return 1.0 + number % 1.0


def _ways(terms: Sequence[Term], loss: Tensor) -> tuple[frozenset[Way], frozenset[Way]]:
    """How the terms of a loss were read; and those that were multiplied by 0."""
    ways: tuple[set[Way], set[Way]] = set(), set()
    for term in terms:
        node, index = (loss.grad_fn, loss.output_nr) if term.edge is None else term.edge[0].next_functions[term.edge[1]]
        if term.factor != 0 or not is_of_zeros(term.node):
            ways[term.factor == 0].add(path_of(node, index))
        if term.is_divided_sum and _is_at_most_one(term.denominator):
            ways[0].add(COUNTS_NOTHING)
    return frozenset(ways[0]), frozenset(ways[1])


def _is_at_most_one(count: Denominator | None) -> bool:
    """And not 0."""
    known = _known(count)
    return known is not None and 0 < known <= 1


def _known(count: Denominator | None) -> float | None:
    """A count as the host knows it; None where there is none, or a device has it."""
    return None if count is None or (isinstance(count, Tensor) and not count.is_cpu) else float(count)


def _raised_together(terms: list[Term]) -> list[Term]:
    """A masked sum of nothing weighs nothing, but what else is divided by its count, which was raised to 1, does."""
    counts = {
        term.divisions: term.denominator
        for term in terms
        if term.divisions and term.is_divided_sum and _is_at_most_one(term.denominator)
    }
    return [
        term._replace(denominator=counts[term.divisions])
        if term.is_divided_sum and term.divisions in counts and _known(term.denominator) == 0
        else term
        for term in terms
    ]


def _count(weight: Weight, batch: Any, rows: int | None) -> Any:
    """What a weight counts; the samples of a part of a batch are known, where its list of two images could be an input and its
    target too.
    """
    return rows if rows is not None and weight == SampleCount() else weight(batch)


def _refuse_counts_apart(terms: Sequence[Term], function: FunctionOfMean) -> None:
    """A function of a sum of means over different counts needs the totals of all of them.

    Raises:
        UnreadableLossError: the terms are such a sum.
    """
    with suppress(UnreadableLossError):
        reading = read_terms(terms)
        if all(_are_same(term.denominator, reading.weight) for term in reading.others):
            return
    raise UnreadableLossError(_no_weight_helps(function.in_words("a sum of terms with different denominators")))


def _refuse_functions(terms: Sequence[Term]) -> None:
    """No weight makes micro-batches add up to a sum of which one term is a function of a mean over the batch.

    Raises:
        UnreadableLossError: these terms are such a sum.
    """
    for term in terms:
        if not term.is_readable and (any(map(term.criterion.count, _OF_COLUMNS)) or is_of_whole_losses(term.node)):
            raise UnreadableLossError(_no_weight_helps(term.criterion))


_OF_COLUMNS = (" of a function of ", " with a reduction over the batch")
"""In what is said of a mean of functions, each of the mean of a column."""


def _zero_where_empty(weight: Denominator | None, value: Denominator, term: Term) -> Denominator | None:
    """A loss of 0 that was divided by a count of at most 1 is that of no label: ``loss.sum() / max(int(mask.sum()), 1)``.

    But for one row, whose own loss may be 0, as that of a margin that is kept.
    """
    if weight is None or not term.is_divided_sum or term.rows == 1:
        return weight
    if isinstance(weight, Tensor):
        value = value.detach() if isinstance(value, Tensor) else torch.tensor(value)
        return torch.where((value == 0) & (weight <= 1), torch.zeros_like(weight), weight)
    return 0.0 if weight <= 1 and bool(value == 0) else weight


def _checked(weight: Any, source: Any) -> Denominator:
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ValueError(f"weight={source} must return one number per batch, but returned a tensor of {tuple(weight.shape)}")
        if weight.device.type != "cpu":
            return weight.detach().reshape(())  # elsewhere its value is checked at the end of the window
        weight = weight.item()
    if isinstance(weight, (bool, complex)) or not isinstance(weight, Number):
        raise TypeError(f"weight={source} must return a scalar tensor or a number, but returned {type(weight).__name__}")
    number = float(weight)  # type: ignore[arg-type]  # of a Fraction, a Decimal, a number of numpy
    if not (number >= 0 and math.isfinite(number)):
        raise ValueError(f"weight={source} must be a count, finite and not negative, but returned {weight}")
    return number


def _how_to_mend(found: str) -> str:
    hint = ""
    if "Compiled" in found:
        hint = " Where training_step is compiled, its graph is hidden; compiling only the network inside keeps it readable."
    return (
        f'weight="auto" found no denominator in the loss: its graph ends in {found}.{hint} Say what the mean loss is divided by:'
        " GradientAccumulation(weight=TokenCount(...)) for tokens, weight=SampleCount() for samples, weight=<a callable of the"
        ' batch> for anything else, or weight="equal" for the mean of the micro-batches\' means.'
    )


def _no_weight_helps(found: str) -> str:
    return (
        f"The loss is, or has in it, a function of a mean over the batch that is not one function of one mean: {found}. No weight"
        f" makes micro-batches add up to that of their batch. {HOW_TO_SEE_ALL} Or take the mean of the micro-batches' losses, with"
        ' weight="equal".'
    )
