"""verify(devices=2): one window over real ranks against the full batch, and what is planted in one is named."""

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.fabric.plugins.precision.utils import _DtypeContextManager
from sharded import needs_sharding_on_cpu, shard
from support import Language, command, pad, sentences
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel

from lightning_accum import AccumulationError, DDPAccumulationStrategy, ModelParallelAccumulationStrategy, Tokens, verify

ROWS = pad(sentences(16))
OF_SEVERAL_SIZES = [pad(sentences(16)[start:stop]) for start, stop in ((0, 5), (5, 7), (7, 15), (15, 16))]


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


class Planted(Language):  # a language model with something of its own, by name; sharded where the strategy is for that
    def __init__(self, what: str = "", optimizer: str = "sgd") -> None:
        super().__init__(optimizer)
        self.what = what

    def setup(self, stage: str) -> None:
        if "buffers" in self.what:  # a loss depends on the other buffers
            self.register_buffer("temperature", torch.tensor(1.0 + int(os.environ.get("RANK", "0"))))

    def configure_model(self) -> None:
        if self.what == "other parameters":
            torch.manual_seed(int(os.environ.get("RANK", "0")) + 10 * ("RANK" in os.environ))
            self.net.head = nn.Linear(16, 17).double()
        if isinstance(self.trainer.strategy, ModelParallelAccumulationStrategy):
            shard(self, [*self.net.blocks, self.net])

    def on_train_start(self) -> None:
        if rank() == 1 and self.what == "a rank counted twice":
            for parameter in self.parameters():
                parameter.register_hook(lambda gradient: 2 * gradient)
        if self.what == "a parameter made late":
            self.late = nn.Parameter(torch.ones((), dtype=torch.float64))
            self.trainer.optimizers[0].add_param_group({"params": [self.late]})

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if rank() == 1 and self.what == "a rank killed":
            os.kill(os.getpid(), signal.SIGKILL)
        assert rank() == 0 or self.what != "an error", "no such column"

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.what == "a rank without a loss" and rank() == 1:
            return None
        changes: dict[str, Any] = {
            "dropout": lambda logits: nn.functional.dropout(logits, 0.1),
            "a number of the default type": lambda logits: logits * torch.tensor(1 / 3),
            "other buffers": lambda logits: logits / self.temperature,
            "a parameter made late": lambda logits: logits * self.late,
        }
        logits, labels = changes.get(self.what, lambda logits: logits)(self.net(batch["input_ids"])), batch["labels"]
        if self.what in ("a sum", "a function of a mean"):
            return logits.square().sum() if self.what == "a sum" else logits.square().mean().sqrt()
        factor = {"loss times the world size": self.trainer.world_size, "loss of one rank scaled": 1 + rank()}.get(self.what, 1)
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100) * factor

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.what == "a division after the reduction":
            for parameter in self.parameters():
                parameter.grad /= self.trainer.world_size

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.what == "another learning rate":
            return torch.optim.SGD(self.parameters(), lr=0.1 * (1 + rank()))
        return super().configure_optimizers()


@pytest.mark.some_cases(1, 4)
@needs_sharding_on_cpu
@pytest.mark.parametrize(
    ("what", "arguments"),
    [
        ("", {"window": 2}),
        ("", {"window": 2, "data": OF_SEVERAL_SIZES}),
        ("", {"micro_batch": 2, "gradient_clip_val": 0.1}),
        ("", {"devices": 4, "micro_batch": Tokens(30)}),
        ("dropout", {"window": 2}),
        ("a sum", {"window": 2}),
        ("a function of a mean", {"window": 2}),
        ("buffers that no loss depends on", {"strategy": DDPAccumulationStrategy(broadcast_buffers=False)}),
        ("", {"strategy": DDPAccumulationStrategy(sync="micro_batch"), "window": 3}),
        ("", {"strategy": "accum_model_parallel", "window": 2}),
        ("", {"strategy": ModelParallelAccumulationStrategy(2, 1, sync="micro_batch"), "micro_batch": 2}),
    ],
)
def test_a_correct_set_up_over_ranks_is_equal_and_the_module_stays_as_it_was(what: str, arguments: dict[str, Any]) -> None:
    module = Planted(what, "adamw")
    before = {name: value.clone() for name, value in module.state_dict().items()}
    report = verify(module, **{"data": ROWS, "devices": 2, **arguments})
    assert report, str(report)
    assert (report.ranks, report.gradient <= 1e-12, report.breaks) == (arguments.get("devices", 2), True, [])
    torch.testing.assert_close(dict(module.state_dict()), before, rtol=0, atol=0)
    assert (dist.is_initialized(), module.net.head.weight.grad) == (False, None)


