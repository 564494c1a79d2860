"""The files of a chunk come back as they were written, and what is not such a file is said so."""

from __future__ import annotations

import hashlib

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batch_pipeline.wire import chunk_files
from batch_pipeline.wire.chunk_files import ChunkRequest, DamagedFile, FinishedRequest
from tests.fakes.batches import chunk_input

tokens = st.integers(0, 2**31 - 1)
requests = st.lists(
    st.builds(ChunkRequest, st.integers(0, 2**40), st.text(min_size=1), st.binary(), tokens, tokens), max_size=30
)
finished = st.lists(
    st.builds(FinishedRequest, st.integers(0, 2**40), st.booleans(), st.binary(min_size=1), tokens, tokens, tokens),
    max_size=30,
    unique_by=lambda request: request.index,
)


@given(requests)
def test_a_chunk_input_is_read_back_as_it_was_written_in_its_order(rows: list[ChunkRequest]) -> None:
    data = chunk_input(rows)
    assert chunk_files.read_requests(data) == rows
    assert data == chunk_input(rows)
    table = chunk_files.read_chunk_input(data, ["custom_id", "index"])
    assert table.column("custom_id").to_pylist() == [row.custom_id for row in rows]
    assert table.schema.names == ["custom_id", "index"]


def test_requests_that_share_an_answer_are_read_back_and_the_column_is_there_only_then() -> None:
    rows = [ChunkRequest(4, "a", b"{}", 1, 1), ChunkRequest(7, "b", b"{}", 1, 1, same_as=4)]
    data = chunk_input(rows)
    assert chunk_files.read_requests(data) == rows
    assert chunk_files.read_chunk_input(data).schema.names[-1] == "same_as"
    assert chunk_files.read_chunk_input(chunk_input(rows[:1])).schema.names[-1] == "max_tokens"


@given(finished)
def test_a_part_is_read_back_as_it_was_written(rows: list[FinishedRequest]) -> None:
    assert chunk_files.read_part(chunk_files.write_part(rows)) == rows


@given(finished)
def test_a_result_object_holds_the_outputs_then_the_errors_each_in_index_order(
    rows: list[FinishedRequest],
) -> None:
    result = chunk_files.encode_result_object(rows)
    outputs = [row for row in sorted(rows, key=lambda row: row.index) if not row.is_error]
    errors = [row for row in sorted(rows, key=lambda row: row.index) if row.is_error]
    assert result.data == b"".join(row.line for row in outputs + errors)
    assert result.data[: result.output_bytes] == b"".join(row.line for row in outputs)
    assert result.output_bytes + result.error_bytes == len(result.data)
    assert result.sha256 == hashlib.sha256(result.data).hexdigest()
    assert result.counts[:2] == (len(outputs), len(errors))
    table = chunk_files.read_lines_table(result.lines)
    assert table.index.tolist() == [row.index for row in outputs + errors]
    assert table.is_error.tolist() == [row.is_error for row in outputs + errors]
    assert table.length.tolist() == [len(row.line) for row in outputs + errors]
    assert chunk_files.encode_result_object(reversed(rows)) == result


def test_two_results_of_one_request_are_refused() -> None:
    twice = [FinishedRequest(7, False, b"a\n", 1, 0, 1), FinishedRequest(7, True, b"b\n", 1, 0, 1)]
    with pytest.raises(ValueError, match="more than one result"):
        chunk_files.encode_result_object(twice)


def test_a_file_of_another_kind_is_damaged() -> None:
    lines = chunk_files.encode_result_object([FinishedRequest(7, False, b"a\n", 1, 0, 1)]).lines
    for data in (b"", b"PAR1", lines[:-1]):
        with pytest.raises(DamagedFile, match="not readable"):
            chunk_files.read_part(data)
    with pytest.raises(DamagedFile, match="columns are index int64, is_error bool, not index int64"):
        chunk_files.read_part(lines)


def test_an_empty_value_is_damage() -> None:
    table = pa.table({"index": [1, None], "is_error": [True, False], "length": pa.array([1, 1], pa.int32())})
    sink = pa.BufferOutputStream()
    pa.parquet.write_table(table, sink)
    with pytest.raises(DamagedFile, match="column index has 1 empty values"):
        chunk_files.read_lines_table(bytes(sink.getvalue()))
