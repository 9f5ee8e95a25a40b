"""What a user takes next."""

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

    masked = []
    for history in (row["positive_labels"] for row in rows):
        is_shown, padding = torch.rand(longest, generator=generator) > 0.4, history != items
        is_shown[-1] = False  # each predicts something
        row = {"inputs": {"item": history}, "positive_labels": history}
        masked.append({**row, "pad_mask": padding, "token_mask": is_shown & padding})
    small = {"block_count": 1, "hidden_size": 8, "max_seq_len": longest, "dropout_rate": 0.0}
    return [
        Case("SasRec, CE", lambda: SasRec(schema(items), head_count=1, **small, loss_type="CE"), rows),
        Case("SasRec, BCE", lambda: SasRec(schema(items), head_count=1, **small, loss_type="BCE"), rows),
        Case("Bert4Rec, CE", lambda: Bert4Rec(schema(items + 1), head_count=1, **small, loss_type="CE"), masked),
    ]
