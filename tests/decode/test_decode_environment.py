"""What a measurement says about the machine it ran on, and how the package sets that machine up."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import dspark
from dspark.config import Device, Precision
from dspark.decode import environment
from dspark.decode.environment import (
    describe,
    git_state,
    resolve_device,
    resolve_precision,
    set_threads,
)
from dspark.errors import UserError


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)


@pytest.fixture
def threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


def openmp_settings(**env: str) -> dict[str, str]:
    """What OpenMP says of itself in a new process that imports dspark and then torch."""
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "DSPARK_"))}
    done = subprocess.run(
        [sys.executable, "-c", "import dspark, torch; torch.ones(2).sum()"],
        env={**clean, "OMP_DISPLAY_ENV": "verbose", **env},
        capture_output=True,
        text=True,
        check=True,
    )
    found = re.findall(r"(\w+) *= *'(.*)'", done.stderr)
    if not found:
        pytest.skip("this OpenMP does not display its settings")
    return dict(found)


@pytest.mark.skipif(sys.platform != "linux", reason="the OpenMP runtime of Linux wheels is asked")
def test_idle_openmp_threads_wait_passively_unless_the_user_said_otherwise() -> None:
    ours = openmp_settings()
    assert ours["OMP_WAIT_POLICY"].lower() == "passive"
    assert ours.get("GOMP_SPINCOUNT", "0") == "0"
    assert openmp_settings(OMP_WAIT_POLICY="active")["OMP_WAIT_POLICY"].lower() == "active"


def test_auto_takes_what_there_is(monkeypatch: pytest.MonkeyPatch) -> None:
    for there, device in ((True, "cuda"), (False, "cpu")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda there=there: there)
        assert resolve_device(Device.auto) == device
        assert resolve_device(Device.cpu) == "cpu"


def test_cuda_without_a_gpu_is_refused(no_gpu: None) -> None:
    with pytest.raises(UserError, match=r"engine.device is cuda .* set engine.device=cpu or auto"):
        resolve_device(Device.cuda)
    field = "drafter.train.device"
    with pytest.raises(
        UserError, match=rf"^{field} is cuda but no GPU .*: set {field}=cpu or auto"
    ):
        resolve_device(Device.cuda, field)


def test_threads_are_set_once_and_default_to_the_cores_of_this_process(
    threads_restored: None,
) -> None:
    assert set_threads(1) == 1
    assert torch.get_num_threads() == 1
    cores = len(os.sched_getaffinity(0))
    assert set_threads(None) == cores
    assert torch.get_num_threads() == cores


def test_the_description_of_a_cpu_run_names_all_that_numbers_depend_on() -> None:
    facts = describe("cpu", "0123456789abcdef")
    assert set(facts) == {
        *("config_digest", "device", "device_uuid", "driver", "cuda", "threads", "cores"),
        "cuda_graphs",
        *(
            "memory_bytes",
            "load_average",
            "omp_wait_policy",
            "gomp_spincount",
            "platform",
            "python",
            "dspark",
        ),
        *("node", "slurm_job_id", "cuda_visible_devices", "kernels"),
        *("torch", "triton", "transformers", "tokenizers", "git_sha", "git_dirty"),
    }
    assert facts["config_digest"] == "0123456789abcdef"
    assert facts["device"] and facts["device_uuid"] is None and facts["driver"] is None
    assert facts["torch"] == torch.__version__ or facts["torch"] in torch.__version__
    assert facts["dspark"] == dspark.__version__
    assert facts["cuda_graphs"] is False
    assert facts["threads"] == torch.get_num_threads()
    assert facts["memory_bytes"] > 0 and len(facts["load_average"]) == 3
    assert json.loads(json.dumps(facts)) == facts


def test_the_description_names_the_cluster_job_and_its_gpus(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    names = {"slurm_job_id": "SLURM_JOB_ID", "cuda_visible_devices": "CUDA_VISIBLE_DEVICES"}
    for value in ("17", None):
        for variable in names.values():
            if value is None:
                monkeypatch.delenv(variable, raising=False)
            else:
                monkeypatch.setenv(variable, value)
        facts = describe("cpu", "0123456789abcdef")
        assert [facts[name] for name in names] == [value, value]


@pytest.mark.parametrize(("changes", "dirty"), [("", False), (" M src/dspark/cli.py", True)])
def test_git_state_is_what_git_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, changes: str, dirty: bool
) -> None:
    answers = f'case "$*" in *"status --porcelain"*) printf "{changes}";; *HEAD) echo abc123;; esac'
    (tmp_path / "git").write_text(f"#!/bin/sh\n{answers}\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert git_state(tmp_path) == {"git_sha": "abc123", "git_dirty": dirty}


def test_outside_a_checkout_there_is_no_git_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "git").write_text("#!/bin/sh\nexit 128\n")
    (tmp_path / "git").chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    assert git_state(tmp_path) == {"git_sha": None, "git_dirty": None}


def test_no_git_at_all_is_no_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert git_state(tmp_path) == {"git_sha": None, "git_dirty": None}


@pytest.mark.parametrize("precision", [Precision.float32, Precision.bfloat16])
def test_a_chosen_precision_stays(precision: Precision) -> None:
    assert resolve_precision(precision, "cpu") is precision


@pytest.mark.parametrize("faster", [Precision.float32, Precision.bfloat16])
def test_auto_takes_what_multiplies_faster(
    faster: Precision, monkeypatch: pytest.MonkeyPatch
) -> None:
    timed: list[torch.dtype] = []

    def seconds(dtype: torch.dtype) -> float:
        timed.append(dtype)
        return 1.0 if dtype is getattr(torch, faster.value) else 2.0

    monkeypatch.setattr(environment, "_product_seconds", seconds)
    monkeypatch.setattr(environment, "can_pack", lambda _weight: True)
    assert resolve_precision(Precision.auto, "cpu") is faster
    assert timed == [torch.float32, torch.bfloat16]


def test_auto_finds_a_precision_on_this_machine() -> None:
    assert resolve_precision(Precision.auto, "cpu") in (Precision.float32, Precision.bfloat16)
