"""The valid requests of a file as rows of numbers: how they pass from whoever checks a line to the request table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import xxhash

ROW = np.dtype(
    [
        ("index", np.int64),
        ("line_offset", np.int64),
        ("line_bytes", np.int32),
        ("body_start", np.int32),
        ("body_bytes", np.int32),
        ("id_start", np.int32),
        ("id_bytes", np.int32),
        ("rewrite", np.bool_),
        ("model", np.int32),
        ("prefix_64", np.uint64),
        ("prefix_256", np.uint64),
        ("prefix_1024", np.uint64),
        ("prefix_4096", np.uint64),
        ("prompt_tokens", np.int32),
        ("max_tokens", np.int32),
        ("id_hash", np.uint64),
    ]
)
"""The fields of `Request`, in their order; `model` is a position in the models of `Rows`."""

id_hash = xxhash.xxh3_64_digest
"""The hash of a custom_id, by which duplicates are looked for."""

Array = npt.NDArray[np.void]


class Request(NamedTuple):
    """A line that can be run: where its parts lie, what it shares, and its size. The columns of the request table."""

    line_index: int
    """0-based number of the line: the request's index."""
    line_offset: int
    """Where the line starts in the file."""
    line_bytes: int
    body_start: int
    """Where the body starts in the line."""
    body_bytes: int
    id_start: int
    """Where the custom_id stands in the line, letter by letter; -1 where it is only there with escapes."""
    id_bytes: int
    rewrite: bool
    """The body carries fields that must not reach the engine."""
    model: str
    prefix_64: int
    prefix_256: int
    prefix_1024: int
    prefix_4096: int
    """Hashes of so many first bytes of what is rendered first: tools, then the messages, or the prompt."""
    prompt_tokens: int
    max_tokens: int
    id_hash: int
    """Not in the table: a hash of the custom_id, to find duplicates."""


class Rows(msgspec.Struct, frozen=True):
    """The requests of a block of lines, in their order, in a form that travels between processes without being looked
    at.
    """

    models: list[str]
    data: bytes
    """Of ROW, one for each request."""

    @property
    def array(self) -> Array:
        """The rows; not to be written to."""
        return np.frombuffer(self.data, dtype=ROW)


def rows_of(requests: Sequence[Request], models: Sequence[str] = (), others: Array | None = None) -> Rows:
    """Return requests as rows, in their order, together with further rows of other lines and the models that these
    name.
    """
    known = {model: number for number, model in enumerate(models)}
    values = [(*request[:8], known.setdefault(request.model, len(known)), *request[9:]) for request in requests]
    rows = np.array(values, dtype=ROW)
    if others is not None and len(others):
        rows = np.concatenate([others, rows])
        rows = rows[np.argsort(rows["index"], kind="stable")] if values else rows
    return Rows(list(known), rows.tobytes())
