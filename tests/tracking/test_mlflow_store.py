"""Tracking into a real SQLite store: its structure, and that doing it again changes nothing."""

from __future__ import annotations

import json
import socket
import socketserver
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from filelock import FileLock
from results_tree import SHA, summary, write_dataset, write_summary

from dspark.config import TrackingConfig
from dspark.errors import UserError
from dspark.tracking.mlflow_store import (
    CLIENT_SETTINGS,
    DESCRIPTION_LENGTH,
    DESCRIPTION_TAG,
    DIGEST_TAG,
    PARENT_TAG,
    track,
)

CELL = "gsm8k/dspark_k3"


def tracked(results_dir: Path, tracking: TrackingConfig) -> dict[str, Any]:
    """Track, and return what was written."""
    out = results_dir / "mlflow_runs.json"
    track(results_dir, tracking, out)
    return json.loads(out.read_text())


def open_store(tracking: TrackingConfig) -> Any:
    from mlflow import MlflowClient

    path = Path(tracking.uri.removeprefix("sqlite:///")).resolve()
    return MlflowClient(tracking_uri=f"sqlite:///{path}")


def runs(tracking: TrackingConfig, view: str = "ACTIVE_ONLY") -> dict[str, Any]:
    """All runs of the store by id."""
    client = open_store(tracking)
    experiment = client.get_experiment_by_name(tracking.experiment)
    found = client.search_runs(
        [experiment.experiment_id], run_view_type=getattr(view_types(), view)
    )
    return {run.info.run_id: run for run in found}


def view_types() -> Any:
    from mlflow.entities import ViewType

    return ViewType


def all_ids(written: dict[str, Any]) -> set[str]:
    return {written["parent"], *written["cells"].values()}


def test_one_parent_with_a_child_for_each_cell(
    results_dir: Path, tracking: TrackingConfig, capfd: pytest.CaptureFixture[str]
) -> None:
    written = tracked(results_dir, tracking)
    assert capfd.readouterr() == ("", "")  # stdout and stderr belong to the command line
    assert set(written) == {"experiment_id", "parent", "cells"}
    found = runs(tracking)
    assert set(found) == all_ids(written)
    assert {run.info.status for run in found.values()} == {"FINISHED"}

    parent = found[written["parent"]]
    assert parent.info.run_name == "demo"
    assert PARENT_TAG not in parent.data.tags
    assert parent.data.tags["experiment"] == "demo"
    assert parent.data.tags[DESCRIPTION_TAG] == (results_dir / "table.md").read_text()
    for name, run_id in written["cells"].items():
        child = found[run_id]
        assert child.info.run_name == name
        assert child.data.tags[PARENT_TAG] == written["parent"]
    assert len(written["cells"]) == 6


def test_a_child_holds_the_config_the_numbers_and_the_provenance(
    results_dir: Path, tracking: TrackingConfig
) -> None:
    written = tracked(results_dir, tracking)
    run = runs(tracking)[written["cells"][CELL]]
    tags = run.data.tags
    assert (tags["experiment"], tags["dataset"], tags["run"]) == ("demo", "gsm8k", "dspark_k3")
    assert (tags["git_sha"], tags["device"]) == (SHA, "Intel Xeon")
    assert run.data.params["engine.concurrency"] == "4"
    assert (run.data.params["run.mode"], run.data.params["run.k"]) == ("speculative", "3")
    numbers = summary("gsm8k", "dspark_k3")
    assert run.data.metrics["output_tok_s"] == numbers["output_tok_s"]
    assert run.data.metrics["accept_p3"] == numbers["accept_p"][2]
    assert run.data.metrics["lossless/identical_requests"] == 3
    assert "lossless/checked" not in run.data.metrics


