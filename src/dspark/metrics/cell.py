"""summary.json: one cell (a dataset with a run), unrounded, with units in the names."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field, fields, is_dataclass
from pathlib import Path
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from dspark.errors import UserError
from dspark.files import write_text

# The run that every speedup is relative to.
BASELINE = "baseline"


@dataclass
class DeviceSummary:
    """What one device measured of a cell: the requests of a shard, or all where there is one."""

    shard: int  # from 1
    requests: int
    output_tokens: int
    windows: int
    window_s: float
    output_tok_s: float
    latency_ms_mean: float
    latency_ms_max: float


@dataclass
class CellSummary:
    """Everything that a row of the table, and the lines below the table, are made of.

    A dataset that is cut into shards is measured by a job a shard, each on one device; its cell is
    made of the requests of all of them. Only `output_tok_s` is not: it is the mean of the devices'.

    Times are in ms, windows in s. Latency, TTFT, TPOT and ITL are one value a request (see
    `dspark.metrics.timing`), so their percentiles are over requests; `itl_chunk` pools the gaps
    between steps, as serving benchmarks print it. Acceptance is defined in
    `dspark.metrics.acceptance`. A value is None where nothing can define it: TPOT and ITL when no
    request has two tokens, acceptance in a baseline or without a complete step.
    """

    dataset: str
    run: str
    mode: str  # "baseline" or "speculative"
    k: int  # draft tokens a step; 0 in a baseline
    confidence_threshold: float
    schedule: bool  # whether Algorithm 1 decides how many of the k are verified
    concurrency: int
    precision: str

    requests: int  # completed
    requests_failed: int  # 0 in every summary that is written: a failure fails the cell
    prompt_tokens: int
    output_tokens: int
    finish_reasons: dict[str, int]
    turns: int  # the longest chain of requests of one prompt

    devices: int  # jobs that measured the cell: the dataset's shards
    windows: int  # of all devices
    window_s: float  # sum over the measured windows, first submit to last token
    output_tok_s: float  # of one device: the mean of by_device
    speedup: float
    speedup_ci95_low: float
    speedup_ci95_high: float

    latency_ms_mean: float
    latency_ms_p50: float
    latency_ms_p95: float
    latency_ms_p99: float
    latency_ms_max: float
    ttft_ms_mean: float
    ttft_ms_p50: float
    ttft_ms_p95: float
    ttft_ms_p99: float
    tpot_ms_mean: float | None
    tpot_ms_p50: float | None
    tpot_ms_p95: float | None
    tpot_ms_p99: float | None
    tpot_ms_token_weighted: float | None
    itl_ms_mean: float | None
    itl_ms_p50: float | None
    itl_ms_p95: float | None
    itl_ms_p99: float | None
    itl_chunk_ms_mean: float | None
    itl_chunk_ms_p50: float | None
    itl_chunk_ms_p95: float | None
    itl_chunk_ms_p99: float | None

    steps: int
    steps_cut: int
    drafted: int  # draft tokens over all steps
    verified: int
    accepted: int
    complete_steps: int
    complete_verified: int  # draft tokens over the complete steps
    complete_accepted: int
    accept_rate: float | None
    accept_p: list[float]  # positions 1..k; empty without a complete step
    accept_len: float | None
    accept_len_delivered: float | None
    accept_histogram: list[int]  # complete steps by number of accepted tokens, 0..k

    by_device: list[DeviceSummary]
    # Steps at full concurrency without a prefill (`dspark.metrics.steps`); None where there are none.
    step_ms_baseline: float | None = None
    step_ms_spec: float | None = None  # None in a baseline
    break_even_accept_len: float | None = None  # their ratio: what a step must emit to win
    lossless: dict[str, Any] | None = None  # what dspark.metrics.lossless.judge returns
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def fixed_k(self) -> bool:
        """Whether every complete step must have verified exactly k draft tokens."""
        return self.k > 0 and self.confidence_threshold == 0 and not self.schedule


def write_summary(path: str | Path, summary: CellSummary) -> None:
    """Write summary.json aside and then under its final name.

    Raises:
        UserError: the file cannot be written.
    """
    write_text(path, json.dumps(asdict(summary), indent=2, allow_nan=False) + "\n")


def read_summary(path: str | Path) -> CellSummary:
    """Read a summary.json back.

    Raises:
        UserError: the file is absent or not JSON, or a field is missing, unknown or of another
            type; the field is named.
    """
    try:
        values = json.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise UserError(f"summary '{path}' does not exist: run its dataset's job first") from error
    except (OSError, ValueError) as error:
        raise UserError(f"summary '{path}' cannot be read: {error}") from error
    if not isinstance(values, dict):
        raise UserError(f"summary '{path}' holds no JSON object")
    types = get_type_hints(CellSummary)
    names = [f.name for f in fields(CellSummary)]
    for name in [*names, *values]:
        if name not in values or name not in types:
            what = "lacks the field" if name in types else "has the unknown field"
            raise UserError(
                f"summary '{path}' {what} '{name}': it was written by another version, "
                "summarise the dataset's records again"
            )
        if not _fits(values[name], types[name]):
            raise UserError(f"summary '{path}': '{name}' holds {json.dumps(values[name])[:40]}")
    values["by_device"] = [DeviceSummary(**device) for device in values["by_device"]]
    return CellSummary(**values)


def _fits(value: Any, kind: Any) -> bool:
    """Whether a JSON value is of the annotated type; an integer passes for a float."""
    if kind is Any:
        return True
    if is_dataclass(kind):
        types = get_type_hints(kind)
        return (
            isinstance(value, dict)
            and value.keys() == types.keys()
            and all(_fits(value[name], of) for name, of in types.items())
        )
    if get_origin(kind) is UnionType:
        return any(_fits(value, option) for option in get_args(kind))
    if get_origin(kind) is list:
        return isinstance(value, list) and all(_fits(item, get_args(kind)[0]) for item in value)
    if get_origin(kind) is dict:
        of = get_args(kind)[1]
        return isinstance(value, dict) and all(_fits(item, of) for item in value.values())
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)
