"""Reduction of the gradients of modules that ``fully_shard`` was applied to (FSDP2)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from typing_extensions import override

from lightning_accum.errors import ArgumentError, SeamError, UsageError
from lightning_accum.main_gradients import is_narrower
from lightning_accum.micro_batch import MicroBatch
from lightning_accum.ranks import Ranks
from lightning_accum.step import Trained
from lightning_accum.sync.base import SyncPolicy
from lightning_accum.sync.sharded import CANNOT_FORGET_FORWARD, ShardedSync
from lightning_accum.user_warnings import listed


class FSDP2Sync(ShardedSync):
    """Reduce-scatter of modules with :func:`torch.distributed.fsdp.fully_shard`, also with tensor parallelism.

    ``fully_shard`` reduces a group as one flat tensor of the parameters with a gradient on this rank. If another rank has gradients
    for different parameters, they are mixed up, or the ranks hang. So all parameters of a group get a gradient, of zeros if needed.
    Parameters that no rank has reached get None again after a window. With the policy ``"shard"``, replicas of shards are reduced
    within the shards at every micro-batch, and over the replicas once a window.

    Raises:
        ArgumentError: it does not average the gradients of all parameters over ``ranks``.
    """

    def __init__(self, module: nn.Module, policy: SyncPolicy, engine: Trained, ranks: Ranks, *of_ranks: Any) -> None:
        super().__init__([unit for unit in module.modules() if isinstance(unit, FSDPModule)], policy, engine, *of_ranks)
        self._groups = [group for unit in self.units for group in groups_of(unit)]
        self._trained, self._ranks = [sharded for group in self._groups for sharded in _trained_of(group)], ranks
        self._refuse_other_averages(module)
        self._reached: set[Any] = set()  # parameters with a gradient from this window, or from before it
        self._is_begun = False  # this window has run a backward
        self._is_of_window = False  # the current backward belongs to a micro-batch of the window
        self._is_called = False  # whether torch has called the replaced method
        for group in self._groups:
            group.post_backward = partial(self._reduce, group, group.post_backward)
        self.can_forget_forward = hasattr(FSDPModule, "reset_iter_state")  # not in torch 2.9

    def _refuse_other_averages(self, module: nn.Module) -> None:
        sharded, expected = self.parameters(), set(dist.get_process_group_ranks(self._ranks.group))
        left = [name for name, own in module.named_parameters() if own.requires_grad and own not in sharded]
        if left and self._ranks.size > 1:
            raise ArgumentError(f"Nothing averages the gradients of {listed(left)}: apply fully_shard to their modules.")
        meshes = (set(group.mesh_info.mesh.mesh.flatten().tolist()) for group in self._groups)
        if other := next((ranks for ranks in meshes if ranks != expected), None):
            raise ArgumentError(
                f"fully_shard averages over the ranks {sorted(other)}: pass it a mesh of the data-parallel {sorted(expected)}."
            )
        factors = (getattr(group, "gradient_divide_factor", None) for group in self._groups)
        if factor := next((factor for factor in factors if factor not in (None, self._ranks.size)), None):
            found = f"set_gradient_divide_factor({factor:g}) does not average over {self._ranks.size} data-parallel ranks"
            raise ArgumentError(f"{found}. Leave it out.")

    @override
    @contextmanager
    def blocked(self, micro_batch: MicroBatch) -> Iterator[None]:
        # Modules that stay gathered between forward and backward do so until the window ends, as torch advises, which does not
        # raise the peak memory. A root learns in its first forward that it is one, and stays gathered.
        is_known = self.policy == "window" and not self._unused_roots
        kept = [unit for unit in self.units if _stays_gathered(unit)] if is_known else []
        self._set_blocked(True, kept)
        try:
            yield
        finally:
            self._set_blocked(False, kept)

    def _set_blocked(self, is_blocked: bool, kept: list[Any]) -> None:
        self._set_reduced(not is_blocked)
        for unit in self.units:
            unit.set_is_last_backward(not is_blocked)
        for unit in kept:
            unit.set_reshard_after_backward(not is_blocked, recurse=False)

    def _set_reduced(self, is_reduced: bool) -> None:
        for unit in self.units:
            if self.policy == "window":
                unit.set_requires_gradient_sync(is_reduced, recurse=False)
            elif self.policy == "shard":
                unit.set_requires_all_reduce(is_reduced, recurse=False)

    @override
    def begin_backward(self, micro_batch: MicroBatch, loss: Tensor) -> None:
        super().begin_backward(micro_batch, loss)
        self._set_reduced(micro_batch.is_boundary)  # a hand-written loop may have changed it
        self._begin(is_of_window=not micro_batch.is_shadow_batch)

    @override
    def backward_without_loss(self) -> None:
        self._begin(is_of_window=False)
        super().backward_without_loss()

    def _begin(self, is_of_window: bool) -> None:
        if not self._is_begun:  # gradients from a checkpoint inside the window, or zeros from zero_grad
            self._reached = {sharded for sharded in self._trained if sharded.sharded_param.grad is not None}
        self._is_of_window, self._is_begun = is_of_window, True

    def _reduce(self, group: Any, post_backward: Callable[..., None], *args: Any) -> None:
        """Replaces ``post_backward`` of a group."""
        self._is_called = True
        trained = _trained_of(group)
        lacking = [sharded for sharded in trained if _whole_gradient(sharded) is None]
        if self._is_of_window:
            self._reached.update(set(trained).difference(lacking))
        holds_sum = group.all_reduce_grads and _has_partial_sum(group)
        if lacking and group.reduce_grads and (holds_sum or len(lacking) < len(trained)):
            for sharded in lacking:
                if (whole := _whole_parameter(sharded)) is not None:  # else torch skips it
                    whole.grad = torch.zeros_like(whole)
        post_backward(*args)

    @override
    def complete_reduction(self, micro_batch: MicroBatch) -> None:
        """Reduce the gradients of modules that the last backward has not reached."""
        have_gradients = (own.sharded_param.grad is not None or _whole_gradient(own) is not None for own in self._trained)
        if self._is_of_window and not self._is_called and any(have_gradients):
            raise SeamError(f"torch {torch.__version__} does not call FSDPParamGroup.post_backward to reduce gradients.")
        self._is_of_window = False
        if micro_batch.is_boundary and self._are_any_left():
            self.reduce_accumulated()

    def _are_any_left(self) -> bool:
        """Whether accumulated gradients are not reduced over all ranks yet."""
        return any(map(_has_partial_sum, self._groups)) or any(_whole_gradient(sharded) is not None for sharded in self._trained)

    @override
    def reduce_accumulated(self) -> None:
        self._set_reduced(True)
        known = [root for root in self._roots if root not in self._unused_roots]
        if self.policy != "micro_batch" and known and not _reduce_accumulated(known):
            super().reduce_accumulated()

    @override
    def reduce_for_checkpoint(self) -> None:
        self.reduce_accumulated()
        self._leave_out_others()

    @override
    def drop_accumulated(self) -> None:
        super().drop_accumulated()
        self._is_begun = False

    @override
    def end_window(self) -> None:
        super().end_window()
        if self._are_any_left():
            raise UsageError('A window has ended, and fully_shard has not reduced all of its gradients: use sync="micro_batch".')
        self._leave_out_others()
        self._is_begun = False

    def _leave_out_others(self) -> None:
        """Set the gradients of parameters that no rank has reached to None. Called on all ranks.

        Raises, on all of them, if a unit did not run on all in the same micro-batches: others then used another unit's parameters.
        """
        if not self._trained:
            return
        size, is_reached = len(self.units), [float(sharded in self._reached) for sharded in self._trained]
        found = self._ranks.largest(*self._ran_in, *(-number for number in self._ran_in), *is_reached)
        if others := {unit for unit, most, fewest in zip(self.units, found, found[size:], strict=False) if most != -fewest}:
            names = listed([name for name, unit in self._engine.module.named_modules() if unit in others])
            raise UsageError(
                f"Not all ranks ran {names} in the same micro-batches, but fully_shard gathers parameters from all, and so perhaps "
                "others. Have each rank run them, if only for 0 * output.sum(); or shard a module that holds them in their place."
            )
        for sharded, is_one in zip(self._trained, found[2 * size :], strict=True):
            if not is_one:
                sharded.sharded_param.grad = None

    @override
    def close(self) -> None:
        super().close()
        for group in self._groups:
            del group.post_backward

    @override
    def reshard(self) -> None:
        for unit in self.units:
            unit.reshard()  # validation leaves some of them gathered

    @override
    def forget_forward(self) -> None:
        self._outputs.clear()
        for root in self._roots:
            if root._get_fsdp_state()._is_root is None:  # it has not run yet
                continue
            if not self.can_forget_forward:
                raise UsageError(CANNOT_FORGET_FORWARD)
            root.reset_iter_state()

    # --- parameters ---------------------------------------------------------------------------------------------------

    def parameters(self) -> set[nn.Parameter]:
        """The sharded parameters, whose gradients are reduced."""
        return {sharded.sharded_param for group in self._groups for sharded in group.fsdp_params}

    def _sharding_of(self) -> dict[nn.Parameter, Any]:
        """The accumulated gradient of a parameter, whole or as a shard."""
        sharded = [sharded for group in self._groups for sharded in group.fsdp_params]
        return {own: one for one in sharded for own in (one.sharded_param, _whole_parameter(one)) if own is not None}

    @override
    def accumulated(self, parameters: Iterable[nn.Parameter]) -> dict[nn.Parameter, Tensor]:
        sharding, parameters = self._sharding_of(), list(parameters)
        found = super().accumulated(own for own in parameters if own not in sharding)
        whole = {own: _whole_gradient(sharding[own]) for own in parameters if own in sharding}
        return {**found, **{own: gradient for own, gradient in whole.items() if gradient is not None}}

    @override
    def restore_accumulated(self, parameters: Iterable[nn.Parameter], kept: Mapping[nn.Parameter, Tensor]) -> None:
        sharding, parameters = self._sharding_of(), list(parameters)
        super().restore_accumulated((own for own in parameters if own not in sharding), kept)
        for own, gradient in self.accumulated(own for own in parameters if own in sharding).items():
            if own in kept:
                gradient.copy_(kept[own])
            else:  # zeros, not None: other ranks wait for this one in the reduction of parameters with a gradient
                gradient.zero_()

    def sums_narrower_than(self, dtype: torch.dtype) -> torch.dtype | None:
        """A narrower type in which unreduced gradients are summed; None if there is none."""
        types = (_type_of_sum(group, sharded) for group in self._groups for sharded in _trained_of(group))
        return next((summed for summed in types if is_narrower(summed, dtype)), None)


# --- what fully_shard keeps to itself: see the table of seams ----------------------------------------------------------------


def groups_of(unit: Any) -> list[Any]:
    """The parameter groups of a ``fully_shard`` module."""
    state = unit._get_fsdp_state()
    groups = getattr(state, "_fsdp_param_groups", None)
    return [group for group in ([state._fsdp_param_group] if groups is None else groups) if group is not None]


def has_replicas(unit: FSDPModule) -> bool:
    """Whether ``fully_shard`` has spread a module over a mesh of two dimensions: replicas of shards."""
    return all(group._is_hsdp for group in groups_of(unit))


def _trained_of(group: Any) -> list[Any]:
    return [sharded for sharded in group.fsdp_params if sharded.sharded_param.requires_grad]


def _has_partial_sum(group: Any) -> bool:
    """Whether scattered gradients are not all-reduced over replicas yet."""
    return getattr(group, "_partial_reduce_output", None) is not None


def _whole_parameter(sharded: Any) -> nn.Parameter | None:
    """The unsharded parameter; None before its first forward."""
    whole: nn.Parameter | None = getattr(sharded, "_unsharded_param", None)
    return whole


def _whole_gradient(sharded: Any) -> Tensor | None:
    """The accumulated, unreduced gradient, from one of the two attributes of ``fully_shard``."""
    whole = _whole_parameter(sharded)
    gradient: Tensor | None = sharded.unsharded_accumulated_grad
    return whole.grad if gradient is None and whole is not None else gradient


def _type_of_sum(group: Any, sharded: Any) -> torch.dtype:
    policy, parameter = getattr(sharded, "mp_policy", None) or group.mp_policy, sharded.sharded_param
    has_own_sum = "unsharded_accumulated_grad" in vars(sharded)  # else it is in the parameter's grad, for any reduce type
    asked_for = policy.param_dtype if has_own_sum else parameter.grad_dtype
    dtype: torch.dtype = policy.reduce_dtype or asked_for or parameter.dtype
    return dtype


def _stays_gathered(unit: nn.Module) -> bool:
    groups = groups_of(unit)
    return bool(groups) and all(
        getattr(group, "post_forward_mesh_info", group) is None and getattr(group, "reshard_after_backward", False)
        for group in groups
    )


def _reduce_accumulated(roots: Iterable[Any]) -> bool:
    """Have these modules reduce their remaining gradients, as at the end of a backward. Returns whether torch supports it."""
    queue_ends = [getattr(root._get_fsdp_state(), "_register_root_post_backward_final_callback", None) for root in roots]
    if None in queue_ends or torch.__version__ < "2.9":  # torch 2.6 skips modules that are not gathered
        return False

    def end_of_backward(gradient: Tensor) -> None:
        for queue_end in queue_ends:
            queue_end()  # type: ignore[misc]

    with torch.enable_grad():
        start = torch.zeros((), device="cpu", requires_grad=True).clone()
    start.register_hook(end_of_backward)  # type: ignore[no-untyped-call]
    start.backward()  # type: ignore[no-untyped-call]
    return True
