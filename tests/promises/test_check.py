"""What the check finds before a step, what it never takes for a break, and that nothing else is changed by it."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import make_dataclass
from functools import partial
from pathlib import Path
from typing import Any
from weakref import proxy

import lightning.pytorch as pl
import pytest
import torch
from changing import Changes
from lightning.pytorch.callbacks import LambdaCallback
from loss_table import BY_NAME
from loss_table.rows import Trained, rows
from support import Hide, Toy, classified, fit, labelled, loader, refused, relative_error, warned
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader, Dataset, Subset, default_collate

from lightning_accum import AccumulationError, AccumulationWarning, DoesNotAddUpError, GradientAccumulation, SampleCount
from lightning_accum.testing import assert_window_equals_batch


def breaks(net: nn.Module, batch: Any) -> Tensor:  # only rows tell: its graph is that of a mean
    return classified(net, batch) * (1 + 0.1 * len(batch[1]))


def _ignored(batches: list[list[Tensor]], number: int, rows: slice) -> list[list[Tensor]]:
    for _, labels in batches[:number]:
        labels[rows] = -100
    return batches


@pytest.mark.parametrize(
    "data",
    [
        [None, *labelled(8, 8)],
        labelled(0, 8, 8),
        labelled(1, 8, 8),
        _ignored(labelled(8, 8), 1, slice(None)),
        _ignored(labelled(8, 8), 2, slice(4)),
    ],
    ids=["a missing batch", "no rows", "a single row", "a batch that weighs nothing", "rows that weigh nothing"],
)
def test_other_rows_are_looked_at_where_the_first_show_nothing(data: list[Any]) -> None:
    refused(Toy(breaks), data, GradientAccumulation(3), error=DoesNotAddUpError)


def flat(samples: Sequence[tuple[Tensor, int]]) -> dict[str, Tensor]:
    """All points one after the other, and of which sample each is, as graphs are packed."""
    points, labels = zip(*samples, strict=True)
    sizes = torch.tensor([len(own) for own in points])
    return {"points": torch.cat(points), "of": torch.arange(len(samples)).repeat_interleave(sizes), "labels": torch.tensor(labels)}


def mean_over_samples(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    if "ends" in batch:
        sizes = batch["ends"].diff(prepend=torch.zeros(1, dtype=torch.long))
        batch = {**batch, "of": torch.arange(len(sizes)).repeat_interleave(sizes)}
    hidden = net(batch["points"])
    return F.cross_entropy(hidden.new_zeros(len(batch["labels"]), 4).index_add(0, batch["of"], hidden), batch["labels"])


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.exhaustive)])
def test_where_a_batch_does_not_show_its_rows_the_dataset_does(workers: int) -> None:
    def at_least(number: int, samples: Sequence[tuple[Tensor, int]]) -> dict[str, Tensor]:
        return flat([samples[place] for place in range(max(number, len(samples)))])

    def misread(samples: Sequence[tuple[Tensor, int]]) -> dict[str, Tensor]:  # the points of a row seem to be shared by all rows
        batch = flat(samples)
        return {"points": batch["points"], "ends": batch["of"].bincount().cumsum(0), "labels": batch["labels"]}

    def at_random(samples: Sequence[tuple[Tensor, int]]) -> dict[str, Tensor]:
        return {**(batch := flat(samples)), "points": batch["points"] + torch.randn_like(batch["points"])}

    samples = [(torch.randn(1 + place % 4, 4).double(), place * place % 4) for place in range(32)]

    def trained(loss: Any, collate: Any, **check: bool) -> tuple[list[str], Toy]:
        module, data = Toy(loss), DataLoader(samples, 4, shuffle=True, num_workers=workers, collate_fn=collate)  # type: ignore[arg-type]
        with warned() as messages:
            fit(module, data, GradientAccumulation(2, **check))
        return messages, module

    for collate in (flat, misread, partial(at_least, 2), at_random, fails := partial(at_least, 4)):
        messages, found = trained(mean_over_samples, collate)
        assert ["could not be checked" in message for message in messages] == [True] * (collate in (fails, at_random))
        for own, other in zip(found.parameters(), trained(mean_over_samples, collate, check=False)[1].parameters(), strict=True):
            assert torch.equal(own, other)
    for collate in (flat, misread):
        with pytest.raises(DoesNotAddUpError):
            trained(lambda net, batch: mean_over_samples(net, batch) * (1 + batch["labels"].double().mean()), collate)


def among_samples(net: nn.Module, batch: Tensor) -> Tensor:  # of each time alone: 0.003 off, silently
    return F.cross_entropy((net(batch) @ batch.mT).flatten(0, 1), torch.arange(batch.size(1)).repeat(len(batch)))


TIME_FIRST, TABLE = partial(torch.stack, dim=1), torch.eye(6, 4, dtype=torch.float64)
MISREAD: dict[str, tuple[Callable[..., Tensor], Callable[..., Any], int]] = {
    "as many times as samples": (lambda net, x: (net(x.cumsum(0)) - x).square().mean(), TIME_FIRST, 6),
    "fewer times than samples": (lambda net, x: (net(x.cumsum(0)) - x).square().mean(), TIME_FIRST, 8),
    "a table": (lambda net, b: (net(b[0]) @ b[1].T).logsumexp(1).mean(), lambda own: [torch.stack(own)[:, 0], TABLE], 6),
    "not exact": (among_samples, TIME_FIRST, 6),
    "not exact, with fewer times": (among_samples, TIME_FIRST, 8),
}


@pytest.mark.some_cases(3)
@pytest.mark.parametrize("name", MISREAD)
def test_what_looks_like_rows_and_is_none_is_known_by_samples_of_the_dataset(name: str) -> None:
    loss, collate, number = MISREAD[name]
    samples, modules, is_refused = list(torch.randn(48, 6, 4, dtype=torch.float64)), [Toy(loss), Toy(loss)], loss is among_samples
    for module, window in zip(modules, (2, 1), strict=True):
        data = DataLoader(samples, 2 * number // window, collate_fn=collate)  # type: ignore[arg-type]
        with warned() as messages, pytest.raises(DoesNotAddUpError) if is_refused and window == 2 else nullcontext():
            fit(module, data, GradientAccumulation(window))
        assert not messages
    if not is_refused:
        assert relative_error(*(module.parameters() for module in modules)) <= 1e-12
        return
    with pytest.warns(AccumulationWarning, match="not split by its samples"):
        fit(Toy(loss), data, GradientAccumulation(2, micro_batch=3))


@pytest.mark.parametrize("seed", range(2))
def test_a_part_without_a_finite_loss_is_no_part_of_a_batch_with_one(seed: int) -> None:  # 0.5 off, silently
    def loss(net: nn.Module, b: Any) -> Tensor:
        return F.binary_cross_entropy_with_logits(net(b[0]), b[1], pos_weight=(1 - b[1]).sum() / b[1].sum())

    torch.manual_seed(seed)
    module = Toy(loss)
    with pytest.raises(DoesNotAddUpError):
        fit(module, [(x, (torch.rand(8, 4) < 0.3).to(x)) for x, _ in labelled(*[8] * 4)], GradientAccumulation(micro_batch=4))
    assert module.trainer.global_step == 0


@pytest.mark.parametrize("policy", [{"window": 2}, {"micro_batch": 8}])
@pytest.mark.parametrize("is_raised_later", [False, True])
def test_a_count_raised_to_1_in_single_rows_is_exact_until_it_is_raised_in_training(policy: Any, is_raised_later: bool) -> None:
    def by_scores(net: nn.Module, batch: Any) -> Tensor:  # as YOLOv8's
        outputs, scores = net(batch[0]), batch[1]
        weights, total = scores.amax(1), max(scores.sum(), 1)
        distances = ((outputs - batch[0]).abs().sum(1) * weights)[weights > 0]
        of_classes = F.binary_cross_entropy_with_logits(outputs, scores, reduction="none")
        return 0.5 * of_classes.sum() / total + 7.5 * distances.sum() / total

    x, scores = torch.randn(2, 64, 4, dtype=torch.float64)
    scores = 0.4 * scores.sigmoid() * (scores > 0)
    scores[40:48] *= 0.01 if is_raised_later else 1.0
    module, samples = Toy(by_scores), [*zip(x, scores, strict=True)]
    with warned() as messages, pytest.raises(DoesNotAddUpError) if is_raised_later else nullcontext():
        fit(module, DataLoader(samples, 8 if "window" in policy else 16), GradientAccumulation(**policy))  # type: ignore[arg-type]
    assert len(messages) == 1
    assert module.trainer.global_step == (2 if is_raised_later else 4)
    if not is_raised_later:
        fit(full := Toy(by_scores), DataLoader(samples, 16), strategy="auto")  # type: ignore[arg-type]
        assert relative_error(module.parameters(), full.parameters()) <= 1e-12


@pytest.mark.filterwarnings("error::lightning_accum.AccumulationWarning")
def test_batches_of_labeled_and_of_other_samples_have_rows_of_their_own() -> None:  # as FixMatch's
    def loss(net: nn.Module, batch: Any) -> Tensor:
        inputs, labels = batch["labeled"]
        weak, strong = batch["unlabeled"]
        return F.cross_entropy(net(inputs), labels) + F.cross_entropy(net(strong), net(weak).argmax(1))

    def collate(rows: Sequence[Any]) -> dict[str, list[Tensor]]:
        inputs, labels, *others = zip(*rows, strict=True)
        return {"labeled": [torch.stack(inputs), torch.stack(labels)], "unlabeled": [*map(torch.cat, others)]}

    rows = [[(x, y, *torch.randn(2, 3, 4).double()) for x, y in zip(*batch, strict=True)] for batch in labelled(4, 4, 8, 8)]
    assert_window_equals_batch(Toy(loss), rows, GradientAccumulation(2), collate=collate)


class Counts(list[Any], Dataset[Any]):  # samples that depend on how many this object has given, and on random numbers of its own
    of_all = 0

    def __init__(self) -> None:
        super().__init__((torch.randn(1 + place % 4, 4).double(), place * place % 4) for place in range(32))
        self.given, self.generator = list[int](), torch.Generator().manual_seed(2)

    def __getitem__(self, place: Any) -> Any:
        self.given.append(place)
        Counts.of_all += 1
        points, label = super().__getitem__(place)
        return points + len(self.given) + torch.rand(1, generator=self.generator), label


@pytest.mark.parametrize("dataset", [Counts, lambda: Subset(Counts(), range(32))], ids=["itself", "inside"])
def test_training_is_as_without_the_samples_that_are_drawn_for_the_check(dataset: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Draws:  # counts its calls, and has random numbers of its own
        def __init__(self) -> None:
            self.calls, self.generator = 0, torch.Generator().manual_seed(1)

        def collate(self, samples: Sequence[Any]) -> dict[str, Tensor]:
            self.calls, batch = self.calls + 1, flat([sample[:2] for sample in samples])
            return {**batch, "points": batch["points"] + self.calls + torch.rand(1, generator=self.generator)}

    monkeypatch.setattr("lightning_accum.trainer.first_batch._SECONDS", 0.0)
    monkeypatch.setattr(Counts, "of_all", 0)
    found = []
    for check in (True, False):
        torch.manual_seed(0)
        module = Toy(mean_over_samples)
        with warned() as messages:
            fit(module, DataLoader(dataset(), 16, collate_fn=Draws().collate), GradientAccumulation(2, check=check))
        assert len(messages) == check  # what collate_fn draws by itself is not known
        found.append([*module.parameters()])
    assert all(map(torch.equal, *found))
    assert Counts.of_all == 2 * 32 + 8  # no more, since they take long


def test_rows_of_one_count_beside_others_do_not_hide_what_a_mean_is_over() -> None:  # 0.65, silently, if pairs were looked at alone
    def mean_of_means(net: nn.Module, batch: tuple[Sequence[Tensor], ...]) -> Tensor:
        return sum(F.mse_loss(net(points), target) for points, target in zip(*batch, strict=True)) / len(batch[0])

    split, long = GradientAccumulation(micro_batch=1), GradientAccumulation(2)
    many, one, two = ((2, 2, 3), (3, 3, 1, 1, 2)), ((2,), (2,), (3,), (1,)), ((2, 2), (3, 1), (1, 4), (2, 2))
    # of the last two: 0.17, silently, if only the first window was looked at
    for sizes, window in ((many, split), (many, long), (one, long), (two, split)):
        rows = [[(torch.randn(n, 4).double(), torch.randn(n, 4).double()) for n in of_batch] for of_batch in sizes]
        assert_window_equals_batch(Toy(mean_of_means), rows, window, collate=lambda rows: tuple(zip(*rows, strict=True)))


@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("is_masked", [False, True])
def test_a_mean_over_padding_is_refused_where_loader_batches_are_padded_to_different_lengths(
    is_masked: bool, is_stream: bool
) -> None:
    def loss(net: Any, batch: dict[str, Tensor]) -> Tensor:  # Tacotron 2's: 0.026 off, silently
        is_frame = batch["mask"][..., None]
        errors = (net(batch["x"]) * is_frame - batch["x"]).square()
        return (errors * is_frame).sum() / (4 * is_frame.sum()) if is_masked else errors.mean()

    def padded(samples: Sequence[Tensor]) -> dict[str, Tensor]:
        of_each = {"x": [*samples], "mask": [torch.ones(len(own)) for own in samples]}
        return {key: pad_sequence(own, batch_first=True) for key, own in of_each.items()}

    samples = [torch.randn(3 + 5 * n % 13, 4, dtype=torch.float64) for n in range(32)]
    batches = [padded(samples[i : i + 8]) for i in range(0, 32, 8)]
    data: Any = DataLoader(batches, batch_size=None) if is_stream else DataLoader(samples, 8, collate_fn=padded)  # type: ignore
    module = Toy(loss)
    with nullcontext() if is_masked else pytest.raises(DoesNotAddUpError, match="mask the padding"):
        fit(module, data, GradientAccumulation(2))
    assert module.trainer.global_step == 2 * is_masked


@pytest.mark.parametrize("policy", [{"window": 2}, {"micro_batch": 4}])
def test_a_factor_that_is_0_in_the_first_epoch_is_checked_again_in_the_next(policy: dict[str, Any]) -> None:  # 0.17, silently
    class Centering(Toy):
        def on_train_epoch_start(self) -> None:
            self.net.share.fill_(0.2 * self.current_epoch)

    def loss(net: Any, batch: Any) -> Tensor:
        return F.cross_entropy((scores := net[0](batch[0])) - net.share * scores.mean(0), batch[1])

    def net() -> nn.Sequential:
        made = nn.Sequential(nn.Linear(4, 4))
        made.register_buffer("share", torch.zeros(()))
        return made

    module = Centering(loss, net=net)
    with pytest.raises(DoesNotAddUpError, match="Earlier optimizer steps"):
        fit(module, labelled(8, 8), GradientAccumulation(**policy), max_epochs=2)
    assert module.current_epoch == 1


FORMS: dict[str, tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]]] = {
    "sparse": (Tensor.to_sparse, Tensor.to_dense),
    "nested": (lambda x: torch.nested.nested_tensor([*x]), lambda nested: torch.stack(nested.unbind())),
    "an array": (Tensor.numpy, torch.as_tensor),
    "strings": (
        lambda x: [" ".join(map(repr, row)) for row in x.tolist()],
        lambda rows: torch.tensor([[*map(float, row.split())] for row in rows], dtype=torch.float64),
    ),
}


@pytest.mark.parametrize("name", FORMS)
def test_a_batch_without_dense_tensors_is_no_fault(name: str) -> None:
    given, dense = FORMS[name]
    plain, other = Toy(classified), Toy(lambda net, batch: F.cross_entropy(net(dense(batch[0])), torch.as_tensor(batch[1])))
    fit(plain, labelled(8, 8), GradientAccumulation(2))
    with warned():  # of torch, that nested tensors may change; and that they are not checked
        fit(other, [(given(x), y.tolist()) for x, y in labelled(8, 8)], GradientAccumulation(2))
    assert relative_error(other.parameters(), plain.parameters()) <= 1e-15


POLICY = GradientAccumulation()
HELD: dict[str, Callable[[Toy], Any]] = {
    "a sparse buffer": lambda module: module.register_buffer("kept", torch.eye(4).to_sparse()),
    "a proxy": lambda module: setattr(module, "kept", proxy(POLICY)),
    "a nested tensor": lambda module: setattr(module, "kept", torch.nested.nested_tensor([*torch.zeros(2, 3)])),
    "TorchScript": lambda module: setattr(module, "net", torch.jit.trace(module.net, torch.zeros(2, 4))),
}


@pytest.mark.filterwarnings("error::lightning_accum.AccumulationWarning")
@pytest.mark.parametrize("name", HELD)
def test_what_a_module_holds_is_no_fault(name: str) -> None:
    expected, module = (Toy(lambda net, batch: classified(net, (batch[0].float(), batch[1]))).float() for _ in range(2))
    HELD[name](module)
    fit(module, labelled(8, 8), GradientAccumulation(2))
    fit(expected, [[*map(torch.cat, zip(*labelled(8, 8), strict=True))]], strategy="auto")
    assert relative_error(module.net.parameters(), expected.net.parameters()) < 1e-6


@pytest.mark.parametrize("bad_batch", [0, 1, 2, 3])
def test_batches_of_few_rows_are_checked_before_the_first_step_until_there_were_eight(bad_batch: int) -> None:
    data = labelled(*[2] * 8)
    for index, (_, labels) in enumerate(data):
        labels[:] = 3 if index >= bad_batch else torch.tensor([0, 1])
    module = Toy(lambda net, b: classified(net, b) * (1.0 + len(b[1]) * int((b[1] == 3).any())))
    refused(module, data, GradientAccumulation(4), error=DoesNotAddUpError)


@pytest.mark.parametrize("name", ["forecasting: RMSE of each column", "forecasting: mean of squares of columns' means"])
def test_loader_batches_of_single_rows_that_do_not_add_up_are_found(name: str) -> None:
    data = [default_collate([row]) for row in rows(BY_NAME[name], number=8)]
    assert window_that_is_told_of(Trained(BY_NAME[name]), data, window=4) == 0


@pytest.mark.filterwarnings("error::lightning_accum.AccumulationWarning")
@pytest.mark.parametrize(("loss", "steps"), [(classified, 2), (breaks, 0)])
def test_a_step_that_takes_no_single_row_is_checked_in_halves(loss: Callable[..., Tensor], steps: int) -> None:
    module = Toy(lambda net, b: loss(net, b) / (1 / (len(b[1]) > 1)))
    with nullcontext() if steps else pytest.raises(DoesNotAddUpError):
        fit(module, labelled(8, 8), GradientAccumulation(micro_batch=3))
    assert module.trainer.global_step == steps


def test_a_window_of_one_batch_on_one_rank_is_plain_lightning_to_the_bit() -> None:
    calls: list[int] = []
    modules = [Toy(lambda net, b: calls.append(1) or breaks(net, b)) for _ in range(2)]
    fit(modules[0], labelled(8, 8, 8, 8), GradientAccumulation(1))
    assert len(calls) == 4
    fit(modules[1], labelled(8, 8, 8, 8), strategy="auto")
    assert all(torch.equal(p, q) for p, q in zip(*(module.parameters() for module in modules), strict=True))


@pytest.mark.parametrize(
    ("before", "rows"), [({"check": False}, 8), ({"weight": "equal"}, 8), ({"weight": SampleCount()}, 8), ({}, 3)]
)
def test_a_fit_that_goes_on_from_one_that_was_not_checked_is(before: dict[str, Any], rows: int) -> None:
    fit(Toy(classified), labelled(rows, rows), GradientAccumulation(2, **before)).save_checkpoint("one.ckpt")
    goes_on = {"max_epochs": 2, "ckpt_path": "one.ckpt"}
    refused(Toy(breaks), labelled(rows, rows), GradientAccumulation(2), error=DoesNotAddUpError, steps=1, **goes_on)


def test_everything_is_as_if_there_had_been_no_check() -> None:
    runs = []
    for check in (True, False):
        pl.seed_everything(3, verbose=False)
        with warned():  # of BatchNorm
            run = fit(module := Changes(8), labelled(8, 8, 8, 8), GradientAccumulation(2, check=check), max_epochs=2)
        shown = {name: float(value) for name, value in run.callback_metrics.items() if "per_second" not in name}
        runs.append((module.state(), {name: value.tolist() for name, value in module.state_dict().items()}, shown))
    assert runs[0] == runs[1]
    assert [rows for rows, *_ in module.seen] == [8] * 8


def _each(net: nn.Module, b: Any) -> Tensor:
    return F.cross_entropy(net(b[0]), b[1], reduction="none")


def _squares(net: nn.Module, b: Any) -> Tensor:
    return (net(b[0]) - b[0]).square().sum(1)


def masks(empty: int | None, number: int = 6, share: float = 1.0) -> list[list[Tensor]]:
    """Masks of which one is empty, and each other has the first two rows, and a share of all."""
    generator, found = torch.Generator().manual_seed(1), []
    for place, batch in enumerate(labelled(*[8] * number)):
        mask = torch.rand(8, generator=generator) < share
        mask[:2] = True
        found.append([*batch, mask & (place != empty)])
    return found


def window_that_is_told_of(module: pl.LightningModule, data: Any, **policy: Any) -> int | None:
    """The first window that is warned of, or refused, before its step."""
    told: list[int] = []
    with warned() as messages:
        looks = LambdaCallback(on_before_optimizer_step=lambda *_: told.append(len(messages)))
        try:
            fit(module, data, GradientAccumulation(**policy), looks)
        except AccumulationError:
            return len(told)
    told.append(len(messages))  # a window that was left out takes no step
    return next((window for window, number in enumerate(told) if number), None)


def _other_where_empty(one: Callable[..., Tensor], other: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda net, b: one(net, b) if b[2].any() else other(net, b)


LATER: dict[str, Callable[..., Tensor]] = {
    "the mean of all where the mask is empty": _other_where_empty(
        lambda n, b: _each(n, b)[b[2]].mean(), lambda n, b: _each(n, b).mean()),
    "all rows by the number of some": lambda n, b: (_each(n, b).sum() + (_squares(n, b) * b[2]).sum()) / b[2].sum().clamp(min=1),
    "another loss where no row is chosen": _other_where_empty(lambda n, b: _each(n, b).mean(), lambda n, b: _squares(n, b).mean()),
    "a sum that is not 0 by a count of 0": lambda n, b: _each(n, b).sum() / b[2].sum(),
    "another factor": _other_where_empty(classified, lambda n, b: 2.0 * classified(n, b)),
    "another term": _other_where_empty(classified, lambda n, b: classified(n, b) + n(b[0]).square().mean()),
    "another function of a mean": _other_where_empty(classified, lambda n, b: classified(n, b).sqrt()),
    "a choice": lambda n, b: torch.where(b[2].any(), _each(n, b).mean(), _squares(n, b).mean()),
    "the largest of the batch": _other_where_empty(classified, lambda n, b: ((d := _squares(n, b)) / d.detach().max()).mean()),
}  # fmt: skip


@pytest.mark.some_cases(14)
@pytest.mark.parametrize("empty", [1, 4])
@pytest.mark.parametrize("name", LATER)
def test_what_a_later_micro_batch_breaks_is_told_of_before_the_step_of_its_window(name: str, empty: int) -> None:
    told = window_that_is_told_of(Toy(LATER[name]), masks(empty), window=3)
    assert told is not None
    assert told <= empty // 3


EXACT: dict[str, Callable[..., Tensor]] = {
    "selected only where not all are": lambda n, b: _each(n, b).mean() if b[2].all() else _each(n, b)[b[2]].mean(),
    "zero where the mask is empty": _other_where_empty(lambda n, b: _each(n, b)[b[2]].mean(), lambda n, b: (n(b[0]) * 0).mean()),
    "a masked sum by the number of some": lambda n, b: (_each(n, b) * b[2]).sum() / b[2].sum().clamp(min=1),
}  # fmt: skip


@pytest.mark.filterwarnings("error::lightning_accum.AccumulationWarning")
@pytest.mark.some_cases(4)
@pytest.mark.parametrize("empty", [1, 4])
@pytest.mark.parametrize("name", EXACT)
def test_other_ways_that_add_up_are_exact_and_nothing_is_said(name: str, empty: int) -> None:
    batches = [list(zip(*batch, strict=True)) for batch in masks(empty, share=0.6)]
    assert_window_equals_batch(Toy(EXACT[name]), batches, GradientAccumulation(3))


ALIKE: dict[str, Callable[..., Tensor]] = {  # a loss that compares its rows where they are not alike in their last column
    "by weights over the largest": lambda n, b: (_squares(n, b) * b[2] / b[2].max()).mean(),
    "by the softmax of weights": lambda n, b: (_squares(n, b) * b[2].softmax(0)).sum(),
    "the mean of the means of two sets": lambda n, b: sum(_squares(n, b)[b[2] == w].mean() for w in b[2].unique()) / 2,
    "a branch on the first row": lambda n, b: _each(n, b).mean() * b[2][0],
}  # fmt: skip


Record = make_dataclass("Record", ["x", "y", "weights"], namespace={"__getitem__": lambda self, at: [*vars(self).values()][at]})


def of_weights(*of_batches: Sequence[float]) -> list[list[Tensor]]:
    batches = labelled(*map(len, of_batches))
    return [[*batch, torch.tensor(weights, dtype=torch.float64)] for batch, weights in zip(batches, of_batches, strict=True)]


@pytest.mark.some_cases(3)
@pytest.mark.parametrize("later", [[1, 1, 2, 2, 3, 3, 4, 4], [2, 2, 2, 2, 1, 1, 4, 4]])
@pytest.mark.parametrize("name", ALIKE)
def test_rows_are_looked_at_again_if_they_are_not_alike_in_what_all_that_were_checked_were(name: str, later: list[float]) -> None:
    for data in (of_weights([1] * 8, [1] * 8, later), [Record(*batch) for batch in of_weights([1] * 8, [1] * 8, later)]):
        assert window_that_is_told_of(Toy(ALIKE[name]), data, window=1, micro_batch=2) == 2


def test_a_micro_batch_of_which_no_row_is_chosen_by_its_values_is_not_counted_as_one() -> None:  # 0.2, in silence, before
    def loss(net: nn.Module, b: Any) -> Tensor:
        losses, is_chosen = (net(b[0]) - b[0]).square().mean(1), b[0][:, 0] > -50
        return (losses * is_chosen).sum() / is_chosen.sum().clamp(min=1)

    (data := labelled(*[8] * 4))[2][0][:4, 0] = -60.0
    assert window_that_is_told_of(Toy(loss), data, micro_batch=4) == 2


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("policy", [{"window": 2}, {"window": 1, "micro_batch": 4}])
@pytest.mark.parametrize(("named", "steps"), [("of the parameters", 1), ("of a counter", 7)])
def test_one_micro_batch_is_looked_at_again_in_windows_2_and_8(named: str, steps: int, policy: dict[str, Any]) -> None:
    """What begins to compare rows when the parameters have moved, or after some steps, is not trained in silence."""

    def loss(net: nn.Module, batch: Any) -> Tensor:
        losses, has_moved = _squares(net, batch), bool((net.bias - bias).abs().max() > 0.05)
        begins = has_moved if named == "of the parameters" else module.trainer.global_step > 3
        return F.softplus(losses - (losses.detach().mean() if begins else 0.5)).mean()

    module, data = Toy(loss), labelled(*[8] * 20)
    bias = module.net.bias.detach().clone()
    assert window_that_is_told_of(module, data, **policy) == steps


def test_a_loss_that_compares_rows_from_an_epoch_on_is_refused_before_its_first_step() -> None:  # until epoch 4 before
    def loss(net: nn.Module, batch: Any) -> Tensor:
        return classified(net, [batch[0] - batch[0].mean(0) * (module.current_epoch > 2), batch[1]])

    module = Toy(loss)
    refused(module, labelled(*[8] * 66), GradientAccumulation(1, micro_batch=4), max_epochs=6, match="do not add up", steps=3 * 66)
    assert module.current_epoch == 3


@pytest.mark.parametrize("policy", [{"window": 2}, {"micro_batch": 3}])
def test_weights_and_masks_that_begin_later_are_no_false_alarm(policy: dict[str, Any]) -> None:
    module = Toy(lambda n, b: (_squares(n, b) * b[2]).sum() / b[2].sum())
    data = of_weights([1] * 8, [1] * 8, [1, 1, 0, 0, 0, 0, 2, 3], [0] * 7 + [1])
    assert window_that_is_told_of(module, data, **policy) is None


def test_a_term_that_is_always_0_costs_one_window_at_most() -> None:  # every second before
    def loss(net: nn.Module, batch: Any) -> Tensor:
        chosen = (net(batch[0]).square().mean(1) * batch[2]).sum() / batch[2].sum().clamp(min=1)
        return (net(batch[0]) - batch[0]).square().mean(1).mean() + chosen

    module = Toy(loss)
    with pytest.warns(AccumulationWarning, match="This window is left out"):
        fit(module, of_weights(*[[0] * 8, [0] * 9] * 6), GradientAccumulation(2))
    assert module.trainer.global_step == 5


def is_told_of_on_two_ranks(module: Toy, by_rank: Sequence[Sequence[Any]], **policy: Any) -> bool:
    """Whether rank 0 warns, or both end with an error. No rank waits for another for longer than a timeout."""
    module.train_dataloader = lambda: loader(by_rank[module.global_rank])
    with warned() as messages:
        module.on_train_end = lambda: Path(f"rank{module.global_rank}").write_text(str(len(messages)))
        try:
            fit(module, None, GradientAccumulation(**policy), ranks=2)
        except Exception as error:
            if "lightning_accum" not in str(error) + type(error).__module__:
                raise
            return True
    assert Path("rank1").exists()
    return Path("rank0").read_text() != "0"


def _on_rank_1(one: Callable[..., Tensor], other: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What batches of class 0 alone are given to."""
    return lambda n, b: other(n, b) if (b[1] == 0).all() else one(n, b)


