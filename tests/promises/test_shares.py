"""Weights that the graph does not show are measured, where the check finds that so the losses add up, and never guessed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import ddp, loader, relative_error, train_by_hand, trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import GradientAccumulation, UnreadableLossError
from lightning_accum.weighing.shares import shares_of

Loss = Callable[[Tensor, Tensor], Tensor]
"""Of the losses of rows, and of their factors."""


class OfRows(pl.LightningModule):
    """A loss of the losses of rows, each with a factor."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net, self.loss, self.steps, self.calls = nn.Linear(4, 3).double(), loss, 0, 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.calls += 1
        return self.loss(self.net(batch[0]).square().sum(1), batch[1])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def batches(*factors: list[float]) -> list[list[Tensor]]:
    """As many rows as there are factors."""
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(len(each), 4, generator=generator, dtype=torch.float64), torch.tensor(each, dtype=torch.float64)]
        for each in factors
    ]


def joined(data: list[list[Tensor]]) -> list[Tensor]:
    return [torch.cat(each) for each in zip(*data, strict=True)]


MASK = [1.0, 1.0, 1.0, 0.0]
MASKED: Loss = lambda c, k: torch.einsum("i,i->", c, k) * (1 / k.sum().clamp(min=1))  # noqa: E731
WEIGHTED: Loss = lambda c, w: F.linear(w[None], c[None])[0, 0] * (1 / w.sum())  # noqa: E731


RECIPROCAL: Loss = lambda c, k: torch.addmv(c.new_zeros(1), c[None], k)[0] * k.sum().clamp(min=1).reciprocal()  # noqa: E731


class OfTasks(OfRows):
    """The mean over tasks of what is a mean itself, in a loop of Python's, as in meta-learning."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Any = 0.0
        for rows in batch[0]:
            loss = loss + F.mse_loss(self.net(rows), torch.ones(len(rows), 3, dtype=torch.float64))
        return loss / len(batch[0])


@pytest.mark.parametrize("policy", [{"window": 4}, {"micro_batch": 2}], ids=["windows", "split"])
def test_a_sum_of_means_in_a_loop_over_the_number_of_them_is_exact(policy: dict[str, Any]) -> None:
    generator = torch.Generator().manual_seed(1)
    data = [[torch.randn(tasks, 5, 4, generator=generator, dtype=torch.float64)] for tasks in (5, 2, 7, 1)]
    module, by_hand = OfTasks(RECIPROCAL), OfTasks(RECIPROCAL)
    is_split = "micro_batch" in policy
    trainer(callbacks=[GradientAccumulation(**policy)], max_epochs=3).fit(module, loader([joined(data)] if is_split else data))
    train_by_hand(by_hand, [joined(data)], epochs=3)
    assert relative_error(module.parameters(), by_hand.parameters()) <= 1e-12


@pytest.mark.parametrize("first", [MASK, [1.0] * 4], ids=["in the first batch", "in the second batch"])
@pytest.mark.parametrize("loss", [MASKED, RECIPROCAL], ids=["einsum", "addmv"])
def test_a_micro_batch_without_a_row_of_the_mask_weighs_nothing_though_its_count_is_clamped(loss: Loss, first: list[float]) -> None:
    data = batches(first, [0.0], [0.0, 0.0], [1.0, 1.0, 1.0])
    module, by_hand = OfRows(loss), OfRows(loss)
    trainer(callbacks=[GradientAccumulation(4)]).fit(module, loader(data))
    train_by_hand(by_hand, [joined(data)], epochs=1)
    assert relative_error(module.parameters(), by_hand.parameters()) <= 1e-12


def test_where_the_checked_rows_had_none_without_the_mask_it_is_not_guessed_what_they_weigh() -> None:
    with pytest.raises(UnreadableLossError, match="nothing is counted, as in no part of the rows that were checked"):
        trainer(callbacks=[GradientAccumulation(2)]).fit(module := OfRows(MASKED), loader(batches([1.0] * 8, [0.0])))
    assert module.steps == 0


def test_where_the_checked_rows_had_one_factor_it_is_not_guessed_what_others_weigh() -> None:
    data = batches([1.0] * 4, [2.0])
    with pytest.raises(UnreadableLossError, match="of which the rows that were checked had none"):
        trainer(callbacks=[GradientAccumulation(2)]).fit(module := OfRows(WEIGHTED), loader(data))
    assert module.steps == 0


def test_factors_of_rows_are_weighed_by_their_sum() -> None:
    data = batches([1.0, 2.0, 0.5, 3.0], [2.0], [1.0, 1.0])
    module, by_hand = OfRows(WEIGHTED), OfRows(WEIGHTED)
    trainer(callbacks=[GradientAccumulation(3)]).fit(module, loader(data))
    train_by_hand(by_hand, [joined(data)], epochs=1)
    assert relative_error(module.parameters(), by_hand.parameters()) <= 1e-12


def test_a_sum_over_a_constant_is_a_sum_until_it_is_another_constant() -> None:
    data = batches([1.0] * 4, [1.0] * 3, [1.0] * 2, [2.0] * 2)
    with pytest.raises(ValueError, match="another factor in each micro-batch"):
        trainer(callbacks=[GradientAccumulation(2)]).fit(module := OfRows(lambda c, w: c.sum() / (100 * w[0])), loader(data))
    assert module.steps == 1


def test_a_measured_weight_is_measured_after_a_resume_too(tmp_path: Any) -> None:
    data = batches(MASK, [0.0], [1.0], [1.0, 1.0])
    whole, first, second = (OfRows(MASKED) for _ in range(3))
    trainer(callbacks=[GradientAccumulation(2)], max_epochs=2).fit(whole, loader(data))
    run = trainer(callbacks=[GradientAccumulation(2)], max_epochs=1)
    run.fit(first, loader(data))
    run.save_checkpoint(tmp_path / "one.ckpt")
    trainer(callbacks=[GradientAccumulation(2)], max_epochs=2).fit(second, loader(data), ckpt_path=tmp_path / "one.ckpt")
    assert second.calls == len(data)  # it was not checked again
    assert relative_error(second.parameters(), whole.parameters()) == 0


def test_ranks_measure_alike(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)

    class SavedByRank(OfRows):
        def on_train_end(self) -> None:
            torch.save(self.state_dict(), f"{self.global_rank}.pt")

    data = batches(MASK, [1.0, 0.0], [0.0, 1.0], [0.0, 1.0, 1.0])
    trainer(ddp(), callbacks=[GradientAccumulation(2)], devices=2, use_distributed_sampler=True).fit(
        SavedByRank(MASKED), loader(data)
    )
    train_by_hand(by_hand := OfRows(MASKED), [joined(data)], epochs=1)
    for rank in range(2):
        found = torch.load(f"{rank}.pt")
        assert relative_error(found.values(), by_hand.state_dict().values()) <= 1e-12


def test_nothing_is_called_or_freed_where_a_weight_is_measured() -> None:
    net = nn.Linear(4, 3).double()
    loss = (each := net(torch.ones(5, 4).double()).square().sum(1)).sum() * (1 / len(each))
    each.register_hook(lambda gradient: pytest.fail("a hook was called"))
    assert shares_of(loss).of_losses == shares_of(loss).of_sum == 0.2
    each._backward_hooks.clear()
    loss.backward()
    with pytest.raises(UnreadableLossError, match="a node that cannot be run"):
        shares_of(loss * torch.ones((), dtype=torch.float64))
