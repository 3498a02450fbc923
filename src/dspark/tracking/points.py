"""Values over steps, which MLflow draws as curves. Knows nothing of MLflow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict
from datetime import datetime
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from dspark.decode.records import RequestRecord
from dspark.decode.usage import WindowUsage
from dspark.metrics.timing import laid_end_to_end

SLICES = 20  # equal parts of the time in which a cell was measured
OVER_TIME = "over_time/"
SYSTEM = "system/"  # what MLflow shows on a run's page as its system metrics
NO_SYSTEM_METRICS = ("run", "window", "shard", "began", "seconds")


class Point(NamedTuple):
    """One value on a curve."""

    step: int
    metric: str
    value: float
    after_ms: int = 0  # since the run's start


def points_over_time(records: Sequence[RequestRecord]) -> Iterator[Point]:
    """How fast a cell went and how far it was, after each of `SLICES` parts of its measured time.

    The measured time is that of its windows laid end to end, those of a shard after those of the
    shard before. A step is a percentage of it, so that curves of cells of any length lie over each
    other; `after_ms` tells the time itself.

    Args:
        records: of one dataset and run.
    """
    tokens, ends, length = _measured_clock(records)
    edges = np.linspace(0, length, SLICES + 1)
    counts = np.bincount(_slices(tokens[:, 0], edges), tokens[:, 1], minlength=SLICES)
    done = np.bincount(_slices(ends, edges), minlength=SLICES).cumsum()
    for number in range(SLICES):
        step, after_ms = 100 * (number + 1) // SLICES, round(1000 * edges[number + 1])
        rate = float(counts[number]) * SLICES / length
        yield Point(step, f"{OVER_TIME}output_tok_s", rate, after_ms)
        yield Point(step, f"{OVER_TIME}requests_done", float(done[number]), after_ms)


def _slices(moments: NDArray[np.float64], edges: NDArray[np.float64]) -> NDArray[np.int64]:
    """The slice that each moment lies in; on an edge, the one that ends there.

    Args:
        moments: [N] seconds, by rounding perhaps a little outside.
        edges: [SLICES + 1] seconds.
    """
    return np.clip(np.searchsorted(edges, moments, side="left") - 1, 0, SLICES - 1)


def _measured_clock(
    records: Sequence[RequestRecord],
) -> tuple[NDArray[np.float64], NDArray[np.float64], float]:
    """When things happened, in seconds of the measured time.

    Returns:
        [N, 2] moments at which tokens came with their number, [R] ends of requests, and the seconds
        of all windows.
    """
    tokens: list[tuple[float, float]] = []
    ends: list[float] = []
    shifted, length = laid_end_to_end(records)
    for record, shift in shifted:
        tokens.append((record.t_first + shift, 1))
        emitted = zip(record.step_t, record.step_emitted, strict=True)
        tokens += [(t + shift, count) for t, count in emitted]
        ends.append(record.t_last + shift)
    return np.array(tokens, dtype=np.float64), np.array(ends, dtype=np.float64), length


def points_of_usage(windows: Sequence[WindowUsage]) -> Iterator[Point]:
    """What the machine showed of each window of a cell, at its end; windows count from 1."""
    if not windows:
        return
    begun = min(map(began_ms, windows))
    for step, usage in enumerate(sorted(windows, key=ended_ms), start=1):
        for name, value in asdict(usage).items():
            if name not in NO_SYSTEM_METRICS and value is not None:
                yield Point(step, f"{SYSTEM}{name}", float(value), ended_ms(usage) - begun)


def began_ms(usage: WindowUsage) -> int:
    """When a window began, in Unix milliseconds."""
    return round(1000 * datetime.fromisoformat(usage.began).timestamp())


def ended_ms(usage: WindowUsage) -> int:
    """When a window ended, in Unix milliseconds."""
    return began_ms(usage) + round(1000 * usage.seconds)
