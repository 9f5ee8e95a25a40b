"""The seams with Lightning: the methods that are replaced or relied on, and whether they match the versions read.

A missing method is an error when a strategy is constructed. A method that differs from the versions read is named in a warning
before training, and then no call of Lightning is skipped to save time.
"""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from hashlib import sha256
from itertools import chain, repeat
from operator import attrgetter
from pkgutil import resolve_name
from typing import Any, NamedTuple

from lightning_accum.errors import SeamError
from lightning_accum.trainer.from_lightning import pl

INSTEAD = "Lightning 2.6.0 to 2.6.6 were read: install one of these, and report it."  # they have the fingerprints below


class Seam(NamedTuple):
    """A method of another library."""

    owner: str  # the full name of its class or module
    name: str
    why: str  # how its replacement differs
    read: str  # fingerprints of the versions read; empty for an attribute that only has to exist

    def __str__(self) -> str:
        return f"{self.owner.rpartition('.')[2]}.{self.name}"

    def holder(self) -> Any:
        """The class or module that has it; None if it does not exist."""
        try:
            return resolve_name(self.owner)
        except (ImportError, AttributeError):
            return None

    def is_missing(self) -> bool:
        """Whether the name does not exist."""
        return not hasattr(self.holder(), self.name) if not self.read else self.name not in getattr(self.holder(), "__dict__", ())

    def is_read(self) -> bool:
        """Whether it matches a version read."""
        return not self.is_missing() and (not self.read or fingerprint(vars(self.holder())[self.name]) in self.read.split())


def changed() -> list[Seam]:
    """The seams that differ from the versions read."""
    return [seam for seam in LIGHTNING if not seam.is_read()]


def check_nothing_is_missing(table: Iterable[Seam] | None = None) -> None:
    """Raise a SeamError if a required method is missing. Called when a strategy is constructed."""
    if gone := [seam for seam in (LIGHTNING if table is None else table) if seam.is_missing()]:
        missing = ", ".join(f"{seam} ({seam.why})" for seam in gone)
        raise broken(f"{gone[0].owner.partition('.')[0]} lacks {missing}.")


def broken(seen: str) -> SeamError:
    """The error, with where to report it."""
    return SeamError(f"{seen} Windows would not be exact, so training stops. {INSTEAD}")


LIBRARIES = ("lightning.", "pytorch_lightning.", "lightning_accum.", "builtins")


class ShippedHooks:
    """Hooks of Lightning's classes, as they were when this package was imported: others may patch the classes themselves."""

    def __init__(self, names: Mapping[type, Sequence[str]]) -> None:
        self._hooks = [(own, of := attrgetter(*own), of(kind)) for kind, own in names.items()]
        modules = [hook.__globals__["__name__"] for *_, hooks in self._hooks for hook in hooks]
        self._are_lightnings = all(name.startswith((*LIBRARIES, "contextlib")) for name in modules)  # none was patched before

    def are_kept_by(self, *owners: object) -> bool:
        """Whether these objects, one of each class in their order, and any number of the last, override none of them."""
        for owner, (names, of, shipped) in zip(owners, chain(self._hooks, repeat(self._hooks[-1])), strict=False):
            if of(type(owner)) != shipped or not vars(owner).keys().isdisjoint(names):
                return False
        return self._are_lightnings


# --- objects of Lightning's that have another class for a while --------------------------------------------------------


@contextmanager
def specialised(instance: Any, mixin: type, *, is_users_first: bool = False, **state: Any) -> Iterator[None]:
    """Inside, an object's class is a subclass with a ``mixin``; afterwards class and annotated attributes are restored.

    With ``is_users_first`` the user's class overrides the mixin.
    """
    original = instance.__class__
    instance.__class__ = subclass_of(mixin, original, is_users_first)
    vars(instance).update(state)
    try:
        yield
    finally:
        instance.__class__ = original
        for name in own_attributes(mixin):
            vars(instance).pop(name, None)


def own_attributes(kind: type) -> set[str]:
    """The attributes that a class and its bases in this package annotate."""
    return {
        name for base in kind.__mro__ if base.__module__.startswith("lightning_accum.") for name in inspect.get_annotations(base)
    }


