"""How far an experiment is, read off whatever lies in its folder."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from dspark import stages
from dspark.config import (
    ExperimentConfig,
    compose_experiment,
    compose_points,
    digest,
    job_config,
    models_config,
    to_yaml,
    training_name,
)
from dspark.data.prompts import Prompt, write_prompts
from dspark.decode.journal import append_record, open_journal
from dspark.decode.records import RequestRecord
from dspark.locks import sole_use
from dspark.metrics.records_io import write_records
from dspark.stages import shard_folder
from dspark.status import TRAINED_BY, experiment_status, render_status
from tiny_models import save_tiny_drafter, save_tiny_target

CONFIG = Path(__file__).parents[1] / "config"
PROMPTS = [Prompt(f"p{index}", ["one", "two"][: 1 + index % 2]) for index in range(4)]
COMMAND = ["dspark", "run", "small"]
RUNS = ["baseline", "dspark_k3"]


@pytest.fixture
def config(tmp_path: Path) -> Path:
    """The project's configs with an experiment `small`: two datasets, two runs."""
    for path in CONFIG.rglob("*.yaml"):
        copy = tmp_path / "config" / path.relative_to(CONFIG)
        copy.parent.mkdir(parents=True, exist_ok=True)
        copy.write_text(path.read_text())
    (tmp_path / "config" / "experiment" / "small.yaml").write_text(
        "# @package _global_\n"
        "defaults:\n"
        "  - /dataset@datasets.gsm8k: gsm8k\n"
        "  - /dataset@datasets.mt_bench: mt_bench\n"
        "  - /run@runs.baseline: baseline\n"
        "  - /run@runs.dspark_k3: dspark_k3\n"
        "  - _self_\n"
    )
    return tmp_path / "config"


@pytest.fixture
def told(config: Path) -> Callable[..., list[str]]:
    """The status of `small` with some overrides, as lines without doubled blanks."""

    def tell(*overrides: str) -> list[str]:
        points = compose_points("small", overrides, config)
        status = experiment_status(points, config.parent / "results")
        text = render_status(status, [*COMMAND, *overrides])
        return [re.sub(" {2,}", "  ", line) for line in text.splitlines()]

    return tell


def record(run: str, prompt: str, turn: int = 0) -> RequestRecord:
    return RequestRecord(prompt, turn, "gsm8k", run, 0, 3, 1, [7], "length", 0.0, 0.5, 0.5)


def all_records(prompts: Sequence[Prompt] = PROMPTS) -> list[RequestRecord]:
    return [record(r, p.id, turn) for r in RUNS for p in prompts for turn in range(len(p.turns))]


