"""One draft: the backbone in parallel, then the Markov chain left to right (arXiv 2607.05147, §3)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.decode.cache import SlotCache
from dspark.decode.sampling import Sampling, draw, probabilities
from dspark.models.drafter import DSparkDrafter


@dataclass
class Draft:
    """What the drafter proposes for R rows."""

    tokens: Tensor  # [R, k]
    probs: Tensor | None  # [R, k, V] float32, what each token was drawn from; None when all greedy
    confidence: Tensor  # [R, k] float32 logits
    logits: Tensor  # [R, k, Vd], Markov-corrected
    hidden: Tensor  # [R, B, D], after the final norm


def write_context(
    drafter: DSparkDrafter,
    cache: SlotCache,
    rows: slice,
    taps: Tensor,
    positions: Tensor,
    owners: Tensor | None = None,
) -> None:
    """Store the context K/V of tapped target states [R, T, M*D] at `positions` [R, T].

    With `owners` they are those of a packed pass, see `SlotCache.select`.

    States of rejected tokens may be among them: they lie beyond the row's new length, where the next
    block and the next context overwrite them before anything attends to them.
    """
    cache.select(rows, positions, 0, owners)
    for layer, (key, value) in enumerate(drafter.context_key_values(taps, positions)):
        cache.write(layer, key, value)


def propose(
    drafter: DSparkDrafter,
    cache: SlotCache,
    anchors: Tensor,
    starts: Tensor,
    longest: int,
    k: int,
    sampling: Sequence[Sampling],
    uniforms: Tensor | None = None,
) -> Draft:
    """Draft k tokens after each row's anchor.

    The block always has block_size queries, whatever k is: they attend to each other, so fewer would
    change every state (and leave what the drafter was trained on).

    Args:
        anchors: the newest tokens [R], not yet seen by the target.
        starts: their positions [R]; the context holds positions below.
        longest: the greatest start, known to the host without asking the device.
        uniforms: [R, k] in [0, 1), needed when a row samples.
    """
    size = drafter.block_size
    offsets = torch.arange(size, device=anchors.device)
    positions = starts[:, None] + offsets
    length = longest + size
    cache.select(slice(0, anchors.shape[0]), positions, length)
    keys = torch.arange(length, device=anchors.device)
    mask = (keys < starts[:, None] + size)[:, None, None]  # [R, 1, 1, length]: no causal mask
    hidden = drafter.block_hidden(
        drafter.block_inputs(anchors), positions, lambda i, k_, v_: cache.update(k_, v_, i), mask
    )
    return choose_tokens(drafter, hidden, anchors, k, sampling, uniforms)


def choose_tokens(
    drafter: DSparkDrafter,
    hidden: Tensor,
    anchors: Tensor,
    k: int,
    sampling: Sequence[Sampling],
    uniforms: Tensor | None = None,
) -> Draft:
    """Choose k tokens of R blocks left to right, given the blocks' states [R, B, D].

    The LM head runs in its own dtype, which in training is not the drafter's.
    """
    base = drafter.lm_head(hidden[:, :k].to(drafter.lm_head.weight.dtype)).to(hidden.dtype)
    head, greedy = drafter.markov_head, all(row.greedy for row in sampling)
    previous, state = anchors, head.initial_state(anchors.shape[0])
    tokens, logits, probs = [], [], []
    for position in range(k):
        latent, state = head.latent(hidden[:, position], previous, state)
        corrected = base[:, position] + head.bias(latent)
        if greedy:
            chosen = drafter.to_target(corrected.argmax(-1))
        else:
            assert uniforms is not None
            probs.append(drafter.spread(probabilities(corrected[:, None], sampling)[:, 0]))
            chosen = draw(probs[-1], uniforms[:, position])
        tokens.append(chosen)
        logits.append(corrected)
        previous = chosen
    drafted = torch.stack(tokens, dim=1)
    confidence = drafter.confidence_logits(
        hidden[:, :k], torch.cat([anchors[:, None], drafted[:, :-1]], dim=1)
    )
    return Draft(
        tokens=drafted,
        probs=torch.stack(probs, dim=1) if probs else None,
        confidence=confidence,
        logits=torch.stack(logits, dim=1),
        hidden=hidden,
    )


def confident_prefix(confidence: Tensor, threshold: float) -> Tensor:
    """How many leading draft tokens [R] have at least `threshold` confidence (logits [R, k]).

    The decision at a position reads that position's confidence and those before it alone; each of
    them depends on earlier tokens only, so the output distribution stays the target's.
    """
    return (confidence.sigmoid() >= threshold).long().cumprod(-1).sum(-1)
