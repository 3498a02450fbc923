"""The plots as files: which there are, of what, and what is refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
from measured import write_results

from dspark.errors import UserError
from dspark.metrics.cell import read_summary, write_summary
from dspark.report.plots import write_plots

KINDS = ["acceptance", "accept_length", "latency", "throughput", "ttft"]


def files(folder: Path) -> list[str]:
    return sorted(
        path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()
    )


def both(names: list[str]) -> list[str]:
    return sorted(f"{name}.{kind}" for name in names for kind in ("png", "svg"))


def test_every_dataset_has_its_plots_and_all_share_one(tmp_path: Path) -> None:
    summaries = write_results(tmp_path / "demo")
    written = write_plots(summaries, tmp_path / "plots")
    wanted = ["speedup", *(f"{d}-{kind}" for d in ("gsm8k", "mt_bench") for kind in KINDS)]
    assert files(tmp_path / "plots") == both(wanted)
    assert sorted(path.stem for path in written) == sorted(wanted)
    said = (tmp_path / "plots" / "mt_bench-latency.svg").read_text()
    assert "mt_bench: median / p95 in ms" in said and "gsm8k" not in said


def test_the_same_results_give_the_same_plots(tmp_path: Path) -> None:
    summaries = write_results(tmp_path / "demo", ["gsm8k"])
    for out in ("one", "two"):
        write_plots(summaries, tmp_path / out)
    for name in files(tmp_path / "one"):
        assert (tmp_path / "one" / name).read_bytes() == (tmp_path / "two" / name).read_bytes()


@pytest.fixture
def sweep(tmp_path: Path) -> list[Path]:
    """gsm8k at two concurrencies."""
    paths = []
    for concurrency in (1, 4):
        point = tmp_path / "sweep" / f"engine.concurrency={concurrency}"
        for path in write_results(point, ["gsm8k"], ks=(0, 3)):
            cell = read_summary(path)
            cell.concurrency = concurrency
            write_summary(path, cell)
            paths.append(path)
    return paths


def test_a_sweep_has_the_plots_of_each_point_and_one_by_concurrency(
    sweep: list[Path], tmp_path: Path
) -> None:
    write_plots(sweep, tmp_path / "plots")
    point = [*(f"gsm8k-{kind}" for kind in KINDS), "speedup"]
    points = [f"engine.concurrency={n}/{name}" for n in (1, 4) for name in point]
    assert files(tmp_path / "plots") == both([*points, "concurrency"])


def test_what_else_was_swept_is_an_arm_of_its_own(tmp_path: Path) -> None:
    paths = []
    for concurrency, k in ((1, 1), (4, 3)):
        point = f"engine.concurrency={concurrency},runs.dspark_k3.k={k}"
        for path in write_results(tmp_path / "sweep" / point, ["gsm8k"], ks=(0, 3)):
            cell = read_summary(path)
            cell.concurrency = concurrency
            write_summary(path, cell)
            paths.append(path)
    write_plots(paths, tmp_path / "plots")
    said = (tmp_path / "plots" / "concurrency.svg").read_text()
    assert "dspark_k3 (runs.dspark_k3.k=1)" in said
    assert "dspark_k3 (runs.dspark_k3.k=3)" in said


def test_records_that_are_not_those_of_the_summaries(tmp_path: Path) -> None:
    summaries = write_results(tmp_path / "demo")
    cell = read_summary(summaries[1])
    other = write_results(tmp_path / "other", ["gsm8k"], ks=(0, 7))
    shutil.copy(other[0].parents[1] / "requests.parquet", tmp_path / "demo" / "gsm8k")
    with pytest.raises(UserError) as caught:
        write_plots(summaries, tmp_path / "plots")
    path = tmp_path / "demo" / "gsm8k" / "requests.parquet"
    assert str(caught.value) == (
        f"'{path}' holds 0 requests with 0 output tokens of run 'dspark_k3', its summary tells of 6 "
        f"with {cell.output_tokens}: summarise the dataset's records again"
    )
    path.unlink()
    with pytest.raises(UserError, match=r"request records '.*gsm8k/requests.parquet' do not exist"):
        write_plots(summaries, tmp_path / "plots")


def test_unpaired_arms_are_refused_or_marked_as_in_the_table(tmp_path: Path) -> None:
    summaries = write_results(tmp_path / "demo", ["gsm8k"])
    cell = read_summary(summaries[1])
    cell.settings["device"] = "NVIDIA H200"
    write_summary(summaries[1], cell)
    with pytest.raises(UserError, match="no speedup without its own baseline: gsm8k/dspark_k3"):
        write_plots(summaries, tmp_path / "plots")
    assert not (tmp_path / "plots").exists()
    write_plots(summaries, tmp_path / "plots", allow_unpaired=True)
    assert "x †<" in (tmp_path / "plots" / "speedup.svg").read_text()
