"""verify(devices=2): one window over real ranks against the full batch, and what is planted in one is named."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.utilities.exceptions import MisconfigurationException
from sharded import needs_sharding_on_cpu, shard
from support import Language, pad, python_path, sentences
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lightning_accum import DDPAccumulationStrategy, ModelParallelAccumulationStrategy, Tokens, verify
from lightning_accum.verification import processes

ROWS = pad(sentences(16))


def rank() -> int:
    """Of this process; 0 where it is alone."""
    return dist.get_rank() if dist.is_initialized() else 0


def ranks() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


# --- correct set-ups raise no alarm ---------------------------------------------------------------------------------------


class Sharded(Language):
    """Over fully_shard where the strategy is for that."""

    def configure_model(self) -> None:
        if isinstance(self.trainer.strategy, ModelParallelAccumulationStrategy):
            shard(self, [*self.net.blocks, self.net])


class Dropped(Language):
    """Draws other random numbers on each row, and on each rank."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = nn.functional.dropout(self.net(batch["input_ids"]), 0.1)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


class OfSum(Language):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch["input_ids"]).square().sum()


class OfRoot(Language):
    """A function of a mean, whose factor depends on the whole batch."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.net(batch["input_ids"]).square().mean().sqrt()


class WithBuffer(Language):
    """A buffer that differs between ranks, and that no loss depends on."""

    def setup(self, stage: str) -> None:
        self.register_buffer("rank", torch.tensor(float(os.environ.get("RANK", "0"))))


LONG = pytest.mark.exhaustive


@pytest.mark.parametrize(
    ("module", "arguments"),
    [
        (lambda: Language("adamw"), {"window": 2}),
        pytest.param(Language, {"micro_batch": 2, "gradient_clip_val": 0.1}, marks=LONG),
        pytest.param(Language, {"devices": 4, "micro_batch": Tokens(30)}, marks=LONG),
        pytest.param(Dropped, {"window": 2}, marks=LONG),
        pytest.param(OfSum, {"window": 2}, marks=LONG),
        pytest.param(OfRoot, {"window": 2}, marks=LONG),
        pytest.param(WithBuffer, {"strategy": DDPAccumulationStrategy(broadcast_buffers=False)}, marks=LONG),
        pytest.param(Language, {"strategy": DDPAccumulationStrategy(sync="micro_batch"), "window": 3}, marks=LONG),
        pytest.param(Sharded, {"strategy": "accum_model_parallel", "window": 2}, marks=[LONG, needs_sharding_on_cpu]),
        pytest.param(
            lambda: Sharded("adamw"),
            {"strategy": ModelParallelAccumulationStrategy(2, 1, sync="micro_batch"), "micro_batch": 2},
            marks=[LONG, needs_sharding_on_cpu],
        ),
    ],
)
def test_correct_set_up_over_ranks_is_equal(module: Callable[[], Any], arguments: dict[str, Any]) -> None:
    report = verify(module(), ROWS, **{"devices": 2, **arguments})
    assert report, str(report)
    assert report.ranks == arguments.get("devices", 2)
    assert (report.gradient <= 1e-12, report.breaks) == (True, [])


def test_the_module_is_as_it_was() -> None:
    module = Language()
    before = {name: value.clone() for name, value in module.state_dict().items()}
    verify(module, ROWS, window=2, devices=2)
    assert all(torch.equal(value, before[name]) for name, value in module.state_dict().items())
    assert (dist.is_initialized(), module._trainer, module.net.head.weight.grad) == (False, None, None)


# --- what is planted is named ---------------------------------------------------------------------------------------------


class RankCountsTwice(Language):
    """Rank 1 multiplies its gradients."""

    def on_train_start(self) -> None:
        if rank() == 1:
            for parameter in self.parameters():
                parameter.register_hook(lambda gradient: 2 * gradient)


class RankIsLeftOut(Language):
    def on_train_start(self) -> None:
        if rank() == 1:
            for parameter in self.parameters():
                parameter.register_hook(torch.zeros_like)


class TimesWorldSize(Language):
    """The loss is scaled for a mean over ranks, which the strategy has none of."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * ranks()


