"""Warnings of the package have a category of their own and point at the user's line."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import Callback
from support import Scalar, ddp, trainer, x
from torchmetrics.aggregation import RunningMean

import lightning_accum
from lightning_accum import AccumulationWarning, GradientAccumulation, GradientNoiseScale, Tokens


def line_of(function: Callable[..., Any], text: str) -> int:
    lines, first = inspect.getsourcelines(function)
    return first + next(number for number, line in enumerate(lines) if text in line)


class Estimates(Scalar):
    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches  # the line
        return super().configure_optimizers()


class Shows(Scalar):
    def __init__(self, batches: Any) -> None:
        super().__init__(batches)
        self.metric = RunningMean(window=2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.metric(batch.mean())
        self.log("metric", self.metric)
        return super().training_step(batch, batch_idx)


class Alternates(Scalar):
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(self.loss(batch))
        self.optimizers().step()
        self.manual_backward(self.loss(batch))  # the line


# what warns, and whose line it is
SOURCES: dict[str, tuple[type[Scalar], list[Any], list[Callback], Any]] = {
    "empty window": (Scalar, [x(1), x(2)], [GradientAccumulation(2, weight=lambda _: 0.0, check=False)], None),
    "estimate": (Estimates, [x(1), x(2)], [GradientAccumulation(Tokens(1))], Estimates.configure_optimizers),
    "non-finite": (Scalar, [x(torch.inf), x(1)], [GradientAccumulation(1, on_nonfinite="skip")], None),
    "metric": (Shows, [x(1, 2), x(3, 4)], [GradientAccumulation(micro_batch=1)], None),
    "noise": (Scalar, [x(1), x(2)], [GradientAccumulation(1), GradientNoiseScale()], None),
    "manual": (Alternates, [x(1), x(2)], [GradientAccumulation(2)], Alternates.training_step),
}


@pytest.mark.parametrize("name", SOURCES)
def test_a_warning_has_the_category_of_the_package_and_points_at_the_users_line(name: str) -> None:
    kind, batches, callbacks, of_user = SOURCES[name]

    def train() -> None:
        trainer("accum", callbacks=callbacks).fit(kind(batches))  # the line

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        train()
    own = [warning for warning in caught if issubclass(warning.category, AccumulationWarning)]
    assert {(warning.filename, warning.lineno) for warning in own} == {(__file__, line_of(of_user or train, "# the line"))}
    package = Path(lightning_accum.__file__).parent
    assert not [w for w in caught if w not in own and (w.filename == __file__ or package in Path(w.filename).parents)]


def test_a_warning_in_a_process_that_was_forked_points_at_the_call_of_fit() -> None:
    nothing = GradientAccumulation(1, weight=lambda _: 0.0, check=False)

    def train() -> None:
        trainer(ddp(), devices=2, callbacks=[nothing]).fit(Scalar([x(1), x(2)]))  # the line

    def show(message: Any, category: type, filename: str, lineno: int, *_: Any) -> None:
        with Path("shown").open("a") as shown:
            print(category.__name__, filename, lineno, file=shown)

    with warnings.catch_warnings():
        warnings.filterwarnings("always", category=AccumulationWarning)
        warnings.showwarning = show
        train()
    shown = [line for line in Path("shown").read_text().splitlines() if line.startswith("AccumulationWarning")]
    assert shown == [f"AccumulationWarning {__file__} {line_of(train, '# the line')}"]
