"""Losses of several terms, each with a denominator of its own: a row each, with what its terms count where a list can say so."""

from collections import namedtuple
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import lightning.pytorch as pl
import torch
from sharded import shard
from support import OPTIMIZERS
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

D = torch.float64
LENGTH, WORDS, CLASSES = 6, 9, 4
WEIGHTS = torch.tensor([0.3, 1.7, 0.9, 0.5], dtype=D)
Outputs = namedtuple("Outputs", "tokens classes values boxes edges mean log_var rebuilt")


class Net(nn.Module):  # reads tokens and four numbers of a row, row by row, and has a head for each kind of term
    def __init__(self) -> None:
        super().__init__()
        self.word, self.reads = nn.Embedding(WORDS, 8), nn.Linear(4, 8)
        self.tokens, self.classes, self.values, self.boxes = (nn.Linear(8, n) for n in (WORDS, CLASSES, 3, 12))
        self.sends, self.latent, self.rebuilt = nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(4, 4)
        self.log_vars = nn.Parameter(torch.tensor([0.3, -0.2, 0.1]))

    def forward(self, ids: Tensor, labels: Tensor, x: Tensor, edges: Tensor) -> Outputs:
        row, is_token = self.reads(x), (labels >= 0)[..., None]
        hidden = (self.word(ids) + row[:, None]).tanh()
        pooled = (hidden * is_token).sum(1) / is_token.sum(1)
        ends = hidden[torch.arange(len(ids))[:, None, None], edges]  # (rows, edges, 2, 8)
        mean, log_var = self.latent(pooled).chunk(2, 1)
        return Outputs(
            self.tokens(hidden), self.classes(pooled), self.values(pooled), self.boxes(pooled).unflatten(1, (3, 4)),
            (self.sends(ends[:, :, 0]) * ends[:, :, 1]).sum(-1), mean, log_var, self.rebuilt(mean),
        )  # fmt: skip


Function = Callable[[Any, Any, Any], Tensor]  # of the net's outputs, the batch (an entry is an attribute) and the module


class OfTerms(pl.LightningModule):
    def __init__(self, function: Function, optimizer: str = "sgd") -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.function, self.optimizer = Net().double(), function, optimizer

    def configure_model(self) -> None:
        shard(self, [self.net])

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        outputs = self.net(batch["ids"], batch["labels"], batch["x"], batch["edges"])
        return self.function(outputs, SimpleNamespace(**batch), self)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


def rows(number: int, seed: int, has_some: bool = True) -> list[dict[str, Tensor]]:
    """Rows of 2 to 6 tokens, 1 to 3 boxes and 1 to 5 edges; what is chosen by ``some``, or has a class, may be none of them."""
    g = torch.Generator().manual_seed(seed)

    def first(low: int, most: int) -> Tensor:
        return torch.arange(most) < torch.randint(low, most + 1, (number, 1), generator=g)

    ids, is_token = torch.randint(1, WORDS, (number, LENGTH), generator=g), first(2, LENGTH)
    x, y = torch.randn(number, 4, generator=g, dtype=D), torch.randn(number, 3, generator=g, dtype=D)
    some = (torch.rand(number, generator=g) < 0.6) & has_some
    some[0] = has_some
    t = torch.randint(0, CLASSES, (number,), generator=g)
    columns = {
        "ids": ids * is_token, "labels": ids.masked_fill(~is_token, -100), "x": x, "y": y + is_token.sum(1, keepdim=True) / 2,
        "t": t, "rare": t.masked_fill(~some, -100), "some": some,
        "boxes": torch.rand(number, 3, 4, generator=g, dtype=D), "has_box": first(1, 3), "is_edge": first(1, 5),
        "edges": torch.randint(0, LENGTH, (number, 5, 2), generator=g) % is_token.sum(1)[:, None, None],
        "linked": torch.randint(0, 2, (number, 5), generator=g).to(D), "length": torch.randint(1, 3, (number,), generator=g),
        "words": ids[:, :2],
    }  # fmt: skip
    return [{name: column[row] for name, column in columns.items()} for row in range(number)]


