"""A results tree on disk, and a real SQLite store to track it into."""

from __future__ import annotations

from pathlib import Path

import pytest
from results_tree import write_dataset, write_training

from dspark.config import TrackingConfig


@pytest.fixture
def results_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """results/demo with two datasets, in a directory that is also the working directory."""
    monkeypatch.chdir(tmp_path)
    root = tmp_path / "results" / "demo"
    for dataset in ("gsm8k", "humaneval"):
        write_dataset(root, dataset)
    (root / "table.md").write_text("| Dataset | Run | Req |\n| --- | --- | --- |\n")
    (root / "plots").mkdir()
    (root / "plots" / "speedup.svg").write_text("<svg/>")
    return root


@pytest.fixture
def tracking() -> TrackingConfig:
    """The default store: relative to the working directory, in a folder of its own."""
    return TrackingConfig(uri="sqlite:///store/mlflow.db", experiment="dspark")


@pytest.fixture
def training(results_dir: Path) -> Path:
    """A finished training beside the results."""
    return write_training(results_dir.parent / "training" / "mine-1a2b3c4d")
