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

from dspark.config import CudaGraphs
from dspark.decode.draft import Worth
from dspark.decode.engine import Engine, Request
from dspark.decode.graphs import Graphs, graphs_for
from dspark.decode.sampling import Sampling
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
PLAIN = -1  # the width of a step that drafts nothing


def step_curve(
    folder: Path,
    identity: dict[str, Any],
    target: Target,
    drafter: DSparkDrafter,
    k: int,
    concurrency: int,
    tokens: Sequence[int],
    cuda_graphs: CudaGraphs = CudaGraphs.auto,
) -> StepCurve:
    """The curve kept in `folder` for this `identity`, or one that is measured now and kept.

    Args:
        identity: device, models, versions: what else decides how long a step takes.
        cuda_graphs: as the run has it.
    """
    identity = {**identity, "k": k, "concurrency": concurrency}
    graphs = graphs_for(cuda_graphs, target.device)
    if graphs is not None:
        identity["cuda_graphs"] = True
    name = hashlib.sha256(json.dumps(identity, sort_keys=True).encode()).hexdigest()[:16]
    path = folder / f"steps-{name}.json"
    curve = read_curve(path, identity)
    if curve is None:
        click.echo(
            f"timing engine steps (k = {k}, concurrency {concurrency}) for '{path}'", err=True
        )
        curve = profile_steps(target, drafter, k, concurrency, tokens, graphs)
        write_curve(path, curve, identity)
    return curve


def profile_steps(
    target: Target,
    drafter: DSparkDrafter,
    k: int,
    concurrency: int,
    tokens: Sequence[int],
    graphs: Graphs | None = None,
) -> StepCurve:
    """Measure the steps of one device: every mean width 0..k at full concurrency, and a lone row's.

    Of both, plain steps too: they leave the draft out but keep the drafter's context.

    Args:
        tokens: ids to make contexts from, any text will do.
        graphs: what steps run as, captured before they are timed; None: operation by operation.
    """
    kinds = {(rows, width) for rows in {1, concurrency} for width in (PLAIN, 0, k)}
    kinds |= {(concurrency, width) for width in range(k + 1)}
    context = min(CONTEXT, target.max_positions // 4)
    room = min(ROUNDS * len(kinds) * (k + 1), target.max_positions - context)
    text = list(tokens) * (context * (concurrency + 1) // max(1, len(tokens)) + 1)
    engines = {
        rows: Engine(target, drafter, k=k, concurrency=rows, capacity=context + room, graphs=graphs)
        for rows in {1, concurrency}
    }

    def verify(width: int) -> Worth:
        """`width` tokens a row on average: the schedule's rows differ, and that has a price."""
        limits = torch.full((concurrency,), width, device=target.device)
        if 0 < width < k:
            limits[: concurrency // 2 * 2 : 2] += 1
            limits[1::2] -= 1
        return lambda confidence: limits[: len(confidence)].clamp_max(confidence.shape[1])

    for engine in engines.values():
        engine.decide = verify(k)
        engine.capture(Sampling())

    def time_step(kind: tuple[int, ...]) -> float:
        rows, width = kind
        engine = engines[rows]
        while engine.free:  # at first, and where a row has used its room up
            start = context * engine.active
            ids = text[start : start + context]
            engine.admit(Request("profile", engine.active, ids, room), 0.0)
        engine.decide = verify(width)
        begun = engine.clock()
        engine.step(drafting=width != PLAIN)
        return engine.clock() - begun

    for kind in kinds:  # first calls allocate
        time_step(kind)
    medians = measure_steps(time_step, kinds, ROUNDS)
    plain = {rows: medians.pop((rows, PLAIN)) for rows in sorted(engines)}
    # A lone row at full width may have as many tokens as several rows: then the latter count.
    sizes = {rows * (width + 1): seconds for (rows, width), seconds in medians.items()}
    return fit_curve(
        sorted(sizes),
        [sizes[size] for size in sorted(sizes)],
        fit_curve(list(plain), list(plain.values())),
    )
