"""What training_step gets of a loader batch that is split: the same rows of every part, without padding, and no more."""

from __future__ import annotations

import operator
import random
from collections import OrderedDict, defaultdict, namedtuple
from collections.abc import Callable, Sequence
from dataclasses import make_dataclass
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from changing import Changes
from support import SaveAfter, Scalar, Toy, error_of_updates, fit, labelled, loader, relative_error, warned, x
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import DataLoader, default_collate

from lightning_accum import AccumulationError, GradientAccumulation, Tokens, UnsplittableBatchError, split_lists
from lightning_accum.testing import assert_window_equals_batch


class Gets(Scalar):  # keeps what training_step gets, of a loss that depends on no row
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.batches.append(batch)
        return self.w * 1.0


def as_it_is(data: Any) -> DataLoader:  # a loader of one batch, which Lightning and torch leave as it is; a loader stays one
    return data if isinstance(data, DataLoader) else DataLoader([data], batch_size=None, collate_fn=lambda batch: batch)


def pieces(data: Any, micro_batch: Any = 3, number: int | None = None, **policy: Any) -> list[Any]:
    """What training_step gets of one batch or of a loader, without what tries out first."""
    module = Gets()
    fit(module, as_it_is(data), GradientAccumulation(micro_batch=micro_batch, **{"weight": "equal", "check": False, **policy}))
    return module.batches if number is None else module.batches[-number:]


def rows(*shape: int, start: int = 0) -> Tensor:  # a tensor whose entries all differ
    return torch.arange(start, start + int(torch.tensor(shape).prod())).reshape(shape)


def same(left: Any, right: Any) -> bool:
    """Equal in types and values, which all are shown, since tensors are small and of whole numbers."""
    return (type(left), repr(left)) == (type(right), repr(right))


Triple = namedtuple("Triple", "x y name")
Record, Slotted = make_dataclass("Record", ["x", "name"]), make_dataclass("Slotted", ["x", "name"], slots=True)
SMALL = (1, "8", None, True, torch.half, torch.Size([8]), torch.tensor(3.0), b"8", {"n": 8}, 1j)
X, Y, NAMES = rows(8, 3), rows(8, start=100), list("abcdefgh")
CONTAINERS: dict[str, Callable[[slice], Any]] = {
    "a tensor": lambda s: X[s],
    "a tuple": lambda s: (X[s], Y[s]),
    "a list": lambda s: [X[s], Y[s]],
    "a dict": lambda s: {"x": X[s], 3: Y[s]},
    "an OrderedDict": lambda s: OrderedDict(y=Y[s], x=X[s]),
    "a defaultdict": lambda s: defaultdict(list, x=X[s]),
    "a BatchEncoding": lambda s: pytest.importorskip("transformers").BatchEncoding({"input_ids": X[s]}),
    "a ModelOutput": lambda s: pytest.importorskip("transformers.modeling_outputs").CausalLMOutput(logits=X[s]),
    "a named tuple": lambda s: Triple(X[s], (Y[s], NAMES[s]), NAMES[s]),
    "a dataclass": lambda s: Record(X[s], NAMES[s]),
    "a dataclass with slots": lambda s: Slotted(X[s], NAMES[s]),
    "texts": lambda s: {"x": X[s], "t": NAMES[s], "u": tuple(NAMES)[s]},
    "rows of lists": lambda s: (X[s], [[1] * n for n in range(8)][s]),
    "rows with gaps": lambda s: (X[s], ([None, {"a": 1}] * 4)[s]),
    "images of different shapes": lambda s: ([torch.ones(3, n, 4) for n in (4, 5, 6, 7) * 2][s], Y[s]),
    "images and targets": lambda s: ([torch.ones(3, n, 4) for n in range(8)][s], [{"boxes": rows(n, 4)} for n in range(8)][s]),
    "nested": lambda s: {"in": {"x": [X[s], (Y[s],)]}, "y": Y[s]},
    "small things": lambda s: (X[s], *SMALL),
    "shared tensors": lambda s: {"x": X[s], "y": Y[s], "table": torch.ones(5, 2), "empty": torch.ones(0, 4)},
    "shared texts": lambda s: {"x": X[s], "classes": ["cat", "dog"]},
    "an entry called batch": lambda s: {"batch": X[s], "y": Y[s]},
}


