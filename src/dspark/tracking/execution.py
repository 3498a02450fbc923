"""Read one experiment's finished cells from its results directory. Knows nothing of MLflow.

The files are the truth and MLflow mirrors them, so all that the mirror shows of a cell (params,
metrics, tags) and all that decides whether it is up to date (digests) is worked out here.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dspark.config import JobConfig, from_yaml, point_options
from dspark.errors import UserError, nearest

CONFIG = "config.yaml"
PROMPTS = "prompts.jsonl"
SUMMARY = "summary.json"
TABLE = "table.md"
PLOTS = "plots"
# Numbers of single requests: they are in the summary that is kept, and would bury the cell's own.
NO_METRICS = ("differences",)


@dataclass(frozen=True)
class Prompts:
    """The prompt set of a cell: what MLflow lists as the run's dataset."""

    path: Path
    digest: str
    count: int


@dataclass(frozen=True)
class Cell:
    """One run on one dataset, at one point of a sweep where there is one."""

    point: str  # name of the point's folder; empty without a sweep
    dataset: str
    run: str
    files: tuple[Path, ...]  # what is kept beside the numbers: summary and config
    digest: str  # of config and summary: changes when, and only when, the cell was made anew
    params: dict[str, str]
    metrics: dict[str, float]
    prompts: Prompts
    git_sha: str
    device: str

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
    files: tuple[Path, ...]
    plots: tuple[Path, ...]
    digest: str

    @property
    def git_sha(self) -> str:
        return _joined(cell.git_sha for cell in self.cells)

    @property
    def device(self) -> str:
        return _joined(cell.device for cell in self.cells)


def read_execution(results_dir: Path, summaries: Sequence[Path] | None = None) -> Execution:
    """Read the cells behind `summaries`, or every `[<point>/]<dataset>/<run>/summary.json`, by name.

    Raises:
        UserError: there is no cell, or a file of one is absent or malformed.
    """
    everywhere = (f"*/*/{SUMMARY}", f"*=*/*/*/{SUMMARY}")
    found = chain(*map(results_dir.glob, everywhere)) if summaries is None else summaries
    cells = tuple(sorted((_read_cell(results_dir, path) for path in found), key=lambda c: c.name))
    if not cells:
        raise UserError(
            f"no {SUMMARY} under '{results_dir}': run the experiment before it is tracked"
        )
    table = results_dir / TABLE
    plots = tuple(sorted(path for path in (results_dir / PLOTS).rglob("*") if path.is_file()))
    return Execution(
        folder=results_dir,
        experiment=results_dir.resolve().name,
        cells=cells,
        table=_read(table).decode(),
        files=(table,),
        plots=plots,
        digest=_sha256(
            *(part.encode() for cell in cells for part in (cell.name, cell.digest)),
            *(_read(path) for path in (table, *plots)),
        ),
    )


def _read_cell(results_dir: Path, summary_path: Path) -> Cell:
    run_dir = summary_path.parent
    dataset_dir = run_dir.parent
    point = dataset_dir.parent.name if point_options(dataset_dir.parent.name) else ""
    home = dataset_dir.parent.parent if point else dataset_dir.parent
    if summary_path.name != SUMMARY or home.resolve() != results_dir.resolve():
        raise UserError(
            f"'{summary_path}' is not a cell of '{results_dir}': "
            f"a cell is {results_dir}/<dataset>/<run>/{SUMMARY}"
        )
    config_path = dataset_dir / CONFIG
    summary = _read_object(summary_path)
    stated = summary.get("settings")
    settings = stated if isinstance(stated, dict) else {}
    return Cell(
        point=point,
        dataset=dataset_dir.name,
        run=run_dir.name,
        files=(summary_path, config_path),
        digest=_sha256(_read(config_path), _read(summary_path)),
        params={
            **dict(flat_params(_cell_config(config_path, run_dir.name))),
            **dict(_texts(settings, "settings.")),
        },
        metrics=dict(_metrics(summary)),
        prompts=_prompts(dataset_dir / PROMPTS),
        git_sha=_provenance(summary_path, settings, "git_sha"),
        device=_provenance(summary_path, settings, "device"),
    )


def _cell_config(path: Path, run: str) -> dict[str, Any]:
    """The job's resolved config with the one arm of this cell in the place of all arms."""
    job: JobConfig = from_yaml(JobConfig, path)
    if run not in job.runs:
        raise UserError(f"'{path}' has no run '{run}': {nearest(run, job.runs)}")
    tree: Any = OmegaConf.to_container(OmegaConf.structured(job), enum_to_str=True)
    tree["run"] = tree.pop("runs")[run]
    return tree


def flat_params(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Flatten to dotted keys; values as in the YAML files, so that they serve as overrides."""
    for key, value in sorted(tree.items()):
        if isinstance(value, dict):
            yield from flat_params(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


def _metrics(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, float]]:
    """The numbers of a summary: list items count from 1, a nested key follows a slash.

    MLflow groups its charts by what stands before a slash, which keeps the numbers that only
    describe a cell apart from those that compare it. What is not a number is no metric.
    """
    for key, value in sorted(tree.items()):
        if key in NO_METRICS:
            continue
        if isinstance(value, dict):
            yield from _metrics(value, f"{prefix}{key}/")
        elif isinstance(value, list):
            yield from _metrics({f"{key}{i}": item for i, item in enumerate(value, 1)}, prefix)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield f"{prefix}{key}", float(value)


def _texts(tree: dict[str, Any], prefix: str) -> Iterator[tuple[str, str]]:
    """The texts of a summary's settings: models, checksums, versions, which the config lacks."""
    for key, value in sorted(tree.items()):
        if isinstance(value, dict):
            yield from _texts(value, f"{prefix}{key}.")
        elif isinstance(value, str):
            yield f"{prefix}{key}", value


def _prompts(path: Path) -> Prompts:
    content = _read(path)
    # MLflow takes at most 36 characters of a dataset's digest
    return Prompts(path=path, digest=_sha256(content)[:32], count=len(content.splitlines()))


def _provenance(path: Path, settings: dict[str, Any], key: str) -> str:
    if key not in settings:
        raise UserError(f"'{path}' does not state the {key}: make this cell again")
    return str(settings[key] or "unknown")  # null: no git repository around the code


def _joined(values: Iterable[str]) -> str:
    return ", ".join(sorted(set(values)))


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
