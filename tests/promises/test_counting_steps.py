"""What is counted in steps is counted in optimizer steps: hooks, averages, validations, checkpoints, in windows of any kind."""

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, EMAWeightAveraging, ModelCheckpoint
from support import Distance, Interrupted, Manually, SaveAfter, Toy, fit, fp16_on_cpu, labelled, loader, said, trainer, x
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_accum import AccumulationError, GradientAccumulation, Tokens

SEVEN = [x(1), x(2, 3, 4), x(5), x(6, 7), x(8), x(9, 10, 11), x(12)]
GAPS = [x(1), None, x(2, 3), None, None, None, x(4), None, x(6, 7)]  # with windows of 3 the second has no batch at all

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
    "manual": ({"window": 2, "tail": "drop"}, SEVEN, [3, 6, 9]),
}
"""A policy, the loader batches, and the optimizer steps after each of three epochs."""


class Noted(Distance):  # notes the parameter after each real step, as torch sees it, and at each validation
    def __init__(self, batches: Any = (), **kwargs: Any) -> None:
        super().__init__(batches, lr=0.05, **kwargs)
        self.stepped: list[float] = []
        self.validated: list[tuple[int, float]] = []

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


class Listens(Callback):  # notes each window, and how things stand then
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


def saved_steps(directory: str) -> list[int]:
    return sorted(int(path.stem.removeprefix("step=")) for path in Path(directory).glob("step=*.ckpt"))


def counted(module: Noted, every: int, policy: GradientAccumulation, **kwargs: Any) -> tuple[pl.Trainer, Listens, Listens]:
    """Train beside callbacks that count steps; the listeners are the first and the last of them."""
    saves = ModelCheckpoint("saved", "{step}", every_n_train_steps=every, save_top_k=-1)
    first, last = Listens(), Listens()
    callbacks = [first, policy, EMAWeightAveraging(decay=0.75), saves, last]
    return fit(module, None, *callbacks, enable_checkpointing=True, **kwargs), first, last


@pytest.mark.some_cases(10, 8)
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("name", KINDS)
def test_hooks_averages_validations_and_checkpoints_are_as_many_as_steps(name: str, every: int) -> None:
    policy, batches, ends = KINDS[name]
    kind = type("Manual", (Manually, Noted), {}) if name == "manual" else Noted
    module, steps = kind(batches), ends[-1]
    run, first, last = counted(module, every, GradientAccumulation(**policy, validate_every=every), max_epochs=3)
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


@pytest.mark.some_cases(3, 5)
@pytest.mark.parametrize("name", KINDS)
def test_a_validation_is_of_the_parameters_after_its_step_and_leaves_the_training_as_it_was(name: str) -> None:
    policy, batches, ends = KINDS[name]
    validated, plain = Noted(batches), Noted(batches)
    fit(validated, None, GradientAccumulation(**policy, validate_every=2), max_epochs=3)
    fit(plain, None, GradientAccumulation(**policy), max_epochs=3, limit_val_batches=0)
    assert validated.stepped == plain.stepped
    assert validated.validated == [(step, validated.stepped[step - 1]) for step in range(2, ends[-1] + 1, 2)]


@pytest.mark.parametrize(("policy", "steps"), [({"window": 3}, 6), ({"window": 2, "tail": "carry"}, 7)], ids=str)
def test_on_two_ranks_all_validate_after_the_same_steps(policy: dict[str, Any], steps: int) -> None:
    class Ranked(Noted):  # two ranks of other data, each of which leaves what it has counted in a file
        def __init__(self) -> None:
            super().__init__(by_rank=[SEVEN, SEVEN[::-1]])

        def on_train_end(self) -> None:
            listens = next(callback for callback in self.trainer.callbacks if isinstance(callback, Listens))
            steps = {"counted": self.trainer.global_step, "stepped": self.stepped, "heard": listens.parameters}
            torch.save({**steps, "validated": [step for step, _ in self.validated], "w": self.w.item()}, f"{self.global_rank}.pt")

    counted(Ranked(), 2, GradientAccumulation(**policy, validate_every=2), ranks=2, max_epochs=2)
    first, second = (torch.load(f"{rank}.pt") for rank in range(2))
    assert first == second
    assert first["counted"] == len(first["stepped"]) == steps
    assert first["heard"] == first["stepped"]
    assert first["validated"] == saved_steps("saved") == [2, 4, 6]
    assert first["w"] == pytest.approx(averaged(first["stepped"]), rel=1e-13)


def test_a_window_is_what_its_full_batch_was_and_cannot_be_changed() -> None:
    module, listens = Noted(SEVEN), Listens()
    fit(module, None, listens, GradientAccumulation(3), gradient_clip_val=0.5)
    w, begun = 0.0, 0
    for window, end, after in zip(listens.windows, (3, 6, 7), module.stepped, strict=True):
        batch = torch.cat(SEVEN[begun:end])
        assert window.loss == pytest.approx((w - batch).square().mean().item(), rel=1e-13)
        assert window.gradient_norm.item() == pytest.approx(abs(2 * (w - batch).mean().item()), rel=1e-13)
        assert (window.weight, window.micro_batches, window.loader_batches) == (len(batch), end - begun, end - begun)
        assert window.has_stepped
        w, begun = after, end
    with pytest.raises(AttributeError):
        listens.windows[0].loss = 1.0


