"""Tiny models in memory, and the golden checkpoints where they lie beside the checkout."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_helpers import make_drafter, make_target

from dspark.models.checkpoint import load_drafter
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target, load_target

GOLDEN = Path(__file__).parents[2].parent / "shared" / "golden"


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Models this small only lose by sharing work."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def target() -> Target:
    return make_target()


@pytest.fixture(scope="session")
def drafter(target: Target) -> DSparkDrafter:
    return make_drafter(target)


class Golden:
    """What an independent implementation computed: checkpoints and greedy traces."""

    def __init__(self) -> None:
        traces = json.loads((GOLDEN / "traces.json").read_text())
        self.prompts: list[list[int]] = traces["prompts"]
        self.greedy: list[list[int]] = traces["greedy"]
        self.cases: list[dict[str, Any]] = traces["cases"]
        self.target = load_target(GOLDEN / "target", "cpu", torch.float32)

    @cache  # noqa: B019 - one object a session
    def drafter(self, checkpoint: str) -> DSparkDrafter:
        return load_drafter(GOLDEN / checkpoint, self.target)


@pytest.fixture(scope="session")
def golden() -> Golden:
    if not GOLDEN.is_dir():
        pytest.skip(f"the golden checkpoints are not at {GOLDEN}")
    return Golden()
