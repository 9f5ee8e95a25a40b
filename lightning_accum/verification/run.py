"""verify: whether a window takes the step of its full batch, on the user's own module."""

from __future__ import annotations

import copy
import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from textwrap import fill
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader
from typing_extensions import override

from lightning_accum.errors import AccumulationError
from lightning_accum.exact import rounding_of_gradients
from lightning_accum.policy import Tokens, is_natural
from lightning_accum.randomness import generators_kept
from lightning_accum.splitting.few_rows import join as join_batches
from lightning_accum.trainer.callback import GradientAccumulation
from lightning_accum.trainer.engine import Engine
from lightning_accum.trainer.from_lightning import MisconfiguredError, Strategy, pl
from lightning_accum.trainer.package import check_package
from lightning_accum.trial_mode import is_narrow
from lightning_accum.user_warnings import listed
from lightning_accum.verification.examination import Break, Comparison, Diagnosis
from lightning_accum.verification.over_ranks import OverRanks
from lightning_accum.verification.step import ModuleState, StepRunner, uncompiled

Join = Callable[[Sequence[Any]], Any]  # joins several batches to one
LossOf = Callable[[Any, Any], Tensor]  # the loss of a module on a batch

SHOWN = 10  # parameters in the table of a report


@dataclass(frozen=True, repr=False)
class Report:
    """The result of :func:`~lightning_accum.verify`. It is true if the two steps are equal.

    Attributes:
        compared: the two steps in words.
        gradient: the norm of the difference of the two gradients, divided by the norm of the full batch's gradient.
        losses: the loss of the full batch, and the loss of the window.
        tolerance: the largest relative difference at which the steps count as equal.
        parameters: the relative difference of each parameter's gradient by its name, the largest first. A tiny gradient is compared
            with a hundredth of the whole.
        weight: the weight of each micro-batch, in words.
        breaks: the causes of a difference; if empty, the window takes the step of the full batch.
        notes: further information: dropout that was switched off, padding, warnings of the run.
        ranks: the number of ranks; 1 if the window ran in one process, or already differed there.
    """

    module: str
    compared: str
    gradient: float
    losses: tuple[float, float]
    tolerance: float
    tolerance_reason: str
    parameters: Mapping[str, float]
    weight: str
    breaks: Sequence[Break] = ()
    notes: Sequence[str] = ()
    ranks: int = 1

    def __bool__(self) -> bool:
        return not self.breaks

    @property
    def verdict(self) -> str:
        """The result in a line."""
        where = "on micro-batches" if self.ranks == 1 else f"on {self.ranks} ranks"
        if self:
            return f"Equal: {self.module} takes the same optimizer step {where} as on the full batch."
        names = ", ".join(dict.fromkeys(found.name for found in self.breaks))
        return f"Not equal: {self.module} trains differently {where} than on the full batch ({names})."

    def __repr__(self) -> str:
        """The report as plain text, up to 100 columns wide."""
        paragraphs = [[self.verdict, self.compared]]
        for found in self.breaks:
            without = "" if found.without is None else f" with it, by {found.without:.2g} without"
            effect = f"The worst gradient differs by {found.difference:.2g}{without}."
            paragraphs.append([f"{found.name}: {found.found} {effect}", f"    Fix: {found.mend}"])
        rows = [("relative difference of the gradient", self.gradient), *list(self.parameters.items())[:SHOWN]]
        width = max(len(name) for name, _ in rows)
        more = [f"... and {len(self.parameters) - SHOWN} more that are closer"] if len(self.parameters) > SHOWN else []
        paragraphs.append([*(f"{name.ljust(width)}  {value:>7.2g}" for name, value in rows), *more])
        full, window = self.losses
        facts = [f"loss: {full:.12g} of the full batch, {window:.12g} of the micro-batches", f"weight: {self.weight}"]
        paragraphs.append([f"tolerance: {self.tolerance:.2g} ({self.tolerance_reason})", *facts])
        paragraphs.append([f"- {note}" for note in self.notes])
        return "\n\n".join("\n".join(map(_wrapped, paragraph)) for paragraph in paragraphs if paragraph)


