"""Real processes over gloo: what is sent and when, how they are launched, what DDP can do beside averaging, what is refused."""

import os
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from datetime import timedelta
from functools import wraps
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from harness import Dealt, dealt, windows_of
from lightning.pytorch.strategies import DeepSpeedStrategy, FSDPStrategy, ModelParallelStrategy, StrategyRegistry, XLAStrategy
from support import Language, OnCPU, Profiled, Scalar, ddp, fit, pad, python_path, relative_error, sentences, trainer, x
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks as hooks
from torch.profiler import profile

from lightning_accum import AccumulationError, AccumulationStrategy, GradientAccumulation, SampleCount, TokenCount, Tokens


def sizes_of(found: profile) -> list[tuple[str, int]]:
    events = [event for event in found.events() if event.name.startswith("gloo:")]
    return [(event.name, sum(torch.Size(shape).numel() for shape in event.input_shapes)) for event in events]


SINGLE = [[x(i) for i in range(16)], [x(i, i) for i in range(16)]]
MANY = [[torch.arange(24.0).double().reshape(8, 3)[:rows] + batch for batch in range(4)] for rows in (8, 5)]


# batches of one row cannot be checked, and the ranks would ask at each of the first eight
@pytest.mark.parametrize(
    ("sync", "policy", "by_rank", "reductions", "small"),
    [
        ("window", {"window": 4, "check": False}, SINGLE, 3, [14]),
        ("micro_batch", {"window": 4, "check": False}, SINGLE, 12, [14]),
        ("window", {"micro_batch": 2, "check": False}, MANY, 3, [14]),
        ("window", {"micro_batch": Tokens(6), "check": False}, MANY, 3, [14]),
        # if all is reduced after the last micro-batch, a number for each of two parameters: is it used on any rank?
        ("window", {"micro_batch": "auto", "check": False}, MANY, 3, [14, 2]),
    ],
)
def test_one_reduction_and_one_small_all_reduce_a_window(sync: str, policy: Any, by_rank: Any, reductions: int, small: Any) -> None:
    module, number = Scalar(by_rank=by_rank), len(by_rank[0])
    module.big = nn.Linear(100, 1, bias=False).double()
    module.loss = lambda x: (module.w * x).mean() + module.big(x.new_ones(1, 100)).mean() * 0
    looks = Profiled(number // 4, number - 1, sizes_of)  # the last three windows of four: after the first, buckets are rebuilt once
    fit(module, None, GradientAccumulation(**policy), looks, strategy=ddp(sync=sync), devices=2)
    collectives = torch.load("profiled.pt")
    all_reduces = [size for name, size in collectives if "all_reduce" in name]
    assert [size for size in all_reduces if size > 14] == [101] * reductions
    assert [size for size in all_reduces if size <= 14] == small * 3  # the sums of the window are 14 numbers of float64: 112 bytes
    # Lightning's own 8 bytes a loader batch, to spread a SIGTERM
    assert {name for name, _ in collectives if "all_reduce" not in name} <= {"gloo:broadcast"}


SCRIPT = """
import sys
from datetime import timedelta
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
TOTAL = (1 + 1 + 2 + 3 + 5 + 7) / 6


@pytest.mark.some_cases(0, 1)
@pytest.mark.parametrize("strategy", ["accum_ddp", "accum_ddp_spawn"])
def test_script_with_lightnings_launchers(strategy: str) -> None:
    Path("script.py").write_text(SCRIPT)
    environment = {**os.environ, "PYTHONPATH": python_path(), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "script.py", strategy]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split("TOTAL ")[1].split()[0]) == pytest.approx(TOTAL, rel=1e-15)


@pytest.mark.parametrize("options", ["", "_find_unused_parameters_true"])
@pytest.mark.parametrize("launcher", ["_fork", "_notebook", "", "_spawn"])
def test_every_name_of_lightnings_ddp_is_there_for_windows(launcher: str, options: str) -> None:
    name = f"accum_ddp{launcher}{options}"
    assert name in StrategyRegistry.available_strategies()
    if launcher in ("_fork", "_notebook"):
        module = Scalar(by_rank=[[x(1), x(1, 2, 3)], [x(5), x(7)]])
        module.unused = nn.Parameter(torch.zeros(1), requires_grad=bool(options))
        fit(module, strategy=name, devices=2, accumulate_grad_batches=2)
        assert module.total == pytest.approx(TOTAL, rel=1e-15)


def test_accum_takes_the_device_of_the_trainer_or_its_own() -> None:
    own = pl.Trainer(strategy=AccumulationStrategy("cpu"), logger=False, enable_checkpointing=False)
    for run in (trainer("accum"), trainer(AccumulationStrategy()), own):
        assert run.strategy.root_device == torch.device("cpu")
    connector = AccumulationStrategy()
    connector.parallel_devices = [torch.device("cuda", 1)]  # what Trainer(accelerator="gpu", devices=[1]) sets
    assert connector.root_device == torch.device("cuda", 1)


def test_callback_of_the_module_is_found() -> None:
    module = Scalar([x(1), x(2), x(6)])
    module.configure_callbacks = lambda: [GradientAccumulation(2)]
    trainer().fit(module)
    assert module.gradients == [1.5, 6.0]


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        ({"strategy": "accum", "devices": 2}, "accum_ddp"),
        ({"strategy": "accum", "num_nodes": 2}, "accum_ddp"),
        ({"strategy": "auto", "callbacks": [GradientAccumulation(2)]}, "accum"),
        ({"strategy": "ddp_fork", "callbacks": [GradientAccumulation(2)]}, "accum_ddp"),
        ({"callbacks": [GradientAccumulation(2)], "accumulate_grad_batches": 4}, "accumulate_grad_batches=4"),
    ],
)
def test_what_does_not_go_together_is_an_error_that_names_the_argument(arguments: dict[str, Any], names: str) -> None:
    with pytest.raises(Exception, match=f"(?s){names}") as raised:
        trainer(**arguments).fit(Scalar([x(1)]))
    assert isinstance(raised.value, AccumulationError) or "MisconfiguredError" in str(raised.value)


@pytest.mark.parametrize("engine", [DeepSpeedStrategy, XLAStrategy, FSDPStrategy, ModelParallelStrategy])
def test_callback_with_another_engine_says_what_to_use(engine: type) -> None:
    run = SimpleNamespace(strategy=object.__new__(engine))  # DeepSpeed and XLA are not installed
    with pytest.raises(AccumulationError, match=f"{engine.__name__}.*accum_fsdp"):
        GradientAccumulation(2).setup(run, Scalar([x(1)]), "fit")


@pytest.mark.parametrize(("arguments", "names"), [
    *[({"window": value}, "window") for value in (0, 2.0, True, {}, {0: 0}, {2: 4}, Tokens)], ({"weight": "tokens"}, "weight"),
    ({"weight": TokenCount}, "weight=TokenCount"),
    ({"micro_batch": 4, "weight": [TokenCount(), SampleCount]}, "weight=SampleCount"), ({"micro_batch": Tokens}, "micro_batch"),
    ({"tail": "keep"}, "tail"), ({"scheduler_counts": "steps"}, "scheduler_counts"), ({"trim_padding": "yes"}, "trim_padding"),
    ({"log": "all"}, "log"), *[({"accumulate_dtype": value}, "accumulate_dtype") for value in ("float32", torch.int64, 32)],
    *[({"validate_every": value}, "validate_every") for value in (0, -1, 1.5, True, "epoch")],
    *[({"micro_batch": 4, "weight": value}, "weight") for value in (["auto", SampleCount()], [])],
    ({"micro_batch": Tokens(lambda seen: 3)}, "Tokens"),
])  # fmt: skip
def test_argument_out_of_range_is_named(arguments: dict[str, Any], names: str) -> None:
    with pytest.raises(AccumulationError, match=names):
        GradientAccumulation(**arguments)


class TrainsMore(Scalar):  # a parameter that DDP does not know: "frozen" until the second window, or made "late", at the start
    def __init__(self, kind: str) -> None:
        super().__init__(by_rank=[[x(1), x(2), x(3)], [x(4), x(5), x(6)]])
        self.kind = kind
        self.other = nn.Parameter(torch.ones((), dtype=torch.float64), requires_grad=False)

    def on_train_start(self) -> None:
        if self.kind == "late":
            self.other = nn.Parameter(torch.ones((), dtype=torch.float64))
            self.trainer.optimizers[0].add_param_group({"params": [self.other]})

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        self.other.requires_grad_(self.kind == "late" or batch_idx > 0)

    def loss(self, values: Tensor) -> Tensor:
        return ((self.w + self.other) * values).mean()


@pytest.mark.some_cases(1)
@pytest.mark.parametrize("kind", ["frozen", "late"])
@pytest.mark.parametrize("window", [1, 2])
def test_parameter_that_ddp_does_not_reduce_is_an_error(kind: str, window: int) -> None:
    with pytest.raises(Exception, match=r"(?s)lightning_accum\S*Error: .*\bother\b"):
        fit(TrainsMore(kind), strategy=ddp(), devices=2, accumulate_grad_batches=window)


COUNTED = ("batch_to_device", "backward", "optimizer_step", "training_step", "post_backward")


def counting(kind: type) -> type:  # of Lightning's, a strategy that counts what it does in a micro-batch and a step

    def counted(name: str) -> Any:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            self.calls[name] += 1
            return getattr(kind, name)(self, *args, **kwargs)

        return method

    return type("Own", (kind,), {"calls": Counter(), **{name: counted(name) for name in COUNTED}})


class OwnAccumulation(AccumulationStrategy, counting(pl.strategies.SingleDeviceStrategy)):
    pass


def test_a_strategy_derived_from_lightnings_and_ours_is_called_in_exact_windows() -> None:
    module = Scalar([x(1), x(1, 2, 3), x(4), x(9, 8), x(6)])
    run = fit(module, None, GradientAccumulation(2, check=False), strategy=OwnAccumulation())
    assert module.gradients == pytest.approx([(1 + 1 + 2 + 3) / 4, (4 + 9 + 8) / 3, 6], rel=1e-14)
    assert run.strategy.calls == {name: 3 if name == "optimizer_step" else 5 for name in COUNTED}


RANKS, WINDOW, EPOCHS = 2, 4, 2
SMALL = {"bucket_cap_mb": 4096 / 2**20}  # 4 KiB, of some 40 that the parameters take: several buckets
BY_RANK = dealt(sentences(40), 2, "ddp")  # two windows of 16, and a tail of 8
FULL = [pad(window) for window in windows_of(BY_RANK, WINDOW)]


def train(module: Language, by_rank: Any = BY_RANK, epochs: int = EPOCHS, *callbacks: Any, **options: Any) -> None:
    arguments = {"devices": RANKS, "accumulate_grad_batches": WINDOW, "max_epochs": epochs}
    fit(module, Dealt(by_rank), *callbacks, strategy=OnCPU(**options), **arguments)


class Hooked(Language):  # leaves its ranks' gradients of the first step, parameters and hook calls in a file
    def __init__(self, hook: Callable[..., Any]) -> None:
        super().__init__()
        self.buckets: list[int] = []
        self.first: list[Tensor] = []

        @wraps(hook)
        def counting(state: Any, bucket: dist.GradBucket) -> Any:
            self.buckets.append(bucket.index())
            return hook(state, bucket)

        counting.__name__ = "counting"  # by its name torch refuses that of bfloat16 without CUDA
        self.hook = counting

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        self.first = self.first or [parameter.grad.clone() for parameter in self.parameters()]

    def on_train_end(self) -> None:
        parameters = [parameter.detach() for parameter in self.parameters()]
        torch.save((self.first, parameters, self.buckets), f"hooked{self.global_rank}.pt")


def hooked(hook: Callable[..., Any], **options: Any) -> tuple[list[Tensor], list[int]]:
    """What both ranks have: the gradients of the first step, and for which buckets it was called."""
    module = Hooked(hook)
    train(module, ddp_comm_hook=module.hook, **options)
    (first, parameters, buckets), (_, others, others_buckets) = (torch.load(f"hooked{rank}.pt") for rank in range(RANKS))
    assert all(torch.equal(a, b) for a, b in zip(parameters, others, strict=True))
    assert buckets == others_buckets
    return first, buckets


@pytest.mark.some_cases(1, 1)
@pytest.mark.parametrize(
    ("hook", "options", "unit"),
    [
        (hooks.fp16_compress_hook, {}, 2.0**-11),
        (hooks.bf16_compress_hook, {}, 2.0**-8),
        (hooks.fp16_compress_hook, {**SMALL, "gradient_as_bucket_view": True}, 2.0**-11),
        (hooks.allreduce_hook, {"ddp_comm_wrapper": hooks.fp16_compress_wrapper}, 2.0**-11),
    ],
    ids=["fp16", "bf16", "fp16 in small buckets", "wrapped in fp16"],
)
def test_compressed_gradients_are_those_of_the_full_batch_but_for_rounding(hook: Any, options: Any, unit: float) -> None:
    """The gradients of two ranks are rounded, each by at most a ``unit`` of its numbers, and their mean once more."""
    first, buckets = hooked(hook, **options)
    module = Language()
    exact = torch.autograd.grad(module.training_step(FULL[0], 0), list(module.parameters()))
    assert 1e-3 * unit < relative_error(first, exact) < 3 * unit
    of_a_step, steps = len(set(buckets)), len(FULL) * EPOCHS
    assert (of_a_step > 1) == ("bucket_cap_mb" in options)
    # small buckets are rebuilt once, after the first step
    assert buckets[-of_a_step * (steps - 1) :] == list(range(of_a_step)) * (steps - 1)


def nodes_of(found: profile) -> list[str]:
    return [event.name for event in sorted(found.events(), key=lambda event: event.time_range.start)]


REDUCTION = "c10d::allreduce_"


def order_of_reductions() -> list[str]:  # of the nodes of the last backward and what is to be all-reduced, as it was begun
    events, node = torch.load("profiled.pt"), "autograd::engine::evaluate_function: "
    last = events[len(events) - events[::-1].index("next micro-batch") :]
    names = [name.removeprefix(node) for name in last if name.startswith(node) or name == REDUCTION]
    return [name for name in names if name != "DivBackward0"]  # Lightning's own, by accumulate_grad_batches


@pytest.mark.some_cases(1, 1)
@pytest.mark.parametrize(
    "options", [{}, {"gradient_as_bucket_view": True}, {"find_unused_parameters": True}, {"static_graph": True}], ids=" ".join
)
def test_reduction_overlaps_with_the_last_backward_as_in_plain_lightning(options: dict[str, Any]) -> None:
    by_rank = dealt(sentences(48), 2, "ddp")
    third = Profiled(2 * WINDOW, 3 * WINDOW - 1, nodes_of)  # in the second DistributedDataParallel rebuilds its buckets
    train(Language(), by_rank, 1, third, **SMALL, **options)
    ours = order_of_reductions()
    strategy = pl.strategies.DDPStrategy(start_method="fork", timeout=timedelta(seconds=20), **SMALL, **options)
    fit(Language(), Dealt(by_rank), third, strategy=strategy, devices=RANKS)  # every micro-batch is reduced
    lightnings = order_of_reductions()
    assert ours == [REDUCTION, *lightnings]  # the weights do not wait in line behind the gradients
    assert lightnings.count(REDUCTION) > 4
    assert lightnings.index(REDUCTION) / len(lightnings) < 0.6  # the first bucket is on its way long before the backward ends
