"""The Hugging Face Trainer: do micro-batches change the step of your model with your ``compute_loss``?

pip install "transformers[torch]" && python hf_trainer.py
"""

from tempfile import gettempdir
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import verify

try:
    from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments
except ImportError:
    raise SystemExit('skipped: this example needs pip install "transformers[torch]"') from None


class Mean(Trainer):
    """Ignores ``num_items_in_batch``: the mean over the tokens of a micro-batch."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        outputs = model(inputs["input_ids"], inputs["attention_mask"])
        loss = F.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), inputs["labels"][:, 1:].flatten())
        return (loss, outputs) if return_outputs else loss


class Sum(Mean):
    """The sum over the tokens of a micro-batch, divided by the tokens of the whole step."""

    def compute_loss(self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None) -> Any:
        loss, outputs = super().compute_loss(model, inputs, return_outputs=True)
        if num_items_in_batch is not None:  # the Trainer counts only if the model takes **kwargs
            loss = loss * inputs["labels"][:, 1:].ne(-100).sum() / num_items_in_batch
        return (loss, outputs) if return_outputs else loss


def verify_trainer(trainer: Trainer, batches: list[dict[str, Tensor]]) -> Any:
    """Compare the Trainer's step on these micro-batches with its step on one batch of all their rows."""
    rows = sum(len(batch["labels"]) for batch in batches)

    def loss_of(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
        """What the Trainer calls backward on. It sums these, and weight="equal" takes their mean: so times their number."""
        window = [batch] if len(batch["labels"]) == rows else batches
        trainer.current_gradient_accumulation_steps = len(window)
        _, items = trainer.get_batch_samples(iter(window), len(window), trainer.args.device)
        with patch.object(trainer.accelerator, "backward") as backward:
            trainer.training_step(model, batch, items)
        return backward.call_args.args[0] * len(window)

    return verify(trainer.model, batches, window=len(batches), loss_of=loss_of, weight="equal")


def texts(*lengths: int) -> dict[str, Tensor]:
    """Random texts, padded to the longest."""
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    tokens = torch.randint(1, 64, mask.shape)
    return {"input_ids": tokens * mask, "attention_mask": mask.long(), "labels": tokens.masked_fill(~mask, -100)}


def small_llama(takes_kwargs: bool) -> nn.Module:
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=64, **sizes))
    model.accepts_loss_kwargs = takes_kwargs  # False: treated as a model whose forward() takes no **kwargs
    return model


def main() -> None:
    torch.manual_seed(0)
    batches = [texts(3, 4), texts(16, 12), texts(5, 2), texts(9, 16)]
    print("compute_loss  model takes **kwargs  gradient's relative error  loss: full batch, micro-batches")
    for kind in (Trainer, Sum, Mean):
        for takes_kwargs in (True, False):
            trainer = kind(small_llama(takes_kwargs), TrainingArguments(gettempdir(), use_cpu=True, report_to=[]))
            report = verify_trainer(trainer, batches)  # print(report) shows the parameters, and what would be exact
            losses = "  ".join(f"{loss:.4f}" for loss in report.losses)
            print(f"{kind.__name__:<13} {takes_kwargs!s:<21} {report.gradient:<26.1e} {losses}")


if __name__ == "__main__":
    main()
