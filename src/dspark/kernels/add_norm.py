"""A branch's output added to the residual stream, and the RMSNorm of the sum, in one pass over both.

Shapes: B tokens, D hidden size.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import functional as F


def add_norm(
    branch: Tensor | None, stream: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """The sum and its norm, [B, D] each in their dtype; squares are summed in float32.

    Args:
        branch: [B, D], added to `stream`; None adds nothing, and the sum is `stream` itself.
        stream: [B, D].
        weight: [D].
    """
    count, size = stream.shape
    stream = stream.contiguous()
    normed = torch.empty_like(stream)
    summed = stream if branch is None else torch.empty_like(stream)
    block = triton.next_power_of_2(size)
    _add_norm[(count,)](
        normed if branch is None else branch.contiguous(),  # not read where there is none
        stream,
        weight,
        summed,
        normed,
        eps,
        SIZE=size,
        ADDS=branch is not None,
        BLOCK=block,
        num_warps=min(8, max(1, block // 512)),  # 16 elements a thread, at 4096 and beyond more
    )
    return summed, normed


def reference(
    branch: Tensor | None, stream: Tensor, weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """`add_norm` in PyTorch, as `models.fused` has it."""
    summed = stream if branch is None else branch + stream
    return summed, F.rms_norm(summed, weight.shape, weight, eps)


@triton.jit
def _add_norm(
    branch: tl.tensor,
    stream: tl.tensor,
    weight: tl.tensor,
    summed: tl.tensor,
    normed: tl.tensor,
    eps: tl.tensor,
    SIZE: tl.constexpr,
    ADDS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """One token."""
    dim = tl.arange(0, BLOCK)
    held = dim < SIZE
    at = tl.program_id(0) * SIZE + dim
    x = tl.load(stream + at, mask=held, other=0.0)
    kind = x.dtype
    if ADDS:
        other = tl.load(branch + at, mask=held, other=0.0)
        x = (x.to(tl.float32) + other.to(tl.float32)).to(kind)
        tl.store(summed + at, x, mask=held)
    x = x.to(tl.float32)
    factor = tl.rsqrt(tl.sum(x * x, 0) / SIZE + eps)
    scale = tl.load(weight + dim, mask=held, other=0.0).to(tl.float32)
    tl.store(normed + at, (x * factor * scale).to(kind), mask=held)
