"""Mirror an experiment's results into MLflow: one parent run, one child run a cell, and a run for the
training of its drafter, where there was one.

The files under results/ stay the truth. Every run carries the digest of the files that it was made
from, so tracking again finds what is there already, uploads what is new and hides what that
replaces. One process does this for all jobs: a SQLite file takes no writers from several machines.

An MLflow experiment shows one execution of each of our experiments. People who share a server and
both run, say, `demo` need a `tracking.experiment` each, or the later one replaces the earlier.
"""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.config import TrackingConfig
from dspark.errors import UserError
from dspark.files import write_text
from dspark.tracking.execution import Cell, Execution, read_execution
from dspark.tracking.training import Point, Training, read_training

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

DIGEST_TAG = "dspark.digest"
TRAINING_TAG = "training"
PARENT_TAG = "mlflow.parentRunId"
DESCRIPTION_TAG = "mlflow.note.content"
METRICS_A_BATCH = 1000  # the most that a server takes in one request
PARAMS_A_BATCH = 100
DESCRIPTION_LENGTH = 8000

_PARENT = ""  # the place of the parent run among the cells' names

# Set before mlflow is imported, and only where the user has not: that a server is down should be
# said within a minute (mlflow's own retries take many), and stdout belongs to our command line.
_ENVIRONMENT = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_DATABASE_RETRIES = 2


def track(
    results_dir: Path,
    tracking: TrackingConfig,
    out: Path,
    summaries: Sequence[Path] | None = None,
    training: Path | None = None,
) -> None:
    """Mirror results/<experiment> into MLflow and write the ids of its runs to `out`.

    `summaries` names the cells of this execution; without it all that lie under `results_dir`
    count, also those of a dataset or run that the experiment has dropped since. Runs of an earlier
    call that are no part of this execution (superseded, dropped, or left behind by a crash) are
    soft-deleted once the new ones are complete.

    `training` is the folder of a training. Its run belongs to no experiment: those that share the
    training share the run, and a folder of the same name replaces it when its files have changed.

    `out` holds {"experiment_id", "parent": run id, "cells": {"<dataset>/<run>": run id}}, with
    `training` also {"training": run id}, and its bytes are the same as before when no file of the
    experiment has changed.

    Raises:
        UserError: a file is absent or malformed, the tracking store cannot be used, or `out` cannot
            be written.
    """
    execution = read_execution(results_dir, summaries)
    trained = None if training is None else read_training(training)
    with _store_errors(tracking.uri, results_dir):
        client = _connect(tracking.uri)
        experiment_id = _experiment_id(client, tracking)
        parent, cells = _mirror(client, experiment_id, execution)
        ids = {"experiment_id": experiment_id, "parent": parent, "cells": cells}
        if trained is not None:
            ids["training"] = _mirror_training(client, experiment_id, trained)
    write_text(out, json.dumps(ids, indent=2, sort_keys=True) + "\n")


def _connect(uri: str) -> MlflowClient:
    """Open the store. mlflow is imported here because that takes seconds."""
    for name, value in _ENVIRONMENT.items():
        os.environ.setdefault(name, value)
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    import mlflow.store.db.utils
    from mlflow import MlflowClient

    # The setting above is read when mlflow is first imported, which a caller may have done before.
    logging.getLogger("mlflow").setLevel(logging.ERROR)

    # a database that is down or no database is retried for 100 s, which no setting shortens
    mlflow.store.db.utils.MAX_RETRY_COUNT = _DATABASE_RETRIES
    database = _sqlite_file(uri)
    if database is None:
        return MlflowClient(tracking_uri=uri)
    database.parent.mkdir(parents=True, exist_ok=True)
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
        database = _sqlite_file(tracking.uri)
        # without a location, artifacts of a database store land in ./mlruns of whoever comes first;
        # behind a server the place is the server's to choose
        location = (database.parent / "mlruns").as_uri() if database else None
        return client.create_experiment(tracking.experiment, artifact_location=location)
    if found.lifecycle_stage != "active":
        raise ValueError(
            f"its experiment '{tracking.experiment}' is deleted; restore it there or choose "
            "another tracking.experiment"
        )
    return found.experiment_id


