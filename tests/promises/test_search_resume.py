"""A random search over resume: a training that is stopped and goes on in a new Trainer ends as the one that was not stopped.

Each seed draws a training and where it is stopped, see :class:`Point`. One of them: ``pytest -n 0 -m "" -k "one and seed017"``.
Over two processes all seeds run inside one pair.

What Lightning's checkpoints do not hold is not in the search, see the guide: the module's own epoch means, ReduceLROnPlateau,
loaders without a length. The loader here knows its place, and a callback keeps the random state.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from processes import found_by_two_ranks
from support import OPTIMIZERS, pad, seeds_of_a_search, trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import DDPAccumulationStrategy, GradientAccumulation, SampleCount, TokenCount, Tokens

ONE_PROCESS, TWO_PROCESSES = 400, 120
"""How many seeds."""


# --- what is drawn -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class ByStep:
    """A window that is a function of the optimizer step."""

    sizes: tuple[int, ...]

    def __call__(self, step: int) -> int:
        return self.sizes[step % len(self.sizes)]


@dataclass(frozen=True)
class Point:
    """A training, and where it is stopped.

    ``batches`` has a string a rank, with a letter a loader batch: b, n (with a NaN) or 0 (None). ``hook`` takes the checkpoints.
    """

    seed: int
    batches: tuple[str, ...]
    epochs: int
    max_steps: int
    policy: dict[str, Any]
    optimizer: str
    scheduler: tuple[str, int] | None
    dropout: float
    clip: float | None
    memory: int
    sync: str
    stops: int
    hook: str


def draw(seed: int, ranks: int) -> Point:
    """The point of a seed."""
    rng = random.Random(seed)
    most = rng.randint(3, 7)
    on_nonfinite = rng.choice(["propagate", "propagate", "skip"])
    letters = "bbbbbb" + rng.choice(["", "", "0"]) + ("n" if on_nonfinite == "skip" else "")
    lengths = [most, *(max(1, most - rng.choice([0, 0, 1, 2])) for _ in range(ranks - 1))]
    weight = rng.choice(["auto", "auto", "auto", "equal", TokenCount(), SampleCount()])
    tokens = {"equal": (1, 4), SampleCount: (3, 12)}.get(weight if weight == "equal" else type(weight), (10, 70))
    window: Any = rng.choice(
        [
            rng.randint(1, most),
            {0: rng.randint(1, most), 1: rng.randint(1, most)},
            ByStep(tuple(rng.randint(1, most) for _ in range(3))),
            Tokens(rng.randint(*tokens)),
        ]
    )
    policy = {
        "window": window,
        "tail": rng.choice(["step", "drop", "carry"]),
        "weight": weight,
        "micro_batch": rng.choice([None, None, 1, 2, Tokens(rng.randint(6, 20)), "auto"]),
        "on_nonfinite": on_nonfinite,
        "scheduler_counts": rng.choice(["optimizer_steps", "micro_batches"]),
        "trim_padding": rng.choice([True, False]),
        "check": isinstance(weight, str),  # it would refuse the others: they do not count what the loss is divided by
    }
    may_reduce_at_each = on_nonfinite == "propagate" and (policy["micro_batch"] is None or type(policy["micro_batch"]) is int)
    found = Point(
        seed=seed,
        batches=tuple("".join(rng.choice(letters) for _ in range(length)) for length in lengths),
        epochs=rng.randint(1, 3),
        max_steps=rng.choice([-1, -1, rng.randint(1, 6)]),
        policy=policy,
        optimizer=rng.choice(list(OPTIMIZERS)),
        scheduler=rng.choice([None, ("step", 1), ("step", rng.randint(2, 3)), ("epoch", 1)]),
        dropout=rng.choice([0.0, 0.3]),
        clip=rng.choice([None, None, 0.1]),
        memory=rng.randint(1, 3) if policy["micro_batch"] == "auto" else 1000,
        sync=rng.choice(["window", "micro_batch"]) if may_reduce_at_each else "window",
        stops=rng.choice([1, 1, 2]),
        hook=rng.choice(["on_train_batch_end", "on_train_batch_end", "on_train_epoch_end", "on_validation_end"]),
    )
    if found.dropout:  # drawn by shape, and a resumed fit tries out anew, on its own rows, whether padding may be trimmed
        policy["trim_padding"] = False
    return found


def batches_of(point: Point, rank: int) -> list[Any]:
    """Sequences of unequal lengths."""
    generator = torch.Generator().manual_seed(1000 * point.seed + rank)

    def number(most: int) -> int:
        return int(torch.randint(1, most + 1, (), generator=generator))

    def batch(letter: str) -> Any:
        rows = pad([torch.randint(0, 11, (number(7),), generator=generator) for _ in range(number(5))])
        noise = torch.zeros(len(rows["labels"]))
        noise[0] = torch.nan if letter == "n" else 0.0
        return None if letter == "0" else {**rows, "noise": noise}

    return [batch(letter) for letter in point.batches[rank]]


# --- what is trained -----------------------------------------------------------------------------------------------------


class Loader:
    """Knows the place of all ranks in the epoch, which the Trainer counts: Lightning saves the state of rank 0's loader only."""

    def __init__(self, batches: list[Any], module: Module) -> None:
        self.batches, self.module, self.begin_at = batches, module, 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        start, self.begin_at = self.begin_at, 0
        yield from self.batches[start:]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.module.trainer.fit_loop.epoch_loop.batch_progress.current.ready}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin_at = state["at"] % max(map(len, self.module.point.batches))


