"""``micro_batch="auto"``: an attempt that runs out of memory is as if it had not been, and the step is the one that was due."""

from collections.abc import Callable
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import Language, Scalar, Toy, fit, labelled, limited, loader, pad, relative_error, sentences, trainer, x
from torch import Tensor, nn
from torch.nn import functional as F

from lightning_accum import AccumulationError, GradientAccumulation

EPOCHS, BATCH, ROWS = 2, 16, sentences(101)
WHERE = pytest.mark.parametrize("where", ["forward", "backward"])


def batches(size: int = BATCH, rows: int = len(ROWS)) -> list[dict[str, Tensor]]:
    return [pad(ROWS[:rows][first : first + size]) for first in range(0, rows, size)]


def exhausted() -> Exception:
    return torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 GiB.")


class Limited(Language):
    """Runs out of memory above ``most`` rows, in the middle of the network: some gradients are there by then, some are not."""

    attempts: list[int] = []

    def __init__(self, most: int = 4, where: str = "forward", optimizer: str = "adamw", less: int = 0) -> None:
        super().__init__(optimizer)
        self.most, self.less, self.where = most, less, where
        self.net.blocks[1].register_forward_pre_hook(self.limit)

    def limit(self, block: nn.Module, inputs: tuple[Tensor, ...]) -> Any:
        self.attempts.append(len(inputs[0]))
        return (limited(inputs[0], self.limit_here(), self.where, exhausted), *inputs[1:])

    def limit_here(self) -> int:  # with ``less``, only the first batch of each window of three has room for ``most``
        return self.less if self.less and self.trainer.fit_loop.epoch_loop.batch_idx % 3 else self.most


def trained(module: pl.LightningModule, size: int = BATCH, **policy: Any) -> pl.LightningModule:
    callbacks = [GradientAccumulation(**{"micro_batch": "auto", **policy})] if policy else []
    fit(module, batches(size), *callbacks, strategy="accum" if policy else "auto", max_epochs=EPOCHS)
    return module


@pytest.mark.some_cases(1, 2)
@WHERE
@pytest.mark.parametrize(("most", "less", "policy"), [(4, 0, {"micro_batch": "auto"}), (16, 5, {"window": 3})])
def test_the_step_is_the_one_that_was_due_with_gradients_of_earlier_batches(most: int, less: int, policy: Any, where: str) -> None:
    module, whole = trained(Limited(most, where, less=less), **policy), trained(Language("adamw"), policy.get("window", 1) * BATCH)
    assert relative_error(module.parameters(), whole.parameters()) < 1e-12


@pytest.mark.filterwarnings("error::lightning_accum.AccumulationWarning")
@pytest.mark.some_cases(1, 1)
@pytest.mark.parametrize("most", [2, 5, 12])
def test_what_does_not_fit_into_memory_is_checked_all_the_same(most: int) -> None:
    run = fit(module := Limited(most), batches(), GradientAccumulation(micro_batch="auto"))
    assert run.global_step == len(batches())
    assert max(module.attempts) > most  # it did run out


@pytest.mark.some_cases(1)
@WHERE
def test_an_attempt_that_runs_out_of_memory_leaves_nothing_in_the_sums(where: str) -> None:
    policy = {"trim_padding": False, "accumulate_dtype": torch.float64}
    found = trained(Limited(4, where).float(), **policy)  # fails in the first batch of a window
    expected = trained(Language("adamw").float(), micro_batch=4, **policy)
    assert all(map(torch.equal, found.parameters(), expected.parameters()))


def test_another_attempt_reads_the_lengths_of_its_own_batch() -> None:
    class OnADevice(Limited):  # the lengths are read while a batch is on the host, of the next one for the check, too
        def transfer_batch_to_device(self, batch: Any, device: Any, dataloader_idx: int) -> Any:
            self.trainer.strategy.accumulation.splitting.look_at(batch)
            return batch

    longest = max(ROWS, key=len)
    rows = pad([longest[:number] for number in (12, 12, 12, 10, 9, 9, 3, 3)])
    data = [{name: part[first : first + 4] for name, part in rows.items()} for first in (0, 4)]
    fit(module := OnADevice(2), data, GradientAccumulation(2, micro_batch="auto"))
    fit(whole := Language("adamw"), [rows], strategy="auto")
    assert relative_error(module.parameters(), whole.parameters()) < 1e-12


def caused() -> Exception:
    error = ValueError("the step failed")
    error.__cause__ = torch.OutOfMemoryError("CUDA out of memory")
    return error


