"""One dataset's job: arms that take turns, a journal that survives kills, conversations."""

from __future__ import annotations

import json
import random
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from itertools import groupby, pairwise
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dspark.config import (
    DatasetConfig,
    EngineConfig,
    History,
    JobConfig,
    Mode,
    RunConfig,
    SamplingConfig,
)
from dspark.data.prompts import Prompt
from dspark.decode.bench import Job, run_job, top_two_margin
from dspark.decode.engine import Engine, Request, Row
from dspark.decode.journal import read_journal
from dspark.decode.records import RequestRecord
from dspark.decode.schedule import fit_curve
from dspark.errors import UserError
from dspark.metrics.identities import check_records
from dspark.models.checkpoint import load_drafter
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target, load_target
from dspark.models.tokenizer import ChatTokenizer, load_tokenizer
from tiny_models import EOS, save_tiny_drafter, save_tiny_target

RUNS = {
    "baseline": RunConfig(),
    "k3": RunConfig(Mode.speculative, 3),
    "k2_sure": RunConfig(Mode.speculative, 2, 0.5),
}
WARMUP = [Prompt(f"warmup/{index}", [f"warm up number {index}"]) for index in range(5)]
Models = tuple[Target, DSparkDrafter, ChatTokenizer]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Models:
    root = tmp_path_factory.mktemp("models")
    save_tiny_target(root / "target", layers=3)
    save_tiny_drafter(root / "drafter", root / "target")
    target = load_target(root / "target", "cpu", torch.float32)
    return target, load_drafter(root / "drafter", target), load_tokenizer(root / "target")


def prompts(count: int, turns: int = 1) -> list[Prompt]:
    text = ["tell me of number {}", "and what then, {}?", "say it again, {}"]
    return [
        Prompt(f"p{index}", [text[turn].format(index) for turn in range(turns)])
        for index in range(count)
    ]


def job_config(
    runs: dict[str, RunConfig] | None = None, *, new: int = 6, **changes: object
) -> JobConfig:
    """`changes` go to whichever part of the config has the field."""
    dataset = DatasetConfig(name="set", max_new_tokens=new)
    parts = {
        "dataset": dataset,
        "engine": EngineConfig(concurrency=2, interleave=2, warmup=2),
        "sampling": SamplingConfig(),
    }
    for name, part in parts.items():
        mine = {key: value for key, value in changes.items() if hasattr(part, key)}
        parts[name] = replace(part, **mine)
    return JobConfig(experiment="test", runs=runs or RUNS, **parts)  # type: ignore[arg-type]


def make_job(models: Models, config: JobConfig, items: list[Prompt]) -> Job:
    target, drafter, tokenizer = models
    return Job(config, items, WARMUP, target, drafter, tokenizer)


def counts(record: RequestRecord) -> dict[str, object]:
    """All of a record that does not depend on time or, as drafts that end early do, on neighbours."""
    left_out = {"window", "t_submit", "t_first", "t_last", "step_t"}
    if RUNS[record.run].confidence_threshold:
        left_out.add("step_drafted")
    return {key: value for key, value in asdict(record).items() if key not in left_out}


class Admissions(list[str]):
    """The ids of the requests that engines admitted, warm-up apart."""

    def __init__(self) -> None:
        super().__init__()
        self.warmup: list[str] = []

    def __enter__(self) -> Admissions:
        admit = Engine.admit

        def watch(engine: Engine, request: Request, t_submit: float) -> Row:
            name = f"{request.prompt_id}#{request.turn}"
            (self.warmup if name.startswith("warmup/") else self).append(name)
            return admit(engine, request, t_submit)

        self.patch = patch.object(Engine, "admit", watch)
        self.patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.patch.stop()


# ------------------------------------------------------------------------------------- undisturbed


def test_records_come_in_run_and_prompt_order_and_are_consistent(
    models: Models, tmp_path: Path
) -> None:
    items = prompts(6, turns=2)
    records = run_job(make_job(models, job_config(), items), tmp_path / "j.jsonl")
    assert [(r.run, r.prompt_id, r.turn) for r in records] == [
        (run, item.id, turn) for run in RUNS for item in items for turn in range(2)
    ]
    assert {r.dataset for r in records} == {"set"}
    check_records(records)
    on_disk = read_journal(tmp_path / "j.jsonl")
    assert sorted(map(asdict, on_disk), key=str) == sorted(map(asdict, records), key=str)


