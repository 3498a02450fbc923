"""A copy of the project whose experiments run a tiny target: `tiny`, and `learned`, which trains."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PARTS = ["Snakefile", "workflow", "config", "profiles", "src", "environment.yml"]
SNAKEMAKE = [sys.executable, "-m", "snakemake", "--cores", "2"]
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
engine: {device: cpu, interleave: 1}
"""

# How `learned` trains: as overrides, so that `tiny` can be told to train the same drafter.
TRAINING = [
    "prompt_files=[own.jsonl]",
    "prompts=24",
    "max_new_tokens=32",
    "precision=float32",
    "held_out=4",
    "calibration=4",
    "epochs=60",
    "batch=4",
    "anchors=8",
    "lr=5e-3",
    "validate_every=10",
    "shape={layers:1,taps:2,block_size:4,markov_rank:16,draft_vocab_size:0}",
]
THINGS = (
    "apple bird cloud door eagle flower game house island jacket kettle lamp "
    "mountain novel ocean piano quilt river song tree umbrella village window year"
)
STEPS = 240  # of these settings
LEARNED_RUNS = ["baseline", "dspark_k3", "dspark_sched", "dspark_conf"]
LEARNED = """\
# @package _global_
defaults:
  - /dataset@datasets.gsm8k: gsm8k
  - /run@runs.baseline: baseline
  - /run@runs.dspark_k3: dspark_k3
  - /run@runs.dspark_sched: dspark_sched
  - /run@runs.dspark_conf: dspark_conf
  - override /target: tiny
  - _self_
datasets:
  gsm8k: {source: builtin, chat: true, limit: 4, max_new_tokens: 24}
runs:
  dspark_sched: {k: 4}
  dspark_conf: {k: 4}
engine: {device: cpu, interleave: 1}
"""


@dataclass
class Checkout:
    """A copy of the project with its own results."""

    path: Path

    def snakemake(self, *args: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([*SNAKEMAKE, *args], cwd=self.path, capture_output=True, text=True)
        if check:
            assert done.returncode == 0, done.stdout + done.stderr
        return done

    def start_snakemake(self, *args: str) -> subprocess.Popen[bytes]:
        quiet = subprocess.DEVNULL
        return subprocess.Popen([*SNAKEMAKE, *args], cwd=self.path, stdout=quiet, stderr=quiet)

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

    @property
    def learned(self) -> Path:
        return self.path / "results" / "learned"

    @property
    def training(self) -> Path:
        """The folder of the one training that has run."""
        (folder,) = (self.path / "results" / "training").iterdir()
        return folder


def trained(experiment: str, *overrides: str) -> tuple[str, ...]:
    """Arguments of an experiment that trains the drafter of `TRAINING`, with further overrides."""
    settings = [f"drafter.train.{setting}" for setting in TRAINING]
    wanted = " ".join(["drafter=trained", *settings, *overrides])
    return "--config", f"experiment={experiment}", f"overrides={wanted}"


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
    for name, text in (("tiny", EXPERIMENT), ("learned", LEARNED)):
        (path / "config" / "experiment" / f"{name}.yaml").write_text(text)
    questions = [f"Which {thing} do you like best?" for thing in THINGS.split()]
    rows = [{"id": f"own/{i}", "turns": [text]} for i, text in enumerate(questions)]
    (path / "own.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Checkout(path)
