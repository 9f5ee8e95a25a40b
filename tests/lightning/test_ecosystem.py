"""Lightning's callbacks and tuners beside the strategies, each as without the package."""

from __future__ import annotations

import pytest
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from support import SaveAfter, Scalar, StatefulLoader, ddp, loader, trainer, x

from lightning_accum import GradientAccumulation


def test_gradient_accumulation_scheduler_of_lightning() -> None:
    module = Scalar([x(1), x(2), x(3), x(4)])
    run = trainer(callbacks=[GradientAccumulationScheduler({0: 1, 1: 2})], max_epochs=2)
    estimates = []
    module.on_train_start = lambda: estimates.append(run.estimated_stepping_batches)
    run.fit(module)
    assert module.gradients == [1, 2, 3, 4, 1.5, 3.5]
    assert estimates == [6]


def test_resume_inside_a_window_of_plain_lightning_says_what_is_missing() -> None:
    batches = [x(i) for i in range(1, 9)]
    trainer("auto", accumulate_grad_batches=4, callbacks=[SaveAfter(6)]).fit(Scalar(), StatefulLoader(batches))
    module = Scalar()
    run = trainer(callbacks=[GradientAccumulation(4)])
    with pytest.warns(UserWarning, match="inside a window and does not hold its gradients"):
        run.fit(module, StatefulLoader(batches), ckpt_path="inside.ckpt")
    assert module.gradients == [7.5]


def test_checkpoint_of_plain_lightning_goes_on(tmp_path) -> None:
    batches = [x(i) for i in range(1, 5)]
    run = trainer("auto", accumulate_grad_batches=2)
    run.fit(Scalar(batches))
    run.save_checkpoint(tmp_path / "plain.ckpt")
    counts, module = GradientAccumulation(2), Scalar(batches)
    run = trainer(callbacks=[counts], max_epochs=2)
    run.fit(module, ckpt_path=tmp_path / "plain.ckpt")
    assert module.gradients == [1.5, 3.5]
    assert counts.state_dict()["optimizer_steps"] == run.global_step == 4
    other = Scalar(batches)
    run.save_checkpoint(tmp_path / "ours.ckpt")
    trainer("auto", accumulate_grad_batches=2, max_epochs=3).fit(other, ckpt_path=tmp_path / "ours.ckpt")
    assert other.gradients == [1.5, 3.5]  # equal micro-batches: a mean of means is right


class All(Scalar):
    def loss(self, batch):
        return (self.w - batch).square().mean()

    def validation_step(self, batch, batch_idx) -> None:
        self.log("loss", self.loss(batch), batch_size=len(batch))

    test_step = validation_step

    def predict_step(self, batch, batch_idx):
        return self.w * batch


def test_validate_test_and_predict_with_the_strategies() -> None:
    batches = [x(1), x(2, 3)]
    run, module = trainer(callbacks=[GradientAccumulation(2)]), All(batches, lr=0.1)
    assert run.validate(module, loader(batches), verbose=False)[0]["loss"] == pytest.approx(14 / 3)
    run.fit(module)
    w = module.w.item()
    expected = pytest.approx(sum((w - value) ** 2 for value in (1, 2, 3)) / 3, rel=1e-6)  # Lightning averages in float32
    assert run.validate(module, loader(batches), verbose=False)[0]["loss"] == expected
    assert run.test(module, loader(batches), verbose=False)[0]["loss"] == expected
    assert [found.tolist() for found in run.predict(module, loader(batches))] == [[w], [2 * w, 3 * w]]
    of_one = pytest.approx((w - 1) ** 2, rel=1e-6)
    assert trainer(ddp(), devices=2).validate(module, loader(batches[:1]), verbose=False)[0]["loss"] == of_one


def test_manual_optimization_is_left_alone_without_a_window_and_accumulates_with_one() -> None:
    class Manual(Scalar):
        def __init__(self, batches) -> None:
            super().__init__(batches)
            self.automatic_optimization = False

        def training_step(self, batch, batch_idx) -> None:
            self.optimizers().zero_grad()
            self.manual_backward((self.w * batch).mean())
            self.optimizers().step()

    module = Manual([x(1), x(2)])
    trainer().fit(module)
    assert module.total == 3.0
    module = Manual([x(1), x(2, 6)])
    trainer(callbacks=[GradientAccumulation(2)]).fit(module)
    assert module.total == 3.0  # (1 + 2 + 6) / 3, where steps one by one would come to 1 + 4
