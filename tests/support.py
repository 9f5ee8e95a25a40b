"""What the tests share: small modules, hand-written full-batch loops, and a Trainer without its trimmings."""

import csv
import math
import os
import runpy
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback, LambdaCallback
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.overrides.distributed import _register_ddp_comm_hook
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.data import DataLoader

from lightning_accum import AccumulationError, AccumulationWarning, DDPAccumulationStrategy

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1),
}


def python_path() -> str:  # for a process that imports from the tests: their folders, and what there was before
    tests = Path(__file__).parent
    folders = [tests, *sorted({file.parent for file in tests.glob("*/test_*.py")})]
    return os.pathsep.join(filter(None, [*map(str, folders), os.environ.get("PYTHONPATH")]))


def fp16_on_cpu(init_scale: float = 256.0) -> MixedPrecision:
    """16-mixed with a real GradScaler; by its name alone Lightning would fall back to bfloat16 on a CPU."""
    return MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=init_scale))


def trainer(strategy: Any = "accum", **kwargs: Any) -> pl.Trainer:  # a Trainer on the CPU that writes and prints nothing
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    defaults = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "use_distributed_sampler": False, **quiet}
    return pl.Trainer(strategy=strategy, **{**defaults, **kwargs})


def ddp(**kwargs: Any) -> DDPAccumulationStrategy:
    """Two or more real processes, forked by Lightning's own launcher, that cannot hang for long."""
    return DDPAccumulationStrategy(**{"start_method": "fork", "timeout": timedelta(seconds=60), **kwargs})


class OnCPU(DDPAccumulationStrategy):  # Lightning registers communication hooks on CUDA only
    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"start_method": "fork", "timeout": timedelta(seconds=20), **kwargs})

    def _register_ddp_hooks(self) -> None:
        assert isinstance(self.model, DistributedDataParallel)
        _register_ddp_comm_hook(self.model, self._ddp_comm_state, self._ddp_comm_hook, self._ddp_comm_wrapper)


class Profiled(Callback):
    """Has torch's profiler look on from the beginning of a loader batch to the end of another; leaves what ``read`` makes of it."""

    def __init__(self, first: int, last: int, read: Callable[[profile], Any]) -> None:
        self.first, self.last, self.read = first, last, read

    def on_train_batch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.first:
            self.profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            self.profile.__enter__()
        with record_function("next micro-batch"):
            pass

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == self.last:
            time.sleep(0.1)  # a thread of gloo notes the end of a collective after whoever waited for it has gone on
            self.profile.__exit__(None, None, None)
            if trainer.global_rank == 0:
                torch.save(self.read(self.profile), "profiled.pt")


