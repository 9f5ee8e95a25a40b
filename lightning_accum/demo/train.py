"""One training run of the demo, in a process of its own: ``python -m lightning_accum.demo.train``.

Lightning starts the second rank by running the same command again.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.nn import functional as F  # noqa: N812
from typing_extensions import override

from lightning_accum import GradientAccumulation
from lightning_accum.demo.data import Docstrings, collate, count_targets
from lightning_accum.demo.mix import GLOBAL_BATCH, Mix
from lightning_accum.demo.model import IGNORED, ByteModel, new_model

OnStep: TypeAlias = Callable[[int, float], None]
"""Is told the optimizer step and its loss."""


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


def train(mix: Mix, corpus: Sequence[bytes], epochs: int, on_step: OnStep) -> Trained:
    """Train the model once.

    Args:
        mix: who accumulates, and how the global batch is cut.
        corpus: the texts to train on.
        epochs: how often to pass over them.
        on_step: called after every optimizer step, on every rank.
    """
    record = _Record(on_step)
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=mix.ranks,
        precision="64-true",
        max_epochs=epochs,
        use_distributed_sampler=False,  # the data module deals the samples out
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[LightningEnvironment()],  # also on a cluster: the demo stays on this machine
        **_accumulation(mix, record),
    )
    model = new_model()
    trainer.fit(model, datamodule=Docstrings(corpus, mix.batch))
    return Trained(
        final_loss=mean_loss(model, corpus),
        losses=record.losses,
        optimizer_steps=record.optimizer_steps,
        scheduler_steps=record.scheduler_steps,
        seconds=record.seconds,
        parameters={name: parameter.detach().clone() for name, parameter in model.named_parameters()},
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


def _accumulation(mix: Mix, record: Callback) -> dict[str, Any]:
    """All that differs between the runs: what the Trainer is told."""
    if mix.engine == "lightning_accum":
        return {"strategy": "accum" if mix.ranks == 1 else "accum_ddp", "callbacks": [GradientAccumulation(mix.window), record]}
    return {
        "strategy": "auto" if mix.ranks == 1 else "ddp",
        "accumulate_grad_batches": mix.window,
        "callbacks": [record],
    }


class _Record(Callback):
    """Notes the loss of every optimizer step's whole batch, and counts."""

    def __init__(self, on_step: OnStep) -> None:
        self.losses: list[float] = []
        self.optimizer_steps = self.scheduler_steps = 0
        self.seconds = 0.0
        self._on_step = on_step
        self._loss_and_targets = torch.zeros(2, dtype=torch.float64)

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._started = time.perf_counter()

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        # the same measure for every run, from what the module itself logs: the mean over all bytes of the window
        targets = count_targets(batch["labels"])
        self._loss_and_targets += torch.stack([trainer.callback_metrics["train_loss"] * targets, targets])
        if trainer.global_step == len(self.losses):  # inside a window
            return
        total, count = trainer.strategy.reduce(self._loss_and_targets, reduce_op="sum").tolist()
        loss = total / count
        self._loss_and_targets.zero_()
        self.losses.append(loss)
        self._on_step(len(self.losses), loss)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds = time.perf_counter() - self._started
        self.optimizer_steps = int(max(state["step"] for state in trainer.optimizers[0].state.values()))
        self.scheduler_steps = trainer.lr_scheduler_configs[0].scheduler.last_epoch


def command(mix: Mix, corpus: Path, epochs: int, result: Path) -> list[str]:
    """The command line that trains ``mix`` in a process of its own.

    Args:
        mix: the run.
        corpus: a file with a list of texts, written by ``torch.save``.
        epochs: how often to pass over them.
        result: where to write the fields of :class:`Trained`, for ``torch.load``.
    """
    arguments = ["--mix", json.dumps(asdict(mix)), "--corpus", str(corpus), "--epochs", str(epochs), "--result", str(result)]
    return [sys.executable, "-m", "lightning_accum.demo.train", *arguments]


def main() -> None:
    """Train as the command line says, and print a line of JSON, ``[step, loss]``, after every optimizer step."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--mix", type=lambda text: Mix(**json.loads(text)), required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--result", type=Path, required=True)
    arguments = parser.parse_args()
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    is_first = os.environ.get("LOCAL_RANK", "0") == "0"
    # a pipe that the second rank does not inherit, so that its reader sees the end of this process
    pipe = os.fdopen(os.dup(sys.stdout.fileno()), "w", buffering=1)
    with open(os.devnull, "w") as nowhere:
        os.dup2(nowhere.fileno(), sys.stdout.fileno())

    def on_step(step: int, loss: float) -> None:
        if is_first:
            print(json.dumps([step, loss]), file=pipe)

    trained = train(arguments.mix, torch.load(arguments.corpus, weights_only=True), arguments.epochs, on_step)
    if is_first:
        torch.save(vars(trained), arguments.result)
    if torch.distributed.is_initialized():
        # Lightning leaves gloo's threads to the end of the interpreter, where now and then they abort it
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
