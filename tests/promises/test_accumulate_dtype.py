"""``accumulate_dtype``: gradients are added up, weighed, reduced and normalised in a wider type than that of the parameters.

The tight check has float32 parameters and float64 sums: the gradients of the micro-batches, as they left the graph, added up by
hand in float64 and rounded once, give the parameters to the bit. In bfloat16 the error is measured.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from resumed import assert_goes_on, train
from sharded import fsdp2, needs_sharding_on_cpu
from support import OPTIMIZERS, Language, Scalar, ddp, language_loss, loader, pad, relative_error, sentences, trainer
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from lightning_accum import GradientAccumulation, Tokens
from lightning_accum.main_gradients import MainGradients

BFLOAT16_ROUNDING = 2**-8
"""Half a unit in the last of 8 bits, and as much for the parameter that the gradient moves."""

# --- float32 parameters, float64 sums: to the bit --------------------------------------------------------------------------

ROWS = sentences(68)
EVENTS: list[Any] = []
"""What happened on this rank: micro-batches with a loss and the gradients that their backward gave, "step", "epoch"."""


class Told(Language):
    """In single precision; writes down what it is given."""

    def __init__(self, optimizer: str = "sgd", ranks: int = 1) -> None:
        super().__init__(optimizer)
        self.float()
        self.ranks = ranks
        EVENTS.clear()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor | None:
        if len(batch["input_ids"]) == 3:  # how these tests ask for None
            return None
        if not self.trainer.strategy.accumulation.is_shadow_batch:
            EVENTS.append(({key: value.clone() for key, value in batch.items()}, {}))
        return super().training_step(batch, batch_idx)

    def on_train_start(self) -> None:
        for name, parameter in self.named_parameters():
            parameter.register_hook(partial(self.note_gradient, name))

    def note_gradient(self, name: str, gradient: Tensor) -> None:
        if not self.trainer.strategy.accumulation.is_shadow_batch:
            EVENTS[-1][1][name] = gradient.clone()

    def train_dataloader(self) -> Any:
        """The ranks have 6 batches each, or 7 and 6; rank 0 ends with one that has no loss, rank 1 begins with None."""
        rank, size = self.trainer.global_rank, 4 if self.ranks == 1 else 5 - self.trainer.global_rank
        starts = range(6 * rank, len(ROWS) - 6, 6 * self.ranks)
        batches: list[Any] = [pad(ROWS[start : start + size]) for start in starts]
        return loader([*batches, pad(ROWS[:3])] if rank == 0 else [None, *batches])

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        EVENTS.append("step")

    def on_train_epoch_end(self) -> None:
        EVENTS.append("epoch")

    def on_train_end(self) -> None:
        torch.save(EVENTS, f"events{self.trainer.global_rank}.pt")


def windows_of(events: list[Any], tail: str) -> list[list[Any]]:
    windows, current = [], []
    for event in events:
        if event == "step":
            windows.append(current)
            current = []
        elif event == "epoch":
            current = [] if tail == "drop" else current
        else:
            current.append(event)
    return windows


def by_hand(module: Language, of_ranks: list[list[list[Any]]], clip: float | None = None, is_anew: bool = False) -> Language:
    """The gradients of all micro-batches of a window, in single precision, added up in double and rounded once.

    They are those that the run has had, or are computed anew: how matrix products round depends on where in memory they are.
    """
    optimizer, parameters = module.configure_optimizers(), list(module.parameters())
    for window in zip(*of_ranks, strict=True):
        sums, weight = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in parameters], 0
        for batch, noted in (event for of_rank in window for event in of_rank):
            predictions = int((batch["labels"][:, 1:] != -100).sum())
            gradients = [noted[name] for name, _ in module.named_parameters()]
            if is_anew:
                gradients = torch.autograd.grad(language_loss(module.net(batch["input_ids"]), batch["labels"]), parameters)
            for total, gradient in zip(sums, gradients, strict=True):
                total += predictions * gradient.double()
            weight += predictions
        for parameter, total in zip(parameters, sums, strict=True):
            # sums of short products are often half way between two numbers; a division would fall to the other side of some
            parameter.grad = (total * (1 / weight)).float()
        if clip is not None:
            nn.utils.clip_grad_norm_(parameters, clip)
        optimizer.step()
    return module


POLICIES: dict[str, dict[str, Any]] = {
    "4": {"window": 4},
    "4, dropped tail": {"window": 4, "tail": "drop"},
    "4, carried tail": {"window": 4, "tail": "carry"},
    "by step": {"window": lambda step: 1 + step % 3},
    "tokens": {"window": Tokens(60)},
    "split": {"window": 3, "micro_batch": 2},
    "each split": {"window": 1, "micro_batch": 1},
    "tokens, split": {"window": Tokens(40), "micro_batch": 2},
    "tokens a micro-batch": {"window": 2, "micro_batch": Tokens(20)},
    "found by trying": {"window": 3, "micro_batch": "auto"},
}


@pytest.mark.some_cases(4, 12)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("policy", POLICIES)
def test_parameters_are_those_of_sums_in_double_precision_to_the_bit(policy: str, optimizer: str, ranks: int) -> None:
    settings = {"accumulate_dtype": torch.float64, "trim_padding": False, "check": False, **POLICIES[policy]}
    module = Told(optimizer, ranks)
    strategy = "accum" if ranks == 1 else ddp()
    trainer(strategy, devices=ranks, max_epochs=2, callbacks=[GradientAccumulation(**settings)]).fit(module)
    of_ranks = [windows_of(torch.load(f"events{rank}.pt"), settings.get("tail", "step")) for rank in range(ranks)]
    assert len(of_ranks[0]) >= 2
    for found, wanted in zip(module.parameters(), by_hand(Told(optimizer), of_ranks).parameters(), strict=True):
        assert torch.equal(found, wanted)
    anew = by_hand(Told(optimizer), of_ranks, is_anew=True)
    assert relative_error(module.parameters(), anew.parameters()) < 1e-5  # Adam makes much of gradients that are nearly 0


def test_without_it_they_are_not() -> None:
    """Or the test above would show nothing."""
    module = Told()
    trainer(max_epochs=2, callbacks=[GradientAccumulation(4, check=False)]).fit(module)  # whose backwards the hooks would note
    expected = by_hand(Told(), [windows_of(torch.load("events0.pt"), "step")])
    assert not all(torch.equal(a, b) for a, b in zip(module.parameters(), expected.parameters(), strict=True))


def test_clipping_and_hooks_find_the_gradient_in_the_type_of_the_parameter() -> None:
    class Clipped(Told):
        def on_after_backward(self) -> None:
            self.seen_inside = [parameter.grad for parameter in self.parameters()]

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            super().on_before_optimizer_step(optimizer)
            self.types = {parameter.grad.dtype for parameter in self.parameters()}

    module, callback = Clipped(), GradientAccumulation(4, accumulate_dtype=torch.float64, check=False)
    trainer(max_epochs=2, callbacks=[callback], gradient_clip_val=0.5).fit(module)
    expected = by_hand(Told(), [windows_of(torch.load("events0.pt"), "step")], clip=0.5)
    assert all(torch.equal(a, b) for a, b in zip(module.parameters(), expected.parameters(), strict=True))
    assert module.types == {torch.float32}
    assert module.seen_inside == [None] * len(module.seen_inside)


@pytest.mark.some_cases(1, 2)
@pytest.mark.parametrize("ranks", [1, 2])
@pytest.mark.parametrize("policy", [{"window": 3}, {"window": 3, "micro_batch": 2}, {"window": Tokens(60)}], ids=str)
def test_a_checkpoint_inside_a_window_goes_on_to_the_bit(policy: dict[str, Any], ranks: int) -> None:
    def make() -> Any:
        return "accum" if ranks == 1 else ddp()

    policy = {"accumulate_dtype": torch.float64, **policy}
    expected = train(make, ranks, **policy)
    for after in (2, 4):
        train(make, ranks, after, ends=True, **policy)
        state = torch.load("inside.ckpt", weights_only=True)["callbacks"]["GradientAccumulation"]
        if "window" in state:
            assert all(total.dtype == torch.float64 for own in state["window"]["losses"][0]["gradients"] for total in own.values())
        assert_goes_on(expected, train(make, ranks, resumes=True, **policy), f"checkpoint after {after}")


# --- parameters in bfloat16 ------------------------------------------------------------------------------------------------


class Linear(pl.LightningModule):
    """Each gradient of a micro-batch is its numbers, all of one sign; the parameter shows the mean of them."""

    def __init__(self, by_rank: list[Tensor]) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(by_rank[0].shape[1]))
        self.by_rank = by_rank

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        return (self.w * batch).sum() / 1.0

    def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
        if self.global_rank == 0:
            torch.save(self.w.grad, "gradient.pt")

    def train_dataloader(self) -> Any:
        return loader(list(self.by_rank[self.trainer.global_rank]))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=1.0)


def numbers(micro_batches: int, seed: int = 1) -> Tensor:
    """Gradients in bfloat16, of one sign, that change little from micro-batch to micro-batch: so does what is rounded away."""
    generator = torch.Generator().manual_seed(seed)
    mean, change = 1 + torch.rand(1000, generator=generator), torch.rand(micro_batches, 1000, generator=generator)
    return (mean * (0.99 + 0.02 * change)).bfloat16()


@pytest.mark.parametrize("ranks", [1, 2])
def test_of_256_micro_batches_in_bfloat16_the_error_is_at_least_8_times_smaller(ranks: int) -> None:
    by_rank = [numbers(256, seed) for seed in range(ranks)]
    expected = torch.cat(by_rank).double().mean(0)
    gradient_errors, parameter_errors = {}, {}
    for dtype in (None, torch.float32):
        module = Linear(by_rank)
        callback = GradientAccumulation(256, weight="equal", accumulate_dtype=dtype)
        trainer("accum" if ranks == 1 else ddp(), devices=ranks, precision="bf16-true", callbacks=[callback]).fit(module)
        gradient = torch.load("gradient.pt")
        assert gradient.dtype == torch.bfloat16
        gradient_errors[dtype] = relative_error([gradient], [expected])
        parameter_errors[dtype] = relative_error([-module.w], [expected])
    assert gradient_errors[torch.float32] < BFLOAT16_ROUNDING / 2
    assert gradient_errors[None] > 8 * gradient_errors[torch.float32]
    assert parameter_errors[None] > 8 * parameter_errors[torch.float32]


def test_the_sum_itself_is_exact_to_single_precision() -> None:
    values, parameter = numbers(256), nn.Parameter(torch.zeros(1000, dtype=torch.bfloat16))
    sums = MainGradients(torch.float32, lambda: [parameter])
    for value in values:
        sums.begin_backward()
        (parameter * value).sum().backward()
    assert relative_error(sums.gradients(), [values.double().sum(0)]) < 256 * 2**-24
    sums.close()


def test_weights_are_not_rounded_to_bfloat16() -> None:
    weights = iter((257.0, 256.0))  # bfloat16 has 256 for both
    weight = {"weight": lambda batch: torch.tensor(next(weights)), "check": False}
    callback = GradientAccumulation(2, **weight, accumulate_dtype=torch.float32)
    module = Linear([torch.tensor([[256.0], [-256.0]]).bfloat16()])
    trainer(callbacks=[callback], precision="bf16-true").fit(module)
    expected = torch.tensor([(257 * 256 - 256 * 256) / (257 + 256)], dtype=torch.float64)
    assert torch.equal(torch.load("gradient.pt"), expected.bfloat16())


class Mixed(pl.LightningModule):
    """A norm in single precision between layers in bfloat16, and an embedding that is the output layer too."""

    def __init__(self, optimizer: str = "adamw") -> None:
        super().__init__()
        torch.manual_seed(3)
        self.token = nn.Embedding(17, 16, dtype=torch.bfloat16)
        self.norm = nn.LayerNorm(16)
        self.head = nn.Linear(16, 17, bias=False, dtype=torch.bfloat16)
        self.head.weight = self.token.weight
        self.late = nn.Parameter(torch.zeros(16, dtype=torch.bfloat16), requires_grad=False)
        self.optimizer = optimizer

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.norm(self.token(tokens).float()).bfloat16() + self.late)

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        if self.trainer.global_step == 2:
            self.late.requires_grad_(True)
        return language_loss(self(batch["input_ids"]).float(), batch["labels"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return OPTIMIZERS[self.optimizer](self.parameters())


def test_parameters_of_several_types_tied_and_unfrozen_ones() -> None:
    batches = [pad(ROWS[i : i + 3]) for i in range(0, 60, 3)]
    module = Mixed()
    trainer(callbacks=[GradientAccumulation(5, accumulate_dtype=torch.float64)]).fit(module, loader(batches))
    expected = Mixed()
    optimizer = expected.configure_optimizers()
    for step in range(4):
        if step == 2:
            expected.late.requires_grad_(True)
        trained = [parameter for parameter in expected.parameters() if parameter.requires_grad]
        sums, weight = [torch.zeros_like(parameter, dtype=torch.float64) for parameter in trained], 0
        for batch in batches[5 * step : 5 * step + 5]:
            loss = language_loss(expected(batch["input_ids"]).float(), batch["labels"])
            predictions = int((batch["labels"][:, 1:] != -100).sum())
            for total, gradient in zip(sums, torch.autograd.grad(loss, trained), strict=True):
                total += predictions * gradient.double()
            weight += predictions
        for parameter, total in zip(trained, sums, strict=True):
            parameter.grad = (total * (1 / weight)).to(parameter.dtype)
        optimizer.step()
    for (name, found), wanted in zip(module.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(found, wanted), name
    assert module.late.abs().max() > 0


def test_a_window_of_one_micro_batch_is_left_to_lightning() -> None:
    def fitted(strategy: str, callbacks: list[Callback]) -> Language:
        module = Language("adamw")
        trainer(strategy, precision="bf16-true", callbacks=callbacks).fit(module, loader([pad(ROWS[i : i + 4]) for i in range(9)]))
        return module

    found = fitted("accum", [GradientAccumulation(accumulate_dtype=torch.float32)])
    for a, b in zip(found.parameters(), fitted("auto", []).parameters(), strict=True):
        assert torch.equal(a, b)


# --- memory ----------------------------------------------------------------------------------------------------------------


def peak_bytes(run: Callable[[], Any]) -> int:
    """What the allocator of the CPU gave out at most in ``run``, above what it had given out before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        run()
    profile.export_chrome_trace("trace.json")
    events = [event for event in json.loads(Path("trace.json").read_text())["traceEvents"] if event["name"] == "[memory]"]
    totals, now = [0], 0
    for event in sorted(events, key=lambda event: event["ts"]):
        now += event["args"]["Bytes"]
        totals.append(now)
    return max(totals)


