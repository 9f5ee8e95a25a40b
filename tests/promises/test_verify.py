"""`verify` finds equality on modules of others, unchanged, names what breaks it, and leaves the user's own as they were."""

from __future__ import annotations

import random
import sys
import threading
import weakref
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy
import pytest
import torch
import torchmetrics
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.demos.boring_classes import BoringDataModule, BoringModel, DemoModel
from lightning.pytorch.demos.transformer import LightningTransformer
from support import OPTIMIZERS, Hide, Language, Scalar, WrapsAnother, loader, pad, sentences, trainer, x
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_accum import GradientAccumulation, GradientNoiseScale, SampleCount, Tokens, verify
from lightning_accum.verification import Report

EXACT = 1e-12


class Classifier(pl.LightningModule):
    """Two layers and a cross entropy, with what a module of today does beside."""

    def __init__(self, *middle: nn.Module, optimizer: str = "adamw") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), *middle, nn.Tanh(), nn.Linear(8, 3))
        self.accuracy = torchmetrics.classification.MulticlassAccuracy(3)
        self.optimizer = optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        self.accuracy(logits, batch[1])
        self.log("accuracy", self.accuracy)
        return self.loss(logits, batch, batch_idx)

    def loss(self, logits: Tensor, batch: Any, batch_idx: int) -> Tensor:
        return F.cross_entropy(logits, batch[1])

    def configure_optimizers(self) -> Any:
        return OPTIMIZERS[self.optimizer](self.parameters())


def points(rows: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(rows, 6, generator=generator), torch.randint(0, 3, (rows,), generator=generator)


def names(report: Report) -> list[str]:
    return [found.name for found in report.breaks]


# --- modules of others ---------------------------------------------------------------------------------------------------


class Autoencoder(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Sequential(nn.Linear(28, 8), nn.ReLU(), nn.Linear(8, 3)), nn.Linear(3, 28)

    def training_step(self, batch):  # without batch_idx
        return F.mse_loss(self.decoder(self.encoder(batch)), batch)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-3)
        steps = self.trainer.estimated_stepping_batches
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Translation(pl.LightningModule):
    """A sequence to a sequence, with label smoothing, dropout, and what most add to it."""

    def __init__(self) -> None:
        super().__init__()
        self.source, self.target = nn.Embedding(17, 8), nn.Embedding(17, 8)
        self.net = nn.Transformer(8, 2, 1, 1, 16, batch_first=True)
        self.head = nn.Linear(8, 17)
        self.save_hyperparameters({"dropout": 0.1})

    def training_step(self, batch, batch_idx):
        inputs = batch["labels"].clamp(min=0)
        mask = self.net.generate_square_subsequent_mask(inputs.shape[1] - 1).to(self.source.weight.dtype)
        hidden = self.net(self.source(batch["input_ids"]), self.target(inputs[:, :-1]), tgt_mask=mask)
        logits = self.head(F.dropout(hidden, self.hparams.dropout, self.training))
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"][:, 1:].flatten(), label_smoothing=0.1)
        self.logger.experiment.add_scalar("loss", loss, self.global_step)
        return loss

    def on_train_epoch_end(self):
        self.trainer.callback_metrics["val_loss"]  # there is none after one step

    def configure_callbacks(self):
        return [pl.callbacks.LearningRateMonitor(), pl.callbacks.EarlyStopping("val_loss")]

    def configure_optimizers(self):
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        schedule = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "val_loss"}}


def translations() -> dict[str, Tensor]:
    torch.manual_seed(0)
    return {"input_ids": torch.randint(0, 17, (6, 7)), "labels": pad(sentences(6))["labels"]}


def words() -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    return torch.randint(0, 40, (6, 9)), torch.randint(0, 40, (6, 9))


OTHERS: dict[str, Any] = {
    "BoringModel": (BoringModel, lambda: torch.randn(8, 32)),
    "DemoModel": (DemoModel, lambda: torch.randn(8, 32)),
    "LightningTransformer": (lambda: LightningTransformer(40), words),
    "a classifier with torchmetrics": (Classifier, points),
    "an autoencoder": (Autoencoder, lambda: torch.rand(8, 28)),
    "a translation with label smoothing": (Translation, translations),
    "a language model": (Language, lambda: pad(sentences(8))),
}


