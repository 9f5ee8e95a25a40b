"""What it costs to read the weight of a loss from its graph, per micro-batch.

python tests/benchmarks/reading.py --seconds 1
"""

import torch
from side_by_side import command_line, show
from torch.nn import functional as F
from torch.utils.benchmark import Timer

from lightning_accum.weighing.shares import terms_of
from lightning_accum.weighing.weight import Weigher


def main(seconds: float = 1.0) -> None:
    """Time one loss of each ordinary shape."""
    logits = torch.randn(32, 10, requires_grad=True)
    target, value, mask = torch.randint(10, (32,)), torch.rand(32, 10), (torch.rand(32, 10) < 0.5).float()
    losses = {
        "cross entropy": F.cross_entropy(logits, target),
        "cross entropy / 2": F.cross_entropy(logits, target) / 2,
        "label smoothing": F.cross_entropy(logits, target, label_smoothing=0.1),
        "mean squared error": F.mse_loss(logits, value),
        "mean of a tensor": (logits - value).abs().mean(),
        "masked mean": ((logits - value) * mask).sum() / mask.sum(),
        "two terms": F.cross_entropy(logits, target) + 0.1 * F.mse_loss(logits, value),
    }
    rows = []
    for name, loss in losses.items():
        names = {"weigher": Weigher("auto"), "terms_of": terms_of, "loss": loss}
        timers = [Timer(call, setup=call, globals=names) for call in ("weigher(loss, None)", "terms_of(loss)")]
        rows.append([name, *(f"{timer.blocked_autorange(min_run_time=seconds).median * 1e6:.1f}" for timer in timers)])
    show(["us, median", "its weight", "its terms"], rows)


if __name__ == "__main__":
    command_line(main)
