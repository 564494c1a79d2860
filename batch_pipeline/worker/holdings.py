"""The chunks that a worker holds, from lease to commit, release or loss."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from batch_pipeline import ids
from batch_pipeline.errors import LeaseLost, ProofFailed
from batch_pipeline.ledger.records import CommitReply, Lease, LeaseRef
from batch_pipeline.store import ObjectMissing
from batch_pipeline.wire.chunk_files import DamagedFile
from batch_pipeline.worker.chunk import HeldChunk, Phase
from batch_pipeline.worker.outages import GivenUp
from batch_pipeline.worker.runner import Runner
from batch_pipeline.worker.writer import ChunkWriter

log = logging.getLogger(__name__)

Spawn = Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]]
"""Runs a coroutine beside the others; what it raises ends the worker."""


class Holdings:
    """One function per transition of a held chunk (drawn in `chunk`). Use it in the worker's event loop."""

    def __init__(
        self,
        writer: ChunkWriter,
        runner: Runner,
        model_version: str,
        on_batch_drained: Callable[[str], None],
        spawn: Spawn,
    ) -> None:
        self._writer = writer
        self._runner = runner
        self._model_version = model_version
        self._on_batch_drained = on_batch_drained
        self._spawn = spawn
        self._held: dict[LeaseRef, HeldChunk] = {}
        self._emptied = asyncio.Event()
        self._emptied.set()
        self._telling: set[asyncio.Task[None]] = set()
        self.committed_chunks = 0
        self.committed_requests = 0
        self.input_tokens = 0
        self.output_tokens = 0

    def __len__(self) -> int:
        """Return how many chunks are held, in whatever phase."""
        return len(self._held)

    def refs(self) -> list[LeaseRef]:
        """Return the leases that heartbeats are to extend."""
        return list(self._held)

    def chunks(self) -> list[HeldChunk]:
        """Return the held chunks, in the order of their leases."""
        return list(self._held.values())

    def get(self, ref: LeaseRef) -> HeldChunk | None:
        """Return the chunk under a lease, None where it is not held any more."""
        return self._held.get(ref)

    async def wait_empty(self) -> None:
        """Wait until nothing is held, and everybody was told."""
        await self._emptied.wait()
        if self._telling:
            await asyncio.wait(self._telling)

    def take(self, lease: Lease, valid_until: float) -> None:
        """Hold a leased chunk and begin to load it."""
        chunk = HeldChunk(lease, ids.new_nonce(), valid_until)
        self._held[lease.ref] = chunk
        self._emptied.clear()
        self._runner.add(chunk)
        self._spawn(self._load(chunk))

    def complete(self, chunk: HeldChunk) -> None:
        """Begin to commit a chunk whose every request has its result."""
        self._spawn(self._commit(chunk))

    async def checkpoint(self) -> None:
        """Save what is newly finished of every running chunk. Killed in between, the rest is run again."""
        for chunk in self.chunks():
            try:
                await self._writer.checkpoint(chunk)
            except (LeaseLost, GivenUp) as reason:
                await self.lose(chunk, str(reason))

    async def stop(self, chunk: HeldChunk, reason: str, *, failed: bool = False) -> None:
        """loading | running -> stopping -> gone: cancel what is in flight, save what is finished, hand the rest back.

        A chunk that is being committed goes on to its commit. Killed before the release, the lease runs out instead.
        """
        if chunk.phase not in (Phase.LOADING, Phase.RUNNING):
            return
        chunk.phase = Phase.STOPPING
        log.info("%s is handed back: %s", chunk, reason)
        await self._runner.drop(chunk)
        try:
            await self._writer.checkpoint(chunk)
            reply = await self._writer.release(chunk, reason, failed=failed)
        except (LeaseLost, GivenUp) as refusal:
            log.info("%s", refusal)
            return
        finally:
            self._let_go(chunk)
        self._told(chunk, reply)

    async def lose(self, chunk: HeldChunk, reason: str) -> None:
        """(any) -> gone: somebody else has the chunk, or soon will; write nothing more."""
        if chunk.phase is Phase.GONE:
            return
        log.warning("%s is lost: %s", chunk, reason)
        self._let_go(chunk)
        await self._runner.drop(chunk)

    async def _load(self, chunk: HeldChunk) -> None:
        try:
            await self._writer.load(chunk)
        except (LeaseLost, GivenUp) as reason:
            await self.lose(chunk, str(reason))
        except (DamagedFile, ObjectMissing, ProofFailed) as error:
            # Not an outage: another attempt may find the same. The ledger gives the chunk up after some of these.
            await self.stop(chunk, f"the chunk cannot be read: {error}", failed=True)
        else:
            if chunk.phase is Phase.RUNNING and chunk.is_complete:
                chunk.phase = Phase.COMMITTING
                self._runner.remove(chunk)
                await self._commit(chunk)
            self._runner.fill()

    async def _commit(self, chunk: HeldChunk) -> None:
        """committing -> gone, with the chunk's result in the ledger, or lost."""
        try:
            reply = await self._writer.commit(chunk, self._runner.engine_version, self._model_version)
        except (LeaseLost, GivenUp) as reason:
            await self.lose(chunk, str(reason))
            return
        finally:
            self._let_go(chunk)
        results = chunk.results()
        self.committed_chunks += 1
        self.committed_requests += len(results)
        self.input_tokens += sum(result.input_tokens for result in results)
        self.output_tokens += sum(result.output_tokens for result in results)
        self._told(chunk, reply)

    def _let_go(self, chunk: HeldChunk) -> None:
        chunk.phase = Phase.GONE
        chunk.gone.set()
        self._held.pop(chunk.ref, None)
        if not self._held:
            self._emptied.set()
        self._runner.fill()

    def _told(self, chunk: HeldChunk, reply: CommitReply) -> None:
        if reply.batch_drained:
            # In a thread: whoever is told may write to a database that is busy, and heartbeats must go on.
            told = self._spawn(asyncio.to_thread(self._on_batch_drained, chunk.ref.batch_id))
            self._telling.add(told)
            told.add_done_callback(self._telling.discard)
