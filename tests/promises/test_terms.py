"""Losses of several terms with different denominators are exact with no argument: in windows, split, over ranks, after a resume."""

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from harness import Dealt, assert_one_window_one_batch, on, windows_of
from lightning.pytorch.callbacks import LambdaCallback
from losses_of_terms import COUNTS, LOSSES, OF_NOTHING, Function, OfTerms, rows, windows_of_tokens
from support import SaveAfter, StatefulLoader, ddp, error_of_updates, fit, warned
from torch import Tensor
from torch.multiprocessing import ProcessRaisedException
from torch.nn import functional as F
from torch.utils.data import default_collate

from lightning_accum import AccumulationWarning, DoesNotAddUpError, GradientAccumulation, SampleCount, Tokens, UnreadableLossError
from lightning_accum.testing import EXACT, adamw, compare_window_with_batch, sgd

SIZES = (3, 1, 5, 2, 2, 4, 1, 3, 1, 2, 6, 3)
BATCHES = [rows(size, seed, has_some=seed not in (1, 4, 5, 6, 7, 10)) for seed, size in enumerate(SIZES)]
"""Three windows of four; ``some`` chooses nothing in two loader batches and in the second window."""
ALL_SOME = [rows(size, seed) for seed, size in enumerate(SIZES)]
ABSENT = ["a term only where there is something", "a term or the number 0", "the first term only where there is something",
          "a learned factor times a term or 0"]  # fmt: skip
POLICIES = {"windows": {"window": 4}, "split in 2": {"micro_batch": 2}, "split in 3": {"micro_batch": 3}}


def assert_exact(
    loss: Function, policy: dict[str, Any], batches: Any = BATCHES, optimizers: Any = (sgd, adamw), kind: Any = OfTerms, **more: Any
) -> None:
    """On one process, in windows of four loader batches or of one that is split; nothing is warned of."""
    own, more = windows_of([batches], 4) if "micro_batch" in policy else batches, {"optimizers": optimizers, **more}
    with warned() as messages:
        assert_one_window_one_batch(partial(kind, loss), [own], GradientAccumulation(**policy), collate=default_collate, **more)
    assert [message for message in messages if not message.startswith("Padding")] == []


@pytest.mark.some_cases(5, 18)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", LOSSES)
def test_with_no_argument_a_loss_of_several_terms_takes_the_steps_of_the_full_batches(name: str, policy: str) -> None:
    of, arguments = LOSSES[name].of, POLICIES[policy]
    if name == "a loop over rows, some of which have nothing" and policy != "windows":  # counts part as rows are trimmed
        with pytest.raises(UnreadableLossError, match="Say which"):
            assert_exact(of, arguments)
        arguments = {**arguments, "trim_padding": False}
    assert_exact(of, arguments)


@pytest.mark.some_cases(4, 14)
@pytest.mark.parametrize("policy", ["windows", "split in 3"])
@pytest.mark.parametrize("name", [name for name, row in LOSSES.items() if row.counts])
def test_one_weight_for_each_term_in_their_order_takes_the_same_steps(name: str, policy: str) -> None:
    weight, batches = [COUNTS[count] for count in LOSSES[name].counts.split(", ")], ALL_SOME if name in ABSENT else BATCHES
    assert_exact(LOSSES[name].of, {**POLICIES[policy], "weight": weight, "log": False}, batches, [adamw])


def test_a_part_of_the_loss_that_only_shows_and_is_no_mean_is_told_of() -> None:
    make = partial(OfTerms, lambda o, b, m: F.mse_loss(o.values, b.y) + o.values.detach().sum())
    with pytest.warns(AccumulationWarning, match="window/loss"):
        found = compare_window_with_batch(make, BATCHES, GradientAccumulation(4), windows=windows_of([BATCHES], 4))
    assert found.parameters <= EXACT


@pytest.mark.parametrize("policy", ["windows", "split in 2"])
def test_a_step_may_write_into_its_batch(policy: str) -> None:
    class WritesIntoItsBatch(OfTerms):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            batch["x"].mul_(2)
            return super().training_step({**batch, "labels": batch.pop("labels")}, batch_idx)

    assert_exact(LOSSES["tokens and samples"].of, POLICIES[policy], kind=WritesIntoItsBatch)


# --- what is not there in all batches -----------------------------------------------------------------------------------
NONE_AT_FIRST = [rows(size, seed, has_some=seed > 7 and seed not in (10, 12)) for seed, size in enumerate((*SIZES, *SIZES[:4]))]


