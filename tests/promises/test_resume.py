"""A checkpoint taken anywhere goes on, also inside a window: to the bit on one rank, to rounding over several."""

from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from resumed import assert_goes_on
from sharded import fsdp2, needs_sharding_on_cpu
from support import Interrupted, Manually, SaveAfter, Scalar, StatefulLoader, ddp, fit, warned, x

from lightning_accum import AccumulationError, AccumulationWarning, GradientAccumulation, Tokens

POLICIES: dict[str, dict[str, Any]] = {
    "3": {"window": 3},
    "3, split": {"window": 3, "micro_batch": 2},
    "tokens": {"window": Tokens(60)},
    "by step": {"window": lambda step: 1 + step % 3},
    "one batch, split": {"window": 1, "micro_batch": 1},
    "carry": {"window": 4, "tail": "carry"},
    "row-wise": {"window": 3, "micro_batch": 2, "row_wise": "net"},
    "float64 sums": {"window": 3, "micro_batch": 2, "accumulate_dtype": torch.float64},
    "tokens, float64 sums": {"window": Tokens(60), "accumulate_dtype": torch.float64},
}


@pytest.mark.some_cases(1, 2)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_checkpoint_inside_a_window_goes_on_to_the_bit(policy: str) -> None:
    # a window of 3 has one of these loader batches, two, all
    assert_goes_on(lambda: "accum", 1, (1, 5, 9) if policy.startswith("3") else (2, 5, 7), **POLICIES[policy])


@pytest.mark.some_cases(0, 2)
@pytest.mark.parametrize("sync", ["window", "micro_batch"])
@pytest.mark.parametrize("policy", ["3", "3, split", "tokens"])
def test_on_two_ranks_it_goes_on_to_rounding(policy: str, sync: str) -> None:
    assert_goes_on(lambda: ddp(sync=sync), 2, (1, 5), **POLICIES[policy])


@pytest.mark.some_cases(0, 1)
@needs_sharding_on_cpu
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("sync", ["shard", "window", "micro_batch"])
def test_so_does_a_sharded_module(sync: str, distributed: bool) -> None:
    # a window has one of its three, or two
    assert_goes_on(lambda: fsdp2(sync=sync, save_distributed_checkpoint=distributed), 2, (8,) if distributed else (4, 8), window=3)


