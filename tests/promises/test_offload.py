"""Batches that run whole, while what autograd saves for their backward waits on the host: the step, to the bit, and less memory."""

from __future__ import annotations

import gc
import logging
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from alive import Alive
from lightning.fabric.utilities.exceptions import MisconfigurationException
from manual_modules import ALL, DEPENDENT, GAN, Manual, Remembers, draw, full_batches
from other_memory import OtherMemory
from sharded import DoublePrecision, ShardedLanguage, fsdp1, fsdp2, needs_sharding_on_cpu
from support import Language, ddp, fp16_on_cpu, loader, pad, relative_error, sentences, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_accum import DoesNotAddUpError, GradientAccumulation, verify
from lightning_accum.whole import offload
from lightning_accum.whole.offload import Offload

CPU = torch.device("cpu")


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[OtherMemory]:
    """The CPU is a device with a host, to which also the smallest tensors are moved."""
    host = OtherMemory()
    monkeypatch.setattr(offload, "lane_for", host)
    monkeypatch.setattr(offload, "_SMALL", 0)
    yield host
    gc.collect()
    assert host.is_quiet


def offloaded(window: int | None = None, **policy: Any) -> GradientAccumulation:
    return GradientAccumulation(window, micro_batch="offload", **policy)


# --- saved tensors ----------------------------------------------------------------------------------------------------


def gradients(function: Callable[..., Tensor], *inputs: Tensor, is_offloaded: bool = True) -> list[Tensor]:
    """Of what a function returns, with respect to copies of its inputs."""
    inputs = tuple(value.clone().requires_grad_() for value in inputs)
    made = [value * 1 for value in inputs]  # no leaves, which stay
    if is_offloaded:
        with Offload(CPU).engaged(inputs):
            result = function(*made)
    else:
        result = function(*made)
    result.backward()
    return [value.grad for value in inputs]


def is_equal(found: list[Tensor], expected: list[Tensor]) -> bool:
    return len(found) == len(expected) and all(map(torch.equal, found, expected))


def layers(x: Tensor) -> Tensor:
    for _ in range(12):
        x = (x.sin() * 1.5).exp().tanh() + x
    return x.sum()


def test_values_that_come_back_are_those_that_went_away(memory: OtherMemory) -> None:
    x = torch.randn(50, 20)
    assert is_equal(gradients(layers, x), gradients(layers, x, is_offloaded=False))
    assert memory.out >= 36 * x.nbytes
    assert memory.back >= memory.out - offload._LEAVING * x.nbytes  # the last were still there


def test_views_of_one_storage_are_moved_once(memory: OtherMemory) -> None:
    def attention(x: Tensor) -> Tensor:
        q, k, v = (x.repeat(1, 3) * 2).chunk(3, dim=1)
        return (q @ k.T @ v).expand(2, -1, -1).sin().sum()

    x = torch.randn(16, 16)
    expected = gradients(attention, x, is_offloaded=False)
    assert memory.out == 0
    assert is_equal(gradients(attention, x), expected)
    # x three times wide; what the first product gives; what sin takes, which is expanded and made once
    assert memory.out == 3 * x.nbytes + x.nbytes + x.nbytes


def test_a_storage_that_was_changed_between_two_saves_is_moved_twice(memory: OtherMemory) -> None:
    def twice(x: Tensor) -> Tensor:
        y = x * 2
        first = y.sin()
        for _ in range(offload._LEAVING):  # until it has left
            first = first.exp()
        second = y.mul_(3).cos()
        return (first * second).sum()

    x = torch.randn(6, 7)
    y = 2 * x
    inner, outer = y.sin().exp().exp(), (3 * y).cos()
    expected = 2 * y.cos() * y.sin().exp() * inner * outer - 6 * inner * (3 * y).sin()
    assert relative_error(gradients(twice, x), [expected]) < 1e-6


@pytest.mark.parametrize("is_small", [True, False])
def test_a_change_in_place_of_what_was_saved_is_an_error(memory: OtherMemory, monkeypatch: Any, is_small: bool) -> None:
    def changed(x: Tensor) -> Tensor:
        y = x * 2
        z = y.sin()
        y.add_(1)
        return z.sum()

    monkeypatch.setattr(offload, "_SMALL", 1000 if is_small else 0)
    for is_offloaded in (True, False):
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            gradients(changed, torch.randn(5), is_offloaded=is_offloaded)
    assert (memory.out == 0) == is_small


