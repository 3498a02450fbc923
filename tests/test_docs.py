"""The pages that describe files and fields say what the code says."""

from __future__ import annotations

import re
import runpy
from collections.abc import Iterable
from dataclasses import fields
from pathlib import Path

import pytest
import torch

from dspark.config import DrafterShape
from dspark.data.prompts import Prompt
from dspark.decode.environment import describe
from dspark.metrics.cell import CellSummary
from dspark.metrics.records_io import SCHEMA
from dspark.models.calibration import Calibration
from dspark.models.checkpoint import load_drafter, save_drafter
from dspark.models.prepare import PreparedModel
from dspark.models.speculators import SAME
from dspark.models.target import load_target
from dspark.train.start import new_drafter
from tiny_models import save_tiny_target

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
FORMATS = (DOCS / "formats.md").read_text()
LINKS = [*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "results" / "README.md"]


def names(kind: type) -> set[str]:
    return {field.name for field in fields(kind)}


def section(title: str) -> str:
    found = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", FORMATS, re.M | re.S)
    assert found, title
    return found[1]


def first_cells(text: str) -> list[str]:
    """What stands in backquotes in the first cell of a table's rows."""
    rows = re.findall(r"^\| (`[^|]*) \|", text, re.M)
    return [name for row in rows for name in re.findall(r"`([^`]+)`", row)]


def test_the_page_of_all_fields_is_what_the_configs_say() -> None:
    """Run `python docs/configs.py` when this fails."""
    written = runpy.run_path(str(DOCS / "configs.py"))["page"]()
    assert (DOCS / "configs.md").read_text() == written


def test_every_field_is_explained() -> None:
    rows = re.findall(r"^\| `.*$", (DOCS / "configs.md").read_text(), re.M)
    assert "| `concurrency` | whole number | `4` | closed loop: requests in flight |" in rows
    assert [row for row in rows if re.search(r"\| *\|$", row)] == []


@pytest.mark.parametrize(
    ("title", "code"),
    [
        ("prompts.jsonl", names(Prompt)),
        ("requests.parquet", set(SCHEMA.names)),
        ("summary.json", names(CellSummary)),
        ("target.json and drafter.json", names(PreparedModel)),
        ("calibration.json", names(Calibration)),
        ("environment.json", set(describe("cpu", ""))),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_a_file_has_the_fields_that_its_table_names(title: str, code: Iterable[str]) -> None:
    told = first_cells(section(title))
    assert sorted(told) == sorted(set(told)), "a field stands there twice"
    assert set(told) == set(code)


def test_a_checkpoint_has_the_tensors_that_its_table_names(tmp_path: Path) -> None:
    target = load_target(save_tiny_target(tmp_path / "target", layers=4), "cpu", torch.float32)
    shape = DrafterShape(layers=1, taps=2, block_size=4)
    save_drafter(new_drafter(shape, target, 0, torch.arange(5, 205)), tmp_path / "drafter")
    told = [
        name
        for name in first_cells(section("Drafter checkpoints"))
        if ".weight" in name or ".bias" in name or name in ("d2t", "layers.<n>.*")
    ]
    stored = load_drafter(tmp_path / "drafter", target).state_dict()
    assert {re.sub(r"^layers\.\d+\..*", "layers.<n>.*", name) for name in stored} == set(told)


def test_both_checkpoint_formats_share_the_fields_that_are_named() -> None:
    (row,) = re.findall(r"^\| both \| (.*?) \|", FORMATS, re.M)
    assert set(re.findall(r"`(\w+)`", row)) == set(SAME) - {"draft_vocab_size"}


@pytest.mark.parametrize("page", LINKS, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
        assert "://" in link or (page.parent / link).exists(), link
