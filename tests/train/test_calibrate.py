"""Sequential temperature scaling on data whose true probabilities are known."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from dspark.errors import UserError
from dspark.models.calibration import apply_temperatures
from dspark.train.calibrate import (
    calibrate,
    calibration_errors,
    expected_calibration_error,
    fit_shifts,
    fit_temperatures,
)


def blocks(
    count: int, positions: int = 5, *, mean: float = 1.5, spread: float = 1.2, seed: int = 0
) -> tuple[Tensor, Tensor, Tensor]:
    """True logits, survival drawn from them, and that every slot is valid."""
    generator = torch.Generator().manual_seed(seed)
    logits = mean + spread * torch.randn(count, positions, generator=generator)
    accepted = torch.rand(count, positions, generator=generator) < logits.sigmoid()
    return logits, prefixes(accepted), torch.ones(count, positions, dtype=torch.bool)


def prefixes(accepted: Tensor) -> Tensor:
    return accepted.int().cumprod(1).bool()


def running(logits: Tensor, temperatures: list[float]) -> Tensor:
    return (logits.double() / torch.tensor(temperatures, dtype=torch.float64)).sigmoid().cumprod(1)


def errors(
    logits: Tensor, survived: Tensor, valid: Tensor, temperatures: list[float]
) -> list[float]:
    product = running(logits, temperatures)
    return [
        expected_calibration_error(product[rows, t], survived[rows, t])
        for t, rows in enumerate(valid.T)
    ]


# --------------------------------------------------------------------------- the error


def test_error_by_hand() -> None:
    probability = torch.tensor([0.12, 0.13, 0.97, 0.97])
    outcome = torch.tensor([False, True, True, True])
    # Two blocks in the bin 0.10..0.15: |0.125 - 0.5|; two in the last: |0.97 - 1|.
    expected = 0.5 * 0.375 + 0.5 * 0.03
    assert expected_calibration_error(probability, outcome) == pytest.approx(expected, abs=1e-7)


def test_certainty_belongs_to_the_last_bin() -> None:
    certain = torch.tensor([1.0, 0.96])
    # Were 1.0 in a bin of its own, the two errors could not cancel.
    assert expected_calibration_error(certain, torch.tensor([True, False])) == pytest.approx(0.48)


@given(
    st.lists(
        st.tuples(st.floats(0, 1), st.booleans()),
        min_size=1,
        max_size=60,
    )
)
def test_error_agrees_with_its_definition(pairs: list[tuple[float, bool]]) -> None:
    bins: dict[int, list[tuple[float, bool]]] = {}
    for p, y in pairs:
        bins.setdefault(min(int(p * 20), 19), []).append((p, y))
    expected = sum(
        len(members)
        / len(pairs)
        * abs(sum(p for p, _ in members) / len(members) - sum(y for _, y in members) / len(members))
        for members in bins.values()
    )
    probability = torch.tensor([p for p, _ in pairs], dtype=torch.float64)
    outcome = torch.tensor([y for _, y in pairs])
    assert expected_calibration_error(probability, outcome) == pytest.approx(expected, abs=1e-12)


# --------------------------------------------------------------------------- the temperatures


def test_overconfidence_is_mended_and_ranks_are_kept() -> None:
    logits, survived, valid = blocks(6000)
    unseen, outcome, known = blocks(20_000, seed=1)
    loud = 2.5 * logits
    fitted = calibrate(loud, survived, valid, 2.5 * unseen, outcome, known)
    assert fitted.temperatures == pytest.approx([2.5] * 5, rel=0.2)
    assert min(fitted.ece_before) > 0.08
    assert max(fitted.ece_after) < 0.02
    calm = apply_temperatures(loud.double(), fitted.temperatures, fitted.shifts)
    for tempered, raw in zip(calm.T, loud.T, strict=True):
        assert torch.equal(tempered.argsort(stable=True), raw.argsort(stable=True))


def test_a_confidence_that_is_too_high_everywhere_is_shifted() -> None:
    """What no temperature can mend: a head that has seen easier blocks than the decoder visits."""
    logits, survived, valid = blocks(6000)
    unseen, outcome, known = blocks(20_000, seed=1)
    fitted = calibrate(logits + 1.0, survived, valid, unseen + 1.0, outcome, known)
    assert fitted.shifts == pytest.approx([-1.0] * 5, abs=0.2)
    assert fitted.temperatures == pytest.approx([1.0] * 5, rel=0.2)
    assert max(fitted.ece_before[:2]) > 0.08 and max(fitted.ece_after) < 0.02


def test_the_errors_of_a_calibration_that_is_there_are_those_measured_when_it_was_made() -> None:
    unseen = blocks(4000, seed=1)
    fitted = calibrate(*blocks(3000), *unseen)
    after = calibration_errors(*unseen, fitted.temperatures, fitted.shifts)
    assert after == pytest.approx(fitted.ece_after, abs=1e-4)  # float32 logits
    assert calibration_errors(*unseen, [1.0] * 5) == pytest.approx(fitted.ece_before, abs=1e-4)


def test_shifts_make_mean_confidence_the_observed_share() -> None:
    logits, survived, valid = blocks(3000, 3)
    temperatures = [2.0, 1.0, 0.5]
    shifts = fit_shifts(logits, survived, valid, temperatures)
    confidence = apply_temperatures(logits.double(), temperatures, shifts).sigmoid()
    alive = torch.ones(len(logits), dtype=torch.bool)
    for t in range(3):
        assert confidence[alive, t].mean().item() == pytest.approx(
            survived[alive, t].double().mean().item(), abs=1e-4
        )
        alive = survived[:, t]
    everyone = torch.ones(5, 2, dtype=torch.bool)
    assert fit_shifts(torch.randn(5, 2), everyone, everyone, [1.0, 1.0]) == [0.0, 0.0]


def test_each_position_gets_its_own_temperature() -> None:
    logits, survived, valid = blocks(12_000, 4)
    true = [0.4, 3.0, 1.0, 2.0]
    fitted = fit_temperatures(logits * torch.tensor(true), survived, valid)
    assert fitted == pytest.approx(true, rel=0.15)


@pytest.mark.parametrize("mean", [0.0, 1.5])
def test_what_is_calibrated_stays_as_it_is(mean: float) -> None:
    data = blocks(16_000, 4, mean=mean)
    fitted = fit_temperatures(*data)
    assert fitted == pytest.approx([1.0] * 4, rel=0.15)
    for after, before in zip(errors(*data, fitted), errors(*data, [1.0] * 4), strict=True):
        assert after <= before + 0.002


def test_a_small_error_by_chance_does_not_flatten_an_informative_head() -> None:
    """Half of those alive survive: one half for each of them has a small error, and no use."""
    data = blocks(2000, 2, mean=0.0, spread=1.0)
    first, second = fit_temperatures(*data)
    trials = [2.0 ** (e / 8) for e in range(-32, 33)]
    least = min(trials, key=lambda trial: errors(*data, [first, trial])[1])
    assert least > 4  # so the plain minimum would flatten it
    assert second == pytest.approx(1.0, rel=0.2)


@st.composite
def collections(draw: st.DrawFn) -> tuple[Tensor, Tensor, Tensor]:
    """Few or many blocks of a head that may be loud, quiet or wrong, some of them cut short."""
    count, positions = draw(st.integers(1, 120)), draw(st.integers(1, 4))
    logits, survived, valid = blocks(
        count,
        positions,
        mean=draw(st.floats(-3, 3)),
        spread=draw(st.floats(0, 3)),
        seed=draw(st.integers(0, 10**6)),
    )
    told = draw(st.sampled_from([-1.0, 0.0, 0.1, 1.0, 5.0, 300.0])) * logits + draw(
        st.floats(-4, 4)
    )
    lengths = torch.tensor(
        draw(st.lists(st.integers(0, positions), min_size=count, max_size=count))
    )
    return told, survived, valid & (torch.arange(positions) < lengths[:, None])


@settings(max_examples=40, deadline=None)
@given(collections())
def test_never_worse_than_before_on_the_fitted_blocks(data: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, survived, valid = data
    fitted = fit_temperatures(logits, survived, valid)
    assert len(fitted) == logits.shape[1]
    assert all(1 / 16 <= temperature <= 16 for temperature in fitted)
    for t, rows in enumerate(valid.T):
        if rows.any():
            outcome = survived[rows, t]
            kept = running(logits[rows, : t + 1], [*fitted[:t], 1.0])[:, t]
            scaled = running(logits[rows, : t + 1], fitted[: t + 1])[:, t]
            before = expected_calibration_error(kept, outcome)
            assert expected_calibration_error(scaled, outcome) <= before + 1e-9


@settings(max_examples=15, deadline=None)
@given(collections())
def test_slots_that_are_not_valid_do_not_matter(data: tuple[Tensor, Tensor, Tensor]) -> None:
    logits, survived, valid = data
    garbage = torch.where(valid, logits, torch.tensor(float("nan")))
    fitted = fit_temperatures(logits, survived, valid)
    assert fit_temperatures(garbage, survived | ~valid, valid) == fitted


def test_equal_temperatures_are_settled_at_one() -> None:
    """A logit of 0 is one half at any temperature, whatever the truth."""
    _, survived, valid = blocks(500, 3, mean=1.5)
    assert fit_temperatures(torch.zeros(500, 3), survived, valid) == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("outcome", [True, False])
def test_outcomes_all_alike_leave_the_temperature(outcome: bool) -> None:
    logits, _, valid = blocks(300, 2)
    survived = torch.full((300, 2), outcome)
    assert fit_temperatures(logits, survived, valid) == [1.0, 1.0]


def test_a_position_without_blocks_keeps_one() -> None:
    logits, survived, valid = blocks(4000, 3)
    valid[:, 2] = False
    fitted = fit_temperatures(3 * logits, survived, valid)
    assert fitted[:2] == pytest.approx([3.0, 3.0], rel=0.2)
    assert fitted[2] == 1.0


# --------------------------------------------------------------------------- what it cannot do


def test_a_temperature_does_not_move_a_confidence_across_one_half() -> None:
    """Always confidence 0.55, survival 0.2: flattening to one half is the most it can do."""
    survived = torch.arange(1000)[:, None] % 5 == 0
    valid = torch.ones(1000, 1, dtype=torch.bool)
    logits = torch.full((1000, 1), math.log(0.55 / 0.45))
    fitted = fit_temperatures(logits, survived, valid)
    assert fitted == [16.0]
    assert errors(logits, survived, valid, fitted)[0] == pytest.approx(0.3, abs=0.005)


def test_one_minus_total_variation_fits_sampling_but_not_greedy_verification() -> None:
    """A perfect head: exactly 1 - TV of two distributions, the draft a noisy copy of the target."""
    generator = torch.Generator().manual_seed(0)
    target = 2.5 * torch.randn(6000, 2, 48, generator=generator)
    draft = target + 2.0 * torch.randn(6000, 2, 48, generator=generator)
    confidence = 1 - 0.5 * (target.softmax(-1) - draft.softmax(-1)).abs().sum(-1)
    logits = confidence.double().logit()
    valid = torch.ones(6000, 2, dtype=torch.bool)
    sampled = prefixes(torch.rand(6000, 2, generator=generator) < confidence)
    greedy = prefixes(target.argmax(-1) == draft.argmax(-1))
    assert fit_temperatures(logits, sampled, valid) == pytest.approx([1.0, 1.0], rel=0.15)
    assert max(errors(logits, sampled, valid, [1.0, 1.0])) < 0.025
    before = errors(logits, greedy, valid, [1.0, 1.0])
    after = errors(logits, greedy, valid, fit_temperatures(logits, greedy, valid))
    assert after[0] <= before[0] and after[0] > 0.03


# --------------------------------------------------------------------------- measuring


def test_errors_and_curves_are_those_of_the_unseen_blocks() -> None:
    logits, survived, valid = blocks(1000, 3)
    unseen = blocks(800, 3, mean=1.0, seed=1)
    unseen[2][:300, 2] = False
    result = calibrate(2 * logits, survived, valid, *unseen)
    shifts = torch.tensor(result.shifts)
    assert result.temperatures == fit_temperatures(2 * logits + shifts, survived, valid)
    assert result.blocks == 800
    assert result.ece_before == pytest.approx(errors(*unseen, [1.0] * 3))
    moved = (unseen[0] + shifts, *unseen[1:])
    assert result.ece_after == pytest.approx(errors(*moved, result.temperatures), abs=1e-6)
    for found, curves in (
        (result.ece_before, result.curves_before),
        (result.ece_after, result.curves_after),
    ):
        assert [sum(curve.count) for curve in curves] == [800, 800, 500]
        for error, curve in zip(found, curves, strict=True):
            bins = list(zip(curve.confidence, curve.observed, curve.count, strict=True))
            assert curve.confidence == sorted(curve.confidence) and len(bins) <= 20
            total = sum(n * abs(p - share) for p, share, n in bins) / sum(curve.count)
            assert total == pytest.approx(error)
        share = sum(n * y for y, n in zip(curves[0].observed, curves[0].count, strict=True)) / 800
        assert share == pytest.approx(unseen[1][:, 0].double().mean().item())


def test_a_drafter_without_confidence_head_is_refused() -> None:
    _, survived, valid = blocks(10, 2)
    with pytest.raises(UserError, match="has no confidence head"):
        fit_temperatures(torch.full((10, 2), float("inf")), survived, valid)


@pytest.mark.parametrize("value", [float("nan"), float("-inf")])
def test_a_logit_that_is_no_number_is_refused(value: float) -> None:
    logits, survived, valid = blocks(10, 2)
    logits[3, 1] = value
    with pytest.raises(UserError, match="logits that are not finite"):
        fit_temperatures(logits, survived, valid)


def test_a_position_that_cannot_be_measured_is_named() -> None:
    data = blocks(20, 3)
    unseen = blocks(20, 3)
    unseen[2][:, 1:] = False
    with pytest.raises(UserError, match=r"calibration of position 2 on: .* more or longer"):
        calibrate(*data, *unseen)
