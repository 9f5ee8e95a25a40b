"""What comes after the last backward of a window: clipping, precision, hooks, closures, the tail, the end."""

from __future__ import annotations

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loops.optimization.automatic import Closure
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support import (
    NONE_LOSS,
    Language,
    Scalar,
    WrapsAnother,
    ddp,
    error_of_updates,
    fp16_on_cpu,
    loader,
    pad,
    relative_error,
    sentences,
    train_by_hand,
    trainer,
    x,
)

from lightning_accum import GradientAccumulation

ROWS = sentences(26)
MICRO = [pad(ROWS[i : i + 2]) for i in range(0, len(ROWS), 2)]
FULL = [pad(ROWS[i : i + 8]) for i in range(0, len(ROWS), 8)]


# --- clipping ---------------------------------------------------------------------------------------------------------


def test_configure_gradient_clipping_of_the_module_sees_the_full_gradient() -> None:
    class Clips(Scalar):
        def configure_gradient_clipping(self, optimizer, gradient_clip_val, gradient_clip_algorithm) -> None:
            self.seen = self.w.grad.item()
            self.clip_gradients(optimizer, gradient_clip_val=1.5, gradient_clip_algorithm="value")

    module = Clips([x(1), x(2, 6)])
    trainer(accumulate_grad_batches=2).fit(module)
    assert module.seen == 3.0
    assert module.total == 1.5


# --- precision --------------------------------------------------------------------------------------------------------


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("precision", ["64-true", "32-true", "bf16-mixed", "bf16-true", "16-mixed"])
def test_every_precision_is_as_near_to_the_full_batch_as_the_full_batch_itself(precision: str) -> None:
    """In low precision the full batch has rounding errors of its own. Against float64, windows may have no more than twice those
    (they round their gradients once more in every addition), while the mean of means is off by more."""

    def update(batches, strategy: str = "accum", **kwargs) -> list[torch.Tensor]:
        module = Language("sgd") if precision == "64-true" else Language("sgd").float()
        options = {"plugins": fp16_on_cpu()} if precision == "16-mixed" else {"precision": precision}
        trainer(strategy, max_epochs=2, **options, **kwargs).fit(module, loader(batches))
        return [(p.double() - q) for p, q in zip(module.parameters(), Language("sgd").parameters(), strict=True)]

    exact = [
        p - q for p, q in zip(*(m.parameters() for m in (train_by_hand(Language("sgd"), FULL, 2), Language("sgd"))), strict=True)
    ]
    error = {
        "windows": relative_error(update(MICRO, callbacks=[GradientAccumulation(4)]), exact),
        "full batch": relative_error(update(FULL, "auto"), exact),
        "mean of means": relative_error(update(MICRO, "auto", accumulate_grad_batches=4), exact),
    }
    assert error["windows"] <= max(2 * error["full batch"], 1e-12), error
    assert error["windows"] < 0.5 * error["mean of means"], error


def test_float16_gradients_of_heavy_micro_batches_keep_their_headroom() -> None:
    """Weights of thousands, with the default scale of 65536: unscaled weights would overflow float16 in the first window."""

    class Heavy(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.net = torch.nn.Linear(4, 2)
            self.steps = 0

        def training_step(self, batch, batch_idx):
            return torch.nn.functional.cross_entropy(self.net(batch), torch.zeros(len(batch), dtype=torch.long))

        def on_before_zero_grad(self, optimizer) -> None:
            self.steps += 1

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1)

    module = Heavy()
    counts = GradientAccumulation(2)
    torch.manual_seed(0)
    batches = [torch.randn(8192, 4) for _ in range(6)]
    trainer(callbacks=[counts], plugins=fp16_on_cpu(init_scale=65536.0)).fit(module, loader(batches))
    assert counts.state_dict()["optimizer_steps"] == 3  # the scaler found no inf


# --- the module's own hooks -------------------------------------------------------------------------------------------


