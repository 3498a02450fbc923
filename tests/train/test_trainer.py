"""Training end to end on a tiny target: the drafter learns, the target stays as it is."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy.special import log_softmax, softmax
from train_helpers import LAYERS, SHAPE, Predictable, Training, settings, write_states

from dspark.config import LearningRate, TrainConfig
from dspark.errors import UserError
from dspark.models.checkpoint import load_drafter
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target, load_target
from dspark.train import trainer as module
from dspark.train.blocks import Batch, block_hidden, draw_anchors, make_batch
from dspark.train.cache import StateCache
from dspark.train.curve import read_curve
from dspark.train.evaluate import Acceptance, draft_response, walk
from dspark.train.start import load_start, new_drafter
from dspark.train.synthesize import Conversation
from dspark.train.trainer import (
    BlockLoss,
    World,
    fit,
    frequent_tokens,
    learning_rate,
    step_batches,
    train_step,
)

ALONE = World(0, 1)
PART = torch.arange(3, 300, 3)


def some_batch(states: StateCache, conversations: int = 4) -> Batch:
    generator = torch.Generator().manual_seed(0)
    items = [states[index] for index in range(conversations)]
    anchors = [draw_anchors(item, 8, generator) for item in items]
    return make_batch(items, anchors, SHAPE.block_size)


def scale_of(states: StateCache) -> torch.Tensor:
    return torch.linspace(0.5, 2, states[0].taps.shape[1])


def speaking(drafter: DSparkDrafter) -> DSparkDrafter:
    """The same with a Markov bias that says something."""
    torch.nn.init.normal_(drafter.markov_head.markov_w2.weight)
    return drafter


def losses_of(curve: list[dict[str, float]]) -> list[dict[str, float]]:
    """The lines of steps, without their speed."""
    return [
        {name: value for name, value in line.items() if name != "tokens_per_s"}
        for line in curve
        if "ce" in line
    ]


# --------------------------------------------------------------------------- what is learnt


def test_fifty_steps_make_drafts_that_are_accepted(
    predictable: Predictable, training: Training, tmp_path: Path
) -> None:
    """From the target's bigrams, which training starts from, to a third of a token a step more."""
    untrained = replace(training.config, lr=0.0, epochs=0.1)
    fit(predictable.target, predictable.states, untrained, tmp_path)
    before = read_curve(tmp_path / "curve.jsonl")[-1]["accept_len_k3"]
    after = training.validations[-1]["accept_len_k3"]
    assert 1.2 < before < after - 0.3
    first, last = losses_of(training.curve)[0], losses_of(training.curve)[-1]
    assert all(last[name] < first[name] for name in ("ce", "l1", "confidence"))


def test_the_target_stays_as_it_is(predictable: Predictable, training: Training) -> None:
    after = predictable.target.model.state_dict()
    assert after.keys() == training.target_before.keys()
    assert all(value.equal(training.target_before[name]) for name, value in after.items())
    assert all(value.grad is None for value in predictable.target.model.parameters())


def test_validations_hold_together(training: Training) -> None:
    """One every `validate_every` steps and one at the end; no length without its positions."""
    assert [line["step"] for line in training.validations] == [18, 36, 54]
    for line in training.validations:
        for k in (3, 4):
            shares = [line[f"accept_p{t + 1}_k{k}"] for t in range(k)]
            given = [line[f"accept_given_p{t + 1}_k{k}"] for t in range(k)]
            assert line[f"accept_len_k{k}"] == pytest.approx(1 + sum(shares))
            assert shares == pytest.approx(np.cumprod(given).tolist())


def test_the_curve_holds_every_step_at_its_rate(training: Training) -> None:
    lines = losses_of(training.curve)
    assert [line["step"] for line in lines] == list(range(1, 55))
    rates = [learning_rate(step, 54, training.config) for step in range(54)]
    assert [line["lr"] for line in lines] == pytest.approx(rates)