def test_a_change_while_it_was_on_its_way_is_an_error_also_once_it_has_left(memory: OtherMemory) -> None:
    def changed(x: Tensor) -> Tensor:
        y = x * 2
        z = y.sin()
        y.add_(1)
        for _ in range(2 * offload._LEAVING):
            z = z.exp()
        return z.sum()

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients(changed, torch.randn(5))


def test_gradients_of_gradients(memory: OtherMemory) -> None:
    def penalty(x: Tensor) -> Tensor:
        (inner,) = torch.autograd.grad(layers(x), x, create_graph=True)
        return (inner.norm(dim=1) - 1).square().mean() + layers(x) / 100

    x = torch.randn(8, 5, dtype=torch.float64)
    assert is_equal(gradients(penalty, x), gradients(penalty, x, is_offloaded=False))


def test_a_graph_that_is_kept_gives_its_gradient_again(memory: OtherMemory) -> None:
    x = torch.randn(8, 5, requires_grad=True)
    with Offload(CPU).engaged([x]):
        loss = layers(x)
        several = [torch.autograd.grad(loss, x, retain_graph=True)[0] for _ in range(3)]
    (outside,) = torch.autograd.grad(loss, x)
    assert is_equal([*several, outside], 4 * gradients(layers, x.detach(), is_offloaded=False))


def test_graphs_whose_layers_alternate_and_one_that_has_no_backward(memory: OtherMemory) -> None:
    x = torch.randn(40, 40)
    one, other, dropped = (x.clone().requires_grad_() for _ in range(3))
    with Alive() as alive, Offload(CPU).engaged([x, one, other, dropped]):
        a, b, c = one, other, dropped
        for _ in range(30):
            a, b, c = a.sin(), b.cos(), c.tanh()
        del c
        before = alive.peak = alive.bytes
        a.sum().backward()  # in between are those of the other, which it does not need
        b.sum().backward()
        assert alive.peak - before < 12 * x.nbytes
    expected = x.clone().requires_grad_()
    for _ in range(30):
        x = x.cos()
    y = expected
    for _ in range(30):
        y = y.cos()
    y.sum().backward()
    assert torch.equal(other.grad, expected.grad)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_gradient_checkpointing_inside(memory: OtherMemory, use_reentrant: bool) -> None:
    def checkpointed(x: Tensor) -> Tensor:
        for _ in range(4):
            x = checkpoint(lambda x: (x.sin() * x).exp().tanh(), x, use_reentrant=use_reentrant)
        return x.sum()

    x = torch.randn(30, 30)
    assert is_equal(gradients(checkpointed, x), gradients(checkpointed, x, is_offloaded=False))
    assert memory.out >= 4 * x.nbytes  # what goes into the blocks


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_what_a_compiled_module_saves_is_moved(memory: OtherMemory, backend: str) -> None:
    torch._dynamo.reset()
    compiled, x = torch.compile(layers, backend=backend), torch.randn(50, 20)
    found, moved = gradients(compiled, x), memory.out
    assert relative_error(found, gradients(layers, x, is_offloaded=False)) < 1e-5
    assert moved >= x.nbytes
    torch._dynamo.reset()


