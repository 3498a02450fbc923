"""Greedy acceptance by a kernel is exactly that of decode.verify."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from dspark.decode.verify import accept_greedy as reference
from dspark.kernels.greedy_accept import ROWS, accept_greedy


@pytest.mark.parametrize("k", [0, 1, 3, 7])
@pytest.mark.parametrize("rows", [1, 5, ROWS + 1])
def test_counts_and_tokens_are_the_references(rows: int, k: int, device: str) -> None:
    """Two tokens only, so that matches of every length occur; limits of 0 to k."""
    random = torch.Generator().manual_seed(rows + k)
    target = torch.randint(2, (rows, k + 1), generator=random).to(device)
    drafted = torch.randint(2, (rows, k), generator=random).to(device)
    limits = torch.randint(k + 1, (rows,), generator=random).to(device)
    accepted, following = accept_greedy(target, drafted, limits)
    expected = reference(target, drafted, limits)
    assert torch.equal(accepted, expected[0])
    assert torch.equal(following, expected[1])


def test_a_part_of_longer_rows(device: str) -> None:
    """A step verifies a draft's first tokens: they lie apart from row to row."""
    drafted = torch.arange(21, device=device).view(3, 7)[:, :2]
    target = torch.tensor([[0, 1, 50], [7, 9, 51], [0, 15, 52]], device=device)
    limits = torch.tensor([2], device=device).expand(3)
    accepted, following = accept_greedy(target, drafted, limits)
    assert accepted.tolist() == [2, 1, 0]
    assert following.tolist() == [50, 9, 0]


def test_a_mark_of_broken_logits_passes_through(device: str) -> None:
    target = torch.tensor([[4, -1, 6]], device=device)
    drafted = torch.tensor([[4, 5]], device=device)
    accepted, following = accept_greedy(target, drafted, torch.tensor([2], device=device))
    assert (accepted.tolist(), following.tolist()) == ([1], [-1])
