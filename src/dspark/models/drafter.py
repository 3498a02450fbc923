"""The DSpark drafter: a parallel backbone, a Markov head and a confidence head.

Source: DSpark, arXiv 2607.05147, section 3; tensor names are those of DeepSpec's checkpoints. The
layers are Qwen3's (q/k norm, RoPE, SwiGLU), whatever the target's own family is.

A drafter may draft from a part of the target's vocabulary (`draft_vocab_size`, as the `speculators`
format has it): its LM head and W2 have a row for each draft token, and `d2t` maps those to target ids.

Shapes in comments: R rows (requests), T context tokens, B block_size, D hidden size, M tapped target
layers, V vocabulary, Vd draft vocabulary, r Markov rank, H heads, G key/value heads, h head_dim.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RotaryEmbedding

from dspark.models.attention import attend
from dspark.models.fused import rope_factors, rotate
from dspark.models.head import LMHead
from dspark.models.markov import ConfidenceHead, MarkovHead, make_markov_head
from dspark.models.packed import pack_linears

# Takes a layer's index and the block's own K and V [R, G, Q, h]; gives all K and V to attend to.
KeyValues = Callable[[int, Tensor, Tensor], tuple[Tensor, Tensor]]


class DrafterAttention(nn.Module):
    """Attention of a block to all context features and to itself, without a causal mask inside."""

    def __init__(self, config: Qwen3Config, index: int) -> None:
        super().__init__()
        self.index = index
        hidden, bias = config.hidden_size, config.attention_bias
        self.head_dim: int = config.head_dim or hidden // config.num_attention_heads
        groups = config.num_key_value_heads or config.num_attention_heads
        self.q_proj = nn.Linear(hidden, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(hidden, groups * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(hidden, groups * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, hidden, bias=bias)
        self.q_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = nn.RMSNorm(self.head_dim, eps=config.rms_norm_eps)

    def key_values(self, x: Tensor, rope: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        """K (normed, rotated) and V (raw) [R, G, T, h] of context features or of block states."""
        key, value = (_heads(part, self.head_dim) for part in (self.k_proj(x), self.v_proj(x)))
        return rotate(self.k_norm(key), *rope).transpose(1, 2), value.transpose(1, 2)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], key_values: KeyValues, mask: Tensor | None
    ) -> Tensor:
        query = rotate(self.q_norm(_heads(self.q_proj(x), self.head_dim)), *rope).transpose(1, 2)
        key, value = key_values(self.index, *self.key_values(x, rope))
        out = attend(query, key, value, mask)
        return self.o_proj(out.transpose(1, 2).flatten(2))


def _heads(x: Tensor, head_dim: int) -> Tensor:
    return x.unflatten(-1, (-1, head_dim))  # [R, T, heads, h]


class DrafterLayer(nn.Module):
    """A pre-norm Qwen3 layer. Only the block's states pass input_layernorm; the context does not."""

    def __init__(self, config: Qwen3Config, index: int) -> None:
        super().__init__()
        self.self_attn = DrafterAttention(config, index)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], key_values: KeyValues, mask: Tensor | None
    ) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), rope, key_values, mask)
        return x + self.mlp(self.post_attention_layernorm(x))


