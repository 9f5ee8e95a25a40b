"""A snapshot takes back all that a failed attempt at a batch changed, in the objects that held it."""

from __future__ import annotations

import random
from collections import Counter, OrderedDict, defaultdict, deque

import numpy as np
import pytest
import torch
from torch import nn
from torchmetrics import CatMetric, MeanMetric, MetricCollection
from torchmetrics.classification import BinaryPrecision, BinaryRecall

from lightning_accum.splitting.snapshot import StateSnapshotter

CPU = torch.device("cpu")


class Holder(nn.Module):
    """A user's module: attributes of its own over one layer."""

    def __init__(self, **attributes):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        for name, value in attributes.items():
            setattr(self, name, value)


def take(module, gradients_of=None):
    return StateSnapshotter(module, CPU).take(gradients_of)


# --- random state ---------------------------------------------------------------------------------------------------------


def test_dropout_draws_the_same_mask_again():
    module = nn.Dropout(0.5)
    snapshot = take(module)
    first = module(torch.ones(1000))
    assert not torch.equal(module(torch.ones(1000)), first)
    snapshot.restore()
    assert torch.equal(module(torch.ones(1000)), first)


def test_python_and_numpy_draw_the_same_numbers_again():
    snapshot = take(Holder())
    first = random.random(), np.random.rand(), np.random.standard_normal()
    for _ in range(2):
        snapshot.restore()
        assert (random.random(), np.random.rand(), np.random.standard_normal()) == first


def test_generators_that_a_module_has_draw_the_same_numbers_again():
    module = Holder(
        torch_generator=torch.Generator().manual_seed(1),
        numpy_generator=np.random.default_rng(2),
        old_numpy_generator=np.random.RandomState(3),
        python_generator=random.Random(4),
    )
    before = dict(vars(module))

    def draw():
        torch_number = torch.rand((), generator=module.torch_generator).item()
        return torch_number, module.numpy_generator.random(), module.old_numpy_generator.rand(), module.python_generator.random()

    snapshot = take(module)
    first = draw()
    assert draw() != first
    snapshot.restore()
    assert draw() == first
    assert all(vars(module)[name] is value for name, value in before.items())


# --- buffers --------------------------------------------------------------------------------------------------------------


def test_batch_norm_statistics_are_put_back_in_place():
    module = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4))
    buffers = dict(module.named_buffers())
    before = {name: buffer.clone() for name, buffer in buffers.items()}
    snapshot = take(module)
    module(torch.randn(8, 3))
    assert all(not torch.equal(buffers[name], before[name]) for name in before)
    snapshot.restore()
    for name, buffer in module.named_buffers():
        assert buffer is buffers[name]
        assert torch.equal(buffer, before[name])


def test_replaced_and_non_persistent_and_new_and_deleted_buffers():
    module = Holder()
    module.register_buffer("replaced", torch.tensor([1.0]))
    module.register_buffer("hidden", torch.tensor([2.0]), persistent=False)
    module.register_buffer("deleted", torch.tensor([3.0]))
    module.register_buffer("empty", None)
    held = dict(module._buffers)
    snapshot = take(module)
    module.replaced.mul_(5)
    module.replaced = torch.tensor([9.0])
    module.hidden.add_(1)
    module.empty = torch.tensor(1.0)
    del module.deleted
    module.register_buffer("new", torch.tensor([4.0]))
    module.layer.register_buffer("new_in_a_layer", torch.tensor([4.0]))
    snapshot.restore()
    assert list(module._buffers) == ["replaced", "hidden", "empty", "deleted"]
    assert all(module._buffers[name] is held[name] for name in held)
    assert (module.replaced.item(), module.hidden.item(), module.deleted.item(), module.empty) == (1.0, 2.0, 3.0, None)
    assert not module.layer._buffers


def test_a_buffer_of_another_shape_gets_its_own_back():
    module = Holder()
    module.register_buffer("queue", torch.tensor([1.0, 2.0]))
    queue = module.queue
    snapshot = take(module)
    module.queue.data = torch.zeros(5)
    snapshot.restore()
    assert module.queue is queue
    assert queue.tolist() == [1.0, 2.0]


