"""Whether the KV caches of some engines fit their device, and how many requests at once would.

A cache is allocated at the first write; on a CPU the system then gives more than it has and ends the
process when that is used. So what a device has is compared with what the caches will come to need.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from dspark.errors import UserError
from dspark.memory import free_bytes, gib, out_of_memory
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target

if TYPE_CHECKING:
    from dspark.decode.engine import Engine


def position_bytes(config: Any, layers: int, dtype: torch.dtype) -> int:
    """Bytes of K and V of one position in `layers` layers of a model with this transformers config."""
    heads = getattr(config, "num_key_value_heads", None) or config.num_attention_heads
    width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
    return 2 * layers * heads * width * dtype.itemsize


def slot_bytes(target: Target, drafter: DSparkDrafter | None, positions: int) -> int:
    """Bytes of KV cache of one request of up to `positions` positions, the drafter's context included."""
    size = position_bytes(target.config, target.num_layers, target.dtype)
    if drafter is not None:
        size += position_bytes(drafter.config, len(drafter.layers), target.dtype)
    return size * positions


def affordable(free: int, slot: int, concurrency: int) -> int:
    """The greatest concurrency, below one that ran out of memory, whose caches fit into `free` bytes.

    Half of it where the caches would have fitted: what a step needs besides them grows alike.
    """
    fitting = free // slot
    return fitting if fitting < concurrency else concurrency // 2


def check_slots(target: Target, slot: int, concurrency: int) -> None:
    """Refuse caches of `slot` bytes a request that need more than the target's device has free.

    Raises:
        UserError: they do; it names the concurrency that would fit.
    """
    free = free_bytes(target.device)
    if slot * concurrency > free:
        raise UserError(_too_much(target, slot, concurrency, free))


def check_engines(engines: Sequence[Engine]) -> None:
    """Refuse engines of one job that need more together, for each keeps its caches to the end.

    Raises:
        UserError: they do; it names the concurrency that would fit.
    """
    check_slots(engines[0].target, _slots(engines), len(engines[0].slots))


@contextmanager
def room_explained(engines: Sequence[Engine]) -> Iterator[None]:
    """Say what was needed, and what would fit, where running the engines of a job needs too much.

    Raises:
        UserError: an allocation failed.
    """
    target, concurrency = engines[0].target, len(engines[0].slots)
    free = free_bytes(target.device)
    with out_of_memory(lambda: _too_much(target, _slots(engines), concurrency, free)):
        yield


def _slots(engines: Sequence[Engine]) -> int:
    return sum(slot_bytes(e.target, e.drafter, e.cache.capacity) for e in engines)


def _too_much(target: Target, slot: int, concurrency: int, free: int) -> str:
    fitting = affordable(free, slot, concurrency)
    remedy = f"set engine.concurrency={fitting}"
    if fitting == 0:
        remedy = "leave long prompts out, lower max_new_tokens or take a device with more memory"
    return (
        f"out of memory: the KV caches of {concurrency} requests at once take {gib(slot * concurrency)} "
        f"({gib(slot)} each) and {target.device} has {gib(free)} free beside {gib(target.weight_bytes)} "
        f"of weights: {remedy}"
    )
