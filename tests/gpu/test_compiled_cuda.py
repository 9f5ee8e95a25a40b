"""Compiled modules on CUDA, CUDA graphs among them: the step is the full batch's, or there is an error. Skipped without CUDA.

torch.compile(mode="reduce-overhead") replays graphs into buffers of its own, and gradients that were accumulated in these have been
overwritten in silence (pytorch/pytorch#96693, #181723).

pytest tests/gpu/test_compiled_cuda.py -s
"""

from __future__ import annotations

from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import Language, loader, pad, relative_error, sentences, train_by_hand

from lightning_accum import GradientAccumulation

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")

ROWS = sentences(96)


def count_targets(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """Where training_step is compiled, its graph is hidden."""
    return (batch["labels"][:, 1:] != -100).sum()


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
@pytest.mark.parametrize("policy", [{"window": 4}, {"micro_batch": 4, "trim_padding": False}], ids=["window", "split"])
@pytest.mark.parametrize("is_whole", [False, True], ids=["network", "module"])
def test_compiled_modules_take_the_step_of_the_full_batch(mode: str, policy: dict[str, Any], is_whole: bool) -> None:
    torch._dynamo.reset()
    module: Any = Language("adamw").cuda()
    batches = [{key: value.cuda() for key, value in pad(ROWS[i : i + 16]).items()} for i in range(0, 96, 16)]
    expected = train_by_hand(Language("adamw").cuda(), batches, 2)
    size = 4 if "window" in policy else 16
    if is_whole:
        trained = torch.compile(module, mode=mode)
    else:
        trained = module
        module.net.compile(mode=mode)
    callbacks = [GradientAccumulation(weight=count_targets, **policy)]
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    run = pl.Trainer(accelerator="gpu", devices=1, strategy="accum", max_epochs=2, callbacks=callbacks, **quiet)
    run.fit(trained, loader([pad(ROWS[i : i + size]) for i in range(0, 96, size)]))
    error = relative_error((p.cpu() for p in module.parameters()), (p.cpu() for p in expected.parameters()))
    print(f"{mode} {policy}: {error:.1e}")
    assert run.global_step == 12
    assert error < 1e-9  # fused kernels have another order
