"""How idle threads of a parallel section wait, settled before torch is loaded and reads it.

A decoding step has hundreds of short parallel sections. Threads that sleep between them take a third
longer for a step, and threads that spin lose several times as much where another process wants the same
cores (benchmarks/README.md). So they spin, for some microseconds, where the cores are free when a job
begins; what the user has set stays.
"""

from __future__ import annotations

import os

import psutil

import dspark

SPINS = "10000"
GLANCE_S = 0.2
SHARE = 0.25  # of one core: what others may use of it before the cores count as shared


def spin_on_free_cores() -> None:
    """Let threads of this process spin for a moment if nobody else uses the cores now."""
    if not dspark.OPENMP_IS_OURS:
        return
    busy = psutil.cpu_percent(interval=GLANCE_S) / 100 * (psutil.cpu_count() or 1)
    os.environ["GOMP_SPINCOUNT"] = "0" if busy > SHARE else SPINS
