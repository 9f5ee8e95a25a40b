"""What ``row_wise=`` costs: a step of a CLIP-like training, whole, row-wise, and in a hand-written GradCache loop.

Time: of a step, of the processor, on one thread. Activations: what autograd saves for the backward, without parameters and batches,
at its largest; that of the loss, which has a matrix of all pairs, by itself.

``--out`` draws the largest batch that a fixed budget of memory has room for, whole, row-wise and offloaded (to a second memory that
is made up). What counts is all that is alive at the peak of a step, the loss included, above parameters, gradients and the batch.

    python tests/benchmarks/row_wise.py --rounds 15
    python tests/benchmarks/row_wise.py --out notebooks/figures/largest_batch.png
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from side_by_side import CLOCKS, Module, SavedBytes, TimedBatches, command_line, compare, figure, fit, interleaved, show
from torch import Tensor, nn
from torch.nn import functional as F

FEATURES, WIDTH, DEPTH = 32, 256, 6
DEEP = 12
"""Blocks of a tower, for the largest batch: of so few as for the time, the loss would hold most."""
TOWERS = ["net.image", "net.text"]

Batch = tuple[Tensor, Tensor]
Train = Callable[[pl.LightningModule, Any], None]


class TwoTowers(nn.Module):
    """Two towers and the loss of CLIP."""

    def __init__(self, depth: int) -> None:
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


class Contrastive(Module):
    """Its gradients stay where they are from step to step, as the budget has it."""

    def __init__(self, depth: int = DEPTH, has_towers: bool = True) -> None:
        def loss(net: nn.Module, batch: Batch) -> Tensor:
            if has_towers:
                return net.loss(net.image(batch[0]), net.text(batch[1]))
            return net.loss(*(rows.repeat(1, 2).requires_grad_() for rows in batch))

        super().__init__(TwoTowers(depth), loss)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


def grad_cache(module: pl.LightningModule, batches: Any, size: int) -> None:
    """GradCache by hand (arXiv 2101.06983): all embeddings without a graph, their gradients, and each part again."""
    optimizer, model = module.configure_optimizers(), module.net
    for images, texts in batches:
        optimizer.zero_grad(set_to_none=False)
        towers = [(model.image, images), (model.text, texts)]
        with torch.no_grad():
            embeddings = [torch.cat([tower(part) for part in rows.split(size)]) for tower, rows in towers]
        leaves = [embedding.requires_grad_() for embedding in embeddings]
        model.loss(*leaves).backward()
        for (tower, rows), leaf in zip(towers, leaves, strict=True):
            for part, gradient in zip(rows.split(size), leaf.grad.split(size), strict=True):
                tower(part).backward(gradient)
        optimizer.step()


def batch_of(rows: int) -> Batch:
    """Images and texts."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, FEATURES, generator=generator), torch.randn(rows, FEATURES, generator=generator)


def saved_by(train: Train, module: pl.LightningModule, batch: Batch) -> int:
    """The most bytes that autograd has saved for the backward of the last of some batches."""
    with SavedBytes() as saved:
        saved.leave_out([*module.parameters(), *batch])
        train(module, TimedBatches([batch], 3, 0, saved.restart))
        return saved.peak


def peak(train: Train, rows: int) -> int:
    """The most bytes alive in a step, above parameters, gradients and the batch."""
    from alive import Alive
    from other_memory import other_memory

    with Alive() as alive, other_memory():

        def read() -> tuple[int, int]:
            found, alive.peak = alive.peak, alive.bytes
            return found, alive.bytes

        batches = TimedBatches([batch_of(rows)], 2, 1, read)
        train(Contrastive(DEEP), batches)
        (_, before), (most, _) = batches.readings
    return most - before


def largest_batch(train: Train, budget: float) -> int:
    """In rows, to 5 %, that fits into so many bytes."""
    fits, too_many = 0, 32
    while peak(train, too_many) <= budget:
        fits, too_many = too_many, 2 * too_many
    while too_many - fits > max(1, 0.05 * fits):
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if peak(train, middle) <= budget else (fits, middle)
    return fits


def draw(found: dict[str, list[int]], budgets: tuple[float, ...], size: int, path: str) -> None:
    """A line for each side."""
    styles = {"whole": ("0.6", "o", "whole batch"), "row_wise": ("#0072B2", "s", f'micro_batch={size}, row_wise=["image", "text"]')}
    styles["offload"] = ("#D55E00", "^", 'micro_batch="offload"')
    gain, end = found["row_wise"][-1] / found["whole"][-1], budgets[-1]
    title = f"In {end:g} MiB the batch of a contrastive loss is {gain:.1f} times as large"
    told = f"Largest batch whose step fits: two towers of {DEEP} blocks, {WIDTH} features wide, and the loss of CLIP"
    below = "memory of a step above parameters, gradients and the batch, MiB"
    with figure(path, title, told, xlabel=below, ylabel="rows") as axes:
        for name, rows in found.items():
            colour, marker, label = styles[name]
            axes.plot(budgets, rows, color=colour, marker=marker, label=label)
            axes.annotate(f"{rows[-1]}", (end, rows[-1]), xytext=(6, 0), textcoords="offset points", color=colour, va="center")
        axes.set_xscale("log", base=2, subs=[])
        axes.set_yscale("log", base=2, subs=[])
        axes.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.grid(axis="y", color="0.9")
        axes.legend(frameon=False, loc="upper left")


def main(
    rounds: int = 15, rows: int = 1024, micro_batch: int = 128, budgets: tuple[float, ...] = (8.0, 16.0, 32.0, 64.0),
    clock: str = "cpu", out: str | None = None,
) -> None:  # fmt: skip
    """Print the tables, or draw the largest batches for budgets in MiB."""
    row_wise = partial(fit, micro_batch=micro_batch, row_wise=TOWERS)
    if out is not None:
        drawn: dict[str, Train] = {"whole": fit, "row_wise": row_wise, "offload": partial(fit, micro_batch="offload")}
        largest = {name: [largest_batch(train, budget * 2**20) for budget in budgets] for name, train in drawn.items()}
        show(["MiB", *map(str, budgets)], [[name, *found] for name, found in largest.items()])
        draw(largest, budgets, micro_batch, out)
        return
    sides: dict[str, Train] = {"whole": fit, "row_wise": row_wise, "GradCache by hand": partial(grad_cache, size=micro_batch)}
    batches = TimedBatches([batch_of(rows)], 2, 2, CLOCKS[clock])

    def timed(train: Train) -> float:
        train(Contrastive(), batches)
        return batches.microseconds / 1e3

    found = interleaved({name: partial(timed, train) for name, train in sides.items()}, rounds)
    compare({"two towers": found}, "ms a step", "whole", "row_wise")
    several = [rows // 4, rows // 2, rows, 2 * rows]
    table = []
    for name, train in {**sides, "loss alone": fit}.items():
        found = [saved_by(train, Contrastive(has_towers=name != "loss alone"), batch_of(n)) for n in several]
        table.append([name, *(f"{bytes_ / 2**20:.2f}" for bytes_ in found)])
    print("\nactivations, MiB")
    show(["", *(f"{n} rows" for n in several)], table)


if __name__ == "__main__":
    command_line(main)
