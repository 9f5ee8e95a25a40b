"""The proof of a submodule in half precision, made in single precision too: rounding hides there what is smaller."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor

from lightning_accum.errors import RowWiseError
from lightning_accum.whole.layers import Layer
from lightning_accum.whole.trees import Tree, read
from lightning_accum.wider import is_narrow, widened, widened_batch


def prove_in_single_precision(layer: Layer, arguments: Tree, prove: Callable[[Tree], Any]) -> None:
    """Make a proof once more, where the submodule computes in half precision, and runs in single precision too.

    Args:
        layer: that is called.
        arguments: of the call.
        prove: takes them in single precision.

    Raises:
        RowWiseError: the proof failed.
    """
    tensors = [*layer.module.parameters(), *(leaf for leaf in arguments.leaves if isinstance(leaf, Tensor))]
    kinds = {tensor.device.type for tensor in tensors}
    if layer.is_sharded or not (any(map(is_narrow, tensors)) or any(map(torch.is_autocast_enabled, kinds))):
        return
    try:
        with ExitStack() as stack:
            for kind in kinds:
                stack.enter_context(torch.autocast(kind, enabled=False))
            stack.enter_context(widened(layer.module, torch.float32))
            prove(read(arguments.make(widened_batch(leaf, torch.float32) for leaf in arguments.leaves)))
    except RowWiseError:
        raise
    except Exception:  # some submodules run in their own precision only, and memory may run out
        return
