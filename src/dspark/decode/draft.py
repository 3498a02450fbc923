"""One draft: the backbone in parallel, then the Markov chain left to right (arXiv 2607.05147, §3)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from dspark.decode.cache import SlotCache
from dspark.decode.sampling import Sampling, draw, probabilities
from dspark.errors import UserError
from dspark.kernels.switch import kernels_used
from dspark.models.drafter import DSparkDrafter

HEAD_ROWS = (
    16  # rows for which the LM head's weight is read at a time in a draft that may end early
)

# From the confidence logits of the first t positions [R, t]: how many tokens to verify [R], 0..t.
Worth = Callable[[Tensor], Tensor]


@dataclass
class Draft:
    """What the drafter proposes for R rows: n tokens of each, k unless it was worth no more."""

    tokens: Tensor  # [R, n]
    probs: Tensor | None  # [R, n, V] float32, what each token was drawn from; None when all greedy
    confidence: Tensor  # [R, n] float32 logits; [R, n + 1] when the next token was not worth it
    logits: Tensor  # [R, n, Vd], Markov-corrected; empty where a kernel chose, which writes none
    hidden: Tensor  # [R, B, D], after the final norm


def check_k(k: int, drafter: DSparkDrafter, name: str = "k") -> None:
    """Refuse to draft more than a block.

    Raises:
        UserError: k, which the user knows as `name`, is above the drafter's block_size.
    """
    if k > drafter.block_size:
        raise UserError(
            f"{name} is {k} but the drafter's block_size is {drafter.block_size}: "
            f"choose k between 1 and {drafter.block_size}"
        )


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
    worth: Worth | None = None,
    lap: Callable[[str], None] | None = None,
) -> Draft:
    """Draft k tokens after each row's anchor, or as many as are `worth` it (see `choose_tokens`).

    The block always has block_size queries, whatever k is: they attend to each other, so fewer would
    change every state (and leave what the drafter was trained on).

    Args:
        anchors: the newest tokens [R], not yet seen by the target.
        starts: their positions [R]; the context holds positions below.
        longest: the greatest start, known to the host without asking the device.
        uniforms: [R, k] in [0, 1), needed when a row samples.
        lap: called with "draft backbone" when that is done.
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
    if lap is not None:
        lap("draft backbone")
    return choose_tokens(drafter, hidden, anchors, k, sampling, uniforms, worth)


def choose_tokens(
    drafter: DSparkDrafter,
    hidden: Tensor,
    anchors: Tensor,
    k: int,
    sampling: Sequence[Sampling],
    uniforms: Tensor | None = None,
    worth: Worth | None = None,
) -> Draft:
    """Choose at most k tokens of R blocks left to right, given the blocks' states [R, B, D].

    The LM head runs in its own dtype, which in training is not the drafter's.

    Args:
        worth: from the confidences so far, how many tokens of each row are to be verified; the
            drafting ends where no row goes on. A token's confidence is known before the token is.
    """
    rows, head, lm_head = anchors.shape[0], drafter.markov_head, drafter.lm_head
    greedy = all(row.greedy for row in sampling)
    # A weight that is packed for a CPU (where Triton is interpreted) no kernel can read.
    fused = greedy and kernels_used() and isinstance(head.markov_w2, nn.Linear)
    if fused:
        from dspark.kernels.markov_argmax import markov_argmax
    # A weight is read once for several positions; those that are never asked for cost their rows.
    chunk = k if worth is None else max(1, HEAD_ROWS // rows)
    previous, state = anchors, head.initial_state(rows)
    tokens, logits, probs, confidence = [], [], [], []
    for position in range(k):
        confidence.append(drafter.confidence_logits(hidden[:, position], previous))
        if worth is not None and int(worth(torch.stack(confidence, 1)).max()) <= position:
            break
        if position % chunk == 0:
            here = hidden[:, position : min(position + chunk, k)]
            base = lm_head(here.to(lm_head.weight.dtype)).to(hidden.dtype)
        latent, state = head.latent(hidden[:, position], previous, state)
        if fused:
            best = markov_argmax(base[:, position % chunk], latent, head.markov_w2.weight)
            chosen = drafter.to_target(best)
        else:
            logits.append(base[:, position % chunk] + head.bias(latent))
            if greedy:
                # On a CPU argmax takes six times as long as max for bfloat16.
                chosen = drafter.to_target(logits[-1].max(-1).indices)
            else:
                assert uniforms is not None
                corrected = logits[-1][:, None]
                probs.append(drafter.spread(probabilities(corrected, sampling)[:, 0]))
                chosen = draw(probs[-1], uniforms[:, position])
        tokens.append(chosen)
        previous = chosen
    return Draft(
        tokens=torch.stack(tokens, dim=1) if tokens else anchors.new_empty(rows, 0),
        probs=torch.stack(probs, dim=1) if probs else None,
        confidence=torch.stack(confidence, dim=1),
        logits=torch.stack(logits, dim=1) if logits else hidden.new_empty(rows, 0, 0),
        hidden=hidden,
    )


def confident_prefix(confidence: Tensor, threshold: float) -> Tensor:
    """How many leading draft tokens [R] have at least `threshold` confidence (logits [R, k]).

    The decision at a position reads that position's confidence and those before it alone; each of
    them depends on earlier tokens only, so the output distribution stays the target's.
    """
    return (confidence.sigmoid() >= threshold).long().cumprod(-1).sum(-1)
