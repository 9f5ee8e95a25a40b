"""One call of a row-wise submodule: run in micro-batches whose graphs are dropped, and again once its outputs have gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_accum.errors import RowWiseError
from lightning_accum.randomness import RandomState
from lightning_accum.splitting.micro_batch import RowSelector
from lightning_accum.splitting.plan import RowSlice
from lightning_accum.whole.forms import INSTEAD, Form, Layer, check_others
from lightning_accum.whole.trees import Tree, UnknownObjectError, differences, is_same, read

RunAgain: TypeAlias = "Callable[[Call, Sequence[Tensor | None]], Sequence[Tensor | None]]"
"""Of a call, from the gradients of its outputs: those of its inputs."""


def taken(leaf: Any, is_row: bool, selector: RowSelector) -> Any:
    """What a micro-batch has of an argument."""
    if isinstance(leaf, Tensor):
        return selector.tensor(leaf) if is_row else selector.shared(leaf)
    return type(leaf)(selector.entries(leaf)) if is_row else leaf


class RowWiseOutputs(torch.autograd.Function):
    """Outputs without a graph of their own, in whose backward a call runs again; or, of no call, those that are given."""

    @staticmethod
    def forward(
        ctx: Any, call: Call | None, run_again: RunAgain | None, outputs: list[Tensor], *inputs: Tensor
    ) -> tuple[Tensor, ...]:
        """The outputs."""
        ctx.call, ctx.run_again, ctx.of_none = call, run_again, outputs[0].new_zeros(())
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        """The gradients of the inputs."""
        if ctx.call is None:
            return None, None, None, *gradients
        is_whole_backward = torch.autograd._is_checkpoint_valid()  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled() or not is_whole_backward:
            name = ctx.call.layer.name
            raise RowWiseError(
                f"row_wise={name!r}: training_step differentiates through a call of {name!r} by itself (a gradient"
                " penalty, an inner step), and what ran in micro-batches has no graph for that."
                ' Leave row_wise out, and use micro_batch="offload".'
            )
        # not None of what has no inputs: hooks of others are on all leaves of a loss
        return None, None, None, ctx.of_none, *ctx.run_again(ctx.call, gradients)


def as_one_node(outputs: Any) -> Any:
    """The outputs of a call that ran as it is, below a node as of one in micro-batches: the terms of a loss are told by nodes."""
    try:
        tree = read(outputs)
    except UnknownObjectError:
        return outputs
    trained = [leaf for leaf in tree.leaves if isinstance(leaf, Tensor) and leaf.requires_grad]
    if not trained:
        return outputs
    made = iter(RowWiseOutputs.apply(None, None, [leaf.detach().clone() for leaf in trained], *trained))  # type: ignore[no-untyped-call]
    return tree.make(next(made) if isinstance(leaf, Tensor) and leaf.requires_grad else leaf for leaf in tree.leaves)


class Call:
    """A call of a submodule in a step.

    Args:
        layer: the submodule.
        arguments: positional and keyword arguments, taken apart.
        form: where the rows are.
        pieces: the micro-batches that it runs in.
        order: the rows in their order; None if they keep theirs.
        shadows: micro-batches that other ranks have more: this one takes part in them with its
            last, which counts for nothing.
        run_piece: runs the submodule on the arguments of a micro-batch.
        device: whose random state there is beside the CPU's.
    """

    def __init__(
        self,
        layer: Layer,
        arguments: Tree,
        form: Form,
        pieces: list[RowSlice],
        order: list[int] | None,
        shadows: int,
        run_piece: Callable[[RowSlice, Any], Any],
        device: torch.device,
    ) -> None:
        self.layer, self.arguments, self.form = layer, arguments, form
        self.pieces, self.order, self.shadows = pieces, order, shadows
        self._run_piece, self._device = run_piece, device
        self.current = 0
        """The micro-batch that ran last."""
        inputs = arguments.leaves
        places = [place for place, leaf in enumerate(inputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self.needs_gradient = [inputs[place] for place in places]
        self._have_rows = [form.inputs[place] for place in places]
        self._random_states: list[RandomState] = []  # that the micro-batches were run with
        self._state = _State(layer.module, device)
        parameters = [] if layer.is_sharded else layer.module.parameters()
        self._unchanged = _versions([*parameters, *(x for x in inputs if isinstance(x, Tensor))])
        self._trained: list[int] = []  # the places of the outputs with gradients, and
        self._sizes: list[list[int]] = []  # the size of each in the micro-batches
        self._given: list[Tensor] = []  # those outputs

    def run(self, run_again: RunAgain) -> Any:
        """Run all rows. Returns the outputs, joined, and without a graph.

        Args:
            run_again: is called in the backward of the outputs, with their gradients.
        """
        buffers = dict(self.layer.module.named_buffers())
        before = _versions(buffers.values())
        parts: list[Tree] = []
        trained: set[int] = set()
        for index, piece in enumerate(self.pieces):
            self.current = index
            self._random_states.append(RandomState(self._device))
            _, found = self._run_once(piece)
            trained |= {place for place, leaf in enumerate(found.leaves) if isinstance(leaf, Tensor) and leaf.requires_grad}
            parts.append(read(found.make(leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in found.leaves)))
            del found  # with its graph
            self._check_outputs(parts[-1], parts[0])
        self._run_shadows()
        changed = [name for (name, _), is_changed in zip(buffers.items(), _differ(before), strict=True) if is_changed]
        if changed:
            raise RowWiseError(
                f"row_wise={self.layer.name!r}: a call changes the buffer {self.layer.name}.{changed[0]}, as if each micro-batch"
                " were a batch. Have another submodule run row-wise, or use"
                ' micro_batch="offload".'
            )
        joined = [self._joined([part.leaves[place] for part in parts], dim) for place, dim in enumerate(self.form.dims)]
        if trained:
            self._trained = sorted(trained)
            dims = [self.form.dims[place] for place in self._trained]
            of_parts = [[part.leaves[place] for part in parts] for place in self._trained]
            self._sizes = [
                [] if dim is None else [one.shape[dim] for one in ones] for dim, ones in zip(dims, of_parts, strict=True)
            ]
            outputs = [joined[place] for place in self._trained]
            inputs = outputs[0].new_zeros(()).requires_grad_(), *self.needs_gradient
            made = RowWiseOutputs.apply(self, run_again, outputs, *inputs)  # type: ignore[no-untyped-call]
            for place, tensor in zip(self._trained, made, strict=True):
                joined[place] = tensor
            self._given = [tensor.detach() for tensor in made]  # without their graph, which leads to this call
        return parts[0].make(iter(joined))

    def _run_once(self, piece: RowSlice) -> tuple[list[Tensor], Tree]:
        """Run a micro-batch with a graph of its own. Returns its inputs that need gradients, and its outputs."""
        inputs: list[Tensor] = []

        def cut_off(leaf: Any, is_row: bool) -> Any:  # from the graph that made it
            if not (isinstance(leaf, Tensor) and leaf.requires_grad):
                return taken(leaf, is_row, piece.selector)
            inputs.append(taken(leaf.detach(), is_row, piece.selector).requires_grad_())
            return inputs[-1].view_as(inputs[-1])  # the submodule may write into it

        with torch.enable_grad():
            arguments = self.arguments.make(map(cut_off, self.arguments.leaves, self.form.inputs))
            return inputs, read(self._run_piece(piece, arguments))

    def _run_shadows(self, with_backward: bool = False) -> None:
        """Take part in the micro-batches that other ranks have more."""
        if not self.shadows:
            return
        now = RandomState(self._device)
        for _ in range(self.shadows):
            _, found = self._run_once(self.pieces[-1])
            if with_backward:
                roots = [found.leaves[place] for place in self._trained if found.leaves[place].requires_grad]
                torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])
        now.restore()

    def _check_outputs(self, found: Tree, first: Tree) -> None:
        """Raise if the outputs of a micro-batch cannot be joined with those of the first."""
        check_others(self.layer, found, first)
        name = self.layer.name
        if len(found.leaves) != len(self.form.dims):
            raise RowWiseError(f"row_wise={name!r}: its outputs are not the same in each micro-batch")
        for leaf, before, dim in zip(found.leaves, first.leaves, self.form.dims, strict=True):
            what = ""
            if dim is None and not is_same(leaf, before):
                what = "an output that has no dimension of rows, and is not the same for all"
            elif dim is not None and isinstance(leaf, Tensor) and _without(leaf, dim) != _without(before, dim):
                what = f"outputs of other shapes than for other rows, {tuple(leaf.shape)} and {tuple(before.shape)}"
            if what:
                raise RowWiseError(f"row_wise={name!r}: for some rows {name!r} returns {what}. {INSTEAD}")

    def _joined(self, of_parts: Sequence[Any], dim: int | None) -> Any:
        """An output of all micro-batches."""
        if dim is None:
            return of_parts[0].clone() if isinstance(of_parts[0], Tensor) else of_parts[0]
        if isinstance(of_parts[0], Tensor):
            return self._sorted(torch.cat(list(of_parts), dim), dim, is_back=True)
        entries = [entry for part in of_parts for entry in part]
        return [entries[place] for place in (range(len(entries)) if self.order is None else _inverse(self.order))]

    def run_again(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Run it again with a graph, and give the gradients of its outputs to its parameters.

        Returns:
            Those of its inputs.
        """
        if any(_differ(self._unchanged)):
            raise RowWiseError(
                f"row_wise={self.layer.name!r}: the parameters or inputs of a call were changed before its backward, in which it"
                " runs again (by the call itself, or an optimizer step in between). Change a copy,"
                ' run the backward first, or use micro_batch="offload".'
            )
        gradients_of = [self._parts(gradient, index) for index, gradient in enumerate(gradients)]
        # what was written into since cannot be compared
        given = [None if tensor._version else self._parts(tensor, index) for index, tensor in enumerate(self._given)]
        is_equal: list[Tensor] = []
        of_inputs = [torch.zeros_like(leaf) for leaf in self.needs_gradient]
        for index, piece in enumerate(self.pieces):
            self.current = index
            self._random_states[index].restore()
            with self._state.again():
                inputs, found = self._run_once(piece)
            roots, seeds = [], []
            for place, of_parts, before in zip(self._trained, gradients_of, given, strict=True):
                output = found.leaves[place]
                if before is not None and (one := before[index]) is not None:
                    is_equal += differences(output, one)
                seed = None if of_parts is None else of_parts[index]
                if seed is None and self.layer.is_sharded:
                    seed = torch.zeros_like(output)  # other ranks may have one, and wait
                if seed is not None and output.requires_grad:
                    roots.append(output)
                    seeds.append(seed)
            del found
            if roots:
                torch.autograd.backward(roots, seeds)
            for total, is_row, leaf in zip(of_inputs, self._have_rows, inputs, strict=True):
                if leaf.grad is not None and is_row:
                    piece.selector.write_back(total, leaf.grad)
                elif leaf.grad is not None:
                    piece.selector.shared(total).add_(leaf.grad)
            del roots, seeds, inputs
        with self._state.again():
            self._run_shadows(with_backward=True)
        if is_equal and not bool(torch.stack([flag.to(is_equal[0].device) for flag in is_equal]).all()):
            raise RowWiseError(
                f"row_wise={self.layer.name!r}: run again for its backward, a call of {self.layer.name!r} has other outputs than"
                " before. It depends on something beside its arguments, its parameters and the"
                " global random numbers, such as an attribute that is set between calls, a"
                " generator of its own, or parameters that were exchanged for the call"
                f" (functional_call). Pass it as an argument. {INSTEAD}"
            )
        return of_inputs

    def _parts(self, whole: Tensor | None, index: int) -> Sequence[Tensor | None] | None:
        """Of each micro-batch, of an output or its gradient. What all rows share is in the first."""
        if whole is None:
            return None
        dim = self.form.dims[self._trained[index]]
        if dim is None:
            return [whole, *[None] * (len(self.pieces) - 1)]
        return torch.split(self._sorted(whole, dim), self._sizes[index], dim)

    def _sorted(self, tensor: Tensor, dim: int, is_back: bool = False) -> Tensor:
        """A tensor with the rows in the order of the micro-batches, or back from it."""
        if self.order is None:
            return tensor
        order = torch.tensor(_inverse(self.order) if is_back else self.order)
        return tensor.index_select(dim, order.to(tensor.device))


