"""Whose the tokens of a pass are: how kernels are told of rows, packed or not.

Shapes: R rows, T tokens a row, B tokens in all.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from dspark.models.attention import Packing


@dataclass(frozen=True)
class Rows:
    """R rows of tokens one after the other; they may differ in length. Kernels read dense tensors."""

    owners: Tensor  # [B] int64, row
    positions: Tensor  # [B] int64, in the row's whole text
    first: Tensor  # [R + 1] int64: row r has the tokens first[r] to first[r + 1] - 1
    width: int  # of the longest row

    @classmethod
    def of(cls, positions: Tensor, packing: Packing | None) -> Rows:
        """Tokens at `positions` [R, T], or [1, B] where they are packed. The device is not waited for."""
        flat, device = positions.flatten().contiguous(), positions.device
        if packing is not None:
            starts = torch.arange(packing.rows + 1, device=device)
            first = torch.searchsorted(packing.owners, starts)
            return cls(packing.owners, flat, first, packing.width)
        rows, width = positions.shape
        owners = torch.arange(rows * width, device=device) // width
        return cls(owners, flat, torch.arange(rows + 1, device=device) * width, width)

    def packing(self) -> Packing:
        """The same as what spreads the tokens to [R, width, ...]."""
        places = torch.arange(len(self.owners), device=self.owners.device) - self.first[self.owners]
        return Packing(self.owners, places, len(self.first) - 1, self.width)
