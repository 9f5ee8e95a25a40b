"""A device mesh of more dimensions than Lightning's two: their names say what its ranks share."""

from __future__ import annotations

from collections.abc import Mapping
from math import prod
from typing import Any

from lightning.pytorch.strategies import ModelParallelStrategy
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from typing_extensions import override

from lightning_accum.arguments import MisconfiguredError

OWN_ROWS = ("data_parallel", "replicate", "shard")
SAME_ROWS = ("context_parallel", "sequence_parallel")
SAME_LOSS = "tensor_parallel"


class NamedMeshStrategy(ModelParallelStrategy):
    """Lightning's strategy, on a mesh of named dimensions.

    Args:
        args: see Lightning's; so are the keyword arguments.
        mesh: the sizes of its dimensions, in their order. None for Lightning's own two.
        kwargs: see above.

    Raises:
        MisconfigurationException: what a name stands for is not known, tensor parallelism is not the last dimension, sizes are
            given twice, or are not those of the devices.
    """

    def __init__(self, *args: Any, mesh: Mapping[str, int] | None = None, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sizes = dict(mesh or {})
        self._lightnings_mesh: DeviceMesh | None = None
        if mesh is None:
            return
        if unknown := [name for name in mesh if name not in (*OWN_ROWS, *SAME_ROWS, SAME_LOSS)]:
            raise MisconfiguredError(
                f"mesh={dict(mesh)}: whether ranks along {unknown[0]!r} have rows of their own cannot be known. Name it"
                f" {_any_of(OWN_ROWS)} if they have, {_any_of(SAME_ROWS)} if each has a part of the same rows and the loss of that,"
                f" or {SAME_LOSS!r} if all have the same loss."
            )
        if SAME_LOSS in self._sizes and list(self._sizes)[-1] != SAME_LOSS:
            raise MisconfiguredError(f"mesh={dict(mesh)}: {SAME_LOSS!r} has to be its last dimension.")
        if (self._data_parallel_size, self._tensor_parallel_size) != ("auto", "auto"):
            raise MisconfiguredError(
                f"mesh={dict(mesh)} has the sizes of all dimensions: leave out data_parallel_size and tensor_parallel_size."
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
        assert self.lightning_module is not None
        self._lightnings_mesh = self._device_mesh
        kind, names = self.root_device.type, tuple(self._sizes)
        self._device_mesh = init_device_mesh(kind, tuple(self._sizes.values()), mesh_dim_names=names)
        self.lightning_module._device_mesh = self._device_mesh

    @property
    @override
    def distributed_sampler_kwargs(self) -> dict[str, Any]:
        """Replicas are the ranks that have rows of their own, in the order of the dimensions of the mesh."""
        if not self._sizes:
            return super().distributed_sampler_kwargs
        coordinate = self.device_mesh.get_coordinate()
        assert coordinate is not None
        replicas, rank = 1, 0
        for (name, size), position in zip(self._sizes.items(), coordinate, strict=True):
            if name in OWN_ROWS:
                replicas, rank = replicas * size, rank * size + position
        return {"num_replicas": replicas, "rank": rank}


def _any_of(names: tuple[str, ...]) -> str:
    return f"{', '.join(map(repr, names[:-1]))} or {names[-1]!r}"
