"""GradientNoiseScale: estimates the useful size of a window from the gradients of micro-batches and windows."""

from __future__ import annotations

import math
from collections.abc import Iterable, MutableMapping
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer
from torch.utils.weak import WeakTensorKeyDictionary
from typing_extensions import override

from lightning_accum.accumulation import Accumulation
from lightning_accum.exact import tensor_of as as_tensor
from lightning_accum.micro_batch import MicroBatch
from lightning_accum.sync.sharded import ShardedSync
from lightning_accum.trainer.engine import Engine
from lightning_accum.trainer.from_lightning import MisconfiguredError, pl, rank_zero_info
from lightning_accum.trainer.package import check_package
from lightning_accum.trainer.watch import parameters_of
from lightning_accum.undo import replacing
from lightning_accum.weighing.counts import count_samples
from lightning_accum.window_totals import tensor_of

_SUMMED = ("1", "S", "G", "SS", "GG", "weight", "samples", "1 ww", "windows")
"""Sums over the windows, each with a decaying weight w: G is |G|^2, "1 ww" sums w^2, "windows" counts all equally."""


class NoiseScale(NamedTuple):
    """An estimate of the gradient noise scale, which is the largest useful batch size.

    ``weight`` is the noise scale in units of weight (tokens, for a language model), inf if noise hides the gradient. Its interval
    of two standard errors is 0 to inf as long as S (``variance``) or ``|G|^2`` (``gradient``) is less than two standard errors
    above 0. Values in samples are nan if batch sizes are unknown. ``windows`` is the number of measured windows.
    """

    weight: float
    weight_low: float
    weight_high: float
    samples: float
    samples_low: float
    samples_high: float
    weight_per_sample: float
    weight_per_window: float
    variance: float
    gradient: float
    windows: int


