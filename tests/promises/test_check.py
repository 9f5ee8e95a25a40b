"""The check of the first batch: losses that do not add up stop a training before its first step, and nothing else is changed."""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from sharded import DoublePrecision, ShardedLanguage, fsdp1, fsdp2, needs_sharding_on_cpu
from support import ddp, loader, pad, relative_error, sentences, train_by_hand, trainer
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import (
    AccumulationWarning,
    DoesNotAddUpError,
    GradientAccumulation,
    SampleCount,
    TokenCount,
    UnreadableLossError,
)
from lightning_accum.weighing.verdict import parts_of

Loss = Callable[[Tensor, Tensor], Tensor]


class Classifier(pl.LightningModule):
    """Logits of four classes, and any loss of them."""

    def __init__(self, loss: Loss) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Dropout(0.3), nn.Linear(8, 4)).double()
        self.loss = loss
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net(batch[0]), batch[1])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps += 1

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def batches(rows: int = 8, number: int = 4) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(rows, 4, generator=generator, dtype=torch.float64), torch.randint(0, 4, (rows,), generator=generator)]
        for _ in range(number)
    ]


def _normalised(o: Tensor) -> Tensor:
    return (o - o.mean(0)) / o.std(0, correction=0).clamp(min=1e-6)


def _pairs(o: Tensor, t: Tensor) -> Tensor:
    same = (t[:, None] == t[None]).double()
    return (same * torch.cdist(o, o).square() + (1 - same) * F.relu(1 - torch.cdist(o, o) + 1e-9)).sum() / len(o) ** 2


ADD_UP: dict[str, Loss] = {
    "cross entropy": F.cross_entropy,
    "class weights": lambda o, t: F.cross_entropy(o, t, weight=torch.tensor([1.0, 2.0, 3.0, 4.0]).to(o)),
    "label smoothing": lambda o, t: F.cross_entropy(o, t, label_smoothing=0.1),
    "ignored labels": lambda o, t: F.cross_entropy(o, t.masked_fill(t == 0, -100)),
    "mean squared error": lambda o, t: F.mse_loss(o, F.one_hot(t, 4).to(o)),
    "binary cross entropy": lambda o, t: F.binary_cross_entropy_with_logits(o, F.one_hot(t, 4).to(o)),
    "a sum": lambda o, t: F.cross_entropy(o, t, reduction="sum"),
    "a sum over a constant in a tensor": lambda o, t: F.cross_entropy(o, t, reduction="sum") / torch.tensor(100.0),
    "a sum over its rows": lambda o, t: F.cross_entropy(o, t, reduction="sum") / len(t),
    "a masked mean": lambda o, t: (F.cross_entropy(o, t, reduction="none") * (t > 0)).sum() / (t > 0).sum(),
    "a constant factor": lambda o, t: 0.5 * F.cross_entropy(o, t) + 0.1 * F.cross_entropy(o, 3 - t),
    "focal": lambda o, t: ((1 - (c := F.cross_entropy(o, t, reduction="none")).neg().exp()).square() * c).mean(),
    "noise": lambda o, t: F.cross_entropy(o + torch.randn_like(o), t),
    "functional dropout": lambda o, t: F.cross_entropy(F.dropout(o, 0.5), t),
}
DO_NOT: dict[str, Loss] = {
    "contrastive": lambda o, t: F.cross_entropy(F.normalize(o) @ F.normalize(o.roll(1, 1)).T / 0.1, torch.arange(len(o))),
    "logsumexp of pairs": lambda o, t: ((o @ o.T).fill_diagonal_(-1e9).logsumexp(1) - (o * o.roll(1, 1)).sum(1)).mean(),
    "Barlow Twins": lambda o, t: (_normalised(o).T @ _normalised(o.roll(1, 1)) / len(o) - torch.eye(4)).square().sum(),
    "pairs": _pairs,
    "batch norm by function": lambda o, t: (F.batch_norm(o, None, None, training=True) * F.one_hot(t, 4)).sum(1).mean(),
    "normalised in the step": lambda o, t: (_normalised(o) * F.one_hot(t, 4)).sum(1).mean(),
    "the root of the rows in a tensor": lambda o, t: F.cross_entropy(o, t, reduction="sum") / torch.tensor(float(len(t))).sqrt(),
    "a loss times itself": lambda o, t: (c := F.cross_entropy(o, t)) * c.detach(),
    "the square of a mean times its rows": lambda o, t: F.cross_entropy(o, t).square() * len(o),
    "the root of a mean squared error times its rows": lambda o, t: F.mse_loss(o, F.one_hot(t, 4).to(o)).sqrt() * len(o),
    "softmax over the batch": lambda o, t: (o.softmax(0) * F.one_hot(t, 4)).sum(1).mean(),
    "Dice of the batch": lambda o, t: 1 - 2 * ((p := o.softmax(1)) * (y := F.one_hot(t, 4))).sum() / (p.sum() + y.sum() + 1),
    "class weights of the batch": lambda o, t: F.cross_entropy(o, t, weight=1 / torch.bincount(t, minlength=4).add(1).to(o)),
}


