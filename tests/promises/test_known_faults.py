"""What was found wrong from outside, each stated as what should happen. An expected failure names the issue that mends it.

The number in a reason is today's relative error of what training changed in the parameters.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from processes import run_ranks
from support import Interrupted, SaveAfter, Toy, error_of_updates, fit, joined, labelled, loader, relative_error, warned
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.checkpoint import checkpoint

from lightning_accum import AccumulationError, AccumulationWarning, GradientAccumulation
from lightning_accum.fabric import Accumulator
from lightning_accum.testing import EXACT, compare_window_with_batch, sgd


def open_until(issue: int, why: str) -> pytest.MarkDecorator:
    """What is wrong today, and the issue that mends it."""
    return pytest.mark.xfail(strict=True, raises=AssertionError, reason=f"issue {issue}: {why}")


def case(*values: Any, issue: int, why: str) -> Any:
    """One case of a table that is open."""
    return pytest.param(*values, marks=open_until(issue, why))


def exact_or_refused(
    module: Any, batches: Any, policy: Any, *, optimizer: Any = sgd, limit: float = EXACT, may_warn: bool = False, **arguments: Any
) -> None:
    """Assert that windows take the steps of their full batches, or that the package objects before the first step.

    Args:
        module, batches, policy, optimizer: as in ``compare_window_with_batch``.
        limit: of the relative error of what training changed.
        may_warn: whether a warning of the package is enough, where no deviation can be measured before the first step.
        arguments: of ``compare_window_with_batch``.
    """
    seen_at_steps: list[int] = []

    def make_optimizer(parameters: Any) -> torch.optim.Optimizer:
        made = optimizer(parameters)
        made.register_step_post_hook(lambda *_: seen_at_steps.append(len(caught)))
        return made

    refusal = None
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = compare_window_with_batch(module, batches, policy, optimizer=make_optimizer, **arguments)
        except AccumulationError as error:
            refusal = error
    if refusal is not None:
        assert not seen_at_steps, f"refused after {len(seen_at_steps)} optimizer steps: {refusal}"
        return
    is_warned = any(issubclass(warning.category, AccumulationWarning) for warning in caught[: seen_at_steps[0]])
    assert (may_warn and is_warned) or found.parameters <= limit, f"{found.parameters:.1g} off without an objection"


def split_exact_or_refused(
    module: Any, batches: Sequence[Any], size: int = 2, row_wise: str | None = None, **arguments: Any
) -> None:
    """:func:`exact_or_refused` for loader batches in micro-batches of ``size`` rows."""
    arguments |= {"windows": batches, "collate": lambda batch: batch}
    exact_or_refused(module, loader(batches), GradientAccumulation(micro_batch=size, row_wise=row_wise), **arguments)


def rows_of(*sizes: int) -> list[list[Any]]:
    """The rows of loader batches of so many."""
    return [list(zip(*batch, strict=True)) for batch in labelled(*sizes)]


def classified(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(net(batch[0]), batch[1])


# --- 1: padding ---
def padded(seed: int, ignored: Sequence[int] = ()) -> dict[str, Tensor]:
    """Six rows of tokens with a label each, -100 for some."""
    generator = torch.Generator().manual_seed(seed)
    mask = (torch.arange(8) < torch.tensor([8, 3, 1, 5, 2, 4])[:, None]).long()
    labels = torch.randint(0, 4, (6,), generator=generator)
    labels[list(ignored)] = -100
    return {"input_ids": torch.randint(1, 9, mask.shape, generator=generator) * mask, "attention_mask": mask, "labels": labels}


def reader(loss: Callable[..., Any]) -> Toy:
    return Toy(loss, net=lambda: nn.Embedding(9, 4))


def mean_over_padding(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    losses = F.cross_entropy(net(batch["input_ids"]).mean(1), batch["labels"], reduction="none")
    return losses.sum() / (batch["labels"] != -100).sum().clamp(min=1)


def mean_over_tokens(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    mask = batch["attention_mask"][..., None]
    return F.cross_entropy((net(batch["input_ids"]) * mask).sum(1) / mask.sum(1), batch["labels"])


def none_without_labels(net: nn.Module, batch: dict[str, Tensor]) -> Tensor | None:
    return None if bool((batch["labels"] == -100).all()) else mean_over_padding(net, batch)


@pytest.mark.parametrize("loss", [mean_over_padding, none_without_labels])
@open_until(22, "the two shortest rows prove that padding is harmless, although they have no loss (0.7)")
def test_padding_is_trimmed_only_if_rows_that_have_a_loss_show_that_it_is_harmless(loss: Any) -> None:
    split_exact_or_refused(partial(reader, loss), [padded(seed, ignored=(2, 4)) for seed in range(2)])


# --- 2: row_wise ---
class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 4), nn.Linear(4, 4, bias=False)


class CentersRows(TwoLayers):
    """Subtracts the mean of its batch, before a layer of zeros."""

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        return self.last(hidden - hidden.mean(0))


class Recomputes(TwoLayers):
    """Its outputs are independent of other rows, its gradients are not."""

    def forward(self, inputs: Tensor) -> Tensor:
        return checkpoint(self.run, inputs.requires_grad_(), use_reentrant=True)

    def run(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        if hidden.requires_grad:
            hidden.register_hook(lambda gradient: gradient / gradient.norm())
        return self.last(hidden)


@pytest.mark.parametrize(
    ("encoder", "scale"),
    [
        case(CentersRows, 0.0, issue=22, why="a last layer of zeros makes outputs and gradients 0 == 0 (0.6)"),
        case(Recomputes, 1.0, issue=22, why="no gradients are compared through a reentrant checkpoint (0.8)"),
    ],
)
def test_a_row_wise_submodule_whose_rows_depend_on_each_other_is_refused(encoder: Any, scale: float) -> None:
    def make() -> Toy:
        module = Toy(classified, net=encoder)
        module.net.last.weight.data.mul_(scale)
        return module

    split_exact_or_refused(make, labelled(8, 8, 8), row_wise="net")


# --- 3: without the check ---
@open_until(22, "the factor 0.5 is taken for a constant, and the gradient is 4 times too large (3)")
def test_a_sum_times_one_over_its_number_of_rows_is_a_mean_without_the_check_too() -> None:
    def loss(net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0]), batch[1], reduction="sum") * (1 / len(batch[0]))

    exact_or_refused(partial(Toy, loss), rows_of(*[2] * 8), GradientAccumulation(4, check=False))


# --- 4, 5, 6: what others do to parameters, gradients, schedulers and hooks ---
class LooksAhead(torch.optim.SGD):
    """Takes its gradient ahead of its parameters, as SAM does."""

    move = staticmethod(lambda parameter, distance: parameter.data.add_(distance))

    def step(self, closure: Any = None) -> Any:
        trained = [p for group in self.param_groups for p in group["params"] if p.requires_grad]
        ahead = [0.2 * parameter.detach().sign() for parameter in trained]
        list(map(self.move, trained, ahead))
        with torch.enable_grad():
            loss = closure()
        list(map(self.move, trained, [-distance for distance in ahead]))
        super().step()
        return loss


class LooksAheadInPlace(LooksAhead):
    move = staticmethod(torch.no_grad()(lambda parameter, distance: parameter.add_(distance)))


def first_frozen() -> Toy:
    module = Toy(classified, net=TwoLayers)
    module.net.forward = lambda inputs: module.net.last(module.net.first(inputs))
    module.net.first.requires_grad_(False)
    return module


@pytest.mark.parametrize(
    ("module", "optimizer"),
    [
        case(partial(Toy, classified), LooksAhead, issue=23, why="p.data.add_ counts no version (0.3)"),
        case(first_frozen, LooksAheadInPlace, issue=23, why="the first parameter alone is watched (0.09)"),
    ],
)
def test_an_optimizer_that_moves_parameters_before_its_closure_is_refused_or_exact(module: Any, optimizer: Any) -> None:
    exact_or_refused(module, rows_of(2, 3, 4, 5), 2, optimizer=partial(optimizer, lr=0.05))


def clears_gradients() -> Callback:
    return LambdaCallback(on_train_batch_start=lambda trainer, *_: trainer.optimizers[0].zero_grad())


class StepsScheduler(Callback):
    def on_train_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self.scheduler = ExponentialLR(trainer.optimizers[0], 0.5)

    def on_train_batch_end(self, *_: Any) -> None:
        self.scheduler.step()


@pytest.mark.parametrize(
    "callback",
    [
        case(clears_gradients, issue=22, why="gradients of a window that others clear are not missed (0.5)"),
        case(StepsScheduler, issue=23, why="a scheduler that others step inside a window is not noticed (0.6)"),
    ],
)
def test_what_a_hook_changes_between_the_micro_batches_of_a_window_is_noticed(callback: Any) -> None:
    trainer = {"callbacks": [callback()]}
    exact_or_refused(partial(Toy, classified), rows_of(2, 3, 4, 5), 2, trainer=trainer, may_warn=True)


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"])
def test_a_hook_that_is_patched_into_a_class_of_lightning_is_called(monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    calls: list[str] = []  # none before
    monkeypatch.setattr(pl.LightningModule, hook, lambda *_: calls.append(hook))
    fit(Toy(classified), labelled(2, 3, 4, 5), accumulate_grad_batches=2)
    assert len(calls) == (2 if hook == "on_before_optimizer_step" else 4)


# --- 7, 8: what the check does not see ---
def test_a_loss_that_pairs_noise_with_rows_is_refused() -> None:  # 0.4 before
    def transported(net: nn.Module, batch: Any) -> Tensor:  # flow matching with optimal transport of the first feature
        noise, data = (rows[rows[:, 0].argsort()] for rows in (torch.randn_like(batch[0]), batch[0]))
        return F.mse_loss(net((data + noise) / 2), data - noise)

    # the micro-batches of a loader batch draw what the whole one draws
    seeds = LambdaCallback(on_train_batch_start=lambda trainer, module, batch, batch_idx: torch.manual_seed(batch_idx))
    split_exact_or_refused(partial(Toy, transported), labelled(16, 16, 16), 4, trainer={"callbacks": [seeds]})


def two_contexts_a_query(rows: Sequence[Any]) -> dict[str, Tensor]:
    return {"queries": torch.stack([row[0] for row in rows]), "contexts": torch.cat([row[0].outer(row[0])[:2] for row in rows])}


def retrieval(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    return F.cross_entropy(net(batch["queries"]) @ net(batch["contexts"]).T, 2 * torch.arange(len(batch["queries"])))


def packed_graphs(rows: Sequence[Any]) -> dict[str, Tensor]:
    sizes = torch.tensor([1 + index % 3 for index in range(len(rows))])
    nodes, labels = torch.stack([row[0] for row in rows]), torch.stack([row[1] for row in rows])
    graph = torch.arange(len(rows)).repeat_interleave(sizes)
    return {"nodes": nodes[graph].roll(1, 0), "graph": graph, "labels": labels}


def of_centered_nodes(net: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    hidden = net(batch["nodes"])
    hidden = hidden - hidden.mean(0)
    return F.cross_entropy(hidden.new_zeros(len(batch["labels"]), 4).index_add(0, batch["graph"], hidden), batch["labels"])


class Quantizes(nn.Linear):
    """Its codes begin as means of the first batch that it sees."""

    def __init__(self) -> None:
        super().__init__(4, 4)
        self.codes = nn.Parameter(torch.zeros(3, 4))
        self.register_buffer("is_initialized", torch.tensor(False))

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = super().forward(inputs)
        if not self.is_initialized:
            parts = hidden.detach()[hidden[:, 0].argsort()].tensor_split(3)
            self.codes.data.copy_(torch.stack([part.mean(0) for part in parts]))
            self.is_initialized.fill_(True)
        return hidden + self.codes[torch.cdist(hidden, self.codes).argmin(1)]


@pytest.mark.parametrize(
    ("module", "collate"),
    [
        (partial(Toy, retrieval), two_contexts_a_query),  # 0.08 before
        (partial(Toy, of_centered_nodes), packed_graphs),  # 0.6 before
        case(partial(Toy, classified, net=Quantizes), None, issue=22, why="a forward that initializes is not seen (0.5)"),
    ],
)
def test_what_cannot_be_checked_and_does_not_add_up_is_warned_of_or_refused(module: Any, collate: Any) -> None:
    arguments = {} if collate is None else {"collate": collate}
    exact_or_refused(module, rows_of(4, 4, 4, 4), 2, may_warn=True, **arguments)


# --- 9, 10: precision ---
def centering_gradient(strength: float, net: nn.Module, batch: Any) -> Tensor:
    """A loss whose value adds up. Its gradient does not: a part of its mean over the batch is subtracted."""
    hidden = net(batch[0])
    hidden.register_hook(lambda gradient: gradient - strength * gradient.mean(0))
    return F.cross_entropy(hidden, batch[1])


def in_bfloat16(net: nn.Module, batch: Any) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return centering_gradient(0.1, net, batch)


@pytest.mark.parametrize(
    ("loss", "limit"),
    [
        (partial(centering_gradient, 0.02), 1e-5),  # 0.006 before
        (in_bfloat16, 1e-2),  # 0.03 before
    ],
)
def test_a_gradient_that_does_not_add_up_is_refused_in_low_precision_too(loss: Any, limit: float) -> None:
    rows = [[(inputs.float(), label) for inputs, label in batch] for batch in rows_of(4, 4, 4, 4)]
    exact_or_refused(lambda: Toy(loss).float(), rows, 2, limit=limit, trainer={"precision": "32-true"})


class NotFiniteBias(nn.Linear):
    """A distance of 0 has the gradient NaN."""

    def forward(self, inputs: Tensor) -> Tensor:
        return super().forward(inputs) + (self.bias - self.bias.detach()).square().sum().sqrt()


class ReplacesNaN(Toy):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.net.bias.grad.nan_to_num_()


def test_a_parameter_with_a_gradient_that_is_not_finite_hides_nothing_of_the_others() -> None:  # 0.4 before
    exact_or_refused(
        partial(ReplacesNaN, partial(centering_gradient, 1.0), net=lambda: NotFiniteBias(4, 4)), rows_of(4, 4, 4, 4), 2
    )


@open_until(22, "what a backward begins with is rounded to 8 bits (0.003)")
def test_the_weight_of_a_bfloat16_loss_is_not_rounded() -> None:
    exact_or_refused(partial(Toy, lambda net, batch: classified(net, batch).bfloat16()), rows_of(257, 129, 257, 131), 2)


# --- 11: teachers, and proofs that are kept ---
@open_until(22, "a change below 2e-6 is taken for rounding: the teacher goes 4 times as far")
def test_a_teacher_that_follows_at_each_micro_batch_is_warned_of_early_in_training_too() -> None:
    def distilled(net: nn.Module, batch: Any) -> Tensor:
        for old, new in zip(net[1].parameters(), net[0].parameters(), strict=True):
            old.data.lerp_(new.data, 4e-3)
        return 1e-4 * (classified(net[0], batch) + F.mse_loss(net[0](batch[0]), net[1](batch[0])))

    student = nn.Linear(4, 4)
    nets = nn.ModuleList([student, copy.deepcopy(student).requires_grad_(False)])
    with warned() as messages:
        batches = [[inputs.float(), labels] for inputs, labels in labelled(*[4] * 40)]
        fit(Toy(distilled, net=lambda: nets).float(), batches, accumulate_grad_batches=4)
    assert messages


class Staged(nn.Linear):
    def forward(self, inputs: Tensor, stage: int) -> Tensor:
        hidden = super().forward(inputs)
        return hidden - hidden.mean(0) if stage == 2 else hidden


@open_until(22, "the proof of a call is kept by the types of its arguments (0.3)")
def test_calls_of_a_row_wise_submodule_with_another_number_are_proven_by_themselves() -> None:
    def loss(net: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(net(batch[0], stage=1) + net(batch[0], stage=2), batch[1])

    split_exact_or_refused(partial(Toy, loss, net=lambda: Staged(4, 4)), labelled(8, 8), row_wise="net")


def test_a_resumed_training_trims_only_what_its_own_module_shows_to_be_harmless(tmp_path: Path) -> None:  # 0.5 before
    batches, path = [padded(seed) for seed in range(4)], tmp_path / "inside.ckpt"
    with suppress(Interrupted):
        fit(reader(mean_over_tokens), batches, GradientAccumulation(micro_batch=2), SaveAfter(2, ends=True, path=path))
    start, found, expected = (reader(mean_over_padding) for _ in range(3))
    start.load_state_dict(torch.load(path, weights_only=False)["state_dict"])
    fit(found, batches, GradientAccumulation(micro_batch=2), ckpt_path=path)
    fit(expected, batches, GradientAccumulation(micro_batch=2, trim_padding=False), ckpt_path=path)
    assert error_of_updates(found, expected, start) < EXACT


# --- 12: iterators ---
@pytest.mark.parametrize(("size", "policy"), [(8, {"micro_batch": 2}), (16, {"window": 2})])
@open_until(22, "the check takes 23 of 40 batches")
def test_the_check_takes_nothing_from_an_iterator_that_a_step_draws_from(size: int, policy: dict[str, Any]) -> None:
    others = iter(labelled(*[4] * 40))
    module = Toy(lambda net, batch: classified(net, batch) + classified(net, next(others)))
    run = fit(module, labelled(*[4] * size), GradientAccumulation(**policy))
    assert (run.global_step, len(list(others))) == (8, 40 - 16)


def test_stop_iteration_in_a_later_micro_batch_takes_no_step_on_a_part_of_the_loader_batch() -> None:  # a step before
    others = iter(labelled(4))
    module = Toy(lambda net, batch: classified(net, batch) + classified(net, next(others)))
    before = copy.deepcopy(module.net)
    with pytest.raises(AccumulationError, match="StopIteration in micro-batch 2 of 4"):
        fit(module, labelled(8, 8), GradientAccumulation(micro_batch=2, check=False))
    assert all(map(torch.equal, module.net.parameters(), before.parameters()))


# --- 13, 14: hand-written loops ---
class Longer(list[Any]):
    """Yields one batch more than its length."""

    def __len__(self) -> int:
        return super().__len__() - 1


def two_layers() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(3)
    return nn.Linear(4, 4).double(), nn.Linear(4, 4).double()


def loop(model: nn.Module, head: nn.Module, batches: Any, window: int, **arguments: Any) -> list[Tensor]:
    """A pass of a hand-written loop with the Accumulator. Returns the parameters."""
    parameters = [*model.parameters(), *head.parameters()]
    accumulator = Accumulator(None, model, torch.optim.SGD(parameters, lr=0.1), window=window, log=False, **arguments)
    for batch in accumulator(batches):
        accumulator.backward(F.cross_entropy(head(model(batch[0])), batch[1]))
        accumulator.step()
    return [parameter.detach() for parameter in parameters]


def test_no_window_begins_with_a_batch_beyond_the_length_of_a_loader() -> None:  # 0.04 before
    (model, head), batches = two_layers(), labelled(2, 3, 4, 5)
    expected = loop(*two_layers(), [joined(batches[:3])], window=1)
    with pytest.raises(AccumulationError, match="more than the 3 batches of its length"):
        loop(nn.Sequential(model, head), nn.Identity(), Longer(batches), window=3)
    assert relative_error([*model.parameters(), *head.parameters()], expected) < EXACT


def test_batches_beyond_the_length_of_a_loader_are_an_error_on_all_ranks() -> None:  # dropped before
    def work(rank: int) -> None:
        batches = labelled(2, 3, 4, seed=rank)
        with pytest.raises(AccumulationError, match="more than the 2 batches of its length"):
            loop(DistributedDataParallel(two_layers()[0]), nn.Identity(), batches[:2] if rank else Longer(batches), window=2)

    assert run_ranks(work, 2) == ["ended", "ended"]


def test_an_accumulator_over_plain_ddp_takes_the_step_of_the_full_batch_on_all_ranks() -> None:
    by_rank = [labelled(2, 3, seed=1), labelled(6, seed=2)]

    def work(rank: int) -> None:
        model = DistributedDataParallel(nn.Sequential(*two_layers()))
        torch.save(loop(model, nn.Identity(), by_rank[rank], window=2), f"{rank}.pt")

    assert run_ranks(work, 2) == ["ended", "ended"]
    expected = loop(nn.Sequential(*two_layers()), nn.Identity(), [joined([batch for own in by_rank for batch in own])], window=1)
    assert max(relative_error(torch.load(f"{rank}.pt"), expected) for rank in range(2)) < EXACT


@pytest.mark.parametrize("wrap", [nn.Sequential, DistributedDataParallel])  # ranks 0.05 apart before; 0.02 off, or they hang
def test_parameters_outside_of_the_ddp_that_is_found_are_refused(wrap: Callable[[nn.Module], nn.Module]) -> None:
    def work(rank: int) -> None:
        body, head = two_layers()
        with pytest.raises(AccumulationError, match="outside of the DistributedDataParallel"):
            loop(DistributedDataParallel(body), wrap(head), labelled(2, 3, seed=rank), window=2, on_nonfinite="skip")

    assert run_ranks(work, 2) == ["ended", "ended"]


# --- 15: schedulers ---
class Scheduled(Toy):
    """Notes its learning rate, which a scheduler halves, as each loader batch begins."""

    def __init__(self, frequency: int) -> None:
        super().__init__(classified)
        self.frequency, self.rates = frequency, list[float]()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.rates.append(self.trainer.optimizers[0].param_groups[0]["lr"])

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.5), "interval": "step", "frequency": self.frequency}]


@pytest.mark.parametrize(
    "frequency", [1, 5, *(case(number, issue=23, why="epochs of 5 batches are not counted anew") for number in (2, 3))]
)
@pytest.mark.parametrize(("window", "counts", "at"), [(1, "optimizer_steps", 1), (1, "micro_batches", 1), (2, "micro_batches", 5)])
def test_schedulers_are_where_those_of_lightning_are_without_accumulation(
    window: int, counts: Any, at: int, frequency: int
) -> None:
    found, expected = Scheduled(frequency), Scheduled(frequency)
    fit(found, labelled(*[4] * 5), GradientAccumulation(window, scheduler_counts=counts), max_epochs=3)
    fit(expected, labelled(*[4] * 5), strategy="auto", max_epochs=3)
    assert found.rates[::at] == expected.rates[::at]


# --- 16: manual optimization ---
class Manual(Toy):
    """Trains as ``Toy`` does, in manual optimization."""

    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(self.net, batch))
        optimizer.step()


def contrastive(net: nn.Module, batch: Any) -> Tensor:
    return F.cross_entropy(F.normalize(net(batch[0])) @ batch[0].T, torch.arange(len(batch[0])))


def of_normalized_advantages(net: nn.Module, batch: Any) -> Tensor:
    rewards = batch[0].sum(1)
    advantages = (rewards - rewards.mean()) / rewards.std()
    return (F.cross_entropy(net(batch[0]), batch[1], reduction="none") * advantages).mean()


@pytest.mark.parametrize("loss", [contrastive, of_normalized_advantages])
@open_until(22, "manual optimization is not tried out (0.2, 0.6)")
def test_a_loss_that_does_not_add_up_is_refused_in_manual_optimization_too(loss: Any) -> None:
    exact_or_refused(partial(Manual, loss), rows_of(4, 4, 4, 4), 2)