class WritesIntoItsInput(torch.autograd.Function):
    """Saves what it was given, and what it makes of that in place."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, y: Tensor) -> Tensor:
        ctx.mark_dirty(x)
        x.mul_(y)
        ctx.save_for_backward(x, y)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        x, y = ctx.saved_tensors
        return gradient * y, gradient * x / y


def packed(x: Tensor) -> Tensor:
    torch.manual_seed(1)
    sequences = nn.utils.rnn.pack_padded_sequence(x.reshape(4, 10, 20), torch.tensor([3, 10, 1, 7]), True, False)
    return nn.LSTM(20, 8, batch_first=True).double()(sequences)[0].data


def written_views(x: Tensor) -> Tensor:
    y = x.sin()
    y[:, :5].mul_(2)
    y[3] = 0
    return y.t()[3:9].reshape(-1)[::2] * y.cos().flatten()[:240][::2]


def spectrum(x: Tensor) -> Tensor:
    turned = torch.complex(x.sin(), x.cos()).conj()
    return torch.fft.fft(turned * turned.exp()).abs() * turned.imag


def sparse_values(x: Tensor) -> Tensor:
    matrix = torch.sparse_coo_tensor(torch.arange(40).repeat(2, 1), x[:, 0].sin(), (40, 40))
    return torch.sparse.mm(matrix, x.cos())


def decomposed(x: Tensor) -> Tensor:
    square = x[:20] @ x[:20].T + torch.eye(20, dtype=x.dtype)
    return torch.linalg.solve(square, x[:20]) + torch.linalg.svd(x[:20])[1] + torch.logdet(square)


def attended(x: Tensor) -> Tensor:
    heads = x.reshape(2, 20, 2, 10).transpose(1, 2)
    return F.scaled_dot_product_attention(heads, heads.sin(), heads.cos(), is_causal=True)


OPERATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "views that are written into": written_views,
    "an own function that writes into its input": lambda x: WritesIntoItsInput.apply(x * 3, x.exp()).sin(),
    "complex numbers, conjugated": spectrum,
    "a sparse matrix": sparse_values,
    "a packed LSTM": packed,
    "attention": attended,
    "decompositions": decomposed,
    "indices": lambda x: x.sin().gather(1, x.argsort(1)).topk(3).values + x.sort(1).values.cumsum(1).cumprod(1)[:, :3],
    "strides": lambda x: x.exp().as_strided((30, 5), (3, 2), 7).sin() * x.exp().expand(2, -1, -1)[:, ::2, 1::3].sum(),
    "many tensors in one call": lambda x: torch._foreach_mul([x.sin(), x.cos()], [2.0, 3.0])[1].exp(),
    "hooks of the user's own": lambda x: user_hooks(x).tanh(),
}


def user_hooks(x: Tensor) -> Tensor:
    with torch.autograd.graph.save_on_cpu():
        return x.sin().exp()


@pytest.mark.parametrize("name", OPERATIONS)
def test_gradients_of_other_operations_are_those_without_it(memory: OtherMemory, name: str) -> None:
    def total(x: Tensor) -> Tensor:
        return OPERATIONS[name](x).square().sum()

    x = torch.randn(40, 20, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    assert is_equal(gradients(total, x), gradients(total, x, is_offloaded=False))
    assert memory.out > 0


class Doubled(Tensor):
    pass


def test_what_stays_where_it_is(memory: OtherMemory, monkeypatch: Any) -> None:
    monkeypatch.setattr(offload, "_SMALL", 100)
    weight, buffer, batch = nn.Parameter(torch.randn(9, 9)), torch.randn(9, 9), torch.randn(9, 9)

    def moved(function: Callable[[Tensor], Tensor]) -> int:
        before, x = memory.out, torch.randn(9, 9, requires_grad=True)
        with Offload(CPU).engaged([weight, buffer, batch, x]):
            result = function(x)
        assert len(torch.autograd.grad(result, x)) == 1
        return memory.out - before

    assert moved(lambda x: (x @ weight.t()).sum()) == 0
    assert moved(lambda x: (x @ weight.detach()[:8].t()).sum()) == 0
    assert moved(lambda x: (x * buffer[2:3]).sum()) == 0
    assert moved(lambda x: (x * batch.T).sum()) == 0
    assert moved(lambda x: (x[:1, :1] * torch.randn(1, 1)).sum()) == 0  # small
    assert moved(lambda x: torch.sparse.mm(torch.eye(9).to_sparse(), x).sum()) == 0
    assert moved(lambda x: (x * torch.randn(9, 9).as_subclass(Doubled)).sum().as_subclass(Tensor)) == 0
    assert moved(lambda x: (x * torch.randn(9, 9, dtype=torch.complex64).conj()).real.sum()) == 0
    assert moved(lambda x: nn.functional.pad(x, (1, 1)).sum()) == 0  # nothing is saved
    nested = torch.nested.nested_tensor([torch.randn(2, 9), torch.randn(7, 9)], layout=torch.jagged)
    assert moved(lambda x: nn.functional.linear(nested.sin(), x).values().sum()) == 0
    assert moved(lambda x: (x * torch.randn(9, 9)).sum()) == 324


def test_a_small_view_of_a_large_storage_does_not_keep_it(memory: OtherMemory, monkeypatch: Any) -> None:
    monkeypatch.setattr(offload, "_SMALL", 100)

    def first(x: Tensor) -> Tensor:
        return (x * 2)[:1, :1].sin().sum()

    x = torch.randn(30, 30)
    assert is_equal(gradients(first, x), gradients(first, x, is_offloaded=False))
    assert memory.out == x.nbytes


def test_an_output_that_stays_does_not_keep_its_own_graph_alive(memory: OtherMemory, monkeypatch: Any) -> None:
    monkeypatch.setattr(offload, "_SMALL", 1000)
    with Offload(CPU).engaged([]):
        y = torch.randn(5, requires_grad=True).exp()
    storage = weakref.ref(y.untyped_storage())
    del y
    assert storage() is None


def test_channels_last_and_gaps_keep_their_strides(memory: OtherMemory) -> None:
    conv = nn.Conv2d(4, 4, 3)

    def run(x: Tensor) -> Tensor:
        wide = x.contiguous(memory_format=torch.channels_last) * 1
        seen.append(wide.stride())
        return conv(wide).relu().square()[:, ::2, 1:].sin().sum()

    seen: list[Any] = []
    x = torch.randn(2, 4, 6, 6)
    assert is_equal(gradients(run, x), gradients(run, x, is_offloaded=False))
    assert seen[0][1] == 1


# --- streams ----------------------------------------------------------------------------------------------------------


class _Stream:
    """Notes what it waits for."""

    def __init__(self, name: str, log: list[str]) -> None:
        self.name, self.log = name, log

    def wait_stream(self, other: _Stream) -> None:
        self.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: str) -> None:
        self.log.append(f"{self.name} waits for {event}")

    def record_event(self) -> str:
        return f"event of {self.name}"


class _Device:
    """Of :mod:`torch.cuda`, what a lane calls."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.now = _Stream("main", self.log)

    def Stream(self, device: Any) -> _Stream:
        return _Stream("copies", self.log)

    def current_stream(self, device: Any) -> _Stream:
        return self.now

    def stream(self, stream: _Stream) -> Any:
        from contextlib import nullcontext

        self.log.append(f"on {stream.name}")
        return nullcontext()


