"""What a verification found, as text."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from textwrap import fill
from typing import NamedTuple

SHOWN = 10  # parameters in the table


class Break(NamedTuple):
    """Something that breaks equality, and the argument, or the change to the module, that mends it.

    The relative error of the gradients is ``difference`` with it, and ``without`` it; None if it could not be taken out.
    """

    name: str
    found: str
    difference: float
    without: float | None
    mend: str


@dataclass(frozen=True, repr=False)
class Report:
    """The result of :func:`~lightning_accum.verify`. It is true if the two steps are equal.

    Attributes:
        compared: what was compared with what, in words.
        gradient: the norm of the difference of the two gradients, divided by the norm of the full batch's gradient.
        losses: the loss of the full batch, and the loss of the window.
        tolerance: the largest relative difference at which the steps count as equal.
        parameters: the relative difference of each parameter's gradient by its name, the largest first. A tiny gradient is compared
            with a hundredth of the typical size.
        weight: what each micro-batch weighs, in words.
        breaks: what breaks equality; if nothing does, the window takes the step of the full batch.
        notes: what else there is to know: dropout that was switched off, padding, warnings of the run.
        ranks: how many ranks took the window; 1 if it was compared in one process, or already differed there.
    """

    module: str
    compared: str
    gradient: float
    losses: tuple[float, float]
    tolerance: float
    tolerance_reason: str
    parameters: Mapping[str, float]
    weight: str
    breaks: Sequence[Break] = ()
    notes: Sequence[str] = ()
    ranks: int = 1

    def __bool__(self) -> bool:
        """Whether equality holds."""
        return not self.breaks

    @property
    def verdict(self) -> str:
        """The result in a line."""
        where = "on micro-batches" if self.ranks == 1 else f"on {self.ranks} ranks"
        if self:
            return f"Equal: {self.module} takes the same optimizer step {where} as on the full batch."
        names = ", ".join(dict.fromkeys(found.name for found in self.breaks))
        return f"Not equal: {self.module} does not do {where} what it does on the full batch ({names})."

    def __repr__(self) -> str:
        return str(self)

    def __str__(self) -> str:
        """As plain text of up to 100 columns."""
        paragraphs = [[self.verdict, self.compared]]
        for found in self.breaks:
            without = "" if found.without is None else f" with it, by {found.without:.2g} without"
            effect = f"The worst gradient differs by {found.difference:.2g}{without}."
            paragraphs.append([f"{found.name}: {found.found} {effect}", f"    Fix: {found.mend}"])
        rows = [("relative difference of the gradient", self.gradient), *list(self.parameters.items())[:SHOWN]]
        width = max(len(name) for name, _ in rows)
        more = [f"... and {len(self.parameters) - SHOWN} more that are closer"] if len(self.parameters) > SHOWN else []
        paragraphs.append([*(f"{name.ljust(width)}  {value:>7.2g}" for name, value in rows), *more])
        full, window = self.losses
        facts = [f"loss: {full:.12g} of the full batch, {window:.12g} of the micro-batches", f"weight: {self.weight}"]
        paragraphs.append([f"tolerance: {self.tolerance:.2g} ({self.tolerance_reason})", *facts])
        paragraphs.append([f"- {note}" for note in self.notes])
        return "\n\n".join("\n".join(map(_wrapped, paragraph)) for paragraph in paragraphs if paragraph)


def _wrapped(text: str) -> str:
    indent = "  " if text.startswith("- ") else "    "
    return fill(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)
