"""Row-wise submodules in micro-batches as large as memory allows: a step that runs out of it runs again, in smaller ones."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.utils._pytree import tree_leaves
from typing_extensions import override

from lightning_accum.splitting.auto import RetriedSplitting
from lightning_accum.splitting.plan import Mark, Plan, Planner, RowSlice
from lightning_accum.undo import Undo
from lightning_accum.whole.row_wise import RowWise

T = TypeVar("T")


class StepAttempts(RetriedSplitting):
    """Runs each loader batch whole. Out of memory in a call of a submodule, it is as if the step had not begun.

    Args:
        row_wise: runs the submodules, with ``"auto"``.
        snapshotter: of the module whose steps they are.
        device: where it runs.
        say: takes a line for the log of this rank.
    """

    def __init__(self, row_wise: RowWise, snapshotter: Undo, device: torch.device, say: Callable[[str], None]) -> None:
        assert row_wise.sizes is not None
        super().__init__(Planner("auto", trim=False), row_wise.sizes, snapshotter, device, say)
        self._row_wise = row_wise

    @override
    def run(self, attempt: Callable[[Plan], T], mark: Callable[[], Mark]) -> T:
        def mark_with_calls() -> Mark:
            before = mark()

            def undo_all() -> None:
                self._row_wise.forget()
                before.undo()

            return before._replace(undo=undo_all)

        return super().run(attempt, mark_with_calls)

    @property
    @override
    def failed(self) -> RowSlice | None:
        return self._row_wise.running

    @property
    @override
    def pieces(self) -> Sequence[RowSlice]:
        return self._row_wise.pieces

    @override
    def _planned(self, batch: Any) -> Plan:
        tensors = [leaf for leaf in tree_leaves(batch) if isinstance(leaf, torch.Tensor)]
        return _Whole(batch, [RowSlice(slice(None), 1, 1)], copy.copy, tensors=tensors, is_read=False)


class _Whole(Plan):
    """A loader batch as it is, in a container of its own for each attempt."""

    @override
    def note(self, error: Exception) -> None:
        pass

    @override
    def __iter__(self) -> Any:
        yield copy.copy(self.batch) if isinstance(self.batch, (dict, list)) else self.batch
