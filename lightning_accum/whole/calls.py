"""One call of a row-wise submodule: run in micro-batches without a graph, and again with one once its outputs have gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_accum.randomness import state_outside_torch
from lightning_accum.splitting.micro_batch import Cut
from lightning_accum.splitting.plan import Piece
from lightning_accum.splitting.snapshot import Snapshot
from lightning_accum.whole.trees import first_that_differs, leaves, others, replaced

INSTEAD = 'Have a submodule without it run row-wise, or use micro_batch="offload", which is exact for any module.'


class RowWiseError(RuntimeError):
    """A submodule cannot run in micro-batches."""


@dataclass
class Layer:
    """A submodule that runs in micro-batches.

    Attributes:
        name: in the module.
        module: the submodule.
        run: what its calls ran before they were replaced, hooks included.
        draws_outside_torch: it was seen to use random numbers of Python or numpy.
    """

    name: str
    module: nn.Module
    run: Callable[..., Any]
    draws_outside_torch: bool = False


class Form(NamedTuple):
    """Where the rows are in a call.

    Attributes:
        inputs: which of the input leaves have one entry a row.
        dims: the dimension of each output leaf that has the rows; None for one that is the same for all rows.
        may_be_sorted: each has one entry a row there.
    """

    inputs: tuple[bool, ...]
    dims: tuple[int | None, ...]
    may_be_sorted: bool = False


def taken(arguments: Any, are_rows: Sequence[bool], cut: Cut) -> Any:
    """The arguments with some rows.

    Args:
        arguments: positional and keyword arguments.
        are_rows: which of their leaves have one entry a row.
        cut: what is kept of them.
    """
    kinds = iter(are_rows)
    return replaced(arguments, lambda leaf: _taken(leaf, next(kinds), cut))


def _taken(leaf: Any, is_row: bool, cut: Cut) -> Any:
    if isinstance(leaf, Tensor):
        return cut.tensor(leaf) if is_row else cut.shared(leaf)
    return type(leaf)(cut.entries(leaf)) if is_row else leaf


class _Outputs(torch.autograd.Function):
    """Outputs without a graph of their own, which give their gradients to the call that they are of."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, call: Call, outputs: list[Tensor]) -> tuple[Tensor, ...]:
        ctx.call = call
        ctx.set_materialize_grads(False)
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor, None, None]:
        if torch.is_grad_enabled():
            raise twice_differentiated(ctx.call.layer.name)
        ctx.call.add(gradients)
        return torch.zeros(()), None, None  # not None: hooks of others are on all leaves of a loss


def twice_differentiated(name: str) -> RowWiseError:
    """The error of a step that differentiates through a call by itself."""
    return RowWiseError(
        f"row_wise={name!r}: training_step differentiates through a call of {name!r} by itself (a gradient penalty, an inner step),"
        ' and what ran in micro-batches has no graph for that. Leave row_wise out, and use micro_batch="offload".'
    )


def _recomputed(name: str) -> RowWiseError:
    return RowWiseError(
        f"row_wise={name!r}: a call of {name!r} is inside of a reentrant torch.utils.checkpoint, which has its backward within that"
        f" of the loss. Pass use_reentrant=False, or leave the checkpoint out: what {name!r} saves is not held anyway."
    )


def call_of(node: Any) -> Call | None:
    """The call whose outputs a node of an autograd graph holds; None for any other node."""
    return getattr(node, "call", None) if isinstance(node, _Outputs._backward_cls) else None


