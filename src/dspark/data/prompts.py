"""Prompts and the file that carries them between stages: one {"id", "turns"} object a line."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from dspark.config import DatasetConfig
from dspark.errors import UserError
from dspark.files import write_text

SHAPE = 'a line is {"id": "...", "turns": ["...", ...]}'


@dataclass(frozen=True)
class Prompt:
    """One conversation: the user's messages in order; each of them becomes a request."""

    id: str
    turns: list[str]


def read_prompts(path: str | Path) -> list[Prompt]:
    """Read a prompts.jsonl.

    A byte order mark is tolerated, and so are fields other than id and turns, which are dropped.

    Raises:
        UserError: the file is absent, unreadable, not UTF-8 or holds no prompts; or one of its
            lines is blank, not JSON, repeats an id, or lacks a usable id or turns.
    """
    lines = _lines(path)
    if not lines:
        raise UserError(f"{path} holds no prompts: {SHAPE}")
    prompts: list[Prompt] = []
    line_of: dict[str, int] = {}
    for number, line in enumerate(lines, start=1):
        where = f"{path}, line {number}"
        prompt = _parse(line, where)
        if prompt.id in line_of:
            raise UserError(
                f"{where}: id '{prompt.id}' is taken by line {line_of[prompt.id]}: "
                "give every prompt an id of its own"
            )
        line_of[prompt.id] = number
        prompts.append(prompt)
    return prompts


def write_prompts(path: str | Path, prompts: Iterable[Prompt]) -> None:
    """Write a prompts.jsonl whole: a reader sees the old file or the new one, never a part.

    Raises:
        UserError: the file cannot be written.
    """
    lines = [json.dumps(asdict(prompt), ensure_ascii=False) + "\n" for prompt in prompts]
    write_text(path, "".join(lines))


def prompts_digest(prompts: Iterable[Prompt]) -> str:
    """The sha256 of the prompts' canonical JSON: equal when ids, turns and order are equal."""
    text = json.dumps([asdict(p) for p in prompts], sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()


def split_prompts(dataset: DatasetConfig, prompts: Sequence[Prompt]) -> list[list[Prompt]]:
    """The prompts of each of the dataset's shards.

    Shard i of n takes every n-th prompt from the i-th on. Files are often sorted, by subject or by
    difficulty: this way all shards ask alike, so their devices finish together and their
    throughputs are means of the same quantity.

    Raises:
        UserError: there are fewer prompts than shards.
    """
    if len(prompts) < dataset.shards:
        raise UserError(
            f"dataset '{dataset.name}' has {len(prompts)} prompts but shards asks for "
            f"{dataset.shards} parts: set shards to {len(prompts)} or less"
        )
    return [list(prompts[start :: dataset.shards]) for start in range(dataset.shards)]


def turns_fault(turns: Any) -> str | None:
    """What makes `turns` unfit to be asked, with the remedy; None when nothing does."""
    if not isinstance(turns, list):
        return f"'turns' is {json_kind(turns)}: it must be a list of user messages"
    if not turns:
        return "'turns' is empty: a prompt needs at least one user message"
    for number, turn in enumerate(turns, start=1):
        if not isinstance(turn, str):
            return f"turn {number} is {json_kind(turn)}: it must be text"
        if not turn.strip():
            return f"turn {number} is blank: write the message or remove the turn"
        if not _encodable(turn):
            return f"turn {number} holds half a surrogate pair: repair the text's encoding"
    return None


def parse_json(text: str, where: str) -> Any:
    """Parse JSON text that stands at `where`.

    Raises:
        UserError: the text is not JSON.
    """
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise UserError(
            f"{where}: not JSON ({error.msg} at character {error.pos + 1}): repair the text"
        ) from error
    except ValueError as error:  # a number of more digits than Python reads
        raise UserError(f"{where}: not JSON that can be read ({error}): repair the text") from error
    except RecursionError as error:
        raise UserError(f"{where}: JSON nested too deeply: flatten it") from error


def read_text(path: str | Path) -> str:
    """Read a UTF-8 text file; a byte order mark at its head is dropped.

    Raises:
        UserError: the file is absent, unreadable or not UTF-8.
    """
    try:
        raw = Path(path).read_bytes()
    except FileNotFoundError as error:
        raise UserError(f"{path} does not exist: check the path") from error
    except OSError as error:
        raise UserError(
            f"can't read {path}: {error.strerror or error}: check the path and its permissions"
        ) from error
    return decode(raw, path)


def decode(raw: bytes, path: str | Path) -> str:
    """Decode UTF-8, naming the first line that isn't; a byte order mark is dropped.

    Raises:
        UserError: the bytes are not UTF-8.
    """
    try:
        return raw.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{path}, line {line}: byte 0x{raw[error.start]:02x} is not UTF-8: "
            "save the file as UTF-8"
        ) from error


def json_kind(value: Any) -> str:
    """What a JSON value is called in a message."""
    if value is None:
        return "null"
    kinds: list[tuple[type | tuple[type, ...], str]] = [
        (bool, "true or false"),
        (str, "text"),
        ((int, float), "a number"),
        (list, "a list"),
        (dict, "an object"),
    ]
    return next((name for kind, name in kinds if isinstance(value, kind)), type(value).__name__)


def _lines(path: str | Path) -> list[str]:
    """The file's lines, without the empty one that a trailing newline leaves."""
    # Not splitlines(): a JSON string may hold U+2028 and its like, which don't end a line.
    lines = read_text(path).split("\n")
    return lines[:-1] if not lines[-1] else lines


def _parse(line: str, where: str) -> Prompt:
    """One line as a prompt."""
    if not line.strip():
        raise UserError(f"{where}: the line is blank: remove it")
    row = parse_json(line, where)
    if not isinstance(row, dict):
        raise UserError(f"{where}: the line is {json_kind(row)}, not an object: {SHAPE}")
    for field in ("id", "turns"):
        if field not in row:
            raise UserError(f"{where}: '{field}' is missing: {SHAPE}")
    name, turns = row["id"], row["turns"]
    if not isinstance(name, str):
        raise UserError(f"{where}: 'id' is {json_kind(name)}: it must be text")
    if not name.strip() or not _encodable(name):
        raise UserError(f"{where}: 'id' is blank or not encodable: name the prompt in plain text")
    fault = turns_fault(turns)
    if fault:
        raise UserError(f"{where}: {fault}")
    return Prompt(name, turns)


def _encodable(text: str) -> bool:
    """False for the lone surrogates that JSON escapes let through and that UTF-8 has no form of."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True
