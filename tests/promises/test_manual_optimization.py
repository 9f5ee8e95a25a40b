"""Modules that optimize by themselves, unchanged: windows equal their own run on joined batches."""

import copy
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import Unsized, assert_one_window_one_batch, windows_of
from manual_modules import ALL, GAN, MAML, SIZES, Dependent, Manual, RawOptimizers, Toggled, TwoSchedulers, Unclipped, draw
from sharded import fsdp2, needs_sharding_on_cpu
from support import (
    ManualToy,
    SaveAfter,
    StatefulLoader,
    classified,
    ddp,
    error_of_updates,
    fit,
    fp16_on_cpu,
    labelled,
    loader,
    refused,
    warned,
)
from torch import Tensor, nn
from torch.nn.functional import softplus
from torch.utils.data import DataLoader, default_collate

from lightning_accum import AccumulationWarning, DoesNotAddUpError, GradientAccumulation
from lightning_accum.testing import EXACT, assert_window_equals_batch, compare_window_with_batch


def assert_windows_equal_batches(kind: Any, ranks: int = 1, policy: Any = 3, engine: str = "", epochs: int = 1) -> None:
    by_rank = [draw(kind, rank) for rank in range(ranks)]
    engine = engine or ("ddp" if ranks == 2 else "accum")
    for optimizer in ("sgd", "adamw"):
        arguments = {"collate": default_collate, "epochs": epochs}
        assert_one_window_one_batch(partial(kind, optimizer), by_rank, policy, engine, **arguments)


@pytest.mark.some_cases(3, 5)
@pytest.mark.parametrize("kind", ALL)
@pytest.mark.parametrize("ranks", [1, 2])
def test_windows_equal_the_modules_own_run_on_joined_batches(kind: type[Manual], ranks: int) -> None:
    with warned() as messages:
        assert_windows_equal_batches(kind, ranks, epochs=2)
    assert not messages


@needs_sharding_on_cpu
def test_sharded_modules() -> None:
    assert_windows_equal_batches(Unclipped, 2, engine="fsdp2")


def batches_of(kind: type[Manual], rank: int = 0) -> list[Any]:
    return [default_collate(rows) for rows in draw(kind, rank)]


def full_batches(size: int = 3, kind: type[Manual] = GAN) -> list[Any]:
    return [default_collate(rows) for rows in windows_of([draw(kind)], size)]


class Ranked(GAN):  # each rank has a loader of its own; one may have no second batch
    without = -1

    def train_dataloader(self) -> Any:
        batches = batches_of(GAN, self.trainer.global_rank)
        batches[1] = None if self.trainer.global_rank == self.without else batches[1]
        return loader(batches)


@pytest.mark.parametrize("kind", [GAN, TwoSchedulers, RawOptimizers, MAML])
def test_steps_and_schedulers_count_as_in_the_modules_own_run(kind: type[Manual]) -> None:
    plain, run = fit(kind(), full_batches(kind=kind), strategy="auto"), fit(kind(), batches_of(kind), accumulate_grad_batches=3)
    found, expected = ([config.scheduler.last_epoch for config in one.lr_scheduler_configs] for one in (run, plain))
    assert found == expected == ([3, 3] if kind is TwoSchedulers else [])
    assert run.global_step == plain.global_step  # Lightning counts those of its wrappers


def test_what_is_tried_out_steps_no_scheduler() -> None:
    run = fit(TwoSchedulers(), batches_of(TwoSchedulers), GradientAccumulation(3, scheduler_counts="micro_batches"))
    assert [config.scheduler.last_epoch for config in run.lr_scheduler_configs] == [len(SIZES[0])] * 2


def test_loss_scale_of_float16() -> None:
    """The sums are kept without the scale, which the first optimizer's step may change before the second's backward."""
    modules = []
    for data, arguments in ((batches_of(GAN), {"accumulate_grad_batches": 3}), (full_batches(), {"strategy": "auto"})):
        precision = fp16_on_cpu()
        precision.forward_context = precision.train_step_context = lambda: torch.autocast("cpu", enabled=False)
        precision.scaler.set_growth_factor(4.0)
        precision.scaler.set_growth_interval(1)
        modules.append(Unclipped())
        fit(modules[-1], data, plugins=[precision], **arguments)
        assert precision.scaler.get_scale() == 256 * 4**6
    assert error_of_updates(modules[0], modules[1], Unclipped()) < 1e-12


