"""Prompts written for this project and shipped with it, so that a first run needs no download.

Each set has the shape of the dataset whose name it bears (the same kind of task, the same number
of turns) and none of its text; the wording suits a chat model, and the prompts are used as they
are: no template applies.
"""

from __future__ import annotations

from importlib.resources import as_file, files
from importlib.resources.abc import Traversable

from dspark.data.prompts import Prompt, read_prompts
from dspark.errors import UserError, nearest

WARMUP = "warmup"


def builtin_prompts(name: str) -> list[Prompt]:
    """The shipped prompts of one dataset.

    Raises:
        UserError: no set of that name is shipped.
    """
    known = builtin_names()
    if name not in known:
        raise UserError(f"no built-in prompts are named '{name}': {nearest(name, known)}")
    return _read(name)


def builtin_names() -> list[str]:
    """The datasets that have shipped prompts, sorted."""
    stems = (entry.name.removesuffix(".jsonl") for entry in _folder().iterdir())
    return sorted(stem for stem in stems if stem != WARMUP)


def warmup_prompts() -> list[Prompt]:
    """The prompts that warm an engine up; they belong to no dataset and are never measured."""
    return _read(WARMUP)


def _folder() -> Traversable:
    return files("dspark").joinpath("assets", "prompts")


def _read(stem: str) -> list[Prompt]:
    with as_file(_folder().joinpath(f"{stem}.jsonl")) as path:
        return read_prompts(path)
