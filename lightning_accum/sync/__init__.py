"""When gradients are reduced over the ranks: one small object an engine."""

from lightning_accum.sync.base import GradientSync, ShardedSyncPolicy, SyncPolicy, forward_replaced
from lightning_accum.sync.ddp import DDPSync, WideDDPSync, sync_buffers
from lightning_accum.sync.fsdp2 import FSDP2Sync, has_replicas
from lightning_accum.sync.sharded import FSDP1Sync, ShardedSync, SharedRows

__all__ = [
    "DDPSync",
    "FSDP1Sync",
    "FSDP2Sync",
    "GradientSync",
    "ShardedSync",
    "ShardedSyncPolicy",
    "SharedRows",
    "SyncPolicy",
    "WideDDPSync",
    "forward_replaced",
    "has_replicas",
    "sync_buffers",
]
