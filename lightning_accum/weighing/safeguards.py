"""Safeguards against losses without weight, and warnings of layers that no weight can help."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn
from torch.nn.functional import embedding

from lightning_accum.exact import is_on_host
from lightning_accum.user_warnings import listed
from lightning_accum.weighing.nodes import inputs_of, kind_of, nodes_below
from lightning_accum.weighing.terms import Term


def guard_against_zero(terms: Iterable[Term]) -> None:
    """Prevent NaN gradients from an empty masked mean, 0 / 0, in a loss with these terms.

    Its backward computes ``gradient / 0``, which is NaN even for the gradient 0 of a micro-batch without weight, and the backward
    of its product with a parameter computes ``0 * NaN``. A hook on the division or product replaces NaN by zeros. Built-in criteria
    need none: their gradients are zeros.
    """
    for division in (division for term in terms for division in term.divisions):
        if len(inputs_of(division)) > 1:
            division.register_hook(_zero_where_zero_arrives)
        denominator = division._saved_other if kind_of(division) == "Div" else None
        if not isinstance(denominator, Tensor):
            continue
        if is_on_host(denominator) and bool((denominator != 0).all()):
            continue  # the comparison is free on the host, but would wait for a device

        def zero_where_empty(
            gradients: tuple[Tensor | None, ...], _: tuple[Tensor | None, ...], denominator: Tensor = denominator
        ) -> tuple[Tensor | None, ...]:
            return tuple(g if g is None else torch.where(denominator == 0, torch.zeros_like(g), g) for g in gradients)

        division.register_hook(zero_where_empty)


def _zero_where_zero_arrives(gradients: tuple[Tensor | None, ...], arrived: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
    (own,) = arrived
    assert own is not None
    return tuple(g if g is None or g.numel() != own.numel() else g.masked_fill(own.reshape(g.shape) == 0, 0.0) for g in gradients)


@contextmanager
def gradients_of_zero(loss: Tensor, leaves_none: bool = False) -> Iterator[None]:
    """Inside, a backward of ``loss`` runs as usual, but adds only zeros to the gradients.

    For a loss without weight, which may be NaN: NaN * 0 is NaN. The backward itself runs, including its collectives.

    Args:
        loss: with its graph.
        leaves_none: leave ``.grad`` None where it was None: for zeros an optimizer would apply momentum and weight decay. A sparse
            gradient becomes zeros, since DistributedDataParallel requires one.
    """

    def left(gradients: tuple[Tensor | None, ...]) -> tuple[Tensor | None, ...]:
        return tuple(None if g is None or (leaves_none and g.layout == torch.strided) else torch.zeros_like(g) for g in gradients)

    with ExitStack() as stack:
        for node in () if loss.grad_fn is None else nodes_below(loss.grad_fn):
            if node.name().endswith("AccumulateGrad"):
                stack.callback(node.register_prehook(left).remove)
        yield


def zero_loss_of(parameters: Sequence[Tensor], sparse: Collection[Tensor] = frozenset()) -> Tensor:
    """A loss of 0 whose backward reaches each of ``parameters``, whatever their values, with a gradient of zeros.

    Args:
        parameters: the parameters to reach.
        sparse: the parameters whose gradients are sparse.

    Example:
        >>> parameters = torch.nn.Parameter(torch.full((2,), torch.nan)), torch.nn.Parameter(torch.tensor(1j))
        >>> zero_loss_of(parameters).backward()
        >>> [parameter.grad for parameter in parameters]
        [tensor([0., 0.]), tensor(0.+0.j)]
    """
    device = parameters[0].device
    nothing = torch.zeros(0, dtype=torch.long, device=device)
    none_of = [embedding(nothing.to(p.device), p, sparse=True) if p in sparse else p.reshape(-1)[:0] for p in parameters]
    return torch.stack([values.sum().real.to(device) for values in none_of]).sum()


def batch_norm_layers(module: nn.Module) -> list[str]:
    """The names of layers that normalise by batch statistics."""
    return [name for name, layer in module.named_modules() if isinstance(layer, nn.modules.batchnorm._BatchNorm) and layer.training]


def warn_of_batch_norm(module: nn.Module, is_split: bool, is_window_long: bool, warn: Callable[[str], None]) -> None:
    """Warn of BatchNorm layers, which normalise by the statistics of a micro-batch, not of the window.

    Args:
        module: the module in training.
        is_split: loader batches are split into micro-batches.
        is_window_long: a window may have several loader batches.
        warn: gives a warning once.
    """
    if not (is_window_long or is_split) or not (layers := batch_norm_layers(module)):
        return
    mend = 'GradientAccumulation(micro_batch="offload") runs a loader batch whole.'
    if is_window_long:
        mend = f"Have the loader yield batches as large as the window: {mend}"
    warn(
        f"BatchNorm ({listed(layers)}) normalises each micro-batch by its own statistics, and updates its running statistics "
        f"in each, so a window differs from its full batch. {mend}"
    )


def freeze_batch_norm(module: nn.Module) -> None:
    """Have BatchNorm layers normalise by their running statistics, or by 0 and 1 if they have none."""
    for layer in module.modules():
        if isinstance(layer, nn.modules.batchnorm._BatchNorm):
            layer.training = False
            if layer.running_mean is None or layer.running_var is None:  # it has no running statistics
                device = next((parameter.device for parameter in module.parameters()), torch.device("cpu"))
                layer.running_mean = torch.zeros(layer.num_features, device=device)
                layer.running_var = torch.ones_like(layer.running_mean)


def warn_of_hooks(module: nn.Module, warn: Callable[[str], None], is_checked: bool = True) -> None:
    """Warn of parameters whose hooks see the gradients of micro-batches.

    Args:
        module: the module in training.
        warn: takes the warning.
        is_checked: the check runs hooks of tensors (``register_hook``), and finds the relevant ones.
    """
    hooked = [
        name
        for name, parameter in module.named_parameters()
        if getattr(parameter, "_post_accumulate_grad_hooks", None) or (parameter._backward_hooks and not is_checked)
    ]
    if hooked:
        warn(
            f"{listed(hooked)}: a hook of this parameter runs in every micro-batch, on gradients that are not of the full batch. "
            "Use on_before_optimizer_step instead, which sees the full batch's gradients once a window."
        )
