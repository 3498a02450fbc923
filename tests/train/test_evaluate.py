"""What validation counts is what decoding counts, step for step."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from train_helpers import SHAPE, Predictable, Training, decoded, shortened

from dspark.decode.engine import Engine, Request
from dspark.models.checkpoint import load_drafter
from dspark.models.drafter import DSparkDrafter
from dspark.train import evaluate as module
from dspark.train.evaluate import Acceptance, Drafts, draft_response, visited, walk
from tiny_models import save_tiny_drafter

BLOCK = 5


@pytest.fixture(scope="module")
def bigrams(predictable: Predictable, tmp_path_factory: pytest.TempPathFactory) -> DSparkDrafter:
    """A drafter of the target's most frequent bigrams."""
    path = tmp_path_factory.mktemp("bigrams") / "drafter"
    save_tiny_drafter(path, predictable.path, block_size=BLOCK)
    return load_drafter(path, predictable.target)


def check_against_decoding(predictable: Predictable, drafter: DSparkDrafter, k: int) -> Acceptance:
    """Every step of every response accepts as many tokens in validation as in decoding."""
    items = [predictable.states[index] for index in range(16)]
    drafts = [draft_response(drafter, item) for item in items]
    walked = [item.survived[visited(item, k), :k].sum(1).tolist() for item in drafts]
    accepted = decoded(predictable.target, drafter, items, k)
    assert walked == accepted
    acceptance, steps = walk(drafts, k), [count for row in accepted for count in row]
    assert acceptance.steps == len(steps) > 50
    assert acceptance.accept_len == pytest.approx(1 + sum(steps) / len(steps), abs=1e-9)
    for t in range(k):
        share = sum(count > t for count in steps) / len(steps)
        assert acceptance.unconditional[t] == pytest.approx(share, abs=1e-9)
    return acceptance


