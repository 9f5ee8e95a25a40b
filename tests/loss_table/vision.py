"""Images: classification, boxes, masks of samples, quality of reconstructions; and segmentation."""

import torch
from torch import Tensor
from torch.nn import functional as F

from lightning_accum import SampleCount
from loss_table.rows import Table

# fmt: off
table = Table("vision")
add, of_batch, of_mean, terms = table.adds_up, table.batch, table.of_a_mean, table.terms
# --- classification ---
def focal(o: Tensor, t: Tensor, gamma: float = 2.0, reduction: str = "mean") -> Tensor:
    each = F.cross_entropy(o, t, reduction="none")
    each = (1 - (-each).exp()) ** gamma * each
    return each.mean() if reduction == "mean" else each.sum() if reduction == "sum" else each

def sigmoid_focal(o: Tensor, q: Tensor, alpha: float = 0.25, gamma: float = 2.0) -> Tensor:
    p = o.sigmoid()
    right = p * q + (1 - p) * (1 - q)
    balance = alpha * q + (1 - alpha) * (1 - q)
    return balance * (1 - right) ** gamma * F.binary_cross_entropy_with_logits(o, q, reduction="none")

add("focal, mean", "x t", lambda o, b, m: focal(o, b.t))
add("sigmoid focal by the number of positives", "x q", lambda o, b, m: sigmoid_focal(o, b.q).sum() / b.q.sum())
add("poly-1 cross entropy", "x t", lambda o, b, m: _poly(o, b.t).mean())
add("symmetric cross entropy", "x t", lambda o, b, m: F.cross_entropy(o, b.t) + 0.1 * (-4 * (1 - _right(o, b.t))).neg().mean())
add("soft bootstrapping", "x t", lambda o, b, m: 0.8 * F.cross_entropy(o, b.t) + 0.2 * _entropy(o).mean())
add("hard bootstrapping", "x t", lambda o, b, m: 0.8 * F.cross_entropy(o, b.t) + 0.2 * F.cross_entropy(o, o.argmax(1)))
add("knowledge distillation", "x t", lambda o, b, m: 0.5 * F.cross_entropy(o, b.t) + 0.5 * 9 * _distilled(o, m.teacher(b.x), 3))
add("mean-variance of ages", "x t", lambda o, b, m: _mean_variance(o, b.t))
add("OHEM of each image's worst pixels", "i map", lambda o, b, m: _pixels(o, b.map).flatten(1).topk(4, 1).values.mean())
of_batch("OHEM of the batch's worst pixels", "i map", lambda o, b, m: _pixels(o, b.map).flatten().topk(6).values.mean())
add("OHEM by a threshold", "i map", lambda o, b, m: (c := _pixels(o, b.map))[c > 0.9].mean())
add("pixels weighed by a map, divided by it", "i map image", lambda o, b, m:
    (_pixels(o, b.map) * (w := b.image[:, 0].square())).sum() / w.sum())
# --- boxes ---
def corners(o: Tensor) -> Tensor:
    return torch.cat((o[:, :2], o[:, :2] + F.softplus(o[:, 2:]) + 0.1), 1)

