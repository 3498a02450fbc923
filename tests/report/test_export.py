"""The table in other forms: nothing lost in csv and json, nothing broken in LaTeX and HTML."""

from __future__ import annotations

import io
import json
import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pandas as pd
import pytest
from measured import write_results

from dspark.errors import UserError
from dspark.metrics.cell import CellSummary, read_summary, write_summary
from dspark.report.blocks import blocks_of, cells_of, is_grid
from dspark.report.export import FORMS, write_export
from dspark.report.table import write_table


@pytest.fixture
def summaries(tmp_path: Path) -> list[Path]:
    paths = write_results(tmp_path / "demo")
    (tmp_path / "demo" / "command.txt").write_text("dspark run demo\n")
    return paths


@pytest.fixture
def unpaired(summaries: list[Path]) -> list[Path]:
    """mt_bench's last run comes from another device."""
    cell = read_summary(summaries[-1])
    cell.settings["device"] = "NVIDIA H200"
    write_summary(summaries[-1], cell)
    return summaries


@pytest.fixture
def sweep(tmp_path: Path) -> list[Path]:
    points = (tmp_path / "sweep" / f"sampling.temperature={value}" for value in ("0.0", "0.5"))
    return [path for point in points for path in write_results(point, ["gsm8k"], ks=(0, 3))]


# ---------------------------------------------------------------------------- csv and json


def read_csv(text: str) -> pd.DataFrame:
    return pd.read_csv(io.StringIO(text))


def test_csv_holds_every_number_as_it_is(summaries: list[Path], tmp_path: Path) -> None:
    scheduled = read_summary(summaries[-1])
    plain = {"tokens": [1], "seconds": [0.1], "fitted": [0.1], "plain": None}
    scheduled.settings["step_curves"] = {"dspark_sched": {**plain, "plain": plain}}
    write_summary(summaries[-1], scheduled)
    frame = read_csv(write_export(summaries, tmp_path / "t.csv", "csv"))
    cells = [read_summary(path) for path in summaries]
    assert list(frame["run"]) == [cell.run for cell in cells]
    for place, cell in enumerate(cells):
        row = frame.iloc[place]
        for name, value in asdict(cell).items():
            if isinstance(value, int | float | str):
                assert row[name] == value, name
        shares = [row[f"accept_p{i}"] for i in range(1, 1 + len(cell.accept_p))]
        assert shares == cell.accept_p
        assert all(pd.isna(row[f"accept_p{i}"]) for i in range(1 + len(cell.accept_p), 8))
        assert row["settings.versions.torch"] == "2.13.0"
    assert not frame.columns.str.contains("by_device|step_curves").any()
    accepted = [name for name in frame.columns if name.startswith(("accept_p", "accept_hist"))]
    assert accepted == [f"accept_p{i}" for i in range(1, 8)] + [
        f"accept_histogram_{i}" for i in range(8)
    ]


def test_csv_counts_are_whole_numbers(summaries: list[Path], tmp_path: Path) -> None:
    cell = read_summary(summaries[0])
    cell.finish_reasons = {"length": 5, "stop": 1}  # which the other cells do not have
    write_summary(summaries[0], cell)
    lines = write_export(summaries, tmp_path / "t.csv", "csv").splitlines()
    place = lines[0].split(",").index("finish_reasons.stop")
    assert [line.split(",")[place] for line in lines[1:4]] == ["1", "", ""]


def test_json_is_the_summaries(summaries: list[Path], tmp_path: Path) -> None:
    found = json.loads(write_export(summaries, tmp_path / "t.json", "json"))
    for values, path in zip(found, summaries, strict=True):
        assert (values.pop("sweep"), values.pop("unpaired")) == ({}, None)
        assert values == json.loads(path.read_text())


