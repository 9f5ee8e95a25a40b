"""The harness of the one promise: on every engine, a window takes the step of its full batch."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import lightning.pytorch as pl
import pytest
from lightning.pytorch.plugins.precision import DoublePrecision as DoublePrecisionPlugin
from sharded import DoublePrecision, ForkedFSDP2, fsdp1, fsdp2, needs_sharding_on_cpu
from support import ddp, fit, loader, pad
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_accum import GradientAccumulation
from lightning_accum.testing import assert_window_equals_batch
from lightning_accum.testing import windows_of as windows_of

EXACT = 1e-12
SHORT = timedelta(seconds=20)
Rows = Sequence[Any]  # what a collate function makes a batch of


@dataclass(frozen=True)
class Engine:
    """A strategy made of its options; ``ranks`` have loader batches of their own, ``tensor`` processes share those of a rank."""

    strategy: Callable[..., Any]
    ranks: int = 1
    tensor: int = 1
    plugins: Callable[[], list[Any]] = list


LAYERS = {"auto_wrap_policy": {nn.TransformerEncoderLayer}}
ENGINES = {
    "accum": Engine(lambda: "accum"),
    **{name: Engine(lambda **o: ddp(timeout=SHORT, **o), n) for name, n in (("ddp", 2), ("ddp of 3", 3), ("ddp of 4", 4))},
    "fsdp2": Engine(lambda **options: fsdp2(timeout=SHORT, **options), 2),
    "fsdp2 of 4": Engine(lambda **options: fsdp2(4, timeout=SHORT, **options), 4),
    "fsdp2 and tensor": Engine(lambda **options: fsdp2(2, 2, timeout=SHORT, **options), 2, tensor=2),
    "fsdp1": Engine(lambda **options: fsdp1(timeout=SHORT, **options), 2, plugins=lambda: [DoublePrecision()]),
    "fsdp1 by layer": Engine(lambda **o: fsdp1(timeout=SHORT, **LAYERS, **o), 2, plugins=lambda: [DoublePrecision()]),
    "named mesh": Engine(lambda **options: ForkedFSDP2(timeout=SHORT, save_distributed_checkpoint=False, **options), 2, tensor=2),
}


def on(engine: str, *values: Any, marks: Any = (), **options: Any) -> Any:
    """A row of a table of cases: an engine, the options of its strategy, and what else varies."""
    marks = [*marks, *([needs_sharding_on_cpu] if engine.startswith("fsdp") else [])]
    name = " ".join([engine, *(f"{key}={value}" for key, value in options.items()), *map(str, values)])
    return pytest.param(engine, options, *values, id=name, marks=marks)


def on_each(engines: str, *values: Any, **options: Any) -> list[Any]:  # a row for each of several engines, divided by commas
    return [on(engine, *values, **options) for engine in engines.split(", ")]


def dealt(rows: Rows, size: int, engine: str) -> list[list[Rows]]:
    """Loader batches of ``size`` rows, which the ranks of an engine take in turns."""
    batches, ranks = [rows[i : i + size] for i in range(0, len(rows), size)], ENGINES[engine].ranks
    return [batches[rank::ranks] for rank in range(ranks)]


def assert_one_window_one_batch(
    make: Callable[[], pl.LightningModule],
    by_rank: Sequence[Sequence[Rows | None]] | DataLoader | pl.LightningDataModule,
    policy: GradientAccumulation | int, engine: str = "accum", options: dict[str, Any] | None = None, *,
    windows: Sequence[Rows] | None = None, collate: Callable[[Any], Any] = pad, clip: dict[str, float] | None = None,
    has_length: bool = True, epochs: int = 1, ckpt_path: Any = None, optimizers: Sequence[Any] = (None,),
    weights: Sequence[float] | None = None, limit: float = EXACT, **arguments: Any,
) -> None:  # fmt: skip
    """``lightning_accum.testing.assert_window_equals_batch`` on one of ``ENGINES``, with the module's own optimizer.

    ``by_rank`` has the rows of each loader batch of each rank, or is one loader or data module for all; ``windows`` the rows of
    each window, of all epochs, where the policy does not tell them. Gradients are clipped by "norm" or "value".
    """
    of = ENGINES[engine]
    for algorithm, value in (clip or {}).items():
        arguments |= {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm}
    if not has_length:
        size, tail = policy.policy.window or 1, policy.policy.tail
        windows = windows_of(by_rank, size, epochs, tail) if windows is None else windows
        by_rank = Dealt(by_rank, collate, has_length)
    assert_window_equals_batch(
        make, by_rank, policy, windows=windows, weights=weights, optimizers=optimizers, limit=limit,
        by_rank=isinstance(by_rank, Sequence), collate=collate, strategy=lambda: of.strategy(**(options or {})),
        devices=of.ranks * of.tensor, epochs=epochs, ckpt_path=ckpt_path,
        trainer={"plugins": of.plugins() or [DoublePrecisionPlugin()], **arguments},
        reference={"plugins": [DoublePrecisionPlugin()]},
    )  # fmt: skip


def trained(
    module: pl.LightningModule, policy: GradientAccumulation | int, engine: str = "accum", options: Any = None, data: Any = None,
    **arguments: Any,
) -> dict[str, Tensor]:  # fmt: skip
    """Returns the parameters, whole ones if they are sharded."""
    of = ENGINES[engine]
    callbacks = [*([] if isinstance(policy, int) else [policy]), *arguments.pop("callbacks", [])]
    given = {"accumulate_grad_batches": policy} if isinstance(policy, int) else {}
    given |= {"strategy": of.strategy(**(options or {})), "devices": of.ranks * of.tensor, "plugins": of.plugins(), **arguments}
    run = fit(module, data, *callbacks, **given)
    return run.whole if hasattr(run, "whole") else dict(module.named_parameters())


class Dealt(pl.LightningDataModule):  # each data-parallel rank has loader batches of its own
    def __init__(self, by_rank: Sequence[Sequence[Rows | None]], collate: Callable[[Any], Any] = pad, has_length: bool = True):
        super().__init__()
        self.by_rank = [[None if rows is None else collate(rows) for rows in own] for own in by_rank]
        self.has_length = has_length
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def train_dataloader(self) -> DataLoader:
        own = self.by_rank[(self.trainer.distributed_sampler_kwargs or {"rank": 0})["rank"]]
        return loader(own) if self.has_length else DataLoader(Unsized(own), batch_size=None)


class Unsized(IterableDataset):  # batches of an unknown number
    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)
