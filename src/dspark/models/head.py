"""The output layer that target and drafter share, whole or for a part of the vocabulary."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from dspark.models.packed import can_pack, pack, packed_linear


@dataclass(frozen=True)
class LMHead:
    """An output layer: states [..., D] to logits [..., V]; `rows` gives that of some tokens alone."""

    weight: Tensor  # [V, D]
    bias: Tensor | None
    scale: float
    softcap: float | None
    packed: Tensor | None = None  # the weight once more, as `pack` lays it out

    def __call__(self, states: Tensor) -> Tensor:
        if self.packed is None:
            logits = nn.functional.linear(states, self.weight, self.bias)
        else:
            logits = packed_linear(states, self.packed, self.bias)
        if self.scale != 1.0:
            logits = logits * self.scale
        if self.softcap is not None:
            logits = torch.tanh(logits / self.softcap) * self.softcap
        return logits

    def rows(self, tokens: Tensor) -> LMHead:
        """The head of `tokens` [C]: states [..., D] to their logits [..., C]. Copies the rows."""
        bias = None if self.bias is None else self.bias[tokens]
        return replace(self, weight=self.weight[tokens], bias=bias, packed=None)

    def pack(self) -> LMHead:
        """The same head, faster where oneDNN can be used."""
        return replace(self, packed=pack(self.weight)) if can_pack(self.weight) else self