def test_copies_have_a_stream_and_computation_waits_for_them_where_their_memory_is_used_anew(monkeypatch: Any) -> None:
    device = _Device()
    monkeypatch.setattr(torch, "get_device_module", lambda _: device)
    lane = offload.StreamLane(CPU)
    target = torch.zeros(4)
    copy = lane.copy(target, torch.ones(4))
    assert device.log == ["copies waits for main", "on copies"]
    assert torch.equal(target, torch.ones(4))
    lane.wait(copy)
    assert device.log[2:] == ["main waits for event of copies"]
    device.now = _Stream("side", device.log)
    lane.wait(copy)
    assert device.log[3:] == ["main waits for event of copies", "side waits for event of copies"]


def test_on_the_cpu_nothing_is_moved_and_nothing_is_hooked() -> None:
    assert not Offload(CPU).moves
    with Offload(CPU).engaged([]), torch.autograd.graph.disable_saved_tensors_hooks("there are none"):
        assert torch.func.grad(lambda x: x.square().sum())(torch.ones(2)).tolist() == [2, 2]


# --- trainings --------------------------------------------------------------------------------------------------------


class Normalised(pl.LightningModule):
    """BatchNorm, dropout, a residual, and what one asks for."""

    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = nn.Sequential(
            nn.Conv2d(1, 6, 3, padding=1), nn.BatchNorm2d(6), nn.ReLU(inplace=True), nn.Dropout(0.2), nn.Conv2d(6, 6, 3, padding=1),
            nn.BatchNorm2d(6), nn.GELU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 4),
        )  # fmt: skip
        self.optimizer, self.seen = optimizer, []

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = self.loss(self.net(batch[0]), batch[1])
        self.log("loss", loss)
        self.seen.append((batch_idx, len(batch[0])))
        return loss

    def loss(self, found: Tensor, labels: Tensor) -> Tensor:
        return F.cross_entropy(found, labels)

    def configure_optimizers(self) -> Any:
        kind = torch.optim.AdamW if self.optimizer == "adamw" else torch.optim.SGD
        return kind(self.parameters(), lr=0.05)


