"""The padding of rows: their lengths, read from the batch, and whether the loss depends on it.

Before padding is trimmed, the module itself is tried, once for each kind of padding.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from copy import copy
from functools import partial, reduce
from operator import or_
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_accum.errors import ArgumentError
from lightning_accum.prove import ALL, Look, Measured, aliases, first_of, fit_of
from lightning_accum.randomness import with_tensors
from lightning_accum.splitting.rows import IGNORE_INDEX, Layout, is_whole
from lightning_accum.step import Trained
from lightning_accum.sync.base import GradientSync
from lightning_accum.trial import Step, Trial
from lightning_accum.verdict import CannotCheckError, UnsuitableRowsError
from lightning_accum.weighing.known import Known
from lightning_accum.weighing.terms import ONCE, Mode

_MASKS = ("attention_mask", "decoder_attention_mask")  # 1 is a token, 0 is padding
_INVERTED_MASKS = ("key_padding_mask",)  # of torch.nn.Transformer: True is padding


class Lengths(NamedTuple):
    """How many columns each row needs: up to its last column without padding. Padding on the left stays."""

    columns: int  # the size of the dimension that can be trimmed, padding included
    of_rows: tuple[int, ...]
    read_from: tuple[str, ...]  # the tensors that the lengths were read from, by path


def kept_columns(rows: Sequence[int], lengths: Iterable[Lengths]) -> dict[int, slice]:
    """The columns that ``rows`` need, by the size of their dimension; empty if all columns are needed."""
    needed = {each.columns: max(each.of_rows[row] for row in rows) for each in lengths}
    return {columns: slice(number) for columns, number in needed.items() if number < columns}


def read_lengths(tensors: Mapping[str, Tensor], key: str | None = None) -> dict[int, Lengths]:
    """Read where the rows of a batch end.

    They are read from attention masks, else from labels of -100. All other tensors of whole numbers must agree: inputs repeat one
    value up to the end of a row. Reads values, which waits for an accelerator, so call it while the batch is on the host.

    ``key`` is the path, its last part, or the last words of its last part (``lengths`` for ``encoder_lengths`` and
    ``decoder_lengths``), of masks of shape (rows, columns), nonzero at tokens (but 0 at tokens in a ``key_padding_mask``), or of
    lengths of shape (rows,). Returns the lengths by the size of their dimension: an encoder-decoder has two.
    """
    if key is not None:
        found = {path: tensor for path, tensor in tensors.items() if path == key or f"_{_name(path)}".endswith(f"_{key}")}
        if not found:
            raise ArgumentError(f"the batch has no tensor {key!r} to read lengths from: its tensors are {', '.join(tensors)}")
        return _lengths({path: _explicit(path, tensor, tensors) for path, tensor in found.items()}, {})
    masks = {path: _is_token(path, mask) for path, mask in tensors.items() if mask.dim() == 2 and _is_mask(path)}
    of_masks = {mask.shape[1] for mask in masks.values()}
    # attention masks may have any value at padding; they have the columns in a second dimension, too
    others = {path: tensor for path, tensor in tensors.items() if tensor.dim() > 1 and of_masks.isdisjoint(tensor.shape[2:])}
    whole = {path: tensor for path, tensor in others.items() if is_whole(tensor)}
    labels = {
        path: tensor != IGNORE_INDEX
        for path, tensor in whole.items()
        if tensor.dim() == 2 and tensor.shape[1] not in (0, *of_masks) and bool((tensor[:, -1] == IGNORE_INDEX).any())
    }
    # an end of sequence without a label looks like one column of padding
    of_labels = {columns: found for columns, found in _lengths(labels, others).items() if min(found.of_rows) < columns - 1}
    return {**_lengths(masks, whole), **of_labels}


def _name(path: str) -> str:
    return path.rpartition(".")[2]


def _is_mask(path: str) -> bool:
    return _name(path) in _MASKS or _name(path).endswith(_INVERTED_MASKS)


def _is_token(path: str, mask: Tensor) -> Tensor:
    return mask == 0 if _name(path).endswith(_INVERTED_MASKS) else mask != 0


def _explicit(path: str, tensor: Tensor, tensors: Mapping[str, Tensor]) -> Tensor:
    if tensor.dim() == 2:
        return _is_token(path, tensor)
    if tensor.dim() == 1 and not tensor.is_floating_point():
        longest = int(tensor.max()) if len(tensor) else 0
        by_path = {other: t.shape[1] for other, t in tensors.items() if t.dim() > 1 and t.shape[1] >= longest}
        prefix = _name(path).rpartition("_")[0]  # `decoder_lengths` are of `decoder_target` rather than of `encoder_target`
        sizes = [size for other, size in by_path.items() if prefix and _name(other).startswith(f"{prefix}_")] or [*by_path.values()]
        if sizes:
            columns = longest if longest in sizes else sizes[0]  # as a rule the longest row has no padding
            return torch.arange(columns, device=tensor.device) < tensor[:, None]
        raise ArgumentError(f"the lengths in {path!r} are up to {longest}, but no tensor of the batch has as many columns")
    found = f"{path!r} has the shape {tuple(tensor.shape)} and type {tensor.dtype}"
    raise ArgumentError(f"{found}: expected a mask of shape (rows, columns) or whole numbers of shape (rows,)")


def _lengths(evidence: Mapping[str, Tensor], others: Mapping[str, Tensor]) -> dict[int, Lengths]:
    """The lengths by the number of columns, of those that have padding.

    ``evidence`` is True where there is a token. The ``others`` with as many columns must have padding there, too: one value, the
    same at the end of all padded rows. Else the columns stay, such as labels of a decoder that are as long as the encoder's
    mask by chance.
    """
    found = dict[int, Lengths]()
    for columns in {is_token.shape[1] for is_token in evidence.values()} - {0}:
        own = {path: is_token for path, is_token in evidence.items() if is_token.shape[1] == columns}
        is_token = reduce(or_, own.values())
        is_padded = ~is_token[:, -1]
        for other in (other for path, other in others.items() if path not in own and other.shape[1] == columns):
            padding = other[is_padded, -1:]
            if len(padding) and not _counts(other):
                differs = (other != padding[:1]) | (padding != padding[:1]).any()
                is_token = is_token | differs[..., None].flatten(2).any(2)
        last = (is_token * torch.arange(1, columns + 1, dtype=torch.int32, device=is_token.device)).amax(1)
        of_rows = tuple(last.clamp(min=1).tolist())  # a row of padding alone keeps one column
        if min(of_rows, default=columns) < columns:
            found[columns] = Lengths(columns, of_rows, tuple(own))
    return found


def _counts(tensor: Tensor) -> bool:
    """Whether every row stays or goes up by one from column to column, like positions and segments."""
    if tensor.dtype == torch.bool or not is_whole(tensor) or tensor.dim() != 2 or tensor.shape[1] < 2:
        return False
    lowest, highest = tensor.diff(dim=1).aminmax()
    return int(lowest) >= 0 and int(highest) <= 1


# --- does the loss depend on padding? --------------------------------------------------------------------------------------

_Kind: TypeAlias = tuple[tuple[str, ...], frozenset[tuple[str, int]]]
"""The tensors that the lengths are read from, and the dimensions that have their columns, as (path, number).