def windows_of_tokens(batches: Sequence[list[Any]], tokens: int) -> list[list[Any]]:
    """The rows of windows that end with the loader batch in which they have so many tokens."""
    windows: list[list[Any]] = [[]]
    for batch in batches:
        windows[-1] += batch
        if sum(int((row["labels"] >= 0).sum()) for row in windows[-1]) >= tokens:
            windows.append([])
    return [window for window in windows if window]


# fmt: off
COUNTS: dict[str, Callable[[Any], Any]] = {
    "tokens": lambda b: (b["labels"] >= 0).sum(), "shifted": lambda b: (b["labels"][:, 1:] >= 0).sum(),
    "samples": lambda b: len(b["x"]), "some": lambda b: b["some"].sum(), "boxes": lambda b: b["has_box"].sum(),
    "edges": lambda b: b["is_edge"].sum(), "class weights": lambda b: WEIGHTS[b["t"]].sum(),
}

def ce(o: Any, b: Any, **kwargs: Any) -> Tensor:
    return F.cross_entropy(o.tokens.flatten(0, 1), b.labels.flatten(), **kwargs)
def shifted(o: Any, b: Any) -> Tensor:
    return F.cross_entropy(o.tokens[:, :-1].flatten(0, 1), b.labels[:, 1:].flatten())
def classes(o: Any, b: Any, **kwargs: Any) -> Tensor:
    return F.cross_entropy(o.classes, b.t, **kwargs)
def value(o: Any, b: Any) -> Tensor:
    return F.mse_loss(o.values[:, 0], b.y[:, 0])
def each(o: Any, b: Any) -> Tensor:
    return (o.values - b.y).square()
def masked(losses: Tensor, mask: Tensor) -> Tensor:
    return (losses * mask).sum() / mask.sum().clamp(min=1)
def boxes(o: Any, b: Any) -> Tensor:
    return masked(F.smooth_l1_loss(o.boxes, b.boxes, reduction="none").sum(-1), b.has_box)
def edges(o: Any, b: Any) -> Tensor:
    return F.binary_cross_entropy_with_logits(o.edges[b.is_edge], b.linked[b.is_edge])
def kl(o: Any) -> Tensor:
    return -0.5 * (1 + o.log_var - o.mean.square() - o.log_var.exp()).sum(1).mean()
def z(o: Any) -> Tensor:
    return o.tokens.logsumexp(-1).square()
def entropy(o: Any) -> Tensor:
    return -(o.classes.softmax(1) * o.classes.log_softmax(1)).sum(1).mean()
def ctc(o: Any, b: Any) -> Tensor:
    log_p, lengths = o.tokens.log_softmax(-1).transpose(0, 1), (b.labels >= 0).sum(1)
    return F.ctc_loss(log_p, b.words, lengths, b.length, zero_infinity=True)

def penalty(m: Any) -> Tensor:
    return 0.01 * sum(p.square().sum() for p in m.parameters() if p.requires_grad)

def if_any(loss: Tensor, losses: Tensor, mask: Tensor) -> Tensor:
    if mask.any():
        loss = loss + losses[mask].mean()
    return loss

def where_there_is(*losses: tuple[Tensor, Tensor]) -> Tensor:
    return sum((losses[mask].mean() for losses, mask in losses if mask.any()), start=torch.zeros((), dtype=D))

def uncertain(m: Any, *losses: Tensor) -> Tensor:
    total = torch.zeros((), dtype=D)
    for s, loss in zip(m.net.log_vars, losses, strict=False):
        total = total + torch.exp(-s) * loss + s
    return total

def by_loop(start: Tensor, losses: Sequence[Tensor], factor: float = 0.5) -> Tensor:
    for loss in losses:
        start = start + factor * loss
    return start

def balanced(o: Any, b: Any) -> Tensor:
    losses = classes(o, b, reduction="none")
    return sum(masked(losses, b.t == c) for c in range(CLASSES))

