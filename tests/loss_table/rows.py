"""A loss of the table, the data that losses are made of, and the module that trains with one."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn

Batch = dict[str, Tensor]
Function = Callable[[Any, Any, Any], Any]
"""Of the network's outputs, the batch (an entry is an attribute), and the module, whose parameters may be used."""

ROWS = 12
CLASSES = 4


class Kind(Enum):  # what a window must do with a loss
    ADDS_UP = "a sum, or a mean with a weight: exact"
    TERMS = "several means with weights of their own: exact where each is weighed by itself, else a warning"
    OF_A_MEAN = "a function of a mean: exact, or an error"
    BATCH = "no weight helps: an error or a warning"


@dataclass(frozen=True)
class Loss:  # a row of the table
    name: str  # is unique
    family: str  # where it comes from
    function: Function
    fields: tuple[str, ...]  # of the batch; the first is the network's input
    kind: Kind  # what a window must do with it
    weight: Any = "auto"
    refused: str = ""  # why an error is all right although the loss adds up; empty where it is not
    limit: float = 1e-12  # of the relative error, by rounding in the type that the loss computes in


class Table:  # the losses of a family: a method for each kind adds one, of a name, the fields of its batch and the function
    def __init__(self, family: str) -> None:
        self.family = family
        self.losses: list[Loss] = []
        self.adds_up, self.terms, self.of_a_mean, self.batch = (partial(self._add, kind) for kind in Kind)

    def __iter__(self) -> Iterator[Loss]:
        return iter(self.losses)

    def _add(self, kind: Kind, name: str, fields: str, function: Function, **arguments: Any) -> None:
        self.losses.append(Loss(f"{self.family}: {name}", self.family, function, tuple(fields.split()), kind, **arguments))


class Net(nn.Module):  # two layers over the last dimension, and parameters that a loss may use
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Linear(4, 6)
        self.head = nn.Linear(6, CLASSES)
        self.log_scales = nn.Parameter(torch.tensor([0.3, -0.2]))
        self.proxies = nn.Parameter(torch.randn(CLASSES, CLASSES))
        self.temperature = nn.Parameter(torch.tensor(1.5))
        self.bias = nn.Parameter(torch.tensor(-0.5))
        self.register_buffer("center", torch.randn(CLASSES))
        self.register_buffer("queue", torch.randn(7, CLASSES))
        teacher = nn.Linear(4, CLASSES)
        self.teacher = teacher.requires_grad_(False)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        """Of width 4, at the place of the channels where ``x`` is an image."""
        out = self.head(self.body(x).tanh())
        return out.movedim(-1, 1) if x.dim() == 4 else out


class Trained(pl.LightningModule):  # trains a network with a loss of the table, and keeps the gradients that the optimizer got
    def __init__(self, loss: Loss) -> None:
        super().__init__()
        self.net = Net()
        self.row = loss
        self.gradients: list[list[Tensor]] = []
        self.before_step: Callable[[], None] = lambda: None

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        return self.loss(batch)

    def loss(self, batch: Batch) -> Any:
        return self.row.function(self.net(batch[self.row.fields[0]]), SimpleNamespace(**batch), self.net)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.before_step()
        self.gradients.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in self.trained])

    @property
    def trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self.parameters() if parameter.requires_grad]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.trained, lr=0.1)


def data(loss: Loss, seed: int = 0) -> Batch:
    """Twelve rows of what ``loss`` needs."""
    return {field: FIELDS[field](torch.Generator().manual_seed(100 * seed + index)) for index, field in enumerate(loss.fields)}


def rows(loss: Loss, seed: int = 0, number: int = ROWS) -> list[Batch]:  # the first of these rows, one by one
    batch = data(loss, seed)
    return [{field: values[row] for field, values in batch.items()} for row in range(number)]


def part(batch: Batch, start: int, end: int) -> Batch:  # some rows
    return {name: value[start:end] for name, value in batch.items()}


