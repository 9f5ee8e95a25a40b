"""A later micro-batch whose loss is made in another way than those that were checked is looked at before the step of its window."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import ddp, loader, relative_error, trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import AccumulationWarning, GradientAccumulation
from lightning_accum.fabric import Accumulator

Batch = dict[str, Tensor]
Loss = Callable[[Tensor, Batch], Tensor]


def _each(o: Tensor, b: Batch) -> Tensor:
    return F.cross_entropy(o, b["t"], reduction="none")


def _squares(o: Tensor, b: Batch) -> Tensor:
    return (o - b["x"]).square().sum(1)


TOLD: dict[str, Loss] = {
    "the mean of all where the mask is empty": lambda o, b: _each(o, b)[b["m"]].mean() if b["m"].any() else _each(o, b).mean(),
    "all rows by the number of some": lambda o, b: (
        (_each(o, b).sum() + (_squares(o, b) * b["m"]).sum()) / b["m"].sum().clamp(min=1)
    ),
    "all rows by a number": lambda o, b: (_each(o, b).sum() + (_squares(o, b) * b["m"]).sum()) / max(int(b["m"].sum()), 1),
    "another loss where no row is chosen": lambda o, b: _each(o, b).mean() if b["m"].any() else _squares(o, b).mean(),
}
EXACT: dict[str, Loss] = {
    "selected only where not all are": lambda o, b: _each(o, b)[b["m"]].mean() if not b["m"].all() else _each(o, b).mean(),
    "zero where the mask is empty": lambda o, b: _each(o, b)[b["m"]].mean() if b["m"].any() else (o * 0).mean(),
    "a masked sum by the number of some": lambda o, b: (_each(o, b) * b["m"]).sum() / b["m"].sum().clamp(min=1),
}


class Net(pl.LightningModule):
    def __init__(self, loss: Loss, optimizer: str = "SGD") -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 4)).double()
        self.loss, self.optimizer = loss, optimizer
        self.said_before_step: list[int] = []
        self.caught: list[Any] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.loss(self.net(batch["x"]), batch)

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.said_before_step.append(len([w for w in self.caught if "made in another way" in str(w.message)]))

    def configure_optimizers(self) -> Any:
        return getattr(torch.optim, self.optimizer)(self.parameters(), lr=0.1)


def batches(empty: int, number: int = 6, rows: int = 8, share: float = 1.0) -> list[Batch]:
    """Masks of which one is empty, and each other has the first two rows, and a share of all."""
    g = torch.Generator().manual_seed(1)
    found = []
    for place in range(number):
        x, t = torch.randn(rows, 4, generator=g, dtype=torch.float64), torch.randint(0, 4, (rows,), generator=g)
        mask = torch.rand(rows, generator=g) < share
        mask[:2] = True
        found.append({"x": x, "t": t, "m": mask & (place != empty)})
    return found


def fit(module: Net, data: list[Batch], **policy: Any) -> list[str]:
    """Train, and return what was warned of."""
    with warnings.catch_warnings(record=True) as module.caught:
        warnings.simplefilter("always")
        trainer(callbacks=[GradientAccumulation(**policy)]).fit(module, loader(data))
        return [str(w.message) for w in module.caught if issubclass(w.category, AccumulationWarning)]


def by_hand(loss: Loss, data: list[Batch], window: int, optimizer: str) -> Net:
    module = Net(loss, optimizer)
    steps = module.configure_optimizers()
    for start in range(0, len(data), window):
        whole = {name: torch.cat([batch[name] for batch in data[start : start + window]]) for name in data[0]}
        steps.zero_grad()
        module.training_step(whole, 0).backward()
        steps.step()
    return module


@pytest.mark.some_cases(3)
@pytest.mark.parametrize("empty", [1, 4])
@pytest.mark.parametrize("name", TOLD)
def test_what_does_not_add_up_is_told_of_before_the_step_of_its_window(name: str, empty: int) -> None:
    module = Net(TOLD[name])
    told = fit(module, batches(empty), window=3)
    assert len(told) == 1
    assert "is made in another way than that of the batches that were checked" in told[0]
    assert module.said_before_step == [int(empty < 3), 1]


@pytest.mark.some_cases(3)
@pytest.mark.parametrize("optimizer", ["SGD", "AdamW"])
@pytest.mark.parametrize("empty", [1, 4])
@pytest.mark.parametrize("name", EXACT)
def test_other_ways_that_add_up_are_exact_and_nothing_is_said(name: str, empty: int, optimizer: str) -> None:
    data, module = batches(empty, share=0.6), Net(EXACT[name], optimizer)
    assert fit(module, data, window=3) == []
    assert relative_error(module.parameters(), by_hand(EXACT[name], data, 3, optimizer).parameters()) <= 1e-12


def _with_counts_of_one(empty: int) -> list[Batch]:
    """Nine batches, of which four have one row of the mask each, and the one with number ``empty`` none."""
    data = batches(empty, number=9)
    for place in {2, 4, 5, 7} - {empty}:
        data[place]["m"] = torch.arange(8) == place
    return data


@pytest.mark.parametrize("name", ["all rows by the number of some", "all rows by a number"])
def test_a_count_of_1_that_is_one_is_no_false_alarm(name: str) -> None:
    data, module = _with_counts_of_one(9), Net(TOLD[name])
    assert fit(module, data, window=3) == []
    assert relative_error(module.parameters(), by_hand(TOLD[name], data, 3, "SGD").parameters()) <= 1e-12


@pytest.mark.parametrize("name", ["all rows by the number of some", "all rows by a number"])
def test_a_batch_in_which_most_rows_have_nothing_to_count_is_no_false_alarm(name: str) -> None:
    """Every part of it has a row that counts 1 for nothing, so that its parts say nothing of it; its micro-batch counts right."""
    masks = [[True, False], [False, True, False, True, False], [True], [False, True, True, False]]
    data = [
        {"x": batch["x"][: len(mask)], "t": batch["t"][: len(mask)], "m": torch.tensor(mask)}
        for batch, mask in zip(batches(9, number=4), masks, strict=True)
    ]
    module = Net(TOLD[name])
    assert fit(module, data, window=4) == []
    assert relative_error(module.parameters(), by_hand(TOLD[name], data, 4, "SGD").parameters()) <= 1e-12


def test_nothing_to_count_is_told_of_after_counts_of_1_too() -> None:
    module = Net(TOLD["all rows by the number of some"])
    (told,) = fit(module, _with_counts_of_one(8), window=3)
    assert "it has nothing to count, and counts 1" in told
    assert module.said_before_step == [0, 0, 1]


def test_a_sum_that_is_divided_by_a_count_of_0_is_an_error_before_the_step_of_its_window() -> None:
    module = Net(lambda o, b: _each(o, b).sum() / b["m"].sum())
    with pytest.raises(ValueError, match="a sum that is not 0 is divided by that count"):
        fit(module, batches(4), window=3)
    assert module.said_before_step == [0]


def test_a_part_of_a_later_batch_is_told_of_too() -> None:
    whole = [{name: torch.cat([batch[name] for batch in batches(4)[i : i + 3]]) for name in ("x", "t", "m")} for i in (0, 3)]
    (told,) = fit(Net(TOLD["the mean of all where the mask is empty"]), whole, micro_batch=8)
    assert "is made in another way" in told


def _by_the_first_row(o: Tensor, b: Batch) -> Tensor:
    return _each(o, b).mean() if b["m"][0] else _squares(o, b).mean()


def test_tasks_by_turns_whose_batches_say_which_they_are_are_no_false_alarm() -> None:
    """No order of the rows of both makes a batch of them: there is no full batch that the window could be compared with."""
    assert fit(Net(_by_the_first_row), batches(4), window=3) == []


def test_a_task_that_comes_later_is_checked_by_itself() -> None:
    def loss(o: Tensor, b: Batch) -> Tensor:
        return _each(o, b).mean() if b["m"][0] else ((d := _squares(o, b)) / d.detach().max()).mean()

    (told,) = fit(Net(loss), batches(4), window=3)
    assert "is made in another way" in told


class Tasks(Net):
    """Tokens in some loader batches, samples in others."""

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        if "words" in batch:
            return F.cross_entropy(self.net(batch["s"]).flatten(0, 1), batch["words"].flatten())
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("first", ["tokens", "samples"])
def test_tasks_over_tokens_and_over_samples_in_one_window_are_an_error_that_names_both(first: str) -> None:
    words = [{"s": torch.randn(8, 5, 4).double(), "words": torch.randint(0, 4, (8, 5))} for _ in range(6)]
    turns = zip(words, batches(9), strict=True) if first == "tokens" else zip(batches(9), words, strict=True)
    data = [batch for pair in turns for batch in pair]
    module = Tasks(lambda o, b: F.cross_entropy(o, b["t"]))
    with pytest.raises(ValueError, match=r"divided by .*(its samples and by what|counts and by its samples)"):
        fit(module, data, window=4)
    assert module.said_before_step == []
    assert fit(Tasks(module.loss), [data[0], data[2], data[1], data[3]], window=2) == []  # each in windows of its own


def test_what_is_seen_once_is_not_looked_at_again() -> None:
    data = batches(9)
    for batch in data[3:]:
        batch["m"] = torch.zeros_like(batch["m"])

    def forwards(batches: list[Batch]) -> int:
        module = Net(lambda o, b: F.cross_entropy(o, b["t"]) if b["m"].any() else _each(o, b).mean())
        number = [0]
        module.net.register_forward_hook(lambda *args: number.append(1))
        assert fit(module, batches, window=3) == []
        return sum(number)

    assert forwards(data) > forwards(data[:3]) + 3  # looked at
    assert forwards(data + data[3:] * 2) == forwards(data) + 6  # no other forwards than those of windows


def test_a_fit_that_goes_on_knows_what_was_seen(tmp_path: Path) -> None:
    loss = TOLD["the mean of all where the mask is empty"]
    first = trainer(callbacks=[GradientAccumulation(3)], max_epochs=1)
    first.fit(Net(loss), loader(batches(9)))
    first.save_checkpoint(tmp_path / "one.ckpt")
    second = trainer(callbacks=[GradientAccumulation(3)], max_epochs=2)
    with pytest.warns(AccumulationWarning, match="made in another way"):
        second.fit(Net(loss), loader(batches(4)), ckpt_path=tmp_path / "one.ckpt", weights_only=False)


def test_a_hand_written_loop_is_told_of_it() -> None:
    module = Net(TOLD["the mean of all where the mask is empty"])
    accumulator = Accumulator(
        None, module, module.configure_optimizers(), window=3, loss_of=lambda m, batch: m.training_step(batch, 0), log=False
    )

    def train() -> None:
        for batch in accumulator(batches(4)):
            accumulator.backward(module.training_step(batch, 0))
            accumulator.step()

    with pytest.warns(AccumulationWarning, match="made in another way"):
        train()


class OfRanks(Net):
    """One of two ranks has an empty mask in its second window."""

    def train_dataloader(self) -> Any:
        return loader(batches(4 if self.global_rank else 9))

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        known = self.trainer.strategy.accumulation.proven.ways
        with Path(f"rank{self.global_rank}").open("a") as file:
            file.write(f"{self.caught.count('told')} {len(known)} ")

    def on_train_start(self) -> None:
        self.trainer.strategy.accumulation.warn_once = lambda message: self.caught.append("told")


@pytest.mark.parametrize(("name", "told"), [("the mean of all where the mask is empty", 1), ("zero where the mask is empty", 0)])
def test_ranks_look_at_it_together(name: str, told: int, tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    run = trainer(ddp(), devices=2, callbacks=[GradientAccumulation(3)])
    run.fit(OfRanks({**TOLD, **EXACT}[name]))
    first = [Path(f"rank{rank}").read_text().split() for rank in range(2)]
    assert [numbers[::2] for numbers in first] == [["0", str(told)]] * 2
    assert [int(numbers[3]) - int(numbers[1]) for numbers in first] == [0, told]  # the rank that has it knows it now
