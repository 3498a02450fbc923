"""A step whose logits are not finite is refused, with the request, the step and the layer."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from decode_helpers import (
    counting_target,
    drafting,
    make_drafter,
    make_target,
    outputs,
    request,
    serve,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from dspark.decode.engine import Engine
from dspark.decode.finite import BROKEN, likeliest, marked, marked_draft
from dspark.decode.sampling import Sampling
from dspark.errors import UserError
from dspark.models.target import Target

NAN, INF = float("nan"), float("inf")
BAD = 20  # the token that the broken counting targets stumble over
SAMPLED = Sampling(temperature=0.01, seed=3)  # of counting targets: the next number all the same


def stumble(target: Target, layer: int, value: float) -> None:
    """Let the output of a layer of a counting target be `value` where it reads BAD."""

    def hook(_module: nn.Module, _args: Any, output: Tensor) -> Tensor:
        return output.masked_fill(output[..., BAD, None] > 0.5, value)

    target.decoder.layers[layer].register_forward_hook(hook)


def refused(engine: Engine, *requests: Any) -> str:
    with pytest.raises(UserError) as caught:
        serve(engine, requests)
    return str(caught.value)


@pytest.mark.parametrize("value", [NAN, INF])
@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("layer", [0, 1])
def test_the_step_and_the_layer_where_it_began_are_named(
    layer: int, sampling: Sampling, value: float
) -> None:
    target = counting_target()
    stumble(target, layer, value)
    asked = request("p/7", [BAD - 3], 10, sampling=sampling)
    message = refused(Engine(target, capacity=20), asked)  # BAD is emitted by the second step
    assert message == (
        f"request 'p/7#0', step 3: the target's logits are not finite, first in layer {layer}: fetch "
        "the model again"
    )


def test_only_the_request_that_stumbles_is_named() -> None:
    target = counting_target()
    stumble(target, 1, NAN)
    asked = [request("low", [3], 10), request("high", [BAD - 3], 10, sampling=SAMPLED)]
    engine = Engine(target, concurrency=2, capacity=20)
    assert refused(engine, *asked).startswith("request 'high#0', step 3: ")


def test_a_prompt_that_breaks_the_target_is_named() -> None:
    target = counting_target()
    stumble(target, 0, NAN)
    for sampling in (Sampling(), SAMPLED):
        asked = request("p", [5, BAD], 3, sampling=sampling)
        message = refused(Engine(target, capacity=20), asked)
        assert message.startswith("request 'p#0', its prompt: the target's logits are not finite")
        assert "first in layer 0" in message


@pytest.mark.parametrize(
    ("break_it", "place"),
    [
        (lambda target: target.model.model.embed_tokens.weight[BAD].fill_(NAN), "the embeddings"),
        (lambda target: target.lm_head.weight[3].fill_(INF), "the final norm or LM head"),
    ],
    ids=["embeddings", "head"],
)
def test_before_and_behind_the_layers_there_are_places_too(break_it: Any, place: str) -> None:
    target = counting_target()
    with torch.no_grad():
        break_it(target)
    assert f"first in {place}: fetch" in refused(
        Engine(target, capacity=20), request("p", [BAD], 3)
    )


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_weights_laid_out_for_decoding_tell_the_layer_too(family: str) -> None:
    target = make_target(family)
    with torch.no_grad():
        target.decoder.layers[1].mlp.down_proj.weight[0, 0] = NAN
    target.pack()
    message = refused(Engine(target, capacity=20), request("p", [3, 4], 3))
    assert "its prompt: the target's logits are not finite, first in layer 1: fetch" in message


def test_a_coarse_precision_is_a_reason_to_try_the_finer_one() -> None:
    model = counting_target().model.to(torch.bfloat16)
    target = Target(model)
    stumble(target, 1, INF)
    message = refused(Engine(target, capacity=20), request("p", [BAD], 3))
    assert message.endswith(
        "first in layer 1: set engine.precision=float32, or fetch the model again"
    )


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_inside_a_verified_block_it_is_found_too(sampling: Sampling) -> None:
    target = counting_target()
    drafter = make_drafter(target, block_size=4)
    stumble(target, 1, NAN)
    engine = Engine(target, drafter, k=4, capacity=20)
    asked = request("p", [BAD - 3], 10, sampling=sampling)
    with drafting(engine, lambda row, k: [row.newest + 1 + i for i in range(k)]):
        assert "request 'p#0', step 1: the target's logits" in refused(engine, asked)


@pytest.mark.parametrize("sampling", [Sampling(), SAMPLED], ids=["greedy", "sampled"])
def test_logits_behind_a_rejected_draft_do_not_matter(sampling: Sampling) -> None:
    target = counting_target()
    drafter = make_drafter(target, block_size=4)
    stumble(target, 1, NAN)
    engine = Engine(target, drafter, k=2, capacity=20)
    asked = request("p", [3], 6, sampling=sampling)
    with drafting(engine, lambda row, k: [BAD] * k):  # never right, so never accepted
        assert outputs(serve(engine, [asked])) == {"p": [4, 5, 6, 7, 8, 9]}


@contextmanager
def broken_layer(drafter: Any, layer: int) -> Iterator[None]:
    weight = drafter.layers[layer].mlp.down_proj.weight
    kept = weight.detach().clone()
    with torch.no_grad():
        weight[0, 0] = NAN
        yield
        weight.copy_(kept)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("settings", [{}, {"confidence_threshold": 0.5}], ids=["all", "confident"])
def test_a_drafter_whose_states_are_not_finite_is_refused(
    layer: int, settings: dict[str, float]
) -> None:
    """Its drafts would merely be rejected: a speedup below 1 that nobody could explain."""
    target = make_target()
    drafter = make_drafter(target)
    engine = Engine(target, drafter, k=3, capacity=20, **settings)  # type: ignore[arg-type]
    with broken_layer(drafter, layer):
        message = refused(engine, request("p", [3, 4], 10))
    assert message == (
        f"request 'p#0', step 1: the drafter's states are not finite, first in layer {layer}: fetch "
        "the drafter again, or train it anew"
    )


def test_looking_leaves_no_trace() -> None:
    target = make_target()
    drafter = make_drafter(target)
    engine = Engine(target, drafter, k=3, capacity=20)
    with broken_layer(drafter, 1):
        refused(engine, request("p", [3, 4], 10))
    assert list(engine.taps) == drafter.target_layer_ids
    modules = [*target.model.modules(), *drafter.modules()]
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)


@given(
    rows=st.lists(
        st.lists(st.sampled_from([-INF, -2.0, 0.0, 1.5, 1e30, INF, NAN]), min_size=3, max_size=3),
        min_size=1,
        max_size=5,
    )
)
def test_the_likeliest_is_the_argmax_or_marked(rows: list[list[float]]) -> None:
    logits = torch.tensor(rows)
    for token, row, first in zip(likeliest(logits), rows, logits.argmax(-1), strict=True):
        greatest = NAN if any(value != value for value in row) else max(row)
        assert token == (first if abs(greatest) < INF else BROKEN)


def test_masked_out_tokens_are_no_fault() -> None:
    logits = torch.tensor([[[-INF, 2.0, -INF]]])
    assert likeliest(logits).tolist() == [[1]]
    assert marked(torch.tensor([1]), torch.tensor([0]), logits).tolist() == [1]


def test_a_token_counts_the_logits_up_to_its_own() -> None:
    logits = torch.zeros(3, 3, 2)
    logits[:, 1, 0] = NAN
    tokens, accepted = torch.tensor([7, 7, 7]), torch.tensor([0, 1, 2])
    assert marked(tokens, accepted, logits).tolist() == [7, BROKEN, BROKEN]
    hidden = torch.zeros(3, 2, 2)
    hidden[1:, 0, 1] = INF
    assert marked_draft(torch.tensor([7, 7, BROKEN]), hidden).tolist() == [7, -2, BROKEN]
