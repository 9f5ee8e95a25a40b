"""Every test leaves no process behind, and starts from one thread and a quiet Lightning."""

import faulthandler
import gc
import logging
import multiprocessing
import os
import socket
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import lightning.pytorch  # noqa: F401  # now, when nobody else handles logs: then it prints them, from the ranks of a test too
import pytest
import torch

torch.set_num_threads(1)
# where torch.compile's backward is the first of a process, torch 2.15 starts threads for devices that are not there, and forked
# processes cannot have a backward
torch.zeros((), requires_grad=True).backward()
for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.WARNING)

os.register_at_fork(after_in_child=lambda: faulthandler.enable(2))  # a process that crashes tells where, with what is captured


def pytest_report_header(config: Any) -> str:  # how long it will take, for those who run everything
    return "lightning_accum: the tests take about 5 minutes on 2 quiet cores"


SECONDS = {  # what a test of these files takes. Many start interpreters or ranks, or train several times; of others about 1.
    **{"test_demo": 60, "test_both_packages": 20, "test_ray": 20, "test_examples": 15, "test_wheel": 10, "test_resume": 4},
    **dict.fromkeys(["test_sharded", "test_verify_over_ranks", "test_window_equals_batch"], 3),
    **dict.fromkeys(["test_compiled", "test_faults", "test_hugging_face", "test_adversarial"], 2),
    **dict.fromkeys(["test_samplers", "test_splitting", "test_documentation", "test_seams", "test_weight"], 0.1),
}


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Iterator[None]:
    """Leave the cases of a test that are asked for, and begin with files that take long: a worker's last is short."""
    mark_some_cases(items)
    yield
    taken: defaultdict[Any, float] = defaultdict(float)
    for item in items:
        taken[item.path] += SECONDS.get(item.path.stem, 1)
    items.sort(key=lambda item: -taken[item.path])


def mark_some_cases(items: list[pytest.Item]) -> None:
    """Of a test with the mark ``some_cases(n)``, n cases that are spread over all of them are run; the others are exhaustive.

    With ``some_cases(n, m)`` m of the others are, and the rest is slow.
    """
    cases: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("some_cases") is not None:
            cases.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for of_test in cases.values():
        number, *more = of_test[0].get_closest_marker("some_cases").args
        kept = _spread(number, len(of_test))
        others = [item for index, item in enumerate(of_test) if index not in kept]
        exhaustive = _spread(more[0] if more else len(others), len(others))
        for index, item in enumerate(others):
            item.add_marker("exhaustive" if index in exhaustive else "slow")


def _spread(number: int, over: int) -> set[int]:
    return {index * over // number for index in range(number)}


def pytest_collection_finish() -> None:
    """Leave all that was imported out of garbage collections: each took nearly a second, and running out of memory is two."""
    gc.collect()
    gc.freeze()


@pytest.hookimpl(trylast=True)
def pytest_configure(config: Any) -> None:  # have a worker wait for nobody
    database = getattr(config, "failures_db", None)  # of pytest-rerunfailures: a worker asks it at each test
    if database is not None:  # two small messages, of which the second would wait 40 ms for an answer to the first
        database.sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def pytest_terminal_summary(terminalreporter: Any) -> None:  # show what was seen of tests that had to run again
    for report in terminalreporter.getreports("rerun"):
        terminalreporter.section(f"ran again: {report.nodeid}")
        terminalreporter.write_line(report.longreprtext)
        for name, text in report.sections:
            terminalreporter.write_line(f"{name}\n{text}")


@pytest.fixture(autouse=True)
def _no_process_left() -> Iterator[None]:
    yield
    for child in multiprocessing.active_children():
        child.kill()
        child.join()


@pytest.fixture(autouse=True)
def _default_dtype_left_as_it_was() -> Iterator[None]:
    before = torch.get_default_dtype()
    yield
    after = torch.get_default_dtype()
    torch.set_default_dtype(before)
    assert after is before


@pytest.fixture(autouse=True)
def _in_a_directory_of_its_own(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
