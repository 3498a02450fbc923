"""A pass of fused layers on kernels gives what it gives without, in every family that is fused.

Tolerance 2e-5: four layers of float32.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

pytest.importorskip("triton", reason="kernels need triton")

from dspark.decode.cache import SlotCache, causal_mask
from dspark.kernels.switch import use_kernels
from dspark.models.attention import NAME, Packing
from dspark.models.fused import FAMILIES as FUSED
from dspark.models.target import Target
from tiny_models import FAMILIES, tiny_config

pytestmark = pytest.mark.filterwarnings(r"ignore:invalid value:RuntimeWarning:triton\.")

VOCAB, TAPS = 300, (-1, 0, 3)


@pytest.fixture(autouse=True)
def kernels_off_again() -> Iterator[None]:
    yield
    use_kernels(False)


def target(family: str, device: str) -> Target:
    torch.manual_seed(3)
    model = FAMILIES[family][1](tiny_config(family, VOCAB))
    with torch.no_grad():  # norms and biases that do something
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter.copy_(torch.rand_like(parameter) + 0.5)
    made = Target(model.to(device))
    made.model.set_attn_implementation(NAME)
    made.pack()
    return made


@torch.inference_mode()
def passes(
    model: Target, kernels: bool, lengths: list[int] | None
) -> list[tuple[Tensor, Tensor | None]]:
    """A prefill of two rows without kernels, then a token and a block: states and taps of these."""
    ids = torch.randint(VOCAB, (2, 40), generator=torch.Generator().manual_seed(0))
    ids = ids.to(model.device)
    cache = SlotCache(model.num_layers, 3, 40)
    results = []
    for begin, end in ((0, 20), (20, 21), (21, 25)):
        use_kernels(kernels and begin > 0)
        tokens = ids[:, begin:end]
        positions = torch.arange(begin, end, device=ids.device).expand(2, -1)
        masks = {kind: causal_mask(positions, end, w) for kind, w in model.windows.items()}
        packing = owners = None
        if lengths is not None and end == 25:
            packing = Packing.of(lengths, ids.device)
            tokens, positions = packing.pack(tokens)[None], packing.pack(positions)[None]
            owners = packing.owners
        cache.select(slice(1, 3), positions, end, owners)
        results.append(model.forward(tokens, positions, cache, masks, TAPS, packing))
    return results[1:]


@pytest.mark.parametrize("lengths", [None, [4, 2]], ids=["even", "ragged"])
@pytest.mark.parametrize("family", sorted(FUSED))
def test_states_and_taps(family: str, lengths: list[int] | None, device: str) -> None:
    """mistral's layers see 8 tokens back."""
    model = target(family, device)
    ours, theirs = (passes(model, kernels, lengths) for kernels in (True, False))
    torch.testing.assert_close(ours, theirs, atol=2e-5, rtol=2e-5)
