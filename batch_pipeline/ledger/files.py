"""Files as the API shows them: what customers have uploaded, and of each batch its input, output and error file.

A file of a batch is a row that points at the batch's own object: made in the transaction that makes the object count
(creation, final status), gone with the batch's files. An uploaded file owns its object. First the object, then the row;
at a removal first the row, then the object: killed in between, an object is left that nothing points at.

Every function names the customer: another's file is not found (I8). Each is one transaction.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from batch_pipeline import ids
from batch_pipeline.errors import NotFound
from batch_pipeline.ledger import records
from batch_pipeline.ledger.database import Database, Transaction
from batch_pipeline.ledger.schema import files
from batch_pipeline.ledger.transitions import ensure_customer, insert_for

INPUT = "batch"
OUTPUT = "batch_output"
"""Purposes, in OpenAI's words."""


class File(msgspec.Struct, frozen=True, kw_only=True):
    """One file. `batch_id` is set where it is a batch's own; `expires_at`: it is not given out from then on."""

    file_id: str
    customer: str
    purpose: str
    filename: str
    object_key: str
    bytes: int
    batch_id: str | None
    created_at: float
    expires_at: float | None
    sha256: str | None = None
    """Of its bytes, where they came in one piece."""


class Files:
    """Files of customers."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def add(
        self,
        file_id: str,
        customer: str,
        *,
        filename: str,
        object_key: str,
        size_bytes: int,
        lifetime_seconds: float,
        purpose: str = INPUT,
        sha256: str | None = None,
    ) -> File:
        """Add an uploaded file, whose object is there already. The same id again returns what is there."""
        with self._database.write() as tx:
            ensure_customer(tx, customer)
            insert(
                tx,
                File(
                    file_id=file_id,
                    customer=customer,
                    purpose=purpose,
                    filename=filename,
                    object_key=object_key,
                    bytes=size_bytes,
                    batch_id=None,
                    created_at=tx.now,
                    expires_at=tx.now + lifetime_seconds,
                    sha256=sha256,
                ),
            )
            return _get(tx, customer, file_id)

    def get(self, customer: str, file_id: str) -> File:
        """Return a file. Raises NotFound, also where it has expired or is another customer's."""
        with self._database.read() as tx:
            return _get(tx, customer, file_id)

    def find(self, customer: str, file_id: str) -> File | None:
        """Return a file, or None where `get` would not find it."""
        with self._database.read() as tx:
            return _find(tx, customer, file_id)

    def page(
        self, customer: str, *, purpose: str | None, newest_first: bool, after: str | None, limit: int
    ) -> list[File]:
        """Return at most `limit` files by their time, those behind the file `after`. Raises NotFound for `after`."""
        order = (files.c.created_at, files.c.file_id)
        with self._database.read() as tx:
            query = sa.select(files).where(files.c.customer == customer, _is_alive(tx))
            if purpose is not None:
                query = query.where(files.c.purpose == purpose)
            if after is not None:
                last = _get(tx, customer, after)
                here, there = sa.tuple_(*order), sa.tuple_(sa.literal(last.created_at), sa.literal(last.file_id))
                query = query.where(here < there if newest_first else here > there)
            query = query.order_by(*(column.desc() if newest_first else column.asc() for column in order))
            return [_file(row) for row in tx.connection.execute(query.limit(limit))]

    def remove(self, customer: str, file_id: str) -> File:
        """Forget a file; return it, so that the caller can remove its object where it owns one. Raises NotFound."""
        with self._database.write() as tx:
            found = _get(tx, customer, file_id)
            tx.connection.execute(files.delete().where(files.c.file_id == file_id, files.c.customer == customer))
            return found

    def expired(self, before: float, limit: int) -> list[File]:
        """Return uploaded files that expired before a moment, the oldest first."""
        query = sa.select(files).where(files.c.expires_at <= before, files.c.batch_id.is_(None))
        with self._database.read() as tx:
            return [_file(row) for row in tx.connection.execute(query.order_by(files.c.expires_at).limit(limit))]

    def forget(self, file_ids: Sequence[str]) -> None:
        """Delete the rows of files, whoever has them: housekeeping's."""
        with self._database.write() as tx:
            tx.connection.execute(files.delete().where(files.c.file_id.in_(list(file_ids))))

    def known_objects(self, object_keys: Sequence[str]) -> set[str]:
        """Return those of these keys that a file points at."""
        query = sa.select(files.c.object_key).where(files.c.object_key.in_(list(object_keys)))
        with self._database.read() as tx:
            return set(tx.connection.execute(query).scalars())


def insert(tx: Transaction, file: File) -> None:
    """Add a file's row to the transaction; one with its id that is there already stays."""
    values = msgspec.structs.asdict(file)
    tx.connection.execute(insert_for(tx, files).values(**values).on_conflict_do_nothing())


def insert_input(tx: Transaction, new: records.NewBatch) -> None:
    """Add the input of a batch that was not made from a file of the API."""
    insert(
        tx,
        File(
            file_id=ids.input_file_id(new.batch_id),
            customer=new.customer,
            purpose=INPUT,
            filename=f"{new.name}.jsonl",
            object_key=new.input_key,
            bytes=new.input_bytes,
            batch_id=new.batch_id,
            created_at=tx.now,
            expires_at=None,
            sha256=new.sent_sha256,
        ),
    )


def insert_results(tx: Transaction, batch: Any, final: records.FinalFiles) -> None:
    """Add the final files that a batch has to the transaction of its final status."""
    lifetime = batch.output_expires_seconds
    for file_id, what, key, size_bytes in (
        (ids.output_file_id(batch.batch_id), "output", final.output_key, final.output_bytes),
        (ids.error_file_id(batch.batch_id), "errors", final.error_key, final.error_bytes),
    ):
        if key is not None:
            insert(
                tx,
                File(
                    file_id=file_id,
                    customer=batch.customer,
                    purpose=OUTPUT,
                    filename=f"{batch.name}_{what}.jsonl",
                    object_key=key,
                    bytes=size_bytes,
                    batch_id=batch.batch_id,
                    created_at=tx.now,
                    expires_at=None if lifetime is None else tx.now + lifetime,
                ),
            )


def remove_of_batch(tx: Transaction, batch_id: str) -> None:
    """Forget the files of a batch, in the transaction after which they are not given out any more."""
    tx.connection.execute(files.delete().where(files.c.batch_id == batch_id))


def _is_alive(tx: Transaction) -> sa.ColumnElement[bool]:
    return files.c.expires_at.is_(None) | (files.c.expires_at > tx.now)


def _get(tx: Transaction, customer: str, file_id: str) -> File:
    found = _find(tx, customer, file_id)
    if found is None:
        raise NotFound(f"no file {file_id}")
    return found


def _find(tx: Transaction, customer: str, file_id: str) -> File | None:
    query = sa.select(files).where(files.c.file_id == file_id, files.c.customer == customer, _is_alive(tx))
    row = tx.connection.execute(query).one_or_none()
    return None if row is None else _file(row)


def _file(row: Any) -> File:
    return File(**{name: getattr(row, name) for name in File.__struct_fields__})
