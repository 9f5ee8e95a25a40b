"""Whether the promise holds for a module: :func:`verify` and its :class:`Report`."""

from lightning_accum.verification.report import Break, Report
from lightning_accum.verification.run import verify

__all__ = ["Break", "Report", "verify"]
