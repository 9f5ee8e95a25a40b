"""Lightning's callbacks, tuners and loggers, checkpoints of plain Lightning, and stateful loaders beside windows of any kind."""

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import support
import torch
from lightning.pytorch.callbacks import Callback, EarlyStopping, ModelCheckpoint
from lightning.pytorch.tuner import Tuner
from resumed import Module
from support import Distance, Interrupted, SaveAfter, Scalar, StatefulLoader, Toy, fit, pad, relative_error, sentences, trainer, x
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_accum import AccumulationWarning, BalancedBatchSampler, GradientAccumulation, SameOrderSampler, Tokens

StatefulDataLoader = pytest.importorskip("torchdata.stateful_dataloader").StatefulDataLoader
StatefulRandomSampler = pytest.importorskip("torchdata.stateful_dataloader.sampler").RandomSampler
pytestmark = pytest.mark.filterwarnings("ignore:'set_vital' is deprecated")

ROWS = sentences(28)  # seven loader batches of four an epoch
ORDERS = [  # torchdata does not restore a sampler of workers, and draws once more, for another order of the next epoch, in one case
    (workers, order, epoch)
    for order in ("as it is", "shuffled by a generator", "a sampler with a generator", "SameOrderSampler", "BalancedBatchSampler")
    for workers in (0, 2)
    for epoch in (0, 1)
    if (workers, order) != (2, "a sampler with a generator")
    if (workers, order, epoch) != (0, "shuffled by a generator", 0)
]


@pytest.mark.some_cases(1, 2)
@pytest.mark.parametrize("policy", [{"window": 3}, {"window": Tokens(60), "tail": "carry"}], ids=["3", "tokens"])
@pytest.mark.parametrize(("workers", "order", "epoch"), ORDERS)
def test_a_stateful_loader_goes_on_inside_a_window_to_the_bit(workers: int, order: str, epoch: int, policy: dict[str, Any]) -> None:
    def stateful(workers: int, order: str) -> Any:
        generator = torch.Generator().manual_seed(5)
        orders: dict[str, Callable[[], dict[str, Any]]] = {
            "as it is": dict,
            "shuffled by a generator": lambda: {"shuffle": True, "generator": generator},
            "a sampler with a generator": lambda: {"sampler": StatefulRandomSampler(ROWS, generator=generator)},
            "SameOrderSampler": lambda: {"sampler": SameOrderSampler(ROWS, seed=5)},
            "BalancedBatchSampler": lambda: {"batch_sampler": BalancedBatchSampler(list(map(len, ROWS)), 4, window=3, seed=5)},
        }
        options = orders[order]()
        size = {} if "batch_sampler" in options else {"batch_size": 4}
        return StatefulDataLoader(ROWS, num_workers=workers, collate_fn=pad, **size, **options)

    def train(*callbacks: Callback, **kwargs: Any) -> Module:
        fit(module := Module(), stateful(workers, order), GradientAccumulation(**policy), *callbacks, max_epochs=2, **kwargs)
        return module

    after = [2, 4] if epoch == 0 else [8, 11]
    without, saving = train(), train(SaveAfter(*after, path="after{}.ckpt"))
    for batches in after:
        resumed = train(ckpt_path=f"after{batches}.ckpt")
        for p, q, r in zip(without.parameters(), saving.parameters(), resumed.parameters(), strict=True):
            assert torch.equal(p, q)
            assert torch.equal(p, r), f"checkpoint after {batches}"


def test_a_checkpoint_of_plain_lightning_inside_a_window_is_warned_of() -> None:
    batches = [x(i) for i in range(1, 9)]
    fit(Scalar(), StatefulLoader(batches), SaveAfter(6), strategy="auto", accumulate_grad_batches=4)
    module = Scalar()
    with pytest.warns(AccumulationWarning):
        fit(module, StatefulLoader(batches), GradientAccumulation(4), ckpt_path="inside.ckpt")
    assert module.gradients == [7.5]