@pytest.mark.some_cases(3)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", ABSENT)
def test_a_term_that_begins_in_a_later_window_leaves_that_window_out_and_is_exact_from_the_next_on(name: str, policy: str) -> None:
    """Its weight is its own, and a window is counted before it runs: one that has begun cannot be."""
    first, second, begins, after = windows_of([NONE_AT_FIRST], 4)
    own = [first, second, begins, after] if "micro_batch" in POLICIES[policy] else NONE_AT_FIRST
    for optimizer in (sgd, adamw):
        make, arguments = partial(OfTerms, LOSSES[name].of), {"optimizer": optimizer, "windows": [first, second, after]}
        with pytest.warns(AccumulationWarning, match="is left out, without an optimizer step"):
            found = compare_window_with_batch(make, own, GradientAccumulation(**POLICIES[policy]), **arguments)
        assert found.steps == (3, 3)
        assert max(found.parameters, found.losses) <= EXACT


@pytest.mark.some_cases(3)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("name", OF_NOTHING)
def test_a_term_that_is_the_mean_of_nothing_in_a_micro_batch_counts_nothing(name: str, policy: str) -> None:
    batches = [rows(size, seed, has_some=seed not in (1, 6, 10)) for seed, size in enumerate(SIZES)]
    assert_exact(OF_NOTHING[name], POLICIES[policy], batches)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("name", ["tokens and samples", "learned uncertainty", *ABSENT[:2]])
def test_batches_that_are_none_count_nothing(name: str) -> None:
    assert_exact(LOSSES[name].of, {"window": 4}, [*BATCHES[:2], None, BATCHES[3], None, *BATCHES[5:11], None], [adamw])


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", ["tokens and samples", "nodes and edges", "tokens, samples and a penalty"])
def test_a_window_of_tokens_ends_with_the_loader_batch_in_which_its_main_term_has_counted_them(name: str) -> None:
    assert_exact(LOSSES[name].of, {"window": Tokens(30)}, windows=windows_of_tokens(BATCHES, 30))


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("name", ["tokens and samples", "learned uncertainty", "annealed KL", ABSENT[0]])
def test_a_training_that_is_resumed_in_mid_window_takes_the_steps_of_the_full_batches(name: str) -> None:
    make, collated = partial(OfTerms, LOSSES[name].of, "adamw"), [default_collate(batch) for batch in BATCHES]
    whole = fit(make(), [default_collate(window) for window in windows_of([BATCHES], 4)], strategy="auto").lightning_module
    fit(saving := make(), StatefulLoader(collated), GradientAccumulation(4), SaveAfter(5, 6, 7, path="after{}.ckpt"))
    assert error_of_updates(saving, whole, make()) <= 1e-12
    for after in (5, 6, 7):
        fit(resumed := make(), StatefulLoader(collated), GradientAccumulation(4), ckpt_path=f"after{after}.ckpt")
        assert error_of_updates(resumed, whole, make()) <= 1e-12


def test_a_micro_batch_of_nothing_leaves_the_shown_loss_of_its_window_to_the_others() -> None:  # 0.47 before
    def loss(o: Any, b: Any, m: Any) -> Tensor:
        is_nothing = bool(b.x[0, 0] > 50)
        return torch.zeros((), requires_grad=True).double() if is_nothing else LOSSES["tokens and samples"].of(o, b, m)

    batches = [rows(8, 0), rows(3, 1), rows(3, 2), rows(4, 8), rows(2, 7), rows(5, 9)]  # 0 and 3 are all that is checked
    for row in batches[4]:
        row["x"] = row["x"] + 100
    windows = [[row for batch in own for row in batch] for own in (batches[:3], batches[3::2])]
    found = compare_window_with_batch(partial(OfTerms, loss), batches, GradientAccumulation(3), windows=windows)
    assert max(found.parameters, found.losses) <= EXACT


# --- ranks ----------------------------------------------------------------------------------------------------------------
UNUSED = {"find_unused_parameters": True}
RANKS = [  # the loader batches of each rank, which end at different times
    on("ddp", (6, 4), {"window": 2}, **UNUSED), on("ddp of 3", (5, 2, 4), {"window": 2}, **UNUSED),
    on("fsdp2", (4, 6), {"window": 2}), on("ddp", (5, 5), {"window": 2}, sync="micro_batch", **UNUSED),
    on("ddp", (2, 4), {"micro_batch": 2}, **UNUSED), on("fsdp2", (4, 3), {"micro_batch": 2}),
]  # fmt: skip
OVER_RANKS = ["tokens and samples", "nodes, edges and graphs", "learned uncertainty", "boxes and samples", *ABSENT[:2]]


