"""Hand-written loops: with the Accumulator, parameters are those of the loop over full batches, with Fabric and without.

So they are with losses of several terms: with ``loss_of=``, or with a weight for each term.
"""

import copy
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext, suppress
from datetime import timedelta
from functools import partial
from typing import Any, NamedTuple

import pytest
import torch
from harness import Unsized, windows_of
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision as FabricMixedPrecision
from lightning.fabric.strategies import DDPStrategy, ModelParallelStrategy
from lightning.fabric.strategies.launchers.multiprocessing import _MultiProcessingLauncher
from losses_of_terms import COUNTS, LOSSES, OfTerms, windows_of_tokens
from losses_of_terms import rows as rows_of_terms
from sharded import fully_shard, needs_sharding_on_cpu, whole_parameters
from support import OPTIMIZERS, Language, Toy, error_of_updates, language_loss, pad, sentences, train_by_hand, warned
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import default_collate
from whole_batch_losses import clip

from lightning_accum import AccumulationError, AccumulationWarning, DoesNotAddUpError
from lightning_accum.fabric import Accumulator, Tokens


class Task(NamedTuple):
    """What a loop trains: a model, its loss of a batch, what makes a batch of rows, and the parts that FSDP2 shards."""

    make: Callable[[], Any]
    loss: Callable[[Any, Any], Tensor]
    collate: Callable[[Any], Any]
    parts: Callable[[Any], Iterable[nn.Module]]


def loss_of(model: Any, batch: dict[str, Tensor]) -> Tensor:
    return language_loss(model(batch["input_ids"]), batch["labels"])


LANGUAGE = Task(lambda: Language().net, loss_of, pad, lambda model: model.blocks)


def on_two(run: Callable[[Fabric], Any], strategy: str = "ddp", task: Task = LANGUAGE, **kwargs: Any) -> Any:
    """What ``run`` returns on the first of two ranks."""

    def shard(model: nn.Module, mesh: Any) -> nn.Module:
        for part in [*task.parts(model), model]:
            fully_shard(part, mesh=mesh["data_parallel"])
        return model

    def to_file(fabric: Fabric) -> None:
        found = run(fabric)
        if fabric.global_rank == 0:
            torch.save(found, "found.pt")

    kwargs["timeout"] = timedelta(seconds=60)
    if strategy == "ddp":
        chosen: Any = DDPStrategy(start_method="fork", **kwargs)
    else:
        chosen = ModelParallelStrategy(parallelize_fn=shard, data_parallel_size=2, tensor_parallel_size=1, **kwargs)
        chosen._configure_launcher = lambda: setattr(chosen, "_launcher", _MultiProcessingLauncher(chosen, start_method="fork"))
    Fabric(accelerator="cpu", devices=2, strategy=chosen).launch(to_file)
    return torch.load("found.pt")


def in_batches(rows: Sequence[Tensor], size: int) -> list[dict[str, Tensor]]:
    return [pad(rows[i : i + size]) for i in range(0, len(rows), size)]


def set_up(fabric: Fabric | None, optimizer: str, task: Task = LANGUAGE, **arguments: Any) -> tuple[Any, Any, Any, Accumulator]:
    """The model, as the loop calls it, its optimizer and its Accumulator."""
    model = wrapped = task.make()
    wrapped = model if fabric is None else fabric.setup(model)
    stepping = OPTIMIZERS[optimizer](wrapped.parameters())
    stepping = stepping if fabric is None else fabric.setup_optimizers(stepping)
    return model, wrapped, stepping, Accumulator(fabric, wrapped, stepping, **{"log": False, **arguments})


Trained = tuple[dict[str, Tensor], list[float]]  # the parameters of a model, and the loss of each window


def steps(accumulator: Accumulator, model: Any, batches: Iterable[Any], task: Task = LANGUAGE) -> Iterator[float]:
    """The loss of each window of a loop."""
    for batch in batches:
        accumulator.backward(None if batch is None else task.loss(model, batch))
        if accumulator.step(clip_norm=0.5):
            yield accumulator.window_loss


def loop(fabric: Fabric | None, optimizer: str, loader: Any, task: Task = LANGUAGE, passes: int = 2, **arguments: Any) -> Trained:
    model, wrapped, _, accumulator = set_up(fabric, optimizer, task, **arguments)
    batches = (batch for number in range(passes) for batch in accumulator(loader, is_last=number == passes - 1))
    losses = list(steps(accumulator, wrapped, batches, task))
    assert accumulator.optimizer_steps == len(losses)
    return whole_parameters(model), losses


