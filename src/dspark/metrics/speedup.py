"""Speedup of an arm over the baseline on the same requests, with a paired bootstrap interval."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark.decode.records import RequestRecord
from dspark.errors import UserError
from dspark.metrics.pairing import paired
from dspark.metrics.timing import latency_s, output_tok_s

RESAMPLES = 2000
# Resamples that are drawn at once: bounds the index array to a few MB at 5000 requests.
_BATCH = 100


@dataclass(frozen=True)
class Speedup:
    """A ratio of Output tok/s and its 95 % interval."""

    ratio: float
    ci95_low: float
    ci95_high: float


def measure_speedup(
    arm: Sequence[RequestRecord],
    baseline: Sequence[RequestRecord],
    seed: int = 0,
    resamples: int = RESAMPLES,
) -> Speedup:
    """Output tok/s of `arm` / Output tok/s of `baseline`, with its 95 % interval.

    The interval is a percentile bootstrap over requests. A resample draws request ids with
    replacement and takes both arms' measurements of each id drawn, so what is hard about a prompt
    cancels. A resample has no wall clock; but with a fixed number of requests in flight Output
    tok/s is proportional to tokens per second of latency (Little's law), so its statistic is

        (sum n_arm / sum latency_arm) / (sum n_base / sum latency_base)

    scaled by the one factor that makes the statistic of the whole sample equal the ratio of
    Output tok/s. The same records and seed give the same interval.

    Shards pool their requests in the resamples: both arms of a request ran on the same device, so
    what is slow about a device cancels as what is hard about a prompt does.

    Raises:
        UserError: the arms hold different requests, none at all, or no measurable time.
    """
    pairs = paired(baseline, arm)
    if not pairs:
        raise UserError("no requests to compute a speedup from")
    sums = np.array(
        [[a.output_tokens, latency_s(a), b.output_tokens, latency_s(b)] for b, a in pairs],
        dtype=np.float64,
    )
    ratio = output_tok_s(arm) / output_tok_s(baseline)
    whole = float(_tokens_per_latency_ratio(sums.sum(axis=0)))
    draws = _bootstrap(sums, seed, resamples) * (ratio / whole)
    low, high = np.percentile(draws, [2.5, 97.5], method="linear")
    return Speedup(ratio=ratio, ci95_low=float(low), ci95_high=float(high))


def _bootstrap(rows: NDArray[np.float64], seed: int, resamples: int) -> NDArray[np.float64]:
    """The statistic of `resamples` resamples of the requests in `rows`."""
    generator = np.random.default_rng(seed)
    count = len(rows)
    parts = []
    for start in range(0, resamples, _BATCH):
        size = min(_BATCH, resamples - start)
        drawn = generator.integers(count, size=(size, count))
        sums = np.stack([column[drawn].sum(axis=1) for column in rows.T], axis=1)
        parts.append(_tokens_per_latency_ratio(sums))
    return np.concatenate(parts)


def _tokens_per_latency_ratio(sums: NDArray[np.float64]) -> NDArray[np.float64]:
    """The statistic from sums of [arm tokens, arm latency, base tokens, base latency]."""
    arm_tokens, arm_latency, base_tokens, base_latency = np.moveaxis(sums, -1, 0)
    return (arm_tokens / arm_latency) / (base_tokens / base_latency)
