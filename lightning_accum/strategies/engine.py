"""What one engine does otherwise than another, where windows are concerned: on one device, by default."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from lightning_accum.accumulation import Accumulates
from lightning_accum.ranks import Ranks
from lightning_accum.strategies.preparation import wide_sums
from lightning_accum.sync import Sync
from lightning_accum.wide_sums import WideSums


class Engine(Accumulates, Strategy):
    """The methods that do nothing here are for engines with several ranks."""

    world_size: int
    global_rank: int
    ranks: Ranks | None = None
    """Those of the training; None before there are any."""
    sync: Sync = Sync()
    """When gradients are reduced over the ranks."""
    reduces_every_backward_by_itself = False
    """Where the module optimizes by itself, the engine averages gradients over the ranks in every backward."""
    is_waited_for_in_forward = False
    """The forward and backward of a micro-batch wait for those of the other ranks, whether gradients are reduced or not."""

    # --- ranks ------------------------------------------------------------------------------------------------------

    def _ranks(self) -> Ranks:
        """Those whose gradients are averaged."""
        return Ranks(self.root_device, self.world_size, None, self.world_size, self.global_rank, getattr(self, "_timeout", None))

    def ranks_of_micro_batch(self) -> dist.ProcessGroup | None:
        """Those that run parts of the same micro-batch; None where each has its own."""
        return None

    def rank_in_group(self) -> int:
        """Of this rank, among those whose gradients are averaged."""
        return self.global_rank

    def blocked(self) -> AbstractContextManager[None]:
        """A micro-batch that is not the last of its window: its gradients are not reduced."""
        return nullcontext()

    def run_as_engine(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Run a step as the engine wants it."""
        return step(*args, **kwargs)

    def _forward_without_batch(self) -> None:
        """Take part in the other ranks' forward."""

    def _backward_without_loss(self) -> None:
        """Take part in the other ranks' backward, adding nothing."""

    def begin_manual_loader_batch(self) -> None:
        """A loader batch of a module that optimizes by itself is about to run."""

    def _engine(self) -> dict[str, Any]:
        """What is peculiar to the engine, as fields of :class:`lightning_accum.asked.Asked`."""
        return {}

    # --- gradients --------------------------------------------------------------------------------------------------

    def _wide_sums(self, dtype: torch.dtype) -> WideSums | None:
        """Where gradients are added up; None where that is done in ``dtype`` without."""
        return wide_sums(dtype, self.parameters)

    def loss_scale(self) -> float:
        """What a GradScaler multiplies losses by, and so their gradients."""
        scaler = getattr(self.precision_plugin, "scaler", None)
        return 1.0 if scaler is None else float(scaler.get_scale())

    def reduce_for_checkpoint(self) -> None:
        """Have the gradients where a checkpoint finds them."""

    def is_reduced_inside(self) -> bool:
        """The gradients of an unfinished window are averaged over the ranks already."""
        return False

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """Those of :meth:`parameters`, by names that are the same in another run."""
        assert self.lightning_module is not None
        named = dict(self.lightning_module.named_parameters())
        known = set(named.values())
        left = [parameter for parameter in self.parameters() if parameter not in known]
        return {**named, **{f"optimizer.{index}": parameter for index, parameter in enumerate(left)}}

    def drop_gradients(self) -> None:
        """Clear what was accumulated."""
        assert self.lightning_module is not None
        self.lightning_module.zero_grad()

    def parameters(self) -> list[nn.Parameter]:
        """Those of the module and of the optimizers."""
        assert self.lightning_module is not None
        parameters = dict.fromkeys(self.lightning_module.parameters())
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                parameters.update(dict.fromkeys(group["params"]))
        return list(parameters)

    def clip_by_norm(self, parameters: Iterable[Tensor], largest: float) -> Tensor:
        """Clip the gradients of ``parameters`` to a norm. Returns the norm that they had."""
        return torch.nn.utils.clip_grad_norm_(parameters, largest)

    def trainer(self) -> pl.Trainer:
        """The Trainer of the module."""
        assert self.lightning_module is not None
        return self.lightning_module.trainer
