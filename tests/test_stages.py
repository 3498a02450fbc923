"""Stages on files alone: a dataset that is cut into shards ends as one that is not."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

from dspark import stages
from dspark.config import (
    DatasetConfig,
    Device,
    DrafterConfig,
    EngineConfig,
    History,
    JobConfig,
    Mode,
    ModelsConfig,
    ModelSource,
    Precision,
    PromptSource,
    RunConfig,
    TargetConfig,
    digest,
    to_yaml,
)
from dspark.data.prompts import read_prompts, split_prompts
from dspark.decode.records import RequestRecord
from dspark.decode.usage import read_usage
from dspark.errors import UserError
from dspark.metrics.cell import CellSummary, read_summary
from dspark.metrics.records_io import read_records
from tiny_models import save_tiny_drafter, save_tiny_target

RUNS = {
    "baseline": RunConfig(),
    "dspark_k3": RunConfig(Mode.speculative, 3),
    "dspark_k7": RunConfig(Mode.speculative, 7),
    "dspark_sure": RunConfig(Mode.speculative, 4, 0.5),
    "dspark_sched": RunConfig(Mode.speculative, 2, schedule=True),
}
# What a schedule verifies follows from step times, so only its texts are the same again.
REPEATED = ["baseline", "dspark_k3", "dspark_k7", "dspark_sure"]
SHARDS = 3
TIMES = {"t_submit", "t_first", "t_last", "step_t"}
TIMED = (
    *("latency", "ttft", "tpot", "itl", "output_tok_s", "speedup", "window", "by_device"),
    *("step_ms", "break_even"),
)


@pytest.fixture(scope="module", autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    save_tiny_target(folder / "target")
    save_tiny_drafter(folder / "drafter", folder / "target")
    config = ModelsConfig(
        TargetConfig("tiny", ModelSource.local, path=str(folder / "target")),
        DrafterConfig("tiny", ModelSource.local, path=str(folder / "drafter")),
    )
    (folder / "config.yaml").write_text(to_yaml(config))
    stages.prepare(folder / "config.yaml", folder / "store", folder)
    return folder


def job_config(shards: int, **dataset: Any) -> JobConfig:
    """Seven conversations of two turns, so that three shards get 3, 2 and 2."""
    fields = {"source": PromptSource.builtin, "limit": 7, "max_new_tokens": 12, **dataset}
    return JobConfig(
        experiment="tiny",
        dataset=DatasetConfig("mt_bench", history=History.model, shards=shards, **fields),
        runs=RUNS,
        engine=EngineConfig(Device.cpu, concurrency=2, interleave=1, warmup=1),
    )


def start(folder: Path, config: JobConfig) -> Path:
    """The folder of a dataset whose prompts are written."""
    folder.mkdir()
    (folder / "config.yaml").write_text(to_yaml(config))
    stages.prompts(folder / "config.yaml", folder / "prompts.jsonl")
    return folder


def bench(folder: Path, models: Path, shard: int = 1) -> None:
    config, prompts = folder / "config.yaml", folder / "prompts.jsonl"
    stages.bench(config, prompts, models, folder, models / "profiles", threads=1, shard=shard)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    folder = start(tmp_path_factory.mktemp("whole") / "mt_bench", job_config(1))
    bench(folder, models)
    stages.summarise(folder, models)
    return folder


@pytest.fixture(scope="module")
def cut(tmp_path_factory: pytest.TempPathFactory, models: Path) -> Path:
    folder = start(tmp_path_factory.mktemp("cut") / "mt_bench", job_config(SHARDS))
    for shard in (2, 3, 1):
        bench(folder, models, shard)
    stages.merge(folder)
    stages.summarise(folder, models)
    return folder


@pytest.fixture
def unmerged(cut: Path, tmp_path: Path) -> Path:
    """Measured shards that a test may spoil."""
    folder = tmp_path / "mt_bench"
    shutil.copytree(cut, folder)
    for path in folder.glob("*.parquet"):
        path.unlink()
    return folder


def counts(record: RequestRecord) -> dict[str, Any]:
    """All of a record that no clock, no device and no neighbour decides."""
    left_out = {*TIMES, "window", "shard"}
    if RUNS[record.run].confidence_threshold:
        left_out.add("step_drafted")
    return {key: value for key, value in asdict(record).items() if key not in left_out}


def untimed(cell: CellSummary) -> dict[str, Any]:
    left_out = {"devices", "settings", *(["drafted"] if cell.confidence_threshold else [])}
    return {
        key: value
        for key, value in asdict(cell).items()
        if key not in left_out and not key.startswith(TIMED)
    }


# ---------------------------------------------------------------------------- the same in parts


def test_shards_decode_what_the_whole_decodes(whole: Path, cut: Path) -> None:
    one, other = (read_records(folder / "requests.parquet") for folder in (whole, cut))
    assert [(r.run, r.request_id) for r in one] == [(r.run, r.request_id) for r in other]
    assert [r.output_token_ids for r in one] == [r.output_token_ids for r in other]
    for first, second in zip(one, other, strict=True):
        if first.run in REPEATED:
            assert counts(first) == counts(second)
    assert sum(sum(r.step_accepted) for r in one if r.run == "dspark_k3") > 0


@pytest.mark.parametrize("run", RUNS)
def test_cells_of_shards_count_what_the_whole_counts(whole: Path, cut: Path, run: str) -> None:
    one, other = (read_summary(folder / run / "summary.json") for folder in (whole, cut))
    if run in REPEATED:
        assert untimed(one) == untimed(other)
    assert one.lossless == other.lossless
    assert (one.requests, other.requests, one.devices, other.devices) == (14, 14, 1, SHARDS)
    assert [device.requests for device in other.by_device] == [6, 4, 4]
    assert (one.settings["shards"], other.settings["shards"]) == (1, SHARDS)


def test_verdicts_of_shards_are_those_of_the_whole(whole: Path, cut: Path) -> None:
    one, other = (json.loads((folder / "lossless.json").read_text()) for folder in (whole, cut))
    assert one == other
    assert {verdict["verdict"] for verdict in one.values()} == {"identical"}


def test_each_shard_has_its_own_prompts_and_folder(whole: Path, cut: Path) -> None:
    prompts = read_prompts(cut / "prompts.jsonl")
    folders = sorted(cut.glob("shards/*"))
    assert [folder.name for folder in folders] == ["1-of-3", "2-of-3", "3-of-3"]
    for shard, (folder, mine) in enumerate(
        zip(folders, split_prompts(job_config(SHARDS).dataset, prompts), strict=True), start=1
    ):
        records = read_records(folder / "requests.parquet")
        assert {r.prompt_id for r in records} == {prompt.id for prompt in mine}
        assert {r.shard for r in records} == {shard}
        assert sorted(path.name for path in folder.glob("[!.]*")) == [
            "environment.json",
            "lossless.json",
            "requests.parquet",
            "usage.jsonl",
        ]
    assert not (whole / "shards").exists()


def test_what_was_used_is_told_of_each_window_of_each_shard(whole: Path, cut: Path) -> None:
    for folder, shards in ((whole, {1}), (cut, set(range(1, SHARDS + 1)))):
        used = read_usage(folder / "usage.jsonl")
        windows = {(r.shard, r.run, r.window) for r in read_records(folder / "requests.parquet")}
        assert {(u.shard, u.run, u.window) for u in used} == windows
        assert len(used) == len(windows) and {u.shard for u in used} == shards
        assert all(u.seconds > 0 and u.process_memory_megabytes > 0 for u in used)


def test_the_environment_tells_what_differs_by_shard(whole: Path, cut: Path) -> None:
    one, other = (json.loads((folder / "environment.json").read_text()) for folder in (whole, cut))
    assert (other["device"], other["torch"]) == (one["device"], one["torch"])
    assert other["precision"] == one["precision"] == "float32"
    assert other["config_digest"] != one["config_digest"]
    assert len(other["load_average"]) == SHARDS
    assert other["step_curves"] == [one["step_curves"]] * SHARDS  # measured once on this machine
    assert set(one["step_curves"]) == {"dspark_sched"}


# ---------------------------------------------------------------------------- refusals


def test_an_environment_that_differs_is_refused(unmerged: Path) -> None:
    path = unmerged / "shards" / "2-of-3" / "environment.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "torch": "1.0"}))
    with pytest.raises(UserError) as error:
        stages.merge(unmerged)
    assert f"torch is {facts['torch']} in shard 1 of 3 and 1.0 in shard 2:" in str(error.value)
    assert not (unmerged / "requests.parquet").exists()


def test_a_shard_that_was_not_measured_is_named(unmerged: Path) -> None:
    (unmerged / "shards" / "3-of-3" / "requests.parquet").unlink()
    with pytest.raises(UserError, match=r"3-of-3/requests.parquet' do not exist: run the dataset"):
        stages.merge(unmerged)
    shutil.rmtree(unmerged / "shards" / "3-of-3")
    with pytest.raises(UserError, match=r"3-of-3/environment.json' cannot be read"):
        stages.merge(unmerged)


def test_other_prompts_than_before_are_refused(unmerged: Path) -> None:
    lines = (unmerged / "prompts.jsonl").read_text().splitlines(keepends=True)
    (unmerged / "prompts.jsonl").write_text("".join(lines[1:] + lines[:1]))
    with pytest.raises(UserError, match=r"shard 1 of 3: run 'baseline' of prompt .* turn 1 is "):
        stages.merge(unmerged)


def test_a_dataset_that_is_not_cut_has_nothing_to_merge(whole: Path) -> None:
    before = (whole / "requests.parquet").read_bytes()
    with pytest.raises(UserError, match="dataset 'mt_bench' is not cut into shards"):
        stages.merge(whole)
    assert (whole / "requests.parquet").read_bytes() == before


def test_more_shards_than_prompts_are_refused_before_anything_runs(
    models: Path, tmp_path: Path
) -> None:
    config = job_config(9)
    said = "dataset 'mt_bench' has 7 prompts but shards asks for 9 parts: set shards to 7 or less"
    with pytest.raises(UserError, match=said):
        start(tmp_path / "mt_bench", config)
    assert not (tmp_path / "mt_bench" / "prompts.jsonl").exists()
    folder = start(tmp_path / "hand_made", job_config(1))
    (folder / "config.yaml").write_text(to_yaml(config))
    with pytest.raises(UserError, match=said):
        bench(folder, models)
    assert not (folder / "shards").exists()


@pytest.mark.parametrize("shard", [0, 4])
def test_a_shard_that_there_is_not_is_refused(models: Path, tmp_path: Path, shard: int) -> None:
    folder = start(tmp_path / "mt_bench", job_config(SHARDS))
    with pytest.raises(UserError, match=f"'mt_bench' has no shard {shard}: its shards are 1 to 3"):
        bench(folder, models, shard)
    assert not (folder / "shards").exists()


# ------------------------------------------------------------------------------- where time goes


@pytest.mark.parametrize("run", ["dspark_k3", "dspark_sched"])
def test_a_profile_names_the_parts_of_both_runs_and_their_limits(
    whole: Path, models: Path, tmp_path: Path, run: str
) -> None:
    text = stages.profile(
        whole / "config.yaml", whole / "prompts.jsonl", models, run, 4, tmp_path, threads=1
    )
    lines = text.splitlines()
    cells = {row[0]: row[1:] for row in (line.strip("| ").split(" | ") for line in lines)}
    for part in ("prefill", "verify: layers", "verify: LM head", "accept", "host"):
        assert all(float(ms) >= 0 for ms in cells[part][::2])
    for part in ("draft backbone", "Markov loop", "drafter's context"):
        assert cells[part][:2] == ["—", "—"]
        assert float(cells[part][2]) > 0
    assert ("schedule" in cells) == (run == "dspark_sched")
    shares = [float(row[3].rstrip("%")) for row in cells.values() if row[3:] and "%" in row[3]]
    assert sum(shares) == pytest.approx(100, abs=0.5)
    assert any(line.startswith(f"{run}: a step takes") for line in lines)
    assert "break-even accept length: " in lines[-1]


@pytest.mark.parametrize("run", ["dspark_k33", "baseline"])
def test_a_run_that_is_no_arm_of_the_job_is_not_profiled(
    whole: Path, models: Path, tmp_path: Path, run: str
) -> None:
    with pytest.raises(UserError, match=f"no run '{run}' beside its baseline: "):
        stages.profile(whole / "config.yaml", whole / "prompts.jsonl", models, run, 4, tmp_path)


def test_summaries_say_from_which_accept_length_on_an_arm_pays(whole: Path) -> None:
    cells = {run: read_summary(whole / run / "summary.json") for run in RUNS}
    assert cells["baseline"].step_ms_spec is None
    for run in REPEATED[1:]:
        cell = cells[run]
        assert cell.step_ms_baseline == cells["baseline"].step_ms_baseline
        assert cell.step_ms_spec is not None
        assert cell.break_even_accept_len == cell.step_ms_spec / cell.step_ms_baseline


def test_auto_precision_is_named_as_what_it_came_to(models: Path, tmp_path: Path) -> None:
    config = job_config(1, limit=2)
    config.engine.precision = Precision.auto
    folder = start(tmp_path / "mt_bench", config)
    bench(folder, models)
    stages.summarise(folder, models)
    environment = json.loads((folder / "environment.json").read_text())
    cell = read_summary(folder / "dspark_k3" / "summary.json")
    assert cell.precision == environment["precision"] in ("float32", "bfloat16")
    assert cell.settings["config_digest"] == digest(config)


@pytest.mark.parametrize("fact", ["precision", "step_curves"])
def test_an_environment_of_another_version_is_named(
    whole: Path, models: Path, tmp_path: Path, fact: str
) -> None:
    folder = tmp_path / "mt_bench"
    shutil.copytree(whole, folder)
    path = folder / "environment.json"
    facts = json.loads(path.read_text())
    del facts[fact]
    path.write_text(json.dumps(facts))
    with pytest.raises(UserError, match=f"environment.json' lacks '{fact}': .* run the dataset's"):
        stages.summarise(folder, models)
