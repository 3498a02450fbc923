"""The layers of Llama-like targets with fused weights: what a timed decoding step runs.

A step has few rows, so it is bound by reading weights and by the number of operations. Here a layer is
four products (q/k/v and gate/up are one each, the residuals are added by the products that end a
branch) and some ten small operations, against seven and about forty in transformers' own code.
Rotary embedding, embedding and final norm stay the model's own modules.

Shapes: R rows, T tokens a row, D hidden size, H heads, G key/value heads, h head_dim, M taps.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from dspark.kernels.switch import kernels_used
from dspark.models.attention import Packing, attend
from dspark.models.packed import can_pack, pack, packed_linear

WIDEST = 16  # tokens a row that kernels are made for: a prompt is left to PyTorch
FAMILIES = {"llama", "mistral", "qwen2", "qwen3"}  # pre-norm, RMSNorm, gated MLP, q/k norm or none


@dataclass(frozen=True)
class Product:
    """Linear layers that read the same input, as one."""

    weight: Tensor  # [N, K]; packed where `packed` says so
    bias: Tensor | None
    packed: bool

    @classmethod
    def of(cls, *linears: nn.Linear) -> Product:
        """The layers one above the other. Copies their weights."""
        weight = torch.cat([linear.weight for linear in linears])
        bias = None
        if any(linear.bias is not None for linear in linears):
            none = [weight.new_zeros(linear.out_features) for linear in linears]
            bias = torch.cat(
                [z if one.bias is None else one.bias for one, z in zip(linears, none, strict=True)]
            )
        packs = can_pack(weight)
        return cls(pack(weight) if packs else weight, bias, packs)

    def dense(self) -> Tensor:
        """The weight [N, K] as it was before packing."""
        return self.weight.to_dense() if self.packed else self.weight

    def __call__(self, x: Tensor, residual: Tensor | None = None) -> Tensor:
        """[..., K] to [..., N], with `residual` [..., N] added."""
        if self.packed:
            return packed_linear(x, self.weight, self.bias, residual)
        out = F.linear(x, self.weight, self.bias)
        return out if residual is None else out + residual


@dataclass(frozen=True)
class Norm:
    """RMSNorm."""

    weight: Tensor
    eps: float

    @classmethod
    def of(cls, module: Any) -> Norm:
        return cls(module.weight, module.variance_epsilon)

    def __call__(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight, self.eps)


class FusedLayer:
    """One decoder layer, made from transformers' module, which is emptied of its weights."""

    def __init__(self, index: int, layer: Any, kind: str, window: int | None) -> None:
        attention, mlp = layer.self_attn, layer.mlp
        self.index, self.kind, self.window = index, kind, window
        self.head_dim: int = attention.head_dim
        self.heads = attention.q_proj.out_features // self.head_dim
        self.groups = attention.k_proj.out_features // self.head_dim
        self.scale: float = attention.scaling
        self.before_attention = Norm.of(layer.input_layernorm)
        self.before_mlp = Norm.of(layer.post_attention_layernorm)
        self.query_norm = self.key_norm = None
        if hasattr(attention, "q_norm"):
            self.query_norm, self.key_norm = Norm.of(attention.q_norm), Norm.of(attention.k_norm)
        self.qkv = Product.of(attention.q_proj, attention.k_proj, attention.v_proj)
        self.out = Product.of(attention.o_proj)
        self.gate_up = Product.of(mlp.gate_proj, mlp.up_proj)
        self.down = Product.of(mlp.down_proj)
        self.activation = mlp.act_fn
        layer.self_attn = layer.mlp = None  # the weights are kept once

    def __call__(
        self,
        x: Tensor,
        rope: tuple[Tensor, Tensor],
        cache: Any,
        mask: Tensor,
        packing: Packing | None,
    ) -> Tensor:
        """States [R, T, D] to the layer's output. See `FusedDecoder` for the rest."""
        heads = self.qkv(self.before_attention(x)).unflatten(-1, (-1, self.head_dim))
        rotated, value = heads.split([self.heads + self.groups, self.groups], dim=-2)
        if self.query_norm is not None and self.key_norm is not None:
            query, key = rotated.split([self.heads, self.groups], dim=-2)
            rotated = torch.cat([self.query_norm(query), self.key_norm(key)], dim=-2)
        rotated = rotate(rotated, *rope)
        query, key = rotated.split([self.heads, self.groups], dim=-2)
        keys, values = cache.update(key.transpose(1, 2), value.transpose(1, 2), self.index)
        if packing is not None:
            query = packing.spread(query[0])
        out = attend(query.transpose(1, 2), keys, values, mask, self.scale).transpose(1, 2)
        if packing is not None:
            out = packing.pack(out)[None]
        x = self.out(out.flatten(-2), residual=x)
        gate, up = self.gate_up(self.before_mlp(x)).chunk(2, dim=-1)
        return self.down(self.activation(gate) * up, residual=x)

    @property
    def norms(self) -> tuple[Norm, Norm] | None:
        """Of queries and of keys; None where the family has none."""
        if self.query_norm is None or self.key_norm is None:
            return None
        return self.query_norm, self.key_norm

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Name and value of all that was taken out of transformers' module."""
        for name in ("qkv", "out", "gate_up", "down"):
            product: Product = getattr(self, name)
            yield f"{self.index}.{name}.weight", product.dense()
            if product.bias is not None:
                yield f"{self.index}.{name}.bias", product.bias
        if self.query_norm is not None and self.key_norm is not None:
            yield f"{self.index}.query_norm", self.query_norm.weight
            yield f"{self.index}.key_norm", self.key_norm.weight