def test_the_prompts_are_one_dataset_for_all_arms(
    results_dir: Path, tracking: TrackingConfig
) -> None:
    written = tracked(results_dir, tracking)
    found = runs(tracking)
    inputs = {
        name: found[run_id].inputs.dataset_inputs[0] for name, run_id in written["cells"].items()
    }
    assert {i.dataset.name for i in inputs.values()} == {"gsm8k", "humaneval"}
    digests = {i.dataset.digest for name, i in inputs.items() if name.startswith("gsm8k/")}
    assert len(digests) == 1
    assert inputs[CELL].dataset.digest != inputs["humaneval/baseline"].dataset.digest
    assert json.loads(inputs[CELL].dataset.profile) == {"num_rows": 3}
    assert [(t.key, t.value) for t in inputs[CELL].tags] == [("mlflow.data.context", "eval")]


def test_artifacts_lie_beside_the_database(
    results_dir: Path, tracking: TrackingConfig, tmp_path: Path
) -> None:
    written = tracked(results_dir, tracking)
    client = open_store(tracking)
    child = written["cells"][CELL]
    assert [a.path for a in client.list_artifacts(child)] == ["config.yaml", "summary.json"]
    assert [a.path for a in client.list_artifacts(written["parent"])] == ["plots", "table.md"]
    assert [a.path for a in client.list_artifacts(written["parent"], "plots")] == [
        "plots/speedup.svg"
    ]
    kept = tmp_path / "store" / "mlruns" / child / "artifacts" / "summary.json"
    assert kept.read_bytes() == (results_dir / CELL / "summary.json").read_bytes()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["results", "store"]


def test_tracking_again_changes_nothing(results_dir: Path, tracking: TrackingConfig) -> None:
    tracked(results_dir, tracking)
    out = results_dir / "mlflow_runs.json"
    first = out.read_bytes()
    out.unlink()
    track(results_dir, tracking, out)
    assert out.read_bytes() == first
    assert len(runs(tracking, "ALL")) == 7
    assert not list(results_dir.glob("*.part"))


def test_a_new_summary_replaces_its_run_and_keeps_the_others(
    results_dir: Path, tracking: TrackingConfig
) -> None:
    before = tracked(results_dir, tracking)
    write_summary(results_dir, "gsm8k", "dspark_k3", output_tok_s=61.0)
    after = tracked(results_dir, tracking)

    changed = {name for name in after["cells"] if after["cells"][name] != before["cells"][name]}
    assert changed == {CELL}
    assert after["parent"] != before["parent"]
    active = runs(tracking)
    assert set(active) == all_ids(after)
    assert {active[i].data.tags[PARENT_TAG] for i in after["cells"].values()} == {after["parent"]}
    assert active[after["cells"][CELL]].data.metrics["output_tok_s"] == 61.0
    deleted = set(runs(tracking, "DELETED_ONLY"))
    assert deleted == {before["parent"], before["cells"][CELL]}


def test_a_new_table_alone_replaces_the_parent_alone(
    results_dir: Path, tracking: TrackingConfig
) -> None:
    before = tracked(results_dir, tracking)
    (results_dir / "table.md").write_text("| Dataset | Run |\n| --- | --- |\n")
    after = tracked(results_dir, tracking)
    assert after["cells"] == before["cells"]
    assert set(runs(tracking, "DELETED_ONLY")) == {before["parent"]}


def test_a_sweep_has_a_child_for_each_cell_of_each_point(
    results_dir: Path, tracking: TrackingConfig
) -> None:
    points = ["engine.concurrency=1", "engine.concurrency=4"]
    for point in points:
        write_dataset(results_dir / point, "gsm8k", ["baseline"])
    plot = results_dir / "plots" / points[0] / "speedup.svg"
    plot.parent.mkdir()
    plot.write_text("<svg/>")
    written = tracked(results_dir, tracking)
    found = runs(tracking)
    for point in points:
        run = found[written["cells"][f"{point}/gsm8k/baseline"]]
        assert run.info.run_name == f"{point}/gsm8k/baseline"
        assert (run.data.tags["point"], run.data.tags["dataset"]) == (point, "gsm8k")
    assert "point" not in found[written["cells"]["gsm8k/baseline"]].data.tags
    kept = open_store(tracking).list_artifacts(written["parent"], f"plots/{points[0]}")
    assert [artifact.path for artifact in kept] == [f"plots/{points[0]}/speedup.svg"]
    assert tracked(results_dir, tracking) == written


