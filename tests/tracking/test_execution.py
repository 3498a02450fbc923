"""Reading a results tree: what becomes a param, a metric, a tag, an input, and what is refused."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from results_tree import (
    BEGAN,
    REQUESTS,
    SHA,
    WEIGHTS,
    WINDOWS,
    summary,
    write_dataset,
    write_summary,
)

from dspark.config import DatasetConfig, PromptSource
from dspark.data.prompts import prompts_digest, read_prompts
from dspark.decode.usage import read_usage, write_usage
from dspark.errors import UserError
from dspark.metrics.records_io import read_records, write_records
from dspark.tracking.execution import Cell, read_execution, table_of_cells
from dspark.tracking.inputs import prompts_input


def read_cell(results_dir: Path, name: str) -> Cell:
    [cell] = [cell for cell in read_execution(results_dir).cells if cell.name == name]
    return cell


def test_cells_come_in_order_with_their_facts(results_dir: Path) -> None:
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
    facts = {
        "device": "Intel Xeon",
        "git_sha": SHA,
        "git_dirty": "false",
        "precision": "float32",
        "target": "tiny",
        "drafter": "tiny_dspark",
    }
    assert execution.tags == facts
    assert [cell.tags for cell in execution.cells] == [facts] * 6


def test_facts_that_differ_are_all_told_of_the_whole(results_dir: Path) -> None:
    settings = summary(results_dir, "gsm8k", "dspark_k3")["settings"]
    changed = {**settings, "device": "Another", "git_sha": None}
    write_summary(results_dir, "gsm8k", "dspark_k3", settings=changed)
    execution = read_execution(results_dir)
    assert execution.tags["device"] == "Another, Intel Xeon"
    assert execution.tags["git_sha"] == f"{SHA}, unknown"


def test_params_are_what_tells_cells_apart(results_dir: Path) -> None:
    assert read_cell(results_dir, "gsm8k/dspark_k3").params == {
        "dataset": "gsm8k",
        "run": "dspark_k3",
        "k": "3",
        "schedule": "false",
        "confidence_threshold": "0.0",
        "concurrency": "1",
    }


def test_what_a_sweep_varies_is_a_param_of_the_cells_that_it_concerns(results_dir: Path) -> None:
    point = "runs.dspark_k3.k=3,sampling.seed=1,datasets.gsm8k.max_new_tokens=64"
    for dataset in ("gsm8k", "humaneval"):
        shutil.copytree(results_dir / dataset, results_dir / point / dataset)
    added = {
        name: params.keys() - {"dataset", "run", "k", "schedule", "concurrency"}
        for name in ("gsm8k/baseline", "humaneval/dspark_k3")
        for params in [read_cell(results_dir, f"{point}/{name}").params]
    }
    assert added == {
        "gsm8k/baseline": {"confidence_threshold", "seed", "max_new_tokens"},
        "humaneval/dspark_k3": {"confidence_threshold", "seed"},
    }
    assert read_cell(results_dir, f"{point}/gsm8k/baseline").params["max_new_tokens"] == "64"


def test_metrics_are_the_numbers_that_cells_are_compared_by(results_dir: Path) -> None:
    told = summary(results_dir, "gsm8k", "dspark_k3")
    metrics = read_cell(results_dir, "gsm8k/dspark_k3").metrics
    for name in ("requests", "output_tok_s", "speedup", "ttft_ms_p95", "accept_rate", "window_s"):
        assert metrics[name] == told[name]
    assert [metrics[f"accept_p{i}"] for i in (1, 2, 3)] == told["accept_p"]
    assert metrics["lossless_identical"] == told["lossless"]["identical"] == REQUESTS
    # counts, settings and params are in the summary alone
    left_out = ("k", "concurrency", "steps", "accepted", "turns", "lossless_temperature")
    assert not set(left_out) & set(metrics)
    assert not [name for name in metrics if "/" in name or name.startswith(("settings", "by_dev"))]
    assert "accept_rate" not in read_cell(results_dir, "gsm8k/baseline").metrics


def test_devices_are_told_apart_where_there_are_several(results_dir: Path) -> None:
    devices = summary(results_dir, "gsm8k", "dspark_k3")["by_device"] * 2
    write_summary(results_dir, "gsm8k", "dspark_k3", by_device=devices)
    metrics = read_cell(results_dir, "gsm8k/dspark_k3").metrics
    rates = [metrics[f"by_device{number}_output_tok_s"] for number in (1, 2)]
    assert rates == [metrics["output_tok_s"]] * 2


def test_inputs_are_the_prompts_and_the_models_that_were_used(results_dir: Path) -> None:
    prompts = results_dir / "gsm8k" / "prompts.jsonl"
    sha256 = prompts_digest(read_prompts(prompts))
    asked, target, drafter = read_cell(results_dir, "gsm8k/dspark_k3").inputs
    assert (asked.context, asked.name, asked.digest) == ("eval", "gsm8k", sha256[:32])
    assert asked.source == {"uri": prompts.as_posix()}
    assert asked.profile == {
        "num_rows": REQUESTS,
        "turns": REQUESTS,
        "source": "builtin",
        "sha256": sha256,
    }
    assert (target.context, target.name, target.source) == (
        "target",
        "tiny",
        {"uri": str(json.loads((results_dir / "models/target.json").read_text())["path"])},
    )
    assert target.profile["sha256"] == {"model.safetensors": WEIGHTS["target"]}
    assert (drafter.context, drafter.name) == ("drafter", "tiny_dspark")
    assert drafter.source == {"uri": "hf://someone/tiny-dspark@abc123"}
    assert drafter.profile == {
        "source": "hub",
        "revision": "abc123",
        "sha256": {"model.safetensors": WEIGHTS["drafter"]},
    }
    assert len({asked.digest, target.digest, drafter.digest}) == 3
    baseline = read_cell(results_dir, "gsm8k/baseline").inputs
    assert baseline == (asked, target)  # it drafts nothing


def test_prompts_of_the_hub_and_of_a_file_say_where_they_are_from(results_dir: Path) -> None:
    asked = results_dir / "gsm8k" / "prompts.jsonl"
    hub = DatasetConfig(
        name="gsm8k",
        source=PromptSource.hub,
        repo="openai/gsm8k",
        revision="abc",
        file="test.parquet",
    )
    said = prompts_input(hub, asked)
    assert said.source_type == "hugging_face"
    assert said.source == {
        "path": "openai/gsm8k",
        "data_files": "test.parquet",
        "revision": "abc",
    }
    own = DatasetConfig(name="own", source=PromptSource.file, path="mine.jsonl")
    assert prompts_input(own, asked).source == {"uri": "mine.jsonl"}
    assert prompts_input(own, asked).digest == said.digest


def test_a_cell_lasts_from_its_first_window_to_its_last(results_dir: Path) -> None:
    execution = read_execution(results_dir)
    begun = round(1000 * BEGAN.timestamp())
    cell = execution.cells[0]
    assert cell.began_ms == execution.began_ms == begun
    windows = [u for u in read_usage(results_dir / "gsm8k/usage.jsonl") if u.run == "baseline"]
    assert len(windows) == WINDOWS
    length = 90 + windows[-1].seconds  # the last begins 90 s after the first
    assert cell.ended_ms == pytest.approx(begun + 1000 * length, abs=1)
    assert execution.ended_ms == max(c.ended_ms for c in execution.cells if c.ended_ms)


def test_records_of_an_earlier_version_have_no_usage(results_dir: Path) -> None:
    for dataset in ("gsm8k", "humaneval"):
        (results_dir / dataset / "usage.jsonl").unlink()
    execution = read_execution(results_dir)
    assert execution.began_ms is execution.ended_ms is execution.cells[0].began_ms is None
    names = {point.metric for point in execution.cells[0].points}
    assert names == {"over_time/output_tok_s", "over_time/requests_done"}


def test_a_table_of_cells_begins_with_the_columns_of_table_md(results_dir: Path) -> None:
    cells = read_execution(results_dir).cells
    table = table_of_cells(cells)
    columns = table["columns"]
    assert columns[:9] == [
        *("dataset", "run", "k", "schedule", "confidence_threshold", "concurrency"),
        *("requests", "output_tok_s", "speedup"),
    ]
    assert columns.index("accept_len") < columns.index("accept_len_delivered")
    rows = [dict(zip(columns, row, strict=True)) for row in table["data"]]
    assert [(row["dataset"], row["run"]) for row in rows] == [(c.dataset, c.run) for c in cells]
    assert rows[0]["accept_rate"] is None
    assert rows[1]["accept_rate"] == cells[1].metrics["accept_rate"]


def change_usage(results_dir: Path) -> None:
    path = results_dir / "gsm8k" / "usage.jsonl"
    windows = read_usage(path)
    next(u for u in windows if u.run == "dspark_k3").process_memory_megabytes += 1
    write_usage(path, windows)


def test_a_change_of_what_a_cell_shows_changes_its_digest_and_the_experiment_s(
    results_dir: Path,
) -> None:
    for change in (
        lambda: write_summary(results_dir, "gsm8k", "dspark_k3", output_tok_s=61.0),
        lambda: change_usage(results_dir),
    ):
        before = read_execution(results_dir)
        change()
        after = read_execution(results_dir)
        cells = zip(before.cells, after.cells, strict=True)
        assert [b.name for b, a in cells if a.digest != b.digest] == ["gsm8k/dspark_k3"]
        assert after.digest != before.digest


def test_another_drafter_changes_the_digests_of_what_drafts(results_dir: Path) -> None:
    before = read_execution(results_dir)
    path = results_dir / "models" / "drafter.json"
    path.write_text(path.read_text().replace(WEIGHTS["drafter"], "ff" * 32))
    after = read_execution(results_dir)
    cells = zip(before.cells, after.cells, strict=True)
    assert {a.run: a.digest != b.digest for b, a in cells} == {
        "baseline": False,
        "dspark_k3": True,
        "dspark_k7": True,
    }


def test_where_the_models_lie_changes_no_digest(results_dir: Path) -> None:
    before = read_execution(results_dir)
    path = results_dir / "models" / "target.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "path": "/moved"}))
    assert read_execution(results_dir).digest == before.digest


def test_named_summaries_are_the_whole_execution(results_dir: Path) -> None:
    path = results_dir / "gsm8k" / "baseline" / "summary.json"
    execution = read_execution(results_dir, [path])
    assert [cell.name for cell in execution.cells] == ["gsm8k/baseline"]
    assert list(execution.configs) == ["gsm8k", "models"]


def test_a_sweep_s_cells_are_named_by_their_points_too(results_dir: Path) -> None:
    points = [f"engine.concurrency={n},runs.dspark_k3.k=3" for n in (1, 4)]
    for point in points:
        write_dataset(results_dir / point, "mbpp", ["baseline"])
    execution = read_execution(results_dir)
    cells = execution.cells
    assert [cell.name for cell in cells if cell.point] == [f"{p}/mbpp/baseline" for p in points]
    assert len(cells) == 6 + 2
    assert set(execution.configs) == {
        "models",
        "gsm8k",
        "humaneval",
        *(f"{p}/mbpp" for p in points),
    }
    named = [results_dir / point / "mbpp" / "baseline" / "summary.json" for point in points]
    assert [cell.point for cell in read_execution(results_dir, named).cells] == points


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("gsm8k/baseline/summary.json", "{", "is not valid JSON"),
        ("gsm8k/baseline/summary.json", "[]", "holds no JSON object"),
        ("gsm8k/baseline/summary.json", '{"settings": {"git_sha": null}}', "state the device"),
        ("gsm8k/baseline/summary.json", '{"settings": 3}', "state the device"),
        ("gsm8k/config.yaml", "engine: {concurrncy: 4}", "did you mean 'concurrency'"),
        (
            "gsm8k/config.yaml",
            "experiment: demo\ndataset: {name: x}\nruns: {k4: {k: 4}}",
            "no run '",
        ),
        ("gsm8k/requests.parquet", "", "cannot be read"),
        ("gsm8k/prompts.jsonl", "{}\n", "'id' is missing"),
        ("models/target.json", "{}", "does not state the path"),
        (
            "models/target.json",
            '{"path": "/x", "revision": null, "files": 3}',
            "does not state the files",
        ),
    ],
)
def test_a_malformed_file_is_named(results_dir: Path, name: str, text: str, message: str) -> None:
    (results_dir / name).write_text(text)
    with pytest.raises(UserError, match=message) as caught:
        read_execution(results_dir)
    assert name in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "name",
    [
        "table.md",
        "gsm8k/config.yaml",
        "gsm8k/prompts.jsonl",
        "gsm8k/requests.parquet",
        "models/config.yaml",
        "models/drafter.json",
    ],
)
def test_an_absent_file_is_named(results_dir: Path, name: str) -> None:
    (results_dir / name).unlink()
    with pytest.raises(UserError) as caught:
        read_execution(results_dir)
    assert name in str(caught.value)


def test_records_that_a_cell_was_not_summarised_from_are_refused(results_dir: Path) -> None:
    path = results_dir / "gsm8k" / "requests.parquet"
    write_records(path, read_records(path)[:-1])
    with pytest.raises(
        UserError,
        match=r"gsm8k/dspark_k7/summary.json' was made from other requests than '.*gsm8k/req",
    ):
        read_execution(results_dir)


def test_an_experiment_that_has_not_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"no summary.json under .*run the experiment"):
        read_execution(tmp_path / "absent")


def test_a_summary_of_another_experiment_is_refused(results_dir: Path, tmp_path: Path) -> None:
    elsewhere = tmp_path / "results" / "other" / "gsm8k" / "baseline" / "summary.json"
    with pytest.raises(UserError, match="is not a cell of"):
        read_execution(results_dir, [elsewhere])