def test_inside_a_window_sums_and_the_gradient_of_one_parameter_and_no_more_at_its_end() -> None:
    layers, size = 8, 256 * 256
    net = nn.Sequential(*(nn.Linear(256, 256, bias=False, dtype=torch.bfloat16) for _ in range(layers)))
    inputs = torch.ones(1, 256, dtype=torch.bfloat16)
    sums = MainGradients(torch.float32, net.parameters)

    def backward() -> None:
        sums.begin_backward()
        net(inputs).sum().backward()

    alive: list[int] = []
    for parameter in net.parameters():
        parameter.register_hook(lambda _: alive.append(sum(p.grad is not None for p in net.parameters())))
    most_of_others = 64 * 2**10  # activations
    # on a CPU, torch adds bfloat16 to float32 in a copy of it in float32; and a gradient comes while the next sum is made
    one_parameter = (2 + 4) * size
    assert peak_bytes(backward) <= 4 * layers * size + one_parameter + most_of_others
    assert peak_bytes(backward) <= one_parameter + most_of_others  # above the sums
    assert max(alive) == 0  # before each comes, that of the parameter before it is gone
    assert peak_bytes(sums.write_to_grad) <= 2 * size
    assert sum(parameter.grad.nbytes for parameter in net.parameters()) == 2 * layers * size
    sums.close()


