"""Make target and drafter available as local directories, and write down exactly what they are.

`target.json` and `drafter.json` are what the bench jobs take as inputs: name, source, directory,
revision and the sha256 of every weight and tokenizer file, which a job compares before it loads them.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

from dspark.config import DrafterConfig, ModelSource, TargetConfig
from dspark.errors import UserError, nearest
from dspark.files import cannot_write, write_text
from dspark.hub import check_content, check_pinned, one_line
from dspark.models.directory import check_code, weight_files

# What is fetched from a hub repo: no pickles, no code.
HUB_PATTERNS = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]
CODE_PATTERN = "*.py"  # fetched too when target.trust_remote_code is set


@dataclass(frozen=True)
class PreparedModel:
    """A checkpoint on this machine's disk."""

    name: str
    source: str
    path: str
    revision: str | None
    files: dict[str, str]  # file name to sha256
    trust_remote_code: bool = False  # of a target: whether its own code may run

    @classmethod
    def read(cls, path: str | Path) -> PreparedModel:
        """Read target.json or drafter.json.

        Raises:
            UserError: the file is absent or broken, or the directory it names is gone.
        """
        try:
            model = cls(**json.loads(Path(path).read_text()))
            there = Path(model.path).is_dir()
        except (OSError, ValueError, TypeError, RecursionError) as error:
            raise UserError(
                f"'{path}' is not a prepared model ({error}): run `dspark prepare`"
            ) from error
        if not there:
            raise UserError(
                f"'{path}' names '{model.path}', which is gone: delete it and run again"
            )
        return model

    def write(self, path: str | Path) -> None:
        write_text(Path(path), json.dumps(asdict(self), indent=2, sort_keys=True) + "\n")

    def check_unchanged(self, path: str | Path) -> None:
        """Refuse a model whose files are not those that `path` was written for.

        A file is hashed once: its size and time of change are then kept beside `path`, and it is
        hashed again only when one of them is another.

        Raises:
            UserError: a file is gone or its content has changed.
        """
        record = Path(path).with_suffix(".seen.json")
        before = _read_seen(record)
        now = {}
        for name, expected in self.files.items():
            file = Path(self.path) / name
            if not file.is_file():
                raise UserError(
                    f"model '{self.name}': '{file}' is gone: restore it, or delete '{path}' and run again"
                )
            stat = file.stat()
            now[name] = [expected, stat.st_size, stat.st_ctime_ns]
            if before.get(name) != now[name] and (found := _sha256(file)) != expected:
                raise UserError(
                    f"model '{self.name}': '{file}' has changed since it was prepared: sha256 {found}, "
                    f"expected {expected}; restore it, or delete '{path}' and run again"
                )
        if now != before:
            with suppress(UserError):  # where it cannot be kept, the next job hashes again
                write_text(record, json.dumps(now, indent=2, sort_keys=True) + "\n")


def _read_seen(record: Path) -> dict[str, Any]:
    try:
        seen = json.loads(record.read_text())
    except (OSError, ValueError, RecursionError):
        return {}
    return seen if isinstance(seen, dict) else {}


def prepare_target(config: TargetConfig, store: Path) -> PreparedModel:
    """Make the target available; an embedded one is converted once into `store`.

    Raises:
        UserError: it cannot be had, its weights are missing, corrupt or no safetensors, or it brings
            code of its own that is not trusted.
    """
    own, trusted = {"smollm2_135m": _embedded_target}, config.trust_remote_code
    model = _prepare(config, store, own, "target", trusted)
    check_code(model.path, trusted)
    return model


def prepare_drafter(
    config: DrafterConfig, store: Path, trained: Path | None = None
) -> PreparedModel:
    """Make the drafter available; an embedded one is read from the installed package.

    Args:
        trained: the checkpoint that training made, for source train.

    Raises:
        UserError: as for a target; or source is train and the training has not run.
    """
    if config.source is ModelSource.train:
        if trained is None or not (trained / "config.json").is_file():
            raise UserError(
                f"drafter '{config.name}' has source 'train' but '{trained}' holds no trained "
                "checkpoint: run `dspark train`, or the experiment's DAG, which trains it"
            )
        path = trained.resolve()
        weight_files(path, "drafter")
        return PreparedModel(config.name, config.source.value, str(path), None, hash_files(path))
    return _prepare(
        config, store, {"smollm2_135m": lambda name, _store: embedded_drafter(name)}, "drafter"
    )


def _prepare(
    config: TargetConfig | DrafterConfig,
    store: Path,
    embedded: Mapping[str, Callable[[str, Path], Path]],
    what: str,
    trusted: bool = False,
) -> PreparedModel:
    revision = None
    if config.source is ModelSource.embedded:
        if config.name not in embedded:
            raise UserError(f"no embedded model '{config.name}': {nearest(config.name, embedded)}")
        path = embedded[config.name](config.name, store)
    elif config.source is ModelSource.train:
        raise UserError(
            f"target '{config.name}' has source 'train': only drafters are trained here, choose hub, "
            "local or embedded"
        )
    elif config.source is ModelSource.local:
        path = _local(config)
    else:
        path, revision = _hub(config, what, trusted), config.revision
    weight_files(path, what)
    digests = hash_files(path)
    if config.source is ModelSource.hub:
        for name, sha256 in digests.items():
            check_content(path / name, sha256)
    return PreparedModel(config.name, config.source.value, str(path), revision, digests, trusted)


def _embedded_target(name: str, store: Path) -> Path:
    from dspark.models.embedded import prepare_embedded_target

    final = store / name
    if not final.is_dir():  # a directory under the final name is always whole
        part = store / f"{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        try:
            part.mkdir(parents=True)
            prepare_embedded_target(part)
            part.rename(final)
        except OSError as error:
            raise cannot_write(final, error) from error
    return final.resolve()


def embedded_drafter(name: str) -> Path:
    """Where the package keeps the drafter of this name, if it has one."""
    return Path(str(files("dspark") / "assets" / "drafters" / name))


def _local(config: TargetConfig | DrafterConfig) -> Path:
    if config.path is None:
        raise UserError(
            f"model '{config.name}' has source 'local' but no path: set it in its YAML file"
        )
    path = Path(config.path).expanduser()
    if not (path / "config.json").is_file():
        raise UserError(
            f"model '{config.name}': '{path}' has no config.json, give a model directory"
        )
    return path.resolve()


def _hub(config: TargetConfig | DrafterConfig, what: str, trusted: bool) -> Path:
    from huggingface_hub import snapshot_download

    repo, revision = check_pinned(f"{what} '{config.name}'", config.repo, config.revision)
    with one_line(
        f"{what} '{config.name}': {repo} at revision {revision}",
        f"hf download {repo} --revision {revision}",
        f"set {what}.source=local and {what}.path, or {what}=smollm2_135m, which needs no hub",
    ):
        patterns = [*HUB_PATTERNS, CODE_PATTERN] if trusted else HUB_PATTERNS
        path = Path(snapshot_download(repo, revision=revision, allow_patterns=patterns))
    if not (path / "config.json").is_file():
        raise UserError(
            f"{what} '{config.name}': {repo} has no config.json at revision {revision}: check repo "
            "and revision"
        )
    return path


def hash_files(path: Path) -> dict[str, str]:
    """sha256 of each file of a model directory (its top level), by name."""
    files = [file for file in sorted(path.iterdir()) if file.is_file()]
    return {file.name: _sha256(file) for file in files if not file.name.startswith(".")}


def _sha256(file: Path) -> str:
    with file.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
