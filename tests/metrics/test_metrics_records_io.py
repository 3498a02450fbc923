"""requests.parquet."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dspark.decode.records import RequestRecord
from dspark.errors import UserError
from dspark.metrics.records_io import SCHEMA, read_records, write_records

COUNT = st.integers(0, 2**40)
TIME = st.floats(allow_nan=False, allow_infinity=False)
TEXT = st.text(max_size=8)
RECORDS = st.lists(
    st.builds(
        RequestRecord,
        prompt_id=TEXT,
        turn=COUNT,
        dataset=TEXT,
        run=TEXT,
        window=COUNT,
        prompt_tokens=COUNT,
        output_tokens=COUNT,
        output_token_ids=st.lists(COUNT, max_size=4),
        finish_reason=TEXT,
        t_submit=TIME,
        t_first=TIME,
        t_last=TIME,
        step_t=st.lists(TIME, max_size=4),
        step_emitted=st.lists(COUNT, max_size=4),
        step_drafted=st.lists(COUNT, max_size=4),
        step_verified=st.lists(COUNT, max_size=4),
        step_accepted=st.lists(COUNT, max_size=4),
        step_cut=st.lists(st.booleans(), max_size=4),
        error=st.none() | TEXT,
        shard=COUNT,
    ),
    max_size=4,
)


def one_line(error: pytest.ExceptionInfo[UserError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@settings(deadline=None)
@given(records=RECORDS)
def test_reads_back_what_was_written(
    records: list[RequestRecord], tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("records") / "requests.parquet"
    write_records(path, records)
    assert read_records(path) == records
    assert [p.name for p in path.parent.iterdir()] == ["requests.parquet"]


def test_schema_is_the_record() -> None:
    assert SCHEMA.names == [f.name for f in fields(RequestRecord)]


def test_missing_file(tmp_path: Path) -> None:
    with pytest.raises(UserError) as error:
        read_records(tmp_path / "requests.parquet")
    assert "do not exist" in one_line(error)


@pytest.mark.parametrize("content", [b"", b"not parquet at all", b"PAR1" + b"\0" * 64 + b"PAR1"])
def test_corrupt_file(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "requests.parquet"
    path.write_bytes(content)
    with pytest.raises(UserError) as error:
        read_records(path)
    assert "cannot be read" in one_line(error)


def test_truncated_file(tmp_path: Path, record) -> None:
    path = tmp_path / "requests.parquet"
    write_records(path, [record(prompt_id=f"p{i}") for i in range(50)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(UserError, match="cannot be read"):
        read_records(path)


def test_missing_column_is_named(tmp_path: Path, record) -> None:
    path = tmp_path / "requests.parquet"
    write_records(path, [record()])
    pq.write_table(pq.read_table(path).drop_columns(["step_cut"]), path)
    with pytest.raises(UserError, match="no column 'step_cut'"):
        read_records(path)


def test_column_of_another_type(tmp_path: Path, record) -> None:
    path = tmp_path / "requests.parquet"
    write_records(path, [record()])
    table = pq.read_table(path)
    index = table.column_names.index("turn")
    pq.write_table(table.set_column(index, "turn", pa.array(["second"])), path)
    with pytest.raises(UserError) as error:
        read_records(path)
    assert "cannot be read" in one_line(error)


def test_failed_write_keeps_the_earlier_file(tmp_path: Path, record) -> None:
    path = tmp_path / "requests.parquet"
    write_records(path, [record()])
    broken = record(prompt_id="p1")
    broken.turn = "second"
    with pytest.raises(pa.ArrowException):
        write_records(path, [broken])
    assert len(read_records(path)) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["requests.parquet"]


def test_unwritable_place(tmp_path: Path, record) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError) as error:
        write_records(tmp_path / "file" / "requests.parquet", [record()])
    assert "cannot write" in one_line(error)
