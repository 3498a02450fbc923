"""Reading a results tree: what becomes a param, a metric, a digest, and what is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from results_tree import SHA, write_dataset, write_summary

from dspark.errors import UserError
from dspark.tracking.execution import read_execution


def test_cells_come_in_order_with_their_provenance(results_dir: Path) -> None:
    execution = read_execution(results_dir)
    assert execution.experiment == "demo"
    assert [cell.name for cell in execution.cells] == [
        "gsm8k/baseline",
        "gsm8k/dspark_k3",
        "gsm8k/dspark_k7",
        "humaneval/baseline",
        "humaneval/dspark_k3",
        "humaneval/dspark_k7",
    ]
    assert (execution.git_sha, execution.device) == (SHA, "Intel Xeon")


def test_params_are_the_resolved_config_with_this_run_alone(results_dir: Path) -> None:
    params = read_execution(results_dir).cells[1].params
    assert params["experiment"] == "demo"
    assert params["dataset.name"] == "gsm8k"
    assert params["engine.concurrency"] == "4"
    assert params["engine.device"] == "auto"
    assert params["sampling.stop"] == "[]"
    assert (params["run.mode"], params["run.k"]) == ("speculative", "3")
    assert not [key for key in params if key.startswith("runs")]


def test_texts_of_the_settings_are_params_too(results_dir: Path) -> None:
    params = read_execution(results_dir).cells[1].params
    stated = {key: text for key, text in params.items() if key.startswith("settings.")}
    assert stated == {
        "settings.device": "Intel Xeon",
        "settings.git_sha": SHA,
        "settings.target": "tiny",
        "settings.versions.torch": "2.13.0",
    }


def test_metrics_are_the_numbers_of_the_summary(results_dir: Path) -> None:
    baseline, k3 = (cell.metrics for cell in read_execution(results_dir).cells[:2])
    assert k3 == {
        "requests": 3,
        "output_tok_s": 60.25,
        "speedup": pytest.approx(60.25 / 41.5),
        "ttft_ms_p95": 88.125,
        "accept_rate": 0.61,
        "accept_p1": 0.78,
        "accept_p2": 0.61,
        "accept_p3": 0.44,
        "by_device1/windows": 2,
        "settings/threads": 4,
        "lossless/identical_requests": 3,
    }
    assert "accept_rate" not in baseline and "accept_p1" not in baseline


def test_a_changed_summary_changes_its_own_digest_and_the_experiment_s(results_dir: Path) -> None:
    before = read_execution(results_dir)
    write_summary(results_dir, "gsm8k", "dspark_k3", output_tok_s=61.0)
    after = read_execution(results_dir)
    changed = [
        b.name for b, a in zip(before.cells, after.cells, strict=True) if a.digest != b.digest
    ]
    assert changed == ["gsm8k/dspark_k3"]
    assert after.digest != before.digest


def test_named_summaries_are_the_whole_execution(results_dir: Path) -> None:
    path = results_dir / "gsm8k" / "baseline" / "summary.json"
    assert [cell.name for cell in read_execution(results_dir, [path]).cells] == ["gsm8k/baseline"]


def test_a_sweep_s_cells_are_named_by_their_points_too(results_dir: Path) -> None:
    points = [f"engine.concurrency={n},runs.dspark_k3.k=3" for n in (1, 4)]
    for point in points:
        write_dataset(results_dir / point, "mbpp", ["baseline"])
    cells = read_execution(results_dir).cells
    assert [cell.name for cell in cells if cell.point] == [f"{p}/mbpp/baseline" for p in points]
    assert len(cells) == 6 + 2
    named = [results_dir / point / "mbpp" / "baseline" / "summary.json" for point in points]
    assert [cell.point for cell in read_execution(results_dir, named).cells] == points


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gsm8k/baseline/summary.json", "{", "is not valid JSON"),
        ("gsm8k/baseline/summary.json", "[]", "holds no JSON object"),
        ("gsm8k/baseline/summary.json", '{"settings": {"git_sha": null}}', "state the device"),
        ("gsm8k/config.yaml", "engine: {concurrncy: 4}", "did you mean 'concurrency'"),
        (
            "gsm8k/config.yaml",
            "experiment: demo\ndataset: {name: x}\nruns: {k4: {k: 4}}",
            "no run '",
        ),
    ],
)
def test_a_malformed_file_is_named(results_dir: Path, name: str, text: str, message: str) -> None:
    (results_dir / name).write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_execution(results_dir)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["table.md", "gsm8k/config.yaml", "gsm8k/prompts.jsonl"])
def test_an_absent_file_is_named(results_dir: Path, name: str) -> None:
    (results_dir / name).unlink()
    with pytest.raises(UserError) as caught:
        read_execution(results_dir)
    assert name in str(caught.value)


def test_an_experiment_that_has_not_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no summary.json under .*run the experiment"):
        read_execution(tmp_path / "absent")


def test_a_summary_of_another_experiment_is_refused(results_dir: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "results" / "other" / "gsm8k" / "baseline" / "summary.json"
    with pytest.raises(UserError, match="is not a cell of"):
        read_execution(results_dir, [elsewhere])
