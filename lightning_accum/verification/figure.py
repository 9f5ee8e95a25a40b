"""The differences of a report, drawn."""

from __future__ import annotations

from textwrap import fill

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

from lightning_accum.verification.report import Report

FLOOR = 1e-18
"""Where a difference of exactly zero is drawn, which a logarithmic axis has no place for."""
# Okabe and Ito's colours, which the colour-blind tell apart
EQUAL, APART, UPDATE = "#0072B2", "#D55E00", "#999999"


def draw(report: Report) -> Figure:
    """A row for each of the worst parameters: a dot for its gradient, a ring for its update, on a logarithmic axis."""
    rows = [("all parameters", report.gradient, report.update), *((row.name, row.gradient, row.update) for row in report.worst)]
    broken = [found for found in report.breaks if found.difference == found.difference]
    height = 2.0 + 0.32 * len(rows) + (1.0 + 0.5 * len(broken) if broken else 0)
    figure = Figure(figsize=(10, height), layout="constrained")
    figure.suptitle(
        fill(report.verdict, 90, break_on_hyphens=False), fontsize=12, fontweight="bold", x=0.01, horizontalalignment="left"
    )
    panels = figure.subplots(
        2 if broken else 1, 1, sharex=True, squeeze=False, height_ratios=(len(rows), len(broken) + 1)[: 1 + bool(broken)]
    )
    axes = panels[0][0]
    _scale(axes, report)
    places = range(len(rows))
    for place, (_, gradient, update) in enumerate(rows):
        colour = EQUAL if gradient <= report.tolerance else APART
        axes.plot(_shown(gradient), place, "o", color=colour, markersize=8, label="gradient" if place == 0 else None)
        label = "update" if place == 0 else None
        axes.plot(_shown(update), place, "o", color=UPDATE, markerfacecolor="none", markersize=10, label=label)
    if not report.parameters:
        axes.text(0.5, 0.5, "not compared", transform=axes.transAxes, horizontalalignment="center", color=APART)
    axes.set_yticks(places, [_short(name) for name, _, _ in rows])
    axes.set_ylim(len(rows) - 0.5, -0.5)
    axes.set_title(fill(report.compared, 85, break_on_hyphens=False), loc="left", fontsize=10)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))
    last = axes
    if broken:
        last = panels[1][0]
        _scale(last, report)
        for place, found in enumerate(broken):
            without = found.difference if found.without is None else found.without
            last.plot([_shown(without), _shown(found.difference)], [place, place], color=APART, linewidth=2)
            last.plot(_shown(found.difference), place, "o", color=APART, markersize=8, label="with it" if place == 0 else None)
            if found.without is not None:
                last.plot(_shown(without), place, "o", color=EQUAL, markersize=8, label="without it")
        last.set_yticks(range(len(broken)), [found.name for found in broken])
        last.set_ylim(len(broken) - 0.5, -0.5)
        last.set_title("What breaks equality", loc="left", fontsize=10)
        handles, labels = last.get_legend_handles_labels()
        unique = dict(zip(labels, handles, strict=True))
        last.legend(unique.values(), unique.keys(), frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1))
    last.set_xlabel("difference from the full batch, relative to it")
    return figure


def _scale(axes: Axes, report: Report) -> None:
    axes.set_xscale("log")
    axes.set_xlim(FLOOR / 5, 50)
    axes.xaxis.set_major_locator(FixedLocator([FLOOR, *(10.0**exponent for exponent in range(-15, 1, 3))]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: "identical" if value == FLOOR else f"{value:.0e}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.axvline(report.tolerance, color="0.4", linestyle="--", linewidth=1, label=f"tolerance {report.tolerance:.1g}")
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="x", color="0.9")
    axes.set_axisbelow(True)


def _shown(value: float) -> float:
    return min(max(value, FLOOR), 10.0) if value == value else value  # NaN is not drawn


def _short(name: str) -> str:
    return name if len(name) <= 48 else f"...{name[-45:]}"
