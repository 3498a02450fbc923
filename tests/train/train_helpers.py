"""Small trainings: settings, cached states, and what real decoding makes of a drafter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from dspark.config import DrafterShape, TrainConfig
from dspark.decode.engine import Engine, Request
from dspark.decode.loop import closed_loop
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target
from dspark.train.cache import CachedConversation, StateCache, write_cache
from dspark.train.synthesize import Conversation
from tiny_models import greedy_texts

LAYERS = [1, 2]  # of a target's four: what `SHAPE` taps
SHAPE = DrafterShape(layers=1, taps=2, block_size=4, markov_rank=32)


@dataclass
class Predictable:
    """A target whose next token can often be told from the last one, and its words."""

    path: Path
    target: Target
    conversations: list[Conversation]
    states: StateCache


@dataclass
class Training:
    """A finished training on the predictable target's words, with half of its vocabulary."""

    config: TrainConfig
    folder: Path
    curve: list[dict[str, float]]
    target_before: dict[str, torch.Tensor]

    @property
    def validations(self) -> list[dict[str, float]]:
        return [line for line in self.curve if "accept_len_k3" in line]


def settings(**changes: object) -> TrainConfig:
    """A training of 96 conversations that takes a second or two."""
    fields: dict[str, object] = {
        "shape": SHAPE,
        "held_out": 16,
        "calibration": 8,
        "batch": 8,
        "anchors": 16,
        "lr": 2e-2,
    }
    return TrainConfig(**{**fields, **changes})  # type: ignore[arg-type]


def own_words(target: Target, prompts: int = 96, length: int = 40) -> list[Conversation]:
    """The target's greedy continuations of one-token prompts, EOS ignored.

    Every third keeps its first tokens in the prompt, so that responses begin at several places.
    """
    texts = greedy_texts(target, prompts, length)
    conversations = []
    for index, text in enumerate(texts):
        cut = 5 if index % 3 == 1 else 0
        prompt = [4 + index, *text[:cut]]
        conversations.append(Conversation(f"0/{index}", f"user {index}", prompt, text[cut:]))
    return conversations


def write_states(target: Target, conversations: list[Conversation], folder: Path) -> StateCache:
    """A cache of the layers that `SHAPE` taps, in several shards."""
    write_cache(target, conversations, LAYERS, folder, shard_tokens=1000, max_bytes=10**9)
    return StateCache(folder)


def made_up(prompt: int, response: int, first: int = 100) -> CachedConversation:
    """A conversation of ids first, first+1, ..; its states are random."""
    length = prompt + response
    generator = torch.Generator().manual_seed(length)
    return CachedConversation(
        "made/up",
        torch.arange(first, first + length),
        prompt,
        torch.randn(length, 6, generator=generator),
        torch.randn(length, 3, generator=generator),
        torch.randn(length, generator=generator),
    )


def shortened(item: CachedConversation, length: int) -> CachedConversation:
    """The first `length` tokens of a conversation."""
    cut = {name: getattr(item, name)[:length] for name in ("ids", "taps", "final", "logz")}
    return replace(item, **cut)


def decoded(
    target: Target, drafter: DSparkDrafter, items: Sequence[CachedConversation], k: int
) -> list[list[int]]:
    """Accepted draft tokens a step, as the decoder counts them: whole blocks, a list a response.

    The decoder is to write the responses again, each with its very tokens.
    """
    engine = Engine(target, drafter, k=k, concurrency=8, capacity=max(len(x.ids) for x in items))

    def request(name: str, turn: int, _answers: list[list[int]]) -> Request:
        item = items[int(name)]
        prompt = item.ids[: item.response_start].tolist()
        return Request(name, turn, prompt, len(item.ids) - len(prompt))

    accepted: list[list[int]] = [[] for _ in items]
    for row in closed_loop(engine, [(str(index), 1) for index in range(len(items))], request):
        item = items[int(row.request.prompt_id)]
        assert row.output == item.ids[item.response_start :].tolist()
        accepted[int(row.request.prompt_id)] = [x.accepted for x in row.steps if not x.cut]
    return accepted
