"""What was found wrong from outside, each stated as what should happen; numbers are relative errors of what training changed."""

import copy
import random
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from known import case, classified, off, open_until, outcome, outcome_split, refused, rows_of, said, scheduled
from lightning.pytorch.callbacks import LambdaCallback
from processes import run_ranks
from support import Hide, LooksAhead, ManualToy, Toy, error_of_updates, fit, joined, labelled, loader, noted, relative_error, warned
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import ExponentialLR
from torch.utils.data import DataLoader, default_collate

from lightning_accum import AccumulationError, AccumulationWarning, GradientAccumulation, SampleCount
from lightning_accum.fabric import Accumulator
from lightning_accum.testing import EXACT, sgd


def with_gradient(hidden: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    if hidden.requires_grad:
        hidden.register_hook(change)
    return hidden


NETS = {
    "linear": lambda: nn.Linear(4, 4),
    "frozen, linear": lambda: nn.Sequential(nn.Linear(4, 4).requires_grad_(False), nn.Linear(4, 4, bias=False)),
}


@open_until(22, "without the check, half of a sum and a sum by two rows are the same: the gradient is 4 times too large (3)")
def test_a_sum_times_one_over_its_number_of_rows_is_a_mean_without_the_check_too() -> None:
    module = partial(Toy, lambda net, batch: classified(net, batch, reduction="sum") * (1 / len(batch[0])))
    assert outcome(module, rows_of(*[2] * 8), GradientAccumulation(4, check=False)) == "exact"


def ignored_by_half(net: nn.Module, batch: Any) -> Tensor:
    return classified(net, batch, "sum") / (batch[1] >= 0).sum().clamp(min=1)


def mean_of_the_first_class(net: nn.Module, batch: Any) -> Tensor:  # one row counts in the first batch
    return Hide.apply(classified(net, (batch[0], batch[1] * 103 - 100), "sum") / batch[1].count_nonzero().clamp(min=1))


compiled = partial(torch.compile, backend="aot_eager")


FEW_AND_IGNORED = [*rows_of(3), *rows_of(6, 3, 3, ignored=0.5)]
OF_ONE_CLASS = [[(x, label) for (x, _), label in zip(rows, (torch.arange(8) >= 8 - n).long(), strict=True)]
                for rows, n in zip(rows_of(8, 8, 8), (1, 5, 3), strict=True)]  # fmt: skip
WEIGHED: dict[str, tuple[Any, Any, Any, str]] = {  # a loss, rows, a policy, what comes of it
    # 0.5 and 0.16 before
    "a compiled mean, by counts in one unit": (compiled(ignored_by_half), FEW_AND_IGNORED, 2, "exact"),
    "a compiled function of a mean": (compiled(lambda net, b: net(b[0]).square().mean().sqrt()), FEW_AND_IGNORED, 2, "refused"),
    # 1.4 before
    "one row that counts shows no sum": (mean_of_the_first_class, OF_ONE_CLASS, GradientAccumulation(micro_batch=2), "refused"),
    # an error in window 2, if labels are ignored there
    "a norm by singular values": (
        lambda net, b: classified(net, b) + torch.linalg.matrix_norm(net.weight, 2),
        [*rows_of(4, 4), *rows_of(4, 4, ignored=0.5)],
        2,
        "exact",
    ),
    "the weight of a bfloat16 loss": (lambda *nb: classified(*nb).bfloat16(), rows_of(257, 129, 257, 131), 2, "exact"),
}


@pytest.mark.parametrize("name", WEIGHED)
def test_a_loss_that_was_weighed_wrongly_is_exact_or_refused(name: str) -> None:
    loss, rows, policy, expected = WEIGHED[name]
    assert outcome(partial(Toy, loss), rows, policy) == expected


FADED: dict[str, tuple[Any, Any]] = {  # what fades in and out, and what does not; the first two never began to train
    "mean": (classified, lambda *_: 0.0),
    "two means": (lambda *nb: ignored_by_half(*nb) + nb[0](nb[1][0]).square().mean(), lambda *_: 0.0),
    # sum() begins with 0 + the first, which is 0
    "a mean beside a penalty": (classified, lambda net, _: 0.01 * sum(o.abs().sum() for o in (net.bias - net.bias, net.weight))),
    "a mean beside a sum by its count": (classified, ignored_by_half),
    "a cross entropy beside a mean": (classified, lambda net, batch: 0.1 * net(batch[0]).square().mean()),
}


@pytest.mark.some_cases(7)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("policy", [{"window": 2}, {"micro_batch": 2}])
@pytest.mark.parametrize("name", FADED)
def test_a_loss_with_a_factor_that_is_0_in_some_steps_takes_those_of_its_full_batch(name: str, policy: Any, optimizer: str) -> None:
    def trained(batches: list[Any], policy: GradientAccumulation) -> Toy:
        fading, own = FADED[name]
        module = Toy(lambda *nb: abs(2 - (module.global_step + 2) % 4) / 2 * fading(*nb) + own(*nb), optimizer)
        fit(module, batches, policy)
        assert module.global_step == 6
        return module

    batches = labelled(*[4] * 12, ignored=0.3)
    full = [joined(batches[at : at + 2]) for at in range(0, 12, 2)]
    found = trained(batches if "window" in policy else full, GradientAccumulation(**policy))
    assert error_of_updates(found, trained(full, GradientAccumulation(1)), Toy(classified)) < EXACT


def test_a_window_without_labels_takes_the_step_of_its_full_batch() -> None:  # it took none: weights did not decay, 0.4
    batches = labelled(4, 4, 4, 4)
    for _, labels in batches[2:]:
        labels.fill_(-100)
    assert off(ignored_by_half, batches, optimizer="adamw") < EXACT


class LooksAheadInPlace(LooksAhead):
    of = staticmethod(Tensor.detach)  # it shares the version


CLEARS = LambdaCallback(on_train_batch_start=lambda trainer, *_: trainer.optimizers[0].zero_grad())
STEPS = LambdaCallback(
    on_train_start=lambda trainer, module: setattr(trainer, "beside", ExponentialLR(trainer.optimizers[0], 0.5)),
    on_train_batch_end=lambda trainer, *_: trainer.beside.step(),
)


@pytest.mark.parametrize(
    ("net", "optimizer", "callbacks", "expected"),
    [
        ("frozen, linear", partial(LooksAheadInPlace, lr=0.05), [], "refused"),
        ("linear", sgd, [CLEARS], "refused"),
        ("linear", sgd, [STEPS], "warned"),
    ],
)
def test_what_an_optimizer_or_a_hook_changes_in_a_window_is_seen(net: Any, optimizer: Any, callbacks: Any, expected: str) -> None:
    arguments = {"optimizer": optimizer, "trainer": {"callbacks": callbacks}}
    assert outcome(partial(Toy, classified, net=NETS[net]), rows_of(2, 3, 4, 5), **arguments) == expected


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_after_backward", "on_before_optimizer_step", "on_train_batch_end"])
def test_a_hook_that_is_patched_into_a_class_of_lightning_is_called(monkeypatch: pytest.MonkeyPatch, hook: str) -> None:
    calls: list[str] = []  # none before
    monkeypatch.setattr(pl.LightningModule, hook, lambda *_: calls.append(hook))
    fit(Toy(classified), labelled(2, 3, 4, 5), accumulate_grad_batches=2)
    assert len(calls) == (2 if hook == "on_before_optimizer_step" else 4)


def centering_gradient(strength: float, net: Callable[[Tensor], Tensor], batch: Any) -> Tensor:
    """A loss whose value adds up. Its gradient does not: a part of its mean over the batch is subtracted."""
    return classified(lambda inputs: with_gradient(net(inputs), lambda gradient: gradient - strength * gradient.mean(0)), batch)


class Turning(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)
        self.turn = nn.Parameter(torch.full((4,), 0.7 + 0.3j, dtype=torch.complex64))

    def forward(self, inputs: Tensor) -> Tensor:
        return (super().forward(inputs) * self.turn).real


@pytest.mark.parametrize(
    ("strength", "is_bfloat16", "net", "limit"),
    # 0.006, 0.03, 0.003 before
    [(0.02, False, NETS["linear"], 1e-5), (0.1, True, NETS["linear"], 1e-2), (0.01, False, Turning, 1e-5)],
)
def test_a_gradient_that_does_not_add_up_is_refused_in_low_precision_too(
    strength: float, is_bfloat16: bool, net: Any, limit: float
) -> None:
    loss = torch.autocast("cpu", torch.bfloat16, enabled=is_bfloat16)(partial(centering_gradient, strength))
    rows = [[(inputs.float(), label) for inputs, label in batch] for batch in rows_of(4, 4, 4, 4)]
    assert outcome(lambda: Toy(loss, net=net).float(), rows, limit=limit, trainer={"precision": "32-true"}) == "refused"


def test_a_parameter_with_a_gradient_that_is_not_finite_hides_nothing_of_the_others() -> None:  # 0.4 before
    def loss(net: nn.Linear, batch: Any) -> Tensor:  # a distance of 0 has the gradient NaN
        return centering_gradient(1.0, lambda x: net(x) + (net.bias - net.bias.detach()).square().sum().sqrt(), batch)

    replaces = LambdaCallback(on_before_optimizer_step=lambda trainer, module, optimizer: module.net.bias.grad.nan_to_num_())
    assert outcome(partial(Toy, loss), rows_of(4, 4, 4, 4), trainer={"callbacks": [replaces]}) == "refused"


@pytest.mark.parametrize("policy", [{"window": 2}, {"micro_batch": 2}])
def test_a_permutation_of_a_few_rows_that_is_none_by_chance_proves_nothing(policy: dict[str, Any]) -> None:  # 0.5 before
    def mixed(net: nn.Module, batch: Any) -> Tensor:
        order = torch.randperm(len(batch[0]))
        return F.cross_entropy(net(0.7 * batch[0] + 0.3 * batch[0][order]), batch[1])

    for seed in range(4):
        torch.manual_seed(seed)
        with pytest.warns(AccumulationWarning, match="draws different random numbers"):
            fit(Toy(mixed), labelled(3, 2, 3, 2), GradientAccumulation(**policy))


class Scales(Toy):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss / loss.detach(), *args, **kwargs)


