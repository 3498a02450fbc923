"""Read a finished training from its folder: what MLflow shows of it. Knows nothing of MLflow."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from dspark.config import ModelsConfig, from_yaml
from dspark.errors import UserError
from dspark.tracking.points import Point
from dspark.train.curve import read_curve

CONFIG = "config.yaml"
CURVE = "curve.jsonl"
KEPT = ("drafter/calibration.json", "reliability.png", CONFIG, CURVE)

# Names on the curve that say too little beside a cell's metrics; the others stay as they are.
NAMES = {
    "ce": "loss_ce",  # nats
    "l1": "loss_l1",
    "confidence": "loss_confidence",  # nats
    "tokens_per_s": "train_tok_s",
}


@dataclass(frozen=True)
class Training:
    """One drafter's training."""

    folder: str  # its folder's name, which tells it from other trainings
    drafter: str
    params: dict[str, str]  # the settings, flattened
    points: tuple[Point, ...]  # by step
    files: tuple[Path, ...]
    digest: str  # of the files

    @property
    def name(self) -> str:
        return f"train/{self.drafter}"


def read_training(folder: Path) -> Training:
    """Read what `dspark train` left in `folder`.

    Raises:
        UserError: the training is not finished, or a file of it is malformed.
    """
    files = tuple(folder / name for name in KEPT)
    digests = [hashlib.sha256(_read(path)).hexdigest() for path in files]
    models: ModelsConfig = from_yaml(ModelsConfig, folder / CONFIG)
    tree: Any = OmegaConf.to_container(OmegaConf.structured(models), enum_to_str=True)
    return Training(
        folder=folder.resolve().name,
        drafter=models.drafter.name,
        params=dict(_flat_params(tree)),
        points=tuple(_points(folder / CURVE)),
        files=files,
        digest=hashlib.sha256("".join(digests).encode()).hexdigest(),
    )


def _flat_params(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Flatten to dotted keys; values as in the YAML files, so that they serve as overrides."""
    for key, value in sorted(tree.items()):
        if isinstance(value, dict):
            yield from _flat_params(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


def _points(path: Path) -> list[Point]:
    try:
        return [
            Point(int(line["step"]), NAMES.get(name, name), float(value))
            for line in read_curve(path)
            for name, value in line.items()
            if name != "step"
        ]
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise UserError(f"'{path}' is not a training's curve ({error!r}): train again") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise UserError(
            f"cannot read '{path}' ({error.strerror}): finish the training (`dspark train`) before "
            "it is tracked"
        ) from error
