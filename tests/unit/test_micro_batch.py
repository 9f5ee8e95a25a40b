"""How a batch is read as rows, and what is taken of it."""

from __future__ import annotations

import collections
import copy
import enum
import types
from collections import OrderedDict, UserDict, UserList, defaultdict, namedtuple
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence

from lightning_accum import UnsplittableBatchError
from lightning_accum.splitting.micro_batch import Layout, Tokens

BatchEncoding = pytest.importorskip("transformers").BatchEncoding
SLICES = [slice(0, 3), slice(3, 4), slice(4, 8)]


def rows(*shape: int, start: int = 0) -> Tensor:
    """A tensor whose entries all differ."""
    count = int(torch.tensor(shape).prod())
    return torch.arange(start, start + count).reshape(shape)


def images(sizes: list[int], channels: int = 3) -> list[Tensor]:
    return [torch.rand(channels, 4, size) for size in sizes]


def same(left: Any, right: Any) -> bool:
    """Equal in types and values, looked at from outside."""
    if type(left) is not type(right):
        return False
    if isinstance(left, Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return bool(np.array_equal(left, right))
    if isinstance(left, collections.abc.Mapping):
        return list(left) == list(right) and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple, UserList)):
        return len(left) == len(right) and all(map(same, left, right))
    if hasattr(left, "__dataclass_fields__"):
        return all(same(getattr(left, f.name), getattr(right, f.name)) for f in fields(left))
    return bool(left == right)


class Pair(NamedTuple):
    x: Any
    y: Any


Triple = namedtuple("Triple", "x y name")


@dataclass
class Record:
    x: Any
    name: Any = None
    length: int = field(init=False, default=7)


@dataclass(frozen=True)
class Frozen:
    x: Any
    name: Any = None


@dataclass(frozen=True, slots=True)
class Slotted:
    x: Any
    name: Any = None


class Named(dict):
    """A mapping whose entries are attributes too."""

    def __init__(self, **entries: Any) -> None:
        super().__init__(**entries)
        self.__dict__ = self


class Listed(list):
    note = "kept"


class ReadOnly(collections.abc.Mapping):
    def __init__(self, entries: dict) -> None:
        self._entries = entries

    def __getitem__(self, key):
        return self._entries[key]

    def __iter__(self):
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


class Color(enum.Enum):
    RED = 1


SMALL = (1, "8", None, True, Color.RED, torch.half, torch.device("cpu"), torch.Size([8]), torch.tensor(3.0), b"8", {"n": 8}, 1j)
X, Y, NAMES = rows(8, 3), rows(8, start=100), list("abcdefgh")


# --- what is taken ----------------------------------------------------------------------------------------------------


BATCHES = {
    "a tensor": (X, lambda s: X[s]),
    "a tuple": ((X, Y), lambda s: (X[s], Y[s])),
    "a list": ([X, Y], lambda s: [X[s], Y[s]]),
    "a list of one": ([X], lambda s: [X[s]]),
    "a subclass of list": (Listed([X, Y]), lambda s: Listed([X[s], Y[s]])),
    "a dict": ({"x": X, 3: Y}, lambda s: {"x": X[s], 3: Y[s]}),
    "an OrderedDict": (OrderedDict(y=Y, x=X), lambda s: OrderedDict(y=Y[s], x=X[s])),
    "a defaultdict": (defaultdict(list, x=X), lambda s: defaultdict(list, x=X[s])),
    "a UserDict": (UserDict(x=X), lambda s: UserDict(x=X[s])),
    "a read-only mapping": (ReadOnly({"x": X, "n": 1}), lambda s: ReadOnly({"x": X[s], "n": 1})),
    "a mapping proxy": (types.MappingProxyType({"x": X}), lambda s: types.MappingProxyType({"x": X[s]})),
    "a BatchEncoding": (BatchEncoding({"input_ids": X}), lambda s: BatchEncoding({"input_ids": X[s]})),
    "a named tuple": (Pair(X, (Y, NAMES)), lambda s: Pair(X[s], (Y[s], NAMES[s]))),
    "a collections.namedtuple": (Triple(X, Y, NAMES), lambda s: Triple(X[s], Y[s], NAMES[s])),
    "one of torch's named tuples": (torch.max(X, 1), lambda s: torch.return_types.max(t[s] for t in torch.max(X, 1))),
    "a dataclass": (Record(X, NAMES), lambda s: Record(X[s], NAMES[s])),
    "a frozen dataclass": (Frozen(X, NAMES), lambda s: Frozen(X[s], NAMES[s])),
    "a dataclass with slots": (Slotted(X, NAMES), lambda s: Slotted(X[s], NAMES[s])),
    "NumPy arrays": ({"x": X, "a": np.arange(16).reshape(8, 2)}, lambda s: {"x": X[s], "a": np.arange(16).reshape(8, 2)[s]}),
    "texts": ({"x": X, "t": NAMES, "u": tuple(NAMES)}, lambda s: {"x": X[s], "t": NAMES[s], "u": tuple(NAMES)[s]}),
    "rows of lists": ((X, [[1] * n for n in range(8)]), lambda s: (X[s], [[1] * n for n in range(8)][s])),
    "rows with gaps": ((X, [None, {"a": 1}] * 4), lambda s: (X[s], ([None, {"a": 1}] * 4)[s])),
    "a sequence of a class of its own": ((X, UserList(NAMES)), lambda s: (X[s], UserList(NAMES[s]))),
    "nested": ({"in": {"x": [X, (Y,)]}, "y": Y}, lambda s: {"in": {"x": [X[s], (Y[s],)]}, "y": Y[s]}),
    "small things": ((X, *SMALL), lambda s: (X[s], *SMALL)),
    "shared tensors": ({"x": X, "y": Y, "table": rows(5, 2)}, lambda s: {"x": X[s], "y": Y[s], "table": rows(5, 2)}),
    "shared texts": ({"x": X, "classes": ["cat", "dog"]}, lambda s: {"x": X[s], "classes": ["cat", "dog"]}),
}


