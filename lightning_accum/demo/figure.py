"""The loss curves, and how far they are from the full batch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MultipleLocator, NullLocator

from lightning_accum.demo.mix import FULL_BATCH, GLOBAL_BATCH, Mix

FLOOR = 1e-18
"""Where a difference of exactly zero is drawn, which a logarithmic axis has no place for."""

# Okabe and Ito's colours, which the colour-blind tell apart: warm for Lightning, cool for this package
COLOURS = {
    ("Lightning", "one process"): "#D55E00",
    ("Lightning", "DDP"): "#E69F00",
    ("lightning_accum", "one process"): "#0072B2",
    ("lightning_accum", "DDP"): "#009E73",
    ("lightning_accum", "FSDP2"): "#CC79A7",
}
MARKERS = "osD^v<P*"
ASIDE = 0.105
"""How far apart the markers of a step are drawn, in steps."""
NOTATION = "ranks x\nbatches in a window x\nsamples in a batch\n\n32/4: batches of 32,\nsplit into fours"
"""What the names of the runs say."""


def draw(curves: Mapping[Mix, Sequence[float]], epochs: int, path: Path) -> None:
    """Write a PNG with two panels: the loss of every optimizer step, and its difference from the full batch.

    Args:
        curves: the losses of every run, the full batch among them.
        epochs: over how many passes.
        path: the file.
    """
    figure = Figure(figsize=(11, 8), layout="constrained")
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    figure.suptitle(_title(curves), fontsize=14, fontweight="bold", x=0.01, horizontalalignment="left")
    _draw_losses(losses, curves)
    _draw_differences(differences, curves)
    _mark_epochs(losses, differences, len(curves[FULL_BATCH]), epochs)
    figure.align_ylabels()
    figure.savefig(path, dpi=130)


def differences_from(full: Sequence[float], curve: Sequence[float]) -> list[float]:
    """How far the losses of a run are from the full batch's, relative to those.

    Example:
        >>> differences_from([4.0, 2.0], [4.0, 2.5])
        [0.0, 0.25]
    """
    return [abs(loss - other) / abs(other) for loss, other in zip(curve, full, strict=True)]


def largest_difference(curves: Mapping[Mix, Sequence[float]], engine: str) -> float:
    """The largest of an engine's runs; 0 without such runs."""
    runs = [curve for mix, curve in curves.items() if mix.engine == engine]
    return max((difference for curve in runs for difference in differences_from(curves[FULL_BATCH], curve)), default=0.0)


def _title(curves: Mapping[Mix, Sequence[float]]) -> str:
    mine, theirs = largest_difference(curves, "lightning_accum"), largest_difference(curves, "Lightning")
    return (
        f"The same {GLOBAL_BATCH} samples a step, accumulated: Lightning comes up to {theirs:.1g} away from\n"
        f"the loss of the full batch, lightning_accum up to {mine:.1g}, on 1, 2 and 4 ranks"
    )


def _draw_losses(axes: Axes, curves: Mapping[Mix, Sequence[float]]) -> None:
    runs = [mix for mix in curves if mix.engine == "lightning_accum"]
    for mix, curve in curves.items():
        steps = range(1, len(curve) + 1)
        if mix == FULL_BATCH:
            axes.plot(steps, curve, color="0.8", linewidth=9, zorder=1, label=f"{mix.shape}, one batch")
        elif mix.engine == "Lightning":
            axes.plot(steps, curve, **_style(mix, curves), linewidth=1.2, markersize=5, label=mix.shape)
        else:  # they lie on each other: each is marked at steps of its own
            style = {**_style(mix, curves), "color": COLOURS["lightning_accum", "one process"]}
            axes.plot(steps, curve, **style, linewidth=1.2, markersize=7, markevery=(runs.index(mix), len(runs)))
    axes.set_ylabel("loss of the step's batch, nats")
    axes.set_title("Loss", loc="left", fontsize=12)
    _name_lines(axes, "Lightning", COLOURS["Lightning", "one process"])
    _clean(axes)


def _draw_differences(axes: Axes, curves: Mapping[Mix, Sequence[float]]) -> None:
    runs = [mix for mix in curves if mix.engine == "lightning_accum"]
    for mix, curve in curves.items():
        steps = range(1, len(curve) + 1)
        heights = [max(difference, FLOOR) for difference in differences_from(curves[FULL_BATCH], curve)]
        if mix.engine == "Lightning":
            axes.plot(steps, heights, **_style(mix, curves), linewidth=1.2, markersize=6)
        elif mix.engine == "lightning_accum":
            # rounding has no course that a line could show, and falls on the same few numbers: side by side
            places = [step + (runs.index(mix) - (len(runs) - 1) / 2) * ASIDE for step in steps]
            axes.plot(places, heights, **_style(mix, curves), linestyle="none", markersize=5.5, label=mix.shape)
    axes.set_yscale("log")
    axes.set_ylim(FLOOR / 10, 10)
    axes.yaxis.set_major_locator(FixedLocator([FLOOR, *(10.0**exponent for exponent in range(-15, 1, 3))]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda height, _: "identical" if height == FLOOR else f"{height:.0e}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("|loss - loss of one batch| / loss of one batch")
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MultipleLocator(max(1, len(curves[FULL_BATCH]) // 12)))
    axes.set_title("Relative difference from one batch", loc="left", fontsize=12)
    for engine, text, factor in (("Lightning", "Lightning's accumulation", 1 / 50), ("lightning_accum", "lightning_accum", 50)):
        height = max(largest_difference(curves, engine), FLOOR) * factor
        axes.text(
            0.99, height, text, color=COLOURS[engine, "one process"], fontsize=14, fontweight="bold",
            transform=axes.get_yaxis_transform(), horizontalalignment="right", verticalalignment="center",
        )  # fmt: skip
    _name_lines(axes, "lightning_accum", COLOURS["lightning_accum", "one process"])
    axes.text(1.03, 0, NOTATION, color="0.35", transform=axes.transAxes, linespacing=1.3)
    _clean(axes)


def _style(mix: Mix, curves: Mapping[Mix, Sequence[float]]) -> dict[str, Any]:
    position = [other for other in curves if other.engine == mix.engine].index(mix)
    return {
        "color": COLOURS[mix.engine, mix.held_by],
        "markeredgecolor": COLOURS[mix.engine, mix.held_by],
        "marker": MARKERS[position],
        "markerfacecolor": "none",
        "zorder": 3 if mix.engine == "Lightning" else 2,
    }


def _name_lines(axes: Axes, engine: str, colour: str) -> None:
    """A legend beside the panel, headed by the engine."""
    legend = axes.legend(title=engine, loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False, alignment="left", fontsize=11)
    legend.get_title().set(color=colour, fontsize=13, fontweight="bold")


def _mark_epochs(losses: Axes, differences: Axes, steps: int, epochs: int) -> None:
    losses.set_xlim(0.5, steps + 0.5)
    if epochs > 10:  # their names would overlap
        return
    for epoch in range(epochs):
        first = epoch * steps / epochs + 0.5
        if epoch:
            for axes in (losses, differences):
                axes.axvline(first, color="0.8", linewidth=0.8, zorder=0)
        place: dict[str, Any] = {"transform": differences.get_xaxis_transform(), "verticalalignment": "top"}
        differences.text(first + 0.05, 0.99, f"epoch {epoch + 1}", color="0.35", **place)


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
