"""`batch-pipeline serve`: the application in this process, until it is told to end."""

from __future__ import annotations

import socket

import uvicorn

from batch_pipeline.api.app import create_app
from batch_pipeline.errors import OperatorError
from batch_pipeline.ledger import Ledger
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore

_GRACE_SECONDS = 20
_BACKLOG = 2048
_MOST_HEAD_BYTES = 64 * 1024
_KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep an idle connection (httpx, under both SDKs: 5 s): none is closed as it is used again."""


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
        # The one of uvicorn's parsers that bounds the head of a request: anybody can send one, with no key.
        http="h11",
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