@pytest.mark.parametrize("name", CONTAINERS)
def test_micro_batches_have_the_same_rows_of_every_part_and_its_type(name: str) -> None:
    of, batch = CONTAINERS[name], CONTAINERS[name](slice(None))
    found = pieces(batch)
    assert len(found) == 3
    for piece, part in zip(found, (slice(0, 3), slice(3, 6), slice(6, 8)), strict=True):
        assert same(piece, of(part)), (piece, of(part))
    assert same(batch, of(slice(None)))  # is left as it is


def test_a_list_of_as_many_entries_as_the_loader_puts_samples_into_a_batch_has_one_a_sample() -> None:
    for images in ([torch.full((3, 4, 4), float(i)) for i in range(4)], [torch.full((3, i + 4, 4), float(i)) for i in range(4)]):
        found = pieces(DataLoader(images, batch_size=4, collate_fn=list), 3)
        assert [len(piece) for piece in found] == [3, 1]
        assert torch.equal(found[1][0], images[3])


def test_the_size_that_most_tensors_have_is_that_of_rows_and_a_table_stays_shared_in_a_last_batch_of_as_many() -> None:
    data = {size: {"x": rows(size), "y": rows(size, 2), "table": torch.ones(5, 2)} for size in (8, 5)}
    found = pieces(loader([data[8], data[5]]))
    assert [len(piece["x"]) for piece in found] == [3, 3, 2, 3, 2]
    assert all(torch.equal(piece["table"], torch.ones(5, 2)) for piece in found)


@pytest.mark.parametrize("part", ["a tensor", "a list"])
def test_what_had_an_entry_a_row_before_is_not_shared_by_all_rows(part: str) -> None:
    boxes = [torch.ones(number, 4) for number in (1, 2, 3, 4)]
    data = [{"x": rows(4), "y": rows(4), "boxes": boxes[:n] if part == "a list" else rows(n, 4)} for n in (4, 3)]
    with pytest.raises(UnsplittableBatchError, match="boxes.*no entry for each of the 4 rows"):
        pieces(loader(data), 2)


@pytest.mark.filterwarnings("error::lightning_accum.AccumulationWarning")
@pytest.mark.parametrize("number", [4, 8])
def test_what_all_rows_share_may_have_as_many_entries_as_there_are_rows(number: int) -> None:
    """The check finds it out: row by row it is of no use."""

    def loss(net: nn.Module, batch: Any) -> Tensor:
        x, y, weights, table = batch
        return F.cross_entropy(net(x) @ table, y, weight=weights)

    def collate(labels: list[int]) -> Any:
        x = torch.arange(3.0 * len(labels)).double().reshape(-1, 3).sin()
        return x, torch.tensor(labels), torch.arange(1.0, number + 1).double(), torch.eye(number).double().cumsum(1)

    batches = [[(3 * row + seed) % number for row in range(number)] for seed in range(2)]
    policy = GradientAccumulation(micro_batch=2)
    assert_window_equals_batch(lambda: Toy(loss, net=lambda: nn.Linear(3, number)), batches, policy, collate=collate)


class Opaque:
    def __init__(self, value: Any) -> None:
        self.value = value

    def to(self, device: Any) -> Opaque:
        return self


