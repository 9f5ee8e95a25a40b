"""A GPT of 124M parameters at length 1,024 on a GPU: tokens per second and peak memory of each way to accumulate.

Every side takes optimizer steps on the same rows: a hand-written loop, Lightning and the Hugging Face Trainer accumulate
micro-batches, and so do windows of this package; the others have the loader yield the whole batch, and split it, run its blocks row
by row (``row_wise=``) or offload it. Tokens per second are the median over the rounds, of all steps after the first two; the peak
is that of the allocator in these, and 0 where there is no GPU.

    python tests/benchmarks/gpu.py                                                       # one GPU, bf16-mixed
    python tests/benchmarks/gpu.py --precision 16-mixed
    python tests/benchmarks/gpu.py --device cpu --layers 2 --features 32 --length 16 --vocabulary 99 --rounds 1   # does it run?
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import statistics
import time
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import lightning.pytorch as pl
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

from lightning_accum import GradientAccumulation

STEPS, WARM_UP = 8, 2
Size = argparse.Namespace


class Block(nn.Module):
    """Attention and a feed-forward layer."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.heads = max(1, features // 64)
        self.norm, self.norm_2 = nn.LayerNorm(features), nn.LayerNorm(features)
        self.qkv, self.out = nn.Linear(features, 3 * features), nn.Linear(features, features)
        self.wide, self.narrow = nn.Linear(features, 4 * features), nn.Linear(4 * features, features)

    def forward(self, hidden: Tensor) -> Tensor:
        rows, length, features = hidden.shape
        qkv = self.qkv(self.norm(hidden)).view(rows, length, 3, self.heads, features // self.heads).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(*qkv, is_causal=True).transpose(1, 2).reshape(rows, length, features)
        hidden = hidden + self.out(attended)
        return hidden + self.narrow(F.gelu(self.wide(self.norm_2(hidden))))


class GPT(nn.Module):
    """Returns its own mean loss, as models of Hugging Face do."""

    def __init__(self, size: Size) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.token, self.position = nn.Embedding(size.vocabulary, size.features), nn.Embedding(size.length, size.features)
        self.blocks = nn.Sequential(*(Block(size.features) for _ in range(size.layers)))
        self.norm, self.head = nn.LayerNorm(size.features), nn.Linear(size.features, size.vocabulary, bias=False)
        self.head.weight = self.token.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.norm(self.blocks(self.token(input_ids) + self.position.weight)))
        return {"loss": F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)}


class Module(pl.LightningModule):
    """Knows nothing of accumulation."""

    def __init__(self, size: Size, meter: Meter) -> None:
        super().__init__()
        self.net, self.meter = GPT(size), meter

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        return self.net(**batch)["loss"]

    def configure_optimizers(self) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-4)
        optimizer.register_step_post_hook(self.meter.end_step)
        return optimizer


class Meter:
    """Tokens per second, and the peak, of the steps after the first two."""

    def __init__(self, size: Size) -> None:
        self.size, self.steps, self.speed, self.peak = size, 0, 0.0, 0
        self._began = 0.0

    def end_step(self, *_: Any) -> None:
        """An optimizer has stepped."""
        self.steps += 1
        if self.steps not in (WARM_UP, STEPS):
            return
        if self.size.device == "cuda":
            torch.cuda.synchronize()
        if self.steps == WARM_UP:
            self._began = time.perf_counter()
            if self.size.device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            return
        tokens = (STEPS - WARM_UP) * self.size.rows * self.size.length
        self.speed = tokens / (time.perf_counter() - self._began)
        self.peak = torch.cuda.max_memory_allocated() if self.size.device == "cuda" else 0


