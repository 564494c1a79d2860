"""What the HTTP service costs: polls of a status, lists, creations, and the upload of a large file.

    python -m benchmarks.api [--seconds 5] [--upload-megabytes 1000] [--database postgres]

Starts a SeaweedFS and a Postgres on loopback and `batch-pipeline serve` as operators start it, in a process of its own.
The client is this process: plain sockets that are kept alive, so that it costs little and is not counted. "Server" and
"database" are processor seconds of those processes (a SQLite's are the server's); requests a second depend on what else
the machine does, so the last column says how many one core could serve.
"""

from __future__ import annotations

import argparse
import json
import selectors
import socket
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import msgspec
import psutil

from batch_pipeline import settings as configuration
from batch_pipeline.embedded import seaweedfs
from batch_pipeline.embedded.api_service import api_service
from batch_pipeline.embedded.ports import free_ports
from batch_pipeline.embedded.postgres import PostgresServer
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import WorkerState
from batch_pipeline.settings import CONFIG_VARIABLE
from benchmarks._processes import database_seconds
from tests.fakes.ledger_values import MODEL, finish, result_of, submitted

MEGABYTE = 1_000_000
LISTED = 20
_LINE = {
    "custom_id": "request-0",
    "method": "POST",
    "url": "/v1/chat/completions",
    "body": {"model": MODEL, "messages": [{"role": "user", "content": "What is a batch? " * 20}], "max_tokens": 8},
}


class Server(NamedTuple):
    """A service that answers, and whose processes are measured."""

    port: int
    process: psutil.Process
    key: str
    running: str
    """A batch in progress."""
    ended: str
    """A batch that is completed."""


class Asked(NamedTuple):
    """What some requests took."""

    requests: int
    seconds: float
    server_seconds: float
    database_seconds: float


def main() -> None:
    """Measure, and print two tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each kind of request")
    parser.add_argument("--upload-megabytes", type=int, default=1000)
    parser.add_argument("--database", choices=["sqlite", "postgres"], nargs="+", default=["postgres", "sqlite"])
    options = parser.parse_args()
    print("| database | request | connections | a second | server | database | a core could serve |")
    print("| --- | --- | --- | --- | --- | --- | --- |")
    uploads: list[str] = []
    with tempfile.TemporaryDirectory() as folder, seaweedfs.s3_server(Path(folder) / "s3") as store:
        for name in options.database:
            with database(name, Path(folder)) as url, serving(Path(folder) / name, url, store) as server:
                for line in requests(name, server, options.seconds):
                    print(line, flush=True)
                if options.upload_megabytes:
                    uploads.append(upload(name, server, options.upload_megabytes))
    print("\n| database | upload | seconds | server, a GB | memory before, peak |")
    print("| --- | --- | --- | --- | --- |")
    print("\n".join(uploads))


@contextmanager
def database(name: str, folder: Path) -> Iterator[str]:
    """Yield the URL of an empty database."""
    if name == "sqlite":
        yield f"sqlite:///{folder}/ledger.sqlite"
        return
    with PostgresServer(folder / "postgres-data") as url:
        yield url


@contextmanager
def serving(folder: Path, url: str, store: configuration.Store) -> Iterator[Server]:
    """Serve a ledger with some batches until the block ends."""
    folder.mkdir()
    [port] = free_ports(1)
    file = folder / "batch-pipeline.toml"
    file.write_text(
        f"""