def assert_steps_of(found: Trained, optimizer: str, windows: Any, task: Task = LANGUAGE, shown: slice = slice(None)) -> None:
    """These are a loop's on one full batch a window, and so are the losses of windows in ``shown``."""
    reference, losses = Toy(task.loss, optimizer, task.make), []

    def noted(batch: Any) -> Tensor:
        losses.append(task.loss(reference.net, batch))
        return losses[-1]

    train_by_hand(reference, [task.collate(window) for window in windows], 1, noted, norm=0.5)
    assert error_of_updates(found[0], reference.net, task.make()) < 1e-12
    assert len(found[1]) == len(losses)
    assert found[1][shown] == pytest.approx([loss.item() for loss in losses[shown]], rel=1e-12)


def one_process() -> Fabric:
    return Fabric(accelerator="cpu", devices=1)  # not "64-true", which hands outputs out in single precision


WITH_AND_WITHOUT_FABRIC = pytest.mark.parametrize("fabric", [one_process, lambda: None], ids=["Fabric", "plain torch"])
ROWS = sentences(22)


def by_tokens(size: int) -> list[int]:  # rows of windows that end with the loader batch of 2 rows in which they have so many tokens
    pairs = [[{"labels": row[1:]} for row in ROWS[i : i + 2]] for i in range(0, len(ROWS), 2)]
    return [len(window) for window in windows_of_tokens(pairs, size)]


LOOPS: dict[str, tuple[int, dict[str, Any], list[int]]] = {
    "windows with tails": (2, {"window": 4}, [8, 8, 6]),
    "split": (8, {"micro_batch": 3}, [8, 8, 6]),
    "split, in windows": (4, {"window": 2, "micro_batch": 3}, [8, 8, 6]),
    "checked": (4, {"window": 2, "loss_of": loss_of}, [8, 8, 6]),
    "tails dropped": (2, {"window": 4, "tail": "drop"}, [8, 8, -6]),
    "tails carried": (2, {"window": 4, "tail": "carry"}, [8, 8, 8, 8, 8, 4]),
    "by pass": (2, {"window": {0: 2, 1: 4}}, [4, 4, 4, 4, 4, 2, 8, 8, 6]),
    "by step": (2, {"window": lambda step: step + 1}, [2, 4, 6, 8, 2, 12, 10]),
    "tokens": (2, {"window": Tokens(30)}, by_tokens(30)),
    "tokens, split": (2, {"window": Tokens(30), "micro_batch": 1}, by_tokens(30)),
}


@pytest.mark.some_cases(4, 10)
@WITH_AND_WITHOUT_FABRIC
@pytest.mark.parametrize("case", LOOPS)
def test_a_loop_takes_the_steps_of_full_batches(fabric: Callable[[], Any], case: str) -> None:
    def cut(rows: Sequence[Tensor], sizes: Sequence[int]) -> list[Any]:
        """Windows of so many rows; of less than none, they are left out."""
        ends = [sum(map(abs, sizes[: i + 1])) for i in range(len(sizes))]
        assert ends[-1] == len(rows)
        return [rows[end - size : end] for size, end in zip(sizes, ends, strict=True) if size > 0]

    size, arguments, sizes = LOOPS[case]
    windows = cut(ROWS * 2, sizes if sum(map(abs, sizes)) == 44 else sizes * 2)
    for optimizer, loader in (("sgd", in_batches(ROWS, size)), ("adamw", Unsized(in_batches(ROWS, size)))):
        assert_steps_of(loop(fabric(), optimizer, loader, **arguments), optimizer, windows)


@pytest.mark.some_cases(3)
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=needs_sharding_on_cpu)])
@pytest.mark.parametrize("arguments", [{}, {"micro_batch": 3}, {"loss_of": loss_of, "window": 3}], ids=["windows", "split", "None"])
def test_two_ranks_take_the_steps_of_one_process_on_the_full_batch(strategy: str, arguments: dict[str, Any]) -> None:
    rows = sentences(41)  # two ranks, windows of two loader batches of 4 rows; the second rank has fewer of them

    def run(fabric: Fabric) -> Trained:
        own = in_batches(rows, 4)[fabric.global_rank :: 2]
        own = [own[0], None, *own[1:4], None, *own[4:]] if "window" in arguments else own  # or of three, of which one is missing
        return loop(fabric, "adamw", own, **{"window": 2, **arguments})

    assert_steps_of(on_two(run, strategy), "adamw", [rows[i : i + 16] for i in range(0, 41, 16)] * 2)


