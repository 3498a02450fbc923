"""The markdown table, and what stands below it: a pure function of the cell summaries."""

from __future__ import annotations

import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from dspark.config import point_options
from dspark.errors import UserError
from dspark.files import write_text
from dspark.metrics.cell import BASELINE, CellSummary, read_summary
from dspark.metrics.identities import check_devices, check_rows, check_summaries, mostly_ramps
from dspark.metrics.pairing import Mismatch, mismatches
from dspark.metrics.rows import (
    LENGTH_DIGITS,
    MS_DIGITS,
    PERCENT_DIGITS,
    PRINTED_POSITIONS,
    SPEEDUP_DIGITS,
    TOK_S_DIGITS,
    TableRow,
    k_of_run_name,
    rows_from_summaries,
)
from dspark.report.blocks import Options, swept

__all__ = [
    "HEADER",
    "TableRow",
    "parse_table",
    "render_report",
    "render_table",
    "rows_from_summaries",
    "write_table",
]

# A whole cell without a value, and one of several values in a cell without one.
NO_VALUE = "—"
NO_PART = "-"
# What an arm's step emits, and what it must emit to win: where its step takes that many baseline steps.
LENGTHS = ("Accept len delivered", "Break-even accept len")
# Behind a speedup whose two arms were not measured alike.
UNPAIRED = "†"

# Dataset and run, of cells that were not measured as their baseline was: what differs.
Unpaired = Mapping[tuple[str, str], Sequence[Mismatch]]

HEADER = (
    "Dataset",
    "Run",
    "Req",
    "Output tok/s",
    "Speedup",
    "Latency mean/p95 ms",
    "TTFT mean/p95 ms",
    "ITL mean/p95 ms",
    "TPOT mean/p95 ms",
    "Accept rate",
    "Accept p1/p2/p3",
    "Accept len",
)


def render_table(rows: Iterable[TableRow], unpaired: Container[tuple[str, str]] = ()) -> str:
    """The table as markdown, one line a row, without a newline after the last.

    The speedups of `unpaired`, by dataset and run, are marked.

    Raises:
        UserError: a dataset or run name holds a character that would break the table.
    """
    return markdown(HEADER, [_cells(row, (row.dataset, row.run) in unpaired) for row in rows])


def markdown(header: Sequence[str], body: Iterable[Sequence[str]]) -> str:
    """A markdown table of these cells, without a newline after the last line."""
    lines = [header, ["---"] * len(header), *body]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _cells(row: TableRow, unpaired: bool) -> list[str]:
    return [
        _name(row.dataset),
        _name(row.run),
        str(row.requests),
        _fixed(row.output_tok_s, TOK_S_DIGITS),
        _speedup(row.speedup, unpaired),
        _parts([row.latency_ms_mean, row.latency_ms_p95], _ms),
        _parts([row.ttft_ms_mean, row.ttft_ms_p95], _ms),
        _parts([row.itl_ms_mean, row.itl_ms_p95], _ms),
        _parts([row.tpot_ms_mean, row.tpot_ms_p95], _ms),
        NO_VALUE if row.accept_rate is None else _percent(row.accept_rate),
        _parts(row.accept_p, _percent),
        NO_VALUE if row.accept_len is None else _fixed(row.accept_len, LENGTH_DIGITS),
    ]


def _name(name: str) -> str:
    if name != name.strip() or not name or re.search(r"[|\r\n]", name):
        raise UserError(
            f"the name {name!r} cannot stand in a table: use no '|', line break or outer space"
        )
    return name


def _fixed(value: float, digits: int) -> str:
    return f"{value:.{digits}f}"


def _ms(value: float) -> str:
    return _fixed(value, MS_DIGITS)


def _percent(fraction: float) -> str:
    return f"{fraction:.{PERCENT_DIGITS}%}"


def _speedup(value: float, unpaired: bool = False) -> str:
    text = f"{_fixed(value, SPEEDUP_DIGITS)}x"
    return f"{text} {UNPAIRED}" if unpaired else text


def _parts(values: Iterable[float | None], text: Callable[[float], str]) -> str:
    return "/".join(NO_PART if value is None else text(value) for value in values)


# --------------------------------------------------------------------------- parsing


@dataclass(frozen=True)
class _Format:
    """How one number is printed: a pattern that only the printed form matches, and its value."""

    pattern: str
    example: str
    value: Callable[[str], float]


