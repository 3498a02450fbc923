"""Mirror an experiment's results into MLflow: one parent run, one child run a cell, and a run for the
training of its drafter, where there was one.

The files under results/ stay the truth. Every run carries the digest of the files that it was made
from, so tracking again finds what is there already, goes on with what a killed call left, uploads
what is new and hides what that replaces. One process does this for all jobs, since a SQLite file
takes no writers from several machines; processes of one machine that come at once take turns.

An MLflow experiment shows one execution of each of our experiments. People who share a server and
both run, say, `demo` need a `tracking.experiment` each, or the later one replaces the earlier.
"""

from __future__ import annotations

import json
import logging
import os
import re
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from dspark.config import TrackingConfig
from dspark.errors import UserError
from dspark.files import cannot_write, write_text
from dspark.tracking.execution import Cell, Execution, read_execution
from dspark.tracking.training import Point, Training, read_training

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Run

DIGEST_TAG = "dspark.digest"
TRAINING_TAG = "training"
PARENT_TAG = "mlflow.parentRunId"
DESCRIPTION_TAG = "mlflow.note.content"
FINISHED = "FINISHED"
METRICS_A_BATCH = 1000  # the most that a server takes in one request
PARAMS_A_BATCH = 100
DESCRIPTION_LENGTH = 8000

_PARENT = ""  # the place of the parent run, which has no cell's tags, among the cells' names

# Set before mlflow is imported, and only where the user has not: that a server is down or does not
# answer should be said within a minute (mlflow's own retries take many), and stdout belongs to our
# command line.
CLIENT_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_DATABASE_RETRIES = 2
TURN_TIMEOUT_S = 900.0  # until a process that has not ended its turn is taken for a stuck one


def track(
    results_dir: Path,
    tracking: TrackingConfig,
    out: Path,
    summaries: Sequence[Path] | None = None,
    training: Path | None = None,
) -> None:
    """Mirror results/<experiment> into MLflow and write the ids of its runs to `out`.

    `summaries` names the cells of this execution; without it all that lie under `results_dir`
    count, also those of a dataset or run that the experiment has dropped since. A run that a killed
    call left unfinished is finished, if its files are still the same. Runs that are no part of this
    execution (superseded, dropped, or a killed call's with other files) are soft-deleted once the
    new ones are complete.

    `training` is the folder of a training. Its run belongs to no experiment: those that share the
    training share the run, and a folder of the same name replaces it when its files have changed.

    `out` holds {"experiment_id", "parent": run id, "cells": {"<dataset>/<run>": run id}}, a cell of a
    sweep's point as "<point>/<dataset>/<run>", with `training` also {"training": run id}; its bytes
    are the same as before when no file of the experiment has changed.

    Raises:
        UserError: a file is absent or malformed, the tracking store cannot be used, another process
            does not end its turn, or `out` cannot be written.
    """
    execution = read_execution(results_dir, summaries)
    trained = None if training is None else read_training(training)
    _import_mlflow()  # takes seconds, in which nobody need wait
    with _store_errors(tracking.uri, results_dir, training), _sqlite_turn(tracking.uri):
        client = _connect(tracking.uri)
        experiment_id = _experiment_id(client, tracking)
        with _turn(results_dir / ".mlflow.lock"):
            parent, cells = _mirror(client, experiment_id, execution)
        ids = {"experiment_id": experiment_id, "parent": parent, "cells": cells}
        if trained is not None:
            # not in the training's own folder, which may be another's
            with _turn(results_dir.parent / ".mlflow.lock"):
                ids["training"] = _mirror_training(client, experiment_id, trained)
    write_text(out, json.dumps(ids, indent=2, sort_keys=True) + "\n")


