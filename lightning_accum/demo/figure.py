"""The loss curves, and how far they are from the full batch's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MultipleLocator

from lightning_accum.demo.mix import FULL_BATCH, GLOBAL_BATCH, Mix

# Okabe and Ito's colours, which the colour-blind can tell from each other: warm for Lightning, cool for this package
COLOURS = {
    ("Lightning", "one process"): "#D55E00",
    ("Lightning", "DDP"): "#E69F00",
    ("lightning_accum", "one process"): "#0072B2",
    ("lightning_accum", "DDP"): "#009E73",
    ("lightning_accum", "FSDP2"): "#CC79A7",
}
MARKERS = "osD^v<P*"
NOTATION = "\n\nranks x\nbatches in a window x\nsamples in a batch\n\n32/4: batches of 32,\nsplit into fours"


def draw(curves: Mapping[Mix, Sequence[float]], epochs: int, path: Path) -> None:
    """Write a figure with two panels: the loss of every optimizer step of all runs, and its difference from the full batch."""
    full = curves[FULL_BATCH]
    figure = Figure(figsize=(11, 8), layout="constrained")
    losses, differences = figure.subplots(2, 1, sharex=True, height_ratios=(2, 3))
    theirs, mine = largest_difference(curves, "Lightning"), largest_difference(curves, "lightning_accum")
    title = (
        f"The same {GLOBAL_BATCH} samples a step, accumulated: Lightning comes up to {theirs:.1g} away from\n"
        f"the loss of the full batch, lightning_accum up to {mine:.1g}, on 1, 2 and 4 ranks"
    )
    figure.suptitle(title, fontsize=14, fontweight="bold", x=0.01, horizontalalignment="left")
    losses.plot(range(1, len(full) + 1), full, color="0.8", linewidth=9, label=f"{FULL_BATCH.shape}, one batch")
    for engine in ("Lightning", "lightning_accum"):
        runs = [mix for mix in curves if mix.engine == engine]
        for place, mix in enumerate(runs):
            colour = COLOURS[engine, mix.parallelism]
            style: dict[str, Any] = {"color": colour, "marker": MARKERS[place], "markerfacecolor": "none", "linewidth": 1.2}
            steps, every, line, aside = range(1, len(full) + 1), None, "-", 0.0
            if engine == "lightning_accum":  # those lie on each other: marked at steps of their own, and side by side
                every, line, aside = (place, len(runs)), "none", 0.105 * (place - (len(runs) - 1) / 2)
            losses.plot(steps, curves[mix], **style, markevery=every, linestyle="-" if not place else line)
            differences.plot(
                [step + aside for step in steps],
                differences_from(full, curves[mix]),
                **style,
                linestyle=line,
                label=f"{engine} {mix.shape}",
            )
    differences.set_yscale("symlog", linthresh=1e-17, linscale=0.3)
    differences.set_yticks([0, *(10.0**exponent for exponent in range(-15, 1, 3))])
    differences.set_ylim(-2e-17, 10)
    differences.minorticks_off()
    differences.xaxis.set_major_locator(MultipleLocator(max(1, len(full) // 12)))
    _finish(losses, "Loss of the step's batch, nats", len(full), epochs)
    _finish(differences, "|loss - loss of one batch| / loss of one batch", len(full), epochs)
    losses.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    differences.legend(loc="upper left", bbox_to_anchor=(1.01, 1), frameon=False)
    differences.text(1.03, 0, NOTATION, color="0.35", transform=differences.transAxes)
    differences.set_xlabel("optimizer step")
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


def _finish(axes: Axes, title: str, steps: int, epochs: int) -> None:
    axes.set_title(title, loc="left", fontsize=12)
    axes.set_xlim(0.5, steps + 0.5)
    for epoch in range(1, epochs):
        axes.axvline(epoch * steps / epochs + 0.5, color="0.8", linewidth=0.8, zorder=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9")
    axes.set_axisbelow(True)