@pytest.mark.parametrize("how", [{"micro_batch": 2}, {"window": 3}, {"micro_batch": 3, "gradient_clip_val": 1e-3}], ids=str)
@pytest.mark.parametrize("name", OTHERS)
def test_modules_of_others_are_equal(name: str, how: dict[str, Any]) -> None:
    make, data = OTHERS[name]
    report = verify(make(), data(), **how)
    assert report, str(report)
    assert report.gradient < EXACT
    assert max(row.gradient for row in report.parameters) <= report.tolerance == EXACT
    assert report.losses[0] == pytest.approx(report.losses[1], rel=EXACT)
    assert "divided" in report.weight


class Wrapped(pl.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch, batch_idx):
        output = self.model(**batch)
        self.log("loss", output.loss)
        return output.loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


SMALL = {"vocab_size": 31, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def hugging_face(name: str) -> Wrapped:
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    if name == "gpt2":
        sizes = {"vocab_size": 31, "n_positions": 16, "n_embd": 16, "n_layer": 2, "n_head": 2}
        model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))
    elif name == "llama":
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**SMALL, max_position_embeddings=16))
    elif name == "bert":
        model = transformers.BertForMaskedLM(transformers.BertConfig(**SMALL, max_position_embeddings=16))
    elif name == "vit":
        sizes = {name: value for name, value in SMALL.items() if name != "vocab_size"}
        config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=5, hidden_dropout_prob=0.1)
        model = transformers.ViTForImageClassification(config)
    else:
        sizes = {"vocab_size": 31, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
        model = transformers.T5ForConditionalGeneration(transformers.T5Config(**sizes, decoder_start_token_id=0))
    return Wrapped(model.train())


def texts(rows: int, length: int, masked: bool = False) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(rows + length)
    tokens = torch.randint(1, 31, (rows, length), generator=generator)
    lengths = torch.randint(2, length + 1, (rows, 1), generator=generator)
    lengths[0] = length
    mask = torch.arange(length) < lengths
    labels = tokens.masked_fill(~mask, -100)
    if masked:
        hidden = torch.rand(tokens.shape, generator=generator) < 0.3
        labels, tokens = labels.masked_fill(~hidden, -100), tokens.masked_fill(hidden, 30)
    return {"input_ids": tokens * mask, "attention_mask": mask.long(), "labels": labels}


@pytest.mark.parametrize("how", ["window", "micro_batch", "tokens"])
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "t5"])
def test_language_models_of_hugging_face_are_equal(name: str, how: str) -> None:
    module = hugging_face(name)
    data: Any = [texts(4, 10, name == "bert"), texts(3, 7, name == "bert"), texts(4, 12, name == "bert")]
    if how == "window":
        report = verify(module, data, window=3)
        assert any("padded on the right to 12 columns" in note for note in report.notes)
    else:
        report = verify(module, data[2], micro_batch=2 if how == "micro_batch" else Tokens(24))
    assert report, str(report)
    if name == "bert":
        assert report.tolerance == EXACT > report.gradient
    else:  # these cast logits to float32 for their loss
        assert report.tolerance < 1e-5
        assert 1e-10 < report.gradient < 1e-6
        assert "float32" in report.tolerance_reason
    if name != "llama":
        assert any("Dropout was switched off" in note for note in report.notes)


@pytest.mark.parametrize("precision", ["64-true", "32-true", "bf16-mixed"])
def test_vision_transformer_of_hugging_face_is_equal(precision: str) -> None:
    batch = {"pixel_values": torch.randn(8, 3, 8, 8), "labels": torch.randint(0, 5, (8,))}
    report = verify(hugging_face("vit"), batch, micro_batch=2, precision=precision)
    assert report, str(report)
    assert report.gradient < {"64-true": EXACT, "32-true": 1e-6, "bf16-mixed": 0.1}[precision]


# --- what is measured ----------------------------------------------------------------------------------------------------


def test_optimizer_that_wraps_another_without_being_one_itself() -> None:
    class Wraps(Language):
        def configure_optimizers(self) -> Any:
            return WrapsAnother(torch.optim.SGD(self.parameters(), lr=0.1))

    report = verify(Wraps(), loader([pad(sentences(8)[:3]), pad(sentences(8)[3:])]), window=2)
    assert report.is_equal
    assert "all parameters" in str(report)


