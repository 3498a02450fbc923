"""The real DAG on a real SLURM of this one machine: jobs, resources, failures, and an interrupt."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml
from checkout import DATASETS, ROOT, RUNS, Checkout, copy_checkout

from dspark.config import asked_resources, compose_experiment
from dspark.report.table import TableRow, parse_table

ONE_NODE = ROOT / "tests" / "slurm" / "one_node.sh"
SYSTEM_CONF = Path("/etc/slurm/slurm.conf")
DOCS = (ROOT / "docs" / "slurm.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", DOCS, re.M | re.S)
COMMANDS = [line for kind, text in BLOCKS if not kind for line in text.splitlines()]

SNAKEMAKE = [sys.executable, "-m", "snakemake"]
WITH_PROFILE = ["--workflow-profile", "profiles/slurm"]
PROFILE = yaml.safe_load((ROOT / "profiles" / "slurm" / "profile.yaml").read_text())
QUICK = ["--slurm-init-seconds-before-status-checks", "1"]  # by default it looks after 40
OUTPUT = "snakemake.txt"
PATIENCE = 400.0  # seconds; a loaded machine is slow
# A test runs outside any allocation of a cluster that this machine may belong to.
ENVIRONMENT = {name: v for name, v in os.environ.items() if not name.startswith("SLURM_")}

# engine.device is auto, so that jobs ask for a GPU: SLURM counts two, and there is none.
EXPERIMENT = """\
# @package _global_
defaults: [tiny, _self_]
datasets:
  gsm8k:
    resources: {slurm_account: lab, gpu: 0, gres: "gpu:h200:1"}
  mt_bench:
    resources:
      {slurm_partition: h200, constraint: h200, runtime: 7, mem_mb: 2000, slurm_extra: --nice=5}
engine: {device: auto, threads: 1}
"""
TABLE = ("results/cluster/table.md", "--config", "experiment=cluster")


@dataclass
class Job:
    """A line of squeue."""

    id: str
    comment: str  # names rule and wildcards


@dataclass
class Run:
    """Snakemake at work, or done, with all it prints in a file."""

    checkout: Checkout
    process: subprocess.Popen[bytes]

    @property
    def output(self) -> str:
        return (self.checkout.path / OUTPUT).read_text()

    def environment(self, dataset: str) -> dict[str, str]:
        path = self.checkout.path / "results" / "cluster" / dataset / "environment.json"
        facts: dict[str, str] = json.loads(path.read_text())
        return facts


def jobs(*filters: str) -> list[Job]:
    command = ["squeue", "--noheader", "--format=%i %k", *filters]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    return [Job(*line.split(maxsplit=1)) for line in done.stdout.splitlines()]


def running(dataset: str) -> str | None:
    """Id of the dataset's running job, if there is one."""
    found = [job.id for job in jobs("--states=RUNNING") if dataset in job.comment]
    return found[0] if found else None


def asked(job: str) -> dict[str, str]:
    """What the controller knows of a job, by the names of scontrol."""
    command = ["scontrol", "--oneliner", "show", "job", job]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=ENVIRONMENT)
    return dict(item.split("=", 1) for item in done.stdout.split() if "=" in item)


@contextmanager
def started(checkout: Checkout, *arguments: str) -> Iterator[Run]:
    """Snakemake with the SLURM profile, as a user would start it."""
    command = [*SNAKEMAKE, *WITH_PROFILE, *QUICK, *arguments]
    with (checkout.path / OUTPUT).open("wb") as output:
        process = subprocess.Popen(
            command, cwd=checkout.path, stdout=output, stderr=output, env=ENVIRONMENT
        )
    try:
        yield Run(checkout, process)
    finally:
        process.kill()
        process.wait()


def wait_for(look: Callable[[], str | None], run: Run) -> str:
    """What `look` finds in the end, while Snakemake runs."""
    deadline = time.monotonic() + PATIENCE
    while not (found := look()):
        assert run.process.poll() is None and time.monotonic() < deadline, run.output
        time.sleep(0.1)
    return found


@pytest.fixture(scope="module")
def startable() -> None:
    done = subprocess.run([ONE_NODE, "check"], capture_output=True, text=True, env=ENVIRONMENT)
    if done.returncode != 0:
        pytest.skip(done.stderr.strip())


@pytest.fixture(scope="module")
def cluster(startable: None) -> Iterator[None]:
    subprocess.run([ONE_NODE, "down"], check=True, env=ENVIRONMENT)  # what a killed test left
    subprocess.run([ONE_NODE, "up"], check=True, env=ENVIRONMENT)
    yield
    subprocess.run([ONE_NODE, "down"], check=True, env=ENVIRONMENT)
    assert not SYSTEM_CONF.is_symlink()


def prepared(path: Path, tiny_pair: Path) -> Checkout:
    """A checkout with the experiment `cluster`, in which nothing has run."""
    checkout = copy_checkout(path / "dspark", tiny_pair)
    (checkout.path / "config" / "experiment" / "cluster.yaml").write_text(EXPERIMENT)
    return checkout


