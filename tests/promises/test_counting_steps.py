"""What is counted in steps is counted in optimizer steps: hooks, averages, validations, checkpoints, in windows of any kind."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterator
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.callbacks import (
    Callback,
    EarlyStopping,
    EMAWeightAveraging,
    LearningRateMonitor,
    ModelCheckpoint,
    ProgressBar,
    RichProgressBar,
    TQDMProgressBar,
)
from lightning.pytorch.loggers import CSVLogger
from sharded import ShardedLanguage, fsdp2, needs_sharding_on_cpu
from support import Scalar, ddp, fp16_on_cpu, loader, pad, sentences, trainer, x
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

from lightning_accum import GradientAccumulation, Tokens

SEVEN = [x(1), x(2, 3, 4), x(5), x(6, 7), x(8), x(9, 10, 11), x(12)]
GAPS = [x(1), None, x(2, 3), None, None, None, x(4), None, x(6, 7)]
"""With windows of 3 the second has no batch at all."""

KINDS: dict[str, tuple[dict[str, Any], list[Any], list[int]]] = {
    "one": ({"window": 1}, SEVEN, [7, 14, 21]),
    "tail": ({"window": 3}, SEVEN, [3, 6, 9]),
    "dropped tail": ({"window": 3, "tail": "drop"}, SEVEN, [2, 4, 6]),
    "carried tail": ({"window": 3, "tail": "carry"}, SEVEN, [2, 4, 7]),
    "by epoch": ({"window": {0: 1, 1: 3, 2: 4}}, SEVEN, [7, 10, 12]),
    "by step": ({"window": lambda step: 1 + step % 3}, SEVEN, [4, 8, 12]),
    "tokens": ({"window": Tokens(5)}, SEVEN, [3, 6, 9]),
    "carried tokens": ({"window": Tokens(5), "tail": "carry"}, SEVEN, [2, 4, 7]),
    "split": ({"micro_batch": 2}, SEVEN, [7, 14, 21]),
    "split windows": ({"window": 3, "micro_batch": 2}, SEVEN, [3, 6, 9]),
    "no batches": ({"window": 3}, GAPS, [2, 4, 6]),
    "skips": ({"window": 2, "on_nonfinite": "skip"}, SEVEN, [4, 8, 12]),
}
"""A policy, the loader batches, and the optimizer steps after each of three epochs."""
INSIDE: dict[str, int] = {"every sample": 1, "every other sample": 2, "every third sample": 3}
"""Windows of so many tokens in batches that are split into samples: several end in a loader batch, or none."""


class Distance(Scalar):
    """Mean squared distance to the numbers. Notes the parameter after each real step, as torch sees it, and at each validation."""

    def __init__(self, batches: Any = (), **kwargs: Any) -> None:
        super().__init__(batches, lr=0.05, **kwargs)
        self.stepped: list[float] = []
        self.validated: list[tuple[int, float]] = []

    def loss(self, batch: Tensor) -> Tensor:
        return (self.w - batch).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: self.stepped.append(self.w.item()))
        return optimizer

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        self.log("distance", (self.w - batch).abs().mean())

    def on_validation_end(self) -> None:
        if not self.trainer.sanity_checking:
            self.validated.append((self.trainer.global_step, self.w.item()))

    def val_dataloader(self) -> DataLoader:
        return loader([x(3), x(4)])


class Listens(Callback):
    """Notes each window, and how things stand then."""

    def __init__(self) -> None:
        self.windows: list[Any] = []
        self.steps: list[int] = []
        self.parameters: list[float] = []

    def on_window_end(self, trainer: pl.Trainer, module: Any, window: Any) -> None:
        self.windows.append(window)
        self.steps.append(trainer.global_step)
        self.parameters.append(module.w.item())


def averaged(parameters: list[float]) -> float:
    average = parameters[0]
    for w in parameters[1:]:
        average = 0.75 * average + 0.25 * w
    return average


def ema() -> Callback:
    return EMAWeightAveraging(decay=0.75)


def saved_steps(directory: str) -> list[int]:
    return sorted(int(path.stem.removeprefix("step=")) for path in Path(directory).glob("step=*.ckpt"))


def checkpoints(directory: str, every: int) -> ModelCheckpoint:
    return ModelCheckpoint(directory, "{step}", every_n_train_steps=every, save_top_k=-1)


@pytest.mark.some_cases(13)
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_hooks_averages_validations_and_checkpoints_are_as_many_as_steps(name: str, every: int) -> None:
    policy, batches, ends = KINDS[name]
    first, last = Listens(), Listens()
    module, steps = Distance(batches), ends[-1]
    policy = GradientAccumulation(**policy, validate_every=every)
    run = trainer(callbacks=[first, policy, ema(), checkpoints("saved", every), last], max_epochs=3, enable_checkpointing=True)
    run.fit(module)
    assert run.global_step == len(module.stepped) == steps
    assert first.steps == last.steps == list(range(1, steps + 1))
    assert first.parameters == last.parameters == module.stepped
    assert module.w.item() == pytest.approx(averaged(module.stepped), rel=1e-13)
    due = list(range(every, steps + 1, every))
    assert [step for step, _ in module.validated] == due
    assert saved_steps("saved") == due
    for step in due:
        state = torch.load(f"saved/step={step}.ckpt", weights_only=False)
        assert state["current_model_state"]["w"].item() == module.stepped[step - 1]


@pytest.mark.some_cases(3)
@pytest.mark.parametrize("name", KINDS)
def test_a_validation_is_of_the_parameters_after_its_step_and_leaves_the_training_as_it_was(name: str) -> None:
    policy, batches, ends = KINDS[name]
    found = []
    for every in (2, None):
        module = Distance(batches)
        limit = {} if every else {"limit_val_batches": 0}
        trainer(callbacks=[GradientAccumulation(**policy, validate_every=every)], max_epochs=3, **limit).fit(module)
        found.append(module)
    assert found[0].stepped == found[1].stepped
    assert found[0].validated == [(step, found[0].stepped[step - 1]) for step in range(2, ends[-1] + 1, 2)]


def steps_inside(tokens: int, batches: list[Tensor]) -> tuple[list[int], int]:
    """The steps after each loader batch of three epochs, and all of them."""
    after, steps = [], 0
    for _ in range(3):
        begun, samples = steps, 0
        for batch in batches:
            samples += len(batch)
            is_last = batch is batches[-1]
            steps = begun + (math.ceil(samples / tokens) if is_last else samples // tokens)
            after.append(steps)
    return after, steps


@pytest.mark.some_cases(5)
@pytest.mark.parametrize("every", [1, 2, 3, 4, 7])
@pytest.mark.parametrize("name", INSIDE)
def test_where_several_windows_end_in_a_loader_batch_each_is_heard_and_none_of_every_n_is_missed(name: str, every: int) -> None:
    """Averages and hooks see each step. Validations and checkpoints are of whole loader batches: one at the end of each in which
    a multiple of n was reached."""
    after, steps = steps_inside(INSIDE[name], SEVEN)
    expected = [now for before, now in zip([0, *after], after, strict=False) if now // every > before // every]
    module, listens = Distance(SEVEN), Listens()
    policy = GradientAccumulation(Tokens(INSIDE[name]), micro_batch=1, validate_every=every)
    run = trainer(callbacks=[listens, checkpoints("saved", every), policy, ema()], max_epochs=3, enable_checkpointing=True)
    run.fit(module)
    assert run.global_step == len(module.stepped) == steps
    assert listens.parameters == module.stepped
    assert listens.steps == list(range(1, steps + 1))
    assert module.w.item() == pytest.approx(averaged(module.stepped), rel=1e-13)
    assert [step for step, _ in module.validated] == expected
    assert saved_steps("saved") == expected
    if every >= 3:  # no loader batch has more steps
        assert len(expected) == steps // every


class Ranked(Distance):
    """Two ranks of other data. What is asserted on any rank fails the fit."""

    def __init__(self, every: int, expected: list[int], steps: int) -> None:
        super().__init__(by_rank=[SEVEN, SEVEN[::-1]])
        self.every, self.expected, self.steps = every, expected, steps

    def on_train_end(self) -> None:
        listens = next(callback for callback in self.trainer.callbacks if isinstance(callback, Listens))
        assert self.trainer.global_step == len(self.stepped) == self.steps
        assert listens.parameters == self.stepped
        assert [step for step, _ in self.validated] == self.expected
        assert self.w.item() == pytest.approx(averaged(self.stepped), rel=1e-13)
        if self.trainer.is_global_zero:
            assert saved_steps("saved") == self.expected


@pytest.mark.parametrize(
    ("policy", "expected", "steps"),
    [
        ({"window": 3}, [2, 4, 6], 6),
        ({"window": 2, "tail": "carry"}, [2, 4, 6], 7),
        ({"window": Tokens(2), "micro_batch": 1}, None, None),
    ],
    ids=str,
)
def test_on_two_ranks_all_validate_after_the_same_steps(policy: dict[str, Any], expected: Any, steps: Any) -> None:
    if expected is None:  # a round of one sample on each rank, while the longer has any; a window is what two samples came to
        expected, steps = inside_on_two_ranks()
    callbacks = [Listens(), checkpoints("saved", 2), GradientAccumulation(**policy, validate_every=2), ema()]
    run = trainer(ddp(), devices=2, callbacks=callbacks, max_epochs=2, enable_checkpointing=True)
    run.fit(Ranked(2, expected, steps))


def inside_on_two_ranks() -> tuple[list[int], int]:
    steps, expected = 0, []
    for _ in range(2):
        weight = 0
        for index, (own, other) in enumerate(zip(SEVEN, SEVEN[::-1], strict=True)):
            before = steps
            for number in range(max(len(own), len(other))):
                weight += (number < len(own)) + (number < len(other))
                if weight >= 2:
                    steps, weight = steps + 1, 0
            if index == 6 and weight:
                steps += 1
            if steps // 2 > before // 2:
                expected.append(steps)
    return expected, steps


class Sharded(ShardedLanguage):
    """Validates inside of windows, too, where these end inside of loader batches."""

    def __init__(self) -> None:
        super().__init__()
        self.heard, self.validated = 0, []

    def train_dataloader(self) -> DataLoader:
        rows = sentences(24)
        return loader([pad(rows[i : i + 2]) for i in range(0, 24, 2)][self.trainer.global_rank :: 2])

    def val_dataloader(self) -> DataLoader:
        return loader([pad(sentences(2))])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("validation", super().training_step(batch, batch_idx), sync_dist=True)
        self.validated.append(self.trainer.global_step)

    def on_window_end(self, window: Any) -> None:
        self.heard += window.has_stepped

    def on_train_end(self) -> None:
        torch.save((self.trainer.global_step, self.heard, self.validated), f"rank{self.global_rank}.pt")


@needs_sharding_on_cpu
@pytest.mark.some_cases(1)
@pytest.mark.parametrize("policy", [{"window": Tokens(20), "micro_batch": 1}, {"window": 2}], ids=str)
def test_validation_of_a_sharded_module_leaves_its_training_as_it_was(policy: dict[str, Any]) -> None:
    found = []
    for every in (3, None):
        limit = {} if every else {"limit_val_batches": 0}
        accumulation = GradientAccumulation(**policy, validate_every=every)
        run = trainer(fsdp2(), devices=2, callbacks=[accumulation], max_epochs=2, num_sanity_val_steps=0, **limit)
        run.fit(Sharded())
        first, second = (torch.load(f"rank{rank}.pt") for rank in range(2))
        assert first == second
        steps, heard, validated = first
        assert heard == steps > 3
        # a loader batch has two micro-batches, so at most two of three steps
        assert [step // 3 for step in validated] == (list(range(1, steps // 3 + 1)) if every else [])
        found.append(run.whole)
    for name, parameter in found[0].items():
        assert torch.equal(parameter, found[1][name]), name


# --- manual optimization -------------------------------------------------------------------------------------------------


class Manual(Distance):
    automatic_optimization = False

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = self.loss(batch)
        self.manual_backward(loss)
        optimizer.step()
        return loss


@pytest.mark.parametrize("window", [1, 2, 3])
def test_the_steps_of_a_module_that_optimizes_by_itself_are_heard_and_counted(window: int) -> None:
    module, listens = Manual(SEVEN), Listens()
    saves = checkpoints("saved", 2)
    callbacks = [listens, GradientAccumulation(window, tail="drop", validate_every=2), ema(), saves]
    run = trainer(callbacks=callbacks, max_epochs=3, enable_checkpointing=True)
    run.fit(module)
    steps = 3 * (7 // window)
    assert run.global_step == len(module.stepped) == steps
    assert listens.parameters == module.stepped
    assert [window.has_stepped for window in listens.windows] == [True] * steps
    assert {window.loader_batches for window in listens.windows} == {window}
    assert module.w.item() == pytest.approx(averaged(module.stepped), rel=1e-13)
    assert [step for step, _ in module.validated] == saved_steps("saved") == list(range(2, steps + 1, 2))
    if window > 1:
        first = torch.cat(SEVEN[:window])
        assert listens.windows[0].loss == pytest.approx(first.square().mean().item(), rel=1e-13)
        assert listens.windows[0].weight == len(first)


# --- what a hook gets ----------------------------------------------------------------------------------------------------


def test_a_window_is_what_its_full_batch_was() -> None:
    module, listens = Distance(SEVEN), Listens()
    trainer(callbacks=[listens, GradientAccumulation(3)], gradient_clip_val=0.5).fit(module)
    w, begun = 0.0, 0
    for window, end in zip(listens.windows, (3, 6, 7), strict=True):
        batch = torch.cat(SEVEN[begun:end])
        gradient = 2 * (w - batch).mean().item()
        assert window.loss == pytest.approx((w - batch).square().mean().item(), rel=1e-13)
        assert window.gradient_norm.item() == pytest.approx(abs(gradient), rel=1e-13)
        assert (window.weight, window.micro_batches, window.loader_batches) == (len(batch), end - begun, end - begun)
        assert window.has_stepped
        w, begun = module.stepped[listens.windows.index(window)], end


def test_a_window_cannot_be_changed() -> None:
    listens = Listens()
    trainer(callbacks=[listens]).fit(Distance(SEVEN))
    with pytest.raises(AttributeError):
        listens.windows[0].loss = 1.0


class Hears(Distance):
    """The module's own hook, which logs."""

    def __init__(self, batches: Any) -> None:
        super().__init__(batches)
        self.heard: list[float] = []

    def on_window_end(self, window: Any) -> None:
        self.heard.append(float(window.loss))
        self.log("heard", window.loss, on_step=False, on_epoch=True, batch_size=1)


