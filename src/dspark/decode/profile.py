"""Seconds of an engine step against the tokens that it verifies: what the schedule decides by.

Real steps are timed, draft and host work included, on the device and at the concurrency that the run
has, with the warm-up prompts as context.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click
import torch

from dspark.decode.engine import Engine, Request
from dspark.decode.schedule import (
    StepCurve,
    fit_curve,
    measure_steps,
    read_curve,
    write_curve,
)
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target

ROUNDS = 7
CONTEXT = 128  # tokens before the first timed step


def step_curve(
    folder: Path,
    identity: dict[str, Any],
    target: Target,
    drafter: DSparkDrafter,
    k: int,
    concurrency: int,
    tokens: Sequence[int],
) -> StepCurve:
    """The curve kept in `folder` for this `identity`, or one that is measured now and kept.

    Args:
        identity: device, models, versions: what else decides how long a step takes.
    """
    identity = {**identity, "k": k, "concurrency": concurrency}
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"steps-{name}.json"
    curve = read_curve(path, identity)
    if curve is None:
        click.echo(
            f"timing engine steps (k = {k}, concurrency {concurrency}) for '{path}'", err=True
        )
        curve = profile_steps(target, drafter, k, concurrency, tokens)
        write_curve(path, curve, identity)
    return curve


def profile_steps(
    target: Target, drafter: DSparkDrafter, k: int, concurrency: int, tokens: Sequence[int]
) -> StepCurve:
    """Measure the steps of one device: every width 0..k at full concurrency, and a lone row's.

    Args:
        tokens: ids to make contexts from, any text will do.
    """
    steps = sorted({(1, 0), (1, k), *((concurrency, width) for width in range(k + 1))})
    sizes = {rows * (width + 1): (rows, width) for rows, width in steps}
    context = min(CONTEXT, target.max_positions // 4)
    room = min(ROUNDS * len(sizes) * (k + 1), target.max_positions - context)
    text = list(tokens) * (context * (concurrency + 1) // max(1, len(tokens)) + 1)
    engines = {
        rows: Engine(target, drafter, k=k, concurrency=rows, capacity=context + room)
        for rows in {1, concurrency}
    }

    def time_step(size: int) -> float:
        rows, width = sizes[size]
        engine = engines[rows]
        while engine.free:  # at first, and where a row has used its room up
            start = context * engine.active
            ids = text[start : start + context]
            engine.admit(Request("profile", engine.active, ids, room), 0.0)
        engine.decide = lambda confidence: torch.full(
            confidence.shape[:1], min(width, confidence.shape[1]), device=target.device
        )
        begun = engine.clock()
        engine.step()
        return engine.clock() - begun

    for size in sizes:  # first calls allocate
        time_step(size)
    return fit_curve(*measure_steps(time_step, list(sizes), ROUNDS))
