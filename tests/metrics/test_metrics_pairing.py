"""Which cells may be set against a baseline: those that were measured as it was."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from dspark.config import DatasetConfig, EngineConfig, JobConfig, Mode, RunConfig
from dspark.errors import UserError
from dspark.metrics.cell import CellSummary
from dspark.metrics.pairing import Mismatch, mismatches
from dspark.metrics.summary import summarise_job

STATED = {
    "device": "NVIDIA H200",
    "device_uuid": "GPU-1",
    "threads": 8,
    "git_sha": "aaaa",
    "git_dirty": False,
    "target": "tiny",
    "target_sha256": "t1",
    "versions": {"dspark": "0.1.0", "torch": "2.13.0", "transformers": "5.24.0"},
    "prompts_sha256": "p1",
    "step_curves": {},
}


@pytest.fixture(scope="module")
def pair(simulate) -> list[CellSummary]:
    """A dataset's baseline and k = 3, as one job leaves them."""
    job = JobConfig(
        experiment="demo",
        dataset=DatasetConfig(name="math500"),
        runs={"baseline": RunConfig(), "dspark_k3": RunConfig(mode=Mode.speculative, k=3)},
        engine=EngineConfig(concurrency=4),
    )
    records = [*simulate("baseline", 0, 64), *simulate("dspark_k3", 3, 64, seed=1)]
    return summarise_job(records, job, expected_requests=64, settings=STATED)


def stated_otherwise(cell: CellSummary, **settings: Any) -> CellSummary:
    return replace(cell, settings={**cell.settings, **settings})


def test_cells_of_one_job_are_alike(pair: list[CellSummary]) -> None:
    assert mismatches(pair) == {}
    other_dataset = [stated_otherwise(replace(c, dataset="b"), device="A100") for c in pair]
    assert mismatches([*pair, *other_dataset]) == {}


@pytest.mark.parametrize(
    ("setting", "value"),
    [
        ("device", "NVIDIA A100"),
        ("threads", 4),
        ("git_sha", "bbbb"),
        ("git_dirty", True),
        ("target", "other"),
        ("target_sha256", "t2"),
        ("prompts_sha256", "p2"),
        ("experiment", "other"),
        ("temperature", 0.7),
        ("max_new_tokens", 64),
        ("ignore_eos", True),
        ("interleave", 16),
        ("a_setting_of_tomorrow", "on"),
    ],
)
def test_a_setting_that_decides_numbers_is_named_with_both_values(
    pair: list[CellSummary], setting: str, value: Any
) -> None:
    baseline, arm = pair
    found = mismatches([baseline, stated_otherwise(arm, **{setting: value})])
    wanted = Mismatch(setting, value, baseline.settings.get(setting))
    assert found == {("math500", "dspark_k3"): (wanted,)}


@pytest.mark.parametrize("package", ["dspark", "torch", "transformers"])
def test_every_version_of_the_engine_counts(pair: list[CellSummary], package: str) -> None:
    baseline, arm = pair
    versions = {**STATED["versions"], package: "9.9"}
    [differing] = mismatches([baseline, stated_otherwise(arm, versions=versions)]).values()
    assert differing == (Mismatch(package, "9.9", STATED["versions"][package]),)


@pytest.mark.parametrize(
    ("field", "value"),
    [("precision", "bfloat16"), ("concurrency", 8), ("requests", 63), ("devices", 2)],
)
def test_precision_concurrency_requests_and_devices_count(
    pair: list[CellSummary], field: str, value: Any
) -> None:
    baseline, arm = pair
    [differing] = mismatches([baseline, replace(arm, **{field: value})]).values()
    assert differing == (Mismatch(field, value, getattr(baseline, field)),)


@pytest.mark.parametrize(
    ("setting", "value"),
    [("device_uuid", "GPU-2"), ("config_digest", "0"), ("step_curves", {"s": [1.0]})],
)
def test_what_decides_no_number_is_let_pass(
    pair: list[CellSummary], setting: str, value: Any
) -> None:
    assert mismatches([pair[0], stated_otherwise(pair[1], **{setting: value})]) == {}


def test_all_that_differs_is_named(pair: list[CellSummary]) -> None:
    baseline, arm = pair
    other = stated_otherwise(
        replace(arm, precision="bfloat16"), device=None, temperature=0.7, target="a 'b'"
    )
    [differing] = mismatches([baseline, other]).values()
    assert [str(mismatch) for mismatch in differing] == [
        'device unknown against "NVIDIA H200"',
        'precision "bfloat16" against "float32"',
        'target "a \'b\'" against "tiny"',
        "temperature 0.7 against 0",
    ]


def test_another_baseline_of_the_same_settings_is_seen(pair: list[CellSummary]) -> None:
    baseline, arm = pair
    measured_again = replace(baseline, output_tok_s=1.25 * baseline.output_tok_s)
    [[differing]] = mismatches([measured_again, arm]).values()
    assert differing.field == "baseline_tok_s"
    assert differing.cell == pytest.approx(baseline.output_tok_s)
    assert differing.baseline == measured_again.output_tok_s


def test_a_dataset_without_baseline_is_refused(pair: list[CellSummary]) -> None:
    with pytest.raises(UserError, match=r"'math500' has no baseline summary: .* math500/baseline"):
        mismatches(pair[1:])
