"""Exact gradient accumulation in hand-written loops, with Lightning Fabric or in plain torch."""

from lightning_accum.fabric.accumulator import Accumulator
from lightning_accum.policy import Tokens
from lightning_accum.weighing.counts import SampleCount, TokenCount

__all__ = ["Accumulator", "SampleCount", "TokenCount", "Tokens"]
