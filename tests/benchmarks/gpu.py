"""A GPT of 124M parameters at length 1,024 on a GPU: tokens per second and peak memory of each way to accumulate.

Every side takes optimizer steps on the same rows: a hand-written loop, Lightning and the Hugging Face Trainer accumulate
micro-batches, and so do windows of this package; the others have the loader yield the whole batch, and split it, run its blocks row
by row (``row_wise=``) or offload it. Tokens per second are the median over the rounds, of all steps after the first two; the peak
is that of the allocator in these, and 0 where there is no GPU.

    python tests/benchmarks/gpu.py                                                       # one GPU, bf16-mixed
    python tests/benchmarks/gpu.py --precision 16-mixed
    python tests/benchmarks/gpu.py --device cpu --layers 2 --features 64 --length 16 --vocabulary 99 --rounds 1   # does it run?
"""

import importlib.util
import statistics
import time
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from side_by_side import GPT, IGNORED, Module, command_line, interleaved, show
from support import language_loss, trainer
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_accum import GradientAccumulation

STEPS, WARM_UP = 8, 2
Size = SimpleNamespace  # the options of the command line


class Tied(GPT):  # returns its own mean loss, as models of Hugging Face do
    def __init__(self, size: Size) -> None:
        super().__init__(size.vocabulary, size.features, size.layers, size.length, max(1, size.features // 64))
        self.head.weight = self.token.weight

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        return {"loss": language_loss(super().forward(input_ids), labels)}


class Meter:  # tokens per second, and the peak, of the steps after the first two
    def __init__(self, size: Size) -> None:
        self.size, self.steps, self.speed, self.peak, self._began = size, 0, 0.0, 0, 0.0

    def watched(self, parameters: Any) -> torch.optim.Optimizer:  # an optimizer whose steps are counted
        optimizer = torch.optim.AdamW(parameters, lr=1e-4)
        optimizer.register_step_post_hook(self._end_step)
        return optimizer

    def _end_step(self, *_: Any) -> None:
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


class Watched(Module):
    def __init__(self, size: Size, meter: Meter) -> None:
        super().__init__(Tied(size), lambda net, batch: net(**batch)["loss"])
        self._meter = meter

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self._meter.watched(self.parameters())


def rows(size: Size) -> list[dict[str, Tensor]]:  # labels of a prompt are ignored, so micro-batches weigh differently
    generator = torch.Generator().manual_seed(1)
    found = []
    for index in range(STEPS * size.rows):
        tokens = torch.randint(size.vocabulary, (size.length,), generator=generator)
        prompt = torch.arange(size.length) < index * 7 % (size.length // 2)
        found.append({"input_ids": tokens, "labels": tokens.masked_fill(prompt, IGNORED)})
    return found


def by_lightning(size: Size, meter: Meter, in_loader: int, n: int = 1, **policy: Any) -> None:
    """A Trainer; of this package where there is a policy."""
    run = trainer(
        "accum" if policy else "auto",
        accelerator="gpu" if size.device == "cuda" else "cpu",
        precision=size.precision,
        accumulate_grad_batches=n,
        callbacks=[GradientAccumulation(**policy, check=False)] if policy else [],
    )
    run.fit(Watched(size, meter), DataLoader(rows(size), in_loader))


def by_hand(size: Size, meter: Meter) -> None:  # the loop that divides by the number of micro-batches
    kind = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}.get(size.precision)
    module = Watched(size, meter).to(size.device)
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


def by_hugging_face(size: Size, meter: Meter) -> None:  # the Trainer of transformers
    import tempfile

    from transformers import Trainer, TrainingArguments, default_data_collator

    class Optimized(Trainer):
        def create_optimizer(self, *_: Any) -> torch.optim.Optimizer:
            self.optimizer = meter.watched(self.model.parameters())
            return self.optimizer

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, per_device_train_batch_size=size.micro_batch, gradient_accumulation_steps=size.rows // size.micro_batch,
            max_steps=STEPS, report_to=[], save_strategy="no", logging_steps=10**6, disable_tqdm=True,
            bf16=size.precision == "bf16-mixed", fp16=size.precision == "16-mixed", use_cpu=size.device == "cpu",
        )  # fmt: skip
        Optimized(Tied(size), arguments, train_dataset=rows(size), data_collator=default_data_collator).train()


def sides(size: Size) -> dict[str, Callable[[Meter], None]]:  # by name; each trains, and its meter looks on
    number, micro_batch = size.rows // size.micro_batch, size.micro_batch
    in_parts, whole = (partial(by_lightning, size, in_loader=in_loader) for in_loader in (micro_batch, size.rows))
    blocks = [f"net.blocks.{index}" for index in range(size.layers)]
    found: dict[str, Callable[[Meter], None]] = {
        "whole batch, Lightning": whole,
        "by hand": partial(by_hand, size),
        "Lightning": partial(in_parts, n=number),
        "window": partial(in_parts, window=number),
        "split": partial(whole, micro_batch=micro_batch),
        "auto": partial(whole, micro_batch="auto"),
        "row_wise": partial(whole, micro_batch=micro_batch, row_wise=blocks),
        "offload": partial(whole, micro_batch="offload"),
    }
    if importlib.util.find_spec("transformers") is not None and importlib.util.find_spec("accelerate") is not None:
        found["Hugging Face Trainer"] = partial(by_hugging_face, size)
    return found


def main(
    rounds: int = 3, device: str = "cuda", precision: str = "bf16-mixed", layers: int = 12, features: int = 768,
    vocabulary: int = 50_257, length: int = 1_024, rows: int = 32, micro_batch: int = 4,
) -> None:  # fmt: skip
    """Measure and print."""
    size = Size(**locals())

    def metered(name: str, train: Callable[..., None]) -> Meter:
        meter = Meter(size)
        train(meter=meter)
        if meter.steps != STEPS:
            raise AssertionError(f"{name} took {meter.steps} steps instead of {STEPS}")
        if size.device == "cuda":
            torch.cuda.empty_cache()
        return meter

    found = interleaved({name: partial(metered, name, train) for name, train in sides(size).items()}, rounds)
    print(f"{sum(parameter.numel() for parameter in Tied(size).parameters()):,d} parameters")
    medians = {name: statistics.median(meter.speed for meter in meters) for name, meters in found.items()}
    peaks = {name: max(meter.peak for meter in meters) for name, meters in found.items()}
    show(["way", "tokens per second", "peak, MiB"], [[n, f"{medians[n]:,.0f}", f"{peaks[n] / 2**20:,.0f}"] for n in found])


if __name__ == "__main__":
    command_line(main)