def test_hooks_see_the_normalised_gradient_and_run_once_a_window() -> None:
    events: list[str] = []

    class Hooked(Scalar):
        def on_before_zero_grad(self, optimizer) -> None:
            events.append("zero_grad")

        def on_before_backward(self, loss) -> None:
            events.append(f"backward {loss.item() - self.w.item() * 0:.0f}")

        def on_before_optimizer_step(self, optimizer) -> None:
            events.append(f"step {self.w.grad.item():.0f}")

        def training_step(self, batch, batch_idx):
            return (batch - self.w.detach() + self.w).mean() if batch_idx < 0 else ((1 + self.w) * batch).mean()

    trainer(accumulate_grad_batches=2).fit(Hooked([x(2), x(4), x(6)], lr=0.0))
    assert events == ["zero_grad", "backward 2", "backward 4", "step 3", "zero_grad", "backward 6", "step 6"]


def test_optimizer_step_of_the_module_runs_once_a_window_and_gets_its_loss() -> None:
    losses = []

    class Steps(Scalar):
        def training_step(self, batch, batch_idx):
            return ((1 + self.w) * batch).mean()

        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure) -> None:
            assert isinstance(optimizer_closure, Closure)  # as with Lightning
            losses.append(optimizer.step(closure=optimizer_closure).item())

    module = Steps([x(1), x(2, 6), x(5)], lr=0.0)
    trainer(accumulate_grad_batches=2).fit(module)
    assert losses == [3.0, 5.0]


def test_optimizer_step_of_the_module_may_skip() -> None:
    class Skips(Scalar):
        def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure) -> None:
            optimizer_closure()
            if self.trainer.fit_loop.batch_idx > 1:
                optimizer.step()

    module = Skips([x(1), x(2), x(5), x(7)])
    counts = GradientAccumulation(2)
    trainer(callbacks=[counts]).fit(module)
    assert module.total == 6.0
    assert counts.state_dict()["optimizer_steps"] == 1


@pytest.mark.parametrize("hands_on", [True, False])
def test_backward_of_the_module_is_weighed_too(hands_on: bool) -> None:
    class Backs(Scalar):
        def backward(self, loss, *args, **kwargs) -> None:
            if hands_on:
                loss.backward(*args, **kwargs)
            else:
                loss.backward()

    module = Backs([x(1), x(1, 2, 3, 4, 5, 6, 7, 8, 9)])
    trainer(accumulate_grad_batches=2).fit(module)
    assert module.gradients == pytest.approx([4.6], rel=1e-15)


# --- closures ---------------------------------------------------------------------------------------------------------


class WithLBFGS(Scalar):
    def loss(self, x):
        return ((self.w - x) ** 2).mean()

    def configure_optimizers(self):
        return torch.optim.LBFGS(self.parameters(), max_iter=4)


@pytest.mark.parametrize("strategy", ["accum", "auto"])
def test_lbfgs_with_a_window_of_one_is_lightnings(strategy: str) -> None:
    module = WithLBFGS([x(1, 3), x(5, 9)])
    trainer(strategy, max_epochs=2).fit(module)
    assert module.w.item() == pytest.approx(7.0, rel=1e-9)


def test_lbfgs_over_ranks_runs_its_closure_again() -> None:
    module = WithLBFGS(by_rank=[[x(1, 3, 3)], [x(5)]])
    trainer(ddp(), devices=2).fit(module)
    assert module.w.item() == pytest.approx(3.0, rel=1e-9)


class LooksAhead(torch.optim.SGD):
    """Nesterov's method as it was first written: the gradient is that at the place to which momentum leads."""

    def step(self, closure=None):
        parameters = [parameter for group in self.param_groups for parameter in group["params"]]
        with torch.no_grad():
            for parameter in parameters:
                momentum = self.state[parameter].setdefault("momentum", torch.zeros_like(parameter))
                parameter.add_(momentum, alpha=0.9)
        with torch.enable_grad():
            loss = closure()
        with torch.no_grad():
            for parameter in parameters:
                self.state[parameter]["momentum"].mul_(0.9).sub_(parameter.grad, alpha=0.1)
                parameter.sub_(parameter.grad, alpha=0.1)
        return loss


