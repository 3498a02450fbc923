"""A Hugging Face cache and a hub of our own, for the library's real code to work on."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf

import fake_hub
from dspark.config import DatasetConfig

REPO_ROOT = Path(__file__).parents[2]
SHARED = REPO_ROOT.parent / "shared" / "datasets"

FillCache = Callable[[str, str, str, bytes], None]


@pytest.fixture
def fill_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> FillCache:
    """Put files into an offline cache laid out as the hub's client lays it out."""
    root = tmp_path / "hub"
    # The client reads the environment when it is imported; these are what it reads it into.
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(root))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)

    def fill(repo: str, revision: str, file: str, content: bytes) -> None:
        fake_hub.fill_cache(root, repo, {file: content}, revision, "datasets")

    return fill


@pytest.fixture
def shared() -> Path:
    """The folder of the published prompt sets; they are third-party data and not in the repo."""
    if not SHARED.is_dir():
        pytest.skip(f"the published prompt sets are not at {SHARED}")
    return SHARED


@pytest.fixture
def dataset_config() -> Callable[..., DatasetConfig]:
    """Compose config/dataset/<name>.yaml against its schema."""

    def load(name: str, **changes: Any) -> DatasetConfig:
        with initialize_config_dir(str(REPO_ROOT / "config"), version_base="1.3"):
            tree = compose(f"dataset/{name}")["dataset"]
        config = OmegaConf.merge(OmegaConf.structured(DatasetConfig), tree, changes)
        return OmegaConf.to_object(config)  # type: ignore[return-value]

    return load
