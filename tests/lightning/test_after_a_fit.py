"""After a fit, and after one that failed, a Trainer is as Lightning would have left it; a copy of a Trainer trains like it."""

import copy
import pickle
import weakref
from collections.abc import Callable
from functools import partial
from typing import Any

import cloudpickle
import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import TQDMProgressBar
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.tuner import Tuner
from support import Manually, ManualToy, Scalar, Toy, classified, fit, joined, labelled, noted, relative_error, trainer, x
from torch import nn
from torch.utils.data import DataLoader

from lightning_accum import AccumulationStrategy, GradientAccumulation, Tokens

BATCHES = [x(1, 2), x(3, 4), x(5, 6), x(7, 8), x(9, 10)]


class Small(Scalar):
    """Can fail in any place; has a submodule, schedulers, what cannot be pickled, and a loader that the Tuner can rebuild."""

    def __init__(self, fails_in: str = "") -> None:
        super().__init__(lr=1e-3)
        self.fails_in, self.batch_size, self.learning_rate = fails_in, 4, 1e-3
        self.encoder = nn.Linear(1, 1, dtype=torch.float64)
        nn.init.ones_(self.encoder.weight)
        nn.init.zeros_(self.encoder.bias)
        self.register_buffer("rows", torch.zeros((), dtype=torch.long))
        self.file, self.helper = open(__file__), self.fail  # noqa: SIM115  # a method that it patched itself

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "file"}

    def fail(self, place: str) -> None:
        if self.fails_in == place:
            raise KeyboardInterrupt if place == "an interrupt" else ValueError(place)

    def setup(self, stage: str) -> None:
        self.fail("setup")

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.rows += len(batch)
        if self.rows > 9 and self.trainer.global_step:  # in the second half of a batch that is split, after a step
            self.fail("an interrupt")
            self.fail("training_step")
        loss = (self.encoder(batch[:, None].double())[:, 0] - self.w).square().mean()
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
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        every = {"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1), "interval": "step"}
        plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return [optimizer], [every, {"scheduler": plateau, "monitor": "train_loss", "interval": "epoch"}]


class Manual(Manually, Small):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.lr_schedulers()[0].step()


def fails(place: str, run: pl.Trainer, module: type[Small]) -> None:
    with pytest.raises(SystemExit if place == "an interrupt" else ValueError):
        run.fit(module(place))


ENDS: dict[str, Callable[[pl.Trainer, type[Small]], None]] = {
    "fit": lambda run, module: run.fit(module()),
    "lr_find": lambda run, module: Tuner(run).lr_find(module(), num_training=4, update_attr=False),
    "scale_batch_size": lambda run, module: Tuner(run).scale_batch_size(module(), max_trials=1),
    **{p: partial(fails, p) for p in ("setup", "configure_optimizers", "validation_step", "training_step", "an interrupt")},
}
POLICIES: dict[str, dict[str, Any]] = {
    "windows": {"window": 2},
    "split": {"micro_batch": 1, "window": 2},
    "token windows": {"window": Tokens(3)},
    "offload": {"micro_batch": "offload"},
    "row-wise": {"micro_batch": 1, "row_wise": "encoder"},
    "auto": {"micro_batch": "auto"},
    "skip": {"window": 2, "on_nonfinite": "skip"},
    "float64 sums": {"window": 2, "accumulate_dtype": torch.float64},
}


Placeholder = type("Placeholder", (pl.Callback,), {})  # in the place of the policy, where Lightning is alone


def quiet(**kwargs: Any) -> pl.Trainer:
    return trainer(**{"enable_progress_bar": True, **kwargs})


def shapes(run: pl.Trainer, lightnings: set[str]) -> dict[str, tuple[Any, ...]]:
    """The type of everything that is reached from a Trainer, its attributes (of the strategy, ``lightnings``), and functions."""
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
        kind = "strategy" if value is run.strategy else f"{type(value).__module__}.{type(value).__qualname__}"
        found[path] = (kind, getattr(value, "__qualname__", ""), sorted(attributes))
        left += [(f"{path}.{name}", attributes[name]) for name in sorted(attributes)]
        if isinstance(value, dict):
            left += [(f"{path}[{key if isinstance(key, str) else index}]", held) for index, (key, held) in enumerate(value.items())]
        elif isinstance(value, (list, tuple)):
            left += [(f"{path}[{index}]", held) for index, held in enumerate(value)]
    return found


def pickled(value: Any, by: Any = pickle) -> Any:
    return pickle.loads(by.dumps(value))


cloudpickled = partial(pickled, by=cloudpickle)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.some_cases(14, 12)
@pytest.mark.parametrize("end", ENDS)
@pytest.mark.parametrize(("module", "policy"), [*((Small, name) for name in POLICIES), (Manual, "windows"), (Manual, "offload")])
def test_a_trainer_and_all_that_it_reaches_is_as_lightning_alone_leaves_it(policy: str, module: type[Small], end: str) -> None:
    def holds_anything_of_a_fit(callback: GradientAccumulation) -> bool:
        seen, left = set(), [callback]
        while left:
            found = left.pop()
            if isinstance(found, (pl.Trainer, pl.LightningModule, torch.Tensor)):
                return True
            if id(found) not in seen and not isinstance(found, type):
                seen.add(id(found))
                left += [*getattr(found, "__dict__", {}).values(), *(found.values() if isinstance(found, dict) else ())]
                left += found if isinstance(found, (list, tuple, set)) else []
        return False

    if module is Manual and end == "lr_find":
        pytest.skip("the rate finder is for automatic optimization")
    cpu, accumulation = torch.device("cpu"), GradientAccumulation(**POLICIES[policy], log=False)
    plain = quiet(strategy=SingleDeviceStrategy(cpu), callbacks=[Placeholder(), TQDMProgressBar()])
    run = quiet(strategy=AccumulationStrategy(cpu), callbacks=[accumulation, TQDMProgressBar()])
    for one in (plain, run):
        ENDS[end](one, module)
        one.fit_loop.epoch_loop.manual_optimization.on_run_end()  # Lightning leaves its hooks on optimizers where a step failed
    lightnings = set(vars(plain.strategy))
    found, expected = shapes(run, lightnings), shapes(plain, lightnings)
    assert {path: (found.get(path), expected.get(path)) for path in found | expected if found.get(path) != expected.get(path)} == {}
    assert not holds_anything_of_a_fit(accumulation)
    for copied in (pickled, cloudpickled):
        copied(run)


def test_validation_after_a_fit_shows_none_of_its_metrics_and_the_next_fit_all() -> None:
    run = quiet(callbacks=[GradientAccumulation(2)], max_epochs=2)
    run.fit(module := Small())
    (metrics,) = run.validate(module, verbose=False)
    assert set(run.callback_metrics) == {"val_loss"}
    assert metrics["val_loss"] == pytest.approx(module.w.item(), rel=1e-6)  # Lightning averages it in single precision
    assert (len(run.test(module, verbose=False)), len(run.predict(module))) == (1, 3)
    run.fit_loop.max_epochs = 4
    run.fit(module)  # goes on, as with Lightning alone
    assert run.callback_metrics["window/optimizer_steps"] == run.global_step == 8


@pytest.mark.some_cases(8, 6)
@pytest.mark.parametrize("hook", ["setup", "on_fit_start", "on_train_start", "on_train_batch_start", "on_train_batch_end"])
@pytest.mark.parametrize("kind", [Toy, ManualToy])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_copy_trains_and_so_does_the_trainer_that_was_copied(optimizer: str, kind: type[Toy], hook: str) -> None:
    batches, (copying, copies) = labelled(1, 4, 2, 3), noted(hook, copy.deepcopy)
    found, of_the_copy, expected = (own(classified, optimizer) for own in (kind, kind, Toy))
    fit(found, batches, GradientAccumulation(2), copying, max_epochs=2)
    copies[0].fit(of_the_copy, DataLoader(batches, batch_size=None))
    fit(expected, [joined(batches[:2]), joined(batches[2:])], strategy="auto", max_epochs=2)
    for module in (found, of_the_copy):
        assert relative_error(module.parameters(), expected.parameters()) <= 1e-12
