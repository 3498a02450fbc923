"""Table rows: the printed cells of the table, as numbers."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from dspark.metrics.cell import CellSummary

# Digits after the point in each kind of cell. Rates are printed in percent.
TOK_S_DIGITS = 2
SPEEDUP_DIGITS = 3
MS_DIGITS = 2
PERCENT_DIGITS = 2
LENGTH_DIGITS = 3

PRINTED_POSITIONS = 3


@dataclass(frozen=True)
class TableRow:
    """One row, each number as it is printed: rounded, rates as fractions, times in ms.

    None stands for a cell that has no value. `k` and `fixed_k` are not printed: they say which
    identities the row must pass. `k` is None when nobody knows it; `fixed_k` says that each step
    verifies exactly k draft tokens.
    """

    dataset: str
    run: str
    requests: int
    output_tok_s: float
    speedup: float
    latency_ms_mean: float
    latency_ms_p95: float
    ttft_ms_mean: float
    ttft_ms_p95: float
    itl_ms_mean: float | None
    itl_ms_p95: float | None
    tpot_ms_mean: float | None
    tpot_ms_p95: float | None
    accept_rate: float | None
    accept_p: tuple[float | None, float | None, float | None]
    accept_len: float | None
    k: int | None = None
    fixed_k: bool = False


def k_of_run_name(run: str) -> tuple[int | None, bool]:
    """The k that a run's name states (`..._k<number>`), and whether it is fixed.

    A name that goes on after the number (`dspark_k7_c50`) says that the run varies something else
    too, as a confidence threshold does, so its steps may verify fewer than k.
    """
    found = re.search(r"_k(\d+)(?!\d)", run)
    if found is None:
        return None, False
    return int(found[1]), found.end() == len(run)


def rows_from_summaries(summaries: Iterable[CellSummary]) -> list[TableRow]:
    """The rows of the table, in the order of the summaries, rounded as they will be printed."""
    return [_row(summary) for summary in summaries]


def _row(cell: CellSummary) -> TableRow:
    p1, p2, p3 = (
        _percent(cell.accept_p[i]) if i < len(cell.accept_p) else None
        for i in range(PRINTED_POSITIONS)
    )
    return TableRow(
        dataset=cell.dataset,
        run=cell.run,
        requests=cell.requests,
        output_tok_s=_as_printed(cell.output_tok_s, TOK_S_DIGITS),
        speedup=_as_printed(cell.speedup, SPEEDUP_DIGITS),
        latency_ms_mean=_as_printed(cell.latency_ms_mean, MS_DIGITS),
        latency_ms_p95=_as_printed(cell.latency_ms_p95, MS_DIGITS),
        ttft_ms_mean=_as_printed(cell.ttft_ms_mean, MS_DIGITS),
        ttft_ms_p95=_as_printed(cell.ttft_ms_p95, MS_DIGITS),
        itl_ms_mean=_or_none(cell.itl_ms_mean, MS_DIGITS),
        itl_ms_p95=_or_none(cell.itl_ms_p95, MS_DIGITS),
        tpot_ms_mean=_or_none(cell.tpot_ms_mean, MS_DIGITS),
        tpot_ms_p95=_or_none(cell.tpot_ms_p95, MS_DIGITS),
        accept_rate=None if cell.accept_rate is None else _percent(cell.accept_rate),
        accept_p=(p1, p2, p3),
        accept_len=_or_none(cell.accept_len, LENGTH_DIGITS),
        k=cell.k,
        fixed_k=cell.fixed_k,
    )


def _as_printed(value: float, digits: int) -> float:
    """The number that a reader gets back from the printed text."""
    return float(f"{value:.{digits}f}")


def _or_none(value: float | None, digits: int) -> float | None:
    return None if value is None else _as_printed(value, digits)


def _percent(fraction: float) -> float:
    return float(f"{100 * fraction:.{PERCENT_DIGITS}f}") / 100
