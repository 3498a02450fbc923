"""The calibration of a drafter's confidence head: a shift and a temperature for each position.

The confidence of position t is sigmoid((logit + shift_t) / T_t); the running product of the
confidences up to t is the probability that the whole draft up to t survives. `calibration.json` lies
beside a checkpoint's config.json. Only its key "temperatures" is needed, so a file that holds nothing
else, as SGLang reads and writes it, loads as well.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from dspark.errors import UserError
from dspark.files import write_text

FILE = "calibration.json"


@dataclass
class Curve:
    """Reliability of one position: a value for each bin of confidence that holds a block, ascending."""

    confidence: list[float]  # mean of the bin's running products
    observed: list[float]  # share of the bin's blocks that survived up to this position
    count: list[int]  # blocks in the bin


@dataclass
class Calibration:
    """Temperatures, and how far confidence was from the truth on blocks they were not fitted on.

    All lists have one entry for each position; what was not measured is empty.
    """

    temperatures: list[float]
    shifts: list[float] = field(default_factory=list)  # of logits; none: 0
    ece_before: list[float] = field(default_factory=list)  # all temperatures 1; a fraction, 0..1
    ece_after: list[float] = field(default_factory=list)
    blocks: int = 0  # measured blocks
    curves_before: list[Curve] = field(default_factory=list)
    curves_after: list[Curve] = field(default_factory=list)


def apply_temperatures(
    logits: Tensor, temperatures: Sequence[float], shifts: Sequence[float] = ()
) -> Tensor:
    """Confidence logits [..., k], shifted and divided as their position asks; k <= block_size."""
    k = logits.shape[-1]
    if shifts:
        logits = logits + logits.new_tensor(shifts[:k])
    return logits / logits.new_tensor(temperatures[:k])


def write_calibration(folder: str | Path, calibration: Calibration) -> None:
    """Write calibration.json into a checkpoint's directory.

    Raises:
        UserError: the file cannot be written.
    """
    text = json.dumps(asdict(calibration), indent=2, sort_keys=True, allow_nan=False) + "\n"
    write_text(Path(folder) / FILE, text)


def read_calibration(folder: str | Path, block_size: int | None = None) -> Calibration | None:
    """Read the calibration of a checkpoint; None when it has none.

    Keys that are not known here are left alone.

    Args:
        block_size: the drafter's; the file must hold as many temperatures. None takes any number.

    Raises:
        UserError: the file is broken, its temperatures are not positive numbers or not block_size
            of them, or its measurements do not belong to them.
    """
    file = Path(folder) / FILE
    try:
        raw = json.loads(file.read_text(encoding="utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        return None
    except (OSError, ValueError) as error:
        raise _broken(file, f"cannot be read ({error})") from error
    if not isinstance(raw, dict):
        raise _broken(file, "is not a JSON object")
    temperatures = _temperatures(file, raw.get("temperatures"))
    positions = len(temperatures)
    if block_size is not None and positions != block_size:
        raise _broken(
            file, f"holds {positions} temperatures and the drafter's block_size is {block_size}"
        )
    blocks = raw.get("blocks", 0)
    if type(blocks) is not int or blocks < 0:
        raise _broken(file, f"gives {blocks!r} as its number of blocks")
    return Calibration(
        temperatures=temperatures,
        shifts=_shifts(file, raw, positions),
        ece_before=_errors(file, raw, "ece_before", positions),
        ece_after=_errors(file, raw, "ece_after", positions),
        blocks=blocks,
        curves_before=_curves(file, raw, "curves_before", positions),
        curves_after=_curves(file, raw, "curves_after", positions),
    )


def _broken(file: Path, what: str) -> UserError:
    return UserError(f"calibration '{file}' {what}: calibrate the drafter again or delete the file")


def _number(value: Any) -> bool:
    """Whether a JSON value is a number that a float can hold; true and false are none."""
    return type(value) in (int, float) and abs(value) <= sys.float_info.max


def _temperatures(file: Path, values: Any) -> list[float]:
    if not isinstance(values, list) or not values:
        raise _broken(file, "holds no list of temperatures")
    for position, value in enumerate(values, start=1):
        if not (_number(value) and value > 0):
            raise _broken(
                file, f"gives {value!r} as temperature {position}, which is no positive number"
            )
    return [float(value) for value in values]


def _shifts(file: Path, raw: dict[str, Any], positions: int) -> list[float]:
    values = _one_a_position(file, raw, "shifts", positions)
    if not all(_number(value) for value in values):
        raise _broken(file, "holds a value in 'shifts' that is no number")
    return [float(value) for value in values]


def _errors(file: Path, raw: dict[str, Any], key: str, positions: int) -> list[float]:
    values = _one_a_position(file, raw, key, positions)
    if not all(_number(value) and 0 <= value <= 1 for value in values):
        raise _broken(file, f"holds a value in '{key}' that is no number from 0 to 1")
    return [float(value) for value in values]


def _curves(file: Path, raw: dict[str, Any], key: str, positions: int) -> list[Curve]:
    values = _one_a_position(file, raw, key, positions)
    try:
        curves = [Curve(**value) for value in values]
        whole = all(_whole(curve) for curve in curves)
    except TypeError:  # not an object, other keys, or no list in one
        whole = False
    if not whole:
        raise _broken(file, f"holds a malformed curve in '{key}'")
    return curves


def _whole(curve: Curve) -> bool:
    shares = [*curve.confidence, *curve.observed]
    return (
        len(curve.confidence) == len(curve.observed) == len(curve.count) > 0
        and all(_number(value) and 0 <= value <= 1 for value in shares)
        and all(type(value) is int and value > 0 for value in curve.count)
    )


def _one_a_position(file: Path, raw: dict[str, Any], key: str, positions: int) -> list[Any]:
    values = raw.get(key, [])
    if not isinstance(values, list) or len(values) not in (0, positions):
        raise _broken(file, f"holds no list of {positions} entries in '{key}'")
    return values
