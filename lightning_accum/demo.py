"""The demo: a small language model over bytes, trained as one batch and in every mix of ranks, windows and micro-batches."""

from __future__ import annotations

import logging
import os
import random
import sys
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from textwrap import fill
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F  # noqa: N812
from torch.nn.utils.rnn import pad_sequence
from torch.torch_version import TorchVersion
from torch.utils.data import DataLoader, Dataset
from typing_extensions import override

from lightning_accum import GradientAccumulation, ModelParallelAccumulationStrategy, SameOrderSampler
from lightning_accum.testing import EXACT, QUIET, distance, whole_parameters
from lightning_accum.trainer.from_lightning import fabric, pl
from lightning_accum.verification.over_ranks import RanksFailedError, run_on_ranks

GLOBAL_BATCH = 32
SAMPLES, LONGEST = 101, 256  # bytes
"""Three windows and a tail of 5 samples in an epoch, which two ranks share as 51 and 50, and four as 26 and three times 25."""
COLUMNS = "{:<32}{:>10}{:>10}{:>12}{:>8}"
CAPTION = (
    "Run: ranks x loader batches in a window x samples in a loader batch; 32/4: batches of 32, split into micro-batches of 4. "
    "Loss: of the last step's batch, nats. Losses: the largest relative difference of a step's loss from the full batch's. "
    "Parameters: the norm of their difference from the full batch's after training, relative to the norm of the full batch's total "
    "change. Steps: of the optimizer, of the scheduler."
)


def run_demo(epochs: int, out: Path) -> int:
    """Train on the full batch, then in every mix; print and plot the distances from it. Returns the exit status."""
    mixes: Sequence[Mix] = MIXES
    if TorchVersion(torch.__version__) < "2.9":
        print("Runs with FSDP2 are left out: torch shards on a CPU from 2.9 on.", file=sys.stderr)
        mixes = [mix for mix in MIXES if not mix.is_sharded]
    print(COLUMNS.format("run", "loss", "losses", "parameters", "steps"), flush=True)
    results: dict[Mix, Run] = {}
    apart: dict[Mix, tuple[float, float]] = {}
    try:
        corpus = sample_corpus(SAMPLES, LONGEST)
        for mix in mixes:
            most_seconds = 180.0 + 60.0 * epochs  # about ten times the time of two slow cores
            results[mix] = found = run_on_ranks(partial(_train_rank, mix, corpus, epochs), mix.ranks, most_seconds)[0]
            full = results[FULL_BATCH]
            moved = distance(full.parameters, new_model().state_dict())
            of_losses = max(abs(loss - other) / abs(other) for loss, other in zip(found.losses, full.losses, strict=True))
            apart[mix] = of_losses, distance(found.parameters, full.parameters) / moved
            numbers = f"{found.losses[-1]:.6f}", *(f"{number:.1e}" for number in apart[mix])
            print(COLUMNS.format(f"{mix.engine} {mix.shape}", *numbers, f"{found.steps}, {found.scheduler_steps}"), flush=True)
    except RanksFailedError as error:
        print(f"{error} ({len(apart)} of {len(mixes)} runs are done.)", file=sys.stderr)
        return 1
    mine, theirs = ([apart[mix] for mix in mixes if mix.engine == engine] for engine in ("lightning_accum", "Lightning"))
    largest, of_theirs = (max(losses for losses, _ in of) for of in (mine, theirs))
    verdict = f"this package: {largest:.0e} from the full batch in {len(mine)} mixes; Lightning's own: up to {of_theirs:.0e}"
    _draw({mix: run.losses for mix, run in results.items()}, verdict, out / "loss_curves.png")
    print(f"The losses: {out / 'loss_curves.png'}.", file=sys.stderr)
    print(f"\n{fill(CAPTION, 80)}\n\n{verdict}")
    return 0 if all(number < EXACT for found in mine for number in found) else 1


# --- one training -----------------------------------------------------------------------------------------------------