@cache
def subclass_of(mixin: type, base: Any, is_users_first: bool = False) -> type:
    """A subclass of both, whose copies have the class ``base``."""
    own = own_attributes(mixin)

    def reduce_ex(self: Any, protocol: Any) -> tuple[Any, ...]:
        """A copy has the original class."""
        function, arguments, *state = base.__reduce_ex__(self, protocol)
        arguments = tuple(base if argument is type(self) else argument for argument in arguments)
        kept = [{n: part[n] for n in part if n not in own} if isinstance(part, dict) else part for part in state]
        return function, arguments, *kept

    bases = (base, mixin) if is_users_first and not issubclass(mixin, base) else (mixin, base)
    attributes = {"__module__": base.__module__, "__doc__": base.__doc__, "__reduce_ex__": reduce_ex}
    return type(base.__name__, bases, attributes)


# --- fingerprints ----------------------------------------------------------------------------------------------------------


def fingerprint(function: Any) -> str:
    """Eight hexadecimal digits that depend on a function's code, but not on its comments, annotations or line breaks.

    Empty without source code. The same in all versions of Python.
    """
    function = getattr(function, "fget", function)  # a property
    return _of_source(inspect.unwrap(getattr(function, "__func__", function)))


@cache
def _of_source(function: Any) -> str:
    try:
        source = textwrap.dedent(inspect.getsource(function)).replace("pytorch_lightning", "lightning.pytorch")
        (tree,) = ast.parse(source.replace("lightning_fabric", "lightning.fabric")).body
    except (OSError, TypeError, SyntaxError, ValueError):
        return ""
    return sha256(_in_words(tree).encode()).hexdigest()[:8]


_LEFT_OUT = ("ctx", "kind", "type_comment", "type_params", "annotation", "returns")


def _in_words(value: Any) -> str:
    if isinstance(value, list):
        is_docstring = [isinstance(item, ast.Expr) and isinstance(item.value, ast.Constant) for item in value]
        return f"[{','.join(_in_words(item) for item, is_left_out in zip(value, is_docstring, strict=True) if not is_left_out)}]"
    if not isinstance(value, ast.AST):
        return repr(value)
    fields = [(name, field) for name, field in ast.iter_fields(value) if name not in _LEFT_OUT and field not in (None, [])]
    return f"{type(value).__name__}({','.join(f'{name}={_in_words(field)}' for name, field in fields)})"


# --- the table -------------------------------------------------------------------------------------------------------------


def _table(below: str, rows: str) -> Iterator[Seam]:
    """Parse seams: lines of an owner and, indented, of its methods: names | why | fingerprints."""
    owner = ""
    for line in rows.strip().splitlines():
        if not line.startswith(" "):
            owner = below + line
            continue
        names, why, read = (column.strip() for column in line.split("|"))
        yield from (Seam(owner, name, why, read) for name in names.split())


