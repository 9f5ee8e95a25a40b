"""Language models: tokens, padding, heads in chunks, preferences, distillation."""

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

def score(o: Tensor, b) -> Tensor:  # the log-probability of each answer
    return (log_p(o, b.words) * b.valid).sum(-1)

add("causal, shifted, label smoothing", "s tokens", lambda o, b, m: shifted(o, b.tokens, label_smoothing=0.1))
add("causal, sum(-1).sum() over the count", "s words valid", lambda o, b, m:
    (each_token(o, b.words) * b.valid).sum(1).sum() / b.valid.sum())
add("causal, each sequence's mean", "s words valid", lambda o, b, m:
    ((each_token(o, b.words) * b.valid).sum(1) / b.valid.sum(1)).mean())
add("causal, each sequence's sum", "s words valid", lambda o, b, m: (each_token(o, b.words) * b.valid).sum(1).mean())
add("causal, positions all the same", "s words", lambda o, b, m: each_token(o, b.words).sum() / b.words.numel())
add("causal, time first, mean of a step and mean over steps", "s words", lambda o, b, m: each_token(o, b.words).T.mean(1).mean())
add("causal, loop over positions", "s words", lambda o, b, m: sum(F.cross_entropy(o[:, k], b.words[:, k]) for k in range(5)) / 5)
terms("causal, loop over positions with padding", "s tokens", lambda o, b, m:
    sum(F.cross_entropy(o[:, k], b.tokens[:, k]) for k in range(2)) + F.cross_entropy(flat(o), b.tokens.flatten()))
add("causal, a step at a time, losses in a list", "s words", lambda o, b, m:
    torch.stack([F.cross_entropy(o[:, k], b.words[:, k]) for k in range(5)]).mean())
add("causal, in chunks of positions", "s tokens", lambda o, b, m: _chunked(o, b.tokens))
add("causal, in chunks of rows and positions", "s tokens", lambda o, b, m: _flat_chunks(o, b.tokens))
add("causal, with a z-loss of tokens that count", "s words valid", lambda o, b, m:
    ((each_token(o, b.words) + 1e-2 * o.logsumexp(-1) ** 2) * b.valid).sum() / b.valid.sum())
terms("causal with padding, with a z-loss of all positions", "s tokens", lambda o, b, m: shifted(o, b.tokens)
    + 1e-2 * o.logsumexp(-1).square().mean())
add("causal, by einsum over valid positions", "s words valid", lambda o, b, m:
    -torch.einsum("bt,bt->", log_p(o, b.words), b.valid.to(o)) / b.valid.sum())
of_mean("perplexity", "s tokens", lambda o, b, m: shifted(o, b.tokens).exp())
of_batch("losses above their own mean", "s words", lambda o, b, m: (c := each_token(o, b.words))[c > c.mean()].mean())
add("masked language model by a reference model's scores", "s words chosen y5", lambda o, b, m:
    (each_token(o, b.words) * (b.y5[..., 0] > 0) * b.chosen).sum() / ((b.y5[..., 0] > 0) & b.chosen).sum())
add("replaced token detection of valid tokens", "s chosen valid", lambda o, b, m:
    F.binary_cross_entropy_with_logits(o[..., 0][b.valid], b.chosen[b.valid].to(o)))
add("span extraction", "s words", lambda o, b, m: (F.cross_entropy(o[..., 0], b.words[:, 0])
    + F.cross_entropy(o[..., 1], b.words[:, 1])) / 2)
terms("span extraction with ignored starts", "s words ignored", lambda o, b, m:
    (F.cross_entropy(o[..., 0], b.ignored) + F.cross_entropy(o[..., 1], b.words[:, 1])) / 2)
add("conditional random field", "s words valid", lambda o, b, m: _crf(o, b.words, m.proxies).mean())
add("conditional random field, sum", "s words valid", lambda o, b, m: _crf(o, b.words, m.proxies).sum())
add("distillation of hidden states", "s valid", lambda o, b, m: F.mse_loss(o[b.valid], m.teacher(b.s)[b.valid])
    + (1 - F.cosine_similarity(o[b.valid], m.teacher(b.s)[b.valid], dim=-1)).mean())
terms("ORPO", "s words valid advantage", lambda o, b, m: (each_token(o, b.words) * b.valid).sum() / b.valid.sum()
    - 0.1 * F.logsigmoid(score(o, b) / b.valid.sum(-1) - b.advantage).mean())
of_batch("mixture of experts with load balance", "s words", lambda o, b, m: F.cross_entropy(flat(o), b.words.flatten())
    + 0.1 * 4 * (F.one_hot(o.argmax(-1), 4).double().mean((0, 1)) * o.softmax(-1).mean((0, 1))).sum())
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

def _crf(o: Tensor, words: Tensor, moves: Tensor) -> Tensor:  # minus the log-likelihood of a linear chain
    alpha = o[:, 0]
    path = o[:, 0].gather(1, words[:, :1])[:, 0]
    for step in range(1, 5):
        alpha = (alpha[:, :, None] + moves[None]).logsumexp(1) + o[:, step]
        path = path + moves[words[:, step - 1], words[:, step]] + o[:, step].gather(1, words[:, step, None])[:, 0]
    return alpha.logsumexp(1) - path
