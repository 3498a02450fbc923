"""The identities that request records, cell summaries and table rows must pass.

A printed cell stands for the interval of values that round to it (half a unit of its last digit to
each side), so a check on rows asks whether *some* values inside the intervals satisfy the identity.
A check on summaries, which are unrounded, is exact up to floating point.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from statistics import fmean
from typing import NoReturn

from dspark.decode.records import RequestRecord
from dspark.errors import UserError
from dspark.metrics.cell import BASELINE, CellSummary, DeviceSummary
from dspark.metrics.pairing import differing_conditions
from dspark.metrics.rows import (
    LENGTH_DIGITS,
    PERCENT_DIGITS,
    SPEEDUP_DIGITS,
    TOK_S_DIGITS,
    TableRow,
)
from dspark.metrics.timing import itl_s, latency_s, tpot_s, ttft_s

# Half a unit of the last printed digit of each kind of cell.
_TOK_S = 0.5 * 10**-TOK_S_DIGITS
_SPEEDUP = 0.5 * 10**-SPEEDUP_DIGITS
_RATE = 0.5 * 10 ** -(PERCENT_DIGITS + 2)
_LENGTH = 0.5 * 10**-LENGTH_DIGITS
# What floating point may add to a comparison.
_FLOAT = 1e-9

# Share of a slot's time that the host may spend between one request's end and the next one's
# submit; the bound is loose because a tiny model's steps take no longer than the host's own work.
_HOST_SHARE = 0.1
# Clock reads may put the requests in flight this far above the concurrency.
_LITTLE_SLACK = 0.002


def _fail(dataset: str, run: str, identity: str, left: float, right: object) -> NoReturn:
    shown = right if isinstance(right, str) else f"{right:.6g}"
    raise UserError(
        f"cell {dataset}/{run}: identity '{identity}' fails: {left:.6g} against {shown}; "
        "these numbers do not come from one measurement, measure the dataset again"
    )


# --------------------------------------------------------------------------- printed rows


def check_rows(rows: Sequence[TableRow]) -> None:
    """Check every identity that printed rows can be held to.

    - speedup = tok/s / baseline's tok/s on the same dataset;
    - p1 >= p2 >= p3;
    - fixed k: accept_len = 1 + k * accept_rate; else, as at most k are verified,
      accept_len <= 1 + k * accept_rate;
    - k <= 3: accept_len = 1 + p1 + .. + pk;
    - k > 3: p1 + p2 + p3 <= accepted a step <= p1 + p2 + p3 + (k - 3) * p3, since the later
      positions are accepted at most as often as the third; accepted a step is accept_len - 1, and
      k * accept_rate at a fixed k.

    Raises:
        UserError: an identity fails (dataset, run, identity and both values are named), a dataset
            has no baseline row, or a cell stands in the table twice.
    """
    baselines = {row.dataset: row for row in rows if row.run == BASELINE}
    seen: set[tuple[str, str]] = set()
    for row in rows:
        if (row.dataset, row.run) in seen:
            raise UserError(f"cell {row.dataset}/{row.run} stands in the table twice")
        seen.add((row.dataset, row.run))
        if row.dataset not in baselines:
            raise UserError(
                f"dataset '{row.dataset}' has no {BASELINE} row: its speedups have no meaning"
            )
        _check_speedup(row, baselines[row.dataset])
        _check_positions_fall(row)
        _check_accept_len_and_rate(row)
        _check_accept_len_and_positions(row)


def _check_speedup(row: TableRow, baseline: TableRow) -> None:
    identity = "speedup = tok/s / baseline's tok/s"
    if row.run == BASELINE:
        low = high = 1.0
    else:
        low = (row.output_tok_s - _TOK_S) / (baseline.output_tok_s + _TOK_S)
        smallest = baseline.output_tok_s - _TOK_S
        high = (row.output_tok_s + _TOK_S) / smallest if smallest > 0 else math.inf
    if not low - _SPEEDUP - _FLOAT <= row.speedup <= high + _SPEEDUP + _FLOAT:
        _fail(row.dataset, row.run, identity, row.speedup, f"[{low:.6g}, {high:.6g}]")


def _check_positions_fall(row: TableRow) -> None:
    # Rounding keeps the order, so there is nothing to allow for.
    positions = [p for p in row.accept_p if p is not None]
    for index, (earlier, later) in enumerate(pairwise(positions), start=1):
        if later > earlier:
            _fail(row.dataset, row.run, f"p{index} >= p{index + 1}", earlier, later)


def _check_accept_len_and_rate(row: TableRow) -> None:
    if row.k is None or row.accept_len is None or row.accept_rate is None:
        return
    expected = 1 + row.k * row.accept_rate
    allowed = _LENGTH + row.k * _RATE + _FLOAT
    if row.accept_len > expected + allowed or (row.fixed_k and row.accept_len < expected - allowed):
        sign = "=" if row.fixed_k else "<="
        identity = f"accept_len {sign} 1 + {row.k} * accept_rate"
        _fail(row.dataset, row.run, identity, row.accept_len, expected)


def _check_accept_len_and_positions(row: TableRow) -> None:
    positions = [p for p in row.accept_p if p is not None]
    if row.accept_len is None or not positions:
        return
    total, last, count = sum(positions), positions[-1], len(positions)
    names = " + ".join(f"p{i}" for i in range(1, count + 1))
    if row.k is not None and row.k <= count:
        allowed = _LENGTH + count * _RATE + _FLOAT
        if abs(row.accept_len - 1 - total) > allowed:
            _fail(row.dataset, row.run, f"accept_len = 1 + {names}", row.accept_len, 1 + total)
        return
    # The sum of the printed positions leaves out the later ones: it is a lower bound, and with a
    # known k each later one adds at most the last printed.
    more = math.inf if row.k is None else row.k - count
    high = math.inf if row.k is None else total + more * last
    sums = [("accept_len - 1", row.accept_len - 1, _LENGTH)]
    if row.fixed_k and row.k is not None and row.accept_rate is not None:
        sums.append((f"{row.k} * accept_rate", row.k * row.accept_rate, row.k * _RATE))
    for name, value, rounding in sums:
        if value < total - count * _RATE - rounding - _FLOAT:
            _fail(row.dataset, row.run, f"{names} <= {name}", total, value)
        if value > high + (count + more) * _RATE + rounding + _FLOAT:
            _fail(row.dataset, row.run, f"{name} <= {names} + {more} * p{count}", value, high)


# --------------------------------------------------------------------------- summaries


def check_summaries(summaries: Sequence[CellSummary]) -> None:
    """Check the identities of unrounded cells, each against its dataset's baseline too.

    - speedup = tok/s / baseline's tok/s;
    - accept_len = 1 + sum of p_i, and = 1 + k * accept_rate at a fixed k;
    - the devices make up the cell, and requests in flight on each of them fit the concurrency, see
      `check_devices`;
    - all arms of a dataset were measured alike, see `differing_conditions`.

    Raises:
        UserError: a check fails, or a dataset has no baseline.
    """
    baselines = {cell.dataset: cell for cell in summaries if cell.run == BASELINE}
    for cell in summaries:
        if cell.dataset not in baselines:
            raise UserError(f"dataset '{cell.dataset}' has no {BASELINE} summary")
        _check_same_conditions(cell, baselines[cell.dataset])
        ratio = cell.output_tok_s / baselines[cell.dataset].output_tok_s
        _equal(cell, "speedup = tok/s / baseline's tok/s", cell.speedup, ratio)
        _check_exact_acceptance(cell)
        check_devices(cell)


def _check_same_conditions(cell: CellSummary, baseline: CellSummary) -> None:
    found = ", ".join(str(mismatch) for mismatch in differing_conditions(cell, baseline))
    if found:
        raise UserError(
            f"cell {cell.dataset}/{cell.run}: {found} in its baseline: a speedup needs both measured "
            "alike, run the dataset's job again"
        )


def _check_exact_acceptance(cell: CellSummary) -> None:
    if cell.accept_len is None:
        return
    _equal(cell, "accept_len = 1 + sum of p_i", cell.accept_len, 1 + sum(cell.accept_p))
    if cell.fixed_k and cell.accept_rate is not None:
        identity = f"accept_len = 1 + {cell.k} * accept_rate"
        _equal(cell, identity, cell.accept_len, 1 + cell.k * cell.accept_rate)


def _equal(cell: CellSummary, identity: str, left: float, right: float) -> None:
    if not math.isclose(left, right, rel_tol=_FLOAT, abs_tol=_FLOAT):
        _fail(cell.dataset, cell.run, identity, left, right)


def requests_in_flight(device: DeviceSummary) -> float:
    """Mean requests in flight on a device in its measured windows, by Little's law.

    tok/s * mean latency / mean tokens a request = sum of latencies / sum of window times.
    """
    mean_tokens = device.output_tokens / device.requests
    return device.output_tok_s * device.latency_ms_mean / 1000 / mean_tokens


def mostly_ramps(device: DeviceSummary, concurrency: int) -> bool:
    """Whether windows hold so few requests that much of them is their end, where slots stand idle."""
    return device.requests < 4 * concurrency * device.windows


def requests_in_flight_bounds(
    device: DeviceSummary, concurrency: int, turns: int
) -> tuple[float, float]:
    """What `requests_in_flight` may be in a closed loop at concurrency C.

    At most C requests are in flight, so C * 1.002 bounds it from above (0.2 % for the clock).
    From below: slots stand idle only once no request is left to submit, at the end of a window. A
    window ends at most one chain of requests later (`turns` * the longest latency), and until then
    at least one slot works, so a window loses at most (C - 1) * turns * longest latency of its
    C * window slot-seconds; for equal latencies and blocks of B requests the share lost is at most
    about 1 / B per idle slot, less than the rule of thumb 2C / B. A tenth of C is allowed for the
    host's own time between requests. With fewer than 4C requests a window on average the ramp down
    is most of the window, and only the bound from above is meaningful.
    """
    high = concurrency * (1 + _LITTLE_SLACK)
    if mostly_ramps(device, concurrency):
        return 0.0, high
    idle_s = (concurrency - 1) * turns * device.windows * device.latency_ms_max / 1000
    return concurrency * (1 - _HOST_SHARE) - idle_s / device.window_s, high


def check_devices(cell: CellSummary) -> None:
    """Check that a cell is made of what its devices measured, and each device's requests in flight.

    - requests, tokens and windows are the sums of the devices', tok/s is the mean of theirs, mean
      latency that of all requests, longest latency the longest;
    - on each, tok/s * mean latency / mean tokens lies within `requests_in_flight_bounds`.

    Raises:
        UserError: a check fails.
    """
    devices = cell.by_device
    _equal(cell, "devices = number of by_device", cell.devices, len(devices))
    for name in ("requests", "output_tokens", "windows", "window_s"):
        total = sum(getattr(device, name) for device in devices)
        _equal(cell, f"{name} = sum of the devices'", getattr(cell, name), total)
    mean = fmean(device.output_tok_s for device in devices)
    _equal(cell, "tok/s = mean of the devices' tok/s", cell.output_tok_s, mean)
    latency = sum(device.requests * device.latency_ms_mean for device in devices) / cell.requests
    _equal(cell, "mean latency = mean of the devices' requests", cell.latency_ms_mean, latency)
    longest = max(device.latency_ms_max for device in devices)
    _equal(cell, "longest latency = longest of the devices'", cell.latency_ms_max, longest)
    for device in devices:
        _check_requests_in_flight(cell, device)


def _check_requests_in_flight(cell: CellSummary, device: DeviceSummary) -> None:
    low, high = requests_in_flight_bounds(device, cell.concurrency, cell.turns)
    value = requests_in_flight(device)
    if not low <= value <= high:
        where = f" in shard {device.shard}" if cell.devices > 1 else ""
        identity = f"concurrency {cell.concurrency} ~ tok/s * mean latency / mean tokens{where}"
        _fail(cell.dataset, cell.run, identity, value, f"[{low:.6g}, {high:.6g}]")


# --------------------------------------------------------------------------- request records


def check_records(records: Iterable[RequestRecord]) -> None:
    """Check that each record is consistent in itself, so that every metric means what it says.

    Counts: one token id for each output token, step lists of one length, output_tokens =
    1 + sum of emitted tokens, each step emits at least one token, accepted <= verified <= drafted,
    and a complete step emits its accepted tokens and the bonus token. Times: t_submit < t_first <=
    each step in turn, t_last is the last of them. Identity: latency = TTFT + TPOT * (n - 1), with
    TPOT both from its definition and from the step times.

    Raises:
        UserError: a check fails; the cell, the request and what is wrong are named.
    """
    for record in records:
        problem = _problem_with_counts(record) or _problem_with_times(record)
        if problem:
            raise UserError(
                f"cell {record.dataset}/{record.run}: request '{record.request_id}': {problem}; "
                "the record is damaged, run the dataset's job again"
            )
        _check_latency(record)


def _problem_with_counts(r: RequestRecord) -> str | None:
    lists = (r.step_t, r.step_emitted, r.step_drafted, r.step_verified, r.step_accepted, r.step_cut)
    if len({len(steps) for steps in lists}) > 1:
        return "its step lists have different lengths"
    if r.output_tokens != len(r.output_token_ids):
        return f"{len(r.output_token_ids)} token ids for {r.output_tokens} output tokens"
    if r.output_tokens != 1 + sum(r.step_emitted):
        return f"its steps emitted {sum(r.step_emitted)} of {r.output_tokens} output tokens"
    steps = zip(
        r.step_emitted, r.step_drafted, r.step_verified, r.step_accepted, r.step_cut, strict=True
    )
    for index, (emitted, drafted, verified, accepted, cut) in enumerate(steps):
        if not 0 <= accepted <= verified <= drafted:
            return f"step {index} accepted {accepted} of {verified} verified of {drafted} drafted"
        if not 1 <= emitted <= accepted + 1 or (not cut and emitted != accepted + 1):
            kind = "cut" if cut else "complete"
            return f"{kind} step {index} accepted {accepted} draft tokens and emitted {emitted}"
    return None


def _problem_with_times(r: RequestRecord) -> str | None:
    times = [r.t_submit, r.t_first, *r.step_t]
    if any(later < earlier for earlier, later in pairwise(times)):
        return "its times run backwards"
    if r.t_first == r.t_submit:
        return "its first token took no time"
    if r.t_last != times[-1]:
        return f"t_last is {r.t_last}, its last tokens came at {times[-1]}"
    return None


def _check_latency(r: RequestRecord) -> None:
    for per_token in (tpot_s(r), itl_s(r)):
        total = ttft_s(r) + (per_token or 0.0) * (r.output_tokens - 1)
        # A clock that shows a large value has fewer digits left for the differences.
        allowed = _FLOAT + 1e-14 * abs(r.t_last) * r.output_tokens
        if abs(latency_s(r) - total) > allowed:
            identity = f"latency = ttft + tpot * (n - 1) of request {r.request_id}"
            _fail(r.dataset, r.run, identity, latency_s(r), total)
