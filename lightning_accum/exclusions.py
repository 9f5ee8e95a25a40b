"""What a training is asked for, and what of it cannot be had together, with the message for each: one table.

A row applies as soon as what it is about is known: in the constructor of ``GradientAccumulation`` the policy, when a fit is set up
all of it. The page ``reference/exclusions.md`` of the site has the same rows in words.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_accum.errors import ArgumentError
from lightning_accum.main_gradients import is_narrower, sparse_layers
from lightning_accum.policy import Policy
from lightning_accum.splitting.micro_batch import Tokens
from lightning_accum.sync.base import ShardedSyncPolicy


@dataclass(frozen=True)
class Asked:
    """What a training is asked for, as far as it is known.

    Attributes:
        policy: of the callback.
        trainers_window: ``accumulate_grad_batches`` of the Trainer.
        module: that is trained; None before a fit.
        is_manual: it has ``automatic_optimization = False``.
        optimizers: of the training.
        parameters: of the module and of the optimizers.
        strategy: its class; empty before a fit.
        engine: what reduces gradients; empty before a fit, and on one device.
        sync: when it does so.
        is_static_graph: DistributedDataParallel records the first backward.
        has_comm_hook: DistributedDataParallel reduces in the user's way.
        ranks: that have batches of their own.
        tensor_parallel: ranks that share one.
        same_rows: ranks that have parts of the same rows.
    """

    policy: Policy
    trainers_window: int = 1
    module: nn.Module | None = None
    is_manual: bool = False
    optimizers: Sequence[Optimizer] = ()
    parameters: Sequence[Tensor] = ()
    strategy: str = ""
    engine: Literal["", "ddp", "fsdp1", "fsdp2"] = ""
    sync: ShardedSyncPolicy = "window"
    is_static_graph: bool = False
    has_comm_hook: bool = False
    ranks: int = 1
    tensor_parallel: int = 1
    same_rows: int = 1

    @property
    def is_window_long(self) -> bool:
        """A window may have several loader batches."""
        return self.policy.may_be_longer_than_one(self.trainers_window)

    @property
    def is_sharded(self) -> bool:
        """No rank has all parameters."""
        return self.engine in ("fsdp1", "fsdp2")

    @property
    def looks_at_micro_batches(self) -> bool:
        """Those that are not finite are left out, or an error."""
        return self.policy.on_nonfinite != "propagate"

    @property
    def has_unknown_rounds(self) -> bool:
        """Ranks may come to different numbers of micro-batches."""
        return isinstance(self.policy.micro_batch, Tokens) or self.policy.micro_batch == "auto"

    @property
    def is_summed_apart(self) -> bool:
        """Gradients are added up in a wider type than that of a parameter."""
        dtype = self.policy.accumulate_dtype
        return dtype is not None and any(is_narrower(parameter.dtype, dtype) for parameter in self.parameters)

    @property
    def draws_batches(self) -> bool:
        """``training_step`` takes an iterator."""
        step = getattr(self.module, "training_step", None)
        return step is not None and "dataloader_iter" in inspect.signature(step).parameters

    @property
    def has_lbfgs(self) -> bool:
        """An optimizer runs its closure several times in a step."""
        return any(isinstance(optimizer, LBFGS) for optimizer in self.optimizers)

    @property
    def sparse_layers(self) -> list[str]:
        """Those with sparse gradients."""
        return [] if self.module is None else sparse_layers(self.module)

    # --- in words

    @property
    def only_for_split(self) -> str:
        """An argument that is for split batches; empty where none is given."""
        if self.policy.split is not None:
            return "split="
        return f"trim_padding={self.policy.trim_padding!r}" if isinstance(self.policy.trim_padding, str) else ""

    @property
    def one_backward(self) -> str:
        """What has a micro-batch reduce its gradients in its one backward; empty where nothing does."""
        return 'sync="micro_batch"' if self.sync == "micro_batch" else "static_graph=True" if self.is_static_graph else ""

    @property
    def needs_as_many_rounds(self) -> str:
        """What waits for all ranks in every micro-batch; empty where nothing does."""
        if self.engine != "ddp" or self.one_backward:
            return f"{self.strategy}({self.one_backward})" if self.engine == "ddp" else ""
        modules = () if self.module is None else self.module.named_modules()
        return next((f"SyncBatchNorm ({name})" for name, layer in modules if isinstance(layer, nn.SyncBatchNorm)), "")

    @property
    def not_row_wise_sharded(self) -> str:
        """Beside what ``fully_shard`` cannot run submodules again after a backward; empty where it can."""
        if torch.__version__ < "2.9":
            return f"torch {torch.__version__}, which reduces what was accumulated in another forward and backward alone"
        if self.sync != "window":
            return f'sync="{self.sync}"'
        if self.tensor_parallel > 1:
            return "tensor parallelism"
        if self.is_manual:
            return "automatic_optimization=False"
        return f"on_nonfinite={self.policy.on_nonfinite!r}" if self.looks_at_micro_batches else ""

    @property
    def runs_whole(self) -> str:
        """What has ``training_step`` run on whole batches."""
        return f"row_wise={self.row_wise}" if self.policy.row_wise else 'micro_batch="offload"'

    @property
    def counts_or_splits(self) -> str:
        """What needs the batches of the loader."""
        return f"weight={self.weights}" if self.policy.micro_batch is None else f"micro_batch={self.policy.micro_batch!r}"

    @property
    def row_wise(self) -> list[str]:
        """The submodules that were named."""
        return list(self.policy.row_wise)

    @property
    def weights(self) -> list[object]:
        """One for each term."""
        return list(self.policy.weight) if isinstance(self.policy.weight, tuple) else [self.policy.weight]

    @property
    def module_name(self) -> str:
        """Its class."""
        return type(self.module).__name__


def refuse(asked: Asked) -> None:
    """Refuse what cannot be had together.

    Raises:
        ValueError: a row of the table applies; the first one says why.
    """
    for applies, message in EXCLUSIONS:
        if applies(asked):
            raise ArgumentError(message.format(a=asked))


_IN_MANUAL = " is not for modules with automatic_optimization=False, such as {a.module_name}: they run their backwards and steps. "
_RECORDED = " is decided after a backward, but {a.strategy}(static_graph=True) reduces in the one that it has recorded. "
_PARTS_OF_ROWS = ", but {a.same_rows} ranks have parts of the same rows, and run them together. "

EXCLUSIONS: tuple[tuple[Callable[[Asked], bool], str], ...] = (
    (
        lambda a: bool(a.only_for_split) and a.policy.micro_batch is None and not a.policy.row_wise and not a.policy.offload,
        "{a.only_for_split} says how loader batches are split, but not into which size, and so none is: set micro_batch= too.",
    ),
    (
        lambda a: bool(a.only_for_split) and (bool(a.policy.row_wise) or a.policy.offload),
        "{a.only_for_split} is for loader batches that are split; {a.runs_whole} has training_step see them whole. Leave it out.",
    ),
    (
        lambda a: a.policy.counts_ahead and a.policy.tail == "carry" and a.is_window_long,
        "weight={a.weights} counts a window before it runs, but with tail='carry' it may go on in the next epoch, whose"
        " batches are not there yet. Use tail='step' or 'drop', or one weight for all terms.",
    ),
    (
        lambda a: (a.policy.micro_batch is not None or a.policy.counts_ahead) and a.draws_batches,
        "{a.counts_or_splits} counts or splits the batches of the loader, but the training_step of {a.module_name} draws them by"
        " itself (`dataloader_iter`). Have it take a batch.",
    ),
    (
        lambda a: a.has_lbfgs and a.is_window_long,
        "LBFGS runs its closure several times in a step, and a window of several loader batches cannot be run again: their"
        " data is gone. Use GradientAccumulation(1) or another optimizer.",
    ),
    (
        lambda a: a.has_lbfgs and a.policy.on_nonfinite == "skip",
        "LBFGS compares the losses of a batch that it runs several times in a step, and none of them can be left out. Use"
        ' on_nonfinite="raise" or another optimizer.',
    ),
    (
        lambda a: a.has_lbfgs and a.is_manual and a.ranks > 1,
        "LBFGS runs its closure several times in a step, and with automatic_optimization=False what these have reduced"
        " over the ranks cannot be run again. Use one rank, or another optimizer.",
    ),
    (
        lambda a: a.is_manual and a.policy.ends_by_tokens,
        "window={a.policy.window!r}" + _IN_MANUAL + "Give the window in loader batches.",
    ),
    (
        lambda a: a.is_manual and a.policy.micro_batch is not None,
        "micro_batch={a.policy.micro_batch!r}" + _IN_MANUAL + 'GradientAccumulation(micro_batch="offload") runs the batch whole.',
    ),
    (
        lambda a: a.is_manual and a.policy.counts_ahead,
        "weight={a.weights}, one for each term," + _IN_MANUAL + 'Give one weight, or "auto".',
    ),
    (
        lambda a: a.is_manual and a.policy.accumulate_dtype is not None,
        "accumulate_dtype={a.policy.accumulate_dtype}" + _IN_MANUAL + "Leave it out.",
    ),
    (
        lambda a: a.is_manual and a.looks_at_micro_batches,
        "on_nonfinite={a.policy.on_nonfinite!r}" + _IN_MANUAL + 'Look in training_step, or leave it at "propagate".',
    ),
    (
        lambda a: a.is_summed_apart and not a.is_sharded and bool(a.sparse_layers),
        "accumulate_dtype={a.policy.accumulate_dtype} adds up dense gradients, but those of {a.sparse_layers[0]} are sparse. Leave"
        " sparse=True out of it, or accumulate_dtype.",
    ),
    (
        lambda a: a.is_summed_apart and a.engine in ("ddp", "fsdp2") and a.sync == "micro_batch",
        "accumulate_dtype={a.policy.accumulate_dtype} has the sum of the gradients reduced, but {a.strategy}"
        '(sync="micro_batch") those of each micro-batch, in the type of the parameters. Use sync="window".',
    ),
    (
        lambda a: a.is_summed_apart and a.has_comm_hook,
        "accumulate_dtype={a.policy.accumulate_dtype} reduces its sums by itself, but {a.strategy}(ddp_comm_hook=...) changes how"
        " DistributedDataParallel reduces gradients. Leave one of them out.",
    ),
    (
        lambda a: a.engine == "fsdp1" and a.policy.accumulate_dtype is not None,
        "accumulate_dtype={a.policy.accumulate_dtype}: FSDP1 adds up the gradients of a window in the type that it computes in."
        ' Use FSDPAccumulationStrategy(sync="micro_batch") without accumulate_dtype and keep the parameters in float32'
        ' (precision="bf16-mixed"), whose shards are added up in float32; or strategy="accum_model_parallel" (FSDP2).',
    ),
    (
        lambda a: a.engine == "fsdp1" and a.looks_at_micro_batches,
        "on_nonfinite={a.policy.on_nonfinite!r} looks at gradients before they are reduced, but FSDP1 gives them to nobody until"
        ' then. Use strategy="accum_model_parallel" (FSDP2, fully_shard).',
    ),
    (
        lambda a: a.looks_at_micro_batches and a.sync != "window",
        "on_nonfinite={a.policy.on_nonfinite!r} looks at the gradients of each rank, but with {a.strategy}(sync={a.sync!r}) each"
        ' backward reduces them, and one that is not finite gets into those of all ranks. Use sync="window".',
    ),
    (
        lambda a: a.looks_at_micro_batches and a.is_static_graph,
        "What on_nonfinite={a.policy.on_nonfinite!r} leaves out or raises" + _RECORDED + "Leave static_graph out.",
    ),
    (
        lambda a: bool(a.policy.row_wise) and a.is_static_graph and not a.is_manual,
        "row_wise={a.row_wise} runs submodules again in the backward of the loss, and {a.strategy}(static_graph=True) records one"
        " backward. Leave static_graph out.",
    ),
    (
        lambda a: bool(a.policy.row_wise) and a.engine == "fsdp1",
        "row_wise={a.row_wise} runs submodules again in the backward of the loss, but {a.strategy} gathers and frees their"
        ' parameters for one forward and backward. Use Trainer(strategy="accum_model_parallel") (FSDP2) or "accum_ddp".',
    ),
    (
        lambda a: bool(a.policy.row_wise) and a.engine == "fsdp2" and bool(a.not_row_wise_sharded),
        "row_wise={a.row_wise} runs submodules again in the backward of the loss, on all ranks together, which {a.strategy} cannot"
        ' beside {a.not_row_wise_sharded}. Leave that out, or use Trainer(strategy="accum_ddp").',
    ),
    (
        lambda a: a.policy.ends_by_tokens and a.is_static_graph,
        "The end of window={a.policy.window!r}" + _RECORDED + "Leave static_graph out, or give the window in loader batches.",
    ),
    (
        lambda a: a.has_unknown_rounds and bool(a.needs_as_many_rounds),
        "micro_batch={a.policy.micro_batch!r} may split the batches of the ranks into different numbers of micro-batches, but"
        " {a.needs_as_many_rounds} has all ranks run each of them together. Leave that out, or give a number of samples.",
    ),
    (
        lambda a: a.policy.micro_batch == "auto" and a.is_sharded,
        'micro_batch="auto" runs a batch again if a rank runs out of memory, which {a.strategy} cannot do without the other ranks.'
        " Pass a number of samples, or Tokens(...).",
    ),
    (
        lambda a: a.same_rows > 1 and a.policy.micro_batch is not None,
        "micro_batch={a.policy.micro_batch!r} splits the batch of each rank" + _PARTS_OF_ROWS + "Use smaller loader batches.",
    ),
    (
        lambda a: a.same_rows > 1 and a.policy.weight not in ("auto", "equal"),
        "weight={a.weights} counts a batch, or a part of it" + _PARTS_OF_ROWS + 'Use weight="auto".',
    ),
    (
        lambda a: a.same_rows > 1 and a.policy.on_nonfinite == "skip",
        'on_nonfinite="skip" leaves out the micro-batch of one rank' + _PARTS_OF_ROWS + 'Use on_nonfinite="raise".',
    ),
)
