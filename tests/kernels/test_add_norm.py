"""Residual sum and RMSNorm by a kernel: the sum exactly, the norm within 2e-6 (float16: 2e-3)."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from dspark.kernels.add_norm import add_norm, reference

pytestmark = pytest.mark.filterwarnings(r"ignore:invalid value|All-NaN:RuntimeWarning:triton\.")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize("adds", [True, False])
@pytest.mark.parametrize(("rows", "size"), [(1, 576), (5, 48), (3, 2560), (2, 1), (1, 4097)])
def test_sum_and_norm(rows: int, size: int, adds: bool, dtype: torch.dtype, device: str) -> None:
    random = torch.Generator().manual_seed(size)
    branch, stream = torch.randn(2, rows, size, generator=random).to(device, dtype)
    weight = torch.rand(size, generator=random).to(device, dtype) + 0.5
    ours = add_norm(branch if adds else None, stream, weight, 1e-5)
    theirs = reference(branch if adds else None, stream, weight, 1e-5)
    assert torch.equal(ours[0], theirs[0])
    near = 2e-6 if dtype is torch.float32 else 2e-3
    torch.testing.assert_close(ours[1], theirs[1], atol=near, rtol=near)


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_values_that_are_not_finite_stay_in_their_row(value: float, device: str) -> None:
    branch, stream = torch.ones(2, 3, 20, device=device)
    branch[1, 4] = value
    weight = torch.ones(20, device=device)
    ours, theirs = (f(branch, stream, weight, 1e-5) for f in (add_norm, reference))
    torch.testing.assert_close(ours, theirs, equal_nan=True)
    assert ours[1][[0, 2]].isfinite().all() and not ours[1][1].isfinite().all()


def test_the_inputs_are_left_alone(device: str) -> None:
    branch, stream = torch.ones(2, 3, 20, device=device)
    add_norm(branch, stream, torch.ones(20, device=device), 1e-5)
    assert (stream == 1).all() and (branch == 1).all()
