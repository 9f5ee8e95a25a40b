"""One call of a row-wise submodule: run in micro-batches whose graphs are dropped, and again once its outputs have gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_accum.errors import RowWiseError
from lightning_accum.randomness import RandomState
from lightning_accum.whole.forms import INSTEAD, Form, Layer, Tree, check_outputs, is_near, read

Gradients: TypeAlias = Sequence[Tensor | None]


class RowWiseOutputs(torch.autograd.Function):
    """Outputs without a graph of their own, in whose backward a call runs again; or, of no call, those that are given."""

    @staticmethod
    def forward(
        ctx: Any, run_again: Callable[[Gradients], Gradients] | None, outputs: list[Tensor], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """The outputs."""
        ctx.run_again, ctx.of_none = run_again, outputs[0].new_zeros(())
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs."""
        if ctx.run_again is None:
            return None, None, *gradients
        # not None of what has no inputs: hooks of others are on all leaves of a loss
        return None, None, ctx.of_none, *ctx.run_again(gradients)


def as_one_node(outputs: Any, layer: Layer) -> Any:
    """The outputs of a call that ran as it is, below a node as of one in micro-batches: the terms of a loss are told by nodes."""
    try:
        tree = read(outputs, layer)
    except RowWiseError:
        return outputs
    trained = [value for value in tree.values if isinstance(value, Tensor) and value.requires_grad]
    if not trained:
        return outputs
    made = iter(RowWiseOutputs.apply(None, [value.detach().clone() for value in trained], *trained))  # type: ignore[no-untyped-call]
    return tree.make(next(made) if isinstance(value, Tensor) and value.requires_grad else value for value in tree.values)


