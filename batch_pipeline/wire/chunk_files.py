"""The files of a chunk, as bytes and as values. Pure: no store, no ledger, no clock.

    input.parquet     the requests of a chunk, rows in the order in which they run
    part-NNNN.parquet a checkpoint: requests that one attempt has finished, rows in the order in which they did
    results.jsonl     what a commit points at: the output lines in index order, then the error lines in index order
    lines.parquet     one row for each line of results.jsonl, in their order there

The same values give the same bytes (invariant I5). A file that is not what it should be raises DamagedFile: it was not
written by these functions, or not by this version of them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from batch_pipeline.errors import BatchPipelineError

INPUT_SCHEMA = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("custom_id", pa.string(), nullable=False),
        pa.field("body", pa.binary(), nullable=False),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("max_tokens", pa.int32(), nullable=False),
        pa.field("same_as", pa.int64(), nullable=False),
    ]
)
_ONLY_WHERE_SHARED = frozenset({"same_as"})
"""Columns that are written only where some row says something there."""
PART_SCHEMA = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("is_error", pa.bool_(), nullable=False),
        pa.field("line", pa.binary(), nullable=False),
        pa.field("input_tokens", pa.int32(), nullable=False),
        pa.field("cached_tokens", pa.int32(), nullable=False),
        pa.field("output_tokens", pa.int32(), nullable=False),
    ]
)
LINES_SCHEMA = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("is_error", pa.bool_(), nullable=False),
        pa.field("length", pa.int32(), nullable=False),
    ]
)


class DamagedFile(BatchPipelineError):
    """A chunk's file does not have the form that this module writes."""


class ChunkRequest(msgspec.Struct, frozen=True, gc=False):
    """One request of a chunk. Token counts are estimates; `max_tokens` is the largest answer reckoned with."""

    index: int
    custom_id: str
    body: bytes
    prompt_tokens: int
    max_tokens: int
    same_as: int = -1
    """The request of this chunk, before this one in its order, whose answer this one takes; -1 where it has its own."""


class FinishedRequest(msgspec.Struct, frozen=True, gc=False):
    """A request that has its result: `line` is the JSON line for the output or the error file, with its newline."""

    index: int
    is_error: bool
    line: bytes
    input_tokens: int
    cached_tokens: int
    output_tokens: int


@dataclass(frozen=True)
class LinesTable:
    """Columns of lines.parquet: for each line of results.jsonl its request, its file and its length in bytes."""

    index: npt.NDArray[np.int64]
    is_error: npt.NDArray[np.bool_]
    length: npt.NDArray[np.int32]


class Counts(NamedTuple):
    """Sums over finished requests; tokens as the engine reported them."""

    completed: int
    failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int


class ResultObject(NamedTuple):
    """Both files of a commit, and what the ledger records of them."""

    data: bytes
    """results.jsonl"""
    lines: bytes
    """lines.parquet"""
    output_bytes: int
    error_bytes: int
    sha256: str
    """Of `data`, in hexadecimal."""
    counts: Counts


def write_chunk_input(requests: pa.Table) -> bytes:
    """Return input.parquet with the rows of a table of INPUT_SCHEMA, in the order given."""
    shares = bool((requests.column("same_as").to_numpy() >= 0).any())
    return _encode(requests if shares else requests.drop_columns(list(_ONLY_WHERE_SHARED)))


def read_chunk_input(data: bytes, columns: Sequence[str] = tuple(INPUT_SCHEMA.names)) -> pa.Table:
    """Return the named columns of input.parquet; others are not decoded. `same_as`, the last one, is missing where no
    request shares an answer. Raises DamagedFile.
    """
    return _read(data, INPUT_SCHEMA, columns)


def read_requests(data: bytes) -> list[ChunkRequest]:
    """Return the rows of input.parquet, in the order in which they run. Raises DamagedFile."""
    return [ChunkRequest(*row) for row in _rows(read_chunk_input(data))]


def write_part(finished: Iterable[FinishedRequest]) -> bytes:
    """Return a checkpoint's Parquet with one row for each request, in the order given."""
    return _write(finished, PART_SCHEMA)