class WithLooksAhead(Language):
    def configure_optimizers(self):
        return LooksAhead(self.parameters(), lr=0.1)


class WithWrapsAnother(Language):
    def configure_optimizers(self):
        return WrapsAnother(torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9))


@pytest.mark.parametrize("policy", [{"window": 4}, {"micro_batch": 2}])
@pytest.mark.parametrize("kind", [WithLooksAhead, WithWrapsAnother])
def test_optimizers_that_move_before_their_closure_or_wrap_another(kind: type[Language], policy: dict[str, int]) -> None:
    is_refused = kind is WithLooksAhead and "window" in policy
    windows, whole, start = kind("sgd"), kind("sgd"), kind("sgd")
    run = trainer(callbacks=[GradientAccumulation(**policy)], max_epochs=2)
    if is_refused:
        with pytest.raises(RuntimeError, match="calls its closure .* after it has changed parameters"):
            run.fit(windows, loader(MICRO))
        return
    run.fit(windows, loader(FULL if "micro_batch" in policy else MICRO))
    trainer("auto", max_epochs=2).fit(whole, loader(FULL))
    assert error_of_updates(windows, whole, start) <= 1e-12


def test_optimizer_that_calls_its_closure_twice_is_stopped() -> None:
    class Twice(torch.optim.SGD):
        def step(self, closure=None):
            closure()
            return super().step(closure)

    class Uses(Scalar):
        def configure_optimizers(self):
            return Twice(self.parameters(), lr=1.0)

    with pytest.raises(RuntimeError, match="more than once"):
        trainer(accumulate_grad_batches=2).fit(Uses([x(1), x(2)]))


# --- the tail ---------------------------------------------------------------------------------------------------------


def test_tail_drop_discards_the_gradients_and_says_so(caplog) -> None:
    module = Scalar([x(i) for i in range(1, 8)])
    with caplog.at_level("INFO", logger="lightning.pytorch.utilities.rank_zero"):
        run = trainer(callbacks=[GradientAccumulation(3, tail="drop")], max_epochs=2)
        run.fit(module)
    assert module.gradients == [2.0, 5.0, 2.0, 5.0]
    assert run.global_step == 4
    assert "the gradients of 1 loader batches at the end of epoch 0 are dropped" in caplog.text


def test_tail_drop_of_every_window_is_refused() -> None:
    module = Scalar([x(1), x(2)])
    with pytest.raises(MisconfigurationException, match="An epoch has 2 loader batches, and a window of 3 would never be full"):
        trainer(callbacks=[GradientAccumulation(3, tail="drop")]).fit(module)


def test_tail_drop_trains_where_only_some_epochs_are_too_short_for_their_windows() -> None:
    module = Scalar([x(1), x(2), x(3)])
    trainer(callbacks=[GradientAccumulation({0: 4, 1: 1}, tail="drop")], max_epochs=2).fit(module)
    assert module.gradients == [1.0, 2.0, 3.0]
    with pytest.raises(MisconfigurationException, match="a window of 4 would never be full"):
        trainer(callbacks=[GradientAccumulation({0: 4, 2: 1}, tail="drop")], max_epochs=2).fit(module)


def test_tail_carry_steps_at_an_early_stop() -> None:
    class Stops(Scalar):
        def on_train_epoch_end(self) -> None:
            self.trainer.should_stop = True

    module = Stops([x(1), x(2), x(6)])
    run = trainer(callbacks=[GradientAccumulation(2, tail="carry")], max_epochs=9)
    run.fit(module)
    assert module.gradients == [1.5, 6.0]
    assert run.global_step == 2