# fmt: off
def _normal(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda g: torch.randn(ROWS, *shape, generator=g, dtype=torch.float64)

def _uniform(*shape: int, low: float = 0.0, high: float = 1.0) -> Callable[[torch.Generator], Tensor]:
    return lambda g: low + (high - low) * torch.rand(ROWS, *shape, generator=g, dtype=torch.float64)

def _integers(number: int, *shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda g: torch.randint(0, number, (ROWS, *shape), generator=g)

def _labels(g: torch.Generator) -> Tensor:
    labels = torch.randint(0, CLASSES, (ROWS,), generator=g)
    labels[torch.tensor([1, 4, 7])] = -100
    return labels

def _mask(g: torch.Generator) -> Tensor:
    mask = torch.rand(ROWS, generator=g) < 0.7
    mask[0], mask[1], mask[7] = True, False, False  # the micro-batch of a single row has nothing
    return mask

def _tokens(g: torch.Generator) -> Tensor:
    tokens = torch.randint(0, CLASSES, (ROWS, 5), generator=g)
    for row, length in enumerate(torch.randint(2, 6, (ROWS,), generator=g).tolist()):
        tokens[row, length:] = -100
    return tokens

def _lengths_as_mask(g: torch.Generator) -> Tensor:
    return torch.arange(5) < torch.randint(1, 6, (ROWS, 1), generator=g)

def _class_map(g: torch.Generator) -> Tensor:
    labels = torch.randint(0, CLASSES, (ROWS, 3, 3), generator=g)
    return labels.masked_fill(torch.rand(ROWS, 3, 3, generator=g) < 0.2, 255)

def _boxes(g: torch.Generator) -> Tensor:
    corner = torch.rand(ROWS, 2, generator=g, dtype=torch.float64)
    return torch.cat((corner, corner + 0.5 + torch.rand(ROWS, 2, generator=g, dtype=torch.float64)), 1)

def _probabilities(*shape: int) -> Callable[[torch.Generator], Tensor]:
    return lambda g: torch.randn(ROWS, *shape, generator=g, dtype=torch.float64).softmax(-1)

FIELDS: dict[str, Callable[[torch.Generator], Tensor]] = {
    "x": _normal(4),  # the inputs: vectors, sequences, images
    "s": _normal(5, 4),
    "i": _normal(3, 3, 4),
    "v": _normal(4),  # another view
    "z": _normal(4),  # negatives
    "t": _integers(CLASSES),
    "ignored": _labels,
    "y": _normal(4),
    "pos": _uniform(4, low=0.5, high=2.0),
    "p": _probabilities(4),
    "q": lambda g: (torch.rand(ROWS, 4, generator=g) < 0.5).double(),
    "w": _uniform(low=0.2, high=2.0),
    "sign": lambda g: torch.randint(0, 2, (ROWS,), generator=g).double() * 2 - 1,
    "mask": _mask,
    "counts": lambda g: torch.randint(0, 6, (ROWS, 4), generator=g).double(),
    "tokens": _tokens,
    "words": _integers(CLASSES, 5),
    "valid": _lengths_as_mask,
    "chosen": lambda g: torch.rand(ROWS, 5, generator=g) < 0.4,
    "p5": _probabilities(5, 4),
    "y5": _normal(5, 4),
    "map": _integers(CLASSES, 3, 3),
    "map255": _class_map,
    "masks": lambda g: (torch.rand(ROWS, 4, 3, 3, generator=g) < 0.4).double(),
    "image": _normal(4, 3, 3),
    "boxes": _boxes,
    "positive": lambda g: torch.rand(ROWS, 4, generator=g) < 0.4,
    "advantage": _normal(),
    "old": _uniform(low=-2.0, high=-0.5),
    "reward": _normal(),
    "time": _uniform(low=0.1, high=5.0),
    "event": lambda g: (torch.rand(ROWS, generator=g) < 0.6).double(),
}
