"""Read one experiment's finished cells from its results directory. Knows nothing of MLflow.

The files are the truth and MLflow mirrors them, so all that the mirror shows of a cell (params,
metrics, curves, inputs, tags) and all that decides whether it is up to date (digests) is worked out
here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import Any

from dspark.config import JobConfig, ModelsConfig, RunConfig, from_yaml, point_options
from dspark.decode.records import RequestRecord
from dspark.decode.usage import USAGE, read_usage
from dspark.errors import UserError, nearest
from dspark.metrics.records_io import read_records
from dspark.tracking.inputs import Input, model_input, prompts_input
from dspark.tracking.points import (
    Point,
    began_ms,
    ended_ms,
    points_of_usage,
    points_over_time,
)

CONFIG = "config.yaml"
MODELS = "models"  # folder of what all cells share: config.yaml, target.json, drafter.json
PROMPTS = "prompts.jsonl"
RECORDS = "requests.parquet"
SUMMARY = "summary.json"
TABLE = "table.md"
PLOTS = "plots"
# Numbers of a summary that would bury those that cells are compared by: settings and params, numbers
# of single requests, and counts that others are made from. They are in the summary that is kept.
NO_METRICS = (
    "settings",
    "temperature",
    "k",
    "confidence_threshold",
    "concurrency",
    "differences",
    "requests_failed",
    "turns",
    "devices",
    "windows",
    "shard",
    "finish_reasons",
    "steps",
    "steps_cut",
    "drafted",
    "verified",
    "accepted",
    "complete_steps",
    "complete_verified",
    "complete_accepted",
    "accept_histogram",
)
# Facts of a cell that are tags, so that runs are found by them; all but precision are settings.
TAGS = ("device", "git_sha", "git_dirty", "precision", "target", "drafter")
# The numbers of table.md, in its order.
TABLE_METRICS = (
    "requests",
    "output_tok_s",
    "speedup",
    "latency_ms_mean",
    "latency_ms_p95",
    "ttft_ms_mean",
    "ttft_ms_p95",
    "itl_ms_mean",
    "itl_ms_p95",
    "tpot_ms_mean",
    "tpot_ms_p95",
    "accept_rate",
    "accept_p1",
    "accept_p2",
    "accept_p3",
    "accept_len",
)


@dataclass(frozen=True)
class Cell:
    """One run on one dataset, at one point of a sweep where there is one."""

    point: str  # name of the point's folder; empty without a sweep
    dataset: str
    run: str
    files: tuple[Path, ...]  # what is kept beside the numbers: config and summary
    digest: str  # of all that follows: changes when, and only when, the cell was made anew
    params: dict[str, str]  # what tells it from other cells
    metrics: dict[str, float]
    points: tuple[Point, ...]
    inputs: tuple[Input, ...]
    tags: dict[str, str]  # see TAGS
    began_ms: int | None  # Unix time at which its measurement began and ended; None when unknown
    ended_ms: int | None

    @property
    def name(self) -> str:
        return "/".join(filter(None, (self.point, self.dataset, self.run)))


@dataclass(frozen=True)
class Execution:
    """One experiment as executed: its cells and the table made of them."""

    folder: Path
    experiment: str
    cells: tuple[Cell, ...]
    table: str
    configs: dict[str, str]  # the resolved config as YAML, in parts: the models', each dataset's
    plots: tuple[Path, ...]
    digest: str

    @property
    def tags(self) -> dict[str, str]:
        """Those of its cells: where they differ, all values."""
        return {
            name: ", ".join(sorted({cell.tags[name] for cell in self.cells}))
            for name in self.cells[0].tags
        }

    @property
    def began_ms(self) -> int | None:
        return min((cell.began_ms for cell in self.cells if cell.began_ms), default=None)

    @property
    def ended_ms(self) -> int | None:
        return max((cell.ended_ms for cell in self.cells if cell.ended_ms), default=None)


def table_of_cells(cells: Sequence[Cell]) -> dict[str, list[Any]]:
    """A row a cell: its params, its numbers in the order of table.md, and then the others.

    Returns:
        `columns`, and `data` by row; None where a cell has no such value.
    """
    params = dict.fromkeys(name for cell in cells for name in cell.params)
    others = sorted({name for cell in cells for name in cell.metrics} - {*TABLE_METRICS})
    columns = [*params, *TABLE_METRICS, *others]
    rows = [{**cell.params, **cell.metrics} for cell in cells]
    return {"columns": columns, "data": [[row.get(name) for name in columns] for row in rows]}


def read_execution(results_dir: Path, summaries: Sequence[Path] | None = None) -> Execution:
    """Read the cells behind `summaries`, or every `[<point>/]<dataset>/<run>/summary.json`, by name.

    Raises:
        UserError: there is no cell, or a file of one is absent or malformed.
    """
    everywhere = (f"*/*/{SUMMARY}", f"*=*/*/*/{SUMMARY}")
    found = chain(*map(results_dir.glob, everywhere)) if summaries is None else summaries
    by_dataset: dict[Path, list[Path]] = {}
    for path in found:
        _require_cell(results_dir, path)
        by_dataset.setdefault(path.parent.parent, []).append(path)
    if not by_dataset:
        raise UserError(
            f"no {SUMMARY} under '{results_dir}': run the experiment before it is tracked"
        )
    models = _read_models(results_dir / MODELS)
    cells: list[Cell] = []
    parts = {MODELS: results_dir / MODELS / CONFIG}
    for folder, paths in by_dataset.items():
        dataset = _Dataset(folder, models)  # one at a time: its records are many
        cells += map(dataset.cell, paths)
        parts[dataset.name] = folder / CONFIG
    cells.sort(key=lambda cell: cell.name)
    configs = {name: _read(path).decode() for name, path in sorted(parts.items())}
    table = results_dir / TABLE
    plots = tuple(sorted(path for path in (results_dir / PLOTS).rglob("*") if path.is_file()))
    return Execution(
        folder=results_dir,
        experiment=results_dir.resolve().name,
        cells=tuple(cells),
        table=_read(table).decode(),
        configs=configs,
        plots=plots,
        digest=_sha256(
            *(part.encode() for cell in cells for part in (cell.name, cell.digest)),
            json.dumps(configs).encode(),
            *(_read(path) for path in (table, *plots)),
        ),
    )


def _require_cell(results_dir: Path, summary: Path) -> None:
    folder = summary.parent.parent.parent
    home = folder.parent if point_options(folder.name) else folder
    if summary.name != SUMMARY or home.resolve() != results_dir.resolve():
        raise UserError(
            f"'{summary}' is not a cell of '{results_dir}': "
            f"a cell is {results_dir}/<dataset>/<run>/{SUMMARY}"
        )


def _read_models(folder: Path) -> dict[str, Input]:
    """Target and drafter, which all cells share."""
    config: ModelsConfig = from_yaml(ModelsConfig, folder / CONFIG)
    return {
        name: model_input(name, getattr(config, name), _read_prepared(folder / f"{name}.json"))
        for name in ("target", "drafter")
    }


class _Dataset:
    """The files of one dataset, which its cells share."""

    def __init__(self, folder: Path, models: dict[str, Input]) -> None:
        self.folder, self.models = folder, models
        self.point = folder.parent.name if point_options(folder.parent.name) else ""
        self.name = "/".join(filter(None, (self.point, folder.name)))
        self.job: JobConfig = from_yaml(JobConfig, folder / CONFIG)
        self.prompts = prompts_input(self.job.dataset, folder / PROMPTS)
        self.usage = read_usage(folder / USAGE)

    @cached_property
    def records(self) -> list[RequestRecord]:
        return read_records(self.folder / RECORDS)

    def cell(self, path: Path) -> Cell:
        """The cell of a summary that lies in this folder."""
        name = path.parent.name
        if name not in self.job.runs:
            raise UserError(
                f"'{self.folder / CONFIG}' has no run '{name}': {nearest(name, self.job.runs)}"
            )
        run, summary = self.job.runs[name], _read_object(path)
        usage = [window for window in self.usage if window.run == name]
        inputs = [self.prompts, self.models["target"]]
        if run.k:
            inputs.append(self.models["drafter"])
        tags = _tags(path, summary)
        points = (*points_over_time(self._records(name, path, summary)), *points_of_usage(usage))
        files = (self.folder / CONFIG, path)
        return Cell(
            point=self.point,
            dataset=self.folder.name,
            run=name,
            files=files,
            digest=_sha256(
                *map(_read, files),
                json.dumps([points, *([i.name, i.digest, i.profile] for i in inputs)]).encode(),
            ),
            params=self._params(name, run),
            metrics=dict(_metrics(summary)),
            points=points,
            inputs=tuple(inputs),
            tags=tags,
            began_ms=min(map(began_ms, usage), default=None),
            ended_ms=max(map(ended_ms, usage), default=None),
        )

    def _params(self, name: str, run: RunConfig) -> dict[str, str]:
        """What tells a cell from the others of its experiment; values as in the YAML files."""
        values: dict[str, Any] = {
            "dataset": self.folder.name,
            "run": name,
            "k": run.k,
            "schedule": run.schedule,
            "confidence_threshold": run.confidence_threshold,
            "concurrency": self.job.engine.concurrency,
        }
        own = (f"datasets.{self.folder.name}.", f"runs.{name}.", "engine.", "sampling.")
        swept = {
            option.rpartition(".")[2]: value
            for option, value in point_options(self.point).items()
            if option.startswith(own)
        }
        stated = {key: v if isinstance(v, str) else json.dumps(v) for key, v in values.items()}
        return swept | stated

    def _records(self, run: str, path: Path, summary: dict[str, Any]) -> list[RequestRecord]:
        """The requests that a cell was summarised from."""
        mine = [record for record in self.records if record.run == run]
        tokens = sum(record.output_tokens for record in mine)
        if (len(mine), tokens) != (summary.get("requests"), summary.get("output_tokens")):
            raise UserError(
                f"'{path}' was made from other requests than '{self.folder / RECORDS}' holds: "
                "summarise the dataset's records again"
            )
        return mine


def _tags(path: Path, summary: dict[str, Any]) -> dict[str, str]:
    settings = summary.get("settings")
    facts = {**summary, **(settings if isinstance(settings, dict) else {})}
    for name in TAGS:
        if name not in facts:
            raise UserError(f"'{path}' does not state the {name}: make this cell again")
    return {name: _tag(facts[name]) for name in TAGS}


def _tag(value: Any) -> str:
    """A fact as text; null, as the commit where there is no git repository, is unknown."""
    if value is None:
        return "unknown"
    return value if isinstance(value, str) else json.dumps(value)


def _metrics(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a summary under its own names: list items count from 1, nested names are joined.

    No name has a slash: MLflow makes groups of charts of those and puts them before all others. What
    is not a number is no metric; what one device measured is said once where there is one.
    """
    for key, value in sorted(tree.items()):
        if key in NO_METRICS or (key == "by_device" and len(value) == 1):
            continue
        if isinstance(value, dict):
            yield from _metrics(value, f"{prefix}{key}_")
        elif isinstance(value, list):
            items = {f"{key}{number}": item for number, item in enumerate(value, start=1)}
            yield from _metrics(items, prefix)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", float(value)


def _read_prepared(path: Path) -> dict[str, Any]:
    """What `dspark prepare` says of a target or drafter. Its folder may be on another machine."""
    prepared = _read_object(path)
    for name in ("path", "revision"):
        if name not in prepared:
            raise UserError(f"'{path}' does not state the {name}: prepare the models again")
    if not isinstance(prepared.get("files"), dict):
        raise UserError(f"'{path}' does not state the files: prepare the models again")
    return prepared


def _read_object(path: Path) -> dict[str, Any]:
    try:
        value = json.loads(_read(path))
    except ValueError as error:
        raise UserError(f"'{path}' is not valid JSON ({error}): make this cell again") from error
    if not isinstance(value, dict):
        raise UserError(f"'{path}' holds no JSON object: make this cell again")
    return value


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read '{path}' ({error.strerror}): finish the experiment before it is tracked"
        ) from error


def _sha256(*parts: bytes) -> str:
    """One digest of several byte strings, each prefixed by its length so that none run together."""
    state = hashlib.sha256()
    for part in parts:
        state.update(len(part).to_bytes(8, "big"))
        state.update(part)
    return state.hexdigest()
