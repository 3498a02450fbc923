"""Prepacked linear layers: the same products as before, and the same text."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from dspark.config import DrafterShape
from dspark.decode.draft import Draft
from dspark.decode.engine import Engine, Request
from dspark.decode.sampling import Sampling
from dspark.models.drafter import DSparkDrafter
from dspark.models.head import LMHead
from dspark.models.packed import LEAST, PackedLinear, can_pack, pack_linears
from dspark.models.target import Target, load_target
from dspark.train.start import new_drafter
from tiny_models import VOCAB, save_tiny_target

pytestmark = pytest.mark.skipif(
    not can_pack(torch.ones(1)), reason="oneDNN is not available in this build of torch"
)
DTYPES = [torch.float32, torch.bfloat16]
TOLERANCE: dict[torch.dtype, dict[str, float]] = {
    torch.float32: {"atol": 1e-5, "rtol": 1e-5},
    torch.bfloat16: {"atol": 0.02, "rtol": 0.02},  # sums of some tens of numbers of size 1
}


def needs(dtype: torch.dtype) -> None:
    if not can_pack(torch.ones(1, dtype=dtype)):
        pytest.skip(f"oneDNN does not multiply {dtype} on this CPU")


# --------------------------------------------------------------------------------- single layers


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@settings(deadline=None, max_examples=40)
@given(
    shape=st.lists(st.integers(1, 9), max_size=2),
    inputs=st.integers(1, 70),
    outputs=st.integers(1, 70),
    bias=st.booleans(),
)
def test_a_packed_layer_multiplies_as_the_layer_it_replaces(
    dtype: torch.dtype, shape: list[int], inputs: int, outputs: int, bias: bool
) -> None:
    needs(dtype)
    torch.manual_seed(0)
    linear = nn.Linear(inputs, outputs, bias).to(dtype).requires_grad_(False)
    x = torch.randn(*shape, inputs).to(dtype)
    ours = PackedLinear(linear)(x)
    assert (ours.shape, ours.dtype) == ((*shape, outputs), dtype)
    torch.testing.assert_close(ours, linear(x), **TOLERANCE[dtype])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(
    "x",
    [
        torch.randn(24, 5).T,
        torch.randn(5, 48)[:, ::2],
        torch.randn(5, 50)[:, 13:37],
        torch.randn(3, 4, 24).transpose(0, 1),
        torch.randn(24).expand(3, 2, 24),
        torch.randn(24, 4, 3).permute(2, 1, 0),
    ],
    ids=["transposed", "strided", "part", "rows-swapped", "expanded", "permuted"],
)
def test_inputs_need_not_be_contiguous(x: Tensor, dtype: torch.dtype) -> None:
    needs(dtype)
    linear = nn.Linear(24, 20).to(dtype).requires_grad_(False)
    x = x.to(dtype)  # keeps the strides, but for what is expanded
    torch.testing.assert_close(PackedLinear(linear)(x), linear(x), **TOLERANCE[dtype])


@pytest.mark.parametrize("rows", [1, 15, 16, 17, 200])
def test_any_number_of_rows_is_multiplied(rows: int) -> None:
    """The layout is made for some number of rows, and used with others."""
    linear, x = nn.Linear(33, 40).requires_grad_(False), torch.randn(rows, 33)
    torch.testing.assert_close(PackedLinear(linear)(x), linear(x), **TOLERANCE[torch.float32])


def test_only_what_one_dnn_multiplies_is_packed() -> None:
    assert can_pack(torch.ones(2, 2))
    assert not can_pack(torch.ones(2, 2, dtype=torch.float64))
    assert not can_pack(torch.ones(2, 2, dtype=torch.float16))
    assert not can_pack(torch.ones(2, 2, device="meta"))


def test_layers_are_replaced_at_any_depth_and_all_else_is_left() -> None:
    inner = nn.ModuleDict({"norm": nn.LayerNorm(20), "deep": nn.Sequential(nn.Linear(20, LEAST))})
    model = nn.Sequential(nn.Linear(20, 20, bias=False), inner, nn.Linear(20, LEAST - 1))
    model.append(nn.Linear(20, 20).double()).requires_grad_(False)
    linear, x = inner["deep"][0], torch.randn(4, 20)  # type: ignore[index]
    expected = linear(x)
    pack_linears(model)
    assert [type(part) for part in model] == [PackedLinear, nn.ModuleDict, nn.Linear, nn.Linear]
    assert isinstance(inner["deep"][0], PackedLinear)  # type: ignore[index]
    assert isinstance(inner["norm"], nn.LayerNorm)
    torch.testing.assert_close(inner["deep"](x), expected, **TOLERANCE[torch.float32])


@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_lm_head_scales_caps_and_picks_rows_as_before(bias: bool) -> None:
    head = LMHead(torch.randn(50, 24), torch.randn(50) if bias else None, 0.5, 3.0)
    states, tokens = torch.randn(2, 3, 24), torch.tensor([49, 0, 7])
    packed = head.pack()
    assert packed.packed is not None
    torch.testing.assert_close(packed(states), head(states), **TOLERANCE[torch.float32])
    some = packed.rows(tokens)
    torch.testing.assert_close(some(states), head(states)[..., tokens])
    torch.testing.assert_close(some.pack()(states), some(states), **TOLERANCE[torch.float32])


def test_an_lm_head_that_cannot_be_packed_stays_as_it_is() -> None:
    head = LMHead(torch.randn(50, 24, dtype=torch.float64), None, 1.0, None)
    assert head.pack() is head


# --------------------------------------------------------------------------------- whole models

KINDS = ["vanilla", "gated", "rnn"]
PROMPTS = [[40, 87, 5], [199] * 9, [255, 31], [77]]


@pytest.fixture
def fresh(target_path: Path) -> Target:
    """A target of the test's own: packing cannot be undone."""
    return load_target(target_path, "cpu", torch.float32)


