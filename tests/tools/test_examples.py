"""The scripts in ``notebooks/examples`` run as their first lines say, and under what a cluster sets."""

import os
import re
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from processes import free_port
from sharded import needs_sharding_on_cpu
from torch.utils.data import DataLoader

from lightning_accum import SameOrderSampler

EXAMPLES = Path(__file__).parents[2] / "notebooks" / "examples"
DEADLINE = 90
OF_CLUSTERS = ("SLURM_", "KUBERNETES_", "PBS_", "LSB_", "OMPI_", "TORCHELASTIC_", "MASTER_", "WORLD_SIZE", "RANK", "LOCAL_")


def environment(**variables: object) -> dict[str, str]:
    """This process's, without what a cluster or a launcher has set, and with ``variables``."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(OF_CLUSTERS)}
    paths = os.pathsep.join(filter(None, [str(EXAMPLES.parents[1]), kept.get("PYTHONPATH", "")]))
    own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": paths}
    return {**kept, **own, **{name: str(value) for name, value in variables.items()}}


def run(command: list[str], variables: Sequence[dict[str, object]] = ({},)) -> tuple[int, float]:
    """Run processes side by side. Returns the steps and the loss that one of them prints."""
    streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    processes = [subprocess.Popen([sys.executable, *command], env=environment(**found), **streams) for found in variables]
    try:
        outputs = [process.communicate(timeout=DEADLINE)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [process.returncode for process in processes] == [0] * len(processes), "\n".join(outputs)
    return printed("\n".join(outputs))


def printed(output: str) -> tuple[int, float]:  # the steps and the loss
    ((steps, loss),) = re.findall(r"^(\d+) steps, loss ([\d.]+)$", output, re.MULTILINE)
    return int(steps), float(loss)


def test_examples_are_short_and_listed() -> None:
    files = {path.name for path in EXAMPLES.iterdir() if path.is_file() and path.name != "README.md"}
    listed = set(re.findall(r"\]\(([\w.]+)\)", (EXAMPLES / "README.md").read_text(encoding="utf-8")))
    assert files == listed
    for name in files:
        limit = 90 if name == "hf_trainer.py" else 60
        assert len((EXAMPLES / name).read_text(encoding="utf-8").splitlines()) < limit, name


def one_epoch_by_hand(name: str) -> tuple[int, Any]:
    """The steps and the mean loss of ``ddp.py`` or ``fsdp2.py`` in an epoch, in one process, each window one batch."""
    example = runpy.run_path(str(EXAMPLES / name))
    pl.seed_everything(0)
    if name == "ddp.py":
        inputs = torch.randn(1000, 16)
        module, tensors, window = example["Regression"](), [inputs, inputs.sum(1, keepdim=True).sin()], 128
    else:
        tokens = torch.randint(0, 4, (500, 24)).cumsum(1) % 32
        module, tensors, window = example["NextToken"](), [tokens], 64
    order, optimizer = list(SameOrderSampler(range(len(tensors[0])))), module.configure_optimizers()
    total = 0.0
    windows = [order[first : first + window] for first in range(0, len(order), window)]
    for rows in windows:
        optimizer.zero_grad()
        loss = module.training_step([tensor[rows] for tensor in tensors], 0)
        loss.backward()
        optimizer.step()
        total += loss.item() * len(rows)
    return len(windows), pytest.approx(total / len(order), rel=1e-5)  # in float32, and printed with six decimals


@pytest.mark.parametrize("micro_batch", ["auto", "100"])
def test_one_device(micro_batch: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["one_device.py", "--micro-batch", micro_batch, "--epochs", "1"])
    runpy.run_path(str(EXAMPLES / "one_device.py"), run_name="__main__")
    steps, loss = printed(capsys.readouterr().out)
    assert steps == 8
    assert loss == pytest.approx(2.2, abs=0.3)


@needs_sharding_on_cpu
@pytest.mark.exhaustive
def test_an_example_by_torchrun_is_the_full_batch() -> None:
    options = ["--nproc_per_node", "2", "--master_addr", "127.0.0.1", "--master_port", str(free_port())]
    command = ["-m", "torch.distributed.run", *options, str(EXAMPLES / "fsdp2.py"), "--epochs", "1"]
    assert run(command) == one_epoch_by_hand("fsdp2.py")


def slurm(rank: int, port: int) -> dict[str, object]:  # what srun sets for a task: two nodes of one task each
    return {
        "SLURM_JOB_ID": 4711, "SLURM_JOB_NAME": "train", "SLURM_NNODES": 2, "SLURM_NTASKS": 2, "SLURM_NTASKS_PER_NODE": 1,
        "SLURM_PROCID": rank, "SLURM_LOCALID": 0, "SLURM_NODEID": rank, "SLURM_NODELIST": "127.0.0.1", "MASTER_PORT": port,
    }  # fmt: skip


def kubeflow(rank: int, port: int) -> dict[str, object]:  # what a PyTorchJob sets: two pods of one process each
    address = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {"KUBERNETES_PORT": "tcp://10.0.0.1:443", "WORLD_SIZE": 2, "RANK": rank, **address}


@pytest.mark.some_cases(0, 1)
@pytest.mark.parametrize(("cluster", "arguments"), [(kubeflow, ["--nodes", "2", "--kubeflow"]), (slurm, [])])
def test_variables_of_a_cluster_make_one_training_of_two_processes(cluster, arguments: list[str]) -> None:
    port = free_port()
    command = [str(EXAMPLES / "ddp.py"), "--epochs", "1", *arguments]
    assert run(command, [cluster(rank, port) for rank in range(2)]) == one_epoch_by_hand("ddp.py")


def test_file_for_sbatch_is_shell_and_names_options_of_the_script() -> None:
    file = EXAMPLES / "slurm.sbatch"
    subprocess.run(["bash", "-n", str(file)], check=True)
    (command,) = re.findall(r"^srun python (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
    name, *options = command.split()
    source = (EXAMPLES / name).read_text(encoding="utf-8")
    assert all(f'"{option}"' in source for option in options if option.startswith("--"))


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_ray_is_the_full_batch(tmp_path: Path) -> None:
    pytest.importorskip("ray")
    assert run([str(EXAMPLES / "ray_train.py"), "--epochs", "1", "--storage", str(tmp_path)]) == one_epoch_by_hand("ddp.py")


def gradient_by_training(trainer: Any, batches: list[Any]) -> torch.Tensor:
    """The change of the parameters by a step of SGD with a learning rate of 1, on these micro-batches."""
    before = torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach()
    trainer.args.gradient_accumulation_steps = len(batches)
    trainer.get_train_dataloader = lambda: DataLoader(batches, batch_size=None)
    trainer.train()
    return before - torch.nn.utils.parameters_to_vector(trainer.model.parameters()).detach()


def test_faults_of_the_hugging_face_trainer_are_found_and_as_large_as_in_its_training(capsys: Any, tmp_path: Path) -> None:
    pytest.importorskip("accelerate")
    pytest.importorskip("transformers")
    example = runpy.run_path(str(EXAMPLES / "hf_trainer.py"))
    example["main"]()
    lines = [line.split() for line in capsys.readouterr().out.splitlines()[1:]]
    assert [line[:2] for line in lines if float(line[2]) < 1e-12] == [["Trainer", "True"], ["Sum", "True"]]
    arguments = example["TrainingArguments"](
        str(tmp_path), use_cpu=True, report_to=[], optim="sgd", learning_rate=1.0, lr_scheduler_type="constant", max_steps=1,
        max_grad_norm=0.0, save_strategy="no", logging_strategy="no", disable_tqdm=True,
    )  # fmt: skip
    parts = [example["texts"](5, 2), example["texts"](5, 5)]
    whole = {name: torch.cat([part[name] for part in parts]) for name in parts[0]}
    for takes_kwargs in (True, False):  # not divided by the two micro-batches, and a mean of means
        verified, full, window = (example["Mean"](example["small_llama"](takes_kwargs), arguments) for _ in range(3))
        expected = gradient_by_training(full, [whole])
        error = (gradient_by_training(window, parts) - expected).norm() / expected.norm()
        assert error > 0.1
        assert example["verify_trainer"](verified, parts).gradient == pytest.approx(error.item(), rel=1e-4)  # float32
