"""Whether decoding steps run on the Triton kernels: one setting of the process, as its threads are."""

from __future__ import annotations

_used = False


def kernels_used() -> bool:
    """Whether decoding steps run on the kernels."""
    return _used


def use_kernels(used: bool) -> None:
    """Let the decoding steps that follow run on the kernels, or not."""
    global _used
    _used = used


def interpreting() -> bool:
    """Whether Triton interprets kernels on the CPU instead of compiling them (TRITON_INTERPRET=1)."""
    import triton

    return triton.knobs.runtime.interpret
