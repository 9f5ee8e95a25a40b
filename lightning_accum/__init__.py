"""Gradient accumulation for PyTorch Lightning that exactly matches one large batch."""

from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from lightning_accum.trainer import package

if TYPE_CHECKING:
    from lightning_accum.names import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:  # Lightning is loaded lazily
        if name != "__all__" and (name.startswith("__") or find_spec(f"lightning_accum.{name}") is not None):
            raise AttributeError(f"module 'lightning_accum' has no attribute {name!r}")  # or it is a submodule
        return getattr(import_module("lightning_accum.names"), name)


__version__ = "0.1.0"

package.register()


def __dir__() -> list[str]:
    return [*globals(), *import_module("lightning_accum.names").__all__]
