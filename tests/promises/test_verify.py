"""`verify` finds equality on modules of others, unchanged, names what breaks it, and leaves the user's own as they were."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
import torchmetrics
from harness import Unsized
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from lightning.pytorch.demos.transformer import LightningTransformer
from support import OPTIMIZERS, Hide, Language, Scalar, WrapsAnother, command, fit, loader, pad, sentences, x
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, TensorDataset

from lightning_accum import AccumulationError, SampleCount, Tokens, verify

EXACT = 1e-12


def plain(self: Classifier, logits: Tensor, batch: Any, batch_idx: int) -> Tensor:
    return F.cross_entropy(logits, batch[1])


class Classifier(pl.LightningModule):
    """Two layers, and ``loss(module, logits, batch, batch_idx)``, with what a module of today does beside."""

    def __init__(self, loss: Callable[..., Any] = plain, *middle: nn.Module, optimizer: Any = OPTIMIZERS["adamw"]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 3))
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
        self.register_buffer("calls", torch.zeros(()))
        self.extra = nn.Parameter(torch.zeros(()))
        self.optimizer, self.loss, self.seen = optimizer, loss, 0

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        logits = self.net(batch[0])
        self.accuracy(logits, batch[1].clamp(min=0))
        self.log("accuracy", self.accuracy)
        return self.loss(self, logits, batch, batch_idx)

    def configure_optimizers(self) -> Any:
        return self.optimizer(self.parameters())


def points(rows: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def names(report: Any) -> list[str]:
    return [found.name for found in report.breaks]


class Talking(Language):  # logs to its logger, looks at a metric of validation that one step does not have, and brings callbacks
    def training_step(self, batch, batch_idx):
        loss = super().training_step(batch, batch_idx)
        self.logger.experiment.add_scalar("loss", loss, self.global_step)
        return loss

    def on_train_epoch_end(self):
        self.trainer.callback_metrics["val_loss"]

    def configure_callbacks(self):
        return [pl.callbacks.LearningRateMonitor(), pl.callbacks.EarlyStopping("val_loss")]


OTHERS: dict[str, Any] = {
    "BoringModel": (BoringModel, lambda: torch.randn(8, 32)),
    "LightningTransformer": (lambda: LightningTransformer(40), lambda: tuple(torch.randint(0, 40, (2, 6, 9)))),
    "a classifier with torchmetrics": (Classifier, points),
    "a module that talks to its Trainer": (Talking, lambda: pad(sentences(8))),
}


@pytest.mark.some_cases(5, 3)
@pytest.mark.parametrize("how", [{"micro_batch": 2}, {"window": 3}, {"micro_batch": 3, "gradient_clip_val": 1e-3}], ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_modules_of_others_are_equal(name: str, how: dict[str, Any]) -> None:
    make, data = OTHERS[name]
    report = verify(make(), data(), **how)
    assert report, str(report)
    assert str(report).startswith("Equal")
    assert report.gradient < EXACT
    assert max(report.parameters.values()) <= report.tolerance == EXACT
    assert report.losses[0] == pytest.approx(report.losses[1], rel=EXACT)


def test_a_loss_in_float32_is_held_to_what_float32_can_show() -> None:
    report = verify(Classifier(lambda m, y, b, i: F.cross_entropy(y.float(), b[1])), points(), window=3)
    assert report, str(report)
    assert EXACT < report.gradient < report.tolerance < 1e-5
    assert "float32" in report.tolerance_reason


@pytest.mark.parametrize(("precision", "limit"), [("32-true", 1e-6), ("bf16-mixed", 0.1)])
def test_modules_are_equal_in_any_precision(precision: str, limit: float) -> None:
    assert (report := verify(Classifier(), points(), micro_batch=2, precision=precision)), str(report)
    assert report.gradient < limit


@pytest.mark.parametrize("weight", ["auto", "equal"])
def test_the_step_of_any_module_is_compared_by_its_loss(weight: str) -> None:
    """The mean of the means of micro-batches, which most loops take, is told from the full batch's."""

    def loss_of(own: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(own(batch["input_ids"]).transpose(1, 2), batch["labels"])

    module, rows = nn.Embedding(17, 17), sentences(8)
    before = module.weight.detach().clone()
    report = verify(module, [pad(rows[:3]), pad(rows[3:4]), pad(rows[4:])], window=3, loss_of=loss_of, weight=weight)
    assert bool(report) == (weight == "auto")
    assert "Embedding" in str(report)
    assert [*report.parameters] == ["weight"]
    assert (report.gradient < EXACT) == (weight == "auto")
    assert torch.equal(module.weight, before)


def test_differences_are_those_of_the_known_answer() -> None:
    batches = [x(1), x(2, 3, 4, 5, 6, 4, 6, 7, 8)]  # a mean of means is 3.0, where the full batch has 4.6
    report = verify(Scalar(), iter(batches), window=2, weight="equal")
    assert not report
    assert names(report) == ["weight"]
    assert report.gradient == report.parameters["w"] == pytest.approx((4.6 - 3.0) / 4.6, rel=EXACT)
    assert 'weight="auto"' in report.breaks[0].mend
    assert verify(Scalar(), iter(batches), window=2).gradient < 1e-15


def variational(self: Classifier, logits: Tensor, batch: Any, batch_idx: int) -> Tensor:
    noise = torch.distributions.Normal(torch.zeros_like(logits), 1.0).rsample()
    steps = torch.randint(0, 10, (len(logits),))
    self.log("squares", (logits**2).sum() / 12)
    return F.cross_entropy(logits + noise * steps[:, None], batch[1]) + F.dropout(logits, 0.5).pow(2).mean()


def changed(change: Callable[[Any], Any], *middle: nn.Module) -> Classifier:
    module = Classifier(plain, *middle, optimizer=OPTIMIZERS["sgd"])
    change(module.net)
    return module


class Late(Classifier):  # layers that are made while the Trainer sets up
    def setup(self, stage):
        self.scale = nn.Linear(3, 3)

    def configure_model(self):
        if not hasattr(self, "late"):
            self.late = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))

    def training_step(self, batch, batch_idx):
        return F.cross_entropy(self.late(self.scale(self.net(batch[0]))), batch[1])


