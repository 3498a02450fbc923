"""Cell summaries: from records, and to and from summary.json."""

from __future__ import annotations

import json
from dataclasses import asdict, replace
from pathlib import Path

import numpy as np
import pytest

from dspark.config import (
    DatasetConfig,
    EngineConfig,
    JobConfig,
    Mode,
    RunConfig,
    SamplingConfig,
)
from dspark.errors import UserError
from dspark.metrics.lossless import Difference, judge
from dspark.metrics.summary import (
    CellSummary,
    read_summary,
    summarise,
    summarise_job,
    write_summary,
)

K3 = RunConfig(mode=Mode.speculative, k=3)
ENGINE = EngineConfig(concurrency=2)


def hand_cell(record) -> tuple[list, list]:
    """Two requests of an arm in two windows, and the baseline's."""
    arm = [
        record(0.0, 1.0, [(2.0, 4, 3, 3, 3, False), (3.0, 1, 3, 3, 2, True)], prompt_id="a"),
        record(10.0, 11.0, [(14.0, 1, 3, 3, 0, False)], prompt_id="b", window=1),
    ]
    baseline = [
        record(
            0.0, 1.0, [(1.0 + i, 1, 0, 0, 0, False) for i in range(1, 6)], prompt_id="a",
            run="baseline",
        ),
        record(20.0, 22.0, [(26.0, 1, 0, 0, 0, False)], prompt_id="b", run="baseline", window=1),
    ]  # fmt: skip
    return arm, baseline


def summarise_hand_cell(record) -> CellSummary:
    arm, baseline = hand_cell(record)
    return summarise(
        arm, K3, ENGINE, baseline_records=baseline, expected_requests=2, settings={"device": "cpu"}
    )


def test_every_metric_by_hand(record) -> None:
    cell = summarise_hand_cell(record)
    assert (cell.dataset, cell.run, cell.mode, cell.k) == ("math500", "dspark_k3", "speculative", 3)
    assert (cell.concurrency, cell.precision) == (2, "float32")
    assert (cell.requests, cell.requests_failed, cell.turns, cell.windows) == (2, 0, 1, 2)
    assert (cell.prompt_tokens, cell.output_tokens) == (14, 8)
    assert cell.finish_reasons == {"length": 2}
    assert cell.window_s == 3 + 4
    assert cell.devices == 1
    assert [asdict(device) for device in cell.by_device] == [
        {
            "shard": 1,
            "requests": 2,
            "output_tokens": 8,
            "windows": 2,
            "window_s": 7,
            "output_tok_s": cell.output_tok_s,
            "latency_ms_mean": 3500,
            "latency_ms_max": 4000,
        }
    ]
    assert cell.output_tok_s == pytest.approx(8 / 7)
    assert cell.speedup == pytest.approx((8 / 7) / (8 / 12))
    # Latencies 3000 and 4000 ms: the linear p95 lies 95 % of the way.
    assert (cell.latency_ms_mean, cell.latency_ms_p50) == (3500, 3500)
    assert cell.latency_ms_p95 == pytest.approx(3950)
    assert cell.latency_ms_p99 == pytest.approx(3990)
    assert cell.latency_ms_max == 4000
    assert (cell.ttft_ms_mean, cell.ttft_ms_p95) == (1000, 1000)
    # TPOT 2/5 s over six tokens and 3/1 s over two.
    assert cell.tpot_ms_mean == pytest.approx((400 + 3000) / 2)
    assert cell.tpot_ms_p95 == pytest.approx(400 + 0.95 * 2600)
    assert cell.tpot_ms_token_weighted == pytest.approx(5000 / 6)
    assert cell.itl_ms_mean == pytest.approx(cell.tpot_ms_mean)
    assert cell.itl_ms_p99 == pytest.approx(cell.tpot_ms_p99)
    # Step gaps 1000, 1000, 3000 ms pooled.
    assert cell.itl_chunk_ms_mean == pytest.approx(5000 / 3)
    assert cell.itl_chunk_ms_p95 == pytest.approx(1000 + 0.9 * 2000)
    assert (cell.steps, cell.steps_cut, cell.complete_steps) == (3, 1, 2)
    assert (cell.drafted, cell.verified, cell.accepted) == (9, 9, 5)
    assert cell.accept_rate == 3 / 6
    assert cell.accept_p == [0.5, 0.5, 0.5]
    assert cell.accept_len == 2.5
    assert cell.accept_len_delivered == 6 / 3
    assert cell.accept_histogram == [1, 0, 0, 1]
    assert cell.settings == {"device": "cpu"}


