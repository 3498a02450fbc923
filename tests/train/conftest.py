"""Tiny targets made once a session, their own greedy words, and one training on them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from train_helpers import SHAPE, Predictable, Training, own_words, settings, write_states
from transformers.utils import logging

from dspark.models.target import Target, load_target
from dspark.train.cache import StateCache
from dspark.train.curve import read_curve
from dspark.train.synthesize import Conversation
from dspark.train.trainer import fit
from tiny_models import save_tiny_target


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


@pytest.fixture(scope="session")
def conversations(target: Target) -> list[Conversation]:
    return own_words(target, prompts=24)


@pytest.fixture(scope="session")
def states(
    target: Target, conversations: list[Conversation], tmp_path_factory: pytest.TempPathFactory
) -> StateCache:
    """What training reads of `conversations`."""
    return write_states(target, conversations, tmp_path_factory.mktemp("states") / "cache")


@pytest.fixture(scope="session")
def predictable(tmp_path_factory: pytest.TempPathFactory) -> Predictable:
    folder = tmp_path_factory.mktemp("predictable")
    path = save_tiny_target(folder / "target", "gemma3")
    target = load_target(path, "cpu", torch.float32)
    conversations = own_words(target)
    return Predictable(
        path, target, conversations, write_states(target, conversations, folder / "cache")
    )


@pytest.fixture(scope="session")
def training(predictable: Predictable, tmp_path_factory: pytest.TempPathFactory) -> Training:
    """54 steps, validated every 18."""
    config = settings(
        shape=replace(SHAPE, draft_vocab_size=150), epochs=6.0, anchors=32, validate_every=18
    )
    folder = tmp_path_factory.mktemp("training") / "out"
    weights = predictable.target.model.state_dict()
    before = {name: value.clone() for name, value in weights.items()}
    fit(predictable.target, predictable.states, config, folder)
    return Training(config, folder, read_curve(folder / "curve.jsonl"), before)
