"""Train a module of another package in four ways, and see what differs. One process trains the modules of one package."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from . import Case, packages

MICRO_BATCH, SIZES, WINDOWS, EPOCHS = 3, (3, 3, 2), 3, 2
"""Three windows of three micro-batches, the third of which is smaller: so many rows a case has."""
WINDOW = sum(SIZES)

Row = dict[str, Any]
"""A line of the table: names and version; deviations by way; what the package said by way."""


def joined_batches() -> list[list[int]]:
    """The rows of each window."""
    return [list(range(start, start + WINDOW)) for start in range(0, WINDOWS * WINDOW, WINDOW)]


def micro_batches() -> list[list[int]]:
    """The rows of each micro-batch."""
    return [rows[sum(SIZES[:index]) : sum(SIZES[: index + 1])] for rows in joined_batches() for index in range(len(SIZES))]


def examine(name: str) -> list[Row]:
    """Train all modules of a package in the four ways."""
    os.chdir(tempfile.mkdtemp())
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    torch.set_num_threads(1)
    kept = make_torchvision_importable()
    entry = packages()[name]
    used(entry.imports)  # which sets the level of loggers, and before the other package can be imported
    for logger in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    of_all = {"package": name, "version": importlib.metadata.version(name), "field": entry.field, "imports": entry.imports}
    rows = []
    for case in entry.cases():
        try:
            found = examined(case, entry.imports)
        except Exception as error:  # the reference itself cannot be trained
            traceback.print_exception(error)
            found = {"deviations": {}, "said": {}, "failed": first_line(error)}
        rows.append({**of_all, "module": case.name, **found})
    del kept
    return rows


def make_torchvision_importable() -> Any:
    """Have torchvision imported, without its operators, where its build for CUDA lies beside a torch without CUDA.

    Returns:
        What must be kept as long as torchvision is used.
    """
    if importlib.util.find_spec("torchvision") is None:
        return None
    if not subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, check=False).returncode:
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
    return library


def used(imports: str) -> tuple[Any, Any]:
    """The Lightning that a package imports, and the names of this package for it."""
    is_first = imports == "lightning"
    pl = importlib.import_module("lightning.pytorch" if is_first else imports)
    return pl, importlib.import_module("lightning_accum.names" if is_first else f"lightning_accum.{imports}")


def examined(case: Case, imports: str) -> Row:
    """The four ways of one module."""
    pl, accum = used(imports)
    start, _ = trained(case, pl, joined_batches(), is_trained=False)
    whole, known = trained(case, pl, joined_batches())
    plain, also_known = trained(case, pl, micro_batches(), accumulate_grad_batches=len(SIZES))
    changed = (whole - start).norm()
    row: Row = {"arguments": sorted(case.arguments), "deviations": {"lightning": float((plain - whole).norm() / changed)}}
    row["said"] = {}
    for way, batches, policy in (
        ("windows", micro_batches(), {"window": len(SIZES)}),
        ("split", joined_batches(), {"micro_batch": MICRO_BATCH, **case.arguments}),
    ):
        try:
            callbacks = [accum.GradientAccumulation(**policy)]
            found, warned = trained(case, pl, batches, strategy="accum", callbacks=callbacks)
        except Exception as error:
            is_ours = isinstance(error, accum.AccumulationError) or type(error).__name__ == "MisconfigurationException"
            row["said"][way] = f"{'refused' if is_ours else 'crashed'}: {first_line(error)}"
            continue
        row["deviations"][way] = float((found - whole).norm() / changed)
        row["said"][way] = "; ".join(f"warned: {message}" for message in sorted(warned - known - also_known))
    return row


class SameForEveryRow(TorchDispatchMode):
    """Random numbers are the same at every draw, and for every row of a tensor: so a row meets the same noise in any batch."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, name = kwargs or {}, func.overloadpacket.__name__
        if args and isinstance(args[0], (int, float)) and name in ("_local_scalar_dense", "eq", "ne"):
            args = torch.tensor(args[0]), *args[1:]  # torch hands a number over that was a tensor once
        size = next((value for value in args if isinstance(value, (list, tuple))), None)
        first = next((value for value in args if isinstance(value, Tensor)), None)
        shape = size if first is None else first.shape
        is_drawn = torch.Tag.nondeterministic_seeded in func.tags and "attention" not in name  # whose dropout is off
        if not is_drawn or not shape or "perm" in name or "multinomial" in name:
            return func(*args, **kwargs)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            if first is None:  # rand, randn, randint
                smaller = [list(shape[1:]) if value is size else value for value in args]
                return func(*smaller, **kwargs).expand(shape).clone()
            row = torch.empty(shape[1:], dtype=first.dtype, device=first.device)
            if name == "bernoulli" or (name == "bernoulli_" and isinstance(args[1], Tensor)):  # each row has its probabilities
                drawn = (row.double().uniform_() < args[-1]).to(first.dtype)
                return first.copy_(drawn) if name == "bernoulli_" else drawn
            if name == "normal":
                mean, std = args[0], args[1] if len(args) > 1 else kwargs.get("std", 1.0)
                return mean + std * row.normal_()
            drawn = func(row, *args[1:], **{key: value for key, value in kwargs.items() if key != "memory_format"})
            return first.copy_(drawn) if name.endswith("_") else drawn.expand(shape).clone()


def without_dropout(module: nn.Module) -> None:
    """Set all probabilities of dropout to 0: ``p`` of its layers, and numbers in attributes with "drop" in their name."""
    for layer in module.modules():
        for holder in (vars(layer), vars(layer).get("_hparams") or {}):
            for name, value in holder.items():
                if ("drop" in name.lower() or ("Drop" in type(layer).__name__ and name == "p")) and isinstance(value, float):
                    holder[name] = 0.0


def trained(case: Case, pl: Any, batches: list[list[int]], is_trained: bool = True, **arguments: Any) -> tuple[Tensor, set[str]]:
    """All parameters after training, as one vector, and the warnings that there were.

    SGD takes the place of the module's optimizer: where a gradient is 0 but for rounding, Adam divides this by its own size.
    Dropout is off, and other random numbers are the same for every row.
    """
    from torchmetrics import Metric

    pl.seed_everything(7, verbose=False)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = case.module()
        without_dropout(module)
        module.double()
        for metric in module.modules():  # some are the loss
            if isinstance(metric, Metric):
                metric.set_dtype(torch.float64)
        if module.automatic_optimization:
            module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=case.learning_rate)
        quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
        on_cpu = {"accelerator": "cpu", "devices": 1, "precision": "64-true", "max_epochs": EPOCHS, "limit_val_batches": 0}
        trainer = pl.Trainer(**on_cpu, **quiet, **arguments)
        if is_trained:
            with SameForEveryRow():
                trainer.fit(module, case.new_loader(batches))
            assert trainer.global_step > 0, "no optimizer step was taken"
    vector = torch.cat([parameter.detach().double().flatten() for parameter in module.parameters()])
    return vector, {first_line(warning.message) for warning in caught}


def first_line(message: object, words: int = 8) -> str:
    """The beginning of a message."""
    parts = str(message).split() or [type(message).__name__]
    return " ".join(parts[:words]) + (" …" if len(parts) > words else "")


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(examine(sys.argv[1])))
