"""Requests to one engine: bytes in, bytes out, with as few copies and parses as possible."""

from __future__ import annotations

import contextlib
import email.utils
import time
from types import TracebackType
from typing import Self

import aiohttp
import msgspec
import yarl

from batch_pipeline.errors import BatchPipelineError
from batch_pipeline.models import MESSAGES
from batch_pipeline.plain import one_line
from batch_pipeline.wire.nesting import is_nested_beyond
from batch_pipeline.wire.usage import AnswerBody, ReportedUsage, tokens_of

_CONNECT_SECONDS = 10.0
# Shorter than any server's own (vLLM: 5 s), so that no request goes out on a connection that is being closed.
_KEEPALIVE_SECONDS = 2.0
MAX_ANSWER_BYTES = 16 * 1024 * 1024
PRIORITY_HEADER = "X-Vllm-Priority"
_HEADERS = {"Content-Type": "application/json"}


class NoAnswer(BatchPipelineError):
    """The engine gave no answer to a request."""


class ConnectionLost(NoAnswer):
    """Nobody listens, or the connection broke. `sent` tells whether the request may have reached the engine."""

    def __init__(self, message: str, *, sent: bool) -> None:
        super().__init__(message)
        self.sent = sent


class AnswerTimeout(NoAnswer):
    """No answer within the time that a request may take."""


class AnswerTooLarge(NoAnswer):
    """The answer has more bytes than one may have; it was not read to its end."""


class Answer(msgspec.Struct, frozen=True, gc=False):
    """What the engine answered. `body` is one line of JSON: one that says so where the engine sent something else."""

    status: int
    body: bytes
    is_json: bool
    request_id: str
    """The id under which it ran there; empty where the answer names none."""
    input_tokens: int
    cached_tokens: int
    """Of the input tokens, those taken from the prefix cache."""
    output_tokens: int
    retry_after_seconds: float | None
    message: str
    """What the body says is wrong, shortened; empty where nothing is."""
    state: str = ""
    """The `status` of a response (/v1/responses), for instance `completed`; empty where the body has none."""


class _Envelope(msgspec.Struct, gc=False):
    id: str | None = None
    usage: ReportedUsage | None = None
    status: str | None = None


class _Id(msgspec.Struct, gc=False):
    id: str | None = None


class _State(msgspec.Struct, gc=False):
    status: str | None = None


class _Error(msgspec.Struct, frozen=True, gc=False):
    message: str = ""


class _Refusal(msgspec.Struct, gc=False):
    error: _Error = _Error()


_decode_envelope = msgspec.json.Decoder(_Envelope).decode
_decode_refusal = msgspec.json.Decoder(_Refusal).decode
_decode_body = msgspec.json.Decoder(AnswerBody).decode
_decode_id = msgspec.json.Decoder(_Id).decode
_decode_state = msgspec.json.Decoder(_State).decode
_decode_any = msgspec.json.Decoder(msgspec.Raw).decode
MAX_DEPTH = 200
"""Deepest nesting of an answer: whoever reads it later, inside of a result line, can do so wherever it stands."""
_SHOWN_CHARACTERS = 300


class EngineClient:
    """A client of the engine at `url`. Use it in one event loop, and close it. The caller bounds what is in flight."""

    def __init__(self, url: str, max_answer_bytes: int = MAX_ANSWER_BYTES) -> None:
        self._base = url.rstrip("/")
        self._max_answer_bytes = max_answer_bytes
        self._urls: dict[str, yarl.URL] = {}
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEPALIVE_SECONDS),
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept-Encoding"),
            headers=_HEADERS,
        )

    async def complete(self, endpoint: str, body: bytes, timeout_seconds: float, priority: int | None = None) -> Answer:
        """Send one request body to an endpoint, for instance `/v1/completions`, and return the answer of any status.

        `priority` is vLLM's: those with a larger one run later. Only for engines that take it.
        Raises ConnectionLost or AnswerTimeout where there is none, AnswerTooLarge where it does not end.
        """
        url = self._urls.get(endpoint)
        if url is None:
            url = self._urls[endpoint] = yarl.URL(self._base + endpoint)
        headers = None
        if priority is not None:
            headers = {PRIORITY_HEADER: str(priority)}
            # At /v1/messages vLLM knows the header only, at /v1/embeddings (and in older versions) the field only.
            body = body if endpoint == MESSAGES else with_member(body, b'"priority":%d' % priority)
        try:
            timeout = aiohttp.ClientTimeout(total=timeout_seconds, sock_connect=_CONNECT_SECONDS)
            async with self._session.post(
                url, data=body, headers=headers, allow_redirects=False, timeout=timeout
            ) as response:
                return _answer(response, await self._read(response))
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise ConnectionLost(f"nobody answers at {self._base}: {error}", sent=False) from error
        except TimeoutError as error:
            raise AnswerTimeout(f"no answer within {timeout_seconds:.0f} s") from error
        except aiohttp.ClientError as error:
            raise ConnectionLost(f"the connection broke: {error or type(error).__name__}", sent=True) from error

    async def _read(self, response: aiohttp.ClientResponse) -> bytes:
        """Return the body. Memory: one that is too large is given up, and its connection closed, once that is known."""
        most = self._max_answer_bytes
        length = response.content_length
        if length is not None and length <= most:
            return await response.read()
        pieces, size = [], 0
        if length is None:
            async for piece in response.content.iter_any():
                size += len(piece)
                if size > most:
                    break
                pieces.append(piece)
            else:
                return b"".join(pieces)
        response.close()
        raise AnswerTooLarge(f"the engine's answer has more than {most} bytes")

    async def close(self) -> None:
        """Close all connections; requests in flight end with ConnectionLost."""
        await self._session.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()


