"""Shards put together: what they say is what one measurement of all prompts would have said."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.config import DatasetConfig, EngineConfig, JobConfig, Mode, RunConfig
from dspark.data.prompts import Prompt, split_prompts
from dspark.decode.records import RequestRecord
from dspark.errors import UserError
from dspark.metrics.cell import CellSummary
from dspark.metrics.identities import check_devices, check_rows, requests_in_flight
from dspark.metrics.lossless import compare_arms, judge
from dspark.metrics.rows import rows_from_summaries
from dspark.metrics.shards import merge_environments, merge_records, merge_verdicts
from dspark.metrics.summary import summarise_job
from dspark.metrics.timing import latency_s, tpot_s

RUNS = {"baseline": RunConfig(), "dspark_k3": RunConfig(mode=Mode.speculative, k=3)}
COUNTS = (
    "requests",
    "prompt_tokens",
    "output_tokens",
    "windows",
    "steps",
    "steps_cut",
    "drafted",
    "verified",
    "accepted",
    "complete_steps",
    "complete_verified",
    "complete_accepted",
)


def job(shards: int) -> JobConfig:
    return JobConfig(
        experiment="demo",
        dataset=DatasetConfig(name="math500", shards=shards),
        runs=RUNS,
        engine=EngineConfig(concurrency=3),
    )


def asked(count: int) -> list[Prompt]:
    return [Prompt(f"p{index}", ["?"]) for index in range(count)]


def measure_shards(
    simulate,
    prompts: list[Prompt],
    shards: int,
    starts: Sequence[float],
    speeds: Sequence[float],
    seed: int = 0,
    block: int = 16,
) -> list[list[RequestRecord]]:
    """Both arms on each shard's prompts, on clocks that start anywhere and devices of any speed."""
    parts = []
    for index, mine in enumerate(split_prompts(job(shards).dataset, prompts)):
        part = [
            replace(record, prompt_id=mine[int(record.prompt_id[1:])].id, shard=index + 1)
            for run, k in (("baseline", 0), ("dspark_k3", 3))
            for record in simulate(
                run,
                k,
                len(mine),
                seed=seed + 2 * index + k,
                concurrency=3,
                block=block,
                step_s=speeds[index],
                start=starts[index],
            )
        ]
        parts.append(part)
    return parts


def summarise_shards(prompts: list[Prompt], parts: list[list[RequestRecord]]) -> list[CellSummary]:
    whole = job(len(parts))
    return summarise_job(
        merge_records(whole, prompts, parts), whole, expected_requests=len(prompts)
    )


