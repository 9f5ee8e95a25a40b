"""Which padding may be trimmed: asked of the module once for each kind of padding, and remembered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal, TypeAlias

from lightning_accum.splitting.micro_batch import Layout
from lightning_accum.splitting.padding import Spans

Proof: TypeAlias = Callable[[Any, Any], str | None]
"""Takes a few rows with all of their padding and the same without some of it. Returns None where the module's loss for both is
the same, else what was seen."""


class Proofs:
    """Answers for either side of rows, and for each tensor that tells where they end.

    Args:
        warn: takes a warning that should be seen once.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        self.answers: dict[tuple[str, tuple[str, ...]], bool] = {}
        """Whether padding may be trimmed, by side and by what tells it."""
        self._warn = warn

    def forget_what_was_right(self) -> None:
        """Ask again where trimming was found right."""
        self.answers = {known: may for known, may in self.answers.items() if not may}

    def trimmable(self, layout: Layout, spans: dict[int, Spans], proof: Proof) -> dict[int, Spans]:
        """The spans without the padding that the loss was found to depend on."""
        kept = []
        for span in spans.values():
            right = span.is_padded_right and not self._may_be_trimmed("right", span, layout, proof)
            left = span.is_padded_left and not self._may_be_trimmed("left", span, layout, proof)
            kept.append(span.keep_padding(left, right))
        return {span.length: span for span in kept if span.is_padded}

    def _may_be_trimmed(self, side: Literal["left", "right"], span: Spans, layout: Layout, proof: Proof) -> bool:
        known = (side, span.told_by)
        if known not in self.answers:
            self.answers[known] = self._prove(side, span, layout, proof)
        return self.answers[known]

    def _prove(self, side: Literal["left", "right"], span: Spans, layout: Layout, proof: Proof) -> bool:
        span = span.keep_padding(left=side == "right", right=side == "left")
        rows = sorted(range(layout.size), key=span.widths.__getitem__)[:2]
        if span.columns(rows) == slice(0, span.length):
            rows = rows[:1]  # the second has no padding: the proof would be of the same batch twice
        found = proof(layout.take(rows), layout.take(rows, kept_columns(rows, [span])))
        if found is not None:
            self._warn(
                f"Padding on the {side} of rows is not trimmed: the loss of this module depends on it ({found}). Pass"
                " GradientAccumulation(trim_padding=False) to say so yourself."
            )
        return found is None


def kept_columns(rows: Sequence[int], spans: Iterable[Spans]) -> dict[int, slice]:
    """The columns that ``rows`` need, by the size of the dimension that has them; none where that is all."""
    kept = {span.length: span.columns(rows) for span in spans}
    return {size: columns for size, columns in kept.items() if columns != slice(0, size)}
