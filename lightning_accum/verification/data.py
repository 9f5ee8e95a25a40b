"""The batches that a verification is made on: of a batch, a loader, a data module, or the module's own loader."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.utilities.combined_loader import CombinedLoader
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_accum.arguments import MisconfiguredError
from lightning_accum.errors import UnsplittableBatchError
from lightning_accum.randomness import generators_kept
from lightning_accum.splitting.few_rows import join as join_batches
from lightning_accum.splitting.micro_batch import Layout
from lightning_accum.verification.step import ModuleState

Join = Callable[[Sequence[Any]], Any]
"""Makes one batch of several."""


@dataclass(frozen=True)
class Comparison:
    """What is compared.

    Attributes:
        full: the full batch.
        batches: the loader batches of the window that stands for it.
        padding: how the batches were padded to be joined; empty if not.
        layout: how the full batch is made of rows; None where the batch does not show it.
        hooks: the data module whose transfer hooks the batches go through.
    """

    full: Any
    batches: Sequence[Any]
    padding: str = ""
    layout: Layout | None = None
    hooks: pl.LightningDataModule | None = None

    @property
    def rows(self) -> int | None:
        """Samples in the full batch, where the batch shows them."""
        return None if self.layout is None else self.layout.size

    def reversed(self) -> Any | None:
        """The full batch with its rows in the other order: the same mean, added up differently."""
        return None if self.layout is None else self.layout.take(list(reversed(range(self.layout.size))))

    def padded(self) -> list[Any] | None:
        """The loader batches as they are in the full batch, with its padding."""
        if self.layout is None or not self.padding:
            return None
        parts, start = [], 0
        for batch in self.batches:
            size = Layout.read(batch, self.layout.kinds).size
            parts.append(self.layout.take(slice(start, start + size)))
            start += size
        return parts


def read_data(module: pl.LightningModule, state: ModuleState, data: Any, window: int, join: Join | None) -> Comparison:
    """Take what is compared from what the user gave.

    Raises:
        MisconfigurationException: there are no batches, or too few.
        JoiningError: the batches of a window do not show how they become one.
    """
    hooks = data if isinstance(data, pl.LightningDataModule) else None
    if is_batch(data):
        if window == 1:
            return Comparison(data, [data], layout=_layout(data))
        layout = _layout(data)
        if layout is None or layout.size < window:
            found = "how it is made of rows does not show" if layout is None else f"it has {layout.size} rows"
            raise MisconfiguredError(
                f"verify(window={window}) got one batch, to be cut into the {window} batches of a window, but {found}. Pass a"
                " loader or a list of batches, or micro_batch= instead of window=."
            )
        parts = torch.arange(layout.size).tensor_split(window)
        return Comparison(data, [layout.take(part.tolist()) for part in parts], layout=layout)
    with state.restored_afterwards():
        loader = _loader(module, data)
        batches = [copy.deepcopy(batch) for batch in _first(loader, window)]
    if len(batches) < window:
        raise MisconfiguredError(
            f"verify(window={window}) needs {window} batches, but there {'is' if len(batches) == 1 else 'are'} {len(batches)}."
            " Pass more data or a smaller window."
        )
    full, padding = join_batches(batches) if join is None else (join(batches), "")
    return Comparison(full, batches, padding, _layout(full), hooks)


def is_batch(data: Any) -> bool:
    """Whether ``data`` is one batch, rather than something that gives batches.

    Tensors, mappings, tuples and dataclasses are batches, and lists that hold tensors; other lists hold batches.

    Example:
        >>> x = torch.zeros(4, 2)
        >>> is_batch([x, x]), is_batch([(x, x), (x, x)]), is_batch(iter([x])), is_batch({"x": x})
        (True, False, False, True)
    """
    values = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ()
    if any(isinstance(value, DataLoader) for value in values):
        return False
    if isinstance(data, list):
        return any(isinstance(value, Tensor) for value in data)
    is_record = dataclasses.is_dataclass(data) and not isinstance(data, type)
    is_given = data is None or isinstance(data, (DataLoader, pl.LightningDataModule, CombinedLoader))
    if is_given or isinstance(data, (Tensor, Mapping, tuple)) or is_record:
        return not is_given
    return not isinstance(data, Iterable)  # a graph, a list of images of a class of its own


def _layout(batch: Any) -> Layout | None:
    try:
        return Layout.read(batch)
    except UnsplittableBatchError:
        return None


def _loader(module: pl.LightningModule, data: Any) -> Iterable[Any]:
    owner: Any = data
    if data is None:
        owner = module
        if not is_overridden("train_dataloader", owner):
            raise MisconfiguredError(
                f"verify needs data: {type(module).__name__} has no train_dataloader. Pass data=<a batch, a loader or"
                " a LightningDataModule>."
            )
    if data is None or isinstance(data, pl.LightningDataModule):
        owner.prepare_data()
        owner.setup("fit")
        data = owner.train_dataloader()
    if isinstance(data, Mapping) or (isinstance(data, (list, tuple)) and any(isinstance(item, DataLoader) for item in data)):
        data = CombinedLoader(data, "max_size_cycle")  # as the Trainer does
    return (item[0] for item in data) if isinstance(data, CombinedLoader) else data


def _first(loader: Iterable[Any], number: int) -> list[Any]:
    with generators_kept(loader):
        return list(islice((batch for batch in loader if batch is not None), number))
