"""LightningModules in the shapes of public repositories: each does in windows and in split batches what the table says."""

import pytest
from real_modules.structured import graphs_of
from real_modules.table import Exact, How, Row, holds, measure, rows

CASES = [pytest.param(row, how, id=f"{row.name.replace(' ', '_')}-{how}") for row in rows() for how in ("windows", "split")]


def test_each_module_is_named_once() -> None:
    assert len({row.name for row in rows()}) == len(rows()) >= 70


@pytest.mark.some_cases(12, 40)
@pytest.mark.parametrize(("row", "how"), CASES)
def test_a_real_module_does_what_it_should(row: Row, how: How) -> None:
    expected = row.expected(how)
    outcome = measure(row, how, expected.argument if isinstance(expected, Exact) else None)
    assert holds(row, how, outcome), f"{outcome}, not {expected}"


def test_windows_of_packed_graphs_are_proven_by_split() -> None:
    row = next(row for row in rows() if row.name == "energies forces and bonds")
    assert isinstance(measure(row, "windows", {"split": graphs_of}), Exact)
