"""Lightning's strategies with windows: a few lines for each engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy, StrategyRegistry
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_accum.callback import GradientAccumulation
from lightning_accum.micro_batch import Tokens
from lightning_accum.mixin import AccumulationMixin
from lightning_accum.sync import DDPSync, SyncPolicy


class AccumulationStrategy(AccumulationMixin, SingleDeviceStrategy):
    """Exact gradient accumulation on one device, ``Trainer(strategy="accum")``.

    It runs on the device that the Trainer's ``accelerator`` and ``devices`` name.

    Args:
        device: the device, if not the Trainer's.
        kwargs: see :class:`lightning.pytorch.strategies.SingleDeviceStrategy`.

    Raises:
        MisconfigurationException: (from the Trainer) it names more than one device or node.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_accum import GradientAccumulation
        >>> trainer = Trainer(accelerator="cpu", strategy="accum", callbacks=[GradientAccumulation(8)], logger=False)
    """

    strategy_name = "accum"

    def __init__(self, device: torch.device | str | int | None = None, **kwargs: Any) -> None:
        super().__init__(device="cpu" if device is None else device, **kwargs)
        self._has_device = device is not None

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The one device, as the Trainer's connector asks for it; None until it is known."""
        return [self.root_device] if self._has_device else None

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) > 1:
            raise MisconfigurationException(
                f'strategy="accum" runs on one device, but the Trainer names {len(devices)}. Use strategy="accum_ddp", or'
                " devices=1."
            )
        self._root_device = devices[0]
        self._has_device = True

    @property
    def num_nodes(self) -> int:
        """Always 1."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes > 1:
            raise MisconfigurationException(
                f'strategy="accum" runs on one node, but the Trainer names {num_nodes}. Use strategy="accum_ddp".'
            )


class DDPAccumulationStrategy(AccumulationMixin, DDPStrategy):
    """Exact gradient accumulation over DistributedDataParallel, ``Trainer(strategy="accum_ddp")``.

    Also registered with the suffixes of Lightning's own: ``_spawn``, ``_fork``, ``_notebook`` and
    ``_find_unused_parameters_true``.

    Args:
        args: see :class:`lightning.pytorch.strategies.DDPStrategy`; so are the keyword arguments.
        sync: reduce the gradients over the ranks once a ``"window"``, or at every ``"micro_batch"`` (Accelerate's
            ``sync_each_batch``); where loader batches are split, at the end of each, since the ranks may come to different
            numbers of micro-batches. The result is the same.
        kwargs: see above.

    Raises:
        MisconfigurationException: ``sync`` is neither of the two.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(accelerator="cpu", devices=2, strategy="accum_ddp", accumulate_grad_batches=8, logger=False)
    """

    strategy_name = "accum_ddp"

    def __init__(self, *args: Any, sync: SyncPolicy = "window", **kwargs: Any) -> None:
        if sync not in ("window", "micro_batch"):
            raise MisconfigurationException(f'sync={sync!r}: expected "window" or "micro_batch"')
        super().__init__(*args, **kwargs)
        self._sync_policy: SyncPolicy = sync
        self._sync: DDPSync | None = None

    @override
    def _begin(self, trainer: pl.Trainer, callback: GradientAccumulation | None) -> None:
        super()._begin(trainer, callback)
        if self.accumulation is None:
            return
        assert isinstance(self.model, DistributedDataParallel)
        self._check_what_ranks_cannot_split(self.model)
        self._sync = DDPSync(self.model, self._sync_policy)

    def _check_what_ranks_cannot_split(self, ddp: DistributedDataParallel) -> None:
        """Where ranks may come to different numbers of micro-batches, nothing in them may wait for another rank."""
        size = self.policy.micro_batch
        if not isinstance(size, Tokens) and size != "auto":
            return
        if self._sync_policy == "micro_batch":
            raise MisconfigurationException(
                f"GradientAccumulation(micro_batch={size!r}) may split the batches of the ranks into different numbers of micro-"
                'batches, so they cannot reduce at each: use DDPAccumulationStrategy(sync="window").'
            )
        if ddp.static_graph:
            raise MisconfigurationException(
                "DDPAccumulationStrategy(static_graph=True) records the first forward and backward on all ranks together, which"
                f" GradientAccumulation(micro_batch={size!r}) does not promise. Leave static_graph out, or give a"
                " number of samples."
            )
        names = [name for name, layer in ddp.module.named_modules() if isinstance(layer, nn.SyncBatchNorm)]
        if names:
            raise MisconfigurationException(
                f"SyncBatchNorm ({names[0]}) waits for all ranks in every micro-batch, but GradientAccumulation(micro_batch="
                f"{size!r}) may come to different numbers of them on the ranks. Give a number of samples."
            )

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        if self.accumulation is None or self._sync is None:
            with super().block_backward_sync():
                yield
        else:
            with self._sync.blocked():
                yield

    @override
    def blocked(self) -> AbstractContextManager[None]:
        if self.accumulation is None or self._sync is None:
            return self.block_backward_sync()
        plan = self.accumulation.plan
        return self._sync.blocked(is_last_of_batch=plan is None or plan.current == len(plan.pieces) - 1)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.accumulation is None or self._sync is None:
            return super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        with self.precision_plugin.train_step_context():
            if self._is_retried():  # it may fail on this rank alone, so the others must not wait for it in there
                return self.lightning_module.training_step(*args, **kwargs)
            return self._sync.forward(self.lightning_module.training_step, *args, **kwargs)

    @override
    def _forward_without_batch(self) -> None:
        assert self.accumulation is not None
        assert self._sync is not None
        if self._is_retried():
            self.accumulation.window.skip()  # the others agree on a scale in their first micro-batch, before this forward
            if not self.accumulation.is_boundary:
                return
        with nullcontext() if self.accumulation.is_boundary else self._sync.blocked():
            self._sync.forward_without_batch()

    @override
    def _backward_without_loss(self) -> None:
        assert self._sync is not None
        if self._is_retried():
            self._sync.reduce_without_loss()
        else:
            self._sync.backward_without_loss()

    def _is_retried(self) -> bool:
        """Reduction waits for the end of the window, in a forward and backward of its own."""
        return self.policy.micro_batch == "auto"

    @override
    def _can_replace_loss(self) -> bool:
        return self._sync is None or not self._sync.is_recording_graph()

    @override
    def end_micro_batch(self) -> Tensor | None:
        if self._sync is not None:
            self._sync.complete_reduction()
        return super().end_micro_batch()

    @override
    def _end_window(self) -> Tensor | None:
        if self._sync is not None:
            self._sync.note_used_parameters()
        return super()._end_window()

    @override
    def teardown(self) -> None:
        self._sync = None
        super().teardown()


def register() -> None:
    """Add the strategies to Lightning's registry, under the names of Lightning's own with ``accum`` in front."""
    entries: list[tuple[str, type[Strategy], dict[str, Any]]] = [("accum", AccumulationStrategy, {})]
    for launcher, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")):
        entries.append((f"accum_ddp{launcher}", DDPAccumulationStrategy, {"start_method": start_method}))
        for find_unused in (True, False):
            name = f"accum_ddp{launcher}_find_unused_parameters_{str(find_unused).lower()}"
            arguments = {"start_method": start_method, "find_unused_parameters": find_unused}
            entries.append((name, DDPAccumulationStrategy, arguments))
    for name, strategy, arguments in entries:
        StrategyRegistry.register(name, strategy, description=strategy.__name__, override=True, **arguments)


register()
