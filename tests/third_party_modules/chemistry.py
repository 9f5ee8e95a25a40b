"""Molecules, single cells and graphs."""

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
