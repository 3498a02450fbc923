"""The sequential part of DSpark: Markov heads and the confidence head (arXiv 2607.05147, section 3).

The block's base logits are made in parallel; a Markov head adds to position t a low-rank bias that
depends on the token chosen at t-1, so tokens are chosen left to right. W1 is over the target's whole
vocabulary, W2 over the draft's. Shapes: R rows, D hidden size, Vd draft vocabulary, r Markov rank.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.qwen3.configuration_qwen3 import Qwen3Config

from dspark.errors import UserError, nearest


class MarkovHead(nn.Module):
    """vanilla: bias = W2 · W1[previous token]. Base of the gated and the rnn head."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.rank: int = config.markov_rank
        drafted = getattr(config, "draft_vocab_size", None) or config.vocab_size
        self.markov_w1 = nn.Embedding(config.vocab_size, self.rank)
        self.markov_w2 = nn.Linear(self.rank, drafted, bias=False)

    def embed(self, previous: Tensor) -> Tensor:
        """W1 of previous tokens [...] as [..., r]."""
        return self.markov_w1(previous)

    def initial_state(self, rows: int) -> Tensor | None:
        """State before a block's first token; None for heads that keep none."""
        return None

    def latent(
        self, hidden: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        """Low-rank bias [R, r] at one position from its state [R, D] and previous tokens [R]."""
        return self.embed(previous), state

    def bias(self, latent: Tensor) -> Tensor:
        """Latents [..., r] to logit biases [..., Vd]."""
        return self.markov_w2(latent)

    def block_latents(self, hidden: Tensor, previous: Tensor) -> Tensor:
        """Latents [R, B, r] of whole blocks with known previous tokens [R, B] (teacher forcing)."""
        state, latents = self.initial_state(hidden.shape[0]), []
        for position in range(hidden.shape[1]):
            latent, state = self.latent(hidden[:, position], previous[:, position], state)
            latents.append(latent)
        return torch.stack(latents, dim=1)


class GatedMarkovHead(MarkovHead):
    """gated: gate = sigmoid(gate_proj([h; W1[previous]])), bias = W2 · (gate * W1[previous])."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        self.gate_proj = nn.Linear(config.hidden_size + self.rank, self.rank)

    def latent(
        self, hidden: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        embedded = self.embed(previous)
        gate = torch.sigmoid(self.gate_proj(torch.cat([hidden, embedded], dim=-1)))
        return gate * embedded, state


class RnnMarkovHead(MarkovHead):
    """rnn: a gated recurrence over the block; the bias reads its output gate, not its state."""

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__(config)
        self.joint_proj = nn.Linear(2 * self.rank + config.hidden_size, 3 * self.rank)

    def initial_state(self, rows: int) -> Tensor:
        return self.markov_w1.weight.new_zeros(rows, self.rank)

    def latent(
        self, hidden: Tensor, previous: Tensor, state: Tensor | None
    ) -> tuple[Tensor, Tensor | None]:
        assert state is not None
        joint = self.joint_proj(torch.cat([state, self.embed(previous), hidden], dim=-1))
        gate, candidate, output = joint.chunk(3, dim=-1)
        gate = torch.sigmoid(gate)
        state = gate * state + (1 - gate) * torch.tanh(candidate)
        return torch.tanh(output), state


class ConfidenceHead(nn.Module):
    """Probability that a draft token survives given that all before it did, as a logit.

    Reads [h; W1[previous]], or h alone when confidence_head_with_markov is false. Computed in
    float32 whatever the drafter's dtype is: it is compared with thresholds.
    """

    def __init__(self, config: Qwen3Config) -> None:
        super().__init__()
        self.with_markov: bool = config.confidence_head_with_markov
        width = config.hidden_size + (config.markov_rank if self.with_markov else 0)
        self.proj = nn.Linear(width, 1)

    def features(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """What is read of states [..., D] and W1 of the previous tokens [..., r]: [..., W]."""
        return torch.cat([hidden, embedded], dim=-1) if self.with_markov else hidden

    def forward(self, hidden: Tensor, embedded: Tensor) -> Tensor:
        """States [..., D] and W1 of the previous tokens [..., r] to logits [...], float32."""
        features = self.features(hidden, embedded)
        return nn.functional.linear(
            features.float(), self.proj.weight.float(), self.proj.bias.float()
        ).squeeze(-1)


MARKOV_HEADS: dict[str, type[MarkovHead]] = {
    "vanilla": MarkovHead,
    "gated": GatedMarkovHead,
    "rnn": RnnMarkovHead,
}


def make_markov_head(config: Qwen3Config) -> MarkovHead:
    """The head that config.markov_head_type names.

    Raises:
        UserError: an unknown type, or a rank below 1.
    """
    kind = config.markov_head_type
    if kind not in MARKOV_HEADS:
        raise UserError(f"markov_head_type '{kind}' is unknown: {nearest(kind, MARKOV_HEADS)}")
    if config.markov_rank < 1:
        raise UserError(f"markov_rank is {config.markov_rank}: a DSpark drafter needs at least 1")
    return MARKOV_HEADS[kind](config)
