"""The table of arguments that exclude each other, with a message for each row.

A row applies once its arguments are known: the policy in the constructor of ``GradientAccumulation``, the rest when a fit is set
up. The page ``reference/exclusions.md`` of the site has the same rows in words.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_accum.boundary import TAILS
from lightning_accum.errors import ArgumentError
from lightning_accum.main_gradients import is_narrower, sparse_layers
from lightning_accum.policy import Policy, Tokens
from lightning_accum.sync.base import SyncPolicy


@dataclass(frozen=True)
class Asked:
    """The arguments of a training, as far as they are known."""

    policy: Policy  # of the callback
    trainers_window: int = 1  # ``accumulate_grad_batches`` of the Trainer
    module: nn.Module | None = None  # the module in training; None before a fit
    is_manual: bool = False  # it has ``automatic_optimization = False``
    optimizers: Sequence[Optimizer] = ()  # of the training
    parameters: Sequence[Tensor] = ()  # of the module and of the optimizers
    strategy: str = ""  # the class of the strategy; empty before a fit
    engine: str = ""  # reduces gradients, such as ``"ddp"``, ``"fsdp1"`` or ``"fsdp2"``; empty before a fit, and on one device
    sync: SyncPolicy = "window"  # when gradients are reduced
    is_static_graph: bool = False  # DistributedDataParallel records the first backward
    has_comm_hook: bool = False  # the user has set a communication hook
    ranks: int = 1  # the number of ranks with their own batches
    tensor_parallel: int = 1  # the number of ranks that share a batch
    same_rows: int = 1  # the number of ranks that have parts of the same rows

    @property
    def is_sharded(self) -> bool:
        """No rank has all parameters."""
        return self.engine in ("fsdp1", "fsdp2")

    @property
    def needs_as_many_rounds(self) -> str:
        """The option that makes ranks wait for each other in every micro-batch; empty if there is none."""
        if self.engine != "ddp":
            return ""
        if self.sync == "micro_batch" or self.is_static_graph:  # gradients are reduced in one backward
            one_backward = "static_graph=True" if self.is_static_graph else 'sync="micro_batch"'
            return f"{self.strategy}({one_backward})"
        modules = () if self.module is None else self.module.named_modules()
        return next((f"SyncBatchNorm ({name})" for name, layer in modules if isinstance(layer, nn.SyncBatchNorm)), "")

    @property
    def not_row_wise_sharded(self) -> str:
        """The option with which ``fully_shard`` cannot run submodules again after a backward; empty if it can."""
        if torch.__version__ < "2.9":
            return f"torch {torch.__version__}, which reduces accumulated gradients only in another forward and backward"
        if self.sync != "window":
            return f'sync="{self.sync}"'
        if self.tensor_parallel > 1:
            return "tensor parallelism"
        return f"on_nonfinite={self.policy.on_nonfinite!r}" if self.policy.on_nonfinite != "propagate" else ""


def refuse(asked: Asked) -> None:
    """Refuse arguments that exclude each other: the first row of the table that applies says why."""
    for why in _exclusions(asked):
        raise ArgumentError(why)


def _exclusions(a: Asked) -> Iterator[str]:
    """The table: the message of each row that applies."""
    policy, strategy, row_wise = a.policy, a.strategy, list(a.policy.row_wise)
    weights = list(policy.weight) if isinstance(policy.weight, tuple) else [policy.weight]
    is_long, is_split = policy.may_be_longer_than_one(a.trainers_window), policy.micro_batch is not None
    looks_at_gradients, nonfinite = policy.on_nonfinite != "propagate", f"on_nonfinite={policy.on_nonfinite!r}"
    micro_batch, window, dtype = f"micro_batch={policy.micro_batch!r}", f"window={policy.window!r}", policy.accumulate_dtype
    widens = dtype is not None and any(is_narrower(parameter.dtype, dtype) for parameter in a.parameters)
    module_name = type(a.module).__name__

    # --- arguments of GradientAccumulation beside each other
    trims = f"trim_padding={policy.trim_padding!r}" if isinstance(policy.trim_padding, str) else ""
    only_for_split = trims if policy.split is None else "split="
    if only_for_split and (row_wise or policy.offload):
        whole = f"row_wise={row_wise}" if row_wise else 'micro_batch="offload"'
        yield f"{only_for_split} is for loader batches that are split, but {whole} runs them whole. Leave it out."
    if trims and not is_split:
        yield f"{trims} says how to split loader batches, but not into which size: set micro_batch= too."
    if policy.counts_ahead and TAILS[policy.tail].goes_on and is_long:
        yield f"weight={weights} counts a window before it runs, but tail='carry' leads into the next epoch. Use 'step' or 'drop'."

    # --- and beside a module or an optimizer
    training_step = getattr(a.module, "training_step", None)
    draws = training_step is not None and "dataloader_iter" in inspect.signature(training_step).parameters
    if (is_split or policy.counts_ahead) and draws:
        asked = micro_batch if is_split else f"weight={weights}"
        yield f"{asked} is for batches of the loader, but {module_name}.training_step draws its own (`dataloader_iter`)."
    if any(isinstance(optimizer, LBFGS) for optimizer in a.optimizers):
        again = "LBFGS runs its closure several times in a step, and"
        if is_long:
            yield f"{again} the loader batches of a window are gone by then. Use GradientAccumulation(1) or another optimizer."
        if policy.on_nonfinite == "skip":
            yield f'{again} compares its losses, so none can be left out. Use on_nonfinite="raise" or another optimizer.'
        if a.is_manual and a.ranks > 1:
            yield f"{again} gradients of manual optimization are reduced over the ranks once. Use one rank, or another optimizer."
    if a.is_manual:
        alone = f"is not for modules with automatic_optimization=False, such as {module_name}: they run backward and step."
        if policy.ends_by_tokens:
            yield f"{window} {alone} Give the window in loader batches."
        if is_split:
            yield f'{micro_batch} {alone} GradientAccumulation(micro_batch="offload") runs the batch whole.'
        if policy.counts_ahead:
            yield f'weight={weights}, one for each term, {alone} Give one weight, or "auto".'
        if dtype is not None:
            yield f"accumulate_dtype={dtype} {alone} Leave it out."
        if looks_at_gradients:
            yield f'{nonfinite} {alone} Check for it in training_step, or leave it at "propagate".'
        if a.is_sharded and row_wise:
            yield f'row_wise={row_wise} {alone} Use Trainer(strategy="accum_ddp"), whose backwards do not gather parameters.'

    # --- and beside an engine
    if widens and not a.is_sharded and a.module is not None and (layers := sparse_layers(a.module)):
        yield f"accumulate_dtype={dtype} sums dense gradients, but {next(iter(layers))} has sparse ones. Leave out one of the two."
    if widens and a.engine in ("ddp", "fsdp2") and a.sync == "micro_batch":
        yield f'accumulate_dtype={dtype} is reduced once a window, but {strategy}(sync="micro_batch") reduces more. Use "window".'
    if widens and a.has_comm_hook:
        yield f"accumulate_dtype={dtype} reduces its own sums, without {strategy}(ddp_comm_hook=...). Leave one of them out."
    if a.engine == "fsdp1" and dtype is not None:
        yield (
            f"accumulate_dtype={dtype}: FSDP1 sums gradients in its compute type. Use FSDP2; or, with parameters in float32, "
            'FSDPAccumulationStrategy(sync="micro_batch") without accumulate_dtype, which sums shards in float32.'
        )
    if a.engine == "fsdp1" and looks_at_gradients:
        yield f'{nonfinite} needs gradients that FSDP1 does not expose. Use strategy="accum_model_parallel" (FSDP2, fully_shard).'
    if looks_at_gradients and a.sync != "window":
        yield f'{nonfinite} needs the gradients of each rank, but {strategy}(sync={a.sync!r}) reduces them. Use sync="window".'
    again = "runs submodules again in the backward of the loss"
    if a.is_static_graph:
        recorded = f"is decided after a backward, but {strategy}(static_graph=True) reduces gradients in one recorded backward."
        if looks_at_gradients:
            yield f"The effect of {nonfinite} {recorded} Leave static_graph out."
        if row_wise and not a.is_manual:
            yield f"row_wise={row_wise} {again}, but {strategy}(static_graph=True) records one backward. Leave static_graph out."
        if policy.ends_by_tokens:
            yield f"The end of {window} {recorded} Leave static_graph out, or give the window in loader batches."
    if row_wise and a.engine == "fsdp1":
        yield f'row_wise={row_wise} {again}, which FSDP1 cannot. Use strategy="accum_model_parallel" (FSDP2) or "accum_ddp".'
    if row_wise and a.engine == "fsdp2" and a.not_row_wise_sharded:
        other = a.not_row_wise_sharded
        yield f'row_wise={row_wise} {again}, which FSDP2 cannot with {other}. Leave that out, or use Trainer(strategy="accum_ddp").'
    if (isinstance(policy.micro_batch, Tokens) or policy.micro_batch == "auto") and a.needs_as_many_rounds:
        one = a.needs_as_many_rounds
        yield f"{micro_batch} varies between ranks, but {one} needs the same number on every rank. Give a number of samples."
    if policy.micro_batch == "auto" and a.is_sharded:
        yield f"{micro_batch} runs a batch again on one rank, which {strategy} cannot. Pass a number of samples, or Tokens(...)."
    if a.same_rows > 1:
        parts = f"but {a.same_rows} ranks have parts of the same rows and run together."
        if is_split:
            yield f"{micro_batch} splits the batch of each rank, {parts} Use smaller loader batches."
        if policy.weight not in ("auto", "equal"):
            yield f'weight={weights} counts a batch, or a part of it, {parts} Use weight="auto".'
        if policy.on_nonfinite == "skip":
            yield f'{nonfinite} leaves out the micro-batch of one rank, {parts} Use on_nonfinite="raise".'
