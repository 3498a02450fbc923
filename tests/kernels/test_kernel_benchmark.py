"""The script that times the kernels: what it compares computes the same, and it prints its table."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner
from torch import Tensor

pytest.importorskip("triton", reason="kernels need triton")

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def script(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import triton_kernels

    yield triton_kernels
    for name in ("triton_kernels", "growth"):
        sys.modules.pop(name)


def results(made: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [made] if isinstance(made, Tensor) else list(made)


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")
def test_both_sides_compute_the_same(script: ModuleType, device: str) -> None:
    def new(*shape: int) -> Tensor:
        return torch.randn(shape, device=device)

    torch.manual_seed(0)
    seen = set()
    for case in script.cases(script.SHAPES["tiny"], 2, (0, 3), new):
        inputs = case.inputs()
        plain, ours = results(case.plain(*inputs)), results(case.ours(*inputs))
        for one, other in zip(plain, ours, strict=True):
            torch.testing.assert_close(one.reshape(other.shape), other, atol=1e-5, rtol=1e-5)
        seen.add((case.kernel, case.k))
        assert case.read > 0
    each = {(name, k) for name in ("verify attention", "rope append", "add norm") for k in (0, 3)}
    drafting = {("Markov argmax", None), ("greedy accept", 3), ("rejection", 3)}
    assert seen == each | drafting


def test_the_table(script: ModuleType, device: str) -> None:
    arguments = ["--device", device, "--precision", "float32", "--shape", "tiny", "--rows", "1"]
    result = CliRunner().invoke(script.main, [*arguments, "--k", "0", "--k", "3"])
    assert result.exit_code == 0, result.output
    lines = [line for line in result.output.splitlines() if line.startswith("| ")]
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]
    assert cells[0] == script.COLUMNS
    assert len(cells) == 2 + 2 * 3 + 1 + 2
    for _, target, rows, _, plain, ours, ratio, _ in cells[2:]:
        assert (target, rows) == ("tiny", "1")
        assert float(ratio) == pytest.approx(float(plain) / float(ours), abs=0.01, rel=0.01)


def test_a_cpu_needs_the_interpreter_and_it_says_so(
    script: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    result = CliRunner().invoke(script.main, ["--device", "cpu"])
    assert result.exit_code == 1
    assert "TRITON_INTERPRET=1 goes with --device cpu, and with it alone" in result.output
    if not torch.cuda.is_available():
        result = CliRunner().invoke(script.main, [])
        assert result.exit_code == 1
        assert "no CUDA device here" in result.output