WEIGHT = {"weight": SampleCount()}
EQUAL: dict[str, tuple[Callable[[], Any], dict[str, Any]]] = {
    "an explicit weight": (Classifier, WEIGHT),
    "batch_idx, which is the same in a split batch": (lambda: Classifier(reads_batch_idx), {}),
    "a gradient that is rounding alone": (lambda: Classifier(lambda m, y, b, i: F.cross_entropy(y + m.extra, b[1])), {}),
    "frozen BatchNorm": (lambda: changed(lambda net: net[1].eval(), nn.BatchNorm1d(8)), {}),
    "noise, and a number that is logged": (lambda: Classifier(variational), {}),
    "noise that all rows share": (lambda: Classifier(lambda m, y, b, i: F.cross_entropy(y * torch.rand(3), b[1])), {}),
    "dropout": (lambda: Classifier(plain, nn.Dropout(0.5)), {}),
    "an optimizer that runs its closure several times": (lambda: Classifier(optimizer=torch.optim.LBFGS), {}),
    "an optimizer that wraps another": (lambda: Classifier(optimizer=lambda p: WrapsAnother(torch.optim.SGD(p, lr=0.1))), {}),
    "a loss that hides its sum": (lambda: Classifier(lambda m, y, b, i: Hide.apply(plain(m, y, b, i))), {}),
    "a sparse buffer": (lambda: changed(lambda net: net.register_buffer("graph", torch.eye(3).to_sparse())), {}),
    "layers that are made late": (Late, {}),
    "a loss of pairs, row-wise": (lambda: Classifier(contrastive), {"row_wise": "net"}),
}


@pytest.mark.parametrize("name", EQUAL)
def test_what_is_equal_is_found_to_be_and_stays_as_it_was(name: str) -> None:
    make, how = EQUAL[name]
    module = make()
    before = {path: value.clone() for path, value in module.state_dict().items()}
    report = verify(module, points(), micro_batch=5, **how)
    assert report, str(report)
    assert report.gradient < EXACT
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)
    assert any("Dropout" in note for note in report.notes) == (name in ("dropout", "layers that are made late"))


# fmt: off
def reads_batch_idx(self: Classifier, logits: Tensor, batch: Any, batch_idx: int) -> Tensor:
    return F.cross_entropy(logits, batch[1]) * (1.0 if batch_idx % 2 == 0 else 0.5)

