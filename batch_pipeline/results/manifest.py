"""manifest.json: what a batch consisted of and how its files were made, so that anybody can check them.

One JSON object; each entry of `chunks` and of `events` stands on a line of its own. It has what the ledger knows of a
batch's chunks, so that their rows need not be kept: from it they are made again (`results.archived`). Nothing in it
depends on when or by whom the files were assembled: two merges of one batch write the same bytes (invariant I5). Times
are UTC seconds since the epoch.
"""

from __future__ import annotations

from collections.abc import Iterable
from decimal import Decimal

import msgspec

from batch_pipeline.models import Prices

FORMAT = 2


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
    cost: Decimal | None


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
    prompt_tokens: int
    max_output_tokens: int
    """Both are estimates that were made before it ran."""
    input_key: str
    state: str
    attempt: int
    worker: str | None
    run_id: str | None
    engine_version: str | None
    model_version: str | None
    result_key: str | None
    lines_key: str | None
    output_bytes: int
    error_bytes: int
    sha256: str | None
    """Of the object at `result_key`: so many bytes of output lines, and then of error lines."""
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
    shared_requests: int = 0
    """Requests that took the result of an identical one, as the customer had asked: no call of the engine, no tokens,
    and nothing to pay.
    """
    models: list[ModelUsage]
    cost: Decimal | None
    """In US dollars, at the batch price, exact; null where a price is not known."""
    input: InputFacts
    output: FileFacts | None
    """Null where no request was answered: then there is no such file."""
    errors: FileFacts | None


class EventFacts(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One transition of the batch, or of a chunk of it."""

    sequence: int
    """Grows in the order in which they happened; numbers in between are other batches'."""
    at: float
    event: str
    actor: str
    chunk: int | None = None
    token: int | None = None
    """Of the attempt."""
    run_id: str | None = None
    detail: str | None = None


class Manifest(Head, frozen=True, kw_only=True):
    """The manifest without its events, which only an audit reads: see `events_in`."""

    chunks: list[ChunkFacts]


class _WithEvents(msgspec.Struct, frozen=True):
    events: list[EventFacts]


_encoder = msgspec.json.Encoder(decimal_format="number")
_decoder = msgspec.json.Decoder(Manifest)
_event_decoder = msgspec.json.Decoder(_WithEvents)


def encode(head: Head, chunks: Iterable[ChunkFacts], events: Iterable[EventFacts]) -> bytes:
    """Return the manifest's bytes: about 600 for each chunk and 150 for each event (18 MB for 20,000 chunks that ran
    once). Neither the chunks nor the events are held at once as values, only as these bytes.
    """
    out = bytearray(_encoder.encode(head)[:-1])
    for name, entries in (("chunks", chunks), ("events", events)):
        out += b',"%s":[' % name.encode()
        separator = b"\n"
        for entry in entries:
            out += separator + _encoder.encode(entry)
            separator = b",\n"
        out += b"\n]"
    out += b"}\n"
    return bytes(out)


def decode(data: bytes) -> Manifest:
    """Return the manifest without its events. Raises msgspec.DecodeError where the bytes are not one."""
    return _decoder.decode(data)


def events_in(data: bytes) -> list[EventFacts]:
    """Return the events in a manifest, in order. Raises msgspec.DecodeError where the bytes are not one."""
    return _event_decoder.decode(data).events
