"""The real DAG: what it makes, and which jobs a change runs again."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import mlflow
import pytest
from checkout import DATASETS, RUNS, Checkout

from dspark.report.table import parse_table

SHARED = Path(__file__).parents[2].parent / "shared"
TINY = ("--config", "experiment=tiny")


def tiny(*overrides: str) -> tuple[str, ...]:
    return (*TINY, f"overrides={' '.join(overrides)}")


def test_run_ends_in_a_table_with_a_row_for_every_cell(finished: Checkout) -> None:
    rows = parse_table((finished.results / "table.md").read_text())
    assert [(row.dataset, row.run) for row in rows] == [(d, r) for d in DATASETS for r in RUNS]
    assert all(row.requests == 6 for row in rows)


def test_outputs_are_identical_in_float32(finished: Checkout) -> None:
    for dataset in DATASETS:
        verdicts = json.loads((finished.results / dataset / "lossless.json").read_text())
        assert {run: v["verdict"] for run, v in verdicts.items()} == dict.fromkeys(
            RUNS[1:], "identical"
        )
    assert "identical to baseline" in (finished.results / "table.md").read_text()


def test_finished_run_plans_nothing(finished: Checkout) -> None:
    assert finished.planned(*TINY) == {}
    assert "Nothing to be done" in finished.snakemake(*TINY).stderr


def test_touched_files_plan_nothing(finished: Checkout) -> None:
    for path in [
        *(finished.path / "config").rglob("*.yaml"),
        *(finished.path / "src").rglob("*.py"),
    ]:
        path.touch()
    assert finished.planned(*TINY) == {}


@pytest.mark.parametrize("dataset", DATASETS)
def test_one_datasets_option_plans_that_datasets_chain_only(
    finished: Checkout, dataset: str
) -> None:
    planned = finished.planned(*tiny(f"datasets.{dataset}.max_new_tokens=20"))
    assert planned == {
        "job_config": 1,
        "prompts": 1,
        "bench": 1,
        "summarise": 1,
        "table": 1,
        "track": 1,
        "all": 1,
    }
    done = finished.snakemake("--dry-run", *tiny(f"datasets.{dataset}.max_new_tokens=20"))
    assert re.findall(r"rule bench:\s+input: results/tiny/(\w+)/", done.stdout + done.stderr) == [
        dataset
    ]


def test_engine_option_plans_every_dataset_but_no_preparing(finished: Checkout) -> None:
    planned = finished.planned(*tiny("engine.concurrency=2"))
    assert planned["bench"] == len(DATASETS)
    assert "prepare" not in planned


def test_tracking_option_runs_no_bench(finished: Checkout) -> None:
    planned = finished.planned(*tiny("tracking.uri=sqlite:///other.db"))
    assert planned == {"tracking_config": 1, "track": 1, "all": 1}


def test_engine_code_runs_every_cell_again(finished: Checkout) -> None:
    source = finished.path / "src" / "dspark" / "decode" / "verify.py"
    before = source.read_text()
    source.write_text(before + "\n# changed\n")
    try:
        assert finished.planned(*TINY)["bench"] == len(DATASETS)
    finally:
        source.write_text(before)


def test_mlflow_holds_one_parent_and_a_child_for_every_cell(finished: Checkout) -> None:
    ids = json.loads((finished.results / "mlflow.json").read_text())
    client = mlflow.MlflowClient(f"sqlite:///{finished.path / 'results' / 'mlflow.db'}")
    runs = client.search_runs([ids["experiment_id"]])
    children = {r.info.run_name for r in runs if "mlflow.parentRunId" in r.data.tags}
    assert children == {f"{d}/{r}" for d in DATASETS for r in RUNS}
    assert len(runs) == len(children) + 1
    again = finished.snakemake("--forcerun", "track", *TINY)
    assert again.returncode == 0
    assert len(client.search_runs([ids["experiment_id"]])) == len(runs)


def test_changed_option_really_runs_that_dataset_alone(fresh: Checkout, finished: Checkout) -> None:
    shutil.rmtree(fresh.path)
    shutil.copytree(finished.path, fresh.path)
    kept = fresh.results / "mt_bench" / "requests.parquet"
    stamp = kept.stat().st_mtime_ns
    fresh.snakemake(*tiny("datasets.gsm8k.limit=4"))
    rows = parse_table((fresh.results / "table.md").read_text())
    assert {row.requests for row in rows if row.dataset == "gsm8k"} == {4}
    assert kept.stat().st_mtime_ns == stamp
    assert fresh.planned(*tiny("datasets.gsm8k.limit=4")) == {}


@pytest.mark.skipif(not SHARED.is_dir(), reason="../shared is absent: no real prompt files")
def test_real_gsm8k_prompts_by_one_override(fresh: Checkout) -> None:
    path = SHARED / "datasets" / "gsm8k.jsonl"
    override = f"datasets.gsm8k={{source:file,path:{path},limit:32,max_new_tokens:8}}"
    wanted = "results/tiny/gsm8k/dspark_k3/summary.json"
    fresh.snakemake(wanted, *TINY, f"overrides={override}")
    summary = json.loads((fresh.results / "gsm8k" / "dspark_k3" / "summary.json").read_text())
    assert summary["requests"] == 32
    assert len((fresh.results / "gsm8k" / "prompts.jsonl").read_text().splitlines()) == 32


def test_wrong_names_are_refused_in_one_line(fresh: Checkout) -> None:
    for args, said in [
        (("--config", "experiment=tinny"), "did you mean 'tiny'?"),
        (tiny("engine.concurency=2"), "did you mean 'concurrency'?"),
        (tiny("datasets.gsm9k.limit=2"), "'datasets' has no 'gsm9k'"),
    ]:
        done = fresh.snakemake("--dry-run", *args, check=False)
        assert done.returncode != 0
        assert said in done.stdout + done.stderr
        assert "Traceback" not in done.stdout + done.stderr


def test_dspark_run_takes_the_same_overrides(finished: Checkout) -> None:
    done = finished.dspark("run", "tiny", "datasets.gsm8k.limit=2", "--cores", "2", "--dry-run")
    assert done.returncode == 0, done.stderr
    assert "rule bench" in done.stdout + done.stderr
    done = finished.dspark("run", "tiny", "--cores", "2", "--dry-run")
    assert "Nothing to be done" in done.stdout + done.stderr


def test_failing_job_says_why_and_leaves_nothing_half_written(fresh: Checkout) -> None:
    override = "datasets.gsm8k.max_new_tokens=4000"
    done = fresh.snakemake("results/tiny/gsm8k/requests.parquet", *tiny(override), check=False)
    assert done.returncode != 0
    log = (fresh.results / "logs" / "bench" / "gsm8k.log").read_text()
    assert "do not fit the target's context" in log
    assert "Traceback" not in log
    assert not (fresh.results / "gsm8k" / "requests.parquet").exists()
