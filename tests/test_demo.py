"""The demo: its corpus, its order, its figures, and the command around them."""

from __future__ import annotations

import csv
import math
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch.nn import functional as F

import lightning_accum.demo.run as run_module
from lightning_accum.__main__ import main
from lightning_accum.demo.corpus import CorpusError, docstrings, sample_corpus
from lightning_accum.demo.data import EpochOrder, collate, count_targets
from lightning_accum.demo.figure import draw, largest_difference
from lightning_accum.demo.mix import FULL_BATCH, GLOBAL_BATCH, LONGEST, MIXES, SAMPLES, Mix
from lightning_accum.demo.model import new_model
from lightning_accum.demo.report import Row, deviation, table, write_csv
from lightning_accum.demo.train import mean_loss, train

TEXTS = [bytes([65 + index % 26]) * (1 + 7 * index % 23) for index in range(40)]
"""A window of 32 and a tail of 8, of 1 to 23 bytes."""

ROWS = [
    Row("full batch", "1 x 1 x 32", 3.25, 0.0, 30, 30, 12_345.6),
    Row("lightning_accum", "2 x 8 x 2", 3.25, 2.5e-14, 30, 30, 23_456.7),
]


# --- the corpus ---------------------------------------------------------------------------------------------------------


def test_docstrings_of_modules_classes_and_functions_are_found_once_and_other_packages_are_not(tmp_path: Path):
    (tmp_path / "a.py").write_text('"""Module."""\nclass A:\n    """Class."""\n    async def f(self):\n        """Function."""\n')
    (tmp_path / "b.py").write_text('"""Module."""\ntext = "no docstring"\ndef g(): pass\n')
    (tmp_path / "broken.py").write_text('"""Lost."""\nprint "Python 2"\n')
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "c.py").write_text('"""Not the standard library."""')
    assert docstrings(tmp_path) == ["Module.", "Class.", "Function."]


def test_a_python_without_its_source_is_refused_by_name(tmp_path: Path):
    with pytest.raises(CorpusError, match="without its source files"):
        sample_corpus(10, LONGEST, tmp_path)


def test_the_corpus_is_the_same_at_every_call_and_its_lengths_differ_widely():
    corpus = sample_corpus(SAMPLES, LONGEST)
    lengths = sorted(map(len, corpus))
    assert corpus == sample_corpus(SAMPLES, LONGEST)
    assert len(corpus) == SAMPLES
    assert lengths[-1] == LONGEST
    assert lengths[SAMPLES // 10] < LONGEST / 5


# --- the order ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mix", MIXES, ids=lambda mix: f"{mix.engine} {mix.shape}")
def test_every_mix_has_the_full_batchs_samples_in_every_window(mix: Mix):
    def windows(mix: Mix) -> list[list[int]]:
        result: list[list[int]] = []
        for epoch in range(2):
            shares = []
            for rank in range(mix.ranks):
                order = EpochOrder(SAMPLES, rank, mix.ranks)
                order.set_epoch(epoch)
                shares.append(list(order))
                assert len(shares[-1]) == len(order)
            assert len({len(share) for share in shares}) == 1, "ranks that end unevenly would hang"
            size = mix.window * mix.batch
            result += [
                sorted(sample for share in shares for sample in share[start : start + size])
                for start in range(0, len(shares[0]), size)
            ]
        return result

    assert mix.ranks * mix.window * mix.batch == GLOBAL_BATCH
    assert windows(mix) == windows(FULL_BATCH)
    assert len(windows(mix)) == mix.steps(SAMPLES, epochs=2)
    assert len(windows(mix)[-1]) < GLOBAL_BATCH, "the demo is to show a tail"


def test_the_order_differs_from_epoch_to_epoch():
    order = EpochOrder(100, rank=0, ranks=1)
    first = list(order)
    order.set_epoch(1)
    assert sorted(order) == sorted(first)
    assert list(order) != first


def test_padding_changes_no_loss():
    model = new_model()
    model.log = lambda *args, **kwargs: None
    texts = TEXTS[:4]
    alone = [collate([text]) for text in texts]
    counts = [int(count_targets(batch["labels"])) for batch in alone]
    assert counts == [len(text) + 1 for text in texts]
    losses = [model.training_step(batch, 0).item() * count for batch, count in zip(alone, counts, strict=True)]
    together = model.training_step(collate(texts), 0).item()
    assert together == pytest.approx(sum(losses) / sum(counts), rel=1e-13)


def test_mean_loss_is_the_mean_over_every_byte():
    model = new_model()
    total = 0.0
    for text in TEXTS:
        ids = torch.tensor([[0, *text, 0]])
        total -= F.log_softmax(model(ids)[0, :-1], -1).gather(1, ids[0, 1:, None]).sum().item()
    assert mean_loss(model, TEXTS) == pytest.approx(total / sum(len(text) + 1 for text in TEXTS), rel=1e-13)


# --- the runs -----------------------------------------------------------------------------------------------------------


def test_one_process_runs_end_at_the_full_batch_with_this_package_and_elsewhere_without():
    mixes = [mix for mix in MIXES if mix.ranks == 1]
    trained = {mix: train(mix, TEXTS, 2, lambda step, loss: None) for mix in mixes}
    full = trained[FULL_BATCH]
    initial = {name: parameter.detach() for name, parameter in new_model().named_parameters()}
    for mix, run in trained.items():
        away = deviation(run.parameters, full.parameters, initial)
        # Adam divides by the gradient's size, so rounding can grow by some orders of magnitude
        assert away > 1e-3 if mix.engine == "Lightning" else away < 1e-10
        assert (run.optimizer_steps, run.scheduler_steps, len(run.losses)) == (4, 4, 4) == (mix.steps(len(TEXTS), 2),) * 3
        if mix.engine == "lightning_accum":
            assert run.losses == pytest.approx(full.losses, rel=1e-12)
            assert run.final_loss == pytest.approx(full.final_loss, rel=1e-12)
    by_hand = mean_loss(new_model(), [TEXTS[index] for index in list(EpochOrder(len(TEXTS), 0, 1))[:GLOBAL_BATCH]])
    assert full.losses[0] == pytest.approx(by_hand, rel=1e-12)


@pytest.fixture
def _with_these_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "sample_corpus", lambda samples, longest: TEXTS)


