"""When batches will be done, and whether they can be in time: the ledger's queues, the catalogue's capacity and the
pure estimates brought together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from batch_pipeline.ledger import Ledger
from batch_pipeline.ledger.model_queues import ModelQueue
from batch_pipeline.ledger.records import Worker, WorkerState
from batch_pipeline.live import live_gpus
from batch_pipeline.scheduling.dedicated import LateBatch
from batch_pipeline.scheduling.finish import QueuedBatch, estimated_finishes
from batch_pipeline.scheduling.order import Conditions
from batch_pipeline.scheduling.placement import Backlog, Capacity
from batch_pipeline.scheduling.risk import Demand, Outlook, shortfall
from batch_pipeline.scheduling.supply import Fleet, speeds_of, supply_of, to_launch
from batch_pipeline.settings import Settings

_HOLDS_GPUS = (WorkerState.STARTING, WorkerState.READY, WorkerState.DRAINING)


@dataclass(frozen=True, eq=False)
class Forecast:
    """What is expected of one model's queue."""

    finishes: dict[str, float]
    """UTC seconds by batch; without those of which nothing is known."""
    demands: dict[str, Demand]
    """What each batch of the queue asks for, and what there can be; for all that have something left."""
    late: list[LateBatch]
    """Those that would end after their deadline without workers of their own, and could be in time."""


def outlook(batch_id: str, models: Iterable[str], now: float, *, ledger: Ledger, settings: Settings) -> Outlook:
    """Return what is expected of a batch whose chunks are on these models: nothing of one that is not in progress.

    A batch is done when all its models are: one of which nothing is known leaves its finish unknown.
    """
    finishes: list[float | None] = []
    demands: list[Demand] = []
    for model in models:
        found = ledger.queues.look(model, now, lambda queue: _forecast(queue, settings))
        if batch_id in found.demands:
            finishes.append(found.finishes.get(batch_id))
            demands.append(found.demands[batch_id])
    known = [finish for finish in finishes if finish is not None]
    return Outlook(
        finish_at=max(known) if known and len(known) == len(finishes) else None,
        shortfall=next((said for demand in demands if (said := shortfall(demand)) is not None), None),
    )


def late_batches(models: Iterable[str], now: float, *, ledger: Ledger, settings: Settings) -> list[LateBatch]:
    """Return the batches of these models that workers of their own could save."""
    return [
        late
        for model in models
        for late in ledger.queues.look(model, now, lambda queue: _forecast(queue, settings)).late
    ]


def _forecast(queue: ModelQueue, settings: Settings) -> Forecast:
    there = [worker for worker in queue.workers if _is_there(worker, queue.now, settings)]
    own = [worker for worker in there if worker.model == queue.model]
    fleet = _fleet(queue, [worker for worker in own if not worker.batches], there, settings)
    supply = supply_of(fleet)
    finishes: dict[str, float] = {}
    if supply is not None:
        ready = [w.tokens_per_second for w in own if w.state == WorkerState.READY and not w.leave]
        scheduling = settings.scheduling
        conditions = Conditions(
            now=queue.now,
            tokens_per_second=speeds_of(ready).together(fleet.known_speed),
            margin_seconds=scheduling.at_risk_minutes * 60,
        )
        share = scheduling.at_risk_share
        finishes = estimated_finishes(queue.queued, queue.shares, supply, conditions, share)
    most, because = fleet.most_speed, _no_worker_because(queue.model, settings)
    demands = {
        batch.waiting.batch_id: Demand(
            model=queue.model,
            tokens=_left(batch),
            deadline_at=batch.waiting.deadline_at,
            now=queue.now,
            most_workers=max(fleet.most_workers, len(own)),
            most_tokens_per_second=most,
            no_worker_because=because,
            loading_seconds=0.0 if fleet.speeds else fleet.loading_seconds,
        )
        for batch in queue.queued
    }
    late = _late(queue, finishes, demands, fleet)
    for batch_id, finish in _by_dedicated_workers(queue, own).items():
        finishes[batch_id] = min(finish, finishes.get(batch_id, finish))
    return Forecast(finishes=finishes, demands=demands, late=late)


def _late(
    queue: ModelQueue, finishes: Mapping[str, float], demands: Mapping[str, Demand], fleet: Fleet
) -> list[LateBatch]:
    """Return the batches that end late by the workers that all share, as `finishes` has them."""
    return [
        LateBatch(
            batch_id=batch.waiting.batch_id,
            model=queue.model,
            tokens=_left(batch),
            finish_at=finishes[batch.waiting.batch_id],
            deadline_at=batch.waiting.deadline_at,
            worker_tokens_per_second=fleet.worker_speed,
            loading_seconds=fleet.loading_seconds,
        )
        for batch in queue.queued
        if batch.waiting.pending_chunks
        and fleet.worker_speed
        and finishes.get(batch.waiting.batch_id, 0.0) > batch.waiting.deadline_at
        and shortfall(demands[batch.waiting.batch_id]) is None
    ]


