"""The script that trains modules of other packages: what it measures and what it calls silently wrong. It installs nothing here."""

from collections.abc import Callable
from functools import partial

import pytest
import torch
from support import Toy
from third_party import PACKAGES, PAGE, ROOT, is_silently_wrong, table
from third_party_modules import Case
from third_party_modules.training import examined
from torch import Tensor, nn
from torch.nn import functional as F

ROWS = [
    {"x": torch.randn(4, generator=torch.Generator().manual_seed(row)), "y": torch.tensor(row % 5 - 1 if row % 5 else -100)}
    for row in range(24)
]


def classifier(loss: Callable[..., Tensor] = F.cross_entropy, *layers: nn.Module) -> Toy:
    net = partial(nn.Sequential, nn.Linear(4, 6), *layers, nn.Linear(6, 4))
    return Toy(lambda net, batch: loss(net(batch["x"]), batch["y"]), net=net).float()


def test_a_module_whose_loss_is_a_mean_over_rows_is_exact_and_lightnings_own_is_not() -> None:
    row = examined(Case("", classifier, ROWS), "lightning")
    assert row["said"] == {"windows": "", "split": ""}
    assert max(row["deviations"]["windows"], row["deviations"]["split"]) < 1e-12 < 1e-3 < row["deviations"]["lightning"]


def test_what_the_package_says_is_quoted() -> None:
    row = examined(Case("", lambda: classifier(F.cross_entropy, nn.BatchNorm1d(6)), ROWS), "lightning")
    assert row["said"]["windows"].startswith("warned: BatchNorm (net.1) normalises each micro-batch")
    assert row["deviations"]["windows"] > 1e-3
    row = examined(Case("", lambda: classifier(lambda logits, y: logits.square().mean(0).sqrt().mean()), ROWS), "lightning")
    assert row["said"]["windows"].startswith("refused: ")
    assert set(row["deviations"]) == {"lightning"}


@pytest.mark.parametrize(
    ("deviation", "said", "is_wrong"),
    [(1e-16, "", False), (1e-8, "", True), (float("nan"), "", True), (0.1, "warned: BatchNorm", False)],
)
def test_silently_wrong_is_what_deviates_without_a_word(deviation: float, said: str, is_wrong: bool) -> None:
    row = {"deviations": {"windows": deviation, "split": 0.0, "lightning": 0.1}, "said": {"windows": said, "split": ""}}
    assert is_silently_wrong(row) == is_wrong


def test_the_page_has_a_row_for_each_module_of_each_package() -> None:
    page = PAGE.read_text()
    assert table([]) in page
    assert "silently wrong**" not in page
    for name, package in PACKAGES.items():
        assert any(line.startswith(f"| {name} ") and f", `{package.imports}` |" in line for line in page.splitlines())
    assert len(PACKAGES) >= 10
    assert {package.imports for package in PACKAGES.values()} == {"lightning", "pytorch_lightning"}
    assert str(PAGE.relative_to(ROOT)) in (ROOT / "README.md").read_text()
