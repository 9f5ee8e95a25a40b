"""Reduction of the gradients of sharded modules: FullyShardedDataParallel (FSDP1) and fully_shard (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from typing_extensions import override

from lightning_accum.sync.base import GradientPlace, Sync, SyncPolicy
from lightning_accum.wide_sums import is_narrower

try:
    from torch.distributed.fsdp import FSDPModule
except ImportError:  # torch 2.5
    from torch.distributed._composable.fsdp import FSDPModule  # type: ignore[attr-defined]


class ShardedSync(Sync):
    """What FSDP1 and FSDP2 have in common: each forward and backward gathers parameters, and waits for the other ranks.

    Without reduction, gradients of all parameters are held whole on every rank until the window ends. ``"micro_batch"`` reduces,
    and holds shards only. Both are exact: a sum of averages is the average of sums.

    Args:
        units: the modules that were sharded.
        policy: reduce once a window, or at every micro-batch.
    """

    def __init__(self, units: list[nn.Module], policy: SyncPolicy) -> None:
        self.units = units
        self.policy = policy
        self._outputs: list[Tensor] = []
        self._handles = [unit.register_forward_hook(self._note_output) for unit in units]

    def _note_output(self, unit: nn.Module, arguments: Any, output: Any) -> None:
        if torch.is_grad_enabled():
            tensors = [output] if isinstance(output, Tensor) else torch.utils._pytree.tree_leaves(output)
            self._outputs += [tensor for tensor in tensors if isinstance(tensor, Tensor) and tensor.requires_grad]

    def forget_outputs(self) -> None:
        """A training_step is about to begin."""
        self._outputs.clear()

    @override
    def begin_backward(self) -> None:
        self._outputs.clear()  # logits are large, and a backward does not need them

    def loss_of_outputs(self) -> Tensor | None:
        """A number that depends on all that the sharded modules have given since :meth:`forget_outputs`; None for nothing."""
        outputs, self._outputs = self._outputs, []
        if not outputs:
            return None
        return torch.stack([output.flatten()[:1].sum().float() for output in outputs]).sum()

    def reduce(self) -> bool:
        """Reduce what was accumulated without reduction. Returns whether that is possible without another forward and backward."""
        return False

    def close(self) -> None:
        """Let go of the modules."""
        self._outputs.clear()
        for handle in self._handles:
            handle.remove()


class FSDP2Sync(ShardedSync):
    """Reduce-scatter of modules that :func:`torch.distributed.fsdp.fully_shard` was applied to, also beside tensor parallelism.

    Args:
        module: what they are in.
        policy: reduce once a window, or at every micro-batch.
    """

    def __init__(self, module: nn.Module, policy: SyncPolicy = "window") -> None:
        super().__init__([unit for unit in module.modules() if isinstance(unit, FSDPModule)], policy)
        self._kept: list[FSDPModule] | None = None

    @override
    @contextmanager
    def blocked(self, is_last_of_batch: bool = True) -> Iterator[None]:
        kept: list[Any] = self._units_kept_whole() if self.policy == "window" else []
        self._set_blocked(True, kept)
        try:
            yield
        finally:
            self._set_blocked(False, kept)

    def _set_blocked(self, is_blocked: bool, kept: list[Any]) -> None:
        units: list[Any] = self.units
        for unit in units:
            unit.set_is_last_backward(not is_blocked)
            if self.policy == "window":
                unit.set_requires_gradient_sync(not is_blocked, recurse=False)
        for unit in kept:
            unit.set_reshard_after_backward(not is_blocked, recurse=False)

    def _units_kept_whole(self) -> list[FSDPModule]:
        """Those whose parameters stay gathered between forward and backward: so they may until the window ends.

        Torch advises it for accumulation, as it saves gathering them again. At the end of the second forward they are all there
        anyway, beside the whole gradients, so it costs no memory at the peak. The others are gathered again, as they were made to.
        """
        if self._kept is None:
            if any(group is None for unit in self.units for group in groups_of(unit)) or not self._is_initialised():
                return []
            self._kept = [
                unit  # type: ignore[misc]
                for unit in self.units
                if groups_of(unit)
                and all(group.post_forward_mesh_info is None and group.reshard_after_backward for group in groups_of(unit))
            ]
        return self._kept

    def _is_initialised(self) -> bool:
        # the first forward finds the root, which is never resharded between forward and backward
        return all(unit._get_fsdp_state()._is_root is not None for unit in self.units)  # type: ignore[operator]

    @override
    def reduce(self) -> bool:
        # what torch runs at the end of a backward (read in 2.13): it reduces what no backward of a module has
        roots: list[Any] = [unit for unit in self.units if unit._get_fsdp_state()._is_root]  # type: ignore[operator]
        for root in roots:
            root._get_fsdp_state()._root_post_backward_final_callback()
        return True

    def sums_narrower_than(self, dtype: torch.dtype) -> torch.dtype | None:
        """A type that gradients are added up in without reduction, if it is narrower; None for no such."""
        for group in (group for unit in self.units for group in groups_of(unit)):
            for parameter in (sharded.sharded_param for sharded in group.fsdp_params):
                policy = group.mp_policy
                summed: torch.dtype = policy.reduce_dtype or policy.param_dtype or parameter.dtype
                if parameter.requires_grad and is_narrower(summed, dtype):
                    return summed
        return None

    @override
    def gradient_places(self, named: Mapping[str, nn.Parameter]) -> list[GradientPlace]:
        sharded = [parameter for unit in self.units for group in groups_of(unit) for parameter in group.fsdp_params]
        by_parameter = {parameter.sharded_param: parameter for parameter in sharded}
        # between forward and backward a module has whole ones, and its optimizer shards
        by_parameter.update({p._unsharded_param: p for p in sharded if hasattr(p, "_unsharded_param")})
        places: dict[Any, GradientPlace] = {}
        for place in super().gradient_places(named):
            sharding = by_parameter.get(named[place.name])
            if sharding is None:
                places[named[place.name]] = place
            else:
                places.setdefault(sharding, _Unsharded(place, sharding))
        return list(places.values())

    def divide_factors(self) -> set[float]:
        """What gradients are divided by, where somebody has set it."""
        factors = {getattr(group, "gradient_divide_factor", None) for unit in self.units for group in groups_of(unit)}
        return {factor for factor in factors if factor is not None}

    def parameters(self) -> set[nn.Parameter]:
        """The sharded parameters, whose gradients are reduced."""
        return {parameter.sharded_param for unit in self.units for group in groups_of(unit) for parameter in group.fsdp_params}


class _Unsharded(GradientPlace):
    """Of a sharded parameter: whole, in one of the two places where fully_shard has it until it reduces it (read in torch 2.13)."""

    def __init__(self, place: GradientPlace, parameter: Any) -> None:
        super().__init__(place.name, parameter.sharded_param)
        self._sharding = parameter

    @override
    def get(self) -> Tensor | None:
        gradient: Tensor | None = self._sharding.unsharded_accumulated_grad
        if gradient is not None:
            return gradient
        whole = getattr(self._sharding, "_unsharded_param", None)  # from the first forward on
        return None if whole is None else whole.grad

    @override
    def put(self, gradient: Tensor | None) -> None:
        whole = getattr(self._sharding, "_unsharded_param", None)
        is_converted = gradient is not None and whole is not None and gradient.dtype != whole.dtype  # to that of the reduction
        self._sharding.unsharded_accumulated_grad = gradient if is_converted else None
        if whole is not None:
            whole.grad = None if is_converted else gradient

    @override
    def put_back(self, gradient: Tensor | None) -> None:
        now = self.get()
        # other ranks wait for this one in the reduction of what each micro-batch has given a gradient to
        self.put(gradient if gradient is not None or now is None else torch.zeros_like(now))


def groups_of(unit: nn.Module) -> list[Any]:
    """The parameter groups of a module that fully_shard was applied to. There is no public way to them in torch 2.13."""
    state = unit._get_fsdp_state()  # type: ignore[operator]
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:  # torch 2.5 to 2.9
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


class FSDP1Sync(ShardedSync):
    """Reduce-scatter of FullyShardedDataParallel modules.

    Args:
        module: one, or what they are in.
        policy: reduce once a window, or at every micro-batch.
    """

    def __init__(self, module: nn.Module, policy: SyncPolicy = "window") -> None:
        units = [unit for unit in module.modules() if isinstance(unit, FullyShardedDataParallel)]
        super().__init__(list(units), policy)
        below = {child for unit in units for child in unit.modules() if child is not unit}
        self._roots = [unit for unit in units if unit not in below]

    @override
    def blocked(self, is_last_of_batch: bool = True) -> AbstractContextManager[Any]:
        if self.policy == "micro_batch":
            return nullcontext()
        stack = ExitStack()
        for root in self._roots:
            stack.enter_context(root.no_sync())
        return stack
