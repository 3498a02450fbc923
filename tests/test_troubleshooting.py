"""docs/troubleshooting.md tells of messages that there are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
ROWS = [line for line in PAGE.splitlines() if line.startswith("| `")]
MESSAGES = [re.findall(r"^\| `(.*?)` \|", row)[0] for row in ROWS]


def texts(tree: ast.AST) -> Iterator[str]:
    """All texts of a module; a value inside one is a NUL."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else "\0" for part in node.values]
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


@pytest.fixture(scope="module")
def said() -> list[str]:
    files = (ROOT / "src" / "dspark").rglob("*.py")
    return [text for file in files for text in texts(ast.parse(file.read_text()))]


def occurs(message: str, said: list[str]) -> bool:
    """Whether the program says what of a message is fixed, in this order."""
    pattern = re.compile(".*".join(map(re.escape, message.split("…"))), re.S)
    return any(pattern.search(text) for text in said)


@pytest.mark.parametrize("message", MESSAGES)
def test_a_message_of_the_page_is_one_of_the_programs(message: str, said: list[str]) -> None:
    fixed = sum(len(part) for part in message.split("…"))
    assert fixed >= 12, "too little of it is fixed to be told from others"
    assert occurs(message, said)


def test_a_message_that_is_no_more_would_be_noticed(said: list[str]) -> None:
    assert occurs("model '…': '…' has changed since it was prepared", said)
    assert not occurs("model '…': '…' has changed since it was measured", said)
    assert not occurs("has changed since it was prepared: model '…'", said)


def test_every_row_says_when_and_what_to_do() -> None:
    assert len(ROWS) > 50
    for row in ROWS:
        message, when, remedy = (cell.strip() for cell in row.strip("|").split(" | "))
        assert message and when and remedy, row
    assert len(set(MESSAGES)) == len(MESSAGES)
