"""row_wise= with modules as others write them: the steps of the whole batch, or an error that says why not."""

from __future__ import annotations

import math
from collections import namedtuple
from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import loader, relative_error, train_by_hand, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations, parametrize, rnn

from lightning_accum import GradientAccumulation, RowWiseError

ROWS, LENGTH, CLASSES = 12, 6, 31


def data() -> list[dict[str, Tensor]]:
    torch.manual_seed(1)
    found = []
    for _ in range(3):
        lengths = torch.randint(1, LENGTH + 1, (ROWS,))
        mask = (torch.arange(LENGTH) < lengths[:, None]).long()
        vectors = {"x": torch.randn(ROWS, 5), "sequences": torch.randn(ROWS, LENGTH, 5), "images": torch.randn(ROWS, 3, 16, 16)}
        ids = torch.randint(3, CLASSES, (ROWS, LENGTH)) * mask
        found.append({**{name: value.double() for name, value in vectors.items()}, "ids": ids, "mask": mask, "lengths": lengths})
    return found


def spread(z: Tensor) -> Tensor:
    z = z.flatten(1)
    return z.std(0).sum() + (z @ z.T).logsumexp(1).mean()


def clip(a: Tensor, b: Tensor) -> Tensor:
    logits, rows = 3 * F.normalize(a) @ F.normalize(b).T, torch.arange(len(a))
    return (F.cross_entropy(logits, rows) + F.cross_entropy(logits.T, rows)) / 2


class Stranger(pl.LightningModule):
    """Its modules, and a step of a batch."""

    def __init__(self, make: Callable[[], dict[str, nn.Module]], step: Callable[[Any, Any], Tensor], optimizer: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        for name, module in make().items():
            self.add_module(name, module)
        self.double()
        self.step, self.optimizer = step, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.step(self, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        trained = [parameter for parameter in self.parameters() if parameter.requires_grad]
        if self.optimizer == "sgd":
            return torch.optim.SGD(trained, lr=0.1)
        # where a gradient is 0 but for rounding, as that of a bias of keys in attention, Adam would divide it by its size
        return torch.optim.AdamW(trained, lr=0.01, eps=1e-4)


def mlp(last: int = 6) -> nn.Module:
    return nn.Sequential(nn.Linear(5, 8), nn.Tanh(), nn.Linear(8, last))


def encoder(make: Callable[[], nn.Module]) -> Callable[[], dict[str, nn.Module]]:
    return lambda: {"encoder": make()}


# --- models of Hugging Face ---------------------------------------------------------------------------------------------

SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def clip_model() -> dict[str, nn.Module]:
    transformers = pytest.importorskip("transformers")
    text = {"vocab_size": CLASSES, "max_position_embeddings": LENGTH, "eos_token_id": 2, "pad_token_id": 0}
    config = transformers.CLIPConfig(
        text_config={**SMALL, **text}, vision_config={**SMALL, "image_size": 16, "patch_size": 8}, projection_dim=8
    )
    return {"clip": transformers.CLIPModel(config)}


def bert_model() -> dict[str, nn.Module]:
    transformers = pytest.importorskip("transformers")
    dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return {
        "bert": transformers.BertModel(transformers.BertConfig(vocab_size=CLASSES, max_position_embeddings=16, **SMALL, **dropout))
    }


def clip_step(model: Any, batch: Any) -> Tensor:
    loss: Tensor = model.clip(
        input_ids=batch["ids"], attention_mask=batch["mask"], pixel_values=batch["images"], return_loss=True
    ).loss
    return loss


def bert_step(model: Any, batch: Any) -> Tensor:
    first = model.bert(input_ids=batch["ids"], attention_mask=batch["mask"])
    second = model.bert(input_ids=batch["ids"].flip(0), attention_mask=batch["mask"].flip(0), output_hidden_states=True)
    pooled = (first.last_hidden_state * batch["mask"][..., None]).sum(1)
    return clip(pooled, second.pooler_output.flip(0)) + second.hidden_states[1].var(0).mean()


def gpt_step(model: Any, batch: Any) -> Tensor:
    return spread(model.gpt(input_ids=batch["ids"]).last_hidden_state.mean(1))


def gpt_model() -> dict[str, nn.Module]:
    transformers = pytest.importorskip("transformers")
    return {
        "gpt": transformers.GPT2Model(transformers.GPT2Config(vocab_size=CLASSES, n_positions=16, n_embd=16, n_layer=1, n_head=2))
    }


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

    def __init__(self, what: str) -> None:
        super().__init__()
        self.rnn, self.what = nn.LSTM(5, 7, 2, batch_first=True, bidirectional=True), what

    def forward(self, x: Tensor, lengths: Tensor) -> Any:
        output, (state, _) = self.rnn(rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False))
        if self.what == "state":
            return state
        length = x.shape[1] if self.what == "padded to the batch" else None
        return rnn.pad_packed_sequence(output, batch_first=True, total_length=length)[0]


class Experts(nn.Module):
    """A mixture of experts, of which each row has one."""

    def __init__(self, capacity: float = math.inf, has_loss: bool = False) -> None:
        super().__init__()
        self.gate, self.experts = nn.Linear(5, 3), nn.ModuleList(nn.Linear(5, 6) for _ in range(3))
        self.capacity, self.has_loss = capacity, has_loss

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        probabilities = self.gate(x).softmax(-1)
        output, most = x.new_zeros(len(x), 6), min(len(x), self.capacity * len(x) / 3)
        for index, expert in enumerate(self.experts):
            rows = (probabilities.argmax(-1) == index).nonzero()[: math.ceil(most), 0]
            output = output.index_add(0, rows, expert(x[rows]) * probabilities[rows, index, None])
        if self.has_loss:
            self.balance = probabilities.mean(0).square().sum()
        return output, probabilities


Encoded = namedtuple("Encoded", "hidden pooled more")


class Returns(nn.Module):
    """A tuple with names, or a generator."""

    def __init__(self, is_generator: bool = False) -> None:
        super().__init__()
        self.net, self.is_generator = mlp(), is_generator

    def forward(self, x: Tensor) -> Any:
        if self.is_generator:
            return (layer(x) for layer in self.net[:1])
        z = self.net(x)
        return Encoded(z, z.tanh(), {"none": None, "list": [z * 2, "text"]})


class Adapted(nn.Module):
    """A frozen layer with an adapter of low rank."""

    def __init__(self, layer: nn.Linear) -> None:
        super().__init__()
        self.layer = layer.requires_grad_(False)
        self.down, self.up = nn.Linear(layer.in_features, 2, bias=False), nn.Linear(2, layer.out_features, bias=False)
        self.is_on = True

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x) + self.is_on * self.up(self.down(x))


