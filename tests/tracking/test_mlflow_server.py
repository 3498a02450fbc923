"""A real MLflow server shows what was tracked, and takes what is tracked through it."""

from __future__ import annotations

import json
from pathlib import Path

from mlflow_serving import free_port, mlflow_server, search

from dspark.config import TrackingConfig
from dspark.tracking.mlflow_store import track


def test_a_server_lists_the_arms_of_a_dataset_and_takes_uploads(
    results_dir: Path, tracking: TrackingConfig, tmp_path: Path
) -> None:
    out = results_dir / "mlflow_runs.json"
    track(results_dir, tracking, out)
    direct = json.loads(out.read_text())
    condition = "tags.experiment = 'demo' and tags.dataset = 'gsm8k'"

    with mlflow_server(tracking.uri, tmp_path / "server.log", free_port()) as address:
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
