"""Rows of a published dataset file, and how one row becomes the user turns of a prompt."""

from __future__ import annotations

import gzip
import string
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow
import pyarrow.parquet

from dspark.config import DatasetConfig
from dspark.data.prompts import decode, json_kind, parse_json
from dspark.errors import UserError

Row = dict[str, Any]
ToTurns = Callable[[Row, str], Any]

KINDS = (".parquet", ".jsonl", ".jsonl.gz", ".json", ".json.gz")
ROLES = {"user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}


def row_reader(config: DatasetConfig) -> ToTurns:
    """The function from a row, and where it stands, to the row's user turns.

    Raises:
        UserError: not exactly one of template, turns_field and messages_field is set, or the
            template is malformed. The function raises it for a row that lacks what it needs.
    """
    ways = {
        "template": config.template,
        "turns_field": config.turns_field,
        "messages_field": config.messages_field,
    }
    given = [name for name, value in ways.items() if value is not None]
    if len(given) != 1:
        raise UserError(
            f"dataset '{config.name}' sets {' and '.join(given) or 'no way to read a row'}: "
            f"set exactly one of {', '.join(ways)}"
        )
    if config.template is not None:
        parts = parse_template(config.template, f"dataset '{config.name}'")
        return lambda row, where: [fill_template(parts, row, where)]
    if config.turns_field is not None:
        turns_field = config.turns_field
        return lambda row, where: listed_turns(row, turns_field, where)
    messages_field = str(config.messages_field)
    if config.transcript:
        return lambda row, where: [transcript(row, messages_field, where)]
    return lambda row, where: asked_turns(row, messages_field, where)


def parse_template(template: str, where: str) -> list[tuple[str, str | None]]:
    """Cut a template into (text, field after it) pairs; doubled braces stand for literal ones.

    Only plain field names are known: `str.format` would let a template reach into the attributes
    of a value, and take `{a.b}` apart where a dataset has a field of that name.

    Raises:
        UserError: unbalanced braces, braces without a name, a format specification, or no field.
    """
    try:
        pieces = list(string.Formatter().parse(template))
    except ValueError as error:
        raise UserError(
            f"{where}: template is malformed ({error}): write {{{{ and }}}} for literal braces"
        ) from error
    for _, name, spec, conversion in pieces:
        if name == "":
            raise UserError(
                f"{where}: template has braces without a field name: write {{field}}, or {{{{}}}} "
                "for literal braces"
            )
        if spec or conversion:
            raise UserError(f"{where}: template formats field '{name}': write {{{name}}} alone")
    if not any(name for _, name, _, _ in pieces):
        raise UserError(f"{where}: template names no field: every prompt would be the same")
    return [(text, name) for text, name, _, _ in pieces]


def fill_template(parts: list[tuple[str, str | None]], row: Row, where: str) -> str:
    """Put a row's values into a parsed template; braces inside a value are left alone.

    Raises:
        UserError: a field is missing, or holds something that is not text or a number.
    """
    filled = []
    for text, name in parts:
        filled.append(text)
        if name is not None:
            value = _field(row, name, where)
            if value is None or not isinstance(value, (str, int, float)):
                raise UserError(
                    f"{where}: template field '{name}' is {json_kind(value)}: it must be text"
                )
            filled.append(str(value))
    return "".join(filled)


def listed_turns(row: Row, field: str, where: str) -> list[Any]:
    """The turns that a row lists in one field.

    Raises:
        UserError: the field is missing or holds no list.
    """
    turns = _field(row, field, where)
    if not isinstance(turns, list):
        raise UserError(
            f"{where}: turns_field '{field}' is {json_kind(turns)}, not a list: name a field of "
            f'user messages, or set template to "{{{field}}}"'
        )
    return turns


def asked_turns(row: Row, field: str, where: str) -> list[str]:
    """The user turns that come before the last assistant message of a chat.

    Each turn is a request: `History` decides whether a later one follows the model's own earlier
    answers (model) or stands alone (independent).

    Raises:
        UserError: see `_before_last_answer`.
    """
    return [content for role, content in _before_last_answer(row, field, where) if role == "user"]


def transcript(row: Row, field: str, where: str) -> str:
    """All that comes before the last assistant message of a chat, as one text that asks for it.

    The dataset's own earlier answers are in it, as in the published table, whose suite writes a chat
    in these lines for a model without a chat template.

    Raises:
        UserError: see `_before_last_answer`.
    """
    names = {"user": "User", "assistant": "Assistant"}
    lines = [f"{names[role]}: {text}" for role, text in _before_last_answer(row, field, where)]
    return "\n".join([*lines, "Assistant:"])


def _before_last_answer(row: Row, field: str, where: str) -> list[tuple[str, str]]:
    """(role, content) of a chat's messages before its last assistant message.

    Messages are {"role", "content"} or {"from", "value"} objects. The last assistant message is
    the answer that the dataset holds to the last turn asked; a user message after it has no answer
    there and is not asked. Blank messages are skipped.

    Raises:
        UserError: the field is missing or is not a chat, a system message would be lost, or no
            user turn precedes an answer.
    """
    messages = _field(row, field, where)
    if not isinstance(messages, list):
        raise UserError(
            f"{where}: messages_field '{field}' is {json_kind(messages)}: name a field that holds "
            "a list of chat messages"
        )
    chat = [pair for message in messages if (pair := _message(message, field, where))[1].strip()]
    answers = [index for index, (role, _) in enumerate(chat) if role == "assistant"]
    asked = chat[: answers[-1]] if answers else []
    if not any(role == "user" for role, _ in asked):
        raise UserError(
            f"{where}: field '{field}' has no user message before an assistant message: "
            "nothing can be asked, name another field"
        )
    return asked


def read_rows(path: Path, kind: str, origin: str, limit: int | None) -> list[Row]:
    """The first `limit` rows of a dataset file (all when None), in file order.

    `kind` is one of KINDS. Blank lines of a JSONL file are not rows.

    Raises:
        UserError: the file is damaged, or its rows are not objects; `origin` names the file.
    """
    if kind == ".parquet":
        return _parquet_rows(path, origin, limit)
    text = decode(_bytes(path, kind, origin), origin)
    if kind.startswith(".jsonl"):
        lines = enumerate(text.split("\n"), start=1)
        kept = [(f"{origin}, line {number}", line) for number, line in lines if line.strip()]
        return [_object(parse_json(line, where), where) for where, line in kept[:limit]]
    rows = parse_json(text, origin)
    if not isinstance(rows, list):
        raise UserError(
            f"{origin}: the file is {json_kind(rows)}, not a list of rows: name another file"
        )
    return [_object(row, f"{origin}, row {index}") for index, row in enumerate(rows[:limit])]


def file_kind(name: str) -> str | None:
    """Which of KINDS a file is by its name; None when it is none of them."""
    return next((kind for kind in KINDS if name.lower().endswith(kind)), None)


def _parquet_rows(path: Path, origin: str, limit: int | None) -> list[Row]:
    # pyarrow, not pandas: lists, integers beside nulls and text come out as plain Python values.
    try:
        table = pyarrow.parquet.read_table(path)
    except (pyarrow.ArrowException, OSError) as error:
        raise UserError(
            f"{origin}: not a readable parquet file ({_first_line(error)}): name another file, or fetch it "
            "again"
        ) from error
    rows: list[Row] = table.slice(0, limit).to_pylist()
    return rows


def _bytes(path: Path, kind: str, origin: str) -> bytes:
    try:
        return gzip.decompress(path.read_bytes()) if kind.endswith(".gz") else path.read_bytes()
    except (OSError, EOFError, zlib.error) as error:
        raise UserError(
            f"{origin}: the file can't be read ({_first_line(error)}): name another file, or fetch it again"
        ) from error


def _object(value: Any, where: str) -> Row:
    if not isinstance(value, dict):
        raise UserError(
            f"{where}: the row is {json_kind(value)}, not an object with fields: name another file"
        )
    return value


def _field(row: Row, name: str, where: str) -> Any:
    if name not in row:
        raise UserError(f"{where} has no field '{name}': its fields are {', '.join(sorted(row))}")
    return row[name]


def _message(message: Any, field: str, where: str) -> tuple[str, str]:
    """A chat message as (user or assistant, content)."""
    known = isinstance(message, dict)
    role = message.get("role", message.get("from")) if known else None
    content = message.get("content", message.get("value")) if known else None
    if not isinstance(role, str) or not isinstance(content, str):
        raise UserError(
            f'{where}: field \'{field}\' is not a chat: a message is {{"role", "content"}} or '
            '{"from", "value"}, both text'
        )
    if role.lower() not in ROLES:
        raise UserError(
            f"{where}: field '{field}' has a message of role '{role}': a prompt holds user turns "
            "only, so choose a chat of user and assistant messages, or template or turns_field"
        )
    return ROLES[role.lower()], content


def _first_line(error: BaseException) -> str:
    return (str(error) or type(error).__name__).strip().split("\n")[0]
