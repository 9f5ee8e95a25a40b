"""Micro-batches whose loss or gradient is not finite: left out as if they had never been there, or reported."""

import itertools
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from harness import ENGINES as HELD
from harness import assert_one_window_one_batch, on, windows_of
from sharded import fsdp2, needs_sharding_on_cpu, shard
from support import SaveAfter, StatefulLoader, Toy, ddp, fit, fp16_on_cpu, joined, loader, relative_error, train_by_hand
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, default_collate
from torchmetrics.classification import MulticlassAccuracy

from lightning_accum import AccumulationWarning, GradientAccumulation
from lightning_accum.testing import adamw

pytestmark = pytest.mark.filterwarnings("ignore")
FAULTS = dict(enumerate(["nan loss", "inf loss", "nan gradient", "inf gradient"], start=1))
FINE, NAN_LOSS, INF_LOSS, NAN_GRADIENT, INF_GRADIENT = range(5)
FEATURES, WIDTH, CLASSES, IGNORED = 3, 6, 4, -100
Batch = dict[str, Tensor]


class Net(nn.Module):  # two layers; in the backward, ``added`` goes into the gradient of the first
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(FEATURES, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, added: Tensor | None = None) -> Tensor:
        hidden = self.first(x)
        if added is not None and hidden.requires_grad:
            hidden.register_hook(added.add)
        return self.last(torch.tanh(hidden))


def spoilt_by_its_rows(net: Net, batch: Batch) -> Tensor:
    fault, added = batch["fault"], None
    if (fault >= NAN_GRADIENT).any():
        added = torch.zeros(len(fault), WIDTH, dtype=batch["x"].dtype)
        added[fault == NAN_GRADIENT, 0], added[fault == INF_GRADIENT, 0] = math.nan, math.inf
    logits = net(batch["x"], added)
    spoilt = torch.zeros_like(logits)
    spoilt[fault == NAN_LOSS] = math.nan
    spoilt[fault == INF_LOSS, batch["y"][fault == INF_LOSS]] = -math.inf  # the gradient is finite
    return F.cross_entropy(logits + spoilt, batch["y"], ignore_index=IGNORED)


class Classifier(Toy):  # rows of a batch may spoil its loss, or the gradients of the first layer
    def __init__(self, *by_rank: Sequence[Any], optimizer: str = "adamw") -> None:
        super().__init__(spoilt_by_its_rows, optimizer, Net)
        self.by_rank = by_rank

    def train_dataloader(self) -> DataLoader:
        return loader(self.by_rank[self.global_rank])

    def configure_model(self) -> None:
        shard(self, [self.net.first, self.net])


