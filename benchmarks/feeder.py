"""What the worker itself costs for each request, and how much memory it takes, with an engine that answers at once.

    python -m benchmarks.feeder [--requests 10000 40000] [--in-flight 64]

Starts a SeaweedFS on loopback and an engine that answers each request with the same words as soon as it has read it.
For each number of requests one worker, in a process of its own, leases, feeds, checkpoints and commits them, in chunks
of 1,000 requests with bodies of about 600 bytes. Processor seconds are those of the worker's process alone: store,
ledger and HTTP are in it, the other servers are not. What the requests between two sizes cost is given too: without the
start of the program. A worker on a core of its own can feed so many requests a second as one processor second does.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import msgspec

from batch_pipeline import ids
from batch_pipeline import settings as configuration
from batch_pipeline.embedded import seaweedfs
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Door, IntakeResult, NewBatch, NewChunk, OnInvalid
from batch_pipeline.store import ObjectStore, keys
from batch_pipeline.wire.chunk_files import ChunkRequest
from tests.fakes.batches import chunk_input
from tests.fakes.workers import MODEL, Life, start_process

CHUNK = 1000
ANSWER = {
    "id": "chatcmpl-0123456789abcdef",
    "object": "chat.completion",
    "created": 1_790_000_000,
    "model": MODEL,
    "choices": [{"index": 0, "finish_reason": "stop", "message": {"role": "assistant", "content": "An answer. " * 12}}],
    "usage": {"prompt_tokens": 120, "completion_tokens": 40, "total_tokens": 160, "prompt_tokens_details": None},
}
MEBIBYTE = 2**20


def main() -> None:
    """Measure, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, nargs="+", default=[10_000, 40_000])
    parser.add_argument("--in-flight", type=int, default=64, help="the model's max_in_flight")
    parser.add_argument("--engine", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.engine:
        asyncio.run(serve())
        return
    print("| requests | seconds | processor seconds | requests a processor second | without the start | peak MiB |")
    print("| --- | --- | --- | --- | --- | --- |")
    before: tuple[int, float] | None = None
    for requests in options.requests:
        with tempfile.TemporaryDirectory() as name, seaweedfs.s3_server(Path(name) / "s3") as reachable:
            life = measure(Path(name), reachable, requests, options.in_flight)
        between = "-"
        if before is not None:
            between = f"{(requests - before[0]) / (life.cpu_seconds - before[1]):.0f}"
        before = (requests, life.cpu_seconds)
        print(
            f"| {requests} | {life.report.seconds:.1f} | {life.cpu_seconds:.1f} | {requests / life.cpu_seconds:.0f} "
            f"| {between} | {life.max_rss_bytes / MEBIBYTE:.0f} |",
            flush=True,
        )


def measure(folder: Path, reachable: configuration.Store, requests: int, in_flight: int) -> Life:
    """Run one worker on so many requests to its end."""
    file = folder / "batch-pipeline.toml"
    store = "".join(
        f"{name} = {json.dumps(value)}\n" for name, value in msgspec.structs.asdict(reachable).items() if value
    )
    file.write_text(f'[store]\n{store}[models."{MODEL}"]\nsource = "none"\ncontext_length = 2048\n')
    ledger_url = f"sqlite:///{folder}/ledger.sqlite"
    ledger = Ledger.open(ledger_url)
    fill(ledger, ObjectStore.open(reachable), requests)
    times = {"heartbeat_seconds": 5.0, "checkpoint_seconds": 5.0, "warm_seconds": 0.0}
    with (
        instant_engine() as url,
        start_process(file, ledger_url, url, model={"max_in_flight": in_flight}, **times) as process,
    ):
        output, _ = process.communicate()
    life = msgspec.json.decode(output, type=Life)
    if life.report.requests != requests:
        raise SystemExit(f"the worker has done {life.report.requests} of {requests} requests")
    ledger.close()
    return life


def fill(ledger: Ledger, store: ObjectStore, requests: int) -> None:
    """Make a batch of so many requests, whose intake is done. Memory: a chunk."""
    batch_id = ids.new_batch_id()
    new = NewBatch(
        batch_id=batch_id,
        customer="acme",
        name="many",
        door=Door.CLI,
        endpoint="/v1/chat/completions",
        window_seconds=86_400,
        on_invalid=OnInvalid.SKIP,
        creation_key=batch_id,
        input_key=keys.input_file(batch_id),
        input_bytes=0,
        input_etag="none",
    )
    ledger.batches.create(new)
    chunks = []
    for start in range(0, requests, CHUNK):
        rows = [request(index) for index in range(start, min(start + CHUNK, requests))]
        chunk = NewChunk(
            chunk=len(chunks),
            model=MODEL,
            input_key=keys.chunk_input(batch_id, len(chunks)),
            requests=len(rows),
            first_index=rows[0].index,
            last_index=rows[-1].index,
            prompt_tokens=120 * len(rows),
            max_output_tokens=40 * len(rows),
        )
        store.put(chunk.input_key, chunk_input(rows))
        chunks.append(chunk)
    ledger.batches.record_intake(
        batch_id,
        IntakeResult(total=requests, invalid=0, input_sha256="none", invalid_key=None, errors=[], chunks=chunks),
    )


def request(index: int) -> ChunkRequest:
    """Return a request with a body of about 600 bytes."""
    messages = [
        {"role": "system", "content": "You are an assistant. " + "Answer in one word, and be kind. " * 8},
        {"role": "user", "content": f"Question {index}: " + "and so on " * 8},
    ]
    body = {"model": MODEL, "messages": messages, "max_tokens": 40, "temperature": 0.2}
    return ChunkRequest(index, f"request-{index}", json.dumps(body).encode(), 120, 40)


@contextmanager
def instant_engine() -> Iterator[str]:
    """An engine in a process of its own that answers at once; yields its URL."""
    command = [sys.executable, "-m", "benchmarks.feeder", "--engine"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield process.stdout.readline().strip()
        process.kill()


class Instant(asyncio.Protocol):
    """As little of HTTP as the worker needs: it would be the engine's speed that is measured otherwise."""

    def __init__(self) -> None:
        self._data = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the way back."""
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        """Answer each request that is whole."""
        self._data += data
        while (end := self._data.find(b"\r\n\r\n")) >= 0:
            head = self._data[:end].lower()
            _, _, rest = head.partition(b"content-length:")
            whole = end + 4 + (int(rest.split(b"\r\n", 1)[0]) if rest else 0)
            if len(self._data) < whole:
                return
            self._data = self._data[whole:]
            self._transport.write(_ANSWERS.get(head.split(b" ", 2)[1], _ANSWERS[b""]))


def answered(content: object) -> bytes:
    """Return an answer with this content."""
    body = msgspec.json.encode(content)
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


_ANSWERS = {
    b"": answered({}),
    b"/v1/chat/completions": answered(ANSWER),
    b"/v1/models": answered({"data": [{"id": MODEL}]}),
    b"/version": answered({"version": "instant"}),
}


async def serve() -> None:
    """Run the engine until it is killed."""
    server = await asyncio.get_running_loop().create_server(Instant, "127.0.0.1", 0, backlog=1024)
    host, port = server.sockets[0].getsockname()
    print(f"http://{host}:{port}", flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    main()
