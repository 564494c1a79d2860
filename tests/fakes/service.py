"""The HTTP service in a thread of this process, on a free port of loopback, for real clients."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import uvicorn
from fastapi import FastAPI

from batch_pipeline.api import serving
from batch_pipeline.ledger import Ledger
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore

_SECONDS = 30


class Running(NamedTuple):
    """A service that answers."""

    url: str
    """Without `/v1`."""
    app: FastAPI


@contextmanager
def running(ledger: Ledger, store: ObjectStore, settings: Settings, *, port: int = 0) -> Iterator[Running]:
    """Serve until the block ends, on a free port unless one is named."""
    listening = socket.create_server(("127.0.0.1", port), backlog=512)
    config = serving.configured(ledger, store, settings)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listening]}, daemon=True)
    thread.start()
    started = threading.Event()
    while not server.started:
        assert thread.is_alive(), "the service ended at its start"
        started.wait(0.01)
    try:
        assert isinstance(config.app, FastAPI)
        yield Running(f"http://127.0.0.1:{listening.getsockname()[1]}", config.app)
    finally:
        server.should_exit = True
        thread.join(_SECONDS)
        listening.close()


def new_key(ledger: Ledger, customer: str = "acme") -> str:
    """Return a key of a customer, which is added where it is missing."""
    ledger.customers.add(customer)
    return ledger.customers.add_key(customer).secret
