"""Times of requests, on an example that can be followed by hand."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.errors import UserError
from dspark.metrics import timing

STEPS = st.lists(st.tuples(st.floats(1e-4, 1.0), st.integers(1, 8)), min_size=1, max_size=30)


def test_by_hand(record) -> None:
    # Submitted at 10, first token at 12; 3 tokens at 15, 1 at 16: five tokens in all.
    r = record(10.0, 12.0, [(15.0, 3, 3, 3, 2, False), (16.0, 1, 3, 3, 0, False)])
    assert timing.latency_s(r) == 6.0
    assert timing.ttft_s(r) == 2.0
    assert timing.tpot_s(r) == 1.0
    assert timing.itl_s(r) == 1.0
    assert timing.step_gaps_s(r).tolist() == [3.0, 1.0]


def test_one_token_has_no_time_per_token(record) -> None:
    r = record(10.0, 12.0)
    assert (timing.tpot_s(r), timing.itl_s(r)) == (None, None)
    assert timing.step_gaps_s(r).size == 0
    assert timing.token_weighted_tpot_ms([r]) is None


@settings(deadline=None)
@given(steps=STEPS)
def test_itl_from_the_steps_is_tpot(record, steps: list[tuple[float, int]]) -> None:
    clock, rows = 1.0, []
    for gap, emitted in steps:
        clock += gap
        rows.append((clock, emitted, 7, 7, emitted - 1, False))
    r = record(0.0, 1.0, rows)
    assert timing.itl_s(r) == pytest.approx(timing.tpot_s(r), rel=1e-9)


def test_throughput_leaves_out_what_lies_between_windows(record) -> None:
    step = [(0.0, 1, 0, 0, 0, False)]
    first = record(0.0, 1.0, [(2.0, *step[0][1:])], prompt_id="a", window=0)
    second = record(0.5, 1.5, [(4.0, *step[0][1:])], prompt_id="b", window=0)
    third = record(100.0, 101.0, [(106.0, *step[0][1:])], prompt_id="c", window=1)
    records = [third, first, second]
    assert timing.windows_s(records) == {0: 4.0, 1: 6.0}
    assert timing.output_tok_s(records) == 6 / 10


def test_throughput_of_shards_is_the_mean_of_their_devices(record) -> None:
    step = [(2.0, 3, 0, 0, 0, False)]
    quick = [record(0.0, 1.0, step, prompt_id="a"), record(0.0, 1.0, step, prompt_id="b")]
    # Another machine's clock, and window 0 again: neither may be mixed with the first one's.
    slow = record(1000.0, 1001.0, [(1016.0, 3, 0, 0, 0, False)], prompt_id="c", shard=2)
    assert timing.by_shard([slow, *quick]) == {1: quick, 2: [slow]}
    assert timing.output_tok_s(quick) == 8 / 2
    assert timing.output_tok_s([slow]) == 4 / 16
    assert timing.output_tok_s([quick[0], slow, quick[1]]) == (4 + 0.25) / 2


def test_throughput_of_no_time(record) -> None:
    with pytest.raises(UserError, match="no length"):
        timing.output_tok_s([record(1.0, 1.0)])


def test_percentiles_interpolate_linearly() -> None:
    found = timing.distribution_ms("x", [0.001, 0.002, 0.003, 0.004])
    assert found == pytest.approx(
        {"x_ms_mean": 2.5, "x_ms_p50": 2.5, "x_ms_p95": 3.85, "x_ms_p99": 3.97}
    )


def test_distribution_of_nothing() -> None:
    assert set(timing.distribution_ms("x", []).values()) == {None}


def test_token_weighted_tpot_weighs_tokens(record) -> None:
    slow = record(0.0, 1.0, [(3.0, 1, 0, 0, 0, False)])  # one gap of 2 s
    fast = record(0.0, 1.0, [(1.0 + 0.5 * i, 1, 0, 0, 0, False) for i in range(1, 4)])
    found = timing.token_weighted_tpot_ms([slow, fast, record()])
    assert found == pytest.approx(1000 * (2 + 1.5) / 4)
    assert np.mean([timing.tpot_s(slow), timing.tpot_s(fast)]) == pytest.approx(1.25)
