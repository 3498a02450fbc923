"""Writing files so that a final name never holds half a file, whatever ends the process or machine."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from safetensors import SafetensorError

from dspark.errors import UserError

# What the user can mend, and how.
REMEDIES = {
    errno.ENOSPC: "no space left on the device: free space and run again",
    errno.EDQUOT: "the disk quota is used up: free space and run again",
    errno.EROFS: "the file system is read-only: make it writable or choose another folder",
    errno.EACCES: "permission denied: make the folder writable or choose another one",
}


class CannotWrite(UserError):
    """A file could not be written; what was there before is untouched."""


def cannot_write(path: str | Path, error: Exception) -> CannotWrite:
    """The one line that says why `path` was not written and, where that is known, what to do."""
    told = re.search(r"\bos error (\d+)", str(error))  # Rust's, in an error without a number
    number = int(told[1]) if told else getattr(error, "errno", None) or 0
    reason = REMEDIES.get(number) or getattr(error, "strerror", None) or error
    return CannotWrite(f"cannot write '{path}': {reason}")


@contextmanager
def written_aside(path: str | Path) -> Iterator[Path]:
    """Give a name beside `path` to write to; it becomes `path` when the block ends without error.

    The parent directory is made. When the block raises, the file aside is removed and an earlier
    `path` stays as it was. The file is on the disk before it gets its name: a machine that fails
    leaves the old file or the new one.

    Raises:
        CannotWrite: the directory or the file cannot be written.
    """
    final = Path(path)
    aside = final.with_name(f"{final.name}.{os.getpid()}.part")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        yield aside
        sync(aside)
        os.replace(aside, final)
        sync(final.parent)
    except (OSError, SafetensorError) as error:
        raise cannot_write(final, error) from error
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write `text` as UTF-8 with plain newlines, aside and then under its final name.

    Raises:
        CannotWrite: the file cannot be written.
    """
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8", newline="\n")


def sync(path: Path) -> None:
    """Bring a file's content, or a folder's names, to the disk.

    Raises:
        OSError: it is not there, or the disk did not take it.
    """
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot do it for a folder
            raise
    finally:
        os.close(descriptor)