OF_GRAPHS = torch.arange(4).repeat_interleave(torch.tensor([5, 9, 4, 7]))  # of which graph each node is
UNSPLITTABLE: dict[str, tuple[Any, str]] = {
    "two sizes": ({"x": rows(8, 3), "y": rows(7)}, "7 or 8.*x is.*y is"),
    "no rows": ({"n": 3, "t": torch.tensor(1.0)}, "no tensor has rows .*dict"),
    "a text": ("text", "batch is a str"),
    "packed rows of another number": ({"p": pack_sequence([rows(3), rows(2)]), "x": X}, "2 or 8.*p is a PackedSequence of 2"),
    "packed rows beside two that agree": ({"p": pack_sequence([rows(3), rows(2)]), "x": X, "y": X}, "p is a PackedSequence of 2"),
    "nested": ((X, [torch.nested.nested_tensor([torch.rand(2), torch.rand(3)], layout=torch.jagged)]), r"\[1\]\[0\]"),
    "sparse": ({"x": X, "s": torch.eye(8).to_sparse()}, "s is a Tensor"),
    "no size that most have": ({"x": rows(8), "y": rows(8), "u": rows(5), "v": rows(5)}, "5 or 8.*u is a Tensor of shape"),
    "samples or batches of two loaders": ([{"x": rows(3, 2)}, {"x": rows(3, 2)}], "2 entries"),
    "a class of its own": ({"x": X, "o": Opaque({"deep": [X]})}, "o is a Opaque"),
    "graphs packed end to end": ({"position": torch.rand(25, 3), "batch": OF_GRAPHS, "energy": torch.rand(4)}, "batch"),
    "texts packed end to end": ({"input_ids": rows(18), "labels": rows(18), "cu_seqlens": torch.tensor([0, 18])}, "cu_seqlens"),
    "an array of another library": ({"x": X, "a": np.arange(8)}, "a is a ndarray"),
    "more rows than samples": (DataLoader(range(8), 4, collate_fn=lambda samples: {"x": rows(12, 2)}), "12 samples.*4.*: x is a"),
}


@pytest.mark.parametrize("name", UNSPLITTABLE)
def test_a_batch_that_cannot_be_split_is_named_with_the_way_out_before_anything_runs(name: str) -> None:
    batch, named = UNSPLITTABLE[name]
    module = Gets()
    with pytest.raises(UnsplittableBatchError, match=named) as raised:
        fit(module, as_it_is(batch), GradientAccumulation(micro_batch=2))
    assert "split=" in str(raised.value)
    assert not module.batches


def test_a_function_that_loses_rows_is_warned_of() -> None:
    def loses_the_last(batch: Tensor, size: int) -> list[Tensor]:
        return [batch[start : start + size] for start in range(0, len(batch) - size + 1, size)]

    with warned() as told:
        assert len(pieces(X, 3, split=loses_the_last)) == 2
    assert any("loses_the_last" in message and "6 samples" in message and "of 8" in message for message in told)


@pytest.mark.parametrize("as_dict", [False, True])
def test_lists_of_images_and_targets_are_split_exactly(as_dict: bool) -> None:
    def detected(net: nn.Module, batch: Any) -> Tensor:
        """The loss of a detector: a mean over the boxes of all images, whose sizes differ; an image may have none."""
        images, targets = (batch["images"], batch["targets"]) if isinstance(batch, dict) else batch
        found = [net(image.mean((1, 2))).expand(len(t["boxes"]), 4) for image, t in zip(images, targets, strict=True)]
        return F.smooth_l1_loss(torch.cat(found), torch.cat([t["boxes"] for t in targets]))

    def collate(boxes: list[int]) -> Any:
        images = [torch.arange(3.0 * 4 * (4 + n)).double().reshape(3, 4, 4 + n).sin() for n in boxes]
        targets = [{"boxes": torch.arange(4.0 * n).double().reshape(n, 4).cos(), "id": n} for n in boxes]
        more = {"ids": torch.arange(len(boxes)), "classes": ["cat", "dog"]}
        return {"images": images, "targets": targets, **more} if as_dict else (images, targets)

    batches = [[3, 0, 1, 5], [2, 4]]
    assert [len(part["ids"] if as_dict else part[1]) for part in split_lists(collate(batches[0]), 3)] == [3, 1]
    policy = GradientAccumulation(micro_batch=3, split=split_lists)
    assert_window_equals_batch(lambda: Toy(detected, net=lambda: nn.Linear(3, 4)), batches, policy, collate=collate)


def test_lists_are_split_of_samples_too_and_other_batches_are_refused() -> None:
    assert split_lists(samples := [{"x": n} for n in range(3)], 2) == [samples[:2], samples[2:]]
    for batch in ({"x": X}, zip("x", [X], strict=True)):  # which iterates over names and values, as a batch of graphs
        with pytest.raises(UnsplittableBatchError, match="split_lists"):
            split_lists(batch, 2)


@pytest.mark.parametrize("size", [2, Tokens(3), "auto"], ids=str)
def test_a_function_splits_what_shows_no_rows(size: Any) -> None:
    expected = {2: [[1, 2], [3, 4], [15]], Tokens(3): [[1, 2, 3], [4, 15]], "auto": [[1, 2, 3, 4, 15]]}[size]
    split = lambda batch, size: [Opaque(batch.value[i : i + size]) for i in range(0, len(batch.value), size)]  # noqa: E731
    assert [part.value for part in pieces(Opaque([1, 2, 3, 4, 15]), size, split=split)] == expected


