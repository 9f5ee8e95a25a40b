"""Normalisation of a batch that comes in several parts: what :func:`torch.nn.functional.batch_norm` makes of the whole.

The statistics of the parts are put together to those of the batch (Chan, Golub and LeVeque 1979, as over ranks in SyncBatchNorm).
In the backward each part gives two sums for each channel, of ``dy`` and of ``dy * normalised x``, and their totals give the
gradient of each part, with the terms that go across the parts. Torch's own kernels do all that goes over whole parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import Function, once_differentiable
from torch.nn import functional


class NormalisedTogether:
    """One call of a BatchNorm layer on all parts of a batch.

    First each part is taken in by :meth:`add`; then :meth:`join` finds the statistics; then :meth:`normalise` gives each part back.
    Between the two a part needs to be kept by nobody else. One backward of all that was made of the parts goes through all.

    Args:
        number: of parts.
        name: of the layer, for errors.
        group: ranks that have parts of the same batch; None for this one alone.
        is_counted: the parts of this rank belong to the batch; else they are normalised with it, and add nothing to it.
    """

    def __init__(self, number: int, name: str = "", group: dist.ProcessGroup | None = None, is_counted: bool = True) -> None:
        self.name = name
        self.group = group
        self.is_counted = is_counted
        self.is_closed = False
        """All forwards are done: a backward may begin."""
        self.token: Tensor | None = None
        """Ties all parts together in the graph. Its value means nothing; its gradient is the sums of all parts."""
        self.count = 0.0
        self.mean = self.var = self.invstd = torch.empty(0)
        self.eps = 0.0
        self.gradients: list[Tensor | None] = [None] * number
        """With respect to the outputs, on their way through a backward."""
        self._parts: list[Tensor | None] = [None] * number
        self._saved: list[Any] = [None] * number
        self._scale: Any = None

    def add(self, index: int, part: Tensor) -> None:
        """Take in a part, of shape (rows, channels, ...)."""
        self._parts[index] = part
        if torch.is_grad_enabled():
            self._saved[index] = _save(part)

    def join(
        self,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        weight: Tensor | None,
        momentum: float,
        eps: float,
        previous: Tensor | None = None,
    ) -> None:
        """Find the statistics of the batch, and update those that run. All parts are there. With a group, called on all its ranks.

        Args:
            running_mean: of shape (channels,), or None.
            running_var: likewise.
            weight: what outputs are multiplied by, of shape (channels,), or None.
            momentum: of the statistics that run.
            eps: added to the variance.
            previous: the token of the call before, whose backward is to come after that of this one: so that ranks with different
                graphs reduce in the same order.

        Raises:
            ValueError: there is but one value for a channel.
        """
        parts = [part for part in self._parts if part is not None]
        self.eps = eps
        with torch.no_grad():
            self.count, mean, var = _statistics(parts if self.is_counted else [], parts[0], self.group)
            if self.count <= 1:
                raise ValueError(f"Expected more than 1 value per channel when training, got {self.count:.0f} in {self.name}")
            dtype = _dtype_of_statistics(parts[0])
            self.mean, self.var = mean.to(dtype), var.to(dtype)
            self.invstd = (var + eps).rsqrt().to(dtype)
            if running_mean is not None:
                running_mean.mul_(1 - momentum).add_(mean.to(running_mean.dtype), alpha=momentum)
            if running_var is not None:
                unbiased = var * (self.count / (self.count - 1))
                running_var.mul_(1 - momentum).add_(unbiased.to(running_var.dtype), alpha=momentum)
        if torch.is_grad_enabled() and weight is not None:
            self._scale = _save(weight)
        self.token = _Join.apply(self, previous, *parts)  # type: ignore[no-untyped-call]

    def normalise(self, index: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """A part, normalised, then multiplied by ``weight`` and moved by ``bias``."""
        output: Tensor = _Normalise.apply(self, index, self.token, weight, bias)  # type: ignore[no-untyped-call]
        self._parts[index] = None
        return output

    def free(self) -> None:
        """Let go of what was saved for the backward."""
        self._saved = [None] * len(self._saved)

    # --- what the nodes of the graph work with ------------------------------------------------------------------------

    def apply_to(self, index: int, weight: Tensor | None, bias: Tensor | None) -> Tensor:
        """The forward of a part."""
        part, dtype = self._parts[index], self.mean.dtype
        assert part is not None
        weight, bias = (None if p is None else p.to(dtype) for p in (weight, bias))
        return functional.batch_norm(part, self.mean, self.var, weight, bias, False, 0.0, self.eps)

    def sums_of(self, index: int, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """For each channel the sum of the gradient, and that of the gradient times the normalised part."""
        if not gradient.numel():  # torch's kernel divides by it
            return torch.zeros_like(self.mean), torch.zeros_like(self.mean)
        statistics = (self.mean, self.var, self.mean, self.invstd)  # one pair for the CPU, one for CUDA
        part = _load(self._saved[index])
        _, of_normalised, of_gradient = torch.ops.aten.native_batch_norm_backward(
            gradient, part, None, *statistics, False, self.eps, [False, True, True]
        )
        return of_gradient, of_normalised

    def gradients_of(self, are_wanted: Sequence[bool], sums: Tensor) -> Iterator[Tensor | None]:
        """With respect to each part, by the sums of all parts; None where it is not wanted."""
        mean_of_gradient, mean_of_normalised = (sums[:-1].reshape(2, -1) / self.count).to(self.mean.dtype)
        scale = self.invstd if self._scale is None else self.invstd * _load(self._scale).to(self.invstd.dtype)
        # what is normalised, times a weight and moved by a bias, takes one pass
        of_all = (-scale * mean_of_normalised, -scale * mean_of_gradient)
        for index, is_wanted in enumerate(are_wanted):
            gradient, self.gradients[index] = self.gradients[index], None
            if not is_wanted:
                yield None
                continue
            part = _load(self._saved[index])
            result = functional.batch_norm(part.to(scale.dtype), self.mean, self.var, *of_all, False, 0.0, self.eps)
            if gradient is not None:
                result.addcmul_(gradient.to(scale.dtype), scale.view(1, -1, *[1] * (part.dim() - 2)))
            yield result.to(part.dtype)


def batch_norm_of_parts(
    parts: Sequence[Tensor],
    running_mean: Tensor | None = None,
    running_var: Tensor | None = None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    momentum: float = 0.1,
    eps: float = 1e-5,
    group: dist.ProcessGroup | None = None,
) -> list[Tensor]:
    """:func:`torch.nn.functional.batch_norm` in training, of the concatenation of ``parts`` without making it.

    Args:
        parts: tensors of shape (rows, channels, ...), alike but for their rows.
        running_mean: as in the original, and so are the others.
        running_var: see there.
        weight: see there.
        bias: see there.
        momentum: see there.
        eps: see there.
        group: ranks that have other parts, in the same number of calls.

    Returns:
        The parts, normalised. One backward has to go through all of them together.

    Raises:
        ValueError: there is but one value for a channel.

    Example:
        >>> batch_norm_of_parts([torch.tensor([[0.0]]), torch.tensor([[2.0], [4.0]])], eps=0.0)
        [tensor([[-1.2247]]), tensor([[0.0000],
                [1.2247]])]
    """
    call = NormalisedTogether(len(parts), "batch_norm", group)
    for index, part in enumerate(parts):
        call.add(index, part)
    call.join(running_mean, running_var, weight, momentum, eps)
    call.is_closed = True
    return [call.normalise(index, weight, bias) for index in range(len(parts))]


class AfterAll(Function):
    """A loss whose backward goes through all that a token ties together, whether the loss depends on it or not."""

    @staticmethod
    def forward(ctx: Any, loss: Tensor, token: Tensor) -> Tensor:
        """Give the loss on."""
        ctx.like = token
        return loss.view_as(loss)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, Tensor]:
        """Give the gradient on, and nothing to the token."""
        return gradient, torch.zeros_like(ctx.like)


class _Join(Function):
    """From all parts to their token: here the gradients of the parts are made."""

    @staticmethod
    def forward(ctx: Any, call: NormalisedTogether, previous: Tensor | None, *parts: Tensor) -> Tensor:
        ctx.call, ctx.previous = call, None if previous is None else previous.detach()
        if not call.is_counted:
            ctx.nothing, ctx.shapes = [part.new_zeros(()) for part in parts], [part.shape for part in parts]
        exact = torch.float32 if parts[0].device.type == "mps" else torch.float64
        return torch.zeros(2 * parts[0].shape[1] + 1, dtype=exact, device=parts[0].device)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, sums: Tensor) -> tuple[Any, ...]:
        call: NormalisedTogether = ctx.call
        _refuse_early(call)
        if call.group is not None:
            sums = sums.contiguous().clone()
            dist.all_reduce(sums, group=call.group)
        of_previous = None if ctx.previous is None else torch.zeros_like(ctx.previous)
        are_wanted = ctx.needs_input_grad[2:]
        is_used = any(gradient is not None for gradient in call.gradients) or (call.group is not None and float(sums[-1]) > 0)
        if not call.is_counted:
            return None, of_previous, *(nothing.expand(shape) for nothing, shape in zip(ctx.nothing, ctx.shapes, strict=True))
        if not is_used:
            return None, of_previous, *[None] * len(are_wanted)
        gradients = list(call.gradients_of(are_wanted, sums))
        if not torch._C._autograd._get_current_graph_task_keep_graph():
            call.free()
        return None, of_previous, *gradients


class _Normalise(Function):
    """From the token to one part of the output."""

    @staticmethod
    def forward(
        ctx: Any, call: NormalisedTogether, index: int, token: Tensor, weight: Tensor | None, bias: Tensor | None
    ) -> Tensor:
        ctx.call, ctx.index = call, index
        ctx.like = [None if p is None else p.detach() for p in (token, weight, bias)]
        return call.apply_to(index, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        call: NormalisedTogether = ctx.call
        _refuse_early(call)
        token, weight, bias = ctx.like
        if not call.is_counted:
            return None, None, *(None if like is None else torch.zeros_like(like) for like in ctx.like)
        of_gradient, of_normalised = call.sums_of(ctx.index, gradient)
        call.gradients[ctx.index] = gradient
        sums = torch.cat((of_gradient, of_normalised)).to(token.dtype)
        sums = torch.cat((sums, sums.new_ones(1)))
        return (
            None,
            None,
            sums,
            None if weight is None else of_normalised.to(weight.dtype),
            None if bias is None else of_gradient.to(bias.dtype),
        )


class _Save(Function):
    """Saves a tensor as any node does: hooks for saved tensors see it, and a change in place is an error."""

    @staticmethod
    def forward(ctx: Any, handle: Tensor, tensor: Tensor) -> Tensor:
        ctx.save_for_backward(tensor)
        return handle.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> None:
        raise NotImplementedError("nothing is computed from what this gives")


def _save(tensor: Tensor) -> Tensor:
    """An empty tensor whose node has saved this one: the node lasts as long as it does (in torch 2.5, no longer)."""
    handle = torch.empty(0, requires_grad=True)  # not the tensor itself, which as a leaf the graph would keep where it is
    saved: Tensor = _Save.apply(handle, tensor.detach())  # type: ignore[no-untyped-call]
    return saved


def _load(saved: Tensor | None) -> Tensor:
    if saved is None:
        raise RuntimeError("Trying to backward through the graph a second time, without retain_graph=True the first time.")
    node: Any = saved.grad_fn
    tensor: Tensor = node.saved_tensors[0]
    return tensor.detach()


def _refuse_early(call: NormalisedTogether) -> None:
    if not call.is_closed:
        raise RuntimeError(
            f"training_step runs a backward of its own through {call.name}, whose statistics are those of all micro-batches of the"
            ' batch: those have not all run yet. Leave it out, or use GradientAccumulation(batch_norm="warn").'
        )


def _dtype_of_statistics(part: Tensor) -> torch.dtype:
    return torch.float32 if part.dtype in (torch.float16, torch.bfloat16) else part.dtype


def _statistics(parts: Sequence[Tensor], like: Tensor, group: dist.ProcessGroup | None) -> tuple[float, Tensor, Tensor]:
    """The values for each channel, their mean and their variance, over all parts of all ranks."""
    exact = torch.float32 if like.device.type == "mps" else torch.float64
    parts = [part for part in parts if part.numel()]
    counts = [part.numel() // part.shape[1] for part in parts]
    found = [_mean_and_variance(part) for part in parts]
    nothing = torch.zeros(1, like.shape[1], dtype=exact, device=like.device)
    means = torch.stack([mean.to(exact) for mean, _ in found]) if found else nothing
    variances = torch.stack([variance.to(exact) for _, variance in found]) if found else nothing
    n = torch.tensor(counts or [0], dtype=exact).to(like.device, non_blocking=True).unsqueeze(1)
    count = float(sum(counts))
    mean, squares = _put_together(n, count, means, variances * n)
    if group is not None:
        own = torch.cat((mean, squares, torch.full((1,), count, dtype=exact, device=like.device)))
        of_ranks = [torch.empty_like(own) for _ in range(dist.get_world_size(group))]
        dist.all_gather(of_ranks, own, group=group)
        together = torch.stack(of_ranks)
        n, (means, squares) = together[:, -1:], together[:, :-1].reshape(len(of_ranks), 2, -1).unbind(1)
        count = float(n.sum())
        mean, squares = _put_together(n, count, means, squares)
    return count, mean, squares / max(count, 1.0)


def _put_together(n: Tensor, count: float, means: Tensor, squares: Tensor) -> tuple[Tensor, Tensor]:
    """The mean, and the sum of squared distances from it, by those of parts: each of shape (parts, channels), and (parts, 1)."""
    mean = (n * means).sum(0) / max(count, 1.0)
    return mean, (squares + n * (means - mean).square()).sum(0)


def _mean_and_variance(part: Tensor) -> tuple[Tensor, Tensor]:
    part = part.detach()
    if part.device.type not in ("cpu", "cuda"):
        variance, mean = torch.var_mean(part, [d for d in range(part.dim()) if d != 1], correction=0)
        return mean, variance
    running: Any = None
    if _dtype_of_statistics(part) != part.dtype:  # for results in full precision
        running = torch.zeros(part.shape[1], device=part.device)
    mean, variance = torch.batch_norm_update_stats(part, running, running, 0.0)
    return mean, variance
