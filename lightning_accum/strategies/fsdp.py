"""FullyShardedDataParallel (FSDP1): ``Trainer(strategy="accum_fsdp")``."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.distributed.fsdp import FullyShardedDataParallel
from typing_extensions import override

from lightning_accum.arguments import MisconfiguredError, checked_sync
from lightning_accum.checkpoint import PartialWindow
from lightning_accum.from_lightning import FSDPStrategy
from lightning_accum.strategies.sharded import ShardedMixin
from lightning_accum.sync import FSDP1Sync, SyncPolicy, forward_replaced
from lightning_accum.user_warnings import rank_zero_warn


class FSDPAccumulationStrategy(ShardedMixin, FSDPStrategy):
    """Exact gradient accumulation over FullyShardedDataParallel (FSDP1), ``Trainer(strategy="accum_fsdp")``.

    Lightning runs it on CUDA only.

    Args:
        args: see :class:`lightning.pytorch.strategies.FSDPStrategy`; so are the keyword arguments.
        sync: reduce the gradients over the ranks once a ``"window"``, or at every ``"micro_batch"``. Once a window sends less, but
            holds whole gradients on every rank until the window ends; the other holds shards. The result is the same.
        kwargs: see above.

    Raises:
        MisconfigurationException: ``sync`` is neither of the two.

    Example:
        >>> strategy = FSDPAccumulationStrategy(sync="micro_batch")
    """

    strategy_name = "accum_fsdp"

    def __init__(self, *args: Any, sync: SyncPolicy = "window", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sync_policy = checked_sync(sync)

    @override
    def _engine(self) -> dict[str, Any]:
        return {"engine": "fsdp1", "sync": self._sync_policy}

    @override
    def _sync_of_units(self) -> FSDP1Sync:
        assert self.model is not None
        return FSDP1Sync(self.model, self._sync_policy, self)

    @override
    def run_as_engine(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.model is self.lightning_module:  # the user wrapped parts of it
            return step(*args, **kwargs)
        assert self.lightning_module is not None
        assert self.model is not None
        with forward_replaced(self.lightning_module, step):
            return self.model(*args, **kwargs)

    @override
    def partial_window(self) -> PartialWindow | None:
        if self.accumulation is not None and self.accumulation.position:
            rank_zero_warn(
                "With FSDP1 a checkpoint inside a window does not hold its gradients: going on from it, the first step is made on"
                ' the rest of the window. strategy="accum_model_parallel" (FSDP2) holds them.'
            )
        return None

    @override
    def clip_by_norm(self, parameters: Iterable[Tensor], largest: float) -> Tensor:
        if not isinstance(self.model, FullyShardedDataParallel):
            raise MisconfiguredError(
                f"The norm of all gradients is known to one FullyShardedDataParallel around all, but {type(self.model).__name__}"
                " wraps its parts by itself. Clip by value, or in its configure_gradient_clipping."
            )
        return self.model.clip_grad_norm_(largest)
