"""Continuous batching: rows come, go and move without touching each other."""

from __future__ import annotations

import random

import pytest
import torch
from decode_helpers import (
    VOCAB,
    alone,
    drafting,
    make_bigram_drafter,
    make_target,
    need,
    outputs,
    request,
    serve,
)

from dspark.decode.cache import SlotCache, causal_mask
from dspark.decode.draft import Draft
from dspark.decode.engine import Engine, Request
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target


@pytest.fixture(scope="module")
def target() -> Target:
    return make_target("qwen3", embed=20)


@pytest.fixture(scope="module")
def drafter(target: Target) -> DSparkDrafter:
    return make_bigram_drafter(target)


def random_requests(count: int, seed: int = 0, longest: int = 20) -> list[Request]:
    chance = random.Random(seed)
    return [
        request(
            n, chance.choices(range(VOCAB), k=chance.randint(1, 30)), chance.randint(1, longest)
        )
        for n in range(count)
    ]


def storage(engine: Engine) -> list[int]:
    stores = [*engine.cache.keys, *engine.cache.values]
    stores += [*engine.draft_cache.keys, *engine.draft_cache.values]
    return [store.data_ptr() for store in stores if store is not None]


def test_all_slots_are_free_after_hundreds_of_requests(
    target: Target, drafter: DSparkDrafter
) -> None:
    requests = random_requests(200, longest=6)
    engine = Engine(target, drafter, k=3, concurrency=4, capacity=need(requests))
    rows = serve(engine, requests)
    assert len(rows) == 200
    assert (engine.free, engine.active) == (4, 0)
    assert engine.slots == [None] * 4


def test_an_engine_is_as_good_as_new_after_use(target: Target, drafter: DSparkDrafter) -> None:
    requests = random_requests(12, seed=5)
    engine = Engine(target, drafter, k=3, concurrency=3, capacity=need(requests))
    first = serve(engine, requests)
    again = serve(engine, requests)
    assert outputs(again) == outputs(first)
    for name, row in again.items():
        assert [step.accepted for step in row.steps] == [s.accepted for s in first[name].steps]


def test_buffers_keep_their_storage_and_size(target: Target, drafter: DSparkDrafter) -> None:
    requests = random_requests(20, seed=1)
    engine = Engine(target, drafter, k=5, concurrency=3, capacity=need(requests))
    engine.admit(requests[0], 0.0)
    engine.step()
    before = storage(engine)
    serve(engine, requests[1:])
    assert storage(engine) == before
    assert len(before) == 2 * (target.num_layers + len(drafter.layers))


@pytest.mark.parametrize("k", [0, 3])
def test_a_newcomer_touches_its_own_slot_alone(
    target: Target, drafter: DSparkDrafter, k: int
) -> None:
    engine = Engine(target, drafter, k=k, concurrency=3, capacity=80)
    rows = [engine.admit(request(n, range(n, n + 9), 40), 0.0) for n in (1, 2)]
    engine.step()
    stores = [s for c in (engine.cache, engine.draft_cache) for s in (*c.keys, *c.values)]
    before = [store[:2].clone() for store in stores if store is not None]
    engine.admit(request(3, range(30), 40), 0.0)
    assert engine.slots[:2] == rows
    for store, old in zip(stores, before, strict=True):
        assert store is not None and torch.equal(store[:2], old)


def test_rows_that_are_joined_at_any_step_keep_their_text(
    target: Target, drafter: DSparkDrafter
) -> None:
    """Prefill of one request while others are in the middle of verification, at every moment."""
    first, second = request("first", [3, 4], 20), request("second", range(1, 28), 12)
    expected = {r.prompt_id: alone(target, r).output for r in (first, second)}
    for moment in range(8):
        engine = Engine(target, drafter, k=2, concurrency=2, capacity=need([first, second]))
        rows = [engine.admit(first, 0.0)]
        for _ in range(moment):
            engine.step()
        rows.append(engine.admit(second, 0.0))
        while engine.active:
            engine.step()
        assert {row.request.prompt_id: row.output for row in rows} == expected


def test_rows_that_move_keep_their_text(target: Target, drafter: DSparkDrafter) -> None:
    """The first slots' requests end early, so the later ones are moved down, twice."""
    requests = [request(n, range(n, n + 5), new) for n, new in enumerate((2, 4, 18, 22))]
    expected = {r.prompt_id: alone(target, r).output for r in requests}
    for k in (0, 1, 4):
        engine = Engine(target, drafter, k=k, concurrency=4, capacity=need(requests))
        rows = [engine.admit(item, 0.0) for item in requests]
        places = set()
        while engine.active:
            engine.step()
            places.add(tuple(slot and slot.request.prompt_id for slot in engine.slots))
        assert {row.request.prompt_id: row.output for row in rows} == expected
        assert any(place[0] == "3" for place in places)  # it began in the last slot


def traced(
    target: Target, drafter: DSparkDrafter, requests: list[Request], slots: int
) -> dict[str, list[torch.Tensor]]:
    """The states of every block that was drafted for each request."""
    states: dict[str, list[torch.Tensor]] = {item.prompt_id: [] for item in requests}

    def keep(draft: Draft) -> None:
        rows = [row for row in engine.slots if row is not None]
        for row, hidden in zip(rows, draft.hidden, strict=True):
            states[row.request.prompt_id].append(hidden.clone())

    engine = Engine(target, drafter, k=2, concurrency=slots, capacity=need(requests), trace=keep)
    serve(engine, requests)
    return states