@pytest.mark.usefixtures("_with_these_texts")
def test_the_demo_trains_in_processes_and_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    mixes = [FULL_BATCH, Mix("lightning_accum", ranks=1, window=8, batch=4)]
    assert run_module.run_demo(1, tmp_path, mixes) == 0
    assert "lightning_accum 1 x 8 x 4" in capsys.readouterr().out
    assert (tmp_path / "loss_curves.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((tmp_path / "runs.csv").open()))
    assert [row["optimizer_steps"] for row in rows] == ["2", "2"]
    assert float(rows[1]["deviation"]) < 1e-10


@pytest.mark.usefixtures("_with_these_texts")
def test_a_failing_run_shows_why_and_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    failing = [sys.executable, "-c", "raise ValueError('this is why')"]
    monkeypatch.setattr(run_module, "command", lambda *arguments: failing)
    assert run_module.run_demo(1, tmp_path, [FULL_BATCH]) == 1
    errors = capsys.readouterr().err
    assert "full batch 1 x 1 x 32 failed with status 1" in errors
    assert "ValueError: this is why" in errors


@pytest.mark.usefixtures("_with_these_texts")
def test_a_run_that_does_not_end_is_ended_with_all_its_processes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    sleeps = (
        "import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); time.sleep(600)"
    )
    monkeypatch.setattr(run_module, "command", lambda *arguments: [sys.executable, "-c", sleeps])
    monkeypatch.setattr(run_module, "SECONDS_TO_START", 1)
    monkeypatch.setattr(run_module, "SECONDS_AN_EPOCH", 1)
    assert run_module.run_demo(1, tmp_path, [FULL_BATCH]) == 1  # the pipe is closed, so the second process ended too
    assert "did not end in 2 s" in capsys.readouterr().err


@pytest.mark.slow
def test_the_whole_demo(tmp_path: Path):
    command = [sys.executable, "-m", "lightning_accum", "demo", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "out" / "runs.csv").open()))
    assert [row["run"] for row in rows] == [mix.shape for mix in MIXES]
    for row in rows:
        assert row["optimizer_steps"] == row["scheduler_steps"] == "30"
        away = float(row["deviation"])
        assert away > 0.01 if row["engine"] == "Lightning" else away < 1e-10


# --- the report ---------------------------------------------------------------------------------------------------------


def test_the_table_fits_a_terminal_of_80_columns():
    console = Console(width=80)
    with console.capture() as capture:
        console.print(table(ROWS))
    text = capture.get()
    assert "lightning_accum 2 x 8 x 2 3.250000 2.5e-14 30 30 23,457" in " ".join(text.split())
    assert "…" not in text


def test_a_run_that_ends_in_nan_is_not_exact():
    start, full = {"a": torch.zeros(2), "b": torch.zeros(2)}, {"a": torch.ones(2), "b": torch.ones(2)}
    broken = {"a": torch.ones(2), "b": torch.tensor([1.0, math.nan])}
    assert deviation(full, full, start) == 0
    assert math.isnan(deviation(broken, full, start))


def test_the_csv_keeps_full_precision(tmp_path: Path):
    write_csv(ROWS, tmp_path / "runs.csv")
    rows = list(csv.DictReader((tmp_path / "runs.csv").open()))
    assert [float(row["tokens_per_second"]) for row in rows] == [12_345.6, 23_456.7]


def test_the_figure_is_drawn_with_exact_zeros_and_with_lightning(tmp_path: Path):
    curves = {mix: [3.0, 2.0, 1.0] for mix in MIXES}
    curves[MIXES[1]] = [3.0, 2.25, 1.125]
    assert largest_difference(curves, "Lightning") == 0.25
    assert largest_difference(curves, "lightning_accum") == 0
    draw(curves, tmp_path / "figure.png")
    assert (tmp_path / "figure.png").stat().st_size > 10_000


# --- the command --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", [["--help"], ["demo", "--help"]])
def test_help_exits_with_0(arguments: list[str], capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit, match="0"):
        main(arguments)
    assert "demo" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "COMMAND"),
        (["demo", "--epochs", "0"], "'0' is not a whole number from 1"),
        (["demo", "--epochs", "two"], "'two' is not a whole number from 1"),
        (["demo", "--out", "a_file"], "'a_file' cannot be a folder"),
        (["demo", "--nonsense"], "--nonsense"),
    ],
)
def test_wrong_arguments_exit_with_2_and_name_the_argument(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    Path("a_file").touch()
    with pytest.raises(SystemExit, match="2"):
        main(arguments)
    assert message in capsys.readouterr().err


def test_without_the_extra_the_command_says_what_to_install(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr("lightning_accum.__main__.find_spec", lambda name: None)
    assert main(["demo"]) == 1
    assert "pip install 'lightning-accum[demo]'" in capsys.readouterr().err


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch):
    def interrupted(*arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "run_demo", interrupted)
    assert main(["demo"]) == 130
