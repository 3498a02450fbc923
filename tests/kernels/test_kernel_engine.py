"""The whole engine on kernels: golden text and drafts, sampling, ragged batches, and broken weights."""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("triton", reason="kernels need triton")

from dspark.decode.draft import Draft
from dspark.decode.engine import Engine, Request, Row
from dspark.decode.sampling import Sampling
from dspark.errors import UserError
from dspark.kernels.switch import use_kernels
from dspark.models.checkpoint import load_drafter
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target, load_target

pytestmark = pytest.mark.filterwarnings(r"ignore:invalid value|All-NaN:RuntimeWarning:triton\.")

GOLDEN = Path(__file__).parents[2].parent / "shared" / "golden"
# What a step calls, by where it is looked up.
ENTRIES = {
    "layers": "run_layers",
    "markov_argmax": "markov_argmax",
    "greedy_accept": "accept_greedy",
    "rejection": "accept_sampled",
}


class Golden:
    """Checkpoints and greedy traces of an independent implementation."""

    def __init__(self, device: str) -> None:
        traces = json.loads((GOLDEN / "traces.json").read_text())
        self.prompts: list[list[int]] = traces["prompts"]
        self.greedy: list[list[int]] = traces["greedy"]
        self.cases: list[dict[str, Any]] = traces["cases"]
        self.device = device
        self.target = self.load()

    def load(self) -> Target:
        target = load_target(GOLDEN / "target", self.device, torch.float32)
        target.pack()
        return target

    @cache  # noqa: B019 - one object a module
    def drafter(self, checkpoint: str) -> DSparkDrafter:
        return load_drafter(GOLDEN / checkpoint, self.target)


@pytest.fixture(scope="module")
def golden(device: str) -> Golden:
    if not GOLDEN.is_dir():
        pytest.skip(f"the golden checkpoints are not at {GOLDEN}")
    return Golden(device)


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, int]]:
    """Kernels are on; how often a step went through each."""
    counts = dict.fromkeys(ENTRIES, 0)

    def counted(name: str, function: Any) -> Any:
        def call(*args: Any) -> Any:
            counts[name] += 1
            return function(*args)

        return call

    for name, entry in ENTRIES.items():
        module = import_module(f"dspark.kernels.{name}")
        monkeypatch.setattr(module, entry, counted(name, getattr(module, entry)))
    use_kernels(True)
    yield counts
    use_kernels(False)


PROMPTS = (1, 2)  # of 5 tokens, and of 17, which are left to PyTorch


def engine_of(golden: Golden, checkpoint: str | None, k: int, **settings: Any) -> Engine:
    drafter = golden.drafter(checkpoint) if checkpoint else None
    return Engine(golden.target, drafter, k=k, concurrency=len(PROMPTS), capacity=40, **settings)


def decode(engine: Engine, golden: Golden, new: int, sampling: Sampling | None = None) -> list[Row]:
    """Both prompts in one batch; their rows."""
    rows = [
        engine.admit(Request(str(n), 0, golden.prompts[n], new, sampling or Sampling()), 0.0)
        for n in PROMPTS
    ]
    while engine.active:
        engine.step()
    return rows


def test_plain_decoding_gives_the_golden_text(golden: Golden, calls: dict[str, int]) -> None:
    rows = decode(engine_of(golden, None, 0), golden, 8)
    assert [row.output for row in rows] == [golden.greedy[n][:8] for n in PROMPTS]
    # Seven steps, and the prompt that is short.
    assert calls == {"layers": 8, "markov_argmax": 0, "greedy_accept": 7, "rejection": 0}


def test_speculation_gives_the_golden_text(golden: Golden, calls: dict[str, int]) -> None:
    rows = decode(engine_of(golden, "vanilla_confmarkov", 3), golden, 9)
    assert [row.output for row in rows] == [golden.greedy[n][:9] for n in PROMPTS]
    assert sum(step.accepted for row in rows for step in row.steps) > 0
    steps = calls["greedy_accept"]
    assert calls == {
        "layers": steps + 1,
        "markov_argmax": 3 * steps,
        "greedy_accept": steps,
        "rejection": 0,
    }


def test_static_steps_give_the_golden_text(golden: Golden, calls: dict[str, int]) -> None:
    """Those that can be captured as graphs: filled up to buckets of rows and of positions."""
    rows = decode(engine_of(golden, "vanilla_confmarkov", 3, static=True), golden, 5)
    assert [row.output for row in rows] == [golden.greedy[n][:5] for n in PROMPTS]
    assert calls["layers"] == calls["greedy_accept"] + 1 > 1


@pytest.mark.parametrize("head", ["gated", "rnn"])
def test_drafts_are_the_golden_ones(head: str, golden: Golden, calls: dict[str, int]) -> None:
    case = next(
        case
        for case in golden.cases
        if case["checkpoint"] == f"{head}_confhidden"
        and case["prompt"] == PROMPTS[0]
        and case["confidence_threshold"] == 0.5
    )
    drafts: list[Draft] = []
    engine = engine_of(golden, case["checkpoint"], 7, confidence_threshold=0.5, trace=drafts.append)
    row = engine.admit(Request("p", 0, golden.prompts[PROMPTS[0]], 20), 0.0)
    for traced in case["steps"][:2]:
        engine.step()
        assert drafts[-1].tokens[0].tolist() == traced["draft_tokens"]
        assert row.steps[-1].verified == traced["verified"]
        assert row.steps[-1].accepted == traced["accepted"]
        assert row.newest == traced["next_token"]
    assert drafts[-1].logits.numel() == 0  # the kernel writes none
    assert calls["markov_argmax"] == 14


def test_rows_that_verify_different_numbers(golden: Golden, calls: dict[str, int]) -> None:
    engine = engine_of(golden, "vanilla_confhidden", 7, confidence_threshold=0.5)
    rows = decode(engine, golden, 7)
    assert [row.output for row in rows] == [golden.greedy[n][:7] for n in PROMPTS]
    steps = zip(*(row.steps for row in rows), strict=False)  # one may be done first
    assert any(a.verified != b.verified for a, b in steps)
    assert calls["greedy_accept"] > 0


def test_sampled_tokens_are_those_without_kernels(golden: Golden, calls: dict[str, int]) -> None:
    sampling = Sampling(temperature=0.7, top_p=0.9, seed=4)
    engine = engine_of(golden, "vanilla_confmarkov", 3)
    ours = decode(engine, golden, 5, sampling)
    assert calls["rejection"] > 0 and calls["greedy_accept"] == calls["markov_argmax"] == 0
    use_kernels(False)
    theirs = decode(engine, golden, 5, sampling)
    assert [row.output for row in ours] == [row.output for row in theirs]


def test_broken_states_are_noticed_and_the_layer_is_named(
    golden: Golden, calls: dict[str, int]
) -> None:
    engine = engine_of(golden, None, 0)
    engine.admit(Request("p", 0, golden.prompts[PROMPTS[0]], 8), 0.0)
    value = engine.cache.values[3]
    assert value is not None
    with torch.inference_mode():
        value[0, 1, 4, 2] = float("nan")
    message = (
        r"^request 'p#0', step 1: the target's logits are not finite, first in layer 3: fetch the "
    )
    with pytest.raises(UserError, match=message):
        engine.step()
    assert calls["layers"] == 3  # the prompt, the step, and once more to look