@dataclass
class Call:
    """A call of a submodule in a step.

    Attributes:
        layer: the submodule.
        arguments: positional and keyword arguments.
        form: where the rows are.
        pieces: the micro-batches that it runs in.
        order: the rows in their order; None where they keep theirs.
        current: the micro-batch that ran last.
        inputs: the leaves of the arguments, and
        needs_gradient: those of them that need one.
        gradients: of those outputs that need one.
        is_recomputed: it is made within a backward, by a checkpoint.
    """

    layer: Layer
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    form: Form
    pieces: list[Piece]
    order: list[int] | None = None
    is_recomputed: bool = False
    current: int = 0
    gradients: list[Tensor | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inputs = leaves(self.arguments)
        places = [place for place, leaf in enumerate(self.inputs) if isinstance(leaf, Tensor) and leaf.requires_grad]
        self.needs_gradient = [self.inputs[place] for place in places]
        self._have_rows = [self.form.inputs[place] for place in places]
        self._random_states: list[Snapshot] = []  # that the micro-batches were run with
        self._state = _State(self.layer, self.inputs)
        self._trained: list[int] = []  # the places of the outputs with gradients, and
        self._sizes: list[list[int]] = []  # the size of each in the micro-batches
        self._given: list[Tensor] = []  # those outputs, and
        self._shared: list[Tensor] = []  # all that shared memory with others, or with inputs; they count what is written into them

    @property
    def has_gradients(self) -> bool:
        """Some of its outputs have gradients with which it was not run again."""
        return any(gradient is not None for gradient in self.gradients)

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Take in gradients of the outputs."""
        if self.is_recomputed:
            raise _recomputed(self.layer.name)
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                before = self.gradients[place]
                self.gradients[place] = gradient if before is None else before + gradient

    # --- without a graph --------------------------------------------------------------------------------------------

    def run(self, device: torch.device) -> Any:
        """Run all rows.

        Args:
            device: whose random state there is beside the CPU's.

        Returns:
            The outputs, joined, and without a graph.
        """
        state = state_outside_torch()
        output, parts = self._run_all(device)
        if not self.layer.draws_outside_torch and len(parts) > 1 and state_outside_torch() != state:
            self.layer.draws_outside_torch = True
            self._random_states[0].restore()
            output, parts = self._run_all(device)
        self._state.check_unchanged(self.layer)
        return self._joined(output, parts)

    def _run_all(self, device: torch.device) -> tuple[Any, list[list[Any]]]:
        """Run all micro-batches. Returns what the first gave, and the leaves of each, without a graph."""
        self._random_states = []
        first: Any = None
        parts: list[list[Any]] = []
        trained: set[int] = set()
        is_known = False  # which outputs need a gradient, see below
        with self._state.autocast_without_cache(), without_fast_path(), _saving_nothing():
            for index, piece in enumerate(self.pieces):
                self.current = index
                random_state = Snapshot(self.layer.module)
                random_state.keep_random_state(device, bool(parts) and not self.layer.draws_outside_torch)
                self._random_states.append(random_state)
                args, kwargs = taken(self.arguments, self.form.inputs, piece.cut)
                with torch.set_grad_enabled(not is_known):
                    output = self.layer.run(*args, **kwargs)
                found = leaves(output)
                trained |= {place for place, leaf in enumerate(found) if isinstance(leaf, Tensor) and leaf.requires_grad}
                if not parts:
                    first = replaced(output, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)
                    sharing = _sharing_memory(found, leaves((args, kwargs)))
                self._check_outputs(output, found, first, parts)
                # one without a graph may have one for other rows, as where they are routed
                is_known = all(place in trained or not _may_need_gradient(leaf) for place, leaf in enumerate(found))
                parts.append([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in found])
                del output, found, args, kwargs
        self._trained, self._sharing = sorted(trained), sharing
        return first, parts

    def _check_outputs(self, output: Any, found: list[Any], first: Any, parts: list[list[Any]]) -> None:
        if len(found) != len(self.form.dims) or (parts and len(found) != len(parts[0])):
            raise RowWiseError(
                f"row_wise={self.layer.name!r}: the outputs of {self.layer.name!r} are not the same in each micro-batch"
            )
        check_others(self.layer, others(output), others(first))
        for place, (leaf, dim) in enumerate(zip(found, self.form.dims, strict=True)):
            if not parts:
                return
            before = parts[0][place]
            if dim is None:
                is_same = is_close(leaf, before) if isinstance(leaf, Tensor) else leaf == before
                what = "an output that is not the same for all rows, without a dimension that has them"
            else:
                is_same = not isinstance(leaf, Tensor) or _without(leaf.shape, dim) == _without(before.shape, dim)
                what = (
                    f"outputs of other shapes than for other rows, {tuple(leaf.shape)} and {tuple(before.shape)}"
                    if not is_same
                    else ""
                )
            if not is_same:
                raise RowWiseError(f"row_wise={self.layer.name!r}: for some rows {self.layer.name!r} returns {what}. {INSTEAD}")

    def _joined(self, output: Any, parts: list[list[Any]]) -> Any:
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
            self.gradients = [None] * len(self._trained)
            anchor = torch.zeros((), requires_grad=True)
            made = _Outputs.apply(anchor, self, [joined[place] for place in self._trained])  # type: ignore[no-untyped-call]
            for place, tensor in zip(self._trained, made, strict=True):
                joined[place] = tensor
        # without their graph, which leads to this call
        self._given = [joined[place].detach() for place in self._trained]
        self._shared = [joined[place].detach() for place in self._sharing]
        in_order = iter(joined)
        return replaced(output, lambda leaf: next(in_order))

    # --- with a graph, and its gradients ------------------------------------------------------------------------------

    def run_again(self, backward: Callable[[Sequence[Tensor], Sequence[Tensor], bool], None]) -> None:
        """Run it again with a graph, and give the gradients of its outputs to its parameters and its inputs.

        Args:
            backward: of some tensors with these gradients; the last argument is whether the graph is kept.
        """
        self._state.check_same(self.layer)
        gradients, self.gradients = self.gradients, [None] * len(self.gradients)
        gradients_of = [self._parts(gradient, index) for index, gradient in enumerate(gradients)]
        # what was written into since cannot be compared
        given = [None if tensor._version else self._parts(tensor, index) for index, tensor in enumerate(self._given)]
        is_same: list[Tensor] = []
        of_inputs = [torch.zeros_like(leaf) for leaf in self.needs_gradient]
        with self._state.modes_as_before(self.layer.module):
            for index, piece in enumerate(self.pieces):
                self.current = index
                self._random_states[index].restore()
                detached, arguments = self._detached(piece.cut)
                args, kwargs = arguments
                with self._state.autocast_again(), torch.enable_grad():
                    output = self.layer.run(*args, **kwargs)
                roots, seeds = [], []
                found = leaves(output)
                for place, of_parts, before in zip(self._trained, gradients_of, given, strict=True):
                    if before is not None:
                        is_same += _differences(found[place], before[index])
                    seed = None if of_parts is None else of_parts[index]
                    if seed is not None and found[place].requires_grad:
                        roots.append(found[place])
                        seeds.append(seed)
                del output, found, arguments, args, kwargs
                if roots:
                    backward(roots, seeds, False)
                for total, is_row, leaf in zip(of_inputs, self._have_rows, detached, strict=True):
                    if leaf.grad is not None and is_row:
                        piece.cut.write_back(total, leaf.grad)
                    elif leaf.grad is not None:
                        piece.cut.shared(total).add_(leaf.grad)
                del roots, seeds, detached
        if is_same and not bool(torch.stack([flag.to(is_same[0].device) for flag in is_same]).all()):
            raise RowWiseError(
                f"row_wise={self.layer.name!r}: run again for its backward, a call of {self.layer.name!r} has other outputs than"
                " before. It depends on something beside its arguments, its parameters and the global random numbers, such as an"
                f" attribute that is set between calls, or a generator of its own. Pass it as an argument. {INSTEAD}"
            )
        if self.needs_gradient:
            backward(self.needs_gradient, of_inputs, True)  # other calls may have the same inputs

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

    def _detached(self, cut: Cut) -> tuple[list[Tensor], Any]:
        """The inputs that need gradients, and all arguments, for one micro-batch: cut off from the graph that made them."""
        found: list[Tensor] = []
        kinds = iter(self.form.inputs)

        def detached(leaf: Any) -> Any:
            is_row = next(kinds)
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf = _taken(leaf.detach(), is_row, cut).requires_grad_()
                found.append(leaf)
                return leaf.view_as(leaf)  # the submodule may write into it
            return _taken(leaf, is_row, cut)

        return found, replaced(self.arguments, detached)


def _inverse(order: list[int]) -> list[int]:
    return sorted(range(len(order)), key=order.__getitem__)


class _State:
    """What a call depends on beside its arguments, which has to be the same when it runs again."""

    def __init__(self, layer: Layer, inputs: list[Any]) -> None:
        module = layer.module
        self._modes = [inner.training for inner in module.modules()]
        parameters = list(module.parameters())
        self._are_trained = [parameter.requires_grad for parameter in parameters]
        self._tensors = [*parameters, *(leaf for leaf in inputs if isinstance(leaf, Tensor))]
        self._versions = _versions(self._tensors)
        self._buffers = list(module.buffers())
        self._versions_of_buffers = _versions(self._buffers)
        kinds = dict.fromkeys(("cpu", *(tensor.device.type for tensor in self._tensors)))
        self._autocasts = [(kind, torch.get_autocast_dtype(kind), torch.is_autocast_enabled(kind)) for kind in kinds]
        self._dtype = torch.get_default_dtype()

    def check_unchanged(self, layer: Layer) -> None:
        """Raise where the call has changed what it depends on."""
        if _versions(self._buffers) != self._versions_of_buffers:
            names = {id(buffer): name for name, buffer in layer.module.named_buffers()}
            changed = next(b for b, before in zip(self._buffers, self._versions_of_buffers, strict=True) if b._version != before)
            raise RowWiseError(
                f"row_wise={layer.name!r}: a call changes the buffer {layer.name}.{names.get(id(changed), '?')}, as if each micro-"
                'batch were a batch. Have another submodule run row-wise, or use micro_batch="offload".'
            )
        if _versions(self._tensors) != self._versions:
            raise RowWiseError(
                f"row_wise={layer.name!r}: a call changes its input or its parameters in place, and would again when it is run"
                " again. Have it change a copy."
            )

    def check_same(self, layer: Layer) -> None:
        """Raise where what the call depends on is not what it was."""
        parameters = list(layer.module.parameters())
        is_same = all(now is before for now, before in zip(parameters, self._tensors, strict=False))
        if not is_same or _versions(self._tensors) != self._versions:
            raise RowWiseError(
                f"row_wise={layer.name!r}: the parameters or inputs of a call were changed or exchanged before its backward,"
                " in which it runs again (an optimizer step in between, functional_call). Run the backward first, or use"
                ' micro_batch="offload".'
            )

    @contextmanager
    def modes_as_before(self, module: nn.Module) -> Iterator[None]:
        """In here training and evaluation mode, and which parameters are trained, are those of the call."""
        modules = list(module.modules())
        modes = [(inner, inner.training) for inner, mode in zip(modules, self._modes, strict=True) if inner.training != mode]
        trained = zip(module.parameters(), self._are_trained, strict=True)
        toggled = [parameter for parameter, is_trained in trained if parameter.requires_grad != is_trained]
        for inner, mode in modes:
            inner.training = not mode
        for parameter in toggled:
            parameter.requires_grad_(not parameter.requires_grad)
        try:
            yield
        finally:
            for inner, mode in modes:
                inner.training = mode
            for parameter in toggled:
                parameter.requires_grad_(not parameter.requires_grad)

    @contextmanager
    def autocast_without_cache(self) -> Iterator[None]:
        """In here no weight without a graph is cached, which a later use with one would find."""
        with ExitStack() as stack:
            for kind, dtype, is_enabled in self._autocasts:
                if is_enabled:
                    stack.enter_context(torch.autocast(kind, dtype, cache_enabled=False))
            yield

    @contextmanager
    def autocast_again(self) -> Iterator[None]:
        """In here autocast and the default type are those of the call."""
        dtype = torch.get_default_dtype()
        with ExitStack() as stack:
            for kind, of_autocast, is_enabled in self._autocasts:
                if is_enabled or torch.is_autocast_enabled(kind):
                    stack.enter_context(torch.autocast(kind, of_autocast, is_enabled))
            torch.set_default_dtype(self._dtype)
            try:
                yield
            finally:
                torch.set_default_dtype(dtype)


def _versions(tensors: Sequence[Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


# --- what outputs have to be -------------------------------------------------------------------------------------------


def check_others(layer: Layer, found: list[Any], expected: list[Any]) -> None:
    """Raise where what is no tensor in the outputs for some rows is not what it is for others."""
    differing = first_that_differs(found, expected)
    if differing is not None:
        raise RowWiseError(
            f"row_wise={layer.name!r}: {layer.name!r} returns {differing[0]!r} for some rows and {differing[1]!r} for others, which"
            " cannot be joined: have it return tensors, with one entry a row."
        )


def is_close(found: Tensor, expected: Tensor) -> bool:
    """Whether two tensors are equal but for rounding."""
    if found.shape != expected.shape:
        return False
    return all(map(bool, _differences(found, expected)))


def _differences(found: Tensor, expected: Tensor | None) -> list[Tensor]:
    """Whether they are equal but for rounding, on their device; empty where they are equal."""
    found = found.detach()
    if expected is None or (found.device.type == "cpu" and torch.equal(found, expected)):
        return []
    if found.is_complex():
        found, expected = torch.view_as_real(found), torch.view_as_real(expected)
    if not found.is_floating_point():
        return [(found == expected).all()]
    kind = expected.device.type
    dtypes = [expected.dtype, *([torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else [])]
    eps = max(torch.finfo(dtype).eps for dtype in dtypes)
    if expected.is_cuda and expected.dtype == torch.float32:
        eps = max(eps, 2**-10)  # TF32
    found, expected = found.double(), expected.double()
    difference = (found - expected).nan_to_num(0.0, 0.0, 0.0).norm()
    is_near = difference <= eps**0.6 * expected.nan_to_num(0.0, 0.0, 0.0).norm()
    return [is_near & (found.isfinite() == expected.isfinite()).all()]


def _may_need_gradient(leaf: Any) -> bool:
    return isinstance(leaf, Tensor) and (leaf.is_floating_point() or leaf.is_complex())


def _without(shape: Sequence[int], dim: int) -> tuple[int, ...]:
    return (*shape[:dim], *shape[dim + 1 :])


def _sharing_memory(outputs: list[Any], arguments: list[Any]) -> list[int]:
    """The places of outputs that share memory with another output, or with an argument."""
    taken = [_storage(leaf) for leaf in arguments]
    stored = [_storage(leaf) for leaf in outputs]
    return [place for place, own in enumerate(stored) if own and (own in taken or stored.count(own) > 1)]


def _storage(leaf: Any) -> int:
    return leaf.untyped_storage().data_ptr() if isinstance(leaf, Tensor) and leaf.layout is torch.strided else 0


@contextmanager
def without_fast_path() -> Iterator[None]:
    """In here attention without a graph computes as it does with one, in padding too."""
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


def _saving_nothing() -> AbstractContextManager[None]:
    """In here others' hooks do not see what is saved for a backward: there will be none."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)
