"""Where Lightning's and torch's general ways are passed by, nothing is different: the same gradients, and every hook is called."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.profilers import SimpleProfiler
from support import loader, trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import AccumulationStrategy, GradientAccumulation, seams
from lightning_accum.loops.optimization import backward

# --- backward ---------------------------------------------------------------------------------------------------------


class Doubled(torch.autograd.Function):
    """Twice its input; its backward writes into the gradient that it is given, as none should."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient.mul_(2)


class Wrapped(Tensor):
    """A subclass: torch has ways of its own for those."""


LOSSES: dict[str, Callable[[Tensor], Tensor]] = {
    "a number": lambda x: (x**3).mean(),
    "one entry": lambda x: (x**3).mean().reshape(1),
    "single precision": lambda x: (x**3).mean().float(),
    "a subclass": lambda x: (x**3).mean().as_subclass(Wrapped),
    "a function that writes into its gradient": lambda x: Doubled.apply((x**3).mean()),
    "the leaf itself": lambda x: x,
}


@pytest.mark.parametrize("gradient", [None, 0.375])
@pytest.mark.parametrize("loss", LOSSES)
def test_gradients_are_those_of_torch(loss: str, gradient: float | None) -> None:
    start = torch.tensor(1.7, dtype=torch.float64) if loss == "the leaf itself" else torch.randn(5, dtype=torch.float64)
    ours, theirs = (start.clone().requires_grad_() for _ in range(2))
    for _ in range(3):  # added up, and nothing is left over from one to the next
        for leaf, run in ((ours, backward), (theirs, torch.autograd.backward)):
            value = LOSSES[loss](leaf)
            run(value, None if gradient is None else torch.full_like(value, gradient))
    assert torch.equal(ours.grad, theirs.grad)


@pytest.mark.parametrize(
    "loss", [torch.ones(3, requires_grad=True) * 2, torch.tensor(1.0), torch.ones((), requires_grad=True) * 1j]
)
def test_what_has_no_gradient_gets_the_error_of_torch(loss: Tensor) -> None:
    with pytest.raises(RuntimeError) as ours:
        backward(loss, None)
    with pytest.raises(RuntimeError) as theirs:
        torch.autograd.backward(loss)
    assert str(ours.value) == str(theirs.value)


# --- batches that are where they should be ------------------------------------------------------------------------------


class Taking(pl.LightningModule):
    """Takes its target out of the batch, as many modules do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 1)
        self.called: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        target = batch.pop("y") if isinstance(batch, dict) else batch.pop() if isinstance(batch, list) else batch[1]
        return F.mse_loss(self.layer(batch["x"] if isinstance(batch, dict) else batch[0])[:, 0], target)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class TakingAtTheStart(Taking):
    """Does it before the micro-batches are cut."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        batch["y"] = -batch["y"]


class Moving(Taking):
    """Has a rule of its own for the way to the device."""

    def transfer_batch_to_device(self, batch: Any, device: torch.device, dataloader_idx: int) -> Any:
        self.called.append("transfer")
        return super().transfer_batch_to_device(batch, device, dataloader_idx)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.called.append("after")
        return batch


class MovingData(pl.LightningDataModule):
    """As :class:`Moving`, of the data."""

    def __init__(self, batches: list[Any]) -> None:
        super().__init__()
        self.batches, self.called = batches, []

    def train_dataloader(self) -> Any:
        return loader(self.batches)

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.called.append("after")
        return batch


class Own:
    """A loader that gives out its own batches, where torch's makes new containers."""

    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.batches)


def rows(number: int = 4) -> dict[str, Tensor]:
    return {"x": torch.arange(2.0 * number).reshape(number, 2), "y": torch.arange(1.0 * number)}


@pytest.mark.parametrize("policy", [{"window": 1}, {"window": 2}, {"micro_batch": 2}, {"micro_batch": 4}], ids=str)
@pytest.mark.parametrize("kind", [dict, list, tuple])
def test_what_a_module_takes_out_of_its_batch_is_still_in_the_loaders(kind: type, policy: dict[str, Any]) -> None:
    batches = [rows() if kind is dict else kind(rows().values()) for _ in range(2)]
    trainer(callbacks=[GradientAccumulation(**policy)], max_epochs=2).fit(Taking(), Own(batches))
    assert [len(batch) for batch in batches] == [2, 2]


