"""How long an engine step takes, read off the records: why an arm wins or loses.

An arm pays when it emits more tokens a step than its step takes longer:
speedup ~ accept length / (speculative step / baseline step), so that ratio is the accept length at
which nothing is won or lost (prefill aside).
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable
from itertools import pairwise
from statistics import mean

from dspark.decode.records import RequestRecord


def full_step_seconds(records: Iterable[RequestRecord]) -> list[float]:
    """Seconds of each step of one run that had as many rows as any, and admitted no request.

    A step ends at a time that all its rows share. Where a request got its first token between two
    such ends, a prefill lies between them too.
    """
    windows: dict[tuple[int, int], list[RequestRecord]] = defaultdict(list)
    for record in records:
        windows[record.shard, record.window].append(record)
    steps = [step for inside in windows.values() for step in _pure_steps(inside)]
    most = max((rows for rows, _ in steps), default=0)
    return [seconds for rows, seconds in steps if rows == most]


def _pure_steps(records: list[RequestRecord]) -> Iterable[tuple[int, float]]:
    """Rows and seconds of a window's steps without a prefill."""
    rows = Counter(t for record in records for t in record.step_t)
    firsts = sorted({record.t_first for record in records}, reverse=True)
    for before, end in pairwise(sorted(rows)):
        while firsts and firsts[-1] <= before:
            firsts.pop()
        if not firsts or firsts[-1] > end:
            yield rows[end], end - before


def step_ms(records: Iterable[RequestRecord]) -> float | None:
    """Mean milliseconds of a full step; None where no two steps follow each other.

    The mean, since an arm whose steps differ (a schedule's) spends the sum of them.
    """
    seconds = full_step_seconds(records)
    return 1000.0 * mean(seconds) if seconds else None
