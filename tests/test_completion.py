"""What a shell completes, and that the command line is quick enough to be asked at every Tab."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
from click.shell_completion import ShellComplete

from dspark.cli import cli
from dspark.completion import CHECKPOINT_FORMATS, STAGES, TABLE_FORMATS
from dspark.models import checkpoint
from dspark.report import export
from dspark.train import chain

ROOT = Path(__file__).parents[1]
EXPERIMENTS = sorted(path.stem for path in (ROOT / "config" / "experiment").glob("*.yaml"))
BEFORE = ["run", "config", "status"]  # an experiment's name
HEAVY = {"torch", "hydra", "omegaconf", "mlflow", "transformers", "pyarrow", "numpy", "snakemake"}


def completed(line: str) -> list[str]:
    """What is offered for the last word of a line; a blank at its end begins a new one."""
    words = line.split(" ")
    shell = ShellComplete(cli, {}, "dspark", "_DSPARK_COMPLETE")
    return [item.value for item in shell.get_completions(words[1:-1], words[-1])]


@pytest.fixture(autouse=True)
def in_the_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)


@pytest.mark.parametrize("verb", BEFORE)
def test_experiments_are_completed(verb: str) -> None:
    assert completed(f"dspark {verb} ") == EXPERIMENTS
    assert completed(f"dspark {verb} publ") == ["published"]


def test_datasets_are_completed_from_the_experiment_before() -> None:
    assert completed("dspark config schedule --dataset ") == ["gsm8k", "mt_bench"]
    assert completed("dspark config demo --dataset m") == ["math500", "mbpp", "mt_bench"]


def test_overrides_are_completed_down_to_their_fields() -> None:
    assert completed("dspark run demo engine.conc") == ["engine.concurrency="]
    assert completed("dspark run demo datasets.gsm8k.lim") == ["datasets.gsm8k.limit="]
    assert completed("dspark run schedule datasets.humaneval.") == []
    assert completed("dspark status demo sampling.t") == [
        "sampling.temperature=",
        "sampling.top_p=",
        "sampling.top_k=",
    ]
    assert completed("dspark train drafter.train.shape.l") == ["drafter.train.shape.layers="]


def test_stages_are_those_of_a_training() -> None:
    assert STAGES == chain.STAGES
    assert completed("dspark train --stage ca") == ["cache", "calibrate"]


def test_formats_are_those_that_can_be_written() -> None:
    assert tuple(export.FORMS) == TABLE_FORMATS
    assert completed("dspark table --format m") == ["markdown", "model-card"]
    assert checkpoint.FORMATS == CHECKPOINT_FORMATS
    assert completed("dspark convert --to ") == list(CHECKPOINT_FORMATS)


def test_profiles_are_those_of_the_checkout() -> None:
    assert completed("dspark run demo --profile profiles/s") == ["profiles/slurm"]
    assert completed("dspark run demo --profile ") == ["profiles/default", "profiles/slurm"]


def test_verbs_and_options_are_completed() -> None:
    assert completed("dspark dent") == []
    assert completed("dspark doc") == ["doctor"]
    assert completed("dspark run demo --pro") == ["--profile"]
    assert "bench" in completed("dspark benhc ")  # no such verb: those that there are


@pytest.mark.parametrize("line", ["dspark run demmo eng", "dspark config demmo --dataset "])
def test_what_is_wrong_completes_to_nothing(line: str) -> None:
    assert completed(line) == []


def test_outside_a_checkout_nothing_is_completed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert completed("dspark run ") == completed("dspark run demo eng") == []


def test_bash_is_given_a_function_that_completes() -> None:
    script = (
        'eval "$(_DSPARK_COMPLETE=bash_source dspark)"\n'
        "COMP_WORDS=(dspark run publ) COMP_CWORD=2\n"
        "_dspark_completion dspark\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-c", script],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env={**os.environ, "PATH": path},
    )
    assert (done.stdout, done.stderr) == ("published\n", "")


def loaded_by(*args: str) -> set[str]:
    """The heavy packages that a command loads."""
    code = (
        "import sys\nfrom dspark.cli import cli\n"
        f"cli.main({list(args)!r}, standalone_mode=False)\n"
        f"print(*{HEAVY!r} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def test_help_loads_nothing_heavy_and_takes_less_than_a_second() -> None:
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert loaded_by("--help") == set()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime < 1.0  # s of CPU


def test_the_status_does_not_load_torch() -> None:
    assert loaded_by("status", "demo") & {"torch", "transformers", "mlflow"} == set()
