"""Scheduled verification: the step curve, and Algorithm 1 with its early stop."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from itertools import accumulate, product
from operator import mul
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from dspark.decode.sampling import draw
from dspark.decode.schedule import (
    StepCurve,
    fit_curve,
    measure_steps,
    read_curve,
    schedule,
    write_curve,
)
from dspark.decode.verify import accept_sampled
from dspark.errors import UserError

# Few values, so that ties, certain tokens and hopeless ones are common; and any value at all.
CHANCES = st.one_of(st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.floats(0, 1))
IDENTITY = {"device": "cpu", "threads": 2, "k": 3, "models": ("a1", "b2"), "rate": 0.1}


def confidences(rows: int, width: int) -> st.SearchStrategy[Tensor]:
    row = st.lists(CHANCES, min_size=width, max_size=width)
    return st.lists(row, min_size=rows, max_size=rows).map(
        lambda values: torch.tensor(values, dtype=torch.float64)
    )


@st.composite
def pools(draw_: st.DrawFn, rows: int = 4, width: int = 5) -> Tensor:
    return draw_(confidences(draw_(st.integers(1, rows)), draw_(st.integers(1, width))))


@st.composite
def curves(draw_: st.DrawFn) -> StepCurve:
    """Speed that falls with the tokens: in slopes, in stairs, measured at some counts alone."""
    tokens = sorted(draw_(st.sets(st.integers(1, 26), min_size=1, max_size=12)))
    rise = st.one_of(st.just(0.0), st.floats(0, 0.05), st.floats(0, 2))
    rises = draw_(st.lists(rise, min_size=len(tokens) - 1, max_size=len(tokens) - 1))
    return fit_curve(tokens, list(accumulate(rises, initial=draw_(st.floats(0.01, 2)))))


def survivals(confidence: Tensor) -> list[list[float]]:
    return [list(accumulate(row, mul)) for row in confidence.tolist()]


def literal_schedule(confidence: Tensor, curve: StepCurve) -> list[int]:
    """Algorithm 1 as the paper prints it, one candidate after another."""
    candidates = [
        (-a, j, r)
        for r, row in enumerate(survivals(confidence))
        for j, a in enumerate(row, start=1)
        if a > 0
    ]
    limits = [0] * len(confidence)
    count, expected = len(confidence), float(len(confidence))
    best = expected * curve.steps_per_second(count)
    for minus_a, j, r in sorted(candidates):
        count, expected = count + 1, expected - minus_a
        rate = expected * curve.steps_per_second(count)
        if rate <= best:
            break
        best, limits[r] = rate, j
    return limits


def argmax_schedule(confidence: Tensor, curve: StepCurve) -> list[int]:
    """The best prefixes of all, over every combination: what the early stop gives up."""
    kept = [[1.0, *row] for row in survivals(confidence)]
    every = map(list, product(range(confidence.shape[1] + 1), repeat=len(kept)))
    return max(every, key=lambda limits: rate_of(limits, kept, curve))


def rate_of(limits: Sequence[int], kept: list[list[float]], curve: StepCurve) -> float:
    expected = sum(sum(row[: n + 1]) for row, n in zip(kept, limits, strict=True))
    return expected * curve.steps_per_second(len(kept) + sum(limits))


# Algorithm 1


@settings(deadline=None, max_examples=150)
@given(confidence=pools(), curve=curves())
def test_limits_equal_those_of_the_literal_algorithm(confidence: Tensor, curve: StepCurve) -> None:
    limits = schedule(confidence, curve)
    assert limits.dtype == torch.int64
    assert limits.tolist() == literal_schedule(confidence, curve)
    assert all(0 <= limit <= confidence.shape[1] for limit in limits.tolist())


@settings(deadline=None, max_examples=60)
@given(data=st.data(), rows=st.integers(1, 3), width=st.integers(1, 3))
def test_the_early_stop_finds_the_best_of_all_where_the_rate_has_one_peak(
    data: st.DataObject, rows: int, width: int
) -> None:
    """Seconds that rise ever faster make tau / seconds rise and then fall."""
    confidence = data.draw(confidences(rows, width))
    size = rows * (width + 1)
    rises = sorted(data.draw(st.lists(st.floats(0, 1), min_size=size - 1, max_size=size - 1)))
    first = data.draw(st.floats(0.05, 2))
    curve = fit_curve(range(1, size + 1), list(accumulate(rises, initial=first)))
    kept = [[1.0, *row] for row in survivals(confidence)]
    found = rate_of(schedule(confidence, curve).tolist(), kept, curve)
    best = rate_of(argmax_schedule(confidence, curve), kept, curve)
    assert found == pytest.approx(best, rel=1e-9)


def test_the_first_drop_ends_the_search_though_a_later_candidate_would_pay() -> None:
    confidence = torch.tensor([[1.0, 1.0, 1.0]])
    stairs = fit_curve([1, 2, 3, 4], [1.0, 2.5, 2.5, 2.5])  # rates 1, .8, 1.2, 1.6
    assert schedule(confidence, stairs).tolist() == [0]
    assert argmax_schedule(confidence, stairs) == [3]


def test_a_rate_that_stays_equal_ends_the_search() -> None:
    assert schedule(torch.ones(1, 2), fit_curve([1, 2, 3], [1.0, 2.0, 2.0])).tolist() == [0]


@settings(deadline=None, max_examples=60)
@given(data=st.data(), rows=st.integers(1, 4), width=st.integers(1, 5))
def test_tokens_that_cost_nothing_are_all_verified(
    data: st.DataObject, rows: int, width: int
) -> None:
    chance = st.floats(0.01, 1)
    block = st.lists(chance, min_size=width, max_size=width)
    confidence = torch.tensor(data.draw(st.lists(block, min_size=rows, max_size=rows)))
    assert schedule(confidence, fit_curve([1], [0.5])).tolist() == [width] * rows


@settings(deadline=None, max_examples=60)
@given(confidence=pools())
def test_nothing_is_verified_where_a_token_costs_more_than_a_step(confidence: Tensor) -> None:
    rows = len(confidence)
    steep = fit_curve([rows, rows + 1, rows + 2], [1.0, 9.0, 99.0])
    assert schedule(confidence, steep).tolist() == [0] * rows


@settings(deadline=None, max_examples=60)
@given(confidence=pools(), curve=curves(), data=st.data())
def test_nothing_is_verified_from_a_hopeless_token_on(
    confidence: Tensor, curve: StepCurve, data: st.DataObject
) -> None:
    row = data.draw(st.integers(0, confidence.shape[0] - 1))
    position = data.draw(st.integers(0, confidence.shape[1] - 1))
    confidence[row, position] = 0
    assert schedule(confidence, curve)[row] <= position


def test_of_equals_the_earlier_position_goes_first_and_then_the_earlier_row() -> None:
    confidence = torch.ones(2, 2)
    for cheap, limits in enumerate([[0, 0], [1, 0], [1, 1], [2, 1], [2, 2]]):
        seconds = [1.0] * (cheap + 1) + [9.0] * (4 - cheap)
        assert schedule(confidence, fit_curve(range(2, 7), seconds)).tolist() == limits


def test_the_surer_row_gets_the_tokens() -> None:
    """Survivals .9, .81 and .5, .45: the third candidate costs more than it brings."""
    confidence = torch.tensor([[0.5, 0.9], [0.9, 0.9]])
    assert schedule(confidence, fit_curve([4, 5], [1.0, 2.0])).tolist() == [0, 2]


@settings(deadline=None, max_examples=150)
@given(confidence=pools(), curve=curves(), data=st.data())
def test_a_decision_reads_no_later_confidence(
    confidence: Tensor, curve: StepCurve, data: st.DataObject
) -> None:
    """Whether (row, position) is verified must not depend on what comes after it in its row."""
    rows, width = confidence.shape
    row, position = data.draw(st.integers(0, rows - 1)), data.draw(st.integers(0, width - 1))
    other = confidence.clone()
    later = width - position - 1
    other[row, position + 1 :] = torch.tensor(
        data.draw(st.lists(CHANCES, min_size=later, max_size=later)), dtype=torch.float64
    )
    before, after = schedule(confidence, curve), schedule(other, curve)
    assert bool(before[row] > position) == bool(after[row] > position)


def test_scheduling_asks_the_device_for_no_value() -> None:
    """Tensors without data: reading one, or mixing devices, would raise."""
    limits = schedule(torch.empty(3, 4, device="meta"), fit_curve([1, 8], [1.0, 2.0]))
    assert (limits.shape, limits.dtype, limits.device.type) == ((3,), torch.int64, "meta")


@pytest.mark.parametrize(("saved", "limit"), [(4e-8, 0), (8e-8, 1)])
def test_float32_confidences_are_counted_in_float64(saved: float, limit: int) -> None:
    """A token that is expected 6e-8 short of surely pays if it saves more; float32 sees 1 + 1."""
    confidence = torch.nextafter(torch.ones(1, 1), torch.zeros(1, 1))
    assert schedule(confidence, fit_curve([1, 2], [1.0, 2.0 - saved])).tolist() == [limit]


# Appendix A: choosing the best of all by confidences that hang on the tokens themselves is biased.

TRIALS = 200_000
P, Q = torch.tensor([0.7, 0.3]), torch.tensor([0.5, 0.5])  # target and draft; token 0 is A
APPENDIX_A = fit_curve([1, 2, 3], [1.0, 2.0, 1 / 0.45])
AFTER_A, AFTER_B = [0.8, 0.9], [0.8, 0.0]


def decode(scheduler: Callable[[Tensor], int], seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """TRIALS steps of one row, 2 drafted: drafted tokens, accepted counts, next tokens."""
    generator = torch.Generator().manual_seed(seed)
    draft, target = Q.expand(TRIALS, 2, -1), P.expand(TRIALS, 3, -1)
    drafted = draw(draft, torch.rand(TRIALS, 2, generator=generator))
    by_first_token = torch.tensor([scheduler(torch.tensor([c])) for c in (AFTER_A, AFTER_B)])
    limits = by_first_token[drafted[:, 0]]
    uniforms = torch.rand(TRIALS, 3, generator=generator)
    return drafted, *accept_sampled(target, draft, drafted, limits, uniforms)


def share_of_a(tokens: Tensor) -> tuple[int, int]:
    return int((tokens == 0).sum()), len(tokens)


def first_output(drafted: Tensor, accepted: Tensor, following: Tensor) -> Tensor:
    return torch.where(accepted > 0, drafted[:, 0], following)


def test_appendix_a_the_early_stop_keeps_the_targets_distribution() -> None:
    tokens = first_output(*decode(lambda confidence: int(schedule(confidence, APPENDIX_A))))
    count, total = share_of_a(tokens)
    assert count / total == pytest.approx(0.70, abs=0.004)  # four standard deviations
    assert stats.binomtest(count, total, 0.70).pvalue > 1e-3


def test_appendix_a_the_global_argmax_is_biased_and_this_test_sees_it() -> None:
    tokens = first_output(*decode(lambda confidence: argmax_schedule(confidence, APPENDIX_A)[0]))
    count, total = share_of_a(tokens)
    assert count / total == pytest.approx(0.85, abs=0.004)
    assert stats.binomtest(count, total, 0.70).pvalue < 1e-9


def test_limits_that_hang_on_the_drafted_tokens_keep_the_targets_distribution() -> None:
    """Where drafts pay, the second is verified after A alone; both outputs must still be p's."""
    curve = fit_curve([1, 2, 3], [1.0, 1 / 0.9, 1 / 0.7])
    assert [int(schedule(torch.tensor([c]), curve)) for c in (AFTER_A, AFTER_B)] == [2, 1]
    drafted, accepted, following = decode(lambda confidence: int(schedule(confidence, curve)))
    first = first_output(drafted, accepted, following)
    second = torch.where(accepted > 1, drafted[:, 1], following)
    assert stats.binomtest(*share_of_a(first), 0.70).pvalue > 1e-3
    for token in (0, 1):
        reached = (accepted > 0) & (first == token)
        assert stats.binomtest(*share_of_a(second[reached]), 0.70).pvalue > 1e-3


