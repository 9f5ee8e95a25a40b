"""The same window through the peers: what the table of the README says of them is what these tests show.

The window: micro-batches x = [1] and x = 1..9, loss mean(w * x). The full batch has the gradient 4.6, a mean of means 3.0.
The tail: ten micro-batches x = i in windows of four. The full batches' gradients are 2.5, 6.5 and 9.5.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import Scalar, fit, loader, x
from torch import nn

UNEVEN = [x(1), x(1, 2, 3, 4, 5, 6, 7, 8, 9)]
TAIL = [x(i) for i in range(1, 11)]


def lightning(batches: Any, window: int, strategy: str = "auto") -> list[float]:
    module = Scalar(batches)
    fit(module, None, strategy=strategy, accumulate_grad_batches=window)
    return module.gradients


class Weight(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))

    def forward(self, x):
        return self.w * x


def accelerate(batches, window: int) -> list[float]:
    """The documented loop: ``accumulate()`` around forward, backward, step and zero_grad."""
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(gradient_accumulation_steps=window, cpu=True)
    model = Weight()
    model, optimizer, data = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=1.0), loader(batches))
    gradients = []
    for batch in data:
        with accelerator.accumulate(model):
            accelerator.backward(model(batch).mean())
            if accelerator.sync_gradients:
                gradients.append(model.w.grad.item())
            optimizer.step()
            optimizer.zero_grad()
    return gradients


def transformers_trainer(batches, window: int, takes_count: bool) -> list[float]:
    """The Hugging Face Trainer, on a model that takes ``num_items_in_batch`` or does not."""
    transformers = pytest.importorskip("transformers")
    gradients: list[float] = []

    class Model(Weight):
        accepts_loss_kwargs = True

        def forward(self, input_ids, labels=None, num_items_in_batch=None):
            total = (self.w * input_ids).sum()
            return {"loss": total / (input_ids.numel() if num_items_in_batch is None else num_items_in_batch)}

    class Uninformed(Model):
        accepts_loss_kwargs = False

        def forward(self, input_ids, labels=None):
            return super().forward(input_ids)

    class Watch(transformers.TrainerCallback):
        def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs) -> None:
            gradients.append(model.w.grad.item())

    model = Model() if takes_count else Uninformed()
    arguments = transformers.TrainingArguments(
        output_dir="hf", per_device_train_batch_size=1, gradient_accumulation_steps=window, num_train_epochs=1, use_cpu=True,
        max_grad_norm=0.0, lr_scheduler_type="constant", learning_rate=1.0, report_to=[], save_strategy="no", logging_strategy="no",
        disable_tqdm=True, remove_unused_columns=False, train_sampling_strategy="sequential",
    )  # fmt: skip
    data = [{"input_ids": batch, "labels": torch.zeros(len(batch), dtype=torch.long)} for batch in batches]
    transformers.Trainer(
        model=model,
        args=arguments,
        train_dataset=data,
        data_collator=lambda rows: rows[0],
        optimizers=(torch.optim.SGD(model.parameters(), lr=1.0), None),
        callbacks=[Watch()],
    ).train()
    return gradients


def test_uneven_window_here_and_elsewhere() -> None:
    assert lightning(UNEVEN, 2, "accum") == pytest.approx([4.6], rel=1e-15)
    assert lightning(UNEVEN, 2) == pytest.approx([3.0])
    assert accelerate(UNEVEN, 2) == pytest.approx([3.0])
    assert transformers_trainer(UNEVEN, 2, takes_count=False) == pytest.approx([3.0])
    assert transformers_trainer(UNEVEN, 2, takes_count=True) == pytest.approx([4.6])


def test_tail_here_and_elsewhere() -> None:
    assert lightning(TAIL, 4, "accum") == [2.5, 6.5, 9.5]
    assert lightning(TAIL, 4) == [2.5, 6.5, 4.75]
    assert accelerate(TAIL, 4) == [2.5, 6.5, 4.75]
    assert transformers_trainer(TAIL, 4, takes_count=True) == [2.5, 6.5, 9.5]
