"""Files of the API leave: those that have expired, uploads that were never completed, and what nothing points at.

First the row, then the object: whoever reads the row never finds it without its bytes for longer than a moment, and an
object whose row is gone is found again by its age. (Of an upload the objects go first: its row is how they are found.)
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from batch_pipeline.housekeeping.policy import Removal, Step
from batch_pipeline.ledger import Ledger
from batch_pipeline.store import ObjectMissing, ObjectStore, PreconditionFailed, keys

_PAGE = 500


def remove_expired(
    *, ledger: Ledger, store: ObjectStore, expired_before: float, limit: int, dry_run: bool
) -> Iterator[Removal]:
    """Delete uploaded files that are not given out any more. Batches that were made from them have a copy."""
    for file in ledger.files.expired(expired_before, limit):
        if not dry_run:
            ledger.files.forget([file.file_id])
            store.delete(file.object_key)
        yield Removal(step=Step.API_FILE, subject=file.file_id, objects=1, bytes=file.bytes, rows=1)


def remove_uploads(
    *, ledger: Ledger, store: ObjectStore, over_before: float, limit: int, dry_run: bool
) -> Iterator[Removal]:
    """Delete uploads whose time is over, and the parts of those that were not completed."""
    for upload in ledger.uploads.over(over_before, limit):
        parts = [*store.list(keys.upload(upload.customer, upload.upload_id))]
        if not dry_run:
            store.delete_all(info.key for info in parts)
            ledger.uploads.forget([upload.upload_id])
        size = sum(info.size for info in parts)
        yield Removal(step=Step.API_UPLOAD, subject=upload.upload_id, objects=len(parts), bytes=size, rows=1)


def remove_unowned(
    *, ledger: Ledger, store: ObjectStore, written_before: float, limit: int, dry_run: bool
) -> Iterator[Removal]:
    """Delete objects of files that no row points at: whoever wrote them was killed before the row, or after it."""
    old = (info for info in store.list(keys.FILES) if info.modified_at < written_before)
    left = limit
    while left > 0 and (some := [*itertools.islice(old, _PAGE)]):
        known = ledger.files.known_objects([info.key for info in some])
        for info in [info for info in some if info.key not in known][:left]:
            left -= 1
            if not dry_run:
                try:
                    store.delete(info.key, if_match=info.etag)
                except (PreconditionFailed, ObjectMissing):
                    continue
            yield Removal(step=Step.ORPHAN, subject=info.key, objects=1, bytes=info.size)
