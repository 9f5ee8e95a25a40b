"""What a micro-batch costs on a model of one layer, where all of it is overhead: in windows, and of batches that are split.

Sides, interleaved in one process. In windows: a loop written by hand, Lightning's own accumulation, this package, and Accelerate's
``accumulate()`` where it is installed. Split, sixteen micro-batches a batch: a loop that splits it by hand, this package with
``micro_batch=``, a module in manual optimization that splits and weighs by itself, and, from a loader of micro-batches, Lightning's
own accumulation and Accelerate. In hand-written loops: with the Accumulator and without, in plain torch and on Fabric, also on a
small GPT. Every side is timed by its loader, from the batch after the warm-up to the last: medians over many short rounds.

    python tests/benchmarks/overhead.py --rounds 20 --micro-batches 750 --window 8
    python tests/benchmarks/overhead.py --rounds 20 --split-windows 40 --split-features 4096
"""

import importlib.util
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import side_by_side as shared
import torch
from lightning.fabric import Fabric
from side_by_side import GPT, Module, TimedBatches, fit, labelled
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum.fabric import Accumulator

FEATURES, CLASSES, ROWS = 64, 10, 4
SPLIT, SPLIT_ROWS, WARM_UP = 16, 16, 33  # the looks of windows 2, 8 and 32 are before, and the next, at 128, is after


class Logging(Module):  # logs its loss
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, prog_bar=True)
        return loss


def parts(batch: tuple[Tensor, Tensor]) -> Iterator[tuple[Tensor, Tensor]]:  # the micro-batches of a batch
    return zip(batch[0].split(SPLIT_ROWS), batch[1].split(SPLIT_ROWS), strict=True)


class ByItself(Module):  # manual optimization: the module splits its batch, weighs and steps
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.automatic_optimization = False

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        for part in parts(batch):
            self.manual_backward(self.loss(self.net, part) * (len(part[0]) / len(batch[0])))
        optimizer.step()


def side(train: Callable[..., None], batches: TimedBatches, features: int, kind: type[Module] = Module, **how: Any) -> Any:
    return partial(shared.timed, train, lambda: kind(nn.Linear(features, CLASSES), shared.classify), batches, **how)


def in_windows(rounds: int, micro_batches: int, window: int, read: Callable[[], float]) -> None:
    """Print the table of micro-batches that a loader yields."""
    counted = max(1, micro_batches // window) * window
    batches = TimedBatches(labelled(ROWS, FEATURES, CLASSES, 32), WARM_UP * window, counted, read)
    sides = {
        "hand-written loop": side(shared.by_hand, batches, FEATURES, window=window),
        "Lightning": side(fit, batches, FEATURES, n=window),
        "accum, log=False": side(fit, batches, FEATURES, window=window, log=False),
        "Lightning, self.log(loss)": side(fit, batches, FEATURES, Logging, n=window),
        "accum, log=True": side(fit, batches, FEATURES, window=window, log=True),
    }
    if importlib.util.find_spec("accelerate") is not None:
        sides["Accelerate"] = side(shared.accelerated, batches, FEATURES, window=window)
    compared = {"one layer": shared.interleaved(sides, rounds)}
    shared.compare(compared, "us per micro-batch", "hand-written loop", "Lightning")


def in_split_batches(rounds: int, windows: int, features: int, read: Callable[[], float]) -> None:
    """Print the table of batches that are split, or come as so many micro-batches."""
    whole = labelled(SPLIT * SPLIT_ROWS, features, CLASSES, 8)
    large = TimedBatches(whole, WARM_UP, windows, read)
    small = TimedBatches([part for batch in whole for part in parts(batch)], WARM_UP * SPLIT, windows * SPLIT, read)
    sides = {
        "hand-written split": side(shared.split_by_hand, large, features, cut=parts),
        "micro_batch=, log=False": side(fit, large, features, micro_batch=SPLIT_ROWS, log=False),
        "micro_batch=, log=True": side(fit, large, features, micro_batch=SPLIT_ROWS, log=True),
        "manual optimization": side(fit, large, features, ByItself),
        "Lightning": side(fit, small, features, n=SPLIT),
    }
    if importlib.util.find_spec("accelerate") is not None:
        sides["Accelerate"] = side(shared.accelerated, small, features, window=SPLIT)
    found = shared.interleaved(sides, rounds)
    for name in ("Lightning", "Accelerate"):
        found[name] = [SPLIT * micro_batch for micro_batch in found.get(name, [])]
    shared.compare({"split": {name: times for name, times in found.items() if times}}, "us per batch", "hand-written split")


def of_rows(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:
    """Mean cross entropy of labels, or of tokens one after the other."""
    return F.cross_entropy(net(batch[0]).flatten(0, -2), batch[1])


def with_accumulator(module: Module, batches: TimedBatches, fabric: Fabric | None, window: int) -> None:
    net, optimizer = module.net, module.configure_optimizers()
    if fabric is not None:
        net, optimizer = fabric.setup(net, optimizer)
    accumulator = Accumulator(fabric, net, optimizer, window=window, log=False)
    for batch in accumulator(batches):
        accumulator.backward(of_rows(net, batch))
        accumulator.step()


def in_loops(rounds: int, window: int, read: Callable[[], float]) -> None:  # print the table of hand-written loops
    generator = torch.Generator().manual_seed(0)
    tokens = [torch.randint(256, (4, 33), generator=generator) for _ in range(8)]
    models: dict[str, tuple[Callable[[], nn.Module], list[Any], int]] = {
        "one layer": (lambda: nn.Linear(FEATURES, CLASSES), labelled(ROWS, FEATURES, CLASSES, 32), 800),
        "small GPT": (lambda: GPT(256, 64, 2, 32), [(rows[:, :-1], rows[:, 1:].flatten()) for rows in tokens], 80),
    }
    measured = {}
    for name, (make, distinct, micro_batches) in models.items():
        batches = TimedBatches(distinct, 6 * window, micro_batches // window * window, read)
        for where, fabric in (("plain torch", None), ("Fabric", Fabric(accelerator="cpu", devices=1))):
            loops = {"by hand": shared.by_hand, "Accumulator": with_accumulator}
            new, how = (lambda make=make: Module(make(), of_rows)), {"fabric": fabric, "window": window}
            sides = {side: partial(shared.timed, loop, new, batches, **how) for side, loop in loops.items()}
            measured[f"{name}, {where}"] = shared.interleaved(sides, rounds)
    shared.compare(measured, "us per micro-batch", "by hand")


def main(
    rounds: int = 20, micro_batches: int = 750, window: int = 8, split_windows: int = 40, split_features: int = 4096,
    clock: str = "wall",
) -> None:  # fmt: skip
    """Measure and print the tables."""
    in_windows(rounds, micro_batches, window, shared.CLOCKS[clock])
    in_split_batches(rounds, split_windows, split_features, shared.CLOCKS[clock])
    in_loops(rounds, window, shared.CLOCKS[clock])


if __name__ == "__main__":
    shared.command_line(main)
