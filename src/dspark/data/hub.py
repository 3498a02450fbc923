"""Prompts from one file of a Hugging Face dataset at a pinned revision."""

from __future__ import annotations

from pathlib import Path

from huggingface_hub import hf_hub_download

from dspark.config import DatasetConfig
from dspark.data.prompts import Prompt, turns_fault
from dspark.data.rows import KINDS, file_kind, read_rows, row_reader
from dspark.errors import UserError
from dspark.hub import check_content, check_pinned, one_line


def hub_prompts(config: DatasetConfig) -> list[Prompt]:
    """Fetch the dataset's file, or find it in the local cache, and make a prompt of each row.

    Ids are `<dataset>/<row index>`. Rows past `config.limit` are not looked at.

    Raises:
        UserError: repo, file or revision is not set, the revision is no commit sha, the file can't
            be had or is not what the hub has, or a row makes no prompt.
    """
    repo, revision = check_pinned(f"dataset '{config.name}'", config.repo, config.revision)
    file, kind = _check_file(config)
    to_turns = row_reader(config)
    origin = f"dataset '{config.name}': {file} of {repo}"
    rows = read_rows(_download(origin, repo, file, revision), kind, origin, config.limit)
    prompts = []
    for index, row in enumerate(rows):
        where = f"{origin}, row {index}"
        turns = to_turns(row, where)
        fault = turns_fault(turns)
        if fault:
            raise UserError(f"{where}: {fault}")
        prompts.append(Prompt(f"{config.name}/{index}", turns))
    return prompts


def _check_file(config: DatasetConfig) -> tuple[str, str]:
    """The file's name and its kind; refuses what can't be read."""
    if not config.file:
        raise UserError(
            f"dataset '{config.name}' has source 'hub' but no file: set file, or choose another "
            "source"
        )
    kind = file_kind(config.file)
    if kind is None:
        raise UserError(
            f"dataset '{config.name}': can't read '{config.file}': the file must end in "
            f"{', '.join(KINDS)}"
        )
    return config.file, kind


def _download(origin: str, repo: str, file: str, revision: str) -> Path:
    """The file in the local cache; one that is there already needs no network."""
    with one_line(
        f"{origin} at revision {revision}",
        f"hf download {repo} {file} --repo-type dataset --revision {revision}",
        "set source=file and path=<prompts.jsonl>, or source=builtin",
    ):
        path = Path(hf_hub_download(repo, file, repo_type="dataset", revision=revision))
    check_content(path)
    return path