def _fit(module: pl.LightningModule, accumulation: GradientAccumulation, **arguments: Any) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(callbacks=[accumulation], **arguments).fit(module, loader(batches()))


@pytest.mark.parametrize("policy", [{"window": 2}, {"micro_batch": 3}], ids=["windows", "split"])
@pytest.mark.parametrize("name", ADD_UP)
def test_a_loss_that_adds_up_is_trained(name: str, policy: dict[str, Any]) -> None:
    _fit(module := Classifier(ADD_UP[name]), GradientAccumulation(**policy))
    assert module.steps == (2 if "window" in policy else 4)


@pytest.mark.parametrize("policy", [{"window": 2}, {"micro_batch": 3}], ids=["windows", "split"])
@pytest.mark.parametrize("name", DO_NOT)
def test_a_loss_that_does_not_add_up_is_refused_before_the_first_step(name: str, policy: dict[str, Any]) -> None:
    module = Classifier(DO_NOT[name])
    before = [parameter.clone() for parameter in module.parameters()]
    with pytest.raises(ValueError, match=r"do not add up|weight="):  # some are refused by the reader of the graph
        _fit(module, GradientAccumulation(**policy))
    assert module.steps == 0
    assert all(torch.equal(p, q) for p, q in zip(module.parameters(), before, strict=True))


def test_the_error_names_the_weight_that_adds_up() -> None:
    with pytest.raises(DoesNotAddUpError, match=r'GradientAccumulation\(weight="auto"\): with it they add up'):
        _fit(
            Classifier(lambda o, t: F.cross_entropy(o, t.masked_fill(t == 0, -100))), GradientAccumulation(2, weight=SampleCount())
        )


def test_imaginary_parts_of_gradients_are_checked() -> None:
    class Complex(Classifier):
        def __init__(self) -> None:
            super().__init__(F.cross_entropy)
            self.phase = nn.Parameter(torch.zeros(4, dtype=torch.complex128))

        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits = self.net(batch[0])
            return self.loss(logits + self.phase.imag * logits.detach().mean(0), batch[1])

    module = Complex()
    with pytest.raises(DoesNotAddUpError):
        trainer(callbacks=[GradientAccumulation(2)]).fit(module, loader(batches()))
    assert module.steps == 0


def test_the_error_says_by_how_much() -> None:
    # of rows that are all the same, each of eight parts has the loss of all, and they are added as they are
    data = [[value[:1].expand(8, *value.shape[1:]).clone() for value in batch] for batch in batches()]
    with pytest.raises(DoesNotAddUpError, match=r"8 rows .* parts of single rows .* is 0\.88 of its size off"):
        trainer(callbacks=[GradientAccumulation(2, weight=lambda batch: 1.0)]).fit(Classifier(F.cross_entropy), loader(data))


@pytest.mark.parametrize("policy", [{"weight": "equal"}, {"check": False}])
def test_the_mean_of_means_and_no_check_can_be_had(policy: dict[str, Any]) -> None:
    _fit(module := Classifier(DO_NOT["the root of the rows in a tensor"]), GradientAccumulation(2, **policy))
    assert module.steps == 2


@pytest.mark.parametrize(
    ("policy", "batch_rows", "reason"),
    [
        ({"window": 2, "check": False}, 8, None),
        ({"window": 1}, 8, None),
        ({"window": 2, "weight": "equal"}, 8, "a mean of means was asked for"),
        ({"micro_batch": 4, "split": lambda batch, size: [batch]}, 8, "split= does not cut a micro-batch in two"),
    ],
)
def test_the_line_at_the_start_says_why_a_fit_is_not_checked(
    policy: dict[str, Any], batch_rows: int, reason: str | None, caplog: Any
) -> None:
    module = Classifier(F.cross_entropy)
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(callbacks=[GradientAccumulation(**policy)]).fit(module, loader(batches(batch_rows)))
    (line,) = [record.message for record in caplog.records if record.message.startswith("GradientAccumulation: ")]
    assert (f"; not checked: {reason}" in line) if reason else "checked" not in line


def test_a_module_that_optimizes_by_itself_is_not_checked_and_the_line_says_so(caplog: Any) -> None:
    class ByItself(Classifier):
        automatic_optimization = False

        def training_step(self, batch: Any, batch_idx: int) -> None:
            self.optimizers().zero_grad()
            self.manual_backward(super().training_step(batch, batch_idx))
            self.optimizers().step()

    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        _fit(ByItself(F.cross_entropy), GradientAccumulation(2))
    assert any("; not checked: training_step steps" in record.message for record in caplog.records)


@pytest.mark.parametrize("before", [{"check": False}, {"weight": "equal"}, {"weight": SampleCount()}])
def test_a_fit_that_goes_on_from_one_that_was_not_checked_is(before: dict[str, Any], tmp_path: Any) -> None:
    first = trainer(callbacks=[GradientAccumulation(2, **before)], max_epochs=1)
    first.fit(Classifier(F.cross_entropy), loader(batches()))
    first.save_checkpoint(tmp_path / "one.ckpt")
    second = trainer(callbacks=[GradientAccumulation(2)], max_epochs=2)
    with pytest.raises(DoesNotAddUpError):
        second.fit(
            Classifier(DO_NOT["the root of the rows in a tensor"]),
            loader(batches()),
            ckpt_path=tmp_path / "one.ckpt",
        )


