"""Models from a directory, from the package and from the hub, by the hub client's own code."""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from dspark.config import DrafterConfig, ModelSource, TargetConfig
from dspark.errors import UserError
from dspark.models import prepare as prepare_module
from dspark.models.prepare import PreparedModel, hash_files, prepare_drafter, prepare_target

SHA = "0123456789abcdef0123456789abcdef01234567"
FILES = {
    "config.json": b"{}",
    "model.safetensors": b"weights",
    "tokenizer.json": b'{"a": 1}',
    "pytorch_model.bin": b"a pickle",
    "modeling_own.py": b"code",
}
FETCHED = ("config.json", "model.safetensors", "tokenizer.json")


def sha256(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


def local(path: Path | str | None, name: str = "mine") -> TargetConfig:
    return TargetConfig(
        name=name, source=ModelSource.local, path=None if path is None else str(path)
    )


def model_folder(path: Path) -> Path:
    path.mkdir()
    for name, content in FILES.items():
        (path / name).write_bytes(content)
    return path


def test_a_local_model_is_used_where_it_lies(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / ".hidden").write_bytes(b"not hashed")
    (folder / "original").mkdir()
    model = prepare_target(local(folder), tmp_path / "store")
    assert (model.name, model.source, model.revision) == ("mine", "local", None)
    assert Path(model.path) == folder.resolve()
    assert model.files == {name: sha256(content) for name, content in FILES.items()}
    assert not (tmp_path / "store").exists()


def test_a_local_drafter_is_prepared_alike(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    config = DrafterConfig(name="mine", source=ModelSource.local, path=str(folder))
    assert prepare_drafter(config, tmp_path) == prepare_target(local(folder), tmp_path)


def test_a_relative_path_is_written_down_absolute(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Jobs run elsewhere than where the model was prepared."""
    model_folder(tmp_path / "model")
    monkeypatch.chdir(tmp_path)
    assert prepare_target(local("model"), tmp_path).path == str((tmp_path / "model").resolve())


def test_a_changed_weight_changes_what_is_written_down(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    before = hash_files(folder)
    (folder / "model.safetensors").write_bytes(b"other weights")
    after = hash_files(folder)
    assert {name for name in before if before[name] != after[name]} == {"model.safetensors"}


def test_a_local_model_without_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="'mine' has source 'local' but no path"):
        prepare_target(local(None), tmp_path)


def test_a_local_path_without_config_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"'mine': '.*/absent' has no config\.json"):
        prepare_target(local(tmp_path / "absent"), tmp_path)


@pytest.mark.parametrize("prepare", [prepare_target, prepare_drafter])
def test_an_unknown_embedded_model_is_answered_with_the_nearest(
    tmp_path: Path, prepare: Any
) -> None:
    config = TargetConfig(name="smollm_135m", source=ModelSource.embedded)
    with pytest.raises(UserError, match=r"no embedded model 'smollm_135m': .*'smollm2_135m'"):
        prepare(config, tmp_path)


def test_an_embedded_target_is_converted_once_and_never_seen_half_done(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A conversion that fails leaves nothing under the final name; the next one starts clean."""
    attempts: list[list[str]] = []

    def convert(out: Path) -> None:
        attempts.append([path.name for path in out.iterdir()])
        (out / "config.json").write_text("{}")
        if len(attempts) == 1:
            raise UserError("killed half way")
        (out / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr("dspark.models.embedded.prepare_embedded_target", convert)
    config = TargetConfig(name="smollm2_135m", source=ModelSource.embedded)
    with pytest.raises(UserError, match="half way"):
        prepare_target(config, tmp_path)
    assert not (tmp_path / "smollm2_135m").exists()
    models = [prepare_target(config, tmp_path) for _ in range(2)]
    assert models[0] == models[1]
    assert set(models[0].files) == {"config.json", "model.safetensors"}
    assert attempts == [[], []]
    assert [path.name for path in tmp_path.iterdir()] == ["smollm2_135m"]


def prepared(path: Path) -> PreparedModel:
    return PreparedModel("m", "local", str(path), None, {"config.json": "0"})


def test_what_is_written_down_is_read_back(tmp_path: Path) -> None:
    prepared(tmp_path).write(tmp_path / "target.json")
    assert PreparedModel.read(tmp_path / "target.json") == prepared(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["target.json"]


@pytest.mark.parametrize("text", [None, "{", "[]", "3", '{"name": "m"}', '{"nonsense": 1}'])
def test_what_is_no_prepared_model_is_refused(tmp_path: Path, text: str | None) -> None:
    file = tmp_path / "target.json"
    if text is not None:
        file.write_text(text)
    with pytest.raises(UserError, match=r"target\.json' is not a prepared model.*dspark prepare"):
        PreparedModel.read(file)


def test_a_model_that_is_gone_is_refused(tmp_path: Path) -> None:
    prepared(tmp_path / "gone").write(tmp_path / "target.json")
    with pytest.raises(UserError, match="/gone', which is gone"):
        PreparedModel.read(tmp_path / "target.json")


# The hub: a fresh process for each question, for the client reads its settings when imported.

SCRIPT = """
import json, sys, time
from dataclasses import asdict
from pathlib import Path
from dspark.config import ModelSource, TargetConfig
from dspark.errors import UserError
from dspark.models.prepare import prepare_target
time.sleep = lambda seconds: None  # the client's pauses between its retries
for fields in json.loads(sys.argv[1]):
    fields = {"repo": "o/n", "revision": sys.argv[2], **fields}
    try:
        config = TargetConfig(name="m", source=ModelSource.hub, **fields)
        print(json.dumps(asdict(prepare_target(config, Path("/nonexistent")))))
    except UserError as error:
        print(json.dumps(str(error)))
"""


def ask(cases: list[dict[str, Any]], home: Path, **env: str) -> list[Any]:
    """Prepare each case; a prepared model's fields, or the message that says why not."""
    kept = {
        name: value
        for name, value in os.environ.items()
        if not name.upper().startswith(("HF_", "HTTP", "ALL_PROXY", "NO_PROXY"))
    }
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, json.dumps(cases), SHA],
        env={**kept, "HF_HOME": str(home), "HF_HUB_DISABLE_PROGRESS_BARS": "1", **env},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    answers = [json.loads(line) for line in done.stdout.splitlines()]
    assert not [text for text in answers if isinstance(text, str) and "\n" in text]
    return answers


def fill_cache(cache: Path, files: dict[str, bytes]) -> Path:
    """A repo in the layout of the client's cache; returns the snapshot's folder."""
    folder = cache / "models--o--n"
    snapshot = folder / "snapshots" / SHA
    for part in (folder / "blobs", folder / "refs", snapshot):
        part.mkdir(parents=True)
    (folder / "refs" / "main").write_text(SHA)
    for name, content in files.items():
        blob = folder / "blobs" / sha256(content)
        blob.write_bytes(content)
        (snapshot / name).symlink_to(os.path.relpath(blob, snapshot))
    return snapshot


def test_a_cached_repo_needs_no_network(tmp_path: Path) -> None:
    cached = {name: FILES[name] for name in FETCHED}
    snapshot = fill_cache(tmp_path / "cache", cached)
    [model] = ask([{}], tmp_path, HF_HUB_CACHE=str(tmp_path / "cache"), HF_HUB_OFFLINE="1")
    assert Path(model["path"]) == snapshot
    assert (model["source"], model["revision"]) == ("hub", SHA)
    assert model["files"] == {name: sha256(content) for name, content in cached.items()}


def test_what_is_neither_cached_nor_reachable_names_the_offline_remedies(tmp_path: Path) -> None:
    fill_cache(tmp_path / "cache", {"config.json": b"{}"})
    other = {"revision": SHA[::-1]}
    cases = {
        "offline": {"HF_HUB_OFFLINE": "1"},
        "unreachable": {"HF_ENDPOINT": "http://127.0.0.1:9"},  # nothing listens there
    }
    for env in cases.values():
        [message] = ask([other], tmp_path, HF_HUB_CACHE=str(tmp_path / "cache"), **env)
        assert f"the hub cannot be reached and o/n at revision {SHA[::-1]}" in message
        assert "HF_HUB_CACHE" in message and "source=local" in message


@pytest.mark.parametrize("missing", ["repo", "revision"])
def test_repo_and_revision_must_be_pinned(tmp_path: Path, missing: str) -> None:
    fields: dict[str, Any] = {"repo": "o/n", "revision": SHA, missing: None}
    config = TargetConfig(name="m", source=ModelSource.hub, **fields)
    with pytest.raises(UserError, match="no repo and revision: pin both"):
        prepare_module.prepare_target(config, tmp_path)


class Hub(BaseHTTPRequestHandler):
    """As much of the hub as a snapshot needs: one good repo, and some ways to refuse."""

    refusals = (
        ("/o/none/", 401, "RepoNotFound"),
        ("/o/gated/", 403, "GatedRepo"),
        ("/dead", 404, "RevisionNotFound"),
    )

    def do_HEAD(self) -> None:
        self.answer()

    def do_GET(self) -> None:
        self.answer()

    def answer(self) -> None:
        for part, status, code in self.refusals:
            if part in self.path:
                self.reply(status, b"", {"X-Error-Code": code})
                return
        name = self.path.split("/")[-1]
        if "/tree/" in self.path:
            listing = [
                {"type": "file", "path": path, "oid": "0", "size": len(content)}
                for path, content in FILES.items()
            ]
            self.reply(200, json.dumps(listing).encode(), {"Content-Type": "application/json"})
        elif name in FILES:
            tag = {"X-Repo-Commit": SHA, "ETag": f'"{sha256(FILES[name])}"'}
            self.reply(200, FILES[name], tag, missing=5 * ("/o/short/" in self.path))
        else:
            self.reply(404, b"", {})

    def reply(self, status: int, body: bytes, headers: dict[str, str], missing: int = 0) -> None:
        """Send a body; with `missing`, hang up that many bytes before its end."""
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body) + missing)}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body)

    def log_message(self, *args: Any) -> None:
        pass


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()


def test_a_repo_is_fetched_without_pickles_and_code(tmp_path: Path, hub: str) -> None:
    [model] = ask([{}], tmp_path, HF_ENDPOINT=hub)
    assert model["files"] == {name: sha256(FILES[name]) for name in FETCHED}


def test_what_the_hub_refuses_is_one_line(tmp_path: Path, hub: str) -> None:
    reasons: list[tuple[dict[str, str], str]] = [
        ({"revision": "dead" * 10}, "o/n at revision deaddead.*Revision Not Found"),
        ({"repo": "o/none"}, "cannot fetch o/none at revision .*Repository Not Found"),
        ({"repo": "o/gated"}, "cannot fetch o/gated at revision .*gated repo"),
        ({"repo": "o/short"}, "cannot fetch o/short at revision .*peer closed connection"),
        ({"repo": "a/b/c"}, "cannot fetch a/b/c at revision .*Repo id must be in the form"),
    ]
    answers = ask([fields for fields, _ in reasons], tmp_path, HF_ENDPOINT=hub)
    for answer, (_, pattern) in zip(answers, reasons, strict=True):
        assert isinstance(answer, str)
        with pytest.raises(UserError, match=pattern):
            raise UserError(answer)
