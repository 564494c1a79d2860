"""Parameters that several routes take, checked before anything is asked for with them."""

from __future__ import annotations

import re

from batch_pipeline.api.problems import RequestRefused
from batch_pipeline.errors import NotFound
from batch_pipeline.plain import printable
from batch_pipeline.wire import codes

MAX_IDEMPOTENCY_KEY_CHARACTERS = 256
_ID = re.compile(r"[A-Za-z0-9_-]{1,64}")
_MOST_NAME_CHARACTERS = 255


def known_id(kind: str, text: str) -> str:
    """Return an id that may be of something. Raises NotFound: no database has to see any other text."""
    if not _ID.fullmatch(text):
        raise NotFound(f"no {kind} {printable(text[:80], kept='')}")
    return text


def idempotency_key(text: str | None) -> str | None:
    """Return the key of the header, if there is one. Raises RequestRefused where it cannot be kept."""
    if text is None:
        return None
    if not 1 <= len(text) <= MAX_IDEMPOTENCY_KEY_CHARACTERS or not text.isprintable():
        raise RequestRefused(
            400,
            codes.INVALID_OPTION,
            f"Idempotency-Key: give it 1 to {MAX_IDEMPOTENCY_KEY_CHARACTERS} printable characters",
            param="Idempotency-Key",
        )
    return text


def filename(text: str | None, default: str) -> str:
    """Return a name to show for a file: its last part, printable, not too long."""
    name = printable(re.split(r"[/\\]", text or "")[-1], kept="")[:_MOST_NAME_CHARACTERS]
    return name or default


def purpose(text: str | None) -> str:
    """Return the purpose of an upload. Raises RequestRefused for any but `batch`: nothing else is served here."""
    if text != "batch":
        raise RequestRefused(
            400,
            codes.INVALID_OPTION,
            "purpose: this service takes files with the purpose 'batch' only",
            param="purpose",
        )
    return text


def file_lifetime(fields: dict[str, str]) -> int | None:
    """Return the seconds of a form's `expires_after`, if it has one. Raises RequestRefused."""
    seconds = fields.get("expires_after[seconds]")
    anchor = fields.get("expires_after[anchor]")
    if seconds is None and anchor is None:
        return None
    if anchor != "created_at" or seconds is None or not re.fullmatch(r"[0-9]{4,7}", seconds):
        raise _lifetime()
    if not 3600 <= int(seconds) <= 2_592_000:
        raise _lifetime()
    return int(seconds)


def _lifetime() -> RequestRefused:
    return RequestRefused(
        400,
        codes.INVALID_OPTION,
        "expires_after: give the anchor 'created_at' and 3600 to 2592000 seconds",
        param="expires_after",
    )


class Range:
    """A part of an object: `start` and `length` in bytes; `is_part` False where all of it is meant."""

    def __init__(self, start: int, length: int, *, is_part: bool) -> None:
        self.start = start
        self.length = length
        self.is_part = is_part


def byte_range(header: str | None, size: int) -> Range:
    """Return what a Range header asks for of an object of `size` bytes; all of it where it asks for several parts.

    (RFC 9110, 14.2: a server may ignore a Range that it does not understand.) Raises RequestRefused, 416, for a part
    that begins behind the end.
    """
    match = re.fullmatch(r"bytes=([0-9]{0,99})-([0-9]{0,99})", (header or "").replace(" ", ""))
    if match is None or match.group(0) == "bytes=-":
        return Range(0, size, is_part=False)
    first, last = match.groups()
    if not first:
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(size, int(last) + 1 if last else size)
        if last and int(last) < start:
            return Range(0, size, is_part=False)
    if start >= size or start >= end:
        raise RequestRefused(
            416, "range_not_satisfiable", f"the file has {size} bytes", headers={"Content-Range": f"bytes */{size}"}
        )
    return Range(start, end - start, is_part=True)