@pytest.mark.parametrize("returned", [None, [], 3, iter([1])], ids=["nothing", "an empty list", "a number", "an iterator"])
def test_a_function_that_returns_no_list_is_named(returned: Any) -> None:
    def splits_badly(batch: Any, size: int) -> Any:
        return returned

    with pytest.raises(UnsplittableBatchError, match="splits_badly"):
        pieces(X, 2, split=splits_badly)


LENGTH, Spans = 9, Sequence[tuple[int, int]]


def lay_out(side: str, seed: int, count: int = 6, length: int = LENGTH) -> list[tuple[int, int]]:
    """Where the tokens of each row begin and stop, at random. The first row has no padding."""
    dice, found = random.Random(seed), [(0, length)]
    while len(found) < count:
        width = dice.randint(1, length - 2)
        start = {"left": length - width, "right": 0, "both": dice.randint(0, length - width)}[side]
        found.append((start, start + width))
    return found


def fill(spans: Spans, padding: int, length: int = LENGTH) -> Tensor:
    """Rows of numbers that all differ, counting down so that they are no positions."""
    tensor = torch.full((len(spans), length), padding)
    for row, (start, stop) in enumerate(spans):
        tensor[row, start:stop] = 1001 - row * length - torch.arange(start, stop)
    return tensor


def mask_of(spans: Spans, length: int = LENGTH) -> Tensor:
    return torch.tensor([[int(start <= column < stop) for column in range(length)] for start, stop in spans])


RIGHT, LEFT, BOTH = (lay_out(side, seed) for seed, side in enumerate(("right", "left", "both")))
OTHER = lay_out("right", 7)
ALL, BEHIND_BOTH = [(0, LENGTH)] * 6, [(0, stop) for _, stop in BOTH]
IN_PADDING: dict[str, Callable[[Tensor], Tensor]] = {
    "positions that go on": lambda mask: torch.arange(LENGTH).expand(mask.shape),
    "special tokens": lambda mask: 1 - mask,
    "boxes": lambda mask: torch.randint(1, 9, (*mask.shape, 4)) * mask[..., None],
    "a causal mask": lambda mask: torch.ones(LENGTH, LENGTH, dtype=torch.long).tril().expand(len(mask), LENGTH, LENGTH),
    "numbers of another width": lambda mask: torch.randint(0, 9, (len(mask), 4)),
}


def masked(spans: Spans, **more: Any) -> dict[str, Tensor]:
    return {"ids": fill(spans, 0), "attention_mask": mask_of(spans), **more}


