"""The section of a drafter's model card on Hugging Face: what it is worth, measured where and how.

The front matter holds the numbers as `model-index`, which the hub shows beside the card.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCardData

from dspark.config import point_name
from dspark.errors import UserError
from dspark.metrics.cell import BASELINE, CellSummary
from dspark.metrics.rows import TableRow, rows_from_summaries
from dspark.report.blocks import Options
from dspark.report.table import Cells, report_of

TASK = "text-generation"
COMMAND = "command.txt"  # in the experiment's folder: what ran it
# What a row says of an arm, and of any run.
ARM_METRICS = {
    "speedup": "Speedup over plain decoding",
    "accept_len": "Tokens a verification step",
    "accept_rate": "Accepted share of verified draft tokens",
}
METRICS = {
    "output_tok_s": "Output tokens a second",
    "ttft_ms_mean": "Mean time to first token, ms",
    "tpot_ms_mean": "Mean time per output token, ms",
}
TOO_LONG = ("step_curves",)
DIGITS = 4  # behind the point, as many as a printed percentage has


def model_card(points: Mapping[Options, Cells]) -> str:
    """YAML front matter, and in markdown the table, what it was measured with, and how to repeat it.

    Raises:
        UserError: the cells are of several drafters, so that they belong on several cards.
    """
    cells = [cell for members in points.values() for cell in members.summaries]
    drafter, target = _only("drafter", cells), _only("target", cells)
    data = ModelCardData(
        model_name=drafter,
        pipeline_tag=TASK,
        tags=["speculative-decoding", "dspark"],
        eval_results=list(_results(points)),
    )
    parts = [
        f"---\n{data.to_yaml()}\n---",
        f"# {drafter}",
        f"A DSpark drafter for {target}, measured by speculative decoding beside plain decoding on the "
        "same engine, prompts and device.",
        "## Results",
        report_of(points).rstrip("\n"),
        "## Hardware, versions and settings",
        _settings_table(points),
        "## Run it again",
        _again(points),
    ]
    return "\n\n".join(parts) + "\n"


def _only(name: str, cells: Sequence[CellSummary]) -> str:
    found = sorted({str(cell.settings.get(name)) for cell in cells})
    if len(found) > 1:
        raise UserError(
            f"the cells are of several {name}s ({', '.join(found)}): make a card of each"
        )
    return found[0]


def _results(points: Mapping[Options, Cells]) -> Iterator[EvalResult]:
    for options, cells in points.items():
        for cell, row in zip(cells.summaries, rows_from_summaries(cells.summaries), strict=True):
            metrics = METRICS if cell.run == BASELINE else ARM_METRICS | METRICS
            if (cell.dataset, cell.run) in cells.unpaired:
                metrics = {name: text for name, text in metrics.items() if name != "speedup"}
            for metric, text in metrics.items():
                if getattr(row, metric) is not None:
                    yield _result(options, cell, row, metric, text)


def _result(
    options: Options, cell: CellSummary, row: TableRow, metric: str, text: str
) -> EvalResult:
    """One number as it is printed, with what it holds for."""
    arguments = {"run": cell.run, "concurrency": cell.concurrency, **dict(options)}
    if metric == "speedup":
        interval = (cell.speedup_ci95_low, cell.speedup_ci95_high)
        arguments["ci95"] = [round(end, DIGITS) for end in interval]
    return EvalResult(
        task_type=TASK,
        dataset_type=cell.dataset,
        dataset_name=cell.dataset,
        metric_type=metric,
        metric_value=round(getattr(row, metric), DIGITS),
        metric_name=f"{text} ({', '.join([cell.run, *_point(options)])})",
        metric_args=arguments,
    )


def _point(options: Options) -> list[str]:
    return [point_name(dict(options))] if options else []


def _settings_table(points: Mapping[Options, Cells]) -> str:
    """All that the summaries state; where datasets differ, each value with its datasets."""
    found: dict[str, dict[str, list[str]]] = {}
    for options, cells in points.items():
        for cell in cells.summaries:
            if cell.run == BASELINE:
                where = " ".join([*_point(options), cell.dataset])
                for name, value in _conditions(cell).items():
                    found.setdefault(name, {}).setdefault(_shown(value), []).append(where)
    lines = ["| Setting | Value |", "| --- | --- |"]
    for name, values in found.items():
        [first, *others] = values
        text = first
        if others:
            text = "; ".join(f"{value} ({', '.join(where)})" for value, where in values.items())
        lines.append(f"| {name} | {text} |")
    return "\n".join(lines)


def _conditions(cell: CellSummary) -> dict[str, Any]:
    settings = {name: value for name, value in cell.settings.items() if name not in TOO_LONG}
    versions = settings.pop("versions", {})
    return {
        "precision": cell.precision,
        "concurrency": cell.concurrency,
        **settings,
        **versions,
    }


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value)
    return text.replace("|", "\\|")


def _again(points: Mapping[Options, Cells]) -> str:
    """The command that the experiment was run with, and the commit that it was run at."""
    cells = [cell for members in points.values() for cell in members.summaries]
    paths = [path.absolute() for members in points.values() for path in members.paths]
    # a point of a sweep is a folder more
    root = paths[0].parents[3] if any(points) else paths[0].parents[2]
    commits = sorted({str(cell.settings.get("git_sha")) for cell in cells})
    dirty = any(cell.settings.get("git_dirty") for cell in cells)
    changed = ", with changes that were not committed," if dirty else ""
    return (
        f"In a checkout of commit {' and '.join(commits)}{changed} set up by `make demo`, with this "
        "experiment's file in `config/experiment/`:\n\n"
        f"```\n{_command(root)}\n```"
    )


def _command(root: Path) -> str:
    try:
        return (root / COMMAND).read_text(encoding="utf-8").strip()
    except OSError as error:
        raise UserError(
            f"'{root / COMMAND}' cannot be read ({error.strerror}), so how the experiment was run is "
            "not known: write the command into it, or run the experiment"
        ) from error