@pytest.mark.parametrize("policy", [{"window": 1}, {"window": 3}, {"window": Tokens(2), "micro_batch": 1}], ids=str)
def test_the_module_hears_its_windows_and_may_log_them(policy: dict[str, Any]) -> None:
    module, listens = Hears(SEVEN), Listens()
    run = trainer(callbacks=[GradientAccumulation(**policy), listens])
    run.fit(module)
    assert module.heard == [float(window.loss) for window in listens.windows]
    mean = sum(module.heard) / len(module.heard)
    assert run.callback_metrics["heard"].item() == pytest.approx(mean, rel=1e-6)  # Lightning keeps what is logged in float32


def test_a_step_that_the_scaler_left_out_is_told() -> None:
    class Overflows(Distance):
        def on_after_backward(self) -> None:
            if self.trainer.global_step == 1:
                self.w.grad.fill_(math.inf)

    listens = Listens()
    callbacks = [listens, GradientAccumulation(2)]
    run = trainer(callbacks=callbacks, plugins=fp16_on_cpu())
    run.fit(Overflows(SEVEN))
    assert [window.has_stepped for window in listens.windows] == [True, False, True, True]
    assert run.global_step == 4


def test_a_window_without_weight_is_not_heard_and_one_whose_training_step_gave_nothing_is() -> None:
    class Silent(Distance):
        def loss(self, batch: Tensor) -> Tensor | None:
            return None if batch.isnan().any() else super().loss(batch)

    listens, nothing = Listens(), x(math.nan)
    run = trainer(callbacks=[listens, GradientAccumulation(2)])
    run.fit(Silent([x(1), x(2), None, None, nothing, nothing, nothing, x(3)]))
    assert run.global_step == len(listens.windows) == 3
    assert [window.has_stepped for window in listens.windows] == [True, False, True]
    assert [window.micro_batches for window in listens.windows] == [2, 0, 1]


