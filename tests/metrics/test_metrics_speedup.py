"""Speedup and its paired bootstrap interval."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from dspark.errors import UserError
from dspark.metrics.speedup import measure_speedup
from dspark.metrics.timing import output_tok_s


def serial_arm(record, latencies, tokens: int, run: str):
    """Requests one after the other, so that tokens per latency is Output tok/s itself."""
    records, clock = [], 0.0
    for index, latency in enumerate(latencies):
        steps = [(clock + latency * i / tokens, 1, 0, 0, 0, False) for i in range(2, tokens + 1)]
        first = clock + latency / tokens
        records.append(record(clock, first, steps, prompt_id=f"p{index}", run=run))
        clock = records[-1].t_last
    return records


def test_point_estimate_is_the_ratio_of_throughputs(simulate) -> None:
    baseline, arm = simulate("baseline", 0, 100), simulate("dspark_k3", 3, 100, seed=1)
    found = measure_speedup(arm, baseline)
    assert found.ratio == output_tok_s(arm) / output_tok_s(baseline)
    assert found.ci95_low < found.ratio < found.ci95_high


def test_by_hand(record) -> None:
    baseline = serial_arm(record, [4.0, 4.0], 4, "baseline")
    arm = serial_arm(record, [2.0, 1.0], 4, "dspark_k3")
    found = measure_speedup(arm, baseline)
    assert found.ratio == pytest.approx(8 / 3)
    # A resample holds the first request twice, both, or the second twice.
    assert (found.ci95_low, found.ci95_high) == (pytest.approx(2.0), pytest.approx(4.0))


def test_interval_is_of_the_wall_clock_ratio(record) -> None:
    baseline = serial_arm(record, [4.0, 4.0], 4, "baseline")
    arm = serial_arm(record, [2.0, 1.0], 4, "dspark_k3")
    arm[1] = replace(
        arm[1],
        t_submit=arm[1].t_submit + 3,  # the arm stood idle: six seconds of wall clock, not three
        t_first=arm[1].t_first + 3,
        t_last=arm[1].t_last + 3,
        step_t=[t + 3 for t in arm[1].step_t],
    )
    found = measure_speedup(arm, baseline)
    assert found.ratio == pytest.approx(4 / 3)
    assert (found.ci95_low, found.ci95_high) == (pytest.approx(1.0), pytest.approx(2.0))


def test_baseline_against_itself_is_exactly_one(simulate) -> None:
    baseline = simulate("baseline", 0, 50)
    found = measure_speedup(baseline, baseline)
    assert (found.ratio, found.ci95_low, found.ci95_high) == (1.0, 1.0, 1.0)


def test_same_seed_same_interval(simulate) -> None:
    baseline, arm = simulate("baseline", 0, 60), simulate("dspark_k3", 3, 60, seed=1)
    assert measure_speedup(arm, baseline, seed=3) == measure_speedup(arm, baseline, seed=3)
    assert measure_speedup(arm, baseline, seed=3) != measure_speedup(arm, baseline, seed=4)


def test_order_of_an_arm_does_not_matter(simulate) -> None:
    baseline, arm = simulate("baseline", 0, 60), simulate("dspark_k3", 3, 60, seed=1)
    assert measure_speedup(arm[::-1], baseline) == measure_speedup(arm, baseline)


def test_interval_covers_the_truth_and_pairing_narrows_it(record) -> None:
    truth, covered, widths = 1.5, 0, []
    generator = np.random.default_rng(7)
    trials, requests = 60, 80
    for _ in range(trials):
        hard = generator.lognormal(0, 0.8, requests)  # what is hard about a prompt, in both arms
        base = hard * generator.lognormal(0, 0.1, requests)
        fast = hard / truth * generator.lognormal(0, 0.1, requests)
        found = measure_speedup(
            serial_arm(record, fast, 2, "dspark_k3"),
            serial_arm(record, base, 2, "baseline"),
            resamples=400,
        )
        covered += found.ci95_low <= truth <= found.ci95_high
        widths.append(found.ci95_high - found.ci95_low)
    assert covered >= 0.85 * trials
    assert np.mean(widths) < 0.15  # unpaired, the spread of the prompts alone would give 0.6


def test_other_requests_are_refused(simulate) -> None:
    baseline, arm = simulate("baseline", 0, 10), simulate("dspark_k3", 3, 10)
    with pytest.raises(UserError, match=r"math500/dspark_k3: request 'p9#0' is in only one"):
        measure_speedup(arm[:-1], baseline)
    with pytest.raises(UserError, match="'p0#0' is recorded twice"):
        measure_speedup([*arm, arm[0]], baseline)
    with pytest.raises(UserError, match="no requests"):
        measure_speedup([], [])
