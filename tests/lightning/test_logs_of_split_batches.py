"""What is logged of a split batch is what plain Lightning logs of the whole one, also where that is not one mean of one name."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import OPTIMIZERS, ddp, loader, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import MeanSquaredError, Metric, MetricTracker, PearsonCorrCoef
from torchmetrics.aggregation import MeanMetric, RunningMean
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassRecall
from torchmetrics.wrappers import ClasswiseWrapper

from lightning_accum import GradientAccumulation

CLASSES = 3
Step = Callable[[pl.LightningModule, Metric, Tensor, Tensor], None]


def batches(number: int = 4, rows: int = 10, seed: int = 1) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(rows, CLASSES, dtype=torch.float64, generator=generator),
            torch.randint(0, CLASSES, (rows,), generator=generator),
        )
        for _ in range(number)
    ]


class Logging(pl.LightningModule):
    """Logs as ``step`` says, and remembers what callbacks can see after each batch and each epoch."""

    def __init__(self, metric: Any, step: Step) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.metric, self.step = nn.Linear(CLASSES, CLASSES).double(), metric, step
        self.seen: list[dict[str, float]] = []

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        self.step(self, self.metric, logits, batch[1])
        return F.cross_entropy(logits, batch[1])

    def look(self) -> None:
        seen = self.trainer.callback_metrics.items()
        self.seen.append({name: value.item() for name, value in seen if not name.startswith("window/")})

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.look()

    def on_train_end(self) -> None:
        self.look()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS["sgd"](self.parameters())


def seen_by(metric: Any, step: Step, micro_batch: int | None) -> list[dict[str, float]]:
    module = Logging(metric, step)
    callbacks = [] if micro_batch is None else [GradientAccumulation(micro_batch=micro_batch)]
    trainer("accum" if callbacks else "auto", callbacks=callbacks, max_epochs=2).fit(module, loader(batches()))
    return module.seen


def value_with_graph(module: pl.LightningModule, metric: Metric, logits: Tensor, target: Tensor) -> None:
    module.log("rmse", metric(logits, F.one_hot(target, CLASSES).double()), on_step=True, on_epoch=True)


def only_updated(module: pl.LightningModule, metric: Metric, logits: Tensor, target: Tensor) -> None:
    metric.update(logits, target)
    module.log("accuracy", metric, on_step=True, on_epoch=True)


def of_each_class(module: pl.LightningModule, metric: Metric, logits: Tensor, target: Tensor) -> None:
    module.log_dict(metric(logits, target), on_step=True, on_epoch=True)


def several_times(module: pl.LightningModule, metric: Metric, logits: Tensor, target: Tensor) -> None:
    for scale in (1.0, 2.0, 4.0):
        loss = F.cross_entropy(logits * scale, target)
        module.log("loss", loss, on_step=True, on_epoch=True)
        module.log("step", loss.item(), on_step=True, on_epoch=False)
        module.log("sum", loss.detach() * len(target), reduce_fx="sum", on_step=True, on_epoch=True)


def one_metric_under_two_names(module: pl.LightningModule, metric: Metric, logits: Tensor, target: Tensor) -> None:
    for name, values in (("a", logits), ("b", -logits)):
        module.log(name, metric(values.argmax(1), target), on_step=True, on_epoch=True)


class NamedMetric(MulticlassF1Score):
    """Computes several values, by name."""

    def compute(self) -> Any:
        value = super().compute()
        return {"f1": value, "square": value.square()}


def tracked(module: pl.LightningModule, metric: Any, logits: Tensor, target: Tensor) -> None:
    module.log("f1", metric(logits, target), on_step=True, on_epoch=True)


class Tracking(MetricTracker):
    """Starts with one metric."""

    def __init__(self) -> None:
        super().__init__(MulticlassF1Score(CLASSES))
        self.increment()


@pytest.mark.some_cases(5)
@pytest.mark.parametrize(
    ("make", "step"),
    [
        (lambda: MeanSquaredError(squared=False), value_with_graph),
        (lambda: MulticlassAccuracy(CLASSES), only_updated),
        (lambda: ClasswiseWrapper(MulticlassRecall(CLASSES, average=None)), of_each_class),
        (lambda: NamedMetric(CLASSES), of_each_class),
        (lambda: None, several_times),
        (lambda: MulticlassAccuracy(CLASSES, average="micro"), one_metric_under_two_names),
        (Tracking, tracked),
    ],
    ids=["graph", "update", "classwise", "dict", "several times", "two names", "tracker"],
)
@pytest.mark.parametrize("micro_batch", [1, 4])
def test_logs_are_those_of_the_whole_batch(make: Callable[[], Any], step: Step, micro_batch: int) -> None:
    whole, split = seen_by(make(), step, None), seen_by(make(), step, micro_batch)
    assert len(whole) == len(split) == 9
    for found, wanted in zip(split, whole, strict=True):
        assert found == pytest.approx(wanted, rel=1e-6, abs=1e-7)  # Lightning keeps what is logged in float32
    assert list(split[-1]) == list(whole[-1])  # in the order of logging


class StoredLoss(pl.Callback):
    """Logs what training_step has left, when its backward has freed the graph."""

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pl_module.log("stored", pl_module.stored)

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any) -> None:
        pl_module.log("at_end", outputs["loss"])


class LogsDetached(Logging):
    """Logs its loss without the graph, as many modules do, and a loss over ignored labels: its weights are no batch sizes."""

    def __init__(self, reduction: str, given: bool) -> None:
        super().__init__(None, value_with_graph)
        self.reduction, self.given = reduction, given

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        target = batch[1].masked_fill(batch[0][:, 0] > 0.3, -100)
        loss = F.cross_entropy(self.net(batch[0]), target, reduction=self.reduction)
        size = {"batch_size": len(target)} if self.given else {}
        self.log("train_loss", loss.detach(), on_step=True, on_epoch=False, **size)
        self.log("other", batch[0].mean(), on_step=True, on_epoch=False, **size)
        self.log("kept", loss.data, on_step=True, on_epoch=False, **size)
        return loss


@pytest.mark.parametrize("callback", [None, StoredLoss])
@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_a_loss_that_is_logged_without_its_graph_is_weighed_as_the_loss(reduction: str, given: bool, callback: Any) -> None:
    seen = []
    for micro_batch in (None, 3):
        module = LogsDetached(reduction, given)
        callbacks: list[Any] = [] if micro_batch is None else [GradientAccumulation(micro_batch=micro_batch)]
        listening = [] if callback is None else [callback()]
        module.stored = torch.zeros(())
        trainer("accum" if callbacks else "auto", callbacks=[*callbacks, *listening]).fit(module, loader(batches()))
        seen.append(module.seen)
    for found, wanted in zip(*seen, strict=True):
        for name in ("train_loss", "kept", *(["other"] if given else [])):
            assert found[name] == pytest.approx(wanted[name], rel=1e-6)


class StoresLoss(Logging):
    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        self.stored = F.cross_entropy(logits, batch[1]) / 2 + 10 * F.mse_loss(logits, torch.zeros_like(logits))
        return self.stored


def test_a_stored_loss_that_a_hook_logs_after_backward_is_that_of_the_whole_batch() -> None:
    logged = []
    for callbacks in ([], [GradientAccumulation(micro_batch=4)]):
        module = StoresLoss(None, value_with_graph)
        trainer("accum" if callbacks else "auto", callbacks=[*callbacks, StoredLoss()]).fit(module, loader(batches()))
        logged.append(module.seen[-1])
    assert set(logged[1]) == {"stored", "at_end"}
    assert logged[1] == pytest.approx(logged[0], rel=1e-6)


def test_a_running_metric_keeps_what_it_holds_from_batch_to_batch() -> None:
    def step(module: pl.LightningModule, metric: Metric, logits: Tensor, target: Tensor) -> None:
        metric(target.double().mean())
        module.log("running", metric, on_step=True, on_epoch=True)

    metric = RunningMean(window=6)
    with pytest.warns(UserWarning, match=r"shows a RunningMean.*each micro-batch is an update"):
        split = seen_by(metric, step, 5)
    targets = torch.stack([target for _, target in batches()]).double()
    last_six = targets.reshape(-1, 5).mean(1)[-6:].mean().item()  # two micro-batches to a batch
    assert split[-1]["running_epoch"] == pytest.approx(last_six, rel=1e-6)
    assert "running_step" not in split[-1]


def test_a_metric_that_cannot_be_put_together_says_so_once() -> None:
    def step(module: pl.LightningModule, metric: Metric, logits: Tensor, target: Tensor) -> None:
        module.log("r", metric(logits[:, 0].detach(), target.double()), on_step=True, on_epoch=True)

    def of_epoch(module: pl.LightningModule, metric: Metric, logits: Tensor, target: Tensor) -> None:
        metric(logits[:, 0].detach(), target.double())
        module.log("r", metric, on_step=False, on_epoch=True)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        seen_by(PearsonCorrCoef(), step, 5)
    assert len([warning for warning in caught if "'training_step.r' shows a PearsonCorrCoef" in str(warning.message)]) == 1
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*cannot be put together.*")
        split = seen_by(PearsonCorrCoef(), of_epoch, 5)
        seen_by(MeanMetric(), lambda module, metric, logits, target: module.log("m", metric(logits.detach())), 5)
    assert split[-1]["r"] == pytest.approx(seen_by(PearsonCorrCoef(), of_epoch, None)[-1]["r"], rel=1e-6)


def test_nothing_stays_of_a_name_that_only_a_failed_attempt_logged() -> None:
    def step(module: pl.LightningModule, metric: Metric, logits: Tensor, target: Tensor) -> None:
        module.log("size", float(len(target)), reduce_fx="max")
        if module.seen and len(target) > 5:  # in the second batch
            module.log("large", 1.0, on_epoch=True)
            raise torch.OutOfMemoryError("CUDA out of memory.")

    module = Logging(None, step)
    fit = trainer(callbacks=[GradientAccumulation(micro_batch="auto")])
    fit.fit(module, loader(batches(2)))
    assert "size" in module.seen[-1]
    assert "large" not in module.seen[-1]


def test_a_value_that_lightning_refuses_is_refused_where_it_is_logged() -> None:
    def step(module: pl.LightningModule, metric: Metric, logits: Tensor, target: Tensor) -> None:
        with pytest.raises(ValueError, match="`list` values cannot be logged"):
            module.log("sizes", [1.0, 2.0])

    assert len(seen_by(None, step, 4)) == 9


def positional(module: pl.LightningModule, metric: Metric, logits: Tensor, target: Tensor) -> None:
    module.log("loss", F.cross_entropy(logits, target), False, None, False, True)


def test_arguments_of_log_may_be_positional() -> None:
    assert seen_by(None, positional, 4)[-1] == pytest.approx(seen_by(None, positional, None)[-1], rel=1e-6)


@pytest.mark.timeout(60)
def test_ranks_pair_their_reductions_whichever_name_comes_first() -> None:
    targets = [torch.tensor([0, 0, 2, 2, 1, 1, 0, 0]), torch.tensor([0, 1, 2, 0, 1, 2, 0, 1])]

    class OfClasses(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Linear(1, CLASSES)
            self.register_buffer("logged", torch.zeros(2, CLASSES))

        def train_dataloader(self) -> Any:
            return loader([(torch.ones(8, 1), targets[self.trainer.global_rank])] * 2)

        def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
            for c in range(CLASSES):
                if rows := int((batch[1] == c).sum()):
                    self.log(f"{c}", torch.tensor(float(c)), sync_dist=True, on_step=True, on_epoch=True, batch_size=rows)
            return F.cross_entropy(self.net(batch[0]), batch[1])

        def on_train_end(self) -> None:
            for row, when in enumerate(("step", "epoch")):
                for c in range(CLASSES):
                    self.logged[row, c] = self.trainer.callback_metrics[f"{c}_{when}"]

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    split, whole = OfClasses(), OfClasses()
    trainer(ddp(), devices=2, callbacks=[GradientAccumulation(micro_batch=4)]).fit(split)
    trainer("ddp_fork", devices=2).fit(whole)
    torch.testing.assert_close(split.logged, whole.logged)
    assert split.logged[0].tolist() == [0.0, 1.0, 2.0]
