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
    ("refused", "a node that is not looked through"): (
        "multi-task: torch.addcmul",
        "multi-task: torch.lerp",
        "multi-task: learned scales, a product of vectors",
        "multi-task: learned scales of columns' means",
        "multi-task: a learned softmax of tasks",
        "idioms: squares, a loop over samples, times one over the number",
        "idioms: cross entropy, index_add into one place, over the number",
        "idioms: squares, trace",
        "idioms: cross entropy, linear to one number",
        "idioms: squares, norm of order 1",
    ),
    ("refused", "a number that is not compared with the right sum"): (
        "idioms: squares, baddbmm",
        "idioms: a sum over a constant",
    ),
    ("refused", "a statistic of a row, or all of a sort"): (
        "idioms: cross entropy, sorted, mean",
        "idioms: squares, topk of all, mean",
        "idioms: squares, cumulative sum, its last",
    ),
    ("refused", "a weight that is read wrongly, as the check finds"): (
        "language: causal, time first, mean of a step and mean over steps",
        "idioms: cross entropy, sum times one over the number",
        "idioms: squares, sum times one over a tensor",
        "idioms: cross entropy, sum times the reciprocal",
        "idioms: squares, each times one over the number, sum",
        "idioms: cross entropy, product with a vector of one over the number",
        "idioms: cross entropy, halves, each summed, over the number",
        "idioms: masked cross entropy, sum times one over a clamped count",
        "idioms: masked cross entropy, set to zero in place",
        "idioms: masked squares, mean over a clamped mean of the mask",
        "idioms: masked squares, einsum with the mask over its sum",
        "idioms: masked cross entropy, selected sum over all rows",
        "idioms: masked squares, filled into a vector",
        "idioms: a sum over a constant in a tensor",
    ),
    ("refused", "another sum or mean than over rows"): (
        "reinforcement: time first, sum over time",
        "idioms: weights of rows, einsum over the weights",
    ),
    ("false alarm", "a penalty on parameters is taken for a term of the batch"): ("multi-task: a penalty on orthogonality",),
    ("false alarm", "a loop over samples"): ("idioms: masked squares, loop over the rows of the mask",),
}

OPEN_ON_RANKS: Known = {
    ("refused", "as on one rank"): (
        "multi-task: learned scales of columns' means",
        "idioms: masked cross entropy, sum times one over a clamped count",
    ),
}
