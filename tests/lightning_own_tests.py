"""Lightning's own tests, with this package's strategy in place of Lightning's: what fails then, and did not before?

    git clone --branch 2.6.5 https://github.com/Lightning-AI/pytorch-lightning
    python tests/lightning_own_tests.py pytorch-lightning loops/test_loops.py trainer/optimization   # by default DIRECTORIES, below

The tests of the directories or files (of ``tests/tests_pytorch`` of the checkout) run in an environment with Lightning of the
checkout's version, with every strategy that a Trainer chooses by itself or a test makes being this package's, with ``log=False``
(but in processes that are spawned); a file in which one fails runs again as it is. The tests that fail only with the strategies are
printed, and the exit code is 1 where one of them is not in :data:`EXPECTED`.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent))

from newest import ROOT, Environment
from second_package import copied

DIRECTORIES = (
    *("loops", "callbacks", "checkpointing", "core", "models", "profilers", "trainer", "tuner", "strategies", "loggers"),
    *("deprecated_api", "serve", "overrides", "plugins", "utilities", "accelerators"),
)
STANDALONE = (  # tests of which each needs a pytest of its own, since it is started again as another rank, and which need no GPU
    "overrides/test_distributed.py::test_params_synced_during_nonfit",
    "trainer/test_dataloaders.py::test_distributed_sampler_without_global_seed",
    "trainer/connectors/test_accelerator_connector.py::test_strategy_choice_ddp_on_cpu",
    "strategies/launchers/test_multiprocessing.py::test_multiprocessing_launcher_start_method",
    "strategies/launchers/test_multiprocessing.py::test_multiprocessing_launcher_restore_globals",
    "strategies/test_ddp_integration.py::test_find_unused_parameters_ddp_spawn_raises",
    "strategies/test_ddp_integration.py::test_find_unused_parameters_ddp_exception",
    "tuner/test_lr_finder.py::test_lr_finder_with_ddp",
)
LEFT_OUT = ("checkpointing/test_legacy_checkpoints.py",)  # these download checkpoints of old versions
REQUIREMENTS = (
    "pytest==9.0.2", "pytest-timeout", "pytest-random-order", "cloudpickle", "scikit-learn", "psutil<7.3", "pandas", "fastapi",
    "uvicorn", "httpx", "tensorboard", "tensorboardX", "jsonargparse[signatures,jsonnet]<4.46", "hydra-core", "omegaconf",
    "matplotlib", "rich<14.4", "requests",
)  # fmt: skip
SECONDS = 120  # that a single test may take
_OTHER_NAME = "looks for the name of the strategy's class, which is another"
_MOCKS_MODULE = "has a Mock for a module, which does not know its Trainer"
_WRAPS_ITSELF = "puts the strategy's own method in the place of the one that it extends, which calls itself then"
_CLEARS_NOTHING = "a mock for zero_grad clears no gradient, which is an error"
EXPECTED = {  # tests that fail only with this package, and why they should, by a part of their names
    "test_automatic_loop.test_skip_training_step_not_allowed[2]": "mocks a second rank, which cannot be waited for",
    "test_trainer_accumulate_grad_batches_zero_grad": _CLEARS_NOTHING,
    "test_trainer_accumulate_grad_batches_with_callback": _CLEARS_NOTHING,
    "test_trainer_spike_detection_integration": "over ranks, a loss of one row that does not depend on it has no denominator",
    "test_backward_calls.test_backward_count_with_closure": "LBFGS in windows of several loader batches is refused",
    "test_backward_calls.test_backward_count_with_grad_accumulation": "a mock for backward gives no gradient, which is an error",
    "test_manual_optimization.test_multiple_optimizers_manual_call_counts[kwargs0]": _WRAPS_ITSELF,
    "test_manual_optimization.test_multiple_optimizers_manual_log": _WRAPS_ITSELF,
    "test_config_validator.test_trainer_manual_optimization_config": "accumulation with manual optimization is no error",
    "test_trainer.test_train_loop_system": "a window's last closure runs before the step, not in it",
    "test_loops.test_loop_state_on_exception": "a step is ready once its window has run: none is where that raises",
    "test_manual_optimization.test_step_with_optimizer_closure": _WRAPS_ITSELF,
    "test_stochastic_weight_avg.test_swa_callback": _WRAPS_ITSELF,
    "test_stochastic_weight_avg.test_swa_resume_training": _WRAPS_ITSELF,
    "test_restore.test_callbacks_state_fit_ckpt_path": "in a fit there is a callback more: that of a strategy alone",
    "test_profiler.test_pytorch_profiler_trainer_fit": _OTHER_NAME,
    "test_multiprocessing.test_collect_rank_zero_results": _MOCKS_MODULE,
    "test_multiprocessing.test_transfer_weights": _MOCKS_MODULE,
    "test_multiprocessing.test_non_strict_loading": _MOCKS_MODULE,
    "test_ddp.test_ddp_configure_ddp": "connects a module that has no Trainer yet",
    "test_configure_launcher_create_processes_externally": "a strategy has the launcher before the Trainer makes it",
    "test_fsdp.test_device_mesh_type_annotation": "looks for an argument that the strategy passes on as one of its kwargs",
    "test_save_checkpoint_path_exists": "a checkpoint replaces what was there as a whole, and a folder that is none is refused",
    "test_model_parallel.test_torch_greater_equal_2_4": _OTHER_NAME,
    "test_model_parallel.test_save_checkpoint_storage_options": _OTHER_NAME,
    "test_distributed_sampler_without_global_seed": "the loss is one of random numbers, and not a mean over the batch",
    "test_interactive_incompatible_backend_error": "this package's own strategy for notebooks is advised",
}


def pytest_configure() -> None:
    """As a plugin of pytest (``-p lightning_own_tests``): put the strategies in the place of Lightning's."""
    from lightning.pytorch import strategies
    from lightning.pytorch.trainer.connectors import accelerator_connector

    import lightning_accum as accum

    accum.GradientAccumulation.__init__.__kwdefaults__["log"] = False  # metrics of a strategy alone would be counted

    def strategy(device: Any) -> accum.AccumulationStrategy:
        return accum.AccumulationStrategy() if device == "cpu" else accum.AccumulationStrategy(device)

    setattr(accelerator_connector, "SingleDeviceStrategy", strategy)  # noqa: B010
    for name in ("DDP", "FSDP", "ModelParallel"):
        ours, theirs = getattr(accum, f"{name}AccumulationStrategy"), getattr(strategies, f"{name}Strategy")
        setattr(strategies, f"{name}Strategy", ours)
        for entry in strategies.StrategyRegistry.values():
            if entry["strategy"] is theirs:
                entry["strategy"] = ours


