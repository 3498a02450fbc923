"""Greedy speculative text is the baseline's, whatever is drafted and whoever shares the batch."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache

import pytest
import torch
from decode_helpers import (
    VOCAB,
    alone,
    drafting,
    make_bigram_drafter,
    make_drafter,
    make_target,
    need,
    outputs,
    request,
    serve,
)
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.decode.engine import Engine, Request, Row
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target

LONGEST = 32
FAMILIES = {"llama": 20.0, "qwen2": 20.0, "qwen3": 20.0, "gemma3": 1.0, "mistral": 20.0}


@cache
def models(family: str = "llama") -> tuple[Target, DSparkDrafter]:
    """A target and a drafter, some of whose tokens are accepted."""
    target = make_target(family, embed=FAMILIES[family])
    return target, make_bigram_drafter(target)


@cache
def prompt(number: int) -> tuple[int, ...]:
    chance = random.Random(number)
    return tuple(chance.randrange(VOCAB) for _ in range(chance.randint(1, 40)))


@cache
def plain(number: int, family: str = "llama") -> tuple[int, ...]:
    """The baseline's text at batch 1."""
    return tuple(alone(models(family)[0], request(number, prompt(number), LONGEST)).output)


def oracle(row: Row, k: int, text: tuple[int, ...]) -> list[int]:
    rest = list(text[len(row.output) :][:k])
    return rest + [0] * (k - len(rest))


def wrong(row: Row, k: int, text: tuple[int, ...]) -> list[int]:
    return [(token + 1) % VOCAB for token in oracle(row, k, text)]


def alternating(row: Row, k: int, text: tuple[int, ...]) -> list[int]:
    return (wrong if len(row.steps) % 2 else oracle)(row, k, text)


def half_right(row: Row, k: int, text: tuple[int, ...]) -> list[int]:
    return oracle(row, k, text)[: k // 2] + wrong(row, k, text)[k // 2 :]


def noise(row: Row, k: int, text: tuple[int, ...]) -> list[int]:
    chance = random.Random(f"{row.request.prompt_id}/{len(row.output)}")
    return [chance.randrange(VOCAB) for _ in range(k)]


work = st.lists(
    st.tuples(st.integers(0, 30), st.integers(1, LONGEST)),
    min_size=1,
    max_size=9,
    unique_by=lambda item: item[0],
)


def requests_of(wanted: list[tuple[int, int]]) -> list[Request]:
    return [request(number, prompt(number), new) for number, new in wanted]


@settings(deadline=None, max_examples=40)
@given(wanted=work, slots=st.integers(1, 4), k=st.integers(1, 7), real=st.booleans())
def test_a_drafter_never_changes_the_text(
    wanted: list[tuple[int, int]], slots: int, k: int, real: bool
) -> None:
    target, drafter = models()
    drafter = drafter if real else make_drafter(target, seed=3)
    requests = requests_of(wanted)
    engine = Engine(target, drafter, k=k, concurrency=slots, capacity=need(requests))
    rows = serve(engine, requests)
    assert outputs(rows) == {str(n): list(plain(n)[:new]) for n, new in wanted}


@pytest.mark.parametrize("propose", [oracle, wrong, alternating, half_right, noise])
@settings(deadline=None, max_examples=20)
@given(wanted=work, slots=st.integers(1, 4), k=st.integers(1, 7))
def test_no_proposal_changes_the_text(
    propose: Callable[[Row, int, tuple[int, ...]], list[int]],
    wanted: list[tuple[int, int]],
    slots: int,
    k: int,
) -> None:
    target, drafter = models()
    requests = requests_of(wanted)
    engine = Engine(target, drafter, k=k, concurrency=slots, capacity=need(requests))
    with drafting(engine, lambda row, k: propose(row, k, plain(int(row.request.prompt_id)))):
        rows = serve(engine, requests)
    assert outputs(rows) == {str(n): list(plain(n)[:new]) for n, new in wanted}


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("k", range(1, 8))
def test_every_k_on_every_family(family: str, k: int) -> None:
    """Windowed layers too: prompts and texts are longer than the window of gemma3 and mistral."""
    target, drafter = models(family)
    requests = requests_of([(number, 24) for number in (0, 1, 2, 3, 4)])
    engine = Engine(target, drafter, k=k, concurrency=3, capacity=need(requests))
    rows = serve(engine, requests)
    assert outputs(rows) == {str(n): list(plain(n, family)[:24]) for n in range(5)}
    accepted = sum(step.accepted for row in rows.values() for step in row.steps)
    assert 0 < accepted < k * sum(len(row.steps) for row in rows.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_decoding_is_the_model_called_on_the_whole_text(family: str) -> None:
    """The other tests compare with plain decoding; this one compares that with transformers."""
    target, _ = models(family)
    for number in range(4):
        text = torch.tensor([[*prompt(number), *plain(number, family)]])
        with torch.no_grad():
            logits = target.model(input_ids=text).logits[0]
        first = len(prompt(number)) - 1
        assert logits[first:-1].argmax(-1).tolist() == list(plain(number, family))


@pytest.mark.parametrize("k", [1, 3, 7])
def test_the_oracle_is_accepted_whole_for_hundreds_of_tokens(k: int) -> None:
    """A context that drifts by one position a round shows only after many of them."""
    target, drafter = models()
    items = [request("a", prompt(1), 240), request("b", prompt(2), 200), request("c", [5], 230)]
    texts = {item.prompt_id: tuple(alone(target, item).output) for item in items}
    engine = Engine(target, drafter, k=k, concurrency=2, capacity=need(items))
    with drafting(engine, lambda row, k: oracle(row, k, texts[row.request.prompt_id])):
        rows = serve(engine, items)
    assert outputs(rows) == {name: list(text) for name, text in texts.items()}
    for row in rows.values():
        assert all(step.accepted == k and step.emitted == k + 1 for step in row.steps[:-1])
        assert len(row.steps) == -(-(row.request.max_new_tokens - 1) // (k + 1))


def test_nothing_of_an_always_wrong_drafter_is_accepted() -> None:
    target, drafter = models()
    item = request("a", prompt(3), LONGEST)
    engine = Engine(target, drafter, k=4, capacity=need([item]))
    with drafting(engine, lambda row, k: wrong(row, k, plain(3))):
        row = serve(engine, [item])["a"]
    assert [step.accepted for step in row.steps] == [0] * (LONGEST - 1)
    assert row.output == list(plain(3))


def test_first_token_comes_from_the_same_prefill_in_both_modes() -> None:
    target, drafter = models()
    for number in range(8):
        item = request(number, prompt(number), 1)
        assert alone(target, item, drafter, 7).output == alone(target, item).output


def test_a_drafter_of_noise_changes_nothing_but_acceptance() -> None:
    target, _ = models()
    drafter = make_bigram_drafter(target)
    torch.manual_seed(0)
    with torch.no_grad():
        for weight in drafter.parameters():
            weight.add_(torch.randn_like(weight))
    requests = requests_of([(number, 20) for number in range(6)])
    engine = Engine(target, drafter, k=5, concurrency=4, capacity=need(requests))
    assert outputs(serve(engine, requests)) == {str(n): list(plain(n)[:20]) for n in range(6)}