def test_the_callback_logs_each_loss_once_a_window() -> None:
    module, before, seen = GAN(), GAN(), list[Any]()
    module.on_window_end = lambda window: seen.append((window.loss, window.loader_batches, window.has_stepped))
    run = fit(module, batches_of(GAN), GradientAccumulation(3))
    fit(before, full_batches()[:-1], strategy="auto")
    real, noise = full_batches()[-1]  # the last window, whose losses depend on the parameters before it
    fake = before.generator(noise)
    logits = {"window/loss": -before.discriminator(fake), "window/loss_2": -before.discriminator(real)}
    for name, value in {**logits, "window/loss_3": before.discriminator(fake)}.items():
        assert run.callback_metrics[name].item() == pytest.approx(softplus(value).mean().item(), rel=1e-12)
    assert (run.callback_metrics["window/optimizer_steps"], run.callback_metrics["window/total_weight"]) == (3, sum(SIZES[0]))
    assert [one[1:] for one in seen] == [(3, True), (3, True), (1, True)]
    assert float(seen[-1][0]) == pytest.approx(run.callback_metrics["window/loss"].item(), rel=1e-12)


@pytest.mark.filterwarnings("error::lightning_accum.AccumulationWarning")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])  # a module of float32 is tried out in a copy
def test_a_step_before_a_loss_that_depends_on_it_is_an_error(dtype: torch.dtype) -> None:
    batches = [tuple(part.to(dtype) for part in batch) for batch in batches_of(GAN)]
    refused(Dependent().to(dtype), batches, accumulate_grad_batches=3, error=DoesNotAddUpError, match="Call step after the last")
    with warned() as of_toggled:
        fit(Toggled().to(dtype), batches, accumulate_grad_batches=3)
    assert not of_toggled
    with pytest.warns(AccumulationWarning, match="optimizer 1"):
        fit(Dependent(), batches_of(GAN), GradientAccumulation(3, check=False))
    fit(Dependent(), batches_of(GAN))


class OneOptimizer(GAN):  # the first optimizer steps on what ``backwards`` leaves
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()[0]
        optimizer.zero_grad()
        self.backwards(batch, batch_idx)
        optimizer.step()


class Sometimes(GAN):
    """A parameter that only some rows use, which a joined batch always has and a micro-batch may not, and one that none does."""

    def build(self) -> None:
        super().build()
        self.shift, self.never = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))

    def configure_optimizers(self) -> Any:
        both = [*self.generator.parameters(), self.shift, self.never]
        return [torch.optim.AdamW(both, lr=0.1, weight_decay=0.5), torch.optim.SGD(self.discriminator.parameters(), lr=0.1)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        is_large, fake = batch[1][:, :1] > 0.8, self.generator(batch[1])
        for optimizer in self.optimizers():
            optimizer.zero_grad()
        self.manual_backward(softplus(-self.discriminator(fake + is_large * self.shift if is_large.any() else fake)).mean())
        for optimizer in self.optimizers():
            optimizer.step()


class NeverZero(Manual):  # gradients are never cleared: the module's own run adds each batch's to those before
    def training_step(self, batch: Any, batch_idx: int) -> None:
        opt_g, _ = self.optimizers()
        self.manual_backward(self.discriminator(self.generator(batch[1])).square().mean())
        opt_g.step()


class OwnScheduler(GAN):  # a scheduler that the Trainer does not know of
    def on_train_start(self) -> None:
        self.kept = {"schedule": torch.optim.lr_scheduler.ExponentialLR(self.optimizers(use_pl_optimizer=False)[0], 0.5)}

    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.kept["schedule"].step()


class StepsInHook(GAN):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.generator(batch[1]).square().mean())

    def on_train_batch_end(self, *_: Any) -> None:
        optimizer = self.optimizers()[0]
        optimizer.step()
        optimizer.zero_grad()


@pytest.mark.parametrize(("kind", "ranks"), [(Sometimes, 2), (NeverZero, 1), (OwnScheduler, 1), (StepsInHook, 1)])
@pytest.mark.filterwarnings("error::lightning_accum.AccumulationWarning")
def test_modules_of_unusual_steps_are_exact_and_not_warned_of(kind: type[Manual], ranks: int) -> None:
    assert_windows_equal_batches(kind, ranks)


