"""The checks of the first batches of a fit: run ``training_step`` on other batches and on rows of the dataset, without logs."""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext, suppress
from copy import copy, deepcopy
from dataclasses import replace
from functools import partial
from time import monotonic
from typing import Any, cast

import torch
from torch import Tensor
from torch.utils._pytree import tree_map
from torch.utils.data import DataLoader, Dataset, default_collate
from typing_extensions import override

from lightning_accum import check
from lightning_accum.errors import DoesNotAddUpError
from lightning_accum.exact import exact_dtype
from lightning_accum.later_terms import check_loader_batch
from lightning_accum.looks import Checked, Rows, agree_on_rows
from lightning_accum.manual_calls import TriedStep
from lightning_accum.parameter_changes import elements_of
from lightning_accum.splitting.few_rows import FewRows, SplitRows
from lightning_accum.sync.base import gradients_set_aside
from lightning_accum.trainer.deferred_steps import groups_kept
from lightning_accum.trainer.engine import Engine
from lightning_accum.trainer.from_lightning import ClosureResult, call, is_lightnings, longest_window, pl, rank_zero_info
from lightning_accum.trainer.manual import ManualWindows
from lightning_accum.trainer.results import logging_nothing
from lightning_accum.trial import users_code
from lightning_accum.trial_mode import is_narrow
from lightning_accum.undo import Undo, replacing
from lightning_accum.user_warnings import rank_zero_warn
from lightning_accum.verdict import MOST_ROWS, CannotCheckError, UnsuitableRowsError
from lightning_accum.weighing import advice
from lightning_accum.whole.row_proof import prove_row_wise


def unlogged_step(trainer: pl.Trainer, ahead: int = 0, is_begun: bool = True) -> Callable[[Any], Any]:
    """Run ``training_step`` on a batch without logs, as the loader batch ``ahead`` of the current one.

    Unless the loader batch ``is_begun``, the module's own ``on_train_batch_start`` runs before it, which may leave something of the
    batch, and those of copies of callbacks that change it. In a wider copy of the module it runs in full precision, which minimises
    rounding and hardly changes the loss.
    """
    strategy, precision, others = cast("Engine", trainer.strategy), trainer.precision_plugin, _others(trainer, ahead)
    callbacks = strategy.changing_callbacks()

    def training_step(batch: Any) -> Any:
        dtype = exact_dtype(strategy.root_device) if isinstance(precision, pl.plugins.MixedPrecision) else torch.float32
        is_narrower = any(is_narrow(parameter, dtype) for parameter in strategy.module.parameters())
        keeps_type = is_narrower or not isinstance(precision, (pl.plugins.MixedPrecision, pl.plugins.HalfPrecision))
        context = precision.train_step_context() if keeps_type else nullcontext()
        if not is_begun and (callbacks or not is_lightnings(strategy.module, "on_train_batch_start")):
            with torch.enable_grad(), logging_nothing(trainer), _rates_kept(strategy):
                number = trainer.fit_loop.epoch_loop.batch_idx + ahead
                for own in callbacks:
                    deepcopy(own, {id(trainer): trainer}).on_train_batch_start(trainer, strategy.module, batch, number)
                call._call_lightning_module_hook(trainer, "on_train_batch_start", batch, number)
        with torch.enable_grad(), context, logging_nothing(trainer):
            output = strategy.run_as_engine(partial(call._call_lightning_module_hook, trainer, "training_step"), batch, *others)
            if strategy.module.automatic_optimization and not is_lightnings(strategy.module, "on_before_backward"):
                call._call_lightning_module_hook(trainer, "on_before_backward", result_of(output).closure_loss)  # it may add hooks
            return output

    return training_step


def _rates_kept(strategy: Engine) -> AbstractContextManager[None]:
    """Restores what a hook changes in optimizers and schedulers, which belong to no batch that is tried out."""
    return groups_kept(strategy.optimizers, [config.scheduler for config in strategy.lr_scheduler_configs])


