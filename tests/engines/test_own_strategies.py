"""A strategy that somebody derived from Lightning's takes exact windows by deriving from this package's too."""

from __future__ import annotations

from collections import Counter
from datetime import timedelta
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from support import Scalar, fit, x

from lightning_accum import AccumulationStrategy, DDPAccumulationStrategy, GradientAccumulation

METHODS = ("batch_to_device", "backward", "optimizer_step", "training_step", "post_backward")


def counting(kind: type) -> type:
    """Of Lightning's, a strategy that counts what it does in a micro-batch and a step."""

    def counted(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return getattr(kind, name)(self, *args, **kwargs)

        return method

    return type("Own", (kind,), {"calls": Counter(), **{name: counted(name) for name in METHODS}})


class OwnAccumulation(AccumulationStrategy, counting(SingleDeviceStrategy)):
    pass


class OwnDDPAccumulation(DDPAccumulationStrategy, counting(DDPStrategy)):
    pass


def test_on_one_device_its_methods_are_called_in_exact_windows() -> None:
    module = Scalar([x(1), x(1, 2, 3), x(4), x(9, 8), x(6)])
    run = fit(module, None, GradientAccumulation(2, check=False), strategy=OwnAccumulation())
    assert module.gradients == pytest.approx([(1 + 1 + 2 + 3) / 4, (4 + 9 + 8) / 3, 6], rel=1e-14)
    assert run.strategy.calls == {name: 3 if name == "optimizer_step" else 5 for name in METHODS}


@pytest.mark.exhaustive
def test_on_two_ranks() -> None:
    module = Scalar(by_rank=[[x(1), x(1, 2, 3), x(4), x(9, 8), x(6)], [x(5), x(7), x(2, 2)]])
    strategy = OwnDDPAccumulation(start_method="fork", timeout=timedelta(seconds=60))
    fit(module, strategy=strategy, devices=2, accumulate_grad_batches=2)
    windows = [[1, 1, 2, 3, 5, 7], [4, 9, 8, 2, 2], [6]]
    assert module.total == pytest.approx(sum(sum(window) / len(window) for window in windows), rel=1e-14)
