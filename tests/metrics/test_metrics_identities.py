"""The identities: what passes, and that each one catches what it is there for."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.config import EngineConfig, Mode, RunConfig
from dspark.errors import UserError
from dspark.metrics.cell import CellSummary
from dspark.metrics.identities import (
    check_devices,
    check_records,
    check_rows,
    check_summaries,
    requests_in_flight,
)
from dspark.metrics.rows import TableRow, k_of_run_name, rows_from_summaries
from dspark.metrics.summary import summarise
from dspark.report.table import parse_table


@pytest.fixture(scope="module")
def published(published_text: str) -> list[TableRow]:
    return parse_table(published_text)


def changed(rows: list[TableRow], dataset: str, run: str, **values) -> list[TableRow]:
    return [replace(r, **values) if (r.dataset, r.run) == (dataset, run) else r for r in rows]


# ---------------------------------------------------------------------------- printed rows


def test_published_table_passes(published: list[TableRow]) -> None:
    assert len(published) == 18
    check_rows(published)


@pytest.mark.parametrize(
    ("dataset", "run", "values", "identity"),
    [
        ("math500", "dspark_k3", {"speedup": 1.298}, r"speedup = tok/s / baseline's tok/s"),
        ("math500", "baseline", {"speedup": 1.001}, r"speedup = tok/s / baseline's tok/s"),
        # 356.55/359.97 rounds to .990 from the printed cells and to .991 from the unrounded ones.
        ("mt_bench", "dspark_k7", {"speedup": 0.989}, r"speedup = tok/s / baseline's tok/s"),
        ("gsm8k", "dspark_k7", {"output_tok_s": 371.79}, r"speedup = tok/s / baseline's tok/s"),
        ("gsm8k", "dspark_k3", {"accept_p": (0.22, 0.4859, 0.1053)}, r"p1 >= p2"),
        ("gsm8k", "dspark_k3", {"accept_p": (0.4859, 0.1053, 0.22)}, r"p2 >= p3"),
        ("mbpp", "dspark_k3", {"accept_rate": 0.5121}, r"accept_len = 1 \+ 3 \* accept_rate"),
        ("mbpp", "dspark_k7", {"accept_len": 2.934}, r"accept_len = 1 \+ 7 \* accept_rate"),
        (
            "humaneval",
            "dspark_k3",
            {"accept_p": (0.7569, 0.5507, 0.4114)},
            r"accept_len = 1 \+ p1 \+ p2 \+ p3",
        ),
        (
            "ultrachat",
            "dspark_k7",
            {"accept_p": (0.8, 0.254, 0.1149)},
            r"p1 \+ p2 \+ p3 <= accept_len - 1",
        ),
        (
            "ultrachat",
            "dspark_k7",
            {"accept_p": (0.5316, 0.254, 0.02)},
            r"accept_len - 1 <= p1 \+ p2 \+ p3 \+ 4 \* p3",
        ),
    ],
)
def test_mutated_published_table_fails(
    published: list[TableRow], dataset: str, run: str, values: dict, identity: str
) -> None:
    with pytest.raises(UserError, match=rf"{dataset}/{run}: identity '{identity}") as error:
        check_rows(changed(published, dataset, run, **values))
    assert "against" in str(error.value)


def test_rate_alone_is_held_to_the_positions(published: list[TableRow]) -> None:
    rows = changed(published, "mbpp", "dspark_k7", accept_rate=0.1, accept_len=1.7)
    with pytest.raises(UserError, match=r"mbpp/dspark_k7: identity 'p1 \+ p2 \+ p3 <="):
        check_rows(rows)


def test_missing_baseline_and_doubled_row(published: list[TableRow]) -> None:
    with pytest.raises(UserError, match="'math500' has no baseline"):
        check_rows(published[1:])
    with pytest.raises(UserError, match="math500/dspark_k3 stands in the table twice"):
        check_rows([*published, published[1]])


@pytest.mark.parametrize(
    ("run", "expected"),
    [
        ("baseline", (None, False)),
        ("dspark_k3", (3, True)),
        ("large_dev_k16", (16, True)),
        ("dspark_k7_c50", (7, False)),
        ("dspark_kappa", (None, False)),
    ],
)
def test_k_of_run_name(run: str, expected: tuple[int | None, bool]) -> None:
    assert k_of_run_name(run) == expected


def test_a_threshold_run_may_verify_fewer_but_not_more(published: list[TableRow]) -> None:
    row = replace(published[2], accept_rate=0.5, fixed_k=False)  # 1 + 7 * 0.5 > 2.419
    check_rows([published[0], row])
    with pytest.raises(UserError, match=r"accept_len <= 1 \+ 7 \* accept_rate"):
        check_rows([published[0], replace(row, accept_rate=0.15)])


# ---------------------------------------------------------------------------- summaries


def cells(simulate, k: int, requests: int, **arguments) -> list[CellSummary]:
    engine = EngineConfig(concurrency=arguments.get("concurrency", 4))
    baseline = simulate("baseline", 0, requests, **arguments)
    arguments["seed"] = arguments.get("seed", 0) + 1
    confidence = arguments.get("confidence", 0.0)
    run = f"dspark_k{k}" + ("_c50" if confidence else "")
    arm = simulate(run, k, requests, **arguments)
    config = RunConfig(mode=Mode.speculative, k=k, confidence_threshold=confidence)
    return [
        summarise(r, c, engine, baseline_records=baseline, expected_requests=requests)
        for r, c in ((baseline, RunConfig()), (arm, config))
    ]


@settings(max_examples=25, deadline=None)
@given(
    k=st.integers(1, 9),
    requests=st.integers(1, 90),
    concurrency=st.integers(1, 6),
    block=st.integers(1, 40),
    survive=st.floats(0, 1),
    confidence=st.sampled_from([0.0, 0.5]),
    seed=st.integers(0, 1000),
)
def test_measured_cells_pass(simulate, k: int, requests: int, **arguments) -> None:
    found = cells(simulate, k, requests, **arguments)
    check_summaries(found)
    check_rows(rows_from_summaries(found))


@pytest.fixture(scope="module")
def pair(simulate) -> list[CellSummary]:
    return cells(simulate, 3, 128)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"speedup": 1.5}, "speedup = tok/s"),
        ({"accept_rate": 0.9}, r"accept_len = 1 \+ 3 \* accept_rate"),
        ({"accept_p": [0.5, 0.5, 0.5]}, "accept_len = 1 \\+ sum of p_i"),
        ({"requests": 127}, "requests 127 against 128"),
        ({"concurrency": 5}, "concurrency 5 against 4"),
        ({"precision": "bfloat16"}, 'precision "bfloat16" against'),
        ({"devices": 2}, "devices 2 against 1"),
        ({"settings": {"device": "other"}}, 'device "other" against'),
        ({"settings": {"prompts_sha256": "ab"}}, 'prompts_sha256 "ab" against'),
    ],
)
def test_changed_summary_fails(pair: list[CellSummary], values: dict, message: str) -> None:
    check_summaries(pair)
    with pytest.raises(UserError, match=message) as error:
        check_summaries([pair[0], replace(pair[1], **values)])
    assert "math500/dspark_k3" in str(error.value)


def test_summaries_need_a_baseline(pair: list[CellSummary]) -> None:
    with pytest.raises(UserError, match="'math500' has no baseline"):
        check_summaries(pair[1:])


def test_littles_law(pair: list[CellSummary]) -> None:
    assert 3.4 < requests_in_flight(pair[0].by_device[0]) <= 4
    # Timers that start before the queue, or a loop that runs one request at a time.
    for concurrency in (3, 8):
        with pytest.raises(UserError, match=f"concurrency {concurrency} ~ tok/s"):
            check_devices(replace(pair[0], concurrency=concurrency))


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"requests": 127}, "requests = sum of the devices'"),
        ({"output_tokens": 3}, "output_tokens = sum of the devices'"),
        ({"windows": 3}, "windows = sum of the devices'"),
        ({"window_s": 1.0}, "window_s = sum of the devices'"),
        ({"output_tok_s": 1.0}, "tok/s = mean of the devices' tok/s"),
        ({"latency_ms_mean": 1.0}, "mean latency = mean of the devices' requests"),
        ({"latency_ms_max": 1.0}, "longest latency = longest of the devices'"),
    ],
)
def test_devices_must_add_up_to_the_cell(
    pair: list[CellSummary], values: dict, message: str
) -> None:
    arm = replace(pair[1], by_device=[replace(pair[1].by_device[0], **values)])
    with pytest.raises(UserError, match=f"math500/dspark_k3: identity '{message}'"):
        check_summaries([pair[0], arm])


def test_every_device_must_be_there(pair: list[CellSummary]) -> None:
    twice = [replace(cell, devices=2) for cell in pair]
    with pytest.raises(UserError, match="devices = number of by_device"):
        check_summaries(twice)


def test_tiny_windows_are_held_to_the_upper_bound_only(simulate) -> None:
    baseline = cells(simulate, 3, 30, block=4)[0]
    assert requests_in_flight(baseline.by_device[0]) < 3.6
    check_devices(baseline)
    with pytest.raises(UserError, match="concurrency 2 ~"):
        check_devices(replace(baseline, concurrency=2))


# ---------------------------------------------------------------------------- records


def test_consistent_records_pass(record, simulate) -> None:
    check_records([record(), *simulate("dspark_k3", 3, 40)])
    check_records(simulate("dspark_k3", 3, 40, start=3.0e6))  # a machine that is up for a month


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"step_cut": [False]}, "different lengths"),
        ({"output_token_ids": [1]}, "1 token ids for 6 output tokens"),
        ({"step_emitted": [3, 1]}, "emitted 4 of 6 output tokens"),
        ({"step_accepted": [4, 0]}, "step 0 accepted 4 of 3 verified of 3 drafted"),
        ({"step_verified": [4, 3]}, "step 0 accepted 3 of 4 verified of 3 drafted"),
        ({"step_accepted": [2, 0]}, "complete step 0 accepted 2 draft tokens and emitted 4"),
        ({"step_emitted": [5, 0], "step_cut": [True, True]}, "cut step 0 accepted 3 .* emitted 5"),
        ({"step_t": [3.0, 2.0]}, "times run backwards"),
        ({"t_first": 0.0}, "took no time"),
        ({"t_last": 3.5}, "t_last is 3.5, its last tokens came at 3.0"),
    ],
)
def test_damaged_record_is_named(record, values: dict, message: str) -> None:
    good = record(0.0, 1.0, [(2.0, 4, 3, 3, 3, False), (3.0, 1, 3, 3, 0, False)])
    check_records([good])
    with pytest.raises(UserError, match=rf"math500/dspark_k3: request 'p0#0': .*{message}"):
        check_records([replace(good, **values)])