@contextmanager
def _turn(path: Path) -> Iterator[None]:
    """Wait until no other process of ours has the lock `path`: two that mirror one folder at once
    would each upload it.

    Raises:
        UserError: the lock cannot be written, or another process holds it for too long.
    """
    lock = FileLock(path, timeout=TURN_TIMEOUT_S)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(
            f"another `dspark track` holds '{path}' since {TURN_TIMEOUT_S:g} s: end it, then track "
            "again"
        ) from None
    except OSError as error:
        raise cannot_write(path, error) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def _sqlite_turn(uri: str) -> Iterator[None]:
    """For a SQLite file, wait until no other process of ours has it open: mlflow fails when two set
    up a new one at once. Other stores are not waited for.

    Raises:
        UserError: see `_turn`.
    """
    database = _sqlite_file(uri)
    if database is None:
        yield
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with _turn(database.with_name(f"{database.name}.lock")):
        yield


def _import_mlflow() -> None:
    """Import mlflow with our settings; not when this module is, because it takes seconds."""
    for name, value in CLIENT_SETTINGS.items():
        os.environ.setdefault(name, value)
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    import mlflow.store.db.utils

    # The setting above is read when mlflow is first imported, which a caller may have done before.
    logging.getLogger("mlflow").setLevel(logging.ERROR)

    # a database that is down or no database is retried for 100 s, which no setting shortens
    mlflow.store.db.utils.MAX_RETRY_COUNT = _DATABASE_RETRIES


def _connect(uri: str) -> MlflowClient:
    """Open the store."""
    from mlflow import MlflowClient

    database = _sqlite_file(uri)
    if database is None:
        return MlflowClient(tracking_uri=uri)
    # mlflow keeps one connection a URI, which a relative one would bind to the first directory
    return MlflowClient(tracking_uri=f"sqlite:///{database}")


def _sqlite_file(uri: str) -> Path | None:
    """The file of a SQLite URI, as an absolute path; None for every other kind of store."""
    if not uri.startswith("sqlite"):
        return None
    from sqlalchemy.engine import make_url

    database = make_url(uri).database
    if not database or database == ":memory:":
        raise ValueError("the URI names no file, as sqlite:///results/mlflow.db does")
    return Path(database).resolve()


def _experiment_id(client: MlflowClient, tracking: TrackingConfig) -> str:
    """The MLflow experiment by its name, made on first use."""
    found = client.get_experiment_by_name(tracking.experiment)
    if found is None:
        found = _create_experiment(client, tracking)
    if found.lifecycle_stage != "active":
        raise ValueError(
            f"its experiment '{tracking.experiment}' is deleted; restore it there or choose "
            "another tracking.experiment"
        )
    return found.experiment_id


def _create_experiment(client: MlflowClient, tracking: TrackingConfig) -> Experiment:
    """Make the MLflow experiment, or take the one that somebody else on the server just made."""
    from mlflow.exceptions import MlflowException

    database = _sqlite_file(tracking.uri)
    # without a location, artifacts of a database store land in ./mlruns of whoever comes first;
    # behind a server the place is the server's to choose
    location = (database.parent / "mlruns").as_uri() if database else None
    try:
        made = client.create_experiment(tracking.experiment, artifact_location=location)
    except MlflowException as error:
        exists = error.error_code == "RESOURCE_ALREADY_EXISTS"
        found = client.get_experiment_by_name(tracking.experiment) if exists else None
        if found is None:
            raise
        return found
    return client.get_experiment(made)


def _mirror(
    client: MlflowClient, experiment_id: str, execution: Execution
) -> tuple[str, dict[str, str]]:
    """Bring the store up to date; return the parent's run id and each cell's."""
    earlier = _by_content(_runs(client, experiment_id, "experiment", execution.experiment))
    parent = earlier.get((_PARENT, execution.digest))
    if parent is None:
        parent = _start_parent(client, experiment_id, execution)
    cells = {}
    for cell in execution.cells:
        run = earlier.get((cell.name, cell.digest))
        if run is None:
            run = _start_cell(client, parent, execution.experiment, cell)
        if run.info.status != FINISHED:
            _fill_cell(client, run, cell)
        if run.data.tags.get(PARENT_TAG) != parent.info.run_id:
            client.set_tag(run.info.run_id, PARENT_TAG, parent.info.run_id)
        cells[cell.name] = run.info.run_id
    if parent.info.status != FINISHED:
        _fill_parent(client, parent.info.run_id, execution)
    kept = {parent.info.run_id, *cells.values()}
    _delete_others(client, _runs(client, experiment_id, "experiment", execution.experiment), kept)
    return parent.info.run_id, cells