@pytest.mark.parametrize("name", BATCHES)
def test_a_slice_takes_the_same_rows_of_every_part_and_keeps_all_types(name: str) -> None:
    batch, by_hand = BATCHES[name]
    layout = Layout.read(batch)
    assert layout.size == 8
    for part in SLICES:
        assert same(layout.take(part), by_hand(part)), (layout.take(part), by_hand(part))


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("as_rows", [list, tuple, torch.tensor])
def test_row_numbers_take_those_rows_in_that_order(name: str, as_rows) -> None:
    batch, by_hand = BATCHES[name]
    taken = Layout.read(batch).take(as_rows([5, 0, 7]))
    of_one = [by_hand(slice(row, row + 1)) for row in (5, 0, 7)]
    assert same(taken, joined(of_one, by_hand(slice(0, 0)))), taken


@pytest.mark.parametrize("name", BATCHES)
def test_the_pieces_put_together_are_the_batch_again(name: str) -> None:
    batch, _ = BATCHES[name]
    layout = Layout.read(batch)
    assert same(joined([layout.take(part) for part in SLICES], layout.take(slice(0, 0))), batch)


@pytest.mark.parametrize("name", BATCHES)
def test_the_batch_that_was_read_stays_as_it_is(name: str) -> None:
    batch, _ = BATCHES[name]
    kept = copy.deepcopy(batch) if name != "a mapping proxy" else types.MappingProxyType({"x": X.clone()})
    Layout.read(batch).take([1, 2], {3: slice(0, 1)})
    assert same(batch, kept)


def joined(pieces: list[Any], empty: Any) -> Any:
    """Puts pieces together again; what is in the empty piece too is shared."""
    first = pieces[0]
    if isinstance(first, Tensor):
        return torch.cat(pieces) if first.dim() and not len(empty) else first
    if isinstance(first, np.ndarray):
        return np.concatenate(pieces)
    if isinstance(first, collections.abc.Mapping):
        entries = {key: joined([piece[key] for piece in pieces], empty[key]) for key in first}
        if isinstance(first, defaultdict):
            return defaultdict(first.default_factory, entries)
        return type(first)(entries)
    if isinstance(first, (list, tuple)) and not isinstance(first, torch.Size):
        if len(empty):
            entries = [joined([piece[i] for piece in pieces], empty[i]) for i in range(len(first))]
            return type(first)._make(entries) if hasattr(first, "_make") else type(first)(entries)
        return type(first)(entry for piece in pieces for entry in piece)
    if isinstance(first, UserList):
        return UserList(entry for piece in pieces for entry in piece)
    if hasattr(first, "__dataclass_fields__"):
        names = [f.name for f in fields(first) if f.init]
        return type(first)(**{n: joined([getattr(p, n) for p in pieces], getattr(empty, n)) for n in names})
    return first


