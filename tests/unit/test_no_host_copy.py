"""On an accelerator, which trains as the host does, a micro-batch copies nothing to the host, and a window copies once."""

from __future__ import annotations

from copy import deepcopy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from loss_table import BY_NAME
from loss_table.rows import Net, rows
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.data import default_collate

from lightning_accum.fabric import Accumulator

DEVICE, ATEN = torch.device("lazy"), torch.ops.aten
ASKS = (ATEN._local_scalar_dense.default, ATEN.is_nonzero.default, ATEN.equal.default)


class OnDevice(Tensor):  # says so; its value is on the host
    @staticmethod
    def __new__(cls, value: Tensor) -> OnDevice:
        found = Tensor._make_wrapper_subclass(cls, value.shape, dtype=value.dtype, strides=value.stride(), device=DEVICE)
        found.value = value
        return found

    __torch_dispatch__ = None  # outside of Device


class Device(TorchDispatchMode):  # runs what concerns the device on the host, and counts the copies to it
    copies = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        is_here, target = any(isinstance(leaf, OnDevice) for leaf in tree_leaves((args, kwargs))), kwargs.get("device")
        if func in ASKS and not isinstance(args[0], Tensor):
            return args[0]  # a number of Python's
        self.copies += is_here and (func in ASKS or torch.device(target or DEVICE) != DEVICE)
        if target is not None:
            is_here, kwargs["device"] = torch.device(target) == DEVICE, "cpu"
        args_on_host, kwargs = tree_map_only(OnDevice, lambda t: t.value, (args, kwargs))
        found = func(*args_on_host, **kwargs)
        if func._schema.name.endswith("_"):
            return None if found is None else args[0]
        return tree_map(lambda leaf: OnDevice(leaf) if is_here and isinstance(leaf, Tensor) else leaf, found)


class Lists(TorchFunctionMode):  # these do not pass through a dispatch mode
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func in (torch.tensor, torch.as_tensor) and torch.device(kwargs.get("device") or "cpu") == DEVICE:
            return OnDevice(func(*args, **{**kwargs, "device": "cpu"}))
        return args[0].cpu().tolist() if func is Tensor.tolist and isinstance(args[0], OnDevice) else func(*args, **kwargs)


IGNORED = "criteria: cross entropy with ignored labels, mean"
FACTORS = {str(dtype): dtype for dtype in (torch.bool, torch.uint8, torch.int64, torch.float64)}
"""On the device, of types that Python's numbers might have."""


@pytest.mark.parametrize(
    "name",
    [IGNORED, "forecasting: RMSE by hand", "multi-task: learned scales with ignored labels", "multi-task: rows and ignored labels",
     "idioms: masked cross entropy, sum over the count and 1e-8", "idioms: explicit: labels for ignored labels", *FACTORS],
)  # fmt: skip
def test_a_micro_batch_copies_nothing_to_the_host_and_a_window_at_most_once(name: str) -> None:
    row, net, found = BY_NAME[IGNORED if name in FACTORS else name], Net(), []
    policy = {"window": 4, "weight": row.weight, "check": False, "log": False}
    on_host, batches = deepcopy(net), [default_collate(rows(row, number=number)) for number in (5, 3, 4, 7)] * 3

    def loss(net: Net, b: dict[str, Tensor]) -> Tensor:
        value = row.function(net(b[row.fields[0]]), SimpleNamespace(**b), net)
        return value * (b["ignored"] >= 0).any().to(FACTORS[name]) if name in FACTORS else value

    accumulator = Accumulator(None, on_host, torch.optim.SGD(on_host.parameters(), lr=0.1), **policy)
    for micro_batch in accumulator(batches):
        accumulator.backward(loss(on_host, micro_batch))
        accumulator.step()
    with Device() as device, Lists():
        for module in list(net.modules()):
            for key, parameter in list(module.named_parameters(recurse=False)):
                setattr(module, key, nn.Parameter(OnDevice(parameter.detach())))
        there = [{key: OnDevice(value) for key, value in batch.items()} for batch in batches]
        assert (there[0]["x"].sum().item(), device.copies) == (batches[0]["x"].sum().item(), 1)  # it counts
        accumulator = Accumulator(None, net, torch.optim.SGD(net.parameters(), lr=0.1, foreach=False), **policy)
        for micro_batch in accumulator(there):
            before = device.copies
            accumulator.backward(loss(net, micro_batch))
            accumulator.step()
            found.append(device.copies - before)
    assert found[4:7] == found[8:11] == [0, 0, 0]  # what is agreed on once in a training is in the first window
    assert max(found[7], found[11]) <= 1
    for own, expected in zip(net.parameters(), on_host.parameters(), strict=True):
        torch.testing.assert_close(own.value, expected.data, rtol=1e-12, atol=1e-12)
