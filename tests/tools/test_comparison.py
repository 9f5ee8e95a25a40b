"""What the comparison with others says of deviations: measured anew, without the times."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

from compare import BEGIN, END, PAGE, measured, table
from compared_sides import SIDES


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("kind", ["adamw", "sgd"])
@pytest.mark.parametrize("processes", [1, 2])
def test_only_this_package_is_the_full_batch(processes: int, kind: str) -> None:
    found = measured(processes, kind)
    for side in SIDES:
        if not side.is_there:
            continue
        deviation = found[side.name]["deviation"]
        assert found[side.name]["steps"] == 12
        if side.is_ours:
            assert deviation < 1e-12
            assert found[side.name]["scheduler steps"] == 12
        elif processes == 2 or ("recipe" not in side.name and "takes" not in side.name):
            assert deviation > 1e-2


def test_the_page_has_the_table_of_this_script() -> None:
    text = PAGE.read_text()
    shown = text[text.index(BEGIN) : text.index(END)]
    header = table({1: {side.name: {"deviation": 0.0, "scheduler steps": 0} for side in SIDES}}).splitlines()[0]
    assert header in shown
    for side in SIDES:
        assert f"| {side.name} |" in shown
