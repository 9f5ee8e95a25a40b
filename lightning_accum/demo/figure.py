"""The loss curves, and how far they are from the full batch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, MaxNLocator, NullLocator

from lightning_accum.demo.mix import FULL_BATCH, GLOBAL_BATCH, Mix

FLOOR = 1e-17
"""Where a difference of exactly zero is drawn, which a logarithmic axis has no place for."""

# Okabe and Ito's colours, which the colour-blind tell apart: warm for Lightning, cool for this package
COLOURS = {"Lightning": ("#D55E00", "#E69F00"), "lightning_accum": ("#0072B2", "#56B4E9", "#009E73", "#CC79A7")}
MARKERS = "os^D"


def draw(curves: Mapping[Mix, Sequence[float]], path: Path) -> None:
    """Write a PNG with two panels: the loss of every optimizer step, and its difference from the full batch.

    Args:
        curves: the losses of every run, the full batch among them.
        path: the file.
    """
    figure = Figure(figsize=(9.5, 8), layout="constrained")
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    figure.suptitle(_title(curves), fontsize=14, fontweight="bold", x=0.01, horizontalalignment="left")
    _draw_losses(losses, curves)
    _draw_differences(differences, curves)
    figure.align_ylabels()
    figure.savefig(path, dpi=150)


def largest_difference(curves: Mapping[Mix, Sequence[float]], engine: str) -> float:
    """How far the losses of an engine's runs come from the full batch's, at most; 0 without such runs."""
    full = curves[FULL_BATCH]
    runs = [curve for mix, curve in curves.items() if mix.engine == engine]
    return max((abs(loss - other) for curve in runs for loss, other in zip(curve, full, strict=True)), default=0.0)


def _title(curves: Mapping[Mix, Sequence[float]]) -> str:
    mine, theirs = largest_difference(curves, "lightning_accum"), largest_difference(curves, "Lightning")
    return (
        f"The same {GLOBAL_BATCH} samples a step, accumulated: Lightning comes up to {theirs:.1g} away\n"
        f"from the full batch's loss, lightning_accum up to {mine:.1g}"
    )


def _draw_losses(axes: Axes, curves: Mapping[Mix, Sequence[float]]) -> None:
    for mix, curve in curves.items():
        steps = range(1, len(curve) + 1)
        if mix == FULL_BATCH:
            axes.plot(steps, curve, color="0.75", linewidth=7, label=f"full batch  {mix.shape}", zorder=1)
        else:
            axes.plot(steps, curve, **_style(mix, curves), label=f"{mix.engine}  {mix.shape}", markersize=4)
    axes.set_ylabel("loss of the step's batch, nats")
    axes.set_title("Loss", loc="left", fontsize=12)
    axes.legend(title="processes x batches in a window x samples in a batch", loc="upper right", frameon=False, alignment="left")
    _clean(axes)


def _draw_differences(axes: Axes, curves: Mapping[Mix, Sequence[float]]) -> None:
    for mix, curve in curves.items():
        if mix != FULL_BATCH:
            differences = [max(abs(loss - full), FLOOR) for loss, full in zip(curve, curves[FULL_BATCH], strict=True)]
            # rounding has no course that a line could show
            line = "none" if mix.engine == "lightning_accum" else "-"
            axes.plot(range(1, len(curve) + 1), differences, **_style(mix, curves), markersize=6, linestyle=line)
    axes.set_yscale("log")
    axes.set_ylim(FLOOR / 4, 10)
    axes.yaxis.set_major_locator(FixedLocator([FLOOR, *(10.0**exponent for exponent in range(-15, 1, 3))]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda height, _: "identical" if height == FLOOR else f"{height:.0e}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_ylabel("|loss - loss of the full batch|")
    axes.set_xlabel("optimizer step")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_title("Difference from the full batch", loc="left", fontsize=12)
    for engine, text, factor in (
        ("Lightning", "Lightning's accumulation", 1 / 300),
        ("lightning_accum", "lightning_accum", 100),
    ):
        height = max(largest_difference(curves, engine), FLOOR) * factor
        axes.text(
            0.99, height, text, color=COLOURS[engine][0], fontsize=14, fontweight="bold",
            transform=axes.get_yaxis_transform(), horizontalalignment="right", verticalalignment="center",
        )  # fmt: skip
    _clean(axes)


def _style(mix: Mix, curves: Mapping[Mix, Sequence[float]]) -> dict[str, Any]:
    position = [other for other in curves if other.engine == mix.engine].index(mix)
    return {
        "color": COLOURS[mix.engine][position],
        "marker": MARKERS[position],
        "linewidth": 1.2,
        "markerfacecolor": "none",
        "zorder": 2,
    }


def _clean(axes: Axes) -> None:
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