class Contrastive(Normalised):
    def loss(self, found: Tensor, labels: Tensor) -> Tensor:
        found = F.normalize(found)
        return F.cross_entropy(found @ found.T / 0.1, torch.arange(len(found)))


class Penalised(Normalised):
    """A gradient penalty: the backward is differentiated."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        images = batch[0].clone().requires_grad_()
        found = self.net(images)
        (gradient,) = torch.autograd.grad(found.square().sum(), images, create_graph=True)
        return self.loss(found, batch[1]) + (gradient.flatten(1).norm(dim=1) - 1).square().mean()


def images(number: int = 5, rows: int = 12) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(1)
    return [
        [torch.randn(rows, 1, 8, 8, generator=generator), torch.randint(0, 4, (rows,), generator=generator)] for _ in range(number)
    ]


def same_state(found: nn.Module, expected: nn.Module) -> bool:
    return all(torch.equal(found.state_dict()[name], value) for name, value in expected.state_dict().items())


PRECISIONS: dict[str, Callable[[], dict[str, Any]]] = {
    "32": dict,
    "64": lambda: {"precision": "64-true"},
    "bf16-mixed": lambda: {"precision": "bf16-mixed"},
    "16-mixed": lambda: {"plugins": [fp16_on_cpu()]},
}


@pytest.mark.some_cases(4)
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("kind", [Normalised, Contrastive, Penalised])
def test_a_training_is_that_of_the_whole_batches_to_the_bit(
    memory: OtherMemory, kind: type[Normalised], optimizer: str, precision: str
) -> None:
    whole, module = kind(optimizer), kind(optimizer)
    plain = trainer("auto", max_epochs=2, **PRECISIONS[precision]())
    torch.manual_seed(5)
    plain.fit(whole, loader(images()))
    run = trainer("accum", max_epochs=2, callbacks=[offloaded()], **PRECISIONS[precision]())
    torch.manual_seed(5)
    run.fit(module, loader(images()))
    assert same_state(module, whole)
    assert module.seen == whole.seen
    assert plain.callback_metrics.items() <= run.callback_metrics.items()
    assert memory.out > 0


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("kind", [*ALL, *DEPENDENT, Remembers])
def test_manual_optimization_is_that_of_the_whole_batches_to_the_bit(memory: OtherMemory, kind: type[Manual]) -> None:
    """Also where a loss depends on the step of another optimizer: a GAN, MAML."""
    by_rank = draw(kind, 1)
    whole, module = kind(by_rank, "adamw"), kind(by_rank, "adamw")
    trainer("auto", max_epochs=2).fit(whole)
    run = trainer("accum", max_epochs=2, callbacks=[offloaded()])
    run.fit(module)
    assert same_state(module, whole)
    assert memory.out > 0


def test_the_resnet_on_digits_is_that_of_the_whole_batches_to_the_bit(memory: OtherMemory) -> None:
    pytest.importorskip("sklearn")
    from digits import Digits, digits

    x, y = digits()[0]
    data = list(zip(x[:480].split(96), y[:480].split(96), strict=True))
    whole, module = Digits("adamw", width=4).double(), Digits("adamw", width=4).double()
    trainer("auto").fit(whole, loader(data))
    trainer("accum", callbacks=[offloaded()]).fit(module, loader(data))
    assert same_state(module, whole)
    assert memory.out > 0


POLICIES = [{"on_nonfinite": "skip"}, {"on_nonfinite": "raise"}, {"window": 2}, {"window": 2, "accumulate_dtype": torch.float64}]


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_other_arguments_do_as_without_it(memory: OtherMemory, policy: dict[str, Any]) -> None:
    modules = [Normalised("adamw"), Normalised("adamw")]
    for module, micro_batch in zip(modules, ("offload", None), strict=True):
        torch.manual_seed(5)
        callback = GradientAccumulation(micro_batch=micro_batch, **policy)
        trainer("accum", callbacks=[callback]).fit(module, loader(images()))
    assert same_state(*modules)
    assert memory.out > 0


def test_an_optimizer_that_runs_its_closure_several_times(memory: OtherMemory) -> None:
    class Closing(Language):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters(), max_iter=4)

    modules = [Closing(), Closing()]
    trainer("auto").fit(modules[0], loader(SENTENCES[:2]))
    trainer("accum", callbacks=[offloaded()]).fit(modules[1], loader(SENTENCES[:2]))
    assert same_state(*modules)


SENTENCES = [pad(sentences(36)[i : i + 6]) for i in range(0, 36, 6)]


def test_windows_of_several_loader_batches_are_weighed(memory: OtherMemory) -> None:
    whole = Language("adamw")
    trainer("auto").fit(whole, loader([pad(sentences(36)[i : i + 18]) for i in (0, 18)]))
    module = Language("adamw")
    trainer("accum", callbacks=[offloaded(3)]).fit(module, loader(SENTENCES))
    assert relative_error(module.parameters(), whole.parameters()) < 1e-12


@pytest.mark.parametrize("kind", [GAN])
def test_windows_of_manual_optimization(memory: OtherMemory, kind: type[Manual]) -> None:
    by_rank = draw(kind, 1)
    whole, module = kind([full_batches(by_rank, 3)]), kind(by_rank)
    trainer("auto").fit(whole)
    trainer("accum", callbacks=[offloaded(3)]).fit(module)
    assert relative_error(module.parameters(), whole.parameters()) < 1e-12


class OnRanks(Language):
    def train_dataloader(self) -> Any:
        return loader(SENTENCES[self.trainer.global_rank :: 2])

    def on_train_end(self) -> None:
        assert self.trainer.strategy.offload is not None
        assert offload.lane_for(CPU).out > 0
        assert not offload.lane_for(CPU).faults


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("window", [1, 3])
@pytest.mark.parametrize("arguments", [{}, {"static_graph": True}, {"find_unused_parameters": True}], ids=str)
def test_two_ranks(memory: OtherMemory, window: int, arguments: dict[str, Any]) -> None:
    rows = sentences(36)
    whole = Language("adamw")
    batches = [rows[i : i + 12 * window] for i in range(0, 36, 12 * window)]
    trainer("auto").fit(whole, loader(list(map(pad, batches))))
    module = OnRanks("adamw")
    trainer(ddp(**arguments), devices=2, callbacks=[offloaded(window)]).fit(module)
    assert relative_error(module.parameters(), whole.parameters()) < 1e-12


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("kind", [GAN, *DEPENDENT])
def test_manual_optimization_on_two_ranks(memory: OtherMemory, kind: type[Manual]) -> None:
    by_rank = draw(kind, 2)
    whole, module = kind([full_batches(by_rank, 1)]), kind(by_rank)
    trainer("auto").fit(whole)
    trainer(ddp(), devices=2, callbacks=[offloaded()]).fit(module)
    assert relative_error(module.parameters(), whole.parameters()) < 1e-12


@pytest.mark.some_cases(1)
@needs_sharding_on_cpu
@pytest.mark.parametrize("engine", ["fsdp1", "fsdp2"])
def test_sharded_modules_whose_parameters_stay(memory: OtherMemory, engine: str) -> None:
    class Sharded(ShardedLanguage, OnRanks):
        pass

    whole = Language("adamw")
    trainer("auto").fit(whole, loader([pad(sentences(36)[i : i + 12]) for i in (0, 12, 24)]))
    strategy, plugins = (fsdp1(), [DoublePrecision()]) if engine == "fsdp1" else (fsdp2(), [])
    run = trainer(strategy, devices=2, plugins=plugins, callbacks=[offloaded()])
    run.fit(Sharded("adamw", reshard_after_forward=True))
    expected = {f"net.{name}": value for name, value in whole.net.named_parameters()}
    assert relative_error([run.whole[name] for name in expected], expected.values()) < 1e-12


def test_hooks_end_with_the_loader_batch_also_where_it_fails(memory: OtherMemory) -> None:
    class Fails(Normalised):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            if batch_idx == 1:
                raise KeyError("of its own")
            return loss

        def on_train_batch_end(self, *_: Any) -> None:
            before = memory.out
            self.net[0].weight.exp().exp().sum().backward()
            assert memory.out == before

    with pytest.raises(KeyError, match="of its own"):
        trainer("accum", callbacks=[offloaded()]).fit(Fails(), loader(images()))
    assert torch.func.grad(lambda x: x.square().sum())(torch.ones(2)).tolist() == [2, 2]


# --- memory -----------------------------------------------------------------------------------------------------------

ROWS, LAYERS = 64, 12
ONE_LAYER = ROWS * 16 * 8 * 8 * 4


class Deep(pl.LightningModule):
    """Convolutions with BatchNorm between them, all of one width."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        layers = (nn.Sequential(nn.Conv2d(16, 16, 1, bias=False), nn.BatchNorm2d(16), nn.Tanh()) for _ in range(LAYERS))
        self.net = nn.Sequential(nn.Conv2d(1, 16, 1), *layers)
        self.alive: Alive | None = None
        self.peaks: list[int] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.net(batch) - 1).square().mean()

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.before = self.alive.peak = self.alive.bytes

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.peaks.append(self.alive.peak - self.before)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_the_peak_is_a_few_layers_and_not_all_of_them(memory: OtherMemory) -> None:
    data, peaks = [torch.randn(ROWS, 1, 8, 8) for _ in range(3)], []
    for run in (trainer("auto"), trainer("accum", callbacks=[offloaded(log=False)])):
        module = Deep()
        with Alive() as module.alive:
            run.fit(module, loader(data))
        peaks.append(module.peaks[-1] / ONE_LAYER)
    assert peaks[0] > 2 * LAYERS
    assert peaks[1] < 7  # a layer, its gradients, two on their way and two ahead
    assert memory.most > 1.5 * LAYERS * ONE_LAYER


