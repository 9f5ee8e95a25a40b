"""One window, one batch: windows, also of tokens or with holes, and split batches train what full batches do, on every engine."""

from functools import partial
from typing import Any

import pytest
import torch
from harness import ENGINES as HELD
from harness import assert_one_window_one_batch, dealt, on, on_each, windows_of
from sharded import ShardedLanguage
from support import OPTIMIZERS, Scalar, fit, pad, relative_error, sentences, train_by_hand, x
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_accum import AccumulationError, GradientAccumulation, SameOrderSampler, Tokens

ROWS, MICRO_BATCH, EPOCHS = sentences(44), 2, 2
SMALL = 4096 / 2**20  # 4 KiB, of some 40 that the parameters take: several buckets
ENGINES = [
    *on_each("accum, ddp, fsdp2, fsdp1, fsdp2 and tensor, ddp of 4, fsdp2 of 4"),
    *on_each("ddp, fsdp2, fsdp1, fsdp2 and tensor, fsdp1 by layer", sync="micro_batch"),
    on("fsdp1 by layer"),
    on("ddp", static_graph=True),
    on("fsdp2 of 4", sync="shard"),
    on("named mesh", mesh={"data_parallel": 2, "tensor_parallel": 2}),
    on("ddp", bucket_cap_mb=SMALL),
    on("ddp", gradient_as_bucket_view=True),
    on("ddp", bucket_cap_mb=SMALL, gradient_as_bucket_view=True, sync="micro_batch"),
    on("ddp", find_unused_parameters=True, bucket_cap_mb=SMALL),
    on("ddp", find_unused_parameters=True, gradient_as_bucket_view=True),
    on("ddp", static_graph=True, bucket_cap_mb=SMALL, gradient_as_bucket_view=True),
    on("ddp", broadcast_buffers=False),
]


@pytest.mark.some_cases(5)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize(("engine", "options"), ENGINES[:4])
def test_a_window_takes_the_step_of_its_full_batch(engine: str, options: dict[str, Any], optimizer: str) -> None:
    by_rank = dealt(ROWS, MICRO_BATCH, engine)
    size = 8 // len(by_rank)  # windows of 16 rows: two in an epoch, and a tail of 12
    assert_one_window_one_batch(partial(ShardedLanguage, optimizer), by_rank, size, engine, options, epochs=EPOCHS)


@pytest.mark.some_cases(2, 6)
@pytest.mark.parametrize(("engine", "options"), ENGINES[4:])
def test_so_it_does_with_every_option_of_a_strategy(engine: str, options: dict[str, Any]) -> None:
    assert_one_window_one_batch(partial(ShardedLanguage, "adamw"), dealt(ROWS[:20], MICRO_BATCH, engine), 2, engine, options)


CLIPS = {"norm": 0.05, "value": 1e-3}
CLIPPED = [*on_each("accum, ddp, fsdp2 and tensor, fsdp2", "norm"), *on_each("accum, ddp, fsdp2 and tensor", "value")]


@pytest.mark.some_cases(2, 2)
@pytest.mark.parametrize(("engine", "options", "algorithm"), CLIPPED)
def test_a_clipped_step_is_that_of_the_full_batch(engine: str, options: dict[str, Any], algorithm: str) -> None:
    by_rank, clip = dealt(ROWS[:20], MICRO_BATCH, engine), {algorithm: CLIPS[algorithm]}
    assert_one_window_one_batch(ShardedLanguage, by_rank, 2, engine, options, clip=clip)


@pytest.mark.parametrize("algorithm", CLIPS)
def test_these_limits_change_the_steps(algorithm: str) -> None:
    batches = [pad(rows) for rows in windows_of(dealt(ROWS[:20], MICRO_BATCH, "accum"), 2)]
    clipped, whole = (train_by_hand(ShardedLanguage(), batches, 1, **clip) for clip in ({algorithm: CLIPS[algorithm]}, {}))
    assert relative_error(clipped.parameters(), whole.parameters()) > 1e-3


@pytest.mark.some_cases(3, 4)
@pytest.mark.parametrize("tail", ["step", "drop", "carry"])
@pytest.mark.parametrize(
    ("engine", "options"),
    [*on_each("accum, fsdp2, ddp, fsdp1"), *on_each("fsdp2, fsdp1", sync="micro_batch"), on("fsdp2", sync="shard")],
)
def test_the_tail_of_an_epoch_is_a_window_or_dropped_or_carried(engine: str, options: dict[str, Any], tail: Any) -> None:
    by_rank, policy = dealt(ROWS[:20], MICRO_BATCH, engine), GradientAccumulation(3, tail=tail)
    assert_one_window_one_batch(ShardedLanguage, by_rank, policy, engine, options, epochs=EPOCHS)


