"""Sequential temperature scaling of the confidence head (DSpark, arXiv 2607.05147, section 3.2.1).

Left to right, the temperature of each position is the one that minimises the expected calibration
error (ECE) of the running product of confidences, the earlier temperatures staying as they are. The
search runs over 2^-4 to 2^4 in steps of 2^(1/8), then of 2^(1/64) (1.1 %) around the best.

ECE alone is a poor judge where the data cannot tell: on some thousand blocks chance makes 1 to 2 % of
it, and from the second position on, where about half of the drafts still alive survive, pushing every
confidence of the position to one half has a small ECE and says nothing. So temperatures whose ECE
exceeds the least by no more than chance count as equal, and the log loss of the position's own
confidence chooses among them, as in ordinary temperature scaling. The temperature chosen never has a
larger ECE on the fitted blocks than 1 has.

What a temperature cannot do: move a confidence across one half. But a head is trained on anchors
anywhere in a text, and a decoder stops more often where drafting is hard: it steps over what it
accepts. So each position's logits are also shifted by what makes the mean confidence of the blocks
still alive equal the share of them that survived. Shifts and temperatures are fitted in turns.

All is computed in float64 with NumPy on the CPU, so the result does not depend on threads or device.
N blocks, B positions.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import brentq
from scipy.special import expit, logit
from torch import Tensor

from dspark.errors import UserError
from dspark.models.calibration import Calibration, Curve, apply_temperatures

TURNS = 4  # of shifts and temperatures
BINS = 20  # of equal width over 0..1

# Temperatures are 2^(e / OCTAVE) for whole e, so that 1 is among them exactly.
OCTAVE = 64
LIMIT = 4 * OCTAVE
COARSE = 8

Floats = NDArray[np.float64]
Bools = NDArray[np.bool_]


def expected_calibration_error(probability: Tensor, outcome: Tensor) -> float:
    """Sum over 20 equal bins of (count / N) * |mean confidence - observed share|.

    Args:
        probability: [N] in 0..1, N >= 1.
        outcome: [N] bool.
    """
    return _ece(_floats(probability), _floats(outcome))


def fit_temperatures(logits: Tensor, survived: Tensor, valid: Tensor) -> list[float]:
    """The temperature of each position, 1/16 to 16.

    Draft and verify whole blocks to collect the data: where a threshold cuts blocks short, the late
    positions are seen on confident blocks only.

    A position where no block is valid, or all those still alive before it fare alike, keeps 1: there
    is nothing that a temperature could sort better. What remains equal is settled nearest to 1.

    Args:
        logits: raw confidence logits [N, B].
        survived: [N, B] bool, all draft tokens up to and including this position were accepted.
        valid: [N, B] bool, the slots whose outcome is known; a prefix of each row.

    Raises:
        UserError: the drafter has no confidence head, or a logit is not finite.
    """
    z, y, known = _arrays(logits, survived, valid)
    running = np.ones(len(z))
    alive = np.ones(len(z), bool)
    temperatures = []
    for position in range(z.shape[1]):
        rows = known[:, position]
        slot = _Slot(running[rows], z[rows, position], y[rows, position], alive[rows])
        temperatures.append(_temperature(slot))
        running *= expit(z[:, position] / temperatures[-1])
        alive = y[:, position]
    return temperatures


def fit_shifts(
    logits: Tensor, survived: Tensor, valid: Tensor, temperatures: Sequence[float]
) -> list[float]:
    """What to add to each position's logits so that mean confidence is the observed share.

    Over the blocks still alive before the position; where they all fare alike it is 0. Confidence is
    sigmoid((logit + shift) / temperature); the other arguments and errors are `fit_temperatures`'s.
    """
    z, y, known = _arrays(logits, survived, valid)
    alive = np.ones(len(z), bool)
    shifts = []
    for position in range(z.shape[1]):
        rows = known[:, position] & alive
        alive = y[:, position]
        share = alive[rows].mean() if rows.any() else 0.0
        shift = 0.0
        if 0 < share < 1:
            here = z[rows, position] / temperatures[position]
            far = np.abs(here).max() + abs(logit(share))  # beyond which no mean can be the share
            shift = brentq(lambda s, at=here, of=share: expit(at + s).mean() - of, -far, far)
        shifts.append(float(shift) * temperatures[position])
    return shifts


def calibrate(
    logits: Tensor,
    survived: Tensor,
    valid: Tensor,
    test_logits: Tensor,
    test_survived: Tensor,
    test_valid: Tensor,
) -> Calibration:
    """Fit shifts and temperatures on the first blocks; measure on the second, which they never saw.

    The arguments are those of `fit_temperatures`, twice.

    Raises:
        UserError: as `fit_temperatures`; or the second set has no block that reaches a position.
    """
    temperatures = [1.0] * logits.shape[1]
    for _ in range(TURNS):
        shifts = fit_shifts(logits, survived, valid, temperatures)
        moved = logits + logits.new_tensor(shifts)
        temperatures = fit_temperatures(moved, survived, valid)
    z, y, known = _arrays(test_logits, test_survived, test_valid)
    if not known.any(0).all():
        missing = int(known.any(0).argmin()) + 1
        raise UserError(
            f"no block to measure the calibration of position {missing} on: calibrate with more "
            "or longer conversations"
        )
    ece_before, curves_before = _measure(z, y, known)
    ece_after, curves_after = _measure(
        (z + np.asarray(shifts)) / np.asarray(temperatures), y, known
    )
    return Calibration(
        temperatures=temperatures,
        shifts=shifts,
        ece_before=ece_before,
        ece_after=ece_after,
        blocks=int(known[:, 0].sum()),
        curves_before=curves_before,
        curves_after=curves_after,
    )


# --------------------------------------------------------------------------- the search


@dataclass
class _Slot:
    """The valid blocks at one position."""

    running: Floats  # product of the confidences before it
    logits: Floats
    survived: Bools  # up to and including it
    alive: Bools  # before it


@dataclass
class _Score:
    error: float  # ECE of the running product
    chance: float  # the ECE that outcomes drawn with exactly these probabilities would show
    loss: float  # log loss of the position's own confidence, over blocks still alive


def _temperature(slot: _Slot) -> float:
    outcomes = slot.survived[slot.alive]
    if outcomes.all() or not outcomes.any():
        return 1.0
    scores = {e: _score(slot, 2.0 ** (e / OCTAVE)) for e in range(-LIMIT, LIMIT + 1, COARSE)}
    middle = _best(scores)
    around = range(max(middle - COARSE + 1, -LIMIT), min(middle + COARSE, LIMIT + 1))
    scores |= {e: _score(slot, 2.0 ** (e / OCTAVE)) for e in around if e not in scores}
    return 2.0 ** (_best(scores) / OCTAVE)


def _best(scores: dict[int, _Score]) -> int:
    least = min(score.error for score in scores.values())
    equal = [e for e, s in scores.items() if s.error <= min(least + s.chance, scores[0].error)]
    return min(equal, key=lambda e: (scores[e].loss, abs(e), e))


def _score(slot: _Slot, temperature: float) -> _Score:
    scaled = slot.logits / temperature
    probability = slot.running * expit(scaled)
    bins = _bins(probability)
    variance = np.bincount(bins, probability * (1 - probability), BINS)
    # A sum of many outcomes is about normal, and the mean of |normal| is sqrt(2/pi) deviations.
    chance = np.sqrt(2 / np.pi * variance).sum() / len(probability)
    wrongness = np.where(slot.survived, -scaled, scaled)[slot.alive]
    return _Score(
        error=_ece(probability, slot.survived),
        chance=float(chance),
        loss=float(np.logaddexp(0, wrongness).mean()),
    )


# --------------------------------------------------------------------------- measuring


def calibration_errors(
    logits: Tensor,
    survived: Tensor,
    valid: Tensor,
    temperatures: Sequence[float],
    shifts: Sequence[float] = (),
) -> list[float]:
    """Expected calibration error of the running product, by position, with a given calibration.

    The arguments are those of `fit_temperatures`; no shifts are shifts of 0.
    """
    z, y, known = _arrays(apply_temperatures(logits, temperatures, shifts), survived, valid)
    return _measure(z, y, known)[0]


def _measure(z: Floats, y: Bools, known: Bools) -> tuple[list[float], list[Curve]]:
    """ECE and reliability curve of the running product at each position."""
    running = np.cumprod(expit(z), axis=1)
    slots = [(running[rows, t], y[rows, t]) for t, rows in enumerate(known.T)]
    return [_ece(*slot) for slot in slots], [_curve(*slot) for slot in slots]


def _bins(probability: Floats) -> NDArray[np.int64]:
    return np.minimum((probability * BINS).astype(np.int64), BINS - 1)


def _ece(probability: Floats, outcome: Floats | Bools) -> float:
    # count * |mean - share| of a bin is the absolute sum of its differences.
    gaps = np.bincount(_bins(probability), probability - outcome, BINS)
    return float(np.abs(gaps).sum() / len(probability))


def _curve(probability: Floats, outcome: Bools) -> Curve:
    bins = _bins(probability)
    count = np.bincount(bins, minlength=BINS)
    filled = count > 0
    confidence = np.bincount(bins, probability, BINS)[filled] / count[filled]
    observed = np.bincount(bins, outcome, BINS)[filled] / count[filled]
    return Curve(confidence.tolist(), observed.tolist(), count[filled].tolist())


def _arrays(logits: Tensor, survived: Tensor, valid: Tensor) -> tuple[Floats, Bools, Bools]:
    """The three as arrays; logits of slots that are not valid become 0."""
    known = valid.cpu().numpy().astype(bool)
    z = np.where(known, _floats(logits), 0.0)
    if np.isposinf(z).any():
        raise UserError(
            "the drafter has no confidence head (it trusts every token): there is nothing to "
            "calibrate"
        )
    if not np.isfinite(z).all():
        raise UserError(
            "the confidence head gives logits that are not finite: train the drafter again"
        )
    return z, survived.cpu().numpy().astype(bool), known


def _floats(values: Tensor) -> Floats:
    return values.detach().double().cpu().numpy()
