"""Models from a directory, from the package and from the hub, by the hub client's own code."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save

from dspark.config import DrafterConfig, ModelSource, TargetConfig
from dspark.errors import UserError
from dspark.models import prepare as prepare_module
from dspark.models.prepare import PreparedModel, hash_files, prepare_drafter, prepare_target
from fake_hub import GATED, SHA, Repo, ask, fill_cache, serve, sha256

WEIGHTS = save({"weight": torch.arange(4.0)})
FILES = {
    "config.json": b"{}",
    "model.safetensors": WEIGHTS,
    "tokenizer.json": b'{"a": 1}',
    "pytorch_model.bin": b"a pickle",
    "modeling_own.py": b"code",
}
FETCHED = ("config.json", "model.safetensors", "tokenizer.json")


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
        (out / "model.safetensors").write_bytes(WEIGHTS)

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


def test_a_store_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "store").write_text("a file where a folder is wanted")
    config = TargetConfig(name="smollm2_135m", source=ModelSource.embedded)
    with pytest.raises(UserError, match=r"cannot write '.*/store/smollm2_135m'"):
        prepare_target(config, tmp_path / "store")


@pytest.mark.parametrize("prepare", [prepare_target, prepare_drafter])
@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ("gone", "pytorch_model.bin is a pickle, which is never opened: weights are read from"),
        ("truncated", r"model\.safetensors' are corrupt \(.*\): fetch them again"),
    ],
)
def test_weights_that_cannot_be_read_are_refused_before_any_job(
    tmp_path: Path, prepare: Any, damage: str, said: str
) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / "model.safetensors").unlink()
    if damage == "truncated":
        (folder / "model.safetensors").write_bytes(WEIGHTS[:-1])
    with pytest.raises(UserError, match=said):
        prepare(local(folder), tmp_path)


def test_a_target_with_code_of_its_own_must_be_trusted(tmp_path: Path) -> None:
    folder = model_folder(tmp_path / "model")
    (folder / "config.json").write_text('{"auto_map": {"AutoConfig": "modeling_own.Own"}}')
    config = local(folder)
    with pytest.raises(
        UserError, match=r"auto_map in config\.json.*target\.trust_remote_code=true"
    ):
        prepare_target(config, tmp_path)
    config.trust_remote_code = True
    assert prepare_target(config, tmp_path).trust_remote_code


def prepared(path: Path) -> PreparedModel:
    return PreparedModel("m", "local", str(path), None, {"config.json": "0"})


def test_what_is_written_down_is_read_back(tmp_path: Path) -> None:
    prepared(tmp_path).write(tmp_path / "target.json")
    assert PreparedModel.read(tmp_path / "target.json") == prepared(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["target.json"]


@pytest.mark.parametrize(
    "text",
    [
        *(None, "{", "[]", "3", '{"name": "m"}', '{"nonsense": 1}', "[" * 100_000),
        '{"name": "m", "source": "local", "path": 3, "revision": null, "files": {}}',
    ],
    ids=["none", "open", "list", "number", "part", "nonsense", "nested", "path"],
)
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


@pytest.fixture
def record(tmp_path: Path) -> Path:
    """The target.json of a model folder beside it."""
    prepare_target(local(model_folder(tmp_path / "model")), tmp_path).write(
        tmp_path / "target.json"
    )
    return tmp_path / "target.json"


def check(record: Path) -> None:
    PreparedModel.read(record).check_unchanged(record)


def test_a_changed_file_is_refused_with_both_checksums(record: Path) -> None:
    check(record)
    weights = record.parent / "model" / "model.safetensors"
    stat = weights.stat()
    other = save({"weight": torch.zeros(4)})  # of the same size, with the old time put back
    weights.write_bytes(other)
    os.utime(weights, ns=(stat.st_atime_ns, stat.st_mtime_ns))
    with pytest.raises(UserError) as caught:
        check(record)
    message = str(caught.value)
    assert f"model 'mine': '{weights}' has changed since it was prepared: sha256" in message
    assert f"{sha256(other)}, expected {sha256(WEIGHTS)}; restore it, or delete" in message
    weights.write_bytes(WEIGHTS)
    check(record)
    weights.unlink()
    with pytest.raises(UserError, match=r"model\.safetensors' is gone: restore it, or delete"):
        check(record)


def test_an_untouched_file_is_hashed_once(record: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[str] = []
    real = prepare_module._sha256

    def counting(file: Path) -> str:
        hashed.append(file.name)
        return real(file)

    monkeypatch.setattr(prepare_module, "_sha256", counting)
    check(record)
    assert set(hashed) == set(FILES)
    hashed.clear()
    check(record)
    assert hashed == []
    (record.parent / "model" / "config.json").touch()
    check(record)
    assert hashed == ["config.json"]
    (record.parent / "target.seen.json").write_text("{")  # what is lost there is found out again
    hashed.clear()
    check(record)
    assert set(hashed) == set(FILES)


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
    try:
        config = TargetConfig(name="m", source=ModelSource.hub, **fields)
        print(json.dumps(asdict(prepare_target(config, Path("/nonexistent")))))
    except UserError as error:
        print(json.dumps(str(error)))
"""


def prepare_all(cases: list[dict[str, Any]], home: Path, **env: str) -> list[Any]:
    """Prepare each case; a prepared model's fields, or the message that says why not."""
    common = {"repo": "o/n", "revision": SHA}
    return ask(SCRIPT, [{**common, **case} for case in cases], home, **env)


