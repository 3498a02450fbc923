"""Where the time of decoding goes: the parts of steps, timed in the engine itself, and their limits.

R rows in flight, k drafted. Seconds are wall seconds after the device has finished a part, so on a GPU
the parts add up to more than undisturbed steps: they can't overlap while they are timed.
"""

from __future__ import annotations

import time
from collections import defaultdict
from dataclasses import dataclass, field

import torch

from dspark.decode.bench import Job, to_record
from dspark.decode.loop import closed_loop
from dspark.decode.memory import position_bytes
from dspark.decode.records import RequestRecord
from dspark.models.drafter import DSparkDrafter
from dspark.models.packed import PackedLinear
from dspark.models.target import Target

# In the order of a step; "host" is all that is none of these: records, requests, Python.
PARTS = (
    "prefill",
    "draft backbone",
    "Markov loop",
    "schedule",
    "verify: layers",
    "verify: LM head",
    "drafter's context",
    "accept",
    "host",
)
READ_BYTES = 2**28  # more than a cache holds
READS = 5


@dataclass
class Laps:
    """Adds up the seconds of each part; an engine calls it at the end of one."""

    device: torch.device
    seconds: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    _since: float = field(default_factory=time.perf_counter)

    def __call__(self, part: str) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        now = time.perf_counter()
        self.seconds[part] += now - self._since
        self._since = now

    def restart(self) -> None:
        """Forget what was timed; the next part begins now."""
        self.seconds.clear()
        self._since = time.perf_counter()


def time_parts(job: Job, run: str) -> tuple[Laps, list[RequestRecord]]:
    """Run all prompts of the job with one of its runs, warm-up first; seconds by part, and records."""
    engine, laps = job.engines[run], Laps(job.engines[run].target.device)
    list(closed_loop(engine, [(prompt.id, 1) for prompt in job.warmup], job.request))
    engine.lap = laps
    laps.restart()
    turns = [(prompt.id, len(prompt.turns)) for prompt in job.prompts]
    rows = list(closed_loop(engine, turns, job.request))
    return laps, [to_record(row, job.config.dataset.name, run, 0) for row in rows]


def read_bandwidth(device: torch.device) -> float:
    """Bytes a second at which this device reads memory: the best of some sums over 256 MiB."""
    data = torch.ones(READ_BYTES // 4, device=device)
    laps, best = Laps(device), float("inf")
    for _ in range(READS):
        laps.restart()
        data.sum()
        laps("read")
        best = min(best, laps.seconds["read"])
    return READ_BYTES / best


def step_bytes(
    target: Target, drafter: DSparkDrafter | None, rows: int, k: int, context: int
) -> int:
    """Bytes that one step must read at least: weights once, K and V of every row's context.

    The rows of the embedding that are looked up are left out. A drafter reads its LM head (rows of the
    target's) once, and its second Markov matrix once for each of k positions.
    """
    size = target.weight_bytes
    embedding = target.embed.weight
    if isinstance(embedding, torch.Tensor) and embedding is not target.lm_head.weight:
        size -= _bytes(embedding)
    size += rows * context * position_bytes(target.config, target.num_layers, target.dtype)
    if drafter is not None and k > 0:
        head, drafted = drafter.markov_head, drafter.lm_head.weight.shape[0]
        size += sum(_bytes(weight) for weight in drafter.parameters())
        size += sum(m.nbytes for m in drafter.modules() if isinstance(m, PackedLinear))
        size -= _bytes(head.markov_w1.weight)  # a lookup
        size += _bytes(drafter.lm_head.weight)
        size += (k - 1) * drafted * head.rank * target.dtype.itemsize
        size += rows * context * position_bytes(drafter.config, len(drafter.layers), target.dtype)
    return size


def _bytes(weight: torch.Tensor) -> int:
    return weight.numel() * weight.element_size()
