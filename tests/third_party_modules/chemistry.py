"""Molecules, atoms, single cells and graphs."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from . import Case, package

SMILES = [
    "C", "CCO", "c1ccccc1", "CC(=O)O", "CCN(CC)CC", "CCCCCCCC", "c1ccc2ccccc2c1", "CC(C)O",
    "O=C=O", "CC#N", "CS(=O)C", "c1ccncc1", "CCOC(=O)C", "C1CCCCC1", "CC(C)(C)O", "OCC(O)CO",
    "Clc1ccccc1", "CCBr", "C1CCOC1", "CNC=O", "Cc1ccccc1C", "CCCCO", "N#Cc1ccccc1", "CC(=O)C",
]  # fmt: skip


@package("chemprop", "chemistry", "lightning")
def chemprop() -> list[Case]:
    import torch
    from chemprop import data, models, nn
    from chemprop.data.collate import collate_batch

    generator = torch.Generator().manual_seed(1)
    targets = torch.randn(len(SMILES), 2, generator=generator)
    targets[::5, 1] = float("nan")  # not measured: these do not count in the loss
    points = zip(SMILES, targets, strict=True)
    rows = data.MoleculeDataset([data.MoleculeDatapoint.from_smi(smiles, y=target.numpy()) for smiles, target in points])

    def module() -> Any:
        head = nn.RegressionFFN(n_tasks=2, hidden_dim=16, input_dim=16)
        return models.MPNN(nn.BondMessagePassing(d_h=16, depth=2), nn.MeanAggregation(), head)

    def collate(molecules: list[Any]) -> Any:
        batch = collate_batch(molecules)
        batch.bmg.V, batch.bmg.E = batch.bmg.V.double(), batch.bmg.E.double()
        return batch

    def split(batch: Any, size: int) -> list[Any]:
        graph, parts = batch.bmg, []
        for start in range(0, len(graph), size):
            is_atom = (graph.batch >= start) & (graph.batch < start + size)
            is_bond = is_atom[graph.edge_index[0]]
            part = copy.copy(graph)
            part.V, part.E, part.batch = graph.V[is_atom], graph.E[is_bond], graph.batch[is_atom] - start
            part.edge_index = (is_atom.cumsum(0) - 1)[graph.edge_index[:, is_bond]]
            part.rev_edge_index = (is_bond.cumsum(0) - 1)[graph.rev_edge_index[is_bond]]
            part._BatchMolGraph__size = int(part.batch[-1]) + 1
            parts.append(batch._replace(bmg=part, Y=batch.Y[start : start + size], w=batch.w[start : start + size]))
        return parts

    return [Case("MPNN", module, rows, collate), Case("MPNN", module, rows, collate, arguments={"split": split})]


@package(
    "schnetpack",
    "chemistry",
    "pytorch_lightning",
    *(
        "ase",
        "h5py",
        "hydra-core",
        "matscipy",
        "torch-ema",
        "dirsync",
        "fasteners",
        "hydra-colorlog",
        "tensorboardX",
        "tensorboard",
    ),
    "rich",
    without_dependencies=["schnetpack"],  # the sympy that it asks for is older than torch's
)
def schnetpack() -> list[Case]:
    from typing import TypeVar

    import numpy as np
    import torch
    from ase import Atoms

    torch.utils.data.dataloader.T_co = TypeVar("T_co", covariant=True)  # type: ignore[attr-defined]  # torch 2.13 has it no more
    import schnetpack as spk
    from schnetpack.data.loader import _atoms_collate_fn

    generator = np.random.default_rng(0)
    convert = spk.interfaces.AtomsConverter(spk.transform.ASENeighborList(cutoff=4.0), dtype=torch.float64)
    rows = []
    for number in generator.integers(2, 7, size=24):
        row = convert(Atoms(["H", "C", "O", "N", "H", "H"][:number], generator.normal(scale=1.5, size=(number, 3))))
        row = {key: value for key, value in row.items() if key != "_idx_m" and not key.endswith("_local")}
        row["energy"] = torch.tensor([float(number)]) + torch.from_numpy(generator.normal(size=1))
        row["forces"] = torch.from_numpy(generator.normal(size=(number, 3)))
        rows.append(row)

    def case(name: str, has_forces: bool, arguments: Mapping[str, Any]) -> Case:
        def module() -> Any:
            basis = spk.nn.GaussianRBF(n_rbf=6, cutoff=4.0)
            schnet = spk.representation.SchNet(8, 1, basis, spk.nn.CosineCutoff(4.0))
            heads: list[Any] = [spk.atomistic.Atomwise(n_in=8, output_key="energy")]
            outputs = [spk.task.ModelOutput("energy", torch.nn.MSELoss(), 0.1, {})]
            if has_forces:
                heads.append(spk.atomistic.Forces(energy_key="energy", force_key="forces"))
                outputs.append(spk.task.ModelOutput("forces", torch.nn.MSELoss(), 0.9, {}))
            model = spk.model.NeuralNetworkPotential(
                schnet, input_modules=[spk.atomistic.PairwiseDistances()], output_modules=heads
            )
            return spk.task.AtomisticTask(model, outputs, torch.optim.SGD, {"lr": 0.01})

        return Case(name, module, rows, _atoms_collate_fn, arguments=arguments)

    def split(batch: dict[str, Any], size: int) -> list[Any]:
        parts = []
        for start in range(0, len(batch["_n_atoms"]), size):
            is_atom = (batch["_idx_m"] >= start) & (batch["_idx_m"] < start + size)
            is_pair, first = is_atom[batch["_idx_i"]], int(is_atom.int().argmax())
            rows = dict.fromkeys(("_idx_m", "_positions", "_atomic_numbers", "forces"), is_atom)
            rows |= dict.fromkeys(("_idx_i", "_idx_j", "_offsets", "_idx_i_local", "_idx_j_local"), is_pair)
            before, part = {"_idx_m": start, "_idx_i": first, "_idx_j": first}, {}
            for key, value in batch.items():
                of_each = len(value) // len(batch["_n_atoms"])
                chosen = value[rows[key] if key in rows else slice(start * of_each, (start + size) * of_each)]
                part[key] = chosen - before[key] if key in before else chosen
            parts.append(part)
        return parts

    return [
        case("SchNet, energy", False, {}),
        case("SchNet, energy", False, {"split": split}),
        case("SchNet, energy and forces", True, {"split": split}),
    ]


@package("scvi-tools", "single-cell", "lightning")
def scvi_tools() -> list[Case]:
    import torch
    from scvi.module import VAE, Classifier
    from scvi.train import ClassifierTrainingPlan, TrainingPlan

    generator = torch.Generator().manual_seed(3)
    counts = torch.poisson(torch.rand(24, 12, generator=generator) * 5, generator=generator)
    labels = torch.randint(4, (24, 1), generator=generator)
    rows = [{"X": x, "batch": torch.tensor([0]), "labels": label} for x, label in zip(counts, labels, strict=True)]
    small: dict[str, Any] = {"n_input": 12, "n_batch": 1, "n_hidden": 8, "n_latent": 3}

    def vae(**kwargs: Any) -> Any:
        return TrainingPlan(VAE(**small, **kwargs), n_epochs_kl_warmup=4)

    def classifier() -> Any:
        return ClassifierTrainingPlan(Classifier(12, n_hidden=8, n_labels=4, logits=True, use_batch_norm=False))

    return [
        Case("VAE", vae, rows),
        Case("VAE, without BatchNorm", lambda: vae(use_batch_norm="none", gene_likelihood="nb"), rows),
        Case("Classifier", classifier, rows),
    ]


@package("torch-geometric", "graphs", "lightning", "torch-geometric", "yacs")
def torch_geometric() -> list[Case]:
    import torch
    from torch_geometric.data import Batch, Data
    from torch_geometric.graphgym.config import cfg, set_cfg
    from torch_geometric.graphgym.model_builder import create_model

    generator = torch.Generator().manual_seed(4)
    rows = []
    for nodes in torch.randint(2, 7, (24,), generator=generator).tolist():
        edges = torch.combinations(torch.arange(nodes)).T
        x = torch.randn(nodes, 5, generator=generator, dtype=torch.float64)
        rows.append(Data(x=x, edge_index=torch.cat([edges, edges.flip(0)], 1), y=torch.randint(4, (1,), generator=generator)))

    def module(task: str, has_batch_norm: bool) -> Any:
        set_cfg(cfg)
        cfg.dataset.task, cfg.dataset.task_type, cfg.model.loss_fun = task, "classification", "cross_entropy"
        cfg.gnn.head, cfg.gnn.dim_inner, cfg.gnn.batchnorm, cfg.accelerator = task, 8, has_batch_norm, "cpu"
        return create_model(dim_in=5, dim_out=4)

    def split(batch: Any, size: int) -> list[Any]:
        graphs = batch.to_data_list()
        return [Batch.from_data_list(graphs[start : start + size]) for start in range(0, len(graphs), size)]

    def case(name: str, arguments: Mapping[str, Any], has_batch_norm: bool = False) -> Case:
        return Case(name, lambda: module("graph", has_batch_norm), rows, Batch.from_data_list, arguments=arguments)

    return [case("GraphGym", {}), case("GraphGym", {"split": split}), case("GraphGym, BatchNorm", {"split": split}, True)]


@package("pykeen", "knowledge graphs", "pytorch_lightning")
def pykeen() -> list[Case]:
    import torch
    from pykeen.contrib.lightning import LCWALitModule

    def case(model: str, **kwargs: Any) -> Case:
        def module() -> Any:
            return LCWALitModule(dataset="nations", model=model, model_kwargs={"embedding_dim": 8, "random_seed": 1, **kwargs})

        torch.manual_seed(0)
        data = module().train_dataloader()
        rows = [data.dataset[index] for index in range(24)]
        return Case(f"LCWALitModule, {model}, {kwargs['loss']}", module, rows, data.collate_fn)

    return [case("distmult", loss="bcewithlogits"), case("distmult", loss="crossentropy"), case("tucker", loss="bcewithlogits")]
