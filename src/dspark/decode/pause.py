"""Steps without a draft, while drafting doesn't pay (beside Algorithm 1 of arXiv 2607.05147, §4).

The schedule chooses how much of a draft to verify, but by then the draft is made. Under load it can
cost more than all that it promises; then it is left out for a while, and tried again now and then.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

from dspark.decode.schedule import StepCurve

MEMORY = 0.75  # weight of what earlier drafts promised against the newest one
LONGEST = (
    32  # steps without a draft, at most: every 33rd costs one draft to see whether it pays again
)


def promise(confidence: Tensor, limits: Tensor, curve: StepCurve) -> float:
    """Tokens a second expected of a drafted step over those of a plain one; above 1 drafting pays.

    Args:
        confidence: calibrated probabilities [R, n] that a draft token is accepted given that those
            before it are.
        limits: how many of each row are verified [R], 0..n.
        curve: one that knows plain steps.
    """
    assert curve.plain is not None, "the curve has no plain steps to compare with"
    rows, width = confidence.shape
    verified = torch.arange(width, device=limits.device) < limits[:, None]
    expected = rows + float(confidence.double().cumprod(-1)[verified].sum())
    drafted = expected * curve.steps_per_second(rows + int(limits.sum()))
    return drafted / (rows * curve.plain.steps_per_second(rows))


@dataclass
class Pause:
    """When to leave the draft out, for each number of rows by itself.

    It knows confidences of past steps alone, so the output distribution stays the target's.
    """

    curve: StepCurve
    _promised: dict[int, float] = field(default_factory=dict)  # running mean of `promise`, by rows
    _length: dict[int, int] = field(default_factory=dict)  # steps of the newest pause
    _left: dict[int, int] = field(default_factory=dict)  # steps until the next draft

    def skips(self, rows: int) -> bool:
        """Whether the step that begins now, of so many rows, goes without a draft."""
        left = self._left.get(rows, 0)
        self._left[rows] = max(0, left - 1)
        return left > 0

    def drafted(self, confidence: Tensor, limits: Tensor) -> None:
        """Note what a draft promised (see `promise`). Pauses double until drafting pays again."""
        rows, now = confidence.shape[0], promise(confidence, limits, self.curve)
        mean = MEMORY * self._promised.get(rows, now) + (1 - MEMORY) * now
        length = 0 if mean >= 1 else min(LONGEST, max(1, 2 * self._length.get(rows, 0)))
        self._promised[rows], self._length[rows], self._left[rows] = mean, length, length
