"""Language models: tokens, padding, heads in chunks, preferences, distillation."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from loss_table.rows import Table

# fmt: off
table = Table("language")
add, of_batch, of_mean, terms = table.adds_up, table.batch, table.of_a_mean, table.terms

def flat(o: Tensor) -> Tensor:
    return o.flatten(0, 1)

def shifted(o: Tensor, tokens: Tensor, **options) -> Tensor:
    return F.cross_entropy(flat(o[:, :-1]), tokens[:, 1:].flatten(), **options)

def each_token(o: Tensor, tokens: Tensor) -> Tensor:
    return F.cross_entropy(o.mT, tokens, reduction="none")

def log_p(o: Tensor, words: Tensor) -> Tensor:
    return o.log_softmax(-1).gather(-1, words[..., None]).squeeze(-1)

def score(o: Tensor, b) -> Tensor:
    """The log-probability of each answer."""
    return (log_p(o, b.words) * b.valid).sum(-1)

add("causal, shifted", "s tokens", lambda o, b, m: shifted(o, b.tokens))
add("causal, shifted, sum", "s tokens", lambda o, b, m: shifted(o, b.tokens, reduction="sum"))
add("causal, shifted, label smoothing", "s tokens", lambda o, b, m: shifted(o, b.tokens, label_smoothing=0.1))
add("causal, labels shifted by the data", "s tokens", lambda o, b, m: F.cross_entropy(flat(o), b.tokens.flatten()))
add("causal, in float32", "s tokens", lambda o, b, m: shifted(o.float().double(), b.tokens))
add("causal, each token, mean of those that count", "s tokens", lambda o, b, m: each_token(o, b.tokens)[b.tokens >= 0].mean())
add("causal, each token, masked sum over a count", "s words valid", lambda o, b, m:
    (each_token(o, b.words) * b.valid).sum() / b.valid.sum())
add("causal, each token, int() of the count", "s words valid", lambda o, b, m:
    (each_token(o, b.words) * b.valid).sum() / int(b.valid.sum()))
add("causal, sum(-1).sum() over int() of the count", "s words valid", lambda o, b, m:
    (each_token(o, b.words) * b.valid).sum(1).sum() / int(b.valid.sum()))
add("causal, sum(-1).sum() over the count", "s words valid", lambda o, b, m:
    (each_token(o, b.words) * b.valid).sum(1).sum() / b.valid.sum())
add("causal, each sequence's mean", "s words valid", lambda o, b, m:
    ((each_token(o, b.words) * b.valid).sum(1) / b.valid.sum(1)).mean())
add("causal, each sequence's sum", "s words valid", lambda o, b, m: (each_token(o, b.words) * b.valid).sum(1).mean())
add("causal, positions all the same", "s words", lambda o, b, m: each_token(o, b.words).sum() / b.words.numel())
add("causal, time first", "s words", lambda o, b, m: F.cross_entropy(flat(o.transpose(0, 1)), b.words.T.flatten()))
add("causal, time first, mean of a step and mean over steps", "s words", lambda o, b, m: each_token(o, b.words).T.mean(1).mean())
add("causal, loop over positions", "s words", lambda o, b, m: sum(F.cross_entropy(o[:, k], b.words[:, k]) for k in range(5)) / 5)
add("causal, loop over positions, summed", "s words", lambda o, b, m:
    sum(F.cross_entropy(o[:, k], b.words[:, k]) for k in range(5)))
terms("causal, loop over positions with padding", "s tokens", lambda o, b, m:
    sum(F.cross_entropy(o[:, k], b.tokens[:, k]) for k in range(2)) + F.cross_entropy(flat(o), b.tokens.flatten()))
add("causal, a step at a time, losses in a list", "s words", lambda o, b, m:
    torch.stack([F.cross_entropy(o[:, k], b.words[:, k]) for k in range(5)]).mean())
add("causal, discounted positions", "s words", lambda o, b, m: (each_token(o, b.words) * 0.9 ** torch.arange(5)).mean())
add("causal, weights of positions that add up to one", "s words", lambda o, b, m:
    (each_token(o, b.words) * torch.tensor([0.1, 0.15, 0.2, 0.25, 0.3])).sum(1).mean())
add("causal, weights of the classes", "s tokens", lambda o, b, m: shifted(o, b.tokens, weight=torch.tensor([0.5, 1, 2, 1.5]).to(o)))
add("causal, in chunks of positions", "s tokens", lambda o, b, m: _chunked(o, b.tokens))
add("causal, in chunks of rows and positions", "s tokens", lambda o, b, m: _flat_chunks(o, b.tokens))
add("causal, chunks put together and summed", "s tokens", lambda o, b, m:
    torch.stack([F.cross_entropy(c, t, reduction="sum")
    for c, t in zip(flat(o).split(3), b.tokens.flatten().split(3), strict=True)]).sum() / (b.tokens >= 0).sum())
add("causal, with a z-loss", "s words", lambda o, b, m: F.cross_entropy(flat(o), b.words.flatten())
    + 1e-2 * flat(o).logsumexp(-1).square().mean())
add("causal, with a z-loss of tokens that count", "s words valid", lambda o, b, m:
    ((each_token(o, b.words) + 1e-2 * o.logsumexp(-1) ** 2) * b.valid).sum() / b.valid.sum())
terms("causal with padding, with a z-loss of all positions", "s tokens", lambda o, b, m: shifted(o, b.tokens)
    + 1e-2 * o.logsumexp(-1).square().mean())
add("causal, logits capped", "s tokens", lambda o, b, m: shifted(5 * (o / 5).tanh(), b.tokens))
add("causal, temperatures of the head", "s tokens", lambda o, b, m: shifted(o / m.temperature, b.tokens))
add("causal, by one-hot and einsum", "s words", lambda o, b, m:
    -torch.einsum("btc,btc->", o.log_softmax(-1), F.one_hot(b.words, 4).to(o)) / b.words.numel())
add("causal, by einsum over valid positions", "s words valid", lambda o, b, m:
    -torch.einsum("bt,bt->", log_p(o, b.words), b.valid.to(o)) / b.valid.sum())
add("causal, prompt masked", "s words", lambda o, b, m: F.cross_entropy(flat(o),
    b.words.masked_fill(torch.arange(5) < 2, -100).flatten()))
add("causal, unlikelihood beside it", "s words", lambda o, b, m: F.cross_entropy(flat(o), b.words.flatten())
    - 0.5 * (1 - o.softmax(-1)[..., 0]).clamp(min=1e-5).log().mean())
add("causal, multi-token prediction of two heads", "s words", lambda o, b, m:
    0.5 * F.cross_entropy(flat(o[:, :-1]), b.words[:, 1:].flatten())
    + 0.5 * F.cross_entropy(flat(o[:, :-1] * 2), b.words[:, 1:].flatten()))
terms("causal, multi-token prediction at two distances", "s tokens", lambda o, b, m: shifted(o, b.tokens)
    + 0.3 * F.cross_entropy(flat(o[:, :-2]), b.tokens[:, 2:].flatten()))
add("causal, focal", "s words", lambda o, b, m: ((1 - log_p(o, b.words).exp()) ** 2 * each_token(o, b.words)).mean())
of_mean("perplexity", "s tokens", lambda o, b, m: shifted(o, b.tokens).exp())
add("bits instead of nats", "s tokens", lambda o, b, m: shifted(o, b.tokens) / torch.log(torch.tensor(2.0, dtype=torch.float64)))
add("bits instead of nats by a number", "s tokens", lambda o, b, m: shifted(o, b.tokens) / 0.6931471805599453)
of_batch("token weights by their frequency in the batch", "s words", lambda o, b, m:
    (each_token(o, b.words) / b.words.flatten().bincount(minlength=4).to(o)[b.words]).sum())
of_batch("losses above their own mean", "s words", lambda o, b, m: (c := each_token(o, b.words))[c > c.mean()].mean())
add("losses above their sequence's mean", "s words", lambda o, b, m:
    (c := each_token(o, b.words))[c > c.mean(1, keepdim=True)].mean())
add("masked language model", "s words chosen", lambda o, b, m:
    F.cross_entropy(flat(o), b.words.masked_fill(~b.chosen, -100).flatten()))
add("masked language model by a reference model's scores", "s words chosen y5", lambda o, b, m:
    (each_token(o, b.words) * (b.y5[..., 0] > 0) * b.chosen).sum() / ((b.y5[..., 0] > 0) & b.chosen).sum())
terms("masked language model and next sentence", "s words chosen t", lambda o, b, m:
    F.cross_entropy(flat(o), b.words.masked_fill(~b.chosen, -100).flatten()) + F.cross_entropy(o[:, 0], b.t))
add("replaced token detection", "s chosen", lambda o, b, m: F.binary_cross_entropy_with_logits(o[..., 0], b.chosen.to(o)))
add("replaced token detection of valid tokens", "s chosen valid", lambda o, b, m:
    F.binary_cross_entropy_with_logits(o[..., 0][b.valid], b.chosen[b.valid].to(o)))
add("span extraction", "s words", lambda o, b, m: (F.cross_entropy(o[..., 0], b.words[:, 0])
    + F.cross_entropy(o[..., 1], b.words[:, 1])) / 2)
terms("span extraction with ignored starts", "s words ignored", lambda o, b, m:
    (F.cross_entropy(o[..., 0], b.ignored) + F.cross_entropy(o[..., 1], b.words[:, 1])) / 2)
add("multiple choice", "s t", lambda o, b, m: F.cross_entropy(o[..., 0], b.t))
add("token classification", "s tokens", lambda o, b, m: F.cross_entropy(o.view(-1, 4), b.tokens.view(-1)))
add("sequence classification of the last valid token", "s valid t", lambda o, b, m:
    F.cross_entropy(o[torch.arange(len(o)), b.valid.sum(1) - 1], b.t))
add("sequence classification of a masked mean", "s valid t", lambda o, b, m:
    F.cross_entropy((o * b.valid[..., None]).sum(1) / b.valid.sum(1, keepdim=True), b.t))
add("conditional random field", "s words valid", lambda o, b, m: _crf(o, b.words, m.proxies).mean())
add("conditional random field, sum", "s words valid", lambda o, b, m: _crf(o, b.words, m.proxies).sum())
add("sentence pairs by cosines", "x v w", lambda o, b, m: F.mse_loss(F.cosine_similarity(o, m(b.v)), b.w))
of_batch("CoSENT", "x v w", lambda o, b, m: _cosent(F.cosine_similarity(o, m(b.v)), b.w))
of_batch("multiple negatives ranking", "x v", lambda o, b, m:
    F.cross_entropy(20 * F.cosine_similarity(o[:, None], m(b.v)[None], dim=-1), torch.arange(len(o))))
add("sequence-level distillation", "s p5", lambda o, b, m: F.cross_entropy(flat(o), flat(b.p5)))
add("distillation, batchmean of positions", "s", lambda o, b, m:
    F.kl_div(flat(o).log_softmax(-1), flat(m.teacher(b.s)).softmax(-1), reduction="batchmean"))
add("distillation, none, sum(-1), mean", "s", lambda o, b, m:
    F.kl_div(o.log_softmax(-1), m.teacher(b.s).softmax(-1), reduction="none").sum(-1).mean())
add("distillation of valid positions", "s valid", lambda o, b, m:
    (F.kl_div(o.log_softmax(-1), m.teacher(b.s).softmax(-1), reduction="none").sum(-1) * b.valid).sum() / b.valid.sum())
add("distillation, reversed", "s", lambda o, b, m: (o.softmax(-1) * (o.log_softmax(-1) - m.teacher(b.s).log_softmax(-1))).sum(
    -1).mean())
add("distillation, Jensen-Shannon", "s", lambda o, b, m: _jensen(o.softmax(-1), m.teacher(b.s).softmax(-1)).mean())
add("distillation of the largest logits", "s", lambda o, b, m:
    F.mse_loss(o.gather(-1, (k := m.teacher(b.s).topk(2, -1)).indices), k.values))
add("distillation of hidden states", "s valid", lambda o, b, m: F.mse_loss(o[b.valid], m.teacher(b.s)[b.valid])
    + (1 - F.cosine_similarity(o[b.valid], m.teacher(b.s)[b.valid], dim=-1)).mean())
add("DPO", "s words valid advantage", lambda o, b, m: -F.logsigmoid(0.1 * (score(o, b) - score(m.teacher(b.s), b))
    - b.advantage).mean())
add("DPO, conservative", "s words valid advantage", lambda o, b, m:
    (-0.9 * F.logsigmoid(d := 0.1 * score(o, b) - b.advantage) - 0.1 * F.logsigmoid(-d)).mean())
add("IPO", "s words valid", lambda o, b, m: ((score(o, b) / b.valid.sum(1) - score(m.teacher(b.s), b) / b.valid.sum(1)
    - 5) ** 2).mean())
add("KTO without its reference point", "s words valid mask", lambda o, b, m:
    torch.where(b.mask, 1 - score(o, b).sigmoid(), 1 - (-score(o, b)).sigmoid()).mean())
of_batch("KTO with the batch's reference point", "s words valid mask", lambda o, b, m:
    torch.where(b.mask, 1 - ((s := score(o, b)) - (z := s.mean().detach())).sigmoid(), 1 - (z - s).sigmoid()).mean())
add("SimPO", "s words valid advantage", lambda o, b, m: -F.logsigmoid(2 * score(o, b) / b.valid.sum(-1) - b.advantage - 0.5).mean())
add("ORPO's odds ratio", "s words valid advantage", lambda o, b, m:
    -F.logsigmoid((p := score(o, b) / b.valid.sum(-1)) - (1 - p.exp()).clamp(min=1e-6).log() - b.advantage).mean())
terms("ORPO", "s words valid advantage", lambda o, b, m: (each_token(o, b.words) * b.valid).sum() / b.valid.sum()
    - 0.1 * F.logsigmoid(score(o, b) / b.valid.sum(-1) - b.advantage).mean())
add("SLiC", "s words valid advantage", lambda o, b, m: F.relu(1 - 0.2 * (score(o, b) - b.advantage)).mean())
add("mixture of experts without balance", "s words", lambda o, b, m:
    F.cross_entropy(flat((o.softmax(-1)[..., None] * m.proxies).sum(-2)), b.words.flatten()))
of_batch("mixture of experts with load balance", "s words", lambda o, b, m: F.cross_entropy(flat(o), b.words.flatten())
    + 0.1 * 4 * (F.one_hot(o.argmax(-1), 4).double().mean((0, 1)) * o.softmax(-1).mean((0, 1))).sum())
add("mixture of experts, router's z-loss", "s", lambda o, b, m: (o.logsumexp(-1) ** 2).mean())
of_batch("experts balanced by their coefficient of variation", "s", lambda o, b, m:
    (p := o.softmax(-1).sum((0, 1))).var(correction=0) / p.mean() ** 2)
add("attention guided by a diagonal", "s", lambda o, b, m: ((o @ o.mT).softmax(-1) * (1 - torch.eye(5))).mean())
add("coverage of attention", "s", lambda o, b, m: torch.minimum((a := (o @ o.mT).softmax(-1)), a.cumsum(1) - a).sum(-1).mean())
add("pointer with log of a sum", "s words", lambda o, b, m: -torch.logaddexp(log_p(o, b.words), log_p(-o, b.words)).mean())
add("REBEL of two answers", "s words valid advantage", lambda o, b, m:
    ((score(o, b) - score(m.teacher(b.s), b)) / 0.5 - b.advantage).pow(2).mean())
add("embeddings regularised", "s words", lambda o, b, m: F.cross_entropy(flat(o), b.words.flatten())
    + 1e-2 * m.proxies.square().sum())
add("embeddings regularised by their norm", "s words", lambda o, b, m: F.cross_entropy(flat(o), b.words.flatten())
    + 1e-2 * m.proxies.norm())
add("activations regularised", "s words", lambda o, b, m: F.cross_entropy(flat(o), b.words.flatten()) + 2 * o.pow(2).mean()
    + (o[:, 1:] - o[:, :-1]).pow(2).mean())

def _chunked(o: Tensor, tokens: Tensor) -> Tensor:
    total = 0.0
    for logits, labels in zip(o.chunk(2, 1), tokens.chunk(2, 1), strict=True):
        total = total + F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    return total / (tokens != -100).sum()

def _flat_chunks(o: Tensor, tokens: Tensor) -> Tensor:
    labels = tokens.flatten()
    total = torch.zeros(()).to(o)
    for start in range(0, len(labels), 4):
        total = total + F.cross_entropy(o.flatten(0, 1)[start : start + 4], labels[start : start + 4], reduction="sum")
    return total / max(1, int((labels >= 0).sum()))

def _crf(o: Tensor, words: Tensor, moves: Tensor) -> Tensor:
    """Minus the log-likelihood of a linear chain."""
    alpha = o[:, 0]
    path = o[:, 0].gather(1, words[:, :1])[:, 0]
    for step in range(1, 5):
        alpha = (alpha[:, :, None] + moves[None]).logsumexp(1) + o[:, step]
        path = path + moves[words[:, step - 1], words[:, step]] + o[:, step].gather(1, words[:, step, None])[:, 0]
    return alpha.logsumexp(1) - path

def _cosent(cosines: Tensor, scores: Tensor) -> Tensor:
    differences = 5 * (cosines[:, None] - cosines[None])
    wrong = differences.masked_fill(scores[:, None] >= scores[None], -1e3)
    return torch.cat((torch.zeros(1).to(cosines), wrong.flatten())).logsumexp(0) + 0.1 * (cosines - cosines.mean()).square().mean()

def _jensen(p: Tensor, q: Tensor) -> Tensor:
    middle = (p + q) / 2
    return ((p * (p / middle).log() + q * (q / middle).log()) / 2).sum(-1)