def test_differences_are_those_of_the_known_answer() -> None:
    """Micro-batches of 1 and 9 tokens: a mean of means is 3.0, where the full batch has 4.6."""
    batches = [x(1), x(2, 3, 4, 5, 6, 4, 6, 7, 8)]
    assert sum(float(batch.sum()) for batch in batches) / 10 == 4.6
    mean_of_means = (1 + 5) / 2
    report = verify(Scalar(), iter(batches), window=2, weight="equal")
    assert not report
    assert names(report) == ["weight"]
    assert report.gradient == pytest.approx((4.6 - mean_of_means) / 4.6, rel=EXACT)
    assert report.update == pytest.approx((4.6 - mean_of_means) / 4.6, rel=EXACT)
    assert 'weight="auto"' in report.breaks[0].mend
    assert verify(Scalar(), iter(batches), window=2).gradient < 1e-15


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_full_batch_is_the_hand_written_one(optimizer: str) -> None:
    from lightning_accum.verification.state import ModuleState
    from lightning_accum.verification.step import StepRunner

    batch = (points()[0].double(), points()[1])
    module = Classifier(optimizer=optimizer)
    runner = StepRunner(module, ModuleState(module), {"micro_batch": 5}, {"precision": "64-true"})
    by_hand = Classifier(optimizer=optimizer).double()
    loss = F.cross_entropy(by_hand.net(batch[0]), batch[1])
    loss.backward()
    by_hand.configure_optimizers().step()
    for step in (runner.full(batch), runner.accumulated([batch])):
        assert step.loss == pytest.approx(float(loss), rel=EXACT)
        for name, parameter in by_hand.named_parameters():
            assert (step.gradients[name] - parameter.grad).norm() <= EXACT * parameter.grad.norm()
            assert (step.after[name] - parameter).norm() <= EXACT * (parameter - step.before[name]).norm()


def test_parameter_whose_gradient_is_rounding_is_no_difference() -> None:
    """The bias under a softmax over all rows' classes: the gradient of a constant added to all logits is 0."""

    class Shifted(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.shift = nn.Parameter(torch.zeros(()))

        def loss(self, logits, batch, batch_idx):
            return F.cross_entropy(logits + self.shift, batch[1])

    report = verify(Shifted(), points(), micro_batch=5)
    assert report, str(report)


# --- what breaks equality ------------------------------------------------------------------------------------------------


class ReadsBatchIdx(Classifier):
    def loss(self, logits, batch, batch_idx):
        return F.cross_entropy(logits, batch[1]) * (1.0 if batch_idx % 2 == 0 else 0.5)


class Contrastive(Classifier):
    def loss(self, logits, batch, batch_idx):
        return F.cross_entropy(logits @ self.net(batch[0] * 0.9).T, torch.arange(len(logits)))


class Centred(Classifier):
    def loss(self, logits, batch, batch_idx):
        return F.cross_entropy(logits - logits.mean(0), batch[1])


class Warm(Classifier):
    seen = 0

    def loss(self, logits, batch, batch_idx):
        self.seen += 1
        return F.cross_entropy(logits, batch[1]) * self.seen


class Counting(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("calls", torch.zeros(()))

    def loss(self, logits, batch, batch_idx):
        self.calls += 1
        return F.cross_entropy(logits, batch[1])


class TwoMeans(Classifier):
    def loss(self, logits, batch, batch_idx):
        chosen = (batch[0][:, :1] > 0.5).to(logits.dtype)
        return F.cross_entropy(logits, batch[1]) + ((logits**2) * chosen).sum() / chosen.sum()


class Mixed(Classifier):
    def loss(self, logits, batch, batch_idx):
        return F.cross_entropy(logits + logits[torch.randperm(len(logits))], batch[1])


class Hidden(Classifier):
    def loss(self, logits, batch, batch_idx):
        return Hide.apply(F.cross_entropy(logits, batch[1]))


class SeesPadding(Language):
    def training_step(self, batch, batch_idx):
        return super().training_step(batch, batch_idx) * (batch["input_ids"].shape[1] / 12)


BREAKS: dict[str, Any] = {
    "BatchNorm": (lambda: Classifier(nn.BatchNorm1d(8)), {"micro_batch": 4}, 'micro_batch="offload"'),
    "batch_idx": (ReadsBatchIdx, {"window": 3}, "micro_batch="),
    "contrastive loss": (Contrastive, {"micro_batch": 4}, "row_wise="),
    "rows that depend on each other": (Centred, {"micro_batch": 4}, "row_wise="),
    "state": (Warm, {"window": 3}, "Reset it"),
    "buffers": (Counting, {"micro_batch": 4}, "once a step"),
    "random numbers": (Mixed, {"micro_batch": 4}, "distribution"),
    "weight": (Hidden, {"micro_batch": 4}, "SampleCount()"),
}


@pytest.mark.parametrize("name", BREAKS)
def test_what_breaks_equality_is_found_and_named(name: str) -> None:
    make, how, mend = BREAKS[name]
    report = verify(make(), points(), **how)
    assert not report
    assert names(report) == [name]
    assert mend in report.breaks[0].mend
    assert name in report.verdict
    if name in ("BatchNorm", "batch_idx"):  # can be taken out, and then the rest is equal
        assert report.breaks[0].difference > 1e-3
        assert report.breaks[0].without < EXACT


def test_batch_idx_is_the_same_for_the_micro_batches_of_a_split_batch() -> None:
    assert verify(ReadsBatchIdx(), points(), micro_batch=4)


def test_spectral_norm_carries_state() -> None:
    report = verify(Classifier(nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))), points(), micro_batch=4)
    assert names(report) == ["state"]


