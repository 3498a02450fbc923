"""What a measurement ran on: the facts without which its numbers mean nothing."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

import dspark
from dspark.config import Device, EngineConfig, Precision
from dspark.errors import UserError
from dspark.kernels.switch import interpreting, kernels_used, use_kernels
from dspark.models.packed import can_pack, pack, packed_linear


def resolve_device(device: Device, field: str = "engine.device") -> str:
    """The torch device to run on; auto takes cuda when there is one.

    Args:
        field: where the config names it, for the message.

    Raises:
        UserError: cuda is required and there is none.
    """
    if device is Device.auto:
        return "cuda" if torch.cuda.is_available() else "cpu"
    if device is Device.cuda and not torch.cuda.is_available():
        raise UserError(f"{field} is cuda but no GPU can be used: set {field}=cpu or auto")
    return device.value


def resolve_precision(precision: Precision, device: str) -> Precision:
    """The precision to run in; auto takes bfloat16 where the device multiplies faster in it.

    On a CPU both are timed: some have the instructions, others only pretend to.
    """
    if precision is not Precision.auto:
        return precision
    if device != "cpu":
        return Precision.bfloat16 if torch.cuda.is_bf16_supported(False) else Precision.float32
    if not can_pack(torch.empty(0, dtype=torch.bfloat16)):
        return Precision.float32
    seconds = {
        choice: _product_seconds(getattr(torch, choice.value))
        for choice in (Precision.float32, Precision.bfloat16)
    }
    return min(seconds, key=lambda choice: seconds[choice])


@torch.inference_mode()
def _product_seconds(dtype: torch.dtype) -> float:
    """Least seconds of a few rows times a weight that no cache keeps, as a decoding step has them."""
    weight, rows = torch.zeros(8192, 2048, dtype=dtype), torch.zeros(4, 2048, dtype=dtype)
    packed, times = pack(weight), []
    for _ in range(5):
        begun = time.perf_counter()
        packed_linear(rows, packed, None)
        times.append(time.perf_counter() - begun)
    return min(times)


def set_threads(threads: int | None) -> int:
    """Set the CPU threads once, by default to the cores that this process may use; returns them."""
    count = threads or len(os.sched_getaffinity(0))
    torch.set_num_threads(count)
    return count


def set_kernels(engine: EngineConfig, device: str) -> None:
    """Let the decoding steps of this process run on the Triton kernels, or not, as the engine says.

    Triton's interpreter (TRITON_INTERPRET=1) runs them on a CPU: slowly, to see what they compute.

    Args:
        device: the torch device that the engine runs on.

    Raises:
        UserError: they are asked for and cannot run here.
    """
    if engine.kernels:
        _check_kernels(engine.precision, device)
    use_kernels(engine.kernels)


def _check_kernels(precision: Precision, device: str) -> None:
    if _version("triton") is None:
        raise UserError(
            "engine.kernels is true and triton is not installed: install PyTorch's build for your GPU, "
            "which brings it along, or set engine.kernels=false"
        )
    interpreted = interpreting()
    if device != "cuda" and not interpreted:
        raise UserError(
            f"engine.kernels is true and there are none for {device}: set engine.kernels=false, or "
            "engine.device=cuda where there is a GPU"
        )
    if interpreted and precision is not Precision.float32:
        raise UserError(
            f"engine.kernels is true, TRITON_INTERPRET is set and engine.precision is "
            f"{precision.value}: the interpreter computes bfloat16 wrongly, set "
            "engine.precision=float32 or unset TRITON_INTERPRET"
        )


def describe(device: str, config_digest: str) -> dict[str, Any]:
    """Content of environment.json: device, driver, node, versions, git state, load, config digest."""
    facts: dict[str, Any] = {
        "config_digest": config_digest,
        "device": _cpu_name(),
        "device_uuid": None,
        "driver": None,
        "cuda": torch.version.cuda,
        "cuda_graphs": False,  # what a job's engines come to, see `Job.cuda_graphs`
        "threads": torch.get_num_threads(),
        "kernels": kernels_used(),
        "cores": psutil.cpu_count(),
        "memory_bytes": psutil.virtual_memory().total,
        "load_average": list(os.getloadavg()),
        "omp_wait_policy": os.environ.get("OMP_WAIT_POLICY"),
        "gomp_spincount": os.environ.get("GOMP_SPINCOUNT"),
        "node": platform.node(),
        "slurm_job_id": os.environ.get("SLURM_JOB_ID"),
        "cuda_visible_devices": os.environ.get("CUDA_VISIBLE_DEVICES"),
        "platform": platform.platform(),
        "python": platform.python_version(),
        "dspark": dspark.__version__,
        **{name: _version(name) for name in ("torch", "triton", "transformers", "tokenizers")},
        **git_state(Path(__file__).parent),
    }
    if device == "cuda":
        properties = torch.cuda.get_device_properties(0)
        facts["device"] = properties.name
        facts["device_uuid"] = str(properties.uuid)
        facts |= _nvidia_smi()
    return facts


def git_state(folder: Path) -> dict[str, Any]:
    """Commit and dirty flag of the checkout that holds `folder`; None outside a checkout."""

    def git(*args: str) -> str | None:
        try:
            done = subprocess.run(
                ["git", "-C", str(folder), *args], capture_output=True, text=True, timeout=20
            )
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    status = git("status", "--porcelain", "--untracked-files=no")
    return {
        "git_sha": git("rev-parse", "HEAD"),
        "git_dirty": None if status is None else bool(status),
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_name() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def _nvidia_smi() -> dict[str, str]:
    """Driver and clocks as nvidia-smi tells them; nothing where it is absent."""
    fields = {"driver": "driver_version", "clock_sm": "clocks.sm", "clock_mem": "clocks.mem"}
    try:
        done = subprocess.run(
            ["nvidia-smi", f"--query-gpu={','.join(fields.values())}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return {}
    values = done.stdout.splitlines()[0].split(", ")
    return dict(zip(fields, values, strict=True))