def test_every_arm_gives_the_baselines_text(models: Models, tmp_path: Path) -> None:
    job = make_job(models, job_config(new=20, ignore_eos=True), prompts(6))
    records = run_job(job, tmp_path / "j.jsonl")
    texts = {
        run: [r.output_token_ids for r in group] for run, group in groupby(records, lambda r: r.run)
    }
    assert texts["k3"] == texts["k2_sure"] == texts["baseline"]
    speculative = [r for r in records if r.run == "k3"]
    assert sum(sum(r.step_accepted) for r in speculative) > 0
    assert all(set(r.step_drafted) <= {3} for r in speculative)
    assert all(max(r.step_drafted) <= RUNS[r.run].k for r in records)
    assert {v for r in records if r.run == "k2_sure" for v in r.step_verified} > {0}


def test_each_arm_schedules_by_its_own_curve_alone(models: Models, tmp_path: Path) -> None:
    scheduled = RunConfig(Mode.speculative, 3, schedule=True)
    runs = {"baseline": RunConfig(), "k3": RUNS["k3"], "cheap": scheduled, "dear": scheduled}
    curves = {"cheap": fit_curve([1], [1.0]), "dear": fit_curve([1, 2], [1.0, 50.0])}
    config = job_config(runs, new=12, ignore_eos=True)
    target, drafter, tokenizer = models
    job = Job(config, prompts(4), WARMUP, target, drafter, tokenizer, curves)
    records = run_job(job, tmp_path / "j.jsonl")
    check_records(records)
    texts = [[r.output_token_ids for r in records if r.run == run] for run in runs]
    assert texts[1:] == texts[:1] * 3
    verified = {run: {n for r in records if r.run == run for n in r.step_verified} for run in runs}
    assert verified == {"baseline": {0}, "k3": {3}, "cheap": {3}, "dear": {0}}
    assert {n for r in records if r.run == "dear" for n in r.step_drafted} == {0}


def test_arms_take_turns_block_by_block_and_the_first_one_rotates(
    models: Models, tmp_path: Path
) -> None:
    items = prompts(10)  # blocks of 4, 4, 2
    run_job(make_job(models, job_config(), items), tmp_path / "j.jsonl")
    blocks = [
        (run, {r.prompt_id for r in group})
        for run, group in groupby(read_journal(tmp_path / "j.jsonl"), lambda r: r.run)
    ]
    names = [{f"p{i}" for i in range(*ends)} for ends in ((0, 4), (4, 8), (8, 10))]
    order = [
        ["baseline", "k3", "k2_sure"],
        ["k3", "k2_sure", "baseline"],
        ["k2_sure", "baseline", "k3"],
    ]
    assert blocks == [
        (run, block) for runs, block in zip(order, names, strict=True) for run in runs
    ]


def test_a_window_is_one_arms_unbroken_block(models: Models, tmp_path: Path) -> None:
    records = run_job(make_job(models, job_config(), prompts(10)), tmp_path / "j.jsonl")
    for r in records:
        assert r.window == int(r.prompt_id[1:]) // 4
    spans = sorted(
        (min(r.t_submit for r in group), max(r.t_last for r in group))
        for run in RUNS
        for window in range(3)
        for group in [[r for r in records if (r.run, r.window) == (run, window)]]
    )
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))


def test_warm_up_comes_before_each_arms_first_block_and_is_never_recorded(
    models: Models, tmp_path: Path
) -> None:
    with Admissions() as admitted:
        records = run_job(make_job(models, job_config(), prompts(9)), tmp_path / "j.jsonl")
    assert admitted.warmup == ["warmup/0#0", "warmup/1#0"] * len(RUNS)
    assert len(admitted) == len(records) == 27
    assert not any(r.prompt_id.startswith("warmup") for r in records)


def test_no_warm_up_when_none_is_wanted(models: Models, tmp_path: Path) -> None:
    with Admissions() as admitted:
        run_job(make_job(models, job_config(warmup=0), prompts(2)), tmp_path / "j.jsonl")
    assert admitted.warmup == []


