"""What a split batch holds in memory: the activations of one micro-batch, whatever the number of micro-batches.

A batch of 4, 8, 16 and 64 rows runs as micro-batches of 4, and in one piece. What is counted is what autograd has saved for the
backward and still holds: bytes of storage, each storage once, without the parameters and the loader's batch, which are there
anyway. The peak is that of the last batch of a training, so ``"auto"`` has settled by then; its module says that more than 4 rows
do not fit. On a CUDA device the peak of the allocator stands beside it: it also holds parameters, gradients, the batch, and what
an operation allocates for itself.

    python tests/benchmarks/memory.py --features 256 --length 128
"""

from __future__ import annotations

import argparse
import logging
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_accum import GradientAccumulation

ROWS, MICRO_BATCH, BATCHES, CLASSES, LAYERS, HEADS = (4, 8, 16, 64), 4, 4, 10, 4, 4

Batch = tuple[Tensor, Tensor]


class SavedBytes:
    """Counts, as a context, the bytes that autograd holds for backwards to come."""

    def __init__(self) -> None:
        self._uncounted: set[int] = set()
        self._holders: Counter[int] = Counter()
        self._now = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Saved(tensor, self), lambda saved: saved.tensor)
        self.peak = 0

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Do not count what shares its storage with these, which must live as long as the context."""
        self._uncounted |= {_storage(tensor) for tensor in tensors}

    def restart(self) -> None:
        """Forget the peak."""
        self.peak = self._now

    def hold(self, tensor: Tensor) -> int:
        """A tensor was saved. Returns what names its storage."""
        storage = _storage(tensor)
        if storage not in self._uncounted:
            self._holders[storage] += 1
            if self._holders[storage] == 1:
                self._now += tensor.untyped_storage().nbytes()
                self.peak = max(self.peak, self._now)
        return storage

    def release(self, tensor: Tensor, storage: int) -> None:
        """A saved tensor is dropped."""
        if storage not in self._uncounted:
            self._holders[storage] -= 1
            if self._holders[storage] == 0:
                self._now -= tensor.untyped_storage().nbytes()

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)


class _Saved:
    """A saved tensor, from the forward that saves it to the backward, or to the end of its graph."""

    def __init__(self, tensor: Tensor, counter: SavedBytes) -> None:
        self.tensor = tensor.detach()  # with its graph, an output that its own operation saves would hold itself
        self._counter, self._storage = counter, counter.hold(tensor)

    def __del__(self) -> None:
        self._counter.release(self.tensor, self._storage)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


class Batches:
    """A loader of one batch, several times, that forgets peaks when the last is drawn."""

    def __init__(self, rows: int, length: int, features: int, device: torch.device, restart: Callable[[], None]) -> None:
        generator = torch.Generator().manual_seed(0)
        inputs = torch.randn(rows, length, features, generator=generator).to(device)
        self.batch = inputs, torch.randint(CLASSES, (rows,), generator=generator).to(device)
        self._restart = restart

    def __len__(self) -> int:
        return BATCHES

    def __iter__(self) -> Iterator[Batch]:
        for index in range(len(self)):
            if index == len(self) - 1:
                self._restart()
            yield self.batch


class Classifier(pl.LightningModule):
    """A transformer. It logs its loss and its accuracy, and knows nothing of accumulation.

    Args:
        features: of every layer.
        capacity: the rows that fit into memory.
    """

    def __init__(self, features: int, capacity: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            *(nn.TransformerEncoderLayer(features, HEADS, 4 * features, dropout=0.0, batch_first=True) for _ in range(LAYERS))
        )
        self.head = nn.Linear(features, CLASSES)
        self._capacity = capacity

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs, target = batch
        if self._capacity is not None and len(inputs) > self._capacity:
            raise torch.OutOfMemoryError(f"{len(inputs)} rows do not fit")
        logits = self.head(self.layers(inputs).mean(1))
        loss = cross_entropy(logits, target)
        if self._trainer is not None:
            self.log("loss", loss)
            self.log("accuracy", (logits.argmax(1) == target).float().mean())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def by_hand(module: pl.LightningModule, batches: Batches) -> None:
    """Split, weigh, accumulate, step."""
    optimizer = module.configure_optimizers()
    for inputs, target in batches:
        optimizer.zero_grad()
        for micro_batch in zip(inputs.split(MICRO_BATCH), target.split(MICRO_BATCH), strict=True):
            (module.training_step(micro_batch, 0) * (len(micro_batch[0]) / len(inputs))).backward()
        optimizer.step()


def with_trainer(strategy: str, **policy: Any) -> Callable[[pl.LightningModule, Batches], None]:
    """A Trainer with nothing else in it."""

    def train(module: pl.LightningModule, batches: Batches) -> None:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
        callbacks = [GradientAccumulation(**policy)] if policy else None
        accelerator = "gpu" if torch.cuda.is_available() else "cpu"
        pl.Trainer(strategy=strategy, accelerator=accelerator, devices=1, max_epochs=1, callbacks=callbacks, **quiet).fit(
            module, batches
        )

    return train


class Side(NamedTuple):
    """One way to train a module."""

    train: Callable[[pl.LightningModule, Batches], None]
    capacity: int | None = None


WHOLE = "in one piece"
SIDES = {
    WHOLE: Side(with_trainer("auto")),
    "by hand": Side(by_hand),
    f"micro_batch={MICRO_BATCH}": Side(with_trainer("accum", micro_batch=MICRO_BATCH)),
    'micro_batch="auto"': Side(with_trainer("accum", micro_batch="auto"), capacity=MICRO_BATCH),
}


class Peaks(NamedTuple):
    """Bytes: what autograd saved, and what a CUDA device allocated in all."""

    saved: int
    allocated: int | None


def peaks(side: Side, rows: int, length: int, features: int) -> Peaks:
    """The peaks of the last batch of a training."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    module = Classifier(features, side.capacity).to(device)

    def restart() -> None:
        saved.restart()
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()

    with SavedBytes() as saved:
        batches = Batches(rows, length, features, device, restart)
        saved.leave_out([*module.parameters(), *batches.batch])
        side.train(module, batches)
        return Peaks(saved.peak, torch.cuda.max_memory_allocated() if device.type == "cuda" else None)


