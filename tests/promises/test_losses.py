"""Losses of many fields, in windows and split, against their batch: exact, or an error or a warning that names why not.

The table is in ``loss_table``, and what of it is not yet as it should be in ``loss_table/known.py``.
"""

from collections.abc import Callable, Iterable, Mapping
from functools import cache, partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from harness import assert_one_window_one_batch, dealt
from loss_table import BY_NAME, LOSSES
from loss_table.known import OPEN, OPEN_ON_RANKS, Known
from loss_table.rows import Loss, Trained, data, rows
from loss_table.training import WAYS, Outcome, by_hand, examine, faults, micro_batches, outcome
from processes import found_by_two_ranks
from sharded import ShardedLanguage, needs_sharding_on_cpu
from support import Toy, ddp, loader, sentences, trainer
from torch.nn import functional as F

from lightning_accum import DDPAccumulationStrategy, DoesNotAddUpError, GradientAccumulation
from lightning_accum.testing import adamw, assert_window_equals_batch

EVERY = 50
"""The part of the table that is trained on two ranks."""


class OpenError(AssertionError):
    """What the list of known faults says of a loss."""


def cases(losses: Iterable[Loss], known: Known = OPEN) -> list[Any]:
    """Those whose faults are known are expected to fail, until they are mended and taken off the list."""
    reasons = {name: reason for (_, reason), names in known.items() for name in names}

    def marks(loss: Loss) -> list[Any]:
        reason = reasons.get(loss.name)
        return [pytest.mark.xfail(strict=True, raises=OpenError, reason=reason)] if reason else []

    return [pytest.param(loss, id=loss.name.replace(" ", "_"), marks=marks(loss)) for loss in losses]


def assert_known(loss: Loss, outcomes: Mapping[Any, Outcome], known: Known) -> None:  # a fault that is on the list is an OpenError
    found = faults(loss, outcomes)
    assert found <= {fault for (fault, _), names in known.items() if loss.name in names}, f"{found}: {outcomes}"
    if found:
        raise OpenError(found)


def test_the_table_is_large_and_names_each_loss_once() -> None:
    names = [loss.name for loss in LOSSES]
    assert len(set(names)) == len(names) >= 570
    assert {name for known in (OPEN, OPEN_ON_RANKS) for of_reason in known.values() for name in of_reason} <= set(names)


@pytest.mark.some_cases(25, 90)
@pytest.mark.parametrize("loss", cases(LOSSES))
def test_a_loss_is_exact_or_is_not_trained_in_silence(loss: Loss) -> None:
    assert_known(loss, {way: examine(loss, way) for way in WAYS}, OPEN)


FOUND_ON_RANKS = (
    "metric learning: triplets, mean of those that are violated",
    "idioms: squares, a loop over samples, each over the number",
    "libraries: ignored labels and the nuclear norm",
    "strange: unlabelled positives",
    "papers: quality focal by positives",
    "papers: metric: Pearson",
    "papers: metric: R squared",
    "idioms: masked cross entropy, sum times one over a clamped count",
    "idioms: masked squares, einsum with the mask over its sum",
)
"""Those that were wrong on two ranks at some time: told of though exact, or one rank waited for another that had ended."""
NOT_YET = [name for names in OPEN_ON_RANKS.values() for name in names]
ON_RANKS = [loss for place, loss in enumerate(LOSSES) if place % EVERY == 0 or loss.name in (*FOUND_ON_RANKS, *NOT_YET)]
AT_ONCE = 15
"""Losses that a pair of processes trains with, one after another."""


def examine_on_rank(loss: Loss) -> Outcome:  # windows of two loader batches on each of two ranks, of 2 and 5 rows and of 1 and 4
    whole = data(loss)
    batches = micro_batches([whole], "windows")
    module, expected = Trained(loss), by_hand(loss, [whole])
    policy = GradientAccumulation(2, weight=loss.weight)
    run = trainer(DDPAccumulationStrategy(find_unused_parameters=True), devices=2, callbacks=[policy])
    return outcome(module, expected, lambda: run.fit(module, loader(batches[2 * dist.get_rank() :][:2])))


