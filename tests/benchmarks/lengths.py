"""What sorting, trimming and packing are worth: tokens per second on sequences of very different lengths.

A loader gives batches of 64 sequences, padded to the longest of the batch. Their lengths are log-normal with a median of 80 tokens,
cut at 512. The default sigma of 0.9 is the smallest (in tenths) with which most batches hold a sequence of 512: 72 % of them do;
0.8 gives 48 %, 1.0 gives 87 %. A batch runs as micro-batches of 8, through a transformer of 4 layers and 256 features that masks
padding as a key, with the mean cross entropy over its tokens.

Sides, interleaved in one process, on the same sequences. Splitting and trimming is timed; collating, for Lightning too, is not:

a   this package, ``micro_batch=8``: rows sorted by length, micro-batches of up to 8 trimmed to their longest row
b   this package, ``micro_batch=Tokens(n)``, with n half of what the largest micro-batch of 8 rows can have
b2  the same with a quarter: about as many micro-batches as ``a`` has
c   this package, ``micro_batch=8, trim_padding=False``: as the loader padded them
d   a hand-written loop over micro-batches of 8 in the order of arrival, each trimmed to its own longest row
d2  Lightning's own accumulation, from a loader that collates 8 sequences each in the order of arrival
e   Lightning's own accumulation, from a loader of micro-batches of 8, padded to the longest of their batch of 64
f   a hand-written loop over micro-batches of 8, padded to the longest of their batch of 64
g   a hand-written loop over micro-batches of 8, sorted and trimmed: as ``a``, which also cuts off a few rows that are far longer

First the gradients of one window are compared in float64 to those of the whole batch in one piece. Lightning's, d2 and e, are means
of means and so others. What is reported is tokens (padding is none) per second, medians over the rounds and their ratios. Every
round has sequences of its own, the same for all sides, so the quartiles hold the chance of the lengths too; over all rounds the
lengths are drawn evenly from their distribution. What is computed for each token, padding included, stands beside it (positions): a
model without attention and without overhead would be as many times as quick. The set-up, and the trial of a trimmed batch that the
package makes once, fall into a first window of few tokens that is not timed.

    python tests/benchmarks/lengths.py --rounds 5 --windows 1
    python tests/benchmarks/lengths.py --quick
"""

from __future__ import annotations

import argparse
import gc
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.rnn import pad_sequence

from lightning_accum import GradientAccumulation, Tokens

ROWS, MICRO_BATCH, VOCABULARY, IGNORED = 64, 8, 1000, -100
FEATURES, HEADS, LAYERS = 256, 4, 4
OURS, AS_EXACT = ("a", "b", "b2"), ("a", "b", "b2", "c", "d", "f", "g")
GOALS = ((4.0, ("c", "e", "f")), (2.0, ("d", "d2")))  # one of ours is to be so many times as quick as all of these

Batch = dict[str, Tensor]
Cut = Callable[[Batch], Iterable[Batch]]


# --- data -----------------------------------------------------------------------------------------------------------------


class Lengths(NamedTuple):
    """A log-normal distribution of lengths, cut at the longest."""

    median: int
    longest: int
    sigma: float

    def draw(self, number: int, generator: torch.Generator) -> list[Tensor]:
        """Sequences of tokens in random order, one from every ``number``-th part of the distribution: few stand for many."""
        quantiles = (torch.randperm(number, generator=generator) + torch.rand(number, generator=generator)) / number
        lengths = self.median * (self.sigma * torch.special.ndtri(quantiles)).exp()
        return [
            torch.randint(VOCABULARY, (length,), generator=generator)
            for length in lengths.round().clamp(1, self.longest).long().tolist()
        ]


def collate(sequences: Sequence[Tensor]) -> Batch:
    """Pad to the longest; the label of a token is its successor in the vocabulary."""
    inputs = pad_sequence(list(sequences), batch_first=True)
    labels = pad_sequence([(tokens + 1) % VOCABULARY for tokens in sequences], batch_first=True, padding_value=IGNORED)
    return {"input_ids": inputs, "attention_mask": (labels != IGNORED).long(), "labels": labels}


