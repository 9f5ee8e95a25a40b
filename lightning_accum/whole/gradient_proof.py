"""What the outputs of a row-wise submodule do not show: whether the gradients of rows add up, and what else the step uses of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any
from weakref import ReferenceType, ref

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from lightning_accum.dispatch import with_tensors
from lightning_accum.errors import RowWiseError
from lightning_accum.exact import exact_dtype, rounding_of_gradients
from lightning_accum.whole.call_state import saving_nothing
from lightning_accum.whole.layers import INSTEAD, Layer, coarsest_eps
from lightning_accum.whole.trees import leaves

_LARGE = 100.0
"""Of what size the gradients of the outputs are, so that what clips gradients does."""


def check_gradients(layer: Layer, run: Callable[[Sequence[int]], Any], rows: Sequence[int], dims: Sequence[int | None]) -> None:
    """Check that the backward of a call is as independent of other rows as its forward.

    Args:
        layer: that is called.
        run: runs it on some rows.
        rows: of different values, and one of them twice, which what counts how often an entry occurs sees.
        dims: the dimension of each output that has the rows.

    Raises:
        RowWiseError: the gradients of rows do not add up to that of all.
    """
    trained = [parameter for parameter in layer.module.parameters() if parameter.requires_grad]
    sums: list[Tensor] = []
    for some in (rows, *([row] for row in rows)):
        try:
            with torch.enable_grad(), saving_nothing():
                found = leaves(run(some))
                roots = [leaf for leaf, dim in zip(found, dims, strict=True) if dim is not None and _has_graph(leaf)]
                if not trained or not roots:
                    return
                sums.append(_sums(roots, trained))
        except RuntimeError:  # as of a reentrant checkpoint, which no torch.autograd.grad goes through; or out of memory
            return
    whole, parts = sums[0], torch.stack(sums[1:]).sum(0)
    # of sums with signs, which rounding may change more; what is looked for changes them by their size
    if bool((whole[0] - parts[0]).norm() > 4 * rounding_of_gradients(max(map(coarsest_eps, trained))) * whole[1].norm()):
        raise RowWiseError(
            f"row_wise={layer.name!r}: the gradients of {layer.name!r} for some rows together are not the sum of those for each."
            " Its outputs are, so something in its backward depends on the other rows: a hook that clips or normalises gradients,"
            f" scale_grad_by_freq, a backward of its own. {INSTEAD}"
        )


def _has_graph(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and leaf.grad_fn is not None


def _sums(roots: Sequence[Tensor], trained: Sequence[Tensor]) -> Tensor:
    """Of the gradient of each parameter a sum of its elements with fixed factors, and its norm."""
    seeds = [_LARGE * (root.detach() * 3).sin() for root in roots]  # the same for a row, wherever it is
    found = torch.autograd.grad(roots, trained, seeds, allow_unused=True)
    zero = torch.zeros(2, dtype=torch.float64)
    return torch.stack([zero if gradient is None else _sum_and_norm(gradient).cpu().double() for gradient in found], 1)


def _may_be_watched(tensor: Tensor) -> bool:
    return tensor.is_floating_point() and not tensor.is_inference() and (tensor.requires_grad or tensor.is_leaf)


def _sum_and_norm(gradient: Tensor) -> Tensor:
    values = (gradient.to_dense() if gradient.is_sparse else gradient).flatten()
    values = torch.view_as_real(values.resolve_conj()).flatten() if values.is_complex() else values
    factors = torch.arange(len(values), device=values.device, dtype=exact_dtype(values.device)).cos()
    return torch.stack(((values * factors).sum(), values.to(factors.dtype).norm()))


class LeftBehind(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of its __init_subclass__
    """What a call computes in here and leaves in an attribute or a list: it is of one micro-batch, which the loss must not see.

    Args:
        layer: that is called.
        is_inside: a call of it, or of another such submodule, is running, or running again.
    """

    def __init__(self, layer: Layer, is_inside: Callable[[], bool]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._layer, self._is_inside = layer, is_inside
        self._made: list[ReferenceType[Tensor]] = []
        self._watched: list[tuple[Tensor, Any, bool]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*with_tensors(func, args), **(kwargs or {}))
        self._made += [ref(leaf) for leaf in tree_leaves(output) if isinstance(leaf, Tensor)]
        return output

    def watch(self) -> None:
        """See whether a backward reaches what is still there, now that the call is done."""
        left = [tensor for made in self._made if (tensor := made()) is not None and _may_be_watched(tensor)]
        self._made.clear()
        for tensor in left:
            is_cut_off = not tensor.requires_grad
            handle = tensor.requires_grad_().register_hook(partial(self._note, ref(tensor)))  # type: ignore[no-untyped-call]
            self._watched.append((tensor, handle, is_cut_off))

    def _note(self, tensor: ReferenceType[Tensor], gradient: Tensor) -> None:
        if (used := tensor()) is not None and not self._is_inside():
            raise RowWiseError(
                f"row_wise={self._layer.name!r}: the loss depends on {self._place_of(used)}, which is that of the last"
                f" micro-batch alone. Have {self._layer.name!r} return what the loss needs, with one entry a row. {INSTEAD}"
            )

    def forget(self) -> None:
        """Leave everything as it was."""
        for tensor, handle, is_cut_off in self._watched:
            handle.remove()
            if is_cut_off:
                tensor.requires_grad_(False).grad = None
        self._watched.clear()

    def _place_of(self, tensor: Tensor) -> str:
        for path, inner in self._layer.module.named_modules():
            for name, value in vars(inner).items():
                if not isinstance(value, nn.Module) and any(leaf is tensor for leaf in tree_leaves(value)):
                    return f"{'.'.join(filter(None, (self._layer.name, path, name)))}, an attribute that is set in its forward"
        return f"a tensor that a forward hook in {self._layer.name!r} keeps"