Another dimension may have the same size by chance, such as twenty classes and texts of twenty tokens: this is checked again.
"""
_NOT_TRIMMED = "Padding on the right of rows is not trimmed"


class Trimming:
    """Which padding may be trimmed. A check without an answer is repeated, less and less often.

    It never waits for other ranks, which may have nothing to check.
    """

    def __init__(self, trained: Trained, weight: Any, warn: Callable[[str], None]) -> None:
        self._trained, self._warn = trained, warn
        self._weigh = weight if callable(weight) else None if weight != "equal" else lambda batch: 1.0
        self._answers: dict[_Kind, bool] = {}
        self._seen: Counter[_Kind] = Counter()  # the number of batches with such padding before there was an answer

    def prove_again(self) -> None:
        """Check again where trimming was exact, since the loss may have changed."""
        self._answers = {kind: may for kind, may in self._answers.items() if not may}

    def trimmable(self, layout: Layout, lengths: Mapping[int, Lengths], step: Step) -> dict[int, Lengths]:
        """The lengths behind which the loss of ``step`` does not depend on padding."""
        sizes = {(path, at): size for path, tensor in layout.tensors.items() for at, size in enumerate(tensor.shape) if at}
        sizes |= {(path, at): size for path, tensor in layout.shared_tensors.items() for at, size in enumerate(tensor.shape)}
        kept = dict[int, Lengths]()
        for columns, own in lengths.items():
            kind = (own.read_from, frozenset(place for place, size in sizes.items() if size == columns))
            if kind not in self._answers:
                self._seen[kind] += 1
                if self._seen[kind].bit_count() == 1:
                    self._check(kind, _in_parts(own, [*lengths.values()], layout), step)
            if self._answers.get(kind, False):
                kept[columns] = own
        return kept

    def _check(self, kind: _Kind, tries: Iterator[Sequence[Any]], step: Step) -> None:
        """Compare rows with all of their padding and the same rows without it, and note the first answer."""
        reason: CannotCheckError | None = None
        for batches in tries:
            try:
                seen = self._difference(batches, step)
            except CannotCheckError as error:
                reason = error
                if isinstance(error, UnsuitableRowsError):
                    continue
                break
            self._answers[kind] = seen is None
            if seen is not None:
                turned_off = "GradientAccumulation(trim_padding=False) turns this warning off."
                self._warn(f"{_NOT_TRIMMED}: the loss depends on it ({seen}). {turned_off}")
            return
        if self._seen[kind] == 1:
            found = f"whether the loss depends on it could not be checked ({reason})"
            self._warn(f"{_NOT_TRIMMED} so far: {found}. Later batches are tried.")

    def _difference(self, batches: Sequence[Any], step: Step) -> str | None:
        """The difference of weight or gradient between the first batch and the others, its parts, in words; None without one."""
        if held := self._trained.snapshotter.iterators():
            raise CannotCheckError(f"the module holds an iterator, {held[0]}, whose items cannot be put back")
        trial = Trial(self._trained, partial(_run_alone, self._trained.module, step), GradientSync(), largest=float)
        return trial.in_widest_type(lambda wide: _compare(wide, self._weigh, batches), partial(copy, batches[0]))


def _in_parts(own: Lengths, lengths: Sequence[Lengths], layout: Layout) -> Iterator[Sequence[Any]]:
    """Some rows with all of their padding, and the same rows without some of it, as one batch or as several."""
    shortest = [row for row in sorted(range(layout.size), key=own.of_rows.__getitem__)[:2] if own.of_rows[row] < own.columns]
    yield layout.take(shortest), layout.take(shortest, kept_columns(shortest, [own]))
    if all(max(each.of_rows) == each.columns for each in lengths):
        # a module may use the longest row as the number of columns: all kinds of padding at once, with rows that need all columns
        rows = sorted({each.of_rows.index(number) for each in lengths for number in (max(each.of_rows), min(each.of_rows))})
        yield layout.take(rows), *(layout.take([row], kept_columns([row], lengths)) for row in rows)


def _compare(trial: Trial, weigh: Callable[[Any], Any] | None, batches: Sequence[Any]) -> str | None:
    measured = list[Measured]()
    try:
        with trial.held():
            for batch in batches:
                measured.append(trial.measure(partial(copy, batch), Known(), ()))
    except CannotCheckError as error:
        if measured:
            return f"without it, {error}"
        raise UnsuitableRowsError(f"with it, {error}") from error
    if not all(math.isfinite(one.loss) for one in measured):
        raise CannotCheckError("a loss is not finite")
    names = aliases(measured)
    for one in measured:
        one.rename(names)
    look = Look(measured[0], measured[1:])
    terms = first_of(one.terms for one in measured)
    modes: dict[int, Mode] = {key: term.default_mode if term.words else ONCE for key, term in terms.items()}
    fits = [fit_of([look], key, mode, trial.mode.eps) for key, mode in (modes if weigh is None else {ALL: weigh}).items()]
    if any(fit.mode is None for fit in fits):
        worst = max(fits, key=lambda fit: fit.deviation.size).deviation
        seen = f"relative error of {worst.seen}: {worst.size:.2g}"
        with_it, without = measured[0].loss, measured[-1].loss
        if len(batches) == 2 and not math.isclose(with_it, without, rel_tol=trial.tolerance):
            seen = f"its loss is {with_it:.9g} with it, {without:.9g} without"
        if trial.mode.eps >= torch.finfo(torch.float16).eps:
            raise CannotCheckError(f"{seen}, which may be rounding")
        return seen
    if not any(fit.deviation.has_evidence for fit in fits):
        raise CannotCheckError("these rows have no gradient")
    return None


def _run_alone(module: nn.Module, training_step: Callable[[Any], Any], batch: Any) -> Any:
    """Run a step with submodules in evaluation mode: dropout would draw numbers that depend on the shape."""
    for child in module.children():
        child.eval()
    with _Alone():  # type: ignore[no-untyped-call]
        return training_step(batch)


class _Alone(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of its __init_subclass__
    """Raises an error instead of waiting for other ranks."""

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if "c10d" in func.namespace:
            raise RuntimeError("its forward waits for other ranks, which may have no padding to check")
        return func(*with_tensors(func, args), **(kwargs or {}))