class Module(pl.LightningModule):
    def __init__(self, point: Point) -> None:
        super().__init__()
        torch.manual_seed(point.seed)
        self.point = point
        self.net = nn.Sequential(nn.Embedding(11, 6), nn.Dropout(point.dropout), nn.Tanh(), nn.Linear(6, 11))

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if len(batch["labels"]) > self.point.memory:
            raise torch.OutOfMemoryError("as if")
        logits = self.net(batch["input_ids"]) + batch["noise"][:, None, None]
        return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        pass

    def train_dataloader(self) -> Loader:
        return Loader(batches_of(self.point, self.trainer.global_rank), self)

    def val_dataloader(self) -> list[int]:
        return [1]

    def configure_optimizers(self) -> Any:
        optimizer = OPTIMIZERS[self.point.optimizer](self.parameters())
        if self.point.scheduler is None:
            return optimizer
        interval, frequency = self.point.scheduler
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return [optimizer], [{"scheduler": scheduler, "interval": interval, "frequency": frequency}]


class RandomState(Callback):
    """Random numbers go on where they were: Lightning's checkpoints do not hold their state."""

    states: list[Tensor] | None = None

    def state_dict(self) -> dict[str, Any]:
        states: list[Any] = [torch.get_rng_state()]
        if dist.is_initialized():
            states = [None] * dist.get_world_size()
            dist.all_gather_object(states, torch.get_rng_state())
        return {"states": states}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.states = state_dict["states"]

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        if self.states is not None:
            torch.set_rng_state(self.states[trainer.global_rank])


class Stop(Callback):
    """Takes a checkpoint in a hook, once ``after`` loader batches are done, or at the end; and ends the training."""

    def __init__(self, hook: str, after: int | None) -> None:
        self.hook, self.after, self.is_done = hook, after, False

    def stop(self, trainer: pl.Trainer, hook: str) -> None:
        is_due = self.after is not None and trainer.fit_loop.epoch_loop.batch_progress.total.ready >= self.after
        if is_due and not self.is_done and hook in (self.hook, "on_train_end"):
            self.is_done = trainer.should_stop = True
            trainer.save_checkpoint("stopped.ckpt")

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.stop(trainer, "on_train_batch_end")

    def on_validation_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.stop(trainer, "on_validation_end")

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.stop(trainer, "on_train_epoch_end")

    def on_train_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.stop(trainer, "on_train_end")


class Record(Callback):
    """Writes down the last window of each loader batch that ended one, the loss of each epoch, and what a training ends with.

    Without the tail that the stop itself makes: the checkpoint was taken before it.
    """

    def __init__(self, stop: Stop) -> None:
        self._stop = stop
        self.windows: dict[int, dict[str, float]] = {}
        self.epochs: dict[int, float] = {}
        self.batches = self._steps = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self._steps = trainer.global_step

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.batches = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if self._stop.is_done:
            return
        if trainer.global_step > self._steps:
            shown = {name: float(value) for name, value in trainer.callback_metrics.items() if name.startswith("window/")}
            self.windows[self.batches] = {name: value for name, value in shown.items() if name not in _NOT_OF_THE_WINDOW}
            self.windows[self.batches]["epoch"] = trainer.current_epoch
        self._steps = trainer.global_step

    def on_train_epoch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        self.epochs[trainer.current_epoch] = float(trainer.callback_metrics.get("window/loss_epoch", torch.nan))

    def end(self, trainer: pl.Trainer) -> None:
        self.at_end = {
            "parameters": dict(trainer.lightning_module.named_parameters()),
            "optimizer": trainer.optimizers[0].state_dict(),
            "scheduler": [config.scheduler.state_dict() for config in trainer.lr_scheduler_configs],
            "optimizer steps": trainer.global_step,
            "loader batches": trainer.fit_loop.epoch_loop.batch_progress.total.ready,
        }


