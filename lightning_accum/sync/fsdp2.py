"""Reduction of the gradients of modules that ``fully_shard`` was applied to (FSDP2)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_accum.errors import UsageError
from lightning_accum.main_gradients import is_narrower
from lightning_accum.micro_batch import MicroBatch
from lightning_accum.ranks import Ranks
from lightning_accum.sync.base import GradientSlot, ShardedSyncPolicy
from lightning_accum.sync.reached import ReachedParameters, whole_gradient, whole_parameter
from lightning_accum.sync.sharded import NO_WAY_BACK, ShardedEngine, ShardedSync


class FSDP2Sync(ShardedSync):
    """Reduce-scatter of modules that :func:`torch.distributed.fsdp.fully_shard` was applied to, also beside tensor parallelism.

    Args:
        module: what they are in.
        policy: reduce once a window, at every micro-batch, or of replicas of shards within the shards at every micro-batch and
            over the replicas once a window.
        engine: runs it.
        ranks: whose gradients are averaged.
    """

    def __init__(self, module: nn.Module, policy: ShardedSyncPolicy, engine: ShardedEngine, ranks: Ranks) -> None:
        super().__init__([unit for unit in module.modules() if isinstance(unit, FSDPModule)], policy, engine)
        self.reached = ReachedParameters((group for unit in self.units for group in groups_of(unit)), ranks)
        self._kept: list[nn.Module] | None = None
        self.can_forget_forward = hasattr(FSDPModule, "reset_iter_state")  # not in torch 2.9

    @override
    @contextmanager
    def blocked(self, micro_batch: MicroBatch) -> Iterator[None]:
        kept: list[Any] = self._units_kept_whole() if self.policy == "window" else []
        self._set_blocked(True, kept)
        try:
            yield
        finally:
            self._set_blocked(False, kept)

    @override
    def begin_backward(self, micro_batch: MicroBatch) -> None:
        super().begin_backward(micro_batch)
        self.reached.begin_backward(is_of_window=not micro_batch.is_shadow_batch)

    @override
    def backward_without_loss(self) -> None:
        self.reached.begin_backward(is_of_window=False)
        super().backward_without_loss()

    @override
    def complete_reduction(self, micro_batch: MicroBatch) -> None:
        self.reached.end_backward()
        if micro_batch.is_boundary and self.reached.are_any_left():  # of modules that this backward has not come to
            self.reduce_accumulated()

    @override
    def reduce_for_checkpoint(self) -> None:
        super().reduce_for_checkpoint()
        self.reached.leave_out_others()

    @override
    def drop_accumulated(self) -> None:
        super().drop_accumulated()
        self.reached.forget()

    @override
    def end_window(self) -> None:
        super().end_window()
        if self.reached.are_any_left():
            raise UsageError('A window has ended, and fully_shard has not reduced all of its gradients: use sync="micro_batch".')
        self.reached.leave_out_others()
        self.reached.forget()

    @override
    def gradients_of(
        self, loss: Tensor, share: float, parameters: Sequence[nn.Parameter], keeps_graph: bool = False
    ) -> Sequence[Tensor | None]:
        try:
            return super().gradients_of(loss, share, parameters, keeps_graph)
        finally:
            self.reached.forget()  # it is in no window

    @override
    def close(self) -> None:
        super().close()
        self.reached.close()

    def _set_blocked(self, is_blocked: bool, kept: list[Any]) -> None:
        units: list[Any] = self.units
        for unit in units:
            unit.set_is_last_backward(not is_blocked)
            if self.policy == "window":
                unit.set_requires_gradient_sync(not is_blocked, recurse=False)
            elif self.policy == "shard":
                unit.set_requires_all_reduce(not is_blocked, recurse=False)
        for unit in kept:
            unit.set_reshard_after_backward(not is_blocked, recurse=False)

    def _units_kept_whole(self) -> list[nn.Module]:
        """Those whose parameters stay gathered between forward and backward: so they may until the window ends.

        Torch advises it for accumulation, as it saves gathering them again. At the end of the second forward they are all there
        anyway, beside the whole gradients, so it costs no memory at the peak. The others are gathered again, as they were made to.
        """
        if self._kept is None:
            if self._unused_roots:  # in its first forward a root finds out that it is one, and stays gathered
                return []
            self._kept = [unit for unit in self.units if _stays_gathered(unit)]
        return self._kept

    @override
    def _reduce_without_forward(self) -> bool:
        return _reduce_accumulated([root for root in self._roots if root not in self._unused_roots])

    @override
    def reshard(self) -> None:
        units: list[Any] = self.units
        for unit in units:
            unit.reshard()  # validation leaves some of them gathered

    @override
    def forget_forward(self) -> None:
        for root in self._roots:
            if root._get_fsdp_state()._is_root is None:  # type: ignore[operator]  # it has never run
                continue
            if not self.can_forget_forward:
                raise UsageError(NO_WAY_BACK)
            root.reset_iter_state()  # type: ignore[operator]

    def sums_narrower_than(self, dtype: torch.dtype) -> torch.dtype | None:
        """A type that gradients are added up in without reduction, if it is narrower; None for no such."""
        for group in (group for unit in self.units for group in groups_of(unit)):
            for sharded in group.fsdp_params:
                summed = _type_of_sum(group, sharded)
                if sharded.sharded_param.requires_grad and is_narrower(summed, dtype):
                    return summed
        return None

    @override
    def gradient_slots(self, named: Mapping[str, nn.Parameter]) -> list[GradientSlot]:
        sharded = [parameter for unit in self.units for parameter in _sharded_of(unit)]
        by_parameter = {parameter.sharded_param: parameter for parameter in sharded}
        # between forward and backward a module has whole ones, and its optimizer shards
        by_parameter.update({whole: parameter for parameter in sharded if (whole := whole_parameter(parameter)) is not None})
        places: dict[Any, GradientSlot] = {}
        for place in super().gradient_slots(named):
            sharding = by_parameter.get(named[place.name])
            if sharding is None:
                places[named[place.name]] = place
            else:
                places.setdefault(sharding, _Unsharded(place, sharding))
        return list(places.values())

    def averaged_ranks(self) -> list[set[int]]:
        """The ranks that gradients are averaged over, those of each group of parameters."""
        return [set(group.mesh_info.mesh.mesh.flatten().tolist()) for unit in self.units for group in groups_of(unit)]

    def divide_factors(self) -> set[float]:
        """What gradients are divided by, where somebody has set it."""
        factors = {getattr(group, "gradient_divide_factor", None) for unit in self.units for group in groups_of(unit)}
        return {factor for factor in factors if factor is not None}

    def parameters(self) -> set[nn.Parameter]:
        """The sharded parameters, whose gradients are reduced."""
        return {parameter.sharded_param for unit in self.units for parameter in _sharded_of(unit)}


# --- what fully_shard keeps to itself: see the table of seams ----------------------------------------------------------------


def groups_of(unit: Any) -> list[Any]:
    """The parameter groups of a module that fully_shard was applied to."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    if groups is None:
        groups = [state._fsdp_param_group]
    return [group for group in groups if group is not None]


