"""Gradients summed in a wider type than the type of their parameters.

A sum of 256 gradients of one sign loses up to 9% in bfloat16, whose 8 bits round small addends away. Here each gradient is added to
a sum in a wider type as soon as backward has made it, and freed: Megatron-LM's ``main_grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from typing_extensions import override

from lightning_accum.errors import UsageError
from lightning_accum.exact import on_host
from lightning_accum.ranks import Ranks


def is_narrower(dtype: torch.dtype, wide: torch.dtype) -> bool:
    """Whether ``wide`` can represent all numbers of ``dtype``, and more."""
    return dtype != wide and torch.promote_types(dtype, wide) == wide


def as_number(factor: Tensor | None) -> float | Tensor:
    """The factor of gradients as they are added, without a device sync; None is 1."""
    return 1.0 if factor is None else on_host(factor.reshape(()))


def as_sparse(gradient: Tensor) -> Tensor:
    """A gradient as those of sparse embeddings are, by rows."""
    return (gradient if gradient.layout != torch.strided else gradient.to_sparse(1)).coalesce()


class GradientSums:
    """The gradients of a window, summed outside of ``parameter.grad``, each in the type of its parameter."""

    def __init__(self) -> None:
        self.by_parameter: dict[nn.Parameter, Tensor] = {}  # the sum of each parameter that has one

    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        """The type in which the gradients of a parameter are summed."""
        return parameter.dtype

    @torch.no_grad()
    def add(self, parameter: nn.Parameter, gradient: Tensor, factor: float | Tensor = 1.0) -> None:
        """Add ``factor`` times a gradient. The gradient must not be used afterwards."""
        total = self.by_parameter.get(parameter)
        if total is None:
            total = gradient.to(self.dtype_of(parameter))
            self.by_parameter[parameter] = total if isinstance(factor, float) and factor == 1 else total.mul_(factor)
        elif not isinstance(factor, Tensor):
            total.add_(gradient, alpha=factor)
        elif gradient.layout == torch.strided:
            total.addcmul_(gradient, factor)
        else:
            total.add_(gradient * factor)

    def gradients(self) -> list[Tensor]:
        """All sums, to be scaled in place."""
        return list(self.by_parameter.values())

    @torch.no_grad()
    def reduce(self, ranks: Ranks, parameters: Sequence[nn.Parameter]) -> None:
        """Average the sums over the ranks, in their own type. Called on all ranks, with the same parameters.

        A parameter that only other ranks have used gets their mean; a parameter that no rank has used gets none.
        """
        if not parameters:
            return
        sums, dense, sparse = self.by_parameter, 1.0, 2.0
        own = [0.0 if p not in sums else sparse if sums[p].layout != torch.strided else dense for p in parameters]
        kinds = dict(zip(parameters, ranks.largest(*own), strict=True))
        used = [parameter for parameter, kind in kinds.items() if kind]
        for parameter in used:
            if parameter not in sums:
                sums[parameter] = torch.zeros_like(parameter, dtype=self.dtype_of(parameter))
            if kinds[parameter] == sparse:
                sums[parameter] = as_sparse(sums[parameter]) / ranks.size
                dist.all_reduce(sums[parameter], group=ranks.group)
        ranks.average([sums[parameter] for parameter in used if kinds[parameter] == dense])

    def clear(self) -> None:
        """Forget the sums; a window has ended."""
        self.by_parameter = {}


class MainGradients(GradientSums):
    """The sums of the gradients of a window, each in the wider of its parameter's type and ``dtype``.

    Inside a window ``parameter.grad`` is None, except during the backward, for one parameter at a time. The weight of a micro-batch
    is multiplied in as its gradients are added, so that it is not rounded to the narrow type. The ``parameters`` are asked for at
    the beginning of every window: frozen ones may be among them, and be trained later.
    """

    def __init__(self, dtype: torch.dtype, parameters: Callable[[], Iterable[nn.Parameter]]) -> None:
        super().__init__()
        self.dtype = dtype
        self._parameters = parameters
        self._handles: dict[nn.Parameter, RemovableHandle] = {}
        self._unwatched: set[nn.Parameter] | None = None
        """Parameters without a hook, since torch allows none on a frozen parameter. None between windows."""
        self._is_adding = False
        self._factor: float | Tensor = 1.0

    @override
    def dtype_of(self, parameter: nn.Parameter) -> torch.dtype:
        return torch.promote_types(parameter.dtype, self.dtype)

    def begin_backward(self, is_adding: bool = True) -> None:
        """Begin a backward: its gradients are added to the sums, or stay in ``.grad``."""
        self._is_adding, self._factor = is_adding, 1.0
        if self._unwatched is None:
            self._unwatched = set(self._parameters()) - self._handles.keys()
        for parameter in [parameter for parameter in self._unwatched if parameter.requires_grad]:
            self._handles[parameter] = parameter.register_post_accumulate_grad_hook(self._on_grad)  # type: ignore[no-untyped-call]
            self._unwatched.discard(parameter)

    def weigh(self, factor: Tensor | None) -> None:
        """Multiply the gradients of the next backward by one number; None is 1."""
        self._factor = as_number(factor)

    @torch.no_grad()  # else a backward with create_graph=True would add the sum to its graph
    def _on_grad(self, parameter: Tensor) -> None:
        if self._is_adding and parameter.grad is not None:
            assert isinstance(parameter, nn.Parameter)
            self._take_grad(parameter, self._factor)

    def _take_grad(self, parameter: nn.Parameter, factor: float | Tensor) -> None:
        """Add the gradient of a parameter to its sum, and free it."""
        assert parameter.grad is not None
        gradient, parameter.grad = parameter.grad.detach(), None
        if gradient.layout != torch.strided:
            raise UsageError(
                f"accumulate_dtype={self.dtype} sums dense gradients, but a parameter of shape {tuple(parameter.shape)} has a "
                f"gradient of layout {gradient.layout}. Leave accumulate_dtype out, or make the gradients dense."
            )
        self.add(parameter, gradient, factor)

    def accumulated(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        """The sums of these parameters, for the caller to copy before a backward."""
        return {own: self.by_parameter[own] for own in parameters if own in self.by_parameter}

    def restore_accumulated(self, parameters: Iterable[nn.Parameter], kept: Mapping[nn.Parameter, Tensor]) -> None:
        """Restore the sums from ``kept``, copies of the result of :meth:`accumulated`. They can be restored more than once."""
        self.by_parameter = {own: total.clone() for own, total in kept.items()}

    @override
    def gradients(self) -> list[Tensor]:
        for parameter in self._parameters():
            if parameter.grad is not None:  # a hook has put it there, not a backward
                self._take_grad(parameter, 1.0)
        return super().gradients()

    @override
    def reduce(self, ranks: Ranks, parameters: Sequence[nn.Parameter]) -> None:
        self.gradients()
        super().reduce(ranks, parameters)

    @torch.no_grad()
    def write_to_grad(self) -> None:
        """Give each parameter its sum as its gradient, in its own type. Each sum is freed at once, so that memory does not grow."""
        for parameter in list(self.by_parameter):
            parameter.grad = self.by_parameter.pop(parameter).to(parameter.dtype)

    @override
    def clear(self) -> None:
        super().clear()
        self._unwatched = None

    def close(self) -> None:
        """Remove the hooks from the parameters."""
        for handle in self._handles.values():
            handle.remove()
        self._handles.clear()
        self.clear()


def main_gradients(dtype: torch.dtype, parameters: Callable[[], list[nn.Parameter]]) -> MainGradients | None:
    """Sums of gradients in ``dtype``; None if no parameter has a narrower type."""
    is_wider = any(is_narrower(parameter.dtype, dtype) for parameter in parameters())
    return MainGradients(dtype, parameters) if is_wider else None


def sparse_layers(module: nn.Module) -> dict[str, nn.Module]:
    """Torch's layers whose gradients are sparse, by name."""
    return {n: own for n, own in module.named_modules() if isinstance(own, (nn.Embedding, nn.EmbeddingBag)) and own.sparse}