def on_ranks(ranks: int, module: Scalar, window: Any, *callbacks: Callback, sync: str = "window", **kwargs: Any) -> Scalar:
    """The module, trained, or until a callback ends it."""
    strategy = "accum" if ranks == 1 else ddp(sync=sync)
    with pytest.raises(Exception, match="Interrupted|") if callbacks else nullcontext():
        fit(module, None, GradientAccumulation(window), *callbacks, strategy=strategy, devices=ranks, **kwargs)
    return module


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("sync", ["window", "micro_batch"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_a_window_begun_on_some_ranks_and_ended_on_others_is_one_step(before: int, after: int, sync: str) -> None:
    begun = [[x(10 * rank + i) for i in range(8)] for rank in range(before)]
    ended = [[x(100 * rank + i) for i in range(8)] for rank in range(after)]
    on_ranks(before, Scalar(by_rank=begun), Tokens(10**6), SaveAfter(3, ends=True), sync=sync)
    module = on_ranks(after, Scalar(by_rank=ended), Tokens(10**6), sync=sync, ckpt_path="inside.ckpt")
    # these loaders do not know their place, so Lightning draws the first 5 of 8
    values = [value.item() for own in begun for value in own[:3]] + [value.item() for own in ended for value in own[:5]]
    assert module.total == pytest.approx(sum(values) / len(values), rel=1e-14)


def test_a_checkpoint_before_the_step_of_a_window_says_that_it_lacks_it() -> None:
    batches = [x(i) for i in range(4)]
    with pytest.warns(AccumulationWarning, match="leaves this step out"):
        fit(Scalar(), batches, SaveAfter(2, hook="on_before_optimizer_step"), accumulate_grad_batches=2)
    with warned() as messages:
        fit(Scalar(), batches, SaveAfter(2), accumulate_grad_batches=2)
    assert not messages


def test_a_window_of_counted_terms_that_was_begun_on_other_ranks_begins_anew() -> None:
    """What its terms weigh was counted in batches that these ranks do not have."""

    class OfTwoCounts(Scalar):  # means over all numbers, and over those above 2
        def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
            return (self.w * batch).mean() + (self.w * batch[batch > 2]).mean()

    by_rank = [[x(10.0 * rank + i, float(i), 3.0) for i in range(8)] for rank in range(2)]
    on_ranks(2, OfTwoCounts(by_rank=by_rank), 5, SaveAfter(3, ends=True))
    with pytest.warns(AccumulationWarning, match="over 2 ranks"):
        (gradient,) = on_ranks(1, OfTwoCounts(by_rank=by_rank), 5, ckpt_path="inside.ckpt").gradients
    # these loaders do not know their place, so Lightning draws the first 5 of 8
    numbers = [value for i in range(5) for value in (i, i, 3)]
    above = [value for value in numbers if value > 2]
    assert gradient == pytest.approx(sum(numbers) / len(numbers) + sum(above) / len(above), rel=1e-14)


def numbers(kind: type[Scalar] = Scalar, count: int = 6) -> Scalar:
    return kind([x(i) for i in range(1, count + 1)])


def interrupted(module: Scalar, window: int, after: int, **kwargs: Any) -> None:
    """Train, take a checkpoint after a loader batch, and end there."""
    with pytest.raises(Interrupted):
        fit(module, None, GradientAccumulation(window), SaveAfter(after, ends=True), **kwargs)


def test_a_checkpoint_of_another_policy_begins_a_new_window_and_says_so() -> None:
    interrupted(numbers(count=8), 4, after=3)
    module = numbers(count=8)
    with pytest.warns(AccumulationWarning, match="5 loader batches"):
        fit(module, None, GradientAccumulation(5), ckpt_path="inside.ckpt")
    assert module.total == pytest.approx((1 + 2 + 3 + 4 + 5) / 5, rel=1e-15)


def test_a_checkpoint_holds_gradients_inside_a_window_only_and_loads_as_weights_only() -> None:
    sizes = []
    for after in (3, 4):
        module = numbers(count=8)
        module.big = torch.nn.Linear(256, 1024, bias=False).double()
        module.loss = lambda batch, module=module: (module.w * batch).mean() + module.big.weight.square().mean()
        interrupted(module, 4, after)
        torch.load("inside.ckpt", weights_only=True)
        sizes.append(Path("inside.ckpt").stat().st_size)
    assert sizes[0] - sizes[1] == pytest.approx(8 * 256 * 1024, rel=0.02)


def test_a_callback_that_has_been_through_a_fit_goes_on_from_a_checkpoint() -> None:
    interrupted(numbers(), 3, after=5)
    callback, module = GradientAccumulation(3), numbers()
    fit(Scalar([x(1)] * 6), None, callback)
    fit(module, None, callback, ckpt_path="inside.ckpt")
    assert module.gradients == pytest.approx([(4 + 5 + 1) / 3], rel=1e-15)  # this loader begins anew, and one batch is left


class Placed(Scalar):  # its loader knows its place. Notes which epochs begin, and the loss of each that ends.
    def __init__(self, values: list[Any]) -> None:
        super().__init__([None if value is None else x(value) for value in values])
        self.optimizer = super().configure_optimizers()
        self.optimizer.register_step_post_hook(lambda *_: self.gradients.append(self.w.grad.item()))
        self.begun: list[int] = []
        self.epoch_losses: dict[int, float] = {}

    def train_dataloader(self) -> StatefulLoader:  # type: ignore[override]
        return StatefulLoader(list(self.batches))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return super().loss(batch) + batch.mean()  # a value that tells the windows apart

    def on_train_epoch_start(self) -> None:
        self.begun.append(self.current_epoch)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        pass  # manual optimization calls it in each micro-batch

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer


Manual = type("Manual", (Manually, Placed), {})


def _masked(w: torch.Tensor, batch: torch.Tensor) -> torch.Tensor:
    losses = (w * batch[:, None] * x(1, 2, 4)).mean(1) * (batch > 0)
    return losses.sum() / (batch > 0).sum().clamp(min=1)


GOES_ON: dict[str, Any] = {  # a loss of the parameter and its batch
    "masked": _masked,
    "penalty": lambda w, batch: (w * batch).mean() + 3 * (w * w + w) / 7,
    "a function of a mean": lambda w, batch: ((w - batch).square().mean() + 1e-3).log(),
    "1 beside the count": lambda w, batch: (w * batch).sum() / (len(batch) + 1.0),
}


@pytest.mark.parametrize("name", GOES_ON)
def test_a_window_goes_on_by_what_its_terms_were_weighed_that_are_in_it(name: str) -> None:  # refused, or 0.2 off
    whole, begun, ended = modules = [Placed([]) for _ in range(3)]
    for module in modules:
        module.batches = [x(1, 2, -1), x(3, -1, 4), x(5, 6), x(7, -2), x(8, 9), x(-4, 3, 2), x(-5, 5), x(-3), x(4, 6)]
        module.loss = partial(GOES_ON[name], module.w)
    fit(whole, None, GradientAccumulation(3))
    interrupted(begun, 3, after=4)
    fit(ended, None, GradientAccumulation(3), ckpt_path="inside.ckpt")
    assert [*begun.gradients, *ended.gradients] == pytest.approx(whole.gradients, rel=1e-14)


class EpochLosses(Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if "window/loss_epoch" in trainer.callback_metrics:
            pl_module.epoch_losses[trainer.current_epoch] = float(trainer.callback_metrics["window/loss_epoch"])


def parts_of(stops: list[tuple[str, int]], values: list[Any], limit: Any, kind: type[Placed] = Placed, **policy: Any) -> None:
    """A training with stops takes the steps of the one without, sees the same epochs begin, and logs their losses."""
    whole, parts = kind(values), [kind(values) for _ in range(len(stops) + 1)]
    fit(whole, None, GradientAccumulation(**policy), EpochLosses(), **limit)
    for number, part in enumerate(parts):
        stop = [SaveAfter(after, ends=True, hook=hook) for hook, after in stops[number : number + 1]]
        with pytest.raises(Interrupted) if stop else nullcontext():
            path = "inside.ckpt" if number else None
            fit(part, None, GradientAccumulation(**policy), EpochLosses(), *stop, **limit, ckpt_path=path)
    assert [gradient for part in parts for gradient in part.gradients] == pytest.approx(whole.gradients, rel=1e-15)
    assert [epoch for part in parts for epoch in part.begun] == whole.begun
    found = {epoch: loss for part in parts for epoch, loss in part.epoch_losses.items()}
    assert found == pytest.approx({epoch: whole.epoch_losses[epoch] for epoch in found}, rel=1e-15)


END = "on_train_batch_end"
STOPS: dict[str, tuple[Any, ...]] = {
    **{f"dropped tail {n}": ([(END, n)], [1, 2, 3, 4, 5], {"window": 3, "tail": "drop"}, 3) for n in (4, 5, 6, 10)},
    **{f"size of its begin {n}": ([(END, n)], [1, 2, 3], {"window": {0: 2, 1: 3}, "tail": "carry"}, 3) for n in range(1, 6)},
    **{f"loss of its epoch {n}": ([(END, n)], [1, 2, 4], {"window": 2}, 2) for n in (2, 3, 4)},
    **{f"none {n}": ([(END, n)], [1, None, None, 4, None], {"window": 3, "tail": "carry"}, 2) for n in (2, 3, 5)},
    **{
        f"whole epochs, {hook}": ([(hook, 3), (END, 4), (hook, 6)], [1, 2, 3], {"window": {0: 2, 1: 1, 2: 2}}, 3)
        for hook in (END, "on_train_epoch_end")
    },
}
"""Where training stops, the values of an epoch (None is a batch that is missing), the policy, the epochs."""


@pytest.mark.some_cases(12)
@pytest.mark.parametrize("kind", [Placed, Manual])
@pytest.mark.parametrize("name", STOPS)
def test_a_training_with_stops_takes_the_steps_of_the_one_without(name: str, kind: type[Placed]) -> None:
    stops, values, policy, epochs = STOPS[name]
    parts_of(stops, values, {"max_epochs": epochs}, kind, **policy)
    if name.startswith("whole") and kind is Placed:
        parts_of(stops, values, {"max_epochs": -1, "max_steps": 6}, **policy)


def with_state(change: Callable[[dict[str, Any]], Any]) -> None:
    """Take a checkpoint at the end of a window, and change the callback's state in it."""
    interrupted(Placed([1, 2, 3, 4, 5, 6]), 2, after=4)
    checkpoint = torch.load("inside.ckpt")
    change(checkpoint["callbacks"])
    torch.save(checkpoint, "inside.ckpt")


@pytest.mark.parametrize("state", [{"format": 99}, {"optimizer_steps": 2}], ids=str)
def test_a_state_of_another_version_is_an_error(state: dict[str, int]) -> None:
    with_state(lambda callbacks: callbacks.update(GradientAccumulation=state))
    with pytest.raises(AccumulationError, match="format"):
        fit(numbers(), None, GradientAccumulation(2), ckpt_path="inside.ckpt")


def test_without_the_state_a_checkpoint_goes_on_from_lightnings_counters() -> None:
    with_state(lambda callbacks: callbacks.pop("GradientAccumulation"))
    module = Placed([1, 2, 3, 4, 5, 6])
    run = fit(module, None, GradientAccumulation(2), ckpt_path="inside.ckpt")
    assert module.gradients == [5.5]
    assert run.global_step == run.callback_metrics["window/optimizer_steps"] == 3
