"""What memory a device has left, and one line for what happens when it runs out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import torch

from dspark.errors import UserError

SIGNS = ("can't allocate memory", "CUDA error: out of memory", "CUBLAS_STATUS_ALLOC_FAILED")


def free_bytes(device: str | torch.device) -> int:
    """Bytes that can still be allocated on `device`, those that torch holds in reserve included."""
    if torch.device(device).type != "cuda":
        return psutil.virtual_memory().available
    free, _ = torch.cuda.mem_get_info(device)
    return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)


def gib(count: int) -> str:
    """A number of bytes in GiB, with three significant digits."""
    return f"{count / 2**30:.3g} GiB"


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an allocation failed: torch's own, or one on the CPU, by the driver or by cuBLAS."""
    if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
        return True
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in SIGNS)


@contextmanager
def out_of_memory(explain: Callable[[], str]) -> Iterator[None]:
    """Raise what `explain` says in place of a failed allocation inside the block.

    Raises:
        UserError: an allocation failed.
    """
    try:
        yield
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise UserError(explain()) from error
