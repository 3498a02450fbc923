"""Steps without a draft: when they are taken, and that the text stays the target's."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from decode_helpers import (
    alone,
    make_bigram_drafter,
    make_target,
    need,
    outputs,
    request,
    serve,
)
from hypothesis import given
from hypothesis import strategies as st

from dspark.decode.engine import Engine, Request
from dspark.decode.pause import LONGEST, Pause, promise
from dspark.decode.schedule import StepCurve, fit_curve, schedule

# A draft alone costs as much as a plain step; or next to nothing.
DEAR = fit_curve([1, 12], [2.0, 13.0], fit_curve([1, 3], [1.0, 1.0]))
CHEAP = fit_curve([1, 12], [1.01, 1.02], fit_curve([1, 3], [1.0, 1.0]))
RICH, POOR = torch.full((2, 3), 0.9), torch.full((2, 3), 0.05)


def after(pause: Pause, confidence: torch.Tensor) -> int:
    """Plain steps that follow a draft of this confidence."""
    pause.drafted(confidence, schedule(confidence, pause.curve))
    count = 0
    while pause.skips(confidence.shape[0]):
        count += 1
    return count


def test_a_promise_is_the_ratio_of_expected_rates() -> None:
    confidence = torch.tensor([[0.5, 0.5], [0.25, 0.9]])
    curve = fit_curve([2, 6], [1.0, 3.0], fit_curve([2], [0.8]))
    # Row 0 verifies 2 and row 1 none: 2 + .5 + .25 tokens from a step of 4 tokens, 2.0 s.
    assert promise(confidence, torch.tensor([2, 0]), curve) == pytest.approx(
        (2.75 / 2.0) / (2 / 0.8)
    )


@given(st.lists(st.lists(st.floats(0, 1), min_size=3, max_size=3), min_size=1, max_size=4))
def test_a_draft_that_costs_nothing_never_promises_less_than_a_plain_step(
    confidence: list[list[float]],
) -> None:
    free = fit_curve([1, 16], [1.0, 5.0], fit_curve([1, 16], [1.0, 5.0]))
    given_ = torch.tensor(confidence)
    assert promise(given_, schedule(given_, free), free) >= 1 - 1e-9


def test_pauses_double_up_to_the_longest_and_end_where_drafting_pays() -> None:
    pause = Pause(DEAR)
    assert [after(pause, POOR) for _ in range(8)] == [1, 2, 4, 8, 16, LONGEST, LONGEST, LONGEST]
    pause = Pause(CHEAP)
    assert [after(pause, RICH) for _ in range(3)] == [0, 0, 0]


def test_one_poor_draft_among_good_ones_is_no_reason_to_pause() -> None:
    pause = Pause(CHEAP)
    assert [after(pause, c) for c in (RICH, RICH, POOR, RICH)] == [0, 0, 0, 0]


def test_drafting_comes_back_when_it_pays_again() -> None:
    pause = Pause(CHEAP)
    assert after(pause, torch.zeros(2, 3)) == 1
    lengths = [after(pause, RICH) for _ in range(3)]
    assert lengths[-1] == 0


def test_each_number_of_rows_pauses_by_itself() -> None:
    pause = Pause(DEAR)
    pause.drafted(POOR, torch.tensor([0, 0]))
    assert not pause.skips(1)
    assert pause.skips(2)


def test_without_plain_steps_there_is_nothing_to_compare() -> None:
    with pytest.raises(AssertionError, match="plain"):
        promise(RICH, torch.tensor([1, 1]), fit_curve([1], [1.0]))


# ------------------------------------------------------------------------------- in the engine


def engine(curve: StepCurve | None, items: Sequence[Request], concurrency: int = 3) -> Engine:
    target = make_target(embed=20)
    drafter = make_bigram_drafter(target, layers=1)
    capacity = need(items)
    return Engine(target, drafter, k=3, concurrency=concurrency, capacity=capacity, curve=curve)


def test_paused_rows_say_the_same_and_draft_less() -> None:
    items = [request(n, [3 * n + 1, 5, 7], 24) for n in range(4)]
    target = make_target(embed=20)
    texts = {item.prompt_id: alone(target, item).output for item in items}
    rows = serve(engine(DEAR, items), items)
    assert outputs(rows) == texts
    steps = [step for row in rows.values() for step in row.steps]
    plain = [step for step in steps if step.drafted == 0]
    assert len(plain) > len(steps) / 2
    assert all(step.emitted == 1 and step.verified == 0 for step in plain)


def test_after_a_pause_the_draft_is_what_it_would_have_been() -> None:
    """The drafter's context is kept through plain steps."""
    item = request(0, [4, 9, 2], 30)
    whole = drafts_of(engine(None, [item], concurrency=1), item, every=1)
    paused = drafts_of(engine(None, [item], concurrency=1), item, every=4)
    both = whole.keys() & paused.keys()
    assert len(both) > 2
    assert all(whole[start] == paused[start] for start in both)


def drafts_of(one: Engine, item: Request, every: int) -> dict[int, list[int]]:
    """The draft tokens by the position they follow, when every so many steps draft."""
    drafts: dict[int, list[int]] = {}
    row = one.admit(item, 0.0)
    one.trace = lambda draft: drafts.update({row.start: draft.tokens[0].tolist()})
    turn = 0
    while row.finish_reason is None:
        turn += 1
        one.step(drafting=turn % every == 0)
    return drafts
