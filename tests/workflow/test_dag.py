"""The real DAG: what it makes, and which jobs a change runs again."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlflow
import pytest
from checkout import DATASETS, RUNS, Checkout

from dspark.config import JobConfig, from_yaml
from dspark.metrics.records_io import read_records
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


def test_speedups_stand_beside_what_acceptance_and_step_times_predict(finished: Checkout) -> None:
    script = Path(__file__).parents[2] / "benchmarks" / "predicted.py"
    done = subprocess.run(
        [sys.executable, script, finished.results], capture_output=True, text=True, check=True
    )
    lines = [line.strip("| ").split(" | ") for line in done.stdout.splitlines()[2:]]
    assert [line[:2] for line in lines] == [[d, r] for d in DATASETS for r in RUNS[1:]]
    for dataset, run, delivered, _, predicted, measured, flying, apart in lines:
        summary = json.loads((finished.results / dataset / run / "summary.json").read_text())
        assert float(delivered) == pytest.approx(summary["accept_len_delivered"], abs=5e-4)
        assert float(measured[:-1]) == pytest.approx(summary["speedup"], abs=5e-4)
        ratio = float(measured[:-1]) / float(predicted[:-1])
        assert float(apart[:-1]) / 100 == pytest.approx(ratio - 1, abs=0.01)
        assert 0 < float(flying) <= 4.01


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
        "plots": 1,
        "command": 1,
        "track": 1,
        "all": 1,
    }
    done = finished.snakemake("--dry-run", *tiny(f"datasets.{dataset}.max_new_tokens=20"))
    assert re.findall(r"rule bench:\s+input: results/tiny/(\w+)/", done.stdout + done.stderr) == [
        dataset
    ]


def test_shards_are_bench_jobs_of_their_own(finished: Checkout) -> None:
    planned = finished.planned(*tiny("datasets.gsm8k.shards=3"))
    assert planned == {
        "job_config": 1,
        "prompts": 1,
        "bench": 3,
        "merge": 1,
        "summarise": 1,
        "table": 1,
        "plots": 1,
        "command": 1,
        "track": 1,
        "all": 1,
    }


def test_engine_option_plans_every_dataset_but_no_preparing(finished: Checkout) -> None:
    planned = finished.planned(*tiny("engine.concurrency=2"))
    assert planned["bench"] == len(DATASETS)
    assert "prepare" not in planned


def test_tracking_option_runs_no_bench(finished: Checkout) -> None:
    planned = finished.planned(*tiny("tracking.uri=sqlite:///other.db"))
    assert planned == {"tracking_config": 1, "command": 1, "track": 1, "all": 1}


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


def test_plots_of_every_dataset_are_made_and_kept_in_mlflow(finished: Checkout) -> None:
    kinds = ("acceptance", "accept_length", "latency", "throughput", "ttft")
    names = ["speedup", *(f"{dataset}-{kind}" for dataset in DATASETS for kind in kinds)]
    wanted = {f"{name}.{form}" for name in names for form in ("png", "svg")}
    assert {path.name for path in (finished.results / "plots").iterdir()} == wanted
    ids = json.loads((finished.results / "mlflow.json").read_text())
    client = mlflow.MlflowClient(f"sqlite:///{finished.path / 'results' / 'mlflow.db'}")
    kept = client.list_artifacts(ids["parent"], "plots")
    assert {Path(artifact.path).name for artifact in kept} == wanted


def test_the_report_holds_the_table_and_the_plots_of_each_dataset(
    finished: Checkout, tmp_path: Path
) -> None:
    finished.snakemake("--report", str(tmp_path / "report.html"), *TINY)
    page = (tmp_path / "report.html").read_text()
    found = re.search(r"var categories = (\{.*?\})\s*(?:;|$)", page, re.M)
    assert found is not None
    categories = json.loads(found[1])
    assert set(categories) == {"All datasets", *DATASETS}
    shown = {name: [Path(f).name for f in parts["Other"]] for name, parts in categories.items()}
    assert {"table.html", "table.md", "speedup.svg"} == set(shown["All datasets"])
    for dataset in DATASETS:
        assert len(shown[dataset]) == 5
        assert all(name.startswith(f"{dataset}-") for name in shown[dataset])


def test_the_command_that_made_it_is_kept(finished: Checkout) -> None:
    assert (finished.results / "command.txt").read_text() == "dspark run tiny\n"


SWEEP = "+sweep={engine.concurrency:[1,2],runs.dspark_k3.k:[1,3]}"


def test_a_sweep_plans_each_dataset_at_each_point(finished: Checkout) -> None:
    planned = finished.planned(*tiny(SWEEP))
    assert planned["bench"] == planned["prompts"] == 4 * len(DATASETS)
    assert (planned["table"], planned["plots"], planned["track"]) == (1, 1, 1)
    assert "prepare" not in planned
    assert finished.planned(*TINY) == {}  # the experiment itself has not moved


def test_a_sweep_ends_in_one_table(fresh: Checkout, finished: Checkout) -> None:
    shutil.rmtree(fresh.path)
    shutil.copytree(finished.path, fresh.path)
    small = ["~datasets.mt_bench", "~runs.dspark_k7", "datasets.gsm8k.limit=2"]
    arguments = tiny("+sweep={engine.concurrency:[1,2]}", *small)
    fresh.snakemake(*arguments)
    assert fresh.planned(*arguments) == {}
    lines = (fresh.results / "table.md").read_text().splitlines()
    assert [line.split(" | ")[:3] for line in lines[:1] + lines[2:6]] == [
        ["| engine.concurrency", "Dataset", "Run"],
        ["| 1", "gsm8k", "baseline"],
        ["| 1", "gsm8k", "dspark_k3"],
        ["| 2", "gsm8k", "baseline"],
        ["| 2", "gsm8k", "dspark_k3"],
    ]
    for concurrency in (1, 2):
        point = fresh.results / f"engine.concurrency={concurrency}" / "gsm8k"
        job = from_yaml(JobConfig, point / "config.yaml")
        assert job.engine.concurrency == concurrency
        summary = json.loads((point / "dspark_k3" / "summary.json").read_text())
        assert (summary["concurrency"], summary["requests"]) == (concurrency, 2)
    assert (fresh.results / "plots" / "concurrency.svg").is_file()


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


def test_a_table_from_shards_is_that_of_the_whole(fresh: Checkout, finished: Checkout) -> None:
    shutil.rmtree(fresh.path)
    shutil.copytree(finished.path, fresh.path)
    cut = tiny("datasets.gsm8k.shards=3")
    fresh.snakemake("results/tiny/table.md", *cut)
    assert fresh.planned("results/tiny/table.md", *cut) == {}
    assert sorted(path.name for path in (fresh.results / "gsm8k" / "shards").iterdir()) == [
        "1-of-3",
        "2-of-3",
        "3-of-3",
    ]
    text = (fresh.results / "table.md").read_text()
    assert "output tok/s a device: mean of 3 shards" in text
    one, other = (
        parse_table((checkout.results / "table.md").read_text()) for checkout in (finished, fresh)
    )
    for first, second in zip(one, other, strict=True):
        assert (first.dataset, first.run, first.requests) == (
            second.dataset,
            second.run,
            second.requests,
        )
        assert (first.accept_rate, first.accept_p, first.accept_len) == (
            second.accept_rate,
            second.accept_p,
            second.accept_len,
        )
    before, after = (
        read_records(checkout.results / "gsm8k" / "requests.parquet")
        for checkout in (finished, fresh)
    )
    for name in ("run", "request_id", "output_token_ids", "step_verified", "step_accepted"):
        assert [getattr(r, name) for r in before] == [getattr(r, name) for r in after], name
    assert [r.shard for r in after[:6]] == [1, 2, 3, 1, 2, 3]
    back = fresh.planned(*TINY)
    assert (back["bench"], back.get("merge")) == (1, None)


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
        (tiny("datasets.gsm8k.shards=7"), "datasets.gsm8k.shards is 7 and its limit 6"),
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
