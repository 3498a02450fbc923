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
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from dspark.config import TrackingConfig
from dspark.files import write_text
from dspark.tracking.connection import (
    connect,
    import_mlflow,
    sqlite_file,
    sqlite_turn,
    store_errors,
    turn,
)
from dspark.tracking.execution import Execution, read_execution
from dspark.tracking.pages import colors_of, experiment_tags
from dspark.tracking.runs import (
    DIGEST_TAG,
    EXPERIMENT_TAG,
    PARENT_TAG,
    TRAINING_TAG,
    fill_cell,
    fill_parent,
    fill_training,
    start_cell,
    start_parent,
    start_training,
)
from dspark.tracking.training import Training, read_training

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Experiment, Run

FINISHED = "FINISHED"
_PARENT = ""  # the place of the parent run, which has no cell's tags, among the cells' names


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
    import_mlflow()  # takes seconds, in which nobody need wait
    with store_errors(tracking.uri, results_dir, training), sqlite_turn(tracking.uri):
        client = connect(tracking.uri)
        experiment_id = _experiment_id(client, tracking)
        with turn(results_dir / ".mlflow.lock"):
            parent, cells = _mirror(client, experiment_id, execution)
        ids = {"experiment_id": experiment_id, "parent": parent, "cells": cells}
        if trained is not None:
            # not in the training's own folder, which may be another's
            with turn(results_dir.parent / ".mlflow.lock"):
                ids["training"] = _mirror_training(client, experiment_id, trained)
    write_text(out, json.dumps(ids, indent=2, sort_keys=True) + "\n")


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

    database = sqlite_file(tracking.uri)
    # without a location, artifacts of a database store land in ./mlruns of whoever comes first;
    # behind a server the place is the server's to choose
    location = (database.parent / "mlruns").as_uri() if database else None
    try:
        made = client.create_experiment(
            tracking.experiment, artifact_location=location, tags=experiment_tags()
        )
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
    earlier = _by_content(_runs(client, experiment_id, EXPERIMENT_TAG, execution.experiment))
    parent = earlier.get((_PARENT, execution.digest))
    if parent is None:
        parent = start_parent(client, experiment_id, execution)
    cells = {}
    colors = colors_of([(cell.dataset, cell.run) for cell in execution.cells])
    for cell, color in zip(execution.cells, colors, strict=True):
        run = earlier.get((cell.name, cell.digest))
        if run is None:
            run = start_cell(client, parent, execution.experiment, cell, color)
        if run.info.status != FINISHED:
            fill_cell(client, run, cell)
        if run.data.tags.get(PARENT_TAG) != parent.info.run_id:
            client.set_tag(run.info.run_id, PARENT_TAG, parent.info.run_id)
        cells[cell.name] = run.info.run_id
    if parent.info.status != FINISHED:
        fill_parent(client, parent, execution)
    kept = {parent.info.run_id, *cells.values()}
    _delete_others(client, _runs(client, experiment_id, EXPERIMENT_TAG, execution.experiment), kept)
    return parent.info.run_id, cells


def _mirror_training(client: MlflowClient, experiment_id: str, training: Training) -> str:
    """Bring the store up to date with a training; return its run id."""
    earlier = _runs(client, experiment_id, TRAINING_TAG, training.folder)
    same = [run for run in earlier if run.data.tags[DIGEST_TAG] == training.digest]
    run = same[0] if same else start_training(client, experiment_id, training)
    if run.info.status != FINISHED:
        fill_training(client, run, training)
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
