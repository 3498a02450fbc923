"""`dspark table`, `plots` and `compare` on a results folder, and what they refuse."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from measured import write_results

from dspark.cli import cli
from dspark.errors import UserError


def dspark(*args: str | Path) -> Result:
    return CliRunner().invoke(cli, [str(arg) for arg in args])


@pytest.fixture
def summaries(tmp_path: Path) -> list[Path]:
    return write_results(tmp_path / "demo", ["gsm8k"], ks=(0, 3))


def test_table_prints_markdown_and_writes_other_forms(
    summaries: list[Path], tmp_path: Path
) -> None:
    markdown = dspark("table", *summaries, "--out", tmp_path / "t.md")
    assert markdown.output.startswith("| Dataset | Run |")
    other = dspark("table", *summaries, "--out", tmp_path / "t.json", "--format", "json")
    assert (other.exit_code, other.output) == (0, "")
    assert len(json.loads((tmp_path / "t.json").read_text())) == 2


def test_plots_finds_the_cells_of_a_folder(summaries: list[Path], tmp_path: Path) -> None:
    done = dspark("plots", tmp_path / "demo")
    assert done.exit_code == 0
    told = [Path(line) for line in done.output.splitlines()]
    assert all(path.is_file() and path.parent == tmp_path / "demo" / "plots" for path in told)
    chosen = dspark("plots", tmp_path / "demo", summaries[0], "--out", tmp_path / "elsewhere")
    assert chosen.exit_code == 0
    assert "no run beside the baseline" in (tmp_path / "elsewhere" / "speedup.svg").read_text()


def test_compare_prints_markdown(summaries: list[Path], tmp_path: Path) -> None:
    write_results(tmp_path / "other", ["gsm8k"], ks=(0, 3))
    done = dspark("compare", tmp_path / "demo", tmp_path / "other")
    assert done.output.startswith(f"{tmp_path / 'demo'} → {tmp_path / 'other'} (difference)\n")
    published = dspark("compare", tmp_path / "demo", "--published")
    assert "→ the published table (difference)\n" in published.output


def test_compare_takes_the_points_of_a_sweep(tmp_path: Path) -> None:
    for value in ("0.0", "0.5"):
        point = tmp_path / "sweep" / f"sampling.temperature={value}"
        write_results(point, ["gsm8k"], ks=(0, 3))
    done = dspark("compare", tmp_path / "sweep", tmp_path / "sweep")
    assert "gsm8k (sampling.temperature=0.5) | dspark_k3" in done.output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["compare", "demo"], "either a second experiment's folder or --published"),
        (["compare", "demo", "demo", "--published"], "either a second experiment's folder or"),
        (["compare", "demo", "nowhere"], "no summary.json under 'nowhere': run the experiment"),
        (["plots", "nowhere"], "no summary.json under 'nowhere': run the experiment first"),
        (["table", "s.json", "--out", "t", "--format", "cvs"], "did you mean 'csv'?"),
    ],
)
def test_what_is_refused(
    summaries: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    args: list[str],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = dspark(*args)
    assert isinstance(done.exception, UserError) and said in str(done.exception)
