"""A weight for each term of a loss: the window of any loader batches takes the step of their full batch, all of its terms too."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from rated import EACH
from resumed import Module as Resumed
from resumed import assert_goes_on
from resumed import train as train_in_processes
from support import OPTIMIZERS, ddp, error_of_updates, loader, train_by_hand, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, IterableDataset

from lightning_accum import GradientAccumulation, SampleCount, TokenCount, Tokens

Batch = dict[str, Tensor]


class Model(pl.LightningModule):
    """A loss of several means over different counts."""

    batches: Callable[[int], list[Batch]]
    weight: Sequence[Callable[[Any], Any]]

    def __init__(self, optimizer: str = "sgd", by_rank: Sequence[Sequence[Any]] | None = None) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.optimizer, self.by_rank = optimizer, by_rank
        self.make()
        self.double()

    def make(self) -> None:
        raise NotImplementedError

    def train_dataloader(self) -> DataLoader:
        assert self.by_rank is not None
        return loader(self.by_rank[self.trainer.global_rank])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


def rows_apart(number: int, make: Callable[[torch.Generator, int], Batch]) -> list[Batch]:
    """Batches of 2 to 5 rows, of which no two have the same counts."""
    generator = torch.Generator().manual_seed(17)
    return [make(generator, int(torch.randint(2, 6, (), generator=generator))) for _ in range(number)]


class MaskedLanguage(Model):
    """BERT's pretraining: the masked tokens, and whether the second sentence follows."""

    weight = (TokenCount(shift=False), SampleCount())

    def make(self) -> None:
        self.embed, self.tokens, self.pair = nn.Embedding(13, 8), nn.Linear(8, 13), nn.Linear(8, 2)

    @staticmethod
    def batches(number: int) -> list[Batch]:
        def make(generator: torch.Generator, rows: int) -> Batch:
            ids = torch.randint(0, 13, (rows, 9), generator=generator)
            labels = torch.where(torch.rand(rows, 9, generator=generator) < 0.3, ids, -100)
            labels[0, 0] = ids[0, 0]
            return {"ids": ids, "labels": labels, "follows": torch.randint(0, 2, (rows,), generator=generator)}

        return rows_apart(number, make)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        hidden = self.embed(batch["ids"]).tanh()
        of_tokens = F.cross_entropy(self.tokens(hidden).flatten(0, 1), batch["labels"].flatten())
        return of_tokens + F.cross_entropy(self.pair(hidden.mean(1)), batch["follows"])


