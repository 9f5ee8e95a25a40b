"""Train a module of another package in four ways, and see what differs. One process trains the modules of one package."""

from __future__ import annotations

import importlib
import importlib.metadata
import importlib.util
import logging
import os
import subprocess
import sys
import tempfile
import traceback
import warnings
from typing import Any

import torch

from . import Case, packages

MICRO_BATCH, MICRO_BATCHES, SIZES, WINDOWS, EPOCHS = 3, 3, (3, 3, 2), 3, 2
ROWS = sum(SIZES) * WINDOWS
"""So many rows a case has: three windows of three micro-batches, the third of which is smaller."""

Row = dict[str, Any]
"""A line of the table: names and version; deviations by way; what the package said by way."""


def micro_batches() -> list[list[int]]:
    """The rows of each micro-batch."""
    rows = iter(range(ROWS))
    return [[next(rows) for _ in range(size)] for _ in range(WINDOWS) for size in SIZES]


def joined_batches() -> list[list[int]]:
    """The rows of each window."""
    size = sum(SIZES)
    return [list(range(start, start + size)) for start in range(0, ROWS, size)]


def examine(name: str) -> list[Row]:
    """Train all modules of a package in the four ways."""
    os.chdir(tempfile.mkdtemp())
    os.environ["TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"] = "1"
    torch.set_num_threads(1)
    kept = make_torchvision_importable()
    entry = packages()[name]
    version = importlib.metadata.version(name)
    for imports in ("lightning.pytorch", "pytorch_lightning"):
        importlib.import_module(imports)  # which sets the level
    for logger in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        logging.getLogger(logger).setLevel(logging.ERROR)
    rows = []
    for case in entry.cases():
        row = {"package": name, "version": version, "field": entry.field, "imports": entry.imports, "module": case.name}
        try:
            rows.append({**row, **examined(case, entry.imports)})
        except Exception as error:  # the reference itself cannot be trained
            show(error)
            rows.append({**row, "deviations": {}, "said": {}, "failed": first_line(error)})
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


def examined(case: Case, imports: str) -> Row:
    """The four ways of one module."""
    pl: Any = importlib.import_module("lightning.pytorch" if imports == "lightning" else imports)
    start, _ = trained(case, pl, joined_batches(), is_trained=False)
    whole, known = trained(case, pl, joined_batches())
    plain, also_known = trained(case, pl, micro_batches(), accumulate_grad_batches=MICRO_BATCHES)
    known |= also_known
    changed = (whole - start).norm()
    row: Row = {
        "arguments": sorted(case.arguments),
        "deviations": {"lightning": float((plain - whole).norm() / changed)},
        "said": {},
    }
    for way, batches, policy in (
        ("windows", micro_batches(), {"window": MICRO_BATCHES}),
        ("split", joined_batches(), {"micro_batch": MICRO_BATCH}),
    ):
        arguments = case.arguments if way == "split" else {}
        try:
            accum = importlib.import_module(accumulation_for(imports))
            found, warned = trained(
                case,
                pl,
                batches,
                strategy="accum",
                callbacks=[accum.GradientAccumulation(**policy, **arguments)],
            )
        except Exception as error:
            row["said"][way] = f"{'refused' if is_refusal(error) else 'crashed'}: {first_line(error)}"
            show(error)
            continue
        row["deviations"][way] = float((found - whole).norm() / changed)
        row["said"][way] = "; ".join(f"warned: {message}" for message in sorted(warned - known))
    return row


def accumulation_for(imports: str) -> str:
    """The import of this package for modules of that Lightning."""
    return "lightning_accum.pytorch_lightning" if imports == "pytorch_lightning" else "lightning_accum"


def trained(
    case: Case, pl: Any, batches: list[list[int]], is_trained: bool = True, **arguments: Any
) -> tuple[torch.Tensor, set[str]]:
    """All parameters after training, as one vector, and the warnings that there were.

    SGD takes the place of the module's optimizer: where a gradient is 0 but for rounding, Adam divides this by its own size.
    Dropout is off, and other random numbers are the same for every row.
    """
    from torchmetrics import Metric

    from lightning_accum import randomness

    class SameAlways(randomness.SameForEveryRow):  # Lightning's hooks do not say when a micro-batch begins
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func is torch.ops.aten._local_scalar_dense.default and not isinstance(args[0], torch.Tensor):
                return args[0]  # torch hands a number over that was a tensor once
            if torch.Tag.nondeterministic_seeded not in func.tags:
                return func(*args, **(kwargs or {}))
            self.restart()
            return super().__torch_dispatch__(func, types, args, kwargs)

    randomness.seed_everything(7)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module = case.module()
        randomness.switch_off_dropout(module)
        module.double()
        for metric in module.modules():  # some are the loss
            if isinstance(metric, Metric):
                metric.set_dtype(torch.float64)
        if module.automatic_optimization:
            module.configure_optimizers = lambda: torch.optim.SGD(module.parameters(), lr=case.learning_rate)
        trainer = pl.Trainer(
            accelerator="cpu",
            devices=1,
            precision="64-true",
            max_epochs=EPOCHS,
            logger=False,
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            limit_val_batches=0,
            **arguments,
        )
        if is_trained:
            with SameAlways():
                trainer.fit(module, case.new_loader(batches))
            assert trainer.global_step > 0, "no optimizer step was taken"
    vector = torch.cat([parameter.detach().double().flatten() for parameter in module.parameters()])
    return vector, {first_line(warning.message) for warning in caught}


def first_line(message: object, words: int = 14) -> str:
    """The beginning of a message."""
    text = " ".join(str(message).split()) or type(message).__name__
    parts = text.split(" ")
    return " ".join(parts[:words]) + (" …" if len(parts) > words else "")


def is_refusal(error: BaseException) -> bool:
    """Whether the error was raised by this package, or by Lightning's Trainer, and not by what they call."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1].filename.replace(os.sep, "/")
    raises = (frames[-1].line or "").startswith("raise ")
    return (
        (raises and "/lightning_accum/" in last)
        or "/accelerator_connector" in last
        or type(error).__name__ == "MisconfigurationException"
    )


def show(error: BaseException) -> None:
    """Print where an error came from, if the environment asks for it."""
    if os.environ.get("THIRD_PARTY_TRACEBACK"):
        traceback.print_exception(error)


def main(argv: list[str]) -> int:
    """``NAME FILE``: examine a package and write what was found as JSON."""
    import json
    from pathlib import Path

    name, out = argv
    Path(out).write_text(json.dumps(examine(name)))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
