"""Row-wise submodules: a step sees the whole batch, of which they run a micro-batch at a time.

A call runs in micro-batches without a graph, and its outputs, joined, are one node in the graph of the step. In the backward of
that node it runs again, micro-batch by micro-batch, with a graph and with the random state of before, and each takes its part of
the gradient (GradCache, arXiv 2101.06983). Any loss of the outputs gets the gradient of the whole batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_accum.errors import ArgumentError, RowWiseError
from lightning_accum.policy import Policy
from lightning_accum.randomness import RandomState
from lightning_accum.ranks import Ranks
from lightning_accum.splitting.memory import MicroBatchSizes
from lightning_accum.splitting.micro_batch import Layout, Tokens
from lightning_accum.splitting.plan import MicroBatchSize, Planner, RowSlice
from lightning_accum.whole.calls import Call, Form, taken, twice_differentiated
from lightning_accum.whole.layers import Layer
from lightning_accum.whole.row_proof import Largest, RowProof, difference_by_padding, number_of_rows, read_arguments
from lightning_accum.whole.trees import Tree

_ENGINE = "_engine_run_backward"
"""What all of torch's backwards go through, read in torch 2.6 to 2.15."""


class RowWise:
    """Runs submodules in micro-batches, in steps that see the whole batch.

    Args:
        module: that is trained.
        names: of its submodules.
        micro_batch: rows, or tokens, of a micro-batch; or ``"auto"``.
        device: where the module runs.
        trim: whether calls run longest rows first, trimmed to the longest of a micro-batch, where their lengths can be read.
        largest: over the ranks, where submodules are sharded, so that ranks wait for each other in each of their forwards.

    Raises:
        ValueError: a name is no submodule, or is inside of another.

    Example:
        >>> model = nn.ModuleDict({"encoder": nn.Linear(2, 1)})
        >>> row_wise, x = RowWise(model, ["encoder"], 2, torch.device("cpu")), torch.arange(8.0).reshape(4, 2)
        >>> with row_wise.step():
        ...     model["encoder"](x).std().backward()
        >>> of_parts = model["encoder"].weight.grad.clone()
        >>> model.zero_grad()
        >>> model["encoder"](x).std().backward()
        >>> torch.allclose(of_parts, model["encoder"].weight.grad)
        True
    """

    def __init__(
        self,
        module: nn.Module,
        names: Sequence[str],
        micro_batch: MicroBatchSize,
        device: torch.device,
        trim: bool = True,
        largest: Largest | None = None,
    ) -> None:
        self._largest = largest
        self._layers = [Layer(name, inner, inner, largest is not None) for name, inner in _named(module, names)]
        self._micro_batch = micro_batch
        self._device = device
        self._trim = trim and largest is None  # what is tried out on two rows would be on one rank alone
        self.sizes = MicroBatchSizes() if micro_batch == "auto" else None
        """With ``"auto"``, what was found to fit."""
        self.pieces: list[RowSlice] = []
        """The micro-batches of all calls in the step so far."""
        self._planners: dict[str, Planner] = {}
        self._running: Call | None = None
        self._proof = RowProof(largest, micro_batch) if isinstance(micro_batch, int) and micro_batch < 8 else RowProof(largest)
        self._calls: list[Call] = []
        self._rows: int | None = None
        self._is_inside = self._has_run = self._drops = False
        self._called: set[str] = set()

    def describe(self) -> str:
        """What runs in micro-batches, in words."""
        size = self._micro_batch
        rows = f"of up to {size.count} tokens" if isinstance(size, Tokens) else f"of {size}"
        rows = "as large as memory allows" if size == "auto" else rows
        return f"{', '.join(layer.name for layer in self._layers)} in micro-batches {rows}, the loss sees all rows"

    @contextmanager
    def step(self, rows: int | None = None) -> Iterator[None]:
        """In here, from the forward to the end of the backward, calls of the submodules run in micro-batches.

        Args:
            rows: of the batch, where that is known.

        Raises:
            RowWiseError: a submodule was not called.
        """
        self._rows, self._has_run = rows, False
        run_engine = getattr(torch.autograd, _ENGINE, None)
        if run_engine is None:
            raise RowWiseError(f"row_wise: torch {torch.__version__} runs its backwards in a way that is not known here")
        try:
            with ExitStack() as stack:
                for layer in self._layers:
                    stack.enter_context(_calls_replaced(layer, self._call))
                stack.enter_context(_replaced(vars(torch.autograd), _ENGINE, self._backward_through(run_engine)))
                yield
        finally:
            self.forget()
        if self._has_run and len(self._called) < len(self._layers):
            missing = next(layer.name for layer in self._layers if layer.name not in self._called)
            raise RowWiseError(
                f"row_wise={missing!r}: training_step does not call {missing!r}, so none of it runs in micro-batches. Name a"
                " submodule that is called as a module, self.encoder(x), and not by another of its methods."
            )

    def forget(self) -> None:
        """There will be no backward for what ran."""
        for call in self._calls:
            if call.left is not None:
                call.left.forget()
        self._calls.clear()
        self.pieces.clear()
        self._running = None

    @property
    def running(self) -> RowSlice | None:
        """The micro-batch of a call that was running when an error was raised; None where it was another part of the step."""
        return None if self._running is None else self._running.pieces[self._running.current]

    @contextmanager
    def dropping(self, context: AbstractContextManager[None]) -> Iterator[None]:
        """A backward in here, which is in ``context`` too, has no gradients for the parameters of the submodules."""
        self._drops = True
        try:
            with context:
                yield
        finally:
            self._drops = False

    # --- the forward --------------------------------------------------------------------------------------------------

    def _call(self, layer: Layer, *args: Any, **kwargs: Any) -> Any:
        if self._is_inside or not torch.is_grad_enabled():
            return layer.run(*args, **kwargs)
        self._is_inside = True
        try:
            self._called.add(layer.name)
            arguments = read_arguments(layer, (args, kwargs))
            number = number_of_rows(layer, arguments, self._rows)
            form = self._proof(layer, arguments, number)
            pieces, order = self._pieces(layer, arguments, form, number)
            shadows = 0 if self._largest is None else int(self._largest(float(len(pieces)))[0]) - len(pieces)
            call = self._running = Call(layer, arguments, form, pieces, order, shadows, lambda: self._is_inside)
            output = call.run(self._device, self._run_again)
            self._running = None
        finally:
            self._is_inside = False
        self._calls.append(call)
        self.pieces += pieces
        return output

    def _pieces(self, layer: Layer, arguments: Tree, form: Form, number: int) -> tuple[list[RowSlice], list[int] | None]:
        planner = self._planners.get(layer.name)
        if planner is None:  # that nothing is trimmed needs no warning: outputs may be sequences
            planner = Planner(self._micro_batch, self.sizes, self._trim, warn=lambda text: None)
            self._planners[layer.name] = planner
        layout = _layout(layer, arguments, form, number)
        spans = planner.trimmable(layout, partial(difference_by_padding, layer)) if form.may_be_sorted else {}
        return planner.pack(layout, spans)

    # --- the backward -------------------------------------------------------------------------------------------------

    def _backward_through(self, run: Callable[..., Any]) -> Callable[..., Any]:
        def run_engine(
            roots: Any, seeds: Any, keeps_graph: bool, creates_graph: bool, inputs: Any, *args: Any, **kwargs: Any
        ) -> Any:
            if self._is_inside:
                return run(roots, seeds, keeps_graph, creates_graph, inputs, *args, **kwargs)
            for layer in {call.layer.name: call.layer for call in self._calls}.values() if inputs else ():
                if any(tensor is parameter for tensor in inputs for parameter in layer.module.parameters()):
                    raise twice_differentiated(layer.name)  # the graph of a call does not lead to them
            result = run(roots, seeds, keeps_graph, creates_graph, inputs, *args, **kwargs)
            self._check_is_next(0)
            for call in self._calls:
                call.check_unwritten()
            self._has_run = True
            return result

        return run_engine

    def _run_again(self, call: Call, gradients: Sequence[Tensor | None]) -> Sequence[Tensor]:
        """Run a call again in its backward. Returns the gradients of its inputs."""
        self._check_is_next(1 + next(place for place, other in enumerate(self._calls) if other is call))
        if self._drops:
            gradients = [None] * len(gradients)
            if self._largest is None:
                return [torch.zeros_like(leaf) for leaf in call.needs_gradient]
        now = RandomState(self._device)
        self._is_inside, self._running = True, call
        try:
            of_inputs = call.run_again(gradients)
        finally:
            self._is_inside = False
            now.restore()
        self._running = None
        return of_inputs

    def _check_is_next(self, number: int) -> None:
        """Raise on all ranks of sharded submodules where they do not go on with the same call; 0 for none."""
        if self._largest is None:
            return
        last, first = self._largest(float(number), float(-number))
        if last != -first:
            raise RowWiseError(
                "row_wise: the loss of one rank depends on a call of sharded submodules that the loss of another does not depend"
                " on. They wait for each other in each: have the loss of each rank depend on the same calls."
            )


