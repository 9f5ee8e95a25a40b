"""Random combinations of policy arguments, and what a hand-written loop over full batches makes of them.

The reference is plain torch. Which samples are in a window follows from the rules of the guide, its loss is computed on all of them
at once; then come clipping, the optimizer and the scheduler.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import SampleCount, TokenCount, Tokens

COLUMNS, FEATURES, CLASSES = 6, 3, 4
NO_LABEL = -100
Batch = dict[str, Any]


@dataclass
class Point:  # one combination. Its ``repr`` says all that was drawn.
    seed: int
    engine: str
    loss: str
    dtype: torch.dtype
    optimizer: str
    window: tuple[str, Any]  # what kind, and of what size
    policy: dict[str, Any]
    weight: str
    micro_batch: tuple[str, int] | None
    trainer: dict[str, Any]
    scheduler: dict[str, Any]
    strategy: dict[str, Any]
    lengths: list[int]  # loader batches of each rank
    is_sized: bool
    is_marked: str  # which rows use a parameter of their own
    holes: dict[tuple[int, int], str]  # what is odd about the loader batch of a rank at a place
    memory: int | None  # samples that fit into it, with "auto"
    callbacks: list[str]
    stops_after: int | None  # loader batches after which the training is told to stop
    batches: list[list[Batch | None]] = field(repr=False, default_factory=list)
    goes_on_after: int = 0  # after so many loader batches a second training goes on from a checkpoint; 0 for one training

    def resumed(self) -> Point:  # the same in two trainings
        after = random.Random(self.seed).randint(1, max(1, max(self.lengths) * self.trainer["max_epochs"] - 1))
        # the epochs that are left may have no window that can be full
        policy = {**self.policy, "tail": "step"} if self.window[0] == "mapping" and self.policy["tail"] == "drop" else self.policy
        return replace(self, goes_on_after=after, stops_after=None, is_sized=True, policy=policy)

    def arguments(self) -> dict[str, Any]:  # of ``GradientAccumulation``
        kind, size = self.window
        windows: dict[str, Callable[[], Any]] = {
            "int": lambda: size,
            "mapping": lambda: dict(size),
            "function": lambda: lambda step: size[step % len(size)],
            "tokens": lambda: Tokens(size),
            "growing tokens": lambda: Tokens(lambda seen: size if seen < 5 * size else 2 * size),
        }
        weights: dict[str, Any] = {
            "auto": "auto",
            "equal": "equal",
            "tokens": TokenCount(key="labels", shift=False),
            "samples": SampleCount(),
            "function": lambda batch: (batch["labels"] != NO_LABEL).sum(),
            "list": [TokenCount(key="labels", shift=False), SampleCount()],
        }
        arguments = {"window": windows[kind](), "weight": weights[self.weight], **self.policy}
        arguments["check"] = is_consistent(self)  # it would refuse the others
        if self.micro_batch is not None:
            unit, number = self.micro_batch
            arguments["micro_batch"] = Tokens(number) if unit == "tokens" else number if unit == "samples" else "auto"
        return arguments

    def __post_init__(self) -> None:
        self.counts_tokens, self.ranks = "tokens" in self.window[0], len(self.lengths)
        self.is_low_precision = self.dtype != torch.float64

    def is_plain(self, size: float) -> bool:  # a window of this size is one loader batch on one rank, as it is: left to Lightning
        is_whole = self.micro_batch is None and not self.counts_tokens and size == 1
        return is_whole and self.ranks == 1 and self.policy["on_nonfinite"] == "propagate"

    def refusals(self) -> list[str]:  # what the package says to combinations that it does not have; none for all others
        policy, tail, is_sharded = self.policy, self.policy["tail"], self.engine == "fsdp2"
        unit = None if self.micro_batch is None else self.micro_batch[0]
        reduces_often = self.strategy.get("sync") == "micro_batch"
        is_ddp = self.engine == "ddp" and reduces_often
        never_full = self.is_sized and not self.counts_tokens and tail == "drop" and max(self.lengths) < self._least()
        said = {
            "counts a window before it runs": self.weight == "list" and tail == "carry" and self._may_be_long(),
            "reach its size, but the loss is a sum": self.counts_tokens and self.loss == "sum",
            "nothing is trained": never_full,
            "is not finite: ": policy["on_nonfinite"] == "raise" and "nan" in self.holes.values(),
            "needs the gradients of each rank": reduces_often and policy["on_nonfinite"] != "propagate",
            "varies between ranks": is_ddp and unit in ("tokens", "auto"),
            "is reduced once a window": is_ddp and self.is_low_precision,
            "runs a batch again on one rank": is_sharded and unit == "auto",
            "fully_shard sums gradients in": is_sharded and self.is_low_precision,
        }
        return [message for message, applies in said.items() if applies]

    def _may_be_long(self) -> bool:
        kind, size = self.window
        return kind not in ("int", "mapping") or (size if kind == "int" else max(n for _, n in size)) > 1

    def _least(self) -> int:
        kind, size = self.window
        if kind == "function":
            return size[0]
        epochs = self.trainer["max_epochs"]
        return min(n for epoch, n in size if epoch < epochs) if kind == "mapping" else size


def draw(seed: int, engine: str = "accum") -> Point:  # the combination of a seed
    rng = random.Random(f"{engine} {seed}")
    ranks = 1 if engine == "accum" else 2

    def one_in(number: int) -> bool:
        return rng.randrange(number) == 0

    loss = rng.choice(["tokens", "tokens", "squares", "weighted", "sum", "masked", "terms"])
    micro_batch = rng.choice([None, None, ("samples", rng.randint(1, 3)), ("tokens", rng.choice([6, 12, 18])), ("auto", 0)])
    if engine == "fsdp2" and micro_batch == ("auto", 0) and not one_in(3):
        micro_batch = None
    kind = rng.choice(["int", "int", "int", "mapping", "function", "tokens", "growing tokens"])
    size: Any = rng.randint(1, 4)
    if kind == "mapping":
        size = [(0, rng.randint(1, 3)), (rng.randint(1, 2), rng.randint(1, 4))]
    elif kind == "function":
        size = [rng.randint(1, 3) for _ in range(3)]
    elif "tokens" in kind:
        size = rng.choice([5, 15, 40])
    weights = {"tokens": ["auto", "tokens", "function", "equal", "samples"], "squares": ["auto", "samples", "equal", "tokens"]}
    weight = rng.choice(weights.get(loss, ["auto"]) if one_in(2) else ["auto"])
    if loss == "terms":  # exact where the totals of a window are known before it runs
        weight = "auto" if micro_batch is None and one_in(3) else "list"
        if weight == "auto":
            kind, size = rng.choice([("int", 1), ("mapping", [(0, 1)])])
    policy: dict[str, Any] = {
        "tail": rng.choice(["step", "step", "drop", "carry"]),
        "scheduler_counts": rng.choice(["optimizer_steps", "micro_batches"]),
        "on_nonfinite": rng.choice(["propagate", "propagate", "skip", "raise"]),
        "log": not one_in(3),
    }
    if loss == "terms" and weight == "auto":  # left out after its backward, a micro-batch is in no totals before
        policy["on_nonfinite"] = "propagate"
    dtype = torch.float64
    if loss in ("tokens", "squares", "sum") and micro_batch != ("auto", 0) and one_in(4 if engine != "fsdp2" else 12):
        dtype = rng.choice([torch.float32, torch.bfloat16])
        policy["accumulate_dtype"] = rng.choice([torch.float32, torch.float64]) if dtype == torch.bfloat16 else torch.float64
    elif one_in(8):
        policy["accumulate_dtype"] = torch.float64  # which the parameters have
    epochs = rng.randint(1, 3)
    trainer: dict[str, Any] = {"max_epochs": epochs}
    if one_in(4):
        trainer["max_steps"] = rng.randint(1, 5)
    if one_in(3):
        trainer["gradient_clip_val"] = rng.choice([0.01, 0.05, 0.3])
        trainer["gradient_clip_algorithm"] = rng.choice(["norm", "value"] if engine != "fsdp2" else ["norm"])
    lengths = [rng.randint(1, 6) for _ in range(ranks)]
    strategy: dict[str, Any] = {}
    if engine == "ddp":
        strategy = {"find_unused_parameters": one_in(2), "gradient_as_bucket_view": one_in(4)}
        lengths[rng.randrange(2)] = rng.choice([lengths[0], 0, lengths[1]])
        lengths[0] = max(lengths[0], 1 - min(1, lengths[1]))
    if ranks > 1 and one_in(4):
        strategy["sync"] = "micro_batch"
    is_marked = "all"
    if engine == "accum" or strategy.get("find_unused_parameters"):
        is_marked = rng.choice(["all", "some", "a batch", "some"])
    rng.choice("sse"), rng.randint(1, 3), rng.choice("dl")  # what seeds that found faults stand for stays
    point = Point(
        seed, engine, loss, dtype, rng.choice(["sgd", "adamw"]), (kind, size), policy, weight, micro_batch, trainer,
        {"interval": rng.choice(["step", "step", "epoch"]), "frequency": rng.randint(1, 3),
         "kind": rng.choice(["decay", "linear"])},
        strategy, lengths, is_sized=not one_in(3), is_marked=is_marked, holes={},
        memory=rng.choice([None, 2, 1]) if micro_batch == ("auto", 0) else None,
        callbacks=[name for name, number in (("listener", 3), ("saver", 6), ("noise", 6)) if one_in(number)],
        stops_after=rng.randint(1, 6) if one_in(6) else None,
    )  # fmt: skip
    if _needs_rows(point):
        policy["trim_padding"], point.memory = False, None
    _draw_holes(point, rng)
    if _needs_rows(point):
        policy["trim_padding"], point.memory = False, None
    if ranks == 1 and "nan" in point.holes.values() and policy["on_nonfinite"] == "propagate":
        policy["on_nonfinite"] = "skip"
    point.batches = _draw_batches(point, rng)
    return point


def _draw_holes(point: Point, rng: random.Random) -> None:
    kinds = ["no batch", "no loss", "no batch", "no loss"]
    if point.weight not in ("equal", "samples", "list") and point.loss != "terms" and not point.is_low_precision:
        kinds.append("no labels")
    if point.policy["on_nonfinite"] == "skip" or (point.policy["on_nonfinite"] == "raise" and point.ranks == 1):
        kinds += ["nan", "nan"]
    if point.weight == "list":
        kinds = ["no batch"]
    for rank, length in enumerate(point.lengths):
        for index in range(length):
            if rng.random() < 0.15 and not (point.engine == "fsdp2" and index == 0):  # where a rank has to begin with a loss
                point.holes[rank, index] = rng.choice(kinds)


def _needs_rows(point: Point) -> bool:  # which rows are in which micro-batch makes a difference
    is_uneven = not is_consistent(point) or point.counts_tokens or point.is_low_precision or point.loss == "terms"
    return point.micro_batch is not None and (is_uneven or "nan" in point.holes.values())


def is_consistent(point: Point) -> bool:  # the weight is what the mean loss is divided by
    of_loss = {"tokens": ["tokens", "function"], "squares": ["samples"], "terms": ["list"]}
    return point.weight in ["auto", *of_loss.get(point.loss, [])]


def _draw_batches(point: Point, rng: random.Random) -> list[list[Batch | None]]:
    generator = torch.Generator().manual_seed(rng.randrange(10**6))

    def batch(rank: int, index: int) -> Batch | None:
        hole = point.holes.get((rank, index), "")
        if hole == "no batch":
            return None
        rows = rng.randint(1, 5)
        x = torch.randn(rows, COLUMNS, FEATURES, generator=generator, dtype=torch.float64)
        labels = torch.randint(0, CLASSES, (rows, COLUMNS), generator=generator)
        mask = torch.ones(rows, COLUMNS, dtype=torch.long)
        for row in range(rows):
            length = rng.randint(1, COLUMNS)
            mask[row, length:], labels[row, length:], x[row, length:] = 0, NO_LABEL, 0.0
            if length > 2 and rng.random() < 0.3:
                labels[row, 0] = NO_LABEL  # and seen by the model all the same
        marks = torch.ones(rows, dtype=torch.long)
        if point.is_marked != "all":
            marks = (torch.rand(rows, generator=generator) < 0.2).long()
            if point.is_marked == "a batch":
                marks = torch.full((rows,), int(rng.random() < 0.3))
        if hole == "no labels":
            labels = torch.full_like(labels, NO_LABEL)
        if hole == "nan":
            x[rng.randrange(rows)] = math.nan
        target = torch.randn(rows, 2, generator=generator, dtype=torch.float64)
        more = {"target": target.to(point.dtype), "marks": marks, "has_loss": hole != "no loss"}
        return {"x": x.to(point.dtype), "labels": labels, "attention_mask": mask, **more}

    return [[batch(rank, index) for index in range(length)] for rank, length in enumerate(point.lengths)]


class Net(nn.Module):  # features of each column, a parameter for marked rows only, and two heads
    def __init__(self, point: Point) -> None:
        super().__init__()
        torch.manual_seed(point.seed)
        self.uses_all = point.engine == "fsdp2"
        self.trunk = nn.Linear(FEATURES, 5)
        if point.loss != "squares":
            self.classes = nn.Linear(5, CLASSES)
        if point.loss in ("squares", "terms"):
            self.values = nn.Linear(5, 2)
        self.of_marked = nn.Parameter(torch.randn(5))
        self.kind = point.loss
        self.register_buffer("class_weights", torch.tensor([1.0, 0.5, 2.0, 0.25]), persistent=False)
        self.to(point.dtype)

    def forward(self, batch: Batch) -> Tensor:  # the loss of a batch
        hidden, marks = self.trunk(batch["x"]), batch["marks"]
        if self.uses_all or bool(marks.any()):
            hidden = hidden + marks.to(hidden.dtype)[:, None, None] * self.of_marked
        hidden = hidden.tanh()
        if self.kind == "squares":
            return self.squares(hidden, batch)
        logits, labels = self.classes(hidden).flatten(0, 1), batch["labels"].flatten()
        weights = self.class_weights if self.kind == "weighted" else None
        reduction = {"sum": "sum", "masked": "none"}.get(self.kind, "mean")
        loss = F.cross_entropy(logits, labels, weights, ignore_index=NO_LABEL, reduction=reduction)
        if self.kind == "masked":
            mask = (labels != NO_LABEL).to(logits.dtype)
            return (loss * mask).sum() / mask.sum()
        return loss + 0.5 * self.squares(hidden, batch) if self.kind == "terms" else loss

    def squares(self, hidden: Tensor, batch: Batch) -> Tensor:
        seen = batch["attention_mask"].to(hidden.dtype)[..., None]
        return F.mse_loss(self.values((hidden * seen).sum(1) / seen.sum(1)), batch["target"])
