"""Two experiments set side by side, cell by cell, or one beside the published table."""

from __future__ import annotations

import csv
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from importlib.resources import files
from pathlib import Path
from typing import Any

from dspark.config import point_name
from dspark.errors import UserError
from dspark.metrics.cell import BASELINE, CellSummary
from dspark.metrics.pairing import NO_CONDITIONS, Mismatch
from dspark.metrics.rows import (
    LENGTH_DIGITS,
    MS_DIGITS,
    PERCENT_DIGITS,
    SPEEDUP_DIGITS,
    TOK_S_DIGITS,
)
from dspark.report.table import NO_VALUE, read_points

# What the published table was measured with, as far as its own numbers and its generator tell.
PUBLISHED_CONDITIONS: dict[str, Any] = {
    "chat": False,
    "concurrency": 4,
    "drafter": "its own DSpark drafter",
    "history": "independent",
    "ignore_eos": False,
    "max_new_tokens": 128,
    "target": "T5Gemma 2 1B-1B",
    "temperature": 0.0,
    "warmup": 8,
}
UNKNOWN = "a device that it does not state"

Key = tuple[str, str]  # dataset (and point of a sweep), run


@dataclass(frozen=True)
class Measured:
    """One cell: its numbers by the names of summaries, and what they hold for."""

    values: Mapping[str, float | None]
    conditions: Mapping[str, Any]
    interval: tuple[float, float] | None = None  # of the speedup, 95 %


@dataclass(frozen=True)
class Side:
    """One of the two things that are compared."""

    name: str
    cells: dict[Key, Measured] = field(default_factory=dict)

    @property
    def device(self) -> str:
        """The device, or devices, that the cells were measured on."""
        found = {str(cell.conditions.get("device", UNKNOWN)) for cell in self.cells.values()}
        return " and ".join(sorted(found))


@dataclass(frozen=True)
class Column:
    """A metric as it is printed, and how a difference of it is."""

    title: str
    metric: str
    show: Callable[[float], str]
    points: bool = False  # a difference in percentage points, not in per cent of the first


# Of models, prompts and settings; the machine decides at most how much verifying a block costs.
PORTABLE = (
    Column("Speedup", "speedup", lambda value: f"{value:.{SPEEDUP_DIGITS}f}x"),
    Column("Accept rate", "accept_rate", lambda value: f"{value:.{PERCENT_DIGITS}%}", points=True),
    Column("Accept len", "accept_len", lambda value: f"{value:.{LENGTH_DIGITS}f}"),
)
# Of the machine first of all.
LOCAL = (
    Column("Output tok/s", "output_tok_s", lambda value: f"{value:.{TOK_S_DIGITS}f}"),
    *(
        Column(title, metric, lambda value: f"{value:.{MS_DIGITS}f}")
        for title, metric in (
            ("Latency mean ms", "latency_ms_mean"),
            ("TTFT mean ms", "ttft_ms_mean"),
            ("TPOT mean ms", "tpot_ms_mean"),
        )
    ),
)


def read_side(name: str, summaries_paths: Sequence[Path]) -> Side:
    """The cells of an experiment.

    A speedup whose arms were not measured alike is no number to compare and is left out.

    Raises:
        UserError: see `dspark.report.table.read_points`.
    """
    side = Side(name)
    points = read_points(summaries_paths, allow_unpaired=True)
    for options, cells in points.items():
        for cell in cells.summaries:
            paired = (cell.dataset, cell.run) not in cells.unpaired and cell.run != BASELINE
            point = f" ({point_name(dict(options))})" if len(points) > 1 else ""
            side.cells[f"{cell.dataset}{point}", cell.run] = _measured(cell, paired)
    return side


def _measured(cell: CellSummary, paired: bool) -> Measured:
    settings = {name: cell.settings[name] for name in cell.settings if name not in NO_CONDITIONS}
    versions: Mapping[str, Any] = settings.pop("versions", {})
    settings.pop("experiment", None)
    values = asdict(cell)
    return Measured(
        values=values if paired else {**values, "speedup": None},
        conditions={
            "requests": cell.requests,
            "concurrency": cell.concurrency,
            "precision": cell.precision,
            "k": cell.k,
            **settings,
            **versions,
        },
        interval=(cell.speedup_ci95_low, cell.speedup_ci95_high) if paired else None,
    )


def published_side() -> Side:
    """The published table, which the package carries as numbers."""
    side = Side("the published table")
    with (files("dspark") / "assets" / "published.csv").open(encoding="utf-8") as file:
        for row in csv.DictReader(file):
            key = row.pop("dataset"), row.pop("run")
            values = {name: float(text) if text else None for name, text in row.items()}
            if key[1] == BASELINE:
                values["speedup"] = None
            conditions = {**PUBLISHED_CONDITIONS, "requests": int(row["requests"])}
            side.cells[key] = Measured(values, conditions)
    return side


