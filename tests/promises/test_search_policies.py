"""A search over combinations of policy arguments: each point trains as a hand-written loop does on full batches, also resumed.

A point is drawn from its seed, and a failure shows it. The first seeds, and one that changes by date, run with what is exhaustive.
One of them: ``pytest -m "" -k "one_rank and seed017" tests/promises/test_search_policies.py``.
"""

from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import replace
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from harness import Unsized
from lightning.fabric.utilities.exceptions import MisconfigurationException
from processes import found_by_two_ranks
from search_by_hand import ByHand, Outcome, optimizer_of, scheduler_of
from search_points import Batch, Net, Point, draw
from sharded import needs_sharding_on_cpu, shard, whole_parameters
from support import relative_error, seeds_of_a_search, trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_accum import DDPAccumulationStrategy, GradientAccumulation, GradientNoiseScale, ModelParallelAccumulationStrategy

pytestmark = pytest.mark.filterwarnings("ignore")

SEEDS = {"accum": range(330), "ddp": range(66), "fsdp2": range(24)}
EXACT = 1e-12
UNIT = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8}
WHILE_TRAINING = ("is not finite: ", "reach its size, but the loss is a sum")  # seen at a loss that a training may not come to
REFUSED = (MisconfigurationException, ValueError, FloatingPointError)


class Searched(pl.LightningModule):  # trains the net of a point, and notes what each optimizer step was made of
    def __init__(self, point: Point) -> None:
        super().__init__()
        self.allow_zero_length_dataloader_with_multiple_devices = True
        self.point, self.net, self.outcome = point, Net(point), Outcome()
        self.begun: Outcome | None = None

    def configure_model(self) -> None:
        if self.point.engine == "fsdp2":
            shard(self, [self.net])

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor | None:
        if self.point.memory is not None and len(batch["labels"]) > self.point.memory:
            raise torch.OutOfMemoryError("the test says so")
        loss = self.net(batch)
        return loss if batch["has_loss"] else None

    def train_dataloader(self) -> Any:
        batches = self.point.batches[self.trainer.global_rank]
        if self.point.goes_on_after:
            return Placed(batches, self.trainer, max(self.point.lengths))
        return DataLoader(batches if self.point.is_sized else Unsized(batches), batch_size=None)

    def configure_optimizers(self) -> Any:
        optimizer, module = optimizer_of(self.point, self.net), self

        class Noting(type(optimizer)):
            def step(self, closure: Any = None) -> Any:
                loss = closure()
                module.outcome.rates.append(self.param_groups[0]["lr"])
                super().step()
                return loss

        optimizer.__class__ = Noting
        scheduler = {key: value for key, value in self.point.scheduler.items() if key != "kind"}
        return [optimizer], [{"scheduler": scheduler_of(self.point, optimizer), **scheduler}]

    def on_window_end(self, window: Any) -> None:
        if window.has_stepped:
            self.outcome.losses.append(float(window.loss))


class Placed(DataLoader):
    """Knows the place of all ranks in the epoch, which the Trainer counts: Lightning saves the state of rank 0's loader only."""

    def __init__(self, batches: list[Any], trainer: pl.Trainer, longest: int) -> None:
        super().__init__(batches, batch_size=None)
        self.progress, self.longest, self.begin_at, self.drawn = trainer.fit_loop.epoch_loop.batch_progress, longest, 0, 0

    def __iter__(self) -> Iterator[Any]:
        self.drawn, self.begin_at = self.begin_at, 0
        for batch in islice(super().__iter__(), self.drawn, None):
            self.drawn += 1
            yield batch

    def state_dict(self) -> dict[str, int]:
        return {"at": max(self.drawn, self.progress.current.ready)}  # a window may be drawn before it runs

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin_at = state["at"] % self.longest


HEARD = ("on_before_backward", "on_before_zero_grad", "on_before_optimizer_step", "on_train_batch_start")
CALLBACKS: dict[str, Callable[[], pl.Callback]] = {
    "listener": lambda: pl.callbacks.LambdaCallback(**dict.fromkeys(HEARD, lambda *_: None)),
    "saver": lambda: pl.callbacks.LambdaCallback(on_train_batch_end=lambda trainer, *_: trainer.save_checkpoint("any.ckpt")),
    "noise": GradientNoiseScale,
}


class Stopper(pl.Callback):  # ends a training after so many loader batches; its checkpoint is taken before the tail that this makes
    def __init__(self, after: int, checkpoint: str | None = None) -> None:
        self.left, self.checkpoint = after, checkpoint

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, *_: Any) -> None:
        self.left -= 1
        if self.left == 0:
            trainer.should_stop = True
            if self.checkpoint is not None:
                trainer.save_checkpoint(self.checkpoint)
                pl_module.begun = deepcopy(pl_module.outcome)


def train(point: Point, *more: pl.Callback, **checkpoint: str) -> Searched:  # as the package does
    callbacks = [GradientAccumulation(**point.arguments())]
    callbacks += [CALLBACKS[name]() for name in point.callbacks]
    callbacks += [] if point.stops_after is None else [Stopper(point.stops_after)]
    strategy: Any = "accum"
    if point.engine == "ddp":
        strategy = DDPAccumulationStrategy(**point.strategy)
    elif point.engine == "fsdp2":
        strategy = ModelParallelAccumulationStrategy(2, 1, save_distributed_checkpoint=False, **point.strategy)
    module = Searched(point)
    run = trainer(strategy, devices=point.ranks, callbacks=[*callbacks, *more], **point.trainer)
    run.fit(module, **checkpoint)
    module.outcome.parameters = list(whole_parameters(module.net).values())
    module.outcome.steps, module.outcome.last_rate = run.global_step, run.optimizers[0].param_groups[0]["lr"]
    if point.policy["log"] and module.outcome.losses:
        assert float(run.callback_metrics["window/loss"]) == pytest.approx(module.outcome.losses[-1], rel=EXACT, nan_ok=True)
    return module


