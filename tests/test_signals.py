"""SIGTERM and SIGINT: one line, an exit status, at once, whatever the process is doing."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from dspark.signals import GRACE_S

START = """\
import os, signal, subprocess, sys, time
from dspark.signals import *
def busy(seconds=60):
    print("ready", flush=True)
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        time.sleep(0.01)
"""
MAIN = """
try:
    interrupt_on_signals()
    work()
    ignore_signals()
except Interrupted as interrupted:
    end(interrupted)
"""
STATUS = {signal.SIGTERM: 143, signal.SIGINT: 130}
GOES_ON = "the same command goes on from there\n"


@contextmanager
def program(work: str, prefix: tuple[str, ...] = ()) -> Iterator[subprocess.Popen[str]]:
    """A process that has begun `work`, after it has printed "ready"."""
    code = START + work + MAIN
    pipe = subprocess.PIPE
    command = [*prefix, sys.executable, "-c", code]
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            assert process.stdout is not None and process.stdout.readline() == "ready\n"
            yield process
        finally:
            process.kill()


@pytest.mark.parametrize("number", list(STATUS))
def test_a_signal_ends_in_one_line_and_a_status(number: signal.Signals) -> None:
    with program("work = busy") as process:
        sent = time.monotonic()
        process.send_signal(number)
        _, said = process.communicate()
    assert time.monotonic() - sent < GRACE_S
    assert process.returncode == STATUS[number]
    assert said == f"dspark: stopped by {number.name}: what was finished is kept, {GOES_ON}"


def test_what_is_open_is_closed_on_the_way_out() -> None:
    work = """
def work():
    try:
        busy()
    except Interrupted as interrupted:
        interrupted.kept = "7 of 9 are kept"
        raise
    finally:
        print("tidied")
"""
    with program(work) as process:
        process.terminate()
        tidied, said = process.communicate()
    assert (process.returncode, tidied) == (143, "tidied\n")
    assert said == f"dspark: stopped by SIGTERM: 7 of 9 are kept, {GOES_ON}"


SWALLOWING = """
def work():
    class Finalizer:
        def __del__(self):
            busy(0.3)  # what is raised in here is lost
    Finalizer()
    busy()
"""
STUBBORN = """
def work():
    try:
        busy()
    finally:
        time.sleep(60)
"""


@pytest.mark.parametrize("work", [SWALLOWING, STUBBORN], ids=["swallowed", "stubborn"])
def test_the_process_ends_even_where_the_signal_is_lost(work: str) -> None:
    with program(work) as process:
        sent = time.monotonic()
        process.terminate()
        _, said = process.communicate()
    assert GRACE_S - 0.1 < time.monotonic() - sent < GRACE_S + 3
    assert process.returncode == 143
    assert said.endswith(f"dspark: stopped by SIGTERM: what was finished is kept, {GOES_ON}")


def test_a_second_signal_does_not_disturb_the_first() -> None:
    work = """
def work():
    try:
        busy()
    finally:
        busy(0.5)
        print("tidied")
"""
    with program(work) as process:
        assert process.stdout is not None
        process.terminate()
        assert process.stdout.readline() == "ready\n"
        process.send_signal(signal.SIGINT)
        process.terminate()
        tidied, said = process.communicate()
    assert (process.returncode, tidied) == (143, "tidied\n")
    assert said.count("stopped by") == 1


def test_a_child_that_is_waited_for_is_ended_too() -> None:
    work = """
def work():
    subprocess.run([sys.executable, "-c", "import time; print('ready', flush=True); time.sleep(60)"])
"""
    with program(work) as process:
        process.terminate()
        rest, _ = process.communicate(timeout=20)  # else the child would hold the pipe open
    assert (process.returncode, rest) == (143, "")


def test_an_ignored_signal_stays_ignored() -> None:
    """As a shell has it for `dspark ... &`: a Ctrl-C is not for it."""
    shell = ("sh", "-c", 'trap "" INT; exec "$@"', "sh")
    with program("work = lambda: busy(0.5)", shell) as process:
        process.send_signal(signal.SIGINT)
        assert process.communicate() == ("", "")
    assert process.returncode == 0


def test_once_all_is_done_a_signal_changes_nothing() -> None:
    code = START + "work = lambda: None" + MAIN + "busy(0.5)"
    pipe = subprocess.PIPE
    with subprocess.Popen([sys.executable, "-c", code], stdout=pipe, stderr=pipe) as process:
        assert process.stdout is not None and process.stdout.readline() == b"ready\n"
        process.terminate()
        assert process.communicate() == (b"", b"")
    assert process.returncode == 0


def test_nobody_left_to_read_the_line_changes_no_status() -> None:
    """`tee` behind a pipe gets a job's signals too, and may be gone first."""
    with program("work = busy") as process:
        assert process.stderr is not None
        process.stderr.close()
        process.terminate()
        process.wait()
    assert process.returncode == 143
