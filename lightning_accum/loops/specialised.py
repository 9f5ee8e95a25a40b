"""Objects of Lightning's that have another class for a while."""

from __future__ import annotations

from collections.abc import Container, Iterator
from contextlib import contextmanager
from functools import cache
from inspect import get_annotations
from typing import Any


@contextmanager
def specialised(instance: Any, mixin: type, *, is_users_first: bool = False, **state: Any) -> Iterator[None]:
    """Give an object a subclass of its own class, and take it back with all that the subclass has stored in it.

    Args:
        instance: what keeps its identity.
        mixin: what its class is derived from in addition. The attributes that it annotates are its own, as are those of its bases
            in this package.
        is_users_first: a class of the user's, which Lightning's was derived to, overrides what the mixin does.
        state: attributes to begin with.
    """
    original = instance.__class__
    instance.__class__ = _subclass(mixin, original, is_users_first)
    vars(instance).update(state)
    try:
        yield
    finally:
        instance.__class__ = original
        for kind in mixin.__mro__:
            if kind.__module__.startswith("lightning_accum."):
                drop_own_attributes(instance, kind)


def drop_own_attributes(instance: Any, declared_by: type, but: Container[str] = ()) -> None:
    """Delete the attributes of an instance that a class annotates, and leave the others."""
    for name in get_annotations(declared_by):
        if name not in but:
            vars(instance).pop(name, None)


@cache
def _subclass(mixin: type, base: type, is_users_first: bool) -> type:
    bases = (base, mixin) if is_users_first and not issubclass(mixin, base) else (mixin, base)
    return type(base.__name__, bases, {"__module__": base.__module__, "__doc__": base.__doc__})
