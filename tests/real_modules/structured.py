"""Graphs, trajectories, fields, series, and losses that are sums of many things."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Generator, Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence, unpack_sequence
from torch.utils.data import default_collate

from lightning_accum import DoesNotAddUpError, UnsplittableBatchError
from real_modules.language import WORDS, words
from real_modules.table import RealModule, Refused, Warned, dealt, padded, randint, real_module


def sentence(generator: Generator) -> dict[str, Tensor]:
    tokens = words(generator, 4, 9)
    return {"tokens": tokens, "mask": torch.ones(len(tokens))}


class Experts(RealModule):  # a language model with three experts, of which each word takes one
    def build(self) -> None:
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
class ExpertsWithBalance(Experts):  # the balance term multiplies two means over the words of the batch
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores, loss, chosen = self.routed(batch)
        return loss + 0.3 * 3 * ((chosen > 0).double().mean(0) * scores.softmax(-1).mean(0)).sum()


@real_module("mixture of experts, router's z-loss", dealt(sentence), collate=padded())
class ExpertsWithZLoss(Experts):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        scores, loss, _ = self.routed(batch)
        return loss + 0.1 * scores.logsumexp(-1).square().mean()


# --- several tasks -----------------------------------------------------------------------------------------------------
def of_two_tasks(generator: Generator) -> dict[str, Tensor]:  # some have no value, and some no words
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
class TaskAbsentFromSomeBatches(RealModule):  # a term is added only where the batch has rows of its task
    def build(self) -> None:
        self.trunk, self.classes, self.value = nn.Linear(5, 8), nn.Linear(8, 4), nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        hidden, losses = torch.tanh(self.trunk(batch["x"])), []
        if (has_label := batch["label"] >= 0).any():
            losses.append(F.cross_entropy(self.classes(hidden[has_label]), batch["label"][has_label]))
        if (has_value := ~batch["value"].isnan()).any():
            losses.append(F.mse_loss(self.value(hidden[has_value]).squeeze(-1), batch["value"][has_value]))
        return torch.stack(losses).sum() if losses else None


def tagged(generator: Generator) -> dict[str, Tensor]:  # a tag for each word, and a score for the whole
    tokens = words(generator)
    tags = torch.randint(4, (len(tokens),), generator=generator)
    return {"tokens": tokens, "tags": tags, "score": torch.randn((), generator=generator)}


@real_module("weights learned by uncertainty", dealt(tagged), collate=padded({"tags": -100}))
class LearnedUncertainty(RealModule):
    def build(self) -> None:
        self.embedding, self.tags, self.score = nn.Embedding(WORDS, 6, padding_idx=0), nn.Linear(6, 4), nn.Linear(6, 1)
        self.log_variances = nn.Parameter(torch.tensor([0.2, -0.3]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden = torch.tanh(self.embedding(batch["tokens"]))
        of_words = F.cross_entropy(self.tags(hidden).mT, batch["tags"])
        of_rows = F.mse_loss(self.score(hidden.sum(1)).squeeze(-1), batch["score"])
        s, t = self.log_variances
        return (-s).exp() * of_words + s + (-t).exp() * of_rows / 2 + t / 2


def measured(generator: Generator) -> dict[str, Tensor]:  # a class, and four values of which some are missing
    is_there = torch.rand(4, generator=generator) < 0.6
    is_there[0] = True
    values, inputs = torch.randn(4, generator=generator), torch.randn(5, generator=generator)
    return {"x": inputs, "values": values, "is_there": is_there, "label": torch.randint(3, (), generator=generator)}


@real_module("continual learning", dealt(measured))
class ElasticWeightConsolidation(RealModule):  # a penalty holds parameters at what they were after the task before
    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3))
        for name, parameter in list(self.net.named_parameters()):
            self.register_buffer(f"old_{name.replace('.', '_')}", parameter.detach() + 0.3 * torch.randn_like(parameter))
            self.register_buffer(f"importance_{name.replace('.', '_')}", torch.rand_like(parameter))

    def penalty(self) -> Tensor:
        total = torch.zeros((), device=self.device)
        for name, parameter in self.net.named_parameters():
            key = name.replace(".", "_")
            total = total + (getattr(self, f"importance_{key}") * (parameter - getattr(self, f"old_{key}")) ** 2).sum()
        return total

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(self.net(batch["x"]), batch["label"]) + 0.4 * self.penalty()


@real_module("tables with missing values", dealt(measured))
class ClassWeightsAndMaskedRegression(RealModule):
    """A cross entropy that is divided by weights of classes, and a regression by values that are there."""

    def build(self) -> None:
        self.trunk, self.classes, self.values = nn.Linear(5, 8), nn.Linear(8, 3), nn.Linear(8, 4)
        self.register_buffer("weights", torch.tensor([0.3, 1.0, 2.5]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, mask = torch.tanh(self.trunk(batch["x"])), batch["is_there"]
        of_classes = F.cross_entropy(self.classes(hidden), batch["label"], weight=self.weights)
        of_values = F.smooth_l1_loss(self.values(hidden), batch["values"], reduction="none")
        return of_classes + (of_values * mask).sum() / mask.sum()


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


def graphs_of(batch: dict[str, Tensor], size: int) -> list[Any]:  # the batch, in packed batches of so many graphs
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
class EnergiesForcesAndBonds(RealModule):  # means over graphs, over atoms and over bonds; forces are the gradient of the energy
    def build(self) -> None:
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


def molecule(generator: Generator) -> dict[str, Tensor]:  # atoms, and a matrix of bonds, which is symmetric
    one = graph(generator)
    bonds = torch.zeros(6, 6)
    bonds[one["edges"][0], one["edges"][1]] = bonds[one["edges"][1], one["edges"][0]] = 1.0
    return {"z": F.pad(one["z"], (0, 6 - len(one["z"]))), "bonds": bonds, "target": one["energy"]}


@real_module("generation of graphs, dense", dealt(molecule))
class NodesAndEdgesOfDenseGraphs(RealModule):  # means over atoms and over pairs of atoms, and one over graphs
    def build(self) -> None:
        self.atoms, self.message = nn.Embedding(4, 6, padding_idx=0), nn.Linear(6, 6)
        self.node, self.edge, self.graph = nn.Linear(6, 4), nn.Bilinear(6, 6, 2), nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z, bonds = batch["z"], batch["bonds"]
        hidden = torch.tanh(self.message(bonds @ self.atoms(z)))
        is_atom = z > 0
        pairs = is_atom.unsqueeze(1) & is_atom.unsqueeze(2)
        left, right = (hidden.unsqueeze(axis).expand(-1, 6, 6, -1) for axis in (2, 1))
        of_nodes = F.cross_entropy(self.node(hidden)[is_atom], z[is_atom])
        of_edges = F.cross_entropy(self.edge(left.contiguous(), right.contiguous())[pairs], bonds[pairs].long())
        readout = self.graph((hidden * is_atom.unsqueeze(-1)).sum(1)).squeeze(-1)
        return of_nodes + 2 * of_edges + F.huber_loss(readout, batch["target"])


# --- space and time ----------------------------------------------------------------------------------------------------
def scene(generator: Generator) -> dict[str, Tensor]:  # agents that are seen for some steps, in a scene of up to five
    is_seen = torch.rand(5, 6, generator=generator) < 0.7
    is_seen[randint(1, 5, generator) :] = False
    is_seen[0, -1] = True
    return {"past": torch.randn(5, 4, generator=generator), "future": torch.randn(5, 6, 2, generator=generator), "is_seen": is_seen}


@real_module("motion prediction", dealt(scene))
class TrajectoriesOfMaskedAgents(RealModule):
    """The best of three modes for each agent: means over agents, over steps that were seen, and over scenes."""

    def build(self) -> None:
        self.encoder, self.modes, self.scores = nn.Linear(4, 8), nn.Linear(8, 3 * 12), nn.Linear(8, 3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        hidden, is_seen = torch.relu(self.encoder(batch["past"])), batch["is_seen"]
        paths = self.modes(hidden).unflatten(-1, (3, 6, 2))
        errors = (paths - batch["future"].unsqueeze(2)).square().sum(-1) * is_seen.unsqueeze(2)
        best = errors.detach().sum(-1).argmin(-1)
        agents = is_seen.any(-1)
        of_modes = F.cross_entropy(self.scores(hidden)[agents], best[agents])
        of_paths = errors.gather(2, best[..., None, None].expand(-1, -1, 1, 6)).sum() / is_seen.sum()
        end_of_first = F.smooth_l1_loss(paths[:, 0, 0, -1], batch["future"][:, 0, -1])
        return of_paths + 0.5 * of_modes + 0.2 * end_of_first


VARIABLES = ["t2m", "u10", "v10", "z500"]


def weather(generator: Generator) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(4, 6, 5, generator=generator), torch.randn(4, 6, 5, generator=generator), torch.rand((), generator=generator)


def with_names(rows: Sequence[tuple[Tensor, ...]]) -> tuple[Any, ...]:
    return *default_collate(rows), VARIABLES


@real_module("weather forecasts by variable", dealt(weather, 2, 2, 4, 2, 3), collate=with_names)
class WeatherWithNamesOfVariables(RealModule):
    """The batch has a list of names, as long as the batch has rows; errors are weighted by latitude."""

    def build(self) -> None:
        self.nets = nn.ModuleDict({name: nn.Conv2d(2, 1, 3, padding=1) for name in VARIABLES})
        latitudes = torch.linspace(-1.2, 1.2, 6).cos()
        self.register_buffer("by_latitude", (latitudes / latitudes.mean()).unsqueeze(-1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        now, then, lead, variables = batch
        ahead = lead[:, None, None, None].expand(-1, 1, 6, 5)
        fields = [self.nets[name](torch.cat([now[:, [index]], ahead], dim=1)) for index, name in enumerate(variables)]
        errors = (torch.cat(fields, dim=1) - then) ** 2 * self.by_latitude
        for index, name in enumerate(variables):
            self.log(f"error_{name}", errors[:, index].mean(), batch_size=len(now))
        return errors.mean()


def series(generator: Generator) -> tuple[Tensor, Tensor]:
    steps = randint(3, 8, generator)
    return torch.randn(steps, 3, generator=generator), torch.randn(steps, 1, generator=generator)


def packed_series(rows: Sequence[tuple[Tensor, Tensor]]) -> list[PackedSequence]:
    return [pack_sequence(values, enforce_sorted=False) for values in zip(*rows, strict=True)]


@real_module(*("forecasts of packed series", dealt(series)), collate=packed_series)
class PackedTimeSeries(RealModule):  # a mean over steps, and one over series for what is known at their ends
    def build(self) -> None:
        self.net, self.head, self.total = nn.GRU(3, 6), nn.Linear(6, 1), nn.Linear(6, 1)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, targets = batch
        steps, last = self.net(inputs)
        totals = torch.stack([target.sum() for target in unpack_sequence(targets)])
        return F.mse_loss(self.head(steps.data), targets.data) + 0.1 * F.l1_loss(self.total(last[0]).squeeze(-1), totals)


# --- what a step does besides -------------------------------------------------------------------------------------------
class Regression(RealModule):
    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 4))

    def loss_of(self, batch: Any) -> Tensor:
        return F.mse_loss(self.net(batch["x"])[batch["is_there"]], batch["values"][batch["is_there"]])


@real_module("direct calls of a logger", dealt(measured), trainer={"logger": DummyLogger()})
class LogsToTheExperiment(Regression):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss_of(batch)
        self.logger.experiment.log({"loss": loss.item(), "step": self.global_step})
        return loss


@real_module("semi-supervised, a second stream", dealt(measured), windows=Warned("replay"), split=Warned("replay"))
class IteratorInAnAttribute(Regression):
    """Each step takes the next rows of a second loader, which has enough for training and no more."""

    def on_train_start(self) -> None:
        generator = torch.Generator().manual_seed(5)
        self.replay = iter([torch.randn(2, 5, generator=generator) for _ in range(self.trainer.num_training_batches * 4)])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss_of(batch) + 0.1 * self.net(next(self.replay).to(batch["x"])).square().mean()