@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128])
def test_imaginary_parts_of_gradients_are_compared(dtype: torch.dtype) -> None:
    class Complex(Classifier):
        def __init__(self, of_rows: float) -> None:
            super().__init__()
            self.phase, self.of_rows = nn.Parameter(torch.ones(3, dtype=dtype)), of_rows

        def loss(self, logits, batch, batch_idx):
            rotated = logits * self.phase
            of_all = self.phase.imag.pow(3).sum() + self.phase.imag.sum()
            return F.cross_entropy(rotated.real + rotated.imag, batch[1]) + of_all * (len(logits) - 12) * self.of_rows

    assert verify(Complex(0.0), points(), micro_batch=4)
    report = verify(Complex(0.1), points(), micro_batch=4)
    assert not report
    assert report.parameters[0].name == "phase"


def test_several_breaks_are_told_apart_and_each_is_measured() -> None:
    class All(ReadsBatchIdx):
        def loss(self, logits, batch, batch_idx):
            contrast = F.cross_entropy(logits @ logits.T, torch.arange(len(logits)))
            return super().loss(logits, batch, batch_idx) + 1e-3 * contrast

    report = verify(All(nn.BatchNorm1d(8)), points(), window=3)
    assert names(report) == ["BatchNorm", "batch_idx", "contrastive loss"]
    assert [found.without for found in report.breaks[:2]] == [found.difference for found in report.breaks[1:]]
    assert 1e-6 < report.breaks[2].difference < 1e-2


def test_terms_with_other_counts_are_equal_or_named() -> None:
    report = verify(TwoMeans(), points(), micro_batch=4)
    assert report or names(report) == ["terms of the loss"]


def test_padding_that_a_loss_depends_on_is_named() -> None:
    rows = sorted(sentences(9), key=len)
    batches = [pad(rows[i : i + 3]) for i in (0, 3, 6)]
    assert verify(Language(), batches, window=3)
    report = verify(SeesPadding(), batches, window=3)
    assert names(report)[0] == "padding"


@pytest.mark.parametrize("layer", ["frozen", "evaluated"])
def test_batch_norm_that_does_not_look_at_the_batch_is_equal(layer: str) -> None:
    module = Classifier(nn.BatchNorm1d(8))
    module.net[1].eval()
    assert verify(module, points(), micro_batch=4)


def test_noise_is_made_the_same_for_every_row() -> None:
    class Variational(Classifier):
        def loss(self, logits, batch, batch_idx):
            noise = torch.distributions.Normal(torch.zeros_like(logits), 1.0).rsample()
            steps = torch.randint(0, 10, (len(logits),))
            return F.cross_entropy(logits + noise * steps[:, None], batch[1]) + F.dropout(logits, 0.5).pow(2).mean()

    report = verify(Variational(), points(), micro_batch=4)
    assert report, str(report)
    assert any("Random numbers (bernoulli, normal, randint)" in note for note in report.notes)


def test_a_module_that_draws_random_numbers_may_log_a_loss_divided_by_a_number() -> None:
    class Logging(Classifier):
        def loss(self, logits, batch, batch_idx):
            loss = F.cross_entropy(logits + torch.randn_like(logits), batch[1])
            self.log("squares", (logits**2).sum() / 12)
            return loss

    assert verify(Logging(), points(), micro_batch=4)


def test_dropout_is_switched_off_and_said_so() -> None:
    report = verify(Classifier(nn.Dropout(0.5)), points(), micro_batch=4)
    assert report
    assert any("Dropout was switched off (net.1.p)" in note for note in report.notes)


def test_layers_that_the_trainer_has_made_are_the_same_in_all_runs() -> None:
    class Late(Classifier):
        def setup(self, stage):
            self.scale = nn.Linear(3, 3)

        def configure_model(self):
            if not hasattr(self, "late"):
                self.late = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5))

        def loss(self, logits, batch, batch_idx):
            return F.cross_entropy(self.late(self.scale(logits)), batch[1])

    module = Late()
    report = verify(module, points(), micro_batch=4)
    assert report, str(report)
    assert any("(late.1.p)" in note for note in report.notes)
    assert {row.name for row in report.parameters} >= {"scale.weight", "late.0.weight"}
    assert not hasattr(module, "late")