_COUNT = _Format(r"\d+", "500", int)
_TOK_S_FORMAT = _Format(rf"\d+\.\d{{{TOK_S_DIGITS}}}", "327.25", float)
_SPEEDUP_FORMAT = _Format(
    rf"\d+\.\d{{{SPEEDUP_DIGITS}}}x( {UNPAIRED})?", "1.297x", lambda text: float(text.split("x")[0])
)
_MS_FORMAT = _Format(rf"\d+\.\d{{{MS_DIGITS}}}", "8.35", float)
_PERCENT_FORMAT = _Format(
    rf"\d+\.\d{{{PERCENT_DIGITS}}}%", "41.55%", lambda text: float(text.removesuffix("%")) / 100
)
_LENGTH_FORMAT = _Format(rf"\d+\.\d{{{LENGTH_DIGITS}}}", "2.246", float)


def parse_table(text: str) -> list[TableRow]:
    """Read a table that `render_table` or the published one's generator printed.

    The table is the first block of lines of `text`; what comes after a blank line is not read, and
    the mark of an unpaired speedup is not kept. k comes from the run's name, see
    `dspark.metrics.rows.k_of_run_name`.

    Raises:
        UserError: the columns are not those of the table, or a cell is malformed; the row's number
            (and the line's, counted from 1) and the column are named.
    """
    lines: list[str] = []
    for line in text.split("\n"):
        if not line.strip():
            break
        lines.append(line)
    if len(lines) < 2:
        raise UserError("no table found: the first line must be its header")
    columns = _split(lines[0])
    if columns != list(HEADER):
        raise UserError(
            f"the table's columns are {' | '.join(columns)}, expected {' | '.join(HEADER)}"
        )
    if _split(lines[1]) != ["---"] * len(HEADER):
        raise UserError("line 2 of the table is not the rule below its header")
    return [_row(number, line) for number, line in enumerate(lines[2:], start=1)]


def _split(line: str) -> list[str]:
    text = line.strip().removeprefix("|").removesuffix("|")
    return [cell.strip() for cell in text.split("|")]


def _row(number: int, line: str) -> TableRow:
    where = f"table row {number} (line {number + 2})"
    cells = _split(line)
    if len(cells) != len(HEADER):
        raise UserError(f"{where}: {len(cells)} cells, expected {len(HEADER)}")
    by_column = dict(zip(HEADER, cells, strict=True))

    def numbers(column: str, kind: _Format, count: int = 1) -> list[float | None]:
        return _numbers(where, column, by_column[column], kind, count)

    def number_of(column: str, kind: _Format) -> float:
        [value] = numbers(column, kind)
        if value is None:
            raise _malformed(where, column, by_column[column], kind.example)
        return value

    def two(column: str) -> tuple[float, float]:
        mean, p95 = numbers(column, _MS_FORMAT, 2)
        if mean is None or p95 is None:
            example = "/".join([_MS_FORMAT.example] * 2)
            raise _malformed(where, column, by_column[column], example)
        return mean, p95

    for column in ("Dataset", "Run"):
        if not by_column[column]:
            raise UserError(f"{where}: column '{column}' is empty")
    latency, ttft = two("Latency mean/p95 ms"), two("TTFT mean/p95 ms")
    itl = numbers("ITL mean/p95 ms", _MS_FORMAT, 2)
    tpot = numbers("TPOT mean/p95 ms", _MS_FORMAT, 2)
    [rate] = numbers("Accept rate", _PERCENT_FORMAT)
    p1, p2, p3 = numbers("Accept p1/p2/p3", _PERCENT_FORMAT, PRINTED_POSITIONS)
    [length] = numbers("Accept len", _LENGTH_FORMAT)
    k, fixed_k = k_of_run_name(by_column["Run"])
    return TableRow(
        dataset=by_column["Dataset"],
        run=by_column["Run"],
        requests=int(number_of("Req", _COUNT)),
        output_tok_s=number_of("Output tok/s", _TOK_S_FORMAT),
        speedup=number_of("Speedup", _SPEEDUP_FORMAT),
        latency_ms_mean=latency[0],
        latency_ms_p95=latency[1],
        ttft_ms_mean=ttft[0],
        ttft_ms_p95=ttft[1],
        itl_ms_mean=itl[0],
        itl_ms_p95=itl[1],
        tpot_ms_mean=tpot[0],
        tpot_ms_p95=tpot[1],
        accept_rate=rate,
        accept_p=(p1, p2, p3),
        accept_len=length,
        k=k,
        fixed_k=fixed_k,
    )


