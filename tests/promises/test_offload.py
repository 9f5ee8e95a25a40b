"""Batches that run whole, while what autograd saves for their backward waits on the host: the step, to the bit, and less memory."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from alive import Alive
from harness import assert_one_window_one_batch, dealt, on
from manual_modules import ALL, Dependent, Manual, draw
from other_memory import OtherMemory, other_memory
from sharded import ShardedLanguage
from support import Language, Toy, classified, fit, fp16_on_cpu, pad, sentences
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate
from whole_batch_losses import clip

from lightning_accum import AccumulationError, AccumulationWarning, GradientAccumulation, verify


@pytest.fixture
def memory() -> Iterator[OtherMemory]:
    with other_memory(0) as host:
        yield host


offloaded = partial(GradientAccumulation, micro_batch="offload")


def same_state(found: nn.Module, expected: nn.Module) -> bool:
    return all(torch.equal(found.state_dict()[name], value) for name, value in expected.state_dict().items())


def assert_equal_to_the_bit(make: Callable[[], Any], data: Any, arguments: Callable[[], dict[str, Any]] = dict) -> tuple[Any, Any]:
    """Train on whole batches with and without offloading; returns both Trainers."""
    whole, module = make(), make()
    torch.manual_seed(5)
    plain = fit(whole, data, strategy="auto", **arguments())
    torch.manual_seed(5)
    run = fit(module, data, offloaded(), **arguments())
    assert same_state(module, whole)
    assert not same_state(module, make())
    return plain, run


# fmt: off
def layers(x: Tensor) -> Tensor:
    for _ in range(12):
        x = (x.sin() * 1.5).exp().tanh() + x
    return x

def written_views(x: Tensor) -> Tensor:
    y = x.sin()
    y[:, :5].mul_(2)
    y[3] = 0
    return y.t()[3:9].reshape(-1)[::2] * y.cos().flatten()[:240][::2]

def penalty(x: Tensor) -> Tensor:
    (inner,) = torch.autograd.grad(layers(x).sum(), x, create_graph=True)
    return (inner.norm(dim=1) - 1) + layers(x).mean()

def checkpointed(x: Tensor, use_reentrant: bool) -> Tensor:
    for _ in range(4):
        x = checkpoint(lambda x: (x.sin() * x).exp().tanh(), x, use_reentrant=use_reentrant)
    return x

def users_hooks(x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return x.sin().exp().tanh()

def channels_last(x: Tensor) -> Tensor:
    wide = x.reshape(40, 5, 2, 2).contiguous(memory_format=torch.channels_last) * 1
    return F.conv2d(wide, torch.ones(3, 5, 1, 1).to(x)).relu().square()[:, ::2, 1:].sin()
# fmt: on


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "many layers": layers,
    "views that are written into": written_views,
    "complex numbers": lambda x: torch.fft.fft((z := torch.complex(x.sin(), x.cos()).conj()) * z.exp()).abs() * z.imag,
    "a sparse matrix": lambda x: torch.sparse.mm(torch.sparse_coo_tensor(torch.arange(40).repeat(2, 1), x[:, 0].sin()), x.cos()),
    "parts that are written one by one": lambda x: torch.stack([layers(part.sigmoid_()) for part in x.sin().unsafe_chunk(2)]),
    "hooks of the user's own": users_hooks,
    "a small view of a large storage": lambda x: (x * 2)[:1, :1].sin(),
    "channels last": channels_last,
    "gradients of gradients": penalty,
    "a checkpoint": partial(checkpointed, use_reentrant=False),
    "a reentrant checkpoint": partial(checkpointed, use_reentrant=True),
    "a compiled function": torch.compile(layers, backend="aot_eager"),
}


def of(operation: Callable[[Tensor], Tensor]) -> Toy:
    return Toy(lambda net, batch: operation(net(batch)).square().sum() / 100, net=lambda: nn.Linear(20, 20))


def rows(number: int = 40, columns: int = 20) -> Tensor:
    return torch.randn(number, columns, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_of_any_operation_are_those_without_it(memory: OtherMemory, name: str) -> None:
    assert_equal_to_the_bit(lambda: of(OPERATIONS[name]), [rows(), rows() + 1])
    assert memory.out > 0


def changed(x: Tensor, in_place: bool = True) -> Tensor:
    z = x.sin()
    return z.exp() * (x.add_(1) if in_place else x + 1)


def test_a_change_in_place_of_what_was_saved_and_stays_is_an_error() -> None:
    with other_memory(10**6) as host, pytest.raises(RuntimeError, match="modified by an inplace operation"):
        fit(of(changed), [rows()], offloaded())
    assert host.out == 0


def test_a_change_in_place_of_what_was_moved_does_no_harm(memory: OtherMemory) -> None:
    found, expected = of(changed), of(partial(changed, in_place=False))
    fit(found, [rows()], offloaded())
    fit(expected, [rows()], strategy="auto")
    assert same_state(found, expected)
    assert memory.out > 0


def test_parameters_buffers_and_the_batch_stay_where_they_are(memory: OtherMemory) -> None:
    def loss(net: Any, batch: Tensor) -> Tensor:
        return net[0](batch).sum() + (net[1].weight * net[1].running_mean).sum() + (net[0].weight * net[1].bias).sum()

    fit(Toy(loss, net=lambda: nn.Sequential(nn.Linear(20, 20), nn.BatchNorm1d(20))), [rows()], offloaded())
    assert memory.out == 0


def test_without_a_second_memory_nothing_is_hooked() -> None:
    def loss(net: Any, batch: Tensor) -> Tensor:
        with torch.autograd.graph.disable_saved_tensors_hooks("there are none"):
            return net(batch).square().sum() / 100

    assert_equal_to_the_bit(lambda: Toy(loss), [rows(8, 4)])


def test_hooks_end_with_the_loader_batch_also_where_it_fails(memory: OtherMemory) -> None:
    class Fails(Toy):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1:
                raise KeyError("of its own")
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            before = memory.out
            self.net.weight.exp().exp().sum().backward()
            assert memory.out == before

    with pytest.raises(KeyError, match="of its own"):
        fit(Fails(lambda net, batch: layers(net(batch)).mean()), [rows(8, 4)] * 3, offloaded())
    assert torch.func.grad(lambda x: x.square().sum())(torch.ones(2)).tolist() == [2, 2]


def normalised() -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Conv2d(6, 6, 3, padding=1),
        nn.BatchNorm2d(6), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
    )  # fmt: skip


def contrastive(net: nn.Module, batch: Any) -> Tensor:
    return clip(found := net(batch[0]), found.flip(1), found, torch.tensor(1.0))


class Images(Toy):  # BatchNorm and dropout, in single precision
    def __init__(self, loss: Any, optimizer: str = "adamw") -> None:
        super().__init__(loss, optimizer, normalised)
        self.float()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss


def images() -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [[torch.randn(12, 1, 8, 8, generator=generator), torch.randint(0, 4, (12,), generator=generator)] for _ in range(4)]


PRECISIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "32": dict,
    "64": lambda: {"precision": "64-true"},
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
    "16-mixed": lambda: {"plugins": [fp16_on_cpu()]},
}


@pytest.mark.some_cases(3, 6)
@pytest.mark.filterwarnings("error::lightning_accum.AccumulationWarning")
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("loss", [classified, contrastive])
def test_a_training_is_that_of_the_whole_batches_to_the_bit(memory: OtherMemory, loss: Any, optimizer: str, precision: str) -> None:
    arguments = lambda: {"max_epochs": 2, **PRECISIONS[precision]()}  # noqa: E731
    plain, run = assert_equal_to_the_bit(lambda: Images(loss, optimizer), images(), arguments)
    assert plain.callback_metrics.items() <= run.callback_metrics.items()
    assert memory.out > 0


@pytest.mark.some_cases(3)
@pytest.mark.parametrize("kind", [Dependent, *ALL])
def test_manual_optimization_is_that_of_the_whole_batches_to_the_bit(memory: OtherMemory, kind: type[Manual]) -> None:
    """Also where a loss depends on the step of another optimizer."""
    assert_equal_to_the_bit(lambda: kind("adamw"), [default_collate(rows) for rows in draw(kind)], lambda: {"max_epochs": 2})
    assert memory.out > 0


OPTIONS = [on("ddp", 1, static_graph=True), on("ddp", 1, find_unused_parameters=True)]
ON_RANKS = [on("ddp", 3), *OPTIONS, on("fsdp2", 1), on("fsdp1", 1), on("fsdp2", 3), on("accum", 3)]


@pytest.mark.some_cases(1, 3)
@pytest.mark.parametrize(("engine", "options", "window"), ON_RANKS)
def test_windows_and_ranks(memory: OtherMemory, engine: str, options: dict[str, Any], window: int) -> None:
    def look(trainer: pl.Trainer, pl_module: Any) -> None:  # something was moved on each of several ranks
        assert trainer.world_size == 1 or memory.out > 0

    by_rank, moves = dealt(sentences(18), 3, engine), pl.callbacks.LambdaCallback(on_train_end=look)
    make = partial(ShardedLanguage, "adamw", reshard_after_forward=True)
    assert_one_window_one_batch(make, by_rank, offloaded(window), engine, options, callbacks=[moves])


LAYERS = 12


def test_the_peak_is_a_few_layers_and_not_all_of_them(memory: OtherMemory) -> None:
    class Deep(Toy):  # convolutions with BatchNorm between them, all of one width
        def __init__(self, alive: Alive) -> None:
            layers = (nn.Sequential(nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16), nn.Tanh()) for _ in range(LAYERS))
            loss = lambda net, batch: (net(batch) - 1).square().mean()  # noqa: E731
            super().__init__(loss, net=lambda: nn.Sequential(nn.Conv2d(1, 16, 1), *layers))
            self.alive, self.peaks = alive, []

        def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
            self.before = self.alive.peak = self.alive.bytes

        def on_train_batch_end(self, *_: Any) -> None:
            self.peaks.append(self.alive.peak - self.before)

    data, one_layer, peaks = [torch.randn(64, 1, 8, 8).double() for _ in range(3)], 64 * 16 * 8 * 8 * 8, []
    for callbacks in ((), (offloaded(log=False),)):
        with Alive() as alive:
            fit(module := Deep(alive), data, *callbacks)
        peaks.append(module.peaks[-1] / one_layer)
    assert peaks[0] > 2 * LAYERS
    assert peaks[1] < 5  # a layer and its gradients
    assert memory.most > 1.5 * LAYERS * one_layer


@pytest.mark.parametrize("policy", [{"micro_batch": 4}, {"window": 2}, {"window": 2, "micro_batch": "offload"}])
def test_batch_norm_in_micro_batches_is_warned_of_and_offload_named(policy: dict[str, Any]) -> None:
    with pytest.warns(AccumulationWarning, match=r'BatchNorm.*net.1.*micro_batch="offload"'):
        fit(Images(classified), images(), GradientAccumulation(**policy))


def test_verify_compares_windows_of_several_and_has_nothing_to_compare_in_one() -> None:
    data = [pad(sentences(36)[start : start + 6]) for start in (0, 6)]
    with pytest.raises(AccumulationError, match="offload"):
        verify(Language(), data, micro_batch="offload")
    assert verify(Language(), data, window=2, micro_batch="offload")
