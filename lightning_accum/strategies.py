"""Lightning's strategies with windows: a few lines for each engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch.strategies import (
    DDPStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    SingleDeviceStrategy,
    Strategy,
    StrategyRegistry,
)
from lightning.pytorch.utilities.rank_zero import rank_zero_warn
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from lightning_accum.callback import GradientAccumulation
from lightning_accum.gradient_norm import clip_sharded_by_norm
from lightning_accum.joint_layers import sync_batch_norm_hidden
from lightning_accum.micro_batch import Tokens
from lightning_accum.mixin import AccumulationMixin
from lightning_accum.ranks import Ranks
from lightning_accum.resume import PartialWindow
from lightning_accum.sharded import ShardedMixin
from lightning_accum.sync import DDPSync, FSDP1Sync, FSDP2Sync, SyncPolicy, WideDDPSync, forward_replaced
from lightning_accum.wide_sums import is_narrower


class AccumulationStrategy(AccumulationMixin, SingleDeviceStrategy):
    """Exact gradient accumulation on one device, ``Trainer(strategy="accum")``.

    It runs on the device that the Trainer's ``accelerator`` and ``devices`` name.

    Args:
        device: the device, if not the Trainer's.
        kwargs: see :class:`lightning.pytorch.strategies.SingleDeviceStrategy`.

    Raises:
        MisconfigurationException: (from the Trainer) it names more than one device or node.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning_accum import GradientAccumulation
        >>> trainer = Trainer(accelerator="cpu", strategy="accum", callbacks=[GradientAccumulation(8)], logger=False)
    """

    strategy_name = "accum"

    def __init__(self, device: torch.device | str | int | None = None, **kwargs: Any) -> None:
        super().__init__(device="cpu" if device is None else device, **kwargs)
        self._has_device = device is not None

    @property
    def parallel_devices(self) -> list[torch.device] | None:
        """The one device, as the Trainer's connector asks for it; None until it is known."""
        return [self.root_device] if self._has_device else None

    @parallel_devices.setter
    def parallel_devices(self, devices: list[torch.device]) -> None:
        if len(devices) > 1:
            raise MisconfigurationException(
                f'strategy="accum" runs on one device, but the Trainer names {len(devices)}. Use strategy="accum_ddp", or'
                " devices=1."
            )
        self._root_device = devices[0]
        self._has_device = True

    @property
    def num_nodes(self) -> int:
        """Always 1."""
        return 1

    @num_nodes.setter
    def num_nodes(self, num_nodes: int) -> None:
        if num_nodes > 1:
            raise MisconfigurationException(
                f'strategy="accum" runs on one node, but the Trainer names {num_nodes}. Use strategy="accum_ddp".'
            )


