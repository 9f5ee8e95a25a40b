"""One training run of the demo, each rank of it in a process of its own."""

from __future__ import annotations

import io
import logging
import multiprocessing
import os
import socket
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import lightning.pytorch as pl
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.pytorch.callbacks import Callback
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.multiprocessing.spawn import ProcessException, start_processes
from torch.nn import functional as F  # noqa: N812
from typing_extensions import override

from lightning_accum import GradientAccumulation, ModelParallelAccumulationStrategy
from lightning_accum.demo.data import collate, count_targets, loader_of
from lightning_accum.demo.mix import GLOBAL_BATCH, Mix
from lightning_accum.demo.model import IGNORED, ByteModel, new_model

OnStep: TypeAlias = Callable[[float], None]
"""Called after each optimizer step with its loss."""

SECONDS_TO_START, SECONDS_AN_EPOCH = 180, 60
"""When a run is given up: some ten times what it takes on two slow cores."""


class RunError(RuntimeError):
    """A training run failed, or did not end."""


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
    if mix.engine == "lightning_accum":
        strategy: Any = (
            ModelParallelAccumulationStrategy(mix.ranks, 1) if mix.is_sharded else "accum_ddp" if mix.ranks > 1 else "accum"
        )
        accumulation: dict[str, Any] = {"callbacks": [GradientAccumulation(mix.window, micro_batch=mix.micro_batch), record]}
    else:
        strategy = "ddp" if mix.ranks > 1 else "auto"
        accumulation = {"callbacks": [record], "accumulate_grad_batches": mix.window}
    trainer = pl.Trainer(
        accelerator="cpu",
        devices=mix.ranks,
        strategy=strategy,
        precision="32-true" if mix.is_sharded else "64-true",  # Lightning has FSDP2 in no other; the model is float64 by itself
        max_epochs=epochs,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        plugins=[LightningEnvironment()],  # also on a cluster: the demo stays on this machine
        **accumulation,
    )
    model, whole = new_model(), new_model()
    trainer.fit(model, loader_of(corpus, mix.batch))
    gathered = {name: p.full_tensor() if isinstance(p, DTensor) else p for name, p in model.named_parameters()}
    whole.load_state_dict(gathered)
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

    def __init__(self, on_step: OnStep) -> None:
        self.losses: list[float] = []
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
        self._on_step(loss)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seconds = time.perf_counter() - self._started


# --- processes ----------------------------------------------------------------------------------------------------------


def train_in_processes(mix: Mix, corpus: Sequence[bytes], epochs: int, on_step: OnStep) -> Trained:
    """Do what :func:`train` does, with a process for each rank.

    Raises:
        RunError: one of them failed, or the run does not end. All have been ended.
    """
    # what takes seconds to import is imported once, by a server that the ranks are forked from; Windows has none
    method = "spawn" if sys.platform == "win32" else "forkserver"
    multiprocessing.set_forkserver_preload([__name__])
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    messages = multiprocessing.get_context(method).SimpleQueue()
    limit = SECONDS_TO_START + SECONDS_AN_EPOCH * epochs
    started, result, has_ended = time.monotonic(), None, False
    ranks = start_processes(  # type: ignore[no-untyped-call]
        _train_rank, (mix, port, corpus, epochs, messages), mix.ranks, join=False, daemon=True, start_method=method
    )
    try:
        while not has_ended:
            if time.monotonic() - started > limit:
                raise RunError(f"The run {mix} did not end in {limit} s.")
            has_ended = ranks.join(timeout=0.1)
            while not messages.empty():
                message = messages.get()
                if isinstance(message, bytes):
                    result = torch.load(io.BytesIO(message), weights_only=True)
                else:
                    on_step(message)
    except ProcessException as error:
        raise RunError(f"The run {mix} failed.\n{error}") from error
    finally:
        for process in ranks.processes:
            process.kill()
    assert result is not None
    return Trained(**result)


def _train_rank(rank: int, mix: Mix, port: int, corpus: Sequence[bytes], epochs: int, messages: Any) -> None:
    """One process of a run: as if a launcher had started it, so that Lightning starts none."""
    for stream in (sys.stdout, sys.stderr):  # an exception is a message of its own
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    logging.disable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # matrices this small are no faster on more
    place = {"LOCAL_RANK": rank, "NODE_RANK": 0, "WORLD_SIZE": mix.ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})

    def on_step(loss: float) -> None:
        if rank == 0:
            messages.put(loss)

    trained = train(mix, corpus, epochs, on_step)
    if rank == 0:
        file = io.BytesIO()
        torch.save(vars(trained), file)
        messages.put(file.getvalue())
    if torch.distributed.is_initialized():
        # Lightning leaves gloo's threads to the end of the interpreter, where now and then they abort it
        torch.distributed.destroy_process_group()
