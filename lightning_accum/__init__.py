"""Gradient accumulation for PyTorch Lightning that is right: one window, one batch."""

from typing import TYPE_CHECKING, Any

from lightning_accum import families

if TYPE_CHECKING:
    from lightning_accum.names import *  # noqa: F403
else:

    def __getattr__(name: str) -> Any:
        return families.public(name)


__version__ = "0.1.0"

families.install()


def __dir__() -> list[str]:
    return [*globals(), *families.public("__all__")]
