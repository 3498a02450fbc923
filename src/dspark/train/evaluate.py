"""What decoding with a drafter would have accepted, without decoding: it walks held-out responses.

A held-out response is the target's own greedy text, so a draft token is accepted exactly when it is
the response's next token. All anchors of a response are drafted at once; then the walk goes from
anchor to anchor as the decoder does, accepted + 1 tokens a step. Its steps are the decoder's, so the
acceptance is too (up to rounding): positions that a decoder skips over do not count.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.decode.draft import choose_tokens
from dspark.decode.sampling import Sampling
from dspark.models.drafter import DSparkDrafter
from dspark.train.blocks import all_anchors, block_hidden, make_batch
from dspark.train.cache import CachedConversation

ANCHORS = 192  # a forward pass


@dataclass
class Drafts:
    """The drafts at all A anchors of a response, B tokens each."""

    survived: Tensor  # [A, B] bool: this token and all before it are the response's own
    confidence: Tensor  # [A, B] raw logits
    valid: Tensor  # [A, B] bool: the response goes on to here


@dataclass
class Reached:
    """The N slots that a decoder with whole blocks comes to: all before them in their block survived."""

    features: Tensor  # [N, W], what the confidence head reads
    position: Tensor  # [N], place in the block
    survived: Tensor  # [N] bool


@dataclass
class Acceptance:
    """Acceptance over the steps of a decoder that drafts k tokens."""

    k: int
    steps: int
    unconditional: list[float]  # share of steps that accepted position t and all before it
    conditional: list[float]  # of the steps that accepted all before position t
    accept_len: float  # tokens a step, the bonus token included


def draft_response(drafter: DSparkDrafter, item: CachedConversation) -> Drafts:
    """Draft greedily at every anchor of one response."""
    return _joined([drafts for drafts, _, _ in _passes(drafter, item)])


@torch.inference_mode()
def reached_slots(drafter: DSparkDrafter, item: CachedConversation) -> Reached:
    """Draft one response as `draft_response` does and keep what the confidence head is asked about.

    The drafter must have that head.
    """
    head, embed = drafter.confidence_head, drafter.markov_head.embed
    assert head is not None
    passes = list(_passes(drafter, item))
    features = torch.cat(
        [head.features(hidden, embed(previous)).cpu() for _, hidden, previous in passes]
    )
    drafts = _joined([part for part, _, _ in passes])
    rows = visited(drafts, drafter.block_size)
    survived = drafts.survived[rows]
    reached = torch.cat([torch.ones_like(survived[:, :1]), survived[:, :-1]], dim=1)
    return Reached(features[rows][reached], reached.nonzero()[:, 1], survived[reached])


@torch.inference_mode()
def _passes(
    drafter: DSparkDrafter, item: CachedConversation
) -> Iterator[tuple[Drafts, Tensor, Tensor]]:
    """Some anchors at a time: their drafts, states [A, B, D] and previous tokens [A, B]."""
    device, size = drafter.norm.weight.device, drafter.block_size
    for anchors in all_anchors(item).split(ANCHORS):
        batch = make_batch([item], [anchors], size).to(device)
        hidden = block_hidden(drafter, batch, batch.taps.to(drafter.norm.weight.dtype))[0]
        tokens = batch.ids[0, batch.anchors[0]]
        draft = choose_tokens(drafter, hidden, tokens, size, [Sampling()])
        where = batch.anchors[0][:, None] + 1 + torch.arange(size, device=device)
        labels = batch.ids[0, where.clamp_max(len(item.ids) - 1)]
        valid = batch.valid[0]
        survived = ((draft.tokens == labels) & valid).long().cumprod(-1).bool()
        drafts = Drafts(survived.cpu(), draft.confidence.float().cpu(), valid.cpu())
        yield drafts, hidden, torch.cat([tokens[:, None], draft.tokens[:, :-1]], dim=1)


def _joined(parts: list[Drafts]) -> Drafts:
    return Drafts(
        torch.cat([part.survived for part in parts]),
        torch.cat([part.confidence for part in parts]),
        torch.cat([part.valid for part in parts]),
    )


def visited(drafts: Drafts, k: int) -> Tensor:
    """Rows of `drafts` that a decoder with k draft tokens stops at, whole blocks alone.

    The last steps of a response, whose block it does not hold, are left out, as the table does.
    """
    accepted = drafts.survived[:, :k].sum(1).tolist()
    rows, at = [], 0
    while at + k < len(accepted):  # k draft tokens and a bonus token would still fit
        rows.append(at)
        at += accepted[at] + 1
    return torch.tensor(rows, dtype=torch.long)


def walk(drafts: Iterable[Drafts], k: int) -> Acceptance:
    """Acceptance by position of a decoder with k draft tokens on these responses."""
    survived = torch.cat([item.survived[visited(item, k), :k] for item in drafts]).double()
    steps = len(survived)
    unconditional = (survived.sum(0) / max(1, steps)).tolist()
    before = [1.0, *unconditional[:-1]]
    conditional = [b / a if a else 0.0 for a, b in zip(before, unconditional, strict=True)]
    return Acceptance(k, steps, unconditional, conditional, 1 + sum(unconditional))


def visited_blocks(drafts: Iterable[Drafts], k: int) -> tuple[Tensor, Tensor, Tensor]:
    """Confidence logits, survival and validity [N, B] of the blocks at which a decoder stops."""
    parts = []
    for item in drafts:
        rows = visited(item, k)
        parts.append((item.confidence[rows], item.survived[rows], item.valid[rows]))
    confidence, survived, valid = (torch.cat(column) for column in zip(*parts, strict=True))
    return confidence, survived, valid
