"""Which padding may be trimmed: asked of the module once for each kind of padding, and remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lightning_accum.splitting.micro_batch import Layout
from lightning_accum.splitting.padding import Spans


@dataclass(frozen=True)
class Inconclusive:
    """What was tried neither shows that the loss depends on padding nor that it does not.

    Attributes:
        reason: why.
        needs_trimming: the module cannot run rows that have more columns than the longest of them needs.
    """

    reason: str
    needs_trimming: bool = False


Verdict: TypeAlias = str | Inconclusive | None
"""None where the module's loss does not depend on padding, what was seen where it does."""
Proof: TypeAlias = Callable[..., Verdict]
"""Takes a few rows with all of their padding, and the same rows without some of it, as one batch or as several."""
_Side: TypeAlias = Literal["left", "right"]
_Known: TypeAlias = tuple[str, tuple[str, ...]]


@dataclass
class _Wait:
    """A proof that could not be made.

    Attributes:
        batches: with this padding, until it is tried again.
        patience: as many as it last waited for.
    """

    batches: int = 0
    patience: int = 0


class TrimmingCheck:
    """Answers for either side of rows, and for each tensor that shows where they end.

    A proof that could not be made is tried again with the next batch that has such padding, then after one more, two, four.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.answers: dict[_Known, bool] = {}
        """Whether padding may be trimmed, by side and by the tensors that show it."""
        self._waits: dict[_Known, _Wait] = {}
        self._warn = warn

    def forget_what_was_right(self) -> None:
        """Ask again where trimming was found right."""
        self.answers = {known: may for known, may in self.answers.items() if not may}

    def trimmable(self, layout: Layout, spans: dict[int, Spans], proof: Proof) -> dict[int, Spans]:
        """The spans without the padding that the loss was found to depend on."""
        kept: list[Spans] = []
        needing: dict[_Known, Inconclusive] = {}
        for span in spans.values():
            may = {}
            for side in _padded_sides(span):
                known: _Known = (side, span.read_from)
                if known not in self.answers and not self._is_waiting(known):
                    verdict = self._prove(side, span, layout, proof)
                    if isinstance(verdict, Inconclusive) and verdict.needs_trimming:
                        needing[known] = verdict
                    else:
                        self._note(known, verdict)
                may[side] = self.answers.get(known, False)
            kept.append(span.keep_padding(left=not may.get("left", True), right=not may.get("right", True)))
        if needing:
            together = self._prove_together(layout, spans, proof)
            for known, alone in needing.items():
                self._note(known, alone if isinstance(together, Inconclusive) else together)
            if together is None:
                return self.trimmable(layout, spans, proof)
        return {span.length: span for span in kept if span.is_padded}

    def _is_waiting(self, known: _Known) -> bool:
        wait = self._waits.get(known)
        if wait is None or not wait.batches:
            return False
        wait.batches -= 1
        return True

    def _prove(self, side: _Side, span: Spans, layout: Layout, proof: Proof) -> Verdict:
        span = span.keep_padding(left=side == "right", right=side == "left")
        rows = sorted(range(layout.size), key=span.widths.__getitem__)[:2]
        if span.columns(rows) == slice(0, span.length):
            rows = rows[:1]  # the second has no padding: the proof would be of the same batch twice
        return proof(layout.take(rows), layout.take(rows, kept_columns(rows, [span])))

    def _prove_together(self, layout: Layout, spans: dict[int, Spans], proof: Proof) -> Verdict:
        """Ask a module that takes the longest row for the number of columns, of all its kinds of padding at once.

        Beside the shortest row of each kind stands one without padding, so that all columns are needed; then each is on its own.
        """
        rows: set[int] = set()
        for span in spans.values():
            whole = [row for row, width in enumerate(span.widths) if width == span.length]
            if not whole:
                return Inconclusive("no row needs all columns")
            rows |= {whole[0], span.widths.index(min(span.widths))}
        each = [layout.take([row], kept_columns([row], spans.values())) for row in sorted(rows)]
        return proof(layout.take(sorted(rows)), *each)

    def _note(self, known: _Known, verdict: Verdict) -> None:
        side = known[0]
        if isinstance(verdict, Inconclusive):
            if known not in self._waits:
                self._warn(
                    f"Padding on the {side} of rows is not trimmed so far: whether the loss of this module depends on it could not"
                    f" be found out ({verdict.reason}). It is tried again with later batches."
                )
            wait = self._waits.setdefault(known, _Wait())
            wait.batches, wait.patience = wait.patience, max(1, 2 * wait.patience)
            return
        self._waits.pop(known, None)
        self.answers[known] = verdict is None
        if verdict is not None:
            self._warn(
                f"Padding on the {side} of rows is not trimmed: the loss of this module depends on it ({verdict}). Pass"
                " GradientAccumulation(trim_padding=False) to say so yourself."
            )


def _padded_sides(span: Spans) -> list[_Side]:
    sides: list[_Side] = ["right"] if span.is_padded_right else []
    return [*sides, "left"] if span.is_padded_left else sides


def kept_columns(rows: Sequence[int], spans: Iterable[Spans]) -> dict[int, slice]:
    """The columns that ``rows`` need, by the size of the dimension that has them; none where that is all."""
    kept = {span.length: span.columns(rows) for span in spans}
    return {size: columns for size, columns in kept.items() if columns != slice(0, size)}
