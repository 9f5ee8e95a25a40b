"""Where Lightning's and torch's general ways are passed by, nothing is different: the same gradients, and every hook is called."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.profilers import SimpleProfiler
from support import loader, trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import GradientAccumulation
from lightning_accum.backward import backward

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


def test_a_profiler_sees_every_call_of_lightnings() -> None:
    profiler = SimpleProfiler()
    trainer(callbacks=[GradientAccumulation(micro_batch=2)], profiler=profiler).fit(Taking(), loader([rows(), rows()]))
    seen = {name.split("]")[-1].split(".", 1)[-1]: len(times) for name, times in profiler.recorded_durations.items()}
    assert {name: seen[name] for name in ("transfer_batch_to_device", "optimizer_step", "backward")} == {
        "transfer_batch_to_device": 2,
        "optimizer_step": 2,
        "backward": 4,
    }


@pytest.mark.parametrize("policy", [{"window": 2}, {"micro_batch": 2}], ids=str)
def test_optimizer_steps_are_counted_as_lightning_counts_them(policy: dict[str, Any]) -> None:
    run = trainer(callbacks=[GradientAccumulation(**policy)], max_epochs=2)
    run.fit(Taking(), loader([rows(), rows()]))
    steps = 2 if "window" in policy else 4
    progress = run.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer
    assert run.global_step == steps
    assert (progress.step.total.ready, progress.step.total.completed) == (steps, steps)
    assert (progress.zero_grad.total.ready, progress.zero_grad.total.completed) == (steps, steps)
