"""Tables."""

from __future__ import annotations

from typing import Any

from . import Case, package


def small_table(kind: str) -> Any:
    """24 rows of two numbers and a category, and a target."""
    import numpy as np
    import pandas as pd

    generator = np.random.default_rng(0)
    table = pd.DataFrame({"a": generator.normal(size=24), "b": generator.normal(size=24), "c": generator.choice(list("xyz"), 24)})
    table["target"] = table["a"] * 2 + table["b"] if kind == "regression" else generator.integers(4, size=24)
    return table


@package("pytorch-tabular", "tabular", "pytorch_lightning", "pytorch-tabular", "requests")
def pytorch_tabular() -> list[Case]:
    from pytorch_tabular import TabularModel
    from pytorch_tabular.config import DataConfig, OptimizerConfig, TrainerConfig
    from pytorch_tabular.models import CategoryEmbeddingModelConfig, FTTransformerConfig, GANDALFConfig

    def case(name: str, config: Any) -> Case:
        data = DataConfig(target=["target"], continuous_cols=["a", "b"], categorical_cols=["c"])
        trainer = TrainerConfig(accelerator="cpu", checkpoints=None, load_best=False)
        configs = {"data_config": data, "model_config": config, "optimizer_config": OptimizerConfig(), "trainer_config": trainer}
        tabular = TabularModel(**configs, verbose=False, suppress_lightning_logger=True)
        datamodule = tabular.prepare_dataloader(small_table(config.task), seed=1)
        dataset = datamodule.train_dataloader().dataset
        return Case(name, lambda: tabular.prepare_model(datamodule), [dataset[index % len(dataset)] for index in range(24)])

    mlp: dict[str, Any] = {"layers": "8-8", "dropout": 0.0, "embedding_dropout": 0.0}
    plain = {"batch_norm_continuous_input": False}
    tokens = {"input_embed_dim": 8, "num_heads": 2, "num_attn_blocks": 1, **plain}
    return [
        case("CategoryEmbedding, regression", CategoryEmbeddingModelConfig(task="regression", **mlp, **plain)),
        case("CategoryEmbedding, BatchNorm", CategoryEmbeddingModelConfig(task="classification", **mlp)),
        case("FTTransformer, classes", FTTransformerConfig(task="classification", **tokens)),
        case("GANDALF", GANDALFConfig(task="regression", gflu_stages=2, **plain)),
    ]


@package("deeptab", "tabular", "lightning")
def deeptab() -> list[Case]:
    import torch
    from deeptab import architectures, configs
    from deeptab.training import TaskModel

    generator = torch.Generator().manual_seed(1)
    numbers, categories = torch.randn(24, 2, generator=generator), torch.arange(24) % 3
    rows = [(([row[:1], row[1:]], [category[None]], []), row[:1]) for row, category in zip(numbers, categories, strict=True)]
    classes = [(features, label) for (features, _), label in zip(rows, torch.randint(4, (24,), generator=generator), strict=True)]
    information = (
        {name: {"preprocessing": "standardization", "dimension": 1, "categories": None} for name in ("a", "b")},
        {"c": {"preprocessing": "int", "dimension": 1, "categories": 3}},
        {},
    )

    def case(name: str, number_of_classes: int, **kwargs: Any) -> Case:
        make = getattr(architectures, f"{name}Model", None) or getattr(architectures, name)
        config = getattr(configs, f"{name}Config")(**kwargs)

        def module() -> Any:
            return TaskModel(make, config, information, num_classes=number_of_classes)

        return Case(f"{name}, {number_of_classes}", module, rows if number_of_classes == 1 else classes)

    return [case("FTTransformer", 1, d_model=8, n_heads=2, n_layers=1), case("ResNet", 4, layer_sizes=[8, 8, 8]), case("MLP", 4)]
