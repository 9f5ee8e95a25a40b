"""A training in new processes that is interrupted and goes on, against one that is not: to the bit."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from sharded import ShardedLanguage, whole_parameters
from support import SaveAfter, StatefulLoader, pad, sentences, trainer

from lightning_accum import GradientAccumulation, ModelParallelAccumulationStrategy

ROWS = sentences(72)
"""In an epoch, over all ranks: 18 loader batches of 4."""


class Module(ShardedLanguage):
    """In single precision, where sums in another order would show, with a scheduler."""

    def __init__(self) -> None:
        super().__init__("adamw")
        self.float()

    def train_dataloader(self) -> StatefulLoader:
        share = self.trainer.distributed_sampler_kwargs or {"rank": 0, "num_replicas": 1}
        starts = range(4 * share["rank"], len(ROWS), 4 * share["num_replicas"])
        return StatefulLoader([pad(ROWS[start : start + 4]) for start in starts])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=12)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class Record(Callback):
    """Writes down all that a training ends with."""

    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if "window/optimizer_steps" in trainer.callback_metrics:
            self.losses[int(trainer.callback_metrics["window/optimizer_steps"])] = float(trainer.callback_metrics["window/loss"])

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        parameters, record = whole_parameters(pl_module), {"losses": self.losses}
        if trainer.global_rank == 0:
            record["parameters"] = parameters
            record["global_step"] = trainer.global_step
            record["schedulers"] = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
            record["total_weight"] = float(trainer.callback_metrics["window/total_weight"])
            if not isinstance(trainer.strategy, ModelParallelAccumulationStrategy):
                record["optimizers"] = [optimizer.state_dict() for optimizer in trainer.optimizers]
            torch.save(record, "record.pt")

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.losses[-trainer.current_epoch] = -1.0


def train(
    make: Callable[[], Any],
    ranks: int,
    save_after: int | None = None,
    ends: bool = False,
    resumes: bool = False,
    module: type[Module] = Module,
    **policy: Any,
) -> dict[str, Any] | None:
    """Train for an epoch in new processes. Returns what it ended with; None where it was interrupted."""
    Path("record.pt").unlink(missing_ok=True)

    def fit() -> None:
        callbacks = [GradientAccumulation(**policy), SaveAfter(save_after, ends=ends), Record()]
        run = trainer(make(), devices=ranks, callbacks=callbacks)
        run.fit(module(), ckpt_path="inside.ckpt" if resumes else None)

    if ranks > 1:  # forks by itself
        try:
            fit()
        except Exception as error:
            if "Interrupted" not in str(error) or not ends:
                raise
    else:
        process = multiprocessing.get_context("fork").Process(target=fit)
        process.start()
        process.join(120)
        assert (process.exitcode != 0) == ends
    return None if ends else torch.load("record.pt", weights_only=False)


def is_same(a: Any, b: Any) -> bool:
    """To the bit."""
    if isinstance(a, torch.Tensor):
        return torch.equal(a, b)
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(is_same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(is_same(x, y) for x, y in zip(a, b, strict=True))
    return bool(a == b)


def assert_goes_on(expected: dict[str, Any], found: dict[str, Any], where: str) -> None:
    for step, loss in found.pop("losses").items():
        assert expected["losses"][step] == loss, f"{where}: loss of window {step}"
    for name, value in found.items():
        assert is_same(expected[name], value), f"{where}: {name}"