@pytest.mark.some_cases(3, 8)
@pytest.mark.parametrize("name", OVER_RANKS)
@pytest.mark.parametrize(("engine", "options", "lengths", "policy"), RANKS)
def test_over_ranks_with_uneven_ends_a_window_is_its_full_batch(
    engine: str, options: Any, lengths: Any, policy: Any, name: str
) -> None:
    """The last rank never has a term that is only where there is something."""
    last = len(lengths) - 1
    by_rank = [
        [rows(SIZES[place], 20 * rank + place, has_some=rank < last and place != 1) for place in range(length)]
        for rank, length in enumerate(lengths)
    ]
    make = partial(OfTerms, LOSSES[name].of, "adamw")
    assert_one_window_one_batch(make, by_rank, GradientAccumulation(**policy), engine, options, collate=default_collate)


def test_windows_of_one_batch_on_each_rank_are_exact_and_a_rank_without_a_term_or_a_loss_holds_nobody_up() -> None:
    def loss(o: Any, b: Any, m: Any) -> Any:  # the second rank has no term of what is chosen in its first batch, none in its second
        return None if len(b.x) == 1 else LOSSES[ABSENT[0]].of(o, b, m)

    by_rank = [[rows(3, 1), rows(2, 2), rows(4, 3)], [rows(2, 4, has_some=False), rows(1, 5), rows(5, 6)]]
    windows = [by_rank[0][0] + by_rank[1][0], by_rank[0][1], by_rank[0][2] + by_rank[1][2]]
    arguments = {"by_rank": True, "collate": default_collate, "strategy": partial(ddp, **UNUSED), "devices": 2, "windows": windows}
    make = partial(OfTerms, loss, "adamw")
    found = compare_window_with_batch(make, by_rank, GradientAccumulation(1), optimizer=None, **arguments)
    assert found.steps == (3, 3)
    assert max(found.parameters, found.losses) <= EXACT


def test_a_loss_that_lacks_a_term_of_the_list_on_one_rank_is_an_error() -> None:  # its gradient was left out before
    def loss(o: Any, b: Any, m: Any) -> Tensor:
        is_short = m.global_step == m.global_rank == 1
        return F.cross_entropy(o.classes, b.t) + (0.0 if is_short else F.mse_loss(o.values, b.y))

    data = Dealt([[rows(3, seed) for seed in seeds] for seeds in ((1, 2), (3, 4))], default_collate)
    policy = GradientAccumulation(1, weight=[SampleCount("x"), SampleCount("x")])
    with pytest.raises(ProcessRaisedException, match="has 2 weights"):
        fit(OfTerms(loss), data, policy, strategy=ddp(**UNUSED), devices=2)


# --- what a stranger's losses have found ----------------------------------------------------------------------------------
def chosen_or_nothing(o: Any, b: Any, m: Any) -> Tensor:
    """What is divided by at least 1, and by the number of what is chosen where there is any."""
    of_chosen = F.smooth_l1_loss(o.values[b.some], b.y[b.some], reduction="sum") / max(int(b.some.sum()), 1)
    return of_chosen + F.cross_entropy(o.classes, b.t)


def compiled(o: Any, b: Any, m: Any) -> Tensor:
    return torch.compile(_two_terms, backend="eager", dynamic=True)(o.classes, b.t, o.values[b.some], b.y[b.some])


def _two_terms(logits: Tensor, t: Tensor, values: Tensor, y: Tensor) -> Tensor:
    return F.cross_entropy(logits, t) + F.mse_loss(values, y)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("policy", ["windows", "split in 3"])
@pytest.mark.parametrize("loss", [chosen_or_nothing, compiled])
def test_terms_of_strangers(loss: Function, policy: str) -> None:
    assert_exact(loss, POLICIES[policy], BATCHES if loss is chosen_or_nothing else ALL_SOME)


@pytest.mark.some_cases(0, 1)
@pytest.mark.parametrize(("name", "policy"), [("nodes and edges", "windows"), (ABSENT[0], "split in 3")])
def test_terms_of_a_compiled_network(name: str, policy: str) -> None:  # refused before
    class CompiledNetwork(OfTerms):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.net.compile(backend="aot_eager", dynamic=True)

    torch._dynamo.reset()
    assert_exact(LOSSES[name].of, POLICIES[policy], optimizers=[sgd], kind=CompiledNetwork)