# --- what one sees ----------------------------------------------------------------------------------------------------


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("kind", [Normalised, GAN])
@pytest.mark.parametrize("window", [1, 2])
def test_the_line_at_the_start_says_what_waits_where(caplog: Any, request: Any, kind: Any, window: int) -> None:
    def line() -> str:
        module = kind(draw(GAN, 1)) if kind is GAN else kind()
        data = () if kind is GAN else (loader(images()),)
        caplog.clear()
        with caplog.at_level(logging.INFO, "lightning.pytorch"):
            trainer("accum", callbacks=[offloaded(window)]).fit(module, *data)
        (line,) = [record.message for record in caplog.records if record.message.startswith("GradientAccumulation: ")]
        return line

    assert "each runs whole (a CPU has no other memory to offload to)" in line()
    request.getfixturevalue("memory")
    assert "each runs whole, and what it saves for its backward waits in the memory of the host" in line()


@pytest.mark.filterwarnings("error:.*BatchNorm.*")
def test_a_window_of_one_batch_is_neither_checked_nor_warned_of(caplog: Any) -> None:
    with caplog.at_level(logging.INFO, "lightning.pytorch"):
        trainer("accum", callbacks=[offloaded()]).fit(Contrastive(), loader(images()))
    assert "add up" not in caplog.text
    assert "checked" not in caplog.text


@pytest.mark.parametrize("policy", [{"micro_batch": 4}, {"window": 2}, {"window": 2, "micro_batch": "offload"}])
def test_batch_norm_in_micro_batches_is_warned_of_and_offload_named(policy: dict[str, Any]) -> None:
    with pytest.warns(UserWarning, match=r'BatchNorm \(net.1, net.5\) normalises .*micro_batch="offload"\) runs a loader') as said:
        trainer(callbacks=[GradientAccumulation(**policy)]).fit(Normalised(), loader(images()))
    assert len([warning for warning in said if "BatchNorm" in str(warning.message)]) == 1


def test_windows_of_several_are_checked() -> None:
    with pytest.raises(DoesNotAddUpError):
        trainer("accum", callbacks=[offloaded(2)]).fit(Contrastive(), loader(images()))


def test_verify_of_one_batch_has_nothing_to_compare() -> None:
    with pytest.raises(MisconfigurationException, match='micro_batch="offload" runs the batch as it is'):
        verify(Normalised(), loader(images()), micro_batch="offload")
    assert verify(Language(), SENTENCES, window=2, micro_batch="offload")
