"""Measured speedups beside what acceptance and step times predict: is anything lost between steps?

    python benchmarks/predicted.py results/demo

With C requests in flight all the time, an arm takes the sum of its prefills and, for n tokens a request of
which L are delivered a step, the sum of (n - 1) / L / C steps. The predicted speedup is the baseline's time
over the arm's. What is measured beside it also has the ends of its windows, where slots stand idle: the
last column but one says how many requests were in flight on average in the arm.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import click

from dspark.decode.records import RequestRecord
from dspark.metrics.cell import BASELINE, CellSummary, read_summary
from dspark.metrics.records_io import read_records
from dspark.metrics.timing import laid_end_to_end, latency_s


def prefill_seconds(records: Sequence[RequestRecord]) -> float:
    """Sum of a run's prefills: each from what happened last before its request's first token."""
    windows: dict[tuple[int, int], list[RequestRecord]] = defaultdict(list)
    for record in records:
        windows[record.shard, record.window].append(record)
    total = 0.0
    for inside in windows.values():
        events = sorted({t for r in inside for t in (r.t_submit, r.t_first, *r.step_t)})
        total += sum(r.t_first - events[bisect_left(events, r.t_first) - 1] for r in inside)
    return total


def busy_seconds(
    records: Sequence[RequestRecord], concurrency: int, step_ms: float, tokens_a_step: float
) -> float:
    """Predicted time of a run whose slots are never idle."""
    steps = sum(r.output_tokens - 1 for r in records) / tokens_a_step / concurrency
    return prefill_seconds(records) + steps * step_ms / 1000


@click.command()
@click.argument("results", type=click.Path(exists=True, file_okay=False, path_type=Path))
def main(results: Path) -> None:
    """Print a line for each cell with a draft."""
    click.echo(
        "| dataset | run | delivered | break-even | predicted | measured | in flight | apart |"
    )
    click.echo("| --- | --- | --- | --- | --- | --- | --- | --- |")
    for folder in sorted(path.parent for path in results.glob("*/requests.parquet")):
        runs: dict[str, list[RequestRecord]] = defaultdict(list)
        for record in read_records(folder / "requests.parquet"):
            runs[record.run].append(record)
        for path in sorted(folder.glob("*/summary.json")):
            cell = read_summary(path)
            if cell.run in runs and cell.step_ms_spec is not None:
                click.echo(_line(cell, runs[BASELINE], runs[cell.run]))


def _line(cell: CellSummary, base: list[RequestRecord], arm: list[RequestRecord]) -> str:
    assert cell.step_ms_baseline is not None and cell.step_ms_spec is not None
    assert cell.accept_len_delivered is not None and cell.break_even_accept_len is not None
    predicted = busy_seconds(base, cell.concurrency, cell.step_ms_baseline, 1.0) / busy_seconds(
        arm, cell.concurrency, cell.step_ms_spec, cell.accept_len_delivered
    )
    _, measured = laid_end_to_end(arm)
    flying = sum(map(latency_s, arm)) / measured
    return (
        f"| {cell.dataset} | {cell.run} | {cell.accept_len_delivered:.3f} "
        f"| {cell.break_even_accept_len:.3f} | {predicted:.3f}x | {cell.speedup:.3f}x "
        f"| {flying:.2f} | {cell.speedup / predicted - 1:+.1%} |"
    )


if __name__ == "__main__":
    main()
