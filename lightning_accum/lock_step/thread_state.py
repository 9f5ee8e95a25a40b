"""What a new thread does not inherit: torch keeps it for each thread. And random numbers that each of several runs draws itself."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils import _python_dispatch


def carried(device: torch.device) -> Callable[[], AbstractContextManager[None]]:
    """Take what holds in this thread, for others.

    That is: grad mode and inference mode; autocast; hooks for saved tensors; modes that see torch functions (the default device is
    one) and those that see operators; the current accelerator device and stream. Not torch's profiler, which keeps to its thread
    unless it is told to take in all (``profile_all_threads`` of its ``experimental_config``).

    Args:
        device: where tensors are.

    Returns:
        Makes a context for another thread in which the same holds.

    Example:
        >>> with torch.no_grad():
        ...     as_here = carried(torch.device("cpu"))
        >>> with as_here():
        ...     torch.is_grad_enabled()
        False
    """
    is_grad_enabled, is_inference = torch.is_grad_enabled(), torch.is_inference_mode_enabled()
    autocasts = [
        (kind, torch.get_autocast_dtype(kind)) for kind in dict.fromkeys(("cpu", device.type)) if torch.is_autocast_enabled(kind)
    ]
    is_cached = torch.is_autocast_cache_enabled()
    hooks = hooks_for_saved_tensors()
    function_modes = torch.overrides._get_current_function_mode_stack()  # type: ignore[no-untyped-call]
    dispatch_modes = _python_dispatch._get_current_dispatch_mode_stack()
    stream = torch.cuda.current_stream(device) if device.type == "cuda" else None

    @contextmanager
    def as_there() -> Iterator[None]:
        with ExitStack() as stack:
            if stream is not None:
                torch.cuda.set_device(device)
                torch.cuda.set_stream(stream)
            stack.enter_context(torch.inference_mode(is_inference))
            stack.enter_context(torch.set_grad_enabled(is_grad_enabled))
            for kind, dtype in autocasts:
                stack.enter_context(torch.autocast(kind, dtype, cache_enabled=is_cached))
            if hooks is not None:
                stack.enter_context(torch.autograd.graph.saved_tensors_hooks(*hooks))
            for mode in function_modes:
                torch.overrides._push_mode(mode)  # type: ignore[no-untyped-call]
                stack.callback(torch.overrides._pop_mode)
            for mode in dispatch_modes:
                _python_dispatch._push_mode(mode)
                stack.callback(_python_dispatch._pop_mode)
            yield

    return as_there


def hooks_for_saved_tensors() -> tuple[Callable[[Tensor], Any], Callable[[Any], Tensor]] | None:
    """Those that hold now: torch asks the innermost only. None without, and before torch 2.8, which does not tell."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return None if top is None else top(False)


class RandomStreams:
    """Each of several runs that take turns draws from a stream of its own, whatever the others draw.

    The first goes on with torch's global generators, and what is left of them stays when all have ended: where nothing is drawn,
    nothing changes. The others begin with seeds that follow from the state at the beginning. Python's and NumPy's generators are
    not streams: the runs draw from them in the order of their turns, which is the same each time. The default type of new tensors,
    which Lightning's double precision changes for a step, is one run's own too.

    Args:
        device: whose generator there is beside that of the CPU.

    Example:
        >>> streams, _ = RandomStreams(torch.device("cpu")), torch.manual_seed(1)
        >>> streams.switch(None, 0)
        >>> first = torch.rand(1)
        >>> streams.switch(0, 1)
        >>> of_the_other = torch.rand(5)
        >>> streams.switch(1, None)
        >>> drawn, _ = [first, torch.rand(1)], torch.manual_seed(1)
        >>> drawn == [torch.rand(1), torch.rand(1)]
        True
    """

    def __init__(self, device: torch.device) -> None:
        self._get: list[Callable[[], Tensor]] = [torch.get_rng_state]
        self._set: list[Callable[[Tensor], None]] = [torch.set_rng_state]
        self._seed: list[Callable[[int], Any]] = [torch.default_generator.manual_seed]
        if device.type in ("cuda", "xpu"):
            backend = getattr(torch, device.type)
            self._get.append(lambda: backend.get_rng_state(device))
            self._set.append(lambda state: backend.set_rng_state(state, device))
            self._seed.append(backend.manual_seed)
        elif device.type == "mps":
            self._get.append(torch.mps.get_rng_state)
            self._set.append(torch.mps.set_rng_state)
            self._seed.append(torch.mps.manual_seed)
        self._states: dict[int, list[Tensor]] = {}
        self._dtypes: dict[int | None, torch.dtype] = {}
        self._origin = b""

    def switch(self, before: int | None, now: int | None) -> None:
        """The turn of ``before`` ends, that of ``now`` begins; None before the first and after the last."""
        self._dtypes[before] = torch.get_default_dtype()
        torch.set_default_dtype(self._dtypes.get(now, self._dtypes[None]))
        if before is not None:
            self._states[before] = self._now()
        elif now is not None:
            self._origin = b"".join(bytes(state.tolist()) for state in self._now())
        if now is None or now in self._states:
            for put_back, state in zip(self._set, self._states.get(now or 0, []), strict=False):
                put_back(state)
        elif now > 0:
            digest = hashlib.blake2b(self._origin + now.to_bytes(8, "little"), digest_size=8).digest()
            for seed in self._seed:
                seed(int.from_bytes(digest, "little") >> 1)

    def _now(self) -> list[Tensor]:
        return [get() for get in self._get]
