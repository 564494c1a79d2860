"""Launches GPU workers where there is backlog, and keeps the pools' limits equal to the catalogue's."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

import dagster as dg
import msgspec

from assets.gpu_workers import DEDICATED_TAG, dedicated_request, is_dedicated, pool_name
from batch_pipeline.ledger import Ledger, notices
from batch_pipeline.ledger.records import Worker, WorkerState
from batch_pipeline.live_load import LiveLoad
from batch_pipeline.results.forecast import late_batches
from batch_pipeline.scheduling.dedicated import Bounds, LateBatch, dedications, late_workers
from batch_pipeline.scheduling.placement import Backlog, Capacity, Launch, plan_workers
from batch_pipeline.scheduling.switching import Cluster, Holder, Rules, departures
from batch_pipeline.settings import Settings
from resources import Service
from sensors import starts, worker_runs
from sensors.runs import count_under_way, is_failing, pause_seconds


class _Given(NamedTuple):
    """What one tick begins with."""

    runs: dict[str, Sequence[dg.RunRecord]]
    """Of each model, those under way."""
    gpus: int
    """What live traffic leaves."""


class _Served(NamedTuple):
    """What the ledger's workers tell of the models."""

    holders: list[Holder]
    """The workers that have GPUs."""
    at: dict[str, float]
    """When each model last had a ready worker that any batch may have, as far as that is known."""
    loading_seconds: dict[str, float]
    """What a start takes, of the models of which one was seen."""


class _Look(NamedTuple):
    """What one tick has found."""

    runs: dict[str, Sequence[dg.RunRecord]]
    """Of each model, those under way."""
    backlogs: list[Backlog]
    pausing: set[str]
    """Models whose last starts have failed."""
    capacities: list[Capacity]
    launches: list[Launch]
    gpus: int
    """What live traffic leaves."""
    served: _Served
    now: float


def gpu_worker_sensor(settings: Settings, jobs: Mapping[str, dg.JobDefinition]) -> dg.SensorDefinition:
    """Return the sensor that launches workers; `jobs` maps a model's name to its worker job."""
    live = LiveLoad(settings.live)

    @dg.sensor(
        name="gpu_workers",
        jobs=list(jobs.values()),
        minimum_interval_seconds=settings.scheduling.sensor_interval_seconds,
        default_status=dg.DefaultSensorStatus.RUNNING,
        description=(
            "Launches GPU workers where there is backlog, within each model's pool and the GPUs that live traffic "
            "leaves; asks workers to leave whose GPUs live traffic or a model without a worker needs more. Says why a "
            "model has no worker yet, and has the runs of lost workers ended."
        ),
    )
    def gpu_workers(context: dg.SensorEvaluationContext, service: Service) -> dg.SensorResult:
        parts = service.open()
        keep_pool_limits(context.instance, settings)
        runs = {name: worker_runs.records_under_way(context.instance, job.name) for name, job in jobs.items()}
        cursor = _agree(context, parts.ledger, runs, settings.worker.lease_seconds)
        for name, records in runs.items():
            starts.end_without_pod(context.instance, records, parts.ledger.now())
            for record in records:
                limit = settings.models[name].kubernetes.start_seconds
                worker_runs.end_stuck(context.instance, record, parts.ledger.now(), limit)
        needed, trouble = live.gpus(parts.ledger.now())
        if trouble is not None:
            context.log.warning(trouble)
        gpus = max(0, settings.scheduling.total_gpus - needed)
        look = _look(context.instance, parts.ledger, settings, jobs, _Given(runs, gpus))
        _give_way(context, parts.ledger, settings, look)
        _tell(context.instance, parts.ledger, settings, jobs, look)
        requests = [
            dg.RunRequest(job_name=jobs[launch.model].name) for launch in look.launches for _ in range(launch.workers)
        ]
        requests += _for_single_batches(parts.ledger, settings, look)
        if requests:
            return dg.SensorResult(run_requests=requests, cursor=cursor)
        waiting = f"; pausing after failed starts: {', '.join(sorted(look.pausing))}" if look.pausing else ""
        skipped = f"no worker to launch for {len(look.backlogs)} models with work{waiting}"
        return dg.SensorResult(skip_reason=skipped, cursor=cursor)

    return gpu_workers