def read_part(data: bytes) -> list[FinishedRequest]:
    """Return the rows of a checkpoint. Raises DamagedFile."""
    return [FinishedRequest(*row) for row in _rows(_read(data, PART_SCHEMA, PART_SCHEMA.names))]


def count(finished: Iterable[FinishedRequest]) -> Counts:
    """Return the sums over these requests."""
    completed = failed = input_tokens = cached_tokens = output_tokens = 0
    for request in finished:
        if request.is_error:
            failed += 1
        else:
            completed += 1
        input_tokens += request.input_tokens
        cached_tokens += request.cached_tokens
        output_tokens += request.output_tokens
    return Counts(completed, failed, input_tokens, cached_tokens, output_tokens)


def encode_result_object(finished: Iterable[FinishedRequest]) -> ResultObject:
    """Return both files of a commit: output lines in index order, then error lines in index order.

    Whether these are all requests of the chunk is for the caller to know. Raises ValueError where an index comes twice.
    """
    ordered = sorted(finished, key=lambda request: (request.is_error, request.index))
    indexes = np.array([request.index for request in ordered], dtype=np.int64)
    if len(np.unique(indexes)) != len(indexes):
        raise ValueError("a request has more than one result")
    counts = count(ordered)
    data = b"".join([request.line for request in ordered])
    lengths = np.array([len(request.line) for request in ordered], dtype=np.int32)
    table = pa.table(
        [
            pa.array(indexes),
            pa.array([request.is_error for request in ordered], type=pa.bool_()),
            pa.array(lengths),
        ],
        schema=LINES_SCHEMA,
    )
    output_bytes = int(lengths[: counts.completed].sum(dtype=np.int64))
    return ResultObject(
        data=data,
        lines=_encode(table),
        output_bytes=output_bytes,
        error_bytes=len(data) - output_bytes,
        sha256=hashlib.sha256(data).hexdigest(),
        counts=counts,
    )


def read_lines_table(data: bytes) -> LinesTable:
    """Return the columns of lines.parquet as arrays of equal length. Raises DamagedFile."""
    table = _read(data, LINES_SCHEMA, LINES_SCHEMA.names)
    return LinesTable(*(table.column(name).to_numpy() for name in LINES_SCHEMA.names))


def _write(rows: Iterable[msgspec.Struct], schema: pa.Schema) -> bytes:
    columns = list(zip(*map(msgspec.structs.astuple, rows), strict=True)) or [()] * len(schema)
    arrays = [pa.array(column, type=field.type) for column, field in zip(columns, schema, strict=True)]
    return _encode(pa.table(arrays, schema=schema))


def _encode(table: pa.Table) -> bytes:
    sink = pa.BufferOutputStream()
    # Nobody looks for a body or a line by its value: finding the least and the greatest of them would be for nothing.
    numbers = [field.name for field in table.schema if pa.types.is_integer(field.type)]
    # No dictionaries: nearly every value is another one, and building a dictionary costs more than it saves.
    pq.write_table(table, sink, compression="zstd", compression_level=1, use_dictionary=False, write_statistics=numbers)
    return bytes(sink.getvalue())


def _read(data: bytes, schema: pa.Schema, columns: Sequence[str]) -> pa.Table:
    try:
        with pq.ParquetFile(pa.BufferReader(data)) as file:
            missing = _ONLY_WHERE_SHARED - set(file.schema_arrow.names)
            columns = [name for name in columns if name not in missing]
            table = file.read(columns=columns, use_threads=False)
    except (pa.ArrowException, OSError) as error:
        raise DamagedFile(f"not readable as Parquet: {error}") from error
    wanted = pa.schema([schema.field(name) for name in columns])
    if set(table.schema.names) == set(columns):
        table = table.select(columns)
    if table.schema.names != wanted.names or table.schema.types != wanted.types:
        raise DamagedFile(f"columns are {_described(table.schema)}, not {_described(wanted)}")
    for name, column in zip(table.schema.names, table.columns, strict=True):
        if column.null_count:
            raise DamagedFile(f"column {name} has {column.null_count} empty values")
    return table


def _rows(table: pa.Table) -> Iterable[tuple[Any, ...]]:
    return zip(*(column.to_pylist() for column in table.columns), strict=True)


def _described(schema: pa.Schema) -> str:
    return ", ".join(f"{field.name} {field.type}" for field in schema)
