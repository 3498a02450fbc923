"""Make target and drafter available as local directories, and write down exactly what they are.

`target.json` and `drafter.json` are what the bench jobs take as inputs: name, source, directory,
revision and the sha256 of every weight and tokenizer file.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from importlib.resources import files
from pathlib import Path

from dspark.config import DrafterConfig, ModelSource, TargetConfig
from dspark.errors import UserError, nearest
from dspark.files import write_text

# What is fetched from a hub repo: no pickles, no code.
HUB_PATTERNS = ["*.safetensors", "*.json", "*.model", "*.txt", "*.jinja"]


@dataclass(frozen=True)
class PreparedModel:
    """A checkpoint on this machine's disk."""

    name: str
    source: str
    path: str
    revision: str | None
    files: dict[str, str]  # file name to sha256

    @classmethod
    def read(cls, path: str | Path) -> PreparedModel:
        """Read target.json or drafter.json.

        Raises:
            UserError: the file is absent or broken, or the directory it names is gone.
        """
        try:
            model = cls(**json.loads(Path(path).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"'{path}' is not a prepared model ({error}): run `dspark prepare`"
            ) from error
        if not Path(model.path).is_dir():
            raise UserError(
                f"'{path}' names '{model.path}', which is gone: delete it and run again"
            )
        return model

    def write(self, path: str | Path) -> None:
        write_text(Path(path), json.dumps(asdict(self), indent=2, sort_keys=True) + "\n")


def prepare_target(config: TargetConfig, store: Path) -> PreparedModel:
    """Make the target available; an embedded one is converted once into `store`."""
    return _prepare(config, store, {"smollm2_135m": _embedded_target})


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
        return PreparedModel(config.name, config.source.value, str(path), None, hash_files(path))
    return _prepare(config, store, {"smollm2_135m": _embedded_drafter})


def _prepare(
    config: TargetConfig | DrafterConfig,
    store: Path,
    embedded: dict[str, Callable[[str, Path], Path]],
) -> PreparedModel:
    revision = None
    if config.source is ModelSource.embedded:
        if config.name not in embedded:
            raise UserError(f"no embedded model '{config.name}': {nearest(config.name, embedded)}")
        path = embedded[config.name](config.name, store)
    elif config.source is ModelSource.train:
        raise UserError(
            f"target '{config.name}' has source 'train': only drafters are trained here"
        )
    elif config.source is ModelSource.local:
        path = _local(config)
    else:
        path, revision = _hub(config), config.revision
    return PreparedModel(config.name, config.source.value, str(path), revision, hash_files(path))


def _embedded_target(name: str, store: Path) -> Path:
    from dspark.models.embedded import prepare_embedded_target

    final = store / name
    if not final.is_dir():  # a directory under the final name is always whole
        part = store / f"{name}.part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir(parents=True)
        prepare_embedded_target(part)
        part.rename(final)
    return final.resolve()


def _embedded_drafter(name: str, _store: Path) -> Path:
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


def _hub(config: TargetConfig | DrafterConfig) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HTTPError, LocalEntryNotFoundError
    from huggingface_hub.utils import logging

    if config.repo is None or config.revision is None:
        raise UserError(
            f"model '{config.name}' has source 'hub' but no repo and revision: pin both, "
            "so that a re-run gets the same weights"
        )
    where = f"{config.repo} at revision {config.revision}"
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # no notice of each retry: one line at the end says it all
    try:
        return Path(
            snapshot_download(config.repo, revision=config.revision, allow_patterns=HUB_PATTERNS)
        )
    except LocalEntryNotFoundError as error:
        raise UserError(
            f"model '{config.name}': the hub cannot be reached and {where} is not in the local "
            "cache; fetch it where there is a network (HF_HUB_CACHE says where to), or set "
            "source=local and path"
        ) from error
    except (HTTPError, OSError, ValueError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"model '{config.name}': cannot fetch {where}: {reason}") from error
    finally:
        logging.set_verbosity(level)


def hash_files(path: Path) -> dict[str, str]:
    """sha256 of each file of a model directory (its top level), by name."""
    digests = {}
    for file in sorted(path.iterdir()):
        if file.is_file() and not file.name.startswith("."):
            with file.open("rb") as handle:
                digests[file.name] = hashlib.file_digest(handle, "sha256").hexdigest()
    return digests
