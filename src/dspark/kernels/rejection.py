"""Rejection sampling of a draft in two kernels; `decode.verify.accept_sampled` is the reference.

The token that follows is drawn from the target's distribution, or from what it has more than the
draft's. Neither is written out: tiles of the vocabulary are summed, then one program a row finds the tile
that its uniform falls into and the token there. Sums are float64, as the reference's are.

Shapes: R rows, k drafted, V vocabulary, N tiles.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

TILE = 1024  # tokens: four warps with eight float32 each of both distributions


def accept_sampled(
    target: Tensor, draft: Tensor, drafted: Tensor, limits: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Accepted counts [R] and next tokens [R], int64, as `decode.verify.accept_sampled`.

    Args:
        target: the target's distributions [R, k+1, V] float32.
        draft: what each draft token was drawn from [R, k, V] float32.
        drafted: draft tokens [R, k] int64.
        limits: how many of each row's draft tokens may be accepted [R] int64.
        uniforms: [R, k+1] float32 in [0, 1): one for each test, the last for the token that follows.
    """
    count, width = drafted.shape
    vocab = target.shape[2]
    tiles = triton.cdiv(vocab, TILE)
    drafted, limits, uniforms = drafted.contiguous(), limits.contiguous(), uniforms.contiguous()
    accepted, following = limits.new_empty(2, count)
    plain, excess = target.new_empty(2, count, tiles, dtype=torch.float64)
    _sum_tile[(count, tiles)](
        target,
        draft,
        drafted,
        limits,
        uniforms,
        accepted,
        plain,
        excess,
        target.stride(0),
        draft.stride(0),
        vocab,
        tiles,
        WIDTH=width,
        COLUMNS=triton.next_power_of_2(width + 1),
        TILE=TILE,
        num_warps=4,
    )
    _draw[(count,)](
        target,
        draft,
        limits,
        uniforms,
        accepted,
        plain,
        excess,
        following,
        target.stride(0),
        draft.stride(0),
        vocab,
        tiles,
        WIDTH=width,
        TILE=TILE,
        TILES=triton.next_power_of_2(tiles),
        num_warps=4,
    )
    return accepted, following


@triton.jit
def _sum_tile(
    target: tl.tensor,
    draft: tl.tensor,
    drafted: tl.tensor,
    limits: tl.tensor,
    uniforms: tl.tensor,
    accepted: tl.tensor,
    plain: tl.tensor,
    excess: tl.tensor,
    target_row: tl.tensor,
    draft_row: tl.tensor,
    vocab: tl.tensor,
    tiles: tl.tensor,
    WIDTH: tl.constexpr,
    COLUMNS: tl.constexpr,
    TILE: tl.constexpr,
) -> None:
    """Probability of one tile where a row's draft ends, and what of it exceeds the draft's.

    Every program finds the end itself: that takes a few loads, another kernel would take a launch.
    """
    row, tile, column = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.arange(0, COLUMNS)
    target += row * target_row
    draft += row * draft_row
    judged = column < WIDTH
    token = tl.load(drafted + row * WIDTH + column, mask=judged, other=0)
    p = tl.load(target + column * vocab + token, mask=judged, other=0.0)
    q = tl.load(draft + column * vocab + token, mask=judged, other=0.0)
    uniform = tl.load(uniforms + row * (WIDTH + 1) + column, mask=judged, other=0.0)
    kept = judged & (uniform * q < p) & (column < tl.load(limits + row))
    end = tl.min(tl.where(kept, COLUMNS, column), 0)  # the first that is not kept
    p, more = _masses(target, draft, end, tile, vocab, WIDTH, TILE)
    tl.store(accepted + row, end.to(tl.int64))
    tl.store(plain + row * tiles + tile, tl.sum(p, 0))
    tl.store(excess + row * tiles + tile, tl.sum(more, 0))


@triton.jit
def _masses(
    target: tl.tensor,
    draft: tl.tensor,
    end: tl.tensor,
    tile: tl.tensor,
    vocab: tl.tensor,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor]:
    """The target's probabilities [TILE] after `end` tokens and what exceeds the draft's, float64."""
    at = tile * TILE + tl.arange(0, TILE)
    p = tl.load(target + end * vocab + at, mask=at < vocab, other=0.0)
    more = p
    # Behind a whole block there is no draft: nothing reads what this makes of the block's last.
    if WIDTH > 0:
        last = tl.minimum(end, WIDTH - 1)
        more = p - tl.load(draft + last * vocab + at, mask=at < vocab, other=0.0)
        more = tl.where(more < 0.0, 0.0, more)
    return p.to(tl.float64), more.to(tl.float64)


@triton.jit
def _draw(
    target: tl.tensor,
    draft: tl.tensor,
    limits: tl.tensor,
    uniforms: tl.tensor,
    accepted: tl.tensor,
    plain: tl.tensor,
    excess: tl.tensor,
    following: tl.tensor,
    target_row: tl.tensor,
    draft_row: tl.tensor,
    vocab: tl.tensor,
    tiles: tl.tensor,
    WIDTH: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
) -> None:
    """One row's following token."""
    row, tile = tl.program_id(0).to(tl.int64), tl.arange(0, TILES)
    end = tl.load(accepted + row)
    of_target = tl.load(plain + row * tiles + tile, mask=tile < tiles, other=0.0)
    of_excess = tl.load(excess + row * tiles + tile, mask=tile < tiles, other=0.0)
    # Equal up to rounding leave no excess, and then the target's own is right: as the reference has it.
    rejected = (end < tl.load(limits + row)) & (tl.sum(of_excess, 0) > 1e-8)
    mass = tl.where(rejected, of_excess, of_target)
    whole = tl.sum(mass, 0)
    threshold = tl.load(uniforms + row * (WIDTH + 1) + WIDTH).to(tl.float64) * whole
    chosen = _first_above(mass, tile, 0.0, threshold, TILES)
    before = tl.sum(tl.where(tile < chosen, mass, 0.0), 0)
    p, more = _masses(
        target + row * target_row, draft + row * draft_row, end, chosen, vocab, WIDTH, TILE
    )
    token = _first_above(tl.where(rejected, more, p), tl.arange(0, TILE), before, threshold, TILE)
    token = tl.where(whole > 0.0, chosen * TILE + token, vocab - 1)  # as with sums that are NaN
    tl.store(following + row, token.to(tl.int64))


@triton.jit
def _first_above(
    mass: tl.tensor, index: tl.tensor, before: tl.tensor, threshold: tl.tensor, SIZE: tl.constexpr
) -> tl.tensor:
    """The first index whose mass brings the sum, from `before` on, above the threshold.

    Where rounding leaves none it is the last that has a mass: what is impossible is never drawn.
    """
    above = (mass > 0.0) & (before + tl.cumsum(mass, 0) > threshold)
    first = tl.min(tl.where(above, index, SIZE), 0)
    last = tl.max(tl.where(mass > 0.0, index, 0), 0)
    return tl.minimum(first, last)
