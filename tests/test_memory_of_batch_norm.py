"""What exact BatchNorm has on the device at a time: one micro-batch from layer to layer, and all of them at one layer."""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from alive import Alive, Elsewhere
from support import loader, relative_error, trainer
from torch import Tensor, nn

from lightning_accum import GradientAccumulation
from lightning_accum.batch_norm import joint_run
from lightning_accum.batch_norm.host_memory import HostMemory

CPU = torch.device("cpu")
ROWS, LAYERS = 64, 12
ONE_LAYER = ROWS * 16 * 8 * 8 * 4


class Deep(pl.LightningModule):
    """Layers of one width, ``between`` of them from one BatchNorm layer to the next."""

    def __init__(self, between: int = 1, layers: int = LAYERS) -> None:
        super().__init__()
        torch.manual_seed(0)
        net: list[nn.Module] = [nn.Conv2d(1, 16, 1)]
        for index in range(layers):
            net += [nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16) if index % between == 0 else nn.Identity(), nn.Tanh()]
        self.net = nn.Sequential(*net)
        self.alive: Alive | None = None
        self.peaks: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch) - 1).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.alive is not None:
            self.before = self.alive.peak = self.alive.bytes

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.alive is not None:
            self.peaks.append(self.alive.peak - self.before)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


DATA = [torch.randn(ROWS, 1, 8, 8, generator=torch.Generator().manual_seed(i)) for i in range(3)]


def peak(module: Deep, size: int | None) -> float:
    """In activations of one layer for all rows; parameters, gradients and data not counted."""
    callbacks = [] if size is None else [GradientAccumulation(micro_batch=size, batch_norm="exact", log=False)]
    with Alive() as alive:
        module.alive = alive
        trainer("auto" if size is None else "accum", callbacks=callbacks).fit(module, loader(DATA))
    return module.peaks[-1] / ONE_LAYER


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Elsewhere:
    host = Elsewhere(CPU)
    monkeypatch.setattr(joint_run, "memory_for", lambda device: host)
    return host


def test_the_peak_is_a_few_layers_and_not_all_of_them(elsewhere: Elsewhere) -> None:
    whole = peak(Deep(), None)
    assert whole > 2 * LAYERS  # of each layer, what BatchNorm took, and what Tanh gave
    assert peak(Deep(), 8) < 4  # what comes into a layer, its gradients on both sides, and one micro-batch of anything
    assert elsewhere.held == 0  # nothing is left on the host
    assert elsewhere.most > 2 * LAYERS * ONE_LAYER


def test_segments_are_of_one_micro_batch_at_a_time(elsewhere: Elsewhere) -> None:
    assert peak(Deep(between=6), 4) < 4


def test_without_a_place_to_wait_it_is_that_of_the_full_batch() -> None:
    assert peak(Deep(), 8) < 1.2 * peak(Deep(), None)


def test_what_came_back_is_what_was_moved(elsewhere: Elsewhere) -> None:
    whole, split = Deep(layers=2).double(), Deep(layers=2).double()  # in deeper ones rounding grows
    data = [x.double() for x in DATA]
    trainer("auto").fit(whole, loader(data))
    trainer(callbacks=[GradientAccumulation(micro_batch=5, batch_norm="exact")]).fit(split, loader(data))
    assert relative_error(split.parameters(), whole.parameters()) < 1e-12
    assert elsewhere.most > 0
    assert elsewhere.held == 0


@pytest.mark.skipif(not hasattr(torch._C._autograd, "_top_saved_tensors_default_hooks"), reason="torch tells since 2.8")
def test_hooks_of_the_user_go_first(elsewhere: Elsewhere) -> None:
    packed: list[int] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(1) or t, lambda t: t):
        trainer(callbacks=[GradientAccumulation(micro_batch=8, batch_norm="exact")]).fit(Deep(), loader(DATA))
    assert packed
    assert elsewhere.most == 0


def test_on_the_cpu_and_for_parameters_nothing_is_moved() -> None:
    memory = HostMemory(CPU)
    tensor = torch.randn(64, 64)
    assert memory.pack(tensor) is tensor
    assert memory.unpack(tensor) is tensor
    assert joint_run.memory_for(CPU) is None
    assert not HostMemory(torch.device("meta")).is_movable(nn.Parameter(torch.zeros(64, 64, device="meta")))
    assert not HostMemory(torch.device("meta")).is_movable(nn.Parameter(torch.zeros(64, 64, device="meta")).t())
    assert not HostMemory(torch.device("meta")).is_movable(torch.zeros(4, device="meta"))
    assert HostMemory(torch.device("meta")).is_movable(torch.zeros(64, 64, device="meta"))
