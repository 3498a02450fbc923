"""A job that is killed, wherever it is, goes on: nothing is lost, doubled or run again."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from forked_cli import ForkedCli, Order

from dspark.config import (
    DatasetConfig,
    Device,
    DrafterConfig,
    DrafterShape,
    EngineConfig,
    History,
    JobConfig,
    Mode,
    ModelsConfig,
    ModelSource,
    RunConfig,
    SamplingConfig,
    TargetConfig,
    TrainConfig,
    to_yaml,
)
from dspark.decode.records import RequestRecord
from dspark.metrics.records_io import read_records
from dspark.signals import GRACE_S
from small_disk import SmallDisk, small_disk
from tiny_models import save_tiny_drafter, save_tiny_target

RUNS = {
    "baseline": RunConfig(),
    "k3": RunConfig(Mode.speculative, 3),
    "k5": RunConfig(Mode.speculative, 5),
}
ARM = {run.k: name for name, run in RUNS.items()}
PROMPTS, CONCURRENCY, NEW = 24, 3, 24
TURNS = {f"p{index}": 1 + (index % 3 == 0) for index in range(PROMPTS)}
REQUESTS = {(run, name, turn) for run in RUNS for name in TURNS for turn in range(TURNS[name])}
OUTPUTS = {"requests.parquet", "lossless.json", "environment.json"}
SEED, SIGNALS = 11, (signal.SIGKILL, signal.SIGTERM)
PATIENCE_S = 120.0
Id = tuple[str, str, int]


@pytest.fixture(scope="module")
def cli() -> Iterator[ForkedCli]:
    server = ForkedCli()
    yield server
    server.close()


@pytest.fixture(scope="module")
def models(cli: ForkedCli, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What `dspark prepare` makes of a tiny target and its drafter."""
    root = tmp_path_factory.mktemp("models")
    save_tiny_target(root / "target", layers=3)
    save_tiny_drafter(root / "drafter", root / "target")
    config = ModelsConfig(
        TargetConfig("tiny", ModelSource.local, path=str(root / "target")),
        DrafterConfig("tiny", ModelSource.local, path=str(root / "drafter")),
    )
    (root / "config.yaml").write_text(to_yaml(config))
    args = ["prepare", "--config", str(root / "config.yaml"), "--out", str(root)]
    assert cli.run(*args, log=root / "log") == (0, "")
    return root


@dataclass
class Bench:
    """A dataset's folder, and `dspark bench` on it."""

    cli: ForkedCli
    models: Path
    folder: Path
    log: Path

    @classmethod
    def at(cls, cli: ForkedCli, models: Path, folder: Path) -> Bench:
        folder.mkdir(parents=True, exist_ok=True)
        config = JobConfig(
            experiment="kills",
            dataset=DatasetConfig(name="set", history=History.model, max_new_tokens=NEW),
            runs=RUNS,
            engine=EngineConfig(
                device=Device.cpu, concurrency=CONCURRENCY, interleave=2, warmup=2, threads=1
            ),
            sampling=SamplingConfig(ignore_eos=True),
        )
        (folder / "config.yaml").write_text(to_yaml(config))
        texts = ["tell me of number {}", "and what then, {}?"]
        lines = [
            json.dumps({"id": name, "turns": [text.format(name) for text in texts[:turns]]}) + "\n"
            for name, turns in TURNS.items()
        ]
        (folder / "prompts.jsonl").write_text("".join(lines))
        return cls(cli, models, folder, models / f"{folder.parent.name}.log")

    @property
    def args(self) -> list[str]:
        folder = self.folder
        files = ["--config", folder / "config.yaml", "--prompts", folder / "prompts.jsonl"]
        rest = ["--models", self.models, "--profiles", self.models / "profiles", "--out", folder]
        return ["bench", *map(str, [*files, *rest])]

    def run(self) -> tuple[int, str]:
        return self.cli.run(*self.args, log=self.log)

    def start(self, **more: Any) -> int:
        return self.cli.start(Order(self.args, str(self.log), **more))

    def journal(self) -> list[dict[str, Any]]:
        """Its whole lines."""
        lines = [
            line
            for path in self.folder.glob("journal-*.jsonl")
            for line in path.read_bytes().split(b"\n")[:-1]
        ]
        return [json.loads(line) for line in lines]

    def records(self) -> list[RequestRecord]:
        return read_records(self.folder / "requests.parquet")

    def left_over(self) -> set[str]:
        """Files that are neither given nor asked for."""
        given = {"config.yaml", "prompts.jsonl", ".lock", *RUNS}
        return {path.name for path in self.folder.iterdir()} - given - OUTPUTS - {"usage.jsonl"}

    def table(self) -> tuple[list[dict[str, Any]], list[list[str]]]:
        """The summaries of all runs, and the table's cells, by the command line."""
        args = ["summarise", "--models", str(self.models), str(self.folder)]
        assert self.cli.run(*args, log=self.log) == (0, "")
        paths = [self.folder / run / "summary.json" for run in RUNS]
        args = ["table", *map(str, paths), "--out", str(self.models / "table.md")]
        status, text = self.cli.run(*args, log=self.log)
        assert status == 0, text
        rows = [line.strip("| ").split(" | ") for line in text.split("\n\n")[0].splitlines()]
        return [json.loads(path.read_text()) for path in paths], rows


