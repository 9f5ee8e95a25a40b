"""Sizes of micro-batches are found by running out of memory, which is told from other errors, and seldom has to happen."""

from __future__ import annotations

import copy
import json
import math
import random

import pytest
import torch

from lightning_accum.splitting.memory import MicroBatchSizes, PeakMemory, free, has_room_to_double, is_out_of_memory

# --- telling the error ----------------------------------------------------------------------------------------------------


def test_the_cpu_s_own_error_is_recognised():
    with pytest.raises(RuntimeError) as caught:
        torch.empty(2**60, dtype=torch.uint8)
    assert is_out_of_memory(caught.value)


@pytest.mark.parametrize(
    "message",
    [
        "CUDA out of memory. Tried to allocate 20.00 MiB (GPU 0; 6.00 GiB total capacity)",
        "HIP out of memory. Tried to allocate 20.00 MiB",
        "XPU out of memory. Tried to allocate 20.00 MiB",
        "MPS backend out of memory (MPS allocated: 17.21 GB, other allocations: 1 MB, max allowed: 18.13 GB)",
        "CUDA error: out of memory\nCUDA kernel errors might be asynchronously reported",
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes.",
        "[enforce fail at alloc_cpu.cpp:80] data. DefaultCPUAllocator: not enough memory: you tried to allocate 8 bytes.",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_HOST_ALLOCATION_FAILED",
        "cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED",
        "cuDNN error: CUDNN_STATUS_NOT_SUPPORTED. This error may appear if you passed in a non-contiguous input.",
        "GET was unable to find an engine to execute this computation",
        "FIND was unable to find an engine to execute this computation",
        "Unable to find a valid cuDNN algorithm to run convolution",
    ],
)
def test_messages_of_devices_and_libraries_are_recognised(message):
    assert is_out_of_memory(RuntimeError(message))
    assert not is_out_of_memory(ValueError(message))


def test_types_are_recognised_whatever_they_say():
    assert is_out_of_memory(torch.OutOfMemoryError("no"))
    assert is_out_of_memory(torch.cuda.OutOfMemoryError("no"))
    assert is_out_of_memory(MemoryError())


def test_an_error_that_was_raised_from_one_is_recognised():
    wrapped, middle = ValueError("the step failed"), KeyError("layer")
    wrapped.__cause__, middle.__cause__ = middle, torch.OutOfMemoryError("CUDA out of memory")
    assert is_out_of_memory(wrapped)


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("mat1 and mat2 shapes cannot be multiplied"),
        RuntimeError("CUDA error: device-side assert triggered"),
        RuntimeError("cuDNN error: CUDNN_STATUS_EXECUTION_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_EXECUTION_FAILED when calling `cublasSgemm`"),
        RuntimeError(),
        KeyboardInterrupt(),
    ],
)
def test_other_errors_are_not(error):
    assert not is_out_of_memory(error)


# --- the device -----------------------------------------------------------------------------------------------------------


def test_freeing_the_cpu_collects_what_refers_to_itself():
    class Cycle:
        alive = 0

        def __init__(self):
            Cycle.alive += 1
            self.itself = self

        def __del__(self):
            Cycle.alive -= 1

    Cycle()
    assert Cycle.alive == 1
    free(torch.device("cpu"))
    assert Cycle.alive == 0


def test_freeing_a_cuda_device_empties_its_cache_and_forgets_the_peak(monkeypatch):
    calls = []
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: calls.append("empty"))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: calls.append(device))
    device = torch.device("cuda", 1)
    free(device)
    assert calls == ["empty", device]


def test_no_memory_to_empty_the_cache_is_no_error_and_others_are(monkeypatch):
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", lambda device: None)

    def fail(message):
        def empty_cache():
            raise RuntimeError(message)

        monkeypatch.setattr(torch.cuda, "empty_cache", empty_cache)

    fail("CUDA error: out of memory")
    free(torch.device("cuda"))
    fail("CUDA error: device-side assert triggered")
    with pytest.raises(RuntimeError, match="assert"):
        free(torch.device("cuda"))


