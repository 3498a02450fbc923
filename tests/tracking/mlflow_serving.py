"""A real `mlflow server` on this machine, and what its pages ask it for."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

START_TIMEOUT_S = 120


def free_port() -> int:
    """A port on which nothing listens."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]


@contextmanager
def mlflow_server(store_uri: str, log: Path, port: int, workers: int = 1) -> Iterator[str]:
    """Serve `store_uri`; yields the server's address."""
    command = ["mlflow", "server", "--backend-store-uri", store_uri]
    command += ["--artifacts-destination", str(log.parent / "served")]
    with serving(command, log, port, workers) as address:
        yield address


@contextmanager
def serving(command: Sequence[str], log: Path, port: int, workers: int = 1) -> Iterator[str]:
    """Run a command that serves a store, on this machine and port; yields the server's address."""
    program, *arguments = command
    command = [
        *(str(Path(sys.executable).with_name(program)), *arguments),
        *("--workers", str(workers), "--host", "127.0.0.1", "--port", str(port)),
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