def rows(size: Size) -> list[dict[str, Tensor]]:
    """Labels of a prompt are ignored, so micro-batches weigh differently."""
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(STEPS * size.rows):
        tokens = torch.randint(size.vocabulary, (size.length,), generator=generator)
        prompt = torch.arange(size.length) < index * 7 % (size.length // 2)
        found.append({"input_ids": tokens, "labels": tokens.masked_fill(prompt, -100)})
    return found


def by_lightning(size: Size, meter: Meter, in_loader: int, window: int, **policy: Any) -> None:
    """A Trainer; of this package where there is a policy."""
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    ours = [GradientAccumulation(window, **policy)] if policy else []
    run = pl.Trainer(
        accelerator="gpu" if size.device == "cuda" else "cpu",
        devices=1,
        strategy="accum" if policy else "auto",
        precision=size.precision,
        max_epochs=1,
        accumulate_grad_batches=1 if policy else window,
        callbacks=ours,
        **quiet,
    )
    run.fit(Module(size, meter), DataLoader(rows(size), in_loader))


def by_hand(size: Size, meter: Meter) -> None:
    """The loop that divides by the number of micro-batches."""
    kind = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(size.precision)
    module = Module(size, meter).to(size.device)
    optimizer, number = module.configure_optimizers(), size.rows // size.micro_batch
    scaler = torch.amp.GradScaler(size.device, enabled=size.precision == "16-mixed")
    for index, batch in enumerate(DataLoader(rows(size), size.micro_batch), 1):
        batch = {key: value.to(size.device) for key, value in batch.items()}
        with nullcontext() if kind is None else torch.autocast(size.device, kind):
            loss = module.training_step(batch, 0) / number
        scaler.scale(loss).backward()
        if index % number == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()


def by_hugging_face(size: Size, meter: Meter) -> None:
    """The Trainer of transformers."""
    import tempfile

    from transformers import Trainer, TrainingArguments, default_data_collator

    class Optimized(Trainer):
        def create_optimizer(self, *_: Any) -> torch.optim.Optimizer:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
            self.optimizer.register_step_post_hook(meter.end_step)
            return self.optimizer

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            per_device_train_batch_size=size.micro_batch,
            gradient_accumulation_steps=size.rows // size.micro_batch,
            max_steps=STEPS,
            report_to=[],
            save_strategy="no",
            logging_steps=10**6,
            disable_tqdm=True,
            bf16=size.precision == "bf16-mixed",
            fp16=size.precision == "16-mixed",
            use_cpu=size.device == "cpu",
        )
        Optimized(GPT(size), arguments, train_dataset=rows(size), data_collator=default_data_collator).train()


def sides(size: Size) -> dict[str, Callable[[Meter], None]]:
    """By name; each trains, and its meter looks on."""
    number, train = size.rows // size.micro_batch, partial(by_lightning, size)
    blocks = [f"net.blocks.{index}" for index in range(size.layers)]
    found: dict[str, Callable[[Meter], None]] = {
        "whole batch, Lightning": partial(train, in_loader=size.rows, window=1),
        "by hand": partial(by_hand, size),
        "Lightning": partial(train, in_loader=size.micro_batch, window=number),
        "window": partial(train, in_loader=size.micro_batch, window=number, check=False),
        "split": partial(train, in_loader=size.rows, window=1, micro_batch=size.micro_batch, check=False),
        "auto": partial(train, in_loader=size.rows, window=1, micro_batch="auto", check=False),
        "row_wise": partial(train, in_loader=size.rows, window=1, micro_batch=size.micro_batch, row_wise=blocks, check=False),
        "offload": partial(train, in_loader=size.rows, window=1, micro_batch="offload", check=False),
    }
    if importlib.util.find_spec("transformers") is not None and importlib.util.find_spec("accelerate") is not None:
        found["Hugging Face Trainer"] = partial(by_hugging_face, size)
    return found


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--precision", default="bf16-mixed", help="of Lightning's (default: bf16-mixed)")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--features", type=int, default=768)
    parser.add_argument("--vocabulary", type=int, default=50_257)
    parser.add_argument("--length", type=int, default=1_024)
    parser.add_argument("--rows", type=int, default=32, help="of an optimizer step (default: 32)")
    parser.add_argument("--micro-batch", type=int, default=4, help="rows (default: 4)")
    parser.add_argument("--rounds", type=int, default=3)
    size = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    found: dict[str, list[Meter]] = {name: [] for name in sides(size)}
    for _ in range(size.rounds):
        for name, train in sides(size).items():
            meter = Meter(size)
            train(meter)
            if meter.steps != STEPS:
                raise AssertionError(f"{name} took {meter.steps} steps instead of {STEPS}")
            found[name].append(meter)
            if size.device == "cuda":
                torch.cuda.empty_cache()
    parameters = sum(parameter.numel() for parameter in GPT(size).parameters())
    print(f"{parameters:,d} parameters, {size.rows} rows of {size.length}, micro-batches of {size.micro_batch}, {size.precision}\n")
    print("| way | tokens per second | peak, MiB |\n| --- | --- | --- |")
    for name, meters in found.items():
        print(f"| {name} | {statistics.median(m.speed for m in meters):,.0f} | {max(m.peak for m in meters) / 2**20:,.0f} |")


if __name__ == "__main__":
    main()