def test_a_cached_repo_needs_no_network_and_must_be_whole(tmp_path: Path) -> None:
    cached = {name: FILES[name] for name in FETCHED}
    snapshots = {
        repo: fill_cache(tmp_path / "cache", repo, cached) for repo in ("o/n", "o/a", "o/b")
    }
    damaged = {"o/a": "model.safetensors", "o/b": "config.json"}  # a large and a small file
    blobs = {repo: (snapshots[repo] / name).resolve() for repo, name in damaged.items()}
    for blob in blobs.values():
        blob.write_bytes(blob.read_bytes()[:-1] + b"x")
    model, *messages = prepare_all(
        [{"repo": repo} for repo in snapshots],
        tmp_path,
        HF_HUB_CACHE=str(tmp_path / "cache"),
        HF_HUB_OFFLINE="1",
    )
    assert Path(model["path"]) == snapshots["o/n"]
    assert (model["source"], model["revision"]) == ("hub", SHA)
    assert model["files"] == {name: sha256(content) for name, content in cached.items()}
    for message, (repo, name) in zip(messages, damaged.items(), strict=True):
        assert f"'{name}' from the hub is corrupt: checksum" in message
        assert f"the hub says {blobs[repo].name}; delete '{blobs[repo]}' and fetch" in message


@pytest.mark.parametrize(
    ("why", "env"),
    [
        ("HF_HUB_OFFLINE is set", {"HF_HUB_OFFLINE": "1"}),
        ("[Errno 111] Connection refused", {"HF_ENDPOINT": "http://127.0.0.1:9"}),  # no one listens
    ],
    ids=["offline", "unreachable"],
)
def test_what_is_neither_cached_nor_reachable_names_the_offline_remedies(
    tmp_path: Path, why: str, env: dict[str, str]
) -> None:
    fill_cache(tmp_path / "cache", "o/n", {"config.json": b"{}"})
    other = SHA[::-1]
    env["HF_HUB_CACHE"] = str(tmp_path / "cache")
    [message] = prepare_all([{"revision": other}], tmp_path, **env)
    assert message == (
        f"target 'm': o/n at revision {other}: not in the local cache, and the hub can't be reached "
        f"({why}): go online; or fill the cache elsewhere with 'hf download o/n --revision {other}', "
        "copy it to where HF_HOME points and set HF_HUB_OFFLINE=1; or set target.source=local and "
        "target.path, or target=smollm2_135m, which needs no hub"
    )


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"repo": None}, "target 'm' has source 'hub' but no repo: set repo"),
        ({"revision": None}, "target 'm' has source 'hub' but no revision: pin the commit sha"),
        (
            {"revision": "main"},
            "revision 'main', which is not a commit sha: a branch or tag may move",
        ),
        ({"revision": SHA[:7]}, f"revision '{SHA[:7]}', which is not a commit sha"),
        ({"revision": f"{SHA}/.."}, "which is not a commit sha"),
    ],
)
def test_repo_and_revision_must_be_pinned(
    tmp_path: Path, fields: dict[str, Any], said: str
) -> None:
    pinned: dict[str, Any] = {"repo": "o/n", "revision": SHA, **fields}
    config = TargetConfig(name="m", source=ModelSource.hub, **pinned)
    with pytest.raises(UserError, match=said):
        prepare_target(config, tmp_path)


CODE = {**FILES, "config.json": b'{"auto_map": {"AutoConfig": "modeling_own.Own"}}'}


@pytest.fixture(scope="module")
def hub() -> Iterator[str]:
    repos = {
        "o/n": Repo(FILES),
        "o/code": Repo(CODE),
        "o/short": Repo(FILES, missing=5),
        "o/other": Repo(FILES, sent={"model.safetensors": WEIGHTS[:-1] + b"x"}),
        "o/pickle": Repo({name: FILES[name] for name in ("config.json", "pytorch_model.bin")}),
        "o/bare": Repo({"README.md": b"nothing here"}),
        "o/gated": Repo(status=403, headers=GATED),
        "o/secret": Repo(status=401, headers=GATED),
    }
    with serve(repos) as address:
        yield address


def test_a_repo_is_fetched_without_pickles_and_code(tmp_path: Path, hub: str) -> None:
    trusted = {"repo": "o/code", "trust_remote_code": True}
    plain, code = prepare_all([{}, trusted], tmp_path, HF_ENDPOINT=hub)
    assert plain["files"] == {name: sha256(FILES[name]) for name in FETCHED}
    assert set(code["files"]) == {*FETCHED, "modeling_own.py"} and code["trust_remote_code"]


def test_what_the_hub_refuses_is_one_line(tmp_path: Path, hub: str) -> None:
    reasons: list[tuple[dict[str, str], str]] = [
        (
            {"revision": "dead" * 10},
            f"o/n at revision {'dead' * 10}: the repo has no such revision",
        ),
        (
            {"repo": "o/none"},
            f"o/none at revision {SHA}: the hub has no such repo, or it is private",
        ),
        ({"repo": "o/gated"}, "the repo is gated: accept its terms on the hub and log in"),
        ({"repo": "o/secret"}, "the repo is gated: accept its terms on the hub and log in"),
        ({"repo": "o/short"}, "the hub can't be reached (peer closed connection"),
        ({"repo": "a/b/c"}, "the hub takes no such name (Repo id must be in the form"),
        ({"repo": "o/other"}, "'model.safetensors' from the hub is corrupt: checksum"),
        ({"repo": "o/pickle"}, "lacks model.safetensors: weights are read from safetensors alone"),
        ({"repo": "o/bare"}, f"o/bare has no config.json at revision {SHA}: check repo"),
        ({"repo": "o/code"}, "brings code of its own (auto_map in config.json), which is not run"),
    ]
    answers = prepare_all([fields for fields, _ in reasons], tmp_path, HF_ENDPOINT=hub)
    for answer, (_, said) in zip(answers, reasons, strict=True):
        assert isinstance(answer, str) and said in answer, answer