def test_a_checkpoint_of_plain_lightning_goes_on_and_plain_lightning_goes_on_from_one(tmp_path) -> None:
    batches = [x(i) for i in range(1, 5)]
    fit(Scalar(), batches, strategy="auto", accumulate_grad_batches=2).save_checkpoint(tmp_path / "plain.ckpt")
    module, other = Scalar(), Scalar()
    run = fit(module, batches, GradientAccumulation(2), max_epochs=2, ckpt_path=tmp_path / "plain.ckpt")
    assert module.gradients == [1.5, 3.5]
    assert run.callback_metrics["window/optimizer_steps"] == run.global_step == 4
    run.save_checkpoint(tmp_path / "ours.ckpt")
    fit(other, batches, strategy="auto", accumulate_grad_batches=2, max_epochs=3, ckpt_path=tmp_path / "ours.ckpt")
    assert other.gradients == [1.5, 3.5]  # equal micro-batches: a mean of means is right


NUMBERS = [x(1), x(2, 3, 4), x(5), x(6, 7)]
TWICE: dict[str, tuple[dict[str, Any], list[float], list[float]]] = {
    "3": ({"window": 3}, 2 * [15 / 5, 6.5], 2 * [15 / 5, 6.5]),
    "by epoch": ({"window": {0: 1, 1: 2, 3: 4}}, [1, 3, 5, 6.5, 10 / 4, 18 / 3], [10 / 4, 18 / 3, 28 / 7]),
    # windows of 2, 3 (cut to 2), 1, 2, 3 (cut to 1), and in the second fit of 1, 2, 3 (cut to 1), 1, 2, 3 (cut to 1)
    "by step": ({"window": lambda step: [2, 3, 1][step % 3]}, [10 / 4, 18 / 3, 1, 14 / 4, 6.5], 2 * [1, 14 / 4, 6.5]),
    "tokens": ({"window": Tokens(4)}, 2 * [10 / 4, 18 / 3], 2 * [10 / 4, 18 / 3]),
    "split": ({"micro_batch": 2}, 2 * [1, 3, 5, 6.5], 2 * [1, 3, 5, 6.5]),
    "carry": ({"window": 3, "tail": "carry"}, [15 / 5, 23 / 6, 18 / 3], [15 / 5, 23 / 6, 18 / 3]),
    "drop": ({"window": 3, "tail": "drop"}, [15 / 5, 15 / 5], [15 / 5, 15 / 5]),
}


@pytest.mark.some_cases(8)
@pytest.mark.parametrize("is_other", [False, True])
@pytest.mark.parametrize("policy", TWICE)
def test_a_second_fit_goes_on_where_the_first_ended(policy: str, is_other: bool) -> None:
    arguments, before, after = TWICE[policy]
    module = Scalar(NUMBERS)
    run = fit(module, None, GradientAccumulation(**arguments), max_epochs=2)
    assert module.gradients == pytest.approx(before, rel=1e-15)
    assert run.callback_metrics["window/optimizer_steps"] == run.global_step == len(before)
    run.fit_loop.max_epochs = 4
    run.fit(second := Scalar(NUMBERS) if is_other else module)
    assert second.gradients[0 if is_other else len(before) :] == pytest.approx(after, rel=1e-15)
    assert run.callback_metrics["window/optimizer_steps"] == run.global_step == len(before) + len(after)
    assert run.accumulate_grad_batches == 1


def test_gradient_accumulation_scheduler_of_lightning() -> None:
    module, estimates = Scalar([x(1), x(2), x(3), x(4)]), []
    run = trainer(callbacks=[pl.callbacks.GradientAccumulationScheduler({0: 1, 1: 2})], max_epochs=2)
    module.on_train_start = lambda: estimates.append(run.estimated_stepping_batches)
    run.fit(module)
    assert module.gradients == [1, 2, 3, 4, 1.5, 3.5]
    assert estimates == [6]


