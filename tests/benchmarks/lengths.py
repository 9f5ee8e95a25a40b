"""What sorting, trimming and packing are worth: tokens per second on sequences of very different lengths.

A loader gives batches of 64 sequences, padded to the longest of the batch. Their lengths are log-normal with a median of 80 tokens,
cut at 512: with a sigma of 0.9 in 72 % of the batches. A batch runs as micro-batches of 8, through a transformer of 4 layers and
256 features that masks padding as a key, with the mean cross entropy over its tokens. Sides, interleaved in one process: this
package with ``micro_batch=8``, and with ``Tokens(n)``, n half of what the largest micro-batch of 8 rows can have; and hand-written
loops over micro-batches of 8: in the order of arrival, each trimmed to its own longest row; padded to the longest of their batch of
64; sorted and trimmed. Splitting and trimming is timed; collating is not.

Tokens (padding is none) per second are medians over the rounds. Every round has sequences of its own, the same for all sides. What
is computed for each token, padding included, stands beside it (positions). The set-up and the trial of a trimmed batch fall into a
first window that is not timed.

    python tests/benchmarks/lengths.py --rounds 5 --windows 1
    python tests/benchmarks/lengths.py --rounds 1 --median 20 --longest 128
"""

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import lightning.pytorch as pl
import side_by_side as shared
import torch
from side_by_side import GPT, IGNORED, Module, TimedBatches, command_line, fit, show
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from lightning_accum import Tokens

ROWS, MICRO_BATCH, VOCABULARY, FEATURES, LAYERS = 64, 8, 1000, 256, 4

Batch = dict[str, Tensor]
Train = Callable[[pl.LightningModule, Any], None]


def draw(number: int, median: int, longest: int, sigma: float, generator: torch.Generator) -> list[Tensor]:
    """Sequences of tokens in random order, one from every ``number``-th part of their distribution: few stand for many."""
    quantiles = (torch.randperm(number, generator=generator) + torch.rand(number, generator=generator)) / number
    lengths = (median * (sigma * torch.special.ndtri(quantiles)).exp()).round().clamp(1, longest).long()
    return [torch.randint(VOCABULARY, (length,), generator=generator) for length in lengths.tolist()]


def collate(sequences: Sequence[Tensor]) -> Batch:  # pad to the longest; the label of a token is its successor in the vocabulary
    inputs = pad_sequence(list(sequences), batch_first=True)
    labels = pad_sequence([(tokens + 1) % VOCABULARY for tokens in sequences], batch_first=True, padding_value=IGNORED)
    return {"input_ids": inputs, "attention_mask": (labels != IGNORED).long(), "labels": labels}


def parts(batch: Batch, is_sorted: bool = False, is_trimmed: bool = False) -> Iterator[Batch]:
    """Micro-batches in the order of arrival or with the longest rows first, as wide as their batch or as their longest row."""
    lengths = batch["attention_mask"].sum(1)
    order = lengths.argsort(descending=True) if is_sorted else torch.arange(len(lengths))
    for rows in order.split(MICRO_BATCH):
        width = int(lengths[rows].max()) if is_trimmed else None
        yield {name: tensor[rows, :width] for name, tensor in batch.items()}


def tag(net: nn.Module, batch: Batch) -> Tensor:  # the mean loss of all tokens that are no padding, each of which sees all others
    logits = net(batch["input_ids"], batch["attention_mask"].bool()[:, None, None])
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)


by_hand = partial(shared.split_by_hand, count=lambda batch: batch["attention_mask"].sum().item())


