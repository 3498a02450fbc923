"""What a device has left, and how a failed allocation is told from other failures."""

from __future__ import annotations

import psutil
import pytest
import torch

from dspark.errors import UserError
from dspark.memory import free_bytes, gib, is_out_of_memory, out_of_memory


def test_the_cpus_memory_is_the_systems() -> None:
    total = psutil.virtual_memory().total
    assert 0 < free_bytes("cpu") < total
    assert 0 < free_bytes(torch.device("cpu")) < total


def test_a_gpus_memory_counts_what_torch_holds_in_reserve(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    assert free_bytes("cuda") == 130


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 GiB"), (3 * 2**29, "1.5 GiB"), (2**20, "0.000977 GiB")]
)
def test_sizes_have_three_digits(count: int, text: str) -> None:
    assert gib(count) == text


def test_a_real_failed_allocation_is_told() -> None:
    with pytest.raises(UserError, match="too much"), out_of_memory(lambda: "too much"):
        torch.empty(2**50, dtype=torch.uint8)


@pytest.mark.parametrize(
    ("error", "is_one"),
    [
        (torch.OutOfMemoryError("CUDA out of memory"), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (OSError("can't allocate memory"), False),
    ],
    ids=["gpu", "python", "driver", "cublas", "shapes", "system"],
)
def test_only_memory_errors_are_taken_for_such(error: Exception, is_one: bool) -> None:
    assert is_out_of_memory(error) is is_one
