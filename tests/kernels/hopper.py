"""Compile every kernel as its launch on an H100 or H200 would, without one; prints what came of it.

    python tests/kernels/hopper.py

One JSON object a kernel and launch, with the bytes of shared memory and of stack (what does not fit the
registers), and whether its products run on tensor cores. TRITON_INTERPRET must not be set.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction, mangle_type

from dspark.kernels.add_norm import add_norm
from dspark.kernels.greedy_accept import accept_greedy
from dspark.kernels.markov_argmax import markov_argmax
from dspark.kernels.rejection import accept_sampled
from dspark.kernels.rope_append import rope_append
from dspark.kernels.rows import Rows
from dspark.kernels.verify_attention import attend_rows
from dspark.models.fused import Norm

MODULES = (
    "add_norm",
    "greedy_accept",
    "markov_argmax",
    "rejection",
    "rope_append",
    "verify_attention",
)
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"


class Compiled:
    """Stands for a kernel: a launch compiles it for Hopper and tells of it."""

    def __init__(self, kernel: JITFunction, case: str) -> None:
        self.kernel, self.case = kernel, case

    def __getitem__(self, _grid: Any) -> Any:
        return self.launch

    def launch(self, *args: Any, num_warps: int, num_stages: int = 3, **constants: Any) -> None:
        given = dict(zip(self.kernel.arg_names, args, strict=False)) | constants
        kinds, attributes = {}, {}
        for index, parameter in enumerate(self.kernel.params):
            name, value = parameter.name, given[parameter.name]
            # As a launch specialises: an integer 1 is a constant, multiples of 16 are known to be some.
            constant = parameter.is_constexpr or (type(value) is int and value == 1)
            kinds[name] = "constexpr" if constant else mangle_type(value)
            if constant:
                constants[name] = value
            elif isinstance(value, torch.Tensor) or (type(value) is int and value % 16 == 0):
                attributes[(index,)] = [["tt.divisibility", 16]]
        made = triton.compile(
            ASTSource(self.kernel, kinds, constants, attributes),
            target=GPUTarget("cuda", 90, 32),
            options={"num_warps": num_warps, "num_stages": num_stages},
        )
        facts = {
            "kernel": self.kernel.__name__,
            "case": self.case,
            "shared": made.metadata.shared,
            "stack": stack(made.asm["cubin"]),
            "tensor_cores": bool(re.search(r"wgmma\.mma|mma\.sync", made.asm["ptx"])),
        }
        print(json.dumps(facts))


def stack(cubin: bytes) -> int:
    """Bytes of stack that each thread of a compiled kernel needs."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        told = subprocess.run(
            [TOOL, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        )
    return int(re.findall(r"STACK:(\d+)", told.stdout)[0])


def kernels() -> Iterator[tuple[Any, str, JITFunction]]:
    """All that are launched: module, name and kernel."""
    for name in MODULES:
        module = import_module(f"dspark.kernels.{name}")
        launched = re.findall(r"(\w+)\[\(", Path(str(module.__file__)).read_text())
        for kernel in sorted(set(launched)):
            yield module, kernel, getattr(module, kernel)


def launch_all(
    rows: int, width: int, groups: int, heads: int, size: int, window: int | None, dtype: Any
) -> None:
    """Every kernel at one shape; the vocabularies are smaller than real ones, as the code is the same."""

    def some(*shape: int) -> torch.Tensor:
        return torch.zeros(*shape, dtype=dtype)

    places = Rows.of(torch.arange(width).expand(rows, -1), None)
    keys, values = some(2, rows, groups, 1024, size)
    norm, tokens = Norm(some(size), 1e-6), rows * width
    rope = some(tokens, size), some(tokens, size)
    qkv = some(tokens, (heads + 2 * groups) * size)
    query = rope_append(qkv, rope, (norm, norm), keys, values, places)
    attend_rows(query, keys, values, places, 1.0, window)
    add_norm(some(tokens, 4096), some(tokens, 4096), some(4096), 1e-6)
    markov_argmax(some(rows, 4096), some(rows, 256), some(4096, 256))
    drafted = torch.zeros(rows, width - 1, dtype=torch.long)
    limits = drafted.new_zeros(rows)
    accept_greedy(drafted.new_zeros(rows, width), drafted, limits)
    p = torch.zeros(rows, width, 4096)
    accept_sampled(p, p[:, : width - 1], drafted, limits, torch.zeros(rows, width))


def main() -> None:
    """Compile all at the shapes of Qwen3-4B and 8B, and of SmolLM2."""
    originals = list(kernels())
    for dtype, shape in (
        (torch.bfloat16, (64, 8, 8, 32, 128, None)),
        (torch.bfloat16, (1, 1, 3, 9, 64, 512)),
        (torch.float32, (64, 4, 8, 32, 128, None)),
    ):
        case = f"{str(dtype).removeprefix('torch.')} {shape}"
        for module, name, kernel in originals:
            setattr(module, name, Compiled(kernel, case))
        launch_all(*shape, dtype)


if __name__ == "__main__":
    main()
