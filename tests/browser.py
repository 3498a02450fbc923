"""A real browser without a window: opens a page, waits for what should be on it, takes a picture.

Chromium is spoken to through its DevTools protocol, over two pipes: JSON messages, each ended by a zero
byte.
"""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

PROGRAM = "chromium"
FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--hide-scrollbars",
    "--remote-debugging-pipe",
)
WIDTH, HEIGHT = 2200, 1800  # pixels: MLflow puts on a page what fits on the screen
ANSWER_TIMEOUT_S = 60.0
PAGE_TIMEOUT_S = 60.0
LOOK_AGAIN_S = 0.25


class Browser:
    """One page of a running browser."""

    def __init__(self, commands: int, answers: int, pictures: Path) -> None:
        self._commands, self._answers, self._pictures = commands, answers, pictures
        self._received = b""
        self._number = 0
        self._session: dict[str, str] = {}
        target = self._call("Target.createTarget", url="about:blank")["targetId"]
        attached = self._call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = {"sessionId": attached["sessionId"]}
        size = {"width": WIDTH, "height": HEIGHT, "deviceScaleFactor": 1, "mobile": False}
        self._call("Emulation.setDeviceMetricsOverride", **size)

    def open(self, url: str, *awaited: str) -> str:
        """Show a page, and read it."""
        self._call(
            "Page.navigate", url="about:blank"
        )  # a page of the same address but for its # stays
        self._call("Page.navigate", url=url)
        return self.read(*awaited)

    def read(self, *awaited: str) -> str:
        """Wait until all of `awaited` can be read on the page, and return its text as one line.

        A picture of it is kept, and named by the test when the page does not come to show them.
        """
        deadline = time.monotonic() + PAGE_TIMEOUT_S
        while True:
            text = " ".join((self._evaluate("document.body?.innerText") or "").split())
            missing = [part for part in awaited if part not in text]
            if not missing:
                self._picture()
                return text
            if time.monotonic() > deadline:
                pytest.fail(f"{missing} not on the page, see {self._picture()}:\n{text}")
            time.sleep(LOOK_AGAIN_S)

    def wait_for(self, expression: str, wanted: Callable[[Any], bool] = bool) -> Any:
        """Wait until the value of a JavaScript expression is a wanted one, and return it.

        What a page draws comes later than its text: nothing of it is there for sure when `open` returns.
        A picture of it is kept, and named by the test when it does not come to that.
        """
        deadline = time.monotonic() + PAGE_TIMEOUT_S
        while not wanted(value := self._evaluate(expression)):
            if time.monotonic() > deadline:
                pytest.fail(f"{expression} is {value}, see {self._picture()}")
            time.sleep(LOOK_AGAIN_S)
        self._picture()
        return value

    def click(self, element: str) -> None:
        """Click the element that a JavaScript expression finds, once it is there."""
        self.wait_for(f"(element => {{ element?.click(); return Boolean(element) }})({element})")

    def _evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression at this moment; None where it has none or fails."""
        answer = self._call("Runtime.evaluate", expression=expression, returnByValue=True)
        return answer["result"].get("value")

    def _picture(self) -> Path:
        path = self._pictures / f"page-{len(list(self._pictures.glob('page-*.png'))) + 1}.png"
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot")["data"]))
        return path

    def _call(self, method: str, **params: Any) -> dict[str, Any]:
        self._number += 1
        message = {"id": self._number, "method": method, "params": params, **self._session}
        os.write(self._commands, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._next_message()
            if answer.get("id") == self._number:  # the others are events
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]

    def _next_message(self) -> dict[str, Any]:
        while b"\0" not in self._received:
            ready, _, _ = select.select([self._answers], [], [], ANSWER_TIMEOUT_S)
            part = os.read(self._answers, 1 << 16) if ready else b""
            assert part, "the browser does not answer"
            self._received += part
        message, _, self._received = self._received.partition(b"\0")
        return json.loads(message)


@contextmanager
def browser(folder: Path) -> Iterator[Browser]:
    """A browser that keeps its profile, its log and pictures of the pages in `folder`."""
    if shutil.which(PROGRAM) is None:
        pytest.skip(f"{PROGRAM} is not installed: run 'make chromium' as root")
    commands_in, commands = os.pipe()
    answers, answers_out = os.pipe()
    # the browser reads from descriptor 3 and writes to 4
    redirect = f'exec {PROGRAM} "$@" 3<&{commands_in} 4>&{answers_out}'
    command = ["bash", "-c", redirect, "bash", *FLAGS, f"--user-data-dir={folder / 'profile'}"]
    with (folder / "browser.log").open("wb") as log:
        process = subprocess.Popen(
            command,
            pass_fds=(commands_in, answers_out),
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    os.close(commands_in)
    os.close(answers_out)
    try:
        yield Browser(commands, answers, folder)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        os.close(commands)
        os.close(answers)
