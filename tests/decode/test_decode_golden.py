"""Parity with an independent implementation's greedy traces, step by step."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import pytest
from decode_helpers import request

from dspark.decode.draft import Draft
from dspark.decode.engine import Engine


@dataclass
class Traced:
    anchor_position: int
    anchor_token: int
    draft_tokens: list[int]
    verified: int
    accepted: int
    next_token: int


def replay(golden: Any, case: dict[str, Any], k: int, new: int) -> tuple[list[Traced], list[int]]:
    """The steps of one case with `k` draft tokens, and the text."""
    drafts: list[Draft] = []
    prompt = golden.prompts[case["prompt"]]
    engine = Engine(
        golden.target,
        golden.drafter(case["checkpoint"]),
        k=k,
        capacity=len(prompt) + new,
        confidence_threshold=case["confidence_threshold"],
        trace=drafts.append,
    )
    row = engine.admit(request("p", prompt, new), 0.0)
    steps = []
    while row.finish_reason is None:
        position, anchor = row.start, row.newest
        engine.step()
        done = row.steps[-1]
        if not done.cut:
            tokens = drafts[-1].tokens[0].tolist()
            traced = Traced(position, anchor, tokens, done.verified, done.accepted, row.newest)
            steps.append(traced)
    return steps, row.output


CASES = range(48)


@pytest.mark.parametrize("number", CASES)
def test_trace_is_replayed_exactly(golden: Any, number: int) -> None:
    case = golden.cases[number]
    steps, output = replay(golden, case, 7, new=60)
    traced = case["steps"]
    assert [asdict(step) for step in steps[: len(traced)]] == traced
    assert output[:48] == golden.greedy[case["prompt"]]


def test_both_thresholds_and_every_checkpoint_are_among_the_cases(golden: Any) -> None:
    assert len(golden.cases) == len(CASES)
    assert {case["confidence_threshold"] for case in golden.cases} == {0.0, 0.5}
    assert len({case["checkpoint"] for case in golden.cases}) == 6


@pytest.mark.parametrize("k", range(1, 7))
def test_smaller_k_verifies_the_first_k_of_the_same_block(golden: Any, k: int) -> None:
    for case in golden.cases[k::9]:
        blocks = {
            (step["anchor_position"], step["anchor_token"]): step["draft_tokens"]
            for step in case["steps"]
        }
        steps, output = replay(golden, case, k, new=48)
        shared = 0
        for step in steps:
            block = blocks.get((step.anchor_position, step.anchor_token))
            if block is not None:  # the same anchor on the same (greedy) text
                assert step.draft_tokens == block[:k]
                shared += 1
        assert shared > 0
        assert all(len(step.draft_tokens) == k and step.verified <= k for step in steps)
        assert output == golden.greedy[case["prompt"]]


@pytest.mark.parametrize("number", range(0, 48, 5))
def test_cases_replayed_together_in_one_batch_keep_their_text(golden: Any, number: int) -> None:
    case = golden.cases[number]
    engine = Engine(
        golden.target,
        golden.drafter(case["checkpoint"]),
        k=7,
        concurrency=len(golden.prompts),
        capacity=100,
        confidence_threshold=case["confidence_threshold"],
    )
    rows = [
        engine.admit(request(index, prompt, 48), 0.0) for index, prompt in enumerate(golden.prompts)
    ]
    while engine.active:
        engine.step()
    assert [row.output for row in rows] == golden.greedy
