"""Uploads in parts: each part is an object of its own, until `complete` makes one file of them.

    pending ──complete──> completed (with its file)
       └────cancel──────> cancelled          pending, past its time: expired

Every function names the customer: another's upload is not found (I8). Each is one transaction, guarded by the state
that it leaves; the same call again changes nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from batch_pipeline.errors import NotAllowedInState, NotFound
from batch_pipeline.ledger import files
from batch_pipeline.ledger.database import Database, Transaction
from batch_pipeline.ledger.schema import upload_parts, uploads
from batch_pipeline.ledger.transitions import ensure_customer

PENDING, COMPLETED, CANCELLED, EXPIRED = "pending", "completed", "cancelled", "expired"


class Upload(msgspec.Struct, frozen=True, kw_only=True):
    """One upload. `bytes` is what was announced; `file_id` what it has become."""

    upload_id: str
    customer: str
    purpose: str
    filename: str
    bytes: int
    status: str
    file_id: str | None
    file_expires_seconds: int | None
    created_at: float
    expires_at: float


class Part(msgspec.Struct, frozen=True, kw_only=True):
    """One part, at a key of its own."""

    part_id: str
    upload_id: str
    object_key: str
    bytes: int
    created_at: float


class Uploads:
    """Uploads of customers."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def create(
        self,
        upload_id: str,
        customer: str,
        *,
        purpose: str,
        filename: str,
        size_bytes: int,
        lifetime_seconds: float,
        file_expires_seconds: int | None,
    ) -> Upload:
        """(nothing) -> pending."""
        with self._database.write() as tx:
            ensure_customer(tx, customer)
            values = {
                "upload_id": upload_id,
                "customer": customer,
                "purpose": purpose,
                "filename": filename,
                "bytes": size_bytes,
                "status": PENDING,
                "file_expires_seconds": file_expires_seconds,
                "created_at": tx.now,
                "expires_at": tx.now + lifetime_seconds,
            }
            tx.connection.execute(uploads.insert().values(**values))
            return _get(tx, customer, upload_id)

    def get(self, customer: str, upload_id: str) -> Upload:
        """Return an upload. Raises NotFound, also where it is another customer's."""
        with self._database.read() as tx:
            return _get(tx, customer, upload_id)

    def add_part(self, customer: str, part_id: str, upload_id: str, object_key: str, size_bytes: int) -> Part:
        """Add a part, whose object is there already. Raises NotFound, NotAllowedInState unless it is pending."""
        with self._database.write() as tx:
            _check_pending(_lock(tx, customer, upload_id))
            part = Part(
                part_id=part_id, upload_id=upload_id, object_key=object_key, bytes=size_bytes, created_at=tx.now
            )
            tx.connection.execute(upload_parts.insert().values(**msgspec.structs.asdict(part)))
            return part

    def parts(self, customer: str, upload_id: str) -> list[Part]:
        """Return the parts, in the order in which they came. Raises NotFound."""
        query = sa.select(upload_parts).where(upload_parts.c.upload_id == upload_id)
        with self._database.read() as tx:
            _get(tx, customer, upload_id)
            found = tx.connection.execute(query.order_by(upload_parts.c.created_at, upload_parts.c.part_id))
            return [Part(**{name: getattr(row, name) for name in Part.__struct_fields__}) for row in found]

    def complete(self, customer: str, upload_id: str, file_id: str, object_key: str, lifetime_seconds: float) -> Upload:
        """pending -> completed, with the file, whose object is there already. Of several calls the first one counts.

        Raises NotFound, NotAllowedInState where it was cancelled or has expired.
        """
        with self._database.write() as tx:
            upload = _lock(tx, customer, upload_id)
            if upload.status == COMPLETED:
                return upload
            _check_pending(upload)
            files.insert(
                tx,
                files.File(
                    file_id=file_id,
                    customer=customer,
                    purpose=upload.purpose,
                    filename=upload.filename,
                    object_key=object_key,
                    bytes=upload.bytes,
                    batch_id=None,
                    created_at=tx.now,
                    expires_at=tx.now + lifetime_seconds,
                ),
            )
            _set(tx, upload_id, status=COMPLETED, file_id=file_id)
            return _get(tx, customer, upload_id)

    def cancel(self, customer: str, upload_id: str) -> Upload:
        """pending -> cancelled. Twice is once. Raises NotFound, NotAllowedInState where it was completed."""
        with self._database.write() as tx:
            upload = _lock(tx, customer, upload_id)
            if upload.status != CANCELLED:
                _check_pending(upload)
                _set(tx, upload_id, status=CANCELLED)
            return _get(tx, customer, upload_id)

    def over(self, before: float, limit: int) -> list[Upload]:
        """Return uploads, of whatever state, whose time was over before a moment: the oldest first."""
        query = sa.select(uploads).where(uploads.c.expires_at <= before).order_by(uploads.c.expires_at).limit(limit)
        with self._database.read() as tx:
            return [_upload(row, tx.now) for row in tx.connection.execute(query)]

    def forget(self, upload_ids: Sequence[str]) -> None:
        """Delete the rows of uploads and of their parts: housekeeping's."""
        with self._database.write() as tx:
            tx.connection.execute(upload_parts.delete().where(upload_parts.c.upload_id.in_(list(upload_ids))))
            tx.connection.execute(uploads.delete().where(uploads.c.upload_id.in_(list(upload_ids))))


def _check_pending(upload: Upload) -> None:
    if upload.status != PENDING:
        ended = "it is a file now" if upload.status == COMPLETED else "begin a new one"
        raise NotAllowedInState(f"upload {upload.upload_id} is {upload.status}: {ended}")


def _lock(tx: Transaction, customer: str, upload_id: str) -> Upload:
    return _one(tx, _mine(customer, upload_id).with_for_update(), upload_id)


def _get(tx: Transaction, customer: str, upload_id: str) -> Upload:
    return _one(tx, _mine(customer, upload_id), upload_id)


def _mine(customer: str, upload_id: str) -> sa.Select[Any]:
    return sa.select(uploads).where(uploads.c.upload_id == upload_id, uploads.c.customer == customer)


def _one(tx: Transaction, query: sa.Select[Any], upload_id: str) -> Upload:
    row = tx.connection.execute(query).one_or_none()
    if row is None:
        raise NotFound(f"no upload {upload_id}")
    return _upload(row, tx.now)


def _upload(row: Any, now: float) -> Upload:
    values = {name: getattr(row, name) for name in Upload.__struct_fields__}
    if values["status"] == PENDING and values["expires_at"] <= now:
        values["status"] = EXPIRED
    return Upload(**values)


def _set(tx: Transaction, upload_id: str, **values: Any) -> None:
    tx.connection.execute(uploads.update().where(uploads.c.upload_id == upload_id).values(**values))
