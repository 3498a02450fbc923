"""Files get their names whole and on the disk, or not at all; what is wrong is one line."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from safetensors.numpy import save_file

from dspark.files import CannotWrite, cannot_write, sync, write_text, written_aside
from small_disk import small_disk


def test_text_replaces_text_and_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "x.txt"
    for text in ("first\n", "zweitens: ß\n"):
        write_text(path, text)
        assert path.read_bytes() == text.encode()
    assert [p.name for p in path.parent.iterdir()] == ["x.txt"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt, OSError(errno.EIO, "broken")])
def test_what_fails_leaves_the_old_file_and_nothing_else(
    tmp_path: Path, error: type[BaseException] | OSError
) -> None:
    path = tmp_path / "x"
    path.write_text("old")
    kind = CannotWrite if isinstance(error, OSError) else error
    with pytest.raises(kind), written_aside(path) as aside:
        aside.write_text("half")
        raise error
    assert path.read_text() == "old" and [p.name for p in tmp_path.iterdir()] == ["x"]


def test_content_is_on_the_disk_before_the_name_and_the_name_before_it_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a machine that fails could leave the new name with nothing in it, or the old file."""
    path = tmp_path / "x"
    events: list[str] = []
    fsync, replace = os.fsync, os.replace

    def watched_fsync(descriptor: int) -> None:
        mode = os.fstat(descriptor).st_mode
        events.append("folder" if stat.S_ISDIR(mode) else f"file of {os.fstat(descriptor).st_size}")
        fsync(descriptor)

    def watched_replace(*paths: Path) -> None:
        events.append("replace")
        replace(*paths)

    monkeypatch.setattr(os, "fsync", watched_fsync)
    monkeypatch.setattr(os, "replace", watched_replace)
    write_text(path, "12345")
    assert events == ["file of 5", "replace", "folder"]


def test_a_disk_that_does_not_take_it_is_an_error_but_one_that_cannot_is_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(number: int) -> None:
        def refuse(_: int) -> None:
            raise OSError(number, os.strerror(number))

        monkeypatch.setattr(os, "fsync", refuse)

    fail(errno.EINVAL)
    sync(tmp_path)
    write_text(tmp_path / "x", "old")
    fail(errno.EIO)
    with pytest.raises(CannotWrite, match=r"cannot write '.*x': Input/output error"):
        write_text(tmp_path / "x", "new")
    assert (tmp_path / "x").read_text() == "old"


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.ENOSPC, "x"), "no space left on the device: free space and run again"),
        (OSError(errno.EDQUOT, "x"), "the disk quota is used up: free space and run again"),
        (OSError(errno.EROFS, "x"), "the file system is read-only: make it writable or choose"),
        (PermissionError(errno.EACCES, "x"), "permission denied: make the folder writable or"),
        (IsADirectoryError(errno.EISDIR, "Is a directory"), "Is a directory"),
        (ValueError("I/O error: No space left on device (os error 28)"), "no space left on the"),
        (ValueError("odd"), "odd"),
    ],
)
def test_the_line_names_file_fault_and_remedy(error: Exception, said: str) -> None:
    assert str(cannot_write("some/file", error)).startswith(f"cannot write 'some/file': {said}")


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A folder on a disk of 64 kB."""
    with small_disk(tmp_path / "disk", "64k") as disk:
        yield disk.path


@pytest.mark.parametrize("kind", ["text", "safetensors", "parquet"])
def test_a_full_disk_is_the_same_line_for_every_kind_of_file(full: Path, kind: str) -> None:
    values = np.random.default_rng(0).random(50_000)
    said = f"cannot write '{full / 'x'}': no space left on the device: free space and run again"
    with pytest.raises(CannotWrite) as error, written_aside(full / "x") as aside:
        if kind == "text":
            aside.write_text("x" * 400_000)
        elif kind == "safetensors":
            save_file({"values": values}, aside)
        else:
            pq.write_table(pa.table({"values": values}), aside)
    assert str(error.value) == said
    assert list(full.iterdir()) == []
