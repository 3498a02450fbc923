"""The target's states of whole conversations, as training needs them."""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.decode.cache import SlotCache, causal_mask
from dspark.models.target import Target


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