def test_a_measured_prompt_with_a_warm_up_prompts_name_keeps_its_text(models: Models) -> None:
    items = [Prompt("warmup/0", ["quite another text, and a longer one"])]
    job = make_job(models, job_config(), items)
    assert "another" in models[2].decode(job.prompt_tokens("warmup/0", 0, []))


def test_settings_reach_the_requests(models: Models) -> None:
    changes = {"temperature": 0.7, "top_p": 0.9, "top_k": 5, "seed": 3, "stop": ["x"]}
    job = make_job(models, job_config(new=9, **changes), prompts(1))
    request = job.request("p0", 0, [])
    assert request.max_new_tokens == 9 and request.stop == ("x",)
    assert request.eos_ids == frozenset([EOS])
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.seed) == (0.7, 0.9, 5, 3)
    ignoring = make_job(models, job_config(ignore_eos=True), prompts(1))
    assert ignoring.request("p0", 0, []).eos_ids == frozenset()


def test_stop_strings_end_answers_in_every_arm(models: Models, tmp_path: Path) -> None:
    free = run_job(
        make_job(models, job_config(new=24, ignore_eos=True), prompts(4)), tmp_path / "a.jsonl"
    )
    decode = models[2].decode
    stop = decode(free[0].output_token_ids[7:9])
    stopped = run_job(
        make_job(models, job_config(new=24, ignore_eos=True, stop=[stop]), prompts(4)),
        tmp_path / "b.jsonl",
    )
    assert stopped[0].finish_reason == "stop"
    for before, after in zip(free, stopped, strict=True):
        assert before.output_token_ids[: after.output_tokens] == after.output_token_ids
        held = [end for end in range(1, 25) if stop in decode(before.output_token_ids[:end])]
        assert after.output_tokens == (held[0] if held else 24)
    check_records(stopped)


# ------------------------------------------------------------------------------------- the journal


@pytest.fixture(scope="module")
def undisturbed(
    models: Models, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[list[RequestRecord], bytes]]:
    path = tmp_path_factory.mktemp("whole") / "j.jsonl"
    records = run_job(make_job(models, job_config(), prompts(7, turns=2)), path)
    yield records, path.read_bytes()


