"""What becomes of losses that nobody here wrote, in windows and split: the table of tests/loss_table, and losses of libraries.

For each family: how many trainings were exact, refused, warned of, silently wrong, and false alarms (a warning or an error of the
check, though the training is exact without it). And of the check alone: of the losses that the reader of the graph lets pass, how
many that deviate it found or mended, and how many that are exact it refused; and what it costs, in seconds and memory.

    python tests/benchmarks/losses.py                      # all, about 7 minutes of a core
    python tests/benchmarks/losses.py --every 10           # a tenth of the table
    python tests/benchmarks/losses.py --family torchvision # of one family

Libraries that are not installed are passed over with a line: torchvision, pytorch_metric_learning, segmentation_models_pytorch,
kornia, monai.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import sys
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch
from loss_table import LOSSES
from loss_table.rows import Kind, Loss, Table
from loss_table.training import WAYS, Outcome, examine
from memory import SavedBytes

from lightning_accum import UnreadableLossError
from lightning_accum.weighing.check import Check

# --- losses of libraries ---


def torchvision(library: ModuleType, table: Table) -> None:
    """Boxes and focal losses."""
    from loss_table.vision import corners

    ops = import_module("torchvision.ops")
    for reduction in ("mean", "sum"):
        for name in ("generalized_box_iou_loss", "distance_box_iou_loss", "complete_box_iou_loss"):
            function = getattr(ops, name)
            table.adds_up(
                f"{name}, {reduction}",
                "x boxes",
                lambda o, b, m, f=function, r=reduction: f(corners(o), b.boxes, reduction=r),
            )
        table.adds_up(
            f"sigmoid_focal_loss, {reduction}",
            "x q",
            lambda o, b, m, r=reduction: ops.sigmoid_focal_loss(o, b.q, reduction=r),
        )


def pytorch_metric_learning(library: ModuleType, table: Table) -> None:
    """Embeddings and labels; what compares the rows of a batch, and what compares them with its own parameters."""
    losses = import_module("pytorch_metric_learning.losses")
    of_pairs = (
        "AngularLoss", "CircleLoss", "ContrastiveLoss", "FastAPLoss", "GeneralizedLiftedStructureLoss", "IntraPairVarianceLoss",
        "LiftedStructureLoss", "MarginLoss", "MultiSimilarityLoss", "NCALoss", "NPairsLoss", "NTXentLoss",
        "SignalToNoiseRatioContrastiveLoss",
        "SupConLoss", "TripletMarginLoss", "TupletMarginLoss",
    )  # fmt: skip
    of_classes = ("ArcFaceLoss", "CosFaceLoss", "NormalizedSoftmaxLoss", "ProxyNCALoss", "SoftTripleLoss", "SubCenterArcFaceLoss")
    for name in of_pairs:
        loss = getattr(losses, name)()
        table.batch(name, "x t", lambda o, b, m, f=loss: f(o, b.t))
    for name in of_classes:
        loss = getattr(losses, name)(num_classes=4, embedding_size=4).double().requires_grad_(False)
        table.adds_up(name, "x t", lambda o, b, m, f=loss: f(o, b.t))
    anchor = losses.ProxyAnchorLoss(num_classes=4, embedding_size=4).double().requires_grad_(False)
    table.batch("ProxyAnchorLoss", "x t", lambda o, b, m: anchor(o, b.t))


def segmentation_models_pytorch(library: ModuleType, table: Table) -> None:
    """Overlaps, which are of the whole batch there."""
    losses = import_module("segmentation_models_pytorch.losses")
    for name in ("DiceLoss", "JaccardLoss", "TverskyLoss"):
        of_labels, of_masks = getattr(losses, name)("multiclass"), getattr(losses, name)("multilabel")
        table.batch(f"{name}, classes", "i map", lambda o, b, m, f=of_labels: f(o, b.map))
        table.batch(f"{name}, masks", "i masks", lambda o, b, m, f=of_masks: f(o, b.masks))
    focal, normalised = losses.FocalLoss("multilabel"), losses.FocalLoss("multilabel", normalized=True)
    lovasz, smooth = losses.LovaszLoss("multilabel"), losses.SoftBCEWithLogitsLoss()
    table.adds_up("FocalLoss", "i masks", lambda o, b, m: focal(o, b.masks))
    table.batch("FocalLoss, normalized", "i masks", lambda o, b, m: normalised(o, b.masks))
    table.batch("LovaszLoss", "i masks", lambda o, b, m: lovasz(o.float(), b.masks))  # it computes in float32
    table.adds_up("SoftBCEWithLogitsLoss", "i masks", lambda o, b, m: smooth(o, b.masks))
    matthews = losses.MCCLoss()
    table.batch("MCCLoss", "i masks", lambda o, b, m: matthews(o[:, :1].sigmoid(), b.masks[:, :1]))


def kornia(library: ModuleType, table: Table) -> None:
    """Images and masks."""
    losses = import_module("kornia.losses")
    table.adds_up("ssim_loss", "i image", lambda o, b, m: losses.ssim_loss(o.sigmoid(), b.image.sigmoid(), 3))
    table.adds_up("total_variation", "i", lambda o, b, m: losses.total_variation(o).mean())
    table.adds_up("charbonnier_loss", "i image", lambda o, b, m: losses.charbonnier_loss(o, b.image, reduction="mean"))
    table.adds_up("cauchy_loss", "i image", lambda o, b, m: losses.cauchy_loss(o, b.image, reduction="mean"))
    table.adds_up("focal_loss", "i map", lambda o, b, m: losses.focal_loss(o, b.map, 0.5, reduction="mean"))
    table.adds_up("dice_loss of images", "i map", lambda o, b, m: losses.dice_loss(o, b.map, average="micro"))
    table.adds_up("tversky_loss", "i map", lambda o, b, m: losses.tversky_loss(o, b.map, 0.3, 0.7))
    table.of_a_mean("psnr_loss", "i image", lambda o, b, m: losses.psnr_loss(o, b.image, 1.0))
    table.adds_up(
        "inverse_depth_smoothness_loss", "i image", lambda o, b, m: losses.inverse_depth_smoothness_loss(o[:, :1], b.image)
    )


def monai(library: ModuleType, table: Table) -> None:
    """Medical images: overlaps of each image, or of the batch."""
    losses = import_module("monai.losses")
    for name in ("DiceLoss", "DiceCELoss", "DiceFocalLoss", "GeneralizedDiceLoss", "TverskyLoss"):
        of_images, of_batch = getattr(losses, name)(sigmoid=True), getattr(losses, name)(sigmoid=True, batch=True)
        limit = 1e-6 if "Focal" in name else 1e-12  # in float32, whatever they get
        table.adds_up(f"{name} of images", "i masks", lambda o, b, m, f=of_images: f(o, b.masks), limit=limit)
        table.batch(f"{name} of the batch", "i masks", lambda o, b, m, f=of_batch: f(o, b.masks))
    focal = losses.FocalLoss()
    table.adds_up("FocalLoss", "i masks", lambda o, b, m: focal(o, b.masks), limit=1e-6)


LIBRARIES: tuple[Callable[[ModuleType, Table], None], ...] = (
    torchvision, pytorch_metric_learning, segmentation_models_pytorch, kornia, monai,
)  # fmt: skip


def losses_of_libraries() -> Iterator[Loss]:
    """Of those that are installed."""
    for add in LIBRARIES:
        try:
            library = import_module(add.__name__)
        except (ImportError, RuntimeError) as error:
            print(f"{add.__name__} is left out: {error}")
            continue
        table = Table(add.__name__)
        add(library, table)
        print(f"{add.__name__} {getattr(library, '__version__', '')}: {len(table.losses)} losses")
        yield from table


# --- what becomes of them ---


class Cost:
    """How long each check took, and what autograd held in it, beside the training that it is part of."""

    def __init__(self) -> None:
        self.of_checks: list[float] = []
        self.bytes: list[tuple[int, int]] = []
        self._saved: SavedBytes | None = None
        self._in_check = 0

    @contextlib.contextmanager
    def weighed(self) -> Iterator[None]:
        """In here bytes are counted, which takes time, instead of seconds."""
        self._saved, self._in_check = SavedBytes(), 0
        with self._saved:
            yield
        if self._in_check and self._saved.peak:
            self.bytes.append((self._in_check, self._saved.peak))
        self._saved = None

    @contextlib.contextmanager
    def measured(self) -> Iterator[None]:
        """In here checks are timed."""
        call = Check.__call__

        def timed(check: Check, *arguments: Any, **named: Any) -> Any:
            if self._saved is not None:
                self._saved.restart()
            start = time.perf_counter()
            try:
                return call(check, *arguments, **named)
            finally:
                if self._saved is None:
                    self.of_checks.append(time.perf_counter() - start)
                else:
                    self._in_check = max(self._in_check, self._saved.peak)
                    self._saved.restart()

        Check.__call__ = timed  # type: ignore[method-assign]
        try:
            yield
        finally:
            Check.__call__ = call  # type: ignore[method-assign]


def count(loss: Loss, way: str, row: dict[str, int]) -> Outcome:
    """Train with the check and without, and count."""
    with_check = examine(loss, way)
    is_read = with_check.word != "refused" or not with_check.said.startswith(UnreadableLossError.__name__)
    without = examine(loss, way, check=False) if is_read else with_check
    row["trainings"] += 1
    row[with_check.word] += 1
    row["false alarms"] += with_check.word in ("refused", "warned") and without.is_exact
    if is_read and without.word in ("exact", "wrong"):  # what the reader lets pass in silence
        side = "deviate" if without.word == "wrong" else "add up"
        row[side] += 1
        row[f"{side}, told"] += with_check.word in ("refused", "warned") or (side == "deviate" and with_check.is_exact)
    return with_check


def main() -> None:
    """Train and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--every", type=int, default=1, help="of the table take every so-manieth loss (default: all)")
    parser.add_argument("--family", help="only losses of this one")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.WARNING)
    losses = [*LOSSES[:: arguments.every], *losses_of_libraries()]
    losses = [loss for loss in losses if arguments.family in (None, loss.family)]
    rows: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    cost, notes = Cost(), []
    with cost.measured():
        for number, loss in enumerate(losses):
            for way in WAYS:
                if number % 10 == 0:
                    with cost.weighed():
                        examine(loss, way)
                outcome = count(loss, way, rows[loss.family])
                is_told_off = loss.kind is Kind.ADDS_UP and not loss.refused and outcome.word == "refused"
                if outcome.word in ("wrong", "crashed") or is_told_off or (outcome.word == "warned" and outcome.is_exact):
                    notes.append(f"{loss.name} ({way}): {outcome.word}, {outcome.deviation:.1g} off. {outcome.said[:100]}")
    print(f"\n{len(losses)} losses, {' and '.join(WAYS)}; torch {torch.__version__}")
    print("| family | trainings | exact | refused | warned | wrong | crashed | false alarms |"
          " check: found or mended, of those that deviate | check: told of, of those that are exact |")  # fmt: skip
    print("| --- " * 10 + "|")
    for family, row in rows.items():
        print(line(family, row))
    total: dict[str, int] = defaultdict(int)
    for row in rows.values():
        for column, number in row.items():
            total[column] += number
    print(line("all", total))
    if cost.of_checks:
        mean = sum(cost.of_checks) / len(cost.of_checks)
        print(f"\n{len(cost.of_checks)} checks: {mean * 1e3:.1f} ms on average, {max(cost.of_checks) * 1e3:.0f} ms at most")
    if cost.bytes:
        ratios = sorted(in_check / in_training for in_check, in_training in cost.bytes)
        median = ratios[len(ratios) // 2]
        print(f"Autograd holds {median:.2f} times as much in a check as in its training, {ratios[-1]:.2f} times at most")
    print("\nWrong, crashed, refused though they add up, or warned of though exact:", *notes or ["none"], sep="\n  ")


def line(family: str, row: dict[str, int]) -> str:
    """A row of the printed table."""
    plain = (row[column] for column in ("trainings", "exact", "refused", "warned", "wrong", "crashed", "false alarms"))
    pairs = (f"{row[f'{side}, told']} of {row[side]}" for side in ("deviate", "add up"))
    return "| " + " | ".join([family, *map(str, plain), *pairs]) + " |"


if __name__ == "__main__":
    main()
