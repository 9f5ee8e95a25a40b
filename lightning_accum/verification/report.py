"""What a verification found, as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import NamedTuple

SHOWN = 10  # parameters in the table


class Break(NamedTuple):
    """Something that breaks equality, and the argument, or the change to the module, that mends it.

    The relative error of the gradients is ``difference`` with it (NaN if that could not be measured), and ``without`` it; None if
    it could not be taken out.
    """

    name: str
    found: str
    difference: float
    without: float | None
    mend: str


class ParameterDifference(NamedTuple):
    """Relative errors of a parameter's gradient and of its update; of tiny ones relative to a hundredth of the typical size."""

    name: str
    gradient: float
    update: float


@dataclass(frozen=True, repr=False)
class Report:
    """The result of :func:`~lightning_accum.verify`. True where equality holds.

    Attributes:
        compared: what was compared with what, in words.
        gradient: the norm of the gradients' difference, relative to that of the full batch's gradient.
        update: the same for the ways that the step moves the parameters.
        losses: of the full batch, and of the window.
        tolerance: what the gradient of no parameter may exceed, and why.
        parameters: all of them, the worst first.
        weight: what each micro-batch weighs, in words.
        breaks: what breaks equality.
        notes: what else there is to know: dropout that was switched off, padding, warnings of the run.
        ranks: that the window was taken on; 1 where it was compared in one process, or differed there already.
    """

    module: str
    compared: str
    is_equal: bool
    gradient: float
    update: float
    losses: tuple[float, float]
    tolerance: float
    tolerance_reason: str
    parameters: Sequence[ParameterDifference]
    weight: str
    breaks: Sequence[Break] = ()
    notes: Sequence[str] = ()
    ranks: int = 1

    def __bool__(self) -> bool:
        """Whether equality holds."""
        return self.is_equal

    @property
    def verdict(self) -> str:
        """The result in a line."""
        where = "on micro-batches" if self.ranks == 1 else f"on {self.ranks} ranks"
        if self.is_equal:
            return f"Equal: {self.module} takes the same optimizer step {where} as on the full batch."
        names = ", ".join(dict.fromkeys(found.name for found in self.breaks))
        return f"Not equal: {self.module} does not do {where} what it does on the full batch ({names})."

    @property
    def worst(self) -> Sequence[ParameterDifference]:
        """The ten parameters whose gradients differ most."""
        return self.parameters[:SHOWN]

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        """As plain text of up to 100 columns."""
        paragraphs = [[self.verdict, self.compared]]
        for found in self.breaks:
            paragraphs.append([f"{found.name}: {found.found} {_effect(found)}", f"    To mend it: {found.mend}"])
        rows = [ParameterDifference("all parameters", self.gradient, self.update), *self.worst]
        lines = _aligned([("relative difference", "gradient", "update"), *((n, _number(g), _number(u)) for n, g, u in rows)])
        if len(self.parameters) > SHOWN:
            lines.append(f"... and {len(self.parameters) - SHOWN} more that are closer")
        full, window = self.losses
        of_window = f", {window:.12g} of the micro-batches" if window == window else ""
        facts = [
            f"tolerance: {self.tolerance:.2g} ({self.tolerance_reason})",
            f"loss: {full:.12g} of the full batch{of_window}",
            f"weight: {self.weight}",
        ]
        texts = ["\n".join(map(_wrapped, paragraph)) for paragraph in (*paragraphs, facts, [f"- {note}" for note in self.notes])]
        return "\n\n".join([*texts[:-2], "\n".join(lines), *filter(None, texts[-2:])])


def _aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """The lines of a table, whose first column is to the left and the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join([n.ljust(widths[0]), *map(str.rjust, numbers, widths[1:])]) for n, *numbers in rows]


def _number(value: float) -> str:
    if value != value:
        return "?"
    return f"{value:.2g}" if value == 0 or 0.001 <= value < 1000 else f"{value:.1e}"


def _effect(found: Break) -> str:
    if found.difference != found.difference:
        return ""
    without = "." if found.without is None else f" with it, by {_number(found.without)} without."
    return f"The worst gradient differs by {_number(found.difference)}{without}"


def _wrapped(text: str) -> str:
    indent = "  " if text.startswith("- ") else "    "
    return fill(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
