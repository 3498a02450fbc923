"""Scheduled verification in the engine: how much is verified, and that no text depends on it."""

from __future__ import annotations

import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import replace
from functools import cache
from itertools import accumulate
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from decode_helpers import (
    VOCAB,
    alone,
    make_bigram_drafter,
    make_drafter,
    make_target,
    need,
    outputs,
    request,
    serve,
)
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from dspark.config import EngineConfig, Mode, RunConfig
from dspark.decode.bench import to_record
from dspark.decode.draft import Draft
from dspark.decode.engine import Batch, Engine, Request, Row
from dspark.decode.sampling import Sampling, probabilities
from dspark.decode.schedule import StepCurve, fit_curve
from dspark.metrics.cell import CellSummary
from dspark.metrics.identities import check_rows, check_summaries
from dspark.metrics.rows import rows_from_summaries
from dspark.metrics.summary import summarise
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target

K, NEW = 4, 16
FLAT = fit_curve([1], [1.0])
SLOPED = fit_curve([1, 16], [1.0, 4.0])
STAIRS = fit_curve([1, 5, 6, 9, 10, 16], [1.0, 1.0, 1.5, 1.5, 4.0, 4.0])
STEEP = fit_curve([1, 2], [1.0, 50.0])
CURVES = {"flat": FLAT, "sloped": SLOPED, "stairs": STAIRS, "steep": STEEP}


@cache
def models() -> tuple[Target, DSparkDrafter]:
    """A target and a drafter, some of whose tokens are accepted."""
    target = make_target(embed=20)
    drafter = make_bigram_drafter(target, layers=1)
    assert drafter.confidence_head is not None
    with torch.no_grad():
        drafter.confidence_head.proj.weight.mul_(0.2)  # seldom sure of anything
    return target, drafter


@cache
def items() -> list[Request]:
    chance = random.Random(3)
    return [request(n, chance.choices(range(VOCAB), k=3 * n + 1), NEW) for n in range(4)]


@cache
def texts() -> dict[str, list[int]]:
    """The baseline's, one request at a time."""
    return {item.prompt_id: alone(models()[0], item).output for item in items()}


def engine_for(curve: StepCurve | None, concurrency: int = 3, **options: Any) -> Engine:
    target, drafter = models()
    capacity = need(items())
    return Engine(
        target, drafter, k=K, concurrency=concurrency, capacity=capacity, curve=curve, **options
    )


def by_step(rows: Iterable[Row]) -> list[list[int]]:
    """What the rows of each step verified: they share its time."""
    steps: dict[float, list[int]] = defaultdict(list)
    for row in rows:
        for step in row.steps:
            steps[step.t].append(step.verified)
    return list(steps.values())


def verified(rows: dict[str, Row]) -> set[int]:
    return {step.verified for row in rows.values() for step in row.steps}


def counts(rows: dict[str, Row]) -> dict[str, list[tuple[int, int, int, bool]]]:
    return {
        name: [(s.emitted, s.verified, s.accepted, s.cut) for s in row.steps]
        for name, row in rows.items()
    }


# ------------------------------------------------------------------------------------- greedy text


@st.composite
def curves(draw: st.DrawFn) -> StepCurve:
    """Seconds that rise, in slopes or in stairs, measured at some counts alone."""
    tokens = sorted(draw(st.sets(st.integers(1, 16), min_size=1, max_size=8)))
    rise = st.one_of(st.just(0.0), st.floats(0, 0.3), st.floats(0, 3))
    rises = draw(st.lists(rise, min_size=len(tokens) - 1, max_size=len(tokens) - 1))
    return fit_curve(tokens, list(accumulate(rises, initial=draw(st.floats(0.1, 2)))))