POLICIES: list[tuple[dict[str, Any], int, list[list[int]]]] = [
    ({"window": 3, "tail": "drop"}, 1, [[0, 1, 2], [3, 4, 5]]),
    ({"window": 3, "tail": "carry"}, 2, [[0, 1, 2], [3, 4, 5], [6, 0, 1], [2, 3, 4], [5, 6]]),
    ({"window": {0: 3, 1: 2}}, 2, [[0, 1, 2], [3, 4, 5], [6], [0, 1], [2, 3], [4, 5], [6]]),
    ({"window": lambda step: 3 if step < 3 else 2}, 2, [[0, 1, 2], [3, 4, 5], [6], [0, 1], [2, 3], [4, 5], [6]]),
]


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(("policy", "epochs", "windows"), POLICIES)
def test_tails_and_windows_that_change(policy: dict[str, Any], epochs: int, windows: list[list[int]]) -> None:
    rows = draw(GAN)
    joined = [[row for index in window for row in rows[index]] for window in windows]
    assert_window_equals_batch(GAN, rows, GradientAccumulation(**policy), windows=joined, epochs=epochs, optimizers=[None])


def test_a_loader_batch_without_a_backward_has_no_weight() -> None:
    rows, module, expected = batches_of(GAN), GAN(), GAN()
    module.training_step = lambda batch, batch_idx: GAN.training_step(module, batch, batch_idx) if batch_idx != 1 else None
    with pytest.warns(AccumulationWarning, match="manual_backward"):
        fit(module, [rows[0], rows[4], rows[1], None, rows[2]], accumulate_grad_batches=5)
    fit(expected, full_batches()[:1], strategy="auto")
    assert error_of_updates(module, expected, GAN()) < 1e-12


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("rank", [1, 0])
def test_a_rank_without_the_last_batch_of_a_window_ends_all(rank: int) -> None:
    module, begin = Ranked(), time.monotonic()
    module.without = rank
    with pytest.raises(Exception, match="Error"):
        fit(module, ranks=2, accumulate_grad_batches=2)
    assert time.monotonic() - begin < 15  # and not after the time-out of the group


class OfRank(Unsized):  # so many batches on this rank
    def __iter__(self) -> Iterator[Any]:
        yield from labelled(*[4] * self.batches[torch.distributed.get_rank()])


@pytest.mark.parametrize("numbers", [(3, 4), (4, 3)])
def test_ranks_whose_loaders_end_at_different_batches_are_an_error_on_all(numbers: tuple[int, int]) -> None:
    with pytest.raises(Exception, match="lacks a loader batch|another lacks it"):  # a time-out before
        fit(ManualToy(classified), DataLoader(OfRank(numbers), batch_size=None), GradientAccumulation(2), ranks=2)


@pytest.mark.some_cases(1)
@needs_sharding_on_cpu
@pytest.mark.parametrize("engine", [ddp, fsdp2])
def test_ranks_with_loaders_of_other_lengths_are_an_error_and_its_mend_trains(engine: Any) -> None:
    def train(steps: int, **arguments: Any) -> None:
        module = Unclipped()
        module.train_dataloader = lambda: loader(batches_of(GAN)[: 4 - module.global_rank])
        module.on_train_end = lambda: torch.save(module.trainer.global_step, f"steps{module.global_rank}.pt")
        fit(module, strategy=engine(timeout=timedelta(seconds=20)), devices=2, accumulate_grad_batches=2, **arguments)
        assert [torch.load(f"steps{rank}.pt") for rank in range(2)] == [steps] * 2

    with pytest.raises(Exception, match=r"4, 3 loader batches.*limit_train_batches=3\)"):
        train(0)
    train(2 * 2, limit_train_batches=3)  # optimizers, and windows
    train(2, max_steps=1)  # in the first window


class LeavesEarly(Ranked):
    """A rank leaves its step in the last loader batch of a window after so many calls of ``manual_backward``, or after all 3."""

    def __init__(self, rank: int, after: int) -> None:
        super().__init__()
        self.rank, self.after = rank, after

    def training_step(self, batch: Any, batch_idx: int) -> None:
        is_leaving = self.rank == self.global_rank and batch_idx == 1
        if is_leaving and self.after == 0:
            return
        fake = self.generator(batch[1])
        self.manual_backward(softplus(-self.discriminator(fake)).mean())
        if is_leaving and self.after == 1:
            return
        self.manual_backward(softplus(-self.discriminator(batch[0])).mean())
        self.manual_backward(softplus(self.discriminator(fake.detach())).mean())
        for optimizer in self.optimizers():
            if not is_leaving:
                optimizer.step()
            optimizer.zero_grad()


