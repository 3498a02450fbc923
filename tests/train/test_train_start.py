"""What training starts from: bigrams, nearby attention, scaled taps."""

from __future__ import annotations

import pytest
import torch

import tiny_models
from dspark.config import DrafterShape, TrainConfig
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target, load_target
from dspark.train.blocks import block_hidden, make_blocks, target_states
from dspark.train.start import (
    fold_tap_scale,
    new_drafter,
    ones_direction,
    sample_taps,
    spread_layers,
    start_from_bigrams,
    start_local,
)
from dspark.train.synthesize import Conversation

CONFIG = TrainConfig(shape=DrafterShape(layers=2, taps=2, block_size=4, markov_rank=32))


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    path = tmp_path_factory.mktemp("start") / "target"
    tiny_models.save_tiny_target(path, head_dim=64)  # as many rotary pairs as real models have
    return load_target(path, "cpu", torch.float32)


@pytest.fixture(scope="module")
def conversations(target: Target) -> list[Conversation]:
    texts = tiny_models.greedy_texts(target, 8, 40)
    return [Conversation(f"0/{i}", "", [4 + i], text) for i, text in enumerate(texts)]


def drafter_for(target: Target) -> DSparkDrafter:
    return new_drafter(CONFIG.shape, target, 0)


def test_markov_head_starts_with_the_targets_bigrams(target: Target) -> None:
    drafter = drafter_for(target)
    tokens = torch.arange(target.vocab_size)
    start_from_bigrams(drafter, target, tokens)
    first = torch.full_like(tokens, target.config.bos_token_id or 0)
    states, _ = target_states(target, torch.stack([first, tokens], dim=1), [0])
    wanted = target.logits(states[:, -1])
    bias = drafter.markov_head.bias(drafter.markov_head.embed(tokens))
    said = [(x - x.mean(0)).flatten() for x in (wanted, bias)]
    # Rank 32 of 48 dimensions: nearly all of what depends on the token.
    assert torch.corrcoef(torch.stack(said))[0, 1] > 0.9


def test_attention_starts_near_the_anchor(
    target: Target, conversations: list[Conversation]
) -> None:
    drafter = drafter_for(target)
    taps = sample_taps(target, drafter.target_layer_ids, conversations)
    taps = taps / taps.abs().median(0).values
    start_local(drafter, taps, torch.arange(target.vocab_size))
    length = 30
    positions = torch.arange(length)[None]
    keys = drafter.context_key_values(taps[None, :length], positions)
    block = drafter.block_inputs(torch.tensor([7]))
    slots = length + torch.arange(drafter.block_size)[None]
    scores: list[torch.Tensor] = []

    def watch(layer: int, key: torch.Tensor, value: torch.Tensor):
        scores.append(keys[layer][0])
        return keys[layer]

    layer = drafter.layers[0].self_attn
    x = drafter.layers[0].input_layernorm(drafter.embed_tokens(block))
    rope = drafter.rotary_emb(x, slots)
    query = layer.q_norm(layer.q_proj(x).unflatten(-1, (-1, layer.head_dim))).transpose(1, 2)
    query = query * rope[0][:, None] + _rotate(query) * rope[1][:, None]
    scores_first = (query[:, :1, 0] * keys[0][0][:, 0]).sum(-1) * layer.head_dim**-0.5
    weights = scores_first.softmax(-1)[0]
    assert weights[-3:].sum() > 3 * 3 / length
    drafter.block_hidden(block, slots, watch, None)  # both layers read their own context keys
    assert len(scores) == 2


def _rotate(x: torch.Tensor) -> torch.Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat([-right, left], dim=-1)


def test_ones_direction_finds_a_constant_part() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 20, generator=generator)
    x[:, 3] += 4
    assert ((x @ ones_direction(x)).mean() - 1).abs() < 0.1


def test_folded_drafter_reads_raw_taps(target: Target, conversations: list[Conversation]) -> None:
    drafter = drafter_for(target)
    scale = sample_taps(target, drafter.target_layer_ids, conversations).abs().median(0).values
    folded = fold_tap_scale(drafter, target, CONFIG, scale)
    blocks = make_blocks(conversations[:2], 3, 4, torch.Generator().manual_seed(0))
    _, taps = target_states(target, blocks.ids, drafter.target_layer_ids)
    torch.testing.assert_close(
        block_hidden(folded, taps, blocks),
        block_hidden(drafter, taps / scale, blocks),
        rtol=1e-4,
        atol=1e-4,
    )


def test_spread_layers_leaves_out_the_last() -> None:
    assert spread_layers(4, 30) == [1, 10, 19, 28]
    assert spread_layers(1, 4) == [2]
