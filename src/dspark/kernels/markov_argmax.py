"""The Markov head's choice in one go: argmax of base logits plus bias, which are never written out.

A draft's chain reads W2 once for each position. In PyTorch the bias is written, read, added, written and
read again beside it; here each program reads its rows of W2 and leaves one number for each row.

Shapes: R rows, Vd draft vocabulary, r Markov rank, N tiles of the vocabulary.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 64  # at most, that share one read of W2
VOCAB = 128  # rows of W2 a program: 1187 programs for Qwen3's vocabulary, nine a multiprocessor
RANK = 64  # of W2 at a time: a tile of bfloat16 has 16 KiB, and four loads in flight hide their latency


def markov_argmax(base: Tensor, latent: Tensor, weight: Tensor) -> Tensor:
    """Draft tokens [R] int64: argmax of base [R, Vd] + latent [R, r] · weight^T [r, Vd].

    Bias and sum are rounded to base's dtype, as PyTorch's are. NaN counts as the greatest, and of the
    greatest the first is taken.

    Args:
        base: any row stride, as a position of a block's logits has.
        weight: W2 [Vd, r].
    """
    count, vocab = base.shape
    rank = weight.shape[1]
    tiles = triton.cdiv(vocab, VOCAB)
    best = base.new_empty(tiles, count, dtype=torch.int64)
    tokens = base.new_empty(count, dtype=torch.int64)
    rows = min(ROWS, max(16, triton.next_power_of_2(count)))
    _best_of_tile[(tiles, triton.cdiv(count, rows))](
        base,
        latent.contiguous(),
        weight.contiguous(),
        best,
        base.stride(0),
        count,
        vocab,
        RANK=rank,
        ROWS=rows,
        TILE=VOCAB,
        STEP=min(RANK, max(16, triton.next_power_of_2(rank))),
        num_warps=4,
        num_stages=4,
    )
    _best_of_all[(count,)](
        best, tokens, count, tiles, TILES=triton.next_power_of_2(tiles), num_warps=4
    )
    return tokens


def reference(base: Tensor, latent: Tensor, weight: Tensor) -> Tensor:
    """`markov_argmax` in PyTorch, as `decode.draft.choose_tokens` has it."""
    return (base + torch.nn.functional.linear(latent, weight)).argmax(-1)


@triton.jit
def _best_of_tile(
    base: tl.tensor,
    latent: tl.tensor,
    weight: tl.tensor,
    best: tl.tensor,
    base_row: tl.tensor,
    count: tl.tensor,
    vocab: tl.tensor,
    RANK: tl.constexpr,
    ROWS: tl.constexpr,
    TILE: tl.constexpr,
    STEP: tl.constexpr,
) -> None:
    """The best of one tile for some rows: a number that is the greater the better, see `_ordered`."""
    tile = tl.program_id(0)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    token = tile * TILE + tl.arange(0, TILE)
    there, known = row < count, token < vocab
    bias = tl.zeros([ROWS, TILE], tl.float32)
    for start in range(0, RANK, STEP):
        at = start + tl.arange(0, STEP)
        left = tl.load(
            latent + row[:, None] * RANK + at[None, :],
            mask=there[:, None] & (at < RANK)[None, :],
            other=0.0,
        )
        right = tl.load(
            weight + token.to(tl.int64)[:, None] * RANK + at[None, :],
            mask=known[:, None] & (at < RANK)[None, :],
            other=0.0,
        )
        bias = tl.dot(left, tl.trans(right), bias, input_precision="ieee")
    logits = tl.load(
        base + row.to(tl.int64)[:, None] * base_row + token[None, :],
        mask=there[:, None] & known[None, :],
        other=float("-inf"),
    )
    kind = logits.dtype
    logits = (logits.to(tl.float32) + bias.to(kind).to(tl.float32)).to(kind).to(tl.float32)
    order = _ordered(logits, token[None, :])
    order = tl.where(known[None, :], order, -9223372036854775807)
    tl.store(best + tile * count + row, tl.max(order, 1), mask=there)


@triton.jit
def _ordered(logits: tl.tensor, token: tl.tensor) -> tl.tensor:
    """Logits and tokens as int64 whose order is the logits', the lower token greater among equals.

    The bits of float32 are ordered as integers are, once those of negative ones are flipped.
    """
    bits = tl.where(logits == 0.0, 0.0, logits).to(tl.int32, bitcast=True)  # -0.0 is 0.0
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(logits != logits, 0x7FFFFFFF, bits)  # NaN, above infinity
    return (bits.to(tl.int64) << 32) + (0x7FFFFFFF - token).to(tl.int64)


@triton.jit
def _best_of_all(
    best: tl.tensor, tokens: tl.tensor, count: tl.tensor, tiles: tl.tensor, TILES: tl.constexpr
) -> None:
    """One row's token from the best of its tiles."""
    row, tile = tl.program_id(0), tl.arange(0, TILES)
    order = tl.load(best + tile * count + row, mask=tile < tiles, other=-9223372036854775807)
    tl.store(tokens + row, 0x7FFFFFFF - (tl.max(order, 0) & 0x7FFFFFFF))