SEVEN = [x(1), x(2, 3, 4), x(5), x(6, 7), x(8), x(9, 10, 11), x(12)]
WINDOWS: dict[str, tuple[Any, list[list[int]]]] = {
    "3": (3, 2 * [[0, 1, 2], [3, 4, 5], [6]]),
    "by step": (lambda step: 1 + step % 3, [[0], [1, 2], [3, 4, 5], [6], [0, 1], [2, 3, 4], [5], [6]]),
    "tokens": (Tokens(5), 2 * [[0, 1, 2], [3, 4, 5], [6]]),
}
OF_WINDOWS = pytest.mark.parametrize("name", WINDOWS)


@OF_WINDOWS
@pytest.mark.parametrize("micro_batch", [None, 1])
def test_throughput_monitor_measures_loader_batches_at_the_ends_of_windows(name: str, micro_batch: int | None) -> None:
    policy, windows = WINDOWS[name]
    monitor = pl.callbacks.ThroughputMonitor(batch_size_fn=len, length_fn=lambda batch: 10 * len(batch))
    callbacks = [GradientAccumulation(policy, micro_batch=micro_batch), monitor]
    fit(Distance(SEVEN, lr=0.1), None, *callbacks, max_epochs=2, **support.csv_logger())
    rows = [row for row in support.logged() if "train/batches" in row]
    assert (rows[-1]["train/batches"], rows[-1]["train/samples"]) == (14, 24)
    for row in rows:
        assert row["train/samples"] == sum(len(SEVEN[index % 7]) for index in range(int(row["train/batches"])))
    if micro_batch is None:
        ends = [sum(len(window) for window in windows[: step + 1]) for step in range(len(windows))]
        assert [(row["step"], row["train/batches"]) for row in rows] == list(enumerate(ends))


def fail(gradient: Tensor) -> None:
    raise Interrupted


class TwoOfThem(Scalar):
    """Two parameters with the same gradients; fails in or after the seventh loader batch, or in its backward.

    Its loss is one mean, or ``has_terms``: one of each parameter.
    """

    def __init__(self, where: str | None = None, micro_batch: int = 1, has_terms: bool = False) -> None:
        super().__init__()
        self.v = nn.Parameter(torch.zeros((), dtype=torch.float64))
        self.where, self.micro_batch, self.calls, self.has_terms = where, micro_batch, 0, has_terms

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.calls = self.calls + 1 if batch_idx == 6 else 0
        fails = batch_idx == 6 and self.calls == self.micro_batch
        if fails and self.where == "training_step":
            raise Interrupted
        w = self.w.clone()
        if fails and self.where == "backward":
            w.register_hook(fail)
        if self.has_terms:
            twice = batch.repeat_interleave(1 + ((batch - 2.5).abs() == 1.5).long())  # 1 and 4: other counts, the same mean
            return (w * batch).mean() + (self.v * twice).mean()
        return ((w + self.v) * batch).mean()  # the gradient of v is there before that of w has gone through its operations

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if self.where == "between batches" and batch_idx == 5:
            raise Interrupted


def eight(rows: int = 1) -> Any:  # loader batches of 1, 2, ... 8, from a loader that knows its place.
    numbers = torch.arange(1, 9, dtype=torch.float64).repeat_interleave(rows)
    return StatefulDataLoader(numbers, batch_size=rows)


on_exception = partial(pl.callbacks.OnExceptionCheckpoint, ".", "failed")
of_model_checkpoint = partial(
    ModelCheckpoint, ".", "failed", save_on_exception=True, every_n_epochs=1, auto_insert_metric_name=False
)