def test_explicit_weights_are_tried() -> None:
    assert verify(Classifier(), points(), micro_batch=5, weight=SampleCount())
    report = verify(Classifier(), points(), micro_batch=5, weight="equal")
    assert names(report) == ["weight"]
    assert "weigh 1, 1, 1; with 1.25, 1.25, 0.5 " in report.breaks[0].found  # 5, 5 and 2 rows


class Masked(Classifier):
    def training_step(self, batch, batch_idx):
        return self.loss(self.net(batch[0]), batch, batch_idx)


@pytest.mark.parametrize("how", [{"micro_batch": 4}, {"window": 3}], ids=str)
def test_a_batch_whose_labels_all_lie_in_one_micro_batch_is_verified(how: dict[str, Any]) -> None:
    inputs, labels = points()
    labels[4:] = -100
    report = verify(Masked(), (inputs, labels), **how)
    assert report, str(report)
    assert "3 " in report.compared.partition("same rows as ")[2]
    equal = verify(Masked(), (inputs, labels), weight="equal", **how)
    assert names(equal) == ["weight"]
    assert "weigh 1, 1, 1; with 3, 0, 0 " in equal.breaks[0].found


SUMS: dict[str, Any] = {
    "of squares": lambda logits, labels: (logits**2).sum() / 12,
    "of cross entropies": lambda logits, labels: F.cross_entropy(logits, labels, reduction="sum") / 12,
    "of a part": lambda logits, labels: (logits**2).sum() / len(logits) ** 0.5 / 2,
}


@pytest.mark.parametrize("name", SUMS)
def test_a_sum_divided_by_what_is_no_count_is_not_said_to_need_the_weights_it_has(name: str) -> None:
    class Summed(Masked):
        def loss(self, logits, batch, batch_idx):
            return SUMS[name](logits, batch[1])

    report = verify(Summed(), points(), micro_batch=4)
    assert names(report) == ["scale of the loss"]
    found = report.breaks[0].found
    if name == "of a part":  # 4 rows of 12
        assert "times 0.57735, 0.57735, 0.57735, which add up to 1.73205" in found
    else:
        assert "add up to that of the full batch" in found
        by_hand = Summed().double()
        inputs, labels = points()
        batch = (inputs.double(), labels)
        whole = torch.autograd.grad(by_hand.training_step(batch, 0), list(by_hand.parameters()))
        parts = [
            torch.autograd.grad(by_hand.training_step((batch[0][i : i + 4], labels[i : i + 4]), 0), list(by_hand.parameters()))
            for i in (0, 4, 8)
        ]
        for gradient, *others in zip(whole, *parts, strict=True):
            assert torch.allclose(gradient, sum(others), rtol=EXACT, atol=EXACT)


def chosen_rows(batch: Any) -> Tensor:
    return (batch[0][:, 0] > 0.5).sum()


def chosen_first(rows: int = 12) -> tuple[Tensor, Tensor]:
    """Every micro-batch of 4 has a chosen row."""
    inputs, labels = points(rows)
    inputs[::4, 0] = 1.0
    return inputs, labels


def test_a_weight_for_each_term_is_verified_and_a_break_beside_it_reported() -> None:
    class Carrying(TwoMeans):
        seen = 0

        def loss(self, logits, batch, batch_idx):
            self.seen += 1
            return super().loss(logits * self.seen, batch, batch_idx)

    class Together(TwoMeans):
        def loss(self, logits, batch, batch_idx):
            return super().loss(logits - logits.detach().mean(0), batch, batch_idx)

    weights = [SampleCount(), chosen_rows]
    assert verify(TwoMeans(), chosen_first(), micro_batch=4, weight=weights)
    assert names(verify(Carrying(), chosen_first(), micro_batch=4, weight=weights)) == ["state"]
    assert names(verify(Together(), chosen_first(), micro_batch=4, weight=weights)) == ["rows that depend on each other"]
    report = verify(TwoMeans(), chosen_first(), micro_batch=5, weight=weights[::-1])
    assert names(report) == ["weight of a term"]
    assert "chosen_rows counts" in report.breaks[0].found
    assert not any("chosen_rows counts" in note for note in report.notes)


