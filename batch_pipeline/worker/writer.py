"""What a worker reads and writes of a chunk: its input, its checkpoints, its result. Store first, then ledger (I4).

Every object lies under a prefix that only this attempt uses, and counts for nothing until the ledger names it. Killed
before or during the write of an object, nothing of it is visible; killed between object and ledger, the object is
garbage and its requests are run again; killed after the ledger's transaction, the write stands. A lease that is not
valid any more makes the ledger refuse (LeaseLost): what was written is garbage, and another attempt has the chunk.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from typing import TypeVar

from batch_pipeline.errors import LeaseLost
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import ChunkResult, CommitReply, Lease, Part
from batch_pipeline.store import ObjectStore
from batch_pipeline.wire import chunk_files
from batch_pipeline.wire.chunk_files import ChunkRequest, FinishedRequest, ResultObject
from batch_pipeline.worker.chunk import HeldChunk, Phase
from batch_pipeline.worker.commits import Commits
from batch_pipeline.worker.outages import Outages

log = logging.getLogger(__name__)

_T = TypeVar("_T")


class ChunkWriter:
    """The store's and the ledger's side of held chunks. Outages of either are outlasted while the lease lives.

    Methods raise LeaseLost when the chunk is not ours any more, GivenUp when that became known during an outage.
    """

    def __init__(self, ledger: Ledger, store: ObjectStore, outages: Outages) -> None:
        self._ledger = ledger
        self._store = store
        self._outages = outages
        self._commits = Commits(ledger.chunks.commit_all)

    async def load(self, chunk: HeldChunk) -> None:
        """Read the chunk's requests and what earlier attempts had finished. Writes nothing.

        Raises DamagedFile, ObjectMissing or ProofFailed where that is not the chunk that the ledger knows.
        """
        requests, finished = await self._while_held(chunk, _read, self._store, chunk.lease)
        if chunk.phase is Phase.LOADING:
            chunk.load(requests, finished)

    async def checkpoint(self, chunk: HeldChunk) -> None:
        """Save the results that no checkpoint holds yet, so that no attempt runs these requests again.

        Killed before the ledger's transaction, they are run again; after it, they are kept whatever happens. Repeated
        after an outage it names the same object, which the ledger counts once.
        """
        async with chunk.writing:
            finished = list(chunk.unsaved)
            if not finished or chunk.phase not in (Phase.RUNNING, Phase.STOPPING):
                return
            key = f"{chunk.prefix}part-{chunk.parts_written:04d}.parquet"
            chunk.parts_written += 1
            counts = chunk_files.count(finished)
            data = await asyncio.to_thread(chunk_files.write_part, finished)
            await self._while_held(chunk, self._store.put, key, data)
            part = Part(key=key, requests=len(finished), **counts._asdict())
            await self._while_held(chunk, self._ledger.chunks.checkpoint, chunk.ref, part)
            del chunk.unsaved[: len(finished)]

    async def commit(self, chunk: HeldChunk, engine_version: str, model_version: str) -> CommitReply:
        """Write the result of a complete chunk and point the ledger at it. Raises ProofFailed where one is missing.

        Killed before the ledger's transaction, the chunk goes on from its checkpoints at another worker; after it, it
        is committed. Repeated after an outage, the same result is committed once.
        """
        async with chunk.writing:
            result = await asyncio.to_thread(_encode, chunk)
            result_key, lines_key = f"{chunk.prefix}results.jsonl", f"{chunk.prefix}lines.parquet"
            await self._while_held(chunk, self._store.put, result_key, result.data)
            await self._while_held(chunk, self._store.put, lines_key, result.lines)
            committed = ChunkResult(
                result_key=result_key,
                lines_key=lines_key,
                output_bytes=result.output_bytes,
                error_bytes=result.error_bytes,
                sha256=result.sha256,
                engine_version=engine_version,
                model_version=model_version,
                **result.counts._asdict(),
            )
            return await self._while_held(chunk, self._commits.commit, chunk.ref, committed)

    async def release(self, chunk: HeldChunk, reason: str, *, failed: bool = False) -> CommitReply:
        """Hand the chunk back; its checkpoints stay. Killed before, the lease runs out instead.

        `failed` counts toward giving the chunk up. After an outage the ledger may say LeaseLost of a release that it
        had taken: the chunk is handed back in either case.
        """
        async with chunk.writing:
            return await self._while_held(chunk, self._ledger.chunks.release, chunk.ref, reason, failed)

    async def _while_held(self, chunk: HeldChunk, call: Callable[..., _T], *args: object) -> _T:
        if chunk.phase is Phase.GONE:
            raise LeaseLost(f"{chunk} is not held any more")
        return await self._outages.outlast(chunk.gone, call, *args)


def _read(store: ObjectStore, lease: Lease) -> tuple[list[ChunkRequest], list[FinishedRequest]]:
    requests = chunk_files.read_requests(store.get(lease.input_key))
    finished = [result for part in lease.parts for result in chunk_files.read_part(store.get(part.key))]
    return requests, finished


def _encode(chunk: HeldChunk) -> ResultObject:
    return chunk_files.encode_result_object(chunk.results())