class Molecules(Model):
    """Energies of molecules, and the forces on their atoms, which are derivatives of the energies."""

    weight = (SampleCount(), lambda batch: 3 * batch["is_atom"].sum())

    def make(self) -> None:
        self.net = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))

    @staticmethod
    def batches(number: int) -> list[Batch]:
        def make(generator: torch.Generator, rows: int) -> Batch:
            def normal(*shape: int) -> Tensor:
                return torch.randn(shape, generator=generator, dtype=torch.float64)

            atoms = torch.randint(1, 7, (rows, 1), generator=generator)
            is_atom = torch.arange(6) < atoms
            return {"energy": normal(rows), "places": normal(rows, 6, 3), "force": normal(rows, 6, 3), "is_atom": is_atom}

        return rows_apart(number, make)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        places = batch["places"].clone().requires_grad_()
        energy = (self.net(places)[..., 0] * batch["is_atom"]).sum(1)
        (slope,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
        of_atoms = (-slope - batch["force"]).square() * batch["is_atom"][..., None]
        return 0.1 * F.mse_loss(energy, batch["energy"]) + of_atoms.sum() / (3 * batch["is_atom"].sum())


class Answers(Model):
    """Where an answer begins and ends in a text; it may begin before it, or end after it."""

    weight = (lambda batch: (batch["start"] != -100).sum(), lambda batch: (batch["end"] != -100).sum(), SampleCount())

    def make(self) -> None:
        self.embed, self.ends, self.has = nn.Embedding(11, 6), nn.Linear(6, 2, bias=False), nn.Linear(6, 1)

    @staticmethod
    def batches(number: int) -> list[Batch]:
        def make(generator: torch.Generator, rows: int) -> Batch:
            spans = torch.randint(0, 7, (2, rows), generator=generator)
            spans = torch.where(torch.rand(2, rows, generator=generator) < 0.4, -100, spans)
            spans[:, 0] = 1
            text = torch.randint(0, 11, (rows, 7), generator=generator)
            return {"text": text, "start": spans[0], "end": spans[1], "has": (spans[0] >= 0).double()}

        return rows_apart(number, make)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        hidden = self.embed(batch["text"]).tanh()
        start, end = self.ends(hidden).unbind(-1)
        of_span = F.cross_entropy(start, batch["start"], ignore_index=-100) + F.cross_entropy(end, batch["end"], ignore_index=-100)
        return of_span / 2 + F.binary_cross_entropy_with_logits(self.has(hidden.mean(1))[:, 0], batch["has"])


class Detector(Model):
    """Classes of all anchors, and the boxes of those that have an object."""

    weight = (lambda batch: batch["class"].numel(), lambda batch: 4 * (batch["class"] > 0).sum())

    def make(self) -> None:
        self.classes, self.boxes = nn.Linear(5, 4), nn.Linear(5, 4)

    @staticmethod
    def batches(number: int) -> list[Batch]:
        def make(generator: torch.Generator, rows: int) -> Batch:
            classes = torch.randint(1, 4, (rows, 8), generator=generator)
            classes[torch.rand(rows, 8, generator=generator) < 0.7] = 0
            classes[0, 0] = 1
            image, box = (torch.randn(rows, 8, size, generator=generator, dtype=torch.float64) for size in (5, 4))
            return {"image": image, "class": classes, "box": box}

        return rows_apart(number, make)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        is_object = batch["class"] > 0
        of_classes = F.cross_entropy(self.classes(batch["image"]).flatten(0, 1), batch["class"].flatten())
        return of_classes + F.smooth_l1_loss(self.boxes(batch["image"])[is_object], batch["box"][is_object])


MODELS = [MaskedLanguage, Molecules, Answers, Detector]


def together(batches: Sequence[Batch | None]) -> Batch:
    """The full batch."""
    there = [batch for batch in batches if batch is not None]
    return {key: torch.cat([batch[key] for batch in there]) for key in there[0]}


def windows_of(batches: Sequence[Any], size: int) -> list[Batch]:
    return [together(batches[at : at + size]) for at in range(0, len(batches), size)]


def assert_full_batches(kind: type[Model], optimizer: str, module: nn.Module, full: Sequence[Batch]) -> None:
    by_hand = train_by_hand(kind(optimizer), full, epochs=1)
    assert error_of_updates(module, by_hand, kind(optimizer)) <= 1e-12


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("kind", MODELS)
def test_each_term_of_a_window_is_that_of_its_full_batch(kind: type[Model], optimizer: str) -> None:
    batches, module = kind.batches(8), kind(optimizer)
    trainer(callbacks=[GradientAccumulation(3, weight=kind.weight)]).fit(module, loader(batches))
    assert_full_batches(kind, optimizer, module, windows_of(batches, 3))


@pytest.mark.some_cases(3)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("kind", MODELS)
def test_over_two_ranks_of_different_lengths(kind: type[Model], optimizer: str) -> None:
    batches = kind.batches(9)
    parts = [batches[:5], batches[5:]]
    module = kind(optimizer, by_rank=parts)
    trainer(ddp(), devices=2, callbacks=[GradientAccumulation(2, weight=kind.weight)]).fit(module)
    full = [together([batch for own in parts for batch in own[at : at + 2]]) for at in (0, 2, 4)]
    assert_full_batches(kind, optimizer, module, full)


@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("policy", [{"micro_batch": 2}, {"micro_batch": "offload"}, {"on_nonfinite": "raise"}])
def test_with_what_else_a_loader_batch_may_run_in(kind: type[Model], policy: dict[str, Any]) -> None:
    batches, module = kind.batches(7), kind("adamw")
    accumulation = GradientAccumulation(3, weight=kind.weight, trim_padding=False, **policy)
    trainer(callbacks=[accumulation]).fit(module, loader(batches))
    assert_full_batches(kind, "adamw", module, windows_of(batches, 3))


def test_offloaded_over_ranks_a_loader_batch_that_is_a_window_counts_itself() -> None:
    batches = Detector.batches(6)
    module = Detector("adamw", by_rank=[batches[:3], batches[3:]])
    accumulation = GradientAccumulation(micro_batch="offload", weight=Detector.weight)
    trainer(ddp(), devices=2, callbacks=[accumulation]).fit(module)
    assert_full_batches(Detector, "adamw", module, [together(batches[at::3]) for at in range(3)])


@pytest.mark.parametrize("micro_batch", [None, 2])
def test_a_window_of_tokens_is_drawn_until_it_has_them(micro_batch: int | None) -> None:
    batches, module = MaskedLanguage.batches(11), MaskedLanguage("adamw")
    accumulation = GradientAccumulation(Tokens(25), weight=MaskedLanguage.weight, micro_batch=micro_batch, trim_padding=False)
    trainer(callbacks=[accumulation]).fit(module, loader(batches))
    full: list[list[Batch]] = [[]]
    for batch in batches:
        full[-1].append(batch)
        if sum(int((own["labels"] != -100).sum()) for own in full[-1]) >= 25:
            full.append([])
    assert len(full) > 3
    assert_full_batches(MaskedLanguage, "adamw", module, [together(own) for own in full if own])


def test_tokens_of_all_ranks_end_a_window() -> None:
    batches = Detector.batches(10)
    module = Detector(by_rank=[batches[:6], batches[6:]])
    trainer(ddp(), devices=2, callbacks=[GradientAccumulation(Tokens(100), weight=Detector.weight)]).fit(module)
    full: list[list[Batch]] = [[]]
    for index in range(6):
        full[-1] += [batches[index], *batches[6:][index : index + 1]]
        if sum(own["class"].numel() for own in full[-1]) >= 100:
            full.append([])
    assert_full_batches(Detector, "sgd", module, [together(own) for own in full if own])


@pytest.mark.parametrize(
    ("window", "sizes"),
    [
        ({0: 2, 1: 3}, (2, 2, 2, 1, 3, 3, 1)),
        ({0: 1, 1: 4}, (1,) * 7 + (4, 3)),
        (lambda step: 1 + step % 3, (1, 2, 3, 1, 2, 3, 1, 1)),
    ],
)
def test_windows_whose_size_changes(window: Any, sizes: Sequence[int]) -> None:
    batches, module, at, full = Answers.batches(7), Answers("adamw"), 0, []
    trainer(callbacks=[GradientAccumulation(window, weight=Answers.weight)], max_epochs=2).fit(module, loader(batches))
    for size in sizes:
        full.append(together((batches * 2)[at : at + size]))
        at += size
    assert at == 14
    assert_full_batches(Answers, "adamw", module, full)


def test_a_batch_that_is_none_is_in_its_window() -> None:
    batches: list[Any] = Detector.batches(7)
    batches[0] = batches[4] = None
    module = Detector()
    trainer(callbacks=[GradientAccumulation(3, weight=Detector.weight)]).fit(module, loader(batches))
    assert_full_batches(Detector, "sgd", module, windows_of(batches, 3))


def test_a_dropped_tail_is_dropped() -> None:
    batches, module = Detector.batches(8), Detector()
    trainer(callbacks=[GradientAccumulation(3, weight=Detector.weight, tail="drop")], max_epochs=2).fit(module, loader(batches))
    assert_full_batches(Detector, "sgd", module, windows_of(batches[:6], 3) * 2)


class Endless(IterableDataset):
    """Says how many it has yielded."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self.batches, self.yielded = batches, 0

    def __iter__(self) -> Iterator[Batch]:
        while True:
            self.yielded += 1
            yield self.batches[(self.yielded - 1) % len(self.batches)]


class Seen(Callback):
    """What a callback gets in each loader batch, and what had been drawn by then."""

    def __init__(self, stream: Endless) -> None:
        self.stream = stream
        self.batches: list[tuple[Batch, int]] = []
        self.ahead: list[int] = []

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Batch, batch_idx: int) -> None:
        self.batches.append((batch, batch_idx))
        self.ahead.append(self.stream.yielded - len(self.batches))


def test_an_endless_stream_is_drawn_as_far_as_the_window() -> None:
    stream, module = Endless(Detector.batches(5)), Detector()
    seen = Seen(stream)
    run = trainer(callbacks=[GradientAccumulation(4, weight=Detector.weight), seen], max_steps=3, max_epochs=-1)
    run.fit(module, DataLoader(stream, batch_size=None))
    drawn = [stream.batches[index % 5] for index in range(12)]
    assert_full_batches(Detector, "sgd", module, windows_of(drawn, 4))
    assert [index for _, index in seen.batches] == list(range(12))
    assert all(torch.equal(batch["image"], expected["image"]) for (batch, _), expected in zip(seen.batches, drawn, strict=True))
    # the window of 4, and the one that Lightning draws ahead of a stream
    assert seen.ahead == [4, 3, 2, 1] * 3


def test_without_a_weight_for_each_term_nothing_is_drawn_ahead() -> None:
    stream = Endless(MaskedLanguage.batches(5))
    seen = Seen(stream)
    run = trainer(
        callbacks=[GradientAccumulation(4, weight=TokenCount(shift=False), check=False), seen], max_steps=2, max_epochs=-1
    )
    run.fit(MaskedLanguage(), DataLoader(stream, batch_size=None))
    assert set(seen.ahead) == {1}


class Stop(Callback):
    """Wants the training to end after its second loader batch."""

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, out: Any, batch: Any, index: int) -> None:
        trainer.should_stop |= index == 1


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_a_training_that_is_to_stop_inside_a_window_stops_after_it(optimizer: str) -> None:
    module, validated_after = Detector(optimizer), []
    module.validation_step = lambda batch, batch_idx: validated_after.append(module.global_step)  # type: ignore[method-assign]
    batches = Detector.batches(8)
    run = trainer(callbacks=[GradientAccumulation(4, weight=Detector.weight), Stop()], num_sanity_val_steps=0)
    run.fit(module, loader(batches), loader(batches[:1]))
    assert (run.global_step, validated_after) == (1, [1])
    assert_full_batches(Detector, optimizer, module, windows_of(batches, 4)[:1])


def test_an_epoch_that_ends_before_a_window_does_is_warned_of() -> None:
    class Ended(Detector):
        def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
            return -1 if batch_idx == 2 else None

    with pytest.warns(UserWarning, match="does not add up to what they counted"):
        trainer(callbacks=[GradientAccumulation(4, weight=Detector.weight)]).fit(Ended(), loader(Detector.batches(8)))


class Scored(Resumed):
    """Of two terms, in single precision."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        of_tokens = super().training_step(batch, batch_idx)
        return of_tokens + 0.3 * (self.net(batch["input_ids"])[:, 0].mean(-1) - 1).square().mean()


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("policy", [{"window": 3}, {"window": 3, "micro_batch": 2}, {"window": Tokens(60)}])
def test_a_checkpoint_inside_a_window_goes_on_to_the_bit(policy: dict[str, Any]) -> None:
    """What was drawn ahead and not trained on comes again."""
    policy = {**policy, "weight": EACH, "module": Scored}
    expected = train_in_processes(lambda: "accum", 1, **policy)
    for after in (1, 5):
        train_in_processes(lambda: "accum", 1, after, ends=True, **policy)
        assert_goes_on(expected, train_in_processes(lambda: "accum", 1, resumes=True, **policy), f"checkpoint after {after}")


def test_on_two_ranks_too() -> None:
    policy = {"window": 3, "weight": EACH, "module": Scored}
    expected = train_in_processes(ddp, 2, **policy)
    for after in (4,):
        train_in_processes(ddp, 2, after, ends=True, **policy)
        assert_goes_on(expected, train_in_processes(ddp, 2, resumes=True, **policy), f"checkpoint after {after}")