class Mix(NamedTuple):
    """One training run: who accumulates, and how the global batch is cut.

    ``window`` loader batches of ``batch`` samples on each of ``ranks`` make an optimizer step; each loader batch may be split into
    micro-batches, and the model may be sharded over the ranks by FSDP2, rather than replicated by DDP.
    """

    engine: str
    ranks: int
    window: int
    batch: int
    micro_batch: int | None = None
    is_sharded: bool = False

    @property
    def shape(self) -> str:
        """Ranks x window x batch, and the type of data parallelism: ``"2 x 4 x 4 DDP"``, ``"1 x 1 x 32/4"``."""
        split = "" if self.micro_batch is None else f"/{self.micro_batch}"
        parallelism = " FSDP2" if self.is_sharded else " DDP" if self.ranks > 1 else ""
        return f"{self.ranks} x {self.window} x {self.batch}{split}{parallelism}"


FULL_BATCH = Mix("full batch", ranks=1, window=1, batch=GLOBAL_BATCH)
MIXES = (
    FULL_BATCH,
    *(Mix("Lightning", *cut) for cut in ((1, 8, 4), (2, 4, 4))),
    *(Mix("lightning_accum", *cut) for cut in ((1, 8, 4), (1, 32, 1), (1, 1, 32, 4), (2, 4, 4), (2, 16, 1), (4, 8, 1))),
    *(Mix("lightning_accum", *cut, is_sharded=True) for cut in ((2, 4, 4), (4, 2, 4))),
)


def _train_rank(mix: Mix, corpus: Sequence[bytes], epochs: int) -> Run:
    for stream in (sys.stdout, sys.stderr):  # errors are raised in the demo's process
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
    logging.disable()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)  # more threads are not faster for small matrices
    record = Run()
    strategy: Any = "ddp" if mix.ranks > 1 else "auto"
    how: dict[str, Any] = {"callbacks": [record], "accumulate_grad_batches": mix.window}
    if mix.engine == "lightning_accum":
        strategy = "accum_ddp" if mix.ranks > 1 else "accum"
        how = {"callbacks": [GradientAccumulation(mix.window, micro_batch=mix.micro_batch), record]}
    if mix.is_sharded:
        strategy = ModelParallelAccumulationStrategy(mix.ranks, 1)
    how |= {"accelerator": "cpu", "devices": mix.ranks, "strategy": strategy, "max_epochs": epochs}
    environment = fabric.plugins.environments.LightningEnvironment()  # also on a cluster: the demo stays on this machine
    trainer = pl.Trainer(**QUIET, **how, plugins=[environment, pl.plugins.DoublePrecision()])
    trainer.fit(new_model(), loader_of(corpus, mix.batch))
    return record


class Run(pl.Callback):
    """The results of a training: the whole batch's loss before each step, counts, and the parameters by name."""

    def __init__(self) -> None:
        self.losses: list[float] = []
        self.steps = self.scheduler_steps = 0
        self.parameters: dict[str, Tensor] = {}
        self._loss_and_targets = torch.zeros(2, dtype=torch.float64)

    @override
    def on_train_batch_end(
        self, trainer: pl.Trainer, pl_module: pl.LightningModule, outputs: Any, batch: dict[str, Tensor], batch_idx: int
    ) -> None:
        metrics, targets = trainer.callback_metrics, (batch["labels"][:, 1:] != IGNORED).sum()  # the bytes to be predicted
        self._loss_and_targets += torch.stack([metrics["train_loss"] * targets, targets])
        if trainer.global_step == len(self.losses):  # inside a window
            return
        # Lightning has no such number as window/loss: take the mean over all bytes from the logs of the module
        total, count = trainer.strategy.reduce(self._loss_and_targets, reduce_op="sum").tolist()
        self.losses.append(metrics["window/loss"].item() if "window/loss" in metrics else total / count)
        self._loss_and_targets.zero_()

    @override
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.steps = int(max(state["step"] for state in trainer.optimizers[0].state.values()))
        self.scheduler_steps = trainer.lr_scheduler_configs[0].scheduler.last_epoch
        self.parameters = whole_parameters(trainer, pl_module)
        for name in ("log", "log_dict"):  # set by the Trainer, and refer to it
            vars(self).pop(name, None)


# --- the figure -------------------------------------------------------------------------------------------------------


