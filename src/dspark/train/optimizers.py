"""The optimizers of a training: AdamW alone, or Muon for the matrices beside it.

Muon (K. Jordan, 2024, "Muon: an optimizer for hidden layers in neural networks") makes each matrix's
step orthogonal. Embeddings, norms and heads are not what it is for: AdamW has them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch.optim import AdamW, Muon, Optimizer

from dspark.config import TrainConfig, TrainOptimizer
from dspark.models.drafter import DSparkDrafter

MOMENTUM = 0.9
NEWTON_SCHULZ = 4  # iterations that make a step orthogonal


def make_optimizers(drafter: DSparkDrafter, config: TrainConfig) -> list[Optimizer]:
    """The optimizers whose steps together are one step of the drafter."""
    hidden = (drafter.fc, drafter.layers)
    matrices = [weight for part in hidden for weight in part.parameters() if weight.ndim == 2]
    taken = {id(weight) for weight in matrices}
    rest = [weight for weight in drafter.parameters() if id(weight) not in taken]
    if config.optimizer is TrainOptimizer.adamw:
        decayed: dict[str, Any] = {"params": matrices, "weight_decay": config.weight_decay}
        return [AdamW([decayed, {"params": rest}], lr=config.lr, weight_decay=0.0, fused=True)]
    muon = Muon(
        matrices,
        lr=config.lr,
        weight_decay=config.weight_decay,
        momentum=MOMENTUM,
        ns_steps=NEWTON_SCHULZ,
        adjust_lr_fn="match_rms_adamw",  # so that one learning rate serves both
    )
    return [muon, AdamW(rest, lr=config.lr, weight_decay=0.0, fused=True)]


def set_rate(optimizers: Sequence[Optimizer], rate: float) -> None:
    """Let the next steps have this learning rate."""
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["lr"] = rate
