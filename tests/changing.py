"""A module that has state of every kind, all of which a step changes: what is taken back is compared with what never was."""

import random
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from support import Toy, classified
from torch import Tensor, nn
from torchmetrics import CatMetric, MeanMetric

Table = type("Table", (OrderedDict,), {"update": None})  # like the outputs of Hugging Face's models, which forbid to be updated


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(1))
        self.register_buffer("replaced", torch.ones(2))
        self.register_buffer("hidden", torch.ones(1), persistent=False)
        self.norm = nn.BatchNorm1d(2)

    def change(self) -> None:
        self.scale.add_(1)
        self.replaced = self.replaced + 1
        self.hidden.mul_(2)
        self.norm(torch.ones(3, 2))
        self.train(not self.training)


class Count:  # an object that is no module
    def __init__(self) -> None:
        self.calls, self.mean, self.parts = 0, torch.zeros(2), [torch.zeros(1)]

    def change(self) -> None:
        self.calls += 1
        self.mean.lerp_(torch.ones(2), 0.5)
        self.parts[0] += 1


def counter() -> Callable[[], int]:
    calls = 0

    def count() -> int:
        nonlocal calls
        calls += 1
        return calls

    return count


class Changes(Toy):  # has state of every kind, which each call of training_step changes; has room for so many rows
    def __init__(self, room: int) -> None:
        super().__init__(classified)
        self.room, self.seen, self.deleted = room, [], True
        self.generators, self.dropout, self.captured = (torch.Generator(), np.random.default_rng(2)), nn.Dropout(0.5), counter()
        self.buffers_inside, self.mean, self.cat, self.shown = Buffers(), MeanMetric(), CatMetric(), MeanMetric()
        self.momentum = nn.Linear(4, 4).double().requires_grad_(False)
        self.not_registered = {"buffers": [Buffers()], "mean": MeanMetric()}
        self.a_dict, self.a_counter, self.a_table, self.a_deque = {"n": 0}, Counter(), Table(n=1), deque([0], maxlen=3)
        self.nested, self.number, self.tensor, self.array, self.of_users = {"history": [[1]]}, 0, torch.ones(1), np.ones(1), Count()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        of_torch, of_numpy = self.generators
        drawn = [torch.rand(()).item(), random.random(), np.random.rand(), self.dropout(torch.ones(64)).sum().item()]
        drawn += [torch.rand((), generator=of_torch).item(), of_numpy.random(), self.captured()]
        self.seen.append((len(batch[0]), *drawn))
        for buffers in (self.buffers_inside, *self.not_registered["buffers"], self.of_users):
            buffers.change()
        for metric in (self.mean, self.not_registered["mean"]):
            metric(torch.tensor(2.0 + len(self.seen)))
        self.cat.update(torch.ones(1))
        self.momentum.weight.data.mul_(0.9).add_(self.net.weight.detach(), alpha=0.1)
        self.momentum.bias.data = self.momentum.bias.data / 2 + 1
        self.a_dict["n"] += 1
        self.a_counter.update("ab")
        self.a_table["n"] += 1
        self.a_deque.append(len(self.a_deque))
        self.nested["history"][0].append(1)
        self.nested["history"].append([2])
        self.number += 1
        self.tensor.mul_(2)
        self.array += 1
        self.new = getattr(self, "new", 0) + 1
        if len(self.seen) == 1:
            del self.deleted
        if len(batch[0]) > self.room:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        loss: Tensor = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True)
        self.shown(loss)
        self.log("mean", self.shown, on_step=True, on_epoch=True)
        return loss

    def state(self) -> dict[str, Any]:  # all of it, in numbers and texts
        modules = [self.buffers_inside, *self.not_registered["buffers"]]
        found = {name: repr(value) for name, value in vars(self).items() if name.startswith("a_")}
        found |= {
            name: repr(getattr(self, name, None)) for name in ("nested", "number", "tensor", "array", "new", "deleted", "seen")
        }
        found["buffers"] = [(name, buffer.tolist()) for module in modules for name, buffer in module.named_buffers()]
        found["modes"] = [module.training for module in modules]
        found["metrics"] = [metric.compute().tolist() for metric in (self.mean, self.cat, self.not_registered["mean"])]
        return found | {"of_users": repr(vars(self.of_users))}
