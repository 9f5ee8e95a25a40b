"""What a split batch holds in memory: the activations of one micro-batch, whatever the number of micro-batches.

A batch of 4, 8, 16 and 64 rows runs as micro-batches of 4, and in one piece. What is counted is what autograd has saved for the
backward and still holds: bytes of storage, each storage once, without the parameters and the loader's batch, which are there
anyway. The peak is that of the last batch of a training, so ``"auto"`` has settled by then; its module says that more than 4 rows
do not fit. On a CUDA device the peak of the allocator stands beside it: it also holds parameters, gradients, the batch, and what
an operation allocates for itself.

    python tests/benchmarks/memory.py --features 256 --length 128
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import lightning.pytorch as pl
import torch
from side_by_side import Module, SavedBytes, TimedBatches, classify, command_line, fit, show, split_by_hand
from torch import Tensor, nn

ROWS, MICRO_BATCH, BATCHES, CLASSES, LAYERS, HEADS = (4, 8, 16, 64), 4, 4, 10, 4, 4
WHOLE = "in one piece"


class Classifier(nn.Module):
    """A transformer for which there is room for so many rows."""

    def __init__(self, features: int, capacity: int | None) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.TransformerEncoderLayer(features, HEADS, 4 * features, dropout=0.0, batch_first=True) for _ in range(LAYERS))
        self.layers, self.head, self.capacity = nn.Sequential(*layers), nn.Linear(features, CLASSES), capacity

    def forward(self, inputs: Tensor) -> Tensor:
        if self.capacity is not None and len(inputs) > self.capacity:
            raise torch.OutOfMemoryError(f"{len(inputs)} rows do not fit")
        return self.head(self.layers(inputs).mean(1))


class Logging(Module):
    """Logs its loss and its accuracy."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        loss = nn.functional.cross_entropy(logits, batch[1])
        self.log("loss", loss)
        self.log("accuracy", (logits.argmax(1) == batch[1]).float().mean())
        return loss


by_hand = partial(split_by_hand, cut=lambda batch: zip(*(tensor.split(MICRO_BATCH) for tensor in batch), strict=True))


SIDES: dict[str, tuple[Callable[..., None], int | None]] = {
    WHOLE: (fit, None),
    "by hand": (by_hand, None),
    f"micro_batch={MICRO_BATCH}": (partial(fit, micro_batch=MICRO_BATCH), None),
    'micro_batch="auto"': (partial(fit, micro_batch="auto"), MICRO_BATCH),
}


def held(train: Callable[..., None], module: pl.LightningModule, batch: tuple[Tensor, Tensor]) -> tuple[int, int]:
    """Bytes at the peak of the last batch of a training: what autograd saved, and what a CUDA device allocated in all."""
    with SavedBytes() as saved:

        def restart() -> None:
            saved.restart()
            if module.device.type == "cuda":
                torch.cuda.reset_peak_memory_stats()

        saved.leave_out([*module.parameters(), *batch])
        train(module, TimedBatches([batch], BATCHES - 1, 0, restart))
        return saved.peak, torch.cuda.max_memory_allocated() if module.device.type == "cuda" else 0


def peaks(train: Callable[..., None], capacity: int | None, rows: int, length: int, features: int) -> tuple[int, int]:
    """Of a batch of so many rows."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(rows, length, features, generator=generator).to(device)
    labels = torch.randint(CLASSES, (rows,), generator=generator).to(device)
    return held(train, Logging(Classifier(features, capacity), classify).to(device), (inputs, labels))


def main(features: int = 128, length: int = 64) -> None:
    """Measure and print."""
    found = {name: {rows: peaks(*side, rows, length, features) for rows in ROWS} for name, side in SIDES.items()}
    for place, what in enumerate(("bytes saved, peak", "bytes allocated, peak")[: 1 + torch.cuda.is_available()]):
        one = found[WHOLE][MICRO_BATCH][place]
        table = [[name, *(f"{of[rows][place]:,d} ({of[rows][place] / one:.2f})" for rows in ROWS)] for name, of in found.items()]
        show([f"{what} (times {MICRO_BATCH} rows whole)", *(f"{rows} rows" for rows in ROWS)], table)
    split = {peak for name, of in found.items() if name != WHOLE for peak, _ in of.values()}
    verdict = "yes" if split == {found[WHOLE][MICRO_BATCH][0]} else "NO"
    print(f"Saved: the same for any number of micro-batches, and as for {MICRO_BATCH} rows in one piece: {verdict}")


if __name__ == "__main__":
    command_line(main)
