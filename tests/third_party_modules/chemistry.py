"""Molecules and atoms."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import partial
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


@package("matgl", "chemistry", "lightning")
def matgl() -> list[Case]:
    import numpy as np
    import torch
    from matgl.ext.pymatgen import Molecule2Graph
    from matgl.graph.data import collate_fn_graph, collate_fn_pes
    from matgl.models import MEGNet, TensorNet
    from matgl.utils.training import ModelLightningModule, PotentialLightningModule
    from pymatgen.core import Molecule
    from torch_geometric.data import Batch

    generator = np.random.default_rng(0)
    elements = ("H", "C", "N", "O")
    converter = Molecule2Graph(element_types=elements, cutoff=4.0)
    energies, potentials = [], []
    for number in generator.integers(2, 7, size=24):
        molecule = Molecule(list("CHONHH")[:number], generator.normal(scale=1.5, size=(number, 3)))
        graph, lattice, state = converter.get_graph(molecule)
        forces = torch.from_numpy(generator.normal(size=(number, 3)))
        energies.append((graph, lattice, torch.tensor(state), {"energy": float(number)}))
        potentials.append((graph, lattice, torch.tensor(state), {"energies": float(number), "forces": forces}))

    def megnet() -> Any:
        net = MEGNet(dim_node_embedding=8, dim_edge_embedding=8, dim_state_embedding=2, nblocks=1, element_types=elements)
        return ModelLightningModule(net)

    def potential() -> Any:
        return PotentialLightningModule(TensorNet(element_types=elements, units=8, nblocks=1, is_intensive=False, cutoff=4.0))

    def split(batch: Any, size: int) -> list[Any]:
        graphs, *others = batch
        places = [slice(start, start + size) for start in range(0, len(others[0]), size)]
        return [(Batch.from_data_list(graphs.to_data_list()[p]), *(other[p] for other in others)) for p in places]

    return [
        Case("MEGNet", megnet, energies, collate_fn_graph),
        Case("MEGNet", megnet, energies, collate_fn_graph, arguments={"split": split}),
        Case("TensorNet, energy and forces", potential, potentials, partial(collate_fn_pes, include_stress=False)),
    ]