def command(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> Any:
    """``lightning-accum`` with these arguments, in this process. Returns the exit status."""
    monkeypatch.setattr(sys, "argv", ["lightning-accum", *arguments])
    monkeypatch.delitem(sys.modules, "lightning_accum.__main__", raising=False)  # of which runpy would warn
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("lightning_accum", run_name="__main__")
    return ended.value.code


def relative_error(found: Iterable[Tensor], expected: Iterable[Tensor]) -> float:
    """The norm of all differences over the norm of what was expected."""
    pairs = [(a.detach().double(), b.detach().double()) for a, b in zip(found, expected, strict=True)]
    difference = math.sqrt(sum((a - b).square().sum().item() for a, b in pairs))
    return difference / math.sqrt(sum(b.square().sum().item() for _, b in pairs))


def error_of_updates(found: Any, expected: nn.Module, start: nn.Module) -> float:
    """Of what training has changed, not of what was there before; ``found`` is a module, or its parameters by name."""
    before, after = dict(start.named_parameters()), dict(expected.named_parameters())
    found = dict(found.named_parameters()) if isinstance(found, nn.Module) else found
    return relative_error([found[name] - before[name] for name in after], [after[name] - before[name] for name in after])


def csv_logger() -> dict[str, Any]:  # arguments of a Trainer that logs each step into a file for logged()
    return {"logger": CSVLogger("logs", name="run", version=0), "log_every_n_steps": 1}


def logged() -> list[dict[str, float]]:  # the rows that were logged, each without what it does not have
    with Path("logs/run/version_0/metrics.csv").open() as file:
        return [{name: float(value) for name, value in row.items() if value} for row in csv.DictReader(file)]


def loader(batches: Sequence[Any]) -> DataLoader:
    """A loader that yields exactly ``batches``, None included."""
    return DataLoader(list(batches), batch_size=None, shuffle=False)


class StatefulLoader:  # knows its place in the data, as torchdata's StatefulDataLoader does
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches
        self.at = self.begin_at = 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        start, self.begin_at = self.begin_at % len(self), 0
        for index in range(start, len(self)):
            self.at = index + 1
            yield self.batches[index]

    def state_dict(self) -> dict[str, int]:
        return {"at": self.at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.begin_at = state["at"]


class Interrupted(Exception):
    """Ends a training."""


class SaveAfter(Callback):  # takes a checkpoint in a hook after so many loader batches of all epochs, and goes on or ends there
    def __init__(
        self, *after: int | None, ends: bool = False, path: str | Path = "inside.ckpt", hook: str = "on_train_batch_end"
    ) -> None:
        self.after, self.ends, self.path = after, ends, str(path)
        setattr(self, hook, self.save)

    def save(self, trainer: pl.Trainer, *_: Any) -> None:
        batches = trainer.fit_loop.epoch_loop.batch_progress.total.ready
        if batches in self.after:
            trainer.save_checkpoint(self.path.format(batches))
            if self.ends:
                raise Interrupted


def limited(x: Tensor, most: int, where: str, error: Callable[[], Exception]) -> Tensor:
    """The same, where there is room for so many rows, in forward or in backward."""

    def fail(_: Tensor) -> None:
        raise error()

    x = x.clone()
    if len(x) > most:
        fail(x) if where == "forward" else x.register_hook(fail)
    return x


class Scalar(pl.LightningModule):
    """One parameter ``w``, loss ``mean(w * x)``: its gradient is the mean of x. ``by_rank`` gives each rank its own loader."""

    def __init__(self, batches: Sequence[Any] = (), by_rank: Sequence[Sequence[Any]] | None = None, lr: float = 1.0) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.batches, self.by_rank, self.lr = batches, by_rank, lr
        self.gradients: list[float] = []  # what on_before_optimizer_step saw

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.gradients.append(self.w.grad.tolist())

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def loss(self, x: Tensor) -> Tensor | None:
        if x.isnan().any():  # how these tests ask for training_step to return None
            return None
        return (self.w * x).mean()

    def train_dataloader(self) -> DataLoader:
        return loader(self.batches if self.by_rank is None else self.by_rank[self.trainer.global_rank])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    @property
    def total(self) -> float:
        """The sum of the gradients stepped so far, as the parameter shows it (also after a fit in other processes)."""
        return -self.w.item() / self.lr


class Distance(Scalar):  # mean squared distance to the numbers
    def loss(self, x: Tensor) -> Tensor | None:
        return None if x.isnan().any() else (self.w - x).square().mean()


def x(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


class Toy(pl.LightningModule):  # the module of most tests: a net, and a loss of the net and a batch
    def __init__(
        self, loss: Callable[[nn.Module, Any], Any], optimizer: str = "sgd", net: Callable[[], nn.Module] = lambda: nn.Linear(4, 4)
    ) -> None:
        super().__init__()
        torch.manual_seed(1)
        self.net, self.loss, self.optimizer = net().double(), loss, optimizer

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


def classified(net: nn.Module, batch: Any, reduction: str = "mean") -> Tensor:  # the cross entropy of labelled batches
    return F.cross_entropy(net(batch[0]), batch[1], reduction=reduction)


class Asking(pl.LightningModule):
    """Before another module: its optimizer asks for the number of steps, as for a OneCycleLR; loaders are there before windows."""

    def configure_optimizers(self) -> Any:
        self.estimate = self.trainer.estimated_stepping_batches
        return super().configure_optimizers()


class Manually(pl.LightningModule):  # before another module: takes that one's steps in manual optimization
    automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        loss = super().training_step(batch, batch_idx)
        self.manual_backward(loss)
        optimizer.step()
        return loss


class ManualToy(Manually, Toy): ...


def labelled(*rows: int, ignored: float = 0.0, seed: int = 1) -> list[list[Tensor]]:
    """A batch of so many rows each: 4 features and one of 4 classes, a share of which is -100."""
    generator, batches = torch.Generator().manual_seed(seed), []
    for number in rows:
        labels = torch.randint(0, 4, (number,), generator=generator)
        labels[torch.rand(number, generator=generator) < ignored] = -100
        batches.append([torch.randn(number, 4, generator=generator, dtype=torch.float64), labels])
    return batches


def joined(batches: Sequence[Any]) -> Any:  # one batch of the rows of several
    first = batches[0]
    if isinstance(first, dict):
        return {name: joined([batch[name] for batch in batches]) for name in first}
    if isinstance(first, (list, tuple)):
        return [joined(parts) for parts in zip(*batches, strict=True)]
    return torch.cat(list(batches))


def fit(module: pl.LightningModule, data: Any = None, *callbacks: Callback, strategy: Any = "accum", **kwargs: Any) -> pl.Trainer:
    """Train on a list of batches, a loader or a data module, also on so many ``ranks`` by DDP, and return the Trainer."""
    fit_arguments = {"ckpt_path": kwargs.pop("ckpt_path")} if "ckpt_path" in kwargs else {}
    if (ranks := kwargs.pop("ranks", 1)) > 1:
        kwargs["devices"], strategy = ranks, ddp() if strategy == "accum" else strategy
    run = trainer(strategy, callbacks=list(callbacks), **kwargs)
    run.fit(module, loader(data) if isinstance(data, list) else data, **fit_arguments)
    return run


def noted(hook: str, what: Callable[[pl.Trainer], Any]) -> tuple[LambdaCallback, list[Any]]:
    """A callback that notes something at each call of a hook, and its notes."""
    notes: list[Any] = []
    return LambdaCallback(**{hook: lambda trainer, *_, **__: notes.append(what(trainer))}), notes


@contextmanager
def warned() -> Iterator[list[str]]:
    """The messages of this package's warnings, as soon as they are there; warnings of others pass unseen."""
    messages: list[str] = []

    def note(message: Warning | str, category: type[Warning], *_: Any) -> None:
        if issubclass(category, AccumulationWarning):
            messages.append(str(message))

    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = note
        yield messages


def seeds_of_a_search(
    seeds: range, in_every_run: int, engine: str | None = None, marks: Sequence[Any] = (), faults: Sequence[int] = ()
) -> list[Any]:
    """Parameters of a test: the first seeds, one of today's date, and those that found faults are exhaustive, the others slow."""
    today = int(f"{datetime.now(timezone.utc):%Y%m%d}")
    often = {*seeds[:in_every_run], *faults}
    kinds = [(seed, pytest.mark.exhaustive if seed in often else pytest.mark.slow) for seed in seeds]
    return [
        pytest.param(*([engine] if engine else []), seed, id=f"{engine or ''}seed{seed:03d}", marks=[kind, *marks])
        for seed, kind in [*kinds, (today, pytest.mark.exhaustive)]
    ]


def said(module: pl.LightningModule, data: Any, *callbacks: Callback, **kwargs: Any) -> str:  # what this package warns of in a fit
    with warned() as messages:
        fit(module, data, *callbacks, **kwargs)
    return "\n".join(messages)


def refused(
    module: pl.LightningModule, data: Any, *callbacks: Callback, error: Any = AccumulationError, match: Any = None, **kwargs: Any
) -> None:
    """A fit ends with this error before its first optimizer step, or after so many ``steps`` (None: any number)."""
    steps = kwargs.pop("steps", 0)
    with pytest.raises(error, match=match):
        fit(module, data, *callbacks, **kwargs)
    assert steps in (module.trainer.global_step, None)


class Hide(torch.autograd.Function):  # a loss behind it cannot be read
    @staticmethod
    def forward(ctx: Any, loss: Tensor) -> Tensor:
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


NONE_LOSS = torch.tensor([math.nan], dtype=torch.float64)


class TinyGPT(nn.Module):  # two causal transformer blocks over bytes; gives logits of shape (batch, length, vocabulary)
    def __init__(self, vocabulary: int = 17, width: int = 16, length: int = 12) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Parameter(torch.randn(length, width) * 0.02)
        self.blocks = nn.ModuleList(
            # no biases: the gradient of a key's bias is 0 but for rounding, and Adam divides it by its own size
            nn.TransformerEncoderLayer(width, 2, 2 * width, dropout=0.0, batch_first=True, norm_first=True, bias=False)
            for _ in range(2)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        length = tokens.shape[1]
        hidden = self.token(tokens) + self.position[:length]
        mask = torch.full((length, length), -math.inf, dtype=hidden.dtype, device=hidden.device).triu(1)
        for block in self.blocks:
            hidden = block(hidden, src_mask=mask)
        return self.head(hidden)


def predictions(batch: dict[str, Tensor]) -> int:
    """So many tokens of a batch are predicted: all that have a label, but the first of each row."""
    return int((batch["labels"][:, 1:] != -100).sum())


def language_loss(logits: Tensor, labels: Tensor) -> Tensor:
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


class Language(pl.LightningModule):  # a causal language model that knows nothing of accumulation
    def __init__(self, optimizer: str = "sgd") -> None:
        super().__init__()
        torch.manual_seed(7)
        self.net = TinyGPT().double()  # a forked fit hands its parameters back in the module's own type
        self.optimizer = optimizer

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return language_loss(self.net(batch["input_ids"]), batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


def sentences(number: int, longest: int = 12, vocabulary: int = 17) -> list[Tensor]:  # sequences of very different lengths
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(2, longest + 1, (number,), generator=generator)
    return [torch.randint(0, vocabulary, (int(length),), generator=generator) for length in lengths]


def pad(rows: Sequence[Tensor]) -> dict[str, Tensor]:  # join sequences into a batch: 0 as padding, -100 in the labels
    inputs = nn.utils.rnn.pad_sequence(list(rows), batch_first=True)
    labels = nn.utils.rnn.pad_sequence(list(rows), batch_first=True, padding_value=-100)
    return {"input_ids": inputs, "labels": labels}


def train_by_hand(
    module: pl.LightningModule, batches: Sequence[Any], epochs: int, loss: Callable[[Any], Tensor] | None = None, **clip: float
) -> pl.LightningModule:
    """The hand-written loop over full batches: the reference that knows no Trainer."""
    optimizer = module.configure_optimizers()
    for _ in range(epochs):
        for batch in batches:
            optimizer.zero_grad()
            (module.training_step(batch, 0) if loss is None else loss(batch)).backward()
            if "norm" in clip:
                nn.utils.clip_grad_norm_(module.parameters(), clip["norm"])
            if "value" in clip:
                nn.utils.clip_grad_value_(module.parameters(), clip["value"])
            optimizer.step()
    return module


class WrapsAnother(torch.optim.Optimizer):  # as Lookahead is often written: ``Optimizer.__init__`` is not called
    def __init__(self, inner) -> None:
        self.inner, self.param_groups, self.state, self.defaults = inner, inner.param_groups, inner.state, inner.defaults

    def step(self, closure=None):
        return self.inner.step(closure)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)


class LooksAhead(torch.optim.SGD):  # takes its gradient ahead of its parameters, as SAM does
    of = staticmethod(lambda parameter: parameter.data)

    def step(self, closure: Any = None) -> Any:
        trained = [self.of(p) for group in self.param_groups for p in group["params"] if p.requires_grad]
        ahead = [0.2 * parameter.sign() for parameter in trained]
        list(map(Tensor.add_, trained, ahead))
        loss = torch.enable_grad()(closure)()
        list(map(Tensor.sub_, trained, ahead))
        super().step()
        return loss
