"""Graphs, series, and losses that are sums of many things."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule
from torch import Generator, Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence

from lightning_accum import DoesNotAddUpError, UnsplittableBatchError
from real_modules.language import WORDS, words
from real_modules.table import Refused, dealt, padded, randint, real_module


def sentence(generator: Generator) -> dict[str, Tensor]:
    tokens = words(generator, 4, 9)
    return {"tokens": tokens, "mask": torch.ones(len(tokens))}


class Experts(LightningModule):
    """A language model with three experts, of which each word takes one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.router, self.head = nn.Embedding(WORDS, 6), nn.Linear(6, 3, bias=False), nn.Linear(6, WORDS)
        self.experts = nn.ModuleList([nn.Linear(6, 6) for _ in range(3)])

    def routed(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        """The logits of the router, and the loss of the words, for those that are there."""
        tokens, mask = batch["tokens"], batch["mask"][:, 1:] == 1
        hidden = self.embedding(tokens[:, :-1])[mask]
        scores = self.router(hidden)
        chosen = F.one_hot(scores.argmax(-1), 3) * scores.softmax(-1)
        mixed = sum(chosen[:, [i]] * torch.relu(expert(hidden)) for i, expert in enumerate(self.experts))
        return scores, F.cross_entropy(self.head(hidden + mixed), tokens[:, 1:][mask]), chosen


@real_module(
    *("mixture of experts, share of words times probability", dealt(sentence)),
    collate=padded(),
    windows=Refused(DoesNotAddUpError, {"window": 1}),
    split=Refused(DoesNotAddUpError, {"micro_batch": "offload"}),
)
class ExpertsWithBalance(Experts):
    """The balance term multiplies two means over the words of the batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores, loss, chosen = self.routed(batch)
        return loss + 0.3 * 3 * ((chosen > 0).double().mean(0) * scores.softmax(-1).mean(0)).sum()


# --- several tasks -----------------------------------------------------------------------------------------------------


def of_two_tasks(generator: Generator) -> dict[str, Tensor]:
    """Some have no value, and some no words."""
    has_value = torch.rand((), generator=generator) < 0.35
    value = torch.randn((), generator=generator)
    inputs, label = torch.randn(5, generator=generator), torch.randint(4, (), generator=generator)
    is_labelled = torch.rand((), generator=generator) < 0.8
    return {
        "x": inputs,
        "label": label if is_labelled else torch.tensor(-1),
        "value": value if has_value else torch.tensor(torch.nan),
    }


@real_module("several tasks, labels missing", dealt(of_two_tasks, seed=3))
class TaskAbsentFromSomeBatches(LightningModule):
    """A term is added only where the batch has rows of its task."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.classes, self.value = nn.Linear(5, 8), nn.Linear(8, 4), nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        hidden, losses = torch.tanh(self.trunk(batch["x"])), []
        if (has_label := batch["label"] >= 0).any():
            losses.append(F.cross_entropy(self.classes(hidden[has_label]), batch["label"][has_label]))
        if (has_value := ~batch["value"].isnan()).any():
            losses.append(F.mse_loss(self.value(hidden[has_value]).squeeze(-1), batch["value"][has_value]))
        return torch.stack(losses).sum() if losses else None


# --- graphs ------------------------------------------------------------------------------------------------------------


def graph(generator: Generator) -> dict[str, Tensor]:
    """Atoms in a row, with bonds between neighbours and some others, an energy, a force on each, a kind of each bond."""
    atoms = randint(3, 6, generator)
    extra = torch.randint(atoms, (2, randint(1, 4, generator)), generator=generator)
    edges = torch.cat([torch.stack([torch.arange(atoms - 1), torch.arange(1, atoms)]), extra[:, extra[0] != extra[1]]], dim=1)
    numbers = {"energy": torch.randn((), generator=generator), "forces": torch.randn(atoms, 3, generator=generator)}
    kinds = {
        "z": torch.randint(1, 4, (atoms,), generator=generator),
        "kinds": torch.randint(3, edges.shape[1:], generator=generator),
    }
    return {"positions": torch.randn(atoms, 3, generator=generator), "edges": edges, **numbers, **kinds}


def packed_graphs(graphs: Sequence[dict[str, Tensor]]) -> dict[str, Tensor]:
    """All atoms one after the other, and of which graph each is."""
    sizes = torch.tensor([len(one["z"]) for one in graphs])
    starts = sizes.cumsum(0) - sizes
    batch = {name: torch.cat([one[name] for one in graphs]) for name in ("positions", "forces", "z", "kinds")}
    edges = torch.cat([one["edges"] + start for one, start in zip(graphs, starts, strict=True)], dim=1)
    of_graph = torch.arange(len(graphs)).repeat_interleave(sizes)
    return {**batch, "edges": edges, "energy": torch.stack([one["energy"] for one in graphs]), "of_graph": of_graph}


def graphs_of(batch: dict[str, Tensor], size: int) -> list[Any]:
    """The batch, in packed batches of so many graphs."""
    graphs = []
    for index, energy in enumerate(batch["energy"]):
        mine = batch["of_graph"] == index
        bonds = mine[batch["edges"][0]]
        edges = batch["edges"][:, bonds] - mine.nonzero()[0]
        of_atoms = {name: batch[name][mine] for name in ("positions", "forces", "z")}
        graphs.append({**of_atoms, "edges": edges, "kinds": batch["kinds"][bonds], "energy": energy})
    return [packed_graphs(graphs[start : start + size]) for start in range(0, len(graphs), size)]


@real_module(
    *("interatomic potentials, packed graphs", dealt(graph)),
    collate=packed_graphs,
    split=Refused(UnsplittableBatchError, {"split": graphs_of}),
)
class EnergiesForcesAndBonds(LightningModule):
    """Means over graphs, over atoms and over bonds; forces are the gradient of the energy."""

    def __init__(self) -> None:
        super().__init__()
        self.atoms, self.bond = nn.Embedding(4, 6), nn.Sequential(nn.Linear(13, 8), nn.SiLU(), nn.Linear(8, 6))
        self.energy, self.kind = nn.Sequential(nn.Linear(6, 6), nn.SiLU(), nn.Linear(6, 1)), nn.Linear(6, 3)

    @torch.enable_grad()
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        positions, (left, right) = batch["positions"].clone().requires_grad_(), batch["edges"]
        distances = (positions[left] - positions[right]).square().sum(-1, keepdim=True)
        atoms = self.atoms(batch["z"])
        messages = self.bond(torch.cat([atoms[left] + atoms[right], atoms[left] * atoms[right], (-distances).exp()], dim=-1))
        hidden = atoms.index_add(0, left, messages).index_add(0, right, messages)
        energy = torch.zeros_like(batch["energy"]).index_add(0, batch["of_graph"], self.energy(hidden).squeeze(-1))
        (slope,) = torch.autograd.grad(energy.sum(), positions, create_graph=True)
        of_bonds = F.cross_entropy(self.kind(messages), batch["kinds"])
        self.log("energy", F.l1_loss(energy, batch["energy"]), batch_size=len(energy))
        return 0.1 * F.mse_loss(energy, batch["energy"]) + (slope + batch["forces"]).square().sum(-1).mean() + of_bonds


def series(generator: Generator) -> tuple[Tensor, Tensor]:
    steps = randint(3, 8, generator)
    return torch.randn(steps, 3, generator=generator), torch.randn(steps, 1, generator=generator)


def packed_series(rows: Sequence[tuple[Tensor, Tensor]]) -> list[PackedSequence]:
    return [pack_sequence(values, enforce_sorted=False) for values in zip(*rows, strict=True)]


@real_module(
    *("forecasts of packed series", dealt(series)),
    collate=packed_series,
)
class PackedTimeSeries(LightningModule):
    """A mean over steps, and one over series for what is known at their ends."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.head, self.total = nn.GRU(3, 6), nn.Linear(6, 1), nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        steps, last = self.net(inputs)
        totals = torch.stack([target.sum() for target in unpack_sequence(targets)])
        return F.mse_loss(self.head(steps.data), targets.data) + 0.1 * F.l1_loss(self.total(last[0]).squeeze(-1), totals)