def test_slices_are_views_and_row_numbers_are_copies() -> None:
    layout = Layout.read((X, Y))
    assert layout.take(slice(2, 4))[0].data_ptr() == X[2].data_ptr()
    assert layout.take([2, 3])[0].data_ptr() != X[2].data_ptr()


def test_row_numbers_are_brought_to_the_device_of_every_tensor() -> None:
    there = torch.empty(8, 3, device="meta")
    for numbers in ([1, 2], torch.tensor([1, 2])):
        taken = Layout.read((there, Y)).take(numbers)
        assert taken[0].device == there.device
        assert taken[0].shape == (2, 3)
        assert torch.equal(taken[1], Y[1:3])


def test_gradients_flow_back_to_the_tensor_that_was_split() -> None:
    x = torch.rand(4, 2, requires_grad=True)
    Layout.read({"x": x}).take([3, 1])["x"].sum().backward()
    assert torch.equal(x.grad, torch.tensor([[0.0, 0.0], [1.0, 1.0]] * 2))


def test_fields_that_no_constructor_takes_are_kept() -> None:
    record = Record(X)
    record.length = 9
    record.extra = Y
    taken = Layout.read(record).take(slice(0, 2))
    assert taken.length == 9
    assert torch.equal(taken.extra, Y[:2])


def test_a_default_factory_and_the_class_of_a_list_are_kept() -> None:
    taken = Layout.read((defaultdict(list, x=X), Listed([X]))).take(slice(0, 2))
    assert taken[0]["new"] == []
    assert taken[1].note == "kept"


def test_entries_that_are_attributes_too_are_split_under_both_names() -> None:
    taken = Layout.read(Named(x=X, rate=0.5)).take(slice(0, 2))
    assert torch.equal(taken.x, X[:2])
    assert torch.equal(taken["x"], X[:2])
    assert taken.rate == 0.5


def test_a_model_output_is_split_in_its_entries_and_attributes() -> None:
    output = pytest.importorskip("transformers.modeling_outputs").BaseModelOutput
    taken = Layout.read(output(last_hidden_state=X, hidden_states=(X, Y))).take(slice(2, 5))
    assert type(taken) is output
    assert list(taken) == ["last_hidden_state", "hidden_states"]
    assert torch.equal(taken.last_hidden_state, X[2:5])
    assert torch.equal(taken["hidden_states"][1], Y[2:5])
    assert taken.attentions is None


def test_the_encodings_of_a_batch_encoding_go_with_their_rows() -> None:
    encodings = [object() for _ in range(8)]
    batch = BatchEncoding({"input_ids": X}, n_sequences=1)
    batch._encodings = encodings
    taken = Layout.read(batch).take([6, 2])
    assert type(taken) is BatchEncoding
    assert torch.equal(taken.input_ids, X[[6, 2]])
    assert taken.encodings == [encodings[6], encodings[2]]
    assert taken.n_sequences == 1
    assert batch.encodings is encodings


def test_a_tokenizers_batch_says_the_tokens_of_the_rows_that_were_taken() -> None:
    tokenizers = pytest.importorskip("tokenizers")
    model = tokenizers.models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "c": 3}, unk_token="[UNK]")
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    encodings = tokenizer.encode_batch(["a b", "b c", "c a"])
    batch = BatchEncoding({"input_ids": torch.tensor([e.ids for e in encodings])}, encoding=encodings)
    assert Layout.read(batch).take(slice(1, 3)).tokens(1) == ["c", "a"]


# --- what has rows ----------------------------------------------------------------------------------------------------


def test_paths_are_what_a_user_would_write() -> None:
    batch = {"inputs": {"mask": X}, "pair": [X, {"labels": Y}], "record": Record(X), 3: Y, "a b": Y, "table": rows(5)}
    layout = Layout.read(batch)
    assert list(layout.tensors) == ["inputs.mask", "pair[0]", "pair[1].labels", "record.x", "[3]", "['a b']"]
    assert list(layout.shared_tensors) == ["table"]
    assert layout.tensors["pair[0]"] is X
    assert list(Layout.read(X).tensors) == ["batch"]
    assert list(Layout.read((X, [Y])).tensors) == ["[0]", "[1][0]"]


