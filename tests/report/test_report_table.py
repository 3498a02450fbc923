"""The markdown table: printing, parsing, and what stands below it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.errors import UserError
from dspark.metrics.cell import CellSummary, write_summary
from dspark.metrics.lossless import Difference, judge
from dspark.report.table import (
    HEADER,
    TableRow,
    parse_table,
    render_report,
    render_table,
    rows_from_summaries,
    write_table,
)

TWO = st.integers(0, 10**9).map(lambda n: n / 100)
THREE = st.integers(0, 10**6).map(lambda n: n / 1000)
RATE = st.integers(0, 10**4).map(lambda n: float(f"{n / 100:.2f}") / 100)
NAME = st.text("abcdefghij_-0123456789. ", min_size=1).filter(lambda s: s == s.strip() and s)


def row_strategy() -> st.SearchStrategy[TableRow]:
    return st.builds(
        TableRow,
        dataset=NAME,
        run=NAME.map(lambda name: f"x{name}x"),  # states no k
        requests=st.integers(0, 10**6),
        output_tok_s=TWO,
        speedup=THREE,
        latency_ms_mean=TWO,
        latency_ms_p95=TWO,
        ttft_ms_mean=TWO,
        ttft_ms_p95=TWO,
        itl_ms_mean=st.none() | TWO,
        itl_ms_p95=st.none() | TWO,
        tpot_ms_mean=st.none() | TWO,
        tpot_ms_p95=st.none() | TWO,
        accept_rate=st.none() | RATE,
        accept_p=st.tuples(*[st.none() | RATE] * 3),
        accept_len=st.none() | THREE,
    ).filter(lambda row: "_k" not in row.run)


def test_published_table_round_trips_byte_for_byte(published_text: str) -> None:
    rows = parse_table(published_text)
    assert render_table(rows).encode() == published_text.encode()
    assert [row.run for row in rows[:3]] == ["baseline", "dspark_k3", "dspark_k7"]
    assert [(row.k, row.fixed_k) for row in rows[:3]] == [(None, False), (3, True), (7, True)]
    assert rows[1].accept_p == pytest.approx((0.6332, 0.3855, 0.2277))
    assert rows[-1].requests == 5000


@settings(deadline=None)
@given(rows=st.lists(row_strategy(), max_size=5))
def test_any_row_round_trips(rows: list[TableRow]) -> None:
    text = render_table(rows)
    assert parse_table(text) == rows
    assert render_table(parse_table(text)) == text


def test_every_percentage_round_trips(cell) -> None:
    [row] = rows_from_summaries([cell("gsm8k", "dspark_k3", 125, 3)])
    for n in range(10001):
        [again] = rows_from_summaries([cell("gsm8k", "dspark_k3", 125, 3, accept_rate=n / 10000)])
        assert render_table([again]).split(" | ")[-3] == f"{n // 100}.{n % 100:02d}%"
        assert parse_table(render_table([again])) == [replace(row, accept_rate=again.accept_rate)]


def test_our_rows_by_hand(cell) -> None:
    rows = rows_from_summaries(
        [
            cell("gsm8k", "baseline", 100),
            cell("gsm8k", "dspark_k3", 125, 3),
            cell("gsm8k", "dspark_k2", 125, 2),
            cell("gsm8k", "dspark_k3", 125, 3, accept_rate=None, accept_p=[], accept_len=None),
            cell("gsm8k", "baseline", 100, tpot_ms_mean=None, tpot_ms_p95=None),
        ]
    )
    lines = render_table(rows).splitlines()
    assert lines[0] == "| " + " | ".join(HEADER) + " |"
    times = "400.00/400.00 | 200.00/200.00 | 20.00/20.00"
    fast = "320.00/320.00 | 160.00/160.00 | 16.00/16.00 | 16.00/16.00"
    assert lines[2:] == [
        f"| gsm8k | baseline | 100 | 100.00 | 1.000x | {times} | 20.00/20.00 | — | -/-/- | — |",
        f"| gsm8k | dspark_k3 | 100 | 125.00 | 1.250x | {fast} "
        "| 29.17% | 50.00%/25.00%/12.50% | 1.875 |",
        f"| gsm8k | dspark_k2 | 100 | 125.00 | 1.250x | {fast} "
        "| 37.50% | 50.00%/25.00%/- | 1.750 |",
        f"| gsm8k | dspark_k3 | 100 | 125.00 | 1.250x | {fast} | — | -/-/- | — |",
        f"| gsm8k | baseline | 100 | 100.00 | 1.000x | {times} | -/- | — | -/-/- | — |",
    ]
    assert render_table(parse_table(render_table(rows))) == render_table(rows)


@pytest.mark.parametrize("name", ["a|b", "a\nb", " a", ""])
def test_names_that_break_the_table(cell, name: str) -> None:
    with pytest.raises(UserError, match="cannot stand in a table"):
        render_table(rows_from_summaries([cell(name, "baseline", 100)]))


# ---------------------------------------------------------------------------- parse errors


def swapped(text: str, old: str, new: str) -> str:
    assert text.count(old) >= 1
    return text.replace(old, new, 1)


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("Accept len |", "Accept length |", "columns are .*Accept length, expected .*Accept len"),
        ("| --- |", "| -- |", "line 2 of the table"),
        ("| 2.246 |", "| 2.246 | 1 |", r"row 2 \(line 4\): 13 cells, expected 12"),
        ("1.297x", "1.297", r"row 2 \(line 4\): column 'Speedup' holds '1.297', .*'1.297x'"),
        ("| 500 |", "| 5e2 |", r"row 1 \(line 3\): column 'Req' holds '5e2'"),
        ("327.25", "327.3", r"row 1 \(line 3\): column 'Output tok/s' holds '327.3'"),
        ("327.25", "—", r"row 1 \(line 3\): column 'Output tok/s' holds '—'"),
        ("1549.88/1901.40", "1549.88", r"row 1 .*'Latency mean/p95 ms' holds '1549.88'"),
        ("147.72/277.21", "-/277.21", r"row 1 .*'TTFT mean/p95 ms' holds '-/277.21'"),
        ("41.55%", "0.4155", r"row 2 .*'Accept rate' holds '0.4155', .*'41.55%'"),
        ("63.32%/38.55%/", "63.32%/", r"row 2 .*'Accept p1/p2/p3' holds '63.32%/22.77%'"),
        ("| -/-/- | — |", "| -/-/- | - |", r"row 1 .*'Accept len' holds '-'"),
        ("| math500 |", "|  |", r"row 1 \(line 3\): column 'Dataset' is empty"),
    ],
)
def test_malformed_table(published_text: str, old: str, new: str, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        parse_table(swapped(published_text, old, new))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("text", ["", "\n\n", "just words"])
def test_no_table(text: str) -> None:
    with pytest.raises(UserError, match="no table found"):
        parse_table(text)


# ---------------------------------------------------------------------------- the report


def test_report_by_hand(table_cells: list[CellSummary]) -> None:
    rows = rows_from_summaries(table_cells)
    text = render_report(rows, table_cells)
    assert text == render_table(rows) + (
        "\n\n"
        "- Outputs: float32, greedy: 200 of 200 requests of dspark_k3 identical to baseline, "
        "0 ties\n"
        "- Outputs: float32, greedy: 200 of 200 requests of dspark_k7 identical to baseline, "
        "0 ties\n"
        "\n"
        "| Dataset | Run | Speedup | 95 % interval | Accept len delivered | p4..pk |\n"
        "| --- | --- | --- | --- | --- | --- |\n"
        "| gsm8k | dspark_k3 | 1.250x | 1.188x to 1.312x | 2.195 | — |\n"
        "| gsm8k | dspark_k7 | 1.100x | 1.045x to 1.155x | 2.195 | 6.25%/3.00%/1.50%/0.75% |\n"
        "| mbpp | dspark_k3 | 1.250x | 1.188x to 1.312x | 2.195 | — |\n"
        "| mbpp | dspark_k7 | 1.100x | 1.045x to 1.155x | 2.195 | 6.25%/3.00%/1.50%/0.75% |\n"
        "\n"
        "- Settings: cpu, float32, concurrency 4, at most 128 new tokens, greedy, target tiny, "
        "drafter tiny-dspark, torch 2.13.0, dspark 0.1.0\n"
    )
    assert parse_table(text)[1].accept_len == rows[1].accept_len


def test_report_says_what_differs(cell) -> None:
    tie, far = Difference("p#0", 1, 2, 3, 1e-6), Difference("q#0", 1, 2, 3, 0.25)
    later = Difference("q#1", 1, 2, 3, None, inherited=True)
    arms = [
        cell("a", "r_k1", 1, 1, precision="bfloat16", lossless=judge([tie], 10, "bfloat16")),
        cell("b", "r_k1", 1, 1, precision="bfloat16", lossless=judge([far, later], 10, "bfloat16")),
        cell("c", "r_k1", 1, 1, precision="bfloat16", lossless=None),
    ]
    text = render_report([], arms)
    assert (
        "- Outputs: bfloat16, greedy: 17 of 20 requests of r_k1 identical to baseline, 1 tie, "
        "1 later turn after an answer that differed, 1 differ (b 1; largest logit margin 0.25)\n"
        "- Outputs: bfloat16, greedy: r_k1 on c: not compared\n"
    ) in text


def test_report_of_sampled_outputs(cell) -> None:
    verdict = judge([], 10, "float32", temperature=0.7)
    arm = cell("a", "r_k1", 1, 1, lossless=verdict, settings={"temperature": 0.7})
    assert (
        "- Outputs: float32, temperature 0.7: r_k1 on a: sampled outputs agree in distribution only"
    ) in render_report([], [arm])


def test_settings_that_vary_by_dataset(table_cells: list[CellSummary]) -> None:
    for cell in table_cells[3:]:
        cell.settings = {**cell.settings, "max_new_tokens": 256}
    text = render_report([], table_cells)
    assert "- Settings (gsm8k): cpu, float32, concurrency 4, at most 128 new tokens" in text
    assert "- Settings (mbpp): cpu, float32, concurrency 4, at most 256 new tokens" in text
    table_cells[5].settings = {**table_cells[5].settings, "target": "other"}
    with pytest.raises(UserError, match="mbpp/dspark_k7 ran with other settings"):
        render_report([], table_cells)


# ---------------------------------------------------------------------------- files


def written(cells: list[CellSummary], folder: Path) -> list[Path]:
    paths = [folder / cell.dataset / cell.run / "summary.json" for cell in cells]
    for path, cell in zip(paths, cells, strict=True):
        write_summary(path, cell)
    return paths


def test_write_table(table_cells: list[CellSummary], tmp_path: Path) -> None:
    paths = written(table_cells, tmp_path / "in")
    out = tmp_path / "out" / "table.md"
    text = write_table(paths, out)
    assert out.read_text(encoding="utf-8") == text
    assert text == render_report(rows_from_summaries(table_cells), table_cells)
    assert [p.name for p in out.parent.iterdir()] == ["table.md"]
    write_table(paths[3:] + paths[:3], out)
    assert [row.dataset for row in parse_table(out.read_text())] == ["mbpp"] * 3 + ["gsm8k"] * 3


def test_failing_identity_writes_nothing(table_cells: list[CellSummary], tmp_path: Path) -> None:
    table_cells[1].speedup = 1.3
    paths = written(table_cells, tmp_path / "in")
    out = tmp_path / "table.md"
    out.write_text("earlier")
    with pytest.raises(UserError, match="gsm8k/dspark_k3: identity 'speedup"):
        write_table(paths, out)
    assert out.read_text() == "earlier"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "table.md"]


def test_no_summaries_and_missing_summary(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no summaries"):
        write_table([], tmp_path / "table.md")
    with pytest.raises(UserError, match="does not exist"):
        write_table([tmp_path / "summary.json"], tmp_path / "table.md")
