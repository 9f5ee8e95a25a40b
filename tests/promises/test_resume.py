"""A checkpoint taken anywhere goes on to the bit, in another process, also from inside a window."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from resumed import ROWS, Module, assert_goes_on, train
from sharded import fsdp2, needs_sharding_on_cpu
from support import Interrupted, SaveAfter, Scalar, StatefulLoader, ddp, fp16_on_cpu, pad, relative_error, trainer, x

from lightning_accum import GradientAccumulation, Tokens

POLICIES = {
    "3": {"window": 3},
    "3, split": {"window": 3, "micro_batch": 2},
    "tokens": {"window": Tokens(60)},
    "by step": {"window": lambda step: 1 + step % 3},
    "one batch, split": {"window": 1, "micro_batch": 1},
    "carry": {"window": 4, "tail": "carry"},
    "row-wise": {"window": 3, "micro_batch": 2, "row_wise": "net"},
}


SOME = (1, 5, 9, 14)
"""Loader batches: a window of 3 has one of them, two, all, and again two."""


@pytest.mark.some_cases(1, 3)
@pytest.mark.parametrize("policy", POLICIES)
def test_a_checkpoint_inside_a_window_goes_on_to_the_bit(policy: str) -> None:
    expected = train(lambda: "accum", 1, **POLICIES[policy])
    for after in SOME if policy.startswith("3") else (2, 5, 7):
        train(lambda: "accum", 1, after, ends=True, **POLICIES[policy])
        found = train(lambda: "accum", 1, resumes=True, **POLICIES[policy])
        assert_goes_on(expected, found, f"checkpoint after {after}")


@pytest.mark.some_cases(0, 3)
@pytest.mark.parametrize("sync", ["window", "micro_batch"])
@pytest.mark.parametrize("policy", ["3", "3, split", "tokens"])
def test_on_two_ranks_too(policy: str, sync: str) -> None:
    expected = train(lambda: ddp(sync=sync), 2, **POLICIES[policy])
    for after in (1, 5, 6) if sync == "window" else (1, 5):
        train(lambda: ddp(sync=sync), 2, after, ends=True, **POLICIES[policy])
        found = train(lambda: ddp(sync=sync), 2, resumes=True, **POLICIES[policy])
        assert_goes_on(expected, found, f"checkpoint after {after}")


@pytest.mark.some_cases(0, 2)
@needs_sharding_on_cpu
@pytest.mark.parametrize("distributed", [False, True])
@pytest.mark.parametrize("sync", ["shard", "window", "micro_batch"])
def test_with_sharded_modules_as_the_run_that_took_the_checkpoint(sync: str, distributed: bool) -> None:
    """Which reduced its gradients for it, so that they were added up in another order than without."""

    def make() -> Any:
        return fsdp2(sync=sync, save_distributed_checkpoint=distributed)

    without = train(make, 2, window=3)
    for after in (4, 8):  # a window has one of its three, or two
        expected = train(make, 2, after, window=3)
        remove("inside.ckpt")
        train(make, 2, after, ends=True, window=3)
        assert_goes_on(expected, train(make, 2, resumes=True, window=3), f"checkpoint after {after}")
        error = relative_error(expected["parameters"].values(), without["parameters"].values())
        assert error < 2**-22  # some units of single precision


def remove(path: str) -> None:
    if Path(path).is_dir():
        shutil.rmtree(path)
    else:
        Path(path).unlink(missing_ok=True)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("sync", ["window", "micro_batch"])
@pytest.mark.parametrize(("before", "after"), [(2, 1), (1, 2), (2, 3)])
def test_partial_gradients_go_on_on_another_number_of_ranks(before: int, after: int, sync: str) -> None:
    """A window begun on some ranks and ended on others is the step of all that was in it."""

    def fit(ranks: int, by_rank: list[list[float]], resumes: bool) -> float:
        module = Scalar(by_rank=[[x(value) for value in own] for own in by_rank])
        callbacks = [GradientAccumulation(Tokens(10**6)), SaveAfter(None if resumes else 3, ends=not resumes)]
        run = trainer("accum" if ranks == 1 else ddp(sync=sync), devices=ranks, callbacks=callbacks)
        with nullcontext() if resumes else pytest.raises(Exception, match="Interrupted|"):
            run.fit(module, ckpt_path="inside.ckpt" if resumes else None)
        return module.total

    begun = [[float(10 * rank + i) for i in range(8)] for rank in range(before)]
    ended = [[float(100 * rank + i) for i in range(8)] for rank in range(after)]
    fit(before, begun, resumes=False)
    # these loaders do not know their place, so Lightning draws the first 5 of 8
    values = [value for own in begun for value in own[:3]] + [value for own in ended for value in own[:5]]
    assert fit(after, ended, resumes=True) == pytest.approx(sum(values) / len(values), rel=1e-14)


def interrupted(module: Scalar, window: int, after: int) -> None:
    """Train, take a checkpoint after a loader batch, and end there."""
    with pytest.raises(Interrupted):
        trainer("accum", callbacks=[GradientAccumulation(window), SaveAfter(after, ends=True)]).fit(module)


def test_a_checkpoint_of_another_policy_begins_a_new_window_and_says_so() -> None:
    interrupted(Scalar([x(i) for i in range(8)]), 4, after=3)
    module = Scalar([x(i) for i in range(8)])
    told = (
        r"after 3 loader batches of a window of 4 loader batches \(weight: auto\). Now it is 5 loader batches \(weight: auto\): the"
        " gradients in the checkpoint are dropped, and a new window begins"
    )
    with pytest.warns(UserWarning, match=told):
        trainer("accum", callbacks=[GradientAccumulation(5)]).fit(module, ckpt_path="inside.ckpt")
    assert module.total == pytest.approx((0 + 1 + 2 + 3 + 4) / 5, rel=1e-15)


def test_a_checkpoint_inside_a_window_loads_as_weights_only_and_says_what_it_adds(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lightning.pytorch.utilities.rank_zero")
    module = Scalar([x(i) for i in range(8)])
    module.big = torch.nn.Linear(1024, 1024, bias=False).double()
    module.loss = lambda batch: (module.w * batch).mean() + module.big.weight.square().mean()
    interrupted(module, 4, after=3)
    assert "after 3 loader batches of a window; their gradients add 8.0 MiB to it" in caplog.text
    state = torch.load("inside.ckpt", weights_only=True)["callbacks"]["GradientAccumulation"]
    assert state["window"]["losses"][0]["gradients"][0]["big.weight"].shape == (1024, 1024)


def test_at_a_boundary_a_checkpoint_has_no_gradients() -> None:
    interrupted(Scalar([x(i) for i in range(8)]), 4, after=4)
    state = torch.load("inside.ckpt", weights_only=True)["callbacks"]["GradientAccumulation"]
    assert "window" not in state
    assert all(isinstance(value, (int, float, str, list)) for value in state.values())


def test_a_checkpoint_inside_a_window_loads_in_plain_lightning() -> None:
    interrupted(Scalar([x(i) for i in range(8)]), 4, after=3)
    trainer("auto").fit(Scalar([x(i) for i in range(8)]), ckpt_path="inside.ckpt")


@pytest.mark.exhaustive
def test_reduced_at_micro_batches_too_a_split_window_of_tokens_goes_on_from_each_ranks_gradients() -> None:
    class Uneven(Module):
        def train_dataloader(self) -> StatefulLoader:
            rank = self.trainer.global_rank
            return StatefulLoader([pad(ROWS[i : i + 5] if rank == 0 else ROWS[i + 5 : i + 6 + i % 3]) for i in range(0, 48, 8)])

    def make() -> Any:
        return ddp(sync="micro_batch")

    policy = {"window": Tokens(60), "micro_batch": 2, "module": Uneven}
    expected = train(make, 2, **policy)
    for after in (1, 2, 3, 4):
        train(make, 2, after, ends=True, **policy)
        assert_goes_on(expected, train(make, 2, resumes=True, **policy), f"checkpoint after {after}")


def test_a_checkpoint_that_is_only_validated_does_not_go_on_in_a_later_fit() -> None:
    class Validated(Scalar):
        def validation_step(self, batch: torch.Tensor, batch_idx: int) -> None:
            pass

        def val_dataloader(self) -> Any:
            return self.train_dataloader()

    interrupted(Validated([x(i) for i in range(1, 7)]), 3, after=5)
    run, module = trainer("accum", callbacks=[GradientAccumulation(3)]), Validated([x(i) for i in range(1, 7)])
    run.validate(module, ckpt_path="inside.ckpt")
    run.fit(module)
    assert module.gradients == [2.0, 5.0]


def test_a_callback_that_has_been_through_a_fit_goes_on_from_a_checkpoint() -> None:
    interrupted(Scalar([x(i) for i in range(1, 7)]), 3, after=5)
    callback, module = GradientAccumulation(3), Scalar([x(i) for i in range(1, 7)])
    trainer("accum", callbacks=[callback]).fit(Scalar([x(1)] * 6))
    trainer("accum", callbacks=[callback]).fit(module, ckpt_path="inside.ckpt")
    assert module.gradients == pytest.approx(
        [(4 + 5 + 1) / 3], rel=1e-15
    )  # this loader begins anew, and Lightning knows that one batch is left


@pytest.mark.parametrize(("before", "after"), [("fp16", "plain"), ("plain", "fp16")])
def test_partial_gradients_go_on_in_another_precision(before: str, after: str) -> None:
    def fit(precision: str, ends: bool, resumes: bool) -> Scalar:
        module = Scalar([x(i).float() for i in range(1, 7)])
        module.w = torch.nn.Parameter(torch.zeros(()))
        plugins = [fp16_on_cpu()] if precision == "fp16" else None
        run = trainer("accum", plugins=plugins, callbacks=[GradientAccumulation(3), SaveAfter(5, ends=ends)])
        run.fit(module, ckpt_path="inside.ckpt" if resumes else None)
        return module

    with pytest.raises(Interrupted):
        fit(before, ends=True, resumes=False)
    module = fit(after, ends=False, resumes=True)
    assert module.gradients[-1] == pytest.approx((4 + 5 + 1) / 3, rel=1e-3)  # fp16 rounds the losses


def test_parameters_frozen_since_the_checkpoint_stay_where_they_are() -> None:
    class Two(Scalar):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.v = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

        def loss(self, batch: torch.Tensor) -> torch.Tensor:
            return ((self.w + self.v) * batch).mean()

    interrupted(Two([x(i) for i in range(1, 7)]), 3, after=5)
    module = Two([x(i) for i in range(1, 7)])
    module.v.requires_grad_(False)
    trainer("accum", callbacks=[GradientAccumulation(3)]).fit(module, ckpt_path="inside.ckpt")
    assert module.v.item() == -2.0  # where the first window, before the checkpoint, had put it
    assert module.w.item() != -2.0


# --- at the ends of epochs -----------------------------------------------------------------------------------------------


class Placed(Scalar):
    """Its loader knows its place; says at the end of each epoch what the epoch's loss was."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.epoch_losses: dict[int, float] = {}

    def train_dataloader(self) -> StatefulLoader:  # type: ignore[override]
        return StatefulLoader(list(self.batches))

    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return super().loss(batch) + batch.mean()  # a value that tells the windows apart

    def on_train_start(self) -> None:
        self.trainer.callbacks.append(EpochLosses())


