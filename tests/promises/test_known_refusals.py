"""Modules that are refused, warned of or verified wrongly, and where training differs from Lightning's for another reason.

Each says what should happen; an open one names the issue that mends it.
"""

import importlib
import re
import runpy
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from known import case, classified, open_until, rows_of, scheduled
from lightning.pytorch.loggers import CSVLogger
from support import SaveAfter, Toy, error_of_updates, fit, labelled, warned
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import OneCycleLR

from lightning_accum import AccumulationError, GradientAccumulation, SampleCount, TokenCount, Tokens, verify
from lightning_accum.testing import EXACT, compare_window_with_batch


def sixteenth_of_a_sum(net: nn.Module, batch: Any) -> Tensor:
    return classified(net, batch, reduction="sum") / 16


def noisy(size: float, net: nn.Module, batch: Any) -> Tensor:
    return classified(lambda x: net(x) * (1 + size * torch.randn(4, dtype=torch.float64)), batch)


def attending(net: nn.ModuleList, batch: dict[str, Tensor]) -> Tensor:
    tokens = net[0](batch["input_ids"])
    attention = (tokens.sum(-1) + batch["attention_mask"]).softmax(-1)
    return F.cross_entropy(net[1]((attention[..., None] * tokens).sum(1)), batch["labels"])


def with_added_mask(rows: int, columns: int) -> dict[str, Tensor]:
    is_padding = torch.arange(columns) > torch.arange(rows)[:, None] + columns - rows
    ids = torch.randint(1, 17, (rows, columns), generator=torch.Generator().manual_seed(rows)).masked_fill(is_padding, 0)
    return {"input_ids": ids, "attention_mask": is_padding * -1e4, "labels": torch.arange(rows) % 3}


ATTENDS = partial(Toy, attending, net=lambda: nn.ModuleList([nn.Embedding(17, 8), nn.Linear(8, 3)]))


@pytest.mark.parametrize(
    ("module", "batches", "how"),
    [
        # as training does a sum that is divided by a constant
        (partial(Toy, sixteenth_of_a_sum), labelled(16), {"micro_batch": 4}),
        (partial(Toy, sixteenth_of_a_sum), labelled(8, 8), {"window": 2}),
        # noise of float64 is not a difference
        *((partial(Toy, partial(noisy, n)), labelled(16)[0], {"micro_batch": 4}) for n in (1e-13, 1e-12, 3e-12, 1e-11, 1e-10)),
        # where batches are joined, an added attention mask hides the padding
        (ATTENDS, [with_added_mask(3, 4), with_added_mask(4, 7)], {"window": 2}),
    ],
)
def test_verify_finds_no_difference(module: Any, batches: Any, how: dict[str, int]) -> None:
    report = verify(module(), batches, **how)
    assert report, str(report)


def says_on_each_rank_whether_its_process_is_a_copy(net: nn.Module, batch: Any) -> Tensor:  # pickled for the ranks
    if torch.distributed.is_initialized():
        Path(f"rank{torch.distributed.get_rank()}").write_text(str(hasattr(sys, "verifies")))
    return classified(net, batch)


@pytest.mark.exhaustive
def test_verify_starts_its_ranks_in_fresh_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "verifies", True, raising=False)
    assert verify(Toy(says_on_each_rank_whether_its_process_is_a_copy), labelled(4, 4), window=1, devices=2)
    assert {path.read_text() for path in Path().glob("rank*")} == {"False"}


def test_a_schedule_over_the_estimated_steps_of_windows_of_tokens_lasts_until_training_ends() -> None:
    def train(**ends: int) -> Any:
        module = scheduled(lambda module, optimizer: OneCycleLR(optimizer, 0.1, module.trainer.estimated_stepping_batches))
        return fit(module, labelled(*[2] * 8, *[6] * 24), GradientAccumulation(Tokens(8)), **ends)

    with pytest.raises(AccumulationError, match="max_steps"):
        train(max_epochs=2)
    with warned() as messages:
        assert train(max_steps=28, max_epochs=-1).global_step == 28  # four batches of 2 rows or two of 6 make a window
    assert not any("learning rate" in message for message in messages)
    assert train(fast_dev_run=8).global_step == 2