@pytest.mark.parametrize("window", [2, Tokens(60)], ids=["batches", "tokens"])
def test_a_loop_that_still_switches_the_reduction_off_is_an_error_before_a_step(window: Any) -> None:
    def run(fabric: Fabric) -> int:  # with what is left of Fabric's own recipe for accumulation
        _, wrapped, _, accumulator = set_up(fabric, "adamw", window=window)

        def switched() -> Iterator[float]:
            for index, batch in enumerate(accumulator(in_batches(sentences(24), 4)[fabric.global_rank :: 2])):
                with fabric.no_backward_sync(wrapped, enabled=index % 2 == 0):
                    yield from steps(accumulator, wrapped, [batch])

        with pytest.raises(AccumulationError, match="no_backward_sync"):
            list(switched())
        return accumulator.optimizer_steps

    assert on_two(run) == 0


def resumed(fabric: Fabric | None, loader: Sequence[Any], task: Task = LANGUAGE, passes: int = 2, **arguments: Any) -> Trained:
    """Train, be stopped after five loader batches of the last pass, inside a window, and go on in a new model."""
    at = (passes - 1, 5)
    _, model, optimizer, accumulator = set_up(fabric, "adamw", task, **arguments)

    def until_it_stops() -> Iterator[Any]:
        for batch in (batch for _ in range(passes) for batch in accumulator(loader)):
            yield batch
            if (accumulator.passes, accumulator.loader_batches) == at:
                return

    losses = list(steps(accumulator, model, until_it_stops(), task))
    states = [one.state_dict() for one in (model, optimizer, accumulator)]
    if fabric is None or fabric.global_rank == 0:  # as fabric.save does
        torch.save(states, "state.pt")
    if fabric is not None:
        fabric.barrier()
    of_model, model, optimizer, accumulator = set_up(fabric, "adamw", task, **arguments)
    for one, state in zip((model, optimizer, accumulator), torch.load("state.pt", weights_only=True), strict=True):
        one.load_state_dict(state)
    assert (accumulator.passes, accumulator.loader_batches) == at
    losses += steps(accumulator, model, accumulator(loader, skip=accumulator.loader_batches), task)
    return whole_parameters(of_model), losses


@WITH_AND_WITHOUT_FABRIC
@pytest.mark.parametrize("window", [3, Tokens(40)], ids=["batches", "tokens"])
def test_a_checkpoint_inside_a_window_goes_on_to_the_bit(fabric: Callable[[], Any], window: Any) -> None:
    loader = in_batches(sentences(15), 2)
    expected = loop(fabric(), "adamw", loader, window=window)
    found = resumed(fabric(), loader, window=window)
    assert all(torch.equal(found[0][name], value) for name, value in expected[0].items())


def test_a_checkpoint_inside_a_window_of_two_ranks_goes_on() -> None:
    rows = sentences(31)
    found = on_two(lambda fabric: resumed(fabric, in_batches(rows, 2)[fabric.global_rank :: 2], window=3))
    assert_steps_of(found, "adamw", [rows[i : i + 12] for i in range(0, 31, 12)] * 2)


@needs_sharding_on_cpu
def test_a_state_that_is_loaded_inside_a_window_drops_its_gradients() -> None:
    rows = sentences(24)

    def run(fabric: Fabric) -> Trained:
        model, wrapped, _, accumulator = set_up(fabric, "adamw", window=2)
        loader, state = in_batches(rows, 4)[fabric.global_rank :: 2], accumulator.state_dict()
        accumulator.backward(loss_of(wrapped, next(iter(accumulator(loader)))))
        accumulator.load_state_dict(state)
        losses = list(steps(accumulator, wrapped, accumulator(loader)))
        return whole_parameters(model), losses

    assert_steps_of(on_two(run, "fsdp2"), "adamw", [rows[:16], rows[16:]])


NAMES = ["tokens and samples", "learned uncertainty", "tokens, samples and a penalty", "a term only where there is something"]
BATCHES = [rows_of_terms(size, seed) for seed, size in enumerate((3, 1, 5, 2, 2, 4, 1, 3, 1, 2, 6, 3))]
WINDOWS = windows_of([BATCHES], 4)


class LossOfTerms(nn.Module):  # the loss of a batch, as the model that the loop calls
    def __init__(self, name: str) -> None:
        super().__init__()
        self.of = OfTerms(LOSSES[name].of)

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return self.of.training_step(batch, 0)


