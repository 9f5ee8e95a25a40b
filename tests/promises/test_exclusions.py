"""What excludes what: each row of the guide's table is an error before training."""

import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from sharded import ForkedFSDP2, ShardedLanguage, fsdp1, fsdp2, needs_sharding_on_cpu
from support import OnCPU, Scalar, ddp, trainer, x
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from lightning_accum import AccumulationError, GradientAccumulation, SampleCount, Tokens

GUIDE = Path(__file__).parents[2] / "notebooks" / "site" / "docs" / "reference" / "exclusions.md"
LINES = [line.strip("| ").split(" | ") for line in GUIDE.read_text(encoding="utf-8").splitlines() if line.startswith("| ")][2:]
ROWS = [(what, no) for asked, excluded in LINES for what in asked.split("; ") for no in excluded.split("; ")]
EACH = [SampleCount(), SampleCount()]
MANUAL = {"automatic_optimization": False}


class Drawing(Scalar):
    def training_step(self, dataloader_iter: Any) -> Tensor:  # type: ignore[override]
        return self.loss(next(dataloader_iter)[0])


class Layered(Scalar):  # with a layer that is never called
    def __init__(self, layer: nn.Module) -> None:
        super().__init__([x(1.0), x(2.0)])
        self.layer = layer


Newton = type("Newton", (Scalar,), {"configure_optimizers": lambda self: torch.optim.LBFGS(self.parameters())})
Unsharded = type("Unsharded", (Scalar,), {"configure_model": lambda self: None})


class Synced(Scalar):
    def configure_optimizers(self) -> Any:
        self.layer = nn.SyncBatchNorm(2)  # only now: DistributedDataParallel refuses it on a CPU when it wraps the module
        return super().configure_optimizers()


def fit(module: Any = None, strategy: Callable[[], Any] = lambda: "accum", devices: int = 1, **policy: Any) -> Callable[[], None]:
    """Trains with a policy."""

    def run() -> None:
        callback = GradientAccumulation(**{key: value for key, value in policy.items() if key not in MANUAL})
        trained = Scalar([x(1.0), x(2.0)]) if module is None else module
        trained.automatic_optimization = policy.get("automatic_optimization", True)
        trainer(strategy(), devices=devices, callbacks=[callback]).fit(trained)

    return run


static, reducing = partial(ddp, static_graph=True), partial(ddp, sync="micro_batch")
in_parts = partial(ForkedFSDP2, mesh={"context_parallel": 2})
narrow = {"accumulate_dtype": torch.float64, "module": Layered(nn.Linear(1, 1))}
CASES: list[Callable[[], Any]] = [
    lambda: GradientAccumulation(trim_padding="lengths"),
    lambda: GradientAccumulation(micro_batch="offload", trim_padding="mask"),
    fit(weight=EACH, window=2, tail="carry"),
    fit(Drawing([x(1.0)]), weight=EACH),
    fit(Newton([x(1.0)]), window=2),
    fit(Newton([x(1.0)]), on_nonfinite="skip"),
    fit(Newton([x(1.0)]), ddp, 2, **MANUAL),
    fit(window=Tokens(4), **MANUAL),
    fit(micro_batch=2, **MANUAL),
    fit(weight=EACH, **MANUAL),
    fit(accumulate_dtype=torch.float64, **MANUAL),
    fit(on_nonfinite="skip", **MANUAL),
    fit(ShardedLanguage(), fsdp2, 2, row_wise="net", **{**MANUAL, "micro_batch": 2}),
    fit(Layered(nn.Embedding(3, 2, sparse=True)), accumulate_dtype=torch.float64),
    fit(strategy=reducing, **narrow),
    fit(strategy=partial(OnCPU, ddp_comm_hook=allreduce_hook), **narrow),
    fit(ShardedLanguage(), fsdp1, 2, accumulate_dtype=torch.float64),
    fit(ShardedLanguage(), fsdp1, 2, on_nonfinite="skip"),
    fit(strategy=reducing, on_nonfinite="raise"),
    fit(strategy=static, on_nonfinite="raise"),
    fit(Layered(nn.Linear(1, 1)), static, row_wise="layer", micro_batch=2),
    fit(ShardedLanguage(), fsdp1, 2, row_wise="net", micro_batch=2),
    fit(ShardedLanguage(), partial(fsdp2, sync="micro_batch"), 2, row_wise="net", micro_batch=2),
    lambda: GradientAccumulation(micro_batch="auto", row_wise="layer"),
    fit(strategy=static, window=Tokens(4)),
    fit(strategy=reducing, micro_batch="auto"),
    fit(strategy=static, micro_batch=Tokens(4)),
    fit(Synced([x(1.0)]), ddp, micro_batch="auto"),
    fit(ShardedLanguage(), fsdp1, 2, micro_batch="auto"),
    fit(Unsharded([x(1.0)]), in_parts, 2, micro_batch=2),
    fit(Unsharded([x(1.0)]), in_parts, 2, weight=SampleCount()),
    fit(Unsharded([x(1.0)]), in_parts, 2, on_nonfinite="skip"),
]


SHARDED = ("sharded modules", "`strategy=", "`context_parallel`")


@pytest.mark.parametrize(
    ("what", "case"),
    [pytest.param(what, case, id=f"{what} and {no}", marks=[needs_sharding_on_cpu] * no.startswith(SHARDED))
     for (what, no), case in zip(ROWS, CASES, strict=True)],
)  # fmt: skip
def test_each_row_of_the_guide_is_an_error_before_training_that_names_what_is_asked_for(what: str, case: Callable[[], Any]) -> None:
    with pytest.raises(Exception) as raised:  # noqa: PT011  # over ranks Lightning raises another one, with the text of theirs
        case()
    assert isinstance(raised.value, AccumulationError) or "MisconfiguredError" in str(raised.value)
    assert any(name in str(raised.value) for name in re.findall(r"`(\w+)|a (weight)|(LBFGS)", what) for name in name if name)
