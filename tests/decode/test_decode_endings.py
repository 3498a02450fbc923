"""How a request ends: EOS, stop strings, its budget; and requests that cannot be served.

The target counts upwards, so the prompt [10] is answered with 11, 12, 13, ... and it is plain to see
where in a block an end lies: 11 comes from the prefill, 12 is the first draft token.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
from decode_helpers import (
    alone,
    counting_target,
    drafting,
    make_bigram_drafter,
    make_drafter,
    make_target,
    need,
    request,
    serve,
)

from dspark.decode.engine import Engine, Request, Row
from dspark.errors import UserError
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target

VOCAB = 64
LETTERS = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ+-"  # id to text: one each


@cache
def counting() -> tuple[Target, DSparkDrafter]:
    target = counting_target(VOCAB)
    return target, make_drafter(target, layers=1)


def spell(ids: Sequence[int]) -> str:
    return "".join(LETTERS[token] for token in ids)


def right(row: Row, k: int) -> list[int]:
    return [(row.newest + 1 + index) % VOCAB for index in range(k)]


def run(item: Request, k: int, propose: Any = right) -> Row:
    target, drafter = counting()
    engine = Engine(target, drafter, k=k, capacity=need([item]), detokenize=spell)
    with drafting(engine, propose):
        row = serve(engine, [item])[item.prompt_id]
    assert engine.free == 1
    return row


def upto(last: int) -> list[int]:
    return list(range(11, last + 1))


# ------------------------------------------------------------------------------------------- EOS


@pytest.mark.parametrize(("k", "place"), [(k, j) for k in (1, 3, 7) for j in range(k + 1)])
def test_eos_at_every_position_of_an_accepted_block(k: int, place: int) -> None:
    eos = 12 + place
    row = run(request("a", [10], 40, eos_ids=frozenset([eos])), k)
    assert row.output == upto(eos)
    assert row.finish_reason == "stop"
    step = row.steps[-1]
    assert (len(row.steps), step.verified, step.accepted) == (1, k, k)
    assert step.emitted == place + 1
    assert step.cut == (place < k)  # as the bonus token it ends a block that was emitted whole


@pytest.mark.parametrize("place", range(4))
def test_eos_in_the_second_block(place: int) -> None:
    eos = 16 + place
    row = run(request("a", [10], 40, eos_ids=frozenset([eos])), 3)
    assert row.output == upto(eos)
    assert [step.emitted for step in row.steps] == [4, place + 1]


def test_eos_as_the_very_first_token() -> None:
    row = run(request("a", [10], 40, eos_ids=frozenset([11])), 3)
    assert (row.output, row.finish_reason, row.steps) == ([11], "stop", [])


def test_the_first_of_several_eos_ids_ends_the_request() -> None:
    row = run(request("a", [10], 40, eos_ids=frozenset([15, 13])), 7)
    assert row.output == upto(13)


@pytest.mark.parametrize("place", range(4))
def test_drafted_eos_that_is_rejected_does_not_end_the_request(place: int) -> None:
    def propose(row: Row, k: int) -> list[int]:
        block = right(row, k)
        if not row.steps:
            block[place] = 50
        return block

    row = run(request("a", [10], 20, eos_ids=frozenset([50])), 4, propose)
    assert row.output == upto(30)
    assert row.finish_reason == "length"
    assert row.steps[0].accepted == place


def test_eos_that_follows_a_rejection_ends_the_request() -> None:
    row = run(request("a", [10], 20, eos_ids=frozenset([12])), 4, lambda row, k: [0] * k)
    assert (row.output, row.finish_reason) == ([11, 12], "stop")
    assert (row.steps[0].accepted, row.steps[0].emitted, row.steps[0].cut) == (0, 1, False)


def test_without_eos_ids_eos_is_a_token_like_others() -> None:
    row = run(request("a", [10], 30), 3)
    assert (row.output, row.finish_reason) == (upto(40), "length")


def test_eos_in_the_prompt_ends_nothing() -> None:
    row = run(request("a", [50, 50, 10], 5, eos_ids=frozenset([50])), 3)
    assert row.output == upto(15)


@pytest.mark.parametrize("place", range(4))
def test_eos_as_the_last_token_of_the_budget_counts_as_stop(place: int) -> None:
    row = run(request("a", [10], 2 + place, eos_ids=frozenset([12 + place])), 3)
    assert (row.output, row.finish_reason) == (upto(12 + place), "stop")


def test_budget_that_ends_before_eos_in_the_same_block_counts_as_length() -> None:
    row = run(request("a", [10], 3, eos_ids=frozenset([14])), 5)
    assert (row.output, row.finish_reason) == (upto(13), "length")


# ---------------------------------------------------------------------------------------- budget


@pytest.mark.parametrize(("k", "new"), [(k, n) for k in (0, 1, 2, 3, 7) for n in range(1, k + 3)])
def test_budget_is_met_exactly(k: int, new: int) -> None:
    row = run(request("a", [10], new), k)
    assert (row.output, row.finish_reason) == (upto(10 + new), "length")
    assert sum(step.emitted for step in row.steps) == new - 1
    left = new - 1
    for step in row.steps:
        assert step.cut == (left < k + 1)
        left -= step.emitted


def test_budget_that_a_whole_block_fills_is_no_cut() -> None:
    row = run(request("a", [10], 5), 3)
    assert [(step.emitted, step.cut) for step in row.steps] == [(4, False)]


def test_rejection_inside_a_step_near_the_budget_is_still_a_cut_step() -> None:
    """Fewer than verified + 1 tokens were left: not all that was verified could have counted."""
    row = run(request("a", [10], 4), 3, lambda row, k: [0] * k)
    assert [(step.emitted, step.accepted, step.cut) for step in row.steps] == [
        (1, 0, True),
        (1, 0, True),
        (1, 0, True),
    ]


# ---------------------------------------------------------------------------------- stop strings


@pytest.mark.parametrize(
    ("width", "last"), [(width, last) for width in (1, 2, 3) for last in range(10 + width, 24)]
)
def test_stop_string_wherever_it_lies(width: int, last: int) -> None:
    """With k = 3 the texts end in the prefill, at a block's start, in its middle, at its end, and
    the wider ones begin in one block and end in the next."""
    text = spell(range(last - width + 1, last + 1))
    row = run(request("a", [10], 40, stop=(text,)), 3)
    assert row.output == upto(last)
    assert row.finish_reason == "stop"
    assert spell(row.output).endswith(text)
    assert 1 + sum(step.emitted for step in row.steps) == len(row.output)


@pytest.mark.parametrize("stops", [(14, 16), (16, 14)])
def test_of_two_stop_strings_in_one_block_the_earliest_in_the_text_wins(
    stops: tuple[int, int],
) -> None:
    row = run(request("a", [10], 40, stop=tuple(LETTERS[s] for s in stops)), 7)
    assert row.output == upto(14)


def test_stop_string_that_begins_first_but_ends_later_loses() -> None:
    row = run(request("a", [10], 40, stop=(spell(range(12, 18)), spell([14]))), 7)
    assert row.output == upto(14)


def test_stop_string_in_the_prompt_or_across_its_end_ends_nothing() -> None:
    row = run(request("a", [9, 10], 6, stop=(spell([9]), spell([10, 11]))), 3)
    assert (row.output, row.finish_reason) == (upto(16), "length")


def test_stop_string_in_rejected_tokens_ends_nothing() -> None:
    row = run(request("a", [10], 12, stop=("ZZ",)), 4, lambda row, k: [LETTERS.index("Z")] * k)
    assert (row.output, row.finish_reason) == (upto(22), "length")


def test_stop_string_at_the_last_token_of_the_budget_counts_as_stop() -> None:
    row = run(request("a", [10], 4, stop=(spell([13, 14]),)), 7)
    assert (row.output, row.finish_reason) == (upto(14), "stop")


def test_stop_string_and_eos_in_one_block_the_first_of_them_wins() -> None:
    for eos, stop, end in ((14, 13, 13), (13, 14, 13)):
        item = request("a", [10], 40, eos_ids=frozenset([eos]), stop=(spell([stop]),))
        assert run(item, 7).output == upto(end)


def test_text_is_judged_as_a_whole_not_token_by_token() -> None:
    """Some tokens mean nothing alone: here only the joined text holds the stop string."""
    target, drafter = counting()
    engine = Engine(target, drafter, k=3, capacity=50, detokenize=lambda ids: "." * (len(ids) // 2))
    item = request("a", [10], 40, stop=("...",))
    with drafting(engine, right):
        assert serve(engine, [item])["a"].output == upto(16)


# -------------------------------------------------------------------------- what cannot be served


def test_a_prompt_without_tokens_is_refused_by_name() -> None:
    engine = Engine(counting()[0], capacity=10)
    with pytest.raises(UserError, match="'empty' turn 0 has no tokens"):
        engine.admit(request("empty", [], 4), 0.0)
    assert engine.free == 1
    assert serve(engine, [request("a", [10], 4)])["a"].output == upto(14)


def test_a_request_for_no_tokens_is_refused() -> None:
    engine = Engine(counting()[0], capacity=10)
    with pytest.raises(UserError, match="max_new_tokens is 0"):
        engine.admit(request("a", [10], 0), 0.0)
    assert engine.free == 1


@pytest.mark.parametrize("length", [1, 2])
@pytest.mark.parametrize("k", [0, 1, 7])
def test_the_shortest_prompts(length: int, k: int) -> None:
    target = make_target(embed=20)
    drafter = make_bigram_drafter(target)
    item = request("a", [7, 9][:length], 25)
    assert alone(target, item, drafter if k else None, k).output == alone(target, item).output


@pytest.mark.parametrize("k", [0, 3, 7])
def test_capacity_is_exact(k: int) -> None:
    target, drafter = counting()
    engine = Engine(target, drafter, k=k, capacity=12)
    assert serve(engine, [request("a", range(3, 11), 4)])["a"].output == upto(14)
    with pytest.raises(UserError, match=r"'b' turn 0 has 9 tokens .* grow by 4, .* 12 positions"):
        engine.admit(request("b", range(2, 11), 4), 0.0)
    with pytest.raises(UserError, match="12 positions"):
        engine.admit(request("c", range(3, 11), 5), 0.0)
    assert engine.free == 1
    assert serve(engine, [request("d", [10], 11)])["d"].output == upto(21)


@pytest.mark.parametrize("k", [0, 1, 7])
def test_text_may_fill_the_models_context_to_the_last_position(k: int) -> None:
    """Blocks and verification reach past the context's end; the text must not suffer."""
    target = make_target(embed=20, max_position_embeddings=32)
    drafter = make_bigram_drafter(target)
    roomy = make_target(embed=20, max_position_embeddings=512)
    item = request("a", range(10), 22)
    engine = Engine(target, drafter if k else None, k=k, capacity=32)
    row = serve(engine, [item])["a"]
    assert row.output == alone(roomy, item).output
    assert len(row.output) == 22


def test_more_than_the_models_context_is_refused() -> None:
    target = counting_target(VOCAB, max_position_embeddings=32)
    Engine(target, capacity=32)
    with pytest.raises(UserError, match="need 33 positions but the target's context is 32"):
        Engine(target, capacity=33)


def test_drafting_without_a_drafter_is_refused() -> None:
    with pytest.raises(UserError, match="k is 2 but there is no drafter"):
        Engine(counting()[0], k=2, capacity=10)


def test_more_drafts_than_the_block_holds_are_refused() -> None:
    target, drafter = counting()
    Engine(target, drafter, k=7, capacity=10)
    with pytest.raises(UserError, match="k is 8 but the drafter's block_size is 7"):
        Engine(target, drafter, k=8, capacity=10)