LACKS: list[Callable[[], Exception]] = [
    lambda: RuntimeError("[enforce fail at alloc_cpu.cpp:118] DefaultCPUAllocator: can't allocate memory: you tried to"),
    lambda: RuntimeError("cuDNN error: CUDNN_STATUS_ALLOC_FAILED"),
    lambda: RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    lambda: RuntimeError("HIP out of memory. Tried to allocate 20.00 MiB"),
    lambda: RuntimeError("MPS backend out of memory (MPS allocated: 17.21 GB, other allocations: 1 MB, max allowed: 18.13 GB)"),
    lambda: RuntimeError("CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported"),
    lambda: RuntimeError("CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`"),
    lambda: RuntimeError("FIND was unable to find an engine to execute this computation"),
    MemoryError,
    caused,
]
OTHERS: list[Callable[[], Exception]] = [
    lambda: RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
    lambda: RuntimeError("CUDA error: device-side assert triggered"),
    KeyError,
]


def run_with_room_for_4(error: Callable[[], Exception]) -> pl.Trainer:
    module = Toy(lambda net, batch: F.cross_entropy(limited(net(batch[0]), 4, "forward", error), batch[1]))
    return fit(module, labelled(8, 8), GradientAccumulation(micro_batch="auto", check=False))


@pytest.mark.parametrize("error", LACKS)
def test_a_lack_of_memory_of_any_device_or_library_halves_the_micro_batch(error: Callable[[], Exception]) -> None:
    run = run_with_room_for_4(error)
    assert (run.global_step, run.callback_metrics["window/micro_batch_size"]) == (2, 4)


@pytest.mark.parametrize("error", OTHERS)
def test_other_errors_are_raised(error: Callable[[], Exception]) -> None:
    with pytest.raises(type(error())):
        run_with_room_for_4(error)


def test_the_size_is_kept_and_shown_and_saved() -> None:
    Limited.attempts.clear()
    policy = {"micro_batch": "auto", "trim_padding": False, "check": False}
    run = fit(Limited(4), batches(), GradientAccumulation(**policy), max_epochs=2)
    assert [rows for rows in Limited.attempts if rows > 4] == [16, 8, 8]  # in the first batch, and once in the next epoch
    assert run.callback_metrics["window/micro_batch_size"] == 4
    run.save_checkpoint("a.ckpt")
    Limited.attempts.clear()
    fit(Limited(4), batches(), GradientAccumulation(**policy), max_epochs=3, ckpt_path="a.ckpt")
    assert [rows for rows in Limited.attempts if rows > 4] == [8]  # known from the checkpoint


class Teacher(Limited):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with torch.no_grad():
            self.net.position.mul_(0.99)
        return super().training_step(batch, batch_idx)


class InPlace(Scalar):
    def loss(self, x: Tensor) -> Tensor:
        x.sub_(1.0)
        if len(x) > 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return (self.w * x).mean()


@pytest.mark.parametrize(
    ("module", "data", "policy", "error", "match"),
    [
        (lambda: Limited(0), batches(), {}, torch.OutOfMemoryError, "sample"),
        (lambda: Limited(4), batches(), {"micro_batch": 8}, torch.OutOfMemoryError, "Tried to allocate"),
        (Teacher, batches(), {"trim_padding": False}, AccumulationError, r"net\.position"),
        (lambda: InPlace([x(1, 2, 3, 4)]), None, {}, AccumulationError, "in place"),
    ],
    ids=["one sample", "a fixed size", "parameters that a step changes", "a batch that a step changes"],
)
def test_what_a_smaller_size_does_not_mend_is_an_error(module: Any, data: Any, policy: Any, error: Any, match: str) -> None:
    with pytest.raises(error, match=match):
        fit(module(), data, GradientAccumulation(**{"micro_batch": "auto", **policy}))


@pytest.mark.some_cases(1, 2)
@WHERE
@pytest.mark.parametrize(("most", "agreed"), [((8, 2), 2), ((3, 8), 2), ((2, 4), 2), ((1, 1), 1)])
@pytest.mark.parametrize("window", [1, 2])
def test_one_rank_or_both_out_of_memory(most: tuple[int, int], agreed: int, where: str, window: int) -> None:
    class Ranked(Limited):  # every rank has half of the rows, and room of its own
        def __init__(self, most_by_rank: tuple[int, int], where: str) -> None:
            super().__init__(where=where)
            self.most_by_rank = most_by_rank

        def limit_here(self) -> int:
            return self.most_by_rank[self.global_rank]

        def train_dataloader(self) -> Any:
            first = 8 * self.global_rank
            return loader([pad(ROWS[:96][i + first : i + first + 8]) for i in range(0, 96, 16)])

        def on_train_end(self) -> None:
            torch.save(int(self.trainer.callback_metrics["window/micro_batch_size"]), f"size-{self.global_rank}.pt")

    trainer("auto", max_epochs=EPOCHS).fit(whole := Language("adamw"), loader(batches(16 * window, 96)))
    policy = GradientAccumulation(window, micro_batch="auto", trim_padding=False)
    fit(module := Ranked(most, where), None, policy, ranks=2, max_epochs=EPOCHS)
    assert relative_error(module.parameters(), whole.parameters()) < 1e-12
    assert [torch.load(f"size-{rank}.pt") for rank in (0, 1)] == [agreed, agreed]