@settings(max_examples=25, deadline=None)
@given(data=st.data())
def test_a_merged_summary_is_that_of_all_requests(simulate, data: st.DataObject) -> None:
    shards = data.draw(st.integers(1, 5))
    prompts = asked(data.draw(st.integers(shards, 60)))
    starts = [data.draw(st.floats(0, 1e5)) for _ in range(shards)]
    speeds = [data.draw(st.floats(0.005, 0.05)) for _ in range(shards)]
    seed, block = data.draw(st.integers(0, 99)), data.draw(st.integers(1, 30))
    parts = measure_shards(simulate, prompts, shards, starts, speeds, seed, block)
    merged = summarise_shards(prompts, parts)  # checks the identities of summaries too
    check_rows(rows_from_summaries(merged))
    single = [
        summarise_job(part, job(1), expected_requests=len(part) // len(RUNS)) for part in parts
    ]
    for index, cell in enumerate(merged):
        cells = [of_shard[index] for of_shard in single]
        records = [r for part in parts for r in part if r.run == cell.run]
        for name in COUNTS:
            assert getattr(cell, name) == sum(getattr(c, name) for c in cells), name
        histograms = [c.accept_histogram for c in cells]
        assert cell.accept_histogram == np.sum(histograms, axis=0).tolist()
        assert cell.by_device == [c.by_device[0] for c in cells]
        assert cell.devices == shards
        assert cell.output_tok_s == pytest.approx(np.mean([c.output_tok_s for c in cells]))
        latencies = [1000 * latency_s(r) for r in records]
        assert cell.latency_ms_p95 == pytest.approx(np.percentile(latencies, 95))
        assert cell.latency_ms_max == max(latencies)
        tpots = [1000 * t for r in records if (t := tpot_s(r)) is not None]
        assert cell.tpot_ms_mean == (pytest.approx(np.mean(tpots)) if tpots else None)
        assert cell.speedup == pytest.approx(cell.output_tok_s / merged[0].output_tok_s)
        assert cell.speedup_ci95_low <= cell.speedup_ci95_high


def test_one_shard_is_the_whole(simulate) -> None:
    prompts = asked(40)
    (part,) = measure_shards(simulate, prompts, 1, [5.0], [0.01])
    plain = summarise_job(part, job(1), expected_requests=40)
    assert summarise_shards(prompts, [part]) == plain


def test_a_clock_of_its_own_changes_nothing(simulate) -> None:
    prompts, speeds = asked(50), [0.01, 0.02, 0.015]
    near, far = (
        summarise_shards(prompts, measure_shards(simulate, prompts, 3, starts, speeds))
        for starts in ([0.0, 0.0, 0.0], [9000.0, 0.5, 123456.0])
    )
    for one, other in zip(near, far, strict=True):
        numbers, others = (
            {k: v for k, v in asdict(cell).items() if isinstance(v, int | float)}
            for cell in (one, other)
        )
        assert numbers == pytest.approx(others, rel=1e-6)


def test_requests_in_flight_are_those_of_each_device(simulate) -> None:
    """One slow device and one quick one: pooled, more requests than places would be in flight."""
    prompts = asked(60)
    parts = measure_shards(simulate, prompts, 2, [0.0, 0.0], [0.1, 0.01])
    cell = summarise_shards(prompts, parts)[0]
    pooled = cell.output_tok_s * cell.latency_ms_mean / 1000 / (cell.output_tokens / cell.requests)
    assert pooled > 1.5 * cell.concurrency
    assert all(requests_in_flight(device) <= cell.concurrency for device in cell.by_device)
    first, second = cell.by_device
    longer = replace(second, latency_ms_mean=2 * second.latency_ms_mean)
    mean = (first.requests * first.latency_ms_mean + second.requests * longer.latency_ms_mean) / 60
    with pytest.raises(UserError, match="mean tokens in shard 2' fails"):
        check_devices(replace(cell, by_device=[first, longer], latency_ms_mean=mean))


def test_a_devices_speed_cancels_in_the_interval(simulate) -> None:
    prompts = asked(120)
    same, mixed = (
        summarise_shards(prompts, measure_shards(simulate, prompts, 2, [0.0, 0.0], speeds))[1]
        for speeds in ([0.01, 0.01], [0.01, 0.02])
    )
    assert mixed.speedup == pytest.approx(same.speedup, rel=0.1)
    width, wider = (c.speedup_ci95_high - c.speedup_ci95_low for c in (same, mixed))
    assert wider < 1.5 * width


# ---------------------------------------------------------------------------- records


def test_merged_records_are_in_run_and_prompt_order(simulate) -> None:
    prompts = asked(11)
    parts = measure_shards(simulate, prompts, 3, [0.0] * 3, [0.01] * 3)
    merged = merge_records(job(3), prompts, [part[::-1] for part in parts])
    assert [(r.run, r.prompt_id) for r in merged] == [(run, p.id) for run in RUNS for p in prompts]
    assert [r.shard for r in merged[:11]] == [1, 2, 3] * 3 + [1, 2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda parts: parts[1].pop(), "shard 2 of 3: run 'dspark_k3' of prompt 'p4' turn 1 is missing"),
        (
            lambda parts: parts[1].append(replace(parts[1][0], turn=1)),
            "shard 2 of 3: run 'baseline' of prompt 'p1' turn 2 is not its own",
        ),
        (
            lambda parts: parts[0].append(replace(parts[0][0], prompt_id="p9")),
            "shard 1 of 3: run 'baseline' of prompt 'p9' turn 1 is not its own",
        ),
        (lambda parts: parts.reverse(), "shard 1 of 3: run 'baseline' of prompt 'p0' turn 1 is missing"),
    ],
    ids=["missing", "other_turn", "other_prompt", "other_shard"],
)  # fmt: skip
def test_other_requests_than_a_shards_own_are_refused(simulate, change, said: str) -> None:
    prompts = asked(6)
    parts = measure_shards(simulate, prompts, 3, [0.0] * 3, [0.01] * 3)
    change(parts)
    with pytest.raises(UserError) as error:
        merge_records(job(3), prompts, parts)
    assert str(error.value) == f"dataset 'math500' {said}: run the shard's bench job again"