class EpochLosses(Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if "window/loss_epoch" in trainer.callback_metrics:
            pl_module.epoch_losses[trainer.current_epoch] = float(trainer.callback_metrics["window/loss_epoch"])


def stopped_and_resumed(after: int, epochs: int, values: list[int], **policy: Any) -> tuple[Placed, Placed]:
    """Two modules: the one that took a checkpoint after a loader batch and ended, and the one that went on from it."""
    stopped, resumed = Placed([x(value) for value in values]), Placed([x(value) for value in values])
    callbacks = [GradientAccumulation(**policy), SaveAfter(after, ends=True)]
    with pytest.raises(Interrupted):
        trainer("accum", max_epochs=epochs, callbacks=callbacks).fit(stopped)
    trainer("accum", max_epochs=epochs, callbacks=[GradientAccumulation(**policy)]).fit(resumed, ckpt_path="inside.ckpt")
    return stopped, resumed


@pytest.mark.parametrize("after", [4, 5, 6, 10])
def test_a_tail_that_is_dropped_is_not_in_the_window_that_a_resumed_training_begins(after: int) -> None:
    stopped, resumed = stopped_and_resumed(after, 3, [1, 2, 3, 4, 5], window=3, tail="drop")
    assert stopped.gradients + resumed.gradients == [2.0, 2.0, 2.0]


@pytest.mark.parametrize("after", [1, 2, 3, 4, 5])
def test_a_resumed_window_has_the_size_that_it_began_with(after: int) -> None:
    stopped, resumed = stopped_and_resumed(after, 3, [1, 2, 3], window={0: 2, 1: 3}, tail="carry")
    expected = [1.5, (3 + 1) / 2, (2 + 3 + 1) / 3, (2 + 3) / 2]
    assert stopped.gradients + resumed.gradients == pytest.approx(expected, rel=1e-15)


@pytest.mark.parametrize("after", [2, 3, 4])
def test_the_loss_of_a_resumed_epoch_is_that_of_its_own_windows(after: int) -> None:
    whole = Placed([x(1), x(2), x(4)])
    trainer("accum", max_epochs=2, callbacks=[GradientAccumulation(2)]).fit(whole)
    _, resumed = stopped_and_resumed(after, 2, [1, 2, 4], window=2)
    assert resumed.epoch_losses[1] == whole.epoch_losses[1]


class Begins(Placed):
    """Writes down which epochs it has seen begin."""

    def __init__(self, values: list[Any]) -> None:
        super().__init__([None if value is None else x(value) for value in values])
        self.begun: list[int] = []

    def on_train_epoch_start(self) -> None:
        self.begun.append(self.current_epoch)


class SaveIn(Callback):
    """Takes a checkpoint in a hook, after so many loader batches of all epochs, and ends."""

    def __init__(self, hook: str, after: int) -> None:
        self.after = after
        setattr(self, hook, self.save)

    def save(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.fit_loop.epoch_loop.batch_progress.total.ready == self.after:
            trainer.save_checkpoint("inside.ckpt")
            raise Interrupted


def assert_goes_on_after(stops: list[tuple[str, int]], values: list[Any], limit: dict[str, int], **policy: Any) -> None:
    """A training with stops takes the steps of the one without, and sees the same epochs begin."""
    whole, parts = Begins(values), [Begins(values) for _ in range(len(stops) + 1)]
    trainer("accum", **limit, callbacks=[GradientAccumulation(**policy)]).fit(whole)
    for number, part in enumerate(parts):
        callbacks = [GradientAccumulation(**policy), *(SaveIn(*stop) for stop in stops[number : number + 1])]
        with pytest.raises(Interrupted) if number < len(stops) else nullcontext():
            trainer("accum", **limit, callbacks=callbacks).fit(part, ckpt_path="inside.ckpt" if number else None)
    assert [gradient for part in parts for gradient in part.gradients] == whole.gradients
    assert [epoch for part in parts for epoch in part.begun] == whole.begun


@pytest.mark.parametrize("limit", [{"max_epochs": 3}, {"max_epochs": -1, "max_steps": 6}])
@pytest.mark.parametrize("hook", ["on_train_batch_end", "on_train_epoch_end"])
def test_after_a_checkpoint_at_the_end_of_an_epoch_the_next_is_a_whole_one(hook: str, limit: dict[str, int]) -> None:
    stops = [(hook, 3), ("on_train_batch_end", 4), (hook, 6)]
    assert_goes_on_after(stops, [1, 2, 3], limit, window={0: 2, 1: 1, 2: 2})


@pytest.mark.parametrize("after", [2, 3, 5])
def test_a_checkpoint_after_a_loader_batch_that_is_none_goes_on_with_the_next(after: int) -> None:
    assert_goes_on_after([("on_train_batch_end", after)], [1, None, None, 4, None], {"max_epochs": 2}, window=3, tail="carry")


# --- states that cannot be read ------------------------------------------------------------------------------------------


def changed_state(change: Callable[[dict[str, Any]], None]) -> None:
    """Take a checkpoint inside a window, change its state, and go on from it."""
    interrupted(Scalar([x(i) for i in range(1, 7)]), 3, after=5)
    checkpoint = torch.load("inside.ckpt")
    change(checkpoint["callbacks"]["GradientAccumulation"])
    torch.save(checkpoint, "inside.ckpt")
    trainer("accum", callbacks=[GradientAccumulation(3)]).fit(Scalar([x(i) for i in range(1, 7)]), ckpt_path="inside.ckpt")


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda state: state.update(format=7), r"in format 7, and this version of lightning_accum reads format 4\. Resume"),
        (lambda state: state.pop("format"), "in format 0, and this version of lightning_accum reads format 4"),
        (lambda state: state.pop("total_weight"), "The state of GradientAccumulation in the checkpoint lacks total_weight. Resume"),
        (lambda state: state.update(new=1), "GradientAccumulation in the checkpoint has new, which this version does not know"),
        (lambda state: state["window"].pop("scale"), "The state of an unfinished window in the checkpoint lacks scale"),
        (lambda state: state["window"].update(new=1), "of an unfinished window in the checkpoint has new, which this version"),
        (
            lambda state: state["window"]["losses"][0].pop("weighed"),
            "a loss of an unfinished window in the checkpoint lacks weighed",
        ),
        (
            lambda state: state["window"]["losses"][0]["gradients"][0].update(w=torch.zeros(2, 3, dtype=torch.float64)),
            r"has a gradient of shape \(2, 3\) for the parameter w, which is of shape \(\)",
        ),
    ],
)
def test_a_state_of_another_version_or_module_is_an_error_that_says_what_it_has(
    change: Callable[[dict[str, Any]], None], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        changed_state(change)


def test_without_the_state_a_checkpoint_goes_on_from_lightnings_counters() -> None:
    """What the error about another format advises."""
    interrupted(Placed([x(i) for i in range(1, 7)]), 2, after=4)
    checkpoint = torch.load("inside.ckpt")
    del checkpoint["callbacks"]["GradientAccumulation"]
    torch.save(checkpoint, "inside.ckpt")
    module, run = Placed([x(i) for i in range(1, 7)]), trainer("accum", callbacks=[GradientAccumulation(2)])
    run.fit(module, ckpt_path="inside.ckpt")
    assert module.gradients == [5.5]
    assert run.global_step == run.callback_metrics["window/optimizer_steps"] == 3