def test_a_hook_that_comes_in_the_middle_is_heard_from_the_next_window_on() -> None:
    class Comes(Callback):
        def __init__(self) -> None:
            self.steps: list[int] = []

        def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
            if batch_idx == 3:
                self.on_window_end = lambda trainer, module, window: self.steps.append(trainer.global_step)

    comes = Comes()
    trainer(callbacks=[comes, GradientAccumulation(2)]).fit(Distance(SEVEN))
    assert comes.steps == [2, 3, 4]


# --- resumed -------------------------------------------------------------------------------------------------------------


class Stop(Exception):
    pass


class Breaks(Callback):
    """Takes a checkpoint at the n-th call of a hook, and stops there."""

    def __init__(self, hook: str, at: int) -> None:
        self.left = at
        setattr(self, hook, self._called)

    def _called(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.sanity_checking:
            return
        self.left -= 1
        if self.left == 0:
            trainer.save_checkpoint("broken.ckpt")
            raise Stop


def fit_by_steps(policy: dict[str, Any], *callbacks: Callback, every: int = 2, **kwargs: Any) -> tuple[Distance, pl.Trainer]:
    """Two epochs. All loader batches are of five samples, since a loader without a state begins anew where training goes on."""
    module = Distance([x(*range(i, i + 5)) for i in range(7)])
    run = trainer(callbacks=[GradientAccumulation(**policy, validate_every=every), *callbacks], max_epochs=2)
    with suppress(Stop):
        run.fit(module, **kwargs)
    return module, run


RESUMED: dict[str, dict[str, Any]] = {
    "3": {"window": 3},
    "carry": {"window": 3, "tail": "carry"},
    "tokens": {"window": Tokens(12)},
    "inside": {"window": Tokens(2), "micro_batch": 1},
}


@pytest.mark.some_cases(5)
@pytest.mark.parametrize("policy", RESUMED)
@pytest.mark.parametrize(
    ("hook", "calls"),
    [("on_train_batch_end", 14), ("on_train_batch_start", 14), ("on_train_epoch_end", 1), ("on_train_epoch_start", 2)],
)
def test_no_validation_comes_twice_or_is_missed_wherever_training_goes_on(hook: str, calls: int, policy: str) -> None:
    whole, _ = fit_by_steps(RESUMED[policy])
    expected = [step for step, _ in whole.validated]
    for at in range(1, calls + 1):
        first, run = fit_by_steps(RESUMED[policy], Breaks(hook, at))
        if run.global_step == len(whole.stepped):
            continue  # nothing is left to be trained
        second, resumed = fit_by_steps(RESUMED[policy], ckpt_path="broken.ckpt")
        found = [step for step, _ in first.validated + second.validated]
        assert resumed.global_step == len(whole.stepped), f"{hook} {at}"
        assert found == expected, f"{hook} {at}"


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("policy", RESUMED)
def test_a_checkpoint_at_the_end_of_a_validation_does_not_validate_again(policy: str) -> None:
    whole, _ = fit_by_steps(RESUMED[policy])
    expected = [step for step, _ in whole.validated]
    for at in range(1, len(expected) + 1):
        first, _ = fit_by_steps(RESUMED[policy], Breaks("on_validation_end", at))
        second, _ = fit_by_steps(RESUMED[policy], ckpt_path="broken.ckpt")
        # the module's own hook, which notes it, comes after the callback's
        assert [step for step, _ in first.validated] == expected[: at - 1]
        assert [step for step, _ in second.validated] == expected[at:]


@pytest.mark.some_cases(4)
@pytest.mark.parametrize("hook", ["on_validation_start", "on_validation_batch_start", "on_validation_batch_end"])
@pytest.mark.parametrize("policy", RESUMED)
def test_a_validation_that_was_broken_off_is_made_again(policy: str, hook: str) -> None:
    whole, _ = fit_by_steps(RESUMED[policy])
    for at in (1, 2):
        first, _ = fit_by_steps(RESUMED[policy], Breaks(hook, at))
        second, _ = fit_by_steps(RESUMED[policy], ckpt_path="broken.ckpt")
        found = [step for step, _ in first.validated + second.validated]
        assert found == [step for step, _ in whole.validated], f"{hook} {at}"


# --- what loggers get, as the page of the site says ---------------------------------------------------------------------


def logged_by(module: Distance, policy: dict[str, Any], every: int, *callbacks: Callback) -> list[dict[str, str]]:
    logger = CSVLogger("logs")
    callbacks = (GradientAccumulation(**policy), *callbacks)
    trainer(callbacks=list(callbacks), logger=logger, log_every_n_steps=every, max_epochs=3).fit(module)
    with (Path(logger.log_dir) / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


LOGGED: dict[str, tuple[dict[str, Any], list[int]]] = {
    "windows of 2": ({"window": 2}, [0, 1, 1, 2, 2, 3, 4, 4, 5, 5, 6, 6, 7, 8, 8, 9, 9, 10, 10, 11, 12]),
    **{name: ({"window": Tokens(tokens), "micro_batch": 1}, steps_inside(tokens, SEVEN)[0]) for name, tokens in INSIDE.items()},
}
"""A policy, and the optimizer steps after each loader batch of three epochs."""


@pytest.mark.parametrize("every", [1, 2, 3, 5])
@pytest.mark.parametrize("name", LOGGED)
def test_loggers_get_every_nth_optimizer_step_by_its_number(name: str, every: int) -> None:
    class Logs(Distance):
        def training_step(self, batch: Tensor, batch_idx: int) -> Any:
            self.log("own", float(self.trainer.fit_loop.epoch_loop.total_batch_idx))
            return super().training_step(batch, batch_idx)

    policy, after = LOGGED[name]
    rows = logged_by(Logs(SEVEN), policy, every)
    windows = [row for row in rows if row.get("window/loss")]
    due = list(range(every - 1, after[-1], every))
    assert [int(row["step"]) for row in windows] == due
    assert [int(float(row["window/optimizer_steps"])) - 1 for row in windows] == due
    # what the module logs is shown with the last step of a loader batch in which one was due
    begins = [0, *after]
    expected = [(index, steps - 1) for index, steps in enumerate(after) if steps // every > begins[index] // every]
    assert [(int(float(row["own"])), int(row["step"])) for row in rows if row.get("own")] == expected


@pytest.mark.parametrize("name", LOGGED)
def test_learning_rates_are_logged_by_the_steps_before_a_loader_batch(name: str) -> None:
    class Halves(Distance):
        def configure_optimizers(self) -> Any:
            optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5), "interval": "step"}]

    policy, after = LOGGED[name]
    rows = logged_by(Halves(SEVEN), policy, 1, LearningRateMonitor("step"))
    found = [(int(row["step"]), float(row["lr-SGD"])) for row in rows if row.get("lr-SGD")]
    assert found == [(steps, 0.5**steps) for steps in [0, *after[:-1]]]


