"""Attention with grouped heads, and passes that hold rows of different lengths."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import LlamaModel

from dspark.config import DrafterShape
from dspark.decode.cache import SlotCache, causal_mask
from dspark.decode.engine import Engine, Request
from dspark.models.attention import Packing, attend, target_attention
from dspark.models.target import Target, load_target
from dspark.train.start import new_drafter
from tiny_models import FAMILIES, VOCAB, save_tiny_target

CPU = torch.device("cpu")
LENGTHS = st.lists(st.integers(1, 6), min_size=1, max_size=5)
close = partial(torch.testing.assert_close, atol=1e-5, rtol=1e-5)


def repeated(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None
) -> Tensor:
    """Attention with each K/V head written out once for every query head that reads it."""
    times = query.shape[1] // key.shape[1]
    key, value = key.repeat_interleave(times, 1), value.repeat_interleave(times, 1)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=scale)


@st.composite
def any_masks(draw: st.DrawFn, rows: int, width: int, length: int) -> Tensor | None:
    """Any bool mask by which each query sees something, for one row or all, one query or all."""
    shape = (draw(st.sampled_from([1, rows])), 1, draw(st.sampled_from([1, width])), length)
    generator = torch.Generator().manual_seed(draw(st.integers(0, 99)))
    mask = torch.rand(shape, generator=generator) < 0.5
    seen = torch.randint(length, shape[:-1], generator=generator)
    return draw(st.sampled_from([None, mask.scatter(-1, seen[..., None], True)]))


@settings(deadline=None, max_examples=80)
@given(
    data=st.data(),
    rows=st.integers(1, 3),
    groups=st.integers(1, 3),
    times=st.integers(1, 4),
    width=st.integers(1, 5),
    length=st.integers(1, 9),
    scale=st.sampled_from([None, 0.3]),
)
def test_grouped_heads_attend_as_repeated_ones(
    data: st.DataObject,
    rows: int,
    groups: int,
    times: int,
    width: int,
    length: int,
    scale: float | None,
) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(rows, groups * times, width, 8, generator=generator)
    key, value = torch.randn(2, rows, groups, length, 8, generator=generator)
    mask = data.draw(any_masks(rows, width, length))
    ours = attend(query, key, value, mask, scale)
    close(ours, repeated(query, key, value, mask, scale))


# --------------------------------------------------------------------------------------- packing


@given(lengths=LENGTHS)
def test_packed_rows_follow_each_other(lengths: list[int]) -> None:
    packing = Packing.of(lengths, CPU)
    assert (packing.rows, packing.width) == (len(lengths), max(lengths))
    places = zip(packing.owners.tolist(), packing.places.tolist(), strict=True)
    assert list(places) == [(row, at) for row, size in enumerate(lengths) for at in range(size)]


@given(lengths=LENGTHS, more=st.sampled_from([(), (3,), (2, 4)]))
def test_what_is_spread_comes_back_and_the_rest_is_the_first_token(
    lengths: list[int], more: tuple[int, ...]
) -> None:
    packing = Packing.of(lengths, CPU)
    packed = torch.randn(sum(lengths), *more)
    padded = packing.spread(packed)
    assert padded.shape == (len(lengths), max(lengths), *more)
    assert torch.equal(packing.pack(padded), packed)
    for row, part in enumerate(packed.split(lengths)):
        assert torch.equal(padded[row, : lengths[row]], part)
        assert (padded[row, lengths[row] :] == packed[0]).all()
    assert torch.equal(packing.pack(torch.ones_like(padded)), torch.ones_like(packed))


@pytest.mark.parametrize("dtype", [torch.int64, torch.bfloat16], ids=str)
def test_spreading_keeps_the_dtype(dtype: torch.dtype) -> None:
    packing = Packing.of([1, 2], CPU)
    assert packing.spread(torch.ones(3, dtype=dtype)).dtype is dtype


# ------------------------------------------------------------------- what transformers' layers call


@pytest.mark.parametrize("size", [1, 3, 7])
def test_no_mask_means_causal_up_to_the_newest_position(size: int) -> None:
    """transformers leaves a plain causal mask out; the queries are the last of 7 positions."""
    query = torch.randn(2, 4, size, 8)
    key, value = torch.randn(2, 2, 2, 7, 8)
    distance = torch.arange(7 - size, 7)[:, None] - torch.arange(7)
    expected = repeated(query, key, value, (distance >= 0)[None, None], 0.5).transpose(1, 2)
    close(target_attention(nn.Module(), query, key, value, None, 0.5)[0], expected)


@given(lengths=LENGTHS)
@settings(deadline=None, max_examples=20)
def test_packed_queries_attend_as_padded_ones(lengths: list[int]) -> None:
    packing = Packing.of(lengths, CPU)
    rows, width, length = len(lengths), max(lengths), 9
    packed = torch.randn(1, 4, sum(lengths), 8)
    key, value = torch.randn(2, rows, 2, length, 8)
    mask = causal_mask(torch.arange(2, 2 + width).expand(rows, -1), length)
    ours, _ = target_attention(nn.Module(), packed, key, value, mask, packing=packing)
    assert ours.shape == (1, sum(lengths), 4, 8)
    parts = zip(packed.split(lengths, dim=2), ours.split(lengths, dim=1), strict=True)
    for row, (query, out) in enumerate(parts):
        of_row = key[row : row + 1], value[row : row + 1], mask[row : row + 1, :, : lengths[row]]
        close(out, repeated(query, *of_row, None).transpose(1, 2))


@pytest.mark.parametrize("name", ["softcap", "s_aux", "position_bias"])
def test_what_this_attention_lacks_is_refused_by_name(name: str) -> None:
    states = torch.randn(1, 1, 2, 4)
    with pytest.raises(ValueError, match=f"attention with {name} is not supported"):
        target_attention(nn.Module(), states, states, states, None, **{name: torch.ones(1)})
    target_attention(nn.Module(), states, states, states, None, **{name: None})


# --------------------------------------------------------------- a whole target, row by row or packed

STARTS = [20, 3, 9]  # positions cached before the pass; the windowed families' window is 8
NEW = [2, 5, 1]  # tokens of each row in the pass
TAPS = [1, -1]


@pytest.fixture(params=list(FAMILIES))
def any_target(request: pytest.FixtureRequest, tmp_path: Path) -> Target:
    return load_target(save_tiny_target(tmp_path, request.param, layers=3), "cpu", torch.float32)


def texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(4)
    return [
        torch.randint(VOCAB, (start + new,), generator=generator)
        for start, new in zip(STARTS, NEW, strict=True)
    ]


def masks_of(target: Target, positions: Tensor, length: int) -> dict[str, Tensor]:
    return {k: causal_mask(positions, length, window) for k, window in target.windows.items()}


def pass_of_row(
    target: Target, cache: SlotCache, slot: int, tokens: Tensor, start: int
) -> tuple[Tensor, Tensor]:
    """Final states and taps [T, ...] of one slot's tokens from position `start` on, run alone."""
    length = start + len(tokens)
    positions = torch.arange(start, length)[None]
    cache.select(slice(slot, slot + 1), positions, length)
    masks = masks_of(target, positions, length)
    states, taps = target.forward(tokens[None], positions, cache, masks, TAPS)
    assert taps is not None
    return states[0], taps[0]


