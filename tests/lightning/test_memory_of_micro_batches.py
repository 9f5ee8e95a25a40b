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
from support import loader, trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import GradientAccumulation, Tokens

SIZE, MANY, LENGTH, FEATURES = 4, 16, 6, 32


class SavedBytes:
    """Within this context, the bytes held for backwards to come, and their peak. A tensor that is saved twice counts twice."""

    def __init__(self) -> None:
        self.now = self.peak = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: _Saved(tensor, self), lambda saved: saved.tensor)

    def add(self, number: int) -> None:
        self.now += number
        self.peak = max(self.peak, self.now)

    def __enter__(self) -> SavedBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *exception: Any) -> None:
        self._hooks.__exit__(*exception)


class _Saved:
    """Lives as long as the graph needs the tensor: up to the backward, or to the end of what never has one."""

    def __init__(self, tensor: Tensor, counter: SavedBytes) -> None:
        self.tensor = tensor.detach()  # with its graph, an output that its own operation saves would hold itself
        self._counter = counter
        counter.add(tensor.nbytes)

    def __del__(self) -> None:
        self._counter.add(-self.tensor.nbytes)


class Tagger(pl.LightningModule):
    """Labels tokens; ``tell`` says what training_step makes of its logits and loss."""

    def __init__(self, tell: Callable[[pl.LightningModule, Tensor, Tensor], Any], capacity: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Embedding(11, FEATURES), nn.Linear(FEATURES, FEATURES), nn.GELU(), nn.Linear(FEATURES, 11))
        self.tell, self.capacity = tell, capacity
        self.rows: list[int] = []

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Any:
        inputs = batch["input_ids"]
        if self.capacity is not None and len(inputs) > self.capacity:
            raise torch.OutOfMemoryError(f"{len(inputs)} rows do not fit")
        self.rows.append(len(inputs))
        logits = self.net(inputs)
        return self.tell(self, logits, F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def entropy(logits: Tensor) -> Tensor:
    """Saves tensors of its own, which the backward of the loss does not free."""
    probabilities = logits.softmax(-1)
    return -(probabilities * probabilities.log()).sum(-1)


def loss_alone(module: pl.LightningModule, logits: Tensor, loss: Tensor) -> Tensor:
    return loss


def logging(module: pl.LightningModule, logits: Tensor, loss: Tensor) -> Tensor:
    module.log("loss", loss, prog_bar=True)
    module.log("entropy", entropy(logits).mean(), on_step=True, on_epoch=True)
    module.log_dict({"most": entropy(logits).max(), "squares": logits.square().mean()}, reduce_fx="max")
    return loss


def returning_numbers(module: pl.LightningModule, logits: Tensor, loss: Tensor) -> dict[str, Any]:
    return {"loss": loss, "entropy": entropy(logits).mean()}


def returning_rows(module: pl.LightningModule, logits: Tensor, loss: Tensor) -> dict[str, Any]:
    return {"loss": loss, "logits": logits, "entropy": entropy(logits), "parts": [entropy(logits)], "more": {"x": entropy(logits)}}


def both(module: pl.LightningModule, logits: Tensor, loss: Tensor) -> dict[str, Any]:
    logging(module, logits, loss)
    return returning_rows(module, logits, loss)


TOLD = [loss_alone, logging, returning_numbers, returning_rows, both]


def batches_of(rows: int) -> list[dict[str, Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [{name: torch.randint(11, (rows, LENGTH), generator=generator) for name in ("input_ids", "labels")} for _ in range(3)]


def peak(module: Tagger, rows: int, **kwargs: Any) -> int:
    with SavedBytes() as saved:
        trainer(**kwargs).fit(module, loader(batches_of(rows)))
    return saved.peak


@pytest.mark.some_cases(2, 6)
@pytest.mark.parametrize("size", [SIZE, Tokens(SIZE * LENGTH), "auto"])
@pytest.mark.parametrize("tell", TOLD)
def test_the_peak_of_many_micro_batches_is_that_of_one(tell: Callable[..., Any], size: Any) -> None:
    # equal to the byte: micro-batches of one size save the same tensors
    one = peak(Tagger(tell), SIZE, strategy="auto")
    module = Tagger(tell, capacity=SIZE)
    assert peak(module, MANY * SIZE, callbacks=[GradientAccumulation(micro_batch=size)]) == one
    assert module.rows == [SIZE] * MANY * 3


@pytest.mark.parametrize("tell", TOLD)
def test_so_it_is_where_a_callback_wants_the_hooks_of_every_micro_batch(tell: Callable[..., Any]) -> None:
    class Listener(pl.Callback):
        heard = 0

        def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            self.heard += 1

    one, listener = peak(Tagger(tell), SIZE, strategy="auto"), Listener()
    assert peak(Tagger(tell), MANY * SIZE, callbacks=[GradientAccumulation(micro_batch=SIZE), listener]) == one
    assert listener.heard == MANY * 3


def test_the_whole_batch_would_hold_many_times_as_much() -> None:
    one, whole = (peak(Tagger(loss_alone), rows, strategy="auto") for rows in (SIZE, MANY * SIZE))
    assert whole > MANY / 2 * one  # not all of it, for the weights are saved once in each


def test_a_graph_that_is_kept_is_seen() -> None:
    """What the tests above would see if a value went into the log, or among the outputs, with its graph."""
    kept: list[Tensor] = []

    def keeping(module: pl.LightningModule, logits: Tensor, loss: Tensor) -> Tensor:
        kept.append(entropy(logits))
        return loss

    one = peak(Tagger(keeping), SIZE, strategy="auto")
    assert peak(Tagger(keeping), MANY * SIZE, callbacks=[GradientAccumulation(micro_batch=SIZE)]) > 2 * one
