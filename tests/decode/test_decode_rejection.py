"""Acceptance: sampled text has exactly the target's distribution, greedy text is its argmax."""

from __future__ import annotations

from collections import Counter
from itertools import product
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from decode_helpers import make_drafter, make_target, request, serve
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from dspark.decode import engine as engine_module
from dspark.decode.engine import Engine
from dspark.decode.sampling import Sampling, draw, one_hot, probabilities
from dspark.decode.verify import accept_greedy, accept_sampled
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target

DRAWS = 200_000
WIDTH = 3


def chi_square(counts: Any, expected: Any) -> float:
    """p-value of counts against probabilities; rare cells are put together."""
    counts, expected = np.asarray(counts, float).ravel(), np.asarray(expected, float).ravel()
    expected = expected / expected.sum() * counts.sum()
    rare = expected < 5
    if rare.any():
        counts = np.append(counts[~rare], counts[rare].sum())
        expected = np.append(expected[~rare], expected[rare].sum())
    if expected[-1] == 0:
        assert counts[-1] == 0, "a token without probability came out"
        counts, expected = counts[:-1], expected[:-1]
    return float(stats.chisquare(counts, expected).pvalue)


def distributions(vocab: int, seed: int, zeros: int = 0) -> Tensor:
    """[WIDTH + 1, vocab] random ones, `zeros` tokens of each without probability."""
    generator = torch.Generator().manual_seed(seed)
    probs = torch.rand(WIDTH + 1, vocab, generator=generator) ** 2
    for row in probs:
        row[torch.randperm(vocab, generator=generator)[:zeros]] = 0
    return probs / probs.sum(-1, keepdim=True)