def table(measured: dict[str, dict[int, int]], what: str) -> str:
    """Bytes by side and rows of a batch, and how many times what one micro-batch takes."""
    lines = [f"{what:28}" + "".join(f"{f'{rows} rows':>22}" for rows in ROWS)]
    one = measured[WHOLE][MICRO_BATCH]
    for name, found in measured.items():
        lines.append(f"{name:28}" + "".join(f"{found[rows]:14,d} ({found[rows] / one:5.2f})" for rows in ROWS))
    return "\n".join(lines)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--features", type=int, default=128, help="of the transformer (default: 128)")
    parser.add_argument("--length", type=int, default=64, help="of the sequences (default: 64)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)
    measured = {
        name: {rows: peaks(side, rows, arguments.length, arguments.features) for rows in ROWS} for name, side in SIDES.items()
    }
    print(
        f"Batches of rows of {arguments.length} tokens, {arguments.features} features, {LAYERS} layers; (times one micro-batch of"
        f" {MICRO_BATCH} rows). Lightning {pl.__version__}, torch {torch.__version__}"
    )
    saved = {name: {rows: peak.saved for rows, peak in found.items()} for name, found in measured.items()}
    print(table(saved, "bytes saved, peak"))
    if torch.cuda.is_available():
        allocated = {name: {rows: peak.allocated or 0 for rows, peak in found.items()} for name, found in measured.items()}
        print(table(allocated, "bytes allocated, peak"))
    split = {peak for name, found in saved.items() if name != WHOLE for peak in found.values()}
    verdict = "yes" if split == {saved[WHOLE][MICRO_BATCH]} else "NO"
    print(f"Saved: the same for any number of micro-batches, and as for {MICRO_BATCH} rows in one piece: {verdict}")


if __name__ == "__main__":
    main()
