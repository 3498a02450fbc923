"""One process at a time fills a folder, and a dead one is in nobody's way."""

from __future__ import annotations

import errno
import fcntl
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from dspark.errors import UserError
from dspark.locks import NAME, sole_use

HOLD = """
import sys
from pathlib import Path
from dspark.locks import sole_use
with sole_use(Path(sys.argv[1])):
    print("held", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holder(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """Another process that has the folder."""
    command = [sys.executable, "-c", HOLD, str(folder)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "held\n"
            yield process
        finally:
            process.kill()


def test_the_second_process_is_told_who_is_first(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    with holder(folder) as first:
        for _ in range(2):  # asking does not change who holds it
            with pytest.raises(UserError) as error, sole_use(folder):
                pass
            assert str(error.value) == (
                f"'{folder}' is being filled by process {first.pid} on {socket.gethostname()}: "
                "wait until it has ended, or end it, then run again"
            )


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, None])
def test_a_holder_that_has_ended_is_in_nobodys_way(
    tmp_path: Path, number: signal.Signals | None
) -> None:
    with holder(tmp_path) as first:
        if number is None:
            first.communicate("")
        else:
            first.send_signal(number)
        first.wait()
        assert str(first.pid) in (tmp_path / NAME).read_text()
        with sole_use(tmp_path):
            assert str(first.pid) not in (tmp_path / NAME).read_text()


def test_a_child_does_not_keep_what_its_dead_parent_held(tmp_path: Path) -> None:
    code = HOLD.replace(
        "sys.stdin.read()",
        "import os, subprocess; subprocess.Popen(['sleep', '3']); os.kill(os.getpid(), 9)",
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)], stdout=subprocess.DEVNULL, timeout=20
    )
    assert done.returncode == -signal.SIGKILL
    with sole_use(tmp_path):
        pass


def test_folders_are_held_apart_and_again_after_a_failure(tmp_path: Path) -> None:
    with sole_use(tmp_path / "a"), sole_use(tmp_path / "b"):
        pass
    with pytest.raises(ZeroDivisionError), sole_use(tmp_path / "a"):
        raise ZeroDivisionError
    with sole_use(tmp_path / "a"):
        pass


def test_a_lock_file_that_says_nothing_is_still_a_lock(tmp_path: Path) -> None:
    with holder(tmp_path):
        (tmp_path / NAME).write_bytes(b"\xff")
        with pytest.raises(UserError, match="is being filled by another process: wait"):
            sole_use(tmp_path).__enter__()


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    path = re.escape(str(tmp_path / "file" / "folder" / NAME))
    with pytest.raises(UserError, match=f"cannot write '{path}': Not a directory"):
        sole_use(tmp_path / "file" / "folder").__enter__()


@pytest.mark.parametrize("number", [errno.ENOSYS, errno.ENOLCK])
def test_a_file_system_without_locks_is_said_and_no_obstacle(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    number: int,
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(number, "no locks here")

    monkeypatch.setattr(fcntl, "flock", refuse)
    with sole_use(tmp_path):
        assert "file system without locks: see to it" in capsys.readouterr().err