@dataclass(eq=False)
class Call:
    """A call of a submodule in a step.

    Attributes:
        pieces: the rows of the micro-batches that it runs in.
        shadows: micro-batches that other ranks have more: this one takes part in them with its last, which counts for nothing.
        run_piece: runs the submodule on the arguments of a micro-batch.
        device: whose random state there is beside the CPU's.
    """

    layer: Layer
    arguments: Tree
    form: Form
    pieces: list[range]
    shadows: int
    run_piece: Callable[[range, Any], Any]
    device: torch.device

    def __post_init__(self) -> None:
        self._with_shadows = [*self.pieces, *self.pieces[-1:] * self.shadows]
        tensors = [(x, is_row) for x, is_row in zip(self.arguments.values, self.form.inputs, strict=True) if isinstance(x, Tensor)]
        self._differentiable = [(tensor, is_row) for tensor, is_row in tensors if tensor.requires_grad]
        parameters = [] if self.layer.is_sharded else self.layer.module.parameters()
        watched = [*parameters, *(tensor for tensor, _ in tensors)]
        self._unchanged = [(tensor, tensor._version) for tensor in watched if not tensor.is_inference()]
        self._state = _State(self.layer.module, self.device)
        self._random_states: list[RandomState] = []  # that the micro-batches were run with
        self._trained: list[int] = []  # the places of the outputs with gradients,
        self._sizes: dict[int, list[int]] = {}  # their sizes in the micro-batches,
        self._given: list[Tensor] = []  # and those outputs

    def run(self, run_again: Callable[[Gradients], Gradients]) -> Any:
        """Run all rows. Returns the outputs, joined, and without a graph: their backward asks ``run_again``."""
        buffers = [(name, own, own._version) for name, own in self.layer.module.named_buffers() if not own.is_inference()]
        parts: list[Tree] = []
        trained: set[int] = set()
        for piece in self._with_shadows:
            self._random_states.append(RandomState(self.device))
            _, found = self._run_once(piece)
            trained |= {place for place, x in enumerate(found.values) if isinstance(x, Tensor) and x.requires_grad}
            parts.append(read(found.make(x.detach() if isinstance(x, Tensor) else x for x in found.values), self.layer))
            del found  # with its graph
            check_outputs(self.layer, parts[-1], parts[0], self.form.dims)
        if len(parts) > len(self.pieces):
            self._random_states[len(self.pieces)].restore()
            del parts[len(self.pieces) :]
        for name, buffer, version in buffers:
            if buffer._version != version:
                raise RowWiseError.of(
                    self.layer.name,
                    f"a call changes the buffer {self.layer.name}.{name}, as if each micro-batch were a batch. Have another"
                    ' submodule run row-wise, or use micro_batch="offload".',
                )
        of_parts = [*zip(*(part.values for part in parts), strict=True)]
        joined = [_joined(values, dim) for values, dim in zip(of_parts, self.form.dims, strict=True)]
        if trained:
            self._trained = sorted(trained)
            self._sizes = {at: [x.shape[dim] for x in of_parts[at]] for at in trained if (dim := self.form.dims[at]) is not None}
            outputs = [joined[place] for place in self._trained]
            inputs = outputs[0].new_zeros(()).requires_grad_(), *(x for x, _ in self._differentiable)
            made = RowWiseOutputs.apply(run_again, outputs, *inputs)  # type: ignore[no-untyped-call]
            for place, tensor in zip(self._trained, made, strict=True):
                joined[place] = tensor
            self._given = [tensor.detach() for tensor in made]  # without their graph, which leads to this call
        return parts[0].make(joined)

    def _run_once(self, piece: range) -> tuple[list[Tensor], Tree]:
        """Run a micro-batch with a graph of its own. Returns its inputs that need gradients, and its outputs."""
        inputs: list[Tensor] = []

        def cut_off(value: Any, is_row: bool) -> Any:  # from the graph that made it
            if not (isinstance(value, Tensor) and value.requires_grad):
                return _taken(value, piece, is_row)
            inputs.append(_taken(value.detach(), piece, is_row).requires_grad_())
            return inputs[-1].view_as(inputs[-1])  # the submodule may write into it

        with torch.enable_grad():
            arguments = self.arguments.make(map(cut_off, self.arguments.values, self.form.inputs))
            return inputs, read(self.run_piece(piece, arguments), self.layer)

    def zeros(self) -> list[Tensor]:
        """Of the shapes of the inputs that need gradients."""
        return [torch.zeros_like(value) for value, _ in self._differentiable]

    def run_again(self, gradients: Gradients) -> list[Tensor]:
        """Run it again with a graph, and give the gradients of its outputs to its parameters. Returns those of its inputs."""
        if any(tensor._version != version for tensor, version in self._unchanged):
            raise RowWiseError.of(
                self.layer.name,
                "the parameters or inputs of a call were changed before its backward, in which it runs again (by the call itself,"
                ' or an optimizer step in between). Change a copy, run the backward first, or use micro_batch="offload".',
            )
        gradients_of = list(map(self._parts, gradients, self._trained))
        # what was written into since cannot be compared
        given = list(map(self._parts, [None if tensor._version else tensor for tensor in self._given], self._trained))
        is_equal: list[Tensor] = []
        of_inputs = self.zeros()
        for index, piece in enumerate(self._with_shadows):
            self._random_states[index].restore()
            with self._state.again():
                inputs, found = self._run_once(piece)
            roots: list[Tensor] = []
            seeds: list[Tensor] = []
            for place, of_parts, before in zip(self._trained, gradients_of, given, strict=True):
                output, seed, expected = found.values[place], of_parts[index], before[index]
                if expected is not None:
                    is_equal.append(is_near(output, expected))
                if seed is None and self.layer.is_sharded:
                    seed = torch.zeros_like(output)  # other ranks may have one, and wait
                if seed is not None and output.requires_grad:
                    roots.append(output)
                    seeds.append(seed)
            del found
            if roots:
                torch.autograd.backward(roots, seeds)
            for total, (_, is_row), leaf in zip(of_inputs, self._differentiable, inputs, strict=True):
                if leaf.grad is not None and index < len(self.pieces):
                    _taken(total, piece, is_row).add_(leaf.grad)
            del output, roots, seeds, inputs
        if is_equal and not bool(torch.stack([flag.to(is_equal[0].device) for flag in is_equal]).all()):
            raise RowWiseError.of(
                self.layer.name,
                f"run again for its backward, a call of {self.layer.name!r} has other outputs than before. It depends on something"
                " beside its arguments, its parameters and the global random numbers, such as an attribute that is set between"
                " calls, a generator of its own, or parameters that were exchanged for the call (functional_call). Pass it as an"
                f" argument. {INSTEAD}",
            )
        return of_inputs

    def _parts(self, whole: Tensor | None, place: int) -> Gradients:
        """Of each micro-batch, of an output or its gradient. What all rows share is in the first; shadows have nothing."""
        dim = self.form.dims[place]
        parts = [whole] if whole is None or dim is None else torch.split(whole, self._sizes[place], dim)
        return [*parts, *[None] * (len(self._with_shadows) - len(parts))]


class _State:
    """What a call runs in: modes, what is trained, autocast and the default type."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._flags: list[tuple[Any, str, bool]] = [(inner, "training", inner.training) for inner in module.modules()]
        self._flags += [(own, "requires_grad", own.requires_grad) for own in module.parameters()]
        kinds = dict.fromkeys(("cpu", device.type))
        self._autocasts = [torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
        self._dtype = torch.get_default_dtype()

    @contextmanager
    def again(self) -> Iterator[None]:
        """In here it is again as it was."""
        changed = [flag for flag in self._flags if getattr(flag[0], flag[1]) != flag[2]]
        with ExitStack() as stack:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            stack.callback(_set, [(owner, name, not value) for owner, name, value in changed])
            _set(changed)
            torch.set_default_dtype(self._dtype)
            for autocast in self._autocasts:
                stack.enter_context(autocast)
            yield


def _set(flags: Iterable[tuple[Any, str, bool]]) -> None:
    for owner, name, value in flags:
        setattr(owner, name, value)


def _taken(value: Any, piece: range, is_row: bool) -> Any:
    """What a micro-batch has of an argument."""
    return value[piece.start : piece.stop] if is_row else value


def _joined(of_parts: Sequence[Any], dim: int | None) -> Any:
    """An output of all micro-batches."""
    first = of_parts[0]
    if dim is None:
        return first.clone() if isinstance(first, Tensor) else first
    return torch.cat(list(of_parts), dim) if isinstance(first, Tensor) else [entry for part in of_parts for entry in part]