def test_percentiles_are_numpys(simulate) -> None:
    records = simulate("baseline", 0, 77)
    cell = summarise(
        records, RunConfig(), EngineConfig(), baseline_records=records, expected_requests=77
    )
    latencies = [1000 * (r.t_last - r.t_submit) for r in records]
    assert cell.latency_ms_p95 == pytest.approx(np.percentile(latencies, 95))
    assert cell.tpot_ms_mean == pytest.approx(
        np.mean(
            [
                1000 * (r.t_last - r.t_first) / (r.output_tokens - 1)
                for r in records
                if r.output_tokens > 1
            ]
        )
    )
    assert cell.itl_ms_p95 == pytest.approx(cell.tpot_ms_p95)
    assert (cell.speedup, cell.speedup_ci95_low, cell.speedup_ci95_high) == (1, 1, 1)


def test_single_token_answers(record) -> None:
    arm = [record(0.0, 1.0)]
    baseline = [record(0.0, 2.0, run="baseline")]
    cell = summarise(arm, K3, ENGINE, baseline_records=baseline, expected_requests=1)
    assert (cell.tpot_ms_mean, cell.itl_ms_p95, cell.itl_chunk_ms_mean) == (None, None, None)
    assert (cell.accept_rate, cell.accept_len, cell.accept_p) == (None, None, [])
    assert cell.speedup == 2


def test_failed_request_fails_the_cell(record) -> None:
    arm, baseline = hand_cell(record)
    arm[1] = record(prompt_id="b", window=1, error="out of memory:\n 12 GiB wanted")
    with pytest.raises(UserError) as error:
        summarise(arm, K3, ENGINE, baseline_records=baseline, expected_requests=2)
    assert str(error.value) == (
        "cell math500/dspark_k3: 1 of 2 requests failed, first 'b#0': out of memory: 12 GiB wanted"
    )


def test_failed_baseline_request_fails_the_arm(record) -> None:
    arm, baseline = hand_cell(record)
    baseline[0].error = "lost"
    with pytest.raises(UserError, match="math500/baseline: 1 of 2 requests failed"):
        summarise(arm, K3, ENGINE, baseline_records=baseline, expected_requests=2)


def test_missing_or_doubled_request_fails_the_cell(record) -> None:
    arm, baseline = hand_cell(record)
    with pytest.raises(UserError, match="math500/dspark_k3: 2 of 3 requests are recorded"):
        summarise(arm, K3, ENGINE, baseline_records=baseline, expected_requests=3)
    with pytest.raises(UserError, match="'a#0' is recorded twice"):
        summarise([arm[0], arm[0]], K3, ENGINE, baseline_records=baseline, expected_requests=2)
    with pytest.raises(UserError, match="no request records"):
        summarise([], K3, ENGINE, baseline_records=baseline, expected_requests=2)


def test_mixed_cells_are_refused(record) -> None:
    arm, baseline = hand_cell(record)
    with pytest.raises(UserError, match="these are of math500/baseline, math500/dspark_k3"):
        summarise([arm[0], baseline[1]], K3, ENGINE, baseline_records=baseline, expected_requests=2)


def test_float32_difference_fails_the_cell(record) -> None:
    arm, baseline = hand_cell(record)
    verdict = judge([Difference("a#0", 1, 2, 3, margin=0.5)], 2, "float32")
    with pytest.raises(UserError, match="not lossless"):
        summarise(arm, K3, ENGINE, baseline_records=baseline, expected_requests=2, lossless=verdict)


