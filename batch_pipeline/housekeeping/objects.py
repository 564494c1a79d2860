"""Objects leave the bucket.

For a batch: the ledger notes what is about to go, the objects go, the ledger notes that they are gone. Killed in
between, the next run lists what is left and goes on. Nothing here decides by itself what may go: `policy` does.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterable, Iterator, Sequence

from batch_pipeline import ids
from batch_pipeline.errors import ProofFailed
from batch_pipeline.housekeeping.archive import missing_files
from batch_pipeline.housekeeping.policy import Removal, Step, leftovers, work_of
from batch_pipeline.intake import drop
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, Chunk
from batch_pipeline.results import outbox
from batch_pipeline.results.archived import read_manifest
from batch_pipeline.store import ObjectInfo, ObjectStore, keys

_PAGE = 500
_MOST_AWAITED = 5000
"""Files in the inbox; where there are more, the orphans wait."""
_OUR_UPLOADS = (keys.BATCHES, keys.OUTBOX, keys.FILES, keys.UPLOADS)
"""Where we write. Uploads in the inbox are the customers'."""


def remove_work(batch: Batch, *, ledger: Ledger, store: ObjectStore, rebuilt_before: float, dry_run: bool) -> Removal:
    """Delete what a batch's files were made from: chunk inputs, checkpoints, chunk results, the request table.

    Raises ProofFailed where a final file is not there in its size: then its chunks are needed, and stay.
    """
    problems = missing_files(read_manifest(batch, store), store)
    if problems:
        raise ProofFailed([f"{batch.batch_id}: {problem}" for problem in problems])
    if not dry_run:
        ledger.retention.begin_work_removal(batch.batch_id)
    gone = work_of(batch, store.list(keys.batch(batch.batch_id)), rebuilt_before)
    if not dry_run:
        store.delete_all(info.key for info in gone)
        ledger.retention.end_work_removal(batch.batch_id)
    return _removal(Step.WORK, batch.batch_id, gone)


def remove_files(batch: Batch, *, ledger: Ledger, store: ObjectStore, answers_before: float, dry_run: bool) -> Removal:
    """Delete all that lies of a batch in the bucket, and its outbox folder. Its row stays, with its counts."""
    if not dry_run:
        ledger.retention.begin_file_removal(batch.batch_id)
    shown = [*outbox.files_of(batch, store, answers_before)]
    ours = [*store.list(keys.batch(batch.batch_id))]
    if not dry_run:
        outbox.withdraw(shown, store)
        store.delete_all(info.key for info in ours)
        ledger.retention.end_file_removal(batch.batch_id)
    return _removal(Step.FILES, batch.batch_id, [*ours, *shown])


def remove_leftovers(
    *, ledger: Ledger, store: ObjectStore, written_before: float, limit: int, chance: random.Random, dry_run: bool
) -> Iterator[Removal]:
    """Delete what attempts wrote in vain, of up to `limit` chunks of open batches.

    A run begins at a random place and goes round, so that every chunk has its turn and no place has to be kept.
    """
    start = (f"batch_{chance.getrandbits(128):032x}", -1)
    chunks = ledger.retention.chunks_with_leftovers(start, limit)
    if len(chunks) < limit:
        before = ledger.retention.chunks_with_leftovers(("", -1), limit - len(chunks))
        chunks += [chunk for chunk in before if (chunk.batch_id, chunk.chunk) <= start]
    for chunk in chunks:
        objects = [*store.list(keys.chunk(chunk.batch_id, chunk.chunk))]
        # The row as it is after the listing: see `leftovers`.
        now = _row(chunk, ledger)
        gone = [] if now is None else leftovers(now, objects, written_before)
        if not gone:
            continue
        if not dry_run:
            store.delete_all(info.key for info in gone)
        yield _removal(Step.LEFTOVERS, f"{chunk.batch_id} chunk {chunk.chunk}", gone)


def _row(chunk: Chunk, ledger: Ledger) -> Chunk | None:
    """Return the chunk as it is now; None where it has left the ledger, or its number is another's."""
    found = ledger.chunks.of(chunk.batch_id, after=chunk.chunk - 1, limit=1)
    return found[0] if found and found[0].chunk == chunk.chunk else None


def remove_orphans(
    *, ledger: Ledger, store: ObjectStore, written_before: float, limit: int, dry_run: bool
) -> Iterator[Removal]:
    """Delete folders of batches that were never created, and what was written of a batch after all of it was removed.

    A folder with a young object stays, and so does one that a file in the inbox would become: taking that file again
    goes on with what lies there. The inbox is looked at before the ledger, which has the batch before the file leaves
    the inbox.
    """
    found = itertools.islice(_unowned(ledger, store), limit)
    for some in iter(lambda: [*itertools.islice(found, _PAGE)], []):
        awaited = drop.awaited_ids(store, _MOST_AWAITED)
        if awaited is None:
            return
        stored = ledger.retention.still_stored(some)
        for batch_id in some:
            if batch_id in awaited or batch_id in stored:
                continue
            objects = [*store.list(keys.batch(batch_id))]
            if not objects or any(info.modified_at >= written_before for info in objects):
                continue
            if not dry_run:
                store.delete_all(info.key for info in objects)
            yield _removal(Step.ORPHAN, batch_id, objects)


def _unowned(ledger: Ledger, store: ObjectStore) -> Iterator[str]:
    """Yield the batch ids that have a folder, and no batch of which something may lie in the bucket."""
    folders = (prefix.removeprefix(keys.BATCHES).rstrip("/") for prefix in store.list_folders(keys.BATCHES))
    known = (folder for folder in folders if ids.BATCH_ID_PATTERN.fullmatch(folder))
    for some in iter(lambda: [*itertools.islice(known, _PAGE)], []):
        stored = ledger.retention.still_stored(some)
        yield from (batch_id for batch_id in some if batch_id not in stored)


def abort_uploads(store: ObjectStore, *, started_before: float, limit: int, dry_run: bool) -> Iterator[Removal]:
    """Abort multipart uploads of ours that nobody will complete: a process that was killed began them."""
    old = (upload for prefix in _OUR_UPLOADS for upload in store.uploads(prefix) if upload.started_at < started_before)
    for upload in [*itertools.islice(old, limit)]:
        if not dry_run:
            store.abort_upload(upload)
        yield Removal(step=Step.UPLOAD, subject=upload.key, objects=1)


def remove_rejected(store: ObjectStore, *, written_before: float, limit: int, dry_run: bool) -> Iterator[Removal]:
    """Delete files that could not be taken, and the reasons beside them, when they are as old as files may be."""
    old = (info for info in store.list(keys.REJECTED) if info.modified_at < written_before)
    gone = [*itertools.islice(old, limit)]
    if gone:
        if not dry_run:
            store.delete_all(info.key for info in gone)
        yield _removal(Step.REJECTED, keys.REJECTED, gone)


def _removal(step: Step, subject: str, gone: Sequence[ObjectInfo]) -> Removal:
    return Removal(step=step, subject=subject, objects=len(gone), bytes=_bytes(gone))


def _bytes(objects: Iterable[ObjectInfo]) -> int:
    return sum(info.size for info in objects)
