"""Training end to end on a tiny target: the drafter learns, the target stays as it is."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from dspark.config import DrafterShape, TrainConfig
from dspark.decode.cache import SlotCache
from dspark.decode.draft import propose, write_context
from dspark.decode.engine import Engine, Request
from dspark.decode.sampling import Sampling
from dspark.errors import UserError
from dspark.models.checkpoint import load_drafter
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target, load_target
from dspark.train.blocks import make_blocks, target_states
from dspark.train.start import new_drafter
from dspark.train.synthesize import Conversation
from dspark.train.trainer import frequent_tokens, learning_rate, train, train_step, validate

SHAPE = DrafterShape(layers=1, taps=2, block_size=4, markov_rank=32)


def config(**changes: object) -> TrainConfig:
    fields: dict[str, object] = {"shape": SHAPE, "held_out": 16, "batch": 8, "anchors": 16}
    return TrainConfig(**{**fields, "lr": 5e-3, **changes})  # type: ignore[arg-type]


def one_step(
    target: Target, drafter: DSparkDrafter, batch: list[Conversation], **changes: object
) -> None:
    generator = torch.Generator().manual_seed(0)
    blocks = make_blocks(batch, 8, drafter.block_size, generator)
    frequent = frequent_tokens(batch, target.vocab_size)
    train_step(drafter, target, blocks, config(**changes), frequent, generator)


def weights_of(drafter: DSparkDrafter) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in drafter.state_dict().items()}


@dataclass
class Trained:
    """A drafter before and after sixty steps."""

    target: Target
    held_out: list[Conversation]
    settings: TrainConfig
    before: list[float]
    after: list[float]
    path: Path


@pytest.fixture(scope="module")
def trained(
    predictable: tuple[Target, list[Conversation]], tmp_path_factory: pytest.TempPathFactory
) -> Trained:
    target, conversations = predictable
    settings = config(epochs=6.0, anchors=32, lr=2e-2)
    untrained = new_drafter(settings.shape, target, settings.seed)
    held_out = conversations[: settings.held_out]
    before = validate(untrained, target, held_out, settings)
    path = tmp_path_factory.mktemp("trained") / "drafter"
    after = train(target, conversations, settings, path)
    return Trained(target, held_out, settings, before, after, path)


def test_sixty_steps_make_drafts_that_are_accepted(trained: Trained) -> None:
    """From one token in two drafts to more than one a draft.

    The untrained drafter hands the anchor through, which tells this target's next token at times,
    and knows nothing of the tokens after it.
    """
    before, after = trained.before, trained.after
    assert sum(before) < 0.6 and before[1] < 0.05
    assert sum(after) > sum(before) + 0.5 and after[1] > 0.2
    assert after == sorted(after, reverse=True)  # unconditional: a position needs those before it


def test_what_is_written_is_what_was_measured(trained: Trained) -> None:
    """Up to the rounding to bfloat16, by validation as by decoding."""
    target = trained.target
    written = load_drafter(trained.path, target)
    again = validate(written, target, trained.held_out, trained.settings)
    assert again == pytest.approx(trained.after, abs=0.05)
    engine = Engine(target, written, k=4, capacity=80)
    row = engine.admit(Request("p", 1, [4], 60), 0.0)
    while row.finish_reason is None:
        engine.step()
    assert sum(step.accepted for step in row.steps) / len(row.steps) > 0.7


def test_validation_counts_what_drafting_would_have_accepted(trained: Trained) -> None:
    """All anchors of a conversation, drafted one by one through the cache that inference uses."""
    target, item = trained.target, trained.held_out[3]
    drafter = load_drafter(trained.path, target)
    size = drafter.block_size
    ids = torch.tensor([item.prompt_ids + item.response_ids])
    matched = [0] * size
    _, taps = target_states(target, ids, drafter.target_layer_ids)
    anchors = range(len(item.prompt_ids), ids.shape[1] - size)
    for anchor in anchors:
        cache = SlotCache(len(drafter.layers), 1, anchor + size)
        write_context(drafter, cache, slice(0, 1), taps[:, :anchor], torch.arange(anchor)[None])
        start = torch.tensor([anchor])
        draft = propose(drafter, cache, ids[0, start], start, anchor, size, [Sampling()])
        agree = draft.tokens[0] == ids[0, anchor + 1 : anchor + 1 + size]
        for slot, run in enumerate(agree.long().cumprod(0).tolist()):
            matched[slot] += run
    expected = [count / len(anchors) for count in matched]
    assert expected[1] > 0.1  # there is something to count
    all_anchors = config(anchors=40)
    assert validate(drafter, target, [item], all_anchors) == pytest.approx(expected)


def test_the_same_seed_trains_the_same_drafter(
    target: Target, conversations: list[Conversation], tmp_path: Path
) -> None:
    for folder, seed in (("one", 0), ("same", 0), ("other", 1)):
        train(target, conversations[:48], config(epochs=0.5, seed=seed), tmp_path / folder)
    one, same, other = (
        (tmp_path / folder / "model.safetensors").read_bytes()
        for folder in ("one", "same", "other")
    )
    assert one == same != other


def test_validation_without_conversations_is_zero(target: Target) -> None:
    drafter = new_drafter(SHAPE, target, 0)
    assert validate(drafter, target, [], config()) == [0.0] * SHAPE.block_size


@pytest.mark.parametrize("head", ["vanilla", "gated", "rnn"])
@pytest.mark.parametrize("with_markov", [True, False])
def test_every_parameter_of_the_drafter_learns_and_none_of_the_target(
    target: Target, conversations: list[Conversation], head: str, with_markov: bool
) -> None:
    shape = DrafterShape(
        taps=2, block_size=4, markov_head_type=head, confidence_head_with_markov=with_markov
    )
    drafter = new_drafter(shape, target, 0)
    torch.nn.init.normal_(drafter.markov_head.markov_w2.weight)
    before = {name: value.clone() for name, value in target.model.state_dict().items()}
    one_step(target, drafter, conversations[:4])
    still = [name for name, value in drafter.named_parameters() if value.grad is None]
    assert still == []
    assert all(value.grad.abs().max() > 0 for value in drafter.parameters())
    assert all(value.grad is None for value in target.model.parameters())
    assert all(value.equal(before[name]) for name, value in target.model.state_dict().items())


def test_a_few_candidates_are_enough_for_a_step(
    target: Target, conversations: list[Conversation]
) -> None:
    """Only the candidates' rows of the Markov head's output are touched."""
    drafter = new_drafter(SHAPE, target, 0)
    one_step(target, drafter, conversations[:2], candidates=20)
    gradient = drafter.markov_head.markov_w2.weight.grad
    assert gradient is not None
    labels = {token for item in conversations[:2] for token in item.response_ids}
    touched = int((gradient.abs().sum(-1) > 0).sum())
    assert 0 < touched <= 20 + len(labels) < target.vocab_size


def test_a_bfloat16_target_trains_a_float32_drafter(
    target_path: Path, conversations: list[Conversation]
) -> None:
    target = load_target(target_path, "cpu", torch.bfloat16)
    drafter = new_drafter(SHAPE, target, 0)
    one_step(target, drafter, conversations[:2])
    assert {value.grad.dtype for value in drafter.parameters() if value.grad is not None} == {
        torch.float32
    }
    assert all(
        value.grad is not None and value.grad.isfinite().all() for value in drafter.parameters()
    )


def test_a_new_drafter_starts_from_the_parallel_draft(target: Target) -> None:
    drafter = new_drafter(SHAPE, target, 0)
    assert not drafter.markov_head.markov_w2.weight.any()
    assert {value.dtype for value in drafter.parameters()} == {torch.float32}
    assert drafter.config.num_target_layers == target.num_layers
    assert drafter.target_layer_ids == [1, 2]


def test_a_new_drafter_depends_on_its_seed_alone(target: Target) -> None:
    one, same, other = (weights_of(new_drafter(SHAPE, target, seed)) for seed in (1, 1, 2))
    assert all(value.equal(same[name]) for name, value in one.items())
    assert not one["fc.weight"].equal(other["fc.weight"])


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        (DrafterShape(target_layer_ids=[0, 3]), r"target_layer_ids \[3\] lie outside -1\.\.2"),
        (DrafterShape(mask_token_id=300), "mask_token_id 300 is not in the target's vocabulary"),
        (DrafterShape(markov_head_type="gatd"), "markov_head_type 'gatd' is unknown: .*'gated'"),
        (DrafterShape(markov_rank=0), "markov_rank is 0"),
    ],
)
def test_a_shape_that_cannot_work_is_refused(
    target: Target, shape: DrafterShape, message: str
) -> None:
    with pytest.raises(UserError, match=message):
        new_drafter(shape, target, 0)


def test_too_few_conversations_are_refused_before_anything_is_written(
    target: Target, conversations: list[Conversation], tmp_path: Path
) -> None:
    with pytest.raises(UserError, match="20 conversations are too few: held_out takes 16"):
        train(target, conversations[:20], config(), tmp_path / "drafter")
    assert not (tmp_path / "drafter").exists()


def test_the_learning_rate_warms_up_and_falls_to_nothing() -> None:
    rates = [learning_rate(step, 100, TrainConfig()) for step in range(100)]
    assert rates[:4] == pytest.approx([1.5e-4, 3e-4, 4.5e-4, 6e-4])
    assert rates[4] == pytest.approx(6e-4)
    assert rates[4:] == sorted(rates[4:], reverse=True)
    assert 0 < rates[-1] < 1e-6
    assert learning_rate(0, 1, TrainConfig()) == pytest.approx(6e-4)
