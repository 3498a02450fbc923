"""The line about running work: what it is, how far, how fast, how long still.

On a terminal it is a bar that is drawn over itself. Anywhere else (a log file, `tee`, a batch system) it
is a plain line now and then, without the carriage returns that would make one endless line of them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any

from tqdm import tqdm

from dspark.decode.records import RequestRecord

TERMINAL_INTERVAL_S = 1.0
PLAIN_INTERVAL_S = 15.0
PLAIN = (
    "{desc}: {n_fmt}/{total_fmt} {unit}{postfix}, {rate_fmt}, {elapsed} elapsed, {remaining} left"
)


class Bar(tqdm):
    """tqdm on stderr, whose every state is a line of its own where that is no terminal."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        self.plain = not sys.stderr.isatty()
        if self.plain:
            settings = {"bar_format": PLAIN, "mininterval": PLAIN_INTERVAL_S, **settings}
        super().__init__(*args, **{"mininterval": TERMINAL_INTERVAL_S, "miniters": 1, **settings})

    @staticmethod
    def status_printer(file: Any) -> Callable[[str], None]:
        """What writes a state to `file`."""
        if file.isatty():
            return tqdm.status_printer(file)

        def write(text: str) -> None:
            file.write(
                f"{' '.join(text.split())}\n"
            )  # tqdm pads numbers, so that a bar stands still
            file.flush()

        return write

    def clear(self, nolock: bool = False) -> None:
        """Take the bar away from below what is to be written; a line stays."""
        if not self.plain:
            super().clear(nolock)

    def display(self, msg: str | None = None, pos: int | None = None) -> None:
        """Write the present state."""
        if not (self.plain and msg == ""):  # which would be an empty line
            super().display(msg, pos)

    def close(self) -> None:
        """Write the last state, unless it stands there; a line needs no break after it as a bar does."""
        if self.plain and not self.disable:
            self.leave = False
            if self.n != self.last_print_n:
                self.refresh()
        super().close()


def arm_progress(run: str, records: Sequence[RequestRecord]) -> str:
    """How fast an arm is, as `dspark_k3 17.2 tok/s, accept len 1.57`.

    Args:
        records: the requests that it has finished in the present window; the accept length is that of
            their complete steps, as in the table.
    """
    seconds = max(r.t_last for r in records) - min(r.t_submit for r in records)
    text = f"{run} {sum(r.output_tokens for r in records) / seconds:.1f} tok/s" if seconds else run
    accepted = [
        count
        for r in records
        for count, cut in zip(r.step_accepted, r.step_cut, strict=True)
        if not cut
    ]
    if not accepted or not any(any(r.step_drafted) for r in records):
        return text
    return f"{text}, accept len {1 + sum(accepted) / len(accepted):.2f}"