@pytest.mark.parametrize(
    ("lasting", "peak", "free_", "reserved", "expected"),
    [
        (20, 50, 40, 60, True),  # 20 + 2 * 30 = 80 of 100
        (20, 55, 40, 60, True),  # 90, just within nine tenths
        (20, 56, 40, 60, False),
        (20, 50, 10, 60, False),  # another process has 30: 80 of 70
    ],
)
def test_room_to_double_is_for_what_is_above_the_lasting_part(monkeypatch, lasting, peak, free_, reserved, expected):
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: lasting)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    assert has_room_to_double(torch.device("cuda")) is expected


@pytest.mark.parametrize(
    ("lasting", "peak", "free_", "reserved", "most"),
    [
        (20, 50, 40, 60, 8 * 70 / 30),  # 8 elements took 30, and 70 of nine tenths of 100 are left
        (20, 80, 40, 60, 8 * 70 / 60),
        (90, 95, 0, 95, 0),  # nothing is left
        (20, 20, 40, 60, math.inf),
    ],
)
def test_sizes_by_what_the_largest_micro_batch_took(monkeypatch, lasting, peak, free_, reserved, most):
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: lasting)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: peak)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free_, 100))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: reserved)
    sizes = MicroBatchSizes(peaks=PeakMemory(torch.device("cuda")))
    fitting = int(min(most, 1000) // 2)
    assert sizes.size_for(cost=2, rows=50) == 50  # nothing was seen yet
    sizes.end_batch([(2, 4), (3, 1)])
    assert sizes.size_for(cost=2, rows=50) == max(1, min(50, fitting))
    assert sizes.size_for(cost=2, rows=1) == 1
    sizes.halve(cost=2, rows=8)  # a limit that was found holds beside it
    assert sizes.size_for(cost=2, rows=50) == min(4, max(1, fitting))


def test_where_nothing_is_known_only_trying_tells():
    peaks = PeakMemory(torch.device("cpu"))
    peaks.note([(10, 10)])
    assert peaks.most == math.inf
    assert has_room_to_double(torch.device("cpu"))


# --- a device that fits a number of elements ------------------------------------------------------------------------------


class Device:
    """Runs batches as training would, on so many elements of memory, and counts."""

    def __init__(self, memory, sizes=None):
        self.memory = memory
        self.sizes = sizes or MicroBatchSizes()
        self.failures = 0
        self.batches = 0

    def run(self, cost, rows):
        """Returns the sizes of the micro-batches that the batch was run in, in the end."""
        while True:
            plan = []
            while (done := sum(of_piece for _, of_piece in plan)) < rows:
                plan.append((cost, self.sizes.size_for(cost, rows - done)))
            too_large = next((piece for piece in plan if math.prod(piece) > self.memory), None)
            if too_large is None:
                self.sizes.end_batch(plan)
                self.batches += 1
                return [of_piece for _, of_piece in plan]
            self.failures += 1
            self.sizes.halve(*too_large)


def test_a_batch_that_fits_is_never_cut():
    device = Device(memory=3200)
    assert all(device.run(100, 32) == [32] for _ in range(1000))
    assert device.failures == 0


@pytest.mark.parametrize(("memory", "size"), [(3199, 16), (1600, 16), (1599, 8), (100, 1)])
def test_the_first_batch_finds_the_size_in_halvings(memory, size):
    device = Device(memory)
    assert device.run(100, 32) == [size] * (32 // size)
    assert device.failures == math.log2(32 / size)
    assert device.run(100, 32) == [size] * (32 // size)
    assert device.failures == math.log2(32 / size)


def test_odd_sizes_are_halved_upwards():
    sizes = MicroBatchSizes()
    assert [sizes.halve(10, 25), sizes.halve(10, 13), sizes.halve(10, 7), sizes.halve(10, 4), sizes.halve(10, 2)] == [
        13,
        7,
        4,
        2,
        1,
    ]


def test_one_sample_that_does_not_fit_is_an_error_that_says_what_to_do():
    device = Device(memory=99)
    with pytest.raises(torch.OutOfMemoryError, match=r"one sample \(of cost 100\) does not fit.*activation checkpointing"):
        device.run(100, 32)
    assert device.failures == 6


@pytest.mark.parametrize("cost", [1, 2, 3, 4, 5, 1000, 2**40, 2**70])
def test_every_cost_has_a_bucket_of_costs_up_to_the_next_power_of_two(cost):
    sizes = MicroBatchSizes()
    sizes.halve(cost, 8)
    bucket = min(math.ceil(math.log2(cost)), 63)
    assert sizes.as_tensor()[0].isfinite().nonzero().flatten().tolist() == [bucket]


def test_longer_rows_start_where_shorter_ones_failed_and_shorter_ones_from_the_whole_batch():
    sizes = MicroBatchSizes()
    sizes.halve(100, 32)
    assert sizes.size_for(100, 32) == 16
    assert sizes.size_for(1000, 32) == 16
    assert sizes.size_for(50, 32) == 32


def test_a_failure_of_shorter_rows_lowers_longer_ones_that_are_above():
    sizes = MicroBatchSizes()
    sizes.halve(1000, 64)
    sizes.halve(5000, 24)
    sizes.halve(100, 20)
    assert [sizes.size_for(cost, 64) for cost in (100, 1000, 5000)] == [12, 12, 12]


def test_shorter_rows_do_not_fall_below_what_longer_ones_fit():
    sizes = MicroBatchSizes()
    sizes.halve(1000, 32)
    assert sizes.halve(100, 20) == 16  # not 10
    assert sizes.halve(100, 16) == 8
    assert sizes.size_for(1000, 32) == 8


def test_each_bucket_finds_its_own_size():
    device = Device(memory=12_800)
    sequence = [1000, 100, 400, 3200, 12_800, 50] * 3
    found = {cost: device.run(cost, 64)[0] for cost in sequence}
    assert found == {50: 64, 100: 64, 400: 32, 1000: 8, 3200: 4, 12_800: 1}


# --- growing again --------------------------------------------------------------------------------------------------------


def test_failures_become_ever_rarer_while_memory_is_the_same():
    device = Device(memory=1000)
    failed_at = []
    for _ in range(10_000):
        before = device.failures
        device.run(100, 32)
        failed_at += [device.batches] * (device.failures - before)
    # 32 and 16, then 16 again after 100, 200, 400, ... batches that went well; no batch with a failure counts
    trials, at = [], 1
    while (at := at + 100 * 2 ** len(trials) + 1) <= 10_000:
        trials.append(at)
    assert failed_at == [1, 1, *trials]
    assert len(trials) == 6


def test_lengths_at_random_never_thrash():
    draw = random.Random(0)
    device = Device(memory=20_000)
    for _ in range(10_000):
        device.run(draw.randint(1, 4000), draw.randint(1, 64))
    assert device.failures < 150
    before = device.failures
    for _ in range(10_000):
        device.run(draw.randint(1, 4000), draw.randint(1, 64))
    assert device.failures - before < 40


def test_rows_that_are_dearer_than_their_bucket_tells_do_not_thrash():
    """A growth that most batches allow and some do not: it is each time tried later."""
    draw = random.Random(0)
    device = Device(memory=10_240)
    for _ in range(20_000):
        device.run(1024 if draw.random() < 0.01 else 513, 64)
    assert device.failures < 25


def test_sizes_grow_again_when_memory_comes_back():
    device = Device(memory=400)
    for _ in range(3):
        device.run(100, 32)
    assert device.run(100, 32) == [4] * 8
    device.memory = 10_000
    found = [device.run(100, 32)[0] for _ in range(400)]
    assert [size for size, before in zip(found[1:], found, strict=False) if size != before] == [8, 16, 32]
    assert device.failures == 3
    assert all(device.run(100, 32) == [32] for _ in range(1000))


def test_a_trial_that_succeeds_and_fails_later_goes_back():
    device = Device(memory=1000, sizes=MicroBatchSizes(patience=5))
    device.run(100, 64)
    assert device.run(100, 64)[0] == 8
    device.memory = 1600
    for _ in range(5):
        device.run(100, 64)
    assert device.run(100, 64)[0] == 16
    device.memory = 1000
    assert device.run(100, 64)[0] == 8
    at_eight = [device.run(100, 64)[0] for _ in range(10)]
    assert at_eight == [8] * 10
    device.memory = 1600
    assert device.run(100, 64)[0] == 16  # patience was 10 this time


def test_only_batches_that_the_limit_cuts_count():
    device = Device(memory=800, sizes=MicroBatchSizes(patience=5))
    device.run(100, 16)
    for _ in range(100):
        assert device.run(100, 8) == [8]
    assert device.run(100, 16) == [8, 8]
    assert device.failures == 1


def test_a_veto_prevents_trials_and_is_asked_again_after_as_long():
    answers = [True, False, False]

    device = Device(memory=800, sizes=MicroBatchSizes(answers.pop, patience=5))
    device.run(100, 16)
    device.memory = 1600
    found = [device.run(100, 16)[0] for _ in range(16)]
    assert found == [8] * 15 + [16]
    assert not answers
    assert device.failures == 1


def test_patience_has_an_end():
    device = Device(memory=800, sizes=MicroBatchSizes(patience=1, longest_patience=4))
    for _ in range(100):
        device.run(100, 16)
    # after 1, 2, 4, 4, 4, ... batches that went well
    assert device.failures == 1 + 1 + 1 + len(range(1 + 2 + 3 + 5, 101, 5))


# --- ranks and checkpoints ------------------------------------------------------------------------------------------------


def agree(*ranks):
    """One all-reduce with MIN."""
    reduced = torch.stack([sizes.as_tensor() for sizes in ranks]).amin(0)
    for sizes in ranks:
        sizes.agree(reduced)


def test_equal_histories_give_equal_sizes():
    draw = random.Random(1)
    history = [(draw.randint(1, 4000), draw.randint(1, 64)) for _ in range(3000)]
    first, second = Device(20_000), Device(20_000)
    assert [first.run(*batch) for batch in history] == [second.run(*batch) for batch in history]
    assert first.sizes.state_dict() == second.sizes.state_dict()


def test_ranks_take_over_the_lowest_limit():
    first, second = Device(1000), Device(1000)
    first.run(100, 32)
    assert (first.sizes.has_changed, second.sizes.has_changed) == (True, False)
    agree(first.sizes, second.sizes)
    assert not first.sizes.has_changed
    assert second.run(100, 32) == [8] * 4
    assert second.failures == 0


def test_what_grew_on_one_rank_grows_on_all_unless_it_fell_on_another():
    ranks = [MicroBatchSizes(patience=1) for _ in range(3)]
    for sizes in ranks:
        sizes.halve(100, 32)
        sizes.halve(5000, 16)
        sizes.end_batch([])
    agree(*ranks)
    for cost in (100, 5000):  # the first rank grows both
        device = Device(math.inf, ranks[0])
        device.run(cost, 64)
        device.run(cost, 64)
    assert ranks[0].has_changed
    ranks[1].halve(5000, 8)
    agree(*ranks)
    assert [sizes.size_for(100, 64) for sizes in ranks] == [32, 32, 32]
    assert [sizes.size_for(5000, 64) for sizes in ranks] == [4, 4, 4]


def test_ranks_share_their_patience():
    first, second = (Device(800, MicroBatchSizes(patience=2)) for _ in range(2))
    for device in (first, second):
        device.run(100, 16)
    agree(first.sizes, second.sizes)
    for _ in range(3):
        first.run(100, 16)
    assert first.failures == 2
    second.run(100, 16)
    agree(first.sizes, second.sizes)
    for _ in range(4):  # in vain for one rank is in vain for all
        second.run(100, 16)
    assert second.failures == 1


def test_an_agreement_without_news_changes_nothing():
    device = Device(1000)
    for _ in range(50):
        device.run(100, 32)
    agree(device.sizes)
    before = device.sizes.state_dict()
    agree(device.sizes)
    assert device.sizes.state_dict() == before


def test_a_checkpoint_goes_on_where_it_was_saved():
    draw = random.Random(2)
    history = [(draw.randint(1, 4000), draw.randint(1, 64)) for _ in range(2000)]
    device = Device(20_000)
    for batch in history[:1000]:
        device.run(*batch)
    state = json.loads(json.dumps(device.sizes.state_dict()))
    resumed = Device(20_000)
    resumed.run(4000, 64)  # forgotten
    resumed.sizes.load_state_dict(copy.deepcopy(state))
    assert resumed.sizes.has_changed
    assert [resumed.run(*batch) for batch in history[1000:]] == [device.run(*batch) for batch in history[1000:]]
    assert resumed.sizes.state_dict() == device.sizes.state_dict()
