"""What a module, its callbacks and its loggers see of a split batch is what plain Lightning shows of the whole one; and memory."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from alive import SavedBytes
from lightning.pytorch.callbacks import Callback, LambdaCallback
from support import Scalar, Toy, csv_logger, ddp, fit, labelled, logged, trainer, warned, x
from torch import Tensor, nn
from torch.nn import functional as F
from torchmetrics import CatMetric, MaxMetric, MeanMetric, MeanSquaredError, MetricCollection, MetricTracker, PearsonCorrCoef
from torchmetrics.aggregation import RunningMean
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score, MulticlassRecall
from torchmetrics.wrappers import ClasswiseWrapper

from lightning_accum import GradientAccumulation, Tokens

CLASSES = 3


def batches(number: int = 5, size: int = 8) -> list[dict[str, Any]]:
    """Rows of features each, classes, some of them ignored, and names; the last micro-batch of some is smaller."""
    made = labelled(*range(size, size - number, -1), ignored=0.3)
    return [{"x": x, "y": y.clamp(max=CLASSES - 1), "name": [f"{len(x)}-{row}" for row in range(len(x))]} for x, y in made]


class Classifier(Toy):  # makes and logs whatever ``tell`` says of its logits, labels and loss
    def __init__(self, tell: Callable[..., Any], metrics: dict[str, Any] | None = None) -> None:
        super().__init__(lambda net, batch: F.cross_entropy(net(batch["x"]), batch["y"]), net=lambda: nn.Linear(4, CLASSES))
        self.tell, self.metrics = tell, nn.ModuleDict(metrics or {})
        self.indices: list[int] = []
        self.seen: list[dict[str, float]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Any:
        self.indices.append(batch_idx)
        assert len(batch["name"]) == len(batch["x"])
        logits = self.net(batch["x"])
        loss = F.cross_entropy(logits, batch["y"], ignore_index=-100)
        return self.tell(self, logits, batch["y"], loss, batch) or loss

    def look(self, *_: Any) -> None:
        seen = self.trainer.callback_metrics.items()
        self.seen.append({name: value.item() for name, value in seen if not name.startswith("window/")})

    on_train_batch_end = on_train_end = look


BOTH = {"on_step": True, "on_epoch": True}


def in_every_way(self: Any, logits: Tensor, y: Tensor, loss: Tensor, batch: Any) -> Any:
    counted, metrics = y != -100, self.metrics
    self.log("loss", loss, prog_bar=True, **BOTH)
    self.log("detached", loss.detach(), on_step=True, on_epoch=False)
    self.log("item", loss.item(), on_step=True, on_epoch=False)
    self.log("penalty", logits.square().mean(), **BOTH)  # over all rows, not only those that count
    self.log("samples", float(len(y)), reduce_fx="sum", **BOTH)
    self.log("highest", logits.max(), reduce_fx="max", **BOTH)
    self.log("lowest", logits.min(), reduce_fx="min", on_epoch=True)
    self.log("total", F.cross_entropy(logits, y, ignore_index=-100, reduction="sum"), **BOTH)
    self.log("of_rows", batch["x"][:, 0].mean(), batch_size=len(y), **BOTH)
    self.log("right", (logits.argmax(1) == y)[counted].double().mean(), on_step=True, on_epoch=False)
    self.log("positional", loss, False, None, False, True)
    self.log_dict({"a": loss * 2, "b": logits.abs().sum() / logits.numel()}, **BOTH)
    accuracy = metrics["accuracy"](logits, y)
    self.log("accuracy_value", accuracy, on_step=False, on_epoch=True, batch_size=int(counted.sum()))
    self.log("accuracy", metrics["accuracy"], **BOTH)
    metrics["of_epoch"].update(logits, y)
    self.log("of_epoch", metrics["of_epoch"], on_step=False, on_epoch=True)
    metrics["collection"](logits, y)
    self.log_dict(metrics["collection"], **BOTH)
    metrics["auroc"](logits.softmax(-1), y)
    self.log("auroc", metrics["auroc"], **BOTH)
    metrics["largest"](logits.detach().abs())
    self.log("largest", metrics["largest"], **BOTH)
    metrics["mean"](loss.detach(), weight=counted.sum())
    self.log("mean", metrics["mean"], **BOTH)
    metrics["cat"].update(batch["x"][:, 0])
    self.log("rmse", metrics["rmse"](logits, F.one_hot(y.clamp(min=0), CLASSES).double()), **BOTH)  # with a graph
    self.log_dict(metrics["classwise"](logits, y), **BOTH)
    self.log_dict(metrics["named"](logits, y), **BOTH)
    for scale in (1.0, 2.0, 4.0):
        self.log("often", scale * loss, **BOTH)
        self.log("often_in_step", (scale * loss).item(), on_step=True, on_epoch=False)
        self.log("often_summed", scale * F.cross_entropy(logits.detach(), y, reduction="sum"), reduce_fx="sum", **BOTH)
    for name, values in (("a_metric", logits), ("under_two_names", -logits)):
        self.log(name, metrics["twice"](values.argmax(1), y), **BOTH)
    self.log("tracked", metrics["tracker"](logits, y), **BOTH)
    self.log("data", loss.data, on_step=True, on_epoch=False, batch_size=len(y))
    metrics["correlation"](logits[:, 0].detach(), y.double())
    self.log("correlation", metrics["correlation"], on_step=False, on_epoch=True)
    return {"loss": loss, "logits": logits.detach(), "name": batch["name"], "scale": 2.0}


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


@pytest.mark.some_cases(1, 1)
@pytest.mark.parametrize("size", [3, 1, 4])
def test_logs_outputs_metrics_and_hooks_are_those_of_the_whole_batch(size: int) -> None:
    class Seen(Callback):  # notes what the hooks of a batch get, and what metrics hold after it
        def __init__(self) -> None:
            self.seen: list[Any] = []

        def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(("start", batch_idx, batch["name"], trainer.global_step))

        def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.seen.append(("end", batch_idx, batch["name"], trainer.global_step))
            self.seen.append({name: value for name, value in outputs.items() if name != "name"})
            held = [module.metrics["accuracy"], module.metrics["mean"]]
            self.seen.append([(metric.compute(), metric.update_called) for metric in held])

    class Tracking(MetricTracker):  # starts with one metric
        def __init__(self) -> None:
            super().__init__(MulticlassF1Score(CLASSES, ignore_index=-100))
            self.increment()

    class NamedMetric(MulticlassF1Score):  # computes several values, by name
        def compute(self) -> Any:
            value = super().compute()
            return {"f1": value, "square": value.square()}

    def every_metric() -> dict[str, Any]:
        shared = {"f1": MulticlassF1Score(CLASSES, ignore_index=-100), "acc": MulticlassAccuracy(CLASSES, ignore_index=-100)}
        return {
            "accuracy": MulticlassAccuracy(CLASSES, ignore_index=-100),
            "of_epoch": MulticlassAccuracy(CLASSES, ignore_index=-100, average="macro"),
            "collection": MetricCollection(shared, prefix="all/"),
            "auroc": MulticlassAUROC(CLASSES, ignore_index=-100, thresholds=20),
            "classwise": ClasswiseWrapper(MulticlassRecall(CLASSES, average=None, ignore_index=-100)),
            "named": NamedMetric(CLASSES, ignore_index=-100),
            "twice": MulticlassAccuracy(CLASSES, ignore_index=-100),
            **{"largest": MaxMetric(), "mean": MeanMetric(), "cat": CatMetric(), "tracker": Tracking()},
            **{"rmse": MeanSquaredError(squared=False), "correlation": PearsonCorrCoef()},
        }

    runs = []
    for policy in ([], [GradientAccumulation(micro_batch=size)]):
        module, seen = Classifier(in_every_way, every_metric()), Seen()
        strategy = "accum" if policy else "auto"
        run = fit(module, batches(), seen, *policy, strategy=strategy, **csv_logger(), max_epochs=2)
        rows = [{k: v for k, v in row.items() if not k.startswith("window/")} for row in logged()]
        shown = (seen.seen, [row for row in rows if row.keys() - {"step", "epoch"}], module.seen, dict(run.progress_bar_metrics))
        runs.append((*shown, sorted(set(module.indices)), module.metrics["cat"].compute(), run.global_step))
    assert_same(runs[1], runs[0])
    assert list(runs[1][2][-1]) == list(runs[0][2][-1])  # in the order of logging
    assert len(runs[0][1]) == 12
    assert runs[0][3]


def seen_by(tell: Any, metric: Any, micro_batch: int | None, *callbacks: Callback) -> list[dict[str, float]]:
    module = Classifier(tell, {"it": metric})
    policy = [] if micro_batch is None else [GradientAccumulation(micro_batch=micro_batch)]
    fit(module, batches(4), *policy, *callbacks, strategy="accum" if policy else "auto", max_epochs=2)
    return module.seen


def test_a_stored_loss_that_a_hook_logs_after_backward_is_that_of_the_whole_batch() -> None:
    def stores(self: Any, logits: Tensor, y: Tensor, loss: Tensor, batch: Any) -> Tensor:
        self.stored = F.cross_entropy(logits, y.clamp(min=0)) / 2 + 10 * F.mse_loss(logits, torch.zeros_like(logits))
        return self.stored

    class Logs(Callback):
        def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            pl_module.log("stored", pl_module.stored)

        def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *args: Any) -> None:
            pl_module.log("at_end", outputs["loss"])

    whole, split = (seen_by(stores, MeanMetric(), size, Logs())[-1] for size in (None, 4))
    assert set(whole) == {"stored", "at_end"}
    assert_same(split, whole)


def running(self: Any, logits: Tensor, y: Tensor, *_: Any) -> None:
    self.metrics["it"](y.double().mean())
    self.log("it", self.metrics["it"], **BOTH)


def correlated(self: Any, logits: Tensor, y: Tensor, *_: Any) -> None:
    self.log("it", self.metrics["it"](logits[:, 0].detach(), y.double()), **BOTH)


@pytest.mark.parametrize(("tell", "make"), [(running, lambda: RunningMean(window=6)), (correlated, PearsonCorrCoef)])
def test_a_metric_that_cannot_be_put_together_is_warned_of_once_by_its_name(tell: Any, make: Any) -> None:
    with warned() as told:
        seen = seen_by(tell, make(), 4)
    assert len([message for message in told if type(make()).__name__ in message]) == 1
    assert "it_step" not in seen[-1] or tell is correlated


def test_nothing_stays_of_a_name_that_only_a_failed_attempt_logged() -> None:
    def tell(self: Any, logits: Tensor, y: Tensor, *_: Any) -> None:
        self.log("size", float(len(y)), reduce_fx="max")
        if self.seen and len(y) > 5:  # in the second batch
            self.log("large", 1.0, on_epoch=True)
            raise torch.OutOfMemoryError("CUDA out of memory.")

    module = Classifier(tell)
    fit(module, batches(2), GradientAccumulation(micro_batch="auto"))
    assert set(module.seen[-1]) == {"size"}


def test_outputs_of_sorted_rows_come_back_in_the_order_of_the_batch() -> None:
    class Rows(Scalar):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> dict[str, Any]:
            mask = batch["attention_mask"]
            lengths = (1 + self.w) * mask.sum(1).double()
            loss = (lengths[:, None] * mask).sum() / mask.sum()
            return {"loss": loss, "lengths": lengths, "hidden": mask * 1.0, "text": "x"}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.outputs = outputs

    lengths, module = torch.tensor([3, 1, 6, 2, 5, 4]), Rows()
    fit(module, [{"attention_mask": (torch.arange(6) < lengths[:, None]).long()}], GradientAccumulation(micro_batch=2))
    outputs = module.outputs
    assert torch.equal(outputs["lengths"], lengths.double())
    assert not outputs["lengths"].requires_grad
    assert [tuple(hidden.shape) for hidden in outputs["hidden"]] == [(2, 6), (2, 4), (2, 2)]  # cannot be put together
    assert outputs["text"] == ["x", "x", "x"]
    assert outputs["loss"].item() == pytest.approx((lengths.double().square().sum() / lengths.sum()).item(), rel=1e-12)


class OfRanks(Scalar):  # logs the mean of its numbers, and the numbers of each class that it has, in the order of the classes
    def __init__(self) -> None:
        super().__init__(by_rank=[[x(0, 0, 2, 2, 1, 1)] * 2, [x(2, 0)] * 2], lr=0.0)  # three micro-batches, and one
        self.register_buffer("seen", torch.zeros(2, 4, dtype=torch.float64))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = ((self.w + 1) * batch).mean()
        self.log("loss", loss.detach(), sync_dist=True, batch_size=4, **BOTH)
        for value in range(CLASSES):
            if rows := int((batch == value).sum()) or self.trainer.global_rank:
                self.log(f"{value}", torch.tensor(float(value)), sync_dist=True, batch_size=rows, **BOTH)
        return loss

    def on_train_end(self) -> None:
        for row, when in enumerate(("step", "epoch")):
            for column, name in enumerate(("loss", "0", "1", "2")):
                self.seen[row, column] = self.trainer.callback_metrics[f"{name}_{when}"]


@pytest.mark.timeout(60)
def test_logs_over_two_ranks_are_reduced_once_a_batch_in_one_order() -> None:
    split, whole = OfRanks(), OfRanks()
    trainer(ddp(), devices=2, callbacks=[GradientAccumulation(micro_batch=2)]).fit(split)
    trainer("ddp_fork", devices=2).fit(whole)
    torch.testing.assert_close(split.seen, whole.seen)
    assert split.seen[0].tolist() == [1.0, 0.0, 1.0, 2.0]


# A graph can outlive its backward where something branches off that the loss does not need: so the module here has branches.

SIZE, MANY, LENGTH, FEATURES = 4, 16, 6, 32


def entropy(logits: Tensor) -> Tensor:  # saves tensors of its own, which the backward of the loss does not free
    probabilities = logits.softmax(-1)
    return -(probabilities * probabilities.log()).sum(-1)


def logs(module: pl.LightningModule, logits: Tensor, loss: Tensor) -> Any:
    module.log("loss", loss, prog_bar=True)
    module.log("entropy", entropy(logits).mean(), on_step=True, on_epoch=True)
    module.log_dict({"most": entropy(logits).max(), "squares": logits.square().mean()}, reduce_fx="max")
    return {"loss": loss, "entropy": entropy(logits).mean()}


def returns_rows(module: pl.LightningModule, logits: Tensor, loss: Tensor) -> Any:
    return {"loss": loss, "logits": logits, "entropy": entropy(logits), "parts": [entropy(logits)], "more": {"x": entropy(logits)}}


TOLD: dict[str, Callable[..., Any]] = {"nothing": lambda module, logits, loss: loss, "logs": logs, "rows": returns_rows}


class Tagger(Toy):  # labels tokens; ``tell`` says what training_step makes of its logits and loss
    def __init__(self, tell: Callable[..., Any], capacity: int = MANY * SIZE) -> None:
        make = [nn.Embedding(11, FEATURES), nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.Linear(FEATURES, 11)]
        super().__init__(lambda net, batch: None, net=lambda: nn.Sequential(*make))
        self.tell, self.capacity = tell, capacity
        self.rows: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        inputs = batch["input_ids"]
        if len(inputs) > self.capacity:
            raise torch.OutOfMemoryError(f"{len(inputs)} rows do not fit")
        self.rows.append(len(inputs))
        logits = self.net(inputs)
        return self.tell(self, logits, F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))


def peak(module: Tagger, rows: int, *callbacks: pl.Callback) -> int:
    generator = torch.Generator().manual_seed(1)
    names = ("input_ids", "labels")
    batches = [{name: torch.randint(11, (rows, LENGTH), generator=generator) for name in names} for _ in range(3)]
    with SavedBytes() as saved:
        saved.leave_out(tensor for batch in batches for tensor in batch.values())  # of which micro-batches are views
        fit(module, batches, *callbacks, strategy="accum" if callbacks else "auto")
    return saved.peak


@pytest.mark.some_cases(5, 6)
@pytest.mark.parametrize("size", [SIZE, Tokens(SIZE * LENGTH), "auto"])
@pytest.mark.parametrize("callbacks", [[], [LambdaCallback(on_after_backward=lambda *_: None)]], ids=["", "heard"])
@pytest.mark.parametrize("tell", TOLD)
def test_the_peak_of_many_micro_batches_is_that_of_one(tell: str, callbacks: list[pl.Callback], size: Any) -> None:
    # equal to the byte: micro-batches of one size save the same tensors
    one, module = peak(Tagger(TOLD[tell]), SIZE), Tagger(TOLD[tell], capacity=SIZE)
    assert peak(module, MANY * SIZE, GradientAccumulation(micro_batch=size, check=False), *callbacks) == one > 0
    assert module.rows == [SIZE] * MANY * 3