@pytest.mark.filterwarnings("error::lightning_accum.AccumulationWarning")
def test_a_term_that_is_the_same_in_all_batches_is_not_warned_of_after_a_resume() -> None:
    for saves, how in ([SaveAfter(2)], {}), ([], {"ckpt_path": "inside.ckpt"}):
        module = Toy(lambda net, b: classified(net, b) + 0.1 * net(torch.eye(4).double()).square().mean())
        assert fit(module, labelled(*[8] * 6, ignored=0.4), GradientAccumulation(2), *saves, **how).global_step == 3


def vilt(net: nn.Module, batch: Any) -> Tensor:
    """Masked tokens, whether image and text match, and the distances of those that do less the distances of the others."""
    outputs, matches = net(batch[0]), batch[0][:, 0] > 0
    distances = (outputs - batch[0]).square().sum(-1)
    aligned = (distances[matches].sum() - distances[~matches].sum()) / (len(distances[matches]) + len(distances[~matches]))
    matching = F.binary_cross_entropy_with_logits(outputs[:, 0], matches.double())
    return F.cross_entropy(outputs, batch[1], ignore_index=-100) + matching + 0.1 * aligned


class Fused(torch.autograd.Function):  # a mean cross entropy that keeps nothing but its gradient
    @staticmethod
    def forward(ctx: Any, logits: Tensor, labels: Tensor) -> Tensor:
        with torch.enable_grad():
            logits = logits.detach().requires_grad_()
            loss = F.cross_entropy(logits, labels)
            ctx.save_for_backward(*torch.autograd.grad(loss, logits))
        return loss.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return ctx.saved_tensors[0] * gradient, None


def fused_and(term: Callable[[Tensor, Tensor], Tensor], net: nn.Module, batch: Any) -> Tensor:
    logits = net(batch[0])
    return Fused.apply(logits, batch[1]) + term(logits, batch[0])


# a mean over a part of the features, which is kept by all rows, so that it has no gradient
margin = partial(fused_and, lambda logits, inputs: F.relu(logits.abs() - 50)[inputs > -0.3].mean())
z_loss = partial(fused_and, lambda logits, inputs: 0.1 * logits.logsumexp(-1).square().mean())


THREE = {"weight": [TokenCount(1, shift=False), SampleCount(1), SampleCount(1)]}
LIGHTNINGS = "an error of Lightning's about stateful callbacks"
OWN = {"weight": lambda batch: len(batch[0]), "check": False}


@pytest.mark.parametrize(
    ("loss", "ignored", "how"),
    [
        # a sum of means over tokens and samples is exact without an argument
        (vilt, 0.4, {}),  # 0.07 before
        # a term that adds two sums over one count takes one weight
        case(22, "the error asks for four weights, where the loss has three terms", vilt, 0.4, THREE, raises=AccumulationError),
        # a weight that the check finds to add up is taken
        case(22, '0.04 off: the check says "pass SampleCount()", and training goes on with another weight', margin, 0, {}),
        # a fused loss does not take the weight of a readable loss beside it
        (z_loss, 0.4, {}),  # 0.17 before
        # a weight of one's own that is exact is not warned of
        (lambda net, b: classified(net, b) * (b[1] != -100).sum() / len(b[0]), 0.4, OWN),
    ],
)
def test_with_these_weights_windows_are_exact_and_nothing_is_said_against_it(loss: Any, ignored: float, how: Any) -> None:
    with warned() as messages:
        found = compare_window_with_batch(Toy(loss), rows_of(6, 4, 2, 8, ignored=ignored), GradientAccumulation(2, **how))
    assert found.parameters <= EXACT
    assert not messages


SumsInBackward = type("SumsInBackward", (Toy,), {"backward": lambda self, loss, *args, **kwargs: loss.sum().backward()})


@pytest.mark.parametrize("policy", [{"window": 1}, {"window": 2}, {"window": 1, "micro_batch": 2}, {"window": 2, "check": False}])
@pytest.mark.parametrize(("kind", "is_vector"), [(Toy, True), (SumsInBackward, True), (Toy, False)])
def test_a_loss_that_is_a_vector_or_has_no_graph_is_named(kind: type[Toy], is_vector: bool, policy: dict[str, Any]) -> None:
    module = kind(partial(classified, reduction="none") if is_vector else lambda *given: classified(*given).detach())
    with pytest.raises(AccumulationError, match=r"training_step .* shape \((6|2),\)" if is_vector else "training_step .* graph"):
        fit(module, labelled(6, 4), GradientAccumulation(**policy))


