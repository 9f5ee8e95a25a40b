"""When gradients are reduced over the ranks: one small object an engine."""

from lightning_accum.sync.base import GradientSlot, GradientSync, ShardedSyncPolicy, SyncPolicy, forward_replaced
from lightning_accum.sync.ddp import DDPSync
from lightning_accum.sync.fsdp1 import FSDP1Sync
from lightning_accum.sync.fsdp2 import FSDP2Sync, has_replicas
from lightning_accum.sync.sharded import ShardedSync
from lightning_accum.sync.shared_rows import SharedRows
from lightning_accum.sync.wide import WideDDPSync, slots_of

__all__ = [
    "DDPSync",
    "FSDP1Sync",
    "FSDP2Sync",
    "GradientSlot",
    "GradientSync",
    "ShardedSync",
    "ShardedSyncPolicy",
    "SharedRows",
    "SyncPolicy",
    "WideDDPSync",
    "forward_replaced",
    "has_replicas",
    "slots_of",
]