class GradientNoiseScale(pl.Callback):
    """Estimate the gradient noise scale while training: the largest useful window.

    The noise scale is ``B = S / |G|^2``, the variance of the gradient of one sample over the squared norm of the mean gradient
    (McCandlish et al., arXiv 1812.06162, where it is ``B_simple``). Much smaller windows take steps that are mostly noise; much
    larger ones hardly need fewer steps. It usually grows during training.

    Micro-batches of weight ``n_i`` have mean gradients ``g_i``; a window of ``K`` of them over all ranks, of weight ``N``, has the
    gradient ``g``. Unbiased are ``S = (sum of n_i |g_i|^2 - N |g|^2) / (K - 1)`` and ``|G|^2 = |g|^2 - S / N``. Both are smoothed
    over the windows, with one all-reduce of 56 bytes a window. Logged are ``noise_scale/samples``, ``noise_scale/weight`` (in
    tokens, for a language model), ``noise_scale/variance`` (``S``) and ``noise_scale/gradient`` (``|G|^2``). The end of ``fit``
    prints the suggested batch size with an interval of two standard errors, which :attr:`estimate` has, too. Micro-batches are
    assumed to be random parts of the data: shuffle it, and do not sort rows by length (``trim_padding=False``).

    Args:
        smoothing: the weight of a window relative to the next: 0.99 averages over about 200 windows, 1 weights all equally. The
            mean lags behind a noise scale that changes.

    Raises:
        MisconfigurationException: ``smoothing`` is out of its range; or, before training starts: the strategy is not one of this
            package, the module optimizes manually, or no rank has the gradient of a micro-batch (FSDP1, tensor parallelism).

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> from lightning_accum import GradientAccumulation
        >>> from lightning_accum.testing import QUIET
        >>> noise = GradientNoiseScale()
        >>> Trainer(strategy="accum", max_epochs=1, callbacks=[GradientAccumulation(4), noise], **QUIET).fit(BoringModel())
        >>> noise.estimate.windows
        16
    """

    def __init__(self, *, smoothing: float = 0.99) -> None:
        if isinstance(smoothing, bool) or not isinstance(smoothing, (int, float)) or not 0 < smoothing <= 1:
            raise MisconfiguredError(f"smoothing={smoothing!r}: expected a number above 0, up to 1")
        self.smoothing = smoothing
        self._accumulation: Accumulation | None = None
        self._optimizers: list[Optimizer] = []
        self._undo, self._hooks = ExitStack(), 0  # remove the hooks
        self._watched: MutableMapping[Tensor, bool] = {}
        self._norms: dict[int, Tensor] | None = None
        """Collects the gradient norms of a backward, by parameter number; None if none are needed."""
        self._current: tuple[Tensor | float | None, float] = (None, math.nan)  # of a micro-batch: weight (None for a sum), samples
        self._micro_batches: list[Tensor] = []  # the micro-batches of the window so far, see end_backward
        self._sums = torch.zeros(len(_SUMMED))

    @property
    def estimate(self) -> NoiseScale | None:
        """The noise scale, the same on all ranks; None before two windows were measured. Waits for the device."""
        total, *sums, squares, windows = self._sums.tolist()
        if windows < 2:
            return None
        s, g, ss, gg, weight, samples = (value / total for value in sums)
        scale, low, high = max(s, 0.0) / g if g > 0 else math.inf, 0.0, math.inf
        four = 4 * squares / (total**2 - squares)  # two standard errors of a mean, squared, divided by the variance
        of_s, of_g = four * (ss - s * s), four * (gg - g * g)
        if s > 0 and of_s < s * s and g > 0 and of_g < g * g:  # the variance of the logarithm of a ratio of two means
            error = math.exp(math.sqrt(max(of_s / s**2 + of_g / g**2, 0.0)))
            low, high = scale / error, scale * error
        one = weight / samples if samples > 0 else math.nan  # sample
        return NoiseScale(scale, low, high, scale / one, low / one, high / one, one, weight, s, g, int(windows))

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage == "fit":
            check_package(trainer)
            # drop the sums of an earlier fit, unless a checkpoint restores them
            self._sums = torch.zeros(len(_SUMMED))

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.teardown()
        strategy = cast("Engine", trainer.strategy)
        accumulation = strategy.accumulation if isinstance(strategy, Engine) else None
        if (
            accumulation is None
            or accumulation.ranks.size != accumulation.ranks.world_size
            or accumulation.ranks.same_rows > 1
            or any(isinstance(module, FullyShardedDataParallel) for module in cast("nn.Module", strategy.model).modules())
        ):
            raise MisconfiguredError(
                'GradientNoiseScale needs the gradient of each micro-batch on one rank: Trainer(strategy="accum"), "accum_ddp" or '
                '"accum_model_parallel" without tensor parallelism, and automatic_optimization=True. Or leave it out.'
            )
        self._sums = self._sums.to(accumulation.window.device, accumulation.window.dtype)
        self._watched = WeakTensorKeyDictionary()  # FSDP2 replaces parameters
        for unit in strategy.sync.units if isinstance(strategy.sync, ShardedSync) else ():
            # from just before its forward a unit has whole parameters; before the reduction their gradients are of this rank
            self._undo.callback(unit.register_forward_pre_hook(partial(self._watch_whole, list(unit.modules()))).remove)
        self._accumulation, self._optimizers = accumulation, strategy.optimizers
        self._undo.enter_context(replacing(accumulation, observer=self))

    def begin_backward(self, micro_batch: MicroBatch, weight: Tensor | float | None) -> None:
        """Watch the next backward, of a micro-batch with a weight (None for a loss that is a sum). Called by the strategy."""
        assert self._accumulation is not None
        window = self._accumulation.window
        del self._micro_batches[len(window.entries) - 1 :]  # drop norms of a batch that runs again, or of a dropped window
        if not self._micro_batches:
            for optimizer in self._optimizers:
                self._watch(parameters_of(optimizer))  # some may have been frozen before
        samples = count_samples(micro_batch.batch)
        self._norms, self._current = {}, (weight, math.nan if samples is None else samples)

    def end_backward(self) -> None:
        """End the backward; backwards of shadow batches are ignored. Called by the strategy."""
        if self._accumulation is None or self._norms is None:
            return
        window, (weight, samples) = self._accumulation.window, self._current
        device, dtype, is_sum = window.device, window.dtype, weight is None
        counted = as_tensor(1.0 if weight is None else weight, device, dtype)
        n = as_tensor(samples, device, dtype) if is_sum else counted  # the denominator of a sum, as if it were a mean
        assert window.weight_scale is not None
        # gradients include the weight, unless sums in a wider type apply it later
        factor = 1.0 if is_sum else window.weight_scale if self._accumulation.sums is None else counted
        squares = (_sum_of_squares(self._norms.values(), device, dtype) * factor**2 / n).where(n != 0, 0.0)
        self._micro_batches.append(tensor_of([squares, n, n != 0, counted, samples, float(is_sum)], device, dtype))
        self._norms = None

    def _watch(self, parameters: Iterable[Tensor | None]) -> None:
        """Watch parameters that need a gradient and are not watched yet. A backward gives sharded parameters no gradient."""
        # a hook on a leaf gets the sum over all its uses in the graph, before it is added to .grad and before DDP reduces it
        for parameter in parameters:
            if parameter is None or parameter in self._watched or not parameter.requires_grad or isinstance(parameter, DTensor):
                continue
            self._watched[parameter], self._hooks = True, self._hooks + 1
            hook = partial(self._see, self._hooks)
            self._undo.callback(parameter.register_hook(hook).remove)  # type: ignore[no-untyped-call]

    def _watch_whole(self, parts: list[nn.Module], unit: nn.Module, arguments: object) -> None:
        if torch.is_grad_enabled():
            for part in parts:
                self._watch(part._parameters.values())

    def _see(self, number: int, gradient: Tensor) -> None:
        if self._norms is not None:
            # the norm of a sum does not follow from the norms of its parts: such a window is not measured
            self._norms[number] = _norm_of(gradient.detach()) * (math.nan if number in self._norms else 1.0)

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        accumulation = self._accumulation
        if accumulation is None:
            return
        if not accumulation.is_passthrough():
            self._measure(cast("Engine", trainer.strategy), accumulation, optimizer)
        self._micro_batches.clear()

    def _measure(self, strategy: Engine, accumulation: Accumulation, optimizer: Optimizer) -> None:
        """Estimate S and |G|^2 from the window that has just ended, and log them. Called on all ranks."""
        if accumulation.plan is not None and accumulation.plan.order is not None:
            seen = "GradientNoiseScale assumes that micro-batches are random samples, but these are sorted by length"
            accumulation.warn_once(f"{seen}. Use GradientAccumulation(trim_padding=False).")
        window, ranks, closed, scale = accumulation.window, accumulation.ranks, accumulation.closed, strategy.loss_scale()
        assert closed is not None
        own = torch.stack([torch.zeros(6, dtype=window.dtype, device=window.device), *self._micro_batches]).sum(0)
        gradients = [parameter.grad for parameter in parameters_of(optimizer) if parameter.grad is not None]
        # each rank has its shard, or the whole gradient, which is then counted by every rank
        norms = (_norm_of(g) / (1 if isinstance(g, DTensor) else math.sqrt(ranks.size)) for g in gradients)
        over_ranks = torch.cat((own, _sum_of_squares(norms, window.device, window.dtype).reshape(1)))
        if ranks.size > 1:
            dist.all_reduce(over_ranks, group=ranks.group)
        squares, weight, counted, as_counted, samples, sums, gradient = over_ranks.unbind()
        squares = squares * (closed.slope / scale) ** 2  # for a function of a mean, these are gradients of the mean
        if getattr(optimizer, "_step_supports_amp_scaling", False):  # it unscales in its step
            gradient = gradient / scale**2
        gradient = torch.where(sums > 0, gradient / weight**2, gradient)
        s = (squares - weight * gradient) / (counted - 1)
        g = gradient - s / weight
        one = torch.ones_like(s)
        new = torch.stack((one, s, g, s * s, g * g, weight, samples, one, one))
        in_window = torch.where(sums > 0, closed.micro_batches, closed.weight)
        is_whole = (as_counted - in_window).abs() <= 1e-5 * as_counted  # and was not resumed half-way
        decay = self.smoothing ** torch.tensor([1.0] * 7 + [2.0, 0.0], dtype=new.dtype, device=new.device)
        self._sums = torch.where(is_whole & (counted > 1) & new[:6].isfinite().all(), decay * self._sums + new, self._sums)
        total, s, g, weight, samples = (self._sums[_SUMMED.index(name)] for name in ("1", "S", "G", "weight", "samples"))
        noise = torch.where(g > 0, (s / g).clamp(min=0), math.inf).where(total > 0, math.nan)
        found = {"weight": noise, "samples": noise * samples / weight, "variance": s / total, "gradient": g / total}
        strategy.rows.show({f"noise_scale/{name}": value for name, value in found.items()}, is_finite=True)

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        accumulation, found = self._accumulation, self.estimate
        if accumulation is not None and found is None:
            accumulation.warn_once(
                "GradientNoiseScale has no estimate. It needs two windows of two micro-batches, all with a weight and finite "
                "gradients: GradientAccumulation(4), or micro_batch=...; and checkpoints with use_reentrant=False."
            )
        elif found is not None:
            rank_zero_info(
                f"GradientNoiseScale: a window of about {found.samples:,.0f} samples (weight {found.weight:,.0f}) is useful, "
                f"between {found.samples_low:,.0f} and {found.samples_high:,.0f} (two standard errors); here a window had "
                f"{found.weight_per_window / found.weight_per_sample:,.0f} on average in {found.windows} windows."
            )

    @override
    def teardown(self, *_: Any, **__: Any) -> None:
        self._undo.close()
        self._accumulation, self._micro_batches, self._optimizers, self._norms = None, [], [], None
        self._watched = {}  # weak references cannot be pickled

    on_exception = teardown

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"sums": dict(zip(_SUMMED, self._sums.tolist(), strict=True))}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._sums = torch.tensor([state_dict["sums"][name] for name in _SUMMED], dtype=torch.float64)


def _norm_of(gradient: Tensor) -> Tensor:
    """The norm of a gradient or of this rank's shard, in single precision at least: squares of float16 overflow."""
    if isinstance(gradient, DTensor):
        gradient = gradient.to_local()
    if gradient.layout != torch.strided:
        gradient = gradient.coalesce().values()
    dtype = torch.float32 if gradient.dtype in (torch.float16, torch.bfloat16) else None
    norm: Tensor = torch.linalg.vector_norm(gradient, dtype=dtype)
    return norm


def _sum_of_squares(norms: Iterable[Tensor], device: torch.device, dtype: torch.dtype) -> Tensor:
    """The sum of the squared norms, as a tensor of ``dtype`` on ``device``, which is not waited for."""
    found = [norm.to(device) for norm in norms]
    return torch.stack(found).to(dtype).square().sum() if found else torch.zeros((), dtype=dtype, device=device)