@pytest.mark.parametrize(
    ("configured", "given", "named"),
    [
        ([GradientAccumulation(2), GradientAccumulation(3)], [], r"2 GradientAccumulation .* configure_callbacks"),
        case(23, LIGHTNINGS, [], [GradientAccumulation(2), GradientAccumulation(3)], "GradientAccumulation", raises=RuntimeError),
    ],
)
def test_two_callbacks_are_named(configured: list[Any], given: list[Any], named: str) -> None:
    module = Toy(classified)
    module.configure_callbacks = lambda: configured
    with pytest.raises(AccumulationError, match=named):
        fit(module, labelled(6, 4), *given)


@pytest.mark.parametrize(
    ("divisor", "named"),
    [
        (lambda module: module.trainer.accumulate_grad_batches, "accumulate_grad_batches"),  # 0.75 before
        case(22, "a division by the number of micro-batches is left in training_step, and nothing is said", lambda module: 4, "4"),
    ],
)
def test_a_leftover_division_by_the_size_of_the_window_is_warned_of(divisor: Any, named: str) -> None:
    module = Toy(lambda *given: classified(*given) / divisor(module))  # as a loop divided that accumulated by hand
    with warned() as messages:
        fit(module, labelled(6, 4, 2, 8), GradientAccumulation(4))
    assert any(named in message for message in messages)


EXAMPLES = Path(__file__).parents[2] / "notebooks" / "examples"
MATPLOTLIB = "pip install matplotlib"


