"""What the package raises about a user's program has one base, and a name to be caught by; so have its warnings."""

import pickle
import re
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest
from lightning.fabric.utilities.exceptions import MisconfigurationException

import lightning_accum
from lightning_accum import AccumulationError, GradientAccumulation, Tokens

OTHERS = {  # what is raised, and no error about a user's program
    "ArgumentTypeError": "argparse's, of which it makes its own message",
    "AttributeError": "a module has no such name",
    "CannotCheckError": "caught: why the check has no answer, which is printed",
    "GathersError": "caught, as CannotCheckError is",
    "ImportError": "an extra is not installed",
    "ModuleNotFoundError": "an extra is not installed",
    "NotImplementedError": "of a method that derived classes have",
    "RuntimeError": "caught two lines on, or by what runs a trial: it is reported in words",
    "SIGTERMException": "Lightning's, for a signal",
    "StepTakenError": "caught: ends a fit of verify after its step",
    "UnsuitableRowsError": "caught, as CannotCheckError is",
}
ROOT = Path(lightning_accum.__file__).parent
FILES = {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in sorted(ROOT.rglob("*.py"))}
RAISED = re.compile(r"\b(?:raise|raise \w+ or) (?:\w+\.)*(_?[A-Z]\w*)|-> (?:\w+\.)*(\w+Error)\b")
"""A class that is raised, or what a function makes that is."""


def kinds_of(error: type[AccumulationError]) -> Iterator[type[AccumulationError]]:
    yield error
    for derived in error.__subclasses__():
        yield from kinds_of(derived)


@pytest.fixture(scope="module")
def kinds() -> set[type[AccumulationError]]:
    """Those of all files but two: one needs an extra, the other is for programs that import Lightning's other package."""
    for file in FILES.keys() - {"ray.py", "pytorch_lightning.py"}:
        import_module(".".join(["lightning_accum", *Path(file).with_suffix("").parts]).removesuffix(".__init__"))
    return set(kinds_of(AccumulationError))


def test_every_error_about_a_program_is_of_the_base(kinds: set[type[AccumulationError]]) -> None:
    seen = [(file, "".join(names)) for file, text in FILES.items() for names in RAISED.findall(text)]
    assert len(seen) > 200
    others = [(file, name) for file, name in seen if name not in {kind.__name__ for kind in kinds}]
    assert {name for _, name in others} == set(OTHERS)  # none too many
    of_trials = {file for file, name in others if name == "RuntimeError"}
    assert of_trials == {"splitting/trimming.py"}


def test_every_error_goes_from_process_to_process_with_its_message(kinds: set[type[AccumulationError]]) -> None:
    assert len(kinds) > 13
    for kind in kinds:
        error = kind("seen")
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), str(again), vars(again)) == (kind, str(error), vars(error))
        assert "seen" in str(again)


def test_public_errors_are_of_the_base_and_of_a_kind_of_pythons_or_lightnings() -> None:
    for name in ("DoesNotAddUpError", "UnreadableLossError", "UnsplittableBatchError"):
        assert {AccumulationError, ValueError} <= set(getattr(lightning_accum, name).__mro__), name
    assert {AccumulationError, RuntimeError} <= set(lightning_accum.RowWiseError.__mro__)
    for use, kind in (lambda: GradientAccumulation(2, tail="keep"), MisconfigurationException), (lambda: Tokens(0), ValueError):
        with pytest.raises(AccumulationError) as caught:
            use()
        assert isinstance(caught.value, kind)