MORE_LABELS = torch.randint(1, 9, (6, LENGTH)).cumsum(1)
# the batch, and the spans to which its rows are trimmed: what is behind the last token leaves, and nothing in front
TRIMMED: dict[str, tuple[dict[str, Tensor], Spans]] = {
    "right of a mask": (masked(RIGHT, labels=fill(RIGHT, -100)), RIGHT),
    "left of a mask": (masked(LEFT, labels=fill(LEFT, -100)), ALL),
    "both sides of a mask": (masked(BOTH, labels=fill(BOTH, -100)), BEHIND_BOTH),
    **{str(t): (masked(RIGHT) | {"attention_mask": mask_of(RIGHT).to(t)}, RIGHT) for t in (torch.bool, torch.float32, torch.uint8)},
    **{f"beside {name}": (masked(BOTH, more=make(mask_of(BOTH))), BEHIND_BOTH) for name, make in IN_PADDING.items()},
    "a key padding mask": ({"ids": fill(RIGHT, 0), "src_key_padding_mask": mask_of(RIGHT) == 0}, RIGHT),
    "an additive mask": (
        {"ids": fill(RIGHT, 0), "key_padding_mask": torch.zeros(6, LENGTH).masked_fill(mask_of(RIGHT) == 0, -torch.inf)}, RIGHT),
    "labels and constant padding": ({"ids": fill(RIGHT, 50256), "labels": fill(RIGHT, -100)}, RIGHT),
    "labels beside positions": (
        {"ids": fill(RIGHT, 0), "labels": fill(RIGHT, -100), "position_ids": torch.arange(LENGTH).repeat(6, 1)}, RIGHT),
    "prompts without labels": (
        {"ids": torch.tensor([[5, 6, 7, 8, 9, 4], [5, 6, 7, 0, 0, 0], [5, 0, 0, 0, 0, 0]]),
         "labels": torch.tensor([[-100, -100, 7, 8, 9, 4], [-100, 6, -100, -100, -100, -100], [-100] * 6])},
        [(0, 6), (0, 3), (0, 1)]),
    "an end that is the padding token": (
        {"ids": torch.tensor([[5, 6, 7, 8], [5, 2, 2, 2]]), "labels": torch.tensor([[5, 6, 7, 8], [5, 2, -100, -100]])},
        [(0, 4), (0, 2)]),
    "labels that go farther": (
        masked(RIGHT, labels=fill(OTHER, -100)), [(0, max(s[1] for s in both)) for both in zip(RIGHT, OTHER, strict=True)]),
    # not padding, or not safe to trim
    "nothing tells of padding": ({"ids": fill(RIGHT, 0), "x": torch.rand(6, LENGTH)}, ALL),
    "padding in front without a mask": ({"ids": fill(LEFT, 0), "labels": fill(LEFT, -100)}, ALL),
    "ignored labels of other inputs": ({"ids": fill(ALL, 0), "labels": fill(RIGHT, -100)}, ALL),
    "numbers that rise in leaps": (masked(RIGHT, labels=MORE_LABELS), ALL),
}  # fmt: skip


def assert_trimmed(found: Sequence[dict[str, Tensor]], batch: dict[str, Tensor], spans: Spans) -> None:
    """Micro-batches of one row each: longest first, and of each row what is in its span."""
    length, name = len(batch["ids"][0]), next(name for name in batch if batch[name].dim() == 2)
    assert [piece[name].shape[1] for piece in found] == sorted((stop - start for start, stop in spans), reverse=True)
    left = [batch["ids"][row, start:stop].tolist() for row, (start, stop) in enumerate(spans)]
    assert sorted(piece["ids"][0].tolist() for piece in found) == sorted(left)
    for piece in found:
        assert all(piece[name].shape[1] == piece["ids"].shape[1] for name in batch if batch[name].shape[1:] == (length,))


@pytest.mark.parametrize("name", TRIMMED)
def test_rows_are_trimmed_to_what_masks_and_labels_show_and_the_longest_come_first(name: str) -> None:
    batch, spans = TRIMMED[name]
    assert_trimmed(pieces(batch, 1, number=len(spans)), batch, spans)


@pytest.mark.parametrize(("key", "entry", "is_trimmed"), [
    ("valid", {"valid": mask_of(RIGHT)}, True), ("n", {"n": mask_of(RIGHT).sum(1)}, True),
    ("n", {"n": torch.full((6,), LENGTH)}, False), (False, {"attention_mask": mask_of(RIGHT)}, False),
])  # fmt: skip
def test_trim_padding_names_a_mask_or_lengths_or_leaves_padding(key: Any, entry: dict[str, Tensor], is_trimmed: bool) -> None:
    batch = {"ids": fill(RIGHT, 0), **entry}
    assert_trimmed(pieces(batch, 1, number=6, trim_padding=key), batch, RIGHT if is_trimmed else ALL)


@pytest.mark.parametrize("lengths", [{}, {"n": torch.rand(2)}, {"n": torch.tensor([2, 4])}], ids=str)
def test_a_key_that_tells_no_lengths_is_named(lengths: dict[str, Tensor]) -> None:
    with pytest.raises(AccumulationError, match="'n'"):
        pieces({"x": torch.rand(2, 3), **lengths}, 1, trim_padding="n")


