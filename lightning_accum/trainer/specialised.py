"""Objects of Lightning's that have another class for a while."""

from __future__ import annotations

from collections.abc import Iterator
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
        for name in own_attributes(mixin):
            vars(instance).pop(name, None)


def own_attributes(kind: type) -> set[str]:
    """The attributes that a class and its bases annotate, as far as they are in this package."""
    return {name for base in kind.__mro__ if base.__module__.startswith("lightning_accum.") for name in get_annotations(base)}


@cache
def _subclass(mixin: type, base: Any, is_users_first: bool) -> type:
    own = own_attributes(mixin)

    def reduce_ex(self: Any, protocol: Any) -> tuple[Any, ...]:
        """A copy is what the object is otherwise."""
        function, arguments, *state = base.__reduce_ex__(self, protocol)
        arguments = tuple(base if argument is type(self) else argument for argument in arguments)
        kept = [{n: part[n] for n in part if n not in own} if isinstance(part, dict) else part for part in state]
        return function, arguments, *kept

    bases = (base, mixin) if is_users_first and not issubclass(mixin, base) else (mixin, base)
    attributes = {"__module__": base.__module__, "__doc__": base.__doc__, "__reduce_ex__": reduce_ex}
    return type(base.__name__, bases, attributes)
