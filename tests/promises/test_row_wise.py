"""row_wise=: submodules run in micro-batches, and a loss that sees the whole batch has the gradient of the whole batch."""

import math
import random
import re
from collections.abc import Callable
from dataclasses import make_dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from alive import SavedBytes
from harness import assert_one_window_one_batch
from loss_table import LOSSES as TABLE
from loss_table.rows import Kind, Trained, rows
from loss_table.rows import Loss as Row
from manual_modules import GAN, draw
from sharded import needs_sharding_on_cpu, shard
from support import Toy, fit, refused, relative_error, warned
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, rnn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import default_collate
from whole_batch_losses import LOSSES, Loss, barlow_twins, clip, siglip

from lightning_accum import AccumulationError, AccumulationWarning, DoesNotAddUpError, GradientAccumulation, RowWiseError, Tokens
from lightning_accum.testing import adamw, assert_window_equals_batch, sgd

ROWS = 10


def row_wise(window: int | None = None, names: Any = "net.encoder", **policy: Any) -> GradientAccumulation:
    return GradientAccumulation(window, **{"micro_batch": 4, "row_wise": names, **policy})


def batches(*sizes: int, seed: int = 1) -> list[list[Any]]:
    """Rows of 5 features and one of 3 classes, in loader batches of these sizes."""
    generator = torch.Generator().manual_seed(seed)
    return [[(torch.randn(5, generator=generator, dtype=torch.float64), row % 3) for row in range(size)] for size in sizes]


def collated(*sizes: int) -> list[Any]:
    return [default_collate(rows) for rows in batches(*sizes)]


def encoder_and_scale(*layers: nn.Module) -> nn.ModuleDict:
    # nothing that shifts all outputs: its gradient is 0 but for rounding in many of the losses, and Adam divides it by its size
    norm, last = nn.LayerNorm(12, elementwise_affine=False), nn.Linear(12, 6, bias=False)
    net = nn.ModuleDict({"encoder": nn.Sequential(nn.Linear(5, 12), nn.Tanh(), *layers, norm, last)})
    net.scale = nn.Parameter(torch.tensor(0.5))
    return net


def of_views(loss: Loss, net: Any, batch: Any) -> Tensor:
    x, classes = batch
    return loss(net.encoder(x), net.encoder(x.flip(1) + 0.1), classes, net.scale)


def two_views(loss: Loss) -> Toy:
    return Toy(partial(of_views, loss), net=encoder_and_scale)


def of_classes(net: Any, batch: Any) -> Tensor | None:
    """A loss that adds up, for windows of several loader batches; None if it has a row of class -200."""
    return None if batch[1].min() < -100 else F.cross_entropy(net.encoder(batch[0]) * net.scale, batch[1])


@pytest.mark.some_cases(6, 12)
@pytest.mark.parametrize("loss", [pytest.param(loss, id=loss.name.replace(" ", "_")) for loss in TABLE if loss.kind is Kind.BATCH])
def test_a_loss_that_no_weight_makes_exact_takes_the_steps_of_the_whole_batch(loss: Row) -> None:
    policy = row_wise(names="net", micro_batch=5, weight=loss.weight)
    assert_window_equals_batch(lambda: Trained(loss), [rows(loss, seed) for seed in range(2)], policy, optimizers=[sgd])


def test_a_loss_of_pairs_in_a_window_of_several_loader_batches_is_refused() -> None:
    refused(two_views(clip), collated(ROWS, ROWS), row_wise(2), error=DoesNotAddUpError)


@pytest.mark.some_cases(3)
@pytest.mark.parametrize("policy", [{"window": 2}, {"window": 1, "micro_batch": 4}], ids=["windows", "split"])
@pytest.mark.parametrize("name", LOSSES)
def test_the_error_of_a_loss_of_pairs_names_submodules_with_which_it_is_exact(name: str, policy: dict[str, Any]) -> None:
    with pytest.raises(DoesNotAddUpError) as raised:
        fit(two_views(LOSSES[name]), collated(ROWS, ROWS), GradientAccumulation(**policy))
    mend = re.search(r"GradientAccumulation\(1, micro_batch=\d+, row_wise='net.encoder'\)", str(raised.value))
    assert mend is not None, raised.value
    assert_window_equals_batch(two_views(LOSSES[name]), batches(*[2 * ROWS] * 2), eval(mend.group()))


