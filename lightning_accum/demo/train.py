"""The training runs of the demo, one after another: ``python -m lightning_accum.demo.train``.

Every rank of every run is a process of its own, which is forked where that is safe: what takes seconds to import is imported once.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch import multiprocessing as mp
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import start_processes
from torch.nn import functional as F  # noqa: N812
from typing_extensions import override

from lightning_accum import GradientAccumulation, ModelParallelAccumulationStrategy
from lightning_accum.demo.data import collate, count_targets, loader_of
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
        precision="32-true" if mix.is_sharded else "64-true",  # Lightning has FSDP2 in no other; the model is float64 by itself
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[LightningEnvironment()],  # also on a cluster: the demo stays on this machine
        **_accumulation(mix, record),
    )
    model = new_model()
    trainer.fit(model, loader_of(corpus, mix.batch))
    whole = new_model()
    whole.load_state_dict({name: _gathered(parameter) for name, parameter in model.named_parameters()})
    return Trained(
        final_loss=mean_loss(whole, corpus),
        losses=record.losses,
        optimizer_steps=record.optimizer_steps,
        scheduler_steps=record.scheduler_steps,
        seconds=record.seconds,
        parameters={name: parameter.detach() for name, parameter in whole.named_parameters()},
    )


def _gathered(parameter: Tensor) -> Tensor:
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


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
        strategy = "accum" if mix.ranks == 1 else "accum_ddp"
        return {
            "strategy": ModelParallelAccumulationStrategy(mix.ranks, 1) if mix.is_sharded else strategy,
            "callbacks": [GradientAccumulation(mix.window, micro_batch=mix.micro_batch), record],
        }
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
        self._on_step(len(self.losses), loss)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds = time.perf_counter() - self._started
        self.optimizer_steps = int(max(state["step"] for state in trainer.optimizers[0].state.values()))
        self.scheduler_steps = trainer.lr_scheduler_configs[0].scheduler.last_epoch


def command(mixes: Sequence[Mix], corpus: Path, epochs: int, folder: Path) -> list[str]:
    """The command line that trains ``mixes`` one after another.

    Args:
        mixes: the runs.
        corpus: a file with a list of texts, written by ``torch.save``.
        epochs: how often to pass over them.
        folder: where to write the fields of :class:`Trained` of each run, for ``torch.load``.
    """
    as_json = json.dumps([asdict(mix) for mix in mixes])
    arguments = ["--mixes", as_json, "--corpus", str(corpus), "--epochs", str(epochs), "--folder", str(folder)]
    return [sys.executable, "-m", "lightning_accum.demo.train", *arguments]


def main() -> None:
    """Train as the command line says.

    Prints a line of JSON after every optimizer step, ``{"step": ..., "loss": ...}``, and after every run, ``{"result": its file}``.
    """
    parser = argparse.ArgumentParser()
    parser.add_argument("--mixes", type=lambda text: [Mix(**fields) for fields in json.loads(text)], required=True)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--folder", type=Path, required=True)
    arguments = parser.parse_args()
    corpus = torch.load(arguments.corpus, weights_only=True)
    for position, mix in enumerate(arguments.mixes):
        result = arguments.folder / f"{position}.pt"
        _train_in_processes(mix, corpus, arguments.epochs, result)
        print(json.dumps({"result": str(result)}), flush=True)


def _train_in_processes(mix: Mix, corpus: Sequence[bytes], epochs: int, result: Path) -> None:
    """Start the ranks of a run and print its steps until they have ended.

    Raises:
        torch.multiprocessing.ProcessException: one of them failed; all have been ended.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    method = "fork" if sys.platform == "linux" else "spawn"  # macOS has no safe fork, Windows none
    steps, teller = mp.get_context(method).Pipe(duplex=False)
    arguments = (mix, port, corpus, epochs, result, teller)
    ranks = start_processes(_train_rank, arguments, mix.ranks, join=False, daemon=True, start_method=method)  # type: ignore[no-untyped-call]
    has_ended = False
    while not has_ended:
        has_ended = ranks.join(timeout=0.1)
        while steps.poll():
            step, loss = steps.recv()
            print(json.dumps({"step": step, "loss": loss}), flush=True)


def _train_rank(rank: int, mix: Mix, port: int, corpus: Sequence[bytes], epochs: int, result: Path, teller: Connection) -> None:
    """One process of a run: as if a launcher had started it, so that Lightning starts none."""
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())  # the standard output is for the steps
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    place = {"LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": mix.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})

    def on_step(step: int, loss: float) -> None:
        if rank == 0:
            teller.send((step, loss))

    trained = train(mix, corpus, epochs, on_step)
    if rank == 0:
        torch.save(vars(trained), result)
    if torch.distributed.is_initialized():
        # Lightning leaves gloo's threads to the end of the interpreter, where now and then they abort it
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