def test_an_entry_called_batch_is_no_other_than_the_rest() -> None:
    assert same(Layout.read({"batch": X, "y": Y}).take(slice(0, 2)), {"batch": X[:2], "y": Y[:2]})


def test_what_a_detection_collate_makes_has_one_entry_a_sample() -> None:
    targets = tuple({"boxes": torch.rand(n, 4), "labels": rows(n), "image_id": n} for n in (1, 0, 3, 8, 2, 3, 3, 5))
    for pictures in (images([5] * 8), images([5, 6, 7, 8] * 2), images([5] * 8, channels=8)):
        layout = Layout.read((tuple(pictures), targets))
        assert layout.size == 8
        assert same(layout.take(slice(2, 5)), (tuple(pictures[2:5]), targets[2:5]))
        assert same(layout.take([7, 1]), ((pictures[7], pictures[1]), (targets[7], targets[1])))


@pytest.mark.parametrize("pictures", [images([5, 6]), images([5, 5]), images([5, 5], channels=2)])
def test_two_images_and_their_targets_are_two_samples(pictures) -> None:
    targets = ({"boxes": torch.rand(2, 4), "labels": rows(2)}, {"boxes": torch.rand(5, 4), "labels": rows(5)})
    layout = Layout.read((tuple(pictures), targets))
    assert layout.size == 2
    assert same(layout.take(slice(1, 2)), ((pictures[1],), (targets[1],)))


def test_one_image_and_its_target_are_one_sample() -> None:
    batch = ([images([5])[0]], [{"boxes": torch.rand(4, 4), "labels": rows(4)}])
    layout = Layout.read(batch)
    assert layout.size == 1
    assert same(layout.take(slice(0, 1)), batch)


@pytest.mark.parametrize("make", [lambda image, label: {"image": image, "label": label}, Record, Frozen])
def test_a_list_of_records_with_a_number_each_is_one_a_sample(make) -> None:
    batch = [make(image, label) for label, image in enumerate(images([5] * 8))]
    layout = Layout.read(batch)
    assert layout.size == 8
    assert same(layout.take(slice(6, 8)), batch[6:8])


@pytest.mark.parametrize("count", [1, 2, 3, 8])
@pytest.mark.parametrize("make", [int, float, torch.tensor])
@pytest.mark.parametrize("kind", [tuple, list])
def test_samples_that_were_not_collated_are_one_each(count: int, make, kind) -> None:
    for pictures in (images([5] * count), [rows(3)] * count, images(list(range(4, 4 + count)))):
        batch = [kind((picture, make(label))) for label, picture in enumerate(pictures)]
        layout = Layout.read(batch)
        assert layout.size == count
        assert same(layout.take(slice(count - 1, count)), batch[count - 1 :])
        last = Layout.read(batch[:1], layout.kinds)
        assert last.size == 1
        assert same(last.take([0]), batch[:1])


def test_pictures_with_masks_and_labels_that_were_not_collated_are_one_each() -> None:
    batch = [(picture, rows(5, 5), 1) for picture in images([5] * 4)]
    assert same(Layout.read(batch).take([2, 0]), [batch[2], batch[0]])


def test_tuples_with_a_number_beside_tensors_that_agree_are_ambiguous() -> None:
    with pytest.raises(UnsplittableBatchError, match="batch is a list of 2 entries with a number each, .* all have 8 rows"):
        Layout.read([(X, Y, 0.5), (X, Y, 0.5)])


@pytest.mark.parametrize(
    "batch", [[X, Y], (X, list(range(8))), ((X, Y), 0, 1), [(X, Y), (X, Y)], [(X, 0.5), (X, None)], ((X, Y), [X, Y])]
)
def test_pairs_that_hold_a_batch_each_are_no_samples(batch) -> None:
    assert Layout.read(batch).size == 8


def test_a_list_of_records_without_tensors_is_one_a_sample() -> None:
    batch = [{"text": name} for name in NAMES]
    assert Layout.read(batch).take([1, 0]) == [{"text": "b"}, {"text": "a"}]


def test_images_of_different_shapes_have_as_many_rows_as_there_are_labels() -> None:
    pictures = images([4, 5, 6, 7] * 2)
    layout = Layout.read({"pictures": pictures, "labels": Y})
    assert layout.size == 8
    assert layout.kinds["pictures"] == "rows"
    assert same(layout.take(slice(0, 2)), {"pictures": pictures[:2], "labels": Y[:2]})
    assert Layout.read({"pictures": images([4, 5], channels=1), "labels": rows(2)}).size == 2