def test_the_best_drafter_is_kept_not_the_last(
    predictable: Predictable, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the second of three validations the best, best/ is what two steps make."""
    lengths: Iterator[float] = iter(())

    def told(_drafts: object, k: int) -> Acceptance:
        return Acceptance(k, 10, [0.5] * k, [0.5] * k, next(lengths))

    monkeypatch.setattr(module, "walk", told)
    changes = {"schedule": LearningRate.constant, "validate_every": 1}
    for name, epochs, told_lengths in (
        ("three", 3 / 9, [2.0, 2.0, 3.0, 3.0, 2.5, 2.5]),  # k = 3 and k = 4 of each
        ("two", 2 / 9, [2.0, 2.0, 3.0, 3.0]),
    ):
        lengths = iter(told_lengths)
        fit(
            predictable.target,
            predictable.states,
            settings(epochs=epochs, **changes),
            tmp_path / name,
        )
        assert next(lengths, None) is None
    three, two = ((tmp_path / name / "best/model.safetensors") for name in ("three", "two"))
    assert three.read_bytes() == two.read_bytes()


def test_the_same_seed_trains_the_same_drafter(predictable: Predictable, tmp_path: Path) -> None:
    for folder, seed in (("one", 0), ("same", 0), ("other", 1)):
        config = settings(epochs=0.3, seed=seed)
        fit(predictable.target, predictable.states, config, tmp_path / folder)
    one, same, other = (
        (tmp_path / folder / "best" / "model.safetensors").read_bytes()
        for folder in ("one", "same", "other")
    )
    assert one == same != other


def test_the_best_drafter_fits_the_target(predictable: Predictable, training: Training) -> None:
    drafter = load_drafter(training.folder / "best", predictable.target)
    assert len(drafter.draft_ids) == 150
    assert drafter.block_size == SHAPE.block_size and drafter.target_layer_ids == LAYERS


# --------------------------------------------------------------------------- training on


def test_training_on_begins_with_the_start(
    predictable: Predictable, training: Training, tmp_path: Path
) -> None:
    """At a rate of nothing the start comes out again, with its vocabulary and without a shift."""
    best = training.folder / "best"
    config = replace(training.config, start=str(best), lr=0.0, epochs=0.1)
    fit(predictable.target, predictable.states, config, tmp_path)
    start, same = (load_drafter(folder, predictable.target) for folder in (best, tmp_path / "best"))
    assert same.draft_ids.equal(start.draft_ids)
    for name, value in start.state_dict().items():
        torch.testing.assert_close(same.state_dict()[name], value, rtol=1e-2, atol=1e-6)
    drafts = [draft_response(start, predictable.states[i]) for i in range(config.held_out)]
    found = read_curve(tmp_path / "curve.jsonl")[-1]["accept_len_k3"]
    assert found == pytest.approx(walk(drafts, 3).accept_len, abs=0.02)


def test_training_on_goes_further(
    predictable: Predictable, training: Training, tmp_path: Path
) -> None:
    """Its first steps are ahead of the first steps of a new drafter, by cross-entropy."""
    config = replace(training.config, start=str(training.folder / "best"), epochs=1.0, lr=5e-3)
    fit(predictable.target, predictable.states, config, tmp_path)
    on, new = losses_of(read_curve(tmp_path / "curve.jsonl")), losses_of(training.curve)
    assert max(line["ce"] for line in on) < min(line["ce"] for line in new[: len(on)])
    assert on[-1]["ce"] != on[0]["ce"]


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layers": 2}, r"has layers 1 and drafter\.train\.shape\.layers makes 2: set it"),
        ({"taps": 1}, r"has target_layer_ids \[1, 2\] and .*target_layer_ids makes \[2\]"),
        ({"draft_vocab_size": 0}, "has draft_vocab_size 150 and .* makes 0"),
        ({"markov_rank": 8}, "has markov_rank 32 and .* makes 8"),
    ],
)
def test_a_start_of_another_shape_is_refused(
    predictable: Predictable, training: Training, changes: dict[str, int], message: str
) -> None:
    shape = replace(training.config.shape, **changes)
    with pytest.raises(UserError, match=message):
        load_start(str(training.folder / "best"), shape, predictable.target)


def test_a_start_is_a_directory_or_one_that_ships(predictable: Predictable, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="neither a directory nor a drafter that ships"):
        load_start(str(tmp_path / "none"), SHAPE, predictable.target)
    with pytest.raises(
        UserError, match="smollm2_135m' does not fit the target: hidden_size is 576"
    ):
        load_start("smollm2_135m", SHAPE, predictable.target)


# --------------------------------------------------------------------------- what is trained on


def test_validation_and_calibration_are_never_trained_on(
    predictable: Predictable, tmp_path: Path
) -> None:
    """With other conversations in their place the very same drafter comes out."""
    target, talks = predictable.target, predictable.conversations
    config = settings(
        shape=replace(SHAPE, draft_vocab_size=150), held_out=6, calibration=4, epochs=0.5
    )
    others = [replace(item, response_ids=item.response_ids[::-1]) for item in talks[:10]]
    tensors, losses = [], []
    for name, own in (("talks", talks[:40]), ("others", [*others, *talks[10:40]])):
        cache = write_states(target, own, tmp_path / name / "cache")
        fit(target, cache, config, tmp_path / name)
        losses.append(losses_of(read_curve(tmp_path / name / "curve.jsonl")))
        drafter = load_drafter(tmp_path / name / "best", target)
        tensors.append(drafter.state_dict())
    assert losses[0] == losses[1]
    assert all(value.equal(tensors[1][name]) for name, value in tensors[0].items())


def test_an_epoch_takes_every_conversation_once(states: StateCache) -> None:
    config, training = settings(batch=3, accumulate=2, anchors=5), range(6, 24)
    for epoch in range(3):  # 18 conversations are 6 passes, or 3 steps
        taken = Counter(
            tuple(row[row != 0].tolist()[:8])
            for step in range(3)
            for batch in step_batches(states, training, config, 3 * epoch + step, ALONE)
            for row in batch.ids
        )
        expected = {tuple(x[x != 0].tolist()[:8]) for x in (states[i].ids for i in training)}
        assert set(taken) == expected and set(taken.values()) == {1}


def test_epochs_differ_and_steps_can_be_made_again(states: StateCache) -> None:
    """What a killed run needs: a step's batches come from its number alone."""
    config, training = settings(batch=3, anchors=5), range(6, 24)

    def batches(step: int) -> list[Batch]:
        return list(step_batches(states, training, config, step, ALONE))

    assert same(batches(4), batches(4))
    assert not same(batches(0), batches(6))  # the first of each epoch


@pytest.mark.parametrize("accumulate", [1, 2])
def test_processes_share_the_passes_of_one(states: StateCache, accumulate: int) -> None:
    """Two processes run what one alone runs with twice the passes a step."""
    training = range(24)
    for step in range(4):
        one = step_batches(
            states, training, settings(batch=2, accumulate=2 * accumulate), step, ALONE
        )
        shares = [
            list(
                step_batches(
                    states, training, settings(batch=2, accumulate=accumulate), step, world
                )
            )
            for world in (World(0, 2), World(1, 2))
        ]
        assert same(list(one), [batch for turn in zip(*shares, strict=True) for batch in turn])


def same(one: list[Batch], other: list[Batch]) -> bool:
    return len(one) == len(other) and all(
        a.ids.equal(b.ids) and a.anchors.equal(b.anchors) for a, b in zip(one, other, strict=True)
    )


def test_too_few_conversations_are_refused_before_anything_is_written(
    target: Target, states: StateCache, tmp_path: Path
) -> None:
    config = settings(held_out=10, calibration=8, batch=4, accumulate=2)
    with pytest.raises(
        UserError,
        match="24 conversations are too few: held_out takes 10, calibration 8 and a step 8",
    ):
        fit(target, states, config, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    fit(target, states, replace(config, calibration=6, epochs=0.1), tmp_path / "out")


# --------------------------------------------------------------------------- draft vocabulary


def counted(target: Target, tmp_path: Path) -> StateCache:
    """Two conversations full of token 9, then three others."""
    responses = [[9] * 12, [9] * 12, [4, 4, 7] * 4, [7, 7, 2] * 4, [7, 200, 4] * 4]
    talks = [Conversation(str(i), "", [250, 251], ids) for i, ids in enumerate(responses)]
    return write_states(target, talks, tmp_path / "cache")


def test_frequent_tokens_come_first_and_none_is_left_out(target: Target, tmp_path: Path) -> None:
    """Of responses alone, and of the conversations that are asked for."""
    cache = counted(target, tmp_path)
    frequent = frequent_tokens(cache, range(2, 5), 300).tolist()
    assert frequent[:6] == [7, 4, 2, 200, 0, 1]  # 16, 12, 4, 4 times, then by id
    assert sorted(frequent) == list(range(300))
    assert frequent_tokens(cache, range(5), 300)[0] == 9


@pytest.mark.parametrize(
    ("size", "ids"), [(3, [2, 4, 7]), (4, [2, 4, 7, 200]), (0, None), (300, None), (301, None)]
)
def test_the_draft_vocabulary_is_the_most_frequent_of_the_training_text(
    target: Target, tmp_path: Path, size: int, ids: list[int] | None
) -> None:
    """Ascending; a vocabulary as large as the target's is the whole one."""
    config = settings(
        shape=replace(SHAPE, draft_vocab_size=size), held_out=1, calibration=1, batch=1, epochs=0.1
    )
    fit(target, counted(target, tmp_path), config, tmp_path)
    drafter = load_drafter(tmp_path / "best", target)
    assert (drafter.d2t is None) == (ids is None)
    assert drafter.draft_ids.tolist() == (ids or list(range(300)))


# --------------------------------------------------------------------------- one step


@pytest.mark.parametrize("draft_ids", [None, PART], ids=["whole", "part"])
def test_a_step_has_the_losses_of_the_formulas(
    target: Target, states: StateCache, draft_ids: torch.Tensor | None
) -> None:
    """From the blocks' states on, written out over the target's whole vocabulary in numpy."""
    drafter = speaking(new_drafter(SHAPE, target, 0, draft_ids))
    config, scale = settings(decay=2.0, weight_ce=0.3), scale_of(states)
    batch = some_batch(states)
    ids = drafter.draft_ids.numpy()
    terms: dict[str, list[float]] = {"ce": [], "l1": [], "confidence": []}
    weights: dict[str, list[float]] = {"ce": [], "l1": [], "confidence": []}
    with torch.no_grad():
        got = BlockLoss(drafter, config, scale)(batch).tolist()
        hidden = block_hidden(drafter, batch, batch.taps / scale)
        for row, pick, slot in batch.valid.nonzero().tolist():
            at = int(batch.anchors[row, pick]) + slot
            previous, label = int(batch.ids[row, at]), int(batch.ids[row, at + 1])
            state = hidden[row, pick, slot]
            bias = drafter.markov_head.bias(drafter.markov_head.embed(torch.tensor(previous)))
            log_draft = log_softmax((drafter.lm_head(state) + bias).double().numpy())
            draft = np.zeros(target.vocab_size)
            draft[ids] = np.exp(log_draft)
            distance = np.abs(draft - softmax(target.logits(batch.final[row, at]).double().numpy()))
            survival = 1 - distance.sum() / 2
            logit = float(drafter.confidence_logits(state, torch.tensor(previous)))
            weight = float(np.exp(-slot / 2))
            if label in ids:
                terms["ce"].append(-log_draft[ids.tolist().index(label)])
                weights["ce"].append(weight)
            terms["l1"].append(distance.sum())
            terms["confidence"].append(np.logaddexp(0, logit) - survival * logit)
            weights["l1"].append(weight)
            weights["confidence"].append(weight)
    expected = [np.average(terms[name], weights=weights[name]) for name in terms]
    total = np.dot(expected, [0.3, 0.9, 1.0])
    assert got == pytest.approx([total, *expected], rel=1e-4)


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("with_markov", [True, False])
def test_every_parameter_of_the_drafter_learns(
    target: Target, states: StateCache, head: str, with_markov: bool
) -> None:
    shape = replace(SHAPE, markov_head_type=head, confidence_head_with_markov=with_markov)
    drafter = speaking(new_drafter(shape, target, 0, PART))
    BlockLoss(drafter, settings(), scale_of(states))(some_batch(states))[0].backward()
    still = [name for name, value in drafter.named_parameters() if value.grad is None]
    assert still == []
    assert all(value.grad.abs().max() > 0 for value in drafter.parameters())
    assert all(value.grad is None for value in target.model.parameters())


def test_a_bfloat16_target_trains_a_float32_drafter(target_path: Path, states: StateCache) -> None:
    target = load_target(target_path, "cpu", torch.bfloat16)
    drafter = new_drafter(SHAPE, target, 0)
    BlockLoss(drafter, settings(), scale_of(states))(some_batch(states))[0].backward()
    gradients = [value.grad for value in drafter.parameters()]
    assert all(grad is not None and grad.isfinite().all() for grad in gradients)
    assert {grad.dtype for grad in gradients if grad is not None} == {torch.float32}


@pytest.mark.parametrize("draft_ids", [None, PART], ids=["whole", "part"])
def test_a_packed_target_trains_the_same(
    target: Target, target_path: Path, states: StateCache, draft_ids: torch.Tensor | None
) -> None:
    """Packing is for decoding: no gradient passes a packed layer, and none may be lost there."""
    packed = load_target(target_path, "cpu", torch.float32)
    packed.pack()
    gradients = []
    for theirs in (target, packed):
        drafter = speaking(new_drafter(SHAPE, theirs, 0, draft_ids))
        BlockLoss(drafter, settings(), scale_of(states))(some_batch(states))[0].backward()
        gradients.append({name: value.grad for name, value in drafter.named_parameters()})
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, atol=1e-5, rtol=1e-3, msg=name)


def test_a_step_is_the_mean_of_its_passes(target: Target, states: StateCache) -> None:
    """Losses and gradient; the gradient is cut to `grad_clip` as a whole."""
    halves = [some_batch(states, 2), some_batch(states, 4)]
    alone = [
        one_step(target, states, [half], settings(accumulate=1, grad_clip=1e9)) for half in halves
    ]
    both = one_step(target, states, halves, settings(accumulate=2, grad_clip=1e9))
    torch.testing.assert_close(both[0], (alone[0][0] + alone[1][0]) / 2)
    torch.testing.assert_close(both[1], (alone[0][1] + alone[1][1]) / 2, atol=1e-6, rtol=1e-4)
    clipped = one_step(target, states, halves, settings(accumulate=2, grad_clip=0.2))
    assert both[1].norm() > 0.4 and clipped[1].norm() == pytest.approx(0.2, rel=1e-3)


def one_step(
    target: Target, states: StateCache, batches: list[Batch], config: TrainConfig
) -> tuple[torch.Tensor, torch.Tensor]:
    """The terms of a step, and the gradient that it went by (plain descent: the change itself)."""
    drafter = new_drafter(SHAPE, target, 0)
    before = torch.nn.utils.parameters_to_vector(drafter.parameters()).detach().clone()
    model = BlockLoss(drafter, config, scale_of(states))
    optimizer = torch.optim.SGD(drafter.parameters(), lr=1.0)
    terms, tokens = train_step(model, [optimizer], iter(batches), config, target)
    assert tokens == sum(batch.ids.numel() for batch in batches)
    after = torch.nn.utils.parameters_to_vector(drafter.parameters()).detach()
    return terms, before - after


def test_compiled_losses_are_the_losses(target: Target, states: StateCache) -> None:
    terms, changes = zip(
        *(
            one_step(target, states, [some_batch(states)], settings(compile=compiled))
            for compiled in (False, True)
        ),
        strict=True,
    )
    torch.testing.assert_close(terms[1], terms[0])
    torch.testing.assert_close(changes[1], changes[0], atol=1e-6, rtol=1e-4)


def test_a_step_of_a_bfloat16_target_goes_where_a_float32_one_goes(
    target: Target, target_path: Path, states: StateCache
) -> None:
    half = load_target(target_path, "cpu", torch.bfloat16)
    batch = some_batch(states)
    exact = one_step(target, states, [batch], settings(grad_clip=1e9))
    rounded = one_step(half, states, [batch], settings(grad_clip=1e9))
    torch.testing.assert_close(rounded[0], exact[0], atol=0.02, rtol=0.02)
    assert torch.cosine_similarity(rounded[1], exact[1], dim=0) > 0.98
    assert not rounded[1].equal(exact[1])


# --------------------------------------------------------------------------- how long


def test_the_learning_rate_warms_up_and_falls_to_nothing() -> None:
    rates = [learning_rate(step, 100, TrainConfig()) for step in range(100)]
    assert rates[:4] == pytest.approx([1.5e-4, 3e-4, 4.5e-4, 6e-4])
    assert rates[4] == pytest.approx(6e-4)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert rates[52] == pytest.approx(3e-4)  # half way down
    assert 0 < rates[-1] < 1e-6
    assert learning_rate(0, 1, TrainConfig()) == pytest.approx(6e-4)


def test_a_constant_rate_stays_after_the_warm_up() -> None:
    config = TrainConfig(schedule=LearningRate.constant, warmup=0.1)
    rates = [learning_rate(step, 40, config) for step in range(40)]
    assert rates[:4] == pytest.approx([1.5e-4, 3e-4, 4.5e-4, 6e-4])
    assert set(rates[4:]) == {6e-4}


def test_training_stops_when_nothing_gets_better(predictable: Predictable, tmp_path: Path) -> None:
    """At a rate of 0 the first validation is the best; two more are waited for, even by a rerun."""
    config = settings(lr=0.0, validate_every=2, patience=2, epochs=9.0, anchors=2)
    for _ in range(2):
        fit(predictable.target, predictable.states, config, tmp_path)
        steps = [line["step"] for line in read_curve(tmp_path / "curve.jsonl")]
        assert steps == [1, 2, 2, 3, 4, 4, 5, 6, 6]
    shutil.rmtree(tmp_path / "best")
    more = replace(config, patience=0, epochs=1.0)
    fit(predictable.target, predictable.states, more, tmp_path)
    assert read_curve(tmp_path / "curve.jsonl")[-1]["step"] == 9  # never is never
    assert (tmp_path / "best" / "config.json").is_file()
