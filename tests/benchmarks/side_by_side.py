"""What the benchmarks share: sides that take turns in one process, a loader that reads the clock, models, tables, figures."""

import argparse
import ast
import gc
import inspect
import logging
import statistics
import sys
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import GradientAccumulation

sys.path.insert(0, str(Path(__file__).parents[1]))

from alive import SavedBytes as SavedBytes

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
"""Time that passed, and what this process computed: steadier where others compute, too."""
IGNORED = -100


def be_quiet() -> None:  # one thread, and nothing that a Trainer says
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    for name in ("lightning.pytorch", "lightning.fabric", "lightning.pytorch.utilities.rank_zero"):
        logging.getLogger(name).setLevel(logging.ERROR)


def docstrings() -> list[bytes]:  # those of Python's standard library, each once, in an order that depends on its files alone
    texts: dict[str | None, None] = {}  # a set that keeps its order
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    folder = Path(sysconfig.get_paths()["stdlib"])
    others = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "turtledemo", "__pycache__"}
    for path in sorted(folder.rglob("*.py")):
        if others.isdisjoint(path.relative_to(folder).parts):
            with suppress(OSError, SyntaxError, ValueError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # old escape sequences in other people's strings
                nodes = ast.walk(ast.parse(path.read_bytes()))
                texts |= {ast.get_docstring(node): None for node in nodes if isinstance(node, documented)}
    return [text.encode("utf-8", errors="replace") for text in texts if text]


def command_line(main: Callable[..., None]) -> None:
    """Run ``main`` with the options of the command line: its arguments, each of the type of its default, a string for None."""
    text = sys.modules["__main__"].__doc__
    parser = argparse.ArgumentParser(description=text, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, parameter in inspect.signature(main).parameters.items():
        default, flag = parameter.default, f"--{name.replace('_', '-')}"
        if isinstance(default, bool):
            parser.add_argument(flag, action="store_true")
            continue
        one, nargs = (default[0], "+") if isinstance(default, tuple) else (default, None)
        kind = str if one is None else type(one)
        choices = tuple(CLOCKS) if name == "clock" else None
        parser.add_argument(flag, type=kind, nargs=nargs, choices=choices, default=default, help="default: %(default)s")
    options = vars(parser.parse_args())
    be_quiet()
    print(*(f"{name}={value}" for name, value in options.items() if value is not None), sep=", ", end="; ")
    print(f"Lightning {pl.__version__}, torch {torch.__version__}", flush=True)
    main(**options)


class TimedBatches:
    """A loader which reads a meter before the first batch that counts and after the last; one more shows the end of that."""

    def __init__(self, distinct: Sequence[Any], warm_up: int, counted: int, read: Callable[[], Any]) -> None:
        self._distinct, self._marks, self._read = distinct, (warm_up, warm_up + counted), read
        self.counted, self.readings = counted, [0.0, 0.0]

    def __len__(self) -> int:
        return self._marks[1] + 1

    def __iter__(self) -> Iterator[Any]:
        self.readings = []
        for index in range(len(self)):
            if index in self._marks:
                self.readings.append(self._read())
            yield self._distinct[index % len(self._distinct)]

    @property
    def microseconds(self) -> float:  # of a batch, in the last pass
        start, end = self.readings
        return (end - start) / self.counted * 1e6


def timed(train: Callable[..., Any], make: Callable[[], Any], batches: TimedBatches, **arguments: Any) -> float:
    """Train something new. Returns microseconds of a batch."""
    train(make(), batches, **arguments)
    return batches.microseconds


def interleaved(sides: Mapping[str, Callable[[], Any]], rounds: int) -> dict[str, list[Any]]:
    """What each side returns in each round. They take turns, in an order that turns round; a first round is a warm-up."""
    found: dict[str, list[Any]] = {name: [] for name in sides}
    for round_ in range(-1, rounds):
        for name in sides if round_ % 2 else reversed(sides):
            gc.collect()
            number = sides[name]()
            if round_ >= 0:
                found[name].append(number)
    return found


def show(header: Sequence[str], rows: Iterable[Sequence[object]]) -> None:  # print a table in Markdown
    cells = [[str(cell) for cell in row] for row in (header, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    cells.insert(1, ["-" * max(3, width) for width in widths])
    for row in cells:
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |", flush=True)


def compare(measured: Mapping[str, Mapping[str, Sequence[float]]], unit: str, *others: str) -> None:
    """Print the median of each side of each model, its ratios to others, and quartiles of the last ratio, taken in each round."""
    rows = []
    for model, sides in measured.items():
        medians = {name: statistics.median(numbers) for name, numbers in sides.items()}
        for name, numbers in sides.items():
            times = [f"{medians[name] / medians[other]:.3f}" for other in others]
            ratios = [own / other for own, other in zip(numbers, sides[others[-1]], strict=True)]
            rows.append([model, name, f"{medians[name]:.1f}", *times, quartiles(ratios) if name != others[-1] else ""])
    show(["model", "side", unit, *(f"/ {other}" for other in others), "round by round"], rows)


@contextmanager
def figure(path: str | Path, title: str, told: str = "", size: tuple[float, float] = (8, 4.5), **labels: str) -> Iterator[Any]:
    """Axes to draw into, which are written to a file."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=size, layout="constrained")
    axes = drawn.subplots()
    axes.spines[["top", "right"]].set_visible(False)
    yield axes
    axes.set(**labels)
    axes.set_title(told, loc="left", fontsize=9.5)
    drawn.suptitle(title, fontsize=13, fontweight="bold", x=0.01, horizontalalignment="left")
    drawn.savefig(path, dpi=130)


def quartiles(numbers: Sequence[float]) -> str:  # the median, and the quartiles around it
    low, middle, high = statistics.quantiles(numbers, n=4) if len(numbers) > 1 else [*numbers] * 3
    return f"{middle:.3f} ({low:.3f}..{high:.3f})"


class Module(pl.LightningModule):
    """A network and its loss, ``loss(net, batch)``, trained with SGD. It knows nothing of accumulation."""

    def __init__(self, net: nn.Module, loss: Callable[[nn.Module, Any], Tensor]) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(self.net, batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1e-3)


def classify(net: nn.Module, batch: tuple[Tensor, Tensor]) -> Tensor:  # mean cross entropy of labels
    return F.cross_entropy(net(batch[0]), batch[1])


def labelled(rows: int, features: int, classes: int, number: int) -> list[tuple[Tensor, Tensor]]:  # so many random batches
    generator = torch.Generator().manual_seed(0)
    return [
        (torch.randn(rows, features, generator=generator), torch.randint(classes, (rows,), generator=generator))
        for _ in range(number)
    ]


class Block(nn.Module):  # attention and a feed-forward layer; causal, unless a mask says what may be seen
    def __init__(self, features: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norm, self.norm_2 = heads, nn.LayerNorm(features), nn.LayerNorm(features)
        self.qkv, self.out = nn.Linear(features, 3 * features, bias=False), nn.Linear(features, features)
        self.wide, self.narrow = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)

    def forward(self, hidden: Tensor, mask: Tensor | None = None) -> Tensor:
        heads = self.qkv(self.norm(hidden)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*heads, attn_mask=mask, is_causal=mask is None)
        hidden = hidden + self.out(attended.transpose(1, 2).flatten(2))
        return hidden + self.narrow(F.gelu(self.wide(self.norm_2(hidden))))


class GPT(nn.Module):  # tokens to logits
    def __init__(self, vocabulary: int, features: int, layers: int, length: int, heads: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token, self.position = nn.Embedding(vocabulary, features), nn.Embedding(length, features)
        self.blocks = nn.Sequential(*(Block(features, heads) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(features), nn.Linear(features, vocabulary, bias=False)

    def forward(self, tokens: Tensor, mask: Tensor | None = None) -> Tensor:
        hidden = self.token(tokens) + self.position.weight[: tokens.shape[1]]
        for block in self.blocks:
            hidden = block(hidden) if mask is None else block(hidden, mask)
        return self.head(self.norm(hidden))


def fit(module: pl.LightningModule, batches: Any, n: int = 1, callbacks: Sequence[Any] = (), **policy: Any) -> None:
    """Train in a Trainer with nothing else in it: where there is a policy, with this package, else in Lightning's windows of n."""
    from support import trainer

    accelerator = "gpu" if module.device.type == "cuda" else "cpu"
    if policy:
        run = trainer("accum", callbacks=[GradientAccumulation(**policy), *callbacks], accelerator=accelerator)
    else:
        run = trainer("auto", callbacks=[*callbacks], accumulate_grad_batches=n, accelerator=accelerator)
    run.fit(module, batches)


def by_hand(module: Module, batches: Iterable[Any], window: int, fabric: Any = None) -> None:
    """The loop of the tutorials, in plain torch or on Fabric."""
    net, optimizer, backward = module.net, module.configure_optimizers(), Tensor.backward
    if fabric is not None:
        (net, optimizer), backward = fabric.setup(net, optimizer), fabric.backward
    for index, batch in enumerate(batches, 1):
        backward(module.loss(net, batch) / window)
        if index % window == 0:
            optimizer.step()
            optimizer.zero_grad()


def split_by_hand(
    module: Module, batches: Iterable[Any], cut: Callable[[Any], Iterable[Any]], count: Callable[[Any], float] = lambda b: len(b[0])
) -> None:  # split, weigh, accumulate, step
    optimizer = module.configure_optimizers()
    for batch in batches:
        optimizer.zero_grad()
        total = count(batch)
        for part in cut(batch):
            (module.loss(module.net, part) * (count(part) / total)).backward()
        optimizer.step()


def accelerated(module: Module, batches: Iterable[Any], window: int) -> None:  # Accelerate's ``accumulate()``
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=window)
    net, optimizer = accelerator.prepare(module.net, module.configure_optimizers())
    for batch in batches:
        with accelerator.accumulate(net):
            accelerator.backward(module.loss(net, batch))
            optimizer.step()
            optimizer.zero_grad()
