"""A Trainer that only a YAML file configures: LightningCLI understands every argument, and trains by it."""

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from lightning.pytorch.cli import LightningCLI
from support import Scalar, x

import lightning_accum

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("jsonargparse") is None, reason="LightningCLI needs jsonargparse"),
    pytest.mark.filterwarnings("ignore:.*LightningCLI's args parameter is intended to run"),
    pytest.mark.filterwarnings("ignore:.*deprecated in v4:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*JsonargparseDeprecationWarning"),
]

BATCHES = [x(1), x(2, 3, 4), x(5), x(6, 7)]
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


class Numbers(Scalar):  # the gradient of a window is the mean of its numbers; the rate is for the file to set
    def __init__(self, lr: float = 1.0) -> None:
        super().__init__(BATCHES, lr=lr)


def config(init_args: dict[str, Any], strategy: Any = "accum", **trainer: Any) -> str:  # write a YAML file. Returns its path.
    settings = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "use_distributed_sampler": False, **QUIET, **trainer}
    settings["strategy"] = strategy
    settings["callbacks"] = [{"class_path": "lightning_accum.GradientAccumulation", "init_args": init_args}]
    Path("config.yaml").write_text(yaml.safe_dump({"seed_everything": 1, "trainer": settings}))
    return "config.yaml"


def fit(path: str, module: Any = Numbers, **kwargs: Any) -> LightningCLI:
    return LightningCLI(module, args=["fit", "--config", path], **{"save_config_callback": None, **kwargs})


def built(path: str, module: Any = Numbers) -> LightningCLI:  # all objects of a file, without training
    return LightningCLI(module, args=["--config", path], run=False, save_config_callback=None)


def grows(step: int) -> int:  # a window by optimizer step
    return 1 + step


def tokens_grow(seen: float) -> int:  # a size in tokens, by those seen
    return 1 if seen == 0 else 4


def halves(batch: torch.Tensor, size: int) -> list[torch.Tensor]:  # the user's own way to split
    return list(batch.split(size))


def numel(batch: torch.Tensor) -> torch.Tensor:  # the user's own weight
    return torch.tensor(batch.numel())


def test_the_command_line_overrides_the_file_or_does_without_one() -> None:
    overrides = ["--trainer.callbacks.init_args.window=4", "--model.lr=0.5"]
    cli = LightningCLI(Numbers, args=["fit", "--config", config({"window": 2}), *overrides], save_config_callback=None)
    assert cli.model.gradients == pytest.approx([28 / 7], rel=1e-15)
    assert cli.model.w.item() == pytest.approx(-0.5 * 28 / 7, rel=1e-15)
    arguments = {"accelerator": "cpu", "devices": 1, "max_epochs": 1, "strategy": "accum", **dict.fromkeys(QUIET, "false")}
    args = [f"--trainer.{name}={value}" for name, value in arguments.items()]
    args += ["--trainer.callbacks+=lightning_accum.GradientAccumulation", "--trainer.callbacks.window=2"]
    cli = LightningCLI(Numbers, args=["fit", *args], save_config_callback=None)
    assert cli.model.gradients == pytest.approx([10 / 4, 18 / 3], rel=1e-15)


WEIGHED = [10 / 4, 18 / 3]
ARGUMENTS: dict[str, tuple[dict[str, Any], list[float] | None]] = {
    "windows by epoch": ({"window": {0: 1, 1: 2}}, [1, 3, 5, 6.5, *WEIGHED]),
    "a function": ({"window": "test_command_line.grows"}, [1, 14 / 4, 6.5, 28 / 7]),
    "windows of tokens": ({"window": {"class_path": "lightning_accum.Tokens", "init_args": {"count": 4}}}, WEIGHED * 2),
    "a function of tokens": ({"window": {"count": "test_command_line.tokens_grow"}}, [1, 14 / 4, 6.5, *WEIGHED]),
    # windows of 4 numbers that go on over the end of an epoch: 1, 2, 3, 4, then 5, 6, 7, 1, then 2, 3, 4, 5, and the rest
    "tokens in split batches": ({"window": {"count": 4}, "micro_batch": 2, "tail": "carry"}, [10 / 4, 19 / 4, 14 / 4, 6.5]),
    "equal weights": ({"window": 2, "weight": "equal"}, [(1 + 3) / 2, (5 + 6.5) / 2] * 2),
    "micro-batches in tokens": (
        {"window": 2, "micro_batch": {"class_path": "lightning_accum.Tokens", "init_args": {"count": 2}}, "trim_padding": False},
        None,
    ),
    "a function that splits": ({"window": 2, "micro_batch": 2, "split": "test_command_line.halves"}, WEIGHED * 2),
    "a function with types weighs": ({"window": 2, "weight": "test_command_line.numel"}, WEIGHED * 2),
    "tokens": ({"weight": {"class_path": "lightning_accum.TokenCount", "init_args": {"key": "y", "shift": False}}}, None),
    "the type of the sums": ({"window": 2, "accumulate_dtype": "torch.float32"}, None),
    "tail and clock": ({"window": 3, "tail": "drop", "scheduler_counts": "micro_batches"}, [3, 3]),
}


