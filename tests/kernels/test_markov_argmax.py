"""Base logits plus Markov bias, argmax: the kernel's token is PyTorch's.

Float sums differ in their last bits with the order of addition, so random logits are checked by how near
the chosen one is to the greatest (2e-5, and 2 ulp of float16); whole numbers are added exactly, and there
the token itself must be the same.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels need triton")

from dspark.kernels.markov_argmax import VOCAB, markov_argmax, reference

pytestmark = pytest.mark.filterwarnings(r"ignore:invalid value|All-NaN:RuntimeWarning:triton\.")

SHAPES = [(1, 300, 32), (3, 2 * VOCAB, 20), (17, 129, 64), (65, 1000, 16), (2, 97, 256)]


def inputs(
    rows: int, vocab: int, rank: int, device: str, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor, Tensor]:
    random = torch.Generator().manual_seed(vocab)
    sizes = [(rows, vocab), (rows, rank), (vocab, rank)]
    return tuple(torch.randn(size, generator=random).to(device, dtype) for size in sizes)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=["float32", "float16"])
@pytest.mark.parametrize(("rows", "vocab", "rank"), SHAPES)
def test_the_token_is_the_likeliest(
    rows: int, vocab: int, rank: int, dtype: torch.dtype, device: str
) -> None:
    base, latent, weight = inputs(rows, vocab, rank, device, dtype)
    tokens = markov_argmax(base, latent, weight)
    logits = (base + torch.nn.functional.linear(latent, weight)).float()
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    near = 2e-5 if dtype is torch.float32 else 2 * 2**-6  # of numbers between 16 and 64
    assert (logits.amax(1) - chosen <= near).all()
    assert (tokens == reference(base, latent, weight)).float().mean() > 0.8


@pytest.mark.parametrize(("rows", "vocab", "rank"), SHAPES)
def test_of_equals_the_first(rows: int, vocab: int, rank: int, device: str) -> None:
    """Small whole numbers, of which each row has many greatest ones."""
    base, latent, weight = (x.round().clamp(-1, 1) for x in inputs(rows, vocab, rank, device))
    latent[:, 1:] = 0
    logits = base + torch.nn.functional.linear(latent, weight)
    assert ((logits == logits.amax(1, keepdim=True)).sum(1) > 1).all()
    assert torch.equal(markov_argmax(base, latent, weight), reference(base, latent, weight))


def test_a_position_of_a_block(device: str) -> None:
    base, latent, weight = inputs(6, 300, 32, device)
    block = base.view(2, 3, 300)
    tokens = markov_argmax(block[:, 1], latent[:2], weight)
    assert torch.equal(tokens, reference(block[:, 1], latent[:2], weight))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")], ids=str)
def test_values_that_are_not_finite_count_as_in_pytorch(value: float, device: str) -> None:
    """NaN above infinity, infinity above all numbers, the first of several."""
    base, latent, weight = inputs(4, 300, 16, device)
    base[0, [7, 200]] = value
    base[1, [3, 290]], base[1, [5, 150]] = float("inf"), value
    base[2] = value
    latent[3, 2] = value
    assert torch.equal(markov_argmax(base, latent, weight), reference(base, latent, weight))


def test_signs_of_zero_are_equal(device: str) -> None:
    base = torch.full((1, 40), -1.0, device=device)
    base[0, 5], base[0, 9] = -0.0, 0.0
    zeros = torch.zeros(1, 16, device=device), torch.full((40, 16), -0.0, device=device)
    assert markov_argmax(base, *zeros).tolist() == [5]


def test_smollm2s_vocabulary(device: str) -> None:
    base, latent, weight = inputs(2, 49_152, 32, device)
    assert torch.equal(markov_argmax(base, latent, weight), reference(base, latent, weight))
