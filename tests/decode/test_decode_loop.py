"""The closed loop: who is submitted when, and that no slot stands empty while work waits."""

from __future__ import annotations

import itertools
from functools import cache

import pytest
from decode_helpers import counting_target, make_bigram_drafter, make_target
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.decode.engine import Engine, Request, Row
from dspark.decode.loop import closed_loop
from dspark.errors import UserError
from dspark.models.target import Target


@cache
def counting() -> Target:
    return counting_target()


class Watched(Engine):
    """An engine that writes down what is asked of it."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.admitted: list[Row] = []
        self.active_at_step: list[tuple[set[str], int]] = []  # who is in flight, admitted so far

    def admit(self, request: Request, t_submit: float) -> Row:
        row = super().admit(request, t_submit)
        self.admitted.append(row)
        return row

    def step(self) -> list[Row]:
        active = {row.request.prompt_id for row in self.slots if row is not None}
        self.active_at_step.append((active, len(self.admitted)))
        return super().step()


def make_request(lengths: dict[str, list[int]], eos: frozenset[int] = frozenset()) -> object:
    """Each turn is asked with the answers before it, and may be as long as `lengths` says."""

    def build(name: str, turn: int, answers: list[list[int]]) -> Request:
        assert len(answers) == turn
        tokens = [1, *itertools.chain(*answers)]
        return Request(name, turn, tokens, lengths[name][turn], eos_ids=eos)

    return build


def run(engine: Engine, lengths: dict[str, list[int]], **more: object) -> list[Row]:
    prompts = [(name, len(turns)) for name, turns in lengths.items()]
    return list(closed_loop(engine, prompts, make_request(lengths), **more))  # type: ignore[arg-type]


def ids(rows: list[Row]) -> list[str]:
    return [f"{row.request.prompt_id}#{row.request.turn}" for row in rows]


work = st.lists(st.lists(st.integers(1, 6), min_size=1, max_size=3), min_size=1, max_size=9)


@settings(deadline=None, max_examples=40)
@given(turns=work, slots=st.integers(1, 4))
def test_every_turn_is_run_once_in_order_and_slots_are_full_while_work_waits(
    turns: list[list[int]], slots: int
) -> None:
    lengths = {f"p{index}": item for index, item in enumerate(turns)}
    engine = Watched(counting(), concurrency=slots, capacity=60)
    rows = run(engine, lengths)
    wanted = [f"{name}#{turn}" for name in lengths for turn in range(len(lengths[name]))]
    assert sorted(ids(rows)) == sorted(wanted)
    assert all(
        len(row.output) == lengths[r.prompt_id][r.turn] for row in rows for r in [row.request]
    )
    started = [name for name in ids(engine.admitted) if name.endswith("#0")]
    assert started == [f"{name}#0" for name in lengths]  # first turns in the order given
    # At each step all slots are busy, or nobody is left who could have been admitted.
    for active, admitted in engine.active_at_step:
        assert len(active) <= slots
        if len(active) < slots:  # then what is still to come are later turns of those in flight
            assert all(row.request.prompt_id in active for row in engine.admitted[admitted:])
    assert engine.free == slots


@settings(deadline=None, max_examples=40)
@given(turns=work, slots=st.integers(1, 4))
def test_littles_bound_holds_and_no_slot_serves_two_requests_at_once(
    turns: list[list[int]], slots: int
) -> None:
    lengths = {f"p{index}": item for index, item in enumerate(turns)}
    engine = Watched(counting(), concurrency=slots, capacity=60)
    rows = run(engine, lengths)
    spans = sorted((row.t_submit, row.steps[-1].t if row.steps else row.t_first) for row in rows)
    window = max(end for _, end in spans) - spans[0][0]
    assert sum(end - begin for begin, end in spans) <= slots * window + 1e-9
    free_since = [float("-inf")] * slots
    for begin, end in spans:
        free_since.sort()
        # The slot that was freed last before this submit is the one that it takes.
        taken = max(i for i, since in enumerate(free_since) if since <= begin)
        free_since[taken] = end


def test_a_later_turn_is_asked_with_the_answers_before_it_and_goes_first() -> None:
    lengths = {"a": [3, 2, 4], "b": [9], "c": [2]}
    engine = Watched(counting(), concurrency=2, capacity=60)
    rows = {row.request.turn: row for row in run(engine, lengths) if row.request.prompt_id == "a"}
    assert ids(engine.admitted) == ["a#0", "b#0", "a#1", "a#2", "c#0"]
    for turn in (1, 2):
        earlier = [token for index in range(turn) for token in rows[index].output]
        assert rows[turn].request.tokens == [1, *earlier]
        last = rows[turn - 1].steps[-1].t
        assert rows[turn].t_submit >= last


def test_a_place_that_a_first_token_frees_is_taken_before_the_next_step() -> None:
    """A request may end at its prefill (EOS at once, or a budget of 1)."""
    lengths = {"a": [8], "b": [1], "c": [1], "d": [5], "e": [4]}
    engine = Watched(counting(), concurrency=2, capacity=60)
    rows = run(engine, lengths)
    assert engine.active_at_step[0] == ({"a", "d"}, 4)  # b and c are over already
    assert ids(rows)[:2] == ["b#0", "c#0"]
    by_name = {row.request.prompt_id: row for row in rows}
    assert by_name["b"].t_submit == by_name["a"].t_submit
    assert by_name["c"].t_submit >= by_name["b"].t_first
    assert by_name["d"].t_submit >= by_name["c"].t_first


def test_requests_that_all_end_at_their_first_token_need_no_step() -> None:
    lengths = {f"p{index}": [1, 1] for index in range(5)}
    engine = Watched(counting(), concurrency=2, capacity=60)
    rows = run(engine, lengths)
    assert len(rows) == 10 and engine.active_at_step == []
    assert all(row.output == [row.request.tokens[-1] + 1] for row in rows)


def test_eos_in_the_prefill_frees_the_place() -> None:
    engine = Engine(counting(), concurrency=1, capacity=20)
    build = make_request({"a": [5], "b": [5]}, frozenset([2]))
    rows = list(closed_loop(engine, [("a", 1), ("b", 1)], build))  # type: ignore[arg-type]
    assert [(row.output, row.finish_reason) for row in rows] == [([2], "stop")] * 2


def test_answered_turns_are_not_asked_again() -> None:
    lengths = {"a": [2, 2, 2], "b": [2, 2], "c": [3]}
    whole = {
        f"{r.request.prompt_id}#{r.request.turn}": r
        for r in run(Watched(counting(), concurrency=2, capacity=60), lengths)
    }
    answered = {"a": [whole["a#0"].output, whole["a#1"].output], "b": [whole["b#0"].output]}
    engine = Watched(counting(), concurrency=2, capacity=60)
    rows = run(engine, lengths, answered=answered)
    assert sorted(ids(rows)) == ["a#2", "b#1", "c#0"]
    for row in rows:
        twin = whole[f"{row.request.prompt_id}#{row.request.turn}"]
        assert (row.request.tokens, row.output) == (twin.request.tokens, twin.output)
    assert [len(answers) for answers in answered.values()] == [2, 1]  # the caller's lists stay


def test_rows_are_yielded_as_they_finish() -> None:
    engine = Watched(counting(), concurrency=2, capacity=60)
    lengths = {"long": [9], "short": [2], "next": [2]}
    prompts = [(name, 1) for name in lengths]
    loop = closed_loop(engine, prompts, make_request(lengths))  # type: ignore[arg-type]
    assert next(loop).request.prompt_id == "short"
    assert len(engine.admitted) == 2  # nothing ran ahead
    assert [row.request.prompt_id for row in loop] == ["next", "long"]


@pytest.mark.parametrize("k", [0, 3])
def test_slots_that_are_filled_together_are_submitted_together(k: int) -> None:
    """Who is prefilled second has waited for the first: that is part of its time to first token."""
    target = make_target(embed=20)
    engine = Watched(target, make_bigram_drafter(target), k=k, concurrency=3, capacity=60)
    run(engine, {f"p{index}": [4] for index in range(6)})
    first = engine.admitted[:3]
    assert len({row.t_submit for row in first}) == 1
    assert first[0].t_first < first[1].t_first < first[2].t_first


def test_no_prompts_need_no_steps() -> None:
    assert run(Watched(counting(), capacity=10), {}) == []


@settings(deadline=None, max_examples=40)
@given(turns=work, slots=st.integers(1, 3), reading=st.integers(1, 60))
def test_a_clock_that_goes_backwards_is_refused_whenever_it_does(
    turns: list[list[int]], slots: int, reading: int
) -> None:
    """No row is given out with such a time, and none is measured after it."""
    lengths = {f"p{index}": item for index, item in enumerate(turns)}
    readings: list[float] = []

    class Broken(Engine):
        def clock(self) -> float:
            readings.append(super().clock() - (3600 if len(readings) >= reading else 0))
            return readings[-1]

    engine = Broken(counting(), concurrency=slots, capacity=60)
    prompts = [(name, len(items)) for name, items in lengths.items()]
    rows: list[Row] = []
    try:
        rows.extend(closed_loop(engine, prompts, make_request(lengths)))  # type: ignore[arg-type]
    except UserError as error:
        assert "this machine's monotonic clock went back by 3" in str(error)
        assert len(readings) > reading
    else:
        assert len(readings) <= reading
    for row in rows:
        times = [row.t_submit, row.t_first, *(step.t for step in row.steps)]
        assert times == sorted(times) and readings.index(times[-1]) < reading