def test_terms_that_are_compiled_away_are_an_error_that_says_so() -> None:
    compiled_away = torch.compile(_two_terms, backend="aot_eager", dynamic=True)
    module = OfTerms(lambda o, b, m: compiled_away(o.classes, b.t, o.values[b.some], b.y[b.some]))
    with pytest.raises(UnreadableLossError, match="Compile only the network"):
        fit(module, [default_collate(batch) for batch in ALL_SOME], GradientAccumulation(4))


def test_a_term_divided_by_a_number_of_the_loader_batch_is_told_of_and_takes_a_weight() -> None:
    def with_number(batch: list[dict[str, Tensor]]) -> dict[str, Any]:
        return {**default_collate(batch), "n": len(batch)}

    def by_a_number_of_the_batch(o: Any, b: Any, m: Any) -> Tensor:
        return F.cross_entropy(o.classes, b.t, reduction="sum") / b.n + F.mse_loss(o.values, b.y)

    batches = [with_number(batch) for batch in BATCHES]
    with pytest.warns(AccumulationWarning, match="A factor of the loss changes"):
        fit(OfTerms(by_a_number_of_the_batch), batches, GradientAccumulation(4))
    policy = GradientAccumulation(4, weight=[lambda b: b["n"], COUNTS["samples"]], log=False)
    with pytest.warns(AccumulationWarning, match="the same count for some rows"):
        fit(OfTerms(by_a_number_of_the_batch), batches, policy)
    assert_one_window_one_batch(partial(OfTerms, by_a_number_of_the_batch), [BATCHES], policy, collate=with_number)


def by_their_mean(o: Any, b: Any, m: Any) -> Tensor:
    return ((o.values - b.y).square().sum(1) * (b.w / b.w.mean())).mean()


LATE: dict[str, tuple[Function, Any]] = {  # a loss, and what is otherwise in the rows that are checked
    "in proportion": (lambda o, b, m: F.cross_entropy(o.classes, b.t) + F.mse_loss(o.values[b.some], b.y[b.some]),
                      lambda seed, row: {"some": row["some"] | (seed == 0)}),
    "not masked": (lambda o, b, m: ((o.values - b.y).square().sum(1) * b.some).sum() / len(b.y),
                   lambda seed, row: {"some": row["some"] | (seed < 2) if seed % 4 < 2 else row["some"] & False}),
    "of one weight": (by_their_mean, lambda seed, row: {"w": row["x"][0].abs() ** (seed > 0)}),
}  # fmt: skip


def of_late(late: str) -> Any:
    sizes, changed = (8, 3, 5, 2, 2, 4, 1, 3, 4, 2, 6, 3), LATE[late][1]
    return [[{**row, **changed(seed, row)} for row in rows(size, seed)] for seed, size in enumerate(sizes)]


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("late", LATE)
def test_a_window_of_what_the_check_has_not_seen_is_left_out(late: str) -> None:
    batches = of_late(late)
    with pytest.warns(AccumulationWarning, match="This window is left out"):
        found = compare_window_with_batch(
            *(partial(OfTerms, LATE[late][0]), batches, GradientAccumulation(4)),
            **{"optimizer": adamw, "windows": windows_of([batches], 4)[1:]},
        )
    assert found.steps == (2, 2)
    assert max(found.parameters, found.losses) <= EXACT


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("late", LATE)
def test_what_the_first_rows_of_a_split_batch_do_not_show_others_do(late: str) -> None:
    assert_exact(LATE[late][0], POLICIES["split in 3"], of_late(late))


def test_rows_are_looked_at_all_over_a_batch_that_is_sorted() -> None:  # 0.4 before
    def weighted(place: int, size: int, weight: float) -> list[dict[str, Tensor]]:
        return [{**row, "w": torch.tensor(weight, dtype=torch.float64)} for row in rows(size, place)]

    batches = [weighted(place, 4, (1.0, 1.0, 2.0, 3.0)[place % 4]) for place in range(12)]
    assert_exact(by_their_mean, {"micro_batch": 4}, batches)


def focal(o: Any, b: Any, m: Any) -> Tensor:
    return (o.values - b.y).square().sum() / b.some.sum().clamp(min=1)


def focal_by_item(o: Any, b: Any, m: Any) -> Tensor:
    return (o.values - b.y).square().sum() / max(1, int(b.some.sum()))


