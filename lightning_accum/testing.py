"""For tests: asserts that training in windows takes the steps of the full batches."""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate, chain, pairwise, zip_longest
from pathlib import Path
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.utils.data import DataLoader, Dataset, default_collate
from typing_extensions import override

from lightning_accum.errors import ArgumentError
from lightning_accum.exact import as_real
from lightning_accum.trainer.callback import GradientAccumulation
from lightning_accum.trainer.from_lightning import Strategy, pl

Rows = Sequence[Any]  # the samples that a collate function combines
MakesOptimizer = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
EXACT = 1e-12
QUIET: dict[str, Any] = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)


def sgd(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """SGD with momentum."""
    return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)


def adamw(parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """AdamW whose eps is far above rounding: rounding errors of a zero gradient must not decide a step."""
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1, eps=1e-4)


class Comparison(NamedTuple):
    """Training in windows compared with training on full batches."""

    parameters: float  # largest relative error of the parameter changes, over ranks
    losses: float  # relative error of the logged window/loss, the largest over windows and ranks; 0 if nothing was logged
    steps: tuple[int, int]  # optimizer steps in windows and on full batches
    weights: dict[int, float]  # the logged window/weight by optimizer step


def assert_window_equals_batch(
    module: pl.LightningModule | Callable[[], pl.LightningModule],
    batches: Any,
    policy: GradientAccumulation | int,
    *,
    optimizers: Sequence[MakesOptimizer | None] = (sgd, adamw),
    weights: Sequence[float] | None = None,
    limit: float = EXACT,
    **arguments: Any,
) -> None:
    """Assert that each window takes the step of its full batch, with SGD and with AdamW, in float64.

    The module trains twice from the same parameters: in windows, and with plain Lightning in one process on one batch a window.
    Parameters, logged losses and the number of optimizer steps must agree. Switch dropout off; let noise be part of the rows.

    Args:
        module: a LightningModule (it is copied), or a function that returns one with the same parameters at each call.
        batches: the rows of each loader batch, or None for a missing batch. Ranks take the batches in turns. Or loaders or a data
            module as for ``Trainer.fit``, with ``windows``.
        policy: the callback, or a number of loader batches for the Trainer's ``accumulate_grad_batches``.
        optimizers: functions from parameters to an optimizer, one training each. None is the module's ``configure_optimizers``.
        weights: the expected weight of each window; not compared by default.
        limit: the largest allowed relative error.
        arguments: of :func:`compare_window_with_batch`.

    Raises:
        AssertionError: a window did not take the step of its batch.
        AccumulationError: the windows cannot be counted from the policy, or the initial modules differ.

    Example:
        >>> import torch
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> from lightning_accum import GradientAccumulation
        >>> rows = list(torch.randn(10, 32))
        >>> batches = [rows[:3], rows[3:4], rows[4:8], rows[8:]]
        >>> assert_window_equals_batch(BoringModel(), batches, GradientAccumulation(2))
    """
    for optimizer in optimizers:
        found = compare_window_with_batch(module, batches, policy, optimizer=optimizer, **arguments)
        name = "the module's optimizer" if optimizer is None else getattr(optimizer, "__name__", repr(optimizer))
        assert found.steps[0] == found.steps[1], f"{name}: {found.steps[0]} optimizer steps, but {found.steps[1]} windows"
        assert found.parameters <= limit, f"{name}: relative error of the parameters' changes {found.parameters:.1e} > {limit:.0e}"
        assert found.losses <= limit, f"{name}: relative error of window/loss {found.losses:.1e} > {limit:.0e}"
        expected = {step: weights[step - 1] for step in found.weights} if weights is not None else found.weights
        assert found.weights == expected, f"{name}: window/weight {found.weights}, not {expected}"


