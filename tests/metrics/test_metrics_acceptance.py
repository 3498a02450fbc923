"""Acceptance bookkeeping, by hand and against a recount that shares no code with it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.metrics.acceptance import count_acceptance


@st.composite
def cells(draw: st.DrawFn) -> tuple[int, bool, list[list[tuple]]]:
    """k, whether every step verifies k, and the steps of some requests."""
    k = draw(st.integers(1, 7))
    fixed = draw(st.booleans())
    requests = []
    for _ in range(draw(st.integers(1, 6))):
        steps = []
        for index in range(draw(st.integers(0, 8))):
            verified = k if fixed else draw(st.integers(0, k))
            accepted = draw(st.integers(0, verified))
            cut = draw(st.booleans())
            emitted = draw(st.integers(1, accepted + 1)) if cut else accepted + 1
            steps.append((1.0 + index, emitted, k, verified, accepted, cut))
        requests.append(steps)
    return k, fixed, requests


def test_by_hand(record) -> None:
    first = record(0, 1, [(2, 4, 3, 3, 3, False), (3, 1, 3, 3, 0, False), (4, 2, 3, 3, 1, False)])
    last = record(0, 1, [(2, 2, 3, 3, 3, True)], prompt_id="p1")  # two tokens were left
    found = count_acceptance([first, last], k=3)
    assert (found.steps, found.steps_cut, found.complete_steps) == (4, 1, 3)
    assert (found.drafted, found.verified, found.accepted) == (12, 12, 7)
    assert (found.complete_verified, found.complete_accepted) == (9, 4)
    assert found.accept_rate == 4 / 9
    assert found.accept_p == [2 / 3, 1 / 3, 1 / 3]
    assert found.accept_len == 1 + 4 / 3
    assert found.accept_len_delivered == 9 / 4
    assert found.accept_histogram == [1, 1, 0, 1]


@settings(deadline=None)
@given(cell=cells())
def test_against_a_recount(record, cell) -> None:
    k, fixed, requests = cell
    records = [record(0, 1, steps, prompt_id=f"p{i}") for i, steps in enumerate(requests)]
    found = count_acceptance(records, k)

    trials = verified = accepted = 0
    at_position = {i: 0 for i in range(1, k + 1)}
    by_number = {i: 0 for i in range(k + 1)}
    for steps in requests:
        for _, _, _, step_verified, step_accepted, cut in steps:
            if cut:
                continue
            trials += 1
            verified += step_verified
            accepted += step_accepted
            by_number[step_accepted] += 1
            for i in range(1, step_accepted + 1):
                at_position[i] += 1

    assert found.complete_steps == trials
    assert found.accept_histogram == list(by_number.values())
    assert found.accept_rate == (accepted / verified if verified else None)
    if not trials:
        assert (found.accept_p, found.accept_len) == ([], None)
        return
    assert found.accept_p == pytest.approx([n / trials for n in at_position.values()])
    assert found.accept_p == sorted(found.accept_p, reverse=True)
    assert found.accept_len == pytest.approx(1 + sum(found.accept_p))
    if fixed:
        assert found.accept_len == pytest.approx(1 + k * found.accept_rate)


def test_baseline_has_steps_and_no_rates(record) -> None:
    found = count_acceptance([record(0, 1, [(2, 1, 0, 0, 0, False)])], k=0)
    assert (found.steps, found.complete_steps) == (1, 1)
    assert (found.accept_rate, found.accept_len, found.accept_len_delivered) == (None, None, None)
    assert (found.accept_p, found.accept_histogram) == ([], [])


def test_speculative_without_any_step(record) -> None:
    found = count_acceptance([record(0, 1)], k=3)
    assert (found.steps, found.accept_rate, found.accept_len, found.accept_p) == (0, None, None, [])
    assert found.accept_histogram == [0, 0, 0, 0]


def test_leaving_out_budget_cuts_does_not_bias(simulate) -> None:
    found = count_acceptance(simulate("dspark_k3", 3, 3000, survive=0.6), k=3)
    assert found.steps_cut > 1000
    assert found.accept_p == pytest.approx([0.6, 0.36, 0.216], abs=0.015)
