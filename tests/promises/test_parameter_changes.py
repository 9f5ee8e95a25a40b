"""Parameters that change between the micro-batches of a window are warned of by name; what a full batch would change too is not."""

from __future__ import annotations

import warnings
from copy import deepcopy
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import ddp, loader, relative_error, train_by_hand, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

from lightning_accum import AccumulationWarning, GradientAccumulation


def batches(number: int = 12) -> list[Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(3, 4, generator=generator, dtype=torch.float64) for _ in range(number)]


class Net(pl.LightningModule):
    """Two layers whose output is compared with that of a second one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.online = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4)).double()
        self.target = deepcopy(self.online).requires_grad_(False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return F.mse_loss(self.online(batch), self.target(batch.flip(1)).detach())

    def follow(self, momentum: float = 0.9) -> None:
        for mine, its in zip(self.target.parameters(), self.online.parameters(), strict=True):
            mine.data.mul_(momentum).add_(its.data, alpha=1 - momentum)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class AtZeroGrad(Net):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        self.follow()


class AtBatchEnd(Net):
    def on_train_batch_end(self, *args: Any) -> None:
        self.follow()


class InTheStep(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.follow()
        return super().training_step(batch, batch_idx)


class Clipped(Net):
    def on_train_batch_end(self, *args: Any) -> None:
        for parameter in self.online.parameters():
            parameter.data.clamp_(-0.01, 0.01)


class Spectral(Net):
    def __init__(self) -> None:
        super().__init__()
        self.online[0] = spectral_norm(self.online[0])


class Converged(Spectral):
    """Another power iteration changes its loss by less than rounding, and its gradient by more."""

    def __init__(self) -> None:
        super().__init__()
        for _ in range(60):
            _ = self.online[0].weight


class Following(pl.Callback):
    def on_train_batch_end(self, run: Any, module: Any, *args: Any) -> None:
        module.follow()


class Once(Net):
    """What a full batch would do too."""

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        self.follow()


class Normalised(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.online[0].weight.data.copy_(F.normalize(self.online[0].weight.data, dim=1))
        return super().training_step(batch, batch_idx)


class Copied(Net):
    def on_train_batch_end(self, *args: Any) -> None:
        if self.trainer.global_step % 2 == 0:
            self.target.load_state_dict(self.online.state_dict())


class Memory(Net):
    """Buffers are made to change."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("queue", torch.zeros(4, 4, dtype=torch.float64))
        self.register_buffer("steps", torch.zeros(()))
        self.norm = nn.BatchNorm1d(4).double()
        self.online.append(weight_norm(nn.Linear(4, 4)).double())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.norm(batch)
        self.queue.copy_(torch.cat((batch[:1], self.queue[:3])))
        self.steps += 1
        return super().training_step(batch, batch_idx)