def compare_window_with_batch(
    module: pl.LightningModule | Callable[[], pl.LightningModule],
    batches: Any,
    policy: GradientAccumulation | int,
    *,
    optimizer: MakesOptimizer | None = sgd,
    windows: Sequence[Rows] | None = None,
    by_rank: bool = False,
    collate: Callable[[Any], Any] = default_collate,
    strategy: str | Callable[[], Strategy] = "accum",
    devices: int = 1,
    epochs: int = 1,
    ckpt_path: str | None = None,
    trainer: Mapping[str, Any] | None = None,
    reference: Mapping[str, Any] | None = None,
) -> Comparison:
    """Train in windows and on their full batches, and measure the difference.

    Args:
        module, batches, policy: as in :func:`assert_window_equals_batch`.
        optimizer: returns the optimizer; None is the module's ``configure_optimizers``.
        windows: the rows of each window, of all epochs. By default they are counted from ``batches`` and the policy, which must
            have a fixed number of loader batches a window.
        by_rank: whether ``batches`` holds a sequence of loader batches for each rank.
        collate: combines rows to a batch.
        strategy: a name, or a function that returns a strategy of this package.
        devices: the number of processes.
        epochs: how often ``batches`` are seen. The full batches are one epoch in any case.
        ckpt_path: a checkpoint from which the training in windows resumes.
        trainer: more arguments of both Trainers. ``precision`` and ``plugins`` replace float64.
        reference: arguments of the Trainer on full batches that differ.
    """
    make = partial(copy.deepcopy, module) if isinstance(module, nn.Module) else module
    trainer = {"accelerator": "cpu", "use_distributed_sampler": False, "max_epochs": 1, **QUIET, **(trainer or {})}
    size, tail, data = trainer.get("accumulate_grad_batches", 1), "step", batches
    if isinstance(policy, int):
        in_windows, size = {**trainer, "accumulate_grad_batches": policy}, policy
    else:
        in_windows = {**trainer, "callbacks": [copy.deepcopy(policy), *trainer.get("callbacks", [])]}
        size, tail = policy.policy.window or size, policy.policy.tail
    if isinstance(batches, Sequence):
        each = [list(own) for own in batches] if by_rank else [list(batches[rank::devices]) for rank in range(devices)]
        data = _BatchesByRank(each, collate)
        windows = windows_of(each, size, epochs, tail) if windows is None and isinstance(size, int) else windows
    if windows is None:
        raise ArgumentError("Pass windows=, the rows of each window: only lists of loader batches are counted automatically.")
    kind = strategy if isinstance(strategy, str) else strategy()
    results = _train(make(), data, optimizer, {**in_windows, "strategy": kind, "devices": devices, "max_epochs": epochs}, ckpt_path)
    on_batches = {**trainer, "strategy": "auto", "devices": 1, "limit_train_batches": 1.0, **(reference or {})}
    (expected,) = _train(make(), _BatchesByRank([windows], collate), optimizer, on_batches)
    before, losses = expected["before"], expected["losses"]
    if ckpt_path is None and distance(results[0]["before"], before) != 0:
        raise ArgumentError("module returns modules with different initial parameters. Set a seed in it, or pass a module.")
    if not (changed := distance(expected["parameters"], before)):
        raise ArgumentError("Training on the full batches changed no parameter, so there is nothing to compare.")
    errors = [distance(result["parameters"], expected["parameters"]) / changed for result in results]
    shown = [
        abs(loss - losses[step - 1]) / max(abs(losses[step - 1]), 1e-300)
        for result in results
        for step, (loss, _) in result["windows"].items()
        if 0 < step <= len(losses)
    ]
    return Comparison(
        max(error if math.isfinite(error) else math.inf for error in errors),
        max(shown, default=0.0),
        (results[0]["steps"], expected["steps"]),
        {step: weight for step, (_, weight) in results[0]["windows"].items()},
    )


def windows_of(by_rank: Sequence[Sequence[Rows | None]], size: int, epochs: int = 1, tail: str = "step") -> list[list[Any]]:
    """The rows of each window of ``size`` loader batches of every rank."""
    of_epoch = [[row for rows in step if rows is not None for row in rows] for step in zip_longest(*by_rank)]
    runs = [of_epoch * epochs] if tail == "carry" else [of_epoch] * epochs
    least = {"step": 1, "drop": size, "carry": 1}[tail]
    starts = [(run, start) for run in runs for start in range(0, len(run), size) if len(run) - start >= least]
    windows = [list(chain.from_iterable(run[start : start + size])) for run, start in starts]
    return [window for window in windows if window]


