"""What is not yet as it should be: faults (see `loss_table.training.faults`) and their reasons, and the losses that have them.

A test that passes though its loss is in here fails: what is mended is to be taken out.
"""

from __future__ import annotations

from typing import TypeAlias

Known: TypeAlias = dict[tuple[str, str], tuple[str, ...]]

OPEN: Known = {
    ("silent", "a term that only a larger batch than any micro-batch has"): (
        "multi-task: a term only where the batch has a label",
    ),
    ("refused", "a node that is not looked through"): ("multi-task: torch.addcmul", "multi-task: torch.lerp"),
    ("refused", "a weight that is 5e-10 off, where the check lets 4e-10 pass"): (
        "idioms: masked squares, mean over a clamped mean of the mask",
    ),
    ("refused", "only a later batch of the first window shows that the weight is to be measured"): (
        "idioms: masked cross entropy, selected sum over all rows",
    ),
    ("refused", "as many steps as samples, time first"): ("reinforcement: time first, sum over time",),
    ("false alarm", "terms over a clamped count, in parts of one row"): ("vision: both by the number of positives",),
    ("false alarm", "a penalty on parameters is taken for a term of the batch"): ("multi-task: a penalty on orthogonality",),
}

OPEN_ON_RANKS: Known = {
    ("refused", "the first loader batch of a rank has one row, and is weighed before the check"): (
        "idioms: masked cross entropy, sum times one over a clamped count",
        "idioms: a sum over columns and a constant",
        "idioms: a sum over a constant in a tensor",
    ),
}