class Penalises(Toy):  # 0.6 before
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        loss.backward()
        (0.1 * self.net.weight.square().sum()).backward()


class Rates(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.optimizers().param_groups[0]["lr"] = float(loss.detach())
        return loss


@pytest.mark.parametrize(("kind", "expected"), [(Scales, "refused"), (Penalises, "refused"), (Rates, "warned")])
def test_a_step_that_is_scaled_by_the_loss_of_a_micro_batch_is_seen(kind: Any, expected: str) -> None:  # 0.4, 0.06 before
    assert outcome(partial(kind, classified), rows_of(4, 4, 4, 4), optimizer=None) == expected
    assert outcome_split(partial(kind, classified), labelled(4, 4), optimizer=None) == expected


def of_node(own: Tensor) -> Any:  # the node that adds up the gradient, which lives as long as this
    node = own.expand_as(own).grad_fn.next_functions[0][0]
    node.register_prehook(lambda gradients: (gradients[0] / gradients[0].norm(),))
    return node


def after_adding(own: Tensor) -> None:
    own.grad /= own.grad.norm()


@pytest.mark.parametrize("kind", [Toy, ManualToy])
@pytest.mark.parametrize(
    ("register", "expected"),
    [(of_node, "refused"), (lambda own: own.register_post_accumulate_grad_hook(after_adding), "warned")],
)
def test_a_hook_that_normalises_the_gradient_of_a_parameter_is_seen(kind: Any, register: Any, expected: str) -> None:  # 0.5
    class Hooked(kind):
        def on_train_start(self) -> None:
            self.kept = [register(own) for own in self.parameters()]

    assert outcome(partial(Hooked, classified), rows_of(4, 4, 4, 4), optimizer=None) == expected


def test_a_backward_that_writes_into_its_gradient_changes_no_other_micro_batch() -> None:  # 0.084 before
    def loss(net: nn.Module, batch: Any) -> Tensor:
        value = classified(net, batch)
        value.register_hook(lambda gradient: gradient.mul_(2))
        return value

    assert off(loss, labelled(3, 3, 3, 1), 4, weight=SampleCount(), check=False) < EXACT


@pytest.mark.parametrize("policy", [{"window": 4}, {"micro_batch": 2}])
def test_a_statistic_of_the_batch_that_is_0_before_the_first_step_is_refused(policy: dict[str, Any]) -> None:  # as KTO's: 0.01
    def from_reference(nets: Any, batch: Any) -> Tensor:
        gained = (nets[0](batch[0]) - nets[1](batch[0])).sum(1)
        return (1 - torch.sigmoid(gained - gained.detach().mean().clamp(min=0))).mean()

    module = Toy(from_reference, net=lambda: nn.ModuleList([new := nn.Linear(4, 4), copy.deepcopy(new).requires_grad_(False)]))
    refused(module, labelled(8, 8, 8, 8), GradientAccumulation(**policy), match="do not add up")


@pytest.mark.parametrize("write", ["in place", "another tensor"])
def test_a_threshold_that_follows_each_micro_batch_is_warned_of_before_it_is_crossed(write: str) -> None:  # 0.2 before
    def of_sure_rows(net: nn.Module, batch: Any) -> Tensor:
        sure, mean = net[0](batch[0]).detach().softmax(-1).amax(1), net[1].running_mean
        net[1].running_mean = (mean.lerp_ if write == "in place" else mean.lerp)(sure.mean(), 0.01)
        return (classified(net[0], batch, "none") * (sure > net[1].running_mean + 0.35)).mean()

    module = Toy(of_sure_rows, net=lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(1)))
    assert "training_step changes the buffer" in said(module, labelled(8, 8), GradientAccumulation(2))