def _train(
    module: Any, data: Any, optimizer: MakesOptimizer | None, arguments: dict[str, Any], ckpt_path: str | None = None
) -> list[dict[str, Any]]:
    """The results of each rank."""
    if optimizer is not None:
        module.configure_optimizers = partial(_make_optimizer, module, optimizer)
    if "precision" not in arguments and "plugins" not in arguments:
        arguments = {**arguments, "plugins": [pl.plugins.DoublePrecision()]}
    with tempfile.TemporaryDirectory() as folder:
        recorder = _Recorder(folder)
        pl.Trainer(**{**arguments, "callbacks": [*arguments.get("callbacks", []), recorder]}).fit(module, data, ckpt_path=ckpt_path)
        return [torch.load(path, weights_only=False) for path in sorted(Path(folder).glob("*.pt"))]


def _make_optimizer(module: nn.Module, optimizer: MakesOptimizer) -> torch.optim.Optimizer:
    return optimizer(module.parameters())


class _Recorder(pl.Callback):
    """Records the results of each rank, which may be another process."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._windows: dict[int, tuple[float, float]] = {}
        self._losses: list[float] = []
        self._before: dict[str, Tensor] = {}

    @override
    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._before = whole_parameters(trainer, pl_module)

    @override
    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, *_: Any) -> None:
        self._note_window(trainer)
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        if isinstance(loss, Tensor):
            self._losses.append(loss.item())

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._note_window(trainer)  # a window that ended with training
        state = {"before": self._before, "parameters": whole_parameters(trainer, pl_module), "steps": trainer.global_step}
        torch.save({**state, "windows": self._windows, "losses": self._losses}, f"{self._folder}/{trainer.global_rank:04}.pt")

    def _note_window(self, trainer: pl.Trainer) -> None:
        shown = trainer.callback_metrics
        if "window/loss" in shown:
            self._windows[int(shown["window/optimizer_steps"])] = (float(shown["window/loss"]), float(shown["window/weight"]))


def whole_parameters(trainer: pl.Trainer, module: nn.Module) -> dict[str, Tensor]:
    """The parameters by name, on the host; sharded ones are gathered from all ranks."""
    model = trainer.strategy.model
    root = model if isinstance(model, FullyShardedDataParallel) else module
    is_fsdp1 = any(isinstance(child, FullyShardedDataParallel) for child in root.modules())
    with FullyShardedDataParallel.summon_full_params(root, writeback=False) if is_fsdp1 else nullcontext():
        named = whole_copies(root.named_parameters())
    return {name.replace("_fsdp_wrapped_module.", ""): value.double() for name, value in named.items()}


def whole_copies(tensors: Iterable[tuple[str, Tensor]]) -> dict[str, Tensor]:
    """Copies in host memory; sharded tensors are gathered from all ranks, and complex ones viewed as real."""
    return {name: as_real(t.full_tensor() if isinstance(t, DTensor) else t).cpu().clone() for name, t in tensors}


def distance(first: Mapping[str, Tensor], second: Mapping[str, Tensor]) -> float:
    """The norm of the difference of all parameters, which are matched by name."""
    return math.sqrt(sum((first[name] - value).square().sum().item() for name, value in second.items()))


class _BatchesByRank(pl.LightningDataModule):
    """Gives each data-parallel rank its own loader batches: rows, or None."""

    def __init__(self, by_rank: Sequence[Sequence[Rows | None]], collate: Callable[[Any], Any]) -> None:
        super().__init__()
        self._by_rank, self._collate = by_rank, collate
        self.allow_zero_length_dataloader_with_multiple_devices = True

    @override
    def train_dataloader(self) -> DataLoader[Any]:
        assert self.trainer is not None
        share = self.trainer.distributed_sampler_kwargs or {"rank": 0}
        batches = self._by_rank[share["rank"]]
        if not all(isinstance(rows, list) and rows for rows in batches):
            collated = [None if rows is None else self._collate(rows) for rows in batches]
            return DataLoader(cast("Dataset[Any]", collated), batch_size=None)
        ends = [0, *accumulate(map(len, cast("Sequence[Rows]", batches)))]
        dataset = cast("Dataset[Any]", [row for rows in batches for row in rows or ()])
        return DataLoader(dataset, batch_sampler=[[*range(*both)] for both in pairwise(ends)], collate_fn=self._collate)
