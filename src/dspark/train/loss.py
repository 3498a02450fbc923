"""The three losses of DSpark training (arXiv 2607.05147, section 4), as DeepSpec computes them.

L = 0.1 CE + 0.9 L1 + 1.0 confidence; each term is a mean over valid slots, slot t of a block weighing
exp(-t/4). CE is against the target's own text, L1 is the full L1 distance of the two distributions
(twice their total variation), and the confidence head is trained towards 1 - TV, the probability that
rejection sampling accepts the slot's token.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark.config import TrainConfig


@dataclass
class Losses:
    """Weighted means over the valid slots; `total` carries the gradient."""

    total: Tensor
    ce: float
    l1: float
    confidence: float


def slot_weights(valid: Tensor, decay: float) -> Tensor:
    """Weights [..., B] of a block's slots: exp(-t/decay) where valid [..., B], else 0."""
    slots = torch.arange(valid.shape[-1], device=valid.device)
    return valid * torch.exp(-slots / decay)


def dspark_loss(
    draft_logits: Tensor,
    target_logits: Tensor,
    confidence_logits: Tensor,
    labels: Tensor,
    weights: Tensor,
    config: TrainConfig,
) -> Losses:
    """Losses of N slots.

    Args:
        draft_logits: Markov-corrected [N, V].
        target_logits: the target's at the same positions [N, V]; never receives a gradient.
        confidence_logits: [N].
        labels: the target's own next tokens [N].
        weights: [N], see `slot_weights`.
    """
    log_draft = draft_logits.float().log_softmax(-1)
    with torch.no_grad():
        target = target_logits.float().softmax(-1)
    distance = (log_draft.exp() - target).abs().sum(-1)
    survival = (1 - 0.5 * distance.detach()).clamp(0, 1)
    terms = {
        "ce": F.nll_loss(log_draft, labels, reduction="none"),
        "l1": distance,
        "confidence": F.binary_cross_entropy_with_logits(
            confidence_logits.float(), survival, reduction="none"
        ),
    }
    mean = {name: (weights * term).sum() / (weights.sum() + 1e-6) for name, term in terms.items()}
    total = (
        config.weight_ce * mean["ce"]
        + config.weight_l1 * mean["l1"]
        + config.weight_confidence * mean["confidence"]
    )
    return Losses(total, *(mean[name].item() for name in ("ce", "l1", "confidence")))
