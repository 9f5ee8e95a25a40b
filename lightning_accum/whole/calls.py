"""One call of a row-wise submodule: run in micro-batches without a graph, and again with one once its outputs have gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from lightning_accum.splitting.snapshot import Snapshot
from lightning_accum.whole.trees import leaves, replaced


class RowWiseError(RuntimeError):
    """A submodule cannot run in micro-batches."""


@dataclass
class Layer:
    """A submodule that runs in micro-batches.

    Attributes:
        name: in the module.
        module: the submodule.
        run: what its calls ran before they were replaced, hooks included.
    """

    name: str
    module: nn.Module
    run: Callable[..., Any]


class Form(NamedTuple):
    """Where the rows are in a call.

    Attributes:
        inputs: which of the input leaves have one entry a row.
        dims: the dimension of each output leaf that has the rows; None for one that is the same for all rows.
    """

    inputs: tuple[bool, ...]
    dims: tuple[int | None, ...]


class Slice:
    """Some rows of a call's inputs, and the random state that they were run with."""

    def __init__(self, start: int, stop: int, random_state: Snapshot) -> None:
        self.rows = slice(start, stop)
        self.random_state = random_state

    def of(self, arguments: Any, are_rows: Sequence[bool]) -> Any:
        """The arguments with these rows."""
        kinds = iter(are_rows)
        return replaced(arguments, lambda leaf: leaf[self.rows] if next(kinds) else leaf)


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
        slices: the micro-batches that it ran in.
        inputs: the leaves of the arguments, and
        needs_gradient: those of them that need one.
        gradients: of those outputs that need one.
    """

    layer: Layer
    arguments: tuple[tuple[Any, ...], dict[str, Any]]
    form: Form
    slices: list[Slice] = field(default_factory=list)
    gradients: list[Tensor | None] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.inputs = leaves(self.arguments)
        self.needs_gradient = [leaf for leaf in self.inputs if isinstance(leaf, Tensor) and leaf.requires_grad]
        self._state = _State(self.layer, self.inputs)
        self._trained: list[int] = []  # the places of the outputs with gradients, and
        self._sizes: list[list[int]] = []  # the size of each in the micro-batches

    @property
    def has_gradients(self) -> bool:
        """Some of its outputs have gradients with which it was not run again."""
        return any(gradient is not None for gradient in self.gradients)

    def add(self, gradients: Sequence[Tensor | None]) -> None:
        """Take in gradients of the outputs."""
        for place, gradient in enumerate(gradients):
            if gradient is not None:
                before = self.gradients[place]
                self.gradients[place] = gradient if before is None else before + gradient

    # --- without a graph --------------------------------------------------------------------------------------------

    def run(self, rows: int, number: int, device: torch.device) -> Any:
        """Run all rows.

        Args:
            rows: of a micro-batch.
            number: of all.
            device: whose random state there is beside the CPU's.

        Returns:
            The outputs, joined, and without a graph.
        """
        self.slices = [Slice(start, min(start + rows, number), None) for start in range(0, number, rows)]  # type: ignore[arg-type]
        parts: list[list[Any]] = []
        with self._state.autocast_without_cache():
            for index, part in enumerate(self.slices):
                part.random_state = Snapshot(self.layer.module)
                part.random_state.keep_random_state(device)
                args, kwargs = part.of(self.arguments, self.form.inputs)
                # the first shows which outputs need a gradient
                with torch.set_grad_enabled(index == 0):
                    output = self.layer.run(*args, **kwargs)
                found = leaves(output)
                if index == 0:
                    first = replaced(output, lambda leaf: leaf.detach() if isinstance(leaf, Tensor) else leaf)
                    self._trained = [place for place, leaf in enumerate(found) if isinstance(leaf, Tensor) and leaf.requires_grad]
                self._check_outputs(found, parts)
                parts.append([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in found])
                del output, found, args, kwargs
        self._state.check_unchanged(self.layer)
        return self._joined(first, parts)

    def _check_outputs(self, found: list[Any], parts: list[list[Any]]) -> None:
        if len(found) != len(self.form.dims) or (parts and len(found) != len(parts[0])):
            raise RowWiseError(
                f"row_wise={self.layer.name!r}: the outputs of {self.layer.name!r} are not the same in each micro-batch"
            )

    def _joined(self, output: Any, parts: list[list[Any]]) -> Any:
        joined: list[Any] = []
        self._sizes = []
        for place, dim in enumerate(self.form.dims):
            of_parts = [part[place] for part in parts]
            if dim is None:
                joined.append(of_parts[0].clone() if isinstance(of_parts[0], Tensor) else of_parts[0])
            elif isinstance(of_parts[0], Tensor):
                joined.append(torch.cat(of_parts, dim))
            else:
                joined.append([entry for part in of_parts for entry in part])
            if place in self._trained:
                self._sizes.append([] if dim is None else [part.shape[dim] for part in of_parts])
        if self._trained:
            self.gradients = [None] * len(self._trained)
            anchor = torch.zeros((), requires_grad=True)
            made = _Outputs.apply(anchor, self, [joined[place] for place in self._trained])  # type: ignore[no-untyped-call]
            for place, tensor in zip(self._trained, made, strict=True):
                joined[place] = tensor
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
        pieces = [
            None if gradient is None or dim is None else torch.split(gradient, sizes, dim)
            for gradient, dim, sizes in zip(gradients, (self.form.dims[place] for place in self._trained), self._sizes, strict=True)
        ]
        of_inputs: list[list[Tensor]] = [[] for _ in self.needs_gradient]
        with self._state.modes_as_before(self.layer.module):
            for index, part in enumerate(self.slices):
                part.random_state.restore()
                cut, arguments = self._detached(part)
                args, kwargs = arguments
                with self._state.autocast_again(), torch.enable_grad():
                    output = self.layer.run(*args, **kwargs)
                roots, seeds = [], []
                found = leaves(output)
                for place, gradient, piece in zip(self._trained, gradients, pieces, strict=True):
                    # what is the same for all rows gets its gradient in the first micro-batch
                    seed = piece[index] if piece is not None else gradient if index == 0 else None
                    if seed is not None and found[place].requires_grad:
                        roots.append(found[place])
                        seeds.append(seed)
                del output, found, arguments, args, kwargs
                if roots:
                    backward(roots, seeds, False)
                for gathered, leaf in zip(of_inputs, cut, strict=True):
                    gathered.append(torch.zeros_like(leaf) if leaf.grad is None else leaf.grad)
                del roots, seeds, cut
        if self.needs_gradient:
            backward(self.needs_gradient, list(self._joined_gradients(of_inputs)), True)  # other calls may have the same inputs

    def _detached(self, part: Slice) -> tuple[list[Tensor], Any]:
        """The inputs that need gradients, and all arguments, for one micro-batch: cut off from the graph that made them."""
        cut: list[Tensor] = []
        kinds = iter(self.form.inputs)

        def detached(leaf: Any) -> Any:
            is_row = next(kinds)
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf = (leaf.detach()[part.rows] if is_row else leaf.detach()).requires_grad_()
                cut.append(leaf)
                return leaf.view_as(leaf)  # the submodule may write into it
            return leaf[part.rows] if is_row else leaf

        return cut, replaced(self.arguments, detached)

    def _joined_gradients(self, of_inputs: list[list[Tensor]]) -> Iterator[Tensor]:
        kinds = [
            kind
            for kind, leaf in zip(self.form.inputs, self.inputs, strict=True)
            if isinstance(leaf, Tensor) and leaf.requires_grad
        ]
        for is_row, gathered in zip(kinds, of_inputs, strict=True):
            yield torch.cat(gathered) if is_row else torch.stack(gathered).sum(0)


class _State:
    """What a call depends on beside its arguments, which has to be the same when it runs again."""

    def __init__(self, layer: Layer, inputs: list[Any]) -> None:
        module = layer.module
        self._modes = [inner.training for inner in module.modules()]
        self._tensors = [*module.parameters(), *(leaf for leaf in inputs if isinstance(leaf, Tensor))]
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
        """In here training and evaluation mode are those of the call."""
        now = [inner.training for inner in module.modules()]
        for inner, mode in zip(module.modules(), self._modes, strict=True):
            inner.training = mode
        try:
            yield
        finally:
            for inner, mode in zip(module.modules(), now, strict=True):
                inner.training = mode

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
