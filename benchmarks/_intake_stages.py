"""The parts of intake, each alone and on the same bytes, so that their processor time can be told apart."""

from __future__ import annotations

import gc
import hashlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from batch_pipeline import ids
from batch_pipeline.intake import spool
from batch_pipeline.intake.block_check import CheckedBlock, check_block
from batch_pipeline.intake.blocks import Block, read_blocks
from batch_pipeline.intake.chunk_inputs import COLUMNS, chunk_input
from batch_pipeline.intake.chunks import recorded
from batch_pipeline.intake.duplicates import CustomIds
from batch_pipeline.intake.order import cut, order
from batch_pipeline.intake.rules import Rules
from batch_pipeline.intake.table import RequestTable, Summary, TableWriter
from batch_pipeline.ledger import Ledger
from batch_pipeline.settings import Settings
from batch_pipeline.store import ObjectStore, keys
from batch_pipeline.wire.chunk_files import write_chunk_input
from tests.fakes.intake_files import CHAT, created

BLOCK_BYTES = 512 * 1024


class Stages:
    """Runs the parts one after the other and adds up what each used; `batch_id` is a batch that intake has taken."""

    def __init__(self, settings: Settings, batch_id: str, ledger: Ledger, store: ObjectStore) -> None:
        self._settings = settings
        self._batch_id = batch_id
        self._ledger = ledger
        self._store = store
        self._folder = Path(settings.intake.scratch_dir).parent
        self.seconds: dict[str, float] = {}
        """Of this process's processor, by part."""

    def run(self) -> dict[str, float]:
        """Run all; return the processor seconds of each."""
        with self._timed("read from the store"):
            for _ in spool.pieces(self._store, keys.input_file(self._batch_id), self._size()):
                pass
        self._hash_and_copy()
        table = self._check()
        self._write_chunks(RequestTable(table))
        self._record()
        return self.seconds

    def _size(self) -> int:
        return (self._folder / "input.jsonl").stat().st_size

    def _pieces(self) -> Iterator[bytes]:
        with (self._folder / "input.jsonl").open("rb") as file:
            yield from iter(lambda: file.read(BLOCK_BYTES), b"")

    def _hash_and_copy(self) -> None:
        with self._timed("hash, local copy"), (self._folder / "copy.jsonl").open("wb") as copy:
            digest = hashlib.sha256()
            for piece in self._pieces():
                digest.update(piece)
                copy.write(piece)

    def _check(self) -> Path:
        rules = Rules(self._settings, CHAT)
        path = self._folder / "table.parquet"
        numbers = CustomIds()
        gc.disable()
        with TableWriter(path) as writer:
            for block in self._blocks():
                with self._timed("decode, check, prefixes"):
                    checked: CheckedBlock = check_block(block, rules)
                with self._timed("request table"):
                    writer.add(checked.requests)
                    numbers.add(checked.requests.array["id_hash"].tobytes())
            with self._timed("request table"):
                writer.close(Summary(total=len(numbers), invalid=0, input_bytes=0, input_sha256="", errors=[]))
        gc.enable()
        with self._timed("duplicates"):
            numbers.duplicates(lambda _: "")
        return path

    def _blocks(self) -> Iterator[Block]:
        blocks = read_blocks(self._pieces(), self._settings.intake.max_line_bytes)
        while True:
            with self._timed("cut into lines"):
                block = next(blocks, None)
            if block is None:
                return
            yield block

    def _write_chunks(self, table: RequestTable) -> None:
        with (self._folder / "input.jsonl").open("rb") as source:
            for part in table.segments(self._settings.intake.segment_requests):
                segment = part.combine_chunks()
                with self._timed("prefix order"):
                    order(segment)
                for number, chunk in enumerate(cut(segment, self._settings.intake)):
                    with self._timed("gather lines"):
                        rows = segment.select(list(COLUMNS)).take(chunk.rows)
                        requests = chunk_input(rows, source.fileno(), CHAT)
                    with self._timed("encode Parquet"):
                        data = write_chunk_input(requests)
                    with self._timed("write to the store"):
                        self._store.put(f"benchmark/{number}", data)

    def _record(self) -> None:
        result = recorded(self._ledger.batches.get(self._batch_id), self._ledger, self._store)
        again = ids.new_batch_id()
        self._store.put(keys.input_file(again), b"")
        created(self._ledger, self._store, again)
        with self._timed("ledger"):
            self._ledger.batches.record_intake(again, result, run_id="benchmark")

    @contextmanager
    def _timed(self, part: str) -> Iterator[None]:
        started = time.process_time()
        try:
            yield
        finally:
            self.seconds[part] = self.seconds.get(part, 0.0) + time.process_time() - started
