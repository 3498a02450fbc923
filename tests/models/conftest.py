"""Tiny targets on disk, made once a session, and the golden checkpoints beside the checkout."""

from __future__ import annotations

import json
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.utils import logging

from dspark.models.target import Target, load_target
from tiny_models import save_tiny_drafter, save_tiny_target

GOLDEN = Path(__file__).parents[2].parent / "shared" / "golden"


@pytest.fixture(scope="session", autouse=True)
def quiet_single_thread() -> None:
    """Models this small only lose by sharing work; progress bars drown the failures."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def golden() -> Path:
    if not GOLDEN.is_dir():
        pytest.skip(f"the golden checkpoints are not at {GOLDEN}")
    return GOLDEN


@pytest.fixture(scope="session")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture(scope="session")
def target(target_path: Path) -> Target:
    return load_target(target_path, "cpu", torch.float32)


@pytest.fixture(scope="session")
def _drafter_path(tmp_path_factory: pytest.TempPathFactory, target_path: Path) -> Path:
    return save_tiny_drafter(tmp_path_factory.mktemp("models") / "drafter", target_path)


@pytest.fixture
def target_copy(tmp_path: Path, target_path: Path) -> Path:
    """A target directory that the test may break."""
    return Path(shutil.copytree(target_path, tmp_path / "target"))


@pytest.fixture
def checkpoint(tmp_path: Path, _drafter_path: Path) -> Path:
    """A drafter checkpoint that the test may break."""
    return Path(shutil.copytree(_drafter_path, tmp_path / "drafter"))


class _Trap:
    """Makes a file when it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.fixture
def trap() -> Callable[[Path], bytes]:
    """A pickle that makes the file of the given name when it is opened."""
    return lambda path: pickle.dumps(_Trap(path))


@pytest.fixture
def edit_config() -> Callable[..., None]:
    """Change fields of a directory's config.json; a value of None removes the field."""

    def edit(folder: Path, **changes: Any) -> None:
        file = folder / "config.json"
        fields = json.loads(file.read_text()) | changes
        kept = {name: value for name, value in fields.items() if value is not None}
        file.write_text(json.dumps(kept))

    return edit
