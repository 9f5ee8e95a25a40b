"""Where micro-batches and BatchNorm meet: what is warned of, what is refused, what runs together."""

from __future__ import annotations

from collections.abc import Callable

from lightning.fabric.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from lightning_accum.policy import Policy
from lightning_accum.weighing.safeguards import batch_norm_layers


def joins_batches(policy: Policy, module: nn.Module, is_window_long: bool, warn: Callable[[str], None]) -> bool:
    """Whether the micro-batches of a batch are to run together, for the BatchNorm layers in ``module``.

    Args:
        policy: what was asked for.
        module: that is trained.
        is_window_long: a window may have several loader batches.
        warn: takes a warning to be seen once.

    Raises:
        MisconfigurationException: ``batch_norm="exact"`` cannot be had.
    """
    is_split = policy.micro_batch is not None
    if not (is_window_long or is_split):
        return False
    if policy.batch_norm == "warn":
        if layers := batch_norm_layers(module):
            if is_split and not is_window_long:
                mend = 'GradientAccumulation(micro_batch=..., batch_norm="exact") gives it the statistics of the whole batch.'
            else:
                mend = (
                    "Have the loader yield batches as large as the window: GradientAccumulation(micro_batch=...,"
                    ' batch_norm="exact") splits them, and gives it the statistics of the whole batch.'
                )
            warn(
                f"BatchNorm ({_names(layers)}) normalises each micro-batch by its own statistics, and updates its running"
                f" statistics at each: with it a window differs from its full batch. {mend}"
            )
        return False
    layers = [name for name, layer in module.named_modules() if isinstance(layer, _BatchNorm)]
    _refuse_scripted(module)
    if not layers:
        return False
    if is_window_long:
        window = policy.window if policy.window is not None else "the Trainer's accumulate_grad_batches"
        raise MisconfigurationException(
            f'GradientAccumulation(batch_norm="exact") takes the statistics of BatchNorm ({_names(layers)}) over one loader batch,'
            f" but a window may have several of them (window={window}), and would have to hold them all at once. Have the loader"
            " yield batches as large as the window, and split them: GradientAccumulation(micro_batch=...)."
        )
    if policy.on_nonfinite != "propagate":
        raise MisconfigurationException(
            f'GradientAccumulation(batch_norm="exact", on_nonfinite={policy.on_nonfinite!r}): the rows of all micro-batches are in'
            " the same statistics, so none can be left out, or found to be the bad one. Use one of the two."
        )
    if policy.accumulate_dtype is not None:
        raise MisconfigurationException(
            f'GradientAccumulation(batch_norm="exact", accumulate_dtype={policy.accumulate_dtype}): a window is one backward for'
            " all its micro-batches, and nothing is added up. Leave accumulate_dtype out."
        )
    return True


def refuse_sharded(policy: Policy, strategy: str) -> None:
    """Sharded modules wait for the other ranks in each forward, also between the micro-batches.

    Raises:
        MisconfigurationException: ``batch_norm="exact"`` was asked for.
    """
    if policy.batch_norm == "exact":
        raise MisconfigurationException(
            f'GradientAccumulation(batch_norm="exact") runs the forwards of all micro-batches at once, which {strategy} cannot: it'
            " gathers parameters for one forward after the other, and frees them. Use"
            ' Trainer(strategy="accum_ddp"), or batch_norm="warn".'
        )


def _refuse_scripted(module: nn.Module) -> None:
    for name, layer in module.named_modules():
        original = getattr(layer, "original_name", None)  # of a scripted module
        if original is not None and "BatchNorm" in original and not isinstance(layer, _BatchNorm):
            raise MisconfigurationException(
                f"GradientAccumulation(batch_norm=\"exact\") cannot look into the scripted BatchNorm layer '{name}'. Leave"
                " torch.jit.script out for training."
            )


def _names(layers: list[str]) -> str:
    return ", ".join(layers[:3]) + (f" and {len(layers) - 3} more" if len(layers) > 3 else "")