def _grows_with_rows_of_class_3(o: Tensor, t: Tensor) -> Tensor:
    return F.cross_entropy(o, t) * (1.0 + len(t) * int((t == 3).any()))


def _of_two_rows(first_of_class_3: int) -> list[list[Tensor]]:
    data = batches(2, 8)
    for index, (_, t) in enumerate(data):
        t[:] = 3 if index >= first_of_class_3 else torch.tensor([0, 1])
    return data


@pytest.mark.parametrize("bad_batch", [0, 1, 2, 3])
def test_batches_of_few_rows_are_checked_before_the_first_step_of_their_window_until_there_were_eight(bad_batch: int) -> None:
    with pytest.raises(DoesNotAddUpError) as caught:
        trainer(callbacks=[GradientAccumulation(4)]).fit(
            module := Classifier(_grows_with_rows_of_class_3), loader(_of_two_rows(bad_batch))
        )
    assert module.steps == 0
    assert "Optimizer steps were made before" not in str(caught.value)


def test_what_is_said_of_few_rows_is_how_many_they_were(caplog: Any) -> None:
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        trainer(callbacks=[GradientAccumulation(4)]).fit(Classifier(F.cross_entropy), loader(batches(3)))
    start, end = [record.message for record in caplog.records if "checked" in record.message]
    assert start.endswith(" on 3 rows.")
    assert "; checked: adds up to " in start
    assert end.startswith("GradientAccumulation: checked: adds up to ")
    assert "rows" not in end


def test_a_fit_that_goes_on_from_one_that_had_not_seen_eight_rows_is_checked(tmp_path: Any) -> None:
    first = trainer(callbacks=[GradientAccumulation(2)], max_epochs=1)
    first.fit(Classifier(F.cross_entropy), loader(batches(3, 2)))
    first.save_checkpoint(tmp_path / "one.ckpt")
    second = trainer(callbacks=[GradientAccumulation(2)], max_epochs=2)
    with pytest.raises(DoesNotAddUpError):
        second.fit(Classifier(DO_NOT["the root of the rows in a tensor"]), loader(batches(3, 2)), ckpt_path=tmp_path / "one.ckpt")


def test_rows_whose_loss_is_nothing_beside_that_of_others_do_not_end_a_fit() -> None:
    data = batches(4)
    module = Classifier(lambda o, t: (o.square().sum(1) * (t != 0)).mean().sqrt() if (t != 0).any() else 1e-9 * o.mean() * len(t))
    data[0][1][:], data[1][1][:] = 1, 0
    trainer(callbacks=[GradientAccumulation(1, micro_batch=2)]).fit(module, loader(data[:1]))
    assert module.steps == 1


# --- a constant beside the count --------------------------------------------------------------------------------------


def _beside_the_count(constant: float, dtype: torch.dtype = torch.float64) -> Loss:
    return lambda o, t: (F.cross_entropy(o, t, reduction="none") * (t > 0)).sum() / ((t > 0).to(dtype).sum() + constant)


@pytest.mark.parametrize("policy", [{"window": 4}, {"micro_batch": 3}, {"micro_batch": 1}], ids=["windows", "split", "rows"])
@pytest.mark.parametrize("rows", [2, 8])
@pytest.mark.parametrize("constant", [1e-12, 1e-8, 1e-4, 1.0])
def test_a_constant_beside_the_count_is_in_a_window_once(constant: float, rows: int, policy: dict[str, Any]) -> None:
    if policy == {"micro_batch": 1} and constant >= 1:
        pytest.skip("is refused: parts of a row each do not tell it from what goes with their number")
    data = batches(rows)
    module, by_hand = Classifier(_beside_the_count(constant)), Classifier(_beside_the_count(constant))
    for net in (module.net, by_hand.net):
        net[2].p = 0.0
    trainer(callbacks=[GradientAccumulation(**policy)]).fit(module, loader(data))
    windows = data if "micro_batch" in policy else [[torch.cat(pair) for pair in zip(*data, strict=True)]]
    train_by_hand(by_hand, windows, epochs=1)
    assert relative_error(module.parameters(), by_hand.parameters()) <= 1e-12


def test_a_constant_below_rounding_is_none() -> None:
    module = Classifier(_beside_the_count(1e-8, torch.float32))
    seen = []
    module.on_train_batch_end = lambda *_: seen.append(module.trainer.strategy.accumulation.window.constant)
    _fit(module, GradientAccumulation(2))
    assert seen == [0.0] * 4


def test_a_constant_goes_into_checkpoints(tmp_path: Any) -> None:
    def module() -> Classifier:
        (made := Classifier(_beside_the_count(1.0))).net[2].p = 0.0
        return made

    first = trainer(callbacks=[GradientAccumulation(4)], max_epochs=1)
    first.fit(module(), loader(batches()))
    first.save_checkpoint(tmp_path / "one.ckpt")
    second = trainer(callbacks=[GradientAccumulation(4)], max_epochs=2)
    second.fit(resumed := module(), loader(batches()), ckpt_path=tmp_path / "one.ckpt")
    window = [torch.cat(pair) for pair in zip(*batches(), strict=True)]
    assert relative_error(resumed.parameters(), train_by_hand(module(), [window], epochs=2).parameters()) <= 1e-12


