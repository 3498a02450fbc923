"""A training in a real SQLite store: its curve, its settings, and that tracking again changes nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from results_tree import curve, write_curve, write_training

from dspark.config import TrackingConfig
from dspark.errors import UserError
from dspark.tracking.mlflow_store import track
from dspark.tracking.runs import DIGEST_TAG, PARENT_TAG
from dspark.tracking.training import read_training


def tracked(results_dir: Path, tracking: TrackingConfig, training: Path | None) -> dict[str, Any]:
    """Track, and return what was written."""
    out = results_dir / "mlflow_runs.json"
    track(results_dir, tracking, out, training=training)
    return json.loads(out.read_text())


def open_store(tracking: TrackingConfig) -> Any:
    from mlflow import MlflowClient

    path = Path(tracking.uri.removeprefix("sqlite:///")).resolve()
    return MlflowClient(tracking_uri=f"sqlite:///{path}")


def training_runs(tracking: TrackingConfig, view: int = 1) -> dict[str, Any]:
    """The runs of trainings by id; view 1 is active, 2 deleted, 3 all."""
    client = open_store(tracking)
    experiment = client.get_experiment_by_name(tracking.experiment)
    found = client.search_runs([experiment.experiment_id], "tags.drafter = 'mine'", view)
    return {run.info.run_id: run for run in found}


def history(tracking: TrackingConfig, run_id: str, metric: str) -> list[tuple[int, float]]:
    points = open_store(tracking).get_metric_history(run_id, metric)
    return sorted((point.step, point.value) for point in points)


def test_a_run_holds_the_curve_the_settings_and_the_calibration(
    results_dir: Path,
    tracking: TrackingConfig,
    training: Path,
    capfd: pytest.CaptureFixture[str],
) -> None:
    written = tracked(results_dir, tracking, training)
    assert capfd.readouterr() == ("", "")
    assert set(written) == {"experiment_id", "parent", "cells", "training"}
    client = open_store(tracking)
    run = client.get_run(written["training"])
    assert (run.info.run_name, run.info.status) == ("train/mine", "FINISHED")
    assert run.info.experiment_id == written["experiment_id"]
    assert PARENT_TAG not in run.data.tags
    assert run.data.params["drafter.train.lr"] == "0.002"
    assert run.data.params["drafter.train.shape.layers"] == "1"
    assert run.data.params["target.name"] == "tiny"
    loss = [(step, 4.0 / step) for step in range(1, 7)]
    assert history(tracking, written["training"], "loss_ce") == loss
    assert history(tracking, written["training"], "accept_len_k3") == [(2, 1.2), (4, 1.4), (6, 1.6)]
    assert set(run.data.metrics) == {
        *("loss_ce", "loss_l1", "loss_confidence", "lr", "train_tok_s"),
        *("accept_len_k3", "accept_p1_k3"),
    }
    assert run.data.metrics["accept_p1_k3"] == 0.3  # what the run list shows is the last
    kept = [artifact.path for artifact in client.list_artifacts(written["training"])]
    assert kept == ["calibration.json", "config.yaml", "curve.jsonl", "reliability.png"]


def test_tracking_again_changes_nothing(
    results_dir: Path, tracking: TrackingConfig, training: Path
) -> None:
    tracked(results_dir, tracking, training)
    out = results_dir / "mlflow_runs.json"
    first = out.read_bytes()
    track(results_dir, tracking, out, training=training)
    assert out.read_bytes() == first
    assert len(training_runs(tracking, 3)) == 1


@pytest.mark.parametrize("name", ["curve.jsonl", "drafter/calibration.json"])
def test_a_changed_file_replaces_the_run_and_no_cell(
    results_dir: Path, tracking: TrackingConfig, training: Path, name: str
) -> None:
    before = tracked(results_dir, tracking, training)
    with (training / name).open("ab") as handle:
        handle.write(b" ")
    after = tracked(results_dir, tracking, training)
    assert after["training"] != before["training"]
    assert (after["cells"], after["parent"]) == (before["cells"], before["parent"])
    assert set(training_runs(tracking)) == {after["training"]}
    assert set(training_runs(tracking, 2)) == {before["training"]}


def test_a_longer_curve_is_the_one_that_is_shown(
    results_dir: Path, tracking: TrackingConfig, training: Path
) -> None:
    tracked(results_dir, tracking, training)
    write_curve(training, curve(8))
    run_id = tracked(results_dir, tracking, training)["training"]
    assert [step for step, _ in history(tracking, run_id, "lr")] == list(range(1, 9))


def test_experiments_share_the_run_of_a_training(
    results_dir: Path, tracking: TrackingConfig, training: Path
) -> None:
    first = tracked(results_dir, tracking, training)
    other = results_dir.rename(results_dir.parent / "other")
    second = tracked(other, tracking, training)
    assert second["training"] == first["training"]
    assert not set(second["cells"].values()) & set(first["cells"].values())
    assert set(training_runs(tracking)) == {first["training"]}


def test_other_trainings_and_the_users_own_runs_are_left_alone(
    results_dir: Path, tracking: TrackingConfig, training: Path
) -> None:
    first = tracked(results_dir, tracking, training)
    users = open_store(tracking).create_run(
        first["experiment_id"], tags={"training": training.name, "drafter": "mine"}
    )
    other = write_training(training.parent / "it's another", steps=4)
    second = tracked(results_dir, tracking, other)
    tracked(results_dir, tracking, None)  # an experiment that trains nothing
    assert tracked(results_dir, tracking, other)["training"] == second["training"]
    kept = {first["training"], second["training"], users.info.run_id}
    assert set(training_runs(tracking, 3)) == set(training_runs(tracking)) == kept


def test_what_a_crash_left_is_finished(
    results_dir: Path, tracking: TrackingConfig, training: Path
) -> None:
    where = tracked(results_dir, tracking, None)["experiment_id"]
    tags = {
        "training": training.name,
        "drafter": "mine",
        DIGEST_TAG: read_training(training).digest,
    }
    left = open_store(tracking).create_run(where, tags=tags).info.run_id  # still RUNNING
    written = tracked(results_dir, tracking, training)
    assert written["training"] == left
    (run,) = training_runs(tracking, 3).values()
    assert (run.info.run_id, run.info.status) == (left, "FINISHED")
    assert [step for step, _ in history(tracking, left, "loss_ce")] == list(range(1, 7))


def test_a_long_curve_is_logged_whole(
    results_dir: Path, tracking: TrackingConfig, training: Path
) -> None:
    write_curve(training, curve(1100, every=100))
    written = tracked(results_dir, tracking, training)
    for metric in ("loss_ce", "loss_confidence", "train_tok_s"):
        found = history(tracking, written["training"], metric)
        assert [step for step, _ in found] == list(range(1, 1101))


@pytest.mark.parametrize("name", ["curve.jsonl", "drafter/calibration.json", "config.yaml"])
def test_a_training_that_is_not_finished_is_refused(
    results_dir: Path, tracking: TrackingConfig, training: Path, name: str
) -> None:
    (training / name).unlink()
    with pytest.raises(UserError, match="finish the training") as caught:
        tracked(results_dir, tracking, training)
    assert name in str(caught.value)
    assert not (results_dir / "mlflow_runs.json").exists()


@pytest.mark.parametrize("line", ["{", '{"ce": 1}', "[1]", '{"step": 1, "ce": "low"}'])
def test_a_malformed_curve_is_named(training: Path, line: str) -> None:
    (training / "curve.jsonl").write_text(line + "\n")
    with pytest.raises(UserError, match=r"curve.jsonl' is not a training's curve") as caught:
        read_training(training)
    assert "\n" not in str(caught.value)
