"""Losses that look on few rows as if they added up: an error, a warning, or the gradient of the full batch, and never silence."""

from contextlib import suppress

import pytest
from adversarial_losses import LOSSES, LOSSES_UNSEEN, MICRO_BATCH, ROWS, data
from loss_table.rows import Loss, Trained, part
from loss_table.training import by_hand, deviation
from support import fit, warned

from lightning_accum import AccumulationError, GradientAccumulation, verify

BATCHES = [data(seed) for seed in range(3)]
PARTS = [part(batch, start, start + MICRO_BATCH) for batch in BATCHES for start in range(0, ROWS, MICRO_BATCH)]
WAYS = {"split": ({"micro_batch": MICRO_BATCH}, BATCHES), "windows": ({"window": ROWS // MICRO_BATCH}, PARTS)}


def cases(losses: list[Loss]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("loss", [pytest.param(loss, id=loss.name.replace(" ", "_")) for loss in losses])


@pytest.mark.some_cases(7, 16)
@pytest.mark.parametrize("way", WAYS)
@cases(LOSSES)
def test_a_loss_that_hides_on_few_rows_that_it_does_not_add_up_is_not_trained_in_silence(loss: Loss, way: str) -> None:
    """The steps before an error are those of the full batches, too."""
    module, expected, (policy, batches) = Trained(loss), by_hand(loss, BATCHES), WAYS[way]
    error = None
    with warned() as messages:
        try:
            fit(module, batches, GradientAccumulation(**policy))
        except AccumulationError as raised:
            error = raised
    steps = len(module.gradients)
    found = deviation(module.gradients, expected.gradients[:steps])
    assert error is not None or steps == len(BATCHES) or messages
    assert found <= loss.limit or messages, f"{found:.1g} off in {steps} steps, without a warning; {error}"


@pytest.mark.some_cases(3, 4)
@pytest.mark.parametrize("way", WAYS)
@cases(LOSSES_UNSEEN)
def test_verify_sees_what_only_the_whole_batch_shows(loss: Loss, way: str) -> None:
    policy, batches = WAYS[way]
    with suppress(AccumulationError):
        report = verify(Trained(loss), batches, **policy)
        assert report.breaks or not report.gradient <= 1e-3