def test_expanded_and_sparse_and_boolean_buffers():
    module = Holder()
    module.register_buffer("expanded", torch.tensor([[1.0]]).expand(3, 2))
    module.register_buffer("sparse", torch.eye(3).to_sparse())
    module.register_buffer("mask", torch.tensor([True, False]))
    snapshot = take(module)
    module.sparse.mul_(2)
    module.mask.logical_not_()
    snapshot.restore()
    assert torch.equal(module.expanded, torch.ones(3, 2))
    assert torch.equal(module.sparse.to_dense(), torch.eye(3))
    assert module.mask.tolist() == [True, False]


def test_scripted_modules_get_their_buffers_back():
    module = nn.Sequential(nn.Linear(2, 2), torch.jit.script(nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))))
    snapshot = take(module)
    module(torch.randn(4, 2) + 1)
    assert module[1][1].running_mean.abs().sum() > 0
    snapshot.restore()
    assert module[1][1].running_mean.tolist() == [0.0, 0.0]
    assert module[1][1].num_batches_tracked.item() == 0


def test_a_graph_that_needs_a_buffer_does_not_mind():
    module = Holder()
    module.register_buffer("scale", torch.tensor([2.0]))
    weight = torch.tensor([3.0], requires_grad=True)
    product = weight * module.scale
    snapshot = take(module)
    snapshot.restore()
    product.backward()
    assert weight.grad.item() == 2.0


# --- metrics --------------------------------------------------------------------------------------------------------------


def test_a_mean_metric_counts_a_batch_once():
    module = Holder(mean=MeanMetric())
    module.mean.update(torch.tensor([1.0, 3.0]))
    snapshot = take(module)
    for _ in range(3):
        snapshot.restore()
        module.mean(torch.tensor([6.0, 6.0]))
    assert module.mean.compute().item() == 4.0  # (1 + 3 + 6 + 6) / 4
    assert module.mean._update_count == 2


def test_a_computed_value_is_forgotten_with_the_update_it_came_from():
    module = Holder(mean=MeanMetric())
    module.mean.update(1.0)
    snapshot = take(module)
    module.mean.update(3.0)
    assert module.mean.compute().item() == 2.0
    snapshot.restore()
    assert module.mean._computed is None
    assert module.mean.compute().item() == 1.0


def test_a_metric_of_lists_keeps_its_list():
    module = Holder(cat=CatMetric())
    module.cat.update(torch.tensor([1.0]))
    values = module.cat.value
    snapshot = take(module)
    module.cat.update(torch.tensor([2.0]))
    snapshot.restore()
    assert module.cat.value is values
    module.cat.update(torch.tensor([3.0]))
    assert module.cat.compute().tolist() == [1.0, 3.0]


def test_a_collection_with_shared_states_counts_a_batch_once():
    module = Holder(metrics=MetricCollection([BinaryPrecision(), BinaryRecall()]))
    predictions, targets = torch.tensor([1, 1, 0, 1]), torch.tensor([1, 0, 1, 1])
    alone = MetricCollection([BinaryPrecision(), BinaryRecall()], compute_groups=False)
    alone.update(predictions, targets)
    alone.update(targets, targets)
    snapshot = take(module)  # before the first update, which merges the groups
    module.metrics.update(1 - predictions, targets)
    snapshot.restore()
    module.metrics.update(predictions, targets)
    snapshot = take(module)
    module.metrics.update(1 - predictions, targets)
    snapshot.restore()
    module.metrics.update(targets, targets)
    for name, value in alone.compute().items():
        assert torch.equal(module.metrics.compute()[name], value)


def test_values_made_in_inference_mode_come_back():
    module = Holder()
    with torch.inference_mode():
        module.last = torch.tensor(2.0)
        module.register_buffer("statistic", torch.tensor(3.0))
    snapshot = take(module)
    module.last = module.last + 1
    module.statistic = module.statistic + 1
    snapshot.restore()
    assert (module.last.item(), module.statistic.item()) == (2.0, 3.0)


