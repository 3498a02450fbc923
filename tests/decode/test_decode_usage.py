"""What a job notes of its machine: one line a measured window, read outside it, kept through a kill."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from io import FileIO
from pathlib import Path

import pytest
import torch

from dspark.config import DatasetConfig, EngineConfig, JobConfig, Mode, RunConfig
from dspark.data.prompts import Prompt
from dspark.decode import bench
from dspark.decode.journal import append_record
from dspark.decode.records import RequestRecord
from dspark.decode.usage import (
    Meter,
    WindowUsage,
    append_usage,
    keep_usage,
    merge_usage,
    read_usage,
    usage_beside,
    write_usage,
)
from dspark.files import CannotWrite
from dspark.models.checkpoint import load_drafter
from dspark.models.target import load_target
from dspark.models.tokenizer import load_tokenizer
from tiny_models import save_tiny_drafter, save_tiny_target

WINDOW = WindowUsage("k3", 0, "2026-11-30T12:00:00.000+00:00", 2.5, 40.0, 90.0, 2000.0, 300.0)


def busy(seconds: float) -> None:
    end = time.process_time() + seconds
    while time.process_time() < end:
        pass


def cpu_seconds(usage: WindowUsage) -> float:
    return usage.seconds * usage.process_cpu_percentage / 100


def test_cpu_time_is_of_what_lies_between_start_and_stop() -> None:
    meter = Meter(torch.device("cpu"))
    busy(0.2)
    meter.start()
    before = datetime.now(UTC)
    time.sleep(0.3)
    idle = meter.stop("baseline", 0)
    meter.start()
    busy(0.3)
    working = meter.stop("baseline", 1)
    assert cpu_seconds(idle) < 0.1
    assert cpu_seconds(working) == pytest.approx(0.3, abs=0.1)
    begun = datetime.fromisoformat(idle.began)
    assert abs(before - begun) < timedelta(seconds=1)
    assert datetime.fromisoformat(working.began) - begun >= timedelta(seconds=0.3)
    assert idle.seconds >= 0.3 and working.seconds >= 0.3
    assert 0 < working.cpu_utilization_percentage <= 100


def test_memory_is_that_of_the_end() -> None:
    meter = Meter(torch.device("cpu"))
    meter.start()
    before = meter.stop("k3", 0)
    meter.start()
    held = torch.ones(50_000_000)
    after = meter.stop("k3", 1)
    grown = after.process_memory_megabytes - before.process_memory_megabytes
    assert grown == pytest.approx(4 * held.numel() / 1e6, rel=0.1)
    assert after.process_memory_megabytes < after.system_memory_usage_megabytes


def test_a_cpu_has_no_values_of_a_gpu() -> None:
    meter = Meter(torch.device("cpu"))
    meter.start()
    usage = meter.stop("k3", 4)
    assert (usage.run, usage.window, usage.shard) == ("k3", 4, 1)
    assert usage.gpu_memory_usage_megabytes is None
    assert usage.gpu_utilization_percentage is None
    assert usage.gpu_power_usage_watts is None


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_a_gpu_shows_what_is_allocated() -> None:
    device = torch.device("cuda")
    meter = Meter(device)
    meter.start()
    before = meter.stop("k3", 0).gpu_memory_usage_megabytes
    held = torch.ones(100_000_000, device=device)
    after = meter.stop("k3", 1).gpu_memory_usage_megabytes
    assert before is not None and after is not None
    assert after - before >= 4 * held.numel() / 1e6 * 0.9


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = usage_beside(tmp_path / "journal-0123.jsonl")
    assert path.name == "journal-0123.usage"
    for window in range(3):
        append_usage(path, replace(WINDOW, window=window, gpu_power_usage_watts=310.5))
    windows = read_usage(path)
    assert [usage.window for usage in windows] == [0, 1, 2]
    assert windows[1].gpu_power_usage_watts == 310.5
    write_usage(tmp_path / "usage.jsonl", windows)
    assert read_usage(tmp_path / "usage.jsonl") == windows


def test_a_line_that_a_kill_cut_short_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "j.usage"
    append_usage(path, WINDOW)
    with path.open("a") as handle:
        handle.write(json.dumps({"run": "k3"})[:-3])
    append_usage(path, WINDOW)  # on the same line as what was cut
    append_usage(path, WINDOW)
    assert read_usage(path) == [WINDOW, WINDOW]


def test_no_file_is_no_windows(tmp_path: Path) -> None:
    assert read_usage(tmp_path / "absent.jsonl") == []


def test_for_want_of_a_line_no_measurement_ends(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    append_usage(tmp_path / "file" / "j.usage", WINDOW)
    assert (tmp_path / "file").read_text() == ""


def test_what_a_job_noted_gets_its_final_name_once(tmp_path: Path) -> None:
    journal, final = tmp_path / "journal-0123.jsonl", tmp_path / "usage.jsonl"
    append_usage(usage_beside(journal), WINDOW)
    for _ in range(2):  # a second start finds it named
        keep_usage(journal, final)
        assert read_usage(final) == [WINDOW]
    assert not usage_beside(journal).exists()
    append_usage(usage_beside(journal), WINDOW)
    (tmp_path / "folder" / "full").mkdir(parents=True)
    with pytest.raises(CannotWrite, match=r"cannot write '.*folder'"):
        keep_usage(journal, tmp_path / "folder")


def test_windows_of_shards_are_told_apart(tmp_path: Path) -> None:
    paths = [tmp_path / f"{number}.jsonl" for number in (1, 2, 3)]
    write_usage(paths[0], [WINDOW])
    write_usage(paths[2], [WINDOW, WINDOW])
    assert [usage.shard for usage in merge_usage(paths)] == [1, 3, 3]


def small_job(folder: Path) -> bench.Job:
    """Two runs of six prompts in three blocks: six windows."""
    save_tiny_target(folder / "target", layers=2)
    save_tiny_drafter(folder / "drafter", folder / "target")
    target = load_target(folder / "target", "cpu", torch.float32)
    config = JobConfig(
        experiment="test",
        dataset=DatasetConfig(name="set", max_new_tokens=4),
        runs={"baseline": RunConfig(), "k3": RunConfig(Mode.speculative, 3)},
        engine=EngineConfig(concurrency=2, interleave=1, warmup=0),
    )
    asked = [Prompt(f"p{index}", [f"say {index}"]) for index in range(6)]
    drafter, tokenizer = load_drafter(folder / "drafter", target), load_tokenizer(folder / "target")
    return bench.Job(config, asked, [], target, drafter, tokenizer)


def test_a_killed_job_keeps_the_windows_that_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Killed(BaseException):
        """Stands for the process's end."""

    journal, written = tmp_path / "j.jsonl", []

    def append(handle: FileIO, record: RequestRecord) -> None:
        append_record(handle, record)
        written.append((record.run, record.window))
        if len(written) == 7:
            raise Killed

    job = small_job(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(bench, "append_record", append)
        with pytest.raises(Killed):
            bench.run_job(job, journal)
    kept = read_usage(usage_beside(journal))
    assert len(kept) == 3  # two requests each; the fourth window had not ended
    records = bench.run_job(job, journal)
    used = read_usage(usage_beside(journal))
    assert used[:3] == kept
    told = [(usage.run, usage.window) for usage in used]
    assert len(set(told)) == len(told)
    assert {(r.run, r.window) for r in records} == {*told, written[-1]}
