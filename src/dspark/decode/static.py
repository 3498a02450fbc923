"""Steps whose shapes and addresses stay the same, so that they can be captured (see `graphs`).

A step's rows are filled up to a row bucket and the cached positions that it reads to a length bucket;
what lies beyond a row's own length is masked, for masks are made on the device from the rows' starts.
What a step reads and hands on lies in tensors that are made once. The next step's anchors and starts
are made on the device from this one's outcome: only where rows came or went the host sends them.

C slots, R rows (of them some in flight, the rest fill a bucket up), k drafted.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from dspark.decode.batch import Batch
from dspark.decode.draft import Draft
from dspark.decode.graphs import Captured, Graphs, Key, Work
from dspark.decode.sampling import Sampling

if TYPE_CHECKING:
    from dspark.decode.engine import Engine, Row

LEAST = 128  # positions of the smallest length bucket, and of the step to the next up to 8 of them
ALIGNED = 16  # a cache's capacity is a multiple of it: attention on a GPU copies other masks first


def row_bucket(rows: int, slots: int) -> int:
    """Rows that a step of so many has: the next power of two, at most the slots."""
    return min(slots, 1 << (rows - 1).bit_length())


def length_bucket(length: int, capacity: int) -> int:
    """Cached positions that a step reads which needs `length`: at most a quarter more above LEAST * 8."""
    step = max(LEAST, 1 << max(0, (length - 1).bit_length() - 3))
    return min(capacity, -(-length // step) * step)


def row_buckets(slots: int) -> list[int]:
    """All of them, ascending."""
    return sorted({row_bucket(rows, slots) for rows in range(1, slots + 1)})


def length_buckets(capacity: int) -> list[int]:
    """All of them, ascending."""
    found = [length_bucket(1, capacity)]
    while found[-1] < capacity:
        found.append(length_bucket(found[-1] + 1, capacity))
    return found


def host_twin(there: Tensor) -> Tensor:
    """Zeros of the same shape on the host, where copies from and to the device need not be waited for."""
    return torch.zeros(there.shape, dtype=there.dtype, pin_memory=there.device.type == "cuda")


class Mirror:
    """A tensor that stays where it is on the device, and what the host fills it from."""

    def __init__(self, there: Tensor) -> None:
        self.device, self.host = there, host_twin(there)

    def send(self) -> None:
        """Copy it over; the host may not touch its side before the step has ended."""
        self.device.copy_(self.host, non_blocking=True)


class StaticSteps:
    """The steps of one engine.

    Its pieces are "plain step", "whole step" (draft and verification), and where a policy or a trace
    looks in between, "draft" and "verification" (of 0..k tokens). So there are at most
    row buckets x length buckets x pieces graphs for each setting of the sampling in use, with 1 piece
    for k = 0, 2 for a fixed k and k + 3 for a policy.

    Args:
        ahead: positions that a step writes and reads from a row's start on, at most.
        capacity: positions of a slot of the caches.
        graphs: None calls the pieces as they are.
    """

    def __init__(
        self,
        slots: int,
        k: int,
        ahead: int,
        capacity: int,
        device: torch.device,
        graphs: Graphs | None,
    ) -> None:
        self.slots, self.k, self.ahead, self.capacity = slots, k, ahead, capacity
        self.graphs = graphs
        self.captured: dict[Key, Captured] = {}
        self.places = Mirror(
            torch.zeros(2, slots, dtype=torch.long, device=device)
        )  # anchors, starts
        self.uniforms = Mirror(torch.zeros(slots, 2 * k + 1, device=device))
        self.limits = torch.zeros(slots, dtype=torch.long, device=device)
        self.results = host_twin(torch.zeros(slots * (k + 3), dtype=torch.long, device=device))
        self.finished = torch.cuda.Event() if device.type == "cuda" else None
        self._kept: dict[str, Tensor] = {}  # what a draft hands on, of C rows
        self._held: list[tuple[int, int]] = []  # anchors and starts that the device has

    def step(
        self, engine: Engine, rows: Sequence[Row], uniforms: Tensor | None, drafting: bool
    ) -> tuple[list[list[int]], int]:
        """One step's device work; see `Engine.verify` for what it gives, and how many were drafted.

        Args:
            uniforms: [rows, 2k + 1] on the host; None when all rows are greedy.
        """
        self._place([(row.newest, row.start) for row in rows])
        if uniforms is not None:
            self.uniforms.host[: len(rows)] = uniforms
            self.uniforms.send()
        sampling = [row.request.sampling for row in rows]
        longest = max(row.start for row in rows)
        batch = self._batch(sampling, longest, uniforms is not None)
        drafting = drafting and self.k > 0
        if not drafting:
            outcome = self._plain(engine, batch)
        elif engine.decide is None and engine.trace is None:
            outcome = self._whole(engine, batch)
        else:
            draft = self._draft(engine, batch)
            limits, lengths = engine.judge(_of_rows(draft, len(rows)))
            self.limits.zero_()  # of the rows that fill the bucket up
            self.limits[: len(rows)].copy_(limits)
            outcome = self._verification(engine, batch, draft, max(lengths))
        return self._fetch(outcome, len(rows)), self.k if drafting else 0

    def capture(self, engine: Engine, sampling: Sampling) -> None:
        """Capture all that steps of requests with this sampling can need, while none is in flight.

        A capture in the middle of a measurement would be measured.
        """
        if self.graphs is None:
            return
        self.uniforms.host.fill_(0.5)
        self.uniforms.send()
        self.limits.fill_(self.k)
        for rows in row_buckets(self.slots):
            for bucket in length_buckets(self.capacity):
                longest = max(0, bucket - self.ahead)
                self._place([(row, longest) for row in range(rows)])
                batch = self._batch([sampling] * rows, longest, not sampling.greedy)
                self._capture(engine, batch)

    def _capture(self, engine: Engine, batch: Batch) -> None:
        if engine.drafter is None or engine.decide is not None:
            self._plain(engine, batch)
        if engine.drafter is not None and engine.decide is None:
            self._whole(engine, batch)
        if engine.decide is not None:
            draft = self._draft(engine, batch)
            for width in range(self.k + 1):
                self._verification(engine, batch, draft, width)

    def _place(self, rows: list[tuple[int, int]]) -> None:
        """Let the device have anchors and starts of these rows, and zeros where a bucket is fuller."""
        size = row_bucket(len(rows), self.slots)
        wanted = rows + [(0, 0)] * (size - len(rows))
        if wanted != self._held:
            self.places.host[:, :size] = torch.tensor(wanted).T
            self.places.send()
        self._held = wanted

    def _batch(self, sampling: list[Sampling], longest: int, uniforms: bool) -> Batch:
        size = row_bucket(len(sampling), self.slots)
        anchors, starts = self.places.device[:, :size]
        return Batch(
            anchors,
            starts,
            longest,
            sampling + sampling[-1:] * (size - len(sampling)),
            self.uniforms.device[:size] if uniforms else None,
            length_bucket(longest + self.ahead, self.capacity),
        )

    def _plain(self, engine: Engine, batch: Batch) -> Tensor:
        def work() -> Tensor:
            none = batch.anchors.new_empty(len(batch.sampling), 0)
            return engine.verify(batch, None, none, torch.zeros_like(batch.anchors))

        return self._run(engine, batch, "plain step", 0, work)

    def _whole(self, engine: Engine, batch: Batch) -> Tensor:
        def work() -> Tensor:
            draft = engine.propose(batch)
            limits = torch.full_like(batch.anchors, self.k)
            return engine.verify(batch, draft, draft.tokens, limits)

        return self._run(engine, batch, "whole step", self.k, work)

    def _draft(self, engine: Engine, batch: Batch) -> Draft:
        """A draft, in tensors that stay where they are. Its logits are there for a trace alone."""
        traced = engine.trace is not None
        self._run(engine, batch, "draft", self.k, lambda: self._keep(engine.propose(batch), traced))
        kept = {name: value[: len(batch.sampling)] for name, value in self._kept.items()}
        return Draft(
            kept["tokens"],
            None if batch.uniforms is None else kept["probs"],
            kept["confidence"],
            kept["logits"] if traced else kept["confidence"].new_empty(len(batch.sampling), 0, 0),
            kept["hidden"],
        )

    def _keep(self, draft: Draft, logits: bool) -> Tensor:
        """Copy a draft to where the verification reads it; returns its tokens [R, k]."""
        for name, value in vars(draft).items():
            if value is None or (name == "logits" and not logits):
                continue
            if name not in self._kept:
                self._kept[name] = value.new_zeros(self.slots, *value.shape[1:])
            self._kept[name][: len(value)].copy_(value)
        return self._kept["tokens"][: len(draft.tokens)]

    def _verification(self, engine: Engine, batch: Batch, draft: Draft, width: int) -> Tensor:
        drafted, limits = draft.tokens[:, :width], self.limits[: len(batch.sampling)]
        work = partial(engine.verify, batch, draft, drafted, limits)
        return self._run(engine, batch, "verification", width, work)

    def _run(self, engine: Engine, batch: Batch, piece: str, width: int, work: Work) -> Tensor:
        """What `work` gives, from a graph where there are graphs and this piece can be one."""
        settings = {(row.temperature, row.top_p, row.top_k) for row in batch.sampling}
        # Of rows that differ in their sampling there might be any number of graphs.
        if self.graphs is None or engine.trace is not None or len(settings) > 1:
            return work()
        assert batch.bucket is not None, "static shapes have a bucket"
        sampled = None if batch.uniforms is None else settings.pop()
        key = Key(piece, len(batch.sampling), width, batch.bucket, sampled)
        return self.graphs.run(self.captured, key, work)

    def _fetch(self, outcome: Tensor, live: int) -> list[list[int]]:
        """The outcome's rows in flight, on the host. The next step's places are made meanwhile."""
        there = self.results[: outcome.numel()].view(outcome.shape)
        there.copy_(outcome, non_blocking=True)
        if self.finished is not None:
            self.finished.record()
        anchors, starts = self.places.device[:, :live]
        anchors.copy_(outcome[:live, -1])
        starts.add_(outcome[:live, 0] + 1)
        if self.finished is not None:
            self.finished.synchronize()
        outcomes: list[list[int]] = there[:live].tolist()
        for row, (accepted, *_, bonus) in enumerate(outcomes):
            self._held[row] = (bonus, self._held[row][1] + accepted + 1)
        return outcomes


def _of_rows(draft: Draft, rows: int) -> Draft:
    """The first so many rows of a draft."""
    probs = None if draft.probs is None else draft.probs[:rows]
    others = (part[:rows] for part in (draft.confidence, draft.logits, draft.hidden))
    return Draft(draft.tokens[:rows], probs, *others)