def _layout(layer: Layer, arguments: Tree, form: Form, number: int) -> Layout:
    """How the arguments of a call are made of rows."""
    tensors: dict[bool, dict[str, Tensor]] = {True: {}, False: {}}
    for path, leaf, is_row in zip(arguments.paths, arguments.leaves, form.inputs, strict=True):
        if isinstance(leaf, Tensor):
            tensors[is_row][_name(layer, path)] = leaf
    return Layout(number, tensors[True], tensors[False], {}, partial(taken, arguments, form.inputs))


def _name(layer: Layer, path: str) -> str:
    """What an argument is called: ``0.1.mask`` is in the second that was passed by position, ``1.x`` is one that has a name."""
    by_name, _, rest = path.partition(".")
    place, *inside = rest.split(".")
    if by_name == "0" and int(place) < len(layer.argument_names):
        place = layer.argument_names[int(place)]
    return ".".join([place, *inside])


def row_wise_of(policy: Policy, module: nn.Module, ranks: Ranks, is_sharded: bool) -> RowWise | None:
    """What runs submodules in micro-batches; None where none was named.

    Args:
        policy: what was asked for.
        module: that is trained.
        ranks: that train.
        is_sharded: its modules are, so that ranks wait for each other in each forward.

    Raises:
        ValueError: a name is no submodule, or is inside of another.
    """
    if not policy.row_wise:
        return None
    assert policy.row_wise_size is not None
    largest, trim = ranks.largest if is_sharded else None, policy.trim_padding is not False
    return RowWise(module, policy.row_wise, policy.row_wise_size, ranks.device, trim, largest)