class Keeps(nn.Module):
    """Leaves something in an attribute."""

    def __init__(self, what: Callable[[nn.Module, Tensor], Any]) -> None:
        super().__init__()
        self.net, self.what = mlp(), what

    def forward(self, x: Tensor) -> Tensor:
        z: Tensor = self.net(x)
        self.kept = self.what(self.net, z)
        return z


class Mode(nn.Module):
    """Rows are independent in one of its modes alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp()

    def forward(self, x: Tensor, mode: str) -> Tensor:
        z: Tensor = self.net(x)
        return z if mode == "rows" else z - z.mean(0)


class LargeBatches(Mode):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x, "rows" if len(x) < 3 else "batch")


class UnitGradient(torch.autograd.Function):
    """Its gradient has the norm 1 over all rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient / gradient.norm()


class UnitGradients(nn.Module):
    def forward(self, x: Tensor) -> Any:
        return UnitGradient.apply(x)


def by_hook(register: Callable[[nn.Sequential], Any]) -> Callable[[], dict[str, nn.Module]]:
    def make() -> dict[str, nn.Module]:
        made = mlp()
        register(made)
        return {"encoder": made}

    return make


KEPT: list[Tensor] = []


def keep(module: nn.Module, args: Any, output: Tensor) -> None:
    KEPT[:] = [output.detach()]


def of_x(model: Any, batch: Any) -> Tensor:
    return spread(model.encoder(batch["x"]))


def of_attribute(model: Any, batch: Any) -> Tensor:
    return of_x(model, batch) + model.encoder.kept


def of_images(model: Any, batch: Any) -> Tensor:
    return clip(model.encoder(batch["images"]), model.encoder(batch["images"].flip(3)))


def packed(model: Any, batch: Any) -> Tensor:
    return spread(model.encoder(batch["sequences"], batch["lengths"]).mean(-2))


def packed_state(model: Any, batch: Any) -> Tensor:
    return spread(model.encoder(batch["sequences"], batch["lengths"])[-1])


