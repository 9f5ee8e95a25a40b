"""What changes between the micro-batches of a window is warned of by name, or refused; what a full batch changes too is not."""

import warnings
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import fit, joined, warned
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import weight_norm

from lightning_accum import AccumulationError, AccumulationWarning, GradientAccumulation
from lightning_accum.testing import assert_window_equals_batch

GENERATOR = torch.Generator().manual_seed(1)
BATCHES = [torch.randn(3, 4, generator=GENERATOR, dtype=torch.float64) for _ in range(12)]
WHOLE = [joined(BATCHES[first : first + 3]) for first in range(0, 12, 3)]


class Net(pl.LightningModule):  # two layers whose output is compared with that of a second one
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.online = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        self.target = deepcopy(self.online).requires_grad_(False)
        self.made()

    def made(self) -> None: ...

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.online(batch), self.target(batch.flip(1)).detach())

    def follow(self, momentum: float = 0.9) -> None:
        for mine, its in zip(self.target.parameters(), self.online.parameters(), strict=True):
            mine.data.mul_(momentum).add_(its.data, alpha=1 - momentum)

    def clamp(self) -> None:
        for parameter in self.online.parameters():
            parameter.grad.clamp_(-0.01, 0.01)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def with_(base: type[Net] = Net, **methods: Any) -> type[Net]:
    return type("Module", (base,), methods)


def step_after(function: Callable[[Any, Tensor], Any]) -> type[Net]:
    """Calls a function of the module and the batch in training_step, before the loss."""
    return with_(training_step=lambda self, batch, batch_idx: (function(self, batch), Net.training_step(self, batch, 0))[1])


def _optimizer_step(self: Net, *args: Any, **kwargs: Any) -> None:
    Net.optimizer_step(self, *args, **kwargs)
    self.follow()


FollowsAtBatchEnd = with_(on_train_batch_end=lambda self, *_: self.follow())
FollowsOnce = with_(optimizer_step=_optimizer_step)


class Queue(Net):  # MoCo: the keys of earlier batches are the negatives of this one
    def made(self) -> None:
        self.register_buffer("queue", F.normalize(torch.randn(12, 4, dtype=torch.float64)))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        q, k = F.normalize(self.online(batch)), F.normalize(self.target(batch.flip(1))).detach()
        logits = torch.cat(((q * k).sum(1, keepdim=True), q @ self.queue.clone().T), 1)
        self.queue[(self.pointer + torch.arange(len(k))) % len(self.queue)] = k
        self.pointer.copy_((self.pointer + len(k)) % len(self.queue))
        return F.cross_entropy(logits / 0.2, torch.zeros(len(k), dtype=torch.long))