@pytest.mark.parametrize(("key", "sides"), [("lengths", "encoder decoder"), ("decoder_lengths", "decoder")])
def test_lengths_trim_every_tensor_that_they_are_of(key: str, sides: str) -> None:
    """As those of a temporal fusion transformer, which takes the longest of its rows for the number of columns."""
    lengths = {"encoder": torch.tensor([9, 4, 7, 5, 9, 6]), "decoder": torch.tensor([3, 6, 1, 2, 6, 4])}
    known = {f"{side}_cont": torch.rand(6, int(own.max()), 2) for side, own in lengths.items()}
    batch = {**known, **{f"{side}_lengths": own for side, own in lengths.items()}}, (torch.rand(6, 6), None)
    for inputs, (target, nothing) in pieces(batch, 2, 3, trim_padding=key):
        longest = {side: int(inputs[f"{side}_lengths"].max()) if side in sides else int(lengths[side].max()) for side in lengths}
        assert {side: inputs[f"{side}_cont"].shape[1] for side in lengths} == longest
        assert (target.shape[1], nothing) == (longest["decoder"], None)


def test_classes_that_are_as_many_as_columns_by_chance_are_not_trimmed() -> None:
    batches, module = [], Gets()
    module.training_step = lambda batch, batch_idx: Gets.training_step(module, batch, batch_idx) * batch["classes"].mean()
    for length in (8, LENGTH, 10):
        spans = [(0, length), (0, 4), (0, 2)]
        ids, mask = fill(spans, 0, length), mask_of(spans, length)
        batches.append({"ids": ids, "attention_mask": mask, "classes": torch.rand(3, LENGTH)})
    with warned():
        fit(module, batches, GradientAccumulation(micro_batch=1, weight="equal", check=False))
    assert {piece["classes"].shape[1] for piece in module.batches} == {LENGTH}
    assert [piece["ids"].shape[1] for piece in module.batches[-6:]] == [LENGTH] * 3 + [10, 4, 2]


@pytest.mark.parametrize("trim", [True, False, "attention_mask"])
@pytest.mark.parametrize("size", [1, 3, 5, Tokens(9), Tokens(20), Tokens(37), "auto"], ids=str)
@pytest.mark.parametrize("side", ["right", "both"])
@pytest.mark.some_cases(14)
def test_every_row_is_in_one_micro_batch_and_nothing_but_padding_is_missing(side: str, size: Any, trim: Any) -> None:
    spans = lay_out(side, 5, count=11)
    batch = {**masked(spans, hot=fill(spans, 0)[..., None] * torch.tensor([1, 2])), "target": torch.arange(11)}
    found, seen = [], set()
    for piece in reversed(pieces(batch, size, trim_padding=trim)):  # what was tried first comes again
        if seen.isdisjoint(piece["target"].tolist()):
            found.append(piece)
            seen.update(piece["target"].tolist())
    assert seen == set(range(11))
    for piece in found:
        own = piece["target"].tolist()
        stop = max(spans[row][1] for row in own) if trim else LENGTH
        for name in ("ids", "attention_mask", "hot"):
            assert torch.equal(piece[name], batch[name][own, :stop]), name
        assert not isinstance(size, Tokens) or len(own) * stop <= size.count
        assert not isinstance(size, int) or len(own) <= size
    lengths = [spans[row][1] for piece in reversed(found) for row in piece["target"].tolist()]
    assert not trim or size == "auto" or lengths == sorted(lengths, reverse=True)


def test_a_row_longer_than_allowed_is_a_micro_batch_of_its_own_and_is_warned_of_once() -> None:
    batch = {"ids": fill(ALL, 0), "target": torch.arange(6)}
    with warned() as told:
        found = pieces(loader([batch] * 2), Tokens(5))
    assert [len(piece["ids"]) for piece in found] == [1] * 12
    assert [message for message in told if "5" in message] == told != []
    assert len(told) == 1


@pytest.mark.parametrize("batch", [(torch.rand(4), torch.rand(4)), {"pixels": torch.rand(8, 3, 32, 32), "y": torch.arange(8)}])
def test_micro_batches_in_tokens_need_tokens(batch: Any) -> None:
    with pytest.raises(UnsplittableBatchError, match="micro_batch="):
        pieces(batch, Tokens(8))


@pytest.mark.parametrize("size", [6, 1000, Tokens(6 * LENGTH), "auto"], ids=str)
def test_a_batch_that_fits_is_not_cut_or_sorted(size: Any) -> None:
    batch = masked(BOTH)
    (piece,) = pieces(batch, size)
    assert same(piece, batch)


