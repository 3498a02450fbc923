"""Curves of a cell: output tok/s and requests done over its measured time, and what its machine showed."""

from __future__ import annotations

from dataclasses import replace

import pytest
from results_tree import BEGAN, REQUESTS, simulate, usage_of

from dspark.decode.records import RequestRecord
from dspark.metrics.timing import output_tok_s, windows_s
from dspark.tracking.points import (
    SLICES,
    Point,
    ended_ms,
    points_of_usage,
    points_over_time,
)


def curves(records: list[RequestRecord]) -> dict[str, list[Point]]:
    found: dict[str, list[Point]] = {}
    for point in points_over_time(records):
        found.setdefault(point.metric, []).append(point)
    return found


@pytest.mark.parametrize("k", [0, 3])
def test_the_slices_together_are_the_cell(k: int) -> None:
    records = simulate("gsm8k", "run", k, turn=90)
    rates = curves(records)["over_time/output_tok_s"]
    assert [point.step for point in rates] == list(range(5, 101, 5))
    assert sum(point.value for point in rates) / SLICES == pytest.approx(output_tok_s(records))
    measured = sum(windows_s(records).values())
    # what lies between the windows, the other arms' turn, is not measured time
    assert rates[-1].after_ms == round(1000 * measured) < 90_000
    assert rates[0].after_ms == round(1000 * measured / SLICES)


def test_requests_done_grow_to_all() -> None:
    done = [
        point.value for point in curves(simulate("gsm8k", "run", 3, 90))["over_time/requests_done"]
    ]
    assert done == sorted(done)
    assert done[-1] == REQUESTS and done[0] == 0
    assert done[SLICES // 2 - 1] == pytest.approx(REQUESTS / 2, abs=1)


def test_a_slow_half_is_seen() -> None:
    """Two windows of equal length: each step gives two tokens in the first, one in the second."""
    record = simulate("gsm8k", "run", 0, turn=90)[0]
    steps = [number + 0.5 for number in range(10)]
    first = replace(
        record, t_submit=0.0, t_first=0.25, step_t=steps, step_emitted=[2] * 10, t_last=9.5
    )
    second = replace(
        record,
        prompt_id="other",
        window=1,
        t_submit=500.0,
        t_first=500.25,
        step_t=[500 + step for step in steps],
        step_emitted=[1] * 10,
        t_last=509.5,
    )
    rates = [point.value for point in curves([second, first])["over_time/output_tok_s"]]
    half, slice_s = SLICES // 2, 19 / SLICES
    assert sum(rates[:half]) * slice_s == pytest.approx(21)
    assert sum(rates[half:]) * slice_s == pytest.approx(11)


def test_shards_follow_one_another() -> None:
    one = simulate("gsm8k", "run", 3, turn=90)
    other = [replace(record, shard=2, t_submit=record.t_submit) for record in one]
    both = curves([*one, *other])["over_time/output_tok_s"]
    alone = curves(one)["over_time/output_tok_s"]
    assert both[-1].after_ms == pytest.approx(2 * alone[-1].after_ms, abs=1)
    tokens = sum(point.value for point in both) / SLICES * both[-1].after_ms / 1000
    assert tokens == pytest.approx(2 * sum(record.output_tokens for record in one), rel=1e-3)


def test_a_cell_of_one_token_has_curves_too() -> None:
    record = replace(
        simulate("gsm8k", "run", 0, turn=90)[0],
        t_submit=3.0,
        t_first=3.25,
        t_last=3.25,
        step_t=[],
        step_emitted=[],
        output_tokens=1,
    )
    found = curves([record])
    rates = [point.value for point in found["over_time/output_tok_s"]]
    assert rates == [0.0] * (SLICES - 1) + [pytest.approx(SLICES / 0.25)]
    assert found["over_time/requests_done"][-1].value == 1


def test_usage_is_a_point_a_window_at_its_end() -> None:
    windows = usage_of(simulate("gsm8k", "run", 3, turn=90))
    windows[0].gpu_power_usage_watts = 310.5
    points = list(points_of_usage(list(reversed(windows))))
    assert {point.metric for point in points} == {
        "system/cpu_utilization_percentage",
        "system/process_cpu_percentage",
        "system/system_memory_usage_megabytes",
        "system/process_memory_megabytes",
        "system/gpu_power_usage_watts",
    }
    memory = [p for p in points if p.metric == "system/process_memory_megabytes"]
    assert [(p.step, p.value) for p in memory] == [(1, 1500.0), (2, 1600.0)]
    first, second = (round(1000 * window.seconds) for window in windows)
    assert [p.after_ms for p in memory] == [first, 90_000 + second]
    assert [p.step for p in points if p.metric == "system/gpu_power_usage_watts"] == [1]
    assert ended_ms(windows[0]) == pytest.approx(
        1000 * (BEGAN.timestamp() + 30 + windows[0].seconds), abs=1
    )


def test_no_usage_is_no_points() -> None:
    assert list(points_of_usage([])) == []