@settings(deadline=None, max_examples=8)
@given(curve=curves(), concurrency=st.sampled_from([1, 3]))
def test_no_curve_changes_the_text(curve: StepCurve, concurrency: int) -> None:
    rows = serve(engine_for(curve, concurrency), items())
    assert outputs(rows) == texts()
    steps = [step for row in rows.values() for step in row.steps]
    assert all(0 <= s.accepted <= s.verified <= s.drafted <= K for s in steps)


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize("name", sorted(CURVES))
def test_drafting_ends_where_no_row_is_to_verify_more(name: str, concurrency: int) -> None:
    """The same decisions as over whole drafts (a trace asks for those), and no token too many."""
    lazy = serve(engine_for(CURVES[name], concurrency), items())
    whole = serve(engine_for(CURVES[name], concurrency, trace=lambda draft: None), items())
    assert by_step(lazy.values()) == by_step(whole.values())
    assert {step.drafted for row in whole.values() for step in row.steps} == {K}
    drafted: dict[float, set[int]] = defaultdict(set)
    verified: dict[float, int] = defaultdict(int)
    for row in lazy.values():
        for step in row.steps:
            drafted[step.t].add(step.drafted)
            verified[step.t] = max(verified[step.t], step.verified)
    assert all(drafted[t] == {verified[t]} for t in drafted)


@pytest.mark.parametrize("concurrency", [1, 3])
@pytest.mark.parametrize(("name", "widths"), [("flat", {K}), ("steep", {0})])
def test_what_costs_nothing_is_verified_whole_and_what_costs_too_much_not_at_all(
    name: str, widths: set[int], concurrency: int
) -> None:
    rows = serve(engine_for(CURVES[name], concurrency), items())
    assert verified(rows) == widths
    assert outputs(rows) == texts()
    if name == "steep":
        assert {step.emitted for row in rows.values() for step in row.steps} == {1}


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "gemma3", "mistral"])
def test_ragged_rows_keep_their_text_on_other_families(family: str) -> None:
    """Windowed layers too: texts are longer than the windows of gemma3 and mistral."""
    target = make_target(family, embed=1.0 if family == "gemma3" else 20.0)
    drafter = make_bigram_drafter(target, layers=1)
    expected = {item.prompt_id: alone(target, item).output for item in items()}
    engine = Engine(target, drafter, k=K, concurrency=3, capacity=need(items()), curve=SLOPED)
    rows = serve(engine, items())
    assert outputs(rows) == expected
    assert any(len(set(widths)) > 1 for widths in by_step(rows.values()))


# ------------------------------------------------------------------------------------- ragged steps


@pytest.mark.parametrize("name", ["sloped", "stairs"])
def test_a_pass_holds_no_token_that_is_not_verified(name: str) -> None:
    """Rows of one step verify different numbers of tokens, and the pass is their sum."""
    engine, passes = engine_for(CURVES[name]), []
    forward, step = engine.target.forward, engine.step

    def watched_step() -> list[Row]:
        rows = [row for row in engine.slots if row is not None]

        def watched_forward(tokens: Tensor, *rest: Any) -> Any:
            passes.append(tokens.numel())
            return forward(tokens, *rest)

        with patch.object(engine.target, "forward", watched_forward):
            finished = step()
        assert passes[-1] == sum(row.steps[-1].verified + 1 for row in rows)
        return finished

    with patch.object(engine, "step", watched_step):
        rows = serve(engine, items())
    assert outputs(rows) == texts()
    widths = by_step(rows.values())
    assert len(passes) == len(widths)
    assert any(len(set(step)) > 1 for step in widths)
    accepted = sum(step.accepted for row in rows.values() for step in row.steps)
    assert 0 < accepted < sum(sum(step) for step in widths)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(0.8, seed=2)], ids=["greedy", "sampled"])
def test_packed_steps_are_those_of_a_rectangle(sampling: Sampling) -> None:
    """A target that cannot pack verifies the same tokens in a wider pass, and decides the same."""
    wanted = [replace(item, sampling=sampling) for item in items()]
    packed = serve(engine_for(SLOPED), wanted)
    with patch.object(models()[0], "packs", False):
        rectangular = serve(engine_for(SLOPED), wanted)
    assert outputs(packed) == outputs(rectangular)
    assert counts(packed) == counts(rectangular)
    assert any(len(set(widths)) > 1 for widths in by_step(packed.values()))


def test_greedy_and_sampling_rows_share_ragged_steps() -> None:
    """A greedy request's text is the baseline's, whoever is sampled beside it."""
    wanted = [
        replace(item, sampling=Sampling(temperature=0.8) if int(item.prompt_id) % 2 else Sampling())
        for item in items()
    ]
    rows = serve(engine_for(SLOPED), wanted)
    assert any(len(set(widths)) > 1 for widths in by_step(rows.values()))
    greedy = {name: row.output for name, row in rows.items() if int(name) % 2 == 0}
    assert greedy == {name: texts()[name] for name in greedy}