@pytest.mark.parametrize(("tail", "expected"), [("step", 4), ("drop", 2), ("carry", 4)])
def test_estimated_stepping_batches_knows_the_tail(tail: str, expected: int) -> None:
    module = Scalar([x(i) for i in range(1, 8)])
    run = trainer(callbacks=[GradientAccumulation(4, tail=tail)], max_epochs=2)
    estimates = []
    module.on_train_start = lambda: estimates.append(run.estimated_stepping_batches)
    run.fit(module)
    assert estimates == [expected] == [run.global_step]


# --- the limits of the Trainer ----------------------------------------------------------------------------------------


def test_max_steps_counts_optimizer_steps() -> None:
    module = Scalar([x(i) for i in range(1, 9)])
    run = trainer(callbacks=[GradientAccumulation(2)], max_steps=3, max_epochs=-1)
    run.fit(module)
    assert module.gradients == [1.5, 3.5, 5.5]
    assert run.global_step == 3


def test_should_stop_inside_a_window_steps_on_what_is_there() -> None:
    class Stops(Scalar):
        def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
            self.trainer.should_stop = batch_idx == 2

    module = Stops([x(i) for i in range(1, 9)])
    trainer(callbacks=[GradientAccumulation(2)]).fit(module)
    assert module.gradients == [1.5, 3.0]


def test_skipping_the_rest_of_the_epoch_steps_on_what_is_there() -> None:
    class Skips(Scalar):
        def on_train_batch_start(self, batch, batch_idx):
            return -1 if batch_idx == 3 else None

    module = Skips([x(i) for i in range(1, 9)])
    run = trainer(callbacks=[GradientAccumulation(2)], max_epochs=2)
    run.fit(module)
    assert module.gradients == [1.5, 3.0, 1.5, 3.0]


@pytest.mark.parametrize(
    ("options", "gradients"),
    [
        ({"limit_train_batches": 3}, [1.5, 3.0]),
        ({"limit_train_batches": 0.5}, [1.5, 3.5]),
        ({"overfit_batches": 3}, [1.5, 3.0]),
        ({"fast_dev_run": 3}, [1.5, 3.0]),
    ],
)
def test_limits_of_the_trainer(options: dict, gradients: list[float]) -> None:
    module = Scalar([x(i) for i in range(1, 9)])
    trainer(callbacks=[GradientAccumulation(2)], **options).fit(module)
    assert module.gradients == gradients


def test_iterable_dataset_without_a_length() -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self):
            return iter([x(1), x(2), x(3)])

    module = Scalar()
    trainer(callbacks=[GradientAccumulation(2)]).fit(module, torch.utils.data.DataLoader(Stream(), batch_size=None))
    assert module.gradients == [1.5, 3.0]


