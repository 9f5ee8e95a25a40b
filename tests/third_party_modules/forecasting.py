"""Time series and tables."""

from typing import Any

from . import Case, package


@package("pytorch-forecasting", "forecasting", "lightning")
def pytorch_forecasting() -> list[Case]:
    import numpy as np
    import pandas as pd
    from pytorch_forecasting import DeepAR, NHiTS, TemporalFusionTransformer, TimeSeriesDataSet
    from pytorch_forecasting.metrics import MAE, RMSE, NormalDistributionLoss, QuantileLoss

    generator = np.random.default_rng(0)
    table = pd.DataFrame({"series": np.repeat(["0", "1", "2"], 20), "time": np.tile(range(20), 3)})
    table["value"] = generator.normal(size=60).cumsum() + 10

    def dataset(shortest: int) -> Any:
        return TimeSeriesDataSet(
            table, time_idx="time", target="value", group_ids=["series"], time_varying_unknown_reals=["value"],
            min_encoder_length=shortest, max_encoder_length=8,
            min_prediction_length=1 if shortest < 8 else 3, max_prediction_length=3,
        )  # fmt: skip

    def case(name: str, make: Any, loss: Any, shortest: int = 8, **kwargs: Any) -> Case:
        arguments = {} if shortest == 8 else {"trim_padding": "lengths"}
        data = dataset(shortest)
        rows = [data[index] for index in range(0, len(data), max(1, len(data) // 24))]
        return Case(name, lambda: make.from_dataset(data, **kwargs, loss=loss()), rows, data._collate_fn, arguments=arguments)

    small: dict[str, Any] = {"hidden_size": 8}
    tft = {**small, "attention_head_size": 2, "hidden_continuous_size": 4}
    return [
        case("TemporalFusionTransformer, quantiles", TemporalFusionTransformer, QuantileLoss, **tft),
        case("TemporalFusionTransformer, uneven lengths", TemporalFusionTransformer, QuantileLoss, 2, **tft),
        case("NHiTS, MAE", NHiTS, MAE, **small),
        case("NHiTS, RMSE", NHiTS, RMSE, **small),
        case("DeepAR", DeepAR, NormalDistributionLoss, **small),
    ]


@package("gluonts", "forecasting", "lightning")
def gluonts() -> list[Case]:
    import torch
    from gluonts.torch.model.deepar import DeepARLightningModule
    from gluonts.torch.model.patch_tst import PatchTSTLightningModule
    from gluonts.torch.model.simple_feedforward import SimpleFeedForwardLightningModule
    from gluonts.torch.model.tft import TemporalFusionTransformerLightningModule

    def case(name: str, make: Any, **model: Any) -> Case:
        def module() -> Any:
            return make(model_kwargs=model)

        generator = torch.Generator().manual_seed(2)
        shapes, kinds = module().inputs.shapes, module().inputs.dtypes
        rows = []
        for _ in range(24):
            row = {}
            for key, (_, *shape) in shapes.items():
                is_number = kinds[key].is_floating_point
                row[key] = torch.randn(shape, generator=generator) if is_number else torch.zeros(shape, dtype=kinds[key])
                if "observed" in key:
                    row[key] = (torch.rand(shape, generator=generator) > 0.2).float()
            row["future_target"] = torch.randn(model["prediction_length"], generator=generator)
            is_observed = torch.rand(model["prediction_length"], generator=generator) > 0.3
            row["future_observed_values"] = is_observed.float()
            rows.append(row)
        return Case(name, module, rows)

    length = {"context_length": 8, "prediction_length": 4}
    counts = {"num_feat_dynamic_real": 2, "num_feat_static_real": 1, "num_feat_static_cat": 1}
    patches: dict[str, Any] = {"patch_len": 4, "stride": 2, "padding_patch": "end", "num_feat_dynamic_real": 0, "scaling": "mean"}
    encoder = {"d_model": 8, "nhead": 2, "dim_feedforward": 8, "dropout": 0.0, "activation": "relu", "norm_first": True}
    tft: dict[str, Any] = {"d_var": 8, "d_hidden": 8, "num_heads": 2, "c_feat_static_cat": [1]}
    return [
        case("DeepAR", DeepARLightningModule, freq="D", **length, **counts, cardinality=[1], hidden_size=8, lags_seq=[1, 2]),
        case("SimpleFeedForward", SimpleFeedForwardLightningModule, **length, hidden_dimensions=[8]),
        case("PatchTST", PatchTSTLightningModule, **length, **patches, **encoder, num_encoder_layers=1),
        case("TemporalFusionTransformer", TemporalFusionTransformerLightningModule, **length, **tft),
    ]


@package("neuralforecast", "forecasting", "pytorch_lightning")
def neuralforecast() -> list[Case]:
    import numpy as np
    import pandas as pd
    from neuralforecast.losses.pytorch import MAE, MQLoss
    from neuralforecast.models import NHITS, PatchTST
    from neuralforecast.tsdataset import TimeSeriesDataset, TimeSeriesLoader

    generator = np.random.default_rng(0)
    lengths = generator.integers(12, 40, size=24)
    table = pd.concat(
        pd.DataFrame({"unique_id": series, "ds": range(length), "y": generator.normal(size=length).cumsum()})
        for series, length in enumerate(lengths)
    )
    dataset = TimeSeriesDataset.from_df(table)[0]
    rows, collate = [dataset[index] for index in range(24)], TimeSeriesLoader(dataset).collate_fn

    split = {"split": lambda batch, size: [{**batch, "temporal": part} for part in batch["temporal"].split(size)]}
    small: dict[str, Any] = {"h": 4, "input_size": 8, "windows_batch_size": None, "scaler_type": "identity", "max_steps": 10}
    nhits = {**small, "mlp_units": 3 * [[8, 8]]}
    return [
        Case("NHITS, MAE", lambda: NHITS(**nhits, loss=MAE()), rows, collate),
        Case("NHITS, MAE", lambda: NHITS(**nhits, loss=MAE()), rows, collate, arguments=split),
        Case("NHITS, quantiles", lambda: NHITS(**nhits, loss=MQLoss(level=[80])), rows, collate),
        Case("PatchTST", lambda: PatchTST(**small, hidden_size=8, n_heads=2, encoder_layers=1, patch_len=4), rows, collate),
    ]


@package("darts", "forecasting", "pytorch_lightning")
def darts() -> list[Case]:
    import numpy as np
    from darts import TimeSeries
    from darts.models import NHiTSModel, TCNModel, TiDEModel
    from darts.utils.likelihood_models import GaussianLikelihood

    series = TimeSeries.from_values(np.random.default_rng(0).normal(size=35).cumsum())  # 24 samples of 8 and 4 values

    def case(name: str, make: Any, **kwargs: Any) -> Case:
        def set_up() -> Any:
            model = make(input_chunk_length=8, output_chunk_length=4, **kwargs)
            return model._setup_for_train(model._build_train_dataset(series, None, None, None, None, 1), epochs=1)

        loader = set_up()["datamodule"].train_dataloader()
        return Case(name, lambda: set_up()["model"], loader.dataset, loader.collate_fn)

    return [
        case("TiDE", TiDEModel, hidden_size=8, temporal_width_past=2, temporal_width_future=2),
        case("TCN", TCNModel, num_filters=2),
        case("NHiTS, Gaussian", NHiTSModel, layer_widths=8, likelihood=GaussianLikelihood()),
    ]


def small_table(kind: str) -> Any:  # 24 rows of two numbers and a category, and a target
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
