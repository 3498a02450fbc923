"""What the shell may complete: experiments, their datasets and fields, profiles, stages, formats.

Whatever is wrong, completion offers nothing; the command itself will say what it is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from dspark.errors import UserError

CONFIG = Path("config")
PROFILES = Path("profiles")
# Names that their modules know, which load too much to be asked: train/chain.py, report/export.py,
# models/checkpoint.py.
STAGES = ("synthesise", "cache", "fit", "calibrate")
TABLE_FORMATS = ("markdown", "csv", "json", "latex", "html", "model-card")
CHECKPOINT_FORMATS = ("native", "speculators")

Completer = Callable[[click.Context, click.Parameter, str], list[str]]


def _completer(names: Callable[[click.Context], list[str]]) -> Completer:
    """What click asks: those of `names` that begin with what has been typed."""

    def complete(context: click.Context, _parameter: click.Parameter, typed: str) -> list[str]:
        try:
            return [name for name in names(context) if name.startswith(typed)]
        except UserError:
            return []

    return complete


def _experiments(_context: click.Context) -> list[str]:
    return sorted(path.stem for path in (CONFIG / "experiment").glob("*.yaml"))


def _profiles(_context: click.Context) -> list[str]:
    return sorted(str(path) for path in PROFILES.glob("*") if path.is_dir())


def _datasets(context: click.Context) -> list[str]:
    return list(_composed(context).datasets)


def _overrides(context: click.Context) -> list[str]:
    return [f"{name}=" for name in _leaves(asdict(_composed(context)))]


def _training_overrides(_context: click.Context) -> list[str]:
    from dspark.config import compose_training

    return [f"{name}=" for name in _leaves(asdict(compose_training()))]


def _composed(context: click.Context) -> Any:
    """The experiment that has been typed before."""
    from dspark.config import compose_experiment

    # Click leaves arguments unparsed when an option, the one to be completed, still lacks its value.
    return compose_experiment([*context.args, context.params.get("experiment") or "demo"][0])


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[str]:
    """Dotted names of all fields that hold no further ones."""
    for name, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


complete_experiment = _completer(_experiments)
complete_dataset = _completer(_datasets)
complete_override = _completer(_overrides)
complete_training_override = _completer(_training_overrides)
complete_profile = _completer(_profiles)
complete_stage = _completer(lambda _context: list(STAGES))
complete_table_format = _completer(lambda _context: list(TABLE_FORMATS))
complete_checkpoint_format = _completer(lambda _context: list(CHECKPOINT_FORMATS))
