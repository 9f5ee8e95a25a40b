"""A split batch holds what one micro-batch needs: nothing that autograd saves lives on into the next one.

Counted are the bytes of the tensors that autograd has saved and still holds. Such a graph can outlive its backward where something
branches off that the loss does not need: a returned probability, a logged entropy. So the module here has such branches.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from alive import SavedBytes
from support import Toy, fit
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import GradientAccumulation, Tokens

SIZE, MANY, LENGTH, FEATURES = 4, 16, 6, 32
KEPT: list[Tensor] = []


def entropy(logits: Tensor) -> Tensor:
    """Saves tensors of its own, which the backward of the loss does not free."""
    probabilities = logits.softmax(-1)
    return -(probabilities * probabilities.log()).sum(-1)


def logs(module: pl.LightningModule, logits: Tensor, loss: Tensor) -> Any:
    module.log("loss", loss, prog_bar=True)
    module.log("entropy", entropy(logits).mean(), on_step=True, on_epoch=True)
    module.log_dict({"most": entropy(logits).max(), "squares": logits.square().mean()}, reduce_fx="max")
    return {"loss": loss, "entropy": entropy(logits).mean()}


def returns_rows(module: pl.LightningModule, logits: Tensor, loss: Tensor) -> Any:
    return {"loss": loss, "logits": logits, "entropy": entropy(logits), "parts": [entropy(logits)], "more": {"x": entropy(logits)}}


def keeps(module: pl.LightningModule, logits: Tensor, loss: Tensor) -> Any:
    KEPT.append(entropy(logits))
    return loss


TOLD: dict[str, Callable[..., Any]] = {"nothing": lambda module, logits, loss: loss, "logs": logs, "rows": returns_rows}


class Tagger(Toy):
    """Labels tokens; ``tell`` says what training_step makes of its logits and loss."""

    def __init__(self, tell: Callable[..., Any], capacity: int = MANY * SIZE) -> None:
        make = [nn.Embedding(11, FEATURES), nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.Linear(FEATURES, 11)]
        super().__init__(lambda net, batch: None, net=lambda: nn.Sequential(*make))
        self.tell, self.capacity = tell, capacity
        self.rows: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        inputs = batch["input_ids"]
        if len(inputs) > self.capacity:
            raise torch.OutOfMemoryError(f"{len(inputs)} rows do not fit")
        self.rows.append(len(inputs))
        logits = self.net(inputs)
        return self.tell(self, logits, F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))


class Listener(pl.Callback):
    """Wants the hooks of every micro-batch."""

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None: ...


def peak(module: Tagger, rows: int, *callbacks: pl.Callback) -> int:
    generator = torch.Generator().manual_seed(1)
    names = ("input_ids", "labels")
    batches = [{name: torch.randint(11, (rows, LENGTH), generator=generator) for name in names} for _ in range(3)]
    with SavedBytes() as saved:
        fit(module, batches, *callbacks, strategy="accum" if callbacks else "auto")
    return saved.peak


@pytest.mark.some_cases(5)
@pytest.mark.parametrize("size", [SIZE, Tokens(SIZE * LENGTH), "auto"])
@pytest.mark.parametrize("callbacks", [[], [Listener()]], ids=["", "heard"])
@pytest.mark.parametrize("tell", TOLD)
def test_the_peak_of_many_micro_batches_is_that_of_one(tell: str, callbacks: list[pl.Callback], size: Any) -> None:
    # equal to the byte: micro-batches of one size save the same tensors
    one, module = peak(Tagger(TOLD[tell]), SIZE), Tagger(TOLD[tell], capacity=SIZE)
    assert peak(module, MANY * SIZE, GradientAccumulation(micro_batch=size, check=False), *callbacks) == one
    assert module.rows == [SIZE] * MANY * 3


def test_the_whole_batch_holds_many_times_as_much_and_a_graph_that_is_kept_is_seen() -> None:
    one, whole = (peak(Tagger(TOLD["nothing"]), rows) for rows in (SIZE, MANY * SIZE))
    assert whole > MANY / 2 * one  # not all of it, for the weights are saved once in each
    one = peak(Tagger(keeps), SIZE)
    assert peak(Tagger(keeps), MANY * SIZE, GradientAccumulation(micro_batch=SIZE, check=False)) > 2 * one
    KEPT.clear()
