"""row_wise= with modules as others write them: the steps of the whole batch, or an error that says why not."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from support import Toy, fit
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, rnn
from torch.utils.data import default_collate

from lightning_accum import AccumulationWarning, GradientAccumulation, RowWiseError
from lightning_accum.testing import assert_window_equals_batch

ROWS, LENGTH, CLASSES = 12, 6, 31
Step = Callable[[Any, Any], Tensor]


def batches() -> list[list[dict[str, Tensor]]]:
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        lengths = torch.randint(1, LENGTH + 1, (ROWS,))
        mask = (torch.arange(LENGTH) < lengths[:, None]).long()
        vectors = {"x": torch.randn(ROWS, 5), "sequences": torch.randn(ROWS, LENGTH, 5), "images": torch.randn(ROWS, 3, 16, 16)}
        batch = {**{name: value.double() for name, value in vectors.items()}, "mask": mask, "lengths": lengths}
        batch["ids"] = torch.randint(3, CLASSES, (ROWS, LENGTH)) * mask
        found.append([{name: value[row] for name, value in batch.items()} for row in range(ROWS)])
    return found


def spread(z: Tensor) -> Tensor:
    z = z.flatten(1)
    return z.std(0).sum() + (z @ z.T).logsumexp(1).mean()


def clip(a: Tensor, b: Tensor) -> Tensor:
    logits, rows = 3 * F.normalize(a) @ F.normalize(b).T, torch.arange(len(a))
    return (F.cross_entropy(logits, rows) + F.cross_entropy(logits.T, rows)) / 2


def mlp(first: nn.Module | None = None) -> nn.Module:
    return nn.Sequential(first or nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, 6))


# --- models of Hugging Face ---------------------------------------------------------------------------------------------

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def clip_model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    text = {**SMALL, "vocab_size": CLASSES, "max_position_embeddings": LENGTH, "eos_token_id": 2, "pad_token_id": 0}
    vision = {**SMALL, "image_size": 16, "patch_size": 8}
    return transformers.CLIPModel(transformers.CLIPConfig(text_config=text, vision_config=vision, projection_dim=8))


def gpt_model() -> nn.Module:
    transformers = pytest.importorskip("transformers")
    return transformers.GPT2Model(transformers.GPT2Config(vocab_size=CLASSES, n_positions=16, n_embd=16, n_layer=1, n_head=2))


def clip_step(net: Any, batch: Any) -> Tensor:
    ids, mask = batch["ids"], batch["mask"]
    return net.encoder(input_ids=ids, attention_mask=mask, pixel_values=batch["images"], return_loss=True).loss


# --- what others write by themselves ------------------------------------------------------------------------------------


class Residual(nn.Module):
    """As in a ResNet, with GroupNorm, and in place where torchvision is."""

    def __init__(self, before: int, after: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(before, after, 3, 2, 1, bias=False), nn.Conv2d(after, after, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.GroupNorm(2, after), nn.GroupNorm(2, after)])
        self.down, self.relu = nn.Conv2d(before, after, 1, 2), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        z = self.norms[1](self.second(self.relu(self.norms[0](self.first(x)))))
        z += self.down(x)
        return self.relu(z)


class Packed(nn.Module):
    """An LSTM over packed sequences."""

    def __init__(self, is_padded_to_batch: bool) -> None:
        super().__init__()
        self.rnn, self.is_padded_to_batch = nn.LSTM(5, 7, 2, batch_first=True, bidirectional=True), is_padded_to_batch

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        output, _ = self.rnn(rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        return rnn.pad_packed_sequence(output, batch_first=True, total_length=x.shape[1] if self.is_padded_to_batch else None)[0]


class Experts(nn.Module):
    """A mixture of experts, of which each row has one."""

    def __init__(self, capacity: float = math.inf) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(5, 3), nn.ModuleList(nn.Linear(5, 6) for _ in range(3))
        self.capacity = capacity

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.gate(x).softmax(-1)
        output, most = x.new_zeros(len(x), 6), min(len(x), self.capacity * len(x) / 3)
        for index, expert in enumerate(self.experts):
            rows = (probabilities.argmax(-1) == index).nonzero()[: math.ceil(most), 0]
            output = output.index_add(0, rows, expert(x[rows]) * probabilities[rows, index, None])
        return output, probabilities


class Calls(nn.Module):
    """A small network, and a ``forward(self, x, ...)``; some leave something in an attribute."""

    def __init__(self, forward: Callable[..., Any]) -> None:
        super().__init__()
        self.net, self.forward_of = mlp(), forward

    def forward(self, *args: Any) -> Any:
        return self.forward_of(self, *args)


def keeps(what: Callable[[Any, Tensor], Any]) -> Callable[[], nn.Module]:
    def forward(self: Any, x: Tensor) -> Tensor:
        z: Tensor = self.net(x)
        self.kept = what(self.net, z)
        return z

    return lambda: Calls(forward)


def by_hook(register: Callable[[Any], Any]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        made = mlp()
        register(made)
        return made

    return make


KEPT: list[Tensor] = []


def keep(module: nn.Module, args: Any, output: Tensor) -> None:
    KEPT[:] = [output.detach()]


def of_x(net: Any, batch: Any) -> Tensor:
    return spread(net.encoder(batch["x"]))


def of_attribute(net: Any, batch: Any) -> Tensor:
    return of_x(net, batch) + net.encoder.kept


def of_ids(net: Any, batch: Any) -> Tensor:
    return spread(net.encoder(batch["ids"]) @ net.encoder[0].weight.T) + net.encoder[0].weight.square().sum()


def packed(net: Any, batch: Any) -> Tensor:
    return spread(net.encoder(batch["sequences"], batch["lengths"]).mean(-2))


def routed(net: Any, batch: Any) -> Tensor:
    output, probabilities = net.encoder(batch["x"])
    return spread(output) + probabilities.mean(0).square().sum()


def with_teachers(net: Any, batch: Any) -> Tensor:
    older = {name: 0.9 * value for name, value in net.encoder.named_parameters()}
    with torch.no_grad():
        targets = net.encoder(batch["x"] + 1), torch.func.functional_call(net.encoder, older, batch["x"])
    return clip(net.encoder(batch["x"]), targets[0]) + clip(net.encoder(batch["x"]), targets[1])


def embedding(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Embedding(CLASSES, 6, **options), nn.Flatten(), nn.Linear(6 * LENGTH, 6))


def resnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), Residual(4, 8), Residual(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 6))


EXACT: dict[str, tuple[Callable[[], nn.Module], Step]] = {
    "CLIP of transformers": (clip_model, clip_step),
    "ResNet with GroupNorm": (resnet, lambda net, b: clip(net.encoder(b["images"]), net.encoder(b["images"].flip(3)))),
    "packed sequences, padded to the batch": (lambda: Packed(True), packed),
    "a mixture of experts, whose balance the step computes": (Experts, routed),
    "weights tied to those of a head": (embedding, of_ids),
    "teachers without gradients, one by functional_call": (mlp, with_teachers),
    "a hook that normalises each row": (by_hook(lambda m: m.register_forward_hook(lambda *a: F.normalize(a[2]))), of_x),
    "an attribute that is only looked at": (keeps(lambda net, z: z * 2), of_x),
}


def stranger(make: Callable[[], nn.Module], step: Step) -> Toy:
    return Toy(step, net=lambda: nn.ModuleDict({"encoder": make()}))


@pytest.mark.some_cases(5)
@pytest.mark.parametrize("case", EXACT)
def test_modules_of_others_take_the_steps_of_the_whole_batch(case: str) -> None:
    make, step = EXACT[case]
    names = ["net.encoder.vision_model", "net.encoder.text_model"] if "CLIP" in case else "net.encoder"
    policy = GradientAccumulation(micro_batch=5, row_wise=names)
    assert_window_equals_batch(lambda: stranger(make, step), batches(), policy)


def fit_stranger(make: Callable[[], nn.Module], step: Step) -> None:
    policy = GradientAccumulation(micro_batch=5, row_wise="net.encoder")
    fit(stranger(make, step), list(map(default_collate, batches())), policy)


REFUSED: dict[str, tuple[Callable[[], nn.Module], Step]] = {
    "a cache of keys and values": (
        gpt_model,
        lambda net, b: spread(net.encoder(input_ids=b["ids"]).last_hidden_state.mean(1)),
    ),
    "packed sequences, padded to the longest": (lambda: Packed(False), packed),
    "experts that take so many rows": (lambda: Experts(1.25), routed),
    "a mean over rows where there are several": (
        lambda: Calls(lambda self, x: self.net(x) - (len(x) > 2) * self.net(x).mean(0)),
        of_x,
    ),
    "a mode in which rows are not independent": (
        lambda: Calls(lambda self, x, centred: self.net(x) - centred * self.net(x).mean(0)),
        lambda net, b: spread(net.encoder(b["x"], False)) + spread(net.encoder(b["x"], True)),
    ),
    "spectral norms that are updated": (lambda: mlp(parametrizations.spectral_norm(nn.Linear(5, 8))), of_x),
    "a generator": (
        lambda: Calls(lambda self, x: (layer(x) for layer in self.net[:1])),
        lambda net, b: sum(map(spread, net.encoder(b["x"]))),
    ),
    "a loss in an attribute": (keeps(lambda net, z: z.square().mean()), of_attribute),
    "a number in an attribute": (keeps(lambda net, z: z.detach().mean()), of_attribute),
    "what a hook keeps": (
        by_hook(lambda m: m[1].register_forward_hook(keep)),
        lambda net, b: of_x(net, b) * KEPT[0].square().mean(),
    ),
    "gradients by frequency": (lambda: embedding(scale_grad_by_freq=True), lambda net, b: spread(net.encoder(b["ids"]))),
    "gradients that a hook clips": (by_hook(lambda m: m[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))), of_x),
    "gradients that a hook of a module normalises": (
        by_hook(lambda m: m[1].register_full_backward_hook(lambda module, given, of_output: (given[0] / given[0].norm(),))),
        of_x,
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_another_step_is_refused(case: str) -> None:
    with pytest.raises(RowWiseError, match="encoder"):
        fit_stranger(*REFUSED[case])


def test_a_hook_after_each_accumulation_is_warned_of() -> None:
    make = by_hook(lambda m: m[0].weight.register_post_accumulate_grad_hook(lambda parameter: None))
    with pytest.warns(AccumulationWarning, match=r"encoder.0.weight"):
        fit_stranger(make, of_x)
