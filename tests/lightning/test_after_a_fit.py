"""After a fit, and after one that failed, a Trainer is as Lightning would have left it."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import cloudpickle
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import RichProgressBar, TQDMProgressBar
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.tuner import Tuner
from support import Scalar, ddp, trainer, x
from torch.utils.data import DataLoader

from lightning_accum import AccumulationStrategy, GradientAccumulation, GradientNoiseScale, Tokens

BATCHES = [x(1, 2), x(3, 4), x(5, 6), x(7, 8), x(9, 10)]


class Small(Scalar):
    """Can fail in any place; has a batch size to be tuned, a scheduler, and a loader that the Tuner can rebuild."""

    def __init__(self, fails_in: str = "") -> None:
        super().__init__(BATCHES, lr=1e-3)
        self.fails_in, self.batch_size, self.learning_rate = fails_in, 2, 1e-3

    def fail(self, place: str) -> None:
        if self.fails_in == place:
            raise ValueError(place)

    def setup(self, stage: str) -> None:
        self.fail("setup")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if batch_idx == 1:
            self.fail("training_step")
        loss = self.loss(batch)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.fail("validation_step")
        self.log("val_loss", self.w.detach())

    test_step = validation_step

    def predict_step(self, batch: Any, batch_idx: int) -> Any:
        return self.w * batch

    def train_dataloader(self) -> DataLoader:
        return DataLoader(torch.cat(BATCHES), batch_size=self.batch_size)

    val_dataloader = test_dataloader = predict_dataloader = train_dataloader

    def configure_optimizers(self) -> Any:
        self.fail("configure_optimizers")
        optimizer = torch.optim.SGD(self.parameters(), lr=self.learning_rate)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ByItself:
    """Optimizes by itself."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer, schedulers = self.optimizers(), self.lr_schedulers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        (schedulers[0] if isinstance(schedulers, list) else schedulers).step()


class Manual(ByItself, Small):
    pass


def everything(root: object) -> Iterator[tuple[str, object]]:
    """All that is reached from an object through attributes and containers, with the way there."""
    seen, left = set(), [(type(root).__name__, root)]
    while left:
        path, found = left.pop()
        if id(found) in seen or isinstance(found, (type, str, bytes, int, float, torch.Tensor)):
            continue
        seen.add(id(found))
        yield path, found
        if isinstance(found, dict):
            left += [(f"{path}[{key!r}]", value) for key, value in found.items()]
        elif isinstance(found, (list, tuple, set)):
            left += [(f"{path}[...]", value) for value in found]
        left += [(f"{path}.{name}", value) for name, value in getattr(found, "__dict__", {}).items()]


def is_of_this_package(found: object) -> bool:
    owners = type(found).__mro__ if not callable(found) or isinstance(found, torch.nn.Module) else (*type(found).__mro__, found)
    return any((getattr(owner, "__module__", None) or "").startswith("lightning_accum.") for owner in owners)


def traces(run: pl.Trainer, own: object) -> list[str]:
    """What this package has left in a Trainer, but for its strategy and what the user gave."""
    return [path for path, found in everything(run) if found is not own and is_of_this_package(found)]


def tune_learning_rate(run: pl.Trainer, module: pl.LightningModule) -> None:
    Tuner(run).lr_find(module, num_training=4, update_attr=False)


def tune_batch_size(run: pl.Trainer, module: pl.LightningModule) -> None:
    Tuner(run).scale_batch_size(module, max_trials=1)


def fit(run: pl.Trainer, module: pl.LightningModule) -> None:
    run.fit(module)


def failing(place: str) -> Callable[[pl.Trainer, pl.LightningModule], None]:
    def fit_that_fails(run: pl.Trainer, module: pl.LightningModule) -> None:
        with pytest.raises(ValueError, match=place):
            run.fit(type(module)(fails_in=place))

    return fit_that_fails


ENDS: dict[str, Callable[[pl.Trainer, pl.LightningModule], None]] = {
    "fit": fit,
    "lr_find": tune_learning_rate,
    "scale_batch_size": tune_batch_size,
    **{f"failed in {p}": failing(p) for p in ("setup", "configure_optimizers", "validation_step", "training_step")},
}
POLICIES = {
    "window": {"window": 2},
    "split": {"micro_batch": 1, "window": 2},
    "one batch": {},
    "skip": {"window": 3, "on_nonfinite": "skip"},
    "float64 sums": {"window": 2, "accumulate_dtype": torch.float64},
}


def quiet(**kwargs: Any) -> pl.Trainer:
    return trainer(**{"enable_progress_bar": True, **kwargs})