class RankScalesItsLoss(Language):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * (1 + rank())


class WithHook(DDPAccumulationStrategy):
    """Lightning registers communication hooks on GPUs only."""

    def __init__(self, hook: Any) -> None:
        super().__init__()
        self.hook = hook

    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        ddp = super()._setup_model(model)
        ddp.register_comm_hook(None, self.hook)
        return ddp


def sum_times(factor: float) -> Any:
    """A communication hook that sums where DistributedDataParallel averages."""

    def hook(state, bucket):  # torch looks at annotations, and these would be strings
        future = dist.all_reduce(bucket.buffer().mul_(factor), async_op=True).get_future()
        return future.then(lambda done: done.value()[0])

    return hook


class HeadIsIgnored(DDPAccumulationStrategy):
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["net.head.bias"])
        return super()._setup_model(model)


class OtherBuffers(Language):
    def setup(self, stage: str) -> None:
        self.register_buffer("temperature", torch.tensor(1.0 + int(os.environ.get("RANK", "0"))))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch["input_ids"]) / self.temperature
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


class OtherSeeds(Language):
    """Features are left out, the same for all rows; each rank draws others."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        torch.manual_seed(rank())
        logits = self.net(batch["input_ids"]) * (torch.rand(17, dtype=torch.float64) < 0.5)
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


class OtherParameters(Language):
    def configure_model(self) -> None:
        torch.manual_seed(int(os.environ.get("RANK", "0")) + 10 * ("RANK" in os.environ))
        self.net.head = nn.Linear(16, 17).double()


class OtherWeights(Language):
    def on_train_start(self) -> None:
        with torch.no_grad():
            self.net.head.weight.mul_(1 + 0.01 * rank())


class MadeLate(Language):
    """A parameter that is made when training starts."""

    def on_train_start(self) -> None:
        self.late = nn.Parameter(torch.ones(17, dtype=torch.float64))
        self.trainer.optimizers[0].add_param_group({"params": [self.late]})

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self.net(batch["input_ids"]) * self.late
        return nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), ignore_index=-100)


class RankIsSilent(Language):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if rank() == 1 else super().training_step(batch, batch_idx)


class OtherLearningRate(Language):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1 * (1 + rank()))


class DividedAfterReduction(Language):
    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        for parameter in self.parameters():
            parameter.grad /= ranks()


class LocalCount(Language):
    """Divides by the mean number of tokens of a rank, which is hidden from the graph in a number."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits, labels = self.net(batch["input_ids"]), batch["labels"]
        total = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100, reduction="sum")
        return total / (labels != -100).sum() * (1.5 if rank() else 1.0)


