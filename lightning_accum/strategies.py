"""Lightning's strategies with windows: a few lines for each engine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy, StrategyRegistry
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_accum.callback import GradientAccumulation
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
            ``sync_each_batch``). The result is the same.
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
        self._sync = DDPSync(self.model, self._sync_policy)

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
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        if self.accumulation is None or self._sync is None:
            return super().training_step(*args, **kwargs)
        assert self.lightning_module is not None
        with self.precision_plugin.train_step_context():
            return self._sync.forward(self.lightning_module.training_step, *args, **kwargs)

    @override
    def _forward_without_batch(self) -> None:
        assert self.accumulation is not None
        assert self._sync is not None
        with nullcontext() if self.accumulation.is_boundary else self._sync.blocked():
            self._sync.forward_without_batch()

    @override
    def _backward_without_loss(self) -> None:
        assert self._sync is not None
        self._sync.backward_without_loss()

    @override
    def _can_replace_loss(self) -> bool:
        return self._sync is None or not self._sync.is_recording_graph()

    @override
    def end_micro_batch(self) -> Tensor | None:
        loss = super().end_micro_batch()
        if self._sync is not None and self.accumulation is not None and self.accumulation.is_boundary:
            self._sync.note_used_parameters()
        return loss

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
