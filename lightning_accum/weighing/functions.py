"""Losses that are a function of a mean: the square root of a mean squared error, the logarithm of a mean.

For a loss ``f(m_i)``, where ``m_i`` is the mean over the ``n_i`` elements of micro-batch ``i``, the loss of the full batch is
``f(M)`` with ``M = sum_i n_i m_i / N``, and its gradient is ``f'(M) * sum_i n_i grad m_i / N``. The slope ``f'(M)`` is known when
the window ends. Until then the backward of each micro-batch skips the function: the gradient of the loss becomes the gradient of
the mean. So nothing is divided by the slope of a micro-batch, which may be 0 or infinite.

The function is read from the nodes between the loss and the mean. Nodes do not save constants that were added. Constants inside the
function are part of the mean; constants outside do not change the gradient, and their mean is added to the loss of the window.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch
from torch import Tensor

from lightning_accum.errors import UnreadableLossError
from lightning_accum.exact import exact, on_host
from lightning_accum.weighing import nodes
from lightning_accum.weighing.nodes import Node, kind_of
from lightning_accum.weighing.terms import Denominator

_Number: TypeAlias = "float | None"

# By kind of node: the function of torch, and the node's attributes that it also takes (Python numbers or None).
_FUNCTIONS: dict[str, tuple[Callable[..., Tensor], tuple[str, ...]]] = {
    "Pow": (torch.pow, ("_saved_exponent",)),
    "Clamp": (torch.clamp, ("_saved_min", "_saved_max")),
    "ClampMin": (torch.clamp_min, ("_saved_min",)),
    "ClampMax": (torch.clamp_max, ("_saved_max",)),
    **{
        name.title(): (getattr(torch, name), ())
        for name in ("sqrt", "rsqrt", "reciprocal", "exp", "expm1", "log", "log1p", "log2", "log10", "abs", "mul", "div")
    },
}
# Inverses of functions whose node saves the result, not the input.
_INVERSES: dict[str, Callable[[Tensor], Tensor]] = {
    "Sqrt": torch.square,
    "Rsqrt": lambda result: result.pow(-2),
    "Reciprocal": torch.reciprocal,
    "Exp": torch.log,
    "Expm1": torch.log1p,
}
_UNCHANGED = {*nodes.THROUGH, "_DDPSink"} - {"Expand", "MaskedFill", "NanToNum", "Neg", "Where"}


class FunctionOfMean(NamedTuple):
    """The function from a mean to a loss, without added constants.

    Attributes:
        steps: the operations, innermost first, each with its numbers.

    Example:
        >>> rmse = FunctionOfMean((("Sqrt", ()), ("Mul", (3.0,))))
        >>> rmse.at(4.0)
        (6.0, 0.75)
        >>> str(rmse)
        'mul(sqrt(mean), 3)'
    """

    steps: tuple[tuple[str, tuple[_Number, ...]], ...]

    def __call__(self, mean: Tensor) -> Tensor:
        """Compute it."""
        for kind, numbers in self.steps:
            mean = _FUNCTIONS[kind][0](mean, *numbers)
        return mean

    def at(self, mean: float) -> tuple[float, float]:
        """Its value and its slope, which is NaN if the mean is not finite."""
        operand = torch.tensor(mean, dtype=torch.float64, device="cpu", requires_grad=True)
        with torch.enable_grad():
            value = self(operand)
        (slope,) = torch.autograd.grad(value, operand)
        return value.item(), slope.item() if operand.isfinite() else torch.nan

    def __str__(self) -> str:
        words = "mean"
        for kind, numbers in self.steps:
            given = [words, *(str(number) if number is None else f"{number:g}" for number in numbers)]
            words = f"{_FUNCTIONS[kind][0].__name__}({', '.join(given)})"
        return words


class OfMean(NamedTuple):
    """A loss that is a function of a mean."""

    function: FunctionOfMean  # the function
    mean: Denominator  # the mean, on the host, or on the device of the loss, in double precision if supported
    constant: Denominator = 0.0  # the constant added to the function
    # the node of the mean, including linear operations above it, and the index of its output; None without the graph
    below: tuple[Node, int] | None = None

    def leave_out(self, loss: Tensor) -> None:
        """Make the next backward compute the gradients of the mean that ``loss`` is a function of.

        Example:
            >>> x = torch.tensor([3.0, 4.0], requires_grad=True)
            >>> loss = x.square().sum().sqrt()
            >>> function_of_mean(loss).leave_out(loss)
            >>> loss.backward()
            >>> x.grad
            tensor([6., 8.])
        """
        assert loss.grad_fn is not None
        assert self.below is not None
        of_loss: list[Tensor | None] = []

        def keep(gradients: tuple[Tensor | None, ...], place: int = loss.output_nr) -> None:
            of_loss[:] = [gradients[place]]

        def hand_on(gradients: tuple[Tensor | None, ...], place: int = self.below[1]) -> tuple[Tensor | None, ...]:
            (given,), old = of_loss, gradients[place]
            if given is None or old is None:
                return gradients
            return (*gradients[:place], given.to(old.dtype).reshape(old.shape), *gradients[place + 1 :])

        loss.grad_fn.register_prehook(keep)
        self.below[0].register_prehook(hand_on)


def function_of_mean(loss: Tensor) -> OfMean | None:
    """Find the function of a mean or a sum that a scalar loss is.

    Returns:
        The function; None if there is none, or an unknown one.

    Raises:
        UnreadableLossError: the graph has freed its saved tensors, as after a backward.

    Example:
        >>> x = torch.tensor([1.0, 7.0], requires_grad=True)
        >>> found = function_of_mean(3 * x.square().mean().sqrt() + 1)
        >>> str(found.function), found.function.at(25.0), found.mean, found.constant
        ('mul(sqrt(mean), 3)', (15.0, 0.3), 25.0, 1.0)
        >>> function_of_mean(x.sqrt().mean())  # nothing is done to this mean
    """
    node: Node = loss.grad_fn
    index, found = loss.output_nr, None
    steps: list[tuple[str, tuple[_Number, ...]]] = []
    adds_inside = False
    while (kind := kind_of(node)) not in nodes.CRITERIA:
        inputs = [node.next_functions[index]] if kind == "_DDPSink" else nodes.inputs_of(node)
        if len(inputs) != 1:
            break
        is_second = node.next_functions[0][0] is None
        if kind in ("Mul", "Div"):
            try:
                number = nodes.number_of(node._saved_self if is_second else node._saved_other)
            except RuntimeError:  # after a backward the graph has freed its saved tensors
                return None
            if number is None or (kind == "Div" and is_second):
                break
            steps.append((kind, (number,)))
        elif kind in _FUNCTIONS:
            numbers = tuple(getattr(node, name) for name in _FUNCTIONS[kind][1])
            if adds_inside or any(isinstance(number, Tensor) for number in numbers):
                return None
            steps.append((kind, numbers))
            found = (len(steps), inputs[0], node)
        elif kind in ("Add", "Sub", "Rsub"):
            steps.append(("Mul", (nodes.factor_in_sum(node, kind, int(is_second)),)))
            adds_inside = found is not None
        elif kind == "Neg":
            steps.append(("Mul", (-1.0,)))
        elif kind not in _UNCHANGED and not (kind in ("Mean", *nodes.SUMS) and getattr(node, "_saved_self_sym_sizes", None) == ()):
            break
        node, index = inputs[0]
    if found is None:
        return None
    length, below, first = found
    function = FunctionOfMean(tuple(step for step in reversed(steps[:length]) if step != ("Mul", (1.0,))))
    inverse = _INVERSES.get(kind_of(first))
    try:
        mean = exact(first._saved_self) if inverse is None else inverse(exact(first._saved_result))
    except RuntimeError as error:
        raise UnreadableLossError(f"{first.name()}, of which nothing is left") from error
    mean = mean.detach().reshape(())
    constant = (loss.detach().reshape(()).to(mean.dtype) - function(mean)).nan_to_num(0.0, 0.0, 0.0)
    return OfMean(function, on_host(mean), on_host(constant), below)
