"""``row_wise="auto"``: which submodules hold most of what is saved for the backward, and treat rows independently."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accum.whole.layers import Layer, RowWiseError
from lightning_accum.whole.row_proof import RowProof, number_of_rows, read_arguments

_LEAST = 1 / 50
"""Of all that is saved: what holds less is not worth a second forward."""


class _Probe:
    """What each submodule saves for its backward, and the arguments of its first call."""

    def __init__(self, module: nn.Module) -> None:
        self.saved: dict[nn.Module, int] = {}
        self.arguments: dict[nn.Module, tuple[tuple[Any, ...], dict[str, Any]]] = {}
        self.total = 0
        self._module = module
        self._running: list[nn.Module] = []
        self._own = {p.untyped_storage().data_ptr() for p in module.parameters()}

    def run(self, step: Callable[[], Any]) -> None:
        """Run a step, and look."""
        with ExitStack() as stack:
            for inner in self._module.modules():
                for handle in (
                    inner.register_forward_pre_hook(self._enter, with_kwargs=True),
                    inner.register_forward_hook(self._leave, always_call=True),
                ):
                    stack.callback(handle.remove)
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(self._count, lambda tensor: tensor))
            step()

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        self._running.append(module)
        if torch.is_grad_enabled():
            self.arguments.setdefault(module, (args, kwargs))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        self._running.pop()

    def _count(self, tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in self._own:
            size = tensor.numel() * tensor.element_size()
            self.total += size
            for module in set(self._running):
                self.saved[module] = self.saved.get(module, 0) + size
        return tensor


def choose_names(module: nn.Module, step: Callable[[], Any], rows: int | None) -> list[str]:
    """The largest submodules that hold most of the activations of a step and treat rows independently.

    Args:
        module: that is trained.
        step: runs it on a few rows.
        rows: how many.

    Raises:
        RowWiseError: those that treat rows independently hold less than half of them.

    Example:
        >>> model = nn.Sequential(nn.Sequential(nn.Linear(4, 64), nn.Tanh(), nn.Linear(64, 8)), nn.BatchNorm1d(8))
        >>> choose_names(model, lambda: model(torch.randn(4, 4)).std(), 4)
        ['0']
    """
    probe = _Probe(module)
    probe.run(step)
    chosen: list[tuple[str, nn.Module]] = []
    proof = RowProof()

    def look_into(outer: nn.Module, prefix: str) -> None:
        for name, inner in outer.named_children():
            path = f"{prefix}{name}"
            if any(inner is other for _, other in chosen):
                continue
            is_large = probe.saved.get(inner, 0) >= _LEAST * probe.total
            if is_large and inner in probe.arguments and _is_row_wise(Layer(path, inner, inner), probe.arguments[inner]):
                chosen.append((path, inner))
            else:
                look_into(inner, f"{path}.")

    def _is_row_wise(layer: Layer, arguments: Any) -> bool:
        try:
            tree = read_arguments(layer, arguments)
            number = number_of_rows(layer, tree, rows)
            dims = proof(layer, tree, number).dims
        except Exception:  # of a submodule that cannot run on other rows, whatever it is
            return False
        return number > 1 and any(dim is not None for dim in dims)

    look_into(module, "")
    held = sum(probe.saved[inner] for _, inner in chosen)
    if held < 0.5 * probe.total or not chosen:
        raise RowWiseError(
            f'row_wise="auto": the submodules of {type(module).__name__} that treat rows independently hold'
            f" {held / max(probe.total, 1):.0%} of what is saved for the backward ({[name for name, _ in chosen]}). Name submodules"
            ' that hold more of it, or use micro_batch="offload", which is exact for any module.'
        )
    return [name for name, _ in chosen]
