"""What becomes of losses that nobody here wrote, in windows and split: the table of tests/loss_table, and losses of libraries.

For each family: how many trainings were exact, refused, warned of, silently wrong, and false alarms (a warning or an error of the
check, though the training is exact without it). And of the check alone: of the losses that the reader of the graph lets pass, how
many that deviate it found or mended, and how many that are exact it refused. What a check costs is in ``check.py``.

    python tests/benchmarks/losses.py                      # all, about 7 minutes of a core
    python tests/benchmarks/losses.py --every 10           # a tenth of the table
    python tests/benchmarks/losses.py --family torchvision # of one family

Libraries that are not installed are passed over with a line: torchvision, pytorch_metric_learning, segmentation_models_pytorch,
kornia, monai.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from loss_table import LOSSES
from loss_table.rows import Kind, Loss, Table
from loss_table.training import WAYS, Outcome, examine
from side_by_side import command_line, show

from lightning_accum import UnreadableLossError

# --- losses of libraries ---


def torchvision(table: Table) -> None:
    """Boxes and focal losses."""
    from loss_table.vision import corners

    ops = import_module("torchvision.ops")
    for reduction in ("mean", "sum"):
        for name in ("generalized_box_iou_loss", "distance_box_iou_loss", "complete_box_iou_loss"):
            function = getattr(ops, name)
            of_boxes = lambda o, b, m, f=function, r=reduction: f(corners(o), b.boxes, reduction=r)  # noqa: E731
            table.adds_up(f"{name}, {reduction}", "x boxes", of_boxes)
        focal = lambda o, b, m, r=reduction: ops.sigmoid_focal_loss(o, b.q, reduction=r)  # noqa: E731
        table.adds_up(f"sigmoid_focal_loss, {reduction}", "x q", focal)


def pytorch_metric_learning(table: Table) -> None:
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


def segmentation_models_pytorch(table: Table) -> None:
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


def kornia(table: Table) -> None:
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


def monai(table: Table) -> None:
    """Medical images: overlaps of each image, or of the batch."""
    losses = import_module("monai.losses")
    for name in ("DiceLoss", "DiceCELoss", "DiceFocalLoss", "GeneralizedDiceLoss", "TverskyLoss"):
        of_images, of_batch = getattr(losses, name)(sigmoid=True), getattr(losses, name)(sigmoid=True, batch=True)
        limit = 1e-6 if "Focal" in name else 1e-12  # in float32, whatever they get
        table.adds_up(f"{name} of images", "i masks", lambda o, b, m, f=of_images: f(o, b.masks), limit=limit)
        table.batch(f"{name} of the batch", "i masks", lambda o, b, m, f=of_batch: f(o, b.masks))
    focal = losses.FocalLoss()
    table.adds_up("FocalLoss", "i masks", lambda o, b, m: focal(o, b.masks), limit=1e-6)


LIBRARIES: tuple[Callable[[Table], None], ...] = (
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
        add(table)
        print(f"{add.__name__} {getattr(library, '__version__', '')}: {len(table.losses)} losses")
        yield from table


# --- what becomes of them ---

COLUMNS = ("trainings", "exact", "refused", "warned", "wrong", "crashed", "false alarms")


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


def main(every: int = 1, family: str | None = None) -> None:
    """Train and print; of the table every so-manieth loss, or only losses of one family."""
    losses = [loss for loss in [*LOSSES[::every], *losses_of_libraries()] if family in (None, loss.family)]
    rows: dict[str, dict[str, int]] = defaultdict(lambda: defaultdict(int))
    notes = []
    for loss in losses:
        for way in WAYS:
            outcome = count(loss, way, rows[loss.family])
            is_told_off = loss.kind is Kind.ADDS_UP and not loss.refused and outcome.word == "refused"
            if outcome.word in ("wrong", "crashed") or is_told_off or (outcome.word == "warned" and outcome.is_exact):
                notes.append(f"{loss.name} ({way}): {outcome.word}, {outcome.deviation:.1g} off. {outcome.said[:100]}")
    total: dict[str, int] = defaultdict(int)
    for row in list(rows.values()):
        for column, number in row.items():
            total[column] += number
    table = []
    for name, row in [*rows.items(), ("all", total)]:
        pairs = (f"{row[f'{side}, told']} of {row[side]}" for side in ("deviate", "add up"))
        table.append([name, *(row[column] for column in COLUMNS), *pairs])
    print(f"\n{len(losses)} losses, {' and '.join(WAYS)}")
    show(["family", *COLUMNS, "check: found or mended, of those that deviate", "check: told of, of those that are exact"], table)
    print("\nWrong, crashed, refused though they add up, or warned of though exact:", *notes or ["none"], sep="\n  ")


if __name__ == "__main__":
    command_line(main)
