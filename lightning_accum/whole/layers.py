"""A submodule that runs row-wise, and what its outputs have to be for that."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accum.errors import RowWiseError
from lightning_accum.exact import exact, rounding

INSTEAD = 'Have a submodule without it run row-wise, or use micro_batch="offload", which is exact for any module.'


@dataclass
class Layer:
    """A submodule that runs in micro-batches.

    Attributes:
        name: in the module.
        module: the submodule.
        run: what its calls ran before they were replaced, hooks included.
        is_sharded: ranks wait for each other in each of its forwards and backwards, and its parameters are others in between.
        draws_outside_torch: it was seen to use random numbers of Python or numpy.
    """

    name: str
    module: nn.Module
    run: Callable[..., Any]
    is_sharded: bool = False
    draws_outside_torch: bool = False

    @cached_property
    def argument_names(self) -> list[str]:
        """The names of its positional arguments."""
        return list(inspect.signature(self.module.forward).parameters)


def check_others(layer: Layer, found: list[Any], expected: list[Any]) -> None:
    """Raise where what is no tensor in the outputs for some rows is not what it is for others."""
    pairs: Iterable[tuple[Any, Any]] = zip(found, expected, strict=True)
    if len(found) != len(expected):
        pairs = [(len(found), len(expected))]
    differing = next(((a, b) for a, b in pairs if not _are_equal(a, b)), None)
    if differing is not None:
        raise RowWiseError(
            f"row_wise={layer.name!r}: {layer.name!r} returns {differing[0]!r} for some rows and {differing[1]!r} for others, which"
            " cannot be joined: have it return tensors, with one entry a row."
        )


def _are_equal(a: Any, b: Any) -> bool:
    try:
        return a is b or bool(a == b)
    except Exception:  # arrays are neither true nor false
        return False


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal but for rounding."""
    if found.shape != expected.shape:
        return False
    return all(map(bool, differences(found, expected)))


def differences(found: Tensor, expected: Tensor | None) -> list[Tensor]:
    """Whether they are equal but for rounding, on their device; empty where they are equal."""
    found = found.detach()
    if expected is None or (found.device.type == "cpu" and torch.equal(found, expected)):
        return []
    if found.is_complex():
        found, expected = torch.view_as_real(found.resolve_conj()), torch.view_as_real(expected.resolve_conj())
    if not found.is_floating_point():
        return [(found == expected).all()]
    tolerance = rounding(coarsest_eps(expected))
    found, expected = exact(found), exact(expected)
    difference = (found - expected).nan_to_num(0.0, 0.0, 0.0).norm()
    is_near = difference <= tolerance * expected.nan_to_num(0.0, 0.0, 0.0).norm()
    return [is_near & (found.isfinite() == expected.isfinite()).all()]


def coarsest_eps(tensor: Tensor) -> float:
    """Of the types that a tensor like this one is computed in."""
    kind = tensor.device.type
    dtypes = [tensor.dtype, *([torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else [])]
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    if tensor.is_cuda and tensor.dtype == torch.float32:
        eps = max(eps, 2**-10)  # TF32
    return eps


def sharing_memory(outputs: list[Any], arguments: list[Any]) -> list[int]:
    """The places of outputs that share memory with another output, or with an argument."""
    taken = [_storage(leaf) for leaf in arguments]
    stored = [_storage(leaf) for leaf in outputs]
    return [place for place, own in enumerate(stored) if own and (own in taken or stored.count(own) > 1)]


def _storage(leaf: Any) -> int:
    return leaf.untyped_storage().data_ptr() if isinstance(leaf, Tensor) and leaf.layout is torch.strided else 0
