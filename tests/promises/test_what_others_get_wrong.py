"""One test for each situation that is wrong elsewhere; the figure of the right column is what the full batch gives.

References are to Lightning-AI/pytorch-lightning. Figures of Lightning itself were measured on 2.6.6.
"""

from typing import Any

import pytest
from support import NONE_LOSS, Scalar, fit, fp16_on_cpu, x

from lightning_accum import GradientAccumulation

# batches, the window, the gradients of the full batches, and Lightning's if they are others
WINDOWS = {
    "micro-batches of 1 and 9 tokens, 20350": ([x(1), x(1, 2, 3, 4, 5, 6, 7, 8, 9)], 2, [4.6], [3.0]),  # the mean of means 1 and 5
    "tail of two batches in a window of four, 19987": ([x(i) for i in range(1, 11)], 4, [2.5, 6.5, 9.5], [2.5, 6.5, 4.75]),
    "epoch shorter than the window": ([x(1), x(2), x(3)], 4, [2.0], [1.5]),
    "no batch at the start": ([*map(x, (1, 2, 3, 4)), None, *map(x, (6, 7, 8))], 4, [2.5, 7.0], [2.5, 7.75]),  # stale gradients
    "no batch in the middle": ([x(1), None, x(3), x(5)], 4, [3.0], [2.25]),
    "no batch at the end": ([*map(x, (1, 2, 3)), None, *map(x, (5, 6, 7, 8))], 4, [2.0, 6.5], [6.5]),  # the first window is lost
    "no batch at the end of the epoch": ([x(1), x(2), None], 4, [1.5], []),
    "no loss at the start": ([NONE_LOSS, x(1), x(3), x(4)], 4, [8 / 3], [2.0]),
    "no loss in the middle": ([x(1), NONE_LOSS, x(3), x(4)], 4, [8 / 3], [2.0]),
    "no loss at the end": ([x(1), x(3), x(4), NONE_LOSS], 4, [8 / 3], None),  # the step before there is a gradient of the last
    "nothing in a window": ([None, NONE_LOSS, x(3), x(5)], 2, [4.0], None),
}


@pytest.mark.parametrize("name", WINDOWS)
def test_a_window_is_its_full_batch(name: str) -> None:
    batches, window, expected, lightnings = WINDOWS[name]
    module, plain = Scalar(batches), Scalar(batches)
    fit(module, None, GradientAccumulation(window))
    assert module.gradients == pytest.approx(expected, rel=1e-15)
    if lightnings is not None:
        fit(plain, None, strategy="auto", accumulate_grad_batches=window)
        assert plain.gradients == pytest.approx(lightnings)


@pytest.mark.parametrize("missing", [None, NONE_LOSS], ids=["batch", "loss"])
def test_fp16_and_none_on_the_boundary_is_as_if_it_had_not_been_there(missing: Any) -> None:
    module = Scalar([x(1), x(2), x(3), missing])
    run = fit(module, None, GradientAccumulation(4), plugins=fp16_on_cpu())
    assert module.gradients == [2.0]  # Lightning: 1536, still scaled by 256 x 3, and the step is counted but not made
    assert module.total == 2.0
    assert run.global_step == 1


def test_outputs_carry_the_loss_of_the_micro_batch() -> None:
    seen = []

    class Watches(Scalar):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            return {"loss": (batch - self.w * 0).mean() + self.w, "extra": batch_idx}

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            seen.append((outputs["loss"].item(), outputs["extra"]))

    fit(Watches([x(8), x(4)]), None, GradientAccumulation(2))
    assert seen == [(8.0, 0), (4.0, 1)]  # Lightning: 4.0 and 2.0
