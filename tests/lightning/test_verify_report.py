"""`verify` reads data of every kind, says what is wrong with it, and reports in a terminal, a pipe, a figure, a command."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.demos.boring_classes import BoringModel, ManualOptimBoringModel
from support import Language, Scalar, loader, pad, sentences, x
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_accum import Tokens, verify
from lightning_accum.__main__ import main
from lightning_accum.randomness import SameForEveryRow, switch_off_dropout
from lightning_accum.splitting.joining import JoiningError, join
from lightning_accum.splitting.trimming import _Alone
from lightning_accum.verification.data import is_batch
from lightning_accum.verification.measure import Difference, tolerance, weights_that_fit
from lightning_accum.verification.report import Break, ParameterDifference, Report
from lightning_accum.verification.watch import narrowest_dtype
from lightning_accum.weighing.graph import read_loss

# --- data ----------------------------------------------------------------------------------------------------------------


@dataclass
class Record:
    x: Tensor
    names: list[str]


class Numbers(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        for number in range(1, 9):
            yield torch.full((2,), float(number), dtype=torch.float64)


LOADERS: dict[str, Any] = {
    "a loader": lambda: loader([x(1), x(2, 3), x(4)]),
    "a loader without a length": lambda: DataLoader(Numbers(), batch_size=None),
    "an iterator": lambda: iter([x(1), x(2, 3), x(4)]),
    "a loader that yields None": lambda: loader([x(1), None, x(2, 3), x(4)]),
    "several loaders": lambda: {"a": loader([x(1), x(2)]), "b": loader([x(3), x(4)])},
}


@pytest.mark.parametrize("kind", LOADERS)
def test_first_batches_of_a_loader_are_the_window(kind: str) -> None:
    class Either(Scalar):
        def loss(self, batch):
            return super().loss(batch["a"] if isinstance(batch, dict) else batch)

    report = verify(Either(), LOADERS[kind](), window=2)
    assert report, str(report)
    assert "2 loader batches" in report.compared


def test_a_batch_is_cut_into_the_batches_of_a_window() -> None:
    report = verify(Scalar(), x(1, 2, 3, 4, 5, 6, 7), window=3)
    assert report
    assert "7 rows" in report.compared


def test_windows_of_split_batches() -> None:
    rows = sentences(12)
    report = verify(Language(), [pad(rows[:6]), pad(rows[6:])], window=2, micro_batch=2)
    assert report
    assert "2 loader batches in 6 micro-batches" in report.compared
    assert verify(Language(), [pad(rows[:6]), pad(rows[6:])], window=2, micro_batch=Tokens(24))


class Bags:
    """Sets of numbers of different sizes, which are collated end to end in an object of their own."""

    def __init__(self, values: Tensor) -> None:
        self.values = values


class BagDataset(Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> Tensor:
        return torch.arange(index + 1, dtype=torch.float64) + index + 0.5


class BagStream(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        return iter([BagDataset()[index] for index in range(6)])


def collate_bags(bags: list[Tensor]) -> Bags:
    return Bags(torch.cat(bags))


def collate_noisy_bags(bags: list[Tensor]) -> Bags:
    return Bags(torch.cat(bags) * torch.rand(()))


class OfBags(Scalar):
    def __init__(self) -> None:
        super().__init__()
        self.w.data.fill_(2.0)

    def training_step(self, batch, batch_idx):
        return (self.w * batch.values).mean()


@pytest.mark.parametrize("dataset", [BagDataset, BagStream])
def test_batches_that_do_not_show_their_rows_are_collated_together_by_their_loader(dataset: Any) -> None:
    report = verify(OfBags(), DataLoader(dataset(), batch_size=2, collate_fn=collate_bags), window=3)
    assert report, str(report)
    everything = collate_bags(list(BagStream())).values
    assert report.losses[0] == pytest.approx(2 * everything.mean().item(), rel=1e-14)
    shuffled = DataLoader(BagDataset(), batch_size=2, shuffle=True, collate_fn=collate_bags)
    assert verify(OfBags(), shuffled, window=3)


def test_what_a_loader_collates_at_random_is_not_taken_for_one_batch() -> None:
    with pytest.raises(JoiningError, match="collate_fn draws random numbers"):
        verify(OfBags(), DataLoader(BagDataset(), batch_size=2, collate_fn=collate_noisy_bags), window=3)


def test_batches_of_a_class_of_their_own_are_joined_and_split_by_functions() -> None:
    bags = [Bags(x(1)), Bags(x(2, 3))]
    with pytest.raises(JoiningError, match=r"join=\.\.\."):
        verify(OfBags(), iter(bags), window=2)
    assert verify(OfBags(), iter(bags), window=2, join=lambda bags: Bags(torch.cat([bag.values for bag in bags])))
    split = {"split": lambda bag, size: [Bags(values) for values in bag.values.split(size)]}
    assert verify(OfBags(), Bags(x(1, 2, 3)), micro_batch=2, **split)


def test_what_is_a_batch() -> None:
    t = torch.zeros(2)
    assert all(map(is_batch, [t, {"x": t}, (t, t), [t, t], Record(t, ["a", "b"])]))
    assert not any(map(is_batch, [None, [{"x": t}], [(t, t)], iter([t]), loader([t])]))


# --- joining -------------------------------------------------------------------------------------------------------------


def test_joined_batches_are_their_rows_in_the_types_of_the_first() -> None:
    batches = [(Record(torch.ones(2, 3), ["a", "b"]), 0.5), (Record(torch.zeros(1, 3), ["c"]), 0.5)]
    joined, padding = join(batches)
    assert isinstance(joined, tuple)
    assert torch.equal(joined[0].x, torch.tensor([[1.0] * 3, [1.0] * 3, [0.0] * 3]))
    assert joined[0].names == ["a", "b", "c"]
    assert joined[1] == 0.5
    assert padding == ""
    assert batches[0][0].names == ["a", "b"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_of_joined_batches_is_what_it_was(side: str) -> None:
    flip = (lambda t: t.flip(1)) if side == "left" else (lambda t: t)
    short = {"input_ids": [[5, 6], [7, 9]], "attention_mask": [[1, 1], [1, 0]], "labels": [[5, 6], [7, -100]]}
    long = {"input_ids": [[1, 2, 3]], "attention_mask": [[1, 1, 1]], "labels": [[1, 2, 3]]}
    batches = [{key: flip(torch.tensor(value)) for key, value in batch.items()} for batch in (short, long)]
    joined, padding = join(batches)
    assert flip(joined["input_ids"]).tolist() == [[5, 6, 9], [7, 9, 9], [1, 2, 3]]  # 9 is what it pads with
    assert flip(joined["attention_mask"]).tolist() == [[1, 1, 0], [1, 0, 0], [1, 1, 1]]
    assert flip(joined["labels"]).tolist() == [[5, 6, -100], [7, -100, -100], [1, 2, 3]]
    assert f"padded on the {side} to 3 columns" in padding


@pytest.mark.parametrize(
    ("batches", "found"),
    [
        ([torch.zeros(2, 3), torch.zeros(2, 4)], "3 and 4 columns, and there is no mask and no labels"),
        ([torch.zeros(2, 3, 5), torch.zeros(2, 4, 6)], "has the shapes"),
        ([{"x": torch.zeros(2, 3)}, {"x": torch.zeros(2, 3), "y": torch.zeros(2)}], "other parts"),
        (
            [[torch.zeros(2), torch.zeros(2), torch.zeros(5)], [torch.zeros(3), torch.zeros(3), torch.ones(5)]],
            "not the same in all",
        ),
    ],
)
def test_batches_that_do_not_join_are_an_error_that_says_how(batches: list[Any], found: str) -> None:
    with pytest.raises(JoiningError, match=found) as error:
        join(batches)
    assert "verify(join=...)" in str(error.value)
    assert "micro_batch=" in str(error.value)


# --- bad input -----------------------------------------------------------------------------------------------------------


class Streaming(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.streams = {"train": iter([1, 2, 3])}


class Lazy(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.LazyLinear(2)


class Untrained(BoringModel):
    def training_step(self, batch, batch_idx):
        return (self.layer(batch) * 0).mean()


class Single(BoringModel):
    def training_step(self, batch, batch_idx):
        return (self.layer(batch).double() @ torch.ones(2, 1, dtype=torch.float32)).mean()


class Recurrent(BoringModel):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(32, 2)

    def training_step(self, batch, batch_idx):
        return self.net(batch.float())[0].mean()


class NoLoss(BoringModel):
    def training_step(self, batch, batch_idx):
        return None


BATCH = torch.randn(8, 32)
WRONG: dict[str, Any] = {
    "nothing to compare": (BoringModel, BATCH, {}, "window=<loader batches> or micro_batch=<samples>"),
    "a window of one": (BoringModel, BATCH, {"window": 1}, "nothing to compare"),
    "a window of tokens": (BoringModel, BATCH, {"window": Tokens(8)}, "a number of loader batches"),
    "auto": (BoringModel, BATCH, {"micro_batch": "auto"}, "Pass a number of samples"),
    "the whole batch": (BoringModel, BATCH, {"micro_batch": 8}, "batch of 8 rows is one micro-batch"),
    "a batch that is too small": (BoringModel, BATCH[:2], {"window": 3}, "it has 2 rows"),
    "too few batches": (BoringModel, [[BATCH]] and iter([BATCH]), {"window": 3}, "needs 3 batches, but there is 1"),
    "manual optimization": (ManualOptimBoringModel, BATCH, {"micro_batch": 2}, "automatic_optimization=False"),
    "a module with an iterator": (Streaming, BATCH, {"micro_batch": 2}, r"streams\['train'\] is an iterator \(list_iterator\)"),
    "a module without shapes": (Lazy, BATCH, {"micro_batch": 2}, "^layer.(weight|bias) has no shape yet"),
    "a loss that depends on nothing": (Untrained, BATCH, {"micro_batch": 2}, "The full batch has no gradient: training_step"),
    "a module of one type": (Single, BATCH, {"micro_batch": 2}, 'precision="32-true"'),
    "a recurrent module of one type": (Recurrent, BATCH, {"micro_batch": 2}, 'precision="32-true"'),
    "no module": (lambda: nn.Linear(2, 2), BATCH, {"micro_batch": 2}, "takes a LightningModule"),
    "no data": (pl.LightningModule, None, {"window": 2}, "Pass data=<a batch, a loader or a"),
    "an argument of the policy": (BoringModel, BATCH, {"micro_batch": 2, "weight": "auo"}, "weight='auo'"),
    "no loss": (NoLoss, BATCH, {"micro_batch": 2}, "training_step returned no loss"),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_verified_is_an_error_that_says_why(name: str) -> None:
    make, data, how, message = WRONG[name]
    with pytest.raises(MisconfigurationException, match=message):
        verify(make(), data, **how)


def test_arguments_that_do_not_exist_are_refused() -> None:
    with pytest.raises(TypeError, match="wieght"):
        verify(BoringModel(), BATCH, micro_batch=2, wieght="auto")


# --- the parts -----------------------------------------------------------------------------------------------------------


def test_differences_are_relative_and_nearly_nothing_is_measured_by_what_is_typical() -> None:
    full = {"a": torch.tensor([3.0, 4.0]).double(), "b": torch.tensor([1e-18]).double()}
    window = {"a": torch.tensor([3.0, 3.5]).double(), "b": torch.tensor([-1e-18]).double()}
    difference = Difference.between(window, full)
    assert difference.overall == difference.by_name["a"] == 0.1
    assert difference.by_name["b"] < 1e-15
    assert Difference.between({"a": torch.tensor([math.nan])}, {"a": torch.tensor([1.0])}).largest == math.inf
    assert Difference.between({"a": torch.ones(1)}, {"a": torch.zeros(1)}).largest == math.inf


def test_tolerance_follows_the_narrowest_type() -> None:
    assert tolerance(torch.float64, 1e-11) == 1e-12
    assert tolerance(torch.float32, 0.0) == 2**-19
    assert tolerance(torch.float32, 1e-5) == 4e-5
    assert tolerance(torch.float32, 1.0) < 1e-3
    w = torch.ones(3, dtype=torch.float64, requires_grad=True)
    assert narrowest_dtype((w * 2).mean()) == torch.float64
    assert narrowest_dtype((w.float() * 2).double().mean()) == torch.float32
    assert narrowest_dtype((w.to(torch.bfloat16) * 2).double().mean()) == torch.bfloat16


def test_weights_that_fit_are_found_or_shown_to_be_none() -> None:
    torch.manual_seed(0)
    pieces = torch.randn(20, 3, dtype=torch.float64)
    mean = weights_that_fit(pieces, pieces @ torch.tensor([0.5, 0.2, 0.3]).double())
    assert mean.weights.tolist() == pytest.approx([0.5, 0.2, 0.3])
    assert max(mean.left, mean.left_of_means) < 1e-7
    sums = weights_that_fit(pieces, pieces.sum(1))
    assert sums.weights.tolist() == pytest.approx([1.0, 1.0, 1.0])
    assert sums.left < 1e-7
    assert sums.left_of_means > 0.1
    assert weights_that_fit(pieces, torch.randn(20, dtype=torch.float64)).left > 0.1
    assert len(weights_that_fit(torch.ones(1, 2).double(), torch.ones(1).double()).weights) == 0  # many would do
    pieces[:, 1] = 0
    assert weights_that_fit(pieces, pieces[:, 0]).weights.tolist() == pytest.approx([1.0, 0.0, 0.0])


@pytest.mark.parametrize(
    "draw",
    [
        lambda like: torch.rand(like.shape),
        lambda like: torch.randn(*like.shape, dtype=torch.float64),
        lambda like: torch.randint(0, 99, like.shape),
        torch.randn_like,
        torch.rand_like,
        lambda like: torch.randint_like(like, 0, 99),
        lambda like: torch.empty_like(like).normal_(1, 2),
        lambda like: torch.empty_like(like).exponential_(),
        lambda like: torch.bernoulli(torch.full_like(like, 0.5)),
        lambda like: torch.normal(like * 0, 1.0),
        lambda like: torch.distributions.Gumbel(torch.zeros(like.shape), 1.0).sample(),
        lambda like: nn.functional.gumbel_softmax(torch.zeros_like(like), dim=1),
        lambda like: nn.functional.dropout(torch.ones_like(like), 0.5),
    ],
)
def test_noise_of_a_row_does_not_depend_on_the_number_of_rows(draw: Any) -> None:
    state = torch.get_rng_state()
    mode = SameForEveryRow()
    with mode:
        many = [draw(torch.zeros(6, 40)) for _ in range(2)]
        mode.restart()
        few = [draw(torch.zeros(2, 40)) for _ in range(2)]
    for a, b in zip(many, few, strict=True):
        assert torch.equal(a[:2], b)
        assert torch.equal(a, a[:1].expand_as(a))
        assert a[0].unique().numel() > 1
    assert not torch.equal(many[0], many[1])  # each draw is another
    assert torch.equal(torch.get_rng_state(), state)
    assert mode.found


@pytest.mark.parametrize("mode", [SameForEveryRow, partial(_Alone, ())])
def test_a_number_that_a_graph_has_saved_can_be_read_while_a_module_is_watched(mode: Any) -> None:
    """torch hands the bare 12 to `item`, as in what reads the weight of a loss that training_step logs."""
    x = torch.ones(2, requires_grad=True)
    with mode():
        saved = (x.sum() / 12).grad_fn._saved_other
        assert (saved.item(), float(saved.detach().double() / 5)) == (12, 2.4)
        assert read_loss((x**2).sum() / 2).weight == 2


def test_dropout_is_found_wherever_its_probability_is_kept() -> None:
    transformers = pytest.importorskip("transformers")
    layer = nn.TransformerEncoderLayer(8, 2, 8, dropout=0.1)
    assert len(switch_off_dropout(layer)) == 4
    assert layer.self_attn.dropout == layer.dropout1.p == 0.0
    assert switch_off_dropout(nn.LSTM(2, 2, 2, dropout=0.3)) == ["dropout"]
    config = transformers.BertConfig(hidden_size=8, num_hidden_layers=1, num_attention_heads=1, intermediate_size=8, vocab_size=9)
    model = transformers.BertModel(config)
    switch_off_dropout(model)
    assert not switch_off_dropout(model)
    assert model.config.attention_probs_dropout_prob == 0.0
    tokens = torch.arange(8)[None]
    assert torch.equal(model.train()(tokens)[0], model(tokens)[0])


# --- the report ----------------------------------------------------------------------------------------------------------

BROKEN = Report(
    module="Net",
    compared="One step.",
    is_equal=False,
    gradient=0.3,
    update=0.25,
    losses=(1.5, 1.25),
    tolerance=1e-12,
    tolerance_reason="the loss computes in float64",
    parameters=[ParameterDifference(f"layer.{index}[bold]", 0.3 / 10**index, 0.0) for index in range(14)],
    weight="cross entropy",
    breaks=[Break("BatchNorm", "It looks at [the] batch.", 0.3, 1e-16, "Do [this].")],
    notes=["A note."],
)


def test_report_as_text() -> None:
    text = str(BROKEN)
    assert repr(BROKEN) == text
    assert max(map(len, text.splitlines())) <= 100
    for expected in (
        "layer.9[bold]",
        "4 more that are closer",
        "3.0e-10",
        "differs by 0.3 with it, by 1.0e-16 without",
        "1e-12 (the loss computes in float64)",
        "- A note.",
    ):
        assert expected in text
    assert "layer.10" not in text
    assert text.index("Not equal: Net") < text.index("BatchNorm: ") < text.index("To mend it: ") < text.index("all parameters")
    assert not BROKEN


def test_report_is_drawn(tmp_path: Path) -> None:
    (axes,) = BROKEN.plot(tmp_path / "figure.png").axes
    assert (tmp_path / "figure.png").stat().st_size > 10_000
    labels = [label.get_text() for label in axes.get_yticklabels()]
    assert (labels[0], labels[1], labels[-1]) == ("all parameters", "layer.0[bold]", "BatchNorm, with and without it")


def test_drawing_without_matplotlib_is_an_error_that_says_so(monkeypatch) -> None:
    monkeypatch.setattr("lightning_accum.verification.report.find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"lightning-accum\[demo\]"):
        BROKEN.plot()


# --- the command ---------------------------------------------------------------------------------------------------------

PROJECT = """
import torch
from lightning.pytorch.demos.boring_classes import BoringModel, BoringDataModule, RandomDataset

