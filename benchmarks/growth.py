"""How a step's time grows with concurrency, context, k and model size, and whether a long run slows down.

    python benchmarks/growth.py --out results/growth       # tables on stdout, growth.png in the folder
    python benchmarks/growth.py --only long                # one part: concurrency context k size long

Random weights: a step's time does not depend on what the tokens are. The caches are as full as the
context says, without a prefill. On a GPU: --device cuda --precision bfloat16 --shape qwen3_4b.
"""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median

import click
import torch
from matplotlib.figure import Figure
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from dspark.config import DrafterShape
from dspark.decode.engine import Engine, Request, Row
from dspark.decode.loop import closed_loop
from dspark.decode.sampling import request_generator
from dspark.models.attention import NAME
from dspark.models.drafter import DSparkDrafter
from dspark.models.target import Target
from dspark.train.start import new_drafter


@dataclass(frozen=True)
class Shape:
    """The size of a target."""

    hidden: int
    inner: int
    layers: int
    heads: int
    groups: int
    vocab: int
    head_dim: int = 64
    tied: bool = True
    qwen3: bool = False


SHAPES = {
    "tiny": Shape(64, 128, 2, 4, 2, 512, head_dim=16),
    "smollm2_135m": Shape(576, 1536, 30, 9, 3, 49152),
    "smollm2_360m": Shape(960, 2560, 32, 15, 5, 49152),
    "qwen3_0.6b": Shape(1024, 3072, 28, 16, 8, 151936, 128, qwen3=True),
    "qwen3_4b": Shape(2560, 9728, 36, 32, 8, 151936, 128, qwen3=True),
    "qwen3_8b": Shape(4096, 12288, 36, 32, 8, 151936, 128, tied=False, qwen3=True),
}
POSITIONS = 2**15
STEPS, WARMUP = 7, 2


def random_target(shape: Shape, device: str, dtype: torch.dtype) -> Target:
    """A target of this size with random weights."""
    kind, model = (
        (Qwen3Config, Qwen3ForCausalLM) if shape.qwen3 else (LlamaConfig, LlamaForCausalLM)
    )
    config = kind(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.groups,
        head_dim=shape.head_dim,
        max_position_embeddings=POSITIONS,
        tie_word_embeddings=shape.tied,
        attn_implementation=NAME,
    )
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device):
            target = Target(model(config))
    finally:
        torch.set_default_dtype(torch.float32)
    target.packs = True
    return target


def random_drafter(target: Target, layers: int, block: int, vocab: int) -> DSparkDrafter:
    """A drafter of the shipped one's shape for it, of the target's dtype."""
    shape = DrafterShape(layers=layers, block_size=block, markov_rank=32)
    ids = torch.arange(min(vocab, target.vocab_size), device=target.device)
    return new_drafter(shape, target, 0, ids).eval().requires_grad_(False).to(target.dtype)


def step_seconds(
    target: Target, drafter: DSparkDrafter | None, rows: int, k: int, context: int
) -> float:
    """Median seconds of a step of so many rows, each of which has `context` tokens behind it."""
    new = (STEPS + WARMUP + 1) * (k + 1)
    engine = Engine(target, drafter, k=k, concurrency=rows, capacity=context + new)
    for slot in range(rows):
        request = Request(str(slot), 0, [1] * (context - 1), new)
        row = Row(request, 0.0, request_generator(request.sampling, str(slot)), output=[1])
        engine.slots[slot] = row
    times = []
    for _ in range(WARMUP + STEPS):
        begun = engine.clock()
        engine.step()
        times.append(engine.clock() - begun)
    return median(times[WARMUP:])


def peak_bytes(device: str) -> int:
    """High-water mark of memory: the process's on a CPU, torch's on a GPU."""
    if device == "cuda":
        return torch.cuda.max_memory_allocated()
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def long_run(target: Target, requests: int, new: int = 16) -> list[float]:
    """Seconds of every step of a closed loop over so many short requests."""
    engine = Engine(target, concurrency=4, capacity=8 + new)
    seconds: list[float] = []
    step = engine.step

    def timed(drafting: bool = True) -> list[Row]:
        begun = engine.clock()
        finished = step(drafting)
        seconds.append(engine.clock() - begun)
        return finished

    engine.step = timed  # type: ignore[method-assign]
    names = [(str(n), 1) for n in range(requests)]
    list(closed_loop(engine, names, lambda name, turn, _: Request(name, turn, [1] * 8, new)))
    return seconds


def _line(cells: list[object]) -> str:
    return "| " + " | ".join(str(cell) for cell in cells) + " |"


def _table(header: list[object], body: list[list[object]]) -> None:
    click.echo("\n".join(map(_line, [header, ["---"] * len(header), *body])) + "\n")


