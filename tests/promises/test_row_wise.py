"""row_wise=: submodules run in micro-batches, and a loss that sees the whole batch has the gradient of the whole batch."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from sharded import fsdp2, needs_sharding_on_cpu, shard
from support import OPTIMIZERS, ddp, loader, relative_error, train_by_hand, trainer
from torch import Tensor, nn
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from whole_batch_losses import LOSSES, Loss, barlow_twins, clip, siglip

from lightning_accum import GradientAccumulation, RowWiseError, Tokens, verify
from lightning_accum.whole.row_wise import RowWise

ROWS, MICRO_BATCH = 10, 4


class Joined(nn.Module):
    """Runs a module on some rows at a time, all with a graph, and joins its outputs: the reference where there is dropout."""

    def __init__(self, module: nn.Module, rows: int) -> None:
        super().__init__()
        self.module, self.rows = module, rows

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.module(part) for part in x.split(self.rows)])


class TwoViews(pl.LightningModule):
    """An encoder of two views of a batch, a learned number, and any loss of them."""

    def __init__(self, loss: Loss, optimizer: str = "sgd", dropout: float = 0.0) -> None:
        super().__init__()
        torch.manual_seed(0)
        # nothing that shifts all outputs: its gradient is 0 but for rounding in many of the losses, and Adam divides it by its size
        norm, last = nn.LayerNorm(12, elementwise_affine=False), nn.Linear(12, 6, bias=False)
        layers = [nn.Linear(5, 12), nn.Tanh(), nn.Dropout(dropout), norm, last]
        self.encoder = nn.Sequential(*layers).double()
        self.scale = nn.Parameter(torch.tensor(0.5, dtype=torch.float64))
        self.loss, self.optimizer = loss, optimizer
        self.steps, self.dropout = 0, dropout

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, classes = batch
        self.steps += 1
        if self.dropout:
            torch.manual_seed(self.steps)  # Lightning draws too, in between
        return self.loss(self.encoder(x), self.encoder(x.flip(1) + 0.1), classes, self.scale)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


def batches(number: int = 4, rows: int = ROWS, seed: int = 1) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    classes = torch.arange(rows) % 3
    return [[torch.randn(rows, 5, generator=generator, dtype=torch.float64), classes] for _ in range(number)]


def fit(module: pl.LightningModule, data: Any, names: Any = "encoder", epochs: int = 1, **policy: Any) -> pl.LightningModule:
    callback = GradientAccumulation(**{"micro_batch": MICRO_BATCH, "row_wise": names, **policy})
    trainer(max_epochs=epochs, callbacks=[callback]).fit(module, loader(data))
    return module


# --- any loss ---------------------------------------------------------------------------------------------------------


@pytest.mark.some_cases(16)
@pytest.mark.parametrize("dropout", [0.0, 0.3])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("name", LOSSES)
def test_row_wise_takes_the_steps_of_the_whole_batch_for_any_loss(name: str, optimizer: str, dropout: float) -> None:
    expected = TwoViews(LOSSES[name], optimizer, dropout)
    module = copy.deepcopy(expected)
    expected.encoder = Joined(expected.encoder, MICRO_BATCH)
    train_by_hand(expected, batches(), 1)
    fit(module, batches())
    assert relative_error(module.parameters(), expected.parameters()) < 1e-12


def test_there_are_twenty_five_losses_and_none_of_them_adds_up() -> None:
    assert len(LOSSES) >= 25
    for name, loss in LOSSES.items():
        module = TwoViews(loss)
        ((x, classes),) = batches(1)
        whole = torch.autograd.grad(module.training_step((x, classes), 0), list(module.encoder.parameters()))
        parts = [torch.zeros_like(gradient) for gradient in whole]
        for rows in (slice(0, 5), slice(5, 10)):
            of_part = torch.autograd.grad(module.training_step((x[rows], classes[rows]), 0), list(module.encoder.parameters()))
            parts = [total + gradient / 2 for total, gradient in zip(parts, of_part, strict=True)]
        assert relative_error(parts, whole) > 1e-3, name


def test_dropout_is_that_of_the_first_pass_and_random_numbers_go_on_as_if_it_were_the_only_one() -> None:
    module = TwoViews(clip, dropout=0.5)
    row_wise = RowWise(module, ["encoder"], MICRO_BATCH, torch.device("cpu"))
    (batch,) = batches(1)
    expected = copy.deepcopy(module)
    expected.encoder = Joined(expected.encoder, MICRO_BATCH)
    expected.training_step(batch, 0).backward()
    drawn = torch.rand(3)
    with row_wise.step(ROWS):
        module.training_step(batch, 0).backward()
    assert torch.equal(torch.rand(3), drawn)
    assert relative_error([p.grad for p in module.parameters()], [p.grad for p in expected.parameters()]) < 1e-14


# --- any call -----------------------------------------------------------------------------------------------------------


@dataclass
class Output:
    hidden: Tensor
    nothing: None
    more: dict[str, Any]


class Encoder(nn.Module):
    """Takes and returns whatever is asked of it."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6))
        self.temperature = nn.Parameter(torch.tensor(0.7))