def _mirror_training(client: MlflowClient, experiment_id: str, training: Training) -> str:
    """Bring the store up to date with a training; return its run id."""
    earlier = _runs(client, experiment_id, TRAINING_TAG, training.folder)
    same = [run for run in earlier if run.data.tags[DIGEST_TAG] == training.digest]
    run = same[0] if same else _start_training(client, experiment_id, training)
    if run.info.status != FINISHED:
        _fill_training(client, run, training)
    found = _runs(client, experiment_id, TRAINING_TAG, training.folder)
    _delete_others(client, found, {run.info.run_id})
    return run.info.run_id


def _delete_others(client: MlflowClient, runs: Iterable[Run], kept: set[str]) -> None:
    """Hide all runs but those kept: the UI lists them under "State: Deleted"."""
    for run in runs:
        if run.info.run_id in kept:
            continue
        if run.info.status != FINISHED:
            client.set_terminated(run.info.run_id, "KILLED")
        client.delete_run(run.info.run_id)


def _runs(client: MlflowClient, experiment_id: str, tag: str, value: str) -> list[Run]:
    """Every run that tracking made with this tag and that is not deleted: finished ones first, each
    kind oldest first."""
    quote = '"' if "'" in value else "'"
    condition = f"tags.{tag} = {quote}{value}{quote}"
    runs: list[Run] = []
    token = None
    while True:
        page = client.search_runs([experiment_id], condition, page_token=token)
        runs += page
        token = page.token
        if not token:
            break
    # a run without our digest is the user's own, whatever its tags say
    ours = (run for run in runs if DIGEST_TAG in run.data.tags)
    return sorted(
        ours, key=lambda run: (run.info.status != FINISHED, run.info.start_time, run.info.run_id)
    )


def _by_content(runs: Iterable[Run]) -> dict[tuple[str, str], Run]:
    """The first run for each cell (or the parent) and digest."""
    found: dict[tuple[str, str], Run] = {}
    for run in runs:
        tags = run.data.tags
        names = (tags[tag] for tag in ("point", "dataset", "run") if tag in tags)
        found.setdefault(("/".join(names), tags[DIGEST_TAG]), run)
    return found


def _start_parent(client: MlflowClient, experiment_id: str, execution: Execution) -> Run:
    tags = {
        "experiment": execution.experiment,
        "git_sha": execution.git_sha,
        "device": execution.device,
        DIGEST_TAG: execution.digest,
        DESCRIPTION_TAG: _description(execution.table),
    }
    return client.create_run(experiment_id, run_name=execution.experiment, tags=tags)


def _description(table: str) -> str:
    """The table, cut after a whole line where MLflow would cut it inside one."""
    if len(table) <= DESCRIPTION_LENGTH:
        return table
    notice = "\n\nThe whole table is in the artifact table.md."
    room = table[: DESCRIPTION_LENGTH - len(notice)]
    return room[: room.rfind("\n")] + notice


def _fill_parent(client: MlflowClient, run_id: str, execution: Execution) -> None:
    for path in execution.files:
        client.log_artifact(run_id, str(path))
    for path in execution.plots:
        client.log_artifact(run_id, str(path), str(path.parent.relative_to(execution.folder)))
    client.set_terminated(run_id)


def _start_cell(client: MlflowClient, parent: Run, experiment: str, cell: Cell) -> Run:
    tags = {
        PARENT_TAG: parent.info.run_id,
        "experiment": experiment,
        "dataset": cell.dataset,
        "run": cell.run,
        "git_sha": cell.git_sha,
        "mlflow.source.git.commit": cell.git_sha,  # what the UI shows as the run's version
        "device": cell.device,
        DIGEST_TAG: cell.digest,
    }
    if cell.point:
        tags["point"] = cell.point
    return client.create_run(parent.info.experiment_id, run_name=cell.name, tags=tags)


