"""BatchNorm of split batches: every kind of layer in every state equals the full batch's, and what cannot is refused by name."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.profilers import SimpleProfiler
from sharded import fsdp2, needs_sharding_on_cpu
from support import OPTIMIZERS, ddp, fp16_on_cpu, loader, relative_error, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torchmetrics.classification import MulticlassAccuracy

from lightning_accum import GradientAccumulation, Tokens

Batch = tuple[Tensor, Tensor]
ROWS, CLASSES = 22, 3


class Images(pl.LightningModule):
    """A network with the layer in question in the middle of others, and a loss that weighs its rows differently."""

    def __init__(self, norm: nn.Module, dimensions: int = 2, optimizer: str = "adamw", **options: Any) -> None:
        super().__init__()
        torch.manual_seed(2)
        convolution = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)[dimensions]
        shape: tuple[int, ...] = (1,) if dimensions else ()
        # no biases: in front of the layer their gradient is 0 but for rounding, and Adam divides it by its own size
        self.first, self.norm, self.second = convolution(2, 4, *shape, bias=False), norm, convolution(4, 4, *shape, bias=False)
        self.head = nn.Linear(4, CLASSES)
        self.optimizer, self.options = optimizer, options
        self.double()

    def features(self, x: Tensor) -> Tensor:
        hidden = F.relu(self.norm(self.first(x)))
        return (hidden + self.second(hidden)).flatten(2).mean(2) if x.dim() > 2 else hidden + self.second(hidden)

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return F.cross_entropy(self.head(self.features(batch[0])), batch[1], ignore_index=-100)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](p for p in self.parameters() if p.requires_grad)


def batches(dimensions: int = 2, number: int = 4) -> list[Batch]:
    generator = torch.Generator().manual_seed(4)
    shape = (ROWS, 2, 3, 4, 2)[: 2 + dimensions]
    labels = torch.randint(0, CLASSES, (number, ROWS), generator=generator)
    labels[:, ::5] = -100  # so that micro-batches weigh differently
    return [(torch.randn(shape, dtype=torch.float64, generator=generator) * 2 + 1, labels[i]) for i in range(number)]


def errors(
    make: Callable[[], pl.LightningModule],
    size: Any = 4,
    data: list[Any] | None = None,
    policy: dict[str, Any] | None = None,
    **kw: Any,
) -> tuple[float, float]:
    """How far parameters and buffers are from plain Lightning's on the full batch, relative to them."""
    data = batches() if data is None else data
    whole, split = make(), make()
    trainer("auto", max_epochs=2, **copy.deepcopy(kw)).fit(whole, loader(data))
    exact = GradientAccumulation(micro_batch=size, batch_norm="exact", **(policy or {}))
    trainer(callbacks=[exact], max_epochs=2, **copy.deepcopy(kw)).fit(split, loader(data))
    of_parameters = relative_error(split.parameters(), whole.parameters())
    mine, theirs = ([b.double() for b in module.buffers()] for module in (split, whole))
    assert all(torch.equal(a, b) for a, b in zip(split.buffers(), whole.buffers(), strict=True) if not a.is_floating_point())
    return of_parameters, relative_error(mine, theirs) if any(b.any() for b in theirs) else 0.0


KINDS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "1d": (lambda: nn.BatchNorm1d(4), 0),
    "1d over time": (lambda: nn.BatchNorm1d(4), 1),
    "2d": (lambda: nn.BatchNorm2d(4), 2),
    "3d": (lambda: nn.BatchNorm3d(4), 3),
    "cumulative average": (lambda: nn.BatchNorm2d(4, momentum=None), 2),
    "momentum 1": (lambda: nn.BatchNorm2d(4, momentum=1.0), 2),
    "not affine": (lambda: nn.BatchNorm2d(4, affine=False), 2),
    "no running statistics": (lambda: nn.BatchNorm2d(4, track_running_stats=False), 2),
    "no running statistics, eval": (lambda: nn.BatchNorm2d(4, track_running_stats=False).eval(), 2),
    "frozen weights": (lambda: nn.BatchNorm2d(4).requires_grad_(False), 2),
    "lazy 1d": (lambda: nn.LazyBatchNorm1d(affine=False), 0),
    "lazy 2d": (lambda: nn.LazyBatchNorm2d(affine=False), 2),
    "lazy 3d": (lambda: nn.LazyBatchNorm3d(affine=False), 3),
    "sync on one rank": (lambda: nn.SyncBatchNorm(4), 2),
    "two in a row": (lambda: nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4)), 2),
    "beside instance norm": (lambda: nn.Sequential(nn.BatchNorm2d(4), nn.InstanceNorm2d(4, affine=True)), 2),
    "beside group norm": (lambda: nn.Sequential(nn.BatchNorm2d(4), nn.GroupNorm(2, 4)), 2),
}


