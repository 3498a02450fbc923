"""SIGTERM and SIGINT end a process at once, wherever it is, and it says what it keeps.

A batch system sends SIGTERM before it takes a job's node away, a terminal SIGINT on Ctrl-C. Nothing
is written in haste then: what is finished is on the disk already, as it is for a kill.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
from contextlib import suppress
from types import FrameType
from typing import NoReturn

import click

SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE_S = 2.0  # for the stack to unwind; then the process ends where it stands


class Interrupted(BaseException):
    """The process was told to end. No Exception, so that nothing takes it for a failure to mend.

    Args:
        number: of the signal.
    """

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number
        self.kept = "what was finished is kept"  # whoever knows it better says so


def interrupt_on_signals() -> None:
    """Let SIGTERM and SIGINT raise Interrupted in the main thread, the first of them only.

    One that is ignored already stays so, as a shell wants it of the jobs that it put into the
    background. Some code swallows what is raised in it (a finalizer, a bare except): GRACE_S after
    the signal the process ends all the same.
    """
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _interrupt)


def _interrupt(number: int, _frame: FrameType | None) -> NoReturn:
    ignore_signals()
    interrupted = Interrupted(number)
    last = threading.Timer(GRACE_S, end, [interrupted])
    last.daemon = True
    last.start()
    raise interrupted


def ignore_signals() -> None:
    """Let SIGTERM and SIGINT do nothing any more: the process is about to end by itself."""
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def end(interrupted: Interrupted) -> NoReturn:
    """Say in one line what is kept, and exit with 128 + the signal's number.

    Without the interpreter's own tidying up, which takes its time where a GPU is in use.
    """
    name = signal.Signals(interrupted.number).name
    with suppress(OSError):  # whoever read our output may have got the signal too
        click.echo(
            f"dspark: stopped by {name}: {interrupted.kept}, the same command goes on from there",
            err=True,
        )
        sys.stdout.flush()
    os._exit(128 + interrupted.number)
