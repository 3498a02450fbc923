"""The journal of a job: its finished requests, one line each, on the disk before the next one ends.

A job that is killed, wherever it is, finds here at its next start what it need not run again. The
file's name holds what decides the numbers (`job_identity`), so another job never goes on with it.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict
from io import FileIO
from pathlib import Path
from typing import Any

import dspark
from dspark.decode.records import RequestRecord
from dspark.errors import UserError
from dspark.files import CannotWrite, cannot_write, sync
from dspark.signals import Interrupted

ENGINE = ("decode", "models")  # packages whose code decides the numbers


def job_identity(inputs: Sequence[Path], facts: Mapping[str, Any]) -> str:
    """First 16 hex digits of a sha256 over the inputs' contents, the engine's code and `facts`.

    Args:
        facts: what else decides the numbers, as the device: anything that JSON can hold.
    """
    root = Path(dspark.__file__).parent
    code = [path for package in ENGINE for path in sorted((root / package).glob("*.py"))]
    state = hashlib.sha256(json.dumps(facts, sort_keys=True).encode())
    for path in [*inputs, *code]:
        state.update(hashlib.sha256(path.read_bytes()).digest())
    return state.hexdigest()[:16]


@contextmanager
def open_journal(path: Path) -> Iterator[FileIO]:
    """The journal, to append to; its name is on the disk too.

    Raises:
        CannotWrite: it cannot be made.
    """
    try:
        handle = FileIO(path, "a")
        sync(path.parent)
    except OSError as error:
        raise cannot_write(path, error) from error
    with handle:
        yield handle


def append_record(journal: FileIO, record: RequestRecord) -> None:
    """Write one line, and return when it is on the disk.

    Raises:
        CannotWrite: it is not; the journal ends with the line before.
    """
    left = memoryview(f"{json.dumps(asdict(record))}\n".encode())
    end = journal.seek(0, os.SEEK_END)
    try:
        while left:
            left = left[journal.write(left) :]
        os.fsync(journal.fileno())
    except OSError as error:
        with suppress(OSError):
            journal.truncate(end)
        raise cannot_write(str(journal.name), error) from error


def read_journal(path: Path) -> list[RequestRecord]:
    """Records of earlier starts. A last line that is not whole is removed from the file.

    A kill cuts the last line short; when the machine fails, it may have its end without its middle.

    Raises:
        UserError: the file cannot be read; a line that is not the last is not a record.
    """
    try:
        content = path.read_bytes()
        *lines, rest = content.split(b"\n")
        records = [_parse(line) for line in lines]
        if records and records[-1] is None:
            rest = lines.pop() + b"\n" + rest
            records.pop()
        if rest:
            os.truncate(path, len(content) - len(rest))
    except FileNotFoundError:
        return []
    except OSError as error:
        raise UserError(
            f"journal '{path}' cannot be read ({error.strerror}): mend that, or delete the file to "
            "run all requests again"
        ) from error
    for number, record in enumerate(records, start=1):
        if record is None:
            raise UserError(
                f"journal '{path}' line {number} is damaged: delete the line, and its request runs "
                "again"
            )
    return [record for record in records if record is not None]


def _parse(line: bytes) -> RequestRecord | None:
    try:
        return RequestRecord(**json.loads(line))
    except (ValueError, TypeError):
        return None


@contextmanager
def telling_what_is_kept(journal: Path, requests: int) -> Iterator[None]:
    """Where a signal or the disk ends what runs inside, say how many of `requests` are kept.

    Raises:
        CannotWrite: as what runs inside does, with the number.
    """
    try:
        yield
    except CannotWrite as error:
        raise CannotWrite(f"{error}: the {_lines(journal)} finished requests are kept") from error
    except Interrupted as interrupted:
        interrupted.kept = f"{_lines(journal)} of {requests} requests are kept"
        raise


def _lines(journal: Path) -> int:
    try:
        return journal.read_bytes().count(b"\n")
    except OSError:
        return 0
