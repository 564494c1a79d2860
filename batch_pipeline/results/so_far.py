"""What a batch has so far, as lines: complete chunks only, while it runs; all of it after its end.

While it runs the lines are those of invalid requests, then those of committed chunks, chunk by chunk: each is final and
will be in the final files as it is here. After the end they are the output file and then the error file.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from batch_pipeline import ids
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, ChunkState
from batch_pipeline.results.archived import check_files_kept
from batch_pipeline.results.facts import chunks_of
from batch_pipeline.store import ObjectStore


class SoFar(NamedTuple):
    """The lines, and whether they are all that there are of the batch."""

    lines: Iterator[bytes]
    """In pieces that need not end with a line."""
    is_complete: bool


def results_so_far(batch: Batch, *, ledger: Ledger, store: ObjectStore) -> SoFar:
    """Return the results of a batch as it is now. Memory: its chunks' rows (2 kB each), and a piece of a mebibyte.

    A file of the batch that was deleted, or has expired, is not given out. Raises NotAllowedInState where its files
    were removed. The lines raise StoreError as they are read.
    """
    check_files_kept(batch)
    if batch.status.is_final:
        files = ((batch.output_key, ids.output_file_id), (batch.error_key, ids.error_file_id))
        kept = [
            key for key, name in files if key is not None and ledger.files.find(batch.customer, name(batch.batch_id))
        ]
        return SoFar(_objects(kept, store), is_complete=len(kept) == sum(key is not None for key, _ in files))
    committed = [
        chunk.result.result_key
        for chunk in chunks_of(batch.batch_id, ledger)
        if chunk.state is ChunkState.COMMITTED and chunk.result is not None
    ]
    return SoFar(_objects([batch.invalid_key, *committed], store), is_complete=False)


def _objects(object_keys: Sequence[str | None], store: ObjectStore) -> Iterator[bytes]:
    for key in object_keys:
        if key is not None:
            yield from store.iterate(key)
