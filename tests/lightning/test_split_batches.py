"""Split batches: when padding is trimmed, what is said, and what is refused."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support import OPTIMIZERS, Language, Scalar, fp16_on_cpu, loader, pad, relative_error, sentences, trainer, x
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_accum import GradientAccumulation, SampleCount, Tokens, UnsplittableBatchError

# --- trimming ---------------------------------------------------------------------------------------------------------


class Padded(pl.LightningModule):
    """A language model with an attention mask; ``reads`` says what of the padding it looks at."""

    def __init__(self, reads: str = "nothing") -> None:
        super().__init__()
        torch.manual_seed(5)
        self.token, self.position = nn.Embedding(17, 8), nn.Embedding(16, 8)
        layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.1, batch_first=True, bias=False)
        self.encoder = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(8, 17)
        self.double()
        self.reads = reads
        self.widths: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        ids, mask = batch["input_ids"], batch["attention_mask"]
        self.widths.append(ids.shape[1])
        if self.reads == "columns of a fixed width" and ids.shape[1] != 12:
            raise RuntimeError("12 columns expected")
        position = torch.arange(ids.shape[1]) if "positions" in self.reads else (mask.cumsum(1) - 1).clamp(min=0)
        hidden = self.encoder(
            self.token(ids) + self.position(position), src_key_padding_mask=None if "all" in self.reads else mask == 0
        )
        labels = batch["labels"] if self.reads != "labels" else ids
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten(), ignore_index=-100)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def padded_batch(sides: str) -> dict[str, Tensor]:
    rows = sentences(16)
    width = 12
    batch = {name: torch.full((16, width), fill) for name, fill in [("input_ids", 0), ("labels", -100), ("attention_mask", 0)]}
    for index, row in enumerate(rows):
        start = width - len(row) if sides == "left" else (width - len(row)) // 2 if sides == "both" else 0
        for name, value in [("input_ids", row), ("labels", row), ("attention_mask", torch.ones_like(row))]:
            batch[name][index, start : start + len(row)] = value
    return batch


@pytest.mark.parametrize(
    ("reads", "sides", "is_trimmed"),
    [
        ("nothing", "right", True),
        ("nothing", "left", True),
        ("nothing", "both", True),
        ("positions", "right", True),
        ("positions", "left", False),  # position ids that depend on padding to the left
        ("all", "right", False),  # attention without the mask
        ("labels", "right", False),  # padding counts in the loss
        ("columns of a fixed width", "right", False),
    ],
)
def test_padding_is_trimmed_only_where_the_loss_does_not_depend_on_it(
    reads: str, sides: str, is_trimmed: bool, recwarn: Any
) -> None:
    batch = padded_batch(sides)
    module = Padded(reads)
    trainer(callbacks=[GradientAccumulation(micro_batch=4)]).fit(module, loader([batch]))
    assert len(module.widths) == 4  # what was tried before left no trace
    assert (max(module.widths) < 12) is is_trimmed  # the longest row has 11
    assert (min(module.widths) < 6) is is_trimmed
    said = [str(warning.message) for warning in recwarn if "is not trimmed" in str(warning.message)]
    assert len(said) == (not is_trimmed)
    if not is_trimmed:
        assert f"on the {sides}" in said[0]
        assert "trim_padding=False" in said[0]


@pytest.mark.parametrize("sides", ["left", "right", "both"])
def test_trimmed_gradient_is_that_of_the_padded_batch(sides: str) -> None:
    whole, split = Padded(), Padded()
    for module in (whole, split):
        for layer in module.modules():
            if isinstance(layer, (nn.Dropout, nn.MultiheadAttention)):
                layer.dropout = 0.0
                layer.p = 0.0
    trainer("auto").fit(whole, loader([padded_batch(sides)] * 3))
    trainer(callbacks=[GradientAccumulation(micro_batch=3)]).fit(split, loader([padded_batch(sides)] * 3))
    assert relative_error(split.parameters(), whole.parameters()) < 1e-12


def test_trying_draws_no_random_numbers_and_logs_nothing() -> None:
    class Random(Padded):
        def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            self.log("loss", loss)
            self.drawn.append(torch.rand(()).item())
            return loss

    drawn = []
    for trim in (True, False):
        module = Random()
        module.drawn = []
        torch.manual_seed(0)
        for layer in module.modules():
            if isinstance(layer, (nn.Dropout, nn.MultiheadAttention)):
                layer.dropout = 0.0
                layer.p = 0.0
        trainer(callbacks=[GradientAccumulation(micro_batch=4, trim_padding=trim)]).fit(module, loader([padded_batch("right")]))
        drawn.append(module.drawn)
    assert drawn[0] == drawn[1]
    assert len(drawn[0]) == 4


# --- said and refused -------------------------------------------------------------------------------------------------


def test_the_line_at_the_start_says_how_batches_run(caplog) -> None:
    caplog.set_level(logging.INFO, "lightning.pytorch")
    batch = {**padded_batch("right"), "table": torch.zeros(5)}
    for size, words in [
        (4, "in micro-batches of 4, longest rows first, trimmed to the longest of each, all of them share table (5,)"),
        (Tokens(24), "in micro-batches of up to 24 tokens, padding included"),
        ("auto", "in micro-batches as large as memory allows"),
    ]:
        caplog.clear()
        trainer(callbacks=[GradientAccumulation(micro_batch=size)]).fit(Padded(), loader([batch]))
        (line,) = [record.message for record in caplog.records if "a window is" in record.message]
        assert words in line
        assert "16 samples" in line


@pytest.mark.parametrize(
    ("policy", "message"),
    [
        ({"micro_batch": 0}, "micro_batch=0"),
        ({"micro_batch": True}, "micro_batch=True"),
        ({"micro_batch": "large"}, "micro_batch='large'"),
        ({"micro_batch": 2.0}, "micro_batch=2.0"),
        ({"micro_batch": 2, "trim_padding": 3}, "trim_padding=3"),
        ({"micro_batch": 2, "split": 3}, "split=3"),
        ({"split": lambda batch, size: [batch]}, "set micro_batch="),
    ],
)
def test_wrong_arguments_are_refused_at_once(policy: dict[str, Any], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        GradientAccumulation(**policy)


def test_batch_that_cannot_be_split_names_the_leaf_before_the_first_backward() -> None:
    class Any_(Scalar):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            raise AssertionError("nothing may run")

    for batch, message in [
        ({"x": torch.zeros(8, 3), "y": torch.zeros(7)}, r"(?s)8.*x.*7.*y.*split="),
        ({"x": torch.zeros(())}, r"split="),
    ]:
        module = Any_([batch])
        with pytest.raises(ValueError, match=message):
            trainer(callbacks=[GradientAccumulation(micro_batch=2)]).fit(module)
        assert module.w.grad is None


def test_split_function_cuts_what_cannot_be_read() -> None:
    class Bag:
        def __init__(self, values: list[float]) -> None:
            self.values = values

        def to(self, device: Any) -> Bag:
            return self

    class OfBags(Scalar):
        def loss(self, bag: Any) -> Tensor:
            self.sizes.append(len(bag.values))
            return (self.w * x(*bag.values)).mean()

    def split(bag: Bag, size: int) -> list[Bag]:
        return [Bag(bag.values[i : i + size]) for i in range(0, len(bag.values), size)]

    for size, sizes in [(2, [2, 2, 1]), ("auto", [5])]:
        module = OfBags([Bag([1, 2, 3, 4, 5])])
        module.sizes = []
        trainer(callbacks=[GradientAccumulation(micro_batch=size, split=split)]).fit(module)
        assert module.sizes == sizes
        assert module.total == pytest.approx(3.0, rel=1e-12)
    with pytest.raises(ValueError, match=r"must return the micro-batches as a list"):
        trainer(callbacks=[GradientAccumulation(micro_batch=2, split=lambda batch, size: None)]).fit(OfBags([Bag([1])]))


# --- beside the rest --------------------------------------------------------------------------------------------------


def test_lbfgs_runs_a_split_batch_as_often_as_it_wants() -> None:
    class WithLBFGS(Scalar):
        def loss(self, x: Tensor) -> Tensor:
            return ((self.w - x) ** 2).mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.LBFGS(self.parameters(), lr=1.0, max_iter=4)

    module = WithLBFGS([x(1, 2, 3, 4, 15)])
    trainer(callbacks=[GradientAccumulation(micro_batch=2)]).fit(module)
    assert module.w.item() == pytest.approx(5.0, rel=1e-9)


@pytest.mark.parametrize("size", [2, "auto"])
def test_gradients_are_unscaled_and_clipped_once_a_batch(size: Any) -> None:
    batches = [x(1, 2, 3, 4, 5).float(), x(10, 20).float()]
    module = Scalar(batches)
    precision = fp16_on_cpu()
    run = trainer(callbacks=[GradientAccumulation(micro_batch=size)], plugins=[precision], gradient_clip_val=4.0)
    run.fit(module.float())
    assert module.gradients == pytest.approx([3.0, 15.0])
    assert module.total == pytest.approx(3.0 + 4.0, rel=1e-5)
    assert run.global_step == 2


def test_batch_that_fits_is_left_to_lightning_bit_for_bit() -> None:
    class Hidden(Scalar):  # a loss whose weight cannot be read
        def loss(self, x: Tensor) -> Tensor:
            return (self.w * x).mean().exp()

    found, wanted = Hidden([x(1, 2)] * 3, lr=0.1), Hidden([x(1, 2)] * 3, lr=0.1)
    trainer(callbacks=[GradientAccumulation(micro_batch=2)]).fit(found)
    trainer("auto").fit(wanted)
    assert torch.equal(found.w, wanted.w)


def test_none_batches_and_tails_of_windows_of_split_batches() -> None:
    module = Scalar([x(1, 2, 3), None, x(4), x(5, 6), None])
    run = trainer(callbacks=[GradientAccumulation(2, micro_batch=2)])
    run.fit(module)
    assert run.global_step == 2
    assert module.total == pytest.approx(6 / 3 + 15 / 3, rel=1e-12)


def test_schedulers_and_counts_mean_optimizer_steps() -> None:
    class Scheduled(Language):
        def configure_optimizers(self) -> Any:
            optimizer = OPTIMIZERS["sgd"](self.parameters())
            return [optimizer], [{"scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5), "interval": "step"}]

    rows = sentences(48)
    run = trainer(callbacks=[GradientAccumulation(micro_batch=4)], max_epochs=2)
    run.fit(Scheduled(), loader([pad(rows[i : i + 16]) for i in range(0, 48, 16)]))
    assert run.global_step == run.estimated_stepping_batches == 6
    assert run.optimizers[0].param_groups[0]["lr"] == pytest.approx(0.1 * 0.5**6)
    assert run.callback_metrics["window/micro_batches"] == 4


# --- what a loader puts into a batch ----------------------------------------------------------------------------------


class Molecules(pl.LightningModule):
    """The energy of a graph is the sum of those of its nodes; graphs are packed end to end."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.energy = nn.Linear(3, 1, dtype=torch.float64)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        found = torch.zeros_like(batch["energy"]).index_add(0, batch["batch"], self.energy(batch["position"])[:, 0])
        return F.mse_loss(found, batch["energy"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def graph(nodes: int) -> dict[str, Tensor]:
    position = torch.arange(3.0 * nodes).double().reshape(nodes, 3) / 10
    return {"position": position, "energy": position.cos().sum()}


def collate_graphs(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    sizes = torch.tensor([len(sample["position"]) for sample in samples])
    return {
        "position": torch.cat([sample["position"] for sample in samples]),
        "batch": torch.arange(len(samples)).repeat_interleave(sizes),
        "energy": torch.stack([sample["energy"] for sample in samples]),
    }


def test_graphs_are_refused_before_the_first_step_and_a_function_splits_them_exactly() -> None:
    def graphs() -> DataLoader:
        return DataLoader([graph(nodes) for nodes in (2, 5, 3, 4, 6, 1)], batch_size=4, collate_fn=collate_graphs)

    def by_graph(batch: dict[str, Tensor], size: int) -> list[dict[str, Tensor]]:
        owner = batch["batch"]
        singles = [{"position": batch["position"][owner == g], "energy": e} for g, e in enumerate(batch["energy"])]
        return [collate_graphs(singles[i : i + size]) for i in range(0, len(singles), size)]

    refused, split, whole = Molecules(), Molecules(), Molecules()
    with pytest.raises(UnsplittableBatchError, match=r"would be 14 samples, but the loader puts 4 into a batch.*split="):
        trainer(callbacks=[GradientAccumulation(micro_batch=2)]).fit(refused, graphs())
    assert relative_error(refused.parameters(), Molecules().parameters()) == 0
    trainer("auto").fit(whole, graphs())
    trainer(callbacks=[GradientAccumulation(micro_batch=2, split=by_graph)]).fit(split, graphs())
    assert relative_error(split.parameters(), whole.parameters()) < 1e-12


@pytest.mark.parametrize(("batch_size", "said"), [(4, ", 4 samples with loader batches like the first (4)"), (None, "")])
def test_the_line_at_the_start_counts_no_nodes_for_samples(caplog: pytest.LogCaptureFixture, batch_size: Any, said: str) -> None:
    graphs = [graph(nodes) for nodes in (2, 5, 3, 4)]
    batches = loader([collate_graphs(graphs)]) if batch_size is None else DataLoader(graphs, batch_size, collate_fn=collate_graphs)
    with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
        trainer().fit(Molecules(), batches)
    assert f"GradientAccumulation: a window is 1 loader batch{said}; weight: mean squared error" in caplog.text


@pytest.mark.parametrize("sizes", [(4, 4, 4, 4, 4, 4), (4, 5, 6, 4, 5, 6)])
@pytest.mark.parametrize("weight", [len, SampleCount()])
@pytest.mark.parametrize("micro_batch", [1, 2, 3])
def test_a_list_of_images_is_split_by_images_and_weighed_by_them(micro_batch: int, weight: Any, sizes: tuple[int, ...]) -> None:
    class Pictures(Scalar):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return sum(((self.w * image).mean() - 1).square() for image in batch) / len(batch)

    generator = torch.Generator().manual_seed(3)
    images = [torch.rand(3, size, size, generator=generator, dtype=torch.float64) for size in sizes]

    def batches() -> DataLoader:
        return DataLoader(images, batch_size=4, collate_fn=list)

    whole, split = Pictures(lr=0.1), Pictures(lr=0.1)
    trainer("auto").fit(whole, batches())
    trainer(callbacks=[GradientAccumulation(micro_batch=micro_batch, weight=weight)]).fit(split, batches())
    assert split.total == pytest.approx(whole.total, rel=1e-12)


@dataclass(slots=True)
class Slotted:
    x: Tensor


def test_a_dataclass_with_slots_and_a_nested_batch_are_announced(caplog: pytest.LogCaptureFixture) -> None:
    class OfAttribute(Scalar):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return (self.w * (batch.x if isinstance(batch, Slotted) else batch)).mean()

    def by_rows(batch: Tensor, size: int) -> list[Tensor]:
        rows = batch.unbind()
        parts = [list(rows[i : i + size]) for i in range(0, len(rows), size)]
        return [torch.nested.nested_tensor(part, layout=torch.jagged) for part in parts]

    jagged = torch.nested.nested_tensor([x(1, 2), x(3), x(4, 5, 6)], layout=torch.jagged)
    for batch, split in ((Slotted(x(1, 2, 3, 4, 5, 6)), None), (jagged, by_rows)):
        caplog.clear()
        module = OfAttribute([batch])
        with caplog.at_level(logging.INFO, logger="lightning.pytorch.utilities.rank_zero"):
            trainer(callbacks=[GradientAccumulation(micro_batch=2, split=split)]).fit(module)
        assert f"{6 if split is None else 3} samples with loader batches like the first" in caplog.text
        assert module.total == pytest.approx(21 / 6, rel=1e-12)
    with pytest.raises(UnsplittableBatchError, match="batch is a NestedTensor, nested"):
        trainer(callbacks=[GradientAccumulation(micro_batch=2)]).fit(OfAttribute([jagged]))
