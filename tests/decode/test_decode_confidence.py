"""Verifying only as far as the drafter is confident."""

from __future__ import annotations

import math
from unittest.mock import patch

import pytest
import torch
from decode_helpers import (
    alone,
    drafting,
    make_bigram_drafter,
    make_drafter,
    make_target,
    need,
    outputs,
    request,
    serve,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.decode.draft import confident_prefix
from dspark.decode.engine import Engine, Request, Row
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target

ITEMS: list[Request] = [request(n, range(n, 2 * n + 2), 20) for n in range(5)]


@pytest.fixture(scope="module")
def models() -> tuple[Target, DSparkDrafter]:
    target = make_target(embed=20)
    return target, make_bigram_drafter(target)


def run(models: tuple[Target, DSparkDrafter], threshold: float, k: int = 5) -> dict[str, Row]:
    target, drafter = models
    engine = Engine(
        target,
        drafter,
        k=k,
        concurrency=3,
        capacity=need(ITEMS),
        confidence_threshold=threshold,
    )
    return serve(engine, ITEMS)


def texts(target: Target) -> dict[str, list[int]]:
    return {item.prompt_id: alone(target, item).output for item in ITEMS}


@pytest.mark.parametrize(
    ("confidences", "length"),
    [
        ([0.9, 0.8, 0.7], 3),
        ([0.9, 0.4, 0.9], 1),
        ([0.4, 0.9, 0.9], 0),
        ([0.5, 0.5, 0.49], 2),  # as confident as the threshold is enough
    ],
)
def test_the_prefix_ends_before_the_first_less_confident_token(
    confidences: list[float], length: int
) -> None:
    logits = torch.tensor([[math.log(c / (1 - c)) for c in confidences]])
    assert confident_prefix(logits, 0.5).tolist() == [length]


@settings(deadline=None, max_examples=60)
@given(
    logits=st.lists(
        st.lists(st.floats(-20, 20, width=32), min_size=4, max_size=4), min_size=1, max_size=4
    ),
    threshold=st.floats(0, 1),
)
def test_the_prefix_equals_a_loop(logits: list[list[float]], threshold: float) -> None:
    confidence = torch.tensor(logits)
    expected = []
    for row in confidence.sigmoid().tolist():
        count = 0
        while count < len(row) and row[count] >= threshold:
            count += 1
        expected.append(count)
    assert confident_prefix(confidence, threshold).tolist() == expected


def test_a_decision_reads_no_later_confidence() -> None:
    first = torch.tensor([[1.0, -1.0, 5.0, 5.0]])
    second = torch.tensor([[1.0, -1.0, -5.0, 0.0]])
    assert confident_prefix(first, 0.5).tolist() == confident_prefix(second, 0.5).tolist() == [1]


@pytest.mark.parametrize("threshold", [0.1, 0.5, 0.9, 0.999])
def test_no_threshold_changes_the_text(
    models: tuple[Target, DSparkDrafter], threshold: float
) -> None:
    rows = run(models, threshold)
    assert outputs(rows) == texts(models[0])
    assert all(s.verified <= s.drafted <= 5 for row in rows.values() for s in row.steps)


def test_a_greater_threshold_verifies_less(models: tuple[Target, DSparkDrafter]) -> None:
    def verified(threshold: float) -> float:
        steps = [step for row in run(models, threshold).values() for step in row.steps]
        return sum(step.verified for step in steps) / len(steps)

    shares = [verified(threshold) for threshold in (0.0, 0.3, 0.7, 0.999)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] == 5 and shares[-1] < shares[0]


def test_threshold_of_one_verifies_nothing_and_keeps_the_text() -> None:
    target = make_target(embed=20)
    drafter = make_bigram_drafter(target)
    assert drafter.confidence_head is not None
    with torch.no_grad():
        drafter.confidence_head.proj.weight.mul_(0.05)  # confident, but never certain
    rows = run((target, drafter), 1.0)
    for row in rows.values():
        assert {(s.emitted, s.drafted, s.verified, s.accepted) for s in row.steps} == {(1, 0, 0, 0)}
        assert not any(step.cut for step in row.steps)
    assert outputs(rows) == texts(target)


def test_a_drafter_without_confidence_head_is_trusted() -> None:
    target = make_target(embed=20)
    drafter = make_drafter(target)
    drafter.confidence_head = None
    rows = run((target, drafter), 1.0)
    assert {step.verified for row in rows.values() for step in row.steps} == {5}
    assert outputs(rows) == texts(target)


def test_rows_that_verify_nothing_and_rows_that_verify_all_share_a_batch(
    models: tuple[Target, DSparkDrafter],
) -> None:
    target, drafter = models
    expected = texts(target)
    k = 4

    def right(row: Row, k: int) -> list[int]:
        return (expected[row.request.prompt_id][len(row.output) :] + [0] * k)[:k]

    def sure_of(row: Row, k: int) -> list[float]:
        width = int(row.request.prompt_id)  # the name says how much is verified
        return [10.0] * width + [-10.0] + [10.0] * (k - width - 1) if width < k else [10.0] * k

    engine = Engine(
        target, drafter, k=k, concurrency=5, capacity=need(ITEMS), confidence_threshold=0.5
    )
    with drafting(engine, right, sure_of):
        rows = serve(engine, ITEMS)
    assert outputs(rows) == expected
    for name, row in rows.items():
        assert {step.verified for step in row.steps} == {int(name)}
        assert all(step.accepted == int(name) for step in row.steps if not step.cut)


def test_no_draft_token_beyond_the_limit_is_accepted_however_right(
    models: tuple[Target, DSparkDrafter],
) -> None:
    target, drafter = models
    expected = texts(target)
    engine = Engine(
        target, drafter, k=4, concurrency=5, capacity=need(ITEMS), confidence_threshold=0.5
    )
    with drafting(
        engine,
        lambda row, k: (expected[row.request.prompt_id][len(row.output) :] + [0] * k)[:k],
        lambda row, _k: [9.0, 9.0, -9.0, 9.0] if row.request.prompt_id == "1" else [9.0] * 4,
    ):
        rows = serve(engine, ITEMS)
    assert {step.verified for step in rows["1"].steps} == {2}
    assert max(step.accepted for step in rows["1"].steps) == 2
    assert outputs(rows) == expected


def test_what_is_not_verified_costs_no_work_of_the_target(
    models: tuple[Target, DSparkDrafter],
) -> None:
    """The pass holds the anchors and what is verified, not blocks."""
    target, drafter = models
    engine = Engine(
        target, drafter, k=6, concurrency=2, capacity=need(ITEMS), confidence_threshold=0.5
    )
    rows = [engine.admit(item, 0.0) for item in ITEMS[:2]]
    widths: list[int] = []
    forward = target.forward

    def watch(tokens: torch.Tensor, *rest: object, **more: object) -> object:
        widths.append(tokens.shape[1])
        return forward(tokens, *rest, **more)  # type: ignore[arg-type]

    with (
        patch.object(target, "forward", watch),
        drafting(
            engine,
            lambda _row, k: [0] * k,
            lambda row, _k: [9.0, -9.0 if row.request.prompt_id == "0" else 9.0] + [-9.0] * 4,
        ),
    ):
        engine.step()
    assert [row.steps[0].verified for row in rows] == [1, 2]
    assert widths == [2 + 3]  # rows of 1 + 1 and of 1 + 2 tokens, packed