# --- attributes -----------------------------------------------------------------------------------------------------------


class Table(OrderedDict):
    """Like the outputs of Hugging Face's models, which forbid to be updated."""

    def update(self, *args, **kwargs):
        raise TypeError


def test_containers_are_put_back_in_place():
    ordered = OrderedDict([("b", 1), ("a", 2)])
    attributes = {
        "history": [1, 2],
        "totals": {"loss": 1.5},
        "counts": Counter("aab"),
        "seen": {1, 2},
        "recent": deque([1, 2, 3], maxlen=3),
        "bytes": bytearray(b"ab"),
        "per_class": defaultdict(list, {0: [1]}),
        "nested": [[1], {"a": 1}],
        "ordered": ordered,
        "table": Table(logits=1),
    }
    module = Holder(**attributes)
    first_class, inner_list, inner_dict = module.per_class[0], module.nested[0], module.nested[1]
    snapshot = take(module)
    module.history.append(3)
    module.totals["loss"] += 1
    module.totals["new"] = 0.0
    module.counts.update("abc")
    module.seen.add(3)
    module.recent.append(4)
    module.bytes.extend(b"c")
    module.per_class[0].append(2)
    module.per_class[1].append(2)
    module.nested[0].append(2)
    module.nested[1]["a"] = 2
    module.nested.pop()
    del module.ordered["b"]
    module.table["logits"] = 2
    snapshot.restore()
    assert all(getattr(module, name) is value for name, value in attributes.items())
    assert module.history == [1, 2]
    assert module.totals == {"loss": 1.5}
    assert module.counts == Counter(a=2, b=1)
    assert module.seen == {1, 2}
    assert list(module.recent) == [1, 2, 3]
    assert module.bytes == b"ab"
    assert module.per_class == {0: [1]}
    assert module.per_class[0] is first_class
    assert module.nested == [[1], {"a": 1}]
    assert module.nested[0] is inner_list
    assert module.nested[1] is inner_dict
    assert list(ordered) == ["b", "a"]
    assert dict(module.table) == {"logits": 1}


def test_plain_values_new_and_deleted_attributes():
    config = object()
    module = Holder(step=1, name="a", hidden=(1, 2), config=config, deleted=5)
    snapshot = take(module)
    module.step, module.name, module.hidden, module.config = 2, "b", (3,), None
    module.new = [1]
    del module.deleted
    snapshot.restore()
    assert (module.step, module.name, module.hidden, module.config, module.deleted) == (1, "a", (1, 2), config, 5)
    assert not hasattr(module, "new")


def test_tensors_and_arrays_are_put_back_in_place():
    ema, hidden, array, total = torch.tensor([1.0]), torch.tensor([2.0]), np.array([3.0]), torch.tensor(4.0)
    module = Holder(ema=ema, hidden=hidden, array=array, totals={"loss": total})
    snapshot = take(module)
    module.ema.mul_(2)
    module.hidden = module.hidden + 1
    module.array += 1
    module.totals["loss"] += 1
    snapshot.restore()
    assert module.ema is ema
    assert module.hidden is hidden
    assert module.array is array
    assert module.totals["loss"] is total
    assert (ema.item(), hidden.item(), array.item(), total.item()) == (1.0, 2.0, 3.0, 4.0)


def test_a_snapshot_holds_no_graph():
    weight = torch.ones(1, requires_grad=True)
    module = Holder(hidden=weight * 2)
    snapshot = take(module)
    copies = [saved for _, target, saved in snapshot.kept if target is module.hidden]
    assert [copy.requires_grad for copy in copies] == [False]


def test_attributes_of_a_layer_that_derives_from_a_user_s_and_a_torch_class():
    class Counting(nn.Linear):
        calls = 0

        def forward(self, rows):
            self.calls += 1
            return super().forward(rows)

    module = nn.Sequential(Counting(2, 2))
    wrapped = type("Wrapped", (Counting,), {"__module__": "torch.distributed"})(2, 2)
    module.append(wrapped)
    snapshot = take(module)
    module(torch.ones(1, 2))
    snapshot.restore()
    assert (module[0].calls, wrapped.calls) == (0, 0)


