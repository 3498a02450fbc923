"""A results tree on disk, and a real SQLite store to track it into."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from results_tree import write_dataset, write_training

from dspark.config import TrackingConfig
from dspark.tracking.connection import connect, import_mlflow

PICTURE = b"\x89PNG\r\n\x1a\n of a picture"


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """results/demo with two datasets, to be copied."""
    root = tmp_path_factory.mktemp("built") / "results" / "demo"
    for dataset in ("gsm8k", "humaneval"):
        write_dataset(root, dataset)
    (root / "table.md").write_text("| Dataset | Run | Req |\n| --- | --- | --- |\n")
    (root / "plots").mkdir()
    (root / "plots" / "speedup.png").write_bytes(PICTURE)
    (root / "plots" / "speedup.svg").write_text("<svg/>")
    return root


@pytest.fixture
def results_dir(demo: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """results/demo with two datasets, in a directory that is also the working directory."""
    monkeypatch.chdir(tmp_path)
    return shutil.copytree(demo, tmp_path / "results" / "demo")


@pytest.fixture(scope="session")
def empty_store(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A database without an experiment of ours, to be copied: MLflow takes a second to set one up."""
    path = tmp_path_factory.mktemp("store") / "mlflow.db"
    import_mlflow()
    connect(f"sqlite:///{path}").search_experiments()
    return path


@pytest.fixture
def tracking(empty_store: Path, tmp_path: Path) -> TrackingConfig:
    """The default store: relative to the working directory, in a folder of its own."""
    (tmp_path / "store").mkdir()
    shutil.copyfile(empty_store, tmp_path / "store" / "mlflow.db")
    return TrackingConfig(uri="sqlite:///store/mlflow.db", experiment="dspark")


@pytest.fixture
def training(results_dir: Path) -> Path:
    """A finished training beside the results."""
    return write_training(results_dir.parent / "training" / "mine-1a2b3c4d")
