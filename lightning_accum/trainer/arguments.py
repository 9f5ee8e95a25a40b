"""The arguments of :class:`~lightning_accum.GradientAccumulation`: what is wrong with them, and what to say of it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from lightning_accum.errors import AccumulationError, ArgumentError
from lightning_accum.policy import check_is_one_of
from lightning_accum.trainer.from_lightning import (
    DeepSpeedStrategy,
    FSDPStrategy,
    MisconfigurationException,
    ModelParallelStrategy,
    SingleDeviceXLAStrategy,
    Strategy,
    XLAStrategy,
    pl,
)


class MisconfiguredError(AccumulationError, MisconfigurationException):
    """Arguments, a module, data or a Trainer are wrong: Lightning's error for that, and this package's."""


@contextmanager
def misconfigured() -> Iterator[None]:
    """An ArgumentError in here is raised as the error that Lightning has for wrong arguments."""
    try:
        yield
    except ArgumentError as error:
        raise MisconfiguredError(str(error)) from error.__cause__


def check_validation_is_left_to(every: int, trainer: pl.Trainer) -> None:
    """Refuse a Trainer that says when to validate, as ``validate_every`` does.

    Raises:
        MisconfigurationException: its arguments are not those of a Trainer by default.
    """
    own = {name: vars(trainer).get(name) for name in ("val_check_interval", "check_val_every_n_epoch")}
    if getattr(trainer, "_val_check_time_interval", None) is not None:
        own["val_check_interval"] = "a time"
    if trainer.fast_dev_run or own == {"val_check_interval": 1.0, "check_val_every_n_epoch": 1}:  # type: ignore[attr-defined]
        return
    said = ", ".join(f"{name}={value}" for name, value in own.items())
    raise MisconfiguredError(
        f"Trainer({said}) and GradientAccumulation(validate_every={every}) both say when to validate. Leave val_check_interval and"
        " check_val_every_n_epoch out, to validate every so many optimizer steps; or leave validate_every out."
    )


def what_to_use_instead_of(strategy: Strategy) -> str:
    """Of this package, for a Trainer that has another strategy."""
    sharded = 'Trainer(strategy="accum_fsdp") or "accum_model_parallel" (FSDP2, fully_shard)'
    if isinstance(strategy, DeepSpeedStrategy):
        return (
            "DeepSpeed's engine divides, reduces and steps by itself. For shards as with its stages, use"
            f" {sharded}; or stay with DeepSpeed and its gradient_accumulation_steps, without this callback."
        )
    if isinstance(strategy, (XLAStrategy, SingleDeviceXLAStrategy)):
        return "The weight of a loss that XLA computes cannot be read. Leave this callback out, or use another device."
    if isinstance(strategy, FSDPStrategy):
        return 'Use Trainer(strategy="accum_fsdp"), or FSDPAccumulationStrategy(...) with the same arguments.'
    if isinstance(strategy, ModelParallelStrategy):
        return 'Use Trainer(strategy="accum_model_parallel"), or ModelParallelAccumulationStrategy(...) with the same arguments.'
    return (
        f'Use Trainer(strategy="accum") on one device, or Trainer(strategy="accum_ddp") on several; for sharded modules {sharded}.'
    )


_Sync = TypeVar("_Sync", bound=str)


def checked_sync(sync: _Sync, *others: str) -> _Sync:
    """The argument ``sync`` of a strategy.

    Raises:
        MisconfigurationException: it is none of them.
    """
    with misconfigured():
        check_is_one_of("sync", sync, "window", "micro_batch", *others)
    return sync
