"""The ways to accumulate that ``compare.py`` compares: one tiny GPT, the same data in the same order, and trainings of it.

Every side trains :class:`GPT` with AdamW or SGD under a linear schedule, in windows of 32 samples, cut into micro-batches of 4, as
its own documentation says to. Its optimizer steps are counted by a hook.
"""

import importlib.util
import random
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from itertools import islice
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from side_by_side import GPT as Network
from side_by_side import IGNORED, docstrings
from support import pad, predictions, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, DistributedSampler

from lightning_accum import GradientAccumulation, SameOrderSampler

GLOBAL_BATCH, MICRO_BATCH, SEED = 32, 4, 5

Batch = dict[str, Tensor]
Texts = list[bytes]


def ranks() -> int:  # processes that train together
    return dist.get_world_size() if dist.is_initialized() else 1


def rank() -> int:  # which of them this is
    return dist.get_rank() if dist.is_initialized() else 0


def window() -> int:  # micro-batches that each rank contributes to a window
    return GLOBAL_BATCH // MICRO_BATCH // ranks()


class GPT(nn.Module):  # a small causal language model over bytes that returns its own mean loss, as those of Hugging Face do
    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            self.net = Network(256, 48, 2, 258)

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(input_ids, labels)}

    def loss(self, input_ids: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
        logits = self.net(input_ids)[:, :-1].flatten(0, 1)
        return F.cross_entropy(logits, labels[:, 1:].flatten(), ignore_index=IGNORED, reduction=reduction)


class CountingGPT(GPT):  # the same, and takes the count of all bytes to predict in the window, which the HF Trainer offers
    loss_type = "ForCausalLM"  # by which the HF Trainer knows that the labels are shifted inside, and counts so

    def forward(self, input_ids: Tensor, labels: Tensor, num_items_in_batch: Any = None, **kwargs: Any) -> dict[str, Tensor]:
        if num_items_in_batch is None:
            return super().forward(input_ids, labels)
        return {"loss": self.loss(input_ids, labels, "sum") / num_items_in_batch}


class SummingGPT(GPT):  # the same, and returns a sum, as the token recipe of Accelerate wants
    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": self.loss(input_ids, labels, "sum")}


@dataclass
class Training:  # what goes in, and what was seen of it
    texts: Texts
    epochs: int
    model: GPT
    announced: int  # scheduler steps after which the learning rate is zero, as the side counts them
    kind: str  # "adamw" or "sgd", which has momentum
    steps: int = 0  # of the optimizer

    def __post_init__(self) -> None:
        parameters = self.model.parameters()
        self.optimizer = AdamW(parameters, lr=1e-2) if self.kind == "adamw" else SGD(parameters, lr=1e-1, momentum=0.9)
        self.schedule = LambdaLR(self.optimizer, lambda step: max(0.0, 1 - step / self.announced))
        self.optimizer.register_step_post_hook(self._stepped)

    def _stepped(self, *args: Any) -> None:
        self.steps += 1


def some_docstrings(number: int) -> Texts:
    """So many of Python's standard library, the same ones at every call, of at most 256 bytes."""
    return [text[:256] for text in random.Random(0).sample(docstrings(), number)]


def orders(samples: int, epochs: int) -> Iterator[list[int]]:
    """The order of every epoch: that of torch's DistributedSampler for one process, which all sides sample by."""
    for epoch in range(epochs):
        yield torch.randperm(samples, generator=torch.Generator().manual_seed(SEED + epoch)).tolist()


def shared_out(texts: Texts, of: tuple[int, int] | None = None) -> DistributedSampler[int]:
    """The samples of this rank, a few twice where the ranks do not divide them, or of all ranks, for libraries that share out."""
    return DistributedSampler(texts, *(of or (ranks(), rank())), shuffle=True, seed=SEED)  # type: ignore[arg-type]


def collate(texts: Texts) -> Batch:  # padded to the longest text, each between two zeros
    return pad([torch.tensor([0, *text, 0]) for text in texts])


def loader(texts: Texts, sampler: Any, batch: int = MICRO_BATCH) -> DataLoader[bytes]:
    """Batches in the sampler's order, padded to the longest text of each."""
    return DataLoader(texts, batch_size=batch, sampler=sampler, collate_fn=collate)  # type: ignore[arg-type]


def full_batch(training: Training) -> None:  # the reference: one process, one batch a step
    for order in orders(len(training.texts), training.epochs):
        for start in range(0, len(order), GLOBAL_BATCH):
            training.optimizer.zero_grad()
            training.model(**collate([training.texts[i] for i in order[start : start + GLOBAL_BATCH]]))["loss"].backward()
            training.optimizer.step()
            training.schedule.step()


def by_hand(training: Training) -> None:
    """The loop of the tutorials: the loss divided by N, ``no_sync`` inside a window, a step at the end of an epoch."""
    sampler = shared_out(training.texts)
    batches = loader(training.texts, sampler)
    model: nn.Module = DistributedDataParallel(training.model) if ranks() > 1 else training.model
    for epoch in range(training.epochs):
        sampler.set_epoch(epoch)
        for index, batch in enumerate(batches, 1):
            is_boundary = index % window() == 0 or index == len(batches)
            with nullcontext() if is_boundary or ranks() == 1 else model.no_sync():  # type: ignore[operator]
                (model(**batch)["loss"] / window()).backward()
            if is_boundary:
                training.optimizer.step()
                training.schedule.step()
                training.optimizer.zero_grad()


class Module(pl.LightningModule):  # what a Trainer gets. It knows nothing of accumulation.
    def __init__(self, training: Training) -> None:
        super().__init__()
        self.model = training.model
        self.training_ = [training]  # in a list, so that it stays out of the module's attributes that Lightning looks through

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.model(**batch)["loss"]

    def configure_optimizers(self) -> Any:
        (training,) = self.training_
        return {"optimizer": training.optimizer, "lr_scheduler": {"scheduler": training.schedule, "interval": "step"}}


def with_trainer(training: Training, sampler: Any, strategy: str, batch: int = MICRO_BATCH, **arguments: Any) -> None:
    """Lightning's Trainer with nothing else in it."""
    run = trainer(strategy if ranks() == 1 else f"{strategy}_ddp".removeprefix("auto_"), devices=ranks(), **arguments)
    run.fit(Module(training), loader(training.texts, sampler, batch))


def with_lightning(training: Training) -> None:  # ``accumulate_grad_batches``
    arguments = {"accumulate_grad_batches": window(), "max_epochs": training.epochs}
    with_trainer(training, shared_out(training.texts), "auto", **arguments)


def with_this_package(training: Training, batch: int = MICRO_BATCH, **policy: Any) -> None:
    """Windows of loader batches, or loader batches split into micro-batches, sorted and trimmed."""
    sampler = SameOrderSampler(training.texts, seed=SEED)  # type: ignore[arg-type]
    with_trainer(training, sampler, "accum", batch, callbacks=[GradientAccumulation(**policy)], max_epochs=training.epochs)


def _without_accelerators_state() -> None:
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()


def _prepared(training: Training) -> tuple[Any, Any, Any, Any, Any, DistributedSampler[int]]:
    """The accelerator, what it made of the model, the optimizer, the batches and the schedule, and the sampler of the batches."""
    from accelerate import Accelerator

    _without_accelerators_state()
    accelerator, sampler = Accelerator(cpu=True, gradient_accumulation_steps=window()), shared_out(training.texts, (1, 0))
    parts = training.model, training.optimizer, loader(training.texts, sampler), training.schedule
    return accelerator, *accelerator.prepare(*parts), sampler


def with_accelerate(training: Training) -> None:
    """``accumulate()``. Its scheduler steps once for each process, for which its documentation has schedules be made longer."""
    accelerator, model, optimizer, batches, schedule, sampler = _prepared(training)
    for epoch in range(training.epochs):
        sampler.set_epoch(epoch)
        for batch in batches:
            with accelerator.accumulate(model):
                accelerator.backward(model(**batch)["loss"])
                optimizer.step()
                schedule.step()
                optimizer.zero_grad()


def with_token_recipe(training: Training) -> None:
    """Accelerate's recipe for counted tokens: the batches of a window in a list, their tokens gathered before its first forward."""
    accelerator, model, optimizer, batches, schedule, sampler = _prepared(training)
    for epoch in range(training.epochs):
        sampler.set_epoch(epoch)
        source = iter(batches)
        while held := list(islice(source, window())):
            count = accelerator.gather(torch.tensor(sum(map(predictions, held)))).sum().item()
            for index, batch in enumerate(held, 1):
                is_boundary = index == len(held)
                with nullcontext() if is_boundary else accelerator.no_sync(model):
                    # backward() divides by the steps, and DDP by the processes
                    loss = model(**batch)["loss"] * window() * accelerator.num_processes / count
                    accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()


def with_hugging_face(training: Training) -> None:
    """The HF Trainer, without clipping. The model takes ``num_items_in_batch`` or does not."""
    import transformers

    _without_accelerators_state()
    sampler = shared_out(training.texts, (1, 0))

    class Sampled(transformers.Trainer):
        def _get_train_sampler(self, *args: Any) -> Any:
            return sampler

    class Ends(transformers.TrainerCallback):
        def on_epoch_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
            sampler.set_epoch(round(state.epoch or 0))

    arguments = transformers.TrainingArguments(
        output_dir="hugging-face", per_device_train_batch_size=MICRO_BATCH, gradient_accumulation_steps=window(),
        num_train_epochs=training.epochs, use_cpu=True, ddp_backend="gloo" if ranks() > 1 else None, max_grad_norm=0.0,
        report_to=[], save_strategy="no", logging_strategy="no", disable_tqdm=True, remove_unused_columns=False,
        dataloader_pin_memory=False, ddp_find_unused_parameters=False,
    )  # fmt: skip
    steps = (training.optimizer, training.schedule)
    data = {"train_dataset": training.texts, "data_collator": collate}
    run = Sampled(training.model, arguments, **data, optimizers=steps, callbacks=[Ends()])
    run.remove_callback(transformers.PrinterCallback)
    run.train()


@dataclass(frozen=True)
class Side:  # a way to train, which may need a package
    name: str
    train: Callable[[Training], None]
    model: type[GPT] = GPT
    needs: str = "torch"

    @property
    def is_ours(self) -> bool:
        return "this package" in self.name

    @property
    def is_there(self) -> bool:
        return importlib.util.find_spec(self.needs) is not None

    def new_training(self, texts: Texts, epochs: int, kind: str) -> Training:
        steps = epochs * -(-len(texts) // GLOBAL_BATCH)
        by_process = ranks() if self.needs == "accelerate" else 1  # whose scheduler takes a step for each process
        return Training(texts, epochs, self.model().double(), steps * by_process, kind)


REFERENCE = Side("full batch", full_batch)
SIDES = (
    Side("hand-written loop", by_hand),
    Side("Lightning", with_lightning),
    Side("Accelerate, `accumulate()`", with_accelerate, needs="accelerate"),
    Side("Accelerate, token recipe", with_token_recipe, SummingGPT, "accelerate"),
    Side("HF Trainer", with_hugging_face, needs="transformers"),
    Side("HF Trainer, model takes `num_items_in_batch`", with_hugging_face, CountingGPT, needs="transformers"),
    Side("**this package**, `GradientAccumulation(N)`", lambda t: with_this_package(t, window=window())),
    Side("**this package**, `micro_batch=4`", lambda t: with_this_package(t, GLOBAL_BATCH // ranks(), micro_batch=MICRO_BATCH)),
)
