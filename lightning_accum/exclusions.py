"""What cannot be had together, with the message for each: every combination that is refused, in one table.

A row applies as soon as what it is about is known: in the constructor of ``GradientAccumulation`` the policy, when a fit is set up
all of it. The page ``reference/exclusions.md`` of the site has the same rows in words.
"""

from __future__ import annotations

from collections.abc import Callable

from lightning_accum.asked import Asked
from lightning_accum.splitting.micro_batch import Tokens


def why_refused(asked: Asked) -> str | None:
    """The message of the first row of the table that applies; None where none does."""
    return next((message.format(a=asked) for applies, message in EXCLUSIONS if applies(asked)), None)


EXCLUSIONS: tuple[tuple[Callable[[Asked], bool], str], ...] = (
    (
        lambda a: bool(a.only_for_split) and a.policy.micro_batch is None and not a.policy.row_wise and not a.policy.offload,
        "{a.only_for_split} says how loader batches are split into micro-batches, but not how large these are, and so none"
        " is: set micro_batch= too",
    ),
    (
        lambda a: bool(a.only_for_split) and (bool(a.policy.row_wise) or a.policy.offload),
        "GradientAccumulation({a.runs_whole}) runs training_step on each loader batch as it is: leave out"
        " {a.only_for_split}, which is for those that are split",
    ),
    (
        lambda a: a.policy.counts_ahead and a.policy.tail == "carry" and a.is_window_long,
        "weight={a.weights} counts a window before it runs, but with tail='carry' it may go on in the next epoch, whose"
        " batches are not there yet. Use tail='step' or 'drop', or one weight for all terms.",
    ),
    (
        lambda a: (a.policy.micro_batch is not None or a.policy.counts_ahead) and a.draws_batches,
        "GradientAccumulation({a.counts_or_splits}) counts or splits the batches of the loader, but the training_step of"
        " {a.module_name} draws them by itself (`dataloader_iter`).",
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
        lambda a: a.is_manual and isinstance(a.policy.window, Tokens),
        "GradientAccumulation({a.policy.window!r}) knows that a window has ended only after a micro-batch, but with"
        " automatic_optimization=False the module steps its optimizers inside training_step. Give the window in loader"
        " batches.",
    ),
    (
        lambda a: a.is_manual and a.policy.micro_batch is not None,
        "GradientAccumulation(micro_batch={a.policy.micro_batch!r}) would split a batch, but with"
        " automatic_optimization=False a training_step steps its optimizers by itself."
        ' GradientAccumulation(micro_batch="offload") runs the batch whole, and what its backwards need waits in the'
        " memory of the host.",
    ),
    (
        lambda a: a.is_manual and a.policy.counts_ahead,
        "weight={a.weights} weighs each term of one loss by itself; with automatic_optimization=False there may be several"
        ' losses. Give one weight, or "auto".',
    ),
    (
        lambda a: a.is_manual and a.policy.accumulate_dtype is not None,
        "accumulate_dtype is for automatic optimization; with automatic_optimization=False leave it out.",
    ),
    (
        lambda a: a.is_manual and a.looks_at_micro_batches,
        "GradientAccumulation(on_nonfinite={a.policy.on_nonfinite!r}) looks at the loss and the gradient of each"
        " micro-batch, but {a.module_name} has automatic_optimization=False and runs its backwards by itself. Look in"
        ' training_step, or leave on_nonfinite at "propagate".',
    ),
    (
        lambda a: a.is_summed_apart and not a.is_sharded and bool(a.sparse_layers),
        "GradientAccumulation(accumulate_dtype={a.policy.accumulate_dtype}) adds up dense gradients, but those of"
        " {a.sparse_layers[0]} are sparse. Leave sparse=True out of it, or accumulate_dtype.",
    ),
    (
        lambda a: a.is_summed_apart and a.engine in ("ddp", "fsdp2") and a.sync == "micro_batch",
        '{a.strategy}(sync="micro_batch") reduces the gradients of each micro-batch in the type of the parameters, and'
        ' GradientAccumulation(accumulate_dtype={a.policy.accumulate_dtype}) their sum: use sync="window".',
    ),
    (
        lambda a: a.is_summed_apart and a.has_comm_hook,
        "{a.strategy}(ddp_comm_hook=...) changes how DistributedDataParallel reduces gradients, but"
        " GradientAccumulation(accumulate_dtype={a.policy.accumulate_dtype}) reduces their sums by itself. Leave one of"
        " them out.",
    ),
    (
        lambda a: a.engine == "fsdp1" and a.policy.accumulate_dtype is not None,
        "GradientAccumulation(accumulate_dtype={a.policy.accumulate_dtype}): FSDP1 adds up the gradients of a window in"
        ' the type that it computes in. Use FSDPAccumulationStrategy(sync="micro_batch") without accumulate_dtype and keep'
        ' the parameters in float32 (precision="bf16-mixed"), whose shards are added up in float32; or'
        ' strategy="accum_model_parallel" (FSDP2).',
    ),
    (
        lambda a: a.engine == "fsdp1" and a.looks_at_micro_batches,
        "GradientAccumulation(on_nonfinite={a.policy.on_nonfinite!r}) looks at gradients before they are reduced, but"
        ' FSDP1 gives them to nobody until then. Use strategy="accum_model_parallel" (FSDP2, fully_shard).',
    ),
    (
        lambda a: a.looks_at_micro_batches and a.sync != "window",
        "GradientAccumulation(on_nonfinite={a.policy.on_nonfinite!r}) looks at the gradients of each rank, but with"
        ' {a.strategy}(sync="{a.sync}") they are reduced in each backward, where one that is not finite gets into those'
        ' of all ranks. Use sync="window".',
    ),
    (
        lambda a: a.looks_at_micro_batches and a.is_static_graph,
        "{a.strategy}(static_graph=True) reduces in the backward that it has recorded, but with"
        " GradientAccumulation(on_nonfinite={a.policy.on_nonfinite!r}) gradients are looked at before. Leave static_graph"
        " out.",
    ),
    (
        lambda a: bool(a.policy.row_wise) and a.engine == "ddp" and not a.is_manual and bool(a.one_backward),
        "{a.strategy}({a.one_backward}) reduces gradients in the backward of the loss, but with"
        " GradientAccumulation(row_wise=...) the submodules have several within it. Leave {a.one_backward} out.",
    ),
    (
        lambda a: bool(a.policy.row_wise) and a.engine == "fsdp1",
        "GradientAccumulation(row_wise={a.row_wise}) runs submodules again in the backward of the loss, but"
        " {a.strategy} gathers and frees their parameters for one forward and backward. Use"
        ' Trainer(strategy="accum_model_parallel") (FSDP2, fully_shard) or "accum_ddp".',
    ),
    (
        lambda a: bool(a.policy.row_wise) and a.engine == "fsdp2" and bool(a.not_row_wise_sharded),
        "GradientAccumulation(row_wise={a.row_wise}) runs submodules again in the backward of the loss, on all ranks"
        " together, which {a.strategy} cannot beside {a.not_row_wise_sharded}. Leave that out, or use"
        ' Trainer(strategy="accum_ddp").',
    ),
    (
        lambda a: isinstance(a.policy.window, Tokens) and a.is_static_graph,
        "{a.strategy}(static_graph=True) reduces in the backward that it has recorded, but a window of Tokens is known to"
        " have ended only after it. Leave static_graph out, or give the window in loader batches.",
    ),
    (
        lambda a: a.has_unknown_rounds and a.engine == "ddp" and a.sync == "micro_batch",
        "GradientAccumulation(micro_batch={a.policy.micro_batch!r}) may split the batches of the ranks into different"
        ' numbers of micro-batches, so they cannot reduce at each: use {a.strategy}(sync="window").',
    ),
    (
        lambda a: a.has_unknown_rounds and a.is_static_graph,
        "{a.strategy}(static_graph=True) records the first forward and backward on all ranks together, which"
        " GradientAccumulation(micro_batch={a.policy.micro_batch!r}) does not promise. Leave static_graph out, or give a"
        " number of samples.",
    ),
    (
        lambda a: a.has_unknown_rounds and a.engine == "ddp" and bool(a.sync_batch_norms),
        "SyncBatchNorm ({a.sync_batch_norms[0]}) waits for all ranks in every micro-batch, but"
        " GradientAccumulation(micro_batch={a.policy.micro_batch!r}) may come to different numbers of them on the ranks."
        " Give a number of samples.",
    ),
    (
        lambda a: a.policy.micro_batch == "auto" and a.is_sharded,
        'GradientAccumulation(micro_batch="auto") runs a batch again if a rank runs out of memory, which {a.strategy} cannot do'
        " without the other ranks. Pass a number of samples, or Tokens(...).",
    ),
    (
        lambda a: a.same_rows > 1 and a.policy.micro_batch is not None,
        "GradientAccumulation(micro_batch={a.policy.micro_batch!r}) splits the batch of each rank by itself, but {a.same_rows}"
        " ranks have parts of the same rows, and run them together. Have the loader yield smaller batches.",
    ),
    (
        lambda a: a.same_rows > 1 and a.policy.weight not in ("auto", "equal"),
        "weight={a.weights} counts a batch, but with {a.same_rows} ranks that have parts of the same rows it cannot be known"
        ' whether that is the part or all of it. Use weight="auto", which reads what the loss of the part was divided by.',
    ),
    (
        lambda a: a.same_rows > 1 and a.policy.on_nonfinite == "skip",
        'GradientAccumulation(on_nonfinite="skip") leaves out the micro-batch of one rank, but {a.same_rows} ranks have parts of'
        ' the same rows, and their gradients flow into each other. Use on_nonfinite="raise".',
    ),
)
