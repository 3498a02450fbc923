"""Blocks: where they begin, what they see, and that training computes what drafting computes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from train_helpers import made_up, shortened

from dspark.config import DrafterShape
from dspark.decode.cache import SlotCache
from dspark.decode.draft import propose, write_context
from dspark.decode.sampling import Sampling
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target
from dspark.train.blocks import (
    Batch,
    all_anchors,
    block_hidden,
    block_mask,
    draw_anchors,
    flatten_slots,
    make_batch,
)
from dspark.train.cache import CachedConversation, StateCache
from dspark.train.start import new_drafter
from dspark.train.states import target_states

BLOCK = 5
HEADS = ["vanilla", "gated", "rnn"]


def make_drafter(
    target: Target, head: str = "vanilla", draft_ids: torch.Tensor | None = None
) -> DSparkDrafter:
    """A drafter whose Markov head says something, too."""
    shape = DrafterShape(layers=2, taps=2, block_size=BLOCK, markov_head_type=head)
    drafter = new_drafter(shape, target, 0, draft_ids)
    torch.nn.init.normal_(drafter.markov_head.markov_w2.weight)
    return drafter.eval()


def draw(
    items: list[CachedConversation], anchors: int = 6, block_size: int = BLOCK, seed: int = 0
) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    return make_batch(items, [draw_anchors(item, anchors, generator) for item in items], block_size)


lengths = st.lists(st.tuples(st.integers(1, 12), st.integers(2, 14)), min_size=1, max_size=4)


@settings(max_examples=100, deadline=None)
@given(
    lengths=lengths, anchors=st.integers(1, 9), block_size=st.integers(1, 8), seed=st.integers(0, 9)
)
def test_blocks_begin_in_the_response_and_have_labels_in_it(
    lengths: list[tuple[int, int]], anchors: int, block_size: int, seed: int
) -> None:
    items = [made_up(prompt, response) for prompt, response in lengths]
    batch = draw(items, anchors, block_size, seed)
    widest = min(anchors, max(response for _, response in lengths) - 1)
    assert batch.valid.shape == (len(items), widest, block_size)
    for row, (item, (prompt, response)) in enumerate(zip(items, lengths, strict=True)):
        end = prompt + response
        for name in ("ids", "taps", "final", "logz"):
            padded, own = getattr(batch, name)[row], getattr(item, name)
            assert padded[:end].equal(own) and not padded[end:].any()
        used = batch.valid[row].any(-1)
        picks = batch.anchors[row, used].tolist()
        # Every anchor that has a label can be drawn, and none is drawn twice.
        assert len(picks) == len(set(picks)) == min(anchors, response - 1)
        assert all(prompt <= pick < end - 1 for pick in picks)
        for pick, valid in zip(picks, batch.valid[row, used].tolist(), strict=True):
            assert valid == [pick + 1 + slot < end for slot in range(block_size)]


@pytest.mark.parametrize(("response", "count"), [(0, 0), (1, 0), (2, 1), (9, 8)])
def test_a_draft_can_start_at_all_response_tokens_but_the_last(response: int, count: int) -> None:
    assert all_anchors(made_up(3, response)).tolist() == [3 + i for i in range(count)]


def test_anchors_depend_on_the_seed_alone() -> None:
    items = [made_up(2, 40), made_up(5, 30)]
    one, same, other = (draw(items, seed=seed) for seed in (1, 1, 2))
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
@pytest.mark.parametrize("part", [False, True], ids=["whole", "part"])
def test_training_computes_what_drafting_computes(
    target: Target, states: StateCache, head: str, part: bool
) -> None:
    """For each anchor: the states of the block, and with the drafted tokens as previous tokens the
    logits and confidences, as they come out of the cache that inference uses."""
    draft_ids = torch.arange(1, 300, 2) if part else None
    drafter = make_drafter(target, head, draft_ids)
    batch = draw([states[0], shortened(states[1], 23)])
    with torch.no_grad():
        hidden = block_hidden(drafter, batch, batch.taps)
        for row in range(2):
            for index, anchor in enumerate(batch.anchors[row].tolist()):
                cache = SlotCache(len(drafter.layers), 1, anchor + BLOCK)
                here = slice(0, 1)
                context = torch.arange(anchor)[None]
                write_context(drafter, cache, here, batch.taps[row : row + 1, :anchor], context)
                token = batch.ids[row, anchor : anchor + 1]
                start = torch.tensor([anchor])
                draft = propose(drafter, cache, token, start, anchor, BLOCK, [Sampling()])
                ours = hidden[row, index]
                torch.testing.assert_close(ours, draft.hidden[0], atol=1e-5, rtol=1e-5)

                previous = torch.cat([token, draft.tokens[0, :-1]])[None]
                latents = drafter.markov_head.block_latents(ours[None], previous)
                logits = drafter.lm_head(ours[None]) + drafter.markov_head.bias(latents)
                confidence = drafter.confidence_logits(ours[None], previous)
                torch.testing.assert_close(logits, draft.logits, atol=1e-4, rtol=1e-5)
                torch.testing.assert_close(confidence, draft.confidence, atol=1e-5, rtol=1e-5)
                assert drafter.to_target(logits.argmax(-1)).equal(draft.tokens)


def test_padding_is_inert(target: Target, states: StateCache) -> None:
    """A conversation's states and blocks are the same alone and beside a longer one."""
    drafter = make_drafter(target)
    short = shortened(states[0], 12)
    alone, both = draw([short]), draw([short, states[1]], seed=0)
    count = alone.anchors.shape[1]
    assert both.ids.shape[1] > alone.ids.shape[1]
    for ours, theirs in zip(
        target_states(target, alone.ids, [0, 2]),
        target_states(target, both.ids, [0, 2]),
        strict=True,
    ):
        torch.testing.assert_close(ours[0], theirs[0, : ours.shape[1]], atol=1e-5, rtol=1e-5)
    with torch.no_grad():
        ours, theirs = (block_hidden(drafter, batch, batch.taps) for batch in (alone, both))
    torch.testing.assert_close(ours[0], theirs[0, :count], atol=1e-5, rtol=1e-5)


def test_slots_pair_the_token_before_with_the_token_after_and_its_teacher(
    target: Target, states: StateCache
) -> None:
    """On the target's own greedy text the teacher's favourite is the label, everywhere."""
    drafter = make_drafter(target)
    batch = draw([states[index] for index in range(4)])
    with torch.no_grad():
        slots = flatten_slots(drafter, block_hidden(drafter, batch, batch.taps), batch)
    assert len(slots.labels) == batch.valid.sum() > 60
    teacher = target.logits(slots.teacher)
    assert teacher.argmax(-1).equal(slots.labels)
    torch.testing.assert_close(teacher.logsumexp(-1), slots.logz, atol=1e-5, rtol=1e-5)
    rows, picks, offsets = batch.valid.nonzero().unbind(1)
    positions = batch.anchors[rows, picks] + offsets
    assert slots.offsets.equal(offsets)
    assert slots.previous.equal(batch.ids[rows, positions])
    assert slots.labels.equal(batch.ids[rows, positions + 1])
