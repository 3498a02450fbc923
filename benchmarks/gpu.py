"""Steps of Qwen3-4B-, 8B- and SmolLM2-shaped targets with random weights: no downloads, one table.

    python benchmarks/gpu.py                                   # on a GPU, under three minutes
    python benchmarks/gpu.py --device cpu --shape tiny --precision float32 --rows 1 --rows 4

For each concurrency the plain step and those with k = 3 and 7 drafted by a drafter of the paper's shape
(5 layers, rank 256, whole vocabulary), how near each is to the time in which the device can read what a
step must read, and the speedup that follows where positions 1, 2, .. are accepted in the shares --accept of
the steps (emitted tokens a step over the step's time, against the plain step).
"""

from __future__ import annotations

from collections.abc import Iterator

import click
import torch
from growth import SHAPES, peak_bytes, random_target, step_seconds

from dspark.config import DrafterShape
from dspark.decode.parts import read_bandwidth, step_bytes
from dspark.train.start import new_drafter

CONTEXT = 512
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
    click.echo("| target | concurrency | k | step, ms | of the limit | over plain | speedup |")
    click.echo("| --- | --- | --- | --- | --- | --- | --- |")
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
        plain = step_seconds(target, None, rows, 0, CONTEXT)
        for k in (0, 3, 7):
            seconds = step_seconds(target, drafter, rows, k, CONTEXT) if k else plain
            emitted = 1 + sum(accept[:k])
            yield (
                f"| {shape} | {rows} | {k} | {1000 * seconds:.2f} | "
                f"{needed[rows, k] / bandwidth / seconds:.0%} | {seconds / plain:.2f} | "
                f"{emitted * plain / seconds:.2f} |"
            )


if __name__ == "__main__":
    main()