@pytest.mark.some_cases(7)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize("module", [Small, Manual])
def test_nothing_of_this_package_is_left_in_the_trainer(end: str, module: type[Small]) -> None:
    strategy = AccumulationStrategy()
    run, plain = quiet(strategy=strategy, accumulate_grad_batches=2), quiet(strategy="auto")
    assert traces(run, strategy) == []
    callbacks, attributes, own = list(map(type, run.callbacks)), set(vars(run)), set(vars(strategy))
    small = module()
    if module is Small or end != "lr_find":  # which is for automatic optimization
        ENDS[end](run, small)
    assert traces(run, strategy) == []
    assert list(map(type, run.callbacks)) == callbacks
    assert run.accumulate_grad_batches == 2
    for end_of_lightnings in ([end] if module is Small else []) + ["fit"]:
        ENDS[end_of_lightnings](plain, module())
    assert set(vars(run)) - attributes <= set(vars(plain))
    assert set(vars(strategy)) - own <= set(vars(plain.strategy))
    assert (type(run), type(run.fit_loop)) == (type(plain), type(plain.fit_loop))


@pytest.mark.some_cases(8)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("end", ["fit", "failed in setup", "failed in training_step", "scale_batch_size"])
@pytest.mark.parametrize("policy", POLICIES)
def test_the_callback_keeps_nothing_of_the_fit(policy: str, end: str) -> None:
    callback = GradientAccumulation(**POLICIES[policy])
    before = set(vars(callback))
    run = quiet(callbacks=[callback])
    ENDS[end](run, Small())
    assert not any(isinstance(found, (pl.Trainer, pl.LightningModule, torch.Tensor)) for _, found in everything(callback))
    lightnings = {"log", "log_dict"}
    assert {name for name, value in vars(callback).items() if callable(value)} <= lightnings
    assert set(vars(callback)) - before <= lightnings
    for bar in [c for c in run.callbacks if isinstance(c, pl.callbacks.ProgressBar)]:
        assert "get_metrics" not in vars(bar)


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


def cloudpickled(value: Any) -> Any:
    return pickle.loads(cloudpickle.dumps(value))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("copied", [pickled, cloudpickled, copy.deepcopy])
@pytest.mark.parametrize("end", ["fit", "failed in setup", "failed in training_step", "lr_find"])
def test_the_trainer_can_be_pickled_after_a_fit_and_goes_on_to_train(copied: Callable[[Any], Any], end: str, tmp_path) -> None:
    callbacks = [GradientAccumulation(2), TQDMProgressBar(), GradientNoiseScale()]
    run = quiet(callbacks=callbacks)
    ENDS[end](run, Small())
    again, noise = copied(run), copied(callbacks[2])
    assert noise.every_n_windows == 1
    assert [type(c) for c in again.callbacks] == [type(c) for c in run.callbacks]
    module, reference = Small(), Small()
    again.fit_loop.max_epochs = run.fit_loop.max_epochs = 3
    again.fit(module)
    run.fit(reference)
    assert module.w.item() == reference.w.item() != 0


@pytest.mark.parametrize("bar", [TQDMProgressBar, RichProgressBar])
def test_progress_bars_and_the_callback_can_be_pickled_after_a_fit(bar: type[pl.Callback]) -> None:
    shown, callback = bar(), GradientAccumulation(2)
    quiet(callbacks=[shown, callback]).fit(Small())
    assert type(pickled(shown)) is bar
    assert pickled(callback).policy == callback.policy


def test_a_trainer_that_has_fitted_fits_again_validates_and_resumes(tmp_path) -> None:
    run = quiet(callbacks=[GradientAccumulation(2)], max_epochs=2, default_root_dir=tmp_path)
    run.fit(module := Small())
    assert run.callback_metrics["window/optimizer_steps"] == run.logged_metrics["window/optimizer_steps"] == 6
    run.save_checkpoint(tmp_path / "end.ckpt")
    w = module.w.item()
    (metrics,) = run.validate(module, verbose=False)
    assert metrics["val_loss"] == pytest.approx(w, rel=1e-6)  # Lightning averages it in single precision
    assert run.test(module, verbose=False)
    assert len(run.predict(module)) == 5
    run.fit_loop.max_epochs = 4
    run.fit(module)  # goes on, as with Lightning alone
    assert run.global_step == 12
    other = quiet(callbacks=[GradientAccumulation(2)], max_epochs=4)
    other.fit(fresh := Small(), ckpt_path=tmp_path / "end.ckpt")
    run.fit(again := Small(), ckpt_path=tmp_path / "end.ckpt")
    assert again.w.item() == fresh.w.item() != w
    assert run.callback_metrics["window/optimizer_steps"] == 12


