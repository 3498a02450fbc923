"""A results folder as the stages leave it: request records of a simulated engine, and their summaries."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from dspark.config import DatasetConfig, EngineConfig, JobConfig, Mode, RunConfig
from dspark.decode.records import RequestRecord
from dspark.metrics.records_io import write_records
from dspark.metrics.summary import summarise_job, write_summary

SETTINGS = {
    "device": "cpu",
    "device_uuid": None,
    "git_sha": "0123abc",
    "git_dirty": False,
    "target": "tiny",
    "drafter": "tiny-dspark",
    "versions": {"dspark": "0.1.0", "torch": "2.13.0"},
}


def simulate(
    dataset: str, run: str, k: int, requests: int = 6, windows: int = 2, tokens: int = 24
) -> list[RequestRecord]:
    """One request after the other, in windows that stand apart; each draft token survives by chance."""
    generator = np.random.default_rng(k)
    records = []
    now = 100.0 * k
    for index in range(requests):
        window = index * windows // requests
        if records and window > records[-1].window:
            now += 50.0  # the other arms' turn
        submit, now = now, now + 0.2 + 0.01 * index
        first, left, steps = now, tokens - 1, []
        while left:
            now += 0.05 + 0.004 * k
            accepted = int(np.cumprod(generator.random(k) < 0.6).sum())
            emitted = min(accepted + 1, left)
            steps.append((now, emitted, accepted, left < k + 1))
            left -= emitted
        records.append(
            RequestRecord(
                prompt_id=f"{dataset}/{index}",
                turn=0,
                dataset=dataset,
                run=run,
                window=window,
                prompt_tokens=9,
                output_tokens=tokens,
                output_token_ids=list(range(tokens)),
                finish_reason="length",
                t_submit=submit,
                t_first=first,
                t_last=now,
                step_t=[step[0] for step in steps],
                step_emitted=[step[1] for step in steps],
                step_drafted=[k] * len(steps),
                step_verified=[k] * len(steps),
                step_accepted=[step[2] for step in steps],
                step_cut=[step[3] for step in steps],
            )
        )
    return records


def write_results(
    root: Path,
    datasets: Sequence[str] = ("gsm8k", "mt_bench"),
    ks: Sequence[int] = (0, 3, 7),
    **settings: Any,
) -> list[Path]:
    """Records and summaries of an experiment; k = 0 is the baseline. Returns the summaries."""
    runs = {
        f"dspark_k{k}" if k else "baseline": RunConfig(
            mode=Mode.speculative if k else Mode.baseline, k=k
        )
        for k in ks
    }
    paths = []
    for dataset in datasets:
        records = [record for run, arm in runs.items() for record in simulate(dataset, run, arm.k)]
        job = JobConfig(
            experiment=root.name,
            dataset=DatasetConfig(name=dataset),
            runs=runs,
            engine=EngineConfig(concurrency=1),
        )
        (root / dataset).mkdir(parents=True)
        write_records(root / dataset / "requests.parquet", records)
        for cell in summarise_job(
            records, job, expected_requests=6, settings={**SETTINGS, **settings}
        ):
            path = root / dataset / cell.run / "summary.json"
            write_summary(path, cell)
            paths.append(path)
    return paths
