"""Row-wise submodules: the step sees the whole batch, but the submodules run in micro-batches.

A call runs in micro-batches, each below a checkpoint, and its outputs, joined, are one node in the graph of the step. In the
backward of that node the micro-batches run again, one after the other, with the same random numbers, and each gets its part of the
gradient (GradCache, arXiv 2101.06983). Any loss of the outputs gets the gradient of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from functools import partial
from itertools import permutations
from typing import Any, TypeAlias, cast

import torch
from torch import Tensor, nn
from torch.autograd import Variable
from torch.utils.checkpoint import checkpoint, set_checkpoint_early_stop

from lightning_accum.errors import ArgumentError, RowWiseError
from lightning_accum.policy import Policy, Tokens
from lightning_accum.randomness import RandomState
from lightning_accum.ranks import Ranks
from lightning_accum.splitting.plan import columns_of
from lightning_accum.undo import replacing, version_of
from lightning_accum.whole.forms import HINT, Form, Layer, Tree, check_outputs, form_of, is_near, kind_of, number_of_rows, read

_MOST_PROOFS = 8  # loader batches for the proof at most, until there was a gradient to compare
NoiseOfCall: TypeAlias = Callable[[int, Sequence[int], int], AbstractContextManager[None]]
"""The context of some rows of a call during a trial, by the number of the call, the rows, and the total."""


@dataclass(eq=False)
class RowWise:
    """Runs submodules in micro-batches, in steps that see the whole batch. An ArgumentError names a wrong name."""

    module: nn.Module  # the module in training
    names: Sequence[str]  # of its submodules
    size: int | Tokens | None  # rows, or tokens, of a micro-batch; None to run calls unchanged, in a trial
    device: torch.device  # the device of the module
    largest: Callable[..., Sequence[float]] | None = None  # maximum over the ranks, if they wait for each other in each forward
    draws: NoiseOfCall | None = None  # gives rows their random numbers in a trial
    proofs_left: int = 0  # loader batches left for the proof, until one shows a gradient

    def __post_init__(self) -> None:
        self._named = _named(self.module, self.names)
        self.names = list(self._named)
        self.kinds: set[Hashable] = set()  # the kinds of their calls
        self._called: set[str] = set()
        self._warn_of_kind: Callable[[str], None] | None = None
        self._forms: dict[Hashable, Form] = {}
        self._rows: int | None = None
        self._number = 0
        self._is_inside = self._is_over = False

    def end_proofs(self, kinds: set[Hashable], warn: Callable[[str], None] | None) -> None:
        """End the proof for these kinds of calls; ``warn`` gets the name of a submodule with a new kind. Or give up."""
        self.proofs_left, self._warn_of_kind = 0, warn
        self.kinds |= kinds

    def begin_proof(self) -> None:
        """Use one loader batch for the proof."""
        self.proofs_left -= 1

    def describe(self) -> str:
        """The submodules in micro-batches, in words."""
        size = f"up to {self.size.count} tokens" if isinstance(self.size, Tokens) else self.size
        return f"{', '.join(self.names)} in micro-batches of {size}"

    @contextmanager
    def step(self, rows: int | None = None) -> Iterator[None]:
        """Inside, from the forward to the end of the backward, calls of the submodules run in micro-batches.

        ``rows`` is the number of rows of the batch, if known.
        """
        self._rows, self._number, self._is_over = rows, 0, False
        with ExitStack() as stack:
            for name, module in self._named.items():
                layer = Layer(name, module, vars(module).get("_compiled_call_impl") or module._call_impl, self.largest is not None)
                # hooks are included, as in nn.Module.compile
                stack.enter_context(replacing(module, _compiled_call_impl=partial(self._call, layer)))
            yield

    def end_backward(self) -> None:
        """End the backward, on all ranks of sharded submodules. Raises if a submodule was not called."""
        self._is_over = True
        self._check_is_next(0)
        if missing := [name for name in self.names if name not in self._called]:
            found = "training_step does not call it. Name a submodule that is called as self.encoder(x), not by another method."
            raise RowWiseError.of(missing[0], found)

    def _call(self, layer: Layer, *args: Any, **kwargs: Any) -> Any:
        if self._is_inside or self._is_over or not torch.is_grad_enabled():
            return layer.run(*args, **kwargs)
        self._called.add(layer.name)
        arguments = read((args, kwargs), layer)
        rows = number_of_rows(layer, arguments, self._rows)
        self._number += 1

        def run(piece: range, given: Any, number: int = self._number) -> Any:
            args, kwargs = given
            with replacing(self, _is_inside=True), nullcontext() if self.draws is None else self.draws(number, piece, rows):
                return layer.run(*args, **kwargs)

        is_one = rows < 2 or (isinstance(self.size, int) and rows <= self.size)
        if self.size is None or (is_one and self.largest is None):  # as it is
            output = run(range(rows), arguments.make(arguments.values))
            with suppress(RowWiseError):  # its output may hide tensors
                tree = read(output, layer)
                # copies, so that a later write does not change the saved outputs silently
                output = tree.make(as_one_node([x.clone() if isinstance(x, Tensor) else x for x in tree.values]))
            return output
        form = self._form(layer, arguments, rows, run)
        pieces, begin_backward, shadows = self._pieces(self.size, arguments, form, rows), None, 0
        if self.largest is not None:
            shadows = int(self.largest(float(len(pieces)))[0]) - len(pieces)
            begin_backward = partial(self._check_is_next, self._number)
        return Call(layer, arguments, form, pieces, shadows, run, begin_backward, self.device).run()

    def _form(self, layer: Layer, arguments: Tree, rows: int, run: Callable[[range, Any], Any]) -> Form:
        fitting = tuple(leaf.size == rows for leaf in arguments.leaves)
        kind = kind_of(layer, arguments)
        form = self._forms.get((fitting, kind))
        if self.largest is not None:
            is_needed, fewest = self.largest(float(form is None), float(-rows))
            if fewest >= -1:
                raise RowWiseError.of(layer.name, "it is called with one row on a rank: have the loader yield at least two.")
            form = None if is_needed else form
        if form is None:
            form = self._forms[fitting, kind] = form_of(layer, arguments, fitting, rows, run)
        if (kind, form) not in self.kinds and self._warn_of_kind is not None:
            self._warn_of_kind(layer.name)
        self.kinds.add((kind, form))
        return form

    def _pieces(self, size: int | Tokens, arguments: Tree, form: Form, rows: int) -> list[range]:
        if isinstance(size, Tokens):
            pairs = zip(arguments.leaves, form.inputs, strict=True)
            size = size.at(0) // max(1, *columns_of({leaf.path: leaf.value for leaf, is_row in pairs if is_row and leaf.is_tensor}))
        step = max(1, size)
        return [range(start, min(start + step, rows)) for start in range(0, rows, step)]

    def _check_is_next(self, number: int) -> None:
        """Raise on all ranks of sharded submodules unless all continue with the same call; 0 for none."""
        if self.largest is None:
            return
        last, first = self.largest(float(number), float(-number))
        if last != -first:
            raise RowWiseError("row_wise= of sharded submodules: have the loss of each rank depend on the same calls of them.")


def row_wise_of(policy: Policy, module: nn.Module, ranks: Ranks, is_sharded: bool) -> RowWise | None:
    """Constructs a :class:`RowWise`; None if no submodule was named. ``is_sharded``: ranks wait for each other in each forward."""
    if not policy.row_wise:
        return None
    largest, proofs = ranks.largest if is_sharded else None, _MOST_PROOFS if policy.check else 0
    return RowWise(module, policy.row_wise, policy.row_wise_size, ranks.device, largest, proofs_left=proofs)


def _named(module: nn.Module, names: Sequence[str]) -> dict[str, nn.Module]:
    modules = dict(module.named_modules(remove_duplicate=False))
    for name in names:
        if not name or name not in modules:
            known = [child for child, _ in module.named_children()]
            raise ArgumentError(f"row_wise={name!r}: {type(module).__name__} has no submodule of that name. It has {known}.")
    for outer, inner in permutations(names, 2):
        if modules[inner] in list(modules[outer].modules())[1:]:
            raise ArgumentError(f"row_wise={list(names)}: {inner!r} is inside {outer!r}, which runs in micro-batches. Name one.")
    first_names = {modules[name]: name for name in reversed(names)}
    return {name: inner for inner, name in reversed(first_names.items())}


# --- one call ----------------------------------------------------------------------------------------------------------


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
        # with shadows, ranks wait for each other, and no gradient is None
        return None, None, *gradients, *(cast("Tensor", gradients[0]).new_zeros(shape) for shape in ctx.shadows)


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
    device: torch.device  # its random state is saved, and the random state of the CPU

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
        parts, after = list[Tree](), None
        for index, piece in enumerate([*self.pieces, *self.pieces[-1:] * self.shadows]):
            if index < 2:  # the first may fill a cache
                buffers = [(name, own, version_of(own)) for name, own in self.layer.module.named_buffers()]
            if index == len(self.pieces):
                after = RandomState(self.device)
            parts.append(self._run_checkpointed(index, piece))
            check_outputs(self.layer, parts[-1], parts[0], self.form.dims)
        if after is not None:
            after.restore()
        for (name, buffer, version), now in zip(buffers, self.layer.module.buffers(), strict=False):
            if now is not buffer or version_of(now) != version:
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
            found = "a call has different outputs when it runs again in the backward: it depends on an attribute that changes"
            found += " between calls, its own generator, or parameters of functional_call. Pass this as an argument."
            raise RowWiseError.of(self.layer.name, f"{found} {HINT}")


def _joined(of_parts: Sequence[Any], dim: int | None) -> Any:
    """An output of all micro-batches."""
    first = of_parts[0]
    if dim is None:
        return first.clone() if isinstance(first, Tensor) else first
    return torch.cat(list(of_parts), dim) if isinstance(first, Tensor) else [entry for part in of_parts for entry in part]