class Normalised(Toy):
    """A sum of losses, which a hook of the step divides by the tokens of the last batch, or of all batches since the last step."""

    tokens = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.tokens = len(batch[0]) + (self.tokens if self.optimizer == "adamw" else 0)
        return classified(self.net, batch, "sum")

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.parameters():
            assert parameter.grad is not None
            parameter.grad /= self.tokens
        self.tokens = 0


class Balanced(Toy):
    """A buffer that a hook of the step changes by the rows of the last batch, as a router that balances the load of its experts."""

    def __init__(self, loss: Any) -> None:
        super().__init__(loss)
        self.register_buffer("bias", torch.zeros(4, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.load = F.one_hot((self.net(batch[0]) + self.bias).argmax(1), 4).double().sum(0)
        return F.cross_entropy(self.net(batch[0]) + self.bias, batch[1])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.bias -= 0.1 * self.load


class Focal(Toy):
    def on_before_backward(self, loss: Tensor) -> None:
        loss.register_hook(lambda gradient: gradient * loss.detach())


class Clipped(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.last = super().training_step(batch, batch_idx)
        return self.last

    def configure_gradient_clipping(self, optimizer: Any, **_: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1 * float(self.last.detach()), gradient_clip_algorithm="norm")


@pytest.mark.parametrize("policy", [{"window": 2}, {"micro_batch": 4}])
@pytest.mark.parametrize("kind", [Normalised, Balanced, Focal, Clipped])
def test_hooks_that_use_what_one_training_step_left_are_refused(kind: type[Toy], policy: dict[str, Any]) -> None:  # 0.05 to 2.8
    refused(kind(classified), labelled(8, 8), GradientAccumulation(**policy), match="changes gradients, buffers or|do not add up")


def balanced(hook: str, is_parameter: bool) -> Toy:
    """A bias that a hook moves by the sign of one micro-batch's load, kept in a frozen parameter or in an attribute."""

    def then_balance(self: Any, *args: Any, **kwargs: Any) -> None:
        getattr(pl.LightningModule, hook)(self, *args, **kwargs)
        load = getattr(self, "load", self.bias)  # on_train_batch_start comes before it
        self.bias -= 0.1 * (load - load.mean()).sign()

    kept = {"on_before_optimizer_step": pl.LightningModule.on_before_optimizer_step}
    module = type("Signed", (Balanced,), {**kept, hook: then_balance})(classified)
    bias = module._buffers.pop("bias")
    module.bias = nn.Parameter(bias, requires_grad=False) if is_parameter else bias
    return module


@pytest.mark.parametrize("is_parameter", [True, False], ids=["parameter", "attribute"])
@pytest.mark.parametrize("hook", ["on_before_optimizer_step", "on_train_batch_end", "on_train_batch_start", "optimizer_step"])
def test_a_bias_that_follows_the_sign_of_one_micro_batchs_load_is_refused(hook: str, is_parameter: bool) -> None:  # 0.9 to 12
    module = balanced(hook, is_parameter)
    refused(module, labelled(6, 6), GradientAccumulation(micro_batch=4), match=f"{hook} of the module changes")
    assert module.bias.count_nonzero() == 0


@pytest.mark.parametrize("hook", ["on_before_zero_grad", "on_after_backward", "on_train_batch_end"])
def test_a_bias_that_a_hook_moves_inside_a_window_is_warned_of(hook: str) -> None:  # 1.0, silently at the first two
    assert "A hook changes the attribute" in said(balanced(hook, False), labelled(6, 6), GradientAccumulation(2))


class Shifted(Toy):
    """A hook adds to what the inputs are shifted by. The first loader batch of rank 1 is None."""

    shift = 0.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return classified(self.net, [batch[0] + self.shift, batch[1]])

    def on_train_batch_end(self, *_: Any) -> None:
        self.shift += 1.0

    def train_dataloader(self) -> DataLoader:
        rank = self.trainer.global_rank
        return loader([*[None] * rank, *labelled(8, 8, 8, 8)[rank:]])


def test_a_rank_whose_window_begins_with_none_takes_part_in_the_look_at_hooks() -> None:  # they exchanged different numbers
    fit(module := Shifted(classified), None, GradientAccumulation(2), ranks=2)
    assert not torch.equal(module.net.weight, Toy(classified).net.weight)


@pytest.mark.parametrize("draw", [random.random, lambda: float(torch.rand(()))])
def test_a_branch_that_a_draw_for_the_whole_batch_takes_at_times_is_tried(draw: Callable[[], float]) -> None:  # silent before
    def centered_at_times(net: nn.Module, batch: Any) -> Tensor:
        outputs = net(batch[0])
        return F.cross_entropy(outputs - (outputs.mean(0) if draw() < 0.4 else 0), batch[1])

    refused(Toy(centered_at_times), labelled(8, 8), GradientAccumulation(2), match="do not add up")


def test_a_hook_that_divides_by_the_tokens_of_all_micro_batches_is_exact() -> None:
    assert off(classified, labelled(8, 8, 8, 8), kind=Normalised, optimizer="adamw") < EXACT


def test_a_window_that_lightnings_scheduler_makes_longer_in_a_later_epoch_is_checked_before_the_first() -> None:  # 0.1 before
    def contrastive(net: nn.Module, batch: Any) -> Tensor:
        z = F.normalize(net(batch[0]))
        return F.cross_entropy(z @ z.T, torch.arange(len(z)))

    with pytest.raises(AccumulationError, match="do not add up"):
        fit(Toy(contrastive), labelled(8, 8), pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2}), max_epochs=2)


def test_a_count_of_0_beside_a_tiny_constant_is_no_contradiction() -> None:  # refused before, once a look had no active rows
    def active(net: nn.Module, batch: Any) -> Tensor:
        losses = F.relu(net(batch[0])[:, 0] - batch[1])
        return losses.sum() / ((losses > 1e-16).sum() + 1e-16)

    batches = labelled(*[8] * 6)
    batches[2][1].fill_(9)
    assert off(active, batches) < EXACT


def test_a_mean_that_becomes_a_sum_is_warned_of() -> None:
    module = Toy(lambda net, b: classified(net, b, "sum") * (1 / len(b[1]) if module.global_step < 2 else 0.05))
    assert "was a mean" in said(module, labelled(*[8] * 18), GradientAccumulation(2))


def samples(number: int = 24) -> list[tuple[Tensor, Tensor]]:
    return [*zip(*labelled(number)[0], strict=True)]


@pytest.mark.parametrize("how", [int, torch.tensor, lambda n: torch.tensor([n]).double()])
@pytest.mark.parametrize("size", [6, 8])
def test_a_count_that_collate_fn_puts_into_the_batch_is_the_weight(how: Callable[[int], Any], size: int) -> None:  # 3.0 before
    def loss(net: nn.Module, batch: Any) -> Tensor:
        return classified(net, batch, "sum") / batch[2]

    def collate(rows: list[Any]) -> list[Any]:
        return [*default_collate(rows), how(len(rows))]

    found, expected = Toy(loss), Toy(loss)
    fit(found, DataLoader(samples(), size, collate_fn=collate), GradientAccumulation(24 // size))
    fit(expected, DataLoader(samples(), 24, collate_fn=collate), GradientAccumulation(1))
    assert relative_error([found.net.weight], [expected.net.weight]) < EXACT


def centered(batch: Any) -> list[Tensor]:
    return [batch[0] - batch[0].mean(0), batch[1]]


class Centers(Toy):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return centered(batch)


@pytest.mark.parametrize(("kind", "collate"), [(Toy, lambda rows: centered(default_collate(rows))), (Centers, None)])
def test_a_mean_that_is_taken_where_batches_are_made_is_warned_of(kind: type[Toy], collate: Any) -> None:  # 0.6 before
    told = said(kind(classified), DataLoader(samples(), 6, collate_fn=collate), GradientAccumulation(2))
    assert "Batches that the loader makes" in told


def test_a_batch_that_is_a_packed_sequence_has_its_tokens_as_weight() -> None:  # 0.2 before
    rows = [torch.randn(1 + 3 * n % 7, 4).double() for n in range(12)]
    batches = [nn.utils.rnn.pack_sequence(rows[a:b], enforce_sorted=False) for a, b in ((0, 8), (8, 12), (0, 12))]
    loss: Callable[..., Tensor] = lambda net, batch: (net(batch.data) - batch.data).square().mean()  # noqa: E731
    found, expected = Toy(loss), Toy(loss)
    fit(found, batches[:2], GradientAccumulation(2))
    fit(expected, batches[2:], GradientAccumulation(1))
    assert relative_error(found.parameters(), expected.parameters()) < EXACT


LEAST: list[Callable[[list[Tensor]], Tensor]] = [
    lambda losses: torch.minimum(*losses), lambda losses: torch.stack(losses).min(), lambda losses: torch.stack(losses).amin()
]  # fmt: skip


@pytest.mark.parametrize("least", LEAST)
def test_the_least_of_two_means_over_a_batch_is_seen_where_it_changes_inside_a_window(least: Any) -> None:  # 1.2 before
    def loss(net: nn.Module, batch: Any) -> Tensor:
        return least([F.mse_loss(net(batch[0])[:, half], batch[1][:, None].double()) for half in (slice(2), slice(2, 4))])

    module, batches = Toy(loss), labelled(*[8] * 6)
    module.net.bias.data = torch.tensor([9.0, 9.0, -9.0, -9.0]).double()
    for number, (_, targets) in enumerate(batches):
        targets.fill_(9 if number < 2 or number % 2 else -9)
    with warned() as messages, suppress(AccumulationError):
        fit(module, batches, GradientAccumulation(2))
    assert messages or module.trainer.global_step < 2


@pytest.mark.parametrize(("size", "policy"), [(8, {"micro_batch": 2}), (16, {"window": 2})])
@pytest.mark.parametrize("make", [iter, lambda batches: (batch for batch in batches), lambda batches: iter(loader(batches))])
def test_the_check_takes_nothing_from_an_iterator_that_a_step_draws_from(make: Any, size: int, policy: dict[str, Any]) -> None:
    others = make(labelled(*[4] * 40))
    module = Toy(lambda net, batch: classified(net, batch) + classified(net, next(others)))
    with warned() as messages:
        run = fit(module, labelled(*[4] * size), GradientAccumulation(**policy))
    assert (run.global_step, len(list(others))) == (8, 40 - 16)  # 23 batches less before
    assert any("iterator" in message for message in messages)


def test_stop_iteration_in_a_later_micro_batch_takes_no_step_on_a_part_of_the_loader_batch() -> None:  # a step before
    others = iter(labelled(4))
    module = Toy(lambda net, batch: classified(net, batch) + classified(net, next(others)))
    before = copy.deepcopy(module.net)
    refused(module, labelled(8, 8), GradientAccumulation(micro_batch=2, check=False), match="StopIteration in micro-batch 2 of 4")
    assert all(map(torch.equal, module.net.parameters(), before.parameters()))


@pytest.mark.skipif(not hasattr(Exception, "add_note"), reason="Python 3.11 has notes")
def test_targets_that_a_hook_made_for_all_rows_fail_in_a_micro_batch_with_a_note() -> None:
    module = Toy(lambda net, batch: F.cross_entropy(net(batch[0]), getattr(module, "targets", batch[1])))
    module.on_train_batch_start = lambda batch, batch_idx: setattr(module, "targets", 1 - batch[1])
    with pytest.raises(ValueError, match="batch_size") as caught:
        fit(module, labelled(8), GradientAccumulation(micro_batch=2, check=False))
    assert "has left in the module belongs to other rows" in caught.value.__notes__[-1]


def two_layers() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).double()


def loop(model: nn.Module, batches: Any, window: int, *head: nn.Module, **arguments: Any) -> list[Tensor]:
    """A pass of a hand-written loop with the Accumulator, of a ``model`` and what comes behind it. Returns the parameters."""
    whole = nn.Sequential(model, *head)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.1)
    accumulator = Accumulator(None, model, optimizer, window=window, log=False, **arguments)
    for batch in accumulator(batches):
        accumulator.backward(classified(whole, batch))
        accumulator.step()
    return [parameter.detach() for parameter in whole.parameters()]


@pytest.mark.parametrize("wrap", [nn.Sequential, DistributedDataParallel])
def test_parameters_outside_of_the_ddp_are_an_error_on_all_ranks(wrap: Any) -> None:  # 0.02 off before, or they hang
    def work(rank: int) -> None:
        body, head = two_layers()
        with pytest.raises(AccumulationError, match="outside the DistributedDataParallel"):
            loop(DistributedDataParallel(body), labelled(2, 3, seed=rank), 2, wrap(head), on_nonfinite="skip")

    assert run_ranks(work, 2) == ["ended", "ended"]


def test_an_accumulator_over_plain_ddp_takes_the_step_of_the_full_batch_on_all_ranks() -> None:
    by_rank = [labelled(2, 3, seed=1), labelled(6, seed=2)]

    def work(rank: int) -> None:
        torch.save(loop(DistributedDataParallel(two_layers()), by_rank[rank], window=2), f"{rank}.pt")

    assert run_ranks(work, 2) == ["ended", "ended"]
    expected = loop(two_layers(), [joined([batch for own in by_rank for batch in own])], window=1)
    assert max(relative_error(torch.load(f"{rank}.pt"), expected) for rank in range(2)) < EXACT


def test_a_loop_that_calls_the_module_inside_of_its_ddp_is_refused() -> None:  # nothing was reduced: 0.5
    def work(rank: int) -> None:
        model = DistributedDataParallel(two_layers())
        accumulator = Accumulator(None, model, torch.optim.SGD(model.parameters(), lr=0.1), window=1, log=False)
        batches = iter(accumulator(labelled(3, seed=rank)))
        with pytest.raises(AccumulationError, match="call the wrapped model"):
            accumulator.backward(classified(model.module, next(batches)))

    assert run_ranks(work, 2) == ["ended", "ended"]


def rates(frequency: int, *callbacks: Any, **arguments: Any) -> list[float]:
    """The learning rate, which a scheduler halves, as each loader batch begins."""
    notes, found = noted("on_train_batch_start", lambda trainer: trainer.optimizers[0].param_groups[0]["lr"])
    module = scheduled(lambda module, optimizer: ExponentialLR(optimizer, 0.5), frequency=frequency)
    fit(module, labelled(*[4] * 5), notes, *callbacks, max_epochs=3, **arguments)
    return found


@pytest.mark.parametrize("frequency", [1, 5, *(case(23, "epochs of 5 batches are not counted anew", number) for number in (2, 3))])
@pytest.mark.parametrize(("window", "counts", "at"), [(1, "optimizer_steps", 1), (1, "micro_batches", 1), (2, "micro_batches", 5)])
def test_schedulers_are_where_lightnings_are_without_accumulation(window: int, counts: Any, at: int, frequency: int) -> None:
    found = rates(frequency, GradientAccumulation(window, scheduler_counts=counts))
    assert found[::at] == rates(frequency, strategy="auto")[::at]
