"""What may be set against a baseline: its requests one by one, and cells that were measured alike."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from dspark.decode.records import RequestRecord
from dspark.errors import UserError
from dspark.metrics.cell import BASELINE, CellSummary

# Settings of a summary that decide no number of an arm: the digest covers the other arms too, a
# card is known by its model, and step curves are read by scheduled arms alone.
NO_CONDITIONS = ("config_digest", "device_uuid", "step_curves")


@dataclass(frozen=True)
class Mismatch:
    """A condition in which a cell and its baseline differ; None stands for one that is not stated."""

    field: str
    cell: Any
    baseline: Any

    def __str__(self) -> str:
        return f"{self.field} {_shown(self.cell)} against {_shown(self.baseline)}"


def _shown(value: Any) -> str:
    if value is None:
        return "unknown"
    if isinstance(value, float):
        return f"{value:.6g}"
    return json.dumps(value, ensure_ascii=False, sort_keys=True)


def mismatches(summaries: Sequence[CellSummary]) -> dict[tuple[str, str], tuple[Mismatch, ...]]:
    """By dataset and run, every condition in which a cell was measured otherwise than its baseline.

    Cells that were measured alike are not in it, so a speedup means something exactly where nothing
    is found. A speedup that was taken against another baseline's tok/s is a mismatch too: the arms
    did not take turns in one job.

    Raises:
        UserError: a dataset has no baseline.
    """
    baselines = {cell.dataset: cell for cell in summaries if cell.run == BASELINE}
    found = {}
    for cell in summaries:
        if cell.dataset not in baselines:
            raise UserError(
                f"dataset '{cell.dataset}' has no {BASELINE} summary: every speedup is relative to "
                f"it, add the summary of {cell.dataset}/{BASELINE}"
            )
        differing = tuple(_compare(cell, baselines[cell.dataset]))
        if differing:
            found[cell.dataset, cell.run] = differing
    return found


def differing_conditions(cell: CellSummary, baseline: CellSummary) -> Iterator[Mismatch]:
    """All that was otherwise when a cell was measured than when its baseline was, by name."""
    ours, theirs = _conditions(cell), _conditions(baseline)
    for name in sorted(ours.keys() | theirs.keys()):
        if ours.get(name) != theirs.get(name):
            yield Mismatch(name, ours.get(name), theirs.get(name))


def _compare(cell: CellSummary, baseline: CellSummary) -> Iterator[Mismatch]:
    yield from differing_conditions(cell, baseline)
    if cell.run != BASELINE and cell.speedup > 0:
        own_baseline = cell.output_tok_s / cell.speedup
        if not math.isclose(own_baseline, baseline.output_tok_s, rel_tol=1e-9):
            yield Mismatch("baseline_tok_s", own_baseline, baseline.output_tok_s)


def _conditions(cell: CellSummary) -> dict[str, Any]:
    """All that a cell states and that decides its numbers, by the name of the field.

    A setting counts unless it is known not to, so that none is forgotten here when it is added.
    """
    settings = {name: cell.settings[name] for name in cell.settings if name not in NO_CONDITIONS}
    versions: Mapping[str, Any] = settings.pop("versions", {})
    return {
        "requests": cell.requests,
        "devices": cell.devices,
        "concurrency": cell.concurrency,
        "precision": cell.precision,
        **settings,
        **versions,
    }


def paired(
    baseline: Sequence[RequestRecord], arm: Sequence[RequestRecord]
) -> list[tuple[RequestRecord, RequestRecord]]:
    """Each baseline record with the arm's record of the same request, in the baseline's order.

    Raises:
        UserError: an arm holds a request twice, or the two arms hold different requests.
    """
    wanted, found = _by_request(baseline), _by_request(arm)
    alone = sorted(wanted.keys() ^ found.keys())
    if alone:
        name = f"{(baseline or arm)[0].dataset}/{(arm or baseline)[0].run}"
        raise UserError(
            f"cell {name}: request '{alone[0]}' is in only one of the arm and the baseline "
            f"({len(alone)} such requests): measure both arms on the same prompts"
        )
    return [(record, found[request]) for request, record in wanted.items()]


def _by_request(records: Sequence[RequestRecord]) -> dict[str, RequestRecord]:
    by_id = {record.request_id: record for record in records}
    if len(by_id) < len(records):
        seen: set[str] = set()
        for record in records:
            if record.request_id in seen:
                raise UserError(
                    f"cell {record.dataset}/{record.run}: request '{record.request_id}' is "
                    "recorded twice: prompt ids must be unique and each request measured once"
                )
            seen.add(record.request_id)
    return by_id
