"""`dspark` commands that start at the same moment, in forks of a process that has imported all they
need.

A fork is a process of its own, with its own connections, as a shell would start it, but without the
seconds that the import takes.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path


def at_once(
    commands: Sequence[Sequence[str]], cwd: Path, rounds: int = 1
) -> list[list[tuple[int, str]]]:
    """Run all commands at once, `rounds` times; for each, its exit status and all that it said."""
    done = subprocess.run(
        [sys.executable, __file__],
        input=json.dumps([commands, rounds]),
        cwd=cwd,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    return [[(status, said) for status, said in results] for results in json.loads(done.stdout)]


def _run_round(commands: Sequence[Sequence[str]]) -> list[tuple[int, str]]:
    waiting, start = os.pipe()
    with ExitStack() as files:
        outputs = [files.enter_context(tempfile.TemporaryFile()) for _ in commands]
        started = []
        for command, output in zip(commands, outputs, strict=True):
            pid = os.fork()
            if pid == 0:
                os.close(start)
                os.read(waiting, 1)  # returns when the parent closes its end: for all at once
                _become(command, output.fileno())
            started.append(pid)
        os.close(waiting)
        os.close(start)
        statuses = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in started]
        for output in outputs:
            output.seek(0)
        said = [output.read().decode() for output in outputs]
    return list(zip(statuses, said, strict=True))


def _become(command: Sequence[str], output: int) -> None:
    """Do what `dspark <command>` does, say it to `output`, and end this process."""
    from dspark.cli import main

    status = 1
    try:
        os.dup2(output, 1)
        os.dup2(output, 2)
        sys.argv = ["dspark", *command]
        main()
        status = 0
    except SystemExit as end:
        status = end.code if isinstance(end.code, int) else 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    commands, rounds = json.load(sys.stdin)
    import mlflow.store.tracking.rest_store
    import mlflow.store.tracking.sqlalchemy_store  # noqa: F401

    import dspark.cli
    import dspark.report.style
    import dspark.tracking.mlflow_store  # noqa: F401

    json.dump([_run_round(commands) for _ in range(rounds)], sys.stdout)