def loss_unlogged(trainer: pl.Trainer, batch: Any, ahead: int = 0) -> Tensor | None:
    """The loss of a batch without training, as the loader batch ``ahead`` of the current one."""
    with torch.enable_grad(), trainer.precision_plugin.train_step_context(), logging_nothing(trainer):
        return result_of(call._call_lightning_module_hook(trainer, "training_step", batch, *_others(trainer, ahead))).closure_loss


def _others(trainer: pl.Trainer, ahead: int = 0) -> list[Any]:
    """The arguments of ``training_step`` after the batch, for the loader batch ``ahead`` of the current one."""
    epoch_loop = trainer.fit_loop.epoch_loop
    return [*epoch_loop._build_kwargs(OrderedDict(), None, epoch_loop.batch_idx + ahead).values()][1:]


def result_of(output: Any) -> ClosureResult:
    """The output of training_step, with the loss unchanged."""
    if isinstance(output, Tensor):
        return ClosureResult(output)
    result = ClosureResult.from_training_step_output(output)
    if isinstance(output, Mapping):
        result.closure_loss = output["loss"]  # without a division by 1
    return result


def try_out(trainer: pl.Trainer, strategy: Engine, batches: Sequence[Any]) -> None:
    """Check the loader batch and row-wise submodules, while this is due. Called on all ranks; a rank may have no batch."""
    accumulation, row_wise = strategy.accumulation, strategy.row_wise
    assert accumulation is not None
    is_again = accumulation.take_look()
    if not (is_again or accumulation.check.batches_left or row_wise is not None):
        return
    is_long = accumulation.policy.may_be_longer_than_one(longest_window(trainer))
    are_several = is_long or accumulation.world_size > 1
    samples, step = strategy.samples_of_loader(), unlogged_step(trainer, is_begun=not are_several)
    if row_wise is not None and row_wise.proofs_left:
        prove_row_wise(strategy, row_wise, step, batches, samples, rank_zero_warn, accumulation.position)
    if not (is_again or accumulation.check.batches_left):
        return
    # batches that training_step draws cannot be put back
    may_draw = not is_long or accumulation.rest_of_window is not None
    may_count = may_draw and not strategy.snapshotter.iterators() and strategy.policy.may_count_first(is_long)
    later = unlogged_step(trainer, _far_ahead(trainer), not are_several)

    def after(batch: Any) -> Any:
        """The step of a later loader batch, and of a full batch: a loss may be divided by these numbers of the Trainer."""
        number = trainer.num_training_batches / trainer.accumulate_grad_batches
        with replacing(trainer, accumulate_grad_batches=1), replacing(trainer.fit_loop, max_batches=number):
            return later(batch)

    of_dataset = partial(DatasetRows, trainer)
    checked = Checked(strategy, step, accumulation, samples, is_long, rank_zero_info, may_count, False, after, of_dataset)
    check_loader_batch(checked, next(iter(batches), None), partial(transferred, trainer), is_again)
    if accumulation.closed is None and not accumulation.position:
        with suppress(CannotCheckError):
            _try_hooks(checked, trainer, batches)
        with suppress(CannotCheckError):
            is_due = are_several and accumulation.check.is_checked and checked.on_any(_are_made(trainer))
            if is_due and not check.does_dataset_add_up(checked, batches):
                accumulation.warn_once(advice.OF_MADE_BATCHES)