def call(model: Any, batch: Any) -> Tensor:
    return model(batch)


def of_terms(name: str = "tokens and samples") -> Task:
    return Task(partial(LossOfTerms, name), call, default_collate, lambda model: [model.of.net])


def loop_of_terms(optimizer: str, batches: Any, task: Task | None = None, fabric: Any = None, **how: Any) -> Trained:
    return loop(fabric, optimizer, list(map(default_collate, batches)), task or of_terms(), 1, **how)


@pytest.mark.filterwarnings("error::lightning_accum.AccumulationWarning")
@pytest.mark.some_cases(4, 6)
@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("arguments", [{"window": 4}, {"micro_batch": 3}], ids=["windows", "split"])
@pytest.mark.parametrize("name", NAMES)
def test_with_loss_of_a_window_of_several_terms_takes_the_step_of_its_full_batch(name: str, arguments: Any, optimizer: str) -> None:
    task = of_terms(name)
    found = loop_of_terms(optimizer, BATCHES if "window" in arguments else WINDOWS, task, loss_of=call, **arguments)
    assert_steps_of(found, optimizer, WINDOWS, task)


def test_a_weight_for_each_term_needs_no_loss_of() -> None:
    found = loop_of_terms("adamw", BATCHES, window=4, weight=[COUNTS["tokens"], COUNTS["samples"]])
    assert_steps_of(found, "adamw", WINDOWS, of_terms(), shown=slice(0))  # it is shown by the first weight


def test_without_loss_of_the_terms_are_told_of_before_or_at_the_first_step() -> None:
    with warned() as messages:
        loop_of_terms("sgd", BATCHES, window=4)
    assert any("weight=[...]" in message for message in messages)


def test_a_checkpoint_inside_a_window_of_several_terms_goes_on() -> None:
    found = resumed(None, list(map(default_collate, BATCHES)), of_terms(), passes=1, window=4, loss_of=call)
    assert_steps_of(found, "adamw", WINDOWS, of_terms(), shown=slice(0, 3, 2))  # not of the window in between


@pytest.mark.filterwarnings("ignore::lightning_accum.AccumulationWarning")
def test_a_window_of_tokens_keeps_its_size_if_the_weights_of_its_terms_part_later() -> None:
    def of_two_means(model: Any, batch: list[Tensor]) -> Tensor:
        numbers, mask = model(batch[0]).squeeze(-1), batch[1]
        return (numbers * mask).sum() / mask.sum() + numbers.mean(1).square().mean()

    torch.manual_seed(1)
    model, alike, others = nn.Linear(1, 1).double(), torch.eye(4).double(), torch.ones(4, 4).tril().double()
    batches = [[torch.randn(4, 4, 1).double(), mask] for mask in (alike, alike, *[others, alike] * 4)]
    accumulator, ends = accumulator_of(model, window=Tokens(12), loss_of=of_two_means), [0]
    for number, batch in enumerate(accumulator(batches), 1):
        accumulator.backward(of_two_means(model, batch))
        ends += [number] * accumulator.step()
    assert ends == [0, 3, 7, 9, 10]  # the window that ends with batch 5 is left out


def test_a_state_of_counted_terms_goes_on_with_one_weight_and_else_asks_for_loss_of() -> None:
    task, loader = of_terms(), list(map(default_collate, BATCHES))
    _, model, _, before = set_up(None, "sgd", task, window=4, loss_of=call)
    list(steps(before, model, before(loader), task))
    for arguments, raised in (({"weight": "equal"}, nullcontext()), ({}, pytest.raises(AccumulationError, match="loss_of="))):
        _, model, _, after = set_up(None, "sgd", task, window=4, **arguments)
        after.load_state_dict(before.state_dict())
        with raised:
            assert len(list(steps(after, model, after(loader), task))) == 3


@pytest.mark.some_cases(2)
@pytest.mark.parametrize("strategy", ["ddp", pytest.param("fsdp2", marks=needs_sharding_on_cpu)])
@pytest.mark.parametrize("arguments", [{"window": 2}, {"micro_batch": 2}], ids=["windows", "split"])
def test_on_two_ranks_the_terms_of_both_are_counted(arguments: Any, strategy: str) -> None:
    """The second rank has fewer loader batches, and other numbers of micro-batches in each."""
    by_rank, unused = [BATCHES[:6], BATCHES[6:11]], {"find_unused_parameters": True} if strategy == "ddp" else {}

    def run(fabric: Fabric) -> Any:
        return loop_of_terms("adamw", by_rank[fabric.global_rank], fabric=fabric, loss_of=call, **arguments)

    assert_steps_of(
        on_two(run, strategy, of_terms(), **unused), "adamw", windows_of(by_rank, arguments.get("window", 1)), of_terms()
    )