@pytest.fixture(scope="module")
def outcomes_on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Loss], list[Outcome]]:
    @cache
    def train(first: int) -> Callable[[str], list[Outcome]]:
        asked = {str(ON_RANKS.index(loss)): loss for loss in ON_RANKS[first : first + AT_ONCE]}
        return found_by_two_ranks(examine_on_rank, asked, tmp_path_factory.mktemp("outcomes"), deadline=200)

    def outcomes(loss: Loss) -> list[Outcome]:
        place = ON_RANKS.index(loss)
        return train(place // AT_ONCE * AT_ONCE)(str(place))

    return outcomes


@pytest.mark.exhaustive
@pytest.mark.parametrize("loss", cases(ON_RANKS, OPEN_ON_RANKS))
def test_on_two_ranks_a_loss_is_exact_or_is_not_trained_in_silence(
    outcomes_on_ranks: Callable[[Loss], list[Outcome]], loss: Loss
) -> None:
    found = outcomes_on_ranks(loss)
    told = found[:1] if found[0].word == "warned" else found  # warnings are those of rank 0
    assert "refused" not in {one.word for one in found} or found[0].said == found[1].said
    assert_known(loss, dict(enumerate(told)), OPEN_ON_RANKS)


SIZES = (2, 5, 1, 4, 3, 6, 2, 1)
RMSE = BY_NAME["forecasting: RMSE by hand"]
UNUSED = {"strategy": partial(ddp, find_unused_parameters=True), "devices": 2}
OVER_RANKS = (
    "criteria: cross entropy with ignored labels, mean",
    "criteria: cross entropy with ignored labels, sum",
    "idioms: masked squares, masked_fill, sum over a clamped count",
    "idioms: masked cross entropy, sum over the count and 1e-8",
    "multi-task: learned scales with ignored labels",
    "forecasting: RMSE by hand",
    "forecasting: logarithm of the mean squared error",
    "forecasting: root of a masked mean",
    "forecasting: root of a sum",
)


def batches(loss: Loss) -> list[Any]:  # the rows of loader batches
    return [rows(loss, seed, size) for seed, size in enumerate(SIZES)]


@pytest.mark.some_cases(3)
@pytest.mark.parametrize("name", OVER_RANKS)
def test_over_ranks_a_window_is_its_full_batch(name: str) -> None:
    loss = BY_NAME[name]
    assert_window_equals_batch(Trained(loss), batches(loss), GradientAccumulation(2), optimizers=[adamw], **UNUSED)


def test_a_rank_that_never_had_a_loss_learns_the_function_of_a_mean_from_the_others() -> None:
    by_rank = [batches(RMSE)[:4], [None, None, None, batches(RMSE)[4]]]
    assert_window_equals_batch(Trained(RMSE), by_rank, GradientAccumulation(2), by_rank=True, optimizers=[adamw], **UNUSED)


@needs_sharding_on_cpu
def test_over_shards_a_function_of_a_mean_is_that_of_the_full_batch() -> None:
    class Perplexity(ShardedLanguage):  # its loss is the exponential of a cross entropy
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (0.1 * super().training_step(batch, batch_idx)).exp()

    by_rank = dealt(sentences(24), 3, "fsdp2")
    assert_one_window_one_batch(partial(Perplexity, "sgd"), by_rank, GradientAccumulation(2), "fsdp2")


def test_a_loss_that_begins_to_compare_rows_by_what_steps_have_left_is_refused() -> None:
    class RevivesColumns(Trained):
        """Columns that were small in three batches have another loss, as dead latents of a sparse autoencoder."""

        since = torch.zeros(4)

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            out = self.net(batch["x"])
            self.since = (self.since + 1) * ~(out.detach() > 0.3).any(0)
            is_dead = self.since > 2
            loss = super().training_step(batch, batch_idx)
            return loss + (out - 1)[:, is_dead].square().sum(1).mean() if is_dead.any() else loss

    module = RevivesColumns(BY_NAME["criteria: mean squared error, mean"])
    first, *others = batches(module.row)
    with pytest.raises(DoesNotAddUpError):
        assert_window_equals_batch(module, [first, None, *others], GradientAccumulation(3))


def test_a_micro_batch_without_error_has_a_gradient_as_in_the_full_batch() -> None:
    """Where it is alone, the slope of its root is infinite."""
    module, own = Toy(lambda net, batch: F.mse_loss(batch["x"] * net.bias, batch["y"]).sqrt()), batches(RMSE)[:4]
    for place in (1, 3):
        own[place] = [{**row, "y": row["x"] * module.net.bias.detach()} for row in own[place]]
    assert_window_equals_batch(module, own, GradientAccumulation(4, on_nonfinite="raise"))


@pytest.mark.filterwarnings("error::lightning_accum.AccumulationWarning")
@pytest.mark.parametrize("loss", [BY_NAME["multi-task: a sum of sums over rows"], RMSE], ids=lambda loss: loss.name)
def test_a_factor_may_change_from_window_to_window(loss: Loss) -> None:
    class Annealed(Trained):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return (1 + self.global_step) * super().training_step(batch, batch_idx)

    assert_window_equals_batch(Annealed(loss), batches(loss), GradientAccumulation(2))
