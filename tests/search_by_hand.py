"""What the windows of a point come to in plain torch: no Lightning, and no code of the package."""

from dataclasses import dataclass, field
from typing import Any

import torch
from search_points import NO_LABEL, Batch, Net, Point, is_consistent
from torch import Tensor, nn


@dataclass
class Outcome:
    parameters: list[Tensor] = field(default_factory=list)  # at the end
    rates: list[float] = field(default_factory=list)  # the learning rate of every optimizer step
    losses: list[float] = field(default_factory=list)  # of the window of every optimizer step
    last_rate: float = 0.0
    steps: int = 0  # counted: those of the optimizer, and of windows in which training_step returned None throughout


@dataclass
class Window:
    parts: list[Batch] = field(default_factory=list)  # micro-batches of all ranks
    loader_batches: int = 0
    size: float = 0.0
    has_run: bool = False
    is_left_out: bool = False


class ByHand:  # trains on the windows of a point, each as one batch
    def __init__(self, point: Point) -> None:
        self.point = point
        self.net = Net(point)
        self.optimizer = optimizer_of(point, self.net)
        self.scheduler = scheduler_of(point, self.optimizer)
        self.outcome = Outcome()
        self.window = Window()
        self.time, self.seen = 0, 0.0
        self.is_done = False

    def train(self) -> Outcome:
        point, epochs, stops = self.point, self.point.trainer["max_epochs"], False
        for epoch in range(epochs):
            for index in range(max(point.lengths)):
                self.run_loader_batches(epoch, index)
                stops |= point.stops_after == epoch * max(point.lengths) + index + 1
                # a window that is counted before it runs runs to its end
                if self.is_done or (stops and not (point.weight == "list" and self.window.loader_batches)):
                    break
            tail = point.policy["tail"]
            if tail == "drop":
                self.window = Window()
            elif not self.is_done and self.window.loader_batches and (tail == "step" or epoch == epochs - 1):
                self.end_window()
            is_whole_epoch = index == max(point.lengths) - 1
            if is_whole_epoch and point.scheduler["interval"] == "epoch" and (epoch + 1) % point.scheduler["frequency"] == 0:
                self.scheduler.step()
            if stops and not self.is_done and self.window.loader_batches:  # carried, and the next epoch does not come
                self.end_window()
            if self.is_done or stops:
                break
        self.outcome.parameters = [parameter.detach() for parameter in self.net.parameters()]
        self.outcome.last_rate = self.optimizer.param_groups[0]["lr"]
        return self.outcome

    def run_loader_batches(self, epoch: int, index: int) -> None:  # one of every rank that has one left
        point = self.point
        if self.window.loader_batches == 0:
            self.window.size = self.size(epoch)
        self.window.loader_batches += 1
        batches = [own[index] for own in point.batches if index < len(own)]
        parts = [parts_of(point, batch) for batch in batches if batch is not None]
        now = [part for own in parts for part in own]
        self.window.parts += [part for part in now if counts(part)]
        self.window.has_run |= bool(now) or point.ranks > 1
        self.window.is_left_out |= any(part["has_loss"] and not counts(part) for part in now)
        if self.is_full():
            self.end_window()

    def size(self, epoch: int) -> float:  # of a window that begins now: in loader batches, or weight
        kind, size = self.point.window
        if kind == "mapping":
            return [n for start, n in size if start <= epoch][-1]
        if kind == "function":
            return size[self.outcome.steps % len(size)]
        return 2 * size if kind == "growing tokens" and self.seen >= 5 * size else size

    def is_full(self) -> bool:
        if self.point.counts_tokens:
            return sum(weight_of(self.point, part) or 0.0 for part in self.window.parts) >= self.window.size
        return self.window.loader_batches >= self.window.size

    def end_window(self) -> None:  # one optimizer step on all samples of the window, if any of them counts
        point, window = self.point, self.window
        weights = [weight_of(point, part) for part in window.parts]
        is_sum = point.loss == "sum"
        total = float(len(weights)) if is_sum else sum(weights, start=0.0)
        is_lightnings = point.is_plain(window.size) and bool(window.parts)  # whose own step is made, also where no label counts
        self.window = Window()
        if total == 0 and not is_lightnings:
            if window.has_run and not window.parts and not window.is_left_out:
                self.count(window)
            return
        self.optimizer.zero_grad()
        if point.is_low_precision:
            loss = self.add_up(window.parts, [1.0 if is_sum else n / total for n in weights])
        else:
            of_parts = (n * self.net(part) for n, part in zip(weights, window.parts, strict=True) if n)
            loss = self.net(joined(window.parts)) if is_consistent(point) else sum(of_parts) / total
            loss.backward()
        if total == 0:
            for parameter in self.net.parameters():
                parameter.grad = None if parameter.grad is None else torch.zeros_like(parameter)
        self.clip()
        self.outcome.rates.append(self.optimizer.param_groups[0]["lr"])
        if point.loss == "terms" and (window.size != 1 or point.micro_batch is not None):  # else values of terms are known
            loss = sum(n * self.net(part).detach() for n, part in zip(weights, window.parts, strict=True)) / total
        self.outcome.losses.append(float(loss))
        self.optimizer.step()
        self.seen += total
        self.count(window)

    def count(self, window: Window) -> None:  # an optimizer step
        point = self.point
        self.outcome.steps += 1
        ticks = 1 if point.policy["scheduler_counts"] == "optimizer_steps" else window.loader_batches
        before, self.time = self.time, self.time + ticks
        if point.scheduler["interval"] == "step":
            for _ in range(self.time // point.scheduler["frequency"] - before // point.scheduler["frequency"]):
                self.scheduler.step()
        self.is_done = self.outcome.steps == point.trainer.get("max_steps", -1)

    def add_up(self, parts: list[Batch], shares: list[float]) -> Tensor:
        """Gradients of a narrow type, added up in double precision and rounded once."""
        parameters = list(self.net.parameters())
        sums: dict[nn.Parameter, Tensor] = {}
        total = torch.zeros((), dtype=torch.float64)
        for part, share in zip(parts, shares, strict=True):
            if not share:
                continue
            loss = self.net(part)
            total += share * loss.detach().double()
            for parameter, gradient in zip(parameters, torch.autograd.grad(loss, parameters, allow_unused=True), strict=True):
                if gradient is not None:
                    sums[parameter] = sums.get(parameter, 0.0) + share * gradient.double()
        for parameter, gradient in sums.items():
            parameter.grad = gradient.to(parameter.dtype)
        return total

    def clip(self) -> None:
        if "gradient_clip_val" in (given := self.point.trainer):
            clip = {"norm": nn.utils.clip_grad_norm_, "value": nn.utils.clip_grad_value_}[given["gradient_clip_algorithm"]]
            clip(self.net.parameters(), given["gradient_clip_val"])


def parts_of(point: Point, batch: Batch) -> list[Batch]:  # the micro-batches of a loader batch, in the order of its rows
    rows, columns = batch["labels"].shape
    unit, size = point.micro_batch or ("auto", 0)
    if unit == "auto":
        return [batch]
    size = max(1, size // columns) if unit == "tokens" else size
    return [
        {key: value[start : start + size] if isinstance(value, Tensor) else value for key, value in batch.items()}
        for start in range(0, rows, size)
    ]


def counts(part: Batch) -> bool:  # whether a micro-batch is in its window: it has a loss, which is finite
    return part["has_loss"] and bool(part["x"].isfinite().all())


def joined(parts: list[Batch]) -> Batch:
    return {key: torch.cat([part[key] for part in parts]) for key in parts[0] if isinstance(parts[0][key], Tensor)}


def weight_of(point: Point, part: Batch) -> float | None:  # what the mean loss of a micro-batch is multiplied by; None for a sum
    labels = part["labels"]
    counted, rows = float((labels != NO_LABEL).sum()), float(len(labels))
    if point.weight != "auto":
        return {"tokens": counted, "function": counted, "list": counted, "samples": rows, "equal": 1.0}[point.weight]
    of_classes = float(torch.tensor([1.0, 0.5, 2.0, 0.25])[labels[labels != NO_LABEL]].sum())
    return {"squares": 2 * rows, "weighted": of_classes, "sum": None}.get(point.loss, counted)


def optimizer_of(point: Point, net: nn.Module) -> torch.optim.Optimizer:  # both move a parameter that gets a gradient of zeros
    if point.optimizer == "sgd":
        return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    return torch.optim.AdamW(net.parameters(), lr=0.02, weight_decay=0.1)


def scheduler_of(point: Point, optimizer: torch.optim.Optimizer) -> Any:
    if point.scheduler["kind"] == "decay":
        return torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=7)