def test_a_loader_that_writes_into_its_last_batch_is_an_error() -> None:
    """And none that writes into other parts of the memory of which its batches are views."""

    class Written(list):
        def __iter__(self) -> Iterator[Any]:
            for number, batch in enumerate(super().__iter__()):
                memory = self.memories[number % len(self.memories)]
                for name, value in default_collate(batch).items():
                    memory[name].copy_(value)
                yield memory

    batches, task = [rows_of_terms(4, seed) for seed in range(8)], of_terms()
    whole, loader = default_collate(list(map(default_collate, batches))), Written(batches)
    loader.memories = views = [{name: value[place] for name, value in whole.items()} for place in range(4)]
    assert_steps_of(loop(None, "sgd", loader, task, 1, window=4, loss_of=call), "sgd", windows_of([batches], 4), task)
    for memory in (views[0], default_collate(batches[0])):
        loader.memories = [memory]
        for data, loss_of in ((loader, call), (Unsized(loader), None)):  # a window is counted, or its end is not known
            with pytest.raises(AccumulationError, match="drawn ahead"):
                loop(None, "sgd", data, task, 1, window=4, loss_of=loss_of)


def accumulator_of(model: nn.Module, **arguments: Any) -> Accumulator:
    return Accumulator(None, model, torch.optim.SGD(model.parameters(), 1.0), log=False, **arguments)


def scalar() -> nn.Linear:  # its gradient is the mean of what it sees
    model = nn.Linear(1, 1, bias=False, dtype=torch.float64)
    nn.init.zeros_(model.weight)
    return model


def column(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)[:, None]


def train_scalar(batches: Any, window: int, fabric: Fabric | None = None, **arguments: Any) -> tuple[list[float], Accumulator]:
    """The gradients that were stepped; a batch of NaN or None has no loss."""
    model = wrapped = scalar()
    optimizer, gradients = torch.optim.SGD(model.parameters(), 1.0), []
    if fabric is not None:
        wrapped, optimizer = fabric.setup(model, optimizer)
    accumulator = Accumulator(fabric, wrapped, optimizer, window, log=False, **arguments)
    for batch in accumulator(batches):
        before = model.weight.item()
        accumulator.backward(None if batch is None or batch.isnan().all() else wrapped(batch).mean())
        if accumulator.step():
            gradients.append(before - model.weight.item())
    return gradients, accumulator


MISSING = column(math.nan)


def test_what_is_not_finite_is_left_out_or_an_error() -> None:
    batches = [column(1), column(math.inf, 1), column(4, 6, 8)]
    with pytest.warns(AccumulationWarning, match="not finite"):
        gradients, accumulator = train_scalar(batches, 3, on_nonfinite="skip")
    assert (gradients, accumulator.skipped_micro_batches) == ([19 / 4], 1)
    with pytest.raises(FloatingPointError):
        train_scalar(batches, 3, on_nonfinite="raise")


OF_RANKS = [[column(1), column(2, 3), column(4), column(5), column(6, 7)], [column(10, 11), None, MISSING]]


@pytest.mark.parametrize("find_unused", [False, True])
def test_ranks_without_a_loss_and_with_less_data_take_part_in_the_steps_of_others(find_unused: bool) -> None:
    def train(fabric: Fabric) -> list[float]:
        own = OF_RANKS[fabric.global_rank]
        return [gradient for loader in (own, Unsized(own)) for gradient in train_scalar(loader, 2, fabric)[0]]

    expected = [(1 + 2 + 3 + 10 + 11) / 5, (4 + 5) / 2, (6 + 7) / 2]
    assert on_two(train, find_unused_parameters=find_unused) == pytest.approx(2 * expected, rel=1e-12)


def test_a_loader_that_fails_on_one_rank_ends_all() -> None:
    def train(fabric: Fabric) -> str:
        failing = ({0: column(1)}[number if fabric.global_rank else 0] for number in range(2))
        with pytest.raises(KeyError if fabric.global_rank == 1 else RuntimeError):
            train_scalar(failing, 2, fabric)
        return "ended"

    assert on_two(train) == "ended"


def of_towers(net: Any, batch: Any) -> Tensor:
    return clip(net.left(batch[0]), net.right(batch[1]), batch[0], torch.ones(()))


