"""Attention of target and drafter: grouped heads, and rows of different lengths without padding.

Key/value heads are never repeated in memory, as transformers' own sdpa function does for more than
one query a row: the query heads of a group become further queries of that group's one head. Target
models call it through transformers' attention interface.

Shapes: R rows, W queries a row, L cached positions, H heads, G key/value heads, h head_dim, B tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask

NAME = "dspark"  # of this function in transformers' registry


@dataclass(frozen=True)
class Packing:
    """Where the B tokens of a packed pass belong: a batch of 1 holds rows of different lengths."""

    owners: Tensor  # [B] row
    places: Tensor  # [B] place in the row
    rows: int
    width: int  # of the longest row

    @classmethod
    def of(cls, lengths: list[int], device: torch.device) -> Packing:
        """Rows of these lengths, one after the other."""
        sizes = torch.tensor(lengths, device=device)
        owners = torch.repeat_interleave(torch.arange(len(lengths), device=device), sizes)
        first = sizes.cumsum(0) - sizes
        places = torch.arange(len(owners), device=device) - first[owners]
        return cls(owners, places, len(lengths), max(lengths))

    # Both are done in every layer, so each is one gather by an index that is made once.
    @cached_property
    def _flat(self) -> Tensor:
        """Place of each token [B] in R rows of W."""
        return self.owners * self.width + self.places

    @cached_property
    def _source(self) -> Tensor:
        """Token at each place [R * W], the first one where a row is shorter."""
        source = self.owners.new_zeros(self.rows * self.width)
        source[self._flat] = torch.arange(len(self.owners), device=source.device)
        return source

    def spread(self, packed: Tensor) -> Tensor:
        """[B, ...] to [R, W, ...], the first token where a row is shorter: not to be read."""
        return packed.index_select(0, self._source).unflatten(0, (self.rows, self.width))

    def pack(self, padded: Tensor) -> Tensor:
        """[R, W, ...] to [B, ...]."""
        return padded.flatten(0, 1).index_select(0, self._flat)


def attend(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float | None = None
) -> Tensor:
    """Attention [R, H, W, h] of queries [R, H, W, h] to K and V [R, G, L, h].

    Args:
        mask: bool, true = attend, or what to add to the scores, [R or 1, 1, W or 1, L] or already
            repeated [.., H / G * W, L]; None attends to all.
    """
    rows, heads, width, _ = query.shape
    groups = key.shape[1]
    repeats = heads // groups
    if mask is not None and repeats > 1 and mask.shape[2] == width > 1:
        mask = mask.repeat(1, 1, repeats, 1)
    out = F.scaled_dot_product_attention(
        query.reshape(rows, groups, repeats * width, -1), key, value, attn_mask=mask, scale=scale
    )
    return out.reshape(rows, heads, width, -1)


def target_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    packing: Packing | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """What transformers' layers call: queries [R, H, W, h] (packed: [1, H, B, h]) to [R, W, H, h].

    Raises:
        ValueError: the layer asks for something that this function does not do.
    """
    for name in ("softcap", "s_aux", "position_bias"):
        if kwargs.get(name) is not None:
            raise ValueError(f"attention with {name} is not supported")
    if packing is not None:
        query = packing.spread(query[0].transpose(0, 1)).transpose(1, 2)
    if attention_mask is None and query.shape[2] > 1:  # transformers leaves a plain causal mask out
        size, length = query.shape[2], key.shape[2]
        attention_mask = torch.ones(size, length, dtype=torch.bool, device=query.device).tril(
            length - size
        )[None, None]
    out = attend(query, key, value, attention_mask, scaling).transpose(1, 2)
    return (out if packing is None else packing.pack(out)[None]), None


AttentionInterface.register(NAME, target_attention)
AttentionMaskInterface.register(NAME, sdpa_mask)
