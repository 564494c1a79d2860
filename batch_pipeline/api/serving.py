"""`batch-pipeline serve`: the application in this process, until it is told to end."""

from __future__ import annotations

import asyncio
import socket

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from batch_pipeline.api.app import create_app
from batch_pipeline.errors import OperatorError
from batch_pipeline.ledger import Ledger
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore

_GRACE_SECONDS = 20
_BACKLOG = 2048
_MOST_HEAD_BYTES = 64 * 1024
HEAD_SECONDS = 30.0
_KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep an idle connection (httpx, under both SDKs: 5 s): none is closed as it is used again."""


class BoundedHeads(H11Protocol):
    """Closes a connection whose request's head is not whole in time: anybody can open one, with no key.

    uvicorn bounds only how long a connection is idle between two requests.
    """

    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Begin to wait for the first head."""
        super().connection_made(transport)
        self._wait()

    def connection_lost(self, exc: Exception | None) -> None:
        """Wait no more."""
        self._stop()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Wait on, from when the head began, until it is whole."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._wait()
        else:
            self._stop()

    def _wait(self) -> None:
        if self._waiting is None:
            self._waiting = self.loop.call_later(HEAD_SECONDS, self.timeout_keep_alive_handler)

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
        # The one of uvicorn's parsers that bounds the size of a request's head: anybody can send one, with no key.
        http=BoundedHeads,
        h11_max_incomplete_event_size=_MOST_HEAD_BYTES,
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
