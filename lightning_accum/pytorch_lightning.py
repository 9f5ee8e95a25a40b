"""The names of ``lightning_accum``, for ``import pytorch_lightning as pl``: see ``families.py``."""

from typing import Any

import lightning_accum
from lightning_accum import families

__path__ = lightning_accum.__path__  # its modules are in the same files


def __getattr__(name: str) -> Any:
    return families.public(name, __name__)


def __dir__() -> list[str]:
    return [*globals(), *families.public("__all__", __name__)]