def test_a_constant_beside_the_count_is_in_a_window_of_two_ranks_once(tmp_path: Any, monkeypatch: Any) -> None:
    class OfARank(Classifier):
        def train_dataloader(self) -> Any:
            return loader(batches(8, 4)[self.global_rank :: 2])

        def on_train_end(self) -> None:
            torch.save([parameter.detach() for parameter in self.parameters()], f"rank{self.global_rank}")

    monkeypatch.chdir(tmp_path)
    (module := OfARank(_beside_the_count(1.0))).net[2].p = 0.0
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer(callbacks=[GradientAccumulation(2)], strategy=ddp(), devices=2).fit(module)
    (by_hand := Classifier(_beside_the_count(1.0))).net[2].p = 0.0
    train_by_hand(by_hand, [[torch.cat(pair) for pair in zip(*batches(8, 4), strict=True)]], epochs=1)
    for rank in range(2):
        assert relative_error(torch.load(f"rank{rank}"), by_hand.parameters()) <= 1e-12


def test_a_window_of_one_batch_on_one_rank_is_plain_lightning() -> None:
    calls = []
    module = Classifier(lambda o, t: calls.append(1) or DO_NOT["contrastive"](o, t))
    _fit(module, GradientAccumulation(1))
    assert len(calls) == module.steps == 4


class Remembering(Classifier):
    """Everything that a step can change: buffers, parameters by their data, attributes, random numbers, metrics, logs."""

    def __init__(self) -> None:
        super().__init__(F.cross_entropy)
        self.norm = nn.BatchNorm1d(4).double()
        self.momentum = nn.Linear(4, 4).double().requires_grad_(False)
        self.register_buffer("queue", torch.zeros(3, 4, dtype=torch.float64))
        self.seen: list[int] = []
        self.draws: list[float] = []
        self.logged: list[str] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.momentum.weight.data.mul_(0.9).add_(self.net[0].weight[:4].detach(), alpha=0.1)
        self.queue.copy_(torch.cat((batch[0].mean(0, keepdim=True), self.queue[:2])))
        self.seen.append(len(batch[0]))
        self.draws.append(torch.rand(()).item() + random.random() + np.random.rand())
        self.log("loss", loss := super().training_step([self.norm(batch[0]), batch[1]], batch_idx))
        return loss


def test_everything_is_as_if_there_had_been_no_check() -> None:
    def trained(check: bool) -> Remembering:
        pl.seed_everything(3, verbose=False)
        module = Remembering()
        _fit(module, GradientAccumulation(2, check=check), max_epochs=2)
        return module

    with_it, without = trained(True), trained(False)
    assert with_it.seen == without.seen == [8] * 8
    assert with_it.draws == without.draws
    for name, value in without.state_dict().items():
        assert torch.equal(with_it.state_dict()[name], value), name


def test_a_checked_fit_is_not_checked_again_when_it_is_resumed(tmp_path: Any) -> None:
    calls: list[int] = []

    def module() -> Classifier:
        return Classifier(lambda o, t: calls.append(len(o)) or F.cross_entropy(o, t))

    first = trainer(callbacks=[GradientAccumulation(2)], max_epochs=1)
    first.fit(module(), loader(batches()))
    first.save_checkpoint(tmp_path / "one.ckpt")
    calls.clear()
    second = trainer(callbacks=[GradientAccumulation(2)], max_epochs=2)
    second.fit(module(), loader(batches()), ckpt_path=tmp_path / "one.ckpt")
    assert calls == [8] * 4


@pytest.mark.parametrize("clamp", [lambda n: max(int(n), 1), lambda n: n.clamp(min=1)], ids=["number", "tensor"])
def test_a_part_without_any_label_weighs_nothing_though_its_count_is_clamped(clamp: Any) -> None:
    def masked(o: Tensor, t: Tensor) -> Tensor:
        return torch.where(t != -100, o.square().sum(1), 0.0).sum() / clamp((t != -100).sum())

    data = batches()
    data[1][1][:] = -100
    data[0][1][-3:] = -100
    module, by_hand = Classifier(masked), Classifier(masked)
    for net in (module.net, by_hand.net):
        net[2].p = 0.0
    trainer(callbacks=[GradientAccumulation(2)]).fit(module, loader(data))
    train_by_hand(by_hand, [[torch.cat(pair) for pair in zip(*data[i : i + 2], strict=True)] for i in (0, 2)], epochs=1)
    assert relative_error(module.parameters(), by_hand.parameters()) <= 1e-12


def _rows_one_by_one(number: int = 8) -> list[list[Tensor]]:
    return [[value[row : row + 1] for value in batches(number, 1)[0]] for row in range(number)]


