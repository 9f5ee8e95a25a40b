"""``accumulate_dtype``: gradients are added up, weighed, reduced and normalised in a wider type than that of the parameters."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
from sharded import fsdp2, needs_sharding_on_cpu
from support import Language, Scalar, Toy, fit, language_loss, pad, predictions, relative_error, sentences
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import AccumulationError, GradientAccumulation

BFLOAT16_ROUNDING = 2**-8  # half a unit in the last of 8 bits, and as much for the parameter that the gradient moves
ROWS = sentences(68)


class Whole(Scalar):
    """One parameter of a thousand elements, whose gradient is the mean of the rows. Keeps each gradient that is stepped."""

    def __init__(self, *by_rank: Any) -> None:
        super().__init__(by_rank=by_rank)
        self.w = nn.Parameter(torch.zeros(by_rank[0].shape[-1]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return (self.w * batch).sum() / 1.0

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        torch.save(self.w.grad, f"gradient{self.global_rank}.pt")


FOURS = [ROWS[i : i + 4] for i in range(0, 64, 4)]


def test_clipping_and_hooks_find_the_gradient_in_the_type_of_the_parameter() -> None:
    def sums_in_double(clip: float) -> Language:
        """The gradients of windows of four micro-batches, in single precision, added up in double and rounded once."""
        module = Language().float()
        stepper, parameters = module.configure_optimizers(), list(module.parameters())
        for start in range(0, 16, 4):
            sums, weight = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters], 0
            for batch in map(pad, FOURS[start : start + 4]):
                number = predictions(batch)
                gradients = torch.autograd.grad(language_loss(module.net(batch["input_ids"]), batch["labels"]), parameters)
                for total, gradient in zip(sums, gradients, strict=True):
                    total += number * gradient.double()
                weight += number
            for parameter, total in zip(parameters, sums, strict=True):
                parameter.grad = (total / weight).float()
            nn.utils.clip_grad_norm_(parameters, clip)
            stepper.step()
        return module

    module, policy = Language().float(), GradientAccumulation(4, accumulate_dtype=torch.float64, trim_padding=False)
    types, inside = set(), set()
    module.on_after_backward = lambda: inside.update(parameter.grad for parameter in module.parameters())
    module.on_before_optimizer_step = lambda _: types.update(parameter.grad.dtype for parameter in module.parameters())
    fit(module, list(map(pad, FOURS)), policy, gradient_clip_val=0.5)
    assert relative_error(module.parameters(), sums_in_double(0.5).parameters()) < 1e-7
    assert (types, inside) == ({torch.float32}, {None})


def numbers(micro_batches: int, seed: int = 1) -> Tensor:
    """Gradients in bfloat16, of one sign, that change little from micro-batch to micro-batch: so does what is rounded away."""
    generator = torch.Generator().manual_seed(seed)
    mean, change = 1 + torch.rand(1000, generator=generator), torch.rand(micro_batches, 1000, generator=generator)
    return (mean * (0.99 + 0.02 * change)).bfloat16()


@pytest.mark.parametrize("ranks", [1, 2])
def test_of_256_micro_batches_in_bfloat16_the_error_is_at_least_8_times_smaller(ranks: int) -> None:
    by_rank = [numbers(256, seed) for seed in range(ranks)]
    expected = torch.cat(by_rank).double().mean(0)
    errors = {}
    for dtype in (None, torch.float32):
        policy = GradientAccumulation(256, weight="equal", accumulate_dtype=dtype)
        module = Whole(*by_rank)
        fit(module, None, policy, ranks=ranks, precision="bf16-true")
        gradient = torch.load("gradient0.pt")
        assert gradient.dtype == torch.bfloat16
        errors[dtype] = relative_error([gradient], [expected]), relative_error([-module.w], [expected])
    assert errors[torch.float32][0] < BFLOAT16_ROUNDING / 2
    assert all(narrow > 8 * wide for narrow, wide in zip(errors[None], errors[torch.float32], strict=True))


@needs_sharding_on_cpu
def test_fully_shard_adds_up_by_itself_if_it_is_told_to() -> None:
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    class Sharded(Whole):
        def __init__(self, by_rank: Sequence[Tensor], types: MixedPrecisionPolicy) -> None:
            super().__init__(*by_rank)
            del self.w
            self.layer, self.types = nn.Linear(1000, 1, bias=False), types
            nn.init.zeros_(self.layer.weight)

        def configure_model(self) -> None:
            fully_shard(self.layer, mesh=self.device_mesh["data_parallel"], mp_policy=self.types)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.layer(batch).sum() / 1.0

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            pass

    by_rank = [numbers(128, seed) for seed in range(2)]

    def error(sync: str = "window", **types: torch.dtype) -> float:
        policy, module = GradientAccumulation(128, weight="equal", accumulate_dtype=torch.float32), MixedPrecisionPolicy(**types)
        run = fit(Sharded(by_rank, module), None, policy, strategy=fsdp2(sync=sync), devices=2, precision="bf16-true")
        return relative_error([-run.whole["layer.weight"][0]], [torch.cat(by_rank).double().mean(0)])

    with pytest.raises(Exception, match="reduce_dtype"):
        error()
    with pytest.raises(Exception, match="sync"):
        error("micro_batch", reduce_dtype=torch.float32)
    assert error(reduce_dtype=torch.float32) < BFLOAT16_ROUNDING


def test_sparse_gradients_that_only_a_backward_shows_are_refused() -> None:
    module = Toy(lambda net, batch: F.embedding(batch, net.weight, sparse=True).mean(), net=partial(nn.Embedding, 4, 2)).float()
    with pytest.raises(AccumulationError, match="accumulate_dtype"):
        fit(module, [torch.tensor([1, 2])] * 2, GradientAccumulation(2, accumulate_dtype=torch.float64))
