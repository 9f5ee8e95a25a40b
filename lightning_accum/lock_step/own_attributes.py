"""Attributes that a forward leaves for later, kept apart for each of several forwards that take turns."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

_OF_EVERY_MODULE = frozenset(vars(nn.Module()))


class OwnAttributes:
    """What a micro-batch puts into attributes of its modules, to be used later in the same forward, is its own.

    Taken for that are tensors with a graph: the value of an attribute, or what is in a dict or a list that is an attribute. They go
    when the turn of the micro-batch ends, and are there again in its next. Anything else is shared by all: numbers that are
    counted up, sums without a graph. Not found is what is kept outside of modules, such as a dict that only a hook knows.

    Args:
        module: with everything below it.

    Example:
        >>> module = nn.Module()
        >>> own, graph = OwnAttributes(module), Tensor([1.0]).requires_grad_() * 2
        >>> module.hidden, module.count = graph, 1
        >>> own.switch(0, 1)
        >>> hasattr(module, "hidden"), module.count
        (False, 1)
        >>> own.switch(1, 0)
        >>> module.hidden is graph
        True
    """

    def __init__(self, module: nn.Module) -> None:
        self._holders = [vars(child) for child in module.modules()]
        self._before = self._take()
        self._kept: dict[int, list[tuple[Any, Any, Any]]] = {}

    def switch(self, before: int | None, now: int | None) -> None:
        """The turn of ``before`` ends, that of ``now`` begins; None before the first and after the last."""
        if now is None:  # what the last has left stays, as after any training_step
            return
        if before is not None:
            self._kept[before] = self._take()
        for holder, name, value in self._kept.pop(now, self._before):
            if isinstance(holder, list):
                holder[:] = value
            else:
                holder[name] = value

    def _take(self) -> list[tuple[Any, Any, Any]]:
        """Remove all tensors with a graph. Returns where they were: what held them, the name, and the value."""
        taken: list[tuple[Any, Any, Any]] = []
        for attributes in self._holders:
            for name in [name for name in attributes if name not in _OF_EVERY_MODULE]:
                value = attributes[name]
                if _has_graph(value):
                    taken.append((attributes, name, value))
                    del attributes[name]
                elif isinstance(value, dict):
                    for key in [key for key, item in value.items() if _has_graph(item)]:
                        taken.append((value, key, value.pop(key)))
                elif isinstance(value, list) and any(_has_graph(item) for item in value):
                    taken.append((value, None, list(value)))
                    value[:] = [item for item in value if not _has_graph(item)]
        return taken


def _has_graph(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None