def ids(journal: list[dict[str, Any]]) -> list[Id]:
    return [(line["run"], line["prompt_id"], line["turn"]) for line in journal]


def wait_for(condition: Callable[[], bool], process: int) -> None:
    """Return when it holds, or the process has ended."""
    deadline = time.monotonic() + PATIENCE_S
    while not condition() and not ended(process):
        assert time.monotonic() < deadline
        time.sleep(0.002)


def ended(process: int) -> bool:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] == "Z"


@pytest.fixture(scope="module")
def undisturbed(cli: ForkedCli, models: Path, tmp_path_factory: pytest.TempPathFactory) -> Bench:
    bench = Bench.at(cli, models, tmp_path_factory.mktemp("undisturbed") / "set")
    status, said = bench.run()
    assert status == 0, said
    assert bench.left_over() == set()
    return bench


# --------------------------------------------------------------------------------- twenty kills


@dataclass
class Tally:
    """What was counted over all starts of one job."""

    runs: int = 0
    kills: Counter[str] = field(default_factory=Counter)
    admitted: list[Id] = field(default_factory=list)
    rerun: list[Id] = field(default_factory=list)
    in_flight: int = 0  # requests that a kill found unfinished
    windows: dict[tuple[str, int], int] = field(default_factory=dict)  # the start each was in


def moments(chance: random.Random) -> list[tuple[str, float]]:
    """When to kill the first 15 starts: at a share of starting up, or so many requests later."""
    starting = [("starting", chance.random()) for _ in range(5)]
    running = [("running", chance.uniform(1, 7)) for _ in range(10)]
    both = starting + running
    chance.shuffle(both)
    return both


# The last starts are killed while they write what they made; the last of all when it has.
ENDINGS = [
    (signal.SIGTERM, "before", "environment.json"),
    (signal.SIGKILL, "after", "environment.json"),
    (signal.SIGKILL, "before", "requests.parquet"),
    (signal.SIGTERM, "after", "requests.parquet"),
    (signal.SIGKILL, "after", "journal-"),
]


def once(bench: Bench, tally: Tally, kill: Callable[[int], None] | None, **more: Any) -> int:
    """One start, watched by `tally`; exit status."""
    log = bench.models / "admitted"
    log.write_text("")
    before = ids(bench.journal())
    process = bench.start(admitted=str(log), **more)
    if kill is not None:
        kill(process)
    status = bench.cli.wait(process)
    tally.runs += 1
    admitted = []
    for line in log.read_text().splitlines():
        k, _, rest = line.partition(" ")
        name, _, turn = rest.rpartition("#")
        admitted.append((ARM[int(k)], name, int(turn)))
    done = bench.journal()
    tally.admitted += admitted
    tally.rerun += sorted(set(admitted) & set(before))
    whole = (bench.folder / "requests.parquet").is_file()
    tally.in_flight += len(set(admitted) - (REQUESTS if whole else set(ids(done))))
    assert not done or ids(done)[: len(before)] == before
    for line in done[len(before) :]:
        window = line["run"], line["window"]
        assert tally.windows.setdefault(window, tally.runs) == tally.runs, "a window spans a gap"
    return status