class DSparkDrafter(nn.Module):
    """The whole drafter. Embedding and LM head are the target's and are frozen.

    Args:
        config: a native config: Qwen3's fields plus block_size, target_layer_ids, mask_token_id,
            markov_rank, markov_head_type, enable_confidence_head, confidence_head_with_markov, and
            draft_vocab_size where the draft vocabulary is a part of the target's.
        embed_tokens: token ids to [..., D].
        lm_head: the target's, or its rows of the draft vocabulary.
    """

    d2t: Tensor | None  # [Vd] int64: target id minus draft id; None when they are the same

    embed_tokens: nn.Module
    lm_head: LMHead
    markov_head: MarkovHead
    confidence_head: ConfidenceHead | None

    def __init__(self, config: Qwen3Config, embed_tokens: nn.Module, lm_head: LMHead) -> None:
        super().__init__()
        self.config = config
        self.block_size: int = config.block_size
        self.target_layer_ids: list[int] = list(config.target_layer_ids)
        hidden = config.hidden_size
        self.fc = nn.Linear(len(self.target_layer_ids) * hidden, hidden, bias=False)
        self.hidden_norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.layers = nn.ModuleList(
            DrafterLayer(config, index) for index in range(config.num_hidden_layers)
        )
        self.norm = nn.RMSNorm(hidden, eps=config.rms_norm_eps)
        self.rotary_emb = Qwen3RotaryEmbedding(config)
        self.markov_head = make_markov_head(config)
        self.confidence_head = ConfidenceHead(config) if config.enable_confidence_head else None
        reduced = getattr(config, "draft_vocab_size", None)
        offsets = torch.zeros(reduced, dtype=torch.long) if reduced else None
        self.register_buffer("d2t", offsets)
        # One for each position: confidence is sigmoid((logit + shift) / temperature).
        self.temperatures: list[float] = [1.0] * self.block_size
        self.shifts: list[float] = []  # none: 0
        # Held outside the module tree: they are the target's parameters, not the drafter's.
        self.__dict__["embed_tokens"] = embed_tokens
        self.__dict__["lm_head"] = lm_head

    def context_features(self, taps: Tensor) -> Tensor:
        """Tapped target states [R, T, M*D] to context features [R, T, D]: once, for all layers."""
        return self.hidden_norm(self.fc(taps))

    def context_key_values(self, taps: Tensor, positions: Tensor) -> list[tuple[Tensor, Tensor]]:
        """K and V [R, G, T, h] of every layer for verified tokens at `positions` [R, T]."""
        features = self.context_features(taps)
        rope = rope_factors(self.rotary_emb, features, positions)
        return [layer.self_attn.key_values(features, rope) for layer in self.layers]  # type: ignore[union-attr, operator]

    def block_inputs(self, anchors: Tensor) -> Tensor:
        """Token ids [R] to the block's input ids [R, B]: the anchor, then masks."""
        block = anchors.new_full((anchors.shape[0], self.block_size), self.config.mask_token_id)
        block[:, 0] = anchors
        return block

    def block_hidden(
        self, block_ids: Tensor, positions: Tensor, key_values: KeyValues, mask: Tensor | None
    ) -> Tensor:
        """States after the final norm [R, Q, D] of block tokens [R, Q] at `positions` [R, Q]."""
        x = self.embed_tokens(block_ids).to(self.norm.weight.dtype)
        rope = rope_factors(self.rotary_emb, x, positions)
        for layer in self.layers:
            x = layer(x, rope, key_values, mask)
        return self.norm(x)

    def pack(self) -> None:
        """Lay the weights out for decoding on a CPU: faster, and no more to be trained or saved."""
        pack_linears(self)
        self.__dict__["lm_head"] = self.lm_head.pack()

    @property
    def draft_ids(self) -> Tensor:
        """Target ids of the draft vocabulary [Vd], ascending."""
        if self.d2t is None:
            return torch.arange(self.config.vocab_size, device=self.norm.weight.device)
        return self.d2t + torch.arange(len(self.d2t), device=self.d2t.device)

    def to_target(self, tokens: Tensor) -> Tensor:
        """Draft tokens [...] as the target's ids [...]."""
        return tokens if self.d2t is None else tokens + self.d2t[tokens]

    def spread(self, probs: Tensor) -> Tensor:
        """Distributions [..., Vd] over the target's whole vocabulary [..., V], 0 outside the draft's."""
        if self.d2t is None:
            return probs
        whole = probs.new_zeros(*probs.shape[:-1], self.config.vocab_size)
        whole[..., self.draft_ids] = probs
        return whole

    def confidence_logits(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Logits [...] of "this draft token survives" for states [..., D] and previous tokens [...].

        A checkpoint without a confidence head trusts every token (+inf).
        """
        if self.confidence_head is None:
            return hidden.new_full(hidden.shape[:-1], float("inf"))
        return self.confidence_head(hidden, self.markov_head.embed(previous))