def test_a_fit_that_failed_can_be_tried_again_as_with_lightning_alone() -> None:
    weights = []
    for run in (quiet(callbacks=[GradientAccumulation(1)]), quiet(strategy="auto")):
        for place in ("setup", "configure_optimizers", "training_step"):
            ENDS[f"failed in {place}"](run, Small())
        module = Small()
        run.fit(module)
        weights.append(module.w.item())
    assert weights[0] == weights[1] != 0


def test_strategy_connects_a_module_that_has_no_trainer_yet() -> None:
    strategy = trainer().strategy
    strategy.connect(module := Small())
    assert strategy.lightning_module is module


# --- a Trainer of the user's own ---------------------------------------------------------------------------------------


class OwnTrainer(pl.Trainer):
    """Overrides what this package does too, and passes the rest on."""

    @property
    def callback_metrics(self) -> dict[str, torch.Tensor]:
        return {**super().callback_metrics, "own": torch.tensor(1.0)}

    @property
    def logged_metrics(self) -> dict[str, torch.Tensor]:
        return {"own": torch.tensor(2.0)}

    @property
    def training(self) -> bool:
        self.asked = getattr(self, "asked", 0) + 1
        return super().training

    @training.setter
    def training(self, is_training: bool) -> None:
        pl.Trainer.training.fset(self, is_training)

    @property
    def estimated_stepping_batches(self) -> int | float:
        return super().estimated_stepping_batches + 100

    @property
    def num_training_batches(self) -> int | float:
        return min(super().num_training_batches, 4)


class Asking(Small):
    def on_train_batch_end(self, *_: Any) -> None:
        run = self.trainer
        self.seen = run.estimated_stepping_batches, run.num_training_batches, dict(run.callback_metrics), run.logged_metrics


def test_properties_that_a_trainer_of_the_users_own_overrides_stay_its_own() -> None:
    # a Trainer's constructor reads none of them
    run = OwnTrainer(
        accelerator="cpu",
        devices=1,
        max_epochs=1,
        strategy="accum",
        callbacks=[GradientAccumulation(2)],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    module = Asking()
    run.fit(module)
    estimated, batches, callback_metrics, logged = module.seen
    assert (estimated, batches) == (102, 4)  # of its four batches, two windows
    assert callback_metrics["own"] == 1
    assert callback_metrics["window/optimizer_steps"] == 2
    assert logged == {"own": 2}
    assert run.asked > 0
    assert type(run) is OwnTrainer


# --- what is reached from a Trainer, against Lightning alone --------------------------------------------------------------


class Encoded(Small):
    """Has a submodule, fails anywhere in a batch, keeps something that it does not pickle, and a method that it patched itself."""

    def __init__(self, fails_in: str = "") -> None:
        super().__init__(fails_in)
        self.encoder = torch.nn.Linear(1, 1, dtype=torch.float64)
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))
        self.file, self.helper = open(__file__), self.help  # noqa: SIM115

    def help(self) -> None:
        pass

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "file"}

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rows += len(batch)
        if self.rows > 9 and self.fails_in == "an interrupt":
            raise KeyboardInterrupt
        if self.rows > 9:  # in the second half of a batch that is split, after a step
            self.fail("a micro-batch")
        loss = (self.encoder(batch[:, None].double())[:, 0] - self.w).square().mean()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        every = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [every, {"scheduler": plateau, "monitor": "train_loss", "interval": "epoch"}]


class EncodedManual(ByItself, Encoded):
    pass


def shapes(run: pl.Trainer, lightnings: set[str]) -> dict[str, tuple[Any, ...]]:
    """The type of everything that is reached from a Trainer, its attributes, and which functions are among them.

    Args:
        run: the Trainer.
        lightnings: the attributes that the strategy is looked at for; it and the policy may have others.
    """
    found: dict[str, tuple[Any, ...]] = {}
    seen, left = set(), [("Trainer", run)]
    for path, value in left:
        if id(value) in seen or isinstance(value, (type, str, bytes, int, float, torch.Tensor, torch.device, weakref.ProxyType)):
            continue
        seen.add(id(value))
        if isinstance(value, (GradientAccumulation, Placeholder)):
            continue
        attributes = getattr(value, "__dict__", {})
        if value is run.strategy:
            attributes = {name: held for name, held in attributes.items() if name in lightnings}
        found[path] = (
            "strategy" if value is run.strategy else f"{type(value).__module__}.{type(value).__qualname__}",
            getattr(value, "__qualname__", ""),
            sorted(attributes),
        )
        left += [(f"{path}.{name}", attributes[name]) for name in sorted(attributes)]
        if isinstance(value, dict):
            left += [(f"{path}[{key if isinstance(key, str) else index}]", held) for index, (key, held) in enumerate(value.items())]
        elif isinstance(value, (list, tuple)):
            left += [(f"{path}[{index}]", held) for index, held in enumerate(value)]
    return found