def test_ranks_compute_in_the_default_type_of_this_process() -> None:
    with _DtypeContextManager(torch.float64):
        assert verify(Planted("a number of the default type"), ROWS, devices=2, precision="32-true")


class Compresses(DDPAccumulationStrategy):  # Lightning registers communication hooks on GPUs only
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        ddp = super()._setup_model(model)
        ddp.register_comm_hook(None, default_hooks.fp16_compress_hook)
        return ddp


class HeadIsIgnored(DDPAccumulationStrategy):
    def _setup_model(self, model: nn.Module) -> DistributedDataParallel:
        DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ["net.head.bias"])
        return super()._setup_model(model)


SHARDS = "accum_model_parallel"
PLANTED: list[tuple[str, Any, str, str]] = [
    ("a rank counted twice", "accum_ddp", "gradients of the ranks", "net"),
    ("loss of one rank scaled", "accum_ddp", "loss of a rank", "rank 1"),
    ("", HeadIsIgnored(), "gradients of the ranks", "net.head.bias"),
    ("other buffers", DDPAccumulationStrategy(broadcast_buffers=False), "loss of a rank", "temperature"),
    ("other parameters", "accum_ddp", "loss of a rank", "net.head.weight"),
    ("", Compresses(), "gradients of the ranks", "net"),
    ("a rank without a loss", "accum_ddp", "loss of a rank", "rank 1: none"),
    ("another learning rate", "accum_ddp", "optimizer step of a rank", "Rank 1"),
    ("a division after the reduction", "accum_ddp", "optimizer step of a rank", "Rank 1"),
    ("loss times the world size", SHARDS, "loss of a rank", "rank 1"),
]


@pytest.mark.some_cases(1, 4)
@needs_sharding_on_cpu
@pytest.mark.parametrize(("what", "strategy", "name", "found"), PLANTED)
def test_a_planted_bug_is_named(what: str, strategy: Any, name: str, found: str) -> None:
    report = verify(Planted(what), ROWS, devices=2, strategy=strategy)
    assert not report
    assert report.breaks[0].name == name, str(report)
    assert found in " ".join(f"{one.found} {one.mend}" for one in report.breaks)
    assert name in report.verdict


def test_what_breaks_equality_in_one_process_is_named_before_any_rank_starts() -> None:
    report = verify(Planted("an error"), ROWS, devices=2, weight="equal")
    assert ([one.name for one in report.breaks], report.ranks) == (["weight"], 1)


FAILING = [("an error", "no such column"), ("a parameter made late", "late"), ("a rank killed", "rank 1")]


@pytest.mark.some_cases(1)
@pytest.mark.parametrize(("what", "named"), FAILING)
def test_a_rank_that_fails_is_an_error_that_names_it(what: str, named: str) -> None:
    with pytest.raises(AccumulationError, match=named):
        verify(Planted(what), ROWS, devices=2)


@pytest.mark.parametrize(("arguments", "named"), [
    ({"devices": 0}, "devices"), ({"devices": "auto"}, "devices"), ({"devices": 2, "accelerator": "gpu"}, "accelerator"),
    ({"devices": 2, "strategy": "ddp"}, "accum_ddp"), ({"devices": 1}, "micro_batch="), ({"devices": 32}, "16 rows"),
    ({"devices": 2, "strategy": DDPAccumulationStrategy(start_method="fork")}, "start_method"),
    ({"devices": 2, "strategy": ModelParallelAccumulationStrategy(1, 2)}, "data-parallel"),
])  # fmt: skip
def test_ranks_that_cannot_be_are_refused(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(AccumulationError, match=named):
        verify(Planted(), ROWS, **arguments)


def counted_twice() -> Planted:
    return Planted("a rank counted twice")


OF_THIS_FILE = ["--data", "test_verify_over_ranks:ROWS", "--devices", "2"]


def test_the_command_names_the_rank_that_is_off(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert command(monkeypatch, "verify", "test_verify_over_ranks:counted_twice", *OF_THIS_FILE) == 1
    assert "on rank 0 the reduced gradients of net" in capsys.readouterr().out
