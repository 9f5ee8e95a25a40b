"""On an accelerator, a micro-batch copies nothing to the host.

The meta device stands in for one: it has no values to copy, and raises where one is asked for.
"""

from __future__ import annotations

import pytest
import torch
from readable_losses import LOSSES, Net, make

from lightning_accum import TokenCount
from lightning_accum.ended_window import EndedWindow
from lightning_accum.micro_batch import Weighed
from lightning_accum.splitting.batch_log import BatchLog
from lightning_accum.splitting.outputs import Output, joined_extra, joined_loss
from lightning_accum.splitting.plan import Planner
from lightning_accum.weighing.weight import Weigher
from lightning_accum.window import Window
from lightning_accum.window_totals import ClosedWindow

META = torch.device("meta")
# these losses ask for values themselves, have class weights on the host, or no kernel for this device
NOT_ON_META = {
    "selected mean", "masked mean over an item", "gaussian nll", "checkpointed activations", "checkpointed loss",
    "class weights", "label smoothing and class weights", "multi margin", "mean over the batch, then a weighted sum",
    "chunks over one count", "column weights of mean 1", "column weights that add up to 1", "columns, weighed by a product",
    "tasks, weighed by a product", "ctc sum over a count", "sum of selected rows over the batch size",
    "sum of sums of rows over a number", "weights over their own sum", "a sort in each sample",
    "intersection over union of selected samples",
}  # fmt: skip


def meta_loss(name: str) -> torch.Tensor:
    net = Net().to(META)
    batch = {key: value.to(META) for key, value in make(5, 1).items()}
    if name == "tensor factor":
        pytest.skip("its factor is on the host, and a number there")
    return LOSSES[name](net, batch)


def window_on_meta() -> Window:
    window = Window(META)
    window._weight_scale = 4.0  # agreed on once in a training, with one copy
    return window


def test_the_meta_device_refuses_host_copies() -> None:
    with pytest.raises((RuntimeError, NotImplementedError)):
        torch.ones((), device=META).item()


@pytest.mark.parametrize("name", sorted(set(LOSSES) - NOT_ON_META))
def test_reading_and_weighing_a_micro_batch(name: str) -> None:
    weigher, window = Weigher("auto", warn=lambda message: None), window_on_meta()
    for _ in range(3):
        loss = meta_loss(name)
        seed = window.add(loss, weigher(loss, None, rows=5))
        loss.backward(gradient=seed)
    window.reduce()
    assert window._totals.shape == (8,)
    assert window._totals.dtype == torch.float64
    with pytest.raises((RuntimeError, NotImplementedError)):
        window.close(list)  # the one copy of the window


def test_explicit_weight() -> None:
    weigher, window = Weigher(TokenCount(), warn=lambda message: None), window_on_meta()
    weigher.proportion.looks_left = 0  # the first micro-batches are compared with their graph, on the host
    loss = meta_loss("cross entropy")
    window.add(loss, weigher(loss, {"labels": torch.zeros(2, 5, dtype=torch.long, device=META)}))
    window.reduce()


@pytest.mark.parametrize("reads_its_lengths_on_the_host", [True, False])
def test_splitting_a_batch_whose_lengths_were_read_on_the_host(reads_its_lengths_on_the_host: bool) -> None:
    on_host = {"ids": torch.ones(6, 5), "attention_mask": (torch.arange(5) < torch.tensor([[1], [5], [3], [2], [4], [1]])).long()}
    on_device = {name: tensor.to(META) for name, tensor in on_host.items()}
    planner = Planner(2)
    planner.proofs.answers = {
        (side, ("attention_mask",)): True for side in ("right", "left")
    }  # tried out in the first batch, on the host
    if reads_its_lengths_on_the_host:
        planner.look_at(on_host)
        plan = planner.plan(on_device, lambda padded, trimmed: None)
        assert [tuple(part["ids"].shape) for part in plan] == [(2, 5), (2, 3), (2, 1)]
    else:
        with pytest.raises((RuntimeError, NotImplementedError)):
            planner.plan(on_device, lambda padded, trimmed: None)


def test_putting_logs_and_outputs_of_a_batch_together() -> None:
    log, outputs = BatchLog(), []
    for index in range(2):
        log.micro_batch = index
        loss = meta_loss("cross entropy")
        log.collect("training_step", "loss", loss, {})
        weighed, extra = Weighed(torch.ones((), device=META)), {"logits": loss.new_zeros(2, 3), "scale": 2.0}
        outputs.append(Output(loss.detach(), loss.dtype, extra, weighed, rows=2))
    log.weigh([(output.weighed, output.rows) for output in outputs])
    (logged,) = log.merged(lambda is_metric, arguments: False)
    assert (logged.name, logged.value.device) == ("loss", META)
    assert joined_loss(outputs).device == META
    assert joined_extra(outputs, [3, 1, 0, 2])["logits"].shape == (4, 3)


@pytest.mark.parametrize("name", ["cross entropy", "masked mean", "two of the same count", "sum", "question answering"])
def test_sums_on_a_device_equal_sums_on_the_host(name: str) -> None:
    totals = []
    for is_on_host in (True, False):
        weigher, window = Weigher("auto", warn=lambda message: None), Window(torch.device("cpu"))
        window._is_on_host = is_on_host
        for seed, rows in enumerate((1, 3, 5, 2)):
            loss = LOSSES[name](Net(), make(rows, seed))
            window.add(loss, weigher(loss, None))
        window.reduce()
        totals.append(torch.as_tensor(window._totals, dtype=torch.float64))
    assert torch.allclose(*totals, rtol=1e-14, atol=0)


def test_what_a_hook_gets_of_a_window_stays_where_it_is() -> None:
    loss, weight, norm = torch.ones((3,), device=META).unbind()
    window = EndedWindow.of(ClosedWindow(loss, weight, 1), 1, norm)
    assert window.loss is loss
    assert window.weight is weight
    assert window.gradient_norm is norm
