"""The real DAG with a drafter that it trains: what it makes, what runs again, and a killed training."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path

import mlflow
import psutil
import pytest
from checkout import LEARNED_RUNS, STEPS, Checkout, trained

from dspark.report.table import parse_table
from dspark.train.curve import read_curve

TRAIN_RULES = {"training_config", "synthesise", "cache_states", "fit", "calibrate"}


def test_trained_drafter_is_measured(learned: Checkout) -> None:
    rows = parse_table((learned.learned / "table.md").read_text())
    assert [(row.dataset, row.run) for row in rows] == [("gsm8k", run) for run in LEARNED_RUNS]
    assert (learned.learned / "table.md").read_text().count("identical to baseline") == 3
    prepared = json.loads((learned.learned / "models" / "drafter.json").read_text())
    assert prepared["source"] == "train"
    assert Path(prepared["path"]) == learned.training / "drafter"
    assert {"config.json", "model.safetensors", "calibration.json"} <= set(prepared["files"])
    steps = [line["step"] for line in read_curve(learned.training / "curve.jsonl") if "ce" in line]
    assert steps == list(range(1, STEPS + 1))


def test_finished_training_plans_nothing(learned: Checkout) -> None:
    assert learned.planned(*trained("learned")) == {}


def test_experiments_with_the_same_settings_share_a_training(learned: Checkout) -> None:
    planned = learned.planned(*trained("tiny", "runs.dspark_k7.k=4"))
    assert planned["prepare"] == 1 and planned["bench"] == 2
    assert not TRAIN_RULES & set(planned)


def test_other_training_settings_train_elsewhere(learned: Checkout) -> None:
    arguments = trained("learned", "drafter.train.lr=1e-3")
    planned = learned.planned(*arguments)
    assert TRAIN_RULES | {"prepare", "bench", "track"} <= set(planned)
    done = learned.snakemake("--dry-run", *arguments)
    folders = set(re.findall(r"results/training/(trained-\w+)/", done.stdout + done.stderr))
    assert len(folders) == 1 and learned.training.name not in folders


@pytest.mark.parametrize(
    "override", ["datasets.gsm8k.limit=3", "engine.concurrency=2", "runs.dspark_k3.k=2"]
)
def test_measuring_otherwise_does_not_train_again(learned: Checkout, override: str) -> None:
    planned = learned.planned(*trained("learned", override))
    assert planned["bench"] == 1
    assert not {*TRAIN_RULES, "prepare"} & set(planned)


def test_other_engine_code_does_not_train_again(learned: Checkout) -> None:
    source = learned.path / "src" / "dspark" / "decode" / "verify.py"
    before = source.read_text()
    source.write_text(before + "\n# changed\n")
    try:
        planned = learned.planned(*trained("learned"))
    finally:
        source.write_text(before)
    assert planned["bench"] == 1
    assert not {*TRAIN_RULES, "prepare"} & set(planned)


def test_other_prompts_of_ones_own_train_again(learned: Checkout) -> None:
    own = learned.path / "own.jsonl"
    before = own.read_text()
    own.write_text(before.replace("like best", "like least"))
    try:
        planned = learned.planned(*trained("learned"))
    finally:
        own.write_text(before)
    assert TRAIN_RULES - {"training_config"} <= set(planned)


def test_a_stage_that_ran_anew_is_followed_by_the_next(learned: Checkout) -> None:
    """Also when the run that did it ended before the next stage: its result says so, not its time."""
    done = learned.training / "fit.done"
    before = done.read_text()
    done.write_text("another drafter\n")
    try:
        planned = learned.planned(*trained("learned"))
    finally:
        done.write_text(before)
    assert "calibrate" in planned and "fit" not in planned
    assert learned.planned(*trained("learned")) == {}  # the same result, though newer


def test_the_curve_is_in_mlflow(learned: Checkout) -> None:
    ids = json.loads((learned.learned / "mlflow.json").read_text())
    client = mlflow.MlflowClient(f"sqlite:///{learned.path / 'results' / 'mlflow.db'}")
    run = client.get_run(ids["training"])
    assert run.info.run_name == "train/trained"
    assert run.info.experiment_id == ids["experiment_id"]
    assert run.data.params["drafter.train.lr"] == "0.005"
    losses = client.get_metric_history(ids["training"], "loss_ce")
    assert sorted(point.step for point in losses) == list(range(1, STEPS + 1))
    assert {artifact.path for artifact in client.list_artifacts(ids["training"])} >= {
        "calibration.json",
        "reliability.png",
    }


def test_a_killed_fit_goes_on_to_the_same_drafter(learned: Checkout, fresh: Checkout) -> None:
    shutil.rmtree(fresh.path)
    shutil.copytree(learned.path, fresh.path)
    training = fresh.training
    shutil.rmtree(training / "best")
    shutil.rmtree(training / "drafter")
    shutil.rmtree(fresh.learned)
    for name in ("fit.done", "curve.jsonl", "progress.safetensors", "reliability.png"):
        (training / name).unlink()

    with fresh.start_snakemake(*trained("learned")) as run:
        kill_fit_after_a_validation(run.pid, training)
    assert run.returncode != 0
    assert not (training / "fit.done").exists()
    killed = [line for line in (training / "curve.jsonl").read_text().splitlines() if line]

    fresh.snakemake(*trained("learned"))
    bar = re.search(rf"(\d+)/{STEPS} ", (training / "logs" / "fit.log").read_text())
    assert bar is not None
    resumed = int(bar[1])
    assert 0 < resumed < STEPS
    # A line holds how fast its step was: the same line is the same step, not done again.
    kept = [line for line in killed if json.loads(line)["step"] <= resumed]
    assert (training / "curve.jsonl").read_text().splitlines()[: len(kept)] == kept
    for name in ("model.safetensors", "calibration.json"):
        undisturbed = (learned.training / "drafter" / name).read_bytes()
        assert (training / "drafter" / name).read_bytes() == undisturbed
    rows = parse_table((fresh.learned / "table.md").read_text())
    assert [row.run for row in rows] == LEARNED_RUNS
    assert fresh.planned(*trained("learned")) == {}


def kill_fit_after_a_validation(pid: int, training: Path) -> None:
    """kill -9 the fit job that runs under process `pid`, as soon as it has something to resume."""
    snakemake, deadline = psutil.Process(pid), time.monotonic() + 600
    while not (training / "progress.safetensors").exists():
        assert snakemake.is_running() and time.monotonic() < deadline
        time.sleep(0.01)
    (job,) = (
        child
        for child in snakemake.children(recursive=True)
        if {"--stage", "fit"} <= set(child.cmdline())
    )
    job.kill()
