"""The life of a batch (drawn in `records`): one function per arrow, in one transaction, guarded by the state it leaves.

Each is killed harmlessly: before its commit nothing has changed, after it all has; repeating any of them changes
nothing.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from batch_pipeline.errors import NotAllowedInState, NotFound, ProofFailed
from batch_pipeline.ledger import events, files, quotas, records, rows
from batch_pipeline.ledger.database import Database, Transaction
from batch_pipeline.ledger.ending import end
from batch_pipeline.ledger.records import Batch, BatchStatus, ChunkState, Lane, OnInvalid
from batch_pipeline.ledger.schema import batches, chunks, is_open, is_undecided, lanes
from batch_pipeline.ledger.transitions import (
    HOLDS_NOTHING,
    ensure_customer,
    give_back_quota,
    insert_for,
    join_queue,
    lock_batch,
    lock_customer,
    queue_floor,
    settle,
    stop_pending,
    update_batch,
)
from batch_pipeline.ledger.usage import Charge
from batch_pipeline.settings import Limits

_CANCELLED_WAITS_SECONDS = 900.0
_STOPPED_STATE = {BatchStatus.CANCELLED: ChunkState.CANCELLED, BatchStatus.EXPIRED: ChunkState.EXPIRED}


# Built once: building a statement costs more than running it.
_BATCH = rows.BATCH.where(batches.c.batch_id == sa.bindparam("of_batch"))
_LANES = rows.LANE.where(lanes.c.batch_id == sa.bindparam("of_batch")).order_by(lanes.c.model)
_ARCHIVED = sa.select(batches.c.archived_lanes).where(batches.c.batch_id == sa.bindparam("of_batch"))


class Batches:
    """Batches and their transitions."""

    def __init__(self, database: Database, limits: Limits) -> None:
        self._database = database
        self._limits = limits
        """Of customers for whom none were set."""

    def create(self, new: records.NewBatch, actor: str = "intake") -> Batch:
        """(nothing) -> validating. The same creation key again returns the batch that it made, unchanged.

        Raises LimitReached where the customer has as many open batches as it may have.
        """
        values = msgspec.structs.asdict(new)
        made_by_key = rows.BATCH.where(batches.c.creation_key == new.creation_key)
        with self._database.write() as tx:
            ensure_customer(tx, new.customer)
            customer = lock_customer(tx, new.customer)
            row = tx.connection.execute(made_by_key).one_or_none()
            if row is not None:
                return rows.batch(row)
            quotas.check_open_batches(tx, customer, self._limits)
            insert = insert_for(tx, batches).values(
                **{**values, "metadata": rows.json(new.metadata)},
                status=BatchStatus.VALIDATING,
                created_at=tx.now,
                deadline_at=tx.now + new.window_seconds,
            )
            # Not by the row count: drivers differ in what they report of an insert that did nothing.
            created = tx.connection.execute(insert.on_conflict_do_nothing().returning(batches.c.batch_id)).one_or_none()
            if created is not None:
                events.record(tx, new.batch_id, "created", actor, detail=f"{new.door} {new.name}")
                if new.input_file_id is None:
                    files.insert_input(tx, new)
            return rows.batch(tx.connection.execute(made_by_key).one())

    def record_intake(
        self, batch_id: str, result: records.IntakeResult, *, run_id: str | None = None, actor: str = "intake"
    ) -> Batch:
        """validating -> in_progress with its chunks; the first record counts, later ones change nothing.

        Where nothing is valid, a line is bad and the owner asked for strict, or the customer's batches would have more
        enqueued tokens than they may have, the outcome is `failed` and the merge makes the files. A batch that was
        cancelled or has expired meanwhile gets its chunks as stopped ones.
        """
        with self._database.write() as tx:
            batch = lock_batch(tx, batch_id)
            if batch is None:
                raise NotFound(f"no batch {batch_id}")
            if batch.input_sha256 is None and batch.status in (BatchStatus.VALIDATING, BatchStatus.CANCELLING):
                self._record_intake(tx, batch, result, run_id, actor)
            return _get(tx, batch_id)

    def _record_intake(
        self, tx: Transaction, batch: Any, result: records.IntakeResult, run_id: str | None, actor: str
    ) -> None:
        in_chunks = sum(chunk.requests for chunk in result.chunks)
        if result.total != result.invalid + in_chunks:
            raise ProofFailed([f"{result.total} requests are not {result.invalid} invalid and {in_chunks} in chunks"])
        outcome, status = batch.outcome, batch.status
        fails = not result.chunks or (batch.on_invalid == OnInvalid.FAIL and result.invalid > 0)
        errors, enqueued = result.errors, HOLDS_NOTHING
        if outcome is None and not fails:
            wanted = _prompt_tokens(result.chunks)
            over = quotas.take(tx, batch.customer, wanted, self._limits)
            if over:
                fails, errors = True, [*over, *errors]
            else:
                enqueued = quotas.as_column(wanted)
        if outcome is None and fails:
            outcome = BatchStatus.FAILED
        elif status == BatchStatus.VALIDATING:
            status = BatchStatus.IN_PROGRESS
        state = ChunkState.PENDING if outcome is None else _STOPPED_STATE.get(outcome, ChunkState.CANCELLED)
        update_batch(
            tx,
            batch.batch_id,
            status=status,
            outcome=outcome,
            in_progress_at=tx.now if status == BatchStatus.IN_PROGRESS else None,
            total=result.total,
            invalid=result.invalid,
            input_sha256=result.input_sha256,
            invalid_key=result.invalid_key,
            errors=rows.json(errors),
            enqueued=enqueued,
            models=rows.json(sorted({chunk.model for chunk in result.chunks})),
            intake_run_id=run_id,
            run_due_at=0.0,
        )
        _insert_chunks(tx, batch, result.chunks, state)
        detail = f"{in_chunks} requests in {len(result.chunks)} chunks, {result.invalid} invalid"
        if status == BatchStatus.IN_PROGRESS:
            event = "in_progress"
        else:
            event = "failing" if outcome == BatchStatus.FAILED else "validated"
        events.record(tx, batch.batch_id, event, actor, run_id=run_id, detail=detail)
        settle(tx, lock_batch(tx, batch.batch_id), actor)

    def cancel(self, batch_id: str, *, customer: str | None = None, actor: str = "operator") -> Batch:
        """validating | in_progress -> cancelling. Twice is once; while it is finalizing, the batch is returned as it
        is.

        Raises NotFound (also where `customer` is given and it is another's), NotAllowedInState after the end.
        """
        with self._database.write() as tx:
            batch = lock_batch(tx, batch_id)
            if batch is None or (customer is not None and batch.customer != customer):
                raise NotFound(f"no batch {batch_id}")
            if BatchStatus(batch.status).is_final:
                raise NotAllowedInState(f"batch {batch_id} is {batch.status} already and cannot be cancelled any more")
            if batch.outcome is None and batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS):
                update_batch(
                    tx,
                    batch_id,
                    status=BatchStatus.CANCELLING,
                    outcome=BatchStatus.CANCELLED,
                    cancelling_at=tx.now,
                    run_due_at=0.0,
                    enqueued=HOLDS_NOTHING,
                )
                events.record(tx, batch_id, "cancelling", actor)
                stop_pending(tx, batch_id, ChunkState.CANCELLED, actor)
                give_back_quota(tx, batch)
                settle(tx, lock_batch(tx, batch_id), actor)
            return _get(tx, batch_id)

    def expire_due(self, limit: int = 100, actor: str = "deadline") -> list[str]:
        """Give batches whose deadline has passed the outcome `expired`: nothing of them is leased any more.

        Their leased chunks stop when their worker hears of it or their lease runs out. Returns the batches' ids.
        """
        due = sa.select(batches.c.batch_id).where(is_undecided).order_by(batches.c.deadline_at).limit(limit)
        with self._database.read() as tx:
            found = list(tx.connection.execute(due.where(batches.c.deadline_at <= tx.now)).scalars())
        return [batch_id for batch_id in found if self._expire(batch_id, actor)]

    def _expire(self, batch_id: str, actor: str) -> bool:
        with self._database.write() as tx:
            batch = lock_batch(tx, batch_id)
            alive = batch.outcome is None and batch.status in (BatchStatus.VALIDATING, BatchStatus.IN_PROGRESS)
            if not alive or batch.deadline_at > tx.now:
                return False
            update_batch(tx, batch_id, outcome=BatchStatus.EXPIRED, enqueued=HOLDS_NOTHING)
            events.record(tx, batch_id, "expiring", actor)
            stop_pending(tx, batch_id, ChunkState.EXPIRED, actor)
            give_back_quota(tx, batch)
            settle(tx, lock_batch(tx, batch_id), actor)
            return True

    def settle(self, batch_id: str, actor: str) -> bool:
        """in_progress | cancelling -> finalizing where no chunk is open any more; returns whether this call did it."""
        with self._database.write() as tx:
            batch = lock_batch(tx, batch_id)
            return batch is not None and settle(tx, batch, actor)

    def settle_all(self, limit: int = 100, actor: str = "sweep") -> list[str]:
        """Settle what a worker that died between its commit and its settling left behind; returns the batches' ids."""
        still_open = (
            sa.select(lanes.c.batch_id)
            .where(lanes.c.batch_id == batches.c.batch_id, lanes.c.pending + lanes.c.leased > 0)
            .exists()
        )
        query = (
            sa.select(batches.c.batch_id)
            .where(
                is_open,
                batches.c.status.in_([BatchStatus.IN_PROGRESS, BatchStatus.CANCELLING]),
                batches.c.input_sha256.is_not(None),
                ~still_open,
            )
            .order_by(batches.c.created_at)
            .limit(limit)
        )
        with self._database.read() as tx:
            found = list(tx.connection.execute(query).scalars())
        return [batch_id for batch_id in found if self.settle(batch_id, actor)]

    def finish(
        self,
        batch_id: str,
        final: records.FinalFiles,
        *,
        charges: Sequence[Charge] = (),
        run_id: str | None = None,
        actor: str = "merge",
    ) -> Batch:
        """finalizing -> completed | expired | cancelled, and validating -> failed, with the files' ids (I6) and what
        the batch is charged for.

        A batch that is final already is returned unchanged. Raises ProofFailed where the counts do not add up (I7).
        """
        with self._database.write() as tx:
            batch = lock_batch(tx, batch_id)
            if batch is None:
                raise NotFound(f"no batch {batch_id}")
            if not BatchStatus(batch.status).is_final:
                end(tx, batch, final, charges, run_id=run_id, actor=actor)
            return _get(tx, batch_id)

    def get(self, batch_id: str, *, customer: str | None = None) -> Batch:
        """Return a batch. Raises NotFound, also where `customer` is given and it is another's (I8)."""
        with self._database.read() as tx:
            batch = _get(tx, batch_id)
        if customer is not None and batch.customer != customer:
            raise NotFound(f"no batch {batch_id}")
        return batch

    def by_creation_key(self, creation_key: str) -> Batch | None:
        """Return the batch that a creation key has made, if any."""
        return self._one(batches.c.creation_key == creation_key)

    def newest_named(self, customer: str, name: str) -> Batch | None:
        """Return the customer's newest batch of that name: the owner of the outbox folder of that name."""
        return self._one((batches.c.customer == customer) & (batches.c.name == name))

    def _one(self, where: sa.ColumnElement[bool]) -> Batch | None:
        query = rows.BATCH.where(where).order_by(batches.c.created_at.desc(), batches.c.batch_id).limit(1)
        with self._database.read() as tx:
            row = tx.connection.execute(query).one_or_none()
        return None if row is None else rows.batch(row)

    def recent(
        self,
        *,
        customer: str | None = None,
        statuses: Sequence[BatchStatus] = (),
        limit: int = 100,
    ) -> list[Batch]:
        """Return batches, newest first."""
        query = rows.BATCH.order_by(batches.c.created_at.desc(), batches.c.batch_id).limit(limit)
        if customer is not None:
            query = query.where(batches.c.customer == customer)
        if statuses:
            query = query.where(batches.c.status.in_(list(statuses)))
        with self._database.read() as tx:
            return [rows.batch(row) for row in tx.connection.execute(query)]

    def lanes(self, batch_id: str) -> list[Lane]:
        """Return a batch's progress, one lane for each of its models; as it was, where its chunks have left."""
        with self._database.read() as tx:
            return _lanes(tx, batch_id)

    def awaiting_intake(self, limit: int) -> list[Batch]:
        """Return batches whose intake has not been recorded and whose next run may be requested now (see `_due`)."""
        return self._due(
            batches.c.status.in_([BatchStatus.VALIDATING, BatchStatus.CANCELLING]) & batches.c.input_sha256.is_(None),
            limit,
        )

    def awaiting_merge(self, limit: int) -> list[Batch]:
        """Return batches whose files can be assembled and whose next run may be requested now (see `_due`)."""
        failed = (batches.c.status == BatchStatus.VALIDATING) & (batches.c.outcome == BatchStatus.FAILED)
        return self._due((batches.c.status == BatchStatus.FINALIZING) | failed, limit)

    def _due(self, where: sa.ColumnElement[bool], limit: int) -> list[Batch]:
        """Return each customer's oldest, then each one's second, and so on; cost: a sort of those that are due.

        A cancelled one counts as younger than it is, so that it does not hold up those whose answers are waited for;
        by a fixed time, so that it has its turn whatever its customer goes on sending.
        """
        lateness = sa.case((batches.c.outcome == BatchStatus.CANCELLED, _CANCELLED_WAITS_SECONDS), else_=0.0)
        since = batches.c.created_at + lateness
        turn = sa.func.row_number().over(partition_by=batches.c.customer, order_by=since)
        # The first condition is the index's own, so that finished batches are never looked at.
        query = rows.BATCH.where(is_open, where).order_by(turn, since).limit(limit)
        with self._database.read() as tx:
            found = tx.connection.execute(query.where(batches.c.run_due_at <= tx.now))
            return [rows.batch(row) for row in found]

    def note_intake_requested(self, batch_id: str, pause_seconds: float) -> int:
        """Count an intake run and put off the next one; returns the run's number, from 1."""
        return self._note_requested(batch_id, "intake_attempts", pause_seconds)

    def note_merge_requested(self, batch_id: str, pause_seconds: float) -> int:
        """Count a merge run and put off the next one; returns the run's number, from 1."""
        return self._note_requested(batch_id, "merge_attempts", pause_seconds)

    def _note_requested(self, batch_id: str, counter: str, pause_seconds: float) -> int:
        with self._database.write() as tx:
            column = batches.c[counter]
            return int(
                tx.connection.execute(
                    batches.update()
                    .where(batches.c.batch_id == batch_id)
                    .values({counter: column + 1, "run_due_at": tx.now + pause_seconds})
                    .returning(column)
                ).scalar_one()
            )

    def set_priority(self, batch_id: str, priority: int, actor: str) -> Batch:
        """Put a batch before (above 0) or after (below 0) the others of its customer."""
        with self._database.write() as tx:
            if lock_batch(tx, batch_id) is None:
                raise NotFound(f"no batch {batch_id}")
            update_batch(tx, batch_id, priority=priority)
            events.record(tx, batch_id, "priority", actor, detail=str(priority))
            return _get(tx, batch_id)

    def mark_published(self, batch_id: str, shown: str) -> None:
        """Note what a batch's status.json shows: `final` once it shows the end. Killed before, it is written again."""
        with self._database.write() as tx:
            tx.connection.execute(batches.update().where(batches.c.batch_id == batch_id).values(published=shown))


def _lanes(tx: Transaction, batch_id: str) -> list[Lane]:
    found = tx.connection.execute(_LANES, {"of_batch": batch_id}).all()
    if found:
        return [rows.lane(row) for row in found]
    return rows.archived_lanes(tx.connection.execute(_ARCHIVED, {"of_batch": batch_id}).scalar_one_or_none())


def _get(tx: Transaction, batch_id: str) -> Batch:
    row = tx.connection.execute(_BATCH, {"of_batch": batch_id}).one_or_none()
    if row is None:
        raise NotFound(f"no batch {batch_id}")
    return rows.batch(row)


def _prompt_tokens(new: Sequence[records.NewChunk]) -> Counter[str]:
    """Return the prompt tokens of chunks by model."""
    tokens: Counter[str] = Counter()
    for chunk in new:
        tokens[chunk.model] += chunk.prompt_tokens
    return tokens


def _prefix_groups(new: Sequence[records.NewChunk]) -> int:
    """Return how many groups of a model's chunks share long prefixes; 0 where all are one, and any order is as good."""
    groups = {chunk.prefix_group for chunk in new}
    return len(groups - {None}) if len(groups) > 1 else 0


def _insert_chunks(tx: Transaction, batch: Any, new: list[records.NewChunk], state: ChunkState) -> None:
    if not new:
        return
    tx.connection.execute(
        chunks.insert(),
        [{**msgspec.structs.asdict(chunk), "batch_id": batch.batch_id, "state": state} for chunk in new],
    )
    pending = state == ChunkState.PENDING
    models = sorted({chunk.model for chunk in new})
    floors = {model: queue_floor(tx, batch.customer, model) for model in models if pending}
    for model in models:
        of_model = [chunk for chunk in new if chunk.model == model]
        tokens = sum(chunk.prompt_tokens + chunk.max_output_tokens for chunk in of_model)
        tx.connection.execute(
            lanes.insert().values(
                batch_id=batch.batch_id,
                model=model,
                pending=len(of_model) if pending else 0,
                stopped=0 if pending else len(of_model),
                requests=sum(chunk.requests for chunk in of_model),
                pending_tokens=tokens if pending else 0,
                tokens=tokens,
                customer=batch.customer,
                deadline_at=batch.deadline_at,
                prefix_groups=_prefix_groups(of_model),
            )
        )
    for model, floor in floors.items():
        join_queue(tx, batch.customer, model, floor)
