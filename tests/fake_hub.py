"""A hub of our own: its cache laid out by hand, its server on this machine, its real client.

The client reads its settings when it is imported, so what it does over the network is asked in a
fresh process (`ask`).
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

SHA = "0123456789abcdef0123456789abcdef01234567"
LARGE = (".safetensors", ".parquet", ".gz")  # files that the hub knows by their sha256


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def checksum(name: str, content: bytes) -> str:
    """What the hub gives as a file's ETag: sha256 of a large file, git's hash of a small one."""
    if name.lower().endswith(LARGE):
        return sha256(content)
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()


def fill_cache(
    root: Path, repo: str, files: Mapping[str, bytes], revision: str = SHA, kind: str = "models"
) -> Path:
    """Put a repo into a cache as the client lays it out; returns the snapshot's folder."""
    folder = root / f"{kind}--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / revision
    for name, content in files.items():
        blob = folder / "blobs" / checksum(name, content)
        for path in (blob, snapshot / name):
            path.parent.mkdir(parents=True, exist_ok=True)
        blob.write_bytes(content)
        (snapshot / name).symlink_to(os.path.relpath(blob, (snapshot / name).parent))
    return snapshot


@dataclass
class Repo:
    """A repo as the hub has it, and how it misbehaves."""

    files: dict[str, bytes] = field(default_factory=dict)
    sent: dict[str, bytes] = field(default_factory=dict)  # what is sent instead of a file
    missing: int = 0  # bytes before a body's end at which the hub hangs up
    status: int = 200  # of all answers, when it refuses
    headers: dict[str, str] = field(default_factory=dict)  # of a refusal


GATED = {"X-Error-Code": "GatedRepo"}
UNKNOWN = {"X-Error-Code": "RepoNotFound"}


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a download needs. Its one revision is SHA."""

    repos: Mapping[str, Repo] = {}

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def do_CONNECT(self) -> None:
        """What a proxy that forbids the hub says."""
        self.send_error(403)

    def answer(self) -> None:
        path = self.path.split("?")[0].removeprefix("/api").strip("/")
        path = path.removeprefix("models/")
        repo = next(
            (repo for name, repo in self.repos.items() if path.startswith(f"{name}/")), None
        )
        if repo is None:
            self.reply(401, b"", UNKNOWN)
        elif repo.status != 200:
            self.reply(repo.status, b"", repo.headers)
        elif SHA not in path:
            self.reply(404, b"", {"X-Error-Code": "RevisionNotFound"})
        elif "/tree/" in path:
            listing = [
                {"type": "file", "path": name, "oid": checksum(name, content), "size": len(content)}
                for name, content in repo.files.items()
            ]
            self.reply(200, json.dumps(listing).encode(), {"Content-Type": "application/json"})
        elif (name := path.split(f"{SHA}/")[-1]) in repo.files:
            tag = {"X-Repo-Commit": SHA, "ETag": f'"{checksum(name, repo.files[name])}"'}
            self.reply(200, repo.sent.get(name, repo.files[name]), tag, repo.missing)
        else:
            self.reply(404, b"", {"X-Error-Code": "EntryNotFound"})

    def reply(self, status: int, body: bytes, headers: dict[str, str], missing: int = 0) -> None:
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body) + missing)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@contextmanager
def serve(repos: Mapping[str, Repo]) -> Iterator[str]:
    """Serve `repos`, by "owner/name" or "datasets/owner/name"; gives the hub's address."""
    handler = type("Handler", (Hub,), {"repos": repos})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def ask(script: str, cases: list[dict[str, Any]], home: Path, **env: str) -> list[Any]:
    """What `script` prints, a line of JSON for each of `cases` (its first argument), in a fresh process.

    Args:
        home: the client's HF_HOME.
        env: its settings, as HF_ENDPOINT.
    """
    foreign = ("HF_", "HTTP", "ALL_PROXY", "NO_PROXY")
    kept = {k: v for k, v in os.environ.items() if not k.upper().startswith(foreign)}
    done = subprocess.run(
        [sys.executable, "-c", script, json.dumps(cases)],
        env={**kept, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(answers) == len(cases)
    assert not [text for text in answers if isinstance(text, str) and "\n" in text]
    return answers
