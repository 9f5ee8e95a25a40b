"""What is not yet as it should be: faults (see `loss_table.training.faults`) and their reasons, and the losses that have them.

A test that passes though its loss is in here fails: what is mended is to be taken out.
"""

from typing import TypeAlias

Known: TypeAlias = dict[tuple[str, str], tuple[str, ...]]

OPEN: Known = {
    ("refused", "issue 22: terms of one row have other nodes than those of several"): (
        "libraries: a loop with a running mean",
        "metric learning: triplets, mean of those that are violated",
        "papers: all anchors and a penalty of theirs by positives",
    ),
    ("adds up", "issue 24: what rows share is found in split batches"): ("idioms: a factor that goes with the batch: a number",),
    ("not exact", "issue 22: the window in which a term is seen first is left out"): ("forecasting: free bits of each row",),
}

OPEN_ON_RANKS: Known = {}