class DDPAccumulationStrategy(AccumulationMixin, DDPStrategy):
    """Exact gradient accumulation over DistributedDataParallel, ``Trainer(strategy="accum_ddp")``.

    Also registered with the suffixes of Lightning's own: ``_spawn``, ``_fork``, ``_notebook`` and
    ``_find_unused_parameters_true``.

    Args:
        args: see :class:`lightning.pytorch.strategies.DDPStrategy`; so are the keyword arguments.
        sync: reduce the gradients over the ranks once a ``"window"``, or at every ``"micro_batch"`` (Accelerate's
            ``sync_each_batch``); where loader batches are split, at the end of each, since the ranks may come to different
            numbers of micro-batches. The result is the same.
        kwargs: see above.

    Raises:
        MisconfigurationException: ``sync`` is neither of the two.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(accelerator="cpu", devices=2, strategy="accum_ddp", accumulate_grad_batches=8, logger=False)
    """

    strategy_name = "accum_ddp"
    _ddp_sync: DDPSync

    def __init__(self, *args: Any, sync: SyncPolicy = "window", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sync_policy = _checked(sync)

    @override
    def configure_ddp(self) -> None:
        assert self.model is not None
        is_joint = self.policy.batch_norm == "exact" and self.policy.micro_batch is not None
        with sync_batch_norm_hidden(self.model) if is_joint and self.root_device.type == "cpu" else nullcontext():
            super().configure_ddp()

    @override
    def _begin(self, trainer: pl.Trainer, callback: GradientAccumulation | None) -> None:
        super()._begin(trainer, callback)
        if self.accumulation is None:
            return
        assert isinstance(self.model, DistributedDataParallel)
        self._check_what_ranks_cannot_split(self.model)
        if (sums := self.accumulation.sums) is None:
            self._sync = self._ddp_sync = DDPSync(self.model, self._sync_policy)
            return
        self._check_what_sums_cannot_do(self.model, sums.dtype)
        self._sync = self._ddp_sync = WideDDPSync(self.model, sums, self.accumulation.ranks)

    def _check_what_sums_cannot_do(self, ddp: DistributedDataParallel, dtype: torch.dtype) -> None:
        if self._sync_policy == "micro_batch":
            raise MisconfigurationException(
                'DDPAccumulationStrategy(sync="micro_batch") reduces the gradients of each micro-batch in the type of the'
                f' parameters, and GradientAccumulation(accumulate_dtype={dtype}) their sum: use sync="window".'
            )
        if ddp._comm_hooks:
            raise MisconfigurationException(
                "DDPAccumulationStrategy(ddp_comm_hook=...) changes how DistributedDataParallel reduces gradients, but"
                f" GradientAccumulation(accumulate_dtype={dtype}) reduces their sums by itself. Leave one of them out."
            )

    def _check_what_ranks_cannot_split(self, ddp: DistributedDataParallel) -> None:
        """Where ranks may come to different numbers of micro-batches, nothing in them may wait for another rank."""
        if self.policy.on_nonfinite != "propagate":
            _check_reduces_once_a_window(self, self._sync_policy)
            if ddp.static_graph:
                raise MisconfigurationException(
                    "DDPAccumulationStrategy(static_graph=True) reduces in the backward that it has recorded, but with"
                    f" GradientAccumulation(on_nonfinite={self.policy.on_nonfinite!r}) gradients are looked at before. Leave"
                    " static_graph out."
                )
        if self.joins_batches and ddp.static_graph:
            raise MisconfigurationException(
                "DDPAccumulationStrategy(static_graph=True) records one forward and backward, but GradientAccumulation(batch_norm="
                '"exact") runs the forwards of all micro-batches, and reduces after their backward. Leave static_graph out.'
            )
        if isinstance(self.policy.window, Tokens) and ddp.static_graph:
            raise MisconfigurationException(
                "DDPAccumulationStrategy(static_graph=True) reduces in the backward that it has recorded, but a window of Tokens is"
                " known to have ended only after it. Leave static_graph out, or give the window in loader batches."
            )
        size = self.policy.micro_batch
        if not isinstance(size, Tokens) and size != "auto":
            return
        if self._sync_policy == "micro_batch":
            raise MisconfigurationException(
                f"GradientAccumulation(micro_batch={size!r}) may split the batches of the ranks into different numbers of micro-"
                'batches, so they cannot reduce at each: use DDPAccumulationStrategy(sync="window").'
            )
        if ddp.static_graph:
            raise MisconfigurationException(
                "DDPAccumulationStrategy(static_graph=True) records the first forward and backward on all ranks together, which"
                f" GradientAccumulation(micro_batch={size!r}) does not promise. Leave static_graph out, or give a"
                " number of samples."
            )
        names = [name for name, layer in ddp.module.named_modules() if isinstance(layer, nn.SyncBatchNorm)]
        if names and not (self.joins_batches and isinstance(size, Tokens)):
            raise MisconfigurationException(
                f"SyncBatchNorm ({names[0]}) waits for all ranks in every micro-batch, but GradientAccumulation(micro_batch="
                f"{size!r}) may come to different numbers of them on the ranks. Give a number of samples."
            )

    @override
    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        if self.accumulation is None:
            with super().block_backward_sync():
                yield
        else:
            with self._sync.blocked() if self.accumulation.plan is None else nullcontext():  # split, it blocks by itself
                yield

    @override
    def blocked(self) -> AbstractContextManager[None]:
        if self.accumulation is None:
            return self.block_backward_sync()
        plan, window = self.accumulation.plan, self.policy.window
        # inside a loader batch the ranks may be at different micro-batches when a window of tokens ends
        is_last = plan is None or (plan.current == len(plan.pieces) - 1 and not isinstance(window, Tokens))
        return self._sync.blocked(is_last_of_batch=is_last)

    @override
    def begin_manual_loader_batch(self) -> None:
        assert self.manual is not None
        ddp = self.model
        assert isinstance(ddp, DistributedDataParallel)
        if self.manual.windows.is_first and ddp.will_sync_module_buffers():  # type: ignore[no-untyped-call]
            ddp._sync_buffers()  # type: ignore[no-untyped-call]  # as DistributedDataParallel does in a forward

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        if self.manual is None:  # else nothing is left to DistributedDataParallel that it could delay
            super().post_backward(closure_loss)

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        assert self.lightning_module is not None
        if self.manual is not None:  # its windows reduce gradients themselves, each backward by itself
            assert isinstance(self.model, DistributedDataParallel)
            with self.precision_plugin.train_step_context(), self.model.no_sync():
                return self.lightning_module.training_step(*args, **kwargs)
        if self.accumulation is None:
            return super().training_step(*args, **kwargs)
        with self.precision_plugin.train_step_context():
            if self.ends_windows_apart:  # it may fail on this rank alone, so the others must not wait for it in there
                return self.lightning_module.training_step(*args, **kwargs)
            return self._ddp_sync.forward(self.lightning_module.training_step, *args, **kwargs)

    @override
    def run_without_batch(self) -> Tensor | None:
        if not self.ends_windows_apart:
            return super().run_without_batch()
        assert self.accumulation is not None
        self.accumulation.window.skip()  # as the others agree on a scale in their first micro-batch
        return self.end_window_apart() if self.accumulation.is_boundary else None

    @override
    def _forward_without_batch(self) -> None:
        self._ddp_sync.forward_without_batch()

    @override
    def _backward_without_loss(self) -> None:
        self._ddp_sync.backward_without_loss()

    @override
    def _is_reduced_inside(self) -> bool:
        is_blocked = isinstance(self.policy.window, Tokens) and self.policy.micro_batch is not None  # as in `blocked`
        return self._sync_policy == "micro_batch" and not is_blocked

    @override
    def _reduce_apart(self) -> None:
        self._ddp_sync.forward_without_batch()
        super()._reduce_apart()
        self._ddp_sync.reduce_without_loss()


class FSDPAccumulationStrategy(ShardedMixin, FSDPStrategy):
    """Exact gradient accumulation over FullyShardedDataParallel (FSDP1), ``Trainer(strategy="accum_fsdp")``.

    Lightning runs it on CUDA only.

    Args:
        args: see :class:`lightning.pytorch.strategies.FSDPStrategy`; so are the keyword arguments.
        sync: reduce the gradients over the ranks once a ``"window"``, or at every ``"micro_batch"``. Once a window sends less, but
            holds whole gradients on every rank until the window ends; the other holds shards. The result is the same.
        kwargs: see above.

    Raises:
        MisconfigurationException: ``sync`` is neither of the two.

    Example:
        >>> strategy = FSDPAccumulationStrategy(sync="micro_batch")
    """

    strategy_name = "accum_fsdp"

    def __init__(self, *args: Any, sync: SyncPolicy = "window", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sync_policy = _checked(sync)

    @override
    def _make_sync(self) -> FSDP1Sync:
        assert self.model is not None
        if self.policy.on_nonfinite != "propagate":
            raise MisconfigurationException(
                f"GradientAccumulation(on_nonfinite={self.policy.on_nonfinite!r}) looks at gradients before they are reduced, but"
                ' FSDP1 gives them to nobody until then. Use strategy="accum_model_parallel" (FSDP2, fully_shard).'
            )
        return FSDP1Sync(self.model, self._sync_policy)

    @override
    def _redirect(self, step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if self.model is self.lightning_module:  # the user wrapped parts of it
            return step(*args, **kwargs)
        assert self.lightning_module is not None
        assert self.model is not None
        with forward_replaced(self.lightning_module, step):
            return self.model(*args, **kwargs)

    @override
    def _check_accumulate_dtype(self, dtype: torch.dtype) -> None:
        raise MisconfigurationException(
            f"GradientAccumulation(accumulate_dtype={dtype}): FSDP1 adds up the gradients of a window in the type that it computes"
            ' in. Use FSDPAccumulationStrategy(sync="micro_batch") without accumulate_dtype and keep the parameters in float32'
            ' (precision="bf16-mixed"), whose shards are added up in float32; or strategy="accum_model_parallel" (FSDP2).'
        )

    @override
    def partial_window(self) -> PartialWindow | None:
        if self.accumulation is not None and self.accumulation.position:
            rank_zero_warn(
                "With FSDP1 a checkpoint inside a window does not hold its gradients: going on from it, the first step is made on"
                ' the rest of the window. strategy="accum_model_parallel" (FSDP2) holds them.'
            )
        return None

    @override
    def clip_by_norm(self, parameters: Iterable[Tensor], largest: float) -> Tensor:
        if not isinstance(self.model, FullyShardedDataParallel):
            raise MisconfigurationException(
                f"The norm of all gradients is known to one FullyShardedDataParallel around all, but {type(self.model).__name__}"
                " wraps its parts by itself. Clip by value, or in its configure_gradient_clipping."
            )
        return self.model.clip_grad_norm_(largest)


class ModelParallelAccumulationStrategy(ShardedMixin, ModelParallelStrategy):
    """Exact gradient accumulation over ``fully_shard`` (FSDP2), ``Trainer(strategy="accum_model_parallel")``.

    Also beside tensor parallelism: weights and gradients are summed over the data-parallel ranks only. As with Lightning's own, the
    module applies ``fully_shard`` in its ``configure_model``.

    Args:
        args: see :class:`lightning.pytorch.strategies.ModelParallelStrategy`; so are the keyword arguments.
        sync: reduce the gradients over the ranks once a ``"window"``, or at every ``"micro_batch"``. Once a window sends less, but
            holds whole gradients on every rank until the window ends; the other holds shards. The result is the same.
        kwargs: see above.

    Raises:
        MisconfigurationException: ``sync`` is neither of the two; or, before training starts, ``fully_shard`` was not applied
            though there are several data-parallel ranks, or a module divides its gradients by a number of its own.

    Example:
        >>> strategy = ModelParallelAccumulationStrategy(data_parallel_size=2, tensor_parallel_size=1)
    """

    strategy_name = "accum_model_parallel"

    def __init__(self, *args: Any, sync: SyncPolicy = "window", **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._sync_policy = _checked(sync)

    @override
    def _ranks(self) -> Ranks:
        mesh = self.device_mesh["data_parallel"]
        size, group = mesh.size(), mesh.get_group()
        return Ranks(self.root_device, size, group, self.world_size, self.global_rank, self._timeout)

    @override
    def _ranks_of_micro_batch(self) -> dist.ProcessGroup | None:
        mesh = self.device_mesh["tensor_parallel"]
        return mesh.get_group() if mesh.size() > 1 else None

    @override
    def rank_in_group(self) -> int:
        return self.device_mesh["data_parallel"].get_local_rank()

    @override
    def clip_by_norm(self, parameters: Iterable[Tensor], largest: float) -> Tensor:
        return clip_sharded_by_norm(parameters, largest)

    @override
    def _check_accumulate_dtype(self, dtype: torch.dtype) -> None:
        sync = self._sharded_sync
        assert isinstance(sync, FSDP2Sync)
        sharded = sync.parameters()
        narrow = [parameter for parameter in self.parameters() if is_narrower(parameter.dtype, dtype)]
        found = sync.sums_narrower_than(dtype) or next((p.dtype for p in narrow if p not in sharded), None)
        if found is not None:
            raise MisconfigurationException(
                f"GradientAccumulation(accumulate_dtype={dtype}): here it is fully_shard that adds up the gradients of a window,"
                f" and it does so in {found}. Apply it to all layers with mp_policy=MixedPrecisionPolicy(reduce_dtype={dtype}), in"
                f" {type(self.lightning_module).__name__}.configure_model."
            )
        if self._sync_policy == "micro_batch" and narrow:
            raise MisconfigurationException(
                f'ModelParallelAccumulationStrategy(sync="micro_batch") adds up shards of gradients in {narrow[0].dtype}, the type'
                f' of the parameters. For GradientAccumulation(accumulate_dtype={dtype}) use sync="window".'
            )

    @override
    def _make_sync(self) -> FSDP2Sync:
        assert self.lightning_module is not None
        if self.policy.on_nonfinite != "propagate":
            _check_reduces_once_a_window(self, self._sync_policy)
        sync = FSDP2Sync(self.lightning_module, self._sync_policy)
        size = self.device_mesh["data_parallel"].size()
        sharded = sync.parameters()
        left = [n for n, p in self.lightning_module.named_parameters() if p.requires_grad and p not in sharded]
        if left and size > 1:
            raise MisconfigurationException(
                f"Nothing averages the gradients of {_names(left)} over the {size} data-parallel ranks: apply fully_shard to what"
                f" they are in, in {type(self.lightning_module).__name__}.configure_model."
            )
        if factors := sync.divide_factors() - {float(size)}:
            raise MisconfigurationException(
                f"Gradients are divided by {factors.pop():g} (set_gradient_divide_factor), where the average over {size}"
                " data-parallel ranks is expected. Leave it out: the weights of the window normalise them."
            )
        return sync


def _checked(sync: SyncPolicy) -> SyncPolicy:
    if sync not in ("window", "micro_batch"):
        raise MisconfigurationException(f'sync={sync!r}: expected "window" or "micro_batch"')
    return sync


def _check_reduces_once_a_window(strategy: AccumulationMixin, sync: SyncPolicy) -> None:
    if sync == "micro_batch":
        raise MisconfigurationException(
            f"GradientAccumulation(on_nonfinite={strategy.policy.on_nonfinite!r}) looks at the gradients of each rank, but with"
            f' {type(strategy).__name__}(sync="micro_batch") they are reduced in each backward, where one that is not finite gets'
            ' into those of all ranks. Use sync="window".'
        )


def _names(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def register() -> None:
    """Add the strategies to Lightning's registry, under the names of Lightning's own with ``accum`` in front."""
    entries: list[tuple[str, type[Strategy], dict[str, Any]]] = [
        ("accum", AccumulationStrategy, {}),
        ("accum_fsdp", FSDPAccumulationStrategy, {}),
        ("accum_fsdp_cpu_offload", FSDPAccumulationStrategy, {"cpu_offload": True}),
        ("accum_model_parallel", ModelParallelAccumulationStrategy, {}),
    ]
    for launcher, start_method in (("", "popen"), ("_spawn", "spawn"), ("_fork", "fork"), ("_notebook", "fork")):
        entries.append((f"accum_ddp{launcher}", DDPAccumulationStrategy, {"start_method": start_method}))
        for find_unused in (True, False):
            name = f"accum_ddp{launcher}_find_unused_parameters_{str(find_unused).lower()}"
            arguments = {"start_method": start_method, "find_unused_parameters": find_unused}
            entries.append((name, DDPAccumulationStrategy, arguments))
    for name, strategy, arguments in entries:
        StrategyRegistry.register(name, strategy, description=strategy.__name__, override=True, **arguments)


register()
