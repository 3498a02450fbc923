"""Cell summaries of a small table."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from dspark.metrics.cell import CellSummary, DeviceSummary
from dspark.metrics.lossless import judge

SHARED = Path(__file__).parents[2].parent / "shared"
SETTINGS = {
    "device": "cpu",
    "max_new_tokens": 128,
    "temperature": 0.0,
    "target": "tiny",
    "drafter": "tiny-dspark",
    "versions": {"torch": "2.13.0", "dspark": "0.1.0"},
}


def make_cell(dataset: str, run: str, tok_s: float, k: int = 0, **changes: Any) -> CellSummary:
    """A consistent cell of 100 requests of 10 tokens at concurrency 4; baseline makes 100 tok/s.

    A speculative cell has 400 complete steps; position i is accepted in 200 // 2^(i-1) of them.
    """
    at_position = [200 // 2**i for i in range(k)]
    accepted = sum(at_position)
    window_s = 1000 / tok_s
    latency = 1000 * 4 * window_s / 100
    per_token = {
        f"{name}_ms_{stat}": latency / 20
        for name in ("tpot", "itl", "itl_chunk")
        for stat in ("mean", "p50", "p95", "p99")
    }
    values: dict[str, Any] = dict(
        dataset=dataset,
        run=run,
        mode="speculative" if k else "baseline",
        k=k,
        confidence_threshold=0.0,
        schedule=False,
        concurrency=4,
        precision="float32",
        requests=100,
        requests_failed=0,
        prompt_tokens=700,
        output_tokens=1000,
        finish_reasons={"length": 100},
        turns=1,
        devices=1,
        windows=1,
        window_s=window_s,
        output_tok_s=tok_s,
        speedup=tok_s / 100,
        speedup_ci95_low=0.95 * tok_s / 100,
        speedup_ci95_high=1.05 * tok_s / 100,
        latency_ms_mean=latency,
        latency_ms_p50=latency,
        latency_ms_p95=latency,
        latency_ms_p99=latency,
        latency_ms_max=latency,
        ttft_ms_mean=latency / 2,
        ttft_ms_p50=latency / 2,
        ttft_ms_p95=latency / 2,
        ttft_ms_p99=latency / 2,
        **per_token,
        tpot_ms_token_weighted=latency / 20,
        steps=410 if k else 900,
        steps_cut=10 if k else 0,
        drafted=410 * k,
        verified=410 * k,
        accepted=accepted,
        complete_steps=400 if k else 900,
        complete_verified=400 * k,
        complete_accepted=accepted,
        accept_rate=accepted / (400 * k) if k else None,
        accept_p=[n / 400 for n in at_position],
        accept_len=1 + accepted / 400 if k else None,
        accept_len_delivered=900 / 410 if k else None,
        break_even_accept_len=1.5 if k else None,
        accept_histogram=[],
        by_device=[DeviceSummary(1, 100, 1000, 1, window_s, tok_s, latency, latency)],
        lossless=judge([], 100, "float32") if k else None,
        settings=SETTINGS,
    )
    return CellSummary(**{**values, **changes})


@pytest.fixture(scope="session")
def cell() -> Callable[..., CellSummary]:
    return make_cell


@pytest.fixture
def table_cells() -> list[CellSummary]:
    """Two datasets with three runs each."""
    return [
        make_cell(dataset, run, tok_s, k)
        for dataset in ("gsm8k", "mbpp")
        for run, tok_s, k in (("baseline", 100, 0), ("dspark_k3", 125, 3), ("dspark_k7", 110, 7))
    ]


@pytest.fixture(scope="session")
def published_text() -> str:
    path = SHARED / "reference" / "published_table.md"
    if not path.exists():
        pytest.skip(f"the published table is not at {path}")
    return path.read_bytes().decode("utf-8")
