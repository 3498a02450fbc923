"""Steps of Qwen3-4B-, 8B- and SmolLM2-shaped targets with random weights: no downloads, one table.

    python benchmarks/gpu.py                                   # on a GPU, under three minutes
    python benchmarks/gpu.py --device cpu --shape tiny --precision float32 --rows 1 --rows 4

For each concurrency the plain step and those with k = 3 and 7 drafted by a drafter of the paper's shape
(5 layers, rank 256, whole vocabulary), run in several ways: eager (operation by operation, with no more
work than the rows need), static (operation by operation, shapes filled up to buckets) and, on a GPU, graphs
(the same as CUDA graphs), on PyTorch's operations and on the Triton kernels. Beside them how near each is
to the time in which the device can read what a step must read, and the speedup that follows where positions
1, 2, .. are accepted in the shares --accept of the steps (emitted tokens a step over the step's time,
against the plain step run in the same way).
"""

from __future__ import annotations

from collections.abc import Iterator
from statistics import median

import click
import torch
from growth import SHAPES, peak_bytes, random_target

from dspark.config import CudaGraphs, DrafterShape
from dspark.decode.engine import Engine, Request, Row
from dspark.decode.graphs import Graphs, graphs_for
from dspark.decode.parts import read_bandwidth, step_bytes
from dspark.decode.sampling import request_generator
from dspark.kernels.switch import use_kernels
from dspark.train.start import new_drafter

CONTEXT = 512
STEPS, WARMUP = 7, 2  # the first of these captures
SECONDS = 0.4  # of timed steps a line: then three are enough
# Share of steps that accept positions 1 to 7, of a DSpark drafter on gsm8k (vLLM pull request 52197).
ACCEPT = (0.901, 0.795, 0.667, 0.550, 0.436, 0.327, 0.225)


@click.command()
@click.option("--device", default="cuda", type=click.Choice(["cpu", "cuda"]), show_default=True)
@click.option("--precision", default="bfloat16", show_default=True)
@click.option("--shape", "shapes", multiple=True, type=click.Choice(list(SHAPES)))
@click.option("--rows", "concurrencies", multiple=True, type=int, help="Default: 1 4 16 64.")
@click.option(
    "--accept", multiple=True, type=float, help="One for each position; default: as published."
)
@click.option("--threads", default=2, show_default=True)
def main(
    device: str,
    precision: str,
    shapes: tuple[str, ...],
    concurrencies: tuple[int, ...],
    accept: tuple[float, ...],
    threads: int,
) -> None:
    """Measure and print the table."""
    if device == "cuda" and not torch.cuda.is_available():
        raise click.ClickException("no CUDA device here: add --device cpu --shape tiny")
    torch.set_num_threads(threads)
    accept, dtype = accept or ACCEPT, getattr(torch, precision)
    bandwidth = read_bandwidth(torch.device(device))
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {threads} threads"
    click.echo(f"{name}, {precision}, context {CONTEXT}; reads {bandwidth / 1e9:.0f} GB/s\n")
    click.echo(
        "| target | concurrency | k | run | step, ms | of the limit | over plain | speedup |"
    )
    click.echo("| --- | --- | --- | --- | --- | --- | --- | --- |")
    with torch.inference_mode():
        for shape in shapes or ("smollm2_135m", "qwen3_4b", "qwen3_8b"):
            sizes = concurrencies or (1, 4, 16, 64)
            for line in _lines(shape, device, dtype, sizes, accept, bandwidth):
                click.echo(line)
    click.echo(f"\npeak memory {peak_bytes(device) / 2**30:.1f} GiB")


def _lines(
    shape: str,
    device: str,
    dtype: torch.dtype,
    concurrencies: tuple[int, ...],
    accept: tuple[float, ...],
    bandwidth: float,
) -> Iterator[str]:
    """The table's lines of one target."""
    target = random_target(SHAPES[shape], device, dtype)
    drafter = new_drafter(DrafterShape(layers=5, taps=5, markov_rank=256), target, 0)
    drafter.eval().requires_grad_(False).to(target.dtype)
    needed = {
        (rows, k): step_bytes(target, drafter, rows, k, CONTEXT)
        for rows in concurrencies
        for k in (0, 3, 7)
    }
    target.pack()
    drafter.pack()
    for rows in concurrencies:
        plain: dict[str, float] = {}
        for k in (0, 3, 7):
            emitted = 1 + sum(accept[:k])
            for way, (graphs, kernels) in _ways(target.device).items():
                use_kernels(kernels)
                engine = Engine(
                    target,
                    drafter if k else None,
                    k=k,
                    concurrency=rows,
                    capacity=CONTEXT + (STEPS + WARMUP + 1) * (k + 1),
                    static=way != "eager",
                    graphs=graphs,
                )
                seconds = _step_seconds(engine)
                if graphs is not None and graphs.failure is not None:
                    continue  # it has said so
                plain.setdefault(way, seconds)
                yield (
                    f"| {shape} | {rows} | {k} | {way} | {1000 * seconds:.2f} | "
                    f"{needed[rows, k] / bandwidth / seconds:.0%} | {seconds / plain[way]:.2f} | "
                    f"{emitted * plain[way] / seconds:.2f} |"
                )


def _ways(device: torch.device) -> dict[str, tuple[Graphs | None, bool]]:
    """How steps can be run here: with which graphs, and whether on the Triton kernels."""
    ways: dict[str, tuple[Graphs | None, bool]] = {"eager": (None, False), "static": (None, False)}
    for name, kernels in (("graphs", False), ("graphs, kernels", True)):
        graphs = graphs_for(CudaGraphs.auto, device)
        if graphs is not None:
            ways[name] = graphs, kernels
    return ways


def _step_seconds(engine: Engine) -> float:
    """Median seconds of a step of all slots, each of whose rows has CONTEXT tokens behind it."""
    for slot in range(len(engine.slots)):
        request = Request(str(slot), 0, [1] * (CONTEXT - 1), engine.capacity - CONTEXT + 1)
        generator = request_generator(request.sampling, str(slot))
        engine.slots[slot] = Row(request, 0.0, generator, output=[1])
    times: list[float] = []
    while len(times) < WARMUP + STEPS and (len(times) < WARMUP + 3 or sum(times) < SECONDS):
        begun = engine.clock()
        engine.step()
        times.append(engine.clock() - begun)
    return median(times[WARMUP:])


if __name__ == "__main__":
    main()
