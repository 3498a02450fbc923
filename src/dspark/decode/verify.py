"""Which draft tokens the target accepts, and the token that follows them.

Target row i of a verify pass judges draft token i+1: row 0 belongs to the anchor. Greedy: accept
while the draft equals the target's argmax. Sampling: accept x with min(1, p(x)/q(x)), else draw from
the normalised positive part of p - q. One token of the target's always follows. R rows, k drafted.
"""

from __future__ import annotations

import torch
from torch import Tensor

from dspark.decode.sampling import draw
from dspark.kernels.switch import kernels_used


def accept_greedy(target: Tensor, drafted: Tensor, limits: Tensor) -> tuple[Tensor, Tensor]:
    """Accepted counts [R] and next tokens [R].

    Args:
        target: the target's argmax after the anchor and after each draft token [R, k+1].
        drafted: draft tokens [R, k].
        limits: how many of each row's draft tokens may be accepted [R].
    """
    if kernels_used():
        from dspark.kernels import greedy_accept

        return greedy_accept.accept_greedy(target, drafted, limits)
    match = (drafted == target[:, :-1]) & _within(limits, drafted.shape[1])
    accepted = match.long().cumprod(-1).sum(-1)
    return accepted, target.gather(1, accepted[:, None]).squeeze(1)


def accept_sampled(
    target: Tensor, draft: Tensor, drafted: Tensor, limits: Tensor, uniforms: Tensor
) -> tuple[Tensor, Tensor]:
    """Accepted counts [R] and next tokens [R] by rejection sampling (Leviathan et al., 2211.17192).

    Args:
        target: the target's distributions [R, k+1, V] float32.
        draft: what each draft token was drawn from [R, k, V] float32.
        drafted: draft tokens [R, k].
        limits: how many of each row's draft tokens may be accepted [R].
        uniforms: [R, k+1] in [0, 1): one for each test, the last for the token that follows.
    """
    if kernels_used():
        from dspark.kernels import rejection

        return rejection.accept_sampled(target, draft, drafted, limits, uniforms)
    width = drafted.shape[1]
    p = target[:, :width].gather(2, drafted[..., None]).squeeze(2)
    q = draft.gather(2, drafted[..., None]).squeeze(2)
    kept = (uniforms[:, :width] * q < p) & _within(limits, width)
    accepted = kept.long().cumprod(-1).sum(-1)
    rows = torch.arange(target.shape[0], device=target.device)
    follow = target[rows, accepted]
    if width:
        rejected = accepted < limits  # else the row's whole block was accepted: plain target
        residual = (follow - draft[rows, accepted.clamp_max(width - 1)]).clamp_min(0)
        # p and q equal up to rounding leave no residual, and then p itself is the right answer.
        use = rejected & (residual.sum(-1) > 1e-8)
        follow = torch.where(use[:, None], residual, follow)
    return accepted, draw(follow, uniforms[:, -1])


def _within(limits: Tensor, width: int) -> Tensor:
    return torch.arange(width, device=limits.device) < limits[:, None]