def test_left_out_it_leaves_no_hook_and_it_takes_its_own_away() -> None:
    class Hooks(Callback):
        def on_train_batch_end(self, trainer: pl.Trainer, module: pl.LightningModule, *_: Any) -> None:
            self.seen = [bool(parameter._post_accumulate_grad_hooks) for parameter in module.parameters()]

    for dtype in (None, torch.float64):
        hooks, module = Hooks(), Language().float()
        callbacks = [GradientAccumulation(2, accumulate_dtype=dtype), hooks]
        trainer(callbacks=callbacks).fit(module, loader([pad(ROWS[:2])] * 3))
        assert set(hooks.seen) == {dtype is not None}
        assert not any(parameter._post_accumulate_grad_hooks for parameter in module.parameters())


# --- ranks -----------------------------------------------------------------------------------------------------------------


class SomeUsed(pl.LightningModule):
    """``common`` is used on both ranks, ``of_rank_1`` on one of them, ``none`` on no rank."""

    def __init__(self) -> None:
        super().__init__()
        self.common, self.of_rank_1, self.none = (nn.Parameter(torch.full((3,), 0.5)) for _ in range(3))
        self.conv = nn.Conv2d(2, 4, 3).to(memory_format=torch.channels_last)
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.seen += 1 + self.global_rank
        torch.save(self.seen, f"seen{self.global_rank}.pt")
        loss = (self.common * batch).sum() / 3.0 + self.conv.weight[:, :, 0].sum() * 0.1
        return loss + (self.of_rank_1 * batch).sum() / 3.0 if self.global_rank == 1 else loss

    def train_dataloader(self) -> Any:
        return loader([torch.arange(3.0) + 10 * i + self.global_rank / 3 for i in range(6)])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, weight_decay=0.1)


