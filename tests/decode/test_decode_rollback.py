"""After every round the caches hold exactly what a prefill of the committed text would write."""

from __future__ import annotations

import random

import pytest
import torch
from decode_helpers import (
    VOCAB,
    drafting,
    make_bigram_drafter,
    make_target,
    outputs,
    request,
    serve,
)
from torch import Tensor

from dspark.decode.cache import SlotCache
from dspark.decode.engine import Engine, Row
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target


def rebuilt(target: Target, drafter: DSparkDrafter, row: Row) -> Engine:
    """An engine that has only prefilled the tokens whose K/V the row's caches must hold."""
    tokens = [*row.request.tokens, *row.output][: row.start]
    engine = Engine(target, drafter, k=1, capacity=len(tokens) + 2)
    engine.admit(request("fresh", tokens, 2), 0.0)
    return engine


def same(ours: SlotCache, slot: int, fresh: SlotCache, length: int) -> None:
    stores = zip([*ours.keys, *ours.values], [*fresh.keys, *fresh.values], strict=True)
    for store, expected in stores:
        assert store is not None and expected is not None
        torch.testing.assert_close(
            store[slot, :, :length], expected[0, :, :length], atol=1e-5, rtol=1e-4
        )


def check(engine: Engine, target: Target, drafter: DSparkDrafter) -> None:
    for slot, row in enumerate(engine.slots):
        if row is not None:
            fresh = rebuilt(target, drafter, row)
            same(engine.cache, slot, fresh.cache, row.start)
            same(engine.draft_cache, slot, fresh.draft_cache, row.start)


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("k", [1, 3, 7])
def test_caches_equal_a_rebuild_after_every_round(family: str, k: int) -> None:
    target = make_target(family, embed=20 if family == "llama" else 1)
    drafter = make_bigram_drafter(target)
    engine = Engine(target, drafter, k=k, concurrency=3, capacity=60)
    rows = [engine.admit(request(n, range(n, n + 2 + 7 * n), 16 + n), 0.0) for n in range(3)]
    check(engine, target, drafter)
    while engine.active:
        engine.step()
        check(engine, target, drafter)
    counts = [step.accepted for row in rows for step in row.steps]
    assert min(counts) < k and max(counts) > 0  # there was something to roll back, and to keep


@pytest.mark.parametrize("threshold", [0.3, 0.7])
def test_caches_equal_a_rebuild_when_rows_verify_different_widths(threshold: float) -> None:
    target = make_target(embed=20)
    drafter = make_bigram_drafter(target)
    engine = Engine(
        target, drafter, k=5, concurrency=3, capacity=60, confidence_threshold=threshold
    )
    rows = [engine.admit(request(n, range(n, n + 3), 20), 0.0) for n in range(3)]
    while engine.active:
        engine.step()
        check(engine, target, drafter)
    assert len({step.verified for row in rows for step in row.steps}) > 1


def test_caches_equal_a_rebuild_with_rows_that_come_go_and_move() -> None:
    target = make_target("qwen3", embed=20)
    drafter = make_bigram_drafter(target)
    chance = random.Random(4)
    engine = Engine(target, drafter, k=3, concurrency=3, capacity=60)
    for number in range(8):
        while not engine.free:
            engine.step()
            check(engine, target, drafter)
        tokens = chance.choices(range(VOCAB), k=chance.randint(1, 20))
        engine.admit(request(number, tokens, chance.randint(2, 12)), 0.0)
        check(engine, target, drafter)


def test_what_was_rejected_leaves_no_trace_in_later_drafts() -> None:
    """The drafter's blocks, one after another, equal those of an engine that saw no rejection."""
    target = make_target(embed=20)
    drafter = make_bigram_drafter(target)
    hidden: list[Tensor] = []
    engine = Engine(
        target,
        drafter,
        k=4,
        capacity=60,
        trace=lambda draft: hidden.append(draft.hidden[0].clone()),
    )
    row = engine.admit(request("a", [1, 2, 3], 24), 0.0)
    while row.finish_reason is None:
        text, start = [*row.request.tokens, *row.output], row.start
        engine.step()
        fresh: list[Tensor] = []
        twin = Engine(
            target, drafter, k=4, capacity=70, trace=lambda d, out=fresh: out.append(d.hidden[0])
        )
        twin_row = twin.admit(request("b", text[:start], 9), 0.0)
        twin_row.output[0] = text[start]  # the same anchor, whatever the prefill chose
        twin.step()
        torch.testing.assert_close(hidden[-1], fresh[0], atol=1e-4, rtol=1e-4)


def test_garbage_beyond_a_rows_length_is_never_read() -> None:
    """Stale K/V of a slot's earlier, longer request is covered by lengths alone."""
    target = make_target(embed=20)
    drafter = make_bigram_drafter(target)
    items = [request(n, range(n, n + 4), 20) for n in range(2)]
    expected = outputs(serve(Engine(target, drafter, k=4, concurrency=2, capacity=40), items))
    engine = Engine(target, drafter, k=4, concurrency=2, capacity=40)
    serve(engine, [request("old", range(20), 20), request("older", range(10), 20)])
    stores = [s for c in (engine.cache, engine.draft_cache) for s in (*c.keys, *c.values)]
    with torch.inference_mode():
        for store in stores:
            assert store is not None
            store.fill_(1e3)
    assert outputs(serve(engine, items)) == expected


def test_a_wrong_block_costs_no_later_acceptance() -> None:
    """Rejections must not shift the context: after one, the oracle is accepted whole again."""
    target = make_target(embed=20)
    drafter = make_bigram_drafter(target)
    item = request("a", [7, 8], 100)
    text = serve(Engine(target, capacity=102), [item])["a"].output
    rejected_at = {10, 11, 40}

    def propose(row: Row, k: int) -> list[int]:
        good = (text[len(row.output) :] + [0] * k)[:k]
        bad = len(row.steps) in rejected_at
        return [(token + 1) % VOCAB for token in good] if bad else good

    engine = Engine(target, drafter, k=1, capacity=102)
    with drafting(engine, propose):
        row = serve(engine, [item])["a"]
    assert row.output == text
    assert {i for i, step in enumerate(row.steps[:-1]) if not step.accepted} == rejected_at