@pytest.fixture(scope="module")
def local(tmp_path_factory: pytest.TempPathFactory, tiny_pair: Path) -> Checkout:
    """The experiment, run to its table on this machine alone."""
    checkout = prepared(tmp_path_factory.mktemp("local"), tiny_pair)
    checkout.snakemake(*TABLE)
    return checkout


@pytest.fixture(scope="module")
def measured(
    cluster: None, tmp_path_factory: pytest.TempPathFactory, tiny_pair: Path
) -> Iterator[Run]:
    """The experiment, run to its table on the cluster."""
    with started(prepared(tmp_path_factory.mktemp("slurm"), tiny_pair), *TABLE) as run:
        assert run.process.wait(PATIENCE) == 0, run.output
        yield run


@dataclass
class Interrupted:
    """A run on the cluster in which a job was cancelled, another one failed, and Ctrl-C ended all."""

    run: Run
    cancelled: str  # the first job of mt_bench, by an administrator
    again: str  # its second one, which ran when the interrupt came


@pytest.fixture(scope="module")
def interrupted(
    cluster: None, tmp_path_factory: pytest.TempPathFactory, tiny_pair: Path
) -> Iterator[Interrupted]:
    overrides = [
        "datasets.gsm8k.max_new_tokens=4000",  # which do not fit
        *("datasets.mt_bench.max_new_tokens=200", "datasets.mt_bench.limit=16"),  # for minutes
        *("datasets.mt_bench.history=independent", "engine.concurrency=1"),
        "sampling.ignore_eos=true",
    ]
    checkout = prepared(tmp_path_factory.mktemp("interrupted"), tiny_pair)
    with started(checkout, *TABLE, f"overrides={' '.join(overrides)}") as run:
        cancelled = wait_for(lambda: running("mt_bench"), run)
        subprocess.run(["scancel", cancelled], check=True, env=ENVIRONMENT)
        again = wait_for(lambda: running("mt_bench"), run)
        wait_for(lambda: errors(run.output).get("gsm8k"), run)
        run.process.send_signal(signal.SIGINT)
        run.process.wait(PATIENCE)
        yield Interrupted(run, cancelled, again)


def errors(output: str) -> dict[str, str]:
    """Snakemake's message of each failed job, by dataset."""
    messages = output.split("Error in rule bench:\n    message: SLURM-job")[1:]
    return {re.findall(r"logs/bench/(\w+)", text)[0]: text for text in messages}


def test_another_clusters_configuration_is_not_touched(startable: None) -> None:
    SYSTEM_CONF.parent.mkdir(exist_ok=True)
    with SYSTEM_CONF.open("x") as conf:
        conf.write("ClusterName=real\n")
    try:
        done = subprocess.run([ONE_NODE, "up"], capture_output=True, text=True, env=ENVIRONMENT)
        left = SYSTEM_CONF.read_text()
    finally:
        SYSTEM_CONF.unlink()
    assert done.returncode == 1
    assert f"{SYSTEM_CONF} belongs to another cluster" in done.stderr
    assert left == "ClusterName=real\n"


def counts(checkout: Checkout) -> list[tuple[object, ...]]:
    """All of the table that is no time, and the tokens behind it."""
    results = checkout.path / "results" / "cluster"
    rows: list[TableRow] = parse_table((results / "table.md").read_text())
    names = ("prompt_tokens", "output_tokens", "steps", "drafted", "verified", "accepted")
    found: list[tuple[object, ...]] = []
    for row in rows:
        cell = json.loads((results / row.dataset / row.run / "summary.json").read_text())
        printed = (row.dataset, row.run, row.requests, row.accept_rate, row.accept_p)
        found.append((*printed, row.accept_len, *(cell[name] for name in names)))
    return found


def test_the_table_is_that_of_a_local_run_in_all_counts(measured: Run, local: Checkout) -> None:
    assert counts(measured.checkout) == counts(local)
    assert [row[:3] for row in counts(local)] == [(d, run, 6) for d in DATASETS for run in RUNS]


def test_each_dataset_ran_in_a_job_with_a_gpu_of_its_own(measured: Run) -> None:
    facts = {dataset: measured.environment(dataset) for dataset in DATASETS}
    for dataset, fact in facts.items():
        job = asked(fact["slurm_job_id"])
        assert dataset in job["Comment"] and job["JobState"] == "COMPLETED"
        assert job["NodeList"] == fact["node"]
    assert {fact["cuda_visible_devices"] for fact in facts.values()} == {"0", "1"}


