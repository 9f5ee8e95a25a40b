"""What ``row_wise=`` costs: a step of a CLIP-like training, whole, row-wise, and in a hand-written GradCache loop.

Time: of the processor, on one thread; the sides are interleaved, and the medians of many rounds compared. Activations: what
autograd saves for the backward, without parameters and batches, at its largest; that of the loss, which has a matrix of all pairs,
by itself.

``--out`` draws the largest batch that a fixed budget of memory has room for, whole, row-wise and offloaded (to a second memory that
is made up). What counts is all that is alive at the peak of a step, the loss included, above parameters, gradients and the batch.

    python tests/benchmarks/row_wise.py --rounds 15
    python tests/benchmarks/row_wise.py --out notebooks/figures/largest_batch.png
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from alive import Alive
from offload import other_memory
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum.whole.offload import Offload
from lightning_accum.whole.row_wise import RowWise

FEATURES, WIDTH = 32, 256
DEEP = 12
"""Blocks of a tower, for the largest batch: of so few as for the time, the loss would hold most."""


class TwoTowers(nn.Module):
    """Two towers and the loss of CLIP."""

    def __init__(self, depth: int = 6) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = _tower(depth), _tower(depth)
        self.scale = nn.Parameter(torch.tensor(1.0))

    def loss(self, images: Tensor, texts: Tensor) -> Tensor:
        logits = F.normalize(images) @ F.normalize(texts).T * self.scale.exp()
        rows = torch.arange(len(images))
        return (F.cross_entropy(logits, rows) + F.cross_entropy(logits.T, rows)) / 2


def _tower(depth: int) -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(depth)]
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), *blocks, nn.Linear(WIDTH, 64))


def whole(model: TwoTowers, images: Tensor, texts: Tensor, size: int) -> None:
    """The batch as it is."""
    model.loss(model.image(images), model.text(texts)).backward()


def grad_cache(model: TwoTowers, images: Tensor, texts: Tensor, size: int) -> None:
    """GradCache by hand (arXiv 2101.06983): all embeddings without a graph, their gradients, and each part again."""
    towers = [(model.image, images), (model.text, texts)]
    with torch.no_grad():
        embeddings = [torch.cat([tower(part) for part in rows.split(size)]) for tower, rows in towers]
    leaves = [embedding.requires_grad_() for embedding in embeddings]
    model.loss(*leaves).backward()
    for (tower, rows), leaf in reversed(list(zip(towers, leaves, strict=True))):
        assert leaf.grad is not None
        for part, gradient in zip(rows.split(size), leaf.grad.split(size), strict=True):
            tower(part).backward(gradient)


def loss_alone(model: TwoTowers, images: Tensor, texts: Tensor, size: int) -> None:
    """What no splitting of the towers saves: the loss of some embeddings."""
    model.loss(images.repeat(1, 2).requires_grad_(), texts.repeat(1, 2).requires_grad_()).backward()


def row_wise_of(model: TwoTowers, size: int) -> Callable[[TwoTowers, Tensor, Tensor, int], None]:
    """The package's, of a model that it was made for."""
    engine = RowWise(model, ["image", "text"], size, torch.device("cpu"))

    def row_wise(model: TwoTowers, images: Tensor, texts: Tensor, size: int) -> None:
        with engine.step(len(images)):
            whole(model, images, texts, size)

    return row_wise


def offloaded(model: TwoTowers, images: Tensor, texts: Tensor, size: int) -> None:
    """The batch as it is, and what is saved of it elsewhere."""
    with Offload(images.device).engaged((*model.parameters(), images, texts)):
        whole(model, images, texts, size)


def batch_of(rows: int) -> tuple[Tensor, Tensor]:
    """Images and texts."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, FEATURES, generator=generator), torch.randn(rows, FEATURES, generator=generator)


def seconds(sides: dict[str, Callable[..., None]], model: TwoTowers, rows: int, size: int, rounds: int) -> dict[str, float]:
    """The median of each side's steps, after two that do not count."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    images, texts = batch_of(rows)
    for index in range(rounds + 2):
        for name, step in random.sample(list(sides.items()), len(sides)):  # memory is not warm for the same side each time
            model.zero_grad()
            start = time.process_time()
            step(model, images, texts, size)
            if index > 1:
                times[name].append(time.process_time() - start)
    return {name: statistics.median(of_side) for name, of_side in times.items()}


