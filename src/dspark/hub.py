"""What models and datasets from the Hugging Face hub share: pins, checksums and the words for failures."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from dspark.errors import UserError


def check_pinned(what: str, repo: str | None, revision: str | None) -> tuple[str, str]:
    """Return `repo` and `revision` if they name the same files for ever.

    Args:
        what: is fetched, as "model 'x'".

    Raises:
        UserError: one of them is not set, or the revision is a branch, a tag or a shortened sha.
    """
    if not repo:
        raise UserError(f"{what} has source 'hub' but no repo: set repo, or choose another source")
    if not revision:
        raise UserError(
            f"{what} has source 'hub' but no revision: pin the commit sha, or a re-run may get "
            "other files"
        )
    if not re.fullmatch(r"[0-9a-f]{40}", revision):
        raise UserError(
            f"{what} has revision '{revision}', which is not a commit sha: a branch or tag may move, "
            f"set the 40 hex digits that the hub shows for a commit of {repo}"
        )
    return repo, revision


@contextmanager
def one_line(what: str, command: str, instead: str) -> Iterator[None]:
    """Turn what the hub's client raises inside into one line with the remedy.

    Its own warnings, one for each retry, are kept away.

    Args:
        what: is fetched, with repo and revision.
        command: fills the cache on a machine that has a network.
        instead: settings that need no hub.

    Raises:
        UserError: the hub or the local cache does not give what is wanted.
    """
    from huggingface_hub.errors import HTTPError
    from huggingface_hub.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        yield
    except (HTTPError, OSError, ValueError) as error:
        raise UserError(f"{what}: {_cause(error, command, instead)}") from error
    finally:
        logging.set_verbosity(level)


def _cause(error: Exception, command: str, instead: str) -> str:
    """Why it cannot be had, and what to do."""
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

    if isinstance(error, GatedRepoError):  # before its parent, RepositoryNotFoundError
        return (
            "the repo is gated: accept its terms on the hub and log in with 'hf auth login' or "
            "HF_TOKEN"
        )
    if isinstance(error, RepositoryNotFoundError):
        return "the hub has no such repo, or it is private: check repo, or set HF_TOKEN"
    if isinstance(error, RevisionNotFoundError):
        return "the repo has no such revision: set revision to a commit sha of it"
    if isinstance(error, RemoteEntryNotFoundError):
        return "the repo has no such file at that revision: check file and revision"
    if isinstance(error, HFValidationError):
        return f"the hub takes no such name ({_short(error)}): check repo"
    if isinstance(error, HfHubHTTPError) and error.response.status_code in (401, 403):
        return f"the hub refuses ({_short(error)}): check HF_TOKEN, or unset it for a public repo"
    if not isinstance(error, (LocalEntryNotFoundError, HTTPError, ConnectionError)):
        return f"can't be fetched ({_short(error)}): check the cache that HF_HOME names"
    root = _root(error)
    why = "HF_HUB_OFFLINE is set" if isinstance(root, OfflineModeIsEnabled) else _short(root)
    return (
        f"not in the local cache, and the hub can't be reached ({why}): go online; or fill the "
        f"cache elsewhere with '{command}', copy it to where HF_HOME points and set "
        f"HF_HUB_OFFLINE=1; or {instead}"
    )


def _root(error: BaseException) -> BaseException:
    """The first cause: what the network said, under the library's own advice."""
    while error.__cause__ is not None:
        error = error.__cause__
    return error


def _short(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.split("\n")[0].rstrip(".")


def check_content(file: Path, sha256: str | None = None) -> None:
    """Compare a file of the cache with the checksum that the hub gave for it.

    The client compares sizes alone, but it names what it stores by that checksum: the sha256 of a
    large file, git's own hash of a small one. A file that lies in the cache by its own name, as on a
    file system without links, cannot be checked.

    Args:
        sha256: of the file, where it is known already.

    Raises:
        UserError: the content has another checksum.
    """
    stored = file.resolve()
    expected = stored.name
    if re.fullmatch(r"[0-9a-f]{64}", expected):
        found = sha256 or _sha256(stored)
    elif re.fullmatch(r"[0-9a-f]{40}", expected):
        content = stored.read_bytes()
        found = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
    else:
        return
    if found != expected:
        raise UserError(
            f"'{file.name}' from the hub is corrupt: checksum {found}, the hub says {expected}; "
            f"delete '{stored}' and fetch it again"
        )


def _sha256(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()
