"""The commands that the README shows, run as a reader would run them (dry where they take long)."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from checkout import TRAINING, Checkout

from dspark.config import ModelsConfig, from_yaml
from dspark.metrics.identities import check_rows
from dspark.models.checkpoint import read_config
from dspark.report.table import parse_table

README = (Path(__file__).parents[2] / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w*)\n(.*?)^```", README, re.M | re.S)
FILES = re.findall(r"`config/([\w/]+\.yaml)`[^`]*:\n\n```yaml\n(.*?)^```", README, re.M | re.S)
COMMANDS = [
    line.split("  #")[0].strip() for kind, text in BLOCKS if not kind for line in text.splitlines()
]


def run(command: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    program, *args = shlex.split(command)
    module = {"snakemake": "snakemake", "dspark": "dspark.cli"}[program]
    command_line = [sys.executable, "-m", module, *args]
    return subprocess.run(command_line, cwd=cwd, capture_output=True, text=True)


@pytest.mark.parametrize(
    "command", [c for c in COMMANDS if re.match(r"snakemake|dspark run", c) and "slurm" not in c]
)
def test_a_run_that_is_shown_plans_a_table(fresh: Checkout, command: str) -> None:
    for path, text in FILES:
        (fresh.path / "config" / path).write_text(text)
    done = run(
        command.replace("snakemake ", "snakemake -n ") + " --dry-run" * ("dspark" in command),
        fresh.path,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "rule table" in done.stdout + done.stderr


def test_all_shown_commands_are_known() -> None:
    """A new kind of command in the README needs a test of its own."""
    programs = {command.split()[0] for command in COMMANDS}
    assert programs <= {"make", "snakemake", "dspark", "mlflow"}


def test_training_a_drafter_from_the_command_line(fresh: Checkout, tiny_pair: Path) -> None:
    shown = next(c for c in COMMANDS if c.startswith("dspark train"))
    small = " ".join(f"drafter.train.{setting}" for setting in [*TRAINING, "epochs=2"])
    done = run(
        f"{shown} {small}".replace("/models/my-model", str(tiny_pair / "target")), fresh.path
    )
    assert done.returncode == 0, done.stderr
    assert "accept by position" in done.stderr
    folder = fresh.path / shlex.split(shown)[shlex.split(shown).index("--out") + 1]
    assert read_config(folder / "drafter").block_size == 4
    made_by = from_yaml(ModelsConfig, folder / "config.yaml")
    assert (made_by.target.name, made_by.drafter.train.epochs) == ("my_model", 2)


def test_the_table_that_is_shown_passes_the_identities() -> None:
    shown = README.split("<!-- table:begin -->\n")[1].split("<!-- table:end -->")[0]
    rows = parse_table(shown)
    check_rows(rows)
    assert len(rows) == 24
