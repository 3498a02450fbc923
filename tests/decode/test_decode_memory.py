"""KV caches are counted before they are allocated, and what would fit is told."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from decode_helpers import make_drafter, make_target, request, serve
from hypothesis import given
from hypothesis import strategies as st

import dspark.decode.memory
from dspark.decode.cache import SlotCache
from dspark.decode.engine import Engine
from dspark.decode.memory import affordable, check_engines, room_explained, slot_bytes
from dspark.errors import UserError
from tiny_models import FAMILIES


def allocated(*caches: SlotCache) -> int:
    stores = [store for cache in caches for store in (*cache.keys, *cache.values)]
    return sum(store.numel() * store.element_size() for store in stores if store is not None)


@pytest.mark.parametrize("family", sorted(FAMILIES))
@pytest.mark.parametrize("k", [0, 3])
def test_what_is_counted_is_what_is_allocated(family: str, k: int) -> None:
    target = make_target(family)
    drafter = make_drafter(target) if k else None
    engine = Engine(target, drafter, k=k, concurrency=3, capacity=20)
    serve(engine, [request("p", [1, 2], 4)])
    counted = slot_bytes(target, engine.drafter, engine.cache.capacity)
    assert 3 * counted == allocated(engine.cache, engine.draft_cache)


@given(free=st.integers(0, 2**60), slot=st.integers(1, 2**40), concurrency=st.integers(1, 10**9))
def test_what_is_affordable_fits_and_is_less(free: int, slot: int, concurrency: int) -> None:
    fitting = affordable(free, slot, concurrency)
    assert 0 <= fitting < concurrency
    assert fitting * slot <= free
    if (concurrency - 1) * slot > free:  # the caches alone decide: one more would not fit
        assert (fitting + 1) * slot > free


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Sets what the device has free."""

    def put(count: int) -> None:
        monkeypatch.setattr(dspark.decode.memory, "free_bytes", lambda device: count)

    return put


def refused(call: Any) -> str:
    with pytest.raises(UserError) as caught:
        call()
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_a_concurrency_beyond_all_memory_is_refused_before_anything_is_allocated() -> None:
    target = make_target()
    message = refused(lambda: Engine(target, concurrency=10**12, capacity=500))
    assert "the KV caches of 1000000000000 requests at once take" in message
    assert f"{target.weight_bytes / 2**30:.3g} GiB of weights: set engine.concurrency=" in message
    told = int(message.rsplit("=", 1)[1])
    assert 0 < told < 10**12


def test_the_refusal_names_what_fits(free: Any) -> None:
    target = make_target()
    slot = slot_bytes(target, None, 21)  # capacity and the token behind it
    free(5 * slot + slot // 2)
    Engine(target, concurrency=5, capacity=20)
    assert refused(lambda: Engine(target, concurrency=6, capacity=20)).endswith("concurrency=5")
    free(slot - 1)
    message = refused(lambda: Engine(target, concurrency=1, capacity=20))
    assert message.endswith("lower max_new_tokens or take a device with more memory")


def test_all_engines_of_a_job_count(free: Any) -> None:
    target = make_target()
    drafter = make_drafter(target)
    plain = Engine(target, concurrency=4, capacity=20)
    drafted = Engine(target, drafter, k=3, concurrency=4, capacity=20)
    slot = slot_bytes(target, None, plain.cache.capacity)
    slot += slot_bytes(target, drafter, drafted.cache.capacity)
    free(4 * slot)
    check_engines([plain, drafted])
    free(4 * slot - 1)
    assert refused(lambda: check_engines([plain, drafted])).endswith("engine.concurrency=3")


def test_a_gpu_that_runs_out_of_memory_says_what_would_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target()
    engine = Engine(target, concurrency=4, capacity=20)

    def full(*_args: Any, **_kwargs: Any) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")

    monkeypatch.setattr(torch.Tensor, "new_zeros", full)  # with which the caches are allocated

    def run() -> None:
        with room_explained([engine]):
            serve(engine, [request("p", [1, 2], 4)])

    message = refused(run)
    assert "out of memory: the KV caches of 4 requests at once take" in message
    assert message.endswith("set engine.concurrency=2")  # they would fit: the rest grows with them


def test_other_failures_are_not_taken_for_it() -> None:
    engine = Engine(make_target(), capacity=20)
    with pytest.raises(ValueError, match="something else"), room_explained([engine]):
        raise ValueError("something else")
