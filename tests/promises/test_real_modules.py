"""LightningModules in the shapes of public repositories: each does in windows and in split batches what the table says.

What falls short of it today is a strict expected failure.
"""

from __future__ import annotations

from typing import Any

import pytest
from real_modules.structured import graphs_of
from real_modules.table import FROM_GOOD_TO_BAD, Exact, How, Row, Silent, Warned, measure, rows, today

CASES: list[tuple[Row, How]] = [(row, how) for row in rows() for how in ("windows", "split")]
SHORT = [(row, how) for row, how in CASES if row.today(how) is not row.expected(how)]


def cases(of: list[tuple[Row, How]], *, fail: bool = False) -> list[Any]:
    """An eighth of them is run, the others are exhaustive; those that fall short are expected to fail, or not."""
    found = []
    for row, how in of:
        marks = [] if CASES.index((row, how)) % 8 == 0 else [pytest.mark.exhaustive]
        if fail and (row, how) in SHORT:
            reason = f"issue 22: {row.today(how)}, not {row.expected(how)}"
            marks.append(pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason))
        found.append(pytest.param(row, how, id=f"{row.name.replace(' ', '_')}-{how}", marks=marks))
    return found


def test_each_module_is_named_once() -> None:
    assert len({row.name for row in rows()}) == len(rows()) >= 70


@pytest.mark.parametrize(("row", "how"), cases(CASES, fail=True))
def test_a_real_module_does_what_it_should(row: Row, how: How) -> None:
    outcome, holds = today(row, how)
    assert holds, f"{outcome}, not {row.expected(how)}"


@pytest.mark.parametrize(("row", "how"), cases(SHORT))
def test_a_real_module_is_no_worse_than_the_table_says(row: Row, how: How) -> None:
    outcome, holds = today(row, how)
    known = row.today(how)
    if not holds:
        assert FROM_GOOD_TO_BAD.index(type(outcome)) <= FROM_GOOD_TO_BAD.index(type(known)), f"{outcome}, not {known}"
        if isinstance(known, Silent | Warned) and type(outcome) is type(known):
            assert outcome.deviation <= 2 * max(known.deviation, 1e-12), f"{outcome}, not {known}"


def test_windows_of_packed_graphs_are_proven_by_split() -> None:
    row = next(row for row in rows() if row.name == "energies forces and bonds")
    assert isinstance(measure(row, "windows", {"split": graphs_of}), Exact)
