"""The largest batch of a contrastive loss that a budget of memory has room for: whole, with ``row_wise=``, and offloaded.

A step of a CLIP-like training; offloaded to a second memory that is made up. What counts is all that is alive at the peak of a
step, the loss included, above parameters, gradients and the batch. ``--out`` draws it.

    python tests/benchmarks/row_wise.py --out notebooks/figures/largest_batch.png
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from side_by_side import Module, TimedBatches, command_line, figure, fit, show
from torch import Tensor, nn
from whole_batch_losses import clip

FEATURES, WIDTH, DEPTH = 32, 256, 12
TOWERS = ["net.image", "net.text"]

Batch = tuple[Tensor, Tensor]
Train = Callable[[pl.LightningModule, Any], None]


class TwoTowers(nn.Module):  # two towers, and a learned scale of their products
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image, self.text = _tower(), _tower()
        self.scale = nn.Parameter(torch.tensor(1.0))


def _tower() -> nn.Module:
    blocks = [nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.LayerNorm(WIDTH)) for _ in range(DEPTH)]
    return nn.Sequential(nn.Linear(FEATURES, WIDTH), *blocks, nn.Linear(WIDTH, 64))


class Contrastive(Module):  # with the loss of CLIP. Its gradients stay where they are from step to step, as the budget has it.
    def __init__(self) -> None:
        super().__init__(TwoTowers(), lambda net, batch: clip(net.image(batch[0]), net.text(batch[1]), batch[0], net.scale))

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


def batch_of(rows: int) -> Batch:  # images and texts
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, FEATURES, generator=generator), torch.randn(rows, FEATURES, generator=generator)


def peak(train: Train, rows: int) -> int:  # the most bytes alive in a step, above parameters, gradients and the batch
    from alive import Alive
    from other_memory import other_memory

    with Alive() as alive, other_memory():

        def read() -> tuple[int, int]:
            found, alive.peak = alive.peak, alive.bytes
            return found, alive.bytes

        batches = TimedBatches([batch_of(rows)], 2, 1, read)
        train(Contrastive(), batches)
        (_, before), (most, _) = batches.readings
    return most - before


def largest_batch(train: Train, budget: float) -> int:  # in rows, to 5 %, that fits into so many bytes
    fits, too_many = 0, 32
    while peak(train, too_many) <= budget:
        fits, too_many = too_many, 2 * too_many
    while too_many - fits > max(1, 0.05 * fits):
        middle = (fits + too_many) // 2
        fits, too_many = (middle, too_many) if peak(train, middle) <= budget else (fits, middle)
    return fits


def draw(found: dict[str, list[int]], budgets: tuple[float, ...], size: int, path: str) -> None:  # a line for each side
    labels = {
        "whole": "whole batch",
        "row_wise": f'micro_batch={size}, row_wise=["image", "text"]',
        "offload": 'micro_batch="offload"',
    }
    gain = found["row_wise"][-1] / found["whole"][-1]
    title = f"In {budgets[-1]:g} MiB the batch of a contrastive loss is {gain:.1f} times as large"
    told = f"Largest batch whose step fits: two towers of {DEPTH} blocks, {WIDTH} features wide, and the loss of CLIP"
    below = "memory of a step above parameters, gradients and the batch, MiB"
    with figure(path, title, told, xlabel=below, ylabel="rows") as axes:
        for name, rows in found.items():
            axes.plot(budgets, rows, marker="o", label=labels[name])
            axes.annotate(f"{rows[-1]}", (budgets[-1], rows[-1]), xytext=(6, 0), textcoords="offset points", va="center")
        axes.loglog(base=2)
        axes.set_xticks(budgets, [f"{budget:g}" for budget in budgets])
        axes.yaxis.set_major_formatter("{x:g}")
        axes.legend(frameon=False, loc="upper left")


def main(micro_batch: int = 128, budgets: tuple[float, ...] = (8.0, 16.0, 32.0, 64.0), out: str | None = None) -> None:
    """Print, and draw, the largest batches for budgets in MiB."""
    row_wise = partial(fit, micro_batch=micro_batch, row_wise=TOWERS)
    sides: dict[str, Train] = {"whole": fit, "row_wise": row_wise, "offload": partial(fit, micro_batch="offload")}
    largest = {name: [largest_batch(train, budget * 2**20) for budget in budgets] for name, train in sides.items()}
    show(["MiB", *map(str, budgets)], [[name, *found] for name, found in largest.items()])
    if out is not None:
        draw(largest, budgets, micro_batch, out)


if __name__ == "__main__":
    command_line(main)
