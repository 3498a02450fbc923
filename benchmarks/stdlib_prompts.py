"""Prompts that ask for the body of a function of Python's standard library: signature and docstring.

Made for training a drafter on code that no benchmark holds; each is one of a few requests of ours.

    python benchmarks/stdlib_prompts.py --out stdlib.jsonl --limit 1000
    dspark train --out results/training/mine 'drafter.train.prompt_files=[stdlib.jsonl]'
"""

from __future__ import annotations

import ast
import json
import random
import re
import sysconfig
import textwrap
from collections.abc import Iterator
from pathlib import Path

import click

REQUESTS = (
    "Complete this Python function. Its docstring says what it must do.\n```python\n{}\n```",
    "Here is the beginning of a Python function. Please finish it.\n```python\n{}\n```",
    "Write the body of this function so that it does what its docstring says.\n```python\n{}\n```",
    "Implement the following function:\n```python\n{}\n```",
    "Solve this programming problem; your code has to pass the given examples.\n```python\n{}\n\n```",
    "Write a solution to this task that passes its tests:\n```python\n{}\n\n```",
)
NOT_LIBRARY = (
    "site-packages",
    "dist-packages",
    "test",
    "idlelib",
    "lib2to3/tests",
    "turtledemo",
    "ensurepip",
)


def functions(root: Path) -> Iterator[tuple[str, str]]:
    """Name and stub of every documented function below `root`, without `self` and decorators."""
    for file in sorted(root.rglob("*.py")):
        name = str(file.relative_to(root))
        if name.startswith(NOT_LIBRARY) or "/test" in name:
            continue
        try:
            tree = ast.parse(file.read_text())
        except (SyntaxError, UnicodeDecodeError):
            continue
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and not node.decorator_list:
                text = ast.get_docstring(node) or ""
                if 40 <= len(text) <= 700 and len(text.split()) >= 8:
                    yield node.name.strip("_"), stub(node, text)


def stub(node: ast.FunctionDef, text: str) -> str:
    """The function's first line and its docstring."""
    arguments = re.sub(r"^self(, )?", "", ast.unparse(node.args))
    returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    end = '\n"""' if "\n" in text else '"""'
    body = textwrap.indent(f'"""{text}{end}', "    ")
    return f"def {node.name.strip('_')}({arguments}){returns}:\n{body}"


@click.command()
@click.option("--out", type=click.Path(path_type=Path, dir_okay=False), required=True)
@click.option("--limit", type=click.IntRange(1), help="Prompts to write; all without it.")
@click.option("--seed", default=0, help="Of their order.")
def main(out: Path, limit: int | None, seed: int) -> None:
    """Write prompts.jsonl from the standard library of the Python that runs this."""
    stubs: dict[str, str] = {}
    for name, text in functions(Path(sysconfig.get_paths()["stdlib"])):
        stubs.setdefault(name, text)
    names = sorted(stubs)
    random.Random(seed).shuffle(names)
    with out.open("w") as handle:
        for index, name in enumerate(names[:limit]):
            request = REQUESTS[index % len(REQUESTS)].format(stubs[name])
            handle.write(json.dumps({"id": f"stdlib/{name}", "turns": [request]}) + "\n")


if __name__ == "__main__":
    main()