def _named(module: nn.Module, names: Sequence[str]) -> list[tuple[str, nn.Module]]:
    modules = dict(module.named_modules(remove_duplicate=False))
    for name in names:
        if not name or name not in modules:
            known = [child for child, _ in module.named_children()]
            raise ArgumentError(
                f"row_wise={name!r}: {type(module).__name__} has no submodule of that name. Name some of its submodules;"
                f" its children are {known}."
            )
    for outer in names:
        for inner in names:
            if outer != inner and modules[inner] in list(modules[outer].modules())[1:]:
                raise ArgumentError(
                    f"row_wise={list(names)}: {inner!r} is inside of {outer!r}, which runs in micro-batches. Name one of them."
                )
    distinct: dict[nn.Module, str] = {}
    for name in names:
        distinct.setdefault(modules[name], name)
    return [(name, layer) for layer, name in distinct.items()]


@contextmanager
def _calls_replaced(layer: Layer, call: Callable[..., Any]) -> Iterator[None]:
    """Have calls of a submodule, with their hooks, run ``call``: in the way in which ``nn.Module.compile`` has them run."""
    own = vars(layer.module).get("_compiled_call_impl")
    layer.run = layer.module._call_impl if own is None else own
    with _replaced(vars(layer.module), "_compiled_call_impl", lambda *args, **kwargs: call(layer, *args, **kwargs)):
        yield


@contextmanager
def _replaced(holder: dict[str, Any], name: str, value: Any) -> Iterator[None]:
    missing = name not in holder
    before = holder.get(name)
    holder[name] = value
    try:
        yield
    finally:
        if missing:
            del holder[name]
        else:
            holder[name] = before