@pytest.mark.filterwarnings("ignore")
def test_an_attempt_that_ran_out_of_memory_leaves_the_module_as_if_the_size_had_been_known() -> None:
    found = []
    for room, size in ((4, "auto"), (8, 4)):
        module = Changes(room)
        held = [module.a_dict, module.nested, module.tensor, module.of_users]
        torch.manual_seed(0)
        random.seed(0)
        np.random.seed(0)
        fit(module, labelled(8, 8), GradientAccumulation(micro_batch=size, check=False))
        assert all(map(operator.is_, held, [module.a_dict, module.nested, module.tensor, module.of_users]))
        found.append(module)
    assert found[0].state() == found[1].state()
    assert [rows for rows, *_ in found[0].seen] == [4] * 4
    assert relative_error(found[0].net.parameters(), found[1].net.parameters()) == 0


Row = dict[str, Tensor]
LENGTHS = [8, 3, 5, 1, 2, 4]


def padded(lengths: list[int], width: int = 8, seed: int = 0, prefix: str = "") -> list[Row]:
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(width) < torch.tensor(lengths)[:, None]).long()
    ids, y = torch.randint(1, 9, mask.shape, generator=generator) * mask, torch.randint(0, 3, (len(lengths),), generator=generator)
    return [{f"{prefix}input_ids": i, f"{prefix}attention_mask": m, f"{prefix}y": t} for i, m, t in zip(ids, mask, y, strict=True)]


def with_targets(target: list[int]) -> list[Row]:
    return [{**row, **other} for row, other in zip(padded(LENGTHS), padded(target, 6, 1, "decoder_"), strict=True)]


UNLABELLED = padded(LENGTHS)  # the shortest rows have no label, and so no loss with or without padding
for place in (3, 4):
    UNLABELLED[place]["y"] = torch.tensor(-100)


