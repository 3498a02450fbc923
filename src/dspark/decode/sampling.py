"""How tokens are chosen: greedy, or sampling with temperature, top-k and top-p.

Target and draft probabilities come from the same function, in float32, and a draft token is drawn
from exactly the distribution that verification is told of: otherwise rejection sampling is biased.
Draws are inverse-CDF with uniforms from a generator of the request's own, so that a request's output
depends on its seed alone and not on what else is in the batch. R rows, T positions, V vocabulary.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Sampling:
    """One request's settings. temperature 0 is greedy; top_k 0 and top_p 1 keep everything."""

    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0

    @property
    def greedy(self) -> bool:
        return self.temperature == 0.0


def named_generator(name: str) -> torch.Generator:
    """A generator that depends on a name alone: the same numbers, whatever else was drawn before."""
    key = hashlib.sha256(name.encode()).digest()
    return torch.Generator().manual_seed(int.from_bytes(key[:8], "big") >> 1)


def request_generator(sampling: Sampling, request_id: str) -> torch.Generator:
    """A generator that depends on the run's seed and the request's id alone."""
    return named_generator(f"{sampling.seed}/{request_id}")


def probabilities(logits: Tensor, rows: Sequence[Sampling]) -> Tensor:
    """Distributions that tokens are drawn from: logits [R, T, V] to float32 [R, T, V].

    A greedy row's distribution is one-hot at its argmax, so greedy rows can share a batch with
    sampling rows: rejection sampling of one-hots is exactly the greedy rule.
    """
    out = torch.empty_like(logits, dtype=torch.float32)
    for row, sampling in enumerate(rows):
        if sampling.greedy:
            out[row] = one_hot(logits[row].argmax(-1), logits.shape[-1])
        else:
            out[row] = _truncated_softmax(logits[row].float() / sampling.temperature, sampling)
    return out


def one_hot(tokens: Tensor, vocab: int) -> Tensor:
    """Token ids [...] to float32 one-hot distributions [..., V]."""
    return torch.nn.functional.one_hot(tokens, vocab).float()


def _truncated_softmax(logits: Tensor, sampling: Sampling) -> Tensor:
    """Softmax over the top-k tokens, then over the smallest set that holds top_p of that mass."""
    if sampling.top_k:
        kth = logits.topk(min(sampling.top_k, logits.shape[-1])).values[..., -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    probs = logits.softmax(-1)
    if sampling.top_p < 1:
        ordered, order = probs.sort(-1, descending=True)
        # A token is kept while the mass before it is short of top_p: the first one always is.
        dropped = ordered.cumsum(-1) - ordered >= sampling.top_p
        probs = probs.masked_fill(torch.zeros_like(dropped).scatter(-1, order, dropped), 0.0)
        probs = probs / probs.sum(-1, keepdim=True)
    return probs


def draw(probs: Tensor, uniforms: Tensor) -> Tensor:
    """Tokens [...] drawn from (unnormalised) distributions [..., V] with uniforms [...] in [0, 1)."""
    cdf = probs.double().cumsum(-1)
    threshold = uniforms.double()[..., None] * cdf[..., -1:]
    token = torch.searchsorted(cdf, threshold, right=True).squeeze(-1)
    return token.clamp_max(probs.shape[-1] - 1)


def draw_uniforms(
    generators: Sequence[torch.Generator], count: int, device: torch.device
) -> Tensor:
    """`count` uniforms for each row [R, count], each row's from its own generator."""
    rows = [torch.rand(count, generator=generator) for generator in generators]
    return torch.stack(rows).to(device)
