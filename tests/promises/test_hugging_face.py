"""Hugging Face models compute their own loss: the weight is read from it, whatever they shift or mask."""

from __future__ import annotations

from functools import partial

import lightning.pytorch as pl
import pytest
import torch
from harness import assert_one_window_one_batch, dealt, on, windows_of
from support import loader, relative_error, trainer

from lightning_accum import DoesNotAddUpError, GradientAccumulation, TokenCount
from lightning_accum.weighing.graph import read_loss, terms_of
from lightning_accum.weighing.safeguards import is_contrastive

transformers = pytest.importorskip("transformers")

# their causal losses are computed in float32, whatever the model: one rounding of a logit is 2**-24 of it
TOLERANCE = 1e-6

SMALL = {"vocab_size": 31, "num_attention_heads": 2, "num_hidden_layers": 2}


def causal(name: str):
    torch.manual_seed(0)
    if name == "gpt2":
        config = transformers.GPT2Config(
            vocab_size=31, n_positions=16, n_embd=16, n_layer=2, n_head=2, resid_pdrop=0, embd_pdrop=0, attn_pdrop=0,
            bos_token_id=0, eos_token_id=0, use_cache=False,
        )  # fmt: skip
        return transformers.GPT2LMHeadModel(config).double()
    config = transformers.LlamaConfig(**SMALL, hidden_size=16, intermediate_size=32, max_position_embeddings=16, use_cache=False)
    return transformers.LlamaForCausalLM(config).double()


class Wrapped(pl.LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.model = causal(name)

    def training_step(self, batch, batch_idx):
        return self.model(**batch).loss

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.5)


def texts(rows: int, seed: int, length: int = 10):
    """Padded to one length, so that batches can be joined without changing what they hold."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(1, 31, (rows, length), generator=generator)
    lengths = torch.randint(2, length + 1, (rows, 1), generator=generator)
    mask = torch.arange(length) < lengths
    return {"input_ids": tokens, "attention_mask": mask.long(), "labels": tokens.masked_fill(~mask, -100)}


def join(batches):
    return {key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("name", ["gpt2", "llama"])
@pytest.mark.parametrize(("engine", "options"), [on("accum"), on("ddp")])
def test_causal_model_equals_its_full_batch(engine: str, options: dict, name: str) -> None:
    by_rank = dealt([texts(2, seed) for seed in range(8)], 1, engine)
    size = 4 // len(by_rank)
    windows = windows_of(by_rank, size)
    assert_one_window_one_batch(partial(Wrapped, name), by_rank, windows, size, engine, options, collate=join, limit=TOLERANCE)


@pytest.mark.some_cases(4)
@pytest.mark.parametrize("side", ["right", "left"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_padded_batch_equals_its_split_and_trimmed_micro_batches(name: str, side: str, recwarn) -> None:
    batch = transformers.BatchEncoding(texts(7, 3))
    batch["input_ids"] = batch["input_ids"] * batch["attention_mask"]
    if side == "left":
        batch = transformers.BatchEncoding({key: value.flip(1) for key, value in batch.items()})
        # nothing predicts the first token but the padding in front of it
        batch["labels"][batch["attention_mask"].cumsum(1) == 1] = -100
    shorter = torch.full((7, 4), -100)
    for row in range(7):
        shorter[row, : row % 4 + 1] = row + 1
    widths: list[int] = []

    class Recorded(pl.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model = model(name)

        def training_step(self, batch, batch_idx):
            assert isinstance(batch, transformers.BatchEncoding)
            widths.append(batch["input_ids"].shape[1])
            return self.model(**batch).loss

        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.5)

    if name == "t5":
        batch["labels"] = shorter
    whole, split = Recorded(), Recorded()
    trainer("auto").fit(whole, loader([batch]))
    widths.clear()
    trainer(callbacks=[GradientAccumulation(micro_batch=3)]).fit(split, loader([batch]))
    begin = list(model(name).parameters())
    updates = [[p.detach() - q for p, q in zip(m.model.parameters(), begin, strict=True)] for m in (split, whole)]
    assert relative_error(*updates) < TOLERANCE
    # positions of these count from the first column; those of Llama are relative
    depends = side == "left" and name in ("gpt2", "bert", "t5")
    assert any("is not trimmed" in str(warning.message) for warning in recwarn) is (depends and name != "t5")
    if not depends:
        assert widths[-1] < 10


def model(name: str):
    if name in ("gpt2", "llama"):
        return causal(name)
    torch.manual_seed(0)
    if name == "bert":
        options = {"hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 16, "hidden_dropout_prob": 0.0}
        config = transformers.BertConfig(**SMALL, **options, attention_probs_dropout_prob=0.0)
        return transformers.BertForMaskedLM(config).double()
    config = transformers.T5Config(vocab_size=31, d_model=16, d_kv=8, d_ff=16, num_layers=1, num_heads=2, dropout_rate=0.0)
    config.decoder_start_token_id = 0
    return transformers.T5ForConditionalGeneration(config).double()


def test_default_token_count_agrees_with_what_the_model_divides_by() -> None:
    batch = texts(3, 1)
    assert float(read_loss(causal("gpt2")(**batch).loss).weight) == float(TokenCount()(batch))


@pytest.mark.parametrize("check", [True, False])
def test_naive_token_count_is_refused_or_warned_of(check: bool) -> None:
    policy = GradientAccumulation(2, weight=TokenCount(shift=False), check=check)
    expected = pytest.raises(DoesNotAddUpError) if check else pytest.warns(UserWarning, match="was divided by")
    with expected:
        trainer(callbacks=[policy], precision="64-true").fit(Wrapped("gpt2"), loader([texts(2, 1), texts(2, 2)]))


def test_heads_of_other_kinds() -> None:
    torch.manual_seed(0)
    options = {**SMALL, "hidden_size": 16, "intermediate_size": 16, "max_position_embeddings": 16}
    tokens = torch.randint(1, 31, (3, 8))
    config = transformers.BertConfig(**options)
    labels = tokens.masked_fill(torch.rand(tokens.shape) < 0.6, -100)
    masked = read_loss(transformers.BertForMaskedLM(config)(tokens, labels=labels).loss)
    assert (masked.criterion, float(masked.weight)) == ("cross entropy", float((labels != -100).sum()))
    positions = torch.tensor([1, 2, 3])
    answering = transformers.BertForQuestionAnswering(config)(tokens, start_positions=positions, end_positions=positions + 1)
    assert float(read_loss(answering.loss).weight) == 3
    regression = transformers.BertForSequenceClassification(transformers.BertConfig(**options, num_labels=1))
    assert read_loss(regression(tokens, labels=torch.rand(3)).loss) == read_loss(
        torch.nn.functional.mse_loss(torch.rand(3, requires_grad=True), torch.rand(3))
    )
    config = transformers.BertConfig(**options, num_labels=4, problem_type="multi_label_classification")
    multilabel = transformers.BertForSequenceClassification(config)(tokens, labels=torch.rand(3, 4))
    assert read_loss(multilabel.loss).weight == 12


def test_clip_is_contrastive() -> None:
    torch.manual_seed(0)
    text = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 8}
    config = transformers.CLIPConfig(
        text_config={**text, "max_position_embeddings": 8, "eos_token_id": 2},
        vision_config={**vision, "patch_size": 4},
        projection_dim=8,
    )
    tokens, images = torch.randint(3, 31, (4, 6)), torch.randn(4, 3, 8, 8)
    assert is_contrastive(terms_of(transformers.CLIPModel(config)(tokens, images, return_loss=True).loss))
