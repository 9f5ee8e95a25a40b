"""Graphs and knowledge graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from . import Case, package


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
