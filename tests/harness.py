"""One harness for the one promise: on every engine, a window takes the step of its full batch."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.plugins.precision import DoublePrecision as DoublePrecisionPlugin
from sharded import DoublePrecision, ForkedFSDP2, fsdp1, fsdp2, needs_sharding_on_cpu
from support import ddp, loader, pad, trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset

from lightning_accum import GradientAccumulation
from lightning_accum.testing import assert_window_equals_batch

EXACT = 1e-12
SHORT = timedelta(seconds=20)
Rows = Sequence[Any]
"""What a collate function makes a batch of."""

# --- engines ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Engine:
    """What holds a training.

    Attributes:
        strategy: makes it, of its options.
        ranks: have loader batches of their own.
        tensor: so many processes share those of a rank.
        plugins: of the Trainer.
    """

    strategy: Callable[..., Any]
    ranks: int = 1
    tensor: int = 1
    plugins: Callable[[], list[Any]] = list


ENGINES = {
    "accum": Engine(lambda: "accum"),
    "ddp": Engine(lambda **options: ddp(timeout=SHORT, **options), 2),
    "ddp of 3": Engine(lambda **options: ddp(timeout=SHORT, **options), 3),
    "ddp of 4": Engine(lambda **options: ddp(timeout=SHORT, **options), 4),
    "fsdp2": Engine(lambda **options: fsdp2(timeout=SHORT, **options), 2),
    "fsdp2 of 4": Engine(lambda **options: fsdp2(4, timeout=SHORT, **options), 4),
    "fsdp2 and tensor": Engine(lambda **options: fsdp2(2, 2, timeout=SHORT, **options), 2, tensor=2),
    "fsdp1": Engine(lambda **options: fsdp1(timeout=SHORT, **options), 2, plugins=lambda: [DoublePrecision()]),
    "fsdp1 by layer": Engine(
        lambda **options: fsdp1(timeout=SHORT, auto_wrap_policy={nn.TransformerEncoderLayer}, **options),
        2,
        plugins=lambda: [DoublePrecision()],
    ),
    "named mesh": Engine(lambda **options: ForkedFSDP2(timeout=SHORT, save_distributed_checkpoint=False, **options), 2, tensor=2),
}


def on(engine: str, *values: Any, marks: Any = (), **options: Any) -> Any:
    """A row of a table of cases: an engine, the options of its strategy, and what else varies."""
    marks = [*marks, *([needs_sharding_on_cpu] if engine.startswith("fsdp") else [])]
    name = " ".join([engine, *(f"{key}={value}" for key, value in options.items()), *map(str, values)])
    return pytest.param(engine, options, *values, id=name, marks=marks)


# --- windows, counted by hand -------------------------------------------------------------------------------------------


def dealt(rows: Rows, size: int, engine: str) -> list[list[Rows]]:
    """Loader batches of ``size`` rows, which the ranks of an engine take in turns."""
    batches, ranks = [rows[i : i + size] for i in range(0, len(rows), size)], ENGINES[engine].ranks
    return [batches[rank::ranks] for rank in range(ranks)]


def windows_of(by_rank: Sequence[Sequence[Rows | None]], size: int, epochs: int = 1, tail: str = "step") -> list[list[Any]]:
    """The rows of each window of ``size`` loader batches of every rank."""
    windows: list[list[Any]] = []
    current: list[Rows | None] = []
    count, longest = 0, max(map(len, by_rank))
    for index in range(longest * epochs):
        current += [own[index % longest] for own in by_rank if index % longest < len(own)]
        count += 1
        is_end, is_last = (index + 1) % longest == 0, index + 1 == longest * epochs
        if count == size or (is_end and tail == "step") or (is_last and tail == "carry"):
            windows.append([row for batch in current if batch is not None for row in batch])
        if count == size or (is_end and tail != "carry"):
            current, count = [], 0
    return [window for window in windows if window]


# --- the promise --------------------------------------------------------------------------------------------------------


def assert_one_window_one_batch(
    make: Callable[[], pl.LightningModule],
    by_rank: Sequence[Sequence[Rows | None]] | DataLoader | pl.LightningDataModule,
    windows: Sequence[Rows],
    policy: GradientAccumulation | int,
    engine: str = "accum",
    options: dict[str, Any] | None = None,
    *,
    collate: Callable[[Any], Any] = pad,
    weights: Sequence[float] | None = None,
    clip: dict[str, float] | None = None,
    has_length: bool = True,
    limit: float = EXACT,
    max_epochs: int = 1,
    ckpt_path: Any = None,
    optimizers: Sequence[Any] = (None,),
    **arguments: Any,
) -> None:
    """``lightning_accum.testing.assert_window_equals_batch`` on one of ``ENGINES``, with the module's own optimizer.

    Args:
        make: makes a module, each time of the same parameters.
        by_rank: the rows of each loader batch of each rank, or one loader or data module for all ranks.
        windows: the rows of each window, of all epochs, counted by hand.
        policy: the callback, or the Trainer's ``accumulate_grad_batches``.
        engine: a name of ``ENGINES``.
        options: of its strategy.
        collate: makes a batch of rows.
        weights: what each window is to weigh.
        clip: to what gradients are clipped, by "norm" or "value".
        has_length: of the loaders.
        limit: of the error of what training changed, and of losses.
        max_epochs: how often the batches are seen.
        ckpt_path: from which training in windows goes on.
        optimizers: functions that make one of parameters; None is the module's own.
        arguments: of both Trainers.
    """
    of = ENGINES[engine]
    for algorithm, value in (clip or {}).items():
        arguments |= {"gradient_clip_val": value, "gradient_clip_algorithm": algorithm}
    data = by_rank if has_length or not isinstance(by_rank, Sequence) else Dealt(by_rank, collate, has_length)
    plugins = of.plugins() or arguments.pop("plugins", [DoublePrecisionPlugin()])
    assert_window_equals_batch(
        make,
        data,
        policy,
        windows=windows,
        weights=weights,
        optimizers=optimizers,
        limit=limit,
        by_rank=isinstance(data, Sequence),
        collate=collate,
        strategy=lambda: of.strategy(**(options or {})),
        devices=of.ranks * of.tensor,
        ranks=of.ranks,
        epochs=max_epochs,
        ckpt_path=ckpt_path,
        trainer={"plugins": plugins, **arguments},
        reference={"plugins": [DoublePrecisionPlugin()]},
    )


def trained(
    module: pl.LightningModule,
    policy: GradientAccumulation | int,
    engine: str = "accum",
    options: dict[str, Any] | None = None,
    data: Any = None,
    *,
    ckpt_path: Any = None,
    callbacks: Sequence[Callback] = (),
    **arguments: Any,
) -> dict[str, Tensor]:
    """Returns the parameters, whole ones where they are sharded."""
    of = ENGINES[engine]
    given = {"accumulate_grad_batches": policy} if isinstance(policy, int) else {}
    own = [Shown()] if isinstance(policy, int) else [policy, Shown()]
    for old in Path().glob("rank*.pt"):
        old.unlink()
    given |= {"devices": of.ranks * of.tensor, "plugins": of.plugins(), "callbacks": [*own, *callbacks], **arguments}
    run = trainer(of.strategy(**(options or {})), **given)
    run.fit(module, data, ckpt_path=ckpt_path)
    return run.whole if hasattr(run, "whole") else dict(module.named_parameters())


class Shown(Callback):
    """Writes down what each rank, which may be another process, shows of its windows."""

    def __init__(self) -> None:
        self.windows: dict[int, tuple[float, float]] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        metrics = trainer.callback_metrics
        if "window/loss" in metrics:
            self.windows[int(metrics["window/optimizer_steps"])] = (float(metrics["window/loss"]), float(metrics["window/weight"]))

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_train_batch_end(trainer)
        torch.save({"steps": trainer.global_step, "windows": self.windows}, f"rank{trainer.global_rank}.pt")


class Dealt(pl.LightningDataModule):
    """Each data-parallel rank has loader batches of its own."""

    def __init__(
        self, by_rank: Sequence[Sequence[Rows | None]], collate: Callable[[Any], Any] = pad, has_length: bool = True
    ) -> None:
        super().__init__()
        self.by_rank = [[None if rows is None else collate(rows) for rows in own] for own in by_rank]
        self.has_length = has_length
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def train_dataloader(self) -> DataLoader:
        share = self.trainer.distributed_sampler_kwargs or {"rank": 0}
        own = self.by_rank[share["rank"]]
        return loader(own) if self.has_length else DataLoader(Unsized(own), batch_size=None)


class Unsized(IterableDataset):
    """Batches of an unknown number."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)