def trial(p: Tensor, q: Tensor, limit: int, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Many rows with the same distributions: drafted tokens, accepted counts, next tokens."""
    generator = torch.Generator().manual_seed(seed)
    draft = q[:WIDTH].expand(DRAWS, -1, -1)
    drafted = draw(draft, torch.rand(DRAWS, WIDTH, generator=generator))
    uniforms = torch.rand(DRAWS, WIDTH + 1, generator=generator)
    limits = torch.full((DRAWS,), limit)
    target = p.expand(DRAWS, -1, -1)
    accepted, following = accept_sampled(target, draft, drafted, limits, uniforms)
    return drafted, accepted, following


CASES = [(5, 1, 0), (6, 2, 1), (8, 3, 3)]  # vocabulary, seed, tokens without probability


@pytest.mark.parametrize(("vocab", "seed", "zeros"), CASES)
def test_every_emitted_token_has_the_targets_distribution(
    vocab: int, seed: int, zeros: int
) -> None:
    p, q = distributions(vocab, seed, zeros), distributions(vocab, seed + 100, zeros)
    drafted, accepted, following = trial(p, q, WIDTH)
    emitted = torch.cat([drafted, drafted[:, :1]], 1)
    emitted.scatter_(1, accepted[:, None], following[:, None])
    for position in range(WIDTH + 1):
        reached = accepted >= position
        counts = torch.bincount(emitted[reached, position], minlength=vocab)
        assert chi_square(counts, p[position]) > 1e-3


@pytest.mark.parametrize(("vocab", "seed", "zeros"), CASES)
def test_acceptance_rate_is_the_overlap_of_the_distributions(
    vocab: int, seed: int, zeros: int
) -> None:
    p, q = distributions(vocab, seed, zeros), distributions(vocab, seed + 100, zeros)
    _, accepted, _ = trial(p, q, WIDTH)
    for position in range(WIDTH):
        tried = int((accepted >= position).sum())
        kept = int((accepted > position).sum())
        overlap = float(torch.minimum(p[position], q[position]).sum())
        assert stats.binomtest(kept, tried, overlap).pvalue > 1e-3


def test_after_a_rejection_the_next_token_comes_from_the_residual() -> None:
    p, q = distributions(6, 2, 1), distributions(6, 102, 1)
    _, accepted, following = trial(p, q, WIDTH)
    for position in range(WIDTH):
        counts = torch.bincount(following[accepted == position], minlength=6)
        assert chi_square(counts, (p[position] - q[position]).clamp_min(0)) > 1e-3


@pytest.mark.parametrize("limit", range(WIDTH + 1))
def test_a_row_that_reaches_its_limit_goes_on_with_the_plain_target(limit: int) -> None:
    """Not with the residual: nothing was rejected where nothing was tested."""
    p, q = distributions(6, 2, 1), distributions(6, 102, 1)
    _, accepted, following = trial(p, q, limit)
    assert int(accepted.max()) == limit
    counts = torch.bincount(following[accepted == limit], minlength=6)
    assert chi_square(counts, p[limit]) > 1e-3


def test_limits_of_rows_in_one_batch_are_their_own() -> None:
    p = distributions(6, 2)
    limits = torch.tensor([0, 3, 1, 2])
    target, draft = p.expand(4, -1, -1), p[:WIDTH].expand(4, -1, -1)
    drafted = draw(draft, torch.rand(4, WIDTH))
    accepted, _ = accept_sampled(target, draft, drafted, limits, torch.rand(4, WIDTH + 1))
    assert accepted.tolist() == limits.tolist()


def test_equal_distributions_are_always_accepted() -> None:
    p = distributions(8, 3, 2)
    _, accepted, following = trial(p, p, WIDTH)
    assert bool((accepted == WIDTH).all())
    assert chi_square(torch.bincount(following, minlength=8), p[WIDTH]) > 1e-3


def test_disjoint_distributions_are_never_accepted() -> None:
    p, q = torch.zeros(WIDTH + 1, 6), torch.zeros(WIDTH + 1, 6)
    p[:, :3], q[:, 3:] = torch.tensor([0.2, 0.3, 0.5]), torch.tensor([0.6, 0.3, 0.1])
    _, accepted, following = trial(p, q, WIDTH)
    assert bool((accepted == 0).all())
    assert chi_square(torch.bincount(following, minlength=6), p[0]) > 1e-3


def test_a_token_without_target_probability_is_rejected_even_by_a_uniform_of_zero() -> None:
    p, q = torch.tensor([[[0.0, 1.0], [0.5, 0.5]]]), torch.tensor([[[1.0, 0.0]]])
    accepted, following = accept_sampled(
        p, q, torch.tensor([[0]]), torch.tensor([1]), torch.zeros(1, 2)
    )
    assert (accepted.tolist(), following.tolist()) == ([0], [1])


def test_wrong_draft_probabilities_are_noticed_by_these_tests() -> None:
    """A control: with a q that the tokens were not drawn from the text is biased."""
    p, q = distributions(5, 1), distributions(5, 101)
    generator = torch.Generator().manual_seed(0)
    drafted = draw(q[:WIDTH].expand(DRAWS, -1, -1), torch.rand(DRAWS, WIDTH, generator=generator))
    claimed = torch.full((DRAWS, WIDTH, 5), 0.2)
    accepted, following = accept_sampled(
        p.expand(DRAWS, -1, -1),
        claimed,
        drafted,
        torch.full((DRAWS,), WIDTH),
        torch.rand(DRAWS, WIDTH + 1, generator=generator),
    )
    first = torch.where(accepted > 0, drafted[:, 0], following)
    assert chi_square(torch.bincount(first, minlength=5), p[0]) < 1e-9


@settings(deadline=None, max_examples=80)
@given(data=st.data(), rows=st.integers(1, 5), width=st.integers(0, 4))
def test_greedy_acceptance_equals_a_loop(data: st.DataObject, rows: int, width: int) -> None:
    token = st.integers(0, 2)
    ids = st.lists(token, min_size=width, max_size=width)
    drafted = data.draw(st.lists(ids, min_size=rows, max_size=rows))
    row = st.lists(token, min_size=width + 1, max_size=width + 1)
    target = data.draw(st.lists(row, min_size=rows, max_size=rows))
    limits = data.draw(st.lists(st.integers(0, width), min_size=rows, max_size=rows))
    block = torch.tensor(drafted).reshape(rows, width).long()
    accepted, following = accept_greedy(torch.tensor(target), block, torch.tensor(limits))
    expected = []
    for index in range(rows):
        count = 0
        while count < limits[index] and drafted[index][count] == target[index][count]:
            count += 1
        expected.append((count, target[index][count]))
    assert list(zip(accepted.tolist(), following.tolist(), strict=True)) == expected


@settings(deadline=None, max_examples=40)
@given(seed=st.integers(0, 10**6), width=st.integers(0, 4))
def test_sampled_acceptance_of_one_hots_is_greedy_acceptance(seed: int, width: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    target = torch.randint(3, (6, width + 1), generator=generator)
    drafted = torch.randint(3, (6, width), generator=generator)
    limits = torch.randint(width + 1, (6,), generator=generator)
    sampled = accept_sampled(
        one_hot(target, 3),
        one_hot(drafted, 3),
        drafted,
        limits,
        torch.rand(6, width + 1, generator=generator),
    )
    greedy = accept_greedy(target, drafted, limits)
    assert [part.tolist() for part in sampled] == [part.tolist() for part in greedy]


# ----------------------------------------------------------------------------- the whole decoder

SIZE = 8  # of the vocabulary
PROMPT = [1, 5, 2]
REQUESTS = 2000


@pytest.fixture(scope="module")
def small() -> tuple[Target, DSparkDrafter]:
    """A target with a spread-out distribution and a drafter that overlaps it by about half."""
    target = make_target(vocab=SIZE, layers=2)
    drafter = make_drafter(target, layers=1, block_size=4, markov_rank=4)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.3)
        drafter.markov_head.markov_w2.weight.mul_(0.1)
    return target, drafter


def exact_pairs(target: Target, sampling: Sampling) -> np.ndarray:
    """Probability of each second and third token of the text, the first one summed over."""
    texts = torch.tensor([[*PROMPT, *rest] for rest in product(range(SIZE), repeat=2)])
    with torch.no_grad():
        logits = target.model(input_ids=texts).logits
    probs = probabilities(logits[:, len(PROMPT) - 1 :], [sampling] * len(texts)).double()
    first, second, third = probs.reshape(SIZE, SIZE, 3, SIZE).unbind(2)  # each [x1, x2, V]
    of_first = first[0, 0]
    of_second = second[:, 0]
    return torch.einsum("a,ab,abc->bc", of_first, of_second, third).numpy()


def sampled_pairs(target: Target, drafter: DSparkDrafter, k: int, sampling: Sampling) -> np.ndarray:
    engine = Engine(target, drafter, k=k, concurrency=256, capacity=len(PROMPT) + 3)
    items = [request(n, PROMPT, 3, sampling=sampling) for n in range(REQUESTS)]
    rows = serve(engine, items)
    pairs = Counter((row.output[1], row.output[2]) for row in rows.values())
    steps = [step for row in rows.values() for step in row.steps]
    verified, accepted = sum(s.verified for s in steps), sum(s.accepted for s in steps)
    assert k == 0 or 0.1 < accepted / verified < 0.9  # both branches are taken
    return np.array([[pairs[b, c] for c in range(SIZE)] for b in range(SIZE)])


@pytest.mark.parametrize(
    ("k", "sampling"),
    [
        (0, Sampling(1.0, seed=1)),
        (3, Sampling(1.0, seed=1)),
        (3, Sampling(0.7, top_k=4, seed=1)),
        (3, Sampling(1.3, top_p=0.8, seed=1)),
        (1, Sampling(1.2, 0.85, 6, seed=1)),
    ],
)
def test_decoded_pairs_have_the_targets_joint_distribution(
    small: tuple[Target, DSparkDrafter], k: int, sampling: Sampling
) -> None:
    target, drafter = small
    counts = sampled_pairs(target, drafter, k, sampling)
    assert chi_square(counts, exact_pairs(target, sampling)) > 1e-3


def test_a_wrong_q_in_the_decoder_is_noticed_by_this_test(
    small: tuple[Target, DSparkDrafter],
) -> None:
    target, drafter = small
    propose = engine_module.propose

    def lying(*args: Any) -> Any:
        draft = propose(*args)
        assert draft.probs is not None
        draft.probs = torch.full_like(draft.probs, 1 / SIZE)
        return draft

    sampling = Sampling(1.0, seed=1)
    with patch("dspark.decode.engine.propose", lying):
        counts = sampled_pairs(target, drafter, 3, sampling)
    assert chi_square(counts, exact_pairs(target, sampling)) < 1e-6


@pytest.mark.parametrize("threshold", [0.0, 0.45])
def test_long_texts_follow_the_targets_distribution_step_by_step(
    small: tuple[Target, DSparkDrafter], threshold: float
) -> None:
    """Each token's place in its own conditional distribution must be uniform (a randomised
    probability integral transform), whether blocks are verified whole or only as far as the
    drafter is confident."""
    target, drafter = small
    sampling = Sampling(0.9, seed=5)
    engine = Engine(
        target, drafter, k=4, concurrency=64, capacity=100, confidence_threshold=threshold
    )
    items = [request(n, PROMPT, 60, sampling=sampling) for n in range(128)]
    rows = serve(engine, items)
    if threshold:
        assert len({step.verified for row in rows.values() for step in row.steps}) > 1
    texts = torch.tensor([[*PROMPT, *row.output] for row in rows.values()])
    with torch.no_grad():
        logits = target.model(input_ids=texts[:, :-1]).logits[:, len(PROMPT) - 1 :]
    probs = probabilities(logits, [sampling] * len(texts)).double()
    cdf, tokens = probs.cumsum(-1), texts[:, len(PROMPT) :, None]
    above = cdf.gather(-1, tokens).squeeze(-1)
    width = probs.gather(-1, tokens).squeeze(-1)
    noise = torch.rand(width.shape, generator=torch.Generator().manual_seed(0), dtype=torch.double)
    places = (above - noise * width).flatten().numpy()
    assert stats.kstest(places, "uniform").pvalue > 1e-3
    assert chi_square(np.histogram(places, bins=20, range=(0, 1))[0], np.ones(20)) > 1e-3
