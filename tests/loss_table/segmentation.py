"""Masks: overlaps of samples and of batches, borders, ignored pixels."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from loss_table.rows import Table

# fmt: off
table = Table("segmentation")
add, of_batch, terms = table.adds_up, table.batch, table.terms

def sums(o: Tensor, masks: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """True positives, false positives, false negatives."""
    p = o.sigmoid()
    return (p * masks).sum(dims), (p * (1 - masks)).sum(dims), ((1 - p) * masks).sum(dims)

def dice(tp: Tensor, fp: Tensor, fn: Tensor) -> Tensor:
    return 1 - (2 * tp + 1) / (2 * tp + fp + fn + 1)

def jaccard(tp: Tensor, fp: Tensor, fn: Tensor) -> Tensor:
    return 1 - (tp + 1) / (tp + fp + fn + 1)

def tversky(tp: Tensor, fp: Tensor, fn: Tensor) -> Tensor:
    return 1 - (tp + 1) / (tp + 0.3 * fp + 0.7 * fn + 1)

def focal_tversky(tp: Tensor, fp: Tensor, fn: Tensor) -> Tensor:
    return tversky(tp, fp, fn) ** 0.75

def log_dice(tp: Tensor, fp: Tensor, fn: Tensor) -> Tensor:
    return -(1 - dice(tp, fp, fn)).log()

def f2(tp: Tensor, fp: Tensor, fn: Tensor) -> Tensor:
    return 1 - 5 * tp / (5 * tp + 4 * fn + fp + 1e-3)

def sensitivity(tp: Tensor, fp: Tensor, fn: Tensor) -> Tensor:
    return 1 - (tp + 1e-2) / (tp + fn + 1e-2)

SCORES = {
    "Dice": dice, "Jaccard": jaccard, "Tversky": tversky, "focal Tversky": focal_tversky, "log Dice": log_dice, "F2": f2,
    "sensitivity": sensitivity,
}  # fmt: skip
for name, score in SCORES.items():
    add(f"{name} of each image and class", "i masks", lambda o, b, m, f=score: f(*sums(o, b.masks, (2, 3))).mean())
    add(f"{name} of each image, sum", "i masks", lambda o, b, m, f=score: f(*sums(o, b.masks, (1, 2, 3))).sum())
    of_batch(f"{name} of the batch", "i masks", lambda o, b, m, f=score: f(*sums(o, b.masks, (0, 1, 2, 3))))
    of_batch(f"{name} of the batch for each class", "i masks", lambda o, b, m, f=score: f(*sums(o, b.masks, (0, 2, 3))).mean())
for name, score in {"Dice": dice, "Jaccard": jaccard}.items():
    of_batch(f"binary cross entropy and {name} of the batch", "i masks", lambda o, b, m, f=score:
        F.binary_cross_entropy_with_logits(o, b.masks) + f(*sums(o, b.masks, (0, 1, 2, 3))))
    add(f"binary cross entropy and {name} of each image", "i masks", lambda o, b, m, f=score:
        0.5 * F.binary_cross_entropy_with_logits(o, b.masks) + f(*sums(o, b.masks, (2, 3))).mean())
    of_batch(f"{name} of columns, squared", "i masks", lambda o, b, m, f=score: _squared(o, b.masks, f))
add("soft Dice by softmax and one-hot, each image", "i map", lambda o, b, m: _softmax_dice(o, b.map, (2, 3)).mean())
of_batch("soft Dice by softmax and one-hot, the batch", "i map", lambda o, b, m: _softmax_dice(o, b.map, (0, 2, 3)).mean())
of_batch("soft Dice of classes that are there", "i map", lambda o, b, m:
    _softmax_dice(o, b.map, (0, 2, 3))[F.one_hot(b.map, 4).sum((0, 1, 2)) > 0].mean())
of_batch("generalised Dice of the batch", "i map", lambda o, b, m: _generalised(o, b.map, (0, 2, 3)))
add("generalised Dice of each image", "i map", lambda o, b, m: _generalised(o, b.map, (2, 3)).mean())
of_batch("combo loss of the batch", "i masks", lambda o, b, m: 0.5 * _weighted(o, b.masks).mean()
    - 0.5 * (1 - dice(*sums(o, b.masks, (0, 1, 2, 3)))))
of_batch("Lovasz hinge of the batch", "i masks", lambda o, b, m: _lovasz(o.flatten(), b.masks.flatten()))
add("Lovasz hinge of each image", "i masks", lambda o, b, m:
    torch.stack([_lovasz(a.flatten(), c.flatten()) for a, c in zip(o, b.masks, strict=True)]).mean())
of_batch("exponential logarithmic loss", "i map", lambda o, b, m: _exponential(o, b.map))
of_batch("Matthews correlation of the batch", "i masks", lambda o, b, m: _matthews(o, b.masks, (0, 1, 2, 3)))
add("Matthews correlation of each image", "i masks", lambda o, b, m: _matthews(o, b.masks, (1, 2, 3)).mean())
of_batch("class balance of the batch's pixels", "i masks", lambda o, b, m:
    F.binary_cross_entropy_with_logits(o, b.masks, pos_weight=(1 - b.masks).sum() / b.masks.sum()))
of_batch("balanced by the batch's positives", "i masks", lambda o, b, m: _balanced(o, b.masks, b.masks.mean()))
add("balanced by each image's positives", "i masks", lambda o, b, m: _balanced(o, b.masks, b.masks.mean((1, 2, 3), keepdim=True)))
of_batch("positives and negatives each by their mean", "i masks", lambda o, b, m:
    (c := F.binary_cross_entropy_with_logits(o, b.masks, reduction="none"))[b.masks > 0].mean() * c[b.masks == 0].mean())
terms("positives and negatives, two means", "i masks", lambda o, b, m:
    (c := F.binary_cross_entropy_with_logits(o, b.masks, reduction="none"))[b.masks > 0].mean() + c[b.masks == 0].mean())
add("border weights", "i map", lambda o, b, m: (F.cross_entropy(o, b.map, reduction="none") * _border(b.map)).mean())
add("border weights that divide", "i map", lambda o, b, m: (F.cross_entropy(o, b.map, reduction="none")
    * (w := _border(b.map))).sum() / w.sum())
add("distance maps", "i masks image", lambda o, b, m: (o.sigmoid() * b.image).mean())
add("Hausdorff by distance maps", "i masks image", lambda o, b, m: ((o.sigmoid() - b.masks) ** 2 * b.image**2).mean())
add("contours of each image", "i masks", lambda o, b, m: (_length(o.sigmoid())
    + 0.1 * (o.sigmoid() * (1 - b.masks)).sum((1, 2, 3))).mean())
of_batch("active contours of the batch", "i masks", lambda o, b, m: _length(o.sigmoid()).sum() / o.numel()
    + ((p := o.sigmoid()) * b.masks).sum().square() / p.sum())
add("valid pixels of sigmoid masks", "i masks map", lambda o, b, m:
    (F.binary_cross_entropy_with_logits(o, b.masks, reduction="none") * (v := (b.map > 0)[:, None])).sum() / v.expand_as(o).sum())
add("valid pixels of one channel", "i masks map", lambda o, b, m:
    (F.binary_cross_entropy_with_logits(o[:, 0], b.masks[:, 0], reduction="none") * (v := b.map > 0)).sum() / v.sum())
add("deep supervision", "i map", lambda o, b, m: F.cross_entropy(o, b.map) + 0.4 * F.cross_entropy(o * 0.5, b.map))
terms("deep supervision at half the size", "i map255", lambda o, b, m: F.cross_entropy(o, b.map255, ignore_index=255)
    + 0.4 * F.cross_entropy(o[:, :, ::2, ::2], b.map255[:, ::2, ::2], ignore_index=255))
add("panoptic queries", "i masks w", lambda o, b, m: (F.binary_cross_entropy_with_logits(o, b.masks,
    reduction="none").mean((1, 2, 3)) * b.w).sum() / b.w.sum())
add("uncertainty of each pixel", "i image", lambda o, b, m: (0.5 * (-o[:, 1]).exp() * (o[:, 0] - b.image[:, 0]) ** 2
    + 0.5 * o[:, 1]).mean())
of_batch("consistency of the batch's class sizes", "i map", lambda o, b, m:
    (o.softmax(1).mean((0, 2, 3)) - F.one_hot(b.map, 4).double().mean((0, 1, 2))).square().sum())
add("consistency of each image's class sizes", "i map", lambda o, b, m:
    (o.softmax(1).mean((2, 3)) - F.one_hot(b.map, 4).double().mean((1, 2))).square().sum(1).mean())
add("area penalty as a sum", "i masks", lambda o, b, m: F.relu(o.sigmoid().sum((2, 3)) - b.masks.sum((2, 3))).sum() / (4 * len(o)))

def _squared(o: Tensor, masks: Tensor, f) -> Tensor:
    p = o.sigmoid().flatten()
    y = masks.flatten()
    tp = p @ y
    return f(tp, (p * p).sum() - tp, (y * y).sum() - tp)

def _softmax_dice(o: Tensor, target: Tensor, dims: tuple[int, ...]) -> Tensor:
    p, hot = o.softmax(1), F.one_hot(target, 4).movedim(-1, 1)
    return 1 - (2 * (p * hot).sum(dims) + 0.1) / ((p + hot).sum(dims) + 0.1)

def _generalised(o: Tensor, target: Tensor, dims: tuple[int, ...]) -> Tensor:
    p, hot = o.softmax(1), F.one_hot(target, 4).movedim(-1, 1).to(o)
    w = 1 / (hot.sum(dims) + 1) ** 2
    return 1 - 2 * (w * (p * hot).sum(dims)).sum(-1) / (w * (p + hot).sum(dims)).sum(-1)

def _weighted(o: Tensor, masks: Tensor) -> Tensor:
    return -(0.6 * masks * F.logsigmoid(o) + 0.4 * (1 - masks) * F.logsigmoid(-o))

def _lovasz(logits: Tensor, y: Tensor) -> Tensor:
    signs = 2 * y - 1
    errors, order = (1 - logits * signs).sort(descending=True)
    y = y[order]
    union = y.sum() + (1 - y).cumsum(0)
    index = 1 - (y.sum() - y.cumsum(0)) / union.clamp(min=1)
    slope = torch.cat((index[:1], index[1:] - index[:-1]))
    return F.relu(errors) @ slope

def _exponential(o: Tensor, target: Tensor) -> Tensor:
    of_dice = (-(1 - _softmax_dice(o, target, (0, 2, 3))).log()) ** 0.3
    return 0.8 * of_dice.mean() + 0.2 * (F.cross_entropy(o, target, reduction="none") ** 0.3).mean()

def _balanced(o: Tensor, masks: Tensor, positives: Tensor) -> Tensor:
    each = F.binary_cross_entropy_with_logits(o, masks, reduction="none")
    return (each * torch.where(masks > 0, 1 - positives, positives)).mean()

def _matthews(o: Tensor, masks: Tensor, dims: tuple[int, ...]) -> Tensor:
    tp, fp, fn = sums(o, masks, dims)
    tn = ((1 - o.sigmoid()) * (1 - masks)).sum(dims)
    return 1 - (tp * tn - fp * fn) / ((tp + fp) * (tp + fn) * (tn + fp) * (tn + fn) + 1).sqrt()

def _border(target: Tensor) -> Tensor:
    differs = (target != target.roll(1, 1)) | (target != target.roll(1, 2))
    return 1.0 + 2.0 * differs

def _length(p: Tensor) -> Tensor:
    return (p.diff(dim=2)[..., :-1] ** 2 + p.diff(dim=3)[:, :, :-1] ** 2 + 1e-6).sqrt().sum((1, 2, 3))