def time_to_start(bench: Bench) -> float:
    """Seconds until the journal is there; what is started then is killed."""
    begun = time.monotonic()
    process = bench.start()
    wait_for(lambda: bool(list(bench.folder.glob("journal-*"))), process)
    os.kill(process, signal.SIGKILL)
    bench.cli.wait(process)
    return time.monotonic() - begun


def test_twenty_kills_lose_double_and_rerun_nothing(
    cli: ForkedCli, models: Path, undisturbed: Bench, tmp_path: Path
) -> None:
    chance = random.Random(SEED)
    bench = Bench.at(cli, models, tmp_path / "killed" / "set")
    tally, killed, slowest = Tally(), [], 0.0
    startup_s = time_to_start(Bench.at(cli, models, tmp_path / "started" / "set"))
    for when, amount in moments(chance):
        number = chance.choice(SIGNALS)
        begun, wanted = time.monotonic(), len(bench.journal()) + max(1, int(amount))

        def kill(
            process: int,
            until: float = begun + (amount * startup_s if when == "starting" else PATIENCE_S),
            wanted: int = wanted,
            later: float = amount % 1 * 0.01,
        ) -> None:
            wait_for(lambda: time.monotonic() > until or len(bench.journal()) >= wanted, process)
            time.sleep(later)
            os.kill(process, number)  # noqa: B023 - called at once
            killed.append(time.monotonic())

        status = once(bench, tally, kill)
        slowest = max(slowest, time.monotonic() - killed[-1])
        check_end(bench, status, number)
        tally.kills[f"{number.name} {when}"] += 1
    assert 10 < len(bench.journal()) < len(REQUESTS) - 10  # both halves have kills
    for die in ENDINGS:
        status = once(bench, tally, None, die=die)
        check_end(bench, status, die[0])
        tally.kills[f"{die[0].name} writing"] += 1
    assert once(bench, tally, None) == 0
    assert "is whole already" in bench.log.read_text()

    got = Counter((r.run, r.prompt_id, r.turn) for r in bench.records())
    lost, doubled = REQUESTS - set(got), [request for request, n in got.items() if n > 1]
    said = (
        f"runs {tally.runs}, kills {tally.kills.total()} ({dict(tally.kills)}), requests lost "
        f"{len(lost)}, doubled {len(doubled)}, rerun {len(tally.rerun)}, in flight at a kill and "
        f"run again {tally.in_flight}; the slowest end took {slowest:.2f} s"
    )
    print(said)
    assert tally.kills.total() == 20 and slowest < GRACE_S + 2, said
    assert not lost and not doubled and not tally.rerun and set(got) == REQUESTS, said
    assert len(tally.admitted) == len(REQUESTS) + tally.in_flight > len(REQUESTS), said
    assert bench.left_over() == set()
    assert counts(bench.records()) == counts(undisturbed.records())
    compare_tables(bench, undisturbed)


def check_end(bench: Bench, status: int, number: int) -> None:
    """How a killed start ended: told to, it says in its last line what is kept."""
    if number == signal.SIGKILL:
        assert status == -signal.SIGKILL
        return
    if status == -signal.SIGTERM:  # before `main` had begun
        return
    said = bench.log.read_text()
    assert status == 128 + signal.SIGTERM, said
    last = said.strip().splitlines()[-1]
    assert re.fullmatch(
        r"dspark: stopped by SIGTERM: (what was finished is kept|\d+ of 96 requests are kept), "
        "the same command goes on from there",
        last,
    )
    kept = re.search(r"(\d+) of", last)
    if kept:
        assert int(kept[1]) == len(bench.journal())
    assert "Traceback" not in said


def counts(records: list[RequestRecord]) -> list[tuple[Any, ...]]:
    """All of a record that does not depend on time."""
    return [
        (
            r.run,
            r.request_id,
            r.prompt_tokens,
            r.output_token_ids,
            r.finish_reason,
            r.step_emitted,
            r.step_drafted,
            r.step_verified,
            r.step_accepted,
            r.step_cut,
        )
        for r in records
    ]