def test_an_unpaired_cell_says_so(unpaired: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no speedup without its own baseline"):
        write_export(unpaired, tmp_path / "t.json", "json")
    assert not (tmp_path / "t.json").exists()
    text = write_export(unpaired, tmp_path / "t.json", "json", allow_unpaired=True)
    *others, last = json.loads(text)
    assert last["unpaired"].startswith('device "NVIDIA H200" against "cpu"')
    assert (last["speedup_ci95_low"], last["speedup_ci95_high"]) == (None, None)
    baseline = next(c for c in others if (c["dataset"], c["run"]) == (last["dataset"], "baseline"))
    assert last["speedup"] == last["output_tok_s"] / baseline["output_tok_s"]


def test_a_sweep_names_its_point_in_every_row(sweep: list[Path], tmp_path: Path) -> None:
    frame = read_csv(write_export(sweep, tmp_path / "t.csv", "csv"))
    assert list(frame["sweep.sampling.temperature"]) == [0.0, 0.0, 0.5, 0.5]
    found = json.loads(write_export(sweep, tmp_path / "t.json", "json"))
    assert [values["sweep"] for values in found[1:3]] == [
        {"sampling.temperature": "0.0"},
        {"sampling.temperature": "0.5"},
    ]


# ---------------------------------------------------------------------------- LaTeX and HTML


def tabulars(text: str) -> list[list[list[str]]]:
    """Rows of cells of each tabular, and what makes a tabular one."""
    found = []
    for form, body in re.findall(
        r"^\\begin\{tabular\}\{(\w+)\}\n(.*?)^\\end\{tabular\}", text, re.M | re.S
    ):
        lines = body.splitlines()
        assert [lines[0], lines[2], lines[-1]] == ["\\toprule", "\\midrule", "\\bottomrule"]
        rows = [lines[1], *lines[3:-1]]
        assert all(row.endswith(" \\\\") for row in rows)
        cells = [re.split(r"(?<!\\)&", row.removesuffix("\\\\")) for row in rows]
        assert {len(row) for row in cells} == {len(form)}
        found.append([[cell.strip() for cell in row] for row in cells])
    return found


def unescaped(cell: str) -> str:
    return re.sub(r"\\([%_#&$])", r"\1", cell).replace("---", "—").replace("\\textdagger{}", "†")


def test_latex_holds_the_printed_tables(unpaired: list[Path], tmp_path: Path) -> None:
    text = write_export(unpaired, tmp_path / "t.tex", "latex", allow_unpaired=True)
    report = write_table(unpaired, tmp_path / "t.md", allow_unpaired=True)
    grids = [block for block in blocks_of(report) if is_grid(block)]
    assert len(grids) == 2 == len(tabulars(text))
    for rows, (header, _, *lines) in zip(tabulars(text), grids, strict=True):
        assert [[unescaped(cell) for cell in row] for row in rows] == [
            cells_of(line) for line in [header, *lines]
        ]
    assert all(line.isascii() for line in text.splitlines() if not line.startswith("%"))
    outside = re.sub(
        r"^\\noindent\\resizebox\{.*\}\{!\}\{%\n\\begin.*?^\\end\{tabular\}\n\}\\par\\medskip$",
        "",
        text,
        flags=re.M | re.S,
    )
    assert all(line.startswith("%") for line in outside.splitlines() if line)


def test_latex_escapes_names(tmp_path: Path) -> None:
    summaries = write_results(tmp_path / "demo", ["50%_of_a&b#1$^~{}"], ks=(0, 3))
    [table, _] = tabulars(write_export(summaries, tmp_path / "t.tex", "latex"))
    assert table[1][0] == (r"50\%\_of\_a\&b\#1\$\textasciicircum \textasciitilde \{\}")


def test_html_is_a_whole_page_with_the_printed_tables(
    summaries: list[Path], tmp_path: Path
) -> None:
    text = write_export(summaries, tmp_path / "t.html", "html")
    page = ElementTree.fromstring(
        text.removeprefix("<!DOCTYPE html>").replace('<meta charset="utf-8">', "")
    )
    report = write_table(summaries, tmp_path / "t.md")
    grids = [block for block in blocks_of(report) if is_grid(block)]
    for table, (header, _, *lines) in zip(page.iter("table"), grids, strict=True):
        rows = [[cell.text for cell in row] for row in table.iter("tr")]
        assert rows == [cells_of(line) for line in [header, *lines]]
    items = [item.text for item in page.iter("li")]
    assert items == [
        line.removeprefix("- ") for line in report.splitlines() if line.startswith("- ")
    ]


# ---------------------------------------------------------------------------- all forms


def test_markdown_is_the_table(summaries: list[Path], tmp_path: Path) -> None:
    assert write_export(summaries, tmp_path / "a", "markdown") == write_table(
        summaries, tmp_path / "b"
    )


@pytest.mark.parametrize("form", FORMS)
def test_what_is_returned_is_written_and_stays_the_same(
    summaries: list[Path], tmp_path: Path, form: str
) -> None:
    out = tmp_path / "out" / f"table.{form}"
    text = write_export(summaries, out, form)
    assert out.read_text(encoding="utf-8") == text == write_export(summaries, out, form)
    assert [path.name for path in out.parent.iterdir()] == [out.name]


def test_an_unknown_form_names_the_nearest(summaries: list[Path], tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"format 'latx' is unknown: did you mean 'latex'\?"):
        write_export(summaries, tmp_path / "t", "latx")


def test_numbers_that_contradict_each_other_are_not_exported(
    summaries: list[Path], tmp_path: Path, cell: Callable[..., CellSummary]
) -> None:
    odd = read_summary(summaries[1])
    odd.accept_len = 3.0
    write_summary(summaries[1], odd)
    for form in FORMS:
        with pytest.raises(UserError, match="identity 'accept_len"):
            write_export(summaries, tmp_path / "t", form)
    assert not (tmp_path / "t").exists()


def test_sweeps_over_different_options_are_not_mixed(
    sweep: list[Path], summaries: list[Path], tmp_path: Path
) -> None:
    with pytest.raises(
        UserError, match=r"over different options, nothing and sampling\.temperature: make one"
    ):
        write_table([*sweep, *summaries], tmp_path / "t.md")


def test_a_sweeps_table_has_a_column_for_the_option(sweep: list[Path], tmp_path: Path) -> None:
    lines = write_table(sweep, tmp_path / "t.md").splitlines()
    assert lines[0].startswith("| sampling.temperature | Dataset | Run | Req |")
    assert [line.split(" | ")[:3] for line in lines[2:6]] == [
        ["| 0.0", "gsm8k", "baseline"],
        ["| 0.0", "gsm8k", "dspark_k3"],
        ["| 0.5", "gsm8k", "baseline"],
        ["| 0.5", "gsm8k", "dspark_k3"],
    ]
