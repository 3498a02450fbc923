"""The Triton kernels of a decoding step against PyTorch's own operations, at the shapes that occur.

    python benchmarks/triton_kernels.py              # on a GPU, under three minutes; what pays on yours?
    export TRITON_INTERPRET=1                        # on a CPU: does it run?
    python benchmarks/triton_kernels.py --device cpu --precision float32 --shape tiny --rows 1

Microseconds of one call inside a CUDA graph, as steps run: launches cost little there. Calls take turns on
copies of their inputs that together are larger than the GPU's cache, as a step's layers do. The last
column says how near the kernel is to the time in which the device reads what the call must read.
engine.kernels=true runs steps on them. (A file named kernels.py here would be taken for the package of that
name, which transformers looks for.)
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from statistics import median
from typing import Any

import click
import torch
from growth import SHAPES, Shape
from torch import Tensor

from dspark.decode.parts import read_bandwidth
from dspark.decode.verify import accept_greedy, accept_sampled
from dspark.kernels.rows import Rows
from dspark.kernels.switch import interpreting
from dspark.models.attention import attend
from dspark.models.fused import Norm

CONTEXT, RANK, BLOCK = 512, 256, 7  # of the paper's drafters: a step verifies at most seven tokens
CACHE = 2**27  # bytes: more than the L2 cache of an H100 or H200 holds
COPIES, REPLAYS = 32, 9
COLUMNS = ["kernel", "target", "rows", "k", "PyTorch, us", "kernel, us", "ratio", "of the limit"]


@dataclass(frozen=True)
class Case:
    """One call, in PyTorch and as a kernel."""

    kernel: str
    rows: int
    k: int | None  # None: it does not matter
    inputs: Callable[[], Any]  # a fresh copy of all that the two read
    plain: Callable[..., Any]
    ours: Callable[..., Any]
    read: int  # bytes that a call must read


def cases(
    shape: Shape, rows: int, drafted: tuple[int, ...], new: Callable[..., Tensor]
) -> Iterator[Case]:
    """All calls of one target at `rows` rows.

    Args:
        new: makes normally distributed numbers of a shape, on the device and in the precision.
    """
    for k in drafted:
        yield _attention(shape, rows, k, new)
        yield _rope_append(shape, rows, k, new)
        yield _add_norm(shape, rows, k, new)
    yield _markov_argmax(shape, rows, new)
    for k in drafted:
        if k:
            yield _accept_greedy(rows, k, new)
            yield _accept_sampled(shape, rows, k, new)


def _places(rows: int, k: int, device: torch.device) -> Rows:
    here = torch.arange(CONTEXT - k - 1, CONTEXT, device=device)
    return Rows.of(here.repeat(rows, 1), None)


def _attention(shape: Shape, rows: int, k: int, new: Callable[..., Tensor]) -> Case:
    from dspark.kernels.verify_attention import attend_rows

    places = _places(rows, k, new(1).device)
    size, scale = shape.head_dim, shape.head_dim**-0.5
    ages = places.positions.view(rows, 1, k + 1, 1) - torch.arange(CONTEXT, device=new(1).device)
    # A target makes its masks once a pass, so that is not timed.
    mask = new(1).new_zeros(ages.shape).masked_fill(ages < 0, float("-inf"))
    if k:
        mask = mask.repeat(1, 1, shape.heads // shape.groups, 1)

    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        store = (rows, shape.groups, CONTEXT, size)
        return new(rows * (k + 1), shape.heads, size), new(*store), new(*store)

    def plain(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        spread = query.unflatten(0, (rows, k + 1)).transpose(1, 2)
        return attend(spread, keys, values, mask, scale).transpose(1, 2)

    def ours(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
        return attend_rows(query, keys, values, places, scale, None)

    read = 2 * rows * shape.groups * CONTEXT * size * new(1).element_size()
    return Case("verify attention", rows, k, inputs, plain, ours, read)


def _rope_append(shape: Shape, rows: int, k: int, new: Callable[..., Tensor]) -> Case:
    from dspark.kernels.rope_append import reference, rope_append

    places, size, tokens = _places(rows, k, new(1).device), shape.head_dim, rows * (k + 1)
    norms = (Norm(new(size), 1e-6), Norm(new(size), 1e-6)) if shape.qwen3 else None
    rope = new(tokens, size), new(tokens, size)
    width = (shape.heads + 2 * shape.groups) * size

    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        store = (rows, shape.groups, CONTEXT, size)
        return new(tokens, width), new(*store), new(*store)

    def call(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
        return lambda qkv, keys, values: function(qkv, rope, norms, keys, values, places)

    read = tokens * width * new(1).element_size()
    return Case("rope append", rows, k, inputs, call(reference), call(rope_append), read)


def _add_norm(shape: Shape, rows: int, k: int, new: Callable[..., Tensor]) -> Case:
    from dspark.kernels.add_norm import add_norm, reference

    tokens, weight = rows * (k + 1), new(shape.hidden)

    def inputs() -> tuple[Tensor, Tensor, Tensor, float]:
        return new(tokens, shape.hidden), new(tokens, shape.hidden), weight, 1e-6

    read = 2 * tokens * shape.hidden * weight.element_size()
    return Case("add norm", rows, k, inputs, reference, add_norm, read)


def _markov_argmax(shape: Shape, rows: int, new: Callable[..., Tensor]) -> Case:
    from dspark.kernels.markov_argmax import markov_argmax, reference

    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        return new(rows, shape.vocab), new(rows, RANK), new(shape.vocab, RANK)

    read = shape.vocab * (RANK + rows) * new(1).element_size()
    return Case("Markov argmax", rows, None, inputs, reference, markov_argmax, read)


def _accept_greedy(rows: int, k: int, new: Callable[..., Tensor]) -> Case:
    from dspark.kernels import greedy_accept

    def inputs() -> tuple[Tensor, Tensor, Tensor]:
        target = new(rows, k + 1).gt(0).long()
        return target, new(rows, k).gt(0).long(), target.new_full((rows,), k)

    read = 8 * rows * (2 * k + 2)
    ours = greedy_accept.accept_greedy
    return Case("greedy accept", rows, k, inputs, accept_greedy, ours, read)


def _accept_sampled(shape: Shape, rows: int, k: int, new: Callable[..., Tensor]) -> Case:
    from dspark.kernels import rejection

    def inputs() -> tuple[Tensor, ...]:
        p, q = (new(rows, n, shape.vocab).float().softmax(-1) for n in (k + 1, k))
        uniforms = torch.rand(rows, k + 1, device=p.device)
        drafted = torch.randint(shape.vocab, (rows, k), device=p.device)
        return p, q, drafted, drafted.new_full((rows,), k), uniforms

    read = 2 * 4 * rows * shape.vocab  # two distributions of each row, float32
    return Case("rejection", rows, k, inputs, accept_sampled, rejection.accept_sampled, read)


def call_seconds(function: Callable[..., Any], copies: list[Any], device: str) -> float:
    """Seconds of a call: the median of some rounds, in each of which it is made once with each copy."""

    def all_calls() -> None:
        for inputs in copies:
            function(*inputs)

    if device == "cpu":
        begun = time.perf_counter()
        all_calls()
        return (time.perf_counter() - begun) / len(copies)
    aside = torch.cuda.Stream()
    with torch.cuda.stream(aside):  # compiles, and lets libraries set up what a capture may not
        all_calls()
    torch.cuda.current_stream().wait_stream(aside)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        all_calls()
    times = []
    for _ in range(REPLAYS):
        begun, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begun.record()
        graph.replay()
        ended.record()
        ended.synchronize()
        times.append(begun.elapsed_time(ended) / 1e3)
    return median(times[1:]) / len(copies)


def line(name: str, case: Case, device: str, bandwidth: float) -> str:
    """One line of the table."""
    count = 1 if device == "cpu" else max(1, min(COPIES, CACHE // case.read))
    copies = [case.inputs() for _ in range(count)]
    plain, ours = (call_seconds(one, copies, device) for one in (case.plain, case.ours))
    k = "—" if case.k is None else case.k
    return (
        f"| {case.kernel} | {name} | {case.rows} | {k} | {1e6 * plain:.1f} | {1e6 * ours:.1f} | "
        f"{plain / ours:.2f} | {case.read / bandwidth / ours:.0%} |"
    )


def lines(
    names: tuple[str, ...],
    concurrencies: tuple[int, ...],
    drafted: tuple[int, ...],
    device: str,
    dtype: torch.dtype,
    bandwidth: float,
) -> Iterator[str]:
    """The table's lines; the ratio is PyTorch's time over the kernel's."""
    torch.manual_seed(0)

    def new(*shape: int) -> Tensor:
        return torch.randn(shape, device=device, dtype=dtype)

    for name in names:
        for rows in concurrencies:
            for case in cases(SHAPES[name], rows, drafted, new):
                yield line(name, case, device, bandwidth)