def test_sequences_are_rows_even_where_one_is_as_long_as_there_are_rows() -> None:
    sequences = [rows(n) for n in (3, 8, 5, 9, 2, 7, 4, 6)]
    tokens = [list(range(n)) for n in (3, 8, 5, 9, 2, 7, 4, 6)]
    layout = Layout.read({"sequences": sequences, "tokens": tokens, "labels": Y})
    taken = layout.take(slice(1, 3))
    assert same(taken, {"sequences": sequences[1:3], "tokens": tokens[1:3], "labels": Y[1:3]})


@pytest.mark.parametrize("size", [1, 2, 3])
def test_a_list_of_as_many_tensors_as_rows_is_a_container(size: int) -> None:
    batch = {"pair": [rows(size, 4) for _ in range(size)], "labels": rows(size)}
    for known in (None, Layout.read({"pair": [X] * size, "labels": Y}).kinds):
        layout = Layout.read(batch, known)
        assert layout.size == size
        assert list(layout.tensors) == [*(f"pair[{i}]" for i in range(size)), "labels"]
    assert list(Layout.read([rows(2, 4), rows(2)]).tensors) == ["[0]", "[1]"]
    assert list(Layout.read((rows(2, 4), rows(2), rows(2))).tensors) == ["[0]", "[1]", "[2]"]


def test_inputs_and_targets_in_a_dict_each_are_no_two_samples() -> None:
    batch = ({"ids": rows(2, 5), "mask": rows(2, 5)}, {"labels": rows(2)})
    assert list(Layout.read(batch).tensors) == ["[0].ids", "[0].mask", "[1].labels"]
    assert Layout.read(({"ids": X}, {"labels": Y})).size == 8


def test_two_texts_encoded_for_each_label_are_no_two_samples() -> None:
    sides = [{"ids": rows(8, 5), "mask": rows(8, 5)}, {"ids": rows(8, 9), "mask": rows(8, 9)}]
    layout = Layout.read((sides, Y))
    assert layout.size == 8
    assert same(layout.take(slice(0, 3))[0][1], {"ids": rows(8, 9)[:3], "mask": rows(8, 9)[:3]})


def test_texts_that_a_collate_transposed_are_split_in_each_field() -> None:
    batch = [X[:2], [("a", "b"), ("c", "d")]]
    assert same(Layout.read(batch).take(slice(0, 1)), [X[:1], [("a",), ("c",)]])


def test_a_list_next_to_a_tensor_is_no_second_row_of_the_tuple_around() -> None:
    assert same(Layout.read((X, ["weak", "strong"])).take(slice(0, 2)), (X[:2], ["weak", "strong"]))


def test_the_size_that_most_tensors_have_wins() -> None:
    assert Layout.read((rows(8), rows(8, 2), rows(7))).size == 8
    assert Layout.read({"x": rows(8), "y": rows(8), "a": rows(5), "b": rows(4), "empty": rows(0, 4)}).size == 8


def test_a_list_of_many_tensors_is_no_list_of_samples_where_the_loader_says_that_their_rows_are() -> None:
    tensors = [rows(8, 2) for _ in range(5)]
    layout = Layout.read(tensors, samples=(8,))
    assert layout.size == 8
    assert same(layout.take(slice(0, 3)), [tensor[:3] for tensor in tensors])
    with pytest.raises(UnsplittableBatchError, match="either could be the samples"):
        Layout.read(tensors)


def test_an_empty_tensor_beside_rows_is_no_second_size() -> None:
    x, empty = rows(8, 2), rows(0, 4)
    layout = Layout.read({"x": x, "boxes": empty})
    assert layout.size == 8
    assert same(layout.take(slice(0, 3)), {"x": x[:3], "boxes": empty})


def test_the_fields_of_a_tuple_of_torch_are_no_rows_of_a_batch_of_two() -> None:
    largest = torch.max(rows(5), 0)
    layout = Layout.read({"x": rows(2, 3), "y": rows(2), "largest": largest})
    assert layout.size == 2
    assert same(tuple(layout.take([1])["largest"]), tuple(largest))


def test_a_batch_without_rows_has_size_zero() -> None:
    assert Layout.read({"x": rows(0, 4), "y": rows(0)}).size == 0


