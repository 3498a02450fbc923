"""A disk that is soon full: a tmpfs, where this process may mount one."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest


@dataclass
class SmallDisk:
    """A disk, and a ballast file on it."""

    path: Path

    @property
    def ballast(self) -> Path:
        return self.path / "ballast"

    def leave(self, room: int) -> None:
        """Fill it up to `room` bytes, which the page size rounds."""
        free = os.statvfs(self.path)
        self.ballast.write_bytes(b"x" * (free.f_bavail * free.f_bsize - room))

    def make_read_only(self) -> None:
        subprocess.run(["mount", "-o", "remount,ro", str(self.path)], check=True)


@contextmanager
def small_disk(path: Path, size: str) -> Iterator[SmallDisk]:
    """A disk of `size` ("64k") at `path`; skips the test where none can be mounted."""
    path.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(path)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        pytest.skip(f"no tmpfs can be mounted here: {done.stderr.strip()}")
    try:
        yield SmallDisk(path)
    finally:
        subprocess.run(["umount", "--lazy", str(path)], check=True)
