"""Many processes that log at the same time, and servers that are not there: no error, no double, no
loss."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from forked_tracks import at_once
from mlflow_serving import free_port, mlflow_server
from results_tree import write_dataset, write_training

from dspark.config import TrackingConfig, to_yaml
from dspark.tracking.runs import PARENT_TAG

EXPERIMENTS = ("one", "two", "three", "four")
ARMS = ("baseline", "dspark_k3")  # eight cells in all
TRAINING = "results/training/shared-1a2b"


@pytest.fixture
def workplace(tmp_path: Path) -> Path:
    """Four experiments that share a training: results/<experiment>, as the rules leave it."""
    for name in EXPERIMENTS:
        folder = tmp_path / "results" / name
        write_dataset(folder, "gsm8k", ARMS)
        (folder / "table.md").write_text(f"| {name} |\n| --- |\n")
    write_training(tmp_path / TRAINING)
    return tmp_path


def tell(workplace: Path, uri: str) -> None:
    """Write what the rule `tracking_config` writes."""
    for name in EXPERIMENTS:
        text = to_yaml(TrackingConfig(uri=uri, experiment="shared"))
        (workplace / "results" / name / "tracking.yaml").write_text(text)


def client_of(uri: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=uri)


def all_runs(client: Any) -> list[Any]:
    """Runs of the one experiment that tracking made, deleted ones too."""
    from mlflow.entities import ViewType

    experiments = {found.name: found for found in client.search_experiments()}
    assert set(experiments) <= {"Default", "shared"}
    ids = [found.experiment_id for found in experiments.values()]
    return list(client.search_runs(ids, run_view_type=ViewType.ALL))


def assert_each_once(workplace: Path, client: Any) -> set[str]:
    """Every cell, parent and the training are there once and whole; returns the ids of all runs."""
    runs = all_runs(client)
    cells = [f"gsm8k/{arm}" for arm in ARMS]
    names = sorted(run.info.run_name for run in runs)
    assert names == sorted([*EXPERIMENTS, *(cells * len(EXPERIMENTS)), "train/mine"])
    assert {(run.info.status, run.info.lifecycle_stage) for run in runs} == {("FINISHED", "active")}
    found = {run.info.run_id: run for run in runs}
    for experiment in EXPERIMENTS:
        written = json.loads((workplace / "results" / experiment / "mlflow.json").read_text())
        assert found[written["parent"]].info.run_name == experiment
        assert found[written["training"]].info.run_name == "train/mine"
        for name, run_id in written["cells"].items():
            run = found[run_id]
            tags = run.data.tags
            assert (run.info.run_name, tags["experiment"]) == (name, experiment)
            assert tags[PARENT_TAG] == written["parent"]
            assert run.data.metrics["output_tok_s"] > 0 and run.data.params["k"]
            assert len(run.inputs.dataset_inputs) == (3 if int(run.data.params["k"]) else 2)
            kept = [artifact.path for artifact in client.list_artifacts(run_id)]
            assert kept == ["config.yaml", "summary.json"]
    return set(found)


def track_all_twice(workplace: Path, address: str) -> None:
    """Eight processes at once, two for each experiment; and all of them once more."""
    commands = [
        ["track", f"results/{experiment}", "--training", TRAINING]
        for experiment in EXPERIMENTS
        for _ in range(2)
    ]
    ids = []
    for _ in range(2):
        [results] = at_once(commands, workplace)
        assert results == [(0, "")] * len(commands)
        ids.append(assert_each_once(workplace, client_of(address)))
    assert ids[0] == ids[1]


def test_eight_processes_fill_one_new_sqlite_file(workplace: Path) -> None:
    tell(workplace, "sqlite:///results/mlflow.db")
    track_all_twice(workplace, f"sqlite:///{workplace}/results/mlflow.db")


def test_a_server_that_was_down_gets_all_from_eight_processes_at_once(workplace: Path) -> None:
    port = free_port()
    tell(workplace, f"http://127.0.0.1:{port}")
    [[(status, said)]] = at_once([["track", "results/one", "--training", TRAINING]], workplace)
    assert status == 1
    assert len(said.splitlines()) == 1 and "Connection refused" in said
    assert not (workplace / "results" / "one" / "mlflow.json").exists()
    told = re.search(r"nothing is lost, .*`dspark (track .*)` uploads them$", said)
    assert told is not None

    store = f"sqlite:///{workplace}/server.db"
    with mlflow_server(store, workplace / "server.log", port, workers=2) as address:
        track_all_twice(workplace, address)
        before = (workplace / "results" / "one" / "mlflow.json").read_bytes()
        assert at_once([shlex.split(told[1])], workplace) == [[(0, "")]]
        assert (workplace / "results" / "one" / "mlflow.json").read_bytes() == before
