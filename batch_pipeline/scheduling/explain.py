"""Why a batch is where it is (invariant I9): a name for every wait.

Pure: the caller brings a snapshot. `batch_pipeline.results.outbox` shows the answers in the status.
"""

from __future__ import annotations

import msgspec


class LaneView(msgspec.Struct, frozen=True, kw_only=True):
    """Chunks of the batch on one model."""

    model: str
    pending: int
    leased: int


class WorkerView(msgspec.Struct, frozen=True, kw_only=True):
    """A worker of one of the batch's models; `silent_seconds` since its last heartbeat."""

    model: str
    state: str
    detail: str | None
    silent_seconds: float
    serves_batch: bool = True
    """False where it is dedicated to other batches."""


class Situation(msgspec.Struct, frozen=True, kw_only=True):
    """What the ledger knows of a batch at one moment."""

    status: str
    outcome: str | None
    intake_done: bool
    intake_attempts: int
    merge_attempts: int
    lanes: list[LaneView]
    workers: list[WorkerView]
    lease_seconds: float
    """A worker that was silent for longer is not counted as there."""
    notices: list[str] = []
    """What holds up every batch, for instance that the object store is away."""
    model_notices: dict[str, str] = {}
    """What keeps a model's next worker, for instance that its run waits for a GPU."""


def explain(situation: Situation) -> str | None:
    """Return what the batch is waiting for, as a phrase for customers and operators; None after the end."""
    if situation.status in ("completed", "failed", "expired", "cancelled"):
        return None
    reason = _reason(situation)
    return "; ".join([reason, *(notice for notice in situation.notices if notice not in reason)])


def _reason(situation: Situation) -> str:
    if not situation.intake_done:
        return _run("validation", situation.intake_attempts)
    waiting = [lane for lane in situation.lanes if lane.pending or lane.leased]
    if situation.outcome == "failed":
        return _run("the file of its errors (it cannot run)", situation.merge_attempts)
    if situation.status == "finalizing":
        return _run("the results file", situation.merge_attempts)
    if situation.outcome is not None:
        open_chunks = sum(lane.leased for lane in waiting)
        chunks = "the chunk that one is" if open_chunks == 1 else f"{open_chunks} chunks that they are"
        return f"stopping: waiting for workers to hand back {chunks} running"
    reasons = [_lane(lane, situation) for lane in waiting]
    return "; ".join(reasons) if reasons else _run("the results file", situation.merge_attempts)


def _run(what: str, attempts: int) -> str:
    if not attempts:
        return f"waiting for {what}: it is not its turn yet"
    if attempts == 1:
        return f"waiting for {what}: its run is queued or under way"
    return f"waiting for {what}: requested {attempts} times; see the runs of this batch in Dagster"


def _lane(lane: LaneView, situation: Situation) -> str:
    workers = [worker for worker in _heard_of(situation) if worker.model == lane.model]
    ready = [worker for worker in workers if worker.state == "ready"]
    starting = [worker for worker in workers if worker.state == "starting"]
    if lane.leased and ready:
        # What holds all of them up holds the batch up; what holds up one of several only makes it slower.
        trouble = "" if any(worker.detail is None for worker in ready) else f", held up: {ready[0].detail}"
        return f"running on {lane.model}{trouble}"
    if ready:
        return f"waiting for a worker of {lane.model} that is busy with other batches"
    if starting:
        doing = [starting[0].detail or "its engine is loading the model"]
        return f"waiting for a worker of {lane.model}: {'; '.join(doing + _notice_of(lane, situation))}"
    # A worker that failed is not heard of again, so its age does not matter: the newest one counts.
    told = [worker for worker in situation.workers if worker.model == lane.model]
    if told and told[0].state == "failed":
        why = [f"worker cannot start: {told[0].detail or 'no reason given'}", *_notice_of(lane, situation)]
        return f"waiting for a worker of {lane.model}: {'; '.join(why)}"
    if lane.leased:
        why = ["the last one has fallen silent, its lease is running out", *_notice_of(lane, situation)]
        return f"waiting for a worker of {lane.model}: {'; '.join(why)}"
    why = _notice_of(lane, situation) or ["none is running yet"]
    return f"waiting for a worker of {lane.model}: {why[0]}"


def _notice_of(lane: LaneView, situation: Situation) -> list[str]:
    notice = situation.model_notices.get(lane.model)
    return [] if notice is None else [notice]


def _heard_of(situation: Situation) -> list[WorkerView]:
    """Return the workers that are there and may serve the batch."""
    return [
        worker
        for worker in situation.workers
        if worker.serves_batch and worker.silent_seconds <= situation.lease_seconds
    ]