@pytest.mark.parametrize("policy", [{"window": 2}, {"micro_batch": 2}], ids=str)
def test_what_a_hook_puts_into_the_batch_is_trained_on_and_not_in_the_loaders(policy: dict[str, Any]) -> None:
    torch.manual_seed(0)
    found, plain, batches = TakingAtTheStart(), Taking(), [rows(), rows()]
    plain.load_state_dict(found.state_dict())
    trainer(callbacks=[GradientAccumulation(**policy)]).fit(found, Own(batches))
    assert all(torch.equal(batch["y"], rows()["y"]) for batch in batches)
    trainer(callbacks=[GradientAccumulation(**policy)]).fit(plain, loader([{**rows(), "y": -rows()["y"]} for _ in range(2)]))
    assert all(torch.equal(a, b) for a, b in zip(found.parameters(), plain.parameters(), strict=True))


@pytest.mark.parametrize("policy", [{"window": 2}, {"micro_batch": 2}], ids=str)
def test_hooks_around_the_transfer_are_called(policy: dict[str, Any]) -> None:
    module = Moving()
    trainer(callbacks=[GradientAccumulation(**policy)]).fit(module, loader([rows(), rows()]))
    assert module.called == 2 * ["transfer", "after"]
    data = MovingData([rows(), rows()])
    trainer(callbacks=[GradientAccumulation(**policy)]).fit(Taking(), datamodule=data)
    assert data.called == 2 * ["after"]


# --- who measures or steps, sees all of it ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "calls"),
    [
        ({"micro_batch": 2}, {"transfer_batch_to_device": 2, "optimizer_step": 2, "backward": 4, "training_step": 4}),
        ({"window": 2}, {"transfer_batch_to_device": 2, "optimizer_step": 1, "backward": 2, "training_step": 2}),
    ],
    ids=str,
)
def test_a_profiler_sees_every_call_of_lightnings(policy: dict[str, Any], calls: dict[str, int]) -> None:
    profiler = SimpleProfiler()
    trainer(callbacks=[GradientAccumulation(**policy)], profiler=profiler).fit(Taking(), loader([rows(), rows()]))
    seen = {name.split("]")[-1].split(".", 1)[-1]: len(times) for name, times in profiler.recorded_durations.items()}
    assert {name: seen[name] for name in calls} == calls
    assert seen["run_training_batch"] == 2


class Backwards(pl.Callback):
    """Is called around every backward."""

    def on_before_backward(self, trainer: Any, module: Any, loss: Tensor) -> None:
        module.called.append(f"before {float(loss):.6f}")

    def on_after_backward(self, trainer: Any, module: Any) -> None:
        module.called.append("after")


class OwnBackward(Taking):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        self.called.append(f"backward {float(loss):.6f}")
        super().backward(loss, *args, **kwargs)


@pytest.mark.parametrize("policy", [{"window": 2}, {"micro_batch": 2}], ids=str)
def test_hooks_around_a_backward_are_called_and_change_nothing(policy: dict[str, Any]) -> None:
    results = []
    for module, callbacks in ((Taking(), []), (Taking(), [Backwards()]), (OwnBackward(), [])):
        torch.manual_seed(0)
        module.layer.reset_parameters()
        trainer(callbacks=[GradientAccumulation(**policy), *callbacks]).fit(module, loader([rows(), rows(2)]))
        results.append((module.layer.weight.detach().clone(), module.called))
    (plain, nothing), (with_hooks, hooks), (with_own, own) = results
    torch.testing.assert_close(with_hooks, plain, rtol=1e-6, atol=0)
    torch.testing.assert_close(with_own, plain, rtol=1e-6, atol=0)
    number = 2 if "window" in policy else 3
    assert (len(nothing), len(hooks), len(own)) == (0, 2 * number, number)


@pytest.mark.parametrize("policy", [{"window": 2}, {"micro_batch": 2}], ids=str)
def test_optimizer_steps_are_counted_as_lightning_counts_them(policy: dict[str, Any]) -> None:
    run = trainer(callbacks=[GradientAccumulation(**policy)], max_epochs=2)
    run.fit(Taking(), loader([rows(), rows()]))
    steps = 2 if "window" in policy else 4
    progress = run.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer
    assert run.global_step == steps
    assert (progress.step.total.ready, progress.step.total.completed) == (steps, steps)
    assert (progress.zero_grad.total.ready, progress.zero_grad.total.completed) == (steps, steps)


class OwnStrategy(AccumulationStrategy):
    """Derived from this package's."""

    def __init__(self) -> None:
        super().__init__()
        self.called: list[str] = []

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self.called.append("training_step")
        return super().training_step(*args, **kwargs)

    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        self.called.append("backward")
        return super().backward(*args, **kwargs)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> Any:
        self.called.append("optimizer_step")
        return super().optimizer_step(*args, **kwargs)


