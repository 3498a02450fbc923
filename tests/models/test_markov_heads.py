"""Markov and confidence heads against their formulas, written out once more in numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from transformers import Qwen3Config

from dspark.errors import UserError
from dspark.models.markov import MARKOV_HEADS, ConfidenceHead, MarkovHead, make_markov_head

HIDDEN, VOCAB, RANK, ROWS, BLOCK = 12, 20, 5, 3, 4
Array = np.ndarray[Any, np.dtype[np.float64]]


def config(**changes: Any) -> Qwen3Config:
    fields: dict[str, Any] = {
        "hidden_size": HIDDEN,
        "vocab_size": VOCAB,
        "markov_rank": RANK,
        "markov_head_type": "vanilla",
        "confidence_head_with_markov": True,
    }
    return Qwen3Config(**fields | changes)


def make_head(kind: str) -> MarkovHead:
    torch.manual_seed(0)
    return make_markov_head(config(markov_head_type=kind)).double().requires_grad_(False)


@pytest.fixture
def states() -> torch.Tensor:
    return torch.randn(ROWS, BLOCK, HIDDEN, generator=torch.Generator().manual_seed(1)).double()


@pytest.fixture
def previous() -> torch.Tensor:
    generator = torch.Generator().manual_seed(2)
    return torch.randint(VOCAB, (ROWS, BLOCK), generator=generator)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def weights(head: MarkovHead) -> dict[str, Array]:
    return {name: value.numpy() for name, value in head.state_dict().items()}


def vanilla(w: dict[str, Array], states: Array, previous: Array) -> Array:
    return w["markov_w1.weight"][previous] @ w["markov_w2.weight"].T


def gated(w: dict[str, Array], states: Array, previous: Array) -> Array:
    embedded = w["markov_w1.weight"][previous]
    joint = np.concatenate([states, embedded], -1)
    gate = sigmoid(joint @ w["gate_proj.weight"].T + w["gate_proj.bias"])
    return (gate * embedded) @ w["markov_w2.weight"].T


def rnn(w: dict[str, Array], states: Array, previous: Array) -> Array:
    state = np.zeros((ROWS, RANK))
    biases = []
    for t in range(BLOCK):
        embedded = w["markov_w1.weight"][previous[:, t]]
        joint = np.concatenate([state, embedded, states[:, t]], -1)
        gate, candidate, output = np.split(
            joint @ w["joint_proj.weight"].T + w["joint_proj.bias"], 3, axis=-1
        )
        state = sigmoid(gate) * state + (1 - sigmoid(gate)) * np.tanh(candidate)
        biases.append(np.tanh(output) @ w["markov_w2.weight"].T)
    return np.stack(biases, axis=1)


@pytest.mark.parametrize(
    ("kind", "formula"), [("vanilla", vanilla), ("gated", gated), ("rnn", rnn)]
)
def test_bias_follows_the_formula(
    kind: str, formula: Any, states: torch.Tensor, previous: torch.Tensor
) -> None:
    head = make_head(kind)
    ours = head.bias(head.block_latents(states, previous)).numpy()
    expected = formula(weights(head), states.numpy(), previous.numpy())
    np.testing.assert_allclose(ours, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", list(MARKOV_HEADS))
def test_whole_blocks_equal_one_token_at_a_time(
    kind: str, states: torch.Tensor, previous: torch.Tensor
) -> None:
    """Teacher forcing in training computes what drafting computes."""
    head = make_head(kind)
    whole = head.block_latents(states, previous)
    state = head.initial_state(ROWS)
    for t in range(BLOCK):
        latent, state = head.latent(states[:, t], previous[:, t], state)
        torch.testing.assert_close(whole[:, t], latent)


@pytest.mark.parametrize("kind", list(MARKOV_HEADS))
def test_a_block_starts_without_memory_of_the_last(
    kind: str, states: torch.Tensor, previous: torch.Tensor
) -> None:
    """Rows are independent and nothing is kept between calls."""
    head = make_head(kind)
    whole = head.block_latents(states, previous)
    torch.testing.assert_close(head.block_latents(states[1:2], previous[1:2]), whole[1:2])


def test_only_the_rnn_head_remembers_earlier_tokens(
    states: torch.Tensor, previous: torch.Tensor
) -> None:
    changed = previous.clone()
    changed[:, 0] = (changed[:, 0] + 1) % VOCAB
    moved = {}
    for kind in MARKOV_HEADS:
        head = make_head(kind)
        difference = head.block_latents(states, changed) - head.block_latents(states, previous)
        moved[kind] = bool(difference[:, 1:].abs().max() > 0)
    assert moved == {"vanilla": False, "gated": False, "rnn": True}


@pytest.mark.parametrize("with_markov", [True, False])
def test_confidence_reads_the_markov_feature_only_when_it_is_told_to(with_markov: bool) -> None:
    torch.manual_seed(0)
    head = ConfidenceHead(config(confidence_head_with_markov=with_markov)).requires_grad_(False)
    states, embedded = torch.randn(ROWS, BLOCK, HIDDEN), torch.randn(ROWS, BLOCK, RANK)
    features = torch.cat([states, embedded], -1) if with_markov else states
    weight, bias = head.proj.weight.numpy()[0], head.proj.bias.numpy()[0]
    assert head.proj.weight.shape == (1, HIDDEN + RANK * with_markov)
    logits = head(states, embedded).numpy()
    np.testing.assert_allclose(logits, features.numpy() @ weight + bias, rtol=1e-5, atol=1e-6)


def test_confidence_is_float32_for_a_bfloat16_drafter() -> None:
    head = ConfidenceHead(config()).bfloat16()
    states, embedded = torch.randn(2, HIDDEN), torch.randn(2, RANK)
    assert head(states.bfloat16(), embedded.bfloat16()).dtype is torch.float32


def test_an_unknown_head_is_answered_with_the_nearest() -> None:
    with pytest.raises(UserError, match=r"markov_head_type 'gatted' is unknown.*'gated'"):
        make_markov_head(config(markov_head_type="gatted"))


@pytest.mark.parametrize("rank", [0, -1])
def test_a_rank_below_one_is_refused(rank: int) -> None:
    with pytest.raises(UserError, match=f"markov_rank is {rank}"):
        make_markov_head(config(markov_rank=rank))
