"""The docstrings of Python's own standard library: real text, on every machine, of a few to thousands of bytes."""

from __future__ import annotations

import ast
import random
import sysconfig
import warnings
from pathlib import Path

from lightning_accum.errors import AccumulationError

SKIPPED_FOLDERS = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
"""Not the standard library, or not meant to be read by its users."""


class CorpusError(AccumulationError, RuntimeError):
    """The standard library's source is not there, or too little of it."""


def docstrings(folder: Path) -> list[str]:
    """All docstrings below ``folder``, each once, in an order that depends on the files alone. What does not parse has none.

    Example:
        >>> import lightning_accum.demo
        >>> "AdamW" in " ".join(docstrings(Path(lightning_accum.demo.__file__).parent))
        True
    """
    texts: dict[str | None, None] = {}  # a set that keeps its order
    for path in sorted(folder.rglob("*.py")):
        if SKIPPED_FOLDERS.isdisjoint(path.relative_to(folder).parts):
            try:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # old escape sequences in other people's strings
                    tree = ast.parse(path.read_bytes())
            except (OSError, SyntaxError, ValueError):
                continue
            documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
            texts |= {ast.get_docstring(node): None for node in ast.walk(tree) if isinstance(node, documented)}
    return [text for text in texts if text]


def sample_corpus(samples: int, longest: int, folder: Path | None = None) -> list[bytes]:
    """Draw docstrings, the same ones at every call, each cut at ``longest`` bytes; by default those of the standard library.

    Raises:
        CorpusError: there are fewer docstrings than ``samples``.
    """
    folder = Path(sysconfig.get_paths()["stdlib"]) if folder is None else folder
    found = docstrings(folder)
    if len(found) < samples:
        raise CorpusError(
            f"The demo trains on {samples} docstrings of Python's standard library, but {folder} has {len(found)}: this Python"
            " comes without its source files. Run it with one that has them, for example from python.org or conda."
        )
    return [text.encode("utf-8", errors="replace")[:longest] for text in random.Random(0).sample(found, samples)]
