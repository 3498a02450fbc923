"""What became of the draft tokens of one cell.

The acceptance columns are counted over the *complete* steps (`step_cut` False) only. A cut step,
whose block could not have been emitted whole, is not a trial of k positions: counting its k drafts
would lower the acceptance of the late positions, counting the emitted ones only would break
accept_len = 1 + k * accept_rate. Without the cut steps that identity and accept_len = 1 + sum(p_i)
are exact at a fixed k. Whether the token budget cuts a step is settled before its outcome, so
leaving these steps out does not bias the rates; a step cut by EOS or a stop string is settled by
its outcome, which touches at most one step of a request. The counts over all steps are recorded
beside, and so is the delivered length.

- accept_rate = accepted / verified draft tokens; a confidence threshold may verify fewer than k
- p_i = share of the complete steps in which draft position i was accepted, unconditional, so that
  p_1 >= p_2 >= ... and a position that was not verified counts as not accepted
- accept_len = 1 + accepted / steps: mean tokens a step, the bonus token included
- accept_len_delivered = (output tokens - requests) / steps over all steps: what really came out,
  the first token of each request excepted, as the prefill made it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dspark.decode.records import RequestRecord


@dataclass
class Acceptance:
    """Acceptance counts and rates of one cell; the module's docstring defines them."""

    steps: int
    steps_cut: int
    drafted: int  # over all steps
    verified: int
    accepted: int
    complete_steps: int
    complete_verified: int  # over the complete steps
    complete_accepted: int
    accept_rate: float | None
    accept_p: list[float]  # k long; empty when there is no complete step
    accept_len: float | None
    accept_len_delivered: float | None
    accept_histogram: list[int]  # complete steps by number of accepted tokens, 0..k


def count_acceptance(records: Sequence[RequestRecord], k: int) -> Acceptance:
    """Count the draft tokens of a cell whose steps draft `k` tokens.

    A baseline (k = 0) has steps but no rates. The rates of a speculative cell without complete
    steps are None too.
    """
    drafted = _pooled([r.step_drafted for r in records])
    verified = _pooled([r.step_verified for r in records])
    accepted = _pooled([r.step_accepted for r in records])
    complete = ~_pooled([r.step_cut for r in records]).astype(bool)
    trials = int(complete.sum())
    tried, kept = verified[complete], accepted[complete]
    histogram = np.bincount(kept, minlength=k + 1) if k else np.zeros(0, dtype=np.int64)
    steps = len(accepted)
    emitted = sum(r.output_tokens for r in records) - len(records)
    speculative = k > 0
    return Acceptance(
        steps=steps,
        steps_cut=steps - trials,
        drafted=int(drafted.sum()),
        verified=int(verified.sum()),
        accepted=int(accepted.sum()),
        complete_steps=trials,
        complete_verified=int(tried.sum()),
        complete_accepted=int(kept.sum()),
        accept_rate=_ratio(int(kept.sum()), int(tried.sum())) if speculative else None,
        accept_p=[float((kept >= i).mean()) for i in range(1, k + 1)] if trials else [],
        accept_len=1 + int(kept.sum()) / trials if speculative and trials else None,
        accept_len_delivered=_ratio(emitted, steps) if speculative else None,
        accept_histogram=[int(count) for count in histogram],
    )


def _pooled(per_request: list[list[int]] | list[list[bool]]) -> NDArray[np.int64]:
    """The steps of all requests in one row."""
    return np.array([value for steps in per_request for value in steps], dtype=np.int64)


def _ratio(part: int, whole: int) -> float | None:
    return part / whole if whole else None
