"""What it costs to read the weight of a loss from its graph, per micro-batch.

python tests/benchmarks/reading.py --calls 20000
"""

from __future__ import annotations

import argparse
import statistics
import timeit

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_accum.weighing.weight import Weigher


def losses() -> dict[str, Tensor]:
    """One loss of each ordinary shape."""
    logits = torch.randn(32, 10, requires_grad=True)
    target, value = torch.randint(10, (32,)), torch.rand(32, 10)
    mask = (torch.rand(32, 10) < 0.5).float()
    return {
        "cross entropy": F.cross_entropy(logits, target),
        "cross entropy / 2": F.cross_entropy(logits, target) / 2,
        "label smoothing": F.cross_entropy(logits, target, label_smoothing=0.1),
        "mean squared error": F.mse_loss(logits, value),
        "mean of a tensor": (logits - value).abs().mean(),
        "masked mean": ((logits - value) * mask).sum() / mask.sum(),
        "two terms": F.cross_entropy(logits, target) + 0.1 * F.mse_loss(logits, value),
    }


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=20_000, help="calls in each of seven rounds (default: %(default)s)")
    calls = parser.parse_args().calls
    torch.set_num_threads(1)
    print(f"Median of 7 rounds of {calls} readings, torch {torch.__version__}")
    for name, loss in losses().items():
        weigher = Weigher("auto", warn=lambda message: None)
        weigher(loss, None)
        rounds = timeit.repeat(lambda weigher=weigher, loss=loss: weigher(loss, None), number=calls, repeat=7)
        print(f"{name:20} {statistics.median(rounds) / calls * 1e6:6.1f} us")


if __name__ == "__main__":
    main()
