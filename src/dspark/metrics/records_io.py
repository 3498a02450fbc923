"""requests.parquet: the request records of all arms of one dataset, one row a request."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from dspark.decode.records import RequestRecord
from dspark.errors import UserError
from dspark.files import written_aside

# The columns are the fields of RequestRecord, in its order. Times are seconds of a monotonic clock,
# which every shard has of its own.
SCHEMA = pa.schema(
    [
        pa.field("prompt_id", pa.string(), nullable=False),
        pa.field("turn", pa.int64(), nullable=False),
        pa.field("dataset", pa.string(), nullable=False),
        pa.field("run", pa.string(), nullable=False),
        pa.field("window", pa.int64(), nullable=False),
        pa.field("prompt_tokens", pa.int64(), nullable=False),
        pa.field("output_tokens", pa.int64(), nullable=False),
        pa.field("output_token_ids", pa.list_(pa.int64()), nullable=False),
        pa.field("finish_reason", pa.string(), nullable=False),
        pa.field("t_submit", pa.float64(), nullable=False),
        pa.field("t_first", pa.float64(), nullable=False),
        pa.field("t_last", pa.float64(), nullable=False),
        pa.field("step_t", pa.list_(pa.float64()), nullable=False),
        pa.field("step_emitted", pa.list_(pa.int64()), nullable=False),
        pa.field("step_drafted", pa.list_(pa.int64()), nullable=False),
        pa.field("step_verified", pa.list_(pa.int64()), nullable=False),
        pa.field("step_accepted", pa.list_(pa.int64()), nullable=False),
        pa.field("step_cut", pa.list_(pa.bool_()), nullable=False),
        pa.field("error", pa.string(), nullable=True),
        pa.field("shard", pa.int64(), nullable=False),
    ]
)


def write_records(path: str | Path, records: Sequence[RequestRecord]) -> None:
    """Write the records, in their order, aside and then under the final name.

    Raises:
        UserError: the file cannot be written.
    """
    table = pa.Table.from_pylist([asdict(record) for record in records], schema=SCHEMA)
    with written_aside(path) as aside:
        pq.write_table(table, aside, compression="zstd")


def read_records(path: str | Path) -> list[RequestRecord]:
    """Read the records back in the order in which they were written.

    Raises:
        UserError: the file is absent, is no Parquet file, or lacks a column of the schema.
    """
    if not Path(path).is_file():
        raise UserError(f"request records '{path}' do not exist: run the dataset's bench job first")
    try:
        table = pq.ParquetFile(path).read()
        missing = [name for name in SCHEMA.names if name not in table.column_names]
        if missing:
            raise UserError(
                f"request records '{path}' have no column '{missing[0]}': "
                "they were written by another version, run the bench job again"
            )
        table = table.select(SCHEMA.names).cast(SCHEMA)
    except (pa.ArrowException, OSError, ValueError) as error:
        reason = (str(error).splitlines() or ["unreadable"])[0]
        raise UserError(
            f"request records '{path}' cannot be read ({reason}): "
            "delete the file and run the bench job again"
        ) from error
    return [RequestRecord(**row) for row in table.to_pylist()]
