"""Process time of all linear layers of SmolLM2-135M (30 layers, no LM head) on one thread.

python benchmarks/packed_linear.py
"""

from __future__ import annotations

import time

import torch

from dspark.models.packed import pack, packed_linear

SHAPES = [(960, 576), (576, 576), (3072, 576), (576, 1536)]  # q/k/v, o, gate and up, down
LAYERS, ROUNDS = 30, 5


def milliseconds(dtype: torch.dtype, rows: int, packed: bool) -> float:
    """Mean of some rounds over weights that do not fit the cache."""
    weights = [0.02 * torch.randn(*shape, dtype=dtype) for _ in range(LAYERS) for shape in SHAPES]
    inputs = {width: torch.randn(rows, width, dtype=dtype) for width in (576, 1536)}
    stored = [(w.shape[1], pack(w) if packed else w) for w in weights]
    for turn in range(ROUNDS + 1):
        if turn == 1:  # the first one warms up
            begun = time.process_time()
        for width, weight in stored:
            if packed:
                packed_linear(inputs[width], weight, None)
            else:
                torch.nn.functional.linear(inputs[width], weight)
    return 1000 * (time.process_time() - begun) / ROUNDS


if __name__ == "__main__":
    torch.set_num_threads(1)
    print("| rows | float32 plain | float32 packed | bfloat16 plain | bfloat16 packed |")
    print("| --- | --- | --- | --- | --- |")
    for rows in (1, 4, 16, 32):
        cells = [
            f"{milliseconds(dtype, rows, packed):.0f}"
            for dtype in (torch.float32, torch.bfloat16)
            for packed in (False, True)
        ]
        print(f"| {rows} | " + " | ".join(cells) + " |")
