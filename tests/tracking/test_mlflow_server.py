"""A real MLflow server shows what was tracked, and takes what is tracked through it."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from dspark.config import TrackingConfig
from dspark.tracking.mlflow_store import track

START_TIMEOUT_S = 120


@contextmanager
def mlflow_server(store_uri: str, log: Path) -> Iterator[str]:
    """Serve `store_uri` on a free port of this machine; yields the server's address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [
        str(Path(sys.executable).with_name("mlflow")),
        *("server", "--backend-store-uri", store_uri, "--workers", "1"),
        *("--artifacts-destination", str(log.parent / "served")),
        *("--host", "127.0.0.1", "--port", str(port)),
    ]
    # the job runners would cost ten more processes, and nothing here uses them
    env = {**os.environ, "MLFLOW_SERVER_ENABLE_JOB_EXECUTION": "false"}
    with log.open("wb") as stream:
        process = subprocess.Popen(
            command, stdout=stream, stderr=subprocess.STDOUT, env=env, start_new_session=True
        )
    try:
        _wait_until_healthy(f"http://127.0.0.1:{port}", process, log)
        yield f"http://127.0.0.1:{port}"
    finally:
        os.killpg(process.pid, signal.SIGKILL)  # the server's workers are in its process group
        process.wait()


def _wait_until_healthy(address: str, process: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < deadline and process.poll() is None:
        try:
            with urllib.request.urlopen(f"{address}/health", timeout=5):
                return
        except OSError:
            time.sleep(0.2)
    pytest.fail(f"the server did not start:\n{log.read_text()}")


def search(address: str, experiment_id: str, condition: str) -> list[dict[str, Any]]:
    """What the pages of the server ask for to list runs."""
    request = urllib.request.Request(
        f"{address}/api/2.0/mlflow/runs/search",
        data=json.dumps({"experiment_ids": [experiment_id], "filter": condition}).encode(),
        headers={"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=30) as response:
        return json.load(response).get("runs", [])


def test_a_server_lists_the_arms_of_a_dataset_and_takes_uploads(
    results_dir: Path, tracking: TrackingConfig, tmp_path: Path
) -> None:
    out = results_dir / "mlflow_runs.json"
    track(results_dir, tracking, out)
    direct = json.loads(out.read_text())
    condition = "tags.experiment = 'demo' and tags.dataset = 'gsm8k'"

    with mlflow_server(tracking.uri, tmp_path / "server.log") as address:
        arms = search(address, direct["experiment_id"], condition)
        speedups = {
            run["info"]["run_name"]: metric["value"]
            for run in arms
            for metric in run["data"]["metrics"]
            if metric["key"] == "speedup"
        }
        assert set(speedups) == {"gsm8k/baseline", "gsm8k/dspark_k3", "gsm8k/dspark_k7"}
        assert speedups["gsm8k/baseline"] == 1.0 < speedups["gsm8k/dspark_k3"]

        remote = TrackingConfig(uri=address, experiment="through the server")
        track(results_dir, remote, out)
        first = out.read_bytes()
        uploaded = json.loads(first)
        assert uploaded["experiment_id"] != direct["experiment_id"]
        assert len(search(address, uploaded["experiment_id"], condition)) == 3
        track(results_dir, remote, out)
        assert out.read_bytes() == first

    child = uploaded["cells"]["gsm8k/dspark_k3"]
    served = list((tmp_path / "served").rglob(f"{child}/artifacts/summary.json"))
    assert len(served) == 1
