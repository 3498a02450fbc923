"""How an MLflow store is reached: our settings of its client, whose turn it is, and one line for what
fails.
"""

from __future__ import annotations

import logging
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from dspark.errors import UserError
from dspark.files import cannot_write

if TYPE_CHECKING:
    from mlflow import MlflowClient

# Set before mlflow is imported, and only where the user has not: that a server is down or does not
# answer should be said within a minute (mlflow's own retries take many), and stdout belongs to our
# command line.
CLIENT_SETTINGS = {
    "MLFLOW_DISABLE_TELEMETRY": "true",
    "MLFLOW_HTTP_REQUEST_BACKOFF_FACTOR": "1",
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "2",
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "15",
    "MLFLOW_LOGGING_LEVEL": "ERROR",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",
}
_DATABASE_RETRIES = 2
TURN_TIMEOUT_S = 900.0  # until a process that has not ended its turn is taken for a stuck one


@contextmanager
def turn(path: Path) -> Iterator[None]:
    """Wait until no other process of ours has the lock `path`: two that mirror one folder at once
    would each upload it.

    Raises:
        UserError: the lock cannot be written, or another process holds it for too long.
    """
    lock = FileLock(path, timeout=TURN_TIMEOUT_S)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(
            f"another `dspark track` holds '{path}' since {TURN_TIMEOUT_S:g} s: end it, then track "
            "again"
        ) from None
    except OSError as error:
        raise cannot_write(path, error) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def sqlite_turn(uri: str) -> Iterator[None]:
    """For a SQLite file, wait until no other process of ours has it open: mlflow fails when two set
    up a new one at once. Other stores are not waited for.

    Raises:
        UserError: see `turn`.
    """
    database = sqlite_file(uri)
    if database is None:
        yield
        return
    database.parent.mkdir(parents=True, exist_ok=True)
    with turn(database.with_name(f"{database.name}.lock")):
        yield


def import_mlflow() -> None:
    """Import mlflow with our settings; not when this module is, because it takes seconds."""
    for name, value in CLIENT_SETTINGS.items():
        os.environ.setdefault(name, value)
    logging.getLogger("urllib3.connectionpool").setLevel(logging.ERROR)
    import mlflow.store.db.utils

    # The setting above is read when mlflow is first imported, which a caller may have done before.
    logging.getLogger("mlflow").setLevel(logging.ERROR)

    # a database that is down or no database is retried for 100 s, which no setting shortens
    mlflow.store.db.utils.MAX_RETRY_COUNT = _DATABASE_RETRIES


def connect(uri: str) -> MlflowClient:
    """Open the store."""
    from mlflow import MlflowClient

    database = sqlite_file(uri)
    if database is None:
        return MlflowClient(tracking_uri=uri)
    # mlflow keeps one connection a URI, which a relative one would bind to the first directory
    return MlflowClient(tracking_uri=f"sqlite:///{database}")


def sqlite_file(uri: str) -> Path | None:
    """The file of a SQLite URI, as an absolute path; None for every other kind of store."""
    if not uri.startswith("sqlite"):
        return None
    from sqlalchemy.engine import make_url

    database = make_url(uri).database
    if not database or database == ":memory:":
        raise ValueError("the URI names no file, as sqlite:///results/mlflow.db does")
    return Path(database).resolve()


@contextmanager
def store_errors(uri: str, results_dir: Path, training: Path | None) -> Iterator[None]:
    """Turn whatever the store raises into one line: the URI, that nothing is lost, and the remedy.

    Raises:
        UserError: in place of mlflow's, the database's and the file system's exceptions.
    """
    try:
        yield
    except Exception as error:
        if not _is_store_error(error):
            raise
        again = ["dspark", "track", str(results_dir)]
        if training is not None:
            again += ["--training", str(training)]
        text = (
            f"MLflow at '{uri}' cannot be used: {_reason(error)}; nothing is lost, the records stay "
            f"under '{results_dir}': start it or set tracking.uri, then `{shlex.join(again)}` "
            "uploads them"
        )
        raise UserError(_without_password(text)) from error


def _is_store_error(error: Exception) -> bool:
    # ValueError is a malformed URI (urllib3, pathlib), ImportError a database driver to install
    if isinstance(error, OSError | ValueError | ImportError):
        return True
    from mlflow.exceptions import MlflowException
    from sqlalchemy.exc import SQLAlchemyError

    return isinstance(error, MlflowException | SQLAlchemyError)


def _reason(error: Exception) -> str:
    """One short line: what was said of a failed connection or request, else what the store said."""
    from urllib3.exceptions import HTTPError

    root: BaseException = error
    while inner := root.__cause__ or root.__context__:
        root = inner
    if root is not error and isinstance(root, OSError | HTTPError):
        return getattr(root, "strerror", None) or str(root)
    text = (str(error) or type(error).__name__).strip().splitlines()[0]
    return text if len(text) <= 200 else f"{text[:200]}..."


def _without_password(text: str) -> str:
    return re.sub(r"//[^/@\s]*@", "//***@", text)
