"""``lightning_accum`` for ``import pytorch_lightning as pl``: importing this module selects that package for the process."""

from lightning_accum.trainer.package import take

take("pytorch_lightning")

from lightning_accum.names import *  # noqa: E402, F403
from lightning_accum.names import __all__ as __all__  # noqa: E402
