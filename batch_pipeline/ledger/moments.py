"""Batches with their progress and their bill, as they are at one moment of the database's clock.

A status is read for every poll, and for every open batch every few seconds: so a batch and its lanes are one statement,
which sees one state of both, and a page of batches takes no more statements than one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby
from typing import Any, NamedTuple

import sqlalchemy as sa

from batch_pipeline.errors import NotFound
from batch_pipeline.ledger import rows
from batch_pipeline.ledger.database import Database, Transaction
from batch_pipeline.ledger.records import Batch, Lane
from batch_pipeline.ledger.schema import batches, is_unshown, lanes
from batch_pipeline.ledger.usage import Charge, charges_of

_NEWEST_FIRST = (batches.c.created_at.desc(), batches.c.batch_id.desc())
_LANE = "lane_"
"""Before the columns of a lane, some of which a batch has as well."""
_WITH_LANES = rows.BATCH.add_columns(
    batches.c.archived_lanes,
    *(lanes.c[name].label(f"{_LANE}{name}") for name in Lane.__struct_fields__),
).outerjoin(lanes, lanes.c.batch_id == batches.c.batch_id)

# Built once: building a statement costs more than running it.
_THESE = _WITH_LANES.where(batches.c.batch_id.in_(sa.bindparam("batch_ids", expanding=True))).order_by(
    batches.c.batch_id, lanes.c.model
)
_PLACE = sa.select(batches.c.created_at).where(
    batches.c.batch_id == sa.bindparam("batch_id"), batches.c.customer == sa.bindparam("customer")
)
_UNSHOWN = (
    sa.select(batches.c.batch_id, batches.c.published)
    .where(is_unshown, batches.c.batch_id > sa.bindparam("after"))
    .order_by(batches.c.batch_id)
    .limit(sa.bindparam("most"))
)


class Moment(NamedTuple):
    """A batch as it is at one moment; its progress is one lane for each of its models."""

    batch: Batch
    lanes: list[Lane]
    """As they were, where its chunks have left the ledger."""
    charges: list[Charge]
    """By model; none before its end."""
    now: float
    """UTC seconds since the epoch by the database's clock."""


class Moments:
    """Reading batches together with what belongs to their status."""

    def __init__(self, database: Database) -> None:
        self._database = database

    def of(self, batch_id: str) -> Moment:
        """Return a batch. Raises NotFound."""
        moment = self.these([batch_id]).get(batch_id)
        if moment is None:
            raise NotFound(f"no batch {batch_id}")
        return moment

    def these(self, batch_ids: Sequence[str]) -> dict[str, Moment]:
        """Return batches by their ids, whosever they are; those that are none are left out."""
        with self._database.read() as tx:
            found = _moments(tx, tx.connection.execute(_THESE, {"batch_ids": batch_ids}).all())
        return {moment.batch.batch_id: moment for moment in found}

    def page(self, customer: str, *, after: str | None, limit: int) -> list[Moment]:
        """Return at most `limit` of a customer's batches, newest first, those behind the batch `after`.

        Raises NotFound for `after`.
        """
        chosen = sa.select(batches.c.batch_id).where(batches.c.customer == customer)
        with self._database.read() as tx:
            if after is not None:
                since = tx.connection.execute(_PLACE, {"batch_id": after, "customer": customer}).scalar_one_or_none()
                if since is None:
                    raise NotFound(f"no batch {after}")
                behind = sa.tuple_(sa.literal(since), sa.literal(after))
                chosen = chosen.where(sa.tuple_(batches.c.created_at, batches.c.batch_id) < behind)
            chosen = chosen.order_by(*_NEWEST_FIRST).limit(limit)
            query = _WITH_LANES.where(batches.c.batch_id.in_(chosen)).order_by(*_NEWEST_FIRST, lanes.c.model)
            return _moments(tx, tx.connection.execute(query).all())

    def publishable(self, limit: int = 200, after: str = "") -> list[tuple[Moment, str]]:
        """Return a page of batches that are open, or whose end is not shown yet, each with what its status.json shows:
        those with an id above `after`, in the order of their ids. Go on from the last id, and from "" at the end.
        """
        with self._database.read() as tx:
            unshown = tx.connection.execute(_UNSHOWN, {"after": after, "most": limit}).all()
            shown = {row.batch_id: row.published for row in unshown}
            found = tx.connection.execute(_THESE, {"batch_ids": list(shown)}).all() if shown else []
            return [(moment, shown[moment.batch.batch_id]) for moment in _moments(tx, found)]


def _moments(tx: Transaction, found: Sequence[Any]) -> list[Moment]:
    """Return the batches of rows of `_WITH_LANES`, in which those of one batch follow each other."""
    of_batches = [list(of_one) for _, of_one in groupby(found, key=lambda row: row.batch_id)]
    with_lanes = [(rows.batch(of_one[0]), _lanes(of_one)) for of_one in of_batches]
    # Read after the batches, and written with their ends: they are there for each end that was seen.
    ended = [batch.batch_id for batch, _ in with_lanes if batch.status.is_final]
    charged = charges_of(tx, ended) if ended else {}
    return [Moment(batch, of_models, charged.get(batch.batch_id, []), tx.now) for batch, of_models in with_lanes]


def _lanes(of_one: Sequence[Any]) -> list[Lane]:
    if of_one[0].lane_model is None:
        return rows.archived_lanes(of_one[0].archived_lanes)
    return [Lane(**{name: getattr(row, _LANE + name) for name in Lane.__struct_fields__}) for row in of_one]