def test_what_is_not_finite_is_named_or_refused() -> None:
    class Spread(Classifier):
        def loss(self, logits, batch, batch_idx):
            return F.cross_entropy(logits, batch[1]) + (logits.std(0) if len(logits) < 12 else logits * 0).mean()

    assert names(verify(Spread(), points(), micro_batch=1)) == ["non-finite gradient"]
    broken = (points()[0] / 0, points()[1])
    with pytest.raises(MisconfigurationException, match="not finite"):
        verify(Classifier(), broken, micro_batch=4)


def test_optimizer_that_steps_elsewhere_is_named() -> None:
    class ByBatches(Classifier):
        def configure_optimizers(self):
            return torch.optim.SGD(self.parameters(), lr=0.1 / self.trainer.accumulate_grad_batches)

    assert names(verify(ByBatches(), points(), window=3)) == ["optimizer step"]


def test_an_optimizer_that_runs_its_closure_several_times_steps_as_on_the_full_batch() -> None:
    class LBFGS(Classifier):
        def configure_optimizers(self):
            return torch.optim.LBFGS(self.parameters(), max_iter=3)

    assert verify(LBFGS(), points(), micro_batch=5)


# --- the module itself is examined ----------------------------------------------------------------------------------------


def clamped(gradient: Tensor) -> Tensor:
    return gradient.clamp(-0.01, 0.01)


def clamp_accumulated(parameter: Tensor) -> None:
    parameter.grad.clamp_(-0.01, 0.01)


HOOKS: dict[str, Any] = {
    "on a parameter": lambda net, do: net[0].weight.register_hook(clamped if do else lambda gradient: gradient * 2),
    "after accumulation": lambda net, do: net[0].weight.register_post_accumulate_grad_hook(
        clamp_accumulated if do else lambda parameter: None
    ),
    "on a layer": lambda net, do: net[1].register_full_backward_hook(
        lambda m, ins, outs: ((clamped(ins[0]) if do else ins[0] * 2),)
    ),
}


@pytest.mark.parametrize("where", HOOKS)
def test_hooks_on_gradients_take_part_and_those_that_are_not_linear_are_named(where: str) -> None:
    module, harmless = Classifier(optimizer="sgd"), Classifier(optimizer="sgd")
    HOOKS[where](module.net, True)
    HOOKS[where](harmless.net, False)
    report = verify(module, points(), micro_batch=5)
    assert names(report) == ["backward that is not linear"]
    assert ("net.0.weight" in report.breaks[0].found) == (where != "on a layer")
    assert verify(harmless, points(), micro_batch=5)


def test_clipping_in_a_hook_after_backward_is_no_state_but_a_backward_that_is_not_linear() -> None:
    class Clipping(Classifier):
        def on_after_backward(self):
            nn.utils.clip_grad_norm_(self.parameters(), 0.01)

    assert names(verify(Clipping(), points(), micro_batch=5)) == ["backward that is not linear"]