def test_a_dataset_gets_what_it_asks_for_and_else_what_the_profile_says(measured: Run) -> None:
    default = PROFILE["default-resources"]
    plain, special = (
        asked(measured.environment(name)["slurm_job_id"]) for name in ("gsm8k", "mt_bench")
    )
    assert (plain["Partition"], special["Partition"]) == (default["slurm_partition"], "h200")
    assert (plain["Features"], special["Features"]) == ("(null)", "h200")
    assert (plain["Account"], special["Account"]) == ("lab", "(null)")
    assert (plain["Nice"], special["Nice"]) == ("0", "5")
    assert (plain["TresPerNode"], special["TresPerJob"]) == ("gres:gpu:h200:1", "gres:gpu:1")
    assert (plain["MinMemoryNode"], special["MinMemoryNode"]) == (f"{default['mem_mb']}M", "2000M")
    assert plain["CPUs/Task"] == special["CPUs/Task"] == str(PROFILE["set-threads"]["bench"])
    assert (minutes(plain), minutes(special)) == (default["runtime"], 7)


def minutes(job: dict[str, str]) -> int:
    hours, minute, _ = job["TimeLimit"].split(":")
    return 60 * int(hours) + int(minute)


def test_only_measuring_is_submitted(measured: Run) -> None:
    assert set(re.findall(r"^rule (\w+):", measured.output, re.M)) == {"bench"}
    here = set(re.findall(r"^localrule (\w+):", measured.output, re.M))
    assert {"prepare", "prompts", "summarise", "table"} <= here


def test_asking_for_other_resources_runs_nothing_again(measured: Run) -> None:
    others = ["gsm8k.resources.slurm_partition=h200", "mt_bench.resources.runtime=99"]
    overrides = " ".join(f"datasets.{other}" for other in others)
    assert measured.checkout.planned(*TABLE, f"overrides={overrides}") == {}


def test_a_cancelled_job_is_submitted_again(interrupted: Interrupted) -> None:
    assert asked(interrupted.cancelled)["JobState"] == "CANCELLED"
    assert interrupted.again != interrupted.cancelled
    assert f"'{interrupted.cancelled}' failed" in interrupted.run.output


def test_the_error_names_the_failed_jobs_logs_and_shows_them(interrupted: Interrupted) -> None:
    error = errors(interrupted.run.output)["gsm8k"]
    ours, slurms = re.findall(r"^    log: (.*) \(check log", error, re.M)[0].split(", ")
    job = re.findall(r"^ '(\d+)' failed", error)[0]
    assert ours.startswith("results/cluster/logs/bench/gsm8k")
    assert re.search(rf"results/logs/slurm/rule_bench/.*/{job}\.log$", slurms)
    assert "do not fit the target's context" in error.split("Logfile ")[1]


def test_an_interrupt_cancels_the_jobs_on_the_cluster(interrupted: Interrupted) -> None:
    assert interrupted.run.process.returncode != 0
    assert asked(interrupted.again)["JobState"] == "CANCELLED"
    assert jobs("--states=PENDING,RUNNING") == []


def test_a_training_is_submitted_too(fresh: Checkout) -> None:
    arguments = ["--dry-run", "--config", "experiment=demo", "overrides=drafter=trained"]
    text = run_here([*SNAKEMAKE, *WITH_PROFILE, *arguments], fresh)
    runtime = PROFILE["default-resources"]["runtime"]
    for rule in ("synthesise", "cache_states", "fit", "calibrate"):
        found = re.search(rf"^rule {rule}:\n(?:    .*\n)*?    resources: (.*)", text, re.M)
        assert found is not None and "gpu=1" in found[1]
        longer = PROFILE["set-resources"].get(rule, {})
        assert f"runtime={longer.get('runtime', runtime)}" in found[1]


def run_here(command: list[str], checkout: Checkout) -> str:
    done = subprocess.run(
        command, cwd=checkout.path, capture_output=True, text=True, env=ENVIRONMENT
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout + done.stderr


@pytest.mark.parametrize("command", COMMANDS)
def test_a_shown_command_works(cluster: None, fresh: Checkout, command: str) -> None:
    """Dry where it would measure, as the models are not here."""
    program, *arguments = shlex.split(command)
    if program == "sbatch":
        run_here([program, "--test-only", *arguments], fresh)
    elif program in ("squeue", "sinfo"):
        run_here([program, *arguments], fresh)
    elif arguments == ["--unlock"]:
        assert "Unlocked" in run_here([*SNAKEMAKE, *arguments], fresh)
    else:
        line = {"snakemake": SNAKEMAKE, "dspark": [sys.executable, "-m", "dspark.cli"]}[program]
        assert "rule bench" in run_here([*line, *arguments, "--dry-run"], fresh)


def test_the_shown_experiment_composes(fresh: Checkout) -> None:
    (shown,) = (text for kind, text in BLOCKS if kind == "yaml")
    (fresh.path / "config" / "experiment" / "mine.yaml").write_text(shown)
    config = compose_experiment("mine", (), fresh.path / "config")
    assert asked_resources(config.datasets["ultrachat"]) == {"runtime": 720, "mem_mb": 64000}
    assert asked_resources(config.datasets["gsm8k"]) == {}