def test_random_numbers_are_those_of_the_first_pass_and_go_on_as_if_it_were_the_only_one() -> None:
    class Drawing(Toy):  # begins each step with a seed of its own, and notes which random numbers are next after its backward
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            torch.manual_seed(batch_idx)
            random.seed(batch_idx)
            return super().training_step(batch, batch_idx)

        def on_after_backward(self) -> None:
            self.drawn = [*getattr(self, "drawn", []), torch.rand(()).item(), random.random()]

    class Noisy(nn.Dropout):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1 + random.random())

    class Joined(nn.Sequential):  # runs 4 rows at a time, all with a graph, and joins its outputs: the reference for dropout
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat([self[0](part) for part in x.split(4)])

    expected, module = (Drawing(partial(of_views, clip), net=lambda: encoder_and_scale(Noisy(0.5))) for _ in range(2))
    expected.net["encoder"] = Joined(expected.net.encoder)
    fit(expected, collated(*[ROWS] * 3), strategy="auto")
    fit(module, collated(*[ROWS] * 3), row_wise())
    assert relative_error(module.parameters(), expected.parameters()) < 1e-12
    assert module.drawn == expected.drawn


class Encoder(nn.Module):  # a small network, and a ``forward(self, *inputs)``
    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.net = mlp()
        self.temperature = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("seen", torch.zeros(()))
        self.forward_of, self.factor = forward, 1.0

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_of(self, *args, **kwargs)


# fmt: off
def of(forward: Callable[..., Any]) -> Callable[[], Encoder]:
    return lambda: Encoder(forward)

def mlp(*more: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6), *more)

def sharing() -> dict[str, nn.Module]:
    linear = nn.Linear(5, 6)
    return {"a": linear, "b": nn.Sequential(linear, nn.Tanh())}

def model(make: Callable[[], Any]) -> nn.ModuleDict:  # named submodules, a stem before them and a number
    made = make()
    net = nn.ModuleDict({**(made if isinstance(made, dict) else {"a": made}), "stem": nn.Linear(5, 5)})
    net.weight = nn.Parameter(torch.tensor(1.3))
    return net

Output = make_dataclass("Output", ["hidden", "nothing", "more"])

def nested(self: Encoder, x: Tensor, mask: dict[str, Tensor], names: list[str] | None = None, factor: Any = 1.0) -> Any:
    hidden = self.net(x) * mask["rows"][:, None] * factor + mask["columns"]
    assert names is None or len(names) == len(x)
    more = {"pair": (hidden.square().sum(1), None), "shared": self.temperature.exp(), "argmax": hidden.argmax(1)}
    return Output(hidden, None, more)

def pair(self: Encoder, x: Tensor, y: Tensor) -> dict[str, Any]:  # outputs that share memory with each other, and with an argument
    z = self.net(x)
    return {"z": z, "first": z[:, :3], "again": (z, y)}

def spread(z: Tensor) -> Tensor:
    return z.std(0).sum() + (z @ z.T).logsumexp(1).mean()

def encoded(net: Any, x: Tensor) -> Tensor:
    return spread(net.a(x))

def with_nested(net: Any, x: Tensor) -> Tensor:
    mask = {"rows": torch.arange(len(x)) % 4 + 0.5, "columns": torch.linspace(0, 1, 6).to(x) * net.weight}
    output = net.a(x, mask, names=[str(row) for row in range(len(x))], factor=net.weight)
    assert (output.nothing, output.more["argmax"].shape, output.more["argmax"].requires_grad) == (None, (len(x),), False)
    return spread(output.hidden) * output.more["shared"] + output.more["pair"][0].var()

