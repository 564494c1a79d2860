"""An engine that answers anything at all: every request still has one line of valid JSON, and the counts are right."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import BatchStatus
from batch_pipeline.results.merge import merge
from batch_pipeline.results.verify import verify
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore
from tests.fakes.batches import MODEL, chat_request, make_batch
from tests.fakes.workers import attached, make_worker, quick

MOST = 256 * 1024
GOOD = {"prompt_tokens": 5, "completion_tokens": 7, "prompt_tokens_details": {"cached_tokens": 2}}


def usage(**changed: Any) -> bytes:
    """An answer whose usage has these fields changed."""
    return json.dumps({"id": "x", "usage": {**GOOD, **changed}}).encode()


ANSWERS: list[tuple[bytes, str | None, tuple[int, int, int]]] = [
    (usage(), None, (5, 2, 7)),
    (usage(prompt_tokens=-5), None, (0, 0, 7)),
    (usage(completion_tokens=-(10**9)), None, (5, 2, 0)),
    (usage(completion_tokens=10**12), None, (5, 2, 0)),
    (usage(completion_tokens=10**30), None, (5, 2, 0)),
    (usage(prompt_tokens="many"), None, (0, 0, 0)),
    (usage(prompt_tokens=None), None, (0, 0, 7)),
    (usage(prompt_tokens_details={"cached_tokens": 99}), None, (5, 5, 7)),
    (usage(prompt_tokens_details={"cached_tokens": -1}), None, (5, 0, 7)),
    (usage(prompt_tokens_details=[]), None, (0, 0, 0)),
    (b'{"id": 5, "usage": {"prompt_tokens": 3, "completion_tokens": 4}}', None, (3, 0, 4)),
    (b'{"id": "\\u001b]0;x\\u0007\\u202e", "usage": null}', None, (0, 0, 0)),
    (b'{"usage": {"prompt_tokens": 1}, "usage": {"prompt_tokens": 2}}', None, (2, 0, 0)),
    (b'{\n "a":\r\n [1,\n 2]\n}\n', None, (0, 0, 0)),
    (b'[1, "two"]', None, (0, 0, 0)),
    (b"null", None, (0, 0, 0)),
    (b'"text \\u2028 \\u0000"', None, (0, 0, 0)),
    (b'{"n": 1e999, "m": -0.0}', None, (0, 0, 0)),
    ('{"text": "é\u2028\u0085"}'.encode(), None, (0, 0, 0)),
    (b'{"deep": ' + b"[" * 150 + b"]" * 150 + b"}", None, (0, 0, 0)),
    (b'{"id": 5, oops', "engine_error", (0, 0, 0)),
    (b'{"id": 5} {"id": 6}', "engine_error", (0, 0, 0)),
    (b'{"id": "x"}\n{"id": "y"}\n', "engine_error", (0, 0, 0)),
    (b'{"text": "\xff\xfe"}', "engine_error", (0, 0, 0)),
    (b'{"id": 5, "text": "\xc3\x28"}', "engine_error", (0, 0, 0)),
    (b'{"text": "a\nb"}', "engine_error", (0, 0, 0)),
    (b'{"text": NaN}', "engine_error", (0, 0, 0)),
    (b"", "engine_error", (0, 0, 0)),
    (b"<html>\x1b[31mnot JSON</html>", "engine_error", (0, 0, 0)),
    (b'{"deep": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "engine_error", (0, 0, 0)),
    (b'{"text": "' + b"x" * (MOST - 20) + b'"}', None, (0, 0, 0)),
    (b'{"text": "' + b"x" * MOST + b'"}', "answer_too_large", (0, 0, 0)),
    (b'{"chunked": "' + b"x" * MOST + b'"}', "answer_too_large", (0, 0, 0)),
    (b"ENDLESS", "answer_too_large", (0, 0, 0)),
]
"""What the engine sends; the code of the error that it becomes, or None; input, cached and output tokens that count."""


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Nothing: the worker closes connections of answers that it does not want."""


class _Handler(BaseHTTPRequestHandler):
    """Speaks just enough of the protocol to be taken for an engine."""

    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        card = {"id": MODEL, "object": "model", "max_model_len": 2048}
        answers = {"/v1/models": {"object": "list", "data": [card]}, "/version": {"version": "\x1b[2J1.0"}}
        self._send(json.dumps(answers.get(self.path, {})).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        answer = ANSWERS[int(body["messages"][0]["content"])][0]
        if answer == b"ENDLESS":
            self._endless()
        elif answer.startswith(b'{"chunked"'):
            self._chunked(answer)
        else:
            self._send(answer)

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""

    def _send(self, answer: bytes) -> None:
        self.send_response(200)
        self.send_header("X-Request-Id", "id-of-the-header")
        self.send_header("Content-Length", str(len(answer)))
        self.end_headers()
        self.wfile.write(answer)

    def _chunked(self, answer: bytes) -> None:
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        self.close_connection = True
        try:
            for start in range(0, len(answer), 4096):
                piece = answer[start : start + 4096]
                self.wfile.write(b"%x\r\n%s\r\n" % (len(piece), piece))
            self.wfile.write(b"0\r\n\r\n")
        except OSError:
            return  # the worker has had enough

    def _endless(self) -> None:
        self.send_response(200)
        self.send_header("Connection", "close")
        self.end_headers()
        self.close_connection = True
        try:
            while True:
                self.wfile.write(b"[" * 65_536)
        except OSError:
            return  # the worker has had enough


@contextmanager
def hostile_engine() -> Iterator[str]:
    """A server that answers as `ANSWERS` says; yields its URL."""
    server = _Server(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_whatever_the_engine_answers_each_request_has_one_valid_line_and_the_counts_agree(
    sqlite_url: str, store: ObjectStore, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("batch_pipeline.worker.runner.pause_seconds", lambda *_a, **_k: 0.02)
    monkeypatch.setattr("batch_pipeline.worker.gate.pause_seconds", lambda *_a, **_k: 0.02)
    ledger = Ledger.open(sqlite_url)
    batch = make_batch(ledger, store, [[chat_request(index, str(index)) for index in range(len(ANSWERS))]])
    with hostile_engine() as url:
        make_worker(ledger, store, quick(settings, max_answer_bytes=MOST), attached(url)).run()
    assert ledger.batches.get(batch.batch_id).status is BatchStatus.FINALIZING
    merge(batch.batch_id, ledger=ledger, store=store, settings=settings, run_id=None)
    proof = verify(batch.batch_id, ledger=ledger, store=store)
    assert proof.holds, proof.problems
    final = ledger.batches.get(batch.batch_id)
    found = {}
    for key in (final.output_key, final.error_key):
        data = store.get(str(key))
        for line in data.decode().split("\n")[:-1]:
            result = json.loads(line)
            found[int(result["custom_id"].removeprefix("request-"))] = result
    assert sorted(found) == list(range(len(ANSWERS)))
    for index, (answer, code, _) in enumerate(ANSWERS):
        assert (found[index]["error"] or {}).get("code") == code, (answer[:80], found[index])
        if code is None:
            assert found[index]["response"]["body"] == json.loads(answer)
            assert found[index]["response"]["request_id"].isprintable()
        else:
            assert found[index]["error"]["message"].isprintable()
    sums = tuple(sum(tokens[column] for _, code, tokens in ANSWERS if code is None) for column in range(3))
    assert (final.input_tokens, final.cached_tokens, final.output_tokens) == sums
    ledger.close()