def test_a_teacher_that_gets_a_graph_between_batches_is_put_back() -> None:
    class Teaching(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.teacher = nn.Linear(8, 3).requires_grad_(False)

        def loss(self, logits, batch, batch_idx):
            return F.cross_entropy(logits, batch[1])

        def on_train_batch_end(self, outputs, batch, batch_idx):
            self.teacher.weight.lerp_(self.net[-1].weight, 0.1)  # without no_grad

    module = Teaching()
    before = module.teacher.weight.clone()
    assert verify(module, points(), window=3)
    assert torch.equal(module.teacher.weight, before)
    assert module.teacher.weight.is_leaf
    assert not module.teacher.weight.requires_grad


def test_the_full_batch_has_what_hooks_make_of_its_gradient() -> None:
    from lightning_accum.verification.state import ModuleState
    from lightning_accum.verification.step import StepRunner

    batch = (points()[0].double(), points()[1])
    module, by_hand = Classifier(), Classifier().double()
    module.net[0].weight.register_hook(lambda gradient: gradient * 3)
    F.cross_entropy(by_hand.net(batch[0]), batch[1]).backward()
    runner = StepRunner(module, ModuleState(module), {"micro_batch": 5}, {"precision": "64-true"})
    expected = 3 * by_hand.net[0].weight.grad
    for step in (runner.full(batch), runner.accumulated([batch])):
        assert (step.gradients["net.0.weight"] - expected).norm() <= EXACT * expected.norm()


def test_a_module_whose_functions_have_captured_it_is_the_one_that_is_trained() -> None:
    """A copy's function would go on to use the original's parameter, and leave a gradient there."""

    class Capturing(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.full((3,), 2.0))
            self.act, self.first = lambda logits: logits * self.scale, weakref.ref(self.net[0])
            self.lock, self.stream = threading.Lock(), sys.stdout
            self.no_decay = {self.scale}

        def loss(self, logits, batch, batch_idx):
            calls.append(len(calls))
            return F.cross_entropy(self.act(logits) + self.first().bias[:3], batch[1])

    calls: list[int] = []
    module = Capturing()
    report = verify(module, points(), micro_batch=5)
    assert report, str(report)
    assert {row.name for row in report.parameters} >= {"scale"}
    assert all(parameter.grad is None for parameter in module.parameters())
    reference = Capturing().double()
    batch = (points()[0].double(), points()[1])
    assert report.losses[0] == pytest.approx(reference.loss(reference.net(batch[0]), batch, 0).item(), rel=1e-7)


def test_parameters_that_only_an_optimizer_knows_are_compared_and_put_back() -> None:
    class Outside(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.heads = [nn.Linear(3, 3, dtype=torch.float64)]

        def loss(self, logits, batch, batch_idx):
            return F.cross_entropy(self.heads[0](logits) * (1 + batch_idx), batch[1])

        def configure_optimizers(self):
            return torch.optim.SGD([{"params": self.net.parameters()}, {"params": self.heads[0].parameters()}], lr=0.1)

    module = Outside()
    before = module.heads[0].weight.clone()
    report = verify(module, points(), window=3)
    assert names(report) == ["batch_idx"]
    assert any(row.name == "optimizer.0" for row in report.parameters)
    assert torch.equal(module.heads[0].weight, before)


def test_an_optimizer_of_the_module_stays_as_it_was() -> None:
    class Own(Classifier):
        def __init__(self) -> None:
            super().__init__()
            self.optimizers_made = [torch.optim.AdamW(self.parameters(), lr=1e-2)]

        def configure_optimizers(self):
            return self.optimizers_made[0]

    module, twin = Own(), Own()
    for each in (module, twin):
        each.net(points()[0]).sum().backward()
        each.optimizers_made[0].step()
    assert verify(module, points(), micro_batch=5, precision="32-true")
    for each in (module, twin):  # takes the step of one that was never verified
        each.optimizers_made[0].step()
    for found, expected in zip(module.parameters(), twin.parameters(), strict=True):
        assert torch.equal(found, expected)
        assert found.dtype == torch.float32


MADE: dict[str, Any] = {
    "parametrized": lambda: Classifier(nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))),
    "weight norm by hooks": lambda: Classifier(nn.utils.weight_norm(nn.Linear(8, 8))),
    "scripted": lambda: Classifier(torch.jit.script(nn.Linear(8, 8))),
    "tied": lambda: tied(Classifier(nn.Linear(8, 8), nn.Linear(8, 8))),
}


def tied(module: Classifier) -> Classifier:
    module.net[2].weight = module.net[1].weight
    return module


@pytest.mark.parametrize("name", MADE)
@pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated", "ignore:.*torch.jit.script")
def test_modules_of_a_special_make_are_equal_and_stay_as_they_were(name: str) -> None:
    module = MADE[name]()
    before = {path: value.clone() for path, value in module.state_dict().items()}
    identities = [id(parameter) for parameter in module.parameters()]
    storages = [parameter.data_ptr() for parameter in module.parameters()]
    assert verify(module, points(), micro_batch=5)
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)
    assert [id(parameter) for parameter in module.parameters()] == identities
    assert [parameter.data_ptr() for parameter in module.parameters()] == storages


def test_a_compiled_training_step_is_examined_as_it_is_and_hides_its_weight() -> None:
    class Plain(Classifier):
        def training_step(self, batch, batch_idx):
            return F.cross_entropy(self.net(batch[0]), batch[1])

    compiled = torch.compile(Plain(), backend="eager")
    report = verify(compiled, points(), micro_batch=6)
    assert report or names(report) == ["weight"]
    hidden = verify(torch.compile(Plain(), backend="aot_eager"), points(), micro_batch=6)
    assert names(hidden) == ["weight"]
    assert verify(torch.compile(Plain(), backend="aot_eager"), points(), micro_batch=6, weight=SampleCount())


def test_hooks_of_the_training_around_it_do_not_see_what_verify_does() -> None:
    """Gradients are kept in float32 by hooks of this package, and measured by others."""

    class Looking(pl.Callback):
        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 1:
                assert verify(pl_module, points(), micro_batch=4)

    def fitted(*callbacks: pl.Callback) -> list[Tensor]:
        module, noise = Classifier(), GradientNoiseScale()
        torch.manual_seed(3)
        policy = GradientAccumulation(3, accumulate_dtype=torch.float32)
        batches = [(inputs.bfloat16(), labels) for inputs, labels in [points()] * 6]
        run = trainer(precision="bf16-true", callbacks=[policy, noise, *callbacks])
        run.fit(module, loader(batches))
        return [*module.parameters(), torch.tensor(noise.estimate.variance)]

    for found, expected in zip(fitted(Looking()), fitted(), strict=True):
        assert torch.equal(found, expected)


