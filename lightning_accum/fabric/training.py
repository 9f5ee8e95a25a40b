"""The model, optimizer and gradient reduction of a hand-written loop, set up by Fabric or plain torch."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from functools import partial
from typing import Any, TypeAlias, cast
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS, Optimizer
from typing_extensions import override

from lightning_accum.errors import ArgumentError, UsageError, WrongTypeError
from lightning_accum.exclusions import Asked
from lightning_accum.main_gradients import MainGradients, main_gradients
from lightning_accum.policy import Policy
from lightning_accum.ranks import Ranks
from lightning_accum.step import Trained
from lightning_accum.sync.ddp import DDPSync, LateDDPSync
from lightning_accum.sync.fsdp2 import FSDP2Sync
from lightning_accum.trial_mode import is_narrow
from lightning_accum.undo import Undo, replacing

Fabric: TypeAlias = Any  # a lightning.fabric.Fabric

LossOf: TypeAlias = Callable[[Any, Any], Tensor]  # loss_of(model, batch): the loss of a batch, as the loop computes it

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
"""Fabric's classes that do not change torch's backward and gradients."""

_latest: WeakKeyDictionary[nn.Module, ref[Training]] = WeakKeyDictionary()  # of a module that several Accumulators have had


class Training(Trained):
    """A model, its optimizer and its ranks, as sessions and checkpoints see a loop."""

    skips_backward = retains_graph = False

    def __init__(
        self, fabric: Fabric | None, model: nn.Module, optimizer: Any, loss_of: LossOf | None, refuse_step: Callable[[], None]
    ) -> None:
        self.fabric, self.model, self.optimizer = fabric, model, optimizer
        self.loss_of = None if loss_of is None else partial(self._loss_without_wrapper, loss_of)  # for checks; None if unknown
        self.raw_optimizer: Optimizer = optimizer.optimizer if _is_wrapper(optimizer, "optimizer") else optimizer
        if not hasattr(self.raw_optimizer, "param_groups"):
            found = f"An Accumulator steps one optimizer, but got a {type(optimizer).__name__}"
            raise WrongTypeError(f"{found}. For several, train a LightningModule with manual optimization.")
        self.ddp = next((module for module in model.modules() if isinstance(module, DistributedDataParallel)), None)
        self.is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        if (reason := self._why_refused()) is not None:
            raise ArgumentError(reason)
        self.optimizers = [self.raw_optimizer]
        self.precision_plugin = getattr(getattr(fabric, "strategy", None), "precision", None)
        size, rank, device = 1, 0, next((own.device for own in self.module.parameters()), torch.device("cpu"))
        if fabric is not None:
            device, size, rank = fabric.device, fabric.world_size, fabric.global_rank
        elif self.ddp is not None:
            size, rank = dist.get_world_size(), dist.get_rank()
        self.ranks = Ranks(device, size, None, size, rank)
        self.snapshotter = Undo(self.module, self.ranks.device)
        self._is_stepping, self._refuse_step, self.is_replaced, self._undo = False, refuse_step, False, ExitStack()
        if (before := _latest.get(self.module)) is not None and (earlier := before()) is not None:
            earlier._undo.close()
        _latest[self.module] = ref(self)
        with suppress(AttributeError):  # some wrappers of optimizers skip Optimizer.__init__
            self._undo.callback(self.raw_optimizer.register_step_pre_hook(self._before_step).remove)

    @property
    @override
    def module(self) -> nn.Module:
        wrapper = self.ddp if self.fabric is None else self.model
        return self.model if wrapper is None else wrapper.module  # type: ignore[return-value]

    def _why_refused(self) -> str | None:
        """The error message if this set-up is not supported."""
        fabric, model, ddp = self.fabric, self.model, self.ddp
        if isinstance(self.raw_optimizer, LBFGS):
            return "LBFGS runs its closure several times in a step, and accumulator.step() has none. Use another optimizer."
        stepped, trained = set(self._stepped()), {own for own in model.parameters() if own.requires_grad}
        if ddp is not None and stepped - set(ddp.parameters()):
            return "Some parameters of the optimizer are outside the DistributedDataParallel. Wrap one module that has all."
        if trained and not trained & stepped:
            return "The optimizer has no parameter of the model. Create it after fabric.setup(model)."
        if fabric is None:
            if any(isinstance(module, (FSDPModule, FullyShardedDataParallel)) for module in model.modules()):
                return "A sharded model needs Fabric and fully_shard (FSDP2): pass Fabric(strategy=ModelParallelStrategy(...))"
            if ddp is not None and ddp.process_group.size() != dist.get_world_size():
                return "the process group of DistributedDataParallel must contain all ranks"
            return None
        if not _is_wrapper(model, "module"):
            return "The model was not set up: call model, optimizer = fabric.setup(model, optimizer) first"
        kinds = [kind.__name__ for kind in type(fabric.strategy).__mro__]
        if not any(name in kinds for name in _STRATEGIES):
            return f'An Accumulator does not know {kinds[0]}. Use Fabric(strategy="auto"), "ddp" or ModelParallelStrategy (FSDP2).'
        mesh = fabric.strategy.device_mesh if "ModelParallelStrategy" in kinds else None
        if mesh is not None and mesh["tensor_parallel"].size() > 1:
            return "Use tensor_parallel_size=1; ranks may share a batch in a Trainer with ModelParallelAccumulationStrategy."
        if fabric.world_size > 1 and ddp is None and not self.is_sharded:
            return "Nothing averages the gradients: pass the model of fabric.setup, for FSDP2 with fully_shard in parallelize_fn."
        return None

    def asked(self, policy: Policy) -> Asked:
        """The arguments of this training."""
        engine: dict[str, Any] = {}
        if self.ddp is not None:
            is_static, has_hook = bool(self.ddp.static_graph), bool(self.ddp._comm_hooks)
            engine = {"engine": "ddp", "is_static_graph": is_static, "has_comm_hook": has_hook, "strategy": "DDPStrategy"}
        elif self.is_sharded:
            engine = {"engine": "fsdp2", "strategy": "ModelParallelStrategy"}
        parameters, size = self.parameters(), self.ranks.size
        return Asked(policy, module=self.module, optimizers=self.optimizers, parameters=parameters, ranks=size, **engine)

    def make_sync(self, policy: Policy) -> MainGradients | None:
        """Set up the reduction over ranks. Returns the sums of gradients, if their type is wider."""
        dtype = policy.accumulate_dtype
        sums = None if dtype is None else main_gradients(dtype, self.parameters)
        # else a later Accumulator does not touch what this one uses
        self._undo.callback(setattr, self, "is_replaced", sums is not None or self.is_sharded)
        if sums is not None:
            self._undo.callback(sums.close)
        if self.ddp is not None and (sums is not None or policy.finishes_after_backward):
            self.sync = LateDDPSync(self.ddp, self.ranks, sums)
            self._undo.callback(setattr, self.ddp, "require_backward_grad_sync", True)
        elif self.ddp is not None:
            self.sync = DDPSync(self.ddp, "window", self.ranks)
        elif self.is_sharded and sums is not None:
            instead = f"fully_shard with mp_policy=MixedPrecisionPolicy(reduce_dtype={dtype})"
            raise ArgumentError(f"accumulate_dtype={dtype} is not for a sharded model: use {instead}.")
        elif self.is_sharded:
            self.sync = sync = FSDP2Sync(self.module, "window", self, self.ranks)
            self._undo.callback(sync.close)
        return sums

    def _loss_without_wrapper(self, loss_of: LossOf, batch: Any) -> Tensor:
        """The loss of a batch outside of windows, without other ranks, in full precision if possible."""
        precision: Any = self.precision_plugin
        converts = precision is not None and any(map(is_narrow, self.module.parameters()))
        with torch.enable_grad(), precision.forward_context() if converts else nullcontext():
            return loss_of(self.module, precision.convert_input(batch) if converts else batch)

    @override
    def loss_again(self, batch: Any, is_on_device: bool) -> Tensor:
        if self.loss_of is None:
            found = f"Rank {self.ranks.rank} has a micro-batch without a forward, for which the others wait"
            raise UsageError(f"{found}. Call the model in every micro-batch, or pass Accumulator(loss_of=...).")
        return self.loss_of(batch)

    def _stepped(self) -> list[nn.Parameter]:
        return [parameter for group in self.raw_optimizer.param_groups for parameter in group["params"]]

    def backward(self, loss: Tensor, grad_output: Tensor | None) -> None:
        """Add the gradients of ``loss``, times ``grad_output`` (None for 1)."""
        run: Any = loss.backward if self.fabric is None else partial(self.fabric.backward, loss)
        run(gradient=grad_output, retain_graph=self.retains_graph)

    def zero_grad(self) -> None:
        """Clear the gradients; ``optimizer.zero_grad()`` takes as long as a small micro-batch."""
        for parameter in self._stepped():
            parameter.grad = None

    def clip(self, norm: float | None, value: float | None) -> Tensor | None:
        """Clip the gradients. Returns their norm, if they are clipped by that."""
        if self.fabric is not None:
            how = {"clip_val": value} if norm is None else {"max_norm": norm, "error_if_nonfinite": False}
            found = self.fabric.clip_gradients(self.model, self.optimizer, **how)
            return found.full_tensor() if isinstance(found, DTensor) else found
        if value is None:
            return nn.utils.clip_grad_norm_(self._stepped(), cast("float", norm))
        nn.utils.clip_grad_value_(self._stepped(), value)
        return None

    def step(self) -> bool:
        """Step the optimizer. Returns whether it stepped: a GradScaler may skip the step, and lowers its scale."""
        scale = self.loss_scale()
        with replacing(self, _is_stepping=True):
            self.optimizer.step()
        return self.loss_scale() >= scale

    def _before_step(self, *args: Any) -> None:
        if not self._is_stepping:
            self._refuse_step()


def _is_wrapper(value: object, name: str) -> bool:
    """Whether it is a wrapper of Fabric, which has the wrapped object as a property."""
    return isinstance(getattr(type(value), name, None), property)