@click.command()
@click.option("--device", default="cuda", type=click.Choice(["cpu", "cuda"]), show_default=True)
@click.option("--precision", default="bfloat16", show_default=True)
@click.option("--shape", "shapes", multiple=True, type=click.Choice(list(SHAPES)))
@click.option("--rows", "concurrencies", multiple=True, type=int, help="Default: 1 4 16 64.")
@click.option(
    "--k", "drafted", multiple=True, type=click.IntRange(0, BLOCK), help="Default: 0 3 7."
)
def main(
    device: str,
    precision: str,
    shapes: tuple[str, ...],
    concurrencies: tuple[int, ...],
    drafted: tuple[int, ...],
) -> None:
    """Measure and print the table."""
    if find_spec("triton") is None:
        raise click.ClickException(
            "triton is not installed: PyTorch's builds for GPUs bring it along"
        )
    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException(
            "no CUDA device here: set TRITON_INTERPRET=1 and add --device cpu --precision float32 "
            "--shape tiny, which shows that the kernels work and not how fast they are"
        )
    if (device == "cpu") != interpreting():
        raise click.ClickException("TRITON_INTERPRET=1 goes with --device cpu, and with it alone")
    bandwidth = read_bandwidth(torch.device(device))
    name = torch.cuda.get_device_name() if device == "cuda" else "CPU, interpreted"
    click.echo(f"{name}, {precision}, context {CONTEXT}; reads {bandwidth / 1e9:.0f} GB/s\n")
    click.echo("| " + " | ".join(COLUMNS) + " |")
    click.echo("| " + " | ".join(["---"] * len(COLUMNS)) + " |")
    shapes = shapes or ("smollm2_135m", "qwen3_4b", "qwen3_8b")
    with torch.inference_mode():
        for text in lines(
            shapes,
            concurrencies or (1, 4, 16, 64),
            drafted or (0, 3, 7),
            device,
            getattr(torch, precision),
            bandwidth,
        ):
            click.echo(text)


if __name__ == "__main__":
    main()