class RankDropsLabels(Language):
    """Rank 1 passes over the last label of each row, which only some rows have."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        labels = batch["labels"].clone()
        labels[:, -1 if rank() else labels.shape[1] :] = -100
        return super().training_step({**batch, "labels": labels}, batch_idx)


class Planted(NamedTuple):
    module: Callable[[], Any]
    strategy: Any
    name: str
    found: str


PLANTED = {
    "a rank counted twice": Planted(RankCountsTwice, "accum_ddp", "rank 1", "rank 0 1 times, rank 1 2 times"),
    "a rank left out": Planted(RankIsLeftOut, "accum_ddp", "rank 1", "rank 1 .* times.* Those of rank 1 are left out"),
    "mean over ranks of means": Planted(Language, "ddp", "mean over ranks of means", "as much as any other, .*weigh"),
    "loss times the world size": Planted(
        TimesWorldSize, "accum_ddp", "loss of all ranks", "rank 0: 2 times, rank 1: 2 times.*number of ranks"
    ),
    "loss of one rank scaled": Planted(RankScalesItsLoss, "accum_ddp", "loss of a rank", r"\(rank 1: 2 times\)"),
    "loss of one rank scaled oddly": Planted(LocalCount, "accum_ddp", "loss of a rank", "(?i)rank 1"),
    "labels of one rank dropped": Planted(
        RankDropsLabels, "accum_ddp", "loss of a rank", r"rank 1 has another loss \((\S+) on rank 1, (?!\1)"
    ),
    "no division by the world size": Planted(
        Language, WithHook(sum_times(1.0)), "scale over the ranks", "2 times .*number of ranks is multiplied by once too"
    ),
    "two divisions by the world size": Planted(
        Language, WithHook(sum_times(0.25)), "scale over the ranks", "0.5 times .*divided by once too often"
    ),
    "a parameter left out of the reduction": Planted(
        Language, HeadIsIgnored(), "reduction of a parameter", r"net\.head\.bias is not reduced"
    ),
    "other buffers": Planted(
        OtherBuffers, DDPAccumulationStrategy(broadcast_buffers=False), "buffers of a rank", "On rank 1 temperature is not"
    ),
    "other seeds": Planted(OtherSeeds, "accum_ddp", "seeds of the ranks", r"seeded otherwise on each rank \(0, 1\)"),
    "other parameters": Planted(
        OtherParameters, "accum_ddp", "parameters before the step", "On all ranks net.head.weight, net.head.bias are"
    ),
    "other parameters when training starts": Planted(
        OtherWeights, "accum_ddp", "parameters before the step", "On rank 1 net.head.weight is not those"
    ),
    "half precision": Planted(
        Language, WithHook(default_hooks.fp16_compress_hook), "precision of the reduction", "rounded to float16"
    ),
    "a rank without a loss": Planted(
        RankIsSilent, "accum_ddp", "micro-batches of a rank", "Rank 1 has 0 micro-batches with a loss, .* has 1"
    ),
    "another learning rate": Planted(
        OtherLearningRate, "accum_ddp", "optimizer step of rank 1", "Rank 1 has the gradient of the full batch"
    ),
    "a division after the reduction": Planted(DividedAfterReduction, "accum_ddp", "after the reduction", "0.5 times as large"),
}


@pytest.mark.parametrize("planted", [name if i in (0, 9) else pytest.param(name, marks=LONG) for i, name in enumerate(PLANTED)])
def test_planted_bug_is_named(planted: str) -> None:
    module, strategy, name, found = PLANTED[planted]
    report = verify(module(), ROWS, devices=2, strategy=strategy)
    assert not report
    assert [one.name for one in report.breaks] == [name], str(report)
    assert re.search(found, report.breaks[0].found), str(report)
    assert name in report.verdict


class ShardedTimesWorldSize(Sharded, TimesWorldSize):
    pass


class ShardedAndDivided(Sharded, DividedAfterReduction):
    pass


class ShardedOnOtherSeeds(Sharded, OtherSeeds):
    pass


@LONG
@needs_sharding_on_cpu
@pytest.mark.parametrize(
    ("module", "name"),
    [
        (ShardedTimesWorldSize, "loss of all ranks"),
        (ShardedAndDivided, "after the reduction"),
        (ShardedOnOtherSeeds, "seeds of the ranks"),
    ],
)
def test_planted_bug_is_named_over_shards(module: Callable[[], Any], name: str) -> None:
    report = verify(module(), ROWS, devices=2, strategy="accum_model_parallel")
    assert [one.name for one in report.breaks] == [name], str(report)


@LONG
def test_bug_on_one_of_four_ranks_is_that_ranks() -> None:
    report = verify(RankCountsTwice(), ROWS, devices=4)
    assert [one.name for one in report.breaks] == ["rank 1"], str(report)


def test_means_of_micro_batches_of_several_sizes_are_named_where_lightnings_own_strategy_takes_their_mean() -> None:
    rows = sentences(16)
    batches = [pad(rows[start:stop]) for start, stop in ((0, 5), (5, 7), (7, 15), (15, 16))]
    report = verify(Language(), batches, window=2, devices=2, strategy="ddp")
    assert not report
    assert "ddp may take the mean of the means of micro-batches" in " ".join(str(report).split())
    assert verify(Language(), batches, window=2, devices=2, strategy="accum_ddp")


def test_what_breaks_equality_in_one_process_is_named_before_any_rank_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "run_on_ranks", None)
    report = verify(Language(), ROWS, devices=2, weight="equal")
    assert ([one.name for one in report.breaks], report.ranks) == (["weight"], 1)


# --- ranks that fail ------------------------------------------------------------------------------------------------------


class FailsOnRank(Language):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if rank() == 1:
            raise KeyError("no such column")


class Waits(Language):
    """Rank 1 enters a collective that rank 0 does not."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if rank() == 1:
            dist.barrier()


