"""Fitting the confidence head anew on text that the drafter was not trained on.

A drafter does better on its training text than on any other, and the confidence head, which is taught
beside it on the same text, learns to expect that. It is one linear map, so it can be fitted again on
few unseen conversations: logistic regression of "the token survives" over the slots that a decoder
would come to. It may scale the trained map and give each position a level of its own at little cost,
and depart from the trained direction at a price that a thousand blocks begin to outweigh. The levels
are not kept (a checkpoint has one bias): calibration fits a shift for each position afterwards.

All is computed in float64 with NumPy on the CPU. N slots, W width of what the head reads.
"""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.optimize import minimize
from scipy.special import expit

from dspark.models.drafter import DSparkDrafter
from dspark.train.cache import CachedConversation
from dspark.train.evaluate import Reached, reached_slots

Floats = NDArray[np.float64]
DEPARTURE = (
    1000.0  # price of the squared departure from the trained direction, per unit of deviation
)
LEVEL = 1.0  # price of the squared levels and of the squared change of scale: to keep them finite


def refit_confidence(drafter: DSparkDrafter, items: Iterable[CachedConversation]) -> None:
    """Fit the confidence head of `drafter` on unseen responses; a drafter without one stays as it is.

    The new values are those that a bfloat16 checkpoint can hold.
    """
    head = drafter.confidence_head
    if head is None:
        return
    parts = [reached_slots(drafter, item) for item in items]
    parts = [part for part in parts if len(part.survived)]
    if not parts:
        return
    slots = Reached(*(torch.cat(column) for column in zip(*map(_columns, parts), strict=True)))
    weight, bias = fit_head(
        slots.features.double().numpy(),
        slots.position.numpy(),
        slots.survived.double().numpy(),
        head.proj.weight[0].detach().double().cpu().numpy(),
        head.proj.bias.item(),
    )
    with torch.no_grad():
        head.proj.weight[0] = torch.from_numpy(weight).bfloat16()
        head.proj.bias[0] = torch.tensor(bias).bfloat16()


def _columns(part: Reached) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return part.features, part.position, part.survived


def fit_head(
    features: Floats, position: NDArray[np.int64], survived: Floats, weight: Floats, bias: float
) -> tuple[Floats, float]:
    """Weight [W] and bias of the fitted head.

    Args:
        features: what the head reads [N, W].
        position: of each slot in its block [N].
        survived: whether its token did [N], 0 or 1.
        weight: the trained one [W].
    """
    deviation = features.std(0)
    deviation[deviation == 0] = 1
    centred = (features - features.mean(0)) / deviation
    trained = features @ weight + bias
    levels = int(position.max()) + 1
    one_hot = np.eye(levels)[position]
    inputs = np.concatenate([trained[:, None], one_hot, centred], axis=1)
    start = np.zeros(inputs.shape[1])
    start[0] = 1  # the trained head as it is
    price = np.concatenate([np.full(1 + levels, LEVEL), np.full(centred.shape[1], DEPARTURE)])

    def loss(values: Floats) -> tuple[float, Floats]:
        logits, away = inputs @ values, values - start
        fit = (np.logaddexp(0, logits) - survived * logits).sum()
        gradient = (expit(logits) - survived) @ inputs
        return fit + (price * away**2).sum(), gradient + 2 * price * away

    found = minimize(loss, start, jac=True, method="L-BFGS-B", options={"maxiter": 1000}).x
    scale, level, departure = found[0], found[1 : 1 + levels], found[1 + levels :] / deviation
    mean = (one_hot @ level).mean()  # the levels' share of one bias
    return scale * weight + departure, float(scale * bias + mean - features.mean(0) @ departure)
