"""Hugging Face models compute their own loss: it is exact, whatever they shift or mask."""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from support import Toy, joined
from torch import Tensor

from lightning_accum import GradientAccumulation
from lightning_accum.testing import assert_window_equals_batch

transformers = pytest.importorskip("transformers")

# their causal losses are computed in float32, whatever the model: one rounding of a logit is 2**-24 of it
TOLERANCE = 1e-6


def gpt2() -> Any:
    options = {"resid_pdrop": 0, "embd_pdrop": 0, "attn_pdrop": 0, "bos_token_id": 0, "eos_token_id": 0, "use_cache": False}
    config = transformers.GPT2Config(vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2, **options)
    return transformers.GPT2LMHeadModel(config)


def t5() -> Any:
    options = {"vocab_size": 31, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**options, decoder_start_token_id=0))


MODELS: dict[str, Callable[[], Any]] = {"gpt2": gpt2, "t5": t5}


@pytest.mark.some_cases(2, 3)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", MODELS)
def test_a_padded_batch_is_its_split_and_trimmed_micro_batches(name: str, side: str) -> None:
    def texts(rows: int, seed: int, length: int = 10) -> dict[str, Tensor]:
        """Padded to one length, so that batches can be joined without changing what they hold."""
        generator = torch.Generator().manual_seed(seed)
        tokens = torch.randint(1, 31, (rows, length), generator=generator)
        mask = torch.arange(length) < torch.randint(2, length + 1, (rows, 1), generator=generator)
        return {"input_ids": tokens * mask, "attention_mask": mask.long(), "labels": tokens.masked_fill(~mask, -100)}

    widths: list[int] = []

    class Recorded(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            assert isinstance(batch, transformers.BatchEncoding)
            widths.append(batch["input_ids"].shape[1])
            return super().training_step(batch, batch_idx)

    batch = texts(7, 3)
    if side == "left":
        batch = {key: value.flip(1) for key, value in batch.items()}
        batch["labels"][batch["attention_mask"].cumsum(1) == 1] = -100  # nothing predicts the first but the padding before it
    if name == "t5":
        lengths = torch.arange(7) % 4 + 1
        batch["labels"] = torch.where(torch.arange(4) < lengths[:, None], 5, -100)
    rows = [{key: value[row : row + 1] for key, value in batch.items()} for row in range(7)]
    make = partial(Recorded, lambda model, batch: model(**batch).loss, net=MODELS[name])
    arguments = {"collate": lambda rows: transformers.BatchEncoding(joined(rows)), "limit": TOLERANCE}
    assert_window_equals_batch(make, [rows], GradientAccumulation(micro_batch=3), **arguments)
    assert (min(widths) < 10) == (side == "right")  # on the left it stays
