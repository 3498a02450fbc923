"""Measure the shipped drafter's calibration on conversations that it has never seen, or make it anew.

    python benchmarks/calibration.py --out results/calibration            # about an hour on two cores
    python benchmarks/calibration.py --out results/calibration --write    # into the shipped checkpoint

The target writes prompts that the drafter knows nothing of and answers them. With --write the first
third fits the confidence head, the second the shifts and temperatures, and the last is measured. Goes
on where it was stopped.
"""

from __future__ import annotations

import gzip
import json
from importlib.resources import files
from pathlib import Path

import click
import torch

from dspark.models.calibration import write_calibration
from dspark.models.checkpoint import load_drafter, save_drafter
from dspark.models.target import load_target
from dspark.models.tokenizer import load_tokenizer
from dspark.train.cache import StateCache, write_cache
from dspark.train.calibrate import calibrate, calibration_errors
from dspark.train.chain import outcomes
from dspark.train.confidence import refit_confidence
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
@click.option("--write", is_flag=True, help="Calibrate anew, into the shipped checkpoint.")
def main(target: str, conversations: int, seed: int, out: Path, write: bool) -> None:
    """Make the conversations, measure or calibrate, print errors by position."""
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
    if write:
        third = len(cache) // 3
        refit_confidence(drafter, (cache[index] for index in range(third)))
        result = calibrate(
            *outcomes(drafter, cache, range(third, 2 * third)),
            *outcomes(drafter, cache, range(2 * third, len(cache))),
        )
        write_calibration(SHIPPED, result)
        save_drafter(drafter, SHIPPED, torch.bfloat16)
        before, after, blocks = result.ece_before, result.ece_after, result.blocks
    else:
        logits, survived, valid = outcomes(drafter, cache, range(len(cache)))
        before = calibration_errors(logits, survived, valid, [1.0] * drafter.block_size)
        after = calibration_errors(logits, survived, valid, drafter.temperatures, drafter.shifts)
        blocks = len(logits)
    click.echo(f"measured on {blocks} blocks")
    for name, errors in (("without shifts and temperatures", before), ("with them", after)):
        click.echo(f"{name}: " + ", ".join(f"{error:.1%}" for error in errors))


if __name__ == "__main__":
    main()