@pytest.mark.parametrize("name", ADD_UP)
def test_loader_batches_of_one_row_are_checked(name: str, caplog: Any) -> None:
    module = Classifier(ADD_UP[name])
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"), warnings.catch_warnings():
        warnings.simplefilter("error", AccumulationWarning)
        trainer(callbacks=[GradientAccumulation(4)]).fit(module, loader(_rows_one_by_one()))
    assert module.steps == 2
    start, end = [record.message for record in caplog.records if "checked" in record.message]
    assert "; checked: adds up to " in start
    assert start.endswith(" on 1 row.")
    assert end.endswith(" on 4 rows.")


@pytest.mark.parametrize("name", [name for name in DO_NOT if name not in ("batch norm by function", "a loss times itself")])
def test_of_losses_of_single_rows_that_do_not_add_up_is_warned_or_they_are_refused(name: str) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        with suppress(UnreadableLossError):
            trainer(callbacks=[GradientAccumulation(4)]).fit(Classifier(DO_NOT[name]), loader(_rows_one_by_one(4)))
            (said,) = [str(each.message) for each in caught if issubclass(each.category, AccumulationWarning)]
            assert said.startswith("The loader yields single rows, and the loss of two together is not the sum of theirs")


@pytest.mark.parametrize("rows", [0, 1])
def test_a_batch_without_two_rows_is_passed_over(rows: int) -> None:
    module = Classifier(DO_NOT["the root of the rows in a tensor"])
    first = [[value[:1] for value in batches()[0]]] if rows else [None]
    with pytest.raises(DoesNotAddUpError):
        trainer(callbacks=[GradientAccumulation(3)]).fit(module, loader([*first, *batches()]))
    assert module.steps == 0


def test_other_rows_are_tried_where_the_first_weigh_nothing() -> None:
    data = batches()
    for batch in data:
        batch[1][:4] = -100
    with pytest.raises(DoesNotAddUpError):
        trainer(callbacks=[GradientAccumulation(micro_batch=4)]).fit(
            Classifier(lambda o, t: F.cross_entropy(o, t) * (1 + 0.1 * len(t))), loader(data)
        )


