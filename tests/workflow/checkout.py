"""A copy of the project whose experiment `tiny` runs a tiny target."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ["Snakefile", "workflow", "config", "profiles", "src", "environment.yml"]
DATASETS = ["gsm8k", "mt_bench"]
RUNS = ["baseline", "dspark_k3", "dspark_k7"]

EXPERIMENT = """\
# @package _global_
defaults:
  - /dataset@datasets.gsm8k: gsm8k
  - /dataset@datasets.mt_bench: mt_bench
  - /run@runs.baseline: baseline
  - /run@runs.dspark_k3: dspark_k3
  - /run@runs.dspark_k7: dspark_k7
  - override /target: tiny
  - override /drafter: tiny
  - _self_
datasets:
  gsm8k: {source: builtin, chat: true, limit: 6, max_new_tokens: 24}
  mt_bench: {source: builtin, chat: true, limit: 3, max_new_tokens: 24, history: model}
engine: {device: cpu, interleave: 4}
"""


@dataclass
class Checkout:
    """A copy of the project with its own results."""

    path: Path

    def snakemake(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "snakemake", "--cores", "2", *args]
        done = subprocess.run(command, cwd=self.path, capture_output=True, text=True)
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done

    def planned(self, *args: str) -> dict[str, int]:
        """Jobs that a dry run plans, by rule."""
        done = self.snakemake("--dry-run", *args)
        stats = (done.stdout + done.stderr).split("Job stats:")[-1].split("Reasons:")[0]
        jobs = {rule: int(count) for rule, count in re.findall(r"^(\w+) +(\d+)$", stats, re.M)}
        jobs.pop("total", None)
        return jobs

    def dspark(self, *args: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "dspark.cli", *args]
        return subprocess.run(command, cwd=self.path, capture_output=True, text=True)

    @property
    def results(self) -> Path:
        return self.path / "results" / "tiny"


def copy_checkout(path: Path, models: Path) -> Checkout:
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, path / part, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            path.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, path / part)
    for kind in ("target", "drafter"):
        (path / "config" / kind / "tiny.yaml").write_text(
            f"name: tiny\nsource: local\npath: {models / kind}\n"
        )
    (path / "config" / "experiment" / "tiny.yaml").write_text(EXPERIMENT)
    return Checkout(path)
