"""Pairing the requests of two arms by what was asked."""

from __future__ import annotations

from collections.abc import Sequence

from dspark.decode.records import RequestRecord
from dspark.errors import UserError


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
