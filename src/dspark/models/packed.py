"""Linear layers with prepacked weights, for decoding on a CPU.

A decoding step multiplies a few rows with every weight of the model. The library behind
`nn.functional.linear` reorders blocks of the weight for each such product; oneDNN can keep them
reordered, which halves the time of a step (benchmarks/README.md). Inference alone: the weights are
constants, and gradients do not pass.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

ROWS = 16  # the number of rows that the blocks are laid out for; others work as well
LEAST = 16  # output features below which there is nothing to gain


def can_pack(weight: Tensor) -> bool:
    """Whether oneDNN multiplies with weights of this device and dtype here."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return False
    if weight.dtype is torch.bfloat16:
        return torch.ops.mkldnn._is_mkldnn_bf16_supported()
    return weight.dtype is torch.float32


def pack(weight: Tensor) -> Tensor:
    """A weight [N, K] in oneDNN's own layout, for `packed_linear` alone."""
    return torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)


def packed_linear(
    x: Tensor, packed: Tensor, bias: Tensor | None, residual: Tensor | None = None
) -> Tensor:
    """[..., K] to [..., N], as `nn.functional.linear` with the weight that was packed.

    Args:
        residual: [..., N], added to it.

    Raises:
        RuntimeError: a gradient is wanted, which oneDNN's function would silently drop.
    """
    if torch.is_grad_enabled() and x.requires_grad:
        raise RuntimeError("packed weights pass no gradient: train with the model as it was loaded")
    rows = x.reshape(-1, x.shape[-1])
    if residual is None:
        out = torch.ops.mkldnn._linear_pointwise(rows, packed, bias, "none", [], "")
    else:
        added = residual.reshape(-1, residual.shape[-1])
        out = torch.ops.mkldnn._linear_pointwise.binary(rows, added, packed, bias, "add")
    return out.view(*x.shape[:-1], out.shape[-1])


class PackedLinear(nn.Module):
    """What takes the place of an `nn.Linear`."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.packed, self.bias = pack(linear.weight), linear.bias
        self.nbytes = linear.weight.numel() * linear.weight.element_size()

    def forward(self, x: Tensor) -> Tensor:
        return packed_linear(x, self.packed, self.bias)


def pack_linears(module: nn.Module) -> None:
    """Replace the linear layers inside `module` where `can_pack` says so; their weights are let go."""
    for name, child in list(module.named_children()):
        if isinstance(child, nn.Linear):
            if can_pack(child.weight) and child.out_features >= LEAST:
                setattr(module, name, PackedLinear(child))
        else:
            pack_linears(child)
