"""The table of a batch's valid requests, which passes from validation to chunking: Parquet, in the order of the file.

What chunking has to know of the file as a whole stands in the table's own metadata, so that both come and go together.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from batch_pipeline.errors import BatchPipelineError
from batch_pipeline.intake.rows import Rows
from batch_pipeline.ledger.records import BatchError

VERSION = 1
ROWS_PER_GROUP = 65_536
_SUMMARY = b"batch_pipeline"

SCHEMA = pa.schema(
    [
        pa.field("index", pa.int64(), nullable=False),
        pa.field("line_offset", pa.int64(), nullable=False),
        pa.field("line_bytes", pa.int32(), nullable=False),
        pa.field("body_start", pa.int32(), nullable=False),
        pa.field("body_bytes", pa.int32(), nullable=False),
        pa.field("id_start", pa.int32(), nullable=False),
        pa.field("id_bytes", pa.int32(), nullable=False),
        pa.field("rewrite", pa.bool_(), nullable=False),
        pa.field("model", pa.string(), nullable=False),
        pa.field("prefix_64", pa.uint64(), nullable=False),
        pa.field("prefix_256", pa.uint64(), nullable=False),
        pa.field("prefix_1024", pa.uint64(), nullable=False),
        pa.field("prefix_4096", pa.uint64(), nullable=False),
        pa.field("prompt_tokens", pa.int32(), nullable=False),
        pa.field("max_tokens", pa.int32(), nullable=False),
    ]
)
"""The fields of `rows.Request`, without the hash of its id."""


Column = np.ndarray[tuple[int], np.dtype[np.int64]]


class DamagedTable(BatchPipelineError):
    """The request table cannot be read, or another version wrote it. Validating the batch again mends it."""


class Summary(msgspec.Struct, frozen=True, kw_only=True):
    """What validation found in the whole file. total = invalid + the rows of the table, unless the file was refused."""

    version: int = VERSION
    total: int
    invalid: int
    input_bytes: int
    input_sha256: str
    refused: bool = False
    """The file as a whole was refused: nothing of it is counted, and `errors` says why."""
    errors: list[BatchError]
    """The first errors, in the order of their lines."""


class TableWriter:
    """Writes the table row group by row group; memory is that of one group. The same requests give the same bytes."""

    def __init__(self, path: Path) -> None:
        self._writer = pq.ParquetWriter(path, SCHEMA, compression="zstd", compression_level=1, use_dictionary=["model"])
        self._held: list[pa.Table] = []
        self._rows = 0

    def add(self, rows: Rows) -> None:
        """Append the requests of a block."""
        if not rows.data:
            return
        self._held.append(_table_of(rows))
        self._rows += self._held[-1].num_rows
        if self._rows >= ROWS_PER_GROUP:
            self._flush()

    def add_table(self, table: pa.Table) -> None:
        """Append rows of another table of this schema."""
        self._writer.write_table(table, row_group_size=ROWS_PER_GROUP)

    def close(self, summary: Summary) -> None:
        """Write what is left, and what stands beside the rows."""
        self._flush()
        self._writer.add_key_value_metadata({_SUMMARY: msgspec.json.encode(summary)})
        self._writer.close()

    def discard(self) -> None:
        """Forget the rows; the file is of no use then."""
        self._held = []
        self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writer.close()

    def _flush(self) -> None:
        if self._held:
            self._writer.write_table(pa.concat_tables(self._held), row_group_size=self._rows)
        self._held, self._rows = [], 0


def _table_of(rows: Rows) -> pa.Table:
    numbers = rows.array
    columns = [
        pa.array(rows.models, type=field.type).take(pa.array(numbers["model"]))
        if field.name == "model"
        else pa.array(numbers[field.name], type=field.type)
        for field in SCHEMA
    ]
    return pa.table(columns, schema=SCHEMA)


class RequestTable:
    """A table that was written. Raises DamagedTable where it cannot be read."""

    def __init__(self, path: Path) -> None:
        try:
            self._file = pq.ParquetFile(path)
            raw = (self._file.schema_arrow.metadata or {}).get(_SUMMARY) or (self._file.metadata.metadata or {})[
                _SUMMARY
            ]
            self.summary = msgspec.json.decode(raw, type=Summary)
        except (pa.ArrowException, OSError, KeyError, msgspec.DecodeError) as error:
            raise DamagedTable(f"the request table cannot be read: {error}") from error
        if self.summary.version != VERSION:
            raise DamagedTable(f"the request table is of version {self.summary.version}, not {VERSION}")
        self.rows: int = self._file.metadata.num_rows

    def groups(self) -> Iterator[pa.Table]:
        """Yield the table in the pieces in which it was written."""
        for group in range(self._file.num_row_groups):
            yield self._file.read_row_group(group)

    def column(self, name: str) -> Column:
        """Return a whole column."""
        whole: Column = self._file.read(columns=[name], use_threads=False).column(name).to_numpy()
        return whole

    def segments(self, rows: int) -> Iterator[pa.Table]:
        """Yield the table in pieces of `rows` rows, the last one with fewer. Memory: one piece and a row group."""
        held: list[pa.Table] = []
        count = 0
        for group in self.groups():
            held.append(group)
            count += held[-1].num_rows
            while count >= rows:
                table = pa.concat_tables(held)
                yield table.slice(0, rows)
                rest = table.slice(rows)
                held, count = [rest] if rest.num_rows else [], rest.num_rows
        if count:
            yield pa.concat_tables(held)

    def close(self) -> None:
        """Close the file."""
        self._file.close()