@pytest.mark.some_cases(12)
@pytest.mark.parametrize("size", [1, 4, 21])
@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_equals_the_full_batch(kind: str, size: int) -> None:
    norm, dimensions = KINDS[kind]
    # what is normalised twice hardly depends on the first: Adam would divide gradients by their own small size
    optimizer = "sgd" if kind in ("two in a row", "beside instance norm") else "adamw"
    assert max(errors(lambda: Images(norm(), dimensions, optimizer), size, batches(dimensions))) < 1e-12


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("size", [3, 11, ROWS, 40])
def test_optimizers(optimizer: str, size: int) -> None:
    assert max(errors(lambda: Images(nn.BatchNorm2d(4), optimizer=optimizer), size)) < 1e-12


def test_instance_norm_alone_needs_no_lock_step() -> None:
    module = Images(nn.InstanceNorm2d(4, affine=True, track_running_stats=True))
    run = trainer(callbacks=[GradientAccumulation(micro_batch=4, batch_norm="exact")])
    run.fit(module, loader(batches()))
    assert not run.strategy.joins_batches


# --- states of a layer ------------------------------------------------------------------------------------------------


class FrozenAtSecond(Images):
    """The layer is put into evaluation mode in the middle of training, by training_step itself."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.norm.train(batch_idx < 2)
        return super().training_step(batch, batch_idx)


class Shared(Images):
    """One layer, used several times."""

    def features(self, x: Tensor) -> Tensor:
        hidden = self.norm(self.first(x))
        return self.norm(F.relu(hidden) + self.norm(self.second(hidden))).flatten(2).mean(2)


class OnInputs(Images):
    """The layer sees data alone, which has no gradient."""

    def features(self, x: Tensor) -> Tensor:
        return self.second(self.norm(torch.cat((x, x.square()), 1))).flatten(2).mean(2)


class Teacher(Images):
    """Statistics of the batch without a graph, in what another branch is compared with."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        with torch.no_grad():
            target = self.features(batch[0].flip(2))
        return F.mse_loss(self.features(batch[0]), target.tanh())