def with_stages(net: Any, x: Tensor) -> Tensor:
    hidden = net.stem(x)
    first, second = net.a(hidden), net.a(x)
    deeper = net.b(first.tanh()[:, :5] + hidden)
    return spread(deeper) + spread(second * deeper) + hidden.square().mean() + net.b(hidden).var()

def over_time(net: Any, x: Tensor) -> Tensor:
    output, (state, _) = net.a(torch.stack([x, x.flip(1), x + 1], 1))
    return spread(output.mean(1)) + spread(state[0])

def square_mask(net: Any, x: Tensor) -> Tensor:
    length = len(x)  # as many positions as rows, by chance
    tokens = torch.linspace(0, 1, length * length * 6, dtype=x.dtype).reshape(length, length, 6).sin() * net.weight
    mask = torch.full((length, length), -math.inf, dtype=x.dtype).triu(1)
    return spread(net.a(tokens, src_mask=mask).mean(1))

def shared(net: Any, x: Tensor) -> Tensor:
    return encoded(net, x) + spread(net.b(net.stem(x))) + net.a.weight.square().sum()

def sharing_memory(net: Any, x: Tensor) -> Tensor:
    hidden = net.stem(x)
    outputs = net.a(hidden, hidden + 1)
    return spread(outputs["z"]) + spread(outputs["first"].tanh()) + spread(outputs["again"][0] * 2) + outputs["again"][1].var()

def in_other_modes(net: Any, x: Tensor) -> Tensor:
    frozen = net.a.eval().requires_grad_(False)(net.stem(x))
    evaluated = net.a.requires_grad_(True)(x)
    net.a.train()
    return spread(frozen * evaluated)

def in_a_checkpoint(net: Any, x: Tensor) -> Tensor:
    return checkpoint(lambda x: encoded(net, x), net.stem(x), use_reentrant=True) + encoded(net, x)

# --- as others write them
LENGTH, CLASSES = 6, 31

def sequences(x: Tensor) -> Tensor:
    return torch.stack([x + step for step in range(LENGTH)], 1).sin()

def images(x: Tensor) -> Tensor:
    return (x.sum(1)[:, None] * torch.linspace(-2, 2, 3 * 16 * 16).to(x)).sin().reshape(-1, 3, 16, 16)

def texts(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:  # numbers of words, their mask and the lengths of rows
    lengths = (x[:, 0].abs() * 1000).long() % LENGTH + 1
    mask = (torch.arange(LENGTH) < lengths[:, None]).long()
    return ((x.sum(1).abs()[:, None] * 1000).long() + torch.arange(LENGTH) * 7) % (CLASSES - 3) * mask + 3 * mask, mask, lengths

def alike(a: Tensor, b: Tensor) -> Tensor:
    return clip(a, b, a, torch.tensor(1.1).to(a))

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}

def clip_model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    text = {**SMALL, "vocab_size": CLASSES, "max_position_embeddings": LENGTH, "eos_token_id": 2, "pad_token_id": 0}
    vision = {**SMALL, "image_size": 16, "patch_size": 8}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))

def clip_step(net: Any, x: Tensor) -> Tensor:
    ids, mask, _ = texts(x)
    return net.a(input_ids=ids, attention_mask=mask, pixel_values=images(x), return_loss=True).loss

def gpt_model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2Model(transformers.GPT2Config(vocab_size=CLASSES, n_positions=16, n_embd=16, n_layer=1, n_head=2))