# The step curve

RISING = st.lists(st.floats(0.001, 10), min_size=1, max_size=10).map(sorted)


@settings(deadline=None, max_examples=30)
@given(seconds=st.lists(st.floats(0.001, 10), min_size=1, max_size=10))
def test_fitted_times_never_fall_and_keep_the_mean(seconds: list[float]) -> None:
    curve = fit_curve(range(1, len(seconds) + 1), seconds)
    assert curve.seconds == seconds
    assert curve.fitted == sorted(curve.fitted)
    assert sum(curve.fitted) == pytest.approx(sum(seconds))


def test_neighbours_that_disagree_get_their_mean() -> None:
    assert fit_curve([1, 2, 4, 8], [1.0, 3.0, 2.0, 5.0]).fitted == [1.0, 2.5, 2.5, 5.0]


@settings(deadline=None, max_examples=30)
@given(seconds=RISING, data=st.data())
def test_rising_times_are_kept_exactly(seconds: list[float], data: st.DataObject) -> None:
    size = len(seconds)
    tokens = sorted(data.draw(st.sets(st.integers(1, 300), min_size=size, max_size=size)))
    curve = fit_curve(tokens, seconds)
    assert curve.fitted == seconds
    assert [curve.steps_per_second(count) for count in tokens] == [1 / value for value in seconds]


