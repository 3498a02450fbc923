"""Tiny models in memory, and short ways to run an engine on them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from dspark.config import DrafterShape
from dspark.decode.draft import Draft, Worth
from dspark.decode.engine import Engine, Request, Row
from dspark.decode.sampling import Sampling, one_hot
from dspark.models.attention import NAME
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target
from dspark.train.start import new_drafter
from tiny_models import FAMILIES, tiny_config

VOCAB = 40


def make_target(
    family: str = "llama", vocab: int = VOCAB, seed: int = 1, *, embed: float = 1.0, **changes: Any
) -> Target:
    """A random float32 target; the greater `embed` is, the more its last token alone decides."""
    torch.manual_seed(seed)
    config = tiny_config(family, vocab, **{"layers": 3, **changes})
    target = Target(FAMILIES[family][1](config))
    with torch.no_grad():
        target.model.get_input_embeddings().weight.mul_(embed)
    target.model.set_attn_implementation(NAME)  # as a loaded one attends
    target.packs = True
    return target


def make_drafter(target: Target, seed: int = 2, **shape: Any) -> DSparkDrafter:
    """A random drafter with a Markov bias and confidences that differ from position to position."""
    fields = {"layers": 2, "taps": 2, "markov_rank": 16, **shape}
    drafter = new_drafter(DrafterShape(**fields), target, seed).eval()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for weight in (drafter.markov_head.markov_w1.weight, drafter.markov_head.markov_w2.weight):
            weight.copy_(torch.randn(weight.shape, generator=generator))
        if drafter.confidence_head is not None:
            weight = drafter.confidence_head.proj.weight
            weight.copy_(torch.randn(weight.shape, generator=generator))
    return drafter


def make_bigram_drafter(target: Target, seed: int = 2, **shape: Any) -> DSparkDrafter:
    """A drafter whose Markov bias is the target's own logits after each single token."""
    drafter = make_drafter(target, seed, **{"markov_rank": target.vocab_size, **shape})
    engine = Engine(target, concurrency=target.vocab_size, capacity=1)
    tokens = torch.arange(target.vocab_size)[:, None]
    with torch.no_grad():
        states, _ = engine.forward(slice(0, len(tokens)), tokens, torch.zeros_like(tokens), 1)
        drafter.markov_head.markov_w1.weight.copy_(torch.eye(target.vocab_size))
        drafter.markov_head.markov_w2.weight.copy_(target.logits(states)[:, 0].T)
    return drafter


def counting_target(vocab: int = 64, **changes: Any) -> Target:
    """A Llama whose next token is always the last one plus 1, so that text can be read at sight."""
    config = LlamaConfig(
        vocab_size=vocab,
        hidden_size=vocab,
        intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        **{"max_position_embeddings": 512, "tie_word_embeddings": False, **changes},
    )
    model = LlamaForCausalLM(config)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.o_proj.weight.zero_()
            layer.mlp.down_proj.weight.zero_()
        model.model.embed_tokens.weight.copy_(torch.eye(vocab))
        model.lm_head.weight.copy_(torch.eye(vocab).roll(1, 0))
    return Target(model)


def request(
    name: str | int,
    tokens: Iterable[int],
    new: int,
    *,
    sampling: Sampling | None = None,
    **more: Any,
) -> Request:
    return Request(str(name), 0, list(tokens), new, sampling or Sampling(), **more)


def serve(engine: Engine, requests: Iterable[Request]) -> dict[str, Row]:
    """Run the requests through all slots; returns the finished rows by prompt id."""
    waiting, finished = list(requests), []
    while waiting or engine.active:
        while waiting and engine.free:
            row = engine.admit(waiting.pop(0), engine.clock())
            if row.finish_reason is not None:
                finished.append(row)
        if engine.active:
            finished += engine.step()
    return {row.request.prompt_id: row for row in finished}


def outputs(rows: dict[str, Row]) -> dict[str, list[int]]:
    return {name: row.output for name, row in rows.items()}


def need(requests: Iterable[Request]) -> int:
    """The capacity that an engine for these requests needs."""
    return max(len(item.tokens) + item.max_new_tokens for item in requests)


def alone(target: Target, item: Request, drafter: DSparkDrafter | None = None, k: int = 0) -> Row:
    """The request decoded by itself; without a drafter by plain decoding."""
    engine = Engine(target, drafter, k=k, capacity=need([item]))
    return serve(engine, [item])[item.prompt_id]


@contextmanager
def drafting(
    engine: Engine,
    propose: Callable[[Row, int], list[int]],
    confidence: Callable[[Row, int], list[float]] | None = None,
) -> Iterator[None]:
    """Let `propose(row, k)` say what is drafted for each row; only the drafter is replaced."""

    def fake(
        _drafter: DSparkDrafter,
        _cache: Any,
        anchors: Tensor,
        starts: Tensor,
        longest: int,
        k: int,
        sampling: list[Sampling],
        _uniforms: Tensor | None = None,
        _worth: Worth | None = None,
        _lap: object = None,
    ) -> Draft:
        rows = [row for row in engine.slots if row is not None]
        live = len(rows)
        assert anchors[:live].tolist() == [row.output[-1] for row in rows]
        assert starts[:live].tolist() == [
            len(row.request.tokens) + len(row.output) - 1 for row in rows
        ]
        assert longest >= starts.max() if engine.static else longest == starts.max()
        fill = anchors.shape[0] - live  # rows of a bucket that static steps fill up
        tokens = torch.tensor([propose(row, k) for row in rows] + [[0] * k] * fill)
        assert tokens.shape == (len(anchors), k)
        logits = torch.full(tokens.shape, float("inf"))
        if confidence is not None:
            logits = torch.tensor([confidence(row, k) for row in rows] + [[0.0] * k] * fill)
        probs = one_hot(tokens, engine.target.vocab_size)
        greedy = all(row.greedy for row in sampling)
        return Draft(tokens, None if greedy else probs, logits, probs, probs)

    with patch("dspark.decode.engine.propose", fake):
        yield