def rows_of(batch: Batch, rows: slice | Tensor, width: int | None = None) -> Batch:
    """Some rows of a batch, and of those the first ``width`` columns."""
    return {name: tensor[rows, :width] for name, tensor in batch.items()}


def as_padded(batch: Batch) -> Iterator[Batch]:
    """Micro-batches in the order of arrival, as wide as their batch."""
    for start in range(0, len(batch["labels"]), MICRO_BATCH):
        yield rows_of(batch, slice(start, start + MICRO_BATCH))


def trimmed(batch: Batch) -> Iterator[Batch]:
    """Micro-batches in the order of arrival, as wide as their longest row."""
    lengths = batch["attention_mask"].sum(1)
    for start in range(0, len(lengths), MICRO_BATCH):
        rows = slice(start, start + MICRO_BATCH)
        yield rows_of(batch, rows, int(lengths[rows].max()))


def sorted_and_trimmed(batch: Batch) -> Iterator[Batch]:
    """Micro-batches with the longest rows first, as wide as their longest row."""
    lengths, order = batch["attention_mask"].sum(1).sort(descending=True)
    for start in range(0, len(lengths), MICRO_BATCH):
        yield rows_of(batch, order[start : start + MICRO_BATCH], int(lengths[start]))


def whole(batch: Batch) -> Iterator[Batch]:
    """The batch in one piece."""
    yield batch


class Batches:
    """A loader that reads meters when it is asked for certain batches: the first that counts, and the first that does no more."""

    def __init__(
        self, batches: Sequence[Batch], marks: Sequence[int] = (), read: Callable[[], tuple[float, int]] | None = None
    ) -> None:
        self._batches, self._marks, self._read = batches, marks, read
        self.readings: list[tuple[float, int]] = []

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Batch]:
        for index, batch in enumerate(self._batches):
            if self._read is not None and index in self._marks:
                self.readings.append(self._read())
            yield batch


# --- model ----------------------------------------------------------------------------------------------------------------


class Block(nn.Module):
    """Attention among all tokens that are no padding, and a feed-forward layer."""

    def __init__(self) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(FEATURES, bias=False) for _ in range(2))
        self.to_heads = nn.Linear(FEATURES, 3 * FEATURES, bias=False)
        self.from_heads = nn.Linear(FEATURES, FEATURES, bias=False)
        self.feed_forward = nn.Sequential(
            nn.Linear(FEATURES, 4 * FEATURES, bias=False), nn.GELU(), nn.Linear(4 * FEATURES, FEATURES, bias=False)
        )

    def forward(self, hidden: Tensor, is_token: Tensor) -> Tensor:
        heads = self.to_heads(self.norms[0](hidden)).unflatten(-1, (3, HEADS, -1)).transpose(1, 3)  # rows, heads, 3, columns, ...
        attended = F.scaled_dot_product_attention(*heads.unbind(2), attn_mask=is_token[:, None, None])
        hidden = hidden + self.from_heads(attended.transpose(1, 2).flatten(2))
        return hidden + self.feed_forward(self.norms[1](hidden))


