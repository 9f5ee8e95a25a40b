"""Lightning's methods that are replaced or relied on, and what is read of its objects."""

from __future__ import annotations

from lightning_accum.seams.seam import table

READ = "Lightning 2.6.0 to 2.6.6"
"""The versions that fingerprints are of."""

# An owner, and below it in each line a name, what stands in for it here, why, and the fingerprints of what was read.
LIGHTNING = table(
    "lightning.pytorch.",
    """
trainer.trainer.Trainer
    _data_connector _logger_connector _signal_connector | specialised | have other classes during a fit | -
    _run | - | connects the strategy, sets it up, trains, takes it down, in this order | 4156b686
    _teardown | - | ends the fit, also one that failed | c4b98fdd
    callback_metrics | AccumulatingTrainer | has the last window's metrics | dfe7727b
    logged_metrics | AccumulatingTrainer | has the last window's metrics | ca73e550
    training | AccumulatingTrainer | is asked 13 times a loader batch | cddd33f0
    estimated_stepping_batches | AccumulatingTrainer | is the number of windows | 781d79c6
trainer.call
    _call_and_handle_interrupt | - | launches the fit, and tears it down where it failed | bdd3ea3c
    _call_callback_hooks | - | calls a hook of every callback | b74f68cd
    _call_lightning_module_hook | - | calls a hook of the module, once, and returns what it returned | 71767112
    _call_strategy_hook | - | calls a hook of the strategy, once, and returns what it returned | 967314ae
strategies.strategy.Strategy
    _launcher | naming_launcher | starts the processes of the ranks | -
    _lightning_optimizers | - | the optimizers that the module sees | -
    connect | AccumulationMixin | the fit begins: the loops are specialised | 1e0e2ace
    _configure_launcher | AccumulationMixin | refuses notebooks where they cannot work | 68f0f086
    launcher | AccumulationMixin | all ranks raise what the first failed with | af63ddd0
    setup_environment | AccumulationMixin | the ranks are known | 6756a146
    setup | AccumulationMixin | accumulation begins | 52a40677
    on_train_start | AccumulationMixin | goes on inside the window of a checkpoint | 2f4bff3a
    teardown | AccumulationMixin | the fit ends | 99b4981d
    __getstate__ | AccumulationMixin | a copy is in no fit | cb0f97d9
    batch_to_device | Engine | is left out for a batch that is there | f914efb7
    training_step | - | runs the module's training_step once, and returns what it returned | 022c774d
    post_training_step | - | does nothing | fa7ddeab
    backward | Engine | runs the backward of a micro-batch once, with gradient= | 910f9f26
    optimizer_step | Engine | the window ends before the optimizer's step | f2e3a488
strategies.parallel.ParallelStrategy
    block_backward_sync | DDPAccumulationStrategy, ShardedMixin | reduces once a window | 1aa2cbd7
strategies.ddp.DDPStrategy
    _timeout | - | how long ranks wait for each other | -
    setup | - | wraps the module, and calls Strategy.setup | 86bfe418
    pre_backward | - | prepares DistributedDataParallel's reduction | b2401dc8
    post_backward | DDPAccumulationStrategy | reduces what manual optimization delayed | 46a7c777
    optimizer_step | - | calls Strategy.optimizer_step | 4760d0d5
strategies.model_parallel.ModelParallelStrategy
    _data_parallel_size _tensor_parallel_size _device_mesh | NamedMeshStrategy | are those of mesh= | -
    setup_environment | NamedMeshStrategy | makes the mesh of mesh= | da2b608a
    distributed_sampler_kwargs | NamedMeshStrategy | ranks that have parts of the same rows get the same | d29a04ee
strategies.launchers.multiprocessing._MultiProcessingLauncher
    launch | _launch | starts the processes of the ranks | 58936217
strategies.launchers.subprocess_script._SubprocessScriptLauncher
    launch | _launch | starts the processes of the ranks | 6a74faa8
loops.fit_loop._FitLoop
    _combined_loader _data_fetcher | - | the loaders, and what draws from them | -
    _last_train_dl_reload_epoch | - | when the loaders were made | -
    setup_data | AccumulatingFitLoop | ranks of different lengths end together | f0180ab3 f09c9a94
    reset | AccumulatingFitLoop | a checkpoint of an epoch's end begins the next | 75843e08
    run | - | sets up the data, trains epoch by epoch, ends the run | e4c8eaeb
    on_run_start | - | calls the hooks on_train_start | 993d7d3c
    advance | - | runs the epoch loop | 289c0111
    on_save_checkpoint | AccumulatingFitLoop | loaders are where training is, not where it has drawn ahead to | 3266f8a1
    on_run_end | AccumulatingFitLoop | the last window ends with the training | b5d1b621
    _should_accumulate | - | asks the epoch loop whether a loader batch ends its window | 76e16d73
loops.training_epoch_loop._TrainingEpochLoop
    _results | BatchResults | what was logged | -
    _batches_that_stepped | - | the step that loggers get | -
    done | AccumulatingEpochLoop | a window that was counted before it ran is not left inside | 20215631
    run | AccumulatingEpochLoop | an unfinished window ends with its epoch | ad885a6e
    on_run_start | AccumulatingEpochLoop | a checkpoint of an epoch's end begins the next | 085e5587
    reset | - | where the epoch goes on | dbe637c4
    advance | AccumulatingEpochLoop | trains on a loader batch | 9b9b8410
    on_advance_end | AccumulatingEpochLoop | validates, steps plateau schedulers, stops at SIGTERM | e66f9489
    _broadcast_sigterm_tensor | AccumulatingEpochLoop | ranks learn of SIGTERM with the weights | f63f4808
    _build_kwargs | AccumulatingEpochLoop | the signature of training_step is inspected once | 909b6965
    _num_ready_batches_reached | - | a loader batch is the last of its epoch | 20f625b9
    _should_accumulate | AccumulatingEpochLoop | a window ends where the boundary says | 75952ac1
    _should_check_val_fx | ValidatingEpochLoop | validation may count optimizer steps | 0ae30d22
    on_save_checkpoint | ValidatingEpochLoop | validation goes on counting them | 18155a51
    on_load_checkpoint | ValidatingEpochLoop | validation goes on counting them | af6d3a59
    _should_check_val_epoch | AccumulatingEpochLoop | looks for validation once an epoch | 91a9a650
    update_lr_schedulers | AccumulatingEpochLoop | called twice a loader batch, the last time when it is over | 3d41394b
    _update_learning_rates | AccumulatingEpochLoop | schedulers step when their clock says | 27370be6
loops.optimization.automatic._AutomaticOptimization
    _skip_backward | - | the last training_step returned None | -
    run | WindowOptimization | runs a loader batch, and steps at a boundary | 4097f294
    _on_before_zero_grad | - | calls the hooks before | 041f75f4
    _optimizer_zero_grad | - | clears the gradients | 213c7f67
loops.optimization.closure.AbstractClosure
    _result | - | what the closure returned | -
    __call__ | WindowClosure | runs a loader batch, whole or in micro-batches | c8773f8b
    closure | WindowClosure | does so too | 5b5cc404
    consume_result | - | takes what the closure left in _result | 2d4e7d75
loops.optimization.automatic.ClosureResult
    __post_init__ | - | keeps the loss to be shown | 7c5c55a5
    from_training_step_output | - | takes the loss out of what training_step returned | c01d3519
    asdict | - | what on_train_batch_end gets | 7547fd28
loops.optimization.manual._ManualOptimization
    run | WindowManualOptimization | a loader batch begins and ends, and a window with it | bde82f8c
    advance | - | runs training_step once | 5ae27545
    on_run_end | - | takes back what it put into the optimizers | ce3ea3a5
    _on_before_step | WindowManualOptimization | counts the steps that do not wait | 158c1bd3
    _on_after_step | WindowManualOptimization | counts the steps that do not wait | 44da92f0
loops.optimization.manual.ManualResult
    from_training_step_output | - | what on_train_batch_end gets | 82da99e5
loops.utilities
    _block_parallel_sync_behavior | - | enters block_backward_sync, for toggled optimizers too | 094165ef
loops.fetchers._PrefetchDataFetcher
    __iter__ | UnevenDataFetcher, AheadFetcher | ranks of different lengths end together; windows are drawn ahead | 46027b64
    __next__ | UnevenDataFetcher, AheadFetcher | ranks of different lengths end together; windows are drawn ahead | 7dee5f74
loops.fetchers._DataFetcher
    teardown | UnevenDataFetcher | forgets the last batch | 14cb701a
utilities.combined_loader.CombinedLoader
    _state_dicts | - | what a checkpoint holds of the loaders | 2032a772
trainer.connectors.data_connector._DataConnector
    _prepare_dataloader | NonPaddingSampling | deals SameOrderSampler and BalancedBatchSampler to the ranks | 7ca31a88
    _resolve_sampler | NonPaddingSampling | Lightning's own sampler repeats no samples | 53f73aba
trainer.connectors.logger_connector.logger_connector._LoggerConnector
    _current_fx | - | the hook that logged last | -
    _callback_metrics _logged_metrics | - | what was logged last | -
    _first_loop_iter | - | no loader batch of the epoch has ended, or only the first | -
    on_batch_start | - | a loader batch begins | 7758d5bf
    on_batch_end | - | a loader batch ends | 328cf288
    should_update_logs | WindowRows | loggers get metrics at this step, or at one of its loader batch | a446a83e
    should_reset_tensors | - | compares _current_fx | b5b2448f
    log_metrics | WindowRows | a window's metrics are in the row of its step | e81ba200
    update_train_step_metrics | WindowRows | a window's metrics are in the row of its step | 577833c6
trainer.connectors.logger_connector.result._ResultCollection
    update_metrics | BatchResults | what a shadow batch logs has no weight | 0120c270
trainer.connectors.logger_connector.result._ResultMetric
    update | - | reads a metric's _forward_cache | 3ee4c0f0
trainer.connectors.signal_connector._SignalConnector
    register_signal_handlers | DeferredSigterm | Lightning takes over SIGTERM | 9b086123
    _sigterm_notifier_fn | DeferredSigterm | SIGTERM waits until all ranks know | b1525db4
plugins.precision.precision.Precision
    pre_backward | - | returns the loss, scaled where there is a GradScaler | 1ca40e35
    backward | - | calls the module's backward, with gradient= | d82f461a
    post_backward | - | calls the hooks after | 7282ba6b
    train_step_context | - | is the context of training_step: nothing, or autocast | f477fb2a
    optimizer_step | - | calls the optimizer's step with the closure | a9aa8b03
    _wrap_closure | - | runs the closure, then _after_closure | 776a039b
    _after_closure | - | calls on_before_optimizer_step, and clips | 99c4eda0
    _clip_gradients | - | calls configure_gradient_clipping | 5984b808
    clip_gradients | - | clips where the Trainer was asked to | 3b57638f
    clip_grad_by_norm | noting_gradient_norm | its norm is shown | 67e0f6be
plugins.precision.amp.MixedPrecision
    pre_backward | - | scales the loss | 672be8f5
    optimizer_step | - | runs the closure, unscales, steps unless a gradient overflowed | fcca8f8e
core.optimizer.LightningOptimizer
    _optimizer | - | torch's | -
    step | - | calls the strategy's optimizer_step | 6047b6f4
core.module.LightningModule
    _device_mesh | - | what it sees as its device_mesh | -
    _compiler_ctx | - | the module is compiled | -
    _current_fx_name | - | the hook that logs | -
    _on_before_batch_transfer | - | calls the hook of a batch that is to be transferred | f863cd7b
    _trainer | - | the Trainer that a module is attached to | -
    backward | - | calls the loss's backward, with gradient= | a2e90fe7
    manual_backward | - | calls the strategy's backward | 424b5073
    optimizer_step | - | calls the optimizer's step with the closure | 235652a3
    optimizer_zero_grad | - | calls the optimizer's zero_grad | 38492e78
    configure_gradient_clipping | - | calls clip_gradients | 9c6cad26
    clip_gradients | - | clips where the Trainer was asked to | a53993a4
    lr_scheduler_step | - | steps a scheduler once | 0ae03eb1
    log | collecting_logs | what micro-batches log is put together | 74202ade
callbacks.model_checkpoint.ModelCheckpoint
    _every_n_train_steps | - | optimizer steps from one checkpoint to the next | -
trainer.setup
    _val_check_time_interval | - | validation by the clock, of a Trainer | -
loops.loop._Loop
    _restarting | - | a checkpoint was loaded | -
    _resuming_from_checkpoint | - | a checkpoint was loaded | -
core.mixins.hparams_mixin.HyperparametersMixin
    _hparams | - | what a module was made with | -
strategies.single_device.SingleDeviceStrategy
    _root_device | - | where the module is | -
strategies.launchers.launcher
    _Launcher | - | is the base of all launchers | -
trainer.connectors.accelerator_connector
    _IS_INTERACTIVE | - | it runs in a notebook | -
""",
)
