"""Logits that are not finite: noticed in what a step copies to the host anyway, then looked into.

A token is marked where the greatest of its logits is NaN or infinite, or where the draft before it
came from such states. Only then is the failing pass run again, with a look at each layer's output.
R rows, T positions, V vocabulary, B block_size, D hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from dspark.decode.draft import propose
from dspark.errors import UserError

if TYPE_CHECKING:
    from dspark.decode.engine import Batch, Engine, Row

BROKEN = -1  # stands for a token whose logits are not finite
BROKEN_DRAFT = -2  # stands for a token that follows a draft from states that are not finite


def likeliest(logits: Tensor) -> Tensor:
    """Argmax [...] of logits [..., V]; BROKEN where the greatest of them is not finite."""
    greatest, tokens = logits.max(-1)
    return tokens.where(greatest.isfinite(), BROKEN)


def marked(tokens: Tensor, accepted: Tensor, logits: Tensor) -> Tensor:
    """Tokens [R] that follow `accepted` [R] others; BROKEN where logits [R, T, V] up to there are."""
    whole = logits.amax(-1).isfinite().long().cumprod(-1).bool()
    return tokens.where(whole.gather(1, accepted[:, None]).squeeze(1), BROKEN)


def marked_draft(tokens: Tensor, hidden: Tensor) -> Tensor:
    """Tokens [R] that follow drafts from states [R, B, D]; BROKEN_DRAFT where those are not finite."""
    whole = hidden.isfinite().flatten(1).all(1)
    return tokens.where(whole | (tokens < 0), BROKEN_DRAFT)


def check_step(
    engine: Engine, batch: Batch, rows: Sequence[Row], outcomes: Sequence[Sequence[int]]
) -> None:
    """Refuse a step in which a token, the last of each row's outcome, is marked.

    Raises:
        UserError: one is; it names request and step, and the layer in which it began.
    """
    for row, (*_, token) in zip(rows, outcomes, strict=True):
        where = f"request '{row.request.prompt_id}#{row.request.turn}', step {len(row.steps) + 1}"
        if token == BROKEN:
            raise target_error(engine, where)
        if token == BROKEN_DRAFT:
            raise _drafter_error(engine, batch, where)


@torch.inference_mode()
def target_error(engine: Engine, where: str) -> UserError:
    """What is said of the engine's latest target pass, which came to logits that are not finite."""
    target, taps = engine.target, engine.taps
    engine.taps = range(-1, target.num_layers)
    try:
        _, outputs = engine.forward(*engine.latest)  # K and V go where they are already
    finally:
        engine.taps = taps
    assert outputs is not None, "there are taps"
    whole = (
        outputs.unflatten(-1, (target.num_layers + 1, -1)).isfinite().all(-1).flatten(0, 1).all(0)
    )
    places = ["the embeddings", *(f"layer {index}" for index in range(target.num_layers))]
    remedy = "fetch the model again"
    if target.dtype is not torch.float32:
        remedy = f"set engine.precision=float32, or {remedy}"
    return UserError(
        f"{where}: the target's logits are not finite, first in {_first(places, whole.tolist())}: {remedy}"
    )


@torch.inference_mode()
def _drafter_error(engine: Engine, batch: Batch, where: str) -> UserError:
    drafter = engine.drafter
    assert drafter is not None, "there was a draft"
    whole: list[bool] = []

    def look(_module: nn.Module, _args: Any, output: Tensor) -> None:
        whole.append(bool(output.isfinite().all()))

    hooks = [layer.register_forward_hook(look) for layer in drafter.layers]
    try:
        propose(
            drafter,
            engine.draft_cache,
            batch.anchors,
            batch.starts,
            batch.longest,
            engine.k,
            batch.sampling,
            batch.uniforms,
        )
    finally:
        for hook in hooks:
            hook.remove()
    places = [f"layer {index}" for index in range(len(whole))]
    return UserError(
        f"{where}: the drafter's states are not finite, first in {_first(places, whole)}: fetch the "
        "drafter again, or train it anew"
    )


def _first(places: Sequence[str], whole: Sequence[bool]) -> str:
    """The first place whose output is not whole; behind them all there is one more norm and the head."""
    broken = (place for place, good in zip(places, whole, strict=True) if not good)
    return next(broken, "the final norm or LM head")
