"""Loaded by vLLM's own server, by its `--middleware`: a shorter way for the plain requests of a worker.

A chat or a completion that is not streamed goes from the server's socket straight to vLLM's own handler, past FastAPI's
routes, dependencies and validation, which cost more processor time than the handler itself: with a small model, or with
few cores, that is what bounds an engine (docs/performance.md). It is the same handler, with the same request and the
same answer. Whatever is not plain goes the usual way: other endpoints and headers, streams, a server with an API key,
what cannot be parsed, what the handler raises (so that vLLM words the error). The server's own count of HTTP requests
does not see these requests; the engine's metrics do.

Made for the pinned vLLM; where another has its handlers elsewhere, everything goes the usual way, and the log says so.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
import os
from typing import Any, NamedTuple

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_PROTOCOLS = "vllm.entrypoints.openai.{0}.protocol"
_KNOWN_HEADERS = frozenset(
    (b"host", b"accept", b"accept-encoding", b"user-agent", b"content-type", b"content-length", b"x-vllm-priority")
)
_JSON = (b"content-type", b"application/json")
log = logging.getLogger(__name__)


class _Way(NamedTuple):
    """One endpoint: how its requests are parsed, and where the server's state has its handler."""

    request: Any
    serving: str
    method: str


class Shortcut:
    """ASGI middleware. Cost: one parse of the body and one of the answer, both outside Python's own code."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app
        self._ways = _ways()
        self._allowed: bool | None = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, or let the server do it."""
        way = self._way(scope)
        if way is None:
            await self._app(scope, receive, send)
            return
        body, whole = await _read(receive)
        if not whole:
            return  # the client has gone, and nothing was begun
        answer, gone = await _answer(way, scope, body, receive)
        if gone:
            return
        if answer is None:
            await self._app(scope, _replay(body, receive), send)
            return
        status, content = answer
        headers = [_JSON, (b"content-length", b"%d" % len(content))]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    def _way(self, scope: Scope) -> _Way | None:
        if scope["type"] != "http" or scope["method"] != "POST" or scope["query_string"]:
            return None
        way = self._ways.get(scope["path"])
        if way is None or not _is_plain(scope["headers"]):
            return None
        if self._allowed is None:
            self._allowed = _is_allowed(scope["app"].state)
        return way if self._allowed else None


def _ways() -> dict[str, _Way]:
    try:
        chat = importlib.import_module(_PROTOCOLS.format("chat_completion")).ChatCompletionRequest
        text = importlib.import_module(_PROTOCOLS.format("completion")).CompletionRequest
    except (ImportError, AttributeError) as error:
        log.warning("the shorter way was made for another vLLM: every request goes its own (%s)", error)
        return {}
    return {
        "/v1/chat/completions": _Way(chat, "openai_serving_chat", "create_chat_completion"),
        "/v1/completions": _Way(text, "openai_serving_completion", "create_completion"),
    }


def _is_allowed(state: Any) -> bool:
    """Whether the server is one that asks for nothing beside the request itself."""
    args = state.args
    return not (
        args.api_key
        or os.environ.get("VLLM_API_KEY")
        or args.enable_request_id_headers
        or getattr(state, "enable_server_load_tracking", False)
    )


def _is_plain(headers: list[tuple[bytes, bytes]]) -> bool:
    return _JSON in headers and all(name in _KNOWN_HEADERS for name, _ in headers)


async def _read(receive: Receive) -> tuple[bytes, bool]:
    """Return the body, and whether it came whole."""
    pieces = []
    while True:
        message = await receive()
        if message["type"] == "http.disconnect":
            return b"", False
        pieces.append(message.get("body", b""))
        if not message.get("more_body", False):
            return b"".join(pieces), True


async def _answer(way: _Way, scope: Scope, body: bytes, receive: Receive) -> tuple[tuple[int, bytes] | None, bool]:
    """Return status and body of the answer, None where the server is to give it; and whether the client has gone, whose
    request is aborted then, as the server does.
    """
    work = asyncio.ensure_future(_content(way, Request(scope), body))
    gone = asyncio.ensure_future(_disconnected(receive))
    try:
        await asyncio.wait([work, gone], return_when=asyncio.FIRST_COMPLETED)
    finally:
        gone.cancel()
        left = not work.done()
        work.cancel()
    if left:
        await asyncio.wait([work])
        return None, True
    return work.result(), False


async def _content(way: _Way, raw: Request, body: bytes) -> tuple[int, bytes] | None:
    try:
        request = way.request.model_validate_json(body)
        if request.stream:
            return None
        answer = await getattr(getattr(raw.app.state, way.serving), way.method)(request, raw)
        error = getattr(answer, "error", None)
        return (200 if error is None else error.code), answer.model_dump_json().encode()
    except Exception as error:  # noqa: BLE001 - whatever it is, the server's own way raises it again, and answers it
        log.debug("left to the server: %r", error)
        return None


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def _replay(body: bytes, receive: Receive) -> Receive:
    """Return what gives the body once more, and then what else comes."""
    first: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]

    async def again() -> Message:
        return first.pop() if first else await receive()

    return again
