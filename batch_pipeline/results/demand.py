"""An operator's demand for the chunks of a batch: want them, wait for them, sum them up."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import msgspec

from batch_pipeline.errors import BatchPipelineError, NotAllowedInState, NotFound
from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.records import Batch, BatchStatus, ChunkState
from batch_pipeline.results.archived import all_chunks
from batch_pipeline.store import ObjectStore

POLL_SECONDS = 2.0


class StillOpen(BatchPipelineError):
    """The wait for a batch's chunks is over, and they have not all stopped."""


class ChunkSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A batch's chunks together. Tokens, requests and chunks are counts."""

    customer: str
    committed: int
    stopped: int
    """Those that were given up included."""
    given_up: int
    """After too many attempts: their unfinished requests are errors."""
    open: int
    completed: int
    failed: int
    input_tokens: int
    cached_tokens: int
    output_tokens: int
    attempts: int
    """Leases of all chunks together; as many as chunks where nothing was repeated."""
    workers: list[str]
    engine_versions: list[str]
    model_versions: list[str]
    result_hashes: list[str]
    """sha256 of each committed chunk's result object, in chunk order."""


class Anew(msgspec.Struct, frozen=True):
    """An order to run again what is committed, for instance after a mend of a model."""

    order: str
    """Carried out once, however often it is given."""
    model_version: str | None = None
    """Given: of the committed chunks only those whose results came from this version."""


def want(batch_ids: list[str], ledger: Ledger, *, priority: int, actor: str, anew: Anew | None = None) -> list[str]:
    """Make the ledger want what is missing of these batches, or with `anew` all of them; returns those not done yet.

    Raises NotFound for an unknown batch, NotAllowedInState for one whose results are final without all of its chunks
    or, with `anew`, are final or being assembled (a status never goes backwards, I6): before anything is changed,
    unless one of them comes to its end at this very moment. Killed half-way: the batches seen so far are wanted; again
    is harmless.
    """
    for batch_id in batch_ids:
        check_wanted(ledger.batches.get(batch_id), anew=anew is not None)
    waiting = []
    for batch_id in batch_ids:
        batch = ledger.batches.get(batch_id)
        if batch.status.is_final:
            continue
        if anew is None:
            ledger.chunks.want_again(batch_id, actor)
        else:
            ledger.chunks.run_again(batch_id, actor, order=anew.order, model_version=anew.model_version)
        if batch.priority != priority:
            ledger.batches.set_priority(batch_id, priority, actor)
        waiting.append(batch_id)
    return waiting


def refusals(batch_ids: list[str], ledger: Ledger) -> dict[str, str]:
    """Return of each batch that `want` would refuse why: it is unknown, or its results are final without all chunks."""
    refused = {}
    for batch_id in batch_ids:
        try:
            check_wanted(ledger.batches.get(batch_id), anew=False)
        except (NotFound, NotAllowedInState) as error:
            refused[batch_id] = str(error)
    return refused


def check_wanted(batch: Batch, *, anew: bool) -> None:
    """Raise NotAllowedInState where nothing of a batch can be run any more, or nothing run again."""
    if batch.status.is_final and (anew or batch.status != BatchStatus.COMPLETED):
        raise NotAllowedInState(
            f"batch {batch.batch_id} is {batch.status}, its results are final and never change: nothing was run. "
            "Submit what is missing, or what is to be run again, as a new batch"
        )


def wait(batch_ids: list[str], ledger: Ledger, timeout_seconds: float) -> Iterator[str]:
    """Yield each batch once all of its chunks have stopped, in the order in which that happens.

    Looks at the ledger every two seconds, at one query per waiting batch. Raises StillOpen naming what is left.
    """
    waiting = list(batch_ids)
    ends_at = time.monotonic() + timeout_seconds
    pause = threading.Event()
    while waiting:
        done = [batch_id for batch_id in waiting if _has_stopped(batch_id, ledger)]
        yield from done
        waiting = [batch_id for batch_id in waiting if batch_id not in done]
        if waiting and time.monotonic() > ends_at:
            raise StillOpen(_still_open(waiting, timeout_seconds))
        if waiting:
            pause.wait(POLL_SECONDS)


def _still_open(waiting: list[str], seconds: float) -> str:
    more = f" and {len(waiting) - 5} more" if len(waiting) > 5 else ""
    return (
        f"after {seconds:.0f} s the chunks of {', '.join(waiting[:5])}{more} are still open. They stay wanted: launch "
        "it again to go on waiting"
    )


def _has_stopped(batch_id: str, ledger: Ledger) -> bool:
    batch = ledger.batches.get(batch_id)
    merging = batch.status == BatchStatus.FINALIZING or batch.outcome == BatchStatus.FAILED
    return batch.status.is_final or merging


def summarise(batch_id: str, ledger: Ledger, store: ObjectStore) -> ChunkSummary:
    """Return a batch's chunks together: every one of them is read, in the ledger or in the manifest.

    Raises NotFound; NotAllowedInState where its files were removed; ProofFailed, StoreError.
    """
    batch = ledger.batches.get(batch_id)
    lanes = ledger.batches.lanes(batch_id)
    attempts, given_up = 0, 0
    workers, engines, models, hashes = set[str](), set[str](), set[str](), list[str]()
    for chunk in all_chunks(batch, ledger, store):
        attempts += chunk.token
        given_up += chunk.state == ChunkState.FAILED
        if chunk.worker_id is not None:
            workers.add(chunk.worker_id)
        if chunk.state == ChunkState.COMMITTED and chunk.result is not None:
            engines.add(chunk.result.engine_version)
            models.add(chunk.result.model_version)
            hashes.append(chunk.result.sha256)
    return ChunkSummary(
        customer=batch.customer,
        committed=sum(lane.committed for lane in lanes),
        stopped=sum(lane.stopped for lane in lanes),
        given_up=given_up,
        open=sum(lane.pending + lane.leased for lane in lanes),
        completed=sum(lane.completed for lane in lanes),
        failed=sum(lane.failed for lane in lanes),
        input_tokens=sum(lane.input_tokens for lane in lanes),
        cached_tokens=sum(lane.cached_tokens for lane in lanes),
        output_tokens=sum(lane.output_tokens for lane in lanes),
        attempts=attempts,
        workers=sorted(workers),
        engine_versions=sorted(engines),
        model_versions=sorted(models),
        result_hashes=hashes,
    )
