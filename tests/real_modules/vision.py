"""Images: boxes, masks, depth and flow, whose losses are divided by what is in the images."""

from functools import partial
from typing import Any

import numpy as np
import torch
from lightning.pytorch import LightningModule
from scipy.optimize import linear_sum_assignment
from torch import Tensor, nn
from torch.nn import functional as F

from real_modules.expected import OFFLOAD, ONE, by
from real_modules.table import RealModule, Warned, dealt, randint, real_module


def boxes_of_image(generator: torch.Generator, least: int) -> dict[str, Tensor]:
    """Boxes (x0, y0, x1, y1) that hold at least one point of a grid of 4 x 4, and their classes."""
    count = randint(least, 3, generator)
    corners = 0.6 * torch.rand(count, 2, generator=generator)
    sizes = 0.3 + 0.1 * torch.rand(count, 2, generator=generator)
    return {"boxes": torch.cat([corners, corners + sizes], 1), "labels": torch.randint(3, (count,), generator=generator)}


def image_with_boxes(generator: torch.Generator, least: int = 1) -> tuple[Tensor, dict[str, Tensor]]:
    return torch.randn(3, 8, 8, generator=generator), boxes_of_image(generator, least)


def lists(rows: list[Any]) -> tuple[Any, ...]:  # what detection collates: nothing is stacked
    return tuple(zip(*rows, strict=True))


def stacked(rows: list[Any]) -> dict[str, Any]:
    images, targets = lists(rows)
    return {"image": torch.stack(images), "target": list(targets)}


def assign(boxes: Tensor) -> tuple[Tensor, Tensor]:  # which points of the grid lie in a box, and in which one
    centers = (torch.cartesian_prod(torch.arange(4), torch.arange(4)).to(boxes) + 0.5) / 4
    inside = ((centers[:, None] > boxes[:, :2]) & (centers[:, None] < boxes[:, 2:])).all(-1)
    which = torch.cat([inside, torch.ones(16, 1, dtype=torch.bool)], 1).int().argmax(1)
    return which < len(boxes), which


def focal(logits: Tensor, targets: Tensor) -> Tensor:
    p = logits.sigmoid()
    return F.binary_cross_entropy_with_logits(logits, targets, reduction="none") * (p * (1 - targets) + (1 - p) * targets) ** 2


def giou(a: Tensor, b: Tensor) -> Tensor:  # of boxes in pairs
    def area(low: Tensor, high: Tensor) -> Tensor:
        return (high - low).clamp(min=0).prod(-1)

    both = area(torch.maximum(a[:, :2], b[:, :2]), torch.minimum(a[:, 2:], b[:, 2:]))
    hull = area(torch.minimum(a[:, :2], b[:, :2]), torch.maximum(a[:, 2:], b[:, 2:]))
    union = area(a[:, :2], a[:, 2:]) + area(b[:, :2], b[:, 2:]) - both
    return both / union - (hull - union) / hull


