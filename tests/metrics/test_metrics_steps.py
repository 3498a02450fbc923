"""Step times read off records, against a clock that is known."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dspark.decode.records import RequestRecord
from dspark.metrics.steps import full_step_seconds, step_ms


def record(t_first: float, step_t: list[float], window: int = 0) -> RequestRecord:
    return RequestRecord(
        prompt_id=f"p{t_first}",
        turn=0,
        dataset="d",
        run="r",
        window=window,
        prompt_tokens=3,
        output_tokens=1 + len(step_t),
        output_token_ids=[1] * (1 + len(step_t)),
        finish_reason="length",
        t_submit=t_first - 0.5,
        t_first=t_first,
        t_last=step_t[-1] if step_t else t_first,
        step_t=step_t,
        step_emitted=[1] * len(step_t),
        step_drafted=[0] * len(step_t),
        step_verified=[0] * len(step_t),
        step_accepted=[0] * len(step_t),
        step_cut=[False] * len(step_t),
    )


def test_a_prefill_between_two_steps_is_not_taken_for_a_step() -> None:
    first = record(1.0, [2.0, 3.0, 7.0, 8.0])
    second = record(6.0, [7.0, 8.0])  # its prefill lies between 3 and 7
    assert full_step_seconds([first, second]) == [1.0]  # 7 to 8; 2 to 3 had one row of two
    assert step_ms([first, second]) == 1000.0


def test_a_request_of_one_token_still_had_a_prefill() -> None:
    assert full_step_seconds([record(1.0, [2.0, 4.0, 5.0]), record(3.0, [])]) == [1.0]


def test_steps_do_not_reach_from_one_window_into_the_next() -> None:
    records = [record(1.0, [2.0, 3.0], window=0), record(9.0, [10.0, 12.0], window=1)]
    assert full_step_seconds(records) == [1.0, 2.0]
    assert step_ms(records) == 1500.0


@pytest.mark.parametrize("steps", [[], [2.0]], ids=["none", "one"])
def test_without_two_steps_there_is_no_step_time(steps: list[float]) -> None:
    assert step_ms([record(1.0, steps)]) is None


@given(st.lists(st.integers(1, 50), min_size=2, max_size=30), st.integers(1, 4))
def test_the_mean_is_that_of_the_steps_of_a_run_without_prefills(
    gaps: list[int], rows: int
) -> None:
    times = [float(sum(gaps[: i + 1])) for i in range(len(gaps))]
    records = [record(-1.0 - row, times) for row in range(rows)]
    expected = 1000.0 * sum(gaps[1:]) / (len(gaps) - 1)
    assert step_ms(records) == pytest.approx(expected)
