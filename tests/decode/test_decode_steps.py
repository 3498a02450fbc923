"""What the engine says about its steps, against a recount from drafts and texts."""

from __future__ import annotations

import random
from functools import cache

import torch
from decode_helpers import (
    VOCAB,
    alone,
    make_bigram_drafter,
    make_target,
    need,
    request,
    serve,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.decode.bench import to_record
from dspark.decode.draft import Draft
from dspark.decode.engine import Engine, Request, Row
from dspark.metrics.identities import check_records
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target

LONGEST = 24


@cache
def models() -> tuple[Target, DSparkDrafter]:
    target = make_target(embed=20)
    return target, make_bigram_drafter(target)


@cache
def prompt(number: int) -> tuple[int, ...]:
    chance = random.Random(number)
    return tuple(chance.randrange(VOCAB) for _ in range(chance.randint(1, 12)))


@cache
def text(number: int) -> tuple[int, ...]:
    return tuple(alone(models()[0], request(number, prompt(number), LONGEST + 8)).output)


def recount(row: Row, drafts: list[tuple[list[int], list[float]]], threshold: float) -> list[tuple]:
    """(emitted, verified, accepted, cut) of each step, from the target's text and the drafts."""
    item, expected = row.request, text(int(row.request.prompt_id))
    out, steps = [expected[0]], []
    for tokens, confidence in drafts:
        verified = 0
        while verified < len(tokens) and confidence[verified] >= threshold:
            verified += 1
        accepted = 0
        while accepted < verified and tokens[accepted] == expected[len(out) + accepted]:
            accepted += 1
        left = item.max_new_tokens - len(out)
        emitted = 0
        for token in expected[len(out) : len(out) + accepted + 1]:
            out.append(token)
            emitted += 1
            if token in item.eos_ids or len(out) == item.max_new_tokens:
                break
        cut = left < verified + 1 or emitted < accepted + 1
        steps.append((emitted, verified, accepted, cut))
    assert out == row.output
    return steps


@settings(deadline=None, max_examples=40)
@given(
    wanted=st.lists(
        st.tuples(st.integers(0, 30), st.integers(1, LONGEST)),
        min_size=1,
        max_size=7,
        unique_by=lambda item: item[0],
    ),
    slots=st.integers(1, 4),
    k=st.integers(1, 7),
    threshold=st.sampled_from([0.0, 0.2, 0.5, 0.8]),
    eos=st.frozensets(st.integers(0, VOCAB - 1), max_size=3),
)
def test_steps_are_what_a_recount_gives(
    wanted: list[tuple[int, int]],
    slots: int,
    k: int,
    threshold: float,
    eos: frozenset[int],
) -> None:
    target, drafter = models()
    items: list[Request] = [request(n, prompt(n), new, eos_ids=eos) for n, new in wanted]
    drafts: dict[str, list[tuple[list[int], list[float]]]] = {item.prompt_id: [] for item in items}

    def keep(draft: Draft) -> None:
        rows = [row for row in engine.slots if row is not None]
        confidence = torch.sigmoid(draft.confidence)
        for index, row in enumerate(rows):
            seen = (draft.tokens[index].tolist(), confidence[index].tolist())
            drafts[row.request.prompt_id].append(seen)

    engine = Engine(
        target,
        drafter,
        k=k,
        concurrency=slots,
        capacity=need(items),
        confidence_threshold=threshold,
        trace=keep,
    )
    rows = serve(engine, items)
    for name, row in rows.items():
        steps = [(s.emitted, s.verified, s.accepted, s.cut) for s in row.steps]
        assert steps == recount(row, drafts[name], threshold)
        assert all(step.drafted == k for step in row.steps)
        assert 1 + sum(step.emitted for step in row.steps) == len(row.output)
        ended_by_eos = row.output[-1] in eos
        assert row.finish_reason == ("stop" if ended_by_eos else "length")
        assert ended_by_eos or len(row.output) == row.request.max_new_tokens
        assert not eos & set(row.output[:-1])
    check_records([to_record(row, "set", "run", 0) for row in rows.values()])


def test_plain_decoding_drafts_nothing() -> None:
    row = alone(models()[0], request(1, prompt(1), 9))
    steps = [(s.emitted, s.drafted, s.verified, s.accepted, s.cut) for s in row.steps]
    assert steps == [(1, 0, 0, 0, False)] * 8


def test_times_run_forwards_and_are_shared_by_the_rows_of_a_step() -> None:
    target, drafter = models()
    items = [request(n, prompt(n), 12) for n in range(3)]
    engine = Engine(target, drafter, k=2, concurrency=3, capacity=need(items))
    rows = list(serve(engine, items).values())
    for row in rows:
        times = [row.t_submit, row.t_first, *(step.t for step in row.steps)]
        assert times == sorted(times) and len(set(times)) == len(times)
    assert len({row.steps[0].t for row in rows}) == 1


def test_a_record_says_what_the_row_says() -> None:
    target, drafter = models()
    row = alone(target, request(2, prompt(2), 10), drafter, 3)
    record = to_record(row, "set", "dspark_k3", 4)
    assert (record.prompt_id, record.turn, record.request_id) == ("2", 0, "2#0")
    assert (record.dataset, record.run, record.window) == ("set", "dspark_k3", 4)
    assert (record.prompt_tokens, record.output_tokens) == (len(prompt(2)), 10)
    assert record.output_token_ids == row.output and record.output_token_ids is not row.output
    assert record.t_last == row.steps[-1].t
    assert record.step_emitted == [step.emitted for step in row.steps]
    assert (record.finish_reason, record.error) == ("length", None)
    single = to_record(alone(target, request(2, prompt(2), 1)), "set", "baseline", 0)
    assert (single.t_last, single.step_t) == (single.t_first, [])
