"""Blocks for training: many anchors of a conversation at once, as if each were a draft.

Shapes: b conversations, S their padded length, A anchors each, B slots a block, N valid slots of a
batch, D hidden size, M tapped layers, r Markov rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from dspark.models.drafter import DSparkDrafter
from dspark.train.cache import CachedConversation


@dataclass
class Batch:
    """What one forward pass of training reads."""

    ids: Tensor  # [b, S]
    taps: Tensor  # [b, S, M*D]
    final: Tensor  # [b, S, D], the target's states after its last norm
    logz: Tensor  # [b, S], log of the sum of exp of the target's logits there
    anchors: Tensor  # [b, A] positions
    valid: Tensor  # [b, A, B] slots whose label exists

    def to(self, device: torch.device) -> Batch:
        return Batch(*(getattr(self, field.name).to(device) for field in fields(self)))


@dataclass
class Slots:
    """All valid slots of a batch, flattened: N of them."""

    hidden: Tensor  # [N, D]
    latents: Tensor  # [N, r]
    previous: Tensor  # [N]
    labels: Tensor  # [N]
    teacher: Tensor  # [N, D], the target's final state that predicts the label
    logz: Tensor  # [N]
    offsets: Tensor  # [N], place in the block


def all_anchors(item: CachedConversation) -> Tensor:
    """Positions of a response whose next token is part of the response too: what a draft can start at."""
    return torch.arange(item.response_start, max(item.response_start, len(item.ids) - 1))


def draw_anchors(item: CachedConversation, count: int, generator: torch.Generator) -> Tensor:
    """At most `count` of `all_anchors`, each at most once."""
    anchors = all_anchors(item)
    return anchors[torch.randperm(len(anchors), generator=generator)[:count]]


def make_batch(
    items: Sequence[CachedConversation], anchors: Sequence[Tensor], block_size: int
) -> Batch:
    """Pad conversations and their anchors to one batch; the blocks of padding have no valid slot."""
    count = max(len(chosen) for chosen in anchors)
    positions = torch.zeros(len(items), count, dtype=torch.long)
    valid = torch.zeros(len(items), count, block_size, dtype=torch.bool)
    for row, (item, chosen) in enumerate(zip(items, anchors, strict=True)):
        positions[row, : len(chosen)] = chosen
        labels = chosen[:, None] + 1 + torch.arange(block_size)
        valid[row, : len(chosen)] = labels < len(item.ids)
    ids, taps, final, logz = (
        pad_sequence([getattr(item, name) for item in items], batch_first=True)
        for name in ("ids", "taps", "final", "logz")
    )
    return Batch(ids, taps, final, logz, positions, valid)


def block_mask(anchors: Tensor, length: int, block_size: int) -> Tensor:
    """Bool mask [b, 1, A*B, S + A*B]: a block sees the context before its anchor, and itself."""
    count = anchors.shape[1]
    owner = torch.arange(count * block_size, device=anchors.device) // block_size
    context = torch.arange(length, device=anchors.device) < anchors[:, owner, None]
    own = (owner[:, None] == owner)[None].expand(anchors.shape[0], -1, -1)
    return torch.cat([context, own], dim=-1)[:, None]


def block_hidden(drafter: DSparkDrafter, batch: Batch, taps: Tensor) -> Tensor:
    """States [b, A, B, D] of all blocks of a batch; `taps` are the batch's, as the drafter reads them."""
    length, size = batch.ids.shape[1], drafter.block_size
    positions = torch.arange(length, device=taps.device)[None].expand(taps.shape[0], -1)
    context = drafter.context_key_values(taps, positions)

    def key_values(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([context[layer][0], key], 2), torch.cat([context[layer][1], value], 2)

    ids = drafter.block_inputs(batch.ids.gather(1, batch.anchors).flatten())
    slots = (batch.anchors[..., None] + torch.arange(size, device=taps.device)).flatten(1)
    mask = block_mask(batch.anchors, length, size)
    hidden = drafter.block_hidden(ids.view(taps.shape[0], -1), slots, key_values, mask)
    return hidden.unflatten(1, (-1, size))


def flatten_slots(drafter: DSparkDrafter, hidden: Tensor, batch: Batch) -> Slots:
    """Pair each valid slot with its previous token, its label and the target's state (teacher forcing)."""
    offsets = torch.arange(drafter.block_size, device=hidden.device)
    where = (batch.anchors[..., None] + offsets).clamp_max(batch.ids.shape[1] - 1)  # [b, A, B]
    rows = torch.arange(where.shape[0], device=hidden.device)[:, None, None]
    previous = batch.ids[rows, where]
    labels = batch.ids[rows, (where + 1).clamp_max(batch.ids.shape[1] - 1)]
    latents = drafter.markov_head.block_latents(hidden.flatten(0, 1), previous.flatten(0, 1)).view(
        *hidden.shape[:3], -1
    )
    valid = batch.valid
    return Slots(
        hidden[valid],
        latents[valid],
        previous[valid],
        labels[valid],
        batch.final[rows, where][valid],
        batch.logz[rows, where][valid],
        offsets.expand_as(valid)[valid],
    )
