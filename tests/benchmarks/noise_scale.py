"""What GradientNoiseScale costs: the same training without it, with it, and with one window in ten measured.

A small GPT, or with --layers 0 a model of one layer, where all is overhead. The sides take turns in one process, in an order that
turns round each time, and are timed by their loader from the batch after the warm-up to the last one. The machine may be shared
and noisy, so what is reported is the ratio of the medians, and quartiles of the ratios round by round.

    python tests/benchmarks/noise_scale.py --rounds 15 --layers 4 --width 128
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from collections.abc import Callable, Iterator

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_accum import GradientAccumulation, GradientNoiseScale

Clock = Callable[[], float]
VOCABULARY, LENGTH = 256, 64
WITHOUT, SIDES = "without", {"without": None, "every window": 1, "one window in ten": 10}


class GPT(pl.LightningModule):
    """Blocks over bytes; none of them is a single layer."""

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, width)
        block = nn.TransformerEncoderLayer(width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(block, layers, enable_nested_tensor=False) if layers else None
        self.head = nn.Linear(width, VOCABULARY)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        hidden = self.embedding(batch)
        if self.blocks is not None:
            mask = nn.Transformer.generate_square_subsequent_mask(batch.shape[1], device=batch.device)
            hidden = self.blocks(hidden, mask=mask, is_causal=True)
        logits = self.head(hidden)
        return cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


class TimedBatches:
    """A loader that notes when the first and the last of the batches that count are drawn."""

    def __init__(self, warm_up: int, counted: int, rows: int, device: str, clock: Clock) -> None:
        generator = torch.Generator().manual_seed(0)
        self._batches = [torch.randint(VOCABULARY, (rows, LENGTH), generator=generator) for _ in range(16)]
        self._warm_up, self._counted, self._device, self._clock = warm_up, counted, device, clock
        self.milliseconds = 0.0

    def __len__(self) -> int:
        return self._warm_up + self._counted + 1

    def __iter__(self) -> Iterator[Tensor]:
        for index in range(len(self)):
            if index in (self._warm_up, self._warm_up + self._counted):
                if self._device == "cuda":
                    torch.cuda.synchronize()
                now = self._clock()
                self.milliseconds = now if index == self._warm_up else (now - self.milliseconds) / self._counted * 1e3
            yield self._batches[index % len(self._batches)]


def train(side: str, batches: TimedBatches, arguments: argparse.Namespace) -> float:
    """Milliseconds per micro-batch."""
    every = SIDES[side]
    callbacks: list[pl.Callback] = [GradientAccumulation(arguments.window)]
    if every is not None:
        callbacks.append(GradientNoiseScale(every_n_windows=every))
    trainer = pl.Trainer(
        accelerator="gpu" if arguments.device == "cuda" else "cpu",
        devices=1,
        strategy="accum",
        callbacks=callbacks,
        max_epochs=1,
        logger=False,
        enable_progress_bar=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(GPT(arguments.layers, arguments.width), batches)
    return batches.milliseconds


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15, help="how often every side is measured (default: 15)")
    parser.add_argument("--windows", type=int, default=20, help="windows that are timed in a round (default: 20)")
    parser.add_argument("--window", type=int, default=8, help="micro-batches in a window (default: 8)")
    parser.add_argument("--layers", type=int, default=4, help="0 for one layer alone (default: 4)")
    parser.add_argument("--width", type=int, default=128, help="of a layer (default: 128)")
    parser.add_argument("--rows", type=int, default=8, help=f"rows of {LENGTH} bytes in a micro-batch (default: 8)")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--clock", choices=["wall", "process"], default="wall", help="process: CPU time, for a shared machine")
    arguments = parser.parse_args()
    clock = time.perf_counter if arguments.clock == "wall" else time.process_time
    batches = TimedBatches(2 * arguments.window, arguments.windows * arguments.window, arguments.rows, arguments.device, clock)
    measured: dict[str, list[float]] = {side: [] for side in SIDES}
    for round_ in range(-1, arguments.rounds):  # the first warms up
        for side in SIDES if round_ % 2 else reversed(SIDES):
            gc.collect()
            milliseconds = train(side, batches, arguments)
            if round_ >= 0:
                measured[side].append(milliseconds)
    parameters = [parameter.numel() for parameter in GPT(arguments.layers, arguments.width).parameters()]
    print(
        f"{sum(parameters):,} parameters in {len(parameters)} tensors, {arguments.rows * LENGTH} tokens a micro-batch,"
        f" {arguments.window} a window, {arguments.rounds} rounds of {arguments.windows} windows, {arguments.device},"
        f" {arguments.clock} clock,"
        f" Lightning {pl.__version__}, torch {torch.__version__}"
    )
    print(f"{'':20}{'ms per micro-batch':>20}{'/ without':>12}{'round by round':>26}")
    without = statistics.median(measured[WITHOUT])
    for side, times in measured.items():
        median = statistics.median(times)
        ratios = [own / other for own, other in zip(times, measured[WITHOUT], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4) if len(ratios) > 1 else ratios * 3
        print(f"{side:20}{median:20.3f}{median / without:12.3f}{f'{middle:.3f} ({low:.3f}..{high:.3f})':>26}")


if __name__ == "__main__":
    main()
