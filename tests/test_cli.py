"""The command line: help, and every failure as one line with a non-zero exit."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from dspark.cli import cli

ROOT = Path(__file__).parents[1]


def dspark(*args: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "dspark.cli", *args]
    return subprocess.run(command, cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize("verb", [[], *([name] for name in sorted(cli.commands))])
def test_every_verb_has_help(verb: list[str]) -> None:
    done = CliRunner().invoke(cli, [*verb, "--help"])
    assert done.exit_code == 0
    assert "Usage:" in done.output


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["benhc"], "no command 'benhc': did you mean 'bench'?"),
        (["config", "demmo"], "did you mean 'demo'?"),
        (["run", "demmo"], "did you mean 'demo'?"),
        (["table", "nowhere.json", "--out", "t.md"], "nowhere.json"),
        (["prompts", "--config", "nowhere.yaml", "--out", "p.jsonl"], "does not exist"),
        (["track", "nowhere"], "nowhere"),
        (["train", "--out", "x", "promts=3"], "did you mean 'prompts'?"),
    ],
)
def test_a_failure_is_one_line(args: list[str], said: str) -> None:
    done = dspark(*args)
    assert done.returncode != 0
    assert said in done.stderr
    assert "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


def test_outside_the_checkout_it_says_where_to_run(tmp_path: Path) -> None:
    done = dspark("config", "demo", cwd=tmp_path)
    assert done.returncode != 0
    assert "run from the top of the checkout" in done.stderr


def test_quick_verbs_do_not_load_torch() -> None:
    code = "import sys, dspark.cli; print('torch' in sys.modules, 'mlflow' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.split() == ["False", "False"]
