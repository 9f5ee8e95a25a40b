"""The code on the pages of the README and of the documentation site runs, and what they quote is what the package prints."""

import logging
import re
import shlex
from inspect import signature
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from support import command
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from lightning_accum import GradientAccumulation

ROOT = Path(__file__).parents[2]
SITE = ROOT / "notebooks" / "site" / "docs"
pytestmark = pytest.mark.skipif(pl.__name__ == "pytorch_lightning", reason="the pages import the other package")
PAGES = [ROOT / "README.md", *sorted(SITE.rglob("*.md")), ROOT / "CONTRIBUTING.md"]
START = SITE / "index.md"
NOT_RUN = re.compile(r"<!-- not run: [^>]*-->\n+```python\n.*?```", re.DOTALL)


def blocks(page: Path, language: str, text: str | None = None) -> list[str]:  # the blocks of a page, those inside of lists included
    found = re.findall(rf"^( *)```{language}\n(.*?)^ *```", page.read_text() if text is None else text, re.DOTALL | re.MULTILINE)
    return [re.sub(rf"^{indent}", "", block, flags=re.MULTILINE) for indent, block in found]


class Encoded(pl.LightningModule):  # what the pages call ``module``: any module, with a submodule that can run row-wise
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Linear(4, 3)
        self.head = nn.Linear(3, 2)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(inputs))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        inputs, targets = batch
        return F.mse_loss(self(inputs), targets)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def pages_loader() -> DataLoader:
    torch.manual_seed(0)
    return DataLoader(TensorDataset(torch.randn(32, 4), torch.randn(32, 2)), batch_size=4)


@pytest.fixture
def page_names(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What a page may use without having made it. Trainings that set no end are short."""
    for name, value in {"MAX_EPOCHS": 1, "ENABLE_PROGRESS_BAR": False, "ENABLE_MODEL_SUMMARY": False, "ACCELERATOR": "cpu"}.items():
        monkeypatch.setenv(f"PL_TRAINER_{name}", str(value))
    loader, data = pages_loader(), pl.LightningDataModule()
    data.train_dataloader = pages_loader
    modules = {"module": Encoded(), "model": nn.Linear(4, 2), "datamodule": data}
    return {**modules, "loader": loader, "dataset": loader.dataset, "__name__": "page"}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("page", [page for page in PAGES if page != START], ids=lambda page: str(page.relative_to(ROOT)))
def test_code_of_a_page_runs_from_top_to_bottom(page: Path, page_names: dict[str, Any]) -> None:
    text = page.read_text(encoding="utf-8")
    for block in blocks(page, "python", NOT_RUN.sub("", text)):
        exec(compile(block, str(page), "exec"), page_names)
    for part in NOT_RUN.findall(text):
        for block in blocks(page, "python", part):
            compile(block, str(page), "exec")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_of_a_page_exist(page: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    text = page.read_text(encoding="utf-8")
    lines = [line for block in blocks(page, "bash") for line in block.splitlines()] + re.findall(
        r"`((?:python|lightning-accum) [^`]+)`", text
    )
    for line in lines:
        words = shlex.split(line, comments=True)
        if words[:1] == ["lightning-accum"] and words[1:2] != ["verify"]:
            assert command(monkeypatch, *words[1:], "--help") == 0
        for word in words:
            if re.match(r"(tests|notebooks|\.ci)/[\w/.]+$", word):
                assert (ROOT / word).exists() or word.endswith(".png"), line


@pytest.mark.filterwarnings("ignore")
def test_the_start_page_runs_and_quotes_the_line_that_it_prints(page_names: dict[str, Any], caplog: Any, monkeypatch: Any) -> None:
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    for package in ("lightning.pytorch", "pytorch_lightning"):  # whichever was imported first logs for both
        caplog.set_level(logging.INFO, logger=f"{package}.utilities.rank_zero")
        monkeypatch.setattr(logging.getLogger(f"{package}.utilities.rank_zero"), "handlers", [handler])
    for block in blocks(START, "python"):
        exec(compile(block, str(START), "exec"), page_names)
    (quoted,) = blocks(START, "text")
    (printed,) = [line for line in lines if line.startswith("accumulating ")]
    without_rounding = [re.sub(r"\d(\.\d)?e-\d+", "...", " ".join(text.split())) for text in (printed, quoted)]
    assert without_rounding[0] == without_rounding[1]


def test_messages_of_the_troubleshooting_page_are_those_of_the_package() -> None:
    headings = re.findall(r"^### `(.*)`$", (SITE / "troubleshooting.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert len(headings) > 19
    known = (ROOT / "tests" / "messages.txt").read_text(encoding="utf-8").splitlines()
    of_others = {"You selected an invalid strategy name", "GradientAccumulation.__init__() got an unexpected keyword argument …"}
    for heading in set(headings) - of_others:
        assert any(all(part in literal for part in re.split(r"\s*…\s*", heading)) for literal in known), heading


def test_the_argument_table_lists_all_arguments() -> None:
    table = re.findall(r"^\| `(\w+)` \|", (SITE / "reference" / "arguments.md").read_text(encoding="utf-8"), re.MULTILINE)
    assert sorted(table) == sorted(set(signature(GradientAccumulation).parameters))
