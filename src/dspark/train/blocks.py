"""Blocks for training: many anchors of a conversation at once, as if each were a draft.

Shapes: b conversations, S their padded length, A anchors each, B slots a block, N valid slots of a
batch, D hidden size, M tapped layers, r Markov rank.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.decode.cache import SlotCache, causal_mask
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target
from dspark.train.loss import slot_weights
from dspark.train.synthesize import Conversation


@dataclass
class Blocks:
    """Blocks of a batch: b conversations, A anchors each, B slots. S is the padded length."""

    ids: Tensor  # [b, S]
    anchors: Tensor  # [b, A] positions
    valid: Tensor  # [b, A, B] slots whose label exists

    def to(self, device: torch.device) -> Blocks:
        return Blocks(self.ids.to(device), self.anchors.to(device), self.valid.to(device))


@dataclass
class Slots:
    """All valid slots of a batch, flattened: N of them."""

    hidden: Tensor  # [N, D]
    latents: Tensor  # [N, r]
    previous: Tensor  # [N]
    labels: Tensor  # [N]
    teacher: Tensor  # [N, D], the target's final state that predicts the label
    weights: Tensor  # [N]


def make_blocks(
    batch: list[Conversation], anchors: int, block_size: int, generator: torch.Generator
) -> Blocks:
    """Draw anchors among response positions whose next token is part of the response too.

    A conversation with fewer such positions than `anchors` repeats none: its other blocks have no
    valid slot.
    """
    length = max(len(item.prompt_ids) + len(item.response_ids) for item in batch)
    ids = torch.zeros(len(batch), length, dtype=torch.long)
    chosen = torch.zeros(len(batch), anchors, dtype=torch.long)
    valid = torch.zeros(len(batch), anchors, block_size, dtype=torch.bool)
    for row, item in enumerate(batch):
        begin, end = len(item.prompt_ids), len(item.prompt_ids) + len(item.response_ids)
        ids[row, :end] = torch.tensor(item.prompt_ids + item.response_ids)
        picks = begin + torch.randperm(max(0, end - begin - 1), generator=generator)[:anchors]
        chosen[row, : len(picks)] = picks
        labels = picks[:, None] + 1 + torch.arange(block_size)
        valid[row, : len(picks)] = labels < end
    return Blocks(ids, chosen, valid)


def block_mask(anchors: Tensor, length: int, block_size: int) -> Tensor:
    """Bool mask [b, 1, A*B, S + A*B]: a block sees the context before its anchor, and itself."""
    count = anchors.shape[1]
    owner = torch.arange(count * block_size, device=anchors.device) // block_size
    context = torch.arange(length, device=anchors.device) < anchors[:, owner, None]
    own = (owner[:, None] == owner)[None].expand(anchors.shape[0], -1, -1)
    return torch.cat([context, own], dim=-1)[:, None]


def target_states(target: Target, ids: Tensor, layers: list[int]) -> tuple[Tensor, Tensor]:
    """Final states [b, S, D] and taps [b, S, M*D] of whole conversations (right padding is inert)."""
    positions = torch.arange(ids.shape[1], device=ids.device)[None].expand(ids.shape[0], -1)
    cache = SlotCache(target.num_layers, ids.shape[0], ids.shape[1])
    cache.select(slice(0, ids.shape[0]), positions, ids.shape[1])
    masks = {
        kind: causal_mask(positions, ids.shape[1], window)
        for kind, window in target.windows.items()
    }
    with torch.no_grad():
        states, taps = target.forward(ids, positions, cache, masks, layers)
    assert taps is not None
    return states, taps


def block_hidden(drafter: DSparkDrafter, taps: Tensor, blocks: Blocks) -> Tensor:
    """States [b, A, B, D] of all blocks of a batch, given tapped target states [b, S, M*D]."""
    length, size = blocks.ids.shape[1], drafter.block_size
    positions = torch.arange(length, device=taps.device)[None].expand(taps.shape[0], -1)
    context = drafter.context_key_values(taps, positions)

    def key_values(layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        return torch.cat([context[layer][0], key], 2), torch.cat([context[layer][1], value], 2)

    ids = drafter.block_inputs(blocks.ids.gather(1, blocks.anchors).flatten())
    slots = (blocks.anchors[..., None] + torch.arange(size, device=taps.device)).flatten(1)
    mask = block_mask(blocks.anchors, length, size)
    hidden = drafter.block_hidden(ids.view(taps.shape[0], -1), slots, key_values, mask)
    return hidden.unflatten(1, (-1, size))


def flatten_slots(
    drafter: DSparkDrafter, hidden: Tensor, states: Tensor, blocks: Blocks, decay: float
) -> Slots:
    """Pair each valid slot with its previous token, its label and the target's state (teacher forcing)."""
    offsets = torch.arange(drafter.block_size, device=hidden.device)
    where = (blocks.anchors[..., None] + offsets).clamp_max(blocks.ids.shape[1] - 1)  # [b, A, B]
    rows = torch.arange(where.shape[0], device=hidden.device)[:, None, None]
    previous = blocks.ids[rows, where]
    labels = blocks.ids[rows, (where + 1).clamp_max(blocks.ids.shape[1] - 1)]
    latents = drafter.markov_head.block_latents(hidden.flatten(0, 1), previous.flatten(0, 1)).view(
        *hidden.shape[:3], -1
    )
    valid = blocks.valid
    return Slots(
        hidden[valid],
        latents[valid],
        previous[valid],
        labels[valid],
        states[rows, where][valid],
        slot_weights(valid, decay)[valid],
    )
