"""What several terms with different denominators cost: windows of a cross entropy over tokens plus an error over samples.

Sides, interleaved in one process, each in windows of the same number of loader batches of the same shape:

one term              the cross entropy alone, no token ignored
a plain window        both terms, no token ignored: tokens and samples are proportional, so one weight is exact
counted first         both terms, tokens ignored at the end of rows, no argument: each window runs its forwards once more
weight=[...]          the same, with ``weight=[TokenCount(), SampleCount()]``: loader batches are counted ahead, without a forward

The check, and what a first window and the eighth cost, in which a micro-batch is looked at, fall into the warm-up. The ratios are
those of medians; the last column is the median of the ratios of each round to a plain window, and its quartiles.

    python tests/benchmarks/terms.py --rounds 5
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from side_by_side import CLOCKS, GPT, IGNORED, Module, TimedBatches, command_line, compare, fit, interleaved, timed
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import SampleCount, TokenCount

ROWS, LENGTH, VOCABULARY, FEATURES = 8, 32, 256, 64
PLAIN = "a plain window"
Batch = dict[str, Tensor]


class Scored(nn.Module):  # a net that gives (rows, places, classes), and a score of each row
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net, self.score = net, nn.Linear(VOCABULARY, 1)


def mlp() -> nn.Module:  # reads each place of a row by itself
    torch.manual_seed(0)
    wide = [nn.Linear(FEATURES, FEATURES), nn.ReLU()]
    return nn.Sequential(nn.Embedding(VOCABULARY, FEATURES), *wide, nn.Linear(FEATURES, VOCABULARY))


MODELS: dict[str, Callable[[], nn.Module]] = {"GPT of 2 layers": lambda: GPT(VOCABULARY, FEATURES, 2, LENGTH), "MLP": mlp}


def tokens_alone(net: nn.Module, batch: Batch) -> Tensor:  # one mean over tokens
    return F.cross_entropy(net.net(batch["input_ids"]).flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


def tokens_and_samples(net: nn.Module, batch: Batch) -> Tensor:  # two means, over tokens and over samples
    logits = net.net(batch["input_ids"])
    error = F.mse_loss(net.score(logits.mean(1))[:, 0], batch["score"])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED) + 0.5 * error


def made(number: int, has_ignored: bool) -> list[Batch]:  # so many batches of one shape
    generator, batches = torch.Generator().manual_seed(0), []
    for _ in range(number):
        ids, length = (
            torch.randint(1, most, size, generator=generator) for most, size in ((VOCABULARY, (ROWS, LENGTH)), (LENGTH, (ROWS, 1)))
        )
        is_ignored = has_ignored & (torch.arange(LENGTH) > length)
        batches.append(
            {"input_ids": ids, "labels": ids.masked_fill(is_ignored, IGNORED), "score": torch.rand(ROWS, generator=generator)}
        )
    return batches


def main(rounds: int = 5, windows: int = 10, window: int = 8, clock: str = "cpu") -> None:  # print one table for all models
    full, ragged = made(4 * window, has_ignored=False), made(4 * window, has_ignored=True)
    each = [TokenCount(shift=False), SampleCount()]
    measured = {}
    for model, make in MODELS.items():

        def side(loss: Callable[[nn.Module, Batch], Tensor], batches: list[Batch], make: Any = make, **policy: Any) -> Any:
            counted = TimedBatches(batches, 9 * window, windows * window, CLOCKS[clock])
            return partial(timed, fit, lambda: Module(Scored(make()), loss), counted, window=window, **policy)

        sides = {
            "one term": side(tokens_alone, full),
            PLAIN: side(tokens_and_samples, full),
            "counted first": side(tokens_and_samples, ragged),
            "weight=[...]": side(tokens_and_samples, ragged, weight=each),
        }
        measured[model] = interleaved(sides, rounds)
    compare(measured, "us per micro-batch", "one term", PLAIN)


if __name__ == "__main__":
    command_line(main)