@pytest.mark.some_cases(1, 5)
@needs_sharding_on_cpu
@pytest.mark.parametrize(("engine", "rank", "after"), [(e, *place) for e in (ddp, fsdp2) for place in ((1, 0), (0, 1), (1, 3))])
def test_a_rank_that_leaves_training_step_early_ends_all(engine: Any, rank: int, after: int) -> None:
    with pytest.raises(Exception, match="(?i)rank [01]"):
        fit(LeavesEarly(rank, after), strategy=engine(), devices=2, accumulate_grad_batches=2)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_training_that_goes_on_inside_a_window_ends_like_one_that_never_stopped(ranks: int) -> None:
    class Stateful(TwoSchedulers):
        def train_dataloader(self) -> Any:
            return StatefulLoader(batches_of(GAN, self.trainer.global_rank))

    def train(*callbacks: pl.Callback, **arguments: Any) -> Stateful:
        module = Stateful("adamw")
        fit(module, None, *callbacks, ranks=ranks, **arguments)
        return module

    whole = train(GradientAccumulation(3), SaveAfter(4))  # a third of a window
    resumed = train(GradientAccumulation(3), ckpt_path="inside.ckpt")
    if ranks == 1:  # to the bit; over ranks to rounding
        assert all(map(torch.equal, resumed.parameters(), whole.parameters()))
    assert error_of_updates(resumed, whole, Stateful()) < 1e-12
    if ranks == 1:
        with pytest.warns(AccumulationWarning, match="checkpoint"):  # the window was another
            train(GradientAccumulation(2), ckpt_path="inside.ckpt")


class Averages(GAN):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.discriminator[0].bias.detach().mul_(0.99)


class Alternates(GAN):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()[batch_idx % 2]
        optimizer.zero_grad()
        self.manual_backward(self.discriminator(self.generator(batch[1])).square().mean())
        optimizer.step()


class Direct(OneOptimizer):
    def backwards(self, batch: Any, batch_idx: int) -> None:
        self.discriminator(self.generator(batch[1])).square().mean().backward()


class Follows(GAN):  # a moving average in a hook, written through ``.data``, which counts no changes
    def build(self) -> None:
        super().build()
        self.average = copy.deepcopy(self.generator).requires_grad_(False)

    def on_train_batch_end(self, *_: Any) -> None:
        for mine, its in zip(self.average.parameters(), self.generator.parameters(), strict=True):
            mine.data.mul_(0.9).add_(its.data, alpha=0.1)


@pytest.mark.parametrize(
    ("kind", "named"), [(Follows, "average.0.weight"), (Averages, "parameters"), (Alternates, ""), (Direct, "manual_backward")]
)
def test_what_cannot_be_equal_is_named(kind: type[Manual], named: str) -> None:
    with pytest.warns(AccumulationWarning, match=named):
        fit(kind(), batches_of(GAN), GradientAccumulation(2, check=kind is not Direct))


class Changes(OneOptimizer):
    """The gradients of a backward are changed before the step; the parameters are a list that a wider copy has no part of."""

    def __init__(self, change: Callable[..., Any], optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.change, self.cached = change, [*self.generator.parameters()]

    def loss(self, batch: Any) -> Tensor:
        return self.generator(batch[1]).square().mean()

    def backwards(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(loss := self.loss(batch))
        gradients = [own.grad.data for own in self.cached if own.grad is not None]
        self.change(self, self.optimizers()[0], gradients, loss.detach(), batch)


def climbs(module: Changes, optimizer: Any, gradients: list[Tensor], loss: Tensor, batch: Any) -> None:  # sharpness-aware
    ascent, values = [0.5 * gradient for gradient in gradients], [own.data for own in module.cached][: len(gradients)]
    torch._foreach_add_(values, ascent)
    optimizer.zero_grad()
    module.manual_backward(module.loss(batch))
    torch._foreach_sub_(values, ascent)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda module, optimizer, gradients, loss, batch: torch._foreach_mul_(gradients, loss), "depend on the batch"),
        (lambda module, optimizer, gradients, loss, batch: optimizer.param_groups[0].update(lr=float(loss)), "a learning rate"),
        (
            lambda module, *_: module.generator[0].weight.square().sum().backward() or module.loss(_[-1]).backward(),
            "by self.manual_b",
        ),
        (climbs, "the loss compares the rows of its batch"),
    ],
)
def test_gradients_of_a_step_that_depend_on_its_batch_are_an_error(change: Any, named: str, dtype: torch.dtype) -> None:  # 0.6 to 5
    batches = [tuple(part.to(dtype) for part in batch) for batch in batches_of(GAN)]
    refused(Changes(change).to(dtype), batches, accumulate_grad_batches=2, error=DoesNotAddUpError, match=named)


