"""Fused cross entropies show no denominator: the count with which their parts add up is found, or an error names those tried.

Checkpointed ones, torch's own and batches that are tuples are modules of ``real_modules/fused.py``.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from harness import assert_one_window_one_batch, on, windows_of
from real_modules.fused import FusedCrossEntropy
from support import Toy, pad, refused, sentences, warned
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import GradientAccumulation, SampleCount, TokenCount
from lightning_accum.testing import adamw, assert_window_equals_batch


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word, self.place, self.head = nn.Embedding(17, 8), nn.Embedding(12, 8), nn.Linear(8, 17, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return (self.word(ids) + self.place.weight[: ids.shape[1]]).tanh()


FUSED: dict[str, Callable[..., Tensor]] = {
    "custom": FusedCrossEntropy.apply,
    "half": lambda *arguments: FusedCrossEntropy.apply(*arguments) / 2,
}
SIZES = (3, 1, 4, 2, 2, 5, 1, 3)
LINES = sentences(sum(SIZES))
ROWS = [LINES[sum(SIZES[:place]) : sum(SIZES[: place + 1])] for place in range(len(SIZES))]
POLICIES = {"windows": {"window": 4}, "split": {"micro_batch": 3}}


def make_batch(rows: Any) -> dict[str, Tensor]:  # padded with 0; labels are -100 there, and at every fifth word
    batch = pad(rows)
    return {**batch, "labels": batch["labels"].masked_fill(batch["input_ids"] % 5 == 4, -100)}


def loss_of(fused: str, is_shifted: bool = True, term: Callable[[Tensor], Any] = lambda hidden: 0.0) -> Callable[..., Tensor]:
    def loss(net: Net, batch: Any) -> Tensor:
        hidden, labels = net(batch["input_ids"]), batch["labels"]
        pairs = (hidden[:, :-1], labels[:, 1:]) if is_shifted else (hidden, labels)
        return FUSED[fused](pairs[0].flatten(0, 1), net.head.weight, pairs[1].flatten()) + term(hidden)

    return loss


def assert_exact(loss: Any, policy: dict[str, Any], rows: Any = ROWS) -> None:
    own, how = windows_of([rows], 4) if "micro_batch" in policy else rows, GradientAccumulation(**policy)
    with warned() as messages:
        assert_window_equals_batch(partial(Toy, loss, net=Net), own, how, optimizers=[None, adamw], collate=make_batch)
    assert [message for message in messages if not message.startswith("Padding")] == []


@pytest.mark.some_cases(4)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("is_shifted", [True, False], ids=["shifted", "unshifted"])
@pytest.mark.parametrize("fused", FUSED)
def test_with_no_argument_a_fused_cross_entropy_takes_the_steps_of_full_batches(fused: str, is_shifted: bool, policy: str) -> None:
    assert_exact(loss_of(fused, is_shifted), POLICIES[policy])


@pytest.mark.parametrize("policy", POLICIES)
def test_of_counts_that_nearly_fit_in_half_precision_the_best_is_taken(policy: str) -> None:
    class InHalfPrecision(torch.autograd.Function):
        """Takes bfloat16, and calculates in single precision, as kernels for a GPU do; rows without labels are an error."""

        @staticmethod
        def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
            with torch.enable_grad():
                inputs = [hidden.detach().requires_grad_(), weight.detach().requires_grad_()]
                loss = F.cross_entropy(inputs[0].float() @ inputs[1].float().T, labels)
                ctx.gradients = torch.autograd.grad(loss, inputs)
                1 / int((labels != -100).sum())
            return loss.detach()

        @staticmethod
        def backward(ctx: Any, gradient: Tensor) -> Any:
            return *(gradient * own for own in ctx.gradients), None

    FUSED["half precision"] = lambda hidden, weight, labels: InHalfPrecision.apply(hidden.bfloat16(), weight.bfloat16(), labels)
    loss, rows = loss_of("half precision"), [row for row in sentences(40) if (row[1:] % 5 != 4).any()][:32]
    own = windows_of([[rows[start : start + 4] for start in range(0, 32, 4)]], 4)
    batches = own if policy == "split" else [part[start : start + 4] for part in own for start in range(0, 16, 4)]
    arguments = {"collate": make_batch, "optimizers": [None], "trainer": {"precision": "32-true"}}
    how = GradientAccumulation(**POLICIES[policy])
    with warned() as messages:
        assert_window_equals_batch(lambda: Toy(loss, net=Net).float(), batches, how, windows=own, limit=1e-2, **arguments)
    assert [message for message in messages if not message.startswith("Padding")] == []


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(("engine", "options"), [on("ddp"), on("ddp of 3")])
def test_ranks_with_uneven_ends_find_the_same_count(engine: str, options: Any) -> None:
    by_rank = [ROWS[:3], ROWS[3:8], ROWS[1:5]][: 2 if engine == "ddp" else 3]
    make = partial(Toy, loss_of("custom"), net=Net)
    assert_one_window_one_batch(make, by_rank, GradientAccumulation(2), engine, options, collate=make_batch)


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("weight", ["auto", [TokenCount(), SampleCount()]], ids=["auto", "listed"])
def test_a_fused_term_beside_another_is_exact(weight: Any, policy: str) -> None:
    loss = loss_of("custom", term=lambda hidden: hidden[:, 0].square().mean())
    assert_exact(loss, {**POLICIES[policy], "weight": weight, "log": weight == "auto"})


FULL = [torch.tensor([1, 2, 3, 5, 6, 7])] * 16
PART_LATER = [*[FULL[:3], FULL[3:4], FULL[4:9], FULL[9:]] * 2, *ROWS[4:]]
"""Samples, tokens and elements are proportional in the first two windows, and not in the third."""


@pytest.mark.parametrize("policy", POLICIES)
def test_counts_that_part_later_are_an_error_that_names_them_and_the_weight_it_asks_for_is_exact(policy: str) -> None:
    batches = [make_batch(rows) for rows in (PART_LATER if policy == "windows" else windows_of([PART_LATER], 4))]
    module = Toy(loss := loss_of("custom"), net=Net)
    refused(module, batches, GradientAccumulation(**POLICIES[policy]), match="(?is)(?=.*token)(?=.*sample)(?=.*weight=)", steps=2)
    assert_exact(loss, {**POLICIES[policy], "weight": TokenCount()}, rows=PART_LATER)
