"""What excludes what: every combination that is refused, in one table.

A row applies as soon as what it is about is known: in the constructor of ``GradientAccumulation`` the policy, when a fit is set up
all of it. The guide shows the same table in words.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_accum.policy import Policy
from lightning_accum.splitting.micro_batch import Tokens
from lightning_accum.sync import SyncPolicy
from lightning_accum.wide_sums import is_narrower, sparse_layers


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
    """

    policy: Policy
    trainers_window: int = 1
    module: nn.Module | None = None
    is_manual: bool = False
    optimizers: Sequence[Optimizer] = ()
    parameters: Sequence[Tensor] = ()
    strategy: str = ""
    engine: Literal["", "ddp", "fsdp1", "fsdp2"] = ""
    sync: SyncPolicy = "window"
    is_static_graph: bool = False
    has_comm_hook: bool = False

    @property
    def is_window_long(self) -> bool:
        """A window may have several loader batches."""
        return self.policy.may_be_longer_than_one(self.trainers_window)

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

    @property
    def sync_batch_norms(self) -> list[str]:
        """Layers that wait for all ranks in a forward."""
        return [] if self.module is None else [n for n, layer in self.module.named_modules() if isinstance(layer, nn.SyncBatchNorm)]


class Exclusion(NamedTuple):
    """Two things that cannot be had together.

    Attributes:
        what: of the two, the one that is asked for; in Markdown, as the guide has it.
        excludes: what it cannot be had with.
        instead: what to do.
        applies: whether both are asked for.
        message: of the error.
    """

    what: str
    excludes: str
    instead: str
    applies: Callable[[Asked], bool]
    message: Callable[[Asked], str]


def why_refused(asked: Asked) -> str | None:
    """What the first row says that applies; None where none does."""
    return next((row.message(asked) for row in EXCLUSIONS if row.applies(asked)), None)


def _setting(asked: Asked) -> str:
    """How micro-batches were asked for."""
    return f"GradientAccumulation(micro_batch={asked.policy.micro_batch!r})"


def _only_for_split(asked: Asked) -> str | None:
    """An argument that is for split batches."""
    return "split=" if asked.policy.split is not None else "trim_padding=" if isinstance(asked.policy.trim_padding, str) else None


EXCLUSIONS = (
    Exclusion(
        "`split=`, `trim_padding=` with a key",
        "loader batches that are not split",
        "`micro_batch=`",
        lambda a: bool(_only_for_split(a)) and a.policy.micro_batch is None and not a.policy.row_wise and not a.policy.offload,
        lambda a: (
            f"{_only_for_split(a)} is for loader batches that are split into micro-batches, but none is: set micro_batch= too, which"
            " says how large they are"
        ),
    ),
    Exclusion(
        "`split=`, `trim_padding=` with a key",
        '`micro_batch="offload"`, `row_wise=`',
        "leave it out: nothing is split",
        lambda a: bool(_only_for_split(a)) and (bool(a.policy.row_wise) or a.policy.offload),
        lambda a: (
            f"GradientAccumulation({'row_wise=...' if a.policy.row_wise else 'micro_batch=\"offload\"'}) runs training_step on each"
            f" loader batch as it is: leave out {_only_for_split(a)}, which is for those that are split"
        ),
    ),
    Exclusion(
        "a weight for each term",
        '`tail="carry"` with windows of several loader batches',
        '`tail="step"`, or a window of 1',
        lambda a: a.policy.counts_ahead and a.policy.tail == "carry" and a.is_window_long,
        lambda a: (
            f"weight={a.policy.weight!r} counts a window before it runs, but with tail=\"carry\" it goes on in an epoch whose batches"
            ' cannot be drawn yet. Use tail="step" or "drop", or one weight for all terms.'
        ),
    ),
    Exclusion(
        "`micro_batch=` as a number, `Tokens` or `\"auto\"`; a weight for each term",
        "a `training_step` that draws its batches by itself (`dataloader_iter`)",
        "a `training_step` that takes a batch",
        lambda a: (a.policy.micro_batch is not None or a.policy.counts_ahead) and a.draws_batches,
        lambda a: (
            f"{_setting(a) + ' splits' if a.policy.micro_batch is not None else f'weight={a.policy.weight!r} counts'} the batches of"
            f" the loader, but the training_step of {type(a.module).__name__} draws them by itself (`dataloader_iter`)."
        ),
    ),
    Exclusion(
        "`accumulate_dtype=`",
        "layers with `sparse=True`",
        "dense gradients",
        lambda a: bool(a.is_summed_apart and a.engine in ("", "ddp") and a.sparse_layers),
        lambda a: (
            f"GradientAccumulation(accumulate_dtype={a.policy.accumulate_dtype}) adds up dense gradients, but those of"
            f" {a.sparse_layers[0]} are sparse. Leave sparse=True out of it, or accumulate_dtype."
        ),
    ),
    Exclusion(
        "LBFGS",
        "windows of several loader batches",
        "a window of 1",
        lambda a: a.has_lbfgs and (a.is_window_long or a.is_manual),
        lambda a: (
            "LBFGS runs its closure several times in a step, and a window of several loader batches cannot be run again: their data"
            " is gone. Use GradientAccumulation(1) or another optimizer."
        ),
    ),
    Exclusion(
        "LBFGS",
        '`on_nonfinite="skip"`',
        '`on_nonfinite="raise"`',
        lambda a: a.has_lbfgs and a.policy.on_nonfinite == "skip",
        lambda a: (
            "LBFGS compares the losses of a batch that it runs several times in a step, and none of them can be left out."
            ' Use on_nonfinite="raise" or another optimizer.'
        ),
    ),
)