@pytest.mark.parametrize("k", [1, 3, BLOCK])
def test_validation_counts_what_decoding_counts(
    predictable: Predictable,
    bigrams: DSparkDrafter,
    k: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(module, "ANCHORS", 11)  # several passes a response
    acceptance = check_against_decoding(predictable, bigrams, k)
    assert 0.1 < acceptance.unconditional[0] < 0.9  # there is something to count


@pytest.mark.parametrize("k", [3, SHAPE.block_size])
def test_a_reduced_draft_vocabulary_counts_the_same(
    predictable: Predictable, training: Training, k: int
) -> None:
    drafter = load_drafter(training.folder / "best", predictable.target)
    assert drafter.d2t is not None
    check_against_decoding(predictable, drafter, k)


@pytest.mark.parametrize("k", [3, SHAPE.block_size])
def test_what_training_reports_of_its_best_is_what_decoding_measures(
    predictable: Predictable, training: Training, k: int
) -> None:
    """Up to the rounding of the checkpoint to bfloat16."""
    best = max(training.validations, key=lambda line: line["accept_len_k3"])
    drafter = load_drafter(training.folder / "best", predictable.target)
    items = [predictable.states[index] for index in range(training.config.held_out)]
    steps = [n for row in decoded(predictable.target, drafter, items, k) for n in row]
    assert 1 + sum(steps) / len(steps) == pytest.approx(best[f"accept_len_k{k}"], abs=0.05)


def test_drafts_hold_the_confidence_of_every_anchor(
    predictable: Predictable, bigrams: DSparkDrafter
) -> None:
    """A row an anchor; `valid` ends where the response does, and nothing survives beyond."""
    item = predictable.states[4]
    drafts = draft_response(bigrams, item)
    count = len(item.ids) - item.response_start - 1
    assert drafts.survived.shape == drafts.confidence.shape == drafts.valid.shape == (count, BLOCK)
    assert drafts.valid.sum(1).tolist() == [min(BLOCK, count - row) for row in range(count)]
    assert not (drafts.survived & ~drafts.valid).any()
    assert drafts.confidence.isfinite().all() and drafts.confidence.std() > 0
    assert drafts.confidence.dtype == torch.float32


def test_confidences_are_those_that_the_decoder_sees(
    predictable: Predictable, bigrams: DSparkDrafter
) -> None:
    item, k = predictable.states[3], BLOCK
    drafts, seen = draft_response(bigrams, item), []
    ids = item.ids.tolist()
    engine = Engine(
        predictable.target,
        bigrams,
        k=k,
        capacity=len(ids),
        trace=lambda draft: seen.append(draft.confidence[0]),
    )
    prompt = ids[: item.response_start]
    row = engine.admit(Request("p", 0, prompt, len(ids) - len(prompt)), 0.0)
    while row.finish_reason is None:
        engine.step()
    rows = visited(drafts, k)
    torch.testing.assert_close(
        drafts.confidence[rows], torch.stack(seen[: len(rows)]), atol=1e-4, rtol=1e-4
    )


@pytest.mark.parametrize("length", [2, BLOCK, BLOCK + 1, BLOCK + 2])
def test_a_response_too_short_for_a_block_has_no_steps(
    predictable: Predictable, bigrams: DSparkDrafter, length: int
) -> None:
    item = predictable.states[0]
    short = shortened(item, item.response_start + length)
    drafts = draft_response(bigrams, short)
    assert len(drafts.survived) == length - 1
    # A block of k tokens and a bonus token after the first token, which the prefill gives.
    assert len(visited(drafts, BLOCK)) == int(length >= BLOCK + 2)


# --------------------------------------------------------------------------- counting


@st.composite
def responses(draw: st.DrawFn) -> list[Drafts]:
    """Drafts of some responses, at least one of which is long enough to count."""
    size = draw(st.integers(1, 5))
    drafts = []
    for _ in range(draw(st.integers(1, 4))):
        anchors = draw(st.integers(0, 14))
        accepted = [draw(st.integers(0, min(size, anchors - row))) for row in range(anchors)]
        survived = torch.tensor(accepted, dtype=torch.long)[:, None] > torch.arange(size)
        valid = torch.arange(size) < (anchors - torch.arange(anchors))[:, None]
        drafts.append(Drafts(survived, torch.zeros(anchors, size), valid))
    return drafts


@settings(max_examples=200, deadline=None)
@given(drafts=responses(), data=st.data())
def test_the_walk_goes_from_bonus_token_to_bonus_token(
    drafts: list[Drafts], data: st.DataObject
) -> None:
    k = data.draw(st.integers(1, drafts[0].survived.shape[1]))
    counts: list[int] = []
    for item in drafts:
        rows = visited(item, k).tolist()
        steps = [int(item.survived[row, :k].sum()) for row in rows]
        anchors = len(item.survived)
        assert all(row + k < anchors for row in rows)
        if anchors > k:
            assert rows[0] == 0 and rows[-1] + steps[-1] + 1 + k >= anchors  # as far as it can
        assert [after - before for before, after in pairwise(rows)] == [n + 1 for n in steps[:-1]]
        counts += steps
    acceptance = walk(drafts, k)
    assert acceptance.k == k and acceptance.steps == len(counts)
    assert len(acceptance.unconditional) == len(acceptance.conditional) == k
    assert acceptance.unconditional == sorted(acceptance.unconditional, reverse=True)
    assert acceptance.accept_len == pytest.approx(1 + sum(acceptance.unconditional))
    assert acceptance.accept_len == pytest.approx(1 + sum(counts) / max(1, len(counts)))
    product = 1.0
    for unconditional, conditional in zip(
        acceptance.unconditional, acceptance.conditional, strict=True
    ):
        assert 0 <= conditional <= 1
        product *= conditional
        assert unconditional == pytest.approx(product)


def test_no_step_is_no_acceptance() -> None:
    empty = torch.zeros(2, 3)
    drafts = Drafts(empty.bool(), empty, empty.bool())
    assert walk([drafts], 3) == Acceptance(3, 0, [0.0] * 3, [0.0] * 3, 1.0)