[store]
bucket = "{store.bucket}"
endpoint_url = "{store.endpoint_url}"
access_key_id = "{store.access_key_id}"
secret_access_key = "{store.secret_access_key}"
[ledger]
url = "{url}"
[api]
port = {port}
[limits]
requests_per_minute = 1000000000
[models.{MODEL}]
source = "nowhere"
context_length = 2048
prices = {{ input_per_million = 0.10, output_per_million = 0.20 }}
""",
        encoding="utf-8",
    )
    ledger = Ledger.open(url)
    running, ended = _batches(ledger)
    secret = ledger.customers.add_key("acme").secret
    ledger.close()
    environment = {CONFIG_VARIABLE: str(file)}
    service = api_service(configuration.load(file), folder, folder, environment=environment)
    service.start()
    try:
        service.wait_ready()
        process = service.process()
        assert process is not None
        yield Server(port, psutil.Process(process.pid), secret, running, ended)
    finally:
        service.stop()


def _batches(ledger: Ledger) -> tuple[str, str]:
    """Make batches, and a worker that is at one of them; return the ids of one in progress and of one completed."""
    made = [submitted(ledger, f"b{number}", [MODEL] * 10).batch_id for number in range(LISTED)]
    ledger.workers.register("w", MODEL, None, "host")
    ledger.workers.set_state("w", WorkerState.READY)
    while leases := ledger.chunks.lease("w", MODEL, 1):
        for lease in leases:
            ledger.chunks.commit(lease.ref, result_of(lease))
        if all(lane.pending == 0 for lane in ledger.batches.lanes(made[0])):
            break
    finish(ledger, made[0])
    return made[-1], made[0]


def requests(name: str, server: Server, seconds: float) -> Iterator[str]:
    """Yield a line of the table for each kind of request."""
    kinds = [
        ("status, in progress", f"GET /v1/batches/{server.running}", None, 1),
        ("status, in progress", f"GET /v1/batches/{server.running}", None, 8),
        ("status, completed", f"GET /v1/batches/{server.ended}", None, 8),
        (f"list of {LISTED}", f"GET /v1/batches?limit={LISTED}", None, 8),
        ("file", f"GET /v1/files/{_small_file(server)}", None, 8),
        (
            "create",
            "POST /v1/batches",
            msgspec.json.encode(
                {
                    "input_file_id": _small_file(server),
                    "endpoint": "/v1/chat/completions",
                    "completion_window": "24h",
                }
            ),
            1,
        ),
        ("health", "GET /healthz", None, 8),
    ]
    for kind, line, body, connections in kinds:
        message = _message(line, server.key, body or b"")
        ask(server, message, connections, 0.5)
        asked = ask(server, message, connections, seconds)
        server_ms, database_ms = (
            1000 * spent / asked.requests for spent in (asked.server_seconds, asked.database_seconds)
        )
        yield (
            f"| {name} | {kind} | {connections} | {asked.requests / asked.seconds:.0f} | {server_ms:.2f} ms "
            f"| {database_ms:.2f} ms | {1000 / server_ms:.0f} a second |"
        )


def ask(server: Server, message: bytes, connections: int, seconds: float) -> Asked:
    """Send the same request again and again, on each connection as soon as the last one is answered."""
    sockets = [socket.create_connection(("127.0.0.1", server.port)) for _ in range(connections)]
    waiting = selectors.DefaultSelector()
    for one in sockets:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        waiting.register(one, selectors.EVENT_READ, bytearray())
    server_before, database_before = _seconds(server.process), database_seconds()
    began = time.perf_counter()
    for one in sockets:
        one.sendall(message)
    answered = 0
    while (now := time.perf_counter()) - began < seconds:
        for key, _ in waiting.select():
            connection = key.fileobj
            assert isinstance(connection, socket.socket)
            key.data.extend(connection.recv(65536))
            if _is_whole(key.data):
                assert key.data.startswith(b"HTTP/1.1 200 "), bytes(key.data)
                key.data.clear()
                answered += 1
                connection.sendall(message)
    asked = Asked(answered, now - began, _seconds(server.process) - server_before, database_seconds() - database_before)
    for one in sockets:
        one.close()
    return asked


def upload(name: str, server: Server, megabytes: int) -> str:
    """Upload a file; return a line of the table."""
    line = json.dumps(_LINE).encode() + b"\n"
    block = line * (MEGABYTE // len(line))
    blocks = megabytes * MEGABYTE // len(block)
    # What was most until now is forgotten: the peak is of this upload.
    Path(f"/proc/{server.process.pid}/clear_refs").write_text("5", encoding="ascii")
    rss_before = server.process.memory_info().rss
    before = _seconds(server.process)
    began = time.perf_counter()
    status, _ = _send_file(server, block, blocks)
    seconds = time.perf_counter() - began
    assert status == 200
    spent = _seconds(server.process) - before
    sent = len(block) * blocks
    return (
        f"| {name} | {sent / MEGABYTE:.0f} MB | {seconds:.1f} | {spent / sent * 1000 * MEGABYTE:.2f} s "
        f"| {rss_before / MEGABYTE:.0f}, {_peak_bytes(server.process) / MEGABYTE:.0f} MB |"
    )


def _small_file(server: Server) -> str:
    status, answer = _send_file(server, json.dumps(_LINE).encode() + b"\n", 10)
    assert status == 200
    return str(json.loads(answer)["id"])


def _send_file(server: Server, block: bytes, blocks: int) -> tuple[int, bytes]:
    """Upload a file of so many blocks; return the answer's status and body."""
    head = (
        b'--xyz\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        b'--xyz\r\nContent-Disposition: form-data; name="file"; filename="f.jsonl"\r\n\r\n'
    )
    tail = b"\r\n--xyz--\r\n"
    length = len(head) + len(block) * blocks + len(tail)
    with socket.create_connection(("127.0.0.1", server.port)) as connection:
        connection.sendall(
            _head("POST /v1/files", server.key, f"multipart/form-data; boundary=xyz\r\nContent-Length: {length}")
        )
        connection.sendall(head)
        for _ in range(blocks):
            connection.sendall(block)
        connection.sendall(tail)
        answer = bytearray()
        while not _is_whole(answer):
            answer += connection.recv(65536)
    return int(answer.split(b" ", 2)[1]), bytes(answer.partition(b"\r\n\r\n")[2])


def _message(line: str, key: str, body: bytes) -> bytes:
    return _head(line, key, f"application/json\r\nContent-Length: {len(body)}") + body


def _head(line: str, key: str, content_type: str) -> bytes:
    return (
        f"{line} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {key}\r\nAccept: application/json\r\n"
        f"User-Agent: benchmark\r\nContent-Type: {content_type}\r\n\r\n"
    ).encode()


def _is_whole(answer: bytearray) -> bool:
    head, separator, body = answer.partition(b"\r\n\r\n")
    if not separator:
        return False
    length = head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]
    return len(body) >= int(length)


def _seconds(process: psutil.Process) -> float:
    return sum(process.cpu_times()[:2])


def _peak_bytes(process: psutil.Process) -> int:
    status = Path(f"/proc/{process.pid}/status").read_text(encoding="ascii")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


if __name__ == "__main__":
    main()