class Unused(Images):
    """The output of a layer is cut off; its statistics go on."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        self.norm(self.second(self.first(batch[0])).detach())
        return F.mse_loss(self.first(batch[0]).flatten(2).mean(2)[:, :3], batch[0].flatten(2)[..., :3].mean(1))


class InPlace(Images):
    """ReLU in place on what the layer returned, and on what it took."""

    def features(self, x: Tensor) -> Tensor:
        return self.second(F.relu_(self.norm(F.relu_(self.first(x))))).flatten(2).mean(2)


class WithActivation(nn.BatchNorm2d):
    """As timm has it: a forward of its own, with more in it."""

    def forward(self, x: Tensor) -> Tensor:
        factor = 0.0 if self.momentum is None else self.momentum
        if self.training and self.track_running_stats and self.num_batches_tracked is not None:
            self.num_batches_tracked.add_(1)
            factor = 1.0 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
        x = F.batch_norm(x, self.running_mean, self.running_var, self.weight, self.bias, self.training, factor, eps=self.eps)
        return F.silu(x)


class Lower(nn.BatchNorm2d):
    """A forward that calls torch below torch.nn.functional."""

    def forward(self, x: Tensor) -> Tensor:
        return torch.batch_norm(x, self.weight, self.bias, self.running_mean, self.running_var, True, 0.1, self.eps, True)


@pytest.mark.parametrize("module", [FrozenAtSecond, Shared, OnInputs, Teacher, Unused, InPlace])
@pytest.mark.parametrize("momentum", [0.1, None])
def test_states_and_uses_of_a_layer(module: type[Images], momentum: float | None) -> None:
    assert max(errors(lambda: module(nn.BatchNorm2d(4, momentum=momentum)))) < 1e-12


@pytest.mark.parametrize("norm", [WithActivation, lambda n: WithActivation(n, momentum=None), Lower])
def test_a_layer_with_a_forward_of_its_own_keeps_it(norm: Any) -> None:
    assert max(errors(lambda: Images(norm(4)))) < 1e-12


def test_hooks_of_a_layer_run_for_each_micro_batch() -> None:
    module = Images(nn.BatchNorm2d(4))
    seen: list[int] = []
    module.norm.register_forward_hook(lambda layer, args, output: seen.append(len(output)))
    trainer(callbacks=[GradientAccumulation(micro_batch=8, batch_norm="exact")]).fit(module, loader(batches(number=2)))
    assert seen == [8, 8, 6] * 2
    assert "forward" not in vars(module.norm)  # nothing is left behind


def test_frozen_layers_alone_run_as_other_split_batches_do() -> None:
    class Frozen(Images):
        def on_train_epoch_start(self) -> None:
            self.norm.eval()

    assert max(errors(lambda: Frozen(nn.BatchNorm2d(4)))) < 1e-12


def test_validation_sees_plain_layers() -> None:
    class Validated(Images):
        def validation_step(self, batch: Batch, batch_idx: int) -> None:
            assert "forward" not in vars(self.norm)
            self.log("seen", self.training_step(batch, batch_idx))

    module = Validated(nn.BatchNorm2d(4))
    run = trainer(callbacks=[GradientAccumulation(micro_batch=8, batch_norm="exact")])
    run.fit(module, loader(batches()), loader(batches()))
    assert "seen" in run.callback_metrics


class Keeps(Images):
    """Leaves something in attributes, before a layer, for after it: itself, by a hook, in a list."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__(norm)
        self.seen: dict[str, Tensor] = {}
        self.collected: list[Tensor] = []
        self.forwards = 0
        self.first.register_forward_hook(lambda layer, args, output: self.seen.update(first=output))

    def features(self, x: Tensor) -> Tensor:
        self.forwards += 1
        self.kept = self.first(x).square()
        self.collected.append(self.kept.sin())
        hidden = self.norm(self.first(x))
        self.collected.append(hidden)
        again = self.norm(self.kept + self.seen["first"])
        together = torch.stack(self.collected).sum(0) + again + self.seen["first"]
        self.collected.clear()
        return together.flatten(2).mean(2)


def test_what_a_forward_keeps_in_attributes_is_its_own() -> None:
    assert max(errors(lambda: Keeps(nn.BatchNorm2d(4)))) < 1e-12
    module = Keeps(nn.BatchNorm2d(4))
    trainer(callbacks=[GradientAccumulation(micro_batch=8, batch_norm="exact")]).fit(module, loader(batches()))
    assert module.forwards == 4 * 3  # numbers are counted up by all


class Compiled(Images):
    """A network that is compiled around the layer."""

    def features(self, x: Tensor) -> Tensor:
        if not hasattr(self, "compiled"):
            self.compiled = [torch.compile(nn.Sequential(self.first, self.norm, nn.ReLU(), self.second), backend="eager")]
        return self.compiled[0](x).flatten(2).mean(2)


def test_a_compiled_network_is_left_at_the_layer() -> None:
    assert max(errors(lambda: Compiled(nn.BatchNorm2d(4)))) < 1e-12


# --- what is around the forward -----------------------------------------------------------------------------------------


