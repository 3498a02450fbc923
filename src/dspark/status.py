"""How far an experiment is: what lies on the disk, read without touching it and without loading torch.

Any of it may be half written, damaged or of other settings. What cannot be read counts as not there;
what was measured with other settings counts as not done.
"""

from __future__ import annotations

import fcntl
import json
import shlex
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from dspark.config import (
    ExperimentConfig,
    ModelSource,
    digest,
    job_config,
    models_config,
    to_yaml,
    training_name,
)
from dspark.data.prompts import Prompt, read_prompts
from dspark.errors import UserError
from dspark.locks import NAME as LOCK
from dspark.stages import shard_folder

# What each stage of a training leaves in the training's folder when it is done.
TRAINED_BY = {
    "synthesise": "conversations.jsonl",
    "cache": "cache.done",
    "fit": "fit.done",
    "calibrate": "drafter/config.json",
}


@dataclass(frozen=True)
class Measurement:
    """What the folder of one job holds: a dataset's, or that of one of its shards."""

    requests: int | None  # of each run; None where the prompts are not there yet
    done: Counter[str]  # finished ones by run
    state: str
    whole: bool = False  # all that the job makes is there
    running: bool = False


@dataclass(frozen=True)
class Dataset:
    """A dataset of an experiment, and its shards by name where it has some."""

    name: str  # with the point of a sweep before it, as its folder
    measured: Measurement
    shards: dict[str, Measurement]
    summarised: bool


@dataclass(frozen=True)
class Status:
    """An experiment's folder."""

    folder: Path
    models: str
    runs: list[str]
    datasets: list[Dataset]
    table: bool  # there, and no older than any summary
    tracked: bool  # logged to MLflow since
    planned: bool  # a workflow is at work on it, or was killed at it


def experiment_status(
    points: Mapping[str, ExperimentConfig], root: Path = Path("results")
) -> Status:
    """Read `root`/<experiment> as it is now.

    Args:
        points: the experiment as it would be run, by the folder of each point of its sweep.
    """
    config = next(iter(points.values()))  # the points share models and runs
    folder, runs = root / config.name, list(config.runs)
    datasets = [
        _dataset(at_point, folder / point, name)
        for point, at_point in points.items()
        for name in at_point.datasets
    ]
    table = folder / "table.md"
    summaries = [
        folder / dataset.name / run / "summary.json" for dataset in datasets for run in runs
    ]
    made = all(dataset.summarised for dataset in datasets) and _newer(table, summaries)
    return Status(
        folder=folder,
        models=_models(config, folder, root),
        runs=runs,
        datasets=datasets,
        table=made,
        tracked=made and _newer(folder / "mlflow.json", [table]),
        planned=_planned(folder, root.parent),
    )


def _planned(folder: Path, checkout: Path) -> bool:
    """Whether Snakemake has locked files of `folder`: their names stand in the locks."""
    locks = checkout.glob(".snakemake/locks/*.output.lock")
    names = (name for lock in locks for name in _text(lock).splitlines())
    return any((checkout / name).is_relative_to(folder) for name in names)


def _models(config: ExperimentConfig, folder: Path, root: Path) -> str:
    """Whether target and drafter are ready; of a drafter that is trained here, what is left to do."""
    names = f"target {config.target.name}, drafter {config.drafter.name}"
    if config.drafter.source is ModelSource.train:
        training = root / "training" / training_name(models_config(config))
        left = [stage for stage, file in TRAINED_BY.items() if not (training / file).is_file()]
        if left:
            return f"{names}; '{training}' lacks {', '.join(left)}"
    files = (folder / "models" / f"{kind}.json" for kind in ("target", "drafter"))
    return f"{names}; {'prepared' if all(file.is_file() for file in files) else 'not prepared'}"


def _dataset(config: ExperimentConfig, point: Path, name: str) -> Dataset:
    folder, job = point / name, job_config(config, name)
    same, count = _text(folder / "config.yaml") == to_yaml(job), job.dataset.shards
    prompts = _prompts(folder / "prompts.jsonl") if same else []
    measured = _measurement(folder, prompts, same, digest(job))
    shards = {}
    if count > 1:
        for shard in range(1, count + 1):
            part = shard_folder(folder, shard, count)
            shards[part.name] = _measurement(part, prompts[shard - 1 :: count], same, digest(job))
        if not measured.whole:
            measured = _sum(list(shards.values()), measured.requests)
    records = folder / "requests.parquet"
    summaries = [folder / run / "summary.json" for run in config.runs]
    return Dataset(
        name=f"{point.name}/{name}" if config.sweep else name,
        measured=measured,
        shards=shards,
        summarised=measured.whole and all(_newer(path, [records]) for path in summaries),
    )


