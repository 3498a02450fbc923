"""From the request records of a cell to its summary."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from statistics import fmean
from typing import Any

from dspark.config import EngineConfig, JobConfig, Mode, RunConfig, digest
from dspark.decode.records import RequestRecord
from dspark.errors import UserError
from dspark.metrics.acceptance import count_acceptance
from dspark.metrics.cell import (
    BASELINE,
    CellSummary,
    DeviceSummary,
    read_summary,
    write_summary,
)
from dspark.metrics.identities import check_records, check_summaries
from dspark.metrics.lossless import require_lossless
from dspark.metrics.speedup import measure_speedup
from dspark.metrics.steps import step_ms
from dspark.metrics.timing import (
    by_shard,
    distribution_ms,
    itl_s,
    latency_s,
    output_tok_s,
    step_gaps_s,
    token_weighted_tpot_ms,
    tpot_s,
    ttft_s,
    windows_s,
)

__all__ = [
    "CellSummary",
    "job_settings",
    "read_summary",
    "summarise",
    "summarise_job",
    "write_summary",
]


def summarise(
    records: Sequence[RequestRecord],
    run_config: RunConfig,
    engine_config: EngineConfig,
    *,
    baseline_records: Sequence[RequestRecord],
    expected_requests: int,
    settings: Mapping[str, Any] | None = None,
    lossless: dict[str, Any] | None = None,
) -> CellSummary:
    """Summarise one cell; the definitions are those of the modules that it is put together from.

    Args:
        records: the cell's request records, all of one dataset and run.
        run_config: the arm.
        engine_config: how the decoder ran.
        baseline_records: the baseline's records of the same dataset; for the baseline's own cell,
            `records` itself.
        expected_requests: how many requests the dataset has.
        settings: what the numbers hold for; kept as given, must be JSON.
        lossless: what `dspark.metrics.lossless.judge` said of this arm; None when not compared.

    Raises:
        UserError: a request failed, is missing, is there twice or is damaged; the records are not
            of one cell; the baseline's requests are others; in float32, the outputs differ by more
            than ties.
    """
    _require_one_cell(records)
    cell = f"{records[0].dataset}/{records[0].run}"
    _require_all_done(records, cell, expected_requests)
    _require_all_done(baseline_records, f"{records[0].dataset}/{BASELINE}", expected_requests)
    check_records(records)
    if lossless is not None:
        require_lossless(lossless, records[0].dataset, records[0].run)
    speedup = measure_speedup(records, baseline_records)
    devices = [_device_summary(shard, inside) for shard, inside in by_shard(records).items()]
    chunk_gaps = [gap for r in records for gap in step_gaps_s(r)]
    values: dict[str, Any] = {
        **distribution_ms("latency", map(latency_s, records)),
        **distribution_ms("ttft", map(ttft_s, records)),
        **distribution_ms("tpot", _defined(map(tpot_s, records))),
        **distribution_ms("itl", _defined(map(itl_s, records))),
        **distribution_ms("itl_chunk", chunk_gaps),
        **asdict(count_acceptance(records, run_config.k)),
        **_step_values(records, baseline_records, run_config),
    }
    return CellSummary(
        dataset=records[0].dataset,
        run=records[0].run,
        mode=run_config.mode.value,
        k=run_config.k,
        confidence_threshold=run_config.confidence_threshold,
        schedule=run_config.schedule,
        concurrency=engine_config.concurrency,
        precision=engine_config.precision.value,
        requests=len(records),
        requests_failed=0,
        prompt_tokens=sum(r.prompt_tokens for r in records),
        output_tokens=sum(r.output_tokens for r in records),
        finish_reasons=dict(sorted(Counter(r.finish_reason for r in records).items())),
        turns=1 + max(r.turn for r in records),
        devices=len(devices),
        windows=sum(device.windows for device in devices),
        window_s=sum(device.window_s for device in devices),
        output_tok_s=output_tok_s(records),
        speedup=speedup.ratio,
        speedup_ci95_low=speedup.ci95_low,
        speedup_ci95_high=speedup.ci95_high,
        latency_ms_max=1000 * max(map(latency_s, records)),
        tpot_ms_token_weighted=token_weighted_tpot_ms(records),
        by_device=devices,
        lossless=lossless,
        settings=dict(settings or {}),
        **values,
    )


def _step_values(
    records: Sequence[RequestRecord], baseline: Sequence[RequestRecord], run: RunConfig
) -> dict[str, float | None]:
    plain = step_ms(baseline)
    own = step_ms(records) if run.mode is Mode.speculative else None
    return {
        "step_ms_baseline": plain,
        "step_ms_spec": own,
        "break_even_accept_len": own / plain if own and plain else None,
    }


def _device_summary(shard: int, records: Sequence[RequestRecord]) -> DeviceSummary:
    windows = windows_s(records)
    latencies_ms = [1000 * latency_s(record) for record in records]
    return DeviceSummary(
        shard=shard,
        requests=len(records),
        output_tokens=sum(record.output_tokens for record in records),
        windows=len(windows),
        window_s=sum(windows.values()),
        output_tok_s=output_tok_s(records),
        latency_ms_mean=fmean(latencies_ms),
        latency_ms_max=max(latencies_ms),
    )


def summarise_job(
    records: Sequence[RequestRecord],
    job: JobConfig,
    *,
    expected_requests: int,
    settings: Mapping[str, Any] | None = None,
    lossless: Mapping[str, dict[str, Any]] | None = None,
) -> list[CellSummary]:
    """Summarise all arms of one dataset, in the order of the job's runs, and check them together.

    Args:
        records: the records of all arms, in any order.
        job: the job that made them; its own settings are added to `settings`.
        expected_requests: requests of each arm.
        settings: see `summarise`; an entry here wins over the job's.
        lossless: by run name, see `summarise`.

    Raises:
        UserError: see `summarise` and `dspark.metrics.identities.check_summaries`.
    """
    by_run: dict[str, list[RequestRecord]] = {run: [] for run in job.runs}
    for record in records:
        if record.run not in by_run:
            raise UserError(f"request records hold run '{record.run}', which the job does not have")
        by_run[record.run].append(record)
    for run, members in by_run.items():
        if not members:
            raise UserError(
                f"cell {job.dataset.name}/{run}: none of {expected_requests} requests is recorded: "
                "run the dataset's job again"
            )
    if BASELINE not in by_run:
        raise UserError(f"the job of dataset '{job.dataset.name}' has no run named '{BASELINE}'")
    cells = [
        summarise(
            members,
            job.runs[run],
            job.engine,
            baseline_records=by_run[BASELINE],
            expected_requests=expected_requests,
            settings={**job_settings(job), **(settings or {})},
            lossless=(lossless or {}).get(run),
        )
        for run, members in by_run.items()
    ]
    check_summaries(cells)
    return cells


def job_settings(job: JobConfig) -> dict[str, Any]:
    """The settings of a cell that its job's config knows."""
    return {
        "experiment": job.experiment,
        "config_digest": digest(job),
        "max_new_tokens": job.dataset.max_new_tokens,
        "history": job.dataset.history.value,
        "chat": job.dataset.chat,
        "temperature": job.sampling.temperature,
        "top_p": job.sampling.top_p,
        "top_k": job.sampling.top_k,
        "seed": job.sampling.seed,
        "ignore_eos": job.sampling.ignore_eos,
        "stop": list(job.sampling.stop),
        "interleave": job.engine.interleave,
        "warmup": job.engine.warmup,
        "shards": job.dataset.shards,
    }


def _defined(values: Iterable[float | None]) -> list[float]:
    return [value for value in values if value is not None]


def _require_one_cell(records: Sequence[RequestRecord]) -> None:
    cells = sorted({f"{r.dataset}/{r.run}" for r in records})
    if not cells:
        raise UserError("there are no request records to summarise")
    if len(cells) > 1:
        raise UserError(f"request records of one cell are wanted, these are of {', '.join(cells)}")


def _require_all_done(records: Sequence[RequestRecord], cell: str, expected: int) -> None:
    failed = [r for r in records if r.error is not None]
    if failed:
        reason = " ".join(str(failed[0].error).split())
        raise UserError(
            f"cell {cell}: {len(failed)} of {expected} requests failed, first "
            f"'{failed[0].request_id}': {reason}"
        )
    if len(records) != expected:
        raise UserError(
            f"cell {cell}: {len(records)} of {expected} requests are recorded: "
            "run the dataset's job again"
        )
