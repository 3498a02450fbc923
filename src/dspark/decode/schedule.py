"""Which draft tokens are worth verifying on this device (arXiv 2607.05147, Algorithm 1).

A draft token is worth its place in the target's pass when it raises the expected tokens a second:
tau * SPS(B), where B counts the tokens of the pass, tau the tokens expected to come out of it, and
SPS(B) the steps a second that the engine makes at B tokens, measured beforehand. R rows, k drafted.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, TypeVar, overload

import torch
from scipy.optimize import isotonic_regression
from torch import Tensor

from dspark.errors import UserError
from dspark.files import write_text

Kind = TypeVar("Kind", int, tuple[int, ...])


@dataclass(frozen=True)
class StepCurve:
    """Seconds of one whole engine step against the number of tokens in the target's pass.

    Raises:
        UserError: no points, columns of unequal lengths, token counts that do not ascend from at
            least 1, a time that is not positive and finite, or fitted times that fall.
    """

    tokens: list[int]  # P numbers of tokens, ascending
    seconds: list[float]  # as measured, medians
    fitted: list[float]  # seconds made non-decreasing: what is used
    plain: StepCurve | None = None  # the same steps without a draft, by their rows
    _tables: dict[torch.device, Tensor] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def __post_init__(self) -> None:
        _check(self.tokens, self.seconds)
        _check(self.tokens, self.fitted)
        if any(left > right for left, right in pairwise(self.fitted)):
            raise UserError("the fitted times of a step curve fall: fit it with fit_curve")

    @overload
    def steps_per_second(self, tokens: int) -> float: ...
    @overload
    def steps_per_second(self, tokens: Tensor) -> Tensor: ...
    def steps_per_second(self, tokens: int | Tensor) -> float | Tensor:
        """Steps a second at `tokens` tokens (an int, or integers of any shape and device).

        The fitted seconds are interpolated linearly. Below the first point they are the first
        point's; above the last they go on with the slope of the last segment (flat when there is
        one point alone).

        Returns:
            a float, or float64 of the same shape on the same device.
        """
        if isinstance(tokens, int):
            return float(self.steps_per_second(torch.tensor([tokens])))
        points, fitted, slopes = self._table(tokens.device)
        at = tokens.double().clamp_min(self.tokens[0])
        left = torch.searchsorted(points, at, right=True) - 1
        return 1 / (fitted[left] + (at - points[left]) * slopes[left])

    def points(self) -> dict[str, Any]:
        """Its columns, for a file."""
        columns = {"tokens": self.tokens, "seconds": self.seconds, "fitted": self.fitted}
        return {**columns, "plain": None if self.plain is None else self.plain.points()}

    @classmethod
    def of_points(cls, points: dict[str, Any]) -> StepCurve:
        """The curve of such columns.

        Raises:
            KeyError, TypeError: a column is missing or no column.
            UserError: as the class.
        """
        plain = points["plain"]
        return cls(
            points["tokens"],
            points["seconds"],
            points["fitted"],
            None if plain is None else cls.of_points(plain),
        )

    def _table(self, device: torch.device) -> Tensor:
        """[3, P] float64: token counts, fitted seconds, the slope from each point on."""
        # Kept for each device: to copy it in every step would make the host wait for the device.
        if device not in self._tables:
            points = list(zip(self.tokens, self.fitted, strict=True))
            slopes = [(t1 - t0) / (n1 - n0) for (n0, t0), (n1, t1) in pairwise(points)]
            slopes.append(slopes[-1] if slopes else 0.0)
            self._tables[device] = torch.tensor(
                [self.tokens, self.fitted, slopes], dtype=torch.float64, device=device
            )
        return self._tables[device]


def _check(tokens: Sequence[int], seconds: Sequence[float]) -> None:
    if not tokens:
        raise UserError("a step curve has no points: measure at least one number of tokens")
    if len(tokens) != len(seconds):
        raise UserError(
            f"a step curve has {len(tokens)} token counts but {len(seconds)} times: "
            "give one time for each count"
        )
    if tokens[0] < 1 or any(left >= right for left, right in pairwise(tokens)):
        raise UserError(
            f"the token counts of a step curve are {list(tokens)}: "
            "give each once, ascending, from 1 at least"
        )
    for count, value in zip(tokens, seconds, strict=True):
        if not (math.isfinite(value) and value > 0):
            raise UserError(
                f"a step of {count} tokens took {value} s: measure a positive, finite time"
            )


def measure_steps(
    time_step: Callable[[Kind], float], kinds: Iterable[Kind], rounds: int = 5
) -> dict[Kind, float]:
    """Time several kinds of steps, in rounds over all kinds, so that drift hits all alike.

    Args:
        time_step: runs one step of a kind and returns its seconds.
        kinds: what tells steps apart, in any order.
        rounds: how often each kind is timed.

    Returns:
        the median seconds of each kind, ascending by kind.

    Raises:
        UserError: rounds is less than 1.
    """
    if rounds < 1:
        raise UserError(f"rounds is {rounds}: time each step size at least once")
    times: dict[Kind, list[float]] = {kind: [] for kind in sorted(set(kinds))}
    for _ in range(rounds):
        for kind, taken in times.items():
            taken.append(time_step(kind))
    return {kind: median(taken) for kind, taken in times.items()}


def fit_curve(
    tokens: Sequence[int], seconds: Sequence[float], plain: StepCurve | None = None
) -> StepCurve:
    """A step curve through measured medians, made non-decreasing by isotonic regression.

    More tokens never take less time; where a measurement says so it is noise, and the neighbours
    that disagree get their mean.

    Raises:
        UserError: as StepCurve does.
    """
    _check(tokens, seconds)
    measured = [float(value) for value in seconds]
    fitted = measured
    if any(left > right for left, right in pairwise(measured)):
        fitted = isotonic_regression(measured).x.tolist()
    return StepCurve(list(tokens), measured, fitted, plain)


def write_curve(path: str | Path, curve: StepCurve, identity: dict[str, Any]) -> None:
    """Store a curve with what it was measured on: `identity`, anything that JSON can hold.

    Raises:
        UserError: the file cannot be written.
    """
    content = {"identity": identity, **curve.points()}
    write_text(path, json.dumps(content, indent=2, sort_keys=True, allow_nan=False) + "\n")


def read_curve(path: str | Path, identity: dict[str, Any]) -> StepCurve | None:
    """The curve stored at `path`; None when there is none, it is broken, or its identity differs.

    Each of these has the same remedy, to measure it again, so none is an error.
    """
    wanted = json.loads(json.dumps(identity))  # as it looks after a round trip: tuples are lists
    try:
        stored = json.loads(Path(path).read_text(encoding="utf-8"))
        if stored["identity"] != wanted:
            return None
        return StepCurve.of_points(stored)
    except (OSError, ValueError, TypeError, KeyError, UserError):
        return None


def schedule(confidence: Tensor, curve: StepCurve) -> Tensor:
    """How many leading draft tokens of each row to verify: int64 [R], each 0..k.

    Candidates are admitted by falling survival (the product of a row's confidences so far) for as
    long as tau * SPS(B) grows, and the first that does not raise it ends the search, though a later
    one might. That keeps the output distribution the target's: a token's fate is settled before
    anything that depends on it is read. The best B of all would be read off later tokens too.

    Args:
        confidence: calibrated probabilities [R, k] that a draft token is accepted given that those
            before it are.
        curve: how fast the engine steps. The result stays on confidence's device; nothing waits.
    """
    rows, width = confidence.shape
    # A parallel product may round a longer prefix up above a shorter one; cummin takes that back.
    survival = confidence.double().cumprod(-1).cummin(-1).values
    # Position-major, and stable: of equals the earlier position goes first, then the earlier row.
    # So nothing overtakes its own predecessor, and what is admitted of a row is a prefix.
    ranked, order = survival.T.flatten().sort(descending=True, stable=True)
    expected = torch.cat([ranked.new_full((1,), rows), ranked]).cumsum(0)
    tokens = torch.arange(rows, rows * (width + 1) + 1, device=confidence.device)
    rate = expected * curve.steps_per_second(tokens)
    # A parallel sum may round a step of nothing up, so a hopeless token is shut out by name.
    pays = (rate[1:] > rate[:-1]) & (ranked > 0)
    admitted = pays.long().cumprod(0)
    return torch.empty_like(admitted).scatter_(0, order, admitted).view(width, rows).sum(0)
