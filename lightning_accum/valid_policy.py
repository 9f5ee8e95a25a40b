"""The fields of a :class:`~lightning_accum.policy.Policy`: which values they may have, and what to say of others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from lightning_accum.errors import ArgumentError
from lightning_accum.policy import Policy
from lightning_accum.splitting.micro_batch import Tokens


def checked(policy: Policy) -> Policy:
    """The policy, with a list of weights as a tuple.

    Raises:
        ValueError: an argument is out of its range.
    """
    for argument, example in (("window", "Tokens(8_192)"), ("micro_batch", "Tokens(8_192)"), ("weight", "TokenCount()")):
        _check_is_no_class(argument, getattr(policy, argument), example)
    _check_window(policy.window)
    _check_micro_batch(policy.micro_batch, policy.trim_padding, policy.split)
    weight = _checked_weight(policy.weight)
    _check_is_one_of("tail", policy.tail, "step", "drop", "carry")
    _check_is_one_of("scheduler_counts", policy.scheduler_counts, "optimizer_steps", "micro_batches")
    dtype: Any = policy.accumulate_dtype
    if not (dtype is None or (isinstance(dtype, torch.dtype) and dtype.is_floating_point)):
        raise ArgumentError(f"accumulate_dtype={dtype!r}: expected a floating-point torch.dtype, such as torch.float32, or None")
    if not (policy.validate_every is None or _is_natural(policy.validate_every, 1)):
        raise ArgumentError(f"validate_every={policy.validate_every!r}: expected a number of optimizer steps from 1, or None")
    _check_is_one_of("on_nonfinite", policy.on_nonfinite, "propagate", "skip", "raise")
    for name, value in (("log", policy.log), ("check", policy.check)):
        if not isinstance(value, bool):
            raise ArgumentError(f"{name}={value!r}: expected True or False")
    return replace(policy, weight=weight)


def row_wise_fields(row_wise: Any, micro_batch: Any) -> dict[str, Any]:
    """The fields of a :class:`Policy` for the argument ``row_wise``.

    Raises:
        ValueError: it is no name, or the micro-batches have no size.
    """
    if row_wise is None:
        return {}
    names = (row_wise,) if isinstance(row_wise, str) else tuple(row_wise) if isinstance(row_wise, (list, tuple)) else ()
    if not names or not all(isinstance(name, str) and name for name in names):
        raise ArgumentError(f"row_wise={row_wise!r}: expected the name of a submodule, a list of names, or None")
    if micro_batch is None or micro_batch == "offload":
        raise ArgumentError(
            f"row_wise={row_wise!r} runs submodules in micro-batches, but micro_batch={micro_batch!r}: give a number of samples,"
            ' Tokens(...) or "auto"'
        )
    _check_micro_batch(micro_batch, True, None)
    return {"row_wise": names, "row_wise_size": micro_batch}


def _check_is_one_of(argument: str, found: Any, *expected: str) -> None:
    if found not in expected:
        *first, last = (f'"{word}"' for word in expected)
        raise ArgumentError(f"{argument}={found!r}: expected {', '.join(first)} or {last}")


def _check_is_no_class(argument: str, found: Any, example: str) -> None:
    for one in found if isinstance(found, (list, tuple)) else [found]:
        if isinstance(one, type):
            raise ArgumentError(f"{argument}={one.__name__} is a class: pass an instance of it, such as {example}")


def _check_window(window: Any) -> None:
    if isinstance(window, Mapping):
        if not window or any(not _is_natural(epoch, 0) or not _is_natural(size, 1) for epoch, size in window.items()):
            raise ArgumentError(f"window={window!r}: expected {{epoch: loader batches}} with epochs from 0 and sizes from 1")
        if 0 not in window:
            raise ArgumentError(f"window={dict(window)!r} does not say what holds in epoch 0; add {{0: 1}}")
    elif not (window is None or isinstance(window, Tokens) or callable(window) or _is_natural(window, 1)):
        raise ArgumentError(
            f"window={window!r}: expected a number of loader batches from 1, {{epoch: number}}, a function of the optimizer step,"
            " Tokens(...) or None"
        )


def _checked_weight(weight: Any) -> Any:
    if isinstance(weight, (list, tuple)) and len(weight) == 1:
        weight = weight[0]
    if not isinstance(weight, (list, tuple)):
        if not (callable(weight) or (isinstance(weight, str) and weight in ("auto", "equal"))):
            raise ArgumentError(
                f'weight={weight!r}: expected "auto", "equal" or a callable of the batch, or a list of callables, one for each term'
            )
        return weight
    if not weight or not all(callable(of_term) for of_term in weight):
        raise ArgumentError(
            f"weight={weight!r}: expected a callable of the batch for each term of the loss, such as [TokenCount(), SampleCount()]"
        )
    return tuple(weight)


def _is_natural(number: Any, least: int) -> bool:
    return isinstance(number, int) and not isinstance(number, bool) and number >= least


def _check_micro_batch(micro_batch: Any, trim_padding: Any, split: Any) -> None:
    if not (micro_batch is None or micro_batch == "auto" or isinstance(micro_batch, Tokens) or _is_natural(micro_batch, 1)):
        raise ArgumentError(
            f'micro_batch={micro_batch!r}: expected a number of samples from 1, Tokens(...), "auto", "offload" or None'
        )
    if isinstance(micro_batch, Tokens) and callable(micro_batch.count):
        raise ArgumentError(f"micro_batch={micro_batch!r}: only the Tokens of a window can be a function")
    if not isinstance(trim_padding, (bool, str)):
        raise ArgumentError(f"trim_padding={trim_padding!r}: expected True, False, or the key of a mask or of lengths in the batch")
    if split is not None and not callable(split):
        raise ArgumentError(f"split={split!r}: expected a function of a batch and a size")
