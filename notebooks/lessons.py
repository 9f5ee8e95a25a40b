"""What the notebooks share: a quiet Trainer, the full batch by hand, distances, figures, and a small language model."""

import logging
import math
import os
import statistics
import subprocess
import sys
import warnings
from contextlib import contextmanager
from pathlib import Path
from textwrap import fill

os.environ["OMP_NUM_THREADS"] = "1"  # a process that is forked cannot use threads that were started before
os.environ["CUDA_VISIBLE_DEVICES"] = ""
warnings.filterwarnings("ignore")  # said() shows those that teach something

import matplotlib.pyplot as plt
import torch
from lightning import pytorch as pl
from matplotlib.colors import ListedColormap
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

logging.getLogger("lightning.fabric").setLevel(logging.WARNING)
logging.getLogger("torch.multiprocessing").setLevel(logging.ERROR)
torch.set_num_threads(1)
plt.rcParams.update({"figure.dpi": 90, "axes.spines.top": False, "axes.spines.right": False, "axes.titlelocation": "left"})
GREY, BLUE, ORANGE = "0.75", "#0072B2", "#D55E00"  # the full batch, this package, plain accumulation


class StartLine(logging.Handler):
    """Of all that is logged, print this package's line at the start of a training."""

    def emit(self, record):
        if "accumulating " in record.getMessage():
            print(fill(" ".join(record.getMessage().split()), 110), flush=True)


log = logging.getLogger("lightning.pytorch")
log.handlers, log.propagate = [StartLine()], False
log.setLevel(logging.WARNING)


@contextmanager
def said(about="accum"):
    """Print what the package says: its line at the start, and warnings about this."""
    log.setLevel(logging.INFO)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        yield
    log.setLevel(logging.WARNING)
    for text in dict.fromkeys(str(warning.message) for warning in caught if about in str(warning.message)):
        print(fill(f"Warning: {text}", 110))


@contextmanager
def refused(error=ValueError):
    """Print the error with which the package refuses to go on."""
    try:
        yield
    except error as message:
        print(fill(f"{type(message).__name__}: {message}", 110))
    else:
        raise AssertionError("nothing was refused")


def trainer(*callbacks, strategy="accum", **arguments):
    """A Trainer on the CPU that writes and prints nothing."""
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        os.environ.pop("MASTER_PORT", None)  # of the training before: Lightning looks for a free port
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}
    own = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "num_sanity_val_steps": 0}
    return pl.Trainer(strategy=strategy, callbacks=list(callbacks), **{**quiet, **own, **arguments})


def batches_as_they_are(batches):
    return DataLoader(batches, batch_size=None)


def train_by_hand(module, batches):
    """The reference: one optimizer step on each full batch, in a plain loop. Returns the losses."""
    optimizer, losses = module.configure_optimizers(), []
    for batch in batches:
        optimizer.zero_grad()
        loss = module.training_step(batch, 0)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def distance(module, reference):
    """How far the parameters are from the reference's, divided by the reference's total change since its start."""
    found, wanted, start = (
        torch.cat([parameter.detach().flatten() for parameter in each.parameters()]).double()
        for each in (module, reference, type(reference)())
    )
    return ((found - wanted).norm() / (wanted - start).norm()).item()


def show_distances(distances, title):
    """One dot a way to train, on a logarithmic axis on which rounding is marked."""
    _, axes = plt.subplots(figsize=(8, 0.38 * len(distances) + 1.2), layout="constrained")
    axes.axvspan(1e-18, 1e-12, color="0.93")
    axes.text(2e-18, -0.8, "rounding in float64", fontsize=9, color="0.4", va="center")
    for place, found in enumerate(distances.values()):
        colour = BLUE if found < 1e-12 else ORANGE
        axes.plot(max(found, 1e-17), place, "o", color=colour, markersize=9)
        axes.text(max(found, 1e-17) * 3, place, f"{found:.0e}" if found else "0", va="center", color=colour)
    axes.set_yticks(range(len(distances)), distances)
    axes.set(xscale="log", xlim=(1e-18, 1e3), ylim=(len(distances) - 0.4, -1.4))
    axes.set(xlabel="distance from the full batch, divided by its total change", title=title)
    plt.show()