def _numbers(where: str, column: str, cell: str, kind: _Format, count: int) -> list[float | None]:
    """The `count` numbers of a cell; an absent one is None."""
    absent = NO_VALUE if count == 1 else NO_PART
    parts = cell.split("/")
    if len(parts) != count or not all(
        part == absent or re.fullmatch(kind.pattern, part, re.ASCII) for part in parts
    ):
        raise _malformed(where, column, cell, "/".join([kind.example] * count))
    return [None if part == absent else kind.value(part) for part in parts]


def _malformed(where: str, column: str, cell: str, example: str) -> UserError:
    return UserError(f"{where}: column '{column}' holds '{cell}', expected the form '{example}'")


# --------------------------------------------------------------------------- the report


def render_report(
    rows: Sequence[TableRow], summaries: Sequence[CellSummary], unpaired: Unpaired | None = None
) -> str:
    """The table, and below it whether outputs changed, speedup intervals and the settings.

    The settings are those of each dataset's baseline; what is otherwise in the cells of `unpaired`
    stands right below the table.

    Raises:
        UserError: a name that would break the table.
    """
    unpaired = unpaired or {}
    parts = [
        render_table(rows, unpaired),
        _bullets(f"{UNPAIRED} {line}" for line in _unpaired_lines(unpaired)),
        _bullets([*_lossless_lines(summaries), *_ramp_lines(summaries)]),
        _speedup_table(summaries, unpaired),
        _bullets(_settings_lines(summaries)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _unpaired_lines(unpaired: Unpaired) -> list[str]:
    """One line for each group of cells that differ from their baseline in the same way."""
    groups: dict[str, list[str]] = {}
    for (dataset, run), differing in unpaired.items():
        groups.setdefault(", ".join(map(str, differing)), []).append(f"{dataset}/{run}")
    return [
        f"{', '.join(cells)}: not measured as {BASELINE} was: {text}"
        for text, cells in groups.items()
    ]


def _arms(summaries: Iterable[CellSummary]) -> list[CellSummary]:
    return [cell for cell in summaries if cell.run != BASELINE]


def _lossless_lines(summaries: Sequence[CellSummary]) -> list[str]:
    """One line for each arm and way of choosing tokens, over all its datasets."""
    groups: dict[tuple[str, str], list[CellSummary]] = {}
    for cell in _arms(summaries):
        how = f"{cell.precision}, {_choosing(cell)}"
        groups.setdefault((cell.run, how), []).append(cell)
    lines = []
    for (run, how), cells in groups.items():
        compared = [cell for cell in cells if _verdict(cell) not in (None, "sampled")]
        if compared:
            lines.append(f"Outputs: {how}: {_compared(run, compared)}")
        for verdict, why in (
            ("sampled", "sampled outputs agree in distribution only"),
            (None, "not compared"),
        ):
            without = [cell.dataset for cell in cells if _verdict(cell) == verdict]
            if without:
                lines.append(f"Outputs: {how}: {run} on {', '.join(without)}: {why}")
    return lines


def _ramp_lines(summaries: Iterable[CellSummary]) -> Iterator[str]:
    """A line that names the datasets whose windows are too short for their concurrency."""
    short = {
        cell.dataset: None
        for cell in summaries
        if cell.concurrency > 1
        and any(mostly_ramps(device, cell.concurrency) for device in cell.by_device)
    }
    if short:
        yield (
            f"Few requests for those in flight ({', '.join(short)}): the end of each window, where slots "
            "stand idle, weighs, and more so where requests end at different times, as in an arm that "
            "drafts; raise the dataset's limit, and engine.interleave"
        )


def _verdict(cell: CellSummary) -> str | None:
    return None if cell.lossless is None else cell.lossless["verdict"]


def _choosing(cell: CellSummary) -> str:
    temperature = cell.settings.get("temperature", 0.0)
    return f"temperature {temperature:g}" if temperature else "greedy"


def _compared(run: str, cells: Sequence[CellSummary]) -> str:
    """`48 of 48 requests of dspark_k3 identical to baseline, 0 ties`, and what else differed."""
    total = {
        key: sum(_lossless(cell)[key] for cell in cells)
        for key in ("compared", "identical", "ties", "inherited")
    }
    text = (
        f"{total['identical']} of {total['compared']} requests of {run} identical to {BASELINE}, "
        f"{_counted(total['ties'], 'tie')}"
    )
    if total["inherited"]:
        text += f", {_counted(total['inherited'], 'later turn')} after an answer that differed"
    differ = {cell.dataset: _differing(cell) for cell in cells if _differing(cell)}
    if differ:
        where = ", ".join(f"{dataset} {count}" for dataset, count in differ.items())
        text += f", {sum(differ.values())} differ ({where}{_largest_margin(cells)})"
    return text


def _counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def _lossless(cell: CellSummary) -> dict[str, Any]:
    return cell.lossless or {}


def _differing(cell: CellSummary) -> int:
    found = _lossless(cell)
    return found["compared"] - found["identical"] - found["ties"] - found["inherited"]


def _largest_margin(cells: Iterable[CellSummary]) -> str:
    margins = [_lossless(cell)["max_margin"] for cell in cells]
    known = [margin for margin in margins if margin is not None]
    return f"; largest logit margin {max(known):.3g}" if known else ""


def _length(value: float | None) -> str:
    return NO_VALUE if value is None else _fixed(value, LENGTH_DIGITS)


def _speedup_table(summaries: Iterable[CellSummary], unpaired: Container[tuple[str, str]]) -> str:
    """Interval, delivered and break-even lengths, later positions of each arm; empty without arms."""
    body = [
        [
            _name(cell.dataset),
            _name(cell.run),
            _speedup(cell.speedup, (cell.dataset, cell.run) in unpaired),
            # the interval comes from pairs of requests, which only one job has
            NO_VALUE
            if (cell.dataset, cell.run) in unpaired
            else f"{_speedup(cell.speedup_ci95_low)} to {_speedup(cell.speedup_ci95_high)}",
            _length(cell.accept_len_delivered),
            NO_VALUE
            if (cell.dataset, cell.run) in unpaired
            else _length(cell.break_even_accept_len),
            _parts(cell.accept_p[PRINTED_POSITIONS:], _percent) or NO_VALUE,
        ]
        for cell in _arms(summaries)
    ]
    header = ["Dataset", "Run", "Speedup", "95 % interval", *LENGTHS, "p4..pk"]
    return markdown(header, body) if body else ""


def _settings_lines(summaries: Iterable[CellSummary]) -> list[str]:
    """One line when all datasets ran alike, else one for each group of datasets that did."""
    baselines = [cell for cell in summaries if cell.run == BASELINE]
    several = len(_by_experiment(baselines)) > 1
    groups: dict[str, list[str]] = {}
    for cell in baselines:
        named = f"experiment {cell.settings.get('experiment')}, " if several else ""
        groups.setdefault(named + _settings(cell), []).append(cell.dataset)
    if len(groups) == 1:
        return [f"Settings: {text}" for text in groups]
    return [f"Settings ({', '.join(datasets)}): {text}" for text, datasets in groups.items()]


def _settings(cell: CellSummary) -> str:
    """Device, shards, precision, concurrency, token limit, models and versions; never a date."""
    known = cell.settings
    parts = [
        str(known["device"]) if "device" in known else None,
        f"output tok/s a device: mean of {cell.devices} shards" if cell.devices > 1 else None,
        cell.precision,
        f"concurrency {cell.concurrency}",
        f"at most {known['max_new_tokens']} new tokens" if "max_new_tokens" in known else None,
        _choosing(cell),
        f"target {known['target']}" if "target" in known else None,
        f"drafter {known['drafter']}" if "drafter" in known else None,
        *[f"{name} {version}" for name, version in known.get("versions", {}).items()],
    ]
    return ", ".join(part for part in parts if part)


def _by_experiment(summaries: Iterable[CellSummary]) -> dict[str | None, list[str]]:
    """The datasets of each experiment, in the order of the summaries."""
    found: dict[str | None, list[str]] = {}
    for cell in summaries:
        datasets = found.setdefault(cell.settings.get("experiment"), [])
        if cell.dataset not in datasets:
            datasets.append(cell.dataset)
    return found


def write_table(
    summaries_paths: Sequence[str | Path], out: str | Path, allow_unpaired: bool = False
) -> str:
    """Read the summaries, check every identity, and write the report under its final name.

    The rows stand in the order of the paths. Returns the text that was written.

    Raises:
        UserError: see `read_cells`, or the file cannot be written; then `out` stays as it was.
    """
    text = report_of(read_points(summaries_paths, allow_unpaired))
    write_text(out, text)
    return text


@dataclass(frozen=True)
class Cells:
    """Cells that may stand in one table, and those of them that are marked there."""

    paths: list[Path]
    summaries: list[CellSummary]
    unpaired: Unpaired


def report_of(points: Mapping[Options, Cells]) -> str:
    """The report as markdown, see `render_report`; a sweep's has a column for each swept option."""
    reports = {
        options: render_report(
            rows_from_summaries(cells.summaries), cells.summaries, cells.unpaired
        )
        for options, cells in points.items()
    }
    return reports[()] if list(reports) == [()] else swept(reports)


def read_points(
    summaries_paths: Sequence[str | Path], allow_unpaired: bool = False
) -> dict[Options, Cells]:
    """The cells of each point of a sweep, by what was swept; without a sweep all are one point's.

    A summary's point is named by its folder: <point>/<dataset>/<run>/summary.json.

    Raises:
        UserError: see `read_cells`; points sweep other options than the rest.
    """
    paths: dict[Options, list[str | Path]] = {(): []} if not summaries_paths else {}
    for path in summaries_paths:
        options = point_options(Path(path).absolute().parents[2].name)
        paths.setdefault(tuple(options.items()), []).append(path)
    swept_options = {tuple(name for name, _ in options) for options in paths}
    if len(swept_options) > 1:
        listed = " and ".join(", ".join(names) or "nothing" for names in sorted(swept_options))
        raise UserError(
            f"the summaries are of sweeps over different options, {listed}: make one table of each"
        )
    return {options: read_cells(of_point, allow_unpaired) for options, of_point in paths.items()}


def read_cells(summaries_paths: Sequence[str | Path], allow_unpaired: bool = False) -> Cells:
    """Read the summaries, in the order of the paths, and check every identity.

    With `allow_unpaired`, a cell that was measured otherwise than its baseline is set against it
    all the same: its speedup is the ratio of the two tok/s, marked and explained below the table,
    and has no interval. Summaries of several experiments may then be mixed.

    Raises:
        UserError: a summary cannot be read, a cell is given twice, a dataset has no baseline, cells
            are not comparable and `allow_unpaired` is not set, or an identity fails.
    """
    summaries = [read_summary(path) for path in summaries_paths]
    if not summaries:
        raise UserError("no summaries given: there is nothing to put into a table")
    _require_each_cell_once(summaries_paths, summaries)
    unpaired = mismatches(summaries)
    if not allow_unpaired:
        _require_paired(summaries, unpaired)
    summaries = _against_given_baselines(summaries, unpaired)
    for cell in summaries:
        if (cell.dataset, cell.run) in unpaired:
            check_devices(cell)
    check_summaries([cell for cell in summaries if (cell.dataset, cell.run) not in unpaired])
    check_rows(rows_from_summaries(summaries))
    return Cells([Path(path) for path in summaries_paths], summaries, unpaired)


def _require_each_cell_once(paths: Sequence[str | Path], summaries: Sequence[CellSummary]) -> None:
    first: dict[tuple[str, str], str | Path] = {}
    for path, cell in zip(paths, summaries, strict=True):
        name = (cell.dataset, cell.run)
        if name in first:
            raise UserError(
                f"cell {cell.dataset}/{cell.run} is given twice, by '{first[name]}' and by "
                f"'{path}': a table holds each dataset once, leave one of them out"
            )
        first[name] = path


def _require_paired(summaries: Sequence[CellSummary], unpaired: Unpaired) -> None:
    remedy = "or set allow_unpaired=true (`dspark table --allow-unpaired`) for a table that says so"
    if unpaired:
        raise UserError(
            f"no speedup without its own baseline: {'; '.join(_unpaired_lines(unpaired))}: "
            f"run the job of the dataset again, {remedy}"
        )
    experiments = _by_experiment(summaries)
    if len(experiments) > 1:
        listed = " and ".join(f"'{name}' ({', '.join(of)})" for name, of in experiments.items())
        raise UserError(
            f"the summaries are of different experiments, {listed}: make one table of each, {remedy}"
        )


def _against_given_baselines(
    summaries: Sequence[CellSummary], unpaired: Container[tuple[str, str]]
) -> list[CellSummary]:
    """The same cells; the speedups of `unpaired` are relative to the baselines among them."""
    tok_s = {cell.dataset: cell.output_tok_s for cell in summaries if cell.run == BASELINE}
    return [
        replace(cell, speedup=cell.output_tok_s / tok_s[cell.dataset])
        if (cell.dataset, cell.run) in unpaired
        else cell
        for cell in summaries
    ]