def contrastive(self: Classifier, logits: Tensor, batch: Any, batch_idx: int) -> Tensor:
    return F.cross_entropy(logits @ self.net(batch[0] * 0.9).T, torch.arange(len(logits)))

def warm(self: Classifier, *given: Any) -> Tensor:
    self.seen += 1
    return plain(self, *given) * self.seen

def counting(self: Classifier, *given: Any) -> Tensor:
    self.calls += 1
    return plain(self, *given)

def two_means(self: Classifier, logits: Tensor, batch: Any, batch_idx: int) -> Tensor:
    chosen = (batch[0][:, :1] > 0.5).to(logits.dtype)
    return F.cross_entropy(logits, batch[1]) + ((logits**2) * chosen).sum() / chosen.sum()
# fmt: on


class ByBatches(Classifier):
    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1 / self.trainer.accumulate_grad_batches)


def of(loss: Callable[..., Any], *layers: nn.Module) -> Callable[[], Classifier]:
    return lambda: Classifier(loss, *layers)


SPLIT, WINDOW = {"micro_batch": 4}, {"window": 3}
OF_TERMS = {"micro_batch": 5, "weight": [lambda batch: (batch[0][:, 0] > 0.5).sum(), SampleCount()]}
BREAKS: list[Any] = [
    ("BatchNorm", of(plain, nn.BatchNorm1d(8)), SPLIT, 'micro_batch="offload"'),
    ("batch_idx", of(reads_batch_idx), WINDOW, "micro_batch="),
    ("losses that do not add up", of(contrastive), SPLIT, "row_wise="),
    ("losses that do not add up", of(lambda m, *y: (contrastive if y[0].dtype == torch.float32 else plain)(m, *y)), SPLIT, ""),
    ("state", of(warm), WINDOW, ""),
    ("state", lambda: Classifier(plain, nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))), SPLIT, ""),
    ("state", of(counting), SPLIT, ""),
    ("random numbers", of(lambda m, y, b, i: plain(m, y + y[torch.randperm(len(y))], b, i)), SPLIT, ""),
    ("losses that do not add up", of(two_means), OF_TERMS, ""),
    ("optimizer step", ByBatches, WINDOW, ""),
    ("losses that do not add up", lambda: changed(lambda net: net[0].weight.register_hook(lambda g: g.clamp(max=0.01))), SPLIT, ""),
]


@pytest.mark.parametrize(("name", "make", "how", "mend"), BREAKS)
def test_what_breaks_equality_is_found_and_named(name: str, make: Any, how: dict[str, Any], mend: str) -> None:
    module = make()
    report = verify(module, points(), **how)
    assert (bool(report), report.module) == (False, type(module).__name__)
    assert names(report) == [name], str(report)
    assert mend in report.breaks[0].mend
    text = repr(report)
    assert all(part in text for part in ("Not equal", name, mend, next(iter(report.parameters))))
    assert max(map(len, text.splitlines())) <= 100
    if name in ("BatchNorm", "batch_idx"):  # can be taken out, and then the rest is equal
        assert report.breaks[0].without < EXACT < 1e-3 < report.breaks[0].difference


@pytest.mark.parametrize("how", [SPLIT, WINDOW], ids=str)
def test_a_batch_whose_labels_all_lie_in_one_micro_batch_is_verified(how: dict[str, Any]) -> None:
    batch = points()
    batch[1][4:] = -100
    assert verify(Classifier(), batch, **how)
    assert names(verify(Classifier(), batch, weight="equal", **how)) == ["weight"]


def test_padding_that_a_loss_depends_on_is_named() -> None:
    class SeesPadding(Language):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx) * (batch["input_ids"].shape[1] / 12)

    rows = sorted(sentences(9), key=len)
    batches = [pad(rows[i : i + 3]) for i in (0, 3, 6)]
    report = verify(Language(), batches, window=3)
    assert report
    assert any("padded" in note for note in report.notes)
    assert names(verify(SeesPadding(), batches, window=3))[0] == "padding"