def test_what_a_crash_left_is_finished(
    results_dir: Path, tracking: TrackingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    class Killed(BaseException):
        """Stands for the process's end."""

    uploads = []

    def log_inputs(self: Any, run_id: str, *_: Any, **__: Any) -> None:
        uploads.append(run_id)
        if len(uploads) == 3:
            raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_inputs", log_inputs)
        with pytest.raises(Killed):
            tracked(results_dir, tracking)
    assert not (results_dir / "mlflow_runs.json").exists()
    left = runs(tracking)
    running = {run_id for run_id, run in left.items() if run.info.status == "RUNNING"}
    assert len(left) == 4 and uploads[2] in running and len(running) == 2  # a cell, the parent

    written = tracked(results_dir, tracking)
    found = runs(tracking, "ALL")
    assert set(left) < set(found) == all_ids(written)
    assert {run.info.status for run in found.values()} == {"FINISHED"}


def test_what_is_logged_once_more_is_there_once(
    results_dir: Path, tracking: TrackingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first call ends when all of a cell is there but that it is finished."""
    from mlflow import MlflowClient

    class Killed(BaseException):
        """Stands for the process's end."""

    def set_terminated(*_: Any, **__: Any) -> None:
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "set_terminated", set_terminated)
        with pytest.raises(Killed):
            tracked(results_dir, tracking)
    (first,) = (run for run in runs(tracking).values() if "run" in run.data.tags)
    written = tracked(results_dir, tracking)
    again = runs(tracking)[written["cells"][first.info.run_name]]
    assert again.info.run_id == first.info.run_id
    assert (again.data.metrics, again.data.params) == (first.data.metrics, first.data.params)
    assert len(again.inputs.dataset_inputs) == 1
    client = open_store(tracking)
    for name in again.data.metrics:
        assert len(client.get_metric_history(again.info.run_id, name)) == 1


def test_only_its_own_runs_are_removed(results_dir: Path, tracking: TrackingConfig) -> None:
    written = tracked(results_dir, tracking)
    client = open_store(tracking)
    where = written["experiment_id"]
    tags = {"experiment": "demo", "dataset": "gsm8k", "run": "dspark_k3"}
    leftover = client.create_run(where, tags={**tags, DIGEST_TAG: "of a crash"}).info.run_id
    other = client.create_run(where, tags={**tags, "experiment": "other", DIGEST_TAG: "x"})
    users = client.create_run(where, tags=tags)

    assert tracked(results_dir, tracking) == written
    kept = {other.info.run_id, users.info.run_id}
    assert set(runs(tracking)) == all_ids(written) | kept
    assert {i: run.info.status for i, run in runs(tracking, "DELETED_ONLY").items()} == {
        leftover: "KILLED"
    }


def test_a_summary_of_many_numbers_is_logged_whole(
    results_dir: Path, tracking: TrackingConfig
) -> None:
    write_summary(results_dir, "gsm8k", "dspark_k3", accept_p=[i / 1500 for i in range(1500)])
    written = tracked(results_dir, tracking)
    metrics = runs(tracking)[written["cells"][CELL]].data.metrics
    assert metrics["accept_p1500"] == pytest.approx(1499 / 1500)
    assert len([key for key in metrics if key.startswith("accept_p")]) == 1500


def test_a_long_table_is_described_in_whole_lines(
    results_dir: Path, tracking: TrackingConfig
) -> None:
    line = "| gsm8k | baseline | 1319 |\n"
    (results_dir / "table.md").write_text(line * 500)
    written = tracked(results_dir, tracking)
    shown = runs(tracking)[written["parent"]].data.tags[DESCRIPTION_TAG]
    assert len(shown) <= DESCRIPTION_LENGTH
    rows, notice = shown.split("\n\n")
    assert set(rows.split("\n")) == {line.strip()}
    assert "table.md" in notice


def test_a_server_that_is_down_is_told_of_quickly(results_dir: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    uri = f"http://someone:secret@127.0.0.1:{port}"
    out = results_dir / "mlflow_runs.json"
    start = time.monotonic()
    with pytest.raises(UserError) as caught:
        track(results_dir, TrackingConfig(uri=uri), out)
    assert time.monotonic() - start < 20
    message = str(caught.value)
    assert "\n" not in message
    assert f"127.0.0.1:{port}" in message and "secret" not in message
    assert "Connection refused" in message
    assert f"nothing is lost, the records stay under '{results_dir}'" in message
    assert f"`dspark track {results_dir}` uploads them" in message
    assert not out.exists()


@contextmanager
def answering(answer: bytes | None) -> Iterator[tuple[str, list[int]]]:
    """A server that sends `answer` to every request, or nothing; its address, and a list that gets
    an entry a request."""
    requests: list[int] = []

    class Answer(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(65536)
            requests.append(len(requests))
            if answer is None:
                ended.wait()
            else:
                self.request.sendall(answer)

    ended = threading.Event()
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Answer) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_address[1]}", requests
        finally:
            ended.set()
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "timed out"),
        (
            b"HTTP/1.1 500 Oops\r\nContent-Length: 0\r\nConnection: close\r\n\r\n",
            "too many 500 error responses",
        ),
    ],
    ids=["silent", "500"],
)
def test_a_server_that_does_not_work_is_given_up(
    results_dir: Path, monkeypatch: pytest.MonkeyPatch, answer: bytes | None, reason: str
) -> None:
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    out = results_dir / "mlflow.json"
    with answering(answer) as (uri, requests), pytest.raises(UserError) as caught:
        track(results_dir, TrackingConfig(uri=uri), out)
    assert f"MLflow at '{uri}' cannot be used: {reason}; nothing is lost" in str(caught.value)
    assert "\n" not in str(caught.value)
    assert not out.exists()
    assert len(requests) > 1  # one lost answer is nothing
    assert len(requests) * float(CLIENT_SETTINGS["MLFLOW_HTTP_REQUEST_TIMEOUT"]) < 55


