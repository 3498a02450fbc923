"""The blocks of a report, parted by blank lines: tables, and lists of what stands below them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from dspark.config import point_name

Options = tuple[tuple[str, str], ...]  # what a sweep set at one of its points: option, value


def blocks_of(report: str) -> list[list[str]]:
    """The lines of each block."""
    return [block.split("\n") for block in report.strip("\n").split("\n\n")]


def is_grid(block: list[str]) -> bool:
    """Whether a block is a table; else it is a list."""
    return block[0].startswith("|")


def cells_of(line: str) -> list[str]:
    """The cells of a table's line. No cell holds a bar: the table's names are checked for it."""
    return line.removeprefix("| ").removesuffix(" |").split(" | ")


def swept(reports: Mapping[Options, str]) -> str:
    """The reports of a sweep's points as one: its tables get a column for each swept option.

    A line of a list that not all points have is preceded by the points that have it.
    """
    grids: dict[str, list[str]] = {}
    lists: dict[str, dict[str, list[Options]]] = {}
    order: dict[str, None] = {}
    for options, report in reports.items():
        place = ""
        for block in blocks_of(report):
            if is_grid(block):
                header, rule, *rows = block
                place = _with((name for name, _ in options), header)
                order[place] = None
                grid = grids.setdefault(place, [place, _with(("---" for _ in options), rule)])
                grid += [_with((value for _, value in options), row) for row in rows]
            else:
                order[f"below {place}"] = None
                found = lists.setdefault(f"below {place}", {})
                for line in block:
                    found.setdefault(line, []).append(options)
    blocks = [grids[key] if key in grids else _lines(lists[key], len(reports)) for key in order]
    return "\n\n".join("\n".join(block) for block in blocks) + "\n"


def _with(first: Iterable[str], row: str) -> str:
    return f"| {' | '.join(first)} {row}"


def _lines(found: Mapping[str, Sequence[Options]], points: int) -> list[str]:
    return [
        line
        if len(having) == points
        else f"- {' and '.join(point_name(dict(options)) for options in having)}: {line[2:]}"
        for line, having in found.items()
    ]
