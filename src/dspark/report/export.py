"""The table in other forms: for spreadsheets and programs all that is known, unrounded; for papers and
web pages what the markdown table prints.
"""

from __future__ import annotations

import html
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pandas as pd

from dspark.errors import UserError, nearest
from dspark.files import write_text
from dspark.report.blocks import Options, blocks_of, cells_of, is_grid
from dspark.report.card import model_card
from dspark.report.table import NO_VALUE, UNPAIRED, Cells, read_points, report_of

Points = Mapping[Options, Cells]

PREAMBLE = (
    "% \\usepackage{booktabs,graphicx}\n"
    "% Wide: they shrink to the line, so give it room: \\usepackage[landscape,margin=1cm]{geometry}"
)
SHRUNK = "\\noindent\\resizebox{\\ifdim\\width>\\linewidth\\linewidth\\else\\width\\fi}{!}{%"
STYLE = (
    "body { font-family: sans-serif; font-size: 14px; margin: 2em } "
    "table { border-collapse: collapse; margin: 1em 0 } "
    "th, td { padding: 0.3em 0.7em; border-bottom: 1px solid #ccc; text-align: right; "
    "white-space: nowrap } "
    "th { border-bottom: 2px solid #000 } "
    "th:nth-child(-n+2), td:nth-child(-n+2) { text-align: left }"
)


def write_export(
    summaries_paths: Sequence[str | Path], out: str | Path, form: str, allow_unpaired: bool = False
) -> str:
    """Read the summaries, check every identity, and write them as `form` under the final name.

    Returns the text that was written.

    Raises:
        UserError: there is no such form; see `dspark.report.table.read_points`; or the file cannot be
            written.
    """
    if form not in FORMS:
        raise UserError(f"format '{form}' is unknown: {nearest(form, FORMS)}")
    text = FORMS[form](read_points(summaries_paths, allow_unpaired))
    write_text(out, text)
    return text


def as_json(points: Points) -> str:
    """The summaries of all cells as one list; what a sweep set at a cell is its `sweep`.

    `unpaired` says what a cell that was not measured as its baseline was differs in; its speedup,
    relative to the given baseline, then has no interval.
    """
    return json.dumps(_objects(points), indent=2, allow_nan=False) + "\n"


def _objects(points: Points) -> list[dict[str, Any]]:
    return [
        _object(options, cells, number)
        for options, cells in points.items()
        for number in range(len(cells.summaries))
    ]


def _object(options: Options, cells: Cells, number: int) -> dict[str, Any]:
    cell = cells.summaries[number]
    differing = cells.unpaired.get((cell.dataset, cell.run))
    values = {"sweep": dict(options), **asdict(cell), "unpaired": None}
    if differing:
        values["unpaired"] = ", ".join(map(str, differing))
        values["speedup_ci95_low"] = values["speedup_ci95_high"] = None
    return values


def as_csv(points: Points) -> str:
    """One line a cell with a column for each of its numbers and texts, nested names joined by dots.

    Lists by draft position are `accept_p1`, ..; counts of accepted tokens `accept_histogram_0`, ..
    What else is a list (devices, differences) is left out, and so are the step curves.
    """
    lines = _objects(points)
    positions, numbers = (
        max(len(values[name]) for values in lines) for name in ("accept_p", "accept_histogram")
    )
    for values in lines:
        values["lossless"] = values["lossless"] or {}  # no column for a whole that is absent
        values["settings"].pop("step_curves", None)
        # In all rows alike, for the columns stand in the order in which the rows bring them.
        shares, counts = values.pop("accept_p"), values.pop("accept_histogram")
        values |= {f"accept_p{place + 1}": _at(shares, place) for place in range(positions)}
        values |= {f"accept_histogram_{place}": _at(counts, place) for place in range(numbers)}
    frame = pd.json_normalize(lines)
    listed = [
        name for name in frame if frame[name].map(lambda value: isinstance(value, list)).any()
    ]
    # counts that some cells lack stay whole numbers
    return frame.drop(columns=listed).convert_dtypes().to_csv(index=False, lineterminator="\n")


def _at(values: Sequence[Any], place: int) -> Any:
    """The value at a place, from 0; None behind the last."""
    return values[place] if place < len(values) else None


def as_latex(points: Points) -> str:
    """The report's tables as tabulars for `booktabs`; what stands below them as comments.

    They are wider than a page: each shrinks to the line that it stands in.
    """
    parts = [PREAMBLE]
    for block in blocks_of(report_of(points)):
        if is_grid(block):
            frame = _frame(block)
            names = len(frame.columns) - len(_numbers(frame))
            form = "l" * names + "r" * len(_numbers(frame))
            text = frame.to_latex(index=False, escape=True, column_format=form)
            text = text.replace(NO_VALUE, "---").replace(UNPAIRED, "\\textdagger{}")
            parts.append(f"{SHRUNK}\n{text}}}\\par\\medskip")
        else:
            parts.append("\n".join(f"% {line}" for line in block))
    return "\n\n".join(parts) + "\n"


def as_html(points: Points) -> str:
    """The report as a page that needs no other file."""
    parts = [
        _frame(block).to_html(index=False, escape=True, border=0)
        if is_grid(block)
        else _list(line.removeprefix("- ") for line in block)
        for block in blocks_of(report_of(points))
    ]
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head><meta charset="utf-8"><title>dspark</title>'
        f"<style>{STYLE}</style></head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _frame(grid: Sequence[str]) -> pd.DataFrame:
    header, _, *rows = grid
    return pd.DataFrame([cells_of(row) for row in rows], columns=cells_of(header))


def _numbers(frame: pd.DataFrame) -> list[str]:
    """The columns behind the one that names the run."""
    columns = list(frame.columns)
    return columns[columns.index("Run") + 1 :]


def _list(lines: Iterable[str]) -> str:
    return "<ul>\n" + "\n".join(f"<li>{html.escape(line)}</li>" for line in lines) + "\n</ul>"


FORMS: dict[str, Callable[[Points], str]] = {
    "markdown": report_of,
    "csv": as_csv,
    "json": as_json,
    "latex": as_latex,
    "html": as_html,
    "model-card": model_card,
}
