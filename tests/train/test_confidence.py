"""The confidence head fitted anew: what it learns from few blocks, and what it reads."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from scipy.special import expit
from train_helpers import Predictable, Training

from dspark.models.checkpoint import load_drafter
from dspark.models.drafter import DSparkDrafter
from dspark.train.confidence import fit_head, refit_confidence
from dspark.train.evaluate import draft_response, reached_slots, visited

WIDTH = 40


@pytest.fixture
def drafter(predictable: Predictable, training: Training) -> DSparkDrafter:
    return load_drafter(training.folder / "best", predictable.target)


def blocks(count: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Slots whose survival a head with three times too large logits misjudges; the last are its truth."""
    draw = np.random.default_rng(seed)
    features = draw.normal(2.0, 3.0, (count, WIDTH)) * np.linspace(0.1, 10, WIDTH)
    features[:, 7] = 5.0  # says nothing
    position = draw.integers(0, 3, count)
    truth = expit((features - 2) @ trained() / 3 - 0.5 + 0.4 * position)
    return features, position, (draw.random(count) < truth).astype(float), truth


def trained() -> np.ndarray:
    return np.random.default_rng(9).normal(0, 0.2, WIDTH) / np.linspace(0.1, 10, WIDTH)


def log_loss(logits: np.ndarray, outcome: np.ndarray) -> float:
    return float((np.logaddexp(0, logits) - outcome * logits).mean())


def test_a_head_that_is_too_sure_is_mended() -> None:
    """On fresh slots nearly as good as the truth but for the positions' levels, which one bias lacks."""
    bias = float(-2 * trained().sum()) + 1.0
    features, position, survived, _ = blocks(4000, 0)
    weight, level = fit_head(features, position, survived, trained(), bias)
    features, position, survived, truth = blocks(4000, 1)
    before, after = features @ trained() + bias, features @ weight + level
    best = log_loss(np.log(truth / (1 - truth)), survived)
    assert log_loss(before, survived) > best + 0.15
    assert log_loss(after, survived) < best + 0.04
    assert abs(expit(after).mean() - survived.mean()) < 0.02


def test_few_slots_hardly_turn_the_trained_direction() -> None:
    features, position, survived, _ = blocks(30, 2)
    weight, _ = fit_head(features, position, survived, trained(), 0.0)
    scale = features.std(0)
    one, other = weight * scale, trained() * scale
    assert one @ other / np.linalg.norm(one) / np.linalg.norm(other) > 0.99


@pytest.mark.parametrize("outcome", [0.0, 1.0])
def test_slots_that_all_fare_alike_give_finite_values(outcome: float) -> None:
    features, position, survived, _ = blocks(200, 3)
    survived[:] = outcome
    weight, bias = fit_head(features, position, survived, trained(), 0.3)
    assert np.isfinite(weight).all() and np.isfinite(bias)
    assert abs(expit(features @ weight + bias).mean() - outcome) < 0.1


def test_reached_slots_are_those_before_which_all_survived(
    predictable: Predictable, drafter: DSparkDrafter
) -> None:
    """The head reads there what gave the confidence of the draft."""
    item = predictable.states[5]
    reached, drafts = reached_slots(drafter, item), draft_response(drafter, item)
    expected = [
        (slot, bool(drafts.survived[row, slot]), float(drafts.confidence[row, slot]))
        for row in visited(drafts, drafter.block_size).tolist()
        for slot in range(int(drafts.survived[row].sum()) + 1)
        if slot < drafter.block_size
    ]
    assert drafter.confidence_head is not None
    head = drafter.confidence_head.proj
    with torch.no_grad():
        logits = head(reached.features)[:, 0]
    assert reached.position.tolist() == [slot for slot, _, _ in expected]
    assert reached.survived.tolist() == [survived for _, survived, _ in expected]
    assert logits.tolist() == pytest.approx([logit for _, _, logit in expected], abs=1e-5)


def test_the_fit_changes_the_confidence_head_alone(
    predictable: Predictable, drafter: DSparkDrafter
) -> None:
    """To values that bfloat16 holds, and on its own responses to a better log loss."""
    before = copy.deepcopy(drafter.state_dict())
    items = [predictable.states[index] for index in range(12)]

    def loss() -> float:
        slots = [reached_slots(drafter, item) for item in items]
        assert drafter.confidence_head is not None
        with torch.no_grad():
            logits = drafter.confidence_head.proj(torch.cat([part.features for part in slots]))
        survived = torch.cat([part.survived for part in slots])
        return log_loss(logits[:, 0].numpy(), survived.numpy())

    worse = loss()
    refit_confidence(drafter, items)
    assert loss() < worse
    for name, value in drafter.state_dict().items():
        if name.startswith("confidence_head."):
            assert not value.equal(before[name]) and value.equal(value.bfloat16().float())
        else:
            assert value.equal(before[name])


def test_without_a_head_or_without_slots_nothing_is_fitted(
    predictable: Predictable, drafter: DSparkDrafter
) -> None:
    before = copy.deepcopy(drafter.state_dict())
    refit_confidence(drafter, [])
    assert all(value.equal(before[name]) for name, value in drafter.state_dict().items())
    drafter.confidence_head = None
    refit_confidence(drafter, [predictable.states[0]])