def test_the_reference_is_the_loop_by_hand_and_lightnings_own_accumulation_would_not_pass() -> None:
    by_rank = dealt(ROWS, MICRO_BATCH, "accum")
    full = [pad(rows) for rows in windows_of(by_rank, 2)]
    module = ShardedLanguage("adamw")
    fit(module, full, strategy="auto", max_epochs=EPOCHS)
    assert relative_error(module.parameters(), train_by_hand(ShardedLanguage("adamw"), full, EPOCHS).parameters()) < 1e-12
    policy = GradientAccumulation(2, weight="equal", check=False)  # the mean of means, as Lightning's
    with pytest.raises(AssertionError):
        assert_one_window_one_batch(ShardedLanguage, by_rank, policy)


BATCH = 16
SPLIT = sentences(53)  # three batches, and one of 5 rows
SIZES = [1, 3, 4, 16, Tokens(40), Tokens(25)]


@pytest.mark.some_cases(4, 7)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("size", "trim"), [(size, trim) for size in SIZES for trim in (True, False)])
def test_a_split_batch_takes_the_step_of_the_whole_one(size: Any, trim: bool, optimizer: str) -> None:
    policy = GradientAccumulation(micro_batch=size, trim_padding=trim)
    assert_one_window_one_batch(partial(ShardedLanguage, optimizer), dealt(SPLIT, BATCH, "accum"), policy)


OF_SIZES = [case for size in (3, Tokens(40)) for case in on_each("ddp, fsdp2, fsdp1, accum", size)]
OF_SIZES += [*on_each("ddp, accum", "auto"), *on_each("ddp, fsdp2, fsdp1", 3, sync="micro_batch")]
OF_SIZES += [on("fsdp2", 3, sync="shard"), on("ddp", 3, static_graph=True)]


@pytest.mark.some_cases(2, 5)
@pytest.mark.parametrize("window", [1, 2])
@pytest.mark.parametrize(("engine", "options", "size"), OF_SIZES)
def test_so_do_ranks_with_different_numbers_of_micro_batches(engine: str, options: dict[str, Any], size: Any, window: int) -> None:
    shares = [SPLIT[i : i + BATCH] for i in range(0, len(SPLIT), BATCH)]
    by_rank = [shares] if engine == "accum" else [[rows[:3] for rows in shares], [rows[3:] for rows in shares]]
    policy = GradientAccumulation(window, micro_batch=size)
    assert_one_window_one_batch(partial(ShardedLanguage, "adamw"), by_rank, policy, engine, options)


SEQUENCES = sentences(101)  # of 2 to 12 tokens: three windows of 32 sequences and a tail of 5 in every epoch
SEED, GLOBAL_BATCH = 5, 32
MIXES = [  # an engine; the loader batches of a window, and their rows; the rows of a micro-batch
    on("accum", 1, 32, None),
    on("accum", 8, 4, None),
    on("accum", 1, 32, 4),
    on("ddp", 4, 4, None),
    on("ddp", 16, 1, None),
    on("ddp", 1, 16, 4),
    on("ddp of 4", 8, 1, None),  # the first rank has 26 batches an epoch, the others 25
    on("fsdp2", 4, 4, None),
    on("fsdp2 of 4", 2, 4, None),
    on("fsdp2 and tensor", 4, 4, None),
]


@pytest.mark.some_cases(2, 3)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("engine", "options", "window", "batch", "micro_batch"), MIXES)
def test_every_mix_is_the_full_batch(engine: str, options: Any, window: int, batch: int, micro_batch: Any, optimizer: str) -> None:
    # the one line: whatever the ranks, the same global batches
    data = DataLoader(SEQUENCES, batch_size=batch, sampler=SameOrderSampler(SEQUENCES, seed=SEED), collate_fn=pad)
    windows = []  # of all epochs, in an order that knows no sampler
    for epoch in range(EPOCHS):
        order = torch.randperm(len(SEQUENCES), generator=torch.Generator().manual_seed(SEED + epoch)).tolist()
        windows += [[SEQUENCES[i] for i in order[start : start + GLOBAL_BATCH]] for start in range(0, len(order), GLOBAL_BATCH)]
    assert HELD[engine].ranks * window * batch == GLOBAL_BATCH
    arguments = {"windows": windows, "epochs": EPOCHS, "use_distributed_sampler": True}  # a Trainer that is told nothing
    make, policy = partial(ShardedLanguage, optimizer), GradientAccumulation(window, micro_batch=micro_batch)
    assert_one_window_one_batch(make, data, policy, engine, options, **arguments)


KINDS = ["no batch", "None before the forward", "None after the forward", "all labels ignored"]


class Hole(list):  # rows that are not in their window
    def __init__(self, rows: Any, kind: str) -> None:
        super().__init__()
        self.rows, self.kind = rows, kind


def collate(rows: Any) -> dict[str, Any] | None:
    if not isinstance(rows, Hole):
        return pad(rows)
    batch = pad(rows.rows)
    if rows.kind == "no batch":
        return None
    if rows.kind == "all labels ignored":
        return {**batch, "labels": torch.full_like(batch["labels"], -100)}
    return {**batch, "returns_none": rows.kind.removeprefix("None ")}


class Holed(ShardedLanguage):
    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor | None:
        if "returns_none" not in batch:
            return super().training_step(batch, batch_idx)
        if batch["returns_none"] == "after the forward":
            self.net(batch["input_ids"])
        return None


