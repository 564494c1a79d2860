"""Rows of the tables as records, and the other way round."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import sqlalchemy as sa

from batch_pipeline.ledger import records, schema

_BATCH_COLUMNS = [schema.batches.c[name] for name in records.Batch.__struct_fields__]
BATCH = sa.select(*_BATCH_COLUMNS)
CHUNK = sa.select(schema.chunks)
IS_ONE_OF = sa.and_(
    schema.chunks.c.batch_id.in_(sa.bindparam("batch_ids", expanding=True)),
    schema.chunks.c.chunk.in_(sa.bindparam("numbers", expanding=True)),
    sa.tuple_(schema.chunks.c.batch_id, schema.chunks.c.chunk).in_(sa.bindparam("keys", expanding=True)),
)
"""Whether a chunk is one of some leases' (see `keys_of`). The first two conditions follow from the third: by that alone
SQLite finds no index for several chunks.
"""
GIVEN = "given_rows"
LANE = sa.select(*[schema.lanes.c[name] for name in records.Lane.__struct_fields__])


def batch(row: Any) -> records.Batch:
    """Return the record of a row of BATCH."""
    values = _values(row)
    values["metadata"] = msgspec.json.decode(values["metadata"], type=dict[str, str])
    values["models"] = msgspec.json.decode(values["models"], type=list[str])
    values["errors"] = msgspec.json.decode(values["errors"], type=list[records.BatchError])
    return msgspec.convert(values, records.Batch)


def chunk(row: Any) -> records.Chunk:
    """Return the record of a row of CHUNK."""
    values = _values(row)
    values["parts"] = parts(values["parts"])
    result = values["result"]
    values["result"] = None if result is None else chunk_result(result)
    return msgspec.convert(values, records.Chunk)


def keys_of(refs: Iterable[records.LeaseRef]) -> dict[str, Any]:
    """Return the parameters of IS_ONE_OF."""
    keys = sorted({(ref.batch_id, ref.chunk) for ref in refs})
    return {"batch_ids": sorted({key[0] for key in keys}), "numbers": sorted({key[1] for key in keys}), "keys": keys}


def lane(row: Any) -> records.Lane:
    """Return the record of a row of LANE."""
    return msgspec.convert(_values(row), records.Lane)


def archived_lanes(text: str | None) -> list[records.Lane]:
    """Return the lanes in an `archived_lanes` column."""
    return [] if text is None else msgspec.json.decode(text, type=list[records.Lane])


def worker(row: Any) -> records.Worker:
    """Return the record of a row of `workers`."""
    values = _values(row)
    values["batches"] = msgspec.json.decode(values["batches"], type=list[str])
    return msgspec.convert(values, records.Worker)


def event(row: Any) -> records.Event:
    """Return the record of a row of `events`."""
    return msgspec.convert(_values(row), records.Event)


def _values(row: Any) -> dict[str, Any]:
    # The keys are a kind of string of SQLAlchemy's own, which msgspec does not take.
    return {str(name): value for name, value in row._mapping.items()}


def parts(text: str) -> list[records.Part]:
    """Return the checkpoints in a `parts` column."""
    return msgspec.json.decode(text, type=list[records.Part])


def chunk_result(text: str) -> records.ChunkResult:
    """Return what a commit has pointed a chunk at, from a `result` column."""
    return msgspec.json.decode(text, type=records.ChunkResult)


def given(*columns: sa.ColumnElement[Any]) -> sa.TableValuedAlias:
    """Return a table of these columns in a statement for Postgres, whose rows come as the one parameter GIVEN: the JSON
    of a list of objects.

    For the client that costs a tenth of what a parameter for each value does, and one round trip for all rows.
    """
    of_json = sa.func.json_to_recordset(sa.cast(sa.bindparam(GIVEN, type_=sa.Text), sa.JSON))
    named = (sa.column(column.key or "", column.type) for column in columns)
    return of_json.table_valued(*named, name="given").render_derived(with_types=True)


def json(value: Any) -> str:
    """Return a value as the text of a JSON column."""
    return msgspec.json.encode(value).decode()
