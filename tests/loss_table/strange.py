"""Losses that reach their mean, or the rows of their batch, on a way that no other of the table takes."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.nn.utils.rnn import pack_padded_sequence

from loss_table.rows import Table

# fmt: off
table = Table("strange")
add, of_batch = table.adds_up, table.batch

def _nll(o: Tensor, b: Any) -> Tensor:
    return F.cross_entropy(o, b.t, reduction="none")

def _squares(o: Tensor, b: Any) -> Tensor:
    return (o - b.y).square().sum(1)

# --- means and sums on other ways ---
UNREAD = "a node that is not looked through"
add("relative distance of rows", "x y", lambda o, b, m: ((o - b.y).norm(dim=1) / b.y.norm(dim=1)).mean())
add("adaptive pooling to one", "x t", lambda o, b, m: F.adaptive_avg_pool1d(_nll(o, b)[None, None], 1).squeeze())
add("pooling of all", "x t", lambda o, b, m: F.avg_pool1d(_nll(o, b)[None, None], len(o)).squeeze(), refused=UNREAD)
add("a linear layer of equal weights", "x t", lambda o, b, m: F.linear(_nll(o, b), torch.ones(len(o)).to(o) / len(o)))
add("the first frequency", "x t", lambda o, b, m: torch.fft.rfft(_nll(o, b)).real[0] / len(o))
add("the last of cumulative sums", "x t", lambda o, b, m: _nll(o, b).cumsum(0)[-1] / len(o))
add("tensordot", "x w y", lambda o, b, m: torch.tensordot(_squares(o, b), b.w, 1) / b.w.sum())
add("inner", "x w y", lambda o, b, m: torch.inner(_squares(o, b), b.w) / b.w.sum())
add("vecdot", "x w y", lambda o, b, m: torch.linalg.vecdot(_squares(o, b), b.w) / b.w.sum(), refused=UNREAD)
add("the trace of products", "x y", lambda o, b, m: torch.trace((o - b.y) @ (o - b.y).T) / len(o))
add("the diagonal of distances", "x y", lambda o, b, m: torch.cdist(o, b.y).diagonal().mean())
add("nats to bits by the rows", "x t", lambda o, b, m: _nll(o, b).sum() / math.log(2) / len(o))
add("complex numbers", "x y", lambda o, b, m: (_complex(o) - _complex(b.y)).abs().square().mean())
add("a packed sequence", "s words", lambda o, b, m: F.cross_entropy(_packed(o), _packed(b.words)))
add("hard negatives of each row", "x q", lambda o, b, m: _hard_negatives(o, b))
add("images that have boxes", "s y5 chosen", lambda o, b, m: _images(o, b))
add("adversarial by normalised gradients", "x t", lambda o, b, m: _adversarial(o, b, m, is_normalised=True))
add("addcdiv of losses", "x t y", lambda o, b, m: torch.addcdiv(F.cross_entropy(o, b.t), F.mse_loss(o, b.y),
    torch.tensor(3.0).to(o)), refused=UNREAD)

# --- the rows of the batch, by accident or not ---
of_batch("adversarial by gradients", "x t", lambda o, b, m: _adversarial(o, b, m, is_normalised=False))
of_batch("broadcast to pairs", "x y", lambda o, b, m: ((o[:, 0] - b.y[:, :1]) ** 2).mean())
of_batch("layer norm over all", "x y", lambda o, b, m: (F.layer_norm(o, o.shape) - b.y).square().mean())
of_batch("attention over rows", "x y", lambda o, b, m: (F.scaled_dot_product_attention(*[o[None]] * 3)[0] - b.y).square().mean())
of_batch("nuclear norm", "x", lambda o, b, m: -torch.linalg.matrix_norm(o.softmax(1), "nuc") / len(o))
of_batch("the nearest row of prototypes", "x", lambda o, b, m: torch.cdist(o, m.proxies).min(0).values.mean())
of_batch("noisy or", "x", lambda o, b, m: -(1 - (1 - 0.1 * o[:, 0].sigmoid()).prod()).log())
of_batch("berHu", "x y", lambda o, b, m: _berhu((o - b.y).abs()))
of_batch("relative distance of the batch", "x y", lambda o, b, m: (o - b.y).norm() / b.y.norm())
of_batch("a norm of order 3", "x y", lambda o, b, m: torch.linalg.vector_norm(o - b.y, 3))
of_batch("unlabelled positives", "x q", lambda o, b, m: _unlabelled_positives(o[:, 0], b.q[:, 0] > 0.5))
of_batch("margins by the prior of the batch", "x q", lambda o, b, m: _area_under_curve(o[:, 0], b.q[:, 0], m))
of_batch("rows beyond a capacity", "x t", lambda o, b, m: (_nll(o, b) * _within_capacity(o)).mean())
of_batch("rows and parameters in one mean", "x y", lambda o, b, m: torch.cat([_squares(o, b), m.proxies.square().flatten()]).mean())
of_batch("running maximum", "x t", lambda o, b, m: _nll(o, b).cummax(0).values.mean())
of_batch("trapezoid", "x t", lambda o, b, m: torch.trapezoid(_nll(o, b)) if len(o) > 1 else _nll(o, b).sum())
of_batch("a choice of two means", "x t y", lambda o, b, m: _larger(_nll(o, b).mean(), _squares(o, b).mean() / 4))
of_batch("marginal entropy", "x", lambda o, b, m: -torch.special.entr(o.softmax(1).mean(0)).sum())
of_batch("sums of classes, squared", "x t", lambda o, b, m: o.new_zeros(4, 4).index_add(0, b.t, o).square().mean())
of_batch("determinant", "x", lambda o, b, m: -((o.T @ o) / len(o) + torch.eye(4).to(o)).logdet())
of_batch("lerp by the rows", "x t y", lambda o, b, m: torch.lerp(F.cross_entropy(o, b.t), F.mse_loss(o, b.y), len(o) / 12))

# --- hooks ---
of_batch("a hook that clips", "x t", lambda o, b, m: F.cross_entropy(_hooked(o, lambda g: g.clamp(-0.02, 0.02)), b.t))
of_batch("a hook that multiplies by the rows", "x t", lambda o, b, m: F.cross_entropy(_hooked(o, lambda g: g * len(g)), b.t))
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

def _berhu(distance: Tensor) -> Tensor:
    limit = 0.2 * distance.max().detach()
    return torch.where(distance <= limit, distance, (distance.square() + limit**2) / (2 * limit)).mean()

def _unlabelled_positives(o: Tensor, is_positive: Tensor) -> Tensor:
    if is_positive.all() or not is_positive.any():
        return o.square().mean()
    of_rest = F.softplus(o[~is_positive]).mean() - 0.4 * F.softplus(o[is_positive]).mean()
    return 0.4 * F.softplus(-o[is_positive]).mean() + F.relu(of_rest)

def _area_under_curve(o: Tensor, is_positive: Tensor, m: Any) -> Tensor:
    prior = is_positive.mean()
    of_negatives = ((o - m.bias) ** 2 * (1 - is_positive)).mean()
    return prior * of_negatives + (1 - prior) * ((o - m.temperature) ** 2 * is_positive).mean()

def _within_capacity(o: Tensor) -> Tensor:
    chosen = F.one_hot(o.argmax(1), 4)
    return (chosen.cumsum(0) * chosen).sum(1) <= math.ceil(len(o) / 4 * 1.25)

def _larger(one: Tensor, other: Tensor) -> Tensor:
    return torch.where(one > other, one, other)

def _hooked(o: Tensor, hook: Any) -> Tensor:
    o = o.clone()
    o.register_hook(hook)
    return o
