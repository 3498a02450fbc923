"""The model card: front matter that the hub reads, numbers that are the table's, and the way back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard
from measured import write_results

from dspark.errors import UserError
from dspark.metrics.cell import read_summary, write_summary
from dspark.report.export import write_export
from dspark.report.table import parse_table, write_table


@pytest.fixture
def summaries(tmp_path: Path) -> list[Path]:
    paths = write_results(tmp_path / "demo")
    (tmp_path / "demo" / "command.txt").write_text("dspark run demo engine.concurrency=1\n")
    return paths


def card(paths: list[Path], out: Path, **options: Any) -> str:
    return write_export(paths, out / "card.md", "model-card", **options)


def change(path: Path, **settings: Any) -> None:
    cell = read_summary(path)
    cell.settings |= settings
    write_summary(path, cell)


def test_front_matter_holds_the_tables_numbers(summaries: list[Path], tmp_path: Path) -> None:
    text = card(summaries, tmp_path)
    front = yaml.safe_load(text.split("---\n")[1])
    [index] = front["model-index"]
    assert index["name"] == "tiny-dspark"
    rows = {
        (row.dataset, row.run): row
        for row in parse_table(write_table(summaries, tmp_path / "t.md"))
    }
    seen = set()
    for result in index["results"]:
        assert result["task"] == {"type": "text-generation"}
        for metric in result["metrics"]:
            cell = (result["dataset"]["name"], metric["args"]["run"])
            seen.add((*cell, metric["type"]))
            assert metric["value"] == pytest.approx(getattr(rows[cell], metric["type"]))
            assert metric["name"].endswith(f"({cell[1]})")
    assert [result["dataset"]["name"] for result in index["results"]] == ["gsm8k", "mt_bench"]
    wanted = {"speedup", "accept_len", "accept_rate", "output_tok_s", "ttft_ms_mean"}
    assert {kind for _, run, kind in seen if run == "dspark_k3"} >= wanted
    assert ("gsm8k", "baseline", "speedup") not in seen
    assert ("gsm8k", "baseline", "output_tok_s") in seen


def test_the_hubs_own_classes_read_it(summaries: list[Path], tmp_path: Path) -> None:
    read = ModelCard(card(summaries, tmp_path))
    assert read.data.model_name == "tiny-dspark"
    results = read.data.eval_results
    cell = read_summary(summaries[1])
    [speedup] = [
        result
        for result in results
        if (result.dataset_name, result.metric_type) == ("gsm8k", "speedup")
        and result.metric_args["run"] == cell.run
    ]
    assert speedup.metric_value == round(cell.speedup, 3)
    assert speedup.metric_args["ci95"] == pytest.approx(
        [cell.speedup_ci95_low, cell.speedup_ci95_high], abs=1e-4
    )
    assert ModelCard(str(read)).data.to_dict() == read.data.to_dict()


def test_the_page_says_what_was_measured_and_how_to_repeat_it(
    summaries: list[Path], tmp_path: Path
) -> None:
    change(summaries[3], max_new_tokens=64)  # mt_bench's baseline
    change(summaries[4], max_new_tokens=64)
    change(summaries[5], max_new_tokens=64)
    page = card(summaries, tmp_path).split("---\n", 2)[2]
    assert write_table(summaries, tmp_path / "t.md").rstrip("\n") in page
    for line in (
        "| device | cpu |",
        "| torch | 2.13.0 |",
        "| concurrency | 1 |",
        "| max_new_tokens | 128 (gsm8k); 64 (mt_bench) |",
    ):
        assert line in page.splitlines()
    assert page.endswith(
        "In a checkout of commit 0123abc set up by `make demo`, with this experiment's file in "
        "`config/experiment/`:\n\n"
        "```\ndspark run demo engine.concurrency=1\n```\n"
    )


def test_changes_that_were_not_committed_are_told(summaries: list[Path], tmp_path: Path) -> None:
    for path in summaries:
        change(path, git_dirty=True)
    assert "commit 0123abc, with changes that were not committed, set up" in card(
        summaries, tmp_path
    )


def test_a_sweep_has_one_card(tmp_path: Path) -> None:
    points = [tmp_path / "sweep" / f"sampling.temperature={value}" for value in ("0.0", "0.5")]
    paths = [path for point in points for path in write_results(point, ["gsm8k"], ks=(0, 3))]
    (tmp_path / "sweep" / "command.txt").write_text("dspark run sweep\n")
    text = card(paths, tmp_path)
    assert text.endswith("```\ndspark run sweep\n```\n")
    names = [result.metric_name for result in ModelCard(text).data.eval_results]
    assert len(set(names)) == len(names)
    assert "Speedup over plain decoding (dspark_k3, sampling.temperature=0.5)" in names


def test_a_speedup_over_a_strange_baseline_is_no_result(
    summaries: list[Path], tmp_path: Path
) -> None:
    change(summaries[1], device="NVIDIA H200")
    results = ModelCard(card(summaries, tmp_path, allow_unpaired=True)).data.eval_results
    of_arm = [
        r for r in results if r.dataset_name == "gsm8k" and r.metric_args["run"] == "dspark_k3"
    ]
    assert {"accept_len", "output_tok_s"} <= {r.metric_type for r in of_arm}
    assert "speedup" not in {r.metric_type for r in of_arm}


def test_a_card_is_of_one_drafter(summaries: list[Path], tmp_path: Path) -> None:
    for path in summaries[3:]:
        change(path, drafter="other")
    with pytest.raises(UserError) as caught:
        card(summaries, tmp_path)
    assert str(caught.value) == (
        "the cells are of several drafters (other, tiny-dspark): make a card of each"
    )


def test_a_run_that_nobody_can_repeat_has_no_card(summaries: list[Path], tmp_path: Path) -> None:
    command = tmp_path / "demo" / "command.txt"
    command.unlink()
    with pytest.raises(UserError) as caught:
        card(summaries, tmp_path)
    assert str(caught.value) == (
        f"'{command}' cannot be read (No such file or directory), so how the experiment was run is not "
        "known: write the command into it, or run the experiment"
    )
    assert not (tmp_path / "card.md").exists()
