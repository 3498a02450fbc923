"""Prompts from one file of a Hugging Face dataset at a pinned revision."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from huggingface_hub import hf_hub_download
from huggingface_hub.errors import (
    GatedRepoError,
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    LocalEntryNotFoundError,
    OfflineModeIsEnabled,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
)
from huggingface_hub.utils import logging as hub_logging

from dspark.config import DatasetConfig
from dspark.data.prompts import Prompt, turns_fault
from dspark.data.rows import KINDS, file_kind, read_rows, row_reader
from dspark.errors import UserError


def hub_prompts(config: DatasetConfig) -> list[Prompt]:
    """Fetch the dataset's file, or find it in the local cache, and make a prompt of each row.

    Ids are `<dataset>/<row index>`. Rows past `config.limit` are not looked at.

    Raises:
        UserError: repo, file or revision is not set, the file can't be had, or a row makes no
            prompt.
    """
    kind = _check(config)
    to_turns = row_reader(config)
    origin = f"dataset '{config.name}': {config.file} of {config.repo}"
    rows = read_rows(_download(config), kind, origin, config.limit)
    prompts = []
    for index, row in enumerate(rows):
        where = f"{origin}, row {index}"
        turns = to_turns(row, where)
        fault = turns_fault(turns)
        if fault:
            raise UserError(f"{where}: {fault}")
        prompts.append(Prompt(f"{config.name}/{index}", turns))
    return prompts


def _check(config: DatasetConfig) -> str:
    """Refuse what can't be fetched; return the file's kind."""
    for field in ("repo", "file", "revision"):
        if not getattr(config, field):
            hint = ": pin the commit sha, or a re-run may get other prompts"
            raise UserError(
                f"dataset '{config.name}' has source 'hub' but no {field}"
                f"{hint if field == 'revision' else f': set {field}, or choose another source'}"
            )
    kind = file_kind(str(config.file))
    if kind is None:
        raise UserError(
            f"dataset '{config.name}': can't read '{config.file}': the file must end in "
            f"{', '.join(KINDS)}"
        )
    return kind


def _download(config: DatasetConfig) -> Path:
    """The file in the local cache; a cached file at a pinned sha needs no network."""
    repo, file, revision = str(config.repo), str(config.file), str(config.revision)
    try:
        with _no_warnings():
            return Path(hf_hub_download(repo, file, repo_type="dataset", revision=revision))
    except (HTTPError, OSError, ValueError) as error:
        what = f"dataset '{config.name}': {file} of {repo} at revision {revision}"
        raise UserError(f"{what}: {_cause(error, config)}") from error


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Keep the library's notice of each retry away: the user gets one line at the end."""
    level = hub_logging.get_verbosity()
    hub_logging.set_verbosity_error()
    try:
        yield
    finally:
        hub_logging.set_verbosity(level)


def _cause(error: Exception, config: DatasetConfig) -> str:
    """Why the file can't be had, and what to do."""
    if isinstance(error, GatedRepoError):  # before its parent, RepositoryNotFoundError
        return (
            "the repo is gated: accept its terms on the hub and log in with 'hf auth login' or "
            "HF_TOKEN"
        )
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has no such dataset repo, or it is private: check repo, or set HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return "the repo has no such revision: set revision to a commit sha of it"
    if isinstance(error, RemoteEntryNotFoundError):
        return "the repo has no such file at that revision: check file and revision"
    if isinstance(error, HFValidationError):
        return f"the hub takes no such name ({_short(error)}): check repo"
    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
        return f"the hub refuses ({_short(error)}): check HF_TOKEN, or unset it for a public repo"
    if not isinstance(error, (LocalEntryNotFoundError, HTTPError, ConnectionError)):
        return f"can't be fetched ({_short(error)}): check file, and the cache that HF_HOME names"
    root = _root(error)
    why = "HF_HUB_OFFLINE is set" if isinstance(root, OfflineModeIsEnabled) else _short(root)
    return (
        f"not in the local cache, and the hub can't be reached ({why}): go online; or fill "
        f"the cache elsewhere with 'hf download {config.repo} {config.file} --repo-type "
        f"dataset --revision {config.revision}', copy it here and set HF_HUB_OFFLINE=1; or set "
        "source=file and path=<prompts.jsonl>"
    )


def _root(error: BaseException) -> BaseException:
    """The first cause: what the network said, under the library's own advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _short(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.split("\n")[0].rstrip(".")
