"""`dspark` in forks of a process that has imported all it needs: a start costs no seconds.

A fork is what a shell would start: a process of its own, that runs the command line's `main` with its
own arguments, signals and stderr. Beside that it can write down the requests that its engines admit,
and die at a named moment.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

# What the stages import when they run.
PRELOADED = (
    "dspark.cli",
    "dspark.decode.bench",
    "dspark.decode.environment",
    "dspark.decode.profile",
    "dspark.locks",
    "dspark.metrics.records_io",
    "dspark.metrics.summary",
    "dspark.models.prepare",
    "dspark.report.table",
    "pandas",
    "transformers.models.llama.modeling_llama",
)


@dataclass
class Order:
    """What a fork is to do.

    Args:
        args: of the command line.
        stderr: file that its stdout and stderr go to.
        admitted: file to append a line to for each request that is admitted: `k prompt#turn`.
        die: signal, "before" or "after", file name: send it to itself when a file is renamed to
            that name or, when its name starts so, removed.
    """

    args: list[str]
    stderr: str
    admitted: str | None = None
    die: tuple[int, str, str] | None = None


class ForkedCli:
    """Starts forks; what is started must be waited for."""

    def __init__(self) -> None:
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
        self.server = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
        )
        assert self._read() == "ready"

    def start(self, order: Order) -> int:
        """Its process id."""
        return self._ask({"start": asdict(order)})

    def wait(self, process: int) -> int:
        """Its exit status; minus the signal's number when one ended it."""
        return self._ask({"wait": process})

    def run(self, *args: str, log: Path, **more: Any) -> tuple[int, str]:
        """Exit status and what it said."""
        status = self.wait(self.start(Order(list(args), str(log), **more)))
        return status, log.read_text()

    def close(self) -> None:
        self.server.communicate()

    def _ask(self, what: dict[str, Any]) -> int:
        assert self.server.stdin is not None
        self.server.stdin.write(json.dumps(what) + "\n")
        self.server.stdin.flush()
        return int(self._read())

    def _read(self) -> str:
        assert self.server.stdout is not None
        return self.server.stdout.readline().strip()


def _serve() -> None:
    import torch

    for module in PRELOADED:
        import_module(module)
    torch.set_num_threads(1)
    gc.freeze()
    print("ready", flush=True)
    for line in sys.stdin:
        what = json.loads(line)
        if "wait" in what:
            print(os.waitstatus_to_exitcode(os.waitpid(what["wait"], 0)[1]), flush=True)
            continue
        child = os.fork()
        if child == 0:
            try:
                _be(Order(**what["start"]))
            finally:
                os._exit(1)
        print(child, flush=True)


def _be(order: Order) -> NoReturn:
    from dspark.cli import main

    log = os.open(order.stderr, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(log, stream)
    if order.admitted:
        _write_admissions(order.admitted)
    if order.die:
        _die_at(*order.die)
    sys.argv = ["dspark", *order.args]
    status = 0
    try:
        main()
    except SystemExit as error:
        status = int(error.code or 0)
    except BaseException:
        traceback.print_exc()
        status = 1
    sys.stdout.flush()
    os._exit(status)  # an interpreter's own end takes a second with all that is imported


def _write_admissions(path: str) -> None:
    from dspark.decode.engine import Engine

    log = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    admit = Engine.admit

    def watched(engine: Engine, request: Any, t_submit: float) -> Any:
        if not request.prompt_id.startswith("warmup/"):
            os.write(log, f"{engine.k} {request.prompt_id}#{request.turn}\n".encode())
        return admit(engine, request, t_submit)

    Engine.admit = watched  # type: ignore[method-assign]


def _die_at(number: int, when: str, name: str) -> None:
    def dying(act: Callable[..., None], place: int) -> Callable[..., None]:
        def wrapped(*args: Any, **more: Any) -> None:
            here = Path(args[place]).name
            meant = here == name or (place == 0 and here.startswith(name))
            if meant and when == "before":
                os.kill(os.getpid(), number)
            act(*args, **more)
            if meant and when == "after":
                os.kill(os.getpid(), number)

        return wrapped

    os.replace, os.unlink = dying(os.replace, 1), dying(os.unlink, 0)  # type: ignore[assignment]


if __name__ == "__main__":
    _serve()