def test_strings_are_no_tensors_but_objects_without_tensors_are_shared() -> None:
    class Note:
        text = "hello"

    note = Note()
    assert Layout.read((X, note, {1, 2})).take(slice(0, 1))[1:] == (note, {1, 2})


def test_a_list_of_as_many_images_as_the_loader_puts_samples_into_a_batch_has_one_a_sample() -> None:
    for pictures in (images([5] * 8), images([5, 6, 7, 8] * 2)):
        for batch in (pictures, tuple(pictures), {"image": pictures}, {"image": pictures, "name": NAMES}):
            layout = Layout.read(batch, samples={8})
            assert layout.size == 8
            taken = layout.take(slice(6, 8))
            assert same(taken["image"] if isinstance(taken, dict) else list(taken), pictures[6:8])
            assert Layout.read(layout.take([0]), layout.kinds, samples={8}).size == 1
    pairs = [(picture, picture[:3]) for picture in images([5] * 8)]
    assert same(Layout.read(pairs, samples={8}).take([3, 1]), [pairs[3], pairs[1]])
    assert Layout.read((X, X), samples={8}).size == 8
    assert Layout.read([rows(2, 3)] * 2, samples={2}).size == 2


@pytest.mark.parametrize("samples", [(), (3,)])
@pytest.mark.parametrize(
    "batch", [images([5] * 3), images([5, 6, 7]), {"image": images([5] * 3)}, (images([5] * 3), rows(3)), [rows(9)] * 8]
)
def test_a_list_of_tensors_that_may_be_samples_is_ambiguous_where_the_loader_cannot_say(batch: Any, samples: Any) -> None:
    with pytest.raises(UnsplittableBatchError, match=r"is a list of \d tensors, and their dimension 0 is .: either could be"):
        Layout.read(batch, samples=samples)


def test_two_tensors_that_look_like_images_are_an_input_and_its_target_where_the_loader_does_not_say_otherwise() -> None:
    batch = [rows(3, 5, 6), rows(3, 2, 6)]
    assert Layout.read(batch).size == Layout.read(batch, samples={3}).size == 3
    assert Layout.read(batch, samples={2}).size == 2


# --- what earlier batches showed --------------------------------------------------------------------------------------


def test_three_images_stay_rows_where_the_channels_are_three_too() -> None:
    known = Layout.read((images([4] * 8), Y)).kinds
    pictures = images([4] * 3)
    layout = Layout.read((pictures, Y[:3]), known)
    assert layout.size == 3
    assert same(layout.take(slice(1, 3)), (pictures[1:3], Y[1:3]))


def test_a_shared_table_stays_shared_where_there_are_as_many_rows() -> None:
    known = Layout.read({"x": X, "y": Y, "table": rows(5, 2), "classes": ["cat", "dog"]}).kinds
    last = Layout.read({"x": X[:5], "y": Y[:5], "table": rows(5, 2), "classes": ["cat", "dog"]}, known)
    assert list(last.shared_tensors) == ["table"]
    of_two = Layout.read({"x": X[:2], "y": Y[:2], "table": rows(5, 2), "classes": ["cat", "dog"]}, last.kinds)
    assert of_two.take(slice(0, 1))["classes"] == ["cat", "dog"]


def test_a_tie_is_decided_by_what_was_shared_before() -> None:
    known = Layout.read({"x": rows(5), "y": rows(5), "table": rows(5)[:3]}).kinds
    assert Layout.read({"x": rows(4), "table": rows(3)}, known).size == 4


def test_two_samples_of_two_boxes_each_are_told_from_a_pair_by_earlier_batches() -> None:
    def collate(*counts: int) -> Any:
        return images([4] * len(counts)), [{"boxes": torch.rand(n, 4)} for n in counts]

    def encode(size: int) -> Any:
        return [{"ids": rows(size, 5)}, {"ids": rows(size, 6)}], rows(size)

    detection = Layout.read(collate(2, 2), Layout.read(collate(1, 4, 2)).kinds)
    assert [len(part) for part in detection.take(slice(0, 1))] == [1, 1]
    pair = Layout.read(encode(2), Layout.read(encode(8)).kinds)
    assert [len(side["ids"]) for side in pair.take(slice(0, 1))[0]] == [1, 1]
    with pytest.raises(UnsplittableBatchError, match=r"\[0\] is a list of 2 entries, and its tensors have 2 rows too"):
        Layout.read(encode(2))