def _measurement(
    folder: Path, prompts: Sequence[Prompt], same: bool, job_digest: str
) -> Measurement:
    """What a job has done.

    Args:
        prompts: that it asks; none where they are not known yet.
        same: whether the config that a journal goes on from is the present one.
        job_digest: of the present config; environment.json has that of finished records.
    """
    records, journals = folder / "requests.parquet", list(folder.glob("journal-*.jsonl"))
    if records.is_file() and _newer(records, journals):
        done, whole, same = _recorded(records), True, _environment_digest(folder) == job_digest
        state = "measured" if done else "damaged, runs again"
    else:
        # The one that was written to last: the others are of other settings.
        done, whole = _journalled(max(journals, key=_written)) if journals else Counter(), False
        state = "stopped" if done else "not begun"
    if done and not same:
        done, whole, state = Counter(), False, "of other settings, runs again"
    holder = _holder(folder)
    return Measurement(
        requests=sum(len(prompt.turns) for prompt in prompts) or None,
        done=done,
        state=f"running ({holder})" if holder else state,
        whole=whole and bool(done) and not holder,
        running=holder is not None,
    )


def _sum(shards: Sequence[Measurement], requests: int | None) -> Measurement:
    running = any(shard.running for shard in shards)
    whole = sum(shard.whole for shard in shards)
    return Measurement(
        requests=requests,
        done=sum((shard.done for shard in shards), Counter()),
        state=f"{'running, ' if running else ''}{whole} of {len(shards)} shards measured",
        running=running,
    )


def _holder(folder: Path) -> str | None:
    """Who fills a folder at this moment, as its lock file says; None when nobody does."""
    try:
        with (folder / LOCK).open() as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return lock.read().strip() or "another process"
    except OSError:  # nobody has ever held it, or the file system has no locks
        pass
    return None


def _journalled(journal: Path) -> Counter[str]:
    """Finished requests by run. A line that is no record is none: a kill cuts the last one short."""
    requests = set()
    for line in _text(journal).split("\n"):
        try:
            record = json.loads(line)
            requests.add((record["run"], record["prompt_id"], record["turn"]))
        except (ValueError, TypeError, KeyError):
            continue
    return Counter(run for run, *_ in requests)


def _recorded(records: Path) -> Counter[str]:
    """Finished requests by run; none where the file cannot be read."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    try:
        return Counter(pq.ParquetFile(records).read(columns=["run"])["run"].to_pylist())
    except (pa.ArrowException, OSError, ValueError, KeyError):
        return Counter()


def _environment_digest(folder: Path) -> Any:
    """Digest of the config that a folder's records were measured with; None where nothing says so."""
    try:
        return json.loads(_text(folder / "environment.json"))["config_digest"]
    except (ValueError, TypeError, KeyError):
        return None


def _prompts(path: Path) -> list[Prompt]:
    """A dataset's prompts; none where they cannot be read."""
    try:
        return read_prompts(path)
    except UserError:
        return []


def _text(path: Path) -> str:
    """A file's text; none where it cannot be read."""
    try:
        return path.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return ""


def _newer(path: Path, than: Iterable[Path]) -> bool:
    """Whether `path` is there and was written no earlier than any of the others."""
    return path.is_file() and all(_written(path) >= _written(other) for other in than)


def _written(path: Path) -> int:
    """Nanoseconds of a clock; 0 for a file that a job has removed just now."""
    try:
        return path.stat().st_mtime_ns
    except OSError:
        return 0


def render_status(status: Status, command: Sequence[str]) -> str:
    """The status as text.

    Args:
        command: what runs the experiment, for the last line.
    """
    rows = [["dataset", *status.runs, "state"]]
    for dataset in status.datasets:
        waits = ", not summarised" if dataset.measured.whole else ""
        state = "done" if dataset.summarised else dataset.measured.state + waits
        rows.append([dataset.name, *_counts(status.runs, dataset.measured), state])
        for name, shard in dataset.shards.items():
            rows.append([f"  {name}", *_counts(status.runs, shard), shard.state])
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in rows
    ]
    made = {"table.md": status.table, "mlflow.json": status.tracked}
    lines += [f"{name}: {'made' if there else 'not made yet'}" for name, there in made.items()]
    return "\n".join(
        [f"{status.folder}: {status.models}", *lines, f"next: {_next_step(status, command)}"]
    )


def _counts(runs: Sequence[str], measured: Measurement) -> list[str]:
    of = "?" if measured.requests is None else measured.requests
    return [f"{measured.done[run]}/{of}" for run in runs]


def _next_step(status: Status, command: Sequence[str]) -> str:
    running = [dataset.name for dataset in status.datasets if dataset.measured.running]
    if running:
        return f"wait for {', '.join(running)}; what it says lies in {status.folder / 'logs'}"
    if status.planned:
        return "wait for the workflow that is at work on it (if it was killed: snakemake --unlock)"
    if status.tracked:
        return f"nothing, read {status.folder / 'table.md'}"
    kept = sum(dataset.measured.done.total() for dataset in status.datasets)
    return shlex.join(command) + (f"   (keeps {kept} finished requests)" if kept else "")
