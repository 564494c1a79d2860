"""Somebody else's HTTP server on loopback, to which webhooks and alarms are sent."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import openai


class Receiver:
    """A server on loopback; answers with `answers` in turn, and then with 200."""

    def __init__(self, answers: list[int]) -> None:
        self.answers = answers
        self.got: list[tuple[dict[str, str], bytes]] = []
        self.came = threading.Semaphore(0)
        self.url = ""

    def events(self, secret: str) -> list[Any]:
        """What came, verified and parsed by OpenAI's SDK."""
        client = openai.OpenAI(api_key="none", webhook_secret=secret)
        return [client.webhooks.unwrap(body, headers) for headers, body in self.got]


@contextmanager
def receiver(*answers: int) -> Iterator[Receiver]:
    """A receiver that runs until the block ends."""
    made = Receiver(list(answers))

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            made.got.append(({name.lower(): value for name, value in self.headers.items()}, body))
            status = made.answers.pop(0) if made.answers else 200
            self.send_response(status)
            self.send_header("Location", f"{made.url}elsewhere")
            self.send_header("Content-Length", "0")
            self.end_headers()
            made.came.release()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    made.url = f"http://127.0.0.1:{server.server_port}/"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    yield made
    server.shutdown()
    server.server_close()