def test_nothing_of_a_trained_module_changes() -> None:
    module = Classifier(plain, nn.BatchNorm1d(8), nn.Dropout(0.3))
    module.net[0].bias.requires_grad_(False)
    module.carried = module.net(points()[0])  # with a graph, which cannot be copied
    calls: list[int] = []
    module.net.register_forward_hook(lambda *_: calls.append(1))
    generator = torch.Generator().manual_seed(5)
    data = DataLoader(TensorDataset(*points(24)), batch_size=4, shuffle=True, generator=generator)
    run = fit(module, data, strategy="auto", max_epochs=2)
    module.net[4].weight.grad = torch.ones_like(module.net[4].weight)
    module.train().net[2].eval()

    def everything() -> list[Any]:
        found = [
            *(sorted(vars(module)), sorted(vars(module.net[2])), sorted(Path().iterdir())),
            *(dict(module.state_dict()), run.optimizers[0].state_dict(), module.accuracy.compute(), module.net[2].p),
            [(parameter.grad, parameter.requires_grad) for parameter in module.parameters()],
            [m.training for m in module.modules()],
            [id(value) for value in (module.trainer, module.carried, *module.modules(), *module.parameters())],
            *(torch.get_rng_state(), generator.get_state(), numpy.random.get_state()[1].tolist(), random.getstate()),
            *(run.global_step, run.current_epoch, len(run.callbacks), run.accumulate_grad_batches),
        ]
        return tree_map(lambda value: value.tolist() if isinstance(value, Tensor) else value, found)

    before = everything()
    assert not verify(module, data, window=3)
    verify(module, points(), micro_batch=4, precision="32-true")
    assert everything() == before
    calls.clear()
    module.net(points()[0])
    assert calls == [1]


def test_a_module_in_a_training_is_refused() -> None:
    class Asks(BoringModel):
        def on_train_start(self) -> None:
            verify(self, torch.randn(8, 32), micro_batch=2)

    with pytest.raises(AccumulationError, match="before trainer.fit"):
        fit(Asks(), strategy="auto")


LOADERS: dict[str, Any] = {
    "a loader": lambda: loader([x(1), x(2, 3), x(4)]),
    "a loader without a length": lambda: DataLoader(Unsized([x(1), x(2, 3), x(4)]), batch_size=None),
    "an iterator": lambda: iter([x(1), x(2, 3), x(4)]),
    "a loader that yields None": lambda: loader([x(1), None, x(2, 3), x(4)]),
    "a data module": lambda: pl.LightningDataModule.from_datasets(TensorDataset(x(1, 2, 3, 4, 5)), batch_size=2),
    "several loaders": lambda: {"a": loader([x(1), x(2)]), "b": loader([x(3), x(4)])},
    "a batch, which is cut": lambda: x(1, 2, 3, 4, 5, 6, 7),
}


@pytest.mark.parametrize("kind", LOADERS)
def test_the_first_batches_of_any_data_are_the_window(kind: str) -> None:
    class Either(Scalar):
        def loss(self, batch):
            first = {dict: "a", list: 0}.get(type(batch))
            return super().loss(batch if first is None else batch[first])

    assert verify(Either(), LOADERS[kind](), window=2)


@pytest.mark.parametrize("size", [2, Tokens(24)], ids=str)
def test_windows_of_split_batches(size: Any) -> None:
    assert verify(Language(), [pad(sentences(12)[:6]), pad(sentences(12)[6:])], window=2, micro_batch=size)


def test_batches_of_a_class_of_their_own_are_joined_and_split_by_functions() -> None:
    class OfBags(Scalar):
        def training_step(self, batch, batch_idx):
            return ((2.0 + self.w) * batch.values).mean()

    class Bags:  # sets of numbers of different sizes, which are collated end to end in an object of their own
        def __init__(self, values: Any) -> None:
            self.values = values if isinstance(values, Tensor) else torch.cat(values)

    bags = [Bags(x(1)), Bags(x(2, 3))]
    with pytest.raises(AccumulationError, match="join="):
        verify(OfBags(), iter(bags), window=2)
    assert verify(OfBags(), iter(bags), window=2, join=lambda bags: Bags([bag.values for bag in bags]))
    assert verify(OfBags(), Bags(x(1, 2, 3)), micro_batch=2, split=lambda bag, size: [Bags(v) for v in bag.values.split(size)])


