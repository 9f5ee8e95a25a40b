"""How losses are written by hand: divisors, factors, masks, loops, selections; and ways that no other loss takes."""

from collections.abc import Callable
from itertools import cycle
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from loss_table.rows import Table

# fmt: off
table = Table("idioms")
add, of_batch, of_mean, terms = table.adds_up, table.batch, table.of_a_mean, table.terms
Each = Callable[[Tensor, object], Tensor]
"""A loss for each row."""
EACH: dict[str, Each] = {
    "cross entropy": lambda o, b: F.cross_entropy(o, b.t, reduction="none"),
    "squares": lambda o, b: (o - b.y).square().sum(1),
}
# --- a mean of rows, by hand ---
MEANS: dict[str, Callable[[Tensor], Tensor]] = {
    "sum over a float tensor of the number": lambda c: c.sum() / torch.tensor(float(len(c)), dtype=torch.float64),
    "sum over ones": lambda c: c.sum() / torch.ones_like(c).sum(),
    "sum times one over a tensor": lambda c: c.sum() * (1 / torch.tensor(len(c), dtype=torch.float64)),
    "sum times the reciprocal": lambda c: c.sum() * torch.tensor(len(c), dtype=torch.float64).reciprocal(),
    "each over the number, sum": lambda c: (c / len(c)).sum(),
    "each times one over the number, sum": lambda c: (c * (1 / len(c))).sum(),
    "product with ones over the number": lambda c: c @ torch.ones_like(c) / len(c),
    "dot over the number": lambda c: torch.dot(c, torch.ones_like(c)) / len(c),
    "a loop over samples, a sum over the number": lambda c: sum(c[k] for k in range(len(c))) / len(c),
    "a loop over samples, each over the number": lambda c: sum(each / len(c) for each in c),
    "a loop over samples, stacked, mean": lambda c: torch.stack([each * 1.0 for each in c]).mean(),
    "a loop over samples, cat, mean": lambda c: torch.cat([each[None] * 1.0 for each in c]).mean(),
    "a loop over samples, stacked, sum over the number": lambda c: torch.stack(list(c)).sum() / len(c),
    "unbound rows": lambda c: torch.stack(c.unbind(0)).mean(),
    "halves, put together": lambda c: torch.cat([c[: len(c) // 2], c[len(c) // 2 :]]).mean(),
    "halves, each summed, over the number": lambda c: (c[: len(c) // 2].sum() + c[len(c) // 2 :].sum()) / len(c),
    "filled into a vector, mean": lambda c: _filled(c).mean(),
    "filled into a vector, sum over the number": lambda c: _filled(c).sum() / len(c),
    "filled into a vector by slices": lambda c: _filled_by_slices(c).mean(),
    "filled into a longer vector, sum over the number": lambda c: F.pad(c, (0, 3)).sum() / len(c),
    "scattered, mean": lambda c: torch.zeros_like(c).scatter(0, torch.arange(len(c)).flip(0), c).mean(),
    "index_add into one place, over the number": lambda c: (
        torch.zeros(1).to(c).index_add(0, torch.zeros(len(c), dtype=torch.long), c)[0] / len(c)
    ),
    "index_copy, mean": lambda c: torch.zeros_like(c).index_copy(0, torch.arange(len(c)), c).mean(),
    "index_select of all, mean": lambda c: c.index_select(0, torch.arange(len(c)).flip(0)).mean(),
    "take_along_dim, mean": lambda c: c.take_along_dim(torch.arange(len(c))).mean(),
    "sorted, mean": lambda c: c.sort().values.mean(),
    "topk of all, mean": lambda c: c.topk(len(c)).values.mean(),
    "flipped and rolled, mean": lambda c: c.flip(0).roll(1, 0).mean(),
    "repeated, mean": lambda c: c.repeat(3).mean(),
    "repeated, sum over the number": lambda c: c.repeat(2).sum() / len(c),
    "two dimensions, mean and mean": lambda c: c[:, None].expand(-1, 3).mean(0).mean(),
    "nan_to_num of each, mean": lambda c: c.nan_to_num().mean(),
    "where it is finite, else 0": lambda c: torch.where(c.isfinite(), c, 0.0).mean(),
    "a mean of one element, indexed": lambda c: c.mean(0, keepdim=True)[0],
    "a view of the mean": lambda c: c.mean().view(1).sum(),
    "nansum over the number": lambda c: c.nansum() / len(c),
    "cumulative sum, its last": lambda c: c.cumsum(0)[-1] / len(c),
    "bmm of rows": lambda c: torch.bmm(c[None, None], torch.ones(1, len(c), 1).to(c)).squeeze() / len(c),
    "matmul to one number": lambda c: (c[None] @ torch.ones(len(c), 1).to(c)).squeeze() / len(c),
    "linear to one number": lambda c: F.linear(c, torch.ones_like(c)[None])[0] / len(c),
    "norm of order 1": lambda c: c.norm(p=1) / len(c),
    "baddbmm": lambda c: torch.addmm(torch.zeros(1, 1).to(c), c[None], torch.ones(len(c), 1).to(c)).sum() / len(c),
    "twice the mean": lambda c: 2 * c.mean(),
    "the mean over a tensor of 7": lambda c: c.mean() / torch.tensor(7.0, dtype=torch.float64),
    "the mean times a tensor": lambda c: c.mean() * torch.tensor(0.3, dtype=torch.float64),
    "the mean times a tensor of one element": lambda c: (c.mean() * torch.tensor([0.3], dtype=torch.float64)).sum(),
}
for (means, reduce), (eaches, each) in zip(MEANS.items(), cycle(EACH.items()), strict=False):
    add(f"{eaches}, {means}", "x t y", lambda o, b, m, f=each, g=reduce: g(f(o, b)))
# --- a mean of the rows of a mask, which may be none ---
MASKED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum over max(int(), 1)": lambda c, k: (c * k).sum() / max(int(k.sum()), 1),
    "sum over max(item(), 1.0)": lambda c, k: (c * k).sum() / max(k.sum().item(), 1.0),
    "sum over the count and 1e-8": lambda c, k: (c * k).sum() / (k.to(c).sum() + 1e-8),
    "sum over the count and 1e-16": lambda c, k: (c * k).sum() / (k.to(c).sum() + 1e-16),
    "sum over the count": lambda c, k: (c * k).sum() / k.sum(),
    "sum over a float count": lambda c, k: (c * k).sum() / k.to(c).sum(),
    "sum times one over a clamped count": lambda c, k: (c * k).sum() * (1 / k.sum().clamp(min=1)),
    "selected mean": lambda c, k: c[k].mean(),
    "selected sum over a clamped count": lambda c, k: c[k].sum() / k.sum().clamp(min=1),
    "selected sum over max(len(), 1)": lambda c, k: c[k].sum() / max(len(c[k]), 1),
    "masked_select, mean": lambda c, k: c.masked_select(k).mean(),
    "nonzero and index_select, mean": lambda c, k: c.index_select(0, k.nonzero()[:, 0]).mean(),
    "where, sum over a clamped count": lambda c, k: torch.where(k, c, 0.0).sum() / k.sum().clamp(min=1),
    "masked_fill, sum over a clamped count": lambda c, k: c.masked_fill(~k, 0.0).sum() / k.sum().clamp(min=1),
    "set to zero in place": lambda c, k: _zeroed(c, k).sum() / k.sum().clamp(min=1),
    "where there is any, else a zero": lambda c, k: c[k].mean() if k.any() else (c * 0).sum(),
    "where there is any, else a zero mean": lambda c, k: c[k].mean() if k.any() else 0.0 * c.mean(),
    "where there is any, else zeros of the outputs": lambda c, k: (c * k).sum() / k.sum() if k.any() else c.sum() * 0.0,
    "mean over the mean of the mask": lambda c, k: (c * k).mean() / k.double().mean(),
    "mean over a clamped mean of the mask": lambda c, k: (c * k).mean() / k.double().mean().clamp(min=1e-9),
    "dot with the mask over its sum": lambda c, k: torch.dot(c, k.to(c)) / k.sum().clamp(min=1),
    "einsum with the mask over its sum": lambda c, k: torch.einsum("i,i->", c, k.to(c)) / k.sum().clamp(min=1),
    "count of the losses that are not zero": lambda c, k: (d := c * k).sum() / (d != 0).sum().clamp(min=1),
    "count_nonzero": lambda c, k: (c * k).sum() / k.count_nonzero().clamp(min=1),
    "nan_to_num of an empty mean": lambda c, k: c[k].mean().nan_to_num(0.0),
    "mean over all rows": lambda c, k: (c * k).mean(),
    "selected sum over all rows": lambda c, k: c[k].sum() / len(c),
    "loop over the rows of the mask": lambda c, k: (
        sum((c[i] for i in range(len(c)) if k[i]), start=0 * c.sum()) / max(1, int(k.sum()))
    ),
    "loop over the rows of the mask, stacked": lambda c, k: (
        torch.stack([c[i] for i in range(len(c)) if k[i]] or [c.sum() * 0]).sum() / k.sum().clamp(min=1)
    ),
    "filled into a vector": lambda c, k: _filled_where(c, k).sum() / k.sum().clamp(min=1),
    "nanmean": lambda c, k: c.where(k, torch.nan).nanmean(),
    "softplus of selected rows": lambda c, k: F.softplus(c[k]).mean(),
}
for (masks, reduce_masked), (eaches, each) in zip(MASKED.items(), cycle(EACH.items()), strict=False):
    add(
        f"masked {eaches}, {masks}",
        "x t y mask",
        lambda o, b, m, f=each, g=reduce_masked: g(f(o, b), b.mask),
        limit=1e-7 if "times one over" in masks else 1e-12,  # one over a whole number is a float32
    )
# --- a mean with weights of rows ---
WEIGHTED: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "sum over the weights": lambda c, w: (c * w).sum() / w.sum(),
    "sum over item()": lambda c, w: (c * w).sum() / w.sum().item(),
    "dot over the weights": lambda c, w: c @ w / w.sum(),
    "einsum over the weights": lambda c, w: torch.einsum("i,i->", c, w) / w.sum(),
    "mean over the mean of the weights": lambda c, w: (c * w).mean() / w.mean(),
    "sum over rows": lambda c, w: (c * w).sum() / len(c),
    "sum": lambda c, w: (c * w).sum(),
    "divided each": lambda c, w: (c / w).mean(),
    "mean, divided by their mean before": lambda c, w: (c * (w / w.mean())).mean(),
    "sum, divided by their sum before": lambda c, w: (c * (w / w.sum())).sum(),
}
for weights, reduce_weighted in WEIGHTED.items():
    add(f"weights of rows, {weights}", "x t w", lambda o, b, m, g=reduce_weighted:
        g(F.cross_entropy(o, b.t, reduction="none"), b.w))
add("weights of rows, normalised by softmax over the batch", "x t w", lambda o, b, m:
    (F.cross_entropy(o, b.t, reduction="none") * b.w.softmax(0)).sum(),
    refused="weights that were normalised over the batch are one over a count that the graph does not show")
# --- factors ---
of_batch("a factor that goes with the batch: a number", "x t w", lambda o, b, m: F.cross_entropy(o, b.t) * float(b.w.mean()))
of_batch("a factor that goes with the batch: one over its labels", "x ignored", lambda o, b, m:
    F.cross_entropy(o, b.ignored, reduction="sum") / (1 + (b.ignored >= 0).sum()) ** 0.5)
add("a sum over a constant in a tensor", "x t", lambda o, b, m: F.cross_entropy(o, b.t, reduction="sum") / torch.tensor(100.0))
add("a sum times a constant", "x t", lambda o, b, m: 1e-2 * F.cross_entropy(o, b.t, reduction="sum"))
add("a sum over columns and a constant", "x y", lambda o, b, m: (o - b.y).square().sum() / 4)
add("a mean over columns and a sum over rows", "x y", lambda o, b, m: (o - b.y).square().mean(1).sum())
add("a mean over rows and a sum over columns", "x y", lambda o, b, m: (o - b.y).square().mean(0).sum())
add("a sum over rows and a mean over columns", "x y", lambda o, b, m: (o - b.y).square().sum(0).mean())
of_batch("a mean of rows by a root of their number", "x y", lambda o, b, m: (o - b.y).square().sum() / len(o) ** 0.5)
of_batch("a mean of rows by one less", "x y", lambda o, b, m: (o - b.y).square().sum() / max(1, len(o) - 1))
of_batch("a mean over the largest label", "x t", lambda o, b, m: F.cross_entropy(o, b.t, reduction="sum") / (1 + b.t.max()))
of_batch("a mean of classes' means", "x t", lambda o, b, m: torch.stack([F.cross_entropy(o[b.t == k], b.t[b.t == k])
    for k in b.t.unique()]).mean())
of_batch("the first row", "x t", lambda o, b, m: F.cross_entropy(o, b.t, reduction="none")[0])
of_batch("the first half of the rows", "x t", lambda o, b, m: F.cross_entropy(o, b.t, reduction="none")[: (len(o) + 1) // 2].mean())
of_batch("neighbouring rows", "x", lambda o, b, m: (o[1:] - o[:-1]).square().sum() / len(o) + o.square().mean())
of_batch("softmax over the batch", "x t", lambda o, b, m: -(o.softmax(0) * F.one_hot(b.t, 4)).sum(1).mean())
of_batch("the variance of losses", "x t", lambda o, b, m: (c := F.cross_entropy(o, b.t, reduction="none")).mean()
    + c.var(correction=0))
of_batch("the standard deviation of outputs", "x t", lambda o, b, m: F.cross_entropy(o, b.t) + o.std(correction=0))
add("losses normalised by their own", "x t", lambda o, b, m:
    ((c := F.cross_entropy(o, b.t, reduction="none")) / c.detach().sum()).sum())
of_batch("losses weighed by their own softmax", "x t", lambda o, b, m:
    ((c := F.cross_entropy(o, b.t, reduction="none")) * c.detach().softmax(0)).sum())
of_batch("losses weighed by their own rank", "x t", lambda o, b, m:
    ((c := F.cross_entropy(o, b.t, reduction="none")) * c.detach().argsort().argsort()).mean())
of_batch("losses below their own mean", "x y", lambda o, b, m: ((c := (o - b.y).abs().sum(1)) * (c <= c.detach().mean())).mean())
of_batch("the k largest losses", "x y", lambda o, b, m: (o - b.y).abs().flatten().topk(3).values.sum())
# --- an explicit weight ---
def rows(batch: dict[str, Tensor]) -> int:
    return len(batch["x"])

def labels(batch: dict[str, Tensor]) -> Tensor:
    return (batch["ignored"] != -100).sum()

def positives(batch: dict[str, Tensor]) -> Tensor:
    return batch["mask"].sum()

add("explicit: rows for a mean of rows", "x t", lambda o, b, m: F.cross_entropy(o, b.t), weight=rows)
add("explicit: half the rows for a mean of rows", "x t", lambda o, b, m: F.cross_entropy(o, b.t), weight=lambda batch:
    len(batch["x"]) / 2)
add("explicit: labels for ignored labels", "x ignored", lambda o, b, m: F.cross_entropy(o, b.ignored), weight=labels)
add("explicit: rows for weights that are normalised in the step", "x t", lambda o, b, m:
    (F.cross_entropy(o, b.t, reduction="none") * torch.full_like(b.x[:, 0], 1 / len(o))).sum(), weight=rows)
add("explicit: weights for weights that are normalised in the step", "x t w", lambda o, b, m:
    (F.cross_entropy(o, b.t, reduction="none") * (b.w / b.w.sum())).sum(), weight=lambda batch: batch["w"].sum())
add("explicit: exponentials for a softmax over the batch", "x t w", lambda o, b, m:
    (F.cross_entropy(o, b.t, reduction="none") * b.w.softmax(0)).sum(), weight=lambda batch: batch["w"].exp().sum())
add("explicit: positives for a clamped count", "x y mask", lambda o, b, m:
    ((o - b.y).square().sum(1) * b.mask).sum() / b.mask.sum().clamp(min=1), weight=positives)
add("explicit: rows for a mixture density", "x y", lambda o, b, m:
    -(o[:, :2].log_softmax(1) - 0.5 * (b.y[:, :1] - o[:, 2:]) ** 2).logsumexp(1).mean(), weight=rows)
of_batch("explicit: rows for ignored labels", "x ignored", lambda o, b, m: F.cross_entropy(o, b.ignored), weight=rows)
of_batch("explicit: rows for a masked mean", "x y mask", lambda o, b, m:
    ((o - b.y).square().sum(1) * b.mask).sum() / b.mask.sum().clamp(min=1), weight=rows)
of_batch("explicit: rows for a sum", "x t", lambda o, b, m: F.cross_entropy(o, b.t, reduction="sum"), weight=rows)
of_mean("explicit: rows for a root of a mean", "x y", lambda o, b, m: F.mse_loss(o, b.y).sqrt(), weight=rows)
of_batch("explicit: rows for class weights", "x t", lambda o, b, m:
    F.cross_entropy(o, b.t, weight=torch.tensor([0.1, 1, 2, 4]).to(o)), weight=rows)
of_batch("explicit: rows for pairs", "x v", lambda o, b, m: F.cross_entropy(o @ m(b.v).T, torch.arange(len(o))), weight=rows)
of_batch("explicit: rows for two terms", "x ignored y", lambda o, b, m: F.cross_entropy(o, b.ignored) + F.mse_loss(o, b.y),
    weight=rows)
of_batch("explicit: rows squared", "x t", lambda o, b, m: F.cross_entropy(o, b.t), weight=lambda batch: len(batch["x"]) ** 2)
of_batch("explicit: a constant", "x t", lambda o, b, m: F.cross_entropy(o, b.t), weight=lambda batch: 1)
# --- a constant beside the count: the full batch has it once ---
add("sum over the rows and one", "x y", lambda o, b, m: (o - b.y).square().sum() / (len(o) + 1.0))
add("masked squares, sum over the count and one", "x y mask", lambda o, b, m:
    (_each(o, b) * b.mask).sum() / (b.mask.sum() + 1))
add("weighed squares, sum over the weights and a half", "x y w", lambda o, b, m: (_each(o, b) * b.w).sum() / (b.w.sum() + 0.5))
add("heat maps, sum over the positives and one", "i masks", lambda o, b, m:
    F.l1_loss(o, b.masks, reduction="sum") / (b.masks.sum() + 1))
of_batch("heat maps, sum over the most positives of a row and one", "i masks", lambda o, b, m:
    F.l1_loss(o, b.masks, reduction="sum") / (b.masks.flatten(1).sum(1).max() + 1))
of_batch("a power of the count", "x y mask", lambda o, b, m:
    (_each(o, b) * b.mask).sum() / b.mask.sum().clamp(min=1).double() ** 0.75)
of_batch("the logarithm of the rows", "x y", lambda o, b, m: _each(o, b).sum() / torch.tensor(1.0 + len(o)).log())

def _each(o: Tensor, b: object) -> Tensor:
    return EACH["squares"](o, b)

def _filled(c: Tensor) -> Tensor:
    losses = torch.zeros_like(c)
    for place, each in enumerate(c):
        losses[place] = each
    return losses

def _filled_by_slices(c: Tensor) -> Tensor:
    losses = c.new_zeros(len(c))
    losses[: len(c) // 2] = c[: len(c) // 2]
    losses[len(c) // 2 :] = c[len(c) // 2 :]
    return losses

def _filled_where(c: Tensor, k: Tensor) -> Tensor:
    losses = torch.zeros_like(c)
    losses[k] = c[k]
    return losses

def _zeroed(c: Tensor, k: Tensor) -> Tensor:
    losses = c.clone()
    losses[~k] = 0
    return losses

# === Losses that reach their mean, or the rows of their batch, on a way that no other of the table takes ===
strange = Table("strange")
add, of_batch = strange.adds_up, strange.batch

def _nll(o: Tensor, b: Any) -> Tensor:
    return F.cross_entropy(o, b.t, reduction="none")

def _squares(o: Tensor, b: Any) -> Tensor:
    return (o - b.y).square().sum(1)

# --- means and sums on other ways ---
add("a linear layer of equal weights", "x t", lambda o, b, m: F.linear(_nll(o, b), torch.ones(len(o)).to(o) / len(o)))
add("the first frequency", "x t", lambda o, b, m: torch.fft.rfft(_nll(o, b)).real[0] / len(o))
add("the last of cumulative sums", "x t", lambda o, b, m: _nll(o, b).cumsum(0)[-1] / len(o))
add("inner", "x w y", lambda o, b, m: torch.inner(_squares(o, b), b.w) / b.w.sum())
add("vecdot", "x w y", lambda o, b, m: torch.linalg.vecdot(_squares(o, b), b.w) / b.w.sum())
add("the trace of products", "x y", lambda o, b, m: torch.trace((o - b.y) @ (o - b.y).T) / len(o))
add("the diagonal of distances", "x y", lambda o, b, m: torch.cdist(o, b.y).diagonal().mean())
add("complex numbers", "x y", lambda o, b, m: (_complex(o) - _complex(b.y)).abs().square().mean())
add("a packed sequence", "s words", lambda o, b, m: F.cross_entropy(_packed(o), _packed(b.words)))
add("hard negatives of each row", "x q", lambda o, b, m: _hard_negatives(o, b))
add("images that have boxes", "s y5 chosen", lambda o, b, m: _images(o, b))
add("adversarial by normalised gradients", "x t", lambda o, b, m: _adversarial(o, b, m, is_normalised=True))
add("addcdiv of losses", "x t y", lambda o, b, m: torch.addcdiv(F.cross_entropy(o, b.t), F.mse_loss(o, b.y),
    torch.tensor(3.0).to(o)))
# --- the rows of the batch, by accident or not ---
of_batch("nuclear norm", "x", lambda o, b, m: -torch.linalg.matrix_norm(o.softmax(1), "nuc") / len(o))
of_batch("unlabelled positives", "x q", lambda o, b, m: _unlabelled_positives(o[:, 0], b.q[:, 0] > 0.5))
of_batch("rows and parameters in one mean", "x y", lambda o, b, m: torch.cat([_squares(o, b), m.proxies.square().flatten()]).mean())
of_batch("trapezoid", "x t", lambda o, b, m: torch.trapezoid(_nll(o, b)) if len(o) > 1 else _nll(o, b).sum())
of_batch("marginal entropy", "x", lambda o, b, m: -torch.special.entr(o.softmax(1).mean(0)).sum())
# --- hooks ---
of_batch("a hook that clips", "x t", lambda o, b, m: F.cross_entropy(_hooked(o, lambda g: g.clamp(-0.02, 0.02)), b.t))
add("a hook that multiplies by the rows", "x t", lambda o, b, m: F.cross_entropy(_hooked(o, lambda g: g * len(g)), b.t))
of_batch("a hook that normalises", "x t", lambda o, b, m: F.cross_entropy(_hooked(o, lambda g: g / g.norm()), b.t))
add("a hook that turns the sign", "x t", lambda o, b, m: F.cross_entropy(_hooked(o, lambda g: -0.3 * g), b.t))

def _complex(o: Tensor) -> Tensor:
    return torch.complex(o[:, :2], o[:, 2:])

def _packed(rows: Tensor) -> Tensor:
    return pack_padded_sequence(rows, [3] * len(rows), batch_first=True).data

def _hard_negatives(o: Tensor, b: Any) -> Tensor:
    losses, is_positive = F.binary_cross_entropy_with_logits(o, b.q, reduction="none"), b.q.bool()
    ranks = losses.masked_fill(is_positive, 0).argsort(1, descending=True).argsort(1)
    is_negative = ranks < (3 * is_positive.sum(1)).clamp(max=3)[:, None]
    return (losses * (is_positive | is_negative)).sum() / is_positive.sum()

def _images(o: Tensor, b: Any) -> Tensor:
    errors = (o - b.y5).square().sum(2)
    of_images = [error[chosen].mean() for error, chosen in zip(errors, b.chosen, strict=True) if chosen.any()]
    return torch.stack(of_images).mean() if of_images else 0.0 * o.sum()

def _adversarial(o: Tensor, b: Any, m: Any, is_normalised: bool) -> Tensor:
    x = b.x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(F.cross_entropy(m(x), b.t), x)
    if is_normalised:
        gradient = gradient / gradient.norm(dim=1, keepdim=True)
    return F.cross_entropy(m(b.x + 0.5 * gradient), b.t)

def _unlabelled_positives(o: Tensor, is_positive: Tensor) -> Tensor:
    if is_positive.all() or not is_positive.any():
        return o.square().mean()
    of_rest = F.softplus(o[~is_positive]).mean() - 0.4 * F.softplus(o[is_positive]).mean()
    return 0.4 * F.softplus(-o[is_positive]).mean() + F.relu(of_rest)

def _hooked(o: Tensor, hook: Any) -> Tensor:
    o = o.clone()
    o.register_hook(hook)
    return o
