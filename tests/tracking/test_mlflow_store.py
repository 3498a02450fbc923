"""Tracking into a real SQLite store: its structure, and that doing it again changes nothing."""

from __future__ import annotations

import json
import re
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
from results_tree import BEGAN, REQUESTS, SHA, WINDOWS, summary, write_dataset, write_summary

from dspark.config import TrackingConfig
from dspark.errors import UserError
from dspark.tracking.connection import CLIENT_SETTINGS
from dspark.tracking.mlflow_store import track
from dspark.tracking.points import SLICES
from dspark.tracking.runs import DESCRIPTION_LENGTH, DESCRIPTION_TAG, DIGEST_TAG, PARENT_TAG

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


def test_a_child_holds_the_numbers_and_what_tells_it_apart(
    results_dir: Path, tracking: TrackingConfig
) -> None:
    written = tracked(results_dir, tracking)
    run = runs(tracking)[written["cells"][CELL]]
    tags = run.data.tags
    assert (tags["experiment"], tags["dataset"], tags["run"]) == ("demo", "gsm8k", "dspark_k3")
    assert (tags["git_sha"], tags["git_dirty"], tags["device"]) == (SHA, "false", "Intel Xeon")
    assert (tags["precision"], tags["target"], tags["drafter"]) == (
        *("float32", "tiny", "tiny_dspark"),
    )
    assert run.data.params == {
        "dataset": "gsm8k",
        "run": "dspark_k3",
        "k": "3",
        "schedule": "false",
        "confidence_threshold": "0.0",
        "concurrency": "1",
    }
    numbers = summary(results_dir, "gsm8k", "dspark_k3")
    assert run.data.metrics["output_tok_s"] == numbers["output_tok_s"]
    assert run.data.metrics["accept_p3"] == numbers["accept_p"][2]
    assert run.data.metrics["lossless_identical"] == REQUESTS