def test_a_batch_that_weighs_nothing_is_passed_over() -> None:
    def masked(o: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(o, t) * (1 + 0.1 * len(t))  # a factor that goes with the batch

    data = batches()
    data[0][1][:] = -100
    with pytest.raises(DoesNotAddUpError):
        trainer(callbacks=[GradientAccumulation(2)]).fit(Classifier(masked), loader(data))


def test_ranks_stop_together_where_one_finds_that_losses_do_not_add_up() -> None:
    class OnOneRank(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            self.loss = DO_NOT["the root of the rows in a tensor"] if self.global_rank == 1 else F.cross_entropy
            return super().training_step(batch, batch_idx)

    with pytest.raises(Exception, match="do not add up"):
        _fit(OnOneRank(F.cross_entropy), GradientAccumulation(2), strategy=ddp(), devices=2)


@pytest.mark.parametrize("window", [1, 2])
def test_a_loss_that_gathers_its_window_from_all_ranks_is_left_alone(window: int, tmp_path: Any, monkeypatch: Any) -> None:
    class Gathers(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            own = F.normalize(self.net(batch[0]))
            of_all = self.all_gather(F.normalize(self.net(batch[0].flip(1))), sync_grads=True).flatten(0, 1)
            return F.cross_entropy(own @ of_all.T, torch.arange(len(own)) + self.global_rank * len(own))

        def on_train_end(self) -> None:
            Path(f"rank{self.global_rank}").write_text(str(self.trainer.strategy.accumulation.verdict))

    monkeypatch.chdir(tmp_path)
    if window == 2:  # a part of the window knows nothing of the others
        with pytest.raises(Exception, match="do not add up"):
            _fit(Gathers(F.cross_entropy), GradientAccumulation(window), strategy=ddp(), devices=2)
        return
    _fit(Gathers(F.cross_entropy), GradientAccumulation(window), strategy=ddp(), devices=2)
    assert Path("rank0").read_text() == "not checked: training_step gathers from other ranks"


def test_terms_by_their_own_weights_add_up() -> None:
    def two(o: Tensor, t: Tensor) -> Tensor:
        return F.cross_entropy(o, t) + F.mse_loss(o, torch.zeros_like(o))

    def labels(batch: Any) -> Tensor:
        return (batch[1] != -100).sum()

    data = batches()
    for batch in data:
        batch[1][::3] = -100
    accumulation = GradientAccumulation(micro_batch=4, weight=[labels, SampleCount()])
    trainer(callbacks=[accumulation]).fit(module := Classifier(two), loader(data))
    assert module.steps == 4
    with pytest.warns(UserWarning, match=r"terms of the loss do not add up by one weight.* of its size off"):
        trainer(callbacks=[GradientAccumulation(2)]).fit(Classifier(two), loader(data))


def test_parts_are_few_rows_and_of_unequal_sizes() -> None:
    assert parts_of(64, None) == [1, 2, 5]
    assert parts_of(64, 4) == [1, 2, 1]
    assert parts_of(64, 3) == [1, 2, 1]
    assert parts_of(3, None) == [1, 2]
    assert parts_of(64, 1) == parts_of(2, None) == [1, 1]


def test_token_counts_that_forget_the_shift_are_found() -> None:
    class Shifting(Classifier):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            logits = self.net(batch["x"])
            return F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten())

    generator = torch.Generator().manual_seed(1)
    labels = torch.randint(0, 4, (6, 5), generator=generator)
    for row in range(6):
        labels[row, 1 + row % 4 :] = -100
    data = loader([{"x": torch.randn(6, 5, 4, generator=generator, dtype=torch.float64), "labels": labels}] * 4)
    trainer(callbacks=[GradientAccumulation(2, weight=TokenCount())]).fit(Shifting(F.cross_entropy), data)
    with pytest.raises(DoesNotAddUpError, match=r"weight=.auto.|weight=TokenCount\(\)"):
        trainer(callbacks=[GradientAccumulation(2, weight=TokenCount(shift=False))]).fit(Shifting(F.cross_entropy), data)


# --- sharded modules --------------------------------------------------------------------------------------------------


class Sharded(ShardedLanguage):
    """Checked after a validation, which leaves parameters gathered, on ranks whose batches have other sizes."""

    def __init__(self, seen: str = "") -> None:
        super().__init__()
        self.seen = seen

    def train_dataloader(self) -> Any:
        rows, rank = sentences(30), self.trainer.global_rank
        return loader([pad(rows[i + 2 * rank : i + 5]) for i in range(0, 30, 5)])

    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)

    def on_train_batch_end(self, *args: Any) -> None:
        Path(f"rank{self.global_rank}").write_text(str(self.trainer.strategy.accumulation.verdict))

    def refuse_few_rows(self, hidden: Tensor) -> Tensor:
        if len(hidden) < 3:
            raise ValueError("few rows")
        return hidden

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.seen == "fails" and len(batch["labels"]) < 3:
            raise ValueError("few rows")
        if self.seen == "fails inside":
            self.net.blocks[1].dropout1.forward = self.refuse_few_rows
        if self.seen == "none" and len(batch["labels"]) < 3 and self.global_rank == 1:
            self.net(batch["input_ids"])
            return None
        if self.seen == "pairs":
            hidden = self.net(batch["input_ids"]).mean(1)
            return ((hidden @ hidden.T).logsumexp(1) - (hidden * hidden).sum(1)).mean()
        if self.seen == "constant":
            return self.net(batch["input_ids"]).square().mean() * (1 + self.net.head.weight.shape[0] / len(batch["labels"]))
        return super().training_step(batch, batch_idx)


class ShardedRows(Sharded):
    """Its batches are single rows, without a validation before: parameters are sharded in the first forward of the check."""

    def train_dataloader(self) -> Any:
        return loader([pad([row]) for row in sentences(12)[self.trainer.global_rank :: 2]])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.seen == "squeezes" and len(batch["labels"]) > 1:
            raise ValueError("a step for single rows")
        return super().training_step(batch, batch_idx)


def _fit_sharded(engine: str, module: pl.LightningModule, **policy: Any) -> pl.Trainer:
    of_engine: dict[str, Any] = (
        {"strategy": fsdp2()} if engine == "fsdp2" else {"strategy": fsdp1(), "plugins": [DoublePrecision()]}
    )
    sanity = 0 if isinstance(module, ShardedRows) else 1
    run = trainer(devices=2, num_sanity_val_steps=sanity, callbacks=[GradientAccumulation(2, **policy)], **of_engine)
    run.fit(module)
    return run


@needs_sharding_on_cpu
@pytest.mark.some_cases(1)
@pytest.mark.parametrize("seen", ["", "fails", "fails inside", "none"])
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_sharded_modules_train_as_without_the_check(engine: str, seen: str, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    if (engine, seen) == ("fsdp1", "fails inside"):
        with pytest.raises(Exception, match=r"cannot be taken back here. Leave out the check"):
            _fit_sharded(engine, Sharded(seen))
        return
    checked = _fit_sharded(engine, Sharded(seen)).whole
    raises = "not checked: training_step raises ValueError"
    verdicts = {
        "": ("checked: adds up to ", "checked: adds up to "),
        "fails": (raises, raises),
        "fails inside": (raises, raises),
        "none": ("not checked: another rank cannot", "not checked: training_step returns None"),
    }
    assert all(Path(f"rank{rank}").read_text().startswith(verdict) for rank, verdict in enumerate(verdicts[seen]))
    unchecked = _fit_sharded(engine, Sharded(seen), check=False).whole
    assert all(torch.equal(checked[name], value) for name, value in unchecked.items())


@needs_sharding_on_cpu
@pytest.mark.some_cases(1, 2)
@pytest.mark.parametrize(
    ("engine", "seen", "verdict"),
    [
        ("fsdp2", "squeezes", "not checked: training_step raises ValueError"),
        ("fsdp2", "", "checked: adds up to "),
        ("fsdp2", "pairs", "not checked: the loader yields single rows, and the loss of two together is not the sum"),
        ("fsdp1", "squeezes", "not checked: a rank has no batch of enough rows"),
    ],
)
def test_single_rows_of_sharded_modules_are_checked_where_a_step_that_fails_can_be_taken_back(
    engine: str, seen: str, verdict: str, tmp_path: Any, monkeypatch: Any
) -> None:
    if torch.__version__ < "2.10" and engine == "fsdp2":
        verdict = "not checked: a rank has no batch of enough rows"
    monkeypatch.chdir(tmp_path)
    checked = _fit_sharded(engine, ShardedRows(seen)).whole
    assert all(Path(f"rank{rank}").read_text().startswith(verdict) for rank in range(2))
    unchecked = _fit_sharded(engine, ShardedRows(seen), check=False).whole
    assert all(torch.equal(checked[name], value) for name, value in unchecked.items())


@needs_sharding_on_cpu
@pytest.mark.some_cases(0, 2)
@pytest.mark.parametrize("seen", ["pairs", "constant"])
@pytest.mark.parametrize("engine", ["fsdp2", "fsdp1"])
def test_sharded_losses_that_do_not_add_up_are_refused(engine: str, seen: str, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match="do not add up"):
        _fit_sharded(engine, Sharded(seen))


class Graphs(pl.LightningModule):
    """The mean over graphs of a sum over their nodes, which lie end to end."""

    def __init__(self, joined: int, counts: Sequence[tuple[int, ...]]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(3, 1).double()
        self.joined, self.counts = joined, counts

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        nodes, graphs = self.net(batch["nodes"]).squeeze(1), torch.zeros_like(batch["energy"])
        return F.mse_loss(graphs.index_add(0, batch["graph"], nodes), batch["energy"])

    def train_dataloader(self) -> Any:
        generator = torch.Generator().manual_seed(1)
        joined = [sum(self.counts[first : first + self.joined], ()) for first in range(0, len(self.counts), self.joined)]
        nodes = torch.randn(30, 3, dtype=torch.float64, generator=generator)
        energy = torch.randn(8, dtype=torch.float64, generator=generator)
        found, node, graph = [], 0, 0
        for of_batch in joined:
            index = torch.repeat_interleave(torch.arange(len(of_batch)), torch.tensor(of_batch))
            size = len(of_batch)
            found.append({"nodes": nodes[node : node + len(index)], "graph": index, "energy": energy[graph : graph + size]})
            node, graph = node + len(index), graph + size
        return loader(found)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=0.1)


@pytest.mark.parametrize(
    "counts",
    [[(2, 5, 3), (4, 1, 6), (3, 3)], [(2, 5, 3), (4,), (3, 3)], [(4,), (2, 5, 3), (3, 3)]],
    ids=["", "then one", "first one"],
)
def test_batches_of_graphs_are_no_rows_to_check_and_their_windows_are_exact(counts: Sequence[tuple[int, ...]]) -> None:
    whole = Graphs(3, counts)
    trainer("auto", max_epochs=3).fit(whole)
    module = Graphs(1, counts)
    run = trainer(max_epochs=3, callbacks=[GradientAccumulation(3)])
    run.fit(module)
    assert run.global_step == 3
    assert relative_error(module.parameters(), whole.parameters()) < 1e-12


# --- what is counted, on all ranks ------------------------------------------------------------------------------------


class CountsOfRanks(Classifier):
    """Rank 0 counts rows, and rank 1 what is asked for, which the check of the first window does not see."""

    def __init__(self, kind: str) -> None:
        super().__init__(F.cross_entropy)
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, y = self.net(batch[0]), F.one_hot(batch[1], 4).to(batch[0])
        is_other = self.global_rank == 1 or self.kind == "in turn"
        if not is_other or batch_idx < 2 or (self.kind == "in turn" and batch_idx >= 4):
            return F.cross_entropy(logits, batch[1])
        return F.cross_entropy(logits, y.argmax(1)) if self.kind == "rows" else F.mse_loss(logits, y)

    def train_dataloader(self) -> Any:
        return loader(batches(8, 6))

    def on_train_end(self) -> None:
        Path(f"rank{self.global_rank}").write_text(str(self.steps))


def test_a_window_that_counts_rows_on_one_rank_and_elements_on_another_is_an_error_that_names_both() -> None:
    with pytest.raises(Exception, match="divided by its samples and by what its mean squared error counts"):
        trainer(callbacks=[GradientAccumulation(2)], strategy=ddp(), devices=2).fit(CountsOfRanks("elements"))


@pytest.mark.parametrize("kind", ["rows", "in turn"])
def test_ranks_that_count_the_same_in_each_window_train(kind: str, tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.chdir(tmp_path)
    trainer(callbacks=[GradientAccumulation(2)], strategy=ddp(), devices=2).fit(CountsOfRanks(kind))
    assert [Path(f"rank{rank}").read_text() for rank in range(2)] == ["3", "3"]


class FactorsOfRanks(Classifier):
    """Rank 1 multiplies a mean by another number than rank 0, or has what stands for a loss where a batch has nothing."""

    def __init__(self, kind: str) -> None:
        super().__init__(F.cross_entropy)
        self.kind = kind

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, labels = self.net(batch[0]), batch[1].masked_fill(batch[1] == 0, -100)
        of_labels, of_rows = F.cross_entropy(logits, labels), F.cross_entropy(logits, batch[1], reduction="none").mean()
        if self.kind == "nothing":
            return 0.0 * logits.sum() if self.global_rank else of_labels
        if self.kind == "nothing, of two terms":
            return of_labels + (0.0 * logits.sum() if self.global_rank else of_rows)
        factor = {"zero": 0.0, "factor": 0.25}[self.kind.partition(",")[0]] if self.global_rank else 1.0
        return factor * of_rows + (of_labels if "two terms" in self.kind else 0.0)

    def on_train_batch_end(self, *args: Any) -> None:
        closed = self.trainer.strategy.accumulation.closed
        Path(f"rank{self.global_rank}").write_text(str(closed.is_doubtful))

    def train_dataloader(self) -> Any:
        return loader(batches(8, 1))


@pytest.mark.some_cases(2)
@pytest.mark.parametrize(
    ("kind", "is_doubtful"),
    [
        ("zero", True),
        ("nothing", False),
        ("factor", True),
        ("factor, two terms", True),
        ("zero, two terms", True),
        ("nothing, of two terms", False),
    ],
)
def test_a_factor_that_is_another_one_on_a_rank_is_warned_of_and_what_stands_for_nothing_is_not(
    kind: str, is_doubtful: bool, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.chdir(tmp_path)
    trainer(callbacks=[GradientAccumulation(1, check=False)], strategy=ddp(), devices=2).fit(FactorsOfRanks(kind))
    assert [Path(f"rank{rank}").read_text() for rank in range(2)] == [str(is_doubtful)] * 2


# --- what no row of the first batches shows ---------------------------------------------------------------------------

_HAS_LATER = {
    "another factor": lambda o, t, p, is_later: (2.0 if is_later else 1.0) * F.cross_entropy(o, t),
    "another sign": lambda o, t, p, is_later: -F.cross_entropy(o, t) if is_later else F.cross_entropy(o, t),
    "alpha": lambda o, t, p, is_later: torch.add(p.sum() * 0, F.cross_entropy(o, t), alpha=2 if is_later else 1),
    "another term": lambda o, t, p, is_later: F.cross_entropy(o, t) + (o.square().mean() if is_later else 0.0),
    "a penalty": lambda o, t, p, is_later: F.cross_entropy(o, t) + (p.square().sum() if is_later else 0.0),
    "another penalty": lambda o, t, p, is_later: F.cross_entropy(o, t) + (p.square().sum() if is_later else p[0].square().sum()),
    "a choice": lambda o, t, p, is_later: torch.where(
        torch.tensor(is_later), o.square().sum(1).mean(), F.cross_entropy(o, t, reduction="none").mean()
    ),
    "the largest label": lambda o, t, p, is_later: F.cross_entropy(o, t, reduction="none").sum() / int(t.max() + 1),
}


@pytest.mark.parametrize("name", _HAS_LATER)
def test_what_only_a_later_window_has_is_told_of(name: str) -> None:
    data = batches(4, 8)
    for _, labels in data:
        labels[:] = torch.tensor([2, 2, 2, 1])
    data[5][1][1] = 3
    module = Classifier(lambda o, t: _HAS_LATER[name](o, t, module.net[0].weight, bool((t == 3).any())))
    fit = partial(trainer(callbacks=[GradientAccumulation(4)]).fit, module, loader(data))
    if name in ("a choice", "the largest label"):
        with pytest.raises(UnreadableLossError, match="found no denominator"):
            fit()
        return
    with pytest.warns(AccumulationWarning, match="A factor of the loss changes inside a window|terms of the loss"):
        fit()


class _Kernels(nn.Module):
    """As a device that takes another kernel for a single row: what it computes is the same but for rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(8, 2**14)), nn.Parameter(torch.randn(8, 2**14))
        self.register_buffer("out", torch.randn(8, 2**14) / 2**8)

    def forward(self, values: Tensor) -> Tensor:
        values = values[:, None, None]
        is_single = len(values) == 1
        hidden = values * self.weight - 100 * self.weight if is_single else (values - 100) * self.weight
        return ((hidden + self.bias).relu() * self.out).sum((1, 2))


class _OfKernels(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = _Kernels()

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch) - 1).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


@pytest.mark.parametrize("policy", [{"window": 2}, {"micro_batch": 3}], ids=["windows", "split"])
def test_slopes_of_relu_that_rounding_changes_are_no_break(policy: dict[str, Any], caplog: Any) -> None:
    module = _OfKernels()
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        trainer(callbacks=[GradientAccumulation(**policy)]).fit(module, loader(_rows_of_kernels()))
    assert module.global_step == (4 if "window" in policy else 8)
    found = [record.message.partition("adds up to ")[2] for record in caplog.records]
    assert max(float(words.rstrip(".")) for words in found if words) > 1e-4  # more than rounding makes of the loss


def test_slopes_of_relu_that_rounding_changes_are_no_break_of_row_wise() -> None:
    trainer(callbacks=[GradientAccumulation(micro_batch=1, row_wise="net")]).fit(module := _OfKernels(), loader(_rows_of_kernels()))
    assert module.global_step == 8


def _rows_of_kernels() -> list[Tensor]:
    return list(100 + torch.randn(8, 8, generator=torch.Generator().manual_seed(1)))
