"""One training run of the demo, each rank of it in a process of its own."""

from __future__ import annotations

import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from typing_extensions import override

from lightning_accum import GradientAccumulation, ModelParallelAccumulationStrategy
from lightning_accum.demo.model import count_targets, loader_of, new_model
from lightning_accum.from_lightning import Callback, LightningEnvironment, pl
from lightning_accum.testing import QUIET, whole_parameters
from lightning_accum.verification.processes import run_on_ranks

GLOBAL_BATCH = 32


class Mix(NamedTuple):
    """One training run: who accumulates, and how the global batch is cut.

    ``window`` loader batches of ``batch`` samples on each of ``ranks`` make an optimizer step; each loader batch may be split into
    micro-batches, and the model may be sharded over the ranks by FSDP2, rather than replicated by DDP.
    """

    engine: str
    ranks: int
    window: int
    batch: int
    micro_batch: int | None = None
    is_sharded: bool = False

    @property
    def parallelism(self) -> str:
        """What keeps the ranks at one model."""
        return "FSDP2" if self.is_sharded else "DDP" if self.ranks > 1 else ""

    @property
    def shape(self) -> str:
        """Ranks x window x batch, and what keeps the ranks at one model: ``"2 x 4 x 4 DDP"``, ``"1 x 1 x 32/4"``."""
        split = "" if self.micro_batch is None else f"/{self.micro_batch}"
        return f"{self.ranks} x {self.window} x {self.batch}{split} {self.parallelism}".rstrip()


FULL_BATCH = Mix("full batch", ranks=1, window=1, batch=GLOBAL_BATCH)
MIXES = (
    FULL_BATCH,
    *(Mix("Lightning", *cut) for cut in ((1, 8, 4), (2, 4, 4))),
    *(Mix("lightning_accum", *cut) for cut in ((1, 8, 4), (1, 32, 1), (1, 1, 32, 4), (2, 4, 4), (2, 16, 1), (4, 8, 1))),
    *(Mix("lightning_accum", *cut, is_sharded=True) for cut in ((2, 4, 4), (4, 2, 4))),
)


class Trained(NamedTuple):
    """What a run ended with: the loss of each step's whole batch before the step, counts, and the parameters by name."""

    losses: list[float]
    optimizer_steps: int
    scheduler_steps: int
    parameters: dict[str, Tensor]


def train(mix: Mix, corpus: Sequence[bytes], epochs: int) -> Trained:
    """Train the model once, with a process for each rank. It is given up after some ten times what two slow cores take."""
    trained: Trained = run_on_ranks(partial(_train_rank, mix, corpus, epochs), mix.ranks, 180.0 + 60.0 * epochs)
    return trained


def _train_rank(mix: Mix, corpus: Sequence[bytes], epochs: int, hand_over: Callable[[Trained], None]) -> None:
    for stream in (sys.stdout, sys.stderr):  # an exception is handed over
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    logging.disable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # matrices this small are no faster on more
    record = _Record()
    strategy: Any = "ddp" if mix.ranks > 1 else "auto"
    how: dict[str, Any] = {"callbacks": [record], "accumulate_grad_batches": mix.window}
    if mix.engine == "lightning_accum":
        strategy = "accum_ddp" if mix.ranks > 1 else "accum"
        how = {"callbacks": [GradientAccumulation(mix.window, micro_batch=mix.micro_batch), record]}
    if mix.is_sharded:
        strategy = ModelParallelAccumulationStrategy(mix.ranks, 1)
    how |= {"accelerator": "cpu", "devices": mix.ranks, "strategy": strategy, "max_epochs": epochs}
    how["precision"] = "32-true" if mix.is_sharded else "64-true"  # Lightning has FSDP2 in no other; the model is float64 by itself
    how["plugins"] = [LightningEnvironment()]  # also on a cluster: the demo stays on this machine
    trainer, model = pl.Trainer(**QUIET, **how), new_model()
    trainer.fit(model, loader_of(corpus, mix.batch))
    optimizer, scheduler = trainer.optimizers[0], trainer.lr_scheduler_configs[0].scheduler
    steps = int(max(state["step"] for state in optimizer.state.values())), scheduler.last_epoch
    hand_over(Trained(record.losses, *steps, whole_parameters(trainer, model)))


class _Record(Callback):
    """Notes the loss of every optimizer step's whole batch."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self._loss_and_targets = torch.zeros(2, dtype=torch.float64)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        metrics, targets = trainer.callback_metrics, count_targets(batch["labels"])
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
