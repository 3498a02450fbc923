"""Write configs.md, the reference of all fields, from src/dspark/config.py: python docs/configs.py

Types and defaults come from the structured configs, the words from their docstrings and from the comment
beside each field.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import io
import json
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import NoneType
from typing import Any, get_args, get_origin, get_type_hints

from omegaconf import MISSING

from dspark import config

PAGE = Path(__file__).with_name("configs.md")
HEAD = """\
# All fields of an experiment

Written from `src/dspark/config.py` by `python docs/configs.py`; a test compares. A field is set in an
experiment's YAML file or on the command line, as `engine.concurrency=8`. The defaults below are those of
the schema. The file that is picked from a config group may set others: `dspark config EXPERIMENT` prints
what is used. [experiments.md](experiments.md) says how the groups fit together.
"""
WORDS = {int: "whole number", float: "number", str: "text", bool: "`true` or `false`", Any: "any"}


@dataclass
class Words:
    """What the source says beside the members of one class."""

    beside: dict[str, str]  # by member, the comment on its line
    above: dict[str, str]  # by member, the comment lines before it: a heading


def main() -> None:
    """Write the page."""
    PAGE.write_text(page(), encoding="utf-8")


def page() -> str:
    """The page as markdown."""
    return HEAD + "".join(
        _section(name, kind) for name, kind in _sections("", config.ExperimentConfig)
    )


def _sections(prefix: str, kind: type) -> Iterator[tuple[str, type]]:
    """A config and all that are nested in it, each with the dotted name before its fields."""
    yield prefix, kind
    for name, hint in get_type_hints(kind).items():
        inner = _nested(hint)
        if inner is not None:
            many = ".<name>" if get_origin(hint) is dict else ""
            yield from _sections(f"{prefix}{name}{many}.", inner)


def _nested(hint: Any) -> type | None:
    """The config that a field holds, or holds many of."""
    inner = next((arg for arg in get_args(hint) if dataclasses.is_dataclass(arg)), hint)
    return inner if dataclasses.is_dataclass(inner) else None


def _section(prefix: str, kind: type) -> str:
    title = f"`{prefix.rstrip('.')}`" if prefix else "The experiment itself"
    lines = [
        f"\n## {title}\n",
        " ".join((inspect.getdoc(kind) or "").split()) + "\n",
        "| field | value | default | what |",
        "| --- | --- | --- | --- |",
    ]
    hints, words = get_type_hints(kind), _words_of_all(kind)
    for member in dataclasses.fields(kind):
        heading = words.above.get(member.name)
        if heading:
            lines.append(f"| *{heading}* | | | |")
        said = words.beside.get(member.name, "")
        lines.append(f"| {' | '.join(_row(member, prefix, hints[member.name], said))} |")
    return "\n".join(lines) + "\n"


def _row(member: dataclasses.Field[Any], prefix: str, hint: Any, said: str) -> tuple[str, ...]:
    inner = _nested(hint)
    if inner is not None:
        many = ".<name>" if get_origin(hint) is dict else ""
        said = said or f"see `{prefix}{member.name}{many}`"
    kinds = [arg for arg in get_args(hint) or (hint,) if inspect.isclass(arg)]
    for choice in (kind for kind in kinds if issubclass(kind, Enum)):
        said = said or " ".join((inspect.getdoc(choice) or "").split()).rstrip(".")
        values = _words(choice).beside
        said += "".join(f"; `{name}`: {text}" for name, text in values.items())
    return f"`{member.name}`", _kind(hint), _default(member), said.replace("|", "\\|")


def _kind(hint: Any) -> str:
    if dataclasses.is_dataclass(hint):
        return "fields"
    if get_origin(hint) is list:
        return f"list of: {_kind(get_args(hint)[0])}"
    if get_origin(hint) is dict:
        return f"by name: {_kind(get_args(hint)[1])}"
    if get_args(hint):
        return ", ".join("`null`" if arg is NoneType else _kind(arg) for arg in get_args(hint))
    if inspect.isclass(hint) and issubclass(hint, Enum):
        return ", ".join(f"`{value.name}`" for value in hint)
    return WORDS[hint]


def _default(member: dataclasses.Field[Any]) -> str:
    if member.default_factory is not dataclasses.MISSING:
        made = member.default_factory()
        return f"`{made}`" if isinstance(made, list | dict) else ""
    value = member.default
    if value == MISSING:
        return "needed"
    if isinstance(value, Enum):
        return f"`{value.name}`"
    return f"`{value}`" if isinstance(value, str) and value else f"`{json.dumps(value)}`"


def _words_of_all(kind: type) -> Words:
    """The words of a config, with those of the configs that it extends."""
    words = Words({}, {})
    for base in reversed(inspect.getmro(kind)):
        if dataclasses.is_dataclass(base):
            own = _words(base)
            words.beside |= own.beside
            words.above |= own.above
    return words


def _words(kind: type) -> Words:
    source = inspect.getsource(kind)
    comments = {
        token.start[0]: (token.string.lstrip("# "), token.line.strip().startswith("#"))
        for token in tokenize.generate_tokens(io.StringIO(source).readline)
        if token.type == tokenize.COMMENT
    }
    words = Words({}, {})
    for node in ast.parse(source).body[0].body:  # type: ignore[attr-defined]
        if not isinstance(node, ast.Assign | ast.AnnAssign):
            continue
        target = node.target if isinstance(node, ast.AnnAssign) else node.targets[0]
        name = ast.unparse(target)
        text, alone = comments.get(node.end_lineno or node.lineno, ("", False))
        if text and not alone:
            words.beside[name] = text
        text, alone = comments.get(node.lineno - 1, ("", False))
        if alone:
            words.above[name] = text
    return words


if __name__ == "__main__":
    main()