@settings(deadline=None, max_examples=30)
@given(curve=curves())
def test_seconds_are_interpolated_between_points(curve: StepCurve) -> None:
    inside = torch.arange(curve.tokens[0], curve.tokens[-1] + 1)
    expected = np.interp(inside.numpy(), curve.tokens, curve.fitted)
    assert (1 / curve.steps_per_second(inside)).tolist() == pytest.approx(expected.tolist())


def test_beyond_the_points_the_curve_is_flat_before_and_goes_on_after() -> None:
    curve = fit_curve([2, 4, 8], [1.0, 2.0, 4.0])
    assert curve.steps_per_second(1) == 1.0
    assert curve.steps_per_second(16) == pytest.approx(1 / 8)
    alone = fit_curve([4], [2.0])
    assert [alone.steps_per_second(count) for count in (1, 4, 99)] == [0.5] * 3


def test_a_curve_whose_end_is_noise_is_not_extrapolated_to_less_time() -> None:
    curve = fit_curve([1, 2, 3], [1.0, 3.0, 2.0])
    assert curve.steps_per_second(1000) == pytest.approx(1 / 2.5)


def test_a_tensor_of_counts_gives_the_same_as_each_count() -> None:
    curve = fit_curve([2, 4, 8], [1.0, 2.0, 4.0])
    counts = torch.tensor([[1, 3, 4], [7, 8, 30]])
    rates = curve.steps_per_second(counts)
    assert (rates.shape, rates.dtype) == (counts.shape, torch.float64)
    assert rates.flatten().tolist() == [curve.steps_per_second(n) for n in [1, 3, 4, 7, 8, 30]]


