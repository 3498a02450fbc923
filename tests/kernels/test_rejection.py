"""Rejection sampling by kernels: the same tokens as decode.verify from the same uniforms, and the target's
distribution.
"""

from __future__ import annotations

import pytest
import torch
from scipy.stats import chisquare
from torch import Tensor

pytest.importorskip("triton", reason="kernels need triton")

from dspark.decode.sampling import draw
from dspark.decode.verify import accept_sampled as reference
from dspark.kernels.rejection import TILE, accept_sampled


def inputs(rows: int, k: int, vocab: int, device: str) -> tuple[Tensor, ...]:
    """Distributions that are near each other, drafts drawn from theirs, limits of 0 to k."""
    random = torch.Generator().manual_seed(rows * vocab + k)
    logits = torch.randn(rows, k + 1, vocab, generator=random)
    target = logits.softmax(-1)
    near = logits[:, :k] + 0.7 * torch.randn(rows, k, vocab, generator=random)
    draft = near.softmax(-1)
    drafted = draw(draft, torch.rand(rows, k, generator=random))
    limits = torch.randint(k + 1, (rows,), generator=random)
    uniforms = torch.rand(rows, k + 1, generator=random)
    return tuple(x.to(device) for x in (target, draft, drafted, limits, uniforms))


def same(given: tuple[Tensor, ...]) -> tuple[list[int], list[int]]:
    """What the kernels make of it, once it is known to be what the reference does."""
    accepted, following = accept_sampled(*given)
    expected = reference(*given)
    assert torch.equal(accepted, expected[0])
    assert torch.equal(following, expected[1])
    return accepted.tolist(), following.tolist()


@pytest.mark.parametrize("vocab", [5, TILE, 2 * TILE + 77])
@pytest.mark.parametrize("k", [0, 1, 3, 7])
@pytest.mark.parametrize("rows", [1, 12])
def test_tokens_are_the_references(rows: int, k: int, vocab: int, device: str) -> None:
    accepted, _ = same(inputs(rows, k, vocab, device))
    if rows > 1 and k > 1:
        assert len(set(accepted)) > 1


def test_a_vocabulary_of_which_little_is_possible(device: str) -> None:
    """Uniforms at both ends; the first and the last possible token lie in different tiles."""
    vocab = 3 * TILE + 5
    target = torch.zeros(4, 1, vocab, device=device)
    target[:, 0, [40, 2 * TILE + 9]] = torch.tensor([0.25, 0.75], device=device)
    uniforms = torch.tensor([[0.0], [0.2499], [0.25], [1 - 2**-24]], device=device)
    none = torch.zeros(4, 0, device=device, dtype=torch.long)
    limits = none.new_zeros(4)
    _, following = same((target, target[:, :0], none, limits, uniforms))
    assert following == [40, 40, 2 * TILE + 9, 2 * TILE + 9]


def test_equal_distributions_leave_the_targets_own(device: str) -> None:
    """A token whose q rounding put above p is rejected, and nothing of p exceeds q."""
    target = torch.tensor([[[0.5, 0.5, 0.0]] * 2], device=device)
    draft = torch.tensor([[[0.5, 0.6, 0.0]]], device=device)
    given = (
        target,
        draft,
        torch.tensor([[1]], device=device),
        torch.tensor([1], device=device),
        torch.tensor([[0.99, 0.7]], device=device),
    )
    assert same(given) == ([0], [1])


def test_a_part_of_longer_drafts(device: str) -> None:
    target, draft, drafted, limits, uniforms = inputs(4, 7, 50, device)
    limits = limits[:1].expand(4).clamp(1, 2)
    same((target[:, :3], draft[:, :2], drafted[:, :2], limits, uniforms[:, :3]))


@pytest.mark.parametrize("value", [float("nan"), float("inf")], ids=str)
def test_broken_distributions_end_in_the_same_token(value: float, device: str) -> None:
    target, draft, drafted, limits, uniforms = inputs(3, 2, 40, device)
    target[0, 0], draft[1, 0, 3] = float("nan"), value
    same((target, draft, drafted, limits, uniforms))


def test_the_emitted_token_has_the_targets_distribution(device: str) -> None:
    rows = 400
    p, q = ((0.4, 0.1, 0.2, 0.05, 0.25), (0.1, 0.5, 0.2, 0.15, 0.05))
    target = torch.tensor(p, device=device).expand(rows, 2, 5)
    draft = torch.tensor(q, device=device).expand(rows, 1, 5).contiguous()
    random = torch.Generator().manual_seed(0)
    uniforms = torch.rand(rows, 3, generator=random).to(device)
    drafted = draw(draft, uniforms[:, :1])
    limits = drafted.new_ones(rows)
    accepted, following = accept_sampled(
        target.contiguous(), draft, drafted, limits, uniforms[:, 1:]
    )
    emitted = torch.where(accepted > 0, drafted[:, 0], following)
    ours, proposed = (x.bincount(minlength=5).cpu() for x in (emitted, drafted[:, 0]))
    assert chisquare(ours, torch.tensor(p) * rows).pvalue > 1e-3
    assert chisquare(proposed, torch.tensor(p) * rows).pvalue < 1e-9
    assert 0.3 < accepted.float().mean() < 0.7