def _draw(curves: Mapping[Mix, Sequence[float]], verdict: str, path: Path) -> None:
    """Plot the loss of every optimizer step of all runs. This package's losses lie on the grey line of the full batch."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 6), layout="constrained")
    axes = figure.subplots()
    styles: dict[str, dict[str, Any]] = {"full batch": {"color": "0.8", "linewidth": 9}, "Lightning": {"marker": "x"}}
    for mix, losses in curves.items():
        axes.plot(range(1, len(losses) + 1), losses, label=f"{mix.engine} {mix.shape}", **styles.get(mix.engine, {}))
    figure.suptitle(f"The same {GLOBAL_BATCH} samples a step; {verdict}")
    axes.set(xlabel="optimizer step", ylabel="loss of its batch, nats")
    axes.legend(loc="upper left", bbox_to_anchor=(1.01, 1), title="ranks x batches in a window\nx samples in a batch")
    figure.savefig(path, dpi=130)


# --- what is trained --------------------------------------------------------------------------------------------------

EDGE = 0  # the byte before and after a text, which no text has
SHORTEST = 20  # a paragraph of fewer bytes is a heading, or nothing
IGNORED = -100  # the label of padding: cross_entropy's default


def sample_corpus(samples: int, longest: int) -> list[bytes]:
    """Draw paragraphs of Python's own reference, the same ones at every call, each cut at ``longest`` bytes."""
    paragraphs = {paragraph for topic in topics.values() for paragraph in topic.split("\n\n") if len(paragraph) > SHORTEST}
    return [text.encode()[:longest] for text in random.Random(0).sample(sorted(paragraphs), samples)]


def collate(texts: Sequence[bytes]) -> dict[str, Tensor]:
    """Pad texts to the longest: ``input_ids`` and ``labels``, both (batch, length); a label is -100 on padding, else the input."""
    rows = [torch.tensor([EDGE, *text, EDGE]) for text in texts]
    return {
        "input_ids": pad_sequence(rows, batch_first=True, padding_value=EDGE),
        "labels": pad_sequence(rows, batch_first=True, padding_value=IGNORED),
    }


def loader_of(corpus: Sequence[bytes], batch: int) -> DataLoader[bytes]:
    """The corpus in batches. Each epoch has a new order, which is the same for any number of ranks and any batch size."""
    dataset = cast("Dataset[Any]", corpus)
    return DataLoader(dataset, batch_size=batch, sampler=SameOrderSampler(dataset), collate_fn=collate)


class ByteModel(pl.LightningModule):
    """A causal transformer, trained with AdamW under a one-cycle schedule. It knows nothing of this package."""

    learning_rate = 1e-2

    def __init__(self, width: int = 48, depth: int = 2, longest: int = 258) -> None:
        super().__init__()
        self.net = _Transformer(width, depth, longest)

    @override
    def configure_model(self) -> None:
        """Shard each block and the rest, if the Trainer's strategy is FSDP2."""
        if self.device_mesh is not None:
            for part in (*self.net.blocks, self.net):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    @override
    def forward(self, input_ids: Tensor) -> Tensor:
        """Logits of the next byte: (batch, length) to (batch, length, 256)."""
        logits: Tensor = self.net(input_ids)
        return logits

    @override
    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        """The mean loss of the bytes to predict; padding has the label -100."""
        logits = self(batch["input_ids"])
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), batch["labels"][:, 1:].flatten(), ignore_index=IGNORED)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    @override
    def configure_optimizers(self) -> Any:
        """AdamW and a one-cycle schedule over the optimizer steps that the Trainer announces."""
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate)
        steps = int(self.trainer.estimated_stepping_batches)
        scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.learning_rate, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class _Transformer(nn.Module):
    def __init__(self, width: int, depth: int, longest: int) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, width)
        self.positions = nn.Embedding(longest, width)
        # no biases: the gradient of the keys' bias is 0 up to rounding, which Adam scales up to whole steps
        how: dict[str, Any] = {"dropout": 0.0, "activation": "gelu", "batch_first": True, "norm_first": True, "bias": False}
        self.blocks = nn.ModuleList(nn.TransformerEncoderLayer(width, 2, 4 * width, **how) for _ in range(depth))
        self.norm = nn.LayerNorm(width)
        self.next_byte = nn.Linear(width, 256, bias=False)

    @override
    def forward(self, input_ids: Tensor) -> Tensor:
        hidden = self.bytes(input_ids) + self.positions.weight[: input_ids.shape[1]]
        mask = nn.Transformer.generate_square_subsequent_mask(input_ids.shape[1], hidden.device, hidden.dtype)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask, is_causal=True)
        logits: Tensor = self.next_byte(self.norm(hidden))
        return logits


def new_model() -> ByteModel:
    """The model that every run begins with, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        return ByteModel().double()
