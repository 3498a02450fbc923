"""Times of requests: latency, TTFT, TPOT, ITL, step gaps, measured windows, throughput.

Everything here is in seconds; summaries turn it into milliseconds. For request i with submit time
t_submit, first token t_first, last token t_last and n_i output tokens:

- latency = t_last - t_submit
- TTFT = t_first - t_submit
- TPOT = (t_last - t_first) / (n_i - 1), only for n_i >= 2
- ITL = mean gap between consecutive output tokens, where the tokens of one step share the step's
  time evenly, only for n_i >= 2
- step gap = time between two moments at which tokens arrived, whatever their number
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from statistics import fmean

import numpy as np
from numpy.typing import NDArray

from dspark.decode.records import RequestRecord
from dspark.errors import UserError


def latency_s(record: RequestRecord) -> float:
    """Seconds from submit to the last token."""
    return record.t_last - record.t_submit


def ttft_s(record: RequestRecord) -> float:
    """Seconds from submit to the first token."""
    return record.t_first - record.t_submit


def tpot_s(record: RequestRecord) -> float | None:
    """Seconds per output token after the first; None for a request with fewer than two tokens."""
    if record.output_tokens < 2:
        return None
    return (record.t_last - record.t_first) / (record.output_tokens - 1)


def step_gaps_s(record: RequestRecord) -> NDArray[np.float64]:
    """Seconds between consecutive arrivals of tokens; the first gap starts at the first token."""
    return np.diff(np.array([record.t_first, *record.step_t], dtype=np.float64))


def itl_s(record: RequestRecord) -> float | None:
    """Mean seconds between consecutive output tokens; None for fewer than two tokens.

    A step that emits m tokens after a gap g counts as m gaps of g / m. The mean is therefore TPOT
    whenever the last step ends at t_last; it is computed from the steps, so the two check each
    other.
    """
    if record.output_tokens < 2:
        return None
    emitted = np.array(record.step_emitted, dtype=np.int64)
    token_gaps = np.repeat(step_gaps_s(record) / emitted, emitted)
    return float(token_gaps.mean())


def by_shard(records: Iterable[RequestRecord]) -> dict[int, list[RequestRecord]]:
    """The records of each shard, by its number. Times of different shards cannot be compared."""
    members: dict[int, list[RequestRecord]] = defaultdict(list)
    for record in records:
        members[record.shard].append(record)
    return dict(sorted(members.items()))


def windows_s(records: Iterable[RequestRecord]) -> dict[int, float]:
    """Wall seconds of each measured window of one shard: first submit to last token."""
    members: dict[int, list[RequestRecord]] = defaultdict(list)
    for record in records:
        members[record.window].append(record)
    return {
        window: max(r.t_last for r in inside) - min(r.t_submit for r in inside)
        for window, inside in members.items()
    }


def laid_end_to_end(
    records: Sequence[RequestRecord],
) -> tuple[list[tuple[RequestRecord, float]], float]:
    """Each record with the seconds to add to its times, so that measured windows follow each other.

    The windows of a shard come after those of the shard before it.

    Returns:
        records and shifts, and the seconds of all windows together.
    """
    shifted: list[tuple[RequestRecord, float]] = []
    before = 0.0
    for inside in by_shard(records).values():
        for window, length in sorted(windows_s(inside).items()):
            members = [record for record in inside if record.window == window]
            shift = before - min(record.t_submit for record in members)
            shifted += [(record, shift) for record in members]
            before += length
    return shifted, before


def output_tok_s(records: Iterable[RequestRecord]) -> float:
    """Output tokens a second of one device: sum of tokens / sum of the windows' wall seconds.

    An arm runs in several windows, with the other arms between them, so the time from its first
    submit to its last token would count their work too.

    Shards are measured on a device each: the value is the mean of theirs, so that it says what one
    device does, however many there were.

    Raises:
        UserError: the windows have no length.
    """
    return fmean(_shard_tok_s(inside) for inside in by_shard(records).values())


def _shard_tok_s(records: Sequence[RequestRecord]) -> float:
    seconds = sum(windows_s(records).values())
    if seconds <= 0:
        raise UserError("the measured windows have no length: there is nothing to divide by")
    return sum(record.output_tokens for record in records) / seconds


def distribution_ms(name: str, seconds: Iterable[float]) -> dict[str, float | None]:
    """Mean and percentiles in ms, keyed `<name>_ms_mean`, `_p50`, `_p95`, `_p99`.

    Percentiles interpolate linearly between order statistics. Without values each entry is None.
    """
    values = 1000.0 * np.array(list(seconds), dtype=np.float64)
    if values.size == 0:
        return {f"{name}_ms_{stat}": None for stat in ("mean", "p50", "p95", "p99")}
    p50, p95, p99 = np.percentile(values, [50, 95, 99], method="linear")
    return {
        f"{name}_ms_mean": float(values.mean()),
        f"{name}_ms_p50": float(p50),
        f"{name}_ms_p95": float(p95),
        f"{name}_ms_p99": float(p99),
    }


def token_weighted_tpot_ms(records: Iterable[RequestRecord]) -> float | None:
    """Milliseconds per token after the first, each token weighing the same; None without any.

    The mean of TPOT weighs each request the same, so short answers count more per token there.
    """
    long_enough = [record for record in records if record.output_tokens >= 2]
    if not long_enough:
        return None
    seconds = sum(record.t_last - record.t_first for record in long_enough)
    return 1000.0 * seconds / sum(record.output_tokens - 1 for record in long_enough)