class Towers(nn.ModuleDict):
    forward = of_towers


def towers() -> Towers:
    torch.manual_seed(1)
    return Towers({"left": nn.Linear(6, 4), "right": nn.Linear(5, 4)}).double()


def views(*sizes: int) -> list[list[Tensor]]:
    generator = torch.Generator().manual_seed(5)
    return [[torch.randn(n, width, generator=generator, dtype=torch.float64) for width in (6, 5)] for n in sizes]


@WITH_AND_WITHOUT_FABRIC
@pytest.mark.parametrize("arguments", [{"check": False}, {"loss_of": of_towers}], ids=["unchecked", "loss_of"])
@pytest.mark.filterwarnings("error::lightning_accum.AccumulationWarning")
def test_row_wise_towers_have_the_contrastive_loss_of_the_whole_batch(fabric: Callable[[], Any], arguments: Any) -> None:
    task, batches, seen = Task(towers, call, lambda batch: batch, list), views(8, 8, 5), set()
    net, model, _, accumulator = set_up(fabric(), "adamw", task, micro_batch=3, row_wise=["left", "right"], **arguments)
    net.left.register_forward_pre_hook(
        lambda layer, given: seen.add(len(given[0])) if not torch.is_inference_mode_enabled() else None
    )
    losses = list(steps(accumulator, model, accumulator(batches), task))
    assert_steps_of((whole_parameters(net), losses), "adamw", batches, task)
    assert max(seen) < 8


def test_row_wise_towers_that_cannot_be_tried_out_are_warned_of() -> None:
    with pytest.warns(AccumulationWarning, match=r"row_wise=\['left'\].*pass loss_of="):
        accumulator_of(towers(), micro_batch=3, row_wise="left")


def test_a_loss_that_does_not_add_up_is_an_error_before_the_first_step() -> None:
    net = towers()
    with pytest.raises(DoesNotAddUpError, match="row_wise="):
        next(iter(accumulator_of(net, window=2, loss_of=of_towers)(views(8, 8))))
    assert all(map(torch.equal, net.parameters(), towers().parameters()))
    batches = views(8, 8)
    assert next(iter(accumulator_of(net, window=2, loss_of=of_towers, check=False)(batches))) is batches[0]


def test_gradients_are_added_up_in_a_wider_type_by_the_last_accumulator_of_a_model() -> None:
    model, accumulators = scalar().bfloat16(), []
    for _ in range(2):
        nn.init.zeros_(model.weight)
        accumulators += [accumulator_of(model, window=3, accumulate_dtype=torch.float32, weight="equal")]
        for batch in accumulators[-1]([column(value).bfloat16() for value in (256.0, 1.0, 1.0)]):
            accumulators[-1].backward(model(batch).sum())
            accumulators[-1].step()
        assert model.weight.item() == -86  # (256 + 1 + 1) / 3; in bfloat16, 256 + 1 is 256
    with pytest.raises(AccumulationError, match="later Accumulator"):
        accumulators[0]([])


def test_a_step_that_a_grad_scaler_leaves_out_is_none_and_clipping_is_unscaled() -> None:
    precision = FabricMixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=2.0**10))
    fabric, stepped, norms = Fabric(accelerator="cpu", devices=1, plugins=precision), [], []
    torch.manual_seed(2)
    model, start, reference = (made := nn.Linear(4, 1)), copy.deepcopy(made), copy.deepcopy(made)
    wrapped, optimizer = fabric.setup(model, torch.optim.SGD(model.parameters(), lr=1.0))
    accumulator = Accumulator(fabric, wrapped, optimizer, window=2, log=False)
    batches = [(torch.randn(n, 4), torch.full((n, 1), 3.0)) for n in (2, 3)]
    for inputs, target in accumulator([*batches, (1e4 * torch.ones(1, 4), torch.full((1, 1), -1e4)), batches[0]]):
        accumulator.backward(F.mse_loss(wrapped(inputs), target))
        stepped.append(accumulator.step(clip_norm=1.0))
        norms.append(accumulator.gradient_norm)
    assert (stepped, accumulator.optimizer_steps) == ([False, True, False, False], 1)
    inputs, target = (torch.cat(parts) for parts in zip(*batches, strict=True))
    F.mse_loss(reference(inputs), target).backward()
    norm = nn.utils.clip_grad_norm_(reference.parameters(), 1.0)
    assert norms[1].item() == pytest.approx(norm.item(), rel=5e-3)  # float16 has 10 bits
    torch.optim.SGD(reference.parameters(), lr=1.0).step()
    assert error_of_updates(model, reference, start) < 5e-3