def _fill_cell(client: MlflowClient, run: Run, cell: Cell) -> None:
    """Upload what a cell holds and end its run; what is there already stays as it is."""
    points = (Point(0, metric, value) for metric, value in cell.metrics.items())
    _log_numbers(client, run, points, cell.params)
    _log_dataset(client, run.info.run_id, cell)
    for path in cell.files:
        client.log_artifact(run.info.run_id, str(path))
    client.set_terminated(run.info.run_id)


def _start_training(client: MlflowClient, experiment_id: str, training: Training) -> Run:
    tags = {
        TRAINING_TAG: training.folder,
        "drafter": training.drafter,
        DIGEST_TAG: training.digest,
    }
    return client.create_run(experiment_id, run_name=training.name, tags=tags)


def _fill_training(client: MlflowClient, run: Run, training: Training) -> None:
    """Upload what a training holds and end its run; what is there already stays as it is."""
    _log_numbers(client, run, training.points, training.params)
    for path in training.files:
        client.log_artifact(run.info.run_id, str(path))
    client.set_terminated(run.info.run_id)


def _log_numbers(
    client: MlflowClient, run: Run, points: Iterable[Point], params: Mapping[str, str]
) -> None:
    """Log points and params. Points carry the run's own start time, so that the same point is one
    point however often it is logged."""
    from mlflow.entities import Metric, Param

    metrics = [Metric(name, value, run.info.start_time, step) for step, name, value in points]
    texts = [Param(key, text) for key, text in params.items()]
    for start in range(0, len(metrics), METRICS_A_BATCH):
        client.log_batch(run.info.run_id, metrics=metrics[start : start + METRICS_A_BATCH])
    for start in range(0, len(texts), PARAMS_A_BATCH):
        client.log_batch(run.info.run_id, params=texts[start : start + PARAMS_A_BATCH])


def _log_dataset(client: MlflowClient, run_id: str, cell: Cell) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag

    dataset = Dataset(
        name=cell.dataset,
        digest=cell.prompts.digest,
        source_type="local",
        source=json.dumps({"uri": cell.prompts.path.as_posix()}),
        profile=json.dumps({"num_rows": cell.prompts.count}),
    )
    context = InputTag("mlflow.data.context", "eval")
    client.log_inputs(run_id, [DatasetInput(dataset, [context])])


@contextmanager
def _store_errors(uri: str, results_dir: Path, training: Path | None) -> Iterator[None]:
    """Turn whatever the store raises into one line: the URI, that nothing is lost, and the remedy.

    Raises:
        UserError: in place of mlflow's, the database's and the file system's exceptions.
    """
    try:
        yield
    except Exception as error:
        if not _is_store_error(error):
            raise
        again = ["dspark", "track", str(results_dir)]
        if training is not None:
            again += ["--training", str(training)]
        text = (
            f"MLflow at '{uri}' cannot be used: {_reason(error)}; nothing is lost, the records stay "
            f"under '{results_dir}': start it or set tracking.uri, then `{shlex.join(again)}` "
            "uploads them"
        )
        raise UserError(_without_password(text)) from error


def _is_store_error(error: Exception) -> bool:
    # ValueError is a malformed URI (urllib3, pathlib), ImportError a database driver to install
    if isinstance(error, OSError | ValueError | ImportError):
        return True
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return isinstance(error, MlflowException | SQLAlchemyError)


def _reason(error: Exception) -> str:
    """One short line: what was said of a failed connection or request, else what the store said."""
    from urllib3.exceptions import HTTPError

    root: BaseException = error
    while inner := root.__cause__ or root.__context__:
        root = inner
    if root is not error and isinstance(root, OSError | HTTPError):
        return getattr(root, "strerror", None) or str(root)
    text = (str(error) or type(error).__name__).strip().splitlines()[0]
    return text if len(text) <= 200 else f"{text[:200]}..."


def _without_password(text: str) -> str:
    return re.sub(r"//[^/@\s]*@", "//***@", text)
