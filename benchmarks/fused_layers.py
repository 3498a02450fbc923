"""A plain decoding step on fused layers against one on transformers' own with prepacked linears.

    python benchmarks/fused_layers.py

SmolLM2-135M's shape with random weights, context 128, two threads; both targets take turns step by step.
"""

from __future__ import annotations

import time
from statistics import median

import torch
from growth import SHAPES, random_target

from dspark.decode.engine import Engine, Request
from dspark.models.packed import pack_linears
from dspark.models.target import Target

ROUNDS, CONTEXT = 30, 128


def engine_of(target: Target, rows: int) -> Engine:
    """An engine whose places are all taken."""
    engine = Engine(target, concurrency=rows, capacity=CONTEXT + ROUNDS + 2)
    for row in range(rows):
        engine.admit(Request("step", row, [1 + row] * CONTEXT, ROUNDS + 2), 0.0)
    return engine


def main() -> None:
    """Measure and print the table."""
    torch.set_num_threads(2)
    print("| precision | concurrency | transformers' layers, ms | fused, ms | ratio |")
    print("| --- | --- | --- | --- | --- |")
    for dtype in (torch.float32, torch.bfloat16):
        theirs, ours = (random_target(SHAPES["smollm2_135m"], "cpu", dtype) for _ in range(2))
        pack_linears(theirs.decoder)
        theirs.head = theirs.head.pack()
        ours.pack()
        for rows in (1, 4, 16):
            engines = [engine_of(target, rows) for target in (theirs, ours)]
            times: list[list[float]] = [[], []]
            for _ in range(ROUNDS):
                for engine, taken in zip(engines, times, strict=True):
                    begun = time.perf_counter()
                    engine.step()
                    taken.append(time.perf_counter() - begun)
            before, after = (1000 * median(taken) for taken in times)
            name = str(dtype).removeprefix("torch.")
            print(f"| {name} | {rows} | {before:.1f} | {after:.1f} | {before / after:.2f} |")


if __name__ == "__main__":
    main()