@pytest.mark.parametrize("policy", [{"window": 1}, {"window": 3}, {"micro_batch": 1}], ids=str)
def test_the_module_hears_its_windows_and_may_log_them(policy: dict[str, Any]) -> None:
    module, listens = Noted(SEVEN), Listens()
    module.on_window_end = lambda window: module.log("heard", window.loss, on_step=False, on_epoch=True, batch_size=1)
    run = fit(module, None, GradientAccumulation(**policy), listens)
    mean = sum(float(window.loss) for window in listens.windows) / len(listens.windows)
    assert run.callback_metrics["heard"].item() == pytest.approx(mean, rel=1e-6)  # Lightning keeps what is logged in float32


def test_a_step_that_the_scaler_left_out_is_told() -> None:
    listens, module = Listens(), Noted(SEVEN)
    module.on_after_backward = lambda: module.w.grad.fill_(math.inf) if module.trainer.global_step == 1 else None
    run = fit(module, None, listens, GradientAccumulation(2), plugins=fp16_on_cpu())
    assert [window.has_stepped for window in listens.windows] == [True, False, True, True]
    assert run.global_step == 4


def test_a_window_without_weight_is_not_heard_and_one_whose_training_step_gave_nothing_is() -> None:
    listens, nothing = Listens(), x(math.nan)
    run = fit(Noted([x(1), x(2), None, None, nothing, nothing, nothing, x(3)]), None, listens, GradientAccumulation(2))
    assert run.global_step == len(listens.windows) == 3
    assert [(window.has_stepped, window.micro_batches) for window in listens.windows] == [(True, 2), (False, 0), (True, 1)]


RESUMED: dict[str, dict[str, Any]] = {"3": {"window": 3}, "carry": {"window": 3, "tail": "carry"}, "tokens": {"window": Tokens(12)}}
HOOKS: dict[str, Any] = {  # after which loader batches each is interrupted, if it is called then
    **dict.fromkeys(["on_train_batch_end", "on_train_batch_start"], range(1, 15)),
    **dict.fromkeys(["on_train_epoch_end", "on_train_epoch_start"], range(7, 8)),
    **dict.fromkeys(["on_validation_start", "on_validation_batch_start", "on_validation_batch_end"], (6, 10, 12)),
}


@pytest.mark.some_cases(2, 4)
@pytest.mark.parametrize("policy", RESUMED)
@pytest.mark.parametrize("hook", HOOKS)
def test_no_validation_comes_twice_or_is_missed_wherever_training_goes_on(hook: str, policy: str) -> None:
    def fit_by_steps(policy: dict[str, Any], *callbacks: Callback, **kwargs: Any) -> tuple[Noted, pl.Trainer]:
        """Two epochs. All loader batches are of five samples, since a loader without a state begins anew where training goes on."""
        module = Noted([x(*range(i, i + 5)) for i in range(7)])
        run = trainer(callbacks=[GradientAccumulation(**policy, validate_every=2), *callbacks], max_epochs=2)
        with suppress(Interrupted):
            run.fit(module, **kwargs)
        return module, run

    whole, _ = fit_by_steps(RESUMED[policy])
    for at in HOOKS[hook]:
        first, run = fit_by_steps(RESUMED[policy], SaveAfter(at, ends=True, hook=hook))
        if run.global_step == len(whole.stepped):
            continue  # nothing is left to be trained
        second, resumed = fit_by_steps(RESUMED[policy], ckpt_path="inside.ckpt")
        found = [step for step, _ in first.validated + second.validated]
        assert resumed.global_step == len(whole.stepped), f"{hook} {at}"
        assert found == [step for step, _ in whole.validated], f"{hook} {at}"


@pytest.mark.parametrize("is_first", [True, False])
def test_callbacks_that_monitor_a_validation_look_after_each(is_first: bool) -> None:
    module = Noted(SEVEN)
    module.validation_step = lambda batch, batch_idx: module.log("distance", float(module.trainer.global_step >= 4))
    stopping, policy = EarlyStopping("distance", patience=2, mode="min"), GradientAccumulation(2, validate_every=2)
    best = ModelCheckpoint("best", "{step}", monitor="distance", save_top_k=-1)
    callbacks = [stopping, best, policy] if is_first else [policy, stopping, best]
    run = fit(module, None, *callbacks, max_epochs=9, enable_checkpointing=True)
    assert [step for step, _ in module.validated] == saved_steps("best") == [2, 4, 6]
    assert run.global_step == 6
    assert best.best_model_path.endswith("step=2.ckpt")


def test_validation_that_is_switched_off_stays_off_and_a_short_trial_validates_as_ever() -> None:
    off, short = Noted(SEVEN), Noted(SEVEN)
    run = fit(off, None, GradientAccumulation(2, validate_every=1), limit_val_batches=0)
    fit(short, None, GradientAccumulation(2, validate_every=100), fast_dev_run=2)
    assert (off.validated, len(short.validated)) == ([], 1)
    assert (run.val_check_interval, run.check_val_every_n_epoch) == (1.0, 1)  # its own again


@pytest.mark.parametrize(
    "options",
    [{"val_check_interval": 0.5}, {"val_check_interval": 3, "check_val_every_n_epoch": None}, {"check_val_every_n_epoch": 2}],
    ids=str,
)
def test_two_that_say_when_to_validate_are_refused(options: dict[str, Any]) -> None:
    with pytest.raises(AccumulationError, match="validate_every"):
        fit(Noted(SEVEN), None, GradientAccumulation(2, validate_every=4), **options)


def test_a_window_of_tokens_whose_loss_has_a_factor_of_0_is_warned_of() -> None:  # it never ended, silently
    module = Toy(lambda net, batch: min(1, module.global_step) * net(batch[0]).square().mean())
    assert "waits for weight" in said(module, labelled(8, 8), GradientAccumulation(Tokens(8)))
