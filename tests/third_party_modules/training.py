"""Train a module of another package in three ways, and see what differs. One process trains the modules of one package."""

import importlib
import importlib.metadata
import importlib.util
import json
import logging
import os
import random
import subprocess
import sys
import tempfile
import traceback
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate

from . import Case, packages

MICRO_BATCH, SIZES, WINDOWS, EPOCHS = 3, (3, 3, 2), 3, 2
"""Three windows of three micro-batches, the third of which is smaller: so many rows a case has."""
WINDOW = sum(SIZES)
JOINED = [list(range(start, start + WINDOW)) for start in range(0, WINDOWS * WINDOW, WINDOW)]
MICRO_BATCHES = [rows[sum(SIZES[:index]) : sum(SIZES[: index + 1])] for rows in JOINED for index in range(len(SIZES))]
"""The rows of each window, and of each micro-batch."""

Row = dict[str, Any]  # a line of the table: names and version; deviations by way; what the package said by way


def examine(name: str) -> list[Row]:  # train all modules of a package in each way
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
    """Have torchvision imported, if its build for CUDA lies beside a torch without CUDA; keep what is returned while it is used."""
    if importlib.util.find_spec("torchvision") is None:
        return None
    if not subprocess.run([sys.executable, "-c", "import torchvision"], capture_output=True, check=False).returncode:
        return None
    library = torch.library.Library("torchvision", "DEF")
    for name in ("nms", "qnms"):
        library.define(f"{name}(Tensor boxes, Tensor scores, float iou_threshold) -> Tensor")
    return library


def used(imports: str) -> tuple[Any, Any]:  # the Lightning that a package imports, and the names of this package for it
    is_first = imports == "lightning"
    pl = importlib.import_module("lightning.pytorch" if is_first else imports)
    return pl, importlib.import_module("lightning_accum.names" if is_first else f"lightning_accum.{imports}")


def examined(case: Case, imports: str) -> Row:  # the ways of one module, each compared with whole batches in plain Lightning
    _, accum = used(imports)
    compare = importlib.import_module("lightning_accum.testing").compare_window_with_batch
    policies = {"windows": {"window": len(SIZES)}, "split": {"micro_batch": MICRO_BATCH, **case.arguments}}
    row: Row = {"arguments": sorted(case.arguments), "deviations": {}, "said": {}}
    known: set[str] = set()
    for way in ("lightning", *policies):
        policy = accum.GradientAccumulation(**policies[way]) if way in policies else len(SIZES)
        how = {"strategy": "accum" if way in policies else "auto", "epochs": EPOCHS, "collate": case.collate or default_collate}
        batches = [[case.rows[index] for index in rows] for rows in (JOINED if way == "split" else MICRO_BATCHES)]
        windows = [[case.rows[index] for index in rows] for rows in JOINED]
        modules = [made(case), made(case)]  # their parameters are not the same for every row
        sgd = partial(torch.optim.SGD, lr=case.learning_rate)  # where a gradient is 0 but for rounding, Adam divides it by its size
        how["optimizer"] = sgd if modules[0].automatic_optimization else None
        with warnings.catch_warnings(record=True) as caught, SameForEveryRow():
            warnings.simplefilter("always")
            try:
                found = compare(modules.pop, batches, policy, windows=windows, reference={"max_epochs": EPOCHS}, **how)
            except Exception as error:
                if way not in policies:
                    raise
                is_ours = isinstance(error, accum.AccumulationError) or type(error).__name__ == "MisconfigurationException"
                row["said"][way] = f"{'refused' if is_ours else 'crashed'}: {first_line(error)}"
                continue
        messages = {first_line(warning.message) for warning in caught}
        row["deviations"][way] = found.parameters
        if way in policies:
            row["said"][way] = "; ".join(f"warned: {message}" for message in sorted(messages - known))
        known |= messages if way not in policies else set()
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


def made(case: Case) -> Any:  # the module, with dropout off, which computes in float64
    from torchmetrics import Metric

    torch.manual_seed(7)
    random.seed(7)
    module = case.module().double()
    without_dropout(module)
    for metric in module.modules():  # some are the loss
        if isinstance(metric, Metric):
            metric.set_dtype(torch.float64)
    return module


def first_line(message: object, words: int = 8) -> str:  # the beginning of a message
    parts = str(message).split() or [type(message).__name__]
    return " ".join(parts[:words]) + (" …" if len(parts) > words else "")


if __name__ == "__main__":
    Path(sys.argv[2]).write_text(json.dumps(examine(sys.argv[1])))
