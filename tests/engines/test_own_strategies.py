"""A strategy that somebody derived from Lightning's takes exact windows by deriving from this package's too."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from support import Scalar, trainer, x

from lightning_accum import AccumulationStrategy, DDPAccumulationStrategy, GradientAccumulation

BATCHES = [[x(1), x(1, 2, 3), x(4), x(9, 8), x(6)], [x(5), x(7), x(2, 2)]]
WINDOWS = [[1, 1, 2, 3, 5, 7], [4, 9, 8, 2, 2], [6]]
TOTAL = sum(sum(window) / len(window) for window in WINDOWS)
METHODS = ("batch_to_device", "backward", "optimizer_step", "training_step", "post_backward")


class Counting:
    """What is added: here, counting the calls of what a strategy does in a micro-batch and a step."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.calls = dict.fromkeys(METHODS, 0)


def counted(name: str) -> Any:
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        self.calls[name] += 1
        return getattr(super(Counting, self), name)(*args, **kwargs)

    return method


for method in METHODS:
    setattr(Counting, method, counted(method))


class OwnDDP(Counting, DDPStrategy):
    pass


class OwnSingleDevice(Counting, SingleDeviceStrategy):
    pass


class OwnDDPAccumulation(DDPAccumulationStrategy, OwnDDP):
    pass


class OwnAccumulation(AccumulationStrategy, OwnSingleDevice):
    pass


def test_on_one_device_its_methods_are_called_in_exact_windows() -> None:
    module = Scalar(BATCHES[0])
    run = trainer(OwnAccumulation(), callbacks=[GradientAccumulation(2, check=False)])
    run.fit(module)
    assert module.gradients == pytest.approx([(1 + 1 + 2 + 3) / 4, (4 + 9 + 8) / 3, 6], rel=1e-14)
    assert run.strategy.calls == {name: 3 if name == "optimizer_step" else 5 for name in METHODS}


@pytest.mark.exhaustive
def test_on_two_ranks() -> None:
    module = Scalar(by_rank=BATCHES)
    strategy = OwnDDPAccumulation(start_method="fork", timeout=timedelta(seconds=60))
    trainer(strategy, devices=2, accumulate_grad_batches=2).fit(module)
    assert module.total == pytest.approx(TOTAL, rel=1e-14)
