"""Where rows begin and end, read from a batch: against rows that were padded by hand."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor

from lightning_accum import AccumulationError
from lightning_accum.splitting.padding import AmbiguousDims, Spans, read_spans

SIDES = ["left", "right", "both"]
SEEDS = range(5)


def lay_out(side: str, seed: int, rows: int = 6, length: int = 9) -> list[tuple[int, int]]:
    """Where each row begins and stops, at random. The first row has no padding."""
    dice = random.Random(seed)
    found = [(0, length)]
    while len(found) < rows:
        width = dice.randint(1, length - 2)
        start = {"left": length - width, "right": 0, "both": dice.randint(0, length - width)}[side]
        found.append((start, start + width))
    return found


def fill(spans: Sequence[tuple[int, int]], padding: int, length: int = 9, first: int = 1) -> Tensor:
    """Rows of numbers that all differ, counting down so that they are no positions."""
    tensor = torch.full((len(spans), length), padding)
    for row, (start, stop) in enumerate(spans):
        for column in range(start, stop):
            tensor[row, column] = first + 1000 - row * length - column
    return tensor


def mask_of(spans: Sequence[tuple[int, int]], length: int = 9) -> Tensor:
    return torch.tensor([[int(start <= column < stop) for column in range(length)] for start, stop in spans])


def expected(spans: Sequence[tuple[int, int]], length: int = 9) -> dict[int, Spans]:
    return {length: Spans(length, tuple(start for start, _ in spans), tuple(stop for _, stop in spans))}


# --- masks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.long, torch.bool, torch.float32, torch.uint8])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("seed", SEEDS)
def test_an_attention_mask_tells_where_rows_begin_and_end(seed: int, side: str, dtype: torch.dtype) -> None:
    spans = lay_out(side, seed)
    batch = {"input_ids": fill(spans, 0), "attention_mask": mask_of(spans).to(dtype), "labels": fill(spans, -100)}
    assert read_spans(batch) == expected(spans)
    assert read_spans({f"inputs[0].{name}": tensor for name, tensor in batch.items()}) == expected(spans)


@pytest.mark.parametrize("name", ["key_padding_mask", "src_key_padding_mask", "inputs.memory_key_padding_mask"])
@pytest.mark.parametrize("side", SIDES)
def test_a_key_padding_mask_is_true_where_there_is_padding(side: str, name: str) -> None:
    spans = lay_out(side, 0)
    assert read_spans({"x": fill(spans, 0), name: mask_of(spans) == 0}) == expected(spans)
    additive = torch.zeros(mask_of(spans).shape).masked_fill(mask_of(spans) == 0, -torch.inf)
    assert read_spans({"x": fill(spans, 0), name: additive}) == expected(spans)


def test_holes_in_the_middle_of_a_row_are_no_padding() -> None:
    mask = torch.tensor([[0, 1, 0, 0, 1, 0], [1, 0, 1, 0, 0, 0], [0, 0, 0, 1, 0, 1]])
    ids = torch.tensor([[0, 7, 3, 4, 7, 0], [7, 5, 7, 0, 0, 0], [0, 0, 0, 7, 6, 7]])
    assert read_spans({"attention_mask": mask, "ids": ids}) == {6: Spans(6, (1, 0, 3), (5, 3, 6))}


def test_a_row_of_padding_alone_keeps_one_column() -> None:
    mask = torch.tensor([[0, 0, 0], [1, 1, 0]])
    assert read_spans({"attention_mask": mask, "ids": mask * 5}) == {3: Spans(3, (0, 0), (1, 2))}


@pytest.mark.parametrize(
    "batch",
    [
        {},
        {"x": torch.rand(4, 3)},
        {"attention_mask": torch.ones(4, 3)},
        {"attention_mask": torch.ones(4, 3), "labels": fill([(0, 9)] * 4, 0)},
        {"input_ids": fill([(0, 9)] * 4, 0), "labels": fill([(0, 9)] * 4, 0)},
        {"attention_mask": torch.zeros(4)},
        {"attention_mask": torch.ones(4, 1, 3, 3).tril()},
        {"attention_mask": torch.ones(0, 3), "labels": torch.ones(0, 3, dtype=torch.long)},
        {"attention_mask": torch.ones(3, 0), "labels": torch.ones(3, 0, dtype=torch.long)},
    ],
)
def test_there_are_no_spans_where_nothing_tells_of_padding(batch) -> None:
    assert read_spans(batch) == {}


def test_what_is_read_stays_as_it_is() -> None:
    spans = lay_out("right", 0)
    batch = {"input_ids": fill(spans, 0), "attention_mask": mask_of(spans), "labels": fill(spans, -100)}
    kept = {name: tensor.clone() for name, tensor in batch.items()}
    read_spans(batch)
    read_spans({name: batch[name] for name in ("input_ids", "labels")})
    assert all(torch.equal(batch[name], kept[name]) for name in batch)


# --- labels and constant padding --------------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", [0, 50256])
@pytest.mark.parametrize("seed", SEEDS)
def test_without_a_mask_labels_and_constant_padding_tell_where_rows_end(seed: int, padding: int) -> None:
    spans = lay_out("right", seed)
    embedded = fill(spans, 0)[..., None] * torch.rand(4)
    batch = {"input_ids": fill(spans, padding), "labels": fill(spans, -100), "embedded": embedded, "weight": torch.rand(6)}
    assert read_spans(batch) == expected(spans)


@pytest.mark.parametrize("positions", [torch.arange(9).expand(6, 9), torch.arange(3, 12).repeat(6, 1)])
def test_without_a_mask_positions_may_go_on_in_the_padding(positions: Tensor) -> None:
    spans = lay_out("right", 1)
    assert read_spans({"input_ids": fill(spans, 0), "labels": fill(spans, -100), "position_ids": positions}) == expected(spans)


def test_inputs_whose_label_is_ignored_are_no_padding() -> None:
    """A prompt in front, an ignored answer behind, and padding after both."""
    ids = torch.tensor([[5, 6, 7, 8, 9, 4], [5, 6, 7, 0, 0, 0], [5, 0, 0, 0, 0, 0]])
    labels = torch.tensor([[-100, -100, 7, 8, 9, 4], [-100, 6, -100, -100, -100, -100], [-100] * 6])
    assert read_spans({"ids": ids, "labels": labels}) == {6: Spans(6, (0, 0, 0), (6, 3, 1))}


def test_a_last_token_that_is_the_padding_token_stays_where_it_has_a_label() -> None:
    end = 2
    ids = torch.tensor([[5, 6, 7, 8, 9, end], [5, 6, end, end, end, end]])
    labels = torch.tensor([[5, 6, 7, 8, 9, end], [5, 6, end, -100, -100, -100]])
    assert read_spans({"ids": ids, "labels": labels}) == {6: Spans(6, (0, 0), (6, 3))}


def test_without_a_mask_padding_in_front_is_kept_for_positions_count_from_there() -> None:
    ids = torch.tensor([[5, 6, 7, 8], [0, 0, 7, 8]])
    labels = torch.tensor([[5, 6, 7, 8], [-100, -100, 7, 8]])
    assert read_spans({"ids": ids, "labels": labels}) == {}
    ids = torch.tensor([[0, 6, 7, 8, 9], [0, 0, 7, 0, 0]])
    assert read_spans({"ids": ids, "labels": ids.masked_fill(ids == 0, -100)}) == {5: Spans(5, (0, 0), (5, 3))}


def test_ignored_labels_are_no_padding_where_the_inputs_differ() -> None:
    """Masked language modelling: most labels are ignored, in the last column all of them."""
    ids = torch.tensor([[1, 5, 6, 7, 2], [1, 5, 2, 0, 0]])
    labels = torch.tensor([[-100, 5, -100, -100, -100], [-100, 5, -100, -100, -100]])
    assert read_spans({"ids": ids, "labels": labels}) == {}


def test_an_end_of_sequence_without_a_label_is_no_padding() -> None:
    """Named entities: all rows are of one length and end in a separator, which has no label."""
    ids = torch.tensor([[1, 5, 6, 7, 2], [1, 8, 9, 4, 2]])
    labels = torch.tensor([[-100, 5, 5, 5, -100], [-100, 3, 3, 3, -100]])
    assert read_spans({"ids": ids, "labels": labels}) == {}


def test_labels_that_no_input_is_as_wide_as_tell_their_own_padding() -> None:
    """A decoder's: its inputs are made of them, and the encoder's have another length."""
    spans = lay_out("right", 2)
    assert read_spans({"features": torch.rand(6, 20, 3), "labels": fill(spans, -100)}) == expected(spans)


# --- two lengths ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("has_decoder_mask", [True, False])
@pytest.mark.parametrize("seed", SEEDS)
def test_an_encoder_and_a_decoder_are_padded_each_for_itself(seed: int, has_decoder_mask: bool) -> None:
    source, target = lay_out("both", seed, length=12), lay_out("right", seed + 100, length=7)
    batch = {"input_ids": fill(source, 0, 12), "attention_mask": mask_of(source, 12), "labels": fill(target, -100, 7)}
    if has_decoder_mask:
        batch["decoder_attention_mask"] = mask_of(target, 7)
    assert read_spans(batch) == {**expected(source, 12), **expected(target, 7)}


@pytest.mark.parametrize("seed", SEEDS)
def test_labels_of_the_masks_width_that_disagree_with_it_stop_trimming(seed: int) -> None:
    source, target = lay_out("right", seed), lay_out("right", seed + 100)
    batch = {"input_ids": fill(source, 0), "attention_mask": mask_of(source), "labels": fill(target, -100)}
    assert read_spans(batch) == {}
    codebooks = torch.stack([fill(target, 0)] * 3, dim=-1)
    assert read_spans({**batch, "labels": codebooks}) == {}


@pytest.mark.parametrize("names", [("attention_mask", "decoder_attention_mask"), ("one.attention_mask", "two.attention_mask")])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("seed", SEEDS)
def test_of_two_masks_of_one_width_padding_is_what_is_padding_in_both(seed: int, side: str, names: tuple[str, str]) -> None:
    one, two = lay_out(side, seed)[1:], lay_out(side, seed + 100)[1:]
    both = [(min(a, c), max(b, d)) for (a, b), (c, d) in zip(one, two, strict=True)]
    batch = {names[0]: mask_of(one), "ids": fill(one, 0), names[1]: mask_of(two), "labels": fill(two, -100)}
    assert read_spans(batch) == expected(both)


# --- what may be in the padding ---------------------------------------------------------------------------------------

IN_PADDING: dict[str, Callable[[Tensor], Tensor]] = {
    "positions that go on": lambda mask: torch.arange(9).expand(mask.shape),
    "positions of tokens": lambda mask: mask.cumsum(1) - 1,
    "positions of tokens, 1 elsewhere": lambda mask: (mask.cumsum(1) - 1).masked_fill(mask == 0, 1),
    "positions of tokens, 0 elsewhere": lambda mask: (mask.cumsum(1) - 1) * mask,
    "positions of tokens, from a padding index": lambda mask: mask.cumsum(1) * mask + 1,
    "segments": lambda mask: torch.arange(9).expand(mask.shape) // 5 * mask,
    "segments that go on": lambda mask: torch.arange(9).expand(mask.shape) // 5,
    "the number of the row": lambda mask: torch.arange(len(mask))[:, None].expand(mask.shape),
    "special tokens": lambda mask: 1 - mask,
    "special tokens as bools": lambda mask: mask == 0,
    "floating numbers": lambda mask: torch.rand(mask.shape),
    "boxes": lambda mask: torch.randint(1, 9, (*mask.shape, 4)) * mask[..., None],
    "a causal mask": lambda mask: torch.ones(9, 9, dtype=torch.long).tril().expand(len(mask), 9, 9),
    "numbers of another width": lambda mask: torch.randint(0, 9, (len(mask), 4)),
    "numbers of the row": lambda mask: torch.arange(len(mask)),
}


@pytest.mark.parametrize("name", IN_PADDING)
@pytest.mark.parametrize("side", SIDES)
def test_padding_is_read_next_to(side: str, name: str) -> None:
    spans = lay_out(side, 3)
    batch = {"input_ids": fill(spans, 0), "attention_mask": mask_of(spans), "more": IN_PADDING[name](mask_of(spans))}
    assert read_spans(batch) == expected(spans)


@pytest.mark.parametrize("dtype", [torch.long, torch.int32, torch.bool])
def test_one_number_in_the_padding_that_is_not_like_the_rest_stops_trimming(dtype: torch.dtype) -> None:
    spans = lay_out("both", 4)
    start, stop = spans[2]
    more = torch.zeros(6, 9, dtype=dtype)
    more[2, start - 1 if start else stop] = 2
    assert read_spans({"attention_mask": mask_of(spans), "more": more}) == {}


def test_numbers_that_rise_in_leaps_are_no_positions() -> None:
    spans = lay_out("right", 4)
    assert read_spans({"attention_mask": mask_of(spans), "labels": torch.randint(1, 9, (6, 9)).cumsum(1)}) == {}


# --- an explicit key --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("key", ["valid", "inputs.valid"])
def test_a_mask_can_be_named_by_its_path_or_the_last_part_of_it(key: str, side: str) -> None:
    spans = lay_out(side, 0)
    batch = {"inputs.x": torch.randint(0, 99, (6, 9)), "inputs.valid": mask_of(spans)}
    assert read_spans(batch) == {}
    assert read_spans(batch, key) == expected(spans)


def test_a_key_padding_mask_that_is_named_is_true_where_there_is_padding() -> None:
    spans = lay_out("right", 0)
    assert read_spans({"src_key_padding_mask": mask_of(spans) == 0}, "src_key_padding_mask") == expected(spans)


@pytest.mark.parametrize("dtype", [torch.long, torch.int32, torch.uint8])
def test_lengths_can_be_named(dtype: torch.dtype) -> None:
    spans = lay_out("right", 0)
    lengths = torch.tensor([stop for _, stop in spans], dtype=dtype)
    assert read_spans({"x": torch.rand(6, 9, 4), "n": lengths}, "n") == expected(spans)
    assert read_spans({"x": torch.rand(6, 9, 4), "n": torch.full((6,), 9)}, "n") == {}


def test_lengths_are_of_the_columns_that_the_longest_row_fills() -> None:
    batch = {"frames": torch.rand(3, 30, 4), "tokens": torch.ones(3, 8), "n": torch.tensor([8, 3, 5])}
    assert read_spans(batch, "n") == {8: Spans(8, (0, 0, 0), (8, 3, 5))}


def test_lengths_are_of_the_first_tensor_wide_enough_where_no_row_fills_it() -> None:
    batch = {"narrow": torch.rand(3, 4), "frames": torch.rand(3, 10, 4), "wide": torch.rand(3, 12), "n": torch.tensor([8, 3, 0])}
    assert read_spans(batch, "n") == {10: Spans(10, (0, 0, 0), (8, 3, 1))}


def test_lengths_of_no_rows_are_no_error() -> None:
    assert read_spans({"x": torch.rand(0, 4), "n": torch.ones(0, dtype=torch.long)}, "n") == {}


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        ({"x": torch.rand(2, 3), "in.y": torch.rand(2)}, "the batch has no tensor 'n' to read lengths from: it has x, in.y"),
        ({"x": torch.rand(2, 3), "n": torch.rand(2)}, r"'n' has the shape \(2,\) and type torch.float32: expected a mask of shape"),
        ({"x": torch.rand(2, 3), "in.n": torch.ones(2, 3, 3)}, r"'in.n' has the shape \(2, 3, 3\)"),
        (
            {"x": torch.rand(2, 3), "n": torch.tensor([2, 4])},
            "the lengths in 'n' are up to 4, but no tensor of the batch has so many",
        ),
    ],
)
def test_a_key_that_tells_no_lengths_is_named(batch, said: str) -> None:
    with pytest.raises(AccumulationError, match=said):
        read_spans(batch, "n")


# --- spans ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", SEEDS)
def test_the_columns_of_rows_are_all_that_any_of_them_needs(seed: int) -> None:
    places = lay_out("both", seed)[1:]
    spans = expected(places)[9]
    for rows in ([0], [1, 3], [4, 2, 0], range(5)):
        needed = mask_of(places)[list(rows)].any(0).nonzero().flatten()
        kept = spans.columns(rows)
        assert kept == slice(int(needed.min()), int(needed.max()) + 1)
    assert spans.widths == mask_of(places).sum(1).tolist()


@pytest.mark.parametrize("side", SIDES)
def test_padding_can_be_kept_on_either_side(side: str) -> None:
    places = lay_out(side, 1)
    spans = expected(places)[9]
    assert spans.is_padded
    assert (spans.is_padded_left, spans.is_padded_right) == (side != "right", side != "left")
    assert spans.keep_padding(left=True, right=False) == expected([(0, stop) for _, stop in places])[9]
    assert spans.keep_padding(left=False, right=True) == expected([(start, 9) for start, _ in places])[9]
    assert not spans.keep_padding(left=True, right=True).is_padded


# --- sizes that are the same by chance --------------------------------------------------------------------------------


def texts(length: int, **more: Tensor) -> dict[str, Tensor]:
    spans = [(0, length), (0, length - 2), (0, 3)]
    return {"ids": fill(spans, 0, length), "attention_mask": mask_of(spans, length), **more}


def left_by(coincidences: AmbiguousDims, tensors: dict[str, Tensor], **shared: Tensor) -> set[int]:
    return set(coincidences.without(read_spans(tensors), tensors, shared))


def test_classes_that_are_as_many_as_columns_in_a_later_batch_are_no_columns() -> None:
    seen = AmbiguousDims()
    targets = torch.rand(3, 20)
    assert left_by(seen, texts(17, targets=targets)) == {17}
    assert left_by(seen, texts(20, targets=targets)) == set()
    assert left_by(seen, texts(19, targets=targets)) == {19}


@pytest.mark.parametrize("shape", [(20,), (20, 4), (4, 20)])
def test_a_shared_tensor_with_as_many_classes_is_no_columns(shape: tuple[int, ...]) -> None:
    seen = AmbiguousDims()
    assert left_by(seen, texts(17), weights=torch.rand(shape)) == {17}
    assert left_by(seen, texts(20), weights=torch.rand(shape)) == set()


def test_a_target_that_is_padded_to_the_length_of_its_source_once_is_no_part_of_it() -> None:
    seen = AmbiguousDims()
    assert left_by(seen, texts(17, target=torch.rand(3, 11, 2))) == {17}
    assert left_by(seen, texts(14, target=torch.rand(3, 14, 2))) == set()


def test_a_target_with_a_mask_of_its_own_is_trimmed_with_the_source_where_both_are_as_long() -> None:
    seen = AmbiguousDims()
    target = {name: texts(11)[key] for name, key in (("decoder_attention_mask", "attention_mask"), ("labels", "ids"))}
    assert left_by(seen, texts(17, **target)) == {17, 11}
    assert left_by(seen, texts(11, **target)) == {11}


def test_what_always_has_the_columns_of_the_mask_is_trimmed_with_it() -> None:
    seen = AmbiguousDims()
    for length in (9, 17, 9, 20):
        more = {"embedded": torch.rand(3, length, 8), "bias": torch.rand(3, 1, length, length), "classes": torch.rand(3, 8)}
        assert left_by(seen, texts(length, **more), positions=torch.arange(length)[None]) == {length}


def test_rows_are_no_columns_where_there_are_as_many() -> None:
    seen = AmbiguousDims()
    for length in (9, 6, 8):
        spans = lay_out("right", 0, rows=6, length=length)
        assert left_by(seen, {"ids": fill(spans, 0, length), "attention_mask": mask_of(spans, length)}) == {length}


def test_a_key_finds_all_lengths_that_end_in_it_and_each_is_of_the_columns_that_share_its_name() -> None:
    tensors = {
        "encoder_cont": torch.rand(3, 9, 2),
        "decoder_cont": torch.rand(3, 4, 2),
        "encoder_lengths": torch.tensor([7, 3, 5]),
        "decoder_lengths": torch.tensor([4, 1, 2]),
    }
    both = {9: Spans(9, (0, 0, 0), (7, 3, 5)), 4: Spans(4, (0, 0, 0), (4, 1, 2))}
    assert read_spans(tensors, "lengths") == both
    assert read_spans(tensors, "decoder_lengths") == {4: both[4]}
    tensors["decoder_lengths"] = torch.tensor([3, 1, 2])
    assert read_spans(tensors, "decoder_lengths") == {4: Spans(4, (0, 0, 0), (3, 1, 2))}