def test_kinds_name_every_part_and_remember_parts_that_are_missing_now() -> None:
    first = Layout.read({"x": X, "name": NAMES, "in": (X, rows(5)), "n": torch.tensor(1)})
    assert first.kinds == {
        "batch": "container",
        "x": "tensor",
        "name": "rows",
        "in": "container",
        "in[0]": "tensor",
        "in[1]": "shared",
        "n": "shared",
    }
    assert Layout.read({"x": X}, first.kinds).kinds == first.kinds


# --- columns ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("which", [slice(2, 5), [4, 2, 3], torch.tensor([4, 2, 3])])
def test_columns_keep_a_part_of_every_dimension_that_is_padded(which) -> None:
    length, kept = 6, slice(0, 4)
    batch = {
        "ids": rows(8, length),
        "mask": rows(8, 1, length, length) % 2 == 0,
        "onehot": rows(8, length, length),
        "embedded": torch.rand(8, length, length),
        "additive": torch.rand(8, 1, length, length),
        "pixels": torch.rand(8, 3),
        "label": rows(8),
        "array": np.arange(8 * length).reshape(8, length),
        "positions": rows(1, length),
        "bias": torch.rand(length, length),
        "tokens": [list(range(length))] * 8,
    }
    taken = Layout.read(batch).take(which, {length: kept})
    assert torch.equal(taken["ids"], batch["ids"][which][:, :4])
    assert torch.equal(taken["mask"], batch["mask"][which][:, :, :4, :4])
    assert torch.equal(taken["onehot"], batch["onehot"][which][:, :4, :4])
    assert torch.equal(taken["embedded"], batch["embedded"][which][:, :4])
    assert torch.equal(taken["additive"], batch["additive"][which][:, :, :4, :4])
    assert torch.equal(taken["pixels"], batch["pixels"][which])
    assert torch.equal(taken["label"], batch["label"][which])
    assert np.array_equal(taken["array"], batch["array"][which][:, :4])
    assert torch.equal(taken["positions"], batch["positions"][:, :4])
    assert torch.equal(taken["bias"], batch["bias"][:4, :4])
    assert taken["tokens"] == [list(range(length))] * 3


def test_columns_of_two_lengths_are_trimmed_on_the_side_that_each_says() -> None:
    batch = {"source": rows(8, 6), "target": rows(8, 9), "cross": rows(8, 9, 6)}
    taken = Layout.read(batch).take(slice(0, 2), {6: slice(2, 6), 9: slice(0, 3)})
    assert torch.equal(taken["source"], batch["source"][:2, 2:])
    assert torch.equal(taken["target"], batch["target"][:2, :3])
    assert torch.equal(taken["cross"], batch["cross"][:2, :3, 2:])


def test_columns_leave_the_rows_alone_where_there_are_as_many() -> None:
    square = rows(4, 4)
    assert torch.equal(Layout.read(square).take(slice(1, 4), {4: slice(0, 2)}), square[1:4, :2])


# --- what cannot be split ---------------------------------------------------------------------------------------------


class Opaque:
    def __init__(self, value: Any) -> None:
        self.value = value


class OpaqueSlots:
    __slots__ = ("value",)

    def __init__(self, value: Any) -> None:
        self.value = value


class Matrix:
    """An array of another library."""

    def __init__(self, rows: int) -> None:
        self.shape = (rows, 2)

    def __len__(self) -> int:
        return self.shape[0]

    def __iter__(self):
        return iter(range(len(self)))

    def __array__(self, *_: Any) -> np.ndarray:
        return np.zeros(self.shape)


class Movable:
    def to(self, device: Any) -> Movable:
        return self


class Fussy(dict):
    def __copy__(self):
        raise RuntimeError("no copies")


def ragged() -> Tensor:
    return torch.nested.nested_tensor([torch.rand(2), torch.rand(3)], layout=torch.jagged)