class Nested(Encoder):
    def forward(self, x: Tensor, mask: dict[str, Tensor], names: list[str] | None = None, factor: Any = 1.0) -> Output:
        hidden = self.net(x) * mask["rows"][:, None] * factor + mask["columns"]
        assert names is None or len(names) == len(x)
        return Output(
            hidden, None, {"pair": (hidden.square().sum(1), None), "shared": self.temperature.exp(), "argmax": hidden.argmax(1)}
        )


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.LSTM(5, 6, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        output, (state, _) = self.net(x)
        return output, state


class Checkpointed(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(self.net, x, use_reentrant=False)


class InPlace(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x).add_(self.temperature).mul_(0.5)


class Pair(Encoder):
    """Outputs that share memory with each other, and with an argument."""

    def forward(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        z = self.net(x)
        return {"z": z, "first": z[:, :3], "again": (z, y)}


class Routed(Encoder):
    """Rows that no weight has seen are zeros, without a graph."""

    def forward(self, x: Tensor) -> Tensor:
        routed = (x[:, 0] > 0).nonzero()[:, 0]
        return x.new_zeros(len(x), 6).index_copy(0, routed, self.net(x[routed])) if len(routed) else x.new_zeros(len(x), 6)


class PerRow(Encoder):
    """A list with one number a row."""

    def forward(self, x: Tensor, lengths: list[int], shape: tuple[int, int]) -> tuple[Tensor, list[int]]:
        assert shape == (10, 10)
        z = torch.stack([row * length for row, length in zip(self.net(x), lengths, strict=False)])
        return z, [2 * length for length in lengths]


class Conjugated(nn.Module):
    """Complex outputs, of which torch notes that they are conjugated; wide, so that rounding differs with the number of rows."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 300), nn.Tanh(), nn.Linear(300, 6))

    def forward(self, x: Tensor) -> Tensor:
        z = self.net(x)
        return torch.complex(z, z.square()).conj()


class DrawsWithPython(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * (random.random() if self.training else 0.5)


class Model(nn.Module):
    """A step of two named submodules and a stem before them."""

    def __init__(self, step: Callable[[Model, Tensor], Tensor], **modules: nn.Module) -> None:
        super().__init__()
        torch.manual_seed(2)
        for name, module in modules.items():
            self.add_module(name, module)
        self.stem = nn.Linear(5, 5)
        self.weight = nn.Parameter(torch.tensor(1.3))
        self.step = step
        self.double()


def spread(z: Tensor) -> Tensor:
    return z.std(0).sum() + (z @ z.T).logsumexp(1).mean()


def with_nested(model: Model, x: Tensor) -> Tensor:
    mask = {"rows": torch.arange(len(x)) % 4 + 0.5, "columns": torch.linspace(0, 1, 6).to(x) * model.weight}
    output = model.a(x, mask, names=[str(row) for row in range(len(x))], factor=model.weight)
    assert output.nothing is None
    assert output.more["argmax"].shape == (len(x),)
    assert not output.more["argmax"].requires_grad
    return spread(output.hidden) * output.more["shared"] + output.more["pair"][0].var()


def with_stages(model: Model, x: Tensor) -> Tensor:
    hidden = model.stem(x)
    first, second = model.a(hidden), model.a(x)
    deeper = model.b(first.tanh()[:, :5] + hidden)
    return spread(deeper) + spread(second * deeper) + hidden.square().mean() + model.b(hidden).var()


def with_unused(model: Model, x: Tensor) -> Tensor:
    model.a(x)
    with torch.no_grad():
        target = model.a(x + 1)
    return spread(model.a(x[:7]) * target[:7])


def in_place(model: Model, x: Tensor) -> Tensor:
    z = model.a(x)
    z *= 2
    z[0] = 0
    return spread(z)


def two_views_in_one(model: Model, x: Tensor) -> Tensor:
    one, two = model.a(torch.cat([x, x.flip(1)])).chunk(2)
    return spread(one * two)


def over_time(model: Model, x: Tensor) -> Tensor:
    output, state = model.a(torch.stack([x, x.flip(1), x + 1], 1))
    return spread(output.mean(1)) + spread(state[0])


def square_mask(model: Model, x: Tensor) -> Tensor:
    length = len(x)  # as many positions as rows, by chance
    tokens = torch.linspace(0, 1, length * length * 6, dtype=x.dtype).reshape(length, length, 6).sin() * model.weight
    mask = torch.full((length, length), -math.inf, dtype=x.dtype).triu(1)
    return spread(model.a(tokens, src_mask=mask).mean(1))


def encoded(model: Model, x: Tensor) -> Tensor:
    return spread(model.a(x))


def frozen_inside(model: Model, x: Tensor) -> Tensor:
    model.a[0].requires_grad_(False)
    return spread(model.a(x)) + model.weight


def shared(model: Model, x: Tensor) -> Tensor:
    return spread(model.a(x)) + spread(model.b(model.stem(x))) + model.a.weight.square().sum()


def three_times(model: Model, x: Tensor) -> Tensor:
    return spread(model.a(x)) + spread(model.a(input=x[:7])) + spread(model.a(torch.cat([x, x + 1, x[:3]])))


def many_views(model: Model, x: Tensor) -> Tensor:
    with torch.no_grad():
        target = model.a(x + 1)
    return sum(spread(model.a(x + view) * target) for view in range(4))


def sharing_memory(model: Model, x: Tensor) -> Tensor:
    hidden = model.stem(x)
    outputs = model.a(hidden, hidden + 1)
    return spread(outputs["z"]) + spread(outputs["first"].tanh()) + spread(outputs["again"][0] * 2) + outputs["again"][1].var()


def routed(model: Model, x: Tensor) -> Tensor:
    return spread(model.a(x * (torch.arange(len(x)) > 6)[:, None]))


def with_a_list(model: Model, x: Tensor) -> Tensor:
    z, doubled = model.a(x, list(range(1, len(x) + 1)), (len(x), len(x)))
    return spread(z) * sum(doubled)


def in_eval_mode(model: Model, x: Tensor) -> Tensor:
    model.a.eval()
    z = model.a(model.stem(x))
    model.a.train()
    return spread(z)


def frozen_for_a_call(model: Model, x: Tensor) -> Tensor:
    model.a.requires_grad_(False)
    z = model.a(model.stem(x))
    model.a.requires_grad_(True)
    return spread(z)


def padded_attention(model: Model, x: Tensor) -> Tensor:
    model.a.eval()  # in which torch has a fast path without a graph, that writes zeros into padding
    tokens = torch.linspace(0, 1, 10 * 4 * 6, dtype=x.dtype).reshape(10, 4, 6).sin() * model.weight
    padding = torch.arange(4) >= torch.tensor([4, 3, 2, 1, 4, 3, 2, 1, 4, 3])[:, None]
    return spread(model.a(tokens, src_key_padding_mask=padding).mean(1))


def in_a_checkpoint(model: Model, x: Tensor) -> Tensor:
    return checkpoint(lambda x: spread(model.a(x)), model.stem(x), use_reentrant=False) + spread(model.a(x))


def reentrant(model: Model, x: Tensor) -> Tensor:
    return checkpoint(lambda x: spread(model.a(x)), model.stem(x), use_reentrant=True)


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6))


def sharing() -> dict[str, nn.Module]:
    linear = nn.Linear(5, 6)
    return {"a": linear, "b": nn.Sequential(linear, nn.Tanh())}


def transformer() -> nn.Module:
    return nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)


def of_complex(model: Model, x: Tensor) -> Tensor:
    z = model.a(x)
    return spread(z.abs() + z.imag)


CALLS: dict[str, tuple[Callable[[Model, Tensor], Tensor], Callable[[], dict[str, nn.Module]], list[str]]] = {
    "nested inputs and outputs, keyword arguments, a learned argument without rows": (with_nested, lambda: {"a": Nested()}, ["a"]),
    "two stages, and inputs that need gradients": (with_stages, lambda: {"a": mlp(), "b": mlp()}, ["a", "b"]),
    "calls that the loss does not use, and without gradients": (with_unused, lambda: {"a": mlp()}, ["a"]),
    "outputs that are written into": (in_place, lambda: {"a": mlp()}, ["a"]),
    "two views in one call": (two_views_in_one, lambda: {"a": mlp()}, ["a"]),
    "rows in another dimension of an output": (over_time, lambda: {"a": Recurrent()}, ["a"]),
    "a mask as large as the batch": (square_mask, lambda: {"a": transformer()}, ["a"]),
    "gradient checkpointing inside": (encoded, lambda: {"a": Checkpointed()}, ["a"]),
    "layers that write into what they were given": (encoded, lambda: {"a": InPlace()}, ["a"]),
    "a frozen layer": (frozen_inside, lambda: {"a": mlp()}, ["a"]),
    "a weight that is used outside too": (shared, sharing, ["a"]),
    "a tower inside of another's": (shared, sharing, ["b"]),
    "three calls of different sizes, one by keyword": (three_times, lambda: {"a": nn.Linear(5, 6)}, ["a"]),
    "a loop over views, and targets without gradients": (many_views, lambda: {"a": mlp()}, ["a"]),
    "outputs that share memory": (sharing_memory, lambda: {"a": Pair()}, ["a"]),
    "rows that need no gradient": (routed, lambda: {"a": Routed()}, ["a"]),
    "a list with a number for each row": (with_a_list, lambda: {"a": PerRow()}, ["a"]),
    "evaluation mode in the call alone": (in_eval_mode, lambda: {"a": nn.Sequential(mlp(), nn.Dropout(0.5))}, ["a"]),
    "frozen in the call alone": (frozen_for_a_call, lambda: {"a": mlp()}, ["a"]),
    "attention with a fast path": (padded_attention, lambda: {"a": nn.TransformerEncoder(transformer(), 2)}, ["a"]),
    "complex outputs": (of_complex, lambda: {"a": Conjugated()}, ["a"]),
    "a checkpoint around a call": (in_a_checkpoint, lambda: {"a": mlp()}, ["a"]),
    "a reentrant checkpoint around a call": (reentrant, lambda: {"a": mlp()}, ["a"]),
}


@pytest.mark.parametrize("rows", [1, 3, 20])
@pytest.mark.parametrize("case", CALLS)
def test_any_call_has_the_gradients_of_the_whole_batch(case: str, rows: int) -> None:
    step, make, names = CALLS[case]
    model = Model(step, **make())
    ((x, _),) = batches(1)
    row_wise = RowWise(model, names, rows, torch.device("cpu"))
    loss = step(model, x)
    loss.backward()
    expected = [None if p.grad is None else p.grad.clone() for p in model.parameters()]
    for _ in range(2):
        model.zero_grad()
        with row_wise.step(len(x)):
            of_parts = step(model, x)
            of_parts.backward()
        assert float(of_parts.detach()) == pytest.approx(float(loss.detach()), rel=1e-14)
        found = [p.grad for p in model.parameters()]
        assert [g is None for g in found] == [g is None for g in expected]
        assert relative_error([g for g in found if g is not None], [g for g in expected if g is not None]) < 1e-13


class Pooled(nn.Module):
    """The mean of the tokens of a row that are no padding; sequences too, where it is asked for them."""

    def __init__(self, has_sequences: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6))
        self.has_sequences, self.shapes = has_sequences, []

    def forward(self, tokens: Tensor, attention_mask: Tensor, bias: Tensor) -> Any:
        if not torch.is_inference_mode_enabled():
            self.shapes.append(tuple(tokens.shape[:2]))
        hidden = self.net(tokens) + bias[:, None]
        mean = (hidden * attention_mask[..., None]).sum(1) / attention_mask.sum(1, keepdim=True)
        return (mean, hidden) if self.has_sequences else mean


def pooled(model: Model, x: Tensor) -> Tensor:
    lengths = torch.tensor([2, 7, 1, 3, 2, 6, 1, 2, 3, 2])
    mask = (torch.arange(7) < lengths[:, None]).to(x)
    tokens = torch.stack([x + step for step in range(7)], 1).sin() * mask[..., None] * model.weight
    output = model.a(tokens, mask, bias=torch.linspace(0, 1, 7).to(x) * model.weight)
    return spread(output) if isinstance(output, Tensor) else spread(output[0]) + (output[1] * mask[..., None]).var()


@pytest.mark.parametrize(("size", "most"), [(3, 3), (Tokens(8), 8), (Tokens(5), 10)])
@pytest.mark.parametrize("has_sequences", [False, True])
def test_rows_of_a_call_are_sorted_and_trimmed_where_their_lengths_can_be_read(size: Any, most: int, has_sequences: bool) -> None:
    model = Model(pooled, a=Pooled(has_sequences))
    ((x, _),) = batches(1)
    pooled(model, x).backward()
    expected = [p.grad.clone() for p in model.a.parameters()] + [model.weight.grad.clone()]
    row_wise = RowWise(model, ["a"], size, torch.device("cpu"))
    for _ in range(2):  # in the first there are proofs
        model.zero_grad()
        model.a.shapes.clear()
        with row_wise.step(len(x)):
            pooled(model, x).backward()
        assert relative_error([*(p.grad for p in model.a.parameters()), model.weight.grad], expected) < 1e-13
    shapes, half = model.a.shapes, len(model.a.shapes) // 2
    assert sorted(shapes[:half]) == sorted(shapes[half:])  # run, and run again
    assert sum(rows for rows, _ in shapes[:half]) == len(x)
    if has_sequences:
        assert {columns for _, columns in shapes} == {7}
    else:
        assert sum(rows * columns for rows, columns in shapes[:half]) < 50
    if isinstance(size, Tokens):
        assert all(rows == 1 or rows * columns <= most for rows, columns in shapes)


@pytest.mark.parametrize("size", [3, 10])
def test_random_numbers_of_python_are_those_of_the_first_pass(size: int) -> None:
    model = Model(encoded, a=DrawsWithPython())
    ((x, _),) = batches(1)
    random.seed(1)
    factors = [random.random() for _ in range(4)]
    of_rows = torch.tensor([factor for factor in factors for _ in range(size)][:10], dtype=x.dtype)
    spread(model.a.net(x) * of_rows[:, None]).backward()
    expected = [p.grad.clone() for p in model.a.net.parameters()]
    row_wise = RowWise(model, ["a"], size, torch.device("cpu"))
    for _ in range(2):
        model.zero_grad()
        random.seed(1)
        with row_wise.step(len(x)):
            encoded(model, x).backward()
        assert relative_error([p.grad for p in model.a.net.parameters()], expected) < 1e-13
        assert random.random() != factors[0]


def test_gradients_reach_an_input_of_the_users_own() -> None:
    model = Model(encoded, a=mlp())
    ((x, _),) = batches(1)
    x.requires_grad_()
    encoded(model, x).backward()
    expected, x.grad = x.grad, None
    with RowWise(model, ["a"], 3, torch.device("cpu")).step():
        encoded(model, x).backward()
    assert relative_error([x.grad], [expected]) < 1e-14


def test_autocast_is_that_of_the_call_and_caches_no_weight_without_a_graph() -> None:
    model = Model(shared, **sharing()).float()
    x = batches(1)[0][0].float()
    found = []
    for row_wise in (None, RowWise(model, ["a"], 4, torch.device("cpu"))):
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            assert model.a(x).dtype == torch.bfloat16
        if row_wise is None:
            with torch.autocast("cpu", torch.bfloat16):
                loss = shared(model, x) + model.a(x).mean()
            loss.backward()
        else:
            with row_wise.step():
                with torch.autocast("cpu", torch.bfloat16):
                    loss = shared(model, x) + model.a(x).mean()
                loss.backward()
        found.append([p.grad for p in model.parameters() if p.grad is not None])
    assert relative_error(found[1], found[0]) < 2**-7  # of bfloat16: rows of a micro-batch are summed before those of all


@pytest.mark.parametrize("in_place", [False, True])
def test_a_compiled_submodule(in_place: bool) -> None:
    model = Model(encoded, a=mlp())
    ((x, _),) = batches(1)
    encoded(model, x).backward()
    expected = [p.grad.clone() for p in model.a.parameters()]
    model.zero_grad()
    if in_place:
        model.a.compile(backend="aot_eager")
    else:
        model.a = torch.compile(model.a, backend="aot_eager")
    with RowWise(model, ["a"], 4, torch.device("cpu")).step():
        encoded(model, x).backward()
    assert relative_error([p.grad for p in model.a.parameters()], expected) < 1e-13


def test_only_one_micro_batch_and_the_outputs_are_held() -> None:
    def largest(rows: int | None, number: int) -> int:
        held, most = 0, 0

        class Held:
            def __init__(self, tensor: Tensor) -> None:
                nonlocal held, most
                self.tensor = tensor
                held += tensor.numel()
                most = max(most, held)

            def __del__(self) -> None:
                nonlocal held
                held -= self.tensor.numel()

        model = Model(encoded, a=nn.Sequential(*[nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(20)], nn.Linear(5, 6)))
        ((x, _),) = batches(1, number)
        with torch.autograd.graph.saved_tensors_hooks(Held, lambda held: held.tensor):
            if rows is None:
                encoded(model, x).backward()
            else:
                with RowWise(model, ["a"], rows, torch.device("cpu")).step():
                    encoded(model, x).backward()
        return most

    weights = 20 * 25 + 30
    whole, of_parts, of_twice = largest(None, 64), largest(4, 64), largest(4, 128)
    outputs = 64 * 6 * 4 + 64 * 64 * 2
    assert of_parts < 4 / 64 * whole + weights + outputs
    assert of_twice - of_parts < 128 * 6 * 4 + 128 * 128 * 2


# --- what is refused --------------------------------------------------------------------------------------------------


def critic_penalty(model: Model, x: Tensor, **options: Any) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(model.a(x).sum(), x, create_graph=True, **options)
    return gradient.norm()


def saliency(model: Model, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    z = spread(model.a(x))
    (gradient,) = torch.autograd.grad(z, x, retain_graph=True)
    return z * gradient.norm()


def inner_step(model: Model, x: Tensor) -> Tensor:
    parameters = dict(model.a.named_parameters())
    gradients = torch.autograd.grad(spread(model.a(x)), list(parameters.values()), create_graph=True, allow_unused=True)
    fast = {name: p - 0.1 * g for (name, p), g in zip(parameters.items(), gradients, strict=True) if g is not None}
    return spread(torch.func.functional_call(model.a, {**parameters, **fast}, x))


def exchanged_parameters(model: Model, x: Tensor) -> Tensor:
    return spread(torch.func.functional_call(model.a, {name: p * 2 for name, p in model.a.named_parameters()}, x))


def changed_parameters(model: Model, x: Tensor) -> Tensor:
    loss = spread(model.a(x))
    with torch.no_grad():
        next(model.a.parameters()).mul_(2)
    return loss


def changed_input(model: Model, x: Tensor) -> Tensor:
    loss = spread(model.a(x))
    x.add_(1)
    return loss


def not_called(model: Model, x: Tensor) -> Tensor:
    return spread(model.a.forward(x))


class WritesIntoInput(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x.mul_(0.5))


class OverRows(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x - x.mean(0))


class Measures(Encoder):
    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        z = self.net(x)
        return z, float(z.detach().norm())


class WithAttribute(Encoder):
    factor = 1.0

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x) * self.factor


class AnyLarge(Encoder):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.net(x), (x[:, 0] > 5).any()


class OfTheLongest(Encoder):
    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)[:, : 6 if bool((x[:, 0] > 5).any()) else 4]


def counted(model: Model, x: Tensor) -> Tensor:
    z, number = model.a(x)
    return spread(z) * number


def last_is_large(model: Model, x: Tensor) -> Tensor:
    x = x.clone()
    x[-1, 0] = 10
    output = model.a(x)
    return spread(output) if isinstance(output, Tensor) else spread(output[0]) * (1 + output[1])


def set_between_calls(model: Model, x: Tensor) -> Tensor:
    one = model.a(x)
    model.a.factor = 2.0
    return spread(one * model.a(x))


def written_where_shared(model: Model, x: Tensor) -> Tensor:
    outputs = model.a(x, x + model.weight)
    outputs["first"].mul_(2)
    return spread(outputs["z"])


def argument_written(model: Model, x: Tensor) -> Tensor:
    given = x + model.weight
    model.a(x, given)["again"][1].mul_(2)
    return spread(given)


class OneForAll(Encoder):
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        z = self.net(x)
        return z, z.mean()


class Counting(Encoder):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.seen += len(x)
        return self.net(x)


@dataclass
class Opaque:
    """Holds a tensor where nobody finds it."""

    def __post_init__(self) -> None:
        self.hidden = [torch.zeros(2)]


def sequence_first(model: Model, x: Tensor) -> Tensor:
    return spread(model.a(x[:, None].repeat(1, 4, 1))[0].mean(1))


REFUSED: dict[str, tuple[Callable[[Model, Tensor], Tensor], Callable[[], nn.Module], str]] = {
    "gradient penalty": (critic_penalty, mlp, 'differentiates through a call of .a. by itself .*micro_batch="offload"'),
    "gradient penalty that allows unused": (
        lambda m, x: critic_penalty(m, x, allow_unused=True),
        mlp,
        "differentiates through a call",
    ),
    "the gradient of an input": (saliency, mlp, "differentiates through a call"),
    "inner step": (inner_step, mlp, "differentiates through a call"),
    "exchanged parameters": (exchanged_parameters, mlp, "changed or exchanged before its backward.*offload"),
    "changed parameters": (changed_parameters, mlp, "changed or exchanged before its backward"),
    "changed input": (changed_input, mlp, "changed or exchanged before its backward"),
    "not called": (not_called, mlp, "training_step does not call 'a'"),
    "writes into its input": (encoded, WritesIntoInput, "changes its input or its parameters in place"),
    "BatchNorm": (
        encoded,
        lambda: nn.Sequential(nn.Linear(5, 6), nn.BatchNorm1d(6)),
        r"a\.1 \(BatchNorm1d\) normalises by.*offload",
    ),
    "attention over the batch": (
        lambda m, x: spread(m.a(x[None].transpose(0, 1)).squeeze(1)),
        lambda: nn.Sequential(nn.Linear(5, 6), nn.TransformerEncoderLayer(6, 2, 8)),
        r"a\.1\.self_attn \(MultiheadAttention\) gives some rows together other outputs",
    ),
    "a mean over rows": (encoded, lambda: nn.Sequential(nn.Linear(5, 5), OverRows()), r"a\.1 \(OverRows\) gives some rows"),
    "one output for all rows": (lambda m, x: sum(map(torch.sum, m.a(x))), OneForAll, r"a \(OneForAll\) gives some rows together"),
    "a buffer that counts": (encoded, Counting, r"a \(Counting\) changes its buffer 'seen' in forward"),
    "rows in dimension 1": (sequence_first, lambda: nn.LSTM(5, 6), r"a \(LSTM\) gives some rows together other outputs"),
    "a number of rows": (counted, Measures, "returns .* for some rows and .* for others, which cannot be joined"),
    "an output for all rows that one row changes": (last_is_large, AnyLarge, "an output that is not the same for all rows"),
    "shapes that one row changes": (last_is_large, OfTheLongest, r"outputs of other shapes than for other rows, \(1, 6\) and"),
    "an attribute that is set between calls": (set_between_calls, WithAttribute, "has other outputs than before.*attribute"),
    "writing into outputs that share memory": (written_where_shared, Pair, "shares memory.*was written into"),
    "writing into an argument by an output": (argument_written, Pair, "shares memory.*was written into"),
    "no rows": (lambda m, x: m.a(x[0, 0]).sum(), nn.Tanh, "without a tensor whose dimension 0 could be the rows"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_row_wise_cannot_have_is_refused_by_name(case: str) -> None:
    step, make, message = REFUSED[case]
    model = Model(step, a=make())
    ((x, _),) = batches(1)
    with pytest.raises(RowWiseError, match=message), RowWise(model, ["a"], 3, torch.device("cpu")).step(len(x)):
        step(model, x).backward()
    assert "_compiled_call_impl" not in vars(model.a)
    model.zero_grad()
    model.stem(x).sum().backward()  # backwards are torch's own again


def test_an_argument_of_a_class_that_is_not_known_is_refused() -> None:
    class Keeper:
        def __init__(self) -> None:
            self.hidden = torch.zeros(2)

    class Takes(Encoder):
        def forward(self, x: Tensor, kept: Keeper) -> Tensor:
            return self.net(x)

    model = Model(encoded, a=Takes())
    with (
        pytest.raises(RowWiseError, match="is a Keeper, which holds tensors"),
        RowWise(model, ["a"], 3, torch.device("cpu")).step(),
    ):
        model.a(batches(1)[0][0], Keeper())


@pytest.mark.parametrize(
    ("names", "message"),
    [
        (["encoder", "encoder.0"], "'encoder.0' is inside of 'encoder'"),
        (["decoder"], r"no submodule of that name. Its children are \['encoder'\]"),
    ],
)
def test_names_that_do_not_fit_are_refused_before_training(names: list[str], message: str) -> None:
    with pytest.raises(MisconfigurationException, match=message):
        fit(TwoViews(clip), batches(), names)


@pytest.mark.parametrize("policy", [{"micro_batch": None}, {"micro_batch": 0}, {"row_wise": 3}, {"row_wise": []}])
def test_arguments_that_do_not_fit_are_refused(policy: dict[str, Any]) -> None:
    with pytest.raises(MisconfigurationException, match="row_wise=|micro_batch="):
        GradientAccumulation(**{"micro_batch": 4, "row_wise": "encoder", **policy})


# --- windows, precision and what else there is --------------------------------------------------------------------------


class Classifier(TwoViews):
    """A loss that adds up, for windows of several loader batches."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        x, classes = batch
        if classes.min() < -100:
            return None
        return F.cross_entropy(self.encoder(x) * self.scale, classes)


def uneven() -> list[list[Tensor]]:
    sizes = [3, 10, 7, 5, 8, 2]
    data = [batches(1, rows, seed)[0] for seed, rows in enumerate(sizes)]
    data[1][1] = data[1][1].clone()
    data[1][1][2:] = -100
    return data


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("options", [{}, {"on_nonfinite": "raise"}, {"on_nonfinite": "skip"}, {"micro_batch": Tokens(15)}])
def test_windows_of_several_loader_batches_are_exact(optimizer: str, options: dict[str, Any]) -> None:
    data = uneven()
    together = [[torch.cat(part) for part in zip(*data[start : start + 3], strict=True)] for start in (0, 3)]
    expected = train_by_hand(Classifier(clip, optimizer), together, 2)
    module = fit(Classifier(clip, optimizer), data, epochs=2, window=3, **options)
    assert relative_error(module.parameters(), expected.parameters()) < 1e-12


def test_batches_without_a_loss_or_a_weight_count_for_nothing() -> None:
    data = batches(3)
    empty, none = [data[0][0] * math.nan, torch.full((ROWS,), -100)], [data[0][0], torch.full((ROWS,), -200)]
    expected = train_by_hand(Classifier(clip), [[torch.cat(part) for part in zip(data[0], data[1], strict=True)]], 1)
    module = fit(Classifier(clip), [data[0], empty, none, data[1]], window=4)
    assert relative_error(module.parameters(), expected.parameters()) < 1e-12


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_loader_batches_that_are_not_finite_are_left_out(optimizer: str) -> None:
    data = batches(4)
    bad = [data[0][0] * math.inf, data[0][1]]
    together = [[torch.cat(part) for part in zip(*data[start : start + 2], strict=True)] for start in (0, 2)]
    expected = train_by_hand(Classifier(clip, optimizer), together, 1)
    with pytest.warns(UserWarning, match="not finite"):
        module = fit(Classifier(clip, optimizer), [*data[:2], bad, bad, *data[2:]], window=3, on_nonfinite="skip")
    assert relative_error(module.parameters(), expected.parameters()) < 1e-12


def test_gradients_are_added_up_in_a_wider_type() -> None:
    data = [[x.bfloat16(), t] for x, t in batches(4)]
    module = Classifier(clip).bfloat16()
    reference = copy.deepcopy(module)
    sums = {p: torch.zeros_like(p, dtype=torch.float32) for p in reference.parameters()}
    for x, t in data:
        for rows in (slice(0, 4), slice(4, 8), slice(8, 10)):
            part = F.cross_entropy(reference.encoder(x[rows]) * reference.scale, t[rows], reduction="sum") / ROWS
            part.backward()
            for p in reference.parameters():
                sums[p] += p.grad.float() / 4
                p.grad = None
    gradients = {}
    module.on_before_optimizer_step = lambda optimizer: gradients.update({n: p.grad.clone() for n, p in module.named_parameters()})
    fit(module, data, window=4, accumulate_dtype=torch.float32, check=False)
    found = [gradients[name] for name, _ in module.named_parameters()]
    assert relative_error(found, list(sums.values())) < 2**-7  # of bfloat16, which gradients of micro-batches are rounded to


class LogsAndHooks(TwoViews):
    """Keeps the gradients that Lightning's hooks see."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss)
        return loss

    def on_after_backward(self) -> None:
        self.seen = [p.grad.clone() for p in self.parameters()]


def test_hooks_after_the_backward_see_all_gradients() -> None:
    (batch,) = batches(1)
    expected = LogsAndHooks(clip)
    TwoViews.training_step(expected, batch, 0).backward()
    module = fit(LogsAndHooks(clip), [batch])
    assert relative_error(module.seen, [p.grad for p in expected.parameters()]) < 1e-14


def test_lbfgs_runs_its_closure_several_times() -> None:
    class WithLBFGS(TwoViews):
        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.LBFGS(self.parameters(), lr=0.1, max_iter=4)

    expected, (batch,) = WithLBFGS(clip), batches(1)
    optimizer = expected.configure_optimizers()

    def closure() -> Tensor:
        optimizer.zero_grad()
        loss = expected.training_step(batch, 0)
        loss.backward()
        return loss

    optimizer.step(closure)
    assert relative_error(fit(WithLBFGS(clip), [batch]).parameters(), expected.parameters()) < 1e-12


class Limited(nn.Module):
    """Runs out of memory with more than so many rows, in its first pass or in its backward."""

    def __init__(self, module: nn.Module, rows: int, where: str) -> None:
        super().__init__()
        self.module, self.rows, self.where = module, rows, where

    def forward(self, x: Tensor) -> Tensor:
        z = self.module(x)
        if self.where == "first pass":
            self._check(x)
        elif z.requires_grad:
            z.register_hook(lambda gradient: self._check(gradient))
        return z

    def _check(self, rows: Tensor) -> None:
        if len(rows) > self.rows:
            raise torch.OutOfMemoryError("CUDA out of memory. (not really)")


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("where", ["first pass", "backward"])
@pytest.mark.parametrize("window", [1, 2])
def test_out_of_memory_it_is_as_if_the_step_had_not_begun(where: str, window: int, caplog: pytest.LogCaptureFixture) -> None:
    make = TwoViews if window == 1 else Classifier
    expected, module = make(clip, "adamw", dropout=0.3), make(clip, "adamw", dropout=0.3)
    expected.encoder = Joined(expected.encoder, 3)
    module.encoder = Limited(module.encoder, 4, where)
    data = batches()
    if window == 1:
        train_by_hand(expected, data, 1)
    else:  # each micro-batch of its loader batch draws, in its order
        expected.encoder.module[2].p = module.encoder.module[2].p = 0.0
        train_by_hand(expected, [[torch.cat(part) for part in zip(*data[i : i + 2], strict=True)] for i in (0, 2)], 1)
    callback = GradientAccumulation(window, micro_batch="auto", row_wise="encoder")
    run = trainer(callbacks=[callback])
    with caplog.at_level("INFO", "lightning.pytorch"):
        run.fit(module, loader(data))
    assert relative_error(module.parameters(), expected.parameters()) < 1e-12
    assert caplog.text.count("do not fit into memory") == 2  # 10 rows, 5, 3
    assert run.callback_metrics["window/micro_batch_size"] == 3
    assert "encoder in micro-batches as large as memory allows" in caplog.text


def test_out_of_memory_where_smaller_micro_batches_do_not_help_is_an_error() -> None:
    class InTheLoss(TwoViews):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            super().training_step(batch, batch_idx)
            raise torch.OutOfMemoryError("CUDA out of memory. (not really)")

    with pytest.raises(torch.OutOfMemoryError, match="not really"):
        fit(InTheLoss(clip), batches(), micro_batch="auto", check=False)
    module = TwoViews(clip)
    module.encoder = Limited(module.encoder, 0, "backward")
    with pytest.raises(torch.OutOfMemoryError, match="one sample .* does not fit"):
        fit(module, batches(), micro_batch="auto", check=False)


def test_steps_that_cannot_run_again_refuse_auto_sizes() -> None:
    with pytest.raises(MisconfigurationException, match="runs a step again.*automatic_optimization=False"):
        fit(Gan(), batches(), ["generator", "critic"], micro_batch="auto")
    with pytest.raises(Exception, match="runs a step again.*on 2 ranks"):
        trainer(ddp(), devices=2, callbacks=[GradientAccumulation(micro_batch="auto", row_wise="encoder")]).fit(Gathering(clip))


def test_a_loss_of_pairs_in_a_window_of_several_loader_batches_is_refused() -> None:
    with pytest.raises(ValueError, match="do not add up.*a window of 1"):
        fit(TwoViews(clip), batches(), window=2)


class Gan(pl.LightningModule):
    """Two networks, two optimizers, and losses of the batch's statistics."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Dropout(0.0), nn.Linear(8, 5)).double()
        self.critic = nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 3)).double()

    def losses(self, x: Tensor) -> Any:
        fake = self.generator(x.flip(0))
        yield (self.critic(fake).mean(0) - self.critic(x).detach().mean(0)).norm(), 0
        yield -torch.cdist(self.critic(x), self.critic(fake.detach())).std(), 1

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for loss, index in self.losses(batch[0]):
            optimizer = self.optimizers()[index]
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()

    def configure_optimizers(self) -> Any:
        return [OPTIMIZERS["adamw"](self.generator.parameters()), OPTIMIZERS["sgd"](self.critic.parameters())]


def test_the_networks_of_a_gan_in_manual_optimization() -> None:
    expected = Gan()
    optimizers = expected.configure_optimizers()
    for x, _ in batches():
        for loss, index in expected.losses(x):
            optimizers[index].zero_grad()
            loss.backward()
            optimizers[index].step()
    module = fit(Gan(), batches(), ["generator", "critic"])
    assert relative_error(module.parameters(), expected.parameters()) < 1e-12


# --- ranks --------------------------------------------------------------------------------------------------------------


class Gathering(TwoViews):
    """A loss of the rows of all ranks, as a CLIP over ranks has it: each gathers, and sees the whole."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.gathers = "lightning"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, classes = batch
        views = [self.encoder(x), self.encoder(x.flip(1) + 0.1)]
        if self.gathers == "lightning":
            gathered = [self.all_gather(view, sync_grads=True).flatten(0, 1) for view in views]
        elif self.gathers == "torch":
            gathered = [torch.cat(torch.distributed.nn.all_gather(view)) for view in views]
        else:
            gathered = views
        loss = self.loss(*gathered, classes, self.scale)
        return loss + self.scale.square() if self.loss is barlow_twins else loss  # which has no other use for it

    def train_dataloader(self) -> Any:
        return loader(
            [[part.chunk(self.trainer.world_size)[self.trainer.global_rank] for part in batch] for batch in batches(4, 16)]
        )


@pytest.mark.some_cases(5, 8)
@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("gathers", ["lightning", "torch"])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("loss", [clip, siglip, barlow_twins])
def test_a_loss_that_gathers_over_ranks_is_that_of_the_global_batch(loss: Loss, optimizer: str, gathers: str, ranks: int) -> None:
    expected = Gathering(loss, optimizer)
    expected.gathers = "nothing"
    train_by_hand(expected, batches(4, 16), 1)
    module = Gathering(loss, optimizer)
    module.gathers = gathers
    weight = "equal" if loss is barlow_twins else "auto"
    callback = GradientAccumulation(micro_batch=3, row_wise="encoder", weight=weight)
    trainer(ddp(), devices=ranks, callbacks=[callback]).fit(module)
    assert relative_error(module.parameters(), expected.parameters()) < 1e-12


def test_a_loss_of_the_rows_of_one_rank_is_refused_on_two() -> None:
    module = Gathering(clip)
    module.gathers = "nothing"
    with pytest.raises(Exception, match="do not add up.*gather the rows of several ranks"):
        trainer(ddp(), devices=2, callbacks=[GradientAccumulation(micro_batch=3, row_wise="encoder")]).fit(module)


def test_a_gathering_loss_that_is_a_sum_asks_for_its_weight() -> None:
    module = Gathering(lambda a, b, t, s: barlow_twins(a * s.exp(), b, t, s))
    with pytest.raises(Exception, match=r"gathers the rows of all ranks, and is a sum.*weight=.equal"):
        trainer(ddp(), devices=2, callbacks=[GradientAccumulation(micro_batch=3, row_wise="encoder")]).fit(module)


class Uneven(Classifier):
    def train_dataloader(self) -> Any:
        return loader(uneven()[:4] if self.trainer.global_rank == 0 else uneven()[4:])


@pytest.mark.parametrize("find_unused", [False, True])
def test_ranks_with_unequally_many_batches_take_the_step_of_all_rows(find_unused: bool) -> None:
    data = uneven()
    together = [[torch.cat(part) for part in zip(*rows, strict=True)] for rows in (data[:2] + data[4:], data[2:4])]
    expected = train_by_hand(Classifier(clip), together, 1)
    module = Uneven(clip)
    callback = GradientAccumulation(2, micro_batch=3, row_wise="encoder")
    trainer(ddp(find_unused_parameters=find_unused), devices=2, callbacks=[callback]).fit(module)
    assert relative_error(module.parameters(), expected.parameters()) < 1e-12


# --- sharded modules ----------------------------------------------------------------------------------------------------


class Sharded(TwoViews):
    """An encoder and a head that are sharded, and a loss of the rows of all ranks."""

    sizes: tuple[int, ...] = (16,)
    resharding: dict[str, Any] = {}

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        del self.scale
        self.head = nn.Linear(6, 6, bias=False).double()

    def configure_model(self) -> None:
        if len(self.sizes) > 1:
            shard(self, [self.encoder[0], self.encoder[4], self.encoder, self.head], **self.resharding)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, classes = batch
        hidden = self.encoder(x)
        views = [self.head(hidden), self.head(hidden + self.encoder(x.flip(1) + 0.1))]
        if self.loss is F.cross_entropy:
            return F.cross_entropy(views[0] + views[1], classes)
        if len(self.sizes) > 1:
            views = [torch.cat(torch.distributed.nn.all_gather(view)) for view in views]
        return self.loss(*views, classes, torch.tensor(0.5).to(x))

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        return loader([[part.split(self.sizes)[rank] for part in batch] for batch in batches(4, 16)])


def fit_sharded(module: Sharded, sizes: tuple[int, int], names: Any, sync: Any = "window", **policy: Any) -> list[Tensor]:
    module.sizes = sizes
    run = trainer(fsdp2(sync=sync), devices=2, callbacks=[GradientAccumulation(row_wise=names, **policy)])
    run.fit(module)
    return [run.whole[name] for name, _ in module.named_parameters()]


@needs_sharding_on_cpu
@pytest.mark.some_cases(2, 8)
@pytest.mark.parametrize("names", [["encoder"], ["encoder", "head"]], ids=str)
@pytest.mark.parametrize("resharding", [{}, {"reshard_after_forward": True}, {"reshard_after_forward": False}], ids=str)
@pytest.mark.parametrize("loss", [clip, barlow_twins])
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_sharded_submodules_take_the_step_of_the_global_batch(names: Any, resharding: Any, loss: Loss, optimizer: str) -> None:
    expected = train_by_hand(Sharded(loss, optimizer), batches(4, 16), 1)
    module = Sharded(loss, optimizer)
    module.resharding = resharding
    found = fit_sharded(module, (8, 8), names, micro_batch=3, weight="equal")
    assert relative_error(found, expected.parameters()) < 1e-12


@pytest.mark.some_cases(1)
@needs_sharding_on_cpu
@pytest.mark.parametrize("micro_batch", [3, Tokens(20)])
def test_sharded_submodules_in_windows_of_ranks_with_unequally_many_rows(micro_batch: Any) -> None:
    together = [[torch.cat(part) for part in zip(*batches(4, 16)[start : start + 2], strict=True)] for start in (0, 2)]
    expected = train_by_hand(Sharded(F.cross_entropy), together, 1)
    found = fit_sharded(Sharded(F.cross_entropy), (11, 5), "encoder", window=2, micro_batch=micro_batch)
    assert relative_error(found, expected.parameters()) < 1e-12


class InSinglePrecision(Sharded):
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.float()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step([batch[0].to(self.head.weight.dtype), batch[1]], batch_idx)


@pytest.mark.exhaustive
@needs_sharding_on_cpu
def test_gradients_of_sharded_submodules_are_added_up_in_the_type_that_they_are_reduced_in() -> None:
    together = [[torch.cat(part) for part in zip(*batches(4, 16)[start : start + 2], strict=True)] for start in (0, 2)]
    expected = train_by_hand(Sharded(F.cross_entropy), together, 1)
    policy = {"window": 2, "micro_batch": 3, "accumulate_dtype": torch.float64}
    with pytest.raises(Exception, match=r"MixedPrecisionPolicy\(reduce_dtype=torch.float64\)"):
        fit_sharded(InSinglePrecision(F.cross_entropy), (11, 5), "encoder", **policy)
    module = InSinglePrecision(F.cross_entropy)
    module.resharding = {"mp_policy": MixedPrecisionPolicy(reduce_dtype=torch.float64)}
    found = fit_sharded(module, (11, 5), "encoder", **policy)
    assert relative_error(found, expected.parameters()) < 1e-6  # of float32, that parameters are in


class OfOtherCalls(Sharded):
    """On rank 1 the loss does not depend on the last call."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        z, other = self.encoder(batch[0]), self.encoder(batch[0] + 1)
        return F.cross_entropy(self.head(z + (other.detach() if self.global_rank else other)), batch[1])


@needs_sharding_on_cpu
def test_what_sharded_submodules_cannot_do_row_wise_is_refused() -> None:
    with pytest.raises(Exception, match="the loss of one rank depends on a call of sharded submodules"):
        fit_sharded(OfOtherCalls(F.cross_entropy), (8, 8), "encoder", micro_batch=3, check=False)
    with pytest.raises(Exception, match="called with one row on a rank"):
        fit_sharded(Sharded(F.cross_entropy), (15, 1), "encoder", micro_batch=3, check=False)
    with pytest.raises(Exception, match='beside sync="micro_batch"'):
        fit_sharded(Sharded(F.cross_entropy), (8, 8), "encoder", "micro_batch", micro_batch=3)
    with pytest.raises(Exception, match="on_nonfinite='skip'"):
        fit_sharded(Sharded(F.cross_entropy), (8, 8), "encoder", micro_batch=3, on_nonfinite="skip")


# --- names that are found -----------------------------------------------------------------------------------------------


class Towers(pl.LightningModule):
    """Two towers, one of which has a BatchNorm between two parts that have none; a method that is no call; a loss of pairs."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.image = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.Linear(16, 6, bias=False)).double()
        body = nn.Sequential(nn.Linear(5, 16), nn.Tanh(), nn.LayerNorm(16), nn.Tanh(), nn.Linear(16, 16))
        self.text = nn.ModuleDict({"body": body, "norm": nn.BatchNorm1d(16), "last": nn.Linear(16, 6, bias=False)}).double()
        self.tiny = nn.Linear(1, 1).double()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, classes = batch
        text = self.text["last"](self.text["norm"](self.text["body"](x.flip(1))))
        return clip(self.image(x), text, classes, torch.tensor(0.5)) + self.tiny(x[0, :1]).square().sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


@pytest.mark.filterwarnings("error:.*for them a window may differ")  # of one loader batch, it cannot
def test_auto_names_the_largest_submodules_that_treat_rows_independently(caplog: pytest.LogCaptureFixture) -> None:
    expected = train_by_hand(Towers(), batches(), 1)
    with caplog.at_level("INFO", "lightning.pytorch.utilities.rank_zero"):
        module = fit(Towers(), batches(), "auto")
    assert relative_error(module.parameters(), expected.parameters()) < 1e-12
    assert relative_error(module.buffers(), expected.buffers()) < 1e-12
    assert "image, text.body, text.last in micro-batches of 4" in caplog.text


def test_auto_is_an_error_where_nothing_would_be_saved() -> None:
    class WithoutSubmodules(Towers):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            return clip(F.linear(batch[0], self.image[0].weight), batch[0].repeat(1, 4)[:, :16], batch[1], torch.tensor(0.5))

    with pytest.raises(RowWiseError, match=r'row_wise="auto": the submodules of WithoutSubmodules .* hold 0%'):
        fit(WithoutSubmodules(), batches(), "auto")
    with pytest.raises(MisconfigurationException, match=r"Give the names of its submodules"):
        fit(Gan(), batches(), "auto")


@pytest.mark.parametrize("names", ["encoder", "auto"])
def test_verify_compares_a_row_wise_step_with_the_whole_batch(names: str) -> None:
    report = verify(TwoViews(clip), batches(1)[0], micro_batch=4, row_wise=names)
    assert report
    assert report.gradient < 1e-12


@pytest.mark.parametrize("name", ["clip", "barlow twins", "vicreg", "mined triplets", "cox", "koleo", "experts balance"])
def test_verify_proposes_the_submodules_with_which_it_found_the_step_to_be_that_of_the_full_batch(name: str) -> None:
    report = verify(TwoViews(LOSSES[name]), batches(1)[0], micro_batch=4)
    assert not report
    assert "row_wise=['encoder']" in str(report).replace("\n    ", " ")


def test_verify_proposes_offload_where_no_submodules_would_be_chosen() -> None:
    class WithoutSubmodules(TwoViews):
        def training_step(self, batch: Any, batch_idx: int) -> Tensor:
            x, classes = batch
            z = F.linear(x, self.encoder[0].weight)[:, :6]
            return self.loss(z, z.flip(1).tanh(), classes, self.scale)

    assert 'micro_batch="offload"' in str(verify(WithoutSubmodules(clip), batches(1)[0], micro_batch=4))