def train_in_two_parts(point: Point) -> Outcome:
    """The second goes on from a checkpoint of the first, unless that has come to the end."""
    path = f"{point.engine}{point.seed}.ckpt"
    first = train(point, Stopper(point.goes_on_after, path))
    if first.begun is None:
        return first.outcome
    begun, found = first.begun, train(point, ckpt_path=path).outcome
    return replace(found, rates=begun.rates + found.rates, losses=begun.losses + found.losses)


def compare(found: Outcome, point: Point) -> None:
    expected = ByHand(point).train()
    assert len(found.rates) == len(expected.rates), "optimizer steps"
    assert found.steps == expected.steps, "steps that were counted"
    assert found.rates == pytest.approx(expected.rates, rel=EXACT), "learning rates"
    assert found.last_rate == pytest.approx(expected.last_rate, rel=EXACT), "learning rate at the end"
    assert found.losses == pytest.approx(expected.losses, rel=1e-11, abs=EXACT, nan_ok=True), "window/loss"
    # of a narrow type, a sum on the other side of a tie is rounded to the neighbour, once a step; so is the parameter
    bound = EXACT if not point.is_low_precision else 2 * UNIT[point.dtype] * max(1, len(found.rates))
    assert relative_error(found.parameters, expected.parameters) < bound, "parameters"


def check(point: Point, found: Outcome | BaseException) -> None:
    """That a point came out as by hand, or was refused where it has to be."""
    print(point)
    if point.goes_on_after and point.weight == "list" and len(set(point.lengths)) > 1:
        pytest.skip("the loader of rank 0, whose state is saved, does not know how far others have drawn their windows")
    refusals = point.refusals()
    if isinstance(found, BaseException):
        if not any(refusal in str(found) for refusal in refusals):
            raise AssertionError(f"{point}\nwas not to be refused") from found
        return
    missed = [refusal for refusal in refusals if refusal not in WHILE_TRAINING]
    assert not missed, f"{point}\nwas to be refused: {missed}"
    try:
        compare(found, point)
    except AssertionError as error:
        raise AssertionError(f"{error}\n{point}") from None


def attempt(point: Point) -> Outcome | BaseException:
    try:
        return train_in_two_parts(point) if point.goes_on_after else train(point).outcome
    except REFUSED as error:
        return error


@pytest.mark.parametrize("seed", seeds_of_a_search(SEEDS["accum"], 60))
def test_one_rank(seed: int) -> None:
    check(point := draw(seed), attempt(point))


@pytest.mark.parametrize("seed", seeds_of_a_search(SEEDS["accum"], 40))
def test_one_rank_resumed(seed: int) -> None:
    check(point := draw(seed).resumed(), attempt(point))


def test_a_tail_of_tokens_that_were_counted_before_they_ran_is_dropped() -> None:
    check(point := replace(draw(35), stops_after=None), attempt(point))


@pytest.fixture(scope="module")
def outcomes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Of both ranks, by engine and seed: those of the tests that were asked for."""
    tests = [item for item in request.session.items if getattr(item, "originalname", "") == "test_two_ranks"]
    points = [point_of(**item.callspec.params) for item in tests]
    asked = {f"{point.engine}{point.seed}{point.goes_on_after}": point for point in points}
    return found_by_two_ranks(attempt, asked, tmp_path_factory.mktemp("outcomes"), deadline=600)


def point_of(engine: str, seed: int, is_resumed: bool) -> Point:
    return draw(seed, engine).resumed() if is_resumed else draw(seed, engine)


# 36: no batch on a rank, and a loader whose state was saved when it had drawn one too many
DDP = seeds_of_a_search(SEEDS["ddp"], 12, "ddp", faults=[36])
FSDP2 = seeds_of_a_search(SEEDS["fsdp2"], 6, "fsdp2", [needs_sharding_on_cpu])
RESUMED = [pytest.param(*case.values, True, id=f"{case.id} resumed", marks=case.marks) for case in DDP]
WHOLE = [pytest.param(*case.values, False, id=case.id, marks=case.marks) for case in (*DDP, *FSDP2)]


@pytest.mark.parametrize(("engine", "seed", "is_resumed"), [*WHOLE, *RESUMED])
@pytest.mark.timeout(900)
def test_two_ranks(outcomes: Any, engine: str, seed: int, is_resumed: bool) -> None:
    point = point_of(engine, seed, is_resumed)
    found = outcomes(f"{engine}{seed}{point.goes_on_after}")
    for of_rank in found:
        check(point, of_rank)
    if not isinstance(found[0], BaseException):
        assert all(torch.equal(a, b) for a, b in zip(found[0].parameters, found[1].parameters, strict=True)), point


def test_at_most_a_third_of_the_points_is_refused() -> None:
    for engine, drawn in SEEDS.items():
        refused = sum(bool(draw(seed, engine).refusals()) for seed in drawn)
        assert refused <= len(drawn) / 3, engine
