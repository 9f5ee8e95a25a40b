"""What a training is asked for, all in one place: what excludes what goes by it."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.optim import LBFGS, Optimizer

from lightning_accum.main_gradients import is_narrower, sparse_layers
from lightning_accum.policy import Policy
from lightning_accum.splitting.micro_batch import Tokens
from lightning_accum.sync import ShardedSyncPolicy


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

    @property
    def sync_batch_norms(self) -> list[str]:
        """Layers that wait for all ranks in a forward."""
        return [] if self.module is None else [n for n, layer in self.module.named_modules() if isinstance(layer, nn.SyncBatchNorm)]

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
