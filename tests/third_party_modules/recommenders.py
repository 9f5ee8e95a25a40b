"""What a user takes next."""

from __future__ import annotations

from typing import Any

from . import Case, package


@package("replay-rec", "recommenders", "lightning", "replay-rec[torch]")
def replay() -> list[Case]:
    import torch
    from replay.data import FeatureHint, FeatureType
    from replay.data.nn import TensorFeatureInfo, TensorSchema
    from replay.models.nn.sequential import Bert4Rec, SasRec

    items, longest = 10, 6

    def schema(cardinality: int) -> Any:
        kind = {"feature_type": FeatureType.CATEGORICAL, "is_seq": True, "feature_hint": FeatureHint.ITEM_ID}
        return TensorSchema([TensorFeatureInfo("item", **kind, cardinality=cardinality, padding_value=items, embedding_dim=8)])

    generator = torch.Generator().manual_seed(5)
    rows = []
    for user in range(24):
        length = int(torch.randint(2, longest + 1, (), generator=generator))
        history = torch.full((longest + 1,), items)
        history[-length:] = torch.randint(items, (length,), generator=generator)
        row = {"query_id": torch.tensor(user), "feature_tensor": {"item": history[:-1]}, "padding_mask": history[:-1] != items}
        row["positive_labels"], row["target_padding_mask"] = history[1:], history[1:] != items
        rows.append(row)

    def bert_row(row: dict[str, Any]) -> dict[str, Any]:
        history = row["positive_labels"]
        is_shown = torch.rand(longest, generator=generator) > 0.4
        is_shown[-1] = False  # each predicts something
        padding = history != items
        return {"inputs": {"item": history}, "positive_labels": history, "pad_mask": padding, "token_mask": is_shown & padding}

    small = {"block_count": 1, "hidden_size": 8, "max_seq_len": longest, "dropout_rate": 0.0}
    masked = [bert_row(row) for row in rows]
    return [
        Case("SasRec, CE", lambda: SasRec(schema(items), head_count=1, **small, loss_type="CE"), rows),
        Case("SasRec, BCE", lambda: SasRec(schema(items), head_count=1, **small, loss_type="BCE"), rows),
        Case("Bert4Rec, CE", lambda: Bert4Rec(schema(items + 1), head_count=1, **small, loss_type="CE"), masked),
    ]


@package("rectools", "recommenders", "pytorch_lightning", "rectools[torch]")
def rectools() -> list[Case]:
    import numpy as np
    import pandas as pd
    import torch
    from rectools import Columns
    from rectools.dataset import Dataset
    from rectools.models import BERT4RecModel, SASRecModel
    from rectools.models.nn.item_net import IdEmbeddingsItemNet

    generator = np.random.default_rng(0)
    users = np.repeat(np.arange(24), generator.integers(3, 8, size=24))
    table = pd.DataFrame({Columns.User: users, Columns.Item: generator.integers(10, size=len(users)), Columns.Weight: 1.0})
    table[Columns.Datetime] = pd.Timestamp("2020-01-01") + pd.to_timedelta(np.arange(len(users)), unit="D")
    dataset = Dataset.construct(table)
    small = {"n_blocks": 1, "n_factors": 8, "n_heads": 2, "session_max_len": 6, "dropout_rate": 0.0}
    small["train_min_user_interactions"] = 2

    def case(make: Any, loss: str) -> Case:
        def model() -> Any:
            found = make(**small, loss=loss, item_net_block_types=(IdEmbeddingsItemNet,))
            found._build_model_from_dataset(dataset)
            return found

        def module() -> Any:
            found = model().lightning_model
            found._xavier_normal_init()  # what it does at the start of its first training
            found.is_fitted = True
            return found

        loader = model().data_preparator.get_dataloader_train()
        torch.manual_seed(0)
        return Case(f"{make.__name__}, {loss}", module, loader.dataset, loader.collate_fn)

    return [case(SASRecModel, "softmax"), case(SASRecModel, "BCE"), case(BERT4RecModel, "softmax")]