@settings(
    deadline=None, max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(cuts=st.lists(st.floats(0, 1), min_size=1, max_size=3))
def test_a_killed_job_goes_on_where_it_stopped(
    models: Models,
    undisturbed: tuple[list[RequestRecord], bytes],
    tmp_path: Path,
    cuts: list[float],
) -> None:
    """The journal is cut at any byte, a few times over; each start runs only what is missing."""
    expected, content = undisturbed
    path = tmp_path / "j.jsonl"
    path.write_bytes(content)
    records = expected
    for cut in cuts:
        content = path.read_bytes()
        path.write_bytes(content[: round(cut * len(content))])
        kept = path.read_bytes().count(b"\n")
        before = [json.loads(line) for line in content.splitlines()[:kept]]
        with Admissions() as admitted:
            records = run_job(make_job(models, job_config(), prompts(7, turns=2)), path)
        assert len(admitted) == len(expected) - kept
        lines = path.read_bytes().splitlines()
        assert [json.loads(line) for line in lines[:kept]] == before
        assert len(lines) == len(expected)
        new = [json.loads(line) for line in lines[kept:]]
        for run in RUNS:  # no window holds requests of two starts
            old_windows = {r["window"] for r in before if r["run"] == run}
            new_windows = {r["window"] for r in new if r["run"] == run}
            assert not old_windows & new_windows
        assert [counts(r) for r in records] == [counts(r) for r in expected]
    check_records(records)


@pytest.mark.parametrize("fatal", [1, 7, 20])
def test_a_kill_in_the_middle_of_a_block_loses_only_what_was_in_flight(
    models: Models,
    undisturbed: tuple[list[RequestRecord], bytes],
    tmp_path: Path,
    fatal: int,
) -> None:
    path = tmp_path / "j.jsonl"
    done: list[Row] = []
    step = Engine.step

    def dying(engine: Engine) -> list[Row]:
        rows = step(engine)
        done.extend(row for row in rows if not row.request.prompt_id.startswith("warmup"))
        if len(done) >= fatal:
            raise KeyboardInterrupt
        return rows

    items = prompts(7, turns=2)
    with patch.object(Engine, "step", dying), pytest.raises(KeyboardInterrupt):
        run_job(make_job(models, job_config(), items), path)
    kept = len(read_journal(path))
    assert fatal - 3 <= kept <= len(done)
    with Admissions() as admitted:
        records = run_job(make_job(models, job_config(), items), path)
    assert len(admitted) == len(records) - kept
    assert [counts(r) for r in records] == [counts(r) for r in undisturbed[0]]


def test_a_finished_job_runs_nothing_again_not_even_warm_up(
    models: Models, undisturbed: tuple[list[RequestRecord], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(undisturbed[1])
    with Admissions() as admitted:
        records = run_job(make_job(models, job_config(), prompts(7, turns=2)), path)
    assert (list(admitted), admitted.warmup) == ([], [])
    assert [asdict(r) for r in records] == [asdict(r) for r in undisturbed[0]]
    assert path.read_bytes() == undisturbed[1]


def test_a_record_is_on_disk_before_the_next_one_is_made(models: Models, tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    seen: list[int] = []
    step = Engine.step

    def watch(engine: Engine) -> list[Row]:
        seen.append(path.read_bytes().count(b"\n"))
        return step(engine)

    with patch.object(Engine, "step", watch):
        records = run_job(make_job(models, job_config(warmup=0, concurrency=1), prompts(4)), path)
    assert seen == sorted(seen)
    assert set(range(len(records))) >= set(seen) >= {0, 3, 11}


@pytest.mark.parametrize("damage", [b"{\n", b"\n", b"[1, 2]\n", b'{"run": "k3"}\n', b"\xff\xfe\n"])
def test_a_damaged_line_is_named(
    models: Models,
    undisturbed: tuple[list[RequestRecord], bytes],
    tmp_path: Path,
    damage: bytes,
) -> None:
    path = tmp_path / "j.jsonl"
    lines = undisturbed[1].splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:2], damage, *lines[2:]]))
    job = make_job(models, job_config(), prompts(7, turns=2))
    with Admissions() as admitted, pytest.raises(UserError, match="line 3 is damaged: delete"):
        run_job(job, path)
    assert not admitted


