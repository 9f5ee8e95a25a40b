"""The error of a loss that does not add up. It names submodules that may run in micro-batches, if a trial shows that they work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import nn

from lightning_accum.errors import RowWiseError
from lightning_accum.looks import Checked, Rows
from lightning_accum.splitting.few_rows import FewRows
from lightning_accum.verdict import MOST_ROWS, Verdict
from lightning_accum.weighing import advice
from lightning_accum.weighing.counts import name_of
from lightning_accum.weighing.terms import Term
from lightning_accum.whole.row_proof import prove_row_wise
from lightning_accum.whole.row_wise import RowWise

_MOST_TRIED = 8


def of_losses(checked: Checked, rows: Rows, verdict: Verdict, terms: Mapping[int, Term], mend: str | None) -> str:
    """The error of a loss that does not add up, from the rank with the largest deviation. Called on all ranks.

    ``mend`` is the fix, an argument with which the parts add up; None if none was found.
    """
    own = checked.accumulation.policy.weight
    weight = f'"auto" ({", ".join(term.words or "a term" for term in terms.values())})' if own == "auto" else name_of(own)
    mend = _of_pairs(checked, rows) if mend is None else mend
    *first, last = map(str, verdict.rows or ("some", "others"))
    sizes = "single rows" if len(verdict.rows) > 3 else f"{', '.join(first)} and {last} rows"
    before = " Earlier optimizer steps used batches that could not be checked." * checked.accumulation.is_step
    messages = checked.of_all(
        "The losses of micro-batches do not add up to the loss of their batch, so a window would not take its full batch's step: "
        f"{sum(verdict.rows)} rows of a batch, in parts of {sizes} weighted by weight={weight}: {verdict.in_words}. {mend} "
        f'weight="equal" takes the classic mean of means instead; check=False turns the check off.{before}'
    )
    deviations = checked.of_all(0.0 if verdict.adds_up else verdict.deviation or 0.0)
    return str(messages[deviations.index(max(deviations))])


def _of_pairs(checked: Checked, rows: Rows) -> str:
    """The fix for a loss that compares rows: it names submodules for row_wise= that were tried."""
    if checked.accumulation.policy.row_wise:
        return advice.OF_ROW_WISE
    found, names = rows.found, list[str]()
    own = min(found.of_batch, MOST_ROWS) if isinstance(found, FewRows) else 0
    if (number := int(-checked.largest(-own))) > 1 and isinstance(found, FewRows):  # on all ranks
        names = _that_hold(checked, partial(found.take, range(number)), number)
    policy = 'GradientAccumulation(1, micro_batch="offload")'
    if names:
        row_wise = repr(names[0] if len(names) == 1 else names)
        policy = f"GradientAccumulation(1, micro_batch={rows.size}, row_wise={row_wise}), which was tried and adds up"
    if checked.accumulation.ranks.size > 1:
        policy += ", gather the rows of all ranks (self.all_gather(..., sync_grads=True))"
    return (
        "No weight that was tried makes them add up: the loss compares the rows of its batch (entries of dimension 0, or see "
        "split=), depends on earlier batches, divides by something other than a count, or gets more in the module's backward. Have "
        f"the loader yield your effective batch, with {policy}; or pass the mean's denominator, a function of the batch: weight=."
    )


def _that_hold(checked: Checked, take: Callable[[], Any], number: int) -> list[str]:
    """The outermost submodules with parameters that are called and may run in micro-batches."""
    if checked.sync.is_waited_for_in_forward:
        return []
    found, tried, waiting = list[str](), 0, _children(checked.module, "")
    while waiting and (tried := tried + 1) <= _MOST_TRIED:
        name = waiting.pop(0)
        if _holds(checked, take, number, [name]):
            found.append(name)
        else:
            waiting += _children(checked.module.get_submodule(name), f"{name}.")
    return found if len(found) < 2 or _holds(checked, take, number, found) else found[:1]


def _children(module: nn.Module, path: str) -> list[str]:
    return [path + name for name, child in module.named_children() if any(p.requires_grad for p in child.parameters())]


def _holds(checked: Checked, take: Callable[[], Any], number: int, names: list[str]) -> bool:
    reasons = list[str]()
    row_wise = RowWise(checked.module, names, 2, checked.trial().device)
    try:
        prove_row_wise(checked.trained, row_wise, checked.step, [take()], [number], reasons.append)
    except RowWiseError:
        return False
    return bool(row_wise.kinds) and not reasons
