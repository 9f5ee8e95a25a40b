"""The criteria of torch.nn, with their reductions and options."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from loss_table.rows import Table

# fmt: off
table = Table("criteria")
add, of_batch = table.adds_up, table.batch

def class_weights(o: Tensor) -> Tensor:
    return torch.tensor([0.3, 1.7, 0.9, 1.2]).to(o)

# cross entropy: with everything that it takes
CLASSES = "one for each class"
CROSS_ENTROPIES: list[tuple[str, str, dict[str, Any]]] = [
    ("", "x t", {}),
    (" with ignored labels", "x ignored", {}),
    (" that ignores a class", "x t", {"ignore_index": 2}),
    (" with class weights", "x t", {"weight": CLASSES}),
    (" with class weights and ignored labels", "x ignored", {"weight": CLASSES}),
    (" with label smoothing", "x t", {"label_smoothing": 0.1}),
    (" with label smoothing and ignored labels", "x ignored", {"label_smoothing": 0.2}),
    (" with label smoothing and class weights", "x ignored", {"label_smoothing": 0.2, "weight": CLASSES}),
    (" of probabilities", "x p", {}),
    (" of probabilities with class weights", "x p", {"weight": CLASSES}),
    (" of probabilities with label smoothing", "x p", {"label_smoothing": 0.1}),
    (" of a class map", "i map", {}),
    (" of a class map with ignored pixels", "i map255", {"ignore_index": 255}),
    (" of a class map with class weights", "i map255", {"ignore_index": 255, "weight": CLASSES}),
    (" of a class map with label smoothing", "i map255", {"ignore_index": 255, "label_smoothing": 0.1}),
]
BINARY_CROSS_ENTROPIES: list[tuple[str, str, dict[str, Any]]] = [
    (" with logits", "x q", {}),
    (" with pos_weight", "x q", {"pos_weight": CLASSES}),
    (" with logits and column weights", "x q", {"weight": CLASSES}),
    (" of masks", "i masks", {}),
]

def of_labels(criterion: Callable[..., Tensor], inputs: str, **options: Any) -> Callable[[Tensor, Any, Any], Tensor]:
    def loss(o: Tensor, b: Any, m: Any) -> Tensor:
        given = {name: class_weights(o) if value == CLASSES else value for name, value in options.items()}
        return criterion(o, getattr(b, inputs.split()[1]), **given)

    return loss

for reduction in ("mean", "sum"):
    kw = {"reduction": reduction}
    for words, inputs, options in CROSS_ENTROPIES:
        add(f"cross entropy{words}, {reduction}", inputs, of_labels(F.cross_entropy, inputs, **options, **kw))
    for words, inputs, options in BINARY_CROSS_ENTROPIES:
        criterion = of_labels(F.binary_cross_entropy_with_logits, inputs, **options, **kw)
        add(f"binary cross entropy{words}, {reduction}", inputs, criterion)
    add(f"nll_loss, {reduction}", "x ignored", lambda o, b, m, kw=kw: F.nll_loss(o.log_softmax(1), b.ignored, **kw))
    add(f"nll_loss with class weights, {reduction}", "x t", lambda o, b, m, kw=kw:
        F.nll_loss(o.log_softmax(1), b.t, weight=class_weights(o), **kw))
    add(f"nll_loss of a class map, {reduction}", "i map", lambda o, b, m, kw=kw: F.nll_loss(o.log_softmax(1), b.map, **kw))
    add(f"cross entropy of sequences, {reduction}", "s tokens", lambda o, b, m, kw=kw: F.cross_entropy(o.mT, b.tokens, **kw))

    # regression
    for name, criterion in {
        "mean squared error": F.mse_loss,
        "mean absolute error": F.l1_loss,
        "smooth L1": F.smooth_l1_loss,
        "Huber": F.huber_loss,
    }.items():
        add(f"{name}, {reduction}", "x y", lambda o, b, m, f=criterion, kw=kw: f(o, b.y, **kw))
    add(f"smooth L1 with beta 0.1, {reduction}", "x y", lambda o, b, m, kw=kw: F.smooth_l1_loss(o, b.y, beta=0.1, **kw))
    add(f"Huber with delta 0.3, {reduction}", "x y", lambda o, b, m, kw=kw: F.huber_loss(o, b.y, delta=0.3, **kw))
    add(f"mean squared error of one column, {reduction}", "x y", lambda o, b, m, kw=kw: F.mse_loss(o[:, 1], b.y[:, 1], **kw))
    add(f"mean squared error of images, {reduction}", "i image", lambda o, b, m, kw=kw: F.mse_loss(o, b.image, **kw))

    # of probabilities
    add(f"binary cross entropy, {reduction}", "x q", lambda o, b, m, kw=kw: F.binary_cross_entropy(o.sigmoid(), b.q, **kw))
    add(f"binary cross entropy with a weight for each sample, {reduction}", "x q w", lambda o, b, m, kw=kw:
        F.binary_cross_entropy(o.sigmoid(), b.q, weight=b.w[:, None], **kw))
    add(f"KL divergence, {reduction}", "x p", lambda o, b, m, kw=kw: F.kl_div(o.log_softmax(1), b.p, **kw))
    add(f"KL divergence of log targets, {reduction}", "x p", lambda o, b, m, kw=kw:
        F.kl_div(o.log_softmax(1), b.p.log(), log_target=True, **kw))
    add(f"Gaussian NLL, {reduction}", "x y", lambda o, b, m, kw=kw:
        F.gaussian_nll_loss(o[:, :2], b.y[:, :2], F.softplus(o[:, 2:]) + 0.1, **kw))
    add(f"Gaussian NLL, full, {reduction}", "x y", lambda o, b, m, kw=kw:
        F.gaussian_nll_loss(o[:, :2], b.y[:, :2], F.softplus(o[:, 2:]) + 0.1, full=True, **kw))
    add(f"Poisson NLL, {reduction}", "x counts", lambda o, b, m, kw=kw: F.poisson_nll_loss(o, b.counts, **kw))
    add(f"Poisson NLL of rates, full, {reduction}", "x counts", lambda o, b, m, kw=kw:
        F.poisson_nll_loss(F.softplus(o), b.counts, log_input=False, full=True, **kw))

    # margins
    add(f"multi margin, {reduction}", "x t", lambda o, b, m, kw=kw: F.multi_margin_loss(o, b.t, **kw))
    add(f"multi margin, squared, with class weights, {reduction}", "x t", lambda o, b, m, kw=kw:
        F.multi_margin_loss(o, b.t, p=2, margin=0.5, weight=class_weights(o), **kw))
    add(f"multilabel margin, {reduction}", "x q", lambda o, b, m, kw=kw:
        F.multilabel_margin_loss(o, torch.where(b.q > 0, torch.arange(4), -1).sort(1, True).values, **kw))
    add(f"multilabel soft margin, {reduction}", "x q", lambda o, b, m, kw=kw: F.multilabel_soft_margin_loss(o, b.q, **kw))
    add(f"multilabel soft margin with class weights, {reduction}", "x q", lambda o, b, m, kw=kw:
        F.multilabel_soft_margin_loss(o, b.q, weight=class_weights(o), **kw))
    add(f"soft margin, {reduction}", "x q", lambda o, b, m, kw=kw: F.soft_margin_loss(o, 2 * b.q - 1, **kw))
    add(f"hinge embedding, {reduction}", "x q", lambda o, b, m, kw=kw: F.hinge_embedding_loss(o.square(), 2 * b.q - 1, **kw))
    add(f"margin ranking, {reduction}", "x v sign", lambda o, b, m, kw=kw:
        F.margin_ranking_loss(o[:, 0], m(b.v)[:, 0], b.sign, margin=0.2, **kw))
    add(f"cosine embedding, {reduction}", "x v sign", lambda o, b, m, kw=kw:
        F.cosine_embedding_loss(o, m(b.v), b.sign, margin=0.1, **kw))
    add(f"triplet margin, {reduction}", "x v z", lambda o, b, m, kw=kw: F.triplet_margin_loss(o, m(b.v), m(b.z), **kw))
    add(f"triplet margin with swap, {reduction}", "x v z", lambda o, b, m, kw=kw:
        F.triplet_margin_loss(o, m(b.v), m(b.z), margin=2.0, swap=True, **kw))
    add(f"triplet margin by cosines, {reduction}", "x v z", lambda o, b, m, kw=kw:
        F.triplet_margin_with_distance_loss(o, m(b.v), m(b.z), distance_function=lambda a, c: 1 - F.cosine_similarity(a, c),
        margin=0.5, **kw))
    add(f"CTC, {reduction}", "s words valid", lambda o, b, m, kw=kw: _ctc(o, b, **kw))
add("KL divergence, batchmean", "x p", lambda o, b, m: F.kl_div(o.log_softmax(1), b.p, reduction="batchmean"))
add("KL divergence of log targets, batchmean", "x p", lambda o, b, m:
    F.kl_div(o.log_softmax(1), b.p.log(), reduction="batchmean", log_target=True))
add("KL divergence of sequences, batchmean", "s p5", lambda o, b, m: F.kl_div(o.log_softmax(-1), b.p5, reduction="batchmean"))
add("CTC with infinite losses set to zero", "s words valid", lambda o, b, m: _ctc(o, b, zero_infinity=True, frames=3))
# by hand what the criteria reduce
for name, each in {
    "cross entropy": lambda o, b: F.cross_entropy(o, b.t, reduction="none"),
    "mean squared error": lambda o, b: F.mse_loss(o, b.y, reduction="none"),
    "binary cross entropy with logits": lambda o, b: F.binary_cross_entropy_with_logits(o, b.q, reduction="none"),
    "Huber": lambda o, b: F.huber_loss(o, b.y, reduction="none"),
    "multi margin": lambda o, b: F.multi_margin_loss(o, b.t, reduction="none"),
}.items():
    add(f"{name}, none, mean", "x t y q", lambda o, b, m, f=each: f(o, b).mean())
    add(f"{name}, none, sum", "x t y q", lambda o, b, m, f=each: f(o, b).sum())
    add(f"{name}, none, a sum over the number of rows", "x t y q", lambda o, b, m, f=each: f(o, b).sum() / len(o))
add("LogSoftmax and a gathered mean", "x t", lambda o, b, m: -o.log_softmax(1).gather(1, b.t[:, None]).mean())
add("one-hot times log-softmax, sum and mean", "x t", lambda o, b, m: -(F.one_hot(b.t, 4) * o.log_softmax(1)).sum(1).mean())
add("adaptive softmax by two clusters", "x t", lambda o, b, m: -_two_clusters(o, b.t).mean())
of_batch("cross entropy over the rows of a column", "x t", lambda o, b, m: F.cross_entropy(o.T, b.t.new_zeros(4)))
of_batch("cross entropy with class weights of the batch", "x t", lambda o, b, m:
    F.cross_entropy(o, b.t, weight=(1 / (1 + b.t.bincount(minlength=4))).to(o)))
of_batch("binary cross entropy with pos_weight of the batch", "x q", lambda o, b, m:
    F.binary_cross_entropy_with_logits(o, b.q, pos_weight=(1 + (1 - b.q).sum(0)) / (1 + b.q.sum(0))))

def _ctc(o: Tensor, b, reduction: str = "mean", joined: bool = False, zero_infinity: bool = False, frames: int = 5) -> Tensor:
    """Of 5 frames and up to 2 labels."""
    lengths = b.valid.sum(1).clamp(max=2)
    labels = b.words[:, :2] % 3 + 1
    if joined:
        labels = labels[torch.arange(2) < lengths[:, None]]
    steps = torch.full((len(o),), frames)
    log_probabilities = o.log_softmax(-1).transpose(0, 1)
    return F.ctc_loss(log_probabilities, labels, steps, lengths, reduction=reduction, zero_infinity=zero_infinity)

def _two_clusters(o: Tensor, t: Tensor) -> Tensor:  # the log-probability of a class: of its cluster, and within it
    cluster = F.logsigmoid(o[:, 0] * torch.where(t < 2, 1.0, -1.0))
    within = F.logsigmoid(o[:, 1] * torch.where(t % 2 == 0, 1.0, -1.0))
    return cluster + within