def test_another_jobs_journal_is_refused(
    models: Models, undisturbed: tuple[list[RequestRecord], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(undisturbed[1])
    fewer_runs = make_job(models, job_config({"baseline": RUNS["baseline"]}), prompts(7, turns=2))
    with pytest.raises(UserError, match=r"turn 1 of prompt 'p.*' in run 'k.*', .*: delete"):
        run_job(fewer_runs, path)
    with pytest.raises(UserError, match=r"of prompt 'p.*' in run '.*', which this job has not"):
        run_job(make_job(models, job_config(), prompts(2, turns=2)), path)
    with pytest.raises(
        UserError,
        match=r"turn 2 of prompt 'p.*', which this job has not".replace("', w", "' in run '.*', w"),
    ):
        run_job(make_job(models, job_config(), prompts(7, turns=1)), path)


def test_a_warm_up_prompt_is_no_prompt_of_the_job(
    models: Models, undisturbed: tuple[list[RequestRecord], bytes], tmp_path: Path
) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(undisturbed[1].splitlines(keepends=True)[0].replace(b'"p0"', b'"warmup/0"'))
    with pytest.raises(UserError, match="prompt 'warmup/0' in run 'baseline', which this job has"):
        run_job(make_job(models, job_config(), prompts(7, turns=2)), path)


@pytest.mark.parametrize("turns", [1, 2])
def test_a_request_that_is_there_twice_is_refused(
    models: Models, undisturbed: tuple[list[RequestRecord], bytes], tmp_path: Path, turns: int
) -> None:
    """Two processes made it, at the same time: what they measured is each other."""
    path = tmp_path / "j.jsonl"
    lines = undisturbed[1].splitlines(keepends=True)
    path.write_bytes(b"".join([*lines, lines[turns]]))
    job = make_job(models, job_config(), prompts(7, turns=2))
    with Admissions() as admitted, pytest.raises(UserError, match="twice: two processes ran"):
        run_job(job, path)
    assert not admitted and path.read_bytes().count(b"\n") == len(lines) + 1


def test_a_line_that_was_deleted_takes_the_later_turns_with_it(
    models: Models, undisturbed: tuple[list[RequestRecord], bytes], tmp_path: Path
) -> None:
    """A later turn was asked with an answer that is gone; what to do is said until it is whole."""
    path = tmp_path / "j.jsonl"
    lines = undisturbed[1].splitlines(keepends=True)
    first = next(line for line in lines if json.loads(line)["turn"] == 0)
    name = json.loads(first)["prompt_id"]
    rest = [line for line in lines if line != first]
    path.write_bytes(b"".join(rest))
    job = make_job(models, job_config(), prompts(7, turns=2))
    with pytest.raises(
        UserError, match=f"turn 2 of prompt '{name}' in run '.*' but not turn 1: delete the line"
    ):
        run_job(job, path)
    second = next(
        line
        for line in rest
        if (json.loads(line)["prompt_id"], json.loads(line)["run"])
        == (name, json.loads(first)["run"])
    )
    path.write_bytes(b"".join(line for line in rest if line != second))
    with Admissions() as admitted:
        records = run_job(job, path)
    assert admitted == [f"{name}#0", f"{name}#1"]
    assert [counts(r) for r in records] == [counts(r) for r in undisturbed[0]]


def test_each_arm_that_goes_on_is_warmed_up_again(
    models: Models, undisturbed: tuple[list[RequestRecord], bytes], tmp_path: Path
) -> None:
    """An arm with nothing left is not; windows go on with their own numbers."""
    path = tmp_path / "j.jsonl"
    lines = [json.loads(line) for line in undisturbed[1].splitlines()]
    done = [r for r in lines if r["run"] == "k3" or r["prompt_id"] in ("p0", "p1")]
    path.write_text("".join(json.dumps(r) + "\n" for r in done))
    with Admissions() as admitted:
        records = run_job(make_job(models, job_config(), prompts(7, turns=2)), path)
    assert admitted.warmup == ["warmup/0#0", "warmup/1#0"] * 2
    assert len(admitted) == len(lines) - len(done)
    windows = {(r.run, r.prompt_id): r.window for r in records}
    assert [windows["baseline", f"p{i}"] for i in range(7)] == [0, 0, 1, 1, 2, 2, 2]
    assert [windows["k3", f"p{i}"] for i in range(7)] == [0, 0, 0, 0, 1, 1, 1]
    check_records(records)


def test_a_wall_clock_that_jumps_changes_nothing(
    models: Models, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hours = iter(range(10**9, 0, -3600))
    monkeypatch.setattr(time, "time", lambda: float(next(hours)))
    begun = time.perf_counter()
    records = run_job(make_job(models, job_config(), prompts(4, turns=2)), tmp_path / "j.jsonl")
    assert next(hours) == 10**9  # nobody looked
    check_records(records)
    times = [t for r in records for t in (r.t_submit, r.t_first, *r.step_t, r.t_last)]
    assert begun < min(times) and max(times) < time.perf_counter()


# ----------------------------------------------------------------------------------- conversations


@pytest.mark.parametrize("history", list(History))
def test_a_later_turn_is_asked_with_or_without_the_answers_before_it(
    models: Models, tmp_path: Path, history: History
) -> None:
    tokenizer = models[2]
    items = prompts(3, turns=3)
    records = run_job(make_job(models, job_config(history=history), items), tmp_path / "j.jsonl")
    by_id = {(r.run, r.prompt_id, r.turn): r for r in records}
    for run in RUNS:
        for item in items:
            answers = [
                tokenizer.decode(by_id[run, item.id, turn].output_token_ids) for turn in range(2)
            ]
            for turn in range(3):
                if history is History.model:
                    asked = tokenizer.encode_turn(item.turns[: turn + 1], answers[:turn], True)
                else:
                    asked = tokenizer.encode_turn([item.turns[turn]], [], True)
                assert by_id[run, item.id, turn].prompt_tokens == len(asked)


def test_turns_can_be_sent_as_they_are_without_a_template(models: Models) -> None:
    tokenizer = models[2]
    job = make_job(models, job_config(chat=False), prompts(1, turns=2))
    assert tokenizer.decode(job.prompt_tokens("p0", 0, [])) == "tell me of number 0"
    answer = tokenizer.encode_turn(["fine"], [], False)
    asked = tokenizer.decode(job.prompt_tokens("p0", 1, [answer]))
    assert asked == "tell me of number 0\n\nfine\n\nand what then, 0?"


def test_answers_that_encode_to_more_tokens_than_they_had_still_fit(
    models: Models, tmp_path: Path
) -> None:
    """A random model's text is full of broken UTF-8; each replacement character is three bytes."""
    config = job_config(new=40, ignore_eos=True, history=History.model)
    job = make_job(models, config, prompts(6, turns=2))
    records = run_job(job, tmp_path / "j.jsonl")
    longer = 0
    for r in records:
        text = models[2].decode(r.output_token_ids)
        longer += len(models[2].encode_turn([text], [], False)) > 48
        assert r.prompt_tokens + 40 <= job.engines[r.run].capacity
    assert longer > 0
    check_records(records)


def test_a_prompt_beyond_the_context_is_refused_before_anything_runs(
    models: Models, tmp_path: Path
) -> None:
    items = [*prompts(3, turns=2), Prompt("huge", ["short", "long " * 300])]
    with Admissions() as admitted:
        with pytest.raises(UserError, match="dataset 'set' prompt 'huge' turn 2 may reach") as info:
            run_job(make_job(models, job_config(), items), tmp_path / "j.jsonl")
        assert "context of 512" in str(info.value) and "datasets.set.max_new_tokens" in str(
            info.value
        )
    assert not admitted and not admitted.warmup and not (tmp_path / "j.jsonl").exists()


def test_a_conversation_whose_answers_may_outgrow_the_context_is_refused(models: Models) -> None:
    items = prompts(1, turns=3)
    with pytest.raises(UserError, match="'p0' turn 3"):
        make_job(models, job_config(new=160, history=History.model), items)
    make_job(models, job_config(new=160, history=History.independent), items)


def test_a_prompt_that_fills_the_context_exactly_is_run(models: Models, tmp_path: Path) -> None:
    tokenizer = models[2]
    length = len(tokenizer.encode_turn(["?"], [], True))
    fitting = Prompt("fits", ["?" * (512 - 6 - length + 1)])
    records = run_job(make_job(models, job_config(), [fitting]), tmp_path / "j.jsonl")
    assert {r.prompt_tokens for r in records} == {506}
    with pytest.raises(UserError, match="'over'"):
        make_job(models, job_config(), [Prompt("over", [fitting.turns[0] + "?"])])


def test_more_drafts_than_the_block_holds_are_refused(models: Models) -> None:
    runs = {"baseline": RunConfig(), "k8": RunConfig(Mode.speculative, 8)}
    with pytest.raises(UserError, match="k is 8 but the drafter's block_size is 7"):
        make_job(models, job_config(runs), prompts(1))


@settings(deadline=None, max_examples=5)
@given(seed=st.integers(0, 10**6))
def test_any_block_size_and_concurrency_gives_the_same_texts(
    models: Models, tmp_path_factory: pytest.TempPathFactory, seed: int
) -> None:
    chance = random.Random(seed)
    config = job_config(interleave=chance.randint(1, 9), concurrency=chance.randint(1, 5))
    path = tmp_path_factory.mktemp("any") / "j.jsonl"
    records = run_job(make_job(models, config, prompts(6, turns=2)), path)
    plain = run_job(
        make_job(
            models, job_config({"baseline": RUNS["baseline"]}, concurrency=1), prompts(6, turns=2)
        ),
        path.with_name("plain.jsonl"),
    )
    expected = [r.output_token_ids for r in plain]
    for run in RUNS:
        assert [r.output_token_ids for r in records if r.run == run] == expected
    check_records(records)


def test_top_two_margin_is_the_gap_of_the_greatest_logits(models: Models) -> None:
    target = models[0]
    tokens = [5, 9, 40, 200, 7]
    with torch.no_grad():
        logits = target.model(input_ids=torch.tensor([tokens])).logits[0, -1]
    first, second = logits.sort(descending=True).values[:2]
    assert top_two_margin(target, tokens) == pytest.approx(float(first - second), abs=1e-4)