WITHOUT_THE_BATCH = [(5 + 6 + 8) / 3]
COUNTED_FIRST = "terms, "
ON_EXCEPTION: dict[str, tuple[dict[str, Any], str, list[list[float]]]] = {
    "between batches": ({"window": 4}, "between batches", [[6.5]]),
    "between batches, by epoch": ({"window": {0: 4}}, "between batches", [[6.5]]),
    "between batches, tokens": ({"window": Tokens(4)}, "between batches", [[6.5]]),
    # the loader had given it away, so it does not come again; what was accumulated before it is there
    "in training_step": ({"window": 4}, "training_step", [WITHOUT_THE_BATCH]),
    "in training_step, by step": ({"window": lambda step: 4}, "training_step", [WITHOUT_THE_BATCH]),
    # v had its gradient of the batch already, w not: both must step on the same batches
    "in backward": ({"window": Tokens(4)}, "backward", [WITHOUT_THE_BATCH, [8.0]]),
    "in a split batch": ({"window": 4, "micro_batch": 1}, "training_step", [WITHOUT_THE_BATCH, [8.0]]),
    "terms, between batches": ({"window": 4}, "between batches", [[6.5]]),
    "terms, between batches, tokens": ({"window": Tokens(4)}, "between batches", [[6.5]]),
    # it runs first where the window is counted, at its first batch: that is the one under way
    "terms, in training_step": ({"window": 4}, "training_step", [[(6 + 7 + 8) / 3]]),
    "terms, in a split batch": ({"window": 4, "micro_batch": 1}, "training_step", [[(6 + 7 + 8) / 3]]),
    "terms, in backward": ({"window": Tokens(4)}, "backward", [WITHOUT_THE_BATCH, [8.0]]),
}


@pytest.mark.some_cases(13)
@pytest.mark.parametrize("saver", [on_exception, of_model_checkpoint])
@pytest.mark.parametrize("name", ON_EXCEPTION)
def test_after_an_exception_the_window_goes_on_without_anything_of_the_batch_that_failed(name: str, saver: Any) -> None:
    policy, where, expected = ON_EXCEPTION[name]
    rows, has_terms = 3 if "micro_batch" in policy else 1, name.startswith(COUNTED_FIRST)
    with pytest.raises(Interrupted):
        fit(TwoOfThem(where, rows, has_terms), eight(rows), GradientAccumulation(**policy), saver(), enable_checkpointing=True)
    (path,) = Path().rglob("*failed*.ckpt") if saver is on_exception else Path().rglob("*.ckpt")
    module = TwoOfThem(has_terms=has_terms)
    fit(module, eight(rows), GradientAccumulation(**policy), ckpt_path=str(path))
    assert any(module.gradients == pytest.approx(gradients, rel=1e-15) for gradients in expected)
    assert module.v.item() == module.w.item()


@pytest.mark.parametrize("is_last", [True, False])
@pytest.mark.parametrize("name", ["3", "tokens"])
def test_early_stopping_by_the_loss_of_the_epochs_windows(name: str, is_last: bool) -> None:
    """Wherever it is in the list of callbacks."""
    stopping = EarlyStopping("window/loss_epoch", patience=1, mode="min")
    callbacks = [GradientAccumulation(WINDOWS[name][0]), stopping]
    run = fit(Distance(SEVEN, lr=0.0), None, *(callbacks if is_last else callbacks[::-1]), max_epochs=9)
    assert stopping.best_score.item() == pytest.approx(torch.cat(SEVEN).square().mean().item(), rel=1e-12)
    assert run.current_epoch == 2  # the second is no better


class Regression(Toy):  # on equal loader batches, where Lightning's own accumulation is right too and can be compared with
    def __init__(self, batch_size: int = 4, fits: float = float("inf")) -> None:
        loss = lambda net, batch: F.mse_loss(net(batch[0]), batch[1])  # noqa: E731
        super().__init__(loss, net=lambda: nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 1)))
        self.batch_size, self.fits = batch_size, fits
        self.steps: list[int] = []
        generator = torch.Generator().manual_seed(2)
        self.data = [torch.randn(32, columns, generator=generator, dtype=torch.float64) for columns in (3, 1)]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if self.batch_size > self.fits:
            raise RuntimeError("CUDA out of memory.")
        return super().training_step(batch, batch_idx)

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.steps.append(self.trainer.current_epoch)

    def train_dataloader(self) -> DataLoader:
        return DataLoader(TensorDataset(*self.data), batch_size=self.batch_size)


