"""The end of a batch: final status, files, bill, the news of it and the totals, all in one transaction (I6)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import sqlalchemy as sa

from batch_pipeline.errors import NotAllowedInState, ProofFailed
from batch_pipeline.ledger import events, files, records, tallies
from batch_pipeline.ledger.database import Transaction
from batch_pipeline.ledger.records import BatchStatus
from batch_pipeline.ledger.schema import lanes, service
from batch_pipeline.ledger.transitions import update_batch
from batch_pipeline.ledger.usage import Charge, charge
from batch_pipeline.ledger.webhooks import queue_deliveries
from batch_pipeline.scheduling.accuracy import Kept, Milestone, error_class, relative_error
from batch_pipeline.scheduling.estimates import Used, remembered


def end(
    tx: Transaction,
    batch: Any,
    final: records.FinalFiles,
    charges: Sequence[Charge],
    *,
    run_id: str | None,
    actor: str,
) -> None:
    """finalizing -> completed | expired | cancelled, and validating -> failed; `batch` is the locked row.

    Raises NotAllowedInState while its chunks have not stopped, ProofFailed where the counts do not add up (I7).
    """
    mergeable = batch.status == BatchStatus.FINALIZING or (
        batch.status == BatchStatus.VALIDATING and batch.outcome == BatchStatus.FAILED
    )
    if not mergeable:
        raise NotAllowedInState(f"batch {batch.batch_id} is {batch.status}: some of its chunks have not stopped yet")
    counted = final.completed + final.failed + final.expired + final.cancelled + batch.invalid
    if counted != batch.total:
        raise ProofFailed([f"the files of {batch.batch_id} account for {counted} requests of {batch.total}"])
    counts = msgspec.structs.asdict(final)
    del counts["output_bytes"], counts["error_bytes"]
    update_batch(tx, batch.batch_id, status=batch.outcome, ended_at=tx.now, merge_run_id=run_id, **counts)
    files.insert_results(tx, batch, final)
    detail = (
        f"{final.completed} completed, {final.failed} failed, {final.expired} expired, "
        f"{final.cancelled} cancelled, {batch.invalid} invalid"
    )
    events.record(tx, batch.batch_id, batch.outcome, actor, run_id=run_id, detail=detail)
    queue_deliveries(tx, batch.batch_id, batch.customer, batch.outcome)
    charge(tx, batch.batch_id, charges)
    _remember_usage(tx, batch)
    tallies.count(tx, _counted(batch, final))


def _remember_usage(tx: Transaction, batch: Any) -> None:
    """Add what the batch's answered requests have really used to what is known of its customer and each model."""
    sums = (lanes.c.model, lanes.c.requests, lanes.c.tokens, lanes.c.completed)
    query = sa.select(*sums, lanes.c.input_tokens + lanes.c.output_tokens).where(lanes.c.batch_id == batch.batch_id)
    for model, requests, tokens, answered, used in tx.connection.execute(query.order_by(lanes.c.model)).all():
        if not (tokens and requests and answered and used):
            continue
        one = (service.c.model == model) & (service.c.customer == batch.customer)
        row = tx.connection.execute(sa.select(service).where(one).with_for_update()).one_or_none()
        if row is not None:
            history = Used(estimated=row.estimated_tokens, real=row.real_tokens)
            known = remembered(history, Used(estimated=tokens * answered / requests, real=used))
            changed = {"estimated_tokens": known.estimated, "real_tokens": known.real}
            tx.connection.execute(service.update().where(one).values(**changed))


def _counted(batch: Any, files: records.FinalFiles) -> dict[str, int]:
    """Return what a batch that has ended adds to the totals."""
    requests = {name: getattr(files, name) for name in ("completed", "failed", "expired", "cancelled")}
    return {
        f"{tallies.ENDED}{batch.outcome}": 1,
        **{f"{tallies.REQUESTS}{result}": count for result, count in requests.items()},
        f"{tallies.REQUESTS}invalid": batch.invalid,
        f"{tallies.TOKENS}input": files.input_tokens,
        f"{tallies.TOKENS}cached": files.cached_tokens,
        f"{tallies.TOKENS}output": files.output_tokens,
        **_judged(batch),
    }


def _judged(batch: Any) -> dict[str, int]:
    """Return the classes of the errors of a batch's estimates; of one that was cancelled or expired nobody knows when
    it would have been done.
    """
    if batch.outcome != BatchStatus.COMPLETED or batch.estimates is None:
        return {}
    kept = msgspec.json.decode(batch.estimates, type=dict[Milestone, Kept])
    errors = {milestone: relative_error(one, batch.finalizing_at) for milestone, one in kept.items()}
    return {
        f"{tallies.ESTIMATES}{milestone}.{error_class(error)}": 1
        for milestone, error in errors.items()
        if error is not None
    }
