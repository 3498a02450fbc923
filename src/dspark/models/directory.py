"""What of a model directory is opened at all: weights in safetensors, and code only when it is trusted.

A directory may come from anyone. Its weights are read from safetensors files that lie in it, never
unpickled; what it says about other files and about code to run is checked before it is followed.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open

from dspark.errors import UserError

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLED = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
CONFIGS = ("config.json", "tokenizer_config.json")  # where a model may name code of its own


def weight_files(path: str | Path, what: str) -> list[Path]:
    """The files that hold the weights of a model directory, each with a sound header and whole.

    Args:
        what: target or drafter, for messages.

    Raises:
        UserError: there are none, one is missing or corrupt, or the index is broken or names a file
            that is not one of the directory's.
    """
    folder = Path(path)
    files = [folder / SINGLE]
    if not files[0].is_file():
        files = _indexed(folder, what)
    for file in files:
        try:
            with safe_open(file, framework="pt"):
                pass
        except (SafetensorError, OSError) as error:
            raise corrupt(file, what, error) from error
    return files


def corrupt(file: Path, what: str, error: Exception) -> UserError:
    """What is said of weights that cannot be read."""
    return UserError(f"{what} weights '{file}' are corrupt ({error}): fetch them again")


def _indexed(folder: Path, what: str) -> list[Path]:
    """The shards that the index names."""
    index = folder / INDEX
    if not index.is_file():
        raise UserError(
            f"{what} '{folder}' lacks {SINGLE}{_pickles(folder)}: weights are read from safetensors "
            "alone, save the model again with save_pretrained"
        )
    try:
        names = set(json.loads(index.read_text())["weight_map"].values())
        strange = [
            name for name in names if Path(name).name != name or Path(name).suffix != ".safetensors"
        ]
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise UserError(f"{what} index '{index}' is broken ({error}): fetch it again") from error
    if strange or not names:
        raise UserError(
            f"{what} index '{index}' names {min(strange, default='no file')!r}, and weights are read "
            "from safetensors files beside it alone: fetch it again"
        )
    absent = sorted(name for name in names if not (folder / name).is_file())
    if absent:
        raise UserError(
            f"{what} '{folder}' lacks {', '.join(absent)}, which its index names: fetch the model again"
        )
    return sorted(folder / name for name in names)


def _pickles(folder: Path) -> str:
    """Names pickled weights, so that their owner knows why they do not count."""
    names = sorted(file.name for file in folder.glob("*") if file.suffix in PICKLED)
    return f" and {names[0]} is a pickle, which is never opened" if names else ""


def weight_bytes(files: list[Path], dtype: torch.dtype | None = None) -> int:
    """Bytes that the tensors of these files take in memory.

    Args:
        dtype: what they are loaded as; None: as they are stored.
    """
    if dtype is None:
        return sum(file.stat().st_size for file in files)
    elements = 0
    for file in files:
        with safe_open(file, framework="pt") as handle:
            shapes = [handle.get_slice(name).get_shape() for name in handle.keys()]  # noqa: SIM118
        elements += sum(prod(shape) for shape in shapes)
    return elements * dtype.itemsize


def check_code(path: str | Path, trusted: bool) -> None:
    """Refuse a target that names Python code of its own, unless the user trusts it.

    Args:
        trusted: target.trust_remote_code.

    Raises:
        UserError: it does and is not trusted; or the code is in another repo, which nothing pins.
    """
    for name in CONFIGS:
        code = _auto_map(Path(path) / name)
        if code and not trusted:
            raise UserError(
                f"target '{path}' brings code of its own (auto_map in {name}), which is not run: set "
                "target.trust_remote_code=true if you trust it, or delete auto_map from a local copy "
                "to use what transformers has"
            )
        elsewhere = [reference for reference in code if "--" in reference]
        if elsewhere:
            raise UserError(
                f"target '{path}': auto_map in {name} names '{elsewhere[0]}', code of another repo that "
                "no revision pins: copy the code into the model's directory and name it there"
            )


def _auto_map(file: Path) -> list[str]:
    """The classes that a config names; a broken config names none, it is refused where it is read."""
    try:
        raw: Any = json.loads(file.read_text())
    except (OSError, ValueError, RecursionError):
        return []
    entry = raw.get("auto_map") if isinstance(raw, dict) else None
    if not isinstance(entry, dict):
        entry = {"": entry or []}
    classes: list[str] = []
    for value in entry.values():
        classes += [str(name) for name in (value if isinstance(value, list) else [value])]
    return classes
