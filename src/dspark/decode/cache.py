"""Preallocated key/value storage with a slot for each request and a length for each row.

Rolling back costs nothing: a row's length alone decides what is attended to, and what lies beyond it
is overwritten by the next write at those positions. Prefilling a newcomer touches its slot alone.
"""

from __future__ import annotations

import torch
from torch import Tensor


class SlotCache:
    """K and V of every layer, [slots, G, capacity, h] each, allocated at the first write.

    `select` names the rows that the next writes and reads are for; `update` then stores K and V of
    new tokens at their positions and returns all that the rows may attend to.
    """

    def __init__(self, layers: int, slots: int, capacity: int) -> None:
        self.slots = slots
        self.capacity = capacity
        self.keys: list[Tensor | None] = [None] * layers
        self.values: list[Tensor | None] = [None] * layers
        self._rows = slice(0, 0)
        self._index = torch.empty(0, 1, dtype=torch.long)
        self._positions = torch.empty(0, 0, dtype=torch.long)
        self._length = 0

    def select(
        self, rows: slice, positions: Tensor, length: int, owners: Tensor | None = None
    ) -> None:
        """Aim at slots `rows` for tokens at `positions` [R, T]; reads cover positions < `length`.

        Args:
            owners: of a packed pass, whose positions are [1, B]: the row of each token [B].
        """
        self._rows, self._positions, self._length = rows, positions, length
        if owners is None:
            self._index = torch.arange(rows.start, rows.stop, device=positions.device)[:, None]
        else:
            self._index = (rows.start + owners)[None]

    def write(self, layer: int, key: Tensor, value: Tensor) -> None:
        """Store K and V [R, G, T, h] (packed: [1, G, B, h]) of one layer where `select` aims."""
        if self.keys[layer] is None:
            shape = (self.slots, key.shape[1], self.capacity)
            self.keys[layer] = key.new_zeros(*shape, key.shape[-1])
            self.values[layer] = value.new_zeros(*shape, value.shape[-1])
        keys, values = self.keys[layer], self.values[layer]
        assert keys is not None and values is not None
        # Advanced indices around a slice put their own dimensions first: [R, T, G, h].
        keys[self._index, :, self._positions] = key.transpose(1, 2)
        values[self._index, :, self._positions] = value.transpose(1, 2)

    def read(self, layer: int) -> tuple[Tensor, Tensor]:
        """K and V [R, G, length, h] of the selected rows."""
        keys, values = self.keys[layer], self.values[layer]
        assert keys is not None and values is not None
        return keys[self._rows, :, : self._length], values[self._rows, :, : self._length]

    def update(
        self, key: Tensor, value: Tensor, layer: int, *_args: object, **_kwargs: object
    ) -> tuple[Tensor, Tensor]:
        """Write, then read: the call that transformers' attention layers make."""
        self.write(layer, key, value)
        return self.read(layer)

    def move(self, source: int, target: int) -> None:
        """Copy one slot over another, so that active rows stay contiguous."""
        for store in (*self.keys, *self.values):
            if store is not None:
                store[target].copy_(store[source])


def causal_mask(positions: Tensor, length: int, window: int | None = None) -> Tensor:
    """Bool mask [R, 1, T, length]: a token at p attends to cached positions <= p.

    With a window of w it attends to the w positions that end at p (its own included).
    """
    keys = torch.arange(length, device=positions.device)
    mask = keys <= positions[..., None]
    if window is not None:
        mask &= keys > positions[..., None] - window
    return mask[:, None]
