"""The course of a training run: one JSON line a step or validation, as MLflow gets it later."""

from __future__ import annotations

import json
from pathlib import Path

from dspark.files import write_text


class Curve:
    """Appends to curve.jsonl. Lines of steps after `step` are removed: they will be done again."""

    def __init__(self, path: Path, step: int) -> None:
        self.path = path
        kept = [line for line in read_curve(path) if line["step"] <= step] if step else []
        write_text(path, "".join(json.dumps(line) + "\n" for line in kept))

    def add(self, step: int, **values: float) -> None:
        """Note values of one step, flushed at once."""
        with self.path.open("a") as handle:
            handle.write(json.dumps({"step": step, **values}) + "\n")


def read_curve(path: Path) -> list[dict[str, float]]:
    """All whole lines; none when there is no file. A kill can have cut the last one short."""
    if not path.exists():
        return []
    text = path.read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]
