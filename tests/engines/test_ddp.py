"""Real processes over gloo: what is sent, how they are launched, and what is refused."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, StrategyRegistry, XLAStrategy
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from support import Scalar, ddp, end_profile, python_path, trainer, x
from torch.profiler import ProfilerActivity, profile

import lightning_accum
from lightning_accum import AccumulationStrategy, DDPAccumulationStrategy, GradientAccumulation, SampleCount, TokenCount, Tokens

# --- collectives ------------------------------------------------------------------------------------------------------


class Profiled(Scalar):
    """Records the collectives of its last three windows of four on rank 0: after the first, DistributedDataParallel rebuilds its
    buckets once."""

    def on_train_batch_start(self, batch, batch_idx) -> None:
        if batch_idx == len(self.by_rank[0]) // 4:
            self.profile = profile(activities=[ProfilerActivity.CPU], record_shapes=True)
            self.profile.__enter__()

    def on_train_batch_end(self, outputs, batch, batch_idx) -> None:
        if batch_idx == len(self.by_rank[0]) - 1:
            end_profile(self.profile)
            events = [event for event in self.profile.events() if event.name.startswith("gloo:")]
            sizes = [(event.name, sum(torch.Size(shape).numel() for shape in event.input_shapes)) for event in events]
            if self.global_rank == 0:
                torch.save(sizes, "collectives.pt")


SINGLE = [[x(i) for i in range(16)], [x(i, i) for i in range(16)]]
MANY = [[torch.arange(24.0).double().reshape(8, 3)[:rows] + batch for batch in range(4)] for rows in (8, 5)]


# batches of one row cannot be checked, and the ranks would ask at each of the first eight
@pytest.mark.parametrize(
    ("sync", "policy", "by_rank", "reductions", "small"),
    [
        ("window", {"window": 4, "check": False}, SINGLE, 3, [8]),
        ("micro_batch", {"window": 4, "check": False}, SINGLE, 12, [8]),
        ("window", {"micro_batch": 2}, MANY, 3, [8]),
        ("window", {"micro_batch": Tokens(6)}, MANY, 3, [8]),
        # where all is reduced after the last micro-batch, a byte for each of two parameters: is it used on any rank?
        ("window", {"micro_batch": "auto"}, MANY, 3, [8, 2]),
    ],
)
def test_one_gradient_reduction_and_one_small_all_reduce_a_window(sync, policy, by_rank, reductions, small) -> None:
    module = Profiled(by_rank=by_rank)
    module.big = torch.nn.Linear(100, 1, bias=False).double()
    module.loss = lambda x: (module.w * x).mean() + module.big(x.new_ones(1, 100)).mean() * 0
    trainer(ddp(sync=sync), devices=2, callbacks=[GradientAccumulation(**policy)]).fit(module)
    collectives = torch.load("collectives.pt")
    all_reduces = [size for name, size in collectives if "all_reduce" in name]
    assert [size for size in all_reduces if size > 8] == [101] * reductions
    assert [size for size in all_reduces if size <= 8] == small * 3  # the sums of the window are 8 numbers of float64: 64 bytes
    # Lightning's own 8 bytes a loader batch, to spread a SIGTERM
    assert {name for name, _ in collectives if "all_reduce" not in name} <= {"gloo:broadcast"}


@pytest.mark.parametrize("strategy", ["accum", "one rank"])
def test_one_rank_may_leave_a_parameter_unused_at_the_end_of_a_window(strategy: str) -> None:
    module = Scalar(by_rank=[[x(1), x(2), x(3), x(4)]])
    module.other = torch.nn.Linear(1, 1, bias=False).double()
    module.loss = lambda x: (module.w * x).mean() + (module.other(x[:, None]).mean() if x[0] % 2 else 0)
    seen: list[tuple[float, float]] = []

    def look(optimizer: torch.optim.Optimizer) -> None:
        seen.append((float(module.w.grad), float(module.other.weight.grad)))
        torch.save(seen, "seen.pt")

    module.on_before_optimizer_step = look
    run = trainer(
        strategy if strategy == "accum" else ddp(), devices=1, callbacks=[GradientAccumulation(2, weight="equal", check=False)]
    )
    run.fit(module)
    assert torch.load("seen.pt") == [(1.5, 0.5), (3.5, 1.5)]


# --- launchers --------------------------------------------------------------------------------------------------------

SCRIPT = """
import os
import sys
from datetime import timedelta

import torch
from support import Scalar, trainer, x
import lightning_accum


if __name__ == "__main__":
    module = Scalar(by_rank=[[x(1), x(1, 2, 3)], [x(5), x(7)]])
    run = trainer(sys.argv[1], devices=2, accumulate_grad_batches=2)
    run.strategy._timeout = timedelta(seconds=60)
    run.fit(module)
    if run.global_rank == 0:
        print("TOTAL", module.total, flush=True)