def labels(*ys: int, fault: int = FINE, seed: int = 0) -> Batch:  # rows of these labels, the last of them spoilt
    x = torch.randn(len(ys), FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return {"x": x, "y": torch.tensor(ys), "fault": torch.tensor([FINE] * (len(ys) - 1) + [fault])}


def skipping(module: Classifier, window: Any = None, *callbacks: Any, ranks: int = 1, trainer: Any = None, **policy: Any) -> Any:
    accumulation = GradientAccumulation(window, **{"on_nonfinite": "skip", **policy})
    return fit(module, None, accumulation, *callbacks, ranks=ranks, **(trainer or {}))


@pytest.mark.some_cases(5)
@pytest.mark.parametrize("fault", FAULTS, ids=FAULTS.get)
@pytest.mark.parametrize(
    ("engine", "options", "micro_batch"), [on("accum", None), on("accum", 2), on("ddp", None), on("ddp", 2), on("fsdp2", None)]
)
def test_training_equals_the_one_without_the_bad_micro_batches(engine: str, options: Any, micro_batch: Any, fault: int) -> None:
    """The last row of every third loader batch is spoilt: what is left out is the batch, or its last micro-batch."""
    by_rank, left = ([[] for _ in range(HELD[engine].ranks)] for _ in range(2))
    for rank, place in itertools.product(range(len(by_rank)), range(6)):
        is_spoilt = (place + rank) % 3 == 2
        batch = labels(1, 3, 0, IGNORED, 1, seed=6 * rank + place, fault=fault if is_spoilt else FINE)
        by_rank[rank].append(rows := [{name: value[row] for name, value in batch.items()} for row in range(5)])
        left[rank].append(rows[: 4 if micro_batch else 0] if is_spoilt else rows)
    policy = GradientAccumulation(3, micro_batch=micro_batch, on_nonfinite="skip", trim_padding=False, check=False)
    arguments = {"windows": windows_of(left, 3), "collate": default_collate, "optimizers": (adamw,)}
    assert_one_window_one_batch(Classifier, by_rank, policy, engine, options, **arguments)


@pytest.mark.parametrize("fault", FAULTS, ids=FAULTS.get)
def test_a_window_of_one_batch_is_skipped_too_whatever_its_weight(fault: int) -> None:
    batches = [labels(0, 1), labels(1, 2, fault=fault), labels(2, 3, seed=2)]
    module, plain = Classifier(batches), Classifier(batches[::2])
    module.loss = plain.loss = lambda *given: spoilt_by_its_rows(*given).sinh()  # whose graph shows no denominator
    run = skipping(module, 1)
    fit(plain, strategy="auto")
    assert run.global_step == 2
    assert relative_error(module.parameters(), plain.parameters()) <= 1e-12


@pytest.mark.parametrize("fault", FAULTS, ids=FAULTS.get)
def test_one_warning_names_batch_rank_and_what_is_not_finite(fault: int) -> None:
    module = Classifier([labels(0, 1), labels(1, 2, fault=fault), labels(2, 3, fault=fault)])
    names = "loss" if fault in (NAN_LOSS, INF_LOSS) else "net.first.weight"
    with pytest.warns(AccumulationWarning, match=rf"Batch 1 .*rank 0.*{names}") as told:
        run = skipping(module, 3)
    assert len([warning for warning in told if issubclass(warning.category, AccumulationWarning)]) == 1
    shown = run.callback_metrics
    assert (shown["window/skipped_micro_batches"], shown["window/micro_batches"], shown["window/weight"]) == (2, 1, 2)


class Logging(Classifier):  # logs its loss in several ways, returns what it computed, counts what it has seen, and holds state
    def __init__(self, *by_rank: Sequence[Any]) -> None:
        super().__init__(*by_rank)
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro")
        self.norm, self.dropout, self.seen = nn.BatchNorm1d(FEATURES).double(), nn.Dropout(0.0), []
        self.returned: list[Any] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.norm(batch["x"])
        loss, synced = super().training_step(batch, batch_idx), self.trainer.world_size > 1
        self.seen.append(batch["y"].tolist())
        self.log("loss", loss, on_step=True, on_epoch=True, batch_size=len(batch["y"]), sync_dist=synced)
        self.log("largest", loss.detach(), on_epoch=True, reduce_fx="max", batch_size=1, sync_dist=synced)
        self.accuracy(self.net(batch["x"]), batch["y"])
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True, batch_size=len(batch["y"]))
        return {"loss": loss, "y": batch["y"]}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.returned.append(outputs)

    def on_train_end(self) -> None:
        torch.save({name: value.item() for name, value in self.trainer.callback_metrics.items()}, f"rank{self.global_rank}.pt")


SHOWN = ("loss_epoch", "largest", "accuracy_epoch", "window/loss_epoch", "window/total_weight")


def test_what_is_shown_and_held_is_of_the_good_batches() -> None:
    good = [labels(0, 1, 2, seed=1), labels(3, 0, seed=2), labels(2, 2, 1, 0, seed=3), labels(1, 3, seed=4)]
    bad = [labels(1, 2, fault=NAN_LOSS), labels(0, 1, fault=INF_GRADIENT)]
    bad[0]["x"][0] = math.nan
    module, expected = Logging([good[0], bad[0], *good[1:3], bad[1], good[3]]), Logging(good)
    run, clean = skipping(module, 3), skipping(expected, 2)
    for name in SHOWN:
        assert run.callback_metrics[name].item() == pytest.approx(clean.callback_metrics[name].item(), rel=1e-12)
    assert module.seen == expected.seen
    assert all(torch.equal(a, b) for a, b in zip(module.buffers(), expected.buffers(), strict=True))
    assert [bool(outputs) for outputs in module.returned] == [True, False, True, True, False, True]
    assert run.callback_metrics["window/total_skipped_micro_batches"] == 2


