"""Static steps say what others say, and graphs of them are trusted only once they have repeated it.

What a graph would do is done here by a capturer that runs the captured work again: anything but the
static tensors is then as it was at the capture, as in a graph.
"""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from decode_helpers import (
    VOCAB,
    alone,
    drafting,
    make_bigram_drafter,
    make_drafter,
    make_target,
    need,
    outputs,
    request,
    serve,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from dspark.config import CudaGraphs, DatasetConfig, EngineConfig, JobConfig, Mode, RunConfig
from dspark.data.prompts import Prompt
from dspark.decode import bench, profile, static
from dspark.decode.bench import Job, run_job
from dspark.decode.cache import SlotCache
from dspark.decode.draft import Draft
from dspark.decode.engine import Engine, Request, Row
from dspark.decode.graphs import Captured, CudaCapturer, Graphs, Work, graphs_for
from dspark.decode.sampling import Sampling
from dspark.decode.schedule import StepCurve, fit_curve
from dspark.decode.static import length_bucket, length_buckets, row_bucket, row_buckets
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target, load_target
from dspark.models.tokenizer import load_tokenizer
from tiny_models import save_tiny_target

SLOPED = fit_curve([1, 16], [1.0, 4.0])
DEAR = fit_curve([1, 24], [2.0, 13.0], fit_curve([1, 3], [1.0, 1.0]))  # to draft seldom pays
WARM = Sampling(0.8, top_p=0.9, top_k=12, seed=3)
PLAIN = Sampling(1.0, seed=5)
NAN = float("nan")


class Again:
    """Captures work as a call that does it again and puts the result where it was."""

    def __init__(self) -> None:
        self.captures = self.replays = 0

    def warm_up(self, work: Work) -> Tensor:
        return work()

    def capture(self, work: Work) -> Captured:
        self.captures += 1
        result = work()

        def replay() -> None:
            self.replays += 1
            result.copy_(work())

        return Captured(replay, result)


@cache
def models(family: str = "llama") -> tuple[Target, DSparkDrafter]:
    target = make_target(family, embed=20 if family == "llama" else 1)
    return target, make_bigram_drafter(target)


@cache
def items(sampling: Sampling | None = None, count: int = 5, longest: int = 14) -> list[Request]:
    """Requests of different lengths: rows end, and others take their places, at different steps."""
    chance = random.Random(2)
    return [
        request(
            n,
            chance.choices(range(VOCAB), k=chance.randint(1, 20)),
            chance.randint(2, longest),
            sampling=sampling,
        )
        for n in range(count)
    ]


@pytest.fixture(autouse=True)
def small_buckets(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that tiny texts grow through several."""
    monkeypatch.setattr(static, "LEAST", 24)


def engine(
    k: int, slots: int, wanted: list[Request], *, family: str = "llama", **more: Any
) -> Engine:
    target, drafter = models(family)
    return Engine(target, drafter, k=k, concurrency=slots, capacity=need(wanted), **more)


def steps(rows: dict[str, Row]) -> dict[str, list[tuple[int, int, int, int, bool]]]:
    return {
        name: [(s.emitted, s.drafted, s.verified, s.accepted, s.cut) for s in row.steps]
        for name, row in rows.items()
    }


def same_service(k: int, slots: int, wanted: list[Request], **more: Any) -> Engine:
    """Serve the requests with dynamic shapes, static ones and graphs: the same texts and steps."""
    # A trace asks for whole drafts, which static steps always make.
    usual = serve(engine(k, slots, wanted, trace=lambda _draft: None, **more), wanted)
    for way in ({"static": True}, {"graphs": Graphs(Again())}):
        one = engine(k, slots, wanted, **more, **way)
        rows = serve(one, wanted)
        assert outputs(rows) == outputs(usual)
        assert steps(rows) == steps(usual)
    return one


# ------------------------------------------------------------------------------------- the same text


@pytest.mark.parametrize("slots", [1, 5])
@pytest.mark.parametrize("k", [0, 3, 7])
def test_greedy_text_and_steps_are_the_same(k: int, slots: int) -> None:
    wanted = items()
    one = same_service(k, slots, wanted)
    texts = {item.prompt_id: alone(models()[0], item).output for item in wanted}
    assert outputs(serve(one, wanted)) == texts


@pytest.mark.parametrize("k", [0, 3])
@pytest.mark.parametrize("sampling", [WARM, PLAIN], ids=["truncated", "plain"])
def test_the_same_seeds_draw_the_same_tokens(sampling: Sampling, k: int) -> None:
    same_service(k, 4, items(sampling))


def test_rows_that_sample_differently_share_a_step() -> None:
    kinds = [Sampling(), WARM, PLAIN]
    wanted = [replace(item, sampling=kinds[n % 3]) for n, item in enumerate(items())]
    one = same_service(3, 4, wanted)
    assert one.static is not None
    assert {key.settings for key in one.static.captured} <= {None, (0.8, 0.9, 12), (1.0, 1.0, 0)}


@pytest.mark.parametrize(
    "policy",
    [{"confidence_threshold": 0.4}, {"curve": SLOPED}, {"curve": DEAR}],
    ids=["threshold", "schedule", "pause"],
)
@pytest.mark.parametrize("sampling", [None, WARM], ids=["greedy", "sampled"])
def test_policies_decide_the_same(policy: dict[str, Any], sampling: Sampling | None) -> None:
    one = same_service(4, 4, items(sampling), **policy)
    assert one.static is not None
    pieces = {key.piece for key in one.static.captured}
    paused = {"plain step"} if policy.get("curve") is DEAR else set()
    assert pieces == {"draft", "verification"} | paused
    assert len({key.width for key in one.static.captured if key.piece == "verification"}) > 1


@pytest.mark.parametrize("family", ["gemma3", "mistral"])
def test_windows_slide_in_static_steps_too(family: str) -> None:
    same_service(3, 3, items(), family=family)


def test_weights_laid_out_for_decoding_say_the_same() -> None:
    target = make_target("qwen3", embed=20)
    drafter = make_bigram_drafter(target)
    target.pack()
    drafter.pack()
    texts = [
        outputs(
            serve(
                Engine(target, drafter, k=3, concurrency=3, capacity=need(items()), **way), items()
            )
        )
        for way in ({}, {"static": True}, {"graphs": Graphs(Again())})
    ]
    assert texts[1:] == texts[:1] * 2


def test_a_text_grows_through_every_bucket() -> None:
    wanted = [request(0, [1, 2], 130), request(1, range(9), 60)]
    one = same_service(3, 2, wanted)
    assert one.static is not None
    seen = {key.bucket for key in one.static.captured}
    assert len(seen) > 5
    assert seen <= set(length_buckets(one.cache.capacity))


def test_drafts_of_any_quality_give_the_same_text() -> None:
    wanted = items()
    texts = {item.prompt_id: alone(models()[0], item).output for item in wanted}

    def half_right(row: Row, k: int) -> list[int]:
        good = (texts[row.request.prompt_id][len(row.output) :] + [0] * k)[:k]
        return [token if n % 3 else (token + 1) % VOCAB for n, token in enumerate(good, row.start)]

    one = engine(5, 3, wanted, graphs=Graphs(Again()))
    with drafting(one, half_right):
        rows = serve(one, wanted)
    assert outputs(rows) == texts
    assert len({step.accepted for row in rows.values() for step in row.steps}) > 1


@pytest.mark.parametrize("number", range(0, 48, 8))
def test_golden_traces_are_replayed(golden: Any, number: int) -> None:
    case = golden.cases[number]
    drafts: list[Draft] = []
    prompt = golden.prompts[case["prompt"]]
    one = Engine(
        golden.target,
        golden.drafter(case["checkpoint"]),
        k=7,
        capacity=len(prompt) + 60,
        confidence_threshold=case["confidence_threshold"],
        static=True,
        trace=drafts.append,
    )
    row = one.admit(request("p", prompt, 60), 0.0)
    for expected in case["steps"]:
        position, anchor = row.start, row.newest
        one.step()
        assert expected == {
            "anchor_position": position,
            "anchor_token": anchor,
            "draft_tokens": drafts[-1].tokens[0].tolist(),
            "verified": row.steps[-1].verified,
            "accepted": row.steps[-1].accepted,
            "next_token": row.newest,
        }
    assert row.output[:48] == golden.greedy[case["prompt"]][: len(row.output)]
    assert len(row.output) >= 40


# ------------------------------------------------------------------------- what is beyond a row's end


@pytest.mark.parametrize("k", [0, 4])
def test_what_lies_beyond_a_rows_length_is_never_attended_to(k: int) -> None:
    wanted = items()
    expected = outputs(serve(engine(k, 3, wanted), wanted))
    one = engine(k, 3, wanted, static=True)
    serve(one, wanted[:3])  # the caches exist
    fill(one, 1e30)
    assert outputs(serve(one, wanted)) == expected


def fill(one: Engine, value: float) -> None:
    with torch.inference_mode():
        for store in stores(one):
            store.fill_(value)


def stores(one: Engine) -> list[Tensor]:
    caches: tuple[SlotCache, ...] = (one.cache, one.draft_cache)
    return [store for c in caches for store in (*c.keys, *c.values) if store is not None]


@pytest.mark.parametrize("k", [0, 3])
def test_nan_left_behind_costs_no_request(k: int) -> None:
    """Weight 0 times NaN is NaN: such a step is run again with no more positions than it needs."""
    item = request(0, [3, 1, 4], 20)
    expected = alone(models()[0], item).output
    one = engine(k, 1, [item], static=True)
    serve(one, [item])
    fill(one, NAN)
    assert serve(one, [item])["0"].output == expected


def test_rows_that_only_fill_a_bucket_leave_the_others_caches_alone() -> None:
    wanted = [request(n, range(n, n + 5), 30) for n in range(3)]
    one = engine(3, 4, wanted, static=True)
    for item in wanted:
        one.admit(item, 0.0)
    for _ in range(4):
        lengths = [row.start for row in one.slots if row is not None]
        before = [store.clone() for store in stores(one)]
        one.step()
        for store, old in zip(stores(one), before, strict=True):
            for slot, length in enumerate(lengths):
                assert torch.equal(store[slot, :, :length], old[slot, :, :length])


# ------------------------------------------------------------------------------------- the transfers


def test_only_where_rows_come_or_go_the_host_sends_their_places(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sent: list[list[list[int]]] = []
    send = static.Mirror.send

    def watched(mirror: static.Mirror) -> None:
        sent.append(mirror.host.tolist())
        send(mirror)

    monkeypatch.setattr(static.Mirror, "send", watched)
    wanted = [request(0, [1, 2, 3], 40), request(1, [5, 6], 12)]
    one = engine(3, 2, wanted, static=True)
    first, second = (one.admit(item, 0.0) for item in wanted)
    while second.finish_reason is None:
        one.step()
    assert len(sent) == 1 and len(second.steps) > 3
    while first.finish_reason is None:
        one.step()
    assert len(sent) == 2 and len(first.steps) > len(second.steps) + 3


HOST_WAITS = {"aten._local_scalar_dense", "aten.nonzero", "aten.lift_fresh", "aten.equal"}


class Watched(TorchDispatchMode):
    """Notes operations at which the host would wait for a GPU, or copy to it what it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def __torch_dispatch__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func).rsplit(".", 1)[0]
        if name in HOST_WAITS:
            self.found.append(name)
        return func(*args, **(kwargs or {}))


class Watching(Again):
    """Looks at what the captured work asks for."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def capture(self, work: Work) -> Captured:
        with Watched() as watched:
            work()
        self.found += watched.found
        return super().capture(work)


@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize(("family", "packed"), [("llama", True), ("gemma3", False)])
def test_no_piece_makes_the_host_wait(family: str, packed: bool, sampling: Sampling) -> None:
    target = make_target(family)
    drafter = make_drafter(target)
    if packed:
        target.pack()
    for options in ({"k": 0}, {"k": 3}, {"k": 3, "curve": DEAR}):
        capturer = Watching()
        one = Engine(target, drafter, concurrency=2, capacity=5, graphs=Graphs(capturer), **options)
        one.capture(sampling)
        assert capturer.captures > 0
        assert capturer.found == []


def test_a_piece_that_waits_would_be_noticed() -> None:
    with Watched() as watched:
        int(torch.ones(1).sum())
        torch.tensor([1])
    assert watched.found == ["aten._local_scalar_dense", "aten.lift_fresh"]


# ------------------------------------------------------------------------------ buckets and their number


@given(st.integers(1, 300), st.integers(1, 100_000))
def test_a_bucket_holds_what_it_is_for_and_little_more(slots: int, length: int) -> None:
    for rows in {1, (slots + 1) // 2, slots}:
        assert rows <= row_bucket(rows, slots) <= min(slots, 2 * rows)
    capacity = 100_000
    bucket = length_bucket(length, capacity)
    assert length <= bucket <= max(length + static.LEAST, 1.26 * length)
    assert bucket in length_buckets(capacity)


def test_the_buckets_of_a_usual_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(static, "LEAST", 128)
    assert row_buckets(1) == [1]
    assert row_buckets(6) == [1, 2, 4, 6]
    assert row_buckets(64) == [1, 2, 4, 8, 16, 32, 64]
    assert length_buckets(656) == [128, 256, 384, 512, 640, 656]
    assert length_buckets(2100)[-6:] == [1024, 1280, 1536, 1792, 2048, 2100]
    assert len(length_buckets(32768)) == 28


OPTIONS: list[tuple[dict[str, Any], int]] = [
    ({"k": 0}, 1),
    ({"k": 3}, 1),
    ({"k": 3, "confidence_threshold": 0.5}, 6),
    ({"k": 3, "curve": DEAR}, 6),
]


@pytest.mark.parametrize(
    ("options", "pieces"), OPTIONS, ids=["plain", "fixed", "threshold", "pause"]
)
def test_all_graphs_can_be_captured_beforehand(options: dict[str, Any], pieces: int) -> None:
    sampling = PLAIN if options.get("confidence_threshold") else Sampling()
    wanted = items(sampling)
    capturer = Again()
    one = engine(slots=4, wanted=wanted, graphs=Graphs(capturer), **options)
    one.capture(sampling)
    assert one.static is not None
    number = len(row_buckets(4)) * len(length_buckets(one.cache.capacity)) * pieces
    assert len(one.static.captured) == capturer.captures == number
    rows = serve(one, wanted)
    assert capturer.captures == number, "every step found its graph"
    assert outputs(rows) == outputs(serve(engine(slots=4, wanted=wanted, **options), wanted))


def test_other_seeds_need_no_other_graphs() -> None:
    capturer = Again()
    one = engine(3, 2, items(), graphs=Graphs(capturer))
    one.capture(Sampling(1.0, seed=1))
    number = capturer.captures
    one.capture(Sampling(1.0, seed=2))
    assert capturer.captures == number
    one.capture(Sampling(1.1, seed=2))
    assert capturer.captures == 2 * number


def test_a_capture_while_a_request_is_in_flight_is_a_mistake() -> None:
    one = engine(3, 2, items(), graphs=Graphs(Again()))
    one.admit(request(0, [1, 2], 9), 0.0)
    with pytest.raises(AssertionError, match="overwrites"):
        one.capture(Sampling())


# ------------------------------------------------------------------------------------------- fallback


class Failing(Again):
    """Cannot capture from the n-th time on."""

    def __init__(self, good: int) -> None:
        super().__init__()
        self.good = good

    def capture(self, work: Work) -> Captured:
        if self.captures == self.good:
            raise RuntimeError("operation not permitted\nwhen stream is capturing")
        return super().capture(work)


class Wrong(Again):
    """Its graphs give other tokens."""

    def capture(self, work: Work) -> Captured:
        return super().capture(lambda: work().add_(1))


@pytest.mark.parametrize("good", [0, 2])
def test_where_a_capture_fails_it_goes_on_without_and_says_so_once(
    good: int, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted, graphs = items(), Graphs(Failing(good))
    one, other = (engine(k, 3, wanted, graphs=graphs) for k in (3, 0))
    texts = outputs(serve(engine(3, 3, wanted), wanted))
    assert outputs(serve(one, wanted)) == outputs(serve(other, wanted)) == texts
    lines = capsys.readouterr().err.splitlines()
    assert lines == [
        f"no CUDA graphs from here on, steps are slower: {graphs.failure}; engine.cuda_graphs=off "
        "leaves them out from the start"
    ]
    assert str(graphs.failure).endswith(
        "rows cannot be captured (RuntimeError: operation not permitted when stream is capturing)"
    )
    assert other.static is not None and not other.static.captured, "arms are run alike"


@pytest.mark.parametrize(
    ("options", "piece"),
    [({}, "whole step"), ({"confidence_threshold": 0.5}, "draft")],
    ids=["fixed", "threshold"],
)
def test_a_graph_that_gives_other_tokens_is_not_used(
    options: dict[str, float], piece: str, capsys: pytest.CaptureFixture[str]
) -> None:
    wanted, graphs = items(), Graphs(Wrong())
    one = engine(3, 1, wanted, graphs=graphs, **options)
    assert outputs(serve(one, wanted)) == outputs(serve(engine(3, 1, wanted, **options), wanted))
    assert graphs.failure == (
        f"the graph of the {piece} of 1 row gives other tokens than the same work without it"
    )
    assert "no CUDA graphs from here on" in capsys.readouterr().err


def test_a_graph_is_replayed_in_every_later_step_of_its_kind() -> None:
    wanted = [request(0, [1, 2, 3], 40)]
    capturer = Again()
    row = serve(engine(0, 1, wanted, graphs=Graphs(capturer)), wanted)["0"]
    assert capturer.replays == len(row.steps) + capturer.captures  # the first is compared, too
    assert 1 < capturer.captures < 6 < len(row.steps)


def test_a_profile_times_steps_that_are_not_static() -> None:
    wanted, parts = items(), set()
    capturer = Again()
    one = engine(3, 2, wanted, graphs=Graphs(capturer), lap=parts.add)
    assert outputs(serve(one, wanted)) == outputs(serve(engine(3, 2, wanted), wanted))
    assert {"draft backbone", "verify: layers", "accept"} <= parts
    assert capturer.captures == 0


def test_a_job_captures_for_all_arms_before_it_measures_and_tells_whether_it_used_them(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    save_tiny_target(tmp_path / "target", layers=2)
    target = load_target(tmp_path / "target", "cpu", torch.float32)
    drafter, tokenizer = make_drafter(target), load_tokenizer(tmp_path / "target")
    config = JobConfig(
        "test",
        DatasetConfig(name="set", max_new_tokens=6),
        {"baseline": RunConfig(), "k3": RunConfig(Mode.speculative, 3)},
        EngineConfig(concurrency=2, warmup=1),
    )

    def run(name: str, capturer: Again) -> tuple[list[list[int]], Job]:
        monkeypatch.setattr(bench, "graphs_for", lambda _choice, _device: Graphs(capturer))
        asked = [Prompt(f"p{n}", [f"tell me of number {n}"]) for n in range(3)]
        job = Job(config, asked, [Prompt("warmup/0", ["warm up"])], target, drafter, tokenizer)
        return [r.output_token_ids for r in run_job(job, tmp_path / name)], job

    capturer = Again()
    texts, job = run("good", capturer)
    assert job.cuda_graphs
    steps = [one.static for one in job.engines.values() if one.static is not None]
    assert len(steps) == 2
    assert all(
        len(one.captured) == len(row_buckets(2)) * len(length_buckets(one.capacity))
        for one in steps
    )
    assert capturer.captures == sum(len(one.captured) for one in steps)
    texts_without, job = run("bad", Failing(1))
    assert not job.cuda_graphs
    assert texts_without == texts


def test_a_step_curve_is_measured_on_steps_that_are_captured_already(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    capturer, step = Again(), Engine.step
    monkeypatch.setattr(profile, "ROUNDS", 1)

    def watched(one: Engine, drafting: bool = True) -> list[Row]:
        before = capturer.captures
        finished = step(one, drafting)
        assert 0 < before == capturer.captures
        return finished

    monkeypatch.setattr(Engine, "step", watched)
    curve = profile.profile_steps(*models(), 2, 2, list(range(20)), Graphs(capturer))
    assert curve.tokens == [1, 2, 3, 4, 6]
    assert capturer.replays > capturer.captures


def test_a_step_curve_of_graphs_is_not_that_of_other_steps(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    timed: list[object] = []

    def fake(*arguments: object) -> StepCurve:
        timed.append(arguments[-1])
        return SLOPED

    monkeypatch.setattr(profile, "profile_steps", fake)
    graphs = Graphs(Again())
    monkeypatch.setattr(
        profile, "graphs_for", lambda choice, _: graphs if choice is CudaGraphs.auto else None
    )
    for choice in (CudaGraphs.auto, CudaGraphs.off, CudaGraphs.auto, CudaGraphs.off):
        profile.step_curve(tmp_path, {"device": "a"}, *models(), 2, 2, [1], choice)
    assert timed == [graphs, None]


def test_graphs_are_for_gpus_and_can_be_left_out() -> None:
    assert EngineConfig().cuda_graphs is CudaGraphs.auto
    assert graphs_for(CudaGraphs.auto, torch.device("cpu")) is None
    assert graphs_for(CudaGraphs.off, torch.device("cuda")) is None


# ----------------------------------------------------------------------------------------- on a GPU

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@cache
def gpu_models(family: str = "llama") -> tuple[Target, DSparkDrafter]:
    target = Target(make_target(family, embed=20).model.to("cuda"))
    target.packs = True
    return target, make_bigram_drafter(target)


@needs_gpu
@pytest.mark.parametrize("sampling", [Sampling(), WARM], ids=["greedy", "sampled"])
@pytest.mark.parametrize(
    "options", [options for options, _ in OPTIONS], ids=["plain", "fixed", "threshold", "pause"]
)
@pytest.mark.parametrize("packed", [False, True], ids=["own-layers", "fused"])
def test_cuda_graphs_give_the_same_text(
    options: dict[str, Any], sampling: Sampling, packed: bool
) -> None:
    target, drafter = gpu_models()
    if packed:
        target = Target(make_target(embed=20).model.to("cuda"))
        target.packs = True
        target.pack()
    wanted = items(sampling)
    graphs = graphs_for(CudaGraphs.auto, target.device)
    assert graphs is not None and isinstance(graphs.capturer, CudaCapturer)
    capacity = need(wanted)
    usual = Engine(target, drafter, concurrency=3, capacity=capacity, **options)
    one = Engine(target, drafter, concurrency=3, capacity=capacity, graphs=graphs, **options)
    one.capture(sampling)
    texts = outputs(serve(usual, wanted))
    assert outputs(serve(one, wanted)) == texts
    assert outputs(serve(one, wanted)) == texts
    assert graphs.failure is None


@needs_gpu
def test_a_step_on_graphs_waits_for_the_device_once() -> None:
    target, drafter = gpu_models()
    wanted = [request(0, [1, 2, 3], 60)]
    one = Engine(
        target, drafter, k=3, capacity=64, graphs=graphs_for(CudaGraphs.auto, target.device)
    )
    one.capture(Sampling())
    one.admit(wanted[0], 0.0)
    one.step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        one.step()  # waits for an event, which this mode lets pass
    finally:
        torch.cuda.set_sync_debug_mode("default")
