"""Blocks: where they begin, what they see, and that training computes what drafting computes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.config import DrafterShape
from dspark.decode.cache import SlotCache
from dspark.decode.draft import propose, write_context
from dspark.decode.sampling import Sampling
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target
from dspark.train.blocks import (
    Blocks,
    block_hidden,
    block_mask,
    flatten_slots,
    make_blocks,
    target_states,
)
from dspark.train.start import new_drafter, spread_layers
from dspark.train.synthesize import Conversation
from dspark.train.trainer import candidate_tokens, frequent_tokens

BLOCK = 5
HEADS = ["vanilla", "gated", "rnn"]


def make_drafter(target: Target, head: str = "vanilla", seed: int = 0) -> DSparkDrafter:
    """A drafter whose Markov head says something, too."""
    shape = DrafterShape(layers=2, taps=2, block_size=BLOCK, markov_head_type=head)
    drafter = new_drafter(shape, target, seed)
    torch.nn.init.normal_(drafter.markov_head.markov_w2.weight)
    return drafter.eval()


def draw(
    conversations: list[Conversation], anchors: int = 6, block_size: int = BLOCK, seed: int = 0
) -> Blocks:
    return make_blocks(conversations, anchors, block_size, torch.Generator().manual_seed(seed))


lengths = st.lists(st.tuples(st.integers(1, 12), st.integers(0, 14)), min_size=1, max_size=4)


@settings(max_examples=150, deadline=None)
@given(
    lengths=lengths, anchors=st.integers(1, 9), block_size=st.integers(1, 8), seed=st.integers(0, 9)
)
def test_blocks_begin_in_the_response_and_have_labels_in_it(
    lengths: list[tuple[int, int]], anchors: int, block_size: int, seed: int
) -> None:
    batch = [
        Conversation(str(i), "", list(range(100, 100 + prompt)), list(range(200, 200 + response)))
        for i, (prompt, response) in enumerate(lengths)
    ]
    blocks = draw(batch, anchors, block_size, seed)
    assert blocks.valid.shape == (len(batch), anchors, block_size)
    for row, item in enumerate(batch):
        begin, end = len(item.prompt_ids), len(item.prompt_ids) + len(item.response_ids)
        assert blocks.ids[row, :end].tolist() == item.prompt_ids + item.response_ids
        assert not blocks.ids[row, end:].any()
        used = blocks.valid[row].any(-1)
        picks = blocks.anchors[row, used].tolist()
        # Every anchor that has a label can be drawn, and none is drawn twice.
        assert len(picks) == len(set(picks)) == min(anchors, max(0, len(item.response_ids) - 1))
        assert all(begin <= pick < end - 1 for pick in picks)
        for pick, valid in zip(picks, blocks.valid[row, used].tolist(), strict=True):
            assert valid == [pick + 1 + slot < end for slot in range(block_size)]


def test_blocks_depend_on_the_seed_alone(conversations: list[Conversation]) -> None:
    one, same, other = (draw(conversations[:4], seed=seed) for seed in (1, 1, 2))
    assert torch.equal(one.anchors, same.anchors)
    assert not torch.equal(one.anchors, other.anchors)


def test_a_block_sees_the_context_before_its_anchor_and_itself() -> None:
    anchors, length, size = [[3, 0], [1, 5]], 6, 2
    mask = block_mask(torch.tensor(anchors), length, size)
    assert mask.shape == (2, 1, 4, length + 4)
    for row in range(2):
        for query in range(4):
            own = query // size
            for key in range(length + 4):
                seen = key < anchors[row][own] if key < length else (key - length) // size == own
                assert mask[row, 0, query, key].item() == seen


@pytest.mark.parametrize("head", HEADS)
def test_training_computes_what_drafting_computes(
    target: Target, conversations: list[Conversation], head: str
) -> None:
    """For each anchor: the states of the block, and with the drafted tokens as previous tokens the
    logits and confidences, as they come out of the cache that inference uses."""
    drafter = make_drafter(target, head)
    batch = [conversations[0], conversations[1]]
    batch[1] = Conversation("short", "", batch[1].prompt_ids, batch[1].response_ids[:17])
    blocks = draw(batch)
    with torch.no_grad():
        _, taps = target_states(target, blocks.ids, drafter.target_layer_ids)
        hidden = block_hidden(drafter, taps, blocks)
        for row in range(2):
            for index, anchor in enumerate(blocks.anchors[row].tolist()):
                cache = SlotCache(len(drafter.layers), 1, anchor + BLOCK)
                here = slice(0, 1)
                context = torch.arange(anchor)[None]
                write_context(drafter, cache, here, taps[row : row + 1, :anchor], context)
                token = blocks.ids[row, anchor : anchor + 1]
                start = torch.tensor([anchor])
                draft = propose(drafter, cache, token, start, anchor, BLOCK, [Sampling()])
                ours = hidden[row, index]
                torch.testing.assert_close(ours, draft.hidden[0], atol=1e-5, rtol=1e-5)

                previous = torch.cat([token, draft.tokens[0, :-1]])[None]
                latents = drafter.markov_head.block_latents(ours[None], previous)
                logits = target.logits(ours[None]) + drafter.markov_head.bias(latents)
                confidence = drafter.confidence_logits(ours[None], previous)
                torch.testing.assert_close(logits, draft.logits, atol=1e-4, rtol=1e-5)
                torch.testing.assert_close(confidence, draft.confidence, atol=1e-5, rtol=1e-5)


def test_padding_is_inert(target: Target, conversations: list[Conversation]) -> None:
    """A conversation's states are the same alone and beside a longer one."""
    short = Conversation(
        "short", "", conversations[0].prompt_ids, conversations[0].response_ids[:9]
    )
    both = draw([short, conversations[1]])
    alone = draw([short])
    length = alone.ids.shape[1]
    for ours, theirs in zip(
        target_states(target, alone.ids, [0, 2]),
        target_states(target, both.ids, [0, 2]),
        strict=True,
    ):
        torch.testing.assert_close(ours[0], theirs[0, :length], atol=1e-5, rtol=1e-5)