def all_sides(longest: int) -> dict[str, Train]:  # what is compared, in the order of the table
    half = Tokens(MICRO_BATCH * longest // 2)
    return {
        f"micro_batch={MICRO_BATCH}": partial(fit, micro_batch=MICRO_BATCH),
        f"micro_batch=Tokens({half.count})": partial(fit, micro_batch=half),
        "by hand, own longest": partial(by_hand, cut=partial(parts, is_trimmed=True)),
        "by hand, padded": partial(by_hand, cut=parts),
        "by hand, sorted, trimmed": partial(by_hand, cut=partial(parts, is_sorted=True, is_trimmed=True)),
    }


def run(
    train: Train, windows: Sequence[list[Tensor]], warm_up: list[Tensor], longest: int, clock: Callable[[], float]
) -> tuple[float, float]:
    """Tokens per second and positions for each token, on windows after one of few tokens and one in which the check looks again."""
    module, positions = Module(GPT(VOCABULARY, FEATURES, LAYERS, longest), tag), [0]
    module.net.token.register_forward_pre_hook(lambda _, inputs: positions.append(positions[-1] + inputs[0].numel()))
    first, *drawn = map(collate, (warm_up, *windows))
    batches = TimedBatches([first, drawn[0], *drawn, first], 2, len(drawn), lambda: (clock(), positions[-1]))
    train(module, batches)
    (start, before), (end, after) = batches.readings
    tokens = sum(len(tokens) for window in windows for tokens in window)
    return tokens / (end - start), (after - before) / tokens


def draw_speeds(speeds: dict[str, list[float]], path: str) -> None:  # a bar for each side: the median of its rounds
    title = f"Batches of {ROWS} sequences of very different lengths"
    below = "tokens a second, padding not counted (one CPU core; median of the rounds)"
    with shared.figure(path, title, "blue: this package", (7.5, 3.6), xlabel=below) as axes:
        colors = ["tab:blue" if name.startswith("micro_batch") else "tab:gray" for name in speeds]
        axes.bar_label(axes.barh(list(speeds), list(map(statistics.median, speeds.values())), color=colors), fmt=" %.0f")
        axes.invert_yaxis()


def main(
    rounds: int = 5, windows: int = 1, median: int = 80, longest: int = 512, sigma: float = 0.9, clock: str = "wall",
    out: str | None = None,
) -> None:  # fmt: skip
    """Measure and print; with ``--out``, draw the medians, too."""
    sides, generator = all_sides(longest), torch.Generator().manual_seed(0)
    # padded, these are more than Tokens(...) allows, so that the trial of a trimmed batch falls into them
    few = [*draw(ROWS - 1, 4, 8, sigma, generator), torch.zeros(longest // 16 + 1, dtype=torch.long)]
    drawn = draw(rounds * windows * ROWS, median, longest, sigma, generator)
    batches = [drawn[start : start + ROWS] for start in range(0, len(drawn), ROWS)]
    of_rounds = [batches[start : start + windows] for start in range(0, len(batches), windows)]
    own = {name: iter([of_rounds[0], *of_rounds]) for name in sides}  # the first is a warm-up
    take = {name: lambda name=name: run(sides[name], next(own[name]), few, longest, shared.CLOCKS[clock]) for name in sides}
    found = shared.interleaved(take, rounds)
    longests = [max(len(tokens) for tokens in batch) for batch in batches]
    number = f"{longests.count(longest)} of {len(longests)} times {longest}"
    print(f"The longest of a batch: {min(longests)} to {max(longests)}, {number}")
    speeds, table = {name: [speed for speed, _ in results] for name, results in found.items()}, []
    ours = [name for name in speeds if name.startswith("micro_batch")]
    for name, of_side in speeds.items():
        ratios = [[own / other for own, other in zip(speeds[one], of_side, strict=True)] for one in ours]
        positions = statistics.mean(positions for _, positions in found[name])
        table.append([name, f"{statistics.median(of_side):.0f}", f"{positions:.2f}", *map(shared.quartiles, ratios)])
    show(["", "tokens/s", "positions", *(f"{one} over it, round by round" for one in ours)], table)
    if out is not None:
        draw_speeds(speeds, out)


if __name__ == "__main__":
    command_line(main)