class OfSamples(Net):  # early-learning regularisation: the target of a sample is an average of its own outputs
    def made(self) -> None:
        self.register_buffer("targets", torch.zeros(36, 4, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        samples = (batch[:, None] == torch.cat(BATCHES)).all(2).int().argmax(1)
        self.targets[samples] = torch.lerp(self.targets[samples], self.online(batch).detach(), 0.3)
        return F.mse_loss(self.online(batch), self.targets[samples])


class Memory(Net):  # no loss depends on what it keeps
    def made(self) -> None:
        self.register_buffer("queue", torch.zeros(4, 4, dtype=torch.float64))
        self.online.append(weight_norm(nn.Linear(4, 4)).double())
        self.steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.queue.copy_(torch.cat((batch[:1], self.queue[:3])))
        self.steps += 1
        self.last = super().training_step(batch, batch_idx)
        return self.last


class OfStatistic(Net):
    """Its loss is divided by a moving average of itself, in an attribute: a second step on the same rows has the first's loss."""

    average: float | None = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.average = loss.item() if self.average is None else 0.9 * self.average + 0.1 * loss.item()
        return loss / self.average


def _toggles(self: OfStatistic, batch: Any, batch_idx: int) -> Tensor:
    self.toggle_optimizer(optimizer := self.optimizers())
    loss = OfStatistic.training_step(self, batch, batch_idx)
    self.untoggle_optimizer(optimizer)
    return loss


def _reverses_more(self: Net, batch: Any, batch_idx: int) -> Tensor:  # as domain-adversarial training
    (features := self.online[0](batch)).register_hook(lambda gradient: -batch_idx * gradient)
    return F.mse_loss(self.online[2](features), self.target(batch).detach())


def _freezes(self: Net, batch: Any, batch_idx: int) -> Tensor:
    self.online[0].requires_grad_(batch_idx == 0)
    return Net.training_step(self, batch, batch_idx)


class OfMean(Net):
    def made(self) -> None:
        self.register_buffer("mean", torch.zeros(4, dtype=torch.float64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch - self.mean, batch_idx)


class ByGlobalStep(Net):  # changes its teacher when ``global_step`` has grown
    last = -1

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.trainer.global_step > self.last:
            self.last = self.trainer.global_step
            self.follow()
        return super().training_step(batch, batch_idx) + self.online(batch)[batch > 0].mean()  # is counted first


def _backward(self: Net, loss: Tensor, *args: Any, **kwargs: Any) -> None:
    Net.backward(self, loss, *args, **kwargs)
    self.clamp()


def _clamp(parameter: Tensor) -> None:
    parameter.grad.clamp_(-0.01, 0.01)


class Measures(pl.Callback):
    def on_after_backward(self, run: Any, module: Any) -> None:
        self.norm = max(float(p.grad.norm()) for p in module.parameters() if p.grad is not None)


Follows = type("Follows", (pl.Callback,), {"on_train_batch_end": lambda self, run, module, *_: module.follow()})


# the module, a callback; the name in what is warned of in windows, and of split batches; None for no warning
# fmt: off
CASES: dict[str, tuple[type[Net], type[pl.Callback] | None, str | None, str | None]] = {
    "a teacher at zero_grad": (with_(on_before_zero_grad=lambda self, *_: self.follow()), None, *["target.0.weight"] * 2),
    "a teacher at the end of batches": (FollowsAtBatchEnd, None, "target.0.weight", None),
    "a teacher by a callback": (Net, Follows, "target.0.weight", None),
    "a teacher in the step": (step_after(lambda self, batch: self.follow()), None, "target.0.weight", "target.0.weight"),
    "nothing": (Net, None, None, None),
    "a teacher at optimizer steps": (FollowsOnce, None, None, None),
    "a queue": (Queue, None, "queue", "queue"),
    "a teacher by global_step": (ByGlobalStep, None, None, None),
    "a target of each sample": (OfSamples, None, None, None),
    "what no loss depends on": (Memory, None, None, None),
    "an average in an attribute": (OfStatistic, None, "attribute", "attribute"),
    "an average beside Lightning's own": (with_(OfStatistic, training_step=_toggles), None, *["attribute 'average'"] * 2),
    "a gradient by batch_idx": (with_(training_step=_reverses_more), None, "batch_idx", None),
    "a buffer that a hook moves": (with_(OfMean, on_train_batch_end=lambda self, *_: self.mean.add_(1)), None, "'mean'", None),
    "a layer frozen by batch_idx": (with_(training_step=_freezes), None, "batch_idx", None),
    "clamped gradients": (with_(on_after_backward=Net.clamp), None, "on_after_backward", "on_after_backward"),
    "gradients measured by a callback": (Net, Measures, "Measures", "Measures"),
    "a penalty's own backward": (with_(on_after_backward=lambda self: self.online[2].bias.sum().backward()), None,
                                *["on_after_backward"] * 2),
    "gradients clamped in backward": (with_(backward=_backward), None, "backward", "backward"),
    "a hook of a parameter": (with_(made=lambda self: self.online[2].weight.register_post_accumulate_grad_hook(_clamp)), None,
                              "online.2.weight", "online.2.weight"),
    "gradients clamped before the step": (with_(on_before_optimizer_step=lambda self, _: self.clamp()), None, None, None),
    "twice the loss": (with_(backward=lambda self, loss, *args: Net.backward(self, 2 * loss, *args)), None, None, None),
}
# fmt: on


@pytest.mark.some_cases(25)
@pytest.mark.parametrize("is_split", [False, True], ids=["windows", "split"])
@pytest.mark.parametrize("case", CASES)
def test_what_changes_inside_a_window_is_warned_of_by_name_and_nothing_else_is(case: str, is_split: bool) -> None:
    module, callback, *names = CASES[case]
    policy = GradientAccumulation(micro_batch=3) if is_split else GradientAccumulation(3)
    with warned() as messages:
        fit(module(), WHOLE if is_split else BATCHES, policy, *([callback()] if callback else []))
    assert any(names[is_split] in message for message in messages) if names[is_split] else messages == [], messages


@pytest.mark.filterwarnings("error::lightning_accum.AccumulationWarning")
@pytest.mark.parametrize(("module", "policy"), [
    (FollowsAtBatchEnd, {"window": 1}), (FollowsAtBatchEnd, {"window": 3, "check": False}),
    (with_(on_after_backward=Net.clamp), {"window": 1}), (Queue, {"window": 2, "check": False}),
    (Net, {"window": 3, "accumulate_dtype": torch.float64}),
])  # fmt: skip
def test_nothing_is_warned_of_where_a_window_is_a_batch_or_the_check_is_off(module: type[Net], policy: dict[str, Any]) -> None:
    assert fit(module(), BATCHES, GradientAccumulation(**policy)).global_step == 12 // policy["window"]


def test_ranks_look_at_buffers_together() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error", AccumulationWarning)
        with pytest.raises(Exception, match="'queue'"):
            fit(Queue(), BATCHES, GradientAccumulation(2), ranks=2)


class Adversarial(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = batch.clone().requires_grad_()
        super().training_step(batch, batch_idx).backward()
        batch = (batch + 0.1 * batch.grad.sign()).detach()
        self.zero_grad()
        return super().training_step(batch, batch_idx)


LeavesGradients = step_after(lambda self, batch: Net.training_step(self, batch.flip(0), 0).backward())
ClearsGradients = step_after(lambda self, batch: self.optimizers().zero_grad())


@pytest.mark.parametrize("module", [Adversarial, LeavesGradients, ClearsGradients])
@pytest.mark.parametrize("policy", [{"window": 3}, {"micro_batch": 2}, {"window": 3, "accumulate_dtype": torch.float64}])
def test_a_training_step_that_changes_the_gradients_of_its_window_is_refused(module: type[Net], policy: dict[str, Any]) -> None:
    trained = module()
    with pytest.raises(AccumulationError, match=r"online\.0\.weight"):
        fit(trained, BATCHES, GradientAccumulation(**policy))
    assert all(torch.equal(p, q) for p, q in zip(trained.parameters(), module().parameters(), strict=True))


ROW_WISE = {"micro_batch": 3, "row_wise": ["online", "target"]}


@pytest.mark.filterwarnings("error::lightning_accum.AccumulationWarning")
@pytest.mark.parametrize(("module", "policy"), [
    (FollowsAtBatchEnd, {"micro_batch": 3}), (FollowsOnce, {"window": 3}), (ByGlobalStep, {"window": 3}),
    (Queue, {"micro_batch": "offload"}), (Queue, ROW_WISE), (CASES["gradients clamped before the step"][0], {"window": 3}),
    (Adversarial, {"micro_batch": "offload"}), (ClearsGradients, {"window": 1}),
])  # fmt: skip
def test_what_is_advised_instead_is_exact(module: type[Net], policy: dict[str, Any]) -> None:
    batches = [list(batch) for batch in (WHOLE if "micro_batch" in policy else BATCHES)]
    assert_window_equals_batch(module, batches, GradientAccumulation(**policy), optimizers=[None])


@pytest.mark.parametrize("epoch", [1, 2])  # after a window and a half, and after three
def test_a_layer_that_is_unfrozen_inside_a_window_that_is_carried_is_warned_of(epoch: int) -> None:
    module = Net()
    module.on_train_epoch_start = lambda: module.online[0].requires_grad_(module.current_epoch >= epoch)
    with warned() as messages:
        fit(module, BATCHES[:3], GradientAccumulation(2, tail="carry"), max_epochs=3)
    assert [message.startswith("online.0.bias, online.0.weight was") for message in messages] == [True] * (epoch == 1)
