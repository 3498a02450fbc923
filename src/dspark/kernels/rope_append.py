"""Query/key norm, rotary embedding and the cache's new K and V: all between two products, in one kernel.

PyTorch takes eight to twelve for it. Queries come out ready for attention; keys and values go to where
they lie in the slot cache, and nowhere else.

Shapes: B tokens, R rows, H heads, G key/value heads, h head_dim, L cached positions.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from dspark.kernels.rows import Rows
from dspark.models.fused import Norm, rotate

HEADS = 8  # a program: of 128 dimensions, eight elements for each thread of four warps


def rope_append(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor],
    norms: tuple[Norm, Norm] | None,
    keys: Tensor,
    values: Tensor,
    rows: Rows,
) -> Tensor:
    """Queries [B, H, h] in qkv's dtype, normed and rotated; K and V are stored.

    Args:
        qkv: [B, (H + 2G) * h], contiguous.
        rope: cosines and signed sines [B, h] of the tokens' positions, see `models.fused.rope_factors`.
        norms: of queries and keys [h]; None where the family has none.
        keys: [R, G, L, h], the part of a slot cache that holds the rows; written at each token's row and
            position.
        values: as keys.
        rows: whose the tokens are.
    """
    _, groups, _, size = keys.shape
    count, heads = qkv.shape[0], qkv.shape[1] // size - 2 * groups
    query = qkv.new_empty(count, heads, size)
    of_query, of_key = norms or (None, None)
    _rope_append[(count, triton.cdiv(heads + 2 * groups, HEADS))](
        qkv,
        *(factor.contiguous() for factor in rope),
        qkv if of_query is None else of_query.weight,  # not read where there is none
        qkv if of_key is None else of_key.weight,
        query,
        keys,
        values,
        rows.owners,
        rows.positions,
        *keys.stride()[:3],
        *values.stride()[:3],
        0.0 if of_query is None else of_query.eps,
        HEADS=heads,
        GROUPS=groups,
        SIZE=size,
        NORMED=norms is not None,
        BLOCK=HEADS,
        DIMS=triton.next_power_of_2(size),
        num_warps=4,
    )
    return query


def reference(
    qkv: Tensor,
    rope: tuple[Tensor, Tensor],
    norms: tuple[Norm, Norm] | None,
    keys: Tensor,
    values: Tensor,
    rows: Rows,
) -> Tensor:
    """`rope_append` in PyTorch, as `models.fused` and `decode.cache` have it."""
    groups, size = keys.shape[1], keys.shape[3]
    heads = qkv.unflatten(-1, (-1, size))
    query, key, value = heads.split([heads.shape[1] - 2 * groups, groups, groups], dim=1)
    if norms is not None:
        query, key = norms[0](query), norms[1](key)
    cos, sin = (factor[:, None] for factor in rope)
    keys[rows.owners, :, rows.positions] = rotate(key, cos, sin)
    values[rows.owners, :, rows.positions] = value
    return rotate(query, cos, sin)


@triton.jit
def _rope_append(
    qkv: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    query_weight: tl.tensor,
    key_weight: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    owners: tl.tensor,
    positions: tl.tensor,
    key_row: tl.tensor,
    key_group: tl.tensor,
    key_place: tl.tensor,
    value_row: tl.tensor,
    value_group: tl.tensor,
    value_place: tl.tensor,
    eps: tl.tensor,
    HEADS: tl.constexpr,
    GROUPS: tl.constexpr,
    SIZE: tl.constexpr,
    NORMED: tl.constexpr,
    BLOCK: tl.constexpr,
    DIMS: tl.constexpr,
) -> None:
    """Some heads of one token; those of queries come first, then those of keys and of values."""
    token = tl.program_id(0).to(tl.int64)
    head, dim = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, DIMS)
    facing = (dim + SIZE // 2) % SIZE  # the dimension that it is rotated with
    held = (head < HEADS + 2 * GROUPS)[:, None] & (dim < SIZE)[None, :]
    start = qkv + (token * (HEADS + 2 * GROUPS) + head)[:, None] * SIZE
    raw = tl.load(start + dim[None, :], mask=held, other=0.0)
    x = raw.to(tl.float32)
    other = tl.load(start + facing[None, :], mask=held, other=0.0).to(tl.float32)
    is_query = (head < HEADS)[:, None]
    if NORMED:
        factor = tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None]
        x *= factor * _weights(query_weight, key_weight, is_query, dim, SIZE)
        other *= factor * _weights(query_weight, key_weight, is_query, facing, SIZE)
    at = token * SIZE + dim
    c = tl.load(cos + at, mask=dim < SIZE, other=0.0).to(tl.float32)
    s = tl.load(sin + at, mask=dim < SIZE, other=0.0).to(tl.float32)
    rotated = (x * c[None, :] + other * s[None, :]).to(raw.dtype)
    to = query + (token * HEADS + head)[:, None] * SIZE + dim[None, :]
    tl.store(to, rotated, mask=held & is_query)
    row, place = tl.load(owners + token), tl.load(positions + token)
    group = head - HEADS
    is_key = ((group >= 0) & (group < GROUPS))[:, None]
    to = keys + row * key_row + group[:, None] * key_group + place * key_place + dim[None, :]
    tl.store(to, rotated, mask=held & is_key)
    group -= GROUPS
    to = values + row * value_row + group[:, None] * value_group + place * value_place
    tl.store(to + dim[None, :], raw, mask=held & (group >= 0)[:, None])


@triton.jit
def _weights(
    query_weight: tl.tensor,
    key_weight: tl.tensor,
    is_query: tl.tensor,
    dim: tl.tensor,
    SIZE: tl.constexpr,
) -> tl.tensor:
    """The norm's weights of each head [BLOCK, DIMS] at dimensions [DIMS], float32."""
    of_query = tl.load(query_weight + dim, mask=dim < SIZE, other=0.0).to(tl.float32)
    of_key = tl.load(key_weight + dim, mask=dim < SIZE, other=0.0).to(tl.float32)
    return tl.where(is_query, of_query[None, :], of_key[None, :])
