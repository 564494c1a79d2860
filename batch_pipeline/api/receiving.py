"""A file on its way in: `multipart/form-data` read as it comes, its file written to the store in parts.

Memory for one body: a block of a mebibyte, and a part of the store's (16 MiB) while it is sent. Nothing touches the
local disk. Killed, or left by the client, before the end: no object, only parts that the store's own lifecycle or
housekeeping removes.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field

from anyio import CancelScope, to_thread
from fastapi import Request
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from batch_pipeline.api.problems import RequestRefused
from batch_pipeline.store import ObjectStore
from batch_pipeline.store.multipart import MultipartWriter
from batch_pipeline.wire import codes

BLOCK_BYTES = 1024 * 1024
_MOST_PIECES = 1024
"""Of a block: each costs memory of its own, and a client may send bytes one by one."""
_MOST_FIELDS = 32
_MOST_FIELD_BYTES = 16 * 1024
_MOST_HEADER_BYTES = 8 * 1024


class Receiver:
    """Writes one object from blocks as they come; used from one coroutine. Beyond `most_bytes` nothing is kept."""

    def __init__(self, store: ObjectStore, key: str, most_bytes: int) -> None:
        self._store = store
        self._key = key
        self.most_bytes = most_bytes
        self._pieces: list[bytes] = []
        """As they came: a part of the object is the first place that they are copied to."""
        self._piece_bytes = 0
        self._writer: MultipartWriter | None = None
        self._hash = hashlib.sha256()
        self.size = 0

    @property
    def is_too_large(self) -> bool:
        """Whether more came than may."""
        return self.size > self.most_bytes

    @property
    def sha256(self) -> str:
        """The hash of the object, in hex; once it is finished."""
        return self._hash.hexdigest()

    async def write(self, data: bytes) -> None:
        """Take some bytes. Raises StoreError."""
        self.size += len(data)
        if self.is_too_large:
            self._pieces = []
            return
        self._pieces.append(data)
        self._piece_bytes += len(data)
        if self._piece_bytes >= BLOCK_BYTES or len(self._pieces) >= _MOST_PIECES:
            pieces, self._pieces, self._piece_bytes = self._pieces, [], 0
            await to_thread.run_sync(self._send, pieces)

    async def finish(self) -> None:
        """Make the object visible; nothing was before. Raises StoreError."""
        await to_thread.run_sync(self._complete)

    async def abandon(self) -> None:
        """Leave no object behind; also where the request is being cancelled."""
        with CancelScope(shield=True):
            await to_thread.run_sync(self._abort)

    def _send(self, pieces: list[bytes]) -> None:
        if self._writer is None:
            self._writer = self._store.multipart(self._key)
        for piece in pieces:
            self._hash.update(piece)
            self._writer.write(piece)

    def _complete(self) -> None:
        if self._writer is None:
            whole = b"".join(self._pieces)
            self._hash.update(whole)
            self._store.put(self._key, whole)
            return
        self._send(self._pieces)
        self._writer.complete()
        self._writer = None

    def _abort(self) -> None:
        self._pieces = []
        if self._writer is not None:
            writer, self._writer = self._writer, None
            writer.abort()


@dataclass
class Form:
    """What a form held: its fields, and the name of its file, whose bytes have gone to the receiver."""

    fields: dict[str, str] = field(default_factory=dict)
    filename: str | None = None


async def receive(request: Request, file_field: str, receiver: Receiver) -> Form:
    """Read a form with one file in the field `file_field`; its bytes go to `receiver`, which the caller finishes.

    Raises RequestRefused where the body is no such form, or where the file has more bytes than it may: that is said
    once the body is read, since a client that still sends would not hear it. Raises StoreError.
    """
    reader = _Reader(request, file_field)
    async for block in request.stream():
        for data in reader.feed(block):
            await receiver.write(data)
        if receiver.size > 2 * receiver.most_bytes + BLOCK_BYTES:
            break
    if receiver.is_too_large:
        raise RequestRefused(
            413, codes.FILE_TOO_LARGE, f"the file has more than {receiver.most_bytes} bytes; divide it"
        )
    reader.check_end()
    return reader.form


_LONGEST_BOUNDARY = 70
"""RFC 2046, 5.1.1."""


class _Reader:
    """Turns the body's bytes into fields and the file's bytes."""

    def __init__(self, request: Request, file_field: str) -> None:
        kind, options = parse_options_header(request.headers.get("content-type", ""))
        if kind != b"multipart/form-data" or b"boundary" not in options:
            raise _refused("send the file as multipart/form-data", None)
        self.form = Form()
        self._file_field = file_field
        boundary = options[b"boundary"]
        if not 1 <= len(boundary) <= _LONGEST_BOUNDARY:
            raise _refused(f"the boundary of multipart/form-data has 1 to {_LONGEST_BOUNDARY} characters", None)
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_header_field": self._header_name,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers_finished,
                "on_part_data": self._data,
                "on_part_end": self._end,
                "on_end": self._finish,
            },
        )
        self._file_data: list[bytes] = []
        self._headers: dict[str, str] = {}
        self._header = (b"", b"")
        self._header_bytes = 0
        self._name = ""
        self._is_file = False
        self._value = bytearray()
        self._is_whole = False

    def feed(self, block: bytes) -> list[bytes]:
        """Take a block of the body; return the file's bytes in it."""
        self._file_data = []
        try:
            self._parser.write(block)
        except FormParserError as error:
            raise _refused("the body is not well-formed multipart/form-data", None) from error
        return self._file_data

    def check_end(self) -> None:
        """Raise RequestRefused where the body has broken off, or had no file."""
        if not self._is_whole:
            raise _refused("the body breaks off before its last boundary; send it again", None)
        if self.form.filename is None:
            raise _refused(f"the form has no file in a field {self._file_field!r}", self._file_field)

    def _begin(self) -> None:
        self._headers = {}
        self._header = (b"", b"")
        self._header_bytes = 0
        self._value = bytearray()

    def _header_name(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._header = (self._header[0] + data[start:end], self._header[1])

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._count_header(end - start)
        self._header = (self._header[0], self._header[1] + data[start:end])

    def _count_header(self, size: int) -> None:
        self._header_bytes += size
        if self._header_bytes > _MOST_HEADER_BYTES:
            raise _refused(f"a part's headers have more than {_MOST_HEADER_BYTES} bytes", None)

    def _header_end(self) -> None:
        name, value = self._header
        # The parser of options wants every byte as one character; what the bytes mean is decided after it.
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")
        self._header = (b"", b"")

    def _headers_finished(self) -> None:
        _, options = parse_options_header(self._headers.get("content-disposition", ""))
        self._name = options.get(b"name", b"").decode("utf-8", "replace")
        self._is_file = self._name == self._file_field
        if self._is_file:
            if self.form.filename is not None:
                raise _refused("the form has two files; send one", self._file_field)
            self.form.filename = options.get(b"filename", b"").decode("utf-8", "replace")
        elif len(self.form.fields) >= _MOST_FIELDS:
            raise _refused(f"the form has more than {_MOST_FIELDS} fields", None)

    def _data(self, data: bytes, start: int, end: int) -> None:
        if self._is_file:
            self._file_data.append(data[start:end])
            return
        self._value += data[start:end]
        if len(self._value) > _MOST_FIELD_BYTES:
            raise _refused(f"the field has more than {_MOST_FIELD_BYTES} bytes", self._name[:60])

    def _end(self) -> None:
        if not self._is_file:
            self.form.fields[self._name] = self._value.decode("utf-8", "replace")

    def _finish(self) -> None:
        self._is_whole = True


def _refused(message: str, param: str | None) -> RequestRefused:
    return RequestRefused(400, codes.INVALID_REQUEST, message, param=param)
