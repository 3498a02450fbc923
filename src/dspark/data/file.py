"""A prompts.jsonl of the user's."""

from __future__ import annotations

from dspark.config import DatasetConfig
from dspark.data.prompts import SHAPE, Prompt, read_prompts
from dspark.errors import UserError


def file_prompts(config: DatasetConfig) -> list[Prompt]:
    """Read the file that `config.path` names; a relative path starts at the working directory.

    Raises:
        UserError: no path is set, or the file is not a good prompts.jsonl.
    """
    if not config.path:
        raise UserError(
            f"dataset '{config.name}' has source 'file' but no path: set path to a JSONL file "
            f"({SHAPE})"
        )
    return read_prompts(config.path)
