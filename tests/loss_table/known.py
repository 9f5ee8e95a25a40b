"""What is not yet as it should be: faults (see `loss_table.training.faults`) and their reasons, and the losses that have them.

A test that passes though its loss is in here fails: what is mended is to be taken out.
"""

from __future__ import annotations

from typing import TypeAlias

Known: TypeAlias = dict[tuple[str, str], tuple[str, ...]]

OPEN: Known = {
    ("false alarm", "a part without positives has a count of 1, and its terms do not add up; these micro-batches all have some"): (
        "vision: both by the number of positives",
    ),
}

OPEN_ON_RANKS: Known = {
    ("false alarm", "where no row has a label there is a sum times 0 inside of the sum, as of a loss that is left out"): (
        "idioms: masked cross entropy, loop over the rows of the mask, stacked",
    ),
}
