"""One window over real ranks: what each of them saw of it."""

from __future__ import annotations

import os
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.strategies import ModelParallelStrategy, Strategy
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor
from typing_extensions import override

from lightning_accum.arguments import MisconfiguredError
from lightning_accum.engine import Engine
from lightning_accum.loops.launch import forks_or_spawns
from lightning_accum.randomness import NoiseOfRows, seed_everything
from lightning_accum.strategies import ModelParallelAccumulationStrategy
from lightning_accum.verification.processes import run_on_ranks
from lightning_accum.verification.step import (
    Change,
    StepRunner,
    loader_of,
    quiet,
    trainer_of_one_step,
    uncompiled,
)
from lightning_accum.verification.watch import Step, StepRecorder, StepTakenError


def is_of_this_package(strategy: str | Strategy) -> bool:
    """Whether it weighs micro-batches, and takes this package's callback."""
    return isinstance(strategy, Engine) or str(strategy).startswith("accum")


def steps_over_ranks(runner: StepRunner, shares: Sequence[Sequence[Any]], strategy: str | Strategy, change: Change) -> list[Step]:
    """The step of a window over ranks, as each rank saw it, of whose loader batches these are the ``shares``.

    Raises:
        RanksFailedError: there was none.
    """

    def job(hand_over: Callable[[list[Step]], None]) -> None:
        def finish(step: Step) -> None:
            steps: list[Any] = [None] * dist.get_world_size()
            dist.all_gather_object(steps, step)
            hand_over(steps)

        with quiet(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            _train(runner, shares, strategy, change, finish)

    with runner.state.restored_afterwards(), torch.enable_grad():
        return list(run_on_ranks(job, len(shares)))


def _train(
    runner: StepRunner,
    shares: Sequence[Sequence[Any]],
    strategy: str | Strategy,
    change: Change,
    finish: Callable[[Step], None],
) -> None:
    module, ranks, window = uncompiled(runner.module), len(shares), len(shares[0])
    if strategy == "accum_model_parallel":
        strategy = ModelParallelAccumulationStrategy(data_parallel_size=ranks, tensor_parallel_size=1)
    arguments: dict[str, Any] = dict(runner.trainer)
    batches = shares[int(os.environ["RANK"])]
    if isinstance(strategy, ModelParallelStrategy) and arguments["precision"] == "64-true":  # Lightning has it in no other
        torch.set_default_dtype(torch.float64)
        module.double()
        arguments["precision"] = "32-true"
        batches = [apply_to_collection(batch, Tensor, lambda t: t.double() if t.is_floating_point() else t) for batch in batches]
    callbacks: list[Any] = []
    if is_of_this_package(strategy):
        callbacks.append(runner.callback(window))
    else:
        arguments["accumulate_grad_batches"] = window
    if isinstance(strategy, str):
        strategy = re.sub("_(spawn|fork|notebook)$", "", strategy)  # the processes are there
    noise = NoiseOfRows()
    runner.keep_to_one_step(change, noise)
    seed_everything(0)  # for what setup and configure_model make
    trainer = trainer_of_one_step(
        [*callbacks, _RankRecorder(ranks, finish)],
        strategy=strategy,
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=ranks // int(os.environ["LOCAL_WORLD_SIZE"]),
        plugins=[TorchElasticEnvironment()],
        **arguments,
    )
    if forks_or_spawns(trainer.strategy.launcher):
        raise MisconfiguredError(
            f"verify starts the ranks itself: pass a {type(strategy).__name__} without start_method, or the name of a strategy."
        )
    trainer.fit(runner.module, loader_of(batches))


class _RankRecorder(StepRecorder):
    """Hands over what a rank saw, once its step is taken."""

    def __init__(self, ranks: int, finish: Callable[[Step], None]) -> None:
        super().__init__()
        self._ranks, self._finish = ranks, finish

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        found = (trainer.distributed_sampler_kwargs or {}).get("num_replicas", 1)
        if found != self._ranks:
            raise MisconfiguredError(
                f"verify(devices={self._ranks}) gives each device its own batches, but {type(trainer.strategy).__name__} has"
                f" {found} data-parallel ranks. Pass an object of the strategy whose data_parallel_size is {self._ranks}."
            )
        super().on_train_start(trainer, pl_module)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        try:
            super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        except StepTakenError:
            self._finish(self.step)