# --- nothing of the user's changes ---------------------------------------------------------------------------------------


def test_nothing_of_a_module_in_training_changes() -> None:
    module = Classifier(nn.BatchNorm1d(8), nn.Dropout(0.3))
    module.net[0].bias.requires_grad_(False)
    module.carried = module.net(points()[0])  # with a graph, which cannot be copied
    module.net.register_forward_hook(lambda *_: None)
    generator = torch.Generator().manual_seed(5)
    data = DataLoader(TensorDataset(*points(24)), batch_size=4, shuffle=True, generator=generator)
    run = trainer("auto", max_epochs=2)
    run.fit(module, data)
    module.net[4].weight.grad = torch.ones_like(module.net[4].weight)
    module.train()
    module.net[2].eval()

    def everything() -> dict[str, Any]:
        optimizer = run.optimizers[0]
        return {
            "state": {name: value.clone() for name, value in module.state_dict().items()},
            "gradients": {name: p.grad if p.grad is None else p.grad.clone() for name, p in module.named_parameters()},
            "flags": [p.requires_grad for p in module.parameters()] + [m.training for m in module.modules()],
            "identity": [id(value) for value in (module.trainer, module.carried, *module.modules(), *module.parameters())],
            "dropout": module.net[2].p,
            "hooks": [len(m._forward_hooks) + len(m._backward_hooks) for m in module.modules()],
            "optimizer": [value.clone() for state in optimizer.state.values() for value in state.values()],
            "step hooks": len(optimizer._optimizer_step_post_hooks),
            "metric": module.accuracy.tp.clone() if isinstance(module.accuracy.tp, Tensor) else 0,
            "random": [torch.get_rng_state(), generator.get_state(), torch.tensor(numpy.random.get_state()[1].astype("int64"))],
            "trainer": [run.global_step, run.current_epoch, len(run.callbacks), run.accumulate_grad_batches],
        }

    def names_of_things() -> list[Any]:
        return [sorted(vars(module)), sorted(vars(module.net[2])), sorted(Path().iterdir()), random.getstate()]

    before, names_before = everything(), names_of_things()
    assert not verify(module, data, window=3)
    assert verify(module, points(), micro_batch=4, precision="32-true") is not None
    torch.testing.assert_close(everything(), before, rtol=0, atol=0)
    assert names_of_things() == names_before
    assert module.trainer is run


def test_verify_in_the_middle_of_a_training_leaves_it_as_it_was() -> None:
    class Looking(pl.Callback):
        reports: list[Report] = []

        def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
            if batch_idx == 1:
                self.reports.append(verify(pl_module, points(), micro_batch=4))

    def fitted(*callbacks: pl.Callback) -> list[Tensor]:
        module = Classifier(nn.Dropout(0.5))
        torch.manual_seed(3)
        trainer(accumulate_grad_batches=2, callbacks=list(callbacks)).fit(module, loader([points(), points(), points(), points()]))
        return list(module.parameters())

    looking = Looking()
    for found, expected in zip(fitted(looking), fitted(), strict=True):
        assert torch.equal(found, expected)
    assert len(looking.reports) == 1
    assert looking.reports[0]


def test_data_module_and_own_loader_are_data_too() -> None:
    assert verify(BoringModel(), BoringDataModule(), window=4)
    assert verify(BoringModel(), window=2)


def test_hooks_that_change_batches_are_those_of_the_data_module() -> None:
    class Scaled(pl.LightningDataModule):
        def train_dataloader(self):
            return DataLoader(TensorDataset(*points(24)), batch_size=8)

        def on_after_batch_transfer(self, batch, dataloader_idx):
            return batch[0] * 3, batch[1]

    plain, scaled = verify(Classifier(), points(8), micro_batch=4), verify(Classifier(), Scaled(), micro_batch=4)
    assert scaled
    by_hand = Classifier().double()
    batch = next(iter(Scaled().train_dataloader()))
    assert scaled.losses[0] == pytest.approx(float(F.cross_entropy(by_hand.net(batch[0].double() * 3), batch[1])), rel=1e-7)
    assert scaled.losses[0] != plain.losses[0]
