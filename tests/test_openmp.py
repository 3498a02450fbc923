"""How idle threads wait: spinning where the cores are free, unless the user has said something."""

from __future__ import annotations

import os
import subprocess
import sys
from unittest.mock import patch

import psutil
import pytest

import dspark
from dspark.openmp import SPINS, spin_on_free_cores


@pytest.mark.parametrize(("busy", "spins"), [(0.0, SPINS), (0.2, SPINS), (0.4, "0"), (2.0, "0")])
def test_threads_spin_where_others_leave_the_cores_free(
    busy: float, spins: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`busy` cores are in use; psutil tells the share of all."""
    cores = psutil.cpu_count() or 1
    monkeypatch.setattr(psutil, "cpu_percent", lambda interval: 100 * busy / cores)
    monkeypatch.setattr(dspark, "OPENMP_IS_OURS", True)
    with patch.dict(os.environ):
        spin_on_free_cores()
        assert os.environ["GOMP_SPINCOUNT"] == spins


def test_what_the_user_has_set_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dspark, "OPENMP_IS_OURS", False)
    with patch.dict(os.environ, {"GOMP_SPINCOUNT": "7"}):
        spin_on_free_cores()
        assert os.environ["GOMP_SPINCOUNT"] == "7"


@pytest.mark.parametrize(
    ("variable", "ours"),
    [("PATH_OF_NOTHING", True), ("OMP_WAIT_POLICY", False), ("GOMP_SPINCOUNT", False)],
)
def test_a_setting_of_the_users_is_noticed(variable: str, ours: bool) -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "DSPARK_"))}
    code = "import dspark; print(dspark.OPENMP_IS_OURS)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**clean, variable: "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.strip() == str(ours)


def test_what_a_workflow_has_set_is_ours_in_its_jobs() -> None:
    clean = {k: v for k, v in os.environ.items() if not k.startswith(("OMP_", "GOMP_", "DSPARK_"))}
    inner = "import dspark; print(dspark.OPENMP_IS_OURS)"
    outer = f"import dspark, subprocess, sys; subprocess.run([sys.executable, '-c', {inner!r}])"
    done = subprocess.run(
        [sys.executable, "-c", outer], env=clean, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "True"
