"""The demo: its corpus, its order, its figures, and the command around them."""

from __future__ import annotations

import csv
import json
import math
import multiprocessing
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn import functional as F

import lightning_accum.demo.run as run_module
import lightning_accum.demo.train as train_module
from lightning_accum.__main__ import main
from lightning_accum.demo.corpus import CorpusError, docstrings, sample_corpus
from lightning_accum.demo.data import collate, count_targets, loader_of
from lightning_accum.demo.figure import draw, largest_difference
from lightning_accum.demo.mix import FULL_BATCH, GLOBAL_BATCH, LONGEST, MIXES, SAMPLES, Mix, can_run
from lightning_accum.demo.model import new_model
from lightning_accum.demo.run import EXACT, Row, deviation, table, write_csv
from lightning_accum.demo.train import mean_loss, train, train_in_processes
from lightning_accum.verification.processes import RanksFailedError

TEXTS = [bytes([65 + index % 26]) * (1 + 7 * index % 23) for index in range(40)]
"""A window of 32 and a tail of 8, of 1 to 23 bytes."""

ROWS = [
    Row("full batch", "1 x 1 x 32", 3.25, 0.0, 0.0, 12, 12, 12_345.6),
    Row("lightning_accum", "2 x 4 x 4 FSDP2", 3.25, 3.5e-16, 2.5e-15, 12, 12, 123_456.7),
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


@pytest.mark.exhaustive
def test_the_corpus_is_the_same_at_every_call_and_its_lengths_differ_widely():
    few = Path(json.__file__).parent
    assert sample_corpus(20, LONGEST, few) == sample_corpus(20, LONGEST, few)
    corpus = sample_corpus(SAMPLES, LONGEST)
    lengths = sorted(map(len, corpus))
    assert len(corpus) == SAMPLES
    assert lengths[-1] == LONGEST
    assert lengths[SAMPLES // 10] < LONGEST / 5


# --- the order ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mix", MIXES, ids=str)
def test_every_mix_has_the_samples_of_a_seeded_permutation_in_every_window(mix: Mix):
    texts = [bytes([1 + index]) for index in range(SAMPLES)]  # each is known by its byte
    windows: list[list[int]] = []
    expected: list[list[int]] = []
    for epoch in range(2):
        order = torch.randperm(SAMPLES, generator=torch.Generator().manual_seed(epoch)).tolist()
        expected += [sorted(order[start : start + GLOBAL_BATCH]) for start in range(0, SAMPLES, GLOBAL_BATCH)]
        shares = []
        for rank in range(mix.ranks):
            loader = loader_of(texts, mix.batch)
            loader.sampler.deal(mix.ranks, rank)
            loader.sampler.set_epoch(epoch)
            shares.append([[byte - 1 for byte in batch["input_ids"][:, 1].tolist()] for batch in loader])
        assert mix.engine != "Lightning" or len({len(share) for share in shares}) == 1, "it hangs where ranks end unevenly"
        longest = max(map(len, shares))
        for start in range(0, longest, mix.window):
            windows.append(sorted(sample for share in shares for batch in share[start : start + mix.window] for sample in batch))
    assert mix.ranks * mix.window * mix.batch == GLOBAL_BATCH
    assert windows == expected
    assert len(windows) == mix.steps(SAMPLES, epochs=2)
    assert len(windows[-1]) < GLOBAL_BATCH, "the demo is to show a tail"


def test_eight_mixes_of_1_2_and_4_ranks_of_ddp_and_fsdp2_and_a_split_batch_are_compared():
    mine = [mix for mix in MIXES if mix.engine == "lightning_accum"]
    assert len(set(mine)) == 8
    assert {mix.ranks for mix in mine} == {1, 2, 4}
    assert {(mix.ranks, mix.parallelism) for mix in mine if mix.ranks > 1} == {(r, by) for r in (2, 4) for by in ("DDP", "FSDP2")}
    assert any(mix.micro_batch for mix in mine)
    assert [mix.ranks for mix in MIXES if mix.engine == "Lightning"] == [1, 2]


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
    assert len(mixes) == 5
    trained = {mix: train(mix, TEXTS, 2) for mix in mixes}
    full = trained[FULL_BATCH]
    initial = {name: parameter.detach() for name, parameter in new_model().named_parameters()}
    for mix, run in trained.items():
        away = deviation(run.parameters, full.parameters, initial)
        assert away > 1e-3 if mix.engine == "Lightning" else away < EXACT
        assert (run.optimizer_steps, run.scheduler_steps, len(run.losses)) == (4, 4, 4) == (mix.steps(len(TEXTS), 2),) * 3
        if mix.engine == "lightning_accum":
            assert run.losses == pytest.approx(full.losses, rel=1e-12)
            assert run.final_loss == pytest.approx(full.final_loss, rel=1e-12)
    order = torch.randperm(len(TEXTS), generator=torch.Generator().manual_seed(0)).tolist()
    by_hand = mean_loss(new_model(), [TEXTS[index] for index in order[:GLOBAL_BATCH]])
    assert full.losses[0] == pytest.approx(by_hand, rel=1e-12)


@pytest.fixture
def _with_these_texts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "sample_corpus", lambda samples, longest: TEXTS)


@pytest.mark.exhaustive
@pytest.mark.usefixtures("_with_these_texts")
def test_the_demo_trains_in_processes_and_writes_its_files(tmp_path: Path, capsys: pytest.CaptureFixture[str]):
    mixes = [FULL_BATCH, *(mix for mix in MIXES if mix.engine == "lightning_accum" and mix.ranks > 1)]
    assert run_module.run_demo(1, tmp_path, mixes) == 0
    captured = capsys.readouterr()
    mixes = [mix for mix in mixes if can_run(mix)]
    assert all(str(mix) in captured.out for mix in mixes)
    assert (tmp_path / "loss_curves.png").read_bytes().startswith(b"\x89PNG")
    rows = list(csv.DictReader((tmp_path / "runs.csv").open()))
    assert [row["optimizer_steps"] for row in rows] == ["2"] * len(mixes)
    assert all(float(row["loss_deviation"]) < EXACT for row in rows)
    assert all(float(row["deviation"]) < EXACT for row in rows)


@pytest.mark.usefixtures("_with_these_texts")
def test_mixes_that_this_torch_cannot_run_are_left_out_and_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.setattr(torch, "__version__", "2.6.0")
    trained: list[Mix] = []

    def train_none(mixes: list[Mix], *arguments: object) -> None:
        trained.extend(mixes)
        raise RanksFailedError

    monkeypatch.setattr(run_module, "_train_all", train_none)
    run_module.run_demo(1, tmp_path, MIXES)
    assert trained == [mix for mix in MIXES if not mix.is_sharded]
    message = " ".join(capsys.readouterr().err.split())
    assert "Left out, since torch shards on a CPU from 2.9 on: 2 x 4 x 4 FSDP2, 4 x 2 x 4 FSDP2." in message


@pytest.mark.exhaustive
def test_a_rank_that_fails_ends_the_others_and_shows_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    texts = [b"longer than the model can see" * 20, *TEXTS[1:]]
    monkeypatch.setattr(run_module, "sample_corpus", lambda samples, longest: texts)
    assert run_module.run_demo(1, tmp_path, [Mix("lightning_accum", ranks=2, window=16, batch=1)]) == 1
    errors = capsys.readouterr().err
    assert "The run lightning_accum 2 x 16 x 1 DDP failed." in errors
    assert "IndexError" in errors
    assert "On rank " in errors
    assert not multiprocessing.active_children()


@pytest.mark.exhaustive
def test_a_run_that_does_not_end_is_ended_with_all_its_processes(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(train_module, "SECONDS_TO_START", -1)
    monkeypatch.setattr(train_module, "SECONDS_AN_EPOCH", 0)
    with pytest.raises(RanksFailedError, match="within -1 seconds: the ranks wait for each other"):
        train_in_processes(MIXES[-1], TEXTS, 1)
    assert not multiprocessing.active_children()


@pytest.mark.slow
def test_the_whole_demo(tmp_path: Path):
    command = [sys.executable, "-m", "lightning_accum", "demo", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=220)
    assert done.returncode == 0, done.stderr
    rows = list(csv.DictReader((tmp_path / "out" / "runs.csv").open()))
    assert [row["run"] for row in rows] == [mix.shape for mix in MIXES if can_run(mix)]
    for row in rows:
        assert row["optimizer_steps"] == row["scheduler_steps"] == "12"
        for away in (float(row["loss_deviation"]), float(row["deviation"])):
            assert away > 0.01 if row["engine"] == "Lightning" else away < EXACT


# --- the report ---------------------------------------------------------------------------------------------------------


def test_the_table_fits_a_terminal_of_80_columns():
    text = table(ROWS)
    assert "lightning_accum 2 x 4 x 4 FSDP2 3.250000 3.5e-16 2.5e-15 12, 12 123,457" in " ".join(text.split())
    assert max(map(len, text.splitlines())) <= 80


def test_a_run_that_ends_in_nan_is_not_exact():
    start, full = {"a": torch.zeros(2), "b": torch.zeros(2)}, {"a": torch.ones(2), "b": torch.ones(2)}
    broken = {"a": torch.ones(2), "b": torch.tensor([1.0, math.nan])}
    assert deviation(full, full, start) == 0
    assert math.isnan(deviation(broken, full, start))
    assert not Row("lightning_accum", "1 x 8 x 4", math.nan, math.nan, math.nan, 12, 12, 1.0).is_exact
    assert not Row("lightning_accum", "1 x 8 x 4", 3.25, 1e-11, 1e-15, 12, 12, 1.0).is_exact
    assert ROWS[1].is_exact


def test_the_csv_keeps_full_precision(tmp_path: Path):
    write_csv(ROWS, tmp_path / "runs.csv")
    rows = list(csv.DictReader((tmp_path / "runs.csv").open()))
    assert [float(row["tokens_per_second"]) for row in rows] == [12_345.6, 123_456.7]


def test_the_figure_is_drawn_with_exact_zeros_and_with_lightning(tmp_path: Path):
    curves = {mix: [3.0, 2.0, 1.0] for mix in MIXES}
    curves[MIXES[1]] = [3.0, 2.5, 1.125]
    assert largest_difference(curves, "Lightning") == 0.25
    assert largest_difference(curves, "lightning_accum") == 0
    draw(curves, 3, tmp_path / "figure.png")
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
    assert "pip install matplotlib" in capsys.readouterr().err


def test_an_interrupt_exits_with_130(monkeypatch: pytest.MonkeyPatch):
    def interrupted(*arguments: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(run_module, "run_demo", interrupted)
    assert main(["demo"]) == 130
