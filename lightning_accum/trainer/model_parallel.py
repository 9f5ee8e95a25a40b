"""``fully_shard`` (FSDP2) and tensor parallelism: ``Trainer(strategy="accum_model_parallel")``."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm
from typing_extensions import override

from lightning_accum.main_gradients import is_narrower
from lightning_accum.micro_batch import MicroBatch, Weighed
from lightning_accum.ranks import Ranks
from lightning_accum.sync.fsdp2 import FSDP2Sync, groups_of, has_replicas
from lightning_accum.trainer import seams
from lightning_accum.trainer.engines import ShardedMixin
from lightning_accum.trainer.from_lightning import MisconfiguredError, pl
from lightning_accum.user_warnings import listed
from lightning_accum.weighing.counts import count_samples

OWN_ROWS = ("data_parallel", "replicate", "shard")
SAME_ROWS = ("context_parallel", "sequence_parallel")
SAME_LOSS = "tensor_parallel"


class ModelParallelAccumulationStrategy(ShardedMixin, pl.strategies.ModelParallelStrategy):
    """Exact gradient accumulation over ``fully_shard`` (FSDP2), ``Trainer(strategy="accum_model_parallel")``.

    With tensor parallelism, weights and gradients are summed over the data-parallel ranks only. The module applies ``fully_shard``
    in its ``configure_model``, as with Lightning's own strategy.

    Args:
        args: see :class:`lightning.pytorch.strategies.ModelParallelStrategy`; so are the keyword arguments.
        mesh: in place of ``data_parallel_size`` and ``tensor_parallel_size``, the sizes of the dimensions of ``self.device_mesh``,
            by name. Ranks along ``"data_parallel"``, ``"replicate"`` and ``"shard"`` have their own rows; along
            ``"context_parallel"`` and ``"sequence_parallel"`` a part of the same rows and its loss; along ``"tensor_parallel"``,
            the last, the same loss. ``fully_shard`` is applied over all but the last.
        sync: reduce the gradients over the ranks once a ``"window"``, or at every ``"micro_batch"``. Once a window sends less, but
            holds whole gradients on every rank until the window ends; the other holds shards. ``"shard"`` is for ``fully_shard``
            over a mesh of two dimensions, replicas of shards: it reduces within the shards at every micro-batch and over the
            replicas once a window. It holds shards, and sends as much between replicas as ``"window"``. The result is the same.
        kwargs: see above.

    Raises:
        MisconfigurationException: ``sync`` is none of the three; ``mesh`` has an unknown name, does not end with tensor
            parallelism, or is combined with other sizes; or, before training starts: ``fully_shard`` was not applied over the
            data-parallel ranks, a module divides its gradients by its own number, or there are no replicas for ``sync="shard"``.

    Example:
        >>> strategy = ModelParallelAccumulationStrategy(data_parallel_size=2, tensor_parallel_size=1)
        >>> strategy = ModelParallelAccumulationStrategy(mesh={"data_parallel": 2, "context_parallel": 4})
    """

    strategy_name, _engine_name = "accum_model_parallel", "fsdp2"
    _syncs = ("window", "micro_batch", "shard")

    def __init__(self, *args: Any, mesh: Mapping[str, int] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sizes = dict(mesh or {})
        self._lightnings_mesh: DeviceMesh | None = None
        if mesh is None:
            return
        names = [*self._sizes]
        is_known = all(name in (*OWN_ROWS, *SAME_ROWS, SAME_LOSS) for name in names) and SAME_LOSS not in names[:-1]
        if not is_known or (self._data_parallel_size, self._tensor_parallel_size) != ("auto", "auto"):
            raise MisconfiguredError(
                f"mesh={self._sizes}: it replaces data_parallel_size and tensor_parallel_size. Name its dimensions "
                f"{', '.join(OWN_ROWS)} if ranks have their own rows, {' or '.join(SAME_ROWS)} for parts of the same rows, and the "
                f"last {SAME_LOSS} for the same loss."
            )

    @property
    def gradient_mesh(self) -> DeviceMesh:
        """Of two dimensions: ``"data_parallel"``, over which gradients are averaged, and ``"tensor_parallel"``."""
        return self.device_mesh if self._lightnings_mesh is None else self._lightnings_mesh

    def same_rows(self) -> int:
        """How many ranks have parts of the same rows."""
        return prod(self._sizes.get(name, 1) for name in SAME_ROWS)

    @override
    def setup_environment(self) -> None:
        if not self._sizes:
            super().setup_environment()
            return
        asked, devices = prod(self._sizes.values()), self.num_nodes * self.num_processes
        if asked != devices:
            raise MisconfiguredError(f"mesh={self._sizes} is of {asked} devices, and there are {devices}.")
        self._tensor_parallel_size = self._sizes.get(SAME_LOSS, 1)
        self._data_parallel_size = devices // self._tensor_parallel_size
        super().setup_environment()
        self._lightnings_mesh = self._device_mesh
        kind, names = self.root_device.type, tuple(self._sizes)
        self._device_mesh = init_device_mesh(kind, tuple(self._sizes.values()), mesh_dim_names=names)
        self.module._device_mesh = self._device_mesh

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """The replicas, which are the ranks with their own rows, in the order of the mesh."""
        if not self._sizes:
            return super().distributed_sampler_kwargs
        coordinate = self.device_mesh.get_coordinate()
        assert coordinate is not None
        replicas, rank = 1, 0
        for (name, size), position in zip(self._sizes.items(), coordinate, strict=True):
            if name in OWN_ROWS:
                replicas, rank = replicas * size, rank * size + position
        return {"num_replicas": replicas, "rank": rank}

    @override
    def _ranks(self) -> Ranks:
        mesh = self.gradient_mesh["data_parallel"]
        size, group = mesh.size(), mesh.get_group()
        return Ranks(self.root_device, size, group, self.world_size, self.global_rank, self._timeout, self.same_rows())

    @override
    def ranks_of_micro_batch(self) -> dist.ProcessGroup | None:
        mesh = self.gradient_mesh["tensor_parallel"]
        return mesh.get_group() if mesh.size() > 1 else None

    @override
    @torch.no_grad()
    def clip_by_norm(self, parameters: Iterable[Tensor], largest: float) -> Tensor:
        by_mesh: dict[Any, list[Tensor]] = {}  # torch 2.13 refuses to add up DTensors on different meshes
        for parameter in parameters:
            if (own := parameter.grad) is not None:
                by_mesh.setdefault(own.device_mesh if isinstance(own, DTensor) else None, []).append(parameter)
        norms = [get_total_norm([p.grad for p in group], foreach=True) for group in by_mesh.values()]  # type: ignore[misc]
        whole = [norm.full_tensor() if isinstance(norm, DTensor) else norm for norm in norms]
        norm = torch.linalg.vector_norm(torch.stack(whole)) if whole else torch.tensor(0.0)
        for group in by_mesh.values():
            clip_grads_with_norm_(group, largest, norm, foreach=True)
        return norm

    def _check_accumulate_dtype(self, sync: FSDP2Sync, dtype: torch.dtype) -> None:
        """Whether ``fully_shard`` adds up gradients in ``dtype``; else raises an error that names the fix."""
        sharded = sync.parameters()
        narrow = [parameter for parameter in self.parameters() if is_narrower(parameter.dtype, dtype)]
        found = sync.sums_narrower_than(dtype) or next((p.dtype for p in narrow if p not in sharded), None)
        if found is not None:
            instead = f"apply it to all layers with mp_policy=MixedPrecisionPolicy(reduce_dtype={dtype})"
            raise MisconfiguredError(f"accumulate_dtype={dtype}: fully_shard sums gradients in {found}; {instead}")

    @override
    def _engine(self) -> dict[str, Any]:
        tensor = self.gradient_mesh["tensor_parallel"].size()
        return {**super()._engine(), "tensor_parallel": tensor, "same_rows": self.same_rows()}

    @override
    def announce(self, micro_batch: MicroBatch, weighed: Weighed) -> None:
        super().announce(micro_batch, weighed)
        assert self.accumulation is not None
        if self.same_rows() > 1 and weighed.weight is not None and float(weighed.weight) == count_samples(micro_batch.batch):
            found = f"The loss is a mean over rows, of which {self.same_rows()} ranks have parts (mesh=)"
            raise MisconfiguredError(f"{found}. Have training_step return the mean over the tokens or elements in its part.")

    def _refuse_without_replicas(self, module: nn.Module) -> None:
        groups = [group for unit in module.modules() if isinstance(unit, FSDPModule) for group in groups_of(unit)]
        if not all(hasattr(group, "_partial_reduce_output") for group in groups):
            raise seams.broken("FSDPParamGroup does not have _partial_reduce_output, the sum of a window within its shards.")
        named = module.named_modules()
        if left := [name or "the module" for name, unit in named if isinstance(unit, FSDPModule) and not has_replicas(unit)]:
            raise MisconfiguredError(
                f'sync="shard" needs replicas of shards, but {listed(left)} has none. Use sync="micro_batch", or fully_shard with '
                'init_device_mesh(device_type, (replicas, shards), mesh_dim_names=("replicate", "shard")).'
            )

    @override
    def _sync_of_units(self) -> FSDP2Sync:
        seams.check_nothing_is_missing(seams.FSDP2)
        if self._sync_policy == "shard":
            self._refuse_without_replicas(self.module)
        same_rows = (self.ranks, self.distributed_sampler_kwargs["rank"]) if self.same_rows() > 1 else None
        sync = FSDP2Sync(self.module, self._sync_policy, self, self.ranks, self.row_wise is None, same_rows)
        if self.policy.accumulate_dtype is not None:
            self._check_accumulate_dtype(sync, self.policy.accumulate_dtype)
        return sync