def test_parameter_that_ddp_does_not_know_is_named() -> None:
    with pytest.raises(MisconfigurationException, match="does not reduce the gradients of late"):
        verify(MadeLate(), ROWS, devices=2)


def test_error_of_a_rank_names_it() -> None:
    with pytest.raises(MisconfigurationException, match="(?s)rank 1.*no such column"):
        verify(FailsOnRank(), ROWS, devices=2)


class IsKilled(Language):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)


@LONG
def test_rank_whose_process_is_killed_is_named() -> None:
    with pytest.raises(MisconfigurationException, match="rank 1 with exit code -9"):
        verify(IsKilled(), ROWS, devices=2)


@LONG
def test_ranks_that_wait_for_each_other_are_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "MOST_SECONDS", 8.0)
    with pytest.raises(MisconfigurationException, match="the ranks wait for each other|On rank"):
        verify(Waits(), ROWS, devices=2)


@pytest.mark.parametrize(
    ("arguments", "found"),
    [
        ({"devices": 0}, r"devices=0\): expected a number of ranks from 1"),
        ({"devices": "auto"}, r"devices='auto'\)"),
        ({"devices": 2, "accelerator": "gpu"}, 'pass accelerator="cpu"'),
        ({"devices": 1}, "nothing to compare"),
        ({"devices": 32}, "has 16 rows"),
    ],
)
def test_ranks_that_cannot_be_are_named(arguments: dict[str, Any], found: str) -> None:
    with pytest.raises(MisconfigurationException, match=found):
        verify(Language(), ROWS, **arguments)


@LONG
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_strategy_that_starts_processes_is_refused(start: str) -> None:
    with pytest.raises(MisconfigurationException, match="pass a DDPAccumulationStrategy without start_method"):
        verify(Language(), ROWS, devices=2, strategy=DDPAccumulationStrategy(start_method=start))


@LONG
def test_ranks_that_cannot_be_told_apart_are_not_named() -> None:
    same = {name: rows[:1].repeat(4, 1) for name, rows in ROWS.items()}
    report = verify(RankCountsTwice(), same, devices=2)
    assert "1.5 times the full batch's: on this data ranks cannot be told apart" in report.breaks[0].found


@LONG
def test_sharding_over_other_dimensions_than_data_is_refused() -> None:
    with pytest.raises(MisconfigurationException, match="has 1 data-parallel ranks. Pass an object"):
        verify(Sharded(), ROWS, devices=2, strategy=ModelParallelAccumulationStrategy(1, 2))


# --- the command line, and torchrun ---------------------------------------------------------------------------------------


def run(command: list[str]) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": python_path()}
    folder = Path(__file__).parent
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=220, check=False)


@LONG
@pytest.mark.parametrize(
    ("module", "arguments", "status", "found"),
    [
        ("Sharded", ["--strategy", "accum_model_parallel", "--window", "2"], 0, "Sharded takes the same optimizer step on 2"),
        ("RankCountsTwice", [], 1, "rank 1: The rows of the ranks do not count alike: rank 0 1 times, rank 1 2"),
    ],
)
@pytest.mark.parametrize("launcher", ["python", "torchrun"])
@needs_sharding_on_cpu
def test_command_verifies_over_ranks(launcher: str, module: str, arguments: list[str], status: int, found: str) -> None:
    start = [sys.executable, "-m"]
    if launcher == "torchrun":
        start += ["torch.distributed.run", "--standalone", "--nproc-per-node=2", "-m"]
    name = f"test_verify_over_ranks:{module}"
    done = run([*start, "lightning_accum", "verify", name, "--data", "test_verify_over_ranks:ROWS", "--devices", "2", *arguments])
    assert (done.returncode != 0) == bool(status), done.stderr
    assert " ".join(done.stdout.split()).count(found) == 1, done.stdout + done.stderr