def render_comparison(first: Side, second: Side) -> str:
    """Both sides' numbers and their difference for each cell that both have, as markdown.

    Raises:
        UserError: they have no cell in common.
    """
    common = [key for key in first.cells if key in second.cells]
    if not common:
        raise UserError(
            f"{first.name} and {second.name} have no dataset and run in common: {first.name} has "
            f"{_names(first.cells)}; {second.name} has {_names(second.cells)}"
        )
    parts = [
        f"{first.name} → {second.name} (difference)",
        _bullets(_differing(first, second, common)),
        "Comparable across machines: acceptance is of models, prompts and settings, a speedup is a "
        "ratio of two runs that shared a device. What verifying a block costs beside a plain step is "
        "the device's all the same, and a speedup depends on it.",
        _grid(PORTABLE, first, second, common),
        f"Comparable on one machine only, tok/s and ms: {_machines(first, second)}",
        _grid(LOCAL, first, second, common),
        _bullets(_alone(first, second)),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _names(keys: Iterable[Key]) -> str:
    return ", ".join(f"{dataset}/{run}" for dataset, run in keys)


def _bullets(lines: Iterable[str]) -> str:
    return "\n".join(f"- {line}" for line in lines)


def _differing(first: Side, second: Side, common: Sequence[Key]) -> list[str]:
    """What the sides state otherwise, and of which cells."""
    groups: dict[str, list[Key]] = {}
    for key in common:
        ours, theirs = first.cells[key].conditions, second.cells[key].conditions
        for name in sorted(ours.keys() & theirs.keys()):
            if ours[name] != theirs[name]:
                groups.setdefault(str(Mismatch(name, ours[name], theirs[name])), []).append(key)
    return [
        text if len(keys) == len(common) else f"{text} ({_names(keys)})"
        for text, keys in groups.items()
    ] or ["both state the same conditions"]


def _machines(first: Side, second: Side) -> str:
    if first.device == second.device != UNKNOWN:
        return f"both ran on {first.device}."
    return (
        f"{first.name} ran on {first.device}, {second.name} on {second.device}. Read no difference of "
        "software out of this table."
    )


def _grid(columns: Sequence[Column], first: Side, second: Side, common: Sequence[Key]) -> str:
    body = [
        [*key, *(_difference(column, first.cells[key], second.cells[key]) for column in columns)]
        for key in common
    ]
    lines = [
        ["Dataset", "Run", *(column.title for column in columns)],
        ["---"] * (2 + len(columns)),
        *(cells for cells in body if set(cells[2:]) != {NO_VALUE}),
    ]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def _difference(column: Column, first: Measured, second: Measured) -> str:
    """`1.303x → 1.408x (+8.1 %, 95 % interval -3.0 % to +20.5 %)`"""
    before, after = first.values.get(column.metric), second.values.get(column.metric)
    if before is None and after is None:
        return NO_VALUE
    text = " → ".join(
        NO_VALUE if value is None else column.show(value) for value in (before, after)
    )
    if before is None or after is None or before == 0:
        return text
    if column.points:
        return f"{text} ({100 * (after - before):+.{PERCENT_DIGITS}f} points)"
    change = _percent(after / before)
    if column.metric == "speedup" and first.interval and second.interval:
        low, high = ratio_interval(before, first.interval, after, second.interval)
        change += f", 95 % interval {_percent(low)} to {_percent(high)}"
    return f"{text} ({change})"


def _percent(ratio: float) -> str:
    return f"{100 * (ratio - 1):+.1f} %"


def ratio_interval(
    before: float,
    around_before: tuple[float, float],
    after: float,
    around_after: tuple[float, float],
) -> tuple[float, float]:
    """Interval of `after` / `before` from the interval of each, both positive.

    MOVER (Zou and Donner 2008) on logarithms: the distances to the ends add in squares. It takes the
    two for independent; they asked the same prompts, so what a prompt does to both is counted twice
    and the interval is rather too wide.
    """
    down = math.hypot(math.log(after / around_after[0]), math.log(around_before[1] / before))
    up = math.hypot(math.log(around_after[1] / after), math.log(before / around_before[0]))
    return after / before * math.exp(-down), after / before * math.exp(up)


def _alone(first: Side, second: Side) -> list[str]:
    return [
        f"only in {one.name}: {_names(key for key in one.cells if key not in other.cells)}"
        for one, other in ((first, second), (second, first))
        if one.cells.keys() - other.cells.keys()
    ]