LIGHTNING = tuple(
    _table(
        f"{pl.__name__}.",
        """
trainer.trainer.Trainer
    _run | begins and ends a fit | 4156b686
    estimated_stepping_batches | is the number of windows | 781d79c6
    training | compares no strings | cddd33f0
strategies.strategy.Strategy
    connect | begins the fit: specialises the loops | 1e0e2ace
    setup_environment | creates the ranks | 6756a146
    setup | begins accumulation | 52a40677
    on_train_start | resumes inside the window of a checkpoint | 2f4bff3a
    teardown | ends the fit | 99b4981d
    __getstate__ | leaves the fit out of copies | cb0f97d9
    batch_to_device | reads lengths of batches on the host | f914efb7
    training_step | gathers shards for a trial of a step | 022c774d
    backward | runs the backward of a micro-batch once, with gradient= | 910f9f26
    optimizer_step | defers the steps of manual optimization | f2e3a488
strategies.ddp.DDPStrategy
    pre_backward | prepares DistributedDataParallel's reduction | b2401dc8
    post_backward | reduces gradients that manual optimization deferred | 46a7c777
strategies.model_parallel.ModelParallelStrategy
    setup_environment | creates the mesh of mesh= | da2b608a
    distributed_sampler_kwargs | gives ranks with parts of the same rows the same batches | d29a04ee
loops.fit_loop._FitLoop
    run advance on_run_start | call the hooks of a fit and of an epoch | e4c8eaeb 289c0111 993d7d3c
    setup_data | ends ranks of different lengths together | f0180ab3 f09c9a94
    reset | begins the next epoch after a checkpoint of an epoch's end | 75843e08
    on_save_checkpoint | saves the loaders' position in training, without batches drawn ahead | 3266f8a1
    on_run_end | ends the last window with the training | b5d1b621
loops.training_epoch_loop._TrainingEpochLoop
    done | does not stop inside a window that is counted first | 20215631
    run | ends an unfinished window with its epoch | ad885a6e
    on_run_start | starts the clock of validations by optimizer steps | 085e5587
    advance | trains on a loader batch | 9b9b8410
    on_advance_end | validates, steps plateau schedulers, stops at SIGTERM | e66f9489
    _broadcast_sigterm_tensor | sends SIGTERM to all ranks with the weights | f63f4808
    _build_kwargs | inspects the signature of training_step once | 909b6965
    _should_accumulate | ends a window at its boundary | 75952ac1
    on_save_checkpoint on_load_checkpoint | keeps the counters of validation | 18155a51 af6d3a59
    _should_check_val_epoch | does not validate inside a window that is counted first | 91a9a650
    update_lr_schedulers | is called twice a loader batch, the second time at its end | 3d41394b
    _update_learning_rates | steps schedulers by their clock | 27370be6
    _should_check_val_fx | validates by optimizer steps | 0ae30d22
    _num_ready_batches_reached | finds the last loader batch |
loops.optimization.automatic._AutomaticOptimization
    run | runs a loader batch, and steps at a boundary | 4097f294
    _on_before_zero_grad _optimizer_zero_grad _optimizer_step | clear gradients, and step | 041f75f4 213c7f67 23e9067a
loops.optimization.automatic.ClosureResult
    from_training_step_output __post_init__ | keep the loss | c01d3519 7c5c55a5
loops.optimization.closure.AbstractClosure
    __call__ | gives the loss of a window that has run | c8773f8b
loops.optimization.manual._ManualOptimization
    run | begins and ends loader batches and windows | bde82f8c
    _on_before_step _on_after_step | counts the steps that are not deferred | 158c1bd3 44da92f0
loops.fetchers._PrefetchDataFetcher
    __iter__ __next__ | ends ranks of different lengths together; draws windows ahead | 46027b64 7dee5f74
trainer.connectors.data_connector._DataConnector
    _prepare_dataloader | deals SameOrderSampler and BalancedBatchSampler to the ranks | 7ca31a88
    _resolve_sampler | has Lightning's own sampler repeat no samples | 53f73aba
trainer.connectors.logger_connector.logger_connector._LoggerConnector
    progress_bar_metrics | shows the loss of the last window | f49f5874
    on_batch_end | collects the logs of a loader batch | 328cf288
    log_metrics | logs a window's metrics in the row of its step | e81ba200
trainer.connectors.logger_connector.result._ResultCollection
    update_metrics | gives the logs of a shadow batch no weight | 0120c270
trainer.connectors.signal_connector._SignalConnector
    _sigterm_notifier_fn | defers SIGTERM until all ranks know | b1525db4
profilers.profiler.Profiler
    profile | makes no generator that measures nothing | 5750799d
trainer.call
    _call_lightning_module_hook _call_strategy_hook | call hooks with Lightning's set-up | 71767112 967314ae
core.module.LightningModule
    _on_before_batch_transfer | transfers a batch that is drawn ahead | f863cd7b
    backward optimizer_zero_grad optimizer_step lr_scheduler_step | do once what they say | a2e90fe7 38492e78 235652a3 0ae03eb1
core.optimizer.LightningOptimizer
    step | has the strategy step | 6047b6f4
utilities.combined_loader.CombinedLoader
    _state_dicts | the position of loaders, for a checkpoint |
plugins.precision.precision.Precision
    clip_grad_by_norm | records the norm | 67e0f6be
    pre_backward backward optimizer_step _wrap_closure | run the backward and the step once | 1ca40e35 d82f461a a9aa8b03 776a039b
plugins.precision.amp.MixedPrecision
    pre_backward optimizer_step | scale the loss, and skip steps that are not finite | 672be8f5 fcca8f8e
""",
    )
)
"""The seams of every training."""
FSDP2 = tuple(
    _table(
        "torch.distributed.fsdp._fully_shard.",
        """
_fully_shard.FSDPModule
    _get_fsdp_state | returns the state of each unit |
_fsdp_state.FSDPState
    _register_root_post_backward_final_callback | reduces accumulated gradients at the end of a backward |
_fsdp_param_group.FSDPParamGroup
    post_backward | reduces all parameters of a group, if any has a gradient |
""",
    )
)