def twice(loss: Function) -> Function:  # 0.07 off, silently
    return lambda o, b, m: 2 * loss(o, b, m)


@pytest.mark.some_cases(4)
@pytest.mark.parametrize("policy", [{"window": 4}, {"window": 4, "weight": COUNTS["some"]}, {"micro_batch": 2}])
@pytest.mark.parametrize(
    "loss", [focal, lambda o, b, m: focal(o, b, m) + F.cross_entropy(o.classes, b.t), twice(focal), twice(focal_by_item)]
)
def test_a_count_that_is_raised_to_1_is_refused_before_its_step(loss: Function, policy: dict[str, Any]) -> None:
    batches = [[{**row, "some": row["some"] | (seed < 8)} for row in rows(3, seed, has_some=seed < 8)] for seed in range(12)]
    own = windows_of([batches], 4) if "micro_batch" in policy else batches
    module = OfTerms(loss)
    with pytest.raises(DoesNotAddUpError):
        fit(module, [default_collate(batch) for batch in own], GradientAccumulation(**policy))
    assert module.trainer.global_step <= 2


@pytest.mark.parametrize("policy", ["windows", "split in 2"])
def test_each_term_has_a_small_constant_of_its_own(policy: str) -> None:  # 3e-6 before
    def small_constants(o: Any, b: Any, m: Any) -> Tensor:
        chosen, is_rare = b.some.to(o.values.dtype), (b.rare >= 0).to(o.values.dtype)
        of_chosen = ((o.values - b.y).square().mean(1) * chosen).sum() / (chosen.sum() + 1e-5)
        return of_chosen + (o.values.square().sum(1) * is_rare).sum() / (is_rare.sum() + 1e-5) + F.cross_entropy(o.classes, b.t)

    assert_exact(
        small_constants, POLICIES[policy], [rows(size, seed, has_some=seed not in (5, 6)) for seed, size in enumerate(SIZES)]
    )


@pytest.mark.some_cases(4, 40)
@pytest.mark.parametrize(("size", "window"), [(1, 4), (2, 2), (2, 4), (3, 2), (4, 2)])
@pytest.mark.parametrize("name", [name for name in LOSSES if "heads, where" not in name])  # without a gradient for nothing
def test_loader_batches_of_few_rows_are_checked_together_before_their_window(name: str, size: int, window: int) -> None:
    batches = [rows(size, seed, has_some=seed % 3 != 0) for seed in range(3 * window)]
    assert_exact(LOSSES[name].of, {"window": window}, batches, [adamw])


# --- a list with a weight for each term: windows are counted in loader batches that are drawn ahead -------------------------
THREE = "nodes, edges and graphs"
WEIGHT = [COUNTS[count] for count in LOSSES[THREE].counts.split(", ")]
DRAWN = [rows(size, seed) for seed, size in enumerate((3, 2, 5, 2, 4, 2, 3, 2, 5, 2))]


def test_each_term_takes_no_second_backward() -> None:
    module, backwards = OfTerms(LOSSES[THREE].of), []
    module.on_after_backward = lambda: backwards.append(1)
    fit(module, [default_collate(rows(8, seed)) for seed in (1, 2)], GradientAccumulation(micro_batch=2, weight=WEIGHT))
    assert len(backwards) == 2 * 8 / 2


@pytest.mark.parametrize(("weight", "ahead"), [(WEIGHT, [1, 3, 2, 1]), (SampleCount(), [1, 1, 1, 1])], ids=["a list", "one weight"])
def test_a_stream_is_drawn_as_far_as_the_window_and_only_with_a_weight_for_each_term(weight: Any, ahead: list[int]) -> None:
    """When its first batch runs, after that batch's hook. And the batch that Lightning draws ahead of a stream."""

    batches, drawn, found = list(map(default_collate, DRAWN[:5])), list[int](), list[int]()

    def endless() -> Iterator[Any]:
        while True:
            drawn.append(len(drawn))
            yield batches[drawn[-1] % 5]

    def look(trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        assert torch.equal(batch["ids"], batches[batch_idx % 5]["ids"])
        found.append(len(drawn) - batch_idx - 1)

    policy, looks = GradientAccumulation(4, weight=weight, check=False), LambdaCallback(on_train_batch_start=look)
    fit(OfTerms(LOSSES[THREE].of), endless(), policy, looks, max_steps=3, max_epochs=-1)
    assert found == ahead * 3