def routed(model: Any, batch: Any) -> Tensor:
    output, probabilities = model.encoder(batch["x"])
    return spread(output) + probabilities.mean(0).square().sum()


def in_a_loop(model: Any, batch: Any) -> Tensor:
    state = batch["x"].new_zeros(ROWS, 6)
    for step in range(LENGTH):
        state = model.encoder(batch["sequences"][:, step], state)
    return spread(state)


def named(model: Any, batch: Any) -> Tensor:
    output = model.encoder(batch["x"])
    return spread(output.pooled) + spread(output.hidden) + spread(output.more["list"][0])


def of_generator(model: Any, batch: Any) -> Tensor:
    return sum(map(spread, model.encoder(batch["x"])), torch.zeros(()))


def tied(model: Any, batch: Any) -> Tensor:
    return spread(model.encoder(batch["ids"]) @ model.encoder[0].weight.T) + model.encoder[0].weight.square().sum()


def with_reference(model: Any, batch: Any) -> Tensor:
    z = model.encoder(batch["x"])
    with torch.no_grad():
        model.encoder[0].is_on = False
        reference = model.encoder(batch["x"])
        model.encoder[0].is_on = True
    return clip(z, reference)


def with_teachers(model: Any, batch: Any) -> Tensor:
    older = {name: 0.9 * value for name, value in model.encoder.named_parameters()}
    with torch.no_grad():
        targets = model.encoder(batch["x"] + 1), torch.func.functional_call(model.encoder, older, batch["x"])
    return clip(model.encoder(batch["x"]), targets[0]) + clip(model.encoder(batch["x"]), targets[1])


def in_single_precision(model: Any, batch: Any) -> Tensor:
    return spread(model.head(model.encoder.float()(batch["x"].float()).double()))


def cached(model: Any, batch: Any) -> Tensor:
    with parametrize.cached():
        return of_x(model, batch) + model.encoder[0].weight.square().sum()


def in_two_modes(model: Any, batch: Any) -> Tensor:
    return spread(model.encoder(batch["x"], "rows")) + spread(model.encoder(batch["x"], "batch"))


def of_hook(model: Any, batch: Any) -> Tensor:
    return of_x(model, batch) * KEPT[0].square().mean()


def normed(norm: Callable[[nn.Module], nn.Module] = parametrizations.weight_norm) -> nn.Module:
    return nn.Sequential(norm(nn.Linear(5, 8)), nn.Tanh(), nn.Linear(8, 6))


def embedding(**options: Any) -> nn.Module:
    return nn.Sequential(nn.Embedding(CLASSES, 6, **options), nn.Flatten(), nn.Linear(6 * LENGTH, 6))


def resnet() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), Residual(4, 8), Residual(8, 8), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 6))


Case = tuple[Callable[[], dict[str, nn.Module]], Callable[[Any, Any], Tensor]]
EXACT: dict[str, Case] = {
    "CLIP of transformers": (clip_model, clip_step),
    "BERT, asked for other outputs in a second call": (bert_model, bert_step),
    "ResNet with GroupNorm": (encoder(resnet), of_images),
    "packed sequences, padded to the batch": (encoder(lambda: Packed("padded to the batch")), packed),
    "packed sequences, the last state": (encoder(lambda: Packed("state")), packed_state),
    "a mixture of experts, whose balance the step computes": (encoder(Experts), routed),
    "a cell in a loop": (encoder(lambda: nn.GRUCell(5, 6)), in_a_loop),
    "a tuple with names": (encoder(Returns), named),
    "weights tied to those of a head": (encoder(embedding), tied),
    "an adapter of low rank, without it as reference": (
        encoder(lambda: nn.Sequential(Adapted(nn.Linear(5, 8)), nn.Tanh(), nn.Linear(8, 6))),
        with_reference,
    ),
    "teachers without gradients, one by functional_call": (encoder(mlp), with_teachers),
    "a hook that normalises each row": (by_hook(lambda m: m.register_forward_hook(lambda *a: F.normalize(a[2]))), of_x),
    "weight_norm": (encoder(normed), of_x),
    "parametrizations that are cached in the step": (encoder(normed), cached),
    "orthogonal weights": (encoder(lambda: nn.Sequential(parametrizations.orthogonal(nn.Linear(5, 5)), nn.Tanh())), of_x),
    "an attribute that is only looked at": (encoder(lambda: Keeps(lambda net, z: z * 2)), of_x),
}
NAMES = {"CLIP of transformers": ["clip.vision_model", "clip.text_model"]}


