"""``row_wise="auto"``: which submodules hold most of what is saved for the backward, and treat rows independently."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accum.errors import RowWiseError
from lightning_accum.whole.layers import Layer
from lightning_accum.whole.row_proof import RowProof, number_of_rows, read_arguments

_LEAST = 1 / 50
"""Of all that is saved: what holds less is not worth a second forward."""


def _look(module: nn.Module, step: Callable[[], Any]) -> tuple[dict[nn.Module, int], dict[nn.Module, Any]]:
    """Run a step. Returns how many bytes each module saves for its backward, and the arguments of its first call."""
    saved: dict[nn.Module, int] = {module: 0}
    arguments: dict[nn.Module, Any] = {}
    running: list[nn.Module] = []
    own = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}

    def enter(inner: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        running.append(inner)
        if torch.is_grad_enabled():
            arguments.setdefault(inner, (args, kwargs))

    def leave(inner: nn.Module, args: Any, output: Any) -> None:
        running.pop()

    def count(tensor: Tensor) -> Tensor:
        if tensor.untyped_storage().data_ptr() not in own:
            for inner in {module, *running}:
                saved[inner] = saved.get(inner, 0) + tensor.numel() * tensor.element_size()
        return tensor

    with ExitStack() as stack:
        for inner in module.modules():
            stack.callback(inner.register_forward_pre_hook(enter, with_kwargs=True).remove)
            stack.callback(inner.register_forward_hook(leave, always_call=True).remove)
        stack.enter_context(torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor))
        step()
    return saved, arguments


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
    saved, arguments = _look(module, step)
    total = saved[module]
    chosen: list[tuple[str, nn.Module]] = []
    proof = RowProof()

    def look_into(outer: nn.Module, prefix: str) -> None:
        for name, inner in outer.named_children():
            path = f"{prefix}{name}"
            if any(inner is other for _, other in chosen):
                continue
            is_large = saved.get(inner, 0) >= _LEAST * total
            if is_large and inner in arguments and _is_row_wise(Layer(path, inner, inner)):
                chosen.append((path, inner))
            else:
                look_into(inner, f"{path}.")

    def _is_row_wise(layer: Layer) -> bool:
        try:
            tree = read_arguments(layer, arguments[layer.module])
            number = number_of_rows(layer, tree, rows)
            dims = proof(layer, tree, number).dims
        except Exception:  # of a submodule that cannot run on other rows, whatever it is
            return False
        return number > 1 and any(dim is not None for dim in dims)

    look_into(module, "")
    held = sum(saved[inner] for _, inner in chosen)
    if held < 0.5 * total or not chosen:
        raise RowWiseError(
            f'row_wise="auto": the submodules of {type(module).__name__} that treat rows independently hold'
            f" {held / max(total, 1):.0%} of what is saved for the backward ({[name for name, _ in chosen]}). Name submodules"
            ' that hold more of it, or use micro_batch="offload", which is exact for any module.'
        )
    return [name for name, _ in chosen]