def _mirror(
    client: MlflowClient, experiment_id: str, execution: Execution
) -> tuple[str, dict[str, str]]:
    """Bring the store up to date; return the parent's run id and each cell's."""
    earlier = _runs(client, experiment_id, "experiment", execution.experiment)
    complete = _complete(earlier)
    finished_parent = complete.get((_PARENT, execution.digest))
    parent = finished_parent or _start_parent(client, experiment_id, execution)
    cells = {}
    for cell in execution.cells:
        run = complete.get((cell.name, cell.digest))
        if run is None:
            run = _upload_cell(client, parent, execution.experiment, cell)
        elif run.data.tags.get(PARENT_TAG) != parent.info.run_id:
            client.set_tag(run.info.run_id, PARENT_TAG, parent.info.run_id)
        cells[cell.name] = run.info.run_id
    if not finished_parent:
        _finish_parent(client, parent.info.run_id, execution)
    kept = {parent.info.run_id, *cells.values()}
    for run in earlier:
        if run.info.run_id not in kept:
            client.delete_run(run.info.run_id)  # soft: the UI lists it under "State: Deleted"
    return parent.info.run_id, cells


def _mirror_training(client: MlflowClient, experiment_id: str, training: Training) -> str:
    """Bring the store up to date with a training; return its run id."""
    earlier = _runs(client, experiment_id, TRAINING_TAG, training.folder)
    finished = [run for run in earlier if run.info.status == "FINISHED"]
    same = [run for run in finished if run.data.tags[DIGEST_TAG] == training.digest]
    kept = same[0] if same else _upload_training(client, experiment_id, training)
    for run in earlier:
        if run.info.run_id != kept.info.run_id:
            client.delete_run(run.info.run_id)
    return kept.info.run_id


def _runs(client: MlflowClient, experiment_id: str, tag: str, value: str) -> list[Run]:
    """Every run that tracking made with this tag and that is not deleted, oldest first."""
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
    return sorted(ours, key=lambda run: (run.info.start_time, run.info.run_id))


def _complete(runs: list[Run]) -> dict[tuple[str, str], Run]:
    """The oldest finished run for each cell (or the parent) and digest."""
    complete: dict[tuple[str, str], Run] = {}
    for run in runs:
        tags = run.data.tags
        name = f"{tags['dataset']}/{tags['run']}" if "run" in tags else _PARENT
        if run.info.status == "FINISHED":
            complete.setdefault((name, tags[DIGEST_TAG]), run)
    return complete


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


def _finish_parent(client: MlflowClient, run_id: str, execution: Execution) -> None:
    for path in execution.files:
        client.log_artifact(run_id, str(path))
    for path in execution.plots:
        client.log_artifact(run_id, str(path), path.parent.name)
    client.set_terminated(run_id)


def _upload_cell(client: MlflowClient, parent: Run, experiment: str, cell: Cell) -> Run:
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
    run = client.create_run(parent.info.experiment_id, run_name=cell.name, tags=tags)
    points = (Point(0, metric, value) for metric, value in cell.metrics.items())
    _log_numbers(client, run, points, cell.params)
    _log_dataset(client, run.info.run_id, cell)
    for path in cell.files:
        client.log_artifact(run.info.run_id, str(path))
    client.set_terminated(run.info.run_id)
    return run


def _upload_training(client: MlflowClient, experiment_id: str, training: Training) -> Run:
    tags = {
        TRAINING_TAG: training.folder,
        "drafter": training.drafter,
        DIGEST_TAG: training.digest,
    }
    run = client.create_run(experiment_id, run_name=training.name, tags=tags)
    _log_numbers(client, run, training.points, training.params)
    for path in training.files:
        client.log_artifact(run.info.run_id, str(path))
    client.set_terminated(run.info.run_id)
    return run


def _log_numbers(
    client: MlflowClient, run: Run, points: Iterable[Point], params: Mapping[str, str]
) -> None:
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
def _store_errors(uri: str, results_dir: Path) -> Iterator[None]:
    """Turn whatever the store raises into one line with the URI and the remedy.

    Raises:
        UserError: in place of mlflow's, the database's and the file system's exceptions.
    """
    try:
        yield
    except Exception as error:
        if not _is_store_error(error):
            raise
        text = (
            f"MLflow at '{uri}' cannot be used: {_reason(error)}; the records stay under "
            f"'{results_dir}': start it or set tracking.uri, then `dspark track` uploads them"
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
    """One short line: what the system said of a failed connection, else what the store said."""
    root: BaseException = error
    while inner := root.__cause__ or root.__context__:
        root = inner
    if root is not error and isinstance(root, OSError):
        return root.strerror or str(root)
    text = (str(error) or type(error).__name__).strip().splitlines()[0]
    return text if len(text) <= 200 else f"{text[:200]}..."


def _without_password(text: str) -> str:
    return re.sub(r"//[^/@\s]*@", "//***@", text)
