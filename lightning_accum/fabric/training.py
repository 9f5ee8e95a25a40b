"""What a hand-written loop trains: a model and its optimizer, as Fabric or plain torch has set them up."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from lightning_accum.at_exit import wait_for_gloo_threads
from lightning_accum.errors import ArgumentError, WrongTypeError
from lightning_accum.fabric.sync import LoopDDPSync, LoopFSDP2Sync, ShardedModel
from lightning_accum.main_gradients import MainGradients
from lightning_accum.micro_batch import MicroBatch, Weighed
from lightning_accum.ranks import Ranks
from lightning_accum.session import Session, named_parameters_of, parameters_of
from lightning_accum.sync import GradientSync, WideDDPSync
from lightning_accum.undo import Undo

_STRATEGIES = ("SingleDeviceStrategy", "DDPStrategy", "ModelParallelStrategy")
"""Of Fabric's, those that leave the backward and the gradients where torch has them."""


_hooks: WeakKeyDictionary[Optimizer, list[RemovableHandle]] = WeakKeyDictionary()
"""Those of Accumulators on the steps of their optimizers."""


class Fabric(Protocol):
    """What is asked of ``lightning.fabric.Fabric``."""

    @property
    def strategy(self) -> Any:
        """How it trains."""

    @property
    def device(self) -> torch.device:
        """Of this rank."""

    @property
    def world_size(self) -> int:
        """The number of ranks."""

    @property
    def global_rank(self) -> int:
        """Of this rank."""

    def backward(self, tensor: Tensor, **kwargs: Any) -> None:
        """The backward of a loss."""

    def clip_gradients(self, module: Any, optimizer: Any, **kwargs: Any) -> Tensor | None:
        """Clip the gradients of an optimizer, unscaled. Returns their norm, where it is clipped by that."""


