"""A training in new processes that goes on from checkpoints, against one without any."""

import multiprocessing
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import Callback
from sharded import ShardedLanguage, whole_parameters
from support import SaveAfter, StatefulLoader, pad, relative_error, sentences, trainer

from lightning_accum import GradientAccumulation, ModelParallelAccumulationStrategy

ROWS = sentences(72)  # in an epoch, over all ranks: 18 loader batches of 4


class Module(ShardedLanguage):  # in single precision, where sums in another order would show, with a scheduler
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


class Record(Callback):  # writes down all that a training ends with
    def __init__(self) -> None:
        self.losses: dict[int, float] = {}

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        if "window/optimizer_steps" in trainer.callback_metrics:
            self.losses[int(trainer.callback_metrics["window/optimizer_steps"])] = float(trainer.callback_metrics["window/loss"])

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.on_train_batch_end(trainer)  # a window that ended with training
        parameters = whole_parameters(pl_module)
        if trainer.global_rank == 0:
            schedulers = [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs]
            weight = float(trainer.callback_metrics["window/total_weight"])
            record = {"losses": self.losses, "parameters": parameters, "steps": trainer.global_step, "weight": weight}
            if not isinstance(trainer.strategy, ModelParallelAccumulationStrategy):
                record["optimizers"] = [optimizer.state_dict() for optimizer in trainer.optimizers]
            torch.save({**record, "schedulers": schedulers}, "record.pt")


def train(
    make: Callable[[], Any], ranks: int, saves: Sequence[int] = (), goes_on_after: int | None = None, **policy: Any
) -> dict[str, Any]:  # train for an epoch in new processes: in single precision on one rank, in double over several
    Path("record.pt").unlink(missing_ok=True)
    module = policy.pop("module", Module)().to(torch.float32 if ranks == 1 else torch.float64)

    def fit() -> None:
        callbacks = [GradientAccumulation(**policy), SaveAfter(*saves, path="after{}.ckpt"), Record()]
        path = None if goes_on_after is None else f"after{goes_on_after}.ckpt"
        trainer(make(), devices=ranks, callbacks=callbacks).fit(module, ckpt_path=path)

    if ranks > 1:  # forks by itself
        fit()
    else:
        process = multiprocessing.get_context("fork").Process(target=fit)
        process.start()
        process.join(120)
        assert process.exitcode == 0
    return torch.load("record.pt", weights_only=False)


def assert_goes_on(make: Callable[[], Any], ranks: int, stops: Sequence[int], **policy: Any) -> None:
    """What saves checkpoints, or goes on from one, is a training without any: to the bit on one rank, else to rounding."""
    expected = train(make, ranks, **policy)
    for after in (None, *stops):
        found = train(make, ranks, () if after else stops, after, **policy)
        begun = min(found["losses"])
        losses = {step: loss for step, loss in expected["losses"].items() if step >= begun}
        wanted = {**expected, "losses": losses}
        if ranks == 1:
            torch.testing.assert_close(found, wanted, rtol=0, atol=0)
        of_losses = [[torch.tensor(list(record["losses"].values()), dtype=torch.float64)] for record in (found, wanted)]
        assert (found["steps"], found["weight"]) == (wanted["steps"], wanted["weight"])
        assert relative_error(*of_losses) < 1e-12
        assert relative_error(found["parameters"].values(), wanted["parameters"].values()) < 1e-12
