"""Servers of this machine's loopback at another of its addresses: for pods of a cluster, for the time of a test."""

from __future__ import annotations

import socket
import socketserver
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from urllib.parse import urlsplit

from batch_pipeline.embedded.ports import LOOPBACK

_CHUNK = 65536


class _Server(socketserver.ThreadingTCPServer):
    daemon_threads = True
    block_on_close = False


@contextmanager
def served(host: str, handle: Callable[[socket.socket], None]) -> Iterator[int]:
    """Take connections at a free port of an address, each in a thread of its own; yields the port."""

    class Handler(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            handle(self.request)

    with _Server((host, 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        try:
            yield int(server.server_address[1])
        finally:
            server.shutdown()
            thread.join()


@contextmanager
def relayed(url: str, host: str) -> Iterator[str]:
    """Yield the URL of a server on the loopback as it reads at `host`, for as long as it is relayed there."""
    address = urlsplit(url)
    if host == LOOPBACK:
        yield url
        return
    assert address.port is not None
    target = (LOOPBACK, address.port)
    with served(host, lambda connection: _join(connection, target)) as port:
        yield url.replace(address.netloc.rpartition("@")[2], f"{host}:{port}")


def _join(connection: socket.socket, target: tuple[str, int]) -> None:
    """Pass on what either side says until both have ended."""
    with socket.create_connection(target) as other:
        back = threading.Thread(target=_pass_on, args=(other, connection), daemon=True)
        back.start()
        _pass_on(connection, other)
        back.join()


def _pass_on(source: socket.socket, target: socket.socket) -> None:
    try:
        while data := source.recv(_CHUNK):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)
    except OSError:
        # One side is gone: the other is to hear of it, as it would without a relay. It may know already.
        for side in (source, target):
            with suppress(OSError):
                side.shutdown(socket.SHUT_RDWR)
