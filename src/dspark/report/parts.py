"""The profile of two arms as text: where a step's time goes, and what it could be at best."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from dspark.report.table import markdown


@dataclass(frozen=True)
class ArmParts:
    """What `dspark profile` measured of one run."""

    run: str
    seconds: Mapping[str, float]  # of each part, over the whole measurement
    steps: int
    step_ms: float  # a step at full concurrency, without a prefill
    accept_len: float | None
    bytes_read: int  # that a step must read at least


def render_parts(baseline: ArmParts, arm: ArmParts, bandwidth: float, order: Sequence[str]) -> str:
    """A table of the parts of both runs, and the limits below it.

    Args:
        bandwidth: bytes a second at which the device reads.
        order: the parts, in the order of the lines.
    """
    arms = (baseline, arm)
    header = ["part", *(f"{one.run}, {unit}" for one in arms for unit in ("ms a step", "share"))]
    body = [
        [part, *(cell for one in arms for cell in _cells(one, part))]
        for part in order
        if any(part in one.seconds for one in arms)
    ]
    lines = [markdown(header, body), ""]
    for one in arms:
        least = 1000 * one.bytes_read / bandwidth
        lines.append(
            f"{one.run}: a step takes {one.step_ms:.2f} ms; to read its {one.bytes_read / 1e6:.0f} MB "
            f"takes {least:.2f} ms at the {bandwidth / 1e9:.1f} GB/s of this device "
            f"({least / one.step_ms:.0%} of the step)"
        )
    lines.append(
        f"break-even accept length: {arm.step_ms / baseline.step_ms:.3f}"
        + ("" if arm.accept_len is None else f"; measured: {arm.accept_len:.3f}")
    )
    return "\n".join(lines)


def _cells(arm: ArmParts, part: str) -> tuple[str, str]:
    if part not in arm.seconds:
        return "—", "—"
    seconds = arm.seconds[part]
    return f"{1000 * seconds / arm.steps:.2f}", f"{seconds / sum(arm.seconds.values()):.1%}"