def load_cells(
    tracking: TrackingConfig, written: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> Any:
    """The table of the parent, as a user loads it into pandas."""
    client = open_store(tracking)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", client.tracking_uri)  # it searches there
    return client.load_table(written["experiment_id"], "cells.json", [written["parent"]])


def test_the_parent_has_the_tags_of_all_and_a_table_of_them(
    results_dir: Path, tracking: TrackingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = summary(results_dir, "gsm8k", "dspark_k3")["settings"]
    write_summary(results_dir, "gsm8k", "dspark_k3", settings={**settings, "device": "Other"})
    written = tracked(results_dir, tracking)
    tags = runs(tracking)[written["parent"]].data.tags
    assert (tags["experiment"], tags["device"]) == ("demo", "Intel Xeon, Other")
    table = load_cells(tracking, written, monkeypatch)
    assert list(table["run"][:3]) == ["baseline", "dspark_k3", "dspark_k7"]
    told = [
        summary(results_dir, *name.split("/"))["output_tok_s"] for name in sorted(written["cells"])
    ]
    assert list(table["output_tok_s"]) == pytest.approx(told, rel=1e-12)


def test_curves_run_from_the_start_of_the_measurement(
    results_dir: Path, tracking: TrackingConfig
) -> None:
    written = tracked(results_dir, tracking)
    found, client = runs(tracking), open_store(tracking)
    baseline = found[written["cells"]["gsm8k/baseline"]]
    begun = round(1000 * BEGAN.timestamp())
    assert baseline.info.start_time == found[written["parent"]].info.start_time == begun
    rates = client.get_metric_history(baseline.info.run_id, "over_time/output_tok_s")
    assert sorted(point.step for point in rates) == list(range(5, 101, 5))
    last = max(rates, key=lambda point: point.step)
    window_s = summary(results_dir, "gsm8k", "baseline")["window_s"]
    assert last.timestamp == pytest.approx(begun + 1000 * window_s, abs=1)
    mean = sum(point.value for point in rates) / SLICES
    assert mean == pytest.approx(baseline.data.metrics["output_tok_s"])
    assert baseline.data.metrics["over_time/requests_done"] == REQUESTS
    memory = client.get_metric_history(baseline.info.run_id, "system/process_memory_megabytes")
    assert len(memory) == WINDOWS
    assert max(point.timestamp for point in memory) == baseline.info.end_time


def inputs_of(run: Any) -> dict[str, Any]:
    """The datasets of a run by their context."""
    return {
        tag.value: given.dataset
        for given in run.inputs.dataset_inputs
        for tag in given.tags
        if tag.key == "mlflow.data.context"
    }


def test_prompts_target_and_drafter_are_inputs_that_arms_share(
    results_dir: Path, tracking: TrackingConfig
) -> None:
    written = tracked(results_dir, tracking)
    found = runs(tracking)
    inputs = {name: inputs_of(found[run_id]) for name, run_id in written["cells"].items()}
    assert {given["eval"].name for given in inputs.values()} == {"gsm8k", "humaneval"}
    digests = {given["eval"].digest for name, given in inputs.items() if name.startswith("gsm8k/")}
    assert len(digests) == 1
    assert inputs[CELL]["eval"].digest != inputs["humaneval/baseline"]["eval"].digest
    assert json.loads(inputs[CELL]["eval"].profile)["num_rows"] == REQUESTS
    assert len({given["target"].digest for given in inputs.values()}) == 1
    assert inputs[CELL]["drafter"].name == "tiny_dspark"
    assert json.loads(inputs[CELL]["drafter"].profile)["revision"] == "abc123"
    assert set(inputs["gsm8k/baseline"]) == {"eval", "target"}
    names = {dataset.name for given in inputs.values() for dataset in given.values()}
    assert names == {"gsm8k", "humaneval", "tiny", "tiny_dspark"}


def test_arms_of_a_dataset_have_different_colours(
    results_dir: Path, tracking: TrackingConfig
) -> None:
    written = tracked(results_dir, tracking)
    found = runs(tracking)
    colours = [found[run].data.tags["mlflow.runColor"] for run in written["cells"].values()]
    assert len(set(colours)) == len(colours) == 6
    assert all(re.fullmatch("#[0-9a-f]{6}", colour) for colour in colours)


def test_artifacts_lie_beside_the_database(
    results_dir: Path, tracking: TrackingConfig, tmp_path: Path
) -> None:
    written = tracked(results_dir, tracking)
    client = open_store(tracking)
    child = written["cells"][CELL]
    assert [a.path for a in client.list_artifacts(child)] == ["config.yaml", "summary.json"]
    whole = {"": [], "config": [], "plots": []}
    for folder in whole:
        whole[folder] = [a.path for a in client.list_artifacts(written["parent"], folder or None)]
    assert whole == {
        "": ["cells.json", "config", "plots", "table.md"],
        "config": ["config/gsm8k.yaml", "config/humaneval.yaml", "config/models.yaml"],
        "plots": ["plots/speedup.png", "plots/speedup.svg"],
    }
    artifacts = tmp_path / "store" / "mlruns"
    for kept, file in {
        f"{child}/artifacts/summary.json": f"{CELL}/summary.json",
        f"{child}/artifacts/config.yaml": "gsm8k/config.yaml",
        f"{written['parent']}/artifacts/config/models.yaml": "models/config.yaml",
        f"{written['parent']}/artifacts/table.md": "table.md",
    }.items():
        assert (artifacts / kept).read_bytes() == (results_dir / file).read_bytes()
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
    plot = results_dir / "plots" / points[0] / "speedup.png"
    plot.parent.mkdir()
    plot.write_bytes(b"a picture")
    written = tracked(results_dir, tracking)
    found = runs(tracking)
    for point in points:
        run = found[written["cells"][f"{point}/gsm8k/baseline"]]
        assert run.info.run_name == f"{point}/gsm8k/baseline"
        assert (run.data.tags["point"], run.data.tags["dataset"]) == (point, "gsm8k")
    assert "point" not in found[written["cells"]["gsm8k/baseline"]].data.tags
    kept = open_store(tracking).list_artifacts(written["parent"], f"plots/{points[0]}")
    assert [artifact.path for artifact in kept] == [f"plots/{points[0]}/speedup.png"]
    configs = open_store(tracking).list_artifacts(written["parent"], f"config/{points[0]}")
    assert [artifact.path for artifact in configs] == [f"config/{points[0]}/gsm8k.yaml"]
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
    assert len(again.inputs.dataset_inputs) == 2
    client = open_store(tracking)
    points = {name.split("/")[0]: 0 for name in again.data.metrics}
    for name in again.data.metrics:
        points[name.split("/")[0]] = len(client.get_metric_history(again.info.run_id, name))
    assert (points.pop("over_time"), points.pop("system")) == (SLICES, WINDOWS)
    assert set(points.values()) == {1}


def test_a_table_that_a_killed_call_left_is_not_added_to(
    results_dir: Path, tracking: TrackingConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlflow import MlflowClient

    class Killed(BaseException):
        """Stands for the process's end."""

    def log_artifact(self: Any, run_id: str, path: str, *rest: Any) -> None:
        if path.endswith("speedup.svg"):  # the last of the parent
            raise Killed
        kept(self, run_id, path, *rest)

    kept = MlflowClient.log_artifact
    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_artifact", log_artifact)
        with pytest.raises(Killed):
            tracked(results_dir, tracking)
    written = tracked(results_dir, tracking)
    table = load_cells(tracking, written, monkeypatch)
    assert len(table) == len(written["cells"])


def test_a_new_experiment_has_a_view_of_its_cells_and_an_old_one_is_left_alone(
    results_dir: Path, tracking: TrackingConfig
) -> None:
    written = tracked(results_dir, tracking)
    client = open_store(tracking)
    tags = client.get_experiment(written["experiment_id"]).tags
    view = json.loads(json.loads(tags["mlflow.sharedViewState.dspark"])["state"])
    metrics = runs(tracking)[written["cells"][CELL]].data.metrics
    params = runs(tracking)[written["cells"][CELL]].data.params
    shown = {f"metrics.`{name}`" for name in metrics} | {f"params.`{name}`" for name in params}
    assert set(view["selectedColumns"]) <= shown
    client.delete_experiment_tag(written["experiment_id"], "mlflow.sharedViewState.dspark")
    tracked(results_dir, tracking)
    again = client.get_experiment(written["experiment_id"]).tags
    assert "mlflow.sharedViewState.dspark" not in again


@pytest.mark.parametrize("losses", [3, 4])
def test_inputs_that_somebody_else_adds_at_the_same_moment_are_shared(
    results_dir: Path, tracking: TrackingConfig, monkeypatch: pytest.MonkeyPatch, losses: int
) -> None:
    """Each of an arm's three inputs can be lost to another process once; more is no race."""
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException
    from mlflow.protos.databricks_pb2 import BAD_REQUEST

    def log_inputs(self: Any, run_id: str, given: list[Any]) -> None:
        tries[run_id] = tries.get(run_id, 0) + 1
        if len(given) == 3 and tries[run_id] <= losses:
            raise MlflowException("UNIQUE constraint failed: datasets.name", BAD_REQUEST)
        kept(self, run_id, given)

    tries: dict[str, int] = {}
    kept = MlflowClient.log_inputs
    monkeypatch.setattr(MlflowClient, "log_inputs", log_inputs)
    if losses > 3:
        with pytest.raises(UserError, match="cannot be used: UNIQUE constraint failed"):
            tracked(results_dir, tracking)
        return
    written = tracked(results_dir, tracking)
    assert set(inputs_of(runs(tracking)[written["cells"][CELL]])) == {"eval", "target", "drafter"}


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
    monkeypatch.setattr("dspark.tracking.connection.TURN_TIMEOUT_S", 0.1)
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
