"""One call of a row-wise submodule: it runs in checkpointed micro-batches, each of which runs again in the backward."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_accum.errors import RowWiseError
from lightning_accum.randomness import RandomState
from lightning_accum.whole.forms import HINT, Form, Layer, Tree, check_outputs, is_near, read


class RowWiseOutputs(torch.autograd.Function):
    """Makes the outputs of a call the outputs of one graph node, for any number of micro-batches.

    The outputs of ``shadows`` come after them. They have weight 0, but still run a backward.
    """

    @staticmethod
    def forward(ctx: Any, begin_backward: Callable[[], None] | None, number: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        """The joined outputs."""
        ctx.begin_backward, ctx.shadows = begin_backward, [tensor.shape for tensor in tensors[number:]]
        ctx.set_materialize_grads(begin_backward is not None)
        return tuple(tensor.data for tensor in tensors[:number])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of all outputs."""
        if ctx.begin_backward is not None:
            ctx.begin_backward()
        zero = next(gradient for gradient in gradients if gradient is not None)
        return None, None, *gradients, *(zero.new_zeros(shape) for shape in ctx.shadows)


def as_one_node(
    outputs: Sequence[Any], shadows: Sequence[Tensor] = (), begin_backward: Callable[[], None] | None = None
) -> list[Any]:
    """Outputs of a call as one node, also without micro-batches, since nodes identify the terms of a loss."""
    trained = [value for value in outputs if isinstance(value, Tensor) and value.requires_grad]
    if not trained:
        return [*outputs]
    made = iter(RowWiseOutputs.apply(begin_backward, len(trained), *trained, *shadows))  # type: ignore[no-untyped-call]
    return [next(made) if isinstance(value, Tensor) and value.requires_grad else value for value in outputs]


@dataclass(eq=False)
class Call:
    """A call of a submodule in a step."""

    layer: Layer
    arguments: Tree
    form: Form
    pieces: list[range]  # the rows of its micro-batches
    shadows: int  # further micro-batches of other ranks, for which this rank repeats its last with weight 0
    run_piece: Callable[[range, Any], Any]  # runs the submodule on the arguments of a micro-batch
    begin_backward: Callable[[], None] | None  # called before its backward, if ranks wait for each other there
    device: torch.device  # its random state is saved with the CPU's

    def __post_init__(self) -> None:
        parameters = [] if self.layer.is_sharded else self.layer.module.parameters()
        watched = [*parameters, *(value for value in self.arguments.values if isinstance(value, Tensor))]
        self._unchanged = [(tensor, tensor._version) for tensor in watched if not tensor.is_inference()]
        self._flags: list[tuple[Any, str, bool]] = [(inner, "training", inner.training) for inner in self.layer.module.modules()]
        self._flags += [(own, "requires_grad", own.requires_grad) for own in self.layer.module.parameters()]
        self._dtype = torch.get_default_dtype()
        self._given: list[Sequence[Any]] = []
        """Its outputs in parts of micro-batches, without their graph, which would refer to this call."""
        self._is_equal: list[Tensor] = []

    def run(self) -> Any:
        """Run all rows. Returns the outputs, joined."""
        buffers = [(name, own, own._version) for name, own in self.layer.module.named_buffers() if not own.is_inference()]
        parts: list[Tree] = []
        after = None
        for index, piece in enumerate([*self.pieces, *self.pieces[-1:] * self.shadows]):
            if index == len(self.pieces):
                after = RandomState(self.device)
            parts.append(self._run_checkpointed(index, piece))
            check_outputs(self.layer, parts[-1], parts[0], self.form.dims)
        if after is not None:
            after.restore()
        for name, buffer, version in buffers:
            if buffer._version != version:
                raise RowWiseError.of(self.layer.name, f"each micro-batch changes its buffer {name}. {HINT}")
        number = len(self.pieces)
        of_parts = [*zip(*(part.values for part in parts), strict=True)]
        shadows = [x for of_output in of_parts for x in of_output[number:] if isinstance(x, Tensor) and x.requires_grad]
        joined = [_joined(of_output[:number], dim) for of_output, dim in zip(of_parts, self.form.dims, strict=True)]
        joined = as_one_node(joined, shadows, self.begin_backward)
        for value, of_output, dim in zip(joined, of_parts, self.form.dims, strict=True):
            given = value.detach() if isinstance(value, Tensor) and value.requires_grad else None
            if given is None or dim is None:
                self._given.append([given] * number)
            else:
                self._given.append(torch.split(given, [part.shape[dim] for part in of_output[:number]], dim))
        return parts[0].make(joined)

    def _run_checkpointed(self, index: int, piece: range) -> Tree:
        """Run a micro-batch, and keep only its outputs."""
        before, inputs = RandomState(self.device), zip(self.arguments.values, self.form.inputs, strict=True)
        values = [value[piece.start : piece.stop] if is_row else value for value, is_row in inputs]

        def run(device: Tensor) -> Tree:
            is_again = bool(self._given)
            with self._again(before) if is_again else nullcontext():
                found = read(self.run_piece(piece, self.arguments.make(values)), self.layer)
            if is_again and index < len(self.pieces):
                self._compare(index, found)
            return found

        device = torch.empty(0, dtype=torch.uint8, device=self.device)  # the checkpoint keeps its autocast state
        with set_checkpoint_early_stop(False):  # its outputs are compared
            made: Tree = checkpoint(run, device, use_reentrant=False, preserve_rng_state=False, determinism_check="none")
        return made

    @contextmanager
    def _again(self, before: RandomState) -> Iterator[None]:
        """Inside, modes, ``requires_grad``, the default type and noise are as in the forward; the checkpoint keeps autocast."""
        if any(tensor._version != version for tensor, version in self._unchanged):
            found = "parameters or inputs of a call were changed before its backward, which runs it again"
            raise RowWiseError.of(self.layer.name, f'{found}. Change a copy, run the backward first, or use micro_batch="offload".')
        changed = [(owner, name, value) for owner, name, value in self._flags if getattr(owner, name) != value]
        now, dtype = RandomState(self.device), torch.get_default_dtype()
        try:
            for owner, name, value in changed:
                setattr(owner, name, value)
            torch.set_default_dtype(self._dtype)
            before.restore()
            yield
        finally:
            for owner, name, value in changed:
                setattr(owner, name, not value)
            torch.set_default_dtype(dtype)
            now.restore()

    def _compare(self, index: int, found: Tree) -> None:
        """Raise an error in the backward if a micro-batch has other outputs than in the forward."""
        for of_output, value in zip(self._given, found.values, strict=True):
            if (expected := of_output[index]) is not None and not expected._version:  # else it was changed in place since
                self._is_equal.append(is_near(value, expected))
        Variable._execution_engine.queue_callback(self._refuse_others)

    def _refuse_others(self) -> None:
        is_equal, self._is_equal = self._is_equal, []
        if is_equal and not bool(torch.stack([flag.to(is_equal[0].device) for flag in is_equal]).all()):
            found = "a call has other outputs when it runs again for its backward: it depends on an attribute that is set between"
            found += " calls, its own generator, or parameters of functional_call. Pass this as an argument."
            raise RowWiseError.of(self.layer.name, f"{found} {HINT}")


def _joined(of_parts: Sequence[Any], dim: int | None) -> Any:
    """An output of all micro-batches."""
    first = of_parts[0]
    if dim is None:
        return first.clone() if isinstance(first, Tensor) else first
    return torch.cat(list(of_parts), dim) if isinstance(first, Tensor) else [entry for part in of_parts for entry in part]
