"""Token-by-token comparison of arms."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.errors import UserError
from dspark.metrics.lossless import (
    Difference,
    compare_arms,
    first_difference,
    judge,
    require_lossless,
)

IDS = st.lists(st.integers(0, 3), max_size=6)


@settings(deadline=None)
@given(a=IDS, b=IDS)
def test_first_difference(a: list[int], b: list[int]) -> None:
    position = first_difference(a, b)
    if a == b:
        assert position is None
        return
    assert position is not None
    assert a[:position] == b[:position]
    assert a[position : position + 1] != b[position : position + 1]


def test_differences_name_position_and_tokens(record) -> None:
    baseline = [
        record(prompt_id=f"p{i}", run="baseline", ids=ids)
        for i, ids in enumerate([[1, 2, 3], [1, 2, 3], [1, 2], [5]])
    ]
    arm = [
        record(prompt_id=f"p{i}", ids=ids)
        for i, ids in enumerate([[1, 2, 3], [1, 9, 3], [1, 2, 7], [5]])
    ]
    assert compare_arms(baseline, arm[::-1]) == [
        Difference("p1#0", 1, 2, 9),
        Difference("p2#0", 2, None, 7),
    ]


def test_later_turn_inherits_its_own_earlier_difference(record) -> None:
    def arm(run: str, answers: list[tuple[str, int, list[int]]]):
        return [record(prompt_id=p, turn=t, run=run, ids=ids) for p, t, ids in answers]

    baseline = arm("baseline", [("a", 1, [4]), ("a", 0, [1]), ("b", 0, [2]), ("b", 1, [3])])
    other = arm("dspark_k3", [("a", 0, [0]), ("a", 1, [5]), ("b", 0, [2]), ("b", 1, [9])])
    found = compare_arms(baseline, other, model_history=True)
    assert [(d.request_id, d.inherited) for d in found] == [
        ("a#1", True),
        ("a#0", False),
        ("b#1", False),
    ]
    assert not any(d.inherited for d in compare_arms(baseline, other))


def test_other_requests_are_refused(record) -> None:
    with pytest.raises(UserError, match="only one"):
        compare_arms([record(prompt_id="a")], [record(prompt_id="b")])


@pytest.mark.parametrize(
    ("margins", "verdict", "ties"),
    [
        ([], "identical", 0),
        ([1e-4], "ties", 1),
        ([0.0, 1e-5], "ties", 2),
        ([1e-5, 2e-4], "differs", 1),
        ([None], "differs", 0),
    ],
)
def test_verdict(margins: list[float | None], verdict: str, ties: int) -> None:
    differences = [Difference(f"p{i}#0", 3, 1, 2, m) for i, m in enumerate(margins)]
    found = judge(differences, compared=8, precision="float32")
    assert (found["verdict"], found["ties"]) == (verdict, ties)
    assert (found["compared"], found["identical"]) == (8, 8 - len(margins))
    assert found["max_margin"] == max((m for m in margins if m is not None), default=None)
    if verdict == "differs":
        with pytest.raises(UserError, match="mbpp/dspark_k7: output differs"):
            require_lossless(found, "mbpp", "dspark_k7")
    else:
        require_lossless(found, "mbpp", "dspark_k7")


def test_the_worst_difference_is_named() -> None:
    differences = [Difference("p1#0", 3, 1, 2, 0.01), Difference("p2#0", 5, 6, None, 0.5)]
    found = judge(differences, 2, "float32")
    with pytest.raises(UserError, match=r"2 of 2 requests, worst in 'p2#0' at token 5.*0\.5"):
        require_lossless(found, "mbpp", "dspark_k7")


def test_bfloat16_is_reported_only() -> None:
    found = judge([Difference("p1#0", 3, 1, 2, 0.01)], 2, "bfloat16")
    assert found["verdict"] == "differs"
    require_lossless(found, "mbpp", "dspark_k7")


def test_inherited_differences_decide_nothing() -> None:
    differences = [
        Difference("p#0", 3, 1, 2, 1e-6),
        Difference("p#1", 0, 1, 2, None, inherited=True),
    ]
    found = judge(differences, 4, "float32")
    assert (found["verdict"], found["ties"], found["inherited"], found["identical"]) == (
        "ties",
        1,
        1,
        2,
    )


def test_sampled_outputs_are_not_compared() -> None:
    found = judge([Difference("p#0", 0, 1, 2)], 4, "float32", temperature=0.7)
    assert (found["verdict"], found["compared"], found["differences"]) == ("sampled", 0, [])
    require_lossless(found, "mbpp", "dspark_k7")