def fit(module: Stranger, names: Any) -> None:
    trainer(callbacks=[GradientAccumulation(micro_batch=5, row_wise=names)]).fit(module, loader(data()))


@pytest.mark.some_cases(12)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("case", EXACT)
def test_modules_of_others_take_the_steps_of_the_whole_batch(case: str, optimizer: str) -> None:
    make, step = EXACT[case]
    expected, module = (Stranger(make, step, optimizer) for _ in range(2))
    train_by_hand(expected, data(), 1)
    fit(module, NAMES.get(case, next(iter(make()))))
    assert relative_error(module.parameters(), expected.parameters()) < 1e-12


REFUSED: dict[str, tuple[Callable[[], dict[str, nn.Module]], Callable[[Any, Any], Tensor], str]] = {
    "a cache of keys and values": (gpt_model, gpt_step, "returns a DynamicCache, which holds tensors.*use_cache=False"),
    "packed sequences, padded to the longest": (encoder(lambda: Packed("")), packed, "together other outputs than alone"),
    "experts that take so many rows": (encoder(lambda: Experts(1.25)), routed, "alike other outputs together than alone"),
    "experts that take many rows": (encoder(lambda: Experts(2.0)), routed, "alike other outputs together than alone"),
    "a mean over rows where there are several": (encoder(LargeBatches), of_x, "together other outputs than alone"),
    "a mode in which rows are not independent": (encoder(Mode), in_two_modes, "together other outputs than alone"),
    "spectral norms that are updated": (encoder(lambda: normed(parametrizations.spectral_norm)), of_x, "changes its buffer '_u'"),
    "a generator": (encoder(lambda: Returns(True)), of_generator, "returns <generator"),
    "a loss in an attribute": (
        encoder(lambda: Keeps(lambda net, z: z.square().mean())),
        of_attribute,
        r"the loss depends on encoder.kept, an attribute that is set in its forward, which is that of the last micro-batch",
    ),
    "a penalty of weights in an attribute": (
        encoder(lambda: Keeps(lambda net, z: net[0].weight.square().sum())),
        of_attribute,
        "the loss depends on encoder.kept",
    ),
    "a number in an attribute": (
        encoder(lambda: Keeps(lambda net, z: z.detach().mean())),
        of_attribute,
        "the loss depends on encoder.kept",
    ),
    "what a hook keeps": (
        by_hook(lambda m: m[1].register_forward_hook(keep)),
        of_hook,
        "a tensor that a forward hook in 'encoder' keeps",
    ),
    "gradients by frequency": (
        encoder(lambda: embedding(scale_grad_by_freq=True)),
        lambda model, batch: spread(model.encoder(batch["ids"])),
        "are not the sum of those for each.*scale_grad_by_freq",
    ),
    "gradients that a hook clips": (
        by_hook(lambda m: m[0].weight.register_hook(lambda g: g.clamp(-0.01, 0.01))),
        of_x,
        "are not the sum",
    ),
    "gradients that a hook of a module normalises": (
        by_hook(lambda m: m[1].register_full_backward_hook(lambda module, given, of_output: (given[0] / given[0].norm(),))),
        of_x,
        "are not the sum",
    ),
    "gradients that a function normalises": (
        encoder(lambda: nn.Sequential(nn.Linear(5, 8), UnitGradients(), nn.Linear(8, 6))),
        of_x,
        "are not the sum",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_would_be_another_step_is_refused(case: str) -> None:
    make, step, message = REFUSED[case]
    with pytest.raises(RowWiseError, match=message):
        fit(Stranger(make, step, "sgd"), next(iter(make())))


def test_a_hook_after_each_accumulation_is_warned_of() -> None:
    made = by_hook(lambda m: m[0].weight.register_post_accumulate_grad_hook(lambda parameter: None))
    with pytest.warns(UserWarning, match="encoder.0.weight: register_post_accumulate_grad_hook runs a function after every"):
        fit(Stranger(made, of_x, "sgd"), "encoder")


def test_a_submodule_in_another_precision_than_the_loss() -> None:
    expected, module = (Stranger(lambda: {"encoder": mlp(), "head": nn.Linear(6, 6)}, in_single_precision, "sgd") for _ in range(2))
    train_by_hand(expected, data(), 1)
    fit(module, "encoder")
    assert relative_error(module.parameters(), expected.parameters()) < 1e-6  # of float32
