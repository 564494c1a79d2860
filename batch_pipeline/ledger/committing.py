"""leased -> committed, of one chunk or of several in one transaction: what it does to the sums and the counters.

Each statement is sent once, however many chunks there are: a commit of eight costs little more than a commit of one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import sqlalchemy as sa
from sqlalchemy.dialects.postgresql import ARRAY

from batch_pipeline.errors import LeaseLost
from batch_pipeline.ledger import counters, events, rows
from batch_pipeline.ledger.database import Transaction, execute_all
from batch_pipeline.ledger.records import ChunkResult, ChunkState, LeaseRef
from batch_pipeline.ledger.schema import chunks
from batch_pipeline.ledger.transitions import LaneChange, chunk_event, move_lanes_and_look, open_chunks, part_sums

_LOCK = sa.select(chunks).where(rows.IS_ONE_OF).order_by(chunks.c.batch_id, chunks.c.chunk).with_for_update()
_COMMIT = chunks.update().values(
    state=ChunkState.COMMITTED,
    committed_at=sa.bindparam("now"),
    charged=None,
    expires_at=None,
    last_error=None,
)
_COMMIT_ONE = _COMMIT.where(
    chunks.c.batch_id == sa.bindparam("of_batch"), chunks.c.chunk == sa.bindparam("of_chunk")
).values(result=sa.bindparam("its_result"))
_GIVEN = rows.given(
    sa.column("of_batch", chunks.c.batch_id.type),
    sa.column("of_chunk", chunks.c.chunk.type),
    sa.column("its_result", chunks.c.result.type),
)
_COMMIT_GIVEN = _COMMIT.where(
    chunks.c.batch_id == _GIVEN.c.of_batch,
    chunks.c.chunk == _GIVEN.c.of_chunk,
    # These follow from the others. Without them a planner that does not know how few are given reads the whole table.
    chunks.c.batch_id == sa.any_(sa.bindparam("batch_ids", type_=ARRAY(sa.String))),
    chunks.c.chunk == sa.any_(sa.bindparam("numbers", type_=ARRAY(sa.Integer))),
).values(result=_GIVEN.c.its_result)
"""In Postgres, several at once."""


class Committed(NamedTuple):
    """What became of the leases that were to be committed."""

    refused: dict[LeaseRef, LeaseLost]
    actors: dict[LeaseRef, str]
    """The workers of those that are committed now, by this call or by an earlier one."""
    emptied: set[str]
    """Batches in one of whose lanes nothing is pending or leased any more."""


def lock_chunks(tx: Transaction, refs: Sequence[LeaseRef]) -> dict[tuple[str, int], Any]:
    """Return the rows of the chunks that the leases are of, locked in the order of their keys."""
    found = tx.connection.execute(_LOCK, rows.keys_of(refs))
    return {(row.batch_id, row.chunk): row for row in found}


def valid(row: Any, ref: LeaseRef) -> Any:
    """Return the row where the lease is valid. Raises LeaseLost."""
    if row is None or row.state != ChunkState.LEASED or row.token != ref.token:
        now = "gone" if row is None else f"{row.state} with token {row.token}"
        raise LeaseLost(f"lease {ref.token} of chunk {ref.chunk} of {ref.batch_id} is not valid any more: it is {now}")
    return row


def commit_chunks(tx: Transaction, results: Mapping[LeaseRef, ChunkResult]) -> Committed:
    """Commit those whose lease is valid. One that this lease has committed already, with the same result, stays so."""
    locked = lock_chunks(tx, list(results))
    done = Committed({}, {}, set())
    new: dict[LeaseRef, Any] = {}
    for ref, result in results.items():
        row: Any = locked.get((ref.batch_id, ref.chunk))
        try:
            if _is_committed(row, ref, result):
                if not open_chunks(tx, ref.batch_id):
                    done.emptied.add(ref.batch_id)
            else:
                new[ref] = valid(row, ref)
        except LeaseLost as error:
            done.refused[ref] = error
        else:
            done.actors[ref] = str(row.worker_id)
    done.emptied.update(_commit(tx, dict(sorted(new.items())), results))
    return done


def _is_committed(row: Any, ref: LeaseRef, result: ChunkResult) -> bool:
    if row is None or row.state != ChunkState.COMMITTED or row.token != ref.token:
        return False
    if row.result != rows.json(result):
        raise LeaseLost(f"chunk {ref.chunk} of {ref.batch_id} was committed with another result")
    return True


def _commit(tx: Transaction, new: Mapping[LeaseRef, Any], results: Mapping[LeaseRef, ChunkResult]) -> set[str]:
    """Commit chunks whose rows are locked, in the order of their keys; returns the batches of emptied lanes."""
    given = [{"of_batch": ref.batch_id, "of_chunk": ref.chunk, "its_result": rows.json(results[ref])} for ref in new]
    if len(given) > 1 and tx.is_postgres:
        batch_ids, numbers = list({ref.batch_id for ref in new}), list({ref.chunk for ref in new})
        parameters = {rows.GIVEN: rows.json(given), "batch_ids": batch_ids, "numbers": numbers, "now": tx.now}
        tx.connection.execute(_COMMIT_GIVEN, parameters)
    else:
        execute_all(tx, _COMMIT_ONE, [{**row, "now": tx.now} for row in given])
    events.record_all(tx, [_event(tx, ref, row, results[ref]) for ref, row in new.items()])
    sums: dict[tuple[str, str], Counter[str]] = {}
    more_tokens: dict[tuple[str, str], float] = {}
    for ref, row in new.items():
        lane = (ref.batch_id, str(row.model))
        sums.setdefault(lane, Counter()).update(_change(row, results[ref]))
        result = results[ref]
        more = counters.correction(row, counters.used(row, result.failed, result.input_tokens + result.output_tokens))
        more_tokens[lane] = more_tokens.get(lane, 0.0) + more
    moved = move_lanes_and_look(tx, [LaneChange(*lane, sums[lane]) for lane in sorted(sums)])
    by_customer: dict[tuple[str, str], float] = {}
    for batch_id, model, customer, _ in moved:
        by_customer[model, customer] = by_customer.get((model, customer), 0.0) + more_tokens[batch_id, model]
    counters.correct_all(tx, by_customer)
    return {lane.batch_id for lane in moved if not lane.open_chunks}


def _event(tx: Transaction, ref: LeaseRef, row: Any, result: ChunkResult) -> dict[str, object]:
    detail = f"{result.completed} completed, {result.failed} failed"
    return chunk_event(
        tx, ref.batch_id, ref.chunk, "committed", row.worker_id, token=ref.token, run_id=row.run_id, detail=detail
    )


def _change(row: Any, result: ChunkResult) -> dict[str, int]:
    """Return what a commit adds to its lane: what the checkpoints have counted already is not counted again."""
    completed, failed, given, cached, made = part_sums(rows.parts(row.parts))
    return {
        "leased": -1,
        "committed": 1,
        "completed": result.completed - completed,
        "failed": result.failed - failed,
        "input_tokens": result.input_tokens - given,
        "cached_tokens": result.cached_tokens - cached,
        "output_tokens": result.output_tokens - made,
    }
