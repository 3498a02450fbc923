"""A job's journal: what a kill, a failing machine or a full disk may leave, and what is made of it."""

from __future__ import annotations

import errno
import json
import os
import signal
from dataclasses import asdict, replace
from io import FileIO
from pathlib import Path

import pytest

import dspark
from dspark.decode import journal as module
from dspark.decode.journal import (
    append_record,
    job_identity,
    open_journal,
    read_journal,
    telling_what_is_kept,
)
from dspark.decode.records import RequestRecord
from dspark.errors import UserError
from dspark.files import CannotWrite
from dspark.signals import Interrupted

RECORD = RequestRecord(
    "p0", 0, "set", "k3", 0, 5, 3, [7, 8, 9], "length", 1.0, 1.5, 2.0, [2.0], [2]
)


def records(count: int) -> list[RequestRecord]:
    return [replace(RECORD, prompt_id=f"p{index}") for index in range(count)]


def write(path: Path, items: list[RequestRecord]) -> bytes:
    with open_journal(path) as handle:
        for record in items:
            append_record(handle, record)
    return path.read_bytes()


def test_what_is_appended_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    write(path, records(2))
    content = write(path, records(5)[2:])
    assert read_journal(path) == records(5)
    assert path.read_bytes() == content


def test_no_journal_means_no_records(tmp_path: Path) -> None:
    assert read_journal(tmp_path / "absent.jsonl") == []
    (tmp_path / "empty.jsonl").write_bytes(b"")
    assert read_journal(tmp_path / "empty.jsonl") == []


@pytest.mark.parametrize(
    "end", ["cut", "zeros", "whole without its end", "zeros inside", "garbage"]
)
def test_a_last_line_that_is_not_whole_is_run_again(tmp_path: Path, end: str) -> None:
    """A kill cuts it; a machine that fails may keep a file's length and not what was written last."""
    path = tmp_path / "j.jsonl"
    kept = write(path, records(3))
    line = json.dumps(asdict(replace(RECORD, prompt_id="p3"))).encode()
    tails = {
        "cut": line[:40],
        "zeros": b"\0" * 40,
        "whole without its end": line,
        "zeros inside": b"\0" * 40 + line[40:] + b"\n",
        "garbage": b"\n",
    }
    path.write_bytes(kept + tails[end])
    assert read_journal(path) == records(3)
    assert path.read_bytes() == kept
    write(path, records(4)[3:])
    assert read_journal(path) == records(4)


def test_what_no_kill_can_do_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    first, second, third = write(path, records(3)).splitlines(keepends=True)
    content = first + second[:30] + b"\n" + third
    path.write_bytes(content)
    with pytest.raises(UserError, match="line 2 is damaged: delete the line, and its request runs"):
        read_journal(path)
    assert path.read_bytes() == content
    path.write_bytes(first + third)
    assert [r.prompt_id for r in read_journal(path)] == ["p0", "p2"]


def test_a_journal_that_cannot_be_read_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "j.jsonl").mkdir()
    with pytest.raises(UserError, match=r"j\.jsonl' cannot be read \(Is a directory\): mend that"):
        read_journal(tmp_path / "j.jsonl")
    with pytest.raises(CannotWrite, match=r"cannot write '.*absent/j\.jsonl': No such file"):
        open_journal(tmp_path / "absent" / "j.jsonl").__enter__()


def test_the_journals_name_is_on_the_disk_and_every_line_before_append_returns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[tuple[str, int]] = []
    fsync = os.fsync

    def watched(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path.name, os.fstat(descriptor).st_size if path.is_file() else 0))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", watched)
    path = tmp_path / "j.jsonl"
    with open_journal(path) as handle:
        assert synced == [(tmp_path.name, 0)]
        for record in records(2):
            append_record(handle, record)
            assert synced[-1] == ("j.jsonl", path.stat().st_size)
    assert len(synced) == 3


class Full(FileIO):
    """A file on a disk that takes so many bytes more, some of a line."""

    room = 100

    def write(self, data: object) -> int:
        part = bytes(data)[: self.room]  # type: ignore[call-overload]
        if not part:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        self.room -= len(part)
        return super().write(part)


def test_a_line_that_does_not_fit_leaves_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    content = write(path, records(2))
    with Full(path, "a") as handle:
        with pytest.raises(
            CannotWrite, match=r"j\.jsonl': no space left on the device: free space"
        ):
            append_record(handle, RECORD)
        assert path.read_bytes() == content
        handle.room = len(content)
        append_record(handle, replace(RECORD, prompt_id="p2"))
    assert read_journal(path) == records(3)


def test_a_line_that_the_disk_refuses_when_it_is_brought_there_is_taken_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a quota on a network file system does."""
    path = tmp_path / "j.jsonl"
    content = write(path, records(2))

    def refuse(_: int) -> None:
        raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))

    with open_journal(path) as handle:
        monkeypatch.setattr(module.os, "fsync", refuse)
        with pytest.raises(CannotWrite, match="the disk quota is used up: free space"):
            append_record(handle, RECORD)
    assert path.read_bytes() == content


def test_whatever_ends_a_job_says_how_many_requests_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "j.jsonl"
    path.write_bytes(write(path, records(3)) + b'{"prompt')
    with pytest.raises(CannotWrite) as full, telling_what_is_kept(path, 9):
        raise CannotWrite("cannot write 'x': why")
    assert str(full.value) == "cannot write 'x': why: the 3 finished requests are kept"
    with pytest.raises(Interrupted) as stop, telling_what_is_kept(path, 9):
        raise Interrupted(signal.SIGTERM)
    assert (stop.value.number, stop.value.kept) == (15, "3 of 9 requests are kept")
    with pytest.raises(Interrupted) as stop, telling_what_is_kept(tmp_path / "absent", 9):
        raise Interrupted(signal.SIGTERM)
    assert stop.value.kept == "0 of 9 requests are kept"
    with pytest.raises(UserError, match=r"^another$"), telling_what_is_kept(path, 9):
        raise UserError("another")


def test_an_identity_changes_with_inputs_facts_and_the_engines_code(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b = tmp_path / "a", tmp_path / "b"
    a.write_text("1")
    b.write_text("2")
    facts = {"device": "x", "threads": 2}
    identity = job_identity([a, b], facts)
    assert identity == job_identity([a, b], dict(reversed(facts.items())))
    others = {job_identity([a, b], {**facts, "threads": 3}), job_identity([b, a], facts)}
    b.write_text("3")
    others.add(job_identity([a, b], facts))
    b.write_text("2")
    package = tmp_path / "dspark"
    for folder in ("decode", "models", "report"):
        (package / folder).mkdir(parents=True)
        (package / folder / "x.py").write_text("x = 1\n")
    monkeypatch.setattr(dspark, "__file__", str(package / "__init__.py"))
    code = job_identity([a, b], facts)
    (package / "report" / "x.py").write_text("x = 2\n")
    assert job_identity([a, b], facts) == code
    (package / "models" / "x.py").write_text("x = 2\n")
    others |= {code, job_identity([a, b], facts)}
    assert len(others) == 5 and identity not in others