class FusedDecoder:
    """All layers. Same arguments and results as `Target.forward`.

    Args:
        windows: see `Target.windows`.
    """

    def __init__(self, decoder: Any, config: Any, windows: Mapping[str, int | None]) -> None:
        self.embed, self.rotary = decoder.embed_tokens, decoder.rotary_emb
        self.norm = Norm.of(decoder.norm)
        kinds = getattr(config, "layer_types", None) or ["all"] * len(decoder.layers)
        self.layers = [
            FusedLayer(index, layer, kind, windows[kind])
            for index, (layer, kind) in enumerate(zip(decoder.layers, kinds, strict=True))
        ]
        self.repeats = self.layers[0].heads // self.layers[0].groups

    def __call__(
        self,
        tokens: Tensor,
        positions: Tensor,
        cache: Any,
        masks: dict[str, Tensor],
        taps: Sequence[int] = (),
        packing: Packing | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        width = tokens.shape[1] if packing is None else packing.width
        if kernels_used() and width <= WIDEST:
            from dspark.kernels.layers import run_layers

            return run_layers(self, tokens, positions, cache, taps, packing)
        x = self.embed(tokens)
        rope = rope_factors(self.rotary, x, positions)
        ready = {kind: self._additive(mask, x.dtype) for kind, mask in masks.items()}
        caught = {-1: x}
        for layer in self.layers:
            x = layer(x, rope, cache, ready[layer.kind], packing)
            if layer.index in taps:
                caught[layer.index] = x
        return self.norm(x), torch.cat([caught[j] for j in taps], dim=-1) if taps else None

    def _additive(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """A bool mask [R, 1, T, S] as what is added to scores, for the T queries of a group's heads.

        Once a pass: given a bool mask, attention makes this in every layer.
        """
        added = torch.zeros(mask.shape, dtype=dtype, device=mask.device)
        added.masked_fill_(~mask, float("-inf"))
        return added.repeat(1, 1, self.repeats, 1) if mask.shape[2] > 1 else added


def rope_factors(rotary: Any, x: Tensor, positions: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines, and sines with the sign of `rotate`, [R, T, 1, h] each."""
    cos, sin = (part[..., None, :] for part in rotary(x, positions))
    half = sin.shape[-1] // 2
    return cos, torch.cat([-sin[..., :half], sin[..., half:]], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of heads [R, T, n, h]: (x1, x2) to (x1 cos - x2 sin, x2 cos + x1 sin) in three operations."""
    return torch.addcmul(x * cos, x.roll(x.shape[-1] // 2, -1), sin)