def changes_found(module: pl.LightningModule, *callbacks: Any, **policy: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        policy = policy or {"window": 3}
        trainer(callbacks=[GradientAccumulation(**policy), *callbacks]).fit(module, loader(batches()))
    messages = [str(w.message) for w in caught if issubclass(w.category, AccumulationWarning)]
    return [message for message in messages if "between the micro-batches of a window" in message]


@pytest.mark.parametrize(
    ("module", "callbacks", "name"),
    [
        (AtZeroGrad, [], "target.0.weight"),
        (AtBatchEnd, [], "target.0.weight"),
        (InTheStep, [], "target.0.weight"),
        (Clipped, [], "online.0.weight"),
        (Net, [Following], "target.0.weight"),
    ],
)
def test_a_parameter_that_changes_inside_a_window_is_named(module: type[Net], callbacks: list[Any], name: str) -> None:
    (message,) = changes_found(module(), *(callback() for callback in callbacks))
    assert message.startswith(f"The parameters '{name}' and ")
    assert "in the module's optimizer_step" in message


@pytest.mark.parametrize("module", [Net, Once, Normalised, Copied, Memory])
def test_what_the_full_batch_would_change_too_is_no_change(module: type[Net]) -> None:
    assert changes_found(module()) == []


@pytest.mark.parametrize("policy", [{"window": 1}, {"window": 3, "check": False}])
def test_nothing_is_compared_where_a_window_is_a_batch_or_the_check_is_off(policy: dict[str, Any]) -> None:
    assert changes_found(AtBatchEnd(), **policy) == []


def test_the_size_is_that_of_the_change() -> None:
    class Doubled(Net):
        def on_train_batch_end(self, *args: Any) -> None:
            self.target[0].weight.data.mul_(2)

    (message,) = changes_found(Doubled(), window=2)
    assert message.startswith("The parameter 'target.0.weight' changes between the micro-batches of a window (by 0.5 of its size")


@pytest.mark.parametrize("change", ["a hook of batches, in a split batch", "a step of the optimizer"])
def test_what_the_warning_advises_is_exact(change: str) -> None:
    data = batches()
    whole = [torch.cat(data[i : i + 3]) for i in range(0, len(data), 3)]
    by_hand = Net()
    for batch in whole:
        train_by_hand(by_hand, [batch], epochs=1)
        by_hand.follow()
    module = AtBatchEnd() if "split" in change else Once()
    policy, batches_of = (GradientAccumulation(micro_batch=3), whole) if "split" in change else (GradientAccumulation(3), data)
    with warnings.catch_warnings():
        warnings.simplefilter("error", AccumulationWarning)
        trainer(callbacks=[policy]).fit(module, loader(batches_of))
    assert relative_error(module.parameters(), by_hand.parameters()) <= 1e-12


# --- buffers that a step changes and its loss depends on ------------------------------------------------------------------


class Codebook(Net):
    """A VQ-VAE: outputs are pulled to the nearest of some codes, which follow what was assigned to them by a moving average."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.register_buffer("codes", torch.randn(3, 4, generator=generator, dtype=torch.float64))
        self.register_buffer("sizes", torch.ones(3, dtype=torch.float64))
        self.register_buffer("sums", self.codes.clone())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z = self.online(batch)
        nearest = torch.cdist(z, self.codes).argmin(1)
        loss = F.mse_loss(z, self.codes[nearest])
        self.assign(z.detach(), F.one_hot(nearest, 3).double())
        return loss

    def assign(self, z: Tensor, assigned: Tensor) -> None:
        self.sizes.mul_(0.9).add_(assigned.sum(0), alpha=0.1)
        self.sums.mul_(0.9).add_(assigned.T @ z, alpha=0.1)
        self.codes.data.copy_(self.sums / self.sizes[:, None])


class Queue(Net):
    """MoCo: the keys of earlier batches are the negatives of this one."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(2)
        self.register_buffer("queue", F.normalize(torch.randn(12, 4, generator=generator, dtype=torch.float64)))
        self.register_buffer("pointer", torch.zeros((), dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        q, k = F.normalize(self.online(batch)), F.normalize(self.target(batch.flip(1))).detach()
        logits = torch.cat(((q * k).sum(1, keepdim=True), q @ self.queue.clone().T), 1)
        places = (self.pointer + torch.arange(len(k))) % len(self.queue)
        self.queue[places] = k
        self.pointer.copy_((self.pointer + len(k)) % len(self.queue))
        return F.cross_entropy(logits / 0.2, torch.zeros(len(k), dtype=torch.long))


class CodebookOnce(Codebook):
    """What the warning advises."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[Tensor, Tensor]] = []

    def assign(self, z: Tensor, assigned: Tensor) -> None:
        self.seen = [*self.seen, (z, assigned)]

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        super().assign(*(torch.cat(parts) for parts in zip(*self.seen, strict=True)))
        self.seen = []


def buffers_found(module: pl.LightningModule, **policy: Any) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = [torch.cat(batches()[i : i + 3]) for i in range(0, 12, 3)]
        trainer(callbacks=[GradientAccumulation(**policy)]).fit(module, loader(data))
    messages = [str(w.message) for w in caught if issubclass(w.category, AccumulationWarning)]
    return [message for message in messages if "training_step changes the buffer" in message]


BUFFERS = [
    (Codebook, "codes"),
    (Queue, "queue"),
    (Spectral, "online.0.parametrizations.weight.0._v"),
    (Converged, "online.0.parametrizations.weight.0._v"),
]


@pytest.mark.parametrize("policy", [{"window": 2}, {"micro_batch": 3}, {"window": 2, "micro_batch": 3}])
@pytest.mark.parametrize(("module", "name"), BUFFERS)
def test_a_buffer_that_a_step_changes_and_its_loss_depends_on_is_named(
    module: type[Net], name: str, policy: dict[str, Any]
) -> None:
    (message,) = buffers_found(module(), **policy)
    assert message.startswith(f"training_step changes the buffer '{name}', and its loss depends on that")


@pytest.mark.parametrize(
    ("module", "policy"),
    [
        (Memory, {"window": 2}),  # nothing depends on them
        (CodebookOnce, {"window": 2}),
        (Codebook, {"micro_batch": "offload"}),
        (Queue, {"micro_batch": 3, "row_wise": ["online", "target"]}),
        (Codebook, {"window": 2, "check": False}),
    ],
)
def test_other_buffers_are_not_named(module: type[Net], policy: dict[str, Any]) -> None:
    assert buffers_found(module(), **policy) == []


@pytest.mark.parametrize(
    ("reference", "module", "policy"),
    [
        (Queue, Queue, {"micro_batch": "offload"}),
        (Queue, Queue, {"micro_batch": 3, "row_wise": ["online", "target"]}),
        (Codebook, CodebookOnce, {"micro_batch": 3}),
    ],
)
def test_what_is_advised_for_buffers_is_exact(reference: type[Net], module: type[Net], policy: dict[str, Any]) -> None:
    data = [torch.cat(batches()[i : i + 3]) for i in range(0, 12, 3)]
    by_hand, trained = reference(), module()
    for batch in data:
        train_by_hand(by_hand, [batch], epochs=1)
    trainer(callbacks=[GradientAccumulation(**policy)]).fit(trained, loader(data))
    assert relative_error(trained.parameters(), by_hand.parameters()) <= 1e-12
    floats = [[buffer for buffer in each.buffers() if buffer.is_floating_point()] for each in (trained, by_hand)]
    assert relative_error(*floats) <= 1e-12


class OfStatistic(Net):
    """Its loss is divided by a moving average of itself, in an attribute."""

    average: Any = 1.0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.average = 0.9 * self.average + 0.1 * self.of(loss)
        return loss / self.average

    def of(self, loss: Tensor) -> Any:
        return loss.item()


class OfTensor(OfStatistic):
    def of(self, loss: Tensor) -> Any:
        return loss.detach()


class Anneals(Net):
    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        return super().training_step(batch, batch_idx) * min(1.0, self.steps / 100)


class Counts(Net):
    """Keeps what no loss depends on."""

    steps = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.steps += 1
        self.last = super().training_step(batch, batch_idx)
        return self.last


@pytest.mark.parametrize("policy", [{"window": 2}, {"micro_batch": 3}])
@pytest.mark.parametrize(("module", "is_named"), [(OfStatistic, True), (OfTensor, True), (Anneals, True), (Counts, False)])
def test_attributes_that_a_step_changes_and_its_loss_depends_on_are_warned_of(
    module: type[Net], is_named: bool, policy: dict[str, Any]
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        data = [torch.cat(batches()[i : i + 3]) for i in range(0, 12, 3)]
        trainer(callbacks=[GradientAccumulation(**policy)]).fit(module(), loader(data))
    assert any("training_step keeps something in an attribute" in str(warning.message) for warning in caught) == is_named


def test_ranks_look_at_buffers_together() -> None:
    run = trainer(ddp(), devices=2, callbacks=[GradientAccumulation(window=2)])
    with warnings.catch_warnings():
        warnings.simplefilter("error", AccumulationWarning)
        with pytest.raises(Exception, match="training_step changes the buffer 'queue'"):
            run.fit(Queue(), loader(batches()))


# --- gradients that hooks see before their window is whole ---------------------------------------------------------------


class Clamps(Net):
    def on_after_backward(self) -> None:
        for parameter in self.online.parameters():
            parameter.grad.clamp_(-0.01, 0.01)


class Times(Net):
    def on_after_backward(self) -> None:
        self.backwards = getattr(self, "backwards", 0) + 1


class MayLog(Net):
    logs_gradients = False

    def on_after_backward(self) -> None:
        if self.logs_gradients:
            self.log("norm", max(parameter.grad.norm() for parameter in self.parameters()))


class ClampsThroughOthers(Net):
    def on_after_backward(self) -> None:
        nn.utils.clip_grad_value_(self.online.parameters(), 0.01)


class Measures(pl.Callback):
    def on_after_backward(self, run: Any, module: Any) -> None:
        self.norm = max(self.norm_of(parameter) for parameter in module.parameters())

    def norm_of(self, parameter: nn.Parameter) -> float:
        return 0.0 if parameter.grad is None else float(parameter.grad.norm())


class ClampsOnce(Net):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        Clamps.on_after_backward(self)


class ClampsInBackward(Net):
    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(loss, *args, **kwargs)
        Clamps.on_after_backward(self)


class Doubles(Net):
    def __init__(self) -> None:
        super().__init__()
        self.online[0].weight.register_post_accumulate_grad_hook(self.look)

    @staticmethod
    def look(parameter: Tensor) -> None:
        assert parameter.grad is not None

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(2 * loss, *args, **kwargs)


@pytest.mark.parametrize(
    ("module", "callbacks", "policy", "names"),
    [
        (Clamps, [], {"window": 3}, "Clamps"),
        (Net, [Measures], {"micro_batch": 2}, "Measures"),
        (Clamps, [Measures], {"window": 3}, "Measures Clamps"),
        (Clamps, [Measures], {"window": 1}, ""),
        (ClampsThroughOthers, [], {"window": 3}, "ClampsThroughOthers"),
        (Times, [], {"window": 3}, ""),
        (MayLog, [], {"window": 3}, ""),
        (ClampsOnce, [], {"window": 3}, ""),
        (Doubles, [], {"window": 3}, ""),
    ],
)
def test_a_hook_that_looks_at_gradients_of_micro_batches_is_named(
    module: type[Net], callbacks: list[Any], policy: dict[str, Any], names: str
) -> None:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(callbacks=[GradientAccumulation(**policy), *(kind() for kind in callbacks)]).fit(module(), loader(batches()))
    messages = [str(w.message) for w in caught if issubclass(w.category, AccumulationWarning) and " looks at" in str(w.message)]
    assert [message.partition(" looks at")[0] for message in messages] == [f"on_after_backward of {name}" for name in names.split()]


@pytest.mark.parametrize("policy", [{"window": 3}, {"micro_batch": 2}])
def test_a_backward_of_the_module_that_looks_at_gradients_of_micro_batches_is_named(policy: dict[str, Any]) -> None:
    with pytest.warns(AccumulationWarning, match="^backward of ClampsInBackward looks at gradients"):
        trainer(callbacks=[GradientAccumulation(**policy)]).fit(ClampsInBackward(), loader(batches()))


class ClampsEach(Net):
    def __init__(self) -> None:
        super().__init__()
        self.online[2].weight.register_post_accumulate_grad_hook(self.clamp)

    @staticmethod
    def clamp(parameter: Tensor) -> None:
        parameter.grad.clamp_(-0.01, 0.01)


@pytest.mark.parametrize("policy", [{"window": 3}, {"micro_batch": 2}, {"window": 3, "accumulate_dtype": torch.float64}])
def test_a_hook_of_a_parameter_that_gets_gradients_of_micro_batches_is_named(policy: dict[str, Any]) -> None:
    with pytest.warns(
        AccumulationWarning, match=r"^online\.2\.weight: register_post_accumulate_grad_hook runs .* every micro-batch"
    ):
        trainer(callbacks=[GradientAccumulation(**policy)]).fit(ClampsEach(), loader(batches()))


def test_no_hook_of_a_parameter_is_named_where_there_is_none_of_the_users() -> None:
    module = Net()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer(callbacks=[GradientAccumulation(1)]).fit(ClampsEach(), loader(batches()))
        for _ in range(2):
            trainer(callbacks=[GradientAccumulation(3, accumulate_dtype=torch.float64)]).fit(module, loader(batches()))
    assert [warning for warning in caught if issubclass(warning.category, AccumulationWarning)] == []


def test_gradients_that_are_clamped_before_the_optimizer_step_are_those_of_the_full_batch() -> None:
    module, whole = ClampsOnce(), ClampsOnce()
    trainer(callbacks=[GradientAccumulation(3)]).fit(module, loader(batches()))
    trainer("auto").fit(whole, loader([torch.cat(batches()[first : first + 3]) for first in range(0, 12, 3)]))
    assert relative_error(module.parameters(), whole.parameters()) < 1e-12


# --- gradients that training_step changes --------------------------------------------------------------------------------


class Adversarial(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = batch.clone().requires_grad_()
        super().training_step(batch, batch_idx).backward()
        batch = (batch + 0.1 * batch.grad.sign()).detach()
        self.zero_grad()
        return super().training_step(batch, batch_idx)


class LeavesGradients(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        super().training_step(batch.flip(0), batch_idx).backward()
        return super().training_step(batch, batch_idx)


class ClearsGradients(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.optimizers().zero_grad()
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("module", [Adversarial, LeavesGradients, ClearsGradients])
@pytest.mark.parametrize("policy", [{"window": 3}, {"micro_batch": 2}, {"window": 3, "accumulate_dtype": torch.float64}])
def test_a_training_step_that_changes_the_gradients_of_its_window_is_an_error(module: type[Net], policy: dict[str, Any]) -> None:
    start, trained = module(), module()
    with pytest.raises(RuntimeError, match=r"training_step changes the gradient of 'online\.0\.weight'"):
        trainer(callbacks=[GradientAccumulation(**policy)]).fit(trained, loader(batches()))
    assert relative_error(trained.parameters(), start.parameters()) == 0


class AdversarialByItself(Net):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        batch = batch.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(super().training_step(batch, batch_idx), batch)
        return super().training_step((batch + 0.1 * gradient.sign()).detach(), batch_idx)


@pytest.mark.parametrize(
    ("module", "policy"),
    [
        (AdversarialByItself, {"micro_batch": 2}),
        (Adversarial, {"micro_batch": "offload"}),
        (ClearsGradients, {"window": 1}),
    ],
)
def test_what_is_advised_for_gradients_in_training_step_is_exact(module: type[Net], policy: dict[str, Any]) -> None:
    trained, whole = module(), module()
    trainer(callbacks=[GradientAccumulation(**policy)]).fit(trained, loader(batches()))
    trainer("auto").fit(whole, loader(batches()))
    assert relative_error(trained.parameters(), whole.parameters()) < 1e-12
