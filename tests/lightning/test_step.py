"""What comes after the last backward of a window: clipping, precision, hooks, closures, the tail, the end."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import support
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.loops.optimization.automatic import Closure
from support import (
    Distance,
    Language,
    LooksAhead,
    Scalar,
    Toy,
    WrapsAnother,
    ddp,
    fit,
    fp16_on_cpu,
    loader,
    pad,
    sentences,
    trainer,
    x,
)
from torch import Tensor

from lightning_accum import AccumulationError, GradientAccumulation
from lightning_accum.testing import assert_window_equals_batch

ROWS = sentences(26)
MICRO = [pad(ROWS[i : i + 2]) for i in range(0, len(ROWS), 2)]
FULL = [pad(ROWS[i : i + 8]) for i in range(0, len(ROWS), 8)]
ONE_TO_EIGHT = [x(i) for i in range(1, 9)]


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("precision", ["64-true", "32-true", "bf16-mixed", "bf16-true", "16-mixed"])
def test_every_precision_is_as_near_to_the_full_batch_as_the_full_batch_itself(precision: str) -> None:
    """In low precision the full batch has rounding errors of its own. Against float64, windows may have no more than twice those
    (they round their gradients once more in every addition), while the mean of means is off by more."""

    def update(batches: Sequence[Any], strategy: str = "accum", **kwargs: Any) -> list[Tensor]:
        module = Language("sgd") if precision == "64-true" else Language("sgd").float()
        options = {"plugins": fp16_on_cpu()} if precision == "16-mixed" else {"precision": precision}
        trainer(strategy, max_epochs=2, **options, **kwargs).fit(module, loader(batches))
        return [(p.double() - q) for p, q in zip(module.parameters(), Language("sgd").parameters(), strict=True)]

    by_hand = support.train_by_hand(Language("sgd"), FULL, 2)
    exact = [p - q for p, q in zip(by_hand.parameters(), Language("sgd").parameters(), strict=True)]
    error = {
        "windows": support.relative_error(update(MICRO, callbacks=[GradientAccumulation(4)]), exact),
        "full batch": support.relative_error(update(FULL, "auto"), exact),
        "mean of means": support.relative_error(update(MICRO, "auto", accumulate_grad_batches=4), exact),
    }
    assert error["windows"] <= max(2 * error["full batch"], 1e-12), error
    assert error["windows"] < 0.5 * error["mean of means"], error


def test_float16_gradients_of_heavy_micro_batches_keep_their_headroom() -> None:
    """Weights of thousands, with the default scale of 65536: unscaled weights would overflow float16 in the first window."""
    windows, data = list[Any](), [[torch.randn(8192, 4), torch.zeros(8192, dtype=torch.long)] for _ in range(6)]
    module = Toy(support.classified).float()
    module.on_window_end = windows.append
    fit(module, data, GradientAccumulation(2), plugins=fp16_on_cpu(init_scale=65536.0))
    assert [window.has_stepped for window in windows] == [True] * 3  # the scaler found no inf


@pytest.mark.parametrize("policy", [{"window": 2}, {"micro_batch": 2}, {"micro_batch": "auto"}], ids=str)
def test_gradients_are_unscaled_and_clipped_once_a_window(policy: dict[str, Any]) -> None:
    batches = [x(1, 2, 3), x(4, 5), x(10), x(20)] if "window" in policy else [x(1, 2, 3, 4, 5), x(10, 20)]
    module, seen = Scalar([batch.float() for batch in batches]), list[float]()
    looks = LambdaCallback(on_before_optimizer_step=lambda run, module, _: seen.append(module.w.grad.item()))
    vars(plugin := fp16_on_cpu())["strategy"] = "its own"
    run = fit(module.float(), None, GradientAccumulation(**policy), looks, plugins=plugin, gradient_clip_val=4.0)
    assert seen == module.gradients == pytest.approx([3.0, 15.0])
    assert module.total == pytest.approx(3.0 + 4.0, rel=1e-5)
    assert (run.global_step, vars(plugin)["strategy"]) == (2, "its own")


def test_hooks_see_the_losses_of_micro_batches_and_the_normalised_gradient_of_their_window() -> None:
    class Hooked(Scalar):
        def setup(self, stage: str) -> None:
            self.events: list[str] = []  # the check, which tries hooks, takes back what they change in the module

        def loss(self, x: Tensor) -> Tensor:
            return ((1 + self.w) * x).mean()

        def on_before_backward(self, loss: Tensor) -> None:
            self.events.append(f"backward {loss.item():.0f}")

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            self.events.append(f"step {self.w.grad.item():.0f}")

        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            assert isinstance(optimizer_closure, Closure)  # as with Lightning
            self.events.append(f"loss {optimizer.step(closure=optimizer_closure).item():.0f}")

    fit(module := Hooked([x(1), x(2, 6), x(5)], lr=0.0), accumulate_grad_batches=2)
    assert module.events == ["backward 1", "backward 4", "step 3", "loss 3", "backward 5", "step 5", "loss 5"]


def test_optimizer_step_of_the_module_may_skip() -> None:
    class Skips(Scalar):
        def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any) -> None:
            optimizer_closure()
            if self.trainer.fit_loop.batch_idx > 1:
                optimizer.step()

    run = fit(module := Skips([x(1), x(2), x(5), x(7)]), None, GradientAccumulation(2))
    assert module.total == 6.0
    assert run.callback_metrics["window/optimizer_steps"] == 1


class WithOptimizer(Distance):
    def __init__(self, make: Callable[[Any], torch.optim.Optimizer], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.configure_optimizers = lambda: make(self.parameters())


lbfgs, looks_ahead = partial(torch.optim.LBFGS, max_iter=4), partial(LooksAhead, lr=0.1)


@pytest.mark.parametrize(
    ("data", "options", "w"),
    [
        ({"batches": [x(1, 3), x(5, 9)]}, {}, 7.0),
        ({"batches": [x(1, 2, 3, 4, 15)]}, {"callbacks": [GradientAccumulation(micro_batch=2)]}, 5.0),
        ({"by_rank": [[x(1, 3, 3)], [x(5)]]}, {"devices": 2}, 3.0),
    ],
    ids=["whole", "split", "ranks"],
)
def test_lbfgs_runs_a_window_of_one_loader_batch_as_often_as_it_wants(data: Any, options: dict[str, Any], w: float) -> None:
    module = WithOptimizer(lbfgs, **data)
    trainer(ddp() if "devices" in options else "accum", max_epochs=2, **options).fit(module)
    assert module.w.item() == pytest.approx(w, rel=1e-9)


class Twice(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        closure()
        return super().step(closure)


def wraps_another(parameters: Any) -> torch.optim.Optimizer:
    return WrapsAnother(torch.optim.SGD(parameters, lr=0.1, momentum=0.9))


@pytest.mark.parametrize(
    ("optimizer", "policy"),
    [(looks_ahead, {"micro_batch": 2}), (wraps_another, {"micro_batch": 2}), (wraps_another, {"window": 4})],
)
def test_optimizers_that_move_before_their_closure_or_wrap_another(optimizer: Any, policy: dict[str, Any]) -> None:
    size = 2 if "window" in policy else 8
    batches = [ROWS[i : i + size] for i in range(0, len(ROWS), size)]
    assert_window_equals_batch(Language, batches, GradientAccumulation(**policy), optimizers=[optimizer], collate=pad)


@pytest.mark.parametrize("optimizer", [looks_ahead, lbfgs, lambda parameters: Twice(parameters, lr=1.0)])
def test_windows_of_optimizers_that_run_their_closure_elsewhere_or_again_are_refused(optimizer: Any) -> None:
    with pytest.raises(AccumulationError):
        fit(WithOptimizer(optimizer, ONE_TO_EIGHT), accumulate_grad_batches=2)


SEVEN = ONE_TO_EIGHT[:7]
TWICE = {"max_epochs": 2}
ENDS: dict[str, tuple[dict[str, Any], dict[str, Any], Any, list[float]]] = {
    "tail=step": ({"window": 4}, TWICE, SEVEN, [2.5, 6.0] * 2),
    "tail=drop": ({"window": 3, "tail": "drop"}, TWICE, SEVEN, [2.0, 5.0] * 2),
    "tail=drop of one epoch": ({"window": {0: 4, 1: 1}, "tail": "drop"}, TWICE, SEVEN[:3], [1.0, 2.0, 3.0]),
    "tail=carry": ({"window": 4, "tail": "carry"}, TWICE, SEVEN, [2.5, 4.75, 3.5, 6.5]),
    "tail=carry and an early stop": ({"window": 2, "tail": "carry"}, {"max_epochs": 9}, "epoch", [1.5, 3.0]),
    "by step": ({"window": lambda step: 1 + step}, TWICE, SEVEN, [1.0, 2.5, 5.0, 7.0, 3.0, 6.5]),
    "by step, drop": ({"window": lambda step: [4, 3, 4][step % 3], "tail": "drop"}, TWICE, SEVEN, [2.5, 6.0, 2.5]),
    "by step, carry": ({"window": lambda step: [1, 4, 2][step % 3], "tail": "carry"}, TWICE, SEVEN, [1.0, 3.5, 6.5] * 2),
    "an early stop inside a window": ({"window": 2}, {}, "stop", [1.5, 3.0]),
    "an epoch that is cut short": ({"window": 2}, TWICE, "skip", [1.5, 3.0] * 2),
    "max_steps": ({"window": 2}, {"max_steps": 3, "max_epochs": -1}, ONE_TO_EIGHT, [1.5, 3.5, 5.5]),
    "limit_train_batches": ({"window": 2}, {"limit_train_batches": 3}, ONE_TO_EIGHT, [1.5, 3.0]),
    "overfit_batches": ({"window": 2}, {"overfit_batches": 3}, ONE_TO_EIGHT, [1.5, 3.0]),
    "fast_dev_run": ({"window": 2}, {"fast_dev_run": 3}, ONE_TO_EIGHT, [1.5, 3.0]),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_window_that_is_cut_short_steps_on_what_is_there_and_steps_are_those_that_were_estimated(name: str) -> None:
    class Stops(Scalar):  # stops, or skips the rest of the epoch, in a batch or at the end of an epoch
        def __init__(self, how: str) -> None:
            super().__init__(ONE_TO_EIGHT if how != "epoch" else ONE_TO_EIGHT[:3])
            self.how = how

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if self.how == "skip" and batch_idx == 3 else None

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            self.trainer.should_stop = self.how == "stop" and batch_idx == 2

        def on_train_epoch_end(self) -> None:
            self.trainer.should_stop = self.how == "epoch"

    policy, options, data, gradients = ENDS[name]
    module = Stops(data) if isinstance(data, str) else Scalar(data)
    run, estimates = trainer(callbacks=[GradientAccumulation(**policy)], **options), []
    module.on_train_start = lambda: estimates.append(run.estimated_stepping_batches)
    run.fit(module)
    assert module.gradients == gradients
    assert run.global_step == len(gradients)
    assert isinstance(data, str) or estimates == [len(gradients)]


def test_dataloader_iter_steps_its_tail() -> None:
    class Draws(Scalar):
        def training_step(self, dataloader_iter: Any) -> Tensor:
            batch, *_ = next(dataloader_iter)
            with pytest.raises(MisconfigurationException, match="dataloader_iter"):  # Lightning reads the signature
                self.log("x", 1.0)
            return (self.w * batch).mean()

    fit(module := Draws(), [x(1), x(2), x(6)], GradientAccumulation(2))
    assert module.total == 1.5 + 6.0
