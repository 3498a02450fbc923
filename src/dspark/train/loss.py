"""The three losses of DSpark training (arXiv 2607.05147, section 4), as DeepSpec computes them.

L = 0.1 CE + 0.9 L1 + 1.0 confidence; each term is a mean over valid slots, slot t of a block weighing
exp(-t/4). CE is against the target's own text, L1 is the full L1 distance of the two distributions
(twice their total variation), and the confidence head is trained towards 1 - TV, the probability that
rejection sampling accepts the slot's token; or, for a drafter that is to decode greedily, towards
whether its likeliest token is the target's. Shapes: N slots, Vd draft vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional as F

from dspark.config import ConfidenceLabel, TrainConfig

LEAST = 0.5  # what a drawn slot weighs at least


@dataclass
class Losses:
    """Weighted means over the valid slots, scalars; `total` carries the gradient."""

    total: Tensor
    ce: Tensor
    l1: Tensor
    confidence: Tensor


def dspark_loss(
    draft_logits: Tensor,
    target_logits: Tensor,
    logz: Tensor,
    confidence_logits: Tensor,
    labels: Tensor,
    weights: Tensor,
    config: TrainConfig,
) -> Losses:
    """Losses of N slots.

    What the target holds for tokens outside the draft vocabulary is part of the L1 distance: no draft
    can reach it.

    Args:
        draft_logits: Markov-corrected [N, Vd].
        target_logits: the target's for the same tokens [N, Vd]; never receives a gradient.
        logz: log of the sum of exp of the target's logits over its whole vocabulary [N].
        confidence_logits: [N].
        labels: the target's own next tokens as draft tokens [N], -1 where there is none.
        weights: [N].
    """
    log_draft = draft_logits.float().log_softmax(-1)
    with torch.no_grad():
        target = (target_logits.float() - logz[:, None]).exp()
        outside = (1 - target.sum(-1)).clamp_min(0)
    distance = (log_draft.exp() - target).abs().sum(-1) + outside
    if config.confidence_label is ConfidenceLabel.agreement:
        accepted = (log_draft.detach().argmax(-1) == labels).float()
    else:
        accepted = (1 - 0.5 * distance.detach()).clamp(0, 1)
    confidence = F.binary_cross_entropy_with_logits(
        confidence_logits.float(), accepted, reduction="none"
    )
    cross_entropy = F.nll_loss(log_draft, labels, reduction="none", ignore_index=-1)
    ce = _mean(cross_entropy, weights * (labels >= 0))
    l1, sure = _mean(distance, weights), _mean(confidence, weights)
    total = config.weight_ce * ce + config.weight_l1 * l1 + config.weight_confidence * sure
    return Losses(total, ce.detach(), l1.detach(), sure.detach())


def slot_weights(offsets: Tensor, config: TrainConfig) -> Tensor:
    """Weights [N] of slots at these places in their blocks; where some are drawn, at least `LEAST`.

    A slot of weight w is then drawn with probability min(1, w / LEAST) (see `draw_slots`), so the sum
    over the drawn ones is the sum over all on average.
    """
    weights = torch.exp(-offsets / config.decay)
    return weights.clamp_min(LEAST) if config.draw_slots else weights


def draw_slots(shape: torch.Size, decay: float, generator: torch.Generator) -> Tensor:
    """Bool [b, A, B]: slots to compute, a slot of weight w with probability min(1, w / LEAST)."""
    likely = torch.exp(-torch.arange(shape[-1]) / decay) / LEAST
    return torch.rand(shape, generator=generator) < likely


def _mean(term: Tensor, weights: Tensor) -> Tensor:
    return (weights * term).sum() / (weights.sum() + 1e-6)
