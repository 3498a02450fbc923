"""What the pipeline around the decoder costs: a cell of many requests, from command to table.

    python benchmarks/overhead.py                    # 500 requests, two arms: six minutes on two cores
    python benchmarks/overhead.py --requests 8
    python benchmarks/overhead.py --keep results/overhead && python benchmarks/predicted.py results/overhead

Runs an experiment of its own in a copy of the checkout (Snakemake, jobs, tracking and all; the target was
prepared before, as it is from the second experiment on) and sets the wall time of the whole command
against the measured windows inside it. The built-in gsm8k prompts are asked over and over: the engine
remembers nothing of earlier requests.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from itertools import cycle, islice
from pathlib import Path

import click

from dspark.data.builtin import builtin_prompts
from dspark.data.prompts import Prompt, write_prompts
from dspark.decode.records import RequestRecord
from dspark.metrics.records_io import read_records
from dspark.metrics.timing import laid_end_to_end

ROOT = Path(__file__).parents[1]
PARTS = ("Snakefile", "workflow", "config", "profiles", "src", "environment.yml")
EXPERIMENT = """\
# @package _global_
defaults:
  - /dataset@datasets.gsm8k: gsm8k
  - /run@runs.baseline: baseline
  - /run@runs.dspark_k3: dspark_k3
  - _self_
datasets:
  gsm8k: {source: file, path: prompts.jsonl, chat: true}
"""


@click.command()
@click.option("--requests", default=500, show_default=True)
@click.option("--tokens", default=32, show_default=True, help="New ones of each request.")
@click.option("--concurrency", default=4, show_default=True)
@click.option("--precision", default="bfloat16", show_default=True)
@click.option("--keep", type=click.Path(path_type=Path), help="A new folder for the results.")
def main(requests: int, tokens: int, concurrency: int, precision: str, keep: Path | None) -> None:
    """Run it and print what was measured and what stood around it."""
    with tempfile.TemporaryDirectory() as folder:
        checkout = Path(folder) / "dspark"
        _copy(checkout)
        prompts = islice(cycle(builtin_prompts("gsm8k")), requests)
        write_prompts(
            checkout / "prompts.jsonl",
            [Prompt(f"request-{i}", prompt.turns) for i, prompt in enumerate(prompts)],
        )
        command = [
            *(sys.executable, "-m", "dspark.cli", "run", "overhead"),
            f"datasets.gsm8k.max_new_tokens={tokens}",
            f"engine.concurrency={concurrency}",
            f"engine.precision={precision}",
        ]
        begun = time.perf_counter()
        subprocess.run(command, cwd=checkout, check=True, stdout=subprocess.DEVNULL)
        whole = time.perf_counter() - begun
        results = checkout / "results" / "overhead"
        measured = _measured(results / "gsm8k")
        if keep is not None:
            shutil.copytree(results, keep)
    around = whole - measured
    click.echo(
        "| requests a cell | cells | tokens each | whole, s | measured, s | around, s | share |"
    )
    click.echo("| --- | --- | --- | --- | --- | --- | --- |")
    click.echo(
        f"| {requests} | 2 | {tokens} | {whole:.1f} | {measured:.1f} | {around:.1f} "
        f"| {around / whole:.1%} |"
    )


def _copy(checkout: Path) -> None:
    """The checkout without its results, and an experiment beside the others."""
    checkout.mkdir()
    for part in PARTS:
        source = ROOT / part
        if source.is_dir():
            shutil.copytree(source, checkout / part)
        else:
            shutil.copy(source, checkout)
    (checkout / "results").mkdir()
    models = ROOT / "results" / "models"
    if models.is_dir():
        shutil.copytree(models, checkout / "results" / "models")
    (checkout / "config" / "experiment" / "overhead.yaml").write_text(EXPERIMENT)


def _measured(folder: Path) -> float:
    """Seconds of all measured windows of a dataset's job."""
    arms: dict[str, list[RequestRecord]] = defaultdict(list)
    for record in read_records(folder / "requests.parquet"):
        arms[record.run].append(record)
    return sum(laid_end_to_end(records)[1] for records in arms.values())


if __name__ == "__main__":
    main()
