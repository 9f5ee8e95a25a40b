"""The weight of a micro-batch: the denominator of its mean loss.

``"auto"`` reads it from the loss itself (see :mod:`lightning_accum.weighing.graph`), or measures it (see
:mod:`lightning_accum.weighing.shares`); explicit weights count it from the batch (see :mod:`lightning_accum.weighing.counts`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from numbers import Number
from typing import Any, Literal

from torch import Tensor

from lightning_accum.errors import ArgumentError, UnreadableLossError, WrongTypeError
from lightning_accum.weighing.contribution import Contribution, Kind
from lightning_accum.weighing.counts import SampleCount, Weight, count_samples
from lightning_accum.weighing.denominator import CRITERIA, Denominator, PlainMean, Term, on_host
from lightning_accum.weighing.functions import FoundFunction, FunctionOfMean, function_of_mean, is_of_whole_losses
from lightning_accum.weighing.graph import Reading, read_terms, terms_of
from lightning_accum.weighing.nodes import kind_of, path_of, sizes_of
from lightning_accum.weighing.reductions import Rows
from lightning_accum.weighing.safeguards import guard_against_zero
from lightning_accum.weighing.shares import ShareWeight
from lightning_accum.weighing.term_facts import are_same, number_for, raised_together, ways_of, zero_where_empty
from lightning_accum.weighing.term_nodes import Proportion, TermLister, TermNode, TermReader
from lightning_accum.weighing.terms import HOW_TO_SEE_ALL, unless_rounded


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
        """Reads a loss that is a mean criterion itself; and what the first one brought in, of which the weight is not constant."""
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
            TypeError, ValueError: an explicit weight returned what cannot be a weight; or the loss is more than one number.
        """
        if loss.shape and loss.numel() != 1:
            found = f"a tensor of shape {tuple(loss.shape)}"
            raise ArgumentError(f"training_step must return a loss of one number, its mean or its sum, but returned {found}")
        node = loss.grad_fn
        if node is None:  # `torch.zeros((), requires_grad=True)`: nothing to train on. Without: backward will say so
            return Contribution(0.0 if loss.requires_grad else 1.0)
        if self._plain is not None and self.shares is None:
            plain, first = self._plain
            if (count := plain.read(node)) is not None:
                if not isinstance(count, Tensor) and count == first.weight:
                    return first
                return Contribution(count, factors=first.factors, kind=first.kind, ways=first.ways)
        count_rows = cache(lambda: count_samples(batch) if rows is None else rows)
        if self.shares is not None:
            return self._measured(self.shares, loss, count_rows)
        takes_functions = self._weight != "equal" and self.takes_functions
        self._found = function_of_mean(node, loss.output_nr) if takes_functions else None
        if self._weight == "auto":
            return self._read(loss, count_rows)
        terms: list[Term] = []
        with suppress(UnreadableLossError):
            terms = terms_of(loss, count_rows, None if self._found is None else self._found.mean)
        if takes_functions:
            _refuse_functions(terms)
        return self._counted(batch, rows, terms, loss)

    def _measured(self, shares: ShareWeight, loss: Tensor, rows: Rows) -> Contribution:
        self.criterion = shares.in_words
        try:
            measured, factor = shares(loss, rows)
        except UnreadableLossError as unreadable:
            raise UnreadableLossError(_how_to_mend(unreadable.found)) from None
        return Contribution(measured, factors=factor, ways=frozenset((path_of(loss.grad_fn, loss.output_nr),)))

    def _read(self, loss: Tensor, rows: Rows) -> Contribution:
        """The weight that the graph of a loss shows."""
        found, terms = self._found, list[Term]()
        try:
            terms = raised_together(terms_of(loss, rows, None if found is None else found.mean))
            reading = read_terms(terms)
            if not self.takes_numbers and any(term.number is not None for term in terms):
                raise UnreadableLossError("a sum divided by a number, which in parts of the first batch was no count of theirs")
        except UnreadableLossError as unreadable:
            _refuse_functions(terms)
            raise UnreadableLossError(_how_to_mend(unreadable.found)) from None
        kind = self._kind(reading, terms, rows)
        if found is not None:
            _refuse_counts_apart(terms, found.function)
            reading = Reading(found.function.in_words(reading.criterion), reading.weight, penalties=reading.penalties)
        if self.criterion is None:
            self._describe(reading)
        guard_against_zero(terms)
        divisor = None if reading.weight is None else on_host(reading.weight)
        ways, zeroed = ways_of(terms, loss)
        read = Contribution(divisor, kind=kind, ways=ways, zeroed=zeroed)
        is_one_sum = all(term.is_divided_sum and are_same(term.denominator, reading.weight) for term in reading.others)
        if reading.others and not (is_one_sum and self._reader is None):  # else chunks of a sum over one count
            return self._with_others(read, terms, reading, loss, is_one_sum)
        factors = number_for(terms, reading.penalties)
        of_mean = None if found is None else found.of_mean(loss)
        weight = zero_where_empty(divisor, loss if of_mean is None else of_mean.mean, terms[0])
        read = read._replace(weight=weight, factors=factors, of_mean=of_mean)
        if terms[0].node is loss.grad_fn and kind_of(terms[0].node) in CRITERIA:
            self._plain = (PlainMean(terms[0].node), read)
        return read

    def _with_others(
        self, read: Contribution, terms: Sequence[Term], reading: Reading, loss: Tensor, is_one_sum: bool
    ) -> Contribution:
        """What was read of a loss of several terms, with what the others are divided by."""
        others = tuple(unless_rounded(t.denominator, reading.weight) for t in reading.others if t.denominator is not None)
        if is_one_sum:  # another rank may have it in fewer chunks, or in terms that are no chunks
            weight = zero_where_empty(read.weight, loss, terms[0])
            read, others = read._replace(weight=weight), tuple(0.0 if weight is None else weight for _ in others)
        penalties = reading.penalties
        if self.fixed_counts and not any(isinstance(other, Tensor) for other in others) and others == self.fixed_counts:
            others, penalties = (), (*penalties, *map(str, others))
        factors, signature = number_for(terms, penalties), 0
        if self._reader is not None and others and reading.weight is not None:
            self._terms, signature = self._reader.read(terms, reading, factors)
        return read._replace(others=others, signature=signature, factors=factors, is_one_sum=is_one_sum)

    def _counted(self, batch: Any, rows: int | None, terms: Sequence[Term], loss: Tensor) -> Contribution:
        """The explicit weight, or equal ones."""
        found = self._found
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
            raise WrongTypeError(
                f"weight={self._weight} counts in the batch, but training_step draws its batches by itself (`dataloader_iter`)."
                ' Use weight="auto".'
            )
        weight = _checked(_count(self._weight, batch, rows), self._weight)
        if self.criterion is None:
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
        if all(are_same(term.denominator, reading.weight) for term in reading.others):
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


def _checked(weight: Any, source: Any) -> Denominator:
    if isinstance(weight, Tensor):
        if weight.numel() != 1:
            raise ArgumentError(f"weight={source} must return one number per batch, but returned a tensor of {tuple(weight.shape)}")
        if weight.device.type != "cpu":
            return weight.detach().reshape(())  # elsewhere its value is checked at the end of the window
        weight = weight.item()
    if isinstance(weight, (bool, complex)) or not isinstance(weight, Number):
        raise WrongTypeError(f"weight={source} must return a scalar tensor or a number, but returned {type(weight).__name__}")
    number = float(weight)  # type: ignore[arg-type]  # of a Fraction, a Decimal, a number of numpy
    if not (number >= 0 and math.isfinite(number)):
        raise ArgumentError(f"weight={source} must be a count, finite and not negative, but returned {weight}")
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