def start(folder: Path, experiment: ExperimentConfig, dataset: str = "gsm8k") -> None:
    """What the rules leave before the job runs."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(to_yaml(job_config(experiment, dataset)))
    write_prompts(folder / "prompts.jsonl", PROMPTS)


def finish(folder: Path, experiment: ExperimentConfig, records: list[RequestRecord]) -> None:
    """What the job leaves."""
    folder.mkdir(parents=True, exist_ok=True)
    digests = {"config_digest": digest(job_config(experiment, "gsm8k"))}
    (folder / "environment.json").write_text(json.dumps(digests))
    write_records(folder / "requests.parquet", records)


def journal(folder: Path, name: str, records: list[RequestRecord], at: int = 0) -> Path:
    """A journal that was written to `at` seconds from now."""
    path = folder / f"journal-{name}.jsonl"
    with open_journal(path) as handle:
        for entry in records:
            append_record(handle, entry)
    later(path, at)
    return path


def later(path: Path, seconds: int) -> None:
    now = path.stat().st_mtime
    os.utime(path, (now + seconds, now + seconds))


def test_where_nothing_has_run_all_is_missing(told: Callable[..., list[str]], config: Path) -> None:
    results = config.parent / "results" / "small"
    assert told("engine.concurrency=2") == [
        f"{results}: target smollm2_135m, drafter smollm2_135m; not prepared",
        "dataset  baseline  dspark_k3  state",
        "gsm8k  0/?  0/?  not begun",
        "mt_bench  0/?  0/?  not begun",
        "table.md: not made yet",
        "mlflow.json: not made yet",
        "next: dspark run small engine.concurrency=2",
    ]
    assert not results.exists()


def test_a_stopped_job_is_told_by_its_journal(told: Callable[..., list[str]], config: Path) -> None:
    folder = config.parent / "results" / "small" / "gsm8k"
    start(folder, compose_experiment("small", (), config))
    written = journal(folder, "new", [record("baseline", "p0"), record("baseline", "p1", 1)])
    journal(folder, "old", all_records(), at=-60)  # of other settings
    with written.open("ab") as handle:  # what kills and failing machines leave
        handle.write(
            b'not json\n[1]\n{"run": "baseline"}\n{"run": "dspark_k3", "prompt_id": "p0", "tu'
        )
    assert "gsm8k  2/6  0/6  stopped" in told()
    assert told()[-1] == "next: dspark run small  (keeps 2 finished requests)"


def test_a_running_job_is_told_by_its_lock(told: Callable[..., list[str]], config: Path) -> None:
    folder = config.parent / "results" / "small" / "gsm8k"
    start(folder, compose_experiment("small", (), config))
    with sole_use(folder):
        (line,) = [line for line in told() if line.startswith("gsm8k")]
        assert line.startswith(f"gsm8k  0/6  0/6  running (process {os.getpid()} on ")
        assert told()[-1].startswith("next: wait for gsm8k; what it says lies in ")
        with pytest.raises(Exception, match="is being filled by"), sole_use(folder):
            pass  # to look has not taken the lock away
    assert "gsm8k  0/6  0/6  not begun" in told()


@pytest.mark.parametrize(("experiment", "waits"), [("small", True), ("smaller", False)])
def test_a_workflow_between_two_jobs_is_told_by_its_lock(
    told: Callable[..., list[str]], config: Path, experiment: str, waits: bool
) -> None:
    lock = config.parent / ".snakemake" / "locks" / "0.output.lock"
    lock.parent.mkdir(parents=True)
    lock.write_text(f"results/training/x\nresults/{experiment}/gsm8k/requests.parquet\n")
    assert ("snakemake --unlock" in told()[-1]) is waits


def test_what_was_measured_with_other_settings_does_not_count(
    told: Callable[..., list[str]], config: Path
) -> None:
    results = config.parent / "results" / "small"
    plain = compose_experiment("small", (), config)
    start(results / "gsm8k", plain)
    finish(results / "gsm8k", plain, all_records())
    start(results / "mt_bench", plain, "mt_bench")
    journal(results / "mt_bench", "a", [record("baseline", "p0")])
    assert "gsm8k  6/6  6/6  measured, not summarised" in told()
    assert "mt_bench  1/6  0/6  stopped" in told()
    other = told("engine.concurrency=2")
    assert "gsm8k  0/?  0/?  of other settings, runs again" in other
    assert "mt_bench  0/?  0/?  of other settings, runs again" in other


def test_records_count_unless_a_journal_is_newer(
    told: Callable[..., list[str]], config: Path
) -> None:
    folder, plain = (
        config.parent / "results" / "small" / "gsm8k",
        compose_experiment("small", (), config),
    )
    start(folder, plain)
    written = journal(folder, "a", [record("baseline", "p0")], at=-60)
    finish(folder, plain, all_records())  # and killed before the journal was removed
    assert "gsm8k  6/6  6/6  measured, not summarised" in told()
    later(written, 120)
    assert "gsm8k  1/6  0/6  stopped" in told()


@pytest.mark.parametrize("damage", [b"", b"PAR1 and nothing else"])
def test_damaged_records_are_told(
    told: Callable[..., list[str]], config: Path, damage: bytes
) -> None:
    folder = config.parent / "results" / "small" / "gsm8k"
    start(folder, compose_experiment("small", (), config))
    (folder / "requests.parquet").write_bytes(damage)
    (folder / "prompts.jsonl").write_text('{"id": "p')
    assert "gsm8k  0/?  0/?  damaged, runs again" in told()


def test_shards_are_counted_each_and_together(told: Callable[..., list[str]], config: Path) -> None:
    folder = config.parent / "results" / "small" / "gsm8k"
    cut = compose_experiment("small", ["datasets.gsm8k.shards=2"], config)
    start(folder, cut)
    first, second = (shard_folder(folder, shard, 2) for shard in (1, 2))
    finish(first, cut, all_records(PROMPTS[::2]))
    second.mkdir()
    journal(second, "a", [record("baseline", "p1"), record("baseline", "p1", 1)])
    with sole_use(second):
        lines = told("datasets.gsm8k.shards=2")
    assert lines[2:5] == [
        "gsm8k  4/6  2/6  running, 1 of 2 shards measured",
        "  1-of-2  2/2  2/2  measured",
        lines[4],
    ]
    assert lines[4].startswith("  2-of-2  2/4  0/4  running (process ")


def test_each_point_of_a_sweep_is_told(told: Callable[..., list[str]], config: Path) -> None:
    sweep = "+sweep={engine.concurrency:[1,2]}"
    at_point = compose_points("small", [sweep], config)["engine.concurrency=2"]
    folder = config.parent / "results" / "small" / "engine.concurrency=2" / "gsm8k"
    start(folder, at_point)
    journal(folder, "a", [record("baseline", "p0")])
    lines = told(sweep)
    assert "engine.concurrency=1/gsm8k  0/?  0/?  not begun" in lines
    assert "engine.concurrency=2/gsm8k  1/6  0/6  stopped" in lines
    assert lines[-1] == f"next: dspark run small '{sweep}'  (keeps 1 finished requests)"


def test_a_drafter_that_is_trained_here_is_told_by_its_stages(
    told: Callable[..., list[str]], config: Path
) -> None:
    trained = compose_experiment("small", ["drafter=trained"], config)
    training = config.parent / "results" / "training" / training_name(models_config(trained))
    *early, last = TRAINED_BY.values()
    for name in early:
        (training / name).parent.mkdir(parents=True, exist_ok=True)
        (training / name).touch()
    assert told("drafter=trained")[0].endswith(f"'{training}' lacks calibrate")
    (training / last).parent.mkdir()
    (training / last).touch()
    assert told("drafter=trained")[0].endswith("drafter trained; not prepared")


def test_from_stage_to_stage_it_follows_what_the_stages_write(
    told: Callable[..., list[str]], config: Path
) -> None:
    """The real stages on a tiny target: what they write is what the status reads."""
    root = config.parent
    save_tiny_target(root / "models" / "target", layers=3)
    save_tiny_drafter(root / "models" / "drafter", root / "models" / "target")
    tiny = [
        *("engine.device=cpu", "engine.threads=1", "engine.warmup=1", "~datasets.mt_bench"),
        *("target.name=tiny", "target.source=local", f"target.path={root}/models/target"),
        *("drafter.name=tiny", "drafter.source=local", f"drafter.path={root}/models/drafter"),
        *("datasets.gsm8k.source=builtin", "datasets.gsm8k.limit=2", "datasets.gsm8k.chat=true"),
        "datasets.gsm8k.max_new_tokens=4",
    ]
    experiment = compose_experiment("small", tiny, config)
    results = root / "results" / "small"
    folder, models = results / "gsm8k", results / "models"
    for path, part in [
        (folder, job_config(experiment, "gsm8k")),
        (models, models_config(experiment)),
    ]:
        path.mkdir(parents=True)
        (path / "config.yaml").write_text(to_yaml(part))
    stages.prepare(models / "config.yaml", root / "results" / "models", models)
    stages.prompts(folder / "config.yaml", folder / "prompts.jsonl")
    lines = told(*tiny)
    assert lines[0].endswith("target tiny, drafter tiny; prepared")
    assert "gsm8k  0/2  0/2  not begun" in lines
    profiles = root / "results" / "profiles"
    stages.bench(folder / "config.yaml", folder / "prompts.jsonl", models, folder, profiles)
    assert "gsm8k  2/2  2/2  measured, not summarised" in told(*tiny)
    stages.summarise(folder, models)
    assert "gsm8k  2/2  2/2  done" in told(*tiny)
    stages.table(stages.summaries_in(results), results / "table.md")
    lines = told(*tiny)
    assert "table.md: made" in lines and "mlflow.json: not made yet" in lines
    assert lines[-1].startswith("next: dspark run small ")
    (results / "mlflow.json").write_text("{}")
    assert told(*tiny)[-1] == f"next: nothing, read {results / 'table.md'}"
    later(folder / "baseline" / "summary.json", 60)
    assert "table.md: not made yet" in told(*tiny)