@pytest.mark.some_cases(8)
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("case", ARGUMENTS)
def test_an_argument_in_yaml_trains_as_in_python(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    """What is printed as the configuration builds the same."""
    init_args, expected = ARGUMENTS[case]
    with pytest.raises(SystemExit):
        LightningCLI(Numbers, args=["fit", "--config", config(init_args, max_epochs=2), "--print_config"])
    printed = yaml.safe_load(capsys.readouterr().out)
    Path("printed.yaml").write_text(yaml.safe_dump({name: printed[name] for name in ("seed_everything", "trainer", "model")}))
    cli = fit("printed.yaml") if expected else built("printed.yaml")
    assert cli.model.gradients == pytest.approx(expected or [], rel=1e-15)


def by_class(name: str, **init_args: Any) -> dict[str, Any]:
    return {"class_path": f"lightning_accum.{name}", "init_args": init_args}


DDP = {"start_method": "fork", "timeout": "0:01:00", "find_unused_parameters": True}


@pytest.mark.some_cases(1, 1)
@pytest.mark.parametrize(
    "strategy", ["accum_ddp_fork", *(by_class("DDPAccumulationStrategy", sync=s, **DDP) for s in ("window", "micro_batch"))]
)
def test_two_ranks_from_yaml_take_the_step_of_their_one_batch(strategy: Any) -> None:
    class Shares(Scalar):  # two ranks, with other numbers on each
        def __init__(self) -> None:
            super().__init__(by_rank=[[x(1), x(2, 3)], [x(4, 5, 6), x(7)]])

    cli = fit(config({"window": 2}, strategy, devices=2), Shares)
    assert cli.model.total == pytest.approx((1 + 2 + 3 + 4 + 5 + 6 + 7) / 7, rel=1e-15)


@pytest.mark.parametrize(
    "strategy",
    [
        by_class("AccumulationStrategy"),
        by_class("ModelParallelAccumulationStrategy", sync="micro_batch", data_parallel_size=1, tensor_parallel_size=1),
        by_class("FSDPAccumulationStrategy", sync="micro_batch", sharding_strategy="SHARD_GRAD_OP", cpu_offload=True),
    ],
)
def test_every_strategy_is_built_from_yaml_with_its_arguments_and_those_of_lightning(strategy: dict[str, Any]) -> None:
    made = built(config({"window": 2}, strategy)).trainer.strategy
    assert type(made) is getattr(lightning_accum, strategy["class_path"].rpartition(".")[2])
    sharding = strategy["init_args"].get("sharding_strategy")
    assert sharding is None or (made.sharding_strategy.name, made.cpu_offload.offload_params) == (sharding, True)


MISTAKES: dict[str, tuple[dict[str, Any], Any, str]] = {
    "another tail": ({"tail": "stop"}, "accum", "tail"),
    "no tokens": ({"window": {"count": 0}}, "accum", "count"),
    "a name with an error in it": ({"windo": 2}, "accum", "windo"),
    "another sync": ({}, by_class("DDPAccumulationStrategy", sync="never"), "sync"),
    "an argument of another strategy": ({}, by_class("AccumulationStrategy", sync="window"), "sync"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_in_yaml_is_an_error_that_names_the_argument(mistake: str, capsys: pytest.CaptureFixture[str]) -> None:
    init_args, strategy, told = MISTAKES[mistake]
    path = config(init_args, strategy)
    with pytest.raises((SystemExit, ValueError)) as error:
        built(path)
    assert told in (capsys.readouterr().err if isinstance(error.value, SystemExit) else str(error.value))
