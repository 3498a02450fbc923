"""Our drafter computes what an independent implementation of DSpark computed, to 1e-4."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from dspark.decode.draft import Draft
from dspark.decode.engine import Engine, Request
from dspark.models.checkpoint import load_drafter
from dspark.models.target import load_target

DRAFTERS = [
    f"{head}_{confidence}"
    for head in ("vanilla", "gated", "rnn")
    for confidence in ("confmarkov", "confhidden")
]
STEPS = 6


@pytest.mark.parametrize("name", DRAFTERS)
def test_states_logits_and_confidences_match_the_reference(golden: Path, name: str) -> None:
    """Four prompts, the first six steps of each, along the greedy trace."""
    target = load_target(golden / "target", "cpu", torch.float32)
    drafter = load_drafter(golden / name, target)
    expected = load_file(golden / name / "expected.safetensors")
    prompts = json.loads((golden / "traces.json").read_text())["prompts"]
    compared = 0
    for index, tokens in enumerate(prompts):
        drafts: list[Draft] = []
        engine = Engine(target, drafter, k=7, capacity=128, trace=drafts.append)
        engine.admit(Request(str(index), 1, tokens, 48), 0.0)
        for step in range(STEPS):
            engine.step()
            parts = {
                "block_hidden": drafts[step].hidden,
                "draft_logits": drafts[step].logits,
                "confidence_logits": drafts[step].confidence,
            }
            for part, ours in parts.items():
                theirs = expected[f"p{index}.s{step}.{part}"]
                torch.testing.assert_close(
                    ours[0], theirs, atol=1e-4, rtol=0, msg=lambda m, part=part: f"{part}: {m}"
                )
                compared += 1
    assert compared == len(expected)