LIKE_TWO: dict[str, Any] = {"2": 2, "tokens": Tokens(8), "by step": lambda step: 2, "by epoch": {0: 2, 3: 2}}


@pytest.mark.parametrize("policy", LIKE_TWO)
def test_stochastic_weight_averaging_as_with_lightnings_windows_of_the_same_batches(policy: str) -> None:
    plain, ours = Regression(), Regression()
    swa = [pl.callbacks.StochasticWeightAveraging(0.01, swa_epoch_start=2, annealing_epochs=1) for _ in range(2)]
    fit(plain, None, swa[0], strategy="auto", accumulate_grad_batches=2, max_epochs=5)
    run = fit(ours, None, swa[1], GradientAccumulation(LIKE_TWO[policy]), max_epochs=5)
    assert plain.steps == ours.steps
    assert run.accumulate_grad_batches == 1
    assert relative_error(ours.parameters(), plain.parameters()) < 1e-12


# with tokens it notes after every loader batch: it goes by trainer.accumulate_grad_batches
RATES = {"3": (3, 1), "up and down": (lambda step: [2, 3, 1][step % 3], 1), "by epoch": ({0: 3}, 1), "tokens": (Tokens(3), 3)}


@pytest.mark.parametrize(("policy", "notes"), RATES.values(), ids=RATES)
def test_the_rate_finder_tries_each_rate_in_one_window(policy: Any, notes: int) -> None:
    class Rates(Scalar):  # writes down the rate of every optimizer step
        rates: tuple[float, ...] = ()

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            super().on_before_optimizer_step(optimizer)
            self.rates += (optimizer.param_groups[0]["lr"],)

    runs, rates, noted = [], [], []
    for strategy, callbacks in (("auto", []), ("accum", [GradientAccumulation(policy)])):
        module = Rates([x(i) for i in range(1, 13)], lr=1e-3)
        runs.append(trainer(strategy, callbacks=callbacks, max_epochs=-1, max_steps=5))
        options = {"min_lr": 1e-4, "max_lr": 1e-2, "num_training": 10, "early_stop_threshold": None, "update_attr": False}
        noted.append(Tuner(runs[-1]).lr_find(module, **options).results["lr"])
        rates.append([*module.rates])
    assert rates[1] == rates[0]
    assert len(rates[1]) == 10
    assert noted[1] == [rate for rate in rates[0] for _ in range(notes)]
    assert module.w.item() == 0  # as before
    runs[1].fit(module)
    assert runs[1].global_step == 5


@pytest.mark.parametrize(
    ("policy", "steps", "fits", "expected"),
    [(2, 2, 99, 4), (LIKE_TWO["tokens"], 2, 99, 4), (None, 1, 99, 4), (None, 1, 2, 2)],
    ids=["2", "tokens", "one step of each size", "out of memory"],
)
def test_the_batch_size_finder_finds_what_it_does_with_lightning(policy: Any, steps: int, fits: int, expected: int) -> None:
    module = Regression(2, fits)
    before = [parameter.detach().clone() for parameter in module.parameters()]
    run = trainer("accum", callbacks=[] if policy is None else [GradientAccumulation(policy)])
    assert Tuner(run).scale_batch_size(module, max_trials=2 if fits == 99 else 3, steps_per_trial=steps) == expected
    assert all(torch.equal(p, q) for p, q in zip(before, module.parameters(), strict=True))
    module.steps = []
    run.fit(module)
    assert len(module.steps) == run.global_step == 32 // expected // (1 if policy is None else 2)
