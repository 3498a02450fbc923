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
        "| Dataset | Run | Speedup | 95 % interval | Accept len delivered | "
        "Break-even accept len | p4..pk |\n"
        "| --- | --- | --- | --- | --- | --- | --- |\n"
        "| gsm8k | dspark_k3 | 1.250x | 1.188x to 1.312x | 2.195 | 1.500 | — |\n"
        "| gsm8k | dspark_k7 | 1.100x | 1.045x to 1.155x | 2.195 | 1.500 | 6.25%/3.00%/1.50%/0.75% |\n"
        "| mbpp | dspark_k3 | 1.250x | 1.188x to 1.312x | 2.195 | 1.500 | — |\n"
        "| mbpp | dspark_k7 | 1.100x | 1.045x to 1.155x | 2.195 | 1.500 | 6.25%/3.00%/1.50%/0.75% |\n"
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


@pytest.mark.parametrize(
    ("requests", "concurrency", "said"), [(15, 4, True), (16, 4, False), (1, 1, False)]
)
def test_windows_too_short_for_their_concurrency_are_named(
    cell, requests: int, concurrency: int, said: bool
) -> None:
    short = cell("a", "baseline", 1, concurrency=concurrency)
    short.by_device = [replace(short.by_device[0], requests=requests, windows=1)]
    text = render_report([], [short, cell("b", "baseline", 1)])
    assert ("- Few requests for those in flight (a): the end of each window" in text) is said


def test_settings_that_vary_by_dataset(table_cells: list[CellSummary]) -> None:
    for cell in table_cells[3:]:
        cell.settings = {**cell.settings, "max_new_tokens": 256}
    text = render_report([], table_cells)
    assert "- Settings (gsm8k): cpu, float32, concurrency 4, at most 128 new tokens" in text
    assert "- Settings (mbpp): cpu, float32, concurrency 4, at most 256 new tokens" in text


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
    table_cells[1].accept_len = 1.9
    paths = written(table_cells, tmp_path / "in")
    out = tmp_path / "table.md"
    out.write_text("earlier")
    with pytest.raises(UserError, match="gsm8k/dspark_k3: identity 'accept_len"):
        write_table(paths, out)
    assert out.read_text() == "earlier"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["in", "table.md"]


def test_no_summaries_and_missing_summary(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no summaries"):
        write_table([], tmp_path / "table.md")
    with pytest.raises(UserError, match="does not exist"):
        write_table([tmp_path / "summary.json"], tmp_path / "table.md")


# ---------------------------------------------------------------------------- honest pairing

OTHER = {
    "device": "NVIDIA H200",
    "versions": {"torch": "2.12.1", "dspark": "0.1.0"},
    "git_sha": "abc",
}
DIFFERS = (
    'device "NVIDIA H200" against "cpu", git_sha "abc" against unknown, '
    'torch "2.12.1" against "2.13.0"'
)


@pytest.fixture
def mixed_cells(table_cells: list[CellSummary]) -> list[CellSummary]:
    """gsm8k's k = 3 and 7 come from another machine, where the baseline made 80 tok/s."""
    for cell in table_cells[1:3]:
        cell.settings = {**cell.settings, **OTHER}
        cell.speedup = cell.output_tok_s / 80
    return table_cells


def test_a_speedup_over_a_strange_baseline_is_refused(
    mixed_cells: list[CellSummary], tmp_path: Path
) -> None:
    paths = written(mixed_cells, tmp_path / "in")
    with pytest.raises(UserError) as caught:
        write_table(paths, tmp_path / "table.md")
    message = str(caught.value)
    assert message == (
        "no speedup without its own baseline: gsm8k/dspark_k3, gsm8k/dspark_k7: not measured as "
        f"baseline was: {DIFFERS}, baseline_tok_s 80 against 100: run the job of the dataset again, "
        "or set allow_unpaired=true (`dspark table --allow-unpaired`) for a table that says so"
    )
    assert not (tmp_path / "table.md").exists()


def test_an_unpaired_speedup_is_marked_and_explained(
    mixed_cells: list[CellSummary], tmp_path: Path
) -> None:
    paths = written(mixed_cells, tmp_path / "in")
    text = write_table(paths, tmp_path / "table.md", allow_unpaired=True)
    lines = text.splitlines()
    assert [line.split(" | ")[4] for line in lines[2:8]] == [
        "1.000x",
        "1.250x †",
        "1.100x †",
        "1.000x",
        "1.250x",
        "1.100x",
    ]
    assert lines[9] == (
        "- † gsm8k/dspark_k3, gsm8k/dspark_k7: not measured as baseline was: "
        f"{DIFFERS}, baseline_tok_s 80 against 100"
    )
    assert (
        "| gsm8k | dspark_k3 | 1.250x † | — | 2.195 | — | — |" in lines
    )  # no interval without pairs
    assert "| mbpp | dspark_k3 | 1.250x | 1.188x to 1.312x | 2.195 | 1.500 | — |" in lines
    assert lines[-1].startswith("- Settings: cpu, float32")  # the baselines'
    assert [row.speedup for row in parse_table(text)[:3]] == [1.0, 1.25, 1.1]
    assert write_table(paths, tmp_path / "again.md", allow_unpaired=True) == text


def test_allowing_changes_nothing_in_an_honest_table(
    table_cells: list[CellSummary], tmp_path: Path
) -> None:
    paths = written(table_cells, tmp_path / "in")
    strict = write_table(paths, tmp_path / "a.md")
    assert write_table(paths, tmp_path / "b.md", allow_unpaired=True) == strict
    assert "†" not in strict


def test_an_unpaired_cell_is_held_to_its_own_identities(
    mixed_cells: list[CellSummary], tmp_path: Path
) -> None:
    mixed_cells[1].latency_ms_mean *= 2
    with pytest.raises(UserError, match="gsm8k/dspark_k3: identity 'mean latency ="):
        write_table(written(mixed_cells, tmp_path / "in"), tmp_path / "t.md", allow_unpaired=True)


def test_summaries_of_two_experiments(table_cells: list[CellSummary], tmp_path: Path) -> None:
    for cell in table_cells:
        name = "demo" if cell.dataset == "gsm8k" else "other"
        cell.settings = {**cell.settings, "experiment": name}
    paths = written(table_cells, tmp_path / "in")
    with pytest.raises(
        UserError, match=r"different experiments, 'demo' \(gsm8k\) and 'other' \(mbpp\)"
    ):
        write_table(paths, tmp_path / "table.md")
    text = write_table(paths, tmp_path / "table.md", allow_unpaired=True)
    assert "†" not in text  # each dataset has a baseline of its own
    assert "- Settings (gsm8k): experiment demo, cpu" in text
    assert "- Settings (mbpp): experiment other, cpu" in text


@pytest.mark.parametrize("allow", [False, True])
def test_a_cell_twice_and_an_absent_baseline(
    table_cells: list[CellSummary], tmp_path: Path, allow: bool
) -> None:
    one, two = (written(table_cells, tmp_path / name) for name in ("one", "two"))
    with pytest.raises(UserError) as caught:
        write_table([*one, two[3]], tmp_path / "table.md", allow)
    assert f"cell mbpp/baseline is given twice, by '{one[3]}' and by '{two[3]}'" in str(
        caught.value
    )
    with pytest.raises(UserError, match="'mbpp' has no baseline summary"):
        write_table([*one[:3], *one[4:]], tmp_path / "table.md", allow)
    assert not (tmp_path / "table.md").exists()
