"""manifest.json: what a batch consisted of and how its files were made, so that anybody can check them.

One JSON object; each entry of `chunks` stands on a line of its own. Nothing in it depends on when or by whom the files
were assembled: two merges of one batch write the same bytes (invariant I5). Times are UTC seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec

from batch_pipeline.models import Prices

FORMAT = 1


class InputFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The bytes that the batch was taken from."""

    key: str
    bytes: int
    etag: str
    sha256: str | None
    """Null where the file was refused before it was read to its end."""
    requests: int
    """Lines that are not blank."""


class FileFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One final file, as it was read back after it had been written."""

    key: str
    bytes: int
    lines: int
    sha256: str


class Counts(msgspec.Struct, frozen=True, kw_only=True):
    """Requests by how they ended; the last five add up to the first (invariant I7)."""

    total: int = 0
    completed: int = 0
    failed: int = 0
    expired: int = 0
    cancelled: int = 0
    invalid: int = 0

    @property
    def ended(self) -> int:
        """Requests that have an end, whichever it is."""
        return self.completed + self.failed + self.expired + self.cancelled + self.invalid


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens of the requests that were answered; `cached_tokens` are those of the input that the cache had."""

    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0

    def plus(self, other: Usage) -> Usage:
        """Return the sum of both."""
        return Usage(
            input_tokens=self.input_tokens + other.input_tokens,
            cached_tokens=self.cached_tokens + other.cached_tokens,
            output_tokens=self.output_tokens + other.output_tokens,
        )


class ModelUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What one model did for the batch. `prices` and `cost` (US dollars) are null where the catalogue lacks it."""

    model: str
    usage: Usage
    prices: Prices | None
    cost: float | None


class PartFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A checkpoint whose results were kept though its chunk was never committed."""

    key: str
    requests: int


class ChunkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One chunk: who ran it with what, and where its results came from; null where no attempt was made."""

    chunk: int
    model: str
    requests: int
    first_index: int
    last_index: int
    state: str
    attempt: int
    worker: str | None
    run_id: str | None
    engine_version: str | None
    model_version: str | None
    result_key: str | None
    sha256: str | None
    """Of the object at `result_key`."""
    parts: list[PartFacts]
    """Only of chunks that stopped without a commit."""
    completed: int
    failed: int
    """Results that the chunk itself brought, without the error lines of requests that it never finished."""
    usage: Usage


class Head(msgspec.Struct, frozen=True, kw_only=True):
    """The manifest without its chunks."""

    format: int = FORMAT
    batch_id: str
    customer: str
    name: str
    endpoint: str
    metadata: dict[str, str]
    status: str
    """The status with which the batch ends."""
    created_at: float
    in_progress_at: float | None
    cancelling_at: float | None
    finalizing_at: float | None
    deadline_at: float
    counts: Counts
    usage: Usage
    """Counted in the responses of the output file."""
    models: list[ModelUsage]
    cost: float | None
    """In US dollars, at the batch price; null where a price is not known."""
    input: InputFacts
    output: FileFacts | None
    """Null where no request was answered: then there is no such file."""
    errors: FileFacts | None


class Manifest(Head, frozen=True, kw_only=True):
    """The whole manifest."""

    chunks: list[ChunkFacts]


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(Manifest)


def encode(head: Head, chunks: Iterable[ChunkFacts]) -> bytes:
    """Return the manifest's bytes: about 500 for each chunk (10 MB for 20,000 of them)."""
    opening = _encoder.encode(head)[:-1] + b',"chunks":['
    entries = b",\n".join([_encoder.encode(chunk) for chunk in chunks])
    return b"".join([opening, b"\n" if entries else b"", entries, b"\n]}\n"])


def decode(data: bytes) -> Manifest:
    """Return the manifest. Raises msgspec.DecodeError where the bytes are not one."""
    return _decoder.decode(data)
