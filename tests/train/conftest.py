"""One tiny target a session, and conversations in its own greedy words."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers.utils import logging

from dspark.models.target import Target, load_target
from dspark.train.synthesize import Conversation
from tiny_models import greedy_texts, save_tiny_target


@pytest.fixture(scope="session", autouse=True)
def quiet_single_thread() -> None:
    """Models this small only lose by sharing work; progress bars drown the failures."""
    torch.set_num_threads(1)
    logging.disable_progress_bar()


@pytest.fixture(scope="session")
def target_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "target"
    return save_tiny_target(folder, max_position_embeddings=1024)


@pytest.fixture(scope="session")
def target(target_path: Path) -> Target:
    return load_target(target_path, "cpu", torch.float32)


def own_words(target: Target) -> list[Conversation]:
    """The target's greedy continuations of 96 one-token prompts."""
    texts = greedy_texts(target, prompts=96, length=40)
    return [
        Conversation(f"0/{index}", f"user {index}", [4 + index], text)
        for index, text in enumerate(texts)
    ]


@pytest.fixture(scope="session")
def conversations(target: Target) -> list[Conversation]:
    return own_words(target)


@pytest.fixture(scope="session")
def predictable(tmp_path_factory: pytest.TempPathFactory) -> tuple[Target, list[Conversation]]:
    """A target whose next token can often be told from the last one, and its words."""
    path = save_tiny_target(tmp_path_factory.mktemp("models") / "target", "gemma3")
    target = load_target(path, "cpu", torch.float32)
    return target, own_words(target)