@click.command()
@click.option("--shape", default="smollm2_135m", type=click.Choice(list(SHAPES)), show_default=True)
@click.option("--device", default="cpu", type=click.Choice(["cpu", "cuda"]), show_default=True)
@click.option("--precision", default="bfloat16", show_default=True)
@click.option("--threads", default=2, show_default=True)
@click.option("--only", multiple=True, help="Parts to measure; default: all.")
@click.option("--requests", default=5000, show_default=True, help="Of the long run.")
@click.option("--out", default="results/growth", type=click.Path(path_type=Path))
def main(
    shape: str,
    device: str,
    precision: str,
    threads: int,
    only: tuple[str, ...],
    requests: int,
    out: Path,
) -> None:
    """Measure, print tables and draw them."""
    torch.set_num_threads(threads)
    dtype = getattr(torch, precision)
    parts = only or ("concurrency", "context", "k", "size", "long")
    curves: dict[str, tuple[list[int], dict[str, list[float]]]] = {}
    with torch.inference_mode():
        if {"concurrency", "context", "k"} & set(parts):
            target = random_target(SHAPES[shape], device, dtype)
            drafter = random_drafter(target, 2, 15, 8192)
            target.pack()
            drafter.pack()
            for name, axis in _axes():
                if name in parts:
                    curves[name] = _grow(target, drafter, name, axis, device)
        if "size" in parts:
            _sizes(device, dtype)
        if "long" in parts:
            _long(requests)
    out.mkdir(parents=True, exist_ok=True)
    if curves:
        _draw(curves, out / "growth.png")


def _axes() -> Iterator[tuple[str, list[int]]]:
    yield "concurrency", [1, 2, 4, 8, 16, 32, 64]
    yield "context", [128, 512, 2048, 8192]
    yield "k", [1, 2, 3, 5, 7, 11, 15]


def _grow(
    target: Target, drafter: DSparkDrafter, name: str, axis: list[int], device: str
) -> tuple[list[int], dict[str, list[float]]]:
    """One table: the others stay at concurrency 4, context 128 and k 0, 3 and 7."""
    at = {"concurrency": 4, "context": 128}
    widths = [0, 3, 7] if name != "k" else [0]
    columns: dict[str, list[float]] = {f"k = {k}" if k else "baseline": [] for k in widths}
    if name == "k":
        columns = {"speculative": []}
    for value in axis:
        here = {**at, name: value}
        for k, column in zip(widths if name != "k" else [value], columns.values(), strict=True):
            ms = 1000 * step_seconds(
                target, drafter if k else None, here["concurrency"], k, here["context"]
            )
            column.append(ms)
    click.echo(f"Step time in ms by {name}; peak memory {peak_bytes(device) / 2**30:.2f} GiB\n")
    _table([name, *axis], [[label, *(f"{ms:.1f}" for ms in v)] for label, v in columns.items()])
    return axis, columns


def _sizes(device: str, dtype: torch.dtype) -> None:
    """Plain and speculative steps of targets of several sizes, at concurrency 4 and context 128."""
    names = ["smollm2_135m", "smollm2_360m", "qwen3_0.6b"]
    if device == "cuda":
        names = ["smollm2_135m", "qwen3_4b", "qwen3_8b"]
    body: list[list[object]] = []
    for name in names:
        target = random_target(SHAPES[name], device, dtype)
        size = target.weight_bytes
        drafter = random_drafter(target, 2, 7, 8192)
        target.pack()
        drafter.pack()
        plain, three, seven = (
            1000 * step_seconds(target, drafter if k else None, 4, k, 128) for k in (0, 3, 7)
        )
        ratios = [f"{ms:.1f} ({ms / plain:.2f})" for ms in (three, seven)]
        body.append([name, f"{size / 2**20:.0f} MiB", f"{plain:.1f}", *ratios])
    click.echo("Step time in ms by size; in brackets over the plain step's\n")
    _table(["target", "weights", "baseline", "k = 3", "k = 7"], body)


def _long(requests: int) -> None:
    """First and last tenth of a long run on a tiny target."""
    target = random_target(SHAPES["tiny"], "cpu", torch.float32)
    target.pack()
    long_run(target, 50)
    before = peak_bytes("cpu")
    seconds = long_run(target, requests)
    tenth = len(seconds) // 10
    first, last = (1e6 * median(part) for part in (seconds[:tenth], seconds[-tenth:]))
    grown = (peak_bytes("cpu") - before) / 2**20
    click.echo(f"A run of {requests} requests on a tiny target, {len(seconds)} steps\n")
    _table(
        ["median step, first tenth", "last tenth", "ratio", "memory grown by"],
        [[f"{first:.0f} us", f"{last:.0f} us", f"{last / first:.3f}", f"{grown:.1f} MiB"]],
    )


def _draw(curves: dict[str, tuple[list[int], dict[str, list[float]]]], path: Path) -> None:
    figure = Figure(figsize=(4 * len(curves), 3.2), layout="constrained")
    axes = figure.subplots(1, len(curves), squeeze=False)[0]
    for panel, (name, (values, columns)) in zip(axes, curves.items(), strict=True):
        for (label, ms), style in zip(columns.items(), ("o-", "s--", "^:"), strict=False):
            panel.plot(values, ms, style, label=label)
        panel.set(xlabel=name if name != "context" else "context, tokens", ylabel="step, ms")
        panel.set_xscale("log", base=2)
        panel.set_ylim(bottom=0)
        panel.grid(alpha=0.3)
        if len(columns) > 1:
            panel.legend()
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