def _are_made(trainer: pl.Trainer) -> bool:
    """Whether the user's code makes batches of samples, or changes batches on their way to the device."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]  # set by a connector
    owners = [(trainer.lightning_module, pl.LightningModule), *([] if data is None else [(data, pl.LightningDataModule)])]
    hooks = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")
    collate = getattr(trainer.train_dataloader, "collate_fn", default_collate)
    return collate is not default_collate or not all(is_lightnings(owner, hook, kind) for owner, kind in owners for hook in hooks)


def _far_ahead(trainer: pl.Trainer) -> int:
    """The way to a ``batch_idx`` late in the epoch, an odd number: a loss may compare it with a number."""
    left = trainer.num_training_batches - 1 - trainer.fit_loop.epoch_loop.batch_idx
    return max(1, int(left) - (int(left) + 1) % 2) if math.isfinite(left) else 1


def _try_hooks(checked: Checked, trainer: pl.Trainer, batches: Sequence[Any]) -> None:
    """Raise, on all ranks, if the module's own hooks of a step change state by what only the last of two micro-batches left."""
    names = ["on_before_optimizer_step", "configure_gradient_clipping", "optimizer_step"]
    names += [] if checked.is_window_long else ["on_train_batch_end", "on_train_batch_start"]  # called inside of windows, too
    own = [name for name in names if not is_lightnings(trainer.lightning_module, name)]
    if not own or checked.sync.is_waited_for_in_forward:
        return
    module, optimizer, parameters = checked.module, checked.trained.optimizers[0], checked.trained.parameters()
    whole, *in_two = _in_two(agree_on_rows(checked, batches))
    run, index = partial(call._call_lightning_module_hook, trainer), trainer.fit_loop.epoch_loop.batch_idx
    how = {name: getattr(trainer, name) for name in ("gradient_clip_val", "gradient_clip_algorithm")}
    given: list[list[Any]] = [[optimizer], [optimizer], [trainer.current_epoch, index, optimizer, lambda: None]]
    given += [[{"loss": torch.ones(())}, whole[0](), index], [whole[0](), index]]
    trial, tried, losses = checked.trial(), list[TriedStep](), list[tuple[Tensor, Tensor]]()

    def state() -> list[Tensor]:
        return [elements_of(held) for held in (*module.buffers(), *module.parameters()) if not held.requires_grad]

    def next_loss() -> Tensor:
        with checked.trained.snapshotter.take(watches_parameters=False):
            trial.leave(has_parameters=True)
            return trial.step(whole[0]()).detach()

    def step(micro_batches: Sequence[Callable[[], Any]]) -> None:
        """Note the gradients after the hooks, which get the gradients of the first step, and what else the hooks change."""
        loss = [trial.step(micro_batch()) for micro_batch in micro_batches][-1]
        tried.append(TriedStep(tried[0].gradients if tried else ()))
        before, loss_before, rates = state(), next_loss(), _rates_kept(cast("Engine", trainer.strategy))
        noted = replacing(optimizer, step=lambda *_, **__: tried[-1].step(optimizer))
        with users_code(), trial.mode, gradients_set_aside(parameters), logging_nothing(trainer), rates, noted:
            tried[-1].backward(loss, [parameter for parameter in parameters if parameter.requires_grad])
            for name, arguments in zip(names, given, strict=False):
                if name in (*own, "optimizer_step"):
                    run(name, *arguments, **(how if name == "configure_gradient_clipping" else {}))
        changed = {n: now for n, (then, now) in enumerate(zip(before, state(), strict=True)) if not now.equal(then)}
        losses.append((loss_before, next_loss()))
        is_same = abs(loss_before - losses[0][0]) <= trial.tolerance * abs(loss_before)  # else training_step itself changes it
        tried[-1].stepped += [{0: losses[-1 if is_same else 0][1]}, changed]

    with trial.held():
        for micro_batches in (whole, whole, *in_two):
            if len(tried) == 4 and not checked.on_any(bool(tried[0].stepped[-1]) or not losses[0][0].equal(losses[0][1])):
                break  # single rows show a difference whose sign is used
            trial.restore()
            trial.together(partial(step, micro_batches))
            of_same, size = (checked.largest(one.difference(tried[0])) for one in (tried[:2][-1], tried[-1]))
            if len(tried) > 2 and of_same <= trial.tolerance < size:
                raise DoesNotAddUpError(advice.of_hooks(own))