def run(environment: Environment, tests: Path, ours: Path, what: str, is_ours: bool) -> dict[str, str]:
    """Run some tests. Returns what came of each: ``"passed"``, ``"skipped"``, or the last line of its error."""
    with tempfile.TemporaryDirectory() as directory:
        results = Path(directory) / "results$LOCAL_RANK.xml"  # which pytest replaces where a test is started again as another rank
        plugin = ["-p", Path(__file__).stem] if is_ours else []
        command = [
            *(str(environment.python), "-m", "pytest", *plugin, "-q", "-p", "no:cacheprovider", "--no-header", "--tb=short"),
            *("-W", "ignore::FutureWarning"),  # of a torch newer than the tests, which make it an error
            *(f"--timeout={SECONDS}", f"--junitxml={results}"),
            *(f"--ignore={name}" for name in LEFT_OUT),
            what,
        ]
        paths = [str(ours), str(tests), str(ROOT)]
        variables = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
        variables |= {"PYTEST_DEBUG_TEMPROOT": directory, "PL_RUN_STANDALONE_TESTS": str(int("::" in what))}
        silent = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        subprocess.run(command, cwd=tests / "tests_pytorch", env=variables, check=False, **silent)
        if not results.exists():
            return {what: "pytest did not come to its end"}
        return dict(outcomes(results.read_text(encoding="utf-8")))


def outcomes(junit: str) -> Iterator[tuple[str, str]]:  # the names of tests, and what came of them
    for case in ElementTree.fromstring(junit).iter("testcase"):
        outcome = "passed"
        for child in case:
            if child.tag == "skipped":
                outcome = "skipped"
            elif child.tag in ("failure", "error"):
                outcome = (child.get("message") or child.text or child.tag).strip().partition("\n")[0]
        name = str(case.get("name")).replace("AccumulationStrategy", "Strategy")  # where a class is a parameter
        yield f"{case.get('classname')}.{name}", outcome


def files_of(tests: Path, what: str) -> list[str]:
    """The test files below a directory, or the one file or test, each of which runs in a process of its own."""
    found = sorted((tests / "tests_pytorch" / what).rglob("test_*.py"))
    names = [path.relative_to(tests / "tests_pytorch").as_posix() for path in found] or [what]
    return [name for name in names if name not in LEFT_OUT]


def main() -> int:  # read the command line, run, and print what differs
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path, help="of Lightning, at a tag")
    what = "directories, files and standalone tests of its tests/tests_pytorch"
    parser.add_argument("what", nargs="*", default=[*DIRECTORIES, *STANDALONE], help=what)
    parser.add_argument("--environment", type=Path, metavar="DIR", help="make it there and keep it, or use the one that is there")
    parser.add_argument("--python", default=sys.executable, help="make the environment with this Python")
    parser.add_argument("--second", action="store_true", help="run them on pytorch_lightning, Lightning's other package")
    options = parser.parse_intermixed_args()
    checkout = options.checkout.resolve()
    version = (checkout / "src" / "version.info").read_text(encoding="utf-8").strip()
    with tempfile.TemporaryDirectory() as temporary:
        environment = Environment(options.environment or Path(temporary) / "environment")
        if not environment.python.exists():
            environment.make(options.python)
            environment.pip_install(f"lightning=={version}", f"pytorch-lightning=={version}", "-e", str(ROOT), *REQUIREMENTS)
        tests, ours = checkout / "tests", Path(__file__).resolve().parent
        if options.second:
            for source, name in ((tests, "theirs"), (ours, "ours")):
                copied(source, Path(temporary, name))
            tests, ours = Path(temporary, "theirs"), Path(temporary, "ours")
        unexpected = 0
        print(f"Lightning {version}")
        for file in (name for what in options.what for name in files_of(tests, what)):
            now = run(environment, tests, ours, file, is_ours=True)
            kinds = [outcome if outcome in ("passed", "skipped") else "failed" for outcome in now.values()]
            print(f"{file}: {', '.join(f'{kinds.count(kind)} {kind}' for kind in sorted(set(kinds)))}", flush=True)
            before = run(environment, tests, ours, file, is_ours=False) if "failed" in kinds else {}
            passed = [name for name, outcome in before.items() if outcome == "passed"]
            for name, outcome in {name: now.get(name, "was not run") for name in passed if now.get(name) != "passed"}.items():
                reason = next((reason for part, reason in EXPECTED.items() if part in name), None)
                unexpected += reason is None
                print(f"    {name}: {outcome[:200]}" + ("" if reason is None else f"\n        expected: {reason}"), flush=True)
        print(f"{unexpected} that fail only with this package are not expected to.")
    return int(unexpected > 0)


if __name__ == "__main__":
    sys.exit(main())