class Reader(pl.LightningModule):  # embeds tokens; the loss is told from outside
    widths: list[int]

    def __init__(self, loss: Callable[[Any, Any], Tensor]) -> None:
        super().__init__()
        torch.manual_seed(2)
        self.token, self.target, self.head = nn.Embedding(9, 4), nn.Embedding(9, 4), nn.Linear(4, 3)
        self.double()
        self.loss = loss
        type(self).widths = []  # of the class: what a trial does to attributes of the module is taken back

    def training_step(self, batch: Row, batch_idx: int) -> Tensor:
        self.widths.append(batch["input_ids"].shape[1])
        return self.loss(self, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


# fmt: off
def of_tokens(module: Reader, batch: Row) -> Tensor:  # the loss of each token, none of padding
    logits = module.head(module.token(batch["input_ids"]))
    losses = F.cross_entropy(logits.flatten(0, 1), (batch["input_ids"] % 3).flatten(), reduction="none").reshape(logits.shape[:2])
    return losses * batch["attention_mask"]

def mean_of_tokens(module: Reader, batch: Row) -> Tensor:
    return of_tokens(module, batch).sum() / batch["attention_mask"].sum()

def error_over_padding(module: Reader, batch: Row) -> Tensor:
    mask = batch["attention_mask"][..., None]
    return F.mse_loss(module.head(module.token(batch["input_ids"])) * mask, mask.expand(-1, -1, 3).to(module.head.weight))

def pooled_over_padding(module: Reader, batch: Row) -> Tensor:
    return F.cross_entropy(module.head(module.token(batch["input_ids"]).mean(1)), batch["y"])

def pooled_over_labelled(module: Reader, batch: Row) -> Tensor:
    logits = module.head(module.token(batch["input_ids"]).mean(1))
    return F.cross_entropy(logits, batch["y"], reduction="sum") / (batch["y"] >= 0).sum().clamp(min=1)

def untrained_head(module: Reader, batch: Row) -> Tensor:
    if not module.trainer.global_step:
        module.head.weight.data.zero_()  # the loss does not depend on anything yet, its gradient does
        module.head.bias.data.zero_()
    return pooled_over_padding(module, batch)

def source_of(module: Reader, batch: Row) -> Tensor:
    mask = batch["attention_mask"][..., None]
    return (module.token(batch["input_ids"]) * mask).sum(1) / mask.sum(1)

def in_training_only(module: Reader, batch: Row) -> Tensor:
    loss = F.cross_entropy(module.head(source_of(module, batch)), batch["y"])
    return loss + module.token(batch["input_ids"]).mean(1).square().mean() if module.training else loss


def of_targets_over_padding(module: Reader, batch: Row) -> Tensor:
    pooled = module.target(batch["decoder_input_ids"]).mean(1)
    return F.cross_entropy(module.head(source_of(module, batch) + pooled), batch["y"])
# fmt: on


@pytest.mark.some_cases(5)
@pytest.mark.parametrize(
    ("loss", "batches"),
    [
        (lambda module, batch: of_tokens(module, batch).mean(), [padded(LENGTHS)] * 2),
        (error_over_padding, [padded(LENGTHS)] * 2),
        (pooled_over_labelled, [UNLABELLED] * 2),
        (lambda module, batch: None if (batch["y"] < 0).all() else pooled_over_labelled(module, batch), [UNLABELLED] * 2),
        (untrained_head, [padded(LENGTHS)] * 2),
        (in_training_only, [padded(LENGTHS)] * 2),
        (lambda module, batch: [mean_of_tokens, pooled_over_padding][module.current_epoch](module, batch), [padded(LENGTHS)] * 2),
        (of_targets_over_padding, [with_targets([6] * 6), with_targets([1, 2, 3, 4, 5, 6])]),
        (of_targets_over_padding, [with_targets([1, 2, 1, 6, 5, 2])]),
    ],
)
def test_a_module_that_depends_on_padding_is_not_trimmed_and_a_warning_says_why(loss: Any, batches: list[list[Row]]) -> None:
    whole, split, data = Reader(loss), Reader(loss), [default_collate(rows) for rows in batches]
    fit(whole, data, strategy="auto", max_epochs=2)
    with warned() as messages:
        fit(split, data, GradientAccumulation(micro_batch=2), max_epochs=2)
    assert error_of_updates(split, whole, Reader(loss)) < 1e-12
    assert any("trim" in message for message in messages)
    with warned() as messages:
        fit(Reader(loss), data, GradientAccumulation(micro_batch=2), max_epochs=2, precision="bf16-true")
    assert any("trim" in message for message in messages)


def test_a_resumed_training_trims_only_what_its_own_module_shows_to_be_harmless() -> None:  # 0.5 before
    batches, saves = [default_collate(padded(LENGTHS, seed=seed)) for seed in range(4)], SaveAfter(2)
    fit(Reader(mean_of_tokens), batches, GradientAccumulation(micro_batch=2), saves)
    found, expected, start = (Reader(pooled_over_padding) for _ in range(3))
    fit(found, batches, GradientAccumulation(micro_batch=2), ckpt_path="inside.ckpt")
    fit(expected, batches, GradientAccumulation(micro_batch=2, trim_padding=False), ckpt_path="inside.ckpt")
    start.load_state_dict(torch.load("inside.ckpt", weights_only=False)["state_dict"])
    assert error_of_updates(found, expected, start) < 1e-12


def test_what_cannot_be_found_out_in_one_batch_is_tried_again() -> None:
    batches = [default_collate([{**row, "scale": torch.ones(()).double()} for row in padded(LENGTHS, 8, s)]) for s in range(3)]
    batches[0]["scale"][3] = torch.nan  # the shortest row
    module = Reader(lambda module, batch: mean_of_tokens(module, batch) * batch["scale"].mean())
    with warned():
        fit(module, batches, GradientAccumulation(micro_batch=2, check=False, on_nonfinite="skip"))
    assert module.widths[-3:] == [8, 4, 2]


@pytest.mark.parametrize("size", [2, "auto"])
def test_containers_that_a_micro_batch_takes_apart_are_its_own_and_any_name_is_one(size: Any) -> None:
    class Pops(Scalar):
        def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
            values = batch.pop("my-x")
            batch["meta"].pop("name")
            if len(values) > 3:
                raise torch.OutOfMemoryError("CUDA out of memory")
            return (self.w * values).mean()

    batches = [{"my-x": x(1, 2, 3, 4, 5), "class 1": torch.zeros(5), "meta": {"name": "a"}} for _ in range(3)]
    fit(module := Pops(batches), None, GradientAccumulation(micro_batch=size))
    assert module.total == pytest.approx(9.0, rel=1e-12)
    assert [set(batch) for batch in batches] == [{"my-x", "class 1", "meta"}] * 3