@pytest.mark.parametrize("arguments", [{}, {"accumulate_grad_batches": 2}, {"gradient_clip_val": 1.0}], ids=str)
def test_a_closure_returns_a_loss_that_is_detached(arguments: dict[str, Any]) -> None:
    class ReadsClosure(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:
            closure().numpy()
            super().step()

    module = Toy(classified)
    module.configure_optimizers = lambda: ReadsClosure(module.parameters(), lr=0.1)
    assert fit(module, labelled(4, 4), **arguments).global_step == 2 // arguments.get("accumulate_grad_batches", 1)


class NoLossInTheSecond(Toy):  # keeps gradients of 0, which momentum goes on with
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if batch_idx == 1 else super().training_step(batch, batch_idx)

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad(set_to_none=False)


class EndsItsEpoch(Toy):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None

    def on_train_epoch_end(self) -> None:
        self.has_gradients = self.net.weight.grad is not None


def trained(kind: type[Toy], **arguments: Any) -> list[Any]:  # with this package, and with Lightning alone
    modules = [kind(classified), kind(classified)]
    for module, strategy in zip(modules, ("accum", "auto"), strict=True):
        fit(module, labelled(4, 4, 4, 4), strategy=strategy, **arguments)
    return modules


@open_until(23, "where training_step returned None, hooks of the step and clipping are left out")
@pytest.mark.parametrize("hook", ["on_before_optimizer_step", "configure_gradient_clipping"])
def test_where_training_step_returns_none_hooks_of_the_step_are_called_as_by_lightning(hook: str, monkeypatch: Any) -> None:
    calls: list[Any] = []
    monkeypatch.setattr(NoLossInTheSecond, hook, lambda *args, **kwargs: calls.append(args[0]))
    assert [calls.count(module) for module in trained(NoLossInTheSecond)] == [4, 4]


@open_until(23, "0.19 off: where training_step returned None, the optimizer takes no step with gradients of 0")
def test_where_training_step_returns_none_momentum_goes_on_as_with_lightning() -> None:
    assert error_of_updates(*trained(NoLossInTheSecond), NoLossInTheSecond(classified)) <= EXACT


@pytest.mark.filterwarnings("error::lightning_accum.AccumulationWarning")
def test_on_train_batch_start_that_ends_an_epoch_between_windows_leaves_the_gradients_and_is_not_warned_of() -> None:
    assert [module.has_gradients for module in trained(EndsItsEpoch, accumulate_grad_batches=2)] == [True, True]


def test_a_fit_over_ranks_leaves_the_launcher_as_it_was() -> None:
    run = fit(Toy(classified), labelled(4, 4), ranks=2)
    assert "launch" not in vars(run.strategy._launcher)


def test_the_random_state_of_other_devices_is_not_saved_for_each_draw(monkeypatch: pytest.MonkeyPatch) -> None:
    saved, fork = [], torch.random.fork_rng
    monkeypatch.setattr(torch.random, "fork_rng", lambda what=None, *args, **kw: (saved.append(what), fork(what, *args, **kw))[1])
    module = Toy(lambda net, batch: classified(net, [batch[0] + torch.randn_like(batch[0]), batch[1]]))
    fit(module, labelled(8, 8), GradientAccumulation(2))
    assert verify(module, labelled(8)[0], micro_batch=4)
    assert None not in saved  # that is every device


class LogsAndPrints(Toy):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.logger.log_metrics({"direct": 1.0}, step=batch_idx)
        self.logger.experiment.log_metrics({"experiment": 1.0}, step=batch_idx)
        print("print")
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("where", ["direct", "experiment", case(22, "about 30 more are printed by the check", "print")])
def test_what_a_step_logs_or_prints_by_itself_is_there_once_a_micro_batch(where: str, monkeypatch: Any, capsys: Any) -> None:
    def of_terms_that_are_counted(net: Any, batch: Any) -> Tensor:
        mask = batch[0][:, 0] > 0
        return classified(net, batch) + (net(batch[0])[:, 0] * mask).square().sum() / mask.sum()

    logger, sent = CSVLogger("logs"), []
    kind, log_metrics = type(logger.experiment), type(logger.experiment).log_metrics
    monkeypatch.setattr(kind, "log_metrics", lambda *args, **kw: (sent.extend(args[1]), log_metrics(*args, **kw)))
    for loss in (classified, of_terms_that_are_counted):
        fit(LogsAndPrints(loss), labelled(8, 8, 8, 8), GradientAccumulation(2), logger=logger)
    assert [*sent, *capsys.readouterr().out.splitlines()].count(where) == 8


def test_the_example_of_the_command_line_runs_twice_in_one_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("jsonargparse")
    monkeypatch.setenv("PL_GLOBAL_SEED", "0")  # which LightningCLI sets
    options = ["--trainer.max_epochs", "1", "--data.batch_size", "2048", "--trainer.enable_progress_bar", "false"]
    monkeypatch.setattr(sys, "argv", ["cli.py", "fit", "--config", str(EXAMPLES / "cli.yaml"), *options])
    runs = [runpy.run_path(str(EXAMPLES / "cli.py"), run_name="__main__") for _ in range(2)]
    assert [run["cli"].trainer.global_step for run in runs] == [2, 2]


@pytest.mark.parametrize(
    ("library", "use", "error", "mend"),
    [
        ("ray", lambda: importlib.import_module("lightning_accum.ray"), ImportError, r"pip install .ray\[train\]"),
        ("matplotlib", lambda: runpy.run_module("lightning_accum", run_name="__main__"), SystemExit, MATPLOTLIB),
    ],
)
def test_where_a_library_is_missing_the_error_names_what_can_be_installed(
    library: str, use: Any, error: Any, mend: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    monkeypatch.delitem(sys.modules, "lightning_accum.ray", raising=False)
    monkeypatch.setattr(sys, "argv", ["lightning-accum", "demo"])
    with pytest.raises(error) as caught:
        use()
    said = f"{caught.value} {capsys.readouterr().err}"
    assert re.search(mend, said)
    assert "lightning-accum[" not in said  # which is on no index


@pytest.mark.parametrize("policy", [{"window": 1}, {"window": 2}, {"window": 1, "micro_batch": 2}], ids=str)
def test_a_backward_of_tensors_that_somebody_has_replaced_is_called(policy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    called, backward = [], Tensor.backward
    monkeypatch.setattr(Tensor, "backward", lambda *args, **kwargs: (called.append(1), backward(*args, **kwargs))[1])
    fit(Toy(classified), labelled(4, 4), GradientAccumulation(**policy))
    assert len(called) == (4 if "micro_batch" in policy else 2)