def show_curves(full, ours, plain, title, ylabel, xlabel="optimizer step"):
    """The full batch's curve, broad and grey; this package's upon it; plain accumulation's."""
    _, axes = plt.subplots(figsize=(8, 3.8), layout="constrained")
    axes.plot(range(1, len(full) + 1), full, color=GREY, linewidth=9, label="full batch")
    for curves, colour, markers in ((ours, BLUE, "os^Dv<"), (plain, ORANGE, "xX+")):
        for (name, values), marker in zip(curves.items(), markers, strict=False):
            style = {"color": colour, "marker": marker, "markerfacecolor": "none", "linewidth": 1.2, "label": name}
            axes.plot(range(1, len(values) + 1), values, **style)
    axes.set(xlabel=xlabel, ylabel=ylabel, title=title)
    axes.legend(frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    plt.show()


def show_steps(title, plain, ours, full):
    """Each bar a token: its height is the token's own gradient, its width its part in the step, the area what is stepped."""
    figure, panels = plt.subplots(1, 2, figsize=(10, 3.4), sharey=True, layout="constrained")
    names = ("Lightning", "lightning_accum")
    for axes, name, colour, (widths, heights, first) in zip(panels, names, (ORANGE, BLUE), (plain, ours), strict=True):
        left, gradient = 0.0, sum(width * height for width, height in zip(widths, heights, strict=True))
        for position, (width, height) in enumerate(zip(widths, heights, strict=True)):
            alpha = 0.9 if position < first else 0.5
            axes.bar(left, height, width, align="edge", color=colour, alpha=alpha, edgecolor="white")
            left += width
        axes.axhline(full, color=GREY, linewidth=6, zorder=0)
        axes.axhline(gradient, color="black", linewidth=1.5, linestyle="--")
        axes.text(1.02, gradient + 0.3, f"{gradient:.4g}", fontsize=14, fontweight="bold")
        axes.set(xlim=(0, 1.2), xlabel="part in the optimizer step", xticks=[0, 0.5, 1])
        axes.set_title(name, color=colour, fontweight="bold")
    panels[0].set_ylabel("gradient of a token")
    figure.suptitle(f"{title}\n(grey: the full batch; dashed: what the optimizer gets)", fontsize=12)
    plt.show()


def show_rates(panels):
    """Learning rates: of the full batch, of this package, of Lightning."""
    _, all_axes = plt.subplots(1, len(panels), figsize=(12, 3.6), sharey=True, layout="constrained")
    for axes, (title, (full, ours, lightning)) in zip(all_axes, panels.items(), strict=True):
        axes.plot(*full, color=GREY, linewidth=8, drawstyle="steps-post", label="full batch")
        axes.plot(*lightning, color=ORANGE, marker="X", drawstyle="steps-post", label="Lightning")
        axes.plot(*ours, color=BLUE, marker="o", drawstyle="steps-post", label="lightning_accum")
        axes.set(title=title, xlabel="steps or batches so far")
    all_axes[0].set(ylabel="learning rate", ylim=(0, None))
    all_axes[0].legend(frameon=False)
    plt.show()


def show_batches(pictures):
    """Masks of micro-batches, below one another: tokens are blue, padding is grey."""
    columns = max(mask.shape[1] for masks in pictures.values() for mask in masks)
    _, all_axes = plt.subplots(1, len(pictures), figsize=(11, 4), layout="constrained")
    for axes, (name, masks) in zip(all_axes, pictures.items(), strict=True):
        picture, top = torch.full((sum(len(mask) + 2 for mask in masks) - 2, columns), 2), 0
        for mask in masks:
            picture[top : top + len(mask), : mask.shape[1]] = mask
            top += len(mask) + 2
        padding = 1 - sum(mask.sum().item() for mask in masks) / sum(mask.numel() for mask in masks)
        axes.imshow(picture, ListedColormap(["0.86", BLUE, "white"]), vmin=0, vmax=2, aspect="auto", interpolation="nearest")
        axes.set(title=f"{name}:\n{padding:.0%} is padding", xlabel="position", yticks=[])
    plt.show()


def show_amounts(amounts, title, xlabel):
    """Horizontal bars, the first one grey."""
    _, axes = plt.subplots(figsize=(8, 0.4 * len(amounts) + 1.1), layout="constrained")
    axes.barh(list(amounts), list(amounts.values()), 0.65, color=[GREY] + [BLUE] * (len(amounts) - 1))
    for place, amount in enumerate(amounts.values()):
        axes.text(amount, place, f"  {amount:,.0f}" if amount > 100 else f"  {amount:.3g}", va="center")
    axes.invert_yaxis()
    axes.margins(x=0.14)
    axes.set(title=title, xlabel=xlabel)
    plt.show()


class Speed(pl.Callback):
    """The tokens per second of processor time, in each loader batch but the first."""

    def __init__(self, clock):
        self.clock, self.speeds = clock, []

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.start = self.clock()

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if batch_idx > 0:
            self.speeds.append(batch["attention_mask"].sum().item() / (self.clock() - self.start))

    @property
    def median(self):
        return statistics.median(self.speeds)


class Activations(pl.Callback):
    """Counts, as a context, the bytes that wait for their backward; each storage once, parameters left out.

    As a callback it forgets the peak of the loader batch before.
    """

    def on_train_batch_start(self, trainer, pl_module, batch, batch_idx):
        self.peak = self.now

    def __init__(self, module):
        self.now = self.peak = 0
        self.holders = {parameter.untyped_storage().data_ptr(): 1 for parameter in module.parameters()}
        self.hooks = torch.autograd.graph.saved_tensors_hooks(lambda tensor: Kept(tensor, self), lambda kept: kept.tensor)

    def __enter__(self):
        self.hooks.__enter__()
        return self

    def __exit__(self, *error):
        self.hooks.__exit__(*error)

    def hold(self, storage, number):
        held = self.holders.get(storage.data_ptr(), 0) + number
        self.holders[storage.data_ptr()] = held
        if held == (number > 0):  # the first that holds it, or the last that held it
            self.now += number * storage.nbytes()
            self.peak = max(self.peak, self.now)


class Kept:
    def __init__(self, tensor, activations):
        self.tensor, self.activations = tensor.detach(), activations
        activations.hold(tensor.untyped_storage(), 1)

    def __del__(self):
        self.activations.hold(self.tensor.untyped_storage(), -1)


class StatefulLoader(DataLoader):
    """Knows its place in the data, as torchdata's StatefulDataLoader does."""

    place = first = 0

    def __iter__(self):
        first, self.first = self.first, 0
        for index, batch in enumerate(super().__iter__()):
            self.place = index + 1
            if index >= first:
                yield batch

    def state_dict(self):
        return {"place": self.place}

    def load_state_dict(self, state):
        self.first = state["place"] % len(self)


VOCABULARY = 20
_generator = torch.Generator().manual_seed(0)
_lengths = torch.randint(2, 17, (60,), generator=_generator).tolist()
_strides = torch.randint(1, 4, (60,), generator=_generator).tolist()
SENTENCES = [torch.arange(length) * stride % VOCABULARY for length, stride in zip(_lengths, _strides, strict=True)]


def pad(sentences):
    inputs = pad_sequence(sentences, batch_first=True)
    return {"input_ids": inputs, "labels": pad_sequence(sentences, batch_first=True, padding_value=-100)}


class Language(pl.LightningModule):
    """A small causal transformer in float64, whose loss is a mean over tokens."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True, norm_first=True)
        encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        parts = {"token": nn.Embedding(VOCABULARY, 32), "encoder": encoder, "head": nn.Linear(32, VOCABULARY)}
        self.net = nn.ModuleDict(parts).double()

    def configure_model(self):
        if self.device_mesh is not None:  # FSDP2
            for part in (*self.net["encoder"].layers, self.net["token"], self.net["head"]):
                fully_shard(part, mesh=self.device_mesh["data_parallel"])

    def training_step(self, batch, batch_idx):
        tokens, labels = batch["input_ids"], batch["labels"]
        mask = nn.Transformer.generate_square_subsequent_mask(tokens.shape[1], dtype=torch.float64)
        logits = self.net["head"](self.net["encoder"](self.net["token"](tokens), mask, is_causal=True))
        return cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())

    def configure_optimizers(self):
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=0.9)


def torchrun(script, *arguments, ranks=2):
    """Run a script of this folder on several ranks."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", str(ranks)]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MASTER_")}
    path = str(Path(__file__).parent / script)
    run = subprocess.run([*command, path, *arguments], env=environment, capture_output=True, text=True, timeout=200)
    assert run.returncode == 0, run.stdout[-3000:] + run.stderr[-3000:]


def half_circles(rows, seed):
    """Points on two half circles, and noise for a generator."""
    generator = torch.Generator().manual_seed(seed)
    angle = math.pi * torch.rand(rows, generator=generator, dtype=torch.float64)
    side = 2.0 * (torch.rand(rows, generator=generator) < 0.5) - 1
    circles = 1.5 * torch.stack((side * angle.cos() - 0.5 * side, side * angle.sin() - 0.25 * side), 1)
    spread = 0.05 * torch.randn(rows, 2, generator=generator, dtype=torch.float64)
    return circles + spread, torch.randn(rows, 4, generator=generator, dtype=torch.float64)
