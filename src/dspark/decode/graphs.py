"""CUDA graphs of the pieces of a step: captured at their first use, trusted once they repeat it.

A step is some thousand small operations, and handing them to a GPU one by one takes longer than it
needs to do them. A graph hands over all at once, but always the same work on the same memory. So a
piece reads and writes tensors that stay where they are, and there is a graph for each `Key`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import click
import torch
from torch import Tensor

from dspark.config import CudaGraphs

Work = Callable[[], Tensor]  # a piece: it reads static tensors, its result are integers


class Key(NamedTuple):
    """What decides the work of a piece, beside the engine and what its static tensors hold."""

    piece: str
    rows: int
    width: int  # draft tokens that it verifies, or makes
    bucket: int  # cached positions that it reads
    settings: (
        tuple[float, float, int] | None
    )  # temperature, top_p and top_k of all rows; None: greedy


class Captured(NamedTuple):
    """A piece as a graph."""

    replay: Callable[[], None]
    result: Tensor  # what the latest replay gave


class Capturer(Protocol):
    """How work becomes a graph."""

    def warm_up(self, work: Work) -> Tensor:
        """Do the work once as it is, where it will be captured; returns its result."""
        ...

    def capture(self, work: Work) -> Captured:
        """Record the work without doing it."""
        ...


class CudaCapturer:
    """Records on a stream of its own; all graphs share one memory pool.

    They may, though a graph may overwrite what another has left there: whatever a later one reads
    lies outside the pool, and a result is copied before the next replay.
    """

    def __init__(self) -> None:
        self.stream = torch.cuda.Stream()
        self.pool = torch.cuda.graph_pool_handle()

    def warm_up(self, work: Work) -> Tensor:
        # Libraries set up what a capture may not: handles, workspaces of this stream, chosen kernels.
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            result = work()
        torch.cuda.current_stream().wait_stream(self.stream)
        return result

    def capture(self, work: Work) -> Captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self.pool, stream=self.stream):
            result = work()
        return Captured(graph.replay, result)


class Graphs:
    """Runs pieces as graphs, for the engines of one job: where one fails, none is used any more.

    Arms that are compared must be run alike.
    """

    def __init__(self, capturer: Capturer) -> None:
        self.capturer = capturer
        self.failure: str | None = None  # why there are no graphs any more

    def run(self, captured: dict[Key, Captured], key: Key, work: Work) -> Tensor:
        """The result of `work`, from the engine's graph for `key`; the first time it is captured.

        The result is overwritten by the next run. What the work writes must not be what it reads.
        """
        if self.failure is None and key not in captured:
            self._capture(captured, key, work)
        if self.failure is not None:
            return work()
        captured[key].replay()
        return captured[key].result

    def _capture(self, captured: dict[Key, Captured], key: Key, work: Work) -> None:
        what = f"the {key.piece} of {key.rows} row{'s' if key.rows > 1 else ''}"
        expected = self.capturer.warm_up(work).clone()
        try:
            graph = self.capturer.capture(work)
            graph.replay()
            same = torch.equal(graph.result, expected)
        except Exception as error:  # whatever an operation does that cannot be captured
            kind, said = type(error).__name__, " ".join(str(error).split())[:200]
            self._fail(f"{what} cannot be captured ({kind}: {said})")
            return
        if same:
            captured[key] = graph
        else:
            self._fail(f"the graph of {what} gives other tokens than the same work without it")

    def _fail(self, reason: str) -> None:
        self.failure = reason
        click.echo(
            f"no CUDA graphs from here on, steps are slower: {reason}; engine.cuda_graphs=off leaves "
            "them out from the start",
            err=True,
        )


def graphs_for(choice: CudaGraphs, device: torch.device) -> Graphs | None:
    """What the engines on this device share; None where they run without graphs."""
    if choice is CudaGraphs.off or device.type != "cuda":
        return None
    return Graphs(CudaCapturer())
