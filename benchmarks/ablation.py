"""What a drafter's shape, data and losses are worth: short trainings that differ in one thing each.

    dspark train --out results/training/smollm2                    # or its stages synthesise and cache
    python benchmarks/ablation.py results/training/smollm2/cache  # six to nine CPU minutes each
    python benchmarks/ablation.py CACHE --only base --only layers1

Every variant starts from the same conversations, steps and anchors as `base`, unless it is about these.
Goes on where it was stopped: a finished variant has its curve under --out.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import click
import torch

from dspark.config import compose_training
from dspark.models.target import load_target
from dspark.train import trainer
from dspark.train.cache import CachedConversation, StateCache

HELD_OUT = 64  # conversations


@dataclass(frozen=True)
class Variant:
    """What differs from `base`."""

    settings: tuple[str, ...] = ()  # of drafter.train
    taps: tuple[int, ...] = ()  # of the cache's layers, in order; empty: all
    share: float = 1.0  # of the training conversations, the first ones
    answer: int | None = None  # response tokens of each conversation; the rest is cut off
    steps: float = 1.0  # of base's


VARIANTS = {
    "base": Variant(),
    "another seed": Variant(("seed=1",)),
    "1 layer": Variant(("shape.layers=1",)),
    "3 layers": Variant(("shape.layers=3",)),
    "rank 8": Variant(("shape.markov_rank=8",)),
    "rank 64": Variant(("shape.markov_rank=64",)),
    "last tap alone": Variant(taps=(3,)),
    "taps 2 and 4": Variant(taps=(1, 3)),
    "a quarter of the data": Variant(share=0.25),
    "64 tokens a response": Variant(answer=64),
    "the paper's weights and decay": Variant(("weight_ce=0.1", "decay=4.0")),
    "Muon": Variant(("optimizer=muon",)),
    "drawn positions": Variant(("draw_slots=true",)),
    "twice the steps": Variant(steps=2.0),
}


class PartOfCache(StateCache):
    """A cache as if less had been written to it."""

    def __init__(self, folder: Path, variant: Variant) -> None:
        super().__init__(folder)
        self.variant = variant
        self.width = super().__getitem__(0).final.shape[-1]

    def __len__(self) -> int:
        whole = super().__len__() - HELD_OUT
        return HELD_OUT + int(whole * self.variant.share)

    def __getitem__(self, index: int) -> CachedConversation:
        item = super().__getitem__(index)
        if self.variant.taps:
            parts = item.taps.split(self.width, dim=-1)
            item = replace(item, taps=torch.cat([parts[tap] for tap in self.variant.taps], dim=-1))
        if self.variant.answer is not None and index >= HELD_OUT:  # validation stays the same
            end = item.response_start + self.variant.answer
            item = replace(
                item,
                ids=item.ids[:end],
                taps=item.taps[:end],
                final=item.final[:end],
                logz=item.logz[:end],
            )
        return item


@click.command()
@click.argument("cache", type=click.Path(exists=True, file_okay=False, path_type=Path))
@click.option("--target", default="results/models/smollm2_135m", show_default=True)
@click.option("--out", default="results/ablation", type=click.Path(path_type=Path))
@click.option("--steps", default=400, show_default=True)
@click.option("--only", multiple=True, type=click.Choice(list(VARIANTS)), help="Default: all.")
@click.option("--threads", default=2, show_default=True)
def main(
    cache: Path, target: str, out: Path, steps: int, only: Sequence[str], threads: int
) -> None:
    """Train the variants and print a line of the table for each."""
    torch.set_num_threads(threads)
    loaded = load_target(target, "cpu", torch.bfloat16)
    loaded.pack()
    click.echo("| variant | accept len k = 3 | k = 7 | p1 | p2 given 1 | p3 given 2 | CPU min |")
    click.echo("| --- | --- | --- | --- | --- | --- | --- |")
    for name in only or VARIANTS:
        variant, folder = VARIANTS[name], out / name.replace(" ", "_")
        part = PartOfCache(cache, variant)
        layers = [part.layers[tap] for tap in variant.taps or range(len(part.layers))]
        each = (len(part) - HELD_OUT) // 4
        settings = [
            f"held_out={HELD_OUT}",
            "calibration=1",
            "batch=4",
            "anchors=24",
            "optimizer=adamw",
            "draw_slots=false",
            f"epochs={steps * variant.steps / each}",
            f"validate_every={steps}",
            f"shape.target_layer_ids={list(layers)}",
            *variant.settings,
        ]
        config = compose_training(
            [f"drafter.train.{setting}" for setting in settings]
        ).drafter.train
        assert config is not None
        begun = time.process_time()
        trainer.fit(loaded, part, config, folder)
        click.echo(_line(name, folder, time.process_time() - begun))


def _line(name: str, folder: Path, seconds: float) -> str:
    last = json.loads((folder / "curve.jsonl").read_text().splitlines()[-1])
    lengths = " | ".join(f"{last[f'accept_len_k{k}']:.3f}" for k in (3, 7))
    shares = " | ".join(f"{last[f'accept_given_p{t}_k3']:.1%}" for t in (1, 2, 3))
    return f"| {name} | {lengths} | {shares} | {seconds / 60:.1f} |"


if __name__ == "__main__":
    main()