@pytest.mark.filterwarnings("error::lightning_accum.AccumulationWarning")
def test_gradients_that_are_changed_without_the_batch_are_exact() -> None:
    def smaller(module: Changes, optimizer: Any, gradients: list[Tensor], *_: Any) -> None:  # by its parameters, and less its mean
        for own, gradient in zip(module.cached, gradients, strict=False):
            gradient.mul_((own.detach().norm() / gradient.norm()).clamp(max=1)).sub_(gradient.mean())

    for optimizer in ("sgd", "adamw"):
        assert_one_window_one_batch(partial(Changes, smaller, optimizer), [draw(GAN)], 3, collate=default_collate)


def test_gradients_that_depend_on_what_earlier_steps_left_are_warned_of() -> None:  # 0.4
    def averaged(module: Changes, optimizer: Any, gradients: list[Tensor], *_: Any) -> None:  # over the steps so far
        module.average = [0.9 * before + own for before, own in zip(getattr(module, "average", gradients), gradients, strict=False)]
        for own, gradient in zip(module.average, gradients, strict=True):
            gradient.copy_(own)

    with pytest.warns(AccumulationWarning, match="training_step changes what it keeps in an attribute"):
        fit(Changes(averaged), batches_of(GAN), accumulate_grad_batches=2)


def test_gradients_with_a_graph_are_refused() -> None:
    module = GAN()
    module.manual_backward = lambda loss: GAN.manual_backward(module, loss, create_graph=True)
    refused(module, batches_of(GAN), GradientAccumulation(2, check=False), match="torch.autograd.grad")


class Compares(GAN):  # the second backward compares the rows of its batch
    def training_step(self, batch: Any, batch_idx: int) -> None:
        opt_g, opt_d = self.optimizers()
        opt_g.zero_grad()
        self.toggle_optimizer(opt_g)
        self.manual_backward(self.generator(batch[1]).square().mean())
        self.untoggle_optimizer(opt_g)
        opt_d.zero_grad()
        self.manual_backward(self.discriminator(batch[0]).var(correction=0))
        opt_g.step()
        opt_d.step()


class OfTerms(OneOptimizer):  # a mean over rows beside one over what is chosen, in one backward
    def terms(self, batch: Any) -> list[Tensor]:
        found = self.generator(batch[1])
        return [found[batch[1][:, 0] > -0.5].square().mean(), (found - 1).abs().mean()]

    def backwards(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(sum(self.terms(batch)))


@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize(("kind", "mend"), [(Compares, "row_wise="), (OfTerms, "self.manual_backward once for each")])
def test_the_loss_of_each_backward_has_to_add_up(kind: type[Manual], mend: str, ranks: int) -> None:
    steps: list[int] = []

    class Made(kind):  # type: ignore[misc, valid-type]
        def train_dataloader(self) -> Any:
            return loader(batches_of(GAN, self.trainer.global_rank))

        def on_train_start(self) -> None:
            for optimizer in self.optimizers(use_pl_optimizer=False):
                optimizer.register_step_post_hook(lambda *_: steps.append(1))

        def on_exception(self, *_: Any) -> None:
            assert not steps
            assert all(parameter.requires_grad and parameter.grad is None for parameter in self.parameters())

    with pytest.raises(Exception, match=f"add up to the loss of their batch.*{mend}"):
        fit(Made(), None, accumulate_grad_batches=3, ranks=ranks)


def test_terms_in_backwards_of_their_own_are_exact() -> None:
    class Apart(OfTerms):
        def backwards(self, batch: Any, batch_idx: int) -> None:
            [self.manual_backward(term, retain_graph=True) for term in self.terms(batch)]

    assert compare_window_with_batch(Apart, draw(GAN), GradientAccumulation(3), optimizer=None).parameters <= EXACT


def test_a_term_that_begins_later_is_warned_of() -> None:
    class Begins(OneOptimizer):  # another term of the loss begins with the fourth loader batch
        def backwards(self, batch: Any, batch_idx: int) -> None:
            found = self.generator(batch[1])
            loss = found.square().mean()
            self.manual_backward(loss if batch_idx < 3 else loss + (found - found.mean(0)).abs().mean())

    with pytest.warns(AccumulationWarning, match="manual_backward got a loss that is computed differently"):
        fit(Begins(), batches_of(GAN), accumulate_grad_batches=3)