_NOT_OF_THE_WINDOW = ("window/weight_per_second", "window/loss_epoch", "window/micro_batch_size")
"""The clock's, the epoch's before, and what a rank without a batch goes on showing of its last one."""


def train(point: Point, stops_after: int | None = None, resumes: bool = False) -> Record:
    """Train, to the end or to a stop, from the beginning or from the last stop."""
    stop, ranks = Stop(point.hook, stops_after), len(point.batches)
    record = Record(stop)
    run = trainer(
        DDPAccumulationStrategy(sync=point.sync) if ranks > 1 else "accum",
        devices=ranks,
        max_epochs=point.epochs,
        max_steps=point.max_steps,
        gradient_clip_val=point.clip,
        num_sanity_val_steps=0,
        limit_val_batches=1 if point.hook == "on_validation_end" else 0,
        val_check_interval=1 + point.seed % min(map(len, point.batches)),
        callbacks=[GradientAccumulation(**point.policy), RandomState(), record, stop],
    )
    run.fit(Module(point), ckpt_path="stopped.ckpt" if resumes else None)
    record.end(run)
    return record


# --- what is compared ----------------------------------------------------------------------------------------------------


ROUNDING = 1e-5  # over several ranks a checkpoint holds the sum of their gradients, which is added up in another order then


def differences(found: Any, expected: Any, where: str, limit: float) -> list[str]:
    """Where two nests of tensors and numbers are not the same, to the bit if the ``limit`` of their relative difference is 0."""
    if isinstance(expected, dict) and isinstance(found, dict):
        if found.keys() != expected.keys():
            return [f"{where}: has {sorted(map(str, found))}, expected {sorted(map(str, expected))}"]
        return [line for key in expected for line in differences(found[key], expected[key], f"{where} {key}", limit)]
    if isinstance(expected, (list, tuple)) and len(found) == len(expected):
        return [line for a, b in zip(found, expected, strict=True) for line in differences(a, b, where, limit)]
    if isinstance(expected, Tensor):
        apart = 0.0 if torch.equal(found, expected) else float((found - expected).abs().max())
        return [] if apart <= limit * float(expected.abs().max()) else [f"{where}: off by {apart:.1e}"]
    is_near = isinstance(expected, float) and abs(found - expected) <= limit * abs(expected)
    both_nan = found != found and expected != expected
    return [] if found == expected or both_nan or is_near else [f"{where}: {found}, expected {expected}"]


def examine(point: Point) -> list[str]:
    """What differs, on this rank, between the training of a point and the one that was stopped once or twice and went on."""
    whole, rng = train(point), random.Random(point.seed)
    stops = sorted(rng.randint(1, max(1, whole.batches - 1)) for _ in range(point.stops))
    parts = [train(point, after, number > 0) for number, after in enumerate([*stops, None])]
    windows = {at: window for part in parts for at, window in part.windows.items()}
    epochs = {epoch: loss for part in parts for epoch, loss in part.epochs.items()}  # stopped inside one, it is not the last word
    limit = 0.0 if len(point.batches) == 1 else ROUNDING
    found = differences(parts[-1].at_end, whole.at_end, "at the end,", limit)
    found += differences(windows, whole.windows, "the window that ended with loader batch", limit)
    found += differences(epochs, whole.epochs, "window/loss_epoch of epoch", limit)
    return found and [f"{point}, stopped after {stops}", *found]


# --- one process, and two ------------------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("seed", seeds_of_a_search(range(ONE_PROCESS), 55))
def test_on_one_process(seed: int) -> None:
    found = examine(draw(seed, ranks=1))
    assert not found, "\n".join(found)


@pytest.fixture(scope="module")
def found(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """What both ranks found, by seed: those of the tests that were asked for, in one pair of processes."""
    tests = [item for item in request.session.items if getattr(item, "originalname", "") == "test_on_two_processes"]
    asked = {str(item.callspec.params["seed"]): draw(item.callspec.params["seed"], ranks=2) for item in tests}
    return found_by_two_ranks(examine, asked, tmp_path_factory.mktemp("found"), deadline=600)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", seeds_of_a_search(range(TWO_PROCESSES), 20))
def test_on_two_processes(seed: int, found: Any) -> None:
    assert found(str(seed)) == [[], []], draw(seed, ranks=2)
