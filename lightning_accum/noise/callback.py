"""GradientNoiseScale: watches the gradients of micro-batches and windows while they are made."""

from __future__ import annotations

import math
from itertools import chain
from typing import Any, cast

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.rank_zero import rank_zero_info
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.optim import Optimizer
from typing_extensions import override

from lightning_accum import families
from lightning_accum.accumulation import Accumulation
from lightning_accum.arguments import MisconfiguredError
from lightning_accum.engine import Engine
from lightning_accum.loops import trainer_state
from lightning_accum.loops.watch import parameters_of
from lightning_accum.micro_batch import MicroBatch
from lightning_accum.noise.measurement import (
    GradientWatch,
    MeasuredMicroBatch,
    squared_norm_of_gradients,
    sum_of_squares,
    totals,
)
from lightning_accum.noise.report import report
from lightning_accum.noise.scale import NoiseScale, SmoothedNoise, variance_and_gradient
from lightning_accum.splitting.micro_batch import Tokens
from lightning_accum.sync import ShardedSync
from lightning_accum.weighing.counts import TokenCount, count_samples
from lightning_accum.weighing.denominator import Denominator


class GradientNoiseScale(Callback):
    """Estimate the gradient noise scale while training: how large a window is worth having.

    The noise scale is ``B = S / |G|^2``, the variance of the gradient of one sample over the squared norm of the mean gradient
    (McCandlish et al., "An Empirical Model of Large-Batch Training", arXiv 1812.06162, where it is ``B_simple``). The
    steps of much smaller windows are mostly noise, so that windows of twice the size need half as many; much larger ones hardly
    need fewer. It usually grows during training.

    A micro-batch of weight ``n_i`` has a mean gradient ``g_i`` with ``E|g_i|^2 = |G|^2 + S / n_i``, and a window
    of ``K`` of them over all ranks, of weight ``N``, has ``E|g|^2 = |G|^2 + S / N``. Hence without bias, also for
    micro-batches of different weights,

    - ``S = (sum of n_i |g_i|^2 - N |g|^2) / (K - 1)``,
    - ``|G|^2 = |g|^2 - S / N``.

    Each is smoothed over the windows by itself. The norms are taken from the gradients that training computes anyway, before
    they are added up: there is no other backward and no copy of them, and one all-reduce of 56 bytes a window.

    It logs ``noise_scale/samples``; ``noise_scale/weight``, the same in units of the weight (tokens, for a language model);
    ``noise_scale/variance`` and ``noise_scale/gradient``, which are ``S`` for a unit of weight and ``|G|^2``. At the end of
    ``fit`` it prints the batch size that it suggests, with an interval of two standard errors, and with ``micro_batch="auto"`` how
    large a micro-batch was found to fit. :attr:`estimate` has these numbers. It goes on from a checkpoint.

    The mean over the windows lags behind a noise scale that grows or shrinks. If the windows show that it does, the line at the end
    says so, and that end of the interval is open: the noise scale at the end of a short run may be several times the mean.

    Micro-batches are assumed to be random parts of the data: shuffle it. Rows that ``trim_padding`` has sorted by length are not.
    Units of weight are assumed to be independent, which the tokens of a sample are not: in tokens the suggestion holds for samples
    of the length that was measured.

    Args:
        smoothing: how much the estimate of a window counts in the mean, compared to that of the next window: 0.99 looks back
            over about 200 windows. 1 counts all alike.
        every_n_windows: measure one window in so many. A measured micro-batch takes the norm of the gradient of each parameter.

    Raises:
        MisconfigurationException: an argument is out of its range; or, before training starts: the strategy is not one of this
            package, the module optimizes manually, or it is sharded by FSDP1 or for tensor parallelism, where no rank has the
            gradient of a micro-batch.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> from lightning_accum import GradientAccumulation
        >>> noise = GradientNoiseScale()
        >>> quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
        >>> callbacks = [GradientAccumulation(4), noise]
        >>> trainer = Trainer(accelerator="cpu", strategy="accum", max_epochs=1, callbacks=callbacks, **quiet)
        >>> trainer.fit(BoringModel())
        >>> noise.estimate.windows
        16
        >>> noise.estimate.samples_low <= noise.estimate.samples <= noise.estimate.samples_high
        True
    """

    def __init__(self, *, smoothing: float = 0.99, every_n_windows: int = 1) -> None:
        if isinstance(smoothing, bool) or not isinstance(smoothing, (int, float)) or not 0 < smoothing <= 1:
            raise MisconfiguredError(f"smoothing={smoothing!r}: expected a number above 0, up to 1")
        if isinstance(every_n_windows, bool) or not isinstance(every_n_windows, int) or every_n_windows < 1:
            raise MisconfiguredError(f"every_n_windows={every_n_windows!r}: expected a number of windows from 1")
        self.smoothing = smoothing
        self.every_n_windows = every_n_windows
        self._accumulation: Accumulation | None = None
        self._watch: GradientWatch | None = None
        self._optimizers: list[Optimizer] = []
        self._micro_batches: list[MeasuredMicroBatch] = []
        self._current: tuple[Denominator | None, float, float] = (None, math.nan, 1.0)
        """Weight, samples and weight scale of the micro-batch whose backward runs."""
        self._begin_fit()

    def _begin_fit(self) -> None:
        """What was seen in an earlier fit is of another training, unless a checkpoint brings it back."""
        self._windows = 0
        """Those with an optimizer step, over all of training."""
        self._noise = SmoothedNoise(self.smoothing, torch.device("cpu"))
        self._largest: int | None = None
        """Samples in the largest micro-batch of ``micro_batch="auto"``, and whether memory has limited it."""
        self._is_limited = False

    @property
    def estimate(self) -> NoiseScale | None:
        """The noise scale, the same on all ranks; None before two windows were measured. Waits for the device."""
        return self._noise.estimate()

    # --- before training ----------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        if families.adopt(self, trainer):
            return self.setup(trainer, pl_module, stage)
        self._begin_fit()
        if not isinstance(trainer.strategy, Engine):
            raise MisconfiguredError(
                f"GradientNoiseScale needs a strategy of lightning_accum, but the Trainer has {type(trainer.strategy).__name__}."
                ' Use Trainer(strategy="accum") on one device, "accum_ddp" on several, "accum_model_parallel" for fully_shard.'
            )
        if not pl_module.automatic_optimization:
            raise MisconfiguredError(
                f"GradientNoiseScale measures the windows of automatic optimization, but {type(pl_module).__name__} has"
                " automatic_optimization=False. Leave the callback out, or leave the optimizer to the Trainer."
            )

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._let_go()
        strategy = cast("Engine", trainer.strategy)
        accumulation = strategy.accumulation
        assert accumulation is not None
        assert strategy.model is not None
        if any(isinstance(module, FullyShardedDataParallel) for module in strategy.model.modules()):
            raise MisconfiguredError(
                "GradientNoiseScale needs the gradient of each micro-batch, which FullyShardedDataParallel (FSDP1) keeps to itself."
                ' Use Trainer(strategy="accum_model_parallel") with fully_shard, or leave the callback out.'
            )
        ranks = accumulation.ranks
        if ranks.size != ranks.world_size:
            raise MisconfiguredError(
                "GradientNoiseScale needs the gradient of each micro-batch on one rank, but tensor parallelism cuts it over"
                f" {ranks.world_size // ranks.size}. Use tensor_parallel_size=1, or leave the callback out."
            )
        if ranks.same_rows > 1:
            raise MisconfiguredError(
                f"GradientNoiseScale compares micro-batches of different rows, but {ranks.same_rows} ranks have parts of the same"
                " (mesh=). Leave the callback out."
            )
        has_one = ranks.size == 1 and accumulation.splitting is None
        if has_one and not accumulation.policy.may_be_longer_than_one(trainer.accumulate_grad_batches):
            accumulation.warn_once(f"GradientNoiseScale will have no estimate. {_ONE_MICRO_BATCH}")
        self._noise.move(accumulation.window.device, accumulation.window.dtype)
        self._watch = GradientWatch()
        if isinstance(strategy.sync, ShardedSync):
            self._watch.watch_units(strategy.sync.units)
        self._accumulation, self._micro_batches = accumulation, []
        accumulation.observer = self
        self._optimizers = strategy.optimizers

    # --- one micro-batch ----------------------------------------------------------------------------------------------

    def begin_backward(self, micro_batch: MicroBatch, weight: Denominator | None) -> None:
        """A micro-batch has a weight, and its backward is next. Called by the strategy."""
        accumulation, watch, micro_batches = self._accumulation, self._watch, self._micro_batches
        assert accumulation is not None
        assert watch is not None
        if self._windows % self.every_n_windows:
            return
        # there are more where a batch runs again, or a window was dropped
        del micro_batches[accumulation.window.micro_batches - 1 :]
        if not micro_batches:
            watch.has_parts = False
            watch.watch(chain.from_iterable(map(parameters_of, self._optimizers)))  # some may have been frozen so far
        samples, weight_scale = count_samples(micro_batch.batch), accumulation.window.weight_scale
        assert weight_scale is not None
        watch.norms, self._current = {}, (weight, math.nan if samples is None else samples, weight_scale)

    def end_backward(self) -> None:
        """It is over: backwards that keep other ranks company are not looked at. Called by the strategy."""
        accumulation, watch = self._accumulation, self._watch
        if accumulation is not None and watch is not None and watch.norms is not None:
            square = sum_of_squares(watch.norms.values(), accumulation.window.device, accumulation.window.dtype)
            self._micro_batches.append(MeasuredMicroBatch(*self._current, square))
            watch.norms = None

    # --- the end of a window ------------------------------------------------------------------------------------------

    @override
    def on_before_optimizer_step(self, trainer: pl.Trainer, pl_module: pl.LightningModule, optimizer: Optimizer) -> None:
        accumulation, watch = self._accumulation, self._watch
        if accumulation is None or watch is None:
            return
        is_measured = self._windows % self.every_n_windows == 0 and not accumulation.is_passthrough()
        self._windows += 1
        if is_measured:
            self._measure(cast("Engine", trainer.strategy), optimizer)
            self._show(trainer)
        self._micro_batches.clear()
        splitting = accumulation.splitting
        if splitting is not None and splitting.largest is not None and splitting.plan is not None:
            self._largest = max(splitting.largest, self._largest or 0)
            self._is_limited |= len(splitting.plan.pieces) > 1

    def _measure(self, strategy: Engine, optimizer: Optimizer) -> None:
        """Estimate S and |G|^2 from the window that has just ended. On all ranks together."""
        accumulation, watch = self._accumulation, self._watch
        assert accumulation is not None
        assert watch is not None
        if watch.has_parts:
            accumulation.warn_once(
                "GradientNoiseScale cannot measure a window in which a gradient comes in several parts, as with reentrant"
                " checkpointing of modules that share a parameter: use checkpoint(..., use_reentrant=False)."
            )
        if accumulation.plan is not None and accumulation.plan.order is not None:
            accumulation.warn_once(
                "GradientNoiseScale takes micro-batches for random parts of the data, but these are sorted by length: where"
                " gradients depend on it, noise is over-estimated. GradientAccumulation(trim_padding=False) does not sort."
            )
        window, ranks, closed = accumulation.window, accumulation.ranks, accumulation.closed
        assert closed is not None
        scale = strategy.loss_scale()
        whole, shards = squared_norm_of_gradients(parameters_of(optimizer), window.device, window.dtype)
        own = totals(self._micro_batches, scale, accumulation.sums is None, window.device, window.dtype)
        if watch.has_parts and self._micro_batches:
            own[0] = math.nan
        over_ranks = torch.cat((own, shards.reshape(1)))
        if ranks.size > 1:
            dist.all_reduce(over_ranks, group=ranks.group)
        squares, weight, counted, as_counted, samples, sums, shards = over_ranks.unbind()
        squares = squares * closed.slope**2  # a micro-batch gives the gradient of its mean, where the loss is a function of that
        gradient = whole + shards
        if getattr(optimizer, "_step_supports_amp_scaling", False):  # it unscales by itself, when it steps
            gradient = gradient / scale**2
        gradient = torch.where(sums > 0, gradient / weight**2, gradient)
        variance, gradient = variance_and_gradient(squares, gradient, weight, counted)
        # a window that was resumed in its middle is known in part
        whole = torch.where(sums > 0, closed.micro_batches, closed.weight)
        is_whole = (as_counted - whole).abs() <= 1e-5 * as_counted
        self._noise.add(variance, gradient, weight, samples, is_whole & (counted > 1))

    def _show(self, trainer: pl.Trainer) -> None:
        shown = self._noise.shown()
        trainer_state.window_metrics(trainer).update(shown)
        if trainer.loggers and trainer_state.is_logging_due(trainer):
            numbers = {name: value.item() for name, value in shown.items()}
            trainer_state.log_metrics(trainer, {name: value for name, value in numbers.items() if math.isfinite(value)})

    # --- after training -----------------------------------------------------------------------------------------------

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        accumulation, estimate = self._accumulation, self.estimate
        if accumulation is None:
            return
        if estimate is None:
            accumulation.warn_once(
                "GradientNoiseScale has no estimate: it takes two windows of two micro-batches or more, all with a weight and with"
                f" finite gradients. {_ONE_MICRO_BATCH}"
            )
            return
        policy, is_cross_entropy = accumulation.policy, (accumulation.weigher.criterion or "").startswith("cross entropy")
        are_tokens = isinstance(policy.weight, TokenCount) or isinstance(policy.window, Tokens)
        are_tokens |= policy.weight == "auto" and is_cross_entropy and estimate.weight_per_sample > 1
        rank_zero_info(report(estimate, are_tokens, self._largest, self._is_limited))

    @override
    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._let_go()

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._let_go()

    def _let_go(self) -> None:
        if self._accumulation is not None:
            self._accumulation.observer = None
        if self._watch is not None:
            self._watch.close()
        self._accumulation, self._watch, self._micro_batches, self._optimizers = None, None, [], []

    @override
    def state_dict(self) -> dict[str, Any]:
        return {"windows": self._windows, **self._noise.state_dict()}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._windows = state_dict["windows"]
        self._noise.load_state_dict(state_dict)


_ONE_MICRO_BATCH = (
    "A window of one micro-batch has nothing to be compared with: take several loader batches together,"
    " GradientAccumulation(4), or split each, GradientAccumulation(micro_batch=...)."
)