def _in_two(rows: Rows) -> list[list[Callable[[], Any]]]:
    """Some rows of a loader batch together; then in two parts, of which the last is each half, and each row."""
    found, every = rows.found, range(min(rows.number, MOST_ROWS))
    if len(every) < 2:
        raise UnsuitableRowsError("the first batch has 1 row")
    if isinstance(found, SplitRows):
        return [[found.whole], found.parts, found.parts[::-1]]
    lasts = [every[(middle := (len(every) + 1) // 2) :], every[:middle], *(every[row : row + 1] for row in every)]
    parts = [([row for row in every if row not in last], last) for last in lasts]
    return [[partial(found.take, own) for own in both] for both in ((every,), *parts)]


def check_manual_batch(trainer: pl.Trainer, strategy: Engine, batches: Sequence[Any]) -> None:
    """:func:`try_out` for manual optimization: checks the loss of each ``manual_backward``. Nothing steps."""
    windows = strategy.manual
    assert windows is not None
    if (not batches and strategy.world_size == 1) or not windows.takes_check():
        return
    is_long, number = windows.policy.may_be_longer_than_one(longest_window(trainer)), 0
    run = unlogged_step(trainer, is_begun=not (is_long or windows.ranks.size > 1))

    def loss_of_call(batch: Any, number: int) -> Tensor:
        with windows.trying_out() as tried:
            run(batch)
        if number < len(tried.losses):
            return tried.losses[number]
        raise UnsuitableRowsError(f"training_step calls self.manual_backward {len(tried.losses)} times for some of the first rows")

    # the start line reports each call
    how: dict[str, Any] = {"samples": strategy.samples_of_loader(), "is_window_long": is_long, "inform": lambda _: None}
    how |= {"is_manual": True, "of_dataset": partial(DatasetRows, trainer)}
    if not windows.are_steps_tried:
        checked = Checked(strategy, run, windows.call(0), **how)
        with suppress(CannotCheckError):
            _try_steps(checked, windows, batches)
            windows.are_steps_tried = True
    while number < windows.ranks.largest(windows.most_tried)[0]:
        accumulation, step = windows.call(number), partial(loss_of_call, number=number)
        if accumulation.check.batches_left:
            check.check_first_batch(Checked(strategy, step, accumulation, **how), next(iter(batches), None))
        number += 1


def _try_steps(checked: Checked, windows: ManualWindows, batches: Sequence[Any]) -> None:
    """Raise, on all ranks, if steps with gradients of more rows than they saw, as on the last micro-batch of a window, are other
    steps, or if a loss depends on an earlier step."""
    tried, losses = list[TriedStep](), list[list[float]]()
    (whole,), (part, *_), *_ = _in_two(agree_on_rows(checked, batches))

    def step(batch: Any) -> Tensor:
        with windows.trying_out(moves=len(tried) == 4, given=tried[0].gradients if tried else ()) as one:
            checked.step(batch)
        losses.append([float(loss.detach()) for loss in one.losses])
        one.losses.clear()
        tried.append(one)
        return torch.zeros(())

    trial = replace(checked, step=step).trial()
    with trial.held():
        for batch in (whole, whole, part, whole, whole):
            (trial.leave if len(tried) == 3 else trial.restore)()
            trial.together(partial(trial.step, batch()))
    expected, again, of_part, next_one, _ = tried
    if checked.on_any(again.difference(expected) > trial.tolerance):
        raise CannotCheckError("training_step steps with different gradients each time it runs on the same rows")
    if checked.on_any(of_part.difference(expected) > trial.tolerance):
        raise DoesNotAddUpError(advice.OF_GRADIENTS)
    if checked.is_window_long and (size := checked.largest(next_one.difference(expected))) > trial.tolerance:
        checked.accumulation.warn_once(advice.of_state("what it keeps in an attribute", size))
    of_losses = [abs(one - two) / max(abs(one), abs(two), 1e-300) for one, two in zip(losses[0], losses[4], strict=False)]
    if checked.is_window_long and checked.on_any(any(size > trial.tolerance for size in of_losses)):
        raise DoesNotAddUpError(advice.OF_STEPS)
    windows.is_free_of_steps = not checked.on_any(0.0 in losses[0] or not all(map(math.isfinite, of_losses)))


def transferred(trainer: pl.Trainer, batch: Any) -> Any:
    """A batch of the loader, as passed to ``training_step``."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    with replacing(cast("Engine", trainer.strategy).sync, batch_on_host=None):  # the sync holds the batch that runs, not this one
        return call._call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)


class DatasetRows(FewRows):
    """Batches of samples from a copy of the dataset, built by the loader's ``collate_fn``, if a batch shows no rows.

    What samples and ``collate_fn`` change is undone. If there are none, a CannotCheckError says why.
    """

    kept = None

    def __init__(self, trainer: pl.Trainer) -> None:
        self._trainer, loader = trainer, trainer.train_dataloader
        of_batch = max(cast("Engine", trainer.strategy).samples_of_loader(), default=MOST_ROWS)
        if not isinstance(loader, DataLoader) or loader.batch_sampler is None or of_batch < 2:
            raise CannotCheckError("the loader does not draw samples by index")
        self._collate, held, holder = loader.collate_fn, list[Any](), type("Holder", (torch.nn.Module,), {})()
        vars(holder).update(collate_fn=self._collate, held=held)
        self._undo, self.of_others = Undo(holder, trainer.strategy.root_device), list[int]()
        dataset = _copied(loader.dataset, held)
        try:
            with self._undo.take(watches_parameters=False):
                self._samples = _samples_of(dataset, max(MOST_ROWS, min(of_batch, _MOST_SAMPLES)))
        except Exception as error:
            raise CannotCheckError(f"drawing samples raises {type(error).__name__}: {error}") from error
        held.clear()
        self._drawn = self._undo.take(watches_parameters=False)
        self.number = self.of_batch = self.at_once = len(self._samples)
        self.take([0, 1])

    @override
    def take(self, rows: Sequence[int]) -> Any:
        with self._undo.take(watches_parameters=False):  # these draws must not affect the batches of training
            self._drawn.restore()
            try:
                batch = transferred(self._trainer, self._collate([deepcopy(self._samples[row % self.number]) for row in rows]))
            except Exception as error:
                raise CannotCheckError(f"collate_fn raises {type(error).__name__} on other samples: {error}") from error
            if self._drawn.random_state.has_drawn():
                raise CannotCheckError("a batch of the loader is made with random numbers")
            self._drawn = self._undo.take(watches_parameters=False)  # its own random draws would show as different losses
        return batch

    @override
    def emptied(self, rows: Sequence[int], without_labels: Collection[int]) -> Any:
        return None


_MOST_SAMPLES, _SECONDS = 256, 5.0


def _copied(dataset: Any, held: list[Any]) -> Any:
    """A copy with its own containers and inner datasets. What it shares with the original is added to ``held``, to be restored."""
    copied = copy(dataset)
    if hasattr(dataset, "__dict__"):
        vars(copied).update(tree_map(lambda own: _copied(own, held) if isinstance(own, Dataset) else own, {**vars(dataset)}))
        held.append(vars(copied))
    return copied


def _samples_of(dataset: Any, number: int) -> list[Any]:
    """Samples spread over the dataset, fewer if they take long."""
    number, end, samples = min(number, len(dataset)), monotonic() + _SECONDS, list[Any]()
    for place in sorted(range(number), key=lambda place: place % (number // MOST_ROWS or 1)):  # the first are spread out
        if len(samples) < MOST_ROWS or monotonic() < end:
            samples.append(dataset[place * (len(dataset) - 1) // (number - 1 or 1)])
    return samples