@pytest.mark.parametrize(
    ("batch", "found"),
    [
        ({"x": rows(8, 3), "y": rows(7)}, r"dimension 0 is 8 in x and 7 in y .*x is a Tensor of shape \(8, 3\), .*\(7,\)"),
        ((rows(8), {"z": rows(7)}), r"8 in \[0\] and 7 in \[1\].z "),
        ({"n": 3, "t": torch.tensor(1.0)}, r"no tensor has rows .*t is a Tensor of shape \(\)"),
        ("text", "no tensor has rows .*batch is a str"),
        (["a", "b"], "no tensor has rows"),
        ({}, "batch is a dict"),
        (None, "batch is a NoneType"),
        (pack_sequence([rows(3), rows(2)]), "batch is a PackedSequence, packed"),
        ({"x": X, "p": pack_sequence([rows(3), rows(2)])}, "p is a PackedSequence, packed"),
        (iter([X]), "batch is a list_iterator, an iterator"),
        ((X, (x for x in [X])), r"\[1\] is a generator, an iterator"),
        ((X, [ragged()]), r"\[1\]\[0\] is a NestedTensor, nested"),
        ({"x": X, "s": torch.eye(8).to_sparse()}, r"s is a Tensor of shape \(8, 8\), of the layout torch.sparse_coo"),
        ({"x": X, "o": Opaque({"deep": [X]})}, "o is a Opaque, of a class that is not known here"),
        ({"x": X, "o": OpaqueSlots(X)}, "o is a OpaqueSlots, of a class that is not known here"),
        ({"x": X, "o": collections.deque(NAMES)}, "o is a deque of 8 entries, and its rows cannot be taken"),
        ({"x": X, "o": Matrix(8)}, r"o is a Matrix of shape \(8, 2\), an array of a class that is not known here"),
        ({"x": X, "o": Movable()}, "o is a Movable, of a class"),
        ({"x": X, "o": {X, Y}}, "o is a set, of a class"),
        ({"x": X, "o": collections.deque([X])}, "o is a deque, of a class"),
        ({"x": X, "o": Fussy(x=X)}, r"o is a Fussy, and cannot be made anew \(no copies\)"),
        # as good in one reading as in the other
        ([{"ids": rows(8, 3)}, {"ids": rows(8, 3)}], r"dimension 0 is 2 in batch and 8 in \[0\].ids"),
        ((images([4] * 8), NAMES), r"dimension 0 is 3 in \[0\]\[0\] and 8 in \[1\] .*\(3, 4, 4\), \[1\] is a list of 8 entries"),
        ({"views": [X, X], "names": ["weak", "strong"]}, r"8 in views\[0\] and 2 in names"),
        ([rows(n) for n in (3, 4, 5)], r"3 in \[0\] and 4 in \[1\] and 5 in \[2\]"),
    ],
)
def test_a_batch_that_cannot_be_split_is_named_with_the_way_out(batch, found: str) -> None:
    with pytest.raises(UnsplittableBatchError, match=found) as raised:
        Layout.read(batch)
    assert str(raised.value).startswith("The batch cannot be split into micro-batches: ")
    assert "GradientAccumulation(split=...)" in str(raised.value)
    assert "function split(batch, size) that returns the micro-batches as a list" in str(raised.value)


def test_what_cannot_be_split_may_be_a_row() -> None:
    things = [Opaque(X) for _ in range(8)]
    assert Layout.read((X, things)).take([3])[1] == [things[3]]


def test_arrays_and_sequences_of_other_sizes_are_shared() -> None:
    names, matrix = collections.deque("ab"), Matrix(5)
    taken = Layout.read((X, Y, names, matrix)).take([1])
    assert taken[2] is names
    assert taken[3] is matrix


def test_rows_of_pandas_objects_are_those_of_the_tensors_beside_them() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"a": range(8), "b": NAMES}, index=range(20, 28))
    batch = {"x": X, "frame": frame, "series": frame["b"], "index": pandas.Index(NAMES), "classes": pandas.Index(["cat", "dog"])}
    for part in (slice(2, 5), [5, 0, 7]):
        taken = Layout.read(batch).take(part)
        assert torch.equal(taken["x"], X[part])
        assert taken["frame"].equals(frame.iloc[part])
        assert taken["series"].equals(frame["b"].iloc[part])
        assert list(taken["index"]) == list(np.array(NAMES)[part])
        assert list(taken["classes"]) == ["cat", "dog"]
    assert Layout.read(frame).size == 8


# --- sizes in tokens --------------------------------------------------------------------------------------------------


def test_tokens_are_a_natural_number() -> None:
    assert Tokens(8_192).count == 8192
    assert Tokens(1) == Tokens(1)
    for wrong in (0, -1, True, 2.0, "8", None):
        with pytest.raises(ValueError, match=f"count={wrong!r}"):
            Tokens(wrong)