class Tagger(pl.LightningModule):
    """A transformer that labels every token. It knows nothing of accumulation."""

    def __init__(self, longest: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(VOCABULARY, FEATURES)
        self.positions = nn.Embedding(longest, FEATURES)
        self.blocks = nn.ModuleList(Block() for _ in range(LAYERS))
        self.head = nn.Linear(FEATURES, VOCABULARY, bias=False)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        inputs = batch["input_ids"]
        hidden = self.tokens(inputs) + self.positions.weight[: inputs.shape[1]]
        for block in self.blocks:
            hidden = block(hidden, batch["attention_mask"].bool())
        return F.cross_entropy(self.head(hidden).flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


# --- sides ----------------------------------------------------------------------------------------------------------------


class Side(NamedTuple):
    """One way to train: what it gets for each batch of sequences, and what it does with a loader of that."""

    name: str
    prepare: Callable[[list[Tensor]], list[Batch]]
    train: Callable[[pl.LightningModule, Any], None]


def by_hand(cut: Cut) -> Callable[[pl.LightningModule, Any], None]:
    """Split, weigh, accumulate, step."""

    def train(module: pl.LightningModule, batches: Iterable[Batch]) -> None:
        optimizer = module.configure_optimizers()
        for batch in batches:
            optimizer.zero_grad()
            total = batch["attention_mask"].sum().item()
            for micro_batch in cut(batch):
                loss = module.training_step(micro_batch, 0)
                (loss * (micro_batch["attention_mask"].sum().item() / total)).backward()
            optimizer.step()

    return train


def with_trainer(strategy: str, **policy: Any) -> Callable[[pl.LightningModule, Any], None]:
    """A Trainer with nothing else in it: split by this package, or accumulated by Lightning itself."""

    def train(module: pl.LightningModule, batches: Any) -> None:
        quiet = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False, "enable_model_summary": False}
        callbacks = [GradientAccumulation(**policy)] if strategy == "accum" else None
        window = 1 if strategy == "accum" else ROWS // MICRO_BATCH
        arguments = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "accumulate_grad_batches": window, **quiet}
        pl.Trainer(strategy=strategy, callbacks=callbacks, **arguments).fit(module, batches)

    return train