class Hooked(Images):
    """What Lightning calls, and with which loss."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__(norm)
        self.calls: list[Any] = []

    def on_before_zero_grad(self, optimizer: torch.optim.Optimizer) -> None:
        self.calls.append("zero")

    def on_before_backward(self, loss: Tensor) -> None:
        self.calls.append(float(loss.detach()))

    def on_after_backward(self) -> None:
        self.calls.append("after")


def test_hooks_around_the_backward_see_the_batch_once() -> None:
    calls = []
    for strategy, callbacks in (("auto", []), ("accum", [GradientAccumulation(micro_batch=5, batch_norm="exact")])):
        module = Hooked(nn.BatchNorm2d(4))
        trainer(strategy, callbacks=callbacks).fit(module, loader(batches()))
        calls.append([call for call in module.calls if isinstance(call, float)])
        assert [call for call in module.calls if isinstance(call, str)] == ["zero", "after"] * 4
    assert calls[1] == pytest.approx(calls[0], rel=1e-12)


class OwnBackward(Images):
    """Passes no keyword arguments on."""

    def backward(self, loss: Tensor) -> None:  # type: ignore[override]
        loss.backward()


class Sums(Images):
    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return F.cross_entropy(self.head(self.features(batch[0])), batch[1], reduction="sum")


class Clipped(Images):
    def configure_gradient_clipping(self, *args: Any, **kwargs: Any) -> None:
        self.clip_gradients(args[0], gradient_clip_val=0.05, gradient_clip_algorithm="norm")


@pytest.mark.parametrize("module", [OwnBackward, Sums, Clipped])
def test_overrides_and_other_losses(module: type[Images]) -> None:
    assert max(errors(lambda: module(nn.BatchNorm2d(4)))) < 1e-12


def test_weights_that_are_counted() -> None:
    policy = {"weight": lambda batch: (batch[1] != -100).sum()}
    assert max(errors(lambda: Images(nn.BatchNorm2d(4)), policy=policy)) < 1e-12


def test_a_grad_scaler_sees_one_loss() -> None:
    whole, split = Images(nn.BatchNorm2d(4)).float(), Images(nn.BatchNorm2d(4)).float()
    data = [(x.float(), y) for x, y in batches()]
    trainer("auto", plugins=[fp16_on_cpu()], max_epochs=2).fit(whole, loader(data))
    exact = GradientAccumulation(micro_batch=4, batch_norm="exact")
    run = trainer(plugins=[fp16_on_cpu()], max_epochs=2, callbacks=[exact])
    run.fit(split, loader(data))
    assert run.precision_plugin.scaler.get_scale() == 256
    assert relative_error(split.parameters(), whole.parameters()) < 1e-2  # float16 has 11 bits, and AdamW divides by a small one


def test_autocast_holds_in_every_micro_batch() -> None:
    seen: list[torch.dtype] = []

    class Seen(Images):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            seen.append(self.first(batch[0]).dtype)
            loss = super().training_step(batch, batch_idx)
            seen.append(self.first(batch[0]).dtype)
            return loss

    exact = GradientAccumulation(micro_batch=4, batch_norm="exact")
    module = Seen(nn.BatchNorm2d(4)).float()
    trainer(precision="bf16-mixed", callbacks=[exact]).fit(module, loader([(x.float(), y) for x, y in batches()]))
    assert set(seen) == {torch.bfloat16}


def test_rows_that_all_are_ignored_count_in_the_statistics() -> None:
    data = batches()
    for _, labels in data:
        labels[4:9] = -100  # the whole second micro-batch, whose loss is NaN
    assert max(errors(lambda: Images(nn.BatchNorm2d(4)), 4, data)) < 1e-12


def test_a_micro_batch_without_a_loss() -> None:
    class Sometimes(Images):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            return None if (batch[1] == -100).all() else loss

    data = batches()
    for _, labels in data:
        labels[4:9] = -100
    whole, split = Images(nn.BatchNorm2d(4)), Sometimes(nn.BatchNorm2d(4))
    trainer("auto").fit(whole, loader(data))
    trainer(callbacks=[GradientAccumulation(micro_batch=4, batch_norm="exact")]).fit(split, loader(data))
    assert relative_error(split.state_dict().values(), whole.state_dict().values()) < 1e-12


def test_a_batch_without_any_loss_takes_no_step() -> None:
    data = batches()
    data[1][1][:] = -100
    module = Images(nn.BatchNorm2d(4))
    run = trainer(callbacks=[GradientAccumulation(micro_batch=4, batch_norm="exact")])
    with pytest.warns(UserWarning, match="without any weight"):
        run.fit(module, loader(data))
    assert run.global_step == 3
    assert all(parameter.isfinite().all() for parameter in module.parameters())


class Logged(Images):
    """Logs before, between and after the layers, one name twice, and a metric."""

    def __init__(self) -> None:
        super().__init__(nn.BatchNorm2d(4))
        self.accuracy = MulticlassAccuracy(CLASSES, average="micro", ignore_index=-100)
        self.seen: list[Any] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        x, labels = batch
        self.log("inputs", x.mean(), batch_size=len(x))
        self.log("twice", x.max(), reduce_fx="max", on_step=True)
        features = self.features(x)
        self.log("features", features.mean(), batch_size=len(x), on_step=True, on_epoch=True)
        logits = self.head(self.norm(features[..., None, None]).flatten(1))
        loss = F.cross_entropy(logits, labels, ignore_index=-100)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.accuracy(logits, labels)
        self.log("accuracy", self.accuracy, on_step=True, on_epoch=True)
        return {"loss": loss, "features": features}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.seen.append((outputs["loss"].clone(), outputs["features"].detach().clone()))


def test_logs_and_outputs_are_those_of_the_batch() -> None:
    metrics, outputs = [], []
    for strategy, callbacks in (("auto", []), ("accum", [GradientAccumulation(micro_batch=4, batch_norm="exact", log=False)])):
        module = Logged()
        run = trainer(strategy, callbacks=callbacks, max_epochs=2, log_every_n_steps=1)
        run.fit(module, loader(batches()))
        metrics.append({name: float(value) for name, value in run.callback_metrics.items()})
        outputs.append(module.seen)
    assert metrics[1] == pytest.approx(metrics[0], rel=1e-6)  # Lightning keeps means in float32
    for mine, theirs in zip(*reversed(outputs), strict=True):
        assert relative_error(mine, theirs) < 1e-12


def test_profilers_see_one_training_step_a_batch(tmp_path: Any) -> None:
    profiler = SimpleProfiler(dirpath=tmp_path)
    run = trainer(profiler=profiler, callbacks=[GradientAccumulation(micro_batch=4, batch_norm="exact")])
    run.fit(Images(nn.BatchNorm2d(4)), loader(batches()))
    name = next(name for name in profiler.recorded_durations if name.endswith(".training_step"))
    assert len(profiler.recorded_durations[name]) == 4


def test_dropout_is_the_same_each_time_and_differs_by_micro_batch() -> None:
    masks: list[list[Tensor]] = []

    class Dropped(Images):
        def features(self, x: Tensor) -> Tensor:
            features = F.dropout(super().features(x), 0.5)
            masks[-1].append(features.detach() == 0)
            return features

    found = []
    for _ in range(2):
        masks.append([])
        module = Dropped(nn.BatchNorm2d(4))
        torch.manual_seed(9)
        trainer(callbacks=[GradientAccumulation(micro_batch=11, batch_norm="exact")]).fit(module, loader(batches()))
        found.append(module)
    assert all(torch.equal(a, b) for a, b in zip(found[0].parameters(), found[1].parameters(), strict=True))
    assert len({tuple(mask.flatten().tolist()) for mask in masks[0]}) == len(masks[0]) == 8


def test_order_of_a_shuffled_loader_is_that_of_the_full_batch() -> None:
    x = torch.cat([x for x, _ in batches()])
    data = torch.utils.data.TensorDataset(x, torch.cat([y for _, y in batches()]))
    found = []
    for strategy, callbacks in (("auto", []), ("accum", [GradientAccumulation(micro_batch=4, batch_norm="exact")])):
        module = Images(nn.BatchNorm2d(4))
        torch.manual_seed(1)
        trainer(strategy, callbacks=callbacks, max_epochs=3).fit(module, torch.utils.data.DataLoader(data, 22, shuffle=True))
        found.append(module)
    assert relative_error(found[1].parameters(), found[0].parameters()) < 1e-12


def test_auto_runs_the_batch_again_as_if_it_had_not_run() -> None:
    class Limited(Images):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            features = self.features(batch[0])  # the others have met at the layer
            if len(batch[0]) > 6 and self.trainer.callbacks:
                raise torch.OutOfMemoryError("CUDA out of memory, says the test")
            return F.cross_entropy(self.head(self.norm(features[..., None, None]).flatten(1)), batch[1], ignore_index=-100)

    assert max(errors(lambda: Limited(nn.BatchNorm2d(4, momentum=None)), "auto")) < 1e-12


def test_tokens_and_padding_that_counts() -> None:
    class Texts(Images):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            hidden = self.norm(self.first(F.one_hot(batch["input_ids"], 2).double().transpose(1, 2)))
            return F.cross_entropy(self.head(F.relu(hidden).transpose(1, 2)).flatten(0, 1), batch["labels"].flatten())

    generator = torch.Generator().manual_seed(0)
    ids, labels = (torch.randint(0, 2, (3, 10, 7), generator=generator) for _ in range(2))
    for row in range(10):
        ids[:, row, 1 + row % 6 :] = 0
        labels[:, row, 1 + row % 6 :] = -100
    data = [{"input_ids": ids[i], "labels": labels[i], "attention_mask": (labels[i] != -100).long()} for i in range(3)]
    assert max(errors(lambda: Texts(nn.BatchNorm1d(4), 1), Tokens(21), data)) < 1e-12


# --- what is refused, and how -------------------------------------------------------------------------------------------


def fit(module: pl.LightningModule, size: Any = 4, strategy: Any = "accum", data: Any = None, **kwargs: Any) -> None:
    exact = GradientAccumulation(micro_batch=size, batch_norm="exact", **kwargs.pop("policy", {}))
    trainer(strategy, callbacks=[exact], **kwargs).fit(module, loader(batches() if data is None else data))


class Skips(Images):
    def features(self, x: Tensor) -> Tensor:
        return self.first(x).flatten(2).mean(2) if x.sum() < self.options["least"] else super().features(x)


class Repeats(Images):
    def features(self, x: Tensor) -> Tensor:
        hidden = self.first(x)
        for _ in range(1 + (len(x) == 2)):  # the last micro-batch has two rows
            hidden = self.norm(hidden)
        return hidden.flatten(2).mean(2)


class Swaps(Images):
    def features(self, x: Tensor) -> Tensor:
        layers = [*self.norm][:: -1 if len(x) == 2 else 1]
        return layers[1](layers[0](self.first(x))).flatten(2).mean(2)


def test_where_the_ways_part_an_error_names_the_layer() -> None:
    least = sorted(float(x[i : i + 4].sum()) for x, _ in batches() for i in range(0, ROWS, 4))[2]
    with pytest.raises(RuntimeError, match="The ways of the micro-batches part: .* the BatchNorm layer 'norm'"):
        fit(Skips(nn.BatchNorm2d(4), least=least))
    with pytest.raises(RuntimeError, match="micro-batch 5 came to the BatchNorm layer 'norm', where micro-batch 0 had ended"):
        fit(Repeats(nn.BatchNorm2d(4)))
    with pytest.raises(RuntimeError, match=r"5 came to the BatchNorm layer 'norm\.1', where micro-batch 0 came to .* 'norm\.0'"):
        fit(Swaps(nn.Sequential(nn.BatchNorm2d(4), nn.BatchNorm2d(4))))


def test_an_error_in_one_micro_batch_is_raised_as_it_is() -> None:
    class Fails(Images):
        def features(self, x: Tensor) -> Tensor:
            features = super().features(x)
            if len(x) == 2:
                raise ZeroDivisionError("in the last micro-batch")
            return features

    module = Fails(nn.BatchNorm2d(4))
    with pytest.raises(ZeroDivisionError, match="in the last micro-batch"):
        fit(module)
    assert "forward" not in vars(module.norm)


def test_a_layer_that_normalises_by_itself_is_named() -> None:
    class ByItself(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return x - x.mean((0, 2, 3), keepdim=True)

    with pytest.raises(RuntimeError, match="'norm', a ByItself, has a forward of its own that does not call"):
        fit(Images(ByItself(4)))


def test_a_backward_inside_of_training_step_is_named() -> None:
    class Penalty(Images):
        def training_step(self, batch: Batch, batch_idx: int) -> Any:
            x = batch[0].requires_grad_()
            loss = super().training_step((x, batch[1]), batch_idx)
            return loss + torch.autograd.grad(loss, x, create_graph=True)[0].square().sum()

    with pytest.raises(RuntimeError, match="a backward of its own through the BatchNorm layer 'norm'"):
        fit(Penalty(nn.BatchNorm2d(4)))


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_a_checkpointed_layer_is_named(use_reentrant: bool) -> None:
    class Checkpointed(Images):
        def features(self, x: Tensor) -> Tensor:
            return checkpoint(super().features, x.requires_grad_(), use_reentrant=use_reentrant)

    with pytest.raises(RuntimeError, match="BatchNorm layer 'norm' .*activation checkpointing"):
        fit(Checkpointed(nn.BatchNorm2d(4)))


def test_a_checkpoint_beside_the_layer_is_exact() -> None:
    class Beside(Images):
        def features(self, x: Tensor) -> Tensor:
            hidden = F.relu(self.norm(self.first(x)))
            return checkpoint(self.second, hidden, use_reentrant=False).flatten(2).mean(2)

    assert max(errors(lambda: Beside(nn.BatchNorm2d(4)))) < 1e-12


@pytest.mark.parametrize(
    ("arguments", "trainers"),
    [
        ({"window": 2}, {}),
        ({"window": 3, "micro_batch": 4}, {}),
        ({}, {"accumulate_grad_batches": 4}),
        ({"window": Tokens(50)}, {}),
    ],
)
def test_windows_of_several_loader_batches_are_refused_before_training(arguments: Any, trainers: Any) -> None:
    run = trainer(callbacks=[GradientAccumulation(**arguments, batch_norm="exact")], **trainers)
    with pytest.raises(MisconfigurationException, match=r"BatchNorm \(norm\) over one loader batch.*micro_batch="):
        run.fit(Images(nn.BatchNorm2d(4)), loader(batches()))
    assert run.global_step == 0


def test_windows_of_one_loader_batch_have_nothing_to_join() -> None:
    assert max(errors(lambda: Images(nn.BatchNorm2d(4)), None)) == 0


def test_scripted_layers_are_named() -> None:
    with pytest.raises(MisconfigurationException, match="scripted BatchNorm layer 'norm.0'"):
        fit(Images(torch.jit.script(nn.Sequential(nn.BatchNorm2d(4)))))


def test_engines_that_cannot_are_refused() -> None:
    with pytest.raises(Exception, match="static_graph"):
        fit(Images(nn.BatchNorm2d(4)), strategy=ddp(static_graph=True), devices=2)
    with pytest.raises(Exception, match="SyncBatchNorm .*auto"):
        fit(Images(nn.BatchNorm2d(4)), "auto", ddp(), devices=2, sync_batchnorm=True)


@needs_sharding_on_cpu
def test_sharded_modules_are_refused() -> None:
    class Sharded(Images):
        def configure_model(self) -> None:
            pass

    with pytest.raises(Exception, match="forwards of all micro-batches at once, which ForkedFSDP2 cannot"):
        fit(Sharded(nn.BatchNorm2d(4)), strategy=fsdp2(), devices=2)


def test_manual_optimization_is_refused_as_for_other_split_batches() -> None:
    module = Images(nn.BatchNorm2d(4))
    module.automatic_optimization = False
    with pytest.raises(MisconfigurationException, match="automatic_optimization=False"):
        fit(module)


@pytest.mark.parametrize("policy", [{"micro_batch": 4}, {"window": 2}])
def test_the_warning_says_what_differs_and_what_to_do(policy: dict[str, Any]) -> None:
    run = trainer(callbacks=[GradientAccumulation(**policy)])
    with pytest.warns(UserWarning, match=r"BatchNorm \(norm\) normalises .* running statistics .* batch_norm=\"exact\"\)") as said:
        run.fit(Images(nn.BatchNorm2d(4)), loader(batches()))
    assert len([w for w in said if "BatchNorm" in str(w.message)]) == 1
    assert not run.strategy.joins_batches


def test_plain_accumulation_differs_and_the_layer_is_why() -> None:
    whole, split = Images(nn.BatchNorm2d(4)), Images(nn.BatchNorm2d(4))
    trainer("auto").fit(whole, loader(batches()))
    trainer(callbacks=[GradientAccumulation(micro_batch=4)]).fit(split, loader(batches()))
    assert relative_error(split.parameters(), whole.parameters()) > 1e-4
    assert int(split.norm.num_batches_tracked) == 24
    assert int(whole.norm.num_batches_tracked) == 4
