"""What a verification found, as text, as a table and as a figure."""

from __future__ import annotations

import io
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from textwrap import fill
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.figure import Figure
    from rich.console import Group

SHOWN = 10
"""How many parameters the table lists."""


@dataclass(frozen=True)
class Break:
    """Something that breaks equality.

    Attributes:
        name: what it is: ``"BatchNorm"``, ``"contrastive loss"``, ``"batch_idx"``, ...
        found: what was seen of it, in a sentence.
        difference: how far the gradients are apart with it, relative to the full batch's; NaN where that could not be measured.
        without: how far without it; None where it could not be taken out.
        mend: the argument, or the change to the module, that mends it.
    """

    name: str
    found: str
    difference: float
    without: float | None
    mend: str


@dataclass(frozen=True)
class ParameterDifference:
    """How far one parameter is from where the full batch has it.

    Attributes:
        name: of the parameter.
        gradient: how far its gradients are apart, relative to the full batch's. A gradient of less than a hundredth of the typical
            size, such as one that is 0 but for rounding, is measured by that hundredth.
        update: how far apart the optimizer step has moved it, relative to the way that the full batch moved it; likewise.
    """

    name: str
    gradient: float
    update: float


@dataclass(frozen=True, repr=False)
class Report:
    """The result of :func:`~lightning_accum.verify`. True where equality holds.

    Attributes:
        module: the class of the module.
        compared: what was compared with what, in words.
        is_equal: the verdict.
        gradient: how far the gradients are apart: the norm of the difference, relative to that of the full batch's gradient.
        update: how far apart the step has moved the parameters, relative to the way that the full batch moved them.
        losses: of the full batch, and of the window.
        tolerance: what the gradient of no parameter may exceed.
        tolerance_reason: where that comes from.
        parameters: all parameters, the worst first.
        weight: what each micro-batch weighs, in words.
        breaks: what breaks equality.
        notes: what else there is to know: dropout that was switched off, padding, warnings of the run.
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

    def __bool__(self) -> bool:
        """Whether equality holds."""
        return self.is_equal

    @property
    def verdict(self) -> str:
        """The result in a line."""
        if self.is_equal:
            return f"Equal: {self.module} takes the same optimizer step on micro-batches as on the full batch."
        names = ", ".join(dict.fromkeys(found.name for found in self.breaks))
        return f"Not equal: {self.module} does not do on micro-batches what it does on the full batch ({names})."

    @property
    def worst(self) -> Sequence[ParameterDifference]:
        """The ten parameters whose gradients are farthest apart."""
        return self.parameters[:SHOWN]

    # --- as text ------------------------------------------------------------------------------------------------------

    def __str__(self) -> str:
        """As a table with colours in a terminal where rich is installed, else as plain text."""
        if sys.stdout.isatty() and find_spec("rich") is not None:
            from rich.console import Console

            text = io.StringIO()
            console = Console(file=text, force_terminal=True, width=Console().width)
            console.print(self)
            return text.getvalue().rstrip("\n")
        return self.plain()

    def __repr__(self) -> str:
        return self.plain()

    def plain(self) -> str:
        """As plain text of up to 100 columns."""
        lines = [self._wrapped(self.verdict), self._wrapped(self.compared)]
        for found in self.breaks:
            lines += [
                "",
                self._wrapped(f"{found.name}: {found.found} {_effect(found)}"),
                self._wrapped(f"    To mend it: {found.mend}"),
            ]
        width = max(len(name) for name, _, _ in self._rows())
        lines += ["", *(f"{name:<{width}}  {gradient:>9}  {update:>9}" for name, gradient, update in self._rows())]
        if len(self.parameters) > SHOWN:
            lines.append(f"... and {len(self.parameters) - SHOWN} more that are closer")
        lines += ["", *(self._wrapped(f"{name}: {value}") for name, value in self._facts())]
        if self.notes:
            lines += ["", *(self._wrapped(f"- {note}") for note in self.notes)]
        return "\n".join(lines)

    def _rows(self) -> list[tuple[str, str, str]]:
        """The table: its head, all parameters together, and the worst."""
        return [
            ("relative difference", "gradient", "update"),
            ("all parameters", number(self.gradient), number(self.update)),
            *((row.name, number(row.gradient), number(row.update)) for row in self.worst),
        ]

    def _facts(self) -> list[tuple[str, str]]:
        full, window = self.losses
        return [
            ("tolerance", f"{self.tolerance:.2g} ({self.tolerance_reason})"),
            ("loss", f"{full:.12g} of the full batch" + (f", {window:.12g} of the micro-batches" if window == window else "")),
            ("weight", self.weight),
        ]

    @staticmethod
    def _wrapped(text: str) -> str:
        indent = "  " if text.startswith("- ") else "    "
        return fill(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)

    # --- as a table ---------------------------------------------------------------------------------------------------

    def __rich__(self) -> Group:
        from rich.box import SIMPLE_HEAD
        from rich.console import Group
        from rich.padding import Padding
        from rich.table import Table
        from rich.text import Text

        colour = "green" if self.is_equal else "red"
        table = Table(box=SIMPLE_HEAD, show_edge=False, padding=(0, 1), pad_edge=False)
        (first, *titles), *rows = self._rows()
        table.add_column(first, overflow="fold")
        for title in titles:
            table.add_column(title, justify="right", no_wrap=True)
        values = [self.gradient, *(row.gradient for row in self.worst)]
        for difference, (name, shown, update) in zip(values, rows, strict=True):
            style = "green" if difference <= self.tolerance else "red"
            is_first = name == rows[0][0]
            table.add_row(Text(name), Text(shown, style), update, end_section=is_first, style="bold" if is_first else "")
        parts: list[Any] = [Text(self.verdict, f"bold {colour}"), Text(self.compared)]
        for found in self.breaks:
            parts += [Text(), Text.assemble((found.name, "bold red"), f": {found.found} {_effect(found)}")]
            parts.append(Padding(Text.assemble(("To mend it: ", "bold"), found.mend), (0, 0, 0, 4)))
        parts += [Text(), Padding(table, (0, 0, 0, 2))]
        if len(self.parameters) > SHOWN:
            parts.append(Text(f"  ... and {len(self.parameters) - SHOWN} more that are closer", "dim"))
        facts = Table.grid(padding=(0, 2))
        for name, value in self._facts():
            facts.add_row(Text(name, "bold"), Text(value))
        parts += [Text(), facts]
        if self.notes:
            notes = Table.grid(padding=(0, 1))
            for note in self.notes:
                notes.add_row("-", Text(note))
            parts += [Text(), notes]
        return Group(*parts)

    # --- as a figure --------------------------------------------------------------------------------------------------

    def plot(self, path: str | Path | None = None) -> Figure:
        """Draw the differences of the worst parameters beside the tolerance, and what breaks equality.

        Args:
            path: where to write it, as a PNG or whatever else its ending says; None for nowhere.

        Raises:
            ModuleNotFoundError: matplotlib is not installed.
        """
        if find_spec("matplotlib") is None:
            raise ModuleNotFoundError("report.plot() needs matplotlib: pip install 'lightning-accum[demo]'")
        from lightning_accum.verification.figure import draw

        figure = draw(self)
        if path is not None:
            figure.savefig(path, dpi=130)
        return figure


def number(value: float) -> str:
    """A difference in few characters.

    Example:
        >>> number(0.0), number(3.21e-16), number(0.25), number(float("nan"))
        ('0', '3.2e-16', '0.25', '?')
    """
    if value != value:
        return "?"
    return f"{value:.2g}" if value == 0 or 0.001 <= value < 1000 else f"{value:.1e}"


def _effect(found: Break) -> str:
    if found.difference != found.difference:
        return ""
    if found.without is None:
        return f"The worst gradient is {number(found.difference)} apart."
    return f"The worst gradient is {number(found.difference)} apart with it, {number(found.without)} without."
