"""What is not yet as it should be: faults (see `loss_table.training.faults`) and their reasons, and the losses that have them.

A test that passes though its loss is in here fails: what is mended is to be taken out.
"""

from __future__ import annotations

from typing import TypeAlias

Known: TypeAlias = dict[tuple[str, str], tuple[str, ...]]

OPEN: Known = {
    ("false alarm", "rows that are looked at alone, or four of a micro-batch, have no positive, and count 1, though it has one"): (
        "libraries: FCOS: three sums over the foreground",
        "papers: all anchors and a penalty of theirs by positives",
    ),
}

OPEN_ON_RANKS: Known = {}