Body = Callable[[Accumulator, nn.Module, Any, Tensor], Any]


def run(body: Body, **arguments: Any) -> None:  # a loop with this body
    model = nn.Sequential(scalar(), scalar())
    optimizer = torch.optim.SGD(model.parameters(), 1.0)
    accumulator = Accumulator(None, model, optimizer, log=False, **{"window": 2, **arguments})
    for batch in accumulator([column(1, 2), column(3), column(4), column(5)]):
        body(accumulator, model, optimizer, batch)


def good(accumulator: Accumulator, model: Any, optimizer: Any, batch: Tensor, change: Any = lambda loss: loss) -> Any:
    accumulator.backward(change(model(batch).mean()))
    return accumulator.step()


def ignoring_an_error(accumulator: Accumulator, model: Any, optimizer: Any, batch: Tensor) -> None:
    accumulator.backward(model(batch).mean() if len(batch) == 2 else model(batch).sum())
    with suppress(ValueError):
        accumulator.step()


MISTAKES: dict[str, tuple[Body, str]] = {
    "a failed step is ignored": (ignoring_an_error, "discard"),
    "skipped": (lambda a, m, o, x: None, "backward"),
    "loss.backward": (lambda a, m, o, x: m(x).mean().backward(), "backward"),
    "no step": (lambda a, m, o, x: a.backward(m(x).mean()), "step"),
    "a state before the step": (lambda a, m, o, x: (a.backward(m(x).mean()), x[0] == 3 and a.state_dict(), a.step()), "step"),
    "step first": (lambda a, m, o, x: a.step(), "backward"),
    "step twice": (lambda a, m, o, x: (good(a, m, o, x), a.step()), "twice"),
    "two backwards": (lambda a, m, o, x: (a.backward(m(x).mean()), a.backward(m(x).mean())), "loss_a"),
    "zero_grad": (lambda a, m, o, x: (o.zero_grad(), good(a, m, o, x)), "zero_grad"),
    "zero_grad to zeros": (lambda a, m, o, x: (o.zero_grad(set_to_none=False), good(a, m, o, x)), "zero_grad"),
    "zero_grad of a part": (lambda a, m, o, x: (good(a, m, o, x), m[0].zero_grad()), "zero_grad"),
    "clips": (lambda a, m, o, x: (a.backward(m(x).mean()), nn.utils.clip_grad_norm_(m.parameters(), 0.1), a.step()), "clip"),
    "steps": (lambda a, m, o, x: (a.backward(m(x).mean()), o.step()), "optimizer.step"),
    "another loss": (lambda a, m, o, x: (m[1].weight.square().sum().backward(), good(a, m, o, x)), "backward"),
    "several numbers": (lambda a, m, o, x: a.backward(m(x).squeeze(1)), "number"),
}


@pytest.mark.parametrize(("name", "window"), [*((name, 2) for name in MISTAKES), ("a state before the step", Tokens(3))])
def test_what_is_left_of_the_old_loop_is_an_error_that_names_it(name: str, window: Any) -> None:
    body, named = MISTAKES[name]
    arguments: dict[str, Any] = {"window": window, "check": False}
    with pytest.raises(AccumulationError, match=named) as caught:
        run(lambda a, m, *more: (m[0].weight.data.fill_(1.0), m[1].weight.data.fill_(1.0), body(a, m, *more)), **arguments)
    assert "training_step" not in str(caught.value)


WARNED: dict[str, tuple[int, Body]] = {
    "divided": (2, lambda a, m, o, x: good(a, m, o, x, lambda loss: loss / 2)),
    "multiplied": (2, lambda a, m, o, x: good(a, m, o, x, lambda loss: loss * (1 / 2))),
    "scaled": (2, lambda a, m, o, x: good(a, m, o, x, torch.amp.GradScaler("cpu").scale)),
    "a backward of another loss before a window of one": (1, MISTAKES["another loss"][0]),
}


@pytest.mark.parametrize("name", WARNED)
def test_what_may_be_left_of_the_old_loop_is_warned_of(name: str) -> None:
    window, body = WARNED[name]
    with pytest.warns(AccumulationWarning):
        run(body, window=window)