def overlap(a: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:  # intersection and union of boxes, one with one
    sides = (torch.minimum(a[:, 2:], c[:, 2:]) - torch.maximum(a[:, :2], c[:, :2])).clamp(min=0)
    shared = sides.prod(1)
    return shared, (a[:, 2:] - a[:, :2]).prod(1) + (c[:, 2:] - c[:, :2]).prod(1) - shared

def iou(o: Tensor, boxes: Tensor) -> Tensor:
    shared, union = overlap(corners(o), boxes)
    return shared / union

add("IoU loss, sum", "x boxes", lambda o, b, m: (1 - iou(o, b.boxes)).sum())
add("IoU loss of positives by their number", "x boxes mask", lambda o, b, m:
    ((1 - iou(o, b.boxes)) * b.mask).sum() / b.mask.sum().clamp(min=1))
add("IoU loss of selected positives", "x boxes mask", lambda o, b, m: (1 - iou(o, b.boxes))[b.mask].mean())
add("smooth L1 of boxes by item()", "x boxes mask", lambda o, b, m: F.smooth_l1_loss(o[b.mask], b.boxes[b.mask], reduction="sum")
    / max(1, b.mask.sum().item()))
terms("classes by rows and boxes by positives", "x boxes mask t", lambda o, b, m: F.cross_entropy(o, b.t)
    + ((1 - iou(o, b.boxes)) * b.mask).sum() / b.mask.sum().clamp(min=1))
terms("both by the number of positives", "x boxes mask q", lambda o, b, m:
    (sigmoid_focal(o, b.q).sum() + ((1 - iou(o, b.boxes)) * b.mask).sum()) / b.mask.sum().clamp(min=1))
add(  # as in RetinaNet: only a weight that counts images makes it exact
    "each image's focal by its own positives",
    "x q",
    lambda o, b, m: sum(sigmoid_focal(one, q).sum() / max(1, q.sum()) for one, q in zip(o, b.q, strict=True)) / max(1, len(o)),
    weight=SampleCount(),
)
add("distribution focal of two bins", "x w", lambda o, b, m: _two_bins(o, b.w).mean())
add("centerness by positives", "x mask w", lambda o, b, m: (F.binary_cross_entropy_with_logits(o[:, 0], b.w / 2, reduction="none")
    * b.mask).sum() / b.mask.sum().clamp(min=1))
# --- reconstructions ---
of_mean("PSNR of the batch", "i image", lambda o, b, m: 10 * F.mse_loss(o, b.image).log10())
add("total variation by squares over all", "i", lambda o, b, m: (o.diff(dim=2).square().sum() + o.diff(dim=3).square().sum())
    / o.numel())
add("scale-invariant depth of each image", "i image", lambda o, b, m: _scale_invariant(o - b.image).mean())
of_batch("scale-invariant depth of the batch", "i image", lambda o, b, m: (d := o - b.image).square().mean() - 0.5 * d.mean() ** 2)
add("pixels that are valid", "i image map", lambda o, b, m: (o - b.image).abs()[(b.map > 0)[:, None].expand_as(o)].mean())
add("end point error, sequence of estimates", "i image", lambda o, b, m:
    sum(0.8**k * (o * (3 - k) / 3 - b.image).abs().mean() for k in range(3)))
add("least squares of a discriminator", "x v", lambda o, b, m: 0.5 * ((o[:, 0] - 1) ** 2).mean() + 0.5 * (m(b.v)[:, 0] ** 2).mean())
add("Wasserstein critic", "x v", lambda o, b, m: m(b.v)[:, 0].mean() - o[:, 0].mean())
add("Wasserstein critic with a gradient penalty", "x v", lambda o, b, m: _critic(m, b))

def _right(o: Tensor, t: Tensor) -> Tensor:
    return o.softmax(1).gather(1, t[:, None]).squeeze(1)

def _poly(o: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(o, t, reduction="none") + 2.0 * (1 - _right(o, t))

def _entropy(o: Tensor) -> Tensor:
    return -(o.softmax(1) * o.log_softmax(1)).sum(1)

def _distilled(o: Tensor, teacher: Tensor, temperature: float) -> Tensor:
    return F.kl_div((o / temperature).log_softmax(1), (teacher / temperature).softmax(1), reduction="batchmean")

def _mean_variance(o: Tensor, t: Tensor) -> Tensor:
    p, ages = o.softmax(1), torch.arange(4)
    mean = (p * ages).sum(1)
    variance = (p * (ages - mean[:, None]) ** 2).sum(1)
    return F.cross_entropy(o, t) + 0.2 * ((mean - t) ** 2).mean() / 2 + 0.05 * variance.mean()

def _pixels(o: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(o, target, reduction="none")

def _two_bins(o: Tensor, w: Tensor) -> Tensor:
    left = w.long().clamp(max=2)
    share = left + 1 - w
    return F.cross_entropy(o, left, reduction="none") * share + F.cross_entropy(o, left + 1, reduction="none") * (1 - share)

def _scale_invariant(difference: Tensor) -> Tensor:
    columns = difference.flatten(1)
    return columns.square().mean(1) - 0.5 * columns.mean(1).square()

def _critic(m, b) -> Tensor:
    x = (0.4 * b.x + 0.6 * b.v).requires_grad_()
    with torch.enable_grad():
        (slope,) = torch.autograd.grad(m(x)[:, 0].sum(), x, create_graph=True)
    return m(b.v)[:, 0].mean() - m(b.x)[:, 0].mean() + 10 * ((slope.norm(dim=1) - 1) ** 2).mean()

# === Masks: overlaps of samples and of batches, borders, ignored pixels ===
segmentation = Table("segmentation")
add, of_batch, terms = segmentation.adds_up, segmentation.batch, segmentation.terms

def sums(o: Tensor, masks: Tensor, dims: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """True positives, false positives, false negatives."""
    p = o.sigmoid()
    return (p * masks).sum(dims), (p * (1 - masks)).sum(dims), ((1 - p) * masks).sum(dims)

def dice(tp: Tensor, fp: Tensor, fn: Tensor) -> Tensor:
    return 1 - (2 * tp + 1) / (2 * tp + fp + fn + 1)

def jaccard(tp: Tensor, fp: Tensor, fn: Tensor) -> Tensor:
    return 1 - (tp + 1) / (tp + fp + fn + 1)

for name, score in {"Dice": dice, "Jaccard": jaccard}.items():
    add(f"{name} of each image and class", "i masks", lambda o, b, m, f=score: f(*sums(o, b.masks, (2, 3))).mean())
    of_batch(f"{name} of the batch", "i masks", lambda o, b, m, f=score: f(*sums(o, b.masks, (0, 1, 2, 3))))
of_batch("binary cross entropy and Dice of the batch", "i masks", lambda o, b, m:
    F.binary_cross_entropy_with_logits(o, b.masks) + dice(*sums(o, b.masks, (0, 1, 2, 3))))
of_batch("soft Dice by softmax and one-hot, the batch", "i map", lambda o, b, m: _softmax_dice(o, b.map, (0, 2, 3)).mean())
add("Lovasz hinge of each image", "i masks", lambda o, b, m:
    torch.stack([_lovasz(a.flatten(), c.flatten()) for a, c in zip(o, b.masks, strict=True)]).mean())
of_batch("class balance of the batch's pixels", "i masks", lambda o, b, m:
    F.binary_cross_entropy_with_logits(o, b.masks, pos_weight=(1 - b.masks).sum() / b.masks.sum()))
add("balanced by each image's positives", "i masks", lambda o, b, m: _balanced(o, b.masks, b.masks.mean((1, 2, 3), keepdim=True)))
terms("positives and negatives, two means", "i masks", lambda o, b, m:
    (c := F.binary_cross_entropy_with_logits(o, b.masks, reduction="none"))[b.masks > 0].mean() + c[b.masks == 0].mean())
add("border weights", "i map", lambda o, b, m: (F.cross_entropy(o, b.map, reduction="none") * _border(b.map)).mean())
add("border weights that divide", "i map", lambda o, b, m: (F.cross_entropy(o, b.map, reduction="none")
    * (w := _border(b.map))).sum() / w.sum())
add("deep supervision", "i map", lambda o, b, m: F.cross_entropy(o, b.map) + 0.4 * F.cross_entropy(o * 0.5, b.map))
terms("deep supervision at half the size", "i map255", lambda o, b, m: F.cross_entropy(o, b.map255, ignore_index=255)
    + 0.4 * F.cross_entropy(o[:, :, ::2, ::2], b.map255[:, ::2, ::2], ignore_index=255))
add("panoptic queries", "i masks w", lambda o, b, m: (F.binary_cross_entropy_with_logits(o, b.masks,
    reduction="none").mean((1, 2, 3)) * b.w).sum() / b.w.sum())
add("uncertainty of each pixel", "i image", lambda o, b, m: (0.5 * (-o[:, 1]).exp() * (o[:, 0] - b.image[:, 0]) ** 2
    + 0.5 * o[:, 1]).mean())
add("area penalty as a sum", "i masks", lambda o, b, m: F.relu(o.sigmoid().sum((2, 3)) - b.masks.sum((2, 3))).sum() / (4 * len(o)))

def _softmax_dice(o: Tensor, target: Tensor, dims: tuple[int, ...]) -> Tensor:
    p, hot = o.softmax(1), F.one_hot(target, 4).movedim(-1, 1)
    return 1 - (2 * (p * hot).sum(dims) + 0.1) / ((p + hot).sum(dims) + 0.1)

def _lovasz(logits: Tensor, y: Tensor) -> Tensor:
    signs = 2 * y - 1
    errors, order = (1 - logits * signs).sort(descending=True)
    y = y[order]
    union = y.sum() + (1 - y).cumsum(0)
    index = 1 - (y.sum() - y.cumsum(0)) / union.clamp(min=1)
    slope = torch.cat((index[:1], index[1:] - index[:-1]))
    return F.relu(errors) @ slope

def _balanced(o: Tensor, masks: Tensor, positives: Tensor) -> Tensor:
    each = F.binary_cross_entropy_with_logits(o, masks, reduction="none")
    return (each * torch.where(masks > 0, 1 - positives, positives)).mean()

def _border(target: Tensor) -> Tensor:
    differs = (target != target.roll(1, 1)) | (target != target.roll(1, 2))
    return 1.0 + 2.0 * differs
