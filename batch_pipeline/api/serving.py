"""`batch-pipeline serve`: the application in this process, until it is told to end."""

from __future__ import annotations

import asyncio
import socket

import uvicorn
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from batch_pipeline.api.app import create_app
from batch_pipeline.errors import OperatorError
from batch_pipeline.ledger import Ledger
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore

_GRACE_SECONDS = 20
_BACKLOG = 2048
_MOST_HEAD_BYTES = 64 * 1024
_TOO_LONG = "The head of the request is too long."
HEAD_SECONDS = 30.0
UNREAD_SECONDS = 300.0
"""For what a client still sends of a body after its answer: many read the answer only then."""
_KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep an idle connection (httpx, under both SDKs: 5 s): none is closed as it is used again."""


class BoundedHeads(HttpToolsProtocol):
    """Closes a connection whose request's head is too long, or not whole in time, or that goes on with a body which was
    answered already: anybody can open one, with no key.

    uvicorn bounds only how long a connection is idle between two requests. Its other parser (h11) bounds the size of a
    head, and costs a short request as much as all else does; of a body it makes more copies.
    """

    _waiting: asyncio.TimerHandle | None = None
    _head_bytes = 0
    """What came while the head was not whole."""
    _header_bytes = 0
    """Of headers that are whole, also of those behind a body."""
    _is_in_head = True
    _is_in_body = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._wait(HEAD_SECONDS)

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Wait on, from when the head began, until it is whole."""
        super().data_received(data)
        if self._is_in_head:
            self._head_bytes += len(data)
            if self._head_bytes > _MOST_HEAD_BYTES and not self.transport.is_closing():
                self.send_400_response(_TOO_LONG)
        is_answering = self.cycle is not None and not self.cycle.response_complete
        if is_answering:
            self._stop()
        else:
            self._wait(UNREAD_SECONDS if self._is_in_body else HEAD_SECONDS)

    def on_message_begin(self) -> None:
        """Begin to count."""
        super().on_message_begin()
        self._is_in_head = True
        self._head_bytes = self._header_bytes = 0

    def on_header(self, name: bytes, value: bytes) -> None:
        """Count a header. Raises ValueError for one too many, of which the parser makes an error that is answered."""
        self._header_bytes += len(name) + len(value)
        if self._header_bytes > _MOST_HEAD_BYTES:
            raise ValueError(_TOO_LONG)
        super().on_header(name, value)

    def on_headers_complete(self) -> None:
        """Count no more."""
        self._is_in_head = False
        self._is_in_body = True
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        """Take note that the next data is another request's, which has its own time."""
        self._is_in_body = False
        self._stop()
        super().on_message_complete()

    def _wait(self, seconds: float) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(seconds, self.timeout_keep_alive_handler)

    def _stop(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None


def serve(ledger: Ledger, store: ObjectStore, settings: Settings) -> None:
    """Serve until SIGTERM or Ctrl-C: then no new request is taken, and those under way have some seconds to end.

    Raises OperatorError where the address cannot be listened on.
    """
    listening = _listen(settings.api.host, settings.api.port)
    with listening:
        uvicorn.Server(configured(ledger, store, settings)).run(sockets=[listening])


def configured(ledger: Ledger, store: ObjectStore, settings: Settings) -> uvicorn.Config:
    """Return uvicorn's configuration of the service."""
    return uvicorn.Config(
        create_app(ledger, store, settings),
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=_KEEP_ALIVE_SECONDS,
        http=BoundedHeads,
        ws="none",
        timeout_graceful_shutdown=_GRACE_SECONDS,
    )


def _listen(host: str, port: int) -> socket.socket:
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise OperatorError(
            f"api.host and api.port: {host}:{port} cannot be listened on ({error.strerror or error}); "
            "end the program that has it, or choose another port"
        ) from error