@pytest.mark.parametrize("micro_batch", [None, 2], ids=["whole", "split"])
def test_ranks_that_skip_and_ranks_that_do_not_log_together(micro_batch: int | None) -> None:
    first = [labels(0, 1, seed=1), labels(2, 3, seed=2), labels(1, 0, fault=NAN_GRADIENT)]
    second = [labels(0, 1, fault=NAN_LOSS), labels(3, 1, seed=3), None, labels(2, 2, seed=4)]
    skipping(Logging(first, second), 2, ranks=2, micro_batch=micro_batch, trim_padding=False)
    of_ranks = [torch.load(f"rank{rank}.pt") for rank in range(2)]
    clean = skipping(Logging([first[0], first[1], second[1], second[3]]), 3)
    for found in of_ranks:
        for name in set(SHOWN) - {"window/loss_epoch"}:
            assert found[name] == pytest.approx(clean.callback_metrics[name].item(), rel=1e-12)
        assert found["window/total_skipped_micro_batches"] == 2


def test_a_checkpoint_inside_a_window_knows_what_was_skipped() -> None:
    bad = labels(0, 1, fault=NAN_LOSS)
    batches = [labels(0, 1), bad, labels(1, seed=1), bad, labels(2, seed=2), bad]
    whole, resumed = Classifier(), Classifier()
    whole.train_dataloader = resumed.train_dataloader = lambda: StatefulLoader(batches)
    skipping(whole, 3, SaveAfter(5))
    run = skipping(resumed, 3, trainer={"ckpt_path": "inside.ckpt"})
    assert relative_error(resumed.parameters(), whole.parameters()) == 0
    assert run.callback_metrics["window/skipped_micro_batches"] == 2
    assert run.callback_metrics["window/total_skipped_micro_batches"] == 3


@pytest.mark.parametrize(("fault", "skipped", "scale"), [(NAN_LOSS, 1, 256), (INF_GRADIENT, 0, 128)])
def test_with_a_grad_scaler_a_loss_is_skipped_and_a_gradient_is_left_to_the_scaler(fault: int, skipped: int, scale: int) -> None:
    module, plugin = Classifier([labels(0, 1), labels(1, 2, fault=fault)], optimizer="sgd"), fp16_on_cpu()
    run = skipping(module, 2, trainer={"plugins": [plugin]})
    assert plugin.scaler.get_scale() == scale
    assert run.callback_metrics["window/skipped_micro_batches"] == skipped
    assert all(parameter.isfinite().all() for parameter in module.parameters())


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("fault", [NAN_LOSS, INF_GRADIENT], ids=FAULTS.get)
@pytest.mark.parametrize("engine", ["ddp", pytest.param("fsdp2", marks=needs_sharding_on_cpu)])
def test_raise_ends_all_ranks_before_a_step_and_names_the_rank(engine: str, fault: int) -> None:
    class Stepless(Classifier):
        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            raise AssertionError("a step was taken")

    module = Stepless([labels(0, 1), labels(1, 2)], [labels(2, 3), labels(2, 1, fault=fault)])
    policy = GradientAccumulation(2, on_nonfinite="raise")
    with pytest.raises(Exception, match="on rank 1") as raised:
        fit(module, None, policy, strategy=ddp() if engine == "ddp" else fsdp2(2), devices=2)
    assert "NotFiniteError" in str(raised.value)
    with pytest.raises(FloatingPointError, match="Batch 1"):
        fit(Stepless(module.by_rank[1]), None, GradientAccumulation(2, on_nonfinite="raise"))


def test_raise_lets_good_training_be() -> None:
    batches = [labels(0, 1), labels(1, 2, 3, seed=1), labels(IGNORED, IGNORED), labels(2, seed=2)]
    module = Classifier(batches)
    skipping(module, 2, on_nonfinite="raise")  # a loss of NaN without weight is no fault
    expected = train_by_hand(Classifier(), [joined(batches[:2]), batches[3]], 1)
    assert relative_error(module.parameters(), expected.parameters()) <= 1e-12


def test_propagate_lets_it_reach_the_parameters() -> None:
    module = Classifier([labels(0, 1), labels(1, 2, fault=NAN_LOSS)])
    run = skipping(module, 2, on_nonfinite="propagate")
    assert all(parameter.isnan().any() for parameter in module.parameters())
    assert "window/skipped_micro_batches" not in run.callback_metrics
