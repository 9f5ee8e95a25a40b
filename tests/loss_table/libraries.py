"""As libraries write them: detection and segmentation tool boxes, trainers of language models, recommenders, speech, agents."""

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from loss_table.rows import Table

# fmt: off
table = Table("libraries")
add, of_batch, terms = table.adds_up, table.batch, table.terms

def ce(o: Tensor, b) -> Tensor:
    return F.cross_entropy(o, b.t)

def each(o: Tensor, b) -> Tensor:
    return F.cross_entropy(o, b.t, reduction="none")

def log_p(o: Tensor, t: Tensor) -> Tensor:
    return o.log_softmax(-1).gather(-1, t[..., None]).squeeze(-1)

# --- detection ---
terms("FCOS: three sums over the foreground", "x q boxes mask w", lambda o, b, m:
    F.binary_cross_entropy_with_logits(o, b.q, reduction="none").sum() / max(1, int(b.mask.sum()))
    + ((o - b.boxes).abs().sum(1) * b.mask).sum() / max(1, int(b.mask.sum())))
terms("RetinaNet: a list of images, each by its own foreground", "i masks", lambda o, b, m:
    sum(F.binary_cross_entropy_with_logits(each, target, reduction="sum") / max(1, int(target.sum()))
    for each, target in zip(o, b.masks, strict=True)) / len(o))
add("region proposals by a fixed number of samples an image", "x q positive", lambda o, b, m:
    F.binary_cross_entropy_with_logits(o[b.positive], b.q[b.positive], reduction="sum") / (256 * len(o))
    + F.smooth_l1_loss(o * b.positive, b.q * b.positive, beta=0.1, reduction="sum") / (256 * len(o)))
add("box head: classes by proposals and boxes by all proposals", "x t mask boxes", lambda o, b, m: ce(o, b)
    + F.smooth_l1_loss(o[b.mask], b.boxes[b.mask], reduction="sum") / max(b.t.numel(), 1.0))
add("a mean times the rows over those of a full batch", "x t", lambda o, b, m: ce(o, b) * (len(o) / 12))
add("two means, times the rows", "x t y", lambda o, b, m: (0.5 * ce(o, b) + 0.05 * F.mse_loss(o, b.y)) * len(o))
add("scores by their sum, at least 1", "x p", lambda o, b, m: F.binary_cross_entropy_with_logits(o, b.p, reduction="none").sum()
    / max(b.p.sum(), 1))
add(
    "an average factor and the smallest float32",
    "x mask q",
    lambda o, b, m: (
        (F.binary_cross_entropy_with_logits(o, b.q, reduction="none") * b.mask[:, None]).sum()
        / (b.mask.sum() + torch.finfo(torch.float32).eps)
    ),
    limit=1e-6,  # a count of int64 and a Python number make float32
)
add("varifocal by the sum of qualities", "x p", lambda o, b, m:
    (F.binary_cross_entropy_with_logits(o, b.p, reduction="none") * (b.p + (o.sigmoid() - b.p).abs().pow(2).detach())).sum()
    / b.p.sum())
add("heat map with a branch for no peaks", "i masks", lambda o, b, m:
    F.binary_cross_entropy_with_logits(o, b.masks, reduction="sum") if not b.masks.sum()
    else F.binary_cross_entropy_with_logits(o, b.masks, reduction="sum") / b.masks.sum())
# --- segmentation and classification tool boxes ---
add("pixels over those not ignored, a Python number", "i map255", lambda o, b, m:
    F.cross_entropy(o, b.map255, ignore_index=255, reduction="none").sum() / (b.map255.numel() - (b.map255 == 255).sum().item()))
of_batch("mixup with the row before", "x t", lambda o, b, m: 0.7 * ce(o, b) + 0.3 * F.cross_entropy(o, b.t.roll(1)))
add("weights that were normalised to a mean of 1", "x t w", lambda o, b, m:
    (each(o, b) * (b.w / b.w.sum() * len(b.w))).mean())
add("decoupled distillation, sums over rows", "x t", lambda o, b, m:
    F.kl_div(o.log_softmax(1), m.teacher(b.x).softmax(1), reduction="sum") * 4**2 / b.t.shape[0] + 2.0 * ce(o, b))
add("two passes over the same rows", "x t", lambda o, b, m: 0.5 * (ce(o, b) + ce(m(b.x * 1.1), b))
    + 0.25 * F.kl_div(o.log_softmax(1), m(b.x * 1.1).softmax(1), reduction="none").sum(-1).mean()
    + 0.25 * F.kl_div(m(b.x * 1.1).log_softmax(1), o.softmax(1), reduction="batchmean"))
# --- language ---
add("label smoothing over active elements", "s words valid", lambda o, b, m:
    0.9 * (-log_p(o, b.words)).masked_fill(~b.valid, 0.0).sum() / b.valid.sum()
    + 0.1 * (-o.log_softmax(-1)).sum(-1).masked_fill(~b.valid, 0.0).sum() / (b.valid.sum() * o.shape[-1]))