def _for_single_batches(ledger: Ledger, settings: Settings, look: _Look) -> list[dg.RunRequest]:
    """Return the requests of workers for batches that would end too late, out of what the others leave.

    Their runs are known by a tag: killed before they are submitted, the next tick asks for them again.
    """
    most = settings.scheduling.dedicated_workers_at_most
    if not most:
        return []
    launching = {launch.model: launch.workers for launch in look.launches}
    capacities = [
        msgspec.structs.replace(capacity, workers=capacity.workers + launching.get(capacity.model, 0))
        for capacity in look.capacities
    ]
    held = sum(capacity.workers * capacity.gpus_per_worker for capacity in capacities)
    models = [backlog.model for backlog in look.backlogs if backlog.model not in look.pausing]
    tags = [record.dagster_run.tags for records in look.runs.values() for record in records]
    made = dedications(
        late_batches(models, look.now, ledger=ledger, settings=settings),
        Counter(tag[DEDICATED_TAG] for tag in tags if DEDICATED_TAG in tag),
        capacities,
        Bounds(most=most, free_gpus=max(look.gpus - held, 0)),
        look.now,
    )
    return [dedicated_request(one.model, one.batch_id) for one in made for _ in range(one.workers)]


def keep_pool_limits(instance: dg.DagsterInstance, settings: Settings, *, only_known: bool = False) -> None:
    """Make each pool's limit what the catalogue says; writes only where they differ.

    With `only_known` no pool is made: two sensors that make the same one at the same moment fail.
    """
    limits = {pool.name: pool.limit for pool in instance.event_log_storage.get_pool_limits()}
    for name, model in settings.models.items():
        if only_known and pool_name(name) not in limits:
            continue
        if limits.get(pool_name(name)) != model.pool_limit:
            instance.event_log_storage.set_concurrency_slots(pool_name(name), model.pool_limit)


def _agree(
    context: dg.SensorEvaluationContext,
    ledger: Ledger,
    runs: Mapping[str, Sequence[dg.RunRecord]],
    lease_seconds: float,
) -> str:
    """End the runs of lost workers, and ask workers of ended runs to leave; return the cursor for the next tick."""
    records = [record for of_model in runs.values() for record in of_model]
    run_ids = {record.dagster_run.run_id for record in records}
    since = msgspec.json.decode(context.cursor, type=dict[str, float]) if context.cursor else {}
    workers = ledger.workers.of_runs(sorted(run_ids))
    silence = worker_runs.find_lost(records, workers, ledger.now(), lease_seconds, since)
    for lost in silence.lost:
        worker_runs.end_lost(context.instance, ledger, lost)
    worker_runs.dismiss_orphans(context.instance, ledger, sorted(runs), run_ids, lease_seconds)
    return msgspec.json.encode(silence.since).decode()


def _give_way(context: dg.SensorEvaluationContext, ledger: Ledger, settings: Settings, look: _Look) -> None:
    """Ask workers to leave. Killed in between, the next tick asks the rest; who was asked twice leaves once."""
    cluster = Cluster(
        backlogs=[backlog for backlog in look.backlogs if backlog.model not in look.pausing],
        capacities=look.capacities,
        holders=look.served.holders,
        gpus=look.gpus,
        now=look.now,
    )
    rules = Rules(
        loading_seconds=look.served.loading_seconds,
        default_loading_seconds=settings.scheduling.loading_seconds,
        chunks_per_worker=settings.scheduling.chunks_per_worker,
        turn=settings.scheduling.turn,
    )
    for departure in departures(cluster, rules):
        context.log.info(f"{departure.worker_id} is asked to leave: {departure.reason}")
        ledger.workers.ask_to_leave(departure.worker_id)


def _served(workers: Sequence[Worker], under_way: set[str], now: float, lease_seconds: float) -> _Served:
    """Return what workers that were heard of lately tell; `under_way` are the runs of those that may have GPUs."""
    holders = [
        Holder(
            worker_id=worker.worker_id,
            model=worker.model,
            ready_at=worker.ready_at,
            is_leaving=worker.leave or worker.state == WorkerState.DRAINING,
            is_dedicated=bool(worker.batches),
        )
        for worker in workers
        if worker.run_id in under_way
        and worker.state not in (WorkerState.STOPPED, WorkerState.FAILED)
        and now - worker.seen_at <= lease_seconds
    ]
    at: dict[str, float] = {}
    starts: dict[str, list[float]] = {}
    for worker in workers:
        if worker.ready_at is not None:
            starts.setdefault(worker.model, []).append(worker.ready_at - worker.started_at)
            if not worker.batches:
                at[worker.model] = max(at.get(worker.model, worker.seen_at), worker.seen_at)
    return _Served(holders, at, {model: median(seconds) for model, seconds in starts.items()})


