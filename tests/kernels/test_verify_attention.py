"""Attention by kernels against PyTorch's with a mask, on rows of different lengths in a slot cache.

Tolerance: 2e-6 absolute and relative in float32 on values near 1, 2e-3 in float16 (one or two ulp).
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels need triton")

from dspark.kernels.rows import Rows
from dspark.kernels.verify_attention import (
    LEAST_KEYS,
    PROGRAMS,
    attend_rows,
    part_count,
    reference,
)
from dspark.models.attention import Packing

pytestmark = pytest.mark.filterwarnings(r"ignore:invalid value|All-NaN:RuntimeWarning:triton\.")

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3}


def cache(
    slots: int, groups: int, capacity: int, size: int, device: str, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    random = torch.Generator().manual_seed(slots + capacity)
    made = torch.randn(2, slots, groups, capacity, size, generator=random)
    return tuple(made.to(device, dtype))


def rows_at(starts: list[int], width: int, device: str) -> Rows:
    positions = torch.tensor(starts, device=device)[:, None] + torch.arange(width, device=device)
    return Rows.of(positions, None)


def query(rows: Rows, heads: int, size: int, dtype: torch.dtype = torch.float32) -> Tensor:
    random = torch.Generator().manual_seed(heads)
    made = torch.randn(len(rows.owners), heads, size, generator=random)
    return made.to(rows.owners.device, dtype)


def check(query: Tensor, keys: Tensor, values: Tensor, rows: Rows, window: int | None) -> Tensor:
    """The kernels' result, once it is known to be PyTorch's."""
    scale = query.shape[-1] ** -0.5
    ours = attend_rows(query, keys, values, rows, scale, window)
    theirs = reference(query, keys, values, rows, scale, window)
    near = TOLERANCE[query.dtype]
    torch.testing.assert_close(ours, theirs, atol=near, rtol=near, equal_nan=True)
    return ours


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("window", [None, 1, 9, 100])
@pytest.mark.parametrize("width", [1, 4, 8])
def test_rows_of_different_lengths(
    width: int, window: int | None, dtype: torch.dtype, device: str
) -> None:
    """From a row without a past to one that fills the cache; five slots, of which three are asked."""
    keys, values = cache(5, 2, 150, 16, device, dtype)
    rows = rows_at([0, 70, 150 - width], width, device)
    check(query(rows, 4, 16, dtype), keys[1:4], values[1:4], rows, window)


@pytest.mark.parametrize(
    ("heads", "groups", "size"),
    [(2, 2, 48), (9, 3, 64), (8, 1, 128), (6, 2, 12), (3, 3, 80)],
    ids=["1x48", "3x64", "8x128", "3x12", "1x80"],
)
def test_groups_and_head_dims(heads: int, groups: int, size: int, device: str) -> None:
    keys, values = cache(2, groups, 70, size, device, torch.float32)
    rows = rows_at([3, 61], 5, device)
    check(query(rows, heads, size), keys, values, rows, None)


@pytest.mark.parametrize("window", [None, 40])
def test_parts_of_a_long_row_are_merged(window: int | None, device: str) -> None:
    """A row of 1 or 2 tokens, whose later parts are empty, beside one of 8 parts."""
    length = 8 * LEAST_KEYS + 3
    keys, values = cache(2, 1, length, 16, device, torch.float32)
    assert part_count(length, 2) == 8
    rows = rows_at([0, length - 2], 2, device)
    check(query(rows, 2, 16), keys, values, rows, window)


@pytest.mark.parametrize(
    ("length", "programs", "parts"),
    [
        (1, 1, 1),
        (LEAST_KEYS, 1, 1),
        (2 * LEAST_KEYS, 1, 2),
        (7 * LEAST_KEYS, 1, 4),
        (2**15, 8, 32),
        (2**15, PROGRAMS, 1),
        (2**15, 512, 1),
    ],
)
def test_how_many_parts(length: int, programs: int, parts: int) -> None:
    assert part_count(length, programs) == parts


def test_rows_at_the_same_place(device: str) -> None:
    """Their positions may be one number, expanded."""
    keys, values = cache(3, 1, 30, 16, device, torch.float32)
    rows = Rows.of(torch.tensor([[20]], device=device).expand(3, 1), None)
    check(query(rows, 2, 16), keys, values, rows, None)


def test_packed_rows(device: str) -> None:
    keys, values = cache(3, 2, 90, 16, device, torch.float32)
    packing = Packing.of([3, 1, 5], torch.device(device))
    starts = torch.tensor([0, 88, 40], device=device)
    rows = Rows.of((starts[packing.owners] + packing.places)[None], packing)
    check(query(rows, 4, 16), keys, values, rows, None)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
@pytest.mark.parametrize("broken", ["query", "key", "value"])
def test_values_that_are_not_finite_break_their_row_alone(
    broken: str, value: float, device: str
) -> None:
    keys, values = cache(2, 1, 300, 16, device, torch.float32)
    rows = rows_at([280, 280], 2, device)
    asked = query(rows, 2, 16)
    {"query": asked[0, 0], "key": keys[0, 0, 5], "value": values[0, 0, 5]}[broken][3] = value
    out = check(asked, keys, values, rows, None)
    assert not out[0].isfinite().all()
    assert out[2:].isfinite().all()


def test_what_lies_behind_a_row_is_not_read(device: str) -> None:
    """A former request's, or a rejected token's: even NaN there does no harm."""
    keys, values = cache(2, 1, 200, 16, device, torch.float32)
    rows = rows_at([20, 150], 3, device)
    asked = query(rows, 2, 16)
    before = attend_rows(asked, keys, values, rows, 0.25, None)
    for row, end in ((0, 23), (1, 153)):
        keys[row, :, end:], values[row, :, end:] = float("nan"), float("nan")
    assert torch.equal(attend_rows(asked, keys, values, rows, 0.25, None), before)
