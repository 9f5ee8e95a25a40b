"""What a GPU does differently and a CPU can imitate: counts stay on the device, and CUDA graphs write over their gradients."""

import sys
from itertools import pairwise
from typing import Any

import pytest
import torch
from harness import assert_one_window_one_batch
from support import Language, Toy, error_of_updates, fit, labelled, sentences
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import flex_attention

from lightning_accum import GradientAccumulation, SampleCount, TokenCount
from lightning_accum.testing import adamw


@pytest.fixture
def _counts_stay_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("lightning_accum") and hasattr(module, "is_on_host"):
            monkeypatch.setattr(module, "is_on_host", lambda _: False)


class TwoTerms(Language):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx) + self.net(batch["input_ids"])[:, 0].square().mean()


@pytest.mark.usefixtures("_counts_stay_on_the_device")
@pytest.mark.parametrize(
    ("make", "policy"),
    [
        (Language, {"window": 4}),
        (Language, {"window": 4, "weight": lambda batch: (batch["labels"][:, 1:] != -100).sum()}),
        (TwoTerms, {"window": 4}),
        (TwoTerms, {"window": 4, "weight": [TokenCount(), SampleCount()], "log": False}),  # 2e-8: two integers were divided
    ],
    ids=["auto", "a function", "two terms", "listed"],
)
def test_counts_of_a_device_are_exact(make: Any, policy: dict[str, Any]) -> None:
    ends = (0, 3, 4, 9, 11, 17, 20, 28, 32)
    batches = [sentences(32)[start:end] for start, end in pairwise(ends)]
    assert_one_window_one_batch(make, [batches], GradientAccumulation(**policy), optimizers=[None, adamw])


def attended(x: Tensor) -> Tensor:
    return flex_attention.flex_attention(heads := x[:, None, None], heads, heads)[:, 0, 0]


@pytest.mark.filterwarnings("error::lightning_accum.AccumulationWarning")
@pytest.mark.parametrize("function", [lambda x: torch.native_dropout(x, 0.5, True)[0], attended], ids=["dropout", "flex attention"])
def test_functions_that_are_one_operation_are_checked(function: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flex_attention, "_validate_device", lambda *_: None)
    module = Toy(lambda net, batch: F.cross_entropy(function(net(batch[0])), batch[1]))
    assert fit(module, labelled(8, 8), GradientAccumulation(2)).global_step == 1


class Graphed(nn.Module):  # its backward writes to the same memory each time, like that of ``torch.cuda.make_graphed_callables``
    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor, weight: Tensor, static: Tensor) -> Tensor:
            ctx.save_for_backward(x, weight)
            ctx.static = static
            return x @ weight.T

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            x, weight = ctx.saved_tensors
            ctx.static.copy_(gradient.T @ x)
            return gradient @ weight, ctx.static.detach(), None

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))
        self.register_buffer("static", torch.zeros(4, 4))

    def forward(self, x: Tensor) -> Tensor:
        return self.Product.apply(x, self.weight, self.static)

    forward.__module__ = "torch.cuda.graphs"


@pytest.mark.parametrize(("size", "policy"), [(4, {"window": 4}), (16, {"micro_batch": 4})], ids=["windows", "split"])
def test_gradients_in_the_memory_of_a_graph_are_copied(size: int, policy: dict[str, Any]) -> None:  # 0.35 before
    data = torch.randn(64, 4, dtype=torch.double, generator=torch.Generator().manual_seed(1))
    graphed = Toy(lambda net, x: net(x).square().mean(), net=Graphed)
    plain = Toy(lambda net, x: (x @ net.weight.T).square().mean(), net=Graphed)
    fit(graphed, [*data.split(size)], GradientAccumulation(**policy))
    fit(plain, [*data.split(16)], strategy="auto")
    assert error_of_updates(graphed, plain, Toy(lambda *_: None, net=Graphed)) < 1e-12