def assert_the_rest_is_the_window(
    engine: str, options: Any, places: list[tuple[int, int]], kinds: list[str], rows: Any = ROWS[:28], **policy: Any
) -> None:  # with each of the kinds in turn at loader batches of ranks
    by_rank: list[list[Any]] = dealt(rows, 2, engine)
    for index, (rank, place) in enumerate(places):
        by_rank[rank][place] = Hole(by_rank[rank][place], kinds[index % len(kinds)])
    policy = GradientAccumulation(2, **policy)
    assert_one_window_one_batch(partial(Holed, "adamw"), by_rank, policy, engine, options, collate=collate)


WITH_HOLES = [
    *on_each("ddp, fsdp2, fsdp1"), *on_each("ddp, fsdp2, fsdp1", sync="micro_batch"),
    on("ddp", find_unused_parameters=True), on("ddp", static_graph=True), *on_each("fsdp2 and tensor, fsdp1 by layer"),
    on("fsdp1 by layer", sync="micro_batch"), on("fsdp2", sync="shard"),
]  # fmt: skip


@pytest.mark.some_cases(2, 4)
@pytest.mark.parametrize("micro_batch", [None, 1])
@pytest.mark.parametrize(("engine", "options"), [*WITH_HOLES[:6], *WITH_HOLES[8:]])
def test_nothing_of_every_kind_on_either_of_two_ranks(engine: str, options: dict[str, Any], micro_batch: int | None) -> None:
    first = [(0, 0)] if engine == "ddp" else []  # a shard needs a batch first, and is told so
    places = [*first, (0, 1), (1, 2), (1, 3), (0, 4), (0, 5), (1, 6)]
    assert_the_rest_is_the_window(engine, options, places, KINDS, micro_batch=micro_batch)


@pytest.mark.some_cases(2, 4)
@pytest.mark.parametrize(("engine", "options"), [on("accum"), *WITH_HOLES])
def test_a_window_of_nothing_takes_no_step(engine: str, options: dict[str, Any]) -> None:
    ranks = range(1 if engine == "accum" else 2)
    places = [(rank, place) for place in (2, 3) for rank in ranks]
    kinds = [*["no batch", "None after the forward"][: len(ranks)], *["all labels ignored"] * len(ranks)]
    assert_the_rest_is_the_window(engine, options, places, kinds, ROWS[: 12 * len(ranks)])


TEXTS = sentences(70)


WITH_TOKENS = [
    *on_each("accum, ddp, fsdp2, fsdp2 and tensor, fsdp1, ddp of 3"),
    *(on("ddp", sync="micro_batch"), on("ddp", find_unused_parameters=True)),
]


@pytest.mark.some_cases(3, 4)
@pytest.mark.parametrize("has_length", [True, False], ids=["sized", "iterable"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize(("engine", "options"), WITH_TOKENS)
def test_windows_of_tokens_are_their_full_batches(engine: str, options: dict[str, Any], optimizer: str, has_length: bool) -> None:
    def tokens_of(rows: list[torch.Tensor]) -> int:  # a row has one prediction less than tokens
        return sum(len(row) - 1 for row in rows)

    by_rank = dealt(TEXTS, 2, engine)
    if len(by_rank) > 1:
        del by_rank[-1][-3:]
    windows: list[list[torch.Tensor]] = [[]]  # of an epoch: each ends with the loader batch in which it is full
    for step in windows_of(by_rank, 1):
        windows[-1] += step
        if tokens_of(windows[-1]) >= 70:
            windows.append([])
    windows = [window for window in windows if window]
    weights = list(map(tokens_of, windows))
    make, policy = partial(ShardedLanguage, optimizer), GradientAccumulation(Tokens(70))
    arguments = {"windows": windows, "weights": weights, "has_length": has_length}
    assert_one_window_one_batch(make, by_rank, policy, engine, options, **arguments)


class Sum(Scalar):
    def loss(self, batch: torch.Tensor) -> torch.Tensor:
        return (self.w * batch).sum()


@pytest.mark.parametrize(
    ("policy", "kind", "trainer", "names"),
    [
        (GradientAccumulation(lambda step: 2 - 2 * step), Scalar, {}, "window"),
        (GradientAccumulation(Tokens(3)), Sum, {}, "Tokens"),
        (GradientAccumulation(Tokens(3)), Scalar, {"accumulate_grad_batches": 4}, "accumulate_grad_batches"),
        (GradientAccumulation(Tokens(lambda seen: 0)), Scalar, {}, "count"),
        (GradientAccumulation(7, tail="drop"), Scalar, {}, "window"),  # the tail of every epoch
        (GradientAccumulation({0: 8, 2: 1}, tail="drop"), Scalar, {}, "window"),
    ],
)
def test_windows_that_have_no_end_are_refused(policy: GradientAccumulation, kind: type[Scalar], trainer: Any, names: str) -> None:
    with pytest.raises(AccumulationError, match=names):
        fit(kind([x(1)] * 6), None, policy, **trainer)
