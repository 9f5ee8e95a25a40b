"""GradientAccumulation: the policy and the metrics of a training."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Literal

import torch
from typing_extensions import override

from lightning_accum.boundary import SchedulerCounts, Tail
from lightning_accum.checkpoint import check_format
from lightning_accum.exact import exact_dtype, tensor_of
from lightning_accum.exclusions import Asked, refuse
from lightning_accum.policy import MicroBatchSize, OnNonfinite, Policy, Split, Tokens, WindowSize, checked_policy, row_wise_fields
from lightning_accum.trainer.engine import Engine
from lightning_accum.trainer.from_lightning import MisconfiguredError, SIGTERMException, callbacks_of, misconfigured, pl
from lightning_accum.trainer.package import check_package
from lightning_accum.weighing.counts import Weight
from lightning_accum.windows import Windows


class GradientAccumulation(pl.Callback):
    """Accumulate gradients over windows, so that each window takes the step of one batch.

    A micro-batch with mean loss l and weight n (the tokens, samples or elements that the mean was taken over) contributes the
    gradient of ``n * l``; at the end of a window the gradients are divided once by the sum of all n, over the ranks too. fairseq
    and Megatron-LM normalise like this.

    There are two ways to use it, which can be combined. ``window`` takes several loader batches together. ``micro_batch`` splits
    each loader batch: the loader yields your effective batch, and the package runs as much of it at a time as fits. Batch
    indices, validation intervals, the progress bar and schedulers then count optimizer steps without further settings.

    Needs one of this package's strategies: ``Trainer(strategy="accum")`` on one device; ``"accum_ddp"`` on several, or
    ``"accum_fsdp"`` and ``"accum_model_parallel"`` for sharded modules. They work without this callback too, with its defaults.

    It logs once an optimizer step: ``window/loss`` (the loss of the full batch), ``window/weight`` and ``window/total_weight`` (in
    tokens, for a language model; 1 a window for a loss that is a sum), ``window/micro_batches``, ``window/optimizer_steps``,
    ``window/weight_per_second``, ``window/grad_norm`` if the Trainer clips by norm, ``window/micro_batch_size`` if it is searched
    for, ``window/skipped_micro_batches`` and ``window/total_skipped_micro_batches`` if micro-batches that are not finite are
    skipped, and ``window/loss_epoch`` at the end of an epoch.

    After each optimizer step ``on_window_end(trainer, pl_module, window)`` of callbacks and ``on_window_end(window)`` of the module
    are called, if defined. ``window`` has ``loss``, ``weight``, ``micro_batches``, ``loader_batches``, ``gradient_norm`` and
    ``has_stepped``.

    Args:
        window: loader batches in a window, on every rank. An int; a mapping ``{epoch: n}`` from the first epoch (from 0) of n; a
            function ``f(optimizer steps so far) -> n``; None for the Trainer's ``accumulate_grad_batches``. Or :class:`Tokens`: a
            window ends with the loader batch in which the weights of all ranks reach this count. A window keeps its initial size.
        micro_batch: the size of the micro-batches that each loader batch is split into: a number of samples; :class:`Tokens`,
            padding included; ``"auto"``, as large as memory allows, found by trial; None for the loader's batch as it is.
            ``training_step`` runs once for each micro-batch, and its logs and outputs are combined as for the whole batch.
            Or ``"offload"``: the loader's batch runs whole, and tensors that autograd saves wait in host memory, which is exact for
            any module (BatchNorm, manual optimization) and any loss. A CPU has no second memory.
        row_wise: the name of a submodule of the module (``"encoder"``, ``"model.vision"``), or several. ``training_step`` then runs
            once, on the loader's batch, and calls of these submodules run in micro-batches of ``micro_batch`` rows or
            :class:`Tokens`, again in the backward (gradient caching, arXiv 2101.06983). Any loss is exact: contrastive losses,
            losses of pairs or of batch statistics. The outputs for one row must not depend on other rows, which is checked before
            the first step. Over ranks ``training_step`` has to gather the outputs itself, by ``self.all_gather(...,
            sync_grads=True)``. Submodules may be sharded with ``fully_shard``, not with FSDP1.
        weight: the weight of a micro-batch: the denominator of its mean loss. ``"auto"`` reads it from the loss;
            :class:`TokenCount`, :class:`SampleCount` or a callable of the batch count it, for losses that hide it; ``"equal"`` is
            the classic mean of the micro-batches' means. For a loss of several terms with different counts, a list with one of
            those for each term, in their order: the loader batches of a window are then counted before the first of them runs.
        tail: what the end of an epoch, or an early stop, does to an unfinished window. ``"step"``: an exact optimizer step on its
            batches. ``"drop"``: its gradients are dropped. ``"carry"``: the window continues in the next epoch.
        scheduler_counts: what the ``frequency`` of a scheduler with ``interval="step"`` counts: ``"optimizer_steps"`` that
            happened, or ``"micro_batches"`` (their loader batches), for a schedule written for training without accumulation.
        accumulate_dtype: the type in which gradients are added up, reduced over ranks and normalised, if it is wider than the type
            of a parameter: ``torch.float32`` under ``precision="bf16-true"``. They are rounded once, at the end of a window; inside
            it ``parameter.grad`` is None between the micro-batches. FSDP2 accumulates in the ``reduce_dtype`` of ``fully_shard``;
            this argument checks that the two agree.
        on_nonfinite: what to do with a micro-batch whose loss or gradient is not finite. ``"propagate"``: nothing, it reaches the
            parameters. ``"skip"``: the rank leaves it out, as if it had not been there. ``"raise"``: a FloatingPointError before
            any optimizer step, which names the batch, the rank, and the loss or the first such parameter. Both wait for the device
            once a micro-batch and reduce gradients after the last of the window. With a GradScaler only the loss is examined.
        trim_padding: whether to sort the rows of a split batch by length and to trim each micro-batch to its longest row.
            Lengths are read from an attention mask, or from labels of -100 at the end of rows whose inputs repeat one value; or
            from the mask or the lengths under a key that is given instead of True (``"lengths"`` for all keys that end so). It is
            checked on two rows first, and not used if the loss depends on padding.
        split: a function ``split(batch, size)`` that returns the micro-batches as a list, for batches that are not nested
            containers of tensors with one entry for each sample; ``split_lists`` for lists of images and targets.
        check: whether to check, on up to 8 rows of the first batch, that the weighted losses and gradients of parts add up to those
            of the whole. It runs ``training_step`` about 20 times, with dropout off, and restores everything. If they do not add up
            there is an error before the first step.
        log: whether to log the metrics above, and to show the loss and the number of steps in the progress bar (``w_loss``,
            ``w_steps``).
        validate_every: validate after every so many optimizer steps of ``trainer.global_step``, counted over all epochs, and at no
            other time. None: the Trainer's ``val_check_interval`` and ``check_val_every_n_epoch`` decide.

    Raises:
        MisconfigurationException: an argument is out of its range; or, before training starts, the Trainer's strategy is not one of
            this package, its ``accumulate_grad_batches`` contradicts ``window``, or the Trainer, too, says when to validate.

    Example:
        >>> from lightning.pytorch import Trainer
        >>> trainer = Trainer(accelerator="cpu", strategy="accum", callbacks=[GradientAccumulation(8)], logger=False)
        >>> split = GradientAccumulation(micro_batch=Tokens(8_192))
        >>> trainer = Trainer(accelerator="cpu", strategy="accum", callbacks=[split], logger=False)
    """

    def __init__(
        self,
        window: WindowSize = None,
        *,
        micro_batch: MicroBatchSize | Literal["offload"] | None = None,
        row_wise: str | Sequence[str] | None = None,
        weight: Literal["auto", "equal"] | Weight | Sequence[Weight] = "auto",
        tail: Tail = "step",
        scheduler_counts: SchedulerCounts = "optimizer_steps",
        accumulate_dtype: torch.dtype | None = None,
        on_nonfinite: OnNonfinite = "propagate",
        trim_padding: bool | str = True,
        split: Split | None = None,
        check: bool = True,
        log: bool = True,
        validate_every: int | None = None,
    ) -> None:
        with misconfigured():
            self.policy = checked_policy(
                Policy(
                    window,
                    weight,  # type: ignore[arg-type]  # a sequence becomes a tuple
                    tail,
                    scheduler_counts,
                    log,
                    None if row_wise is not None or micro_batch == "offload" else micro_batch,
                    split,
                    trim_padding,
                    accumulate_dtype,
                    on_nonfinite,
                    check,
                    offload=micro_batch == "offload",
                    validate_every=validate_every,
                    **row_wise_fields(row_wise, micro_batch),
                )
            )
            refuse(Asked(self.policy))
        self._strategy: Engine | None = None  # during a fit with windows
        self._state: dict[str, Any] = {}  # of a checkpoint, until its windows begin; and after a fit
        self._may_gather = False

    @override
    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        if stage != "fit":
            return
        check_package(trainer)
        self._strategy, self._state = None, {}  # from an earlier fit, or a checkpoint that was validated
        if not isinstance(trainer.strategy, Engine):
            raise MisconfiguredError(
                f"GradientAccumulation needs a strategy of lightning_accum, but the Trainer has {type(trainer.strategy).__name__}. "
                'Use Trainer(strategy="accum") on one device, "accum_ddp" on several, "accum_fsdp" or "accum_model_parallel" for '
                "sharded modules; or leave this callback out: DeepSpeed and XLA are not supported."
            )
        if (number := sum(isinstance(callback, GradientAccumulation) for callback in callbacks_of(trainer))) > 1:
            raise MisconfiguredError(f"There are {number} GradientAccumulation callbacks, also of configure_callbacks: pass one.")
        size = 1 if isinstance(self.policy.window, Tokens) else self.policy.size_at(trainer.current_epoch, trainer.global_step)
        if size is None:
            return
        if trainer.accumulate_grad_batches not in (1, size):
            both = f"accumulate_grad_batches={trainer.accumulate_grad_batches} and GradientAccumulation({self.policy.window!r})"
            raise MisconfiguredError(f"{both} both set the window. Use only one of them.")
        trainer.accumulate_grad_batches = size  # for tuners, monitors and Lightning itself, until the fit ends

    def connect(self, strategy: Engine) -> None:
        """Connect to the strategy's windows. Called by the strategy."""
        self._strategy, self._may_gather = strategy, True
        if self._state:
            check_format(self._state)

    def take_state(self) -> dict[str, Any]:
        """Hand the state of a checkpoint to the windows, which begin with it; empty without one. Called by the strategy."""
        state, self._state = self._state, {}
        return state

    @property
    def _windows(self) -> Windows | None:
        return None if self._strategy is None else self._strategy.windows

    @override
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        windows = self._windows
        if windows is not None and self.policy.log and (mean := windows.epoch_loss.take_mean()) is not None:
            value = tensor_of(mean, device := windows.ranks.device, exact_dtype(device))
            if not trainer.barebones:
                pl_module.log("window/loss_epoch", value, batch_size=1, sync_dist=True)

    @override
    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        # other callbacks may take a checkpoint now, on this rank alone unless all got SIGTERM
        self._may_gather = trainer.world_size == 1 or isinstance(exception, SIGTERMException)

    def disconnect(self) -> None:
        """End a fit, or a failed one: keep only its state for a checkpoint. Called by the strategy."""
        with suppress(RuntimeError):  # raised by a failed device
            self._state = self._counts()
        self._strategy = None

    def __getstate__(self) -> dict[str, Any]:
        """The state of a copy, which is in no fit."""
        return {**vars(self), "_strategy": None, "_state": self._counts()}

    @override
    def state_dict(self) -> dict[str, Any]:
        state, strategy, windows = self._counts(), self._strategy, self._windows
        if strategy is None or windows is None or not self._may_gather:
            return state
        if strategy.watch.is_before_step:
            windows.warn_once(
                "This checkpoint is taken before the optimizer step of a window that has ended, and lacks its gradients: a resume "
                "leaves this step out. Take it after the step, in on_train_batch_end."
            )
        partial = windows.partial_window(strategy, strategy.trainer().accumulate_grad_batches)
        return state if partial is None else {**state, "window": partial.state_dict()}

    def _counts(self) -> dict[str, Any]:
        """The state for a checkpoint, without the gradients of an unfinished window."""
        return self._state if self._state or self._windows is None else self._windows.state_dict()

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._state = state_dict