def test_modules_that_are_new_go_and_modules_that_were_replaced_come_back():
    module = Holder(mean=MeanMetric(), others=nn.ModuleList())
    mean = module.mean
    snapshot = take(module)
    module.mean = MeanMetric()
    module.late = MeanMetric()
    module.others.append(nn.Linear(1, 1))
    snapshot.restore()
    assert module.mean is mean
    assert not hasattr(module, "late")
    assert len(module.others) == 0


def test_a_module_that_was_replaced_between_batches_is_found():
    module = Holder(mean=MeanMetric())
    snapshotter = StateSnapshotter(module, CPU)
    snapshotter.take()
    module.mean = MeanMetric()
    snapshot = snapshotter.take()
    module.mean.update(3.0)
    snapshot.restore()
    assert module.mean._update_count == 0


def test_training_mode_is_put_back():
    module = nn.Sequential(nn.Linear(2, 2), nn.Dropout())
    module[0].eval()
    snapshot = take(module)
    module.eval()
    module[0].train()
    snapshot.restore()
    assert [layer.training for layer in (module, module[0], module[1])] == [True, False, True]


# --- gradients ------------------------------------------------------------------------------------------------------------


def test_dense_and_missing_gradients_are_put_back():
    module = nn.Linear(2, 1)
    module.weight.grad = torch.tensor([[1.0, 2.0]])
    held = module.weight.grad
    snapshot = take(module, module.parameters())
    module(torch.ones(3, 2)).sum().backward()
    snapshot.restore()
    assert module.weight.grad is held
    assert held.tolist() == [[1.0, 2.0]]
    assert module.bias.grad is None


def test_a_gradient_that_became_a_view_of_a_bucket_stays_one():
    module = nn.Linear(2, 1, bias=False)
    module.weight.grad = torch.tensor([[1.0, 2.0]])
    snapshot = take(module, module.parameters())
    bucket = torch.zeros(8)
    module.weight.grad = bucket[2:4].view(1, 2)
    view = module.weight.grad
    snapshot.restore()
    assert module.weight.grad is view
    assert bucket.tolist() == [0, 0, 1, 2, 0, 0, 0, 0]


def test_a_gradient_that_was_cleared_comes_back_as_the_same_tensor():
    module = nn.Linear(2, 1, bias=False)
    module.weight.grad = torch.tensor([[1.0, 2.0]])
    held = module.weight.grad
    snapshot = take(module, module.parameters())
    held.zero_()
    module.weight.grad = None
    snapshot.restore()
    assert module.weight.grad is held
    assert held.tolist() == [[1.0, 2.0]]


def test_sparse_gradients_are_put_back_every_time():
    module = nn.Embedding(4, 1, sparse=True)
    module(torch.tensor([1])).sum().backward()
    snapshot = take(module, module.parameters())
    for _ in range(2):
        module(torch.tensor([2, 3])).sum().backward()
        snapshot.restore()
        gradient = module.weight.grad.coalesce()
        assert gradient.indices().tolist() == [[1]]
        assert gradient.values().tolist() == [[1.0]]


def test_gradients_that_are_not_given_are_left_alone():
    module = nn.Linear(2, 1)
    snapshot = take(module)
    module(torch.ones(1, 2)).sum().backward()
    snapshot.restore()
    assert module.weight.grad.tolist() == [[1.0, 1.0]]


# --- what is watched ------------------------------------------------------------------------------------------------------


def test_a_parameter_changed_in_place_is_named():
    module = nn.Module()
    module.student, module.teacher = nn.Linear(1, 1), nn.Linear(1, 1).requires_grad_(False)
    snapshot = take(module)
    with torch.no_grad():
        module.teacher.weight.lerp_(module.student.weight, 0.1)
    with pytest.raises(RuntimeError, match=r"training_step changed the parameter 'teacher\.weight' in place; micro_batch=\"auto\""):
        snapshot.restore()


