"""Every hook of a module, callback, data module, strategy or plugin is called when Lightning would call it, and may do anything."""

import functools
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import OPTIMIZERS, Toy, fit, loader, relative_error, trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import GradientAccumulation, SampleCount
from lightning_accum.testing import assert_window_equals_batch

SPLIT_OR_NOT = pytest.mark.parametrize("policy", [{"window": 2}, {"micro_batch": 2}], ids=str)


def squares(net: nn.Module, batch: Tensor) -> Tensor:
    return net(batch).square().mean()


class Swapping(Toy):  # changes something about the Trainer before a training, or in the middle of an epoch
    def __init__(self, swap: Callable[[Any, Callable[[str, Any], Any]], None], is_late: bool) -> None:
        super().__init__(squares)
        self.swap, self.is_late, self.called = swap, is_late, []

    def on_train_start(self) -> None:
        if not self.is_late:
            self.swap(self, self.noting)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        if batch_idx == 3 and self.is_late:
            self.swap(self, self.noting)
        return super().training_step(batch, batch_idx)

    def noting(self, name: str, original: Any) -> Callable[..., Any]:  # a hook that notes that it was called, and in which batch

        def hook(*arguments: Any, **options: Any) -> Any:
            self.called.append((name, self.trainer.fit_loop.epoch_loop.batch_progress.current.ready))
            return original(*arguments, **options)

        return hook


AROUND_A_BATCH = (
    *("on_train_batch_start", "on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step"),
    "on_train_batch_end",
)
TRANSFER = ("on_before_batch_transfer", "on_after_batch_transfer", "transfer_batch_to_device")
OF_MODULE = ("backward", "optimizer_zero_grad", "optimizer_step", "configure_gradient_clipping")
OF_STRATEGY = ("training_step", "post_training_step", "pre_backward", "backward", "post_backward", "optimizer_step")
OF_PRECISION = ("train_step_context", "forward_context", "pre_backward", "backward", "post_backward", "optimizer_step")
OWNERS: dict[str, tuple[Callable[[pl.LightningModule], Any], tuple[str, ...]]] = {
    "a callback": (lambda module: module.trainer.callbacks[-1], AROUND_A_BATCH),
    "the class of a callback": (lambda module: type(module.trainer.callbacks[-1]), AROUND_A_BATCH),
    "the module": (lambda module: module, (*AROUND_A_BATCH, *TRANSFER, *OF_MODULE)),
    "the class of the module": (type, ("on_train_batch_start", "on_after_backward", "optimizer_step", "transfer_batch_to_device")),
    "the data": (lambda module: module.trainer.datamodule, TRANSFER),
    "the strategy": (lambda module: module.trainer.strategy, ("on_train_batch_start", *OF_STRATEGY)),
    "the precision plugin": (lambda module: module.trainer.precision_plugin, (*OF_PRECISION, "clip_gradients")),
}


@pytest.mark.some_cases(14, 18)
@pytest.mark.parametrize("is_late", [False, True], ids=["from the beginning", "in the middle"])
@pytest.mark.parametrize(("owner", "hook"), [(owner, hook) for owner, (_, hooks) in OWNERS.items() for hook in hooks])
def test_a_hook_that_is_put_into_an_object_or_its_class_is_called_from_then_on(owner: str, hook: str, is_late: bool) -> None:
    def calls_after(swap: Callable[[Any, Any], None], strategy: str, is_late: bool) -> list[tuple[str, int]]:
        """Calls of a training in which something is swapped, from the batch after that."""

        class Module(Swapping):
            """Anew, since its class may be changed."""

        class Callback(pl.Callback):
            """As above."""

        module, batches, data = Module(swap, is_late), [torch.randn(4, 4).double() for _ in range(8)], pl.LightningDataModule()
        data.train_dataloader = lambda: loader(batches)
        trainer(strategy, callbacks=[Callback()], accumulate_grad_batches=2).fit(module, datamodule=data)
        assert module.called
        return [(name, batch) for name, batch in module.called if batch > 4 or not is_late]

    def swap(module: Swapping, noting: Callable[[str, Any], Any]) -> None:
        found = OWNERS[owner][0](module)
        setattr(found, hook, noting(hook, getattr(found, hook)))

    found, expected = calls_after(swap, "accum", is_late), calls_after(swap, "auto", is_late)
    assert found == expected != []


