"""Lines of OpenAI's batch files: the request line that comes in, the result line that goes out.

Encoding a result line is deterministic: the same result gives the same bytes (invariant I5).
"""

from __future__ import annotations

import msgspec


class RequestLine(msgspec.Struct, frozen=True):
    """One line of an input file; the body stays raw JSON until somebody needs to look inside."""

    custom_id: str
    method: str
    url: str
    body: msgspec.Raw


class EngineResponse(msgspec.Struct, frozen=True):
    """What the engine answered: HTTP status, the id under which it ran there, and the body as it came."""

    status_code: int
    request_id: str
    body: msgspec.Raw


class LineError(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why a request has no response. `line` is the 1-based line number, given for lines that could not be run."""

    code: str
    message: str
    line: int | None = None


class ResultLine(msgspec.Struct, frozen=True):
    """One line of an output or error file: a response or an error, never both. `custom_id` is null where unreadable."""

    id: str
    custom_id: str | None
    response: EngineResponse | None
    error: LineError | None
    shared_with: str | msgspec.UnsetType = msgspec.UNSET
    """The id of the request of the same batch that was run for this one too; left out where it ran itself."""


_encoder = msgspec.json.Encoder()
_decoder = msgspec.json.Decoder(ResultLine)


def encode_result(line: ResultLine) -> bytes:
    """Return the line as JSON with its newline."""
    return _encoder.encode(line) + b"\n"


def decode_result(line: bytes) -> ResultLine:
    """Return what `encode_result` was given. Raises msgspec.DecodeError where it did not write this."""
    return _decoder.decode(line)