@pytest.mark.parametrize(
    ("tokens", "seconds", "message"),
    [
        ([], [], "no points"),
        ([1, 2], [1.0], "2 token counts but 1 times"),
        ([2, 1], [1.0, 2.0], "ascending"),
        ([1, 1], [1.0, 2.0], "ascending"),
        ([0, 1], [1.0, 2.0], "from 1"),
        ([1, 2], [1.0, 0.0], "a step of 2 tokens took 0.0 s"),
        ([1, 2], [-1.0, 1.0], "a step of 1 tokens took -1.0 s"),
        ([1, 2], [1.0, float("nan")], "took nan s"),
        ([1, 2], [1.0, float("inf")], "took inf s"),
    ],
    ids=["empty", "unequal", "falling", "twice", "zero", "no-time", "negative", "nan", "inf"],
)
def test_points_that_make_no_curve_are_refused(
    tokens: list[int], seconds: list[float], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        fit_curve(tokens, seconds)


def test_fitted_times_that_fall_are_refused() -> None:
    with pytest.raises(UserError, match="fit_curve"):
        StepCurve([1, 2], [2.0, 1.0], [2.0, 1.0])


# Stored curves


@pytest.mark.parametrize("plain", [None, fit_curve([1, 4], [0.1, 0.2])], ids=["alone", "plain"])
def test_a_stored_curve_comes_back(tmp_path: Path, plain: StepCurve | None) -> None:
    curve = fit_curve([1, 2, 4], [0.1, 0.3, 0.2], plain)
    path = tmp_path / "new" / "curve.json"
    write_curve(path, curve, IDENTITY)
    assert read_curve(path, IDENTITY) == curve
    assert json.loads(path.read_text())["identity"]["device"] == "cpu"


@pytest.mark.parametrize(
    "other",
    [
        IDENTITY | {"threads": 4},
        IDENTITY | {"more": 1},
        {name: IDENTITY[name] for name in IDENTITY if name != "k"},
    ],
    ids=["changed", "added", "missing"],
)
def test_a_curve_of_another_identity_is_not_used(tmp_path: Path, other: dict[str, object]) -> None:
    path = tmp_path / "curve.json"
    write_curve(path, fit_curve([1, 2], [0.1, 0.2]), IDENTITY)
    assert read_curve(path, other) is None


BROKEN: dict[str, Callable[[str], str]] = {
    "empty": lambda _text: "",
    "half": lambda text: text[: len(text) // 2],
    "list": lambda _text: "[1, 2]",
    "no-identity": lambda text: text.replace('"identity"', '"else"'),
    "no-times": lambda text: text.replace('"fitted"', '"else"'),
    "no-plain": lambda text: text.replace('"plain"', '"else"'),
    "plain-number": lambda text: json.dumps(json.loads(text) | {"plain": 3}),
    "plain-no-times": lambda text: json.dumps(json.loads(text) | {"plain": {"tokens": [1]}}),
    "null-tokens": lambda text: json.dumps(json.loads(text) | {"tokens": None}),
    "words": lambda text: json.dumps(json.loads(text) | {"seconds": ["fast", "slow"]}),
    "lengths": lambda text: json.dumps(json.loads(text) | {"tokens": [1]}),
    "falling": lambda text: json.dumps(json.loads(text) | {"fitted": [0.2, 0.1]}),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_curve_is_not_used(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "curve.json"
    write_curve(path, fit_curve([1, 2], [0.1, 0.2]), IDENTITY)
    path.write_text(BROKEN[kind](path.read_text()))
    assert read_curve(path, IDENTITY) is None


def test_an_absent_or_undecodable_curve_is_not_used(tmp_path: Path) -> None:
    assert read_curve(tmp_path / "absent.json", IDENTITY) is None
    assert read_curve(tmp_path, IDENTITY) is None  # a directory
    (tmp_path / "bytes.json").write_bytes(b"\xff\xfe\x00")
    assert read_curve(tmp_path / "bytes.json", IDENTITY) is None


# Measuring


def test_sizes_are_timed_in_turns_and_the_median_is_taken() -> None:
    calls: list[int] = []

    def time_step(tokens: int) -> float:
        calls.append(tokens)
        spike = 100.0 if len(calls) <= 3 else 0.0  # a slow first round
        return tokens + spike + 0.01 * len(calls)

    seconds = measure_steps(time_step, [8, 1, 4, 1], rounds=3)
    assert calls == [1, 4, 8] * 3
    assert list(seconds) == [1, 4, 8]
    assert seconds == pytest.approx({1: 1 + 0.07, 4: 4 + 0.08, 8: 8 + 0.09})


def test_drift_does_not_make_a_larger_step_look_slower() -> None:
    """All sizes cost the same on a machine that slows down as it runs."""
    clock = iter(range(1000))
    taken = measure_steps(lambda _tokens: 1 + 0.01 * next(clock), [1, 2, 3, 4], rounds=9)
    assert (
        max(taken.values()) - min(taken.values()) < 0.05
    )  # one round's drift; size after size it were .27


def test_no_rounds_are_refused() -> None:
    with pytest.raises(UserError, match="rounds is 0"):
        measure_steps(lambda _tokens: 1.0, [1], rounds=0)


def test_a_curves_points_are_plain_columns_after_use() -> None:
    """They go into result files as they are, so nothing that is kept for speed is among them."""
    curve = fit_curve([1, 2, 4], [0.1, 0.3, 0.2])
    curve.steps_per_second(3)
    assert curve.points() == {
        "tokens": [1, 2, 4],
        "seconds": [0.1, 0.3, 0.2],
        "fitted": pytest.approx([0.1, 0.25, 0.25]),
        "plain": None,
    }
    json.dumps(curve.points())