def _labelled_by_rank(number: int, later: int = 0) -> list[list[list[Tensor]]]:  # Rank 1 has class 0 alone, from a batch on
    by_rank = [labelled(*[8] * number, seed=seed) for seed in (1, 2)]
    for _, labels in by_rank[1][later:]:
        labels[:] = 0
    return by_rank


WINDOW, UNCHECKED = {"window": 2}, {"window": 1, "check": False}
OF_WEIGHTS = [of_weights(*[[1] * 8] * 4), of_weights(*[[1] * 8] * 3, [1] * 4 + [2] * 4)]  # rank 1's begin later
ON_RANKS: dict[str, tuple[Any, list[Any], dict[str, Any], bool]] = {
    "a break": (_on_rank_1(classified, breaks), _labelled_by_rank(2), WINDOW, True),
    "a later break": (LATER["the mean of all where the mask is empty"], [masks(None), masks(4)], {"window": 3}, True),
    "a later zero": (EXACT["zero where the mask is empty"], [masks(None), masks(4)], {"window": 3}, False),
    "hidden": (lambda *nb: Hide.apply(EXACT["a masked sum by the number of some"](*nb)), [masks(None), masks(0)], WINDOW, True),
    "elements": (_on_rank_1(classified, lambda n, b: F.mse_loss(n(b[0]), b[0])), _labelled_by_rank(4, 2), WINDOW, True),
    "weights that begin": (ALIKE["by weights over the largest"], OF_WEIGHTS, WINDOW, True),
    "rows": (_on_rank_1(classified, lambda n, b: _each(n, b).mean()), _labelled_by_rank(4, 2), WINDOW, False),
    "a factor": (_on_rank_1(classified, lambda n, b: 0.25 * classified(n, b)), _labelled_by_rank(1), UNCHECKED, True),
    "nothing": (_on_rank_1(classified, lambda n, b: 0.0 * n(b[0]).sum()), _labelled_by_rank(1), UNCHECKED, False),
    "another function": (
        _on_rank_1(classified, lambda n, b: classified(n, b).sqrt()), _labelled_by_rank(2), {**WINDOW, "check": False}, True
    ),
}  # fmt: skip
"""A loss, the batches of each rank, a policy, and whether it is told of."""


