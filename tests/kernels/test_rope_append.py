"""Norm, rotation and the cache's new entries by one kernel, within 2e-6 (float16: 4e-3) of PyTorch's.

Values, and all of the cache that is not written, are the same to the bit.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels need triton")

from dspark.kernels.rope_append import reference, rope_append
from dspark.kernels.rows import Rows
from dspark.models.attention import Packing
from dspark.models.fused import Norm


def check(
    rows: Rows,
    heads: int,
    groups: int,
    size: int,
    *,
    normed: bool = False,
    dtype: torch.dtype = torch.float32,
) -> None:
    """In slots 1 and up of a cache that has one more at either end."""
    random = torch.Generator().manual_seed(heads + size)
    count, device = len(rows.owners), rows.owners.device

    def made(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=random).to(device, dtype)

    qkv, angles = made(count, (heads + 2 * groups) * size), made(count, size // 2)
    cos = torch.cat([angles.cos()] * 2, -1)
    sin = torch.cat([-angles.sin(), angles.sin()], -1)
    norms = (Norm(made(size), 1e-5), Norm(made(size), 1e-5)) if normed else None
    ours, theirs = (torch.full((2, len(rows.first) + 1, groups, 40, size), 7.0) for _ in range(2))
    ours, theirs = (x.to(device, dtype) for x in (ours, theirs))
    found = rope_append(qkv, (cos, sin), norms, *ours[:, 1:-1], rows)
    expected = reference(qkv, (cos, sin), norms, *theirs[:, 1:-1], rows)
    near = 2e-6 if dtype is torch.float32 else 4e-3
    torch.testing.assert_close(found, expected, atol=near, rtol=near)
    torch.testing.assert_close(ours[0], theirs[0], atol=near, rtol=near)
    assert torch.equal(ours[1], theirs[1])
    written = torch.zeros(ours.shape[1], 40, dtype=torch.bool, device=device)
    written[rows.owners + 1, rows.positions] = True
    assert (ours.transpose(2, 3)[:, ~written] == 7).all()


def rows_at(starts: list[int], width: int, device: str) -> Rows:
    positions = torch.tensor(starts, device=device)[:, None] + torch.arange(width, device=device)
    return Rows.of(positions, None)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("normed", [False, True])
@pytest.mark.parametrize(
    ("heads", "groups", "size"),
    [(4, 2, 12), (9, 3, 64), (8, 1, 128), (2, 2, 48)],
    ids=["4+2x12", "9+3x64", "8+1x128", "2+2x48"],
)
def test_heads_and_groups(
    heads: int, groups: int, size: int, normed: bool, dtype: torch.dtype, device: str
) -> None:
    check(rows_at([0, 31], 3, device), heads, groups, size, normed=normed, dtype=dtype)


@pytest.mark.parametrize("width", [1, 8])
def test_one_row_up_to_the_last_place(width: int, device: str) -> None:
    check(rows_at([40 - width], width, device), 4, 2, 16)


def test_packed_rows(device: str) -> None:
    packing = Packing.of([3, 1, 5], torch.device(device))
    starts = torch.tensor([0, 39, 17], device=device)
    rows = Rows.of((starts[packing.owners] + packing.places)[None], packing)
    check(rows, 4, 2, 16, normed=True)


def test_values_that_are_not_finite_stay_in_their_head(device: str) -> None:
    rows = rows_at([5], 2, device)
    qkv = torch.ones(2, 4 * 16, device=device)  # two heads of queries, one group
    qkv[0, 16 + 3] = float("nan")
    rope = torch.ones(2, 2, 16, device=device)
    norms = Norm(torch.ones(16, device=device), 1e-5), Norm(torch.ones(16, device=device), 1e-5)
    keys, values = torch.zeros(2, 1, 1, 10, 16, device=device)
    query = rope_append(qkv, (rope[0], rope[1]), norms, keys, values, rows)
    assert query[0, 0].isfinite().all() and query[1].isfinite().all()
    assert query[0, 1].isnan().all()
    assert keys.isfinite().all() and values.isfinite().all()
