"""The requests of a batch that have no result, as the input of a new batch: the lines as they were, in their order.

Those whose line is invalid are left out: they would be so again. Input and error file are read side by side, both in
the order of their requests, so memory is the longest line whatever the size.
"""

from __future__ import annotations

from collections.abc import Iterator

import msgspec

from batch_pipeline import ids
from batch_pipeline.errors import CustomerError, NotAllowedInState, ProofFailed
from batch_pipeline.ledger.records import Batch
from batch_pipeline.results.archived import check_files_kept
from batch_pipeline.results.streams import HashedObject
from batch_pipeline.store import ObjectStore
from batch_pipeline.wire import codes

RETRY_OF = "retry_of"
"""The pair of the new batch's metadata that names the old one."""
RETRY_PREFIX = "retry_of_"
"""How the names of such files begin."""


class _Error(msgspec.Struct):
    line: int | None = None


class _ErrorLine(msgspec.Struct):
    id: str
    error: _Error | None = None


_decoder = msgspec.json.Decoder(_ErrorLine)


def write_failed_requests(batch: Batch, target: str, store: ObjectStore) -> int:
    """Write the lines of a final batch's requests that failed, expired or were cancelled to `target`; return the bytes.

    Killed half-way nothing is there; the same call again writes the same bytes. Raises NotAllowedInState before the
    end and once the files are removed; CustomerError where there is no such request; ProofFailed; StoreError.
    """
    if not batch.status.is_final:
        raise NotAllowedInState(f"batch {batch.batch_id} is {batch.status}: what has failed is known at its end")
    check_files_kept(batch)
    failed = _failed(batch, store)
    wanted = next(failed, None)
    if wanted is None:
        raise CustomerError(
            codes.EMPTY_BATCH, f"batch {batch.batch_id} has no request that failed, expired or was cancelled"
        )
    with store.multipart(target) as writer:
        for index, line in enumerate(HashedObject(store, batch.input_key).lines()):
            if index != wanted:
                continue
            if line is None:
                break
            writer.write(line + b"\n")
            wanted = next(failed, None)
            if wanted is None:
                break
        if wanted is not None:
            raise ProofFailed([f"the input of {batch.batch_id} has no line for its request {wanted}"])
    return writer.size


def _failed(batch: Batch, store: ObjectStore) -> Iterator[int]:
    """Yield the indexes of valid requests in the error file, in order."""
    if batch.error_key is None:
        return
    for line in HashedObject(store, batch.error_key).lines():
        if line is None:
            continue
        found = _decoder.decode(line)
        index = ids.index_of(batch.batch_id, found.id)
        if index is not None and (found.error is None or found.error.line is None):
            yield index