@pytest.mark.parametrize(
    ("options", "bucket"),
    [
        ({}, 10),
        ({}, 60),
        ({}, 25 * 2**20),
        ({"find_unused_parameters": True}, 60),
        ({"gradient_as_bucket_view": True}, 60),
    ],
    ids=str,
)
def test_parameters_that_some_ranks_or_none_use(options: dict[str, Any], bucket: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_accum.average.BUCKET_BYTES", bucket)
    module = SomeUsed()
    weight = module.conv.weight.detach().double()
    run = trainer(ddp(**options), devices=2, callbacks=[GradientAccumulation(3, weight="equal", accumulate_dtype=torch.float64)])
    run.fit(module)
    common, other = torch.full((3,), 0.5), torch.full((3,), 0.5)
    for window in (0, 1):
        of_ranks = [
            [(torch.arange(3.0) + 10 * i + rank / 3).div(3).double() for i in range(3 * window, 3 * window + 3)] for rank in (0, 1)
        ]
        for parameter, batches in ((common, of_ranks[0] + of_ranks[1]), (other, of_ranks[1])):
            parameter.sub_((torch.stack(batches).sum(0) / 6).float() + 0.1 * parameter, alpha=0.1)
        gradient = torch.zeros_like(weight)
        gradient[:, :, 0] = 0.1
        weight = weight - 0.1 * (gradient + 0.1 * weight)
    assert relative_error([module.common, module.of_rank_1], [common, other]) < 2**-23
    assert relative_error([module.conv.weight], [weight]) < 2**-23
    assert torch.equal(module.none, torch.full((3,), 0.5))  # weight decay did not move it
    # in the second window it begins as rank 0's, which DistributedDataParallel sends to all
    assert [torch.load(f"seen{rank}.pt").item() for rank in (0, 1)] == [3 + 3 * 1, 3 + 3 * 2]


class Checkpointed(Language):
    """As reentrant activation checkpointing, for which DistributedDataParallel has static_graph."""

    def __init__(self) -> None:
        super().__init__()
        self.float()

    def training_step(self, batch: dict[str, Tensor], batch_idx: int) -> Tensor:
        def logits(tokens: Tensor, dummy: Tensor) -> Tensor:
            return self.net(tokens)

        output = checkpoint(logits, batch["input_ids"], torch.zeros((), requires_grad=True), use_reentrant=True)
        return language_loss(output, batch["labels"])


def test_a_static_graph_changes_nothing() -> None:
    def fitted(**options: Any) -> pl.LightningModule:
        module = Checkpointed()
        callback = GradientAccumulation(2, accumulate_dtype=torch.float64)
        run = trainer(ddp(**options), devices=2, use_distributed_sampler=True, callbacks=[callback])
        run.fit(module, loader([pad(ROWS[i : i + 4]) for i in range(0, 48, 4)]))
        return module

    for a, b in zip(fitted(static_graph=True).parameters(), fitted().parameters(), strict=True):
        assert torch.equal(a, b)


@needs_sharding_on_cpu
@pytest.mark.parametrize("sync", ["window", "micro_batch", "shard"])
def test_fully_shard_adds_up_by_itself_where_it_is_told_to(sync: str) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    class Sharded(Linear):
        def __init__(self, by_rank: list[Tensor], types: MixedPrecisionPolicy) -> None:
            super().__init__(by_rank)
            del self.w
            self.layer = nn.Linear(1000, 1, bias=False)
            nn.init.zeros_(self.layer.weight)
            self.types = types

        def configure_model(self) -> None:
            mesh = self.device_mesh["data_parallel"]
            if sync == "shard":
                mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicate", "shard"))
            fully_shard(self.layer, mesh=mesh, mp_policy=self.types)

        def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
            return self.layer(batch).sum() / 1.0

        def on_before_optimizer_step(self, optimizer: torch.optim.Optimizer) -> None:
            pass

    by_rank = [numbers(128, seed) for seed in range(2)]
    expected = torch.cat(by_rank).double().mean(0)

    def fitted(precision: str = "bf16-true", **types: torch.dtype) -> float:
        callback = GradientAccumulation(128, weight="equal", accumulate_dtype=torch.float32)
        strategy = fsdp2(sync=sync)
        run = trainer(strategy, devices=2, precision=precision, callbacks=[callback])
        run.fit(Sharded(by_rank, MixedPrecisionPolicy(**types)))
        return relative_error([-run.whole["layer.weight"][0]], [expected])

    if sync != "micro_batch":
        with pytest.raises(Exception, match=r"in torch.bfloat16. .* mp_policy=MixedPrecisionPolicy\(reduce_dtype=torch.float32\)"):
            fitted()
        assert fitted(reduce_dtype=torch.float32) < BFLOAT16_ROUNDING
    else:
        with pytest.raises(Exception, match=r'in the type of the parameters, .* use sync="window"'):
            fitted(reduce_dtype=torch.float32)
    if torch.__version__ >= "2.15":  # which has the type of the parameters for that of the reduction
        assert fitted("32-true", param_dtype=torch.bfloat16) < BFLOAT16_ROUNDING
    else:
        with pytest.raises(Exception, match="in torch.bfloat16. "):
            fitted("32-true", param_dtype=torch.bfloat16)


# --- what is refused -------------------------------------------------------------------------------------------------------


def test_sparse_gradients_are_refused_before_training_or_in_the_backward() -> None:
    class Sparse(Scalar):
        def __init__(self) -> None:
            super().__init__([torch.tensor([1, 2])] * 2)
            del self.w
            self.rows = nn.Embedding(4, 2, sparse=True)

        def loss(self, batch: Tensor) -> Tensor:
            return self.rows(batch).mean()

    class Hidden(Sparse):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(4, 2)

        def loss(self, batch: Tensor) -> Tensor:
            return F.embedding(batch, self.rows.weight, sparse=True).mean()

    def run() -> pl.Trainer:
        return trainer(callbacks=[GradientAccumulation(2, accumulate_dtype=torch.float64)])

    with pytest.raises(MisconfigurationException, match=r"those of rows are sparse. Leave sparse=True out"):
        run().fit(Sparse())
    with pytest.raises(RuntimeError, match=r"of shape \(4, 2\) is torch.sparse_coo. Leave accumulate_dtype out"):
        run().fit(Hidden())


@pytest.mark.parametrize("dtype", ["float32", torch.int64, 32])
def test_what_is_no_type_for_gradients(dtype: Any) -> None:
    with pytest.raises(MisconfigurationException, match="expected a floating-point torch.dtype, such as torch.float32, or None"):
        GradientAccumulation(accumulate_dtype=dtype)


def test_where_no_parameter_is_narrower_nothing_changes() -> None:
    def fitted(dtype: torch.dtype | None) -> Language:
        module = Language("adamw").float()
        callbacks = [GradientAccumulation(3, accumulate_dtype=dtype)]
        trainer(callbacks=callbacks).fit(module, loader([pad(ROWS[i : i + 4]) for i in range(9)]))
        return module

    for dtype in (torch.float32, torch.bfloat16):
        for a, b in zip(fitted(dtype).parameters(), fitted(None).parameters(), strict=True):
            assert torch.equal(a, b)
