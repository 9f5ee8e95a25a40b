"""One call of a row-wise submodule: run in micro-batches without a graph, and again with one once its outputs have gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from lightning_accum.errors import RowWiseError
from lightning_accum.randomness import RandomState
from lightning_accum.splitting.micro_batch import RowSelector
from lightning_accum.splitting.plan import RowSlice
from lightning_accum.whole.forms import INSTEAD, Form, Layer, as_with_a_graph
from lightning_accum.whole.trees import Tree, check_others, differences, is_close, leaves, read

RunAgain: TypeAlias = "Callable[[Call, Sequence[Tensor | None]], Sequence[Tensor | None]]"
"""Of a call, from the gradients of its outputs: those of its inputs."""


def taken(arguments: Tree, are_rows: Sequence[bool], selector: RowSelector) -> Any:
    """Positional and keyword arguments with some rows of the leaves that have rows."""
    pairs = zip(arguments.leaves, are_rows, strict=True)
    return arguments.make(_taken(leaf, is_row, selector) for leaf, is_row in pairs)


def _taken(leaf: Any, is_row: bool, selector: RowSelector) -> Any:
    if isinstance(leaf, Tensor):
        return selector.tensor(leaf) if is_row else selector.shared(leaf)
    return type(leaf)(selector.entries(leaf)) if is_row else leaf


class _Outputs(torch.autograd.Function):
    """Outputs without a graph of their own, in whose backward the call runs again."""

    @staticmethod
    def forward(ctx: Any, call: Call, run_again: RunAgain, outputs: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.run_again, ctx.of_none = call, run_again, outputs[0].new_zeros(())
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        is_whole_backward = torch.autograd._is_checkpoint_valid()  # type: ignore[no-untyped-call]
        if torch.is_grad_enabled() or not is_whole_backward:
            name = ctx.call.layer.name
            raise RowWiseError(
                f"row_wise={ctx.call.layer.name!r}: training_step differentiates through a call of {name!r} by itself (a gradient"
                " penalty, an inner step), and what ran in micro-batches has no graph for that."
                ' Leave row_wise out, and use micro_batch="offload".'
            )
        # not None of what has no inputs: hooks of others are on all leaves of a loss
        return None, None, None, ctx.of_none, *ctx.run_again(ctx.call, gradients)


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

    # --- without a graph --------------------------------------------------------------------------

    def run(self, run_again: RunAgain) -> Any:
        """Run all rows. Returns the outputs, joined, and without a graph.

        Args:
            run_again: is called in the backward of the outputs, with their gradients.
        """
        buffers = dict(self.layer.module.named_buffers())
        before = _versions(buffers.values())
        parts: list[list[Any]] = []
        trained: set[int] = set()
        is_known = False  # which outputs need a gradient, see below
        with as_with_a_graph(), _saving_nothing():
            for index, piece in enumerate(self.pieces):
                self.current = index
                self._random_states.append(RandomState(self._device))
                arguments = taken(self.arguments, self.form.inputs, piece.selector)
                with torch.set_grad_enabled(not is_known):
                    found, _, others, make = read(self._run_piece(piece, arguments))
                trained |= {place for place, leaf in enumerate(found) if isinstance(leaf, Tensor) and leaf.requires_grad}
                bare = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in found]
                if not parts:
                    first = read(make(iter(bare)))
                check_others(self.layer.name, others, first.others)
                self._check_outputs(bare, parts)
                # one without a graph may have one for other rows, as where they are routed
                is_known = all(place in trained or not _may_need_gradient(leaf) for place, leaf in enumerate(bare))
                parts.append(bare)
                del found, make, arguments
            self._run_shadows()
        changed = [name for (name, _), is_changed in zip(buffers.items(), _differ(before), strict=True) if is_changed]
        if changed:
            raise RowWiseError(
                f"row_wise={self.layer.name!r}: a call changes the buffer {self.layer.name}.{changed[0]}, as if each micro-batch"
                " were a batch. Have another submodule run row-wise, or use"
                ' micro_batch="offload".'
            )
        self._trained = sorted(trained)
        return self._joined(first, parts, run_again)

    def _run_shadows(self, with_a_graph: bool = False) -> None:
        """Take part in the micro-batches that other ranks have more."""
        if not self.shadows:
            return
        now = RandomState(self._device)
        for _ in range(self.shadows):
            with torch.set_grad_enabled(with_a_graph):
                _, arguments = self._detached(self.pieces[-1].selector)
                found = leaves(self._run_piece(self.pieces[-1], arguments))
            if with_a_graph:
                roots = [found[place] for place in self._trained if found[place].requires_grad]
                torch.autograd.backward(roots, [torch.zeros_like(root) for root in roots])
        now.restore()

    def _check_outputs(self, found: list[Any], parts: list[list[Any]]) -> None:
        """Raise if the outputs of a micro-batch cannot be joined with those of the first."""
        if len(found) != len(self.form.dims) or (parts and len(found) != len(parts[0])):
            raise RowWiseError(f"row_wise={self.layer.name!r}: its outputs are not the same in each micro-batch")
        for leaf, before, dim in zip(found, parts[0], self.form.dims, strict=True) if parts else ():
            what = ""
            if dim is None:
                if not (is_close(leaf, before) if isinstance(leaf, Tensor) else leaf == before):
                    what = "an output that has no dimension of rows, and is not the same for all"
            elif isinstance(leaf, Tensor) and _without(leaf, dim) != _without(before, dim):
                what = f"outputs of other shapes than for other rows, {tuple(leaf.shape)} and"
                what += f" {tuple(before.shape)}"
            if what:
                name = self.layer.name
                raise RowWiseError(f"row_wise={self.layer.name!r}: for some rows {name!r} returns {what}. {INSTEAD}")

    def _joined(self, first: Tree, parts: list[list[Any]], run_again: RunAgain) -> Any:
        joined: list[Any] = []
        for place, dim in enumerate(self.form.dims):
            of_parts = [part[place] for part in parts]
            if dim is None:
                one = of_parts[0]
                joined.append(one.clone() if isinstance(one, Tensor) else one)
            elif isinstance(of_parts[0], Tensor):
                joined.append(self._sorted(torch.cat(of_parts, dim), dim, is_back=True))
            else:
                entries = [entry for part in of_parts for entry in part]
                order = range(len(entries)) if self.order is None else _inverse(self.order)
                joined.append([entries[place] for place in order])
            if place in self._trained:
                self._sizes.append([] if dim is None else [part.shape[dim] for part in of_parts])
        if self._trained:
            outputs = [joined[place] for place in self._trained]
            inputs = outputs[0].new_zeros(()).requires_grad_(), *self.needs_gradient
            made = _Outputs.apply(self, run_again, outputs, *inputs)  # type: ignore[no-untyped-call]
            for place, tensor in zip(self._trained, made, strict=True):
                joined[place] = tensor
        # without their graph, which leads to this call
        self._given = [joined[place].detach() for place in self._trained]
        return first.make(iter(joined))

    # --- with a graph, and its gradients ----------------------------------------------------------

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
        is_same: list[Tensor] = []
        of_inputs = [torch.zeros_like(leaf) for leaf in self.needs_gradient]
        with self._state.modes_again():
            for index, piece in enumerate(self.pieces):
                self.current = index
                self._random_states[self.current].restore()
                with torch.enable_grad():
                    detached, arguments = self._detached(piece.selector)
                    with self._state.autocast_again():
                        found = leaves(self._run_piece(piece, arguments))
                roots, seeds = [], []
                for place, of_parts, before in zip(self._trained, gradients_of, given, strict=True):
                    if before is not None:
                        is_same += differences(found[place], before[self.current])
                    seed = None if of_parts is None else of_parts[self.current]
                    if seed is None and self.layer.is_sharded:
                        seed = torch.zeros_like(found[place])  # other ranks may have one, and wait
                    if seed is not None and found[place].requires_grad:
                        roots.append(found[place])
                        seeds.append(seed)
                del found, arguments
                if roots:
                    torch.autograd.backward(roots, seeds)
                for total, is_row, leaf in zip(of_inputs, self._have_rows, detached, strict=True):
                    if leaf.grad is not None and is_row:
                        piece.selector.write_back(total, leaf.grad)
                    elif leaf.grad is not None:
                        piece.selector.shared(total).add_(leaf.grad)
                del roots, seeds, detached
            with self._state.autocast_again():
                self._run_shadows(with_a_graph=True)
        if is_same and not bool(torch.stack([flag.to(is_same[0].device) for flag in is_same]).all()):
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

    def _detached(self, selector: RowSelector) -> tuple[list[Tensor], Any]:
        """The inputs that need gradients, and all arguments, for one micro-batch.

        They are cut off from the graph that made them.
        """
        found: list[Tensor] = []

        def detached(leaf: Any, is_row: bool) -> Any:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf = _taken(leaf.detach(), is_row, selector).requires_grad_()
                found.append(leaf)
                return leaf.view_as(leaf)  # the submodule may write into it
            return _taken(leaf, is_row, selector)

        return found, self.arguments.make(map(detached, self.arguments.leaves, self.form.inputs))


class _State:
    """What a call runs in: modes, what is trained, autocast and the default type."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        self._modes = [(inner, inner.training) for inner in module.modules()]
        self._trained = [(own, own.requires_grad) for own in module.parameters()]
        self._autocasts = [
            (kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in dict.fromkeys(("cpu", device.type))
        ]
        self._dtype = torch.get_default_dtype()

    @contextmanager
    def modes_again(self) -> Iterator[None]:
        """In here modes, and which parameters are trained, are those of the call."""
        modes = [inner for inner, is_training in self._modes if inner.training != is_training]
        toggled = [own for own, is_trained in self._trained if own.requires_grad != is_trained]

        def toggle() -> None:
            for inner in modes:
                inner.training = not inner.training
            for own in toggled:
                own.requires_grad_(not own.requires_grad)

        toggle()
        try:
            yield
        finally:
            toggle()

    @contextmanager
    def autocast_again(self) -> Iterator[None]:
        """In here autocast and the default type are those of the call."""
        dtype = torch.get_default_dtype()
        with ExitStack() as stack:
            for kind, of_autocast, is_enabled in self._autocasts:
                if is_enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, of_autocast, is_enabled))
            torch.set_default_dtype(self._dtype)
            stack.callback(torch.set_default_dtype, dtype)
            yield


def _saving_nothing() -> AbstractContextManager[None]:
    """In here others' hooks do not see what is saved for a backward: there will be none."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _versions(tensors: Any) -> list[tuple[Tensor, int]]:
    return [(tensor, tensor._version) for tensor in tensors if not tensor.is_inference()]


def _differ(versions: list[tuple[Tensor, int]]) -> list[bool]:
    return [tensor._version != before for tensor, before in versions]


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _may_need_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _without(tensor: Tensor, dim: int) -> tuple[int, ...]:
    return (*tensor.shape[:dim], *tensor.shape[dim + 1 :])