@pytest.mark.some_cases(5)
@pytest.mark.parametrize("name", ON_RANKS)
def test_what_one_of_two_ranks_finds_is_told_of_and_nobody_waits(name: str) -> None:
    loss, data, policy, told = ON_RANKS[name]
    assert is_told_of_on_two_ranks(Toy(loss), data, **policy) == told


def test_a_fault_of_the_package_in_the_check_is_an_error_and_not_an_unchecked_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_accum.trial.guard_against_zero", lambda terms: terms["a fault"])
    with pytest.raises(TypeError, match="list indices"):
        fit(Toy(lambda net, batch: net(batch).square().mean()), [torch.randn(8, 4).double()], GradientAccumulation(2))


HIDDEN: list[Any] = []  # not in reach of the module, so the check does not restore it


@pytest.mark.parametrize("policy", [{"window": 2}, {"micro_batch": 8}])
@pytest.mark.parametrize(
    ("ignored", "dtype", "most"), [(0.0, torch.float64, 16), (0.4, torch.float64, 18), (0.4, torch.float32, 20)], ids=str
)
def test_the_step_is_tried_at_most_20_times_before_the_first_window(ignored: float, dtype: Any, most: int, policy: Any) -> None:
    HIDDEN.clear()
    module, steps = Toy(lambda *given: HIDDEN.append(1) or classified(*given)).to(dtype), list[int]()
    data, note = [[x.to(dtype), labels] for x, labels in labelled(16, 16, ignored=ignored)], lambda *_: steps.append(len(HIDDEN))
    fit(module, data, GradientAccumulation(**policy), LambdaCallback(on_before_optimizer_step=note))
    assert most - 3 <= steps[0] - 2 <= most


