"""Which rows make a micro-batch and what is trimmed of them: against the batch itself, row by row."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_accum import AccumulationError, UnsplittableBatchError
from lightning_accum.splitting.memory import MicroBatchSizes
from lightning_accum.splitting.micro_batch import Tokens
from lightning_accum.splitting.packing import MicroBatchSize
from lightning_accum.splitting.plan import Plan, Planner

Batch = dict[str, Tensor]
SIDES = ["left", "right", "both"]
SIZES: list[MicroBatchSize] = [1, 3, 5, Tokens(8), Tokens(20), Tokens(37), "auto"]
LENGTH = 12


def padded(side: str, seed: int, rows: int = 11, length: int = LENGTH) -> Batch:
    """Rows of tokens that all differ and are not 0, of random lengths, one of them full."""
    dice = random.Random(seed)
    ids, mask = torch.zeros(rows, length, dtype=torch.long), torch.zeros(rows, length, dtype=torch.long)
    for row in range(rows):
        width = length if row == rows // 2 else dice.randint(1, length)
        start = {"left": length - width, "right": 0, "both": dice.randint(0, length - width)}[side]
        mask[row, start : start + width] = 1
        ids[row, start : start + width] = torch.arange(rows * length, 0, -1).reshape(rows, length)[row, :width]
    tensors = {"ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}
    return {**tensors, "hot": ids[..., None] * torch.tensor([1, 2]), "target": torch.arange(rows) * 10}


def full(rows: int = 11, length: int = LENGTH) -> Batch:
    ids = torch.arange(rows * length, 0, -1).reshape(rows, length)
    return {"ids": ids, "attention_mask": torch.ones_like(ids), "target": torch.arange(rows) * 10}


def of_widths(*widths: int) -> Batch:
    """Rows padded on the right, none of them full."""
    mask = (torch.arange(max(widths) + 1) < torch.tensor(widths)[:, None]).long()
    return {"ids": mask, "attention_mask": mask.clone(), "target": torch.arange(len(widths)) * 10}


def sizes_of(limit: int = 4) -> MicroBatchSizes:
    """What remains after a micro-batch twice as large ran out of memory, whatever its rows cost."""
    sizes = MicroBatchSizes(may_grow=lambda: False)
    sizes.halve(1, 2 * limit)
    sizes.end_batch([])
    return sizes


class Proofs:
    """Notes what was asked, and answers."""

    def __init__(self, answer: str | Callable[[Batch, Batch], str | None] | None = None) -> None:
        self.answer = answer
        self.asked: list[tuple[Batch, Batch]] = []

    def __call__(self, with_padding: Batch, without: Batch) -> str | None:
        self.asked.append((with_padding, without))
        return self.answer(with_padding, without) if callable(self.answer) else self.answer


def planner(size: MicroBatchSize, **options: Any) -> Planner:
    return Planner(size, sizes_of() if size == "auto" else None, **options)


def rows_of(micro_batches: Sequence[Batch]) -> list[int]:
    """Which rows of the batch these are, by their targets."""
    return [target // 10 for micro_batch in micro_batches for target in micro_batch["target"].tolist()]


def tokens_of(ids: Tensor) -> list[list[int]]:
    return [[token for token in row if token] for row in ids.tolist()]


def assert_rows_of(micro_batch: Batch, batch: Batch) -> None:
    """Nothing but padding is missing: in every tensor the same columns of the batch, and padding in all others."""
    rows = rows_of([micro_batch])
    assert tokens_of(micro_batch["ids"]) == tokens_of(batch["ids"][rows])
    first = (batch["ids"][rows] != 0).any(0).nonzero()[0].item()  # the mask is where the ids are not 0
    width = micro_batch["ids"].shape[1]
    starts = [start for start in {0, first} if torch.equal(batch["ids"][rows][:, start : start + width], micro_batch["ids"])]
    assert starts
    for name in batch:
        part = batch[name][rows] if name == "target" else batch[name][rows][:, starts[0] : starts[0] + width]
        assert torch.equal(micro_batch[name], part), name


def narrowest(micro_batch: Batch, batch: Batch) -> int:
    """The columns from the first token of these rows to the last."""
    columns = batch["attention_mask"][rows_of([micro_batch])].any(0).nonzero()
    return int(columns.max() - columns.min()) + 1


# --- every batch ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trim", [True, False, "attention_mask"])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("seed", range(2))
def test_every_row_is_in_one_micro_batch_and_nothing_but_padding_is_missing(seed: int, side: str, size: Any, trim: Any) -> None:
    batch = padded(side, seed)
    plan = planner(size, trim=trim, warn=lambda _: None).plan(batch, Proofs())
    micro_batches = list(plan)
    assert sorted(rows_of(micro_batches)) == list(range(11))
    assert [len(m["target"]) for m in micro_batches] == [piece.count for piece in plan.pieces]
    for micro_batch in micro_batches:
        assert_rows_of(micro_batch, batch)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("seed", range(2))
def test_padding_of_all_rows_of_a_micro_batch_is_trimmed(seed: int, side: str, size: Any) -> None:
    batch = padded(side, seed)
    for micro_batch in planner(size, warn=lambda _: None).plan(batch, Proofs()):
        assert micro_batch["ids"].shape[1] == narrowest(micro_batch, batch)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("seed", range(2))
def test_the_longest_rows_come_first_and_order_undoes_it(seed: int, side: str, size: Any) -> None:
    batch = padded(side, seed)
    plan = planner(size, warn=lambda _: None).plan(batch, Proofs())
    micro_batches = list(plan)
    lengths = batch["attention_mask"].sum(1)[rows_of(micro_batches)].tolist()
    assert lengths == sorted(lengths, reverse=True)
    assert plan.order is not None
    restored = torch.empty(11, dtype=torch.long)
    restored[plan.order] = torch.cat([micro_batch["target"] for micro_batch in micro_batches])
    assert torch.equal(restored, batch["target"])


@pytest.mark.parametrize("trim", [True, False])
@pytest.mark.parametrize("make", [full, lambda: of_widths(*range(60, 49, -1))])
@pytest.mark.parametrize("size", [1, 2, 4, 10])
def test_micro_batches_have_so_many_samples_and_the_last_has_the_rest(size: int, make: Callable[[], Batch], trim: bool) -> None:
    counts = [len(m["target"]) for m in planner(size, trim=trim).plan(make(), Proofs())]
    assert counts == [size] * (11 // size) + [11 % size] * (11 % size > 0)


@pytest.mark.parametrize(
    ("widths", "counts"),
    [
        # 4 rows of 20 and 4 of 8: 56 columns on average. 3 * 11 saved are more than 28
        ([20, 9, 9, 9, 8, 8, 8, 8], [1, 3, 4]),
        # 4 of 20 and 4 of 12: 64. 2 * 8 saved are less than 32
        ([20, 20, 12, 12, 12, 12, 12, 12], [4, 4]),
        # 4 of 20 and 4 of 3: 46. 2 * 16 saved are more than 23, and more than 3 * 8 with one row of its own
        ([20, 12, 4, 3, 3, 3, 3, 3], [2, 2, 4]),
        # 4 of 100 and 16 of 1: 83.2. First 3 * 50 are saved, then 49
        ([100, 50, 50, 1] + 16 * [1], [1, 2, 1, 4, 4, 4, 4]),
    ],
)
def test_a_micro_batch_is_cut_where_that_saves_half_of_an_average_one(widths: list[int], counts: list[int]) -> None:
    plan = planner(4).plan(of_widths(*widths), Proofs())
    assert [piece.count for piece in plan.pieces] == counts


@pytest.mark.parametrize("make", [full, lambda: padded("right", 1)])
def test_without_trimming_or_padding_rows_keep_their_order_and_are_no_copies(make: Callable[[], Batch]) -> None:
    batch = make()
    plan = planner(4, trim="labels" not in batch).plan(batch, Proofs())
    micro_batches = list(plan)
    assert plan.order is None
    assert rows_of(micro_batches) == list(range(11))
    assert [m["ids"].data_ptr() for m in micro_batches] == [batch["ids"][row].data_ptr() for row in (0, 4, 8)]


@pytest.mark.parametrize("size", [4, Tokens(40), "auto"])
def test_batches_of_other_sizes_are_planned_anew(size: Any) -> None:
    planned = planner(size)
    for rows, length in [(11, 10), (11, 20), (7, 10), (11, 10), (10, 5)]:
        micro_batches = list(planned.plan(full(rows, length), Proofs()))
        assert rows_of(micro_batches) == list(range(rows))
        assert len(micro_batches[0]["ids"]) == (max(1, 40 // length) if isinstance(size, Tokens) else 4)


def test_a_table_stays_shared_in_a_last_batch_of_as_many_rows() -> None:
    planned, table = planner(2), torch.rand(5, 3)
    for rows in (11, 5):
        assert all(m["table"] is table for m in planned.plan({**full(rows), "table": table}, Proofs()))


# --- tokens -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trim", [True, False])
@pytest.mark.parametrize("count", [1, 5, 12, 13, 24, 40, 100, 131])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("seed", range(2))
def test_micro_batches_have_no_more_tokens_than_allowed_padding_included(seed: int, side: str, count: int, trim: bool) -> None:
    batch = padded(side, seed)
    for micro_batch in planner(Tokens(count), trim=trim, warn=lambda _: None).plan(batch, Proofs()):
        rows, columns = micro_batch["ids"].shape
        assert rows * columns <= count or rows == 1


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("count", [12, 24, 40])
def test_a_micro_batch_takes_as_many_of_the_next_rows_as_fit(count: int, side: str) -> None:
    batch = padded(side, 3)
    micro_batches = list(planner(Tokens(count)).plan(batch, Proofs()))
    for micro_batch in micro_batches[:-1]:
        rows, columns = micro_batch["ids"].shape
        assert (rows + 1) * columns > count


@pytest.mark.parametrize("make", [full, lambda: padded("right", 1)])
def test_a_row_longer_than_allowed_is_a_micro_batch_of_its_own_and_is_told_once(make: Callable[[], Batch]) -> None:
    batch, warnings = make(), []
    planned = planner(Tokens(5), warn=warnings.append)
    for _ in range(3):
        for micro_batch in planned.plan(batch, Proofs()):
            if narrowest(micro_batch, batch) > 5:
                assert len(micro_batch["target"]) == 1
    assert len(warnings) == 1
    assert "A row of 12 tokens is longer than micro_batch=Tokens(count=5)" in warnings[0]


def test_a_row_as_long_as_allowed_is_no_reason_to_warn() -> None:
    warnings: list[str] = []
    assert [len(m["ids"]) for m in planner(Tokens(12), warn=warnings.append).plan(full(3), Proofs())] == [1, 1, 1]
    assert not warnings


def test_tokens_are_counted_of_the_source_too_where_only_the_target_is_padded() -> None:
    source, target = full(8, 30), padded("right", 0, rows=8, length=6)
    batch = {"ids": source["ids"], "labels": target["labels"], "target": target["target"]}
    micro_batches = list(planner(Tokens(60)).plan(batch, Proofs()))
    assert [tuple(m["ids"].shape) for m in micro_batches] == [(2, 30)] * 4
    assert [m["labels"].shape[1] for m in micro_batches] == sorted((m["labels"].shape[1] for m in micro_batches), reverse=True)
    assert sorted(rows_of(micro_batches)) == list(range(8))


def test_tokens_need_columns() -> None:
    with pytest.raises(UnsplittableBatchError, match=r"no tensor of the batch has two dimensions.*micro_batch=8"):
        planner(Tokens(8)).plan((torch.rand(4), torch.rand(4)), Proofs())


def test_tokens_are_those_of_the_tensor_with_the_most_columns() -> None:
    topics, ids = torch.zeros(64, 5, dtype=torch.long), torch.ones(64, 512, dtype=torch.long)
    pixels = torch.rand(64, 3, 16, 16)
    for batch in ({"topics": topics, "ids": ids}, {"pixels": pixels, "ids": ids, "topics": topics == 0}):
        assert [len(m["ids"]) for m in planner(Tokens(1024), trim=False).plan(batch, Proofs())] == [2] * 32
    frames = {"channels": torch.rand(6, 1, 80), "frames": torch.rand(6, 50, 8)}
    assert [len(m["frames"]) for m in planner(Tokens(100), trim=False).plan(frames, Proofs())] == [2, 2, 2]


def test_tokens_of_a_source_count_where_a_longer_target_is_padded() -> None:
    source, target = full(8, 10), padded("right", 0, rows=8, length=30)
    target["labels"][:, 8:], target["attention_mask"][:, 8:] = -100, 0
    target["labels"][0, 29], target["attention_mask"][0, 29] = 7, 1  # one long row
    batch = {"ids": source["ids"], "labels": target["labels"], "attention_mask": target["attention_mask"]}
    micro_batches = list(planner(Tokens(30)).plan(batch, Proofs()))
    assert all(m["ids"].numel() <= 30 and m["labels"].numel() <= 30 for m in micro_batches)
    assert sum(len(m["ids"]) for m in micro_batches) == 8


def test_pixels_are_no_tokens() -> None:
    images = {"pixels": torch.rand(64, 3, 32, 32), "target": torch.arange(64)}
    with pytest.raises(UnsplittableBatchError, match=r"none of pixels \(64, 3, 32, 32\) says .*micro_batch=8"):
        planner(Tokens(4096)).plan(images, Proofs())


@pytest.mark.parametrize("size", [2, Tokens(8), "auto"])
@pytest.mark.parametrize("shape", [(0, 4), (3, 0)])
def test_batches_without_elements_are_planned(shape: tuple[int, int], size: Any) -> None:
    batch = {"ids": torch.ones(shape, dtype=torch.long), "attention_mask": torch.ones(shape)}
    assert sum(len(micro_batch["ids"]) for micro_batch in planner(size).plan(batch, Proofs())) == shape[0]


# --- two lengths ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 3, Tokens(30), Tokens(60), "auto"])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("seed", range(3))
def test_an_encoder_and_a_decoder_are_trimmed_each_to_its_own_longest(seed: int, side: str, size: Any) -> None:
    source, target = padded(side, seed, length=12), padded("right", seed + 100, length=7)
    cross = source["attention_mask"][:, None].expand(11, 7, 12)
    batch = {**source, "labels": target["labels"], "decoder_attention_mask": target["attention_mask"], "cross": cross}
    micro_batches = list(planner(size, warn=lambda _: None).plan(batch, Proofs()))
    assert sorted(rows_of(micro_batches)) == list(range(11))
    for micro_batch in micro_batches:
        rows = rows_of([micro_batch])
        wide, narrow = narrowest(micro_batch, source), narrowest(micro_batch, target)
        assert micro_batch["ids"].shape == micro_batch["attention_mask"].shape == (len(rows), wide)
        assert micro_batch["labels"].shape == micro_batch["decoder_attention_mask"].shape == (len(rows), narrow)
        assert micro_batch["cross"].shape == (len(rows), narrow, wide)
        assert tokens_of(micro_batch["ids"]) == tokens_of(source["ids"][rows])
        assert torch.equal(micro_batch["labels"], target["labels"][rows, :narrow])
        if isinstance(size, Tokens):
            assert len(rows) * max(wide, narrow) <= size.count


def test_classes_that_are_as_many_as_columns_by_chance_are_not_trimmed() -> None:
    planned = planner(2)
    classes = torch.rand(11, LENGTH)
    for length in (9, LENGTH, 10):
        micro_batches = list(planned.plan({**padded("right", 0, length=length), "classes": classes}, Proofs()))
        assert all(m["classes"].shape[1] == LENGTH for m in micro_batches)
        is_trimmed = any(m["ids"].shape[1] < length for m in micro_batches)
        assert is_trimmed is (length != LENGTH)


# --- batches that fit -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trim", [True, False])
@pytest.mark.parametrize("make", [full, lambda: padded("both", 1)])
@pytest.mark.parametrize("size", [11, 12, 1000, Tokens(11 * LENGTH), Tokens(10**6)])
def test_a_batch_that_fits_is_not_touched(size: Any, make: Callable[[], Batch], trim: bool) -> None:
    batch, proofs = make(), Proofs()
    plan = planner(size, trim=trim).plan(batch, proofs)
    assert plan.is_whole
    assert plan.order is None
    assert [micro_batch is batch for micro_batch in plan] == [True]
    assert not proofs.asked


@pytest.mark.parametrize("side", SIDES)
def test_a_batch_that_memory_has_room_for_keeps_the_order_of_its_rows(side: str) -> None:
    batch = padded(side, 1)  # its longest row has no padding
    plan = Planner("auto", MicroBatchSizes()).plan(batch, Proofs())
    assert plan.is_whole
    assert plan.order is None
    assert next(iter(plan)) is batch


def test_a_batch_that_memory_has_room_for_is_trimmed_if_all_of_its_rows_are_padded() -> None:
    batch = {name: tensor[[0, 1, 2]] for name, tensor in padded("right", 1).items()}
    plan = Planner("auto", MicroBatchSizes()).plan(batch, Proofs())
    (micro_batch,) = plan
    assert not plan.is_whole
    assert plan.order is None
    assert micro_batch["ids"].shape[1] == batch["attention_mask"].sum(1).max() < LENGTH
    assert torch.equal(micro_batch["target"], batch["target"])


def test_a_batch_that_fits_only_without_its_padding_is_one_micro_batch() -> None:
    ids = torch.tensor([[5, 0, 0, 0, 0, 0], [6, 7, 0, 0, 0, 0], [3, 0, 0, 0, 0, 0]])
    (micro_batch,) = planner(Tokens(6)).plan({"ids": ids, "attention_mask": (ids != 0).long()}, Proofs())
    assert torch.equal(micro_batch["ids"], ids[:, :2])


# --- "auto" -----------------------------------------------------------------------------------------------------------


def test_memory_that_ran_out_makes_smaller_micro_batches_of_what_costs_as_much_and_no_larger_ones_of_less() -> None:
    batch, sizes = padded("right", 2, rows=32, length=64), MicroBatchSizes()
    planned = Planner("auto", sizes)
    plan = planned.plan(batch, Proofs())
    sizes.halve(plan.pieces[0].cost, plan.pieces[0].count)
    plan = planned.plan(batch, Proofs())
    assert len(plan.pieces[0].columns) == 0  # the longest row is full
    assert plan.pieces[0].count == 16
    assert sorted(rows_of(list(plan))) == list(range(32))


@pytest.mark.parametrize("side", SIDES)
def test_a_row_costs_what_it_has_elements_after_trimming(side: str) -> None:
    batch = padded(side, 0)
    del batch["target"]  # has no columns
    plan = planner(1).plan(batch, Proofs())
    assert [piece.cost for piece in plan.pieces] == [sum(t.numel() for t in micro_batch.values()) for micro_batch in plan]
    whole = planner(11).plan(batch, Proofs())
    assert [piece.cost for piece in whole.pieces] == [sum(t[0].numel() for t in batch.values())]


def test_a_plan_says_which_micro_batch_is_in_hand() -> None:
    plan = planner(4).plan(full(), Proofs())
    assert [(plan.current, len(micro_batch["target"])) for micro_batch in plan] == [(0, 4), (1, 4), (2, 3)]


# --- the proof --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("seed", range(2))
def test_the_proof_is_asked_once_a_side_of_rows_that_differ_in_that_padding_alone(seed: int, side: str) -> None:
    proofs, planned = Proofs(), planner(3)
    for step in range(3):
        batch = padded(side, 10 * seed + step)
        list(planned.plan(batch, proofs))
        if step == 0:
            first = batch
    assert len(proofs.asked) == (2 if side == "both" else 1)
    for (with_padding, without), trimmed in zip(proofs.asked, ["right", "left"] if side == "both" else [side], strict=True):
        rows = rows_of([with_padding])
        assert rows == rows_of([without])
        assert len(rows) in (1, 2)
        assert torch.equal(with_padding["ids"], first["ids"][rows])
        used = first["attention_mask"][rows].any(0).nonzero()
        kept = slice(0, int(used.max()) + 1) if trimmed == "right" else slice(int(used.min()), LENGTH)
        for name in ("ids", "attention_mask", "labels", "hot"):
            assert torch.equal(without[name], first[name][rows][:, kept])
        assert without["ids"].shape[1] < LENGTH  # else it would prove nothing


def test_a_single_padded_row_is_proven_by_itself() -> None:
    batch, proofs = full(4, 6), Proofs()
    batch["attention_mask"][2, 3:] = batch["ids"][2, 3:] = 0
    list(planner(1).plan(batch, proofs))
    ((with_padding, without),) = proofs.asked
    assert (with_padding["ids"].shape, without["ids"].shape) == ((1, 6), (1, 3))


def test_an_encoder_and_a_decoder_are_proven_each_by_itself() -> None:
    source, target, proofs = padded("right", 0, length=12), padded("right", 5, length=7), Proofs()
    list(planner(2).plan({**source, "labels": target["labels"]}, proofs))
    (encoder, shorter_encoder), (decoder, shorter_decoder) = proofs.asked
    assert shorter_encoder["ids"].shape[1] < encoder["ids"].shape[1] == 12
    assert shorter_encoder["labels"].shape[1] == encoder["labels"].shape[1] == 7
    assert shorter_decoder["ids"].shape[1] == decoder["ids"].shape[1] == 12
    assert shorter_decoder["labels"].shape[1] < decoder["labels"].shape[1] == 7


def test_what_was_proven_is_proven_again_when_asked_for() -> None:
    planned, proofs = planner(3), Proofs()
    for step in range(4):
        if step == 2:
            planned.prove_again()
        list(planned.plan(padded("right", step), proofs))
    assert len(proofs.asked) == 2


@pytest.mark.parametrize("size", [3, Tokens(37), "auto"])
@pytest.mark.parametrize("refused", ["left", "right"])
@pytest.mark.parametrize("seed", range(2))
def test_padding_that_the_loss_depends_on_stays_on_that_side_alone(seed: int, refused: str, size: Any) -> None:
    warnings: list[str] = []

    def answer(with_padding: Batch, without: Batch) -> str | None:
        is_left = torch.equal(with_padding["ids"][:, -1], without["ids"][:, -1])
        return "1.5 with it, 2.5 without" if is_left == (refused == "left") else None

    planned, proofs = planner(size, warn=warnings.append), Proofs(answer)
    for step in range(3):
        batch = padded("both", 10 * seed + step)
        micro_batches = list(planned.plan(batch, proofs))
        assert sorted(rows_of(micro_batches)) == list(range(11))
        for micro_batch in micro_batches:
            rows = rows_of([micro_batch])
            used = batch["attention_mask"][rows].any(0).nonzero()
            kept = slice(0, int(used.max()) + 1) if refused == "left" else slice(int(used.min()), LENGTH)
            assert torch.equal(micro_batch["ids"], batch["ids"][rows][:, kept])
            assert torch.equal(micro_batch["labels"], batch["labels"][rows][:, kept])
            if isinstance(size, Tokens):
                assert micro_batch["ids"].numel() <= size.count
    assert len(proofs.asked) == 2
    assert len(warnings) == 1
    assert warnings[0].startswith(f"Padding on the {refused} of rows is not trimmed")
    assert "1.5 with it, 2.5 without" in warnings[0]
    assert "GradientAccumulation(trim_padding=False)" in warnings[0]


def test_refused_padding_leaves_the_rows_as_they_came() -> None:
    batch, proofs, warnings = padded("right", 0), Proofs("it differs"), []
    planned = planner(4, warn=warnings.append)
    for _ in range(2):
        plan = planned.plan(batch, proofs)
        assert plan.order is None
        assert rows_of(list(plan)) == list(range(11))
        assert all(m["ids"].shape[1] == LENGTH for m in plan)
    assert len(proofs.asked) == len(warnings) == 1


def test_no_proof_is_asked_where_nothing_would_be_trimmed() -> None:
    proofs = Proofs()
    list(planner(4).plan(full(), proofs))
    list(planner(4, trim=False).plan(padded("right", 0), proofs))
    assert not proofs.asked


# --- a look ahead -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [3, Tokens(37), "auto"])
def test_a_batch_that_was_looked_at_is_planned_without_reading_its_values_again(size: Any) -> None:
    batch = padded("right", 0)
    planned = planner(size)
    planned.look_at(batch)
    there = {name: tensor.to("meta") for name, tensor in batch.items()}  # a device that has no values
    shapes = [m["ids"].shape for m in planned.plan(there, Proofs())]
    assert shapes == [m["ids"].shape for m in planner(size).plan(batch, Proofs())]


def test_a_look_at_a_batch_of_other_shapes_is_forgotten() -> None:
    planned, batch = planner(3), padded("right", 1)
    planned.look_at(padded("right", 0, rows=10))
    assert_same_plan(planned.plan(batch, Proofs()), planner(3).plan(batch, Proofs()))


def test_a_look_holds_for_one_batch() -> None:
    planned, batch = planner(3), padded("right", 1)
    planned.look_at(padded("right", 0))
    planned.plan(padded("right", 0), Proofs())
    assert_same_plan(planned.plan(batch, Proofs()), planner(3).plan(batch, Proofs()))


def test_a_look_at_a_batch_that_fits_reads_none_of_its_values() -> None:
    there = {name: tensor.to("meta") for name, tensor in padded("right", 0).items()}
    planned = planner(11)
    planned.look_at(there)
    assert planned.plan(there, Proofs()).is_whole


def assert_same_plan(one: Plan, other: Plan) -> None:
    for left, right in zip(one, other, strict=True):
        assert all(torch.equal(left[name], right[name]) for name in right)


def test_a_key_for_lengths_that_is_not_in_the_batch_is_named() -> None:
    for ask in (lambda p: p.plan(padded("right", 0), Proofs()), lambda p: p.look_at(padded("right", 0))):
        with pytest.raises(AccumulationError, match=r"no tensor 'lengths'.*it has ids, attention_mask, labels"):
            ask(planner(3, trim="lengths"))


def test_lengths_by_their_key_are_trimmed_to() -> None:
    frames, lengths = torch.rand(5, 9, 3), torch.tensor([4, 9, 2, 7, 4])
    plan = planner(2, trim="lengths").plan({"frames": frames, "lengths": lengths}, Proofs())
    assert plan.order == [1, 3, 0, 4, 2]
    assert [m["frames"].shape for m in plan] == [(2, 9, 3), (2, 4, 3), (1, 2, 3)]
    assert [m["lengths"].tolist() for m in plan] == [[9, 7], [4, 4], [2]]


# --- what is said -----------------------------------------------------------------------------------------------------


def test_what_was_understood_of_the_first_batch_is_said_in_words() -> None:
    planned = planner(3)
    planned.plan({**padded("right", 0), "table": torch.rand(5, 2)}, Proofs())
    said = "longest rows first, trimmed to the longest of each, all of them share table (5, 2)"
    assert planned.description == said
    planned.plan(full(), Proofs())
    assert planned.description == said
    silent = planner(3)
    silent.plan(full(), Proofs())
    assert silent.description == ""


def test_shared_whole_numbers_are_told_once_where_the_loader_confirms_the_samples() -> None:
    warnings: list[str] = []
    planned = planner(5, warn=warnings.append, samples=lambda: {12})
    for rows in (12, 12, 7):
        edges = torch.tensor([[0, 1, 5], [1, 2, 0]])
        planned.plan({"x": torch.rand(rows, 6, 3), "y": torch.rand(rows), "edge_index": edges}, Proofs())
    (warning,) = warnings
    assert "edge_index (2, 3): taken as shared by all micro-batches" in warning
    assert "split=" in warning


# --- samples that are packed end to end -------------------------------------------------------------------------------


def graphs(*nodes: int) -> Batch:
    """Graphs packed end to end, as graph libraries collate them: nodes, their pairs, and one label a graph."""
    sizes, total = torch.tensor(nodes), sum(nodes)
    return {
        "position": torch.rand(total, 3),
        "atom": torch.randint(1, 9, (total,)),
        "pairs": torch.randint(0, total, (2, 3 * total)),
        "batch": torch.arange(len(nodes)).repeat_interleave(sizes),
        "ptr": torch.cat((torch.zeros(1, dtype=torch.long), sizes.cumsum(0))),
        "nodes": sizes,
        "energy": torch.rand(len(nodes)),
    }


def texts(*lengths: int, rows: int) -> Batch:
    """Texts packed end to end without padding, with the offsets that variable-length attention takes."""
    ids = torch.randint(1, 9, (sum(lengths),))
    ids = ids if rows == 0 else ids[None]
    return {"input_ids": ids, "labels": ids.clone(), "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).int()}


PARTS_OF_GRAPHS = [
    ("position", "atom", "pairs", "batch", "ptr", "nodes", "energy"),
    ("position", "atom", "pairs", "batch", "energy"),
    ("position", "batch", "energy"),
    ("position", "nodes", "energy"),
    ("position", "ptr", "energy"),
    ("position", "pairs", "energy"),
    ("position", "energy"),
    ("atom", "pairs", "ptr"),
]


@pytest.mark.parametrize("samples", [(), (4,), (1,)])
@pytest.mark.parametrize("parts", PARTS_OF_GRAPHS)
def test_graphs_that_are_packed_end_to_end_are_refused_at_the_first_batch(parts: tuple[str, ...], samples: Sequence[int]) -> None:
    batch = graphs(5, 9, 4, 7)
    with pytest.raises(UnsplittableBatchError, match=r"GradientAccumulation\(split=...\)"):
        planner(2, samples=lambda: samples).plan({part: batch[part] for part in parts}, Proofs())


@pytest.mark.parametrize("samples", [(), (3,)])
@pytest.mark.parametrize("rows", [0, 1])
def test_texts_that_are_packed_end_to_end_are_refused_at_the_first_batch(rows: int, samples: Sequence[int]) -> None:
    with pytest.raises(UnsplittableBatchError, match="cu_seqlens counts up to where samples end|the loader puts 3 into a batch"):
        planner(2, samples=lambda: samples).plan(texts(5, 9, 4, rows=rows), Proofs())


def test_more_rows_than_the_loader_puts_samples_into_a_batch_are_refused_and_fewer_are_a_last_batch() -> None:
    with pytest.raises(UnsplittableBatchError, match=r"ids of shape \(11, 12\) would be 11 samples, but the loader puts 8 into"):
        planner(2, samples=lambda: {8}).plan(full(11), Proofs())
    with pytest.raises(UnsplittableBatchError, match=r"batch_size=None\) says that the dataset makes whole batches"):
        planner(2, samples=lambda: {1}).plan(full(11), Proofs())
    planned = planner(2, samples=lambda: {8})
    assert [len(planned.plan(full(rows), Proofs()).pieces) for rows in (8, 3)] == [4, 2]


def test_a_tensor_with_as_many_entries_as_the_loader_puts_samples_into_a_batch_is_no_table() -> None:
    batch = {"class": torch.rand(5, 2), "prior": torch.rand(5), "x": torch.rand(8, 3)}
    with pytest.raises(UnsplittableBatchError, match=r"into a batch, and x of shape \(8, 3\) has as many"):
        planner(2, samples=lambda: {8}).plan(batch, Proofs())


def test_a_tensor_whose_size_changes_with_the_batch_is_no_table() -> None:
    planned = planner(2)
    planned.plan({**full(4), "point": torch.rand(9, 3)}, Proofs())
    with pytest.raises(UnsplittableBatchError, match=r"point of shape \(7, 3\) has no entry for each of the 4 rows, and had 9"):
        planned.plan({**full(4), "point": torch.rand(7, 3)}, Proofs())
    planned = planner(2)
    planned.plan({**full(9), "point": torch.rand(9, 3)}, Proofs())
    with pytest.raises(UnsplittableBatchError, match=r"point of shape \(7, 3\) .* had one in an earlier batch"):
        planned.plan({**full(9), "point": torch.rand(7, 3)}, Proofs())


def test_what_has_one_entry_a_column_may_change_with_the_batch() -> None:
    planned = planner(2, warn=lambda _: None)
    for length in (10, 12):
        bias, positions = torch.rand(length, length), torch.arange(length)
        (first, *_) = planned.plan({**full(5, length), "bias": bias, "positions": positions}, Proofs())
        assert first["bias"] is bias


def test_a_shared_table_of_numbers_is_no_reason_to_warn() -> None:
    warnings: list[str] = []
    planner(5, warn=warnings.append).plan({**full(), "table": torch.rand(5, 2), "step": torch.tensor(3)}, Proofs())
    assert not warnings


# --- a function that splits -------------------------------------------------------------------------------------------


class Opaque:
    """A batch that shows no rows."""

    def __init__(self, *rows: int) -> None:
        self.rows = rows


def by_rows(batch: Opaque, size: int) -> list[Opaque]:
    return [Opaque(*batch.rows[i : i + size]) for i in range(0, len(batch.rows), size)]


@pytest.mark.parametrize(
    ("size", "found"), [(2, [(0, 1), (2, 3), (4,)]), (Tokens(3), [(0, 1, 2), (3, 4)]), ("auto", [(0, 1, 2, 3), (4,)])]
)
def test_a_function_splits_what_shows_no_rows(size: Any, found: list[tuple[int, ...]]) -> None:
    plan = planner(size, split=by_rows).plan(Opaque(*range(5)), Proofs())
    assert [micro_batch.rows for micro_batch in plan] == found
    assert plan.order is None


def test_a_function_is_not_asked_before_its_turn_and_says_its_name() -> None:
    asked = []

    def in_halves(batch: Opaque, size: int) -> list[Opaque]:
        asked.append(size)
        return by_rows(batch, size)

    planned = planner(2, split=in_halves)
    planned.look_at(Opaque(1, 2, 3))
    assert asked == []
    planned.plan(Opaque(1, 2, 3), Proofs())
    assert asked == [2]
    assert planned.description == "cut by in_halves"


def test_what_a_function_returns_as_one_runs_as_it_was_returned() -> None:
    batch = Opaque(1, 2)
    plan = planner(8, split=by_rows).plan(batch, Proofs())
    assert [part.rows for part in plan] == [(1, 2)]
    assert not plan.is_whole
    unchanged = planner(8, split=lambda batch, size: [batch]).plan(batch, Proofs())
    assert unchanged.is_whole
    assert list(unchanged) == [batch]


@pytest.mark.parametrize("size", [2, Tokens(3), "auto"])
@pytest.mark.parametrize("returned", [None, [], (), 3, iter([1])])
def test_a_function_that_returns_no_list_is_named_with_what_it_returned(returned: Any, size: Any) -> None:
    def splits_badly(batch: Any, size: int) -> Any:
        return returned

    with pytest.raises(
        UnsplittableBatchError, match="splits_badly.* must return the micro-batches as a list, but returned "
    ) as raised:
        planner(size, split=splits_badly).plan(full(), Proofs())
    assert repr(returned) in str(raised.value)