class Training:
    """A model and its optimizer, as a session and a checkpoint ask for them.

    Args:
        fabric: that has set them up; None for plain torch, with or without DistributedDataParallel.
        model: as the loop calls it.
        optimizer: of its parameters.
        step_outside: called where somebody else steps the optimizer.

    Raises:
        ValueError: they cannot be trained so.
    """

    skips_backward = False
    session: Session
    sync: GradientSync = GradientSync()
    announce: Callable[[MicroBatch, Weighed], None]
    """The first loss was weighed: says what was understood."""

    def __init__(self, fabric: Fabric | None, model: nn.Module, optimizer: Any, step_outside: Callable[[], None]) -> None:
        self.fabric = fabric
        self.model = model
        self.optimizer = optimizer
        self.raw_optimizer: Optimizer = optimizer.optimizer if _has_property(optimizer, "optimizer") else optimizer
        if not hasattr(self.raw_optimizer, "param_groups"):
            raise WrongTypeError(
                f"An Accumulator steps one optimizer, but got a {type(optimizer).__name__}. Give the parameters of several to one,"
                " as groups; or train a LightningModule, whose manual optimization takes several."
            )
        found = [module for module in model.modules() if isinstance(module, DistributedDataParallel)]
        self.ddp = found[0] if found else None
        self.is_sharded = any(isinstance(module, FSDPModule) for module in model.modules())
        if fabric is not None and not _has_property(model, "module"):
            raise ArgumentError("The model was not set up: call model, optimizer = fabric.setup(model, optimizer) first")
        self.module: nn.Module = model if fabric is None else model.module  # type: ignore[assignment]
        if self.ddp is not None and fabric is None:
            self.module = self.ddp.module
        precision = getattr(getattr(fabric, "strategy", None), "precision", None)
        self.scaler: Any = getattr(precision, "scaler", None)
        self.ranks = self._ranks()
        self.snapshotter = Undo(self.module, self.ranks.device)
        trained = [parameter for parameter in self.module.parameters() if parameter.requires_grad]
        stepped = set(map(id, self._stepped()))
        self._not_stepped = [parameter for parameter in trained if id(parameter) not in stepped]
        if self.ddp is not None and stepped - set(map(id, self.ddp.parameters())):
            raise ArgumentError(
                "The optimizer has parameters outside of the DistributedDataParallel that the Accumulator has found, which reduces"
                " the gradients of its own once a window. Wrap one module that has all of them, and pass it as the model."
            )
        if trained and len(trained) == len(self._not_stepped):
            raise ArgumentError(
                "The optimizer has none of the parameters of the model. Where fabric.setup(model) shards or replaces them, make the"
                " optimizer after it: optimizer = fabric.setup_optimizers(AdamW(model.parameters()))"
            )
        self.seen = 0
        """Loader batches that the loop has drawn so far, over all passes."""
        self._is_stepping = self._has_stepped = False
        self._step_outside = step_outside
        self._may_be_left_out = False
        for handle in _hooks.pop(self.raw_optimizer, ()):  # of an Accumulator that this one takes the place of
            handle.remove()
        with suppress(AttributeError):  # some that wrap another optimizer leave out Optimizer.__init__
            hooks = _hooks[self.raw_optimizer] = [self.raw_optimizer.register_step_pre_hook(self._before_step)]
            if self.scaler is not None:
                hooks.append(self.raw_optimizer.register_step_post_hook(self._after_step))
                self._may_be_left_out = True

    def _ranks(self) -> Ranks:
        """Those that train, and whose gradients are averaged."""
        self._refuse_others()
        fabric, ddp = self.fabric, self.ddp
        if fabric is not None:
            device, size, rank = fabric.device, fabric.world_size, fabric.global_rank
        else:
            device = next((p.device for p in self.module.parameters()), torch.device("cpu"))
            size, rank = (1, 0) if ddp is None else (dist.get_world_size(ddp.process_group), dist.get_rank(ddp.process_group))
        if size > 1:
            wait_for_gloo_threads()
        return Ranks(device, size, None, size, rank)

    def _refuse_others(self) -> None:
        fabric, ddp = self.fabric, self.ddp
        if any(isinstance(module, FullyShardedDataParallel) for module in self.model.modules()):
            raise ArgumentError(
                "The model is sharded by FullyShardedDataParallel (FSDP1), which gives its gradients to nobody inside a window. Use"
                " FSDP2: Fabric(strategy=ModelParallelStrategy(...)), which applies fully_shard."
            )
        if fabric is None:
            if self.is_sharded:
                raise ArgumentError("A model sharded by fully_shard needs Fabric: pass Fabric(strategy=ModelParallelStrategy(...))")
            if ddp is not None and ddp.process_group.size() != dist.get_world_size():
                raise ArgumentError("DistributedDataParallel has a process group of its own: the ranks of it have to be all")
            return
        kinds = [kind.__name__ for kind in type(fabric.strategy).__mro__]
        if not any(name in kinds for name in _STRATEGIES):
            raise ArgumentError(
                f"Accumulator does not know how {kinds[0]} reduces and keeps gradients. Use Fabric(strategy=...) with one of"
                f' "auto" on one device, "ddp", or ModelParallelStrategy (FSDP2).'
            )
        mesh = getattr(fabric.strategy, "device_mesh", None) if "ModelParallelStrategy" in kinds else None
        if mesh is not None and mesh["tensor_parallel"].size() > 1:
            raise ArgumentError(
                "ModelParallelStrategy(tensor_parallel_size=...) has ranks that share a batch, which the Accumulator does not"
                " support. Use tensor_parallel_size=1, or a Trainer with ModelParallelAccumulationStrategy."
            )
        if fabric.world_size > 1 and ddp is None and not self.is_sharded:
            raise ArgumentError(
                f"Nothing averages the gradients over the {fabric.world_size} ranks: there is neither"
                " DistributedDataParallel nor fully_shard in the model. Pass what fabric.setup(model, optimizer)"
                " returned; with ModelParallelStrategy, have its parallelize_fn apply fully_shard."
            )

    # --- parameters -------------------------------------------------------------------------------------------------

    @property
    def optimizers(self) -> list[Optimizer]:
        """The one, without Fabric's wrapper."""
        return [self.raw_optimizer]

    def _stepped(self) -> list[nn.Parameter]:
        return [parameter for group in self.raw_optimizer.param_groups for parameter in group["params"]]

    def trained(self) -> list[nn.Parameter]:
        """Those that get gradients: of the optimizer, as it is now, and others of the model, as it was."""
        stepped = [own for group in self.raw_optimizer.param_groups for own in group["params"] if own.requires_grad]
        return stepped + self._not_stepped

    def parameters(self) -> list[nn.Parameter]:
        """Those of the model and of the optimizer."""
        return parameters_of(self.module, self.optimizers)

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        """The same, by names that do not depend on what wraps the model."""
        named = named_parameters_of(self.module, self.optimizers)
        return {name.replace("_orig_mod.", ""): parameter for name, parameter in named.items()}

    # --- gradients --------------------------------------------------------------------------------------------------

    def make_sync(
        self, finishes_after_backward: bool, sums: MainGradients | None, loss_of: Callable[[Any], Tensor] | None
    ) -> GradientSync:
        """When gradients are reduced over the ranks.

        Args:
            finishes_after_backward: after the last backward of a window, not in it.
            sums: where they are added up, if not in ``parameter.grad``.
            loss_of: the loss of a batch, for a rank that has none while others run sharded modules.
        """
        if self.ddp is not None and sums is not None:
            return WideDDPSync(self.ddp, sums, self.ranks)
        if self.ddp is not None:
            return LoopDDPSync(self.ddp, "window", finishes_after_backward)
        if self.is_sharded:
            return LoopFSDP2Sync(self.module, "window", ShardedModel(self.snapshotter, loss_of), self.ranks)
        return GradientSync()

    def backward(self, loss: Tensor, grad_output: Tensor | None) -> None:
        """Add the gradients of ``loss``, times ``grad_output`` (None for 1)."""
        if isinstance(self.sync, LoopDDPSync):
            self.sync.note_loss(loss)
        if self.fabric is None:
            loss.backward(grad_output)  # type: ignore[no-untyped-call]
        elif grad_output is None:
            self.fabric.backward(loss)
        else:
            self.fabric.backward(loss, gradient=grad_output)

    def loss_scale(self) -> float:
        """What a GradScaler multiplies losses by, and so their gradients."""
        return 1.0 if self.scaler is None else float(self.scaler.get_scale())

    def zero_grad(self) -> None:
        """Clear the gradients, as ``optimizer.zero_grad()`` does, which takes as long as a small micro-batch."""
        for group in self.raw_optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = None

    def clip(self, norm: float | None, value: float | None) -> Tensor | None:
        """Clip the gradients. Returns their norm, where they are clipped by that."""
        if self.fabric is not None:
            how = {"clip_val": value} if norm is None else {"max_norm": norm, "error_if_nonfinite": False}
            found = self.fabric.clip_gradients(self.model, self.optimizer, **how)
            return found.full_tensor() if isinstance(found, DTensor) else found
        if norm is None:
            assert value is not None
            nn.utils.clip_grad_value_(self._stepped(), value)
            return None
        return nn.utils.clip_grad_norm_(self._stepped(), norm)

    # --- what a session and a checkpoint ask for ---------------------------------------------------------------------

    @property
    def is_global_zero(self) -> bool:
        """This is the first rank."""
        return self.ranks.rank == 0

    def rank_in_group(self) -> int:
        """Of this rank."""
        return self.ranks.rank

    # --- steps ------------------------------------------------------------------------------------------------------

    def step(self) -> bool:
        """Step the optimizer. Returns whether it did: a GradScaler may have left it out."""
        self._is_stepping, self._has_stepped = True, not self._may_be_left_out
        try:
            self.optimizer.step()
        finally:
            self._is_stepping = False
        return self._has_stepped

    def _before_step(self, *args: Any) -> None:
        if not self._is_stepping:
            self._step_outside()

    def _after_step(self, optimizer: Optimizer, *args: Any) -> None:
        # an optimizer that unscales by itself (`fused=True`) is called in any case, with what a GradScaler has found
        found_inf = getattr(optimizer, "found_inf", None)
        self._has_stepped = not (isinstance(found_inf, Tensor) and bool(found_inf))


def _has_property(value: object, name: str) -> bool:
    """Whether it is a wrapper of Fabric's, which has what it wraps as a property."""
    return isinstance(getattr(type(value), name, None), property)


def checked_clip(clip_norm: float | None, clip_value: float | None) -> None:
    """Refuse what gradients cannot be clipped to.

    Raises:
        ValueError: both are given, or one of them is not above 0.
    """
    if clip_norm is not None and clip_value is not None:
        raise ArgumentError("step(clip_norm=..., clip_value=...): give one of them")
    for name, value in (("clip_norm", clip_norm), ("clip_value", clip_value)):
        if value is not None and not value > 0:
            raise ArgumentError(f"step({name}={value!r}): expected a number above 0; {math.inf} measures and does not clip")