class Centred(Toy):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.left = batch[0].mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.net(batch[0]) - self.left).square().mean()


class Teaches(Centred):  # leaves something for each row, and a learning rate
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.left = batch[0].sum(1, keepdim=True)
        for group in self.optimizers().param_groups:
            group["lr"] = 0.02 * len(batch[0])


@pytest.mark.filterwarnings("error::lightning_accum.AccumulationWarning")
def test_a_loss_that_uses_what_on_train_batch_start_leaves_of_its_batch_is_found() -> None:
    for policy in ({"window": 2}, {"window": 2, "micro_batch": 2}):
        refused(Centred(classified), labelled(4, 4), GradientAccumulation(**policy), error=DoesNotAddUpError)
    assert fit(Centred(classified), labelled(4, 4), GradientAccumulation(micro_batch=2)).global_step == 2  # of the full batch
    assert fit(Teaches(classified), labelled(4, 4), GradientAccumulation(2)).global_step == 1  # another rate is warned of


class Mixes(pl.Callback):
    def on_train_batch_start(self, trainer: pl.Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        batch[0].lerp_(self.others(batch[0]), 0.4)


@pytest.mark.filterwarnings("error::lightning_accum.AccumulationWarning")
def test_rows_that_a_callback_mixes_are_found() -> None:  # 0.5, silently
    for dim in (0, 1):
        mixes, module = Mixes(), Toy(classified)
        mixes.others = partial(torch.flip, dims=[dim])
        assert fit(module, labelled(4, 4), GradientAccumulation(micro_batch=2), mixes).global_step == 2  # of the full batch
        with nullcontext() if dim else pytest.raises(DoesNotAddUpError):
            fit(Toy(classified), labelled(4, 4), GradientAccumulation(2), mixes)
