"""Fused cross entropies of other packages, whose kernels run on a GPU only: the right count is found without an argument.

pytest tests/gpu/test_fused_cuda.py -s      # with liger-kernel, cut-cross-entropy
"""

import importlib.util
from functools import partial
from typing import Any

import pytest
import support
import torch
from support import Toy, error_of_updates, pad, sentences, warned
from torch import Tensor, nn

from lightning_accum import GradientAccumulation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

WORDS, FEATURES = 512, 64


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.word, self.hidden = nn.Embedding(WORDS, FEATURES), nn.Linear(FEATURES, FEATURES)
        self.head = nn.Linear(FEATURES, WORDS, bias=False)

    def forward(self, ids: Tensor) -> Tensor:
        return self.hidden(self.word(ids)).tanh()


def liger_fused(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerFusedLinearCrossEntropyLoss

    return LigerFusedLinearCrossEntropyLoss()(weight, hidden, labels)


def liger_of_logits(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from liger_kernel.transformers import LigerCrossEntropyLoss

    return LigerCrossEntropyLoss()(hidden @ weight.T, labels)  # it writes its gradient over the logits


def cut(hidden: Tensor, weight: Tensor, labels: Tensor) -> Tensor:
    from cut_cross_entropy import linear_cross_entropy

    return linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), labels, filter_eps=None)


FUSED = {"liger, fused": liger_fused, "liger, of logits": liger_of_logits, "cut cross entropy": cut}
PACKAGES = {"liger": "liger_kernel", "cut": "cut_cross_entropy"}
LIMITS = {"liger, fused": 1e-5, "liger, of logits": 1e-5, "cut cross entropy": 2e-2}
"""Their kernels calculate in float32 and in bfloat16."""
ROWS = sentences(128, vocabulary=WORDS)


def train(loss: Any, size: int, is_tuple: bool, precision: str, **policy: Any) -> tuple[nn.Module, list[str]]:
    batches: list[Any] = [pad(ROWS[start : start + size]) for start in range(0, len(ROWS), size)]
    if is_tuple:
        batches = [tuple(batch.values()) for batch in batches]
    module, strategy = Toy(loss, net=Net).float(), "accum" if policy else "auto"
    with warned() as messages:
        callbacks = [GradientAccumulation(**policy)] if policy else []
        support.fit(module, batches, *callbacks, strategy=strategy, accelerator="gpu", precision=precision)
    return module.cpu(), messages


@pytest.mark.parametrize("policy", [{"window": 4}, {"micro_batch": 4}], ids=["windows", "split"])
@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed"])
@pytest.mark.parametrize(("is_tuple", "is_shifted"), [(False, True), (True, True), (False, False)])
@pytest.mark.parametrize("name", FUSED)
def test_with_no_argument_a_fused_loss_takes_the_steps_of_the_full_batches(
    name: str, is_tuple: bool, is_shifted: bool, precision: str, policy: dict[str, int]
) -> None:
    def loss(net: Net, batch: Any) -> Tensor:
        ids, labels = batch.values() if isinstance(batch, dict) else batch
        hidden = net(ids)
        if is_shifted:
            hidden, labels = hidden[:, :-1], labels[:, 1:]
        return FUSED[name](hidden.flatten(0, 1), net.head.weight, labels.flatten())

    if importlib.util.find_spec(PACKAGES[name.split()[0].rstrip(",")]) is None:
        pytest.skip(f"{name} is not installed")
    run = partial(train, loss, is_tuple=is_tuple, precision=precision)
    start, size = Toy(loss, net=Net).float(), 4 if "window" in policy else 16
    (whole, _), (found, messages), (averaged, _) = run(16), run(size, **policy), run(size, **policy, weight="equal")
    error, planted = (error_of_updates(module, whole, start) for module in (found, averaged))
    print(f"{name}, {precision}, {policy}: {error:.1e} of the updates; {planted:.1e} with micro-batches that weigh the same")
    assert [message for message in messages if not message.startswith("Padding")] == []
    assert error < (LIMITS[name] if precision == "32-true" else 2e-2) < planted
