"""Fused layers give what transformers' own give, in every family that is fused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from dspark.decode.cache import SlotCache, causal_mask
from dspark.models import fused
from dspark.models.attention import NAME, Packing
from dspark.models.fused import Product, rotate
from dspark.models.target import Target
from tiny_models import FAMILIES, tiny_config

VOCAB, TAPS = 300, (-1, 0, 3)


def target(family: str, dtype: torch.dtype = torch.float32, **changes: object) -> Target:
    torch.manual_seed(3)
    model = FAMILIES[family][1](tiny_config(family, VOCAB, **changes))
    with torch.no_grad():  # norms and biases that do something
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.copy_(torch.rand_like(parameter) + 0.5)
    made = Target(model.to(dtype))
    made.model.set_attn_implementation(NAME)
    return made


def passes(
    model: Target, lengths: list[int] | None = None
) -> list[tuple[Tensor, Tensor | None, Tensor]]:
    """A prefill of two rows, a step of one token, then a block: each one's states, taps, logits."""
    torch.manual_seed(0)
    ids = torch.randint(VOCAB, (2, 20))
    cache = SlotCache(model.num_layers, 2, 24)
    results = []
    with torch.inference_mode():
        for begin, end in ((0, 12), (12, 13), (13, 17)):
            tokens, positions = ids[:, begin:end], torch.arange(begin, end).expand(2, -1)
            masks = {k: causal_mask(positions, end, w) for k, w in model.windows.items()}
            packing = owners = None
            if lengths is not None and end - begin == 4:
                packing = Packing.of(lengths, tokens.device)
                tokens, positions = packing.pack(tokens)[None], packing.pack(positions)[None]
                owners = packing.owners
            cache.select(slice(0, 2), positions, end, owners)
            states, taps = model.forward(tokens, positions, cache, masks, TAPS, packing)
            results.append((states, taps, model.logits(states)))
    return results


@pytest.mark.parametrize("lengths", [None, [4, 2]], ids=["even", "ragged"])
@pytest.mark.parametrize("family", sorted(fused.FAMILIES))
def test_a_fused_target_computes_what_the_model_does(
    family: str, lengths: list[int] | None
) -> None:
    plain, packed = target(family), target(family)
    packed.pack()
    assert packed.fused is not None
    for ours, theirs in zip(passes(packed, lengths), passes(plain, lengths), strict=True):
        torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)


def test_a_sliding_window_is_kept() -> None:
    wide, narrow, packed = (target("mistral", sliding_window=window) for window in (None, 6, 6))
    packed.pack()
    ours, theirs = passes(packed)[-1][0], passes(narrow)[-1][0]
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
    assert not torch.allclose(ours, passes(wide)[-1][0], atol=1e-3)


def test_bfloat16_stays_near_float32() -> None:
    packed = target("llama", torch.bfloat16)
    packed.pack()
    for ours, theirs in zip(passes(packed), passes(target("llama")), strict=True):
        assert ours[2].dtype is torch.bfloat16
        assert (ours[2].float() - theirs[2]).abs().mean() < 0.03 * theirs[2].std()


def test_other_families_keep_their_own_layers() -> None:
    model = target("gemma3")
    model.pack()
    assert model.fused is None


def test_the_weights_are_held_once() -> None:
    """The model's own layers are emptied: else a packed target would take twice the memory."""
    model = target("llama")
    model.pack()
    left = dict(model.decoder.named_parameters())
    assert not any("proj" in name for name in left)


@pytest.mark.parametrize("family", sorted(fused.FAMILIES))
def test_all_that_was_taken_out_can_be_named(family: str) -> None:
    """A fingerprint of the target covers it so."""
    plain, packed = target(family), target(family)
    packed.pack()
    assert packed.fused is not None
    kept = [value for layer in packed.fused.layers for _, value in layer.tensors()]
    inside = ("self_attn", "mlp")
    theirs = [p for n, p in plain.decoder.named_parameters() if any(part in n for part in inside)]
    assert sum(value.numel() for value in kept) == sum(value.numel() for value in theirs)
    ours = torch.cat([value.flatten() for value in kept]).sort().values
    assert torch.equal(ours, torch.cat([value.flatten() for value in theirs]).sort().values)


def test_products_of_layers_with_and_without_bias() -> None:
    torch.manual_seed(0)
    first, second = torch.nn.Linear(24, 32), torch.nn.Linear(24, 16, bias=False)
    x, residual = torch.randn(2, 3, 24), torch.randn(2, 3, 48)
    with torch.inference_mode():
        both = torch.cat([first(x), second(x)], dim=-1)
        product = Product.of(first, second)
        torch.testing.assert_close(product(x), both)
        torch.testing.assert_close(product(x, residual), both + residual)


def test_rotation_is_that_of_transformers() -> None:
    torch.manual_seed(0)
    x, angles = torch.randn(2, 5, 3, 8), torch.randn(2, 5, 4)
    cos, sin = torch.cat([angles.cos()] * 2, -1), torch.cat([angles.sin()] * 2, -1)
    theirs, _ = apply_rotary_pos_emb(x.transpose(1, 2), x.transpose(1, 2), cos, sin)
    signed = torch.cat([-angles.sin(), angles.sin()], -1)
    ours = rotate(x, cos[:, :, None], signed[:, :, None])
    torch.testing.assert_close(ours, theirs.transpose(1, 2))
