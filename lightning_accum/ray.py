"""Ray Train: strategies that ``ray.train.lightning.prepare_trainer`` takes."""

from __future__ import annotations

from lightning_accum.trainer.engines import DDPAccumulationStrategy, FSDPAccumulationStrategy
from lightning_accum.trainer.from_lightning import pl

try:
    from ray.train.lightning import RayDDPStrategy, RayFSDPStrategy
except ImportError as error:
    raise ImportError('lightning_accum.ray needs Ray Train: pip install "ray[train]"') from error

if not issubclass(RayDDPStrategy, pl.strategies.DDPStrategy):
    raise ImportError(f"Import Trainer and modules from {RayDDPStrategy.__mro__[1].__module__}, as Ray Train's strategies do.")


class RayDDPAccumulationStrategy(DDPAccumulationStrategy, RayDDPStrategy):  # type: ignore[misc]  # Ray has no types
    """Exact gradient accumulation over DistributedDataParallel, between the workers of Ray Train.

    Takes the arguments of :class:`lightning_accum.DDPAccumulationStrategy`, except ``process_group_backend``, ``timeout`` and
    ``start_method``, which Ray's ``TorchConfig`` has.

    Example:
        In the function that ``ray.train.torch.TorchTrainer`` runs on each worker::

            trainer = Trainer(
                strategy=RayDDPAccumulationStrategy(),
                plugins=[RayLightningEnvironment()],
                callbacks=[GradientAccumulation(8), RayTrainReportCallback()],
                devices="auto",
            )
            prepare_trainer(trainer).fit(module)
    """


class RayFSDPAccumulationStrategy(FSDPAccumulationStrategy, RayFSDPStrategy):  # type: ignore[misc]
    """Exact gradient accumulation over FullyShardedDataParallel (FSDP1), between the workers of Ray Train.

    Takes the arguments of :class:`lightning_accum.FSDPAccumulationStrategy`.
    """