def with_member(body: bytes, member: bytes) -> bytes:
    """Return a JSON object with one more member at its end."""
    start = body.rstrip()[:-1]
    return b"%s%s%s}" % (start, b"" if start.rstrip().endswith(b"{") else b",", member)


def _answer(response: aiohttp.ClientResponse, raw: bytes) -> Answer:
    status = response.status
    try:
        request_id, usage, state = _read_envelope(raw)
        if is_nested_beyond(raw, MAX_DEPTH):
            return _not_json(response, raw)
        if not raw.isascii():
            raw.decode()
    except (msgspec.DecodeError, RecursionError, UnicodeDecodeError):
        return _not_json(response, raw)
    tokens = tokens_of(usage)
    return Answer(
        status=status,
        # A line of a file must be one line: JSON may hold line breaks between its tokens.
        body=msgspec.json.format(raw, indent=-1) if b"\n" in raw or b"\r" in raw else raw,
        is_json=True,
        request_id=one_line(request_id or "", _SHOWN_CHARACTERS) or _request_id(response),
        input_tokens=tokens.input,
        cached_tokens=tokens.cached,
        output_tokens=tokens.output,
        retry_after_seconds=None if status < 300 else _retry_after(response),
        message="" if status < 300 else _message(raw),
        state=one_line(state, _SHOWN_CHARACTERS) if state else "",
    )


def _read_envelope(raw: bytes) -> tuple[str | None, ReportedUsage | None, str | None]:
    """Return the id, the usage and the status of an answer, each as far as it is told. Raises DecodeError where it is
    no JSON.
    """
    try:
        envelope = _decode_envelope(raw)
    except msgspec.ValidationError:
        _decode_any(raw)  # what follows a wrong field was not looked at: it may be anything
        request_id = usage = state = None
        with contextlib.suppress(msgspec.ValidationError):
            request_id = _decode_id(raw).id
        with contextlib.suppress(msgspec.ValidationError):
            usage = _decode_body(raw).usage
        with contextlib.suppress(msgspec.ValidationError):
            state = _decode_state(raw).status
        return request_id, usage, state
    return envelope.id, envelope.usage, envelope.status


def _not_json(response: aiohttp.ClientResponse, raw: bytes) -> Answer:
    text = one_line(raw[: 4 * _SHOWN_CHARACTERS].decode(errors="replace"), _SHOWN_CHARACTERS)
    error = {"message": text, "type": "not_json", "param": None, "code": response.status}
    return Answer(
        status=response.status,
        body=msgspec.json.encode({"error": error}),
        is_json=False,
        request_id=_request_id(response),
        input_tokens=0,
        cached_tokens=0,
        output_tokens=0,
        retry_after_seconds=_retry_after(response),
        message=f"an answer that is not JSON: {text}",
    )


def _message(raw: bytes) -> str:
    try:
        said = _decode_refusal(raw).error.message
    except msgspec.DecodeError:
        said = raw[: 4 * _SHOWN_CHARACTERS].decode(errors="replace")
    return one_line(said, _SHOWN_CHARACTERS)


def _request_id(response: aiohttp.ClientResponse) -> str:
    return one_line(response.headers.get("X-Request-Id", ""), _SHOWN_CHARACTERS)


def _retry_after(response: aiohttp.ClientResponse) -> float | None:
    """Return the pause that the answer asks for (RFC 9110, 10.2.3: seconds or a date), None where it asks for none."""
    value = response.headers.get("Retry-After", "").strip()
    if value.isascii() and value.isdigit():
        return float(value)
    try:
        at = email.utils.parsedate_to_datetime(value)
    except ValueError:
        return None
    return max(0.0, at.timestamp() - time.time())
