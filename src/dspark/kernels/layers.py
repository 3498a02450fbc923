"""A target's pass over a few tokens a row on the kernels: three of them a layer, beside its four products.

Shapes: R rows, T tokens a row, B tokens in all, D hidden size, H heads, h head_dim, M taps.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from dspark.kernels.add_norm import add_norm
from dspark.kernels.rope_append import rope_append
from dspark.kernels.rows import Rows
from dspark.kernels.verify_attention import attend_rows
from dspark.models.attention import Packing
from dspark.models.fused import FusedDecoder, FusedLayer, rope_factors


def run_layers(
    decoder: FusedDecoder,
    tokens: Tensor,
    positions: Tensor,
    cache: Any,
    taps: Sequence[int],
    packing: Packing | None,
) -> tuple[Tensor, Tensor | None]:
    """Same results as `models.fused.FusedDecoder`, whose masks these kernels need not be told.

    Args:
        cache: a slot cache, aimed at these positions.
    """
    stream = decoder.embed(tokens)
    shape = stream.shape
    cos, sin = rope_factors(decoder.rotary, stream, positions)
    rope = cos.flatten(0, 2), sin.flatten(0, 2)
    rows = Rows.of(positions, packing)
    stream, branch = stream.flatten(0, 1), None
    caught = {}
    for layer in decoder.layers:
        norm = layer.before_attention
        stream, normed = add_norm(branch, stream, norm.weight, norm.eps)
        if layer.index - 1 in taps:
            caught[layer.index - 1] = stream  # what the layer before it came to
        if cache.keys[layer.index] is None:  # its first write allocates it
            none = stream.new_zeros(shape[0], layer.groups, shape[1], layer.head_dim)
            cache.write(layer.index, none, none)
        stream, branch = _run_layer(layer, stream, normed, rope, cache, rows)
    stream, normed = add_norm(branch, stream, decoder.norm.weight, decoder.norm.eps)
    caught[len(decoder.layers) - 1] = stream
    tapped = torch.cat([caught[j] for j in taps], dim=-1).unflatten(0, shape[:2]) if taps else None
    return normed.view(shape), tapped


def _run_layer(
    layer: FusedLayer,
    stream: Tensor,
    normed: Tensor,
    rope: tuple[Tensor, Tensor],
    cache: Any,
    rows: Rows,
) -> tuple[Tensor, Tensor]:
    """The stream [B, D] with attention's output, and the MLP's, which is yet to be added to it."""
    keys, values = cache.read(layer.index)
    query = rope_append(layer.qkv(normed), rope, layer.norms, keys, values, rows)
    attended = attend_rows(query, keys, values, rows, layer.scale, layer.window)
    norm = layer.before_mlp
    stream, normed = add_norm(layer.out(attended.flatten(1)), stream, norm.weight, norm.eps)
    gate, up = layer.gate_up(normed).chunk(2, dim=-1)
    return stream, layer.down(layer.activation(gate) * up)
