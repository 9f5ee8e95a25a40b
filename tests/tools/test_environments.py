"""The scripts that test other versions: what they report is what they found, and nothing of the caller's gets in."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from environments import BEGIN, COLUMNS, END, PAGE, Environment, counts, with_row

LABELS = ["newest releases", "lower bounds", "`.ci/constraints.txt`"]


def test_row_of_a_script_is_replaced_and_the_others_stay() -> None:
    readme = f"before\n{BEGIN}\n{END}\nafter\n"
    for label in LABELS:
        readme = with_row(readme, label, ["3.11.7", "2.5.0", 1, 0])
    again = with_row(readme, "lower bounds", ["3.12.0", "2.6.0", 2, 0])
    assert "| lower bounds | 3.12.0 | 2.6.0 | 2 | 0 |" in again
    assert len(again.splitlines()) == len(readme.splitlines())
    for label in ("newest releases", "`.ci/constraints.txt`"):
        assert f"| {label} | 3.11.7 | 2.5.0 | 1 | 0 |" in again
    assert (again[: again.index(BEGIN)], again[again.index(END) :]) == ("before\n", f"{END}\nafter\n")


def test_failures_and_errors_are_counted() -> None:
    suite = '<testsuite tests="10" skipped="2" failures="1" errors="1"></testsuite>'
    assert counts(f"<testsuites>{suite}</testsuites>") == [6, 2, 2]


def test_constraint_of_the_caller_does_not_get_in(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PIP_CONSTRAINT", "PYTHONPATH"):
        monkeypatch.setenv(name, "nowhere")
    code = "import os; print({'PIP_CONSTRAINT', 'PYTHONPATH'} & set(os.environ))"
    assert Environment(Path(sys.prefix)).printed(code) == "set()"


def test_the_page_has_the_table() -> None:
    text = PAGE.read_text(encoding="utf-8")
    _, header, _, *rows = text[text.index(BEGIN) : text.index(END)].splitlines()
    assert header == "| " + " | ".join(COLUMNS) + " |"
    assert {row.split("|")[1].strip() for row in rows} <= set(LABELS)
