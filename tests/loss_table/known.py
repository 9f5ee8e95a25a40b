"""What is not yet as it should be: faults (see `loss_table.training.faults`) and their reasons, and the losses that have them.

A test that passes though its loss is in here fails: what is mended is to be taken out.
"""

from typing import TypeAlias

Known: TypeAlias = dict[tuple[str, str], tuple[str, ...]]

OPEN: Known = {}

OPEN_ON_RANKS: Known = {
    ("false alarm", "a rank begins with an ignored label: the check has shown after the first micro-batch that a count is fixed"): (
        "libraries: ignored labels and a distance to a buffer",
    ),
}
