"""A chunk's input, made from rows of the request table and the bytes of the lines that they point to."""

from __future__ import annotations

import msgspec
import numpy as np
import numpy.typing as npt
import pyarrow as pa

from batch_pipeline.errors import ProofFailed
from batch_pipeline.intake.bodies import FORWARDED
from batch_pipeline.intake.gather import Lines
from batch_pipeline.intake.lines import readable_custom_id
from batch_pipeline.wire.chunk_files import INPUT_SCHEMA

COLUMNS = (
    "index",
    "line_offset",
    "line_bytes",
    "body_start",
    "body_bytes",
    "id_start",
    "id_bytes",
    "rewrite",
    "prompt_tokens",
    "max_tokens",
)
"""Those of the request table that are needed."""
TWIN = "twin"
"""A further column where requests share calls of the engine: equal for those that share one."""

Numbers = npt.NDArray[np.int64]

_objects = msgspec.json.Decoder(dict[str, msgspec.Raw])


def chunk_input(rows: pa.Table, descriptor: int, endpoint: str) -> pa.Table:
    """Return the input of a chunk with these rows, in their order; `descriptor` is that of the local copy of the file.

    Raises ProofFailed where the file is not the one whose lines were validated.
    """
    lines = Lines(descriptor, _numbers(rows, "line_offset"), _numbers(rows, "line_bytes"))
    starts, lengths = _numbers(rows, "body_start"), _numbers(rows, "body_bytes")
    wrong = (lines.at(starts) != ord("{")) | (lines.at(starts + lengths - 1) != ord("}"))
    if wrong.any():
        line = int(_numbers(rows, "index")[wrong][0]) + 1
        raise ProofFailed([f"the input has another line {line} than the one that was validated"])
    columns = {
        "index": rows.column("index"),
        "custom_id": _custom_ids(rows, lines),
        "body": _bodies_of(rows, lines.parts(starts, lengths), endpoint),
        "prompt_tokens": rows.column("prompt_tokens"),
        "max_tokens": rows.column("max_tokens"),
        "same_as": _same_as(rows),
    }
    return pa.table([columns[name] for name in INPUT_SCHEMA.names], schema=INPUT_SCHEMA)


def _same_as(rows: pa.Table) -> pa.Array:
    """Return for each request the one before it in the chunk whose answer it takes, -1 where it has its own."""
    same_as = np.full(rows.num_rows, -1, dtype=np.int64)
    if TWIN in rows.schema.names:
        _, first, own = np.unique(_numbers(rows, TWIN), return_index=True, return_inverse=True)
        shares = first[own] != np.arange(rows.num_rows)
        same_as[shares] = _numbers(rows, "index")[first[own]][shares]
    return pa.array(same_as)


def _custom_ids(rows: pa.Table, lines: Lines) -> pa.Array:
    """Return the ids as they stand in their lines, or as they read where they are written with escapes."""
    starts, lengths = _numbers(rows, "id_start"), _numbers(rows, "id_bytes")
    escaped = np.flatnonzero(starts < 0)
    ids = lines.parts(np.maximum(starts, 0), np.where(starts < 0, 0, lengths)).cast(pa.string())
    if not len(escaped):
        return ids
    texts = ids.to_pylist()
    for row in escaped.tolist():
        texts[row] = readable_custom_id(lines.line(row)) or ""
    return pa.array(texts, type=pa.string())


def forwarded(body: bytes, endpoint: str) -> bytes:
    """Return a body without what must not reach an engine; all else stays as it was written."""
    fields = {name: value for name, value in _objects.decode(body).items() if name in FORWARDED[endpoint]}
    return msgspec.json.encode(fields)


def _bodies_of(rows: pa.Table, bodies: pa.Array, endpoint: str) -> pa.Array:
    """Return the bodies as they are forwarded."""
    rewrite = rows.column("rewrite").to_numpy()
    if not rewrite.any():
        return bodies
    made = bodies.to_pylist()
    for row in np.flatnonzero(rewrite).tolist():
        made[row] = forwarded(made[row], endpoint)
    return pa.array(made, type=pa.binary())


def _numbers(rows: pa.Table, name: str) -> Numbers:
    numbers: Numbers = rows.column(name).to_numpy().astype(np.int64)
    return numbers
