"""One training run of the demo, each rank of it in a process of its own."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.nn import functional as F  # noqa: N812
from typing_extensions import override

from lightning_accum import GradientAccumulation, ModelParallelAccumulationStrategy
from lightning_accum.demo.data import collate, count_targets, loader_of
from lightning_accum.demo.mix import GLOBAL_BATCH, Mix
from lightning_accum.demo.model import IGNORED, ByteModel, new_model
from lightning_accum.verification.processes import run_on_ranks

SECONDS_TO_START, SECONDS_AN_EPOCH = 180.0, 60.0
"""When a run is given up: some ten times what it takes on two slow cores."""


@dataclass(frozen=True)
class Trained:
    """What a run ended with.

    Attributes:
        final_loss: see :func:`mean_loss`.
        losses: the loss of each optimizer step's whole batch, before the step.
        optimizer_steps: as the optimizer counted them.
        scheduler_steps: as the scheduler counted them.
        seconds: time in training.
        parameters: the model's, by name.
    """

    final_loss: float
    losses: list[float]
    optimizer_steps: int
    scheduler_steps: int
    seconds: float
    parameters: dict[str, Tensor]


def train(mix: Mix, corpus: Sequence[bytes], epochs: int) -> Trained:
    """Train the model once, in this process: as all of a run, or as one rank of it."""
    record = _Record()
    callbacks, strategy = [record], "ddp" if mix.ranks > 1 else "auto"
    arguments: dict[str, Any] = {"strategy": strategy, "callbacks": callbacks, "accumulate_grad_batches": mix.window}
    if mix.engine == "lightning_accum":
        sharded = ModelParallelAccumulationStrategy(mix.ranks, 1) if mix.is_sharded else None
        accumulation = GradientAccumulation(mix.window, micro_batch=mix.micro_batch)
        arguments = {"strategy": sharded or ("accum_ddp" if mix.ranks > 1 else "accum"), "callbacks": [accumulation, record]}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=mix.ranks,
        precision="32-true" if mix.is_sharded else "64-true",  # Lightning has FSDP2 in no other; the model is float64 by itself
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[LightningEnvironment()],  # also on a cluster: the demo stays on this machine
        **arguments,
    )
    model, whole = new_model(), new_model()
    trainer.fit(model, loader_of(corpus, mix.batch))
    whole.load_state_dict({n: p.full_tensor() if isinstance(p, DTensor) else p for n, p in model.named_parameters()})
    return Trained(
        final_loss=mean_loss(whole, corpus),
        losses=record.losses,
        optimizer_steps=int(max(state["step"] for state in trainer.optimizers[0].state.values())),
        scheduler_steps=trainer.lr_scheduler_configs[0].scheduler.last_epoch,
        seconds=record.seconds,
        parameters={name: parameter.detach() for name, parameter in whole.named_parameters()},
    )


@torch.no_grad()
def mean_loss(model: ByteModel, corpus: Sequence[bytes]) -> float:
    """The mean loss of a byte over a whole corpus, in nats."""
    total, count = 0.0, 0
    texts = sorted(corpus, key=len)
    for start in range(0, len(texts), GLOBAL_BATCH):
        batch = collate(texts[start : start + GLOBAL_BATCH])
        logits, labels = model(batch["input_ids"])[:, :-1], batch["labels"][:, 1:]
        total += float(F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED, reduction="sum"))
        count += int(count_targets(batch["labels"]))
    return total / count


class _Record(Callback):
    """Notes the loss of every optimizer step's whole batch, and the time."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.seconds = 0.0
        self._loss_and_targets = torch.zeros(2, dtype=torch.float64)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        metrics = trainer.callback_metrics
        targets = count_targets(batch["labels"])
        self._loss_and_targets += torch.stack([metrics["train_loss"] * targets, targets])
        if trainer.global_step == len(self.losses):  # inside a window
            return
        if "window/loss" in metrics:
            loss = metrics["window/loss"].item()
        else:  # Lightning has no such number: here it is, the mean over all bytes, from what the module logs
            total, count = trainer.strategy.reduce(self._loss_and_targets, reduce_op="sum").tolist()
            loss = total / count
        self._loss_and_targets.zero_()
        self.losses.append(loss)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds = time.perf_counter() - self._started


def train_in_processes(mix: Mix, corpus: Sequence[bytes], epochs: int) -> Trained:
    """As :func:`train`, with a process for each rank.

    Raises:
        RanksFailedError: one of them failed, or they do not end. All have been ended.
    """
    job, seconds = partial(_train_rank, mix, corpus, epochs), SECONDS_TO_START + SECONDS_AN_EPOCH * epochs
    trained: Trained = run_on_ranks(job, mix.ranks, seconds)
    return trained


def _train_rank(mix: Mix, corpus: Sequence[bytes], epochs: int, hand_over: Callable[[Trained], None]) -> None:
    for stream in (sys.stdout, sys.stderr):  # an exception is handed over
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    logging.disable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # matrices this small are no faster on more
    hand_over(train(mix, corpus, epochs))
