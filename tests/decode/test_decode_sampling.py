"""Distributions, draws and generators, and sampled text that depends on its own request alone."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from decode_helpers import (
    VOCAB,
    alone,
    make_bigram_drafter,
    make_target,
    need,
    request,
    serve,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.decode.engine import Engine, Request, Row
from dspark.decode.sampling import (
    Sampling,
    draw,
    draw_uniforms,
    one_hot,
    probabilities,
    request_generator,
)
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target


def slow(logits: Sequence[float], sampling: Sampling) -> np.ndarray:
    """The distribution of one position, token by token in float64."""
    values = np.asarray(logits, dtype=np.float64)
    order = sorted(range(len(values)), key=lambda token: -values[token])
    if sampling.greedy:
        return np.eye(len(values))[order[0]]
    keep = order[: sampling.top_k] if sampling.top_k else order
    weights = {
        token: np.exp((values[token] - values.max()) / sampling.temperature) for token in keep
    }
    total = sum(weights.values())
    nucleus, mass = [], 0.0
    for token in keep:
        if mass >= sampling.top_p:
            break
        nucleus.append(token)
        mass += weights[token] / total
    out = np.zeros(len(values))
    for token in nucleus:
        out[token] = weights[token] / total / mass
    return out


settings_of_a_row = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.7]),
    top_p=st.sampled_from([0.05, 0.37, 0.62, 0.93, 1.0]),
    top_k=st.sampled_from([0, 1, 2, 5, 11, 200]),
)


@settings(deadline=None, max_examples=80)
@given(
    rows=st.lists(settings_of_a_row, min_size=1, max_size=4),
    width=st.integers(1, 3),
    seed=st.integers(0, 10**6),
)
def test_probabilities_equal_a_slow_reference(rows: list[Sampling], width: int, seed: int) -> None:
    """Every row by its own settings, greedy and sampling rows side by side."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(len(rows), width, 13, generator=generator) * 2
    found = probabilities(logits, rows)
    assert found.dtype == torch.float32
    for row, sampling in enumerate(rows):
        for position in range(width):
            expected = slow(logits[row, position].tolist(), sampling)
            np.testing.assert_allclose(found[row, position], expected, atol=2e-6)


def test_a_greedy_row_is_one_hot_at_its_argmax() -> None:
    logits = torch.tensor([[[0.0, 3.0, 1.0]], [[2.0, 0.0, 1.0]]])
    probs = probabilities(logits, [Sampling(), Sampling(temperature=1e-3)])
    assert probs[0].tolist() == [[0.0, 1.0, 0.0]]
    assert probs[1, 0, 0] == 1  # and a temperature close to zero makes no NaN


@pytest.mark.parametrize("sampling", [Sampling(1.0, top_k=1), Sampling(1.0, top_p=1e-6)])
def test_the_most_probable_token_always_stays(sampling: Sampling) -> None:
    probs = probabilities(torch.randn(1, 5, 9), [sampling])
    assert torch.equal(probs.max(-1).values, torch.ones(1, 5))
    assert torch.equal(probs.sum(-1), torch.ones(1, 5))


def test_reduced_precision_logits_give_float32_distributions() -> None:
    logits = torch.randn(2, 3, 50).bfloat16()
    probs = probabilities(logits, [Sampling(0.8, 0.9, 20), Sampling()])
    assert probs.dtype == torch.float32
    torch.testing.assert_close(probs.sum(-1), torch.ones(2, 3))


