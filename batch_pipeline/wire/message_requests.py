"""The body of Anthropic's `POST /v1/messages/batches`, taken apart as it comes: `{"requests": [{custom_id, params}]}`.

Only one request is held as a whole, whatever the size of the body. Each becomes a line of a batch file. What is read is
exactly JSON: the requests are decoded one by one, and what stands around their list once its end is known.
"""

from __future__ import annotations

import re

import msgspec

from batch_pipeline.models import MESSAGES

CUSTOM_ID = re.compile(r"[a-zA-Z0-9_-]{1,64}")
MOST_REQUESTS = 100_000
MOST_BYTES = 256 * 1024 * 1024
_MOST_AROUND_BYTES = 64 * 1024
"""Of everything in the body but the list's requests."""
_TOKEN = re.compile(rb'"(?:[^"\\]++|\\.)*+("?)|[{}\[\],]', re.DOTALL)
_KEY = re.compile(rb'"(?:[^"\\]++|\\.)*+("?)|[{}\[\]:,]', re.DOTALL)
_SPACE = b" \t\n\r"
_LINE = b'{"custom_id":%%s,"method":"POST","url":"%s","body":%%s}\n' % MESSAGES.encode()


class BadRequests(Exception):
    """The body is not as it has to be; the message says where and what to mend."""


def _is_requests(key: bytes) -> bool:
    try:
        return bool(msgspec.json.decode(key) == "requests")
    except (msgspec.DecodeError, UnicodeDecodeError):
        return False


class _Entry(msgspec.Struct):
    custom_id: str
    params: msgspec.Raw


class _Around(msgspec.Struct):
    requests: list[int]


_entries = msgspec.json.Decoder(_Entry)
_around = msgspec.json.Decoder(_Around)
_encode = msgspec.json.Encoder().encode


class RequestReader:
    """Takes pieces of a body and gives lines of a batch file. Memory: one request, one piece, and the custom_ids."""

    def __init__(self, most_requests: int, most_line_bytes: int) -> None:
        self._most_requests = most_requests
        self._most_line_bytes = most_line_bytes
        self._seen: dict[str, int] = {}
        self._buffer = b""
        self._at = 0
        """Up to where the buffer was looked at."""
        self._depth = 0
        self._head: bytes | None = None
        """What stands before the list, once it is known."""
        self._has_ended = False
        self._expects_comma = False

    @property
    def count(self) -> int:
        """How many requests there were so far."""
        return len(self._seen)

    def feed(self, piece: bytes) -> bytes:
        """Return the lines of the requests that are whole now. Raises BadRequests."""
        self._buffer += piece
        if self._head is None:
            self._find_list()
        lines = [] if self._head is None or self._has_ended else self._take()
        is_around = self._head is None or self._has_ended
        if is_around and len(self._buffer) > _MOST_AROUND_BYTES:
            raise BadRequests(f"requests: more than {_MOST_AROUND_BYTES} bytes stand outside of the list")
        return b"".join(lines)

    def finish(self) -> None:
        """Check that the body is whole, and has requests. Raises BadRequests."""
        if self._head is None:
            try:
                msgspec.json.decode(self._buffer)
            except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise BadRequests(f"the body is not valid JSON: {error}") from None
            raise BadRequests("requests: Field required: a list of objects with custom_id and params")
        if not self._has_ended:
            raise BadRequests("the body is not valid JSON: it ends within the list of requests")
        try:
            around = _around.decode(self._head + b"[-1]" + self._buffer)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequests(f"the body is not valid JSON: {error}") from None
        if around.requests != [-1]:
            raise BadRequests("requests: it is given twice")
        if not self._seen:
            raise BadRequests("requests: List should have at least 1 item")

    def _find_list(self) -> None:
        """Look for the bracket that opens the list of the key `requests` of the outermost object."""
        if self._buffer.lstrip(_SPACE)[:1] not in (b"", b"{"):
            raise BadRequests("the body must be an object with a list of requests")
        depth = 0
        key = before = b""
        for match in _KEY.finditer(self._buffer, 0, _MOST_AROUND_BYTES + 1):
            token = match.group()
            if token[:1] == b'"':
                if not match[1]:
                    return
                if depth == 1 and before in (b"{", b","):
                    key = token
            elif token == b"[" and before == b":" and depth == 1 and _is_requests(key):
                self._head = self._buffer[: match.start()]
                self._buffer = self._buffer[match.end() :]
                return
            depth += (token in (b"{", b"[")) - (token in (b"}", b"]"))
            before = token

    def _take(self) -> list[bytes]:
        """Return the lines of whole requests at the beginning of the buffer, and forget these."""
        lines = []
        start = 0
        for match in _TOKEN.finditer(self._buffer, self._at):
            token = match.group()
            if token[:1] == b'"':
                if not match[1]:
                    break
            elif token in (b"{", b"["):
                self._depth += 1
            elif token == b"," and self._depth == 0:
                lines.append(self._line(start, match.start()))
                start = match.end()
                self._expects_comma = True
            elif token in (b"}", b"]"):
                if self._depth == 0:
                    if token == b"}":
                        raise BadRequests("the body is not valid JSON: a } where the list of requests should end")
                    if self._expects_comma or self._buffer[start : match.start()].strip(_SPACE):
                        lines.append(self._line(start, match.start()))
                    self._buffer = self._buffer[match.end() :]
                    self._has_ended = True
                    return lines
                self._depth -= 1
            self._at = match.end()
        self._buffer = self._buffer[start:]
        self._at -= start
        if len(self._buffer) > self._most_line_bytes + _MOST_AROUND_BYTES:
            raise BadRequests(self._too_long())
        return lines

    def _line(self, start: int, end: int) -> bytes:
        raw = self._buffer[start:end].strip(_SPACE)
        where = f"requests.{self.count}"
        try:
            if not raw.isascii():
                raw.decode()
            entry = _entries.decode(raw)
        except msgspec.ValidationError as error:
            raise BadRequests(f"{where}{_plain(error)}") from None
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise BadRequests(f"{where}: not valid JSON: {error}") from None
        custom_id = entry.custom_id
        if not CUSTOM_ID.fullmatch(custom_id):
            raise BadRequests(f"{where}.custom_id: String should match pattern '^[a-zA-Z0-9_-]{{1,64}}$'")
        if custom_id in self._seen:
            first = self._seen[custom_id]
            raise BadRequests(f"{where}.custom_id: it is that of requests.{first}: give each request an id of its own")
        if self.count >= self._most_requests:
            raise BadRequests(f"requests: List should have at most {self._most_requests} items")
        params = bytes(entry.params)
        if b"\n" in params or b"\r" in params:
            params = msgspec.json.format(params, indent=-1)
        line = _LINE % (_encode(custom_id), params)
        if len(line) > self._most_line_bytes:
            raise BadRequests(self._too_long())
        self._seen[custom_id] = self.count
        return line

    def _too_long(self) -> str:
        return f"requests.{self.count}: it has more than {self._most_line_bytes} bytes; shorten it"


def _plain(error: msgspec.ValidationError) -> str:
    missing = re.match(r"Object missing required field `(\w+)`", str(error))
    return f".{missing[1]}: Field required" if missing else f": {error}"