def test_slots_pair_the_token_before_with_the_token_after_and_its_teacher(
    target: Target, conversations: list[Conversation]
) -> None:
    """On the target's own greedy text the teacher's favourite is the label, everywhere."""
    drafter = make_drafter(target)
    blocks = draw(conversations[:4])
    states, taps = target_states(target, blocks.ids, drafter.target_layer_ids)
    slots = flatten_slots(drafter, block_hidden(drafter, taps, blocks), states, blocks, 4.0)
    assert len(slots.labels) == blocks.valid.sum() > 60
    assert target.logits(slots.teacher).argmax(-1).equal(slots.labels)
    rows, picks, offsets = blocks.valid.nonzero().unbind(1)
    positions = blocks.anchors[rows, picks] + offsets
    assert slots.previous.equal(blocks.ids[rows, positions])
    assert slots.labels.equal(blocks.ids[rows, positions + 1])
    assert slots.weights.equal(torch.exp(-offsets / 4.0))


@settings(max_examples=60, deadline=None)
@given(
    count=st.integers(1, 40),
    labels=st.lists(st.integers(0, 49), max_size=30),
    seed=st.integers(0, 9),
)
def test_candidates_hold_the_labels_and_the_most_frequent_tokens(
    count: int, labels: list[int], seed: int
) -> None:
    frequent = torch.arange(50).flip(0)
    wanted = torch.tensor(labels, dtype=torch.long)
    generator = torch.Generator().manual_seed(seed)
    tokens = candidate_tokens(wanted, frequent, count, 50, generator)
    assert tokens.equal(tokens.unique())  # sorted, so that labels can be searched for
    assert set(labels) <= set(tokens.tolist())
    assert set(frequent[: count - count // 2].tolist()) <= set(tokens.tolist())
    assert len(tokens) <= count + len(set(labels))
    assert wanted.equal(tokens[torch.searchsorted(tokens, wanted)])


@pytest.mark.parametrize("count", [0, 50, 51])
def test_no_count_means_the_whole_vocabulary(count: int) -> None:
    generator = torch.Generator().manual_seed(0)
    tokens = candidate_tokens(torch.tensor([7]), torch.arange(50), count, 50, generator)
    assert tokens.equal(torch.arange(50))


def test_frequent_tokens_come_first_and_none_is_left_out() -> None:
    conversations = [
        Conversation("0", "", [9, 9, 9], [4, 4, 7]),
        Conversation("1", "", [9], [7, 7, 2]),
    ]
    assert frequent_tokens(conversations, 10).tolist() == [7, 4, 2, 0, 1, 3, 5, 6, 8, 9]


@given(count=st.integers(1, 6), layers=st.integers(1, 40))
def test_spread_layers_can_all_be_tapped(count: int, layers: int) -> None:
    """In order, none twice, never the last layer of the target."""
    ids = spread_layers(count, layers)
    assert ids == sorted(set(ids)) and 1 <= len(ids) <= count
    assert all(-1 <= layer <= layers - 2 for layer in ids)
    assert ids[-1] == layers - 2
