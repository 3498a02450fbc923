"""Writing files so that a final name never holds half a file."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dspark.errors import UserError


@contextmanager
def written_aside(path: str | Path) -> Iterator[Path]:
    """Give a name beside `path` to write to; it becomes `path` when the block ends without error.

    The parent directory is made. When the block raises, the file aside is removed and an earlier
    `path` stays as it was.

    Raises:
        UserError: the directory or the file cannot be written.
    """
    final = Path(path)
    aside = final.with_name(f"{final.name}.{os.getpid()}.part")
    try:
        final.parent.mkdir(parents=True, exist_ok=True)
        yield aside
        os.replace(aside, final)
    except OSError as error:
        raise UserError(f"cannot write '{final}': {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            aside.unlink(missing_ok=True)


def write_text(path: str | Path, text: str) -> None:
    """Write `text` as UTF-8 with plain newlines, aside and then under its final name.

    Raises:
        UserError: the file cannot be written.
    """
    with written_aside(path) as aside:
        aside.write_text(text, encoding="utf-8", newline="\n")
