"""Where training starts: the target's bigrams, near attention, and taps of one loudness."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from train_helpers import own_words, write_states

from dspark.config import DrafterShape
from dspark.errors import UserError
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target, load_target
from dspark.train.blocks import all_anchors, block_hidden, make_batch
from dspark.train.cache import StateCache
from dspark.train.start import (
    check_shape,
    fold_tap_scale,
    new_drafter,
    ones_direction,
    spread_layers,
    start_from_bigrams,
    start_local,
    tap_scale,
)
from dspark.train.states import target_states
from tiny_models import save_tiny_target

SHAPE = DrafterShape(layers=2, taps=2, block_size=4, markov_rank=32)
PART = torch.arange(3, 300, 3)


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Target:
    """A target with as many rotary pairs as real models have."""
    path = save_tiny_target(tmp_path_factory.mktemp("start") / "target", head_dim=64)
    return load_target(path, "cpu", torch.float32)


@pytest.fixture(scope="module")
def wide_states(wide: Target, tmp_path_factory: pytest.TempPathFactory) -> StateCache:
    return write_states(wide, own_words(wide, 8), tmp_path_factory.mktemp("start") / "cache")


def taps_of(states: StateCache) -> Tensor:
    return torch.cat([states[index].taps for index in range(len(states))])


def weights_of(drafter: DSparkDrafter) -> dict[str, Tensor]:
    return {name: value.clone() for name, value in drafter.state_dict().items()}


# --------------------------------------------------------------------------- a new drafter


@given(count=st.integers(1, 6), layers=st.integers(1, 40))
def test_spread_layers_can_all_be_tapped(count: int, layers: int) -> None:
    """In order, none twice, never the last layer of the target."""
    ids = spread_layers(count, layers)
    assert ids == sorted(set(ids)) and 1 <= len(ids) <= count
    assert all(-1 <= layer <= layers - 2 for layer in ids)
    assert ids[-1] == layers - 2


def test_spread_layers_of_real_models() -> None:
    assert spread_layers(4, 30) == [1, 10, 19, 28]
    assert spread_layers(1, 4) == [2]


def test_a_new_drafter_starts_from_the_parallel_draft(target: Target) -> None:
    drafter = new_drafter(SHAPE, target, 0)
    assert not drafter.markov_head.markov_w2.weight.any()
    assert {value.dtype for value in drafter.parameters()} == {torch.float32}
    assert drafter.config.num_target_layers == target.num_layers
    assert drafter.target_layer_ids == [1, 2]
    assert drafter.d2t is None


def test_a_new_drafter_depends_on_its_seed_alone(target: Target) -> None:
    one, same, other = (weights_of(new_drafter(SHAPE, target, seed)) for seed in (1, 1, 2))
    assert all(value.equal(same[name]) for name, value in one.items())
    assert not one["fc.weight"].equal(other["fc.weight"])


def test_a_new_drafter_drafts_from_the_tokens_that_it_is_given(target: Target) -> None:
    drafter = new_drafter(SHAPE, target, 0, PART)
    assert drafter.draft_ids.equal(PART)
    assert drafter.config.draft_vocab_size == len(PART)
    assert drafter.markov_head.markov_w1.weight.shape[0] == target.vocab_size
    assert drafter.markov_head.markov_w2.weight.shape[0] == len(PART)
    states = torch.randn(5, target.hidden_size)
    torch.testing.assert_close(drafter.lm_head(states), target.logits(states)[:, PART])


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (DrafterShape(target_layer_ids=[0, 3]), r"target_layer_ids \[3\] lie outside -1\.\.2"),
        (DrafterShape(mask_token_id=300), "mask_token_id 300 is not in the target's vocabulary"),
        (DrafterShape(markov_head_type="gatd"), "markov_head_type 'gatd' is unknown: .*'gated'"),
        (DrafterShape(markov_rank=0), "markov_rank is 0"),
    ],
    ids=["layer", "mask", "head", "rank"],
)
def test_a_shape_that_cannot_work_is_refused(
    target: Target, shape: DrafterShape, message: str
) -> None:
    for refuse in (check_shape, lambda shape, target: new_drafter(shape, target, 0)):
        with pytest.raises(UserError, match=message):
            refuse(shape, target)


def test_checking_a_shape_makes_nothing(target: Target) -> None:
    """Not even a random number is drawn."""
    torch.manual_seed(5)
    wanted = torch.rand(3)
    torch.manual_seed(5)
    check_shape(SHAPE, target)
    assert torch.rand(3).equal(wanted)


# --------------------------------------------------------------------------- bigrams


@pytest.mark.parametrize("draft_ids", [None, PART], ids=["whole", "part"])
def test_markov_head_starts_with_the_targets_bigrams(
    wide: Target, draft_ids: Tensor | None
) -> None:
    drafter = new_drafter(SHAPE, wide, 0, draft_ids)
    tokens = torch.arange(wide.vocab_size)
    start_from_bigrams(drafter, wide, tokens)
    first = torch.full_like(tokens, wide.config.bos_token_id or 0)
    states, _ = target_states(wide, torch.stack([first, tokens], dim=1), [0])
    wanted = wide.logits(states[:, -1])[:, drafter.draft_ids]
    bias = drafter.markov_head.bias(drafter.markov_head.embed(tokens))
    said = [(x - x.mean(0)).flatten() for x in (wanted, bias)]
    # Rank 32 of 48 dimensions: nearly all of what depends on the token.
    assert torch.corrcoef(torch.stack(said))[0, 1] > 0.9


def test_a_rank_above_the_hidden_size_is_filled_as_far_as_it_goes(wide: Target) -> None:
    drafter = new_drafter(DrafterShape(layers=1, taps=2, markov_rank=64), wide, 0)
    start_from_bigrams(drafter, wide, torch.arange(wide.vocab_size), batch=100)
    assert not drafter.markov_head.markov_w2.weight[:, 48:].any()
    assert drafter.markov_head.markov_w2.weight[:, :48].isfinite().all()


# --------------------------------------------------------------------------- attention


def test_attention_starts_near_the_anchor(wide: Target, wide_states: StateCache) -> None:
    drafter = new_drafter(SHAPE, wide, 0)
    taps = taps_of(wide_states)
    taps = taps / tap_scale(taps)
    start_local(drafter, taps, torch.arange(wide.vocab_size))
    length = 30
    keys = drafter.context_key_values(taps[None, :length], torch.arange(length)[None])
    block = drafter.block_inputs(torch.tensor([7]))
    slots = length + torch.arange(drafter.block_size)[None]
    layer = drafter.layers[0].self_attn
    x = drafter.layers[0].input_layernorm(drafter.embed_tokens(block))
    cos, sin = drafter.rotary_emb(x, slots)
    query = layer.q_norm(layer.q_proj(x).unflatten(-1, (-1, layer.head_dim))).transpose(1, 2)
    query = query * cos[:, None] + rotated(query) * sin[:, None]
    # One key/value group of two is drawn near; its queries are the first half of the heads.
    scores = (query[:, :1, 0] * keys[0][0][:, 0]).sum(-1) * layer.head_dim**-0.5
    assert scores.softmax(-1)[0, -3:].sum() > 3 * 3 / length


def rotated(x: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return torch.cat([-right, left], dim=-1)


def test_ones_direction_finds_a_constant_part() -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(400, 20, generator=generator)
    x[:, 3] += 4
    assert ((x @ ones_direction(x)).mean() - 1).abs() < 0.1


# --------------------------------------------------------------------------- the scale of taps


def test_the_scale_of_taps_is_what_is_usual_not_what_is_loud() -> None:
    taps = torch.randn(200, 4, generator=torch.Generator().manual_seed(0))
    taps[:, 1] *= 1000  # a loud channel
    taps[0] = 1e6  # a first token that serves as sink
    taps[:, 2] = 0  # a dead channel must not be divided by nothing
    scale = tap_scale(taps)
    assert scale[1] > 300 * scale[0] and scale[:1].max() < 2
    assert scale[2] > 0 and (taps / scale).isfinite().all()


def test_folded_drafter_reads_raw_taps(wide: Target, wide_states: StateCache) -> None:
    drafter = new_drafter(SHAPE, wide, 0, PART)
    before = weights_of(drafter)
    scale = tap_scale(taps_of(wide_states))
    folded = fold_tap_scale(drafter, scale)
    items = [wide_states[0], wide_states[1]]
    batch = make_batch(items, [all_anchors(item)[::9] for item in items], SHAPE.block_size)
    with torch.no_grad():
        torch.testing.assert_close(
            block_hidden(folded, batch, batch.taps),
            block_hidden(drafter, batch, batch.taps / scale),
            rtol=1e-4,
            atol=1e-4,
        )
    assert all(value.equal(before[name]) for name, value in weights_of(drafter).items())
    assert folded.embed_tokens is wide.embed and folded.lm_head is drafter.lm_head
    assert folded.draft_ids.equal(PART)
