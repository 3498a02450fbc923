"""The plots of an experiment as files: a pure function of its summaries and request records.

`<out>/speedup` compares all datasets, `<out>/<dataset>-<kind>` shows one; a sweep has the plots of
each of its points in a folder `<out>/<point>`, and `<out>/concurrency` where that was swept. Each is
written as PNG and as SVG.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

from dspark.config import point_name
from dspark.decode.records import RequestRecord
from dspark.errors import UserError
from dspark.metrics.cell import BASELINE, CellSummary
from dspark.metrics.records_io import read_records
from dspark.report import figures
from dspark.report.blocks import Options
from dspark.report.style import write_figure
from dspark.report.table import Cells, read_points

RECORDS = "requests.parquet"


def write_plots(
    summaries_paths: Sequence[Path], out: Path, allow_unpaired: bool = False
) -> list[Path]:
    """Draw these cells, whose request records lie in the folder of their dataset.

    Returns the PNG files; beside each lies an SVG.

    Raises:
        UserError: see `dspark.report.table.read_points`; a dataset's records are absent or are not
            those of its summaries; a file cannot be written.
    """
    points = read_points(summaries_paths, allow_unpaired)
    written = []
    for options, cells in points.items():
        written += _write_point(cells, out / point_name(dict(options)))
    everything = [
        replace(cell, run=_label(cell.run, options))
        for options, cells in points.items()
        for cell in cells.summaries
    ]
    if len({cell.concurrency for cell in everything}) > 1:
        written.append(out / "concurrency.png")
        write_figure(partial(figures.speedup_by_concurrency, everything), written[-1])
    return written


def _label(run: str, options: Options) -> str:
    """An arm's name with what a sweep varied beside the concurrency."""
    others = {name: value for name, value in options if name != "engine.concurrency"}
    return f"{run} ({point_name(others)})" if others and run != BASELINE else run


def _write_point(cells: Cells, out: Path) -> list[Path]:
    folders: dict[str, Path] = {}
    datasets: dict[str, list[CellSummary]] = {}
    for path, cell in zip(cells.paths, cells.summaries, strict=True):
        folders[cell.dataset] = path.absolute().parents[1]
        datasets.setdefault(cell.dataset, []).append(cell)
    written = [out / "speedup.png"]
    write_figure(partial(figures.speedup, datasets, cells.unpaired), written[0])
    for name, members in datasets.items():
        written += _write_dataset(name, members, folders[name], out)
    return written


def _write_dataset(name: str, cells: Sequence[CellSummary], folder: Path, out: Path) -> list[Path]:
    records = _records_of(cells, folder / RECORDS)
    drawn = {
        "acceptance": partial(figures.acceptance, name, cells),
        "accept_length": partial(figures.accept_length, name, cells),
        "latency": partial(figures.latency, name, cells, records),
        "ttft": partial(figures.ttft, name, cells, records),
        "throughput": partial(figures.throughput, name, cells, records),
    }
    written = {kind: out / f"{folder.name}-{kind}.png" for kind in drawn}
    for kind, draw in drawn.items():
        write_figure(draw, written[kind])
    return list(written.values())


def _records_of(cells: Sequence[CellSummary], path: Path) -> dict[str, list[RequestRecord]]:
    """The request records of each cell of a dataset.

    Raises:
        UserError: they cannot be read, or are not those that a cell was summarised from.
    """
    records: dict[str, list[RequestRecord]] = {cell.run: [] for cell in cells}
    for record in read_records(path):
        if record.run in records:
            records[record.run].append(record)
    for cell in cells:
        found = records[cell.run]
        tokens = sum(record.output_tokens for record in found)
        if (len(found), tokens) != (cell.requests, cell.output_tokens):
            raise UserError(
                f"'{path}' holds {len(found)} requests with {tokens} output tokens of run "
                f"'{cell.run}', its summary tells of {cell.requests} with {cell.output_tokens}: "
                "summarise the dataset's records again"
            )
    return records
