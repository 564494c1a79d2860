"""What holds up every batch at once, or every batch of a model, kept where every status is made: for instance that the
object store is away, or that a model's next worker waits for a GPU.

A status.json cannot be written without the store; the ledger still can say why (invariant I9). A notice counts for as
long as it is repeated: one whose reporter died is forgotten by itself.
"""

from __future__ import annotations

import sqlalchemy as sa

from batch_pipeline.ledger.database import Database
from batch_pipeline.ledger.schema import notices
from batch_pipeline.ledger.transitions import insert_for

STORE = "store"
"""The object store cannot be reached."""
_OF_MODEL = "model/"
"""Before a model's name: what keeps its workers from being there."""
_MOST_CHARACTERS = 500


def of_model(model: str) -> str:
    """Return the name of the notice of what keeps a model's next worker."""
    return f"{_OF_MODEL}{model}"


def model_of(name: str) -> str | None:
    """Return the model that a notice is about; None where it holds up every batch."""
    return name.removeprefix(_OF_MODEL) if name.startswith(_OF_MODEL) else None


class Notices:
    """Each function is one transaction; repeating it changes nothing more."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def post(self, name: str, text: str) -> None:
        """Say what is wrong, or that it still is. Killed before, it is not said; it is repeated by whoever sees it."""
        with self._database.write() as tx:
            values = {"text": text[:_MOST_CHARACTERS], "seen_at": tx.now}
            insert = insert_for(tx, notices).values(name=name, since=tx.now, **values)
            tx.connection.execute(insert.on_conflict_do_update(index_elements=[notices.c.name], set_=values))

    def clear(self, name: str) -> None:
        """Say that it is over; writes only where there is a notice."""
        with self._database.read() as tx:
            if tx.connection.execute(sa.select(notices.c.name).where(notices.c.name == name)).first() is None:
                return
        with self._database.write() as tx:
            tx.connection.execute(notices.delete().where(notices.c.name == name))