add("answers that are good and bad, put together", "x t mask", lambda o, b, m:
    torch.cat((1 - (0.1 * log_p(o, b.t)[b.mask] + 1).sigmoid(), 1 - (-0.1 * log_p(o, b.t)[~b.mask] - 1).sigmoid())).nanmean())
of_batch("stopped where the batch has moved too far", "x t old advantage", lambda o, b, m:
    -(log_p(o, b.t) * b.advantage).mean() * float((b.old - log_p(o, b.t)).mean() > 0))
# --- speech ---
add("a sum over the sum of lengths", "s words valid", lambda o, b, m:
    (-log_p(o, b.words) * b.valid).sum(1).sum() / b.valid.sum(1).double().sum())
add("CTC and attention, each a sum over rows", "s words valid", lambda o, b, m:
    0.3 * F.ctc_loss(F.pad(o, (1, 0)).log_softmax(-1).transpose(0, 1), b.words[:, :2] + 1, *_lengths(b), reduction="sum") / len(o)
    + 0.7 * (-log_p(o, b.words) * b.valid).sum() / len(o))
add("transducers by a lattice of each row", "s words", lambda o, b, m: torch.stack([_lattice(each) for each in o]).mean())
# --- recommenders ---
add("pairs with a norm of embeddings over the rows", "x v z", lambda o, b, m:
    F.softplus((o * m(b.z)).sum(1) - (o * m(b.v)).sum(1)).mean()
    + 1e-2 * 0.5 * (o.norm(2).pow(2) + m(b.v).norm(2).pow(2) + m(b.z).norm(2).pow(2)) / float(len(o)))
# --- penalties on parameters ---
PENALTIES = {
    "the nuclear norm": lambda m: torch.linalg.matrix_norm(m.proxies, "nuc"),
    "a group lasso": lambda m: m.proxies.norm(dim=1).sum(),
    "orthogonality by a norm": lambda m: (m.proxies @ m.proxies.T - torch.eye(4).to(m.proxies)).norm(p="fro"),
    "decay of all parameters": lambda m: sum(p.pow(2).sum() for p in m.parameters() if p.requires_grad) / 2,
    "decay of all weights, a mean of each": lambda m: sum(p.abs().mean() for p in m.parameters() if p.dim() > 1),
    "a distance to a buffer": lambda m: F.mse_loss(m.proxies, m.queue[:4]),
}
for _name, _penalty in PENALTIES.items():
    add(f"classes and {_name}", "x t", lambda o, b, m, f=_penalty: ce(o, b) + 0.1 * f(m))
    add(f"ignored labels and {_name}", "x ignored", lambda o, b, m, f=_penalty: F.cross_entropy(o, b.ignored) + 0.1 * f(m))
# --- generative ---
add("reconstruction and divergence, sums", "x y", lambda o, b, m: F.mse_loss(o, b.y, reduction="sum") + _divergence(o).sum())
of_batch("mutual information by Donsker and Varadhan", "x v", lambda o, b, m: -(o[:, 0].mean() - m(b.v)[:, 0].exp().mean().log()))
add("mutual information by Nguyen and others", "x v", lambda o, b, m: -(o[:, 0].mean() - (m(b.v)[:, 0] - 1).exp().mean()))
of_batch("invariant risks", "x t", lambda o, b, m: _invariant(o, b))
# --- risks and constraints ---
add("value at risk with a learned quantile", "x t", lambda o, b, m: m.bias + F.relu(each(o, b) - m.bias).mean() / 0.1)
of_batch("a barrier of a constraint on the mean", "x y", lambda o, b, m: F.mse_loss(o, b.y) + F.softplus(5 * o[:, 0].mean()))
# --- how the loss is computed ---
add("vmap of a loss of one row", "x t", lambda o, b, m: torch.vmap(lambda p, t: F.cross_entropy(p, t))(o, b.t).mean())
add("a loss in a checkpoint", "x t", lambda o, b, m: checkpoint(F.cross_entropy, o, b.t, use_reentrant=False))
add("a loop with a running mean", "x t", lambda o, b, m: _running(each(o, b)))
add("sums of two halves, put together", "x t", lambda o, b, m: sum(c.sum() for c in each(o, b).chunk(2)) / len(o))

def _lengths(b) -> tuple[Tensor, Tensor]:
    return torch.full((len(b.words),), 5), torch.full((len(b.words),), 2)

def _lattice(o: Tensor) -> Tensor:
    alpha = o[:, 0].cumsum(0)
    for column in range(1, 4):
        alpha = torch.logcumsumexp(alpha + o[:, column], 0)
    return -alpha[-1]

def _divergence(o: Tensor) -> Tensor:
    return -0.5 * (1 + o[:, 2:] - o[:, :2].pow(2) - o[:, 2:].exp())

def _invariant(o: Tensor, b) -> Tensor:
    scale = torch.ones((), dtype=o.dtype, requires_grad=True)
    loss = F.cross_entropy(o * scale, b.t)
    return loss + torch.autograd.grad(loss, [scale], create_graph=True)[0].pow(2)

def _running(losses: Tensor) -> Tensor:
    mean = losses[0]
    for number, loss in enumerate(losses[1:], start=2):
        mean = mean + (loss - mean) / number
    return mean