def test_one_hot_keeps_the_shape() -> None:
    assert one_hot(torch.tensor([[1, 0]]), 3).tolist() == [[[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]]


BELOW_ONE = 1 - 2**-24  # the greatest value that torch.rand gives in float32


@settings(deadline=None, max_examples=150)
@given(
    weights=st.lists(
        st.one_of(st.just(0.0), st.floats(2**-24, 5.0, width=32)), min_size=1, max_size=9
    ).filter(any),
    uniform=st.one_of(
        st.just(0.0), st.just(BELOW_ONE), st.floats(0, 1, width=32, exclude_max=True)
    ),
)
def test_draw_is_the_inverse_cdf_and_never_takes_what_has_no_probability(
    weights: list[float], uniform: float
) -> None:
    probs = torch.tensor([weights])  # draw() takes unnormalised ones too
    token = int(draw(probs, torch.tensor([uniform])))
    cdf = np.cumsum(np.asarray(probs[0].tolist()))
    assert weights[token] > 0
    before = cdf[token - 1] if token else 0.0
    assert before <= uniform * cdf[-1] < cdf[token]


def test_draw_follows_the_probabilities() -> None:
    probs = torch.tensor([0.5, 0.0, 0.2, 0.3])
    uniforms = (torch.arange(1000) + 0.5) / 1000
    counts = torch.bincount(draw(probs.expand(1000, 4), uniforms), minlength=4)
    assert counts.tolist() == [500, 0, 200, 300]


def test_a_generator_depends_on_seed_and_id_alone() -> None:
    def numbers(seed: int, name: str, **rest: float) -> list[float]:
        generator = request_generator(Sampling(seed=seed, **rest), name)  # type: ignore[arg-type]
        return torch.rand(4, generator=generator).tolist()

    assert numbers(3, "a#0") == numbers(3, "a#0", temperature=0.5, top_p=0.3, top_k=7)
    different = [numbers(3, "a#0"), numbers(4, "a#0"), numbers(3, "b#0"), numbers(3, "a#1")]
    assert len({tuple(values) for values in different}) == 4
    torch.manual_seed(0)
    first = numbers(3, "a#0")
    torch.manual_seed(1)
    assert numbers(3, "a#0") == first


def test_each_rows_uniforms_come_from_its_own_generator() -> None:
    def generators(names: str) -> list[torch.Generator]:
        return [request_generator(Sampling(), name) for name in names]

    both = draw_uniforms(generators("ab"), 5, torch.device("cpu"))
    swapped = draw_uniforms(generators("ba"), 5, torch.device("cpu"))
    assert both.shape == (2, 5)
    assert torch.equal(both, swapped.flip(0))
    assert bool(((both >= 0) & (both < 1)).all())


# ---------------------------------------------------------------------------------- whole engines


@pytest.fixture(scope="module")
def models() -> tuple[Target, DSparkDrafter]:
    target = make_target(embed=3)
    return target, make_bigram_drafter(target)


def mixed_requests(seed: int = 7) -> list[Request]:
    rows = [
        Sampling(1.0, seed=seed),
        Sampling(0.0, seed=seed),
        Sampling(0.6, top_k=5, seed=seed),
        Sampling(1.4, top_p=0.8, seed=seed),
        Sampling(0.9, 0.7, 9, seed=seed),
    ]
    return [request(n, range(n, 2 * n + 2), 16, sampling=row) for n, row in enumerate(rows)]


def columns(row: Row) -> list[tuple[int, ...]]:
    return [(s.emitted, s.verified, s.accepted, s.cut) for s in row.steps]


@pytest.mark.parametrize("k", [0, 1, 3, 7])
@pytest.mark.parametrize("slots", [2, 4])
def test_a_sampled_request_does_not_depend_on_its_batch(
    models: tuple[Target, DSparkDrafter], k: int, slots: int
) -> None:
    target, drafter = models
    items = mixed_requests()
    engine = Engine(target, drafter, k=k, concurrency=slots, capacity=need(items))
    rows = serve(engine, items)
    for item in items:
        single = alone(target, item, drafter, k)
        assert rows[item.prompt_id].output == single.output
        assert columns(rows[item.prompt_id]) == columns(single)


def test_a_sampled_request_does_not_depend_on_what_other_rows_verify(
    models: tuple[Target, DSparkDrafter],
) -> None:
    """A confidence threshold gives rows different widths in one batch."""
    target, drafter = models
    items = mixed_requests()

    def engine(slots: int) -> Engine:
        return Engine(
            target, drafter, k=5, concurrency=slots, capacity=need(items), confidence_threshold=0.4
        )

    rows = serve(engine(4), items)
    assert len({step.verified for row in rows.values() for step in row.steps}) > 1
    for item in items:
        single = serve(engine(1), [item])[item.prompt_id]
        assert rows[item.prompt_id].output == single.output
        assert columns(rows[item.prompt_id]) == columns(single)


def test_a_greedy_row_among_sampling_rows_is_greedy(
    models: tuple[Target, DSparkDrafter],
) -> None:
    target, drafter = models
    items = mixed_requests()
    for k in (0, 4):
        engine = Engine(target, drafter, k=k, concurrency=5, capacity=need(items))
        assert serve(engine, items)["1"].output == alone(target, items[1]).output


def test_the_seed_changes_sampled_text_and_no_greedy_text(
    models: tuple[Target, DSparkDrafter],
) -> None:
    target, drafter = models
    for k in (0, 3):
        texts = []
        for seed in (1, 2, 1):
            items = mixed_requests(seed)
            engine = Engine(target, drafter, k=k, concurrency=4, capacity=need(items))
            texts.append({name: row.output for name, row in serve(engine, items).items()})
        assert texts[0] == texts[2]
        assert {name for name in texts[0] if texts[0][name] != texts[1][name]} == {*"0234"}


def test_requests_of_one_seed_sample_different_texts(
    models: tuple[Target, DSparkDrafter],
) -> None:
    target, _ = models
    items = [request(n, [1, 2, 3], 12, sampling=Sampling(1.0)) for n in range(4)]
    engine = Engine(target, concurrency=4, capacity=need(items))
    assert len({tuple(row.output) for row in serve(engine, items).values()}) == 4


def test_top_k_of_one_is_greedy_text(models: tuple[Target, DSparkDrafter]) -> None:
    target, drafter = models
    sampled = request("a", [4, 5], 20, sampling=Sampling(1.0, top_k=1))
    plain = alone(target, request("a", [4, 5], 20)).output
    assert alone(target, sampled).output == plain
    row = alone(target, sampled, drafter, 4)
    assert row.output == plain
    assert sum(step.accepted for step in row.steps) > 0
    assert all(token < VOCAB for token in row.output)
