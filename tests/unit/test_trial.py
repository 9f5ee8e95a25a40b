"""A trial runs a module on some rows, and leaves everything as it was."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accum.splitting.snapshot import StateSnapshotter
from lightning_accum.weighing.trial import Trial


class Gathers:
    """As an engine with sharded parameters: a forward puts others in their place, whose memory it frees."""

    is_waited_for_in_forward = False

    def __init__(self, module: nn.Linear) -> None:
        self.module, self.own = module, module.weight

    def training_step(self, batch: Tensor) -> Tensor:
        self.module.weight = nn.Parameter(self.own.detach().clone())
        return self.module(batch).square().mean()

    def gradients_of(self, loss: Tensor, share: float, parameters: Sequence[nn.Parameter]) -> Sequence[Any]:
        gathered = torch.autograd.grad(loss * share, self.module.weight)[0]
        return [gathered if parameter is self.own else None for parameter in parameters]

    def forget_forward(self) -> None: ...

    def reshard(self) -> None:
        self.module.weight = self.own


def test_each_look_is_at_the_parameters_of_the_optimizer() -> None:
    module = nn.Linear(2, 1, bias=False)
    engine = Gathers(module)
    snapshotter = StateSnapshotter(module, torch.device("cpu"))
    trial = Trial(module, engine.training_step, lambda: snapshotter.take(watches_parameters=False), engine, lambda number: number)
    rows = torch.ones(3, 2)
    trial.losses_of([lambda: rows])  # has no backward
    with trial.held():
        loss = trial.step(rows)
        found = trial.gradients(loss, 1.0)
    expected = 2 * engine.own.detach().sum()
    assert found.keys() == {0}
    torch.testing.assert_close(found[0], torch.stack([expected, expected]).double())