class Row(NamedTuple):
    """A loss; ``counts`` are those of its terms, in their order, or empty where no list of counts says them."""

    counts: str
    of: Function

LOSSES: dict[str, Row] = {
    "tokens and samples": Row("tokens, samples", lambda o, b, m: ce(o, b) + value(o, b)),
    "samples and tokens": Row("samples, tokens", lambda o, b, m: value(o, b) + 0.5 * ce(o, b)),
    "shifted tokens and samples": Row("shifted, samples", lambda o, b, m: shifted(o, b) + 0.1 * classes(o, b)),
    "cross entropy and masked regression": Row("samples, some", lambda o, b, m: classes(o, b) + masked(each(o, b)[:, 0], b.some)),
    "tokens and masked regression by eps": Row("", lambda o, b, m:
        ce(o, b) + (each(o, b)[:, 1] * b.some).sum() / (b.some.sum() + 1e-8)),
    "tokens and masked regression by where": Row("tokens, some", lambda o, b, m:
        ce(o, b) + torch.where(b.some.any(), masked(each(o, b)[:, 1], b.some), 0.0)),
    "boxes and samples": Row("boxes, samples", lambda o, b, m: boxes(o, b) + classes(o, b)),
    "nodes and edges": Row("tokens, edges", lambda o, b, m: ce(o, b) + edges(o, b)),
    "nodes, edges and graphs": Row("tokens, edges, samples", lambda o, b, m: ce(o, b) + 0.3 * edges(o, b) + value(o, b)),
    "class weights, tokens, boxes, edges and samples": Row("class weights, tokens, boxes, edges, samples", lambda o, b, m:
        classes(o, b, weight=WEIGHTS) + 0.5 * ce(o, b) + boxes(o, b) + 0.1 * edges(o, b) + 2 * value(o, b)),
    "label smoothing and samples": Row("tokens, tokens, samples", lambda o, b, m: ce(o, b, label_smoothing=0.1) + value(o, b)),
    "tokens and KL over samples": Row("tokens, samples", lambda o, b, m: ce(o, b) + 0.1 * kl(o)),
    "learned uncertainty": Row("tokens, samples", lambda o, b, m: uncertain(m, ce(o, b), value(o, b))),
    "annealed KL": Row("tokens, samples", lambda o, b, m: ce(o, b) + min(1.0, 0.2 + 0.3 * m.global_step) * kl(o)),
    "tokens, samples and a penalty": Row("", lambda o, b, m: ce(o, b) + value(o, b) + penalty(m)),
    "a term only where there is something": Row("tokens, some", lambda o, b, m: if_any(ce(o, b), each(o, b)[:, 0], b.some)),
    "the first term only where there is something": Row("some, samples", lambda o, b, m:
        if_any(torch.zeros((), dtype=D), each(o, b)[:, 0], b.some) + value(o, b)),
    "a term or the number 0": Row("tokens, some", lambda o, b, m: ce(o, b) + (each(o, b)[b.some].mean() if b.some.any() else 0.0)),
    "a learned factor times a term or 0": Row("", lambda o, b, m:
        uncertain(m, ce(o, b), each(o, b)[b.some].mean() if b.some.any() else torch.zeros((), dtype=D))),
    "columns, where something of each is known": Row("", lambda o, b, m:
        where_there_is(*(((o.values[:, c] - b.y[:, c]).square(), b.has_box[:, c]) for c in range(3)))),
    "heads, where something of each is known": Row("", lambda o, b, m:
        where_there_is((each(o, b).sum(1), b.has_box[:, 1]), ((o.rebuilt - b.x).square().sum(1), b.some))),
    "two means of one kind, each times 0 where it has nothing": Row("", lambda o, b, m:
        ce(o, b) + sum(each(o, b)[mask].sum() / mask.sum() if mask.any() else each(o, b).sum() * 0 for mask in b.has_box.T[1:])),
    "a term for each class": Row("", lambda o, b, m: balanced(o, b)),
    "a loop over rows, some of which have nothing": Row("", lambda o, b, m:
        by_loop(ce(o, b), [each(o, b)[row].mean() / len(b.t) for row in b.some.nonzero()], 1.0)),
    "a loop over heads": Row("tokens, some, boxes, edges", lambda o, b, m:
        by_loop(ce(o, b), [masked(each(o, b)[:, 0], b.some), boxes(o, b), edges(o, b)])),
    "a stack, summed": Row("tokens, samples, edges", lambda o, b, m: torch.stack([ce(o, b), value(o, b), edges(o, b)]).sum()),
    "a stack, its mean": Row("tokens, samples", lambda o, b, m: torch.stack([ce(o, b), each(o, b).mean()]).mean()),
    "softmax of learned factors": Row("tokens, samples, edges", lambda o, b, m:
        (m.net.log_vars.softmax(0) * torch.stack([ce(o, b), value(o, b), edges(o, b)])).sum()),
    "a vector of learned uncertainties": Row("tokens, samples, boxes", lambda o, b, m:
        ((-(s := m.net.log_vars)).exp() * torch.stack([ce(o, b), value(o, b), boxes(o, b)]) + s).sum()),
    "the mean of a stack times factors": Row("tokens, edges", lambda o, b, m:
        (torch.stack([ce(o, b), edges(o, b)]) * WEIGHTS[:2] / 3).mean()),
    "tasks of one kind times factors": Row("", lambda o, b, m:
        (torch.stack([masked(each(o, b)[:, c], b.has_box[:, c]) for c in range(3)]) * WEIGHTS[:3]).sum()),
    "columns, each by its count, and means of rows": Row("", lambda o, b, m:
        ((each(o, b) * b.has_box).sum(0) / b.has_box.sum(0).clamp(min=1)).mean()
        + ((z(o) * (b.labels >= 0)).sum(1) / (b.labels >= 0).sum(1)).mean()),
    "one loss, then another": Row("", lambda o, b, m: torch.where(torch.tensor(m.global_step < 2), ce(o, b), value(o, b))),
    "half of the sum": Row("tokens, samples", lambda o, b, m: (ce(o, b) + value(o, b)) / 2),
    "a sum beside a mean": Row("", lambda o, b, m: ce(o, b) + 0.01 * each(o, b).sum()),
    "CTC and tokens": Row("samples, tokens", lambda o, b, m: ctc(o, b) + ce(o, b)),
    "actor and critic": Row("tokens, samples, samples", lambda o, b, m:
        masked(-o.tokens.log_softmax(-1)[..., 0] * b.y[:, :1], b.labels >= 0) + 0.5 * value(o, b) - 0.01 * entropy(o)),
    "a checkpointed term": Row("", lambda o, b, m: checkpoint(ce, o, b, use_reentrant=False) + value(o, b)),
}
OF_NOTHING: dict[str, Function] = {  # means of nothing are NaN, as losses; the full batch has something to count
    "a selected mean and samples": lambda o, b, m: value(o, b) + each(o, b)[b.some][:, 1].mean(),
    "positives and negatives": lambda o, b, m: 0.5 * each(o, b)[b.some].mean() + 0.5 * each(o, b)[~b.some].mean(),
    "rare classes and samples": lambda o, b, m: F.cross_entropy(o.classes, b.rare) + value(o, b),
    "a masked mean and tokens": lambda o, b, m: (each(o, b)[:, 0] * b.some).sum() / b.some.sum() + ce(o, b),
    "a learned factor of a selected mean, and samples": lambda o, b, m:
        m.net.log_vars[0] * value(o, b) + m.net.log_vars[1].exp() * each(o, b)[b.some][:, 1].mean(),
    "learned factors of a stack, and half of a gate": lambda o, b, m: 0.5 * ((1 - (s := m.net.log_vars[:2])[1].sigmoid())
        * each(o, b)[b.some][:, 0].mean()) + ((-s).exp() * torch.stack([value(o, b), o.mean[b.some].square().mean()]) + s).mean(),
}
