"""Losses of many fields, in windows and split, against their batch by hand: exact, or an error or a warning that names why not.

The table is in `loss_table`, and what of it is not yet as it should be in `loss_table/known.py`.
"""

from __future__ import annotations

import os
import traceback
import warnings
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import pytest
import torch
from loss_table import LOSSES
from loss_table.known import OPEN, OPEN_ON_RANKS, Known
from loss_table.rows import Kind, Loss, Trained, data
from loss_table.training import WAYS, Outcome, accumulation, by_hand, examine, faults, micro_batches, outcome
from processes import run_ranks
from support import loader, relative_error, trainer

from lightning_accum import AccumulationWarning, DDPAccumulationStrategy, GradientAccumulation

EVERY = 25
"""The part of the table that is trained on two ranks, and by AdamW."""


class OpenError(AssertionError):
    """What the list of known faults says of a loss."""


def cases(losses: Iterable[Loss], known: Known = OPEN) -> list[Any]:
    """Those whose faults are known are expected to fail, until they are mended and taken off the list."""
    reasons = {name: reason for (_, reason), names in known.items() for name in names}

    def marks(loss: Loss) -> list[Any]:
        reason = reasons.get(loss.name)
        return [pytest.mark.xfail(strict=True, raises=OpenError, reason=reason)] if reason else []

    return [pytest.param(loss, id=loss.name.replace(" ", "_"), marks=marks(loss)) for loss in losses]


def assert_known(loss: Loss, outcomes: Mapping[Any, Outcome], known: Known) -> None:
    """A fault that is on the list is an OpenError."""
    found = faults(loss, outcomes)
    assert found <= {fault for (fault, _), names in known.items() if loss.name in names}, f"{found}: {outcomes}"
    if found:
        raise OpenError(found)


def test_the_table_is_large_and_names_each_loss_once() -> None:
    names = [loss.name for loss in LOSSES]
    assert len(set(names)) == len(names) >= 400
    assert {name for known in (OPEN, OPEN_ON_RANKS) for of_reason in known.values() for name in of_reason} <= set(names)


def test_false_alarms_are_at_most_one_in_a_hundred() -> None:
    """Each row of the table is asserted to have no fault that the list does not have, so the list counts them."""
    alarms = {name for (fault, _), names in OPEN.items() if fault == "false alarm" for name in names}
    assert len(alarms) <= len(LOSSES) / 100


@pytest.mark.some_cases(60, 400)
@pytest.mark.parametrize("loss", cases(LOSSES))
def test_a_loss_is_exact_or_is_not_trained_in_silence(loss: Loss) -> None:
    assert_known(loss, {way: examine(loss, way) for way in WAYS}, OPEN)


ADD_UP = [loss for loss in LOSSES if loss.kind is Kind.ADDS_UP and not any(loss.name in names for names in OPEN.values())]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("loss", cases([loss for loss in ADD_UP if not loss.refused][:: 2 * EVERY]))
def test_several_steps_of_adamw_are_those_of_the_batches(loss: Loss, way: str) -> None:
    batches = [data(loss, seed) for seed in range(3)]
    module, expected = Trained(loss, "adamw"), by_hand(loss, batches, "adamw")
    with warnings.catch_warnings():
        warnings.simplefilter("error", AccumulationWarning)
        run = trainer(callbacks=[accumulation(loss, way)])
        run.fit(module, loader(micro_batches(batches, way)))
    assert run.global_step == 3
    assert relative_error(module.trained, expected.trained) <= loss.limit


# --- two ranks ---

FOUND_ON_RANKS = (
    "metric learning: triplets, mean of those that are violated",
    "idioms: cross entropy, a loop over samples, each over the number",
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


def examine_on_rank(loss: Loss, rank: int) -> Outcome:
    """Windows of two loader batches on each of two ranks, of 2 and 5 rows and of 1 and 4."""
    whole = data(loss)
    batches = micro_batches([whole], "windows")
    module, expected = Trained(loss), by_hand(loss, [whole])
    run = trainer(
        DDPAccumulationStrategy(find_unused_parameters=True), devices=2, callbacks=[GradientAccumulation(2, weight=loss.weight)]
    )
    return outcome(module, expected, lambda: run.fit(module, loader(batches[2 * rank : 2 * rank + 2])))


AT_ONCE = 15
"""Losses that a pair of processes trains with, one after another."""


@pytest.fixture(scope="module")
def outcomes_on_ranks(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Loss], list[Outcome]]:
    folder = tmp_path_factory.mktemp("outcomes")

    @cache
    def train(first: int) -> list[str]:
        def work(rank: int) -> None:
            os.environ.update(LOCAL_RANK=str(rank), WORLD_SIZE="2", NODE_RANK="0")
            for place, loss in enumerate(ON_RANKS[first : first + AT_ONCE], start=first):
                try:
                    found: Any = examine_on_rank(loss, rank)
                except Exception:
                    found = traceback.format_exc()
                torch.save(tuple(found) if isinstance(found, Outcome) else found, folder / f"{place}.{rank}")

        with pytest.MonkeyPatch.context() as patch:
            patch.chdir(folder)
            return run_ranks(work, 2, deadline=200)

    def outcomes(loss: Loss) -> list[Outcome]:
        place = ON_RANKS.index(loss)
        assert train(place // AT_ONCE * AT_ONCE) == ["ended", "ended"]
        return [Outcome(*torch.load(folder / f"{place}.{rank}")) for rank in range(2)]

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
