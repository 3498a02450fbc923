"""A long prompt goes through the target in parts, and nothing depends on how it is cut."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from decode_helpers import VOCAB, make_drafter, make_target, need, request, serve

from dspark.decode import engine as engine_module
from dspark.decode.draft import Draft
from dspark.decode.engine import Engine

LONG = torch.randint(VOCAB, (23,), generator=torch.Generator().manual_seed(4)).tolist()


@pytest.mark.parametrize("family", ["llama", "gemma3", "qwen3"])
@pytest.mark.parametrize("part", [1, 7, 22, 23])
def test_text_and_drafts_are_those_of_a_whole_prefill(family: str, part: int) -> None:
    target = make_target(family)
    drafter = make_drafter(target)
    items = [request(0, LONG, 10), request(1, LONG[3:9], 10)]

    def run() -> tuple[dict[str, list[int]], list[Draft]]:
        drafts: list[Draft] = []
        engine = Engine(
            target, drafter, k=3, concurrency=2, capacity=need(items), trace=drafts.append
        )
        return {name: row.output for name, row in serve(engine, items).items()}, drafts

    whole, drafts = run()
    with patch.object(engine_module, "PREFILL", part):
        cut, redrafts = run()
    assert cut == whole
    for before, after in zip(drafts, redrafts, strict=True):
        torch.testing.assert_close(after.hidden, before.hidden, atol=1e-3, rtol=1e-3)


def test_no_pass_is_longer_than_a_part() -> None:
    target = make_target()
    widths = []
    forward = target.forward

    def watched(tokens, *args):  # type: ignore[no-untyped-def]
        widths.append(tokens.shape[1])
        return forward(tokens, *args)

    with patch.object(target, "forward", watched), patch.object(engine_module, "PREFILL", 10):
        serve(Engine(target, capacity=30), [request(0, LONG, 2)])
    assert widths == [10, 10, 3, 1]