def drafter_of(target: Target, kind: str = "vanilla", drafted: int | None = None) -> DSparkDrafter:
    """A random drafter with a Markov bias that matters; `drafted` tokens of the target's, or all."""
    shape = DrafterShape(layers=2, taps=2, markov_rank=16, markov_head_type=kind)
    ids = None if drafted is None else torch.arange(0, VOCAB, VOCAB // drafted)[:drafted]
    drafter = new_drafter(shape, target, 3, ids).eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    for weight in (drafter.markov_head.markov_w1.weight, drafter.markov_head.markov_w2.weight):
        weight.copy_(torch.randn(weight.shape, generator=generator))
    return drafter


def decoded(
    target: Target, drafter: DSparkDrafter | None, k: int
) -> tuple[dict[str, list[int]], list[Draft]]:
    """Texts of four requests over three slots, and every draft on the way."""
    drafts: list[Draft] = []
    engine = Engine(target, drafter, k=k, concurrency=3, capacity=48, trace=drafts.append)
    rows, waiting = [], list(enumerate(PROMPTS))
    while waiting or engine.active:
        while waiting and engine.free:
            name, ids = waiting.pop(0)
            rows.append(engine.admit(Request(str(name), 0, ids, 24, Sampling()), 0.0))
        engine.step()
    return {row.request.prompt_id: row.output for row in rows}, drafts


def linears(module: nn.Module) -> list[str]:
    return [name for name, part in module.named_modules() if isinstance(part, nn.Linear)]


def test_packing_a_target_changes_no_text_and_its_logits_by_rounding_alone(fresh: Target) -> None:
    states = torch.randn(5, fresh.hidden_size)
    logits, (texts, _) = fresh.logits(states), decoded(fresh, None, 0)
    fresh.pack()
    assert linears(fresh.decoder) == []
    assert decoded(fresh, None, 0)[0] == texts
    torch.testing.assert_close(fresh.logits(states), logits, atol=1e-4, rtol=1e-4)
    assert (fresh.dtype, fresh.device.type) == (torch.float32, "cpu")


@pytest.mark.parametrize("drafted", [None, 60], ids=["whole", "reduced"])
@pytest.mark.parametrize("kind", KINDS)
def test_packing_both_models_changes_no_text_and_no_draft(
    fresh: Target, kind: str, drafted: int | None
) -> None:
    drafter = drafter_of(fresh, kind, drafted)
    texts, drafts = decoded(fresh, drafter, 3)
    fresh.pack()
    drafter.pack()
    assert linears(drafter) == ["confidence_head.proj"]
    again, redrafts = decoded(fresh, drafter, 3)
    assert again == texts == decoded(fresh, None, 0)[0]
    assert len(drafts) == len(redrafts) > 0
    for before, after in zip(drafts, redrafts, strict=True):
        assert torch.equal(after.tokens, before.tokens)
        for name in ("logits", "confidence", "hidden"):
            ours, expected = getattr(after, name), getattr(before, name)
            torch.testing.assert_close(ours, expected, atol=1e-4, rtol=1e-4)


def test_sampling_works_on_packed_models(fresh: Target) -> None:
    """A draft of a reduced vocabulary is spread over the target's."""
    drafter = drafter_of(fresh, drafted=60)
    request = Request("p", 0, PROMPTS[0], 24, Sampling(temperature=0.9, seed=4))

    def text() -> list[int]:
        engine = Engine(fresh, drafter, k=3, capacity=48)
        row = engine.admit(request, 0.0)
        while row.finish_reason is None:
            engine.step()
        return row.output

    expected = text()
    fresh.pack()
    drafter.pack()
    assert text() == expected


def test_bfloat16_logits_differ_by_rounding_alone(target_path: Path) -> None:
    needs(torch.bfloat16)
    target = load_target(target_path, "cpu", torch.bfloat16)
    states = torch.randn(5, target.hidden_size).bfloat16()
    logits = target.logits(states)
    target.pack()
    torch.testing.assert_close(target.logits(states), logits, atol=0.05, rtol=0.05)


def test_a_target_with_a_tied_embedding_keeps_it(tmp_path: Path) -> None:
    path = save_tiny_target(tmp_path, tie_word_embeddings=True)
    target = load_target(path, "cpu", torch.float32)
    before = target.embed.weight.clone()
    target.pack()
    assert torch.equal(target.embed.weight, before)
    assert torch.equal(target.head.weight, before)


def test_a_wanted_gradient_is_refused() -> None:
    layer = PackedLinear(nn.Linear(32, 32))
    with pytest.raises(RuntimeError, match="pass no gradient"):
        layer(torch.randn(2, 32, requires_grad=True))