def test_parameters_are_not_copied():
    module = Holder()
    module.by_name = dict(module.layer.named_parameters())
    module.listed = list(module.layer.parameters())
    snapshot = take(module)
    storages = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    assert not [saved for _, target, saved in snapshot.kept if isinstance(target, nn.Parameter)]
    assert {tensor.untyped_storage().data_ptr() for tensors, _, _ in snapshot.watched for tensor in tensors} == storages


def test_a_tensor_in_a_list_changed_in_place_is_named():
    module = nn.Sequential(Holder(history=[torch.zeros(1)]))
    snapshot = take(module)
    module[0].history[0].add_(1)
    with pytest.raises(RuntimeError, match=r"a tensor in '0\.history' in place, which cannot be undone"):
        snapshot.restore()


def test_a_tensor_in_a_list_that_is_a_buffer_is_taken_back():
    module = nn.Sequential(Holder(), nn.BatchNorm1d(2))
    module[0].statistics = [module[1].num_batches_tracked]
    snapshot = take(module)
    module[1].num_batches_tracked.add_(1)
    snapshot.restore()
    assert module[1].num_batches_tracked.item() == 0


def test_large_tensors_are_not_copied(monkeypatch):
    monkeypatch.setattr("lightning_accum.splitting.snapshot._MOST_ELEMENTS", 10)
    module = Holder(data=torch.zeros(11), array=np.zeros(11))
    snapshot = take(module)
    copies = [saved for _, target, saved in snapshot.kept if target is module.data or target is module.array]
    assert copies == [None]
    snapshot.restore()
    module.data.add_(1)
    with pytest.raises(RuntimeError, match="a tensor in 'data'"):
        snapshot.restore()


def test_parameters_made_in_inference_mode_are_no_obstacle():
    with torch.inference_mode():
        frozen = nn.Linear(1, 1).requires_grad_(False)
    module = nn.Sequential(nn.Linear(1, 1), frozen)
    before = frozen.weight.clone()
    take(module).restore()
    assert torch.equal(frozen.weight, before)


# --- several snapshots ----------------------------------------------------------------------------------------------------


def test_a_snapshot_restores_as_often_as_needed():
    module = nn.BatchNorm1d(2)
    snapshot = take(module)
    for _ in range(3):
        module(torch.randn(4, 2) + 5)
        snapshot.restore()
        assert module.running_mean.tolist() == [0.0, 0.0]


def test_a_snapshot_survives_the_next_one():
    module = nn.BatchNorm1d(1, momentum=1.0)
    snapshotter = StateSnapshotter(module, CPU)
    first = snapshotter.take()
    module(torch.tensor([[1.0], [3.0]]))
    second = snapshotter.take()
    module(torch.tensor([[5.0], [7.0]]))
    second.restore()
    assert module.running_mean.item() == 2.0
    first.restore()
    assert module.running_mean.item() == 0.0


def test_an_attempt_that_failed_leaves_the_step_as_it_would_have_been():
    """Dropout, batch norm, a metric and accumulated gradients together, against a run that never failed."""

    def run(fails):
        torch.manual_seed(0)
        module = Holder(mean=MeanMetric(), losses=[])
        module.net = nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Dropout(0.5), nn.Linear(8, 1)).double()
        snapshotter = StateSnapshotter(module, CPU)

        def attempt(rows):
            loss = module.net(rows).square().mean()
            loss.backward()
            module.mean.update(loss.detach())
            module.losses.append(loss.item())

        for rows in torch.randn(3, 16, 4, dtype=torch.float64):
            snapshot = snapshotter.take(module.parameters())
            for _ in range(fails):
                attempt(rows[:8])
                attempt(rows[8:])
                snapshot.restore()
            attempt(rows)
        numbers = [*(p.grad for p in module.net.parameters()), *module.net.buffers(), module.mean.compute()]
        return numbers, module.losses

    never, losses = run(fails=0)
    often, same_losses = run(fails=2)
    assert losses == same_losses
    assert all(torch.equal(a, b) for a, b in zip(never, often, strict=True))
