"""Greedy acceptance in one kernel, for which PyTorch takes some ten; `decode.verify` has the reference.

Shapes: R rows, k drafted.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

ROWS = 16  # a program: a step has some hundred tokens in all, so only the launch costs


def accept_greedy(target: Tensor, drafted: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """Accepted counts [R] and next tokens [R], int64, as `decode.verify.accept_greedy`.

    Args:
        target: the target's argmax after the anchor and after each draft token [R, k+1] int64.
        drafted: draft tokens [R, k] int64.
        limits: how many of each row's draft tokens may be accepted [R] int64.
    """
    count, width = drafted.shape
    accepted, following = limits.new_empty(2, count)
    _accept[(triton.cdiv(count, ROWS),)](
        target,
        drafted,
        limits.contiguous(),
        accepted,
        following,
        *target.stride(),
        *drafted.stride(),
        count,
        WIDTH=width,
        ROWS=ROWS,
        COLUMNS=triton.next_power_of_2(width + 1),
        num_warps=1,
    )
    return accepted, following


@triton.jit
def _accept(
    target: tl.tensor,
    drafted: tl.tensor,
    limits: tl.tensor,
    accepted: tl.tensor,
    following: tl.tensor,
    target_row: tl.tensor,
    target_column: tl.tensor,
    drafted_row: tl.tensor,
    drafted_column: tl.tensor,
    count: tl.tensor,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
) -> None:
    row, column = tl.program_id(0) * ROWS + tl.arange(0, ROWS), tl.arange(0, COLUMNS)
    there = row < count
    judged = there[:, None] & (column < WIDTH)[None, :]
    choice = tl.load(
        target + row[:, None] * target_row + column[None, :] * target_column,
        mask=there[:, None] & (column <= WIDTH)[None, :],
        other=0,
    )
    draft = tl.load(
        drafted + row[:, None] * drafted_row + column[None, :] * drafted_column,
        mask=judged,
        other=0,
    )
    limit = tl.load(limits + row, mask=there, other=0)
    kept = judged & (draft == choice) & (column[None, :] < limit[:, None])
    ends = tl.min(tl.where(kept, COLUMNS, column[None, :]), 1)  # the first that is not kept
    tl.store(accepted + row, ends.to(tl.int64), mask=there)
    next_token = tl.sum(tl.where(column[None, :] == ends[:, None], choice, 0), 1)
    tl.store(following + row, next_token, mask=there)
