"""Messages for parts that do not add up to their batch: the deviation, and the argument that fixes it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from lightning_accum.parameter_changes import ONCE_A_WINDOW
from lightning_accum.verdict import Verdict

OF_SEVERAL_BATCHES = (
    "The loss gathers the rows of all ranks and compares all rows of a batch, so a window of several loader batches is not exact. "
    "Have the loader yield your effective batch (a window of 1), and pass row_wise=, which runs it in micro-batches."
)
OF_LATER_WEIGHTS = (
    "The loss, or one of its terms, has a different denominator than in the checked batches: a term begins, all losses of a "
    "micro-batch are masked, or their weights differ. This window is left out, without an optimizer step. The next windows use the "
    "weights found now."
)
OF_ANOTHER_WEIGHT = (
    "A term of the loss was a mean in the batches checked before, and is a sum now, or the other way round. Windows since the last "
    "check may not have taken the steps of their full batches; the next ones do. Have training_step divide by the same count."
)
OF_COUNTS_OF_ONE = (
    "In several windows the loss of a micro-batch was divided by exactly 1. The first of these windows add up; later ones are "
    "not checked. If the loss raises a count of 0 to 1, as clamp(min=1) does, they are wrong: have the loader yield larger "
    'batches, or pass weight="equal" for the mean of means.'
)
OF_RAISED_COUNTS = (
    "The loss is divided by a count that is raised to 1 in single rows, as max(count, 1) does. Windows are exact while no"
    " micro-batch counts so little; training ends with an error at the first that does. Larger loader batches make it rarer."
)
OF_ANOTHER_MODE = (
    "The weight that was read from the first loader batches does not fit this one, whose window has already begun. Say what the "
    "mean is divided by: GradientAccumulation(weight=...) with TokenCount(), SampleCount() or a function of the batch; or have the "
    "loader yield batches of 8 rows or more."
)
OF_LENGTHS = (
    "The samples were padded to different lengths, like the loader batches of a window. If the loss depends on padding, mask the "
    "padding, or have the loader yield your effective batch."
)
OF_NO_LOSS = (
    "training_step returned None for a micro-batch, which then adds nothing to its window. If its rows would count in the full"
    " batch, the window differs from it: return a loss without the part that is missing. It could not be checked"
)
OF_COMPILED = (
    "The terms of the loss have different weights, which torch.compile hides. Compile only the network, self.net = "
    "torch.compile(self.net), and add up the terms outside of it."
)
OF_UNSEEN_TERMS = (
    "manual_backward got a loss that is computed differently than in the checked batches: a term begins, all of its losses are "
    "masked, their weights differ, or a count is 1. The package could not check that micro-batches add up to their batch. Compare "
    "some steps with full batches: lightning_accum.testing.assert_window_equals_batch."
)
OF_STEPS = (
    "training_step steps an optimizer and then computes a loss with the changed parameters. Steps are deferred to the last "
    "micro-batch of a window, so earlier losses would use other parameters than the full batch. Call step after the last "
    'manual_backward. Or have the loader yield your effective batch, with a window of 1; micro_batch="offload" runs it in less '
    "memory. check=False turns the check off."
)
OF_GRADIENTS = (
    "An optimizer steps with gradients, or a learning rate, that depend on the batch without self.manual_backward: in a window, on "
    "its last micro-batch only. Compute all gradients by self.manual_backward, and do not scale them by a loss or a count of the "
    "batch. Or have the loader yield your effective batch, with a window of 1. check=False turns the check off."
)


def of_hooks(names: Iterable[str]) -> str:
    """The error of hooks of a step that use what ``training_step`` left behind."""
    return (
        f"{' or '.join(names)} of the module changes gradients, buffers or other state by something that the last "
        "training_step left in the module, which in a window saw one micro-batch only. Add it up in training_step, and reset it in "
        'the hook; or run the batch whole: micro_batch="offload", and a window of 1. check=False turns the check off.'
    )


OF_ONE_ROW = "the loader yields single rows, and the loss of two rows together is not the sum of their losses"
OF_ROW_WISE = (
    "With row_wise= the loss sees one whole loader batch of one rank: have the loader yield your effective batch (a window of 1),"
    " and have training_step gather the rows of several ranks: self.all_gather(..., sync_grads=True)."
)


def of_argument(argument: str) -> str:
    """The advice to pass an argument that was tried."""
    return f"Pass GradientAccumulation({argument}): with it they add up."


OF_CARRY = (
    'They are counted before a window runs, but with tail="carry" its batches may come in the next epoch. Pass tail="step" or '
    'tail="drop".'
)


def of_calls(names: str) -> str:
    """The advice for a loss whose terms have different weights, in manual optimization."""
    return (
        f"Call self.manual_backward once for each of its terms ({names}), with retain_graph=True for all but the last: each "
        "call has its own weight."
    )


def of_joined(verdict: Verdict) -> str:
    """The warning for two loader batches whose rows add up only within each batch."""
    return (
        f"Rows of two loader batches do not add up in one batch ({verdict.in_words}), but rows of each alone do. If loader batches "
        "are of different kinds, such as tasks, nothing is wrong: pass check=False. Otherwise the loss compares the rows of its "
        'batch, and a window does not take the step of its full batch: GradientAccumulation(micro_batch=..., row_wise="encoder") '
        "with a window of 1 does."
    )


def of_one_row(verdict: Verdict, weight: Any) -> str:
    """The warning for loader batches of one row, if two of them do not add up."""
    return (
        f"{OF_ONE_ROW.capitalize()}, weighted by weight={weight!r}: {verdict.in_words}. If training_step always takes one"
        " row, nothing is wrong: pass check=False. If it takes several, windows do not take the step of their full batch: have the"
        " loader yield batches of several rows, which the check can examine further."
    )


def of_unchecked(verdict: Verdict, is_manual: bool = False) -> str:
    """The warning for windows that could not be checked."""
    by = "lightning_accum.testing.assert_window_equals_batch" if is_manual else "verify(module, data)"
    return (
        f"It could not be checked that micro-batches add up to their batch: {verdict.seen}. Compare a step with its full batch by "
        f"{by}, or pass check=False if you know that they do."
    )


def of_state(what: str, size: float, who: str = "training_step") -> str:
    """The warning for state that a step changes, with the relative change of the loss."""
    return (
        f"{who} changes {what}, on which its loss depends (relative change of the loss of the same rows, or of its"
        f" gradient: {size:.1g}), so micro-batches see other values than the full batch would. Change it once a window, "
        f'{ONCE_A_WINDOW}; or have it see the full batch: micro_batch="offload", or micro_batch= with row_wise=, and a window of 1.'
    )


OF_LOGGED_LOSS = (
    "window/loss, which is logged, is not the loss of the full batch: the loss has a part without a gradient that depends on the "
    "batch and is not a mean over it. Gradients are exact. Return the loss without this part."
)
OF_MADE_BATCHES = (
    "Batches that the loader makes of a few samples do not add up to a batch of all of them: its collate_fn, or a hook that "
    "transfers batches, computes something over its batch, not over the full one. Have the loader yield your effective batch: "
    "micro_batch=, and a window of 1. verify(module, loader, window=...) compares a window with its full batch."
)
OF_BATCH_IDX = (
    "The loss depends on the batch_idx of training_step, or on the Trainer's accumulate_grad_batches or num_training_batches: with "
    "the full batch's values the same rows have another loss or gradient. Count in optimizer steps instead (global_step, "
    "trainer.estimated_stepping_batches); or have the loader yield the full batch: micro_batch=, and a window of 1."
)


def how_to_mend(found: str) -> str:
    """The message for a loss that shows no weight."""
    return (
        f'weight="auto" found no denominator in the loss: its graph ends in {found}. Pass the denominator of the mean: '
        "GradientAccumulation(weight=TokenCount(...)) for tokens, weight=SampleCount() for samples, weight=<a callable of the "
        'batch> for anything else, or weight="equal" for the mean of means.'
    )