def all_sides(lengths: Lengths) -> dict[str, Side]:
    """What is compared, in the order of the table."""
    half, quarter = (Tokens(MICRO_BATCH * lengths.longest // divisor) for divisor in (2, 4))

    def in_one(sequences: list[Tensor]) -> list[Batch]:
        return [collate(sequences)]

    def in_eights(sequences: list[Tensor]) -> list[Batch]:
        return [collate(sequences[start : start + MICRO_BATCH]) for start in range(0, len(sequences), MICRO_BATCH)]

    def in_padded_eights(sequences: list[Tensor]) -> list[Batch]:
        return list(as_padded(collate(sequences)))

    return {
        "a": Side(f"micro_batch={MICRO_BATCH}", in_one, with_trainer("accum", micro_batch=MICRO_BATCH)),
        "b": Side(f"micro_batch=Tokens({half.count})", in_one, with_trainer("accum", micro_batch=half)),
        "b2": Side(f"micro_batch=Tokens({quarter.count})", in_one, with_trainer("accum", micro_batch=quarter)),
        "c": Side("trim_padding=False", in_one, with_trainer("accum", micro_batch=MICRO_BATCH, trim_padding=False)),
        "d": Side("by hand, own longest", in_one, by_hand(trimmed)),
        "d2": Side("Lightning, own longest", in_eights, with_trainer("auto")),
        "e": Side("Lightning, padded", in_padded_eights, with_trainer("auto")),
        "f": Side("by hand, padded", in_one, by_hand(as_padded)),
        "g": Side("by hand, sorted, trimmed", in_one, by_hand(sorted_and_trimmed)),
    }


# --- the gradients are the same -------------------------------------------------------------------------------------------


class CapturedTagger(Tagger):
    """Notes the gradients of every optimizer step."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = super().configure_optimizers()
        self.gradients: list[list[Tensor]] = []
        optimizer.register_step_post_hook(
            lambda *_: self.gradients.append([parameter.grad.clone() for parameter in self.parameters()])
        )
        return optimizer


def relative_errors(lengths: Lengths) -> dict[str, float]:
    """The norm of what the gradient of one window is off from that of the whole batch, over the norm of the latter."""
    sequences = lengths.draw(ROWS, torch.Generator().manual_seed(1))

    def gradient(side: Side) -> Tensor:
        module = CapturedTagger(lengths.longest).double()
        side.train(module, Batches(side.prepare(sequences)))
        (gradients,) = module.gradients
        return torch.cat([gradient.flatten() for gradient in gradients])

    expected = gradient(Side("the whole batch", lambda sequences: [collate(sequences)], by_hand(whole)))
    return {key: ((gradient(side) - expected).norm() / expected.norm()).item() for key, side in all_sides(lengths).items()}


# --- how long they take ---------------------------------------------------------------------------------------------------


class Result(NamedTuple):
    """What one side did in one round: positions are tokens and padding."""

    seconds: float
    tokens: int
    positions: int

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def run(side: Side, windows: Sequence[list[Tensor]], warm_up: list[Tensor], longest: int, clock: Callable[[], float]) -> Result:
    """Train on the windows, after one of few tokens and before another that do not count."""
    module, positions = Tagger(longest), [0]

    def count(_: nn.Module, inputs: tuple[Tensor]) -> None:
        positions[0] += inputs[0].numel()

    module.tokens.register_forward_pre_hook(count)
    first, *counted = (side.prepare(sequences) for sequences in (warm_up, *windows))
    drawn = [*first, *(batch for window in counted for batch in window)]
    batches = Batches([*drawn, *first], (len(first), len(drawn)), lambda: (clock(), positions[0]))
    gc.collect()
    side.train(module, batches)
    (start, before), (end, after) = batches.readings
    return Result(end - start, sum(len(tokens) for window in windows for tokens in window), after - before)


def measure(
    sides: dict[str, Side], lengths: Lengths, rounds: int, windows: int, clock: Callable[[], float]
) -> tuple[dict[str, list[Result]], list[int]]:
    """One result a side and round, and the longest sequence of every batch."""
    generator = torch.Generator().manual_seed(0)
    # padded, these are more than Tokens(...) allows, so that the trial of a trimmed batch falls into them
    few = Lengths(4, 8, lengths.sigma).draw(ROWS - 1, generator)
    few.append(torch.zeros(lengths.longest // 16 + 1, dtype=torch.long))
    medium = Lengths(lengths.median, lengths.median, lengths.sigma).draw(ROWS, generator)
    drawn = lengths.draw(rounds * windows * ROWS, generator)
    batches = [drawn[start : start + ROWS] for start in range(0, len(drawn), ROWS)]
    measured: dict[str, list[Result]] = {key: [] for key in sides}
    for side in sides.values():  # imports, caches, the allocator
        run(side, [medium], few, lengths.longest, clock)
    for round_ in range(rounds):
        own = batches[round_ * windows : (round_ + 1) * windows]
        for key in reversed(sides) if round_ % 2 else sides:
            measured[key].append(run(sides[key], own, few, lengths.longest, clock))
    return measured, [max(len(tokens) for tokens in batch) for batch in batches]


def table(sides: dict[str, Side], measured: dict[str, list[Result]]) -> str:
    """The medians, how many times as quick ours are, and quartiles of the latter taken in each round."""
    speeds = {key: [result.speed for result in results] for key, results in measured.items()}
    medians = {key: statistics.median(values) for key, values in speeds.items()}
    lines = [f"{'':32}{'tokens/s':>9}{'positions':>11}"]
    lines[0] += "".join(f"{ours + ' /':>7}{'round by round':>20}" for ours in OURS)
    for key, side in sides.items():
        results = measured[key]
        positions = sum(result.positions for result in results) / sum(result.tokens for result in results)
        line = f"{key:3} {side.name:28}{medians[key]:9.0f}{positions:11.2f}"
        for ours in OURS:
            low, middle, high = _quartiles([own / other for own, other in zip(speeds[ours], speeds[key], strict=True)])
            by_round = "" if ours == key else f"{middle:.2f} ({low:.2f}..{high:.2f})"
            line += f"{medians[ours] / medians[key]:7.2f}{by_round:>20}"
        lines.append(line)
    for least, others in GOALS:
        ratios = {ours: min(medians[ours] / medians[other] for other in others) for ours in OURS}
        found = ", ".join(f"{ours} {ratio:.2f} ({'met' if ratio >= least else 'missed'})" for ours, ratio in ratios.items())
        lines.append(f"at least {least:g} times {', '.join(others)}; the least ratio of medians: {found}")
    return "\n".join(lines)


def draw(sides: dict[str, Side], measured: dict[str, list[Result]], path: Path) -> None:
    """A bar for each side: the median of its rounds, with the slowest and the quickest."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7.5, 3.6), layout="constrained")
    for place, key in enumerate(sides):
        speeds = [result.speed for result in measured[key]]
        middle = statistics.median(speeds)
        spread = [[middle - min(speeds)], [max(speeds) - middle]]
        is_ours = key in OURS or key == "c"
        axes.barh(place, middle, xerr=spread, color="tab:blue" if is_ours else "tab:gray", ecolor="0.3", capsize=2)
        axes.text(max(speeds), place, f"  {middle:.0f}", va="center", fontsize=9)
    axes.set_yticks(range(len(sides)), [side.name for side in sides.values()])
    axes.invert_yaxis()
    axes.margins(x=0.12)
    axes.spines[["top", "right"]].set_visible(False)
    axes.set_xlabel("tokens a second, padding not counted (one CPU core; range of the rounds)")
    axes.set_title(f"Batches of {ROWS} sequences, median 80 tokens, longest 512; blue: this package", fontsize=10, loc="left")
    figure.savefig(path, dpi=150)


def _quartiles(numbers: list[float]) -> list[float]:
    return statistics.quantiles(numbers, n=4) if len(numbers) > 1 else numbers * 3


def main() -> None:
    """Compare gradients, measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="how often every side is measured (default: 5)")
    parser.add_argument("--windows", type=int, default=1, help="batches of 64 that are timed in a round (default: 1)")
    parser.add_argument("--median", type=int, default=80, help="of the lengths (default: 80)")
    parser.add_argument("--longest", type=int, default=512, help="what lengths are cut at (default: 512)")
    parser.add_argument("--sigma", type=float, default=0.9, help="of the logarithms of the lengths (default: 0.9)")
    parser.add_argument("--threads", type=int, default=1, help="of torch (default: 1)")
    parser.add_argument("--quick", action="store_true", help="one round with lengths of a quarter: to see that it works")
    parser.add_argument("--figure", type=Path, help="where to draw the medians")
    parser.add_argument(
        "--clock",
        choices=("wall", "cpu"),
        default="wall",
        help="wall: time that passed (default); cpu: time that this process computed, steadier where others do too",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    lengths, rounds = Lengths(arguments.median, arguments.longest, arguments.sigma), arguments.rounds
    if arguments.quick:
        lengths, rounds = Lengths(lengths.median // 4, lengths.longest // 4, lengths.sigma), 1

    errors = relative_errors(Lengths(10, 64, lengths.sigma))
    print("Relative error of a window's gradient to that of the whole batch, float64, sequences of up to 64:")
    print("  " + ", ".join(f"{key} {error:.1e}" for key, error in errors.items()))
    if max(errors[key] for key in AS_EXACT) > 1e-12:
        raise SystemExit("The gradients are not the same: nothing is timed.")

    sides = all_sides(lengths)
    measured, longest = measure(sides, lengths, rounds, arguments.windows, clock)
    print(
        f"{rounds} rounds of {arguments.windows} windows of {ROWS} sequences, median {lengths.median}, sigma {lengths.sigma}, the"
        f" longest of a batch {min(longest)} to {max(longest)} ({longest.count(lengths.longest)} of {len(longest)} times"
        f" {lengths.longest}), {arguments.threads} threads, {arguments.clock} clock, Lightning {pl.__version__}, torch"
        f" {torch.__version__}"
    )
    print(table(sides, measured))
    if arguments.figure is not None:
        draw(sides, measured, arguments.figure)


if __name__ == "__main__":
    main()
