"""Where kernels run: compiled on a GPU, else interpreted on the CPU, for these tests alone."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import pytest
import torch

INTERPRETED = find_spec("triton") is not None and not torch.cuda.is_available()
MODULES = ("layers", "greedy_accept", "markov_argmax", "rejection")  # and what they import

if INTERPRETED:
    # A kernel is made for the interpreter or for the compiler when its module is imported.
    with pytest.MonkeyPatch.context() as interpreting:
        interpreting.setenv("TRITON_INTERPRET", "1")
        for name in MODULES:
            import_module(f"dspark.kernels.{name}")


def _compiled() -> Iterator[tuple[Any, str, Any]]:
    """Triton's own functions that were made for the compiler: torch had imported them already."""
    from triton.runtime.jit import JITFunction

    for name, module in list(sys.modules.items()):
        if name.startswith("triton.language"):
            for member, value in list(vars(module).items()):
                if isinstance(value, JITFunction):
                    yield module, member, value


@pytest.fixture(scope="module", autouse=True)
def interpreter() -> Iterator[None]:
    """Triton as it is when TRITON_INTERPRET was set from the start, until the module's tests are done."""
    torch.set_num_threads(1)
    if not INTERPRETED:
        yield
        return
    from triton.runtime.interpreter import InterpretedFunction

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        for module, member, value in _compiled():
            patch.setattr(module, member, InterpretedFunction(value.fn))
        yield


@pytest.fixture(scope="session")
def device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