def test_dataloader_iter_steps_its_tail() -> None:
    class Draws(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.w = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))

        def training_step(self, dataloader_iter):
            batch, *_ = next(dataloader_iter)
            return (self.w * batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    module = Draws()
    trainer(callbacks=[GradientAccumulation(2)]).fit(module, loader([x(1), x(2), x(6)]))
    assert module.w.item() == -(1.5 + 6.0)


# --- one micro-batch on one rank: plain Lightning ----------------------------------------------------------------------


def test_window_of_one_is_plain_lightning_bit_for_bit_whatever_the_loss() -> None:
    class Odd(Language):
        def training_step(self, batch, batch_idx):
            return super().training_step(batch, batch_idx).sqrt() * 1.7  # no mean of anything

    plain, ours = Odd("adamw"), Odd("adamw")
    trainer("auto", max_epochs=2, precision="32-true").fit(plain.float(), loader(MICRO))
    trainer("accum", max_epochs=2, precision="32-true").fit(ours.float(), loader(MICRO))
    for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.equal(a, b)


def test_exception_in_a_window_reaches_the_user_and_gives_the_trainer_back() -> None:
    class Fails(Scalar):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise ValueError("of the user's own")
            return super().training_step(batch, batch_idx)

    run = trainer(callbacks=[GradientAccumulation(2)])
    with pytest.raises(ValueError, match="of the user's own"):
        run.fit(Fails([x(i) for i in range(8)]))
    assert run.accumulate_grad_batches == 1


def test_empty_window_leaves_parameters_and_optimizer_state_untouched_and_warns_once() -> None:
    class Counts(torch.optim.AdamW):
        calls = 0

        def step(self, closure=None):
            Counts.calls += 1
            return super().step(closure)

    class Uses(Scalar):
        def configure_optimizers(self):
            return Counts(self.parameters(), lr=1.0)

    module = Uses([None, None, NONE_LOSS, NONE_LOSS, None, NONE_LOSS, None, None, x(1), x(2)])
    run = trainer(callbacks=[GradientAccumulation(2)])
    with pytest.warns(UserWarning, match="without any weight") as caught:
        run.fit(module)
    assert sum("without any weight" in str(warning.message) for warning in caught) == 1
    assert Counts.calls == 1
    assert run.global_step == 3  # as in Lightning, what returns None counts


class GradientsAt(Callback):
    """What other callbacks see before the step."""

    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_before_optimizer_step(self, trainer, pl_module, optimizer) -> None:
        self.seen.append(pl_module.w.grad.item())


def test_callbacks_see_unscaled_gradients_in_fp16() -> None:
    watch = GradientsAt()
    trainer(callbacks=[GradientAccumulation(2), watch], plugins=fp16_on_cpu()).fit(Scalar([x(1), x(2, 6)]))
    assert watch.seen == [3.0]


def test_sparse_gradients_are_scaled_too() -> None:
    class Sparse(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.table = torch.nn.Embedding(5, 1, sparse=True).double()
            torch.nn.init.zeros_(self.table.weight)

        def training_step(self, batch, batch_idx):
            return self.table(batch).mean()

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=1.0)

    module = Sparse()
    trainer(accumulate_grad_batches=2).fit(module, loader([torch.tensor([0]), torch.tensor([0, 1, 2])]))
    assert (-module.table.weight.flatten()).tolist() == pytest.approx([2 / 4, 1 / 4, 1 / 4, 0, 0])


def test_subclass_of_the_callback_keeps_its_hooks() -> None:
    calls = []

    class Mine(GradientAccumulation):
        def on_train_batch_start(self, trainer, pl_module, batch, batch_idx) -> None:
            super().on_train_batch_start(trainer, pl_module, batch, batch_idx)
            calls.append(batch_idx)

    trainer(callbacks=[Mine(2)]).fit(Scalar([x(1), x(2)]))
    assert calls == [0, 1]


def test_loss_of_shape_one_is_a_loss() -> None:
    class One(Scalar):
        def loss(self, x):
            return (self.w * x).mean().reshape(1)

    module = One([x(1), x(1, 2, 3, 4, 5, 6, 7, 8, 9)])
    trainer(accumulate_grad_batches=2).fit(module)
    assert module.gradients == pytest.approx([4.6], rel=1e-15)


def test_loss_of_several_numbers_is_refused() -> None:
    class Several(Scalar):
        def loss(self, x):
            return self.w * x

    with pytest.raises((ValueError, RuntimeError), match=r"one number, but returned a tensor of shape \(2,\)"):
        trainer(callbacks=[GradientAccumulation(2, weight="equal")]).fit(Several([x(1, 2), x(3, 4)]))


def test_loss_without_a_gradient_gets_the_error_of_torch() -> None:
    class Frozen(Scalar):
        def loss(self, x):
            return self.w.detach() * x.mean()

    with pytest.raises(RuntimeError, match="does not require grad"):
        trainer(accumulate_grad_batches=2).fit(Frozen([x(1), x(2)]))
