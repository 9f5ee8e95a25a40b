"""A script of the lesson on several ranks: `torchrun --standalone --nproc_per_node 2 train_on_ranks.py FOLDER DDP FSDP2 ...`.

It trains `Language` with each strategy, and writes the parameters and the collectives of rank 0's third window into the folder.
"""

import math
import sys
from datetime import timedelta

import torch
from lessons import SENTENCES, Language, pad, trainer
from lightning import pytorch as pl
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile
from torch.utils.data import DataLoader

from lightning_accum import DDPAccumulationStrategy, ModelParallelAccumulationStrategy, SameOrderSampler

limit = {"timeout": timedelta(seconds=60)}
fsdp2 = {"data_parallel_size": 2, "tensor_parallel_size": 1, **limit}
STRATEGIES = {
    "DDP": lambda: DDPAccumulationStrategy(**limit),
    "FSDP2": lambda: ModelParallelAccumulationStrategy(**fsdp2),
    "FSDP2, sync=micro_batch": lambda: ModelParallelAccumulationStrategy(**fsdp2, sync="micro_batch"),
    "Lightning's DDP": lambda: DDPStrategy(**limit),
    "Lightning's FSDP2": lambda: ModelParallelStrategy(**fsdp2),
}


class Reductions(pl.Callback):
    """How many numbers each reduction and broadcast of the third window sends: loader batches 8 to 11."""

    def __init__(self):
        self.numbers, self.profile = [], profile(activities=[ProfilerActivity.CPU], record_shapes=True)

    def on_train_batch_end(self, trainer, pl_module, outputs, batch, batch_idx):
        if trainer.current_epoch == 0 and batch_idx == 7:
            self.profile.start()
        if trainer.current_epoch == 0 and batch_idx == 11:
            self.profile.stop()
            sent = [event for event in self.profile.events() if event.name.startswith("gloo:") and "gather" not in event.name]
            self.numbers = [max((math.prod(shape) for shape in event.input_shapes), default=0) for event in sent]


folder, *names = sys.argv[1:]
for name in names:
    module, reductions = Language(), Reductions()
    loader = DataLoader(SENTENCES, batch_size=2, collate_fn=pad, sampler=SameOrderSampler(SENTENCES, seed=1))
    run = trainer(reductions, strategy=STRATEGIES[name](), devices=2, accumulate_grad_batches=4, max_epochs=2)
    run.fit(module, loader)
    whole = {key: p.full_tensor() if isinstance(p, DTensor) else p for key, p in module.named_parameters()}
    if module.global_rank == 0:
        torch.save({"parameters": whole, "reduced": reductions.numbers}, f"{folder}/{name}")
torch.distributed.destroy_process_group()  # what is left to the end of the interpreter may abort it