def _left(batch: QueuedBatch) -> float:
    return batch.waiting.pending_tokens + batch.leased_tokens


def _is_there(worker: Worker, now: float, settings: Settings) -> bool:
    return worker.state in _HOLDS_GPUS and now - worker.seen_at <= settings.worker.lease_seconds


def _fleet(queue: ModelQueue, shared: Sequence[Worker], there: Sequence[Worker], settings: Settings) -> Fleet:
    """Return the workers that any batch of the model may have, with those that its backlog will bring."""
    model = settings.models.get(queue.model)
    of_model = [worker for worker in queue.workers if worker.model == queue.model]
    measured = [worker.tokens_per_second for worker in of_model if worker.tokens_per_second]
    starts = [worker.ready_at - worker.started_at for worker in of_model if worker.ready_at is not None]
    staying = [worker for worker in shared if worker.state != WorkerState.DRAINING and not worker.leave]
    launches = most_workers = 0
    if model is not None:
        gpus = model.kubernetes.gpus
        most_workers = min(model.pool_limit, settings.scheduling.total_gpus // gpus if gpus else model.pool_limit)
        held = sum(settings.models[w.model].kubernetes.gpus for w in there if w.model in settings.models)
        dedicated = sum(worker.model == queue.model and bool(worker.batches) for worker in there)
        capacity = Capacity(
            model=queue.model,
            workers=len(staying) + dedicated,
            dedicated=dedicated,
            pool_limit=model.pool_limit,
            gpus_per_worker=gpus,
        )
        # What a Prometheus query gives to live traffic only the sensor knows; its schedule everybody does.
        scheduled = live_gpus(settings.live.schedule, queue.now)
        free = max(settings.scheduling.total_gpus - scheduled - held, 0)
        launches = to_launch(_backlog(queue, bool(staying)), capacity, free, settings.scheduling.chunks_per_worker)
    declared = None if model is None else model.tokens_per_second
    return Fleet(
        now=queue.now,
        speeds=[worker.tokens_per_second for worker in staying if worker.state == WorkerState.READY],
        loading_since=[worker.started_at for worker in staying if worker.state == WorkerState.STARTING],
        to_launch=launches,
        # Those that are there count, whatever the catalogue says by now: they go on.
        most_workers=max(most_workers, len(staying)),
        known_speed=fmean(measured) if measured else declared,
        loading_seconds=median(starts) if starts else settings.scheduling.loading_seconds,
    )


def _no_worker_because(model: str, settings: Settings) -> str | None:
    """Return why there can be no worker of a model, as a phrase; None where there can."""
    known, total = settings.models.get(model), settings.scheduling.total_gpus
    if known is None:
        return f"the service's catalogue has no model {model} (any more)"
    if known.kubernetes.gpus > total:
        return f"each needs {known.kubernetes.gpus} GPUs, and the service has {total} (scheduling.total_gpus)"
    return None


def _backlog(queue: ModelQueue, has_workers: bool) -> Backlog:
    """Return what the sensor will launch workers for: without any, the leases that there are will run out."""
    waiting = [batch.waiting for batch in queue.queued]
    leased = sum(batch.leased_chunks for batch in queue.queued)
    return Backlog(
        model=queue.model,
        pending=sum(batch.pending_chunks for batch in waiting) + (0 if has_workers else leased),
        pending_tokens=int(sum(batch.pending_tokens for batch in waiting)),
        leased=leased if has_workers else 0,
        first_deadline_at=min((batch.deadline_at for batch in waiting), default=0.0),
    )


def _by_dedicated_workers(queue: ModelQueue, own: Sequence[Worker]) -> dict[str, float]:
    """Return when batches would be done by the ready workers that are theirs alone; each is divided evenly."""
    speeds: dict[str, float] = {}
    for worker in own:
        if worker.batches and worker.state == WorkerState.READY and worker.tokens_per_second:
            for batch_id in worker.batches:
                speeds[batch_id] = speeds.get(batch_id, 0.0) + worker.tokens_per_second / len(worker.batches)
    left = {batch.waiting.batch_id: _left(batch) for batch in queue.queued}
    return {batch_id: queue.now + left[batch_id] / speed for batch_id, speed in speeds.items() if batch_id in left}
