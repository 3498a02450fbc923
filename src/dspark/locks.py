"""One process at a time fills a folder.

The lock is flock's: the kernel drops it when its holder ends, however it ends, so a killed job is in
nobody's way, which a lock file that means something by its mere presence would be. NFS clients pass
flock on to the server (since Linux 2.6.12), which drops it when the client's lease runs out.
"""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click
from filelock import FileLock, Timeout

from dspark.errors import UserError
from dspark.files import cannot_write

NAME = ".lock"  # stays when it is released: another process may be waiting on the very file
PATIENCE_S = 1.0  # `dspark status` holds it for a moment to see whether anyone does
NO_LOCKS = {errno.ENOSYS, errno.ENOLCK, errno.EOPNOTSUPP}


@contextmanager
def sole_use(folder: Path) -> Iterator[None]:
    """Make `folder` and keep every other process that asks for it out until the block ends.

    On a file system without flock nothing is kept out, and a line on stderr says so.

    Raises:
        UserError: another process has the folder; it cannot be written.
    """
    path = folder / NAME
    lock = FileLock(path, timeout=PATIENCE_S, fallback_to_soft=False, on_acquired=_sign)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except Timeout:
        raise UserError(
            f"'{folder}' is being filled by {_holder(path)}: wait until it has ended, or end it, "
            "then run again"
        ) from None
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise cannot_write(path, error) from error
        click.echo(
            f"'{folder}' is on a file system without locks: see to it that no other process fills it",
            err=True,
        )
    try:
        yield
    finally:
        lock.release()


def _sign(descriptor: int) -> None:
    """Write into the lock file who holds it."""
    os.ftruncate(descriptor, 0)
    os.pwrite(descriptor, f"process {os.getpid()} on {socket.gethostname()}\n".encode(), 0)
    os.fsync(descriptor)  # other hosts shall read it


def _holder(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8").strip() or "another process"
    except (OSError, UnicodeDecodeError):
        return "another process"