def test_a_turn_that_does_not_end_is_not_waited_for(
    results_dir: Path, tracking: TrackingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dspark.tracking.mlflow_store.TURN_TIMEOUT_S", 0.1)
    with (
        FileLock(results_dir / ".mlflow.lock"),
        pytest.raises(UserError, match=r"another `dspark track` holds '.*demo/.mlflow.lock' since"),
    ):
        tracked(results_dir, tracking)
    tracked(results_dir, tracking)


@pytest.mark.parametrize(
    ("uri", "message"),
    [
        ("htp://127.0.0.1:5000", "htp"),
        ("http://[::1", "http://[::1"),
        ("sqlite://", "names no file"),
        ("sqlite:///results/demo/table.md/mlflow.db", "table.md"),
        ("sqlite:///results/demo/table.md", "not a database"),
        ("postgresql://127.0.0.1:9/mlflow", "postgresql"),
    ],
)
def test_a_uri_that_cannot_be_used_is_named(results_dir: Path, uri: str, message: str) -> None:
    start = time.monotonic()
    with pytest.raises(UserError, match=r"MLflow at '.*dspark track") as caught:
        track(results_dir, TrackingConfig(uri=uri), results_dir / "mlflow_runs.json")
    assert time.monotonic() - start < 20
    assert uri in str(caught.value) and message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_deleted_experiment_is_refused(results_dir: Path, tracking: TrackingConfig) -> None:
    written = tracked(results_dir, tracking)
    open_store(tracking).delete_experiment(written["experiment_id"])
    with pytest.raises(UserError, match="'dspark' is deleted; restore it"):
        tracked(results_dir, tracking)


def test_importing_the_stage_does_not_import_mlflow() -> None:
    code = "import sys, dspark.tracking.mlflow_store; sys.exit('mlflow' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