"""


def run_script(*command: str, script: str = SCRIPT) -> str:
    Path("script.py").write_text(script)
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


TOTAL = (1 + 1 + 2 + 3 + 5 + 7) / 6


@pytest.mark.exhaustive
@pytest.mark.parametrize("strategy", ["accum_ddp", "accum_ddp_spawn"])
def test_script_with_lightnings_launchers(strategy: str) -> None:
    output = run_script(sys.executable, "script.py", strategy)
    assert float(output.split("TOTAL ")[1].split()[0]) == pytest.approx(TOTAL, rel=1e-15)


@pytest.mark.slow  # test_nodes_of_torchrun does it on two nodes
def test_torchrun() -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    output = run_script(*torchrun, "script.py", "accum_ddp")
    assert float(output.split("TOTAL ")[1].split()[0]) == pytest.approx(TOTAL, rel=1e-15)


@pytest.mark.parametrize("strategy", ["accum_ddp_fork", "accum_ddp_notebook"])
def test_forked(strategy: str) -> None:
    module = Scalar(by_rank=[[x(1), x(1, 2, 3)], [x(5), x(7)]])
    trainer(strategy, devices=2, accumulate_grad_batches=2).fit(module)
    assert module.total == pytest.approx(TOTAL, rel=1e-15)


THREADS_SCRIPT = """
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import torch
from support import Scalar, ddp, trainer, x


class Threaded(Scalar):
    def training_step(self, batch, batch_idx):
        barrier = Barrier(8)

        def add(_):
            barrier.wait()
            return torch.zeros(100_000).add_(1).sum().item()

        with ThreadPoolExecutor(barrier.parties) as pool:
            assert set(pool.map(add, range(barrier.parties))) == {100_000.0}
        return super().training_step(batch, batch_idx)


torch.set_num_threads(64)
torch.zeros(100_000).add_(torch.get_num_threads())  # without it torch would make the pool of threads at the fork
module = Threaded([x(1)])
trainer(ddp(), devices=2).fit(module)
print("TOTAL", module.total)
"""


@pytest.mark.exhaustive
def test_first_threads_of_a_forked_rank_do_not_fail() -> None:
    """Each would make torch's pool of threads anew: "Invalid thread pool!"."""
    assert "TOTAL 1.0" in run_script(sys.executable, "script.py", script=THREADS_SCRIPT)


@pytest.mark.parametrize("launcher", ["", "_spawn", "_fork", "_notebook"])
def test_registered_names(launcher: str) -> None:
    strategy = StrategyRegistry.get(f"accum_ddp{launcher}")
    assert isinstance(strategy, DDPAccumulationStrategy)
    assert strategy._start_method == {"": "popen", "_spawn": "spawn"}.get(launcher, "fork")
    strategy = StrategyRegistry.get(f"accum_ddp{launcher}_find_unused_parameters_true")
    assert strategy._ddp_kwargs == {"find_unused_parameters": True}
    assert isinstance(StrategyRegistry.get("accum"), AccumulationStrategy)


# --- what is refused --------------------------------------------------------------------------------------------------


def test_accum_on_several_devices_names_the_strategy_to_use() -> None:
    with pytest.raises(MisconfigurationException, match='runs on one device, but the Trainer names 2. Use strategy="accum_ddp"'):
        trainer("accum", devices=2)
    with pytest.raises(MisconfigurationException, match='runs on one node, but the Trainer names 2. Use strategy="accum_ddp"'):
        trainer("accum", num_nodes=2)


def test_accum_takes_the_device_of_the_trainer_or_its_own() -> None:
    assert trainer("accum").strategy.root_device == torch.device("cpu")
    assert trainer(AccumulationStrategy()).strategy.root_device == torch.device("cpu")
    run = pl.Trainer(strategy=AccumulationStrategy("cpu"), logger=False, enable_checkpointing=False)
    assert run.strategy.root_device == torch.device("cpu")
    connector = AccumulationStrategy()
    connector.parallel_devices = [torch.device("cuda", 1)]  # what Trainer(accelerator="gpu", devices=[1]) sets
    assert connector.root_device == torch.device("cuda", 1)


@pytest.mark.parametrize("strategy", ["auto", "ddp_fork"])
def test_callback_without_a_strategy_names_them(strategy: str) -> None:
    run = trainer(strategy, devices=1, callbacks=[GradientAccumulation(2)])
    with pytest.raises(Exception, match='Trainer\\(strategy="accum"\\) on one device, or Trainer\\(strategy="accum_ddp"\\)'):
        run.fit(Scalar([x(1)]))


def test_two_callbacks_are_refused() -> None:
    with pytest.raises((MisconfigurationException, RuntimeError)):
        trainer(callbacks=[GradientAccumulation(2), GradientAccumulation(4)]).fit(Scalar([x(1)]))


def test_window_in_two_places_is_refused() -> None:
    run = trainer(callbacks=[GradientAccumulation(2)], accumulate_grad_batches=4)
    with pytest.raises(MisconfigurationException, match=r"accumulate_grad_batches=4\) and GradientAccumulation\(2\) both set"):
        run.fit(Scalar([x(1)]))


