"""What a job and its machine used in each measured window: CPU, memory and, on a GPU, its load.

Counters are read before a window's first submit and after its last token, never inside: a thread that
looked every few seconds would take time from what is measured. What the system counts (CPU time) is
therefore of the whole window, what it only shows (memory, the GPU) of the window's end.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

from dspark.files import cannot_write, write_text

if TYPE_CHECKING:
    import torch

USAGE = "usage.jsonl"  # beside the records, one line a window


@dataclass
class WindowUsage:
    """One measured window. Percentages of a CPU or GPU in full use; megabytes are 10^6 bytes.

    The names are those that MLflow gives its system metrics, where it has one.
    """

    run: str
    window: int
    began: str  # by the machine's clock, ISO 8601 in UTC; the one thing here that the clock says
    seconds: float
    cpu_utilization_percentage: float  # of all cores of the machine, other processes included
    process_cpu_percentage: float  # of one core, by this process: 200 is two cores
    system_memory_usage_megabytes: float
    process_memory_megabytes: float
    gpu_memory_usage_megabytes: float | None = None  # None without a GPU
    # As NVML tells them of about the window's last second.
    gpu_utilization_percentage: float | None = None
    gpu_power_usage_watts: float | None = None
    shard: int = 1  # where those of several are together: which, from 1, each with its own windows


class Meter:
    """Measures what is used between `start` and `stop`."""

    def __init__(self, device: torch.device) -> None:
        self._device, self._process = device, psutil.Process()
        self._began, self._start = "", 0.0

    def start(self) -> None:
        """A window begins."""
        psutil.cpu_percent()  # both return what was used since they were last asked
        self._process.cpu_percent()
        self._began = datetime.now(UTC).isoformat(timespec="milliseconds")
        self._start = time.perf_counter()

    def stop(self, run: str, window: int) -> WindowUsage:
        """The window that began last has ended."""
        seconds = time.perf_counter() - self._start
        usage = WindowUsage(
            run=run,
            window=window,
            began=self._began,
            seconds=seconds,
            cpu_utilization_percentage=psutil.cpu_percent(),
            process_cpu_percentage=self._process.cpu_percent(),
            system_memory_usage_megabytes=psutil.virtual_memory().used / 1e6,
            process_memory_megabytes=self._process.memory_info().rss / 1e6,
        )
        if self._device.type == "cuda":
            _add_gpu(usage, self._device)
        return usage


def _add_gpu(usage: WindowUsage, device: torch.device) -> None:
    """Note what the GPU shows at this moment, but for what its driver doesn't tell."""
    import torch

    free, total = torch.cuda.mem_get_info(device)
    usage.gpu_memory_usage_megabytes = (total - free) / 1e6
    # No measurement fails for want of these: without the library, on a part of a GPU (MIG) or in a
    # container there are errors of the library's own, which may not be there to be named.
    with suppress(Exception):
        usage.gpu_utilization_percentage = float(torch.cuda.utilization(device))
        usage.gpu_power_usage_watts = torch.cuda.power_draw(device) / 1000


def usage_beside(journal: Path) -> Path:
    """Where a job that is not done yet keeps the usage of its windows."""
    return journal.with_suffix(".usage")


def append_usage(path: Path, usage: WindowUsage) -> None:
    """Write one line more, if that can be: for want of it no measurement ends.

    Where the disk is full, the job's next record says so.
    """
    with suppress(OSError), path.open("a", encoding="utf-8") as handle:
        handle.write(json.dumps(asdict(usage)) + "\n")


def keep_usage(journal: Path, path: Path) -> None:
    """Give what a job noted beside its journal the final name, which needs no space on the disk.

    Where it has that name already, from a start that could not write what comes after it, it stays.

    Raises:
        CannotWrite: it cannot be given the name.
    """
    try:
        os.replace(usage_beside(journal), path)
    except FileNotFoundError:
        pass
    except OSError as error:
        raise cannot_write(path, error) from error


def merge_usage(parts: Sequence[Path]) -> list[WindowUsage]:
    """The windows of all shards, whose files are in the shards' order."""
    return [
        replace(usage, shard=shard)
        for shard, path in enumerate(parts, start=1)
        for usage in read_usage(path)
    ]


def write_usage(path: Path, windows: Sequence[WindowUsage]) -> None:
    """Write all windows under the final name.

    Raises:
        CannotWrite: the file cannot be written.
    """
    write_text(path, "".join(json.dumps(asdict(usage)) + "\n" for usage in windows))


def read_usage(path: Path) -> list[WindowUsage]:
    """The windows of a file; none where it is absent, as beside records of an earlier version.

    A line that a kill cut short is left out: no number of the table depends on it.
    """
    try:
        lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        return []
    windows = [_parse(line) for line in lines]
    return [window for window in windows if window is not None]


def _parse(line: str) -> WindowUsage | None:
    try:
        return WindowUsage(**json.loads(line))
    except (ValueError, TypeError):
        return None