class Good(BoringModel):
    pass

class Bad(BoringModel):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx)["loss"] * (1 + batch_idx)

class Wide(BoringModel):
    def __init__(self, width):
        super().__init__()

def wide():
    return Wide(3)

class Data(BoringDataModule):
    def train_dataloader(self):
        return torch.utils.data.DataLoader(self.random_train, batch_size=8)

batch = torch.randn(8, 32)

def count(batch):
    return batch.numel()

class Bag:
    def __init__(self, values):
        self.values = values

bags = iter([Bag(torch.randn(2, 32)), Bag(torch.randn(3, 32))])

def join_bags(bags):
    return Bag(torch.cat([bag.values for bag in bags]))

class OfBags(BoringModel):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch.values, batch_idx)
"""


OF_BATCH = ["--data", "project:batch"]
OF_BAGS = ["--data", "project:bags", "--precision", "32-true"]


@pytest.mark.parametrize(
    ("arguments", "status", "text"),
    [
        (["project:Good", "--data", "project:Data", "--micro-batch", "4"], 0, "Equal: Good"),
        (["project:Good", "--window", "4"], 0, "4 loader batches"),
        (["project:wide", "--data", "project:batch", "--micro-batch", "4", "--precision", "32-true"], 0, "float32"),
        (["project:Bad", "--data", "project:Data", "--window", "2"], 1, "batch_idx: training_step reads batch_idx"),
        (["project:Good", "--data", "project:Data"], 2, "--window or --micro-batch"),
        (["project:Good", "--data", "project:Data", "--micro-batch", "8"], 1, "verify(micro_batch=8) has nothing to compare"),
        (["project:Good", "--data", "project:batch", "--window", "9"], 1, "micro_batch= instead of window="),
        (["project:Good", "--data", "project:Data", "--micro-batch", "Tokens(128)"], 0, "2 micro-batches"),
        (["project:Good", "--window", "2", "--precision", "half"], 2, "Precision 'half' is invalid"),
        (["project:Good", "--window", "2", "--accelerator", "abacus"], 2, "invalid accelerator name"),
        (["project:Good", "--window", "2", "--weight", "tokens"], 2, "--weight tokens: expected auto, equal or"),
        (["project:Good", "--window", "2", "--weight", "project:count"], 0, "weight: count"),
        (["project:Good", "--micro-batch", "2", "--weight", "lightning_accum:SampleCount", *OF_BATCH], 0, "SampleCount"),
        (["project:Good", "--window", "2", "--data", "project:bags"], 1, "verify(join=...) takes a function join(batches)"),
        (["project:OfBags", "--window", "2", "--join", "project:join_bags", *OF_BAGS], 0, "Equal: OfBags"),
        (
            ["project:OfBags", "--window", "2", "--join", "project:join_bags", *OF_BAGS[:2]],
            1,
            "does not run in precision='64-true'",
        ),
        (["project:Wide", "--window", "2"], 2, "project:Wide is called without arguments, but: missing a required argument"),
        (["project:Gone", "--window", "2"], 2, "'project' has no 'Gone'"),
        (["projekt:Good", "--window", "2"], 2, "no module 'projekt'"),
        (["project", "--window", "2"], 2, "package.module:name"),
    ],
)
def test_exit_status_is_0_only_where_equality_holds(arguments: list[str], status: int, text: str, capsys, monkeypatch) -> None:
    Path("project.py").write_text(PROJECT)
    monkeypatch.syspath_prepend(str(Path.cwd()))
    monkeypatch.delitem(sys.modules, "project", raising=False)
    assert main(["verify", *arguments]) == status
    captured = capsys.readouterr()
    assert text in captured.out + captured.err
    monkeypatch.delitem(sys.modules, "project", raising=False)


WRONG_OPTIONS: dict[str, Any] = {
    "no tokens": (
        ["verify", "project:Good", "--micro-batch", "0tokens"],
        "argument --micro-batch: '0' is not a whole number from 1",
    ),
    "words": (["verify", "project:Good", "--micro-batch", "few"], "argument --micro-batch: 'few' is not a whole number from 1"),
    "a folder that is not there": (["verify", "project:Good", "--figure", "no/where.png"], "there is no folder 'no'"),
    "a figure of no format": (["verify", "project:Good", "--figure", "figure.doc"], "'figure.doc' has to end in .png"),
    "no module": (["verify"], "MODULE"),
    "no command": ([], "COMMAND"),
}


@pytest.mark.parametrize("name", WRONG_OPTIONS)
def test_wrong_options_are_usage_errors(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments, message = WRONG_OPTIONS[name]
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == 2
    assert message in capsys.readouterr().err


def test_the_command_says_its_version(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        main(["--version"])
    assert end.value.code == 0
    assert capsys.readouterr().out == f"lightning-accum {version('lightning-accum')}\n"


@pytest.mark.exhaustive
def test_command_in_a_process_of_its_own_draws_and_finds_the_users_package() -> None:
    Path("project.py").write_text(PROJECT)
    command = [sys.executable, "-m", "lightning_accum", "verify", "project:Good", "--data", "project:Data", "--micro-batch", "4"]
    run = subprocess.run([*command, "--figure", "figure.png"], capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout.startswith("Equal: Good takes the same optimizer step")
    assert "\x1b" not in run.stdout
    assert Path("figure.png").exists()
    assert not Path("lightning_logs").exists()