def test_a_context_that_was_packed_drafts_as_one_that_was_not() -> None:
    """What a packed pass stores for the drafter shows in later drafts alone, never in the text."""

    def drafts() -> list[Draft]:
        kept: list[Draft] = []
        serve(engine_for(SLOPED, trace=kept.append), items())
        return kept

    packed = drafts()
    with patch.object(models()[0], "packs", False):
        rectangular = drafts()
    assert len(packed) == len(rectangular)
    for ours, expected in zip(packed, rectangular, strict=True):
        torch.testing.assert_close(ours.hidden, expected.hidden, atol=1e-3, rtol=1e-3)
        torch.testing.assert_close(ours.confidence, expected.confidence, atol=1e-3, rtol=1e-3)


# ------------------------------------------------------------------------------------- calibration


def test_the_schedule_reads_calibrated_confidences() -> None:
    """At a huge temperature each token has one chance in two: the first pays here, no second does.

    1 token a second without drafts, 1.5 / 1.25 with one, 1.75 / 1.5 with two.
    """
    curve, drafter = fit_curve([1, 5], [1.0, 2.0]), models()[1]
    raw = serve(engine_for(curve, concurrency=1), items())
    with patch.object(drafter, "temperatures", [1e9] * drafter.block_size):
        unsure = serve(engine_for(curve, concurrency=1), items())
    assert verified(unsure) == {1}
    assert len(verified(raw)) > 2
    assert outputs(raw) == outputs(unsure) == texts()


def test_each_position_has_its_own_temperature() -> None:
    """Tokens 1 and 2 keep a chance of one in two, what follows is hopeless."""
    drafter = models()[1]
    temperatures = [1e9, 1e9] + [1e-9] * (drafter.block_size - 2)
    with (
        patch.object(drafter, "temperatures", temperatures),
        patch.object(
            drafter,
            "confidence_logits",
            lambda hidden, _previous: hidden.new_full(hidden.shape[:-1], -1.0),
        ),
    ):
        assert verified(serve(engine_for(FLAT), items())) == {2}


def test_a_threshold_reads_calibrated_confidences_too() -> None:
    drafter = models()[1]
    with patch.object(drafter, "temperatures", [1e9] * drafter.block_size):
        for threshold, widths in ((0.4, {K}), (0.6, {0})):
            engine = engine_for(None, confidence_threshold=threshold)
            assert verified(serve(engine, items())) == widths


# ------------------------------------------------------------------------------------ sampled text

SLOTS, LENGTH = 48, 60
# A row's first draft token is cheap, further ones cost more and more.
RISING = fit_curve([SLOTS, 2 * SLOTS, 4 * SLOTS], [1.0, 1.3, 2.4])
# So dear are drafts at times that they are left out.
PAUSED = fit_curve(RISING.tokens, RISING.seconds, fit_curve([SLOTS], [0.72]))
SAMPLINGS = [Sampling(0.9, seed=5), Sampling(1.2, 0.85, 6, seed=5)]


@cache
def small() -> tuple[Target, DSparkDrafter]:
    """A target with a spread-out distribution and a drafter that overlaps it by about half."""
    target = make_target(vocab=8, layers=2)
    drafter = make_drafter(target, layers=1, block_size=4, markov_rank=4)
    with torch.no_grad():
        target.lm_head.weight.mul_(0.3)
        drafter.markov_head.markov_w2.weight.mul_(0.1)
    return target, drafter


def uniformity(engine: Engine, sampling: Sampling) -> float:
    """p-value of "the text is the target's", over the tokens of 2 * SLOTS requests.

    Each token's place in its own conditional distribution, which the model itself gives, must be
    uniform (a randomised probability integral transform).
    """
    wanted = [request(n, [1, 5, 2], LENGTH, sampling=sampling) for n in range(2 * SLOTS)]
    rows = serve(engine, wanted)
    assert any(len(set(widths)) > 1 for widths in by_step(rows.values()))
    steps = [step for row in rows.values() for step in row.steps]
    share = sum(s.accepted for s in steps) / sum(s.verified for s in steps)
    assert 0.1 < share < 0.9  # both branches are taken
    written = torch.tensor([[*row.request.tokens, *row.output] for row in rows.values()])
    with torch.no_grad():
        logits = small()[0].model(input_ids=written[:, :-1]).logits[:, -LENGTH:]
    probs = probabilities(logits, [sampling] * len(written)).double()
    tokens = written[:, -LENGTH:, None]
    below = probs.cumsum(-1).gather(-1, tokens) - probs.gather(-1, tokens)
    noise = torch.rand(below.shape, generator=torch.Generator().manual_seed(0)).double()
    places = (below + noise * probs.gather(-1, tokens)).flatten().numpy()
    return float(stats.chisquare(np.histogram(places, bins=20, range=(0, 1))[0]).pvalue)