def _look(
    instance: dg.DagsterInstance,
    ledger: Ledger,
    settings: Settings,
    jobs: Mapping[str, dg.JobDefinition],
    given: _Given,
) -> _Look:
    backlogs = [backlog for backlog in ledger.backlog() if backlog.model in jobs]
    first_pause = settings.scheduling.retry_run_seconds
    pausing = {
        backlog.model
        for backlog in backlogs
        if _is_pausing(backlog.model, ledger, settings) or is_failing(instance, jobs[backlog.model].name, first_pause)
    }
    now = ledger.now()
    under_way = {record.dagster_run.run_id for records in given.runs.values() for record in records}
    served = _served(ledger.workers.of_models(list(jobs)), under_way, now, settings.worker.lease_seconds)
    capacities = [
        Capacity(
            model=name,
            workers=count_under_way(instance, job.name),
            dedicated=sum(is_dedicated(record.dagster_run) for record in given.runs[name]),
            pool_limit=settings.models[name].pool_limit,
            gpus_per_worker=settings.models[name].kubernetes.gpus,
            served_at=served.at.get(name, -math.inf),
        )
        for name, job in jobs.items()
    ]
    if len(backlogs) > 1:
        backlogs = _with_late(
            backlogs,
            capacities,
            late_batches([backlog.model for backlog in backlogs], now, ledger=ledger, settings=settings),
            served.holders,
            now,
        )
    launches = plan_workers(
        [backlog for backlog in backlogs if backlog.model not in pausing],
        capacities,
        given.gpus,
        settings.scheduling.chunks_per_worker,
        sum(settings.models[holder.model].kubernetes.gpus for holder in served.holders if holder.is_leaving),
    )
    return _Look(given.runs, backlogs, pausing, capacities, launches, given.gpus, served, now)


def _with_late(
    backlogs: Sequence[Backlog],
    capacities: Sequence[Capacity],
    late: Sequence[LateBatch],
    holders: Sequence[Holder],
    now: float,
) -> list[Backlog]:
    """Return what waits with the workers that late batches need beside those that are launched and not known yet."""
    needed = late_workers(late, capacities, now)
    known = Counter(holder.model for holder in holders if not holder.is_dedicated)
    coming = {capacity.model: max(capacity.shared - known[capacity.model], 0) for capacity in capacities}
    return [
        msgspec.structs.replace(
            backlog, late_workers=max(needed.get(backlog.model, 0) - coming.get(backlog.model, 0), 0)
        )
        for backlog in backlogs
    ]


def _tell(
    instance: dg.DagsterInstance,
    ledger: Ledger,
    settings: Settings,
    jobs: Mapping[str, dg.JobDefinition],
    look: _Look,
) -> None:
    """Let the status of a model's batches say what keeps its next worker (invariant I9). Killed in between, some still
    say what was true at the last tick, for two minutes at most.
    """
    waiting = {backlog.model for backlog in look.backlogs if backlog.pending}
    under_way = {capacity.model: capacity.workers for capacity in look.capacities}
    launching = {launch.model for launch in look.launches}
    for model, job in jobs.items():
        reason = None
        if model not in waiting or model in launching:
            pass
        elif under_way[model]:
            workers = ledger.workers.of_runs([record.dagster_run.run_id for record in look.runs[model]])
            reason = worker_runs.why_waiting(instance, look.runs[model], workers, ledger.now())
        elif model in look.pausing:
            failure = worker_runs.last_failure(instance, job.name)
            reason = None if failure is None else f"its last run failed, and the next one is to start soon: {failure}"
        else:
            reason = _gpus_taken(settings, under_way, look.gpus)
        if reason is None:
            ledger.notices.clear(notices.of_model(model))
        else:
            ledger.notices.post(notices.of_model(model), reason)


def _gpus_taken(settings: Settings, under_way: Mapping[str, int], gpus: int) -> str:
    taken = {model: count * settings.models[model].kubernetes.gpus for model, count in under_way.items() if count}
    total = settings.scheduling.total_gpus
    if gpus < total and sum(taken.values()) >= gpus:
        return f"live traffic needs {total - gpus} of {total} GPUs"
    if not taken:
        return f"it needs more GPUs than there are ({total})"
    return f"{sum(taken.values())} of {total} GPUs are in use, by workers of {', '.join(sorted(taken))}"


def _is_pausing(model: str, ledger: Ledger, settings: Settings) -> bool:
    """Whether the model's newest workers could not start, and the pause after that is not over.

    Without it, a wrong engine option would start a worker every few seconds for ever.
    """
    workers = ledger.workers.of_models([model])
    failures = 0
    for worker in workers:
        if worker.state != WorkerState.FAILED:
            break
        failures += 1
    if failures == 0:
        return False
    pause = pause_seconds(failures - 1, settings.scheduling.retry_run_seconds)
    return ledger.now() < workers[0].seen_at + pause