@pytest.mark.parametrize("policy", [{"window": 2}, {"micro_batch": 2}], ids=str)
def test_a_strategy_of_the_users_own_is_called(policy: dict[str, Any]) -> None:
    strategy = OwnStrategy()
    trainer(strategy, callbacks=[GradientAccumulation(**policy)]).fit(Taking(), loader([rows(), rows()]))
    number = {name: strategy.called.count(name) for name in ("training_step", "backward", "optimizer_step")}
    micro_batches, steps = (2, 1) if "window" in policy else (4, 2)
    assert number == {"training_step": micro_batches, "backward": micro_batches, "optimizer_step": steps}


# --- around a loader batch --------------------------------------------------------------------------------------------------


class Logging(Taking):
    """Logs its loss, and notes what is called."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class HearingStart(Logging):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.called.append(f"module start {batch_idx} of {len(batch)}")


class SkippingTheRest(Logging):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None


class HearingEnd(Logging):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.called.append(f"module end {batch_idx}: {float(outputs['loss']):.6f}")


class HearingBeforeTransfer(Logging):
    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.called.append("before transfer")
        return {**batch, "x": 2 * batch["x"]}


class DataHearingBeforeTransfer(MovingData):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        self.called.append("before transfer")
        return batch


class CallbackAtStart(pl.Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        progress = trainer.fit_loop.epoch_loop.batch_progress
        module.called.append(f"callback start {batch_idx}, step {trainer.global_step}, {progress.current}")


class CallbackAtEnd(pl.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        progress, loss = trainer.fit_loop.epoch_loop.batch_progress, float(outputs["loss"])
        module.called.append(f"callback end {batch_idx}: {loss:.6f}, {trainer.callback_metrics['loss']:.6f}, {progress.current}")


class CallbackThatBringsAnother(pl.Callback):
    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            trainer.callbacks.append(CallbackAtStart())


def of_four_batches(module: Logging, strategy: str, callbacks: list[pl.Callback], data: bool = False) -> tuple[Any, ...]:
    """Train, and tell all that there is to be seen."""
    torch.manual_seed(0)
    module.layer.reset_parameters()
    batches = [{key: value + number for key, value in rows().items()} for number in range(4)]
    logger = CSVLogger(tempfile.mkdtemp())
    run = trainer(strategy, callbacks=list(callbacks), max_epochs=2, logger=logger, log_every_n_steps=1)
    if data:
        held = DataHearingBeforeTransfer(batches)
        run.fit(module, datamodule=held)
        module.called += held.called
    else:
        run.fit(module, Own(batches))
    written = [{k: v for k, v in row.items() if not k.startswith("window/")} for row in logger.experiment.metrics]
    metrics = {name: float(value) for name, value in run.callback_metrics.items() if not name.startswith("window/")}
    loop = run.fit_loop.epoch_loop
    progress = loop.batch_progress.state_dict(), loop.scheduler_progress.state_dict(), run.global_step
    return module.called, [row for row in written if "loss" in str(row)], metrics, progress, module.layer.weight.tolist()


@pytest.mark.parametrize("is_read", [True, False], ids=["version that was read", "another"])
@pytest.mark.parametrize(
    ("module", "callbacks", "data"),
    [
        (Logging, [], False),
        (Logging, [CallbackAtStart], False),
        (Logging, [CallbackAtEnd], False),
        (Logging, [CallbackAtStart, CallbackAtEnd], False),
        (Logging, [CallbackThatBringsAnother], False),
        (HearingStart, [], False),
        (SkippingTheRest, [CallbackAtStart], False),
        (HearingEnd, [CallbackAtEnd], False),
        (HearingBeforeTransfer, [], False),
        (Logging, [], True),
    ],
)
def test_around_a_loader_batch_everybody_hears_what_lightning_tells(
    module: type[Logging], callbacks: list[type[pl.Callback]], data: bool, is_read: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(seams, "changed", lambda *_: [] if is_read else [seams.SEAMS[0]])
    found = of_four_batches(module(), "accum", [callback() for callback in callbacks], data)
    assert found == of_four_batches(module(), "auto", [callback() for callback in callbacks], data)
    assert found[2]


class Swapping(pl.LightningModule):
    """Changes something about the Trainer in the middle of an epoch, in its fourth batch."""

    def __init__(self, swap: Callable[[Any, Callable[[str, Any], Any]], None]) -> None:
        super().__init__()
        self.layer, self.swap, self.called = nn.Linear(3, 1, bias=False, dtype=torch.float64), swap, []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            self.swap(self, self.noting)
        return self.layer(batch).square().mean()

    def noting(self, name: str, original: Any) -> Callable[..., Any]:
        """A hook that notes that it was called, and in which batch."""

        def hook(*arguments: Any, **options: Any) -> Any:
            self.called.append((name, self.trainer.fit_loop.epoch_loop.batch_progress.current.ready))
            return original(*arguments, **options)

        return hook

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Silent(pl.Callback):
    pass


class NowSilent(Silent):
    pass


HOOKS_AROUND_A_MICRO_BATCH = (
    "on_train_batch_start",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
    "on_train_batch_end",
)
TRANSFER = ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device")
OWNERS: dict[str, tuple[Callable[[pl.LightningModule], Any], tuple[str, ...]]] = {
    "a callback": (lambda module: module.trainer.callbacks[-1], HOOKS_AROUND_A_MICRO_BATCH),
    "the class of a callback": (lambda module: type(module.trainer.callbacks[-1]), HOOKS_AROUND_A_MICRO_BATCH),
    "the module": (
        lambda module: module,
        (
            *HOOKS_AROUND_A_MICRO_BATCH,
            *TRANSFER,
            "backward",
            "optimizer_zero_grad",
            "optimizer_step",
            "configure_gradient_clipping",
        ),
    ),
    "the class of the module": (type, ("on_train_batch_start", "on_after_backward", "optimizer_step", "transfer_batch_to_device")),
    "the data": (lambda module: module.trainer.datamodule, TRANSFER),
    "the strategy": (
        lambda module: module.trainer.strategy,
        (
            "on_train_batch_start",
            "training_step",
            "post_training_step",
            "pre_backward",
            "backward",
            "post_backward",
            "optimizer_step",
        ),
    ),
    "the precision plugin": (
        lambda module: module.trainer.precision_plugin,
        ("train_step_context", "forward_context", "pre_backward", "backward", "post_backward", "optimizer_step", "clip_gradients"),
    ),
}


def calls_after(swap: Callable[[Any, Any], None], strategy: str) -> list[tuple[str, int]]:
    """Calls of a training in which something is swapped in the middle, from the batch after that."""

    class Module(Swapping):
        """Anew, since its class may be changed."""

    class Callback(Silent):
        """As above."""

    module = Module(swap)
    batches = [torch.randn(4, 3, dtype=torch.float64) for _ in range(8)]
    data = pl.LightningDataModule()
    data.train_dataloader = lambda: loader(batches)
    run = trainer(strategy, callbacks=[Callback()], accumulate_grad_batches=2)
    run.fit(module, datamodule=data)
    assert module.called
    return [(name, batch) for name, batch in module.called if batch > 4]


@pytest.mark.some_cases(24)
@pytest.mark.parametrize(("owner", "hook"), [(owner, hook) for owner, (_, hooks) in OWNERS.items() for hook in hooks])
def test_a_hook_that_appears_in_the_middle_of_an_epoch_is_called_from_the_next_batch_on(owner: str, hook: str) -> None:
    def swap(module: Swapping, noting: Callable[[str, Any], Any]) -> None:
        found = OWNERS[owner][0](module)
        setattr(found, hook, noting(hook, getattr(found, hook)))

    found, expected = calls_after(swap, "accum"), calls_after(swap, "auto")
    assert found == expected != []


def test_a_callback_that_takes_the_place_of_another_in_the_middle_of_an_epoch_is_called_from_the_next_batch_on() -> None:
    def swap(module: Swapping, noting: Callable[[str, Any], Any]) -> None:
        named = {hook: noting(hook, getattr(pl.Callback, hook)) for hook in HOOKS_AROUND_A_MICRO_BATCH}
        module.trainer.callbacks[-1] = type("Noting", (pl.Callback,), named)()

    found, expected = calls_after(swap, "accum"), calls_after(swap, "auto")
    assert found == expected
    assert {name for name, _ in found} == set(HOOKS_AROUND_A_MICRO_BATCH)


def test_a_profiler_that_appears_in_the_middle_of_an_epoch_sees_every_call_from_the_next_batch_on() -> None:
    counts = []
    for strategy in ("accum", "auto"):

        def swap(module: Swapping, noting: Callable[[str, Any], Any]) -> None:
            module.called.append(("", 5))
            module.profiler = module.trainer.profiler = SimpleProfiler()

        module = Swapping(swap)
        run = trainer(strategy, accumulate_grad_batches=2)
        run.fit(module, loader([torch.randn(4, 3, dtype=torch.float64) for _ in range(8)]))
        recorded = module.profiler.recorded_durations
        wanted = ("training_step", "backward", "optimizer_step", "batch_to_device", "run_training_batch")
        counts.append({name: len(recorded[n]) for n in recorded for name in wanted if n.endswith(f".{name}") or n == name})
    # in the batch in which it appeared, Lightning had its backward and its optimizer step before it
    later = [{name: count - (count % 2 == 1) for name, count in side.items()} for side in counts]
    assert later[0] == later[1]
    assert later[0]["training_step"] == 4


@pytest.mark.parametrize("policy", [{"window": 2}, {"micro_batch": 2}], ids=str)
def test_a_batch_of_none_is_told_of_as_lightning_does(policy: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="train_dataloader yielded None"):
        trainer(callbacks=[GradientAccumulation(**policy)]).fit(Taking(), Own([rows(), None, rows()]))


# --- the scale of a window --------------------------------------------------------------------------------------------------


class Rows(pl.LightningModule):
    """A mean over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1, dtype=torch.float64)
        self.stepped_on: list[tuple[Tensor, int]] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return F.mse_loss(self.layer(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        module = self

        class Watched(torch.optim.SGD):
            def step(self, closure: Any = None) -> Any:
                loss = closure()
                gradient = module.layer.weight.grad
                module.stepped_on.append((gradient.clone(), gradient._version))
                return loss

        return Watched(self.parameters(), lr=0.1)  # never steps


def test_windows_of_a_power_of_two_of_samples_are_not_scaled_at_their_end() -> None:
    batches = [[torch.randn(n, 3, dtype=torch.float64), torch.randn(n, 1, dtype=torch.float64)] for n in (8, 8, 7, 8, 8)]
    module = Rows()
    trainer(callbacks=[GradientAccumulation(micro_batch=2)], precision="64-true").fit(module, loader(batches))
    for batch, (found, _) in zip(batches, module.stepped_on, strict=True):
        (expected,) = torch.autograd.grad(module.training_step(batch, 0), module.layer.weight)
        assert (found - expected).norm() / expected.norm() < 1e-15
    # what is written into a gradient: three micro-batches after the first, and the scale of windows before which none of 8 was
    assert [version for _, version in module.stepped_on] == [4, 3, 4, 4, 3]


def backward_without_options(self: pl.LightningModule, loss: Tensor) -> None:
    loss.backward()


def step_twice(self: pl.LightningModule, epoch: int, batch_idx: int, optimizer: Any, closure: Any = None) -> None:
    optimizer.step(closure)
    optimizer.optimizer.step()


def tick_twice(self: pl.LightningModule, scheduler: Any, metric: Any) -> None:
    scheduler.step()
    scheduler.step()


class Gaining(pl.LightningModule):
    """Gets a hook of its own when a batch begins, which does what Lightning's does not."""

    def __init__(self, hook: Callable[..., Any], name: str, batch: int) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 1, bias=False, dtype=torch.float64)
        nn.init.ones_(self.layer.weight)
        self.hook, self.name, self.batch = hook, name, batch

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if batch_idx == self.batch:
            setattr(self, self.name, partial(self.hook, self))

    def on_before_backward(self, loss: Tensor) -> None:
        """Lightning's calls around a backward are made."""

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return self.layer(batch).square().mean()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


@pytest.mark.parametrize("batch", [0, 4])
@pytest.mark.parametrize(
    ("hook", "name"),
    [(backward_without_options, "backward"), (step_twice, "optimizer_step"), (tick_twice, "lr_scheduler_step")],
    ids=["backward", "optimizer_step", "lr_scheduler_step"],
)
def test_a_hook_that_appears_after_training_began_may_do_what_lightnings_does_not(
    hook: Callable[..., Any], name: str, batch: int
) -> None:
    batches = [torch.randn(rows, 3, dtype=torch.float64) for rows in (1, 4, 2, 3, 5, 1, 2, 2)]
    whole = [torch.cat(batches[first : first + 2]) for first in range(0, len(batches), 2)]
    module, expected = Gaining(hook, name, batch), Gaining(hook, name, batch // 2)
    trainer(accumulate_grad_batches=2).fit(module, loader(batches))
    trainer("auto").fit(expected, loader(whole))
    torch.testing.assert_close(module.layer.weight, expected.layer.weight, rtol=1e-12, atol=0)
