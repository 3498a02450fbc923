"""Attention of a verification's few tokens a row to K and V as they lie in the slot cache.

Rows differ in length, and the mask follows from the tokens' positions: nothing is copied, padded or
written out. The query heads of a group are the rows of one product with the group's K, as in
`models.attention.attend`. A row's keys are cut into parts for different programs, since one request
alone has fewer heads than the device multiprocessors; a second kernel adds the parts up.

Shapes: R rows, B tokens in all, H heads, G key/value heads, h head_dim, L cached positions, S parts.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.rows import Rows
from dspark.models.attention import attend

# Keys of a block. In half precision K and V of 64 x 128 are 32 KiB, and three of them in flight fit a
# Hopper multiprocessor twice; 16 to 64 queries times 64 keys leave four warps on tensor cores 80 to 240
# registers a thread. Exact float32 has no tensor cores: each thread multiplies for itself, and with more
# than 16 keys, or fewer warps, what it holds no longer fits its registers.
KEYS, KEYS_FLOAT32 = 64, 16
LEAST_KEYS = 128  # of a part: with less a program's start costs more than its reads
PROGRAMS = 264  # two for each multiprocessor of an H100 or H200: more only add to what is merged
LOG2_E = 1.4426950408889634  # exp2 is what the hardware has


def attend_rows(
    query: Tensor, keys: Tensor, values: Tensor, rows: Rows, scale: float, window: int | None
) -> Tensor:
    """Attention [B, H, h] of queries [B, H, h], in their dtype; scores and sums are float32.

    Args:
        keys: [R, G, L, h], the part of a slot cache that holds the rows; what lies beyond a row's last
            token is not read.
        values: as keys.
        rows: whose the tokens are; a token sees its row's positions up to its own.
        window: how many of these at most, the latest; None sees them all.
    """
    tokens, heads, size = query.shape
    count, groups, length, _ = keys.shape
    repeats = heads // groups
    parts = part_count(length, count * groups)
    exact = query.dtype is torch.float32
    block = KEYS_FLOAT32 if exact else KEYS
    blocks = triton.cdiv(triton.cdiv(length, parts), block)
    query = query.contiguous()
    out = torch.empty_like(query)
    sums = query.new_empty(parts, tokens, heads, size, dtype=torch.float32) if parts > 1 else out
    peaks, masses = query.new_empty(2, parts, tokens, heads, dtype=torch.float32)
    dims = max(16, triton.next_power_of_2(size))
    items = max(16, triton.next_power_of_2(rows.width * repeats))
    _attend_part[(count, groups, parts)](
        query,
        keys,
        values,
        sums,
        peaks,
        masses,
        rows.first,
        rows.positions,
        *keys.stride()[:3],
        *values.stride()[:3],
        tokens,
        heads,
        blocks * block,
        scale * LOG2_E,
        REPEATS=repeats,
        SIZE=size,
        PARTS=parts,
        WINDOW=window or 0,
        ITEMS=items,
        DIMS=dims,
        BLOCK=block,
        num_warps=min(16, items // 4) if exact else 4,
        num_stages=3,
    )
    if parts > 1:
        _merge[(tokens, heads)](
            sums, peaks, masses, out, tokens, heads, SIZE=size, PARTS=parts, DIMS=dims, num_warps=2
        )
    return out


def part_count(length: int, programs: int) -> int:
    """Into how many parts `length` keys are cut for `programs` programs a part: a power of two."""
    wanted = min(length // LEAST_KEYS, PROGRAMS // programs)
    return 1 << max(0, wanted.bit_length() - 1)


def reference(
    query: Tensor, keys: Tensor, values: Tensor, rows: Rows, scale: float, window: int | None
) -> Tensor:
    """`attend_rows` in PyTorch, as a target without kernels attends."""
    packing = rows.packing()
    places = torch.arange(keys.shape[2], device=keys.device)
    ages = packing.spread(rows.positions)[..., None] - places  # [R, W, L]
    mask = (ages >= 0) & (ages < (window or keys.shape[2]))
    spread = packing.spread(query).transpose(1, 2)
    return packing.pack(attend(spread, keys, values, mask[:, None], scale).transpose(1, 2))


@triton.jit
def _attend_part(
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    sums: tl.tensor,
    peaks: tl.tensor,
    masses: tl.tensor,
    first: tl.tensor,
    positions: tl.tensor,
    key_row: tl.tensor,
    key_group: tl.tensor,
    key_place: tl.tensor,
    value_row: tl.tensor,
    value_group: tl.tensor,
    value_place: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    part_keys: tl.tensor,
    scale: tl.tensor,
    REPEATS: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    WINDOW: tl.constexpr,
    ITEMS: tl.constexpr,
    DIMS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One part of one row's keys, for all of the row's queries in one group; a whole row is divided."""
    row, group, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    item, dim = tl.arange(0, ITEMS), tl.arange(0, DIMS)
    token = tl.load(first + row) + item // REPEATS
    head = group * REPEATS + item % REPEATS
    live = token < tl.load(first + row + 1)
    place = tl.load(positions + token, mask=live, other=-1).to(tl.int32)
    held = (dim < SIZE)[None, :]
    asked = tl.load(
        query + (token * heads + head)[:, None] * SIZE + dim[None, :],
        mask=live[:, None] & held,
        other=0.0,
    )
    keys += row * key_row + group * key_group
    values += row * value_row + group * value_group
    low = part * part_keys
    high = tl.minimum(low + part_keys, tl.max(place, 0) + 1)
    if WINDOW:
        oldest = tl.min(tl.where(live, place, 2147483647), 0) - WINDOW + 1
        low = tl.maximum(low, oldest // BLOCK * BLOCK)
    peak = tl.full([ITEMS], float("-inf"), tl.float32)
    mass = tl.zeros([ITEMS], tl.float32)
    total = tl.zeros([ITEMS, DIMS], tl.float32)
    for start in range(low, high, BLOCK):
        at = start + tl.arange(0, BLOCK)
        there = (at < high)[:, None] & held
        key = tl.load(keys + at[:, None] * key_place + dim[None, :], mask=there, other=0.0)
        scores = tl.dot(asked, tl.trans(key), input_precision="ieee") * scale
        seen = at[None, :] <= place[:, None]
        if WINDOW:
            seen = seen & (at[None, :] > place[:, None] - WINDOW)
        scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(peak, tl.max(scores, 1))
        # Where no key was seen yet: -inf less -inf is NaN.
        base = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(scores - base[:, None])
        fade = tl.exp2(peak - base)
        value = tl.load(values + at[:, None] * value_place + dim[None, :], mask=there, other=0.0)
        mass = mass * fade + tl.sum(weight, 1)
        total = total * fade[:, None]
        total += tl.dot(weight.to(value.dtype), value, input_precision="ieee")
        peak = higher
    to = (part * tokens + token) * heads + head
    if PARTS == 1:
        total = (total / mass[:, None]).to(sums.dtype.element_ty)
    tl.store(sums + to[:, None] * SIZE + dim[None, :], total, mask=live[:, None] & held)
    if PARTS > 1:
        tl.store(peaks + to, peak, mask=live)
        tl.store(masses + to, mass, mask=live)


@triton.jit
def _merge(
    sums: tl.tensor,
    peaks: tl.tensor,
    masses: tl.tensor,
    out: tl.tensor,
    tokens: tl.tensor,
    heads: tl.tensor,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    DIMS: tl.constexpr,
) -> None:
    """The parts of one head of one token."""
    part, dim = tl.arange(0, PARTS), tl.arange(0, DIMS)
    here = tl.program_id(0).to(tl.int64) * heads + tl.program_id(1)
    at = part * tokens * heads + here
    held = (dim < SIZE)[None, :]
    peak = tl.load(peaks + at)
    top = tl.max(peak, 0)
    weight = tl.exp2(peak - top)
    mass = tl.sum(weight * tl.load(masses + at), 0)
    total = tl.load(sums + at[:, None] * SIZE + dim[None, :], mask=held, other=0.0)
    merged = tl.sum(weight[:, None] * total, 0) / mass
    tl.store(out + here * SIZE + dim, merged.to(out.dtype.element_ty), mask=dim < SIZE)
