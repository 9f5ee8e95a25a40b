"""What ``row_wise=`` costs: a step of a CLIP-like training, whole, row-wise, and in a hand-written GradCache loop.

Time: of the processor, on one thread; the sides are interleaved, and the medians of many rounds compared. Activations: what
autograd saves for the backward, without parameters and batches, at its largest; that of the loss, which has a matrix of all pairs,
by itself. The last table is the largest batch that a fixed budget has room for.

    python tests/benchmarks/row_wise.py --rounds 15
"""

from __future__ import annotations

import argparse
import statistics
import time
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum.whole.row_wise import RowWise

FEATURES, WIDTH = 32, 256


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


def batch_of(rows: int) -> tuple[Tensor, Tensor]:
    """Images and texts."""
    generator = torch.Generator().manual_seed(rows)
    return torch.randn(rows, FEATURES, generator=generator), torch.randn(rows, FEATURES, generator=generator)


def seconds(sides: dict[str, Callable[..., None]], model: TwoTowers, rows: int, size: int, rounds: int) -> dict[str, float]:
    """The median of each side's steps, after two that do not count."""
    times: dict[str, list[float]] = {name: [] for name in sides}
    images, texts = batch_of(rows)
    for index in range(rounds + 2):
        for name, step in sides.items():
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


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--micro-batch", type=int, default=128)
    parser.add_argument("--budget", type=float, default=8.0, help="MB of activations, for the largest batch")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    model, size = TwoTowers(), arguments.micro_batch
    sides: dict[str, Callable[..., Any]] = {"whole": whole, "row_wise": row_wise_of(model, size), "GradCache by hand": grad_cache}
    times = seconds(sides, model, arguments.rows, size, arguments.rounds)
    print(f"{arguments.rows} rows in micro-batches of {size}, medians of {arguments.rounds} rounds")
    for name, of_side in times.items():
        print(f"{name:18} {of_side * 1e3:8.1f} ms  {of_side / times['whole']:5.2f} of the whole batch")
    print(f"row_wise / GradCache by hand: {times['row_wise'] / times['GradCache by hand']:.3f}")
    print("\nactivations, MB")
    for rows in (256, 512, 1024, 2048):
        found = {name: activations(step, model, rows, size) for name, step in {**sides, "loss alone": loss_alone}.items()}
        print(f"{rows:6} rows", *(f"{name} {held / 2**20:.2f}" for name, held in found.items()), sep="  ")
    print(f"\nlargest batch in {arguments.budget} MB of activations")
    for name in ("whole", "row_wise"):
        budget, largest = arguments.budget * 2**20, 0
        for step in (1024, 512, 256, 128, 64, 32):
            while activations(sides[name], model, largest + step, size) <= budget:
                largest += step
        print(f"{name:18} {largest}")


if __name__ == "__main__":
    main()
