"""One device: ``Trainer(strategy="accum")``."""

from __future__ import annotations

from typing import Any

import torch

from lightning_accum.trainer.arguments import MisconfiguredError
from lightning_accum.trainer.from_lightning import SingleDeviceStrategy
from lightning_accum.trainer.strategy import AccumulationMixin


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
            raise MisconfiguredError(
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
            raise MisconfiguredError(
                f'strategy="accum" runs on one node, but the Trainer names {num_nodes}. Use strategy="accum_ddp".'
            )