def has_replicas(unit: FSDPModule) -> bool:
    """Whether ``fully_shard`` has spread a module over a mesh of two dimensions: replicas of shards."""
    return all(group._is_hsdp for group in groups_of(unit))


def _sharded_of(unit: nn.Module) -> list[Any]:
    return [sharded for group in groups_of(unit) for sharded in group.fsdp_params]


def _has_other_sum(sharded: Any) -> bool:
    """Whether fully_shard adds up gradients elsewhere than in a parameter's ``grad`` where it reduces in another type."""
    return "unsharded_accumulated_grad" in vars(sharded)


def _type_of_sum(group: Any, sharded: Any) -> torch.dtype:
    policy, parameter = getattr(sharded, "mp_policy", None) or group.mp_policy, sharded.sharded_param
    asked_for = policy.param_dtype if _has_other_sum(sharded) else parameter.grad_dtype
    dtype: torch.dtype = policy.reduce_dtype or asked_for or parameter.dtype
    return dtype


def _stays_gathered(unit: nn.Module) -> bool:
    groups = groups_of(unit)
    return bool(groups) and all(
        getattr(group, "post_forward_mesh_info", group) is None and getattr(group, "reshard_after_backward", False)
        for group in groups
    )


def _reduce_accumulated(roots: Iterable[nn.Module]) -> bool:
    """Have these modules reduce what no backward has, as they do at the end of each. Returns whether torch has what it takes."""
    states: list[Any] = [root._get_fsdp_state() for root in roots]  # type: ignore[operator]
    queue_ends = [getattr(state, "_register_root_post_backward_final_callback", None) for state in states]
    if None in queue_ends or torch.__version__ < "2.9":  # 2.6 leaves out modules that are not gathered
        return False

    def end_of_backward(gradient: Tensor) -> None:
        for queue_end in queue_ends:
            queue_end()  # type: ignore[misc]

    with torch.enable_grad():
        start = torch.zeros((), device="cpu", requires_grad=True).clone()
    start.register_hook(end_of_backward)  # type: ignore[no-untyped-call]
    start.backward()  # type: ignore[no-untyped-call]
    return True


class _Unsharded(GradientSlot):
    """Of a sharded parameter: whole, in one of the two places where fully_shard may have it until it reduces it."""

    def __init__(self, place: GradientSlot, sharded: Any) -> None:
        super().__init__(place.name, sharded.sharded_param)
        self._sharded = sharded

    @override
    def get(self) -> Tensor | None:
        return whole_gradient(self._sharded)

    @override
    def put(self, gradient: Tensor | None) -> None:
        whole = whole_parameter(self._sharded)
        is_other = _has_other_sum(self._sharded) and gradient is not None and whole is not None and gradient.dtype != whole.dtype
        if _has_other_sum(self._sharded):
            self._sharded.unsharded_accumulated_grad = gradient if is_other else None
        if whole is not None:
            whole.grad = None if is_other else gradient

    @override
    def restore(self, gradient: Tensor | None) -> None:
        now = self.get()
        # other ranks wait for this one in the reduction of what each micro-batch has given a gradient to
        self.put(gradient if gradient is not None or now is None else torch.zeros_like(now))