class Packed(nn.Module):  # an LSTM over packed sequences
    def __init__(self, is_padded_to_batch: bool) -> None:
        super().__init__()
        self.rnn, self.is_padded_to_batch = nn.LSTM(5, 7, 2, batch_first=True, bidirectional=True), is_padded_to_batch

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        output, _ = self.rnn(rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return rnn.pad_packed_sequence(output, batch_first=True, total_length=x.shape[1] if self.is_padded_to_batch else None)[0]

def packed(net: Any, x: Tensor) -> Tensor:
    return spread(net.a(sequences(x), texts(x)[2]).mean(-2))

def with_teachers(net: Any, x: Tensor) -> Tensor:
    older = {name: 0.9 * value for name, value in net.a.named_parameters()}
    with torch.no_grad():
        targets = net.a(x + 1), torch.func.functional_call(net.a, older, x)
    return alike(net.a(x), targets[0]) + alike(net.a(x), targets[1])

def critic_penalty(net: Any, x: Tensor) -> Tensor:
    x = x.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(net.a(x).sum(), x, create_graph=True)
    return gradient.norm()

def keeps(what: Callable[[Any, Tensor], Any]) -> Callable[[], nn.Module]:  # leaves something in an attribute

    return of(lambda self, x: (z := self.net(x), setattr(self, "kept", what(self.net, z)))[0])

def of_attribute(net: Any, x: Tensor) -> Tensor:
    return encoded(net, x) + net.a.kept

def by_hook(register: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    return lambda: (made := mlp(), register(made))[0]
# fmt: on


KEPT: list[Tensor] = []
TRANSFORMER = partial(nn.TransformerEncoderLayer, 6, 2, 8, dropout=0.0, batch_first=True)
CALLS: dict[str, tuple[Callable[..., Tensor], Callable[[], Any]]] = {
    "nested inputs and outputs, keyword arguments, a learned argument without rows": (with_nested, of(nested)),
    "two stages, and inputs that need gradients": (with_stages, lambda: {"a": mlp(), "b": mlp()}),
    "outputs that are written into": (lambda net, x: spread(net.a(x).mul_(2).index_fill_(0, torch.tensor([0]), 0.0)), mlp),
    "rows in another dimension of an output": (over_time, lambda: nn.LSTM(5, 6, batch_first=True)),
    "a mask as large as the batch": (square_mask, TRANSFORMER),
    "a weight that is used outside too": (shared, sharing),
    "outputs that share memory": (sharing_memory, of(pair)),
    "frozen, and in evaluation mode, for a call alone": (in_other_modes, lambda: mlp(nn.Dropout(0.5))),
    "a reentrant checkpoint around a call": (in_a_checkpoint, mlp),
    "a compiled submodule": (encoded, lambda: torch.compile(mlp(), backend="aot_eager")),
    "CLIP of transformers": (clip_step, clip_model),
    "packed sequences, padded to the batch": (packed, lambda: Packed(True)),
    "teachers without gradients, one by functional_call": (with_teachers, mlp),
    "a hook that normalises each row": (encoded, by_hook(lambda m: m.register_forward_hook(lambda *a: F.normalize(a[2])))),
    "a gradient penalty": (critic_penalty, mlp),
    "an attribute that is only looked at": (encoded, keeps(lambda net, z: z * 2)),
}
NAMES = {
    "two stages, and inputs that need gradients": ["net.a", "net.b"],
    "CLIP of transformers": ["net.a.vision_model", "net.a.text_model"],
}


def of_x(step: Callable[..., Tensor], net: Any, batch: Any) -> Tensor:
    return step(net, batch[0])


@pytest.mark.some_cases(13, 15)
@pytest.mark.parametrize("rows", [3, 1])
@pytest.mark.parametrize("case", CALLS)
def test_any_call_has_the_step_of_the_whole_batch(case: str, rows: int) -> None:
    step, make = CALLS[case]
    policy = row_wise(names=NAMES.get(case, "net.a"), micro_batch=rows)
    assert_window_equals_batch(lambda: Toy(partial(of_x, step), net=lambda: model(make)), batches(ROWS, ROWS), policy)


def test_under_autocast_the_step_is_that_of_the_whole_batch() -> None:
    module = Toy(lambda net, batch: shared(net, batch[0].float()), net=lambda: model(sharing)).float()
    arguments = {"trainer": {"precision": "bf16-mixed"}, "limit": 2**-7}  # of bfloat16: rows of a micro-batch are summed first
    assert_window_equals_batch(module, batches(ROWS, ROWS), row_wise(names="net.a"), optimizers=[sgd], **arguments)


def test_only_one_micro_batch_and_the_outputs_are_held() -> None:
    def largest(size: int, *callbacks: pl.Callback) -> int:
        layers = [nn.Sequential(nn.Linear(5, 5), nn.Tanh()) for _ in range(20)]
        module = Toy(partial(of_x, encoded), net=lambda: model(lambda: nn.Sequential(*layers, nn.Linear(5, 6))))
        with SavedBytes() as saved:
            fit(module, collated(size), *callbacks)
        return saved.peak // 8  # numbers of float64

    weights, outputs = 20 * 25 + 30, 64 * 6 * 4 + 64 * 64 * 2
    whole, of_parts, of_twice = largest(64), largest(64, row_wise(names="net.a")), largest(128, row_wise(names="net.a"))
    assert of_parts < 4 / 64 * whole + weights + outputs
    assert of_twice - of_parts < 128 * 6 * 4 + 128 * 128 * 2


def last_is_large(net: Any, x: Tensor) -> Tensor:
    x = x.clone()
    x[-1, 0] = 10
    output = net.a(x)
    return spread(output) if isinstance(output, Tensor) else spread(output[0]) * (1 + output[1])


def zeros() -> nn.Module:
    return nn.Linear(6, 6, bias=False).apply(lambda layer: layer.weight.data.zero_())


def with_gradient(hidden: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    if hidden.requires_grad:
        hidden.register_hook(change)
    return hidden


NAMED = {"BatchNorm": "net.a.3"}
REFUSED: dict[str, tuple[Callable[[Any, Tensor], Tensor], Callable[[], nn.Module]]] = {
    "exchanged parameters": (lambda net, x:
        spread(torch.func.functional_call(net.a, {n: p * 2 for n, p in net.a.named_parameters()}, x)), mlp),
    "changed parameters": (lambda net, x: encoded(net, x) + 0 * net.a[0].weight.detach().mul_(2).sum(), mlp),
    "changed input": (lambda net, x: encoded(net, x) + 0 * x.add_(1).sum(), mlp),
    "not called": (lambda net, x: spread(net.a.forward(x)), mlp),
    "writes into its input": (encoded, of(lambda self, x: self.net(x.mul_(0.5)))),
    "BatchNorm": (encoded, lambda: mlp(nn.BatchNorm1d(6))),
    "attention over the batch": (lambda net, x: spread(net.a(x[:, None])[:, 0]), lambda: mlp(nn.TransformerEncoderLayer(6, 2, 8))),
    "one output for all rows": (lambda net, x: sum(map(torch.sum, net.a(x))), of(lambda self, x: ((z := self.net(x)), z.mean()))),
    "a buffer that counts": (encoded, of(lambda self, x: self.net(x) + 0 * self.seen.add_(1))),
    "a running mean that is another buffer each time": (encoded, of(lambda self, x: (
        z := self.net(x), setattr(self, "seen", 0.9 * self.seen + z.detach().mean()))[0])),
    "rows in dimension 1": (lambda net, x: spread(net.a(x[:, None].repeat(1, 4, 1))[0].mean(1)), lambda: nn.LSTM(5, 6)),
    "a number of rows": (lambda net, x: net.a(x)[0].sum(), of(lambda self, x: ((z := self.net(x)), float(z.detach().norm())))),
    "an output for all rows that one row changes": (last_is_large, of(lambda self, x: (self.net(x), (x[:, 0] > 5).any()))),
    "an attribute that is set between calls": (lambda net, x:
        spread(net.a(x) * (setattr(net.a, "factor", 2.0) or net.a(x))), of(lambda self, x: self.net(x) * self.factor)),
    "an argument of an unknown class": (lambda net, x:
        spread(net.a(x, SimpleNamespace(hidden=torch.zeros(2)))), of(lambda self, x, kept: self.net(x))),
    "a cache of keys and values": (lambda net, x: spread(net.a(input_ids=texts(x)[0]).last_hidden_state.mean(1)), gpt_model),
    "packed sequences": (lambda net, x: spread(net.a(nn.utils.rnn.pack_sequence([*x[:, None]]))[1][0]), lambda: nn.GRU(5, 6)),
    "packed sequences, padded to the longest": (packed, lambda: Packed(False)),
    "a mean over rows where there are several": (encoded, of(lambda self, x: self.net(x) - (len(x) > 2) * self.net(x).mean(0))),
    "a mode in which rows are not independent": (lambda net, x: spread(net.a(x, False)) + spread(net.a(x, True)),
        of(lambda self, x, centred: self.net(x) - centred * self.net(x).mean(0))),
    "spectral norms that are updated": (encoded, lambda: nn.Sequential(parametrizations.spectral_norm(nn.Linear(5, 6)))),
    "a generator": (lambda net, x: sum(map(spread, net.a(x))), of(lambda self, x: (layer(x) for layer in self.net[:1]))),
    "a loss in an attribute": (of_attribute, keeps(lambda net, z: z.square().mean())),
    "a number in an attribute": (of_attribute, keeps(lambda net, z: z.detach().mean())),
    "what a hook keeps": (lambda net, x: encoded(net, x) * KEPT[-1].square().mean(),
        by_hook(lambda m: m[1].register_forward_hook(lambda module, args, output: KEPT.append(output.detach())))),
    "gradients that depend on each other below a layer of zeros": (  # where they are 0 == 0
        lambda net, x: F.cross_entropy(net.a(x), torch.arange(len(x)) % 6),
        lambda: nn.Sequential(of(lambda self, x: with_gradient(self.net(x), lambda g: g - g.mean(0)))(), zeros())),
    "gradients that are normalised in a reentrant checkpoint": (encoded, of(lambda self, x: checkpoint(
        lambda x: self.net[2](with_gradient(self.net[0](x), lambda g: g / g.norm())), x.requires_grad_(), use_reentrant=True))),
    "gradients that a hook of a module normalises": (encoded,
        by_hook(lambda m: m[1].register_full_backward_hook(lambda module, given, of_output: (given[0] / given[0].norm(),)))),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_what_row_wise_cannot_have_is_refused_by_name(case: str) -> None:
    step, make = REFUSED[case]
    module = Toy(partial(of_x, step), net=lambda: model(make))
    refused(module, collated(ROWS), row_wise(names="net.a", micro_batch=3), error=RowWiseError, match=NAMED.get(case, "net.a"))
    module.net.stem(torch.zeros(1, 5).double()).sum().backward()  # backwards are torch's own again


def test_a_state_with_its_rows_in_dimension_1_fails_with_a_note() -> None:
    def loss(net: Any, batch: Any) -> Tensor:
        outputs, state = net.encoder(batch[0][:, None], *states)
        states[:] = [state.detach()]
        return outputs.std(0).sum()

    states = list[Tensor]()
    module = Toy(loss, net=lambda: nn.ModuleDict({"encoder": nn.GRU(5, 5, batch_first=True)}))
    with pytest.raises(RuntimeError) as failed:
        fit(module, collated(8, 8), row_wise())
    assert "dimension 0" in failed.value.__notes__[-1]


def test_a_hook_after_each_accumulation_is_warned_of() -> None:
    make = by_hook(lambda m: m[0].weight.register_post_accumulate_grad_hook(lambda parameter: None))
    with pytest.warns(AccumulationWarning, match=r"a.0.weight"):
        fit(Toy(partial(of_x, encoded), net=lambda: model(make)), collated(ROWS), row_wise(names="net.a", micro_batch=3))


WRONG = [{"micro_batch": None}, {"micro_batch": 0}, {"names": 3}, {"names": []}, {"names": "net.decoder"}]


@pytest.mark.parametrize("policy", [*WRONG, {"names": ["net.encoder", "net.encoder.0"]}], ids=str)
def test_names_and_sizes_that_do_not_fit_are_refused_before_training(policy: dict[str, Any]) -> None:
    with pytest.raises(AccumulationError, match="row_wise=|micro_batch="):
        fit(two_views(clip), collated(ROWS), row_wise(**policy))


def uneven() -> list[list[Any]]:  # loader batches of unequally many rows, most of one of which are ignored
    rows = batches(3, 10, 7, 5, 8, 2)
    rows[1][2:] = [(x, -100) for x, _ in rows[1][2:]]
    return rows


@pytest.mark.parametrize("options", [{}, {"on_nonfinite": "raise"}, {"micro_batch": Tokens(15)}], ids=str)
def test_windows_of_several_loader_batches_are_exact(options: dict[str, Any]) -> None:
    assert_window_equals_batch(Toy(of_classes, net=encoder_and_scale), uneven(), row_wise(3, **options), epochs=2)


def test_sums_in_a_wider_type_have_nothing_of_a_proof_inside_of_their_window() -> None:
    data = collated(*[ROWS] * 4)
    data[0][1].fill_(-100)  # it shows nothing
    loss = lambda net, batch: F.cross_entropy(net(batch[0].float()), batch[1])  # noqa: E731  # and never in double precision
    found, expected = (Toy(loss, net=lambda: nn.Linear(5, 3)).float() for _ in range(2))
    fit(found, data, row_wise(4, "net", accumulate_dtype=torch.float64))
    fit(expected, [[torch.cat(part) for part in zip(*data, strict=True)]], strategy="auto")
    assert relative_error(found.parameters(), expected.parameters()) < 1e-5


def test_windows_of_several_loader_batches_are_proven_once() -> None:
    sizes: list[int] = []
    fit(Toy(lambda net, x: sizes.append(len(x[0])) or of_classes(net, x), net=encoder_and_scale), collated(9, 8, 7, 3), row_wise(2))
    assert sizes[-3:] == [8, 7, 3]


def test_batches_without_a_loss_or_a_weight_count_for_nothing() -> None:
    first, second = batches(ROWS, ROWS)
    no_weight, no_loss = ([(x, label) for x, _ in first] for label in (-100, -200))
    module = Toy(of_classes, net=encoder_and_scale)
    data = [first, no_weight, no_loss, None, second]
    assert_window_equals_batch(module, data, row_wise(5), windows=[first + second], weights=[2 * ROWS])


def test_loader_batches_that_are_not_finite_are_left_out() -> None:
    rows = batches(*[ROWS] * 4)
    bad = [(x * math.inf, label) for x, label in rows[0]]
    module, data = Toy(of_classes, net=encoder_and_scale), [*rows[:2], bad, bad, *rows[2:]]
    with warned() as messages:
        assert_window_equals_batch(module, data, row_wise(3, on_nonfinite="skip"), windows=[rows[0] + rows[1], rows[2] + rows[3]])
    assert any("not finite" in message for message in messages)


def test_the_networks_of_a_gan_in_manual_optimization() -> None:
    assert_window_equals_batch(GAN, draw(GAN), row_wise(names=["generator", "discriminator"]), optimizers=[None])


WITH_RANKS: dict[str, Any] = {"collate": default_collate, "optimizers": (sgd, adamw)}


class Gathering(Toy):  # a loss of the rows of all ranks, as a CLIP over ranks has it: each gathers, and sees the whole
    def __init__(self, loss: Loss, gathers: str = "lightning", is_sharded: bool = False) -> None:
        super().__init__(loss, net=encoder_and_scale)
        self.gathers, self.head = gathers, nn.Linear(6, 6, bias=False).double()
        if is_sharded:  # a learned number cannot be sharded
            self.net.scale = None

    def configure_model(self) -> None:
        shard(self, [self.net.encoder[0], self.net.encoder[-1], self.net.encoder, self.head])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, classes = batch
        hidden = self.net.encoder(x)
        views = [self.head(hidden), self.head(hidden + self.net.encoder(x.flip(1) + 0.1))]
        if self.loss is F.cross_entropy:
            return F.cross_entropy(views[0] + views[1], classes)
        if self.trainer.world_size > 1 and self.gathers == "lightning":
            views = [self.all_gather(view, sync_grads=True).flatten(0, 1) for view in views]
        elif self.trainer.world_size > 1 and self.gathers == "torch":
            views = [torch.cat(torch.distributed.nn.all_gather(view)) for view in views]
        scale = torch.tensor(0.5).to(x) if self.net.scale is None else self.net.scale
        loss = self.loss(*views, torch.arange(len(views[0])) % 3, scale)
        return loss + scale.square() if self.loss is barlow_twins else loss  # which has no other use for it


@pytest.mark.some_cases(2, 3)
@pytest.mark.parametrize("engine", ["ddp", "ddp of 4"])
@pytest.mark.parametrize("gathers", ["lightning", "torch"])
@pytest.mark.parametrize("loss", [clip, siglip, barlow_twins])
def test_a_loss_that_gathers_over_ranks_is_that_of_the_global_batch(loss: Loss, gathers: str, engine: str) -> None:
    ranks = 4 if engine == "ddp of 4" else 2
    steps = [batches(*[16 // ranks] * ranks, seed=seed) for seed in range(3)]
    policy = row_wise(micro_batch=3, weight="equal" if loss is barlow_twins else "auto")
    assert_one_window_one_batch(partial(Gathering, loss, gathers), list(zip(*steps, strict=True)), policy, engine, **WITH_RANKS)


@pytest.mark.parametrize(
    ("loss", "gathers", "named"), [(clip, "nothing", "(DoesNotAddUp|JointLoss)Error"), (barlow_twins, "lightning", "weight=.equal")]
)
def test_a_loss_of_one_ranks_rows_is_refused_and_a_gathered_sum_asks_for_its_weight(loss: Loss, gathers: str, named: str) -> None:
    with pytest.raises(Exception, match=named):
        fit(Gathering(loss, gathers), collated(8, 8), row_wise(micro_batch=3), ranks=2)


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("options", [{"sync": "micro_batch"}, {"find_unused_parameters": True}, {}], ids=str)
def test_ranks_with_unequally_many_batches_take_the_step_of_all_rows(options: dict[str, Any]) -> None:
    make, by_rank = partial(Toy, of_classes, net=encoder_and_scale), [uneven()[:4], uneven()[4:]]
    assert_one_window_one_batch(make, by_rank, row_wise(2, micro_batch=3), "ddp", options, **WITH_RANKS)


SHARDED: dict[str, tuple[Any, tuple[int, int], dict[str, Any]]] = {
    "one of two": (clip, (8, 8), {"weight": "equal"}),
    "both": (barlow_twins, (8, 8), {"weight": "equal", "names": ["net.encoder", "head"]}),
    "ranks of unequally many rows": (F.cross_entropy, (11, 5), {"window": 2}),
    "tokens": (F.cross_entropy, (11, 5), {"window": 2, "micro_batch": Tokens(20)}),
    "a first batch that shows nothing": (F.cross_entropy, (8, 8), {"window": 2}),
}


@needs_sharding_on_cpu
@pytest.mark.some_cases(1, 2)
@pytest.mark.parametrize("case", SHARDED)
def test_sharded_submodules_take_the_step_of_the_global_batch(case: str) -> None:
    loss, sizes, policy = SHARDED[case]
    by_rank = list(zip(*(batches(*sizes, seed=seed) for seed in range(4)), strict=True))
    for first, *_ in by_rank if "nothing" in case else ():
        first[:-1] = [(x, -100) for x, _ in first[:-1]]
    make = partial(Gathering, loss, "torch", True)
    assert_one_window_one_batch(make, by_rank, row_wise(**{"micro_batch": 3, **policy}), "fsdp2", **WITH_RANKS)
