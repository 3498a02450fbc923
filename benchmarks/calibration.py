"""Calibrate the shipped drafter on new conversations and measure the error on others.

    python benchmarks/calibration.py --out results/calibration            # about an hour on two cores
    python benchmarks/calibration.py --out results/calibration --write    # into the shipped checkpoint

The target writes prompts that the drafter was not trained on and answers them; calibration is fitted on
the first half and its error measured on the second. Goes on where it was stopped.
"""

from __future__ import annotations

import gzip
import json
from importlib.resources import files
from pathlib import Path

import click
import torch

from dspark.models.calibration import write_calibration
from dspark.models.checkpoint import load_drafter
from dspark.models.target import load_target
from dspark.models.tokenizer import load_tokenizer
from dspark.train.cache import StateCache, write_cache
from dspark.train.calibrate import calibrate
from dspark.train.chain import outcomes
from dspark.train.synthesize import read_conversations, synthesize

SHIPPED = Path(str(files("dspark") / "assets" / "drafters" / "smollm2_135m"))


def seen_prompts() -> list[str]:
    """What the drafter was trained and calibrated on."""
    with gzip.open(SHIPPED / "training_prompts.jsonl.gz", "rt") as handle:
        return [json.loads(line)["user"] for line in handle]


@click.command()
@click.option("--target", default="results/models/smollm2_135m", show_default=True)
@click.option("--conversations", default=768, show_default=True)
@click.option("--seed", default=1, show_default=True)
@click.option("--out", type=click.Path(path_type=Path), required=True)
@click.option("--write", is_flag=True, help="Put the result into the shipped checkpoint.")
def main(target: str, conversations: int, seed: int, out: Path, write: bool) -> None:
    """Make the conversations, calibrate, print errors by position."""
    loaded = load_target(target, "cpu", torch.bfloat16)
    drafter = load_drafter(SHIPPED, loaded)
    loaded.pack()
    synthesize(
        loaded,
        load_tokenizer(target),
        out / "conversations.jsonl",
        prompts=conversations,
        max_new_tokens=192,
        seed=seed,
        forbidden=seen_prompts(),
    )
    answered = read_conversations(out / "conversations.jsonl")
    layers = drafter.target_layer_ids
    write_cache(loaded, answered, layers, out / "cache", shard_tokens=32768, max_bytes=2**36)
    cache = StateCache(out / "cache")
    half = len(cache) // 2
    result = calibrate(
        *outcomes(drafter, cache, range(half)), *outcomes(drafter, cache, range(half, len(cache)))
    )
    click.echo(f"{half} conversations fitted, {len(cache) - half} measured: {result.blocks} blocks")
    for name, errors in (("before", result.ece_before), ("after", result.ece_after)):
        click.echo(f"{name}: " + ", ".join(f"{error:.1%}" for error in errors))
    if write:
        write_calibration(SHIPPED, result)


if __name__ == "__main__":
    main()
