"""The scripts that time steps run on a CPU with tiny shapes, and print what they say they print."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner

SCRIPTS = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def scripts(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ModuleType, ModuleType]]:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu
    import growth

    yield gpu, growth
    for name in ("gpu", "growth"):
        sys.modules.pop(name)


def rows(text: str, first: str) -> list[list[str]]:
    lines = [line for line in text.splitlines() if line.startswith(f"| {first} |")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines]


TINY = ["--device", "cpu", "--precision", "float32", "--threads", "1"]


def test_the_gpu_table_on_a_cpu(scripts: tuple[ModuleType, ModuleType]) -> None:
    arguments = [*TINY, "--shape", "tiny", "--rows", "1", "--rows", "3", "--accept", "0.5"]
    result = CliRunner().invoke(scripts[0].main, arguments)
    assert result.exit_code == 0, result.output
    cells = rows(result.output, "tiny")
    ways = ("eager", "static")
    assert [row[1:4] for row in cells] == [
        [n, k, way] for n in ("1", "3") for k in ("0", "3", "7") for way in ways
    ]
    plain = {(row[1], row[3]): float(row[4]) for row in cells if row[2] == "0"}
    for row in cells:
        emitted = 1.0 if row[2] == "0" else 1.5
        assert row[5].endswith("%")
        over = float(row[4]) / plain[row[1], row[3]]
        assert float(row[6]) == pytest.approx(over, rel=0.02, abs=0.02)
        assert float(row[7]) == pytest.approx(emitted / float(row[6]), abs=0.02)


def test_without_a_gpu_it_says_so(scripts: tuple[ModuleType, ModuleType]) -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    result = CliRunner().invoke(scripts[0].main, [])
    assert result.exit_code == 1
    assert "no CUDA device here" in result.output


def test_growth_prints_each_part_and_draws(
    scripts: tuple[ModuleType, ModuleType], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scripts[1], "_axes", lambda: iter([("concurrency", [1, 2]), ("k", [1, 2])]))
    arguments = [*TINY, "--shape", "tiny", "--requests", "60", "--out", str(tmp_path)]
    parts = ["concurrency", "k", "long"]
    result = CliRunner().invoke(
        scripts[1].main, [*arguments, *(word for part in parts for word in ("--only", part))]
    )
    assert result.exit_code == 0, result.output
    assert [row[0] for row in rows(result.output, "k = 7")] == ["k = 7"]
    assert len(rows(result.output, "speculative")[0]) == 3
    assert "A run of 60 requests" in result.output
    assert (tmp_path / "growth.png").stat().st_size > 1000


def test_a_step_has_the_context_that_it_is_timed_at(
    scripts: tuple[ModuleType, ModuleType],
) -> None:
    growth = scripts[1]
    target = growth.random_target(growth.SHAPES["tiny"], "cpu", torch.float32)
    lengths = []
    forward = target.forward

    def watched(tokens, positions, *args):  # type: ignore[no-untyped-def]
        lengths.append(int(positions.min()))
        return forward(tokens, positions, *args)

    target.forward = watched
    with torch.inference_mode():
        assert growth.step_seconds(target, None, 2, 0, 37) > 0
    assert lengths == list(range(36, 36 + growth.STEPS + growth.WARMUP))


def test_no_step_is_slower_as_a_run_gets_longer(scripts: tuple[ModuleType, ModuleType]) -> None:
    """A rough bound for a busy machine; benchmarks/README.md has the measured ratio."""
    growth = scripts[1]
    target = growth.random_target(growth.SHAPES["tiny"], "cpu", torch.float32)
    seconds = growth.long_run(target, 300, new=4)
    first, last = (sorted(part)[10] for part in (seconds[:80], seconds[-80:]))
    assert last < 1.5 * first