def compare_tables(bench: Bench, other: Bench) -> None:
    """Every count of the summaries and of the table is the same; times are not compared."""
    (cells, rows), (other_cells, other_rows) = bench.table(), other.table()
    for cell, twin in zip(cells, other_cells, strict=True):
        counted = [
            name
            for name, value in cell.items()
            if name.startswith(("accept", "draft", "verif", "requests", "finish"))
            or (isinstance(value, int) and name != "windows")
        ]
        assert {"requests", "output_tokens", "accept_len", "accept_p"} <= set(counted)
        assert {name: cell[name] for name in counted} == {name: twin[name] for name in counted}
    assert sum(cell["windows"] for cell in cells) > sum(cell["windows"] for cell in other_cells)
    header = rows[0]
    for name in ("Dataset", "Run", "Req", "Accept rate", "Accept p1/p2/p3", "Accept len"):
        column = header.index(name)
        assert [row[column] for row in rows] == [row[column] for row in other_rows]


# --------------------------------------------------------------------- what is there already


def copy_of(bench: Bench, folder: Path) -> Bench:
    shutil.copytree(bench.folder, folder)
    return Bench(bench.cli, bench.models, folder, bench.log)


def test_a_whole_folder_is_left_alone(undisturbed: Bench, tmp_path: Path) -> None:
    bench = copy_of(undisturbed, tmp_path / "set")
    before = {name: (bench.folder / name).read_bytes() for name in OUTPUTS}
    (bench.folder / "journal-0123456789abcdef.jsonl").write_text("{}\n")
    (bench.folder / "requests.parquet.77.part").write_text("half")
    said = f"'{bench.folder}' is whole already: delete its requests.parquet to measure it again\n"
    assert bench.run() == (0, said)
    assert {name: (bench.folder / name).read_bytes() for name in OUTPUTS} == before
    assert bench.left_over() == set()


def test_another_job_keeps_the_results_that_are_there_until_it_has_its_own(
    undisturbed: Bench, tmp_path: Path
) -> None:
    bench = copy_of(undisturbed, tmp_path / "set")
    before = {name: (bench.folder / name).read_bytes() for name in OUTPUTS}
    config = bench.folder / "config.yaml"
    text = config.read_text()
    config.write_text(text.replace(f"max_new_tokens: {NEW}", f"max_new_tokens: {NEW - 1}"))
    process = bench.start()
    wait_for(lambda: len(bench.journal()) > 3, process)
    os.kill(process, signal.SIGKILL)
    assert bench.cli.wait(process) == -signal.SIGKILL
    assert {name: (bench.folder / name).read_bytes() for name in OUTPUTS} == before
    (journal,) = bench.folder.glob("journal-*")
    # Back to the first settings, without its results: the other job's journal is not used.
    config.write_text(text)
    (bench.folder / "environment.json").write_text("{")
    process = bench.start()
    wait_for(lambda: len(list(bench.folder.glob("journal-*"))) == 2, process)
    os.kill(process, signal.SIGTERM)
    assert bench.cli.wait(process) == 128 + signal.SIGTERM
    assert f"'{journal}' is of other settings, code or another device: not used" in (
        bench.log.read_text()
    )


def test_two_jobs_cannot_fill_one_folder(cli: ForkedCli, models: Path, tmp_path: Path) -> None:
    bench = Bench.at(cli, models, tmp_path / "set")
    first = bench.start()
    wait_for(lambda: len(bench.journal()) > 2, first)
    second = cli.run(*bench.args, log=tmp_path / "second.log")
    assert second == (
        1,
        f"dspark: '{bench.folder}' is being filled by process {first} on {socket.gethostname()}: "
        "wait until it has ended, or end it, then run again\n",
    )
    os.kill(first, signal.SIGKILL)
    assert cli.wait(first) == -signal.SIGKILL
    kept = ids(bench.journal())
    third = bench.start()  # the lock of a killed job is no one's
    wait_for(lambda: len(bench.journal()) > len(kept), third)
    os.kill(third, signal.SIGTERM)
    assert cli.wait(third) == 128 + signal.SIGTERM
    assert ids(bench.journal())[: len(kept)] == kept and len(bench.journal()) > len(kept)


# ---------------------------------------------------------------------------------- full disks


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SmallDisk]:
    with small_disk(tmp_path / "disk", "512k") as small:
        yield small