def differences(found: dict[str, Any], expected: dict[str, Any]) -> dict[str, tuple[Any, Any]]:
    differing = {path for path in expected.keys() | found.keys() if expected.get(path) != found.get(path)}
    return {path: (expected.get(path), found.get(path)) for path in differing}


class Placeholder(pl.Callback):
    """In the place of the policy, where Lightning is alone."""


def ended(run: pl.Trainer, module: pl.LightningModule) -> pl.Trainer:
    places = {"": None, "an interrupt": SystemExit, "a micro-batch": ValueError}
    with nullcontext() if places[module.fails_in] is None else pytest.raises(places[module.fails_in]):
        run.fit(module, DataLoader(torch.cat(BATCHES), batch_size=4))
    run.fit_loop.epoch_loop.manual_optimization.on_run_end()  # Lightning leaves its hooks on optimizers where a step failed
    return run


MORE_POLICIES = {
    "windows": {"window": 2},
    "split": {"micro_batch": 1, "window": 2},
    "token windows": {"window": Tokens(3)},
    "offload": {"micro_batch": "offload"},
    "row-wise": {"micro_batch": 1, "row_wise": "encoder"},
    "auto": {"micro_batch": "auto"},
    "float64 sums, skipped": {"window": 2, "accumulate_dtype": torch.float64},
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.some_cases(9)
@pytest.mark.parametrize("end", ["", "an interrupt", "a micro-batch"])
@pytest.mark.parametrize(
    ("module", "policy"), [*((Encoded, name) for name in MORE_POLICIES), (EncodedManual, "windows"), (EncodedManual, "offload")]
)
def test_a_trainer_and_all_that_it_reaches_is_as_lightning_alone_leaves_it(policy: str, module: type[Encoded], end: str) -> None:
    cpu = torch.device("cpu")
    accumulation = GradientAccumulation(**MORE_POLICIES[policy], log=False)
    plain = ended(quiet(strategy=SingleDeviceStrategy(cpu), callbacks=[Placeholder(), TQDMProgressBar()]), module(end))
    run = ended(quiet(strategy=AccumulationStrategy(cpu), callbacks=[accumulation, TQDMProgressBar()]), module(end))
    lightnings = set(vars(plain.strategy))
    assert differences(shapes(run, lightnings), shapes(plain, lightnings)) == {}
    for copied in (pickled, cloudpickled):
        copied(plain)
        copied(run)


class Rank(pl.Trainer):
    """Writes in each process what it is after its fit, before Lightning ends the process."""

    found_in: str
    lightnings: list[str]

    def _run(self, *args: Any, **kwargs: Any) -> Any:
        result = super()._run(*args, **kwargs)
        attributes = list(vars(self.strategy))
        found = shapes(self, set(self.lightnings or attributes) - {"_launcher"}), attributes  # it is still launching
        Path(f"{self.found_in}{self.global_rank}").write_bytes(pickle.dumps(found))
        return result


def ranks_after(
    strategy: pl.strategies.Strategy, callback: pl.Callback, module: Encoded, found_in: str, lightnings: list[str]
) -> list[Any]:
    run = Rank(
        accelerator="cpu",
        devices=2,
        max_epochs=1,
        strategy=strategy,
        callbacks=[callback, TQDMProgressBar()],
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    run.found_in, run.lightnings = found_in, lightnings
    run.fit(module, DataLoader(torch.cat(BATCHES), batch_size=4))
    return [pickle.loads(Path(f"{found_in}{rank}").read_bytes()) for rank in range(2)]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("module", "policy"),
    [
        (Encoded, {"window": 2, "micro_batch": 1}),
        (Encoded, {"window": 2}),
        (Encoded, {"micro_batch": 1, "row_wise": "encoder"}),
        (EncodedManual, {"window": 2}),
        (EncodedManual, {"micro_batch": "offload"}),
    ],
)
def test_every_rank_is_as_lightning_alone_leaves_it(module: type[Encoded], policy: dict[str, Any], tmp_path: Path) -> None:
    plain = ranks_after(DDPStrategy(start_method="fork"), Placeholder(), module(), f"{tmp_path}/plain", [])
    accumulation = GradientAccumulation(**policy, log=False)
    accumulated = ranks_after(ddp(), accumulation, module(), f"{tmp_path}/accumulated", plain[0][1])
    for (expected, _), (found, _) in zip(plain, accumulated, strict=True):
        assert differences(found, expected) == {}