# --- beside Lightning's own ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_first", [True, False])
def test_callbacks_that_monitor_a_validation_look_after_each(is_first: bool) -> None:
    class Worse(Distance):
        def validation_step(self, batch: Tensor, batch_idx: int) -> None:
            self.log("distance", float(self.trainer.global_step >= 4))

    stopping = EarlyStopping("distance", patience=2, mode="min")
    policy = GradientAccumulation(2, validate_every=2)
    best = ModelCheckpoint("best", "{step}", monitor="distance", save_top_k=-1)
    callbacks = [stopping, best, policy] if is_first else [policy, stopping, best]
    run = trainer(callbacks=callbacks, max_epochs=9, enable_checkpointing=True)
    module = Worse(SEVEN)
    run.fit(module)
    assert [step for step, _ in module.validated] == [2, 4, 6]
    assert run.global_step == 6
    assert saved_steps("best") == [2, 4, 6]
    assert best.best_model_path.endswith("step=2.ckpt")


@pytest.mark.parametrize("tail", ["step", "carry"])
def test_a_window_that_an_early_stop_cuts_short_is_validated_if_it_is_due(tail: Any) -> None:
    class Stops(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
            trainer.should_stop = trainer.fit_loop.epoch_loop.batch_progress.total.ready == 4

    module = Distance(SEVEN)
    callbacks = [GradientAccumulation(3, tail=tail, validate_every=2), checkpoints("saved", 2), Stops()]
    run = trainer(callbacks=callbacks, enable_checkpointing=True)
    run.fit(module)
    assert run.global_step == 2
    assert module.validated == [(2, module.stepped[1])]
    assert saved_steps("saved") == [2]


class Stream(IterableDataset):
    """Has no end."""

    def __iter__(self) -> Iterator[Tensor]:
        return map(x, count())


BARS: dict[str, tuple[dict[str, Any], int | None, list[float], int]] = {
    "a stream": ({"window": 3}, None, [15], 5),
    "a stream, by step": ({"window": lambda step: 1 + step}, None, [15], 5),
    "a stream, in tokens": ({"window": Tokens(3)}, None, [math.inf], 5),
    "cut tails": ({"window": 3}, 7, [7, 6], 5),
    "carried tails": ({"window": 3, "tail": "carry"}, 7, [7, 7, 1], 5),
    "split": ({"micro_batch": 2}, 7, [7, 1], 8),
}
"""A policy, the loader batches of an epoch, the ends of the bar in each, and the steps."""


@pytest.mark.parametrize("kind", [TQDMProgressBar, RichProgressBar])
@pytest.mark.parametrize("name", BARS)
def test_the_progress_bar_ends_with_the_loader_batches_that_the_steps_take(name: str, kind: type[ProgressBar]) -> None:
    policy, batches, ends, steps = BARS[name]
    told: list[float] = []

    class Looks(Distance):
        def on_train_epoch_start(self) -> None:
            told.append(self.trainer.progress_bar_callback.total_train_batches)

    data = DataLoader(Stream(), batch_size=None) if batches is None else loader([x(i, i + 1) for i in range(batches)])
    bar = kind()
    callbacks = [GradientAccumulation(**policy), bar]
    run = trainer(callbacks=callbacks, max_epochs=-1, max_steps=steps, limit_val_batches=0, enable_progress_bar=True)
    run.fit(Looks(), data)
    assert told == ends
    assert run.global_step == steps
    seen = run.fit_loop.epoch_loop.batch_progress.total.ready
    assert seen == sum(ends) or ends == [math.inf]
    assert type(bar) is kind


def test_without_validation_nothing_is_validated() -> None:
    module = Distance(SEVEN)
    trainer(callbacks=[GradientAccumulation(2, validate_every=1)], limit_val_batches=0).fit(module)
    assert module.validated == []


def test_a_short_trial_validates_as_ever() -> None:
    module = Distance(SEVEN)
    trainer(callbacks=[GradientAccumulation(2, validate_every=100)], fast_dev_run=2).fit(module)
    assert len(module.validated) == 1


def test_a_trainer_has_its_own_intervals_back() -> None:
    run = trainer(callbacks=[GradientAccumulation(2, validate_every=1)])
    before = dict(vars(run))
    run.fit(Distance(SEVEN))
    assert type(run) is pl.Trainer
    assert (run.val_check_interval, run.check_val_every_n_epoch) == (1.0, 1)
    assert set(before) <= set(vars(run))


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"val_check_interval": 0.5}, r"Trainer\(val_check_interval=0\.5, check_val_every_n_epoch=1\)"),
        ({"val_check_interval": 3, "check_val_every_n_epoch": None}, "val_check_interval=3, check_val_every_n_epoch=None"),
        ({"check_val_every_n_epoch": 2}, "check_val_every_n_epoch=2"),
    ],
)
def test_two_that_say_when_to_validate_are_refused(options: dict[str, Any], told: str) -> None:
    run = trainer(callbacks=[GradientAccumulation(2, validate_every=4)], **options)
    with pytest.raises(MisconfigurationException, match=f"{told}.*validate_every=4.*Leave val_check_interval"):
        run.fit(Distance(SEVEN))


@pytest.mark.parametrize("every", [0, -1, 1.5, True, "epoch"])
def test_only_a_number_of_steps_is_an_interval(every: Any) -> None:
    with pytest.raises(MisconfigurationException, match="validate_every=.*from 1"):
        GradientAccumulation(validate_every=every)
