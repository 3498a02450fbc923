"""What no interpreter shows: that the kernels compile for a Hopper GPU and fit it. No GPU is needed."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="kernels need triton")

SHARED = 227 * 1024  # bytes that a block may have on compute capability 9.0
PRODUCTS = {"_attend_part", "_best_of_tile"}


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    """In a process of its own: in this one kernels may be interpreted."""
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("hopper.py")],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_kernel_is_compiled_for_every_case(compiled: list[dict[str, Any]]) -> None:
    cases = {row["case"] for row in compiled}
    assert len(cases) == 3
    for case in cases:
        kernels = {row["kernel"] for row in compiled if row["case"] == case}
        others = {"_add_norm", "_accept", "_best_of_all", "_sum_tile", "_draw", "_rope_append"}
        assert kernels - {"_merge"} == others | PRODUCTS
    assert any(row["kernel"] == "_merge" for row in compiled)


def test_they_fit_shared_memory_and_registers(compiled: list[dict[str, Any]]) -> None:
    for row in compiled:
        assert row["shared"] <= SHARED, row
        assert row["stack"] <= 16, row  # a value or two; what spills a loop's state takes hundreds


def test_products_in_half_precision_run_on_tensor_cores(compiled: list[dict[str, Any]]) -> None:
    for row in compiled:
        half = row["case"].startswith("bfloat16")
        assert row["tensor_cores"] == (half and row["kernel"] in PRODUCTS), row
