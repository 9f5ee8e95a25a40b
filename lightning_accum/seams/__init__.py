"""Where other libraries are held: what is replaced or relied on that is not for everybody, and whether it is as it was read.

What is missing is an error when a strategy is made. A method of Lightning's that differs from those that were read is named before
training, nothing is then done in its place to save time, and ``loops/watch.py`` looks at every step.
"""

from __future__ import annotations

from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import PackageNotFoundError, metadata
from itertools import groupby

import lightning.pytorch as pl

from lightning_accum.errors import SeamError
from lightning_accum.seams import lightning, torch
from lightning_accum.seams.lightning import LIGHTNING
from lightning_accum.seams.seam import Seam
from lightning_accum.seams.torch import COMPILED, FSDP2, HYBRID, TORCH

__all__ = [
    "ALWAYS",
    "FSDP2",
    "HYBRID",
    "LIGHTNING",
    "SEAMS",
    "TORCH",
    "Seam",
    "broken",
    "changed",
    "check_nothing_is_missing",
    "in_words",
]

SEAMS = (*LIGHTNING, *TORCH, *FSDP2, *HYBRID, *COMPILED)
ALWAYS = (*LIGHTNING, *TORCH)
"""What every training needs."""


def changed(table: Iterable[Seam] = LIGHTNING) -> list[Seam]:
    """What is not as it was read."""
    return [seam for seam in table if not seam.is_read()]


def check_nothing_is_missing(table: Iterable[Seam] = ALWAYS) -> None:
    """Called when a strategy is made.

    Raises:
        SeamError: something has gone that has to be there.
    """
    if gone := [seam for seam in table if seam.found() is None and not seam.is_optional]:
        missing = [f"{seam} ({seam.replaced_by or 'relied on'}: {seam.why})" for seam in gone]
        raise broken(f"{_library(gone[0])} does not have {', '.join(missing)}.")


def broken(seen: str) -> SeamError:
    """The error, with what differs from what was read, and where to report it."""
    return SeamError(
        f"{seen} So windows would not be exact, and training stops. {in_words(changed(ALWAYS))} {lightning.READ} and"
        f" {torch.READ} were read: install one of these, and report it to {issue_tracker()}."
    )


def issue_tracker() -> str:
    """Where to report what went wrong, with its address from the metadata that the package was installed with."""
    try:
        urls = metadata("lightning-accum").get_all("Project-URL", [])
    except PackageNotFoundError:  # run from a checkout
        urls = []
    addresses = [address for label, address in (url.split(", ", 1) for url in urls) if label == "Issues"]
    return ": ".join(["the issue tracker of lightning_accum", *addresses])


def in_words(differing: list[Seam]) -> str:
    """What is not as it was read: a sentence for each library."""
    if not differing:
        return f"All methods of {_library(LIGHTNING[0])} are those that were read."
    sentences = []
    for library, seams in groupby(differing, _library):
        names = list(map(str, seams))
        number = f"{len(names)} method{'s differ' if len(names) > 1 else ' differs'}"
        sentences.append(f"{library}: {number} from those read: {', '.join(names)}.")
    return " ".join(sentences)


def _library(seam: Seam) -> str:
    if seam.owner.startswith(f"{pl.__name__}."):
        return f"Lightning {pl.__version__}"
    name = seam.owner.partition(".")[0]
    return f"{name} {import_module(name).__version__}"