def clip_to_a_tenth(optimizer: Any, **options: Any) -> None:
    for group in optimizer.param_groups:
        nn.utils.clip_grad_value_(group["params"], 0.1)


HOOKS: dict[str, Callable[..., Any]] = {
    "transfer_batch_to_device": lambda batch, *others: 2 * batch,
    "backward": lambda loss, **options: loss.backward(),
    "configure_gradient_clipping": clip_to_a_tenth,
    "optimizer_step": lambda epoch, batch_idx, optimizer, closure=None: (optimizer.step(closure), optimizer.optimizer.step()),
    "lr_scheduler_step": lambda scheduler, metric: (scheduler.step(), scheduler.step()),
}


class Hooked(Toy):  # has a hook that does not do what Lightning's does
    def __init__(self, optimizer: str, name: str, where: str) -> None:
        super().__init__(squares, optimizer)
        self.name, self.where = name, where
        if where == "the instance":
            self.gain()

    def gain(self) -> None:  # it looks like Lightning's own
        setattr(self, self.name, functools.wraps(getattr(self, self.name))(HOOKS[self.name]))

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if self.where == "the instance, in the middle" and batch_idx == self.trainer.num_training_batches // 2:
            self.gain()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9), "interval": "step"}]


@pytest.mark.some_cases(9)
@pytest.mark.parametrize(
    ("name", "where"),
    [
        *((name, where) for name in HOOKS for where in ("the instance", "the class")),
        *((name, "the instance, in the middle") for name in HOOKS if name not in TRANSFER),  # which is over when it begins
    ],
)
def test_a_window_is_one_batch_also_with_a_hook_that_does_something_else(name: str, where: str) -> None:
    def of_class(optimizer: str, name: str, where: str) -> Hooked:
        hook = HOOKS[name]
        kind = type("InClass", (Hooked,), {name: lambda self, *arguments, **options: hook(*arguments, **options)})
        return kind(optimizer, name, where)

    rows = torch.randn(20, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    batches = [list(part) for part in rows.split((1, 4, 2, 3, 5, 1, 2, 2))]
    for optimizer in OPTIMIZERS:
        make = functools.partial(of_class if where == "the class" else Hooked, optimizer, name, where)
        assert_window_equals_batch(make, batches, 2, optimizers=[None])


class Wrapped(Tensor):
    """A subclass: torch has ways of its own for those."""


LOSSES: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "one entry": lambda net, batch: squares(net, batch).reshape(1),
    "a subclass": lambda net, batch: squares(net, batch).as_subclass(Wrapped),
}


@pytest.mark.parametrize("loss", LOSSES)
def test_a_loss_of_any_kind_has_the_gradient_that_torch_gives_it(loss: str) -> None:
    rows = torch.randn(7, 4, dtype=torch.float64)
    policy = GradientAccumulation(2, weight=SampleCount())
    assert_window_equals_batch(lambda: Toy(LOSSES[loss]), [list(rows[:2]), list(rows[2:])], policy)


class Taking(Toy):  # takes its target out of the batch, as many modules do
    def __init__(self) -> None:
        super().__init__(squares, net=lambda: nn.Linear(2, 1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = F.mse_loss(self.net(batch["x"])[:, 0], batch.pop("y"))
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss


class Own(list[Any]):
    """A loader that gives out its own batches, where torch's makes new containers; a plain list would be one of loaders."""


def rows(number: int = 4) -> dict[str, Tensor]:
    x = torch.arange(2.0 * number, dtype=torch.float64)
    return {"x": x.reshape(number, 2), "y": x[:number]}


@SPLIT_OR_NOT
def test_what_a_hook_puts_into_the_batch_is_trained_on_and_not_in_the_loaders(policy: dict[str, Any]) -> None:
    found, plain, batches = Taking(), Taking(), [rows(), rows()]
    found.on_train_batch_start = lambda batch, batch_idx: batch.update(y=-batch["y"])  # before the micro-batches are cut
    fit(found, Own(batches), GradientAccumulation(**policy))
    assert all(torch.equal(batch["y"], rows()["y"]) for batch in batches)
    fit(plain, [{**rows(), "y": -rows()["y"]} for _ in range(2)], GradientAccumulation(**policy))
    assert relative_error(found.parameters(), plain.parameters()) == 0


@SPLIT_OR_NOT
def test_a_batch_of_none_is_told_of_as_lightning_does(policy: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match="train_dataloader yielded None"):
        fit(Taking(), Own([rows(), None, rows()]), GradientAccumulation(**policy))