# ---------------------------------------------------------------------------- verdicts


@settings(max_examples=40, deadline=None)
@given(
    outputs=st.lists(st.tuples(st.booleans(), st.sampled_from([None, 0.0, 0.5])), min_size=4),
    shards=st.integers(1, 4),
    temperature=st.sampled_from([0.0, 0.7]),
)
def test_merged_verdicts_are_those_of_all_requests(
    record, outputs: list[tuple[bool, float | None]], shards: int, temperature: float
) -> None:
    margins = {f"p{index}#0": margin for index, (_, margin) in enumerate(outputs)}
    baseline, arm = (
        [
            record(prompt_id=f"p{index}", run=run, ids=[7 + differs * (run != "baseline")])
            for index, (differs, _) in enumerate(outputs)
        ]
        for run in RUNS
    )

    def verdict(base: list[RequestRecord], other: list[RequestRecord]) -> dict[str, Any]:
        differences = compare_arms(base, other)
        for difference in differences:
            difference.margin = margins[difference.request_id]
        return judge(differences, len(base), "float32", temperature=temperature)

    parts = [
        {"dspark_k3": verdict(baseline[start::shards], arm[start::shards])}
        for start in range(shards)
    ]
    whole = {"dspark_k3": verdict(baseline, arm)}
    assert merge_verdicts(parts, [*baseline, *arm]) == whole


# ---------------------------------------------------------------------------- environments

FACTS = {"device": "H200", "precision": "float32", "torch": "2.13.0", "git_sha": "ab", "threads": 4}


def test_facts_that_may_differ_are_kept_for_every_shard() -> None:
    parts = [
        {**FACTS, "device_uuid": "GPU-a", "step_curves": {"sched": [[1, 2.0]]}, "clock_sm": "1"},
        {**FACTS, "device_uuid": "GPU-b", "step_curves": {"sched": [[1, 3.0]]}},
    ]
    assert merge_environments("gsm8k", parts) == {
        **FACTS,
        "device_uuid": ["GPU-a", "GPU-b"],
        "step_curves": [{"sched": [[1, 2.0]]}, {"sched": [[1, 3.0]]}],
        "clock_sm": ["1", None],
    }


@pytest.mark.parametrize(
    ("fact", "value"),
    [
        ("device", "H100"),
        ("precision", "bfloat16"),
        ("torch", "2.12.0"),
        ("git_sha", None),
        ("threads", 8),
        ("config_digest", "other"),
        ("job", "other"),
    ],
)
def test_shards_measured_otherwise_are_refused(fact: str, value: object) -> None:
    with pytest.raises(UserError) as error:
        merge_environments("gsm8k", [FACTS, FACTS, {**FACTS, fact: value}])
    assert str(error.value) == (
        f"dataset 'gsm8k': {fact} is {FACTS.get(fact)} in shard 1 of 3 and {value} in shard 3: one "
        "table needs shards that were measured alike, delete the odd one's folder and run it again"
    )