def test_a_loss_whose_graph_is_kept_has_a_gradient_after_its_backward() -> None:
    def body(accumulator: Accumulator, model: Any, optimizer: Any, batch: Tensor) -> None:
        accumulator.backward(loss := model(batch).mean(), retain_graph=True)
        assert torch.autograd.grad(loss, model[0].weight)[0].numel() == 1  # a freed graph is an error
        accumulator.step()

    run(body, window=2, check=False)


@pytest.mark.parametrize("register", ["register_post_accumulate_grad_hook", "register_hook"])
def test_hooks_of_parameters_that_see_each_micro_batch_are_warned_of(register: str) -> None:
    model = scalar()
    getattr(model.weight, register)(lambda tensor: None)
    with pytest.warns(AccumulationWarning, match="weight"):
        accumulator_of(model, window=2)
    with warned() as messages:
        accumulator_of(model, window=1)
    assert messages == []


class Counted(list):  # says that it has so many batches
    length = 0

    def __len__(self) -> int:
        return self.length


@pytest.mark.parametrize(("length", "why"), [(9, "fewer batches than its length"), (2, "more than the 2 batches of its length")])
def test_a_loader_of_more_or_fewer_batches_than_its_length_is_an_error_and_begins_no_window(length: int, why: str) -> None:
    batches, model = Counted([column(1), column(2), column(3)]), scalar()
    batches.length, accumulator = length, accumulator_of(model, window=2)
    with pytest.raises(AccumulationError, match=why):
        [good(accumulator, model, None, batch) for batch in accumulator(batches)]
    assert model.weight.item() == -1.5


def test_a_backward_that_failed_leaves_no_gradient_that_is_trained_on() -> None:
    model, gradients = scalar(), []
    accumulator = accumulator_of(model, window=2)
    for number, batch in enumerate(accumulator([column(1), column(3), column(4)])):
        loss = model(batch).mean()
        if number == 1:
            loss.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                accumulator.backward(loss)
            with pytest.raises(AccumulationError, match="discard"):
                accumulator.step()
            accumulator.discard()
            loss = None
        accumulator.backward(loss)
        if accumulator.step():
            gradients.append(model.weight.item())
    assert gradients[-1] == -4  # of the window that was dropped there is nothing


def test_a_pass_that_is_broken_off_goes_on_in_the_next() -> None:
    model, weights = scalar(), []
    accumulator = accumulator_of(model, window=3)
    batches = [column(1), column(2, 3), column(4), column(6, 8), column(5)]
    for stop in (1, 3):
        for batch in accumulator(batches, skip=accumulator.loader_batches):
            if accumulator.loader_batches == stop:
                break  # before its backward
            accumulator.backward(model(batch).mean())
            if accumulator.step():
                weights.append(accumulator.window_weight)
    assert (weights, accumulator.loader_batches) == ([4.0], 3)
    assert model.weight.item() == -(1 + 2 + 3 + 4) / 4


@pytest.mark.parametrize(("arguments", "named"), [
    ({"micro_batch": "auto"}, "auto"), ({"micro_batch": "offload"}, "offload"), ({"tail": "keep"}, "tail"),
    ({"window": 0}, "window"), ({"trim_padding": "lengths"}, "micro_batch"),
    ({"trim_padding": "lengths", "micro_batch": 2}, "loss_of"), ({"row_wise": "encoder", "micro_batch": 2}, "encoder"),
])  # fmt: skip
def test_what_a_hand_written_loop_cannot_have_is_refused_by_name(arguments: dict[str, Any], named: str) -> None:
    with pytest.raises(AccumulationError, match=named):
        accumulator_of(scalar(), **arguments)


def test_models_and_optimizers_that_do_not_belong_together_are_refused() -> None:
    model, optimizer = scalar(), torch.optim.SGD
    others = optimizer(scalar().parameters(), 1.0), [], torch.optim.LBFGS(model.parameters())
    for fabric, one in (*((None, other) for other in others), (one_process(), optimizer(model.parameters(), 1.0))):
        with pytest.raises(AccumulationError):
            Accumulator(fabric, model, one)


@pytest.mark.parametrize("is_checked", [False, True])
def test_the_start_line_says_what_was_understood_and_whether_it_was_checked(is_checked: bool, capsys: Any) -> None:
    with nullcontext() if is_checked else pytest.warns(AccumulationWarning, match="loss_of="):
        loop(None, "sgd", in_batches(ROWS, 4), window=2, log=True, **({"loss_of": loss_of} if is_checked else {}))
    out = capsys.readouterr().out
    assert out.startswith("accumulating ")
    assert "2 loader batches" in out
    assert ("loss_of=" in out) is not is_checked
