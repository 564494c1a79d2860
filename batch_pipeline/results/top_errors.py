"""Which errors a batch's error file has most of, by code, with an example of each."""

from __future__ import annotations

import msgspec

from batch_pipeline.plain import one_line
from batch_pipeline.results.streams import split_lines
from batch_pipeline.store import ObjectStore

MOST_BYTES = 32 * 1024 * 1024
"""Bytes of an error file that are read at most: a few hundred thousand lines, well below a second of a core."""


class ErrorGroup(msgspec.Struct, frozen=True, kw_only=True):
    """Errors of one code."""

    code: str
    count: int
    custom_id: str | None
    """Of the first of them."""
    message: str


class TopErrors(msgspec.Struct, frozen=True, kw_only=True):
    """The commonest errors first."""

    groups: list[ErrorGroup]
    lines: int
    """Lines that were read."""
    is_whole: bool
    """False where only the beginning of a large file was read."""


class _Told(msgspec.Struct):
    code: str | int | None = None
    type: str | None = None
    message: str | None = None


class _Body(msgspec.Struct):
    error: _Told | None = None


class _Response(msgspec.Struct):
    status_code: int = 0
    body: msgspec.Raw = msgspec.Raw(b"null")


class _Line(msgspec.Struct):
    custom_id: str | None = None
    response: _Response | None = None
    error: _Told | None = None


_decode = msgspec.json.Decoder(_Line).decode
_decode_body = msgspec.json.Decoder(_Body | None).decode


def top_errors(key: str | None, size: int, store: ObjectStore, most: int = 10) -> TopErrors:
    """Return the commonest errors of an error file of so many bytes; none where a batch has no such file.

    Raises ObjectMissing, StoreError. Reads at most the first MOST_BYTES, in pieces; memory: one piece. A line that is
    cut off there counts as unreadable.
    """
    counts: dict[str, int] = {}
    examples: dict[str, tuple[str | None, str]] = {}
    lines = 0
    if key is not None and size > 0:
        for line in split_lines(store.iterate_range(key, 0, min(size, MOST_BYTES))):
            code, custom_id, message = _what(line)
            lines += 1
            counts[code] = counts.get(code, 0) + 1
            examples.setdefault(code, (custom_id, message))
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))[:most]
    groups = [
        ErrorGroup(code=code, count=count, custom_id=examples[code][0], message=examples[code][1])
        for code, count in ranked
    ]
    return TopErrors(groups=groups, lines=lines, is_whole=size <= MOST_BYTES)


def _what(line: bytes | None) -> tuple[str, str | None, str]:
    """Return the code, the custom_id and the message of an error line."""
    if line is None:
        return "unreadable line", None, "the line is longer than any that was written"
    try:
        told = _decode(line)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        return "unreadable line", None, one_line(str(error))
    if told.error is not None:
        return str(told.error.code or "unknown"), told.custom_id, one_line(told.error.message or "")
    if told.response is None:
        return "unknown", told.custom_id, ""
    status = f"HTTP {told.response.status_code}"
    try:
        body = _decode_body(told.response.body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return status, told.custom_id, one_line(bytes(told.response.body).decode(errors="replace"))
    refusal = None if body is None else body.error
    return status, told.custom_id, "" if refusal is None else one_line(refusal.message or str(refusal.code or ""))