class _State:
    """What a call runs in: modes, what is trained, autocast and the default type."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._modes = [(inner, inner.training) for inner in module.modules()]
        self._trained = [(own, own.requires_grad) for own in module.parameters()]
        kinds = dict.fromkeys(("cpu", device.type))
        self._autocasts = [torch.autocast(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
        self._dtype = torch.get_default_dtype()

    @contextmanager
    def again(self) -> Iterator[None]:
        """In here it is again as it was."""
        modes = [inner for inner, is_training in self._modes if inner.training != is_training]
        toggled = [own for own, is_trained in self._trained if own.requires_grad != is_trained]

        def toggle() -> None:
            for inner in modes:
                inner.training = not inner.training
            for own in toggled:
                own.requires_grad_(not own.requires_grad)

        with ExitStack() as stack:
            stack.callback(torch.set_default_dtype, torch.get_default_dtype())
            stack.callback(toggle)
            toggle()
            torch.set_default_dtype(self._dtype)
            for autocast in self._autocasts:
                stack.enter_context(autocast)
            yield


def _versions(tensors: Any) -> list[tuple[Tensor, int]]:
    return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


def _differ(versions: list[tuple[Tensor, int]]) -> list[bool]:
    return [tensor._version != before for tensor, before in versions]


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _without(tensor: Tensor, dim: int) -> tuple[int, ...]:
    return (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
