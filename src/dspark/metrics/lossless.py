"""Whether an arm's outputs are the baseline's, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from dspark.decode.records import RequestRecord
from dspark.errors import UserError
from dspark.metrics.pairing import paired

# Two logits that are this close may change places with the order of a sum: a tie, not an error.
TIE_MARGIN = 1e-4


@dataclass
class Difference:
    """The first position at which one request's outputs differ.

    A token is None where that output had already ended. `margin` is the target's gap between its
    two best logits at that position; the comparison cannot know it. `inherited` marks a later turn
    that was asked with the model's own earlier answer, after that answer had differed: its prompt
    was another one, so its difference says nothing of its own.
    """

    request_id: str
    position: int  # index into the output tokens
    baseline_token: int | None
    arm_token: int | None
    margin: float | None = None
    inherited: bool = False


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """Index of the first token that differs, or None when both are the same.

    Where one is the beginning of the other, that is the shorter one's length.
    """
    for index, (x, y) in enumerate(zip(a, b, strict=False)):
        if x != y:
            return index
    return None if len(a) == len(b) else min(len(a), len(b))


def compare_arms(
    baseline_records: Sequence[RequestRecord],
    arm_records: Sequence[RequestRecord],
    model_history: bool = False,
) -> list[Difference]:
    """The requests whose output token ids differ, in the baseline's order, with margins unset.

    Args:
        baseline_records: the baseline's records of one dataset.
        arm_records: the arm's records of the same requests.
        model_history: later turns were asked with the model's own earlier answers.

    Raises:
        UserError: the two arms hold different requests.
    """
    pairs = sorted(paired(baseline_records, arm_records), key=lambda pair: pair[0].turn)
    first_turn_that_differs: dict[str, int] = {}
    found: dict[str, Difference] = {}
    for base, arm in pairs:
        position = first_difference(base.output_token_ids, arm.output_token_ids)
        if position is None:
            continue
        earlier = first_turn_that_differs.setdefault(base.prompt_id, base.turn)
        found[base.request_id] = Difference(
            request_id=base.request_id,
            position=position,
            baseline_token=_token(base, position),
            arm_token=_token(arm, position),
            inherited=model_history and earlier < base.turn,
        )
    return [found[r.request_id] for r in baseline_records if r.request_id in found]


def _token(record: RequestRecord, position: int) -> int | None:
    ids = record.output_token_ids
    return ids[position] if position < len(ids) else None


def judge(
    differences: Sequence[Difference],
    compared: int,
    precision: str,
    tie: float = TIE_MARGIN,
    temperature: float = 0.0,
) -> dict[str, Any]:
    """Say what the differences of `compared` requests amount to.

    Returns:
        `precision`, `temperature`, `compared`, `identical`, `ties` (differences whose margin is at
        most `tie`), `inherited`, `differences` (as dicts), `max_margin` (the largest known margin
        or None) and `verdict`: "identical"; "ties" when every difference is a tie or inherited from
        one; "differs" otherwise, an unknown margin included; "sampled" at a temperature above 0,
        where outputs agree in distribution only and nothing is compared.
    """
    if temperature > 0:
        differences, compared = [], 0
    own = [d for d in differences if not d.inherited]
    ties = [d for d in own if d.margin is not None and d.margin <= tie]
    if temperature > 0:
        verdict = "sampled"
    elif not differences:
        verdict = "identical"
    else:
        verdict = "ties" if len(ties) == len(own) else "differs"
    return {
        "precision": precision,
        "temperature": temperature,
        "compared": compared,
        "identical": compared - len(differences),
        "ties": len(ties),
        "inherited": len(differences) - len(own),
        "differences": [asdict(d) for d in differences],
        "max_margin": max((d.margin for d in own if d.margin is not None), default=None),
        "verdict": verdict,
    }


def require_lossless(verdict: dict[str, Any], dataset: str, run: str) -> None:
    """Fail a float32 cell whose outputs differ by more than ties; `verdict` comes from `judge`.

    In bfloat16 the logits themselves depend on how many tokens a pass holds, so differences are
    reported and not refused.

    Raises:
        UserError: float32 and the verdict is "differs".
    """
    if verdict["precision"] != "float32" or verdict["verdict"] != "differs":
        return
    own = [d for d in verdict["differences"] if not d["inherited"]]
    # An unknown margin counts as the worst.
    worst = max(own, key=lambda d: float("inf") if d["margin"] is None else d["margin"])
    margin = "unknown" if worst["margin"] is None else f"{worst['margin']:.3g}"
    raise UserError(
        f"cell {dataset}/{run}: output differs from the baseline's in "
        f"{len(own) - verdict['ties']} of {verdict['compared']} requests, worst in "
        f"'{worst['request_id']}' at token {worst['position']} (baseline "
        f"{worst['baseline_token']}, arm {worst['arm_token']}, logit margin {margin}): "
        "in float32 only ties may differ, so this arm is not lossless"
    )