class Detector(RealModule):  # a grid of 4 x 4 points, each with logits of 3 classes, a box and one more number
    def build(self) -> None:
        self.body = nn.Sequential(nn.Conv2d(3, 6, 3, 2, 1), nn.SiLU(), nn.Conv2d(6, 6, 3, 1, 1), nn.SiLU())
        self.head = nn.Conv2d(6, 8, 1)

    def predict(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        out = self.head(self.body(images)).flatten(2).transpose(1, 2)
        corner, size = out[..., 3:5].sigmoid() * 0.6, out[..., 5:7].sigmoid() * 0.5
        return out[..., :3], torch.cat([corner, corner + size], -1), out[..., 7]


@real_module("torchvision's RetinaNet", dealt(partial(image_with_boxes, least=0)), collate=lists)
class RetinaNet(Detector):
    """Each image is divided by its own number of positive points, and the batch by its images; some images are empty."""

    def training_step(self, batch: tuple[list[Tensor], list[dict[str, Tensor]]], batch_idx: int) -> Tensor:
        classes, boxes = [], []
        for logits, found, target in zip(*self.predict(torch.stack(batch[0]))[:2], batch[1], strict=True):
            positive, which = assign(target["boxes"])
            wanted = torch.zeros_like(logits)
            wanted[positive, target["labels"][which[positive]]] = 1
            classes.append(focal(logits, wanted).sum() / max(1, int(positive.sum())))
            distance = F.smooth_l1_loss(found[positive], target["boxes"][which[positive]], reduction="sum", beta=0.1)
            boxes.append(distance / max(1, int(positive.sum())))
        losses = {"classes": sum(classes) / len(classes), "boxes": sum(boxes) / len(boxes)}
        self.log_dict(losses)
        return sum(losses.values())


@real_module("FCOS", dealt(image_with_boxes), collate=stacked)
class OneStageWithCenterness(Detector):
    """Focal over the positives of the batch, overlap over their summed centerness, and its cross entropy over positives."""

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        logits, found, centerness = self.predict(batch["image"])
        assigned = [assign(target["boxes"]) for target in batch["target"]]
        positive = torch.stack([inside for inside, _ in assigned])
        pairs = [(t["boxes"][w[i]], t["labels"][w[i]]) for t, (i, w) in zip(batch["target"], assigned, strict=True)]
        boxes, labels = torch.cat([box for box, _ in pairs]), torch.cat([label for _, label in pairs])
        wanted = torch.zeros_like(logits)
        wanted[positive] = F.one_hot(labels, 3).to(logits)
        weight = (1 - (found[positive].detach() - boxes).abs().mean(1)).clamp(min=0.1)
        of_classes = focal(logits, wanted).sum() / positive.sum()
        of_boxes = ((1 - giou(found[positive], boxes)) * weight).sum() / weight.sum()
        return of_classes + 2 * of_boxes + F.binary_cross_entropy_with_logits(centerness[positive], weight)


@real_module("DETR", dealt(image_with_boxes), collate=lists)
class MatchedQueries(Detector):
    """Queries are matched to boxes; cross entropy with a light class for nothing, L1 and overlap over the number of boxes."""

    def training_step(self, batch: tuple[list[Tensor], list[dict[str, Tensor]]], batch_idx: int) -> Tensor:
        logits, found, none = self.predict(torch.stack(batch[0]))
        logits = torch.cat([logits, none[..., None]], -1)
        labels, a, b = torch.full(none.shape, 3), [], []
        for index, target in enumerate(batch[1]):
            cost = torch.cdist(found[index], target["boxes"], p=1) - logits[index].softmax(-1)[:, target["labels"]]
            query, box = map(torch.as_tensor, linear_sum_assignment(cost.detach().numpy()))
            labels[index, query] = target["labels"][box]
            a.append(found[index, query])
            b.append(target["boxes"][box])
        a, b = torch.cat(a), torch.cat(b)
        of_classes = F.cross_entropy(logits.transpose(1, 2), labels, weight=torch.tensor([1, 1, 1, 0.1]).to(logits))
        return of_classes + 5 * (a - b).abs().sum() / len(b) + 2 * (1 - giou(a, b)).sum() / len(b)


def image_with_instances(generator: torch.Generator) -> dict[str, Tensor]:
    count = randint(1, 3, generator)
    return {
        "image": torch.randn(3, 8, 8, generator=generator),
        "masks": (torch.rand(count, 8, 8, generator=generator) > 0.6).float(),
        "labels": torch.randint(3, (count,), generator=generator),
    }


@real_module("Mask2Former, instance segmentation", dealt(image_with_instances), collate=list)
class InstanceMasks(RealModule):
    """Masks: cross entropy over pixels and Dice over instances; classes over instances; whether there are many over images."""

    def build(self) -> None:
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.GELU())
        self.masks, self.classes, self.many = nn.Conv2d(8, 3, 1), nn.Linear(8, 3), nn.Linear(8, 1)

    def training_step(self, batch: list[dict[str, Tensor]], batch_idx: int) -> Tensor:
        features = self.body(torch.stack([row["image"] for row in batch]))
        counts = torch.tensor([len(row["labels"]) for row in batch])
        masks, labels = (torch.cat([row[name] for row in batch]) for name in ("masks", "labels"))
        of_image = torch.arange(len(counts)).repeat_interleave(counts)
        logits = self.masks(features)[of_image, labels]
        pooled = (features[of_image] * masks[:, None]).sum((2, 3)) / masks.sum((1, 2))[:, None]
        p = logits.sigmoid()
        dice = 1 - (2 * (p * masks).sum((1, 2)) + 1) / ((p + masks).sum((1, 2)) + 1)
        many = F.binary_cross_entropy_with_logits(self.many(features.mean((2, 3)))[:, 0], (counts > 1).to(p))
        of_masks = F.binary_cross_entropy_with_logits(logits, masks) + dice.sum() / len(labels)
        return of_masks + F.cross_entropy(self.classes(pooled), labels) + 0.5 * many


