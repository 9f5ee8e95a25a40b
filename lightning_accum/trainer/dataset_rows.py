"""Rows of the dataset, for the check: batches that the loader's ``collate_fn`` makes of its samples."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from copy import copy, deepcopy
from time import monotonic
from typing import Any, cast

import torch
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_accum.splitting.few_rows import FewRows
from lightning_accum.trainer.engine import Engine
from lightning_accum.trainer.from_lightning import call, pl
from lightning_accum.undo import Undo, replacing
from lightning_accum.verdict import MOST_ROWS, CannotCheckError


def transferred(trainer: pl.Trainer, batch: Any) -> Any:
    """A batch of the loader, as passed to ``training_step``."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    with replacing(cast("Engine", trainer.strategy).sync, batch_on_host=None):  # the sync holds the batch that runs, not this one
        return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)


class DatasetRows(FewRows):
    """Batches of samples from the dataset, built by the loader's ``collate_fn``, if the rows of a batch cannot be identified.

    They are drawn from a copy of the dataset, and changes by ``collate_fn`` are undone. If there are none, a CannotCheckError says
    why.
    """

    kept = None

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer, loader = trainer, trainer.train_dataloader
        of_batch = max(cast("Engine", trainer.strategy).samples_of_loader(), default=MOST_ROWS)
        if not isinstance(loader, DataLoader) or loader.batch_sampler is None or of_batch < 2:
            raise CannotCheckError("the loader does not draw samples by index")
        vars(holder := type("Holder", (torch.nn.Module,), {})())["collate_fn"] = self._collate = loader.collate_fn
        self._undo, self.of_others = Undo(holder, trainer.strategy.root_device), list[int]()
        self._drawn = self._undo.take(watches_parameters=False)
        try:
            with self._drawn:
                self._samples = _samples_of(_copied(loader.dataset), max(MOST_ROWS, min(of_batch, _MOST_SAMPLES)))
        except Exception as error:
            raise CannotCheckError(f"drawing samples raises {type(error).__name__}: {error}") from error
        self.number = self.of_batch = self.at_once = len(self._samples)
        self.take([0, 1])

    @override
    def take(self, rows: Sequence[int]) -> Any:
        with self._undo.take(watches_parameters=False):  # these draws must not affect the batches of training
            self._drawn.restore()
            try:
                batch = transferred(self._trainer, self._collate([deepcopy(self._samples[row % self.number]) for row in rows]))
            except Exception as error:
                raise CannotCheckError(f"collate_fn raises {type(error).__name__} on other samples: {error}") from error
            if self._drawn.random_state.has_drawn():
                raise CannotCheckError("a batch of the loader is made with random numbers")
            self._drawn = self._undo.take(watches_parameters=False)  # its own random draws would show as different losses
        return batch

    @override
    def emptied(self, rows: Sequence[int], without_labels: Collection[int]) -> Any:
        return None


_MOST_SAMPLES, _SECONDS = 256, 5.0


def _copied(dataset: Any) -> Any:
    """A copy with its own containers and inner datasets, so that a file opened to draw a sample stays closed in the original."""
    copied = copy(dataset)
    if hasattr(dataset, "__dict__"):
        vars(copied).update(tree_map(lambda held: _copied(held) if isinstance(held, Dataset) else held, {**vars(dataset)}))
    return copied


def _samples_of(dataset: Any, number: int) -> list[Any]:
    """Samples spread over the dataset, fewer if they take long."""
    number, end, samples = min(number, len(dataset)), monotonic() + _SECONDS, list[Any]()
    for place in sorted(range(number), key=lambda place: place % (number // MOST_ROWS or 1)):  # the first are spread out
        if len(samples) < MOST_ROWS or monotonic() < end:
            samples.append(dataset[place * (len(dataset) - 1) // (number - 1 or 1)])
    return samples
