"""Request records made by hand and by a small simulator of the closed loop."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from dspark.decode.records import RequestRecord

SHARED = Path(__file__).parents[2].parent / "shared"


def make_record(
    t_submit: float = 0.0,
    t_first: float = 1.0,
    steps: list[tuple[float, int, int, int, int, bool]] | None = None,
    *,
    prompt_id: str = "p0",
    turn: int = 0,
    dataset: str = "math500",
    run: str = "dspark_k3",
    window: int = 0,
    shard: int = 1,
    ids: list[int] | None = None,
    error: str | None = None,
) -> RequestRecord:
    """A record from steps of (time, emitted, drafted, verified, accepted, cut)."""
    steps = steps or []
    n = 1 + sum(step[1] for step in steps)
    columns = [list(column) for column in zip(*steps, strict=True)] or [[] for _ in range(6)]
    return RequestRecord(
        prompt_id=prompt_id,
        turn=turn,
        dataset=dataset,
        run=run,
        window=window,
        prompt_tokens=7,
        output_tokens=n,
        output_token_ids=list(range(n)) if ids is None else ids,
        finish_reason="length",
        t_submit=t_submit,
        t_first=t_first,
        t_last=columns[0][-1] if steps else t_first,
        step_t=columns[0],
        step_emitted=columns[1],
        step_drafted=columns[2],
        step_verified=columns[3],
        step_accepted=columns[4],
        step_cut=columns[5],
        error=error,
        shard=shard,
    )


def simulate_arm(
    run: str,
    k: int,
    requests: int,
    *,
    seed: int = 0,
    concurrency: int = 4,
    block: int = 32,
    survive: float = 0.6,
    step_s: float = 0.01,
    confidence: float = 0.0,
    dataset: str = "math500",
    start: float = 5.0,
) -> list[RequestRecord]:
    """A closed loop: `concurrency` slots take the requests of a block in turn.

    How many tokens a request makes depends on its number only, so that arms are comparable; with
    `confidence` above 0 a step verifies a random number of its k drafts.
    """
    lengths = np.random.default_rng(99).integers(1, 40, size=requests)
    generator = np.random.default_rng(seed)
    records: list[RequestRecord] = []
    now = start
    for window, first in enumerate(range(0, requests, block)):
        slots = [now] * concurrency
        for index in range(first, min(first + block, requests)):
            submit = heapq.heappop(slots)
            clock = submit + step_s * float(generator.uniform(2, 6))
            t_first, left, steps = clock, int(lengths[index]) - 1, []
            while left:
                clock += step_s * float(generator.uniform(0.8, 1.2))
                verified = int(generator.integers(0, k + 1)) if confidence else k
                lucky = generator.random(verified) < survive
                accepted = int(np.cumprod(lucky).sum())
                cut = left < verified + 1
                emitted = min(accepted + 1, left)
                left -= emitted
                steps.append((clock, emitted, k, verified, accepted, cut))
            heapq.heappush(slots, clock)
            records.append(
                make_record(
                    submit,
                    t_first,
                    steps,
                    prompt_id=f"p{index}",
                    dataset=dataset,
                    run=run,
                    window=window,
                )
            )
        now = max(slots) + 1.0  # the other arms' turn
    return records


@pytest.fixture(scope="session")
def record() -> Callable[..., RequestRecord]:
    return make_record


@pytest.fixture(scope="session")
def simulate() -> Callable[..., list[RequestRecord]]:
    return simulate_arm


@pytest.fixture(scope="session")
def published_text() -> str:
    path = SHARED / "reference" / "published_table.md"
    if not path.exists():
        pytest.skip(f"the published table is not at {path}")
    return path.read_bytes().decode("utf-8")