@torch.inference_mode()
def test_a_packed_pass_is_each_rows_own_pass(any_target: Target) -> None:
    """States, taps and what the cache holds afterwards, on every family."""
    target, slots = any_target, len(STARTS)
    assert target.packs
    caches = [SlotCache(target.num_layers, slots + 1, 32) for _ in range(2)]
    for row, text in enumerate(texts()):  # the first slot is another request's
        for cache in caches:
            pass_of_row(target, cache, row + 1, text[: STARTS[row]], 0)
    alone = [
        pass_of_row(target, caches[0], row + 1, text[STARTS[row] :], STARTS[row])
        for row, text in enumerate(texts())
    ]

    packing, length = Packing.of(NEW, CPU), max(STARTS) + max(NEW)
    positions = torch.tensor(STARTS)[:, None] + torch.arange(max(NEW))
    packed = packing.pack(positions)[None]
    caches[1].select(slice(1, slots + 1), packed, length, packing.owners)
    tokens = torch.cat([text[start:] for text, start in zip(texts(), STARTS, strict=True)])[None]
    masks = masks_of(target, positions, length)
    states, taps = target.forward(tokens, packed, caches[1], masks, TAPS, packing)
    assert taps is not None and states.shape[:2] == (1, sum(NEW))

    same = partial(torch.testing.assert_close, atol=1e-4, rtol=1e-4)
    same(states[0], torch.cat([row[0] for row in alone]))
    same(taps[0], torch.cat([row[1] for row in alone]))
    for kept in ("keys", "values"):
        for ours, expected in zip(getattr(caches[1], kept), getattr(caches[0], kept), strict=True):
            same(ours, expected)


# ------------------------------------------------------------------- families that do not pack


def dropping(forward: Any) -> Any:
    """A forward pass that takes the keyword and does nothing with it."""

    def dropped(*args: Any, packing: object = None, **kwargs: Any) -> Any:
        return forward(*args, **kwargs)

    return dropped


def refusing(forward: Any) -> Any:
    """A forward pass that does not know the keyword."""

    def refused(*args: Any, **kwargs: Any) -> Any:
        if "packing" in kwargs:
            raise TypeError("unexpected keyword argument 'packing'")
        return forward(*args, **kwargs)

    return refused


def ragged(confidence: Tensor) -> Tensor:
    """Limits that differ from row to row: 0, 1, 2, .."""
    return torch.arange(confidence.shape[0]) % (confidence.shape[1] + 1)


def decoded(target: Target, k: int) -> tuple[list[list[int]], set[int]]:
    """The texts of three requests that share a batch, and how many tokens a row verified."""
    drafter = new_drafter(DrafterShape(layers=1, taps=2), target, seed=1) if k else None
    engine = Engine(target, drafter, k=k, concurrency=3, capacity=64)
    if k:
        engine.decide = ragged
    prompts = [[40, 87, 5], [199] * 9, [255, 31]]
    rows = [engine.admit(Request(str(n), 0, ids, 24), 0.0) for n, ids in enumerate(prompts)]
    while engine.active:
        engine.step()
    return [row.output for row in rows], {step.verified for row in rows for step in row.steps}


@pytest.mark.parametrize("forward", [dropping, refusing], ids=["drops", "refuses"])
def test_a_family_that_does_not_hand_the_packing_on_is_decoded_in_rectangles(
    target_path: Path, monkeypatch: pytest.MonkeyPatch, forward: Any
) -> None:
    expected, _ = decoded(load_target(target_path, "cpu", torch.float32), 0)
    monkeypatch.setattr(LlamaModel, "forward", forward(LlamaModel.forward))
    target = load_target(target_path, "cpu", torch.float32)
    assert not target.packs
    assert decoded(target, 3) == (expected, {0, 1, 2})


def test_ragged_rows_are_decoded_right_where_they_are_packed(target: Target) -> None:
    assert target.packs
    assert decoded(target, 3) == (decoded(target, 0)[0], {0, 1, 2})
