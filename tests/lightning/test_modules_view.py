"""What a module, its callbacks and its loggers see of a split batch is what they see of the whole one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from support import OPTIMIZERS, ddp, loader, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from lightning_accum import GradientAccumulation

CLASSES = 3


def batches(number: int = 5, size: int = 8) -> list[dict[str, Any]]:
    """Rows of a feature each, classes, some of them ignored, and names."""
    generator = torch.Generator().manual_seed(1)
    made = []
    for index in range(number):
        rows = size - index  # the last micro-batch of some is smaller
        target = torch.randint(0, CLASSES, (rows,), generator=generator)
        target[torch.rand(rows, generator=generator) < 0.3] = -100
        x = torch.randn(rows, 4, dtype=torch.float64, generator=generator)
        made.append({"x": x, "y": target, "name": [f"{index}-{row}" for row in range(rows)]})
    return made


class Memory(Logger):
    """A logger that remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.rows: list[tuple[int | None, dict[str, float]]] = []

    name = version = "memory"

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None: ...

    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        modules_own = {name: value for name, value in metrics.items() if not name.startswith("window/")}
        if modules_own:
            self.rows.append((step, modules_own))


class Seen(Callback):
    """Notes what the hooks of a batch get."""

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(("start", batch_idx, batch["name"], trainer.global_step))

    def on_train_batch_end(self, trainer: pl.Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append(("end", batch_idx, batch["name"], trainer.global_step))
        step = {name: value.item() for name, value in trainer.callback_metrics.items() if not name.startswith("window/")}
        self.seen.append(({name: value for name, value in outputs.items() if name != "name"}, step))


class Classifier(pl.LightningModule):
    """Logs in every way there is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(4, CLASSES).double()
        self.accuracy = MulticlassAccuracy(CLASSES, ignore_index=-100)
        self.of_epoch = MulticlassAccuracy(CLASSES, ignore_index=-100, average="macro")
        shared = {"f1": MulticlassF1Score(CLASSES, ignore_index=-100), "acc": MulticlassAccuracy(CLASSES, ignore_index=-100)}
        self.collection = MetricCollection(shared, prefix="all/")
        self.auroc = MulticlassAUROC(CLASSES, ignore_index=-100, thresholds=20)
        self.largest, self.mean, self.cat = MaxMetric(), MeanMetric(), CatMetric()
        self.indices: list[int] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> dict[str, Any]:
        self.indices.append(batch_idx)
        assert len(batch["name"]) == len(batch["x"])
        logits, y = self.net(batch["x"]), batch["y"]
        loss = F.cross_entropy(logits, y, ignore_index=-100)
        counted = y != -100
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        self.log("detached", loss.detach(), on_step=True, on_epoch=False)
        self.log("item", loss.item(), on_step=True, on_epoch=False)
        self.log("penalty", logits.square().mean(), on_step=True, on_epoch=True)  # over all rows, not only those that count
        self.log("samples", float(len(y)), reduce_fx="sum", on_step=True, on_epoch=True)
        self.log("highest", logits.max(), reduce_fx="max", on_step=True, on_epoch=True)
        self.log("lowest", logits.min(), reduce_fx="min", on_epoch=True)
        self.log("total", F.cross_entropy(logits, y, ignore_index=-100, reduction="sum"), on_step=True, on_epoch=True)
        self.log("of_rows", batch["x"][:, 0].mean(), batch_size=len(y), on_step=True, on_epoch=True)
        self.log("right", (logits.argmax(1) == y)[counted].double().mean(), on_step=True, on_epoch=False)
        self.log_dict({"a": loss * 2, "b": logits.abs().sum() / logits.numel()}, on_step=True, on_epoch=True)
        self.log("accuracy_value", self.accuracy(logits, y), on_step=False, on_epoch=True, batch_size=int(counted.sum()))
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        self.of_epoch.update(logits, y)
        self.log("of_epoch", self.of_epoch, on_step=False, on_epoch=True)
        self.collection(logits, y)
        self.log_dict(self.collection, on_step=True, on_epoch=True)
        self.auroc(logits, y)
        self.log("auroc", self.auroc, on_step=True, on_epoch=True)
        self.largest(logits.detach().abs())
        self.log("largest", self.largest, on_step=True, on_epoch=True)
        self.mean(loss.detach(), weight=counted.sum())
        self.log("mean", self.mean, on_step=True, on_epoch=True)
        self.cat.update(batch["x"][:, 0])
        return {"loss": loss, "logits": logits.detach(), "name": batch["name"], "scale": 2.0}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS["sgd"](self.parameters())


def run(module: pl.LightningModule, strategy: Any = "accum", **policy: Any) -> tuple[Seen, Memory, pl.Trainer]:
    seen, memory = Seen(), Memory()
    callbacks: list[Callback] = [seen]
    if policy:
        callbacks.append(GradientAccumulation(**policy))
    fit = trainer(strategy, callbacks=callbacks, logger=memory, log_every_n_steps=1, max_epochs=2)
    fit.fit(module, loader(batches()))
    return seen, memory, fit


def assert_same(found: Any, wanted: Any, where: str = "") -> None:
    """The same numbers but for rounding in what is logged, which Lightning keeps in float32."""
    if isinstance(wanted, dict):
        assert found.keys() == wanted.keys(), where
        for name in wanted:
            assert_same(found[name], wanted[name], f"{where}.{name}")
    elif isinstance(wanted, (list, tuple)):
        assert len(found) == len(wanted), where
        for index, (a, b) in enumerate(zip(found, wanted, strict=True)):
            assert_same(a, b, f"{where}[{index}]")
    elif isinstance(wanted, (Tensor, float)):
        torch.testing.assert_close(
            torch.as_tensor(found), torch.as_tensor(wanted), rtol=1e-6, atol=1e-7, msg=lambda m: f"{where}: {m}"
        )
    else:
        assert found == wanted, where


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("size", [1, 3, 4])
def test_logs_outputs_and_hooks_are_those_of_the_whole_batch(size: int) -> None:
    whole, split = Classifier(), Classifier()
    seen, memory, fit = run(whole, "auto")
    seen_split, memory_split, fit_split = run(split, micro_batch=size)
    assert_same(seen_split.seen, seen.seen, "hooks")
    assert_same(memory_split.rows, memory.rows, "logger")
    ours = {name: value for name, value in fit_split.callback_metrics.items() if not name.startswith("window/")}
    assert_same(ours, dict(fit.callback_metrics), "callback_metrics")
    assert_same(fit_split.progress_bar_metrics, fit.progress_bar_metrics, "progress bar")
    assert torch.equal(torch.as_tensor(split.cat.compute()), torch.as_tensor(whole.cat.compute()))  # every sample once, in order
    assert set(whole.indices) == set(split.indices)
    assert fit.global_step == fit_split.global_step == 10
    assert fit.progress_bar_metrics  # the comparison is not of nothing
    assert len(memory.rows) == 12


def test_metrics_hold_everything_again_after_each_batch() -> None:
    class Watching(Classifier):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.running.append([self.accuracy.compute(), self.collection["f1"].compute(), self.mean.compute()])
            self.counts.append((self.accuracy.update_called, self.mean.update_called))

    runs = []
    for strategy, policy in [("auto", {}), ("accum", {"micro_batch": 3})]:
        module = Watching()
        module.running, module.counts = [], []
        run(module, strategy, **policy)
        runs.append((module.running, module.counts))
    assert_same(runs[1], runs[0])


def test_values_of_sorted_rows_come_back_in_the_order_of_the_batch() -> None:
    class Rows(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.ones((), dtype=torch.float64))
            self.outputs: list[Any] = []

        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
            mask = batch["attention_mask"]
            lengths = mask.sum(1).double() * self.w
            self.widths.append(mask.shape[1])
            loss = (lengths[:, None] * mask).sum() / mask.sum()
            return {"loss": loss, "lengths": lengths, "hidden": mask * self.w, "text": "x"}

        widths: list[int] = []

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.outputs.append(outputs)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.0)

    lengths = torch.tensor([3, 1, 6, 2, 5, 4])
    mask = (torch.arange(6) < lengths[:, None]).long()
    module = Rows()
    fit = trainer(callbacks=[GradientAccumulation(micro_batch=2)])
    fit.fit(module, loader([{"attention_mask": mask}]))
    (outputs,) = module.outputs
    assert module.widths[-3:] == [6, 4, 2]
    assert torch.equal(outputs["lengths"], lengths.double())
    assert not outputs["lengths"].requires_grad
    assert [tuple(hidden.shape) for hidden in outputs["hidden"]] == [(2, 6), (2, 4), (2, 2)]  # cannot be put together
    assert outputs["text"] == ["x", "x", "x"]
    expected = (lengths.double().square().sum() / lengths.sum()).item()
    assert outputs["loss"].item() == pytest.approx(expected, rel=1e-12)


def test_hooks_of_backward_run_once_for_each_micro_batch() -> None:
    class Hooks(Callback):
        calls: list[str] = []

        def on_before_backward(self, trainer: pl.Trainer, module: Any, loss: Tensor) -> None:
            self.calls.append("backward")

        def on_before_zero_grad(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
            self.calls.append("zero_grad")

        def on_before_optimizer_step(self, trainer: pl.Trainer, module: Any, optimizer: Any) -> None:
            self.calls.append("step")

    module = Classifier()
    hooks = Hooks()
    fit = trainer(callbacks=[GradientAccumulation(micro_batch=4), hooks])
    fit.fit(module, loader(batches(2)))
    assert hooks.calls == ["zero_grad", "backward", "backward", "step"] * 2


@pytest.mark.parametrize("heard", [False, True])
def test_micro_batches_without_a_loss_weigh_nothing(heard: bool) -> None:
    class Sometimes(Classifier):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
            output = super().training_step(batch, batch_idx)
            return None if (batch["y"] == -100).all() else output["loss"]

    class Listens(Callback):
        def on_after_backward(self, trainer: pl.Trainer, module: Any) -> None: ...

    data = batches(3)
    data[0]["y"][:4] = -100  # the first micro-batch has nothing to train on
    whole, split = Sometimes(), Sometimes()
    trainer("auto").fit(whole, loader(data))
    extra: Sequence[Callback] = [Listens()] if heard else []
    trainer(callbacks=[GradientAccumulation(micro_batch=4), *extra]).fit(split, loader(data))
    for found, wanted in zip(split.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def test_logs_over_two_ranks_are_reduced_once_a_batch() -> None:
    class Ranked(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))
            self.register_buffer("seen", torch.zeros(2, dtype=torch.float64))

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            loss = ((self.w + 1) * batch).mean()
            self.log("loss", loss, on_step=True, on_epoch=True, sync_dist=True)
            return loss

        def train_dataloader(self) -> Any:  # three micro-batches on one rank, one on the other
            share = [[1.0, 2, 3, 4, 5], [9.0, 9]][self.trainer.global_rank]
            return loader([torch.tensor(share, dtype=torch.float64)])

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen[0] = self.trainer.callback_metrics["loss_step"]

        def on_train_end(self) -> None:
            self.seen[1] = self.trainer.callback_metrics["loss_epoch"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=1.0)

    module, lightnings = Ranked(), Ranked()
    trainer(ddp(), devices=2, callbacks=[GradientAccumulation(micro_batch=2)]).fit(module)
    trainer("ddp_fork", devices=2).fit(lightnings)
    assert module.w.item() == pytest.approx(-33 / 7, rel=1e-12)
    assert module.seen[0].item() == pytest.approx((3 + 9) / 2)  # the mean of both ranks
    assert module.seen[1].item() == pytest.approx(33 / 7, rel=1e-12)
    # Lightning averages the sample counts 5 and 2 over the ranks as whole numbers, to 3 instead of 3.5
    assert lightnings.seen.tolist() == pytest.approx([(3 + 9) / 2, (33 / 2) / 3], rel=1e-12)