@pytest.mark.parametrize("strategy", ["accum_ddp", "accum_ddp_spawn", DDPAccumulationStrategy(), "accum_model_parallel"])
def test_a_notebook_is_told_the_strategy_of_this_package_that_works_there(monkeypatch, strategy) -> None:
    monkeypatch.setattr("lightning.pytorch.trainer.connectors.accelerator_connector._IS_INTERACTIVE", True)
    with pytest.raises(MisconfigurationException, match=r'Trainer\(strategy="accum_ddp_notebook"\)'):
        trainer(strategy, devices=2)
    assert trainer("accum_ddp_notebook", devices=2).strategy.launcher.is_interactive_compatible


def test_callback_of_the_module_is_found() -> None:
    class Own(Scalar):
        def configure_callbacks(self):
            return [GradientAccumulation(2)]

    module = Own([x(1), x(2), x(6)])
    trainer().fit(module)
    assert module.gradients == [1.5, 6.0]


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        ({"window": 0}, "from 1"),
        ({"window": 2.0}, "from 1"),
        ({"window": True}, "from 1"),
        ({"window": {}}, "epochs from 0"),
        ({"window": {0: 0}}, "sizes from 1"),
        ({"window": {2: 4}}, r"add \{0: 1\}"),
        ({"weight": "tokens"}, 'expected "auto", "equal" or a callable'),
        ({"tail": "keep"}, 'expected "step", "drop" or "carry"'),
        ({"scheduler_counts": "steps"}, 'expected "optimizer_steps" or "micro_batches"'),
        ({"trim_padding": "yes"}, "trim_padding='yes' says .* set micro_batch= too"),
        ({"log": "all"}, "log='all': expected True or False"),
        ({"window": Tokens}, r"window=Tokens is a class: pass an instance of it, such as Tokens\(8_192\)"),
        ({"micro_batch": Tokens}, "micro_batch=Tokens is a class"),
        ({"weight": TokenCount}, r"weight=TokenCount is a class: pass an instance of it, such as TokenCount\(\)"),
        ({"micro_batch": 4, "weight": [TokenCount(), SampleCount]}, "weight=SampleCount is a class"),
    ],
)
def test_arguments_out_of_range(arguments: dict, match: str) -> None:
    with pytest.raises(MisconfigurationException, match=match):
        GradientAccumulation(**arguments)
    with pytest.raises(MisconfigurationException, match="window"):
        DDPAccumulationStrategy(sync="never")


class TrainsMore(Scalar):
    """Trains a parameter that DistributedDataParallel does not know.

    Args:
        kind: it is "frozen" until the second window, or "late": made when training starts.
    """

    def __init__(self, kind: str) -> None:
        super().__init__(by_rank=[[x(1), x(2), x(3)], [x(4), x(5), x(6)]])
        self.kind = kind
        self.other = torch.nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=False)

    def on_train_start(self) -> None:
        if self.kind == "late":
            self.other = torch.nn.Parameter(torch.ones((), dtype=torch.float64))
            self.trainer.optimizers[0].add_param_group({"params": [self.other]})

    def on_train_batch_start(self, batch: torch.Tensor, batch_idx: int) -> None:
        self.other.requires_grad_(self.kind == "late" or batch_idx > 0)

    def loss(self, values: torch.Tensor) -> torch.Tensor:
        return ((self.w + self.other) * values).mean()


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("kind", ["frozen", "late"])
@pytest.mark.parametrize("window", [1, 2])
def test_parameter_that_ddp_does_not_reduce_is_an_error(kind: str, window: int) -> None:
    with pytest.raises(Exception, match="DistributedDataParallel does not reduce the gradients of other, which were frozen or not"):
        trainer(ddp(), devices=2, accumulate_grad_batches=window).fit(TrainsMore(kind))


def test_public_names() -> None:
    assert set(lightning_accum.__all__) <= set(dir(lightning_accum))


@pytest.mark.parametrize(
    ("engine", "instead"),
    [
        (DeepSpeedStrategy, 'Trainer\\(strategy="accum_fsdp"\\) or "accum_model_parallel" \\(FSDP2, fully_shard\\)'),
        (XLAStrategy, "Leave this callback out, or use another device"),
        (FSDPStrategy, 'Trainer\\(strategy="accum_fsdp"\\), or FSDPAccumulationStrategy'),
        (ModelParallelStrategy, 'Trainer\\(strategy="accum_model_parallel"\\), or ModelParallelAccumulationStrategy'),
    ],
)
def test_callback_with_another_engine_says_what_to_use(engine: type, instead: str) -> None:
    run = SimpleNamespace(strategy=object.__new__(engine))  # DeepSpeed and XLA are not installed
    with pytest.raises(MisconfigurationException, match=f"but the Trainer has {engine.__name__}. .*{instead}"):
        GradientAccumulation(2).setup(run, Scalar([x(1)]), "fit")