def test_a_full_disk_ends_in_one_line_and_loses_nothing(
    cli: ForkedCli, models: Path, undisturbed: Bench, disk: SmallDisk
) -> None:
    bench = Bench.at(cli, models, disk.path / "set")
    full = "no space left on the device: free space and run again"
    disk.leave(48 * 1024)
    status, said = bench.run()
    kept = bench.journal()
    (journal,) = bench.folder.glob("journal-*.jsonl")
    last = said.strip().splitlines()[-1]
    assert status == 1 and "Traceback" not in said
    assert (
        last
        == f"dspark: cannot write '{journal}': {full}: the {len(kept)} finished requests are kept"
    )
    assert 0 < len(kept) < len(REQUESTS) and journal.read_bytes().endswith(b"\n")

    disk.ballast.unlink()
    tally = Tally()
    status = once(bench, tally, None, die=(signal.SIGKILL, "before", "environment.json"))
    assert status == -signal.SIGKILL
    assert sorted([*ids(kept), *tally.admitted]) == sorted(REQUESTS)

    disk.leave(8 * 1024)  # for the two small files
    status, said = bench.run()
    parquet = bench.folder / "requests.parquet"
    last = said.strip().splitlines()[-1]
    assert status == 1 and "Traceback" not in said
    assert last == f"dspark: cannot write '{parquet}': {full}: the 96 finished requests are kept"
    assert not parquet.exists() and bench.left_over() == {journal.name}

    disk.ballast.unlink()
    assert once(bench, tally, None) == 0
    assert len(tally.admitted) == len(REQUESTS) - len(kept)
    assert counts(bench.records()) == counts(undisturbed.records())
    assert bench.left_over() == set()


def test_a_read_only_folder_is_one_line(cli: ForkedCli, models: Path, disk: SmallDisk) -> None:
    bench = Bench.at(cli, models, disk.path / "set")
    disk.make_read_only()
    assert bench.run() == (
        1,
        f"dspark: cannot write '{bench.folder / '.lock'}': the file system is read-only: make it "
        "writable or choose another folder\n",
    )


# ------------------------------------------------------------------------------------ training


def start_training(cli: ForkedCli, models: Path, out: Path, log: Path) -> int:
    """Its first stage answers prompts of ours, then the target's own."""
    own = models / "own.jsonl"
    rows = [{"id": f"own/{index}", "turns": [f"what is it with {index}?"]} for index in range(30)]
    own.write_text("".join(json.dumps(row) + "\n" for row in rows))
    train = TrainConfig(
        shape=DrafterShape(layers=1, taps=2, block_size=4),
        device=Device.cpu,
        prompt_files=[str(own)],
    )
    config = ModelsConfig(
        TargetConfig("tiny", ModelSource.local, path=str(models / "target")),
        DrafterConfig("mine", ModelSource.train, train=train),
    )
    (models / "train.yaml").write_text(to_yaml(config))
    args = ["train", "--config", str(models / "train.yaml"), "--out", str(out)]
    return cli.start(Order(args, str(log)))


def test_a_training_that_is_told_to_end_says_what_is_kept(
    cli: ForkedCli, models: Path, tmp_path: Path
) -> None:
    out, log = tmp_path / "training", tmp_path / "log"
    process = start_training(cli, models, out, log)
    wait_for((out / "conversations.jsonl.part").exists, process)
    os.kill(process, signal.SIGTERM)
    assert cli.wait(process) == 128 + signal.SIGTERM
    assert log.read_text().strip().splitlines()[-1] == (
        f"dspark: stopped by SIGTERM: what stage 'synthesise' wrote to '{out}' is kept, the same "
        "command goes on from there"
    )


def test_a_training_on_a_full_disk_ends_in_one_line(
    cli: ForkedCli, models: Path, tmp_path: Path, disk: SmallDisk
) -> None:
    disk.leave(12 * 1024)
    out, log = disk.path / "training", tmp_path / "log"
    assert cli.wait(start_training(cli, models, out, log)) == 1
    said = log.read_text()
    assert said.strip().splitlines()[-1] == (
        "dspark: no space left on the device: free space and run again"
    )
    assert "Traceback" not in said
    assert (out / "conversations.jsonl.part").stat().st_size > 0