# ---------------------------------------------------------------------------- a whole job


def job(k: int = 3) -> JobConfig:
    return JobConfig(
        experiment="demo",
        dataset=DatasetConfig(name="math500", max_new_tokens=40),
        runs={"baseline": RunConfig(), "dspark_k3": RunConfig(mode=Mode.speculative, k=k)},
        engine=EngineConfig(),
        sampling=SamplingConfig(),
    )


def test_job_summarises_each_arm_in_the_runs_order(simulate) -> None:
    records = simulate("dspark_k3", 3, 100, seed=1) + simulate("baseline", 0, 100)
    verdict = judge([], 100, "float32")
    cells = summarise_job(
        records,
        job(),
        expected_requests=100,
        settings={"device": "cpu"},
        lossless={"dspark_k3": verdict},
    )
    assert [cell.run for cell in cells] == ["baseline", "dspark_k3"]
    assert [cell.lossless for cell in cells] == [None, verdict]
    assert cells[1].speedup == pytest.approx(cells[1].output_tok_s / cells[0].output_tok_s)
    assert cells[0].settings["max_new_tokens"] == 40
    assert cells[0].settings["device"] == "cpu"
    assert json.dumps(cells[0].settings) == json.dumps(cells[1].settings)


def test_job_refuses_missing_and_unknown_arms(simulate) -> None:
    baseline = simulate("baseline", 0, 10)
    with pytest.raises(UserError, match="math500/dspark_k3: none of 10 requests"):
        summarise_job(baseline, job(), expected_requests=10)
    with pytest.raises(UserError, match="run 'dspark_k9', which the job does not have"):
        summarise_job(simulate("dspark_k9", 9, 10), job(), expected_requests=10)


# ---------------------------------------------------------------------------- summary.json


def test_summary_reads_back(record, tmp_path: Path) -> None:
    cell = summarise_hand_cell(record)
    path = tmp_path / "math500" / "dspark_k3" / "summary.json"
    write_summary(path, cell)
    assert read_summary(path) == cell
    assert [p.name for p in path.parent.iterdir()] == ["summary.json"]
    first = path.read_bytes()
    write_summary(path, read_summary(path))
    assert path.read_bytes() == first


def test_missing_and_malformed_summary(tmp_path: Path) -> None:
    path = tmp_path / "summary.json"
    with pytest.raises(UserError, match="does not exist"):
        read_summary(path)
    path.write_text("{")
    with pytest.raises(UserError, match="cannot be read"):
        read_summary(path)
    path.write_text("[]")
    with pytest.raises(UserError, match="no JSON object"):
        read_summary(path)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"window_s": None}, "'window_s' holds null"),
        ({"requests": 1.5}, "'requests' holds 1.5"),
        ({"requests": True}, "'requests' holds true"),
        ({"accept_p": [0.5, "x"]}, "'accept_p' holds"),
        ({"finish_reasons": {"stop": "x"}}, "'finish_reasons' holds"),
        ({"lossless": 3}, "'lossless' holds 3"),
        ({"by_device": [{"shard": 1}]}, "'by_device' holds"),
        ({"by_device": {}}, "'by_device' holds"),
        ({"colour": 1}, "unknown field 'colour'"),
        ({"k": ...}, "lacks the field 'k'"),
    ],
)
def test_fields_are_checked(record, tmp_path: Path, change: dict, message: str) -> None:
    values = {**asdict(summarise_hand_cell(record)), **change}
    path = tmp_path / "summary.json"
    path.write_text(json.dumps({name: value for name, value in values.items() if value is not ...}))
    with pytest.raises(UserError, match=message):
        read_summary(path)


def test_not_a_number_is_never_written(record, tmp_path: Path) -> None:
    cell = replace(summarise_hand_cell(record), window_s=float("nan"))
    with pytest.raises(ValueError, match="JSON"):
        write_summary(tmp_path / "summary.json", cell)
    assert not list(tmp_path.iterdir())
