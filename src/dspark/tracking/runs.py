"""What each kind of run holds in MLflow, and putting it there: an execution, its cells, a training.

A run is started with its tags, filled, and ended; what a killed call left half filled is filled again,
so everything here may be logged twice and is then there once.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

from dspark.tracking.execution import TABLE, Cell, Execution, table_of_cells
from dspark.tracking.inputs import Input
from dspark.tracking.points import Point
from dspark.tracking.training import Training

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

DIGEST_TAG = "dspark.digest"
EXPERIMENT_TAG = "experiment"
TRAINING_TAG = "training"
PARENT_TAG = "mlflow.parentRunId"
DESCRIPTION_TAG = "mlflow.note.content"
COMMIT_TAG = "mlflow.source.git.commit"  # what the UI shows as the run's version
COLOR_TAG = "mlflow.runColor"
TABLES_TAG = "mlflow.loggedArtifacts"  # which artifacts the UI shows as tables
CELLS_TABLE = "cells.json"
CONFIGS = "config"  # folder of the artifacts that are the resolved config
METRICS_A_BATCH = 1000  # the most that a server takes in one request
PARAMS_A_BATCH = 100
DESCRIPTION_LENGTH = 8000


def start_parent(client: MlflowClient, experiment_id: str, execution: Execution) -> Run:
    """The run of an execution, which its cells' runs name as their parent."""
    tags = {
        EXPERIMENT_TAG: execution.experiment,
        **execution.tags,
        DIGEST_TAG: execution.digest,
        DESCRIPTION_TAG: _description(execution.table),
    }
    return client.create_run(
        experiment_id, run_name=execution.experiment, tags=tags, start_time=execution.began_ms
    )


def _description(table: str) -> str:
    """The table, cut after a whole line where MLflow would cut it inside one."""
    if len(table) <= DESCRIPTION_LENGTH:
        return table
    notice = f"\n\nThe whole table is in the artifact {TABLE}."
    room = table[: DESCRIPTION_LENGTH - len(notice)]
    return room[: room.rfind("\n")] + notice


def fill_parent(client: MlflowClient, run: Run, execution: Execution) -> None:
    """Upload what an execution has beside its cells, and end its run."""
    run_id = run.info.run_id
    client.log_text(run_id, execution.table, TABLE)
    for name, text in execution.configs.items():
        client.log_text(run_id, text, f"{CONFIGS}/{name}.yaml")
    # not client.log_table, which adds the rows once more to a table that is there
    client.log_dict(run_id, table_of_cells(execution.cells), CELLS_TABLE)
    client.set_tag(run_id, TABLES_TAG, json.dumps([{"path": CELLS_TABLE, "type": "table"}]))
    for path in execution.plots:
        client.log_artifact(run_id, str(path), str(path.parent.relative_to(execution.folder)))
    client.set_terminated(run_id, end_time=execution.ended_ms)


def start_cell(client: MlflowClient, parent: Run, experiment: str, cell: Cell, color: str) -> Run:
    """The run of a cell, under that of its execution; `color`, as #rrggbb, is that of its curves."""
    tags = {
        PARENT_TAG: parent.info.run_id,
        EXPERIMENT_TAG: experiment,
        "dataset": cell.dataset,
        "run": cell.run,
        **({"point": cell.point} if cell.point else {}),
        **cell.tags,
        COMMIT_TAG: cell.tags["git_sha"],
        COLOR_TAG: color,
        DIGEST_TAG: cell.digest,
    }
    return client.create_run(
        parent.info.experiment_id, run_name=cell.name, tags=tags, start_time=cell.began_ms
    )


def fill_cell(client: MlflowClient, run: Run, cell: Cell) -> None:
    """Upload what a cell holds, and end its run."""
    numbers = (Point(0, metric, value) for metric, value in cell.metrics.items())
    _log_numbers(client, run, [*numbers, *cell.points], cell.params)
    _log_inputs(client, run, cell.inputs)
    for path in cell.files:
        client.log_artifact(run.info.run_id, str(path))
    client.set_terminated(run.info.run_id, end_time=cell.ended_ms)


def start_training(client: MlflowClient, experiment_id: str, training: Training) -> Run:
    """The run of a training."""
    tags = {
        TRAINING_TAG: training.folder,
        "drafter": training.drafter,
        DIGEST_TAG: training.digest,
    }
    return client.create_run(experiment_id, run_name=training.name, tags=tags)


def fill_training(client: MlflowClient, run: Run, training: Training) -> None:
    """Upload what a training holds, and end its run."""
    _log_numbers(client, run, training.points, training.params)
    for path in training.files:
        client.log_artifact(run.info.run_id, str(path))
    client.set_terminated(run.info.run_id)


def _log_numbers(
    client: MlflowClient, run: Run, points: Iterable[Point], params: Mapping[str, str]
) -> None:
    """Log points and params. Points are told from the run's own start on, so that the same point is
    one point however often it is logged."""
    from mlflow.entities import Metric, Param

    begun = run.info.start_time
    metrics = [
        Metric(name, value, begun + after_ms, step) for step, name, value, after_ms in points
    ]
    texts = [Param(key, text) for key, text in params.items()]
    for start in range(0, len(metrics), METRICS_A_BATCH):
        client.log_batch(run.info.run_id, metrics=metrics[start : start + METRICS_A_BATCH])
    for start in range(0, len(texts), PARAMS_A_BATCH):
        client.log_batch(run.info.run_id, params=texts[start : start + PARAMS_A_BATCH])


def _log_inputs(client: MlflowClient, run: Run, inputs: Iterable[Input]) -> None:
    from mlflow.entities import Dataset, DatasetInput, InputTag
    from mlflow.exceptions import MlflowException

    given = [
        DatasetInput(
            Dataset(
                name=one.name,
                digest=one.digest,
                source_type=one.source_type,
                source=json.dumps(one.source),
                profile=json.dumps(one.profile),
            ),
            [InputTag("mlflow.data.context", one.context)],
        )
        for one in inputs
    ]
    for _ in given:
        try:
            return client.log_inputs(run.info.run_id, given)
        except MlflowException as error:
            # of a database: somebody else has just added one of them, which is found the next time
            if error.error_code != "BAD_REQUEST":
                raise
    client.log_inputs(run.info.run_id, given)
