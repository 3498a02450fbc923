"""The three losses against their formulas, written out once more in numpy."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.special import expit, log_softmax, softmax

from dspark.config import TrainConfig
from dspark.train.loss import Losses, dspark_loss, slot_weights

SLOTS, VOCAB = 7, 11


@pytest.fixture
def inputs() -> dict[str, torch.Tensor]:
    """Logits and labels of some slots; two of them weigh nothing."""
    generator = torch.Generator().manual_seed(0)
    weights = torch.tensor([1.0, 0.8, 0.6, 0.0, 0.3, 0.0, 0.1])
    return {
        "draft_logits": 2 * torch.randn(SLOTS, VOCAB, generator=generator),
        "target_logits": 2 * torch.randn(SLOTS, VOCAB, generator=generator),
        "confidence_logits": torch.randn(SLOTS, generator=generator),
        "labels": torch.randint(VOCAB, (SLOTS,), generator=generator),
        "weights": weights,
    }


def loss(inputs: dict[str, torch.Tensor], config: TrainConfig | None = None) -> Losses:
    return dspark_loss(**inputs, config=config or TrainConfig())


def expected_terms(inputs: dict[str, torch.Tensor]) -> dict[str, float]:
    x = {name: value.double().numpy() for name, value in inputs.items()}
    labels = inputs["labels"].numpy()
    draft, target = softmax(x["draft_logits"], -1), softmax(x["target_logits"], -1)
    distance = np.abs(draft - target).sum(-1)
    survival, confidence = 1 - distance / 2, expit(x["confidence_logits"])
    slots = {
        "ce": -log_softmax(x["draft_logits"], -1)[np.arange(SLOTS), labels],
        "l1": distance,
        "confidence": -(survival * np.log(confidence) + (1 - survival) * np.log(1 - confidence)),
    }
    weights = x["weights"]
    return {name: float((weights * term).sum() / weights.sum()) for name, term in slots.items()}


def test_each_term_is_the_weighted_mean_of_its_formula(inputs: dict[str, torch.Tensor]) -> None:
    losses = loss(inputs)
    for name, value in expected_terms(inputs).items():
        assert getattr(losses, name) == pytest.approx(value, rel=1e-5), name


@pytest.mark.parametrize("shares", [(0.1, 0.9, 1.0), (1.0, 0.0, 0.0), (0.0, 2.0, 0.5)])
def test_the_total_weighs_the_terms(
    inputs: dict[str, torch.Tensor], shares: tuple[float, float, float]
) -> None:
    names = ("ce", "l1", "confidence")
    config = TrainConfig(**{f"weight_{name}": w for name, w in zip(names, shares, strict=True)})
    terms = expected_terms(inputs)
    total = sum(w * terms[name] for name, w in zip(names, shares, strict=True))
    assert loss(inputs, config).total.item() == pytest.approx(total, rel=1e-5)


def test_the_papers_weights_are_the_defaults() -> None:
    config = TrainConfig()
    assert (config.weight_ce, config.weight_l1, config.weight_confidence) == (0.1, 0.9, 1.0)
    assert (config.decay, config.lr, config.warmup) == (4.0, 6e-4, 0.04)


def test_slots_of_no_weight_do_not_matter(inputs: dict[str, torch.Tensor]) -> None:
    before = loss(inputs).total.item()
    for name in ("draft_logits", "target_logits", "confidence_logits"):
        inputs[name][inputs["weights"] == 0] += 5
    assert loss(inputs).total.item() == before


def test_no_valid_slot_is_no_loss(inputs: dict[str, torch.Tensor]) -> None:
    inputs["weights"] = torch.zeros(SLOTS)
    assert loss(inputs).total.item() == 0


def test_a_draft_that_equals_the_target_has_no_distance(inputs: dict[str, torch.Tensor]) -> None:
    inputs["target_logits"] = inputs["draft_logits"] + 3  # a shift is no difference
    inputs["confidence_logits"] = torch.full((SLOTS,), 20.0)
    losses = loss(inputs)
    assert losses.l1 == pytest.approx(0, abs=1e-6)
    assert losses.confidence == pytest.approx(0, abs=1e-5)


def test_confidence_is_best_where_it_is_the_probability_of_acceptance(
    inputs: dict[str, torch.Tensor],
) -> None:
    """At 1 - TV, which is what rejection sampling accepts, the confidence loss has no slope."""
    draft, target = (inputs[name].softmax(-1) for name in ("draft_logits", "target_logits"))
    accepted = torch.minimum(draft, target).sum(-1)
    inputs["confidence_logits"] = accepted.logit().requires_grad_()
    loss(inputs).total.backward()
    gradient = inputs["confidence_logits"].grad
    assert gradient is not None and gradient.abs().max() < 1e-6


def test_the_confidence_term_does_not_move_the_draft(inputs: dict[str, torch.Tensor]) -> None:
    """Else the drafter could please its confidence head by drafting worse."""
    inputs["draft_logits"].requires_grad_()
    config = TrainConfig(weight_ce=0.0, weight_l1=0.0, weight_confidence=1.0)
    loss(inputs, config).total.backward()
    gradient = inputs["draft_logits"].grad
    assert gradient is None or gradient.abs().max() == 0


def test_the_teacher_receives_no_gradient(inputs: dict[str, torch.Tensor]) -> None:
    for name in ("draft_logits", "target_logits"):
        inputs[name].requires_grad_()
    loss(inputs).total.backward()
    assert inputs["target_logits"].grad is None
    assert inputs["draft_logits"].grad is not None


def test_slot_weights_fall_by_e_every_decay_slots_and_vanish_where_invalid() -> None:
    valid = torch.tensor([[True] * 7, [True] * 2 + [False] * 5])
    expected = valid.numpy() * np.exp(-np.arange(7) / 4.0)
    np.testing.assert_allclose(slot_weights(valid, 4.0).numpy(), expected, rtol=1e-6)