def test_drafts_do_not_depend_on_who_shares_the_batch(
    target: Target, drafter: DSparkDrafter
) -> None:
    """Not on slots that rows were moved from, nor on longer rows; wrong drafts would not show in
    the text, only in the acceptance."""
    requests = random_requests(10, seed=2)
    together = traced(target, drafter, requests, slots=4)
    for item in requests:
        single = traced(target, drafter, [item], slots=1)[item.prompt_id]
        assert len(single) == len(together[item.prompt_id])
        for ours, expected in zip(together[item.prompt_id], single, strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 1, 0, 2), (2, 3, 1, 0)])
def test_the_order_of_rows_permutes_outputs_and_steps(
    target: Target, drafter: DSparkDrafter, order: tuple[int, ...]
) -> None:
    requests = random_requests(4, seed=9)
    expected = {
        item.prompt_id: alone(target, item, drafter, 3)  # steps too: nothing depends on the batch
        for item in requests
    }
    engine = Engine(target, drafter, k=3, concurrency=4, capacity=need(requests))
    rows = serve(engine, [requests[index] for index in order])
    for name, row in rows.items():
        assert row.output == expected[name].output
        for field in ("emitted", "drafted", "verified", "accepted", "cut"):
            ours = [getattr(step, field) for step in row.steps]
            assert ours == [getattr(step, field) for step in expected[name].steps]


def test_rows_with_different_acceptance_in_one_batch(
    target: Target, drafter: DSparkDrafter
) -> None:
    """One row accepts all, one nothing, one by turns: lengths drift far apart."""
    items = [request(n, [n, n + 1, n + 2], 40) for n in range(3)]
    texts = {item.prompt_id: alone(target, item).output for item in items}

    def propose(row: object, k: int) -> list[int]:
        name, done = row.request.prompt_id, len(row.output)  # type: ignore[attr-defined]
        good = (texts[name][done:] + [0] * k)[:k]
        bad = [(token + 1) % VOCAB for token in good]
        if name == "0":
            return good
        return bad if name == "1" or done % 2 else good

    engine = Engine(target, drafter, k=5, concurrency=3, capacity=need(items))
    with drafting(engine, propose):
        rows = serve(engine, items)
    assert outputs(rows) == texts
    assert len(rows["0"].steps) == 7
    assert len(rows["1"].steps) == 39


def test_the_last_position_of_the_capacity_is_not_shared_with_the_neighbour(
    target: Target, drafter: DSparkDrafter
) -> None:
    """Drafts and verification reach past a row's budget; its neighbour must not notice."""
    full, neighbour = request("full", range(20), 10), request("next", range(5, 25), 10)
    texts = {item.prompt_id: alone(target, item).output for item in (full, neighbour)}
    for k in (1, 4, 7):
        engine = Engine(target, drafter, k=k, concurrency=2, capacity=30)
        assert outputs(serve(engine, [full, neighbour])) == texts
        engine = Engine(target, drafter, k=k, concurrency=2, capacity=30)
        assert outputs(serve(engine, [neighbour, full])) == texts


def test_token_ids_given_to_the_model_are_ids(
    target: Target, drafter: DSparkDrafter, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    forward = target.forward

    def watch(tokens: torch.Tensor, positions: torch.Tensor, *rest: object) -> object:
        seen.append((tokens, positions))
        return forward(tokens, positions, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(target, "forward", watch)
    serve(Engine(target, drafter, k=3, concurrency=3, capacity=60), random_requests(9, seed=3))
    for tokens, positions in seen:
        assert int(tokens.min()) >= 0 and int(tokens.max()) < VOCAB
        assert bool((positions.diff(dim=-1) == 1).all())  # strictly consecutive in every row


def test_a_moved_slot_is_copied_whole_and_others_stay() -> None:
    cache = SlotCache(layers=2, slots=3, capacity=4)
    cache.move(2, 0)  # nothing is stored yet: nothing to copy
    for layer in range(2):
        cache.select(slice(0, 3), torch.arange(4).expand(3, 4), 4)
        cache.write(layer, torch.randn(3, 2, 4, 5), torch.randn(3, 2, 4, 5))
    before = [store.clone() for store in (*cache.keys, *cache.values) if store is not None]
    cache.move(2, 0)
    after = [store for store in (*cache.keys, *cache.values) if store is not None]
    for old, new in zip(before, after, strict=True):
        assert torch.equal(new[0], old[2])
        assert torch.equal(new[1:], old[1:])


def test_writes_go_to_each_rows_own_positions() -> None:
    cache = SlotCache(layers=1, slots=3, capacity=6)
    positions = torch.tensor([[0, 1], [3, 4]])
    key, value = torch.randn(2, 2, 2, 5), torch.randn(2, 2, 2, 5)
    cache.select(slice(1, 3), positions, 5)
    keys, values = cache.update(key, value, 0)
    assert keys.shape == values.shape == (2, 2, 5, 5)
    for row in range(2):
        for index, position in enumerate(positions[row].tolist()):
            assert torch.equal(keys[row, :, position], key[row, :, index])
            assert torch.equal(values[row, :, position], value[row, :, index])
    assert cache.keys[0] is not None
    assert not cache.keys[0][0].any() and not keys[0, :, 2:].any() and not keys[1, :, :3].any()


def test_a_token_sees_itself_what_came_before_and_no_more_than_its_window() -> None:
    positions = torch.tensor([[0, 1], [4, 5]])
    mask = causal_mask(positions, 7, window=3)
    assert mask.shape == (2, 1, 2, 7)
    for row in range(2):
        for index, position in enumerate(positions[row].tolist()):
            seen = [key for key in range(7) if mask[row, 0, index, key]]
            assert seen == [key for key in range(7) if position - 3 < key <= position]
            whole = causal_mask(positions, 7)[row, 0, index].nonzero().flatten().tolist()
            assert whole == list(range(position + 1))