def activations(step: Callable[..., None], model: TwoTowers, rows: int, size: int) -> int:
    """The most bytes that are saved for the backward at any time, and those of the outputs that wait for it."""
    held: dict[int, int] = {}
    uses: dict[int, int] = {}
    most = 0
    own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}

    class Saved:
        def __init__(self, tensor: Tensor) -> None:
            nonlocal most
            self.tensor, key = tensor, tensor.untyped_storage().data_ptr()
            if key in own:
                return
            held[key], uses[key] = tensor.untyped_storage().nbytes(), uses.get(key, 0) + 1
            most = max(most, sum(held.values()))
            weakref.finalize(self, release, key)

    def release(key: int) -> None:
        uses[key] -= 1
        if not uses[key]:
            del held[key], uses[key]

    batch = batch_of(rows)
    own.update(tensor.untyped_storage().data_ptr() for tensor in batch)
    step(model, *batch, size)  # what is proven once
    model.zero_grad()
    with torch.autograd.graph.saved_tensors_hooks(Saved, lambda saved: saved.tensor):
        step(model, *batch, size)
    return most


def peak(step: Callable[..., None], model: TwoTowers, rows: int, size: int) -> int:
    """The most bytes alive in a step, above parameters, gradients and the batch."""
    with Alive() as alive, other_memory():
        batch = batch_of(rows)
        step(model, *batch, size)  # makes the gradients
        alive.peak = before = alive.bytes
        step(model, *batch, size)
    return alive.peak - before


def largest_batch(step: Callable[..., None], model: TwoTowers, size: int, budget: float) -> int:
    """In rows, to 5 %, that fits into so many bytes."""
    fits, too_many = 0, 32
    while peak(step, model, too_many, size) <= budget:
        fits, too_many = too_many, 2 * too_many
    while too_many - fits > max(1, 0.05 * fits):
        middle = (fits + too_many) // 2
        if peak(step, model, middle, size) <= budget:
            fits = middle
        else:
            too_many = middle
    return fits


def draw(found: dict[str, list[int]], budgets: list[float], size: int, path: str) -> None:
    """A line for each side."""
    from matplotlib.figure import Figure

    styles = {"whole": ("0.6", "o", "whole batch"), "row_wise": ("#0072B2", "s", f'micro_batch={size}, row_wise=["image", "text"]')}
    styles["offload"] = ("#D55E00", "^", 'micro_batch="offload"')
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, rows in found.items():
        colour, marker, label = styles[name]
        axes.plot(budgets, rows, color=colour, marker=marker, label=label)
        axes.annotate(f"{rows[-1]}", (budgets[-1], rows[-1]), xytext=(6, 0), textcoords="offset points", color=colour, va="center")
    axes.set_xscale("log", base=2, subs=[])
    axes.set_yscale("log", base=2, subs=[])
    axes.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
    axes.yaxis.set_major_formatter("{x:g}")
    axes.set_xlabel("memory of a step above parameters, gradients and the batch, MiB")
    axes.set_ylabel("rows")
    gain = found["row_wise"][-1] / found["whole"][-1]
    title = f"In {budgets[-1]:g} MiB the batch of a contrastive loss is {gain:.1f} times as large"
    figure.suptitle(title, fontsize=13, fontweight="bold", x=0.01, horizontalalignment="left")
    told = f"Largest batch whose step fits: two towers of {DEEP} blocks, {WIDTH} features wide, and the loss of CLIP"
    axes.set_title(told, loc="left", fontsize=9.5)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(axis="y", color="0.9")
    axes.legend(frameon=False, loc="upper left")
    figure.savefig(path, dpi=130)


def main() -> None:
    """Print the tables, or draw."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=128)
    parser.add_argument("--budgets", type=float, nargs="+", default=[8, 16, 32, 64], help="MiB, for the largest batch")
    parser.add_argument("--out", help="where to draw the largest batches")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, size = TwoTowers(), arguments.micro_batch
    sides: dict[str, Callable[..., Any]] = {"whole": whole, "row_wise": row_wise_of(model, size), "GradCache by hand": grad_cache}
    if arguments.out:
        model = TwoTowers(DEEP)
        drawn: dict[str, Callable[..., Any]] = {"whole": whole, "row_wise": row_wise_of(model, size), "offload": offloaded}
        largest = {
            name: [largest_batch(step, model, size, budget * 2**20) for budget in arguments.budgets] for name, step in drawn.items()
        }
        for name, rows in largest.items():
            print(f"{name:18}", *rows)
        draw(largest, arguments.budgets, size, arguments.out)
        return
    times = seconds(sides, model, arguments.rows, size, arguments.rounds)
    print(f"{arguments.rows} rows in micro-batches of {size}, medians of {arguments.rounds} rounds")
    for name, of_side in times.items():
        print(f"{name:18} {of_side * 1e3:8.1f} ms  {of_side / times['whole']:5.2f} of the whole batch")
    print(f"row_wise / GradCache by hand: {times['row_wise'] / times['GradCache by hand']:.3f}")
    print("\nactivations, MB")
    for rows in (256, 512, 1024, 2048):
        found = {name: activations(step, model, rows, size) for name, step in {**sides, "loss alone": loss_alone}.items()}
        print(f"{rows:6} rows", *(f"{name} {held / 2**20:.2f}" for name, held in found.items()), sep="  ")


if __name__ == "__main__":
    main()
