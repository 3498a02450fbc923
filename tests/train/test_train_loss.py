"""The three losses against their formulas over the whole vocabulary, written out in numpy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.special import expit, log_softmax, logsumexp, softmax

from dspark.config import ConfidenceLabel, TrainConfig
from dspark.train.loss import Losses, draw_slots, dspark_loss, slot_weights

SLOTS, VOCAB = 7, 11
WHOLE = tuple(range(VOCAB))
PART = (0, 2, 3, 5, 8, 10)


class Slots:
    """Draft logits over a part of the vocabulary, target logits and labels over all of it."""

    def __init__(self, draft_ids: tuple[int, ...], seed: int = 0) -> None:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=generator)

        self.ids = torch.tensor(draft_ids)
        self.draft = 2 * normal(SLOTS, VOCAB)[:, self.ids]
        self.target = 2 * normal(SLOTS, VOCAB) + 3
        self.confidence = normal(SLOTS)
        self.labels = torch.randint(VOCAB, (SLOTS,), generator=generator)
        self.weights = torch.tensor([1.0, 0.8, 0.6, 0.0, 0.3, 0.0, 0.1])

    @property
    def draft_labels(self) -> torch.Tensor:
        """Labels as draft tokens, -1 outside the draft vocabulary."""
        places = {int(token): place for place, token in enumerate(self.ids)}
        return torch.tensor([places.get(int(label), -1) for label in self.labels])

    def losses(self, config: TrainConfig | None = None) -> Losses:
        return dspark_loss(
            self.draft,
            self.target[:, self.ids],
            self.target.logsumexp(-1),
            self.confidence,
            self.draft_labels,
            self.weights,
            config or TrainConfig(),
        )

    def accepted(self) -> torch.Tensor:
        """What rejection sampling accepts of each slot [SLOTS]: the mass that both give."""
        draft = torch.zeros(SLOTS, VOCAB)
        draft[:, self.ids] = self.draft.softmax(-1)
        return torch.minimum(draft, self.target.softmax(-1)).sum(-1)


@pytest.fixture
def slots() -> Slots:
    return Slots(PART)


def expected_terms(
    slots: Slots, label: ConfidenceLabel = ConfidenceLabel.survival
) -> dict[str, float]:
    ids, labels = slots.ids.numpy(), slots.labels.numpy()
    log_draft = log_softmax(slots.draft.double().numpy(), -1)
    draft = np.zeros((SLOTS, VOCAB))
    draft[:, ids] = np.exp(log_draft)
    target = softmax(slots.target.double().numpy(), -1)
    distance = np.abs(draft - target).sum(-1)
    accepted = 1 - distance / 2
    if label is ConfidenceLabel.agreement:
        accepted = (ids[log_draft.argmax(-1)] == labels).astype(float)
    confidence = expit(slots.confidence.double().numpy())
    unsure = -(accepted * np.log(confidence) + (1 - accepted) * np.log(1 - confidence))
    weights = slots.weights.double().numpy()
    known = np.isin(labels, ids)
    chosen = np.searchsorted(ids, labels[known])
    drafted = (weights[known] * -log_draft[known, chosen]).sum()
    return {
        "ce": drafted / max(weights[known].sum(), 1e-6),
        "l1": (weights * distance).sum() / weights.sum(),
        "confidence": (weights * unsure).sum() / weights.sum(),
    }


@settings(max_examples=60, deadline=None)
@given(
    draft_ids=st.sets(st.integers(0, VOCAB - 1), min_size=1).map(lambda ids: tuple(sorted(ids))),
    seed=st.integers(0, 99),
    label=st.sampled_from(ConfidenceLabel),
)
def test_each_term_is_the_weighted_mean_of_its_formula(
    draft_ids: tuple[int, ...], seed: int, label: ConfidenceLabel
) -> None:
    slots = Slots(draft_ids, seed)
    losses = slots.losses(TrainConfig(confidence_label=label))
    for name, value in expected_terms(slots, label).items():
        assert getattr(losses, name).item() == pytest.approx(value, rel=1e-4, abs=1e-6), name


@pytest.mark.parametrize("draft_ids", [WHOLE, PART], ids=["whole", "part"])
@pytest.mark.parametrize("shares", [(0.1, 0.9, 1.0), (1.0, 0.0, 0.0), (0.0, 2.0, 0.5)], ids=str)
def test_the_total_weighs_the_terms(
    draft_ids: tuple[int, ...], shares: tuple[float, float, float]
) -> None:
    slots, names = Slots(draft_ids), ("ce", "l1", "confidence")
    config = TrainConfig(**{f"weight_{name}": w for name, w in zip(names, shares, strict=True)})
    terms = expected_terms(slots)
    total = sum(w * terms[name] for name, w in zip(names, shares, strict=True))
    assert slots.losses(config).total.item() == pytest.approx(total, rel=1e-5)


def test_the_papers_weights_are_the_defaults() -> None:
    config = TrainConfig()
    assert (config.weight_ce, config.weight_l1, config.weight_confidence) == (0.1, 0.9, 1.0)
    assert (config.decay, config.lr, config.warmup) == (4.0, 6e-4, 0.04)
    assert config.confidence_label is ConfidenceLabel.survival


def test_the_targets_mass_outside_the_draft_vocabulary_is_distance() -> None:
    """A draft that is the target's distribution as far as it can be misses just that mass, twice:
    where it is absent, and where it went instead."""
    slots = Slots(PART)
    slots.draft = slots.target[:, slots.ids] + 1  # a shift is no difference
    outside = 1 - slots.target.softmax(-1)[:, slots.ids].sum(-1)
    assert outside.min() > 0.05
    expected = (slots.weights * 2 * outside).sum() / slots.weights.sum()
    torch.testing.assert_close(slots.losses().l1, expected)


def test_labels_outside_the_draft_vocabulary_leave_cross_entropy_alone(slots: Slots) -> None:
    outside = slots.draft_labels < 0
    assert 0 < outside.sum() < SLOTS
    before = slots.losses()
    slots.draft.requires_grad_()
    slots.losses(TrainConfig(weight_ce=1.0, weight_l1=0.0)).total.backward()
    gradient = slots.draft.grad
    assert gradient is not None and not gradient[outside].any()
    slots.draft = slots.draft.detach()
    slots.weights = slots.weights * ~outside
    assert slots.losses().ce == pytest.approx(before.ce.item())


def test_no_label_in_the_draft_vocabulary_is_no_cross_entropy(slots: Slots) -> None:
    slots.labels.fill_(1)
    losses = slots.losses()
    assert losses.ce == 0 and losses.total > 0


def test_slots_of_no_weight_do_not_matter(slots: Slots) -> None:
    before = slots.losses().total.item()
    for values in (slots.draft, slots.target, slots.confidence):
        values[slots.weights == 0] += torch.randn(values[slots.weights == 0].shape)
    assert slots.losses().total.item() == before


def test_no_weight_at_all_is_no_loss(slots: Slots) -> None:
    slots.weights = torch.zeros(SLOTS)
    assert slots.losses().total.item() == 0


def test_a_draft_that_equals_the_target_has_no_distance() -> None:
    slots = Slots(WHOLE)
    slots.target = slots.draft + 3
    slots.confidence = torch.full((SLOTS,), 20.0)
    losses = slots.losses()
    assert losses.l1 == pytest.approx(0, abs=1e-5)
    assert losses.confidence == pytest.approx(0, abs=1e-5)


@pytest.mark.parametrize("draft_ids", [WHOLE, PART], ids=["whole", "part"])
def test_confidence_is_best_where_it_is_the_probability_of_acceptance(
    draft_ids: tuple[int, ...],
) -> None:
    """At 1 - L1/2, which is what rejection sampling accepts, the confidence loss has no slope."""
    slots = Slots(draft_ids)
    slots.confidence = slots.accepted().logit().requires_grad_()
    slots.losses().total.backward()
    gradient = slots.confidence.grad
    assert gradient is not None and gradient.abs().max() < 1e-6


def test_a_greedy_confidence_is_sure_of_the_targets_token_alone() -> None:
    """Not of a token outside the draft vocabulary, which no draft can be."""
    slots = Slots(PART)
    slots.labels[:3] = torch.tensor([1, 4, 9])
    slots.labels[3:] = slots.ids[slots.draft.argmax(-1)][3:]
    slots.weights = torch.ones(SLOTS)
    config = TrainConfig(confidence_label=ConfidenceLabel.agreement)
    slots.confidence = torch.tensor([-20.0] * 3 + [20.0] * 4)
    assert slots.losses(config).confidence == pytest.approx(0, abs=1e-6)
    slots.confidence = -slots.confidence
    assert slots.losses(config).confidence == pytest.approx(20, rel=1e-4)


@pytest.mark.parametrize("label", list(ConfidenceLabel), ids=lambda label: label.value)
def test_the_confidence_term_does_not_move_the_draft(slots: Slots, label: ConfidenceLabel) -> None:
    """Else the drafter could please its confidence head by drafting worse."""
    slots.draft.requires_grad_()
    config = TrainConfig(weight_ce=0.0, weight_l1=0.0, confidence_label=label)
    slots.confidence.requires_grad_()
    slots.losses(config).total.backward()
    gradient = slots.draft.grad
    assert gradient is None or gradient.abs().max() == 0


def test_the_teacher_receives_no_gradient(slots: Slots) -> None:
    for values in (slots.draft, slots.target):
        values.requires_grad_()
    slots.losses().total.backward()
    assert slots.target.grad is None
    assert slots.draft.grad is not None and slots.draft.grad.any()


def test_logits_of_half_precision_are_no_coarser_than_they_are(slots: Slots) -> None:
    """The losses are computed in float32 whatever the heads run in."""
    slots.draft, slots.target = slots.draft.bfloat16(), slots.target.bfloat16()
    losses = dspark_loss(
        slots.draft,
        slots.target[:, slots.ids],
        torch.from_numpy(logsumexp(slots.target.float().numpy(), -1)),
        slots.confidence,
        slots.draft_labels,
        slots.weights,
        TrainConfig(),
    )
    for name, value in expected_terms(slots).items():
        assert getattr(losses, name).item() == pytest.approx(value, rel=1e-4), name


def test_drawn_slots_weigh_on_average_what_all_slots_weigh() -> None:
    config = TrainConfig(decay=2.0, draw_slots=True)
    generator = torch.Generator().manual_seed(0)
    drawn = draw_slots(torch.Size([8, 5000, 7]), config.decay, generator)
    weights = slot_weights(torch.arange(7), config)
    everything = slot_weights(torch.arange(7), replace(config, draw_slots=False))
    assert drawn[..., :2].all() and drawn.float().mean() < 0.55
    mean = (drawn * weights).mean((0, 1))
    torch.testing.assert_close(mean, everything, atol=0.005, rtol=0.02)
