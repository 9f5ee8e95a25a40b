"""One call of a row-wise submodule: run in micro-batches without a graph, and again with one once its outputs have gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor

from lightning_accum.dispatch import in_eager_mode
from lightning_accum.errors import RowWiseError
from lightning_accum.randomness import RandomState
from lightning_accum.splitting.micro_batch import RowSelector
from lightning_accum.splitting.plan import RowSlice
from lightning_accum.whole.call_state import CallState, as_with_a_graph, saving_nothing
from lightning_accum.whole.gradient_proof import LeftBehind
from lightning_accum.whole.layers import INSTEAD, Layer, check_others, differences, is_close, sharing_memory
from lightning_accum.whole.trees import Tree, leaves, read

RunAgain: TypeAlias = "Callable[[Call, Sequence[Tensor | None]], Sequence[Tensor | None]]"
"""Of a call, from the gradients of its outputs: those of its inputs."""


@dataclass
class Form:
    """Where the rows are in calls of one kind.

    Attributes:
        inputs: which of the input leaves have one entry a row.
        dims: the dimension of each output leaf that has the rows; None for one that is the same for all rows.
        may_be_sorted: each has one entry a row there.
        is_watched: it was looked at what a call in several micro-batches leaves behind.
    """

    inputs: tuple[bool, ...]
    dims: tuple[int | None, ...]
    may_be_sorted: bool = False
    is_watched: bool = False


def taken(arguments: Tree, are_rows: Sequence[bool], selector: RowSelector) -> Any:
    """The arguments with some rows.

    Args:
        arguments: positional and keyword arguments.
        are_rows: which of their leaves have one entry a row.
        selector: what is kept of them.
    """
    return arguments.make(_taken(leaf, is_row, selector) for leaf, is_row in zip(arguments.leaves, are_rows, strict=True))


def _taken(leaf: Any, is_row: bool, selector: RowSelector) -> Any:
    if isinstance(leaf, Tensor):
        return selector.tensor(leaf) if is_row else selector.shared(leaf)
    return type(leaf)(selector.entries(leaf)) if is_row else leaf


class _Outputs(torch.autograd.Function):
    """Outputs without a graph of their own, in whose backward the call runs again."""

    @staticmethod
    def forward(ctx: Any, call: Call, run_again: RunAgain, outputs: list[Tensor], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.call, ctx.run_again = call, run_again
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled() or not torch.autograd._is_checkpoint_valid():  # type: ignore[no-untyped-call]
            raise twice_differentiated(ctx.call.layer.name)
        # not None of what has no inputs: hooks of others are on all leaves of a loss
        return None, None, None, torch.zeros(()), *ctx.run_again(ctx.call, gradients)


def twice_differentiated(name: str) -> RowWiseError:
    """The error of a step that differentiates through a call by itself."""
    return RowWiseError(
        f"row_wise={name!r}: training_step differentiates through a call of {name!r} by itself (a gradient penalty, an inner step),"
        ' and what ran in micro-batches has no graph for that. Leave row_wise out, and use micro_batch="offload".'
    )


@dataclass
class Call:
    """A call of a submodule in a step.

    Attributes:
        layer: the submodule.
        arguments: positional and keyword arguments, taken apart.
        form: where the rows are.
        pieces: the micro-batches that it runs in.
        order: the rows in their order; None where they keep theirs.
        shadows: micro-batches that other ranks have more: this one takes part in them with its last, which counts for nothing.
        is_inside: this call, or another one, is running, or running again.
        left: what was computed in the last micro-batch of the first such call, and is still there.
        current: the micro-batch that ran last.
        inputs: the leaves of the arguments, and
        needs_gradient: those of them that need one.
    """

    layer: Layer
    arguments: Tree
    form: Form
    pieces: list[RowSlice]
    order: list[int] | None
    shadows: int
    is_inside: Callable[[], bool]
    left: LeftBehind | None = None
    current: int = 0

    def __post_init__(self) -> None:
        self.inputs = self.arguments.leaves
        places = [place for place, leaf in enumerate(self.inputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self.needs_gradient = [self.inputs[place] for place in places]
        self._have_rows = [self.form.inputs[place] for place in places]
        self._random_states: list[RandomState] = []  # that the micro-batches were run with
        self._state = CallState(self.layer, self.inputs)
        self._trained: list[int] = []  # the places of the outputs with gradients, and
        self._sizes: list[list[int]] = []  # the size of each in the micro-batches
        self._given: list[Tensor] = []  # those outputs, and
        self._shared: list[Tensor] = []  # all that shared memory with others, or with inputs; they count what is written into them

    # --- without a graph --------------------------------------------------------------------------------------------

    def run(self, device: torch.device, run_again: RunAgain) -> Any:
        """Run all rows.

        Args:
            device: whose random state there is beside the CPU's.
            run_again: is called in the backward of the outputs, with their gradients.

        Returns:
            The outputs, joined, and without a graph.
        """
        self._device = device
        first, parts = self._run_all(device)
        if not self.layer.draws_outside_torch and len(parts) > 1 and self._random_states[0].others_have_drawn():
            self.layer.draws_outside_torch = True
            self._random_states[0].restore()
            first, parts = self._run_all(device)
        if not (self._random_states[0].torch_has_drawn() or self._random_states[0].others_have_drawn()):
            self._random_states.clear()  # it draws nothing
        self._state.check_unchanged(self.layer)
        if self.left is not None:
            self.left.watch()
        return self._joined(first, parts, run_again)

    def _run_all(self, device: torch.device) -> tuple[Tree, list[list[Any]]]:
        """Run all micro-batches. Returns what the first gave, and the leaves of each, without a graph."""
        self._random_states = []
        parts: list[list[Any]] = []
        trained: set[int] = set()
        is_known = False  # which outputs need a gradient, see below
        if len(self.pieces) > 1 and not self.form.is_watched and not self.layer.is_sharded:
            self.left, self.form.is_watched = LeftBehind(self.layer, self.is_inside), True
        with as_with_a_graph(), saving_nothing():
            for index, piece in enumerate(self.pieces):
                self.current = index
                self._random_states.append(RandomState(device, bool(parts) and not self.layer.draws_outside_torch))
                args, kwargs = taken(self.arguments, self.form.inputs, piece.selector)
                with torch.set_grad_enabled(not is_known), self._looking_at(piece):
                    output = self.layer.run(*args, **kwargs)
                found, _, others, make = read(output)
                trained |= {place for place, leaf in enumerate(found) if isinstance(leaf, Tensor) and leaf.requires_grad}
                without_graph = [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in found]
                if not parts:
                    first = read(make(iter(without_graph)))
                    sharing = sharing_memory(found, leaves((args, kwargs)))
                self._check_outputs(found, others, first, parts)
                # one without a graph may have one for other rows, as where they are routed
                is_known = all(place in trained or not _may_need_gradient(leaf) for place, leaf in enumerate(found))
                parts.append(without_graph)
                del output, found, make, args, kwargs
            self._run_shadows()
        self._trained, self._sharing = sorted(trained), sharing
        return first, parts

    @contextmanager
    def _looking_at(self, piece: RowSlice) -> Iterator[None]:
        """In here it is noted what the last micro-batch computes, where that is to be looked at."""
        if self.left is None or piece is not self.pieces[-1]:
            yield
            return
        with in_eager_mode(), self.left:
            yield

    def _run_shadows(self, with_a_graph: bool = False) -> None:
        """Take part in the micro-batches that other ranks have more."""
        if not self.shadows:
            return
        now = RandomState(self._device)
        for _ in range(self.shadows):
            with torch.set_grad_enabled(with_a_graph):
                _, (args, kwargs) = self._detached(self.pieces[-1].selector)
                found = leaves(self.layer.run(*args, **kwargs))
            if with_a_graph:
                roots = [found[place] for place in self._trained if found[place].requires_grad]
                _backward(roots, [torch.zeros_like(root) for root in roots])
        now.restore()

    def _check_outputs(self, found: list[Any], others: list[Any], first: Tree, parts: list[list[Any]]) -> None:
        if len(found) != len(self.form.dims) or (parts and len(found) != len(parts[0])):
            raise RowWiseError(
                f"row_wise={self.layer.name!r}: the outputs of {self.layer.name!r} are not the same in each micro-batch"
            )
        check_others(self.layer, others, first.others)
        for leaf, before, dim in zip(found, parts[0], self.form.dims, strict=True) if parts else ():
            what = ""
            if dim is None and not (is_close(leaf, before) if isinstance(leaf, Tensor) else leaf == before):
                what = "an output that is not the same for all rows, without a dimension that has them"
            elif dim is not None and isinstance(leaf, Tensor) and _without(leaf.shape, dim) != _without(before.shape, dim):
                what = f"outputs of other shapes than for other rows, {tuple(leaf.shape)} and {tuple(before.shape)}"
            if what:
                raise RowWiseError(f"row_wise={self.layer.name!r}: for some rows {self.layer.name!r} returns {what}. {INSTEAD}")

    def _joined(self, first: Tree, parts: list[list[Any]], run_again: RunAgain) -> Any:
        joined: list[Any] = []
        self._sizes = []
        for place, dim in enumerate(self.form.dims):
            of_parts = [part[place] for part in parts]
            if dim is None:
                joined.append(of_parts[0].clone() if isinstance(of_parts[0], Tensor) else of_parts[0])
            elif isinstance(of_parts[0], Tensor):
                joined.append(self._sorted(torch.cat(of_parts, dim), dim, is_back=True))
            else:
                entries = [entry for part in of_parts for entry in part]
                joined.append(entries if self.order is None else [entries[place] for place in _inverse(self.order)])
            if place in self._trained:
                self._sizes.append([] if dim is None else [part.shape[dim] for part in of_parts])
        if self._trained:
            inputs = torch.zeros((), requires_grad=True), *self.needs_gradient
            made = _Outputs.apply(self, run_again, [joined[place] for place in self._trained], *inputs)  # type: ignore[no-untyped-call]
            for place, tensor in zip(self._trained, made, strict=True):
                joined[place] = tensor
        # without their graph, which leads to this call
        self._given = [joined[place].detach() for place in self._trained]
        self._shared = [joined[place].detach() for place in self._sharing]
        return first.make(iter(joined))

    # --- with a graph, and its gradients ------------------------------------------------------------------------------

    def run_again(self, gradients: Sequence[Tensor | None]) -> list[Tensor]:
        """Run it again with a graph, and give the gradients of its outputs to its parameters.

        Returns:
            Those of its inputs.
        """
        self._state.check_same(self.layer)
        gradients_of = [self._parts(gradient, index) for index, gradient in enumerate(gradients)]
        # what was written into since cannot be compared
        given = [None if tensor._version else self._parts(tensor, index) for index, tensor in enumerate(self._given)]
        is_same: list[Tensor] = []
        autocast_again = self._state.autocast_again()
        of_inputs = [torch.zeros_like(leaf) for leaf in self.needs_gradient]
        with self._state.modes_as_before():
            for index, piece in enumerate(self.pieces):
                self.current = index
                if self._random_states:
                    self._random_states[index].restore()
                with torch.enable_grad():
                    detached, arguments = self._detached(piece.selector)
                    args, kwargs = arguments
                    with autocast_again():
                        output = self.layer.run(*args, **kwargs)
                roots, seeds = [], []
                found = leaves(output)
                for place, of_parts, before in zip(self._trained, gradients_of, given, strict=True):
                    if before is not None:
                        is_same += differences(found[place], before[index])
                    seed = None if of_parts is None else of_parts[index]
                    if seed is None and self.layer.is_sharded:
                        seed = torch.zeros_like(found[place])  # other ranks may have one, and wait
                    if seed is not None and found[place].requires_grad:
                        roots.append(found[place])
                        seeds.append(seed)
                del output, found, arguments, args, kwargs
                if roots:
                    _backward(roots, seeds)
                for total, is_row, leaf in zip(of_inputs, self._have_rows, detached, strict=True):
                    if leaf.grad is not None and is_row:
                        piece.selector.write_back(total, leaf.grad)
                    elif leaf.grad is not None:
                        piece.selector.shared(total).add_(leaf.grad)
                del roots, seeds, detached
            with autocast_again():
                self._run_shadows(with_a_graph=True)
        if is_same and not bool(torch.stack([flag.to(is_same[0].device) for flag in is_same]).all()):
            raise RowWiseError(
                f"row_wise={self.layer.name!r}: run again for its backward, a call of {self.layer.name!r} has other outputs than"
                " before. It depends on something beside its arguments, its parameters and the global random numbers, such as an"
                f" attribute that is set between calls, or a generator of its own. Pass it as an argument. {INSTEAD}"
            )
        return of_inputs

    def check_unwritten(self) -> None:
        """Raise where an output was written into that the step would have seen change elsewhere too."""
        if any(tensor._version for tensor in self._shared):
            raise RowWiseError(
                f"row_wise={self.layer.name!r}: an output of {self.layer.name!r} that shares memory with another one, or with an"
                " argument, was written into, and here each is a tensor of its own. Write into a copy."
            )

    def _parts(self, whole: Tensor | None, index: int) -> Sequence[Tensor | None] | None:
        """Of each micro-batch, of an output with gradients or its gradient. What is the same for all rows is in the first."""
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
        """The inputs that need gradients, and all arguments, for one micro-batch: cut off from the graph that made them."""
        found: list[Tensor] = []

        def detached(leaf: Any, is_row: bool) -> Any:
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf = _taken(leaf.detach(), is_row, selector).requires_grad_()
                found.append(leaf)
                return leaf.view_as(leaf)  # the submodule may write into it
            return _taken(leaf, is_row, selector)

        return found, self.arguments.make(map(detached, self.inputs, self.form.inputs))


def _backward(roots: Sequence[Tensor], seeds: Sequence[Tensor]) -> None:
    run: Any = torch.autograd._engine_run_backward  # type: ignore[attr-defined]  # without what torch.autograd.backward asks of each
    run(tuple(roots), tuple(seeds), False, False, (), allow_unreachable=True, accumulate_grad=True)


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


def _may_need_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])
