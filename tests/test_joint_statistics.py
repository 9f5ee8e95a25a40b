"""A batch normalised in parts equals torch's own batch_norm of the whole, forward and backward."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from support import relative_error
from torch import Tensor
from torch.nn import functional as F

from lightning_accum.batch_norm.normalisation import NormalisedTogether, batch_norm_of_parts

CUTS = [[13], [1, 12], [1, 4, 6, 2], [1] * 13, [5, 0, 8]]


def inputs(shape: tuple[int, ...], dtype: torch.dtype, is_affine: bool) -> tuple[list[Tensor], list[Tensor | None], Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = (torch.randn(shape, dtype=torch.float64, generator=generator) * 3 + 20).to(dtype)
    channels = shape[1]
    weight, bias, mean = (torch.randn(channels, dtype=torch.float64, generator=generator).to(dtype) for _ in range(3))
    var = torch.rand(channels, dtype=torch.float64, generator=generator).to(dtype)
    gradient = torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype)
    affine: list[Any] = [weight.requires_grad_(), bias.requires_grad_()] if is_affine else [None, None]
    return [x.requires_grad_(), mean, var], affine, gradient


def both(shape: tuple[int, ...], cut: list[int], dtype: torch.dtype, is_affine: bool = True, **kwargs: Any) -> list[float]:
    """The relative errors of output, gradients and running statistics."""
    found: list[list[Tensor]] = []
    for is_whole in (True, False):
        (x, mean, var), (weight, bias), gradient = inputs(shape, dtype, is_affine)
        if is_whole:
            output = F.batch_norm(x, mean, var, weight, bias, True, **kwargs)
        else:
            output = torch.cat(batch_norm_of_parts(x.split(cut), mean, var, weight, bias, **kwargs))
        output.backward(gradient)
        gradients = [tensor.grad for tensor in (x, weight, bias) if tensor is not None]
        found.append([output, mean, var, *gradients])
    return [relative_error([a], [b]) for a, b in zip(found[1], found[0], strict=True)]


@pytest.mark.parametrize("cut", CUTS, ids=str)
@pytest.mark.parametrize("is_affine", [True, False])
@pytest.mark.parametrize("shape", [(13, 5), (13, 5, 4), (13, 5, 3, 2), (13, 5, 2, 3, 2)], ids=str)
def test_parts_equal_the_whole(shape: tuple[int, ...], is_affine: bool, cut: list[int]) -> None:
    assert max(both(shape, cut, torch.float64, is_affine)) < 1e-12
    assert max(both(shape, cut, torch.float64, is_affine, momentum=0.7, eps=0.1)) < 1e-12


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 2e-3)])
def test_lower_precision_is_as_good_as_the_whole_in_it(dtype: torch.dtype, tolerance: float) -> None:
    assert max(both((64, 4, 3, 3), [1, 20, 43], dtype)) < tolerance  # a few units in the last place: 6e-8, 4e-3 and 5e-4


def test_memory_formats_may_differ() -> None:
    (x, _, _), (weight, bias), gradient = inputs((12, 4, 3, 3), torch.float64, True)
    whole = F.batch_norm(x, None, None, weight, bias, True)
    expected = torch.autograd.grad(whole, [x, weight, bias], gradient)
    parts = list(x.split([5, 7]))
    parts[1] = parts[1].contiguous(memory_format=torch.channels_last)
    found = torch.autograd.grad(torch.cat(batch_norm_of_parts(parts, None, None, weight, bias)), [x, weight, bias], gradient)
    assert relative_error(found, expected) < 1e-12


def test_lower_precision_beside_weights_in_full() -> None:
    (x, mean, var), (weight, bias), gradient = inputs((64, 4, 3), torch.float32, True)
    low = x.detach().bfloat16().requires_grad_()
    whole = F.batch_norm(low, mean.clone(), var.clone(), weight, bias, True)
    expected = torch.autograd.grad(whole, [low, weight, bias], gradient.bfloat16())
    parts = torch.cat(batch_norm_of_parts(low.split(20), mean, var, weight, bias))
    found = torch.autograd.grad(parts, [low, weight, bias], gradient.bfloat16())
    assert parts.dtype == torch.bfloat16
    assert relative_error([parts], [whole]) < 1e-2
    assert relative_error(found, expected) < 1e-2


def test_far_from_zero_the_variance_is_as_good_as_the_whole() -> None:
    x = torch.randn(64, 3, generator=torch.Generator().manual_seed(1)) + 1e4  # a sum of squares would have no digit left
    whole, parts = F.batch_norm(x, None, None, training=True), torch.cat(batch_norm_of_parts(x.split(5)))
    exact = F.batch_norm(x.double(), None, None, training=True)
    assert relative_error([parts], [exact]) < 3 * relative_error([whole], [exact]) < 1e-2


@pytest.mark.parametrize("needs", [(False, True, True), (True, False, False), (True, True, False), (False, False, True)])
def test_only_what_requires_a_gradient_gets_one(needs: tuple[bool, bool, bool]) -> None:
    (x, _, _), (weight, bias), gradient = inputs((9, 3), torch.float64, True)
    leaves = [leaf.detach().requires_grad_(need) for leaf, need in zip((x, weight, bias), needs, strict=True)]
    wanted = [leaf for leaf in leaves if leaf.requires_grad]
    x, weight, bias = leaves
    expected = torch.autograd.grad(F.batch_norm(x, None, None, weight, bias, True), wanted, gradient)
    found = torch.autograd.grad(torch.cat(batch_norm_of_parts(x.split(4), None, None, weight, bias)), wanted, gradient)
    assert relative_error(found, expected) < 1e-12


def test_a_part_without_a_loss_gets_its_share_of_the_others() -> None:
    (x, _, _), (weight, bias), gradient = inputs((9, 3), torch.float64, True)
    parts = batch_norm_of_parts(x.split([3, 4, 2]), None, None, weight, bias)
    found = torch.autograd.grad(torch.cat(parts[:2]), x, gradient[:7])
    expected = torch.autograd.grad(F.batch_norm(x, None, None, weight, bias, True)[:7], x, gradient[:7])
    assert relative_error(found, expected) < 1e-12
    assert found[0][7:].abs().sum() > 0


def test_without_a_graph_nothing_is_saved() -> None:
    (x, _, _), (weight, bias), _ = inputs((9, 3), torch.float64, True)
    with torch.no_grad():
        parts = batch_norm_of_parts(x.split(2), None, None, weight, bias)
    assert not any(part.requires_grad for part in parts)
    assert relative_error([torch.cat(parts)], [F.batch_norm(x, None, None, weight, bias, True)]) < 1e-12


def test_one_value_for_a_channel_is_refused_as_by_torch() -> None:
    with pytest.raises(ValueError, match="Expected more than 1 value per channel when training, got 1"):
        batch_norm_of_parts([torch.zeros(1, 2)])


def test_change_in_place_is_an_error_as_in_torch() -> None:
    x = torch.randn(6, 2, requires_grad=True)
    hidden = [part * 2 for part in x.split(3)]
    output = torch.cat(batch_norm_of_parts(hidden))
    hidden[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_a_graph_that_is_kept_can_run_again() -> None:
    x = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    output = torch.cat(batch_norm_of_parts(x.split(4))).pow(3).sum()
    first = torch.autograd.grad(output, x, retain_graph=True)
    assert torch.equal(torch.autograd.grad(output, x)[0], first[0])
    with pytest.raises(RuntimeError, match="second time"):
        torch.autograd.grad(output, x)


def test_a_backward_before_all_parts_have_run_is_refused() -> None:
    call = NormalisedTogether(1, "the layer 'norm'")
    x = torch.randn(4, 2, requires_grad=True)
    call.add(0, x)
    call.join(None, None, None, 0.1, 1e-5)
    with pytest.raises(RuntimeError, match="a backward of its own through the layer 'norm'"):
        call.normalise(0, None, None).sum().backward()


def test_hooks_for_saved_tensors_see_what_is_kept() -> None:
    packed: list[int] = []
    x = torch.randn(8, 2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t.numel()) or t.clone(), lambda t: t):
        output = torch.cat(batch_norm_of_parts(x.split(4)))
    assert packed == [8, 8]  # each part once
    output.pow(3).sum().backward()