BATCH, IN_TWOS = torch.randn(8, 32), {"micro_batch": 2}
WRONG: dict[str, Any] = {
    "nothing to compare": (BoringModel, BATCH, {}, "micro_batch="),
    "a window of tokens": (BoringModel, BATCH, {"window": Tokens(8)}, "window"),
    "auto": (BoringModel, BATCH, {"micro_batch": "auto"}, "micro_batch"),
    "the whole batch": (BoringModel, BATCH, {"micro_batch": 8}, "micro_batch"),
    "a batch that is too small": (BoringModel, BATCH[:2], {"window": 3}, "2 rows"),
    "too few batches": (BoringModel, iter([BATCH]), {"window": 3}, "3 batches"),
    "lengths without a mask": (BoringModel, iter([torch.zeros(2, 3), torch.zeros(2, 4)]), {"window": 2}, "join="),
    "other parts": (BoringModel, iter([{"x": torch.zeros(2, 3)}, {"y": torch.zeros(2, 3)}]), {"window": 2}, "join="),
    "manual optimization": (ManualOptimBoringModel, BATCH, IN_TWOS, "automatic_optimization"),
    "a module with an iterator": (lambda: changed(lambda net: vars(net).update(streams=iter([1]))), points(), IN_TWOS, "streams"),
    "a module without shapes": (of(plain, nn.LazyLinear(8)), points(), IN_TWOS, "net.1"),
    "a loss that depends on nothing": (of(lambda m, y, b, i: (y * 0).mean()), points(), IN_TWOS, "gradient"),
    "a module of one type": (of(lambda m, y, b, i: (y.double() @ torch.ones(3).float()).mean()), points(), IN_TWOS, "precision="),
    "no module": (lambda: nn.Linear(2, 2), BATCH, IN_TWOS, "LightningModule"),
    "no data": (pl.LightningModule, None, {"window": 2}, "data="),
    "an argument that does not exist": (BoringModel, BATCH, {**IN_TWOS, "wieght": "auto"}, "wieght"),
    "a gradient that is not finite": (BoringModel, BATCH / 0, IN_TWOS, "finite"),
    "a weight that cannot be read": (of(lambda *y: plain(*y).sin()), points(), {**IN_TWOS, "check": False}, "weight"),
    "no loss": (of(lambda *_: None), points(), IN_TWOS, "training_step"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_verified_is_an_error_that_names_it(name: str) -> None:
    make, data, how, named = WRONG[name]
    with pytest.raises(TypeError if "wieght" in how else AccumulationError, match=named):
        verify(make(), data, **how)


PROJECT = """
import torch
from lightning.pytorch.demos.boring_classes import BoringModel as Good

class Bad(Good):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"] * (1 + batch_idx)

def made():
    return Good()

batch = torch.randn(8, 32)

def plain():
    return torch.nn.Linear(32, 2)

def loss_of(module, batch):
    return module(batch).square().mean()
"""
COMMANDS: list[tuple[str, int, str]] = [
    ("verify project:Good --data project:batch --micro-batch 4", 0, "Equal"),
    ("verify project:Good --window 4", 0, "Equal"),
    ("verify project:made --data project:batch --micro-batch 4 --precision 32-true", 0, "float32"),
    ("verify project:plain --data project:batch --window 2 --loss-of project:loss_of", 0, "Equal: Linear"),
    ("verify project:plain --data project:batch --window 2 --loss-of project:gone", 2, "gone"),
    ("verify project:Bad --data project:batch --window 2", 1, "batch_idx"),
    ("verify project:Good --data project:batch", 1, "micro_batch"),
    ("verify project:Gone --window 2", 2, "Gone"),
    ("verify project --window 2", 2, "module:name"),
    ("verify", 2, "MODULE"),
    ("demo --epochs 0", 2, "--epochs"),
    ("demo --epochs two", 2, "--epochs"),
    ("demo --help", 0, "demo"),
    ("--help", 0, "demo"),
    ("--version", 0, version("lightning-accum")),
    ("", 2, "COMMAND"),
]


@pytest.mark.parametrize(("arguments", "status", "text"), COMMANDS)
def test_the_exit_status_says_what_came_of_it(arguments: str, status: int, text: str, capsys: Any, monkeypatch: Any) -> None:
    Path("project.py").write_text(PROJECT)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.delitem(sys.modules, "project", raising=False)
    assert command(monkeypatch, *arguments.split()) == status
    captured = capsys.readouterr()
    assert text in captured.out + captured.err
    monkeypatch.delitem(sys.modules, "project", raising=False)