@pytest.mark.parametrize("curve", [RISING, PAUSED], ids=["drafting", "pausing"])
@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["all-tokens", "some-tokens"])
def test_sampled_text_keeps_the_targets_distribution(sampling: Sampling, curve: StepCurve) -> None:
    engine = Engine(*small(), k=4, concurrency=SLOTS, capacity=LENGTH + 3, curve=curve)
    with patch.object(engine, "_draft", wraps=engine._draft) as drafts:
        assert uniformity(engine, sampling) > 1e-3
    skipped = sum(not call.args[1] for call in drafts.call_args_list)
    assert (skipped > 10) == (curve is PAUSED)
    assert skipped < len(drafts.call_args_list) - 10


def test_a_decision_that_reads_the_token_itself_is_noticed_by_this_test() -> None:
    """A control: to verify a token for what it is gives it a second chance to come out."""
    engine = Engine(*small(), k=4, concurrency=SLOTS, capacity=LENGTH + 3)
    draft_of = engine._draft

    def peeking(batch: Batch, drafting: bool) -> tuple[Draft | None, Tensor, list[int]]:
        draft, _, _ = draft_of(batch, drafting)
        assert draft is not None
        limits = 4 * (draft.tokens[:, 0] < 3).long()
        return draft, limits, limits.tolist()

    with patch.object(engine, "_draft", peeking):
        assert uniformity(engine, SAMPLINGS[0]) < 1e-6


# ---------------------------------------------------------------------------------------- metrics


def cells(curve: StepCurve) -> tuple[list[CellSummary], dict[str, Row]]:
    """The baseline's cell and a scheduled arm's, and the arm's rows."""
    config = RunConfig(Mode.speculative, K, schedule=True)
    arms: dict[str, RunConfig] = {"baseline": RunConfig(), "dspark_sched": config}
    target, _ = models()
    rows = {
        "baseline": serve(Engine(target, concurrency=3, capacity=need(items())), items()),
        "dspark_sched": serve(engine_for(curve), items()),
    }
    records = {
        run: [to_record(row, "set", run, 0) for row in served.values()]
        for run, served in rows.items()
    }
    summaries = [
        summarise(
            records[run],
            arm,
            EngineConfig(concurrency=3),
            baseline_records=records["baseline"],
            expected_requests=len(items()),
        )
        for run, arm in arms.items()
    ]
    return summaries, rows["dspark_sched"]


@pytest.mark.parametrize("name", CURVES)
def test_the_identities_of_the_metrics_hold_for_a_scheduled_arm(name: str) -> None:
    summaries, _ = cells(CURVES[name])
    check_summaries(summaries)
    check_rows(rows_from_summaries(summaries))
    assert (summaries[1].schedule, summaries[1].fixed_k) == (True, False)


def test_the_acceptance_rate_is_over_what_was_verified() -> None:
    summaries, rows = cells(SLOPED)
    cell, steps = summaries[1], [step for row in rows.values() for step in row.steps]
    whole = [step for step in steps if not step.cut]
    tried = sum(step.verified for step in whole)
    assert cell.accept_rate == sum(step.accepted for step in whole) / tried
    assert cell.drafted == sum(step.drafted for step in steps) < K * len(steps)
    assert cell.verified == sum(step.verified for step in steps) < cell.drafted
    assert cell.accept_p == [sum(s.accepted >= i for s in whole) / len(whole) for i in (1, 2, 3, 4)]


def test_an_arm_that_verifies_nothing_has_no_acceptance_rate() -> None:
    cell = cells(STEEP)[0][1]
    assert (cell.accept_rate, cell.accept_len, cell.verified) == (None, 1.0, 0)
    assert cell.drafted == 0