def _wrapped(text: str) -> str:
    indent = "  " if text.startswith("- ") else "    "
    return fill(text, 100, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


class OfLoss(pl.LightningModule):
    """Any module, and a function that returns its loss on a batch."""

    def __init__(self, module: nn.Module, loss_of: LossOf) -> None:
        super().__init__()
        self.module, self.loss_of = module, loss_of

    @override
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss_of(self.module, batch)

    @override
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def verify(
    module: Any,
    data: Any = None,
    window: int | None = None,
    micro_batch: int | Tokens | Literal["offload"] | None = None,
    *,
    precision: Any = "64-true",
    accelerator: str = "cpu",
    gradient_clip_val: float | None = None,
    gradient_clip_algorithm: str | None = None,
    join: Join | None = None,
    loss_of: LossOf | None = None,
    devices: int = 1,
    strategy: str | Strategy = "accum_ddp",
    **policy: Any,
) -> Report:
    """Take one optimizer step on a full batch and one accumulated, and compare them.

    The full batch runs through a plain Lightning Trainer, the window through ``Trainer(strategy="accum")`` with
    ``GradientAccumulation``. Both train the module itself, with dropout off; afterwards all state reachable from it is restored,
    but not files and experiment trackers. The full batch also runs with its rows in reverse order, which measures rounding. If the
    two steps differ, possible causes are removed one by one. The full batch and some copies of the parameters must fit into memory.

    With ``loss_of`` it answers for any training loop or library, whether micro-batches change the step of a model:
    ``verify(model, batches, window=4, loss_of=lambda model, batch: model(**batch).loss)`` for an exact window, and the same with
    ``weight="equal"`` for the mean of the micro-batches' means, which most loops take.

    Args:
        module: a LightningModule with automatic optimization, before a fit or after it; or any module, with ``loss_of``.
        data: a batch (a tensor, mapping, tuple or dataclass; a list that holds tensors); an iterable of batches (a loader, an
            iterator, a list); a LightningDataModule, which is prepared and set up; None for the module's own ``train_dataloader``.
        window: loader batches in a window. The first batches of the data are its micro-batches. The full batch concatenates
            them, padded if masks or labels show how. A single batch is split into this many.
        micro_batch: the size of the micro-batches that each batch is split into, in samples or :class:`Tokens`.
        precision: as of the Trainer. The default shows differences of 1e-12; a loss that computes in float32, as in Hugging Face's
            causal models, is compared with float32's tolerance.
        accelerator: as of the Trainer; ``"gpu"`` for modules whose kernels need one.
        gradient_clip_val: as of the Trainer.
        gradient_clip_algorithm: as of the Trainer.
        join: a function ``join(batches)`` that returns one batch, for batches that are not nested containers of tensors.
        loss_of: a function ``loss_of(module, batch)`` that returns the loss, for a module that is no LightningModule.
        devices: ranks of a window: fresh processes on the CPU, which get the batches in turn, ``window`` each. Module and batches
            must be picklable, and a script must call ``verify`` below ``if __name__ == "__main__":``. The report names the rank
            and the parameters.
        strategy: the strategy for these ranks: a name or an object of this package.
        policy: further arguments of :class:`GradientAccumulation`: ``weight``, ``split``, ``trim_padding``, ...

    Returns:
        A report that is true if the two steps are equal. Print it.

    Raises:
        UnreadableLossError: the weights of micro-batches cannot be read from their losses.
        MisconfigurationException: there is nothing to compare, the module cannot run here, or a rank fails.
        JoiningError: the batches of a window cannot be joined.

    Example:
        >>> from lightning.pytorch.demos.boring_classes import BoringModel
        >>> report = verify(BoringModel(), torch.randn(8, 32), micro_batch=2)
        >>> bool(report), report.gradient < 1e-12
        (True, True)
    """
    module = module if loss_of is None else OfLoss(module, loss_of)
    given, module = module, uncompiled(module)
    for value in (module, data):
        check_package(value)
    if (objection := _objection(module, window, micro_batch, devices, accelerator, strategy)) is not None:
        raise MisconfiguredError(objection)
    size = (window or 1) * devices
    arguments = {"window": size, "micro_batch": micro_batch, **policy}
    GradientAccumulation(**arguments)  # raises the error for wrong arguments
    trainer = {"precision": precision, "accelerator": accelerator}
    trainer |= {"gradient_clip_val": gradient_clip_val, "gradient_clip_algorithm": gradient_clip_algorithm}
    over_ranks, hooks = None, data if isinstance(data, pl.LightningDataModule) else None
    with pl.utilities.seed.isolate_rng(include_cuda=accelerator in ("gpu", "cuda")):
        state = ModuleState(module)
        comparison = _read_data(module, state, data, size, join)
        try:
            runner = StepRunner(given, state, arguments, trainer, hooks)
            diagnosis = Diagnosis(runner, comparison)
            narrow = [torch.finfo(own.dtype).eps for own in module.parameters() if is_narrow(own, torch.float64)]
            if narrow and precision == "64-true" and not diagnosis.breaks:
                own = replace(runner, trainer={**trainer, "precision": "32-true"})
                if diagnosis.differs_by(own) > rounding_of_gradients(max(narrow)):
                    precision = "32-true (it has another gradient in 64-true)"
                    runner, diagnosis = own, Diagnosis(own, comparison)
            if devices > 1 and not diagnosis.breaks:  # else the difference does not depend on ranks
                over_ranks = OverRanks(runner, comparison, diagnosis, devices, strategy)
        except (RuntimeError, TypeError, ValueError) as error:  # nn.RNNBase raises ValueError
            if isinstance(error, AccumulationError) or not re.search(r"dtype|scalar type|type torch\.|Double|Float", str(error)):
                raise
            raise MisconfiguredError(
                f"{type(module).__name__} does not run in precision={precision!r}, to which parameters, buffers and batches are "
                f'converted: {error}. For operations that do not support it, pass verify(precision="32-true").'
            ) from error
    if diagnosis.window.parts < 2 and size < 2 and not policy.get("row_wise"):
        rows = "" if comparison.rows is None else f" of {comparison.rows} rows"
        raise MisconfiguredError(
            f'Nothing to compare: the batch{rows} is one micro-batch, or "offload". Pass window= or micro_batch=<fewer samples>.'
        )
    return _report(module, comparison, diagnosis, over_ranks, precision)


def _read_data(module: pl.LightningModule, state: ModuleState, data: Any, window: int, join: Join | None) -> Comparison:
    if _is_batch(data):
        whole = Comparison(data, [data])
        if window == 1:
            return whole
        if whole.layout is None or whole.layout.size < window:
            found = "its rows cannot be identified" if whole.layout is None else f"it has {whole.rows} rows"
            raise MisconfiguredError(
                f"verify(window={window}) splits one batch, but {found}. Pass a loader, a list of batches, or micro_batch=."
            )
        parts = torch.arange(whole.layout.size).tensor_split(window)
        return Comparison(data, [whole.layout.take(part.tolist()) for part in parts])
    with state.restored_afterwards():
        loader = _loader(module, data)
        with generators_kept(loader):
            batches = [copy.deepcopy(batch) for batch in islice((b for b in loader if b is not None), window)]
    if len(batches) < window:
        raise MisconfiguredError(f"verify needs {window} batches, but found {len(batches)}. Pass more data or a smaller window.")
    full, padding = join_batches(batches) if join is None else (join(batches), "")
    return Comparison(full, batches, padding)


def _is_batch(data: Any) -> bool:
    """Whether ``data`` is one batch, and not an iterable of batches, such as a list without tensors."""
    if data is None or isinstance(data, (DataLoader, pl.LightningDataModule, pl.utilities.CombinedLoader)) or _has_loaders(data):
        return False
    if isinstance(data, list):
        return any(isinstance(value, Tensor) for value in data)
    is_record = isinstance(data, (Tensor, Mapping, tuple)) or dataclasses.is_dataclass(data)
    return is_record or not isinstance(data, Iterable)  # a graph, or a custom class for a list of images


def _has_loaders(data: Any) -> bool:
    values = data.values() if isinstance(data, Mapping) else data if isinstance(data, (list, tuple)) else ()
    return any(isinstance(value, DataLoader) for value in values)


def _loader(module: pl.LightningModule, data: Any) -> Iterable[Any]:
    if data is None and not pl.utilities.model_helpers.is_overridden("train_dataloader", module):
        raise MisconfiguredError(f"verify needs data=, since {type(module).__name__} has no train_dataloader.")
    owner: Any = module if data is None else data
    if isinstance(owner, (pl.LightningModule, pl.LightningDataModule)):
        owner.prepare_data()
        owner.setup("fit")
        data = owner.train_dataloader()
    if isinstance(data, Mapping) or _has_loaders(data):
        data = pl.utilities.CombinedLoader(data, "max_size_cycle")  # as the Trainer does
    return (item[0] for item in data) if isinstance(data, pl.utilities.CombinedLoader) else data


def _objection(module: Any, window: Any, micro_batch: Any, devices: Any, accelerator: str, strategy: Any) -> str | None:
    if not isinstance(module, pl.LightningModule):
        return f"verify takes a LightningModule, or any module with loss_of=, but got {type(module).__name__}."
    if not module.automatic_optimization:
        return f"{type(module).__name__} has automatic_optimization=False; verify supports automatic optimization only."
    if window is not None and not is_natural(window):
        return f"verify(window={window!r}): expected a number of loader batches from 1. If windows vary in size, pass one size."
    if not is_natural(devices):
        return f"verify(devices={devices!r}): expected a number of ranks from 1."
    if devices > 1 and accelerator != "cpu":
        return f'verify(devices={devices}, accelerator="{accelerator}"): ranks run with accelerator="cpu" only.'
    if not (isinstance(strategy, Engine) or str(strategy).startswith("accum")):
        return f'verify(strategy={strategy!r}): expected a strategy of this package, such as "accum_ddp".'
    if micro_batch == "auto":
        return 'verify(micro_batch="auto") would run a batch that fits into memory whole. Pass a number of samples or Tokens(...).'
    return None


def _report(
    module: pl.LightningModule, comparison: Comparison, seen: Diagnosis, over_ranks: OverRanks | None, precision: Any
) -> Report:
    full, window, result = seen.full, seen.window, over_ranks or seen
    where = listed(full.dropout, " places")
    notes = [f"Dropout was off ({where}): micro-batches draw different random numbers than their batch."] if full.dropout else []
    notes += [f"To be joined, {comparison.padding}."] if comparison.padding else []
    notes += seen.notes + [warning for warning in window.warnings if warning not in full.warnings]
    parts, batches = f"{window.parts} micro-batches", len(comparison.batches)
    if batches > 1:
        parts = f"{batches} loader batches" + (", split into micro-batches," if window.parts > 1 else "")
    by_size = sorted(result.gradient.by_name.items(), key=lambda row: -math.inf if math.isnan(row[1]) else -row[1])
    size = "" if comparison.rows is None else f" of {comparison.rows} rows"
    of_module = isinstance(module, OfLoss)
    return Report(
        module=type(module.module if of_module else module).__name__,
        compared=f"One optimizer step on a full batch{size}, and one on the same rows as {parts}, in precision {precision}.",
        gradient=result.gradient.overall,
        losses=(full.loss, result.loss),
        tolerance=seen.tolerance,
        tolerance_reason=f"the loss computes in {str(full.dtype).removeprefix('torch.')}",
        parameters={name.removeprefix("module." * of_module): error for name, error in by_size},
        weight=window.weight or "none: the window was one micro-batch",
        breaks=result.breaks,
        ranks=1 if over_ranks is None else over_ranks.ranks,
        notes=notes,
    )
