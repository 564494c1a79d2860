"""Input files as customers write them, and batches that await intake."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from batch_pipeline import ids
from batch_pipeline.intake.block_check import check_block
from batch_pipeline.intake.blocks import Block
from batch_pipeline.intake.lines import check_line
from batch_pipeline.intake.problems import LineProblem
from batch_pipeline.intake.rows import Request, Rows
from batch_pipeline.intake.rules import Rules
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, Door, NewBatch, NewChunk, OnInvalid
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore, keys
from batch_pipeline.wire.chunk_files import ChunkRequest, read_requests
from tests.fakes.small_model import NAME, small_settings


class Checked(NamedTuple):
    """What a block of lines holds."""

    requests: list[Request]
    problems: list[LineProblem]


CHAT = "/v1/chat/completions"
BAD = b'{"custom_id": "bad", "method": "POST"'


def request_line(number: int, *, system: str | None = None, **body: Any) -> bytes:
    """The line of a request with the custom_id `request-NUMBER`."""
    messages = [{"role": "user", "content": f"question {number}"}]
    if system is not None:
        messages.insert(0, {"role": "system", "content": system})
    request = {
        "custom_id": f"request-{number}",
        "method": "POST",
        "url": CHAT,
        "body": {"model": NAME, "messages": messages, "max_tokens": 8, **body},
    }
    return json.dumps(request).encode()


def check(block: Block, rules: Rules) -> Checked:
    """What the lines of a block are, after each of them was checked by itself and found to be the same."""
    together = check_block(block, rules)
    found = Checked(requests_of(together.requests), together.problems)
    offset = block.offset
    alone = []
    for number, line in enumerate(block.data.removesuffix(b"\n").split(b"\n"), block.first_line):
        alone.append(check_line(line, number, offset, rules, is_cut=block.is_cut))
        offset += len(line) + 1
    assert found.requests == [one for one in alone if isinstance(one, Request)]
    assert found.problems == [one for one in alone if isinstance(one, LineProblem)]
    return found


def requests_of(rows: Rows) -> list[Request]:
    """The requests that rows stand for."""
    return [Request(*row[:8], rows.models[row[8]], *row[9:]) for row in rows.array.tolist()]


def file_of(lines: Iterable[bytes]) -> bytes:
    """A file with these lines."""
    return b"".join(line + b"\n" for line in lines)


def intake_settings(settings: Settings, model: Path, scratch: Path, **changes: int) -> Settings:
    """Settings of a test with the small model, a scratch folder of its own, and changed limits of intake."""
    small = small_settings(model, scratch_dir=str(scratch), **changes)
    return msgspec.structs.replace(settings, intake=small.intake, models=small.models)


def uploaded(ledger: Ledger, store: ObjectStore, data: bytes, *, on_invalid: OnInvalid = OnInvalid.SKIP) -> Batch:
    """A batch of these bytes, which awaits intake."""
    batch_id = ids.new_batch_id()
    store.put(keys.input_file(batch_id), data)
    return created(ledger, store, batch_id, on_invalid)


def created(ledger: Ledger, store: ObjectStore, batch_id: str, on_invalid: OnInvalid = OnInvalid.SKIP) -> Batch:
    """A batch whose bytes are ours already, and which awaits intake."""
    taken = store.head(keys.input_file(batch_id))
    assert taken is not None
    return ledger.batches.create(
        NewBatch(
            batch_id=batch_id,
            customer="acme",
            name="batch",
            door=Door.CLI,
            endpoint=CHAT,
            window_seconds=86_400,
            on_invalid=on_invalid,
            creation_key=f"test:{batch_id}",
            input_key=taken.key,
            input_bytes=taken.size,
            input_etag=taken.etag,
        )
    )


def requests_in(store: ObjectStore, chunks: Iterable[NewChunk]) -> Iterator[ChunkRequest]:
    """The requests of these chunks, as workers read them."""
    for chunk in chunks:
        yield from read_requests(store.get(chunk.input_key))


def objects_below(store: ObjectStore, batch_id: str) -> dict[str, bytes]:
    """What intake has written of a batch: keys and bytes."""
    return {
        info.key: store.get(info.key)
        for info in store.list(keys.batch(batch_id))
        if info.key != keys.input_file(batch_id)
    }