def scene(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """An image, and a class for each pixel but those that nobody labelled."""
    labels = torch.randint(3, (8, 8), generator=generator)
    labels[torch.rand(8, 8, generator=generator) < 0.6 * torch.rand((), generator=generator)] = 255
    return torch.randn(2, 8, 8, generator=generator), labels


class UNet(nn.Module):  # one level down and up again
    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.down = nn.Sequential(nn.Conv2d(inputs, 6, 3, 1, 1), nn.GELU())
        self.deep = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(6, 6, 3, 1, 1), nn.GELU(), nn.Upsample(scale_factor=2))
        self.out = nn.Conv2d(12, outputs, 1)

    def forward(self, images: Tensor) -> Tensor:
        features = self.down(images)
        return self.out(torch.cat([features, self.deep(features)], 1))


@real_module("MONAI, cross entropy and Dice", dealt(scene))
class UNetWithDiceOfSamples(RealModule):  # cross entropy over labelled pixels, and a Dice loss over samples
    dims: tuple[int, ...] = (2, 3)

    def build(self) -> None:
        self.net = UNet(2, 3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        logits, is_labelled = self.net(images), (labels != 255)[:, None]
        p, target = logits.softmax(1) * is_labelled, F.one_hot(labels.where(labels != 255, 0), 3).movedim(-1, 1) * is_labelled
        dice = (2 * (p * target).sum(self.dims) + 1) / ((p + target).sum(self.dims) + 1)
        return F.cross_entropy(logits, labels, ignore_index=255) + 1 - dice.mean()


@real_module("segmentation_models, cross entropy and Dice", dealt(scene), windows=ONE, split=by("net"))
class UNetWithDiceOfBatch(UNetWithDiceOfSamples):  # Dice is a ratio of sums over the batch
    dims = (0, 2, 3)


@real_module("segmentation of satellite images", dealt(scene), windows=ONE, split=by("net"))
class Jaccard(UNetWithDiceOfSamples):  # the Jaccard index of each class over the batch, alone
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        is_labelled = (labels != 255)[:, None]
        p, target = self.net(images).softmax(1) * is_labelled, F.one_hot(labels.where(labels != 255, 0), 3).movedim(-1, 1)
        both = (p * target).sum((0, 2, 3))
        return -(both / ((p + target * is_labelled).sum((0, 2, 3)) - both)).log().mean()


@real_module("remote sensing, deep supervision", dealt(scene))
class FocalSegmentation(RealModule):  # focal over labelled pixels, and a coarser head whose labels are fewer
    def build(self) -> None:
        self.net, self.coarse = UNet(2, 3), nn.Conv2d(2, 3, 3, 2, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        losses = []
        for logits, wanted in ((self.net(images), labels), (self.coarse(images), labels[:, ::2, ::2])):
            entropy = F.cross_entropy(logits, wanted, ignore_index=255, reduction="none")
            losses.append((entropy * (1 - (-entropy).exp()) ** 2).sum() / (wanted != 255).sum().clamp(min=1))
        return losses[0] + 0.4 * losses[1]


@real_module("street scenes with hard-example mining", dealt(scene), windows=ONE, split=by("net"))
class HardPixels(UNetWithDiceOfSamples):  # the hardest third of the pixels of the batch
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        entropy = F.cross_entropy(self.net(batch[0]), batch[1], ignore_index=255, reduction="none").flatten()
        return entropy.topk(len(entropy) // 3).values.mean()


def depth_row(generator: torch.Generator) -> tuple[Tensor, Tensor]:
    depth = 0.5 + torch.rand(8, 8, generator=generator)
    depth[torch.rand(8, 8, generator=generator) < 0.7 * torch.rand((), generator=generator)] = 0
    return torch.randn(3, 8, 8, generator=generator), depth


@real_module("monocular depth, SILog", dealt(depth_row), windows=ONE, split=OFFLOAD)
class DepthWithScaleInvariantLog(RealModule):
    """Scale-invariant log error: the root of a variance over the valid pixels of the batch."""

    def build(self) -> None:
        self.net = UNet(3, 1)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        depth, is_valid = batch[1], batch[1] > 0
        difference = self.net(batch[0])[:, 0][is_valid] - depth[is_valid].log()
        return 10 * (difference.square().mean() - 0.85 * difference.mean().square()).sqrt()


def flow_row(generator: torch.Generator) -> dict[str, Tensor]:
    valid = torch.rand(8, 8, generator=generator) < 0.1 + 0.8 * torch.rand((), generator=generator)
    return {"frames": torch.randn(2, 8, 8, generator=generator), "flow": torch.randn(2, 8, 8, generator=generator), "valid": valid}


@real_module("optical flow, KITTI", dealt(flow_row))
class OpticalFlow(RealModule):
    """Endpoint error over valid pixels at two scales, whose numbers of valid pixels differ, and smoothness over all."""

    def build(self) -> None:
        self.coarse, self.net = nn.Sequential(nn.Conv2d(2, 4, 3, 2, 1), nn.SiLU(), nn.Conv2d(4, 2, 1)), UNet(4, 2)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        frames, flow, valid = batch["frames"], batch["flow"], batch["valid"].to(batch["flow"])
        low = self.coarse(frames)
        high = self.net(torch.cat([frames, F.interpolate(low, scale_factor=2)], 1))
        total = 0.1 * (high.diff(dim=2).abs().mean() + high.diff(dim=3).abs().mean())
        coarse = F.avg_pool2d(flow * valid[:, None], 2), F.max_pool2d(valid, 2)
        for factor, found, (wanted, mask) in ((0.8, low, coarse), (1.0, high, (flow, valid))):
            error = ((found - wanted).square().sum(1) + 1e-6).sqrt()
            total = total + factor * (error * mask).sum() / mask.sum().clamp(min=1)
        return total


def labelled_image(generator: torch.Generator) -> tuple[Tensor, int]:
    return torch.randn(2, 6, 6, generator=generator), randint(0, 3, generator)


@real_module("ResNet with BatchNorm", dealt(labelled_image), windows=Warned("BatchNorm"), split=Warned("BatchNorm"))
class ResidualWithBatchNorm(LightningModule):  # a small residual network
    def __init__(self, norm: type[nn.Module] = nn.BatchNorm2d) -> None:
        super().__init__()
        self.stem, self.head = nn.Sequential(nn.Conv2d(2, 6, 3), norm(6), nn.ReLU()), nn.Linear(6, 4)
        self.block = nn.Sequential(nn.Conv2d(6, 6, 3, padding=1), norm(6), nn.ReLU())

    def forward(self, images: Tensor) -> Tensor:
        features = self.stem(images)
        return self.head((features + self.block(features)).mean((2, 3)))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = F.cross_entropy(self(batch[0]), batch[1], label_smoothing=0.1)
        self.log("loss", loss, prog_bar=True)
        return loss


@real_module("timm, mixup in the step", dealt(labelled_image), windows=ONE, split=OFFLOAD)
class MixUp(ResidualWithBatchNorm):  # each image is mixed with the one at the other end of the batch; NumPy draws how much
    def __init__(self) -> None:
        super().__init__(nn.Identity)

    def on_train_start(self) -> None:
        np.random.seed(0)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        images, labels = batch
        part = np.random.beta(1, 1)
        logits = self(part * images + (1 - part) * images.flip(0))
        return part * F.cross_entropy(logits, labels) + (1 - part) * F.cross_entropy(logits, labels.flip(0))
